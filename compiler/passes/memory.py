"""Compute what a decoder sees of its encoder behind the encoder, once for each prompt.

Given:   encoder: … → encoder_output
         decoder: encoder_output → GemmBiasAct(Wk) → k; BidirectionalAttention(q, k, v, …)
Result:  encoder: … → encoder_output → GemmBiasAct(Wk) → memory_key_<layer>
         decoder: BidirectionalAttention(q, memory_key_<layer>, memory_value_<layer>, …)

Whatever depends on the encoder's output and not on the decoder's tokens moves. It is an error where
anything but attention's keys and values reads it.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from llmc.compiler.graph.names import ENCODER_OUTPUT
from llmc.compiler.graph.probe import data_tensors
from llmc.compiler.graph.rewrite import describe, is_llmc, tidy
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError

_POSITIONS = {1: "key", 2: "value"}  # of BidirectionalAttention's inputs


def move_memory(encoder: gs.Graph, decoder: gs.Graph) -> int:
    """Change the graphs of one rank; returns how many tensors the decoder reads now.

    Raises:
        LlmcError: the decoder uses the encoder's output otherwise than as keys and values.
    """
    source, = encoder.outputs
    tokens = data_tensors(decoder, ("input_ids",))
    memory = data_tensors(decoder, (ENCODER_OUTPUT,)) - tokens
    moving = [node for node in decoder.nodes if any(id(t) in memory for t in node.inputs)
              and not any(id(t) in tokens for t in node.inputs)]
    staying = [node for node in decoder.nodes if not any(node is other for other in moving)]
    made: dict[int, gs.Variable] = {}
    for node in staying:
        for position, tensor in enumerate(node.inputs):
            if id(tensor) not in memory:
                continue
            if not is_llmc(node, "BidirectionalAttention") or position not in _POSITIONS \
                    or not tensor.inputs:
                raise LlmcError(f"{describe(node)} reads {describe(tensor)}, which comes from the "
                                f"encoder, otherwise than as attention's keys and values")
            if id(tensor) not in made:
                kind = _POSITIONS[position]
                number = sum(kind in other.name for other in made.values())
                made[id(tensor)] = gs.Variable(f"memory_{kind}_{number}", tensor.dtype,
                                               ("num_memory_tokens", tensor.shape[-1]))
            node.inputs[position] = made[id(tensor)]
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
            if id(tensor) in made:
                tensor.name = made[id(tensor)].name
                outputs.append(tensor)
    encoder.nodes.extend(moving)
    encoder.outputs = outputs
    decoder.nodes.clear()
    decoder.nodes.extend(staying)
    decoder.inputs = [tensor for tensor in decoder.inputs if tensor.name != ENCODER_OUTPUT]
    decoder.inputs.extend(made.values())
    tidy(encoder)
    tidy(decoder)
    return len(outputs)
