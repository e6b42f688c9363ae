"""Give an exported graph the checkpoint's tensors, by name, and see that every tensor is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, cast

import numpy as np
import onnx_graphsurgeon as gs
import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from llmc.compiler.frontend.parts import ROOT, text_config, text_prefix
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError

# Tensors that old checkpoints carry and today's models compute, with what they must look like.
_COMPUTED: tuple[tuple[str, Callable[[Weight], bool]], ...] = (
    # a causal mask of 1 or 0, and what masked scores became
    (r"(attn|attention)\.(attention\.)?(bias|causal_mask)",
     lambda w: len(w.shape) == 4 and w.shape[:2] == (1, 1)),
    (r"(attn|attention)\.(attention\.)?masked_bias", lambda w: w.shape in ((), (1,))),
    # rotary frequencies and tables; sines by position
    (r"(rotary_emb|rotary)\.(inv_freq|cos_cached|sin_cached)", lambda w: True),
    (r"embed_positions\.weights", lambda w: len(w.shape) == 2),
    (r"position_ids", lambda w: not w.is_floating),
)


def attach_weights(graph: gs.Graph, model: torch.nn.Module, checkpoint: Checkpoint,
                   origin: str, names: dict[int, str]) -> None:
    """Give each parameter its `Weight`, as float32, and its own name; one that is in `names` has it
    from there.

    Raises:
        LlmcError: a tensor is missing, or its shape or dtype is none that the model takes.
    """
    aliases = _aliases(model)
    made: dict[str, Weight] = {}
    for tensor in graph.tensors().values():
        if not (isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)):
            continue
        name, shape = tensor.name.removeprefix(ROOT), tensor._values.shape
        if name not in made:
            found = next((found for own in (name, *aliases.get(name, ()))
                          if (found := checkpoint.get(own)) is not None), None)
            if found is None:
                raise LlmcError(f"'{origin}' has no tensor '{name}' {list(shape)}, which its "
                                f"config asks for; weights and config do not belong together")
            if found.shape != shape:
                raise LlmcError(f"tensor '{name}' in '{origin}' has shape {list(found.shape)}, "
                                f"its config asks for {list(shape)}")
            made[name] = _as_float32(found, f"tensor '{name}' in '{origin}'")
        tensor.name = names.setdefault(id(made[name]), name)
        tensor._values = made[name]


def _as_float32(weight: Weight, what: str) -> Weight:
    if not weight.is_floating:
        raise LlmcError(f"{what} is {weight.dtype}, where the model has floating-point weights, so "
                        f"it is quantised or no weight at all; give the checkpoint in float32, "
                        f"float16 or bfloat16")
    return weight.cast(np.float32)


def as_modules_have(model: torch.nn.Module, tensors: Mapping[str, Weight],
                    linear: Set[str]) -> Mapping[str, Weight]:
    """The tensors, of which those that lie as linear layers' weights do, [out, in], are transposed
    where the model has a Conv1D, [in, out]: tools that quantise put linear layers in its place.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    turned = {spelling for name, module in model.named_modules() if isinstance(module, Conv1D)
              for spelling in (f"{name}.weight", f"{name}.weight".removeprefix(prefix))} & linear
    return {name: tensor.transpose() if name in turned else tensor
            for name, tensor in tensors.items()} if turned else tensors


class Checkpoint:
    """A checkpoint's tensors by the names that a model has for them today.

    Attributes:
        names: in the checkpoint, by those of today.
        tensors: the checkpoint's, by its own names.
        merged: tensors of today that are made of several, or of some rows of one, by name; read
            when they are.
        parts: what each of these is made of, by the checkpoint's names.
        unmade: tensors of today that are made in a way that llmc does not know, by name: of which
            of the checkpoint's, and how.
    """

    def __init__(self, model: torch.nn.Module, tensors: Mapping[str, Weight]) -> None:
        transforms = get_model_conversion_mapping(cast(PreTrainedModel, model))
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        mergers = [t for t in transforms if isinstance(t, WeightConverter)
                   and (_merges(t) or _splits(t))]
        others = [t for t in transforms if isinstance(t, WeightConverter) and t not in mergers]
        stacking = _of_single_experts(model, mergers)
        mergers += stacking
        self._prefix = f"{getattr(model, 'base_model_prefix', '')}."
        self.tensors = tensors
        self.names: dict[str, str] = {}
        self.merged: dict[str, Weight] = {}
        self.parts: dict[str, list[str]] = {}
        self.unmade: dict[str, tuple[str, str]] = {}
        converters = {pattern: t for t in mergers for pattern in t.source_patterns}
        unknown = {pattern: t for t in others for pattern in t.source_patterns}
        sources: dict[str, dict[str, list[Weight]]] = {}
        for name in sorted(tensors, key=dot_natural_key) if mergers else tensors:
            own, pattern = rename_source_key(name, renamings, mergers)
            if pattern is None:
                self.names[own] = name
                made, pattern = rename_source_key(name, renamings, others) if others \
                    else (own, None)
                if pattern is not None:
                    self.unmade[made] = name, " and ".join(
                        type(each).__name__ for each in unknown[pattern].operations)
                continue
            if _splits(converters[pattern]):
                for part, rows in _split(own, tensors[name], converters[pattern]).items():
                    self.merged[part], self.parts[part] = rows, [name]
                continue
            self.parts.setdefault(own, []).append(name)
            sources.setdefault(own, {}).setdefault(pattern, []).append(tensors[name])
        modules = dict(model.named_modules()) if stacking else {}
        for own, found in sources.items():
            converter = converters[next(iter(found))]
            made = _merge(own, found, converter)
            self.merged[own] = _as_stacks_lie(made, self.spellings(own), modules) \
                if converter in stacking else made

    def spellings(self, name: str) -> tuple[str, ...]:
        """A name with and without the base model's prefix, which checkpoints may leave out."""
        return name, name.removeprefix(self._prefix), self._prefix + name

    @property
    def spelled(self) -> Set[str]:
        """The names of today, with prefixes and without."""
        return {spelling for name in (*self.names, *self.merged)
                for spelling in self.spellings(name)}

    def get(self, name: str) -> Weight | None:
        """The tensor of a parameter or buffer."""
        for spelling in self.spellings(name):
            if spelling in self.names:
                return self.tensors[self.names[spelling]]
            if spelling in self.merged:
                return self.merged[spelling]
        return None


def of_part(checkpoint: Checkpoint, whole: Any, model: Any) -> dict[str, Weight]:
    """The tensors of the language model in `whole`, by the names that they have in `model`, which
    is that alone; and those that `whole` does not have, by their own.
    """
    prefix = text_prefix(whole)
    same = type(whole.get_submodule(prefix[:-1])) is type(model)
    inside = "" if same else f"{model.base_model_prefix}."
    known, wanted = whole.state_dict().keys(), model.state_dict().keys()
    tensors = {}
    for name in (*checkpoint.names, *checkpoint.merged):
        own = next((spelling for spelling in checkpoint.spellings(name) if spelling in known), name)
        tensor = checkpoint.get(name)
        assert tensor is not None
        if own.startswith(prefix):
            tensors[inside + own.removeprefix(prefix)] = tensor
        elif own in wanted or own not in known:
            tensors[own] = tensor
    return tensors


_ABOVE = [(Concatenate, 0)]


def _merges(converter: WeightConverter) -> bool:
    """Whether it stacks tensors of one expert each, perhaps one above the other first; or lays
    tensors one above the other.
    """
    kinds = [(type(operation), operation.dim) for operation in converter.operations
             if isinstance(operation, MergeModulelist | Concatenate)]
    return len(kinds) == len(converter.operations) and kinds in (
        _ABOVE, [(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def _splits(converter: WeightConverter) -> bool:
    """Whether it makes several tensors of one, of as many rows each."""
    return len(converter.source_patterns) == 1 and len(converter.target_patterns) > 1 and [
        (type(operation), operation.dim, operation.num_shards_attribute)
        for operation in converter.operations if isinstance(operation, Chunk)] == [(Chunk, 0, None)]


def _of_single_experts(model: torch.nn.Module, known: Sequence[WeightConverter]) -> \
        list[WeightConverter]:
    """Converters of experts that are linear layers of their own to the stacks that a model has,
    where transformers has none: tools that quantise put linear layers in the stacks' place.
    """
    leaves = {name.rpartition(".")[2] for name, module in model.named_modules()
              if {"gate_up_proj", "down_proj"} <= module._parameters.keys()}
    made = []
    for leaf in sorted(leaves):
        if any(target.endswith(f"{leaf}.gate_up_proj") for converter in known
               for target in converter.target_patterns):
            continue
        for kind, end in (("weight", ""), ("bias", "_bias")):
            made += [
                WeightConverter([f"{leaf}.*.gate_proj.{kind}", f"{leaf}.*.up_proj.{kind}"],
                                f"{leaf}.gate_up_proj{end}",
                                operations=[MergeModulelist(0), Concatenate(1)]),
                WeightConverter(f"{leaf}.*.down_proj.{kind}", f"{leaf}.down_proj{end}",
                                operations=[MergeModulelist(0)])]
    return made


def _as_stacks_lie(stack: Weight, names: Sequence[str], modules: Mapping[str, Any]) -> Weight:
    """A stack of linear layers' weights [num_experts, out, in], or of their biases, as a model has
    it: rows of gate and up in turns, matrices transposed.
    """
    owner, kind = next(((modules[own], kind) for own, _, kind in (name.rpartition(".")
                                                                  for name in names)
                        if own in modules), (None, ""))
    if owner is None:
        return stack
    if kind.startswith("gate_up") and not getattr(owner, "is_concatenated", True):
        stack = stack.take(np.arange(stack.shape[1]).reshape(2, -1).T.reshape(-1), 1)
    is_transposed = owner.gate_up_proj.shape[2] == 2 * owner.down_proj.shape[1]
    return stack.transpose() if is_transposed and len(stack.shape) == 3 else stack


def _split(name: str, tensor: Weight, converter: WeightConverter) -> dict[str, Weight]:
    """The tensors that a converter makes of one, the first of which is called `name`.

    Raises:
        LlmcError: its rows cannot be dealt out.
    """
    first, *_ = targets = converter.target_patterns
    rows, rest = divmod(tensor.shape[0] if tensor.shape else 0, len(targets))
    if rest or not rows or first not in name:
        raise LlmcError(f"tensor '{tensor.name}' is {list(tensor.shape)}, of which {len(targets)} "
                        f"tensors of as many rows each are expected ({', '.join(targets)})")
    return {name.replace(first, target): tensor.take_rows(np.arange(i * rows, (i + 1) * rows))
            for i, target in enumerate(targets)}


def check_made(model: torch.nn.Module, checkpoint: Checkpoint, origin: str) -> None:
    """Refuse a checkpoint with tensors that transformers makes the model's of in a way that llmc
    does not know.

    Raises:
        LlmcError: it names one of them, and the way.
    """
    known = model.state_dict()
    for own, (name, how) in checkpoint.unmade.items():
        if own in known and checkpoint.get(own) is None:
            raise LlmcError(f"'{origin}' has a tensor '{name}', of which transformers makes "
                            f"'{own}' by {how}, which llmc does not do")


def _merge(name: str, sources: Mapping[str, Sequence[Weight]], converter: WeightConverter) -> \
        Weight:
    """The stack [num_experts, rows, columns] of experts' tensors, or tensors one above the other,
    of which a block is read when a block of it is.

    Raises:
        LlmcError: experts differ in shape or dtype, or some have not all tensors.
    """
    lists = [sources.get(pattern, ()) for pattern in converter.source_patterns]
    if len({len(weights) for weights in lists}) > 1:
        counts = " and ".join(str(len(weights)) for weights in lists)
        raise LlmcError(f"'{name}' is made of {counts} tensors "
                        f"({', '.join(converter.source_patterns)}), as many of each are expected; "
                        f"the checkpoint is not whole")
    for weights in lists:
        odd = next((weight for weight in weights
                    if (weight.shape, weight.dtype) != (weights[0].shape, weights[0].dtype)), None)
        if odd is not None:
            raise LlmcError(f"tensor '{odd.name}' is {odd.dtype} {list(odd.shape)}, but "
                            f"'{weights[0].name}' of the first expert {weights[0].dtype} "
                            f"{list(weights[0].shape)}")
    if not any(isinstance(operation, MergeModulelist) for operation in converter.operations):
        return Weight.concat([weights[0] for weights in lists])
    return Weight.stack([Weight.concat(own) for own in zip(*lists, strict=True)])


def _aliases(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """All names that each parameter has in the model: tied ones have several."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in by_id.values() for name in names}


def ties_hold(model: torch.nn.Module, checkpoint: Checkpoint) -> bool:
    """Whether tensors that the config ties are equal where the checkpoint has both. Where they are
    not, transformers does not tie them, whatever tie_word_embeddings says.
    """
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = ((checkpoint.get(target), checkpoint.get(source)) for target, source in tied.items())
    return all(_equal(one, other) for one, other in pairs if one is not None and other is not None)


def _equal(left: Weight, right: Weight) -> bool:
    return left is right or (left.shape == right.shape and left.dtype == right.dtype and all(
        a.tobytes() == b.tobytes() for a, b in zip(left.blocks(), right.blocks(), strict=True)))


def check_all_used(model: torch.nn.Module, checkpoint: Checkpoint, names: Mapping[int, str],
                   origin: str, with_buffers: Callable[[], torch.nn.Module]) -> None:
    """See that every tensor of a checkpoint went into a graph, or why it does not have to.

    Args:
        model: of all layers, empty.
        names: those of the weights that the model's graphs have, by identity.
        with_buffers: makes the same model with values in its buffers, where they are needed.

    Raises:
        LlmcError: there is one that neither is used nor has a reason not to be.
    """
    tensors = checkpoint.tensors
    merged = {part for own, parts in checkpoint.parts.items() for part in parts
              if id(checkpoint.merged[own].cast(np.float32)) in names}
    left = [name for name, tensor in tensors.items() if name not in merged
            and not (tensor.is_floating and id(tensor.cast(np.float32)) in names)]
    if not left:
        return
    own_names = {name: own for own, name in checkpoint.names.items()}
    own_names |= {part: own for own, parts in checkpoint.parts.items() for part in parts}
    used = {names[id(tensor.cast(np.float32))]: tensor for name, tensor in tensors.items()
            if name not in left and name not in merged}
    unknown = [name for name in left
               if not _is_model_s(own_names[name], tensors[name], model, checkpoint, used,
                                  with_buffers)
               and not _is_superfluous(own_names[name], tensors[name], model)
               and not _adds_nothing(name, tensors, own_names[name], model, checkpoint)]
    if unknown:
        name = unknown[0]
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise LlmcError(
            f"'{origin}' has a tensor '{name}' {list(tensors[name].shape)} {tensors[name].dtype}"
            f"{more} that '{type(model).__name__}', as its config describes it, does not take; "
            f"give the config that belongs to the weights, or remove what the model does without")


def _is_model_s(name: str, tensor: Weight, model: torch.nn.Module, checkpoint: Checkpoint,
                used: Mapping[str, Weight], with_buffers: Callable[[], torch.nn.Module]) -> bool:
    """Whether the model has the tensor, and takes from it nothing that its graphs have not: it is
    tied to one that they have, or the logits do not depend on it.
    """
    buffers = dict(model.named_buffers())
    aliases = _aliases(model)
    own = next((spelling for spelling in checkpoint.spellings(name)
                if spelling in aliases or spelling in model.state_dict()), None)
    if own in buffers:
        buffer = buffers[own]
        if tuple(buffer.shape) != tensor.shape:
            return False
        if buffer.dim() and buffer.is_floating_point():
            return True  # the logits do not depend on it
        value = with_buffers().get_buffer(own).double().numpy()  # the config's
        return bool(np.allclose(tensor.load().astype(np.float64), value, rtol=1e-2, atol=0))
    if own is None:
        return False
    twins = [used[alias] for alias in aliases[own] if alias in used]
    return all(_equal(tensor, twin) for twin in twins)


def _adds_nothing(name: str, tensors: Mapping[str, Weight], own: str, model: torch.nn.Module,
                  checkpoint: Checkpoint) -> bool:
    """Whether it is a bias of zeros of a layer in fewer bits that the model has without: older
    tools that quantise gave every layer one.
    """
    stem, _, kind = name.rpartition(".")
    weight, known = tensors.get(f"{stem}.weight"), model.state_dict()
    return kind == "bias" and weight is not None \
        and (weight.stored is not None or weight.dequantized) \
        and not any(spelling in known for spelling in checkpoint.spellings(own)) \
        and not tensors[name].load().any()


def _is_superfluous(name: str, tensor: Weight, model: torch.nn.Module) -> bool:
    """Whether transformers leaves the tensor out as well, or it is one that models compute now."""
    ignored: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    if any(re.search(pattern, name) for pattern in ignored or ()):
        return True
    if any(re.search(rf"(^|\.){pattern}$", name) and fits(tensor) for pattern, fits in _COMPUTED):
        return True
    # Layers behind the last that predict one more token each.
    config = text_config(model.config)
    count, more = (getattr(config, key, None) or 0
                   for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    layer = re.search(r"(^|\.)layers\.(\d+)\.", name)
    return bool(more) and (bool(re.match(r"(model\.)?mtp\.", name)) or (
        layer is not None and count <= int(layer[2]) < count + more))
