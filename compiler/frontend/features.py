"""Detection of unsupported features in a model's modules and config, before the export.

It makes errors early; the passes reject unsupported graphs anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmc.compiler.frontend.convolutions import feature_convolutions, reads_features
from llmc.compiler.frontend.expert_export import is_experts
from llmc.compiler.frontend.parts import (
    CAUSAL_LM,
    DECODER,
    ENCODER,
    Part,
    text_config,
    text_prefix,
)
from llmc.compiler.frontend.recurrence import called_in, keeps_state
from llmc.errors import LlmcError


@dataclass(frozen=True)
class Feature:
    """An unsupported feature.

    Args:
        words: its name in errors.
        classes: regular expression for class names of modules that implement it.
        parameters: names of parameters that only these modules have.
        modules: names of submodules that only these modules have.
        keys: config keys of its size or switch, named in errors. Without classes, parameters and
            modules, a set key alone detects the feature.
    """

    words: str
    classes: str = ""
    parameters: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()

    def is_in(self, module: torch.nn.Module) -> bool:
        """Whether this module implements it, disregarding its submodules."""
        return bool((self.classes and re.search(self.classes, type(module).__name__))
                    or self.parameters & module._parameters.keys()
                    or self.modules & module._modules.keys())

    def setting(self, config: dict[str, Any]) -> str | None:
        """Return the first key that the config sets, with its value."""
        for key in self.keys:
            value: Any = config
            for name in key.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            if isinstance(value, int | float) and value:
                return f"{key} {value}"
        return None


# Experts of transformers' experts interface, and stacked experts that run for every token, are
# supported.
_EXPERTS = Feature("an unsupported implementation of MoE",
                   r"Experts$|M[oO][eE]$|M[oO][eE](Block|Layer)$",
                   keys=("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"))
_LINEAR = Feature("linear attention with a recurrent state",
                  r"DeltaNet$|DeltaAttention$|LightningAttention$|LinearAttention$")
_BIDIRECTIONAL = "bidirectional attention"
FEATURES = (
    Feature("identity experts (zero experts)",  # before other experts
            modules=frozenset({"identity_expert"})),
    _EXPERTS,
    _LINEAR,
    Feature("state-space layers (Mamba)", r"Mamba\w*Mixer$|^(Bamba|FalconH1)Mixer$",
            frozenset({"A_log"})),
    Feature("xLSTM layers", r"^xLSTMLayer$"),
    Feature("RWKV layers", r"^Rwkv\w*Attention$"),
    Feature("gated linear recurrences", r"Rglru$"),
    Feature("KV compression along the sequence", r"Compressor$"),
    Feature("differential attention", parameters=frozenset({"lambda_q1"})),
    Feature("block-sparse attention", r"BlockSparseAttention$"),
    Feature("sparse attention to blocks of keys that an indexer selects", r"QSAIndexer$"),
    Feature("LSH attention", r"^LSHSelfAttention$"),
    Feature("local attention in chunks that see the previous chunk", r"^LocalSelfAttention$"),
    Feature("n-gram attention (a stream per predicted token)", r"NgramSelfAttention$"),
    Feature("padding masks computed from token ids (pad_index)", r"^(XLM|Flaubert)Model$"),
    Feature("attention biases by segment", r"SegmentPositionEmbedding$"),
    Feature("attention biases computed from queries", r"RelativeLogits$"),
    Feature("attention to outputs of earlier layers", r"AttentionResidual$"),
    Feature("patches of data-dependent length", r"Patcher$"),
    Feature("a norm on only the rotary part of keys",
            modules=frozenset({"k_rope_only_layernorm"})),
    Feature("AltUp (parallel hidden states)", r"AltUp$"),
    Feature("short convolutions", r"^Conv1d$"),  # last: features above contain some too
)


def check_features(model: Any, part: Part) -> None:
    """Reject a model with unsupported features.

    Raises:
        LlmcError: names every such feature and where it was found.
    """
    config = text_config(model.config)
    prefix = text_prefix(model).removesuffix(".")
    supported = feature_convolutions(model) if part in (ENCODER, DECODER) \
        and reads_features(model) else []
    detected = dict(_found(model.get_submodule(prefix), config.to_dict(), supported))
    bidirectional = _bidirectional(model)
    if part is CAUSAL_LM and bidirectional and not getattr(config, "is_decoder", False):
        detected[_BIDIRECTIONAL] = bidirectional
    if detected:
        features = " and ".join(f"{words} ({where})" for words, where in detected.items())
        if [*detected] == [_BIDIRECTIONAL]:
            raise LlmcError(f"'{config.model_type}' has {features}, so it generates no text; "
                            f"compile it with --task embed --pooling mean, cls or last, or use "
                            f"another model")
        raise LlmcError(f"'{config.model_type}' has {features}, which llmc does not support; use "
                        f"another model")


def _found(model: torch.nn.Module, config: dict[str, Any],
           supported: Sequence[torch.nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield name and place of each feature, without `supported` and modules for images."""
    seen: dict[Feature, str] = {}
    claimed: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in claimed):
            continue
        if name and _is_modality_encoder(module, model):
            claimed.append(f"{name}.")
            continue
        if keeps_state(module) or any(module is other for other in supported):
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


def _is_modality_encoder(module: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Whether a module is the model's encoder of images or audio."""
    others = [getattr(getattr(model, "config", None), key, None)
              for key in ("vision_config", "audio_config")]
    config = getattr(module, "config", None)
    return config is not None and any(type(config) is type(other) for other in others)


def _is_stacked(module: torch.nn.Module) -> bool:
    """Whether a module has two stacks of matrices, as stacked experts have."""
    return len([parameter for parameter in module._parameters.values()
                if parameter is not None and parameter.dim() == 3]) == 2


def _bidirectional(model: torch.nn.Module) -> str | None:
    """Return the first attention with is_causal False, if none has True."""
    attentions = [(name, module) for name, module in model.named_modules()
                  if "Attention" in type(module).__name__
                  and not _is_modality_encoder(module, model)
                  and isinstance(getattr(module, "is_causal", None), bool)]
    if not attentions or any(module.is_causal for _, module in attentions):
        return None
    name, module = attentions[0]
    return f"{type(module).__name__} '{name}'"
