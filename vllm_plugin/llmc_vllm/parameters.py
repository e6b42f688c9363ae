"""vLLM's sampling parameters, read as llmc's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.sampler import Sampler

# What vLLM's own worker does, and llmc's does not.
_REFUSED = ("prompt_logprobs", "prompt_logprob_token_ids", "logprob_token_ids",
            "thinking_token_budget", "trace_decode_token_ids", "watermarking", "extra_args")
# What lets only some tokens be chosen, and what forbids some: together they might leave none.
_MASKS = ("structured_outputs", "allowed_token_ids")
_BANS = ("bad_words", "min_tokens")
_ANY_SEED = 2**64


def check(params: Any) -> None:
    """Refuse what a request cannot ask for.

    Args:
        params: vLLM's SamplingParams, or PoolingParams.

    Raises:
        LlmcError: naming the parameter.
    """
    if not hasattr(params, "temperature"):
        raise LlmcError("a model that llmc compiled makes text; pooling is not for it")
    refused, masks, bans = ([name for name in names if _given(params, name)]
                            for names in (_REFUSED, _MASKS, _BANS))
    if refused:
        raise LlmcError(f"{refused[0]} is not for a model that llmc compiled; leave it out")
    if masks and len(masks + bans) > 1:
        raise LlmcError(f"{(masks + bans)[1]} does not go with {masks[0]}, as together they might "
                        f"allow no token; leave one of them out")
    _read(params, 0)


def _given(params: Any, name: str) -> bool:
    value = getattr(params, name, None)
    if name in _BANS or isinstance(value, dict | list):
        return bool(value)
    return value is not None and value is not False  # 0 is a wish too


def sampler(params: Any, prompt: Sequence[int], request_id: str, model_seed: int) -> Sampler:
    """What chooses the tokens of one request, on every rank the same.

    Args:
        params: vLLM's SamplingParams.
        prompt: token ids.
        model_seed: with the request's id the seed of what has none.
    """
    seed = params.seed
    if seed is None:
        named = hashlib.sha256(f"{model_seed} {request_id}".encode()).digest()
        seed = int.from_bytes(named[:8], "little")
    return Sampler(_read(params, seed), 0, prompt, sorted(params.all_stop_token_ids),
                   [tuple(words) for words in params.bad_words_token_ids or ()])


def _read(params: Any, seed: int) -> SamplingParams:
    """As llmc calls them; what ends a completion, and log-probabilities, are not the sampler's.

    Raises:
        LlmcError: a number is out of range.
    """
    return SamplingParams(
        max_tokens=max(params.max_tokens or 1, params.min_tokens), min_tokens=params.min_tokens,
        temperature=params.temperature, top_k=max(params.top_k, 0), top_p=params.top_p,
        min_p=params.min_p, repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty, frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias or {}, seed=seed % _ANY_SEED)


def allowed_mask(params: Any, vocab_size: int) -> np.ndarray | None:
    """The tokens that `allowed_token_ids` lets be chosen, as `Step.masks` has them; None: all."""
    if not params.allowed_token_ids:
        return None
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[params.allowed_token_ids] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)
