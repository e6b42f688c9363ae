"""Engines: what executes one rank of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from llmc.runtime.attention.metadata import PackedBatch


class Engine(Protocol):
    """One rank. All ranks of a replica are given the same steps in the same order."""

    def run(self, batch: PackedBatch) -> np.ndarray:
        """Execute a step, extend the KV cache, return logits float32 [num_logits, padded_vocab]."""
        ...

    def decode(self, tokens: Sequence[int], past_lens: Sequence[int], steps: int) -> \
            np.ndarray | None:
        """Several greedy steps from each sequence's newest token: int64 [steps, batch].

        None from an engine that takes one step at a time.
        """
        ...

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one cache row to another."""
        ...
