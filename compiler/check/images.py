"""Comparison of a prompt with images: rows of the encoder, layers and logits.

The images are preprocessed by llmc for both models, so that differences are those of the graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmc.artifacts.manifest import Manifest
from llmc.compiler.check.execute import PromptRows, Values
from llmc.compiler.check.reference import Model, load_reference, reference_rows, reference_values
from llmc.compiler.graph.names import HIDDEN_STATE
from llmc.errors import LlmcError, reason_of
from llmc.runtime.core.request import InputProcessor
from llmc.runtime.engines.media_encoders import MediaEncoder
from llmc.runtime.multimodal.rotary_positions import positions_of_items
from llmc.runtime.prompts import MediaPrompt

_ENCODER_THREADS = 2
# Inputs of some models: 1 at the tokens of images.
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")

# Runs a compiled model: the manifest, its directory, token ids, names of tensors, and rows.
Run = Callable[[Manifest, Path, list[int], set[str], PromptRows], list[Values]]


def compiled_values(manifest: Manifest, root: Path, prompt: MediaPrompt, run: Run) -> list[Values]:
    """Run the compiled encoder, then all chips.

    Returns:
        For each chip its hidden states and logits; of the first also the rows of each image.
    """
    encoder = MediaEncoder(manifest, root, "image", _ENCODER_THREADS)
    encoded = [encoder.encode(own.item.arrays) for own in prompt.ranges]
    embeds, *deep = np.concatenate(encoded, axis=1)
    embed_ids = np.full(len(prompt), -1, np.int32)
    embed_ids[_positions(prompt)] = np.arange(len(embeds))
    grid = manifest.image.grid if manifest.image else None
    rows = PromptRows(
        embeds, embed_ids, np.array(deep, np.float32).reshape(len(deep), *embeds.shape),
        None if grid is None else positions_of_items(
            len(prompt), prompt.ranges, grid.merge_size).of_prompt)
    layers = [HIDDEN_STATE.format(index) for index in range(manifest.dims.num_layers)]
    chips = run(manifest, root, prompt.token_ids, {*layers, "logits"}, rows)
    chips[0] = {**{name: own for index, each in enumerate(encoded)
                   for name, own in _named(index, each).items()}, **chips[0]}
    return chips


def original_values(reference: str | Path, prompt: MediaPrompt, dtype: str = "float32",
                    kv_dtype: str = "") -> Values:
    """Compute the same tensors with transformers.

    Raises:
        LlmcError: transformers cannot load the model, or run the prompt.
    """
    model = load_reference(reference, dtype, takes_images=True)
    items = [own.item.arrays for own in prompt.ranges]
    arrays = _joined(items) | _token_types(model, prompt)
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
        text: None: the placeholders alone, in lines.

    Raises:
        LlmcError: the model takes no images, one is invalid, or the placeholders do not match.
    """
    if manifest.image is None:
        raise LlmcError(f"--image is given, but '{manifest.source.architecture}' was compiled "
                        f"without an image encoder; leave it out")
    if manifest.quantization:
        raise LlmcError("--image is not supported for a model with quantized weights; leave it out")
    reader = InputProcessor(manifest, root, 1)
    placeholder = reader.require_processor().placeholders["image"]
    return reader.media_prompt("\n".join([placeholder] * len(images)) if text is None else text,
                               images, (), add_special_tokens=True)


def _positions(prompt: MediaPrompt) -> np.ndarray:
    """Positions of the rows of all images."""
    return np.concatenate([own.positions for own in prompt.ranges])


def _named(index: int, rows: Iterable[np.ndarray]) -> Values:
    """Rows of an image, and those of deep layers, by name."""
    return {f"rows of image {index}" + (f", deep layer {layer - 1}" if layer else ""): own
            for layer, own in enumerate(rows)}


def _token_types(model: Model, prompt: MediaPrompt) -> Values:
    """The token types that the model reads, int64 [1, num_tokens]."""
    types = np.zeros((1, len(prompt)), np.int64)
    types[0, _positions(prompt)] = 1
    return {name: types for name in _TOKEN_TYPES
            if name in inspect.signature(model.forward).parameters}


def _joined(items: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Join a processor's arrays of several images, as transformers' models read them."""
    try:
        return {name: np.concatenate([own[name] for own in items]) for name in items[0]}
    except ValueError as error:
        raise LlmcError("the images have different sizes after preprocessing; compare one at a "
                        "time") from error
