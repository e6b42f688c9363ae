"""Causal self-attention over packed tokens, with rotary embedding, per-head norms and KV append.

Sequence b owns row b of both caches. Its first past_lens[b] positions are filled; its new tokens,
rows cu_seqlens[b] to cu_seqlens[b + 1] of qkv, are appended. Prefill, decode and mixed batches are
the same op with other lengths.

    qkv                     [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    key_cache, value_cache  [batch, num_kv_heads, max_seq_len, head_dim]; keys after norm and RoPE
    cu_seqlens, past_lens   int32 [batch + 1], [batch]
    cos, sin                [max_positions, rotary_dim / 2]; absent: no rotary embedding
    q_norm, k_norm          [head_dim], RMSNorm over each head before the rotary embedding, or
                            with `norm_after_rotary` after it
    v_norm                  [head_dim], RMSNorm over each head of the values
    block_table             int32 [batch, blocks]; absent: contiguous caches. With it the caches are
                            [num_blocks, num_kv_heads, block_size, head_dim], and position p of
                            sequence b is row p % block_size of block block_table[b, p / block_size]
    distance_bias           [num_heads, distances]; optional. Column i - j, or the last one for
                            larger distances, is added to the score of query i and key j
    key_bias                [num_heads, positions]; optional. Column j is added to the score of
                            key j
    sinks                   [num_heads]; optional: logits of attention sinks, which take part in
                            the softmax and have no value
    query_scale             [max_positions]; optional. The query at position i is multiplied by
                            element i after norm and rotary embedding
    rotary_positions        int32 [num_tokens, 3], optional: positions of each token for the rotary
                            embedding, below max_positions, such as frame, row and column of an
                            image token. Absent: positions in the cache. Masks, caches and
                            query_scale use positions in the cache in any case
    rotary_axes             int32 [rotary_dim / 2], with rotary_positions: the column of it that
                            each pair of elements is rotated by
    bidirectional_ranges    int32 [num_tokens, 2], optional: first position and the one after the
                            last of the range of each token, such as an image, whose tokens see each
                            other; [0, 0]: none. All new tokens of a range are in the same step
    out                     [num_tokens, num_heads * head_dim]; with an `out_scale`, which excludes
                            biases, divided by it and quantized to float8_e4m3fn

`rotary_dim` is the number of leading dimensions of a head that are rotated; 0 without cos and sin.
`scale` 0 means head_dim ** -0.5. `kv_dtype` "" is the dtype of the computation. With
"float8_e4m3fn" the caches hold keys and values rounded to that, saturated at 448, and all queries
see the rounded ones, also of new tokens. With a `window`, key j is visible to query i iff
i - window < j <= i; with a `chunk`, iff j <= i and j / chunk = i / chunk. Of its range, a query
sees the keys after it, too, and with `windowed_ranges` 0 all keys before the window.

Comments below use T new tokens, B sequences, S new tokens of the longest sequence, L positions
filled afterwards in the fullest cache row, D head_dim.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.quantization import rounds_output
from llmc.plugins.roles import Attention, ByHeads, Columns

AXES = 3  # positions of a token in rotary_positions


def check_heads(fields: Fields) -> None:
    """Raise ValueError unless num_heads is a multiple of num_kv_heads."""
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    if min(heads, kv_heads, dim) < 1 or heads % kv_heads:
        raise ValueError(f"num_heads {heads}, num_kv_heads {kv_heads} and head_dim {dim}: expected "
                         f"positive numbers, and a num_heads that is a multiple of num_kv_heads")


def check_rotary(rotary: int, present: frozenset[str]) -> None:
    """Raise ValueError unless cos and sin are inputs if rotary_dim is above 0, and only then."""
    if bool(rotary) != ({"cos", "sin"} <= present) or len({"cos", "sin"} & present) == 1:
        raise ValueError(f"rotary_dim {rotary} needs both cos and sin if above 0, neither if 0")


def _check_axes(present: frozenset[str]) -> None:
    """Raise ValueError unless positions by axis have their axes, and tables."""
    axes = {"rotary_positions", "rotary_axes"} & present
    if axes and not {"rotary_positions", "rotary_axes", "cos"} <= present:
        raise ValueError("rotary_positions and rotary_axes need each other, cos and sin")


def _check_ranges(fields: Fields, present: frozenset[str]) -> None:
    """Raise ValueError if bidirectional ranges are combined with chunks or biases."""
    others = sorted(present & {"distance_bias", "key_bias"})
    others += ["chunk"] if fields["chunk"] else []
    if "bidirectional_ranges" in present and others:
        raise ValueError(f"bidirectional_ranges is not supported with {others[0]}")


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    check_heads(fields)
    _check_axes(present)
    _check_ranges(fields, present)
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    rotary, paged = fields["rotary_dim"], "block_table" in present
    if {"cos", "sin"} <= present:
        if not 0 < rotary <= dim or rotary % 2:
            raise ValueError(f"rotary_dim {rotary} is not an even number from 2 to head_dim {dim}")
    else:
        check_rotary(rotary, present)
    cache = ("blocks", kv_heads, "block_size", dim) if paged else \
        ("batch", kv_heads, "max_seq_len", dim)
    positions = "positions" if paged else ">= max_seq_len"
    table = (positions, rotary // 2)
    return {"qkv": ("num_tokens", (heads + 2 * kv_heads) * dim),
            "key_cache": cache, "value_cache": cache,
            "cu_seqlens": ("batch_plus_1",), "past_lens": ("batch",), "cos": table, "sin": table,
            "q_norm": (dim,), "k_norm": (dim,), "v_norm": (dim,),
            "block_table": ("batch", "blocks_of_a_sequence"),
            "distance_bias": (heads, "distances"), "sinks": (heads,),
            "key_bias": (heads, positions), "query_scale": (positions,),
            "rotary_positions": ("num_tokens", AXES), "rotary_axes": (rotary // 2,),
            "bidirectional_ranges": ("num_tokens", 2)}


def _scale(fields: Fields) -> float:
    return float(fields["scale"] or fields["head_dim"] ** -0.5)


def _ints(name: str, *values: int) -> str:
    return f"{name} = Constant<value_ints=[{', '.join(map(str, values))}]>()"


# Lengths of sequences.
_LENGTHS = [
    _ints("c0", 0), _ints("c1", 1), _ints("last", -1), _ints("int_max", 2**31 - 1),
    "zero = Constant<value_int=0>()",
    "one = Constant<value_int=1>()",
    "cu = Cast<to=7>(cu_seqlens)",
    "starts = Slice(cu, c0, last)",
    "ends = Slice(cu, c1, int_max)",
    "lengths = Sub(ends, starts)",
    "longest = ReduceMax<keepdims=0>(lengths)",
]


def _places(own: str = "") -> list[str]:
    """Return lines for the sequence and position of each token, and its place in padded rows.

    Args:
        own: suffix of constants, in a branch of If. ONNX Runtime would not merge constants that
            branches of several layers read, nor nodes that read them.
    """
    zero, one, c1 = f"zero{own}", f"one{own}", f"c1{own}"
    constants = [f"{zero} = Constant<value_int=0>()", f"{one} = Constant<value_int=1>()",
                 _ints(c1, 1)] if own else []
    return [
        *constants,
        "minus_one = Constant<value_int=-1>()",
        f"starts_column = Unsqueeze(starts, {c1})",
        "num_tokens = Gather(cu, minus_one)",
        f"token = Range({zero}, num_tokens, {one})",
        f"token_column = Unsqueeze(token, {c1})",
        "ended = GreaterOrEqual(token_column, ends)",
        "ended_int = Cast<to=7>(ended)",
        f"sequence = ReduceSum<keepdims=0>(ended_int, {c1})",  # [T]
        "start = Gather(starts, sequence)",
        "offset = Sub(token, start)",  # [T]
        f"step = Range({zero}, longest, {one})",
        "beyond = Add(starts_column, step)",
        f"final = Sub(num_tokens, {one})",
        "pad = Min(beyond, final)",  # [B, S]: the token at each padded position; padding: arbitrary
        "first_place = Mul(sequence, longest)",
        "place = Add(first_place, offset)",  # [T]: each token's position in the padded [B * S]
    ]


# They do not depend on the layer: ONNX Runtime computes them once for all layers of a graph.
_TOKENS = "\n".join([*_LENGTHS, *_places()])

_PAST = "past = Cast<to=7>(past_lens)"

_POSITIONS = "\n".join([
    "past_of_token = Gather(past, sequence)",
    "position = Add(past_of_token, offset)",  # [T], in the cache
    "position_column = Unsqueeze(position, c1)",
])


def _heads(fields: Fields, present: frozenset[str], rotate: bool) -> \
        tuple[list[str], str, str, str]:
    """Return lines that split qkv into heads [T, heads, 1, D], and the names of q, k and v.

    Heads are normalized and rotated. The axis of size 1 is the sequence axis of RotaryEmbedding.
    """
    heads, kv_heads = fields["num_heads"], fields["num_kv_heads"]
    lines = [_ints("heads_shape", 0, heads + 2 * kv_heads, 1, fields["head_dim"]),
             "heads = Reshape(qkv, heads_shape)",
             _ints("kinds", heads, kv_heads, kv_heads),
             "q, k, v = Split<axis=1>(heads, kinds)",
             *(_ROWS_BY_AXIS if rotate and "rotary_positions" in present else ())]
    made = [_prepared("q", heads, fields, present, rotate),
            _prepared("k", kv_heads, fields, present, rotate),
            _prepared("v", kv_heads, fields, present, False)]
    lines += (line for own, _ in made for line in own)
    return lines, made[0][1], made[1][1], made[2][1]


# Rows [T, 1, rotary_dim / 2] of the tables by `rotary_positions`. They do not depend on the layer.
_ROWS_BY_AXIS = (
    _ints("axis_of_row", 1),
    "by_axis = Gather<axis=1>(rotary_positions, rotary_axes)",
    "by_axis_index = Cast<to=7>(by_axis)",
    *(line for name in ("cos", "sin") for line in (
        f"{name}_by_axis = GatherElements<axis=0>({name}, by_axis_index)",
        f"{name}_rows = Unsqueeze({name}_by_axis, axis_of_row)")))


def _prepared(name: str, count: int, fields: Fields, present: frozenset[str], rotate: bool) -> \
        tuple[list[str], str]:
    """Return lines that normalize, rotate and scale `name`, [T, count, 1, D], and the result."""
    lines, made = [], name
    tables = "cos_rows, sin_rows" if "rotary_positions" in present else "cos, sin, position_column"
    for step in ("rotated", "normed") if fields["norm_after_rotary"] else ("normed", "rotated"):
        if step == "normed" and f"{name}_norm" in present:
            lines.append(f"{made}_normed = RMSNormalization<axis=-1, "
                         f"epsilon={fields['norm_epsilon']!r}>({made}, {name}_norm)")
            made = f"{made}_normed"
        if step == "rotated" and rotate:
            lines.append(f"{made}_rotated = RotaryEmbedding<interleaved={fields['interleaved']}, "
                         f"num_heads={count}, rotary_embedding_dim={fields['rotary_dim']}>"
                         f"({made}, {tables})")
            made = f"{made}_rotated"
    if name == "q" and "query_scale" in present:
        lines += ["factor_of_token = Gather(query_scale, position)", _ints("behind_token", 1, 2, 3),
                  "factor = Unsqueeze(factor_of_token, behind_token)",
                  f"{made}_scaled = Mul({made}, factor)"]
        made = f"{made}_scaled"
    return lines, made


# Block of a token's position, and row in it.
_PAGES = [
    "table = Cast<to=7>(block_table)",
    "block_size = Shape<start=2, end=3>(key_cache)",
    "place_in_table = Div(position, block_size)",
    "row = Mod(position, block_size)",
    "sequence_in_table = Unsqueeze(sequence, c1)",
    "column_in_table = Unsqueeze(place_in_table, c1)",
    "entry = Concat<axis=1>(sequence_in_table, column_in_table)",
    "block = GatherND(table, entry)",
]


def _wide(cache: str, fields: Fields) -> str:
    """Name of a cache in the dtype of the computation."""
    return f"{cache}_wide" if fields["kv_dtype"] else cache


def _append(name: str, new: str, fields: Fields, as_bytes: bool) -> list[str]:
    """Return lines that write a cache, and convert it to `_wide`."""
    if not fields["kv_dtype"]:
        return [f"{name}_cache_out = ScatterND({name}_cache, index, {new})"]
    if as_bytes:
        return [f"{name}_narrow = Cast<to=17>({new})",
                f"{name}_rounded = Cast<to=1>({name}_narrow)",
                f"{name}_column = Unsqueeze({name}_rounded, last)",
                f"{name}_is = Equal({name}_column, float8s)", f"{name}_one = Cast<to=6>({name}_is)",
                f"{name}_place = ArgMax<axis=-1, keepdims=0, select_last_index=1>({name}_one)",
                f"{name}_byte = Sub({name}_place, c128)",
                f"{name}_bytes = Cast<to=3>({name}_byte)",
                f"{name}_cache_out = ScatterND({name}_cache, index, {name}_bytes)",
                f"{name}_wide_byte = Cast<to=7>({name}_cache_out)",
                f"{name}_wide_place = Add({name}_wide_byte, c128)",
                f"{name}_cache_out_wide = Gather(float8s, {name}_wide_place)"]
    return [f"{name}_cache_wide = Cast<to=1>({name}_cache)",
            f"{name}_narrow = Cast<to=17>({new})", f"{name}_rounded = Cast<to=1>({name}_narrow)",
            f"{name}_cache_out_wide = ScatterND({name}_cache_wide, index, {name}_rounded)",
            f"{name}_cache_out = Cast<to=17>({name}_cache_out_wide)"]


def _filled(name: str, present: frozenset[str], fields: Fields) -> list[str]:
    """Return lines for the filled positions of the cache, [B, kv_heads, L, D]."""
    cache, lines = _wide(f"{name}_cache_out", fields), []
    if "block_table" in present:
        lines = [f"{name}_pages = Gather<axis=0>({cache}, table)",
                 f"{name}_heads = Transpose<perm=[0, 2, 1, 3, 4]>({name}_pages)",
                 _ints(f"{name}_shape", 0, 0, -1, fields["head_dim"]),
                 f"{name}_rows = Reshape({name}_heads, {name}_shape)"]
        cache = f"{name}_rows"
    return [*lines, f"{name}s = Slice({cache}, c0, fullest, c2)"]


def _float8s() -> str:
    """Every float8_e4m3fn value by its byte, from -128 to 127; 512 for the two NaNs."""
    import ml_dtypes
    values = np.arange(-128, 128).astype(np.int8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return ", ".join(map(repr, np.nan_to_num(values, nan=512).tolist()))


def _tensorrt(fields: Fields, present: frozenset[str]) -> str | None:
    """Use int8 for FP8 caches, since a plan has no FP8."""
    return _body(fields, present, as_bytes=True) if fields["kv_dtype"] else None


def _body(fields: Fields, present: frozenset[str], as_bytes: bool = False) -> str:
    split, q, k, v = _heads(fields, present, rotate="cos" in present)
    return "\n".join([_TOKENS, _PAST, _POSITIONS, *split,
                      *_appended(k, v, fields, present, as_bytes), *_attend(q, fields, present)])


def _appended(k: str, v: str, fields: Fields, present: frozenset[str],
              as_bytes: bool = False) -> list[str]:
    """Return lines that append prepared keys and values to the caches.

    Indices are [T, kv_heads, 1, (sequence, head, position)].
    """
    kv_heads, paged = fields["num_kv_heads"], "block_table" in present
    return [
        _ints("c12", 1, 2), _ints("c123", 1, 2, 3),
        "token_shape = Shape(token)",
        _ints("head_shape", kv_heads, 1, 1),
        "grid = Concat<axis=0>(token_shape, head_shape)",
        *(_PAGES if paged else []),
        f"sequence_corner = Unsqueeze({'block' if paged else 'sequence'}, c123)",
        "sequence_index = Expand(sequence_corner, grid)",
        _ints("head", *range(kv_heads)),
        "head_corner = Unsqueeze(head, c12)",
        "head_index = Expand(head_corner, grid)",
        f"position_corner = Unsqueeze({'row' if paged else 'position'}, c123)",
        "position_index = Expand(position_corner, grid)",
        "index = Concat<axis=-1>(sequence_index, head_index, position_index)",
        *([_ints("c128", 128), f"float8s = Constant<value_floats=[{_float8s()}]>()"]
          if as_bytes else []),
        *_append("key", k, fields, as_bytes), *_append("value", v, fields, as_bytes),
    ]


def _attend(q: str, fields: Fields, present: frozenset[str]) -> list[str]:
    """Return lines for `out` from prepared queries and the caches.

    `key_cache_out` and `value_cache_out` include the new tokens.
    """
    return [
        # Keys and values up to the fullest row: [B, kv_heads, 1, D, L], [.., 1, L, D].
        _ints("c2", 2),
        "filled = Add(past, lengths)",
        "fullest = ReduceMax<keepdims=1>(filled)",
        *(line for name in ("key", "value") for line in _filled(name, present, fields)),
        "keys_t = Transpose<perm=[0, 1, 3, 2]>(keys)",
        "keys_grouped = Unsqueeze(keys_t, c2)",
        "values_grouped = Unsqueeze(values, c2)",
        # Scores [B, kv_heads, heads / kv_heads, S, L].
        *_queries(q, fields),
        "products = MatMul(queries, keys_grouped)",
        # The positions visible to a query at [B, S].
        "fullest_scalar = Squeeze(fullest)",
        "j = Range(zero, fullest_scalar, one)",
        "past_column = Unsqueeze(past, c1)",
        "padded_position = Add(past_column, step)",
        *(["padded_ranges = Gather<axis=0>(bidirectional_ranges, pad)"]
          if "bidirectional_ranges" in present else []),
        *_weights(fields, present, "padded_position"), *_out(fields),
    ]


def _queries(packed: str, fields: Fields) -> list[str]:
    """Return lines for `queries` by sequence, [B, kv_heads, heads / kv_heads, S, D]."""
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    return [f"padded = Gather<axis=0>({packed}, pad)",
            _ints("group_shape", 0, 0, kv_heads, heads // kv_heads, dim),
            "grouped = Reshape(padded, group_shape)",
            "queries = Transpose<perm=[0, 2, 3, 1, 4]>(grouped)"]


def _out(fields: Fields) -> list[str]:
    """Return lines for `out`, packed, from the attention weights."""
    return ["attended = MatMul(weights, values_grouped)",
            "by_token = Transpose<perm=[0, 3, 1, 2, 4]>(attended)",
            _ints("rows_shape", -1, fields["num_heads"] * fields["head_dim"]),
            "rows = Reshape(by_token, rows_shape)", "out = Gather<axis=0>(rows, place)"]


def _weights(fields: Fields, present: frozenset[str], position: str,
             ranges: str = "padded_ranges") -> list[str]:
    """Return lines from scores to attention weights, with masks for `position`, [B, S].

    `ranges`, [B, S, 2], are bidirectional ranges.
    """
    lines = [f"scale = Constant<value_float={float(_scale(fields))!r}>()",
             "scaled = Mul(products, scale)"]
    scores, visible = "scaled", "causal"
    if fields["softcap"]:
        lines += [f"cap = Constant<value_float={fields['softcap']!r}>()",
                  "shrunk = Div(scaled, cap)", "bounded = Tanh(shrunk)",
                  "capped = Mul(bounded, cap)"]
        scores = "capped"
    lines += [f"i = Unsqueeze({position}, c2)", "causal = LessOrEqual(j, i)"]
    ranged = "bidirectional_ranges" in present
    if ranged:  # [B, S, L]: whether a key is in the query's range
        lines += [*_in_range(ranges), "causal_or_ranged = Or(causal, in_range)"]
        visible = "causal_or_ranged"
    if "distance_bias" in present:
        lines += [*_distance_bias(fields), f"biased = Add({scores}, bias)"]
        scores = "biased"
    if "key_bias" in present:
        lines += ["bias_by_key = Gather<axis=1>(key_bias, j)",
                  _ints("key_bias_shape", 1, fields["num_kv_heads"],
                        fields["num_heads"] // fields["num_kv_heads"], 1, -1),
                  "key_bias_by_head = Reshape(bias_by_key, key_bias_shape)",
                  f"biased_by_key = Add({scores}, key_bias_by_head)"]
        scores = "biased_by_key"
    if fields["window"]:
        lines += [f"window = Constant<value_int={fields['window']}>()",
                  "edge = Sub(i, window)", "recent = Greater(j, edge)",
                  f"visible_recent = And({visible}, recent)"]
        visible = "visible_recent"
        if ranged and not fields["windowed_ranges"]:
            lines += ["recent_or_ranged = Or(visible_recent, in_range)"]
            visible = "recent_or_ranged"
    if fields["chunk"]:
        lines += [*_chunk_start(fields, "i"), "in_chunk = GreaterOrEqual(j, chunk_start)",
                  f"visible_in_chunk = And({visible}, in_chunk)"]
        visible = "visible_in_chunk"
    return [*lines, f"visible = Unsqueeze({visible}, c12)",
            "never = Constant<value_float=-1e30>()",
            f"masked = Where(visible, {scores}, never)",
            *(_with_sinks(fields) if "sinks" in present else
              ["weights = Softmax<axis=-1>(masked)"])]


def _in_range(ranges: str) -> list[str]:
    """Return lines for `in_range` of positions j, [L], and ranges [..., 2]: [..., L]."""
    return [f"ranges = Cast<to=7>({ranges})",
            "range_start, range_end = Split<axis=-1, num_outputs=2>(ranges)",
            "after_start = GreaterOrEqual(j, range_start)", "before_end = Less(j, range_end)",
            "in_range = And(after_start, before_end)"]


def _chunk_start(fields: Fields, position: str) -> list[str]:
    """Return lines for `chunk_start`, the first position of the chunk of each `position`."""
    return [f"chunk = Constant<value_int={fields['chunk']}>()",
            f"place_in_chunk = Mod({position}, chunk)",
            f"chunk_start = Sub({position}, place_in_chunk)"]


def _with_sinks(fields: Fields) -> list[str]:
    """Return lines for `weights` from `masked` scores and sinks.

    `masked` is [B, kv_heads, heads / kv_heads, S, L]. Each row gets one more score, whose weight is
    dropped.
    """
    kv_heads = fields["num_kv_heads"]
    return [_ints("sinks_shape", 1, kv_heads, fields["num_heads"] // kv_heads, 1, 1),
            "sinks_by_head = Reshape(sinks, sinks_shape)",
            "rows_of_scores = Shape<end=4>(masked)", _ints("one_column", 1),
            "sink_grid = Concat<axis=0>(rows_of_scores, one_column)",
            "sink_column = Expand(sinks_by_head, sink_grid)",
            "with_sink = Concat<axis=-1>(sink_column, masked)",
            "all_weights = Softmax<axis=-1>(with_sink)",
            _ints("score_axis", -1), _ints("behind_all", 2**31 - 1),
            "weights = Slice(all_weights, one_column, behind_all, score_axis)"]


def _distance_bias(fields: Fields) -> list[str]:
    """Return lines for `bias` of queries i, [B, S, 1], and positions j, [L].

    It is [B, kv_heads, heads / kv_heads, S, L].
    """
    return ["ahead = Sub(i, j)", "distance = Max(ahead, zero)",
            "distances = Shape<start=1, end=2>(distance_bias)",
            "farthest = Sub(distances, c1)", "column = Min(distance, farthest)",  # [B, S, L]
            "bias_by_head = Gather<axis=1>(distance_bias, column)",
            "bias_by_sequence = Transpose<perm=[1, 0, 2, 3]>(bias_by_head)",
            _ints("bias_kv_heads", fields["num_kv_heads"]),
            _ints("bias_group", fields["num_heads"] // fields["num_kv_heads"]),
            "bias_dims = Shape<start=2>(bias_by_sequence)",
            "bias_batch = Shape<end=1>(bias_by_sequence)",
            "bias_shape = Concat<axis=0>(bias_batch, bias_kv_heads, bias_group, bias_dims)",
            "bias = Reshape(bias_by_sequence, bias_shape)"]


def _uniform(fields: Fields, present: frozenset[str]) -> str | None:
    """Assume S new tokens per sequence, for engines whose shapes may not depend on data.

    num_tokens is batch * S. Padding tokens are written to the cache after the sequence's end.
    """
    if present & {"block_table", "bidirectional_ranges"} or fields["kv_dtype"]:
        return None
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    split, q, k, v = _heads(fields, present, rotate="cos" in present)
    lines = [
        _ints("c1", 1), _ints("c2", 2), _ints("c12", 1, 2), _ints("flat", -1),
        "zero = Constant<value_int=0>()", "one = Constant<value_int=1>()",
        "past = Cast<to=7>(past_lens)",
        "batch = Shape(past_lens)", "tokens = Shape<start=0, end=1>(qkv)",
        "new = Div(tokens, batch)", "new_scalar = Squeeze(new)",
        "step = Range(zero, new_scalar, one)",
        "past_column = Unsqueeze(past, c1)", "places = Add(past_column, step)",  # [B, S]
        "position = Reshape(places, flat)", "position_column = Unsqueeze(position, c1)",
        *split,
    ]
    for name, source, count in (("key", k, kv_heads), ("value", v, kv_heads)):
        lines += [_ints(f"{name}_tail", count, dim),
                  f"{name}_shape = Concat<axis=0>(batch, new, {name}_tail)",
                  f"{name}_rows = Reshape({source}, {name}_shape)",
                  f"{name}_new = Transpose<perm=[0, 2, 1, 3]>({name}_rows)",
                  f"{name}_cache_out = TensorScatter<axis=2, mode=\"linear\">"
                  f"({name}_cache, {name}_new, past)",
                  f"{name}s_grouped = Unsqueeze({name}_cache_out, c2)"]
    lines += [
        _ints("query_tail", kv_heads, heads // kv_heads, dim),
        "query_shape = Concat<axis=0>(batch, new, query_tail)",
        f"query_rows = Reshape({q}, query_shape)",
        "queries = Transpose<perm=[0, 2, 3, 1, 4]>(query_rows)",
        "keys_t = Transpose<perm=[0, 1, 2, 4, 3]>(keys_grouped)",
        "products = MatMul(queries, keys_t)",
        "room = Shape<start=2, end=3>(key_cache)", "room_scalar = Squeeze(room)",
        "j = Range(zero, room_scalar, one)",
        *_weights(fields, present, "places"),
        "attended = MatMul(weights, values_grouped)",
        "by_token = Transpose<perm=[0, 3, 1, 2, 4]>(attended)",
        _ints("rows_shape", -1, heads * dim),
        "out = Reshape(by_token, rows_shape)",
    ]
    return "\n".join(lines)


def _uniform_lengths(inputs: Mapping[str, np.ndarray]) -> bool:
    lengths = np.diff(inputs["cu_seqlens"])
    return bool(lengths.min() == lengths.max() and lengths.min() > 0)


def _cpu(fields: Fields, present: frozenset[str]) -> str | None:
    """Use com.microsoft.GroupQueryAttention on [B, S, ...] padded on the right.

    Every sequence is treated as having S new tokens. Padding tokens are written to the cache after
    the sequence's end, and overwritten later. The kernel takes heads of a multiple of 8, rotates
    only multiples of 16 by positions in the cache, and has no per-head norms; the rest is computed
    before it. Chunks are a bias. Queries with a bidirectional range are computed again after it,
    see `_ranged`. `_group_query_lengths` has the supported lengths.
    """
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    if dim % 8 or fields["kv_dtype"] or present & {"block_table", "distance_bias", "key_bias"}:
        return None
    normed = bool(present & {"q_norm", "k_norm", "v_norm"})
    kernel_rotates = "cos" in present and dim % 16 == 0 and fields["rotary_dim"] % 16 == 0 \
        and not (normed and fields["norm_after_rotary"]) and "rotary_positions" not in present
    rotate = "cos" in present and not kernel_rotates
    scaled, ranged = "query_scale" in present, "bidirectional_ranges" in present
    lines, qkv = [_TOKENS, _PAST, *([_POSITIONS] if rotate or scaled or ranged else [])], "qkv"
    if rotate or normed or scaled:
        split, q, k, v = _heads(fields, present, rotate)
        lines += [*split,
                  f"joined = Concat<axis=1>({q}, {k}, {v})",
                  _ints("packed_shape", 0, (heads + 2 * kv_heads) * dim),
                  "prepared = Reshape(joined, packed_shape)"]
        qkv = "prepared"
    given = ["padded", "", "", "key_cache", "value_cache", "seqlens_k", "total",
             *(["cos", "sin"] if kernel_rotates else ["", ""]), "",
             "chunk_bias" if fields["chunk"] else "", "sinks" if "sinks" in present else ""]
    while not given[-1]:
        given.pop()
    return "\n".join([
        *lines,
        f"padded = Gather<axis=0>({qkv}, pad)",
        "extra = Sub(longest, one)",
        "final_position = Add(past, extra)",
        "seqlens_k = Cast<to=6>(final_position)",
        "oldest = ReduceMax<keepdims=0>(past)",
        "total_length = Add(oldest, longest)",
        "total = Cast<to=6>(total_length)",
        *(_chunk_bias(fields) if fields["chunk"] else []),
        "attended, key_cache_out, value_cache_out = com.microsoft.GroupQueryAttention"
        f"<num_heads={heads}, kv_num_heads={kv_heads}, scale={float(_scale(fields))!r}, "
        f"softcap={fields['softcap']!r}, do_rotary={int(kernel_rotates)}, "
        f"rotary_interleaved={fields['interleaved']}, "
        f"local_window_size={fields['window'] or -1}>({', '.join(given)})",
        _ints("rows_shape", -1, heads * dim),
        "rows = Reshape(attended, rows_shape)",
        *(_ranged(qkv, kernel_rotates, fields, present) if ranged else
          ["out = Gather<axis=0>(rows, place)"]),
    ])


def _ranged(qkv: str, rotate: bool, fields: Fields, present: frozenset[str]) -> list[str]:
    """Return lines for `out` from `rows`, causal attention of one sequence, and its caches.

    The R queries with a range are computed again. Without any, no key is read.

    Args:
        qkv: name of packed rows.
        rotate: whether their queries are not yet rotated.
    """
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    query, rotated = "ranged_heads", list[str]()
    if rotate:
        query = "ranged_rotated"
        rotated = ["ranged_column = Unsqueeze(ranged_position, c1)",
                   f"ranged_rotated = RotaryEmbedding<interleaved={fields['interleaved']}, "
                   f"num_heads={heads}, rotary_embedding_dim={fields['rotary_dim']}>"
                   f"(ranged_heads, cos, sin, ranged_column)"]
    return [
        _ints("c2", 2), _ints("c12", 1, 2),
        "causal_out = Gather<axis=0>(rows, place)",
        "range_ends = Gather<axis=1>(bidirectional_ranges, one)",
        "zero32 = Cast<to=6>(zero)", "has_range = Greater(range_ends, zero32)",
        "ranged_row = NonZero(has_range)",  # [1, R]
        "ranged_token = Squeeze(ranged_row, c0)",
        "ranged_rows = Gather<axis=0>(bidirectional_ranges, ranged_row)",  # [1, R, 2]
        "ranged_positions = Gather(position, ranged_row)",  # [1, R]
        "ranged_position = Gather(position, ranged_token)",
        f"ranged_qkv = Gather<axis=0>({qkv}, ranged_token)",
        _ints("query_columns", heads * dim),
        "ranged_query = Slice(ranged_qkv, c0, query_columns, c1)",
        _ints("ranged_shape", 0, heads, 1, dim),
        "ranged_heads = Reshape(ranged_query, ranged_shape)", *rotated,
        _ints("ranged_groups", 1, -1, kv_heads, heads // kv_heads, dim),
        f"ranged_grouped = Reshape({query}, ranged_groups)",
        "queries = Transpose<perm=[0, 2, 3, 1, 4]>(ranged_grouped)",
        # Keys up to the last position: [B, kv_heads, 1, D, L]. L is 0 without ranges; with them B
        # must be 1, or the rows are too many for ScatterND.
        "num_ranged = Shape(ranged_token)", "any_ranged = Min(num_ranged, c1)",
        "filled = Mul(total_length, any_ranged)",
        "keys = Slice(key_cache_out, c0, filled, c2)",
        "values = Slice(value_cache_out, c0, filled, c2)",
        "keys_t = Transpose<perm=[0, 1, 3, 2]>(keys)",
        "keys_grouped = Unsqueeze(keys_t, c2)", "values_grouped = Unsqueeze(values, c2)",
        "products = MatMul(queries, keys_grouped)",
        "filled_scalar = Squeeze(filled)", "j = Range(zero, filled_scalar, one)",
        *_weights(fields, present, "ranged_positions", "ranged_rows"),
        "ranged_attended = MatMul(weights, values_grouped)",
        "ranged_by_token = Transpose<perm=[0, 3, 1, 2, 4]>(ranged_attended)",
        "ranged_out = Reshape(ranged_by_token, rows_shape)",
        "ranged_index = Unsqueeze(ranged_token, c1)",
        "out = ScatterND(causal_out, ranged_index, ranged_out)",
    ]


def held_scores(fields: Fields) -> int:
    """Of bodies like `_attend`: products, masked scores and weights are there at once."""
    return 3 * int(fields["num_heads"])


def _cpu_held_scores(fields: Fields, present: frozenset[str]) -> int:
    """GroupQueryAttention has a tiled kernel, but not with softcap or sinks."""
    if _cpu(fields, present) is None or "bidirectional_ranges" in present:
        return held_scores(fields)
    return int(fields["num_heads"]) if fields["softcap"] or "sinks" in present else 0


def _chunk_bias(fields: Fields) -> list[str]:
    """Return lines for `chunk_bias` [B, 1, S, L], which masks positions before a query's chunk."""
    return [_ints("c2", 2), "past_column = Unsqueeze(past, c1)",
            "padded_position = Add(past_column, step)", "i = Unsqueeze(padded_position, c2)",
            *_chunk_start(fields, "i"),
            "j = Range(zero, total_length, one)", "before_chunk = Less(j, chunk_start)",
            "never = Constant<value_float=-1e30>()", "nothing = Constant<value_float=0.0>()",
            "hidden = Where(before_chunk, never, nothing)", "chunk_bias = Unsqueeze(hidden, c1)"]


def _group_query_lengths(inputs: Mapping[str, np.ndarray]) -> bool:
    """Only prompts from the start, one sequence, or one token each: others are refused.

    Bidirectional ranges are supported in one sequence.
    """
    if len(inputs["past_lens"]) > 1 and np.any(inputs.get("bidirectional_ranges", 0)):
        return False
    return not np.any(inputs["past_lens"]) or len(inputs["past_lens"]) == 1 \
        or np.diff(inputs["cu_seqlens"]).max() == 1


def _cached(x: np.ndarray, kv_dtype: str) -> np.ndarray:
    """x as the cache stores it, in x's dtype."""
    if not kv_dtype:
        return x
    import ml_dtypes
    return np.asarray(np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(x.dtype))


def rotated(x: np.ndarray, position: int | np.ndarray, fields: Fields,
            inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """x [..., head_dim] rotated by cos and sin of a position, if there are any.

    The position may be one for each pair of elements, [rotary_dim / 2].
    """
    if "cos" not in inputs:
        return x
    cos, sin = (inputs[name][position, np.arange(inputs[name].shape[1])] for name in ("cos", "sin"))
    first = np.arange(len(cos)) * (2 if fields["interleaved"] else 1)
    second = first + (1 if fields["interleaved"] else len(cos))
    result = x.copy()
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    qkv = inputs["qkv"].astype(np.float64)
    keys, values = (inputs[name].astype(np.float64) for name in ("key_cache", "value_cache"))
    out = np.zeros((len(qkv), heads * dim))
    block_size = keys.shape[2]
    table = inputs.get("block_table", np.arange(len(keys))[:, None])

    def prepare(x: np.ndarray, norm: str, token: int, position: int) -> np.ndarray:
        place = inputs["rotary_positions"][token, inputs["rotary_axes"]] \
            if "rotary_positions" in inputs else position
        if fields["norm_after_rotary"]:
            return normed(rotated(x, place, fields, inputs), norm)
        return rotated(normed(x, norm), place, fields, inputs)

    def normed(x: np.ndarray, norm: str) -> np.ndarray:
        if norm in inputs:
            x = x / np.sqrt((x**2).mean() + fields["norm_epsilon"]) * inputs[norm]
        return x

    for b, past in enumerate(inputs["past_lens"]):
        for token in range(inputs["cu_seqlens"][b], inputs["cu_seqlens"][b + 1]):
            position = int(past) + token - int(inputs["cu_seqlens"][b])
            row = qkv[token].reshape(-1, dim)
            block, place = table[b, position // block_size], position % block_size
            for h in range(kv_heads):
                keys[block, h, place] = _cached(
                    prepare(row[heads + h], "k_norm", token, position), fields["kv_dtype"])
                values[block, h, place] = _cached(normed(row[heads + kv_heads + h], "v_norm"),
                                                  fields["kv_dtype"])
        for token in range(inputs["cu_seqlens"][b], inputs["cu_seqlens"][b + 1]):
            position = int(past) + token - int(inputs["cu_seqlens"][b])
            row = qkv[token].reshape(-1, dim)
            first = max(0, position + 1 - fields["window"]) if fields["window"] else 0
            if fields["chunk"]:
                first = max(first, position // fields["chunk"] * fields["chunk"])
            start, stop = inputs["bidirectional_ranges"][token] \
                if "bidirectional_ranges" in inputs else (0, 0)
            if stop and not fields["windowed_ranges"]:
                first = min(first, start)
            seen = np.arange(first, max(position + 1, stop))
            blocks, places = table[b, seen // block_size], seen % block_size
            for h in range(heads):
                kv = h // (heads // kv_heads)
                scores = keys[blocks, kv, places] @ prepare(row[h], "q_norm", token, position)
                scores = scores * _scale(fields)
                if "query_scale" in inputs:
                    scores = scores * inputs["query_scale"][position]
                if fields["softcap"]:
                    scores = np.tanh(scores / fields["softcap"]) * fields["softcap"]
                if "distance_bias" in inputs:
                    farthest = inputs["distance_bias"].shape[1] - 1
                    scores = scores + inputs["distance_bias"][
                        h, np.minimum(position - seen, farthest)]
                if "key_bias" in inputs:
                    scores = scores + inputs["key_bias"][h, seen]
                sink = inputs["sinks"][h] if "sinks" in inputs else -np.inf
                highest = max(scores.max(), sink)
                weights = np.exp(scores - highest)
                out[token, h * dim:(h + 1) * dim] = \
                    weights / (weights.sum() + np.exp(sink - highest)) @ values[blocks, kv, places]
    return [out, keys, values]


def _samples(rng: np.random.Generator) -> list[Sample]:
    """Prompts, continued prompts, decoding and mixed batches, with unequal and no new tokens."""
    prompts = {"new": (5, 2, 3), "past": (0, 0, 0)}
    decode = {"new": (1, 1, 1), "past": (11, 3, 0)}
    chunk = {"new": (6,), "past": (4,)}
    mixed = {"new": (4, 1, 0, 2), "past": (0, 9, 5, 3)}
    float8 = {"kv_dtype": "float8_e4m3fn"}
    return [_sample(rng, **variant) for variant in (
        prompts | {"dim": 16, "rotary_dim": 16},
        decode | {"dim": 16, "rotary_dim": 16},
        chunk | {"dim": 16, "rotary_dim": 16},
        mixed | {"dim": 16, "rotary_dim": 16},
        prompts | {"dim": 32, "rotary_dim": 16, "interleaved": 1, "softcap": 3.0},
        decode | {"dim": 32, "rotary_dim": 16, "interleaved": 1, "window": 4},
        chunk | {"dim": 24, "rotary_dim": 24, "heads": 3, "kv_heads": 1, "scale": 0.3},
        mixed | {"dim": 24, "rotary_dim": 8, "heads": 4, "kv_heads": 4, "interleaved": 1},
        prompts | {"dim": 16, "rotary_dim": 16, "norms": "qk", "norm_epsilon": 0.5},
        decode | {"dim": 32, "rotary_dim": 20, "norms": "qk", "heads": 8},
        chunk | {"dim": 8, "norms": "q", "window": 5, "softcap": 2.0},
        mixed | {"dim": 16, "norms": "k", "window": 3, "softcap": 2.0},
        prompts | {"dim": 6, "rotary_dim": 4, "window": 2},
        decode | {"dim": 6, "rotary_dim": 6, "interleaved": 1, "norms": "qk"},
        mixed | {"dim": 6, "scale": 0.3},
        prompts | {"dim": 16, "rotary_dim": 16, "block_size": 4},
        decode | {"dim": 32, "window": 4, "block_size": 2},
        mixed | {"dim": 16, "norms": "qk", "block_size": 4},
        {"new": (1,) * 4, "past": (9, 9, 9, 3)} | {"dim": 16, "rotary_dim": 16, "block_size": 8},
        decode | {"dim": 6, "norms": "qk", "window": 4, "block_size": 4},
        mixed | {"dim": 24, "rotary_dim": 8, "softcap": 2.0, "block_size": 16},
        prompts | {"dim": 16, "biased": 16},
        decode | {"dim": 8, "biased": 4, "block_size": 2},
        mixed | {"dim": 16, "rotary_dim": 16, "softcap": 2.0, "window": 5, "biased": 3},
        prompts | {"dim": 16, "rotary_dim": 16, **float8},
        decode | {"dim": 32, "norms": "qk", "window": 4, **float8},
        mixed | {"dim": 24, "rotary_dim": 8, "block_size": 8, **float8},
        chunk | {"dim": 16, "block_size": 4, "biased": 3, **float8},
        prompts | {"dim": 16, "rotary_dim": 16, "sinks": True},
        decode | {"dim": 32, "rotary_dim": 32, "window": 4, "sinks": True},
        mixed | {"dim": 24, "rotary_dim": 8, "sinks": True, "block_size": 4},
        chunk | {"dim": 6, "sinks": True},
        decode | {"dim": 16, "rotary_dim": 16, "norms": "qk", "norm_after_rotary": 1},
        mixed | {"dim": 6, "rotary_dim": 4, "norms": "qk", "norm_after_rotary": 1},
        prompts | {"dim": 16, "rotary_dim": 16, "norms": "qkv"},
        mixed | {"dim": 6, "norms": "v", "norm_after_rotary": 1, "block_size": 4},
        decode | {"dim": 16, "by_key": True},
        mixed | {"dim": 6, "by_key": True, "biased": 3, "block_size": 4},
        prompts | {"dim": 16, "rotary_dim": 16, "chunk": 2},
        decode | {"dim": 16, "rotary_dim": 16, "norms": "qk", "norm_after_rotary": 1, "chunk": 4},
        chunk | {"dim": 8, "chunk": 3, "sinks": True, "scaled": True},
        mixed | {"dim": 6, "rotary_dim": 4, "chunk": 4, "window": 3, "block_size": 4},
        prompts | {"dim": 16, "norms": "qk", "scaled": True},
        decode | {"dim": 32, "rotary_dim": 16, "scaled": True, "softcap": 2.0},
        mixed | {"dim": 24, "rotary_dim": 8, "scaled": True, "block_size": 8},
        prompts | {"dim": 16, "rotary_dim": 16, "by_axis": True},
        decode | {"dim": 32, "rotary_dim": 12, "norms": "qk", "by_axis": True, "scaled": True},
        chunk | {"dim": 16, "rotary_dim": 16, "by_axis": True, "norms": "qk",
                 "norm_after_rotary": 1},
        mixed | {"dim": 24, "rotary_dim": 8, "by_axis": True, "interleaved": 1, "block_size": 8},
        chunk | {"dim": 16, "rotary_dim": 16, "norms": "qk", "ranges": ((0, 5, 8),)},
        {"new": (9,), "past": (0,)} | {"dim": 16, "rotary_dim": 8, "window": 3, "sinks": True,
                                       "ranges": ((0, 1, 6), (0, 7, 9))},
        {"new": (9,), "past": (2,)} | {"dim": 8, "window": 3, "windowed_ranges": 0,
                                       "ranges": ((0, 0, 8),)},
        prompts | {"dim": 24, "rotary_dim": 24, "softcap": 2.0, "ranges": ((0, 1, 4), (2, 0, 3))},
        mixed | {"dim": 6, "rotary_dim": 4, "window": 2, "block_size": 4, "ranges": ((0, 1, 3),)},
        mixed | {"dim": 16, "rotary_dim": 16, "window": 2, "windowed_ranges": 0, "block_size": 8,
                 "ranges": ((0, 0, 4), (3, 3, 5))},
        decode | {"dim": 16, "rotary_dim": 16, "ranges": ()},
    )]


def _sample(rng: np.random.Generator, new: Sequence[int], past: Sequence[int], dim: int,
            heads: int = 4, kv_heads: int = 2, norms: str = "", max_seq_len: int = 16,
            block_size: int = 0, biased: int = 0, sinks: bool = False, by_key: bool = False,
            scaled: bool = False, by_axis: bool = False,
            ranges: Sequence[tuple[int, int, int]] | None = None, **fields: Any) -> Sample:
    """A sample; `ranges` has sequence, start and end of each bidirectional range."""
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def cached(*shape: int) -> np.ndarray:
        return _cached(normal(*shape), fields.get("kv_dtype", "")).astype(np.float32)

    cache = (len(new), kv_heads, max_seq_len, dim)
    places = {}
    if block_size:  # in any order, with one unused block
        blocks = len(new) * (max_seq_len // block_size)
        cache = (blocks + 1, kv_heads, block_size, dim)
        places["block_table"] = rng.permutation(blocks + 1)[:blocks].reshape(len(new), -1) \
            .astype(np.int32)
    inputs = {"qkv": normal(sum(new), (heads + 2 * kv_heads) * dim),
              "key_cache": cached(*cache), "value_cache": cached(*cache),
              "cu_seqlens": np.cumsum([0, *new]).astype(np.int32),
              "past_lens": np.array(past, np.int32)}
    if "rotary_dim" in fields:
        angle = np.outer(np.arange(max_seq_len), 0.3 ** np.arange(fields["rotary_dim"] // 2))
        inputs |= {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    inputs |= {f"{name}_norm": normal(dim) for name in norms} | places
    if biased:
        inputs["distance_bias"] = normal(heads, biased)
    if sinks:
        inputs["sinks"] = normal(heads)
    if by_key:
        inputs["key_bias"] = normal(heads, max_seq_len)
    if scaled:
        inputs["query_scale"] = normal(max_seq_len)
    if by_axis:
        inputs |= {"rotary_positions": rng.integers(0, max_seq_len, (sum(new), AXES))
                   .astype(np.int32),
                   "rotary_axes": rng.integers(0, AXES, fields["rotary_dim"] // 2)
                   .astype(np.int32)}
    if ranges is not None:
        inputs["bidirectional_ranges"] = made = np.zeros((sum(new), 2), np.int32)
        for sequence, start, end in ranges:
            first = int(inputs["cu_seqlens"][sequence]) - past[sequence]
            own = range(max(start + first, int(inputs["cu_seqlens"][sequence])), end + first)
            made[own.start:own.stop] = start, end
    return Sample({"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, **fields}, inputs)


def rounds(fields: Fields, present: frozenset[str]) -> bool:
    return not present & {"distance_bias", "key_bias"}


OP = rounds_output(Op(
    name="CausalAttention",
    version=7,
    inputs=("qkv", "key_cache", "value_cache", "cu_seqlens", "past_lens", "cos?", "sin?",
            "q_norm?", "k_norm?", "block_table?", "distance_bias?", "sinks?", "v_norm?",
            "key_bias?", "query_scale?", "rotary_positions?", "rotary_axes?",
            "bidirectional_ranges?"),
    outputs=("out", "key_cache_out", "value_cache_out"),
    fields={"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "scale": 0.0, "softcap": 0.0,
            "window": 0, "rotary_dim": 0, "interleaved": 0, "norm_epsilon": 1e-6,
            "kv_dtype": "", "norm_after_rotary": 0, "chunk": 0, "windowed_ranges": 1},
    required=("num_heads", "num_kv_heads", "head_dim"),
    choices={"interleaved": (0, 1), "norm_after_rotary": (0, 1), "windowed_ranges": (0, 1),
             "kv_dtype": ("", "float8_e4m3fn")},
    shapes=lambda shapes, fields: [
        (*shapes["qkv"][:-1], fields["num_heads"] * fields["head_dim"]),
        shapes["key_cache"], shapes["value_cache"]],
    dims=_dims,
    shard=(ByHeads({"qkv": "qkv"}, per_head=("distance_bias", "sinks", "key_bias")),),
    attention=Attention(caches=("key_cache", "value_cache")),
    columns=(Columns("qkv"),),
    body=_body,
    bodies={"cpu": _cpu, "tensorrt": _tensorrt, "tensorrt_rtx": _uniform},
    serves={"cpu": _group_query_lengths, "tensorrt_rtx": _uniform_lengths},
    held_scores={"cpu": _cpu_held_scores},
    float32_inputs=frozenset({"cos", "sin", "q_norm", "k_norm", "v_norm", "distance_bias", "sinks",
                              "key_bias", "query_scale"}),
    integer_inputs=frozenset({"cu_seqlens", "past_lens", "block_table", "rotary_positions",
                              "rotary_axes", "bidirectional_ranges"}),
    cache_inputs=frozenset({"key_cache", "value_cache"}),
    core_most={"head_dim": 512},
    core_multiple={"head_dim": 8},
    reference=_reference,
    samples=_samples,
), rounds)
