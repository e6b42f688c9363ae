"""Attention of packed queries to all keys of their sequence: encoders, cross-attention.

Sequence b has queries in rows cu_seqlens[b] to cu_seqlens[b + 1], and keys and values in
key_lens[b] rows from key_starts[b] on, key_steps[b] rows apart. Several sequences may have the same
keys, as the beams of a prompt do.

    query           [num_tokens, num_heads * head_dim]
    key, value      [num_keys, num_kv_heads * head_dim]
    cu_seqlens      int32 [batch + 1]
    key_starts      int32 [batch]; absent with key_lens: keys are in the rows of the queries
    key_lens        int32 [batch]
    key_steps       int32 [batch]; optional, with key_starts: at least 1, else 1
    distance_bias   [num_heads, 2 * n + 1]; optional. Column n + j - i, clamped, is added to the
                    score of query i and key j, both counted in their sequence
    cos, sin        [positions, rotary_dim / 2]; optional: queries and keys are rotated by their
                    position in the sequence. With `rotary_by_row`, [num_tokens, rotary_dim / 2]:
                    row i rotates token i, such as a patch by its row and column in an image
    q_norm, k_norm  [head_dim]; optional RMSNorm of each head of queries and keys
    out             [num_tokens, num_heads * head_dim]

`scale` 0 means head_dim ** -0.5. A `window` above 0 shows a query the keys at a distance of at most
that many tokens, before and after it. A `softcap` above 0 limits scores to softcap * tanh(score /
softcap). Rotary embedding, norms and window need keys in the rows of the queries. Norms come before
the rotary embedding, or after it with `norm_after_rotary`.

Comments below use B sequences, S queries of the longest sequence, L keys of the longest, D
head_dim.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.attention.op import (
    _LENGTHS,
    _TOKENS,
    _ints,
    _out,
    _places,
    _prepared,
    _queries,
    _scale,
    check_heads,
    held_scores,
    rotated,
)
from llmc.plugins.roles import Attention, ByHeads, Columns


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    check_heads(fields)
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    if ("key_starts" in present) != ("key_lens" in present):
        raise ValueError("BidirectionalAttention takes key_starts and key_lens together")
    if "key_steps" in present and "key_starts" not in present:
        raise ValueError("BidirectionalAttention takes key_steps only with key_starts")
    rotary = fields["rotary_dim"]
    if ({"cos", "sin"} & present or rotary) and (
            not {"cos", "sin"} <= present or not 0 < rotary <= dim or rotary % 2):
        raise ValueError(f"rotary_dim {rotary} is not an even number from 2 to head_dim {dim} with "
                         f"cos and sin, nor 0 without them")
    if fields["rotary_by_row"] and not rotary:
        raise ValueError("BidirectionalAttention takes rotary_by_row only with cos and sin")
    if "key_starts" in present and (_OF_TOKENS & present or fields["window"]):
        raise ValueError("BidirectionalAttention takes a rotary embedding, norms and a window only "
                         "with keys in the rows of the queries")
    keys = ("num_keys" if "key_starts" in present else "num_tokens", kv_heads * dim)
    table = ("num_tokens" if fields["rotary_by_row"] else "positions", rotary // 2)
    return {"query": ("num_tokens", heads * dim), "key": keys, "value": keys,
            "cu_seqlens": ("batch_plus_1",), "key_starts": ("batch",), "key_lens": ("batch",),
            "key_steps": ("batch",), "distance_bias": (heads, "2 * n + 1"),
            "cos": table, "sin": table,
            "q_norm": (dim,), "k_norm": (dim,)}


_OF_TOKENS = frozenset({"cos", "sin", "q_norm", "k_norm"})  # inputs for queries and their own keys


def _heads(name: str, count: int, source: str, fields: Fields, present: frozenset[str]) -> \
        tuple[list[str], str]:
    """Return lines that normalize and rotate heads of `source`, and the result, both packed."""
    if "cos" not in present and f"{name}_norm" not in present:
        return [], source
    by_row = {"rotary_positions"} if fields["rotary_by_row"] else set()  # reads `_tables`
    lines, made = _prepared(name, count, fields, present | by_row, "cos" in present)
    dim = fields["head_dim"]
    return [_ints(f"{name}_heads_shape", 0, count, 1, dim),
            f"{name} = Reshape({source}, {name}_heads_shape)", *lines,
            _ints(f"{name}_rows_shape", 0, count * dim),
            f"{name}_rows = Reshape({made}, {name}_rows_shape)"], f"{name}_rows"


def _tables(fields: Fields, present: frozenset[str]) -> list[str]:
    """Return lines for `position_column`, or for the rows of the tables, [T, 1, rotary_dim / 2]."""
    if "cos" not in present:
        return []
    return ["cos_rows = Unsqueeze(cos, c1)", "sin_rows = Unsqueeze(sin, c1)"] \
        if fields["rotary_by_row"] else ["position_column = Unsqueeze(offset, c1)"]


def _gathered(present: frozenset[str], key: str) -> list[str]:
    """Return lines for `keys` and `values` by sequence, [B, L, ...], and `key_len`."""
    if {"key_starts", "key_lens"} & present and not {"key_starts", "key_lens"} <= present:
        raise ValueError("BidirectionalAttention takes key_starts and key_lens together")
    lines = ["key_start = Cast<to=7>(key_starts)", "key_len = Cast<to=7>(key_lens)"] \
        if "key_starts" in present else ["key_start = Identity(starts)",
                                         "key_len = Identity(lengths)"]
    return [
        *lines,
        "most = ReduceMax<keepdims=0>(key_len)",
        "j = Range(zero, most, one)",
        "key_start_column = Unsqueeze(key_start, c1)",
        *(["key_step = Cast<to=7>(key_steps)", "key_step_column = Unsqueeze(key_step, c1)",
           "key_place = Mul(key_step_column, j)"] if "key_steps" in present else
          ["key_place = Identity(j)"]),
        "key_row = Add(key_start_column, key_place)",
        "num_keys = Shape<start=0, end=1>(key)",
        "last_key = Sub(num_keys, one)",
        "key_pad = Min(key_row, last_key)",  # [B, L]: arbitrary for padding
        f"keys = Gather<axis=0>({key}, key_pad)",
        "values = Gather<axis=0>(value, key_pad)",
    ]


def _bias() -> list[str]:
    """Return lines for `head_bias`, [num_heads, S, L]."""
    return ["step_column = Unsqueeze(step, c1)", "ahead = Sub(j, step_column)",
            _ints("c2", 2), "distances = Shape<start=1, end=2>(distance_bias)",
            "farthest = Div(distances, c2)", "lowest = Neg(farthest)",
            "not_before = Max(ahead, lowest)", "distance = Min(not_before, farthest)",
            "column = Add(distance, farthest)", "head_bias = Gather<axis=1>(distance_bias, column)"]


def _body(fields: Fields, present: frozenset[str]) -> str:
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    query_lines, query = _heads("q", heads, "query", fields, present)
    key_lines, key = _heads("k", kv_heads, "key", fields, present)
    lines = [
        _TOKENS, *_tables(fields, present),
        *query_lines, *key_lines, *_gathered(present, key), *_queries(query, fields),
        _ints("key_shape", 0, 0, kv_heads, 1, dim),
        "keys_by_head = Reshape(keys, key_shape)",
        "keys_t = Transpose<perm=[0, 2, 3, 4, 1]>(keys_by_head)",
        "values_by_head = Reshape(values, key_shape)",
        "values_grouped = Transpose<perm=[0, 2, 3, 1, 4]>(values_by_head)",
        "products = MatMul(queries, keys_t)",
        f"scale = Constant<value_float={float(_scale(fields))!r}>()",
        "scaled = Mul(products, scale)",
    ]
    scores = "scaled"
    if fields["softcap"]:
        lines += [f"cap = Constant<value_float={fields['softcap']!r}>()",
                  "shrunk = Div(scaled, cap)", "bounded = Tanh(shrunk)",
                  "capped = Mul(bounded, cap)"]
        scores = "capped"
    if "distance_bias" in present:
        lines += [*_bias(), "bias_dims = Shape<start=1>(head_bias)",
                  _ints("bias_heads", kv_heads, heads // kv_heads),
                  "bias_shape = Concat<axis=0>(bias_heads, bias_dims)",
                  "bias = Reshape(head_bias, bias_shape)", f"biased = Add({scores}, bias)"]
        scores = "biased"
    lines += [
        "key_len_column = Unsqueeze(key_len, c1)", "there = Less(j, key_len_column)",
        _ints("c123", 1, 2, 3), "inside = Unsqueeze(there, c123)", *_window(fields),
        "never = Constant<value_float=-1e30>()", f"masked = Where(visible, {scores}, never)",
        "weights = Softmax<axis=-1>(masked)", *_out(fields),
    ]
    return "\n".join(lines)


def _cpu(fields: Fields, present: frozenset[str]) -> str | None:
    """Use com.microsoft.MultiHeadAttention on [B, S, ...].

    Sequences of one length are reshaped; others are padded on the right and masked, which the
    kernel's tiled implementation does not support. The mapping between packed and padded tokens is
    computed in each layer that needs it: a single text needs none.
    """
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    if fields["softcap"]:
        return None
    if "key_starts" in present:
        return None if "distance_bias" in present else _cpu_cross(fields, present)
    if heads != kv_heads:
        return None
    query_lines, query = _heads("q", heads, "query", fields, present)
    key_lines, key = _heads("k", kv_heads, "key", fields, present)
    packed = {"q": query, "k": key, "v": "value"}
    bias_lines, bias = _cpu_bias(fields, present)
    kernel = f"com.microsoft.MultiHeadAttention<num_heads={heads}, " \
             f"scale={float(_scale(fields))!r}>"
    maps = bool(bias_lines) or "cos" in present
    return "\n".join([
        *_LENGTHS, *(_places() if maps else []), *_tables(fields, present),
        *query_lines, *key_lines, *bias_lines,
        _ints("rows_shape", -1, heads * dim),
        "shortest = ReduceMin<keepdims=0>(lengths)", "even = Equal(shortest, longest)",
        "batch = Shape(lengths)", _ints("row_shape", -1, heads * dim),
        "whole_shape = Concat<axis=0>(batch, row_shape)",
        "out = If(even) <then_branch = whole () => (float[t, w] out_whole) {",
        *(f"{name}_whole = Reshape({rows}, whole_shape)" for name, rows in packed.items()),
        f"attended_whole = {kernel}(q_whole, k_whole, v_whole{', , , ' + bias if bias else ''})",
        "out_whole = Reshape(attended_whole, rows_shape)",
        "}, else_branch = padded () => (float[t, w] out_padded) {",
        *([] if maps else _places("_own")),
        *(f"{name}_padded = Gather<axis=0>({rows}, pad)" for name, rows in packed.items()),
        "key_lengths = Cast<to=6>(lengths)",
        f"attended_padded = {kernel}(q_padded, k_padded, v_padded, , key_lengths"
        f"{', ' + bias if bias else ''})",
        "rows_padded = Reshape(attended_padded, rows_shape)",
        "out_padded = Gather<axis=0>(rows_padded, place)", "}>"])


def _cpu_cross(fields: Fields, present: frozenset[str]) -> str:
    """Read keys and values where they are, by com.microsoft.FusedMatMul on [L, B, kv_heads, D].

    Keys are not copied if they are all of `key` in this order: those of one sequence, or those of
    several side by side (`key_starts` 0, 1, ..., `key_steps` B). Others are gathered. Query heads
    of a KV head are rows of one product.
    """
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))

    def attended(name: str, gathers: bool, masks: bool) -> list[str]:
        keys, values = ("key_rows", "value_rows") if gathers else ("key", "value")
        return [
            f"shape_{name} = Concat<axis=0>(every, batch, head_shape)",
            f"key_{name} = Reshape({keys}, shape_{name})",
            f"value_{name} = Reshape({values}, shape_{name})",
            f"scores_{name} = com.microsoft.FusedMatMul<alpha={float(_scale(fields))!r}, transB=1, "
            f"transBatchB=1>(queries, key_{name})",
            *(["never = Constant<value_float=-1e30>()",
               f"masked_{name} = Where(inside, scores_{name}, never)"] if masks else
              [f"masked_{name} = Identity(scores_{name})"]),
            f"weights_{name} = Softmax<axis=-1>(masked_{name})",
            f"out_{name} = com.microsoft.FusedMatMul<transBatchB=1>(weights_{name}, value_{name})"]

    steps = "key_steps" in present
    side_by_side = [
        "last_sequence = Squeeze(batch)", "sequences = Range(zero, last_sequence, one)",
        "starts_here = Equal(key_start, sequences)", "steps_here = Equal(key_step, batch)",
        "are_here = And(starts_here, steps_here)", "are_here_int = Cast<to=6>(are_here)",
        "all_here = ReduceMin(are_here_int)", "in_order = Cast<to=9>(all_here)"]

    whole = "attended" if heads == kv_heads else "of_groups"
    gathered = [*(["key_place = Mul(j_column, key_step)"] if steps else []),
                *_cpu_gathered("key_place" if steps else "j_column"),
                *attended("gathered", gathers=True, masks=True)]
    if steps:  # one of three is not empty; llmc loads no If inside another
        parts = ["nothing = Slice(queries, c0, c0)",
                 "out_of_place = Not(in_place)", "uneven = Not(even)",
                 "masked = And(in_place, uneven)",
                 *_if("unmasked", "all", attended("all", gathers=False, masks=False)),
                 *_if("masked", "uneven", attended("uneven", gathers=False, masks=True)),
                 *_if("out_of_place", "gathered", gathered),
                 f"{whole} = Concat<axis=0>(made_all, made_uneven, made_gathered)"]
    else:
        parts = [f"{whole} = If(unmasked) <then_branch = all () => (float[b, h, s, d] out_all) {{",
                 *attended("all", gathers=False, masks=False),
                 "}, else_branch = gathered () => (float[b, h, s, d] out_gathered) {",
                 *gathered, "}>"]
    return "\n".join([
        _TOKENS, "key_len = Cast<to=7>(key_lens)", "padded = Gather<axis=0>(query, pad)",
        _ints("heads_shape", 0, 0, heads, dim), "by_head = Reshape(padded, heads_shape)",
        f"{'queries' if heads == kv_heads else 'of_heads'} = "
        "Transpose<perm=[0, 2, 1, 3]>(by_head)",  # [B, heads, S, D]
        *([] if heads == kv_heads else [
            _ints("groups_shape", 0, kv_heads, -1, dim),
            "queries = Reshape(of_heads, groups_shape)"]),
        "key_start = Cast<to=7>(key_starts)",
        "most = ReduceMax<keepdims=0>(key_len)", "num_keys = Shape<start=0, end=1>(key)",
        "batch = Shape(key_len)", "total = Mul(batch, most)", "is_all = Equal(num_keys, total)",
        *(["key_step = Cast<to=7>(key_steps)", *side_by_side] if steps else
          ["in_order = Equal(batch, c1)"]),
        "in_place_1d = And(in_order, is_all)", "in_place = Squeeze(in_place_1d)",
        "fewest = ReduceMin<keepdims=0>(key_len)", "even = Equal(fewest, most)",
        "unmasked = And(in_place, even)",
        "j = Range(zero, most, one)", "j_column = Unsqueeze(j, c1)",
        "key_len_column = Unsqueeze(key_len, c1)", "there = Less(j, key_len_column)",
        _ints("c12", 1, 2), "inside = Unsqueeze(there, c12)",
        _ints("every", -1), _ints("head_shape", kv_heads, dim),
        *parts,
        *([] if heads == kv_heads else [
            _ints("attended_shape", 0, heads, -1, dim),
            "attended = Reshape(of_groups, attended_shape)"]),
        "by_token = Transpose<perm=[0, 2, 1, 3]>(attended)",
        _ints("rows_shape", -1, heads * dim), "rows = Reshape(by_token, rows_shape)",
        "out = Gather<axis=0>(rows, place)"])


def _if(condition: str, name: str, lines: list[str]) -> list[str]:
    """Return lines for `made_<name>`: `out_<name>` of these lines, or the empty `nothing`."""
    return [f"made_{name} = If({condition}) "
            f"<then_branch = {name} () => (float[b, h, s, d] out_{name}) {{", *lines,
            f"}}, else_branch = no_{name} () => (float[b, h, s, d] no_{name}) {{",
            f"no_{name} = Identity(nothing)", "}>"]


def _cpu_gathered(place: str) -> list[str]:
    """Return lines for the rows of keys and values, [L, B, ...], given places after the starts."""
    return [f"key_row = Add({place}, key_start)", "last_key = Sub(num_keys, one)",
            "key_pad = Min(key_row, last_key)",  # arbitrary for padding
            "key_rows = Gather<axis=0>(key, key_pad)",
            "value_rows = Gather<axis=0>(value, key_pad)"]


def _cpu_held_scores(fields: Fields, present: frozenset[str]) -> int:
    """Cross-attention holds products, masked scores and weights; texts are not chunked."""
    return held_scores(fields) if "key_starts" in present else 0


def _cpu_bias(fields: Fields, present: frozenset[str]) -> tuple[list[str], str]:
    """Return lines for what is added to scores, [1, num_heads or 1, S, S], and its name or ""."""
    lines, biases = ["j = Identity(step)"], []
    if "distance_bias" in present:
        lines += [*_bias(), "distance_bias_4d = Unsqueeze(head_bias, c0)"]
        biases.append("distance_bias_4d")
    if fields["window"]:
        lines += [*_near(fields), "never = Constant<value_float=-1e30>()",
                  "nothing = Constant<value_float=0.0>()",
                  "outside = Where(near, nothing, never)", _ints("c01", 0, 1),
                  "window_bias = Unsqueeze(outside, c01)"]
        biases.append("window_bias")
    if len(biases) < 2:
        return (lines if biases else []), "".join(biases)
    return [*lines, f"score_bias = Add({', '.join(biases)})"], "score_bias"


def _window(fields: Fields) -> list[str]:
    """Return lines for `visible`, which keys are `inside` the sequence and its window."""
    if not fields["window"]:
        return ["visible = Identity(inside)"]
    return [*_near(fields), "visible = And(inside, near)"]


def _near(fields: Fields) -> list[str]:
    """Return lines for `near` [S, L], which keys are in the window of a query."""
    return ["query_column = Unsqueeze(step, c1)", "difference = Sub(query_column, j)",
            "gap = Abs(difference)", f"window = Constant<value_int={fields['window']}>()",
            "near = LessOrEqual(gap, window)"]


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    query, key, value = (inputs[name].astype(np.float64) for name in ("query", "key", "value"))
    out = np.zeros((len(query), heads * dim))

    def normed(x: np.ndarray, norm: str) -> np.ndarray:
        if norm not in inputs:
            return x
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + fields["norm_epsilon"])
                          * inputs[norm])

    def prepared(x: np.ndarray, norm: str, position: int) -> np.ndarray:
        if fields["norm_after_rotary"]:
            return normed(rotated(x, position, fields, inputs), norm)
        return rotated(normed(x, norm), position, fields, inputs)

    begins = inputs["cu_seqlens"]
    starts = inputs.get("key_starts", begins[:-1])
    lens = inputs.get("key_lens", np.diff(begins))
    steps = inputs.get("key_steps", np.ones_like(lens))
    for b, (start, count, step) in enumerate(zip(starts, lens, steps, strict=True)):
        if begins[b] == begins[b + 1]:
            continue
        rows = start + step * np.arange(count)
        keys, values = (x[rows].reshape(count, kv_heads, dim) for x in (key, value))
        first = int(begins[b]) if fields["rotary_by_row"] else 0  # row of the tables
        keys = np.stack([prepared(own, "k_norm", first + j) for j, own in enumerate(keys)])
        for i, token in enumerate(range(begins[b], begins[b + 1])):
            for h in range(heads):
                kv = h // (heads // kv_heads)
                own = prepared(query[token, h * dim:(h + 1) * dim], "q_norm", first + i)
                scores = keys[:, kv] @ own * _scale(fields)
                if fields["softcap"]:
                    scores = fields["softcap"] * np.tanh(scores / fields["softcap"])
                if "distance_bias" in inputs:
                    n = inputs["distance_bias"].shape[1] // 2
                    scores = scores + inputs["distance_bias"][
                        h, n + np.clip(np.arange(count) - i, -n, n)]
                if fields["window"]:
                    scores = np.where(np.abs(np.arange(count) - i) <= fields["window"], scores,
                                      -np.inf)
                weights = np.exp(scores - scores.max())
                out[token, h * dim:(h + 1) * dim] = weights / weights.sum() @ values[:, kv]
    return [out]


def _samples(rng: np.random.Generator) -> list[Sample]:
    """Encoders and decoders, with unequal numbers of queries, with none, and with shared keys."""
    variants: tuple[dict[str, Any], ...] = (
        {"new": (5, 2, 3), "dim": 16},
        {"new": (4,), "dim": 6, "kv_heads": 4, "scale": 0.3, "biased": 1},
        {"new": (9, 1, 4), "dim": 8, "biased": 3},
        {"new": (1, 1, 1), "dim": 16, "starts": (0, 12, 5), "lens": (5, 7, 3)},
        {"new": (1, 1, 1, 1), "dim": 8, "starts": (8, 8, 0, 0), "lens": (4, 4, 6, 6)},
        {"new": (3, 0, 2), "dim": 24, "heads": 3, "kv_heads": 1, "scale": 1.0,
         "starts": (2, 2, 9), "lens": (6, 6, 1), "biased": 2},
        {"new": (7, 1, 4), "dim": 16, "rotary_dim": 16, "window": 2},
        {"new": (3, 5), "dim": 8, "rotary_dim": 4, "interleaved": 1, "normed": True,
         "norm_epsilon": 1e-3, "softcap": 2.0},
        {"new": (6, 2), "dim": 8, "rotary_dim": 8, "normed": True, "norm_after_rotary": 1,
         "window": 1, "biased": 2},
        {"new": (5, 2, 3), "dim": 16, "kv_heads": 4},
        {"new": (3, 3), "dim": 8, "kv_heads": 4, "biased": 2, "window": 1},
        {"new": (4, 1, 2), "dim": 8, "kv_heads": 4, "rotary_dim": 8, "window": 2},
        {"new": (4, 1, 2), "dim": 8, "kv_heads": 4, "rotary_dim": 8, "rotary_by_row": 1},
        {"new": (3, 5), "dim": 16, "rotary_dim": 8, "interleaved": 1, "rotary_by_row": 1,
         "normed": True, "window": 2},
        {"new": (1, 1, 1), "dim": 16, "kv_heads": 4, "starts": (0, 12, 5), "lens": (5, 7, 3)},
        {"new": (2, 0, 3), "dim": 8, "kv_heads": 4, "starts": (2, 2, 9), "lens": (6, 6, 1)},
        {"new": (3,), "dim": 8, "kv_heads": 4, "starts": (4,), "lens": (6,)},
        {"new": (3,), "dim": 8, "kv_heads": 4, "starts": (0,), "lens": (6,), "spare": 0},
        {"new": (3,), "dim": 8, "starts": (0,), "lens": (6,), "spare": 0},
        {"new": (1, 1, 1), "dim": 16, "starts": (0, 1, 2), "lens": (5, 2, 4), "steps": (3, 3, 3),
         "spare": 0},
        {"new": (2, 1), "dim": 8, "kv_heads": 4, "starts": (0, 1), "lens": (5, 5), "steps": (2, 2),
         "spare": 0},
        {"new": (1, 0, 2), "dim": 8, "starts": (4, 0, 1), "lens": (3, 6, 2), "steps": (1, 2, 3)},
        {"new": (3,), "dim": 8, "starts": (0,), "lens": (6,), "steps": (1,), "spare": 0},
    )
    return [_sample(rng, **variant) for variant in variants]


def _sample(rng: np.random.Generator, new: Sequence[int], dim: int, heads: int = 4,
            kv_heads: int = 2, starts: Sequence[int] | None = None,
            lens: Sequence[int] | None = None, steps: Sequence[int] | None = None,
            spare: int = 2, biased: int = 0,
            normed: bool = False, **fields: Any) -> Sample:
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    count = sum(new)
    if starts is not None and lens is not None:
        count = max(start + step * (len_ - 1) + 1 for start, step, len_ in zip(
            starts, steps or [1] * len(lens), lens, strict=True)) + spare
    inputs = {"query": normal(sum(new), heads * dim), "key": normal(count, kv_heads * dim),
              "value": normal(count, kv_heads * dim),
              "cu_seqlens": np.cumsum([0, *new]).astype(np.int32)}
    if starts is not None:
        inputs |= {"key_starts": np.array(starts, np.int32), "key_lens": np.array(lens, np.int32)}
    if steps is not None:
        inputs["key_steps"] = np.array(steps, np.int32)
    if biased:
        inputs["distance_bias"] = normal(heads, 2 * biased + 1)
    if "rotary_dim" in fields:
        rows = sum(new) if fields.get("rotary_by_row") else max(new)
        angles = rng.uniform(-3, 3, (rows, fields["rotary_dim"] // 2)).astype(np.float32)
        inputs |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    if normed:
        inputs |= {"q_norm": normal(dim), "k_norm": normal(dim)}
    return Sample({"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, **fields}, inputs)


OP = Op(
    name="BidirectionalAttention",
    version=2,
    inputs=("query", "key", "value", "cu_seqlens", "key_starts?", "key_lens?", "distance_bias?",
            "cos?", "sin?", "q_norm?", "k_norm?", "key_steps?"),
    outputs=("out",),
    fields={"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "scale": 0.0, "softcap": 0.0,
            "window": 0, "rotary_dim": 0, "interleaved": 0, "norm_epsilon": 1e-6,
            "norm_after_rotary": 0, "rotary_by_row": 0},
    choices={"interleaved": (0, 1), "norm_after_rotary": (0, 1), "rotary_by_row": (0, 1)},
    required=("num_heads", "num_kv_heads", "head_dim"),
    shapes=lambda shapes, fields: [
        (*shapes["query"][:-1], fields["num_heads"] * fields["head_dim"])],
    dims=_dims,
    shard=(ByHeads({"query": "q", "key": "k", "value": "v"}, per_head=("distance_bias",)),),
    attention=Attention(memory=("key", "value")),
    columns=(Columns("query"), Columns("key"), Columns("value")),
    body=_body,
    bodies={"cpu": _cpu},
    held_scores={"cpu": _cpu_held_scores},
    float32_inputs=frozenset({"distance_bias", "cos", "sin", "q_norm", "k_norm"}),
    integer_inputs=frozenset({"cu_seqlens", "key_starts", "key_lens", "key_steps"}),
    coreless=frozenset({"key_steps"}),
    core_most={"head_dim": 256},
    core_multiple={"head_dim": 8},
    reference=_reference,
    samples=_samples,
)
