"""/metrics: what routers and dashboards know of vLLM, under its names, and llmc's own beside."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llmc.runtime.core.request import CompletionChunk
from llmc.server.limits import AdmissionGate
from llmc.server.model import GenerationJob

_LABELS = ("model_name", "engine")
# Seconds, as vLLM's.
_FIRST = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
          160, 640, 2560)
_BETWEEN = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class _Now(Collector):
    """What the runtime and the gate say of themselves when they are asked."""

    def __init__(self, read: Callable[[], Mapping[str, Any]], gate: AdmissionGate,
                 labels: tuple[str, str]) -> None:
        self._read, self._gate, self._labels = read, gate, labels

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        for name, text, value in (
                ("vllm:num_requests_running", "Sequences that are decoded.", now["running"]),
                ("vllm:num_requests_waiting", "Requests of which something waits.",
                 now["waiting"]),
                ("vllm:kv_cache_usage_perc", "Part of the KV cache that is used, from 0 to 1.",
                 now["cache_usage"]),
                ("llmc:requests_inside", "Requests that generate or wait.", self._gate.inside),
                ("llmc:sequences_inside", "Sequences of these requests.",
                 self._gate.sequences)):
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
                ("vllm:prefix_cache_queries", "Prompt tokens looked up.", now["cache_queries"]),
                ("vllm:prefix_cache_hits", "Of these, in the cache.", now["cache_hits"]),
                ("vllm:num_preemptions", "Sequences that gave their blocks back.",
                 now["preemptions"]),
                ("llmc:nan_logits", "Requests that ended because of NaN or infinite logits.",
                 now["nan_logits"]),
                ("llmc:requests_refused", "Requests that were told to come again.",
                 self._gate.refused)):
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=(
            *_LABELS, "block_size", "num_gpu_blocks", "cache_dtype"))
        info.add_metric((*self._labels, str(now["block_size"]), str(now["num_blocks"]), "auto"), 1)
        yield info


class Metrics:
    """What is measured of requests.

    Args:
        read: the runtime's own metrics, as `AsyncLLM.metrics` gives them.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]], gate: AdmissionGate,
                 model_name: str) -> None:
        self._registry = CollectorRegistry()
        labels = (model_name, "0")
        self._registry.register(_Now(read, gate, labels))

        def times(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, _LABELS, buckets=buckets,
                             registry=self._registry).labels(*labels)

        def count(name: str, text: str) -> Counter:
            return Counter(name, text, _LABELS, registry=self._registry).labels(*labels)

        self._first = times("vllm:time_to_first_token_seconds", "Until a first token.", _FIRST)
        self._between = times("vllm:inter_token_latency_seconds", "Between tokens.", _BETWEEN)
        self._whole = times("vllm:e2e_request_latency_seconds", "Until the last token.", _WHOLE)
        self._prompt = times("vllm:request_prompt_tokens", "Of a prompt.", _TOKENS)
        self._generation = times("vllm:request_generation_tokens", "Of a completion.", _TOKENS)
        self._prompts = count("vllm:prompt_tokens", "Of prompts.")
        self._generated = count("vllm:generation_tokens", "Of completions.")
        self._success = Counter("vllm:request_success", "Completions that ended.",
                                (*_LABELS, "finished_reason"), registry=self._registry)
        self._labels = labels

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)

    async def measured(self, job: GenerationJob,
                       batches: AsyncGenerator[list[CompletionChunk], None]) -> \
            AsyncGenerator[list[CompletionChunk], None]:
        """The pieces of a request, of which each is measured as it passes."""
        watch = _Watch(self)
        async with aclosing(batches):
            async for pieces in batches:
                if not watch.tokens:
                    for prompt in job.prompts:
                        self._prompt.observe(len(prompt))
                    self._prompts.inc(job.prompt_tokens)
                for piece in pieces:
                    watch.see(piece)
                yield pieces


class _Watch:
    """Measures one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._started = metrics, time.monotonic()
        self._latest: dict[tuple[int, int], tuple[float, int]] = {}  # of each completion
        self.tokens = 0

    def see(self, piece: CompletionChunk) -> None:
        """A token has come."""
        now, key, own = time.monotonic(), (piece.index, piece.sample), self._metrics
        before, number = self._latest.get(key, (self._started, 0))
        (own._between if number else own._first).observe(now - before)
        generated = piece.token_id is not None
        own._generated.inc(generated)
        self.tokens += 1
        self._latest[key] = now, number + generated
        if piece.finish_reason:
            own._whole.observe(now - self._started)
            own._generation.observe(number + generated)
            own._success.labels(*own._labels, piece.finish_reason).inc()
            del self._latest[key]
