"""Whole models on the engine: against transformers, itself, and the CPU target."""

import dataclasses

import families
import numpy as np
import pytest
import torch
import two_models

import llmc
from llmc.runtime.attention.metadata import PackedBatch
from llmc.runtime.decoding.processing import LOGPROBS, PROCESSING
from llmc.runtime.engines.cuda import CudaEngine

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LENGTH = 700


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A tiny Llama and its case directories by dtype."""
    directory = tmp_path_factory.mktemp("engine")
    model = families.tiny_model("llama", max_position_embeddings=1024)
    hf = families.save(model, directory / "hf")
    for dtype in DTYPES:
        llmc.compile(hf, directory / dtype, target="cuda", dtype=dtype, max_seq_len=LENGTH)
    llmc.compile(hf, directory / "cpu", max_seq_len=LENGTH)
    return directory


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_continues_what_a_prompt_began(extension, compiled, dtype):
    """Long enough that attention divides a sequence among blocks."""
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, LENGTH).tolist()
    with llmc.LLM(compiled / dtype) as llm:
        expected = llm.logits(tokens)
        session = llm.session(2)
        session.extend([tokens[:30], tokens[:17]])
        worst = 0.0
        for past in range(30, LENGTH):
            rows = session.extend([[tokens[past]], [tokens[past - 13]]])
            worst = max(worst, np.abs(rows - expected[[past, past - 13]]).max())
    assert worst <= {"float32": 1e-5, "float16": 6e-3, "bfloat16": 5e-2}[dtype] * np.ptp(expected)


@pytest.mark.parametrize(("check_step", "skip_step"), [(1, 0), (7, 0), (64, 0), (4, 30)])
@pytest.mark.parametrize("sampling", [{}, dict(temperature=0.8, top_k=40, top_p=0.9, seed=5)],
                         ids=["greedy", "sampled"])
def test_tokens_are_the_cpu_target_s_for_every_setting(extension, compiled, check_step, skip_step,
                                                       sampling):
    prompts = [[5, 6, 7], [8] * 40, [9, 10]]
    params = llmc.SamplingParams(max_tokens=50, ignore_eos=True, **sampling)
    with llmc.LLM(compiled / "cpu") as llm:
        expected = llm.generate(prompts, params)
        end = expected[0].token_ids[20]
    with llmc.LLM(compiled / "float32", check_step=check_step, skip_step=skip_step,
                  max_batch_size=2) as llm:
        assert llm.generate(prompts, params) == expected
        object.__setattr__(llm.manifest.tokenizer, "eos_token_ids", (end,))
        ending = dataclasses.replace(params, ignore_eos=False)
        for result, whole in zip(llm.generate(prompts, ending), expected, strict=True):
            wanted = list(whole.token_ids)
            stop = wanted.index(end) + 1 if end in wanted else len(wanted)
            assert list(result.token_ids) == wanted[:stop]


MIXED = [
    dict(), dict(repetition_penalty=1.4), dict(presence_penalty=0.8, frequency_penalty=0.4),
    dict(logit_bias={7: 3.0, 9: -2.5, 11: float("-inf")}, logprobs=3),
    dict(min_tokens=12, logprobs=0), dict(bad_words=[[5], [8, 8], [10, 6, 7]], logprobs=20),
    dict(repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=0.3, min_tokens=4,
         bad_words=[[3, 4], [30]], logit_bias={20: 1.5}, logprobs=5)]
SAMPLED = [dict(temperature=0.9, min_p=0.02), dict(temperature=1.2, typical_p=0.8),
           dict(temperature=0.8, top_k=30, top_p=0.9), dict(temperature=1.0), dict(),
           dict(temperature=0.7, top_k=50, top_p=0.95, min_p=0.01, typical_p=0.9),
           dict(temperature=1.5, top_p=0.8)]


def same_completions(actual, expected):
    """The same tokens, texts and reasons, and log-probabilities that differ by rounding."""
    for ours, wanted in zip(actual, expected, strict=True):
        what = f"prompt {wanted.index}, completion {wanted.sample}"
        assert ours.token_ids == wanted.token_ids, what
        assert ours.finish_reason == wanted.finish_reason, what
        assert (ours.logprobs is None) == (wanted.logprobs is None), what
        for place, (a, b) in enumerate(zip(ours.logprobs or (), wanted.logprobs or (),
                                           strict=True)):
            assert abs(a.chosen - b.chosen) < 1e-4, f"{what}, token {place}"
            assert [t for t, _ in a.top] == [t for t, _ in b.top], f"{what}, token {place}"
            np.testing.assert_allclose([p for _, p in a.top], [p for _, p in b.top], atol=1e-4,
                                       err_msg=f"{what}, token {place}")
        if wanted.logprobs:
            assert abs(ours.cumulative_logprob - wanted.cumulative_logprob) < 1e-2


@pytest.mark.parametrize("check_step", [1, 3, 8])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_every_parameter_does_what_it_does_on_the_cpu(extension, compiled, check_step, sampled):
    """One parameter set per prompt, all in one batch, whose rows move as others end; prompts of one
    token, and lengths that end at different steps."""
    prompts = [[5, 6, 7, 5, 6], [8] * 40, [9, 10, 6], [12], [10, 6, 7, 8, 20, 30, 3], [30, 31],
               list(range(3, 90))]
    params = [llmc.SamplingParams(**rule, **(cuts if sampled else {}), max_tokens=14 + 5 * row,
                                  seed=row, ignore_eos=False)
              for row, (rule, cuts) in enumerate(zip(MIXED, SAMPLED, strict=True))]
    more = [llmc.SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=9, logprobs=2,
                                repetition_penalty=1.2)]
    results = {}
    for name, options in (("cpu", {}), ("float32", dict(check_step=check_step))):
        with llmc.LLM(compiled / name, max_batch_size=3, **options) as llm:
            greedy = llm.generate(prompts, llmc.SamplingParams(max_tokens=25, ignore_eos=True))
            object.__setattr__(llm.manifest.tokenizer, "eos_token_ids",
                               (greedy[0].token_ids[7], greedy[3].token_ids[3]))
            results[name] = (greedy, llm.generate(prompts, params),
                             llm.generate(prompts[:1], more),
                             llm.generate(prompts[::-1], params[::-1]),
                             llm.generate(prompts, llmc.SamplingParams(max_tokens=25)))
    for ours, expected in zip(results["float32"], results["cpu"], strict=True):
        same_completions(ours, expected)


def test_log_probabilities_of_many_steps_at_once(extension, compiled):
    """More steps between two looks than the device keeps log-probabilities of."""
    params = llmc.SamplingParams(max_tokens=180, logprobs=2, ignore_eos=True)
    with llmc.LLM(compiled / "cpu") as llm:
        expected = llm.generate([[5, 6], [7]], params)
    with llmc.LLM(compiled / "float32", check_step=100, skip_step=150) as llm:
        same_completions(llm.generate([[5, 6], [7]], params), expected)


def test_longer_lists_than_before_move_to_new_memory(extension, compiled):
    """The captured graphs know the old address."""
    rng = np.random.default_rng(0)
    few = llmc.SamplingParams(max_tokens=9, bad_words=[[5]], ignore_eos=True)
    many = dataclasses.replace(few, bad_words=[
        rng.integers(3, families.VOCAB, 5).tolist() for _ in range(4000)] + [[5], [6]])
    results = []
    for name in ("cpu", "float32"):
        with llmc.LLM(compiled / name) as llm:
            results.append([llm.generate([[5, 6, 7]], params) for params in (few, many, few)])
    for ours, expected in zip(*results[::-1], strict=True):
        same_completions(ours, expected)


@pytest.mark.parametrize("check_step", [1, 8])
def test_a_sequence_without_an_allowed_token_is_one_sentence(extension, compiled, check_step):
    everything = [[token] for token in range(families.VOCAB) if token != 50]
    params = llmc.SamplingParams(max_tokens=20, bad_words=[*everything, [50, 50, 50, 50]],
                                 ignore_eos=True)
    with llmc.LLM(compiled / "float32", check_step=check_step) as llm:
        with pytest.raises(llmc.LlmcError, match="^no token is allowed after 3 generated ones"):
            llm.generate([[5, 6]], params)
        ended = dataclasses.replace(params, max_tokens=3)
        assert llm.generate([[5, 6]], ended)[0].token_ids == (50, 50, 50)


def test_more_log_probabilities_than_the_device_finds_are_refused(extension, compiled):
    with llmc.LLM(compiled / "float32") as llm, \
            pytest.raises(llmc.LlmcError, match="logprobs 21 exceeds 20, the most where GPUs"):
        llm.generate([[5]], llmc.SamplingParams(logprobs=21))


def test_too_little_memory_is_said_in_numbers(extension, compiled):
    with pytest.raises(llmc.LlmcError, match=r"no device memory for .*: \d+ MiB are needed"):
        llmc.LLM(compiled / "float32", max_batch_size=10**7)


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in turn"])
def test_two_models_do_what_each_does_alone(extension, compiled, at_once):
    searching = compiled / "beams"
    if not searching.exists():
        llmc.compile(compiled / "hf", searching, target="cuda", dtype="float16",
                     max_seq_len=LENGTH, max_beam_width=4)
    two_models.check(compiled / "float16", searching, at_once=at_once)


@pytest.fixture
def engine(extension, compiled):
    manifest = llmc.LLM(compiled / "float32").manifest
    return CudaEngine(manifest, manifest.chips[0], compiled / "float32", 0, 4, 128)


def begin(engine, batch=2, **changes):
    """The extension's begin_decode, as for so many sequences that are greedy."""
    given = {"tokens": np.full(batch, 5), "past_lens": np.full(batch, 3, np.int32),
             "temperature": np.zeros(batch, np.float32), "top_k": np.zeros(batch, np.int32),
             "top_p": np.ones(batch, np.float32), "min_p": np.zeros(batch, np.float32),
             "typical_p": np.ones(batch, np.float32), "seed": np.zeros(batch, np.uint64),
             "drawn": np.zeros(batch, np.int64), "end_ids": []}
    engine._engine.begin_decode(**{**given, **changes})


def processing(numbers=(), /, **changes):
    """What is done to the logits of two sequences; the second has these sizes."""
    rows = np.zeros(2, PROCESSING)
    rows["repetition"] = 1
    for name, value in changes.items():
        rows[name][1] = value
    return {"processing": rows.view(np.uint8), "lists": np.array(numbers, np.int32)}


@pytest.mark.parametrize(("changes", "match"), [
    ({"past_lens": np.array([3, LENGTH], np.int32)}, f"{LENGTH} positions of a sequence are no"),
    ({"past_lens": np.array([3, -1], np.int32)}, "-1 positions of a sequence"),
    ({"tokens": np.full(1, 5)}, "tokens has 1 elements, expected 2"),
    ({"tokens": np.empty(0, np.int64)}, "the last step made 0 rows of logits for 2 sequences"),
    ({"seed": np.zeros(1, np.uint64)}, "seed has 1 elements, expected 2"),
    ({"drawn": np.zeros(3, np.int64)}, "drawn has 3 elements, expected 2"),
    ({"first_row": 3}, "exceeds max_batch_size 4"), ({"end_ids": [1] * 65}, "more than 64 end"),
    ({"logprobs": np.array([1, 21], np.int32)}, "log-probabilities of 21 tokens exceed 20"),
    ({"logprobs": np.array([1], np.int32)}, "logprobs has 1 elements, expected 2"),
    (processing(num_biases=1), "lists of 2 numbers exceed the 0 that are there"),
    (processing([1, 2], num_biases=1, lists=1), "lists of 2 numbers exceed the 1"),
    (processing([101, 0], num_biases=1), "names token 101, the vocabulary has 101"),
    (processing([-1], num_ends=1), "names token -1"),
    (processing(num_forced=-1), "has a negative size"),
    (processing([2, 2], num_words=1), "bad words are not in its lists"),
    (processing([2, 9, 5], num_words=1), "bad words are not in its lists"),
    (processing([2, 3, 999], num_words=1), "names token 999"),
    ({"processing": np.zeros(48, np.uint8), "lists": np.zeros(0, np.int32)},
     "processing has 48 elements, expected 96"),
    ({"processing": processing()["processing"]}, "processing and its lists come together"),
])
def test_what_decoding_cannot_begin_with(extension, engine, changes, match):
    with pytest.raises(extension.CudaError, match=match):
        begin(engine, **changes)
    with pytest.raises(extension.CudaError, match="there is nothing to go on with"):
        engine._engine.decode(1)
    begin(engine)
    engine._engine.decode(2)
    assert len(engine._engine.tokens(2)) == 4


@pytest.mark.parametrize(("call", "match"), [
    (lambda e: e.load_weight(10**6, np.zeros(4, np.uint8)), "there is no tensor 1000000"),
    (lambda e: e.load_weight(0, np.zeros(4, np.uint8)), "tensor 0 is no weight"),
    (lambda e: e.read_logits(np.empty((2, 101), np.float32)), "202 elements, expected 101"),
    (lambda e: e.watch([10**6]), "there is no tensor"), (lambda e: e.watch([0]), "is no value"),
    (lambda e: e.read_watched(0, np.empty(1, np.float32)), "was not watched"),
    (lambda e: e.copy_row(0, 4, 1), "cache rows from 4 on exceeds max_batch_size 4"),
    (lambda e: e.copy_row(-1, 0, 1), "cache rows from -1"),
    (lambda e: e.copy_row(0, 1, LENGTH + 1), f"has not {LENGTH + 1} positions"),
    (lambda e: e.set_history(3, np.zeros(2, np.int32), [1, 1]), "exceeds max_batch_size 4"),
    (lambda e: e.set_history(0, np.zeros(2, np.int32), [1, 2]), "2 elements, expected 3"),
    (lambda e: e.set_history(0, np.array([101], np.int32), [1]), "token 101 of a prompt"),
    (lambda e: e.set_history(0, np.zeros(0, np.int32), [-1]), "a prompt of -1 tokens"),
    (lambda e: e.set_memory(np.zeros(1, np.int32), np.ones(1, np.int32)), "has no encoder"),
    (lambda e: e.encode(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([0, 1], np.int32),
                        np.zeros(1, np.int64)), "has no encoder"),
    (lambda e: e.candidates(np.empty((2, 3), np.int32), np.empty((2, 3), np.float32)),
     "candidates of 2 rows; the last step made 1"),
    (lambda e: e.candidates(np.empty((1, 3), np.int32), np.empty((1, 2), np.float32)),
     r"are not in two arrays \[rows, count\]"),
    (lambda e: e.candidates(np.empty((1, 102), np.int32), np.empty((1, 102), np.float32)),
     "102 candidates are not from 1"),
    (lambda e: e.follow(np.zeros((1, 1), np.int64), *[np.zeros((1, 1), np.int32)] * 3,
                        np.empty((1, 1), np.int32), np.empty((1, 1), np.float32)),
     "not compiled for beam search"),
    (lambda e: e.tokens(1), "there were not that many steps"),
    (lambda e: e.read_logprobs(1, np.empty(164, np.uint8)), "no log-probabilities were asked for"),
    (lambda e: e.join(b"short", 0, 1), "id is broken"),
    (lambda e: e.join(bytes(128), 1, 1), "there is no rank 1 of 1"),
])
def test_what_an_engine_is_asked_wrongly(extension, engine, call, match):
    """And it goes on as before."""
    batch = PackedBatch.prepare([[5, 6, 7]], [0])
    expected = engine.run(batch)
    with pytest.raises(extension.CudaError, match=match):
        call(engine._engine)
    assert np.array_equal(engine.run(batch), expected)


def test_log_probabilities_go_where_there_is_room(extension, engine):
    begin(engine, logprobs=np.array([1, -1], np.int32))
    engine._engine.decode(2)
    for size in (3, 5):
        with pytest.raises(extension.CudaError, match=f"has {size} elements, expected 4"):
            engine._engine.read_logprobs(2, np.empty(size * LOGPROBS.itemsize, np.uint8))
    engine._engine.read_logprobs(2, np.empty(4 * LOGPROBS.itemsize, np.uint8))


def test_tokens_outside_the_vocabulary_are_rows_of_zeros(engine):
    """On the device, whatever their number is."""
    for token in (-1, families.VOCAB, 2**31, -2**62, 2**62):
        assert np.isfinite(engine.run(PackedBatch.prepare([[5, token, 6]], [0]))).all()
