"""Prompt files of embedding models and classifiers: JSON Lines of texts in, of results out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmc.artifacts.manifest import PoolingInfo
from llmc.errors import LlmcError, shown
from llmc.runtime.core.llm import LLM
from llmc.runtime.core.pooling import Input, classifications, relevance, vectors
from llmc.runtime.prompts import read_token_ids

_TEXTS = ("prompt", "token_ids", "query")
_KEYS = (*_TEXTS, "documents", "id", "dimensions", "prompt_name", "truncate_prompt_tokens")
_BATCH = 1024  # texts that are computed together


@dataclass(frozen=True)
class PoolingLine:
    """A line of a prompt file.

    Args:
        answer: start of its result: `index`, `id` if given, and `error` if the line is invalid.
        inputs: the text; or the texts or pairs of a query and its documents.
        result: returns the rest of the result, given the inputs' rows.
    """

    answer: dict[str, Any]
    inputs: Sequence[Input] = ()
    result: Callable[[Sequence[np.ndarray]], dict[str, Any]] = lambda rows: {}


def read_lines(llm: LLM, lines: Sequence[bytes], truncate: int | None = None) -> list[PoolingLine]:
    """Parse and tokenize the lines that are not blank.

    A line has one of `prompt` (text), `token_ids`, and `query` with `documents`. It may have `id`,
    `truncate_prompt_tokens`, and for an embedding model `dimensions` and `prompt_name`.

    Args:
        llm: the model.
        lines: of the file.
        truncate: `truncate_prompt_tokens` of lines without it.
    """
    info = llm.pooling.info("rows", "embed", "classify", "token_classify")
    read: list[PoolingLine] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        answer: dict[str, Any] = {"index": len(read)}
        try:
            request = _parse(line)
            if "id" in request:
                answer["id"] = request["id"]
            read.append(_read(llm, info, request, answer, truncate))
        except LlmcError as error:
            read.append(PoolingLine({**answer, "error": f"line {number}: {error}"}))
    return read


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LlmcError(f"it is not JSON ({error}); write it like {{\"prompt\": \"…\"}}") from None
    if not isinstance(request, dict) or sum(key in request for key in _TEXTS) != 1:
        raise LlmcError(f"expected an object with one of {', '.join(_TEXTS)}; write it like "
                        f"{{\"prompt\": \"…\"}}")
    unknown = next((key for key in request if key not in _KEYS), None)
    if unknown is not None:
        raise LlmcError(f"unknown field {shown(unknown)}; use some of {', '.join(_KEYS)}")
    return request


def _read(llm: LLM, info: PoolingInfo, request: dict[str, Any], answer: dict[str, Any],
          truncate: int | None) -> PoolingLine:
    truncate = request.get("truncate_prompt_tokens", truncate)
    if "query" in request:
        return PoolingLine(answer, llm.pooling.scored(
            request["query"], request.get("documents", ()), truncate),
            lambda rows: {"scores": relevance(rows, info)})
    text = read_token_ids(request["token_ids"], "token_ids") if "token_ids" in request \
        else request["prompt"]
    dimensions, name = request.get("dimensions"), request.get("prompt_name")
    if info.task != "embed":
        for key, value in (("dimensions", dimensions), ("prompt_name", name)):
            if value is not None:
                raise LlmcError(f"{key} is given, but the model was compiled for task "
                                f"{info.task}; leave it out")
        inputs = llm.pooling.inputs([text], truncate)
        return PoolingLine(answer, inputs, lambda rows: _classes(rows[0], info))
    vectors([], info, dimensions)
    return PoolingLine(
        answer, llm.pooling.inputs([text], truncate, llm.pooling.prompt(info, name)),
        lambda rows: {"embedding": vectors(rows, info, dimensions)[0].tolist()})


def _classes(row: np.ndarray, info: PoolingInfo) -> dict[str, Any]:
    own = classifications(row, info)
    return {"tokens": [*map(asdict, own)]} if isinstance(own, list) else asdict(own)


def run_lines(llm: LLM, lines: Sequence[PoolingLine],
              progress: Callable[[int], object] = lambda tokens: None) -> Iterator[dict[str, Any]]:
    """Yield each line's result, in their order.

    Args:
        llm: the model.
        lines: of `read_lines`.
        progress: called with numbers of tokens that were read.
    """
    start = 0
    while start < len(lines):
        stop, count = start, 0
        while stop < len(lines) and (stop == start or count + len(lines[stop].inputs) <= _BATCH):
            count += len(lines[stop].inputs)
            stop += 1
        inputs = [own for line in lines[start:stop] for own in line.inputs]
        rows = iter(llm.pool(inputs))
        progress(sum(len(own.token_ids) for own in inputs))
        for line in lines[start:stop]:
            own = [next(rows) for _ in line.inputs]
            yield line.answer if "error" in line.answer else {**line.answer, **line.result(own)}
        start = stop
