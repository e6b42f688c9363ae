"""Keep the KV cache in blocks, which sequences share and have as many of as they are long.

Given:   CausalAttention(qkv, key_cache, value_cache, …), caches [batch, num_kv_heads, max_seq_len,
         head_dim]
Result:  CausalAttention(qkv, key_cache, value_cache, …, block_table), caches [num_blocks,
         num_kv_heads, block_size, head_dim], block_table an input [batch, max_blocks]

How many blocks there are, and how large they are, the engine decides when it loads the model.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import Report, Settings, caches, op_of, operands, replace
from llmc.plugins.attention.op import OP as CAUSAL_ATTENTION


def blocks(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    found = [node for node in graph.nodes if op_of(node) is CAUSAL_ATTENTION]
    if not found:
        return
    table = gs.Variable("block_table", np.int32, ("batch", "max_blocks"))
    first = next(i for i, tensor in enumerate(graph.inputs) if "_cache_" in tensor.name)
    graph.inputs.insert(first, table)
    for node in found:
        for cache in (cache for pair in caches(node) for cache in pair):
            cache.shape = ("num_blocks", cache.shape[1], "block_size", cache.shape[3])
        replace(graph, CAUSAL_ATTENTION, {**operands(node), "block_table": table},
                list(node.outputs), node.attrs)
        node.outputs.clear()
        graph.nodes.remove(node)
        report.count("caches", 2)
