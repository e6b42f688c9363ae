"""Intermediate ops for layers with recurrent state.

The frontend emits them; the states pass replaces them with ops that take the state as input.
Neither reaches an artifact, so they are not in the registry. Their function bodies, in which every
sequence begins with a zero state, serve to run the exported graph.
"""

from __future__ import annotations

from llmc.plugins import Fields, Op
from llmc.plugins.causal_conv1d.op import OP as CAUSAL_CONV1D
from llmc.plugins.linear_attention.op import OP as LINEAR_ATTENTION


def _from_the_start(op: Op, rows: str, others: list[str], state: list[int], fields: Fields,
                    present: frozenset[str]) -> str:
    """The body of an op of packed tokens, for inputs [batch, seq, …] and a zero state.

    The inputs are named `<name>_sequences`. `state` has the sizes of the state, -1 for a row's.
    """
    assert op.body is not None
    lines = [f"row = Shape<start=2>({rows}_sequences)",
             f"sequences = Shape<end=1>({rows}_sequences)",
             f"seq = Shape<start=1, end=2>({rows}_sequences)",
             "any = Constant<value_ints=[-1]>()", "seq_number = Squeeze(seq)",
             "sequences_number = Squeeze(sequences)", "nil = Constant<value_int=0>()",
             "unit = Constant<value_int=1>()", "borders = Add(sequences_number, unit)",
             "numbers = Range(nil, borders, unit)", "cu_wide = Mul(numbers, seq_number)",
             "cu_seqlens = Cast<to=6>(cu_wide)",
             "nil_int = Cast<to=6>(nil)", "past_lens = Expand(nil_int, sequences)",
             "nil_float = Cast<to=1>(nil)"]
    sizes = []
    for index, size in enumerate(state):
        lines += [] if size < 0 else [f"size_{index} = Constant<value_ints=[{size}]>()"]
        sizes.append("row" if size < 0 else f"size_{index}")
    lines += [f"state_shape_0 = Concat<axis=0>(sequences, {', '.join(sizes)})",
              "state = Expand(nil_float, state_shape_0)"]
    for name in (rows, *others):
        lines += [f"{name}_row = Shape<start=2>({name}_sequences)",
                  f"{name}_flat = Concat<axis=0>(any, {name}_row)",
                  f"{name} = Reshape({name}_sequences, {name}_flat)"]
    return "\n".join([
        *lines, op.body(fields, present),
        f"made_row = Shape<start=1>({op.outputs[0]})",
        "made_shape = Concat<axis=0>(sequences, seq, made_row)",
        f"made = Reshape({op.outputs[0]}, made_shape)"])


def _convolution(fields: Fields, present: frozenset[str]) -> str:
    return _from_the_start(CAUSAL_CONV1D, "hidden", [], [fields["kernel_size"] - 1, -1], fields,
                           present)


def _recurrence(fields: Fields, present: frozenset[str]) -> str:
    given = frozenset(name.removesuffix("_sequences") for name in present)
    sizes = [fields[key] for key in ("num_v_heads", "k_head_dim", "v_head_dim")]
    return _from_the_start(LINEAR_ATTENTION, "qkv", sorted({"decay", "beta"} & given), sizes,
                           fields, given)


# CausalConv1d of [batch, seq, channels].
CONVOLUTION = Op(
    name="Convolution",
    version=1,
    inputs=("hidden_sequences", "weight", "bias?"),
    outputs=("made",),
    fields=CAUSAL_CONV1D.fields,
    required=CAUSAL_CONV1D.required,
    shapes=lambda shapes, fields: [shapes["hidden_sequences"]],
    body=_convolution,
)
# GatedLinearAttention of [batch, seq, …].
RECURRENCE = Op(
    name="Recurrence",
    version=1,
    inputs=("qkv_sequences", "decay_sequences", "beta_sequences?", "skip?"),
    outputs=("made",),
    fields=LINEAR_ATTENTION.fields,
    required=LINEAR_ATTENTION.required,
    shapes=lambda shapes, fields: [(*shapes["qkv_sequences"][:-1],
                                    fields["num_v_heads"] * fields["v_head_dim"])],
    body=_recurrence,
)
