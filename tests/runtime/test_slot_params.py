"""Slot records for engines that sample on the device, without a GPU."""

import itertools

import numpy as np
import pytest

from llmc.runtime.core.step import SamplingState
from llmc.runtime.engines.admission import Admissions
from llmc.runtime.sampling.sampler import Sampler, SamplingParams

PROMPTS = [[5, 6, 7, 5], [8] * 9, [3], [1, 2, 3]]
PARAMS = [dict(repetition_penalty=1.3, logit_bias={3: 2.5, 5: -np.inf}, min_tokens=3),
          dict(presence_penalty=0.5, frequency_penalty=0.3),
          dict(),
          dict(repetition_penalty=0.7, frequency_penalty=-0.4, logit_bias={0: 1.0})]
WORDS = [[[4], [7, 5, 9]], [[8, 8, 2]], [], [[3, 2], [1, 2, 3, 4], [30]]]


FORCED = [{}, {0: (7,), 3: (2, 9)}, {4: (1,)}, {}]


def samplers():
    return [Sampler(SamplingParams(**params), 0, prompt, [1, 2], words, forced)
            for params, prompt, words, forced
            in zip(PARAMS, PROMPTS, WORDS, FORCED, strict=True)]


def obey(processing, row, scores, prompt, generated):
    """Interpret the records on the host as the kernel does."""
    record = processing.states["processing"][row]
    lists = processing.lists[record["lists"]:]
    scores = scores.copy()
    biased, biases, ends, forced, turns, words = np.split(lists, np.cumsum(
        [record[name] for name in ("num_biases", "num_biases", "num_ends", "num_forced",
                                 "num_forced")]))
    scores[biased] += biases.view(np.float32)
    context = prompt + generated
    for token in set(context) if record["keeps_history"] else ():
        score = scores[token]
        score = score * record["repetition"] if score < 0 else score / record["repetition"]
        if times := generated.count(token):
            score = np.float32(np.float64(score)
                               - (record["presence"] + record["frequency"] * times))
        scores[token] = score
    for start, end in itertools.pairwise(words[:record["num_words"] + 1]):
        *before, last = lists[start:end].tolist()
        if context[len(context) - len(before):] == before:
            assert record["keeps_history"] or not before
            scores[last] = -np.inf
    if len(generated) < record["min_tokens"]:
        scores[ends] = -np.inf
    if len(generated) in turns:
        scores[:] = -np.inf
        scores[forced[turns == len(generated)]] = 0
    return scores


@pytest.mark.parametrize("generated", [[], [2], [5, 9, 3], [4, 1, 2, 3, 3], [8, 8, 8, 8]])
def test_a_slot_record_encodes_the_sampling_parameters(generated):
    logits = np.random.default_rng(0).standard_normal(40).astype(np.float32) * 3
    made = samplers()
    processing = Admissions.of(dict(enumerate(map(SamplingState, made))))
    for row, (sampler, prompt) in enumerate(zip(made, PROMPTS, strict=True)):
        np.testing.assert_array_equal(obey(processing, row, logits, prompt, generated),
                                      sampler.process(logits, generated), f"row {row}")


def test_prompts_are_sent_only_with_penalties():
    """Generated tokens are included for a recomputed sequence."""
    made = dict(enumerate(SamplingState(sampler, (9, 8)) for sampler in samplers()))
    told = Admissions.of(made)
    assert told.slots.tolist() == [0, 1, 2, 3]
    assert told.prompts.tolist() == [4, 9, 0, 3] and told.lengths.tolist() == [6, 11, 0, 5]
    assert told.tokens.tolist() == [*PROMPTS[0], 9, 8, *PROMPTS[1], 9, 8, *PROMPTS[3], 9, 8]
    assert told.states["drawn"].tolist() == [2] * 4


def test_an_unsampled_slot_is_greedy():
    told = Admissions.of({3: SamplingState(None)})
    assert told.states["temperature"] == 0 and told.states["logprobs"] == -1
    assert not len(told.lists) and Admissions.of({}).slots.size == 0


def test_values_are_clipped_to_the_record():
    many = SamplingParams(max_tokens=2**63, min_tokens=2**62, top_k=2**63, temperature=1.0)
    told = Admissions.of({0: SamplingState(Sampler(many, 0, [5], [2]))})
    assert told.states["processing"]["min_tokens"] == told.states["top_k"] == 2**31 - 1


def test_a_sequence_with_prompt_lookup_is_admitted_with_its_tokens():
    sampler = Sampler(SamplingParams(), 0, [5, 6, 7])
    told = Admissions.of({1: SamplingState(sampler, (9, 8), prompt_lookup=True),
                          0: SamplingState(sampler, (9, 8))})
    assert told.states["prompt_lookup"].tolist() == [1, 0]
    assert not told.states["processing"]["keeps_history"].any()
    assert (told.prompts.tolist(), told.lengths.tolist()) == ([3, 0], [5, 0])
    assert told.tokens.tolist() == [5, 6, 7, 9, 8]
