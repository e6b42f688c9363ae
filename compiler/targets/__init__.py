"""Targets: one file per engine kind. Each writes what that engine needs of a rank, and returns the
files by their names in the rank's directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """What a target is asked for.

    Args:
        dtype: of weights and activations.
        compute_capability: of the only GPUs that may run it; None for all.
        max_batch_size: sequences of a step, where the engine is built for so many.
        timing_cache: what a builder measured, kept for the next time; None: nowhere.
        progress: called with what a builder does.
        kv_dtype: of the KV caches; "" is dtype.
        mem_max_seq_len: tokens of a prompt that the model's encoder takes; 0: it has none.
    """

    dtype: str = "float32"
    compute_capability: str | None = None
    max_batch_size: int = 64
    timing_cache: Path | None = None
    progress: Callable[[str], None] = lambda text: None
    mem_max_seq_len: int = 0
    kv_dtype: str = ""
