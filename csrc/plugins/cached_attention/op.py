"""Causal self-attention to keys and values that another layer has put into its cache.

The new tokens' are there already: the layer whose cache this is has run before, in the same step.

    query                   [num_tokens, num_heads * head_dim]
    key_cache, value_cache  [batch, num_kv_heads, max_seq_len, head_dim], as CausalAttention has
                            left them; past_lens + new positions of each sequence are filled
    cu_seqlens, past_lens   int32 [batch + 1], [batch]
    cos, sin                [max_positions, rotary_dim / 2]; absent: no rotary embedding
    q_norm                  [head_dim], RMSNorm over each head of the queries
    query_scale             [max_positions], a factor of the query at each position
    out                     [num_tokens, num_heads * head_dim]

The fields are CausalAttention's.
"""

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.attention.op import (
    _PAST,
    _POSITIONS,
    _TOKENS,
    _attend,
    _ints,
    _prepared,
    _scale,
    check_heads,
    rotated,
)
from llmc.plugins.attention.op import OP as CAUSAL_ATTENTION
from llmc.plugins.roles import Attention, ByHeads


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    check_heads(fields)
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    rotary = fields["rotary_dim"]
    if bool(rotary) != ({"cos", "sin"} <= present):
        raise ValueError(f"rotary_dim {rotary} goes with both cos and sin")
    cache = ("batch", kv_heads, "max_seq_len", dim)
    table = (">= max_seq_len", rotary // 2)
    return {"query": ("num_tokens", heads * dim), "key_cache": cache, "value_cache": cache,
            "cu_seqlens": ("batch_plus_1",), "past_lens": ("batch",), "cos": table, "sin": table,
            "q_norm": (dim,), "query_scale": (">= max_seq_len",)}


def _body(fields: Fields, present: frozenset[str]) -> str:
    heads = fields["num_heads"]
    prepared, queries = _prepared("q", heads, fields, present, rotate="cos" in present)
    return "\n".join([
        _TOKENS, _PAST, _POSITIONS, _ints("c12", 1, 2),
        _ints("heads_shape", 0, heads, 1, fields["head_dim"]),
        "q = Reshape(query, heads_shape)", *prepared,
        "key_cache_out = Identity(key_cache)", "value_cache_out = Identity(value_cache)",
        *_attend(queries, {**fields, "kv_dtype": ""}, present)])


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    heads, dim = fields["num_heads"], fields["head_dim"]
    group = heads // fields["num_kv_heads"]
    queries = inputs["query"].astype(np.float64).reshape(-1, heads, dim)
    out = np.zeros_like(queries)

    def normed(x: np.ndarray) -> np.ndarray:
        if "q_norm" not in inputs:
            return x
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + fields["norm_epsilon"])
                          * inputs["q_norm"])

    for b, past in enumerate(inputs["past_lens"]):
        start, stop = inputs["cu_seqlens"][b:b + 2]
        for token in range(start, stop):
            position = int(past + token - start)
            x = queries[token]
            x = normed(rotated(x, position, fields, inputs)) if fields["norm_after_rotary"] \
                else rotated(normed(x), position, fields, inputs)
            if "query_scale" in inputs:
                x = x * inputs["query_scale"][position]
            first = max(0, position + 1 - fields["window"]) if fields["window"] else 0
            if fields["chunk"]:
                first = max(first, position // fields["chunk"] * fields["chunk"])
            seen = slice(first, position + 1)
            keys, values = (np.repeat(inputs[name][b, :, seen].astype(np.float64), group, axis=0)
                            for name in ("key_cache", "value_cache"))
            scores = np.einsum("hd,hjd->hj", x, keys) * _scale(fields)
            if fields["softcap"]:
                scores = np.tanh(scores / fields["softcap"]) * fields["softcap"]
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[token] = np.einsum("hj,hjd->hd", weights / weights.sum(-1, keepdims=True), values)
    return [out.reshape(len(out), -1)]


def _samples(rng: np.random.Generator) -> list[Sample]:
    """Of CausalAttention's, those that this can be; its keys and values are filled in already."""
    return [Sample({name: value for name, value in sample.fields.items() if name in OP.fields},
                   {"query": sample.inputs["qkv"][:, :sample.fields["num_heads"]
                                                  * sample.fields["head_dim"]],
                    **{name: array for name, array in sample.inputs.items()
                       if name in OP.input_names}})
            for sample in (CAUSAL_ATTENTION.samples(rng) if CAUSAL_ATTENTION.samples else ())
            if not sample.fields.get("kv_dtype") and sample.inputs.keys() <= {
                *OP.input_names, "qkv", "k_norm", "v_norm"}]


OP = Op(
    name="CachedAttention",
    version=2,
    inputs=("query", "key_cache", "value_cache", "cu_seqlens", "past_lens", "cos?", "sin?",
            "q_norm?", "query_scale?"),
    outputs=("out",),
    fields={"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "scale": 0.0, "softcap": 0.0,
            "window": 0, "rotary_dim": 0, "interleaved": 0, "norm_epsilon": 1e-6,
            "norm_after_rotary": 0, "chunk": 0},
    required=("num_heads", "num_kv_heads", "head_dim"),
    choices={"interleaved": (0, 1), "norm_after_rotary": (0, 1)},
    shapes=lambda shapes, fields: [shapes["query"]],
    dims=_dims,
    shard=(ByHeads({"query": "q"}),),
    attention=Attention(reads=("key_cache", "value_cache")),
    body=_body,
    has_core=False,
    float32_inputs=frozenset({"cos", "sin", "q_norm", "query_scale"}),
    integer_inputs=frozenset({"cu_seqlens", "past_lens"}),
    reference=_reference,
    samples=_samples,
)
