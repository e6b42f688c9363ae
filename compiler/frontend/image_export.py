"""The image encoder of a checkpoint as a graph with weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_graphsurgeon as gs
import torch

from llmc.artifacts.manifest import PositionGrid
from llmc.compiler.frontend.bind import Checkpoint, attach_weights
from llmc.compiler.frontend.image import IMAGE, trace_image
from llmc.compiler.frontend.parts import AUDIO, build, text_config
from llmc.compiler.frontend.position_grid import has_positions_by_axis
from llmc.compiler.frontend.raw import RawImageEncoder
from llmc.compiler.frontend.trace import to_graph
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.runtime.multimodal.images import import_pillow
from llmc.runtime.multimodal.items import PLURALS, MediaItem
from llmc.runtime.multimodal.processor import Processor, ProcessorDescription

# Widths and heights of the images that show which axes of a processor's arrays are dynamic. The
# first has several tiles, as torch's exporter takes a size of 1 for a constant.
_SIZES = ((800, 600), (350, 900), (1200, 300), (96, 64))


def export_image(config: Any, tensors: Mapping[str, Weight], origin: str,
                 description: ProcessorDescription, names: dict[int, str],
                 grid: PositionGrid | None) -> RawImageEncoder:
    """Export the image encoder of a checkpoint.

    Args:
        config: a transformers config.
        tensors: the checkpoint's tensors by name.
        origin: name of the checkpoint in errors.
        description: its processor.
        names: names of weights by identity, see `attach_weights`.
        grid: positions of its rows, see `RawImageEncoder`.

    Raises:
        LlmcError: the encoder cannot be exported, or a tensor is missing or has another shape.
    """
    samples = _samples(Processor(description))
    proto, computed = trace_image(copy.deepcopy(config), [item.arrays for item in samples],
                                  [item.num_rows for item in samples])
    with torch.device("meta"):
        model = build(copy.deepcopy(config), IMAGE, False)
    checkpoint = Checkpoint(model, tensors)
    graph = to_graph(proto, checkpoint.spelled & model.state_dict().keys())
    attach_weights(graph, model, checkpoint, origin, names)
    name_sizes(graph, "image")
    return RawImageEncoder(graph, computed, grid)


def check_language_model(config: Any, description: ProcessorDescription) -> None:
    """Reject language models that use the rows of images or audio otherwise than as embeddings.

    Raises:
        LlmcError: names what is not supported.
    """
    with torch.device("meta"):
        model = build(copy.deepcopy(config), AUDIO if description.image is None else IMAGE, False)
    text = text_config(config)
    image = description.image
    names = " and ".join(PLURALS[own] for own in Processor(description).placeholders)
    overlay = "block_sequence_ids" in inspect.getsource(inspect.getmodule(type(model)) or model)
    for found, words in (
            (image is not None and image.prompt.row_token is None, "cross-attention to images"),
            (image is not None and overlay
             and getattr(text, "use_bidirectional_attention", False) is not None,
             "tokens of an image that see each other"),
            (image is None and has_positions_by_axis(model), "positions by axis"),
            (getattr(text, "hidden_size_per_layer_input", 0), "per-layer inputs of token ids")):
        if found:
            raise LlmcError(f"'{config.model_type}' has {words}, which llmc does not support with "
                            f"{names}; {LANGUAGE_MODEL_ONLY}")


def _samples(processor: Processor) -> Sequence[MediaItem]:
    """What the processor gives for images of several sizes."""
    images = [import_pillow().Image.new("RGB", size) for size in _SIZES]
    return [processor.process_images([image])[0] for image in images]


def name_sizes(graph: gs.Graph, kind: str) -> None:
    """Name the dynamic sizes of inputs and outputs as the manifest does.

    Args:
        kind: image or audio.
    """
    names: dict[str, str] = {}
    for tensor in graph.inputs:
        tensor.shape = [names.setdefault(str(size), f"{kind}_{len(names)}")
                        if not isinstance(size, int) else size for size in tensor.shape]
    for tensor in graph.outputs:
        width = tensor.shape[-1]
        if not isinstance(width, int):
            raise LlmcError(f"the {kind} encoder's output {tensor.name!r} has the width {width}, "
                            f"which is not constant; use another model")
        tensor.shape = ["num_embeds", width]
