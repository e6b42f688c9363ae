"""Number the caches of a draft model's graphs after those of the model, and find those it reads.

Given:   model: key_cache_0 … key_cache_<n - 1>; draft model: key_cache_0, …
Result:  draft model: key_cache_<n>, …

Given:   draft model: CachedAttention(…, key_cache_<i>_out, value_cache_<i>_out, …, cos, sin), with
         caches of the model
Result:  the same with cos and sin of the next position: the query is that of a token whose keys and
         values are not in the caches yet, and reads them as the token before it does
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import Report, Settings, caches, operand, reads, values_of
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError


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


def read_caches(graphs: Sequence[gs.Graph], settings: Settings, report: Report) -> None:
    """Run the pass.

    Raises:
        LlmcError: the model's cache is absent, or of other heads or another rotary embedding.
    """
    model, *drafts = graphs
    writers = {updated.name: node for node in model.nodes for _, updated in caches(node)}
    later: dict[int, gs.Constant] = {}
    for draft in drafts:
        for node in draft.nodes:
            found = reads(draft, node)
            for cache in found:
                _check_writer(node, writers.get(cache.name), cache.name, settings)
                report.count("read")
            for table in ("cos", "sin"):
                tensor = operand(node, table) if found else None
                if tensor is not None:
                    values = values_of(tensor).load()
                    later.setdefault(id(tensor), gs.Constant(f"{tensor.name}.next", Weight.of(
                        np.concatenate([values[1:], values[-1:]]))))
                    node.inputs[[id(each) for each in node.inputs].index(id(tensor))] = \
                        later[id(tensor)]


def match_heads(graphs: Sequence[gs.Graph], settings: Settings, report: Report) -> None:
    """Check that a rank has the caches that its draft model reads.

    Raises:
        LlmcError: their heads are on other ranks.
    """
    model, *drafts = graphs
    written = {updated.name: updated.shape for node in model.nodes for _, updated in caches(node)}
    for draft in drafts:
        for tensor in (tensor for node in draft.nodes for tensor in reads(draft, node)):
            if [*tensor.shape] != [*written[tensor.name]]:
                raise LlmcError(f"the draft model of '{settings.model}' reads "
                                f"'{tensor.name.removesuffix('_out')}' with {tensor.shape[1]} KV "
                                f"heads on a chip, where the model has "
                                f"{written[tensor.name][1]}; compile with --tp_size 1")


def _check_writer(node: gs.Node, writer: gs.Node | None, name: str, settings: Settings) -> None:
    """Check that a node of a draft model can read what a node of the model writes."""
    what = "absent" if writer is None else next(
        (f"of {field} {writer.attrs.get(field, 0)} instead of {node.attrs.get(field, 0)}"
         for field in ("num_kv_heads", "head_dim", "rotary_dim", "interleaved")
         if writer.attrs.get(field, 0) != node.attrs.get(field, 0)), None)
    if what is None and writer is not None:
        for table in ("cos", "sin"):
            own, theirs = operand(node, table), operand(writer, table)
            if own is not None and theirs is not None and not np.allclose(
                    values_of(own).load(), values_of(theirs).load(), atol=1e-6):
                what = "of another rotary embedding"
    if what is not None:
        raise LlmcError(f"the draft model reads '{name.removesuffix('_out')}' of "
                        f"'{settings.model}', which is {what}; give a draft model that was "
                        f"trained for it")
