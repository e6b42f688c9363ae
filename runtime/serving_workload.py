"""A crowd of requests: how many tokens a second come out, and how long each has to wait."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.core.llm import LLM
from llmc.runtime.core.request import CompletionChunk
from llmc.runtime.metrics import Percentiles
from llmc.runtime.prompt_file import read_lines, read_requests
from llmc.runtime.prompts import Prompt
from llmc.runtime.sampling.params import SamplingParams

_INPUTS, _OUTPUTS = (32, 512), (16, 256)  # tokens of random requests, from and to


@dataclass(frozen=True)
class ServingWorkload:
    """Requests, and the seconds at which each comes."""

    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    arrivals: Sequence[float]


@dataclass(frozen=True)
class Report:
    """What came of it.

    Args:
        seconds: from the first arrival to the last token.
        time_to_first_token: of completions, from the arrival of their request.
        inter_token_latency: between tokens of a completion.
        cache_hits, cache_queries: prompt tokens found in the cache, and looked up.
    """

    requests: int
    output_tokens: int
    seconds: float
    output_tokens_per_sec: float
    requests_per_sec: float
    time_to_first_token: Percentiles
    inter_token_latency: Percentiles
    cache_hits: int
    cache_queries: int
    preemptions: int


def read_workload(llm: LLM, source: str, rate: float, shared_prefix: int = 0) -> ServingWorkload:
    """`random:N` requests of 32 to 512 tokens in and 16 to 256 out, as far as the model goes, or
    those of a prompt file; each after the one before as a Poisson process of so many a second has
    it.

    Args:
        rate: infinite: all at once.
        shared_prefix: random tokens that all random requests begin with.

    Raises:
        LlmcError: the source is neither, or one of its requests is not sound.
    """
    rng = np.random.default_rng(0)
    kind, _, number = source.partition(":")
    prompts: list[Prompt] = []
    if kind == "random" and number.isdecimal() and int(number) > 0:
        count, room = int(number), llm.manifest.dims.max_seq_len
        inputs = rng.integers(_INPUTS[0], _INPUTS[1] + 1, count)
        outputs = rng.integers(_OUTPUTS[0], _OUTPUTS[1] + 1, count)
        outputs = np.minimum(outputs, max(room // 2, 1))
        inputs = np.minimum(inputs, room - outputs - shared_prefix + 1)
        if min(inputs) < 1:
            raise LlmcError(f"shared_prefix {shared_prefix} leaves no room in {room} positions; "
                            f"give a shorter one")
        vocab_size = (llm.manifest.encoder or llm.manifest.dims).vocab_size
        prefix = rng.integers(0, vocab_size, shared_prefix).tolist()
        prompts += [prefix + rng.integers(0, vocab_size, size).tolist() for size in inputs]
        params = [SamplingParams(max_tokens=int(size), ignore_eos=True) for size in outputs]
    elif kind == "random":
        raise LlmcError(f"'{source}' does not say how many requests; write it like random:512")
    else:
        requests = read_requests(llm, read_lines(source), SamplingParams())
        problem = next((own.answer["error"] for own in requests if "error" in own.answer), None)
        if problem:
            raise LlmcError(f"'{source}', {problem}")
        prompts, params = [own.prompt for own in requests], [own.params for own in requests]
    gaps = rng.exponential(1 / rate, len(prompts))
    return ServingWorkload(prompts, params, (np.cumsum(gaps) - gaps[0]).tolist())


def measure_workload(llm: LLM, traffic: ServingWorkload,
                    progress: Callable[[CompletionChunk], object] = lambda piece: None) -> Report:
    """Let the requests come, and wait for all that they lead to."""
    before = llm.metrics()
    latest: dict[tuple[int, int], float] = defaultdict(lambda: -1.0)
    first, between = [], []
    pieces = llm.stream(traffic.prompts, traffic.params, arrivals=traffic.arrivals)
    start = now = time.perf_counter()  # arrivals count from the first piece that is asked for
    for piece in pieces:
        now = time.perf_counter() - start
        key = piece.index, piece.sample
        if latest[key] < 0:
            first.append(now - traffic.arrivals[piece.index])
        else:
            between.append(now - latest[key])
        latest[key] = now
        progress(piece)
    after = llm.metrics()
    count = len(first) + len(between)
    return Report(len(traffic.prompts), count, now, count / now, len(traffic.prompts) / now,
                  Percentiles.of(first), Percentiles.of(between),
                  *(after[name] - before[name]
                    for name in ("cache_hits", "cache_queries", "preemptions")))
