"""Speculative decoding: the same tokens as without, for any drafts."""

import random
from dataclasses import replace

import families
import numpy as np
import pytest
from drafting import PARAMS, PROMPTS, TestDrafter, assert_verified, params
from hypothesis import given, settings
from hypothesis import strategies as st

import llmc
from llmc.runtime.core import loop as loop_module
from llmc.runtime.core.step import EngineLimits, SamplingState, Step
from llmc.runtime.engines.host import HostSampling
from llmc.runtime.sampling.sampler import Sampler, probabilities
from llmc.runtime.speculation.costs import measure_costs
from llmc.runtime.speculation.drafter import Draft
from llmc.runtime.speculation.engine_drafts import EngineDrafter
from llmc.runtime.speculation.ngram import MIN_MATCH, NgramDrafter
from llmc.runtime.speculation.planner import DraftPlanner, VerificationCosts


@pytest.fixture(scope="module", params=["case_tp1", "case_tp2"])
def plain(request):
    """A case directory, and its completions without drafts by name of parameters."""
    case = request.getfixturevalue(request.param)
    with llmc.LLM(case, max_batch_size=4) as llm:
        return case, {name: llm.generate(PROMPTS, params(name)) for name in PARAMS}


def equal(got, expected):
    assert [(own.token_ids, own.text, own.finish_reason) for own in got] == \
        [(own.token_ids, own.text, own.finish_reason) for own in expected]
    for own, other in zip(got, expected, strict=True):
        assert [each.chosen for each in own.logprobs or ()] == \
            pytest.approx([each.chosen for each in other.logprobs or ()], abs=1e-4)


@pytest.mark.parametrize("kind", ["right", "wrong", "random", "ngram"])
def test_tokens_do_not_depend_on_drafts(plain, kind, monkeypatch):
    case, expected = plain
    known = {}
    if kind != "ngram":
        monkeypatch.setattr(loop_module, "NgramDrafter", lambda prompt, *_: TestDrafter(
            known[tuple(prompt)], kind, 300))
    with llmc.LLM(case, max_batch_size=4, speculate="ngram", num_speculative_tokens=4,
                  block_size=4, kv_cache_tokens=160) as llm:
        for name, alone in expected.items():
            known |= {own.prompt_token_ids: own.token_ids for own in alone if not own.sample}
            equal(llm.generate(PROMPTS, params(name)), alone)
        metrics = llm.metrics()
    assert_verified(metrics, kind)
    assert sum(metrics["spec_decode_accepted_tokens_per_pos"]) == \
        metrics["spec_decode_accepted_tokens"]


@pytest.mark.parametrize("prediction", [None, "right", "wrong"])
def test_a_prediction_saves_steps(case_tp1, prediction, monkeypatch):
    with llmc.LLM(case_tp1, num_speculative_tokens=7) as llm:
        alone = llm.generate([PROMPTS[0]], params("greedy"))[0].token_ids
        given_tokens = {"right": alone, "wrong": [(t + 1) % 300 for t in alone], None: None}
        steps = families.steps_read(llm, monkeypatch)
        own, = llm.generate([PROMPTS[0]], llmc.SamplingParams(
            max_tokens=24, ignore_eos=True, prediction=given_tokens[prediction]))
    assert own.token_ids == alone
    assert len(steps) <= 6 if prediction == "right" else 10 < len(steps) <= 25


def test_a_prediction_is_counted_in_the_completion(case_tp1):
    """Drafts that a stop string drops count as rejected."""
    words = dict.fromkeys(range(284, 291), 100.0)  # tokens of a word each, which do not repeat
    wish = llmc.SamplingParams(max_tokens=7, logit_bias=words, presence_penalty=2)
    with llmc.LLM(case_tp1, num_speculative_tokens=7) as llm:
        alone, = llm.generate([PROMPTS[0]], wish)
        token_ids, stop = alone.token_ids, alone.text.split()[2]
        given_tokens = {"right": token_ids, "text": alone.text,
                        "wrong": [*token_ids[:4], 5, *token_ids[5:]]}
        found = {name: llm.generate([PROMPTS[0]], replace(wish, prediction=value))[0]
                 for name, value in given_tokens.items()}
        cut, = llm.generate([PROMPTS[0]], replace(wish, prediction=token_ids, stop=[stop]))
        llm.enable_drafts(False)
        found["off"], = llm.generate([PROMPTS[0]], replace(wish, prediction=token_ids))
    for own in found.values():
        equal([own], [alone])
    # Drafts follow two tokens, and precede the last one.
    assert {name: counted(own) for name, own in found.items()} == {
        "right": (4, 0), "text": (4, 0), "wrong": (2, 2), "off": (0, 0)}
    assert cut.token_ids == token_ids[:3] and counted(cut) == (1, 3)


def test_a_prediction_of_a_whole_structured_output(case_tp1):
    text = "the quick brown fox jumps over the lazy dog"
    wish = llmc.SamplingParams(guided_choice=[text])
    with llmc.LLM(case_tp1, num_speculative_tokens=8) as llm:
        alone, own = llm.generate([PROMPTS[0]] * 2, [wish, replace(wish, prediction=text)])
    equal([own], [alone])
    assert own.text == text


def counted(completion):
    return completion.accepted_prediction_tokens, completion.rejected_prediction_tokens


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_decoder_model_verifies_drafts(encoder_decoder, family):
    *_, cases = encoder_decoder(family)
    case = next(iter(cases.values()))
    wish = llmc.SamplingParams(max_tokens=12, ignore_eos=True)
    with llmc.LLM(case) as plain_llm, llmc.LLM(case, speculate="ngram",
                                               num_speculative_tokens=3) as llm:
        prompts = [[5, 6, 7, 8, 9], [11, 12]]
        equal(llm.generate(prompts, wish), plain_llm.generate(prompts, wish))


def naive(history, start):
    """The longest match of up to 16 latest tokens, and the end of its last place."""
    for length in range(min(16, len(history) - start), 0, -1):
        for end in range(len(history) - 1, length - 1, -1):
            if history[end - length:end] == history[len(history) - length:]:
                return length, end
    return 0, 0


@settings(deadline=None)
@given(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=30),
       prediction=st.lists(st.integers(0, 2), max_size=8),
       generated=st.lists(st.integers(0, 2), max_size=30), count=st.integers(1, 9))
def test_ngram_drafts_continue_the_longest_latest_match(prompt, prediction, generated, count):
    drafter = NgramDrafter(prompt, prediction)
    for token in generated:
        drafter.extend([token])
    history = [*prediction, -1, -1, *prompt, *generated]
    match, end = naive(history, len(prediction) + 2)
    draft = drafter.draft(count)
    if match < MIN_MATCH:
        expected = prediction[:count] if not generated else []
    else:
        expected = (history[end:] * count)[:count]
        expected = expected[:expected.index(-1)] if -1 in expected else expected
    assert (draft.tokens if draft else []) == expected
    assert draft is None or len(draft.tokens) < count or match < MIN_MATCH or draft.match == match


class Table:
    """Ranks whose logits depend on the last token alone."""

    def __init__(self, logits):
        self.logits = logits

    def compute(self, step):
        return self.logits[step.token_ids[step.logits_indices]]


@pytest.mark.parametrize("count", [
    pytest.param(1, marks=pytest.mark.thorough), 3, pytest.param(7, marks=pytest.mark.thorough)])
def test_drafts_do_not_change_the_distribution(count):
    """100,000 draws for random drafts, by chi-square."""
    vocab, batch, draws = 8, 50, 100_000
    rng = np.random.default_rng(0)
    table = rng.normal(size=(vocab, vocab)).astype(np.float32) * 2
    wish = [llmc.SamplingParams(temperature=0.8, top_k=6, top_p=0.95, min_p=0.02, seed=seed)
            for seed in range(batch)]
    engine = HostSampling(Table(table), EngineLimits(batch, 1, 10**6, batch, 512, 1, max_drafts=7))
    admit = {slot: SamplingState(Sampler(own)) for slot, own in enumerate(wish)}
    last, seen = [0] * batch, np.zeros((vocab, vocab))
    while seen.sum() < draws:
        drafts = rng.integers(0, vocab, (batch, count))
        output = engine.collect(engine.submit(Step.of(
            [[token, *row] for token, row in zip(last, drafts.tolist(), strict=True)], [0] * batch,
            [[slot] for slot in range(batch)], range(batch), num_drafts=[count] * batch,
            admit=admit)))
        admit, start = {}, 0
        for slot, number in enumerate(output.counts.tolist()):
            for token in output.tokens[start:start + number].tolist():
                seen[last[slot], token] += 1
                last[slot] = token
            start += number
    expected = np.stack([probabilities(row, wish[0]) for row in table])
    assert (seen[expected == 0] == 0).all()
    for row, chances in zip(seen[seen.sum(1) > 0], expected[seen.sum(1) > 0], strict=True):
        kept = chances > 0
        chi = ((row[kept] - row.sum() * chances[kept])**2 / (row.sum() * chances[kept])).sum()
        assert chi < 30  # 7 degrees of freedom: one in 10,000


def test_costs_are_measured_with_different_tokens():
    """Equal ones would be routed to the same experts."""
    class Recording:
        limits = EngineLimits(num_blocks=64, block_size=16, max_tokens=256, max_slots=8,
                              max_logits=64, ahead=0, max_drafts=3)

        def __init__(self):
            self.steps = []

        def submit(self, step):
            self.steps.append(step)
            return len(self.steps)

        def collect(self, ticket):
            pass

    engine = Recording()
    measure_costs(engine, 256, 1000)
    verifying = [step for step in engine.steps if len(step.num_drafts)]
    assert {step.batch_size for step in verifying} > {1, 2}
    assert all(len({*step.token_ids.tolist()}) > step.num_tokens / 2 for step in verifying)


class Steady:
    """A drafter of a fixed rate of acceptance."""

    def __init__(self, rate):
        self._rate, self._random = rate, random.Random(0)

    def extend(self, tokens):
        pass

    def draft(self, count):
        return Draft([0] * count, 4)

    def accepted(self, count):
        return next((n for n in range(count) if self._random.random() >= self._rate), count)


def verify(planner, own, drafter, steps):
    """Plan and verify the drafts of a sequence that is alone."""
    for _ in range(steps):
        planner.plan([(own, [], 100)], 1, 100)
        drafted = len(own.pending)
        own.start()
        own.verified(1 + drafter.accepted(drafted))


@pytest.mark.parametrize(("rate", "seconds", "low", "high"), [
    (0.9, [1.0, 1.05, 1.1, 1.15, 1.2, 1.25], 3, 5),  # nearly free rows
    (0.9, [1.0, 1.5, 2.5, 3.5, 4.5, 5.5], 0.8, 1.2),  # only the first pays off
    (0.05, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], 0, 0.2),  # bad drafts
    (1.0, [1.0, 2.1, 3.2, 4.3, 5.4, 6.5], 0, 0)])  # rows cost as much as steps
def test_the_number_of_drafts_is_what_pays_off(rate, seconds, low, high):
    planner = DraftPlanner(None, VerificationCosts({1: seconds}))
    drafter = Steady(rate)
    own = planner.sequence(drafter)
    verify(planner, own, drafter, 300)
    assert low <= planner.counts.draft_tokens / 300 <= high


@pytest.mark.parametrize(("extra", "low", "high"), [
    (0.02, 3.5, 4), (0.6, 0, 0)])  # 0.6: a draft and its repetition exceed a step
def test_accepted_drafts_are_counted_twice_with_recurrent_state(extra, low, high):
    seconds = [1.0 + extra * count for count in range(9)]
    chosen = []
    for recomputes in (False, True):
        planner = DraftPlanner(None, VerificationCosts({1: seconds}), recomputes=recomputes)
        drafter = Steady(0.95)
        own = planner.sequence(drafter)
        verify(planner, own, drafter, 200)
        chosen.append(planner.counts.draft_tokens / 200)
    assert low <= chosen[1] <= high and chosen[1] < chosen[0]


def test_later_sequences_try_again_after_bad_drafts():
    planner = DraftPlanner(None, VerificationCosts({1: [1.0, 1.2, 1.3, 1.4, 1.5]}))

    def serve(drafter, steps):
        """Drafts per step, of sequences of 50 steps."""
        before = planner.counts.draft_tokens
        for _ in range(steps // 50):
            verify(planner, planner.sequence(drafter), drafter, 50)
        return (planner.counts.draft_tokens - before) / steps

    assert serve(Steady(0.0), 5000) < 0.05  # each costs 0.1 to 0.2 steps
    serve(Steady(1.0), 1000)
    assert serve(Steady(1.0), 1000) > 3.5


def test_no_drafts_in_batches_larger_than_measured():
    planner = DraftPlanner(None, VerificationCosts({4: [1.0, 1.1]}))
    own = planner.sequence(Steady(1.0))
    planner.plan([(own, [], 100)], 5, 100)
    assert not own.pending


@pytest.mark.parametrize(("arguments", "problem"), [
    (dict(speculate="draft"), "has no draft model; compile with --draft, or give ngram or off"),
    (dict(speculate="medusa"), "speculate is 'medusa', expected one of off, ngram"),
    (dict(speculate="ngram", num_speculative_tokens=0), "num_speculative_tokens is 0, expected"),
    (dict(speculate="ngram", num_speculative_tokens=99), "expected auto or a number from 1 to 16"),
    (dict(speculate="ngram", num_speculative_tokens="many"), "num_speculative_tokens is 'many'")])
def test_invalid_options(case_tp1, arguments, problem):
    with pytest.raises(llmc.LlmcError, match=problem):
        llmc.LLM(case_tp1, **arguments)


@pytest.mark.parametrize(("prediction", "problem"), [
    (5, "prediction is 5; give a text, a list of token ids, or None"),
    ([99999], "token id 99999 is not in the vocabulary")])
def test_an_invalid_prediction(case_tp1, prediction, problem):
    with llmc.LLM(case_tp1) as llm, pytest.raises(llmc.LlmcError, match=problem):
        llm.generate([[5]], llmc.SamplingParams(prediction=prediction))


def test_beam_search_refuses_a_prediction():
    with pytest.raises(llmc.LlmcError, match="prediction does not go with beam_width 2"):
        llmc.SamplingParams(beam_width=2, prediction="x")


def engine_drafts(planner, proposals):
    """Submit two steps ahead of an engine that proposes these drafts, and verify the second."""
    own = planner.sequence(EngineDrafter(ahead=True, prompt_lookup=True))
    own.start()
    own.engine.expect(4)
    planner.plan([(own, [], 100)], 1, 100)
    placeholders = own.pending
    own.start()
    own.engine.expect(4)
    own.verified(1)
    own.proposed(proposals, len(proposals))
    return own, placeholders


@pytest.mark.parametrize(("proposals", "sampled", "counted"), [
    ([7, 8, 9, 10], 3, (1, 4, 2)), ([7, 8], 3, (1, 2, 2)), ([7], 1, (1, 1, 0)), ([], 1, (0, 0, 0)),
    ([], 2, (0, 0, 0))])
def test_drafts_that_the_engine_did_not_find_are_not_counted(proposals, sampled, counted):
    """A placeholder may be accepted by chance."""
    planner = DraftPlanner(4, VerificationCosts({}))
    own, placeholders = engine_drafts(planner, proposals)
    assert placeholders == [-2, -3, -4, -5]
    assert own.verified(sampled) == 5 - sampled
    counts = planner.counts
    assert (counts.drafts, counts.draft_tokens, counts.accepted_tokens) == counted


class Draftless:
    """A drafter that finds drafts of a fixed match, or none."""

    def __init__(self, rate):
        self.rate = rate

    def extend(self, tokens):
        pass

    def draft(self, count):
        return Draft([0] * count, 4 if self.rate else 0)


def test_a_sequence_with_bad_drafts_has_none_beside_others():
    planner = DraftPlanner(None, VerificationCosts({2: [1.0 + 0.1 * count for count in range(8)]}))
    pair = [planner.sequence(Draftless(rate)) for rate in (1, 0)]
    late = []
    for step in range(100):
        planner.plan([(own, [], 100) for own in pair], 2, 100)
        if step >= 50:
            late.append([len(own.pending) for own in pair])
        for own, right in zip(pair, (True, False), strict=True):
            drafted = len(own.pending)
            own.start()
            own.verified(1 + drafted * right)
    good, bad = np.mean(late, 0)
    assert good > 5 and bad < 1
