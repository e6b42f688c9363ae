"""Give an exported graph the checkpoint's tensors, by name."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import cast

import onnx_graphsurgeon as gs
import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from llmc.compiler.frontend.parts import ROOT
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError


def attach_weights(graph: gs.Graph, model: torch.nn.Module, tensors: Mapping[str, Weight],
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
        name, shape = tensor.name.removeprefix(ROOT), tensor._values.shape
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


def names_in(model: torch.nn.Module, tensors: Mapping[str, Weight]) -> Set[str]:
    """The checkpoint's names, as transformers calls them today."""
    return _renamed(model, tensors).keys()
