"""Engines: what executes one rank of a model."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from llmc.runtime.attention.metadata import PackedBatch

MAX_TOKENS = 4096  # packed tokens of a step, unless one prompt is longer
MAX_LOGITS = 512  # rows of logits that every engine has room for in a step


class Engine(Protocol):
    """One rank. All ranks of a replica are given the same steps in the same order."""

    def run(self, batch: PackedBatch) -> np.ndarray:
        """Execute a step, extend the KV cache, return logits float32 [num_logits, padded_vocab]."""
        ...

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one cache row to another."""
        ...
