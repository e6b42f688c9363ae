"""Default sampling parameters from a model's generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmc.artifacts.manifest import SamplingDefaults
from llmc.errors import LlmcError, shown
from llmc.runtime.sampling.params import SamplingParams

_SUPPRESSED = "suppress_tokens"
_APPLIED = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
            _SUPPRESSED)
# Keys that change the output of transformers but not llmc's, with their neutral values.
_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,), "num_beams": (1,), "num_beam_groups": (1,),
    "diversity_penalty": (0.0,), "length_penalty": (1.0,), "early_stopping": (False,),
    "penalty_alpha": (), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "guidance_scale": (1,),
    "top_h": (), "sequence_bias": (), "begin_suppress_tokens": ([],), "min_new_tokens": (0,),
    "exponential_decay_length_penalty": (), "watermarking_config": ()}
# Applied to encoder-decoder models only.
_OF_ENCODERS = ("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id")


def read_sampling(generation: Mapping[str, Any], vocab_size: int, has_encoder: bool) -> \
        tuple[SamplingDefaults | None, list[str]]:
    """Read the sampling defaults.

    Args:
        generation: generation_config.json as plain data.
        vocab_size: suppressed tokens from here on are dropped, as they cannot be sampled.
        has_encoder: whether the model is an encoder-decoder model.

    Returns:
        The defaults, or None; and notes about values that are applied or ignored.
    """
    defaults: dict[str, Any] = {}
    notes = []
    for name in _APPLIED:
        value = generation.get(name)
        problem = None if value is None else _problem(name, value)
        if problem is not None:
            notes.append(f"sampling defaults: {problem}; ignored")
        elif value is not None:
            defaults[name] = value if name != _SUPPRESSED else \
                tuple(token for token in value if token < vocab_size)
    if generation.get("do_sample") is False:  # greedy, as in transformers
        defaults["temperature"] = 0.0
    elif generation.get("do_sample") is True:
        defaults.setdefault("temperature", 1.0)
    for name in (*_NOT_APPLIED, *(() if has_encoder else _OF_ENCODERS)):
        value = generation.get(name)
        if value is not None and value not in _NOT_APPLIED.get(name, ()):
            notes.append(f"sampling defaults: {name} {shown(value)} is not applied")
    if not defaults:
        return None, notes
    shown_values = ", ".join(f"{name} {shown(value)}" for name, value in defaults.items())
    return SamplingDefaults(**defaults), [f"sampling defaults: {shown_values}", *notes]


def _problem(name: str, value: Any) -> str | None:
    """Return why a value is invalid as a default; None if it is valid."""
    if name == _SUPPRESSED:
        if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
            name, value = "logit_bias", dict.fromkeys(value, -math.inf)
        else:
            return f"{name} {shown(value)} is not a list of token ids"
    try:
        SamplingParams(**{name: value})
    except LlmcError as error:
        return str(error)
    return None
