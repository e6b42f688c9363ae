"""The audio encoder of a checkpoint as a graph with weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.compiler.frontend.audio import trace_audio
from llmc.compiler.frontend.image_masks import image_masks
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


# The same in seconds, for positions of their rows.
_SECONDS = (0.31, 1.27, 2.9)


def export_audio(config: Any, tensors: Mapping[str, Weight], origin: str,
                 description: ProcessorDescription, names: dict[int, str],
                 by_axis: bool = False, token_id: int | None = None) -> RawAudioEncoder:
    """Export the audio encoder of a checkpoint.

    Args:
        config: a transformers config.
        tensors: the checkpoint's tensors by name.
        origin: name of the checkpoint in errors.
        description: its processor.
        names: names of weights by identity, see `attach_weights`.
        by_axis: positions by axis of the language model's tokens are known.
        token_id: token id that the language model reads at positions of images' rows.

    Raises:
        LlmcError: the encoder cannot be exported, or a tensor is missing or has another shape.
    """
    assert description.audio is not None and description.audio.row_token_id is not None
    if getattr(text_config(config), "hidden_size_per_layer_input", 0) and (
            token_id is None
            or image_masks(config, description.audio.row_token_id).token_id != token_id):
        raise LlmcError(f"'{config.model_type}' has per-layer inputs of other token ids at "
                        f"positions of audio than of images, which llmc does not support; "
                        f"{LANGUAGE_MODEL_ONLY}")
    window = description.audio.extractor.max_samples()
    items = _samples(description, [int(count * window) for count in _WINDOWS])
    proto = trace_audio(copy.deepcopy(config), [item.arrays for item in items],
                        description.audio.row_token_id, by_axis)
    graph = encoder_graph(proto, config, AUDIO, tensors, origin, names)
    name_sizes(graph, "audio")
    for tensor in graph.outputs:
        tensor.shape = ["num_embeds", tensor.shape[-1]]
    return RawAudioEncoder(graph)


def clip_sizes(description: ProcessorDescription) -> list[tuple[int, int]]:
    """Frames and rows of some clips; empty if prompts have none, or frames have no mask."""
    if description.audio is None:
        return []
    rate = description.audio.extractor.sampling_rate
    items = _samples(description, [int(seconds * rate) for seconds in _SECONDS])
    return [(int(array.sum()), item.num_rows) for item in items
            for name, array in item.arrays.items() if name.endswith("mask")]


def _samples(description: ProcessorDescription, lengths: Sequence[int]) -> Sequence[MediaItem]:
    """What the processor gives for clips of these lengths, in samples."""
    assert description.audio is not None
    most = description.audio.max_samples()
    return Processor(description).process_audio([np.zeros(length, np.float32) for length in lengths
                                                 if length <= most])
