"""Store the weights of linear layers in fewer bits.

Given:   GemmBiasAct(x, W), W float32 [out, in], with the form that its checkpoint stores it in, or
         a scheme to round it to
Result:  GemmBiasAct(x, codes, weight_scale, weight_zero; weight_dtype, group_size, in_features,
         out_features, activation_dtype, activation_scale, activation_group_size)

Given:   an op of matrices for each head, [heads, out, in], of the rows of one weight
Result:  HeadMatrices(codes, weight_scale, weight_zero; …) in their place

Where a checkpoint has columns in another order, x is brought in it by a Gather. What it stores is
never rounded again; MXFP4 becomes int8, which has its numbers, where it has no kernel, and 4 bits
become 8 where rows have an odd number of columns. Of our own
rounding, tables of embeddings take part where the LM head is the same table, and routers do not.
Groups that no kernel of the target reads stay numbers, and so do experts whose two weights are
stored in different ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Settings,
    arranged,
    is_op,
    op_of,
    operands,
    values_of,
)
from llmc.compiler.graph.weights import HeadMatrices, Weight
from llmc.compiler.passes.packing import head_weight
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

_MOST_GROUPED = 256  # of those with zeros or minima in MatMulNBits
_MOST_OF_EXPERTS = 128  # of QMoE's groups, and of those that have been run on GPUs


def quantize_weights(graphs: Sequence[gs.Graph], settings: Settings, report: Report) -> None:
    """Run the pass. What the graphs share, they go on to share.

    Raises:
        LlmcError: a weight cannot be rounded as asked for.
    """
    if settings.options.dequantize:
        return
    if not settings.options.calibrated:
        refuse_group_size(graphs, settings.options.scheme, settings.options.head_scheme,
                          settings.target.group_multiple)
    head = id(values_of(head_weight(graphs[0])))
    made: dict[int, _Made] = {}
    for owner, node in [(graph, node) for graph in graphs for node in graph.nodes]:
        op = op_of(node)
        if op is not None:
            _quantize_heads(owner, node, settings, report)
        if op is None or not op.quantized:
            continue
        weights = [values_of(operands(node)[role.weight]) for role in op.quantized]
        scheme = settings.options.head_scheme if id(weights[0]) == head else \
            settings.options.scheme if is_rounded(node) else None
        known = _forms(node, weights, scheme, settings, report, made)
        if known is not None:
            _store(owner, node, known, settings, report)


def _forms(node: gs.Node, weights: Sequence[Weight], scheme: Scheme | None, settings: Settings,
           report: Report, made: dict[int, _Made]) -> list[_Made] | None:
    """How each of a node's weights is stored, all in one way; None where they stay numbers."""
    op = op_of(node)
    assert op is not None
    if id(weights[0]) in made:
        return [made[id(values)] for values in weights]
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
    if any(_loses_rounding(values, stored, settings)
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
        made[id(values)] = _Made(values, stored, *_constants(stored, name, values.shape), blocks)
    return [made[id(values)] for values in weights]


def _rounds_to_nearest(weights: Sequence[Weight], scheme: Scheme | None,
                       settings: Settings) -> bool:
    """Whether a calibration has left weights to be rounded that are to be so."""
    return settings.options.calibrated and scheme is not None and any(
        values.stored is None for values in weights)


def _loses_rounding(values: Weight, stored: Stored | NoMatch | None, settings: Settings) -> bool:
    """Whether what a weight multiplies is not rounded as its checkpoint says, in this form."""
    if isinstance(stored, Stored) and stored.activation_dtype:
        return False
    return any(form is not None and bool(form.activation_dtype) and settings.rounds(form)
               for form in (values.stored, values.unrounded))


def _experts_forms(forms: Sequence[Stored | NoMatch | None], settings: Settings,
                   report: Report) -> list[Stored | NoMatch | None]:
    """Those of both weights of experts, in groups of one size."""
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
    why = "" if dtypes else "a form that no kernel of the target has for experts"
    if len({stored.dtype for stored in found}) > 1 or found[0].dtype not in dtypes \
            or size < SMALLEST_GROUP or size % max(settings.target.group_multiple, 1):
        why = why or f"the forms {' and '.join(f'{s.dtype} in {s.group_size}' for s in found)}"
    if any(stored.minima is not None or stored.order is not None for stored in found):
        why = why or "minima of groups, or columns in an order of their own"
    if why:
        return [NoMatch(f"experts have {why}, so they are read as numbers", stored.codes.name)
                for stored in found]
    said = {(s.activation_dtype, s.activation_scale, s.rounds_groups) for s in found}
    if len(said) > 1 or any(s.activation_scale or (s.rounds_groups and s.group_size != size)
                            for s in found):
        found = [replace(stored, activation_dtype="", activation_scale=0.0, rounds_groups=False)
                 for stored in found]
    return [stored.regrouped(size) for stored in found]


def _store(owner: gs.Graph, node: gs.Node, known: Sequence[_Made], settings: Settings,
           report: Report) -> None:
    """Give a node its weights as they are stored."""
    op, given = op_of(node), operands(node)
    assert op is not None
    stored = known[0].stored
    for role, own in zip(op.quantized, known, strict=True):
        if own.stored.order is not None:
            given["x"] = _ordered(owner, node, given["x"], own.stored.order)
        if role.row_sums in given:
            given[role.row_sums] = _row_sums(own.stored, given[role.row_sums].name)
        given |= {role.weight: own.weight, role.scale: own.scale}
        given |= {name: tensor for name, tensor in ((role.zero, own.zero),
                                                    (role.minimum, own.minimum),
                                                    (role.blocks, own.blocks)) if name and tensor}
        report.count(f"{own.stored.dtype}, groups of {own.stored.group_size}")
    node.inputs = arranged(op, given)
    shape = known[0].values.shape
    node.attrs.update(weight_dtype=stored.dtype, group_size=stored.group_size,
                      in_features=shape[-1])
    if len(known) > 1:
        node.attrs["inner_features"] = known[1].values.shape[-1]
    else:
        node.attrs["out_features"] = shape[0]
    if op.quantized[0].rounds and stored.activation_dtype:
        _round(node, known, settings, report)
    if stored.dtype == FLOAT8 and not node.attrs.get("activation_dtype"):
        report.note(Float8Dequantized(len(known)))


def _round(node: gs.Node, known: Sequence[_Made], settings: Settings, report: Report) -> None:
    """Have a node round what it multiplies, as its weights' form says."""
    stored, of_experts = known[0].stored, len(known) > 1
    if not settings.rounds(stored):
        report.note(ActivationGroupsNotQuantized())
        return
    sizes = settings.target.activation_group_sizes
    if stored.rounds_groups and sizes and stored.group_size not in sizes:
        raise LlmcError(f"'{stored.codes.name}' is multiplied by groups of {stored.group_size} "
                        f"numbers, and the target's kernels round groups of "
                        f"{', '.join(map(str, sizes))}; leave out --quantize_activations")
    node.attrs.update(activation_dtype=stored.activation_dtype,
                      activation_group_size=stored.group_size if stored.rounds_groups else 0)
    if not of_experts:
        node.attrs["activation_scale"] = stored.activation_scale
    for own in known:
        report.note(ActivationsQuantized())
        if stored.rounds_groups:
            report.note(ActivationGroupsQuantized())
        report.note(Float8Multiplied() if _is_multiplied_as_codes(own, of_experts)
                    else ActivationsDequantized())


def _is_multiplied_as_codes(own: _Made, of_experts: bool) -> bool:
    """Whether kernels multiply what is rounded, and a weight in this form, as they are."""
    if of_experts:
        return own.stored.group_size == BLOCK
    return own.blocks is not None if own.stored.rounds_groups else own.stored.scales.shape[1] == 1


def _quantize_heads(graph: gs.Graph, node: gs.Node, settings: Settings, report: Report) -> None:
    """Matrices for each head that a node has among its inputs, in fewer bits."""
    for place, tensor in enumerate(node.inputs):
        values = tensor._values if isinstance(tensor, gs.Constant) else None
        if not isinstance(values, HeadMatrices):
            continue
        said = values.matrix.stored
        if said is not None and said.activation_dtype and settings.rounds(said):
            report.note(HeadActivationsNotQuantized())
        if not settings.target.mla_projections:
            report.note(HeadsNotQuantized())
            continue
        if settings.options.scheme is not None and not settings.options.calibrated:
            refuse_rounded(values.matrix)
        stored = _form(values.matrix, settings.options.scheme, tensor.name, settings)
        if isinstance(stored, Stored) and stored.order is not None:
            stored = NoMatch("its weight has columns in the order of activations, which are in "
                             "none here, so it is read as numbers", values.name)
        if isinstance(stored, NoMatch):
            report.refuse(node, stored)
            report.note(Dequantized())
        if not isinstance(stored, Stored):
            continue
        if _rounds_to_nearest([values.matrix], settings.options.scheme, settings):
            report.note(HeadsRoundedToNearest())
        weight, scale, zero, minimum = _constants(stored, tensor.name, values.matrix.shape)
        made = gs.Variable(f"{tensor.name}.matrices", np.float32, values.shape)
        rows, width = values.matrix.shape
        graph.nodes.insert(
            next(index for index, other in enumerate(graph.nodes) if other is node),
            gs.Node(HEAD_MATRICES.name, made.name, domain="llmc", outputs=[made], attrs={
                "heads": values.shape[0], "transposed": int(values.transposed),
                "weight_dtype": stored.dtype, "group_size": stored.group_size,
                "in_features": width, "out_features": rows}, inputs=arranged(HEAD_MATRICES, {
                    "weight": weight, "weight_scale": scale, "weight_zero": zero,
                    "weight_min": minimum})))
        node.inputs[place] = made
        report.count(f"{stored.dtype}, groups of {stored.group_size}")
        if stored.dtype == FLOAT8:
            report.note(Float8Dequantized())


def is_rounded(node: gs.Node) -> bool:
    """Whether a quantizable op's weight is rounded where linear layers are: no table's, none that
    chooses experts, where a rounding changes who computes, and no single row, by which all of what
    a shared expert makes is multiplied, and which is too little to save.
    """
    op = op_of(node)
    assert op is not None
    weight = values_of(operands(node)[op.quantized[0].weight])
    return (weight.divided or weight.shape[:-1] != (1,)) \
        and not any(isinstance(way, ByVocabulary) for way in op.shard) \
        and not any(is_op(user, ROUTE) for user in node.outputs[0].outputs)


def refuse_rounded(weight: Weight) -> None:
    """Refuse to round a weight that its checkpoint has in fewer bits.

    Raises:
        LlmcError: it is one.
    """
    if weight.stored is not None or weight.dequantized:
        raise LlmcError(f"'{weight.name}' is quantised in its checkpoint already; "
                        f"{QUANTIZED_WAYS_OUT}")


def refuse_group_size(graphs: Sequence[gs.Graph], scheme: Scheme | None,
                      head_scheme: Scheme | None, multiple: int) -> None:
    """Refuse groups that a row is no whole number of, and say which sizes all of them are of.

    Raises:
        LlmcError: there is such a row among what is to be rounded.
    """
    if scheme is None or not scheme.group_size:
        return
    widths: dict[int, str] = {}
    head = values_of(head_weight(graphs[0]))
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
    way_out = f"rows of all that is rounded are whole groups of {' or '.join(sizes)}" if sizes \
        else "no group_size divides the rows of all that is rounded, so leave it out: each then " \
             "has groups of its own"
    raise LlmcError(f"group_size {scheme.group_size} does not divide the rows of '{widths[odd]}', "
                    f"of which a chip has {odd} numbers; {way_out}")


def said(values: Weight, name: str) -> str:
    """What messages call a weight, which a graph has by this name: the tensors of the checkpoint
    that it is made of, but of a stack, which has many.
    """
    return name if len(values.shape) == 3 else "' or '".join(dict.fromkeys(values.name.split("+")))


@dataclass(frozen=True)
class _Made:
    """A weight and what has become of it. Kept, so that no identity is used again."""

    values: Weight
    stored: Stored
    weight: gs.Constant
    scale: gs.Constant
    zero: gs.Constant | None
    minimum: gs.Constant | None
    blocks: gs.Constant | None


def _form(values: Weight, scheme: Scheme | None, name: str, settings: Settings,
          stacked: bool = False) -> Stored | NoMatch | None:
    """How a weight, or a stack of them, is to be stored; None, or why not: as it is."""
    if values.dequantized:
        return NoMatch("the parts of its weight are stored in different ways, or in one that no "
                       "kernel has, so it is read as numbers", values.name)
    stored = values.stored
    if stored is None:
        if scheme is None:
            return None
        if values.shape[-1] % 2:
            return NoMatch(f"its weight has rows of {values.shape[-1]} numbers, where kernels read "
                           f"even ones, so it is read as numbers", values.name)
        stored = quantize(values.reshape((math.prod(values.shape[:-1]), values.shape[-1])), scheme,
                          said(values, name))
    if not stored.code_type.linear_layers and not stacked:
        stored = stored.as_int8()
    if stored.bits == 4 and stored.codes.shape[1] % 2:
        stored = stored.in_bytes()  # two codes in a byte are of one row
    if not settings.reads(stored):
        rows = stored.codes.shape[0]
        why = "columns in the order of activations, which the target does not bring in it" \
            if stored.order is not None else \
            f"{rows} rows, where the target reads multiples of {settings.target.row_multiple}" \
            if rows % settings.target.row_multiple else \
            f"groups of {stored.group_size}, where the target's kernels read multiples of " \
            f"{settings.target.group_multiple}"
        return NoMatch(f"its weight has {why}, so it is read as numbers", values.name)
    if stored.code_type.zero_point is None and stored.group_size > _MOST_GROUPED:
        size = math.gcd(stored.group_size, 128)
        if size == 1:  # scales and zeros of more bytes than numbers have
            return NoMatch(f"its weight has groups of {stored.group_size} with zeros, which no "
                           f"kernel has, nor any that divide it, so it is read as numbers",
                           values.name)
        return stored.regrouped(size)
    return stored


def _ordered(graph: gs.Graph, node: gs.Node, x: gs.Tensor, order: np.ndarray) -> gs.Tensor:
    """The columns of x in the order in which a weight has its."""
    made = gs.Variable(f"{node.outputs[0].name}.columns", x.dtype, x.shape)
    index = gs.Constant(f"{made.name}.order", order)
    place = next(place for place, other in enumerate(graph.nodes) if other is node)
    graph.nodes.insert(place, gs.Node("Gather", made.name, {"axis": 1}, [x, index], [made]))
    return made


def _row_sums(stored: Stored, name: str) -> gs.Constant:
    """Of the numbers that codes stand for."""
    ones = np.ones(stored.codes.shape[1], np.float32)
    return gs.Constant(name, Weight.of(stored.weight(name).dot(ones), name))


def _blocks(stored: Stored, name: str) -> gs.Constant | None:
    """The scales of a weight's blocks, if it is in such."""
    scales = stored.block_scales()
    return None if scales is None else gs.Constant(f"{name}_blocks",
                                                   Weight.of(scales, f"{name}_blocks"))


def _constants(stored: Stored, name: str, shape: Sequence[int]) -> \
        tuple[gs.Constant, gs.Constant, gs.Constant | None, gs.Constant | None]:
    """Of a weight of this shape the weight, scales, zeros and minima."""
    weight, zeros = stored.packed()

    def constant(own: str, part: Weight | None) -> gs.Constant | None:
        return None if part is None else gs.Constant(
            own, part.reshape((*shape[:-1], part.shape[-1])))

    made, scale = constant(name, weight), constant(f"{name}_scale", stored.scales)
    assert made is not None and scale is not None
    return made, scale, constant(f"{name}_zero", zeros), constant(f"{name}_min", stored.minima)
