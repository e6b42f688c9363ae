"""Text as it may be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenizers import Tokenizer

from llmc.runtime.sampling.token_text import REPLACEMENT, token_bytes

_CONTEXT = 5  # tokens of the prompt that decide how the first new one reads: with a space or not
_PARTS = 3  # tokens, at most, that an unfinished character has: UTF-8 takes four bytes
_MAX_PENDING = 8  # tokens, which only those of several bytes that start inside characters exceed


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text pieces.

    A piece never splits a character, and what may be the beginning of a stop string is held back
    until it is known not to be. The pieces and `finish`, joined, are what decoding all tokens at
    once gives, up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int],
                 stop: Sequence[str], show_special_tokens: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, not show_special_tokens
        # Tokens whose text is out, and those after them.
        self._context = _context(tokenizer, prompt) if tokenizer is not None else []
        self._pending: list[int] = []
        self._out = 0  # characters of the pending tokens' text that are out
        self._stop = [_StopString(own) for own in stop]
        self._held = ""
        self.stopped = False

    def push(self, token: int, may_stop: bool = True) -> str:
        """Add a token; the text that can be shown now. Sets `stopped` where a stop string ends in
        the token's text, unless it may not.
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
        if text:  # a token without text tells nothing to the next
            self._advance(self._tokenizer, text)
        return self._release(new, may_stop)

    def _is_skipped(self, tokenizer: Tokenizer, token: int) -> bool:
        """Whether a token is a special token that the text leaves out."""
        return self._skip and not tokenizer.decode([token]) and \
            bool(tokenizer.decode([token], skip_special_tokens=False))

    def _is_unfinished(self, tokenizer: Tokenizer) -> bool:
        """Whether the pending tokens end inside a character that further bytes may complete."""
        tail = b"".join(token_bytes(tokenizer, token) for token in self._pending[-_PARTS:])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        return bool(decoder.getstate()[0])

    def _settle(self, tokenizer: Tokenizer, text: str) -> str:
        """The pending text before an unfinished character, once too many tokens are pending."""
        if len(self._pending) <= _MAX_PENDING:
            return ""
        new = text[self._out:-1]
        self._context, self._pending = [], self._pending[-_PARTS:]
        self._out = len(self._decode(tokenizer)) - 1
        return new

    def _advance(self, tokenizer: Tokenizer, text: str) -> None:
        """The pending tokens' text is out: they are the context of the next."""
        # With byte fallback an invalid byte makes all of its run invalid, so the context keeps it.
        if not (text.endswith(REPLACEMENT) and
                not tokenizer.decode(self._pending, self._skip).endswith(REPLACEMENT)):
            self._context = self._pending
        self._pending, self._out = [], 0

    def _release(self, text: str, may_stop: bool) -> str:
        """What can be shown of the text so far and this."""
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
        """The text of the pending tokens, as it reads behind the context."""
        before = tokenizer.decode(self._context, self._skip)
        text = tokenizer.decode(self._context + self._pending, self._skip)
        # A decoder may read a run of bytes as no text because its end is none.
        return text.removeprefix(before) if text.startswith(before) \
            else tokenizer.decode(self._pending, self._skip)

    def finish(self) -> str:
        """What was held back and turned out to be no stop string, nor a whole character."""
        text = ""
        if self._tokenizer is not None and self._pending and not self.stopped:
            text = self._release(self._decode(self._tokenizer)[self._out:], may_stop=True)
            self._pending = []
        text, self._held = text + self._held, ""
        return text


class _StopString:
    """Finds a stop string in a text that comes in pieces, by Knuth, Morris and Pratt.

    The failure table grows with the longest match so far, so the work is proportional to the text,
    however long the stop string is.

    Attributes:
        matched: characters at the text's end that begin the stop string, all of it excluded.
    """

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self._shorter = [0, 0]  # by characters matched: the next shorter match that ends there

    def push(self, text: str) -> list[int]:
        """Read on. Returns where matches end, in characters of this piece."""
        ends: list[int] = []
        if not self.matched and self.text[0] not in text:
            return ends
        for place, own in enumerate(text, 1):
            self.matched = self._extended(self.matched, own)
            if self.matched == len(self.text):
                ends.append(place)
                self.matched = self._after(self.matched)
        return ends

    def _extended(self, matched: int, own: str) -> int:
        while self.text[matched] != own:
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
    """The last tokens of a prompt, without any that begin inside a character."""
    for size in range(min(_CONTEXT, len(prompt)), 0, -1):
        if REPLACEMENT not in tokenizer.decode(list(prompt[-size:])):
            return list(prompt[-size:])
    return []
