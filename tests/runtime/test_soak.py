"""Many short requests, some of which are aborted: memory stays as it is."""

import pytest
from soaking import resident, soak

import llmc


@pytest.mark.thorough
def test_50000_requests_leave_nothing_behind(case_tp1):
    with llmc.LLM(case_tp1, kv_cache_tokens=1024) as llm:
        sizes = []
        for turn in range(10):
            metrics = soak(llm, turn, 5000)
            sizes.append(resident())
    assert metrics["finished"] > 45_000
    assert sizes[-1] < 1.02 * sizes[2]
