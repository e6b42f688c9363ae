"""On which numbers activations are tried, and how near to one a piece has to come.

Activations differ within a few units of zero; a bound shows beyond itself alone, whether it is 0.5
or 9000. Both need numbers of their own, and none may hide behind another one's larger product.
"""

from __future__ import annotations

import numpy as np

from llmc.compiler.graph.probe import Piece, magnitudes

_GRID = np.linspace(-9, 9, 145)
_AROUND = np.array([0.5, 0.9, 1.1, 1.5, 2.0])  # times a bound
_EACH = 16  # how often every number is there where it meets others
_TOLERANCE = 1e-5
_WIDEST = 1e9  # of bounds: three numbers of twice as much can be multiplied in float32


def bounds(piece: Piece) -> list[float]:
    """The piece's numbers that may bound, or steepen, what an activation takes."""
    return [number for number in magnitudes(piece) if number < _WIDEST]


def activation_inputs(numbers: list[float]) -> np.ndarray:
    """float32 `[count]`: what tells activations apart, each steeper by one of `numbers` too, and
    what lies around `numbers` where they are bounds.
    """
    steep = [_GRID / number for number in numbers if number > 1]
    around = [sign * number * _AROUND for number in numbers for sign in (-1, 1)]
    return np.unique(np.concatenate([_GRID, *steep, *around]).astype(np.float32))


def activation_rows(numbers: list[float], width: int) -> np.ndarray:
    """float32 `[rows, 1, width]`: `activation_inputs` in a random order, often enough for each to
    meet many others.
    """
    values = activation_inputs(numbers)
    rows = max(2, -(-_EACH * len(values) // width))
    return np.random.default_rng(0).permutation(
        np.resize(values, rows * width)).reshape(rows, 1, width)


def is_activation(actual: np.ndarray, x: np.ndarray, made: np.ndarray,
                  factor: np.ndarray | float = 1.0, offset: float = 0.0) -> bool:
    """Whether every one of `actual` is an activation's value `made` of `x` times `factor` +
    `offset`, each held against what it is made of.
    """
    if actual.shape != x.shape or not np.isfinite(actual).all():
        return False
    scale = np.maximum(np.maximum(np.abs(x), np.abs(made)), 1) * (np.abs(factor) + abs(offset))
    error = np.abs(actual - made * (factor + offset))
    return bool((error <= _TOLERANCE * scale).all())
