"""Checkpoints in fewer bits: what lies on disk becomes codes, scales and zeros, exactly.

A format stores a weight as several tensors; here they become one `Weight` under the name that the
model has for it, whose `stored` is read from them when it is written. Formats pack 4 bits in words
of 32, the first code in the lowest bits:

    GPTQ                qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out]; in
                        version 1 a zero is stored less one; g_idx [in] says whose group a column
                        is. Rules of GPTQModel's, its config's `dynamic`, name modules that have
                        other bits and groups, or are not quantised; the first that fits counts
    AutoRound           GPTQ's tensors, of which version its packing_format says, or AWQ's; layers
                        of its extra_config may have other bits and groups
    AWQ                 qweight [in, out / 8], qzeros, scales likewise; columns 0 2 4 6 1 3 5 7 of
                        eight lie in this order
    compressed-tensors  weight_packed [out, in / 8], weight_scale [out, groups], weight_zero_point
                        [out / 8, groups]; codes and zeros plus 8; or weight in int8 or FP8.
                        What says that tokens are rounded to FP8 by scales of their own, or all by
                        one, input_scale, is kept
    FP8 in blocks       weight [out, in], weight_scale_inv [out / 128, in / 128]; or one for all,
                        as Mistral and AutoFP8 have it, with the scale of activations in
                        activation_scale or input_scale, or none: tokens have their own. One for
                        each row, as FBGEMM has it, whose input_scale_ub, a bound of tokens'
                        scales, is left out. Stacks of experts have an axis more in front, and
                        their scales are called as they are, with _scale_inv behind
    NVFP4               weight_packed uint8 [out, in / 2], weight_scale FP8 [out, in / 16],
                        weight_global_scale, which divides; twice a number is an integer of 8 bits
    ModelOpt            weight in FP8, weight_scale of all or of a row, input_scale; or NVFP4's
                        numbers as weight uint8 [out, in / 2], weight_scale likewise,
                        weight_scale_2, which multiplies
    bitsandbytes        weight int8 [out, in] with SCB [out], 127 times the scales; or NF4 and FP4:
                        weight uint8 [out · in / 2, 1], the first code in the highest bits, of a
                        quant_map [16] of numbers, times the absmax of each block of the weight as
                        one row; this may be codes of a nested_quant_map likewise, and an offset
    MXFP4               numbers as NVFP4's; weight_packed with weight_scale [out, in / 32], or
                        weight_blocks uint8 [out, in / 32, 16] with weight_scales; a scale is the
                        bits of an exponent, 127 for 1. Stacks of experts have an axis more in
                        front, and models have each of them transposed
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from llmc.compiler.graph.quantization import SMALLEST_GROUP, Stored
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError
from llmc.plugins.quantization import FLOAT8, unpack

_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where columns 0 to 7 lie
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
# Twice the numbers of FP4 (e2m1), as codes of int8.
_FP4_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) + 128
_TOKEN, _ALL = "token", "all"  # what has a scale of activations
_FORMS = "method", "quant_method", "format", "checkpoint_format"  # where GPTQModel says a format
_QUANT_STATE = re.compile(r"\.weight\.quant_state\.bitsandbytes__(nf4|fp4)$")
# Of activations and caches, where llmc does not round as these say.
_UNUSED = re.compile(r"\.(input_scale|input_zero_point|input_global_scale|(k|v|q|kv)_scale|"
                     r"(prob_)?output_scale|activation_scale|input_scale_ub)$")
_OF_CACHES = re.compile(r"\.(k|v|kv)_scale$|\.(k|v)_proj\.output_scale$")


@dataclass(frozen=True)
class Decoded:
    """A checkpoint's tensors, those in fewer bits as one each; and what the user may want to know.

    Attributes:
        linear: names of weights that lie as linear layers' do, [out, in], whatever the model has
            them in.
    """

    tensors: dict[str, Weight]
    notes: tuple[str, ...]
    linear: frozenset[str] = frozenset()


def decode(open_tensors: Callable[[], Mapping[str, Weight]], said: Mapping[str, Any],
           origin: str) -> Decoded | None:
    """The tensors of a checkpoint that is quantised as its config says; None where llmc does not
    read that.

    Args:
        open_tensors: opens them as they are on disk.
        said: the config's `quantization_config`, `quant_method` among it.

    Raises:
        LlmcError: a tensor is missing, or has another shape or dtype than the format's.
    """
    reader = _READERS.get(str(said["quant_method"]).lower())
    if reader is None:
        return None
    decoder = _Decoder(open_tensors(), _group_sizes(said), origin)
    return decoder.decoded(said) if reader(decoder, said) else None


def decode_plain(open_tensors: Callable[[], Mapping[str, Weight]], said: Mapping[str, Any],
                 origin: str) -> Decoded:
    """The tensors of a checkpoint whose caches are in fewer bits, as its config says, and whose
    weights are as they are, without the scales of caches.
    """
    return _Decoder(open_tensors(), frozenset(), origin).decoded(said)


def _group_sizes(said: Mapping[str, Any]) -> frozenset[int]:
    """Those that a config names, of all layers, of each of its groups of them or of single ones."""
    rules = said.get("dynamic")
    places = [said, *map(_weights, _config_groups(said)), *_layers_of(said),
              *(rules.values() if isinstance(rules, Mapping) else ())]
    named = [place.get(name) for place in places if isinstance(place, Mapping)
             for name in ("group_size", "q_group_size")]
    return frozenset(size for size in named if isinstance(size, int) and size > 0)


def _config_groups(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those of layers, as compressed-tensors says how each is rounded."""
    groups = said.get("config_groups")
    return [group for group in groups.values() if isinstance(group, Mapping)] \
        if isinstance(groups, Mapping) else []


def _weights(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a group of a config says of weights."""
    found = group.get("weights")
    return found if isinstance(found, Mapping) else {}


def _layers_of(said: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What AutoRound says of layers that are quantised otherwise than most."""
    layers = said.get("extra_config")
    return [own for own in layers.values() if isinstance(own, Mapping)] \
        if isinstance(layers, Mapping) else []


class _Decoder:
    """Tensors by name, taken away as they are made one.

    Args:
        group_sizes: those that the config names; none where it leaves them to the tensors.
    """

    def __init__(self, tensors: Mapping[str, Weight], group_sizes: frozenset[int],
                 origin: str) -> None:
        self.left = dict(tensors)
        self.made: dict[str, Weight] = {}
        self.group_sizes = group_sizes
        self.origin = origin
        self._notes: dict[str, list[str]] = {}

    def modules(self, suffix: str) -> list[str]:
        """The names of modules that have a tensor of this name.

        Raises:
            LlmcError: there are none.
        """
        found = [name.removesuffix(f".{suffix}") for name in self.left
                 if name.endswith(f".{suffix}")]
        if not found:
            raise LlmcError(f"'{self.origin}' is quantised, says its config, but has no tensor "
                            f"that ends in '.{suffix}'; config and weights do not belong together")
        return found

    def take(self, name: str, shape: Sequence[int], kinds: str) -> Weight:
        """A tensor of this shape, whose dtype is of a kind as NumPy has them, V an ml_dtype.

        Raises:
            LlmcError: there is none.
        """
        tensor = self.left.pop(name, None)
        if tensor is None:
            raise LlmcError(f"'{self.origin}' has no tensor '{name}', without which '"
                            f"{name.rpartition('.')[0]}' cannot be read; the checkpoint is not "
                            f"whole")
        if tensor.shape != tuple(shape) or tensor.dtype.kind not in kinds:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' is {tensor.dtype} "
                            f"{list(tensor.shape)}, expected {list(shape)}"
                            f"{'' if tensor.dtype.kind in kinds else ' of another dtype'}")
        return tensor

    def matrix(self, name: str) -> tuple[int, int]:
        """The shape of a tensor that is one.

        Raises:
            LlmcError: it has no rows and columns.
        """
        tensor = self.left[name]
        if len(tensor.shape) != 2:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' is {tensor.dtype} "
                            f"{list(tensor.shape)}, expected a matrix")
        return tensor.shape[0], tensor.shape[1]

    def words(self, name: str, shape: Sequence[int]) -> Weight:
        """Codes that are packed in words of 32 bits."""
        tensor = self.take(name, shape, "i")
        if tensor.dtype != np.int32:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' has codes packed in "
                            f"{tensor.dtype}; llmc reads them in int32")
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Empty where there is no such tensor, as of a number."""
        return self.left[name].shape if name in self.left else ()

    def scales(self, name: str, shape: Sequence[int], may_vanish: bool = False) -> Weight:
        """Scales float32, which are numbers when they are read, and other than 0 unless a format
        has them in so few bits that they `may_vanish`.
        """
        tensor = self.take(name, shape, "fV")

        def rows(start: int, stop: int) -> np.ndarray:
            block = tensor.rows(start, stop).astype(np.float32)
            if not np.isfinite(block).all() or not (may_vanish or block.all()):
                raise LlmcError(f"'{name}' in '{self.origin}' has a scale that is NaN"
                                f"{' or infinite' if may_vanish else ', infinite or 0'}; the "
                                f"checkpoint is damaged")
            return block

        return Weight(tensor.shape, np.float32, rows, name)

    def powers(self, name: str, shape: Sequence[int]) -> Weight:
        """Scales that are stored as the bits of an exponent (e8m0); NaN is refused."""
        tensor = self.take(name, shape, "u")

        def rows(start: int, stop: int) -> np.ndarray:
            block = tensor.rows(start, stop)
            if (block == 255).any():
                raise LlmcError(f"'{name}' in '{self.origin}' has a scale that is NaN; the "
                                f"checkpoint is damaged")
            return block

        return Weight(tensor.shape, np.uint8, rows, name)

    def refuse_unordered(self, name: str, said: str) -> None:
        """Of columns whose groups only a tensor says that is not there.

        Raises:
            LlmcError: always.
        """
        raise LlmcError(f"'{self.origin}' has no tensor '{name}', without which nothing says to "
                        f"which group a column belongs, as its config has {said}; the checkpoint "
                        f"is not whole")

    def check_middle(self, name: str, zeros: np.ndarray, bits: int, said: str) -> None:
        """Hold zeros against a config that says that there are none but those in the middle.

        Raises:
            LlmcError: there are; some that read such a checkpoint take them, others do not.
        """
        odd = zeros[zeros != 2 ** (bits - 1)]
        if odd.size:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' has a zero point of {odd[0]}, but "
                            f"its config has {said}, of which {2 ** (bits - 1)} is the only one; "
                            f"change that if the zero points are meant, or the format's version")

    def check_groups(self, name: str, width: int, groups: int) -> None:
        """Hold the groups that scales are of against a row's columns and the config.

        Raises:
            LlmcError: the columns are no whole groups, or of a size that the config does not name.
        """
        if groups < 1 or width % groups:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' has {groups} groups, of which "
                            f"{width} columns are no whole ones")
        if groups > 1 and self.group_sizes and width // groups not in self.group_sizes:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' has {groups} groups for {width} "
                            f"columns, but its config speaks of groups of "
                            f"{' or '.join(map(str, sorted(self.group_sizes)))}")

    def whole_groups(self, name: str, width: int, size: int) -> int:
        """How many groups of a size that a format has a row is.

        Raises:
            LlmcError: it is no whole ones.
        """
        if width % size:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' has rows of {width} numbers, "
                            f"which are no whole groups of {size}")
        return width // size

    def keep(self, module: str, stored: Stored, dequantized: str = "") -> None:
        """Make a module's weight; without the form where there is a reason for it."""
        weight = stored.weight(f"{module}.weight")
        if dequantized:
            self.note(dequantized, module)
            weight = weight.without_form()
        self.made[f"{module}.weight"] = weight

    def keep_numbers(self, module: str, shape: Sequence[int],
                     rows: Callable[[int, int], np.ndarray], reason: str) -> None:
        """Make a module's weight of what `rows` reads as float32."""
        self.note(reason, module)
        weight = Weight(shape, np.float32, rows, f"{module}.weight")
        weight.dequantized = True
        self.made[f"{module}.weight"] = weight

    def note(self, text: str, module: str) -> None:
        self._notes.setdefault(text, []).append(module)

    def decoded(self, said: Mapping[str, Any]) -> Decoded:
        """What was made, and what is left as it was.

        Raises:
            LlmcError: a weight is both.
        """
        of_caches = next((said[key] for key in ("kv_cache_scheme", "kv_cache_quant_algo")
                          if said.get(key)), None)
        if of_caches and not any(_OF_CACHES.search(name) for name in self.left):
            self._notes[f"KV caches are not rounded as the checkpoint's config says "
                        f"({_arguments(of_caches)}): --kv_dtype alone decides"] = []
        for group in _config_groups(said):
            activations = group.get("input_activations")
            if activations and not group.get("weights"):
                targets = group.get("targets")
                self.note(f"activations are not rounded as the checkpoint's config says "
                          f"({_arguments(activations)})",
                          str(targets[0] if isinstance(targets, list) and targets else targets))
        for name in [name for name in self.left if _UNUSED.search(name)]:
            del self.left[name]
            self.note("scales of activations and caches are left out, which llmc does not round",
                      name)
        twice = next((name for name in self.made if name in self.left), None)
        if twice is not None:
            raise LlmcError(f"'{self.origin}' has '{twice}' both as numbers and in fewer bits; "
                            f"remove what its config does not mean")
        notes = tuple(text + (f": '{names[0]}'" if names else "")
                      + (f" and {len(names) - 1} more" if names[1:] else "")
                      for text, names in self._notes.items())
        return Decoded({**self.left, **self.made}, notes, frozenset(self.made))


def _map(weight: Weight, shape: Sequence[int], dtype: np.dtype | type,
         function: Callable[[np.ndarray], np.ndarray]) -> Weight:
    """Each block of rows by itself through a function."""
    return Weight(shape, dtype, lambda start, stop: function(weight.rows(start, stop)), weight.name)


def _codes(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 [rows, n · 32 / bits] from words int32 [rows, n]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2 ** bits - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)


def _bits(said: Mapping[str, Any], *names: str) -> int | None:
    """How many bits a code has; None where that is not 4 or 8."""
    bits = next((said[name] for name in names if name in said), 4)
    return bits if bits in (4, 8) else None


def _refuse_changed(decoder: _Decoder, said: Mapping[str, Any]) -> None:
    """Refuse what GPTQModel does to a model beside rounding its weights.

    Raises:
        LlmcError: the config says that it did.
    """
    for key, what in (("rotation", "rotated"), ("adapter", "to be corrected by an adapter")):
        if said.get(key):
            raise LlmcError(f"'{decoder.origin}' is {what}, as {key} {said[key]!r} in its config "
                            f"says, which llmc does not read; give a checkpoint without")


def _own(decoder: _Decoder, said: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """What a config says of a module that is quantised: of all, but for what the first of
    GPTQModel's rules whose pattern fits its name has otherwise, or AutoRound's of its name, else of
    a pattern.

    Raises:
        LlmcError: a rule says that it is not, or something of it that llmc does not read.
    """
    rules, layers = said.get("dynamic"), said.get("extra_config")
    own: Any = None
    for rule, changes in rules.items() if isinstance(rules, Mapping) else ():
        if _fits(rule.removeprefix("-:").removeprefix("+:"), module, "rules"):
            if rule.startswith("-:"):
                raise LlmcError(f"'{decoder.origin}' has '{module}' in fewer bits, which its "
                                f"config's rule '{rule}' says is not; config and weights do not "
                                f"belong together")
            own = changes
            break
    if own is None and isinstance(layers, Mapping):
        own = layers.get(module) or next(
            (changes for pattern, changes in layers.items()
             if _fits(pattern, module, "extra_config", re.search)), None)
    if not isinstance(own, Mapping):
        return said
    known = {str(said.get(key)).lower() for key in _FORMS}
    for key in ("adapter", "rotation", *_FORMS):
        if own.get(key) and str(own[key]).lower() not in known:
            raise LlmcError(f"'{module}' in '{decoder.origin}' has {key} {own[key]!r} of its own, "
                            f"says its config, which llmc does not read; give a checkpoint without")
    return {**said, **own}


def _gptq(decoder: _Decoder, said: Mapping[str, Any]) -> bool:
    _refuse_changed(decoder, said)
    forms = {key: str(said[key]).lower() for key in ("checkpoint_format", "format")
             if said.get(key)}
    if len(set(forms.values())) > 1:
        both = " and ".join(f"{key} {form}" for key, form in forms.items())
        raise LlmcError(f"'{decoder.origin}' has {both} in its config, of which one is wrong; "
                        f"remove that")
    form = next(iter(forms.values()), "gptq")
    if _bits(said, "bits") is None or form not in ("gptq", "gptq_v2"):
        return False
    _read_gptq(decoder, said, zeros_less=int(form == "gptq"))
    return True


def _auto_round(decoder: _Decoder, said: Mapping[str, Any]) -> bool:
    """AutoRound's own format, which is AWQ's or one of GPTQ's, as the second part of
    `auto_round:auto_gptq` says; where nothing does, and zeros are in the middle, GPTQ's version 1.
    """
    for place in (said, *_layers_of(said)):
        of_activations, bits = (
            found if isinstance(found := place.get(name), int) else by_default
            for name, by_default in (("act_bits", 16), ("bits", 4)))
        rounds = 0 < of_activations < 16 or (place.get("data_type") or "int") != "int"
        if rounds and bits <= 8:
            return False
    tool, _, packing = str(said.get("packing_format") or said.get("backend") or "").partition(":")
    if tool != "auto_round" and said.get("sym", True):
        tool, packing = "auto_round", "auto_gptq"
    packing = packing.partition(":")[0]
    if _bits(said, "bits") is None or tool != "auto_round" or said.get("rotation_config"):
        return False
    if packing in ("auto_awq", "awq"):
        return _awq(decoder, {"bits": said.get("bits", 4)})
    if packing not in ("auto_gptq", "gptq", "gptqmodel", ""):
        return False
    _read_gptq(decoder, said, zeros_less=int(packing in ("auto_gptq", "gptq")))
    return True


def _read_gptq(decoder: _Decoder, said: Mapping[str, Any], zeros_less: int) -> None:
    """`zeros_less`: how much less than they are zeros are stored. Layers may have 4 and 8 bits, of
    which the tensors' shapes tell, as the zeros do whether they are symmetric.
    """
    for module in decoder.modules("qweight"):
        own = _own(decoder, said, module)
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
        codes = _map(packed, (out_features, width), np.uint8, partial(_codes, bits=bits))
        scales = decoder.scales(f"{module}.scales", (groups, out_features)).transpose()
        zeros = _codes(decoder.words(f"{module}.qzeros", (groups, out_features // per_word))
                       .load(), bits).astype(np.int32) + zeros_less
        if own.get("sym") is True:
            decoder.check_middle(f"{module}.qzeros", zeros, bits, "sym true")
        order = decoder.left.pop(f"{module}.g_idx", None)
        if order is None and groups > 1 and own.get("desc_act") and not own.get("static_groups"):
            decoder.refuse_unordered(f"{module}.g_idx", "desc_act")
        belongs = _in_order(decoder, f"{module}.scales", width, groups, own.get("group_size")) \
            if order is None else order.load().astype(np.int64)
        if belongs.shape != (width,) or belongs.min() < 0 or belongs.max() >= groups:
            raise LlmcError(f"'{module}.g_idx' in '{decoder.origin}' does not say for each of "
                            f"{width} columns which of {groups} groups it belongs to")
        stored = _with_zeros(bits, codes, scales, zeros.T)
        if width % groups == 0 and (belongs == np.arange(width) // (width // groups)).all():
            decoder.keep(module, stored)
        else:
            _keep_ordered(decoder, module, stored, belongs)


def _in_order(decoder: _Decoder, name: str, width: int, groups: int, size: Any) -> np.ndarray:
    """Which group each column belongs to where they lie in order, the last group what is left.

    Args:
        size: of a group, as the config says it; of none, -1, a row is one.

    Raises:
        LlmcError: there are not so many such groups.
    """
    if not isinstance(size, int):
        decoder.check_groups(name, width, groups)
        size = width // groups
    if groups != (-(-width // size) if size > 0 else 1):
        raise LlmcError(f"tensor '{name}' in '{decoder.origin}' has {groups} groups for {width} "
                        f"columns, but its config speaks of groups of {size}")
    return np.arange(width) // (size if size > 0 else width)


def _with_zeros(bits: int, codes: Weight, scales: Weight, zeros: np.ndarray) -> Stored:
    """A form with zeros [out, groups], or without where they are all in the middle; in 8 bits where
    one is no code of 4.
    """
    if (zeros == 2 ** (bits - 1)).all():
        return Stored(f"int{bits}", codes, scales)
    wide = 8 if zeros.max() >= 2 ** bits else bits
    if zeros.max() > 255:
        raise LlmcError(f"'{codes.name}' has a zero point of {zeros.max()}, which no code has")
    return Stored(f"uint{wide}", codes, scales, Weight.of(zeros.astype(np.uint8)))


def _keep_ordered(decoder: _Decoder, module: str, stored: Stored, belongs: np.ndarray) -> None:
    """A weight whose columns belong to groups in no order: in the groups' order, where these are
    all of one size, else read as numbers.
    """
    counts = np.bincount(belongs, minlength=stored.scales.shape[1])
    if (counts == counts[0]).all() and counts[0] >= SMALLEST_GROUP:
        order = np.argsort(belongs, kind="stable")
        decoder.keep(module, replace(stored, codes=stored.codes.take_columns(order), order=order))
        return
    codes, scales, zeros = stored.codes, stored.scales, stored.zeros
    fixed = np.float32(2 ** (stored.bits - 1))

    def rows(start: int, stop: int) -> np.ndarray:
        zero = fixed if zeros is None else zeros.rows(start, stop)[:, belongs].astype(np.float32)
        numbers: np.ndarray = (codes.rows(start, stop).astype(np.float32) - zero) \
            * scales.rows(start, stop)[:, belongs]
        return numbers

    decoder.keep_numbers(module, codes.shape, rows, "columns are in groups of several sizes, which "
                         "no kernel reads: they are read as float32, at four to eight times the "
                         "memory")


def _awq(decoder: _Decoder, said: Mapping[str, Any]) -> bool:
    _refuse_changed(decoder, said)
    bits = _bits(said, "bits", "w_bit")
    forms = {str(said.get(key) or "gemm").lower()
             for key in ("version", "format", "checkpoint_format")}
    if bits != 4 or forms != {"gemm"}:
        return False

    def natural(words: np.ndarray) -> np.ndarray:
        codes = _codes(words, 4).reshape(len(words), -1, 8)
        return codes[:, :, _AWQ_ORDER].reshape(len(words), -1)

    for module in decoder.modules("qweight"):
        own = _own(decoder, said, module)
        width, words = decoder.matrix(f"{module}.qweight")
        out_features = words * 8
        groups = (*decoder.shape_of(f"{module}.scales"), 1)[0]
        packed = decoder.words(f"{module}.qweight", (width, words))
        codes = _map(packed, (width, out_features), np.uint8, natural).transpose()
        scales = decoder.scales(f"{module}.scales", (groups, out_features)).transpose()
        zeros = natural(decoder.words(f"{module}.qzeros", (groups, words)).load())
        if own.get("zero_point") is False:
            decoder.check_middle(f"{module}.qzeros", zeros, bits, "zero_point false")
        decoder.check_groups(f"{module}.scales", width, groups)
        decoder.keep(module, _with_zeros(4, codes, scales, zeros.T))
    return True


def _bitsandbytes(decoder: _Decoder, said: Mapping[str, Any]) -> bool:
    states = [name for name in decoder.left if _QUANT_STATE.search(name)]
    for name in states:
        _table(decoder, _QUANT_STATE.sub("", name), decoder.left.pop(name))
    eight = any(name.endswith(".SCB") for name in decoder.left)
    if not states and not eight:  # says that there are none
        decoder.modules("SCB" if said.get("load_in_8bit") else "quant_state.bitsandbytes__nf4")
    for module in decoder.modules("SCB") if eight else ():
        rows, width = (*decoder.shape_of(f"{module}.weight"), 0, 0)[:2]
        tensor = decoder.take(f"{module}.weight", (rows, width), "i")
        form = decoder.left.pop(f"{module}.weight_format", None)
        if form is not None and form.load().any():
            raise LlmcError(f"'{module}' in '{decoder.origin}' lies as a GPU before Hopper wants "
                            f"it; llmc reads rows: save it again with a newer bitsandbytes")
        largest = decoder.take(f"{module}.SCB", (rows,), "fV").load().astype(np.float32)
        _check_finite(decoder, f"{module}.SCB", largest)
        scales = np.where(largest == 0, 1, largest) * np.float32(1 / 127)
        decoder.keep(module, Stored("int8", _offset(tensor), Weight.of(scales[:, None])))
    return True


def _table(decoder: _Decoder, module: str, told: Weight) -> None:
    """Numbers of a table, 16 of them, by blocks of a weight that is one row."""
    name = f"{module}.weight"
    try:
        state = json.loads(told.load().tobytes())
        rows, width = map(int, state["shape"])
        size, nested = int(state["blocksize"]), int(state.get("nested_blocksize", 0))
        offset, kind = np.float32(state.get("nested_offset", 0)), str(state["quant_type"]).upper()
        if min(rows, width, size) < 1 or nested < 0:
            raise ValueError(f"its sizes are {[rows, width, size, nested]}")
    except (ValueError, KeyError, TypeError) as error:
        raise LlmcError(f"'{told.name}' in '{decoder.origin}' is no state of bitsandbytes: "
                        f"{error}; the checkpoint is damaged") from error
    blocks = -(-rows * width // size)
    packed = decoder.left.pop(name, None)
    if packed is None or packed.nbytes != -(-rows * width // 2):
        raise LlmcError(f"tensor '{name}' in '{decoder.origin}' is "
                        f"{None if packed is None else list(packed.shape)}, its state is of "
                        f"{[rows, width]} numbers in 4 bits")
    table = decoder.take(f"{name}.quant_map", (16,), "f").load().astype(np.float32)
    _check_finite(decoder, f"{name}.quant_map", table, "number")
    absmax = decoder.take(f"{name}.absmax", (blocks,), "u" if nested else "f").load()
    if nested:
        levels = decoder.take(f"{name}.nested_quant_map", (256,), "f").load().astype(np.float32)
        scales = decoder.take(f"{name}.nested_absmax", (-(-blocks // nested),), "f").load()
        absmax = levels[absmax] * scales.astype(np.float32).repeat(nested)[:blocks] + offset
    absmax = absmax.astype(np.float32)
    _check_finite(decoder, f"{name}.absmax", absmax)

    def numbers(start: int, stop: int) -> np.ndarray:
        first, last = start * width, stop * width
        begin, end = first // 2, -(-last // 2)
        if packed.dtype.itemsize == 1 and packed.shape[1:] == (1,):
            some = packed.rows(begin, end)[:, 0]
        else:
            some = packed.load().view(np.uint8).reshape(-1)[begin:end]
        codes = np.stack([some >> 4, some & 15], -1).reshape(-1)[first % 2:][:last - first]
        made: np.ndarray = table[codes] * absmax[np.arange(first, last) // size]
        return made.reshape(stop - start, width)

    decoder.keep_numbers(module, (rows, width), numbers, f"weights are in {kind}, which no kernel "
                         f"reads: they are read as float32, at four to eight times the memory")


def _check_finite(decoder: _Decoder, name: str, numbers: np.ndarray, what: str = "scale") -> None:
    if not np.isfinite(numbers).all():
        raise LlmcError(f"'{name}' in '{decoder.origin}' has a {what} that is NaN or infinite; the "
                        f"checkpoint is damaged")


def _fp8(decoder: _Decoder, said: Mapping[str, Any]) -> bool:
    """In blocks, or with a scale for a row or for all, as FBGEMM, AutoFP8 and Mistral write it.
    Activations are rounded as they come where no scale of theirs is stored, by groups of a token
    where the weight is in blocks.
    """
    block = said.get("weight_block_size", (128, 128))
    block = block and _block(decoder, block)
    inverse = any(name.endswith(".weight_scale_inv") for name in decoder.left)
    suffix = "weight_scale_inv" if inverse or said.get("weight_block_size") else "weight_scale"
    rounding = _ALL if said.get("activation_scheme") == "static" else _TOKEN
    stacks = [name for name in (owner.removesuffix("_scale_inv") for owner in decoder.left
                                if re.search(r"_proj_scale_inv$", owner)) if name in decoder.left]
    for name in stacks:
        _float8_experts(decoder, name, block, rounding)
    linear = any(name.endswith(f".{suffix}") for name in decoder.left)
    for module in decoder.modules(suffix) if linear or not stacks else ():
        _float8(decoder, module, suffix, block, rounding)
        if said.get("scale_fmt") == "ue8m0" and rounding == _TOKEN:
            decoder.note("where activations are rounded their scales are what they are, not powers "
                         "of two as the checkpoint's config says (scale_fmt ue8m0)", module)
    return True


def _block(decoder: _Decoder, said: Any) -> tuple[int, int]:
    """Rows and columns of a block, as a config says them: [128, 128], in older ones 128x128."""
    try:
        rows, columns = map(int, said.split("x") if isinstance(said, str) else said)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise LlmcError(f"'{decoder.origin}' has weights in blocks of {said!r}, says its config, "
                        f"where a number of rows and one of columns are expected")
    return rows, columns


def _float8(decoder: _Decoder, module: str, suffix: str, block: tuple[int, int] | None,
            rounding: str = "") -> None:
    """`rounding`: whether activations are rounded to FP8, each token's by a scale of its own, or of
    each group of a token where the weight is in blocks; or all by one where the module has such.
    """
    name = f"{module}.weight"
    if name not in decoder.left:
        raise LlmcError(f"'{decoder.origin}' has no tensor '{name}' nor '{name}_packed', of which "
                        f"'{module}.{suffix}' has the scales; the checkpoint is not whole")
    if decoder.left[name].dtype != _FP8:
        raise LlmcError(f"'{name}' in '{decoder.origin}' is no FP8 (e4m3) weight, though it has "
                        f"scales")
    decoder.matrix(name)
    tensor = decoder.left.pop(name)

    def bits(block: np.ndarray) -> np.ndarray:
        found = block.view(np.uint8)
        if ((found & 0x7F) == 0x7F).any():
            raise LlmcError(f"'{name}' in '{decoder.origin}' has NaN among its weights; the "
                            f"checkpoint is damaged")
        return found

    codes = _map(tensor, tensor.shape, np.uint8, bits)
    fixed = [f"{module}.{own}" for own in ("input_scale", "activation_scale")
             if f"{module}.{own}" in decoder.left] if rounding == _ALL else []
    scale = 0.0
    if fixed:
        given = decoder.shape_of(fixed[0])
        scale = float(decoder.scales(fixed[0], given if math.prod(given) == 1 else ())
                      .load().flat[0])
        if scale < 0:
            raise LlmcError(f"'{fixed[0]}' in '{decoder.origin}' is {scale}, which no scale of "
                            f"activations is; the checkpoint is damaged")
    elif rounding == _ALL:
        decoder.note("activations are not rounded as the checkpoint's config says, as it has no "
                     "scale of theirs", module)
    _with_scales(decoder, module, f"{module}.{suffix}", FLOAT8, codes, block,
                 activation_dtype=FLOAT8 if fixed or rounding == _TOKEN else "",
                 activation_scale=scale)


def _float8_experts(decoder: _Decoder, name: str, block: tuple[int, int] | None,
                    rounding: str) -> None:
    """A stack [num_experts, out, in] as transformers has it: each expert's weight by itself, or
    each half of it where a block is no smaller than the whole, of which each has scales.
    """
    shape = decoder.shape_of(name)
    scaled = decoder.shape_of(f"{name}_scale_inv")
    if len(shape) != 3 or len(scaled) != 3:
        raise LlmcError(f"tensor '{name}' in '{decoder.origin}' is {list(shape)} and its scales "
                        f"{list(scaled)}, expected a stack of experts' matrices and of theirs")
    count, rows, width = shape
    halves = 2 if scaled[1] == 2 and (block is None or block[0] >= rows) and rows % 2 == 0 else 1
    weight = decoder.take(name, shape, "V").reshape((count * rows, width))
    scales = decoder.take(f"{name}_scale_inv", (count, *scaled[1:]), "fV") \
        .reshape((count * scaled[1], scaled[2]))
    fixed = decoder.left.pop(f"{name}_activation_scale", None)
    made = []
    for part in range(count * halves):
        module = f"{name}.{part // halves}"
        for own, source, height in (("weight", weight, rows // halves),
                                    ("weight_scale_inv", scales, scaled[1] // halves)):
            decoder.left[f"{module}.{own}"] = source.take_rows(
                np.arange(part * height, (part + 1) * height))
        if fixed is not None:
            decoder.left[f"{module}.activation_scale"] = Weight.of(
                fixed.load().reshape(-1)[part // halves])
        _float8(decoder, module, "weight_scale_inv", block, rounding)
        made.append(decoder.made.pop(f"{module}.weight"))
    decoder.made[name] = Weight.stack([
        Weight.concat(made[first:first + halves]) for first in range(0, len(made), halves)])


def _with_scales(decoder: _Decoder, module: str, name: str, dtype: str, codes: Weight,
                 block: tuple[int, int] | None, zeros: Weight | None = None,
                 **activations: Any) -> None:
    """A weight of 8 bits with one scale, one a row, one a group of a row, or one a block.

    Args:
        block: of those whose scales have two dimensions, and not a row for each row.
        activations: of `Stored`, how they are rounded; where there are blocks, by groups.
    """
    rows, width = codes.shape
    shape = decoder.shape_of(name)
    height, size = block or (1, 1)
    if block and len(shape) == 2 and (shape[0] != rows or 1 in (rows, height)):
        scales = decoder.scales(name, (-(-rows // height), -(-width // size)))
        group = math.gcd(size, width)
        table = scales.load().repeat(size // group, 1)[:, :width // group]
        rounded = activations.get("activation_dtype", "")
        if activations.get("activation_scale"):
            decoder.note("activations are not rounded by one scale, as the checkpoint's config "
                         "says, where weights are in blocks", name)
            rounded = ""
        stored = Stored(dtype, codes, Weight(
            (rows, width // group), np.float32,
            lambda start, stop: table[np.arange(start, stop) // height], name),
            activation_dtype=rounded, rounds_groups=bool(rounded))
        decoder.keep(module, stored, "" if group >= SMALLEST_GROUP else
                     "rows are no whole groups that a kernel reads: they are read as float32")
        return
    if shape in ((), (1,)) or (shape == (1, 1) and rows > 1):
        value = decoder.scales(name, shape).load().reshape(-1)[0]
        scales = Weight((rows, 1), np.float32,
                        lambda start, stop: np.full((stop - start, 1), value), name)
    elif len(shape) == 1:
        flat = decoder.scales(name, (rows,))
        scales = Weight((rows, 1), np.float32, lambda start, stop: flat.rows(start, stop)[:, None],
                        name)
    else:
        scales = decoder.scales(name, (rows, shape[1]))
        decoder.check_groups(name, width, shape[1])
    decoder.keep(module, Stored(dtype, codes, scales, zeros, **activations))


def _compressed(decoder: _Decoder, said: Mapping[str, Any]) -> bool:
    """Every module by the tensors that it has; the config says which formats there are."""
    groups = [group for group in _config_groups(said) if group.get("weights")]
    forms = {str(group.get("format") or said.get("format")) for group in groups}
    if not groups or not forms <= {"pack-quantized", "float-quantized", "int-quantized",
                                   "naive-quantized", "nvfp4-pack-quantized",
                                   "mxfp4-pack-quantized"}:
        return False
    if any(_weights(group).get("num_bits") not in (4, 8) for group in groups):
        return False
    transforms = said.get("transform_config")
    if transforms and (not isinstance(transforms, Mapping) or transforms.get("config_groups")):
        return False  # rotations of activations, which the graph has not
    sparse = next((name for name in decoder.left if name.endswith(".bitmask")), None)
    if sparse is not None:
        raise LlmcError(f"'{decoder.origin}' has sparse weights, as its tensor '{sparse}' says, "
                        f"which llmc does not read; give a checkpoint whose weights are dense")
    for module in decoder.modules("weight_scale"):
        _check_whole(decoder, module, _groups_of(module, groups))
        group, rounding = _group_of(decoder, module, groups), ""
        block = next((_block(decoder, _weights(own).get("block_structure"))
                      for own in ([group] if group else groups)
                      if _weights(own).get("strategy") == "block"), None)
        if f"{module}.weight_packed" in decoder.left:
            if f"{module}.weight_global_scale" in decoder.left \
                    or decoder.left[f"{module}.weight_scale"].dtype == _FP8:
                _nvfp4(decoder, module, "weight_packed", "weight_global_scale", np.divide)
            elif decoder.left[f"{module}.weight_packed"].dtype == np.uint8:
                _packed_mxfp4(decoder, module)
            else:
                _packed(decoder, module, _groups_of(module, groups))
        elif f"{module}.weight" in decoder.left \
                and decoder.left[f"{module}.weight"].dtype == np.int8:
            _int8(decoder, module, block)
        else:
            rounding = _rounding(group, block)
            if rounding == _ALL and f"{module}.input_scale" not in decoder.left:
                decoder.take(f"{module}.input_scale", (1,), "fV")  # says that it is missing
            _float8(decoder, module, "weight_scale", block, rounding)
        _say_unrounded(decoder, module, group, rounding)
    return True


def _say_unrounded(decoder: _Decoder, module: str, group: Mapping[str, Any],
                   rounding: str) -> None:
    """Note what a group of a config rounds otherwise than by `rounding`, beside weights; where it
    has scales in tensors, these are noted.
    """
    for key, what in (("input", "activations are"), ("output", "what layers make is")):
        said = group.get(f"{key}_activations")
        stored = any(f"{module}.{key}_{name}" in decoder.left
                     for name in ("scale", "global_scale", "zero_point"))
        if isinstance(said, Mapping) and said and not stored \
                and not (rounding and key == "input"):
            decoder.note(f"{what} not rounded as the checkpoint's config says "
                         f"({_arguments(said)})", module)


def _arguments(said: Any) -> str:
    """How a config says that something is rounded, in its own words."""
    if not isinstance(said, Mapping):
        return str(said)
    how = [f"{said.get('num_bits')} bits", said.get("type"), said.get("strategy"),
           "dynamic" if said.get("dynamic") else "static"]
    return ", ".join(str(word) for word in how if word)


def _check_whole(decoder: _Decoder, module: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Hold the tensors that a module may do without against what the config says of it.

    Args:
        groups: those of the config that it may belong to, which have to agree.

    Raises:
        LlmcError: zero points are missing, or what says whose group a column is.
    """
    said = [_weights(group) for group in groups]
    if all(own.get("symmetric") is False for own in said):
        zeros = f"{module}.weight_zero_point"
        if zeros not in decoder.left:
            raise LlmcError(f"'{decoder.origin}' has no tensor '{zeros}', without which '{module}' "
                            f"cannot be read, as its config has symmetric false; the checkpoint "
                            f"is not whole")
    ordered = all(own.get("actorder") in (True, "group", "dynamic") for own in said)
    count = (1, *decoder.shape_of(f"{module}.weight_scale"))[-1]
    if ordered and count > 1 and f"{module}.weight_g_idx" not in decoder.left:
        decoder.refuse_unordered(f"{module}.weight_g_idx", "actorder group")


def _group_of(decoder: _Decoder, module: str, groups: Sequence[Mapping[str, Any]]) -> \
        Mapping[str, Any]:
    """The group of a config that a module belongs to, or that those are like that it may belong to;
    none where these differ, which is noted where activations would be rounded.
    """
    found = _groups_of(module, groups)
    if all({**group, "targets": None} == {**found[0], "targets": None} for group in found):
        return found[0]
    if any(group.get("input_activations") for group in found):
        decoder.note("activations are not rounded, as the targets of several groups of the "
                     "checkpoint's config name a layer, or none does", module)
    return {}


def _groups_of(module: str, groups: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The groups of a config that a module may belong to: by its name, else by a pattern of names,
    else by its class, as compressed-tensors looks for it; all where none of these is found.
    """
    if len(groups) == 1:
        return groups
    targets = [[str(target) for target in given] if isinstance(given, list) else [str(given)]
               for given in (group.get("targets") for group in groups)]
    for belongs in (lambda target: target == module,
                    lambda target: target.startswith("re:") and _fits(target[3:], module),
                    lambda target: target == "Linear"):
        found = [group for group, own in zip(groups, targets, strict=True)
                 if any(belongs(target) for target in own)]
        if found:
            return found
    return groups


def _fits(pattern: str, module: str, place: str = "targets", match: Any = re.match) -> bool:
    try:
        return match(pattern, module) is not None
    except re.error as error:
        raise LlmcError(f"'{pattern}' among the {place} of the checkpoint's config is no pattern: "
                        f"{error}") from error


def _rounding(group: Mapping[str, Any], block: tuple[int, int] | None) -> str:
    """How the layers of a group of a config round their inputs to FP8 before they multiply them:
    tokens as they come, which is by groups where weights are in such blocks, or all alike.
    """
    said, of_weights = group.get("input_activations"), _weights(group)
    if not isinstance(said, Mapping) or said.get("num_bits") != 8 or said.get("type") != "float":
        return ""
    how = (str(said.get("strategy")), bool(said.get("dynamic", False)))
    if of_weights.get("strategy") == "block":
        own = how == ("group", True) and block is not None and said.get("group_size") == block[1]
        return _TOKEN if own else ""
    if of_weights.get("strategy") not in ("channel", "tensor"):
        return ""
    return {("token", True): _TOKEN, ("tensor", False): _ALL}.get(how, "")


def _packed(decoder: _Decoder, module: str, said: Sequence[Mapping[str, Any]]) -> None:
    """`said`: the groups of the config that the module may belong to, one of which it has to be."""
    own = [_weights(group) for group in said]
    shape = decoder.take(f"{module}.weight_shape", (2,), "i").load()
    rows, width = int(shape[0]), int(shape[1])
    given = decoder.left[f"{module}.weight_packed"].shape
    bits = next((bits for bits in (4, 8) if given == (rows, -(-width * bits // 32))), None)
    if bits is None:
        raise LlmcError(f"tensor '{module}.weight_packed' in '{decoder.origin}' has shape "
                        f"{list(given)}, its weight_shape is {[rows, width]}")
    if bits not in [of_group.get("num_bits") for of_group in own]:
        raise LlmcError(f"tensor '{module}.weight_packed' in '{decoder.origin}' has codes of "
                        f"{bits} bits, its config says {own[0].get('num_bits')}")
    packed = decoder.words(f"{module}.weight_packed", given)
    codes = _map(packed, (rows, width), np.uint8,
                 lambda block: np.ascontiguousarray(_codes(block, bits)[:, :width]))
    groups = (1, *decoder.shape_of(f"{module}.weight_scale"))[-1]
    scales = decoder.scales(f"{module}.weight_scale", (rows, groups))
    sizes = [of_group.get("group_size") if of_group.get("strategy") == "group" else None
             for of_group in own]
    if groups == 1 and all(isinstance(size, int) and 0 < size < width for size in sizes):
        raise LlmcError(f"tensor '{module}.weight_scale' in '{decoder.origin}' has 1 group for "
                        f"{width} columns, but its config speaks of groups of {sizes[0]}")
    stored = Stored(f"int{bits}", codes, scales)
    if f"{module}.weight_zero_point" in decoder.left:
        words = decoder.words(f"{module}.weight_zero_point", (-(-rows * bits // 32), groups))
        zeros = _codes(np.ascontiguousarray(words.load().T), bits)[:, :rows].T
        stored = _with_zeros(bits, codes, scales, zeros)
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
        raise LlmcError(f"'{module}.weight_g_idx' in '{decoder.origin}' does not say for each of "
                        f"{width} columns which of {groups} groups it belongs to")
    _keep_ordered(decoder, module, stored, belongs)


def _int8(decoder: _Decoder, module: str, block: tuple[int, int] | None) -> None:
    decoder.matrix(f"{module}.weight")
    tensor = decoder.left.pop(f"{module}.weight")
    codes = _offset(tensor)
    zero = decoder.left.pop(f"{module}.weight_zero_point", None)
    if zero is None or not zero.load().any():
        _with_scales(decoder, module, f"{module}.weight_scale", "int8", codes, block)
        return
    wanted = decoder.left[f"{module}.weight_scale"].shape
    if block or zero.shape != wanted or len(wanted) != 2 or wanted[0] != tensor.shape[0]:
        raise LlmcError(f"tensor '{module}.weight_zero_point' in '{decoder.origin}' has shape "
                        f"{list(zero.shape)}, its scales {list(wanted)}")
    _with_scales(decoder, module, f"{module}.weight_scale", "uint8", codes, None,
                 _offset(zero))


def _offset(signed: Weight) -> Weight:
    """Codes of int8 as kernels have them, 128 more."""
    return _map(signed, signed.shape, np.uint8,
                lambda values: (values.astype(np.int16) + 128).astype(np.uint8))


def _modelopt(decoder: _Decoder, said: Mapping[str, Any]) -> bool:
    """Each module by its tensors; the config says what there is, for all or for each."""
    layers = said.get("quantized_layers")
    each = layers if isinstance(layers, Mapping) and layers else {"": said}
    named = {name: str(one.get("quant_algo") if isinstance(one, Mapping) else one)
             for name, one in each.items()}
    by_token, algorithms = "FP8_PER_CHANNEL_PER_TOKEN", {*named.values()}
    if not algorithms <= {"FP8", by_token, "NVFP4"}:
        return False
    for module in decoder.modules("weight_scale"):
        packed = decoder.left.get(f"{module}.weight")
        if f"{module}.weight_scale_2" in decoder.left \
                or (packed is not None and packed.dtype == np.uint8):
            _nvfp4(decoder, module, "weight", "weight_scale_2", np.multiply)
            continue
        of_rows = math.prod(decoder.shape_of(f"{module}.weight_scale")) > 1
        own = named.get(module, by_token if of_rows and by_token in algorithms else "FP8")
        _float8(decoder, module, "weight_scale", None, _TOKEN if own == by_token else _ALL)
    return True


def _nvfp4(decoder: _Decoder, module: str, packed: str, whole: str,
           combine: Callable[[np.ndarray, np.float32], np.ndarray]) -> None:
    """Of scales of 16 columns, combined with one of all."""
    rows, half = (*decoder.shape_of(f"{module}.{packed}"), 0, 0)[:2]
    codes = decoder.take(f"{module}.{packed}", (rows, half), "u")
    given = decoder.shape_of(f"{module}.{whole}")
    scale = decoder.scales(f"{module}.{whole}", given if given == (1,) else ()).load().flat[0]
    groups = decoder.whole_groups(f"{module}.{packed}", 2 * half, 16)
    # In FP8, beside one of all: of groups whose numbers are the smallest it is 0, and so are they.
    fine = decoder.scales(f"{module}.weight_scale", (rows, groups), may_vanish=True)
    decoder.note("numbers of NVFP4 are kept exactly as int8, twice their memory", module)
    decoder.keep(module, Stored(
        "int8", _map(_fp4_codes(codes), (rows, 2 * half), np.uint8,
                     lambda block: _FP4_TWICE[block].astype(np.uint8)),
        _map(fine, fine.shape, np.float32, lambda block: combine(block, scale) / np.float32(2))))


def _packed_mxfp4(decoder: _Decoder, module: str) -> None:
    rows, half = decoder.matrix(f"{module}.weight_packed")
    packed = decoder.take(f"{module}.weight_packed", (rows, half), "u")
    groups = decoder.whole_groups(f"{module}.weight_packed", 2 * half, 32)
    _keep_mxfp4(decoder, module, packed, decoder.powers(f"{module}.weight_scale", (rows, groups)))


def _mxfp4(decoder: _Decoder, said: Mapping[str, Any]) -> bool:
    """As gpt-oss has it, of linear layers or of stacks of experts."""
    names = [name.removesuffix("_blocks") for name in decoder.left if name.endswith("_blocks")]
    ranks = {name: len(decoder.left[f"{name}_blocks"].shape) for name in names}
    if not names or any(rank != 4 and (rank != 3 or not name.endswith(".weight"))
                        for name, rank in ranks.items()):
        return False
    for name, rank in ranks.items():
        if rank == 4:
            _mxfp4_experts(decoder, name)
            continue
        rows, groups, size = decoder.left[f"{name}_blocks"].shape
        blocks = decoder.take(f"{name}_blocks", (rows, groups, 16), "u")
        packed = _map(blocks, (rows, groups * size), np.uint8,
                      lambda block: block.reshape(len(block), -1))
        _keep_mxfp4(decoder, name.removesuffix(".weight"), packed,
                    decoder.powers(f"{name}_scales", (rows, groups)))
    return True


def _mxfp4_experts(decoder: _Decoder, name: str) -> None:
    """Numbers [experts, in, out] of a stack, which lies as [experts, out, in]."""
    count, rows, groups, _ = decoder.left[f"{name}_blocks"].shape
    blocks = decoder.take(f"{name}_blocks", (count, rows, groups, 16), "u")
    scales = decoder.powers(f"{name}_scales", (count, rows, groups))
    packed = blocks.reshape((count, rows, groups * 16)).reshape((count * rows, groups * 16))
    stored = Stored("mxfp4", _fp4_codes(packed), scales.reshape((count * rows, groups)))
    decoder.made[name] = stored.weight(name).reshape((count, rows, groups * 32)).transpose()


def _keep_mxfp4(decoder: _Decoder, module: str, packed: Weight, scales: Weight) -> None:
    """Of a linear layer, for which no kernel has MXFP4."""
    decoder.note("numbers of MXFP4 are kept exactly as int8, twice their memory", module)
    decoder.keep(module, Stored("mxfp4", _fp4_codes(packed), scales).as_int8())


def _fp4_codes(packed: Weight) -> Weight:
    """Numbers of 4 bits, e2m1, one to a byte, of two; the first in the low bits."""
    rows, half = packed.shape
    return _map(packed, (rows, 2 * half), np.uint8, lambda block: unpack(block, 4))


_READERS: Mapping[str, Callable[[_Decoder, Mapping[str, Any]], bool]] = {
    "gptq": _gptq, "awq": _awq, "auto-round": _auto_round, "intel/auto-round": _auto_round,
    "fp8": _fp8, "fbgemm_fp8": _fp8, "compressed-tensors": _compressed, "modelopt": _modelopt,
    "mxfp4": _mxfp4, **dict.fromkeys(("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"),
                                     _bitsandbytes)}
