"""Quality of an embedding model and of transformers: Spearman correlation with scored pairs.

Both get the same token ids, and transformers runs in float32. The default data is `PAIRS`: pairs of
sentences with scores of their similarity from 0 to 5.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from llmc.artifacts.manifest import Manifest
from llmc.compiler.check.evaluate import (
    EvalReport,
    Progress,
    Score,
    quiet,
    reference_tolerance,
    verdict,
)
from llmc.compiler.frontend.checkpoint import read_json
from llmc.compiler.frontend.pooling import Dense, model_directory, read_plan
from llmc.errors import LlmcError, shown
from llmc.plugins.activations import REFERENCE
from llmc.plugins.code_types import CODE_TYPES
from llmc.runtime.core.llm import LLM

PAIRS = Path(__file__).with_name("pairs.jsonl")
# By dtype, and by bits of quantized weights. Two neighbors of 30 pairs that change places make a
# difference of 4e-4.
TOLERANCES = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.02}
_QUANTIZED_TOLERANCES = {8: 0.02, 4: 0.1}
_FORM = '{"text_1": "…", "text_2": "…", "score": 3.5}'
Pair = tuple[str, str, float]


def similarity(case_dir: str | Path, *, data: str | Path | None = None,
               hf_dir: str | Path | None = None, tolerance: float | None = None,
               device: Sequence[int] | None = None, progress: Progress = quiet) -> EvalReport:
    """Compute the Spearman correlation of cosine similarities with the scores of pairs.

    Args:
        case_dir: the case directory of a model for task embed.
        data: JSON lines with strings `text_1` and `text_2` and a number `score`; default: `PAIRS`.
        hf_dir: the original, to be run by transformers.
        tolerance: largest difference from transformers; default: by the model's dtype, see
            `TOLERANCES`.
        device: see `LLM`.
        progress: called with a phase, the steps done, and their total.

    Raises:
        LlmcError: a file cannot be read, a text is too long, or the model has another task.
    """
    pairs = read_pairs(data or PAIRS)
    progress("load llmc", 0, 1)
    with LLM(case_dir, device=device) as llm:
        info = llm.pooling.info("similarity", "embed")
        allowed = reference_tolerance(tolerance, hf_dir, _default_tolerance(llm.manifest))
        prompt = llm.pooling.prompt(info, None)
        texts = [text for first, second, _ in pairs for text in (first, second)]
        inputs = llm.pooling.inputs(texts, None, prompt)
        ours = _spearman(np.stack(llm.pool(inputs)), pairs)
        progress("llmc", 1, 1)
    theirs = None
    if hf_dir is not None:
        progress("load transformers", 0, 1)
        assert info.kind is not None
        embed = _reference(Path(hf_dir), info.kind)
        vectors = []
        for number, own in enumerate(inputs, 1):
            vectors.append(embed(own.token_ids))
            progress("transformers", number, len(inputs))
        theirs = _spearman(np.stack(vectors), pairs)
    score = Score("spearman", ours, theirs, None if theirs is None else ours - theirs)
    return EvalReport("similarity", str(case_dir), str(data or PAIRS),
                      None if hf_dir is None else str(hf_dir), allowed, len(pairs), (score,), (),
                      verdict([score], allowed))


def read_pairs(path: str | Path) -> list[Pair]:
    """Read scored pairs from a file of JSON lines.

    Raises:
        LlmcError: the file cannot be read or has fewer than 2 pairs, or a line lacks a field.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LlmcError(f"'{path}' cannot be read ({error}); give JSON lines in UTF-8") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            first, second, score = entry["text_1"], entry["text_2"], float(entry["score"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LlmcError(f"'{path}', line {number}, is {shown(line)}; write it like {_FORM}") \
                from error
        if not (isinstance(first, str) and isinstance(second, str) and np.isfinite(score)):
            raise LlmcError(f"'{path}', line {number}, is {shown(line)}; write it like {_FORM}")
        pairs.append((first, second, score))
    if len(pairs) < 2:
        raise LlmcError(f"'{path}' has {len(pairs)} pairs, expected at least 2; write one a line, "
                        f"like {_FORM}")
    return pairs


def _default_tolerance(manifest: Manifest) -> float:
    bits = [CODE_TYPES[dtype].precision for dtype in manifest.quantization or ()]
    return max([TOLERANCES[manifest.dtype], *(_QUANTIZED_TOLERANCES[number] for number in bits)])


def _spearman(vectors: np.ndarray, pairs: Sequence[Pair]) -> float:
    """Rank correlation of pairs' cosine similarities and scores; vectors [2 * pairs, width]."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    similarities = (unit[::2] * unit[1::2]).sum(1)
    ranks = [_ranks(similarities), _ranks(np.array([score for *_, score in pairs]))]
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values have their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray = (ends - (counts - 1) / 2)[inverse]
    return ranks


def _reference(directory: Path, kind: str) -> Callable[[Sequence[int]], np.ndarray]:
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
