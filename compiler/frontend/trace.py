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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import onnx_ir as ir
import torch
from accelerate import init_empty_weights
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutput

from llmc.compiler.frontend.bind import load_buffers, untie
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
from llmc.compiler.graph.constants import fold_constants
from llmc.compiler.graph.names import ENCODER_OUTPUT
from llmc.compiler.graph.rewrite import tidy
from llmc.compiler.graph.weights import Weight, unread
from llmc.errors import LlmcError

_OPSET = 23


def trace(config: Any, part: Part, layers_name: str | None,
                  tensors: Mapping[str, Weight], trust_remote_code: bool) -> \
        tuple[gs.Graph, torch.nn.Module]:
    """The graph with constants folded, weights as placeholders, and layers in the nodes' names;
    and the model that was exported, whose parameters are fake.
    """
    reasons = []
    for implementation in (ATTENTION, "eager"):
        config._attn_implementation = implementation
        try:
            program, model = _run_exporter(config, part, tensors, trust_remote_code)
        except LlmcError as error:
            if "transformers cannot build" in str(error):
                raise
            reasons.append(str(error))
            continue
        except Exception as error:  # the exporter raises whatever the model's code raises
            reasons.append(_root_cause(error))
            continue
        graph = _to_graph(program, layers_name)
        text = text_config(config)
        count = getattr(text, part.layers_key(text) or "num_hidden_layers") * part.attentions
        if implementation == ATTENTION and sum(n.op == "Sdpa" for n in graph.nodes) < count:
            reasons.append("the model bypasses transformers' attention interface")
            continue
        return graph, model
    text = text_config(config)
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if (getattr(text, key, None) or 0) > 1:
            raise LlmcError(f"'{config.model_type}' has mixture-of-experts layers ({key} "
                            f"{getattr(text, key)}), which llmc does not compile")
    raise LlmcError(f"'{config.model_type}' cannot be exported: "
                    f"{'; '.join(dict.fromkeys(reasons))}")


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].split(". Failure message:")[0][:200] if lines else type(error).__name__


def _run_exporter(config: Any, part: Part, tensors: Mapping[str, Weight],
                  trust_remote_code: bool) -> tuple[Any, Any]:
    AttentionInterface.register(ATTENTION, functools.partial(_sdpa, part))
    with init_empty_weights(include_buffers=False):  # rotary tables and scales keep their values
        model: Any = build(config, part, trust_remote_code)
    rules: list[Callable[..., torch.Tensor]] = []  # no mask is built: the node knows which
    AttentionMaskInterface.register(
        ATTENTION, lambda *args, mask_function, **others: rules.append(mask_function))
    load_buffers(model, tensors)
    _freeze_rotary(model)
    model.tie_weights()  # making parameters empty has untied them
    untie(model, tensors)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    replaced: dict[int, torch.nn.Parameter] = {}
    with fake, _one_sequence_per_row():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in replaced:
                        replaced[id(parameter)] = torch.nn.Parameter(
                            torch.empty(parameter.shape, dtype=torch.float32), requires_grad=False)
                    module._parameters[name] = replaced[id(parameter)]
        wrapped, inputs, output = _wrap(model, part)
        dims = {name: torch.export.Dim(name) for name in ("batch", "seq", "mem_seq")}
        program = torch.onnx.export(
            wrapped.eval(), tuple(value for value, _ in inputs.values()), dynamo=True,
            opset_version=_OPSET, optimize=False, verbose=False, input_names=list(inputs),
            output_names=[output], dynamic_shapes=tuple(
                {0: dims["batch"], 1: dims[length]} for _, length in inputs.values()))
    _check_masks(rules, part)
    return program, model


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


def _sdpa(part, module, query, key, value, attention_mask, scaling=None, dropout=0.0,
          sliding_window=None, softcap=None, is_causal=None, position_bias=None, **others):
    """transformers' attention function: one symbolic node, heads as they are."""
    neutral = {"position_ids", "output_attentions", "use_cache", "cache_position", "head_mask",
               "output_router_logits", "logits_to_keep", "return_dict", "num_items_in_batch",
               "position_embeddings"}
    for name, argument in others.items():
        if name not in neutral and argument is not None and argument is not False:
            raise LlmcError(f"{type(module).__name__} passes {name!r} to its attention, which "
                            f"llmc::CausalAttention does not have")
    if attention_mask is not None:
        raise LlmcError(f"{type(module).__name__} passes a mask of its own to its attention")
    if part is CAUSAL_LM and (is_causal is False or getattr(module, "is_causal", True) is False):
        raise LlmcError(f"{type(module).__name__} is not causal")
    batch, heads, seq, head_dim = query.shape
    scale = float(head_dim**-0.5 if scaling is None else scaling)
    out = torch.onnx.ops.symbolic(
        "llmc::Sdpa", (query, key, value, *([] if position_bias is None else [position_bias])),
        {"scale": scale, "window": int(sliding_window or 0), "softcap": float(softcap or 0.0),
         "causal": int(part.causal), "layer": int(module.layer_idx if part.causal else -1)},
        dtype=query.dtype, shape=(batch, heads, seq, value.shape[-1]), version=1)
    return out.transpose(1, 2).contiguous(), None


def _check_masks(rules: Sequence[Callable[..., torch.Tensor]], part: Part) -> None:
    """Evaluate which keys a model lets a query see; refuse what the attention nodes do not do."""
    full = [_is_full(rule, part) for rule in rules]
    if part is DECODER and all(full):
        raise LlmcError("the model asks for no causal mask in its decoder")


def _is_full(rule: Callable[..., torch.Tensor], part: Part) -> bool:
    """Whether a query sees all keys; else it must be causal, perhaps in a window."""
    queries = torch.tensor([0, 1, 6, 100, 1000, 5000, 9001])[:, None]
    keys = torch.arange(9002)[None]
    visible = rule(torch.tensor(0), torch.tensor(0), queries, keys)
    if part is not CAUSAL_LM and visible.all():
        return True  # an encoder, or what a decoder sees of one
    window = visible.sum(1).max()
    if not part.causal or not torch.equal(visible, (keys <= queries) & (keys > queries - window)):
        raise LlmcError("the model asks for a mask that is neither causal nor a window")
    return False


AttentionInterface.register(ATTENTION, functools.partial(_sdpa, CAUSAL_LM))


class _Stateless(torch.nn.Module):
    """input_ids (and position_ids, where the model takes them) to logits."""

    def __init__(self, model: torch.nn.Module, takes_positions: bool) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = takes_positions

    def forward(self, input_ids, position_ids=None):
        positions = {"position_ids": position_ids} if self.takes_positions else {}
        return self.model(input_ids=input_ids, use_cache=False, return_dict=False, **positions)[0]


class _Encoder(torch.nn.Module):
    """input_ids to what the decoder sees of them."""

    model: Any

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model.get_encoder()(input_ids=input_ids)[0]


class _Decoder(torch.nn.Module):
    """input_ids of the decoder and what the encoder made to logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, encoder_output):
        return self.model(encoder_outputs=BaseModelOutput(last_hidden_state=encoder_output),
                          decoder_input_ids=input_ids, use_cache=False, return_dict=True).logits


def _freeze_rotary(model: torch.nn.Module) -> None:
    """Keep dynamic rotary embeddings at their first frequencies, which they leave only beyond
    max_position_embeddings. No sequence gets there: max_seq_len is at most that.
    """
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "dynamic":
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {layers: "default" if each == "dynamic" else each
                                for layers, each in kind.items()}


@contextlib.contextmanager
def _one_sequence_per_row() -> Iterator[None]:
    """Without transformers' search for several sequences in a row of position_ids, which would make
    every mask depend on them. llmc packs behind the mask, in the attention node.
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def _to_graph(program: Any, layers_name: str | None) -> gs.Graph:
    """The exported program as a graph-surgeon graph, parameters empty, constants folded."""
    ir_model = program.model
    pattern = re.compile(re.escape(ROOT + layers_name) + r"\.(\d+)") if layers_name else None
    if pattern:
        for index, node in enumerate(ir_model.graph):
            scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
            match = pattern.search(scopes)
            node.name = f"{match.group(1) if match else ''}|{index}|{node.op_type}"
    parameters: dict[str, tuple[int, ...]] = {}
    for name, value in ir_model.graph.initializers.items():
        tensor = getattr(value.const_value, "raw", None)
        if isinstance(tensor, torch.nn.Parameter) or _is_fake(tensor):
            parameters[name] = tuple(int(dim) for dim in value.shape)
            value.const_value = ir.ExternalTensor(
                "weights", 0, 0, ir.DataType.FLOAT, shape=ir.Shape(parameters[name]), name=name)
    graph = gs.import_onnx(ir.to_proto(ir_model))
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant) and tensor.name in parameters:
            tensor._values = Weight(parameters[tensor.name], np.float32, unread, tensor.name)
    tidy(graph)
    fold_constants(graph)
    return graph


def _is_fake(tensor: Any) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's warnings, logs and prints."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), \
            contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(disabled)
