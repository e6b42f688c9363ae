"""Fuse the FP8 quantization of activations into their producer.

Given:   x = CausalAttention(…), or GatedMLP(…), or a gated NormGemm(…); y = GemmBiasRes(x, W, …;
         activation_dtype, activation_scale)
Result:  x = CausalAttention(…; out_scale), in float8_e4m3fn; y = GemmBiasRes(x, W, …;
         activation_dtype, activation_scale, x_dtype)

All readers must quantize alike, with static scales: dynamic ones are unknown to the producer.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from llmc.compiler.graph.dtypes import numpy_dtype
from llmc.compiler.graph.rewrite import Report, Settings, consumers, fields_of, op_of, operands
from llmc.plugins.quantization import FLOAT8, ROUNDED_UNIT


def rounded_outputs(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    for node in graph.nodes if settings.options.dtype != "float32" else ():
        scale = _scale(graph, node)
        if not scale:
            continue
        result = node.outputs[0]
        node.attrs["out_scale"] = scale
        result.dtype = numpy_dtype(FLOAT8)
        for user in result.outputs:
            user.attrs["x_dtype"] = FLOAT8
        report.count("rounded")


def _scale(graph: gs.Graph, node: gs.Node) -> float:
    """The scale by which all readers quantize a node's result; 0 if they differ or do not."""
    op, result = op_of(node), node.outputs[0]
    if op is None or not op.rounds(fields_of(node), frozenset(operands(node))) \
            or result.shape[-1] % ROUNDED_UNIT:
        return 0.0
    scales = {_reader_scale(user, result) for user in consumers(graph, result)}
    return scales.pop() if len(scales) == 1 else 0.0


def _reader_scale(user: gs.Node | None, tensor: gs.Tensor) -> float:
    """The scale by which a node quantizes a tensor; 0 if it also reads it otherwise."""
    op = None if user is None else op_of(user)
    if user is None or op is None or "x_dtype" not in op.fields:
        return 0.0
    if "lora_down" in operands(user):  # adapters multiply activations that are not quantized
        return 0.0
    places = [name for name, given in operands(user).items() if given is tensor]
    scale: float = fields_of(user)["activation_scale"]
    return scale if places == ["x"] else 0.0
