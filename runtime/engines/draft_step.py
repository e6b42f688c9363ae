"""Inputs of a draft model after a step of its model.

A draft model that reads features has, at row p, the token of position p + 1 and the features of
position p. A separate model has the token of position p, and a context row of a block only the
features of position p. Rows of rejected drafts are left out, and the row whose token is not known
yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from llmc.artifacts.manifest import Chip, DraftInfo
from llmc.runtime.core.step import Step, StepOutput


def lookahead(info: DraftInfo | None, chip: Chip) -> int:
    """Tokens after a block that determine the part of a loaded draft model in it."""
    follows = info is not None and info.chain in ("tokens", "layers") and chip.features
    return len(chip.drafts) if follows else 0


@dataclass(frozen=True)
class DraftRows:
    """Rows of one sequence.

    Args:
        slot: of the sequence.
        start: position of the first row.
        tokens: a token for each row.
        rows: tokens of the model's step whose features each row reads; empty for a separate model.
        sampled: index in the model's `Step.sample`; None: the sequence does not draft.
        following: the token after the accepted ones of the step; -1 if it is unknown.
    """

    slot: int
    start: int
    tokens: list[int]
    rows: Sequence[int]
    sampled: int | None
    following: int

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + len(self.tokens)


def rows_of(step: Step, output: StepOutput, max_seq_len: int, *, shifted: bool,
            features: bool) -> list[DraftRows]:
    """Select the complete rows of each sequence of a step; those without any are left out.

    Args:
        step: of the model, without LAST.
        output: of the step.
        max_seq_len: positions of a sequence. One that has all of them drafts no more.
        shifted: whether a row has the token after the position whose features it reads.
        features: whether the draft model reads features.
    """
    counts = np.ones(len(step.sample), np.int64) if output.counts is None else output.counts
    ends = [*accumulate(counts.tolist())]
    places = {sequence: place for place, sequence in enumerate(step.sample.tolist())}
    found = []
    for sequence in range(step.batch_size):
        start, end = step.cu_seqlens[sequence:sequence + 2].tolist()
        place, following = places.get(sequence), -1
        if place is not None:
            drafts = int(step.num_drafts[sequence]) if len(step.num_drafts) else 0
            end += int(counts[place]) - 1 - drafts
            following = int(output.tokens[ends[place] - 1])
        elif len(step.next_tokens):
            following = int(step.next_tokens[sequence])
        past = int(step.past_lens[sequence])
        if past + end - start == max_seq_len or following < 0:
            place = None
        tokens = step.token_ids[start + shifted:end].tolist()
        if (shifted and following >= 0) or (not features and place is not None and step.propose):
            tokens.append(following)
        if tokens:
            rows = range(start, start + len(tokens)) if features else ()
            found.append(DraftRows(int(step.slots[sequence]), past, tokens, rows, place, following))
    return found


def packed(rows: Sequence[tuple[int, int, Sequence[int], int]]) -> tuple[Step, np.ndarray]:
    """Pack rows into a step of a draft model.

    Args:
        rows: slot, position of the first row, tokens, and number of last rows whose logits are
            needed, of each sequence.

    Returns:
        The step, and the order of its sequences: indices in `rows`.
    """
    order = sorted(range(len(rows)), key=lambda index: (len(rows[index][2]) > 1, rows[index][0]))
    ordered = [rows[index] for index in order]
    logits = [count for *_, count in ordered]
    step = Step.of([[*tokens] for _, _, tokens, _ in ordered], [start for _, start, *_ in ordered],
                   [[0]] * len(ordered), [slot for slot, *_ in ordered],
                   sample=[index for index, count in enumerate(logits) if count],
                   num_drafts=[max(count - 1, 0) for count in logits])
    return step, np.array(order, np.int64)
