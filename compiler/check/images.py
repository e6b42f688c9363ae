"""Comparison of a prompt with images: rows of the encoder, layers and logits.

The images are preprocessed by llmc for both models, so that differences are those of the graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmc.artifacts.manifest import Bidirectional, Manifest
from llmc.compiler.check.execute import PromptRows, Values
from llmc.compiler.check.reference import Model, load_reference, reference_rows, reference_values
from llmc.compiler.graph.names import HIDDEN_STATE
from llmc.errors import LlmcError, reason_of
from llmc.runtime.core.input_embeds import InputEmbeds
from llmc.runtime.core.request import InputProcessor
from llmc.runtime.engines.cuda_image_encoder import load_image_encoder
from llmc.runtime.engines.image_encoder import ImageEncoder
from llmc.runtime.multimodal.items import PLURALS
from llmc.runtime.multimodal.rotary_positions import positions_of_items
from llmc.runtime.prompts import MediaPrompt

_ENCODER_THREADS = 2
ROWS = "rows of image"  # start of names of rows
_BETWEEN = "Picture"  # text after each image, as some models need it in transformers
# Inputs of some models: 1 at the tokens of images.
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")

# Runs a compiled model: the manifest, its directory, token ids, names of tensors, and rows.
Run = Callable[[Manifest, Path, list[int], set[str], PromptRows], list[Values]]


def compiled_values(manifest: Manifest, root: Path, prompt: MediaPrompt, run: Run) -> list[Values]:
    """Run the compiled encoder, then all chips.

    Returns:
        For each chip its hidden states and logits; of the first also the rows of each image.
    """
    encoder = load_image_encoder(manifest, root, _ENCODER_THREADS, device=0) \
        if manifest.target.spec.gpu else ImageEncoder(manifest, root, _ENCODER_THREADS)
    encoded = [encoder.encode(own.item) for own in prompt.ranges]
    embeds, *deep = np.concatenate(encoded, axis=1)
    embed_ids = np.full(len(prompt), -1, np.int32)
    embed_ids[_positions(prompt)] = np.arange(len(embeds))
    assert manifest.image is not None
    grid, kind, token_id = (manifest.image.grid, manifest.image.bidirectional,
                            manifest.image.token_id)
    ids = np.array(prompt.token_ids)
    if token_id is not None:
        ids[_positions(prompt)] = token_id
    ranges = InputEmbeds.of_items(prompt.ranges, None).seen_together(kind, prompt.token_ids)
    rows = PromptRows(
        embeds, embed_ids, np.array(deep, np.float32).reshape(len(deep), *embeds.shape),
        None if grid is None else positions_of_items(
            len(prompt), prompt.ranges, grid.merge_size).of_prompt,
        None if kind is None else ranges.ranges_within(0, len(prompt)))
    layers = [HIDDEN_STATE.format(index) for index in range(manifest.dims.num_layers)]
    chips = run(manifest, root, ids.tolist(), {*layers, "logits"}, rows)
    chips[0] = {**{name: own for index, each in enumerate(encoded)
                   for name, own in _named(index, each).items()}, **chips[0]}
    return chips


def original_values(reference: str | Path, prompt: MediaPrompt, kind: Bidirectional | None,
                    dtype: str = "float32", kv_dtype: str = "") -> Values:
    """Compute the same tensors with transformers.

    Args:
        kind: tokens with bidirectional attention.

    Raises:
        LlmcError: transformers cannot load the model, or run the prompt.
    """
    model = load_reference(reference, dtype, takes_media=True)
    items = [own.item.arrays for own in prompt.ranges]
    arrays = media_arrays(model, prompt, kind)
    try:
        rows = {name: own for index, each in enumerate(items)
                for name, own in _named(index, reference_rows(model, each)).items()}
        return rows | reference_values(model, prompt.token_ids, kv_dtype, arrays)
    except (RuntimeError, ValueError) as error:
        raise LlmcError(f"transformers cannot run the prompt with images ({reason_of(error)}); "
                        f"give a prompt with text between the images") from error


def read_prompt(manifest: Manifest, root: Path, text: str | None, images: Sequence[Path]) -> \
        MediaPrompt:
    """Preprocess images, and put them in place of their placeholders.

    Args:
        text: None: a user's message of the images in the chat template, which may write tokens
            around each; without a chat template, the placeholders alone, in lines.

    Raises:
        LlmcError: the model takes no images, one is invalid, or the placeholders do not match.
    """
    if manifest.image is None:
        raise LlmcError(f"--image is given, but '{manifest.source.architecture}' was compiled "
                        f"without an image encoder; leave it out")
    if manifest.image.bidirectional and manifest.target.kind != "cpu":
        raise LlmcError(f"--image is not supported by target '{manifest.target.kind}' for a model "
                        f"with bidirectional attention within an image; compare target cpu")
    if manifest.memory:
        raise LlmcError(f"--image is not supported for '{manifest.source.architecture}', whose "
                        f"layers attend to images; compare texts alone, without --image")
    reader = InputProcessor(manifest, root, 1)
    if text is None and manifest.tokenizer.chat_templates:
        parts = [part for image in images for part in (
            {"type": "image", "image": image}, {"type": "text", "text": _BETWEEN})]
        prompt = reader.chat_prompt([{"role": "user", "content": parts}], None, {}, "auto")
        assert isinstance(prompt, MediaPrompt)
        return prompt
    placeholder = reader.require_processor().placeholders["image"]
    return reader.media_prompt("\n".join([placeholder] * len(images)) if text is None else text,
                               images, (), add_special_tokens=True)


def media_arrays(model: Model, prompt: MediaPrompt, kind: Bidirectional | None) -> Values:
    """Inputs of transformers' model for the images and audio clips of a prompt.

    Args:
        kind: tokens with bidirectional attention.

    Raises:
        LlmcError: images of the prompt have different sizes.
    """
    arrays = Values()
    for modality in PLURALS:
        items = [own.item.arrays for own in prompt.ranges if own.item.modality == modality]
        if items:
            arrays |= _joined(items, modality == "audio")
    return arrays | _token_types(model, prompt, kind)


def _positions(prompt: MediaPrompt) -> np.ndarray:
    """Positions of the rows of all images."""
    return np.concatenate([own.positions for own in prompt.ranges])


def _named(index: int, rows: Iterable[np.ndarray]) -> Values:
    """Rows of an image, and those of deep layers, by name."""
    return {f"{ROWS} {index}" + (f", deep layer {layer - 1}" if layer else ""): own
            for layer, own in enumerate(rows)}


def _token_types(model: Model, prompt: MediaPrompt, kind: Bidirectional | None) -> Values:
    """The token types that the model reads, int64 [1, num_tokens]: 1 for images.

    Of a prompt with bidirectional attention throughout, they are 0.
    """
    types = np.zeros((1, len(prompt)), np.int64)
    for own in prompt.ranges:
        if own.item.modality == "image":
            types[0, own.positions] = kind != "prompt"
    return {name: types for name in _TOKEN_TYPES
            if name in inspect.signature(model.forward).parameters}


def _joined(items: Sequence[Mapping[str, np.ndarray]], pads: bool) -> dict[str, np.ndarray]:
    """Join a processor's arrays of several items, as transformers' models read them.

    Args:
        pads: pad them to one size; the model reads a mask.
    """
    try:
        several = {name: [own[name] for own in items] for name in items[0]}
        return {name: np.concatenate(_padded(own) if pads else own)
                for name, own in several.items()}
    except ValueError as error:
        raise LlmcError("the images have different sizes after preprocessing; compare one at a "
                        "time") from error


def _padded(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Pad arrays to one size, with zeros."""
    shape = np.max([own.shape[1:] for own in arrays], 0)
    return [np.pad(own, [(0, 0), *((0, size - had) for size, had in zip(
        shape, own.shape[1:], strict=True))]) for own in arrays]
