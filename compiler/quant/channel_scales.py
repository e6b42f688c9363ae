"""Activation-aware channel scaling before a weight is rounded (AWQ; Lin et al., 2023).

Given:   x = Norm(h, gain); y = GEMM(x, W)
Result:  x.scaled = Norm(h, gain / s); y = GEMM(x.scaled, W · s)

Columns of W with large inputs are scaled up, the producer of these inputs down by the same factor.
If a gated MLP produces x, the rows of its up projection are divided instead. s is the mean absolute
value of each input to a power; the power is that of a grid with the least round-to-nearest error
of y.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.names import SCALED
from llmc.compiler.graph.rewrite import consumers, op_of, operand, operands, shard_of, values_of
from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.codes import decode, encode, scales_of
from llmc.compiler.quant.scheme import Scheme
from llmc.plugins.code_types import CODE_TYPES
from llmc.plugins.roles import ByRows

_POWERS = np.arange(0, 1, 0.1)
_TOKENS = 512  # sampled for the search


@dataclass(frozen=True)
class Pair:
    """A producer of activations and their single consumer.

    Args:
        divided: the producer's constants [width, …] whose elements or rows are divided.
        made: the activations.
        weight: of the linear layer that reads them.
        ups: whether only the second half of the rows of `divided` (the up projection) is scaled.
    """

    divided: tuple[gs.Constant, ...]
    made: gs.Variable
    weight: gs.Constant
    ups: bool


def find_pair(graph: gs.Graph, node: gs.Node) -> Pair | None:
    """The pair whose producer is `node`, or None."""
    op, result = op_of(node), node.outputs[0]
    users = consumers(graph, result)
    user = users[0] if len(users) == 1 else None
    way, user_op = shard_of(node, ByRows), op_of(user)
    if op is None or user is None or user_op is None or len(user_op.quantized) != 1 \
            or operand(user, "x") is not result:
        return None
    gated = way is not None and way.stacked == 2
    names = way.inputs if way is not None and gated else \
        (op.norm.gain, op.norm.bias) if op.norm is not None else ()
    divided = tuple(tensor for name in names if (tensor := operands(node).get(name)) is not None)
    weight = operands(user)[user_op.quantized[0].weight]
    if not divided or any(len(tensor.outputs) > 1 for tensor in (*divided, weight)):
        return None
    return Pair(divided, result, weight, gated)


def scale_channels(pair: Pair, x: np.ndarray, scheme: Scheme) -> None:
    """Scale a pair of a graph for its activations x [num_tokens, in], given before scaling."""
    scales = _search(values_of(pair.weight), x, scheme)
    if scales is None:
        return
    for tensor in pair.divided:
        values = values_of(tensor)
        factors = 1 / scales
        if pair.ups:
            factors = np.concatenate([np.ones_like(factors), factors])
        tensor._values = _times_rows(values, factors)
        if len(values.shape) == 1:  # a matrix keeps its name: it is quantized under it
            tensor.name += SCALED
    pair.weight._values = values_of(pair.weight).scale_columns(scales)
    pair.made.name += SCALED


def _times_rows(weight: Weight, factors: np.ndarray) -> Weight:
    def rows(start: int, stop: int) -> np.ndarray:
        block = weight.rows(start, stop).astype(np.float32)
        block *= factors[start:stop].reshape(-1, *[1] * (block.ndim - 1))
        return block

    scaled = Weight(weight.shape, np.float32, rows, weight.name)
    scaled.origin = weight.origin and weight.origin.scale_rows(factors)
    return scaled


def _search(weight: Weight, x: np.ndarray, scheme: Scheme) -> np.ndarray | None:
    """Scales float32 [in]; None if 1 is best, or for 8-bit codes, whose rounding loses little."""
    size = scheme.group_size_for(weight.shape[1])
    if CODE_TYPES[scheme.dtype].bits == 8 or size is None:
        return None
    sizes = np.abs(x).mean(0)
    sizes = np.maximum(sizes / sizes.max(), 1e-4)
    sample = x[np.linspace(0, len(x) - 1, min(_TOKENS, len(x))).astype(np.int64)]
    matrix = weight.load().astype(np.float32)
    candidates = [_centered(sizes ** power) for power in _POWERS]
    losses = [_loss(matrix, scales, sample, size, scheme.dtype) for scales in candidates]
    best = int(np.argmin(losses))
    return candidates[best] if best else None


def _centered(scales: np.ndarray) -> np.ndarray:
    """Scales with a geometric center of 1."""
    middle = np.sqrt(scales.max() * scales.min())
    centered: np.ndarray = (scales / middle).astype(np.float32)
    return centered


def _loss(matrix: np.ndarray, scales: np.ndarray, x: np.ndarray, size: int, dtype: str) -> float:
    """Squared error of x · matrixᵀ if the scaled matrix is rounded to nearest."""
    groups = (matrix * scales).reshape(len(matrix), -1, size)
    found = scales_of(groups, dtype)
    lost = decode(encode(groups, *found, dtype), *found, dtype).reshape(matrix.shape) / scales
    lost -= matrix
    return float(np.square(x @ lost.T).sum(dtype=np.float64))
