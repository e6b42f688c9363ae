"""What exports of image and audio encoders share."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from llmc.compiler.frontend.bind import Checkpoint, attach_weights
from llmc.compiler.frontend.exporter import export_onnx
from llmc.compiler.frontend.parts import ROOT, Part, build
from llmc.compiler.frontend.trace import to_graph, to_proto
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError


def export_encoder(model: Any, encoder: torch.nn.Module, inputs: Mapping[str, Sequence[np.ndarray]],
                   outputs: Sequence[str]) -> onnx.ModelProto:
    """Export an encoder; the model's parameters lose their values.

    Args:
        model: the model that the encoder runs, in float32.
        encoder: takes the inputs in their order.
        inputs: by name, arrays of several samples. Axes that differ are dynamic.
        outputs: names.

    Raises:
        LlmcError: an input has different numbers of axes.
    """
    shapes: list[Mapping[int, Any]] = []
    for name, arrays in inputs.items():
        ranks = {array.ndim for array in arrays}
        if len(ranks) > 1:
            raise LlmcError(f"the processor gives {name!r} with {min(ranks)} or {max(ranks)} axes, "
                            f"expected always the same number")
        sizes = zip(*(array.shape for array in arrays), strict=True)
        shapes.append({axis: torch.export.Dim.AUTO for axis, each in enumerate(sizes)
                       if len(set(each)) > 1})
    replaced: dict[int, torch.nn.Parameter] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    replaced.setdefault(id(parameter), torch.nn.Parameter(torch.empty(
                        parameter.shape, dtype=torch.float32), requires_grad=False))
                    module._parameters[name] = replaced[id(parameter)]
        examples = {name: torch.zeros(arrays[0].shape, dtype=torch.from_numpy(arrays[0]).dtype)
                    for name, arrays in inputs.items()}
        exported = export_onnx(encoder.eval(), examples, [tuple(shapes)], outputs)
    for name, buffer in encoder.named_buffers():  # the exporter's views of them have no values
        if buffer.is_complex() and name in exported.graph.initializers:
            exported.graph.initializers[name].const_value = ir.tensor(
                torch.view_as_real(buffer).numpy(), name=name)
    proto = to_proto(exported, None)
    _remove_added_biases(proto)
    return proto


def _remove_added_biases(proto: onnx.ModelProto) -> None:
    """Remove the bias of convolutions that have none.

    The exporter adds zeros, for three dimensions in a shape that ONNX Runtime refuses.
    """
    expanded = {node.output[0] for node in proto.graph.node if node.op_type == "Expand"}
    for node in proto.graph.node:
        if node.op_type == "Conv" and len(node.input) > 2 and node.input[2] in expanded:
            del node.input[2]


def remove_unread(proto: onnx.ModelProto, names: Sequence[str]) -> None:
    """Remove these inputs, and nodes that give no rows and may read them."""
    producers = {name: node for node in proto.graph.node for name in node.output}
    waiting, read = [tensor.name for tensor in proto.graph.output], set[str]()
    while waiting:
        name = waiting.pop()
        if name not in read:
            read.add(name)
            waiting += producers[name].input if name in producers else ()
    nodes = [node for node in proto.graph.node if not read.isdisjoint(node.output)]
    inputs = [tensor for tensor in proto.graph.input
              if tensor.name in read or tensor.name not in names]
    del proto.graph.node[:], proto.graph.input[:]
    proto.graph.node.extend(nodes)
    proto.graph.input.extend(inputs)


def encoder_graph(proto: onnx.ModelProto, config: Any, part: Part, tensors: Mapping[str, Weight],
                  origin: str, names: dict[int, str]) -> gs.Graph:
    """Convert an exported encoder to a graph with a checkpoint's weights.

    Args:
        config: a transformers config.
        part: of the model.
        tensors, origin, names: see `attach_weights`.

    Raises:
        LlmcError: a tensor is missing or has another shape.
    """
    with torch.device("meta"):
        model = build(copy.deepcopy(config), part, False)
    checkpoint = Checkpoint(model, tensors)
    graph = to_graph(_with_numbers(proto, checkpoint),
                     checkpoint.spelled & model.state_dict().keys())
    attach_weights(graph, model, checkpoint, origin, names)
    return graph


def _with_numbers(proto: onnx.ModelProto, checkpoint: Checkpoint) -> onnx.ModelProto:
    """The graph with a checkpoint's values of buffers that are one number, such as bounds."""
    result = copy.deepcopy(proto)
    for tensor in result.graph.initializer:
        if not tensor.dims and tensor.data_type == onnx.TensorProto.FLOAT:
            number = checkpoint.get(tensor.name.removeprefix(ROOT))
            if number is not None and number.shape == ():
                tensor.CopyFrom(onnx.numpy_helper.from_array(
                    number.load().astype(np.float32), tensor.name))
    return result


def name_sizes(graph: gs.Graph, modality: str) -> None:
    """Name the sizes of inputs in all tensors as the manifest does; check those of outputs.

    Raises:
        LlmcError: the width of an output is not constant.
    """
    names: dict[str, str] = {}
    for tensor in graph.inputs:
        for size in tensor.shape:
            if not isinstance(size, int):
                names.setdefault(str(size), f"{modality}_{len(names)}")

    def named(size: int | str | None) -> int | str | None:
        if not isinstance(size, str):
            return size
        return names.get(size) or re.sub(r"\w+", lambda own: names.get(own[0], own[0]), size)

    for tensor in graph.tensors().values():
        if not isinstance(tensor, gs.Constant) and tensor.shape is not None:
            tensor.shape = [*map(named, tensor.shape)]
    for tensor in graph.outputs:
        width = tensor.shape[-1]
        if not isinstance(width, int):
            raise LlmcError(f"the {modality} encoder's output {tensor.name!r} has the width "
                            f"{width}, which is not constant; {LANGUAGE_MODEL_ONLY}")
