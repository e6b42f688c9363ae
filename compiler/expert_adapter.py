"""LoRA factors of the experts of MoE layers, by the base's stacks of matrices.

PEFT has them in two forms: of stacked parameters (`target_parameters`), and of the linear layers of
single experts, which checkpoints had before transformers 5 stacked them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.adapter import MAX_RANK
from llmc.artifacts.manifest import LoraLayer
from llmc.compiler.frontend.peft import ExpertFactors, LowRank, PeftAdapter, find_module
from llmc.errors import LlmcError

_EXPERT = re.compile(r"(?P<path>.+)\.(?P<expert>\d+)\.(?P<kind>\w+)")
# Linear layers of one expert.
_KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down",
          "w1": "gate", "w3": "up", "w2": "down"}


@dataclass(frozen=True)
class ExpertStack:
    """A stack of matrices of a base's experts, over all chips.

    Args:
        num_experts: number of matrices.
        out: rows of each.
        width: columns of each.
        gates: the rows that are gates, ascending; empty: none.
        ups: likewise the rows that are ups.
    """

    num_experts: int
    out: int
    width: int
    gates: tuple[int, ...]
    ups: tuple[int, ...]


@dataclass(frozen=True)
class StackedLowRank:
    """The factors of the changes of a stack's matrices.

    Args:
        down: float32 [rank, num_experts, in].
        up: float32 [rank, num_experts, out], including the adapter's scale.
    """

    down: np.ndarray
    up: np.ndarray


def expert_stacks(layers: Iterable[LoraLayer]) -> dict[str, ExpertStack]:
    """Return the stacks among the layers of all chips, by name."""
    found: dict[str, list[LoraLayer]] = {}
    for layer in layers:
        if layer.experts:
            found.setdefault(layer.modules[0], []).append(layer)
    return {name: _stack(own) for name, own in found.items()}


def _stack(layers: Sequence[LoraLayer]) -> ExpertStack:
    """The stack of which chips have these parts."""
    def last(runs: Iterable[Sequence[int]]) -> int:
        return 1 + max(max(run) for run in runs)

    gates, ups = set[int](), set[int]()
    for layer in layers:
        rows = [row for run in layer.rows for row in run.index]
        if layer.paired:
            gates.update(rows[:len(rows) // 2])
            ups.update(rows[len(rows) // 2:])
    return ExpertStack(last(run.index for layer in layers for run in layer.experts),
                       last(run.index for layer in layers for run in layer.rows),
                       last(run.index for layer in layers for run in layer.columns),
                       tuple(sorted(gates)), tuple(sorted(ups)))


def stacked_factors(adapter: PeftAdapter, factors: ExpertFactors,
                    stacks: Mapping[str, ExpertStack]) -> tuple[str, StackedLowRank]:
    """Return the stack that factors of a stacked parameter change, and its factors.

    For gated experts stored as [num_experts, in, out] whose module does not say so (Llama 4), PEFT
    exchanges in and out: lora_A has the outputs.

    Raises:
        LlmcError: no stack of the module has their shape, or their rank is above MAX_RANK.
    """
    parent = _find_parent(factors.module, stacks)
    own = {name: stack for name, stack in stacks.items()
           if parent in (name, name.rpartition(".")[0])}
    out, width = len(factors.up), factors.down.shape[1]
    gated = any(stack.gates for stack in own.values())
    for sides in ((out, width), (width, out)) if gated else ((out, width),):
        found = [name for name, stack in own.items() if (stack.out, stack.width) == sides
                 and len(factors.down) % stack.num_experts == 0]
        if found:
            break
    if len(found) != 1:
        known = ", ".join(f"{name.rpartition('.')[2]} [{stack.num_experts}, {stack.out}, "
                          f"{stack.width}]" for name, stack in own.items())
        raise LlmcError(f"the adapter in '{adapter.directory}' changes '{factors.module}' by "
                        f"matrices [{out}, {width}] of {len(factors.down)} ranks in all; the "
                        f"base's stacks are {known or 'missing'}; give the adapter's own base")
    name, = found
    up, down = factors.stacks(stacks[name].num_experts, name.rpartition(".")[2])
    _require_rank(adapter, factors.module, down.shape[1])
    left, right = down.transpose(1, 0, 2), up.transpose(2, 0, 1)
    return name, StackedLowRank(left, right) if sides == (out, width) else \
        StackedLowRank(right, left)


def single_factors(adapter: PeftAdapter, modules: Mapping[str, LowRank],
                   stacks: Mapping[str, ExpertStack]) -> \
        tuple[dict[str, StackedLowRank], list[str]]:
    """Return the factors of stacks of which single experts are changed.

    Gate and up of an expert are one matrix of a stack. Its rank is the sum of theirs. Experts that
    are not changed, or are by a lower rank, have zeros.

    Args:
        adapter: the adapter.
        modules: its linear layers that are none of the base, by name.
        stacks: the base's stacks.

    Returns:
        Factors by stack, and the modules that are none of an expert's linear layers.

    Raises:
        LlmcError: the base has no such expert, or one of another shape, or the rank is above
            MAX_RANK.
    """
    found: dict[str, dict[str, dict[int, tuple[str, LowRank]]]] = {}
    others = []
    for module, pair in modules.items():
        match = _EXPERT.fullmatch(module)
        kind = _KINDS.get(match["kind"]) if match else None
        name = _stack_of(match["path"], kind, stacks) if match and kind else None
        if match is None or kind is None or name is None:
            others.append(module)
        else:
            found.setdefault(name, {}).setdefault(kind, {})[int(match["expert"])] = module, pair
    return {name: _joined(adapter, name, stacks[name], kinds)
            for name, kinds in found.items()}, others


def _joined(adapter: PeftAdapter, name: str, stack: ExpertStack,
            kinds: Mapping[str, Mapping[int, tuple[str, LowRank]]]) -> StackedLowRank:
    """The factors of a stack from those of single experts, by kind and expert."""
    downs, ups = [], []
    for kind in sorted(kinds):
        rows = {"gate": stack.gates, "up": stack.ups}.get(kind) or tuple(range(stack.out))
        rank = max(len(pair.down) for _, pair in kinds[kind].values())
        down = np.zeros((rank, stack.num_experts, stack.width), np.float32)
        up = np.zeros((rank, stack.num_experts, stack.out), np.float32)
        for expert, (module, pair) in kinds[kind].items():
            shape = len(pair.up), pair.down.shape[1]
            if expert >= stack.num_experts or shape != (len(rows), stack.width):
                raise LlmcError(f"the adapter in '{adapter.directory}' changes '{module}' as a "
                                f"matrix {list(shape)}, in the base '{name}' has "
                                f"{stack.num_experts} of {[len(rows), stack.width]}; give the "
                                f"adapter's own base")
            down[:len(pair.down), expert] = pair.down
            up[:len(pair.down), expert, np.array(rows)] = pair.up.T
        downs.append(down)
        ups.append(up)
    made = StackedLowRank(np.concatenate(downs), np.concatenate(ups))
    _require_rank(adapter, name, len(made.down))
    return made


def _stack_of(path: str, kind: str, stacks: Mapping[str, ExpertStack]) -> str | None:
    """The stack that has the matrices of a kind of linear layers of the experts `path`."""
    parent = _find_parent(path, stacks)
    for name, stack in stacks.items():
        own, _, leaf = name.rpartition(".")
        if own == parent and (leaf == "down_proj" if kind == "down" else
                              bool(stack.gates) if kind == "gate" else
                              bool(stack.gates) or leaf == "up_proj"):
            return name
    return None


def _find_parent(path: str, stacks: Mapping[str, ExpertStack]) -> str | None:
    """The module of the base's stacks that has this name, or is in the same layer.

    A checkpoint may name the module between a layer and its experts otherwise.
    """
    parents = [*dict.fromkeys(own for name in stacks for own in (name.rpartition(".")[0], name))]
    exact = find_module(path, parents)
    if exact is not None:
        return exact
    layer = _layer_of(path)
    by_layer = {_layer_of(parent): parent for parent in reversed(parents)}
    found = find_module(layer, list(by_layer)) if layer else None
    return None if found is None else by_layer[found]


def _layer_of(path: str) -> str:
    """A name up to its last number; "" without one."""
    match = re.match(r".*\.\d+(?=\.)", path)
    return "" if match is None else match[0]


def _require_rank(adapter: PeftAdapter, module: str, rank: int) -> None:
    if not 1 <= rank <= MAX_RANK:
        raise LlmcError(f"the adapter in '{adapter.directory}' has rank {rank} for '{module}', "
                        f"expected 1 to {MAX_RANK}; merge it instead: llmc compile MODEL --adapter "
                        f"PEFT_DIR")
