"""The decoder: tensors of a checkpoint, which readers combine into quantized weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.readers.config import arguments_of, config_groups
from llmc.compiler.quant.stored import Stored
from llmc.errors import LlmcError

# Scales of activations and caches that llmc does not apply.
_UNUSED = re.compile(r"\.(input_scale|input_zero_point|input_global_scale|(k|v|q|kv)_scale|"
                     r"(prob_)?output_scale|activation_scale|input_scale_ub)$")
_OF_CACHES = re.compile(r"\.(k|v|kv)_scale$|\.(k|v)_proj\.output_scale$")


@dataclass(frozen=True)
class Decoded:
    """A checkpoint's tensors, with each quantized weight as one.

    Attributes:
        tensors: by name.
        notes: messages to the user.
        linear: names of quantized weights, which are [out, in] whatever the model's layout.
    """

    tensors: dict[str, Weight]
    notes: tuple[str, ...]
    linear: frozenset[str] = frozenset()


class Decoder:
    """Tensors by name: readers take them from `left` and put quantized weights into `made`.

    Args:
        tensors: of the checkpoint.
        group_sizes: of the config; empty: determined by the tensors.
        origin: the checkpoint, as errors name it.
    """

    def __init__(self, tensors: Mapping[str, Weight], group_sizes: frozenset[int],
                 origin: str) -> None:
        self.left = dict(tensors)
        self.made: dict[str, Weight] = {}
        self.group_sizes = group_sizes
        self.origin = origin
        self._notes: dict[str, list[str]] = {}

    def modules(self, suffix: str) -> list[str]:
        """Names of the modules that have such a tensor.

        Raises:
            LlmcError: no module has one.
        """
        found = [name.removesuffix(f".{suffix}") for name in self.left
                 if name.endswith(f".{suffix}")]
        if not found:
            raise LlmcError(f"'{self.origin}' is quantized according to its config, but has no "
                            f"tensor named '*.{suffix}'; give the config.json that belongs to the "
                            f"weights")
        return found

    def take(self, name: str, shape: Sequence[int], kinds: str) -> Weight:
        """Take a tensor.

        Args:
            name: of the tensor.
            shape: expected.
            kinds: allowed kinds of its dtype, in NumPy's letters; V is an ml_dtype.

        Raises:
            LlmcError: it is missing, or has another shape or dtype.
        """
        tensor = self.left.pop(name, None)
        if tensor is None:
            raise LlmcError(f"'{self.origin}' has no tensor '{name}', which '"
                            f"{name.rpartition('.')[0]}' needs; the checkpoint is incomplete")
        if tensor.shape != tuple(shape) or tensor.dtype.kind not in kinds:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' is {tensor.dtype} "
                            f"{list(tensor.shape)}, expected {list(shape)}"
                            f"{'' if tensor.dtype.kind in kinds else ' of another dtype'}")
        return tensor

    def matrix(self, name: str) -> tuple[int, int]:
        """The shape of a matrix.

        Raises:
            LlmcError: the tensor is not a matrix.
        """
        tensor = self.left[name]
        if len(tensor.shape) != 2:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' is {tensor.dtype} "
                            f"{list(tensor.shape)}, expected a matrix")
        return tensor.shape[0], tensor.shape[1]

    def words(self, name: str, shape: Sequence[int]) -> Weight:
        """Take codes packed in 32-bit words.

        Raises:
            LlmcError: see `take`; or its dtype is not int32.
        """
        tensor = self.take(name, shape, "i")
        if tensor.dtype != np.int32:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' has codes packed in "
                            f"{tensor.dtype}; llmc reads them in int32")
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; () if absent."""
        return self.left[name].shape if name in self.left else ()

    def scales(self, name: str, shape: Sequence[int], may_vanish: bool = False) -> Weight:
        """Take scales, as float32; reading NaN or infinities raises `LlmcError`.

        Args:
            name: of the tensor.
            shape: expected.
            may_vanish: allow 0, if the format rounds small scales to it.
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
        """Take e8m0 scales, as uint8; reading NaN raises `LlmcError`."""
        tensor = self.take(name, shape, "u")

        def rows(start: int, stop: int) -> np.ndarray:
            block = tensor.rows(start, stop)
            if (block == 255).any():
                raise LlmcError(f"'{name}' in '{self.origin}' has a scale that is NaN; the "
                                f"checkpoint is damaged")
            return block

        return Weight(tensor.shape, np.uint8, rows, name)

    def refuse_unordered(self, name: str, setting: str) -> None:
        """Refuse act-order without the tensor of the column order.

        Raises:
            LlmcError: always.
        """
        raise LlmcError(f"'{self.origin}' has no tensor '{name}', the group of each column, which "
                        f"is needed as its config has {setting}; the checkpoint is incomplete")

    def check_middle(self, name: str, zeros: np.ndarray, bits: int, setting: str) -> None:
        """Check the zero points of a symmetric scheme.

        Raises:
            LlmcError: one is not in the middle of the codes; libraries disagree about its meaning.
        """
        wrong = zeros[zeros != 2 ** (bits - 1)]
        if wrong.size:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' has a zero point of {wrong[0]}, "
                            f"but its config has {setting}, which implies {2 ** (bits - 1)}; "
                            f"correct that setting, or the format's version")

    def check_groups(self, name: str, width: int, groups: int) -> None:
        """Check the number of groups of a row.

        Raises:
            LlmcError: it does not divide the columns, or contradicts the config's group sizes.
        """
        if groups < 1 or width % groups:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' has {groups} groups, which do "
                            f"not divide {width} columns; the checkpoint is damaged")
        if groups > 1 and self.group_sizes and width // groups not in self.group_sizes:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' has {groups} groups for {width} "
                            f"columns, but its config has group_size "
                            f"{' or '.join(map(str, sorted(self.group_sizes)))}")

    def whole_groups(self, name: str, width: int, size: int) -> int:
        """The number of groups of a row.

        Raises:
            LlmcError: the group size does not divide the row.
        """
        if width % size:
            raise LlmcError(f"tensor '{name}' in '{self.origin}' has rows of {width} columns, "
                            f"which groups of {size} do not divide; the checkpoint is damaged")
        return width // size

    def keep(self, module: str, stored: Stored, dequantized: str = "") -> None:
        """Make a module's quantized weight.

        Args:
            module: its name.
            stored: the weight.
            dequantized: why it is read dequantized instead; "": it is not.
        """
        weight = stored.weight(f"{module}.weight")
        if dequantized:
            self.note(dequantized, module)
            weight = weight.without_form()
        self.made[f"{module}.weight"] = weight

    def keep_numbers(self, module: str, shape: Sequence[int],
                     rows: Callable[[int, int], np.ndarray], reason: str) -> None:
        """Make a module's weight of dequantized rows.

        Args:
            module: its name.
            shape: of the weight.
            rows: reads float32 rows from start to stop.
            reason: why no kernel reads the storage format.
        """
        self.note(reason, module)
        weight = Weight(shape, np.float32, rows, f"{module}.weight")
        weight.dequantized = True
        self.made[f"{module}.weight"] = weight

    def note(self, text: str, module: str) -> None:
        """Add a message to the user about a module."""
        self._notes.setdefault(text, []).append(module)

    def decoded(self, config: Mapping[str, Any]) -> Decoded:
        """The quantized weights, and the tensors that are not quantized.

        Raises:
            LlmcError: a weight is among both.
        """
        of_caches = next((config[key] for key in ("kv_cache_scheme", "kv_cache_quant_algo")
                          if config.get(key)), None)
        if of_caches and not any(_OF_CACHES.search(name) for name in self.left):
            self._notes[f"KV caches are not quantized as the checkpoint's config asks "
                        f"({arguments_of(of_caches)}): --kv_dtype alone decides"] = []
        for group in config_groups(config):
            activations = group.get("input_activations")
            if activations and not group.get("weights"):
                targets = group.get("targets")
                self.note(f"activations are not quantized as the checkpoint's config asks "
                          f"({arguments_of(activations)})",
                          str(targets[0] if isinstance(targets, list) and targets else targets))
        for name in [name for name in self.left if _UNUSED.search(name)]:
            del self.left[name]
            self.note("scales of activations and caches, which llmc does not quantize by these, "
                      "are ignored", name)
        twice = next((name for name in self.made if name in self.left), None)
        if twice is not None:
            raise LlmcError(f"'{self.origin}' has '{twice}' both quantized and not quantized; "
                            f"remove the tensors that do not match its config")
        notes = tuple(text + (f": '{names[0]}'" if names else "")
                      + (f" and {len(names) - 1} more" if names[1:] else "")
                      for text, names in self._notes.items())
        return Decoded({**self.left, **self.made}, notes, frozenset(self.made))
