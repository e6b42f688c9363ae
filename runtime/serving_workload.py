"""Serving benchmark: throughput and latency of many concurrent requests."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.manifest import prompt_vocab_size
from llmc.errors import LlmcError
from llmc.runtime.benchmark import Speculation, without_drafts
from llmc.runtime.core.llm import LLM
from llmc.runtime.core.request import CompletionChunk
from llmc.runtime.metrics import Percentiles
from llmc.runtime.prompt_file import read_lines, read_requests
from llmc.runtime.prompts import Prompt
from llmc.runtime.random_images import RandomImages
from llmc.runtime.sampling.params import SamplingParams

_INPUTS, _OUTPUTS = (32, 512), (16, 256)  # ranges of lengths of random requests, in tokens


@dataclass(frozen=True)
class ServingWorkload:
    """Requests, and the arrival time of each in seconds."""

    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    arrivals: Sequence[float]


@dataclass(frozen=True)
class Report:
    """Measurements of a workload.

    Args:
        seconds: from the first arrival to the last token.
        time_to_first_token: TTFT of completions, from the arrival of their request.
        inter_token_latency: ITL of completions.
        cache_hits, cache_queries: prompt tokens found in the prefix cache, and looked up.
        speculation: comparison with plain decoding, if it was measured.
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
    speculation: Speculation | None = None


def read_workload(llm: LLM, source: str, rate: float, shared_prefix: int = 0,
                  images: RandomImages | None = None) -> ServingWorkload:
    """Create a workload of random requests or of a prompt file, with Poisson arrivals.

    Args:
        source: `random:N` for N requests with 32 to 512 input and 16 to 256 output tokens, limited
            by the model; or the path of a prompt file.
        rate: requests per second; infinite: all at once.
        shared_prefix: number of random tokens that all random requests share as prefix.
        images: images of each random request, preprocessed before the first one arrives.

    Raises:
        LlmcError: the source is invalid, or one of its requests is.
    """
    rng = np.random.default_rng(0)
    kind, _, number = source.partition(":")
    prompts: list[Prompt] = []
    if kind == "random" and number.isdecimal() and int(number) > 0:
        count, room = int(number), llm.manifest.dims.max_seq_len
        inputs = rng.integers(_INPUTS[0], _INPUTS[1] + 1, count)
        outputs = rng.integers(_OUTPUTS[0], _OUTPUTS[1] + 1, count)
        outputs = np.minimum(outputs, max(room // 2, 1))
        taken = shared_prefix + (0 if images is None else len(images.prompts(llm, [()], rng)[0][0]))
        inputs = np.minimum(inputs, room - outputs - taken + 1)
        if min(inputs) < 1:
            given = f"shared_prefix {shared_prefix} leaves" if images is None else \
                f"{taken} tokens of images and shared_prefix leave"
            raise LlmcError(f"{given} no room in {room} positions; give smaller ones")
        vocab_size = prompt_vocab_size(llm.manifest, "bench")
        prefix = rng.integers(0, vocab_size, shared_prefix).tolist()
        texts = [prefix + rng.integers(0, vocab_size, size).tolist() for size in inputs]
        prompts += texts if images is None else images.prompts(llm, texts, rng)[0]
        params = [SamplingParams(max_tokens=int(size), ignore_eos=True) for size in outputs]
    elif kind == "random":
        raise LlmcError(f"'{source}' has no number of requests; write it like random:512")
    elif images is not None:
        raise LlmcError(f"--images is given with '{source}'; name its images in the file")
    elif shared_prefix:
        raise LlmcError(f"--shared_prefix is given with '{source}'; leave it out, or give "
                        f"random:N")
    else:
        requests = read_requests(llm, read_lines(source), SamplingParams())
        problem = next((own.answer["error"] for own in requests if "error" in own.answer), None)
        if problem:
            raise LlmcError(f"'{source}', {problem}")
        prompts, params = [own.prompt for own in requests], [own.params for own in requests]
    gaps = rng.exponential(1 / rate, len(prompts))
    return ServingWorkload(prompts, params, (np.cumsum(gaps) - gaps[0]).tolist())


def compare_workload(llm: LLM, traffic: ServingWorkload, runs: int,
                     progress: Callable[[CompletionChunk], object] = lambda chunk: None) -> Report:
    """Run a workload in `runs` pairs, without and with drafts.

    Runs do not share cached prefixes.

    Returns:
        The run with drafts that has the median throughput, and the comparison.
    """
    before, plain, speculative = llm.metrics(), [], []
    for run in range(runs):
        with without_drafts(llm):
            plain.append(measure_workload(llm, traffic, progress, cache_salt=f"plain {run}"))
        speculative.append(measure_workload(llm, traffic, progress, cache_salt=f"drafts {run}"))
    rates = [[report.output_tokens_per_sec for report in each] for each in (plain, speculative)]
    speculative.sort(key=lambda report: report.output_tokens_per_sec)
    return dataclasses.replace(speculative[len(speculative) // 2],
                               speculation=Speculation.of(before, llm.metrics(), *rates))


def measure_workload(llm: LLM, traffic: ServingWorkload,
                     progress: Callable[[CompletionChunk], object] = lambda chunk: None,
                     cache_salt: str | None = None) -> Report:
    """Run a workload and measure it.

    Args:
        cache_salt: see `LLM.stream`.
    """
    before = llm.metrics()
    latest: dict[tuple[int, int], float] = defaultdict(lambda: -1.0)
    first, between = [], []
    chunks = llm.stream(traffic.prompts, traffic.params, arrivals=traffic.arrivals,
                        cache_salt=cache_salt)
    start = now = time.perf_counter()  # arrivals count from the first request for a chunk
    for chunk in chunks:
        now = time.perf_counter() - start
        key = chunk.index, chunk.sample
        if latest[key] < 0:
            first.append(now - traffic.arrivals[chunk.index])
        else:
            between.append(now - latest[key])
        latest[key] = now
        progress(chunk)
    after = llm.metrics()
    count = len(first) + len(between)
    return Report(len(traffic.prompts), count, now, count / now, len(traffic.prompts) / now,
                  Percentiles.of(first), Percentiles.of(between),
                  *(after[name] - before[name]
                    for name in ("cache_hits", "cache_queries", "preemptions")))
