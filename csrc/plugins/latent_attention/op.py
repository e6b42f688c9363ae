"""Multi-head latent attention (MLA) of DeepSeek V2: one cache row per token for all heads.

A row is a part shared by the keys of all heads (the rotary part), followed by a latent. The key of
a head is the shared part, followed by the latent times the head's `key_up`; its value is the latent
times its `value_up`.

    query                   [num_tokens, num_heads * (shared + own)], per head the shared part first
    rows                    [num_tokens, shared + latent], before rotary embedding
    key_up                  [num_heads, own, latent]
    value_up                [num_heads, latent, value]
    latent_cache            [batch, 1, max_seq_len, shared + latent], after rotary embedding
    cu_seqlens, past_lens   int32 [batch + 1], [batch], as in CausalAttention
    cos, sin                [max_positions, rotary_dim / 2]; absent: no rotary embedding
    sinks                   [num_heads]; optional: logits of attention sinks
    block_table             int32 [batch, blocks]; absent: contiguous cache. With it the cache is
                            [num_blocks, 1, block_size, shared + latent], as in CausalAttention
    out                     [num_tokens, num_heads * value]

`head_dim` is shared + latent and `num_kv_heads` is 1: after absorbing `key_up` into the queries it
is multi-query attention of that size. `query_dim` is shared + own, `shared_dim` is shared. Its
first `rotary_dim` dimensions are rotated. `scale` 0 means query_dim ** -0.5.

Comments below use T new tokens, B sequences, S new tokens of the longest sequence, H heads, L
positions filled afterwards in the fullest cache row, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.attention.op import (
    _PAGES,
    _PAST,
    _POSITIONS,
    _TOKENS,
    _ints,
    check_heads,
    check_rotary,
    held_scores,
    rotated,
)
from llmc.plugins.roles import Attention, ByHeads


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    check_heads(fields)
    heads, dim, shared = (fields[key] for key in ("num_heads", "head_dim", "shared_dim"))
    rotary = fields["rotary_dim"]
    if fields["num_kv_heads"] != 1:
        raise ValueError(f"num_kv_heads is {fields['num_kv_heads']}, expected 1")
    if not 0 < shared < dim or rotary % 2 or not 0 <= rotary <= shared:
        raise ValueError(f"rotary_dim {rotary}, shared_dim {shared} and head_dim {dim}: expected "
                         f"even rotary_dim <= shared_dim < head_dim")
    check_rotary(rotary, present)
    paged = "block_table" in present
    table = ("max_positions" if paged else ">= max_seq_len", rotary // 2)
    return {"query": ("num_tokens", heads * fields["query_dim"]), "rows": ("num_tokens", dim),
            "key_up": (heads, fields["query_dim"] - shared, dim - shared),
            "value_up": (heads, dim - shared, "value"),
            "latent_cache": ("num_blocks", 1, "block_size", dim) if paged else
                            ("batch", 1, "max_seq_len", dim),
            "block_table": ("batch", "blocks_of_a_sequence"),
            "cu_seqlens": ("batch_plus_1",), "past_lens": ("batch",), "cos": table, "sin": table,
            "sinks": (heads,)}


def _scale(fields: Fields) -> float:
    return float(fields["scale"] or fields["query_dim"] ** -0.5)


def _rotated(name: str, heads: int, fields: Fields) -> list[str]:
    """Return lines that rotate `name`, [T, heads, 1, …], or alias it without rotary embedding."""
    if not fields["rotary_dim"]:
        return [f"{name}_rotated = Identity({name})"]
    return [f"{name}_rotated = RotaryEmbedding<interleaved={fields['interleaved']}, "
            f"num_heads={heads}, rotary_embedding_dim={fields['rotary_dim']}>"
            f"({name}, cos, sin, position_column)"]


def _prepared(fields: Fields, present: frozenset[str]) -> list[str]:
    """Return lines for the cache with new rows, `cached`, `q_flat` and `visible`.

    `cached` [B, 1, L, D] is the filled part of the cache; `q_flat` [T, H, shared + own] are the
    rotated queries; `visible` [B, S, L] are the positions that a query sees.
    """
    heads, dim, query_dim = (fields[key] for key in ("num_heads", "head_dim", "query_dim"))
    paged = "block_table" in present
    return [
        _TOKENS, _PAST, _POSITIONS, _ints("c2", 2), _ints("c12", 1, 2),
        # Indices [T, 1, (sequence, head, position)].
        _ints("row_shape", 0, 1, 1, dim), "row = Reshape(rows, row_shape)",
        *_rotated("row", 1, fields), _ints("new_shape", 0, 1, dim),
        "new_rows = Reshape(row_rotated, new_shape)",
        *([line.replace("key_cache", "latent_cache").replace("row = ", "row_in_block = ")
           for line in _PAGES] if paged else []),
        "no_head = Sub(sequence, sequence)",
        f"sequence_corner = Unsqueeze({'block' if paged else 'sequence'}, c12)",
        "head_corner = Unsqueeze(no_head, c12)",
        f"position_corner = Unsqueeze({'row_in_block' if paged else 'position'}, c12)",
        "index = Concat<axis=-1>(sequence_corner, head_corner, position_corner)",
        "latent_cache_out = ScatterND(latent_cache, index, new_rows)",
        "filled = Add(past, lengths)", "fullest = ReduceMax<keepdims=1>(filled)",
        *(["pages = Gather<axis=0>(latent_cache_out, table)",
           "pages_by_head = Transpose<perm=[0, 2, 1, 3, 4]>(pages)",
           _ints("in_line_shape", 0, 0, -1, dim), "in_line = Reshape(pages_by_head, in_line_shape)",
           "cached = Slice(in_line, c0, fullest, c2)"] if paged else
          ["cached = Slice(latent_cache_out, c0, fullest, c2)"]),
        _ints("query_shape", 0, heads, 1, query_dim), "q = Reshape(query, query_shape)",
        *_rotated("q", heads, fields), _ints("flat_shape", 0, heads, query_dim),
        "q_flat = Reshape(q_rotated, flat_shape)",
        "fullest_scalar = Squeeze(fullest)", "j = Range(zero, fullest_scalar, one)",
        "past_column = Unsqueeze(past, c1)", "padded_position = Add(past_column, step)",
        "i = Unsqueeze(padded_position, c2)", "visible = LessOrEqual(j, i)",
        "never = Constant<value_float=-1e30>()",
    ]


def _beside(masked: str, wanted: str, sinks_shape: Sequence[int]) -> list[str]:
    """Return lines for `wanted`, scores [..., L + 1], from `masked` and each head's sink."""
    return [_ints(f"{wanted}_heads", *sinks_shape),
            f"{wanted}_sinks = Reshape(sinks, {wanted}_heads)",
            _ints(f"{wanted}_axis", 3), f"{wanted}_first = Slice({masked}, c0, c1, {wanted}_axis)",
            f"{wanted}_none = Sub({wanted}_first, {wanted}_first)",
            f"{wanted}_column = Add({wanted}_none, {wanted}_sinks)",
            f"{wanted} = Concat<axis=3>({masked}, {wanted}_column)"]


def _absorbed(fields: Fields, present: frozenset[str]) -> list[str]:
    """Return lines for `out` in the absorbed form: `key_up` in the queries, `value_up` at the end.

    It takes the least work for few queries.
    """
    heads, dim, shared = (fields[key] for key in ("num_heads", "head_dim", "shared_dim"))
    return [
        # Queries [B, S * H, D].
        _ints("parts", shared, fields["query_dim"] - shared),
        "q_shared, q_own = Split<axis=2>(q_flat, parts)",
        "q_by_head = Transpose<perm=[1, 0, 2]>(q_own)",
        "q_up_by_head = MatMul(q_by_head, key_up)",
        "q_up = Transpose<perm=[1, 0, 2]>(q_up_by_head)",
        "q_absorbed = Concat<axis=2>(q_shared, q_up)",
        "q_padded = Gather<axis=0>(q_absorbed, pad)",
        "batch = Shape<end=1>(pad)", _ints("by_sequence", -1, dim),
        "q_rows_shape = Concat<axis=0>(batch, by_sequence)",
        "q_rows = Reshape(q_padded, q_rows_shape)",
        # Scores [B, S, H, L].
        "keys = Squeeze(cached, c1)", "keys_t = Transpose<perm=[0, 2, 1]>(keys)",
        "products = MatMul(q_rows, keys_t)",
        "pad_shape = Shape(pad)", _ints("by_head", heads, -1),
        "scores_shape = Concat<axis=0>(pad_shape, by_head)",
        "scores = Reshape(products, scores_shape)",
        f"scale = Constant<value_float={_scale(fields)!r}>()", "scaled = Mul(scores, scale)",
        "visible_to_heads = Unsqueeze(visible, c2)",
        "masked = Where(visible_to_heads, scaled, never)",
        *([*_beside("masked", "scored", (1, 1, heads, 1)), "shares = Softmax<axis=-1>(scored)",
           "weights = Slice(shares, c0, fullest, scored_axis)"] if "sinks" in present else
          ["weights = Softmax<axis=-1>(masked)"]),
        # Attended rows, [T, H, D], and the values of their latents.
        "products_shape = Shape(products)", "weights_rows = Reshape(weights, products_shape)",
        "seen_rows = MatMul(weights_rows, keys)",
        _ints("seen_shape", -1, heads, dim), "seen_padded = Reshape(seen_rows, seen_shape)",
        "seen = Gather<axis=0>(seen_padded, place)",
        _ints("row_parts", shared, dim - shared),
        "seen_shared, seen_latent = Split<axis=2>(seen, row_parts)",
        "seen_by_head = Transpose<perm=[1, 0, 2]>(seen_latent)",
        "out_by_head = MatMul(seen_by_head, value_up)",
        "out_heads = Transpose<perm=[1, 0, 2]>(out_by_head)",
        _ints("out_shape", 0, -1), "out = Reshape(out_heads, out_shape)",
    ]


def _expanded(fields: Fields, present: frozenset[str]) -> list[str]:
    """Return lines for `out_expanded` from full keys and values; a sink is a key of zeros."""
    heads, dim, shared = (fields[key] for key in ("num_heads", "head_dim", "shared_dim"))
    keys, values, mask, with_sinks = "keys_whole", "values", "visible_once", list[str]()
    if "sinks" in present:
        with_sinks = [
            "visible_score = Constant<value_float=0.0>()",
            "mask_once = Where(visible_once, visible_score, never)",
            "mask = Expand(mask_once, every_head)", *_beside("mask", "biases", (1, heads, 1, 1)),
            _ints("one_behind", 0, 1), "keys_more = Pad(keys_whole, one_behind, , c2)",
            "values_more = Pad(values, one_behind, , c2)"]
        keys, values, mask = "keys_more", "values_more", "biases"
    return [
        # Keys [B, H, L, shared + own] and values [B, H, L, value].
        _ints("cached_parts", shared, dim - shared),
        "cached_shared, latents = Split<axis=3>(cached, cached_parts)",
        "keys_own = com.microsoft.FusedMatMul<transB=1>(latents, key_up)",
        _ints("every_head", 1, heads, 1, 1), "keys_shared = Expand(cached_shared, every_head)",
        "keys_whole = Concat<axis=3>(keys_shared, keys_own)",
        "values = MatMul(latents, value_up)",
        "q_of_sequences = Gather<axis=0>(q_flat, pad)",
        "q_whole = Transpose<perm=[0, 2, 1, 3]>(q_of_sequences)",
        "visible_once = Unsqueeze(visible, c1)",
        *with_sinks,
        f"attended = Attention<scale={_scale(fields)!r}>(q_whole, {keys}, {values}, {mask})",
        "attended_by_token = Transpose<perm=[0, 2, 1, 3]>(attended)",
        "padded_rows = Shape<start=2>(attended_by_token)", _ints("any_number", -1),
        "width = ReduceProd(padded_rows)",
        "attended_shape = Concat<axis=0>(any_number, width)",
        "attended_rows = Reshape(attended_by_token, attended_shape)",
        "out_expanded = Gather<axis=0>(attended_rows, place)",
    ]


def _body(fields: Fields, present: frozenset[str]) -> str:
    return "\n".join([*_prepared(fields, present), *_absorbed(fields, present)])


def _cpu(fields: Fields, present: frozenset[str]) -> str:
    """Choose the form with fewer multiplications per head.

    absorbed: S (2 D L + latent (own + value));
    expanded: S L (shared + own + value) + L latent (own + value).
    """
    branches = [[line.replace("out = ", "out_absorbed = ") for line in _absorbed(fields, present)],
                _expanded(fields, present)]
    return "\n".join([
        *_prepared(fields, present),
        "value_up_shape = Shape(value_up)", "latent = Gather(value_up_shape, one)",
        "value_dim = Gather(value_up_shape, minus_one)",
        f"own_dim = Constant<value_int={fields['query_dim'] - fields['shared_dim']}>()",
        f"query_dim = Constant<value_int={fields['query_dim']}>()",
        f"row_twice = Constant<value_int={2 * fields['head_dim']}>()",
        "ups_dim = Add(own_dim, value_dim)", "ups = Mul(latent, ups_dim)",
        "whole_dim = Add(query_dim, value_dim)", "saved_dim = Sub(row_twice, whole_dim)",
        "saved_each = Mul(fullest_scalar, saved_dim)", "saved_query = Add(saved_each, ups)",
        "saved = Mul(longest, saved_query)", "added = Mul(fullest_scalar, ups)",
        "expands = Greater(saved, added)",
        "out = If(expands) <then_branch = whole () => (float[t, w] out_expanded) {",
        *branches[1], "}, else_branch = rows () => (float[t, w] out_absorbed) {", *branches[0],
        "}>"])


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Attention with full keys and values, without absorption."""
    heads, shared = fields["num_heads"], fields["shared_dim"]
    wide = {name: inputs[name].astype(np.float64)
            for name in ("query", "rows", "key_up", "value_up", "latent_cache")}
    queries, cache = wide["query"].reshape(-1, heads, fields["query_dim"]), wide["latent_cache"]
    out = np.zeros((len(queries), heads, wide["value_up"].shape[2]))
    block_size = cache.shape[2]
    table = inputs.get("block_table", np.arange(len(cache))[:, None])

    for b, past in enumerate(inputs["past_lens"]):
        start, stop = inputs["cu_seqlens"][b:b + 2]
        for token in range(start, stop):
            position = int(past + token - start)
            cache[table[b, position // block_size], 0, position % block_size] = \
                rotated(wide["rows"][token], position, fields, inputs)
            seen = np.arange(position + 1)
            rows, latents = np.split(cache[table[b, seen // block_size], 0, seen % block_size],
                                     [shared], axis=1)
            keys = np.concatenate([np.broadcast_to(rows, (heads, *rows.shape)),
                                   np.einsum("hnr,jr->hjn", wide["key_up"], latents)], axis=2)
            query = rotated(queries[token], position, fields, inputs)
            scores = np.einsum("hd,hjd->hj", query, keys) * _scale(fields)
            sinks = inputs.get("sinks", np.full(heads, -np.inf))[:, None]
            most = np.maximum(scores.max(-1, keepdims=True), sinks)
            weights = np.exp(scores - most)
            total = weights.sum(-1, keepdims=True) + np.exp(sinks - most)
            values = np.einsum("hrv,jr->hjv", wide["value_up"], latents)
            out[token] = np.einsum("hj,hjv->hv", weights / total, values)
    return [out.reshape(len(out), -1), cache]


def _samples(rng: np.random.Generator) -> list[Sample]:
    def sample(new: Sequence[int], past: Sequence[int], heads: int = 3, shared: int = 8,
               latent: int = 12, nope: int = 5, value: int = 7, rotary_dim: int = 8,
               max_seq_len: int = 24, sinks: bool = False, block_size: int = 0,
               **fields: int) -> Sample:
        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        inputs = {"query": normal(sum(new), heads * (shared + nope)),
                  "rows": normal(sum(new), shared + latent),
                  "key_up": normal(heads, nope, latent) * np.float32(latent ** -0.5),
                  "value_up": normal(heads, latent, value) * np.float32(latent ** -0.5),
                  "latent_cache": normal(len(new), 1, max_seq_len, shared + latent),
                  "cu_seqlens": np.cumsum([0, *new]).astype(np.int32),
                  "past_lens": np.array(past, np.int32)}
        if sinks:
            inputs["sinks"] = normal(heads)
        if block_size:  # in any order, with one unused block
            blocks = len(new) * (max_seq_len // block_size)
            inputs["latent_cache"] = normal(blocks + 1, 1, block_size, shared + latent)
            inputs["block_table"] = rng.permutation(blocks + 1)[:blocks] \
                .reshape(len(new), -1).astype(np.int32)
        if rotary_dim:
            angle = np.outer(np.arange(max_seq_len), 0.3 ** np.arange(rotary_dim // 2))
            inputs |= {"cos": np.cos(angle).astype(np.float32),
                       "sin": np.sin(angle).astype(np.float32)}
        return Sample({"num_heads": heads, "num_kv_heads": 1, "head_dim": shared + latent,
                       "query_dim": shared + nope, "shared_dim": shared, "scale": 0.3,
                       "rotary_dim": rotary_dim, **fields}, inputs)

    return [
        sample((5, 2, 3), (0, 0, 0)),
        sample((1, 1, 1), (11, 3, 0), interleaved=1),
        sample((6,), (4,), heads=1, value=16),
        sample((4, 1, 0, 2), (0, 9, 5, 3), heads=4, rotary_dim=4),
        sample((3, 1), (2, 7), rotary_dim=0),
        sample((19,), (0,), heads=2, shared=2, rotary_dim=2, nope=12, latent=32),
        sample((19, 2), (0, 1), heads=2, shared=2, rotary_dim=2, nope=12, latent=32, sinks=True),
        sample((1, 2), (9, 0), rotary_dim=0, sinks=True),
        sample((1, 4, 3), (11, 3, 0), block_size=4, interleaved=1),
        sample((1, 1), (9, 17), block_size=8, sinks=True),
        sample((5, 1, 2), (3, 16, 0), heads=5, shared=64, latent=512, nope=128, value=128,
               rotary_dim=64, block_size=4),
    ]


OP = Op(
    name="LatentAttention",
    version=2,
    inputs=("query", "rows", "key_up", "value_up", "latent_cache", "cu_seqlens", "past_lens",
            "cos?", "sin?", "sinks?", "block_table?"),
    outputs=("out", "latent_cache_out"),
    fields={"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "query_dim": 0, "shared_dim": 0,
            "scale": 0.0, "rotary_dim": 0, "interleaved": 0, "kv_dtype": ""},
    required=("num_heads", "num_kv_heads", "head_dim", "query_dim", "shared_dim"),
    choices={"interleaved": (0, 1), "kv_dtype": ("",)},
    shapes=lambda shapes, fields: [
        (*shapes["query"][:-1], fields["num_heads"] * int(shapes["value_up"][2])),
        shapes["latent_cache"]],
    dims=_dims,
    shard=(ByHeads({"query": "q"}, per_head=("key_up", "value_up", "sinks")),),
    attention=Attention(caches=("latent_cache",)),
    body=_body,
    bodies={"cpu": _cpu},
    float32_inputs=frozenset({"cos", "sin", "sinks"}),
    integer_inputs=frozenset({"cu_seqlens", "past_lens", "block_table"}),
    cache_inputs=frozenset({"latent_cache"}),
    held_scores={"cpu": lambda fields, present: held_scores(fields)},
    core_most={"head_dim": 2048, "query_dim": 2048},
    reference=_reference,
    samples=_samples,
)
