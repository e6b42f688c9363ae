"""Determine which keys an exported attention mask shows to a query, by probing.

At small lengths the mask is run as it is. For far positions, the positions 0, 1, 2, … that it
computes are replaced with a few up to max_seq_len, so that windows of any width are found. On near
positions this is compared with the unchanged mask.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE, LAYOUT, Piece, cone, token_feeds, with_positions
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    Settings,
    constant,
    producer,
    scalar,
    values_of,
)

_MASK_OPS = ELEMENTWISE | LAYOUT | frozenset({
    "Range", "ConstantOfShape", "Trilu", "CumSum", "GatherND", "ScatterND", "Shape", "Tile",
    "ReduceAll", "ReduceMax", "ReduceMin", "ReduceSum", "Size", "Mod", "Floor", "Ceil", "Pad",
    "GatherElements", "ScatterElements", "OneHot", "EyeLike", "NonZero", "Xor", "BitwiseAnd",
})
_WHOLE = 2048  # maximum positions of an unchanged mask: 4 million pairs
_MASKED = -1e4  # keys with lower scores are masked
_FEW = 7  # tokens; too few for a bias by distance to come near _MASKED


@dataclass(frozen=True)
class Reach:
    """The keys that a mask shows: the last `window`, or those in the query's `chunk`.

    Args:
        window: keys up to the query's, or if not causal the most distant ones; 0: all.
        chunk: positions in a chunk; 0: all are one.
        causal: only keys up to the query's.
    """

    window: int = 0
    chunk: int = 0
    causal: bool = True

    def shows(self, positions: np.ndarray) -> np.ndarray:
        """bool [n, n]: whether a query (axis 0) sees a key (axis 1), at these positions."""
        query, key = positions[:, None].astype(np.int32), positions[None].astype(np.int32)
        seen: np.ndarray = key <= query
        if not self.causal:
            seen = np.abs(query - key) <= (self.window or int(positions.max()))
        elif self.window:
            seen &= query - key < self.window
        if self.chunk:
            seen &= query // self.chunk == key // self.chunk
        return seen


class MaskProver:
    """Evaluates masks, with a cache: most layers of a model share theirs."""

    def __init__(self, data: set[int], settings: Settings) -> None:
        self._data = data
        self._max_seq_len = settings.max_seq_len
        self._all_causal = settings.causal
        self._known: dict[bytes, Reach | NoMatch] = {}
        # By a part's id: the part (which keeps the id in use) and its bias.
        self._biases: dict[int, tuple[gs.Tensor, gs.Tensor | None]] = {}

    def reach(self, parts: Sequence[gs.Tensor], causal: bool,
              factors: Sequence[gs.Tensor] = ()) -> Reach | NoMatch:
        """Evaluate a mask.

        Args:
            parts: combined, with the causal mask too if `causal`.
            causal: whether the op masks causally itself.
            factors: of the scores; must be 1 for visible keys.

        Returns:
            The sliding window or chunk size, 0 if max_seq_len tokens do not reach it; or the
            reason why the mask is not causal.
        """
        pieces: list[Piece] = []
        multiplied: list[Piece] = []
        for factor in factors:
            found = cone(factor, self._data, _MASK_OPS)
            if isinstance(found, NoMatch):
                return found
            multiplied.append(found)
        for part in parts:
            piece = self._piece(part)
            if isinstance(piece, NoMatch):
                return piece
            pieces += [piece] if piece is not None else []
        if not pieces:
            return self.unmasked(causal, parts[0])
        key = b"".join(piece.key for piece in (*pieces, *multiplied)) + bytes([causal, len(pieces)])
        if key not in self._known:
            try:
                self._known[key] = _reach(_Mask(pieces, causal, multiplied), self._max_seq_len,
                                          self._all_causal)
            except _NoProof as unsupported:
                self._known[key] = unsupported.reason
        return self._known[key]

    def unmasked(self, causal: bool, value: object) -> Reach | NoMatch:
        """What attention without a mask shows, given whether the op masks causally itself."""
        if self._all_causal and not causal:
            return NoMatch("attention without a mask is not causal", value)
        return Reach(causal=causal)

    def bias(self, part: gs.Tensor) -> gs.Tensor | None:
        """The bias that a part of the mask adds to the scores of visible keys, or None.

        All of the part if it masks nothing, else the other operand of a masking value.
        """
        if id(part) in self._data:
            return None
        if id(part) not in self._biases:
            beside = _bias_beside_mask(part)
            if beside is None and _masks_nothing(part, self._data):
                beside = part
            self._biases[id(part)] = part, beside
        return self._biases[id(part)][1]

    def _piece(self, part: gs.Tensor) -> Piece | NoMatch | None:
        """The subgraph of one part of the mask, None if the part masks nothing."""
        added = self.bias(part)
        if added is part:
            return None
        if id(part) not in self._data and added is None:
            return cone(part, self._data, _MASK_OPS)
        return _where_piece(part, self._data, added)


class _NoProof(Exception):
    """A mask is not causal with a window or chunks."""

    def __init__(self, reason: str, value: object) -> None:
        super().__init__(reason)
        self.reason = NoMatch(reason, value)


def _bias_beside_mask(part: gs.Tensor) -> gs.Tensor | None:
    """x in Where(condition, x, number), if the number masks a key."""
    where = producer(part)
    if where is None or where.op != "Where":
        return None
    numbers = [scalar(tensor) for tensor in where.inputs[1:]]
    if sum(number is None for number in numbers) != 1 or \
            not all(number is None or number <= _MASKED for number in numbers):
        return None
    return next(tensor for tensor, number in zip(where.inputs[1:], numbers, strict=True)
                if number is None)


def _masks_nothing(part: gs.Tensor, data: set[int]) -> bool:
    """Whether a part adds values to the scores of a few tokens and masks none."""
    piece = cone(part, data, _MASK_OPS)
    if isinstance(piece, NoMatch):
        return False
    weights = {t.name: values_of(t).load() for t in piece.inputs if isinstance(t, gs.Constant)}
    try:
        added = piece.run({**_feeds(piece, np.arange(_FEW)), **weights})
    except CannotEvaluate:
        return False
    return bool(added.dtype != bool and added.any() and (added > _MASKED).all())


def _where_piece(part: gs.Tensor, data: set[int], beside: gs.Tensor | None) -> Piece | NoMatch:
    """The subgraph of a Where of scores, or of a bias `beside`, with zeros in their place."""
    where = producer(part)
    assert where is not None
    scores = [t for t in where.inputs if id(t) in data or t is beside]
    conditions: list[Piece] = []
    for tensor in where.inputs:
        if id(tensor) not in data and tensor is not beside:
            condition = cone(tensor, data, _MASK_OPS)
            if isinstance(condition, NoMatch):
                return condition
            conditions.append(condition)
    nodes = {id(n): n for c in conditions for n in c.nodes}
    inputs = {id(t): t for c in conditions for t in c.inputs}
    return Piece((*nodes.values(), where), (*inputs.values(), *scores), (part,))


class _Mask:
    """The parts of a mask, which must all show a key, and factors of its score."""

    def __init__(self, pieces: Sequence[Piece], causal: bool, factors: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.output = pieces[0].output
        self._causal = causal
        self._factors = factors
        self._far = [with_positions(piece, partial(_near_feeds, piece))
                     for piece in (*pieces, *factors)]

    def takes_positions(self) -> bool:
        """Whether `far` agrees with `near` at near positions in any order.

        It does not if values depend on the index instead of the position, as in a table.
        """
        sample = np.array([30, 1, 62, 5, 12, 0, 11, 63, 47, 2, 61])
        try:
            return np.array_equal(self.far(sample), self.near(64)[np.ix_(sample, sample)])
        except CannotEvaluate:
            return False

    def near(self, length: int) -> np.ndarray:
        """bool [length, length]: whether a query (axis 0) sees a key (axis 1), from position 0."""
        return self._all(np.arange(length), [piece.run(_feeds(piece, np.arange(length)))
                                             for piece in (*self.pieces, *self._factors)])

    def far(self, positions: np.ndarray) -> np.ndarray:
        """bool [n, n]: the same for any n positions."""
        return self._all(positions, [
            far.piece.run(_feeds(far.piece, positions) | far.feeds(positions))
            for far in self._far])

    def _all(self, positions: np.ndarray, masks: Sequence[np.ndarray]) -> np.ndarray:
        seen = np.ones((len(positions),) * 2, bool)
        if self._causal:
            seen = positions[None] <= positions[:, None]
        for piece, mask in zip(self.pieces, masks, strict=False):
            seen &= _visible(piece, mask, len(positions))
        for piece, factor in zip(self._factors, masks[len(self.pieces):], strict=True):
            if (np.broadcast_to(factor, np.broadcast_shapes(factor.shape, seen.shape))[..., seen]
                    != 1).any():
                raise _NoProof("the scores of visible keys are multiplied by a value that is not "
                               "constant", piece.output)
        return seen

    def numbers(self) -> Iterator[int]:
        """All scalar constants of the mask."""
        for piece in self.pieces:
            for tensor in (t for node in piece.nodes for t in node.inputs):
                array = constant(tensor)
                if array is not None and array.size == 1 and array.dtype.kind in "iuf":
                    number = abs(float(array.reshape(-1)[0]))
                    if 1 < number < 1 << 40:
                        yield int(number)


def _reach(mask: _Mask, max_seq_len: int, causal: bool) -> Reach:
    """The keys that a mask shows.

    Args:
        mask: the mask.
        max_seq_len: up to which it is evaluated.
        causal: whether it must be causal.
    """
    try:
        causal = causal or not mask.near(2)[0, 1]
    except CannotEvaluate as error:
        raise _NoProof(f"the mask: {error.reason.reason}", error.output) from error
    numbers = {n for n in mask.numbers() if n < max_seq_len}
    lengths = sorted({1, 2, 7, 64, *(n + 2 for n in numbers)})
    try:
        if max_seq_len > _WHOLE and mask.takes_positions():
            found = {_far_reach(mask, numbers, max_seq_len, causal)}
        elif max_seq_len <= 2 * _WHOLE:
            found, lengths = set(), [*lengths, max_seq_len]
        else:
            raise _NoProof(f"the mask cannot be evaluated at more than {2 * _WHOLE} positions; "
                           f"compile with --max_seq_len of at most {2 * _WHOLE}", mask.output)
        for length in lengths:
            if length <= min(max_seq_len, 2 * _WHOLE):
                seen = mask.near(length)
                size = 0 if seen[:, 0].all() else int(seen[:, 0].argmin())
                found.add(_form(mask, seen, np.arange(length), size, causal))
    except CannotEvaluate as error:
        raise _NoProof(f"the mask: {error.reason.reason}", error.output) from error
    found.discard(Reach(causal=causal))
    if len(found) > 1:
        sizes = sorted({reach.window or reach.chunk for reach in found})
        raise _NoProof(f"the mask's window changes with the length: {sizes}", mask.output)
    return found.pop() if found else Reach(causal=causal)


def _far_reach(mask: _Mask, numbers: set[int], max_seq_len: int, causal: bool) -> Reach:
    """Window or chunks by sampled positions up to max_seq_len."""
    last = max_seq_len - 1
    some = np.random.default_rng(0).integers(0, max_seq_len, 64)
    positions = np.unique([p for p in (
        *range(8), *some, last // 2, last - 1, last,
        *(n * k + d for n in numbers for k in (1, 2) for d in (-2, -1, 0, 1, 2)))
        if 0 <= p <= last])
    seen, size = mask.far(positions), 0
    if not seen[:, 0].all():
        size = bisect_left(range(max_seq_len), True, lo=1, key=lambda position: not mask.far(
            np.array([0, position]))[1, 0])  # the first query that does not see the first key
    return _form(mask, seen, positions, size, causal)


def _form(mask: _Mask, seen: np.ndarray, positions: np.ndarray, size: int, causal: bool) -> Reach:
    """The window or chunks of a mask that shows the first key to `size` queries."""
    if not causal:
        forms: tuple[Reach, ...] = (Reach(window=max(size - 1, 0), causal=False),)
    else:
        forms = (Reach(window=size), Reach(chunk=size)) if size else (Reach(),)
    for reach in forms:
        if np.array_equal(seen, reach.shows(positions)):
            return reach
    raise _NoProof(f"the mask is not {'causal' if causal else 'full'} at length "
                   f"{positions[-1] + 1}", mask.output)


def _visible(piece: Piece, mask: np.ndarray, length: int) -> np.ndarray:
    """bool [length, length] of a boolean or additive mask."""
    try:
        mask = np.broadcast_to(mask, (1, mask.shape[1] if mask.ndim == 4 else 1, length, length))[0]
    except ValueError:
        raise _NoProof(f"the mask has shape {list(mask.shape)}, not [1, 1, {length}, {length}]",
                       piece.output) from None
    seen = mask if mask.dtype == bool else mask > _MASKED
    if mask.dtype != bool and np.abs(mask[seen]).max(initial=0) > 0:
        raise _NoProof("the mask contains a bias of the scores", piece.output)
    if (seen != seen[:1]).any():
        raise _NoProof("the mask differs between heads", piece.output)
    shown: np.ndarray = seen[0]
    return shown


def _near_feeds(piece: Piece, length: int) -> dict[str, np.ndarray]:
    return _feeds(piece, np.arange(length))


def _feeds(piece: Piece, positions: np.ndarray) -> dict[str, np.ndarray]:
    length = len(positions)
    feeds = token_feeds(1, length, positions)
    for tensor in piece.inputs:
        if tensor.name not in feeds:
            feeds[tensor.name] = np.zeros((1, 1, length, length), np.float32)
    return feeds
