"""Rules, passes and the driver that applies them to an onnx-graphsurgeon graph.

A rule anchors at a node, checks what is around it, and either returns a match (a value that holds
all that the rewrite needs) or a `NoMatch` with a reason. A rewrite keeps the name of the tensor it
produces, so that every tensor of a compiled graph can be compared with the raw graph's by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

import numpy as np
import onnx_graphsurgeon as gs

from llmc import plugins
from llmc.compiler.graph.experts import EXPERTS_DOWN, EXPERTS_UP
from llmc.compiler.graph.notes import Context, CountedNote, PassNote
from llmc.compiler.graph.sdpa import SDPA
from llmc.compiler.graph.states import CONVOLUTION, RECURRENCE
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import CompileOptions
from llmc.compiler.quant.stored import Stored
from llmc.errors import MAX_REASON, LlmcError, shortened
from llmc.plugins import Op
from llmc.plugins.roles import ByRows, Columns, Shard
from llmc.targets import TargetSpec, target_spec

_Shard = TypeVar("_Shard", bound=Shard)
_Note = TypeVar("_Note", bound=PassNote)
# Ops that passes make of others before anything is written.
_PASSING = {op.name: op for op in (
    SDPA, EXPERTS_UP, EXPERTS_DOWN, CONVOLUTION, RECURRENCE)}


@dataclass(frozen=True)
class NoMatch:
    """Why a rule left a node alone: `reason` says what did not match, `value` on which thing."""

    reason: str
    value: Any = None

    def __str__(self) -> str:
        return self.reason if self.value is None else f"{self.reason}: {describe(self.value)}"


@dataclass(frozen=True)
class Settings:
    """What the passes may ask about the compilation.

    Args:
        max_seq_len: positions that a sequence may use; rotary tables have that many rows.
        vocab_multiple: the padded vocabulary is a multiple of this.
        mem_max_seq_len: tokens of a prompt that an encoder takes; 0: the model has none.
        model: the model's name in messages.
        columns_together: columns of a weight that stay on one rank; 0: the groups of its scheme.
        options: as the user gave them.
    """

    max_seq_len: int
    vocab_multiple: int
    mem_max_seq_len: int = 0
    model: str = ""
    columns_together: int = 0
    options: CompileOptions = field(default_factory=CompileOptions)

    @property
    def target(self) -> TargetSpec:
        """Capabilities and limits of what runs the graphs."""
        return target_spec(self.options.target)

    def reads(self, stored: Stored) -> bool:
        """Whether a form is one that the target's kernels read."""
        return not self.options.dequantize and self.target.group_multiple > 0 \
            and stored.group_size % self.target.group_multiple == 0 \
            and stored.codes.shape[0] % self.target.row_multiple == 0 \
            and (self.target.permutes_columns or stored.order is None)

    def rounds(self, stored: Stored) -> bool:
        """Whether what a form multiplies is rounded where its checkpoint says so."""
        return self.options.quantize_activations or not stored.rounds_groups


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    Args:
        name: for reports.
        anchors: op types where a match can start.
        check: (node, settings) to a match, or NoMatch; None where the node is none of its business.
        rewrite: (graph, match, settings), changes the graph.
    """

    name: str
    anchors: frozenset[str]
    check: Callable[[gs.Node, Settings], Any]
    rewrite: Callable[[gs.Graph, Any, Settings], None]


class CannotEvaluate(LlmcError):
    """A piece of a graph cannot be run. Where a check does not catch it, its node is refused."""

    def __init__(self, output: gs.Tensor, error: str) -> None:
        reason = shortened(error, MAX_REASON)
        super().__init__(f"ONNX Runtime cannot compute '{output.name}' of the exported graph "
                         f"({reason})")
        self.output = output
        self.reason = NoMatch(f"it cannot be evaluated ({reason})", output)


@dataclass
class Report:
    """What a pass did: rewrites per rule, notes, and which nodes it refused.

    Args:
        name: in model_info.json.
        run: the pass; None: something else.
        encoder: whether it ran on an encoder's graph alone.
    """

    name: str
    run: Callable[..., object] | None = None
    encoder: bool = False
    matches: dict[str, int] = field(default_factory=dict)
    notes: dict[type[PassNote], PassNote] = field(default_factory=dict)
    _refused: dict[str, dict[str, NoMatch]] = field(default_factory=dict)

    def count(self, rule: str, number: int = 1) -> None:
        self.matches[rule] = self.matches.get(rule, 0) + number

    def note(self, note: PassNote) -> None:
        """Add a note, to one of its class if that is counted."""
        if isinstance(note, CountedNote):
            if note.key:
                self.count(note.key, note.count)
            known = self.noted(type(note))
            note = type(note)(note.count + (known.count if known is not None else 0))
        self.notes[type(note)] = note

    def noted(self, kind: type[_Note]) -> _Note | None:
        """The note of a class; None where there is none."""
        found = self.notes.get(kind)
        return found if isinstance(found, kind) else None

    def texts(self, context: Context) -> list[str]:
        """The messages of notes, in the order in which the pass made the first of each class."""
        return [text for note in self.notes.values() if isinstance(note, CountedNote)
                and (text := note.text(context))]

    def refuse(self, node: gs.Node, reason: NoMatch) -> None:
        if reason.value is node:  # named once
            reason = NoMatch(reason.reason)
        self._refused.setdefault(reason.reason, {}).setdefault(describe(node), reason)

    @property
    def refusals(self) -> list[str]:
        """Each reason once, with the first node that it kept from matching, and how many more: a
        model repeats its layers.
        """
        texts = []
        for nodes in self._refused.values():
            node, reason = next(iter(nodes.items()))
            more = f" (and {len(nodes) - 1} more)" if len(nodes) > 1 else ""
            texts.append(f"{node}: {reason}{more}")
        return texts


def apply_rules(graph: gs.Graph, rules: Sequence[Rule], settings: Settings,
                report: Report) -> None:
    """Apply each rule in order to every node that it anchors at, in topological order."""
    for rule in rules:
        report.matches.setdefault(rule.name, 0)
        refused: list[tuple[gs.Node, NoMatch]] = []
        for node in list(graph.nodes):
            if node.op not in rule.anchors or not node.outputs:
                continue
            try:
                match = rule.check(node, settings)
            except CannotEvaluate as error:
                match = error.reason
            if match is None:
                continue
            if isinstance(match, NoMatch):
                refused.append((node, match))
                continue
            rule.rewrite(graph, match, settings)
            report.count(rule.name)
        tidy(graph)
        for node, reason in refused:
            if node.outputs:  # no rewrite has made it needless
                report.refuse(node, reason)


def tidy(graph: gs.Graph) -> None:
    """Drop nodes that nothing uses and put the rest in topological order, keeping it stable.

    Collectives stay, in the order that they have: a rank that does not need the result must take
    part for those that do.
    """
    needed: set[int] = set()
    order: list[gs.Node] = []
    roots = [node for node in graph.nodes if (op := op_of(node)) is not None and op.collective]
    roots += [node for tensor in graph.outputs for node in tensor.inputs]
    stack = [(node, False) for node in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if id(node) in needed:
            continue
        needed.add(id(node))
        stack.append((node, True))
        stack.extend((producer, False) for tensor in reversed(node.inputs)
                     for producer in reversed(tensor.inputs) if id(producer) not in needed)
    for node in graph.nodes:
        if id(node) not in needed:
            node.inputs.clear()
            node.outputs.clear()
    graph.nodes.clear()
    graph.nodes.extend(order)


# What rules are written with.

def describe(value: Any) -> str:
    """A node, tensor or anything else, as messages name it."""
    if isinstance(value, gs.Node):
        return f"{value.op} '{value.name or value.outputs[0].name}'"
    if isinstance(value, gs.Tensor):
        return f"'{value.name}'"
    return str(value)


def producer(tensor: gs.Tensor) -> gs.Node | None:
    """The node that computes a tensor; None for inputs and constants."""
    return tensor.inputs[0] if tensor.inputs else None


def consumers(graph: gs.Graph, tensor: gs.Tensor) -> list[gs.Node | None]:
    """The nodes that read a tensor, each once; None stands for the graph's output."""
    nodes: list[gs.Node | None] = list({id(node): node for node in tensor.outputs}.values())
    if any(tensor is output for output in graph.outputs):
        nodes.append(None)
    return nodes


def is_llmc(node: gs.Node | None) -> TypeGuard[gs.Node]:
    """Whether a node is an op of llmc's domain."""
    return node is not None and node.domain == plugins.DOMAIN


def op_of(node: gs.Node | None) -> Op | None:
    """The op that a node is; None for ONNX's own."""
    if not is_llmc(node):
        return None
    return _PASSING.get(node.op) or plugins.registry().get(node.op)


def is_op(node: gs.Node | None, *ops: Op) -> TypeGuard[gs.Node]:
    """Whether a node is one of these ops."""
    return is_llmc(node) and any(node.op == op.name for op in ops)


def column_roles(node: gs.Node | None, tensor: gs.Tensor) -> list[Columns]:
    """As which of its inputs a node reads a tensor, if its op takes columns of wider rows for all
    of them; none where it does not.
    """
    op = op_of(node)
    if node is None or op is None:
        return []
    roles = {role.input: role for role in op.columns}
    names = [name for name, given in operands(node).items() if given is tensor]
    return [roles[name] for name in names] if all(name in roles for name in names) else []


def takes_columns(node: gs.Node | None, tensor: gs.Tensor) -> bool:
    """Whether a node reads a tensor where it lies among the columns of wider rows."""
    return bool(column_roles(node, tensor))


def shard_of(node: gs.Node | None, kind: type[_Shard]) -> _Shard | None:
    """How a node's op can be divided in this way; None if it cannot."""
    op = op_of(node)
    return next((way for way in op.shard if isinstance(way, kind)), None) if op else None


def attends(node: gs.Node | None) -> TypeGuard[gs.Node]:
    """Whether a node's op is attention."""
    op = op_of(node)
    return op is not None and op.attention is not None


def attends_causally(node: gs.Node) -> TypeGuard[gs.Node]:
    """Whether a node's op is attention to a cache, its own or another layer's."""
    op = op_of(node)
    return op is not None and op.attention is not None and bool(
        op.attention.caches or op.attention.reads)


def knows_sequences(node: gs.Node | None) -> TypeGuard[gs.Node]:
    """Whether a token's result depends on those before it: the op attends or keeps a state."""
    op = op_of(node)
    return op is not None and (op.attention is not None or op.state is not None)


def caches(node: gs.Node) -> list[tuple[gs.Tensor, gs.Tensor]]:
    """What a node keeps from step to step: each cache, with the output that continues it."""
    op = op_of(node)
    if op is None or op.attention is None:
        return []
    return [(node.inputs[op.input_names.index(name)], node.outputs[op.outputs.index(f"{name}_out")])
            for name in op.attention.caches]


def state_of(node: gs.Node) -> tuple[gs.Tensor, gs.Tensor] | None:
    """The state that a node keeps from step to step, and the output that continues it."""
    op = op_of(node)
    if op is None or op.state is None:
        return None
    name = op.state.state
    return node.inputs[op.input_names.index(name)], node.outputs[op.outputs.index(f"{name}_out")]


def exact_outputs(node: gs.Node) -> list[gs.Tensor]:
    """The outputs of a node of ours that have a dtype of their own."""
    op = op_of(node)
    return [] if op is None else [
        tensor for name, tensor in zip(op.outputs, node.outputs, strict=False)
        if name in op.made_dtypes(fields_of(node))]


def fields_of(node: gs.Node) -> dict[str, Any]:
    """Every field of a node of ours, with defaults filled in."""
    op = op_of(node)
    assert op is not None, node.op
    return op.complete(node.attrs)


def operand(node: gs.Node, name: str) -> gs.Tensor | None:
    """The input of this name of a node of ours; None where it has none."""
    op = op_of(node)
    assert op is not None, node.op
    if name not in op.input_names:
        return None
    index = op.input_names.index(name)
    if index >= len(node.inputs) or node.inputs[index].is_empty():
        return None
    return node.inputs[index]


def operands(node: gs.Node) -> dict[str, gs.Tensor]:
    """The inputs of a node of ours that are there, by name."""
    op = op_of(node)
    assert op is not None, node.op
    return {name: tensor for name, tensor in zip(op.input_names, node.inputs, strict=False)
            if not tensor.is_empty()}


def row_weights(node: gs.Node | None) -> dict[str, gs.Tensor]:
    """Of a linear layer, the inputs with a row for each column of its output, by name, the matrix
    first; nothing for any other node.
    """
    way = shard_of(node, ByRows)
    if node is None or way is None or way.stacked > 1:
        return {}
    return {name: tensor for name in way.inputs if (tensor := operand(node, name)) is not None}


def graph_input(graph: gs.Graph, name: str, shape: tuple[str | int, ...]) -> gs.Variable:
    """The graph's int32 input of this name, made on first use."""
    found = next((tensor for tensor in graph.inputs if tensor.name == name), None)
    if found is None:
        found = gs.Variable(name, np.int32, shape)
        graph.inputs.append(found)
    return found


def constant(tensor: gs.Tensor) -> np.ndarray | None:
    """The array of a small constant; None for weights and computed tensors."""
    if not isinstance(tensor, gs.Constant) or isinstance(tensor._values, Weight):
        return None
    values: np.ndarray = tensor.values
    return values


def scalar(tensor: gs.Tensor) -> float | None:
    """The value of a one-element constant."""
    array = constant(tensor)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def weight(tensor: gs.Tensor) -> Weight | None:
    """A constant as a `Weight`; None for computed tensors."""
    if not isinstance(tensor, gs.Constant):
        return None
    values = tensor._values
    return values if isinstance(values, Weight) else Weight.of(tensor.values, tensor.name)


def values_of(tensor: gs.Tensor) -> Weight:
    """The values of a tensor that is known to be a constant."""
    values = weight(tensor)
    assert values is not None, tensor.name
    return values


def replace(graph: gs.Graph, op: Op, inputs: Mapping[str, gs.Tensor | None],
            outputs: Sequence[gs.Tensor], attrs: Mapping[str, Any] | None = None) -> gs.Node:
    """Add a node of ours that computes `outputs` in place of their present producers."""
    for tensor in outputs:
        tensor.inputs.clear()
    node = gs.Node(op=op.name, name=outputs[0].name, domain=plugins.DOMAIN, attrs=dict(attrs or {}),
                   inputs=arranged(op, inputs), outputs=list(outputs))
    graph.nodes.append(node)
    return node


def arranged(op: Op, inputs: Mapping[str, gs.Tensor | None]) -> list[gs.Tensor]:
    """The inputs of a node in order, with empty tensors for absent ones but the last."""
    unknown = set(inputs) - set(op.input_names)
    assert not unknown, f"{op.name} has no inputs {unknown}"
    given = [inputs.get(name) or gs.Variable.empty() for name in op.input_names]
    while given and given[-1].is_empty():
        given.pop()
    return given


def merge_constants(gemms: Sequence[gs.Node], given: str, values: Weight, role: str,
                    output: gs.Tensor) -> gs.Constant:
    """A constant for what GEMMs have at the input `given`, merged: `a.q.weight`, `a.k.weight` →
    `a.<role>.weight`. Where others read the parts too, the name gets a suffix to stay unique.
    """
    tensors = [operands(gemm)[given] for gemm in gemms]
    parts = list({tensor.name: tensor for tensor in tensors}.values())
    inside = {id(gemm) for gemm in gemms}
    shared = any(id(user) not in inside for part in parts for user in part.outputs)
    names = [part.name.split(".") for part in parts]
    name = parts[0].name
    if len(parts) > 1:
        common = next((i for i, words in enumerate(zip(*names, strict=False))
                       if len(set(words)) > 1), len(names[0]) - 1)
        name = ".".join([*names[0][:min(common, len(names[0]) - 2)], role, names[0][-1]])
    return gs.Constant(f"{name}.{output.name}" if shared else name, values)
