"""GPTQ, as AutoGPTQ and GPTQModel write it.

    qweight  int32 [in / 8, out]; for 8 bits [in / 4, out]
    qzeros   int32 [groups, out / 8]; version 1 stores a zero point minus 1
    scales   [groups, out]
    g_idx    [in], the group of each column

GPTQModel's rules (`dynamic` in its config) give modules other bits and group sizes, or exclude them
from quantization; the first rule that matches applies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from llmc.compiler.quant.readers import Mark, Reader
from llmc.compiler.quant.readers.config import bits_of, fits
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.readers.groups import keep_ordered, with_zeros
from llmc.compiler.quant.readers.words import map_rows, unpack_words
from llmc.errors import LlmcError

_FORMS = "method", "quant_method", "format", "checkpoint_format"  # keys of a format in GPTQModel


def read(decoder: Decoder, config: Mapping[str, Any]) -> bool:
    """Make the quantized weights; False: not in this format.

    Raises:
        LlmcError: the config contradicts itself, or asks for more than quantized weights.
    """
    refuse_changed(decoder, config)
    formats = {key: str(config[key]).lower() for key in ("checkpoint_format", "format")
               if config.get(key)}
    if len(set(formats.values())) > 1:
        both = " and ".join(f"{key} {form}" for key, form in formats.items())
        raise LlmcError(f"'{decoder.origin}' has {both} in its config, which contradict each "
                        f"other; remove the wrong one")
    form = next(iter(formats.values()), "gptq")
    if bits_of(config, "bits") is None or form not in ("gptq", "gptq_v2"):
        return False
    read_gptq(decoder, config, zeros_less=int(form == "gptq"))
    return True


def read_gptq(decoder: Decoder, config: Mapping[str, Any], zeros_less: int) -> None:
    """Make the quantized weights of GPTQ's tensors.

    The tensors' shapes determine the bits of each layer, the zero points whether it is symmetric.

    Args:
        decoder: of the checkpoint.
        config: its quantization config.
        zeros_less: subtrahend of stored zero points: 1 in version 1.
    """
    for module in decoder.modules("qweight"):
        scheme = own_config(decoder, config, module)
        words, out_features = decoder.matrix(f"{module}.qweight")
        packed = decoder.words(f"{module}.qweight", (words, out_features)).transpose()
        groups = (*decoder.shape_of(f"{module}.scales"), 1)[0]
        zero_words = (decoder.shape_of(f"{module}.qzeros") or (0,))[-1]
        bits = 32 * zero_words // max(out_features, 1) or 4
        if bits not in (4, 8):
            raise LlmcError(f"'{module}' in '{decoder.origin}' has codes of {bits} bits; llmc "
                            f"reads 4 and 8")
        per_word = 32 // bits
        width = words * per_word
        codes = map_rows(packed, (out_features, width), np.uint8, partial(unpack_words, bits=bits))
        scales = decoder.scales(f"{module}.scales", (groups, out_features)).transpose()
        zeros = unpack_words(decoder.words(f"{module}.qzeros", (groups, out_features // per_word))
                             .load(), bits).astype(np.int32) + zeros_less
        if scheme.get("sym") is True:
            decoder.check_middle(f"{module}.qzeros", zeros, bits, "sym true")
        order = decoder.left.pop(f"{module}.g_idx", None)
        if order is None and groups > 1 and scheme.get("desc_act") \
                and not scheme.get("static_groups"):
            decoder.refuse_unordered(f"{module}.g_idx", "desc_act")
        size = scheme.get("group_size")
        group_index = _in_order(decoder, f"{module}.scales", width, groups, size) \
            if order is None else order.load().astype(np.int64)
        if group_index.shape != (width,) or group_index.min() < 0 or group_index.max() >= groups:
            raise LlmcError(f"'{module}.g_idx' in '{decoder.origin}' does not assign each of "
                            f"{width} columns to one of {groups} groups; the checkpoint is damaged")
        stored = with_zeros(bits, codes, scales, zeros.T)
        if width % groups == 0 and (group_index == np.arange(width) // (width // groups)).all():
            decoder.keep(module, stored)
        else:
            keep_ordered(decoder, module, stored, group_index)


def _in_order(decoder: Decoder, name: str, width: int, groups: int, size: Any) -> np.ndarray:
    """The group of each column without act-order; the last group may be smaller.

    Args:
        decoder: of the checkpoint.
        name: of the tensor of scales.
        width: columns of a row.
        groups: of a row.
        size: the config's group size; -1: a row is one group.

    Raises:
        LlmcError: the number of groups contradicts the group size.
    """
    if not isinstance(size, int):
        decoder.check_groups(name, width, groups)
        size = width // groups
    if groups != (-(-width // size) if size > 0 else 1):
        raise LlmcError(f"tensor '{name}' in '{decoder.origin}' has {groups} groups for {width} "
                        f"columns, but its config has group_size {size}")
    return np.arange(width) // (size if size > 0 else width)


def own_config(decoder: Decoder, config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The config of a module: the defaults, overridden by its rule.

    GPTQModel's `dynamic` applies the first rule that matches, AutoRound's extra_config the entry
    with the module's name, else a pattern.

    Raises:
        LlmcError: a rule excludes the module from quantization, or is unsupported.
    """
    rules, layers = config.get("dynamic"), config.get("extra_config")
    own: Any = None
    for rule, changes in rules.items() if isinstance(rules, Mapping) else ():
        if fits(rule.removeprefix("-:").removeprefix("+:"), module, "rules"):
            if rule.startswith("-:"):
                raise LlmcError(f"'{decoder.origin}' has '{module}' quantized, which its config's "
                                f"rule '{rule}' excludes; give the config.json that belongs to "
                                f"the weights")
            own = changes
            break
    if own is None and isinstance(layers, Mapping):
        own = layers.get(module) or next(
            (changes for pattern, changes in layers.items()
             if fits(pattern, module, "extra_config", re.search)), None)
    if not isinstance(own, Mapping):
        return config
    known = {str(config.get(key)).lower() for key in _FORMS}
    for key in ("adapter", "rotation", *_FORMS):
        if own.get(key) and str(own[key]).lower() not in known:
            raise LlmcError(f"'{module}' in '{decoder.origin}' has a separate {key} {own[key]!r} "
                            f"in its config, which llmc does not read; give a checkpoint without")
    return {**config, **own}


def refuse_changed(decoder: Decoder, config: Mapping[str, Any]) -> None:
    """Refuse GPTQModel's changes of a model beyond quantized weights.

    Raises:
        LlmcError: the config has such changes.
    """
    for key, what in (("rotation", "rotated"), ("adapter", "corrected by an adapter")):
        if config.get(key):
            raise LlmcError(f"'{decoder.origin}' is {what} ({key} {config[key]!r} in its config), "
                            f"which llmc does not read; give a checkpoint without")


READER = Reader(
    methods={"gptq": "GPTQ"}, read=read, config_file="quantize_config.json",
    marks=(Mark(r"\.g_idx", "GPTQ"), Mark(r"\.qzeros|\.qweight", "AWQ or GPTQ", shared=True)))
