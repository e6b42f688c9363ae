"""Readers of prompts and conversations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import TYPE_CHECKING

import numpy as np

from llmc.errors import LlmcError, shown
from llmc.runtime.sampling.params import listed, whole

if TYPE_CHECKING:
    from llmc.runtime.multimodal.items import PlaceholderRange

Messages = str | Sequence[Mapping[str, object]]


ROW = -1  # placeholder of a token id: the next row of `prompt_embeds`


@dataclass(frozen=True, eq=False)
class EmbedsPrompt:
    """A prompt with rows in place of embeddings of its token ids.

    Args:
        token_ids: with ROW at the position of each row.
        rows: float32 [n, width], finite.
    """

    token_ids: list[int]
    rows: np.ndarray

    @staticmethod
    def of(value: object, name: str) -> EmbedsPrompt:
        """A prompt of rows alone; see `read_rows`."""
        rows = read_rows(value, name)
        return EmbedsPrompt([ROW] * len(rows), rows)


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """A prompt with images or audio; see `LLM.media_prompt`.

    Args:
        token_ids: with the tokens of each item in place of its placeholder.
        ranges: positions of the items.
    """

    token_ids: list[int]
    ranges: Sequence[PlaceholderRange]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class UnprocessedPrompt:
    """A prompt with images or audio as they were given.

    Args:
        prompt: a text or token ids, with a placeholder for each item.
        images, audio: see `LLM.media_prompt`.
    """

    prompt: str | list[int]
    images: Sequence[object]
    audio: Sequence[object]


# See `read_prompts`.
Prompt = str | Sequence[int] | Mapping[str, object] | EmbedsPrompt | MediaPrompt
_Read = str | list[int] | EmbedsPrompt | MediaPrompt | UnprocessedPrompt


def read_prompts(prompts: object) -> list[_Read]:
    """Read one prompt or several, each a text, token ids or a mapping.

    Token ids are in a list, tuple, numpy array or similar. A mapping has `prompt`, a text, or
    `prompt_token_ids`, with `images` or `audio` in place of the placeholders in them, if any; or
    `prompt_embeds`, an array [n, width]. With `prompt_embeds`,
    `prompt_token_ids` has -1 at the position of each row; without it, the prompt is the rows.

    Raises:
        LlmcError: the value is of another type.
    """
    if isinstance(prompts, str | Mapping | EmbedsPrompt | MediaPrompt):
        return [_read_prompt(prompts, "the prompt")]
    try:
        each = listed(list(prompts) if isinstance(prompts, Iterator) else prompts)
    except TypeError:
        raise LlmcError(f"prompts is {shown(prompts)}; give a text, a list of token ids, or a list "
                        f"of such prompts") from None
    if each and isinstance(each[0], Number):
        return [read_token_ids(each, "the prompt")]
    return [_read_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(each)]


def _read_prompt(prompt: object, name: str) -> _Read:
    """Read one of several prompts."""
    if isinstance(prompt, str | EmbedsPrompt | MediaPrompt):
        return prompt
    return _read_mapping(prompt, name) if isinstance(prompt, Mapping) \
        else read_token_ids(prompt, name)


def _read_mapping(prompt: Mapping[str, object], name: str) -> _Read:
    """Read a prompt that is a mapping.

    Raises:
        LlmcError: its keys or values are invalid; `name` is its name in the message.
    """
    keys = {str(key) for key, value in prompt.items() if value is not None}
    if "videos" in keys:
        raise LlmcError(f"{name} has videos, which llmc does not support; give some of their "
                        f"frames as images")
    media = {own: _read_media(prompt[own], own, name) for own in ("images", "audio") if own in keys}
    if any(media.values()) and keys - set(media) in ({"prompt"}, {"prompt_token_ids"}):
        text = _read_mapping({own: prompt[own] for own in keys - set(media)}, name)
        assert isinstance(text, str | list)
        return UnprocessedPrompt(text, media.get("images", []), media.get("audio", []))
    keys -= {own for own, items in media.items() if not items}
    if keys == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    if keys == {"prompt_token_ids"}:
        return read_token_ids(prompt["prompt_token_ids"], f"prompt_token_ids of {name}")
    if "prompt_embeds" not in keys or keys - {"prompt_token_ids", "prompt_embeds"}:
        listing = ", ".join(map(shown, sorted(keys))) or "none"
        raise LlmcError(f"{name} has the keys {listing}; give 'prompt' with a text or "
                        f"'prompt_token_ids', each with or without 'images' and 'audio', or "
                        f"'prompt_embeds' with or without 'prompt_token_ids'")
    rows = read_rows(prompt["prompt_embeds"], f"prompt_embeds of {name}")
    ids = [ROW] * len(rows) if "prompt_token_ids" not in keys else \
        read_token_ids(prompt["prompt_token_ids"], f"prompt_token_ids of {name}")
    if ids.count(ROW) != len(rows):
        raise LlmcError(f"{name} has {len(rows)} rows of prompt_embeds and {ids.count(ROW)} "
                        f"positions with -1 in prompt_token_ids; give one -1 for each row")
    return EmbedsPrompt(ids, rows)


def _read_media(value: object, key: str, name: str) -> list[object]:
    """Read the images or audio clips of a prompt.

    Raises:
        LlmcError: the value is no list; `key` and `name` are its names in the message.
    """
    if not isinstance(value, list | tuple):
        raise LlmcError(f"{key} of {name} is {shown(value)}; give a list")
    return list(value)


def read_rows(value: object, name: str) -> np.ndarray:
    """Read embeddings as float32 [n, width].

    Raises:
        LlmcError: the value is no such array, or not finite; `name` is its name in the message.
    """
    try:
        rows = np.asarray(value)
        if rows.dtype.kind != "f":
            raise TypeError
        rows = np.ascontiguousarray(rows, np.float32)
    except (TypeError, ValueError):
        kind = getattr(value, "dtype", type(value).__name__)
        raise LlmcError(f"{name} is {kind}; give an array of float32 [num_tokens, hidden_size]") \
            from None
    if rows.ndim != 2 or not len(rows):
        raise LlmcError(f"{name} has shape {list(rows.shape)}; give [num_tokens, hidden_size] with "
                        f"at least one row")
    if not np.isfinite(rows).all():
        raise LlmcError(f"{name} has NaN or infinite values; give finite embeddings")
    return rows


def read_token_ids(value: object, name: str) -> list[int]:
    """Read token ids, without checking the vocabulary.

    Raises:
        LlmcError: the value is of another type; `name` is its name in the message.
    """
    try:
        ids = listed(value)
    except TypeError:
        raise LlmcError(f"{name} is {shown(value)}; give a list of token ids") from None
    if all(type(token) is int for token in ids):  # the common case, fast
        return ids
    for token in ids:
        try:
            whole(token)
        except (TypeError, ValueError):
            raise LlmcError(f"{name} has {shown(token)} in place of a token id; give whole "
                            f"numbers") from None
    return [int(token) for token in ids]


def read_conversations(messages: object) -> list[Messages]:
    """Split a list of conversations; `read_messages` validates each."""
    if isinstance(messages, str):
        return [messages]
    try:
        each = listed(messages)
    except TypeError:
        each = []
    several = each and all(isinstance(own, Sequence) for own in each)
    return each if several else [messages]  # type: ignore[list-item]


def read_messages(messages: object, modalities: Collection[str] = ()) -> \
        list[Mapping[str, object]]:
    """Validate a conversation, or convert a user's text to one.

    Each message has a text `role`, and a `content` that is a text or a list of parts `{"type":
    "text", "text": …}`. An assistant's may be None or absent. Templates may read further keys, such
    as `tool_calls`.

    Args:
        modalities: types of parts without a text, such as `image`.

    Raises:
        LlmcError: the value is not such a list.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    try:
        each = listed(messages)
    except TypeError:
        each = []
    if not each:
        raise LlmcError(f"messages is {shown(messages)}; give a list like "
                        f'[{{"role": "user", "content": "…"}}]')
    for index, message in enumerate(each):
        if not isinstance(message, Mapping):
            raise LlmcError(f"message {index} is {shown(message)}; give one like "
                            f'{{"role": "user", "content": "…"}}')
        _check_message(index, message, modalities)
    return each


def _check_message(index: int, message: Mapping[str, object], modalities: Collection[str]) -> None:
    for key, expected, fits in (
            ("role", "a text", isinstance(message.get("role"), str)),
            ("content", 'a text, or parts like [{"type": "text", "text": "…"}]',
             _is_content(message.get("content"), message.get("role") == "assistant", modalities)),
            ("tool_calls", 'calls like [{"function": {"name": "…", "arguments": {}}}]',
             _are_calls(message.get("tool_calls")))):
        if not fits:
            value = f"is {shown(message[key])}" if key in message else "is missing"
            raise LlmcError(f"the {key} of message {index} {value}; give {expected}")


def _is_content(content: object, may_be_none: bool, modalities: Collection[str]) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and (part.get("type") in modalities or (
            part.get("type") == "text" and isinstance(part.get("text"), str))) for part in content)
    return isinstance(content, str) or (content is None and may_be_none)


def _are_calls(calls: object) -> bool:
    return calls is None or (isinstance(calls, list) and all(
        isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping)
        for call in calls))
