"""Exported ONNX graphs equal torch, also for in-place model code."""

import warnings

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

import llmc
from llmc.compiler.frontend import exporter
from llmc.compiler.frontend.exporter import export_onnx
from llmc.compiler.frontend.trace import alone


def wrote_a_copy(x):
    copy = x.clone()
    copy += 1
    return copy + x


def copied_before_writing(x):
    made = x * 2
    copy = made.clone()
    made += 1
    return copy + made


def wrote_what_dropout_left(x):
    made = torch.nn.functional.dropout(x * 2, 0.5, training=False)
    made *= 3
    return made


def wrote_below_a_view(x):
    made = x * 2
    view = made[:, :1]
    made += 1
    return made + view


def wrote_a_view(x):
    made = x * 2
    made[:, :1] += 5
    return made


def wrote_twice(x):
    made = x * 2
    other = made - 1
    made += x
    made /= 4
    return made * other


def wrote_another_dtype(x):
    made = x * 2
    made += (x > 0).to(torch.int64)
    return made


def rotated(x):
    angles = x[..., :1].cumsum(1)
    turns = torch.polar(torch.ones_like(angles), angles) * 1.0
    pairs = torch.view_as_complex(torch.stack([x, x + 1], -1).unsqueeze(2))
    return torch.view_as_real(pairs * turns[:, :, None, :]).flatten(2)


def rotated_and_scaled(x):
    angles = x[..., :1].cumsum(1)
    turns = torch.polar(torch.ones_like(angles), angles) * 0.5
    return torch.view_as_real(turns).flatten(2)


def scattered(x):
    scores, experts = torch.topk(x, 2, dim=-1)
    return torch.full_like(x, -7.0).scatter_(2, experts, scores)


def wrote_a_part_of_a_split(x):
    made = x * 2
    first, _ = made.split([1, 2], 2)
    first += 1
    return made


def wrote_slices_of_a_new_tensor(x):
    made = x.new_empty((*x.shape[:-1], 6))
    made[..., :4].copy_(x[..., :1].expand(-1, -1, 4))
    made[..., 4:].copy_(x[..., 1:] * 2)
    return made * 3


def wrote_all_of_a_new_tensor(x):
    made = torch.empty_like(x)
    made[:] = x * 2
    return made + 1


def wrote_every_second_column_of_a_row(x):
    made = torch.stack([x, x * 2, x * 3]) * 5
    row = made[0]
    for other in (1, 2):
        row[..., other::2] = made[other, ..., other::2]
    return row + made[0] + made[2]


def wrote_below_another_view(x):
    made = x * 2
    before = made.transpose(1, 2)
    made[..., :1] = x[..., 1:2]
    return made + before.transpose(1, 2)


def wrote_a_slice_of_a_part(x):
    made = x * 2
    _, part = made.split([1, 2], 2)
    part[..., :1] = x[..., :1]
    return made


def mixed_dtypes(x):
    count = (x > 0).to(torch.int32)
    return count.cumsum(1) * x + (count < 0.5) * (count + x)


def square_and_turn(x):
    return x.square() @ (torch.arange(12.0).reshape(4, 3).T @ torch.ones(4, 3)).T


PLAIN = [rotated, scattered, wrote_slices_of_a_new_tensor, wrote_every_second_column_of_a_row,
         wrote_twice, mixed_dtypes, square_and_turn, lambda x: x.float(),
         lambda x: (x * 2).to(torch.float32), lambda x: (x * 2).clone(),
         lambda x: torch.nn.functional.dropout(x * 2, 0.5, training=False)]
OTHERS = [wrote_a_copy, copied_before_writing, wrote_what_dropout_left, wrote_below_a_view,
          wrote_a_view, wrote_all_of_a_new_tensor, wrote_another_dtype, wrote_a_part_of_a_split,
          wrote_below_another_view, wrote_a_slice_of_a_part, rotated_and_scaled]


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def export(function, longest=0):
    return export_onnx(Module(function), {"x": torch.randn((2, 5, 3))},
                       [{1: torch.export.Dim("seq")}], ["out"], longest)


@pytest.mark.parametrize("function", [*PLAIN, *OTHERS])
def test_equivalent_torch_code_gives_the_same_values(function, monkeypatch):
    ways, real = [], exporter._is_plain

    def is_plain(graph):
        ways.append(real(graph))
        return ways[-1]

    monkeypatch.setattr(exporter, "_is_plain", is_plain)
    session = ort.InferenceSession(ir.to_proto(export(function)).SerializeToString())
    for length in (1, 2, 5, 8):
        x = torch.randn((2, length, 3))
        got, = session.run(None, {"x": x.numpy()})
        np.testing.assert_allclose(got, function(x.clone()).numpy(), rtol=1e-5, atol=1e-6)
    assert ways == [function in PLAIN]


@pytest.mark.parametrize(("function", "longest", "match"), [
    (lambda x: x * 3 if x.size(1) > 7 else x * 2, 8,
     "supports at most 7 in axis 'seq', its config requires 8"),
    (lambda x: x * 3 if x.size(1) > 2 else x * 2, 8, "needs at least 3 in axis 'seq'"),
])
def test_a_dimension_bound_that_sequences_exceed_is_an_error(function, longest, match):
    with pytest.raises(llmc.LlmcError, match=match):
        export(function, longest)


def test_a_dimension_bound_that_sequences_do_not_exceed_is_removed():
    model = export(lambda x: x * 3 if x.size(1) > 7 else x * 2, longest=7)
    assert [value.name for value in model.graph.outputs] == ["out"]


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
def test_deprecation_warnings_are_shown_only_if_requested(category):
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        with alone():
            warnings.warn("old", category, stacklevel=1)
        assert not caught
        warnings.simplefilter("default", category)
        with alone():
            warnings.warn("old", category, stacklevel=1)
            warnings.warn("odd", UserWarning, stacklevel=1)
        assert [str(warning.message) for warning in caught] == ["old"]
