"""Incremental detokenization with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenizers import Tokenizer

from llmc.runtime.sampling.token_text import REPLACEMENT, token_bytes

_CONTEXT = 5  # prompt tokens that determine the first text: with or without leading space
_PARTS = 3  # maximum tokens of an unfinished character: UTF-8 takes up to four bytes
_MAX_PENDING = 8  # tokens; exceeded only by multi-byte tokens that start inside characters


class IncrementalDetokenizer:
    """Converts one sequence's tokens to chunks of text.

    A chunk never splits a character. Text that may begin a stop string is held back. All chunks and
    `finish`, joined, are equal to decoding all tokens at once, up to the first stop string.

    Args:
        tokenizer: None: the text stays empty.
        prompt: token ids before the first.
        stop: stop strings.
        show_special_tokens: include special tokens in the text.

    Attributes:
        stopped: a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int],
                 stop: Sequence[str], show_special_tokens: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, not show_special_tokens
        # Tokens whose text was returned, and those after them.
        self._context = _context(tokenizer, prompt) if tokenizer is not None else []
        self._pending: list[int] = []
        self._out = 0  # returned characters of the pending tokens' text
        self._stop = [_StopString(text) for text in stop]
        self._held = ""
        self.stopped = False

    def push(self, token: int, may_stop: bool = True) -> str:
        """Add a token and return the text to emit.

        Sets `stopped` if a stop string ends in it.

        Args:
            may_stop: whether stop strings count.
        """
        if self._tokenizer is None or self.stopped:
            return ""
        self._pending.append(token)
        text = self._decode(self._tokenizer)
        if not text or text.endswith(REPLACEMENT):
            if self._is_skipped(self._tokenizer, token):
                self._pending.pop()
                return ""
            if self._is_unfinished(self._tokenizer):  # the next token may complete the character
                return self._release(self._settle(self._tokenizer, text), may_stop)
        new = text[self._out:]
        if text:  # a token without text gives no context
            self._advance(self._tokenizer, text)
        return self._release(new, may_stop)

    def _is_skipped(self, tokenizer: Tokenizer, token: int) -> bool:
        """Whether a token is a special token that is omitted from the text."""
        return self._skip and not tokenizer.decode([token]) and \
            bool(tokenizer.decode([token], skip_special_tokens=False))

    def _is_unfinished(self, tokenizer: Tokenizer) -> bool:
        """Whether the pending tokens end inside a character that further bytes may complete."""
        tail = b"".join(token_bytes(tokenizer, token) for token in self._pending[-_PARTS:])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        return bool(decoder.getstate()[0])

    def _settle(self, tokenizer: Tokenizer, text: str) -> str:
        """Text before an unfinished character, once more than _MAX_PENDING tokens are pending."""
        if len(self._pending) <= _MAX_PENDING:
            return ""
        new = text[self._out:-1]
        self._context, self._pending = [], self._pending[-_PARTS:]
        self._out = len(self._decode(tokenizer)) - 1
        return new

    def _advance(self, tokenizer: Tokenizer, text: str) -> None:
        """Make the pending tokens, whose text is returned, the context of the next."""
        # With byte fallback an invalid byte makes all of its run invalid, so the context keeps it.
        if not (text.endswith(REPLACEMENT) and
                not tokenizer.decode(self._pending, self._skip).endswith(REPLACEMENT)):
            self._context = self._pending
        self._pending, self._out = [], 0

    def _release(self, text: str, may_stop: bool) -> str:
        """Append text, and return what cannot belong to a stop string."""
        old = len(self._held)
        self._held += text
        starts = [old + end - len(stop.text) for stop in self._stop
                  for end in stop.push(text)[:1]]
        if starts and may_stop:
            self.stopped = True
            text, self._held = self._held[:min(starts)], ""
            return text
        keep = max((stop.matched for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _decode(self, tokenizer: Tokenizer) -> str:
        """Text of the pending tokens after the context."""
        before = tokenizer.decode(self._context, self._skip)
        text = tokenizer.decode(self._context + self._pending, self._skip)
        # A decoder may drop a whole run of bytes because its end is invalid.
        return text.removeprefix(before) if text.startswith(before) \
            else tokenizer.decode(self._pending, self._skip)

    def finish(self) -> str:
        """Return the held-back text, at the end of the sequence."""
        text = ""
        if self._tokenizer is not None and self._pending and not self.stopped:
            text = self._release(self._decode(self._tokenizer)[self._out:], may_stop=True)
            self._pending = []
        text, self._held = text + self._held, ""
        return text


class _StopString:
    """Finds a stop string in a streamed text (Knuth, Morris and Pratt).

    The failure table grows with the longest match so far, so the work is proportional to the text,
    for any length of the stop string.

    Attributes:
        matched: length of the text's longest suffix that is a proper prefix of the stop string.
    """

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self._shorter = [0, 0]  # failure table, by number of matched characters

    def push(self, text: str) -> list[int]:
        """Consume text and return the positions in it where matches end."""
        ends: list[int] = []
        if not self.matched and self.text[0] not in text:
            return ends
        for position, char in enumerate(text, 1):
            self.matched = self._extended(self.matched, char)
            if self.matched == len(self.text):
                ends.append(position)
                self.matched = self._after(self.matched)
        return ends

    def _extended(self, matched: int, char: str) -> int:
        while self.text[matched] != char:
            if not matched:
                return 0
            matched = self._after(matched)
        return matched + 1

    def _after(self, matched: int) -> int:
        while len(self._shorter) <= matched:
            last = len(self._shorter) - 1
            self._shorter.append(self._extended(self._shorter[last], self.text[last]))
        return self._shorter[matched]


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt, except any that begin inside a character."""
    for size in range(min(_CONTEXT, len(prompt)), 0, -1):
        if REPLACEMENT not in tokenizer.decode(list(prompt[-size:])):
            return list(prompt[-size:])
    return []
