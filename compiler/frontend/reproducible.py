"""Reproducible elementary functions for constants that a model computes when it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmc.compiler.graph import elementary

_aten = torch.ops.aten
# Functions of one tensor, with the range of arguments that they support.
_FUNCTIONS: dict[Any, tuple[Callable[..., np.ndarray], float, float]] = {
    _aten.exp.default: (elementary.exp, -700, 700),
    _aten.log.default: (elementary.log, 1e-300, 1e300),
    _aten.sin.default: (elementary.sin, -elementary.MAX_ANGLE, elementary.MAX_ANGLE),
    _aten.cos.default: (elementary.cos, -elementary.MAX_ANGLE, elementary.MAX_ANGLE)}
_POWERS = {_aten.pow.Scalar, _aten.pow.Tensor_Scalar, _aten.pow.Tensor_Tensor}
_EXACT_POWERS = (0, 1, 2, 3, -1, -2, 0.5)  # exact products, quotients and roots


class Reproducible(TorchDispatchMode):
    """Compute elementary functions of real tensors by `graph.elementary` while active.

    torch's functions differ in the last bit between processors' vector instructions.
    """

    def __torch_dispatch__(self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not (function in _FUNCTIONS or function in _POWERS) \
                or type(result) is not torch.Tensor or result.device.type != "cpu" \
                or not result.is_floating_point() or not result.numel():
            return result
        operands = [np.asarray(each.double().numpy() if isinstance(each, torch.Tensor) else each,
                               np.float64) for each in args[:2]]
        if function in _FUNCTIONS:
            compute, low, high = _FUNCTIONS[function]
            fits = bool((operands[0] >= low).all() and (operands[0] <= high).all())
        else:
            base, exponent = operands = list(np.broadcast_arrays(*operands))
            compute = elementary.power
            fits = bool((base > 0).all()) and not np.isin(exponent, _EXACT_POWERS).all()
        return torch.from_numpy(np.asarray(compute(*operands))).to(result.dtype) if fits else result
