"""Quantize the weights of linear layers, or keep them as the checkpoint stores them.

Given:   GemmBiasAct(x, W), W float32 [out, in] with its checkpoint's storage format, or a scheme to
         quantize it by
Result:  GemmBiasAct(x, codes, weight_scale, weight_zero; weight_dtype, group_size, in_features,
         out_features, activation_dtype, activation_scale, activation_group_size)

Given:   an op of one matrix per head, [heads, out, in], of the rows of one weight
Result:  HeadMatrices(codes, weight_scale, weight_zero; …) in their place

For act-order weights a Gather permutes the columns of x. A checkpoint's quantized weights are never
rounded again: MXFP4 becomes int8 without loss if it has no kernel, and 4-bit codes become 8-bit if
rows have an odd number of columns. `--quantize` includes an embedding table tied to the LM head,
and excludes routers. Weights in groups that no kernel of the target reads are dequantized, and so
are experts whose two weights have different storage formats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE, LAYOUT
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Settings,
    arranged,
    is_llmc,
    is_op,
    op_of,
    operands,
    part_of,
    values_of,
)
from llmc.compiler.graph.weights import HeadMatrices, Weight
from llmc.compiler.passes.lora import LoraInput
from llmc.compiler.passes.packing import has_logits, head_weight
from llmc.compiler.quant.nearest import quantize
from llmc.compiler.quant.notes import (
    ActivationGroupsNotQuantized,
    ActivationGroupsQuantized,
    ActivationsDequantized,
    ActivationsQuantized,
    Dequantized,
    ExpertActivationsNotQuantized,
    ExpertsAsInt8,
    ExpertsNotQuantized,
    ExpertsRoundedToNearest,
    Float8Dequantized,
    Float8Multiplied,
    HeadActivationsNotQuantized,
    HeadsNotQuantized,
    HeadsRoundedToNearest,
    LayerActivationsNotQuantized,
    LayersNotQuantized,
)
from llmc.compiler.quant.scheme import QUANTIZED_WAYS_OUT, SMALLEST_GROUP, Scheme
from llmc.compiler.quant.stored import Stored
from llmc.errors import LlmcError
from llmc.plugins.experts.op import OP as EXPERTS
from llmc.plugins.head_matrices.op import OP as HEAD_MATRICES
from llmc.plugins.quantization import BLOCK, FLOAT8
from llmc.plugins.roles import ByVocabulary
from llmc.plugins.route.op import OP as ROUTE

_MOST_GROUPED = 256  # largest group with zeros or minima in MatMulNBits
_MOST_OF_EXPERTS = 128  # largest group of QMoE, and the largest tested on GPUs


def quantize_weights(graphs: Sequence[gs.Graph], settings: Settings, report: Report) -> None:
    """Run the pass. Weights shared by the graphs stay shared.

    Raises:
        LlmcError: a weight cannot be quantized as requested.
    """
    if settings.options.dequantize:
        return
    if not settings.options.calibrated:
        refuse_group_size(graphs, settings.options.scheme, settings.options.head_scheme,
                          settings.target.group_multiple)
    heads = {id(values_of(head_weight(graph))) for index, graph in enumerate(graphs)
             if part_of(graph, index) != "encoder" and has_logits(graph)}
    done: dict[int, _QuantizedWeight] = {}
    for owner, node in [(graph, node) for graph in graphs for node in graph.nodes]:
        op = op_of(node)
        if op is not None:
            _quantize_heads(owner, node, settings, report)
        if op is None or not op.quantized:
            continue
        weights = [values_of(operands(node)[role.weight]) for role in op.quantized]
        scheme = settings.options.head_scheme if id(weights[0]) in heads else \
            settings.options.scheme if is_rounded(node) else None
        known = _forms(node, weights, scheme, settings, report, done)
        if known is not None:
            _store(owner, node, known, settings, report)


def quantize_encoder(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Quantize the linear layers of an encoder of images or audio by `--quantize_encoders`.

    Layers of the encoder's inputs, which are patch embeddings, are not quantized. Weights that the
    checkpoint stores quantized stay so.

    Raises:
        LlmcError: a weight cannot be quantized as requested.
    """
    if settings.options.encoder_scheme is None:
        return
    settings = replace(settings, options=replace(
        settings.options, quantize=settings.options.quantize_encoders, group_size=0,
        quantize_activations=False, calibrate=None))
    done: dict[int, _QuantizedWeight] = {}
    for node in list(graph.nodes):
        op = op_of(node)
        if op is None or not op.quantized or not is_rounded(node) or _reads_inputs(node):
            continue
        weights = [values_of(operands(node)[role.weight]) for role in op.quantized]
        scheme = None if any(values.stored is not None or values.dequantized
                             for values in weights) else settings.options.scheme
        known = _forms(node, weights, scheme, settings, report, done)
        if known is not None:
            _store(graph, node, known, settings, report)


def _reads_inputs(node: gs.Node) -> bool:
    """Whether a node reads the graph's inputs, apart from their layout and elementwise ops."""
    tensor = node.inputs[0]
    while tensor.inputs and not is_llmc(tensor.inputs[0]):
        above = tensor.inputs[0]
        if above.op not in LAYOUT | ELEMENTWISE:
            return False
        tensor = above.inputs[0]
    return not tensor.inputs


def _forms(node: gs.Node, weights: Sequence[Weight], scheme: Scheme | None, settings: Settings,
           report: Report, done: dict[int, _QuantizedWeight]) -> list[_QuantizedWeight] | None:
    """The storage of each of a node's weights; None if they are not quantized."""
    op = op_of(node)
    assert op is not None
    if id(weights[0]) in done:
        return [done[id(values)] for values in weights]
    if scheme is not None and (len(weights) > 1 or not op.quantized[0].rounds):
        scheme = scheme.without_int8_activations()
    if scheme is not None and not settings.options.calibrated:
        for values in weights:
            refuse_rounded(values)
    names = [operands(node)[role.weight].name for role in op.quantized]
    forms = [_form(values, scheme, name, settings, len(weights) > 1)
             for values, name in zip(weights, names, strict=True)]
    found: Sequence[Stored | NoMatch | None] = forms if len(forms) == 1 else \
        _experts_forms(forms, settings, report)
    for values, stored in zip(weights, found, strict=True):
        if isinstance(stored, NoMatch):
            report.refuse(node, stored)
            if scheme is not None and len(weights) == 1:
                report.note(LayersNotQuantized())
            elif values.dequantized or values.stored is not None:
                report.note(Dequantized())
    if any(_loses_activation_quantization(values, stored, settings)
           for values, stored in zip(weights, found, strict=True)):
        report.note(ExpertActivationsNotQuantized() if len(weights) > 1
                    else LayerActivationsNotQuantized())
    if is_op(node, EXPERTS) and scheme is not None \
            and not all(isinstance(stored, Stored) for stored in found):
        report.note(ExpertsNotQuantized())
    kept = [stored for stored in found if isinstance(stored, Stored)]
    if len(kept) < len(weights):
        return None
    if is_op(node, EXPERTS) and _rounds_to_nearest(weights, scheme, settings):
        report.note(ExpertsRoundedToNearest())
    for values, stored, name in zip(weights, kept, names, strict=True):
        blocks = _blocks(stored, name) \
            if settings.target.block_scales and len(weights) == 1 else None
        done[id(values)] = _QuantizedWeight(
            values, stored, *_constants(stored, name, values.shape), blocks)
    return [done[id(values)] for values in weights]


def _rounds_to_nearest(weights: Sequence[Weight], scheme: Scheme | None,
                       settings: Settings) -> bool:
    """Whether calibration has left some of these weights to be rounded to nearest."""
    return settings.options.calibrated and scheme is not None and any(
        values.stored is None for values in weights)


def _loses_activation_quantization(values: Weight, stored: Stored | NoMatch | None,
                                   settings: Settings) -> bool:
    """Whether the checkpoint's activation quantization is lost in this storage format."""
    if isinstance(stored, Stored) and stored.activation_dtype:
        return False
    return any(form is not None and bool(form.activation_dtype) and settings.rounds(form)
               for form in (values.stored, values.unrounded))


def _experts_forms(forms: Sequence[Stored | NoMatch | None], settings: Settings,
                   report: Report) -> list[Stored | NoMatch | None]:
    """The storage of both weights of experts, in a common group size."""
    found = [stored for stored in forms if isinstance(stored, Stored)]
    if len(found) < len(forms):
        return [None if isinstance(stored, Stored) else stored for stored in forms]
    if any(stored.code_type.int8_factor for stored in found) and not (
            found[0].dtype in settings.target.expert_dtypes and all(
                (stored.dtype, stored.group_size) == (found[0].dtype, stored.code_type.group_size)
                for stored in found)):
        found = [stored.as_int8() if stored.code_type.int8_factor else stored for stored in found]
        report.note(ExpertsAsInt8())
    size = math.gcd(*(stored.group_size for stored in found))
    size = min(size & -size, _MOST_OF_EXPERTS)  # a power of two
    dtypes = settings.target.expert_dtypes
    reason = "" if dtypes else "a storage format without a kernel for experts on the target"
    if len({stored.dtype for stored in found}) > 1 or found[0].dtype not in dtypes \
            or size < SMALLEST_GROUP or size % max(settings.target.group_multiple, 1):
        formats = " and ".join(f"{stored.dtype} in {stored.group_size}" for stored in found)
        reason = reason or f"the formats {formats}"
    if any(stored.minima is not None or stored.order is not None for stored in found):
        reason = reason or "minima of groups, or act-order columns"
    if reason:
        return [NoMatch(f"experts have {reason}, so they are dequantized", stored.codes.name)
                for stored in found]
    rounding = {(s.activation_dtype, s.activation_scale, s.rounds_groups) for s in found}
    if len(rounding) > 1 or any(s.activation_scale or (s.rounds_groups and s.group_size != size)
                                for s in found):
        found = [replace(stored, activation_dtype="", activation_scale=0.0, rounds_groups=False)
                 for stored in found]
    return [stored.regrouped(size) for stored in found]


def _store(owner: gs.Graph, node: gs.Node, known: Sequence[_QuantizedWeight], settings: Settings,
           report: Report) -> None:
    """Replace a node's weights with their stored form."""
    op, given = op_of(node), operands(node)
    assert op is not None
    stored = known[0].stored
    for role, weight in zip(op.quantized, known, strict=True):
        if weight.stored.order is not None:
            given["x"] = _ordered(owner, node, given["x"], weight.stored.order)
            left = given.get("lora_a", given.get("lora_down"))
            if isinstance(left, LoraInput) and weight.values.origin is not None:
                left.origin = weight.values.origin.take_columns(weight.stored.order)
        if role.row_sums in given:
            given[role.row_sums] = _row_sums(weight.stored, given[role.row_sums].name)
        given |= {role.weight: weight.weight, role.scale: weight.scale}
        given |= {name: tensor for name, tensor in ((role.zero, weight.zero),
                                                    (role.minimum, weight.minimum),
                                                    (role.blocks, weight.blocks))
                  if name and tensor}
        report.count(f"{weight.stored.dtype}, groups of {weight.stored.group_size}")
    node.inputs = arranged(op, given)
    shape = known[0].values.shape
    node.attrs.update(weight_dtype=stored.dtype, group_size=stored.group_size,
                      in_features=shape[-1])
    if len(known) > 1:
        node.attrs["inner_features"] = known[1].values.shape[-1]
    else:
        node.attrs["out_features"] = shape[0]
    if op.quantized[0].rounds and stored.activation_dtype:
        _quantize_activations(node, known, settings, report)
    if stored.dtype == FLOAT8 and not node.attrs.get("activation_dtype"):
        report.note(Float8Dequantized(len(known)))


def _quantize_activations(node: gs.Node, known: Sequence[_QuantizedWeight], settings: Settings,
                          report: Report) -> None:
    """Set a node's activation quantization as its weights' storage format declares it."""
    stored, of_experts = known[0].stored, len(known) > 1
    if not settings.rounds(stored):
        report.note(ActivationGroupsNotQuantized())
        return
    sizes = settings.target.activation_group_sizes
    if stored.rounds_groups and sizes and stored.group_size not in sizes:
        raise LlmcError(f"activations of '{stored.codes.name}' are quantized in groups of "
                        f"{stored.group_size}; the target's kernels support groups of "
                        f"{', '.join(map(str, sizes))}: leave out --quantize_activations")
    node.attrs.update(activation_dtype=stored.activation_dtype,
                      activation_group_size=stored.group_size if stored.rounds_groups else 0)
    if not of_experts:
        node.attrs["activation_scale"] = stored.activation_scale
    for weight in known:
        report.note(ActivationsQuantized())
        if stored.dtype != FLOAT8:
            continue
        if stored.rounds_groups:
            report.note(ActivationGroupsQuantized())
        report.note(Float8Multiplied() if _is_multiplied_as_codes(weight, of_experts)
                    else ActivationsDequantized())


def _is_multiplied_as_codes(weight: _QuantizedWeight, of_experts: bool) -> bool:
    """Whether kernels multiply FP8 by FP8 for a weight in this storage format."""
    if of_experts:
        return weight.stored.group_size == BLOCK
    return weight.blocks is not None if weight.stored.rounds_groups else \
        weight.stored.scales.shape[1] == 1


def _quantize_heads(graph: gs.Graph, node: gs.Node, settings: Settings, report: Report) -> None:
    """Quantize the per-head matrices among a node's inputs."""
    for place, tensor in enumerate(node.inputs):
        values = tensor._values if isinstance(tensor, gs.Constant) else None
        if not isinstance(values, HeadMatrices):
            continue
        original = values.matrix.stored
        if original is not None and original.activation_dtype and settings.rounds(original):
            report.note(HeadActivationsNotQuantized())
        if not settings.target.mla_projections:
            report.note(HeadsNotQuantized())
            continue
        if settings.options.scheme is not None and not settings.options.calibrated:
            refuse_rounded(values.matrix)
        scheme = settings.options.scheme and settings.options.scheme.without_int8_activations()
        stored = _form(values.matrix, scheme, tensor.name, settings)
        if isinstance(stored, Stored) and stored.order is not None:
            stored = NoMatch("its weight has act-order columns, which are unsupported for "
                             "MLA up-projections, so it is dequantized", values.name)
        if isinstance(stored, NoMatch):
            report.refuse(node, stored)
            report.note(Dequantized())
        if not isinstance(stored, Stored):
            continue
        if _rounds_to_nearest([values.matrix], settings.options.scheme, settings):
            report.note(HeadsRoundedToNearest())
        weight, scale, zero, minimum = _constants(stored, tensor.name, values.matrix.shape)
        matrices = gs.Variable(f"{tensor.name}.matrices", np.float32, values.shape)
        rows, width = values.matrix.shape
        graph.nodes.insert(
            next(index for index, other in enumerate(graph.nodes) if other is node),
            gs.Node(HEAD_MATRICES.name, matrices.name, domain="llmc", outputs=[matrices], attrs={
                "heads": values.shape[0], "transposed": int(values.transposed),
                "weight_dtype": stored.dtype, "group_size": stored.group_size,
                "in_features": width, "out_features": rows}, inputs=arranged(HEAD_MATRICES, {
                    "weight": weight, "weight_scale": scale, "weight_zero": zero,
                    "weight_min": minimum})))
        node.inputs[place] = matrices
        report.count(f"{stored.dtype}, groups of {stored.group_size}")
        if stored.dtype == FLOAT8:
            report.note(Float8Dequantized())


def is_rounded(node: gs.Node) -> bool:
    """Whether `--quantize` quantizes a node's weight, as that of a linear layer.

    Exceptions: embedding tables; routers, as rounding would change the selected experts; and single
    rows, as of a shared expert's gate, which scale a whole result and save nothing.
    """
    op = op_of(node)
    assert op is not None
    weight = values_of(operands(node)[op.quantized[0].weight])
    return (weight.divided or weight.shape[:-1] != (1,)) \
        and not any(isinstance(way, ByVocabulary) for way in op.shard) \
        and not any(is_op(user, ROUTE) for user in node.outputs[0].outputs)


def refuse_rounded(weight: Weight) -> None:
    """Refuse to quantize a weight that the checkpoint stores quantized.

    Raises:
        LlmcError: it does.
    """
    if weight.stored is not None or weight.dequantized:
        raise LlmcError(f"'{weight.name}' is quantized in its checkpoint already; "
                        f"{QUANTIZED_WAYS_OUT}")


def refuse_group_size(graphs: Sequence[gs.Graph], scheme: Scheme | None,
                      head_scheme: Scheme | None, multiple: int) -> None:
    """Refuse a group size that does not divide a row, and list sizes that divide all.

    Raises:
        LlmcError: a row to be quantized is not divisible.
    """
    if scheme is None or not scheme.group_size:
        return
    widths: dict[int, str] = {}
    head = values_of(head_weight(graphs[0])) if has_logits(graphs[0]) else None
    for node in (node for graph in graphs for node in graph.nodes):
        op = op_of(node)
        found = [tensor._values.matrix for tensor in node.inputs if isinstance(
            tensor, gs.Constant) and isinstance(tensor._values, HeadMatrices)]
        if op is not None and op.quantized:
            weights = [values_of(operands(node)[role.weight]) for role in op.quantized]
            if head_scheme is not None if weights[0] is head else is_rounded(node):
                found.extend(weights)
        for weight in found:
            if weight.stored is None and not weight.dequantized:
                widths.setdefault(weight.shape[-1], weight.name.split("+")[0])
    odd = next((width for width in widths if scheme.group_size_for(width) is None), None)
    if odd is None:
        return
    common = math.gcd(*widths)
    sizes = [str(size) for size in range(SMALLEST_GROUP, min(common, _MOST_OF_EXPERTS) + 1, 2)
             if common % size == 0 and size % max(multiple, 1) == 0]
    way_out = f"use {' or '.join(sizes)}, which divide all rows to be quantized" if sizes \
        else "no group_size divides all rows to be quantized: leave it out to select one for " \
             "each weight"
    raise LlmcError(f"group_size {scheme.group_size} does not divide the rows of '{widths[odd]}', "
                    f"which have {odd} columns on a chip; {way_out}")


def said(values: Weight, name: str) -> str:
    """The name of a weight in messages: the checkpoint's tensors that it consists of.

    For a stack of many tensors, its name in the graph.
    """
    return name if len(values.shape) == 3 else "' or '".join(dict.fromkeys(values.name.split("+")))


@dataclass(frozen=True)
class _QuantizedWeight:
    """A weight and its stored form. It keeps the weight, so that no id is reused."""

    values: Weight
    stored: Stored
    weight: gs.Constant
    scale: gs.Constant
    zero: gs.Constant | None
    minimum: gs.Constant | None
    blocks: gs.Constant | None


def _form(values: Weight, scheme: Scheme | None, name: str, settings: Settings,
          stacked: bool = False) -> Stored | NoMatch | None:
    """The storage of a weight or stack; None, or the reason, if it is not quantized."""
    if values.dequantized:
        return NoMatch("the parts of its weight have different storage formats, or one without a "
                       "kernel, so it is dequantized", values.name)
    stored = values.stored
    if stored is None:
        if scheme is None:
            return None
        if values.shape[-1] % 2:
            return NoMatch(f"its weight has rows of {values.shape[-1]} columns; kernels need an "
                           f"even number, so it is not quantized", values.name)
        stored = quantize(values.reshape((math.prod(values.shape[:-1]), values.shape[-1])), scheme,
                          said(values, name))
    if not stored.code_type.linear_layers and not stacked:
        stored = stored.as_int8()
    if stored.bits == 4 and stored.codes.shape[1] % 2:
        stored = stored.in_bytes()  # two 4-bit codes of a byte belong to one row
    if not settings.reads(stored):
        rows = stored.codes.shape[0]
        reason = "act-order columns, which are unsupported by the target" \
            if stored.order is not None else \
            f"{rows} rows; the target reads multiples of {settings.target.row_multiple}" \
            if rows % settings.target.row_multiple else \
            f"groups of {stored.group_size}; the target's kernels read multiples of " \
            f"{settings.target.group_multiple}"
        return NoMatch(f"its weight has {reason}, so it is dequantized", values.name)
    if stored.code_type.zero_point is None and stored.group_size > _MOST_GROUPED:
        size = math.gcd(stored.group_size, 128)
        if size == 1:  # scales and zeros would need more memory than dequantized weights
            return NoMatch(f"its weight has groups of {stored.group_size} with zeros; kernels "
                           f"support up to {_MOST_GROUPED}, so it is dequantized", values.name)
        return stored.regrouped(size)
    return stored


def _ordered(graph: gs.Graph, node: gs.Node, x: gs.Tensor, order: np.ndarray) -> gs.Tensor:
    """The columns of x permuted to a weight's column order."""
    result = gs.Variable(f"{node.outputs[0].name}.columns", x.dtype, x.shape)
    index = gs.Constant(f"{result.name}.order", order)
    place = next(place for place, other in enumerate(graph.nodes) if other is node)
    graph.nodes.insert(place, gs.Node("Gather", result.name, {"axis": 1}, [x, index], [result]))
    return result


def _row_sums(stored: Stored, name: str) -> gs.Constant:
    """Row sums of the dequantized weight."""
    ones = np.ones(stored.codes.shape[1], np.float32)
    return gs.Constant(name, Weight.of(stored.weight(name).dot(ones), name))


def _blocks(stored: Stored, name: str) -> gs.Constant | None:
    """The scales of a weight in blocks, or None."""
    scales = stored.block_scales()
    return None if scales is None else gs.Constant(f"{name}_blocks",
                                                   Weight.of(scales, f"{name}_blocks"))


def _constants(stored: Stored, name: str, shape: Sequence[int]) -> \
        tuple[gs.Constant, gs.Constant, gs.Constant | None, gs.Constant | None]:
    """Weight, scales, zeros and minima of a weight of this shape."""
    weight, zeros = stored.packed()

    def constant(own: str, part: Weight | None) -> gs.Constant | None:
        return None if part is None else gs.Constant(
            own, part.reshape((*shape[:-1], part.shape[-1])))

    made, scale = constant(name, weight), constant(f"{name}_scale", stored.scales)
    assert made is not None and scale is not None
    return made, scale, constant(f"{name}_zero", zeros), constant(f"{name}_min", stored.minima)
