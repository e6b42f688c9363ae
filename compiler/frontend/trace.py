"""Export a model without its weights: a module to a graph whose parameters are empty.

Attention goes through transformers' own interface: a null mask and a function that becomes one
`Sdpa` node, so nothing about masks, windows or scale is left to guess. Models that bypass the
interface are exported with eager attention, for the passes to recognise.
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

from llmc.compiler.frontend.experts import use_experts
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
    text_config,
)
from llmc.compiler.frontend.repeat import cut_layers
from llmc.compiler.frontend.reproducible import Reproducible
from llmc.compiler.frontend.states import states_as_nodes
from llmc.compiler.graph.constants import fold_constants
from llmc.compiler.graph.names import ENCODER_OUTPUT
from llmc.compiler.graph.probe import ELEMENTWISE, LAYOUT
from llmc.compiler.graph.recurrence import CONVOLUTION, RECURRENCE
from llmc.compiler.graph.rewrite import tidy
from llmc.compiler.graph.weights import Weight, unread
from llmc.errors import MAX_REASON, LlmcError, shortened
from llmc.interrupts import check_interrupted

_FLOAT, _BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16


# What the exporter says where a model's code is not one graph for all inputs, and what that means.
_EXPORTERS = (
    (r"Could not guard on data-dependent expression", "its code branches by what it has computed"),
    (r"(Constraints violated|Specializations unexpectedly required) \(",
     "its code takes some lengths of its input alone"))


class Contradiction(LlmcError):
    """A model says one thing of its attention and computes another."""


class DoesNotRun(LlmcError):
    """What the exporter called of a model raised an error of its own."""


def trace(config: Any, part: Part, layers_name: str | None, trust_remote_code: bool,
          kept: Sequence[int] = ()) -> onnx.ModelProto:
    """The model that `config` describes, exported; where there are some `kept`, of its layers only
    these.

    Nothing but the arguments goes in, no tensor of a checkpoint does: so the result may be kept by
    config, part, `layers_name`, `kept` and the versions of what runs here. Parameters are
    external tensors without a file, named `ROOT` and their name in the model; buffers have the
    values that the model gives them. Nodes are named `layer|index|op`, with nothing for layer
    outside of `layers_name`.

    Raises:
        DoesNotRun: the model's own code raises an error.
        LlmcError: transformers cannot build the model, or it cannot be exported.
    """
    reasons, kind = [], LlmcError
    for implementation in (ATTENTION, "eager"):
        config._attn_implementation = implementation
        try:
            exported = _run_exporter(config, part, trust_remote_code, layers_name, kept)
        except Contradiction as error:
            raise Contradiction(f"'{config.model_type}' contradicts itself: {error}") from error
        except LlmcError as error:
            if "transformers cannot build" in str(error):
                raise
            reasons.append(str(error))
            continue
        except Exception as error:  # the exporter raises whatever the model's code raises
            check_interrupted()
            reasons.append(_root_cause(error))
            kind = DoesNotRun
            continue
        model = _to_proto(exported, layers_name)
        text = text_config(config)
        layers = len(kept) or getattr(text, part.layers_key(text) or "num_hidden_layers")
        made = Counter(node.op_type for node in model.graph.node)
        # Of a hybrid not every layer attends.
        keeps_states = made[CONVOLUTION.name] + made[RECURRENCE.name] > 0
        if config._attn_implementation == ATTENTION and not keeps_states and \
                made["Sdpa"] < layers * part.attentions:
            reasons.append("the model bypasses transformers' attention interface")
            continue
        return model
    raise kind(f"'{config.model_type}' cannot be exported: {'; '.join(dict.fromkeys(reasons))}")


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):  # which says the key and no more
        return shortened(" ".join([f"its code raises {type(error).__name__}", *lines]),
                         MAX_REASON)
    said = next((f"{words} (" for pattern, words in _EXPORTERS if re.match(pattern, lines[0])), "")
    first = shortened(lines[0].split(". Failure message:")[0], MAX_REASON)
    return f"{said}{first}{')' if said else ''}"


def _run_exporter(config: Any, part: Part, trust_remote_code: bool, layers_name: str | None = None,
                  kept: Sequence[int] = ()) -> ir.Model:
    AttentionInterface.register(ATTENTION, functools.partial(_sdpa, part))
    _want_logits_alone(config)
    # Rotary tables and scales keep their values.
    with init_empty_weights(include_buffers=False), Reproducible():
        model: Any = build(config, part, trust_remote_code)
    if kept and layers_name:
        cut_layers(model, part, layers_name, kept)
    functions: list[MaskFunction] = []
    AttentionMaskInterface.register(ATTENTION, functools.partial(_mask, functions))
    _freeze_rotary(model)
    use_experts(model)
    _choose_all_keys(model)
    model.tie_weights()  # making parameters empty has untied them
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    replaced: dict[int, torch.nn.Parameter] = {}
    with fake, _one_sequence_per_row(), _sdpa_spelled_out(), states_as_nodes(model):
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in replaced:
                        replaced[id(parameter)] = torch.nn.Parameter(
                            torch.empty(parameter.shape, dtype=torch.float32), requires_grad=False)
                    module._parameters[name] = replaced[id(parameter)]
        wrapped, inputs, output = _wrap(model, part)
        longest = getattr(text_config(config), "max_position_embeddings", None)
        dims = {name: torch.export.Dim(name) for name in ("batch", "seq", "mem_seq")}
        exported = export_onnx(
            wrapped.eval(), {name: value for name, (value, _) in inputs.items()},
            [{0: dims["batch"], 1: dims[length]} for _, length in inputs.values()], [output],
            longest or 0)
    _see(exported.graph, functions, part, longest)
    return exported


def _want_logits_alone(config: Any) -> None:
    """Turn off what training asks of a model besides, in its config: with a loss of the routers,
    Mixtral's first output is that.
    """
    for own in (config, text_config(config)):
        for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
            if getattr(own, name, None):
                setattr(own, name, False)


def _choose_all_keys(model: torch.nn.Module) -> None:
    """Indexers choose `index_topk` keys, all of them where there are no more: `limit_seq_len` sees
    to that.
    """
    def chosen(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        batch, seq, _hidden = hidden_states.shape
        return torch.arange(seq, dtype=torch.int32).expand(batch, seq, seq)

    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            module.forward = chosen


def _wrap(model: Any, part: Part) -> \
        tuple[torch.nn.Module, dict[str, tuple[torch.Tensor, str]], str]:
    """What to export: a module, its inputs by name, each with the name of axis 1, and its output.
    """
    ids = torch.zeros((2, 5), dtype=torch.int64), "seq"
    if part is ENCODER:
        return _Encoder(model), {"input_ids": ids}, ENCODER_OUTPUT
    if part is DECODER:
        memory = torch.zeros((2, 7, model.config.hidden_size)), "mem_seq"
        return _Decoder(model), {"input_ids": ids, ENCODER_OUTPUT: memory}, "logits"
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    positions = torch.arange(5)[None].expand(2, 5).clone(), "seq"
    return _Stateless(model, takes_positions), \
        {"input_ids": ids} | ({"position_ids": positions} if takes_positions else {}), "logits"


def _sdpa(part: Part, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
          attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
          sliding_window: int | None = None, softcap: float | None = None,
          is_causal: bool | None = None, position_bias: torch.Tensor | None = None,
          s_aux: torch.Tensor | None = None, **others: object) -> tuple[torch.Tensor, None]:
    """transformers' attention function: one symbolic node, heads as they are. Its scale and
    soft-cap are what the model multiplies by, its window and whether it is causal are of its mask,
    once `_see` has been there.
    """
    neutral = {"position_ids", "output_attentions", "use_cache", "cache_position", "head_mask",
               "output_router_logits", "logits_to_keep", "return_dict", "num_items_in_batch",
               "position_embeddings", "indices"}  # of all keys: see _choose_all_keys
    for name, argument in others.items():
        if name not in neutral and argument is not None and argument is not False:
            raise LlmcError(f"{type(module).__name__} passes {name!r} to its attention, which "
                            f"llmc::CausalAttention does not have")
    batch, heads, seq, head_dim = query.shape
    scale = float(head_dim**-0.5 if scaling is None else scaling)
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    out = torch.onnx.ops.symbolic(
        "llmc::Sdpa", (query, key, value, position_bias, s_aux, attention_mask),
        {"scale": scale, "window": int(sliding_window or 0), "softcap": float(softcap or 0.0),
         "causal": -1 if causal is None else int(causal),
         "layer": int(module.layer_idx if part.causal else -1), "module": type(module).__name__},
        dtype=query.dtype, shape=(batch, heads, seq, value.shape[-1]), version=1)
    return out.transpose(1, 2).contiguous(), None


def _mask(functions: list[MaskFunction], batch_size: int, q_length: int, kv_length: int,
          mask_function: MaskFunction, dtype: torch.dtype = torch.float32, **others: object) -> \
        torch.Tensor:
    """transformers' mask function: a symbolic node that tells one mask from another."""
    functions.append(mask_function)
    return torch.onnx.ops.symbolic(
        "llmc::Mask", (), {"kind": len(functions) - 1}, dtype=dtype,
        shape=(batch_size, 1, q_length, kv_length), version=1)


def _see(graph: ir.Graph, functions: Sequence[MaskFunction], part: Part,
         max_positions: int | None) -> None:
    """Say in each Sdpa node what its mask lets it see, instead of what its module says.

    Raises:
        Contradiction: the mask and the module say different things.
        LlmcError: a mask cannot be followed to where it was made, or is of an unknown kind.
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
                                f"to its attention, and no mask")
            visible = Visible(claimed["causal"] == 1, 0, 0)
        else:
            visible = kinds[_kind(mask, claimed["module"])]
            if claimed["window"] and not visible.has_window(claimed["window"]):
                raise Contradiction(f"{claimed['module']} passes sliding_window "
                                    f"{claimed['window']} to its attention, but its mask shows "
                                    f"{visible}")
            if part is CAUSAL_LM and claimed["causal"] == 0 and visible.causal:
                raise Contradiction(f"{claimed['module']} says that it is not causal, but its "
                                    f"mask shows {visible}")
        if visible.causal != (part.causal and not _is_cross(node)):
            raise LlmcError(f"{claimed['module']} in the {part.name} sees {visible}")
        node.attributes["causal"] = ir.AttrInt64("causal", int(visible.causal))
        node.attributes["window"] = ir.AttrInt64("window", visible.window)
        node.attributes["chunk"] = ir.AttrInt64("chunk", visible.chunk)
        del node.attributes["module"]
        node.replace_input_with(5, None)
        while node.inputs and node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)


def _is_cross(node: ir.Node) -> bool:
    """Whether the keys are of other tokens than the queries."""
    query, key = node.inputs[:2]
    assert query is not None and query.shape is not None
    assert key is not None and key.shape is not None
    return bool(query.shape[2] != key.shape[2])


def _kind(mask: ir.Value, module: str) -> int:
    """Which Mask node a mask comes from, past what leaves it as it is."""
    value: ir.Value | None = mask
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Mask":
            return int(node.attributes["kind"].value)
        starts = node.inputs[1].const_value if node.op_type == "Slice" and node.inputs[1] else None
        if node.op_type not in ("Identity", "Cast", "Expand") and (
                starts is None or starts.numpy().any()):
            raise LlmcError(f"{module} passes a mask to its attention that is changed by "
                            f"{node.op_type} '{node.name}'")
        value = node.inputs[0]
    raise LlmcError(f"{module} passes a mask of its own to its attention")


AttentionInterface.register(ATTENTION, functools.partial(_sdpa, CAUSAL_LM))


class _Stateless(torch.nn.Module):
    """input_ids (and position_ids, where the model takes them) to logits."""

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


class _Encoder(torch.nn.Module):
    """input_ids to what the decoder sees of them."""

    model: Any

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        memory: torch.Tensor = self.model.get_encoder()(input_ids=input_ids)[0]
        return memory


class _Decoder(torch.nn.Module):
    """input_ids of the decoder and what the encoder made to logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, encoder_output: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoder_output),
            decoder_input_ids=input_ids, use_cache=False, return_dict=True).logits
        return logits


def _freeze_rotary(model: torch.nn.Module) -> None:
    """Keep dynamic rotary embeddings at their first frequencies, which they leave only beyond
    max_position_embeddings, and longrope's whose code branches by the length at what they are for
    short sequences. No sequence is longer: `limit_seq_len` sees to that.
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
    """What a rotary embedding's forward makes where the last position that it finds is the first.
    """
    original, thread = torch.max, threading.get_ident()
    torch.max = lambda *given, **named: torch.tensor(0) if threading.get_ident() == thread \
        else original(*given, **named)
    try:
        return forward(*args, **others)
    finally:
        torch.max = original


@contextlib.contextmanager
def _one_sequence_per_row() -> Iterator[None]:
    """Without transformers' search for several sequences in a row of position_ids, and for padding
    at its left, which would make masks depend on them. llmc packs behind the mask, in the attention
    node.
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
    """How many tokens of padding each sequence of a batch begins with."""

    def __getitem__(self, batch: object) -> int:
        return 0


@contextlib.contextmanager
def _sdpa_spelled_out() -> Iterator[None]:
    """With torch's own attention, for models that call it by themselves, in products and a softmax:
    the exporter takes none whose heads share keys.
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


def _to_proto(ir_model: ir.Model, layers_name: str | None) -> onnx.ModelProto:
    """The exported model with its parameters empty and its nodes tagged by layer."""
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
    made: onnx.ModelProto = ir.to_proto(ir_model)
    return made


def to_graph(model: onnx.ModelProto, bound: Set[str]) -> gs.Graph:
    """What `trace` made as a graph, constants folded. Parameters, and the buffers of floats that
    `bound` names, are placeholders for weights.
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
        if node.op == "TopK":  # where any order will do, the one that llmc::Route gives
            node.attrs["sorted"] = 1
    _widen(graph)
    tidy(graph)
    fold_constants(graph)
    return graph


def _widen(graph: gs.Graph) -> None:
    """Compute in float32 what is computed in bfloat16, for which ONNX Runtime has few kernels on
    CPUs, and round the results to bfloat16, which gives the same.
    """
    narrow: set[int] = set()

    def cast(node: gs.Node, source: gs.Tensor, made: gs.Tensor, to: int) -> gs.Node:
        return gs.Node(op="Cast", name=f"{node.name}.{made.name}", attrs={"to": to},
                       inputs=[source], outputs=[made])

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
            (made,) = node.outputs
            node.outputs = [gs.Variable(f"{made.name}.wide", np.float32, made.shape)]
            nodes.append(cast(node, node.outputs[0], made, _BFLOAT16))
            narrow.add(id(made))
        elif inputs and node.op in LAYOUT:
            narrow.update(id(t) for t in node.outputs)
    graph.nodes[:] = nodes


def _is_fake(tensor: Any) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


_ALONE = threading.RLock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While no other thread exports, since that registers functions with transformers and patches
    torch; and without the exporter's warnings, logs and prints.
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
