"""Multi-head latent attention (MLA): keys and values projected from one row per token.

Given:   keys from GemmBiasAct(latent, Wk) and, for their rotary part, from columns that all heads
         share; values from GemmBiasAct(latent, Wv), possibly the same GEMM
Result:  LatentAttention(query, [shared columns | latent], Wk, Wv, latent_cache, …), if its cache is
         smaller than that of keys and values
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import (
    Settings,
    fields_of,
    is_op,
    operands,
    producer,
    replace,
    values_of,
)
from llmc.compiler.graph.weights import HeadMatrices, Weight
from llmc.compiler.passes.attention.heads import Branch
from llmc.compiler.passes.attention.projections import (
    gathered,
    projection,
    under_head_axis,
    without_head_axis,
)
from llmc.plugins.gemm_bias_act.op import OP as GEMM_BIAS_ACT
from llmc.plugins.latent_attention.op import OP as LATENT_ATTENTION


@dataclass(frozen=True)
class Latent:
    """The origin of queries, keys and values in latent attention.

    Args:
        query: heads with the elements that meet shared columns first, and rotated ones first among
            these.
        shared: a projection, and its columns that are in the keys of all heads.
        tensor: the latent, `[batch, seq, latent]`.
        key_up: up-projection of keys, `[num_heads, own, latent]`.
        value_up: up-projection of values, `[num_heads, latent, value]`.
    """

    query: Branch
    shared: tuple[gs.Tensor, np.ndarray]
    tensor: gs.Tensor
    key_up: Weight
    value_up: Weight

    @property
    def row_dim(self) -> int:
        """Elements of a row of the cache."""
        return len(self.shared[1]) + self.key_up.shape[2]


def find_latent(query: Branch, key: Branch, value: Branch, value_dim: int) -> Latent | None:
    """The latent attention of a layer.

    Args:
        query, key, value: inputs of Sdpa.
        value_dim: elements of a value head, without padding.

    Returns:
        None if there is no common latent, or its cache is no smaller than keys and values.
    """
    if len(query.sources) != 1 or len(value.sources) != 1 or len(key.sources) != 2 \
            or query.norm or key.norm or value.norm or value.heads.gain != 1.0:
        return None
    latent, value_weight = _input_and_matrix(value.projected)
    latents = [index for index, source in enumerate(key.sources)
               if latent is not None and _input_and_matrix(source)[0] is latent]
    if latent is None or value_weight is None or len(latents) != 1:
        return None
    _, key_weight = _input_and_matrix(key.sources[latents[0]])
    widths = [int(source.shape[-1]) for source in key.sources]
    first = sum(widths[:latents[0]])
    columns = key.heads.columns
    is_own = (columns >= first) & (columns < first + widths[latents[0]])
    turned, rotary = query.heads.rotary.turned() if query.heads.rotary else (np.arange(0), None)
    common = np.concatenate([turned, np.setdiff1d(np.flatnonzero(~is_own[0]), turned)])
    rest = np.flatnonzero(is_own[0])
    if key_weight is None or not len(rest) or (is_own != is_own[0]).any() \
            or is_own[0, turned].any() or (columns[:, common] != columns[0, common]).any():
        return None
    key_up, value_up = (
        HeadMatrices(weight.take_rows(rows.reshape(-1)), len(rows), transposed)
        for weight, rows, transposed in (
            (key_weight, columns[:, rest] - first, False),
            (value_weight, value.heads.columns[:, :value_dim], True)))
    heads = dataclasses.replace(query.heads, rotary=rotary,
                                columns=query.heads.columns[:, np.concatenate([common, rest])])
    result = Latent(dataclasses.replace(query, heads=heads),
                    (key.sources[1 - latents[0]],
                     columns[0, common] - (widths[0] if latents[0] == 0 else 0)),
                    latent, key_up, value_up)
    whole = columns.shape[1] * (len(key.heads.distinct) + len(value.heads.distinct))
    return result if result.row_dim < whole else None


def rewrite_latent(graph: gs.Graph, latent: Latent, output: gs.Tensor, attrs: Mapping[str, Any],
                   inputs: Mapping[str, gs.Tensor | None], layer: int, settings: Settings) -> None:
    """Replace the producer of `output` with LatentAttention.

    Args:
        graph: to change.
        latent: of the layer.
        output: of attention.
        attrs, inputs: those that CausalAttention of these queries would have.
        layer: number of the cache.
        settings: of the compilation.
    """
    query_columns = latent.query.heads.columns
    name, batch_and_seq = output.name, output.shape[:-1]
    source, columns = latent.shared
    shared = gs.Variable(f"{name}.shared", np.float32, [*batch_and_seq, len(columns)])
    gathered(graph, without_head_axis(graph, source), columns, shared)
    rows = gs.Variable(f"{name}.rows", np.float32, [*batch_and_seq, latent.row_dim])
    graph.nodes.append(gs.Node(op="Concat", name=rows.name, attrs={"axis": -1},
                               inputs=[shared, latent.tensor], outputs=[rows]))
    shape = ("batch", 1, settings.max_seq_len, latent.row_dim)
    cache = gs.Variable(f"latent_cache_{layer}", np.float32, shape)
    updated = gs.Variable(f"{cache.name}_out", np.float32, shape)
    graph.inputs.append(cache)
    graph.outputs.append(updated)
    kept = {field: attrs[field] for field in ("num_heads", "scale", "rotary_dim", "interleaved")
            if field in attrs}
    replace(graph, LATENT_ATTENTION,
            {**inputs, "rows": rows, "latent_cache": cache,
             "query": projection(graph, latent.query, query_columns, output),
             "key_up": gs.Constant(f"{name}.key_up", latent.key_up),
             "value_up": gs.Constant(f"{name}.value_up", latent.value_up)},
            [output, updated],
            {**kept, "num_kv_heads": 1, "head_dim": latent.row_dim,
             "query_dim": query_columns.shape[1], "shared_dim": len(columns)})


def _input_and_matrix(source: gs.Tensor) -> tuple[gs.Tensor | None, Weight | None]:
    """Input `[batch, seq, in]` and matrix of a projection without bias and activation."""
    gemm = producer(source)
    if not is_op(gemm, GEMM_BIAS_ACT) or fields_of(gemm)["activation"] != "none" \
            or "bias" in operands(gemm):
        return None, None
    x, weight = operands(gemm)["x"], values_of(operands(gemm)["weight"])
    tokens = under_head_axis(x)
    x = x if tokens is None else tokens
    return (x, weight) if len(x.shape or ()) == 3 else (None, None)
