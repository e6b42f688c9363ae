"""Comparison of beam search with transformers.

The beams that a search keeps may depend on the last bit of a sum, and so on the processor. So two
things are checked separately: the log-probabilities of llmc's search equal transformers' within a
tolerance, and given the same log-probabilities, transformers' search makes the same decisions.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch
from transformers import LogitsProcessor

import llmc
from llmc.runtime.sampling.beam_search import BeamSearch

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [50, 51], [100, 3, 3, 3, 88]]


def search(beam_width, max_tokens=12, **params):
    return llmc.SamplingParams(beam_width=beam_width, max_tokens=max_tokens, **params)


class RecordedSearch(BeamSearch):
    """A beam search that records its inputs.

    Attributes:
        given: for each prompt, the tokens and log-probabilities of the candidates, by the new
            tokens of the beam that they continue.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        batch, beam = self.cum_log_probs.shape
        self.given = [{} for _ in range(batch)]
        self._paths = [[()] * beam for _ in range(batch)]

    def step(self, candidates):
        for prompt in np.flatnonzero(self.running):
            for beam, path in enumerate(self._paths[prompt]):
                self.given[prompt][path] = (candidates.tokens[prompt, beam],
                                            candidates.log_probs[prompt, beam])
        tokens, parents = super().step(candidates)
        self._paths = [[(*paths[parent], token) for parent, token in zip(*row, strict=True)]
                       for paths, *row in zip(self._paths, parents.tolist(), tokens.tolist(),
                                              strict=True)]
        return tokens, parents


class GivenNumbers(LogitsProcessor):
    """Logits processor that replaces transformers' log-probabilities with llmc's.

    It first compares both within a tolerance.

    Args:
        given: as in `RecordedSearch`, of one prompt.
        start: tokens before the new ones.
        tolerance: of log-probabilities, relative to the range of all.

    Attributes:
        own: transformers' log-probabilities [vocab], by the preceding new tokens.
        pairs: number of adjacent candidates.
        ties: adjacent candidates in the opposite order in transformers.
        range: maximum minus minimum log-probability of a step.
    """

    def __init__(self, given, start, tolerance):
        self._given, self._start, self._tolerance = given, start, tolerance
        self.own = {}
        self.pairs = self.ties = 0
        self.range = 0.0

    def __call__(self, input_ids, scores):
        result = scores.clone()
        for row, ids in enumerate(input_ids[:, self._start:].tolist()):
            path = tuple(ids)
            assert path in self._given, f"transformers goes on from {path}, llmc did not"
            tokens, log_probs = self._given[path]
            own = self.own[path] = scores[row].cpu().numpy()
            range_ = np.ptp(own[np.isfinite(own)])
            self.range = max(self.range, range_)
            allowed = self._tolerance * range_
            np.testing.assert_allclose(log_probs, own[tokens], rtol=0, atol=allowed,
                                       err_msg=f"after {path}")
            self.pairs += len(tokens) - 1
            self.ties += int((own[tokens][:-1] < own[tokens][1:]).sum())
            likeliest = np.delete(own, tokens).max(initial=-np.inf)
            assert likeliest <= log_probs[-1] + allowed, f"after {path}, not a candidate"
            result[row].clamp_(max=float(np.nextafter(log_probs[-1], np.float32(-np.inf))))
            result[row, torch.from_numpy(tokens).long()] = torch.from_numpy(log_probs)
        return result


def first_topk(values, k):
    """Variant of torch.topk that orders equal values by index."""
    found, places = values.sort(dim=-1, descending=True, stable=True)
    return torch.return_types.topk((found[..., :k], places[..., :k]))


def transformers_beams(model, prompt, params, ends, numbers, **options):
    """Return per beam its tokens, parents and score; None without a score."""
    ids = torch.tensor([prompt])
    with torch.no_grad(), mock.patch.object(torch, "topk", first_topk):
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            num_beams=params.beam_width, num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens, length_penalty=params.length_penalty,
            early_stopping=params.early_stopping, eos_token_id=list(ends) or None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, logits_processor=[numbers],
            **options)
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    found = []
    for tokens, parents, score in zip(out.sequences, out.beam_indices, out.sequences_scores,
                                      strict=True):
        count = int((parents >= 0).sum())
        found.append(None if score < -1e8 else (
            tokens[start:start + count].tolist(), parents[:count].tolist(), float(score)))
    return found


def assert_equal(llm, model, prompts, params, ends=(), tolerance=2e-5, **options):
    """Assert that all beams equal those of transformers.

    Log-probabilities, relative to their range, and scores are within the tolerance.
    """
    searches = []

    def recorded(*arguments, **settings):
        searches.append(RecordedSearch(*arguments, **settings))
        return searches[-1]

    with mock.patch("llmc.runtime.core.request.BeamSearch", recorded):
        beams = llm.beam_search(prompts, params)
    pairs = ties = 0
    for b, (prompt, given) in enumerate(zip(
            prompts, (given for each in searches for given in each.given), strict=True)):
        start = 1 if model.config.is_encoder_decoder else len(prompt)
        numbers = GivenNumbers(given, start, tolerance / 2)
        expected = transformers_beams(model, prompt, params, ends, numbers, **options)
        assert numbers.own.keys() == given.keys(), f"prompt {b}: llmc went on, transformers not"
        pairs, ties = pairs + numbers.pairs, ties + numbers.ties
        for k, truth in enumerate(expected):
            length = beams.sequence_length[b, k]
            if truth is None:
                assert length == 0
                continue
            tokens, parents, score = truth
            where = f"prompt {b}, beam {k}: score {beams.scores[b, k]}, transformers has {score}"
            assert beams.output_ids[:length, b, k].tolist() == tokens, where
            assert beams.parent_ids[:length, b, k].tolist() == parents, where
            assert abs(beams.scores[b, k] - score) <= 1e-6 * max(1, abs(score)), where
            own = sum(float(numbers.own[tuple(tokens[:i])][token])
                      for i, token in enumerate(tokens)) / length ** params.length_penalty
            assert abs(beams.scores[b, k] - own) <= \
                tolerance * max(1, abs(own), numbers.range / 2), where
            total = beams.scores[b, k] * length ** params.length_penalty
            assert abs(beams.cum_log_probs[b, k] - total) <= 1e-5 * abs(total)
            assert (beams.output_ids[length:, b, k] == (min(ends) if ends else -1)).all()
            assert (beams.parent_ids[length:, b, k] == -1).all()
    assert ties <= max(2, pairs // 100), f"{ties} of {pairs} pairs of candidates are ties"
    return beams
