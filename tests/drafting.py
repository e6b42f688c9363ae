"""Drafters for tests: always right, always wrong, or either; and requests to draft for."""

import random

import llmc
from llmc.runtime.speculation.drafter import Draft

PROMPTS = [[42, 41, 239, 151, 178, 181, 214], [11, 147], [46, 122, 278, 165, 23],
           [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]]
PARAMS = {
    "greedy": {},
    "penalties": dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3,
                      logit_bias={9: 2.0, 11: -2.0}, bad_words=[[178], [5, 6]]),
    "sampled": dict(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=7),
    "several": dict(temperature=1.1, seed=3, n=3, logprobs=2),
    "logprobs": dict(logprobs=3, prompt_logprobs=1),
    "structured": dict(guided_regex="(ab|c)+d{2,9}", temperature=1.0, seed=4),
    "ends": dict(min_tokens=9, stop_token_ids=list(range(3, 60))),
}


def params(name):
    ending = {} if name in ("structured", "ends") else dict(ignore_eos=True)
    return llmc.SamplingParams(max_tokens=24, **ending, **PARAMS[name])


def assert_verified(metrics, kind):
    """Assert that drafts of a TestDrafter were verified, and accepted unless all are wrong."""
    drafted, accepted = metrics["spec_decode_draft_tokens"], metrics["spec_decode_accepted_tokens"]
    assert drafted and (accepted == 0 if kind == "wrong" else accepted > 0)


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
