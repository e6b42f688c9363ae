"""Encoder-decoder models: shared weights, and cross-attention KV computed once per prompt.

Given:   encoder: … → encoder_output
         decoder: encoder_output → GemmBiasAct(Wk) → k; BidirectionalAttention(q, k, v, …)
Result:  encoder: … → encoder_output → GemmBiasAct(Wk) → memory_key_<layer>
         decoder: BidirectionalAttention(q, memory_key_<layer>, memory_value_<layer>, …)

Nodes that depend on the encoder output and not on the decoder's tokens move to the encoder. It is
an error if anything but attention's keys and values reads their results.

Where layers attend to images, the encoder output is the rows of images, and there is no encoder
before. A prompt without images has one row of zeros, for which attention gives zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from llmc import plugins
from llmc.artifacts.manifest import INPUT_FEATURES
from llmc.compiler.graph.names import ENCODER_OUTPUT
from llmc.compiler.graph.notes import VocabularySize
from llmc.compiler.graph.probe import data_tensors
from llmc.compiler.graph.rewrite import (
    Report,
    Settings,
    consumers,
    describe,
    op_of,
    operands,
    part_of,
    producer,
    tidy,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.compiler.passes.packing import token_table
from llmc.errors import LlmcError

# Of tensors of a quantized weight; see `WeightForm`.
_STORED_SUFFIXES = ("_scale", "_zero", "_min", "_blocks")


def share_weights(graphs: Sequence[gs.Graph], settings: Settings, report: Report) -> None:
    """Pad weights that an encoder or draft model shares as they are padded in the model."""
    decoder, *others = graphs
    theirs = _weights(decoder)
    for graph in others:
        if part_of(graph, 1) == "encoder" and any(t.name == "input_ids" for t in graph.inputs):
            report.note(VocabularySize(values_of(token_table(graph)).shape[0]))
        for name, tensor in _weights(graph).items():
            values = values_of(tensor)
            other = values_of(theirs[name]) if name in theirs else values
            if other.shape[0] > values.shape[0] and values.pad_rows(other.shape[0]) is other:
                tensor._values = other
                report.count("padded")
    name_weights(graphs, settings, report)


def name_weights(graphs: Sequence[gs.Graph], settings: Settings, report: Report) -> None:
    """Rename weights that differ under one name: a chip's weights are in one file."""
    known: dict[str, object] = {}
    for index, graph in enumerate(graphs):
        for name, tensor in _weights(graph).items():
            number = str(index) if index > 1 else ""
            while known.setdefault(tensor.name, tensor._values) is not tensor._values:
                tensor.name = f"{part_of(graph, index)}{number}.{name}"
                name = tensor.name
                report.count("renamed")


def name_media_weights(graphs: Sequence[gs.Graph], encoder: gs.Graph, kind: str) -> None:
    """Rename weights of an encoder of images or audio that another weight of the chip is named as.

    Args:
        graphs: the chip's other graphs.
        kind: image or audio.
    """
    known = {name for graph in graphs for name in _weights(graph)}
    own = _weights(encoder)
    stored: dict[str, list[gs.Constant]] = {}  # by name of the weight, with its scales and others
    for name, tensor in own.items():
        weight = next((name.removesuffix(suffix) for suffix in _STORED_SUFFIXES if name.endswith(
            suffix) and name.removesuffix(suffix) in own), name)
        stored.setdefault(weight, []).append(tensor)
    for parts in stored.values():
        while any(tensor.name in known for tensor in parts):
            for tensor in parts:
                tensor.name = f"{kind}.{tensor.name}"


def _weights(graph: gs.Graph) -> dict[str, gs.Constant]:
    return {tensor.name: tensor for node in graph.nodes for tensor in node.inputs
            if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)}


def move_memory(graphs: list[gs.Graph], settings: Settings, report: Report) -> None:
    """Move nodes that depend on the encoder output alone from a rank's decoder to its encoder.

    Without an encoder, one that reads the rows of images is appended.

    Raises:
        LlmcError: the decoder uses the encoder output other than as keys and values, or attention
            to a row of zeros is not zero.
    """
    decoder, of_images = graphs[0], len(graphs) == 1
    if of_images:
        rows = next(tensor for tensor in decoder.inputs if tensor.name == ENCODER_OUTPUT)
        rows = gs.Variable(INPUT_FEATURES, np.float32, ("num_tokens", rows.shape[-1]))
        graphs.append(gs.Graph(inputs=[rows], outputs=[rows], opset=plugins.OPSET))
    encoder = graphs[1]
    source, = encoder.outputs
    tokens = data_tensors(decoder, ("input_ids",))
    memory = data_tensors(decoder, (ENCODER_OUTPUT,)) - tokens
    moving = [node for node in decoder.nodes if any(id(t) in memory for t in node.inputs)
              and not any(id(t) in tokens for t in node.inputs)]
    staying = [node for node in decoder.nodes if not any(node is other for other in moving)]
    memory_inputs: dict[int, gs.Variable] = {}
    for node in staying:
        for position, tensor in enumerate(node.inputs):
            if id(tensor) not in memory:
                continue
            kind = _kind(node, position)
            if not kind or not tensor.inputs:
                raise LlmcError(f"{describe(node)} reads {describe(tensor)}, which depends on the "
                                f"encoder output; supported only as attention's keys and values")
            if of_images:
                _require_no_bias(decoder, node, tensor)
            if id(tensor) not in memory_inputs:
                number = sum(kind in other.name for other in memory_inputs.values())
                memory_inputs[id(tensor)] = gs.Variable(f"memory_{kind}_{number}", tensor.dtype,
                                                        ("num_memory_tokens", tensor.shape[-1]))
            node.inputs[position] = memory_inputs[id(tensor)]
    outputs = []
    for node in moving:
        node.name = f"memory.{node.name}"
        for position, tensor in enumerate(node.inputs):
            if tensor.name == ENCODER_OUTPUT:
                node.inputs[position] = source
            elif isinstance(tensor, gs.Constant) and not isinstance(tensor._values, Weight):
                node.inputs[position] = gs.Constant(f"{node.name}.{position}", tensor.values)
        for tensor in node.outputs:
            tensor.name = f"memory.{tensor.name}"
            if id(tensor) in memory_inputs:
                tensor.name = memory_inputs[id(tensor)].name
                outputs.append(tensor)
    encoder.nodes.extend(moving)
    encoder.outputs = outputs
    decoder.nodes.clear()
    decoder.nodes.extend(staying)
    decoder.inputs = [tensor for tensor in decoder.inputs if tensor.name != ENCODER_OUTPUT]
    decoder.inputs.extend(memory_inputs.values())
    tidy(encoder)
    tidy(decoder)
    report.count("memory", len(outputs))


def _require_no_bias(graph: gs.Graph, attention: gs.Node, memory: gs.Tensor) -> None:
    """Check that attention to a row of zeros adds nothing.

    Raises:
        LlmcError: a linear layer before or after it has a bias.
    """
    for node in (producer(memory), *consumers(graph, attention.outputs[0])):
        if node is not None and "bias" in operands(node):
            raise LlmcError(f"{describe(node)} of attention to images has a bias, which prompts "
                            f"without images would add; {LANGUAGE_MODEL_ONLY}")


def _kind(node: gs.Node, position: int) -> str:
    """The name of an attention input that may come from an encoder; "" for other inputs."""
    op = op_of(node)
    if op is None or op.attention is None or op.input_names[position] not in op.attention.memory:
        return ""
    return op.input_names[position]
