"""Constant folding, lazy transformations of weights, and removal of no-ops.

Given:   Transpose(W), Add(w, 1), Cast(x) to its own dtype, Slice(x) of everything, Shape(hidden),
         Expand(w) that is added to x, GatherND(W, [[i]]), Transpose(Gelu(Transpose(x)))
Result:  the lazily transformed weight; nothing; nothing; Concat(Shape(input_ids)[0:1], …);
         w, Gather(W, i), Gelu(x)

The nodes of a causal mask lose their last reader in the attention pass and are removed there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import INPUT_FEATURES
from llmc.compiler.graph.constants import fold_constants
from llmc.compiler.graph.names import AFTER_IMAGE, ENCODER_OUTPUT
from llmc.compiler.graph.probe import ELEMENTWISE
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    constant,
    producer,
    scalar,
    values_of,
)
from llmc.compiler.graph.weights import Weight

_SAME_DTYPE = {"Add", "Div", "Exp", "Log", "Mul", "Neg", "Pow", "Sigmoid", "Softplus", "Sqrt",
               "Sub", "Tanh"}
_INT_MAX = 2**31 - 1
# The input, and its axis, from which a dimension is known.
_TOKENS = ("input_ids", INPUT_FEATURES)
_DIMENSIONS = {"batch": (_TOKENS, 0), "seq": (_TOKENS, 1), "mem_seq": ((ENCODER_OUTPUT,), 1)}


def fold(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    _read_scalars(graph)
    _fold_constants(graph, report)
    apply_rules(graph, [TRANSPOSED], settings, report)
    apply_rules(graph, [CAST_LIKE, DROP, SEQUENCE, WEIGHT, EXPAND, SHAPE, ROWS], settings, report)
    _read_scalars(graph)
    _fold_constants(graph, report)
    apply_rules(graph, [DROP], settings, report)


def _fold_constants(graph: gs.Graph, report: Report) -> None:
    try:
        report.count("constant", fold_constants(graph))
    except CannotEvaluate as error:  # left to the target
        report.refuse(error.output.inputs[0], error.reason)


def _read_scalars(graph: gs.Graph) -> None:
    """Load one-element weights, such as an activation's parameter, as plain constants."""
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight) \
                and int(np.prod(tensor.shape)) == 1:
            tensor.values = tensor._values.load()
            tensor.data_location = None  # no longer in a file


def forward(node: gs.Node, graph: gs.Graph) -> None:
    """Redirect the readers of a node's output to its first input."""
    source, result = node.inputs[0], node.outputs[0]
    for index, output in enumerate(graph.outputs):
        if output is result:  # the graph output keeps its name and becomes the producer's
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


def numpy_dtype(dtype: object) -> np.dtype:
    """A tensor's dtype; graphsurgeon has ONNX's number for dtypes that NumPy lacks."""
    numpy: np.dtype = np.dtype(
        onnx.helper.tensor_dtype_to_np_dtype(dtype) if isinstance(dtype, int)
        else dtype)  # type: ignore[call-overload]
    return numpy


def _is_noop(node: gs.Node, settings: Settings) -> gs.Node | None:
    """The node if it is a no-op between two nodes, else None."""
    if isinstance(node.inputs[0], gs.Constant) or not node.inputs[0].inputs:
        return None
    if node.op in ("Identity", "Dropout") or (node.op == "Concat" and len(node.inputs) == 1):
        return node
    if node.op == "Add":
        number = constant(node.inputs[1])
        is_zero = number is not None and number.ndim == 0 and number == 0
        return node if is_zero or _is_empty_product(node.inputs[1]) else None
    if node.op in ("Max", "Min") and len(node.inputs) == 2:
        number = constant(node.inputs[1])
        bound = -np.inf if node.op == "Max" else np.inf
        return node if number is not None and number.ndim == 0 and number == bound else None
    if node.op == "Transpose":
        perm = list(node.attrs.get("perm", ()))
        return node if perm and perm == sorted(perm) else None
    if node.op == "Cast":
        dtype, to = node.inputs[0].dtype, numpy_dtype(node.attrs["to"])
        return node if dtype is not None and numpy_dtype(dtype) == to else None
    if node.op == "Slice":
        bounds = [constant(tensor) for tensor in node.inputs[1:]]
        known = [bound for bound in bounds if bound is not None]
        if len(known) < max(2, len(bounds)):
            return None
        steps = known[3] if len(known) > 3 else np.ones(1)
        whole = np.all(known[0] == 0) and np.all(known[1] >= _INT_MAX) and np.all(steps == 1)
        return node if whole else None
    return None


def _is_empty_product(tensor: gs.Tensor) -> bool:
    """Whether it is a product over zero columns, as of a shared expert without features.

    Such a tensor is zero for any input, also after a gate.
    """
    node = producer(tensor)
    if node is None or not tensor.shape or tensor.shape[-1] == 1:  # adding might broadcast
        return False
    if node.op == "MatMul" or (node.op == "Gemm" and len(node.inputs) == 2):
        rows = node.inputs[0].shape
        return bool(rows) and rows[-1] == 0
    return node.op in ("Mul", "Reshape") and any(map(_is_empty_product, node.inputs))


DROP = Rule("no-op", frozenset({"Add", "Cast", "Concat", "Dropout", "Identity", "Max", "Min",
                                "Slice", "Transpose"}), _is_noop,
            lambda graph, node, settings: forward(node, graph))


@dataclass(frozen=True)
class _Transposed:
    """Elementwise nodes between a transpose of each input and its inverse."""

    last: gs.Node
    nodes: list[gs.Node]
    first: list[gs.Node]


def _is_transposed(node: gs.Node, settings: Settings) -> _Transposed | None:
    """A Transpose that undoes another one, with only elementwise nodes of one input between."""
    if list(node.attrs.get("perm", ())) != [0, 2, 1]:
        return None
    nodes: list[gs.Node] = []
    first: list[gs.Node] = []
    waiting = [node.inputs[0]]
    while waiting:
        above = producer(waiting.pop())
        if above is None:
            return None
        if above.op == "Transpose" and list(above.attrs.get("perm", ())) == [0, 2, 1]:
            first += [] if any(above is other for other in first) else [above]
        elif above.op in ELEMENTWISE and all(
                not isinstance(t, gs.Constant) or scalar(t) is not None for t in above.inputs):
            if not any(above is other for other in nodes):
                nodes.append(above)
                waiting += [t for t in above.inputs if not isinstance(t, gs.Constant)]
        else:
            return None
    inside = {id(each) for each in (*nodes, node)}
    if any(id(reader) not in inside for each in nodes for reader in each.outputs[0].outputs):
        return None
    return _Transposed(node, nodes, first)


def _remove_transposes(graph: gs.Graph, match: _Transposed, settings: Settings) -> None:
    sources = {id(node.outputs[0]): node.inputs[0] for node in match.first}
    for node in match.nodes:
        node.inputs = [sources.get(id(tensor), tensor) for tensor in node.inputs]
        if node.outputs[0].shape is not None:
            node.outputs[0].shape = list(match.last.outputs[0].shape)
    if not match.nodes:
        match.last.inputs[0] = sources[id(match.last.inputs[0])]
    forward(match.last, graph)


TRANSPOSED = Rule("transposed", frozenset({"Transpose"}), _is_transposed, _remove_transposes)


def _dtype(tensor: gs.Tensor) -> np.dtype | None:
    """A tensor's dtype; if the exporter left it out, that of its input."""
    while tensor.dtype is None and tensor.inputs and tensor.inputs[0].op in _SAME_DTYPE:
        tensor = tensor.inputs[0].inputs[0]
    return None if tensor.dtype is None else numpy_dtype(tensor.dtype)


@dataclass(frozen=True)
class _CastLike:
    node: gs.Node
    dtype: np.dtype


def _cast_like(node: gs.Node, settings: Settings) -> _CastLike | NoMatch:
    dtype = _dtype(node.inputs[1])
    if dtype is None:
        return NoMatch("the target dtype of CastLike is unknown", node.inputs[1])
    return _CastLike(node, dtype)


def _as_cast(graph: gs.Graph, match: _CastLike, settings: Settings) -> None:
    node = match.node
    node.op, node.attrs = "Cast", {"to": onnx.helper.np_dtype_to_tensor_dtype(match.dtype)}
    del node.inputs[1]


CAST_LIKE = Rule("cast-like", frozenset({"CastLike"}), _cast_like, _as_cast)


@dataclass(frozen=True)
class _Sequence:
    node: gs.Node
    sizes: np.ndarray
    readers: list[tuple[gs.Node, int]]  # each SequenceAt and its index


def _split_sequence(node: gs.Node, settings: Settings) -> _Sequence | NoMatch:
    """A SplitToSequence that is only indexed."""
    readers = [(user, int(index)) for user in node.outputs[0].outputs if user.op == "SequenceAt"
               and (index := scalar(user.inputs[1])) is not None]
    if len(readers) < len(node.outputs[0].outputs) or not node.attrs.get("keepdims", 1):
        return NoMatch("the sequence is not only indexed", node)
    source = node.inputs[0]
    sizes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if sizes is None:
        return NoMatch("the sizes of a sequence's elements are unknown", node)
    if sizes.ndim == 0:
        whole = source.shape[node.attrs.get("axis", 0)] if source.shape else None
        if not isinstance(whole, int):
            return NoMatch("the length of the axis split into a sequence is unknown", source)
        full, rest = divmod(whole, int(sizes))
        sizes = np.array([int(sizes)] * full + ([rest] if rest else []))
    return _Sequence(node, sizes, readers)


def _as_split(graph: gs.Graph, match: _Sequence, settings: Settings) -> None:
    node, sizes = match.node, match.sizes
    axis, source = node.attrs.get("axis", 0), node.inputs[0]
    name = node.outputs[0].name
    parts = [gs.Variable(f"{name}.{index}", source.dtype,
                         None if source.shape is None else
                         [size if i == axis % len(source.shape) else dim
                          for i, dim in enumerate(source.shape)])
             for index, size in enumerate(sizes.tolist())]
    for user, number in match.readers:
        index = number % len(parts)
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
    others: tuple[_FoldedWeight, ...] = ()  # further outputs of the node


_FUNCTIONS = {"Exp": np.exp, "Neg": np.negative}
_SHAPED = ("Squeeze", "Unsqueeze", "Reshape")
_ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}


def _weight_expression(node: gs.Node, settings: Settings) -> _FoldedWeight | NoMatch | None:
    operand = next((t for t in node.inputs if isinstance(t, gs.Constant)
                    and isinstance(t._values, Weight)), None)
    shape = node.outputs[0].shape
    if operand is None or not all(isinstance(t, gs.Constant) or t.is_empty() for t in node.inputs):
        return None  # no weight, or activations as well
    source = values_of(operand)
    if node.op == "Transpose" and len(source.shape) == 2:
        turned = list(node.attrs.get("perm", [1, 0])) == [1, 0]
        return _FoldedWeight(node.outputs[0], source.transpose() if turned else source)
    if node.op == "Transpose" and list(node.attrs.get("perm", ())) == [0, 2, 1]:
        return _FoldedWeight(node.outputs[0], source.transpose())
    if node.op in ("Identity", "Cast"):
        return _FoldedWeight(node.outputs[0], source)
    if node.op in _FUNCTIONS:
        return _FoldedWeight(node.outputs[0], source.map(_FUNCTIONS[node.op]))
    if node.op in ("Slice", "Split"):
        return _parts(node, source)
    if node.op in _SHAPED and shape is not None and all(isinstance(dim, int) for dim in shape):
        return _FoldedWeight(node.outputs[0], source.reshape(shape))
    if node.op in _ARITHMETIC and len(node.inputs) == 2:
        left, right = node.inputs
        function = _ARITHMETIC[node.op]
        number = scalar(right if operand is left else left)
        if number is not None:
            value = number
            return _FoldedWeight(node.outputs[0], source.map(
                (lambda w: function(w, value)) if operand is left
                else (lambda w: function(value, w))))
    return NoMatch("this op on a weight cannot be folded", node)


def _parts(node: gs.Node, source: Weight) -> _FoldedWeight | NoMatch:
    """Rows of a weight, by a Slice or a Split."""
    given = [own.tolist() for tensor in node.inputs[1:]
             if (own := constant(tensor)) is not None and own.ndim]
    rows, axis, index = np.arange(source.shape[0]), node.attrs.get("axis", 0), list[np.ndarray]()
    if len(given) == len(node.inputs) - 1 and node.op == "Split" and given:
        index = np.split(rows, np.cumsum(given[0])[:-1])
    elif len(given) == len(node.inputs) - 1 and all(len(bound) == 1 for bound in given):
        start, stop, axis, step = [bound[0] for bound in given] + [0, 1][len(given) - 2:]
        index = [rows[start:stop:step]]
    if not index or axis % len(source.shape):
        return NoMatch("the parts of a weight are not rows", node)
    first, *others = (_FoldedWeight(output, source.take_rows(own))
                      for output, own in zip(node.outputs, index, strict=True))
    return _FoldedWeight(first.output, first.weight, tuple(others))


def _fold_weight(graph: gs.Graph, match: _FoldedWeight, settings: Settings) -> None:
    node = producer(match.output)
    assert node is not None
    source = next(t for t in node.inputs if isinstance(t, gs.Constant)
                  and isinstance(t._values, Weight))
    for part in (match, *match.others):
        _put(part, source, node)
    node.outputs.clear()


def _put(match: _FoldedWeight, source: gs.Constant, node: gs.Node) -> None:
    """Replace a node's output with a constant."""
    result = gs.Constant(match.output.name, match.weight)
    if match.weight is not source._values:
        result.name = f"{source.name}/{match.output.name}" if node.op != "Transpose" \
            else f"{source.name}.T/{match.output.name}"
    for reader in list(match.output.outputs):
        for i, tensor in enumerate(reader.inputs):
            if tensor is match.output:
                reader.inputs[i] = result


WEIGHT = Rule("weight", frozenset({"Transpose", "Identity", "Cast", "Slice", "Split", *_FUNCTIONS,
                                   *_SHAPED, *_ARITHMETIC}),
              _weight_expression, _fold_weight)


def _is_redundant_expand(node: gs.Node, settings: Settings) -> gs.Node | None:
    """An Expand of a constant row whose readers all broadcast it to the same shape."""
    row, wide = node.inputs[0], node.outputs[0]
    shape = list(wide.shape or ())
    if not isinstance(row, gs.Constant) or len(row.shape) != 1 or shape[-1:] != list(row.shape):
        return None

    def broadcasts(reader: gs.Node) -> bool:
        return reader.op in _ARITHMETIC and any(
            tensor is not wide and list(tensor.shape or ()) == shape for tensor in reader.inputs)

    return node if wide.outputs and all(map(broadcasts, wide.outputs)) else None


EXPAND = Rule("expand", frozenset({"Expand"}), _is_redundant_expand,
              lambda graph, node, settings: forward(node, graph))


def _known_shape(node: gs.Node, settings: Settings) -> gs.Node | NoMatch | None:
    """A Shape of a computed tensor, or of the factor of tokens, of known dimensions."""
    tensor = node.inputs[0]
    if not tensor.inputs and tensor.name != AFTER_IMAGE:  # which is removed
        return None  # of an input
    if tensor.shape is None or not all(isinstance(dim, int) or dim in _DIMENSIONS
                                       for dim in _dimensions(node)):
        return NoMatch("the shape of a computed tensor is unknown", tensor)
    return node


def _dimensions(node: gs.Node) -> list[int | str]:
    """The tensor's dimensions that a Shape node returns."""
    return list(node.inputs[0].shape)[node.attrs.get("start", 0):node.attrs.get("end", None)]


def _rewrite_shape(graph: gs.Graph, node: gs.Node, settings: Settings) -> None:
    dims, result = _dimensions(node), node.outputs[0]
    name = result.name
    if all(isinstance(dim, int) for dim in dims):
        node.inputs.clear()
        node.outputs.clear()
        result.to_constant(np.array(dims, dtype=np.int64))
        return
    parts: list[gs.Tensor] = []
    for index, dim in enumerate(dims):
        if isinstance(dim, int):
            parts.append(gs.Constant(f"{name}/{index}", np.array([dim], dtype=np.int64)))
            continue
        known, axis = _DIMENSIONS[dim]
        source = next(tensor for tensor in graph.inputs if tensor.name in known)
        part = gs.Variable(f"{name}/{index}", dtype=np.int64, shape=(1,))
        graph.nodes.append(gs.Node(op="Shape", name=part.name, inputs=[source], outputs=[part],
                                   attrs={"start": axis, "end": axis + 1}))
        parts.append(part)
    node.outputs.clear()
    graph.nodes.append(gs.Node(op="Concat", name=name, attrs={"axis": 0}, inputs=parts,
                               outputs=[result]))


SHAPE = Rule("shape", frozenset({"Shape"}), _known_shape, _rewrite_shape)


@dataclass(frozen=True)
class _Rows:
    node: gs.Node
    index: gs.Tensor  # of rows, without GatherND's last axis


def _looks_up_rows(node: gs.Node, settings: Settings) -> _Rows | None:
    """A GatherND by row indices with an added last axis, else None."""
    given = node.inputs[1]
    while (above := producer(given)) is not None and above.op in ("Concat", "Identity") \
            and len(above.inputs) == 1:
        given = above.inputs[0]
    axes = constant(above.inputs[1]) if above is not None and above.op == "Unsqueeze" else None
    if above is None or axes is None or axes.reshape(-1).tolist() != [-1] \
            or node.attrs.get("batch_dims", 0):
        return None
    return _Rows(node, above.inputs[0])


def _as_gather(graph: gs.Graph, match: _Rows, settings: Settings) -> None:
    node = match.node
    node.op, node.attrs, node.inputs[1] = "Gather", {"axis": 0}, match.index


ROWS = Rule("rows", frozenset({"GatherND"}), _looks_up_rows, _as_gather)
