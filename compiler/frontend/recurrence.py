"""Export of layers with recurrent state as nodes.

transformers' models call functions for them that process a whole prompt. These functions are
replaced, so that their loops are not exported.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

from llmc.errors import LlmcError


def _convolution(hidden_states: torch.Tensor, weight: torch.Tensor,
                 bias: torch.Tensor | None = None, activation: str | None = None,
                 **others: object) -> torch.Tensor:
    """Replace causal_conv1d_fn; hidden states and result are [batch, channels, seq]."""
    known = {None: "none", "silu": "silu", "swish": "silu"}
    if activation not in known:
        raise LlmcError(f"a causal convolution has the activation {activation!r}, which "
                        f"llmc::CausalConv1d does not support; use another model")
    if weight.shape[-1] < 2:
        raise LlmcError(f"a causal convolution has kernel size {weight.shape[-1]}, expected 2 or "
                        f"more; use another model")
    _refuse("a causal convolution", others)
    rows = hidden_states.transpose(1, 2)
    out = torch.onnx.ops.symbolic(
        "llmc::Convolution", (rows, weight, bias),
        {"kernel_size": int(weight.shape[-1]), "activation": known[activation]},
        dtype=rows.dtype, shape=tuple(rows.shape), version=1)
    return out.transpose(1, 2)


def _gated_delta_rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      g: torch.Tensor, beta: torch.Tensor, chunk_size: int = 64,
                      initial_state: torch.Tensor | None = None, output_final_state: bool = False,
                      use_qk_l2norm_in_kernel: bool = False, **others: object) -> \
        tuple[torch.Tensor, None]:
    """Replace torch_chunk_gated_delta_rule; q, k, v are [batch, seq, heads, head_dim]."""
    _refuse("the gated delta rule", {**others, "initial_state": initial_state})
    return _recurrence(query, key, value, g, beta, None, update_rule="gated_delta",
                       scale=float(query.shape[-1]**-0.5),
                       l2norm=int(use_qk_l2norm_in_kernel)), None


def _kimi_delta_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                          g: torch.Tensor, beta: torch.Tensor, **others: Any) -> \
        tuple[torch.Tensor, None]:
    """Replace chunk_kimi_delta_attention; g is [batch, seq, heads, k_head_dim]."""
    return _gated_delta_rule(query, key, value, g.flatten(2), beta, **others)


def _chunk_scan(hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor,
                B: torch.Tensor, C: torch.Tensor, chunk_size: int,
                D: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
                initial_states: torch.Tensor | None = None, dt_softplus: bool = False,
                dt_limit: tuple[float, float] = (0.0, float("inf")),
                return_final_states: bool = False, **others: object) -> Any:
    """Replace mamba2_chunk_scan.

    Hidden states are [batch, seq, heads, head_dim], B and C [batch, seq, groups, state].
    """
    _refuse("a state-space layer", {**others, "initial_states": initial_states})
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    low, high = dt_limit
    if (low > 0 or not dt_softplus) or high != float("inf"):
        dt = torch.clamp(dt, low, None if high == float("inf") else high)
    out = _recurrence(C, B, hidden_states, dt * A, dt, D, update_rule="gated")
    return (out, None) if return_final_states else out


def _recurrence(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor,
                beta: torch.Tensor, skip: torch.Tensor | None, **fields: Any) -> torch.Tensor:
    batch, seq, heads, dim = value.shape
    qkv = torch.cat([part.reshape(batch, seq, part.shape[2] * part.shape[3])
                     for part in (query, key, value)], dim=-1)
    out = torch.onnx.ops.symbolic(
        "llmc::Recurrence", (qkv, decay, beta, skip),
        {"num_k_heads": int(key.shape[2]), "num_v_heads": int(heads),
         "k_head_dim": int(key.shape[3]), "v_head_dim": int(dim),
         "decay_per_channel": int(decay.shape[-1] > heads), **fields},
        dtype=qkv.dtype, shape=(batch, seq, heads * dim), version=1)
    return out.reshape(batch, seq, heads, dim)


def _refuse(what: str, others: dict[str, object]) -> None:
    for name, value in others.items():
        if isinstance(value, torch.Tensor):
            raise LlmcError(f"{what} has the argument {name!r}, which llmc does not support; use "
                            f"another model")


_FUNCTIONS = {"causal_conv1d_fn": _convolution, "torch_chunk_gated_delta_rule": _gated_delta_rule,
              "chunk_kimi_delta_attention": _kimi_delta_attention,
              "mamba2_chunk_scan": _chunk_scan}
_LOOPS = re.compile(r"_scan$|chunk_\w+(rule|attention)$")  # functions that loop over a sequence


def called_in(module: torch.nn.Module) -> set[str]:
    """Return the names that a module's forward calls or reads."""
    forward = inspect.unwrap(type(module).forward)
    return {*getattr(getattr(forward, "__code__", None), "co_names", ())}


def keeps_state(module: torch.nn.Module) -> bool:
    """Whether a module's recurrent state is only in functions that are exported as nodes."""
    called = called_in(module)
    return bool(called & _FUNCTIONS.keys()) \
        and all(name in _FUNCTIONS for name in called if _LOOPS.search(name))


@contextlib.contextmanager
def states_as_nodes(model: torch.nn.Module) -> Iterator[None]:
    """Replace these functions in the Python modules that define the model's layers."""
    files = {type(module).__module__ for module in model.modules() if keeps_state(module)}
    saved = [(sys.modules[file], name, getattr(sys.modules[file], name)) for file in sorted(files)
             for name in _FUNCTIONS if hasattr(sys.modules[file], name)]
    try:
        for file, name, _ in saved:
            setattr(file, name, _FUNCTIONS[name])
        yield
    finally:
        for file, name, original in saved:
            setattr(file, name, original)
