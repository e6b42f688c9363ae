"""Replacements of torch's functions while a model's image encoder runs on one image.

transformers' encoders take several images, whose rows they split, and padding, which they leave
out by masks. A graph cannot have either, and needs neither: it has one image.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OneSize(list[Any]):
    """Height and width of one image in a trace."""


class OneImage(TorchFunctionMode):
    """Replacements of torch's functions while an encoder runs.

    | function | replacement, since there is one image, whose arrays have no padding |
    | --- | --- |
    | split of rows by image | all rows |
    | `x[mask]` for a mask of tiles | all tiles |
    | `x[mask]` for a mask of rows by image | all rows; `masks` has the mask |
    | values of a tensor of one number | unknown, for a split |
    | squeeze of an axis of dynamic size | no change: the exporter removes the axis |
    | unfold without overlap | a view |
    | bucketize | a sum of comparisons |
    | interpolation to the same size | no change |
    | arange of floating-point numbers | a constant: ONNX adds up rounded numbers |

    Args:
        constants: results of arange, in order of the calls; None to record them.
    """

    def __init__(self, constants: Iterator[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._constants, self._paused = constants, False
        self.recorded: list[torch.Tensor] = []
        self.masks: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> \
            Any:
        named = kwargs or {}
        own = None if self._paused else _REPLACEMENTS.get(function)
        if own is not None:
            replaced = own(self, *args, **named)
            if replaced is not NotImplemented:
                return replaced
        return function(*args, **named)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Replace nothing."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def split(self, rows: Any, sizes: Any, *others: Any, **named: Any) -> Any:
        return (rows,) if isinstance(sizes, list) and len(sizes) == 1 else NotImplemented

    def select(self, rows: Any, index: Any) -> Any:
        if not isinstance(index, torch.Tensor) or index.dtype != torch.bool or index.ndim > 2:
            return NotImplemented
        if index.ndim == 2:
            self.masks.append(index)
        return rows.flatten(0, index.ndim - 1)

    def to_list(self, numbers: Any) -> Any:
        if tuple(numbers.shape) == (1,):
            return [numbers]
        if numbers.device.type == "meta":
            raise ValueError("its code reads numbers that depend on the image, such as its size")
        return NotImplemented

    def squeeze(self, rows: Any, *dims: Any, **named: Any) -> Any:
        axis = dims[0] if dims else named.get("dim")
        dynamic = isinstance(axis, int) and \
            not (isinstance(rows.shape[axis], int) and rows.shape[axis] == 1)
        return rows if dynamic else NotImplemented

    def as_tensor(self, data: Any, *others: Any, **named: Any) -> Any:
        return torch.ones((1, 2), dtype=torch.int64) if isinstance(data, OneSize) \
            else NotImplemented

    def unfold(self, rows: Any, dimension: int, size: int, step: int) -> Any:
        if size != step:
            return NotImplemented
        axis = dimension % rows.ndim
        count = rows.shape[axis] // size
        return rows.narrow(axis, 0, count * size).unflatten(axis, (count, size)) \
            .movedim(axis + 1, -1)

    def bucketize(self, values: Any, boundaries: Any, *, right: bool = False, **named: Any) -> Any:
        columns = values.unsqueeze(-1)
        return (columns >= boundaries if right else columns > boundaries).sum(-1)

    def interpolate(self, rows: Any, size: Any = None, *others: Any, **named: Any) -> Any:
        sizes = (size,) * (rows.ndim - 2) if isinstance(size, int) else tuple(size or ())
        return rows if tuple(rows.shape[2:]) == sizes else NotImplemented

    def arange(self, *bounds: Any, device: Any = None, **named: Any) -> Any:
        if not any(isinstance(bound, float) for bound in bounds):
            return NotImplemented
        if self._constants is not None:
            return next(self._constants)
        self.recorded.append(torch.arange(*bounds, device="cpu", **named))
        return self.recorded[-1].to(device)


_REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    torch.split: OneImage.split, torch.Tensor.split: OneImage.split,
    torch.Tensor.__getitem__: OneImage.select, torch.Tensor.tolist: OneImage.to_list,
    torch.Tensor.squeeze: OneImage.squeeze, torch.as_tensor: OneImage.as_tensor,
    torch.nn.functional.interpolate: OneImage.interpolate,
    torch.Tensor.unfold: OneImage.unfold, torch.bucketize: OneImage.bucketize,
    torch.arange: OneImage.arange}
