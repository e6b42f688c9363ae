"""Number the caches of a draft model's graphs after those of the model, one after another.

Given:   model: key_cache_0 … key_cache_<n - 1>; draft model: key_cache_0, …
Result:  draft model: key_cache_<n>, …
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import Report, Settings, caches


def number_caches(graphs: Sequence[gs.Graph], settings: Settings, report: Report) -> None:
    """Run the pass."""
    model, *drafts = graphs
    first = sum(bool(caches(node)) for node in model.nodes)
    kept = [caches(node) for draft in drafts for node in draft.nodes if caches(node)]
    for layer, pairs in enumerate(kept, first):
        for cache, updated in pairs:
            kind, _, _ = cache.name.rpartition("_")
            cache.name, updated.name = f"{kind}_{layer}", f"{kind}_{layer}_out"
    report.count("numbered", len(kept))
