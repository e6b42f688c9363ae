"""Causal self-attention to the KV cache of another layer (cross-layer KV sharing).

The other layer has run earlier in the same step, so the cache has the new tokens' keys and values.

    query                   [num_tokens, num_heads * head_dim]
    key_cache, value_cache  [batch, num_kv_heads, max_seq_len, head_dim], or in blocks, as
                            CausalAttention leaves them; past_lens + new positions of each
                            sequence are filled
    cu_seqlens, past_lens   int32 [batch + 1], [batch]
    cos, sin                [max_positions, rotary_dim / 2]; absent: no rotary embedding
    q_norm                  [head_dim], RMSNorm over each head of the queries
    query_scale             [max_positions], a factor of the query at each position
    block_table             int32 [batch, blocks]; absent: contiguous caches
    out                     [num_tokens, num_heads * head_dim]

The attributes are those of CausalAttention.
"""

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.attention.op import (
    _PAGES,
    _PAST,
    _POSITIONS,
    _TOKENS,
    _attend,
    _float8s,
    _ints,
    _prepared,
    _scale,
    check_heads,
    check_rotary,
    held_scores,
    rotated,
    rounds,
)
from llmc.plugins.attention.op import OP as CAUSAL_ATTENTION
from llmc.plugins.quantization import rounds_output
from llmc.plugins.roles import Attention, ByHeads


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    check_heads(fields)
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    rotary = fields["rotary_dim"]
    check_rotary(rotary, present)
    paged = "block_table" in present
    cache = ("blocks", kv_heads, "block_size", dim) if paged else \
        ("batch", kv_heads, "max_seq_len", dim)
    positions = "positions" if paged else ">= max_seq_len"
    table = (positions, rotary // 2)
    return {"query": ("num_tokens", heads * dim), "key_cache": cache, "value_cache": cache,
            "cu_seqlens": ("batch_plus_1",), "past_lens": ("batch",), "cos": table, "sin": table,
            "q_norm": (dim,), "query_scale": (positions,),
            "block_table": ("batch", "blocks_of_a_sequence")}


def _wide(name: str, fields: Fields, as_bytes: bool) -> list[str]:
    """Return lines for a cache in the dtype of the computation."""
    if not fields["kv_dtype"]:
        return [f"{name}_cache_out = Identity({name}_cache)"]
    if as_bytes:
        return [f"{name}_wide_byte = Cast<to=7>({name}_cache)",
                f"{name}_wide_place = Add({name}_wide_byte, c128)",
                f"{name}_cache_out_wide = Gather(float8s, {name}_wide_place)"]
    return [f"{name}_cache_out_wide = Cast<to=1>({name}_cache)"]


def _body(fields: Fields, present: frozenset[str], as_bytes: bool = False) -> str:
    heads = fields["num_heads"]
    prepared, queries = _prepared("q", heads, fields, present, rotate="cos" in present)
    return "\n".join([
        _TOKENS, _PAST, _POSITIONS, _ints("c12", 1, 2),
        _ints("heads_shape", 0, heads, 1, fields["head_dim"]),
        "q = Reshape(query, heads_shape)", *prepared,
        *(_PAGES if "block_table" in present else []),
        *([_ints("c128", 128), f"float8s = Constant<value_floats=[{_float8s()}]>()"]
          if as_bytes else []),
        *_wide("key", fields, as_bytes), *_wide("value", fields, as_bytes),
        *_attend(queries, fields, present)])


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    heads, dim = fields["num_heads"], fields["head_dim"]
    group = heads // fields["num_kv_heads"]
    queries = inputs["query"].astype(np.float64).reshape(-1, heads, dim)
    out = np.zeros_like(queries)
    block_size = inputs["key_cache"].shape[2]
    table = inputs.get("block_table", np.arange(len(inputs["key_cache"]))[:, None])

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
            seen = np.arange(first, position + 1)
            keys, values = (np.repeat(
                inputs[name][table[b, seen // block_size], :, seen % block_size]
                .astype(np.float64).swapaxes(0, 1), group, axis=0)
                for name in ("key_cache", "value_cache"))
            scores = np.einsum("hd,hjd->hj", x, keys) * _scale(fields)
            if fields["softcap"]:
                scores = np.tanh(scores / fields["softcap"]) * fields["softcap"]
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[token] = np.einsum("hj,hjd->hd", weights / weights.sum(-1, keepdims=True), values)
    return [out.reshape(len(out), -1)]


def _reading(sample: Sample) -> Sample:
    """A sample of CausalAttention with keys and values already in the cache."""
    width = sample.fields["num_heads"] * sample.fields["head_dim"]
    return Sample({name: value for name, value in sample.fields.items() if name in OP.fields},
                  {"query": sample.inputs["qkv"][:, :width],
                   **{name: array for name, array in sample.inputs.items()
                      if name in OP.input_names}})


def _samples(rng: np.random.Generator) -> list[Sample]:
    """The samples of CausalAttention that apply to this op."""
    return [_reading(sample)
            for sample in (CAUSAL_ATTENTION.samples(rng) if CAUSAL_ATTENTION.samples else ())
            if sample.inputs.keys() <= {*OP.input_names, "qkv", "k_norm", "v_norm"}
            and not sample.fields.get("out_scale")]


OP = rounds_output(Op(
    name="CachedAttention",
    version=3,
    inputs=("query", "key_cache", "value_cache", "cu_seqlens", "past_lens", "cos?", "sin?",
            "q_norm?", "query_scale?", "block_table?"),
    outputs=("out",),
    fields={"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "scale": 0.0, "softcap": 0.0,
            "window": 0, "rotary_dim": 0, "interleaved": 0, "norm_epsilon": 1e-6,
            "kv_dtype": "", "norm_after_rotary": 0, "chunk": 0},
    required=("num_heads", "num_kv_heads", "head_dim"),
    choices={"interleaved": (0, 1), "norm_after_rotary": (0, 1), "kv_dtype": ("", "float8_e4m3fn")},
    shapes=lambda shapes, fields: [shapes["query"]],
    dims=_dims,
    shard=(ByHeads({"query": "q"}),),
    attention=Attention(reads=("key_cache", "value_cache")),
    body=_body,
    bodies={"tensorrt": lambda fields, present:
            _body(fields, present, as_bytes=True) if fields["kv_dtype"] else None},
    float32_inputs=frozenset({"cos", "sin", "q_norm", "query_scale"}),
    integer_inputs=frozenset({"cu_seqlens", "past_lens", "block_table"}),
    cache_inputs=frozenset({"key_cache", "value_cache"}),
    held_scores={"cpu": lambda fields, present: held_scores(fields)},
    core_most={"head_dim": 512},
    core_multiple={"head_dim": 8},
    reference=_reference,
    samples=_samples,
), rounds)
