"""Targets: one file per engine kind. Each writes what that engine needs of a rank, and returns the
files by their names in the rank's directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmc.compiler.quant.scheme import Scheme


@dataclass(frozen=True)
class Options:
    """What is asked for: of the compiler, and of the target.

    Args:
        dtype: of weights and activations.
        compute_capability: of the only GPUs that may run it; None for all.
        max_batch_size: sequences of a step, where the engine is built for so many.
        timing_cache: what a builder measured, kept for the next time; None: nowhere.
        progress: called with what a builder does.
        kv_dtype: of the KV caches; "" is dtype.
        target: engine kind.
        tp_size: chips that share the model.
        max_seq_len: positions a sequence may use; None: as many as the model's, in bounds.
        mem_max_seq_len: tokens of a prompt that the model's encoder takes, likewise.
        scheme: how the weights of linear layers are rounded to fewer bits; None: not at all.
        head_scheme: the same of the LM head's.
        group_size: of both, as it was asked for; 0: it was not.
        quantize_activations: whether what these layers multiply is to be rounded too.
        calibrated: whether that has been done before partition, on a text.
        dequantize: whether what a checkpoint has in fewer bits is read as numbers of `dtype`.
        requantize: whether these are quantized again, by `scheme`.
        expert_parallel: whether chips have whole experts, not some columns of each.
        columns_together: columns of a weight that stay on one rank; 0: as `scheme` has groups.
        vocab_multiple: the padded vocabulary is a multiple of this; None: of 64 and tp_size.
    """

    dtype: str = "float32"
    compute_capability: str | None = None
    max_batch_size: int = 64
    timing_cache: Path | None = None
    progress: Callable[[str], None] = lambda text: None
    kv_dtype: str = ""
    target: str = "cpu"
    tp_size: int = 1
    max_seq_len: int | None = None
    mem_max_seq_len: int | None = None
    vocab_multiple: int | None = None
    scheme: Scheme | None = None
    head_scheme: Scheme | None = None
    group_size: int = 0
    quantize_activations: bool = False
    calibrated: bool = False
    dequantize: bool = False
    requantize: bool = False
    expert_parallel: bool = False
    columns_together: int = 0
