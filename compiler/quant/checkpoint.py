"""Detection of a checkpoint's quantization method, by its JSON files or its tensors.

A checkpoint is read if llmc has a reader for its format, else refused by the method's name. Some
methods keep every tensor's name and shape (block FP8, int8 of bitsandbytes and
compressed-tensors). Without their scales such weights would be wrong, so the marks of a method are
checked before anything is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.readers import Mark, registry
from llmc.compiler.quant.readers.bitsandbytes import load_bits
from llmc.compiler.quant.readers.config import group_sizes
from llmc.compiler.quant.readers.decoder import Decoded, Decoder
from llmc.errors import LlmcError

# Methods without a reader, by their usual names.
_UNREAD = {"hqq": "HQQ", "aqlm": "AQLM", "nvfp4": "NVFP4", "quark": "AMD Quark",
           "bitnet": "BitNet"}
_WAY_OUT = "which llmc does not read; give the checkpoint that it was made from, in " \
    "float32, float16 or bfloat16, or a GGUF file of it"
_NOT_NAMED = "but its config does not name the method; give the config.json that belongs to its " \
    "weights, with its quantization_config"


def read_quantized(directory: Path, config: Mapping[str, Any],
                   open_tensors: Callable[[], Mapping[str, Weight]]) -> Decoded:
    """Read the tensors of a checkpoint, quantized or not.

    Args:
        directory: of the checkpoint.
        config: of the model.
        open_tensors: opens the tensors as they are on disk.

    Raises:
        LlmcError: the quantization format is unsupported, or tensors are missing.
    """
    quantization, method = _quantization_config(config), method_of(config)
    if quantization is None:
        quantization, method = _separate_config(directory)
    if quantization is None:
        decoded = Decoded(dict(open_tensors()), ())
    elif _caches_alone(quantization):
        decoder = Decoder(open_tensors(), frozenset(), str(directory))
        method, decoded = None, decoder.decoded(quantization)
    else:
        read = _decode(open_tensors, quantization, str(directory))
        if read is None:
            raise LlmcError(f"'{directory}' is quantized by {method}, {_WAY_OUT}; if its weights "
                            f"are not quantized, remove the method from its config")
        decoded = read
    refuse_quantized_tensors(decoded.tensors, str(directory), method is not None)
    return decoded


def _decode(open_tensors: Callable[[], Mapping[str, Weight]], quantization: Mapping[str, Any],
            origin: str) -> Decoded | None:
    """The tensors of a quantized checkpoint; None if no reader supports it.

    Raises:
        LlmcError: a tensor is missing, or has another shape or dtype than the format's.
    """
    reader = registry().get(str(quantization["quant_method"]).lower())
    if reader is None:
        return None
    decoder = Decoder(open_tensors(), group_sizes(quantization), origin)
    return decoder.decoded(quantization) if reader.read(decoder, quantization) else None


def _separate_config(directory: Path) -> tuple[Mapping[str, Any] | None, str | None]:
    """The quantization config beside config.json, as older tools write it, and its method."""
    for quant_method, reader in registry().items():
        path = directory / reader.config_file
        if reader.config_file and path.is_file():
            found = _read(path)
            inside = found.get("quantization")
            config = {**found, **(inside if isinstance(inside, Mapping) else {}),
                      "quant_method": quant_method}
            return config, _described(reader.methods[quant_method], config)
    return None, None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def method_of(config: Mapping[str, Any]) -> str | None:
    """The quantization method of a config, by its usual name: `GPTQ (4 bits, groups of 128)`.

    Returns:
        None if the weights are not quantized.
    """
    quantization = _quantization_config(config)
    if quantization is None or _caches_alone(quantization):
        return None
    method = str(quantization["quant_method"])
    reader = registry().get(method.lower())
    if reader is not None and reader.describe is not None:
        return reader.describe(quantization)
    names = reader.methods if reader is not None else _UNREAD
    return _described(names.get(method.lower(), method), quantization)


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization config in a model's config, with a `quant_method`, or None."""
    for owner in (config, *(config.get(key) for key in ("text_config", "llm_config"))):
        for key in ("quantization_config", "compression_config"):
            quantization = owner.get(key) if isinstance(owner, Mapping) else None
            if not isinstance(quantization, Mapping) or not quantization:
                continue
            loads = any(name.startswith("load_in_") for name in quantization)
            method = str(quantization.get("quant_method") or
                         ("compressed-tensors" if key == "compression_config" else "bitsandbytes"
                          if loads else "a method that its config does not name"))
            if not (method.startswith("bitsandbytes") and loads and not load_bits(quantization)):
                return {**quantization, "quant_method": method}
    return None


def _caches_alone(quantization: Mapping[str, Any]) -> bool:
    """Whether only KV caches or attention's inputs are quantized, and no weights.

    compressed-tensors and ModelOpt have such configs.
    """
    groups = quantization.get("config_groups")
    of_weights = any(quantization.get(key) for key in ("quant_algo", "quantized_layers")) or (
        any(not isinstance(group, Mapping) or group.get("weights") for group in groups.values())
        if isinstance(groups, Mapping) else bool(groups))
    caches = any(quantization.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo"))
    return bool(caches or groups) and not of_weights \
        and str(quantization["quant_method"]).lower() in ("compressed-tensors", "modelopt")


def _described(name: str, quantization: Mapping[str, Any]) -> str:
    """A method with its bits, groups and format."""
    found = dict(_numbers(quantization))
    details = [text.format(found[key]) for key, text in (
        ("bits", "{} bits"), ("group_size", "groups of {}"), ("weight_block_size", "blocks of {}"),
        ("format", "{}"), ("type", "{}")) if key in found]
    return f"{name} ({', '.join(details)})" if details else name


def _numbers(quantization: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    spellings = {"bits": ("bits", "num_bits", "w_bit", "wbits"),
                 "group_size": ("group_size", "q_group_size"), "type": ("type", "quant_algo"),
                 "weight_block_size": ("weight_block_size",), "format": ("format", "fmt")}
    groups = quantization.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = group.get("weights") if isinstance(group, Mapping) \
        else quantization.get("quantization")
    for key, names in spellings.items():
        for place in (quantization, weights):
            value = next((place[name] for name in names if place.get(name)), None) \
                if isinstance(place, Mapping) else None
            if isinstance(value, list) and all(isinstance(n, int) for n in value):
                value = "×".join(map(str, value))
            if isinstance(value, str) or (isinstance(value, int) and value > 0):
                yield key, str(value)
                break


def _marks() -> list[Mark]:
    """Marks of all formats, shared ones last."""
    readers = {id(reader): reader for reader in registry().values()}
    return sorted((mark for reader in readers.values() for mark in reader.marks),
                  key=lambda mark: mark.shared)


def refuse_quantized_tensors(tensors: Mapping[str, Weight], origin: str,
                             named: bool = False) -> None:
    """Refuse quantized tensors that no reader has consumed, by their names and dtypes.

    Args:
        tensors: by name.
        origin: the checkpoint, as errors name it.
        named: whether the config names a method.

    Raises:
        LlmcError: there are scales or packed weights, or weights of 8 bits or fewer.
    """
    for mark in _marks():
        method, pattern = mark.method, re.compile(rf"({mark.ending})$")
        name = next((name for name in tensors if pattern.search(name)), None)
        if name is not None:
            if named:
                raise LlmcError(f"'{origin}' has a tensor '{name}' ({tensors[name].dtype}) of "
                                f"{method}, without the other tensors that its config asks for; "
                                f"the checkpoint is incomplete or has another one's config")
            raise LlmcError(f"'{origin}' is quantized by {method} (it has a tensor '{name}', "
                            f"{tensors[name].dtype}), {_NOT_NAMED}")
    for name, tensor in tensors.items():
        if tensor.dtype.name.startswith("float8"):
            raise LlmcError(f"'{origin}' is quantized to FP8 (tensor '{name}' is "
                            f"{tensor.dtype}), {_WAY_OUT}")
        if tensor.dtype.kind in "iu" and len(tensor.shape) > 1 and name.endswith(".weight"):
            raise LlmcError(f"'{origin}' is quantized (weight '{name}' is {tensor.dtype}), "
                            f"{_WAY_OUT}")
