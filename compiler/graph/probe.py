"""Probing: determine what a subgraph computes by running it.

Exporters write one function in many ways, so rules do not match node patterns. They find the
borders of a subgraph, run it in ONNX Runtime on selected inputs, and compare the results with the
function that would replace it. Equal subgraphs (as in every layer of a model) share a session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from llmc import plugins
from llmc.artifacts.manifest import HIDDEN, INPUT_FEATURES
from llmc.compiler.graph.names import ENCODER_OUTPUT, PIXEL_VALUES, POSITION_IDS
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    is_llmc,
    op_of,
    producer,
    scalar,
)
from llmc.compiler.graph.weights import Weight

# Elementwise functions of one or several tensors.
ELEMENTWISE = frozenset({
    "Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish",
    "Identity", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "Reciprocal", "Relu",
    "Selu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Swish", "Tanh", "Where", "Sign", "Greater",
    "Less", "GreaterOrEqual", "LessOrEqual", "Equal", "Not", "And", "Or", "IsNaN", "QuickGelu",
})
_RESHAPING = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})
# Layout changes, and the ops that rotary embeddings are exported as.
LAYOUT = frozenset({
    "Reshape", "Transpose", "Slice", "Split", "Concat", "Unsqueeze", "Squeeze", "Expand", "Gather",
    "Identity", "Cast", "Flatten", "GatherND",
})
ROTARY = LAYOUT | {"Mul", "Add", "Sub", "Neg", "Div", "RotaryEmbedding", "ScatterElements",
                   "ScatterND"}


def data_tensors(graph: gs.Graph,
                 sources: Sequence[str] = ("input_ids", INPUT_FEATURES, "token_type_ids",
                                           ENCODER_OUTPUT, HIDDEN, PIXEL_VALUES)) -> set[int]:
    """Ids of tensors that depend on values of tokens or pixels, not only on sizes and positions.
    """
    return dependents(graph, {id(tensor) for tensor in graph.inputs if tensor.name in sources})


def dependents(graph: gs.Graph, sources: Iterable[int]) -> set[int]:
    """Ids of tensors that depend on values of some, not only on their shapes, and of these.

    Args:
        graph: with nodes in topological order.
        sources: ids of tensors.
    """
    data = set(sources)
    for node in graph.nodes:
        if node.op in ("Shape", "Size"):
            continue
        if any(id(tensor) in data for tensor in node.inputs):
            data.update(id(tensor) for tensor in node.outputs)
    return data


def reshaped_outputs(graph: gs.Graph) -> dict[str, str]:
    """Outputs that are the pixels in another shape, with the input's name.

    Empty if the values of pixels have another use.
    """
    pixels = next((own for own in graph.inputs if own.name == PIXEL_VALUES), None)
    if pixels is None:
        return {}
    data, same = data_tensors(graph), {id(pixels)}
    for node in graph.nodes:
        if node.op in _RESHAPING and id(node.inputs[0]) in same:
            same.add(id(node.outputs[0]))
    depending = [own for own in graph.outputs if id(own) in data]
    return {own.name: PIXEL_VALUES for own in depending} \
        if all(id(own) in same for own in depending) else {}


def token_feeds(batch: int, seq: int, positions: np.ndarray | None = None) -> \
        dict[str, np.ndarray]:
    """Graph inputs for identical tokens.

    Args:
        batch: number of sequences.
        seq: tokens of each.
        positions: int [seq], or by axis [seq, axes]; from 0 by default.
    """
    positions = np.arange(seq) if positions is None else positions
    by_axis = np.broadcast_to(positions.reshape(seq, -1), (seq, len(POSITION_IDS))).T
    return {"input_ids": np.zeros((batch, seq), np.int64),
            INPUT_FEATURES: np.zeros((batch, seq, 1), np.float32),  # only its axes are read
            **{name: np.tile(own.astype(np.int64), (batch, 1))
               for name, own in zip(POSITION_IDS, by_axis, strict=True)},
            "token_type_ids": np.zeros((batch, seq), np.int64),
            ENCODER_OUTPUT: np.zeros((batch, seq, 1), np.float32),
            HIDDEN: np.zeros((batch, seq, 1), np.float32)}


@dataclass(frozen=True)
class Piece:
    """A subgraph: nodes in topological order that compute `outputs` from `inputs`.

    Args:
        nodes: in topological order.
        inputs: its borders: computed tensors, weights and graph inputs.
        outputs: computed tensors.
        bypass: ids of nodes that are run as the identity on their first input.
    """

    nodes: tuple[gs.Node, ...]
    inputs: tuple[gs.Tensor, ...]
    outputs: tuple[gs.Tensor, ...]
    bypass: frozenset[int] = frozenset()

    @property
    def output(self) -> gs.Tensor:
        """The first output."""
        return self.outputs[0]

    def run_all(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Run the subgraph.

        Args:
            feeds: inputs by tensor name.

        Raises:
            CannotEvaluate: ONNX Runtime cannot run the subgraph on these inputs.
        """
        model, names = self._model
        renamed = {names[name]: value for name, value in feeds.items() if name in names}
        try:
            results: list[np.ndarray] = _session(model).run(None, renamed)
            return results
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise CannotEvaluate(self.output, str(error)) from error

    def run(self, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run the subgraph and return its first output."""
        return self.run_all(feeds)[0]

    @cached_property
    def key(self) -> bytes:
        """A hash that is equal for subgraphs of the same function, whatever their tensors' names.
        """
        return hashlib.sha256(self._model[0]).digest()

    @cached_property
    def _model(self) -> tuple[bytes, dict[str, str]]:
        return _as_model(self)

    def without(self, nodes: Sequence[gs.Node]) -> Piece:
        """The same subgraph with some nodes run as the identity."""
        return Piece(self.nodes, self.inputs, self.outputs, frozenset(id(node) for node in nodes))


def _as_model(piece: Piece) -> tuple[bytes, dict[str, str]]:
    """The piece as a serialized model with canonical names, and the name of each input there."""
    names: dict[int, str] = {}
    inputs, initializers, nodes, functions = [], [], [], {}
    feeds: dict[str, str] = {}
    for index, tensor in enumerate(piece.inputs):
        names[id(tensor)] = feeds[tensor.name] = f"i{index}"
        dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype or np.float32))
        inputs.append(onnx.helper.make_tensor_value_info(f"i{index}", dtype, None))

    def name(tensor: gs.Tensor) -> str:
        if tensor.is_empty():
            return ""
        if id(tensor) not in names:
            names[id(tensor)] = f"t{len(names)}"
            if isinstance(tensor, gs.Constant):
                initializers.append(onnx.numpy_helper.from_array(tensor.values, names[id(tensor)]))
        return names[id(tensor)]

    for node in piece.nodes:
        if id(node) in piece.bypass:
            nodes.append(onnx.helper.make_node("Identity", [name(node.inputs[0])],
                                               [name(node.outputs[0])]))
            continue
        proto = OnnxExporter.export_node(node)
        proto.name = ""
        proto.input[:] = [name(tensor) for tensor in node.inputs]
        proto.output[:] = [name(tensor) for tensor in node.outputs]
        op = op_of(node)
        function = op.function(node.attrs, proto.input) if op is not None else None
        if function is not None:
            proto.overload = function.overload
            functions[function.name, function.overload] = function
        nodes.append(proto)
    outputs = [onnx.ValueInfoProto(name=name(tensor)) for tensor in piece.outputs]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "piece", inputs, outputs, initializers),
        functions=list(functions.values()), ir_version=10,
        opset_imports=[onnx.helper.make_opsetid("", plugins.OPSET),
                       onnx.helper.make_opsetid(plugins.DOMAIN, 1),
                       onnx.helper.make_opsetid("com.microsoft", 1)])
    return model.SerializeToString(deterministic=True), feeds


@lru_cache(maxsize=256)
def _session(model: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def cone(output: gs.Tensor, data: set[int], allowed: frozenset[str],
         through: Callable[[gs.Node], bool] = lambda node: False,
         borders_at: Container[int] = (), reads_shapes: bool = False) -> Piece | NoMatch:
    """The subgraph above `output`.

    It ends at outputs of llmc:: nodes along data, and at graph inputs along positions and shapes.

    Args:
        output: its output.
        data: ids of tensors that depend on token values, see `data_tensors`.
        allowed: op types along data.
        through: whether an llmc:: node belongs inside.
        borders_at: ids of further tensors to end at.
        reads_shapes: whether shapes of computed tensors may be read.
    """
    order: list[gs.Node] = []
    seen: set[int] = set()
    borders: dict[int, gs.Tensor] = {}
    stack: list[tuple[gs.Tensor | gs.Node, bool]] = [(output, False)]
    while stack:
        item, done = stack.pop()
        if done:
            order.append(item)
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, gs.Node):
            stack.append((item, True))
            stack.extend((tensor, False) for tensor in reversed(item.inputs))
            continue
        if item.is_empty():
            continue
        if isinstance(item, gs.Constant):
            if isinstance(item._values, Weight):
                borders[id(item)] = item
            continue
        node = producer(item)
        if node is None or id(item) in borders_at:
            borders[id(item)] = item
        elif not reads_shapes and node.op == "Shape" and id(node.inputs[0]) in data and \
                producer(node.inputs[0]) is not None:
            return NoMatch("the shape of a computed tensor is read", node)
        elif id(item) in data and is_llmc(node) and not through(node):
            borders[id(item)] = item
        elif id(item) in data and not is_llmc(node) and node.op not in allowed:
            return NoMatch("this op is neither a layout op nor part of a rotary embedding", node)
        else:
            stack.append((node, False))
    return Piece(tuple(order), tuple(borders.values()), (output,))


@dataclass(frozen=True)
class WithPositions:
    """A subgraph that computed positions 0, 1, 2, … from lengths, with them as inputs instead.

    Args:
        piece: the subgraph.
        places: the new inputs, each with its shape; -1 marks the axis of positions.
    """

    piece: Piece
    places: tuple[tuple[gs.Tensor, tuple[int, ...]], ...]

    def feeds(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Values of the new inputs for positions [seq]."""
        return {tensor.name: positions.reshape(shape).astype(tensor.dtype)
                for tensor, shape in self.places}


def with_positions(piece: Piece, feeds: Callable[[int], Mapping[str, np.ndarray]]) -> WithPositions:
    """Replace positions that the subgraph computes from lengths alone with inputs.

    Args:
        piece: the subgraph.
        feeds: its other inputs, for a sequence length.
    """
    inner = [tensor for node in piece.nodes for tensor in node.outputs if not tensor.is_empty()]
    probe = Piece(piece.nodes, piece.inputs, tuple(inner), piece.bypass)
    try:
        short, long = ({id(tensor): values for tensor, values in
                        zip(inner, probe.run_all(feeds(length)), strict=True)} for length in (5, 7))
    except CannotEvaluate:
        return WithPositions(piece, ())

    def counts(tensor: gs.Tensor) -> bool:
        return tensor is not piece.output and id(tensor) in short and all(
            values.dtype.kind in "if" and values.size == length
            and np.array_equal(values.reshape(-1), np.arange(length))
            for values, length in ((short[id(tensor)], 5), (long[id(tensor)], 7)))

    places: list[tuple[gs.Tensor, tuple[int, ...]]] = []
    knows = {id(tensor) for tensor in piece.inputs if tensor.name in POSITION_IDS}
    nodes: list[gs.Node] = []
    for node in piece.nodes:
        if node.op not in ("Shape", "Size") and any(id(tensor) in knows for tensor in node.inputs):
            knows.update(id(tensor) for tensor in node.outputs)
        elif len(node.outputs) == 1 and counts(node.outputs[0]):
            tensor = node.outputs[0]
            tensor.dtype = short[id(tensor)].dtype
            places.append((tensor, tuple(-1 if dim == 7 else 1
                                         for dim in long[id(tensor)].shape)))
            knows.add(id(tensor))
            continue
        nodes.append(node)
    return WithPositions(Piece(tuple(nodes), (*piece.inputs, *(tensor for tensor, _ in places)),
                               piece.outputs, piece.bypass), tuple(places))


def closed_regions(graph: gs.Graph, source: gs.Tensor, seeds: Sequence[gs.Node],
                   allowed: frozenset[str]) -> Iterator[Piece]:
    """Grow subgraphs downwards from `seeds` (consumers of `source`).

    A node joins when it reads only `source`, constants and tensors computed inside.

    Yields:
        Each subgraph with exactly one output.
    """
    inside: dict[int, gs.Node] = {}
    available = {id(source)}
    weights: dict[int, gs.Tensor] = {}
    queue = list(seeds)
    while queue:
        node = queue.pop(0)
        if id(node) in inside or node.op not in allowed or node.domain not in (None, "", "ai.onnx"):
            continue
        reads = [tensor for tensor in node.inputs if not tensor.is_empty()]
        if any(id(tensor) not in available and not isinstance(tensor, gs.Constant)
               for tensor in reads):
            continue
        inside[id(node)] = node
        available.update(id(tensor) for tensor in node.outputs)
        weights.update((id(tensor), tensor) for tensor in reads
                       if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight))
        leaving = [tensor for member in inside.values() for tensor in member.outputs
                   if any(id(user) not in inside for user in tensor.outputs)
                   or any(tensor is output for output in graph.outputs)]
        if len(leaving) == 1:
            yield Piece(tuple(inside.values()), (source, *weights.values()), (leaving[0],))
        for tensor in node.outputs:
            queue.extend(user for user in tensor.outputs if id(user) not in inside)


def evaluated(tensor: gs.Tensor, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """Compute a tensor of a graph from the graph's inputs.

    Args:
        feeds: inputs by name.

    Raises:
        CannotEvaluate: an input is not given, or ONNX Runtime cannot run the nodes above it.
    """
    piece = cone(tensor, set(), frozenset(), reads_shapes=True)
    assert isinstance(piece, Piece)  # nothing above it is data
    weights = {own.name: own._values.load() for own in piece.inputs
               if isinstance(own, gs.Constant)}
    return piece.run({**feeds, **weights})


def scalars(piece: Piece) -> set[float]:
    """Values of the one-element constants that the subgraph's nodes read."""
    return {value for node in piece.nodes for tensor in node.inputs
            if (value := scalar(tensor)) is not None}


def magnitudes(piece: Piece) -> list[float]:
    """Sorted absolute values of the floating-point scalar constants, without zero."""
    found = {abs(value) for node in piece.nodes for tensor in node.inputs
             if (value := scalar(tensor)) is not None and tensor.dtype is not None
             and np.dtype(tensor.dtype).kind not in "iub"}
    return sorted(value for value in found if 0 < value < np.inf)


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> bool:
    """Whether two arrays agree within `tolerance` times the largest expected magnitude."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return False
    span = float(np.max(np.abs(expected))) or 1.0
    return float(np.max(np.abs(actual - expected))) <= tolerance * span
