"""Bidirectional attention of a prompt with images, determined by running the model's own masks.

The model is run up to its layers, with parameters that are all zero and take no memory. Each layer
gets a mask whose function is evaluated on a prompt with two images, one longer than any window.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from llmc.artifacts.manifest import Bidirectional
from llmc.compiler.frontend.image import IMAGE
from llmc.compiler.frontend.masks import (
    MaskFunction,
    Visible,
    evaluate_prompt,
    largest_number,
    visible_keys,
)
from llmc.compiler.frontend.parts import CAUSAL_LM, build, text_config, text_prefix
from llmc.compiler.frontend.repeat import find_layers
from llmc.compiler.frontend.trace import one_sequence_per_row, root_cause
from llmc.compiler.graph.sdpa import WHOLE, WINDOWED
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.interrupts import check_interrupted

_MASKS = "llmc_masks"  # llmc's entry in transformers' interfaces of attention and of masks
_TEXT = 3  # tokens before, between and after images
_SHORT = 5  # tokens of the shorter image
_TYPES = ("mm_token_type_ids", "token_type_ids")  # arguments: 1 for tokens of images


@dataclass(frozen=True)
class ImageMasks:
    """How the language model reads images besides their rows.

    Args:
        kind: tokens with bidirectional attention; see `ImageEncoderProgram`.
        by_layer: `Sdpa.bidirectional` of each layer.
        token_id: see `ImageEncoderProgram`.
    """

    kind: Bidirectional | None = None
    by_layer: Sequence[str] = ()
    token_id: int | None = None


class _Done(Exception):
    """The last layer has been reached."""


@dataclass
class _Run:
    """What a run of the model gave.

    Args:
        functions: of each layer's mask; None: it reads none, as recurrent layers do.
        tables: token ids that tables of the language model but the token embedding read, by name.
    """

    functions: list[MaskFunction | None] = field(default_factory=list)
    tables: dict[str, np.ndarray] = field(default_factory=dict)


def image_masks(config: Any, row_token: int) -> ImageMasks:
    """Determine how an image-text model's language model reads images besides their rows.

    Args:
        config: a transformers config.
        row_token: token at positions of rows.

    Raises:
        LlmcError: the model cannot be run, or its attention is bidirectional in another way than
            `ImageEncoderProgram` can express.
    """
    config = copy.deepcopy(config)
    AttentionInterface.register(_MASKS, _unreached)
    AttentionMaskInterface.register(_MASKS, functools.partial(_mask, []))
    for each in (config, *(getattr(config, name) for name in config.sub_configs
                           if getattr(config, name, None) is not None)):
        each._attn_implementation = _MASKS
    with init_empty_weights(include_buffers=False):
        model: Any = build(config, IMAGE, False)
    _without_memory(model)
    argument = next((name for name in _TYPES
                     if name in inspect.signature(model.forward).parameters), None)
    try:
        return _find(model, argument, row_token)
    except LlmcError as error:
        raise LlmcError(f"images of '{config.model_type}' are not supported: {error}; "
                        f"{LANGUAGE_MODEL_ONLY}") from error
    except Exception as error:  # any error of the model's code
        check_interrupted()
        raise LlmcError(f"the attention masks of '{config.model_type}' cannot be determined: "
                        f"{root_cause(error)}; {LANGUAGE_MODEL_ONLY}") from error


def _find(model: Any, argument: str | None, row_token: int) -> ImageMasks:
    images = _images(_SHORT)
    length = images[-1][1] + _TEXT
    types = np.zeros(length, np.int64)
    for start, stop in images:
        types[start:stop] = 1
    found = _run(model, types, row_token, {argument: types} if argument else {})
    token_id = _table_id(found, types, row_token)
    if argument is None:
        return ImageMasks(token_id=token_id)
    longest = max(0 if function is None else largest_number(function)
                  for function in found.functions) + _SHORT
    plain = [None if function is None else evaluate_prompt(function, longest + _SHORT)
             for function in _run(
                 model, np.zeros(longest + _SHORT, np.int64), row_token, {}).functions]
    kind: Bidirectional = "images"
    if argument == "token_type_ids":
        of_text = _run(model, types, row_token, {argument: np.zeros_like(types)})
        if any(function is not None and _seen(function, length)[0, -1]
               for function in of_text.functions):
            kind = "prompt"
    by_layer = _by_layer(model, argument, row_token, kind, plain, longest)
    return ImageMasks(kind if any(by_layer) else None, by_layer if any(by_layer) else (), token_id)


def _by_layer(model: Any, argument: str, row_token: int, kind: Bidirectional,
              plain: Sequence[Visible | None], longest: int) -> list[str]:
    """Find `Sdpa.bidirectional` of each layer, by an image of `longest` tokens and another one."""
    images = _images(longest)
    length = images[-1][1] + _TEXT
    types, groups = np.zeros(length, np.int64), np.full(length, -1)
    for index, (start, stop) in enumerate(images):
        types[start:stop], groups[start:stop] = 1, index
    given = types if kind == "images" else np.zeros_like(types)
    groups = groups if kind == "images" else np.zeros_like(groups)
    run = _run(model, types, row_token, {argument: given})
    known: dict[tuple[int, Visible | None], str] = {}
    result = []
    for function, base in zip(run.functions, plain, strict=True):
        key = id(function), base
        if key not in known:
            known[key] = "" if function is None else form_of(_seen(function, length), base, groups)
        result.append(known[key])
    return result


def form_of(visible: np.ndarray, base: Visible | None, groups: np.ndarray) -> str:
    """`Sdpa.bidirectional` of a mask.

    Args:
        visible: bool [n, n], the keys that a query (axis 0) sees.
        base: the mask of a prompt without images; None: `Visible` cannot express it.
        groups: int [n], number of each token's range; -1: none.

    Raises:
        LlmcError: it is another one.
    """
    if base is None:
        raise LlmcError("its attention is neither full nor causal, with an optional window or "
                        "chunks")
    query, key = np.ogrid[:len(groups), :len(groups)]
    causal = key <= query
    recent = key > query - (base.window or len(groups))
    together = (groups[:, None] == groups) & (groups >= 0)[:, None]
    if base.causal and not base.chunk:
        for form, expected in (("", causal & recent), (WINDOWED, (causal | together) & recent),
                               (WHOLE, (causal & recent) | together)):
            if np.array_equal(visible, expected):
                return form
    elif np.array_equal(visible, _text_alone(base, causal, query, key)):
        return ""
    raise LlmcError("its tokens of images see others than those before them and those of the same "
                    "image")


def _text_alone(base: Visible, causal: np.ndarray, query: np.ndarray, key: np.ndarray) -> \
        np.ndarray:
    """The mask of a prompt without images, in chunks or not causal."""
    if base.causal:
        chunks: np.ndarray = causal & (query // base.chunk == key // base.chunk)
        return chunks
    near: np.ndarray = np.abs(query - key) <= (base.window or causal.size)
    return near


def _images(longest: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Start and end of two images, the first with `longest` tokens."""
    second = _TEXT + longest + _TEXT
    return (_TEXT, _TEXT + longest), (second, second + _SHORT)


def _seen(function: MaskFunction, length: int) -> np.ndarray:
    """The mask of a prompt, bool [length, length]."""
    positions = torch.arange(length)
    return np.asarray(visible_keys(function, positions, positions).numpy())


def _table_id(run: _Run, types: np.ndarray, row_token: int) -> int | None:
    """The token id that other tables than the token embedding read at positions of rows.

    Raises:
        LlmcError: it is not the same for all of them.
    """
    found = {int(token) for ids in run.tables.values() for token in ids[types == 1]}
    if len(found) > 1:
        raise LlmcError(f"its tables of tokens read {len(found)} token ids at positions of images")
    return found.pop() if found and found != {row_token} else None


def _run(model: Any, types: np.ndarray, row_token: int, given: Mapping[str, np.ndarray]) -> _Run:
    """Run a model up to the last layer on a prompt, whose tokens of images have type 1."""
    text = text_config(model.config)
    count = int(getattr(text, CAUSAL_LM.layers_key(text) or "num_hidden_layers"))
    name, layers = find_layers(model, CAUSAL_LM, count)
    other = 1 if row_token == 0 else 0
    ids = np.where(types == 1, row_token, other)
    known = list[MaskFunction]()
    AttentionMaskInterface.register(_MASKS, functools.partial(_mask, known))
    run, undo = _Run(), list[tuple[torch.nn.Module, Any]]()

    def reached(layer: torch.nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> \
            Any:
        arguments = inspect.signature(forward).bind(*args, **named).arguments
        arguments |= arguments.get("kwargs", {})
        run.functions.append(_function(known, arguments.get("attention_mask")))
        if len(run.functions) == len(layers):
            raise _Done
        return args[0] if args else named["hidden_states"]

    def read(table: str, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        read_ids = args[0].reshape(-1).numpy()
        if read_ids.shape == ids.shape and (read_ids[types == 0] == other).all():
            run.tables[table] = read_ids

    hooks = [module.register_forward_pre_hook(functools.partial(read, table))
             for table, module in model.named_modules()
             if isinstance(module, torch.nn.Embedding) and table.startswith(text_prefix(model))
             and module is not model.get_input_embeddings()]
    for layer in layers:
        undo.append((layer, layer.forward))
        layer.forward = functools.partial(reached, layer, layer.forward)
    try:
        with torch.no_grad(), one_sequence_per_row():
            model(input_ids=torch.from_numpy(ids)[None], use_cache=False,
                  **{key: torch.from_numpy(value)[None] for key, value in given.items()})
    except _Done:
        return run
    finally:
        for hook in hooks:
            hook.remove()
        for layer, forward in undo:
            layer.forward = forward
    raise LlmcError(f"its layers '{name}' do not run in order")


def _without_memory(model: torch.nn.Module) -> None:
    """Replace all parameters by zeros that share one number."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(
                    torch.zeros(()).expand(parameter.shape), requires_grad=False)


def _mask(known: list[MaskFunction], batch_size: int, q_length: int, kv_length: int,
          mask_function: MaskFunction, **others: object) -> torch.Tensor:
    """Mask function for transformers: a tensor of the number of the mask's function."""
    known.append(mask_function)
    return torch.full((1, 1, 1, 1), len(known) - 1).expand(batch_size, 1, q_length, kv_length)


def _function(known: Sequence[MaskFunction], mask: object) -> MaskFunction | None:
    """The function of a mask, whole or sliced."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.int64 or not mask.numel():
        raise LlmcError("its layers have masks that are not from transformers' mask interface")
    return known[int(mask.flatten()[0])]


def _unreached(*args: object, **named: object) -> None:
    """Attention function for transformers, which no layer calls."""
    raise AssertionError("attention of a model whose layers do not run")
