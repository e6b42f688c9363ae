"""Export of a model's image encoder: what a processor gives for one image, to rows of the prompt.

The encoder is what `get_image_features` runs, the one method that all of transformers' image-text
models have. Attention becomes `BidirectionalAttention` of packed patches. What transformers
computes from an image's grid of patches by loops (`vision_utils`) becomes inputs that the runtime
computes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from accelerate import init_empty_weights
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoModelForImageTextToText, vision_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    bidirectional_mask_function,
)

from llmc.artifacts.manifest import MEDIA_ROWS
from llmc.artifacts.vision_input import GRID, SIZES, UNREAD, VisionInput
from llmc.compiler.frontend.exporter import export_onnx
from llmc.compiler.frontend.parts import Part, build
from llmc.compiler.frontend.reproducible import Reproducible
from llmc.compiler.frontend.trace import root_cause, to_proto
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.interrupts import check_interrupted

IMAGE = Part("image-text model", (), causal=False, auto=AutoModelForImageTextToText)
_ATTENTION = "llmc_image"  # llmc's entry in transformers' attention interface for image encoders
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class _Call:
    """A call of a function of `vision_utils`.

    Args:
        function: its name.
        arguments: its scalar arguments.
        results: what it returned for the sample, by name.
    """

    function: str
    arguments: Mapping[str, int | str | bool]
    results: Mapping[str, np.ndarray]


# Functions of an image's grid, and names of their results.
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "get_vision_cu_seqlens": ("cu_seqlens",),
    "get_vision_position_ids": ("position_ids",),
    "get_vision_window_index": ("window_index", "cu_window_seqlens"),
    "get_vision_interpolation_indices_and_weights": ("interp_indices", "interp_weights"),
}


def trace_image(config: Any, samples: Sequence[Arrays], num_rows: Sequence[int] = ()) -> \
        tuple[onnx.ModelProto, tuple[VisionInput, ...]]:
    """Export the image encoder of a model from its config.

    Parameters are named as by `trace`. The graph's inputs are the arrays of a sample, without the
    grid, and computed ones; its outputs are `rows`, float32 [num_rows, width], and those of deep
    layers.

    Args:
        config: a transformers config.
        samples: what the model's processor gives for an image, for several sizes. Axes that differ
            are dynamic.
        num_rows: rows that the prompt takes for each sample, to compare; empty: not known.

    Returns:
        The graph, and how its computed inputs are computed.

    Raises:
        LlmcError: the encoder cannot be exported.
    """
    use_encoder_attention(config)
    try:
        with init_empty_weights(include_buffers=False), Reproducible():
            model: Any = build(config, IMAGE, False)
        with torch.device("meta"):
            empty: Any = build(config, IMAGE, False)
        recorded = [_record(empty, sample) for sample in samples]
        for expected, (_, rows) in zip(num_rows, recorded, strict=False):
            if rows[0] != expected:
                raise LlmcError(f"the processor gives an image {expected} tokens, the image "
                                f"encoder of '{config.model_type}' {rows[0]} rows; give the "
                                f"processor files that belong to the weights")
        return _export(model, samples, [calls for calls, _ in recorded],
                       len(recorded[0][1]))
    except LlmcError:
        raise
    except Exception as error:  # any error of the model's code
        check_interrupted()
        raise LlmcError(f"the image encoder of '{config.model_type}' cannot be exported: "
                        f"{root_cause(error)}; use another model") from error


def use_encoder_attention(config: Any) -> None:
    """Make a model of this config compute attention as encoders do."""
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, _visible)
    for each in (config, *(getattr(config, name) for name in config.sub_configs
                           if getattr(config, name, None) is not None)):
        each._attn_implementation = _ATTENTION


def _record(model: Any, sample: Arrays) -> tuple[list[_Call], list[int]]:
    """Run the encoder without values.

    Returns:
        Its calls of functions of the grid, and the number of rows of each result.
    """
    calls: list[_Call] = []

    def recorded(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        given.pop("kwargs", None)
        results = original(**given)
        several = results if isinstance(results, tuple) else (results,)
        calls.append(_Call(name, {key: value for key, value in given.items()
                                  if isinstance(value, int | str)},
                           {key: value.numpy() for key, value in
                            zip(_FUNCTIONS[name], several, strict=True)}))
        moved = tuple(value.to("meta") for value in several)
        return moved if isinstance(results, tuple) else moved[0]

    meta = {name: torch.from_numpy(array) if name == GRID else
            _OneSize([tuple(array[0].tolist())]) if name == SIZES else
            torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device="meta")
            for name, array in sample.items()}
    with torch.no_grad(), _replaced(model, recorded):
        results = _features(model, meta)
    return calls, [len(rows) for rows in results]


def _export(model: Any, samples: Sequence[Arrays], calls: Sequence[Sequence[_Call]],
            num_results: int) -> tuple[onnx.ModelProto, tuple[VisionInput, ...]]:
    names = [name for name in samples[0] if name not in UNREAD]
    if any(SIZES in sample and sample[SIZES].tolist() != [[*sample["pixel_values"].shape[-2:]]]
           for sample in samples):
        raise LlmcError(f"the processor gives {SIZES} other than the size of pixel_values, which "
                        f"llmc does not support; use another model")
    inputs = {name: [sample[name] for sample in samples] for name in names}
    computed = list[VisionInput]()
    for index, call in enumerate(calls[0]):
        results = tuple(f"{name}_{index}" for name in call.results)
        computed.append(VisionInput.model_validate({
            "function": call.function, "arguments": call.arguments, "names": results}))
        for name, result in zip(call.results, results, strict=True):
            inputs[result] = [own[index].results[name] for own in calls]
    encoder = _Encoder(model, names, computed, UNREAD & samples[0].keys())
    outputs = [MEDIA_ROWS, *(f"{MEDIA_ROWS}_{index}" for index in range(num_results - 1))]
    return export_encoder(model, encoder, inputs, outputs), tuple(computed)


def export_encoder(model: Any, encoder: torch.nn.Module, inputs: Mapping[str, Sequence[np.ndarray]],
                   outputs: Sequence[str]) -> onnx.ModelProto:
    """Export a module that runs a part of a model.

    Args:
        model: its parameters lose their values.
        encoder: the module.
        inputs: of the module, in order of its arguments, for several samples. Axes that differ are
            dynamic.
        outputs: names.
    """
    shapes: list[Mapping[int, Any]] = []
    for name, arrays in inputs.items():
        ranks = {array.ndim for array in arrays}
        if len(ranks) > 1:
            raise LlmcError(f"the processor gives {name!r} with {min(ranks)} or {max(ranks)} axes, "
                            f"expected always the same number")
        sizes = zip(*(array.shape for array in arrays), strict=True)
        shapes.append({axis: torch.export.Dim.AUTO for axis, each in enumerate(sizes)
                       if len(set(each)) > 1})
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    replaced: dict[int, torch.nn.Parameter] = {}
    with fake:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    replaced.setdefault(id(parameter), torch.nn.Parameter(torch.empty(
                        parameter.shape, dtype=torch.float32), requires_grad=False))
                    module._parameters[name] = replaced[id(parameter)]
        examples = {name: torch.zeros(arrays[0].shape, dtype=torch.from_numpy(arrays[0]).dtype)
                    for name, arrays in inputs.items()}
        exported = export_onnx(encoder.eval(), examples, [tuple(shapes)], outputs)
    proto = to_proto(exported, None)
    _remove_added_biases(proto)
    return proto


def _remove_added_biases(proto: onnx.ModelProto) -> None:
    """Remove the bias of convolutions that have none.

    The exporter adds zeros, for three dimensions in a shape that ONNX Runtime refuses.
    """
    expanded = {node.output[0] for node in proto.graph.node if node.op_type == "Expand"}
    for node in proto.graph.node:
        if node.op_type == "Conv" and len(node.input) > 2 and node.input[2] in expanded:
            del node.input[2]


class _Encoder(torch.nn.Module):
    """Arrays of an image, and computed inputs, to rows."""

    def __init__(self, model: Any, names: Sequence[str], computed: Sequence[VisionInput],
                 unread: Set[str]) -> None:
        super().__init__()
        self.model, self._names, self._unread = model, names, unread
        self._computed = [(own.function, len(own.names)) for own in computed]

    def forward(self, *arrays: torch.Tensor) -> Any:
        given = dict(zip(self._names, arrays, strict=False))
        waiting = list(arrays[len(given):])
        calls = iter(self._computed)

        def given_instead(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> \
                Any:
            function, count = next(calls)
            assert function == name
            results = tuple(waiting.pop(0) for _ in range(count))
            return results if count > 1 else results[0]

        if GRID in self._unread:
            given[GRID] = _OneGrid(given["pixel_values"].shape[0])
        if SIZES in self._unread:
            given[SIZES] = _OneSize([tuple(given["pixel_values"].shape[-2:])])
        with _replaced(self.model, given_instead):
            rows = _features(self.model, given)
        return rows if len(rows) > 1 else rows[0]


class _OneGrid:
    """The grid of one image in a trace: only its number of patches is known."""

    def __init__(self, patches: Any) -> None:
        self._patches = patches

    def prod(self, *axis: int, **named: int) -> _OneGrid:
        return self

    def __floordiv__(self, number: int) -> _OneGrid:
        return _OneGrid(self._patches // number if self._patches is not None else None)

    def tolist(self) -> list[Any]:
        return [self._patches]


class _OneSize(list[Any]):
    """Height and width of one image in a trace."""


def _features(model: Any, arrays: Mapping[str, Any]) -> list[torch.Tensor]:
    """Run `get_image_features`; return its rows, [num_rows, width], and those of deep layers."""
    known = inspect.signature(model.get_image_features).parameters
    unknown = [name for name in arrays if name not in known
               and not _takes(model, name)]
    if unknown:
        raise LlmcError(f"the processor gives {unknown[0]!r}, which the image encoder does not "
                        f"take")
    output = model.get_image_features(**arrays, return_dict=True)
    if getattr(output, "pooler_output", None) is None:
        raise LlmcError(f"get_image_features gives no pooler_output, which has the rows of the "
                        f"prompt; {LANGUAGE_MODEL_ONLY}")
    deep = getattr(output, "deepstack_features", None) or ()
    return [_joined(each) for each in (output.pooler_output, *deep)]


def _takes(model: Any, name: str) -> bool:
    """Whether the inner method takes an argument that the outer one passes on."""
    inner = getattr(model, "model", None)
    return inner is not None and name in inspect.signature(inner.get_image_features).parameters


def _joined(features: Any) -> torch.Tensor:
    """Join the rows of all tiles and images."""
    rows = features if isinstance(features, torch.Tensor) else torch.cat(list(features))
    return rows.reshape(-1, rows.shape[-1])


@contextlib.contextmanager
def _replaced(model: Any, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of the grid in the modules that define the model.

    `replacement` gets the function's name, the function and its arguments. Vision attention gets
    `cu_seqlens` instead of one sequence at a time, as flash attention does.
    """
    thread = threading.get_ident()
    undo = _replace_splits(thread)
    modules = {sys.modules[type(each).__module__] for each in model.modules()}
    modules.add(vision_utils)
    for module in modules:
        for name in (*_FUNCTIONS, "get_max_seqlen", "is_flash_attention_requested",
                     "generate_block_attention_mask"):
            original = module.__dict__.get(name)
            if original is None:
                continue
            undo.append((module, name, original))

            def own(*args: Any, _name: str = name, _original: Any = original,
                    _module: Any = module, **kwargs: Any) -> Any:
                if threading.get_ident() != thread:
                    return _original(*args, **kwargs)
                if _name == "get_max_seqlen":
                    return 0
                if _name == "generate_block_attention_mask":  # of one image
                    return None
                if _name == "is_flash_attention_requested":
                    return not hasattr(_module, "generate_block_attention_mask")
                return replacement(_name, _original, *args, **kwargs)

            setattr(module, name, functools.wraps(original)(own))
    try:
        yield
    finally:
        for module, name, original in undo:
            setattr(module, name, original)


def _replace_splits(thread: int) -> list[tuple[Any, str, Any]]:
    """Replace torch's functions that split the rows of images: there is one image.

    Returns:
        What to undo: owner, name and function.
    """
    tensor: Any = torch.Tensor
    squeezed, as_tensor = tensor.squeeze, torch.as_tensor

    def split(original: Any) -> Any:
        def own(rows: Any, sizes: Any, *others: Any, **named: Any) -> Any:
            if threading.get_ident() == thread and isinstance(sizes, list) and len(sizes) == 1:
                return (rows,)
            return original(rows, sizes, *others, **named)
        return own

    def squeeze(rows: Any, *dims: Any, **named: Any) -> Any:
        axis = dims[0] if dims else named.get("dim")
        # The exporter removes an axis of dynamic size, too.
        if threading.get_ident() == thread and isinstance(axis, int) and \
                not (isinstance(rows.shape[axis], int) and rows.shape[axis] == 1):
            return rows
        return squeezed(rows, *dims, **named)

    def to_tensor(data: Any, *others: Any, **named: Any) -> Any:
        return _OneGrid(None) if isinstance(data, _OneSize) else as_tensor(data, *others, **named)

    undo = [(torch, "split", torch.split), (tensor, "split", tensor.split),
            (tensor, "squeeze", squeezed), (torch, "as_tensor", as_tensor)]
    for (owner, name, _), own in zip(undo, (
            split(torch.split), split(tensor.split), squeeze, to_tensor), strict=True):
        setattr(owner, name, own)
    return undo


def _visible(*sizes: Any, **named: Any) -> Any:
    """Mask function for transformers: sdpa's, which does not look at the values of a mask."""
    padding = named.get("attention_mask")
    if padding is not None:
        if padding.ndim == 2 and named.get("mask_function") is bidirectional_mask_function:
            return padding[:, None, None].to(torch.bool)
        named["allow_is_bidirectional_skip"] = False
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*sizes, **named)


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            attention_mask: torch.Tensor | None, scaling: float | None = None,
            cu_seq_lens_q: torch.Tensor | None = None, **others: object) -> \
        tuple[torch.Tensor, None]:
    """Attention function for transformers: a symbolic BidirectionalAttention node.

    With a mask, it is decomposed.
    """
    batch, heads, seq, dim = query.shape
    scale = float(dim**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        groups = heads // key.shape[1]
        scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scale
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min) \
            if attention_mask.dtype == torch.bool else scores + attention_mask
        out = torch.softmax(scores, -1) @ value.repeat_interleave(groups, 1)
        return out.transpose(1, 2).contiguous(), None
    if query.device.type == "meta":
        return query.new_empty((batch, seq, heads, value.shape[-1])), None
    starts = cu_seq_lens_q if cu_seq_lens_q is not None else \
        (torch.arange(batch + 1) * seq).to(torch.int32)
    packed = [each.transpose(1, 2).reshape(batch * seq, -1) for each in (query, key, value)]
    out = torch.onnx.ops.symbolic(
        "llmc::BidirectionalAttention", (*packed, starts),
        {"num_heads": heads, "num_kv_heads": key.shape[1], "head_dim": dim, "scale": scale},
        dtype=query.dtype, shape=(batch * seq, heads * value.shape[-1]), version=1)
    return out.reshape(batch, seq, heads, -1), None
