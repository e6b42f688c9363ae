"""Export a transformers causal LM without its weights, a few layers of it, and repeat them.

An encoder-decoder model is exported as two graphs: its encoder, and its decoder, which takes what
the encoder makes as an input.

Attention goes through transformers' own interface: a null mask and a function that becomes one
`Sdpa` node, so nothing about masks, windows or scale is left to guess. Models that bypass the
interface are exported with eager attention, for the passes to recognise.

Layers are compared as modules first (classes, shapes, settings) and again as exported graphs; each
kind is exported once or twice and cloned for the rest. Where anything differs from what that needs,
all layers are exported.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import onnx_graphsurgeon as gs
import onnx_ir as ir
import torch
from accelerate import init_empty_weights
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    masking_utils,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutput

from llmc.compiler.frontend.raw import ENCODER_OUTPUT, HIDDEN_STATE
from llmc.compiler.passes.fold import fold_constants
from llmc.compiler.probe import data_tensors
from llmc.compiler.rewrite import describe, tidy
from llmc.compiler.weights import Weight
from llmc.errors import LlmcError

_OPSET = 23
_ATTENTION = "llmc"  # our entry in transformers' attention interface
_ROOT = "model."  # the wrapper's name for the model, in front of every parameter's own name


class _CannotRepeat(Exception):
    """Why the layers cannot be cloned."""


@dataclass(frozen=True)
class _Part:
    """What is exported: a causal LM, or the encoder or the decoder of an encoder-decoder model.

    Args:
        layers: what configs call the number of its layers.
        attentions: of each layer.
    """

    name: str
    layers: tuple[str, ...]
    attentions: int = 1

    @property
    def causal(self) -> bool:
        """Whether its self-attention is."""
        return self.name != "encoder"

    def layers_key(self, config: Any) -> str | None:
        """What this config calls the number of its layers."""
        return next((key for key in self.layers if isinstance(getattr(config, key, None), int)),
                    None)


_CAUSAL_LM = _Part("causal LM", ("num_hidden_layers",))
_ENCODER = _Part("encoder", ("encoder_layers", "num_encoder_layers", "num_hidden_layers"))
_DECODER = _Part("decoder", ("decoder_layers", "num_decoder_layers"), 2)


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
    if part is _CAUSAL_LM and (is_causal is False or getattr(module, "is_causal", True) is False):
        raise LlmcError(f"{type(module).__name__} is not causal")
    batch, heads, seq, head_dim = query.shape
    scale = float(head_dim**-0.5 if scaling is None else scaling)
    out = torch.onnx.ops.symbolic(
        "llmc::Sdpa", (query, key, value, *([] if position_bias is None else [position_bias])),
        {"scale": scale, "window": int(sliding_window or 0), "softcap": float(softcap or 0.0),
         "causal": int(part.causal), "layer": int(module.layer_idx if part.causal else -1)},
        dtype=query.dtype, shape=(batch, heads, seq, value.shape[-1]), version=1)
    return out.transpose(1, 2).contiguous(), None


def _check_masks(rules: Sequence[Callable[..., torch.Tensor]], part: _Part) -> None:
    """Evaluate which keys a model lets a query see; refuse what the attention nodes do not do."""
    full = [_is_full(rule, part) for rule in rules]
    if part is _DECODER and all(full):
        raise LlmcError("the model asks for no causal mask in its decoder")


def _is_full(rule: Callable[..., torch.Tensor], part: _Part) -> bool:
    """Whether a query sees all keys; else it must be causal, perhaps in a window."""
    queries = torch.tensor([0, 1, 6, 100, 1000, 5000, 9001])[:, None]
    keys = torch.arange(9002)[None]
    visible = rule(torch.tensor(0), torch.tensor(0), queries, keys)
    if part is not _CAUSAL_LM and visible.all():
        return True  # an encoder, or what a decoder sees of one
    window = visible.sum(1).max()
    if not part.causal or not torch.equal(visible, (keys <= queries) & (keys > queries - window)):
        raise LlmcError("the model asks for a mask that is neither causal nor a window")
    return False


AttentionInterface.register(_ATTENTION, functools.partial(_sdpa, _CAUSAL_LM))


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


@dataclass
class Exported:
    """The raw graph, of an encoder-decoder model the decoder's and the encoder's, and what is known
    about how they were made.
    """

    graph: gs.Graph
    notes: list[str] = field(default_factory=list)
    encoder: gs.Graph | None = None


def export(config: Any, tensors: Mapping[str, Weight], origin: str, *,
           trust_remote_code: bool = False) -> Exported:
    """Export the causal LM or the encoder-decoder model that `config` describes.

    Args:
        config: a transformers config.
        tensors: the checkpoint's tensors by name.
        origin: where they come from, for messages.

    Raises:
        LlmcError: the architecture is unknown, its export fails, or a tensor is missing or has
            another shape than the config asks for.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = _ATTENTION
    config.dtype = torch.float32
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    notes: list[str] = []
    names: dict[int, str] = {}
    parts = (_DECODER, _ENCODER) if config.is_encoder_decoder else (_CAUSAL_LM,)
    with _quiet():
        if config.is_encoder_decoder:
            tensors = _completed(config, tensors, trust_remote_code)
        graphs = [_export_part(copy.deepcopy(config), part, tensors, origin, trust_remote_code,
                               names, notes) for part in parts]
    return Exported(graphs[0], notes, graphs[1] if len(graphs) > 1 else None)


def _export_part(config: Any, part: _Part, tensors: Mapping[str, Weight], origin: str,
                 trust_remote_code: bool, names: dict[int, str], notes: list[str]) -> gs.Graph:
    """One graph. `names` holds what the parts call the tensors that they share; adds to `notes`."""
    try:
        plan = _plan_layers(config, part, trust_remote_code)
        graph, model = _export_graph(plan.config, part, plan.layers_name, tensors,
                                     trust_remote_code)
        graph = _repeat(graph, plan)
    except _CannotRepeat as reason:
        notes.append(f"all layers were exported: {reason}")
        graph, model = _export_graph(config, part, None, tensors, trust_remote_code)
    _attach_weights(graph, model, tensors, origin, names)
    return graph


def _completed(config: Any, tensors: Mapping[str, Weight], trust_remote_code: bool) -> \
        dict[str, Weight]:
    """The tensors, with those that checkpoints leave out because the model computes them itself,
    such as sinusoidal positions.
    """
    with torch.device("meta"):
        model: Any = _build(copy.deepcopy(config), _DECODER, trust_remote_code)
    made = dict(tensors)
    for name in sorted(model._keys_to_ignore_on_save or ()):
        owner, _, leaf = name.rpartition(".")
        if name in tensors or getattr(model.get_submodule(owner), leaf, None) is None:
            continue
        module = model.get_submodule(owner).to_empty(device="cpu", recurse=False)
        model._init_weights(module)
        made[name] = Weight.of(getattr(module, leaf).detach().float().numpy(), name)
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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


# Which layers to export.

@dataclass
class _LayerPlan:
    """Layers to export and what each layer of the model is a copy of.

    Args:
        config: the truncated config.
        part: what is exported.
        layers_name: the layers' place in the model, such as `model.layers`.
        picked: for each exported layer, the layer of the model that it is.
        group: for each layer of the model, its kind.
    """

    config: Any
    part: _Part
    layers_name: str
    picked: list[int]
    group: list[int]


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _build(config: Any, part: _Part, trust_remote_code: bool) -> torch.nn.Module:
    kind, auto = ("causal LM", AutoModelForCausalLM) if part is _CAUSAL_LM else \
        ("encoder-decoder LM", AutoModelForSeq2SeqLM)
    try:
        try:
            model = auto.from_config(config, trust_remote_code=trust_remote_code)
        except KeyError as error:
            if error.args != (_ATTENTION,):
                raise
            # The model looks its attention up in a table of its own.
            config._attn_implementation = "eager"
            model = auto.from_config(config, trust_remote_code=trust_remote_code)
        return model.eval()
    except (ValueError, KeyError, ImportError, TypeError, AssertionError, AttributeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise LlmcError(f"transformers cannot build '{getattr(config, 'model_type', '?')}' as "
                        f"{'an' if kind[0] == 'e' else 'a'} {kind}: {first}") from error


def _find_layers(model: Any, part: _Part, count: int) -> tuple[str, torch.nn.ModuleList]:
    prefix = ""
    if part is not _CAUSAL_LM:
        inner = model.get_encoder() if part is _ENCODER else model.get_decoder()
        prefix = next(f"{name}." for name, module in model.named_modules() if module is inner)
    found = [(name, module) for name, module in model.named_modules()
             if name.startswith(prefix) and isinstance(module, torch.nn.ModuleList)
             and len(module) == count
             and all(any(True for _ in layer.parameters()) for layer in module)]
    if not found:
        raise _CannotRepeat(f"the model has no list of {count} layers")
    return found[0]


def _signature(module: torch.nn.Module) -> tuple:
    """All that distinguishes one layer from another, but for its index and its weights' values."""
    settings = tuple(sorted(
        (name, repr(value)) for name, value in vars(module).items()
        if name not in ("layer_idx", "layer_id", "layer_number", "training")
        and not name.startswith("_")
        and isinstance(value, int | float | str | bool | tuple | list | type(None))))
    tensors = tuple((name, tuple(t.shape)) for name, t in
                    (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))
    children = tuple((name, _signature(child)) for name, child in module.named_children())
    return type(module).__qualname__, settings, tensors, children


def _plan_layers(config: Any, part: _Part, trust_remote_code: bool) -> _LayerPlan:
    text = _text_config(config)
    key = part.layers_key(text)
    if key is None or getattr(text, key) < 1:
        raise _CannotRepeat(f"the config has no {' or '.join(part.layers)}")
    count = getattr(text, key)
    with torch.device("meta"):
        full = _build(config, part, trust_remote_code)
    name, layers = _find_layers(full, part, count)
    signatures = [_signature(layer) for layer in layers]
    kinds = list(dict.fromkeys(signatures))
    group = [kinds.index(signature) for signature in signatures]
    picked = sorted(index for kind in range(len(kinds))
                    for index in [i for i, g in enumerate(group) if g == kind][:2])
    short = copy.deepcopy(config)
    short_text = _text_config(short)
    for name_of_list, value in list(vars(short_text).items()):
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(short_text, name_of_list, type(value)(value[i] for i in picked))
    setattr(short_text, key, len(picked))
    with torch.device("meta"):
        _, few = _find_layers(_build(short, part, trust_remote_code), part, len(picked))
    if [_signature(layer) for layer in few] != [signatures[i] for i in picked]:
        raise _CannotRepeat("a layer's settings depend on more than the config's lists")
    return _LayerPlan(short, part, name, picked, group)


# The export itself.

def _export_graph(config: Any, part: _Part, layers_name: str | None,
                  tensors: Mapping[str, Weight], trust_remote_code: bool) -> \
        tuple[gs.Graph, torch.nn.Module]:
    """The graph with constants folded, weights as placeholders, and layers in the nodes' names;
    and the model that was exported, whose parameters are fake.
    """
    reasons = []
    for implementation in (_ATTENTION, "eager"):
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
        text = _text_config(config)
        count = getattr(text, part.layers_key(text) or "num_hidden_layers") * part.attentions
        if implementation == _ATTENTION and sum(n.op == "Sdpa" for n in graph.nodes) < count:
            reasons.append("the model bypasses transformers' attention interface")
            continue
        return graph, model
    text = _text_config(config)
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


def _run_exporter(config: Any, part: _Part, tensors: Mapping[str, Weight],
                  trust_remote_code: bool) -> tuple[Any, Any]:
    AttentionInterface.register(_ATTENTION, functools.partial(_sdpa, part))
    with init_empty_weights(include_buffers=False):  # rotary tables and scales keep their values
        model: Any = _build(config, part, trust_remote_code)
    rules: list[Callable[..., torch.Tensor]] = []  # no mask is built: the node knows which
    AttentionMaskInterface.register(
        _ATTENTION, lambda *args, mask_function, **others: rules.append(mask_function))
    _load_buffers(model, tensors)
    _freeze_rotary(model)
    model.tie_weights()  # making parameters empty has untied them
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


def _wrap(model: Any, part: _Part) -> \
        tuple[torch.nn.Module, dict[str, tuple[torch.Tensor, str]], str]:
    """What to export: a module, its inputs by name, each with the name of axis 1, and its output.
    """
    ids = torch.zeros((2, 5), dtype=torch.int64), "seq"
    if part is _ENCODER:
        return _Encoder(model), {"input_ids": ids}, ENCODER_OUTPUT
    if part is _DECODER:
        memory = torch.zeros((2, 7, model.config.hidden_size)), "mem_seq"
        return _Decoder(model), {"input_ids": ids, ENCODER_OUTPUT: memory}, "logits"
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    positions = torch.arange(5)[None].expand(2, 5).clone(), "seq"
    return _Stateless(model, takes_positions), \
        {"input_ids": ids} | ({"position_ids": positions} if takes_positions else {}), "logits"


def _load_buffers(model: torch.nn.Module, tensors: Mapping[str, Weight]) -> None:
    """Give buffers that are in the checkpoint their values from there, but for single numbers,
    which are the config's.
    """
    renamed = _renamed(model, tensors)
    for name, buffer in model.named_buffers():
        if buffer.dim() and name in renamed and renamed[name].shape == tuple(buffer.shape):
            buffer.copy_(torch.from_numpy(renamed[name].load()))


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
    pattern = re.compile(re.escape(_ROOT + layers_name) + r"\.(\d+)") if layers_name else None
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
            tensor._values = Weight(parameters[tensor.name], np.float32, _unread, tensor.name)
    tidy(graph)
    fold_constants(graph)
    return graph


def _is_fake(tensor: Any) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


def _unread(start: int, stop: int) -> np.ndarray:
    raise AssertionError("a placeholder weight was read")


def _attach_weights(graph: gs.Graph, model: torch.nn.Module, tensors: Mapping[str, Weight],
                    origin: str, names: dict[int, str]) -> None:
    """Give each parameter its `Weight` and its own name; one that is in `names` has it from there.
    """
    renamed = _renamed(model, tensors)
    aliases = _aliases(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    made: dict[str, Weight] = {}
    for tensor in graph.tensors().values():
        if not (isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)):
            continue
        name, shape = tensor.name.removeprefix(_ROOT), tensor._values.shape
        if name not in made:
            wanted = [alias for own in aliases.get(name, (name,))
                      for alias in (own, own.removeprefix(prefix), prefix + own)]
            found = next((renamed[alias] for alias in (name, *wanted) if alias in renamed), None)
            if found is None:
                raise LlmcError(f"'{origin}' has no tensor '{name}' {list(shape)}, which its "
                                f"config asks for; weights and config do not belong together")
            if found.shape != shape:
                raise LlmcError(f"tensor '{name}' in '{origin}' has shape {list(found.shape)}, "
                                f"its config asks for {list(shape)}")
            made[name] = found
        tensor.name = names.setdefault(id(made[name]), name)
        tensor._values = made[name]


def _renamed(model: torch.nn.Module, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """The checkpoint's tensors under the names that transformers gives them today."""
    transforms = get_model_conversion_mapping(cast(PreTrainedModel, model))
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    return {rename_source_key(name, renamings, [])[0]: weight for name, weight in tensors.items()}


def _aliases(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """All names that each parameter has in the model: tied ones have several."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in by_id.values() for name in names}


# Repeating layers.

@dataclass
class _Layer:
    """One exported layer: its nodes, what it reads from the layer before, what it hands on."""

    nodes: list[gs.Node]
    carried_in: gs.Tensor | None
    carried_out: gs.Tensor


def _repeat(graph: gs.Graph, plan: _LayerPlan) -> gs.Graph:
    """The graph of the whole model, from the graph of a few of its layers."""
    layers = _cut_layers(graph, len(plan.picked))
    prefix = f"{_ROOT}{plan.layers_name}."
    forms = [_canonical(layer, prefix, index) for index, layer in enumerate(layers)]
    template: dict[int, int] = {}
    for index, layer in enumerate(plan.picked):
        kind = plan.group[layer]
        if kind in template and forms[index] != forms[template[kind]]:
            raise _CannotRepeat(f"layers {plan.picked[template[kind]]} and {layer} are alike in "
                                f"the config but not in the graph")
        if index > 0 or kind not in template:
            template[kind] = index  # a later copy shows what it takes from the layer before
    first, names = layers[0], [output.name for output in graph.outputs]
    first.carried_out.name = HIDDEN_STATE.format(0)
    last_exported = layers[-1].carried_out
    readers = [reader for reader in last_exported.outputs
               if not any(reader is node for node in layers[-1].nodes)]
    outside = [node for node in graph.nodes
               if not any(node is inner for layer in layers[1:] for inner in layer.nodes)]
    hidden = first.carried_out
    clones: list[gs.Node] = []
    for number in range(1, len(plan.group)):
        source = layers[template[plan.group[number]]]
        if source is first:
            raise _CannotRepeat(f"layer {number} is like the first, which has no layer before it")
        nodes, hidden = _clone(source, hidden, prefix, template[plan.group[number]], number)
        clones.extend(nodes)
    for reader in readers:
        for position, tensor in enumerate(reader.inputs):
            if tensor is last_exported:
                reader.inputs[position] = hidden
    graph.outputs = [hidden if output is last_exported else output for output in graph.outputs]
    for output, name in zip(graph.outputs, names, strict=True):
        output.name = name
    for exported in layers[1:]:
        for node in exported.nodes:
            node.inputs.clear()
            node.outputs.clear()
    graph.nodes.clear()
    graph.nodes.extend([*outside, *clones])
    tidy(graph)
    order = [node.attrs["layer"] for node in graph.nodes if node.op == "Sdpa"]
    expected = [layer for layer in range(len(plan.group)) for _ in range(plan.part.attentions)]
    if plan.part.causal and order != expected:
        raise _CannotRepeat("attention layers are not in the order of the layers")
    return graph


def _cut_layers(graph: gs.Graph, count: int) -> list[_Layer]:
    """The nodes of each layer, by the tags that their names carry."""
    tag = {id(node): node.name.split("|")[0] for node in graph.nodes}
    _untag_shared(graph, tag)
    position = {id(node): index for index, node in enumerate(graph.nodes)}
    groups: list[list[gs.Node]] = [[] for _ in range(count)]
    for node in graph.nodes:
        if tag[id(node)]:
            groups[int(tag[id(node)])].append(node)
    layers: list[_Layer] = []
    for index, nodes in enumerate(groups):
        if not nodes:
            raise _CannotRepeat(f"no node belongs to layer {index}")
        inside = {id(node) for node in nodes}
        made = {id(t) for node in nodes for t in node.outputs}
        before = {id(t) for node in groups[index - 1] for t in node.outputs} if index else set()
        taken = {id(t): t for node in nodes for t in node.inputs if id(t) in before}
        handed = {id(t): t for node in nodes for t in node.outputs
                  if any(id(reader) not in inside for reader in t.outputs)
                  or any(t is output for output in graph.outputs)}
        if len(handed) != 1 or (index and len(taken) != 1):
            raise _CannotRepeat(f"layer {index} takes {len(taken)} tensors from the layer before "
                                f"and hands on {len(handed)}")
        other = [describe(node) for node in nodes for t in node.inputs if t.inputs
                 and id(t) not in made and id(t) not in before and tag[id(t.inputs[0])]]
        if other:
            raise _CannotRepeat(f"{other[0]} reads from a layer that is not the one before")
        layers.append(_Layer(sorted(nodes, key=lambda node: position[id(node)]),
                             next(iter(taken.values()), None), next(iter(handed.values()))))
    return layers


def _untag_shared(graph: gs.Graph, tag: dict[int, str]) -> None:
    """Take out of the layers what one computes for others from nothing but the tokens' number and
    places, such as the bias of scores that T5's first layer makes for all.
    """
    data = data_tensors(graph)
    computed = {id(t) for node in graph.nodes for t in node.outputs if id(t) in data}
    for node in graph.nodes:  # and what is computed from their shapes
        if any(id(t) in computed for t in node.inputs):
            computed.update(id(t) for t in node.outputs)
    stack = [node for node in graph.nodes if tag[id(node)] and any(
        id(t) not in computed and any(tag[id(reader)] not in ("", tag[id(node)])
                                      for reader in t.outputs) for t in node.outputs)]
    while stack:
        node = stack.pop()
        if tag[id(node)]:
            tag[id(node)] = ""
            stack.extend(t.inputs[0] for t in node.inputs if t.inputs)


def _canonical(layer: _Layer, prefix: str, index: int) -> list:
    """A form that equal layers share. The first layer's carried input stands for any tensor that
    the model computes from the tokens, so that it compares equal to later layers."""
    number: dict[int, int] = {}
    form: list = []
    for node in layer.nodes:
        reads: list[Any] = []
        for tensor in node.inputs:
            if tensor.is_empty():
                reads.append("")
            elif id(tensor) in number:
                reads.append(number[id(tensor)])
            elif isinstance(tensor, gs.Constant):
                if isinstance(tensor._values, Weight):
                    reads.append(tensor.name.replace(f"{prefix}{index}.", f"{prefix}*."))
                else:
                    reads.append((tensor.values.tobytes(), tensor.values.shape))
            elif tensor is layer.carried_in or (layer.carried_in is None and tensor.inputs
                                                and tensor.shape is not None
                                                and _looks_carried(tensor, layer)):
                reads.append("carried")
            else:
                reads.append(f"shared {tensor.name}")
        for tensor in node.outputs:
            number[id(tensor)] = len(number)
        attrs = {key: repr(value) for key, value in node.attrs.items() if key != "layer"}
        form.append((node.op, node.domain, tuple(reads), tuple(sorted(attrs.items()))))
    return form


def _looks_carried(tensor: gs.Tensor, layer: _Layer) -> bool:
    return list(tensor.shape) == list(layer.carried_out.shape or ())


def _clone(layer: _Layer, hidden: gs.Tensor, prefix: str, old: int, new: int) -> \
        tuple[list[gs.Node], gs.Tensor]:
    """The layer's nodes for another index, reading `hidden`; and what they hand on."""
    made: dict[int, gs.Tensor] = {}

    def tensor(original: gs.Tensor) -> gs.Tensor:
        if original is layer.carried_in:
            return hidden
        if isinstance(original, gs.Constant) and original.name.startswith(f"{prefix}{old}."):
            name = original.name.replace(f"{prefix}{old}.", f"{prefix}{new}.", 1)
            if id(original) not in made:
                values = original._values
                made[id(original)] = gs.Constant(
                    name, Weight(values.shape, values.dtype, _unread, name)
                    if isinstance(values, Weight) else values)
        return made.get(id(original), original)

    nodes = []
    for node in layer.nodes:
        inputs = [tensor(t) for t in node.inputs]
        outputs = []
        for result in node.outputs:
            if result.is_empty():
                outputs.append(gs.Variable.empty())
                continue
            name = HIDDEN_STATE.format(new) if result is layer.carried_out \
                else f"layers.{new}.{result.name}"
            made[id(result)] = gs.Variable(name, result.dtype, result.shape)
            outputs.append(made[id(result)])
        attrs = dict(node.attrs)
        if node.op == "Sdpa" and attrs["layer"] >= 0:
            attrs["layer"] = new
        nodes.append(gs.Node(op=node.op, name=f"layers.{new}.{node.name}", domain=node.domain,
                             attrs=attrs, inputs=inputs, outputs=outputs))
    return nodes, made[id(layer.carried_out)]


