"""Self-attention of blocks: bidirectional among new tokens, which also attend to earlier keys.

Sequence b owns row b of both caches, or the blocks of row b of block_table: position p is row
p % block_size of block block_table[b, p // block_size]. Its first past_lens[b] positions are
filled; its new tokens, rows cu_seqlens[b] to cu_seqlens[b + 1] of qkv, are appended. All of its
queries see the keys of all of its positions. A block drafter computes its drafts so, in one pass.

    qkv                     [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    key_cache, value_cache  [batch, num_kv_heads, max_seq_len, head_dim], or in blocks
                            [num_blocks, num_kv_heads, block_size, head_dim]; keys after norm and
                            RoPE, in the computation's dtype or in `kv_dtype`
    cu_seqlens, past_lens   int32 [batch + 1], [batch]
    cos, sin                [max_positions, rotary_dim / 2]; absent: no rotary embedding
    q_norm, k_norm          [head_dim], RMSNorm over each head before the rotary embedding, or
                            with `norm_after_rotary` after it
    block_table             int32 [batch, blocks]; absent: contiguous caches
    out                     [num_tokens, num_heads * head_dim]

`scale` 0 means head_dim ** -0.5. With a `window`, key j is visible to query i iff
|i - j| <= window.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.attention.op import (
    _PAST,
    _POSITIONS,
    _TOKENS,
    _appended,
    _cached,
    _filled,
    _heads,
    _ints,
    _out,
    _queries,
    _scale,
    check_heads,
    check_rotary,
    held_scores,
    rotated,
)
from llmc.plugins.roles import Attention, ByHeads, Columns


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    check_heads(fields)
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    rotary = fields["rotary_dim"]
    check_rotary(rotary, present)
    paged = "block_table" in present
    cache = ("blocks", kv_heads, "block_size", dim) if paged else \
        ("batch", kv_heads, "max_seq_len", dim)
    table = ("positions" if paged else ">= max_seq_len", rotary // 2)
    return {"qkv": ("num_tokens", (heads + 2 * kv_heads) * dim),
            "key_cache": cache, "value_cache": cache, "cu_seqlens": ("batch_plus_1",),
            "past_lens": ("batch",), "cos": table, "sin": table, "q_norm": (dim,),
            "k_norm": (dim,), "block_table": ("batch", "blocks_of_a_sequence")}


def _body(fields: Fields, present: frozenset[str]) -> str:
    split, q, k, v = _heads(fields, present, rotate="cos" in present)
    lines = [
        _TOKENS, _PAST, _POSITIONS, *split, *_appended(k, v, fields, present),
        _ints("c2", 2), "filled = Add(past, lengths)",
        "fullest = ReduceMax<keepdims=1>(filled)",
        *(line for name in ("key", "value") for line in _filled(name, present, fields)),
        "keys_t = Transpose<perm=[0, 1, 3, 2]>(keys)",
        "keys_grouped = Unsqueeze(keys_t, c2)", "values_grouped = Unsqueeze(values, c2)",
        *_queries(q, fields),
        "products = MatMul(queries, keys_grouped)",
        f"scale = Constant<value_float={float(_scale(fields))!r}>()",
        "scaled = Mul(products, scale)",
        "fullest_scalar = Squeeze(fullest)", "j = Range(zero, fullest_scalar, one)",
        "filled_column = Unsqueeze(filled, c12)", "there = Less(j, filled_column)",  # [B, 1, L]
    ]
    visible = "there"
    if fields["window"]:
        lines += ["past_column = Unsqueeze(past, c1)", "padded_position = Add(past_column, step)",
                  "i = Unsqueeze(padded_position, c2)", "ahead = Sub(j, i)", "far = Abs(ahead)",
                  f"window = Constant<value_int={fields['window']}>()",
                  "near = LessOrEqual(far, window)", "there_and_near = And(there, near)"]
        visible = "there_and_near"
    return "\n".join([
        *lines, f"visible = Unsqueeze({visible}, c12)",
        "never = Constant<value_float=-1e30>()", "masked = Where(visible, scaled, never)",
        "weights = Softmax<axis=-1>(masked)", *_out(fields)])


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    packed = inputs["qkv"].astype(np.float64).reshape(-1, heads + 2 * kv_heads, dim)
    out = np.zeros((len(packed), heads, dim))
    keys, values = (inputs[name].astype(np.float64) for name in ("key_cache", "value_cache"))
    block_size = keys.shape[2]
    table = inputs.get("block_table", np.arange(len(keys))[:, None])

    def prepared(x: np.ndarray, name: str, position: int) -> np.ndarray:
        def normed(x: np.ndarray) -> np.ndarray:
            return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + fields["norm_epsilon"])
                              * inputs[name]) if name in inputs else x

        return normed(rotated(x, position, fields, inputs)) if fields["norm_after_rotary"] \
            else rotated(normed(x), position, fields, inputs)

    for b, past in enumerate(inputs["past_lens"]):
        start, stop = inputs["cu_seqlens"][b:b + 2]
        for token in range(start, stop):
            position = int(past + token - start)
            place = table[b, position // block_size], slice(None), position % block_size
            keys[place] = _cached(prepared(packed[token, heads:heads + kv_heads], "k_norm",
                                           position), fields["kv_dtype"])
            values[place] = _cached(packed[token, heads + kv_heads:], fields["kv_dtype"])
        end = int(past + stop - start)
        for token in range(start, stop):
            position = int(past + token - start)
            first, last = (max(0, position - fields["window"]),
                           min(end, position + fields["window"] + 1)) if fields["window"] else \
                (0, end)
            seen = np.arange(first, last)
            own, theirs = (np.repeat(cache[table[b, seen // block_size], :, seen % block_size]
                                     .swapaxes(0, 1), heads // kv_heads, axis=0)
                           for cache in (keys, values))
            scores = np.einsum("hd,hjd->hj", prepared(packed[token, :heads], "q_norm", position),
                               own) * _scale(fields)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[token] = np.einsum("hj,hjd->hd", weights / weights.sum(-1, keepdims=True), theirs)
    return [out.reshape(len(out), -1), keys, values]


def _samples(rng: np.random.Generator) -> list[Sample]:
    """Contexts and blocks of several sequences, with and without a past."""
    variants: tuple[dict[str, Any], ...] = (
        {"new": (4, 4), "past": (0, 5), "dim": 16, "rotary_dim": 16, "norms": "qk"},
        {"new": (3, 1, 5), "past": (2, 9, 0), "dim": 6, "scale": 0.3},
        {"new": (4, 4), "past": (7, 3), "dim": 8, "rotary_dim": 4, "window": 3},
        {"new": (5,), "past": (6,), "dim": 16, "rotary_dim": 16, "interleaved": 1, "norms": "qk",
         "norm_after_rotary": 1, "norm_epsilon": 1e-5},
        {"new": (4, 6), "past": (5, 0), "dim": 16, "rotary_dim": 16, "norms": "qk",
         "block_size": 4},
        {"new": (9, 2), "past": (0, 11), "dim": 64, "rotary_dim": 64, "block_size": 8,
         "window": 5, "heads": 6},
        {"new": (3, 5), "past": (4, 8), "dim": 128, "block_size": 16},
        {"new": (4, 4), "past": (0, 5), "dim": 16, "kv_dtype": "float8_e4m3fn", "block_size": 4})
    return [_sample(rng, **variant) for variant in variants]


def _sample(rng: np.random.Generator, new: Sequence[int], past: Sequence[int], dim: int,
            norms: str = "", heads: int = 4, kv_heads: int = 2, max_seq_len: int = 16,
            block_size: int = 0, **fields: Any) -> Sample:
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def cached(*shape: int) -> np.ndarray:
        return _cached(normal(*shape), fields.get("kv_dtype", "")).astype(np.float32)

    cache: tuple[int, ...] = len(new), kv_heads, max_seq_len, dim
    places = {}
    if block_size:  # in any order, with one unused block
        blocks = len(new) * (max_seq_len // block_size)
        cache = blocks + 1, kv_heads, block_size, dim
        places["block_table"] = rng.permutation(blocks + 1)[:blocks].reshape(len(new), -1) \
            .astype(np.int32)
    inputs = {"qkv": normal(sum(new), (heads + 2 * kv_heads) * dim), "key_cache": cached(*cache),
              "value_cache": cached(*cache), "cu_seqlens": np.cumsum([0, *new]).astype(np.int32),
              "past_lens": np.array(past, np.int32)} | places
    if "rotary_dim" in fields:
        angle = np.outer(np.arange(max_seq_len), 0.3 ** np.arange(fields["rotary_dim"] // 2))
        inputs |= {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    inputs |= {f"{name}_norm": normal(dim) for name in norms}
    return Sample({"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, **fields}, inputs)


OP = Op(
    name="BlockAttention",
    version=2,
    inputs=("qkv", "key_cache", "value_cache", "cu_seqlens", "past_lens", "cos?", "sin?",
            "q_norm?", "k_norm?", "block_table?"),
    outputs=("out", "key_cache_out", "value_cache_out"),
    fields={"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "scale": 0.0, "window": 0,
            "rotary_dim": 0, "interleaved": 0, "norm_epsilon": 1e-6, "kv_dtype": "",
            "norm_after_rotary": 0},
    required=("num_heads", "num_kv_heads", "head_dim"),
    choices={"interleaved": (0, 1), "norm_after_rotary": (0, 1), "kv_dtype": ("", "float8_e4m3fn")},
    shapes=lambda shapes, fields: [
        (*shapes["qkv"][:-1], fields["num_heads"] * fields["head_dim"]),
        shapes["key_cache"], shapes["value_cache"]],
    dims=_dims,
    shard=(ByHeads({"qkv": "qkv"}),),
    attention=Attention(caches=("key_cache", "value_cache")),
    columns=(Columns("qkv"),),
    body=_body,
    held_scores={"cpu": lambda fields, present: held_scores(fields)},
    float32_inputs=frozenset({"cos", "sin", "q_norm", "k_norm"}),
    integer_inputs=frozenset({"cu_seqlens", "past_lens", "block_table"}),
    cache_inputs=frozenset({"key_cache", "value_cache"}),
    core_most={"head_dim": 256},
    core_multiple={"head_dim": 8},
    reference=_reference,
    samples=_samples,
)
