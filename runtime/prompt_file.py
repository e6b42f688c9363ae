"""A prompt file: one JSON request a line in, one JSON result a line out."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import LlmcError, shown
from llmc.runtime.core.llm import LLM
from llmc.runtime.core.request import Completion, CompletionChunk
from llmc.runtime.prompts import Prompt, read_token_ids
from llmc.runtime.sampling.params import FIELDS, SamplingParams

_PROMPTS = ("prompt", "token_ids", "messages")
_FIELDS = tuple(field.name for field in FIELDS)
_KEYS = (*_PROMPTS, "id", *_FIELDS)


@dataclass(frozen=True)
class Request:
    """A line of a prompt file.

    `answer` is what its result begins with: `index`, counted from 0 without blank lines, `id` where
    the line has one, and `error` where it cannot be run.
    """

    answer: dict[str, Any]
    prompt: Prompt
    params: SamplingParams


def read_lines(path: str | Path) -> list[bytes]:
    """The lines of a prompt file; `-` is standard input.

    Raises:
        LlmcError: it cannot be read, or all its lines are blank.
    """
    name = "standard input" if str(path) == "-" else f"'{path}'"
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LlmcError(f"{name} cannot be read ({reason})") from error
    lines = content.splitlines()
    if not any(line.strip() for line in lines):
        raise LlmcError(f'{name} has no request; write one a line, like {{"prompt": "…"}}')
    return lines


def read_requests(llm: LLM, lines: Sequence[bytes], defaults: SamplingParams, *,
                  chat: bool = False) -> list[Request]:
    """The requests in lines that are not blank.

    A request has one of `prompt` (text), `token_ids` and `messages` (each with role and content,
    for the chat template), any fields of `SamplingParams`, and perhaps an `id`.

    Args:
        defaults: for fields that a request leaves out.
        chat: put each `prompt` into the model's chat template.
    """
    requests: list[Request] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        answer: dict[str, Any] = {"index": len(requests)}
        prompt: Prompt = ""
        params = defaults
        try:
            request = _parse(line)
            if "id" in request:
                answer["id"] = request["id"]
            prompt, params = _understand(llm, request, defaults, chat)
        except LlmcError as error:
            answer["error"] = f"line {number}: {error}"
        requests.append(Request(answer, prompt, params))
    return requests


def run_requests(llm: LLM, requests: Sequence[Request],
                 progress: Callable[[CompletionChunk], object] = lambda piece: None) -> \
        Iterator[dict[str, Any]]:
    """Yield each request's result, in their order, as soon as it is there.

    A result is the request's `answer` and, where that is no error, its n `completions` with the
    fields of `Completion`. `progress` is called with each piece.
    """
    sound = [request for request in requests if "error" not in request.answer]
    made: dict[int, list[Completion]] = {}  # of requests whose result is not given yet
    given = 0

    def ready() -> Iterator[dict[str, Any]]:
        nonlocal given
        while given < len(requests):
            answer, count = requests[given].answer, requests[given].params.n
            if "error" in answer:
                yield answer
            elif len(made.get(given, ())) == count:
                completions = sorted(made.pop(given), key=lambda completion: completion.sample)
                yield {**answer, "completions": [
                    dataclasses.asdict(dataclasses.replace(completion, index=given))
                    for completion in completions]}
            else:
                return
            given += 1

    yield from ready()
    for completion in llm.complete([request.prompt for request in sound],
                                   [request.params for request in sound],
                                   progress=progress) if sound else ():
        made.setdefault(sound[completion.index].answer["index"], []).append(completion)
        yield from ready()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LlmcError(f"this is not JSON ({error})") from error
    if not isinstance(request, dict):
        raise LlmcError('this is not a JSON object; write it like {"prompt": "…"}')
    return request


def _understand(llm: LLM, request: dict[str, Any], defaults: SamplingParams, chat: bool) -> \
        tuple[Prompt, SamplingParams]:
    """The prompt and parameters of a request.

    Raises:
        LlmcError: a key is missing, unknown or of the wrong kind, or the model refuses them.
    """
    unknown = next((key for key in request if key not in _KEYS), None)
    if unknown is not None:
        raise LlmcError(f"'{unknown}' is not a key of a request; there are: {', '.join(_KEYS)}")
    kinds = [kind for kind in _PROMPTS if kind in request]
    if len(kinds) != 1:
        raise LlmcError(f"a request has one of {', '.join(_PROMPTS)}, not "
                        f"{' and '.join(kinds) or 'none'}")
    fields = {key: value for key, value in request.items() if key in _FIELDS}
    if isinstance(fields.get("logit_bias"), dict):
        fields["logit_bias"] = {_token_id(key): bias
                                for key, bias in fields["logit_bias"].items()}
    params = dataclasses.replace(defaults, **fields)
    prompt = _prompt(llm, kinds[0], request[kinds[0]], chat)
    llm.stream([prompt], params)  # which would raise here what it raises for all
    return prompt, params


def _token_id(key: str) -> int:
    """A key of JSON, which is always a text."""
    if not key.isdecimal() or len(key) > 20 or str(int(key)) != key:
        raise LlmcError(f"{shown(key)} is no token id; write logit_bias like {{\"42\": -1.5}}")
    return int(key)


def _prompt(llm: LLM, kind: str, value: Any, chat: bool) -> Prompt:
    if kind == "token_ids":
        return read_token_ids(value, "token_ids")
    if kind == "messages":
        if not isinstance(value, list):
            raise LlmcError('messages is not a list like [{"role": "user", "content": "…"}]')
        return llm.chat_prompt(value)
    if not isinstance(value, str):
        raise LlmcError("prompt is not a text")
    return llm.chat_prompt(value) if chat else value
