"""Drafts that llmc's engine verifies.

Those of method ngram are found by vLLM's proposer. Those of method draft are computed by the draft
model that was compiled with the model; vLLM knows them as of method ngram, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.artifacts.manifest import Manifest
from llmc.errors import LlmcError
from llmc.runtime.core.step import EngineLimits
from llmc.runtime.speculation.config import MAX_DRAFTS
from llmc_vllm.sequences import Sequence, draft_room

_NAMES = ("ngram", "[ngram]")
_DRAFT = "draft"
_BY_MODEL = "llmc_draft"  # key of vLLM's additional_config
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
# Options of method ngram.
_SUPPORTED = ("method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size",
              "prompt_lookup_min", "prompt_lookup_max")


def check_speculation(args: Any, manifest: Manifest) -> bool:
    """Check the options of speculative decoding in vLLM's `EngineArgs`.

    Method draft is replaced.

    Returns:
        Whether there are any.

    Raises:
        LlmcError: an option is not supported, or the model's engine verifies no drafts.
    """
    options = _given(args)
    if options is None:
        return False
    method, model = options.get("method"), options.get("model")
    if method == _DRAFT and model is None:
        _check_draft(manifest, options)
        args.spec_method = args.spec_model = args.spec_tokens = None
        args.speculative_config = {**options, "method": "ngram"}
        args.additional_config = {**(args.additional_config or {}), _BY_MODEL: True}
        return True
    for name in (method or model, model or method):
        if name not in _NAMES:
            raise LlmcError(f"llmc verifies drafts of method ngram or draft; {name!r} is not "
                            f"supported for a model compiled by llmc; give --speculative-config "
                            f"'{_EXAMPLE}'")
    _check_values(options)
    spec = manifest.target.spec
    if spec.gpu and not spec.load_engine_class().verifies:
        raise LlmcError(f"'{manifest.source.architecture}' verifies no drafts on target "
                        f"{manifest.target.kind}; leave speculative_config out")
    return True


def _check_draft(manifest: Manifest, options: Mapping[str, Any]) -> None:
    """Check the options of drafts by the compiled draft model."""
    name = f"'{manifest.source.architecture}'"
    if manifest.draft is None:
        raise LlmcError(f"method draft of speculative_config needs a draft model, and {name} was "
                        f"compiled without one; compile with --draft, or give method ngram")
    if manifest.target.spec.gpu:
        raise LlmcError(f"method draft of speculative_config is not supported on target "
                        f"{manifest.target.kind}; give method ngram, or compile {name} for target "
                        f"cpu")
    for key in options.keys() & {"prompt_lookup_min", "prompt_lookup_max"}:
        raise LlmcError(f"{key} of speculative_config is not supported for drafts of method "
                        f"draft; leave it out")
    _check_values(options)
    count, most = options.get("num_speculative_tokens"), manifest.draft.max_drafts
    if isinstance(count, int) and most is not None and count > most:
        raise LlmcError(f"num_speculative_tokens is {count}, but the draft model of {name} drafts "
                        f"{most} tokens at once; lower it")


def by_model(config: Any) -> bool:
    """Whether the compiled draft model drafts, given vLLM's VllmConfig."""
    return isinstance(config.additional_config, dict) and _BY_MODEL in config.additional_config


def _given(args: Any) -> dict[str, Any] | None:
    """Return vLLM's speculative_config together with its short options; None: neither is given."""
    options = args.speculative_config
    if not isinstance(options, dict | None):
        raise LlmcError(f"speculative_config is {options!r}, expected an object such as "
                        f"{_EXAMPLE}")
    short = {"method": args.spec_method, "model": args.spec_model,
             "num_speculative_tokens": args.spec_tokens}
    short = {key: value for key, value in short.items() if value is not None}
    if options is None and not short:
        return None
    return {key.replace("-", "_"): value for key, value in (options or {}).items()} | short


def _check_values(options: Mapping[str, Any]) -> None:
    from vllm.config import SpeculativeConfig

    for key, value in options.items():
        if key not in _SUPPORTED and value not in (None, getattr(SpeculativeConfig, key, None)):
            raise LlmcError(f"{key} {value!r} of speculative_config is not supported for drafts of "
                            f"method {options.get('method') or 'ngram'}; leave it out")
    count = options.get("num_speculative_tokens")
    if isinstance(count, int) and count > MAX_DRAFTS:
        raise LlmcError(f"num_speculative_tokens is {count}, but llmc verifies at most "
                        f"{MAX_DRAFTS} drafts of a sequence in a step; lower it")


def check_limits(config: Any, manifest: Manifest, limits: EngineLimits) -> None:
    """Check the number of drafts against the limits of a loaded engine.

    Args:
        config: vLLM's VllmConfig.

    Raises:
        LlmcError: the engine verifies fewer drafts.
    """
    if config.num_speculative_tokens > limits.max_drafts:
        raise LlmcError(f"num_speculative_tokens is {config.num_speculative_tokens}, but "
                        f"'{manifest.source.architecture}' verifies at most {limits.max_drafts} "
                        f"drafts of a sequence in steps of {limits.max_tokens} tokens and "
                        f"{limits.max_slots} sequences; lower it, or leave speculative_config out")


class Drafter:
    """vLLM's n-gram proposer, with the tokens of each slot.

    Args:
        config: vLLM's VllmConfig.
        limits: of the engine.
    """

    def __init__(self, config: Any, limits: EngineLimits) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        self._proposer = NgramProposer(config)
        self._limits, slots = limits, limits.max_slots
        self._history = np.zeros((slots, config.model_config.max_model_len), np.int32)
        self._lengths = np.zeros(slots, np.int32)
        self._tokens: list[list[int]] = [[] for _ in range(slots)]  # those in the history
        # The proposer compiles its search when it first has tokens.
        self._proposer.propose(1, [[0]], np.ones(1, np.int32), self._history[:1])

    def propose(self, sampled: list[Sequence], count: int) -> dict[str, list[int]]:
        """Return drafts by request id, not more than the engine verifies in a step.

        Args:
            sampled: sequences whose last token was sampled in this step.
            count: maximum number of drafts of each.
        """
        latest: list[list[int]] = [[] for _ in self._tokens]  # by slot; without any, no drafts
        for sequence in sampled:
            assert sequence.slot is not None, "a sampled sequence has a slot"
            self._write(sequence.slot, sequence.tokens)
            latest[sequence.slot] = sequence.tokens[-1:]
        found = self._proposer.propose(count, latest, self._lengths, self._history)
        room, drafts = draft_room(self._limits, len(sampled)), {}
        for sequence in sampled:
            drafts[sequence.request_id] = kept = found[sequence.slot][:room]
            room -= len(kept)
        return drafts

    def _write(self, slot: int, tokens: list[int]) -> None:
        """Append a slot's new tokens to its history, which another sequence begins anew."""
        start = int(self._lengths[slot]) if self._tokens[slot] is tokens else 0
        self._history[slot, start:len(tokens)] = tokens[start:]
        self._lengths[slot], self._tokens[slot] = len(tokens), tokens
