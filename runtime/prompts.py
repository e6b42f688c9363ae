"""Readers of prompts and conversations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Number

from llmc.errors import LlmcError, shown
from llmc.runtime.sampling.params import listed, whole

Prompt = str | Sequence[int]
Messages = str | Sequence[Mapping[str, object]]


def read_prompts(prompts: object) -> list[str | list[int]]:
    """Read one prompt or several, each a text or token ids.

    Token ids are in a list, tuple, numpy array or similar.

    Raises:
        LlmcError: the value is of another type.
    """
    if isinstance(prompts, str):
        return [prompts]
    try:
        each = listed(list(prompts) if isinstance(prompts, Iterator) else prompts)
    except TypeError:
        raise LlmcError(f"prompts is {shown(prompts)}; give a text, a list of token ids, or a list "
                        f"of such prompts") from None
    if each and isinstance(each[0], Number):
        return [read_token_ids(each, "the prompt")]
    return [prompt if isinstance(prompt, str) else read_token_ids(prompt, f"prompt {index}")
            for index, prompt in enumerate(each)]


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
