"""Probe inputs and tolerance for recognizing activation functions.

Activations differ within a few units of zero. A clipping bound, be it 0.5 or 9000, shows only
beyond itself. Each needs separate inputs, and each result is compared relative to its own operands,
so that a larger product elsewhere hides no error.
"""

from __future__ import annotations

import numpy as np

from llmc.compiler.graph.probe import Piece, magnitudes

_GRID = np.linspace(-9, 9, 145)
_AROUND = np.array([0.5, 0.9, 1.1, 1.5, 2.0])  # multiples of a bound
_EACH = 16  # repetitions of each input where it is combined with others
_TOLERANCE = 1e-5
_WIDEST = 1e9  # of bounds: three factors of twice this magnitude fit in float32


def bounds(piece: Piece) -> list[float]:
    """Constants of the piece that may be clipping bounds or slopes of an activation."""
    return [number for number in magnitudes(piece) if number < _WIDEST]


def activation_inputs(numbers: list[float]) -> np.ndarray:
    """Inputs that distinguish activations.

    Args:
        numbers: candidate bounds and slopes, see `bounds`.

    Returns:
        float32 `[count]`: a grid around zero, the grid scaled for each slope, and values on both
        sides of each bound.
    """
    steep = [_GRID / number for number in numbers if number > 1]
    around = [sign * number * _AROUND for number in numbers for sign in (-1, 1)]
    return np.unique(np.concatenate([_GRID, *steep, *around]).astype(np.float32))


def activation_rows(numbers: list[float], width: int) -> np.ndarray:
    """`activation_inputs` in random order, repeated so that each meets many others.

    Returns:
        float32 `[rows, 1, width]`.
    """
    values = activation_inputs(numbers)
    rows = max(2, -(-_EACH * len(values) // width))
    return np.random.default_rng(0).permutation(
        np.resize(values, rows * width)).reshape(rows, 1, width)


def is_activation(actual: np.ndarray, x: np.ndarray, expected: np.ndarray,
                  factor: np.ndarray | float = 1.0, offset: float = 0.0) -> bool:
    """Whether `actual` equals `expected * (factor + offset)`, `expected` being that of `x`.

    The tolerance is per element, relative to its operands.
    """
    if actual.shape != x.shape or not np.isfinite(actual).all():
        return False
    scale = np.maximum(np.maximum(np.abs(x), np.abs(expected)), 1) * (np.abs(factor) + abs(offset))
    error = np.abs(actual - expected * (factor + offset))
    return bool((error <= _TOLERANCE * scale).all())
