"""Replacements while a model's audio encoder runs on one clip without padding.

transformers' encoders take several clips, padded to one length: they select frames by masks, and
cut the frames of all clips into chunks by loops over lengths. A graph cannot have either, and needs
neither: it has one clip, whose length is the size of an axis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CHUNKS = "chunk_and_pad_features"  # the function of encoders that cut clips into chunks


@contextlib.contextmanager
def one_clip(module: ModuleType) -> Iterator[None]:
    """Replace functions of torch, and those of a model's module; the export holds a lock.

    Args:
        module: with the model's code.
    """
    chunks = _Chunks(module)
    functions: Mapping[str, Callable[..., Any]] = {
        _CHUNKS: chunks.padded, "get_valid_indices": chunks.valid_indices,
        "get_pool_indices": chunks.pool_indices, "get_audio_cu_seqlens": chunks.cu_seqlens,
        "get_max_seqlen": lambda *args, **kwargs: 0,
        "is_flash_attention_requested": lambda *args, **kwargs: True}
    known = {name: getattr(module, name) for name in functions
             if hasattr(module, _CHUNKS) and hasattr(module, name)}
    for name in known:
        setattr(module, name, functions[name])
    try:
        with _OneClip():
            yield
    finally:
        for name, original in known.items():
            setattr(module, name, original)


class _OneClip(TorchFunctionMode):
    """Replacements of torch's functions.

    | function | replacement, since there is one clip, whose arrays have no padding |
    | --- | --- |
    | `x[mask]` for a mask of frames by clip | all frames |
    | value of an integer, as in `tolist` | unknown, equal to what it is compared with |
    | split along the first axis, which saves memory | all |
    | unfold | rows by their indices: their number is that of the chunks in other code |
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> \
            Any:
        named = kwargs or {}
        own = _REPLACEMENTS.get(function)
        replaced = NotImplemented if own is None else own(*args, **named)
        return function(*args, **named) if replaced is NotImplemented else replaced


def _select(frames: Any, index: Any) -> Any:
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.ndim == 2
    return frames.flatten(0, 1) if is_mask else NotImplemented


def _item(number: Any) -> Any:
    return NotImplemented if number.dtype.is_floating_point else _Unknown()


def _split(rows: Any, sizes: Any, dim: int = 0) -> Any:
    return (rows,) if isinstance(sizes, int) and dim == 0 else NotImplemented


def _unfold(rows: Any, dimension: int, size: int, step: int) -> Any:
    axis = dimension % rows.ndim
    count = (rows.shape[axis] - size + step) // step
    index = torch.arange(count)[:, None] * step + torch.arange(size)
    return rows.index_select(axis, index.flatten()).unflatten(axis, (count, size)) \
        .movedim(axis + 1, -1)


class _Unknown:
    """The length of the clip, which the code compares with the number of its rows."""

    def __radd__(self, other: object) -> _Unknown:
        return self

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


_REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _select, torch.Tensor.item: _item, torch.split: _split,
    torch.Tensor.split: _split, torch.Tensor.unfold: _unfold}


class _Chunks:
    """A clip cut into chunks of frames, whose rows attention reads by windows.

    The methods are transformers' functions for one clip.

    Args:
        module: with the model's code.
    """

    def __init__(self, module: ModuleType) -> None:
        self._rows_of = getattr(module, "_get_feat_extract_output_lengths", None)
        self._frames: Any = 0
        self._n_window = 0

    def padded(self, input_features: torch.Tensor, feature_lens: object, n_window: int,
               kwargs: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks [num_chunks, channels, frames], and the number of frames of each."""
        self._frames, self._n_window = input_features.shape[1], n_window
        count = (self._frames + 2 * n_window - 1) // (2 * n_window)
        width = torch.sym_min(self._frames, 2 * n_window)
        padding = (0, count * width - self._frames)

        def cut(frames: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(frames, padding).reshape(len(frames), count, width)

        ones = torch.ones((1, self._frames), dtype=torch.int64)
        return cut(input_features).transpose(0, 1), cut(ones)[0].sum(-1)

    def valid_indices(self, *lengths: object, **named: object) -> torch.Tensor:
        """Rows of the chunks that are of the clip: the first ones."""
        return torch.arange(self._rows(self._frames))

    def pool_indices(self, *lengths: object, **named: object) -> torch.Tensor:
        """The first of each pair of rows."""
        return torch.arange((self._rows(self._frames) - 2) // 2 + 1) * 2

    def cu_seqlens(self, chunk_lengths: object, feature_lens: object = None,
                   n_window_infer: int = 0, *others: object, **named: object) -> torch.Tensor:
        """Starts and ends of the windows of attention: chunks, or several of these."""
        size = 2 * self._n_window
        total, window = self._rows(self._frames), self._rows(size) * max(n_window_infer // size, 1)
        ends = torch.arange(total, total + 1)
        return torch.cat([torch.arange(0, total, window), ends]).to(torch.int32)

    def _rows(self, frames: Any) -> Any:
        """Rows of frames after the convolutions."""
        return (frames - 1) // 2 + 1 if self._rows_of is None else \
            self._rows_of(frames, self._n_window)
