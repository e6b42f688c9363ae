"""What is exported of a model, and the model built from its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
)

from llmc.errors import LlmcError

ATTENTION = "llmc"  # our entry in transformers' attention interface
EXPERTS = "llmc"  # and in its experts interface
ROOT = "model."  # the wrapper's name for the model, in front of every parameter's own name


@dataclass(frozen=True)
class Part:
    """What is exported: a causal LM, or the encoder or the decoder of an encoder-decoder model.

    Args:
        layers: what configs call the number of its layers.
        attentions: of each layer.
    """

    name: str
    layers: tuple[str, ...]
    attentions: int = 1

    @property
    def causal(self) -> bool:
        """Whether its self-attention is."""
        return self.name != "encoder"

    def layers_key(self, config: Any) -> str | None:
        """What this config calls the number of its layers."""
        return next((key for key in self.layers if isinstance(getattr(config, key, None), int)),
                    None)


CAUSAL_LM = Part("causal LM", ("num_hidden_layers",))
ENCODER = Part("encoder", ("encoder_layers", "num_encoder_layers", "num_hidden_layers"))
DECODER = Part("decoder", ("decoder_layers", "num_decoder_layers"), 2)


def text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def text_prefix(model: Any) -> str:
    """What names of a model's modules begin with where it has a language model beside others, such
    as one that reads images.
    """
    text = text_config(model.config)
    if type(text) is type(model.config):
        return ""
    return next((f"{name}." for name, module in model.named_modules()
                 if name and type(getattr(module, "config", None)) is type(text)), "")


def causal_lm_class(config: Any) -> Any:
    """transformers' automatic class for a model that makes text, perhaps of images too."""
    takes_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if takes_images and not _is_causal_lms(config) \
        else AutoModelForCausalLM


def _is_causal_lms(config: Any) -> bool:
    """Whether a causal LM's class takes the checkpoint that a config describes, or says what it
    leaves of one that is for more.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    known = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return known.config_class is type(config) or bool(known._keys_to_ignore_on_load_unexpected)


def build(config: Any, part: Part, trust_remote_code: bool) -> torch.nn.Module:
    kind, auto = ("causal LM", causal_lm_class(config)) if part is CAUSAL_LM else \
        ("encoder-decoder LM", AutoModelForSeq2SeqLM)
    try:
        try:
            model = auto.from_config(config, trust_remote_code=trust_remote_code)
        except KeyError as error:
            if error.args != (ATTENTION,):
                raise
            # The model looks its attention up in a table of its own. What transformers takes there
            # comes first: Falcon's eager attention adds ALiBi twice.
            try:
                config._attn_implementation = "sdpa"
                model = auto.from_config(config, trust_remote_code=trust_remote_code)
            except ValueError:
                config._attn_implementation = "eager"
                model = auto.from_config(config, trust_remote_code=trust_remote_code)
        return model.eval()
    except (ValueError, LookupError, ArithmeticError, ImportError, TypeError, AssertionError,
            AttributeError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise LlmcError(f"transformers cannot build '{getattr(config, 'model_type', '?')}' as "
                        f"{'an' if kind[0] == 'e' else 'a'} {kind}: {first}") from error
