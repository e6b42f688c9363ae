"""The matrices of the adapters in one rank's slots, stacked for the inputs of its layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llmc.artifacts.adapter import Matrices
from llmc.artifacts.manifest import Chip
from llmc.runtime.core.step import EngineLimits


class LoraSpan(NamedTuple):
    """Slots of a run's adapters, and the groups of layers that these change.

    A layer of another group gets no rows, so it costs nothing.
    """

    start: int = 0
    stop: int = 0
    groups: frozenset[int] = frozenset()


class LoraStacks:
    """Stacks of the matrices of `limits.max_loras` adapters; see llmc.plugins.lora.

    A slot has rows for `limits.max_lora_rank` of each module of a layer; those that its adapter
    does not need are zeros. Pages of slots that were never used take no memory.
    """

    def __init__(self, chip: Chip, limits: EngineLimits) -> None:
        self._group = {layer.name: layer.group for layer in chip.lora}
        self._rows = {layer.group: len(layer.modules) * limits.max_lora_rank
                      for layer in chip.lora}  # of a slot
        self._stacks: dict[str, tuple[int, np.ndarray]] = {}  # group and array by input
        for layer in chip.lora:
            leading = limits.max_loras * self._rows[layer.group], *(
                (layer.num_experts,) if layer.experts else ())
            self._stacks[f"{layer.name}.lora_a"] = layer.group, np.zeros(
                (*leading, layer.in_features), np.float32)
            self._stacks[f"{layer.name}.lora_b"] = layer.group, np.zeros(
                (*leading, layer.out_features), np.float32)
        for group, rows in self._rows.items():
            self._stacks[f"lora_owner_{group}"] = group, np.repeat(
                np.arange(limits.max_loras, dtype=np.int32), rows)
        self._loaded: dict[int, Matrices] = {}

    @property
    def inputs(self) -> set[str]:
        """Names of the inputs that have stacks."""
        return {*self._stacks}

    def load(self, slot: int, matrices: Matrices) -> None:
        """Put an adapter into a slot, in place of the one that was there."""
        for layer in self._loaded.pop(slot, {}):
            for part in "ab":
                self._slot(f"{layer}.lora_{part}", slot)[:] = 0
        for layer, pair in matrices.items():
            for part, matrix in zip("ab", pair, strict=True):
                self._slot(f"{layer}.lora_{part}", slot)[:len(matrix)] = matrix
        self._loaded[slot] = matrices

    def _slot(self, name: str, slot: int) -> np.ndarray:
        group, stack = self._stacks[name]
        rows = self._rows[group]
        return stack[slot * rows:(slot + 1) * rows]

    def span(self, ids: np.ndarray) -> LoraSpan:
        """The slots and groups of these adapters, int32 [num_tokens]; -1: none."""
        used = np.unique(ids[ids >= 0]).tolist()
        if not used:
            return LoraSpan()
        return LoraSpan(used[0], used[-1] + 1, frozenset(
            self._group[layer] for slot in used for layer in self._loaded[slot]))

    def array(self, name: str, span: LoraSpan) -> np.ndarray:
        """The rows of an input for a span of slots."""
        group, stack = self._stacks[name]
        if group not in span.groups:
            return stack[:0]
        rows = self._rows[group]
        return stack[span.start * rows:span.stop * rows]
