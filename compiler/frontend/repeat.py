"""Selection of layers to export, and cloning of their graphs for the whole model.

Layers are compared as modules (classes, shapes, settings) and again as exported graphs. Of each
kind, one or two layers are exported and cloned for the others. If cloning is not possible, all
layers are exported.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import torch

from llmc.compiler.frontend.parts import (
    CAUSAL_LM,
    DECODER,
    ENCODER,
    ROOT,
    Part,
    build,
    text_config,
    text_prefix,
)
from llmc.compiler.graph.names import HIDDEN_STATE
from llmc.compiler.graph.probe import data_tensors
from llmc.compiler.graph.rewrite import describe, scalar, tidy
from llmc.compiler.graph.weights import Weight, unread
from llmc.errors import LlmcError


class CannotRepeat(Exception):
    """Layers cannot be cloned; the message is the reason."""


@dataclass
class LayerPlan:
    """The layers to export, and the kind of each layer of the model.

    Args:
        config: config of the exported layers only; with `cut`, of the whole model.
        part: the exported part.
        layers_name: name of the layers' module list, such as `model.layers`.
        picked: for each exported layer, its index in the model.
        group: for each layer of the model, its kind.
        cut: whether the other layers are removed from the built model, as no config describes a
            model with only the picked ones.
    """

    config: Any
    part: Part
    layers_name: str
    picked: list[int]
    group: list[int]
    cut: bool = False


def find_layers(model: Any, part: Part, count: int) -> tuple[str, torch.nn.ModuleList]:
    """The name of a model's list of `count` layers, and the list."""
    prefix = text_prefix(model) if part is CAUSAL_LM else ""
    if part in (ENCODER, DECODER):
        inner = model.get_encoder() if part is ENCODER else model.get_decoder()
        prefix = next(f"{name}." for name, module in model.named_modules() if module is inner)
    lists = [(name, module) for name, module in model.named_modules()
             if name.startswith(prefix) and isinstance(module, torch.nn.ModuleList)
             and len(module) == count
             and all(any(True for _ in layer.parameters()) for layer in module)]
    if not lists:
        raise CannotRepeat(f"the model has no list of {count} layers")
    return lists[0]


def _signature(module: torch.nn.Module) -> tuple[object, ...]:
    """Return a layer's classes, settings and shapes, without its index and weights' values."""
    settings = tuple(sorted(
        (name, repr(value)) for name, value in vars(module).items()
        if name not in ("layer_idx", "layer_id", "layer_number", "training")
        and not name.startswith("_")
        and isinstance(value, int | float | str | bool | tuple | list | type(None))))
    tensors = tuple((name, tuple(t.shape)) for name, t in
                    (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))
    children = tuple((name, _signature(child)) for name, child in module.named_children())
    return type(module).__qualname__, settings, tensors, children


def plan_layers(config: Any, part: Part, model: torch.nn.Module, trust_remote_code: bool) -> \
        LayerPlan:
    """Select the layers of a model to export.

    Args:
        config: config of the model.
        part: the exported part.
        model: the model, without values.
        trust_remote_code: run code that comes with the model.

    Raises:
        CannotRepeat: all layers must be exported.
    """
    text = text_config(config)
    key = part.layers_key(text)
    if key is None or getattr(text, key) < 1:
        raise CannotRepeat(f"the config has no {' or '.join(part.layers)}")
    count = getattr(text, key)
    name, layers = find_layers(model, part, count)
    signatures = [_signature(layer) for layer in layers]
    kinds = list(dict.fromkeys(signatures))
    group = [kinds.index(signature) for signature in signatures]
    picked = sorted(index for kind in range(len(kinds))
                    for index in [i for i, g in enumerate(group) if g == kind][:2])
    for renumber in (False, True):
        short = copy.deepcopy(config)
        _shorten(text_config(short), key, picked, renumber)
        try:
            with torch.device("meta"):
                fewer = build(short, part, trust_remote_code)
                inside, few = find_layers(fewer, part, len(picked))
        except (CannotRepeat, LlmcError):  # such as a list with indices of removed layers
            continue
        if [_signature(layer) for layer in few] == [signatures[i] for i in picked] \
                and _other_shapes(fewer, inside) == _other_shapes(model, name):
            return LayerPlan(short, part, name, picked, group)
    _check_places(text, count, picked)
    return LayerPlan(copy.deepcopy(config), part, name, picked, group, cut=True)


def _other_shapes(model: torch.nn.Module, layers_name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters outside of the layers, by name.

    Some depend on the number of layers, such as Gemma 4's table of per-layer inputs.
    """
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()
            if not name.startswith(f"{layers_name}.")}


def _check_places(text: Any, count: int, picked: Sequence[int]) -> None:
    """Check that per-layer properties of a config agree for the picked and the first layers.

    After a cut, the model indexes these properties by the layers' new positions.

    Raises:
        CannotRepeat: a property differs.
    """
    for name in dir(type(text)):
        if "layer" in name and isinstance(getattr(type(text), name, None), property):
            values = getattr(text, name, None)
            if isinstance(values, list | tuple) and len(values) == count \
                    and [values[i] for i in picked] != list(values[:len(picked)]):
                raise CannotRepeat(f"the config's {name} cannot be set for a few layers")


def _shorten(text: Any, key: str, picked: Sequence[int], renumber: bool = False) -> None:
    """Reduce a config to the picked layers: number, per-layer lists, and lists of indices.

    Lists of indices are changed only with `renumber`.

    Raises:
        CannotRepeat: the number of layers cannot be set, as in ProphetNet's config.
    """
    count = getattr(text, key)
    _shorten_lists(text, count, picked)
    for name, value in list(vars(text).items()) if renumber else ():
        if re.search("layer|indices", name) and _are_layers(value, count):
            setattr(text, name, type(value)(picked.index(i) for i in value if i in picked))
    try:
        setattr(text, key, len(picked))
    except NotImplementedError as error:
        raise CannotRepeat(f"the config's {key} cannot be set") from error


def _are_layers(value: object, count: int) -> bool:
    """Whether these are ascending indices of some of `count` layers."""
    return isinstance(value, list | tuple) and 0 < len(value) < count and all(
        isinstance(i, int) and 0 <= i < count for i in value) and list(value) == sorted(set(value))


def _shorten_lists(text: Any, count: int, picked: Sequence[int]) -> None:
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(text, name, type(value)(value[i] for i in picked))


def cut_layers(model: Any, part: Part, layers_name: str, picked: Sequence[int]) -> None:
    """Remove all other layers from a model and its config's per-layer lists.

    The config's number of layers stays, as tables for all layers have that size.
    """
    text = text_config(model.config)
    key = part.layers_key(text)
    assert key is not None
    owner, _, leaf = layers_name.rpartition(".")
    layers = model.get_submodule(layers_name)
    setattr(model.get_submodule(owner), leaf, torch.nn.ModuleList(layers[i] for i in picked))
    _shorten_lists(text, getattr(text, key), picked)


def exported_names(names: Set[str], plan: LayerPlan) -> set[str]:
    """Return the names of a model's tensors in the graph of the exported layers."""
    known = {f"{plan.layers_name}.{layer}.": f"{plan.layers_name}.{index}."
             for index, layer in enumerate(plan.picked)}
    exported = set()
    for name in names:
        layer = re.match(rf"{re.escape(plan.layers_name)}\.\d+\.", name)
        if layer is None:
            exported.add(name)
        elif layer[0] in known:
            exported.add(known[layer[0]] + name[layer.end():])
    return exported


@dataclass
class _Layer:
    """An exported layer.

    Args:
        nodes: its nodes.
        carried_in: hidden state from the previous layer.
        carried_out: hidden state for the next layer.
        kept: other tensors that later layers read, such as shared keys and values.
        selecting: ids of nodes that select, by the layer's index, from a tensor for all layers.
    """

    nodes: list[gs.Node]
    carried_in: gs.Tensor | None
    carried_out: gs.Tensor
    kept: list[gs.Tensor]
    selecting: set[int]


def repeat(graph: gs.Graph, plan: LayerPlan) -> gs.Graph:
    """Build the graph of the whole model from the graph of the exported layers.

    Raises:
        CannotRepeat: the layers' graphs cannot be cloned.
    """
    layers = _cut_layers(graph, len(plan.picked))
    prefix = f"{ROOT}{plan.layers_name}."
    forms = [_canonical(layer, prefix, index) for index, layer in enumerate(layers)]
    template: dict[int, int] = {}
    for index, layer in enumerate(plan.picked):
        kind = plan.group[layer]
        if kind in template and forms[index] != forms[template[kind]]:
            raise CannotRepeat(f"layers {plan.picked[template[kind]]} and {layer} are equal in "
                                f"the config but not in the graph")
        if index > 0 or kind not in template:
            template[kind] = index  # not layer 0, which has no input from a previous layer
    for exported, number in zip(layers, plan.picked, strict=True):
        if exported.kept and plan.group.count(plan.group[number]) > 1:
            raise CannotRepeat(f"later layers read {len(exported.kept)} tensors of layer {number}, "
                               f"which is not the only one of its kind")
    first, names = layers[0], [output.name for output in graph.outputs]
    first.carried_out.name = HIDDEN_STATE.format(0)
    last_exported = layers[-1].carried_out
    readers = [reader for reader in last_exported.outputs
               if not any(reader is node for node in layers[-1].nodes)]
    outside = [node for node in graph.nodes
               if not any(node is inner for layer in layers[1:] for inner in layer.nodes)]
    hidden = first.carried_out
    clones: list[gs.Node] = []
    kept: dict[int, gs.Tensor] = {}
    for number in range(1, len(plan.group)):
        source = layers[template[plan.group[number]]]
        if source is first:
            raise CannotRepeat(f"layer {number} equals the first, which has no previous layer")
        nodes, hidden = _clone(source, hidden, prefix, template[plan.group[number]], number, kept)
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
    # Absent with eager attention, and in recurrent layers of a hybrid.
    order = [node.attrs["layer"] for node in graph.nodes if node.op == "Sdpa"]
    if plan.part.causal and order != sorted(order):
        raise CannotRepeat("attention layers are not in the order of the layers")
    return graph


def _cut_layers(graph: gs.Graph, count: int) -> list[_Layer]:
    """Group nodes by layer, by the tags in their names."""
    tag = {id(node): node.name.split("|")[0] for node in graph.nodes}
    _untag_shared(graph, tag)
    selecting = _tag_selecting(graph, tag)
    position = {id(node): index for index, node in enumerate(graph.nodes)}
    groups: list[list[gs.Node]] = [[] for _ in range(count)]
    for node in graph.nodes:
        if tag[id(node)]:
            groups[int(tag[id(node)])].append(node)
    layers: list[_Layer] = []
    kept: set[int] = set()
    for index, nodes in enumerate(groups):
        if not nodes:
            raise CannotRepeat(f"no node belongs to layer {index}")
        inside = {id(node) for node in nodes}
        inner = {id(t) for node in nodes for t in node.outputs}
        before = {id(t) for node in groups[index - 1] for t in node.outputs} if index else set()
        received = {id(t): t for node in nodes for t in node.inputs
                    if id(t) in before and id(t) not in kept}
        passed = {id(t): t for node in nodes for t in node.outputs
                  if any(id(reader) not in inside for reader in t.outputs)
                  or any(t is output for output in graph.outputs)}
        out = [t for t in passed.values() if len(passed) == 1 or (
            layers and list(t.shape or ()) == list(layers[0].carried_out.shape or ()))]
        if len(out) != 1 or (index and len(received) != 1):
            raise CannotRepeat(f"layer {index} reads {len(received)} tensors of the previous layer "
                                f"and passes on {len(passed)}")
        kept.update(id(t) for t in passed.values() if t is not out[0])
        other = [describe(node) for node in nodes for t in node.inputs if t.inputs
                 and id(t) not in inner and id(t) not in before and id(t) not in kept
                 and tag[id(t.inputs[0])]]
        if other:
            raise CannotRepeat(f"{other[0]} reads from a layer other than the previous one")
        layers.append(_Layer(sorted(nodes, key=lambda node: position[id(node)]),
                             next(iter(received.values()), None), out[0],
                             [t for t in passed.values() if t is not out[0]],
                             {id(node) for node in nodes} & selecting))
    return layers


def _tag_selecting(graph: gs.Graph, tag: dict[int, str]) -> set[int]:
    """Move into each layer the Gather that selects its entry from a tensor for all layers.

    Such as of Gemma 4's per-layer inputs.

    Returns:
        The ids of these nodes.
    """
    selecting = set()
    for node in graph.nodes:
        readers = {tag[id(reader)] for reader in node.outputs[0].outputs} if node.outputs else set()
        if node.op == "Gather" and not tag[id(node)] and len(readers) == 1 \
                and next(iter(readers)) and scalar(node.inputs[1]) == float(next(iter(readers))):
            tag[id(node)] = readers.pop()
            selecting.add(id(node))
    return selecting


def _untag_shared(graph: gs.Graph, tag: dict[int, str]) -> None:
    """Move nodes that compute a tensor for other layers out of their layer.

    They depend on lengths and positions only, such as T5's attention bias for all layers.
    """
    data = data_tensors(graph)
    computed = {id(t) for node in graph.nodes for t in node.outputs if id(t) in data}
    for node in graph.nodes:  # also what is computed from their shapes
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


def _canonical(layer: _Layer, prefix: str, index: int) -> list[tuple[object, ...]]:
    """Return a canonical form, equal for equal layers.

    For the first layer, any tensor that is computed from the tokens and has the hidden state's
    shape counts as the carried input, so that it compares equal to later layers.
    """
    number: dict[int, int] = {}
    form: list[tuple[object, ...]] = []
    for node in layer.nodes:
        reads: list[Any] = []
        for tensor in node.inputs:
            if id(node) in layer.selecting and tensor is node.inputs[1]:
                reads.append("index")
            elif tensor.is_empty():
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


def _clone(layer: _Layer, hidden: gs.Tensor, prefix: str, old: int, new: int,
           kept: dict[int, gs.Tensor]) -> tuple[list[gs.Node], gs.Tensor]:
    """Clone a layer for another index.

    Args:
        layer: the exported layer.
        hidden: hidden state from the previous layer.
        prefix: prefix of the layers' parameter names.
        old: index of the exported layer.
        new: index of the clone.
        kept: clones of earlier layers' `kept` tensors by id; this layer's are added.

    Returns:
        The nodes, and the hidden state for the next layer.
    """
    clones: dict[int, gs.Tensor] = {}

    def tensor(original: gs.Tensor) -> gs.Tensor:
        if original is layer.carried_in:
            return hidden
        if isinstance(original, gs.Constant) and original.name.startswith(f"{prefix}{old}."):
            name = original.name.replace(f"{prefix}{old}.", f"{prefix}{new}.", 1)
            if id(original) not in clones:
                values = original._values
                clones[id(original)] = gs.Constant(
                    name, Weight(values.shape, values.dtype, unread, name)
                    if isinstance(values, Weight) else values)
        return clones.get(id(original), kept.get(id(original), original))

    nodes = []
    for node in layer.nodes:
        inputs = [tensor(t) for t in node.inputs]
        if id(node) in layer.selecting:
            inputs[1] = gs.Constant(f"layers.{new}.{node.inputs[1].name}",
                                    np.array(new, np.int64))
        outputs = []
        for result in node.outputs:
            if result.is_empty():
                outputs.append(gs.Variable.empty())
                continue
            name = HIDDEN_STATE.format(new) if result is layer.carried_out \
                else f"layers.{new}.{result.name}"
            clones[id(result)] = gs.Variable(name, result.dtype, result.shape)
            outputs.append(clones[id(result)])
        attrs = dict(node.attrs)
        if node.op == "Sdpa" and attrs["layer"] >= 0:
            attrs["layer"] = new
        nodes.append(gs.Node(op=node.op, name=f"layers.{new}.{node.name}", domain=node.domain,
                             attrs=attrs, inputs=inputs, outputs=outputs))
    kept.update((id(t), clones[id(t)]) for t in layer.kept)
    return nodes, clones[id(layer.carried_out)]
