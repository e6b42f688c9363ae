"""Pad the heads of bidirectional attention to a size of its kernel for tensor cores.

Given:   x → GEMM → query, key, value [num_tokens, num_heads * 72] → BidirectionalAttention → GEMM
Result:  the same with heads of 128 elements: zero rows in the weights of the first GEMMs, zero
         columns in that of the last; rotary_dim and scale as before

Norms of heads (those of values are a GroupRMSNorm before attention) divide by the root of the mean
square of 128 elements then, 56 of them zeros. So their weights are multiplied by
sqrt(72 / 128), and their epsilon by 72 / 128.

Other sizes take a kernel without tensor cores, which is several times slower. The fast one is for
16-bit dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    fields_of,
    is_op,
    operands,
    producer,
    replace,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.plugins.bidirectional_attention.op import OP as ATTENTION
from llmc.plugins.gemm_bias_act.op import OP as GEMM
from llmc.plugins.gemm_bias_res.op import OP as GEMM_RESIDUAL
from llmc.plugins.group_rms_norm.op import OP as GROUP_RMS_NORM

_HEAD_DIMS = (32, 64, 128, 256)  # has_bidirectional_mma() of csrc/kernels/attention
_INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class _Padded:
    node: gs.Node
    sources: dict[str, gs.Node]  # linear layers, by input
    norm: gs.Node | None  # of values
    reader: gs.Node
    dim: int


def pad_heads(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    if settings.options.dtype == "float32":
        return
    apply_rules(graph, [Rule("pad-heads", frozenset({ATTENTION.name}),
                             lambda node, settings: _check(graph, node), _rewrite)],
                settings, report)


def _check(graph: gs.Graph, node: gs.Node) -> _Padded | NoMatch | None:
    dim = int(fields_of(node)["head_dim"])
    larger = [size for size in _HEAD_DIMS if size >= dim]
    if dim in _HEAD_DIMS or not larger:
        return None
    given = operands(node)
    if "key_starts" in given or fields_of(node)["norm_after_rotary"]:
        return NoMatch("heads with norms of rotated elements, or keys elsewhere, are not padded",
                       node)
    norm = producer(given["value"])
    if not _is_norm_of_heads(norm, dim) or len(consumers(graph, given["value"])) > 1:
        norm = None
    sources: dict[str, gs.Node] = {}
    for name in _INPUTS:
        tensor = operands(norm)["x"] if norm is not None and name == "value" else given[name]
        gemm = producer(tensor)
        if not is_op(gemm, GEMM) or len(consumers(graph, tensor)) > 1:
            return NoMatch(f"the {name} is not the result of a separate linear layer", node)
        sources[name] = gemm
    readers = consumers(graph, node.outputs[0])
    reader = readers[0] if len(readers) == 1 else None
    if not is_op(reader, GEMM, GEMM_RESIDUAL) or operands(reader)["x"] is not node.outputs[0]:
        return NoMatch("the result is not read by one linear layer", node)
    if any(values_of(operands(gemm)["weight"]).stored is not None
           for gemm in (*sources.values(), reader)):
        return NoMatch("a linear layer is quantized", node)
    return _Padded(node, sources, norm, reader, larger[0])


def _is_norm_of_heads(node: gs.Node | None, dim: int) -> bool:
    return node is not None and is_op(node, GROUP_RMS_NORM) and "gate" not in operands(node) \
        and node.outputs[0].shape[-1] == fields_of(node)["groups"] * dim


def _rewrite(graph: gs.Graph, match: _Padded, settings: Settings) -> None:
    node, fields = match.node, fields_of(match.node)
    dim, norm = int(fields["head_dim"]), match.norm
    part = dim / match.dim  # of a head that is not zero
    for gemm in match.sources.values():
        given, result = operands(gemm), gemm.outputs[0]
        padded: dict[str, gs.Tensor | None] = {
            name: _constant(given[name], result, _rows(values_of(given[name]), dim, match.dim))
            for name in ("weight", "bias") if name in given}
        result.shape = [result.shape[0], len(_places(result.shape[-1], dim, match.dim))]
        replace(graph, GEMM, {**given, **padded}, [result], gemm.attrs)

    def gain(weight: gs.Tensor, result: gs.Tensor) -> gs.Constant:
        values = _rows(values_of(weight).cast(np.float32), dim, match.dim)
        return _constant(weight, result, values.map(lambda rows: rows * np.float32(part ** 0.5)))

    if norm is not None:
        given, result = operands(norm), norm.outputs[0]
        norm.outputs.clear()
        result.shape = [result.shape[0], len(_places(result.shape[-1], dim, match.dim))]
        replace(graph, GROUP_RMS_NORM, {**given, "weight": gain(given["weight"], result)}, [result],
                norm.attrs | {"epsilon": float(fields_of(norm)["epsilon"]) * part})
    norms = {name: tensor for name, tensor in operands(node).items()
             if name in ("q_norm", "k_norm")}
    for index, tensor in enumerate(node.inputs):
        if any(tensor is own for own in norms.values()):
            node.inputs[index] = gain(tensor, node.outputs[0])
    if norms:
        node.attrs["norm_epsilon"] = float(fields["norm_epsilon"]) * part
    result, given = node.outputs[0], operands(match.reader)
    matrix = _rows(values_of(given["weight"]).transpose(), dim, match.dim).transpose()
    output = match.reader.outputs[0]
    attrs, op = match.reader.attrs, GEMM if is_op(match.reader, GEMM) else GEMM_RESIDUAL
    match.reader.outputs.clear()
    replace(graph, op, {**given, "weight": _constant(given["weight"], result, matrix)}, [output],
            attrs)
    result.shape = [result.shape[0], matrix.shape[1]]
    node.attrs |= {"head_dim": match.dim, "scale": float(fields["scale"] or dim ** -0.5)}


def _places(width: int, dim: int, larger: int) -> np.ndarray:
    """For each row of padded heads the row that it has; `width`, of zeros, for padding."""
    heads = np.arange(width).reshape(-1, dim)
    return np.pad(heads, ((0, 0), (0, larger - dim)), constant_values=width).reshape(-1)


def _rows(values: Weight, dim: int, larger: int) -> Weight:
    """A weight with rows of zeros after those of each head."""
    zeros = Weight.of(np.zeros((1, *values.shape[1:]), np.float32))
    return Weight.concat([values, zeros]).take_rows(_places(values.shape[0], dim, larger))


def _constant(tensor: gs.Tensor, result: gs.Tensor, values: Weight) -> gs.Constant:
    return gs.Constant(f"{tensor.name}/padded.{result.name}", values)
