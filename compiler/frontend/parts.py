"""The parts of a model that are exported, and building a model from its config."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
)

from llmc.errors import LlmcError

ATTENTION = "llmc"  # llmc's entry in transformers' attention interface
EXPERTS = "llmc"  # llmc's entry in transformers' experts interface
ROOT = "model."  # prefix of parameter names in the exported wrapper


@dataclass(frozen=True)
class Part:
    """An exported part: a model, or the encoder or decoder of an encoder-decoder model.

    Args:
        name: its name in errors.
        layers: config keys of its number of layers.
        attentions: attention modules per layer.
        causal: whether its self-attention is causal; None: as each layer's mask says.
        auto: transformers' auto class of a model whose outputs are pooled; else None.
    """

    name: str
    layers: tuple[str, ...]
    attentions: int = 1
    causal: bool | None = True
    auto: Any = None

    def layers_key(self, config: Any) -> str | None:
        """Return this config's key of its number of layers, or None."""
        return next((key for key in self.layers if isinstance(getattr(config, key, None), int)),
                    None)


CAUSAL_LM = Part("causal LM", ("num_hidden_layers",))
ENCODER = Part("encoder", ("encoder_layers", "num_encoder_layers", "num_hidden_layers"),
               causal=False)
DECODER = Part("decoder", ("decoder_layers", "num_decoder_layers"), 2)
AUDIO = Part("model of audio and text", (), causal=False)
# Parts by task.
POOLED_PARTS = {task: Part(name, ("num_hidden_layers",), causal=None, auto=auto)
                for task, name, auto in (
                    ("embed", "text model", AutoModel),
                    ("classify", "sequence classifier", AutoModelForSequenceClassification),
                    ("token_classify", "token classifier", AutoModelForTokenClassification))}


def text_config(config: Any) -> Any:
    """Return the text config of a multimodal config, else the config."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def text_prefix(model: Any) -> str:
    """Return the prefix of the language model's modules in a multimodal model, else ''."""
    text = text_config(model.config)
    if type(text) is type(model.config):
        return ""
    return next((f"{name}." for name, module in model.named_modules()
                 if name and type(getattr(module, "config", None)) is type(text)), "")


def attends_to_images(model: Any) -> bool:
    """Whether layers of a decoder attend to rows of images (cross-attention)."""
    return "cross_attention_states" in inspect.signature(model.forward).parameters


def language_model(model: Any) -> Any:
    """Return the language model of a multimodal model, without its LM head."""
    return model.get_submodule(text_prefix(model).removesuffix("."))


def causal_lm_class(config: Any) -> Any:
    """Return transformers' auto class for a causal LM or a model of images or audio and text."""
    return AutoModelForCausalLM if _is_causal_lms(config) else \
        multimodal_class(config) or AutoModelForCausalLM


def multimodal_class(config: Any) -> Any:
    """Return transformers' auto class for a decoder of images or audio and text, or None."""
    if config.is_encoder_decoder:
        return None
    return next((auto for mapping, auto in (
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
        (MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoModelForMultimodalLM),
        (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoModelForSeq2SeqLM))
        if type(config) in mapping), None)


def encoder_decoder_class(config: Any) -> Any:
    """Return transformers' auto class for an encoder-decoder model of text or of speech."""
    return AutoModelForSpeechSeq2Seq if reads_speech(config) else AutoModelForSeq2SeqLM


def reads_speech(config: Any) -> bool:
    """Whether it is an encoder-decoder model whose encoder reads speech."""
    return type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING


def _is_causal_lms(config: Any) -> bool:
    """Whether a causal LM's class supports the config's checkpoint.

    It has this config class, or ignores the other tensors of a multimodal checkpoint.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    known = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return known.config_class is type(config) or bool(known._keys_to_ignore_on_load_unexpected)


def build(config: Any, part: Part, trust_remote_code: bool) -> torch.nn.Module:
    """Build a model from its config.

    Raises:
        LlmcError: transformers cannot build it.
    """
    kind, auto = ("causal LM", causal_lm_class(config)) if part is CAUSAL_LM else \
        (part.name, multimodal_class(config)) if part is AUDIO else \
        ("encoder-decoder LM", encoder_decoder_class(config)) if part.auto is None else \
        (part.name, part.auto)
    try:
        try:
            model = auto.from_config(config, trust_remote_code=trust_remote_code)
        except KeyError as error:
            if error.args != (ATTENTION,):
                raise
            # The model selects attention from its own table of classes. sdpa comes first, as
            # Falcon's eager attention adds ALiBi twice.
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
        if first.startswith("Unrecognized configuration class"):
            first = "it has no such class for this model type"
        remedy = "correct its config"
        if isinstance(error, ImportError):  # of a package that transformers does not require
            first, remedy = first.partition(". ")[0], "install it"
        raise LlmcError(f"transformers cannot build '{getattr(config, 'model_type', '?')}' as "
                        f"{'an' if kind[0] in 'ei' else 'a'} {kind}: {first}; {remedy}, or use "
                        f"another model") from error
