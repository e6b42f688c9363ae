"""What an engine that chooses tokens itself is told, as far as no GPU is needed."""

import itertools

import numpy as np
import pytest

from llmc.runtime.attention.metadata import Memory, PackedBatch
from llmc.runtime.decoding.processing import LOGPROBS, BatchProcessing
from llmc.runtime.decoding.sampling import Choices, Draws, Logprobs, Sampler, SamplingParams
from llmc.runtime.engines.cuda import CudaEngine

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
    """The kernel's reading of the records, on the host."""
    record, lists = processing.rows[row], processing.lists[processing.rows[row]["lists"]:]
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
def test_a_record_says_what_the_sampler_does(generated):
    logits = np.random.default_rng(0).standard_normal(40).astype(np.float32) * 3
    made = samplers()
    processing = BatchProcessing.of([sampler.processing for sampler in made])
    for row, (sampler, prompt) in enumerate(zip(made, PROMPTS, strict=True)):
        np.testing.assert_array_equal(obey(processing, row, logits, prompt, generated),
                                      sampler.process(logits, generated), f"row {row}")


def test_nothing_is_told_where_nothing_is_asked_for():
    plain = [Sampler(SamplingParams(temperature=1.0, min_p=0.1), 0, [5], [2])] * 3
    draws = Draws.of(plain, [0, 0, 0])
    assert draws.processing is None and draws.logprobs is None and draws.prompts is None


def test_prompts_go_before_the_first_token_and_only_to_records_that_need_them():
    tokens, lengths = Draws.of(samplers(), [0] * 4).prompts
    assert tokens.tolist() == [*itertools.chain(*PROMPTS)] and lengths == [4, 9, 1, 3]
    assert Draws.of(samplers(), [1] * 4).prompts is None
    biased = Sampler(SamplingParams(logit_bias={3: 1.0}, min_tokens=2), 0, [5], [2], [[4]])
    draws = Draws.of([biased], [0])
    assert draws.processing is not None and draws.prompts is None


def test_numbers_are_no_greater_than_a_record_holds():
    many = SamplingParams(max_tokens=2**63, min_tokens=2**62, top_k=2**63, temperature=1.0)
    draws = Draws.of([Sampler(many, 0, [5], [2])], [0])
    assert draws.processing.rows["min_tokens"] == draws.top_k == 2**31 - 1


def test_choices_are_told_with_as_many_log_probabilities_as_each_asked_for():
    records = np.zeros((2, 3), LOGPROBS)
    records["chosen"] = -0.5
    records["tokens"] = np.arange(20)
    records["top"] = -np.arange(20) / 4
    choices = Choices(np.array([[5, 6, 7], [8, 9, -1]]), records)
    first, second = choices.steps([None, 0, 2])
    assert first == [(5, None), (6, Logprobs(-0.5, ())),
                     (7, Logprobs(-0.5, ((0, 0.0), (1, -0.25))))]
    assert [token for token, _ in second] == [8, 9, -1]
    plain = Choices(choices.tokens).steps([None] * 3)
    assert next(plain) == [(5, None), (6, None), (7, None)]


class Extension:
    """The extension's engine, of which only the calls are kept."""

    def __init__(self):
        self.calls, self.batch = [], 2

    def __getattr__(self, name):
        return lambda *arguments, **named: self.calls.append((name, arguments, named))

    def tokens(self, steps):
        return [7] * (steps * self.batch)

    def names(self):
        names = [(name, *arguments) if name in ("decode", "read_logprobs") else (name,)
                 for name, arguments, _ in self.calls]
        self.calls.clear()
        return [name[:2] for name in names]


@pytest.fixture
def engine():
    made = CudaEngine.__new__(CudaEngine)
    made._engine, made._errors, made._state, made._logprob_steps = Extension(), KeyError, None, 64
    made._memory, made._mem_max_seq_len = None, 32
    return made


def test_an_engine_is_told_of_a_batch_once(engine):
    """Until another sequence is in it, even one that looks the same."""
    both = [Sampler(SamplingParams(repetition_penalty=1.2, seed=1), 0, [5, 6]) for _ in range(2)]
    prompts = PackedBatch.prepare([[5, 6]] * 2, [0, 0], 3)
    engine.decode(prompts, Draws.of(both, [0, 0]), [2], 1)
    name, (first_row, _, lengths), _ = engine._engine.calls[0]
    assert (name, first_row, lengths) == ("set_history", 3, [2, 2])
    assert engine._engine.calls[2][2]["first_row"] == 3
    assert engine._engine.names() == [("set_history",), ("run",), ("begin_decode",), ("decode", 0)]
    engine._state = None
    for drawn, told in ((1, True), (5, False)):
        newest = PackedBatch.prepare([[7]] * 2, [1 + drawn] * 2)
        engine.decode(newest, Draws.of(both, [drawn] * 2), [2], 4)
        assert engine._engine.names() == [("begin_decode",)] * told + [("decode", 4)]
    another = [both[0], Sampler(both[1].params, 0, [6, 6])]
    engine.decode(PackedBatch.prepare([[7]] * 2, [10] * 2), Draws.of(another, [9, 9]), [2], 4)
    assert engine._engine.names() == [("begin_decode",), ("decode", 4)]


def test_an_engine_is_told_where_prompts_are_when_the_batch_changes(engine):
    """Starts in rows of tokens: of a row of the memory so many as the encoder takes."""
    both = [Sampler(SamplingParams(), 0, [0]) for _ in range(2)]
    memory = Memory.of([3, 1], [7, 20])

    def step(drawn, tokens, memory, sequences):
        engine.decode(PackedBatch.prepare([[7]] * len(sequences), [drawn] * len(sequences),
                                          memory=memory),
                      Draws.of(sequences, [drawn] * len(sequences)), [2], tokens)

    engine.encode(PackedBatch.prepare([[5] * 7, [6] * 20], [0, 0]), [3, 1])
    name, (*_, rows), _ = engine._engine.calls[0]
    assert name == "encode"
    assert rows.tolist() == [*range(96, 103), *range(32, 52)]
    engine._engine.calls.clear()
    step(0, 1, memory, both)
    name, (starts, lengths), _ = engine._engine.calls[0]
    assert (name, starts.tolist(), lengths.tolist()) == ("set_memory", [96, 32], [7, 20])
    assert starts.dtype == lengths.dtype == np.int32
    assert engine._engine.names() == [("set_memory",), ("begin_decode",), ("decode", 1)]
    step(1, 4, memory, both)
    assert engine._engine.names() == [("decode", 4)]
    engine._engine.batch = 1
    step(5, 4, memory.take([1]), both[1:])
    assert engine._engine.names() == [("set_memory",), ("begin_decode",), ("decode", 4)]


def test_log_probabilities_are_read_before_the_device_forgets_them(engine):
    asked = [Sampler(SamplingParams(logprobs=2)), Sampler(SamplingParams())]
    prompts = PackedBatch.prepare([[5, 6]] * 2, [0, 0])
    choices = engine.decode(prompts, Draws.of(asked, [0, 0]), [2], 150)
    assert choices.tokens.shape == choices.logprobs.shape == (150, 2)
    assert engine._engine.names() == [
        ("run",), ("begin_decode",), ("decode", 63), ("read_logprobs", 64), ("decode", 64),
        ("read_logprobs", 64), ("decode", 22), ("read_logprobs", 22)]
