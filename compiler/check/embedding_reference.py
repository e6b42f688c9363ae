"""What the evaluations of embedding models share: data, tolerances and transformers' vectors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from llmc.artifacts.manifest import Manifest
from llmc.compiler.frontend.checkpoint import read_json
from llmc.compiler.frontend.pooling import Dense, model_directory, read_plan
from llmc.errors import LlmcError, shown
from llmc.plugins.activations import REFERENCE
from llmc.plugins.code_types import CODE_TYPES

# By dtype, and by bits of quantized weights. Two neighbors of 30 pairs that change places make a
# difference of 4e-4 of Spearman's correlation; of a query's first two of 36, 0.01 of nDCG.
_TOLERANCES = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.02}
_QUANTIZED_TOLERANCES = {8: 0.02, 4: 0.1}


def default_tolerance(manifest: Manifest) -> float:
    """Return the largest difference from transformers' score by the model's dtype."""
    bits = [CODE_TYPES[dtype].precision for dtype in manifest.quantization or ()]
    return max([_TOLERANCES[manifest.dtype], *(_QUANTIZED_TOLERANCES[number] for number in bits)])


def read_entries(path: str | Path, form: str) -> Iterator[tuple[dict[str, object], LlmcError]]:
    """Yield the object of each line of a file of JSON lines, and the error of a wrong one.

    Args:
        form: an example, for errors.

    Raises:
        LlmcError: the file cannot be read, or a line is not an object.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LlmcError(f"'{path}' cannot be read ({error}); give JSON lines in UTF-8") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        wrong = LlmcError(f"'{path}', line {number}, is {shown(line)}; write it like {form}")
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise wrong from None
        if not isinstance(entry, dict):
            raise wrong
        yield entry, wrong


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Divide rows [num_texts, width] by their L2 norms."""
    rows: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return rows


def reference_embedder(directory: Path, kind: str) -> Callable[[Sequence[int]], np.ndarray]:
    """Return transformers' vectors of token ids, pooled in NumPy, before normalization.

    Raises:
        LlmcError: transformers cannot load the model.
    """
    import torch
    from transformers import AutoModel

    folder = model_directory(directory)
    plan = read_plan(directory, read_json(folder / "config.json"), "embed", kind, False)
    try:
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise LlmcError(f"transformers cannot load '{folder}' ({error}); give the model that the "
                        f"case directory was compiled from") from error
    dense = [layer for layer in plan.layers if isinstance(layer, Dense)] if plan else []

    def embed(token_ids: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            states = model(torch.tensor([list(token_ids)])).last_hidden_state[0].double().numpy()
        row = {"cls": states[0], "last": states[-1], "mean": states.mean(0)}[kind]
        for layer in dense:
            row = layer.weight.cast(np.float32).load().astype(float) @ row
            if layer.bias is not None:
                row = row + layer.bias.cast(np.float32).load()
            row = REFERENCE[layer.activation.lower() or "none"](row)
        return np.asarray(row)
    return embed
