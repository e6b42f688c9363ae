"""Which layers of a model to export, and the whole model's graph from theirs.

Layers are compared as modules first (classes, shapes, settings) and again as exported graphs; each
kind is exported once or twice and cloned for the rest. Where anything differs from what that needs,
all layers are exported.
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
    """Why the layers cannot be cloned."""


@dataclass
class LayerPlan:
    """Layers to export and what each layer of the model is a copy of.

    Args:
        config: of the layers to export alone, or where `cut` of the whole model.
        part: what is exported.
        layers_name: the layers' place in the model, such as `model.layers`.
        picked: for each exported layer, the layer of the model that it is.
        group: for each layer of the model, its kind.
        cut: whether the other layers are taken out of the model, as no config describes one of
            these alone.
    """

    config: Any
    part: Part
    layers_name: str
    picked: list[int]
    group: list[int]
    cut: bool = False


def _find_layers(model: Any, part: Part, count: int) -> tuple[str, torch.nn.ModuleList]:
    prefix = text_prefix(model) if part is CAUSAL_LM else ""
    if part is not CAUSAL_LM:
        inner = model.get_encoder() if part is ENCODER else model.get_decoder()
        prefix = next(f"{name}." for name, module in model.named_modules() if module is inner)
    found = [(name, module) for name, module in model.named_modules()
             if name.startswith(prefix) and isinstance(module, torch.nn.ModuleList)
             and len(module) == count
             and all(any(True for _ in layer.parameters()) for layer in module)]
    if not found:
        raise CannotRepeat(f"the model has no list of {count} layers")
    return found[0]


def _signature(module: torch.nn.Module) -> tuple[object, ...]:
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


def plan_layers(config: Any, part: Part, model: torch.nn.Module, trust_remote_code: bool) -> \
        LayerPlan:
    """Which layers of `model`, which `config` describes, to export.

    Raises:
        CannotRepeat: all of them.
    """
    text = text_config(config)
    key = part.layers_key(text)
    if key is None or getattr(text, key) < 1:
        raise CannotRepeat(f"the config has no {' or '.join(part.layers)}")
    count = getattr(text, key)
    name, layers = _find_layers(model, part, count)
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
                inside, few = _find_layers(fewer, part, len(picked))
        except (CannotRepeat, LlmcError):  # such as a list of layers that are not there any more
            continue
        if [_signature(layer) for layer in few] == [signatures[i] for i in picked] \
                and _shapes_beside(fewer, inside) == _shapes_beside(model, name):
            return LayerPlan(short, part, name, picked, group)
    _check_places(text, count, picked)
    return LayerPlan(copy.deepcopy(config), part, name, picked, group, cut=True)


def _shapes_beside(model: torch.nn.Module, layers_name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters that are not of these layers, by name: a table for all layers,
    such as of Gemma 4's inputs for each, is of another size where there are fewer.
    """
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()
            if not name.startswith(f"{layers_name}.")}


def _check_places(text: Any, count: int, picked: Sequence[int]) -> None:
    """That the kinds of layers that a config makes by itself are for these the same as for the
    first so many, which the model takes them for where the others are cut out.

    Raises:
        CannotRepeat: it is not.
    """
    for name in dir(type(text)):
        if "layer" in name and isinstance(getattr(type(text), name, None), property):
            made = getattr(text, name, None)
            if isinstance(made, list | tuple) and len(made) == count \
                    and [made[i] for i in picked] != list(made[:len(picked)]):
                raise CannotRepeat(f"the config's {name} cannot be told of a few layers")


def _shorten(text: Any, key: str, picked: Sequence[int], renumber: bool = False) -> None:
    """Leave these layers in a config: in its lists with an entry for each, in their number, and
    with `renumber` in its lists of layers.

    Raises:
        CannotRepeat: it does not let their number be set, as ProphetNet's.
    """
    count = getattr(text, key)
    _shorten_lists(text, count, picked)
    for name, value in list(vars(text).items()) if renumber else ():
        if re.search("layer|indices", name) and _are_layers(value, count):
            setattr(text, name, type(value)(picked.index(i) for i in value if i in picked))
    try:
        setattr(text, key, len(picked))
    except NotImplementedError as error:
        raise CannotRepeat(f"the config does not let {key} be set") from error


def _are_layers(value: object, count: int) -> bool:
    """Whether these are the numbers of some of so many layers, in order."""
    return isinstance(value, list | tuple) and 0 < len(value) < count and all(
        isinstance(i, int) and 0 <= i < count for i in value) and list(value) == sorted(set(value))


def _shorten_lists(text: Any, count: int, picked: Sequence[int]) -> None:
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(text, name, type(value)(value[i] for i in picked))


def cut_layers(model: Any, part: Part, layers_name: str, picked: Sequence[int]) -> None:
    """Take all layers but these out of a model, and out of its config's lists. Their number stays,
    as tables for all layers are of that size.
    """
    text = text_config(model.config)
    key = part.layers_key(text)
    assert key is not None
    owner, _, leaf = layers_name.rpartition(".")
    layers = model.get_submodule(layers_name)
    setattr(model.get_submodule(owner), leaf, torch.nn.ModuleList(layers[i] for i in picked))
    _shorten_lists(text, getattr(text, key), picked)


def exported_names(names: Set[str], plan: LayerPlan) -> set[str]:
    """Names of a model's tensors as the exported layers call them."""
    known = {f"{plan.layers_name}.{layer}.": f"{plan.layers_name}.{index}."
             for index, layer in enumerate(plan.picked)}
    made = set()
    for name in names:
        layer = re.match(rf"{re.escape(plan.layers_name)}\.\d+\.", name)
        if layer is None:
            made.add(name)
        elif layer[0] in known:
            made.add(known[layer[0]] + name[layer.end():])
    return made


@dataclass
class _Layer:
    """One exported layer.

    Args:
        nodes: its own.
        carried_in: what it reads from the layer before.
        carried_out: what it hands on to the next.
        kept: what later layers read of it besides, such as keys and values that they share.
        selecting: ids of nodes that choose, by the layer's index, of what is made for all layers.
    """

    nodes: list[gs.Node]
    carried_in: gs.Tensor | None
    carried_out: gs.Tensor
    kept: list[gs.Tensor]
    selecting: set[int]


def repeat(graph: gs.Graph, plan: LayerPlan) -> gs.Graph:
    """The graph of the whole model, from the graph of a few of its layers."""
    layers = _cut_layers(graph, len(plan.picked))
    prefix = f"{ROOT}{plan.layers_name}."
    forms = [_canonical(layer, prefix, index) for index, layer in enumerate(layers)]
    template: dict[int, int] = {}
    for index, layer in enumerate(plan.picked):
        kind = plan.group[layer]
        if kind in template and forms[index] != forms[template[kind]]:
            raise CannotRepeat(f"layers {plan.picked[template[kind]]} and {layer} are alike in "
                                f"the config but not in the graph")
        if index > 0 or kind not in template:
            template[kind] = index  # a later copy shows what it takes from the layer before
    for exported, number in zip(layers, plan.picked, strict=True):
        if exported.kept and plan.group.count(plan.group[number]) > 1:
            raise CannotRepeat(f"later layers read {len(exported.kept)} tensors of layer {number}, "
                               f"of whose kind there are others")
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
            raise CannotRepeat(f"layer {number} is like the first, which has no layer before it")
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
    # Eager attention has no such nodes, nor has a hybrid one in every layer.
    order = [node.attrs["layer"] for node in graph.nodes if node.op == "Sdpa"]
    if plan.part.causal and order != sorted(order):
        raise CannotRepeat("attention layers are not in the order of the layers")
    return graph


def _cut_layers(graph: gs.Graph, count: int) -> list[_Layer]:
    """The nodes of each layer, by the tags that their names carry."""
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
        made = {id(t) for node in nodes for t in node.outputs}
        before = {id(t) for node in groups[index - 1] for t in node.outputs} if index else set()
        taken = {id(t): t for node in nodes for t in node.inputs
                 if id(t) in before and id(t) not in kept}
        handed = {id(t): t for node in nodes for t in node.outputs
                  if any(id(reader) not in inside for reader in t.outputs)
                  or any(t is output for output in graph.outputs)}
        out = [t for t in handed.values() if len(handed) == 1 or (
            layers and list(t.shape or ()) == list(layers[0].carried_out.shape or ()))]
        if len(out) != 1 or (index and len(taken) != 1):
            raise CannotRepeat(f"layer {index} takes {len(taken)} tensors from the layer before "
                                f"and hands on {len(handed)}")
        kept.update(id(t) for t in handed.values() if t is not out[0])
        other = [describe(node) for node in nodes for t in node.inputs if t.inputs
                 and id(t) not in made and id(t) not in before and id(t) not in kept
                 and tag[id(t.inputs[0])]]
        if other:
            raise CannotRepeat(f"{other[0]} reads from a layer that is not the one before")
        layers.append(_Layer(sorted(nodes, key=lambda node: position[id(node)]),
                             next(iter(taken.values()), None), out[0],
                             [t for t in handed.values() if t is not out[0]],
                             {id(node) for node in nodes} & selecting))
    return layers


def _tag_selecting(graph: gs.Graph, tag: dict[int, str]) -> set[int]:
    """Put into each layer what chooses for it, outside of it, from what is made for all layers: the
    entry of its index, as of Gemma 4's inputs for each layer. The ids of such nodes.
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


def _canonical(layer: _Layer, prefix: str, index: int) -> list[tuple[object, ...]]:
    """A form that equal layers share. The first layer's carried input stands for any tensor that
    the model computes from the tokens, so that it compares equal to later layers."""
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
    """The layer's nodes for another index, reading `hidden`; and what they hand on. `kept` has the
    clones of what earlier layers keep for later ones, and gets this one's.
    """
    made: dict[int, gs.Tensor] = {}

    def tensor(original: gs.Tensor) -> gs.Tensor:
        if original is layer.carried_in:
            return hidden
        if isinstance(original, gs.Constant) and original.name.startswith(f"{prefix}{old}."):
            name = original.name.replace(f"{prefix}{old}.", f"{prefix}{new}.", 1)
            if id(original) not in made:
                values = original._values
                made[id(original)] = gs.Constant(
                    name, Weight(values.shape, values.dtype, unread, name)
                    if isinstance(values, Weight) else values)
        return made.get(id(original), kept.get(id(original), original))

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
            made[id(result)] = gs.Variable(name, result.dtype, result.shape)
            outputs.append(made[id(result)])
        attrs = dict(node.attrs)
        if node.op == "Sdpa" and attrs["layer"] >= 0:
            attrs["layer"] = new
        nodes.append(gs.Node(op=node.op, name=f"layers.{new}.{node.name}", domain=node.domain,
                             attrs=attrs, inputs=inputs, outputs=outputs))
    kept.update((id(t), made[id(t)]) for t in layer.kept)
    return nodes, made[id(layer.carried_out)]
