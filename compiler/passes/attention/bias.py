"""What is added to the scores, as a table by the distance of key and query."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import cone, token_feeds
from llmc.compiler.graph.rewrite import NoMatch, Settings, values_of
from llmc.compiler.graph.weights import Weight

_LENGTH = 512  # at which a bias is evaluated


def distance_bias(tensor: gs.Tensor, num_heads: int, data: set[int], settings: Settings,
                  causal: bool, cross: bool) -> gs.Constant | NoMatch | None:
    """The table that the attention ops take, see there; None for zeros.

    It is evaluated at one length. Beyond, it must have stopped changing by half of that.

    Raises:
        CannotEvaluate: ONNX Runtime cannot run what computes it.
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
    if cross or bias.ndim != 4 or bias.shape[0] != 1 or bias.shape[1] not in (1, num_heads) \
            or bias.shape[2:] != (length, length):
        return NoMatch(f"the bias of the scores has shape {list(bias.shape)}, not [1, {num_heads}, "
                       f"{length}, {length}] of self-attention", tensor)
    last = length - 1
    ahead = bias[0, :, 0, 1:] if not causal else bias[0, :, 0, :0]  # of keys after the query
    table = np.concatenate([bias[0, :, last], ahead], axis=1)  # by key - query, from -last on
    distance = np.arange(length) - np.arange(length)[:, None]
    seen = distance <= 0 if causal else np.full(distance.shape, True)
    if not np.array_equal(bias[0, :, seen], table[:, last + distance[seen]].T):
        return NoMatch("the bias of the scores is not one by the distance of key and query", tensor)
    reach = max((d for d in range(1, length) for edge, sign in ((0, -1), (-1, 1))
                 if (sign < 0 or not causal)
                 and (table[:, last + sign * (d - 1)] != table[:, edge]).any()), default=0)
    if settings.max_seq_len > length and reach > length // 2:
        return NoMatch(f"the bias of the scores still changes at distance {reach}; compile with "
                       f"--{'' if causal else 'mem_'}max_seq_len of at most {length}", tensor)
    table = np.broadcast_to(table, (num_heads, table.shape[1]))
    table = table[:, last - reach:last + 1][:, ::-1] if causal \
        else table[:, last - reach:last + reach + 1]
    return gs.Constant(f"distance_bias.{tensor.name}", Weight.of(np.ascontiguousarray(table)))
