"""Conversion of vLLM's sampling parameters to llmc's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.sampler import Sampler

# Parameters that vLLM's worker supports and llmc's does not.
_UNSUPPORTED = ("prompt_logprobs", "prompt_logprob_token_ids", "logprob_token_ids",
            "thinking_token_budget", "trace_decode_token_ids", "watermarking", "extra_args")
# Parameters that allow only some tokens, and those that forbid some; together they may allow none.
_MASKS = ("structured_outputs", "allowed_token_ids")
_BANS = ("bad_words", "min_tokens")
_ANY_SEED = 2**64


def check(params: Any) -> None:
    """Reject the unsupported parameters of a request.

    Args:
        params: vLLM's SamplingParams or PoolingParams.

    Raises:
        LlmcError: a parameter is not supported or out of range.
    """
    if not hasattr(params, "temperature"):
        raise LlmcError("pooling is not supported for a model compiled by llmc; generate text")
    unsupported, masks, bans = ([name for name in names if _given(params, name)]
                            for names in (_UNSUPPORTED, _MASKS, _BANS))
    if unsupported:
        raise LlmcError(f"{unsupported[0]} is not supported for a model compiled by llmc; leave it "
                        f"out")
    if masks and len(masks + bans) > 1:
        raise LlmcError(f"{(masks + bans)[1]} cannot be combined with {masks[0]}, as no token "
                        f"might remain; leave one of them out")
    _convert(params, 0)


def _given(params: Any, name: str) -> bool:
    value = getattr(params, name, None)
    if name in _BANS or isinstance(value, dict | list):
        return bool(value)
    return value is not None and value is not False  # 0 counts as given


def sampler(params: Any, prompt: Sequence[int], request_id: str, model_seed: int) -> Sampler:
    """Return the sampler of a request, which is the same on every rank.

    Args:
        params: vLLM's SamplingParams.
        prompt: token ids.
        request_id: of vLLM.
        model_seed: seed, with the request's id, of requests without a seed.
    """
    seed = params.seed
    if seed is None:
        digest = hashlib.sha256(f"{model_seed} {request_id}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
    return Sampler(_convert(params, seed), 0, prompt, sorted(params.all_stop_token_ids),
                   [tuple(words) for words in params.bad_words_token_ids or ()])


def _convert(params: Any, seed: int) -> SamplingParams:
    """Convert to llmc's parameters, without stop conditions and log-probabilities.

    Raises:
        LlmcError: a value is out of range.
    """
    return SamplingParams(
        max_tokens=max(params.max_tokens or 1, params.min_tokens), min_tokens=params.min_tokens,
        temperature=params.temperature, top_k=max(params.top_k, 0), top_p=params.top_p,
        min_p=params.min_p, repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty, frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias or {}, seed=seed % _ANY_SEED)


def allowed_mask(params: Any, vocab_size: int) -> np.ndarray | None:
    """Return the mask of `allowed_token_ids`, in the format of `Step.masks`; None: all tokens."""
    if not params.allowed_token_ids:
        return None
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[params.allowed_token_ids] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)
