"""Quality of an embedding model and of transformers: Spearman correlation with scored pairs.

Both get the same token ids, and transformers runs in float32. The default data is `PAIRS`: pairs of
sentences with scores of their similarity from 0 to 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmc.compiler.check.embedding_reference import (
    default_tolerance,
    read_entries,
    reference_embedder,
    unit_rows,
)
from llmc.compiler.check.evaluate import (
    EvalReport,
    Progress,
    Score,
    quiet,
    reference_tolerance,
    verdict,
)
from llmc.errors import LlmcError
from llmc.runtime.core.llm import LLM

PAIRS = Path(__file__).with_name("pairs.jsonl")
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
        tolerance: largest difference from transformers; default: by the model's dtype.
        device: see `LLM`.
        progress: called with a phase, the steps done, and their total.

    Raises:
        LlmcError: a file cannot be read, a text is too long, or the model has another task.
    """
    pairs = read_pairs(data or PAIRS)
    progress("load llmc", 0, 1)
    with LLM(case_dir, device=device) as llm:
        info = llm.pooling.info("similarity", "embed")
        allowed = reference_tolerance(tolerance, hf_dir, default_tolerance(llm.manifest))
        prompt = llm.pooling.prompt(info, None)
        texts = [text for first, second, _ in pairs for text in (first, second)]
        inputs = llm.pooling.inputs(texts, None, prompt)
        ours = _spearman(np.stack(llm.pool(inputs)), pairs)
        progress("llmc", 1, 1)
    theirs = None
    if hf_dir is not None:
        progress("load transformers", 0, 1)
        assert info.kind is not None
        embed = reference_embedder(Path(hf_dir), info.kind)
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
    pairs = []
    for entry, wrong in read_entries(path, _FORM):
        first, second, score = (entry.get(key) for key in ("text_1", "text_2", "score"))
        if not (isinstance(first, str) and isinstance(second, str)
                and isinstance(score, int | float) and np.isfinite(score)):
            raise wrong
        pairs.append((first, second, float(score)))
    if len(pairs) < 2:
        raise LlmcError(f"'{path}' has {len(pairs)} pairs, expected at least 2; write one a line, "
                        f"like {_FORM}")
    return pairs


def _spearman(vectors: np.ndarray, pairs: Sequence[Pair]) -> float:
    """Rank correlation of pairs' cosine similarities and scores; vectors [2 * pairs, width]."""
    unit = unit_rows(vectors)
    similarities = (unit[::2] * unit[1::2]).sum(1)
    ranks = [_ranks(similarities), _ranks(np.array([score for *_, score in pairs]))]
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values have their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray = (ends - (counts - 1) / 2)[inverse]
    return ranks
