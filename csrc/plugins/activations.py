"""Activations of GEMM epilogues, as ONNX text and in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from math import erf

import numpy as np

_erf = np.vectorize(erf, otypes=[np.float64])

_TEXT = {
    "none": "{y} = Identity({x})",
    "relu": "{y} = Relu({x})",
    "relu2": "{y}_root = Relu({x})\n{y} = Mul({y}_root, {y}_root)",
    "gelu": '{y} = Gelu<approximate="none">({x})',
    "gelu_tanh": '{y} = Gelu<approximate="tanh">({x})',
    "silu": "{y}_gate = Sigmoid({x})\n{y} = Mul({x}, {y}_gate)",
    "quick_gelu": "{y}_slope = Constant<value_float=1.702>()\n{y}_steep = Mul({x}, {y}_slope)\n"
                  "{y}_gate = Sigmoid({y}_steep)\n{y} = Mul({x}, {y}_gate)",
    "tanh": "{y} = Tanh({x})",
    "sigmoid": "{y} = Sigmoid({x})",
    "softplus": "{y} = Softplus({x})",
}

REFERENCE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(x, 0),
}


def activation_text(name: str, x: str, y: str) -> str:
    """Return ONNX text that computes tensor `y` from tensor `x`.

    Raises:
        ValueError: the activation is unknown.
    """
    if name not in _TEXT:
        raise ValueError(f"unknown activation {name!r}; expected one of {sorted(_TEXT)}")
    return _TEXT[name].format(x=x, y=y)
