"""Soak test: many short requests of several clients, some aborted."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

import llmc

THREADS, AT_ONCE = 4, 25


def resident() -> int:
    """Return the resident pages of this process."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1])


def soak(llm: llmc.LLM, requests: int) -> tuple[int, list[int]]:
    """Run ten rounds of requests; check that each leaks nothing.

    Returns the number of finished completions, and the resident pages after each round.
    """
    sizes = []
    for turn in range(10):
        metrics = _turn(llm, turn, requests)
        assert metrics["running"] == metrics["waiting"] == metrics["cache_usage"] == 0
        sizes.append(resident())
    return metrics["finished"], sizes


def _turn(llm: llmc.LLM, turn: int, requests: int) -> dict[str, Any]:
    """Run `requests` requests; return the metrics after them."""
    threads = [threading.Thread(target=_call, args=(llm, THREADS * turn + index,
                                                    requests // THREADS))
               for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(0.2)  # the last aborted requests
    return llm.metrics()


def _call(llm: llmc.LLM, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(count // AT_ONCE):
        prompts = rng.integers(3, 250, (AT_ONCE, int(rng.integers(1, 12)))).tolist()
        params = llmc.SamplingParams(max_tokens=int(rng.integers(1, 4)), ignore_eos=True)
        for piece in (stream := llm.stream(prompts, params)):
            if piece.index > 5 and rng.random() < 0.01:
                stream.close()
                break
