"""What is in a case directory, in numbers. Needs only the manifest."""

from __future__ import annotations

from typing import Any

from llmc.artifacts.manifest import DTYPE_BYTES, Chip, Manifest

# Bytes of memory of GPUs that there are, of which this part is used, less what a step takes.
_GPUS = {"L4, RTX 4090 (24 GB)": 24e9, "A100 (40 GB)": 40e9, "L40S (48 GB)": 48e9,
         "A100, H100 (80 GB)": 80e9, "H200 (141 GB)": 141e9}
_USED, _STEP_BYTES = 0.9, 1e9


def _count_forms(chip: Chip) -> dict[str, int]:
    """How many weights there are in each form of fewer bits."""
    counts: dict[str, int] = {}
    for form in chip.quantization.values():
        name = f"{form.dtype}, groups of {form.group_size}"
        if form.activation_dtype:
            name += f", activations {form.activation_dtype}"
        if form.activation_scale:
            name += " by a fixed scale"
        if form.activation_group_size:
            name += f" in groups of {form.activation_group_size}"
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def summarize(manifest: Manifest, batch_size: int = 1) -> dict[str, Any]:
    """Per chip: weights, KV cache of `batch_size` full sequences and what an encoder makes of as
    many prompts, heads and files, in bytes; and for a GPU, about how many tokens its cache holds
    beside the weights, by kind of GPU.
    """
    length = manifest.dims.max_seq_len
    width, kv_width = DTYPE_BYTES[manifest.dtype], DTYPE_BYTES[manifest.kv_dtype]
    chips: list[dict[str, Any]] = []
    for chip in manifest.chips:
        cache = sum(kv_width * layer.token_size * length for layer in chip.cache)
        memory = 0
        if manifest.encoder is not None and chip.encoder is not None:
            memory = sum(width * manifest.encoder.max_seq_len * int(tensor.shape[-1])
                         for tensor in chip.encoder.outputs)
        chips.append({
            "rank": chip.rank, "weight_bytes": chip.weight_bytes,
            "kv_cache_bytes": cache * batch_size, "token_bytes": cache // length,
            "memory_bytes": memory * batch_size,
            "state_bytes": sum(state.size for state in chip.states) * batch_size,
            "num_heads": chip.num_heads[0] if chip.num_heads else 0,
            "num_kv_heads": chip.cache[0].num_kv_heads if chip.cache else 0,
            "steps": len(chip.all_steps),
            "quantization": _count_forms(chip),
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
        "dtype": manifest.dtype, "tp_size": manifest.tp_size, "target": manifest.target.kind,
        "llmc_version": manifest.llmc_version, "ops": manifest.ops, "chips": chips,
        "cache_tokens": tokens,
        "passes": [report.model_dump() for report in manifest.passes],
    }
