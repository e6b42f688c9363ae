"""The sampling parameters that a model recommends, from its generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmc.artifacts.manifest import SamplingDefaults
from llmc.errors import LlmcError, shown
from llmc.runtime.sampling.params import SamplingParams

_SUPPRESSED = "suppress_tokens"
_TAKEN = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", _SUPPRESSED)
# Keys that change what transformers generates, with the values that change nothing.
_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,), "num_beams": (1,), "num_beam_groups": (1,),
    "diversity_penalty": (0.0,), "length_penalty": (1.0,), "early_stopping": (False,),
    "penalty_alpha": (), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "guidance_scale": (1,),
    "top_h": (), "sequence_bias": (), "begin_suppress_tokens": ([],), "min_new_tokens": (0,),
    "exponential_decay_length_penalty": (), "watermarking_config": ()}
_OF_ENCODERS = ("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id")  # applied there


def read_sampling(generation: Mapping[str, Any], vocab_size: int, has_encoder: bool) -> \
        tuple[SamplingDefaults | None, list[str]]:
    """Sampling defaults, and sentences about what is left out.

    Args:
        generation: generation_config.json as plain data.
        vocab_size: tokens beyond it are not suppressed, as nothing generates them.
    """
    taken: dict[str, Any] = {}
    notes = []
    for name in _TAKEN:
        value = generation.get(name)
        problem = None if value is None else _problem(name, value)
        if problem is not None:
            notes.append(f"sampling defaults: {problem}; it is left out")
        elif value is not None:
            taken[name] = value if name != _SUPPRESSED else \
                tuple(token for token in value if token < vocab_size)
    if generation.get("do_sample") is False:  # transformers is greedy then
        taken["temperature"] = 0.0
    elif generation.get("do_sample") is True:
        taken.setdefault("temperature", 1.0)
    for name in (*_NOT_APPLIED, *(() if has_encoder else _OF_ENCODERS)):
        value = generation.get(name)
        if value is not None and value not in _NOT_APPLIED.get(name, ()):
            notes.append(f"sampling defaults: {name} {shown(value)} is not applied")
    if not taken:
        return None, notes
    shown_values = ", ".join(f"{name} {shown(value)}" for name, value in taken.items())
    return SamplingDefaults(**taken), [f"sampling defaults: {shown_values}", *notes]


def _problem(name: str, value: Any) -> str | None:
    """Why a value is no default."""
    if name == _SUPPRESSED:
        if isinstance(value, list) and all(type(own) is int and own >= 0 for own in value):
            name, value = "logit_bias", dict.fromkeys(value, -math.inf)
        else:
            return f"{name} {shown(value)} is no list of token ids"
    try:
        SamplingParams(**{name: value})
    except LlmcError as error:
        return str(error)
    return None
