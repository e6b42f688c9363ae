"""The bias of attention scores as a table by the distance of key and query, or by the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import Piece, close, cone, token_feeds
from llmc.compiler.graph.rewrite import NoMatch, Settings, values_of
from llmc.compiler.graph.weights import Weight

_LENGTH = 512  # at which a bias is evaluated
_ROUNDING = 1e-6  # relative to the largest value, of a product in float32


@dataclass(frozen=True)
class Bias:
    """The name of the attention op's bias input, and its table."""

    name: str
    table: gs.Constant


def score_bias(tensor: gs.Tensor, num_heads: int, data: set[int], settings: Settings,
               causal: bool, cross: bool) -> Bias | NoMatch | None:
    """The table of a bias, for the attention ops' inputs; None for zeros.

    A bias that is equal for all queries, as in some forms of ALiBi, is one by distance too if it
    is linear in the key's position: they differ by a constant per query, which softmax ignores. Any
    other bias by distance is evaluated at one length; it must be constant from half that distance.

    Raises:
        CannotEvaluate: ONNX Runtime cannot run the bias's subgraph.
    """
    piece = cone(tensor, data, frozenset()) if id(tensor) not in data else \
        NoMatch("the bias of the scores depends on the tokens", tensor)
    if isinstance(piece, NoMatch):
        return piece
    length = min(_LENGTH, settings.max_seq_len)
    weights = {t.name: values_of(t).load() for t in piece.inputs if isinstance(t, gs.Constant)}
    bias = piece.run({**token_feeds(1, length), **weights})
    if not bias.any():
        return None
    heads = bias.reshape(1, -1, *bias.shape[-2:]).shape[1] if bias.ndim > 2 else 1
    if cross or heads not in (1, num_heads) or bias.shape[-2:] not in ((length, length),
                                                                       (1, length)):
        return NoMatch(f"the bias of the scores has shape {list(bias.shape)}, not [1, {num_heads}, "
                       f"{length}, {length}] of self-attention", tensor)
    bias = bias.reshape(1, heads, *bias.shape[-2:])
    if bias.shape[2] == 1:
        return _by_key(tensor, piece, weights, num_heads, settings.max_seq_len, causal)
    last = length - 1
    ahead = bias[0, :, 0, 1:] if not causal else bias[0, :, 0, :0]  # of keys after the query
    table = np.concatenate([bias[0, :, last], ahead], axis=1)  # by key - query, from -last on
    distance = np.arange(length) - np.arange(length)[:, None]
    seen = distance <= 0 if causal else np.full(distance.shape, True)
    if not np.array_equal(bias[0, :, seen], table[:, last + distance[seen]].T):
        return NoMatch("the bias of the scores does not depend on the distance of key and query "
                       "alone", tensor)
    reach = max((d for d in range(1, length) for edge, sign in ((0, -1), (-1, 1))
                 if (sign < 0 or not causal)
                 and (table[:, last + sign * (d - 1)] != table[:, edge]).any()), default=0)
    if settings.max_seq_len > length and reach > length // 2:
        return NoMatch(f"the bias of the scores still changes at distance {reach}; compile with "
                       f"--{'' if causal else 'mem_'}max_seq_len of at most {length}", tensor)
    table = np.broadcast_to(table, (num_heads, table.shape[1]))
    table = table[:, last - reach:last + 1][:, ::-1] if causal \
        else table[:, last - reach:last + reach + 1]
    return _table("distance_bias", tensor, table)


def _by_key(tensor: gs.Tensor, piece: Piece, weights: Mapping[str, np.ndarray], num_heads: int,
            max_seq_len: int, causal: bool) -> Bias | NoMatch:
    """The table of a bias `[num_heads, 1, keys]`: by distance if it is linear, else by key.

    It is evaluated at max_seq_len and at all lengths that are powers of 2.
    """
    def relative(length: int) -> np.ndarray:
        """Bias relative to the first key's, float64 `[heads, length]`."""
        bias = piece.run({**token_feeds(1, length), **weights}).reshape(-1, length)
        return np.asarray(bias.astype(np.float64) - bias[:, :1])

    by_key, keys = relative(max_seq_len), np.arange(max_seq_len)
    for length in (1 << n for n in range(1, max_seq_len.bit_length())):
        if not close(relative(length), by_key[:, :length], _ROUNDING):
            return NoMatch(f"the bias of the scores differs in sequences of {length} tokens",
                           tensor)
    slopes = by_key[:, -1:] / keys[-1]
    if not close(by_key, slopes * keys, _ROUNDING):
        if not causal:
            return NoMatch("the bias of the scores does not depend on the distance of key and "
                           "query alone", tensor)
        return _table("key_bias", tensor, np.broadcast_to(by_key, (num_heads, max_seq_len)))
    distances = np.arange(0 if causal else 1 - max_seq_len, max_seq_len)
    table = slopes * (-distances if causal else distances)
    return _table("distance_bias", tensor, np.broadcast_to(table, (num_heads, table.shape[1])))


def _table(name: str, tensor: gs.Tensor, table: np.ndarray) -> Bias:
    return Bias(name, gs.Constant(f"{name}.{tensor.name}",
                                  Weight.of(np.ascontiguousarray(table, np.float32))))
