"""Options of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from llmc.errors import LlmcError, shown

Method = Literal["off", "ngram", "draft"]
METHODS: tuple[Method, ...] = get_args(Method)
MAX_DRAFTS = 16  # drafts of a sequence in a step


@dataclass(frozen=True)
class SpeculationConfig:
    """How to draft.

    Args:
        method: `ngram` drafts what followed the latest tokens earlier in the sequence, `draft` by
            the draft model that was compiled with the model.
        num_speculative_tokens: drafts of a sequence in a step; None: as many as pay off, by the
            measured times of steps and the rate at which drafts are accepted.
    """

    method: Method = "off"
    num_speculative_tokens: int | None = None

    @staticmethod
    def of(method: object, num_speculative_tokens: object) -> SpeculationConfig:
        """Validate options as `LLM` takes them.

        Raises:
            LlmcError: an option has a wrong type or is out of range.
        """
        if method not in METHODS:
            raise LlmcError(f"speculate is {shown(method)}, expected one of {', '.join(METHODS)}")
        count = num_speculative_tokens
        if count in (None, "auto"):
            return SpeculationConfig(method)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_DRAFTS:
            raise LlmcError(f"num_speculative_tokens is {shown(count)}, expected auto or a number "
                            f"from 1 to {MAX_DRAFTS}")
        return SpeculationConfig(method, count)
