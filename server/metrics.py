"""/metrics: Prometheus metrics under vLLM's names, and some under llmc's."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llmc.runtime.core.request import CompletionChunk
from llmc.server.limits import AdmissionGate
from llmc.server.model import GenerationJob

_LABELS = ("model_name", "engine")
# Buckets in seconds, those of vLLM.
_TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40,
                 80, 160, 640, 2560)
_ITL_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E_BUCKETS = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
                7680)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


# Returns a runtime's metrics (see `AsyncLLM.metrics`), and its gate.
Source = tuple[Callable[[], Mapping[str, Any]], AdmissionGate]


class _CurrentValues(Collector):
    """Collector of the current values of the runtimes and their admission gates, by model."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._all = [_ModelValues(*source, (name, "0")) for name, source in sources.items()]

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for values in self._all:
            for metric in values.collect():
                known = merged.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples += metric.samples
        return iter(merged.values())


class _ModelValues:
    """Current values of one model."""

    def __init__(self, read: Callable[[], Mapping[str, Any]], gate: AdmissionGate,
                 labels: tuple[str, str]) -> None:
        self._read, self._gate, self._labels = read, gate, labels

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        for name, text, value in (
                ("vllm:num_requests_running", "Running sequences.", now["running"]),
                ("vllm:num_requests_waiting", "Requests with a waiting sequence.",
                 now["waiting"]),
                ("vllm:kv_cache_usage_perc", "Used fraction of the KV cache, from 0 to 1.",
                 now["cache_usage"]),
                ("llmc:requests_inside", "Running and waiting requests.", self._gate.inside),
                ("llmc:sequences_inside", "Sequences of running and waiting requests.",
                 self._gate.sequences)):
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
                ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
                 now["cache_queries"]),
                ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.",
                 now["cache_hits"]),
                ("vllm:num_preemptions", "Preempted sequences.", now["preemptions"]),
                ("vllm:spec_decode_num_drafts", "Verifications of drafts.",
                 now["spec_decode_drafts"]),
                ("vllm:spec_decode_num_draft_tokens", "Draft tokens.",
                 now["spec_decode_draft_tokens"]),
                ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.",
                 now["spec_decode_accepted_tokens"]),
                ("llmc:nan_logits", "Requests that ended because of NaN or infinite logits.",
                 now["nan_logits"]),
                ("llmc:requests_refused", "Requests refused with 429.", self._gate.refused)):
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        counter = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in their draft.", labels=(*_LABELS, "position"))
        for position, value in enumerate(now["spec_decode_accepted_tokens_per_pos"]):
            counter.add_metric((*self._labels, str(position)), value)
        yield counter
        info = GaugeMetricFamily("vllm:cache_config_info", "Configuration of the KV cache.",
                                 labels=(*_LABELS, "block_size", "num_gpu_blocks", "cache_dtype"))
        info.add_metric((*self._labels, str(now["block_size"]), str(now["num_blocks"]), "auto"), 1)
        yield info
        if now["max_loras"]:
            adapters = GaugeMetricFamily(
                "vllm:lora_requests_info", "Adapters of running and of waiting requests.",
                labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"))
            adapters.add_metric((str(now["max_loras"]), ",".join(now["running_adapters"]),
                                 ",".join(now["waiting_adapters"])), 1)
            yield adapters


@dataclass(frozen=True)
class _ModelMetrics:
    """Metrics of the requests to the model, or to one of its adapters."""

    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    prompt: Histogram
    generation: Histogram
    prompts: Counter
    generated: Counter


class Metrics:
    """Metrics of requests. Those of an adapter have its name as the model's.

    Args:
        sources: of each model by its name, the value of the label.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_CurrentValues(sources))

        def times(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, _LABELS, buckets=buckets, registry=self._registry)

        def count(name: str, text: str) -> Counter:
            return Counter(name, text, _LABELS, registry=self._registry)

        self._all = _ModelMetrics(
            times("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT_BUCKETS),
            times("vllm:inter_token_latency_seconds", "Inter-token latency.", _ITL_BUCKETS),
            times("vllm:e2e_request_latency_seconds", "End-to-end latency.", _E2E_BUCKETS),
            times("vllm:request_prompt_tokens", "Tokens per prompt.", _TOKEN_BUCKETS),
            times("vllm:request_generation_tokens", "Tokens per completion.", _TOKEN_BUCKETS),
            count("vllm:prompt_tokens", "Prompt tokens."),
            count("vllm:generation_tokens", "Generated tokens."))
        self._success = Counter("vllm:request_success", "Finished completions.",
                                (*_LABELS, "finished_reason"), registry=self._registry)
        for name in sources:
            self._of(name)  # shown from the start

    def _of(self, name: str) -> _ModelMetrics:
        """Metrics of a model or an adapter."""
        return _ModelMetrics(*(getattr(self._all, field.name).labels(name, "0")
                               for field in fields(_ModelMetrics)))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def pooled(self, model_name: str, lengths: Sequence[int], seconds: float) -> None:
        """Measure a finished request to an embedding model or classifier.

        Args:
            model_name: of the model.
            lengths: tokens of each text.
            seconds: from its arrival to its end.
        """
        metrics = self._of(model_name)
        for length in lengths:
            metrics.prompt.observe(length)
        metrics.prompts.inc(sum(lengths))
        metrics.e2e.observe(seconds)
        self._success.labels(model_name, "0", "stop").inc(len(lengths))

    async def measured(self, model_name: str, job: GenerationJob,
                       batches: AsyncGenerator[list[CompletionChunk], None]) -> \
            AsyncGenerator[list[CompletionChunk], None]:
        """Yield a request's chunks, and measure each."""
        name = job.adapter or model_name
        metrics = self._of(name)
        timer = _RequestTimer(metrics, lambda reason: self._success.labels(name, "0", reason).inc())
        async with aclosing(batches):
            async for pieces in batches:
                if not timer.tokens:
                    for prompt in job.prompts:
                        metrics.prompt.observe(len(prompt))
                    metrics.prompts.inc(job.prompt_tokens)
                for piece in pieces:
                    timer.measure(piece)
                yield pieces


class _RequestTimer:
    """Measures one request.

    Args:
        finished: called with the reason of each finished completion.
    """

    def __init__(self, metrics: _ModelMetrics, finished: Callable[[str], None]) -> None:
        self._metrics, self._finished, self._started = metrics, finished, time.monotonic()
        self._latest: dict[tuple[int, int], tuple[float, int]] = {}  # time, tokens by completion
        self.tokens = 0

    def measure(self, piece: CompletionChunk) -> None:
        """Measure a chunk."""
        now, key, metrics = time.monotonic(), (piece.index, piece.sample), self._metrics
        before, number = self._latest.get(key, (self._started, 0))
        (metrics.itl if number else metrics.ttft).observe(now - before)
        generated = piece.token_id is not None
        metrics.generated.inc(generated)
        self.tokens += 1
        self._latest[key] = now, number + generated
        if piece.finish_reason:
            metrics.e2e.observe(now - self._started)
            metrics.generation.observe(number + generated)
            self._finished(piece.finish_reason)
            del self._latest[key]
