"""Fixtures for llmc inside vLLM, on SmolLM2; run by `make test-vllm`."""

import os
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") and find_spec("llmc_vllm") else ["test_*.py"]
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")  # which imports vLLM once
os.environ["VLLM_NO_USAGE_STATS"] = "1"


@pytest.fixture(scope="session")
def prompts():
    """Token ids of many lengths, some with a shared prefix."""
    import numpy as np

    rng = np.random.default_rng(0)
    begin = rng.integers(100, 40_000, 70).tolist()
    return [[*begin[:length], *rng.integers(100, 40_000, more).tolist()]
            for length, more in ((0, 1), (0, 5), (16, 0), (40, 3), (64, 30), (70, 120), (70, 1),
                                 (33, 9))]
