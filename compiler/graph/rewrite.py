"""Rules, passes and the driver that applies them to an onnx-graphsurgeon graph.

A rule anchors at a node, checks what is around it, and either returns a match (a value that holds
all that the rewrite needs) or a `NoMatch` with a reason. A rewrite keeps the name of the tensor it
produces, so that every tensor of a compiled graph can be compared with the raw graph's by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from llmc import plugins
from llmc.compiler.graph.weights import Weight


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
        max_beam_width: beams of a prompt that may share what is in the KV cache.
    """

    max_seq_len: int
    vocab_multiple: int
    max_beam_width: int = 1


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


@dataclass
class Report:
    """What a pass did: rewrites per rule, and each refusal once."""

    name: str
    matches: dict[str, int] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)

    def count(self, rule: str, number: int = 1) -> None:
        self.matches[rule] = self.matches.get(rule, 0) + number

    def refuse(self, node: gs.Node, reason: NoMatch) -> None:
        self.refusals.append(f"{describe(node)}: {reason}")


def apply_rules(graph: gs.Graph, rules: Sequence[Rule], settings: Settings,
                report: Report) -> None:
    """Apply each rule in order to every node that it anchors at, in topological order."""
    for rule in rules:
        report.matches.setdefault(rule.name, 0)
        for node in list(graph.nodes):
            if node.op not in rule.anchors or not node.outputs:
                continue
            match = rule.check(node, settings)
            if match is None:
                continue
            if isinstance(match, NoMatch):
                report.refuse(node, match)
                continue
            rule.rewrite(graph, match, settings)
            report.count(rule.name)
        tidy(graph)


def tidy(graph: gs.Graph) -> None:
    """Drop nodes that nothing uses and put the rest in topological order, keeping it stable."""
    needed: set[int] = set()
    order: list[gs.Node] = []
    stack = [(node, False) for tensor in reversed(graph.outputs)
             for node in reversed(tensor.inputs)]
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


def verify(graph: gs.Graph, after: str) -> None:
    """Check the graph's structure and every llmc node's contract.

    Raises:
        AssertionError: a pass broke the graph; the message names the pass.
    """
    known = {id(tensor) for tensor in graph.inputs}
    names: dict[str, int] = {tensor.name: id(tensor) for tensor in graph.inputs}

    def fail(message: str) -> None:
        raise AssertionError(f"pass '{after}' broke the graph: {message}")

    for node in graph.nodes:
        for tensor in node.inputs:
            if not tensor.is_empty() and not isinstance(tensor, gs.Constant) \
                    and id(tensor) not in known:
                fail(f"{describe(node)} reads '{tensor.name}', which nothing before it computes")
            if not tensor.is_empty() and names.setdefault(tensor.name, id(tensor)) != id(tensor):
                fail(f"two tensors are named '{tensor.name}'")
        for tensor in node.outputs:
            if id(tensor) in known:
                fail(f"'{tensor.name}' is computed twice")
            known.add(id(tensor))
            if not tensor.is_empty() and names.setdefault(tensor.name, id(tensor)) != id(tensor):
                fail(f"two tensors are named '{tensor.name}'")
        if node.domain == plugins.DOMAIN and node.op in plugins.registry():
            op = plugins.registry()[node.op]
            try:
                op.complete(node.attrs)
                op.present([tensor.name for tensor in node.inputs])
            except ValueError as error:
                fail(f"{describe(node)}: {error}")
    for tensor in graph.outputs:
        if id(tensor) not in known:
            fail(f"the output '{tensor.name}' is not computed")


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


def is_llmc(node: gs.Node | None, *ops: str) -> bool:
    """Whether a node is one of these llmc:: ops (any, if none is named)."""
    return node is not None and node.domain == plugins.DOMAIN and (not ops or node.op in ops)


def constant(tensor: gs.Tensor) -> np.ndarray | None:
    """The array of a small constant; None for weights and computed tensors."""
    if not isinstance(tensor, gs.Constant) or isinstance(tensor._values, Weight):
        return None
    return tensor.values


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


def absent() -> gs.Variable:
    """An optional input that is not there."""
    return gs.Variable.empty()


def replace(graph: gs.Graph, op: str, inputs: Iterable[gs.Tensor | None],
            outputs: Sequence[gs.Tensor], attrs: dict[str, Any] | None = None) -> gs.Node:
    """Add an llmc:: node that computes `outputs` in place of their present producers."""
    given = [tensor if tensor is not None else absent() for tensor in inputs]
    while given and given[-1].is_empty():
        given.pop()
    for tensor in outputs:
        tensor.inputs.clear()
    node = gs.Node(op=op, name=outputs[0].name, domain=plugins.DOMAIN, attrs=attrs or {},
                   inputs=given, outputs=list(outputs))
    graph.nodes.append(node)
    return node


def merge_constants(gemms: Sequence[gs.Node], position: int, values: Weight, role: str,
                    output: gs.Tensor) -> gs.Constant:
    """A constant for what GEMMs have at an input, merged: `a.q.weight`, `a.k.weight` →
    `a.<role>.weight`. Where others read the parts too, the name gets a suffix to stay unique.
    """
    parts = list({gemm.inputs[position].name: gemm.inputs[position] for gemm in gemms}.values())
    inside = {id(gemm) for gemm in gemms}
    shared = any(id(user) not in inside for part in parts for user in part.outputs)
    names = [part.name.split(".") for part in parts]
    name = parts[0].name
    if len(parts) > 1:
        common = next((i for i, words in enumerate(zip(*names, strict=False))
                       if len(set(words)) > 1), len(names[0]) - 1)
        name = ".".join([*names[0][:min(common, len(names[0]) - 2)], role, names[0][-1]])
    return gs.Constant(f"{name}.{output.name}" if shared else name, values)
