"""Engines: what executes one rank of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from llmc.runtime.attention.metadata import PackedBatch

BLOCK_SIZE = 16  # positions of a block of a GPU's KV cache
MAX_TOKENS = 4096  # packed tokens of a step, unless one prompt is longer
MAX_LOGITS = 512  # rows of logits that every engine has room for in a step


class Engine(Protocol):
    """One rank. All ranks of a replica are given the same steps in the same order."""

    def run(self, batch: PackedBatch) -> np.ndarray:
        """Execute a step, extend the KV cache, return logits float32 [num_logits, padded_vocab]."""
        ...

    def encode(self, batch: PackedBatch, rows: Sequence[int]) -> None:
        """Run the encoder on prompts, each from its start, and keep what the decoder needs of each
        in its row of the memory.
        """
        ...

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one cache row to another."""
        ...
