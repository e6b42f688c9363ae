"""Comparison of a prompt with images and audio: rows of the encoders, layers and logits.

llmc preprocesses the items for both models, so that differences are those of the graphs.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmc.artifacts.manifest import Bidirectional, Manifest
from llmc.compiler.check.execute import PromptRows, Values
from llmc.compiler.check.reference import (
    Model,
    load_reference,
    reference_clip_rows,
    reference_rows,
    reference_values,
)
from llmc.compiler.graph.names import HIDDEN_STATE
from llmc.errors import LlmcError, reason_of
from llmc.runtime.core.input_embeds import InputEmbeds
from llmc.runtime.core.request import InputProcessor
from llmc.runtime.engines.cuda_image_encoder import load_image_encoder
from llmc.runtime.engines.image_encoder import ImageEncoder, MediaEncoder
from llmc.runtime.multimodal.items import PLURALS, MediaItem, Modality
from llmc.runtime.multimodal.rotary_positions import positions_of_items
from llmc.runtime.prompts import MediaPrompt

_ENCODER_THREADS = 2
ROWS = "rows of "  # start of names of rows
_BETWEEN = "Picture"  # text after each item, as some models need it in transformers
_OPTIONS: Mapping[Modality, str] = {"image": "--image", "audio": "--audio"}
# Inputs of some models: 1 at the tokens of images.
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")

# Runs a compiled model: the manifest, its directory, token ids, names of tensors, and rows.
Run = Callable[[Manifest, Path, list[int], set[str], PromptRows], list[Values]]


def compiled_values(manifest: Manifest, root: Path, prompt: MediaPrompt, run: Run) -> list[Values]:
    """Run the compiled encoders, then all chips.

    Returns:
        For each chip its hidden states and logits; of the first also the rows of each item.
    """
    items = [own.item for own in prompt.ranges]
    encoders = {kind: _encoder(manifest, root, kind) for kind in {own.modality for own in items}}
    encoded = [encoders[own.modality].encode(own) for own in items]
    depth = 1 + manifest.num_deep_embeds  # audio has no rows of deep layers
    all_rows = np.concatenate([
        np.pad(own, ((0, depth - len(own)), (0, 0), (0, 0))) for own in encoded], axis=1)
    embed_ids = np.full(len(prompt), -1, np.int32)
    embed_ids[_positions(prompt, *PLURALS)] = np.arange(all_rows.shape[1])
    grid, kind, token_id = (None, None, None) if manifest.image is None else (
        manifest.image.grid, manifest.image.bidirectional, manifest.image.token_id)
    ids = np.array(prompt.token_ids)
    if token_id is not None:
        ids[_positions(prompt, "image")] = token_id
    ranges = InputEmbeds.of_items(prompt.ranges, None).seen_together(kind, prompt.token_ids)
    rows = PromptRows(
        all_rows[0], embed_ids, all_rows[1:],
        None if grid is None else positions_of_items(
            len(prompt), [own for own in prompt.ranges if own.item.modality == "image"],
            grid.merge_size).of_prompt,
        None if kind is None else ranges.ranges_within(0, len(prompt)))
    layers = [HIDDEN_STATE.format(index) for index in range(manifest.dims.num_layers)]
    chips = run(manifest, root, ids.tolist(), {*layers, "logits"}, rows)
    chips[0] = {**_named(items, encoded), **chips[0]}
    return chips


def _encoder(manifest: Manifest, root: Path, kind: Modality) -> MediaEncoder:
    """Load a compiled encoder."""
    if kind == "audio":  # the host runs it
        return MediaEncoder(manifest, root, kind, _ENCODER_THREADS)
    return load_image_encoder(manifest, root, _ENCODER_THREADS, device=0) \
        if manifest.target.spec.gpu else ImageEncoder(manifest, root, _ENCODER_THREADS)


def original_values(reference: str | Path, prompt: MediaPrompt, kind: Bidirectional | None,
                    dtype: str = "float32", kv_dtype: str = "") -> Values:
    """Compute the same tensors with transformers.

    Args:
        kind: tokens with bidirectional attention.

    Raises:
        LlmcError: transformers cannot load the model, or run the prompt.
    """
    model = load_reference(reference, dtype, takes_media=True)
    items = [own.item for own in prompt.ranges]
    arrays = media_arrays(model, prompt, kind)
    try:
        rows = [reference_rows(model, own.item.arrays) if own.item.modality == "image" else
                reference_clip_rows(model, own.item.arrays,
                                    prompt.token_ids[own.positions[0]], own.item.num_rows)
                for own in prompt.ranges]
        return _named(items, rows) | reference_values(model, prompt.token_ids, kv_dtype, arrays)
    except (RuntimeError, ValueError) as error:
        raise LlmcError(f"transformers cannot run the prompt with {kinds_of(prompt)} "
                        f"({reason_of(error)}); give a prompt with text between them") from error


def read_prompt(manifest: Manifest, root: Path, text: str | None, images: Sequence[Path],
                audio: Sequence[Path]) -> MediaPrompt:
    """Preprocess images and audio clips, and put them in place of their placeholders.

    Args:
        text: None: a user's message of the items in the chat template, which may write tokens
            around each; without a chat template, the placeholders alone, in lines.

    Raises:
        LlmcError: the model takes no such items, one is invalid, or the placeholders do not match.
    """
    given: dict[Modality, Sequence[Path]] = {"image": images, "audio": audio}
    for kind, paths in given.items():
        if paths and kind not in manifest.media:
            raise LlmcError(f"{_OPTIONS[kind]} is given, but '{manifest.source.architecture}' was "
                            f"compiled without an {kind} encoder; leave it out")
    if images and manifest.image and manifest.image.bidirectional \
            and manifest.target.kind != "cpu":
        raise LlmcError(f"--image is not supported by target '{manifest.target.kind}' for a model "
                        f"with bidirectional attention within an image; compare target cpu")
    if manifest.memory:
        raise LlmcError(f"--image is not supported for '{manifest.source.architecture}', whose "
                        f"layers attend to images; compare texts alone, without --image")
    reader = InputProcessor(manifest, root, 1)
    if text is None and manifest.tokenizer.chat_templates:
        parts = [part for kind, paths in given.items() for path in paths for part in (
            {"type": kind, kind: path}, {"type": "text", "text": _BETWEEN})]
        prompt = reader.chat_prompt([{"role": "user", "content": parts}], None, {}, "auto")
        assert isinstance(prompt, MediaPrompt)
        return prompt
    placeholders = reader.require_processor().placeholders
    lines = [placeholders[kind] for kind, paths in given.items() for _ in paths]
    return reader.media_prompt("\n".join(lines) if text is None else text, images, audio,
                               add_special_tokens=True)


def kinds_of(prompt: MediaPrompt) -> str:
    """Names of the kinds of a prompt's items, such as `images and audio`."""
    kinds = {own.item.modality for own in prompt.ranges}
    return " and ".join(name for kind, name in PLURALS.items() if kind in kinds)


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


def _positions(prompt: MediaPrompt, *kinds: Modality) -> np.ndarray:
    """Positions of the rows of all items of these kinds."""
    return np.concatenate([np.empty(0, np.int64), *(
        own.positions for own in prompt.ranges if own.item.modality in kinds)]).astype(np.int64)


def _named(items: Sequence[MediaItem], rows: Sequence[Iterable[np.ndarray]]) -> Values:
    """Rows of items, and those of deep layers, by name."""
    counts, named = Counter[Modality](), Values()
    for item, own in zip(items, rows, strict=True):
        name = f"{ROWS}{item.modality} {counts[item.modality]}"
        counts[item.modality] += 1
        named |= {name + (f", deep layer {layer - 1}" if layer else ""): each
                  for layer, each in enumerate(own)}
    return named


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
        raise LlmcError("the items have different sizes after preprocessing; compare one at a "
                        "time") from error


def _padded(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Pad arrays to one size, with zeros."""
    shape = np.max([own.shape[1:] for own in arrays], 0)
    return [np.pad(own, [(0, 0), *((0, size - had) for size, had in zip(
        shape, own.shape[1:], strict=True))]) for own in arrays]
