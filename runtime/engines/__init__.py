"""Engines: what executes one rank of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from llmc.runtime.attention.metadata import PackedBatch
from llmc.runtime.decoding.sampling import Draws


class Engine(Protocol):
    """One rank. All ranks of a replica are given the same steps in the same order."""

    def run(self, batch: PackedBatch) -> np.ndarray:
        """Execute a step, extend the KV cache, return logits float32 [num_logits, padded_vocab]."""
        ...

    def decode(self, batch: PackedBatch, draws: Draws, end_ids: Sequence[int], steps: int) -> \
            np.ndarray | None:
        """A step, and the tokens that it and the steps after it lead to: int64 [steps, batch].

        A sequence's tokens after an end token mean nothing. None from an engine that leaves the
        choice of tokens to the caller; nothing was run then.
        """
        ...

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one cache row to another."""
        ...
