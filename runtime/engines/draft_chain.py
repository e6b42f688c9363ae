"""Chains of passes of a draft model after a step; see `DraftInfo.chain`.

Between two passes there are only argmax, table lookups and selections of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llmc.artifacts.manifest import DraftInfo
from llmc.runtime.core.step import Step, StepOutput
from llmc.runtime.engines.draft_step import DraftRows, packed, rows_of

_MERGED = 32  # context rows that run with the block; more are a separate pass


class DraftRank(Protocol):
    """A rank that runs the programs of a draft model."""

    def run_draft(self, program: int, step: Step, hidden: np.ndarray | None, *,
                  whole: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """Run a program.

        Args:
            program: its index in `Chip.drafts`.
            step: its tokens.
            hidden: features [num_tokens, hidden_size], unless it is a separate model.
            whole: run all rows of a sequence at once.

        Returns:
            Logits of `step.sampled_rows`, and `hidden_out` [num_tokens, hidden_size], if it has it.
        """
        ...

    def draft_ids(self, logits: np.ndarray) -> np.ndarray:
        """Return the token ids of the largest logits, int64 [num_logits]."""
        ...

    def write_ahead(self, slots: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> None:
        """Note that positions after the ends of sequences will be written."""
        ...

    def leave_step(self) -> None:
        """Note that all passes on the tokens of the step have run."""
        ...


@dataclass(eq=False)
class _Sequence:
    """A sequence during the passes of a step.

    Args:
        rows: of the first pass.
        start: position of the first row of `hidden`.
        hidden: `hidden_out` of the latest pass, [rows, hidden_size].
        drafts: token ids.
    """

    rows: DraftRows
    start: int
    hidden: np.ndarray | None
    drafts: list[int]


class DraftChain:
    """Runs the passes of a draft model.

    Args:
        info: of the draft model.
        programs: number of its programs.
        max_seq_len: positions of a sequence.
        rank: runs the programs.
    """

    def __init__(self, info: DraftInfo, programs: int, max_seq_len: int, rank: DraftRank) -> None:
        self._info, self._programs, self._max_seq_len = info, programs, max_seq_len
        self._rank = rank
        # By slot: for each layer after the first, position and features of the last row whose
        # token was a draft. It is computed again in the next step, with the token that is then
        # known.
        self._kept: dict[int, dict[int, tuple[int, np.ndarray]]] = {}

    @property
    def rewritten(self) -> int:
        """Positions before a step's tokens that its passes compute again."""
        return self._programs - 1

    def admit(self, slots: Iterable[int]) -> None:
        """Forget the sequences that had these slots."""
        for slot in slots:
            self._kept.pop(slot, None)

    def propose(self, step: Step, output: StepOutput, features: np.ndarray | None) -> np.ndarray:
        """Run all passes after a step.

        Args:
            step: of the model, with `propose`.
            output: of the step.
            features: of the step's tokens, [num_tokens, hidden_size].

        Returns:
            int64 [num_sampled, step.propose]; -1 after the last draft of a sequence.
        """
        count = step.propose or 0
        reads = self._info.kind != "model"
        rows = rows_of(step, output, self._max_seq_len, features=reads,
                       shifted=reads and self._info.chain != "block")
        sequences = [_Sequence(own, own.start,
                               None if features is None else features[[*own.rows]], [])
                     for own in rows]
        run = {"position": self._at_one_position, "block": self._block}.get(
            self._info.chain, self._by_tokens)
        run(sequences, count)
        drafts = np.full((len(step.sample), count), -1, np.int64)
        for own in sequences:
            if own.rows.sampled is not None:
                made = own.drafts[:count]
                drafts[own.rows.sampled, :len(made)] = made
        return drafts

    def _by_tokens(self, sequences: Sequence[_Sequence], count: int) -> None:
        """Run each program on the step's tokens, and the last one on further drafts."""
        drafting = [own for own in sequences if own.rows.sampled is not None]
        ends = np.array([own.rows.end for own in drafting], np.int64)
        self._rank.write_ahead(_slots(drafting), ends - 1,
                               np.minimum(ends + count, self._max_seq_len))
        for program in range(self._programs):
            self._run_layer(program, sequences, program < count)
        self._rank.leave_step()
        for index in range(self._programs, count):
            past = index - self._programs  # further rows
            drafting = [own for own in drafting if own.rows.end + past < self._max_seq_len]
            for own in drafting:
                own.hidden = None if own.hidden is None else own.hidden[-1:]
            self._run(self._programs - 1, [
                (own, own.rows.end + past, own.drafts[-1:], 1) for own in drafting])

    def _run_layer(self, program: int, sequences: Sequence[_Sequence], drafts: bool) -> None:
        """Run the program of a layer on the rows whose tokens are known, or drafts.

        Row p of layer n has the token of position p + 1 + n.
        """
        given = []
        for own in sequences:
            tokens = [*own.rows.tokens, *own.drafts]
            if program:
                tokens = self._restore(program, own, tokens)
            if tokens:
                given.append((own, own.start, tokens,
                              int(drafts and own.rows.sampled is not None)))
            elif own.hidden is not None:
                own.hidden = own.hidden[:0]
        self._run(program, given)

    def _restore(self, layer: int, own: _Sequence, tokens: list[int]) -> list[int]:
        """Prepend the row of the step before, and return the tokens of the rows."""
        assert own.hidden is not None
        before = self._kept.setdefault(own.rows.slot, {})
        position, row = before.pop(layer, (-1, None))
        if row is not None and position == own.start - 1:
            own.start, own.hidden = position, np.concatenate([row[None], own.hidden])
        kept = own.rows.end - layer
        if own.start <= kept < own.start + len(own.hidden):
            before[layer] = kept, own.hidden[kept - own.start].copy()
        return tokens[own.start + layer - own.rows.start:][:len(own.hidden)]

    def _at_one_position(self, sequences: Sequence[_Sequence], count: int) -> None:
        """Run the program on the last token, then on each draft, at the same position."""
        drafting = [own for own in sequences if own.rows.sampled is not None]
        for own in drafting:
            assert own.hidden is not None
            own.start, own.hidden = own.rows.end - 1, own.hidden[-1:]
        for _ in range(count):
            self._run(0, [(own, own.start, [*own.rows.tokens, *own.drafts][-1:], 1)
                          for own in drafting])
        self._rank.leave_step()

    def _block(self, sequences: Sequence[_Sequence], count: int) -> None:
        """Run the program on the context, and on the next token and masks."""
        most = (self._info.num_speculative_tokens or 0) + 1
        sizes = {id(own): min(most, self._max_seq_len - own.rows.end) for own in sequences
                 if own.rows.sampled is not None and count}
        drafting = [own for own in sequences if sizes.get(id(own), 0) > 1]
        context = [own for own in sequences if own not in drafting
                   or len(own.rows.tokens) > _MERGED]
        ends = np.array([own.rows.end for own in drafting], np.int64)
        self._rank.write_ahead(_slots(drafting), ends,
                               ends + np.array([sizes[id(own)] for own in drafting], np.int64))
        self._run(0, [(own, own.start, own.rows.tokens, 0) for own in context])
        given = []
        for own in drafting:
            assert own.hidden is not None
            size = sizes[id(own)]
            tokens = [own.rows.following, *[self._info.mask_token_id or 0] * (size - 1)]
            zeros = np.zeros((size, own.hidden.shape[1]), np.float32)
            if own in context:
                own.start, own.hidden = own.rows.end, zeros
            else:
                tokens = [*own.rows.tokens, *tokens]
                own.hidden = np.concatenate([own.hidden, zeros])
            given.append((own, own.start, tokens, size - 1))
        self._run(0, given, whole=True)
        self._rank.leave_step()

    def _run(self, program: int, given: Sequence[tuple[_Sequence, int, list[int], int]], *,
             whole: bool = False) -> None:
        """Run a program, and add its drafts and `hidden_out` to the sequences.

        Args:
            program: its index.
            given: sequences, positions of their first rows, tokens, and numbers of drafts.
            whole: see `DraftRank.run_draft`.
        """
        if not given:
            return
        step, order = packed([(own.rows.slot, start, tokens, drafts)
                              for own, start, tokens, drafts in given])
        hidden = [own.hidden[:len(tokens)] for own, _, tokens, _ in given
                  if own.hidden is not None]
        logits, results = self._rank.run_draft(
            program, step, np.concatenate([hidden[index] for index in order]) if hidden else None,
            whole=whole)
        made = iter(self._rank.draft_ids(logits).tolist() if len(logits) else ())
        for place, index in enumerate(order.tolist()):
            own, start, _, drafts = given[index]
            own.drafts += [next(made) for _ in range(drafts)]
            if results is not None:
                own.start, own.hidden = start, results[
                    step.cu_seqlens[place]:step.cu_seqlens[place + 1]]


def _slots(sequences: Sequence[_Sequence]) -> np.ndarray:
    return np.array([own.rows.slot for own in sequences], np.int32)
