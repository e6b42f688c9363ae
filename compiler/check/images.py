"""Comparison of a prompt with images: rows of the encoder, layers and logits.

The images are preprocessed by llmc for both models, so that differences are those of the graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from llmc.artifacts.manifest import Manifest
from llmc.compiler.check.execute import Values, run_chips
from llmc.compiler.check.reference import load_reference, reference_rows, reference_values
from llmc.compiler.graph.names import HIDDEN_STATE
from llmc.errors import LlmcError
from llmc.runtime.core.llm import LLM
from llmc.runtime.engines.media_encoders import MediaEncoder
from llmc.runtime.prompts import MediaPrompt

_ROWS = "rows of image {}"
_ENCODER_THREADS = 2


def compiled_values(manifest: Manifest, root: Path, prompt: MediaPrompt) -> list[Values]:
    """Run the compiled encoder, then all chips.

    Returns:
        For each chip its hidden states and logits; of the first also the rows of each image.
    """
    encoder = MediaEncoder(manifest, root, "image", _ENCODER_THREADS)
    rows = [encoder.encode(own.item.arrays)[0] for own in prompt.ranges]
    embed_ids = np.full(len(prompt), -1, np.int32)
    embed_ids[np.concatenate([own.positions for own in prompt.ranges])] = np.arange(
        sum(map(len, rows)))
    layers = [HIDDEN_STATE.format(index) for index in range(manifest.dims.num_layers)]
    chips = run_chips(manifest, root, prompt.token_ids, {*layers, "logits"}, np.concatenate(rows),
                      embed_ids.tolist())
    chips[0] = {**{_ROWS.format(index): own for index, own in enumerate(rows)}, **chips[0]}
    return chips


def original_values(reference: str | Path, prompt: MediaPrompt, dtype: str = "float32",
                    kv_dtype: str = "") -> Values:
    """Compute the same tensors with transformers."""
    model = load_reference(reference, dtype, takes_images=True)
    items = [own.item.arrays for own in prompt.ranges]
    rows = {_ROWS.format(index): reference_rows(model, own) for index, own in enumerate(items)}
    return rows | reference_values(model, prompt.token_ids, kv_dtype, _joined(items))


def read_prompt(manifest: Manifest, root: Path, text: str | None, images: Sequence[Path]) -> \
        MediaPrompt:
    """Preprocess images, and put them in place of their placeholders.

    Args:
        text: None: the placeholders alone.

    Raises:
        LlmcError: the model takes no images, one is invalid, or the placeholders do not match.
    """
    if manifest.image is None:
        raise LlmcError(f"--image is given, but '{manifest.source.architecture}' was compiled "
                        f"without an image encoder; leave it out")
    for found, what in ((manifest.quantization, "quantized weights"),
                        (manifest.image.grid, "positions by axis"),
                        (manifest.num_deep_embeds, "rows of deep layers")):
        if not found:
            continue
        raise LlmcError(f"--image is not supported for a model with {what}; leave it out")
    with LLM(root, verify=False, max_batch_size=1) as llm:
        assert llm.processor is not None
        placeholder = llm.processor.placeholders["image"]
        return llm.media_prompt(placeholder * len(images) if text is None else text, images=images)


def _joined(items: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Join a processor's arrays of several images, as transformers' models read them."""
    try:
        return {name: np.concatenate([own[name] for own in items]) for name in items[0]}
    except ValueError as error:
        raise LlmcError("the images have different sizes after preprocessing; compare one at a "
                        "time") from error
