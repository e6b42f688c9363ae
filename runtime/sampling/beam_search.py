"""Beam search with the semantics of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.runtime.sampling.sampler import nothing_allowed

_NEVER = np.float32(-1e9)  # score of an absent sequence, as in transformers


@dataclass(frozen=True)
class Beams:
    """Result of a beam search: each prompt's finished sequences of new tokens, best first.

    A search may end with fewer sequences than beams; absent ones have sequence_length 0.

    Args:
        output_ids: int32 [max_seq_len, batch, beam]; after a sequence's end the EOS token, or -1
            for prompts without one. max_seq_len is the largest limit.
        parent_ids: int32 [max_seq_len, batch, beam], the beam that each token continued; -1 after a
            sequence's end.
        cum_log_probs: float32 [batch, beam], sums of the tokens' log-probabilities.
        scores: float32 [batch, beam], `cum_log_probs / sequence_length ** length_penalty`.
        sequence_length: int32 [batch, beam], number of tokens, including EOS.
    """

    output_ids: np.ndarray
    parent_ids: np.ndarray
    cum_log_probs: np.ndarray
    scores: np.ndarray
    sequence_length: np.ndarray

    @staticmethod
    def join(parts: Sequence[Beams]) -> Beams:
        """Concatenate batches with equal max_seq_len and beam."""
        return Beams(
            *(np.concatenate([getattr(part, name) for part in parts], axis=1)
              for name in ("output_ids", "parent_ids")),
            *(np.concatenate([getattr(part, name) for part in parts])
              for name in ("cum_log_probs", "scores", "sequence_length")))


@dataclass(frozen=True)
class Candidates:
    """The most likely next tokens of each beam, in descending order; ties by token id.

    Args:
        tokens: int32 [..., count].
        log_probs: float32 [..., count].
    """

    tokens: np.ndarray
    log_probs: np.ndarray

    @staticmethod
    def of(scores: np.ndarray, count: int) -> Candidates:
        """Select the `count` most likely tokens, at most all.

        Args:
            scores: log-probabilities, float32 [..., vocab]. A row with NaN gives candidates of NaN.
        """
        *shape, vocab = scores.shape
        kept = min(count, vocab)
        rows = scores.reshape(-1, vocab)
        tokens = np.empty((len(rows), kept), np.int32)
        edges = np.partition(rows, vocab - kept)[:, vocab - kept]
        for row, row_scores, edge in zip(tokens, rows, edges, strict=True):
            near = np.flatnonzero(~(row_scores < edge))
            row[:] = near[np.argsort(-row_scores[near], kind="stable")[:kept]]
        log_probs = np.take_along_axis(rows, tokens, axis=1)
        return Candidates(tokens, log_probs).reshape(*shape)

    def reshape(self, *shape: int) -> Candidates:
        """Reshape all dimensions but the last."""
        return Candidates(self.tokens.reshape(*shape, -1), self.log_probs.reshape(*shape, -1))


class BeamSearch:
    """State of a beam search for a batch of prompts.

    Args:
        beam_width: beams of each prompt.
        max_seq_len: rows of the tables, at least the largest limit.
        limits: maximum number of new tokens of each prompt.
        end_ids: EOS tokens of each prompt.
        length_penalty, diversity_rate, early_stopping: see `SamplingParams`.

    Attributes:
        candidates: candidates per beam that a step needs, such that beam_width of them are not EOS.
        cum_log_probs: float32 [batch, beam] of the live beams.
        running: bool [batch], prompts whose search has not ended.
    """

    def __init__(self, beam_width: int, max_seq_len: int, limits: Sequence[int],
                 end_ids: Sequence[Sequence[int]], *, length_penalty: float = 1.0,
                 diversity_rate: float = 0.0, early_stopping: bool | str = False) -> None:
        batch, shape = len(limits), (len(limits), beam_width)
        self.cum_log_probs = np.full(shape, _NEVER)
        self.cum_log_probs[:, 0] = 0  # all beams are equal at first, so only one is expanded
        self.running = np.ones(batch, bool)
        self._prompts = np.arange(batch)[:, None]
        self._limits = np.array(limits)
        self.candidates = beam_width + max(map(len, end_ids))
        self._end_ids = np.full((batch, max(1, *map(len, end_ids))), -1)  # -1: no token
        for row, ids in zip(self._end_ids, end_ids, strict=True):
            row[:len(ids)] = ids
        self._length_penalty = length_penalty
        self._diversity_rate = diversity_rate
        self._early_stopping = early_stopping
        self._steps = 0
        self._output_ids = np.zeros((max_seq_len, *shape), np.int32)
        self._parent_ids = np.zeros((max_seq_len, *shape), np.int32)
        # The finished sequences: parent beam and last token of each.
        self._scores = np.full(shape, _NEVER)
        self._sums = np.full(shape, _NEVER)
        self._lengths, self._parents, self._tokens = (np.zeros(shape, np.int64) for _ in range(3))

    def step(self, candidates: Candidates) -> tuple[np.ndarray, np.ndarray]:
        """Advance all beams by one token.

        Args:
            candidates: [batch, beam, count] with `self.candidates` of each beam, at most the
                vocabulary.

        Returns:
            The next tokens, int32, and the beams that they continue, int64; [batch, beam] each.

        Raises:
            LlmcError: no token is allowed.
        """
        beam_width = self.cum_log_probs.shape[1]
        tokens, parents, sums = expand(candidates, self.cum_log_probs, self._diversity_rate)
        if (sums[self.running].max(axis=1) == -np.inf).any():
            raise nothing_allowed(self._steps)
        self._steps += 1
        ended = (tokens[:, :, None] == self._end_ids[:, None]).any(axis=2)
        ended |= (self._steps >= self._limits)[:, None]
        ending = ended[:, :beam_width] & self.running[:, None]
        if ending.any():
            self._finish(tokens[:, :beam_width], parents[:, :beam_width], sums[:, :beam_width],
                         ending)
        live = self._prompts, np.argsort(ended, axis=1, kind="stable")[:, :beam_width]
        tokens, parents, self.cum_log_probs = tokens[live], parents[live], sums[live]
        self._output_ids[self._steps - 1] = tokens
        self._parent_ids[self._steps - 1] = parents
        self.running = self.running & self._may_improve()
        return tokens, parents

    def beams(self) -> Beams:
        """The finished sequences."""
        finished = self._scores > _NEVER
        lengths = np.where(finished, self._lengths, 0)

        def paths(table: np.ndarray, last: np.ndarray, end_id: int | np.ndarray) -> np.ndarray:
            path = gather_tree(table, self._parent_ids, lengths - 1, end_id, self._parents)
            path[lengths[finished] - 1, *np.nonzero(finished)] = last[finished]
            return path

        return Beams(paths(self._output_ids, self._tokens, self._end_ids[:, :1]),
                     paths(self._parent_ids, self._parents, -1), self._sums, self._scores,
                     lengths.astype(np.int32))

    def _finish(self, tokens: np.ndarray, parents: np.ndarray, sums: np.ndarray,
                ended: np.ndarray) -> None:
        """Keep the best of the finished sequences and of those that end now, [batch, beam] each."""
        new_scores = np.where(ended, sums / np.float32(self._steps ** self._length_penalty), _NEVER)
        scores = np.concatenate([self._scores, new_scores], axis=1)
        best = self._prompts, np.argsort(-scores, axis=1, kind="stable")[:, :tokens.shape[1]]
        lengths = np.full(tokens.shape, self._steps)
        self._scores = scores[best]
        self._tokens, self._parents, self._sums, self._lengths = (
            np.concatenate(pair, axis=1)[best]
            for pair in ((self._tokens, tokens), (self._parents, parents), (self._sums, sums),
                         (self._lengths, lengths)))

    def _may_improve(self) -> np.ndarray:
        """Prompts whose search may find a better sequence, or lacks some; bool [batch]."""
        full = self._scores[:, -1] > _NEVER
        if self._early_stopping is True:
            return ~full & (self._steps < self._limits)
        longest = self._limits if self._early_stopping == "never" and self._length_penalty > 0 \
            else np.full(len(full), self._steps)
        bound = self.cum_log_probs.max(axis=1) / \
            (longest.astype(np.float64) ** self._length_penalty).astype(np.float32)
        may: np.ndarray = (~full | (bound > self._scores[:, -1])) & (self._steps < self._limits)
        return may


def expand(candidates: Candidates, cum_log_probs: np.ndarray, diversity_rate: float = 0.0) -> \
        tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort the candidates of each prompt's beams, best first.

    Args:
        candidates: [batch, beam, count].
        cum_log_probs: float32 [batch, beam].
        diversity_rate: subtracted from a candidate's rank key once for each better one of its beam
            (Li et al. 2016, "A Simple, Fast Diverse Decoding Algorithm for Neural Generation").

    Returns:
        Tokens, int32, the beams that they continue, int64, and the sums of log-probabilities,
        float32; each [batch, beam * count].
    """
    batch, _, count = candidates.tokens.shape
    sums = candidates.log_probs + cum_log_probs[:, :, None]
    ranked = sums - np.float32(diversity_rate) * np.arange(count, dtype=np.float32)
    best = np.argsort(-ranked.reshape(batch, -1), axis=1, kind="stable")
    prompts = np.arange(batch)[:, None]
    return (candidates.tokens.reshape(batch, -1)[prompts, best], best // count,
            sums.reshape(batch, -1)[prompts, best])


def gather_tree(output_ids: np.ndarray, parent_ids: np.ndarray, sequence_length: np.ndarray,
                end_id: int | np.ndarray, last_beams: np.ndarray | None = None) -> np.ndarray:
    """Trace beams from their last token back to their first.

    Args:
        output_ids: int32 [max_seq_len, batch, beam], the token of each beam and step.
        parent_ids: int32 [max_seq_len, batch, beam], the beam of the step before that it continued.
        sequence_length: [batch, beam], tokens of each result.
        end_id: padding after each result: a number, or [batch, 1].
        last_beams: [batch, beam], the beam in which each result ends; None: result k in beam k.

    Returns:
        int32 [max_seq_len, batch, beam].
    """
    _, batch, beam = output_ids.shape
    prompts = np.arange(batch)[:, None]
    at = np.tile(np.arange(beam), (batch, 1)) if last_beams is None else last_beams
    result = np.empty_like(output_ids)
    for step in reversed(range(len(output_ids))):
        inside = step < sequence_length
        result[step] = np.where(inside, output_ids[step, prompts, at], end_id)
        at = np.where(inside, parent_ids[step, prompts, at], at)
    return result


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float32 log-softmax along the last axis; NaN where a logit is NaN or positive infinity."""
    with np.errstate(invalid="ignore"):
        shifted: np.ndarray = logits - logits.max(axis=-1, keepdims=True)
    sums = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    shifted -= np.log(sums).astype(np.float32)
    return shifted
