"""Bind a checkpoint's tensors to an exported graph by name, and check that all are used."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol, cast

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
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from llmc.compiler.frontend.parts import ROOT, text_config, text_prefix
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError

# Tensors of old checkpoints that models now compute, each with a check of shape or dtype.
_COMPUTED: tuple[tuple[str, Callable[[Weight], bool]], ...] = (
    # a causal mask of 1 or 0, and the value of masked scores
    (r"(attn|attention)\.(attention\.)?(bias|causal_mask)",
     lambda w: len(w.shape) == 4 and w.shape[:2] == (1, 1)),
    (r"(attn|attention)\.(attention\.)?masked_bias", lambda w: w.shape in ((), (1,))),
    # rotary frequencies and tables; sinusoidal positions
    (r"(rotary_emb|rotary)\.(inv_freq|cos_cached|sin_cached)", lambda w: True),
    (r"embed_positions\.weights", lambda w: len(w.shape) == 2),
    (r"position_ids", lambda w: not w.is_floating),
)


class Tensors(Protocol):
    """Tensors by the names of a model's parameters."""

    def get(self, name: str) -> Weight | None:
        ...


def attach_weights(graph: gs.Graph, model: torch.nn.Module, checkpoint: Tensors,
                   origin: str, names: dict[int, str]) -> None:
    """Set each parameter's `Weight`, as float32, and its name.

    Args:
        graph: the graph, with placeholders for weights.
        model: the exported model.
        checkpoint: its tensors.
        origin: name of the checkpoint in errors.
        names: names of weights by identity, shared between graphs; new ones are added.

    Raises:
        LlmcError: a tensor is missing, or its shape or dtype differs from the model's.
    """
    aliases = aliases_of(model)
    bound: dict[str, Weight] = {}
    for tensor in graph.tensors().values():
        if not (isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)):
            continue
        name, shape = tensor.name.removeprefix(ROOT), tensor._values.shape
        if name not in bound:
            weight = next((weight for alias in (name, *aliases.get(name, ()))
                           if (weight := checkpoint.get(alias)) is not None), None)
            if weight is None:
                raise LlmcError(f"'{origin}' has no tensor '{name}' {list(shape)}, which its "
                                f"config requires; give the config that belongs to the weights")
            if weight.shape != shape:
                raise LlmcError(f"tensor '{name}' in '{origin}' has shape {list(weight.shape)}, "
                                f"its config expects {list(shape)}; give the config that belongs "
                                f"to the weights")
            bound[name] = _as_float32(weight, f"tensor '{name}' in '{origin}'")
        tensor.name = names.setdefault(id(bound[name]), name)
        tensor._values = bound[name]


def _as_float32(weight: Weight, what: str) -> Weight:
    if not weight.is_floating:
        raise LlmcError(f"{what} is {weight.dtype}, expected floating point: it is quantized, or "
                        f"not a weight; give the checkpoint in float32, float16 or bfloat16")
    return weight.cast(np.float32)


def as_modules_have(model: torch.nn.Module, tensors: Mapping[str, Weight],
                    linear: Set[str]) -> Mapping[str, Weight]:
    """Transpose weights of linear layers, [out, in], for a model's Conv1D modules, [in, out].

    Quantization tools replace Conv1D modules by linear layers.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    transposed = linear & {
        spelling for name, module in model.named_modules() if isinstance(module, Conv1D)
        for spelling in (f"{name}.weight", f"{name}.weight".removeprefix(prefix))}
    return {name: tensor.transpose() if name in transposed else tensor
            for name, tensor in tensors.items()} if transposed else tensors


class Checkpoint:
    """A checkpoint's tensors by the model's names, after transformers' renamings.

    Args:
        model: the model.
        tensors: the checkpoint's tensors by name.
        transforms: renamings and conversions; None: those of the model.

    Attributes:
        names: checkpoint names by model names.
        tensors: tensors by checkpoint names.
        merged: tensors that are merged of several, or split from one, by model names; lazy.
        parts: for each merged tensor, the checkpoint names of its sources.
        unmade: by model name, the source and the operations of an unsupported conversion.
    """

    def __init__(self, model: torch.nn.Module, tensors: Mapping[str, Weight],
                 transforms: Sequence[WeightTransform] | None = None) -> None:
        if transforms is None:
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
            renamed, pattern = rename_source_key(name, renamings, mergers)
            if pattern is None:
                self.names[renamed] = name
                target, pattern = rename_source_key(name, renamings, others) if others \
                    else (renamed, None)
                if pattern is not None:
                    self.unmade[target] = name, " and ".join(
                        type(each).__name__ for each in unknown[pattern].operations)
                continue
            if _splits(converters[pattern]):
                for part, rows in _split(renamed, tensors[name], converters[pattern]).items():
                    self.merged[part], self.parts[part] = rows, [name]
                continue
            self.parts.setdefault(renamed, []).append(name)
            sources.setdefault(renamed, {}).setdefault(pattern, []).append(tensors[name])
        modules = dict(model.named_modules()) if stacking else {}
        for target, by_pattern in sources.items():
            converter = converters[next(iter(by_pattern))]
            merged = _merge(target, by_pattern, converter)
            self.merged[target] = _in_module_order(merged, self.spellings(target), modules) \
                if converter in stacking else merged

    def spellings(self, name: str) -> tuple[str, ...]:
        """Return a name with and without the base model's prefix, optional in checkpoints."""
        return name, name.removeprefix(self._prefix), self._prefix + name

    @property
    def spelled(self) -> Set[str]:
        """The model's names, with and without the base model's prefix."""
        return {spelling for name in (*self.names, *self.merged)
                for spelling in self.spellings(name)}

    def get(self, name: str) -> Weight | None:
        """Return the tensor of a parameter or buffer, or None."""
        for spelling in self.spellings(name):
            if spelling in self.names:
                return self.tensors[self.names[spelling]]
            if spelling in self.merged:
                return self.merged[spelling]
        return None


def of_part(checkpoint: Checkpoint, whole: Any, model: Any) -> dict[str, Weight]:
    """Select the tensors of the language model `model` in a multimodal model `whole`.

    Returns:
        By their names in `model`; tensors that `whole` does not have, by their names.
    """
    prefix = text_prefix(whole)
    same = type(whole.get_submodule(prefix[:-1])) is type(model)
    inside = "" if same else f"{model.base_model_prefix}."
    known, expected = whole.state_dict().keys(), model.state_dict().keys()
    tensors = {}
    for name in (*checkpoint.names, *checkpoint.merged):
        full = next((spelling for spelling in checkpoint.spellings(name) if spelling in known),
                    name)
        tensor = checkpoint.get(name)
        assert tensor is not None
        if full.startswith(prefix):
            tensors[inside + full.removeprefix(prefix)] = tensor
        elif full in expected or full not in known:
            tensors[full] = tensor
    return tensors


_CONCATENATE_ROWS = [(Concatenate, 0)]


def _merges(converter: WeightConverter) -> bool:
    """Whether it concatenates rows, or stacks experts, with or without concatenation."""
    kinds = [(type(operation), operation.dim) for operation in converter.operations
             if isinstance(operation, MergeModulelist | Concatenate)]
    return len(kinds) == len(converter.operations) and kinds in (
        _CONCATENATE_ROWS, [(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def _splits(converter: WeightConverter) -> bool:
    """Whether it splits a tensor into parts with equal numbers of rows."""
    return len(converter.source_patterns) == 1 and len(converter.target_patterns) > 1 and [
        (type(operation), operation.dim, operation.num_shards_attribute)
        for operation in converter.operations if isinstance(operation, Chunk)] == [(Chunk, 0, None)]


def _of_single_experts(model: torch.nn.Module, known: Sequence[WeightConverter]) -> \
        list[WeightConverter]:
    """Return converters from single experts' linear layers to the model's stacked experts.

    For models without one in transformers: quantization tools replace stacks by linear layers.
    """
    leaves = {name.rpartition(".")[2] for name, module in model.named_modules()
              if {"gate_up_proj", "down_proj"} <= module._parameters.keys()}
    converters = []
    for leaf in sorted(leaves):
        if any(target.endswith(f"{leaf}.gate_up_proj") for converter in known
               for target in converter.target_patterns):
            continue
        for kind, end in (("weight", ""), ("bias", "_bias")):
            converters += [
                WeightConverter([f"{leaf}.*.gate_proj.{kind}", f"{leaf}.*.up_proj.{kind}"],
                                f"{leaf}.gate_up_proj{end}",
                                operations=[MergeModulelist(0), Concatenate(1)]),
                WeightConverter(f"{leaf}.*.down_proj.{kind}", f"{leaf}.down_proj{end}",
                                operations=[MergeModulelist(0)])]
    return converters


def _in_module_order(stack: Weight, names: Sequence[str], modules: Mapping[str, Any]) -> Weight:
    """Reorder stacked weights [num_experts, out, in] or biases as the model's module expects.

    The module may interleave rows of gate and up, or have transposed matrices.
    """
    owner, kind = next(((modules[path], kind) for path, _, kind in (name.rpartition(".")
                                                                    for name in names)
                        if path in modules), (None, ""))
    if owner is None:
        return stack
    if kind.startswith("gate_up") and not getattr(owner, "is_concatenated", True):
        stack = stack.take(np.arange(stack.shape[1]).reshape(2, -1).T.reshape(-1), 1)
    is_transposed = owner.gate_up_proj.shape[2] == 2 * owner.down_proj.shape[1]
    return stack.transpose() if is_transposed and len(stack.shape) == 3 else stack


def _split(name: str, tensor: Weight, converter: WeightConverter) -> dict[str, Weight]:
    """Split a tensor by a converter; `name` is the name of the first part.

    Raises:
        LlmcError: the number of rows is not divisible.
    """
    first, *_ = targets = converter.target_patterns
    rows, rest = divmod(tensor.shape[0] if tensor.shape else 0, len(targets))
    if rest or not rows or first not in name:
        raise LlmcError(f"tensor '{tensor.name}' is {list(tensor.shape)}, whose rows cannot be "
                        f"split evenly into {len(targets)} tensors ({', '.join(targets)}); give "
                        f"a complete checkpoint")
    return {name.replace(first, target): tensor.take_rows(np.arange(i * rows, (i + 1) * rows))
            for i, target in enumerate(targets)}


def check_made(model: torch.nn.Module, checkpoint: Checkpoint, origin: str) -> None:
    """Reject tensors with an unsupported conversion of transformers.

    Raises:
        LlmcError: names a tensor and the conversion.
    """
    known = model.state_dict()
    for target, (name, operations) in checkpoint.unmade.items():
        if target in known and checkpoint.get(target) is None:
            raise LlmcError(f"'{origin}' has a tensor '{name}', which transformers converts to "
                            f"'{target}' by {operations}; llmc does not support that: load the "
                            f"checkpoint with transformers and save it again")


def _merge(name: str, sources: Mapping[str, Sequence[Weight]], converter: WeightConverter) -> \
        Weight:
    """Merge tensors lazily: a stack [num_experts, rows, columns], or concatenated rows.

    Raises:
        LlmcError: experts differ in shape or dtype, or a tensor of an expert is missing.
    """
    lists = [sources.get(pattern, ()) for pattern in converter.source_patterns]
    if len({len(weights) for weights in lists}) > 1:
        counts = " and ".join(str(len(weights)) for weights in lists)
        raise LlmcError(f"'{name}' is merged from {counts} tensors "
                        f"({', '.join(converter.source_patterns)}), expected equal numbers; give "
                        f"a complete checkpoint")
    for weights in lists:
        other = next((weight for weight in weights if (weight.shape, weight.dtype) !=
                      (weights[0].shape, weights[0].dtype)), None)
        if other is not None:
            raise LlmcError(f"tensor '{other.name}' is {other.dtype} {list(other.shape)}, expected "
                            f"{weights[0].dtype} {list(weights[0].shape)} as of the first expert's "
                            f"'{weights[0].name}'; give experts of one shape and dtype")
    if not any(isinstance(operation, MergeModulelist) for operation in converter.operations):
        return Weight.concat([weights[0] for weights in lists])
    return Weight.stack([Weight.concat(expert) for expert in zip(*lists, strict=True)])


def aliases_of(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Map each parameter's name to all of its names: tied parameters have several."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in by_id.values() for name in names}


def ties_hold(model: torch.nn.Module, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint's copies of tied tensors are equal.

    If they differ, transformers does not tie them, whatever tie_word_embeddings is.
    """
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = ((checkpoint.get(target), checkpoint.get(source)) for target, source in tied.items())
    return all(equal(one, other) for one, other in pairs if one is not None and other is not None)


def equal(left: Weight, right: Weight) -> bool:
    """Whether two weights have the same shape, dtype and values."""
    return left is right or (left.shape == right.shape and left.dtype == right.dtype and all(
        a.tobytes() == b.tobytes() for a, b in zip(left.blocks(), right.blocks(), strict=True)))


def check_all_used(model: torch.nn.Module, checkpoint: Checkpoint, names: Mapping[int, str],
                   origin: str, with_buffers: Callable[[], torch.nn.Module]) -> None:
    """Check that every tensor of a checkpoint is used, or known to be unnecessary.

    Args:
        model: the model with all layers, without values.
        checkpoint: its tensors.
        names: names of the graphs' weights by identity.
        origin: name of the checkpoint in errors.
        with_buffers: builds the model with values in its buffers, called where needed.

    Raises:
        LlmcError: a tensor is unused.
    """
    tensors = checkpoint.tensors
    merged = {part for known, parts in checkpoint.parts.items() for part in parts
              if id(checkpoint.merged[known].cast(np.float32)) in names}
    left = [name for name, tensor in tensors.items() if name not in merged
            and not (tensor.is_floating and id(tensor.cast(np.float32)) in names)]
    if not left:
        return
    model_names = {name: known for known, name in checkpoint.names.items()}
    model_names |= {part: known for known, parts in checkpoint.parts.items() for part in parts}
    used = {names[id(tensor.cast(np.float32))]: tensor for name, tensor in tensors.items()
            if name not in left and name not in merged}
    unknown = [name for name in left
               if not _is_duplicate(model_names[name], tensors[name], model, checkpoint, used,
                                    with_buffers)
               and not _is_superfluous(model_names[name], tensors[name], model)
               and not _is_zero_bias(name, tensors, model_names[name], model, checkpoint)]
    if unknown:
        name = unknown[0]
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise LlmcError(
            f"'{origin}' has a tensor '{name}' {list(tensors[name].shape)} {tensors[name].dtype}"
            f"{more}, which '{type(model).__name__}' with its config does not use; give the config "
            f"that belongs to the weights, or remove the tensor")


def _is_duplicate(name: str, tensor: Weight, model: torch.nn.Module, checkpoint: Checkpoint,
                  used: Mapping[str, Weight], with_buffers: Callable[[], torch.nn.Module]) -> bool:
    """Whether the model's graphs do not need the tensor.

    It equals a used weight that it is tied to, or a buffer's value, or does not affect the logits.
    """
    buffers = dict(model.named_buffers())
    aliases = aliases_of(model)
    known = next((spelling for spelling in checkpoint.spellings(name)
                  if spelling in aliases or spelling in model.state_dict()), None)
    if known in buffers:
        buffer = buffers[known]
        if tuple(buffer.shape) != tensor.shape:
            return False
        if buffer.dim() and buffer.is_floating_point():
            return True  # the logits do not depend on it
        value = with_buffers().get_buffer(known).double().numpy()  # computed from the config
        return bool(np.allclose(tensor.load().astype(np.float64), value, rtol=1e-2, atol=0))
    if known is None:
        return False
    twins = [used[alias] for alias in aliases[known] if alias in used]
    return all(equal(tensor, twin) for twin in twins)


def _is_zero_bias(name: str, tensors: Mapping[str, Weight], renamed: str, model: torch.nn.Module,
                  checkpoint: Checkpoint) -> bool:
    """Whether it is a zero bias of a quantized layer that has no bias in the model.

    Older quantization tools add a bias to every layer.
    """
    stem, _, kind = name.rpartition(".")
    weight, known = tensors.get(f"{stem}.weight"), model.state_dict()
    return kind == "bias" and weight is not None \
        and (weight.stored is not None or weight.dequantized) \
        and not any(spelling in known for spelling in checkpoint.spellings(renamed)) \
        and not tensors[name].load().any()


def _is_superfluous(name: str, tensor: Weight, model: torch.nn.Module) -> bool:
    """Whether transformers ignores the tensor too, or models now compute it."""
    ignored: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    if any(re.search(pattern, name) for pattern in ignored or ()):
        return True
    if any(re.search(rf"(^|\.){pattern}$", name) and fits(tensor) for pattern, fits in _COMPUTED):
        return True
    # Layers for multi-token prediction, after the last decoder layer.
    config = text_config(model.config)
    count, more = (getattr(config, key, None) or 0
                   for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    layer = re.search(r"(^|\.)layers\.(\d+)\.", name)
    return bool(more) and (bool(re.match(r"(model\.)?mtp\.", name)) or (
        layer is not None and count <= int(layer[2]) < count + more))
