"""Tracing of a model without weights: a module to a graph with empty parameters.

Attention uses transformers' attention interface: each call becomes an `Sdpa` node with explicit
mask, window and scale. Models that bypass the interface are exported with eager attention, which
passes recognize.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import torch
from accelerate import init_empty_weights
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutput

from llmc.artifacts.manifest import HIDDEN, HIDDEN_OUT, INPUT_FEATURES, POOLED
from llmc.compiler.frontend.convolutions import RowEncoder, reads_features
from llmc.compiler.frontend.expert_export import use_experts
from llmc.compiler.frontend.exporter import export_onnx
from llmc.compiler.frontend.masks import MaskFunction, Visible, evaluate
from llmc.compiler.frontend.parts import (
    ATTENTION,
    CAUSAL_LM,
    DECODER,
    ENCODER,
    ROOT,
    Part,
    build,
    language_model,
    text_config,
)
from llmc.compiler.frontend.recurrence import states_as_nodes
from llmc.compiler.frontend.repeat import cut_layers
from llmc.compiler.frontend.reproducible import Reproducible
from llmc.compiler.graph.constants import fold_constants
from llmc.compiler.graph.embeds import TOKEN_EMBEDS
from llmc.compiler.graph.names import AFTER_IMAGE, ENCODER_OUTPUT, POSITION_IDS
from llmc.compiler.graph.probe import ELEMENTWISE, LAYOUT
from llmc.compiler.graph.recurrence import CONVOLUTION, RECURRENCE
from llmc.compiler.graph.rewrite import is_op, tidy
from llmc.compiler.graph.weights import Weight, unread
from llmc.errors import MAX_REASON, LlmcError, shortened
from llmc.interrupts import check_interrupted

_FLOAT, _BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16


# The exporter's errors for code that is not one graph for all inputs, with explanations.
_EXPORTERS = (
    (r"Could not guard on data-dependent expression", "its code branches on computed values"),
    (r"(Constraints violated|Specializations unexpectedly required) \(",
     "its code supports only some input lengths"))


class Contradiction(LlmcError):
    """A model's attention arguments contradict its mask."""


class DoesNotRun(LlmcError):
    """The model's code fails during the export."""


def trace(config: Any, part: Part, layers_name: str | None, trust_remote_code: bool,
          kept: Sequence[int] = (), by_axis: bool = False,
          to_images: bool = False) -> onnx.ModelProto:
    """Export a model from its config.

    The result depends only on the arguments and the versions of libraries, not on a checkpoint.
    Parameters are external tensors without a file, named `ROOT` + their name in the model; buffers
    have the values that the model computes. Nodes are named `layer|index|op`; `layer` is empty
    outside of `layers_name`.

    Args:
        config: a transformers config.
        part: the exported part.
        layers_name: name of the layers' module list, whose nodes are tagged.
        trust_remote_code: run code that comes with the model.
        kept: indices of the layers to export; empty: all.
        by_axis: whether a causal LM takes a position by each axis, `POSITION_IDS`.
        to_images: whether a causal LM takes the rows of images that its layers attend to.

    Raises:
        DoesNotRun: the model's code raises an error.
        LlmcError: transformers cannot build the model, or it cannot be exported.
    """
    reasons, kind = [], LlmcError
    for implementation in (ATTENTION, "eager"):
        config._attn_implementation = implementation
        try:
            exported = _run_exporter(config, part, trust_remote_code, layers_name, kept, by_axis,
                                     to_images)
        except Contradiction as error:
            raise Contradiction(f"'{config.model_type}' contradicts itself: {error}; "
                                f"use another model") from error
        except LlmcError as error:
            if "transformers cannot build" in str(error):
                raise
            reasons.append(str(error))
            continue
        except Exception as error:  # any error of the model's code
            check_interrupted()
            reasons.append(root_cause(error))
            kind = DoesNotRun
            continue
        model = to_proto(exported, layers_name)
        text = text_config(config)
        layers = len(kept) or getattr(text, part.layers_key(text) or "num_hidden_layers")
        counts = Counter(node.op_type for node in model.graph.node)
        # In a hybrid, not every layer has attention.
        is_recurrent = counts[CONVOLUTION.name] + counts[RECURRENCE.name] > 0
        if config._attn_implementation == ATTENTION and not is_recurrent and \
                counts["Sdpa"] < layers * part.attentions:
            reasons.append("the model bypasses transformers' attention interface")
            continue
        return model
    raise kind(f"'{config.model_type}' cannot be exported: {'; '.join(dict.fromkeys(reasons))}")


def root_cause(error: BaseException) -> str:
    """Describe the first cause of an error of a model's code or the exporter."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):  # its text is only the key
        return shortened(" ".join([f"its code raises {type(error).__name__}", *lines]),
                         MAX_REASON)
    known = next((f"{words} (" for pattern, words in _EXPORTERS if re.match(pattern, lines[0])), "")
    first = shortened(lines[0].split(". Failure message:")[0], MAX_REASON)
    return f"{known}{first}{')' if known else ''}"


def _run_exporter(config: Any, part: Part, trust_remote_code: bool, layers_name: str | None = None,
                  kept: Sequence[int] = (), by_axis: bool = False,
                  to_images: bool = False) -> ir.Model:
    AttentionInterface.register(ATTENTION, functools.partial(_sdpa, part))
    _disable_extra_outputs(config)
    # Buffers, such as rotary tables and scales, keep their values.
    with init_empty_weights(include_buffers=False), Reproducible():
        model: Any = build(config, part, trust_remote_code)
    if kept and layers_name:
        cut_layers(model, part, layers_name, kept)
    use_experts(model)
    _select_all_keys(model)
    if part is CAUSAL_LM:
        _mark_embeddings(model)
    model.tie_weights()  # init_empty_weights has untied them
    longest = getattr(text_config(config), "max_position_embeddings", None)
    return _export_module(model, part, longest, lambda: _wrap(model, part, by_axis,
                                                                to_images))


def trace_draft(model: torch.nn.Module, width: int, max_positions: int | None,
                part: Part = CAUSAL_LM, outputs: Sequence[str] = ("logits", HIDDEN_OUT)) -> \
        onnx.ModelProto:
    """Export a draft model: input_ids, hidden and position_ids to its outputs.

    Parameters are as in `trace`.

    Args:
        model: its forward has these arguments and results.
        width: size of `hidden`.
        max_positions: maximum number of positions.
        part: `ENCODER` if attention is bidirectional.
        outputs: names of its results.

    Raises:
        LlmcError: it cannot be exported.
    """
    AttentionInterface.register(ATTENTION, functools.partial(_sdpa, part))
    positions = torch.arange(5)[None].expand(2, 5).clone(), "seq"
    inputs = {"input_ids": (torch.zeros((2, 5), dtype=torch.int64), "seq"),
              HIDDEN: (torch.zeros((2, 5, width)), "seq"), "position_ids": positions}
    try:
        return to_proto(_export_module(model, part, max_positions, lambda: (
            _Draft(model), inputs, outputs)), None)
    except LlmcError:
        raise
    except Exception as error:  # any error of the model's code
        check_interrupted()
        raise LlmcError(f"the draft model cannot be exported: {root_cause(error)}; use another "
                        f"one") from error


def _export_module(
        model: Any, part: Part, longest: int | None,
        wrap: Callable[[], tuple[torch.nn.Module, dict[str, tuple[torch.Tensor, str]],
                                 Sequence[str]]]) -> ir.Model:
    """Export a model without values.

    Args:
        model: the model.
        part: the exported part.
        longest: maximum number of positions.
        wrap: returns the module to export, its inputs with the name of axis 1, and the names of its
            outputs.
    """
    functions: list[MaskFunction] = []
    AttentionMaskInterface.register(ATTENTION, functools.partial(_mask, functions))
    _freeze_rotary(model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    replaced: dict[int, torch.nn.Parameter] = {}
    with fake, one_sequence_per_row(), _decomposed_sdpa(), states_as_nodes(model):
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in replaced:
                        replaced[id(parameter)] = torch.nn.Parameter(
                            torch.empty(parameter.shape, dtype=torch.float32), requires_grad=False)
                    module._parameters[name] = replaced[id(parameter)]
        wrapped, inputs, outputs = wrap()
        dims = {name: torch.export.Dim(name) for name in ("batch", "seq", "mem_seq")}
        if longest and longest > 5 and "input_ids" in inputs:  # otherwise tables export twice
            dims["seq"] = torch.export.Dim("seq", max=longest)
        exported = export_onnx(
            wrapped.eval(), {name: value for name, (value, _) in inputs.items()},
            [{0: dims["batch"], 1: dims[length]} for _, length in inputs.values()], outputs,
            longest or 0)
    _resolve_masks(exported.graph, functions, part, longest)
    return exported


def _disable_extra_outputs(config: Any) -> None:
    """Disable outputs for training: Mixtral's first output would be the router loss."""
    for each in (config, text_config(config)):
        for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
            if getattr(each, name, None):
                setattr(each, name, False)


def _mark_embeddings(model: Any) -> None:
    """Mark the output of the token embedding by a symbolic node; see `TOKEN_EMBEDS`."""
    try:
        module = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # code that comes with a model
        return
    embed = module.forward

    def marked(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = embed(*args, **kwargs)
        embeds: torch.Tensor = torch.onnx.ops.symbolic(
            f"llmc::{TOKEN_EMBEDS.name}", (x,), dtype=x.dtype, shape=x.shape, version=1)
        return embeds

    module.forward = marked


def remove_mark(graph: gs.Graph) -> None:
    """Remove the mark of the token embedding's output."""
    for node in graph.nodes:
        if is_op(node, TOKEN_EMBEDS):
            source, result = node.inputs[0], node.outputs[0]
            for reader in list(result.outputs):
                reader.inputs = [source if t is result else t for t in reader.inputs]
    tidy(graph)


def _select_all_keys(model: torch.nn.Module) -> None:
    """Replace indexers of sparse attention, so that they select all keys.

    `limit_seq_len` limits sequences to `index_topk` tokens, so that they would do so anyway.
    """
    def select(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        batch, seq, _hidden = hidden_states.shape
        return torch.arange(seq, dtype=torch.int32).expand(batch, seq, seq)

    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            module.forward = select


def _wrap(model: Any, part: Part, by_axis: bool = False, to_images: bool = False) -> \
        tuple[torch.nn.Module, dict[str, tuple[torch.Tensor, str]], Sequence[str]]:
    """Return what `_export_module` needs for a part of a model."""
    ids = torch.zeros((2, 5), dtype=torch.int64), "seq"
    if part is ENCODER and reads_features(model):
        encoder = RowEncoder(model)
        return encoder, {INPUT_FEATURES: (torch.zeros((2, 5, encoder.width)), "seq")}, \
            [ENCODER_OUTPUT]
    if part is ENCODER:
        return _Encoder(model), {"input_ids": ids}, [ENCODER_OUTPUT]
    if part is DECODER:
        encoder_output = torch.zeros((2, 7, model.config.hidden_size)), "mem_seq"
        return _Decoder(model), {"input_ids": ids, ENCODER_OUTPUT: encoder_output}, ["logits"]
    parameters = inspect.signature(model.forward).parameters
    if part.auto is not None:
        # Positions are the model's own: some count from a padding token's id on.
        inputs = {"input_ids": ids}
        if takes_types(model):
            inputs["token_type_ids"] = torch.zeros((2, 5), dtype=torch.int64), "seq"
        return _Pooled(model, "use_cache" in parameters), inputs, [POOLED]
    takes_positions = "position_ids" in parameters
    positions = torch.arange(5)[None].expand(2, 5).clone(), "seq"
    if to_images:
        rows = torch.zeros((2, 7, text_config(model.config).hidden_size)), "mem_seq"
        return _AttendsToImages(model), {
            "input_ids": ids, "position_ids": positions, ENCODER_OUTPUT: rows,
            AFTER_IMAGE: (torch.ones((2, 5, 1)), "seq")}, ["logits"]
    if by_axis and takes_positions:
        several = {name: (positions[0].clone(), "seq") for name in POSITION_IDS}
        return _ByAxis(model), {"input_ids": ids} | several, ["logits"]
    return _Stateless(model, takes_positions), \
        {"input_ids": ids} | ({"position_ids": positions} if takes_positions else {}), ["logits"]


def takes_types(model: Any) -> bool:
    """Whether a classifier reads token types, which differ in a pair of texts."""
    return model.config.num_labels > 0 and hasattr(model, "num_labels") \
        and "token_type_ids" in inspect.signature(model.forward).parameters \
        and (getattr(model.config, "type_vocab_size", 0) or 0) > 1


def _sdpa(part: Part, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
          attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
          sliding_window: int | None = None, softcap: float | None = None,
          is_causal: bool | None = None, position_bias: torch.Tensor | None = None,
          s_aux: torch.Tensor | None = None, **others: object) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: a symbolic `Sdpa` node.

    Scale and soft-cap are the model's arguments; `_resolve_masks` sets window and causal.
    """
    neutral = {"position_ids", "output_attentions", "use_cache", "cache_position", "head_mask",
               "output_router_logits", "logits_to_keep", "return_dict", "num_items_in_batch",
               "position_embeddings", "indices"}  # see _select_all_keys
    for name, argument in others.items():
        if name not in neutral and argument is not None and argument is not False:
            raise LlmcError(f"{type(module).__name__} passes {name!r} to its attention, which "
                            f"llmc::CausalAttention does not support")
    batch, heads, seq, head_dim = query.shape
    scale = float(head_dim**-0.5 if scaling is None else scaling)
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    out = torch.onnx.ops.symbolic(
        "llmc::Sdpa", (query, key, value, position_bias, s_aux, attention_mask),
        {"scale": scale, "window": int(sliding_window or 0), "softcap": float(softcap or 0.0),
         "causal": -1 if causal is None else int(causal),
         "layer": _layer(module, part), "module": type(module).__name__},
        dtype=query.dtype, shape=(batch, heads, seq, value.shape[-1]), version=1)
    return out.transpose(1, 2).contiguous(), None


def _layer(module: Any, part: Part) -> int:
    """Index of an attention module's layer; -1 if it is unknown or does not matter."""
    if part.causal:
        return int(module.layer_idx)
    index = getattr(module, "layer_idx", None) if part.causal is None else None
    return -1 if index is None else int(index)


def _mask(functions: list[MaskFunction], batch_size: int, q_length: int, kv_length: int,
          mask_function: MaskFunction, dtype: torch.dtype = torch.float32, **others: object) -> \
        torch.Tensor:
    """Mask function for transformers: a symbolic `Mask` node with an index into `functions`."""
    functions.append(mask_function)
    return torch.onnx.ops.symbolic(
        "llmc::Mask", (), {"kind": len(functions) - 1}, dtype=dtype,
        shape=(batch_size, 1, q_length, kv_length), version=1)


def _resolve_masks(graph: ir.Graph, functions: Sequence[MaskFunction], part: Part,
                   max_positions: int | None) -> None:
    """Set causal, window and chunk of each Sdpa node from its mask.

    Raises:
        Contradiction: the mask and the module's arguments differ.
        LlmcError: the mask's origin cannot be determined, or its kind is unsupported.
    """
    kinds = [evaluate(function, max_positions) for function in functions]
    for node in graph:
        if node.op_type != "Sdpa":
            continue
        inputs = [*node.inputs, None, None, None][:6]
        mask, claimed = inputs[5], {name: node.attributes[name].value
                                    for name in ("causal", "window", "module")}
        if mask is None:
            if claimed["window"]:
                raise LlmcError(f"{claimed['module']} passes sliding_window {claimed['window']} "
                                f"to its attention without a mask")
            visible = Visible(claimed["causal"] == 1, 0, 0)
        else:
            visible = kinds[_kind(mask, claimed["module"])]
            if claimed["window"] and visible.causal and not visible.has_window(claimed["window"]):
                raise Contradiction(f"{claimed['module']} passes sliding_window "
                                    f"{claimed['window']} to its attention, but its mask allows "
                                    f"{visible}")
            if part is CAUSAL_LM and claimed["causal"] == 0 and visible.causal:
                raise Contradiction(f"{claimed['module']} has is_causal False, but its mask "
                                    f"allows {visible}")
        if part.causal is not None and visible.causal != (part.causal and not _is_cross(node)):
            raise LlmcError(f"{claimed['module']} in the {part.name} sees {visible}, expected "
                            f"{'causal' if part.causal and not _is_cross(node) else 'all'} keys")
        node.attributes["causal"] = ir.AttrInt64("causal", int(visible.causal))
        node.attributes["window"] = ir.AttrInt64("window", visible.window)
        node.attributes["chunk"] = ir.AttrInt64("chunk", visible.chunk)
        del node.attributes["module"]
        if mask is not None:
            node.replace_input_with(5, None)
        while node.inputs and node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)


def _is_cross(node: ir.Node) -> bool:
    """Whether it is cross-attention."""
    query, key = node.inputs[:2]
    assert query is not None and query.shape is not None
    assert key is not None and key.shape is not None
    return bool(query.shape[2] != key.shape[2])


def _kind(mask: ir.Value, module: str) -> int:
    """Return the kind of the Mask node that a mask comes from."""
    value: ir.Value | None = mask
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Mask":
            return int(node.attributes["kind"].value)
        starts = node.inputs[1].const_value if node.op_type == "Slice" and node.inputs[1] else None
        if node.op_type not in ("Identity", "Cast", "Expand") and (
                starts is None or starts.numpy().any()):
            raise LlmcError(f"{module} passes a mask to its attention that is modified by "
                            f"{node.op_type} '{node.name}'")
        value = node.inputs[0]
    raise LlmcError(f"{module} passes a mask to its attention that is not from transformers' mask "
                    f"interface")


AttentionInterface.register(ATTENTION, functools.partial(_sdpa, CAUSAL_LM))


class _Stateless(torch.nn.Module):
    """input_ids, and position_ids if the model takes them, to logits."""

    def __init__(self, model: torch.nn.Module, takes_positions: bool) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = takes_positions

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> \
            torch.Tensor:
        positions = {"position_ids": position_ids} if self.takes_positions else {}
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False, return_dict=False,
                                          **positions)[0]
        return logits


class _ByAxis(torch.nn.Module):
    """input_ids and a position by each axis to logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor,
                position_ids_1: torch.Tensor, position_ids_2: torch.Tensor) -> torch.Tensor:
        positions = torch.stack([position_ids, position_ids_1, position_ids_2])
        logits: torch.Tensor = self.model(input_ids=input_ids, position_ids=positions,
                                          use_cache=False, return_dict=False)[0]
        return logits


class _AttendsToImages(torch.nn.Module):
    """Tokens, the rows of images that layers attend to, and 1 for tokens after one, to logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor,
                encoder_output: torch.Tensor, after_image: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        hidden = language_model(model)(
            input_ids=input_ids, position_ids=position_ids, cross_attention_states=encoder_output,
            full_text_row_masked_out_mask=_PerToken(after_image), use_cache=False,
            return_dict=True).last_hidden_state
        logits: torch.Tensor = model.get_output_embeddings()(hidden)
        return logits


class _PerToken:
    """A factor of each token [batch, 1, seq, 1] in layers that select [:, 0].

    Args:
        factors: [batch, seq, 1].
    """

    def __init__(self, factors: torch.Tensor) -> None:
        self._factors = factors

    def __getitem__(self, index: object) -> torch.Tensor:
        return self._factors


class _Pooled(torch.nn.Module):
    """input_ids, and token_type_ids if the model takes them, to hidden states or logits."""

    def __init__(self, model: torch.nn.Module, takes_use_cache: bool) -> None:
        super().__init__()
        self.model = model
        self.others = {"use_cache": False} if takes_use_cache else {}

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> \
            torch.Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        pooled: torch.Tensor = self.model(input_ids=input_ids, return_dict=False, **self.others,
                                          **types)[0]
        return pooled


class _Draft(torch.nn.Module):
    """A draft model under `ROOT`."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor,
                position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = self.model(input_ids, hidden, position_ids)
        return results


class _Encoder(torch.nn.Module):
    """input_ids to the encoder output."""

    model: Any

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        encoder_output: torch.Tensor = self.model.get_encoder()(input_ids=input_ids)[0]
        return encoder_output


class _Decoder(torch.nn.Module):
    """The decoder's input_ids and the encoder output to logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, encoder_output: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoder_output),
            decoder_input_ids=input_ids, use_cache=False, return_dict=True).logits
        return logits


def _freeze_rotary(model: torch.nn.Module) -> None:
    """Fix dynamic and longrope rotary embeddings to their frequencies for short sequences.

    They change only beyond max_position_embeddings or original_max_position_embeddings, up to
    which `limit_seq_len` limits sequences.
    """
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "dynamic":
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {layers: "default" if each == "dynamic" else each
                                for layers, each in kind.items()}
        elif kind == "longrope" and "max" in inspect.unwrap(type(module).forward).__code__.co_names:
            module.forward = functools.partial(_of_short_sequences, module.forward)


def _of_short_sequences(forward: Callable[..., Any], *args: Any, **others: Any) -> Any:
    """Run a rotary embedding's forward so that it finds 0 as the maximum position."""
    original, thread = torch.max, threading.get_ident()
    torch.max = lambda *values, **named: torch.tensor(0) if threading.get_ident() == thread \
        else original(*values, **named)
    try:
        return forward(*args, **others)
    finally:
        torch.max = original


@contextlib.contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """Disable transformers' detection of packed sequences and left padding in masks.

    Masks would depend on position_ids. llmc packs sequences in the attention node instead.
    """
    packed, chunked = (masking_utils.find_packed_sequence_indices,
                       masking_utils.chunked_causal_mask_function)
    thread = threading.get_ident()
    masking_utils.find_packed_sequence_indices = lambda position_ids: \
        None if threading.get_ident() == thread else packed(position_ids)
    masking_utils.chunked_causal_mask_function = lambda size, padding: \
        chunked(size, _NoPadding() if threading.get_ident() == thread else padding)
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = packed
        masking_utils.chunked_causal_mask_function = chunked


class _NoPadding:
    """Left padding of each sequence of a batch: none."""

    def __getitem__(self, batch: object) -> int:
        return 0


@contextlib.contextmanager
def _decomposed_sdpa() -> Iterator[None]:
    """Decompose torch's attention into MatMul and Softmax, for models that call it directly.

    The exporter does not support it with broadcast heads (multi-query attention).
    """
    functional, thread = torch.nn.functional, threading.get_ident()
    original = functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, **others: Any) -> torch.Tensor:
        if threading.get_ident() != thread or attn_mask is None or is_causal or others \
                or attn_mask.dtype == torch.bool:
            return original(query, key, value, attn_mask, dropout_p, is_causal, **others)
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + attn_mask
        return torch.softmax(scores, -1) @ value

    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def to_proto(ir_model: ir.Model, layers_name: str | None) -> onnx.ModelProto:
    """Serialize an exported model, with empty parameters and nodes tagged by layer."""
    pattern = re.compile(re.escape(ROOT + layers_name) + r"\.(\d+)") if layers_name else None
    for index, node in enumerate(ir_model.graph):
        scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
        match = pattern.search(scopes) if pattern else None
        if pattern:
            node.name = f"{match.group(1) if match else ''}|{index}|{node.op_type}"
        node.metadata_props.clear()  # stack traces
    for name, value in ir_model.graph.initializers.items():
        tensor = getattr(value.const_value, "raw", None)
        if isinstance(tensor, torch.nn.Parameter) or _is_fake(tensor):
            shape = ir.Shape(tuple(int(dim) for dim in value.shape))
            value.const_value = ir.ExternalTensor("weights", 0, 0, ir.DataType.FLOAT, shape=shape,
                                                  name=name)
    proto: onnx.ModelProto = ir.to_proto(ir_model)
    return proto


def to_graph(model: onnx.ModelProto, bound: Set[str]) -> gs.Graph:
    """Convert the result of `trace` to a graph, with folded constants.

    Parameters, and the float32 buffers that `bound` names, become placeholders for weights.
    """
    graph = gs.import_onnx(model)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer
              if tensor.data_location == onnx.TensorProto.EXTERNAL
              or (tensor.name.removeprefix(ROOT) in bound and tensor.dims
                  and tensor.data_type == onnx.TensorProto.FLOAT)}
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant) and tensor.name in shapes:
            tensor._values = Weight(shapes[tensor.name], np.float32, unread, tensor.name)
    for node in graph.nodes:
        if node.op == "TopK":  # llmc::Route's order; unsorted models accept any
            node.attrs["sorted"] = 1
    _widen(graph)
    tidy(graph)
    fold_constants(graph)
    return graph


def _widen(graph: gs.Graph) -> None:
    """Compute bfloat16 ops in float32 and round their results to bfloat16.

    The results are the same, and ONNX Runtime has few bfloat16 kernels on CPUs.
    """
    narrow: set[int] = set()

    def cast(node: gs.Node, source: gs.Tensor, result: gs.Tensor, to: int) -> gs.Node:
        return gs.Node(op="Cast", name=f"{node.name}.{result.name}", attrs={"to": to},
                       inputs=[source], outputs=[result])

    nodes: list[gs.Node] = []
    for node in graph.nodes:
        inputs = [tensor for tensor in node.inputs if id(tensor) in narrow]
        nodes.append(node)
        if node.op == "Cast":
            narrow |= {id(node.outputs[0])} if node.attrs["to"] == _BFLOAT16 else set()
        elif inputs and node.op in ELEMENTWISE:
            wide = {id(t): gs.Variable(f"{t.name}.wide", np.float32, t.shape)
                    for t in inputs}
            nodes[-1:] = [cast(node, t, wide[id(t)], _FLOAT) for t in inputs] + [node]
            node.inputs = [wide.get(id(t), t) for t in node.inputs]
            (result,) = node.outputs
            node.outputs = [gs.Variable(f"{result.name}.wide", np.float32, result.shape)]
            nodes.append(cast(node, node.outputs[0], result, _BFLOAT16))
            narrow.add(id(result))
        elif inputs and node.op in LAYOUT:
            narrow.update(id(t) for t in node.outputs)
    graph.nodes[:] = nodes


def _is_fake(tensor: Any) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


_ALONE = threading.RLock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the export lock, and silence the exporter's warnings, logs and prints.

    An export registers functions with transformers and patches torch, so threads take turns.
    """
    with _ALONE, _quiet():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), \
            contextlib.redirect_stderr(io.StringIO()):
        # After the caller's filters, so that a test run shows what libraries deprecate.
        warnings.simplefilter("ignore", append=True)
        try:
            yield
        finally:
            logging.disable(disabled)
