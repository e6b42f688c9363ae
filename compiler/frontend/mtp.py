"""Multi-token prediction (MTP): layers after a model's last one; each drafts a token.

    hidden       the model's last hidden state, after its final norm, or hidden_out of layer n - 1
    x            eh_proj([enorm(embedding of token p + 1 + n) | hnorm(hidden)]), at position p
    hidden_out   post_norm(decoder layer(x))
    logits       the model's LM head on hidden_out

transformers' `MtpModel` has the layers. For further drafts than layers, the last one runs on its
own results, as rotary embeddings depend on distances of positions only.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import onnx_graphsurgeon as gs
import torch
from accelerate import init_empty_weights
from transformers.modeling_layers import MtpModel

from llmc.compiler.frontend.bind import Checkpoint, aliases_of, attach_weights
from llmc.compiler.frontend.draft import add_hidden
from llmc.compiler.frontend.expert_export import use_experts
from llmc.compiler.frontend.features import check_features
from llmc.compiler.frontend.parts import ATTENTION, CAUSAL_LM, build, text_config
from llmc.compiler.frontend.reproducible import Reproducible
from llmc.compiler.frontend.trace import to_graph, trace_draft
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError, reason_of


class _Layer(torch.nn.Module):
    """An MTP layer with the model's embedding and LM head."""

    def __init__(self, layers: Any, index: int) -> None:
        super().__init__()
        self.layers, self._index = layers, index

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor,
                position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_out = self.layers.forward_layer(self._index, hidden, position_ids, None,
                                               input_ids=input_ids)
        return self.layers._project_to_logits(hidden_out), hidden_out


class _Tensors:
    """Tensors of the MTP layers, and the model's embedding and LM head."""

    def __init__(self, layers: Checkpoint, shared: Mapping[str, Weight]) -> None:
        self._layers, self._shared = layers, shared

    def get(self, name: str) -> Weight | None:
        name = name.removeprefix("layers.")
        return self._shared.get(name) or self._layers.get(name)


def num_mtp_layers(config: Any) -> int:
    """Number of MTP layers that a config declares."""
    return int(getattr(text_config(config), "num_mtp_layers", None) or 0)


def export_mtp(config: Any, checkpoint: Checkpoint, origin: str, graph: gs.Graph,
               names: dict[int, str], trust_remote_code: bool) -> tuple[gs.Graph, ...]:
    """Export each MTP layer, and add the output `hidden` to the model's graph.

    Args:
        config: the model's config.
        checkpoint: its tensors.
        origin: name of the checkpoint in errors.
        graph: the model's graph.
        names: names of weights by identity, see `attach_weights`.
        trust_remote_code: run code that comes with the model.

    Raises:
        LlmcError: the checkpoint has no MTP layers, or one cannot be exported.
    """
    own = mtp_tensors(config, checkpoint)
    if not own:
        raise LlmcError(f"'{origin}' has no MTP layers, which --draft mtp needs; give another "
                        f"draft model, or leave it out")
    config = _described(config, own)
    config._attn_implementation = ATTENTION
    try:
        with init_empty_weights(include_buffers=False), Reproducible():
            main: Any = build(config, CAUSAL_LM, trust_remote_code)
            layers: Any = MtpModel(main, num_mtp_layers(config)).eval()
    except (ValueError, AttributeError, TypeError, StopIteration) as error:
        raise LlmcError(f"transformers cannot build the MTP layers of '{origin}' "
                        f"({reason_of(error)}); leave out --draft mtp") from error
    main.tie_weights()  # init_empty_weights has untied them
    layers.config._attn_implementation = ATTENTION
    use_experts(layers)
    known = Checkpoint(layers, own, layers.get_weight_conversions(main))
    shared = _shared(main, layers, checkpoint)
    check_features(layers, CAUSAL_LM)
    bound = {f"layers.{name}" for name in known.spelled & layers.state_dict().keys()}
    positions = getattr(text_config(config), "max_position_embeddings", None)
    drafts = []
    for index in range(num_mtp_layers(config)):
        module = _Layer(layers, index)
        drafts.append(to_graph(trace_draft(module, layers.config.hidden_size, positions), bound))
        attach_weights(drafts[-1], module, _Tensors(known, shared), origin, names)
    add_hidden(graph, origin)
    return tuple(drafts)


def _described(config: Any, own: Mapping[str, Weight]) -> Any:
    """A copy of a config that describes the MTP layers.

    The configs of Qwen3-Next and Qwen3.5 do not. Their layers have full attention.

    Args:
        own: tensors of the MTP layers.
    """
    config = copy.deepcopy(config)
    text = text_config(config)
    if not any(re.search(r"(^|\.)mtp\.fc\.", name) for name in own):
        return config
    if not num_mtp_layers(config):
        text.num_mtp_layers = len({found[1] for name in own if (
            found := re.search(r"(?:^|\.)mtp\.layers\.(\d+)\.", name))})
    if getattr(text, "mtp_layer_types", None) is None:
        text.mtp_layer_types = ["full_attention"] * num_mtp_layers(config)
    return config


def mtp_tensors(config: Any, checkpoint: Checkpoint) -> dict[str, Weight]:
    """The checkpoint's tensors of MTP layers."""
    first = text_config(config).num_hidden_layers

    def is_mtp(name: str) -> bool:
        layer = re.search(r"(^|\.)layers\.(\d+)\.", name)
        return bool(re.match(r"(model\.)?mtp\.", name)) or (
            layer is not None and first <= int(layer[2]) < first + num_mtp_layers(config))

    return {name: tensor for name, tensor in checkpoint.tensors.items() if is_mtp(name)}


def _shared(main: Any, layers: Any, checkpoint: Checkpoint) -> dict[str, Weight]:
    """The model's embedding and LM head, by their names in the MTP model."""
    aliases = aliases_of(main)
    names = {id(parameter): name
             for name, parameter in main.named_parameters(remove_duplicate=False)}
    shared = {}
    for name, module in (("embed_tokens.weight", layers.embed_tokens),
                         ("shared_head.weight", layers.shared_head)):
        known = aliases[names[id(module.weight)]]
        weight = next((weight for alias in known
                       if (weight := checkpoint.get(alias)) is not None), None)
        if weight is not None:
            shared[name] = weight
    return shared
