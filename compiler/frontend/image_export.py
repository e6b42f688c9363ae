"""The image encoder of a checkpoint as a graph with weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmc.artifacts.manifest import AttendedRows, PositionGrid
from llmc.artifacts.vision_input import TILES
from llmc.compiler.frontend.image import IMAGE, TracedImageEncoder, trace_image
from llmc.compiler.frontend.image_masks import ImageMasks, image_masks
from llmc.compiler.frontend.media_export import encoder_graph, name_sizes
from llmc.compiler.frontend.raw import RawImageEncoder
from llmc.compiler.graph.image_samples import ImageSample
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.runtime.multimodal.images import import_pillow
from llmc.runtime.multimodal.items import MediaItem
from llmc.runtime.multimodal.processor import Processor, ProcessorDescription

# Widths and heights of the images that show which axes of a processor's arrays are dynamic. The
# first has several tiles, as torch's exporter takes a size of 1 for a constant.
_SIZES = ((800, 600), (350, 900), (1200, 300), (96, 64))


def export_image(config: Any, tensors: Mapping[str, Weight], origin: str,
                 description: ProcessorDescription, names: dict[int, str],
                 grid: PositionGrid | None, masks: ImageMasks) -> RawImageEncoder:
    """Export the image encoder of a checkpoint.

    Args:
        config: a transformers config.
        tensors: the checkpoint's tensors by name.
        origin: name of the checkpoint in errors.
        description: its processor.
        names: names of weights by identity, see `attach_weights`.
        grid: positions of its rows, see `RawImageEncoder`.
        masks: of the language model.

    Raises:
        LlmcError: the encoder cannot be exported, or a tensor is missing or has another shape.
    """
    samples = _samples(Processor(description))
    assert description.image is not None
    attended = description.image.row_token_id is None
    traced = trace_image(copy.deepcopy(config), [item.arrays for item in samples],
                         () if attended else [item.num_rows for item in samples])
    graph = encoder_graph(traced.proto, config, IMAGE, tensors, origin, names)
    name_sizes(graph, "image")
    inputs = tuple(replace(ImageSample.of(arrays, graph.inputs),
                           num_rows=None if attended else item.num_rows)
                   for arrays, item in zip(traced.inputs, samples, strict=True))
    return RawImageEncoder(graph, traced.computed, grid, masks.kind, masks.token_id,
                           traced.padded, inputs,
                           _attended(samples, traced) if attended else None)


def _attended(samples: Sequence[MediaItem], traced: TracedImageEncoder) -> AttendedRows:
    """Describe the rows of an image that layers of the language model attend to.

    Raises:
        LlmcError: images have different numbers of rows, or rows that are not of tiles.
    """
    tiles = {own.arrays[TILES].shape[-1] for own in samples if TILES in own.arrays}
    if len({*traced.num_rows}) > 1 or len(tiles) != 1 or traced.num_rows[0] % min(tiles):
        raise LlmcError(f"images have {', '.join(map(str, sorted({*traced.num_rows})))} rows for "
                        f"cross-attention, expected as many in each of a number of tiles that is "
                        f"the same for all images; {LANGUAGE_MODEL_ONLY}")
    return AttendedRows(tiles_per_image=min(tiles), rows_per_tile=traced.num_rows[0] // min(tiles))


def check_language_model(config: Any, description: ProcessorDescription) -> ImageMasks:
    """Determine how a language model reads images besides their rows.

    Rows that layers attend to are not in the prompt.

    Raises:
        LlmcError: names what is not supported.
    """
    assert description.image is not None
    row_token = description.image.row_token_id
    if row_token is None:
        return ImageMasks()
    return image_masks(config, row_token)


def _samples(processor: Processor) -> Sequence[MediaItem]:
    """What the processor gives for images of several sizes."""
    images = [import_pillow().Image.new("RGB", size) for size in _SIZES]
    return [processor.process_images([image])[0] for image in images]
