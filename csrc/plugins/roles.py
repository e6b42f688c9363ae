"""Roles of ops for compiler passes: sharding, and inputs and attributes that passes may change.

Passes query these roles, never an op's name. Names are those of an input or attribute of the op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ByRows:
    """Column-parallel: a rank computes some columns of the output from some rows of the weights.

    Args:
        inputs: sharded along axis 0, as the output then is along its last; a weight, then vectors.
        stacked: number of blocks stacked in each of them; a rank has the same rows of each block: 2
            for a gate above its up.
    """

    inputs: tuple[str, ...]
    stacked: int = 1


@dataclass(frozen=True)
class ByColumns:
    """Row-parallel: with `x` sharded along its last axis, ranks compute terms of a sum.

    Args:
        inputs: sharded along axis 1, as `x` is along its last.
        added: what is added to the product; one rank adds it for all.
        only_if: values of attributes for which the op is linear.
        x: the input that is sharded.
    """

    inputs: tuple[str, ...]
    added: tuple[str, ...] = ()
    only_if: Mapping[str, int | float | str] = field(default_factory=dict)
    x: str = "x"


@dataclass(frozen=True)
class ByHeads:
    """Head-parallel: a rank has some query heads, and the KV heads that they read.

    Attributes `num_heads` and `num_kv_heads` have the numbers; the first output is sharded by query
    heads.

    Args:
        heads: for each input that is sharded along its last axis its contents, in order: "q" for
            all query heads, "k" and "v" for all KV heads.
        per_head: inputs sharded along axis 0, by query heads.
    """

    heads: Mapping[str, str]
    per_head: tuple[str, ...] = ()


@dataclass(frozen=True)
class ByVocabulary:
    """Vocabulary-parallel: a rank has some rows of a table, and ranks compute terms of a sum.

    Args:
        ids: indices of rows.
        table: sharded along axis 0.
        start: the attribute for the rank's first row.
        sharded: the attribute that is 1 if the table is sharded.
        added: what is added to the rows; one rank adds it for all.
    """

    ids: str
    table: str
    start: str
    sharded: str
    added: tuple[str, ...] = ()


@dataclass(frozen=True)
class ByElements:
    """Elementwise in `x`: sharded as `x` is.

    Args:
        vectors: inputs [width], sharded along axis 0 as `x` is along its last.
        x: the input that it follows.
    """

    vectors: tuple[str, ...] = ()
    x: str = "x"


@dataclass(frozen=True)
class ByGroups:
    """Groupwise in `x`: sharded as `x` is, by whole groups of columns.

    Args:
        groups: the attribute for the number of groups.
        vectors: inputs [width], sharded along axis 0 as `x` is along its last.
        x: the input that it follows.
    """

    groups: str
    vectors: tuple[str, ...] = ()
    x: str = "x"


@dataclass(frozen=True)
class ByStateHeads:
    """A rank has some heads of a recurrent state, and the keys and queries of their groups.

    Args:
        heads, groups: the attributes for their numbers.
        key_dim, value_dim: the attributes for the sizes of a key or query, and of a value.
        packed: the input with queries, keys and values, in this order.
        rows: inputs with equally many columns per head, head by head.
        per_head: inputs with an element per head, sharded along axis 0.
    """

    heads: str
    groups: str
    key_dim: str
    value_dim: str
    packed: str
    rows: tuple[str, ...]
    per_head: tuple[str, ...] = ()


@dataclass(frozen=True)
class ByInner:
    """A rank has some columns of each expert's hidden layer, and ranks compute terms of a sum.

    Args:
        up: sharded along axis 1; the rows of a column are adjacent.
        down: sharded along axis 2.
        paired: the attribute that is 1 if a column has two rows in `up`.
        added: what is added to the second product; one rank adds it for all.
    """

    up: tuple[str, ...]
    down: str
    paired: str
    added: tuple[str, ...] = ()


@dataclass(frozen=True)
class ByExperts:
    """Expert-parallel: a rank has some experts, and ranks compute terms of a sum.

    Args:
        inputs: sharded along axis 0.
        start: the attribute for the rank's first expert.
        sharded: the attribute that is 1 if experts are sharded.
    """

    inputs: tuple[str, ...]
    start: str
    sharded: str


Shard = (ByRows | ByColumns | ByHeads | ByVocabulary | ByElements | ByGroups | ByStateHeads
         | ByInner | ByExperts)


@dataclass(frozen=True)
class Norm:
    """RMSNorm of `x` over the last axis, or LayerNorm if `centred`, that a GEMM can absorb.

    It multiplies by `gain` [width], and adds `bias` [width] if it has one.
    """

    centred: bool
    gain: str = "weight"
    bias: str = ""
    epsilon: str = "epsilon"
    x: str = "x"


@dataclass(frozen=True)
class Quantized:
    """A weight matrix, or stack of matrices, quantized as in llmc.plugins.quantization.

    Args:
        weight: the input [out, in], or [.., out, in].
        scale: the input with group scales.
        zero: the input with group zeros.
        minimum: the input with group minima, in place of zeros; "": none.
        blocks: the input with block scales, in addition; "": none.
        row_sums: the input with the sums of dequantized rows; "": none.
        rounds: whether attribute `activation_dtype` may request quantized activations.
    """

    weight: str = "weight"
    scale: str = "weight_scale"
    zero: str = "weight_zero"
    minimum: str = "weight_min"
    blocks: str = ""
    row_sums: str = ""
    rounds: bool = False


@dataclass(frozen=True)
class Columns:
    """An input [rows, width] that may be columns of wider rows.

    Args:
        activation: the attribute for an activation of it; "": none.
        bias: the input [width], float32, that is added before that; "": none.
        only_if: values of attributes for which these two are supported.
    """

    input: str
    activation: str = ""
    bias: str = ""
    only_if: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Attention:
    """Attention over sequences. Its attributes are those of `ByHeads`, and `head_dim`.

    Args:
        caches: inputs [rows, num_kv_heads, positions, head_dim] that keep keys and values between
            steps, continued by outputs `<cache>_out`. An op with caches is causal.
        memory: inputs from an encoder, computed once per prompt: keys and values.
        reads: inputs that are another layer's caches, written earlier in the same step. An op with
            such inputs is causal.
    """

    caches: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """A recurrent state of constant size per sequence.

    Args:
        state: the input [rows, …], continued by the output `<state>_out`.
        axis: axis of the state that is sharded as the first output's columns are.
    """

    state: str
    axis: int
