"""The activations that GEMM epilogues have: as ONNX text and as NumPy."""

from __future__ import annotations

from collections.abc import Callable
from math import erf

import numpy as np

_erf = np.vectorize(erf, otypes=[np.float64])

# Lines that compute `y` from `x`.
_TEXT = {
    "none": "y = Identity(x)",
    "relu": "y = Relu(x)",
    "relu2": "r = Relu(x)\ny = Mul(r, r)",
    "gelu": 'y = Gelu<approximate="none">(x)',
    "gelu_tanh": 'y = Gelu<approximate="tanh">(x)',
    "silu": "s = Sigmoid(x)\ny = Mul(x, s)",
    "quick_gelu": "k = Constant<value_float=1.702>()\nz = Mul(x, k)\ns = Sigmoid(z)\ny = Mul(x, s)",
    "tanh": "y = Tanh(x)",
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
}


def activation_text(name: str, x: str, y: str) -> str:
    """ONNX text that computes tensor `y` from tensor `x`.

    Raises:
        ValueError: there is no such activation.
    """
    if name not in _TEXT:
        raise ValueError(f"no activation {name!r}; there are {sorted(_TEXT)}")
    renames = {"x": x, "y": y, "r": f"{y}_r", "s": f"{y}_s", "k": f"{y}_k", "z": f"{y}_z"}
    lines = []
    for line in _TEXT[name].splitlines():
        result, call = line.split(" = ")
        op, arguments = call.rsplit("(", 1)
        given = ", ".join(renames[a] for a in arguments.rstrip(")").split(", ") if a)
        lines.append(f"{renames[result]} = {op}({given})")
    return "\n".join(lines)
