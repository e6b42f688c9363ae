"""Classification of a model's attention masks by evaluating its mask functions.

A model requests each kind of mask from transformers by a function of batch, head, query and key.
llmc returns a `Mask` node, which the model passes to its layers. The graph then shows each layer's
mask, and evaluating the function shows its kind; the config is not consulted.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from llmc.errors import LlmcError

MaskFunction = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]

_POSITIONS = 1 << 16  # minimum number of positions to evaluate
_BLOCK = 1 << 22  # pairs of query and key per evaluation
# Factories of mask functions in transformers, with their meaning for errors.
_KINDS = {
    "blockwise_overlay": "bidirectional attention within blocks of tokens, as for images",
    "sliding_window_bidirectional_overlay": "a bidirectional sliding window",
}


@dataclass(frozen=True)
class Visible:
    """The keys that a mask shows to queries.

    Args:
        causal: only keys up to the query's position; else all keys.
        window: of causal attention, only the last `window` of these; else only keys at a distance
            of at most `window`. 0: no window.
        positions: number of positions that were evaluated.
        chunk: only keys of the query's chunk of `chunk` positions; 0: no chunks.
    """

    causal: bool
    window: int
    positions: int
    chunk: int = 0

    def __str__(self) -> str:
        if not self.causal:
            return f"keys at a distance of {self.window}" if self.window else "all keys"
        if self.chunk:
            return f"chunks of {self.chunk}"
        return f"a window of {self.window}" if self.window else "all keys up to the query's"

    def has_window(self, claimed: int) -> bool:
        """Whether a window of `claimed` keys (0: none) is equivalent."""
        return claimed == self.window or (
            not self.window and not self.chunk and claimed >= self.positions)


def evaluate(function: MaskFunction, max_positions: int | None = None) -> Visible:
    """Classify a mask function, by evaluating it around and beyond every number in it.

    Args:
        function: the mask function.
        max_positions: the model's maximum; None: unknown.

    Raises:
        LlmcError: it is neither full (optionally with a window) nor causal (optionally with a
            window or chunks), or it cannot be evaluated.
    """
    last = max(max_positions or 0, _POSITIONS) - 1
    sizes = sorted({n for n in _numbers(function, set()) if 1 < n <= last})
    last = max(last, 3 * max(sizes, default=0))
    queries = torch.tensor(sorted(q for q in {
        0, 1, 2, 6, 7, 63, 64, 100, 1000, 5000, 9001, last // 2, last - 1, last,
        *(n * k + d for n in sizes for k in (1, 2) for d in (-2, -1, 0, 1))} if 0 <= q <= last))
    keys = torch.arange(last + 2)
    try:
        visible = _check_rows(function, queries, keys)
    except Exception as error:  # any error of the model's function
        raise _unknown(function) from error
    if visible is None:
        raise _unknown(function)
    return visible


def evaluate_prompt(function: MaskFunction, length: int) -> Visible | None:
    """Classify a mask function of one prompt's length; None if `Visible` cannot express it."""
    return _check_rows(function, torch.arange(length - 1), torch.arange(length))


def _check_rows(function: MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> \
        Visible | None:
    """Classify the mask of these queries; None if `Visible` cannot express it."""
    rows = list(queries.split(max(1, _BLOCK // len(keys))))
    seen = [visible_keys(function, block, keys) for block in rows]
    positions = len(keys) - 1
    if all(bool(block.all()) for block in seen):
        return Visible(False, 0, positions)
    span = max(int(block.sum(1).max()) for block in seen)

    def shows(first: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether each query sees exactly the keys from `first(query)` to its own position."""
        return all(torch.equal(visible, (keys <= block[:, None]) & (keys >= first(block)[:, None]))
                   for block, visible in zip(rows, seen, strict=True))

    reach = int(seen[0][0].sum()) - 1 if len(queries) and not int(queries[0]) else 0
    if reach > 0 and all(torch.equal(visible, (keys - block[:, None]).abs() <= reach)
                         for block, visible in zip(rows, seen, strict=True)):
        return Visible(False, reach, positions)
    if shows(lambda query: query - span + 1):
        return Visible(True, 0 if span == positions else span, positions)
    if span and shows(lambda query: query - query % span):
        return Visible(True, 0, positions, span)
    return None


def visible_keys(function: MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the mask, bool [queries, keys]. It must be equal for all heads."""
    first, other = (function(torch.tensor(0), torch.tensor(head), queries[:, None], keys[None])
                    .expand(len(queries), len(keys)) for head in (0, 1))
    if not torch.equal(first, other):
        raise ValueError("the mask differs between heads")
    return first


def _unknown(function: MaskFunction) -> LlmcError:
    factories = {name.split(".")[0] for name in _names(function, set())}
    kinds = [text for name, text in _KINDS.items() if name in factories]
    return LlmcError(f"the model uses an attention mask that is neither full nor causal, with an "
                     f"optional window or chunks{''.join(f' ({kind})' for kind in kinds[:1])}; use "
                     f"another model")


def _parts(value: object) -> Iterator[object]:
    """Yield a function's closure, defaults, bound arguments and constants."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, *vars(value.__self__).values())
    elif isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or ())
        yield from value.__defaults__ or ()
        yield from value.__code__.co_consts
    elif isinstance(value, tuple | list):
        yield from value


def largest_number(function: MaskFunction) -> int:
    """The largest number of positions in a mask function."""
    return max((n for n in _numbers(function, set()) if n <= _POSITIONS), default=0)


def _numbers(value: object, known: set[int]) -> Iterator[int]:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield abs(int(value))
    if id(value) not in known:
        known.add(id(value))
        for part in _parts(value):
            yield from _numbers(part, known)


def _names(value: object, known: set[int]) -> Iterator[str]:
    if isinstance(value, types.FunctionType):
        yield value.__qualname__
    if id(value) not in known:
        known.add(id(value))
        for part in _parts(value):
            yield from _names(part, known)
