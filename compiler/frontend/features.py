"""What llmc does not compile, seen in a model's modules and config before anything is exported.

This spares the wait; the passes refuse by themselves what is not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from llmc.compiler.frontend.experts import is_experts
from llmc.compiler.frontend.parts import CAUSAL_LM, Part, text_config, text_prefix
from llmc.compiler.frontend.states import called_in, keeps_state
from llmc.errors import LlmcError


@dataclass(frozen=True)
class Feature:
    """Something that a model has, in the words of the field.

    Args:
        words: what it is.
        classes: a pattern of names of module classes that do it.
        parameters: names of parameters that only modules have that do it.
        modules: names of modules inside that only those have.
        keys: what the config calls its number or switch; named where it is set. Where there is
            neither a class nor a parameter to know it by, these alone tell.
    """

    words: str
    classes: str = ""
    parameters: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()

    def is_in(self, module: torch.nn.Module) -> bool:
        """Whether this very module does it."""
        return bool((self.classes and re.search(self.classes, type(module).__name__))
                    or self.parameters & module._parameters.keys()
                    or self.modules & module._modules.keys())

    def setting(self, config: dict[str, Any]) -> str | None:
        """The config's key and value, where it sets one."""
        for key in self.keys:
            value: Any = config
            for name in key.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            if isinstance(value, int | float) and value:
                return f"{key} {value}"
        return None


# Experts that transformers' own interface runs are exported, and those that run for every token.
_EXPERTS = Feature("a mixture of experts of its own kind",
                   r"Experts$|M[oO][eE]$|M[oO][eE](Block|Layer)$",
                   keys=("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"))
_LINEAR = Feature("linear attention, which keeps a state instead of keys and values",
                  r"DeltaNet$|DeltaAttention$|LightningAttention$|LinearAttention$")
FEATURES = (
    Feature("experts that pass a token on as it is (zero experts)",  # before other experts
            modules=frozenset({"identity_expert"})),
    _EXPERTS,
    _LINEAR,
    Feature("state-space layers (Mamba)", r"Mamba\w*Mixer$|^(Bamba|FalconH1)Mixer$",
            frozenset({"A_log"})),
    Feature("xLSTM layers, which keep a state instead of keys and values", r"^xLSTMLayer$"),
    Feature("RWKV layers, which keep a state instead of keys and values", r"^Rwkv\w*Attention$"),
    Feature("gated linear recurrences", r"Rglru$"),
    Feature("keys and values that are compressed along the sequence", r"Compressor$"),
    Feature("differential attention (one softmax less another)",
            parameters=frozenset({"lambda_q1"})),
    Feature("block-sparse attention", r"BlockSparseAttention$"),
    Feature("attention to blocks of keys that an indexer chooses", r"QSAIndexer$"),
    Feature("attention among tokens of like hashes (LSH)", r"^LSHSelfAttention$"),
    Feature("attention in chunks that see the one before", r"^LocalSelfAttention$"),
    Feature("n-gram attention (a stream for each further token that is predicted)",
            r"NgramSelfAttention$"),
    Feature("lengths that are counted from the tokens (none sees those that are pad_index)",
            r"^(XLM|Flaubert)Model$"),
    Feature("biases of attention by segments", r"SegmentPositionEmbedding$"),
    Feature("biases of attention that are computed from queries", r"RelativeLogits$"),
    Feature("attention to the outputs of earlier layers", r"AttentionResidual$"),
    Feature("patches of tokens, as long as what the tokens are decides", r"Patcher$"),
    Feature("a norm of the rotated part of keys alone",
            modules=frozenset({"k_rope_only_layernorm"})),
    Feature("AltUp (several hidden states side by side)", r"AltUp$"),
    Feature("short convolutions", r"^Conv1d$"),  # last: what is above has some too
)


def check_features(model: Any, part: Part) -> None:
    """Refuse a model for what its modules or its config say.

    Raises:
        LlmcError: it names every such feature, and where each is.
    """
    config = text_config(model.config)
    prefix = text_prefix(model).removesuffix(".")
    found = dict(_found(model.get_submodule(prefix), config.to_dict()))
    both_ways = _both_ways(model)
    if part is CAUSAL_LM and both_ways and not getattr(config, "is_decoder", False):
        found["attention both ways (a token sees those after it)"] = both_ways
    if found:
        features = " and ".join(f"{words} ({where})" for words, where in found.items())
        raise LlmcError(f"'{config.model_type}' has {features}, which llmc does not compile")


def _found(model: torch.nn.Module, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The words of each feature, and where it is; of parts that read no text, none."""
    seen: dict[Feature, str] = {}
    claimed: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in claimed):
            continue
        if name and _reads_no_text(module, model):
            claimed.append(f"{name}.")
            continue
        if keeps_state(module):  # which is exported
            claimed.append(f"{name}.")
            continue
        feature = next((feature for feature in FEATURES if feature.is_in(module)), None)
        if (feature is _EXPERTS and any(is_experts(part) or _is_stacked(part)
                                        for part in module.modules())) \
                or (feature is _LINEAR and called_in(module) & {"ALL_ATTENTION_FUNCTIONS"}):
            continue
        if feature is not None:
            claimed.append(f"{name}.")
            seen.setdefault(feature, f"{type(module).__name__} '{name}'")
    for feature in FEATURES:
        setting = feature.setting(config)
        known = feature.classes or feature.parameters or feature.modules
        if feature in seen or (setting and not known):
            yield feature.words, "; ".join(filter(None, (setting, seen.get(feature))))


def _reads_no_text(module: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Whether it is what reads images or sounds for the model."""
    others = [getattr(getattr(model, "config", None), key, None)
              for key in ("vision_config", "audio_config")]
    own = getattr(module, "config", None)
    return own is not None and any(type(own) is type(other) for other in others)


def _is_stacked(module: torch.nn.Module) -> bool:
    """Whether a module has two stacks of matrices."""
    return len([parameter for parameter in module._parameters.values()
                if parameter is not None and parameter.dim() == 3]) == 2


def _both_ways(model: torch.nn.Module) -> str | None:
    """An attention that says that it is not causal, where none says that it is."""
    attentions = [(name, module) for name, module in model.named_modules()
                  if "Attention" in type(module).__name__ and not _reads_no_text(module, model)
                  and isinstance(getattr(module, "is_causal", None), bool)]
    if not attentions or any(module.is_causal for _, module in attentions):
        return None
    name, module = attentions[0]
    return f"{type(module).__name__} '{name}'"
