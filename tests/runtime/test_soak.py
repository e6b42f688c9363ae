"""Many short requests, some of which are aborted: memory stays as it is."""

import threading
import time

import numpy as np
import pytest

import llmc


def resident():
    """Pages of this process."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1])


def call(llm, seed, count):
    """So many requests, 25 at once; of some batches the rest is not wanted."""
    rng = np.random.default_rng(seed)
    for _ in range(count // 25):
        prompts = rng.integers(3, 250, (25, int(rng.integers(1, 12)))).tolist()
        params = llmc.SamplingParams(max_tokens=int(rng.integers(1, 4)), ignore_eos=True)
        for piece in (stream := llm.stream(prompts, params)):
            if piece.index > 5 and rng.random() < 0.01:
                stream.close()
                break


@pytest.mark.thorough
def test_50000_requests_leave_nothing_behind(case_tp1):
    with llmc.LLM(case_tp1, kv_cache_tokens=1024) as llm:
        sizes = []
        for turn in range(10):
            threads = [threading.Thread(target=call, args=(llm, 4 * turn + index, 1250))
                       for index in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            time.sleep(0.2)  # what was aborted last
            metrics = llm.metrics()
            assert metrics["running"] == metrics["waiting"] == metrics["cache_usage"] == 0
            sizes.append(resident())
        assert metrics["finished"] > 45_000
        assert sizes[-1] < 1.02 * sizes[2]
