"""Experts go through transformers' own interface, as attention does: what chooses them, and what
lies between their two products, is exported as the model computes it, for the passes to recognise.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llmc.compiler.frontend.parts import EXPERTS
from llmc.errors import LlmcError


def use_experts(model: torch.nn.Module) -> None:
    """Have the experts of a model exported as nodes.

    Raises:
        LlmcError: some do more than llmc::Experts.
    """
    for module in model.modules():
        if is_experts(module):
            module.config._experts_implementation = EXPERTS
            if getattr(module, "has_post_expert_norm", False):
                raise LlmcError(f"{type(module).__name__} norms what each expert makes, which "
                                f"llmc::Experts does not have")


def is_experts(module: Any) -> bool:
    """Whether a module's forward is chosen by transformers' experts interface."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "_apply_gate"))


def _experts(module: Any, x: torch.Tensor, *routing: torch.Tensor, **named: torch.Tensor) -> \
        torch.Tensor:
    """transformers' experts function: the products as symbolic nodes, their activation as it is."""
    given = [*routing, *named.values()]
    experts = next(tensor for tensor in given if not tensor.is_floating_point())
    scores = next(tensor for tensor in given if tensor.is_floating_point())
    name = "gate_up_proj" if module.has_gate else "up_proj"
    transposed = {"transposed": int(module.is_transposed)}
    weight, down = getattr(module, name), module.down_proj
    width = weight.shape[2 if module.is_transposed else 1]
    up_bias, down_bias = ((getattr(module, f"{own}_bias"),) if module.has_bias else ()
                          for own in (name, "down_proj"))
    both = torch.onnx.ops.symbolic(
        "llmc::ExpertsUp", (x, experts, weight, *up_bias), transposed, dtype=x.dtype,
        shape=(*experts.shape, width), version=1)
    inner = module._apply_gate(both) if module.has_gate else module.act_fn(both)
    return torch.onnx.ops.symbolic(
        "llmc::ExpertsDown", (inner, experts, scores, down, *down_bias), transposed, dtype=x.dtype,
        shape=tuple(x.shape), version=1)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
