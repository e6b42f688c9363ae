"""What an op tells the compiler's passes about itself: how it is divided among ranks, and which of
its inputs and fields they may take for what. Passes ask for these, never for an op's name.

A name in here is that of an input or a field of the op that declares it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ByRows:
    """A rank makes some columns of the output, from some rows of the weights.

    Args:
        inputs: cut along axis 0, as the output then is along its last; a weight, then vectors.
        stacked: so many blocks lie one above the other in each of them, and a rank has the same
            rows of every block: 2 for a gate above what it gates.
    """

    inputs: tuple[str, ...]
    stacked: int = 1


@dataclass(frozen=True)
class ByColumns:
    """Where `x` is cut along its last axis, a rank makes a term of the output, which is their sum.

    Args:
        inputs: cut along axis 1, as `x` is along its last.
        added: what is added to the product; one rank adds it for all.
        only_if: what fields must be for the op to be linear.
        x: the input that is cut.
    """

    inputs: tuple[str, ...]
    added: tuple[str, ...] = ()
    only_if: Mapping[str, int | float | str] = field(default_factory=dict)
    x: str = "x"


@dataclass(frozen=True)
class ByHeads:
    """A rank has some query heads, and the KV heads that they read. The fields `num_heads` and
    `num_kv_heads` say what there is; the first output is cut by query heads.

    Args:
        heads: for each input that is cut along its last axis, what it holds, one behind the other:
            "q" for all query heads, "k" and "v" for all KV heads.
        per_head: inputs cut along axis 0, by query heads.
    """

    heads: Mapping[str, str]
    per_head: tuple[str, ...] = ()


@dataclass(frozen=True)
class ByVocabulary:
    """A rank has some rows of a table and gives zeros for all others, so that the output is a sum.

    Args:
        ids: the rows that are wanted.
        table: cut along axis 0.
        start: the field for the first row that a rank has.
        sharded: the field that is 1 where the table is cut.
        added: what is added to the rows; one rank adds it for all.
    """

    ids: str
    table: str
    start: str
    sharded: str
    added: tuple[str, ...] = ()


@dataclass(frozen=True)
class ByElements:
    """An element of the output depends on the same one of `x` alone: it is cut where `x` is.

    Args:
        vectors: inputs [width], cut along axis 0 as `x` is along its last.
        x: the input that it follows.
    """

    vectors: tuple[str, ...] = ()
    x: str = "x"


@dataclass(frozen=True)
class ByGroups:
    """Groups of columns of the output depend on the same columns of `x` alone, and are cut where
    `x` is, if whole groups are.

    Args:
        groups: the field for how many there are.
        vectors: inputs [width], cut along axis 0 as `x` is along its last.
        x: the input that it follows.
    """

    groups: str
    vectors: tuple[str, ...] = ()
    x: str = "x"


@dataclass(frozen=True)
class ByStateHeads:
    """A rank has some heads of a state, and the keys and queries of their groups.

    Args:
        heads, groups: the fields for how many there are.
        key_dim, value_dim: the fields for the sizes of a key or query, and of a value.
        packed: the input that holds queries, keys and values, one behind the other.
        rows: inputs with equally many columns for each head, one head behind the other.
        per_head: inputs with an element for each head, cut along axis 0.
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
    """A rank has some of the columns between two products of each expert, and makes a term of the
    output, which is their sum.

    Args:
        up: cut along axis 1, where the rows of a column follow one another.
        down: cut along axis 2.
        paired: the field that is 1 where a column has two rows in `up`, else 0.
        added: what is added to the second product; one rank adds it for all.
    """

    up: tuple[str, ...]
    down: str
    paired: str
    added: tuple[str, ...] = ()


@dataclass(frozen=True)
class ByExperts:
    """A rank has some experts and gives zeros for all others, so that the output is a sum.

    Args:
        inputs: cut along axis 0.
        start: the field for the first expert that a rank has.
        sharded: the field that is 1 where experts are cut.
    """

    inputs: tuple[str, ...]
    start: str
    sharded: str


Shard = (ByRows | ByColumns | ByHeads | ByVocabulary | ByElements | ByGroups | ByStateHeads
         | ByInner | ByExperts)


@dataclass(frozen=True)
class Norm:
    """The op is RMSNorm of `x` over the last axis, or LayerNorm where it is `centred`, times `gain`
    [width], plus `bias` [width] if it has one. A GEMM can take it in.
    """

    centred: bool
    gain: str = "weight"
    bias: str = ""
    epsilon: str = "epsilon"
    x: str = "x"


@dataclass(frozen=True)
class Quantized:
    """The op takes a weight matrix in fewer bits, as llmc.plugins.quantization has them; or a stack
    of them, whose groups are stacked likewise.

    Args:
        weight: the input [out, in], or [.., out, in].
        scale: the input of its groups' scales.
        zero: the input of its groups' zeros.
        minimum: the input of its groups' minima, in place of zeros; "": it has none.
        blocks: the input of the scales of its blocks, once more; "": it has none.
        row_sums: the input of the sums of its rows, as numbers; "": there is none.
        rounds: whether the field `activation_dtype` may have what the weight multiplies rounded.
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
    """The op takes `input`, [rows, width], where it lies among the columns of wider rows.

    Args:
        activation: the field for an activation of it; "": there is none.
        bias: the input [width], float32, that is added before that; "": there is none.
        only_if: what fields must be for these two to be taken.
    """

    input: str
    activation: str = ""
    bias: str = ""
    only_if: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Attention:
    """The op knows of sequences. Its fields are those that `ByHeads` speaks of, and `head_dim`.

    Args:
        caches: inputs [rows, num_kv_heads, positions, head_dim] that keep keys and values from step
            to step; the output `<cache>_out` continues each. What has caches is causal.
        memory: inputs that an encoder may make, once for each prompt: keys and values.
        reads: inputs that are the caches of another layer, as it has left them in the same step.
            What has some is causal.
    """

    caches: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """The op knows of sequences, and keeps what it knows of each in a state of one size, however
    long the sequence.

    Args:
        state: the input [rows, …]; the output `<state>_out` continues it.
        axis: of the state, of which a rank has as large a part as of the first output's columns.
    """

    state: str
    axis: int
