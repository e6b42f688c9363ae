"""Drafters for tests: always right, always wrong, or either."""

import random

from llmc.runtime.speculation.drafter import Draft


class TestDrafter:
    """Drafts from the known continuation of a sequence.

    Args:
        expected: tokens that the sequence will generate.
        kind: `right`, `wrong` or `random`.
        vocab_size: upper bound of wrong tokens.
    """

    __test__ = False

    def __init__(self, expected, kind, vocab_size):
        self._expected, self._kind, self._vocab_size = list(expected), kind, vocab_size
        self._random, self._generated = random.Random(len(self._expected)), []

    def extend(self, tokens):
        self._generated += tokens

    def draft(self, count):
        if self._kind == "random":
            count = self._random.randint(0, count)
        start = len(self._generated)
        right = (self._expected[start:start + count] + [0] * count)[:count]
        wrong = [(token + 1) % self._vocab_size for token in right]
        made = [self._random.choice(pair) for pair in zip(right, wrong, strict=True)] \
            if self._kind == "random" else right if self._kind == "right" else wrong
        return Draft(made, self._random.randint(1, 9)) if made else None
