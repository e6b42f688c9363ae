"""Structured output by llguidance: JSON schemas, regular expressions, choices, grammars.

Before each token, the grammar's token mask is the set of tokens that may follow.

A grammar is a program that a client wrote. Deep nesting overflows llguidance's native stack, and a
small text may take minutes to compile. A child process with limits on CPU time, memory and stack
therefore compiles it first. Only then does this process, on a thread with a larger stack.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from llmc.errors import MAX_REASON, LlmcError, shortened
from llmc.installation import install_command
from llmc.runtime.sampling.json_schema import exact_schema
from llmc.runtime.sampling.params import STRUCTURED_OUTPUT_FIELDS, SamplingParams
from llmc.runtime.sandbox import JobLimits, Lane, Sandbox

# One way to write a value: with flexible whitespace, a model may generate it endlessly.
_JSON = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
# llguidance's limit. About 5,000 object properties fit, as in OpenAI's API, with 50 ms per mask.
_MAX_GRAMMAR_SIZE = 50_000
_MAX_LEXER_STATES = 50_000  # of up to 2 kB each
_MAX_GRAMMAR_BYTES = 512 * 1024
_CHECK = JobLimits(cpu_seconds=5, memory_mib=512, stack_kib=2048)
_COMPILE_STACK = 64 * 2**20  # bytes; many times _CHECK's stack
_CACHED = 64  # compiled grammars
_CACHED_BYTES = 16 * 1024  # of a grammar's text; it takes about 100 times as much when compiled
_MAX_REASON = 2000  # characters of an error
_SLOW = 0.001  # seconds; slower masks are computed in another thread than the loop's

_masks = ThreadPoolExecutor(1, "llmc-masks")


class GrammarState:
    """State of one completion in its grammar, and the mask of its next token.

    Attributes:
        pending: the mask is being computed in another thread.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._seconds = 0.0  # time to compute the last mask
        self.pending = False
        self._compute_mask()

    def copy(self) -> GrammarState:
        """Copy the state for another completion."""
        other = object.__new__(GrammarState)
        other._matcher, other._mask = self._matcher.deep_copy(), self._mask.copy()
        other._seconds, other.pending = self._seconds, False
        return other

    def mask(self, drafts: Sequence[int] = ()) -> np.ndarray:
        """Masks of the next token and of those after each draft, as in `Step.masks`.

        Returns:
            uint32 [ceil(vocab_size / 32)], or with drafts [1 + n, ceil(vocab_size / 32)]: the
            grammar allows the first n of them. n is 0 if masks are slow.
        """
        if not drafts:
            return self._mask.view(np.uint32)
        allowed = 0 if self._seconds >= _SLOW else self._matcher.validate_tokens([*drafts])
        masks = np.zeros((1 + allowed, len(self._mask)), np.int32)
        masks[0] = self._mask
        consumed = 0
        for token, mask in zip(drafts, masks[1:], strict=False):
            self._matcher.consume_token(token)
            consumed += 1
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_stopped():  # only EOS follows
                break
        self._matcher.rollback(consumed)
        return masks[:1 + consumed].view(np.uint32)

    def advance(self, token: int,
                done: Callable[[LlmcError | None], object] | None = None) -> None:
        """Consume a token and compute the next mask.

        Args:
            done: if masks are slow, another thread computes it, and calls this with its error or
                None. `pending` is set until the caller clears it.

        Raises:
            LlmcError: the grammar allows no further token, or exceeds llguidance's limits.
        """
        if done is None or self._seconds < _SLOW:
            self._consume(token)
        else:
            self.pending = True
            _masks.submit(self._consume_apart, token, done)

    def _consume_apart(self, token: int, done: Callable[[LlmcError | None], object]) -> None:
        try:
            self._consume(token)
        except LlmcError as error:
            done(error)
        else:
            done(None)

    def _consume(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._compute_mask()

    def _compute_mask(self) -> None:
        started = time.perf_counter()
        if not self._matcher.is_error():
            self._mask[:] = 0
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            reason = shortened(self._matcher.get_error(), MAX_REASON)
            raise LlmcError(f"the grammar allows no further token ({reason})")
        self._seconds = time.perf_counter() - started


class GrammarCompiler:
    """Compiles grammars for one model and caches the most recently used ones.

    Args:
        tokenizer: the tokenizer of `tokenizer_file`.
        tokenizer_file: read by child processes.
        vocab_size: size of the logits.
        end_tokens: EOS tokens.
        sandbox: child processes.

    Raises:
        LlmcError: llguidance is not installed, or cannot use the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, tokenizer_file: Path, vocab_size: int,
                 end_tokens: Sequence[int], sandbox: Sandbox) -> None:
        self._library, self._vocab_size = _import_llguidance(), vocab_size
        ends = tuple(end_tokens)
        self._tokenizer = _ll_tokenizer(tokenizer.to_str(), vocab_size, ends)
        self._sandbox = sandbox
        self._lane = Lane(_CHECK, prepare=partial(_load, tokenizer_file, vocab_size, ends))
        self._check = partial(_check, tokenizer_file, vocab_size, ends)
        self._compiled: OrderedDict[tuple[str, str], GrammarState] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, params: SamplingParams) -> GrammarState:
        """Return a completion's initial state.

        Raises:
            LlmcError: the grammar is invalid or too large.
        """
        key = _source(params)
        with self._lock:
            state = self._compiled.get(key)
            if state is not None:
                self._compiled.move_to_end(key)
        if state is None:
            state = self._compile(*key)
            if len(key[1]) > _CACHED_BYTES:
                return state
            with self._lock:
                self._compiled[key] = state
                if len(self._compiled) > _CACHED:
                    self._compiled.popitem(last=False)
        return state.copy()

    def _compile(self, kind: str, source: str) -> GrammarState:
        size = len(source.encode())
        if size > _MAX_GRAMMAR_BYTES:
            raise LlmcError(f"{kind} has {size} bytes, at most {_MAX_GRAMMAR_BYTES} are compiled; "
                            f"simplify it")
        try:
            grammar = self._sandbox.run(self._lane, self._check, kind, source)
            return _on_large_stack(lambda: GrammarState(
                _matcher(self._library, self._tokenizer, grammar), self._vocab_size))
        except LlmcError as error:
            raise _unreadable(str(error)) from error


def _source(params: SamplingParams) -> tuple[str, str]:
    """The name and text of the parameter in `STRUCTURED_OUTPUT_FIELDS`."""
    if params.guided_choice:
        return "guided_choice", json.dumps(params.guided_choice)
    kind = next(name for name in STRUCTURED_OUTPUT_FIELDS if getattr(params, name))
    return kind, getattr(params, kind)


def _matcher(library: ModuleType, tokenizer: Any, grammar: str) -> Any:
    """Compile a grammar.

    Raises:
        LlmcError: it is invalid, or exceeds llguidance's limits.
    """
    limits = library.LLParserLimits(max_grammar_size=_MAX_GRAMMAR_SIZE,
                                    max_lexer_states=_MAX_LEXER_STATES)
    matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise LlmcError(matcher.get_error())
    return matcher


def _on_large_stack(work: Callable[[], GrammarState]) -> GrammarState:
    """Run work on a separate thread with a large stack."""
    outcome: list[GrammarState | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # raised in the caller
            outcome.append(error)

    before = threading.stack_size(_COMPILE_STACK)
    try:
        thread = threading.Thread(target=run, name="llmc-grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _unreadable(reason: str) -> LlmcError:
    """The error for a grammar that llguidance refuses, with its reason."""
    if "coerce_one_of" in reason:
        reason = ("the alternatives of oneOf may overlap; use anyOf, or let oneOf mean anyOf by "
                  '"x-guidance": {"coerce_one_of": true} at the root of the schema')
    if reason.startswith("Unimplemented keys: "):
        keys = reason.removeprefix("Unimplemented keys: ").strip("[]").replace('"', "")
        reason = f"unsupported keywords of JSON Schema: {keys}; leave them out"
    return LlmcError(f"the grammar cannot be compiled ({shortened(reason, _MAX_REASON)})")


def _import_llguidance() -> ModuleType:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise LlmcError(f"structured output needs {error.name}; install it with: "
                        f"{install_command('serve')}") from error
    return llguidance


def _ll_tokenizer(text: str, vocab_size: int, end_tokens: tuple[int, ...]) -> Any:
    try:
        return _import_llguidance().LLTokenizer(text, n_vocab=vocab_size, eos_token=[*end_tokens])
    except Exception as error:  # any exception of llguidance
        raise LlmcError(f"structured output is unsupported: llguidance cannot use this model's "
                        f"tokenizer ({error}); leave it out") from error


# In a child process.


@cache
def _load(tokenizer_file: Path, vocab_size: int, end_tokens: tuple[int, ...]) -> Any:
    return _ll_tokenizer(tokenizer_file.read_text("utf-8"), vocab_size, end_tokens)


def _check(tokenizer_file: Path, vocab_size: int, end_tokens: tuple[int, ...], kind: str,
           source: str) -> str:
    """Convert a grammar for llguidance, and compile it as the caller's process will.

    Raises:
        LlmcError: it is invalid, or exceeds llguidance's limits.
    """
    library = _import_llguidance()
    try:
        grammar = _converted(library.LLMatcher, kind, source)
    except Exception as error:  # any exception of a converter
        raise LlmcError(str(error)) from error
    matcher = _matcher(library, _load(tokenizer_file, vocab_size, end_tokens), grammar)
    GrammarState(matcher, vocab_size).copy()
    return grammar


def _converted(matcher: Any, kind: str, source: str) -> str:
    if kind == "guided_json":
        return str(matcher.grammar_from_json_schema(exact_schema(source), defaults=_JSON))
    if kind == "guided_regex":
        return str(matcher.grammar_from_regex(source))
    if kind == "guided_choice":
        texts = " | ".join(json.dumps(choice) for choice in json.loads(source))
        return str(matcher.grammar_from_lark(f"start: {texts}"))
    from llguidance.gbnf_to_lark import any_to_lark
    return str(matcher.grammar_from_lark(any_to_lark(source)))
