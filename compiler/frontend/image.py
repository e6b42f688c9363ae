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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.utils
import onnxruntime as ort
import torch
from accelerate import init_empty_weights
from transformers import AttentionInterface, AutoModelForImageTextToText, vision_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutputWithPast

from llmc.artifacts.manifest import MEDIA_ROWS
from llmc.artifacts.vision_input import GRID, PACK, SIZES, VisionInput
from llmc.compiler.frontend import tile_packing
from llmc.compiler.frontend.media_export import export_encoder, remove_unread
from llmc.compiler.frontend.one_image import OneImage, OneSize
from llmc.compiler.frontend.parts import (
    Part,
    attends_to_images,
    build,
    language_model,
    text_config,
)
from llmc.compiler.frontend.reproducible import Reproducible
from llmc.compiler.frontend.trace import root_cause
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.interrupts import check_interrupted
from llmc.runtime.multimodal.tile_rows import tile_rows

IMAGE = Part("image-text model", (), causal=False, auto=AutoModelForImageTextToText)
# llmc's entries in transformers' attention interface for image encoders.
_ATTENTION, _UNPADDED = "llmc_image", "llmc_image_unpadded"
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class _Call:
    """A call of a function of `vision_utils`.

    Args:
        function: its name.
        arguments: its arguments other than arrays.
        results: what it returned for the sample, by name.
    """

    function: str
    arguments: Mapping[str, Any]
    results: Mapping[str, np.ndarray]


# Functions of an image's grid, and names of their results.
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "get_vision_cu_seqlens": ("cu_seqlens",),
    "get_vision_position_ids": ("position_ids",),
    "get_vision_window_index": ("window_index", "cu_window_seqlens"),
    "get_vision_interpolation_indices_and_weights": ("interp_indices", "interp_weights"),
}


@dataclass(frozen=True)
class TracedImageEncoder:
    """An exported image encoder.

    Args:
        proto: the graph; see `trace_image`.
        computed: how its computed inputs are computed.
        inputs: for each sample, the graph's inputs by name.
        padded: whether a sample has fewer rows than the encoder gives, which are the first ones.
        num_rows: for each sample, the number of rows.
    """

    proto: onnx.ModelProto
    computed: tuple[VisionInput, ...]
    inputs: tuple[Arrays, ...]
    padded: bool
    num_rows: tuple[int, ...]


def trace_image(config: Any, samples: Sequence[Arrays], num_rows: Sequence[int] = ()) -> \
        TracedImageEncoder:
    """Export the image encoder of a model from its config.

    Parameters are named as by `trace`. The graph's inputs are the arrays of a sample, without the
    grid, and computed ones; its outputs are `rows`, float32 [num_rows, width], and those of deep
    layers.

    Args:
        config: a transformers config.
        samples: what the model's processor gives for an image, for several sizes. Axes that differ
            are dynamic.
        num_rows: rows that the prompt takes for each sample, to compare; empty: not known.

    Raises:
        LlmcError: the encoder cannot be exported.
    """
    fixed = _is_fixed(samples, num_rows)
    use_encoder_attention(config, fixed or any(name.endswith("mask") for name in samples[0]))
    try:
        with init_empty_weights(include_buffers=False), Reproducible():
            model: Any = build(config, IMAGE, False)
        with torch.device("meta"):
            empty: Any = build(config, IMAGE, False)
        if features_owner(empty) is None and not attends_to_images(empty):
            raise LlmcError(f"'{config.model_type}' has an image encoder without "
                            f"get_image_features, which llmc does not support; "
                            f"{LANGUAGE_MODEL_ONLY}")
        recorded = [_record(empty, sample) for sample in samples]
        for expected, run in zip(num_rows, recorded, strict=False):
            if run.rows[0] != expected and not (fixed and run.rows[0] > expected):
                raise LlmcError(f"the processor gives an image {expected} tokens, the image "
                                f"encoder of '{config.model_type}' {run.rows[0]} rows; give the "
                                f"processor files that belong to the weights")
        return _export(model, samples, recorded, num_rows if fixed else ())
    except LlmcError:
        raise
    except Exception as error:  # any error of the model's code
        check_interrupted()
        raise LlmcError(f"the image encoder of '{config.model_type}' cannot be exported: "
                        f"{root_cause(error)}; {LANGUAGE_MODEL_ONLY}") from error


def use_encoder_attention(config: Any, padded: bool) -> None:
    """Make a model of this config compute attention as encoders do.

    Args:
        padded: the encoder reads masks of padding.
    """
    for name, visible in ((_ATTENTION, _visible), (_UNPADDED, _visible_unpadded)):
        AttentionInterface.register(name, _attend)
        AttentionMaskInterface.register(name, visible)
    for each in (config, *(getattr(config, name) for name in config.sub_configs
                           if getattr(config, name, None) is not None)):
        each._attn_implementation = _ATTENTION if padded else _UNPADDED


def _is_fixed(samples: Sequence[Arrays], num_rows: Sequence[int]) -> bool:
    """Whether a processor pads the arrays of all images to one size, and rows differ in number."""
    shapes = [{name: array.shape for name, array in sample.items()} for sample in samples]
    return len(set(num_rows)) > 1 and all(own == shapes[0] for own in shapes)


@dataclass(frozen=True)
class _Run:
    """What an encoder did for a sample.

    Args:
        calls: of functions of the grid.
        rows: number of rows of each result.
        constants: see `OneImage`.
        num_masks: number of masks of rows, see `OneImage`.
    """

    calls: Sequence[_Call]
    rows: Sequence[int]
    constants: Sequence[torch.Tensor]
    num_masks: int


def _record(model: Any, sample: Arrays) -> _Run:
    """Run the encoder without values."""
    calls: list[_Call] = []

    def recorded(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == PACK:
            return packed(original, *args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        given.pop("kwargs", None)
        with mode.paused():
            results = original(**{
                key: torch.from_numpy(sample[GRID]) if GRID in meta and value is meta[GRID] else
                value for key, value in given.items()})
        several = results if isinstance(results, tuple) else (results,)
        calls.append(_Call(name, {key: value for key, value in given.items()
                                  if isinstance(value, int | str)},
                           {key: value.numpy() for key, value in
                            zip(_FUNCTIONS[name], several, strict=True)}))
        moved = tuple(value.to("meta") for value in several)
        return moved if isinstance(results, tuple) else moved[0]

    def packed(original: Callable[..., Any], image_features: Sequence[torch.Tensor],
               image_sizes: Any, **named: Any) -> Any:
        owner = tile_packing.packer(model)
        with mode.paused():
            tile_packing.check(owner, original, named, image_features[0].shape[1])
        settings = tile_packing.settings(owner, named)
        results = dict(zip(tile_packing.NAMES, tile_rows(sample, **settings), strict=False))
        calls.append(_Call(PACK, settings, results))
        return [tile_packing.pack(image_features, named["image_newline"], [
            torch.from_numpy(own).to("meta") for own in results.values()])], None

    meta = {name: OneSize([tuple(array[0].tolist())]) if name == SIZES else
            torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device="meta")
            for name, array in sample.items()}
    mode = OneImage()
    with torch.no_grad(), _replaced(model, recorded, mode, sample["pixel_values"].shape[1]):
        results = _features(model, meta)
    return _Run(calls, [len(rows) for rows in results], mode.recorded, len(mode.masks))


def _export(model: Any, samples: Sequence[Arrays], runs: Sequence[_Run],
            num_rows: Sequence[int]) -> TracedImageEncoder:
    """Export an encoder.

    Args:
        num_rows: number of rows of each sample, which are followed by rows of padding; empty: no
            padding.
    """
    names = [name for name in samples[0] if name != SIZES]
    if all(call.function != PACK for call in runs[0].calls) and any(
            SIZES in sample and sample[SIZES].tolist() != [[*sample["pixel_values"].shape[-2:]]]
            for sample in samples):
        raise LlmcError(f"the processor gives {SIZES} other than the size of pixel_values, which "
                        f"llmc does not support; {LANGUAGE_MODEL_ONLY}")
    inputs = {name: [sample[name] for sample in samples] for name in names}
    computed = list[VisionInput]()
    for index, call in enumerate(runs[0].calls):
        results = tuple(f"{name}_{index}" for name in call.results)
        computed.append(VisionInput.model_validate({
            "function": call.function, "arguments": call.arguments, "names": results}))
        for name, result in zip(call.results, results, strict=True):
            inputs[result] = [own.calls[index].results[name] for own in runs]
    constants = runs[0].constants
    if any(not all(map(torch.equal, constants, run.constants)) for run in runs):
        raise LlmcError(f"the encoder's positions depend on the image in a way that llmc does not "
                        f"support; {LANGUAGE_MODEL_ONLY}")
    encoder = _Encoder(model, names, computed, SIZES in samples[0], constants, bool(num_rows))
    masks = [f"mask_{index}" for index in range(runs[0].num_masks)] if num_rows else []
    proto = export_encoder(model, encoder, inputs, [
        MEDIA_ROWS, *(f"{MEDIA_ROWS}_{index}" for index in range(len(runs[0].rows) - 1)), *masks])
    if num_rows:
        _check_masks(proto, masks, samples, num_rows)
    remove_unread(proto, [GRID])
    read = {tensor.name for tensor in proto.graph.input}
    return TracedImageEncoder(proto, tuple(computed), tuple(
        {name: array for name, array in zip(inputs, arrays, strict=True) if name in read}
        for arrays in zip(*inputs.values(), strict=True)), bool(num_rows),
        tuple(run.rows[0] for run in runs))


def _check_masks(proto: onnx.ModelProto, masks: Sequence[str], samples: Sequence[Arrays],
                 num_rows: Sequence[int]) -> None:
    """Check that masks of rows select the first rows of each sample, and remove their outputs.

    Raises:
        LlmcError: they select others, or the encoder has no mask.
    """
    names = [tensor.name for tensor in proto.graph.input if tensor.name in samples[0]]
    part = onnx.utils.Extractor(proto).extract_model(names, list(masks))
    found = [ort.InferenceSession(part.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {name: sample[name] for name in names}) for sample in samples] if masks else []
    if not masks or any(not np.array_equal(mask.reshape(-1), np.arange(mask.size) < count)
                        for own, count in zip(found, num_rows, strict=True) for mask in own):
        raise LlmcError(f"its rows of padding are not the last ones, which llmc does not "
                        f"support; {LANGUAGE_MODEL_ONLY}")
    outputs = [tensor for tensor in proto.graph.output if tensor.name not in masks]
    del proto.graph.output[:]
    proto.graph.output.extend(outputs)


class _Encoder(torch.nn.Module):
    """Arrays of an image, and computed inputs, to rows."""

    def __init__(self, model: Any, names: Sequence[str], computed: Sequence[VisionInput],
                 has_sizes: bool, constants: Sequence[torch.Tensor], gives_masks: bool) -> None:
        super().__init__()
        self._constants = torch.nn.Module()
        for index, own in enumerate(constants):
            self._constants.register_buffer(str(index), own)
        self.model, self._names, self._has_sizes = model, names, has_sizes
        self._gives_masks = gives_masks
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
            if name == PACK:
                features = kwargs["image_features"] if "image_features" in kwargs else args[0]
                return [tile_packing.pack(features, kwargs["image_newline"], results)], None
            return results if count > 1 else results[0]

        if self._has_sizes:
            given[SIZES] = OneSize([tuple(given["pixel_values"].shape[-2:])])
        mode = OneImage(self._constants.buffers())
        with _replaced(self.model, given_instead, mode, given["pixel_values"].shape[1]):
            rows = _features(self.model, given)
        rows += mode.masks if self._gives_masks else []
        return rows if len(rows) > 1 else rows[0]


def features_owner(model: Any) -> Any:
    """Return the outermost module with `get_image_features`; None if absent."""
    return next((each for each in model.modules() if hasattr(each, "get_image_features")), None)


def _features(model: Any, arrays: Mapping[str, Any]) -> list[torch.Tensor]:
    """Run `get_image_features`; return its rows, [num_rows, width], and those of deep layers."""
    owner = features_owner(model)
    known = inspect.signature(
        model.forward if owner is None else owner.get_image_features).parameters
    unknown = [name for name in arrays if name not in known
               and not _takes(model, name)]
    if unknown:
        raise LlmcError(f"the processor gives {unknown[0]!r}, which the image encoder does not "
                        f"take")
    if owner is None:
        return [_joined(attended_rows(model, arrays))]
    output = owner.get_image_features(**arrays, return_dict=True)
    if getattr(output, "pooler_output", None) is None:
        return [_joined(placed_rows(model, output))]
    deep = getattr(output, "deepstack_features", None) or ()
    return [_joined(each) for each in (output.pooler_output, *deep)]


def attended_rows(model: Any, arrays: Mapping[str, Any]) -> torch.Tensor:
    """Return the rows of images that layers of a language model attend to, [..., width].

    The model runs with a language model that returns them.

    Args:
        model: see `attends_to_images`.
        arrays: what the processor gives for images.
    """
    def returned(*args: Any, cross_attention_states: Any = None, **others: Any) -> Any:
        return BaseModelOutputWithPast(last_hidden_state=cross_attention_states)

    ids = torch.zeros((1, 1), dtype=torch.int64, device=arrays["pixel_values"].device)
    with _method(language_model(model), "forward", returned):
        rows: torch.Tensor = model.base_model.forward(
            input_ids=ids, use_cache=False, return_dict=True, **arrays).last_hidden_state
    return rows


class _Placed(Exception):
    """Rows that a model is about to put into the prompt."""


def placed_rows(model: Any, output: Any) -> Any:
    """Return what the model makes of the results of `get_image_features` in the prompt.

    Its forward pass runs up to `get_placeholder_mask`, whose argument they are.

    Args:
        output: the results.

    Raises:
        LlmcError: the model takes no such results.
    """
    def mask(input_ids: Any, inputs_embeds: Any = None, image_features: Any = None,
             **others: Any) -> None:
        raise _Placed(image_features)

    width = text_config(model.config).hidden_size
    device = output.last_hidden_state.device
    try:
        with _method(model, "get_placeholder_mask", mask), \
                _method(model, "get_input_embeddings",
                        lambda: lambda ids: torch.zeros((*ids.shape, width), device=device)):
            model.forward(  # an exception would upset a tracer of module calls
                input_ids=torch.zeros((1, 1), dtype=torch.int64, device=device),
                mm_encoder_outputs={"image": output}, use_cache=False)
    except _Placed as placed:
        if placed.args[0] is not None:
            return placed.args[0]
    raise LlmcError(f"get_image_features gives no pooler_output, and get_placeholder_mask takes no "
                    f"rows of the prompt; {LANGUAGE_MODEL_ONLY}")


@contextlib.contextmanager
def _method(model: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one model."""
    model.__dict__[name] = replacement
    try:
        yield
    finally:
        del model.__dict__[name]


def _takes(model: Any, name: str) -> bool:
    """Whether the inner method takes an argument that the outer one passes on."""
    inner = getattr(model, "model", None)
    return inner is not None and name in inspect.signature(inner.get_image_features).parameters


def _joined(features: Any) -> torch.Tensor:
    """Join the rows of all tiles and images."""
    rows = features if isinstance(features, torch.Tensor) else torch.cat(list(features))
    return rows.reshape(-1, rows.shape[-1])


@contextlib.contextmanager
def _replaced(model: Any, replacement: Callable[..., Any], mode: OneImage, tiles: Any) -> \
        Iterator[None]:
    """Replace functions of the grid in the modules that define the model, and those of `mode`.

    `tiles` is the number of tiles of models that compute it from an image's size.

    `replacement` gets the function's name, the function and its arguments. Vision attention gets
    `cu_seqlens` instead of one sequence at a time, as flash attention does.
    """
    thread = threading.get_ident()
    undo = list[tuple[Any, str, Any]]()
    modules = {sys.modules[type(each).__module__] for each in model.modules()}
    modules.add(vision_utils)
    for module in modules:
        for name in (*_FUNCTIONS, "get_max_seqlen", "is_flash_attention_requested",
                     "generate_block_attention_mask", "image_size_to_num_patches"):
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
                if _name == "image_size_to_num_patches":
                    return tiles
                if _name == "generate_block_attention_mask":  # of one image
                    return None
                if _name == "is_flash_attention_requested":
                    return not hasattr(_module, "generate_block_attention_mask")
                return replacement(_name, _original, *args, **kwargs)

            setattr(module, name, functools.wraps(original)(own))
    owner = tile_packing.packer(model)
    packing = contextlib.nullcontext() if owner is None else _method(
        owner, PACK, functools.partial(replacement, PACK, getattr(owner, PACK)))
    try:
        with packing, mode:
            yield
    finally:
        for module, name, original in undo:
            setattr(module, name, original)


def _visible(*sizes: Any, **named: Any) -> Any:
    """Mask function for transformers: sdpa's, which does not look at the values of a mask."""
    if named.get("attention_mask") is not None:
        named["allow_is_bidirectional_skip"] = False
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*sizes, **named)


def _visible_unpadded(*sizes: Any, **named: Any) -> Any:
    """Mask function of encoders whose model makes a mask of padding, and has no padding."""
    return _visible(*sizes, **{**named, "attention_mask": None})


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
        if key.shape[1] < heads:
            key, value = (each.repeat_interleave(heads // key.shape[1], 1)
                          for each in (key, value))
        scores = query @ key.transpose(-1, -2) * scale
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min) \
            if attention_mask.dtype == torch.bool else scores + attention_mask
        out = torch.softmax(scores, -1) @ value
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
