"""Sizes of a case directory, from its manifest alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.artifacts.manifest import (
    DTYPE_BYTES,
    AudioEncoderProgram,
    ImageEncoderProgram,
    Manifest,
    WeightForm,
)

# Memory of common GPUs in bytes, the fraction to use, and what a step takes of it.
_GPUS = {"L4, RTX 4090 (24 GB)": 24e9, "A100 (40 GB)": 40e9, "L40S (48 GB)": 48e9,
         "A100, H100 (80 GB)": 80e9, "H200 (141 GB)": 141e9}
_USED, _STEP_BYTES = 0.9, 1e9


def _count_schemes(quantization: Mapping[str, WeightForm]) -> dict[str, int]:
    """Number of weights of each quantization scheme."""
    counts: dict[str, int] = {}
    for scheme in quantization.values():
        name = f"{scheme.dtype}, groups of {scheme.group_size}"
        if scheme.activation_dtype:
            name += f", activations {scheme.activation_dtype}"
        if scheme.activation_scale:
            name += " by a fixed scale"
        if scheme.activation_group_size:
            name += f" in groups of {scheme.activation_group_size}"
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def _media_encoder(program: AudioEncoderProgram | ImageEncoderProgram | None) -> \
        dict[str, Any] | None:
    """The entry of an encoder, with the number of weights of each quantization scheme."""
    return None if program is None else {
        **program.model_dump(), "quantization": _count_schemes(program.quantization)}


def summarize(manifest: Manifest, batch_size: int = 1) -> dict[str, Any]:
    """Summarize a manifest.

    Args:
        batch_size: sequences of maximum length, for sizes of the KV cache, encoder outputs and
            recurrent states.

    Returns:
        The manifest's contents; per chip, sizes in bytes of weights, caches and files; and in
        `cache_tokens`, the approximate KV-cache capacity in tokens, by GPU.
    """
    length = manifest.dims.max_seq_len
    width, kv_width = DTYPE_BYTES[manifest.dtype], DTYPE_BYTES[manifest.kv_dtype]
    chips: list[dict[str, Any]] = []
    for chip in manifest.chips:
        layers = (*chip.cache, *chip.draft_layers)
        cache = sum(kv_width * layer.token_size * length for layer in layers)
        memory = 0
        if chip.encoder is not None:
            memory = sum(width * manifest.mem_max_seq_len * int(tensor.shape[-1])
                         for tensor in chip.encoder.outputs)
        chips.append({
            "rank": chip.rank, "weight_bytes": chip.weight_bytes,
            "kv_cache_bytes": cache * batch_size, "token_bytes": cache // length,
            "memory_bytes": memory * batch_size,
            "state_bytes": sum(state.size for state in chip.states) * batch_size,
            "num_heads": chip.num_heads[0] if chip.num_heads else 0,
            "num_kv_heads": chip.cache[0].num_kv_heads if chip.cache else 0,
            "steps": len(chip.all_steps),
            "quantization": _count_schemes(chip.quantization),
            "file_bytes": sum(f.size for f in manifest.files if f.path.startswith(f"{chip.path}/")),
        })
    tokens = {}
    if manifest.target.spec.paged:
        tokens = {name: max(0, min(int((size * _USED - _STEP_BYTES - chip["weight_bytes"])
                                       / chip["token_bytes"]) for chip in chips))
                  for name, size in _GPUS.items()}
    return {
        "source": manifest.source.model_dump(), "dims": manifest.dims.model_dump(),
        "encoder": manifest.encoder.model_dump() if manifest.encoder else None,
        "draft": manifest.draft.model_dump() if manifest.draft else None,
        "image": _media_encoder(manifest.image), "audio": _media_encoder(manifest.audio),
        "pooling": manifest.pooling.model_dump() if manifest.pooling else None,
        "dtype": manifest.dtype, "tp_size": manifest.tp_size, "target": manifest.target.kind,
        "llmc_version": manifest.llmc_version, "ops": manifest.ops, "chips": chips,
        "cache_tokens": tokens,
        "passes": [report.model_dump() for report in manifest.passes],
    }
