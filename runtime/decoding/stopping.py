"""Text as it may be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Turns one sequence's tokens into text pieces.

    A piece never splits a character, and what may be the beginning of a stop string is held back
    until it is known not to be.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int],
                 stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int, may_stop: bool = True) -> str:
        """Add a token; the text that can be shown now. Sets `stopped` where a stop string ends in
        the token's text, unless it may not.
        """
        if self._tokenizer is None or self.stopped:
            return ""
        old = len(self._held)
        self._held += self._decode(self._tokenizer, token)
        ends = [index for index in (self._held.find(text, max(0, old - len(text) + 1))
                                    for text in self._stop) if index >= 0]
        if ends and may_stop:
            self.stopped = True
            text, self._held = self._held[:min(ends)], ""
            return text
        keep = max((size for stop in self._stop for size in range(1, len(stop))
                    if self._held.endswith(stop[:size])), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _decode(self, tokenizer: Tokenizer, token: int) -> str:
        try:
            return self._stream.step(tokenizer, token) or ""
        except Exception:  # bytes that are no text, as a plain Exception; what follows may be
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(tokenizer, token) or ""

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        text, self._held = self._held, ""
        return text
