"""Evaluate what is constant, keep weights lazy, and drop what does nothing.

Given:   Transpose(W), Add(w, 1), Cast(x) to its own dtype, Slice(x) of everything, Shape(hidden)
Result:  the weight with the work noted on it; nothing; nothing; Concat(Shape(input_ids)[0:1], …)

What a causal mask was computed with loses its last reader in the attention pass and is dropped
there as dead code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from llmc.compiler.graph.constants import fold_constants
from llmc.compiler.graph.names import ENCODER_OUTPUT
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    constant,
    producer,
    scalar,
    weight,
)
from llmc.compiler.graph.weights import Weight

_SAME_DTYPE = {"Add", "Div", "Exp", "Log", "Mul", "Neg", "Pow", "Sigmoid", "Softplus", "Sqrt",
               "Sub", "Tanh"}
_INT_MAX = 2**31 - 1
# The input and its axis that a dimension is known from.
_DIMENSIONS = {"batch": ("input_ids", 0), "seq": ("input_ids", 1), "mem_seq": (ENCODER_OUTPUT, 1)}


def fold(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    _read_scalars(graph)
    report.count("constant", fold_constants(graph))
    apply_rules(graph, [CAST_LIKE, DROP, SEQUENCE, WEIGHT, SHAPE], settings, report)
    report.count("constant", fold_constants(graph))
    apply_rules(graph, [DROP], settings, report)


def _read_scalars(graph: gs.Graph) -> None:
    """Turn parameters of one element, such as an activation's, into plain constants."""
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight) \
                and int(np.prod(tensor.shape)) == 1:
            tensor.values = tensor._values.load()


def forward(node: gs.Node, graph: gs.Graph) -> None:
    """Let the readers of a node's output read its first input."""
    source, result = node.inputs[0], node.outputs[0]
    for index, output in enumerate(graph.outputs):
        if output is result:  # the graph's output keeps its name and becomes the producer's
            maker = producer(source)
            assert maker is not None
            position = next(i for i, t in enumerate(maker.outputs) if t is source)
            node.outputs.clear()
            for reader in list(source.outputs):
                for i, tensor in enumerate(reader.inputs):
                    if tensor is source:
                        reader.inputs[i] = result
            maker.outputs[position] = result
            graph.outputs[index] = result
            return
    for reader in list(result.outputs):
        for i, tensor in enumerate(reader.inputs):
            if tensor is result:
                reader.inputs[i] = source
    node.outputs.clear()


def _numpy(dtype: object) -> np.dtype:
    """graphsurgeon has ONNX's number for a dtype that numpy has not."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype) if isinstance(dtype, int)
                    else dtype)  # type: ignore[call-overload]


def _does_nothing(node: gs.Node, settings: Settings) -> gs.Node | None:
    if isinstance(node.inputs[0], gs.Constant) or not node.inputs[0].inputs:
        return None
    if node.op in ("Identity", "Dropout"):
        return node
    if node.op == "Cast":
        dtype = node.inputs[0].dtype
        return node if dtype is not None and _numpy(dtype) == _numpy(node.attrs["to"]) else None
    if node.op == "Slice":
        bounds = [constant(tensor) for tensor in node.inputs[1:]]
        if any(bound is None for bound in bounds) or len(bounds) < 2:
            return None
        steps = bounds[3] if len(bounds) > 3 else np.ones(1)
        whole = (bounds[0] == 0).all() and (bounds[1] >= _INT_MAX).all() and (steps == 1).all()
        return node if whole else None
    return None


DROP = Rule("no-op", frozenset({"Identity", "Dropout", "Cast", "Slice"}), _does_nothing,
            lambda graph, node, settings: forward(node, graph))


def _dtype(tensor: gs.Tensor) -> np.dtype | None:
    """A tensor's dtype; where the exporter left it out, that of what it is computed from."""
    while tensor.dtype is None and tensor.inputs and tensor.inputs[0].op in _SAME_DTYPE:
        tensor = tensor.inputs[0].inputs[0]
    return tensor.dtype


def _as_cast(graph: gs.Graph, node: gs.Node, settings: Settings) -> None:
    dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(_dtype(node.inputs[1])))
    node.op, node.attrs = "Cast", {"to": dtype}
    del node.inputs[1]


CAST_LIKE = Rule("cast-like", frozenset({"CastLike"}),
                 lambda node, settings: node if _dtype(node.inputs[1]) is not None else None,
                 _as_cast)


def _split_sequence(node: gs.Node, settings: Settings) -> gs.Node | NoMatch:
    """A SplitToSequence of which only single elements are read."""
    if all(user.op == "SequenceAt" and scalar(user.inputs[1]) is not None
           for user in node.outputs[0].outputs) and node.attrs.get("keepdims", 1):
        return node
    return NoMatch("a sequence that is not only indexed", node)


def _as_split(graph: gs.Graph, node: gs.Node, settings: Settings) -> None:
    axis, source = node.attrs.get("axis", 0), node.inputs[0]
    sizes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    whole = source.shape[axis] if source.shape else None
    if sizes is None or (sizes.ndim == 0 and not isinstance(whole, int)):
        return
    if sizes.ndim == 0:
        full, rest = divmod(int(whole or 0), int(sizes))
        sizes = np.array([int(sizes)] * full + ([rest] if rest else []))
    name = node.outputs[0].name
    parts = [gs.Variable(f"{name}.{index}", source.dtype,
                         None if source.shape is None else
                         [size if i == axis % len(source.shape) else dim
                          for i, dim in enumerate(source.shape)])
             for index, size in enumerate(sizes.tolist())]
    for user in list(node.outputs[0].outputs):
        index = int(scalar(user.inputs[1])) % len(parts)
        parts[index].name = user.outputs[0].name
        for reader in list(user.outputs[0].outputs):
            for position, tensor in enumerate(reader.inputs):
                if tensor is user.outputs[0]:
                    reader.inputs[position] = parts[index]
        user.outputs.clear()
        user.inputs.clear()
    node.outputs.clear()
    graph.nodes.append(gs.Node(
        op="Split", name=name, attrs={"axis": axis}, outputs=parts,
        inputs=[source, gs.Constant(f"{name}.sizes", sizes.astype(np.int64))]))


SEQUENCE = Rule("sequence", frozenset({"SplitToSequence"}), _split_sequence, _as_split)


@dataclass(frozen=True)
class _FoldedWeight:
    output: gs.Tensor
    weight: Weight


_ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}


def _weight_expression(node: gs.Node, settings: Settings) -> _FoldedWeight | NoMatch | None:
    operand = next((t for t in node.inputs if isinstance(t, gs.Constant)
                    and isinstance(t._values, Weight)), None)
    if operand is None or not all(isinstance(t, gs.Constant) or t.is_empty() for t in node.inputs):
        return None
    source = weight(operand)
    if node.op == "Transpose" and len(source.shape) == 2 and \
            list(node.attrs.get("perm", [1, 0])) == [1, 0]:
        return _FoldedWeight(node.outputs[0], source.transpose())
    if node.op in ("Identity", "Cast"):
        return _FoldedWeight(node.outputs[0], source)
    if node.op in _ARITHMETIC and len(node.inputs) == 2:
        left, right = node.inputs
        function = _ARITHMETIC[node.op]
        if operand is left and (number := scalar(right)) is not None:
            return _FoldedWeight(node.outputs[0], source.map(lambda w: function(w, number)))
        if operand is right and (number := scalar(left)) is not None:
            return _FoldedWeight(node.outputs[0], source.map(lambda w: function(number, w)))
    if node.op in ("Reshape", "Unsqueeze", "Squeeze", "Slice", "Split", "Concat", "Gather"):
        return None  # left for a rule that knows what it means
    return NoMatch("this op on a weight is not folded", node)


def _fold_weight(graph: gs.Graph, match: _FoldedWeight, settings: Settings) -> None:
    node = producer(match.output)
    result = gs.Constant(match.output.name, match.weight)
    source = next(t for t in node.inputs if isinstance(t, gs.Constant)
                  and isinstance(t._values, Weight))
    node.outputs.clear()
    if match.weight is not source._values:
        result.name = f"{source.name}/{match.output.name}" if node.op != "Transpose" \
            else f"{source.name}.T/{match.output.name}"
    for reader in list(match.output.outputs):
        for i, tensor in enumerate(reader.inputs):
            if tensor is match.output:
                reader.inputs[i] = result


WEIGHT = Rule("weight", frozenset({"Transpose", "Identity", "Cast", *_ARITHMETIC}),
              _weight_expression, _fold_weight)


def _known_shape(node: gs.Node, settings: Settings) -> gs.Node | None:
    """A Shape of a computed tensor whose dimensions are all numbers or an input's own."""
    tensor = node.inputs[0]
    if not tensor.inputs or tensor.shape is None:
        return None
    if all(isinstance(dim, int) or dim in _DIMENSIONS for dim in tensor.shape):
        return node
    return None


def _rewrite_shape(graph: gs.Graph, node: gs.Node, settings: Settings) -> None:
    dims = list(node.inputs[0].shape)[node.attrs.get("start", 0):node.attrs.get("end", None)]
    name = node.outputs[0].name
    if all(isinstance(dim, int) for dim in dims):
        node.inputs.clear()
        node.outputs[0].to_constant(np.array(dims, dtype=np.int64))
        return
    parts: list[gs.Tensor] = []
    for index, dim in enumerate(dims):
        if isinstance(dim, int):
            parts.append(gs.Constant(f"{name}/{index}", np.array([dim], dtype=np.int64)))
            continue
        known, axis = _DIMENSIONS[dim]
        source = next(tensor for tensor in graph.inputs if tensor.name == known)
        part = gs.Variable(f"{name}/{index}", dtype=np.int64, shape=(1,))
        graph.nodes.append(gs.Node(op="Shape", name=part.name, inputs=[source], outputs=[part],
                                   attrs={"start": axis, "end": axis + 1}))
        parts.append(part)
    result = node.outputs[0]
    node.outputs.clear()
    graph.nodes.append(gs.Node(op="Concat", name=name, attrs={"axis": 0}, inputs=parts,
                               outputs=[result]))


SHAPE = Rule("shape", frozenset({"Shape"}), _known_shape, _rewrite_shape)
