"""Rules, passes and the driver that applies them to an onnx-graphsurgeon graph.

A rule anchors at a node, checks its neighborhood, and returns either a match (a value with all that
the rewrite needs) or a `NoMatch` with a reason. A rewrite keeps the names of the tensors that it
produces, so that tensors of a compiled graph can be compared with the exported graph's by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, TypeVar

import numpy as np
import onnx_graphsurgeon as gs

from llmc import plugins
from llmc.compiler.graph.embeds import DEEP_EMBEDS, TOKEN_EMBEDS
from llmc.compiler.graph.expert_products import EXPERTS_DOWN, EXPERTS_UP
from llmc.compiler.graph.image_samples import ImageSample, Size
from llmc.compiler.graph.notes import Context, CountedNote, PassNote
from llmc.compiler.graph.recurrence import CONVOLUTION, RECURRENCE
from llmc.compiler.graph.sdpa import MODEL_CACHE, SDPA
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import CompileOptions
from llmc.compiler.quant.stored import Stored
from llmc.errors import MAX_REASON, LlmcError, shortened
from llmc.plugins import Op
from llmc.plugins.roles import ByRows, Columns, Shard
from llmc.targets import TargetSpec, target_spec

_Shard = TypeVar("_Shard", bound=Shard)
_Note = TypeVar("_Note", bound=PassNote)
# Intermediate ops, which passes replace before a graph is written.
_INTERMEDIATE = {op.name: op for op in (
    SDPA, MODEL_CACHE, TOKEN_EMBEDS, DEEP_EMBEDS, EXPERTS_UP, EXPERTS_DOWN, CONVOLUTION,
    RECURRENCE)}


@dataclass(frozen=True)
class NoMatch:
    """Why a rule did not match: the unmet condition, and the node or value that violates it."""

    reason: str
    value: Any = None

    def __str__(self) -> str:
        return self.reason if self.value is None else f"{self.reason}: {describe(self.value)}"


@dataclass(frozen=True)
class Settings:
    """The compilation's parameters that passes read.

    Args:
        max_seq_len: positions of a sequence, the rows of rotary tables.
        vocab_multiple: the vocabulary is padded to a multiple of this.
        mem_max_seq_len: maximum tokens of an encoder's input; 0: the model has no encoder.
        model: the model's name in messages.
        causal: whether all self-attention is causal, as in models that generate text.
        columns_together: consecutive columns of a weight that stay on one rank; 0: the group size
            of its scheme.
        options: of `llmc compile`.
        image_samples: inputs of the image encoder, for passes over it.
    """

    max_seq_len: int
    vocab_multiple: int
    mem_max_seq_len: int = 0
    model: str = ""
    columns_together: int = 0
    causal: bool = True
    options: CompileOptions = field(default_factory=CompileOptions)
    image_samples: tuple[ImageSample, ...] = ()

    @property
    def target(self) -> TargetSpec:
        """Capabilities and limits of the target."""
        return target_spec(self.options.target)

    def reads(self, stored: Stored) -> bool:
        """Whether the target's kernels read a storage format."""
        return not self.options.dequantize and self.target.group_multiple > 0 \
            and stored.group_size % self.target.group_multiple == 0 \
            and stored.codes.shape[0] % self.target.row_multiple == 0 \
            and (self.target.permutes_columns or stored.order is None)

    def rounds(self, stored: Stored) -> bool:
        """Whether the activation quantization that a checkpoint declares is applied."""
        return self.options.quantize_activations or not stored.rounds_groups


@dataclass(frozen=True)
class Rule:
    """A rewrite.

    Args:
        name: for reports.
        anchors: op types at which a match can start.
        check: (node, settings) to a match or NoMatch; None: the rule does not concern the node.
        rewrite: (graph, match, settings), changes the graph.
    """

    name: str
    anchors: frozenset[str]
    check: Callable[[gs.Node, Settings], Any]
    rewrite: Callable[[gs.Graph, Any, Settings], None]


class CannotEvaluate(LlmcError):
    """A subgraph cannot be run.

    The driver refuses the rule's node if the check does not catch it.
    """

    def __init__(self, output: gs.Tensor, error: str) -> None:
        reason = shortened(error, MAX_REASON)
        super().__init__(f"ONNX Runtime cannot compute '{output.name}' of the exported graph "
                         f"({reason})")
        self.output = output
        self.reason = NoMatch(f"it cannot be evaluated ({reason})", output)


@dataclass
class Report:
    """Result of a pass: rewrites per rule, notes, and refused nodes.

    Args:
        name: in model_info.json.
        run: the pass; None: the entry is not of a pass.
        part: whether it ran on the graph of an encoder, a draft model, or an encoder of images or
            audio alone.
    """

    name: str
    run: Callable[..., object] | None = None
    part: Literal["", "encoder", "draft", "image", "audio"] = ""
    matches: dict[str, int] = field(default_factory=dict)
    notes: dict[type[PassNote], PassNote] = field(default_factory=dict)
    _refused: dict[str, dict[str, NoMatch]] = field(default_factory=dict)

    def count(self, rule: str, number: int = 1) -> None:
        self.matches[rule] = self.matches.get(rule, 0) + number

    def note(self, note: PassNote) -> None:
        """Add a note; counted notes of one class are summed."""
        if isinstance(note, CountedNote):
            if note.key:
                self.count(note.key, note.count)
            known = self.noted(type(note))
            note = type(note)(note.count + (known.count if known is not None else 0))
        self.notes[type(note)] = note

    def noted(self, kind: type[_Note]) -> _Note | None:
        """The note of a class, or None."""
        found = self.notes.get(kind)
        return found if isinstance(found, kind) else None

    def texts(self, context: Context) -> list[str]:
        """Messages of the counted notes, in the order of their first occurrence."""
        return [text for note in self.notes.values() if isinstance(note, CountedNote)
                and (text := note.text(context))]

    def refuse(self, node: gs.Node, reason: NoMatch) -> None:
        if reason.value is node:  # the text names the node already
            reason = NoMatch(reason.reason)
        self._refused.setdefault(reason.reason, {}).setdefault(describe(node), reason)

    @property
    def refusals(self) -> list[str]:
        """Each reason once, with its first node and the number of further ones.

        Layers repeat, so one node stands for all.
        """
        texts = []
        for nodes in self._refused.values():
            node, reason = next(iter(nodes.items()))
            more = f" (and {len(nodes) - 1} more)" if len(nodes) > 1 else ""
            texts.append(f"{node}: {reason}{more}")
        return texts


def apply_rules(graph: gs.Graph, rules: Sequence[Rule], settings: Settings,
                report: Report) -> None:
    """Apply each rule in order to all of its anchors, in topological order."""
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
            if node.outputs:  # not removed by a rewrite
                report.refuse(node, reason)


def part_of(graph: gs.Graph, index: int) -> Literal["", "encoder", "draft"]:
    """The part of a model that a rank's graph of this index is; see `Report`."""
    if not index:
        return ""
    return "draft" if graph.outputs[0].name == "logits" else "encoder"


def tidy(graph: gs.Graph) -> None:
    """Remove unused nodes and sort the rest topologically (a stable sort).

    Collectives stay, in their order: a rank that does not use the result still has to take part.
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


# Building blocks of rules.

def describe(value: Any) -> str:
    """The text that names a node, tensor or other value in messages."""
    if isinstance(value, gs.Node):
        return f"{value.op} '{value.name or value.outputs[0].name}'"
    if isinstance(value, gs.Tensor):
        return f"'{value.name}'"
    return str(value)


def producer(tensor: gs.Tensor) -> gs.Node | None:
    """The node that computes a tensor; None for graph inputs and constants."""
    return tensor.inputs[0] if tensor.inputs else None


def consumers(graph: gs.Graph, tensor: gs.Tensor) -> list[gs.Node | None]:
    """The nodes that read a tensor, each once; None stands for a graph output."""
    nodes: list[gs.Node | None] = list({id(node): node for node in tensor.outputs}.values())
    if any(tensor is output for output in graph.outputs):
        nodes.append(None)
    return nodes


def is_llmc(node: gs.Node | None) -> TypeGuard[gs.Node]:
    """Whether a node's op is in llmc's domain."""
    return node is not None and node.domain == plugins.DOMAIN


def op_of(node: gs.Node | None) -> Op | None:
    """The op of a node; None for ops of ONNX's domain."""
    if not is_llmc(node):
        return None
    return _INTERMEDIATE.get(node.op) or plugins.registry().get(node.op)


def is_op(node: gs.Node | None, *ops: Op) -> TypeGuard[gs.Node]:
    """Whether a node's op is one of these."""
    return is_llmc(node) and any(node.op == op.name for op in ops)


def column_roles(node: gs.Node | None, tensor: gs.Tensor) -> list[Columns]:
    """Roles of the inputs through which a node reads a tensor as columns of wider rows.

    Empty if the op does not support it for all of these inputs.
    """
    op = op_of(node)
    if node is None or op is None:
        return []
    roles = {role.input: role for role in op.columns}
    names = [name for name, given in operands(node).items() if given is tensor]
    return [roles[name] for name in names] if all(name in roles for name in names) else []


def takes_columns(node: gs.Node | None, tensor: gs.Tensor) -> bool:
    """Whether a node can read a tensor as columns of wider rows."""
    return bool(column_roles(node, tensor))


def shard_of(node: gs.Node | None, kind: type[_Shard]) -> _Shard | None:
    """The op's sharding of this kind, or None."""
    op = op_of(node)
    return next((way for way in op.shard if isinstance(way, kind)), None) if op else None


def attends(node: gs.Node | None) -> TypeGuard[gs.Node]:
    """Whether a node's op is attention."""
    op = op_of(node)
    return op is not None and op.attention is not None


def attends_causally(node: gs.Node) -> TypeGuard[gs.Node]:
    """Whether a node's op is attention to a KV cache, of its layer or of another."""
    op = op_of(node)
    return op is not None and op.attention is not None and bool(
        op.attention.caches or op.attention.reads)


def pools(node: gs.Node | None) -> TypeGuard[gs.Node]:
    """Whether a node's op makes one row per sequence."""
    op = op_of(node)
    return op is not None and op.pools


def knows_sequences(node: gs.Node | None) -> TypeGuard[gs.Node]:
    """Whether a token's result depends on earlier tokens (attention or recurrent state)."""
    op = op_of(node)
    return op is not None and (op.attention is not None or op.state is not None)


def caches(node: gs.Node) -> list[tuple[gs.Tensor, gs.Tensor]]:
    """A node's KV caches: each input, with the output that updates it."""
    op = op_of(node)
    if op is None or op.attention is None:
        return []
    return [(node.inputs[op.input_names.index(name)], node.outputs[op.outputs.index(f"{name}_out")])
            for name in op.attention.caches]


def reads(graph: gs.Graph, node: gs.Node) -> list[gs.Tensor]:
    """KV caches of another graph that a node reads, which are inputs of its graph."""
    op = op_of(node)
    names = op.attention.reads if op is not None and op.attention is not None else ()
    return [tensor for name in names if (tensor := operand(node, name)) is not None
            and any(tensor is given for given in graph.inputs)]


def state_of(node: gs.Node) -> tuple[gs.Tensor, gs.Tensor] | None:
    """A node's recurrent state: the input, and the output that updates it; None without one."""
    op = op_of(node)
    if op is None or op.state is None:
        return None
    name = op.state.state
    return node.inputs[op.input_names.index(name)], node.outputs[op.outputs.index(f"{name}_out")]


def exact_outputs(node: gs.Node) -> list[gs.Tensor]:
    """Outputs of an llmc node with a dtype that the op prescribes."""
    op = op_of(node)
    return [] if op is None else [
        tensor for name, tensor in zip(op.outputs, node.outputs, strict=False)
        if name in op.made_dtypes(fields_of(node))]


def fields_of(node: gs.Node) -> dict[str, Any]:
    """All attributes of an llmc node, defaults included."""
    op = op_of(node)
    assert op is not None, node.op
    return op.complete(node.attrs)


def operand(node: gs.Node, name: str) -> gs.Tensor | None:
    """An llmc node's input by name, or None if absent."""
    op = op_of(node)
    assert op is not None, node.op
    if name not in op.input_names:
        return None
    index = op.input_names.index(name)
    if index >= len(node.inputs) or node.inputs[index].is_empty():
        return None
    return node.inputs[index]


def operands(node: gs.Node) -> dict[str, gs.Tensor]:
    """The present inputs of an llmc node, by name."""
    op = op_of(node)
    assert op is not None, node.op
    return {name: tensor for name, tensor in zip(op.input_names, node.inputs, strict=False)
            if not tensor.is_empty()}


def row_weights(node: gs.Node | None) -> dict[str, gs.Tensor]:
    """Inputs of a linear layer with one row per output column, by name, the matrix first.

    Empty for other nodes.
    """
    way = shard_of(node, ByRows)
    if node is None or way is None or way.stacked > 1:
        return {}
    return {name: tensor for name in way.inputs if (tensor := operand(node, name)) is not None}


def graph_input(graph: gs.Graph, name: str, shape: tuple[str | int, ...]) -> gs.Variable:
    """The graph's int32 input of this name, added on first use."""
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
    """The value of a one-element constant, or None."""
    array = constant(tensor)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def weight(tensor: gs.Tensor) -> Weight | None:
    """A constant as a `Weight`; None for computed tensors."""
    if not isinstance(tensor, gs.Constant):
        return None
    values = tensor._values
    return values if isinstance(values, Weight) else Weight.of(tensor.values, tensor.name)


def values_of(tensor: gs.Tensor) -> Weight:
    """The values of a tensor that must be a constant."""
    values = weight(tensor)
    assert values is not None, tensor.name
    return values


def replace(graph: gs.Graph, op: Op, inputs: Mapping[str, gs.Tensor | None],
            outputs: Sequence[gs.Tensor], attrs: Mapping[str, Any] | None = None) -> gs.Node:
    """Add an llmc node that computes `outputs` in place of their present producers."""
    for tensor in outputs:
        tensor.inputs.clear()
    node = gs.Node(op=op.name, name=outputs[0].name, domain=plugins.DOMAIN, attrs=dict(attrs or {}),
                   inputs=arranged(op, inputs), outputs=list(outputs))
    graph.nodes.append(node)
    return node


def reshaped(graph: gs.Graph, x: gs.Tensor, name: str,
             shape: gs.Tensor | np.ndarray | Sequence[int],
             sizes: Sequence[Size] | None = None) -> gs.Variable:
    """Add a Reshape.

    Args:
        x: its input.
        name: of the result.
        shape: a tensor or numbers; one may be -1.
        sizes: of the result's axes; None: not known.
    """
    result = gs.Variable(name, x.dtype, None if sizes is None else list(sizes))
    given = shape if isinstance(shape, gs.Tensor) else \
        gs.Constant(f"{name}.shape", np.array(shape, np.int64))
    graph.nodes.append(gs.Node(op="Reshape", name=name, inputs=[x, given], outputs=[result]))
    return result


def arranged(op: Op, inputs: Mapping[str, gs.Tensor | None]) -> list[gs.Tensor]:
    """Inputs of a node in order: empty tensors for absent ones, trailing ones omitted."""
    unknown = set(inputs) - set(op.input_names)
    assert not unknown, f"{op.name} has no inputs {unknown}"
    given = [inputs.get(name) or gs.Variable.empty() for name in op.input_names]
    while given and given[-1].is_empty():
        given.pop()
    return given


def merge_constants(gemms: Sequence[gs.Node], given: str, values: Weight, role: str,
                    output: gs.Tensor) -> gs.Constant:
    """A constant for the merged weights of GEMMs.

    It is named like them: `a.q.weight`, `a.k.weight` → `a.<role>.weight`. The name gets a suffix if
    nodes outside `gemms` read the parts too.

    Args:
        gemms: the nodes.
        given: name of the input.
        values: the merged weight.
        role: last part of the layer's new name.
        output: tensor whose name is the suffix.
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
