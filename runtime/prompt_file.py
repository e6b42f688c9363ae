"""Prompt files: JSON Lines of requests in, JSON Lines of results out."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import LlmcError, shown
from llmc.runtime.core.llm import LLM
from llmc.runtime.core.request import Completion, CompletionChunk
from llmc.runtime.multimodal.messages import user_message
from llmc.runtime.prompts import Prompt, read_token_ids
from llmc.runtime.sampling.params import FIELDS, SamplingParams

PROMPT_KEYS = ("prompt", "token_ids", "messages")
_EXAMPLES = {"images": "a.png", "audio": "a.wav"}  # files by the key of a request
MEDIA_KEYS = tuple(_EXAMPLES)
_FIELDS = tuple(field.name for field in FIELDS)
_KEYS = (*PROMPT_KEYS, *MEDIA_KEYS, "id", "adapter", *_FIELDS)


@dataclass(frozen=True)
class Request:
    """A line of a prompt file.

    Args:
        answer: start of its result: `index`, counted from 0 without blank lines; `id`, if given;
            `error`, if the request is invalid.
    """

    answer: dict[str, Any]
    prompt: Prompt
    params: SamplingParams
    adapter: str | None = None


def read_lines(path: str | Path) -> list[bytes]:
    """Read the lines of a prompt file; `-` is standard input.

    Raises:
        LlmcError: it cannot be read, or all lines are blank.
    """
    name = "standard input" if str(path) == "-" else f"'{path}'"
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LlmcError(f"{name} cannot be read ({reason}); give a file of JSON lines") from error
    lines = content.splitlines()
    if not any(line.strip() for line in lines):
        raise LlmcError(f'{name} has no request; write one a line, like {{"prompt": "…"}}')
    return lines


def read_requests(llm: LLM, lines: Sequence[bytes], defaults: SamplingParams, *,
                  chat: bool = False, adapter: str | None = None) -> list[Request]:
    """Parse and validate the lines that are not blank.

    A request has one of `prompt` (text), `token_ids` and `messages` (each with role and content,
    for the chat template), any fields of `SamplingParams`, and an optional `id` and `adapter`.
    `prompt` and `token_ids` may have `images` and `audio`, paths or data: URLs.

    Args:
        defaults: for fields that a request omits.
        chat: put each `prompt` into the model's chat template.
        adapter: name of the LoRA adapter of requests that name none.
    """
    requests: list[Request] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        answer: dict[str, Any] = {"index": len(requests)}
        prompt: Prompt = ""
        params, own = defaults, adapter
        try:
            request = _parse(line)
            if "id" in request:
                answer["id"] = request["id"]
            own = request.get("adapter", adapter)
            prompt, params = _read_request(llm, request, defaults, chat, own)
        except LlmcError as error:
            answer["error"] = f"line {number}: {error}"
        requests.append(Request(answer, prompt, params, own))
    return requests


def run_requests(llm: LLM, requests: Sequence[Request],
                 progress: Callable[[CompletionChunk], object] = lambda piece: None) -> \
        Iterator[dict[str, Any]]:
    """Yield each request's result, in their order, as soon as it is complete.

    A result is the request's `answer` and, without an error, its n `completions` with the fields of
    `Completion`.

    Args:
        progress: called with each chunk.
    """
    valid = [request for request in requests if "error" not in request.answer]
    finished: dict[int, list[Completion]] = {}  # by index of the request
    next_index = 0

    def ready() -> Iterator[dict[str, Any]]:
        nonlocal next_index
        while next_index < len(requests):
            answer, count = requests[next_index].answer, requests[next_index].params.n
            if "error" in answer:
                yield answer
            elif len(finished.get(next_index, ())) == count:
                completions = sorted(finished.pop(next_index), key=lambda each: each.sample)
                yield {**answer, "completions": [
                    dataclasses.asdict(dataclasses.replace(completion, index=next_index))
                    for completion in completions]}
            else:
                return
            next_index += 1

    yield from ready()
    for completion in llm.complete([request.prompt for request in valid],
                                   [request.params for request in valid],
                                   adapter=[request.adapter for request in valid],
                                   progress=progress) if valid else ():
        finished.setdefault(valid[completion.index].answer["index"], []).append(completion)
        yield from ready()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LlmcError(f"this is not JSON ({error})") from error
    if not isinstance(request, dict):
        raise LlmcError('this is not a JSON object; write it like {"prompt": "…"}')
    return request


def _read_request(llm: LLM, request: dict[str, Any], defaults: SamplingParams, chat: bool,
                  adapter: str | None) -> tuple[Prompt, SamplingParams]:
    """Read a request's prompt and parameters.

    Raises:
        LlmcError: a key is missing, unknown or of the wrong type, or unsupported by the model.
    """
    unknown = next((key for key in request if key not in _KEYS), None)
    if unknown is not None:
        raise LlmcError(f"'{unknown}' is not a key of a request; there are: {', '.join(_KEYS)}")
    fields = {key: value for key, value in request.items() if key in _FIELDS}
    if isinstance(fields.get("logit_bias"), dict):
        fields["logit_bias"] = {_token_id(key): bias
                                for key, bias in fields["logit_bias"].items()}
    params = dataclasses.replace(defaults, **fields)
    prompt = read_prompt(llm, request, chat)
    llm.stream([prompt], params, adapter=[adapter])  # validates the request without running it
    return prompt, params


def _token_id(key: str) -> int:
    """Read a token id from a JSON key, which is always a text."""
    if not key.isdecimal() or len(key) > 20 or str(int(key)) != key:
        raise LlmcError(f"{shown(key)} is not a token id; write logit_bias like {{\"42\": -1.5}}")
    return int(key)


def read_prompt(llm: LLM, request: Mapping[str, Any], chat: bool) -> Prompt:
    """Read the prompt of a request; see `read_requests`.

    Args:
        chat: put its `prompt` into the model's chat template.

    Raises:
        LlmcError: a key is missing or of the wrong type, or an image or audio clip is invalid.
    """
    kinds = [kind for kind in PROMPT_KEYS if kind in request]
    if len(kinds) != 1:
        raise LlmcError(f"a request has one of {', '.join(PROMPT_KEYS)}, not "
                        f"{' and '.join(kinds) or 'none'}")
    kind, value = kinds[0], request[kinds[0]]
    media: dict[str, Any] = {own: request.get(own, ()) for own in MEDIA_KEYS}
    for name, own in media.items():
        if not isinstance(own, list | tuple) or not all(isinstance(each, str) for each in own):
            raise LlmcError(f'{name} is not a list of paths or data: URLs like '
                            f'["{_EXAMPLES[name]}"]')
    given = next((name for name, own in media.items() if own), None)
    if kind == "messages":
        if not isinstance(value, list):
            raise LlmcError('messages is not a list like [{"role": "user", "content": "…"}]')
        if given is not None:
            raise LlmcError(f'{given} is given with messages; put parts like {{"type": '
                            f'"{given.removesuffix("s")}", "path": "{_EXAMPLES[given]}"}} into '
                            f'their contents')
        return llm.chat_prompt(value)
    if kind == "prompt" and not isinstance(value, str):
        raise LlmcError("prompt is not a text")
    if kind == "prompt" and chat:
        return llm.chat_prompt([user_message(value, **media)])
    prompt: str | list[int] = value if kind == "prompt" else read_token_ids(value, "token_ids")
    return llm.media_prompt(prompt, **media) if given is not None else prompt
