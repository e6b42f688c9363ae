"""compressed-tensors.

    pack-quantized        weight_packed int32 [out, in / 8], weight_scale [out, groups],
                          weight_zero_point [out / 8, groups]; codes and zero points plus 8
    int-, float-quantized weight in int8 or FP8, with weight_scale
    nvfp4-pack-quantized  weight_packed uint8; weight_global_scale is a divisor
    mxfp4-pack-quantized  weight_packed uint8, weight_scale of exponents

FP8 quantization of activations, with dynamic scales per token or a static one (input_scale), is
kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.compiler.quant.readers import Mark, Reader
from llmc.compiler.quant.readers.config import arguments_of, config_groups, fits, weights_of
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.readers.eight_bits import (
    ALL,
    FP8,
    TOKEN,
    block_shape,
    keep_scaled,
    read_float8,
)
from llmc.compiler.quant.readers.fp4 import read_mxfp4, read_nvfp4
from llmc.compiler.quant.readers.groups import keep_ordered, with_zeros
from llmc.compiler.quant.readers.words import int8_codes, map_rows, unpack_words
from llmc.compiler.quant.stored import Stored
from llmc.errors import LlmcError


def read(decoder: Decoder, config: Mapping[str, Any]) -> bool:
    """Make the quantized weights, each by its tensors; False: a scheme is unsupported."""
    groups = [group for group in config_groups(config) if group.get("weights")]
    formats = {str(group.get("format") or config.get("format")) for group in groups}
    if not groups or not formats <= {"pack-quantized", "float-quantized", "int-quantized",
                                     "naive-quantized", "nvfp4-pack-quantized",
                                     "mxfp4-pack-quantized"}:
        return False
    if any(weights_of(group).get("num_bits") not in (4, 8) for group in groups):
        return False
    transforms = config.get("transform_config")
    if transforms and (not isinstance(transforms, Mapping) or transforms.get("config_groups")):
        return False  # rotations of activations are not in the graph
    sparse = next((name for name in decoder.left if name.endswith(".bitmask")), None)
    if sparse is not None:
        raise LlmcError(f"'{decoder.origin}' has sparse weights (tensor '{sparse}'), which "
                        f"llmc does not read; give a checkpoint with dense weights")
    for module in decoder.modules("weight_scale"):
        _check_whole(decoder, module, _groups_of(module, groups))
        group, rounding = _group_of(decoder, module, groups), ""
        block = next((block_shape(decoder, weights_of(own).get("block_structure"))
                      for own in ([group] if group else groups)
                      if weights_of(own).get("strategy") == "block"), None)
        if f"{module}.weight_packed" in decoder.left:
            if f"{module}.weight_global_scale" in decoder.left \
                    or decoder.left[f"{module}.weight_scale"].dtype == FP8:
                read_nvfp4(decoder, module, "weight_packed", "weight_global_scale", np.divide)
            elif decoder.left[f"{module}.weight_packed"].dtype == np.uint8:
                read_mxfp4(decoder, module)
            else:
                _packed(decoder, module, _groups_of(module, groups))
        elif f"{module}.weight" in decoder.left \
                and decoder.left[f"{module}.weight"].dtype == np.int8:
            _int8(decoder, module, block)
        else:
            rounding = _rounding(group, block)
            if rounding == ALL and f"{module}.input_scale" not in decoder.left:
                decoder.take(f"{module}.input_scale", (1,), "fV")  # raises: it is missing
            read_float8(decoder, module, "weight_scale", block, rounding)
        _note_unapplied_quantization(decoder, module, group, rounding)
    return True


def _note_unapplied_quantization(decoder: Decoder, module: str, group: Mapping[str, Any],
                   rounding: str) -> None:
    """Note activation quantization of the config that is not applied.

    Schemes with scales in tensors are noted elsewhere, with their scales.
    """
    for key, what in (("input", "activations are"), ("output", "outputs of layers are")):
        scheme = group.get(f"{key}_activations")
        stored = any(f"{module}.{key}_{name}" in decoder.left
                     for name in ("scale", "global_scale", "zero_point"))
        if isinstance(scheme, Mapping) and scheme and not stored \
                and not (rounding and key == "input"):
            decoder.note(f"{what} not quantized as the checkpoint's config asks "
                         f"({arguments_of(scheme)})", module)


def _check_whole(decoder: Decoder, module: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that a module has the optional tensors that its config requires.

    Args:
        decoder: of the checkpoint.
        module: its name.
        groups: config groups that may apply to it; a requirement has to be common to all.

    Raises:
        LlmcError: zero points or the column order (g_idx) are missing.
    """
    schemes = [weights_of(group) for group in groups]
    if all(scheme.get("symmetric") is False for scheme in schemes):
        zeros = f"{module}.weight_zero_point"
        if zeros not in decoder.left:
            raise LlmcError(f"'{decoder.origin}' has no tensor '{zeros}', which '{module}' needs "
                            f"as its config has symmetric false; the checkpoint is incomplete")
    ordered = all(scheme.get("actorder") in (True, "group", "dynamic") for scheme in schemes)
    count = (1, *decoder.shape_of(f"{module}.weight_scale"))[-1]
    if ordered and count > 1 and f"{module}.weight_g_idx" not in decoder.left:
        decoder.refuse_unordered(f"{module}.weight_g_idx", "actorder group")


def _group_of(decoder: Decoder, module: str, groups: Sequence[Mapping[str, Any]]) -> \
        Mapping[str, Any]:
    """The config group of a module; {} if several match and differ.

    A note is added if one of them quantizes activations.
    """
    found = _groups_of(module, groups)
    if all({**group, "targets": None} == {**found[0], "targets": None} for group in found):
        return found[0]
    if any(group.get("input_activations") for group in found):
        decoder.note("activations are not quantized, as the targets of several groups of the "
                     "checkpoint's config match a layer, or no group's do", module)
    return {}


def _groups_of(module: str, groups: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The config groups that match a module, in compressed-tensors' order of precedence.

    By name, else by pattern, else by class; all groups if none matches.
    """
    if len(groups) == 1:
        return groups
    targets = [[str(target) for target in given] if isinstance(given, list) else [str(given)]
               for given in (group.get("targets") for group in groups)]
    for belongs in (lambda target: target == module,
                    lambda target: target.startswith("re:") and fits(target[3:], module),
                    lambda target: target == "Linear"):
        found = [group for group, own in zip(groups, targets, strict=True)
                 if any(belongs(target) for target in own)]
        if found:
            return found
    return groups


def _rounding(group: Mapping[str, Any], block: tuple[int, int] | None) -> str:
    """A config group's FP8 quantization of activations: TOKEN, ALL, or "" for none.

    TOKEN means per group of a token if weights are in blocks of the same number of columns.
    """
    scheme, of_weights = group.get("input_activations"), weights_of(group)
    if not isinstance(scheme, Mapping) \
            or (scheme.get("num_bits"), scheme.get("type")) != (8, "float"):
        return ""
    how = (str(scheme.get("strategy")), bool(scheme.get("dynamic", False)))
    if of_weights.get("strategy") == "block":
        own = how == ("group", True) and block is not None and scheme.get("group_size") == block[1]
        return TOKEN if own else ""
    if of_weights.get("strategy") not in ("channel", "tensor"):
        return ""
    return {("token", True): TOKEN, ("tensor", False): ALL}.get(how, "")


def _packed(decoder: Decoder, module: str, schemes: Sequence[Mapping[str, Any]]) -> None:
    """Make a weight of packed integers.

    Args:
        decoder: of the checkpoint.
        module: its name.
        schemes: config groups that match the module; one of them has to have its bits.
    """
    weights = [weights_of(group) for group in schemes]
    shape = decoder.take(f"{module}.weight_shape", (2,), "i").load()
    rows, width = int(shape[0]), int(shape[1])
    given = decoder.left[f"{module}.weight_packed"].shape
    bits = next((bits for bits in (4, 8) if given == (rows, -(-width * bits // 32))), None)
    if bits is None:
        raise LlmcError(f"tensor '{module}.weight_packed' in '{decoder.origin}' has shape "
                        f"{list(given)}, its weight_shape is {[rows, width]}; the checkpoint is "
                        f"damaged")
    if bits not in [of_group.get("num_bits") for of_group in weights]:
        raise LlmcError(f"tensor '{module}.weight_packed' in '{decoder.origin}' has codes of "
                        f"{bits} bits, its config has num_bits {weights[0].get('num_bits')}; give "
                        f"the config.json that belongs to the weights")
    packed = decoder.words(f"{module}.weight_packed", given)
    codes = map_rows(packed, (rows, width), np.uint8,
                     lambda block: np.ascontiguousarray(unpack_words(block, bits)[:, :width]))
    groups = (1, *decoder.shape_of(f"{module}.weight_scale"))[-1]
    scales = decoder.scales(f"{module}.weight_scale", (rows, groups))
    sizes = [of_group.get("group_size") if of_group.get("strategy") == "group" else None
             for of_group in weights]
    if groups == 1 and all(isinstance(size, int) and 0 < size < width for size in sizes):
        raise LlmcError(f"tensor '{module}.weight_scale' in '{decoder.origin}' has 1 group for "
                        f"{width} columns, but its config has group_size {sizes[0]}")
    stored = Stored(f"int{bits}", codes, scales)
    if f"{module}.weight_zero_point" in decoder.left:
        words = decoder.words(f"{module}.weight_zero_point", (-(-rows * bits // 32), groups))
        zeros = unpack_words(np.ascontiguousarray(words.load().T), bits)[:, :rows].T
        stored = with_zeros(bits, codes, scales, zeros)
    order = decoder.left.get(f"{module}.weight_g_idx")
    belongs = None if order is None else \
        decoder.take(f"{module}.weight_g_idx", (width,), "i").load().astype(np.int64)
    if belongs is not None and (belongs == -1).all():
        belongs = None
    if belongs is None:
        decoder.check_groups(f"{module}.weight_scale", width, groups)
    if belongs is None or (width % groups == 0
                           and (belongs == np.arange(width) // (width // groups)).all()):
        decoder.keep(module, stored)
        return
    if belongs.min() < 0 or belongs.max() >= groups:
        raise LlmcError(f"'{module}.weight_g_idx' in '{decoder.origin}' does not assign each of "
                        f"{width} columns to one of {groups} groups; the checkpoint is damaged")
    keep_ordered(decoder, module, stored, belongs)


def _int8(decoder: Decoder, module: str, block: tuple[int, int] | None) -> None:
    """Make a weight in int8, optionally with zero points."""
    decoder.matrix(f"{module}.weight")
    tensor = decoder.left.pop(f"{module}.weight")
    codes = int8_codes(tensor)
    zero = decoder.left.pop(f"{module}.weight_zero_point", None)
    if zero is None or not zero.load().any():
        keep_scaled(decoder, module, f"{module}.weight_scale", "int8", codes, block)
        return
    expected = decoder.left[f"{module}.weight_scale"].shape
    if block or zero.shape != expected or len(expected) != 2 or expected[0] != tensor.shape[0]:
        raise LlmcError(f"tensor '{module}.weight_zero_point' in '{decoder.origin}' has shape "
                        f"{list(zero.shape)}, its scales {list(expected)}; expected the same")
    keep_scaled(decoder, module, f"{module}.weight_scale", "uint8", codes, None,
                int8_codes(zero))


READER = Reader(
    methods={"compressed-tensors": "compressed-tensors"}, read=read,
    marks=(Mark(r"\.weight_packed", "compressed-tensors, packed"),
           Mark(r"\.weight_(scale(_2)?|zero_point|global_scale)",
                "compressed-tensors or NVIDIA ModelOpt", shared=True)))
