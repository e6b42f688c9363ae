"""Quality of an embedding model and of transformers: how a search ranks relevant documents.

Both get the same token ids, and transformers runs in float32. The default data is `SEARCH`:
sentences about twelve subjects, and queries whose words they rarely have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from llmc.errors import LlmcError, shown
from llmc.runtime.core.llm import LLM
from llmc.runtime.core.pooling import Input

SEARCH = Path(__file__).with_name("search.jsonl")
_CUTOFF = 10
_FORM = '{"id": "d1", "text": "…"} or {"query": "…", "relevant": ["d1"]}'
# Names of prompts in SentenceTransformers, the first that a model has.
_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


@dataclass(frozen=True)
class SearchSet:
    """Documents, and queries with the documents that answer them.

    Args:
        documents: texts.
        queries: texts.
        relevant: indices of documents of each query.
    """

    documents: tuple[str, ...]
    queries: tuple[str, ...]
    relevant: tuple[frozenset[int], ...]


def retrieval(case_dir: str | Path, *, data: str | Path | None = None,
              hf_dir: str | Path | None = None, tolerance: float | None = None,
              device: Sequence[int] | None = None, progress: Progress = quiet) -> EvalReport:
    """Compute nDCG@10 and recall@10 of documents that are ranked by cosine similarity.

    Queries have the model's prompt `query`, documents `document`, `passage` or `corpus`, where it
    has them, as SentenceTransformers' InformationRetrievalEvaluator. Long texts are truncated.

    Args:
        case_dir: the case directory of a model for task embed.
        data: JSON lines of documents (`id`, `text`) and queries (`query`, `relevant`: ids);
            default: `SEARCH`.
        hf_dir: the original, to be run by transformers.
        tolerance: largest difference from transformers; default: by the model's dtype.
        device: see `LLM`.
        progress: called with a phase, the steps done, and their total.

    Raises:
        LlmcError: a file cannot be read, or the model has another task.
    """
    given = read_search(data or SEARCH)
    progress("load llmc", 0, 1)
    with LLM(case_dir, device=device) as llm:
        info = llm.pooling.info("retrieval", "embed")
        allowed = reference_tolerance(tolerance, hf_dir, default_tolerance(llm.manifest))
        queries, documents = (
            llm.pooling.inputs(texts, -1, llm.pooling.prompt(info, _named(names, info.prompts)))
            for texts, names in ((given.queries, _QUERY_PROMPTS),
                                 (given.documents, _DOCUMENT_PROMPTS)))
        ours = measure(np.stack(llm.pool(queries)), np.stack(llm.pool(documents)), given.relevant)
        progress("llmc", 1, 1)
    theirs = None
    if hf_dir is not None:
        progress("load transformers", 0, 1)
        assert info.kind is not None
        theirs = _reference(Path(hf_dir), info.kind, queries, documents, given.relevant, progress)
    scores = tuple(
        Score(name, value, None if theirs is None else theirs[name],
              None if theirs is None else value - theirs[name]) for name, value in ours.items())
    return EvalReport("retrieval", str(case_dir), str(data or SEARCH),
                      None if hf_dir is None else str(hf_dir), allowed, len(given.queries), scores,
                      (), verdict(scores, allowed))


def _named(names: Sequence[str], prompts: Mapping[str, str]) -> str | None:
    """The first of these names that a model has a prompt for."""
    return next((name for name in names if name in prompts), None)


def _reference(directory: Path, kind: str, queries: Sequence[Input], documents: Sequence[Input],
               relevant: Sequence[frozenset[int]], progress: Progress) -> dict[str, float]:
    """The scores of transformers' vectors."""
    embed = reference_embedder(directory, kind)
    vectors = []
    for number, own in enumerate([*queries, *documents], 1):
        vectors.append(embed(own.token_ids))
        progress("transformers", number, len(queries) + len(documents))
    return measure(np.stack(vectors[:len(queries)]), np.stack(vectors[len(queries):]), relevant)


def measure(queries: np.ndarray, documents: np.ndarray,
            relevant: Sequence[frozenset[int]]) -> dict[str, float]:
    """Return the mean nDCG@10 and recall@10 over queries.

    Args:
        queries: [num_queries, width].
        documents: [num_documents, width].
        relevant: indices of documents of each query, each with gain 1.
    """
    similarities = unit_rows(queries) @ unit_rows(documents).T
    ranked = np.argsort(-similarities, axis=1, kind="stable")[:, :_CUTOFF]
    discounts = 1 / np.log2(np.arange(2, _CUTOFF + 2))
    gains, recalls = [], []
    for best, own in zip(ranked.tolist(), relevant, strict=True):
        hits = np.array([document in own for document in best], float)
        gains.append(hits @ discounts[:len(hits)] / discounts[:len(own)].sum())
        recalls.append(hits.sum() / len(own))
    return {f"ndcg@{_CUTOFF}": float(np.mean(gains)), f"recall@{_CUTOFF}": float(np.mean(recalls))}


def read_search(path: str | Path) -> SearchSet:
    """Read documents and queries from a file of JSON lines, in any order.

    Raises:
        LlmcError: the file cannot be read or has no queries, a line lacks a field, an id is there
            twice, or a query names no document of the file.
    """
    documents: dict[str, str] = {}
    queries: dict[str, list[str]] = {}
    for entry, wrong in read_entries(path, _FORM):
        name, text, query, ids = (entry.get(key) for key in ("id", "text", "query", "relevant"))
        if isinstance(name, str) and isinstance(text, str) and text and query is None:
            if name in documents:
                raise LlmcError(f"'{path}' has the id {shown(name)} twice; give each document "
                                f"its own")
            documents[name] = text
        elif isinstance(query, str) and query and isinstance(ids, list) and ids and name is None \
                and all(isinstance(own, str) for own in ids):
            if query in queries:
                raise LlmcError(f"'{path}' has the query {shown(query)} twice; give it once, with "
                                f"all relevant documents")
            queries[query] = ids
        else:
            raise wrong
    if not queries:
        raise LlmcError(f"'{path}' has {len(documents)} documents and no queries; write one "
                        f"object a line, like {_FORM}")
    indices = {name: index for index, name in enumerate(documents)}
    relevant = []
    for query, ids in queries.items():
        unknown = next((name for name in ids if name not in indices), None)
        if unknown is not None:
            raise LlmcError(f"'{path}' names the document {shown(unknown)} in query "
                            f"{shown(query)}, and has none of this id; add it, or leave it out")
        relevant.append(frozenset(indices[name] for name in ids))
    return SearchSet(tuple(documents.values()), tuple(queries), tuple(relevant))
