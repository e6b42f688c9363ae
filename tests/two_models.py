"""Isolation of two models on one GPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import llmc

ROUNDS = 12


def check(case: Path, searching: Path, *, at_once: bool = True) -> None:
    """Check that two concurrent models give the same results as each alone.

    Prompts are short and long; `searching`, compiled for it, runs beam search. Step facts of one
    model, such as sequence lengths and block tables, are invalid for the other. No prefix is cached
    between rounds: cached prompts use other kernels, whose sums differ in 16 bits.
    """
    rng = np.random.default_rng(0)
    long, short = rng.integers(3, 100, 400).tolist(), rng.integers(3, 100, 7).tolist()
    greedy = llmc.SamplingParams(max_tokens=24, ignore_eos=True)
    beams = llmc.SamplingParams(max_tokens=24, ignore_eos=True, beam_width=2)

    def read(llm: llmc.LLM, first: list[int], then: list[int]) -> list[np.ndarray]:
        """Return logits of prompts of different lengths, and of a batch continued by a token."""
        made = [llm.logits(first), llm.logits(then)]
        session = llm.session(2)
        made.append(session.extend([first[:300], then]))
        made += [session.extend([[5], [6]]) for _ in range(3)]
        llm.generate([first[:50], then], greedy)  # in captured steps
        return made

    def search(llm: llmc.LLM) -> list[np.ndarray]:
        found = llm.beam_search([short, long[:90]], beams)
        return [found.output_ids, found.scores]

    options: dict[str, Any] = dict(max_batch_size=4, prefix_reuse=False)
    with llmc.LLM(case, **options) as one, llmc.LLM(searching, **options) as other:
        def of_one() -> list[np.ndarray]:
            return read(one, long, short)

        def of_other() -> list[np.ndarray]:
            return [*search(other), *read(other, short, long)]

        expected = of_one(), of_other()
        for _ in range(ROUNDS if at_once else 2):
            if at_once:
                with ThreadPoolExecutor(2) as threads:
                    futures = [threads.submit(work) for work in (of_one, of_other)]
                    found = tuple(future.result() for future in futures)
            else:
                found = of_one(), of_other()
            for arrays, wanted in zip(found, expected, strict=True):
                for array, truth in zip(arrays, wanted, strict=True):
                    if truth.dtype.kind == "i":
                        assert np.array_equal(array, truth)
                    else:
                        np.testing.assert_allclose(array, truth, atol=1e-2 * np.ptp(truth))
