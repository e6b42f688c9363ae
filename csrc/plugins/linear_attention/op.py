"""Linear attention with a state matrix per head, over packed tokens.

It covers the gated delta rule, Kimi delta attention and the state-space layers of Mamba 2. A token
multiplies the state of a head by exp(decay), adds the outer product of its key and an update, and
reads the state with its query. With update_rule `gated` the update is value * beta; with
`gated_delta` it is beta times the difference of the value and what the state has for the key. Value
heads share keys and queries in groups, as query heads share KV heads elsewhere. In terms of
Mamba 2: keys are B, queries C, beta is dt, decay is dt * A, and `skip` is D. Kimi delta attention
is `gated_delta` with `decay_per_channel`: each row of the state, one per key channel, has its own
decay.

    qkv                   [num_tokens, 2 * num_k_heads * k_head_dim + num_v_heads * v_head_dim]
    decay                 [num_tokens, num_v_heads], logarithms: decay_rate *
                          decay_activation(decay + decay_bias), with rate and bias float32
                          [num_v_heads], 1 and 0 if absent; with `decay_per_channel`
                          [num_tokens, num_v_heads * k_head_dim], without these
    state                 float32 [batch, num_v_heads, k_head_dim, v_head_dim], or [num_states, …]
                          with state_slots; not read where past_lens is 0
    cu_seqlens, past_lens int32 [batch + 1], [batch]
    state_slots           int32 [batch], distinct: each sequence's state; absent: row b
    commit_lens           int32 [batch], new tokens after which the state is stored; absent: all
    beta                  [num_tokens, num_v_heads]; absent: 1. It stands for
                          beta_activation(beta + beta_bias), the bias float32 [num_v_heads], 0 if
                          absent
    skip                  [num_v_heads]; optional: skip * value is added to the output
    out                   [num_tokens, num_v_heads * v_head_dim]

`scale` multiplies queries; `l2norm` normalizes queries and keys first.

Comments below use T new tokens, B sequences, S new tokens of the longest sequence, H key heads, G
value heads per key head, K and V their dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.activations import REFERENCE, activation_text
from llmc.plugins.attention.op import _PAST, _TOKENS, _ints
from llmc.plugins.roles import ByStateHeads, Columns, State
from llmc.plugins.states import committed, kept_states, own_states, state_rows

_L2_EPSILON = 1e-6  # added to the squared norm


def _sizes(fields: Fields) -> tuple[int, int, int, int]:
    """Raise ValueError unless value heads are a multiple of key heads."""
    k_heads, v_heads, k_dim, v_dim = (fields[key] for key in (
        "num_k_heads", "num_v_heads", "k_head_dim", "v_head_dim"))
    if min(k_heads, v_heads, k_dim, v_dim) < 1 or v_heads % k_heads:
        raise ValueError(f"num_k_heads {k_heads}, num_v_heads {v_heads}, k_head_dim {k_dim} and "
                         f"v_head_dim {v_dim}: each must be positive, and num_v_heads a multiple "
                         f"of num_k_heads")
    return k_heads, v_heads, k_dim, v_dim


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    k_heads, v_heads, k_dim, v_dim = _sizes(fields)
    odd = present & {"decay_rate", "decay_bias"}
    if fields["decay_per_channel"] and (odd or fields["decay_activation"] != "none"):
        raise ValueError(f"GatedLinearAttention takes no {min(odd, default='decay_activation')} "
                         f"with decay_per_channel")
    if "beta" not in present and ("beta_bias" in present or fields["beta_activation"] != "none"):
        raise ValueError("GatedLinearAttention has no beta, so it takes no beta_bias and no "
                         "beta_activation")
    return {"qkv": ("num_tokens", 2 * k_heads * k_dim + v_heads * v_dim),
            "decay": ("num_tokens", v_heads * (k_dim if fields["decay_per_channel"] else 1)),
            "state": (state_rows(present), v_heads, k_dim, v_dim), "state_slots": ("batch",),
            "commit_lens": ("batch",), "cu_seqlens": ("batch_plus_1",), "past_lens": ("batch",),
            "beta": ("num_tokens", v_heads), "skip": (v_heads,), "decay_rate": (v_heads,),
            "decay_bias": (v_heads,), "beta_bias": (v_heads,)}


def _prepared(fields: Fields, present: frozenset[str]) -> list[str]:
    """Return lines for the inputs of the recurrence.

    They are `q` and `k`, [T, H, K], `v`, [T, H * G, V], `log_decay`, `weight` (beta, if present),
    and the initial state `first_state`.
    """
    k_heads, v_heads, k_dim, v_dim = _sizes(fields)
    lines = [
        _TOKENS, _PAST, _ints("c123", 1, 2, 3), *own_states(present),
        "has_state = Greater(past, zero)", "has_state_corner = Unsqueeze(has_state, c123)",
        "nothing = Constant<value_float=0.0>()",
        "first_state = Where(has_state_corner, own_state, nothing)",
        _ints("kinds", k_heads * k_dim, k_heads * k_dim, v_heads * v_dim),
        "q_rows, k_rows, v_rows = Split<axis=1>(qkv, kinds)",
        _ints("key_shape", 0, k_heads, k_dim), _ints("value_shape", 0, v_heads, v_dim),
        "q_heads = Reshape(q_rows, key_shape)", "k_heads = Reshape(k_rows, key_shape)",
        "v = Reshape(v_rows, value_shape)",
    ]
    for name, made in (("decay", "slowness"), ("beta", "weight")):
        if name in present:
            raw = f"Add({name}, {name}_bias)" if f"{name}_bias" in present else f"Identity({name})"
            lines += [f"{name}_raw = {raw}",
                      activation_text(fields[f"{name}_activation"], f"{name}_raw", made)]
    lines.append("log_decay = Mul(slowness, decay_rate)" if "decay_rate" in present else
                 "log_decay = Identity(slowness)")
    for name in "qk":
        if fields["l2norm"]:
            lines += [f"{name}_square = ReduceSumSquare<keepdims=1>({name}_heads, last)",
                      f"{name}_epsilon = Constant<value_float={_L2_EPSILON!r}>()",
                      f"{name}_above = Add({name}_square, {name}_epsilon)",
                      f"{name}_length = Sqrt({name}_above)",
                      f"{name} = Div({name}_heads, {name}_length)"]
        else:
            lines.append(f"{name} = Identity({name}_heads)")
    return lines


def _joined(fields: Fields, present: frozenset[str]) -> list[str]:
    """Return lines for `out` from `read` [T, H * G, V], what tokens read from the state."""
    lines, made = [], "read"
    if "skip" in present:
        lines = ["skip_column = Unsqueeze(skip, c1)", "skipped = Mul(v, skip_column)",
                 "with_skip = Add(read, skipped)"]
        made = "with_skip"
    return [*lines, _ints("rows_shape", 0, fields["num_v_heads"] * fields["v_head_dim"]),
            f"out = Reshape({made}, rows_shape)"]


def _body(fields: Fields, present: frozenset[str]) -> str:
    """Iterate over the tokens of all sequences in parallel."""
    k_heads, v_heads, k_dim, v_dim = _sizes(fields)
    group = v_heads // k_heads
    delta = fields["update_rule"] == "gated_delta"
    scanned = {"q": (1, k_heads, 1, 1, k_dim), "k": (1, k_heads, 1, k_dim, 1),
               "v": (1, k_heads, group, 1, v_dim),
               "log_decay": (1, k_heads, group, k_dim if fields["decay_per_channel"] else 1, 1)}
    if "beta" in present:
        scanned["weight"] = (1, k_heads, group, 1, 1)
    lines = [
        *_prepared(fields, present), _ints("c1234", 1, 2, 3, 4),
        # Tokens by index in their sequence, [S, B, ...]; arbitrary for padding.
        "pad_by_step = Transpose(pad)",
        "step_column = Unsqueeze(step, c1)",
        "live = Less(step_column, lengths)",
    ]
    for name, (_, *shape) in scanned.items():
        lines += [f"{name}_by_step = Gather<axis=0>({name}, pad_by_step)",
                  _ints(f"{name}_shape", 0, 0, *shape),
                  f"{name}_steps = Reshape({name}_by_step, {name}_shape)"]
    step = [  # [B, H, G, K, V]
        "factor = Exp(log_decay_one)", "decayed = Mul(memory, factor)",
        *(["k_across = Transpose<perm=[0, 1, 2, 4, 3]>(k_one)",
           "known = MatMul(k_across, decayed)", "news = Sub(v_one, known)"]
          if delta else ["news = Identity(v_one)"]),
        "written = Mul(news, weight_one)" if "beta" in present else "written = Identity(news)",
        "added = Mul(k_one, written)", "updated = Add(decayed, added)",
        "live_corner = Unsqueeze(live_one, c1234)",
        "memory_out = Where(live_corner, updated, memory)",
        "read_one = MatMul(q_one, memory_out)",
    ]
    rank_5, rank_1 = "float[b, h, g, k, v]", "bool[b]"
    carried, masks = ["memory"], ["live"]
    if "commit_lens" in present:  # the stored state is another one
        lines += [*committed(present), "stored = Less(step_column, commits)"]
        step += ["stored_corner = Unsqueeze(stored_one, c1234)",
                 "kept_out = Where(stored_corner, memory_out, kept)"]
        carried, masks = ["memory", "kept"], ["live", "stored"]
    scans = [f"{name}_steps" for name in scanned] + masks
    taken = ", ".join([*(f"{rank_5} {name}" for name in carried),
                       *(f"{rank_5} {name}_one" for name in scanned),
                       *(f"{rank_1} {name}_one" for name in masks)])
    made = ", ".join([*(f"{rank_5} {name}_out" for name in carried), f"{rank_5} read_one"])
    last = ["last_groups"] if len(carried) == 1 else ["ignored_groups", "last_groups"]
    return "\n".join([
        *lines,
        _ints("groups_shape", 0, k_heads, group, k_dim, v_dim),
        "first_groups = Reshape(first_state, groups_shape)",
        f"{', '.join(last)}, reads = "
        f"Scan({', '.join(['first_groups'] * len(carried) + scans)}) "
        f"<num_scan_inputs={len(scans)}, body = each ({taken}) => ({made}) {{", *step, "}>",
        "state_shape = Shape(own_state)", "own_state_out = Reshape(last_groups, state_shape)",
        *kept_states(present),
        "offset_column = Unsqueeze(offset, c1)", "sequence_column = Unsqueeze(sequence, c1)",
        "where = Concat<axis=1>(offset_column, sequence_column)",
        "read_groups = GatherND(reads, where)",
        "unscaled = Reshape(read_groups, value_shape)",
        f"scale = Constant<value_float={fields['scale']!r}>()", "read = Mul(unscaled, scale)",
        *_joined(fields, present),
    ])


def _cpu(fields: Fields, present: frozenset[str]) -> str | None:
    """Use com.microsoft.LinearAttention on [B, S, ...] padded on the right.

    With commit_lens, a second call computes the drafts, if there are any, from the stored state.
    """
    k_heads, v_heads, k_dim, v_dim = _sizes(fields)
    delta = fields["update_rule"] == "gated_delta"
    if delta and fields["decay_per_channel"] and "beta" not in present:
        return None  # the kernel requires a beta per head
    lines = [*_prepared(fields, present), _ints("c2", 2), "one_beta = Constant<value_float=1.0>()",
             _ints("group_shape", 1, 1, v_heads // k_heads, 1),
             _ints("heads_shape", -1, v_heads, v_dim)]
    for name, dim in (("q", k_dim), ("k", k_dim)):
        lines += [_ints(f"{name}_wide", 0, v_heads * dim),
                  f"{name}_column = Unsqueeze({name}, c2)",
                  f"{name}_grid = Expand({name}_column, group_shape)",
                  f"{name}_grouped = Reshape({name}_grid, {name}_wide)"]
    value = "v"
    if "beta" in present and not delta:
        lines += ["beta_of_value = Unsqueeze(weight, last)", "v_weighed = Mul(v, beta_of_value)"]
        value = "v_weighed"
    lines += [_ints("v_wide", 0, v_heads * v_dim), f"v_flat = Reshape({value}, v_wide)"]
    if "commit_lens" not in present:
        lines += [*_padded_call(fields, present, "pad", "step", "lengths", "first_state"),
                  "own_state_out = Identity(pad_state_out)",
                  "read = Gather<axis=0>(pad_rows, place)"]
    else:
        lines += [
            *committed(present), *_padding("early", "starts", "commits"),
            *_padded_call(fields, present, "early_pad", "early_step", "commits", "first_state"),
            "own_state_out = Identity(early_pad_state_out)",
            "early_first = Mul(sequence, early_longest)", "early_place = Add(early_first, offset)",
            "draft_lens = Sub(lengths, commits)",
            "num_drafts = ReduceMax<keepdims=0>(draft_lens)",
            "any_draft = Greater(num_drafts, zero)",
            "read = If(any_draft) <then_branch = drafts () => (float[t, h, v] read_all) {",
            "draft_starts = Add(starts, commits)", *_padding("late", "draft_starts", "draft_lens"),
            *_padded_call(fields, present, "late_pad", "late_step", "draft_lens",
                          "own_state_out"),
            "commit_of_token = Gather(commits, sequence)",
            "is_early = Less(offset, commit_of_token)",
            "draft = Sub(offset, commit_of_token)", "late_first = Mul(sequence, late_longest)",
            "late_index = Add(late_first, draft)", "early_shape = Shape<end=1>(early_pad_rows)",
            "late_place = Add(late_index, early_shape)",
            "any_place = Where(is_early, early_place, late_place)",
            "all_rows = Concat<axis=0>(early_pad_rows, late_pad_rows)",
            "read_all = Gather<axis=0>(all_rows, any_place)",
            "}, else_branch = none () => (float[t, h, v] read_early) {",
            "read_early = Gather<axis=0>(early_pad_rows, early_place)", "}>"]
    return "\n".join([*lines, *kept_states(present), *_joined(fields, present)])


def _padding(prefix: str, starts: str, lengths: str) -> list[str]:
    """Return lines for the padded tokens of each sequence from `starts` on, `<prefix>_pad` [B, S].

    `<prefix>_longest` is S, at least 1, and `<prefix>_step` are the numbers below it.
    """
    return [f"{prefix}_most = ReduceMax<keepdims=0>({lengths})",
            f"{prefix}_longest = Max({prefix}_most, one)",
            f"{prefix}_step = Range(zero, {prefix}_longest, one)",
            f"{prefix}_column = Unsqueeze({starts}, c1)",
            f"{prefix}_beyond = Add({prefix}_column, {prefix}_step)",
            f"{prefix}_pad = Min({prefix}_beyond, final)"]


def _padded_call(fields: Fields, present: frozenset[str], pad: str, step: str, lengths: str,
                 state: str) -> list[str]:
    """Return lines for `<pad>_rows` [B * S, H * G, V] and `<pad>_state_out`.

    Padding tokens neither decay nor update the state.

    Args:
        pad: padded tokens [B, S].
        step: their numbers [S].
        lengths: tokens of each sequence [B].
        state: the state before them.
    """
    v_heads, delta = fields["num_v_heads"], fields["update_rule"] == "gated_delta"
    lines = [f"{pad}_ends = Unsqueeze({lengths}, c1)", f"{pad}_live = Less({step}, {pad}_ends)",
             f"{pad}_live_column = Unsqueeze({pad}_live, last)"]
    lines += [f"{pad}_{name} = Gather<axis=0>({name}_grouped, {pad})" for name in "qk"]
    given = [("v", "v_flat"), ("decay", "log_decay")]
    if delta and "beta" in present:
        given.append(("beta", "weight"))
    for name, rows in given:
        lines += [f"{pad}_{name}_any = Gather<axis=0>({rows}, {pad})",
                  f"{pad}_{name} = Where({pad}_live_column, {pad}_{name}_any, nothing)"]
    if delta and "beta" not in present:
        lines += [f"{pad}_nil = Sub({pad}_decay, {pad}_decay)",
                  f"{pad}_beta_any = Add({pad}_nil, one_beta)",
                  f"{pad}_beta = Where({pad}_live_column, {pad}_beta_any, nothing)"]
    return [*lines,
            f"{pad}_read, {pad}_state_out = com.microsoft.LinearAttention<q_num_heads={v_heads}, "
            f"kv_num_heads={v_heads}, scale={fields['scale']!r}, "
            f'update_rule="{fields["update_rule"]}">'
            f"({pad}_q, {pad}_k, {pad}_v, {state}, {pad}_decay{f', {pad}_beta' if delta else ''})",
            f"{pad}_rows = Reshape({pad}_read, heads_shape)"]


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    k_heads, v_heads, k_dim, v_dim = _sizes(fields)
    wide = {name: inputs[name].astype(np.float64) for name in (
        "qkv", "decay", "state", "beta", "skip") if name in inputs}
    decay, beta = (None if name not in wide else REFERENCE[fields[f"{name}_activation"]](
        wide[name] + inputs.get(f"{name}_bias", 0.0)) for name in ("decay", "beta"))
    assert decay is not None
    decay = decay * inputs.get("decay_rate", 1.0)
    q, k, v = np.split(wide["qkv"], [k_heads * k_dim, 2 * k_heads * k_dim], axis=1)
    q, k = (np.repeat(x.reshape(-1, k_heads, k_dim), v_heads // k_heads, axis=1) for x in (q, k))
    v = v.reshape(-1, v_heads, v_dim)
    if fields["l2norm"]:
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + _L2_EPSILON) for x in (q, k))
    out, state_out = np.zeros(v.shape), wide["state"].copy()
    for b, past in enumerate(inputs["past_lens"]):
        own = inputs["state_slots"][b] if "state_slots" in inputs else b
        state = state_out[own] if past else np.zeros(state_out[own].shape)
        start, stop = inputs["cu_seqlens"][b:b + 2]
        commit = start + inputs["commit_lens"][b] if "commit_lens" in inputs else stop
        state_out[own] = state
        for token in range(start, stop):
            state = state * np.exp(decay[token]).reshape(v_heads, -1, 1)
            news = v[token]
            if fields["update_rule"] == "gated_delta":
                news = news - np.einsum("hk,hkv->hv", k[token], state)
            if beta is not None:
                news = news * beta[token][:, None]
            state = state + k[token][:, :, None] * news[:, None]
            out[token] = fields["scale"] * np.einsum("hk,hkv->hv", q[token], state)
            if token < commit:
                state_out[own] = state
    if "skip" in wide:
        out += v * wide["skip"][:, None]
    return [out.reshape(len(out), -1), state_out]


def _samples(rng: np.random.Generator) -> list[Sample]:
    def sample(new: Sequence[int], past: Sequence[int], *optional: str, k_heads: int = 2,
               v_heads: int = 4, k_dim: int = 8, v_dim: int = 6,
               slots: Sequence[int] | None = None, commits: Sequence[int] | None = None,
               per_channel: int = 0, **fields: int | float | str) -> Sample:
        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        tokens = sum(new)
        inputs = {"qkv": normal(tokens, 2 * k_heads * k_dim + v_heads * v_dim),
                  "decay": -np.abs(normal(tokens, v_heads * (k_dim if per_channel else 1))),
                  "state": normal(len(new) if slots is None else 7, v_heads, k_dim, v_dim),
                  "cu_seqlens": np.cumsum([0, *new]).astype(np.int32),
                  "past_lens": np.array(past, np.int32)}
        if "beta" in optional:
            inputs["beta"] = rng.uniform(0.0, 1.0, (tokens, v_heads)).astype(np.float32)
        if "skip" in optional:
            inputs["skip"] = normal(v_heads)
        if "decay_rate" in optional:
            inputs["decay_rate"] = rng.uniform(0.1, 2.0, v_heads).astype(np.float32)
            if "decay_activation" in fields:  # makes values positive
                inputs["decay_rate"] *= -1
        inputs.update({name: normal(v_heads) for name in ("decay_bias", "beta_bias")
                       if name in optional})
        if slots is not None:
            inputs["state_slots"] = np.array(slots, np.int32)
        if commits is not None:
            inputs["commit_lens"] = np.array(commits, np.int32)
        return Sample({"num_k_heads": k_heads, "num_v_heads": v_heads, "k_head_dim": k_dim,
                       "v_head_dim": v_dim, "decay_per_channel": per_channel, **fields}, inputs)

    delta: dict[str, Any] = {"update_rule": "gated_delta", "l2norm": 1, "scale": 0.25}
    return [
        sample((5, 2, 7), (0, 0, 0), "beta", **delta),
        sample((1, 1, 1), (11, 1, 0), "beta", **delta),
        sample((70,), (3,), "beta", k_heads=1, v_heads=1, **delta),
        sample((1, 2, 0, 0, 5), (9, 1, 4, 0, 2), "beta", "skip"),
        sample((1, 1), (9, 4), "beta", "skip", k_heads=1, scale=0.5),
        sample((3, 6), (0, 2), k_heads=4, l2norm=1),
        sample((4, 1), (2, 5), k_heads=4, k_dim=5, v_dim=3, **delta),
        sample((5, 0, 2), (0, 3, 4), "beta", k_heads=4, per_channel=1, **delta),
        sample((1, 1), (9, 0), "beta", per_channel=1, **delta),
        sample((3, 1), (0, 2), "beta", "skip", per_channel=1),
        sample((3, 2), (0, 2), per_channel=1, **delta),
        sample((1, 1, 1), (5, 0, 2), "beta", "decay_rate", slots=(4, 6, 1), k_dim=16, v_dim=32,
               **delta),
        sample((2, 19, 1), (5, 0, 2), "beta", "skip", "decay_rate", slots=(0, 3, 5), k_dim=16,
               v_dim=8),
        sample((1, 18, 1), (5, 0, 2), "beta", "decay_rate", "decay_bias", k_dim=16, v_dim=8,
               decay_activation="softplus", beta_activation="sigmoid", **delta),
        sample((4, 1), (0, 3), "beta", "skip", "decay_rate", "decay_bias", "beta_bias",
               decay_activation="softplus", beta_activation="softplus"),
        sample((2, 1), (0, 3), "beta", "beta_bias", per_channel=1, beta_activation="sigmoid",
               **delta),
        sample((5, 1, 0, 7, 2, 3), (3, 4, 2, 0, 6, 0), "beta", commits=(2, 1, 0, 6, 0, 0),
               k_dim=16, v_dim=8, **delta),
        sample((21, 4, 1, 40), (5, 1, 3, 0), "beta", "skip", slots=(2, 0, 6, 3),
               commits=(17, 1, 1, 40)),
        sample((3, 2), (7, 8), "beta", commits=(3, 2), **delta),
        sample((4, 1), (6, 2), "beta", per_channel=1, slots=(5, 1), commits=(2, 1), **delta),
        sample((3, 2), (0, 2), per_channel=1, commits=(1, 1), **delta),
    ]


OP = Op(
    name="GatedLinearAttention",
    version=3,
    inputs=("qkv", "decay", "state", "cu_seqlens", "past_lens", "beta?", "skip?",
            "state_slots?", "decay_rate?", "decay_bias?", "beta_bias?", "commit_lens?"),
    outputs=("out", "state_out"),
    fields={"num_k_heads": 0, "num_v_heads": 0, "k_head_dim": 0, "v_head_dim": 0,
            "update_rule": "gated", "scale": 1.0, "l2norm": 0, "decay_per_channel": 0,
            "decay_activation": "none", "beta_activation": "none"},
    required=("num_k_heads", "num_v_heads", "k_head_dim", "v_head_dim"),
    choices={"update_rule": ("gated", "gated_delta"), "l2norm": (0, 1),
             "decay_per_channel": (0, 1), "decay_activation": tuple(REFERENCE),
             "beta_activation": tuple(REFERENCE)},
    shapes=lambda shapes, fields: [
        (*shapes["qkv"][:-1], fields["num_v_heads"] * fields["v_head_dim"]), shapes["state"]],
    dims=_dims,
    shard=(ByStateHeads("num_v_heads", "num_k_heads", "k_head_dim", "v_head_dim", packed="qkv",
                        rows=("decay", "beta"),
                        per_head=("skip", "decay_rate", "decay_bias", "beta_bias")),),
    state=State("state", axis=1),
    columns=(Columns("decay", "decay_activation", "decay_bias", only_if={"decay_per_channel": 0}),
             Columns("beta", "beta_activation", "beta_bias")),
    body=_body,
    bodies={"cpu": _cpu},
    float32_inputs=frozenset({"state", "decay_rate", "decay_bias", "beta_bias"}),
    integer_inputs=frozenset({"cu_seqlens", "past_lens", "state_slots", "commit_lens"}),
    output_dtypes={"state_out": "float32"},
    core_most={"k_head_dim": 256},
    reference=_reference,
    samples=_samples,
)
