"""Export of experts through transformers' experts interface.

The two GEMMs become nodes. The router and the activation between the GEMMs are exported as the
model computes them, and recognized by passes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llmc.compiler.frontend.parts import EXPERTS
from llmc.errors import LlmcError


def use_experts(model: torch.nn.Module) -> None:
    """Select llmc's experts function in all MoE modules of a model.

    Raises:
        LlmcError: a module computes something that llmc::Experts cannot express.
    """
    for module in model.modules():
        if is_experts(module):
            module.config._experts_implementation = EXPERTS
            if getattr(module, "has_post_expert_norm", False):
                raise LlmcError(f"{type(module).__name__} normalizes each expert's output, which "
                                f"llmc::Experts does not support; use another model")


def is_experts(module: Any) -> bool:
    """Whether a module uses transformers' experts interface."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "_apply_gate"))


def _experts(module: Any, x: torch.Tensor, *routing: torch.Tensor, **named: torch.Tensor) -> \
        torch.Tensor:
    """Experts function for transformers: GEMMs as symbolic nodes, the activation unchanged."""
    tensors = [*routing, *named.values()]
    experts = next(tensor for tensor in tensors if not tensor.is_floating_point())
    scores = next(tensor for tensor in tensors if tensor.is_floating_point())
    name = "gate_up_proj" if module.has_gate else "up_proj"
    transposed = {"transposed": int(module.is_transposed)}
    weight, down = getattr(module, name), module.down_proj
    width = weight.shape[2 if module.is_transposed else 1]
    up_bias, down_bias = ((getattr(module, f"{weight_name}_bias"),) if module.has_bias else ()
                          for weight_name in (name, "down_proj"))
    both = torch.onnx.ops.symbolic(
        "llmc::ExpertsUp", (x, experts, weight, *up_bias), transposed, dtype=x.dtype,
        shape=(*experts.shape, width), version=1)
    inner = module._apply_gate(both) if module.has_gate else module.act_fn(both)
    return torch.onnx.ops.symbolic(
        "llmc::ExpertsDown", (inner, experts, scores, down, *down_bias), transposed, dtype=x.dtype,
        shape=tuple(x.shape), version=1)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
