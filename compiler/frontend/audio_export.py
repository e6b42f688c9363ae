"""The audio encoder of a checkpoint as a graph with weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.compiler.frontend.audio import trace_audio
from llmc.compiler.frontend.media_export import encoder_graph, name_sizes
from llmc.compiler.frontend.parts import AUDIO, text_config
from llmc.compiler.frontend.raw import RawAudioEncoder
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.runtime.multimodal.items import MediaItem
from llmc.runtime.multimodal.processor import Processor, ProcessorDescription

# Lengths of the clips that show which axes of a processor's arrays are dynamic, in windows of its
# feature extractor. The first has several, as torch's exporter takes a size of 1 for a constant.
_WINDOWS = (2.33, 1.33, 0.71, 0.17)


def export_audio(config: Any, tensors: Mapping[str, Weight], origin: str,
                 description: ProcessorDescription, names: dict[int, str]) -> RawAudioEncoder:
    """Export the audio encoder of a checkpoint.

    Args:
        config: a transformers config.
        tensors: the checkpoint's tensors by name.
        origin: name of the checkpoint in errors.
        description: its processor.
        names: names of weights by identity, see `attach_weights`.

    Raises:
        LlmcError: the encoder cannot be exported, or a tensor is missing or has another shape.
    """
    if getattr(text_config(config), "hidden_size_per_layer_input", 0):
        raise LlmcError(f"'{config.model_type}' has per-layer inputs of token ids, which llmc does "
                        f"not support with audio; {LANGUAGE_MODEL_ONLY}")
    assert description.audio is not None and description.audio.row_token_id is not None
    samples = [item.arrays for item in _samples(Processor(description))]
    proto = trace_audio(copy.deepcopy(config), samples, description.audio.row_token_id)
    graph = encoder_graph(proto, config, AUDIO, tensors, origin, names)
    name_sizes(graph, "audio")
    for tensor in graph.outputs:
        tensor.shape = ["num_embeds", tensor.shape[-1]]
    return RawAudioEncoder(graph)


def _samples(processor: Processor) -> Sequence[MediaItem]:
    """What the processor gives for clips of several lengths."""
    audio = processor.description.audio
    assert audio is not None
    lengths = [int(count * audio.extractor.max_samples()) for count in _WINDOWS]
    return processor.process_audio([np.zeros(length, np.float32) for length in lengths
                                    if length <= audio.max_samples()])
