"""Drafts by prompt lookup: what followed the latest tokens earlier in the sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmc.runtime.speculation.drafter import Draft

MIN_MATCH = 2  # latest tokens that must occur earlier
_MAX_MATCH = 16  # longer matches are as good
_SEPARATOR = -1  # between texts; no match spans it


class NgramDrafter:
    """Finds the latest tokens of a sequence in its history and in a predicted output.

    Of the longest matches the most recent one is drafted from. A match that overlaps the end is
    repeated.

    Args:
        prompt: token ids.
        prediction: token ids of the expected output, drafted first.
        source: the encoder's prompt.
    """

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int] = (),
                 source: Sequence[int] = ()) -> None:
        self._predicted = len(prediction)
        before = [*prediction, _SEPARATOR, *source, _SEPARATOR]
        self._start = len(before)  # of the sequence itself
        self._prompt_end = self._start + len(prompt)
        self._length = self._prompt_end
        self._history = np.empty(2 * self._length + 64, np.int64)
        self._history[:self._length] = [*before, *prompt]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append generated tokens."""
        end = self._length + len(tokens)
        if end > len(self._history):
            self._history = np.concatenate([self._history, np.empty(end, np.int64)])
        self._history[self._length:end] = tokens
        self._length = end

    def draft(self, count: int) -> Draft | None:
        """Return at most `count` drafts; None if the latest tokens are new."""
        match, position = self._find()
        if match < MIN_MATCH:
            if not self._predicted or self._length > self._prompt_end:
                return None
            match, position = _MAX_MATCH, 0
        tokens: list[int] = []
        period = self._length - position
        for index in range(position, position + count):
            token = tokens[index - position - period] if index >= self._length \
                else int(self._history[index])
            if token == _SEPARATOR:
                break
            tokens.append(token)
        return Draft(tokens, match, position < self._predicted) if tokens else None

    def _find(self) -> tuple[int, int]:
        """Length of the longest match, up to _MAX_MATCH, and the position after its last place."""
        last = self._length - 1
        history = self._history[:self._length]
        places = np.flatnonzero(history[:last] == history[last])
        match = 0
        while len(places):
            match, position = match + 1, int(places[-1]) + 1
            if match == _MAX_MATCH or last - match < self._start:
                return match, position
            places = places[places >= match]
            places = places[history[places - match] == history[last - match]]
        return (match, position) if match else (0, 0)
