"""Causal self-attention over packed tokens, with rotary embedding, per-head norms and KV append.

Sequence b owns row b of both caches. Its first past_lens[b] positions are filled; its new tokens,
rows cu_seqlens[b] to cu_seqlens[b + 1] of qkv, go to the positions after them. Prefill, decode and
anything between are the same op with other lengths.

    qkv                     [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    key_cache, value_cache  [batch, num_kv_heads, max_seq_len, head_dim]; keys normed and rotated
    cu_seqlens, past_lens   int32 [batch + 1], [batch]
    cos, sin                [max_positions, rotary_dim / 2]; absent: no rotary embedding, rotary_dim 0
    q_norm, k_norm          [head_dim], RMSNorm over each head before the rotary embedding
    out                     [num_tokens, num_heads * head_dim]

`scale` 0 means head_dim ** -0.5. With a `window`, key j is visible to query i iff
i - window < j <= i. The CPU body may leave garbage behind a sequence's last new position.
"""

import numpy as np

from llmc.plugins import Op, Sample


def _scale(fields):
    return fields["scale"] or fields["head_dim"] ** -0.5


def _ints(name, *values):
    return f"{name} = Constant<value_ints=[{', '.join(map(str, values))}]>()"


_TOKENS = "\n".join([  # where each token belongs; nothing here depends on the layer
    _ints("c0", 0), _ints("c1", 1), _ints("cm1", -1), _ints("cmax", 2**31 - 1),
    "cu = Cast<to=7>(cu_seqlens)",
    "past = Cast<to=7>(past_lens)",
    "starts = Slice(cu, c0, cm1)",
    "ends = Slice(cu, c1, cmax)",
    "num_tokens = Shape<start=0, end=1>(qkv)",
    "s0 = Constant<value_int=0>()",
    "s1 = Constant<value_int=1>()",
    "count = Squeeze(num_tokens)",
    "token = Range(s0, count, s1)",
    "token_column = Unsqueeze(token, c1)",
    "passed = GreaterOrEqual(token_column, ends)",
    "passed_int = Cast<to=7>(passed)",
    "seq = ReduceSum<keepdims=0>(passed_int, c1)",
    "start_of = Gather(starts, seq)",
    "offset = Sub(token, start_of)",
])


def _heads(name, norm, fields, present, count):
    """Lines that shape, norm and rotate `name` into `<name>_r` [tokens, count, head_dim]."""
    dim = fields["head_dim"]
    lines = [_ints(f"{name}_shape", 0, count, dim), f"{name}_h = Reshape({name}, {name}_shape)"]
    result = f"{name}_h"
    if norm in present:
        lines.append(f"{name}_n = RMSNormalization<axis=-1, epsilon={fields['norm_epsilon']!r}>"
                     f"({result}, {norm})")
        result = f"{name}_n"
    if "cos" in present:
        lines.append(f"{name}_rot = Slice({result}, c0, rotary_dim, cm1)")
        lines.append(f"{name}_rest = Slice({result}, rotary_dim, cmax, cm1)")
        if fields["interleaved"]:
            lines += [
                _ints(f"{name}_two", 2),
                f"{name}_a = Slice({name}_rot, c0, cmax, cm1, {name}_two)",
                f"{name}_b = Slice({name}_rot, c1, cmax, cm1, {name}_two)"]
        else:
            lines.append(f"{name}_a, {name}_b = Split<axis=-1, num_outputs=2>({name}_rot)")
        lines += [f"{name}_ac = Mul({name}_a, cos_t)", f"{name}_bs = Mul({name}_b, sin_t)",
                  f"{name}_bc = Mul({name}_b, cos_t)", f"{name}_as = Mul({name}_a, sin_t)",
                  f"{name}_x = Sub({name}_ac, {name}_bs)", f"{name}_y = Add({name}_bc, {name}_as)"]
        if fields["interleaved"]:
            lines += [f"{name}_xu = Unsqueeze({name}_x, cm1)", f"{name}_yu = Unsqueeze({name}_y, cm1)",
                      f"{name}_pair = Concat<axis=-1>({name}_xu, {name}_yu)",
                      f"{name}_flat = Shape({name}_rot)",
                      f"{name}_turned = Reshape({name}_pair, {name}_flat)"]
        else:
            lines.append(f"{name}_turned = Concat<axis=-1>({name}_x, {name}_y)")
        lines.append(f"{name}_r = Concat<axis=-1>({name}_turned, {name}_rest)")
        return lines
    return [*lines, f"{name}_r = Identity({result})"]


def _body(fields, present):
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    group = heads // kv_heads
    lines = [_TOKENS, "past_of = Gather(past, seq)", "pos = Add(past_of, offset)"]
    if "cos" in present:
        lines += ["cos_g = Gather(cos, pos)", "cos_t = Unsqueeze(cos_g, c1)",
                  "sin_g = Gather(sin, pos)", "sin_t = Unsqueeze(sin_g, c1)",
                  _ints("rotary_dim", fields["rotary_dim"])]
    lines += [_ints("sizes", heads * dim, kv_heads * dim, kv_heads * dim),
              "q, k, v = Split<axis=-1>(qkv, sizes)",
              *_heads("q", "q_norm", fields, present, heads),
              *_heads("k", "k_norm", fields, present, kv_heads),
              _ints("v_shape", 0, kv_heads, dim), "v_r = Reshape(v, v_shape)",
              # ScatterND indices [tokens, kv_heads, (sequence, head, position)]
              _ints("c12", 1, 2), _ints("c2", 2),
              _ints("head_range", *range(kv_heads)),
              _ints("kv", kv_heads), _ints("one", 1),
              "grid = Concat<axis=0>(num_tokens, kv, one)",
              "seq3 = Unsqueeze(seq, c12)", "seq_i = Expand(seq3, grid)",
              "pos3 = Unsqueeze(pos, c12)", "pos_i = Expand(pos3, grid)",
              "head3 = Unsqueeze(head_range, c1)", "head_i = Expand(head3, grid)",
              "index = Concat<axis=-1>(seq_i, head_i, pos_i)",
              "key_cache_out = ScatterND(key_cache, index, k_r)",
              "value_cache_out = ScatterND(value_cache, index, v_r)",
              "keys = Gather(key_cache_out, seq)", "values = Gather(value_cache_out, seq)",
              _ints("group_shape", 0, kv_heads, group, dim), "q_g = Reshape(q_r, group_shape)",
              "keys_t = Transpose<perm=[0, 1, 3, 2]>(keys)",
              "products = MatMul(q_g, keys_t)",
              f"scale = Constant<value_float={float(_scale(fields))!r}>()",
              "scores0 = Mul(products, scale)"]
    scores = "scores0"
    if fields["softcap"]:
        lines += [f"cap = Constant<value_float={fields['softcap']!r}>()",
                  "scores1 = Div(scores0, cap)", "scores2 = Tanh(scores1)",
                  "scores3 = Mul(scores2, cap)"]
        scores = "scores3"
    lines += ["length1 = Shape<start=2, end=3>(key_cache)", "length = Squeeze(length1)",
              "j = Range(s0, length, s1)", "pos_column = Unsqueeze(pos, c1)",
              "visible0 = LessOrEqual(j, pos_column)"]
    visible = "visible0"
    if fields["window"]:
        lines += [f"window = Constant<value_int={fields['window']}>()",
                  "edge = Sub(pos_column, window)", "recent = Greater(j, edge)",
                  "visible1 = And(visible0, recent)"]
        visible = "visible1"
    lines += [f"visible = Unsqueeze({visible}, c12)",
              "hidden = Constant<value_float=-1e30>()",
              f"masked = Where(visible, {scores}, hidden)",
              "weights = Softmax<axis=-1>(masked)",
              "out4 = MatMul(weights, values)",
              _ints("out_shape", 0, heads * dim), "out = Reshape(out4, out_shape)"]
    return "\n".join(lines)


def _cpu(fields, present):
    """com.microsoft.GroupQueryAttention, which wants [batch, longest] padded on the right.

    Every sequence is treated as having as many new tokens as the longest: what the padding leaves
    in the cache lies behind the sequence's end and is overwritten when tokens get there. That op
    continues several sequences at once only by one token each; see `_group_query_lengths`.
    """
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    if dim % 16 or fields["rotary_dim"] % 16 or ("q_norm" in present) != ("k_norm" in present):
        return None
    lines = [
        _TOKENS,
        "news = Sub(ends, starts)",
        "longest = ReduceMax<keepdims=0>(news)",
        "step = Range(s0, longest, s1)",
        "starts_column = Unsqueeze(starts, c1)",
        "pad0 = Add(starts_column, step)",
        "final = Sub(count, s1)",
        "pad = Min(pad0, final)",
        "row0 = Mul(seq, longest)",
        "row = Add(row0, offset)",
        "last_step = Sub(longest, s1)",
        "lens0 = Add(past, last_step)",
        "lens = Cast<to=6>(lens0)",
        "oldest = ReduceMax<keepdims=0>(past)",
        "total0 = Add(oldest, longest)",
        "total = Cast<to=6>(total0)",
        "padded = Gather<axis=0>(qkv, pad)",
    ]
    query = "padded, , "
    if "q_norm" in present:
        lines += [_ints("sizes", heads * dim, kv_heads * dim, kv_heads * dim),
                  "q0, k0, v0 = Split<axis=-1>(padded, sizes)"]
        for name, count in (("q", heads), ("k", kv_heads)):
            lines += [_ints(f"{name}_shape", 0, 0, count, dim), _ints(f"{name}_back", 0, 0, count * dim),
                      f"{name}1 = Reshape({name}0, {name}_shape)",
                      f"{name}2 = SimplifiedLayerNormalization<axis=-1, stash_type=1, "
                      f"epsilon={fields['norm_epsilon']!r}>({name}1, {name}_norm)",
                      f"{name}3 = Reshape({name}2, {name}_back)"]
        query = "q3, k3, v0"
    rotary = "cos, sin" if "cos" in present else ""
    lines += [
        "attended, key_cache_out, value_cache_out = com.microsoft.GroupQueryAttention"
        f"<num_heads={heads}, kv_num_heads={kv_heads}, scale={float(_scale(fields))!r}, "
        f"softcap={fields['softcap']!r}, do_rotary={int(bool(rotary))}, "
        f"rotary_interleaved={fields['interleaved']}, "
        f"local_window_size={fields['window'] or -1}>"
        f"({query}, key_cache, value_cache, lens, total{', ' + rotary if rotary else ''})",
        _ints("rows", -1, heads * dim),
        "flat = Reshape(attended, rows)",
        "out = Gather<axis=0>(flat, row)",
    ]
    return "\n".join(lines)


def _group_query_lengths(inputs):
    """All new, or one sequence, or one token each."""
    return not np.any(inputs["past_lens"]) or len(inputs["past_lens"]) == 1 \
        or np.diff(inputs["cu_seqlens"]).max() == 1


def _reference(fields, inputs):
    heads, kv_heads, dim = (fields[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    qkv = inputs["qkv"].astype(np.float64)
    keys, values = (inputs[name].astype(np.float64) for name in ("key_cache", "value_cache"))
    out = np.zeros((len(qkv), heads * dim))

    def prepare(x, norm, position):
        if norm in inputs:
            x = x / np.sqrt((x**2).mean() + fields["norm_epsilon"]) * inputs[norm]
        if "cos" in inputs:
            cos, sin = inputs["cos"][position], inputs["sin"][position]
            half = len(cos)
            first = np.arange(0, 2 * half, 2) if fields["interleaved"] else np.arange(half)
            second = first + (1 if fields["interleaved"] else half)
            x = x.copy()
            x[first], x[second] = (x[first] * cos - x[second] * sin,
                                   x[second] * cos + x[first] * sin)
        return x

    for b, past in enumerate(inputs["past_lens"]):
        for token in range(inputs["cu_seqlens"][b], inputs["cu_seqlens"][b + 1]):
            position = int(past) + token - int(inputs["cu_seqlens"][b])
            row = qkv[token].reshape(-1, dim)
            for h in range(kv_heads):
                keys[b, h, position] = prepare(row[heads + h], "k_norm", position)
                values[b, h, position] = row[heads + kv_heads + h]
            first = max(0, position + 1 - fields["window"]) if fields["window"] else 0
            for h in range(heads):
                kv = h // (heads // kv_heads)
                scores = keys[b, kv, first:position + 1] @ prepare(row[h], "q_norm", position)
                scores = scores * _scale(fields)
                if fields["softcap"]:
                    scores = np.tanh(scores / fields["softcap"]) * fields["softcap"]
                weights = np.exp(scores - scores.max())
                out[token, h * dim:(h + 1) * dim] = \
                    weights / weights.sum() @ values[b, kv, first:position + 1]
    return [out, keys, values]


def _samples(rng):
    made = []
    variants = [
        dict(heads=4, kv=2, dim=16, news=(5, 2, 3), past=(0, 0, 0), rotary=16),
        dict(heads=4, kv=2, dim=16, news=(1, 1, 1), past=(5, 2, 9), rotary=16),
        dict(heads=3, kv=1, dim=8, news=(4, 1, 2), past=(0, 6, 3), rotary=8, softcap=3.0),
        dict(heads=4, kv=4, dim=32, news=(6,), past=(2,), rotary=16, interleaved=1),
        dict(heads=4, kv=4, dim=16, news=(6, 3), past=(2, 0), rotary=8, interleaved=1),
        dict(heads=2, kv=1, dim=32, news=(3, 1, 4), past=(0, 0, 0), rotary=32, norm=True),
        dict(heads=4, kv=2, dim=24, news=(9, 3), past=(0, 4), rotary=0, window=4, scale=0.3),
        dict(heads=2, kv=1, dim=16, news=(3, 1), past=(3, 0), rotary=16, norm=True),
        dict(heads=2, kv=2, dim=6, news=(3, 2), past=(1, 0), rotary=4),
        dict(heads=2, kv=1, dim=16, news=(12,), past=(0,), rotary=16, window=5, interleaved=1),
        dict(heads=2, kv=1, dim=16, news=(1, 1), past=(11, 3), rotary=16, window=5),
    ]
    for v in variants:
        fields = {"num_heads": v["heads"], "num_kv_heads": v["kv"], "head_dim": v["dim"]}
        fields |= {key: v[key] for key in ("softcap", "interleaved", "window", "scale") if key in v}
        batch, tokens = len(v["news"]), sum(v["news"])
        shape = (batch, v["kv"], 16, v["dim"])
        inputs = {
            "qkv": rng.standard_normal((tokens, (v["heads"] + 2 * v["kv"]) * v["dim"])),
            "key_cache": rng.standard_normal(shape), "value_cache": rng.standard_normal(shape),
            "cu_seqlens": np.cumsum([0, *v["news"]]).astype(np.int32),
            "past_lens": np.array(v["past"], np.int32),
        }
        if v["rotary"]:
            fields["rotary_dim"] = v["rotary"]
            angle = np.outer(np.arange(16), 0.3 ** np.arange(v["rotary"] // 2))
            inputs |= {"cos": np.cos(angle), "sin": np.sin(angle)}
        if v.get("norm"):
            inputs |= {"q_norm": rng.standard_normal(v["dim"]),
                       "k_norm": rng.standard_normal(v["dim"])}
        made.append(Sample(fields, {name: x.astype(np.float32) if x.dtype == np.float64 else x
                                    for name, x in inputs.items()}))
    return made


OP = Op(
    name="Attention",
    version=1,
    inputs=("qkv", "key_cache", "value_cache", "cu_seqlens", "past_lens", "cos?", "sin?",
            "q_norm?", "k_norm?"),
    outputs=("out", "key_cache_out", "value_cache_out"),
    fields={"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "scale": 0.0, "softcap": 0.0,
            "window": 0, "rotary_dim": 0, "interleaved": 0, "norm_epsilon": 1e-6},
    required=("num_heads", "num_kv_heads", "head_dim"),
    shapes=lambda shapes, fields: [
        (shapes["qkv"][0], fields["num_heads"] * fields["head_dim"]),
        shapes["key_cache"], shapes["value_cache"]],
    body=_body,
    bodies={"cpu": _cpu},
    serves={"cpu": _group_query_lengths},
    reference=_reference,
    samples=_samples,
)
