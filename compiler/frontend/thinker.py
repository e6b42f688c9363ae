"""Checkpoints of a model that answers in text and of another that speaks its answers.

    config.json   thinker_config, and configs of the model that speaks
    tensors       thinker.*, and those of the model that speaks

The thinker, which reads text, images and audio, is compiled as if the checkpoint had no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmc.compiler.quant.readers.decoder import Decoded

_CONFIG, _PREFIX = "thinker_config", "thinker."
# Keys of the whole config that hold for the thinker.
_SHARED = ("architectures", "quantization_config", "compression_config", "dtype", "torch_dtype")


def has_thinker(plain: Mapping[str, Any]) -> bool:
    """Whether a model has another that speaks, by the contents of its config.json."""
    return isinstance(plain.get(_CONFIG), dict)


def thinker_config(config: Any) -> Any:
    """Return the thinker's transformers config; the config itself if it has none inside."""
    return getattr(config, _CONFIG, None) or config


def plain_thinker_config(plain: dict[str, Any]) -> dict[str, Any]:
    """The same for the contents of config.json."""
    if not has_thinker(plain):
        return plain
    return {**plain[_CONFIG], **{key: plain[key] for key in _SHARED if key in plain}}


def of_thinker(decoded: Decoded, plain: Mapping[str, Any]) -> Decoded:
    """Select the thinker's tensors, and say in a note what is left out.

    Args:
        decoded: tensors of a checkpoint.
        plain: contents of its config.json.
    """
    if not has_thinker(plain):
        return decoded
    others = [key.removesuffix("_config") for key, value in plain.items()
              if isinstance(value, dict) and key.endswith("_config")
              and key not in (_CONFIG, *_SHARED)]
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in decoded.tensors.items()
               if name.startswith(_PREFIX)}
    note = f"output of speech is not supported: only the thinker of '{plain['model_type']}' is " \
           f"compiled, without {' and '.join(others) or 'the model that speaks'}"
    return replace(decoded, tensors=tensors, notes=(*decoded.notes, note), linear=frozenset(
        name.removeprefix(_PREFIX) for name in decoded.linear if name.startswith(_PREFIX)))
