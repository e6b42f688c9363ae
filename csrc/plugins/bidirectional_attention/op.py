"""Attention of packed queries to all keys of their sequence: encoders, cross-attention.

Sequence b has queries in rows cu_seqlens[b] to cu_seqlens[b + 1], and keys and values in
key_lens[b] rows from key_starts[b] on. Several sequences may have the same keys, as the beams of a
prompt do.

    query           [num_tokens, num_heads * head_dim]
    key, value      [num_keys, num_kv_heads * head_dim]
    cu_seqlens      int32 [batch + 1]
    key_starts      int32 [batch]; absent with key_lens: keys are in the rows of the queries
    key_lens        int32 [batch]
    distance_bias   [num_heads, 2 * n + 1]; optional. Column n + j - i, clamped, is added to the
                    score of query i and key j, both counted in their sequence
    out             [num_tokens, num_heads * head_dim]

`scale` 0 means head_dim ** -0.5.

Comments below use B sequences, S queries of the longest sequence, L keys of the longest, D
head_dim.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.attention.op import _TOKENS, _ints, _out, _queries, _scale, check_heads
from llmc.plugins.roles import Attention, ByHeads


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    check_heads(fields)
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    if ("key_starts" in present) != ("key_lens" in present):
        raise ValueError("BidirectionalAttention takes key_starts and key_lens together")
    keys = ("num_keys" if "key_starts" in present else "num_tokens", kv_heads * dim)
    return {"query": ("num_tokens", heads * dim), "key": keys, "value": keys,
            "cu_seqlens": ("batch_plus_1",), "key_starts": ("batch",), "key_lens": ("batch",),
            "distance_bias": (heads, "2 * n + 1")}


def _gathered(present: frozenset[str]) -> list[str]:
    """Return lines for `keys` and `values` by sequence, [B, L, ...], and `key_len`."""
    if {"key_starts", "key_lens"} & present and not {"key_starts", "key_lens"} <= present:
        raise ValueError("BidirectionalAttention takes key_starts and key_lens together")
    lines = ["key_start = Cast<to=7>(key_starts)", "key_len = Cast<to=7>(key_lens)"] \
        if "key_starts" in present else ["key_start = Identity(starts)",
                                         "key_len = Identity(lengths)"]
    return [
        _TOKENS, *lines,
        "most = ReduceMax<keepdims=0>(key_len)",
        "j = Range(zero, most, one)",
        "key_start_column = Unsqueeze(key_start, c1)",
        "key_row = Add(key_start_column, j)",
        "num_keys = Shape<start=0, end=1>(key)",
        "last_key = Sub(num_keys, one)",
        "key_pad = Min(key_row, last_key)",  # [B, L]: arbitrary for padding
        "keys = Gather<axis=0>(key, key_pad)",
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
    lines = [
        *_gathered(present), *_queries("query", fields),
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
    if "distance_bias" in present:
        lines += [*_bias(), "bias_dims = Shape<start=1>(head_bias)",
                  _ints("bias_heads", kv_heads, heads // kv_heads),
                  "bias_shape = Concat<axis=0>(bias_heads, bias_dims)",
                  "bias = Reshape(head_bias, bias_shape)", "biased = Add(scaled, bias)"]
        scores = "biased"
    lines += [
        "key_len_column = Unsqueeze(key_len, c1)", "there = Less(j, key_len_column)",
        _ints("c123", 1, 2, 3), "visible = Unsqueeze(there, c123)",
        "never = Constant<value_float=-1e30>()", f"masked = Where(visible, {scores}, never)",
        "weights = Softmax<axis=-1>(masked)", *_out(fields),
    ]
    return "\n".join(lines)


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    query, key, value = (inputs[name].astype(np.float64) for name in ("query", "key", "value"))
    out = np.zeros((len(query), heads * dim))
    begins = inputs["cu_seqlens"]
    starts = inputs.get("key_starts", begins[:-1])
    lens = inputs.get("key_lens", np.diff(begins))
    for b, (start, count) in enumerate(zip(starts, lens, strict=True)):
        keys, values = (x[start:start + count].reshape(count, kv_heads, dim) for x in (key, value))
        for i, token in enumerate(range(begins[b], begins[b + 1])):
            for h in range(heads):
                kv = h // (heads // kv_heads)
                scores = keys[:, kv] @ query[token, h * dim:(h + 1) * dim] * _scale(fields)
                if "distance_bias" in inputs:
                    n = inputs["distance_bias"].shape[1] // 2
                    scores = scores + inputs["distance_bias"][
                        h, n + np.clip(np.arange(count) - i, -n, n)]
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
    )
    return [_sample(rng, **variant) for variant in variants]


def _sample(rng: np.random.Generator, new: Sequence[int], dim: int, heads: int = 4,
            kv_heads: int = 2, starts: Sequence[int] | None = None,
            lens: Sequence[int] | None = None, biased: int = 0, **fields: Any) -> Sample:
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    count = sum(new)
    if starts is not None and lens is not None:
        count = max(map(sum, zip(starts, lens, strict=True))) + 2
    inputs = {"query": normal(sum(new), heads * dim), "key": normal(count, kv_heads * dim),
              "value": normal(count, kv_heads * dim),
              "cu_seqlens": np.cumsum([0, *new]).astype(np.int32)}
    if starts is not None:
        inputs |= {"key_starts": np.array(starts, np.int32), "key_lens": np.array(lens, np.int32)}
    if biased:
        inputs["distance_bias"] = normal(heads, 2 * biased + 1)
    return Sample({"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, **fields}, inputs)


OP = Op(
    name="BidirectionalAttention",
    version=1,
    inputs=("query", "key", "value", "cu_seqlens", "key_starts?", "key_lens?", "distance_bias?"),
    outputs=("out",),
    fields={"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "scale": 0.0},
    required=("num_heads", "num_kv_heads", "head_dim"),
    shapes=lambda shapes, fields: [
        (*shapes["query"][:-1], fields["num_heads"] * fields["head_dim"])],
    dims=_dims,
    shard=(ByHeads({"query": "q", "key": "k", "value": "v"}, per_head=("distance_bias",)),),
    attention=Attention(memory=("key", "value")),
    body=_body,
    float32_inputs=frozenset({"distance_bias"}),
    integer_inputs=frozenset({"cu_seqlens", "key_starts", "key_lens"}),
    core_most={"head_dim": 256},
    core_multiple={"head_dim": 8},
    reference=_reference,
    samples=_samples,
)
