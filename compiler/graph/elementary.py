"""exp, log, pow, sin and cos with bit-identical results on every processor.

Math libraries select an implementation by CPU features (fused multiply-add, vector width): torch's
float32 pow differs with and without AVX2, NumPy's float64 sin between glibc's variants. These
functions consist of single float64 additions, multiplications and divisions in a fixed order, which
IEEE 754 rounds uniquely. They are accurate to a few ULPs; rounded to float32, all but about 1e-7 of
results are correctly rounded.

Arguments and results are float64 arrays. Reductions and coefficients are fdlibm's and Taylor's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LN2, _LN2_HIGH, _LN2_LOW = 0.6931471805599453, 0.6931471803691238, 1.90821492927058770002e-10
_SQRT_HALF, _TWO_BY_PI = 0.7071067811865476, 0.6366197723675814
# pi / 2 in three parts. The first two have 33 bits, so their product with an integer below 2^20 is
# exact.
_HALF_PI = (1.57079632673412561417e+00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
MAX_ANGLE = 2.0**20


def _one_by_factorials(signs: int, start: int, step: int, count: int) -> tuple[float, ...]:
    """1 / start!, signs / (start + step)!, …"""
    terms, factorial, number = [], 1, 0
    for index in range(count):
        while number < start + step * index:
            number += 1
            factorial *= number
        terms.append(signs**index / factorial)
    return tuple(terms)


_EXP = _one_by_factorials(1, 0, 1, 15)
_SIN, _COS = _one_by_factorials(-1, 1, 2, 10), _one_by_factorials(-1, 0, 2, 11)
_LOG = tuple(1 / (2 * n + 1) for n in range(12))


def exp(x: np.ndarray) -> np.ndarray:
    """e^x."""
    count = np.rint(x / _LN2)
    rest = (x - count * _LN2_HIGH) - count * _LN2_LOW
    result: np.ndarray = np.ldexp(_polynomial(rest, _EXP), count.astype(np.int32))
    return result


def log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive numbers."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < _SQRT_HALF
    mantissa, exponent = np.where(small, mantissa * 2, mantissa), exponent - small
    ratio = (mantissa - 1) / (mantissa + 1)
    series = 2 * ratio * _polynomial(ratio * ratio, _LOG)
    result: np.ndarray = exponent * _LN2_HIGH + (series + exponent * _LN2_LOW)
    return result


def power(base: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """`base ** exponent` for positive bases."""
    return exp(exponent * log(base))


def sin(x: np.ndarray) -> np.ndarray:
    """Sine, for |x| up to `MAX_ANGLE`."""
    return _circle(x, 0)


def cos(x: np.ndarray) -> np.ndarray:
    """Cosine, for |x| up to `MAX_ANGLE`."""
    return _circle(x, 1)


def _circle(x: np.ndarray, quarters: int) -> np.ndarray:
    """Sine of x plus `quarters` quarter turns."""
    count = np.rint(x * _TWO_BY_PI)
    rest = x
    for part in _HALF_PI:
        rest = rest - count * part
    square = rest * rest
    sine, cosine = rest * _polynomial(square, _SIN), _polynomial(square, _COS)
    quarter = (count.astype(np.int64) + quarters) % 4
    value = np.where(quarter % 2 == 0, sine, cosine)
    return np.where(quarter < 2, value, -value)


def _polynomial(x: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    """The sum of coefficients[n] * x^n, by Horner's scheme."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def sinusoidal_positions(count: int, width: int) -> np.ndarray:
    """The sinusoidal position table of the original Transformer.

    Returns:
        float64 `[count, width]`: sines, then cosines. The angles fall from 1 to nearly 1 / 10000
        per position.
    """
    pairs = (width + 1) // 2
    rates = power(np.full(pairs, 10000.0), np.arange(pairs) * (2 / width))
    angles = np.arange(count, dtype=np.float64)[:, None] / rates
    return np.concatenate([sin(angles), cos(angles[:, :width // 2])], axis=1)
