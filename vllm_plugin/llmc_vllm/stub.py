"""Model class for vLLM's registry, which only inspects it."""

from __future__ import annotations

from typing import Any

import torch


class LlmcForCausalLM(torch.nn.Module):
    """A decoder; vLLM's registry reads the names of its methods and their arguments."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        raise NotImplementedError

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor,
                intermediate_tensors: Any = None, inputs_embeds: Any = None) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError
