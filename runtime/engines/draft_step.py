"""Inputs of a draft model after a step of its model.

A draft model that reads features has, at row p, the token of position p + 1 and the features of
position p. A separate model has the token of position p. Rows of rejected drafts are left out, and
the row whose token is not known yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from llmc.runtime.core.step import Step, StepOutput


@dataclass(frozen=True)
class DraftStep:
    """The rows of a draft model that belong to a step.

    Args:
        step: tokens of each sequence; those in `sample` draft.
        rows: int64 [num_tokens], tokens of the model's step whose features each reads.
        sampled: int64 [num_drafting], index in the model's `Step.sample` of each in `sample`.
    """

    step: Step
    rows: np.ndarray
    sampled: np.ndarray

    @staticmethod
    def of(step: Step, output: StepOutput, max_seq_len: int, *,
           shifted: bool) -> DraftStep | None:
        """Select the rows of a step; None if no row is complete.

        Args:
            step: of the model, without LAST.
            output: of the step.
            max_seq_len: positions of a sequence. One that has all of them drafts no more.
            shifted: whether the draft model reads features.
        """
        counts = np.ones(len(step.sample), np.int64) if output.counts is None else output.counts
        ends = [*accumulate(counts.tolist())]
        places = {sequence: place for place, sequence in enumerate(step.sample.tolist())}
        found: list[tuple[int, int, int | None, list[int], range]] = []
        for sequence in range(step.batch_size):
            start, end = step.cu_seqlens[sequence:sequence + 2].tolist()
            place, following = places.get(sequence), -1
            if place is not None:
                drafts = int(step.num_drafts[sequence]) if len(step.num_drafts) else 0
                end += int(counts[place]) - 1 - drafts
                following = int(output.tokens[ends[place] - 1])
            elif len(step.next_tokens):
                following = int(step.next_tokens[sequence])
            if int(step.past_lens[sequence]) + end - start == max_seq_len or following < 0:
                place = None
            tokens = step.token_ids[start + shifted:end].tolist()
            if (shifted and following >= 0) or (place is not None and step.propose):
                tokens.append(following)
            if tokens:
                found.append((sequence, int(step.slots[sequence]), place, tokens,
                              range(start, end)))
        if not found:
            return None
        found.sort(key=lambda own: (len(own[3]) > 1, own[1]))
        rows = [row for *_, tokens, own in found for row in (own[:len(tokens)] if shifted else own)]
        drafting = [index for index, (_, _, place, *_) in enumerate(found) if place is not None]
        tables = [step.block_tables[sequence].tolist() for sequence, *_ in found]
        return DraftStep(
            Step.of([tokens for *_, tokens, _ in found],
                    [int(step.past_lens[sequence]) for sequence, *_ in found], tables,
                    [slot for _, slot, *_ in found], sample=drafting),
            np.array(rows, np.int64),
            np.array([place for _, _, place, *_ in found if place is not None], np.int64))
