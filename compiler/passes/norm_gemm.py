"""Fuse a norm into the GEMM that is its only reader.

Given:   GemmBiasAct(RMSNorm(x, g), w, b), or with LayerNorm, GatedMLP
Result:  NormGemm(x, w · g, b, row sums of w · g), with the norm's bias in b

If w is quantized, the gain cannot be folded into it. Kernels that read whole rows of x apply it:

Result:  NormGemm(x, w, b, norm_weight=g, norm_bias)

Adapters multiply an x that has the gain and the norm's bias. With `enable_lora`, the op of a folded
w keeps them:

Result:  NormGemm(x, w · g, b, row sums of w · g, lora_gain=g, lora_shift)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc import plugins
from llmc.compiler.graph.dtypes import numpy_dtype
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    fields_of,
    is_op,
    op_of,
    operand,
    operands,
    replace,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.plugins.gated_mlp.op import OP as GATED_MLP
from llmc.plugins.gemm_bias_act.op import OP as GEMM
from llmc.plugins.norm_gemm.op import OP as NORM_GEMM
from llmc.plugins.roles import Norm

NORMED = ".normed"  # suffix of a weight with a folded gain


def norm_gemm(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    norms = frozenset(op.name for op in plugins.registry().values() if op.norm is not None)
    rule = Rule("norm-gemm", norms, lambda node, settings: _check(graph, node, settings), _rewrite)
    apply_rules(graph, [rule], settings, report)


@dataclass(frozen=True)
class _NormGemm:
    norm: gs.Node
    role: Norm
    gemm: gs.Node
    folded: bool


def _check(graph: gs.Graph, node: gs.Node, settings: Settings) -> _NormGemm | NoMatch | None:
    op = op_of(node)
    if op is None or op.norm is None:
        return None  # an ONNX op of that name
    user = gemm_after(graph, node)
    if isinstance(user, NoMatch):
        return user
    if len(operands(user)["weight"].outputs) > 1:  # e.g. the embedding table tied to the LM head
        return NoMatch("the GEMM's weight is shared with another node", user)
    stored = values_of(operands(user)["weight"]).stored
    return _NormGemm(node, op.norm, user, stored is None or not settings.reads(stored))


def gemm_after(graph: gs.Graph, norm: gs.Node) -> gs.Node | NoMatch:
    """The GEMM that is the only reader of a norm's result and can be fused with it."""
    users = consumers(graph, norm.outputs[0])
    if len(users) != 1:
        return NoMatch("more than one node reads the norm's result", norm)
    user, = users
    if not is_op(user, GEMM, GATED_MLP) or operand(user, "x") is not norm.outputs[0]:
        return NoMatch("the reader of the norm's result is not a GEMM that can apply it",
                       norm if user is None else user)
    return user


def _rewrite(graph: gs.Graph, match: _NormGemm, settings: Settings) -> None:
    norm, gemm, role = operands(match.norm), match.gemm, match.role
    inputs = _folded(norm, gemm, role, settings) if match.folded else {
        "weight": operands(gemm)["weight"], "bias": operand(gemm, "bias"),
        "norm_weight": norm[role.gain], "norm_bias": norm.get(role.bias)}
    replace(graph, NORM_GEMM, {"x": norm[role.x], **inputs}, list(gemm.outputs),
            {"centred": int(role.centred), "gated": int(is_op(gemm, GATED_MLP)),
             "epsilon": fields_of(match.norm)[role.epsilon],
             "activation": fields_of(gemm)["activation"]})


def _folded(norm: Mapping[str, gs.Tensor], gemm: gs.Node, role: Norm, settings: Settings) -> \
        dict[str, gs.Tensor | None]:
    """The weight with the norm's gain, its row sums, and the bias with the norm's bias."""
    gain = values_of(norm[role.gain]).load().astype(np.float32)
    weight, bias = operands(gemm)["weight"], operand(gemm, "bias")
    matrix = values_of(weight)
    scaled = matrix.scale_columns(gain)
    if role.bias in norm:
        shift = values_of(norm[role.bias]).load().astype(np.float32)
        known = values_of(bias).load() if bias is not None else 0.0
        bias = gs.Constant(f"{weight.name}.bias", Weight.of(
            (matrix.dot(shift) + known).astype(np.float32), f"{weight.name}.bias"))
    sums = gs.Constant(f"{weight.name}.row_sums", Weight.of(scaled.cast(numpy_dtype(
        settings.options.dtype)).dot(np.ones(len(gain), np.float32)))) if role.centred else None
    own = {}
    if settings.options.enable_lora and matrix.origin is not None:
        scaled.origin = matrix.origin
        own = {"lora_gain": norm[role.gain], "lora_shift": norm.get(role.bias)}
    return {"weight": gs.Constant(f"{weight.name}{NORMED}", scaled), "bias": bias, "row_sums": sums,
            **own}
