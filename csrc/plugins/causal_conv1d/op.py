"""Depthwise causal convolution over packed tokens.

Row c of the weight has the coefficients of channel c for the K - 1 previous tokens and the current
one, which is last. Before the first token of a sequence the input is zero. The state keeps the last
K - 1 tokens of a sequence, the newest last; it is not read where past_lens is 0.

    hidden                [num_tokens, channels]
    weight, bias          [channels, K], [channels]
    state                 float32 [batch, K - 1, channels], or [num_states, …] with state_slots
    cu_seqlens, past_lens int32 [batch + 1], [batch]
    state_slots           int32 [batch], distinct: each sequence's state; absent: row b
    commit_lens           int32 [batch], new tokens after which the state is stored; absent: all
    y                     [num_tokens, channels], after `activation`

Comments below use T new tokens, B sequences, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.activations import REFERENCE, activation_text
from llmc.plugins.attention.op import _PAST, _TOKENS, _ints
from llmc.plugins.roles import ByElements, Columns, State
from llmc.plugins.states import committed, kept_states, own_states, state_rows


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    kernel = fields["kernel_size"]
    if kernel < 2:
        raise ValueError(f"kernel_size {kernel} is below 2")
    return {"hidden": ("num_tokens", "channels"), "weight": ("channels", kernel),
            "state": (state_rows(present), kernel - 1, "channels"),
            "cu_seqlens": ("batch_plus_1",), "past_lens": ("batch",), "bias": ("channels",),
            "state_slots": ("batch",), "commit_lens": ("batch",)}


def _body(fields: Fields, present: frozenset[str]) -> str:
    kernel = fields["kernel_size"]
    lines = [
        _TOKENS, _PAST, _ints("c12", 1, 2), *own_states(present),
        "has_state = Greater(past, zero)",
        "has_state_column = Unsqueeze(has_state, c12)",
        "nothing = Constant<value_float=0.0>()",
        "before = Where(has_state_column, own_state, nothing)",
        # State rows, then new rows, [B * (K - 1) + T, C].
        "channels = Shape<start=1>(hidden)",
        "flat_shape = Concat<axis=0>(last, channels)",
        "before_rows = Reshape(before, flat_shape)",
        "rows = Concat<axis=0>(before_rows, hidden)",
        "new_first = Shape<end=1>(before_rows)",
        f"kept = Constant<value_int={kernel - 1}>()",
        "old_first = Mul(sequence, kept)",
        "new_place = Add(token, new_first)",
    ]
    total = ""
    for tap in range(kernel):  # one row of each token's window at a time
        back = kernel - 1 - tap
        lines += [_ints(f"tap_{tap}", tap), f"taps_{tap} = Gather<axis=1>(weight, tap_{tap})",
                  f"factors_{tap} = Transpose(taps_{tap})"]
        place = "new_place"
        if back:
            lines += [f"back_{tap} = Constant<value_int={back}>()",
                      f"is_old_{tap} = Less(offset, back_{tap})",
                      f"offset_{tap} = Add(offset, tap_{tap})",
                      f"old_{tap} = Add(old_first, offset_{tap})",
                      f"new_{tap} = Sub(new_place, back_{tap})",
                      f"place_{tap} = Where(is_old_{tap}, old_{tap}, new_{tap})"]
            place = f"place_{tap}"
        lines += [f"window_{tap} = Gather<axis=0>(rows, {place})",
                  f"term_{tap} = Mul(window_{tap}, factors_{tap})"]
        if total:
            lines.append(f"sum_{tap} = Add({total}, term_{tap})")
        total = f"sum_{tap}" if total else f"term_{tap}"
    if "bias" in present:
        lines.append(f"shifted = Add({total}, bias)")
        total = "shifted"
    return "\n".join([
        *lines, activation_text(fields["activation"], total, "y"),
        # The last K - 1 rows of each sequence, [B, K - 1]: new ones, preceded by the state's.
        *committed(present), _ints("steps_back", *range(-(kernel - 1), 0)),
        "commit_column = Unsqueeze(commits, c1)",
        "end_offset = Add(commit_column, steps_back)",
        "is_before = Less(end_offset, zero)",
        "batch = Shape(past)", "batch_scalar = Squeeze(batch)",
        "number = Range(zero, batch_scalar, one)", "number_column = Unsqueeze(number, c1)",
        "state_first = Mul(number_column, kept)", "state_end = Add(state_first, kept)",
        "of_state = Add(state_end, end_offset)",
        "x_first = Add(starts_column, new_first)", "of_x = Add(x_first, end_offset)",
        "end_place = Where(is_before, of_state, of_x)",
        "own_state_out = Gather<axis=0>(rows, end_place)", *kept_states(present),
    ])


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    x, weight, state = (inputs[name].astype(np.float64) for name in ("hidden", "weight", "state"))
    kept = fields["kernel_size"] - 1
    y, state_out = np.zeros(x.shape), state.copy()
    for b, past in enumerate(inputs["past_lens"]):
        start, stop = inputs["cu_seqlens"][b:b + 2]
        own = inputs["state_slots"][b] if "state_slots" in inputs else b
        rows = np.concatenate([state[own] if past else np.zeros(state[own].shape), x[start:stop]])
        for token in range(start, stop):
            y[token] = (rows[token - start:token - start + kept + 1] * weight.T).sum(0)
        commit = inputs["commit_lens"][b] if "commit_lens" in inputs else stop - start
        state_out[own] = rows[commit:commit + kept]
    return [REFERENCE[fields["activation"]](y + inputs.get("bias", 0.0)), state_out]


def _samples(rng: np.random.Generator) -> list[Sample]:
    def sample(new: Sequence[int], past: Sequence[int], kernel: int, bias: bool = False,
               activation: str = "none", channels: int = 6,
               slots: Sequence[int] | None = None,
               commits: Sequence[int] | None = None) -> Sample:
        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        inputs = {"hidden": normal(sum(new), channels), "weight": normal(channels, kernel),
                  "state": normal(len(new) if slots is None else 7, kernel - 1, channels),
                  "cu_seqlens": np.cumsum([0, *new]).astype(np.int32),
                  "past_lens": np.array(past, np.int32)}
        if bias:
            inputs["bias"] = normal(channels)
        if slots is not None:
            inputs["state_slots"] = np.array(slots, np.int32)
        if commits is not None:
            inputs["commit_lens"] = np.array(commits, np.int32)
        return Sample({"kernel_size": kernel, "activation": activation}, inputs)

    return [
        sample((5, 2, 7), (0, 0, 0), 4, activation="silu"),
        sample((1, 1, 1), (11, 1, 0), 4, bias=True, activation="silu"),
        sample((6,), (3,), 3),
        sample((1, 2, 0, 0, 5), (9, 1, 4, 0, 2), 4, bias=True),
        sample((3, 1), (0, 7), 2, channels=1),
        sample((1, 1, 1), (3, 0, 8), 4, slots=(5, 6, 0), channels=8),
        sample((9, 1, 2), (1, 4, 0), 4, bias=True, activation="silu", slots=(2, 0, 6)),
        sample((5, 1, 0, 7, 2, 3), (3, 4, 2, 0, 6, 0), 4, bias=True, activation="silu",
               commits=(2, 1, 0, 6, 0, 0), channels=8),
        sample((9, 3, 1), (1, 4, 8), 3, slots=(2, 0, 6), commits=(5, 1, 1)),
    ]


OP = Op(
    name="CausalConv1d",
    version=2,
    inputs=("hidden", "weight", "state", "cu_seqlens", "past_lens", "bias?", "state_slots?",
            "commit_lens?"),
    outputs=("y", "state_out"),
    fields={"kernel_size": 0, "activation": "none"},
    required=("kernel_size",),
    choices={"activation": tuple(REFERENCE)},
    shapes=lambda shapes, fields: [shapes["hidden"], shapes["state"]],
    dims=_dims,
    shard=(ByElements(("weight", "bias"), "hidden"),),
    state=State("state", axis=2),
    columns=(Columns("hidden"),),
    body=_body,
    float32_inputs=frozenset({"state"}),
    integer_inputs=frozenset({"cu_seqlens", "past_lens", "state_slots", "commit_lens"}),
    output_dtypes={"state_out": "float32"},
    core_most={"kernel_size": 8},
    reference=_reference,
    samples=_samples,
)
