"""Whether a multimodal model computes logits as its language model's class does.

Aya Vision's language model is Cohere 2, which scales its logits, and Aya Vision does not. Both are
run without layers on the same hidden states, and what differs is taken out of the config.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from llmc.compiler.frontend.parts import CAUSAL_LM, build
from llmc.errors import LlmcError

# Fields that change logits, and values without effect.
_NEUTRAL = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}
_WIDTH = 8


def match_head(whole: Any, text: Any) -> None:
    """Set the fields of a text config that change logits as the whole model uses them.

    Args:
        whole: the multimodal model.
        text: config of its language model.

    Raises:
        LlmcError: the whole model computes logits in another way.
    """
    expected = _logits(whole)
    if expected is None:
        return
    found = [name for name in _NEUTRAL if hasattr(text, name)]
    kept = {name: getattr(text, name) for name in found}
    for names in ((), *((name,) for name in found)):
        for name in found:
            setattr(text, name, _NEUTRAL[name] if name in names else kept[name])
        with torch.device("meta"):
            model = build(copy.deepcopy(text), CAUSAL_LM, False)
        own = _logits(model)
        if own is None or torch.allclose(own, expected):
            return
    raise LlmcError(f"'{whole.config.model_type}' computes logits otherwise than its language "
                    f"model '{text.model_type}', which llmc does not support; use another model")


def _logits(model: Any) -> torch.Tensor | None:
    """Run a model's LM head on given hidden states; None if its code is of another kind."""
    if not isinstance(getattr(model, "model", None), torch.nn.Module) \
            or not isinstance(getattr(model, "lm_head", None), torch.nn.Module):
        return None
    parts = {"model": _Layers(), "lm_head": torch.nn.Identity()}
    kept = {name: model._modules[name] for name in parts}
    model._modules.update(parts)
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.zeros((1, 1), dtype=torch.int64)).logits
        return logits if isinstance(logits, torch.Tensor) else None
    except Exception:  # of the model's code, which reads other results
        return None
    finally:
        model._modules.update(kept)


class _Layers(torch.nn.Module):
    """Layers that return the same hidden states for any input."""

    def forward(self, *args: Any, **kwargs: Any) -> _Results:
        return _Results()


class _Results:
    """Results of layers. Only the hidden states are known."""

    last_hidden_state = torch.linspace(-3, 3, _WIDTH)[None, None]

    def __getitem__(self, index: int) -> torch.Tensor:
        if index:
            raise IndexError(index)
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None
