"""Completions that follow a JSON schema, a regular expression or a grammar, by llguidance: before
each token, which ones may come.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from llmc.errors import LlmcError
from llmc.installation import install_command
from llmc.runtime.decoding.params import SamplingParams, shown

# One way to write a value: where any blanks may stand, a model can write them for ever.
_JSON = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


class Guide:
    """What guides one completion, at one place of it."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._find()

    def copy(self) -> Guide:
        """Another at the same place."""
        other = object.__new__(Guide)
        other._matcher, other._mask = self._matcher.deep_copy(), self._mask.copy()
        return other

    def mask(self) -> np.ndarray:
        """The tokens that may come, as in `Step.masks`."""
        return self._mask.view(np.uint32)

    def advance(self, token: int) -> None:
        """A token has come.

        Raises:
            LlmcError: there is no way on, or to find it takes more than a step may.
        """
        self._matcher.consume_token(token)
        self._find()

    def _find(self) -> None:
        if not self._matcher.is_error():
            self._mask[:] = 0
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())
            raise LlmcError(f"the guide cannot be followed ({shown(reason)[1:-1]})")


class Guides:
    """Reads guides for one model.

    Args:
        end_tokens: of which one ends a completion.

    Raises:
        LlmcError: llguidance is not installed, or cannot use the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._library, self._vocab_size = _import_llguidance(), vocab_size
        try:
            self._tokenizer = self._library.LLTokenizer(
                tokenizer.to_str(), n_vocab=vocab_size, eos_token=[*end_tokens])
        except Exception as error:  # whatever it raises
            raise LlmcError(f"llguidance cannot use this model's tokenizer ({error}); leave the "
                            f"guide out") from error

    def read(self, params: SamplingParams) -> Guide:
        """What guides a completion from its start.

        Raises:
            LlmcError: the guide is not sound.
        """
        matcher = self._library.LLMatcher(self._tokenizer, self._grammar(params), log_level=0)
        if matcher.is_error():
            raise _unreadable(matcher.get_error())
        return Guide(matcher, self._vocab_size)

    def _grammar(self, params: SamplingParams) -> str:
        """As llguidance reads it."""
        matcher = self._library.LLMatcher
        try:
            if params.guided_json is not None:
                assert isinstance(params.guided_json, str)
                return str(matcher.grammar_from_json_schema(params.guided_json, defaults=_JSON))
            if params.guided_regex is not None:
                return str(matcher.grammar_from_regex(params.guided_regex))
            if params.guided_choice:
                texts = " | ".join(json.dumps(own) for own in params.guided_choice)
                return str(matcher.grammar_from_lark(f"start: {texts}"))
            from llguidance.gbnf_to_lark import any_to_lark
            return str(matcher.grammar_from_lark(any_to_lark(params.guided_grammar or "")))
        except Exception as error:  # of a converter
            raise _unreadable(str(error)) from error


def _unreadable(reason: str) -> LlmcError:
    return LlmcError(f"the guide cannot be read ({' '.join(reason.split())[:300]})")


def _import_llguidance() -> ModuleType:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise LlmcError(f"a guide needs {error.name}; install it with: "
                        f"{install_command('serve')}") from error
    return llguidance
