"""Metrics of `llmc bench --requests`, on a simulated clock."""

from types import SimpleNamespace

from llmc.runtime import serving_workload
from llmc.runtime.serving_workload import ServingWorkload, measure_workload


def test_latencies_count_from_the_arrival(monkeypatch):
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(serving_workload, "time", clock)

    class Served:
        def metrics(self):
            return dict.fromkeys(("cache_hits", "cache_queries", "preemptions"), 0)

        def stream(self, prompts, params, arrivals, cache_salt):
            clock.now += 5  # reads all prompts
            return self._pieces(arrivals)

        def _pieces(self, arrivals):
            begun = clock.now
            for index, arrival in enumerate(arrivals):
                for wait in (0.25, 0.5):
                    clock.now = max(clock.now, begun + arrival) + wait
                    yield SimpleNamespace(index=index, sample=0)

    report = measure_workload(Served(), ServingWorkload([[1], [2]], [None, None], [0.0, 10.0]))
    assert report.time_to_first_token.p50 == 0.25
    assert report.inter_token_latency.p50 == 0.5
    assert (report.output_tokens, report.seconds) == (4, 10.75)
