"""Convolutions in time before an encoder's layers, as products of rows.

Given:   features [batch, channels, frames] → Conv1d → elementwise → … → Conv1d → [batch, seq, …]
Result:  rows [batch, seq, width] → Linear → elementwise → … → Linear → [batch, seq, …]

A row holds all frames that one position of the last convolution depends on, its receptive field, so
that no layer before attention reads another row. A convolution computes every position that the
next one reads; Whisper's first one computes 3 instead of 2 per row. Where a position is outside of
the features, the next convolution reads zeros: such positions are multiplied by a column of the row
that is 0 there and 1 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from llmc.artifacts.manifest import FeatureRows, RowMask
from llmc.errors import LlmcError

_CHANNELS = "num_mel_bins"


def reads_features(model: Any) -> bool:
    """Whether an encoder-decoder model's encoder reads features of audio instead of tokens."""
    return getattr(model, "main_input_name", "input_ids") == "input_features"


def feature_convolutions(model: Any) -> list[torch.nn.Conv1d]:
    """The convolutions before the layers of an encoder that reads features.

    Raises:
        LlmcError: the encoder has a form that is not supported.
    """
    encoder = model.get_encoder()
    convolutions = [module for module in encoder.children() if isinstance(module, torch.nn.Conv1d)]
    config = encoder.config
    channels = getattr(config, _CHANNELS, None)
    for conv in convolutions:
        if conv.in_channels != channels or conv.groups != 1 or conv.dilation != (1,) \
                or conv.padding_mode != "zeros" or not isinstance(conv.padding, tuple):
            channels = None
            break
        channels = conv.out_channels
    inside = [module for module in encoder.modules() if isinstance(module, torch.nn.Conv1d)]
    table = getattr(encoder, "embed_positions", None)
    if not convolutions or channels is None or len(inside) != len(convolutions) \
            or not isinstance(table, torch.nn.Embedding) \
            or getattr(config, "max_source_positions", None) != table.num_embeddings:
        raise LlmcError(f"the encoder of '{config.model_type}' reads features, but is not "
                        f"convolutions in time, embed_positions of max_source_positions and "
                        f"layers; use another model, such as Whisper")
    return convolutions


@dataclass(frozen=True)
class _Level:
    """The input of a convolution.

    Args:
        conv: the convolution.
        count: positions of this input in a row.
        offset: the first of them in the first row.
        stride: positions between two rows.
        length: positions that exist.
    """

    conv: torch.nn.Conv1d
    count: int
    offset: int
    stride: int
    length: int

    @property
    def masked(self) -> list[int]:
        """Indices of positions that do not exist in every row; rows are `length // stride`."""
        last = (self.length // self.stride - 1) * self.stride
        return [index for index in range(self.count) if self.offset + index < 0
                or last + self.offset + index >= self.length]


def _levels(model: Any) -> list[_Level]:
    """The input of each convolution, in order."""
    levels: list[_Level] = []
    count, offset, stride = 1, 0, 1
    length = int(model.get_encoder().config.max_source_positions)
    for conv in reversed(feature_convolutions(model)):
        (size,), (step,), (padding,) = conv.kernel_size, conv.stride, conv.padding
        count, offset = (count - 1) * step + size, offset * step - padding
        stride, length = stride * step, length * step
        levels.insert(0, _Level(conv, count, offset, stride, length))
    return levels


def feature_rows(model: Any) -> FeatureRows:
    """How the runtime makes rows from features."""
    first, *later = _levels(model)
    return FeatureRows(
        num_channels=first.conv.in_channels, num_frames=first.length, stride=first.stride,
        offset=first.offset, window=first.count,
        masks=tuple(RowMask(stride=level.stride, offset=level.offset + index, length=level.length)
                    for level in later for index in level.masked))


class _RowConvolution(torch.nn.Module):
    """A convolution that computes `outputs` positions of every row.

    Args:
        level: its input.
        outputs: positions that the next convolution reads.
    """

    def __init__(self, level: _Level, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = level.conv.weight, level.conv.bias
        self.level, self.outputs = level, outputs
        self.stride = (1,)
        self.masks: list[torch.Tensor] = []  # [batch, seq, 1] of each masked position

    def forward(self, columns: torch.Tensor) -> torch.Tensor:
        """[batch, count * in_channels, seq] to [batch, outputs * out_channels, seq]."""
        rows, conv = columns.transpose(1, 2), self.level.conv
        channels, size, step = conv.in_channels, conv.kernel_size[0], conv.stride[0]
        weight = self.weight.transpose(1, 2).reshape(conv.out_channels, size * channels)
        if self.masks:
            rows = self._masked(rows, channels)
        parts = [rows[..., i * step * channels:(i * step + size) * channels]
                 if self.level.count > size else rows for i in range(self.outputs)]
        made = [torch.nn.functional.linear(part, weight, self.bias) for part in parts]
        return (torch.cat(made, -1) if len(made) > 1 else made[0]).transpose(1, 2)

    def _masked(self, rows: torch.Tensor, channels: int) -> torch.Tensor:
        parts = [rows[..., index * channels:(index + 1) * channels]
                 for index in range(self.level.count)]
        for index, mask in zip(self.level.masked, self.masks, strict=True):
            parts[index] = parts[index] * mask
        return torch.cat(parts, -1)


class RowEncoder(torch.nn.Module):
    """Rows of features, [batch, seq, width] as `FeatureRows` describes, to the encoder output.

    `model`'s encoder is changed: its convolutions read rows, and it has as many positions as rows.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        levels = _levels(model)
        self._width = levels[0].count * levels[0].conv.in_channels
        self._rows = []
        encoder = model.get_encoder()
        names = {id(module): name for name, module in encoder.named_children()}
        for index, level in enumerate(levels):
            outputs = levels[index + 1].count if index + 1 < len(levels) else 1
            self._rows.append(_RowConvolution(level, outputs))
            setattr(encoder, names[id(level.conv)], self._rows[-1])
        self.width = self._width + sum(len(level.masked) for level in levels[1:])
        assert prod(conv.level.conv.stride[0] for conv in self._rows) == levels[0].stride

    def forward(self, input_features: torch.Tensor) -> torch.Tensor:
        encoder, column = self.model.get_encoder(), self._width
        for conv in self._rows[1:]:
            columns = range(column, column + len(conv.level.masked))
            conv.masks = [input_features[..., i:i + 1] for i in columns]
            column = columns.stop
        length = input_features.shape[1]
        encoder.embed_positions.num_embeddings = length
        encoder.config.max_source_positions = 1  # times strides: the length that it requires
        self._rows[0].stride = (length,)
        rows = input_features[..., :self._width] if column > self._width else input_features
        encoder_output: torch.Tensor = encoder(rows.transpose(1, 2))[0]
        return encoder_output
