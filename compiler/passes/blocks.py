"""Paged KV cache and pooled recurrent state.

Given:   CausalAttention(qkv, key_cache, value_cache, …), caches [batch, num_kv_heads, max_seq_len,
         head_dim]
Result:  CausalAttention(qkv, key_cache, value_cache, …, block_table), caches [num_blocks,
         num_kv_heads, block_size, head_dim], block_table an input [batch, max_blocks]

         Likewise LatentAttention and its latent_cache, and CachedAttention of a draft model, which
         reads caches of its model.

Given:   CausalConv1d(hidden, weight, state, …), state [batch, …]
Result:  CausalConv1d(hidden, weight, state, …, state_slots), state [num_states, …], state_slots an
         input [batch]

The engine sets num_blocks, block_size and num_states when it loads the model.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import (
    Report,
    Settings,
    caches,
    op_of,
    operands,
    reads,
    replace,
    state_of,
)
from llmc.plugins import Op


def blocks(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    attention = [node for node in graph.nodes
                 if (op := op_of(node)) is not None and "block_table" in op.input_names]
    for node in attention:
        for cache in (*(cache for pair in caches(node) for cache in pair), *reads(graph, node)):
            cache.shape = ("num_blocks", cache.shape[1], "block_size", cache.shape[3])
            report.count("caches")
    _add_input(graph, attention, gs.Variable("block_table", np.int32, ("batch", "max_blocks")))
    recurrent = [(node, kept) for node in graph.nodes if (kept := state_of(node)) is not None]
    for _, kept in recurrent:
        for state in kept:
            state.shape = ("num_states", *state.shape[1:])
        report.count("states")
    _add_input(graph, [node for node, _ in recurrent],
               gs.Variable("state_slots", np.int32, ("batch",)))


def _add_input(graph: gs.Graph, nodes: list[gs.Node], given: gs.Variable) -> None:
    """Add a graph input, before caches and states, and pass it to these nodes."""
    if not nodes:
        return
    kept = {id(tensor) for node in graph.nodes
            for pair in (*caches(node), *filter(None, [state_of(node)]), reads(graph, node))
            for tensor in pair}
    graph.inputs.insert(next(i for i, own in enumerate(graph.inputs) if id(own) in kept), given)
    for node in nodes:
        op = op_of(node)
        assert isinstance(op, Op)
        replace(graph, op, {**operands(node), given.name: given}, list(node.outputs), node.attrs)
        node.outputs.clear()
        graph.nodes.remove(node)
