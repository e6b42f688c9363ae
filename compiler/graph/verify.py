"""Verify a graph after a pass: structure, contracts of llmc nodes, shapes.

An op's shape rule defines which input shapes fit together and the shapes of the outputs. A pass
that declares other shapes is reported with the node. Unknown shapes are filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import describe, op_of
from llmc.plugins import Op, Shape

# Dimension names that llmc assigns. An exporter's names may stand for any of these.
_DIMENSIONS = frozenset({"batch", "seq", "mem_seq", "num_tokens", "num_logits", "num_memory_tokens",
                         "batch_plus_1", "num_blocks", "block_size", "max_blocks", "num_embeds"})


def verify(graph: gs.Graph, after: str) -> None:
    """Check `graph`, and fill in output shapes by the ops' rules.

    Raises:
        AssertionError: a pass broke the graph; the message names the pass and the node.
    """
    known = {id(tensor) for tensor in graph.inputs}
    names: dict[str, int] = {tensor.name: id(tensor) for tensor in graph.inputs}

    def fail(message: str) -> None:
        raise AssertionError(f"pass '{after}' broke the graph: {message}")

    for node in graph.nodes:
        for tensor in node.inputs:
            if not tensor.is_empty() and not isinstance(tensor, gs.Constant) \
                    and id(tensor) not in known:
                fail(f"{describe(node)} reads '{tensor.name}', which no earlier node computes")
            if not tensor.is_empty() and names.setdefault(tensor.name, id(tensor)) != id(tensor):
                fail(f"two tensors are named '{tensor.name}'")
        for tensor in node.outputs:
            if id(tensor) in known:
                fail(f"'{tensor.name}' is computed twice")
            known.add(id(tensor))
            if not tensor.is_empty() and names.setdefault(tensor.name, id(tensor)) != id(tensor):
                fail(f"two tensors are named '{tensor.name}'")
        op = op_of(node)
        if op is not None:
            try:
                _check_contract(node, op)
            except ValueError as error:
                fail(f"{describe(node)}: {error}")
    for tensor in graph.outputs:
        if id(tensor) not in known:
            fail(f"the output '{tensor.name}' is not computed")


def _check_contract(node: gs.Node, op: Op) -> None:
    """Check a node's attributes, inputs and output shapes.

    Raises:
        ValueError: the node violates its op's contract.
    """
    fields = op.complete(node.attrs)
    present = op.present([tensor.name for tensor in node.inputs])
    shapes: dict[str, Shape] = {}
    for name, tensor in zip(op.input_names, node.inputs, strict=False):
        if name in present:
            if tensor.shape is None or None in tensor.shape:
                return  # the shape rule needs all of them
            shapes[name] = tuple(tensor.shape)
    expected = op.shapes(shapes, fields)
    if op.dims is not None and _is_packed(shapes, op.dims(fields, present)):
        expected = op.fit(shapes, fields)
    for tensor, shape in zip(node.outputs, expected, strict=False):
        if tensor.is_empty():
            continue
        declared = tensor.shape
        if declared is not None and not _fits(declared, shape):
            raise ValueError(f"'{tensor.name}' is declared {list(declared)}, its inputs "
                             f"{ {name: list(s) for name, s in shapes.items()} } require "
                             f"{list(shape)}")
        if declared is None or any(_is_unknown(dim) for dim in declared):
            tensor.shape = shape


def _is_packed(shapes: Mapping[str, Shape], dims: Mapping[str, Shape]) -> bool:
    """Whether inputs are packed tokens with llmc's dimension names, as the op declares them."""
    return all(len(shape) == len(dims[name]) and not any(map(_is_unknown, shape))
               for name, shape in shapes.items())


def _fits(declared: Sequence[int | str | None], shape: Shape) -> bool:
    return len(declared) == len(shape) and all(
        a == b or _is_unknown(a) or _is_unknown(b)
        for a, b in zip(declared, shape, strict=True))


def _is_unknown(dim: int | str | None) -> bool:
    return not isinstance(dim, int) and dim not in _DIMENSIONS \
        and not str(dim).startswith(("lora_rows_", "max_lora"))
