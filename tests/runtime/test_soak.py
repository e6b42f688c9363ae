"""Many short requests, some aborted: memory is stable."""

import pytest
from soaking import soak

import llmc


@pytest.mark.thorough
def test_50000_requests_leak_nothing(case_tp1):
    with llmc.LLM(case_tp1, kv_cache_tokens=1024) as llm:
        finished, sizes = soak(llm, 5000)
    assert finished > 40_000  # the others were aborted
    assert sizes[-1] < 1.02 * sizes[2]
