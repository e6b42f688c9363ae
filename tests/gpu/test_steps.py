"""Engine steps: mixed, in flight, with any block size, sampled by slot.

Results are compared with transformers, and with the host's samplers on the engine's logits.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from schedule_interpreter import Interpreter
from stepping import MIXED, SAMPLED, Stepper, load, sampler_of

import llmc
from llmc import SamplingParams
from llmc.runtime.core.step import LAST, SamplingState, Step
from llmc.runtime.engines.tuning import tuning_file
from llmc.runtime.sampling.sampler import Logprobs

LENGTH = 700
DTYPES = ("float32", "float16", "bfloat16")
PROMPTS = [[5, 6, 7, 5, 6], [8] * 40, [9, 10, 6], [12], [10, 6, 7, 8, 20, 30, 3], [30, 31],
           list(range(3, 90))]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A tiny Llama and its case directories by dtype."""
    directory = tmp_path_factory.mktemp("steps")
    model = families.tiny_model("llama", max_position_embeddings=1024)
    hf = families.save(model, directory / "hf")
    for dtype in DTYPES:
        llmc.compile(hf, directory / dtype, target="cuda", dtype=dtype, max_seq_len=LENGTH)
    return directory, model


def continued(model, prompt, params, begun=()):
    """Return tokens and log-probabilities from transformers' logits and the host's sampler."""
    sampler, tokens, told = sampler_of(params, prompt), list(begun), []
    while len(tokens) < params.max_tokens + len(begun):
        logits = families.reference_logits(model, [*prompt, *tokens])[-1]
        tokens.append(sampler(logits, tokens))
        told.append(None if params.logprobs is None
                    else Logprobs.of(logits, tokens[-1], params.logprobs))
    return tokens[len(begun):], told


def assert_told(ours, wanted):
    assert (ours is None) == (wanted is None)
    if wanted is not None:
        assert abs(ours.chosen - wanted.chosen) < 1e-4
        assert [t for t, _ in ours.top] == [t for t, _ in wanted.top]
        np.testing.assert_allclose([p for _, p in ours.top], [p for _, p in wanted.top], atol=1e-4)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_logits_of_mixed_chunked_prefill_and_decode_equal_transformers(extension, family, tmp_path):
    """In 16 bits the error against float32 is at most twice that of transformers."""
    try:
        hf = families.save(families.tiny_model(family), tmp_path / "hf")
    except (KeyError, ValueError) as error:
        pytest.skip(f"this transformers has no {family}: {error}")
    length = 40
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, (3, length)).tolist()
    reads = [(20, 1, 9), *[(1, 1, 1)] * 4, (1, 25, 0), *[(1, 1, 3)] * 9, (6, 1, 0)]
    read = np.sum(reads, axis=0)
    assert (read <= length).all()
    truth = families.logits_on_gpu(hf, tokens, torch.float32)
    for dtype in DTYPES:
        llmc.compile(hf, tmp_path / dtype, target="cuda", dtype=dtype)
        ours = Stepper(load(tmp_path / dtype, block_size=8)).logits(tokens, reads)
        theirs = families.logits_on_gpu(hf, tokens, getattr(torch, dtype))
        pairs = [(own, exact[:n], other[:n])
                 for own, exact, other, n in zip(ours, truth, theirs, read, strict=True)]
        error = max(np.abs(own - exact).max() for own, exact, _ in pairs)
        allowed = 1e-5 * np.ptp(truth) if dtype == "float32" else \
            2 * max(np.abs(other - exact).max() for _, exact, other in pairs)
        assert error <= allowed, dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 64, 1024])
def test_decoding_continues_a_prefill(extension, compiled, dtype, block_size):
    """Long enough for split-KV attention."""
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, LENGTH).tolist()
    stepper = Stepper(load(compiled[0] / dtype, max_tokens=LENGTH, block_size=block_size,
                           kv_cache_tokens=4096))
    (expected,) = stepper.logits([tokens], [[350], [350]])
    first, second = stepper.logits([tokens, tokens[:-13]],
                                   [(30, 17), *[(1, 1)] * (LENGTH - 30)])
    worst = max(np.abs(first - expected).max(), np.abs(second - expected[:-13]).max())
    assert worst <= {"float32": 1e-5, "float16": 6e-3, "bfloat16": 5e-2}[dtype] * np.ptp(expected)


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("chunk", [10**6, 16, 3])
def test_tokens_do_not_depend_on_batch_chunks_or_in_flight_steps(extension, compiled, ahead, chunk):
    case, model = compiled
    params = [SamplingParams(max_tokens=9 + 5 * i) for i in range(len(PROMPTS))]
    engine = load(case / "float32", max_batch_size=3, max_tokens=64)
    done = Stepper(engine).generate(PROMPTS, params, chunk=chunk, ahead=ahead, arrive=1)
    for prompt, own, given in zip(PROMPTS, done, params, strict=True):
        assert own.tokens == continued(model, prompt, given)[0]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_every_slot_samples_with_its_parameters(extension, compiled, sampled, ahead):
    """The next sequence in the slot does too."""
    case, model = compiled
    params = [SamplingParams(**rule, **(cuts if sampled else {}), max_tokens=14 + 5 * row, seed=row)
              for row, (rule, cuts) in enumerate(zip(MIXED, SAMPLED, strict=True))]
    stepper = Stepper(load(case / "float32", max_batch_size=3))
    for order in (slice(None), slice(None, None, -1)):
        done = stepper.generate(PROMPTS, params[order], ahead=ahead, chunk=16)
        for prompt, own, given in zip(PROMPTS, done, params[order], strict=True):
            tokens, told = continued(model, prompt, given)
            assert own.tokens == tokens
            for ours, wanted in zip(own.logprobs, told, strict=True):
                assert_told(ours, wanted)


def test_a_recomputed_sequence_continues_identically(extension, compiled):
    """Penalties count its generated tokens; random numbers continue."""
    case, model = compiled
    params = [SamplingParams(max_tokens=20, temperature=0.9, seed=4, repetition_penalty=1.3,
                             presence_penalty=0.5, frequency_penalty=0.2, min_tokens=11),
              SamplingParams(max_tokens=20, bad_words=[[6, 7], [50]])]
    prompts = PROMPTS[:2]
    whole = [continued(model, prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    rest = [replace(own, max_tokens=20 - 8) for own in params]
    done = Stepper(load(case / "float32")).generate(prompts, rest,
                                                    begun=[tokens[:8] for tokens in whole])
    assert [own.tokens for own in done] == [tokens[8:] for tokens in whole]


def test_blocks_are_shared_and_copied_on_write(extension, compiled):
    """Two continuations of one prompt, the second in a copy of its last block, and candidates."""
    case, model = compiled
    engine = load(case / "float32", block_size=4)
    tokens = [5, 6, 7, 8, 9, 10]
    reading = Step.of([tokens], [0], [[70, 20]], [0], candidates=5, logits="sampled")
    first = engine.collect(engine.submit(reading))
    reference = families.reference_logits(model, tokens)[-1]
    families.assert_close(first.logits, reference[None], 1e-5)
    order = np.argsort(-reference, kind="stable")[:5]
    assert first.candidates.tokens.tolist() == [order.tolist()]
    log_probs = reference.astype(np.float64) - reference.max()
    log_probs -= np.log(np.exp(log_probs).sum())
    np.testing.assert_allclose(first.candidates.log_probs[0], log_probs[order], atol=1e-4)
    forked = Step.of([[11], [12]], [6, 6], [[70, 20], [70, 41]], [0, 1],
                     copies=np.array([[20, 41]], np.int32), candidates=2, logits="sampled")
    both = engine.collect(engine.submit(forked))
    for row, token in enumerate((11, 12)):
        expected = families.reference_logits(model, [*tokens, token])[-1]
        families.assert_close(both.logits[row], expected, 1e-5)
        assert both.candidates.tokens[row].tolist() == np.argsort(-expected)[:2].tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_prefix_shared_by_many_sequences_is_read_once(extension, tmp_path, dtype):
    """Shared by all, some or no sequences of a step, at different lengths."""
    model = families.tiny_model("llama", max_position_embeddings=1024, head_dim=64)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 dtype=dtype, max_seq_len=LENGTH)
    engine = load(tmp_path / "case", max_batch_size=96, max_tokens=LENGTH, block_size=16,
                  kv_cache_tokens=8192)
    rng, count = np.random.default_rng(1), 96
    prompts = [rng.integers(3, families.VOCAB, 656).tolist() for _ in range(2)]
    tables = [[*range(41)], [*range(41, 82)]]
    for slot, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        engine.collect(engine.submit(Step.of([prompt], [0], [table], [slot])))
    newest = rng.integers(3, families.VOCAB, count).tolist()
    allowed = {"float16": 6e-3, "bfloat16": 5e-2}[dtype]
    for whose, past in ((np.zeros(count, int), 656), ((np.arange(count) == 7).astype(int), 640),
                        (np.arange(count) % 2, 480), (np.ones(count, int), 500)):
        blocks = [[*tables[owner][:past // 16], 100 + i] for i, owner in enumerate(whose)]
        if past % 16:  # the last block is not shared
            engine.collect(engine.submit(Step.of(
                [prompts[owner][past - past % 16:past] for owner in whose],
                [past - past % 16] * count, blocks, [*range(count)])))
        step = Step.of([[token] for token in newest], [past] * count, blocks, [*range(count)],
                       logits="sampled")
        logits = engine.collect(engine.submit(step)).logits
        for i in (0, 1, 7, 8, count - 1):
            tokens = [*prompts[whose[i]][:past], newest[i]]
            expected = families.reference_logits(model, tokens)[-1]
            assert np.abs(logits[i] - expected).max() <= allowed * np.ptp(expected)


def test_a_decode_step_may_sample_some_rows(extension, compiled):
    """The other rows are prompts that continue in the next step."""
    case, model = compiled
    engine = load(case / "float32")
    states = {slot: SamplingState(sampler_of(SamplingParams(max_tokens=5), [5]))
              for slot in (2, 0, 3)}
    step = Step.of([[5], [6], [7]], [0] * 3, [[1], [2], [3]], [2, 0, 3], sample=[0, 2],
                   admit=states)
    first = engine.submit(step)
    then = engine.submit(Step.of([[LAST], [8], [LAST]], [1] * 3, [[1], [2], [3]], [2, 0, 3]))
    greedy = [continued(model, [token], SamplingParams(max_tokens=2))[0] for token in (5, 7)]
    assert engine.collect(first).tokens.tolist() == [tokens[0] for tokens in greedy]
    chosen = engine.collect(then).tokens.tolist()
    assert chosen[::2] == [tokens[1] for tokens in greedy]
    assert chosen[1] == int(families.reference_logits(model, [6, 8])[-1].argmax())


def test_a_step_of_partial_prefills_samples_nothing(extension, compiled):
    engine = load(compiled[0] / "float32")
    sampled = engine.collect(engine.submit(Step.of([[5, 6], [7, 8]], [0, 0], [[1], [2]], [0, 1],
                                                   sample=[])))
    assert not len(sampled.tokens) and not sampled.logprobs and sampled.logits is None


def test_a_slot_without_an_allowed_token_does_not_affect_others(extension, compiled):
    everything = [[token] for token in range(families.VOCAB) if token != 50]
    params = [SamplingParams(max_tokens=6, bad_words=[*everything, [50, 50, 50, 50]]),
              SamplingParams(max_tokens=6)]
    case, model = compiled
    done = Stepper(load(case / "float32")).generate([[5, 6], [7]], params)
    assert done[0].tokens[:4] == [50, 50, 50, -1]
    assert done[1].tokens == continued(model, [7], params[1])[0]


def mask_of(tokens):
    bits = np.zeros(-(-families.VOCAB // 32) * 32, bool)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def test_token_masks_restrict_sampling(extension, compiled):
    """For this step only, also if the slot's parameters forbid all allowed tokens."""
    case, model = compiled
    engine = load(case / "float32")
    params = [SamplingParams(), SamplingParams(bad_words=[[50]]), SamplingParams()]
    states = {slot: SamplingState(sampler_of(own, [5]))
              for slot, own in zip((2, 0, 3), params, strict=True)}
    step = Step.of([[5], [6], [7]], [0] * 3, [[1], [2], [3]], [2, 0, 3], sample=[0, 1, 2],
                   admit=states, masks={3: mask_of([50, 60, 61]), 0: mask_of([50])})
    tokens = engine.collect(engine.submit(step)).tokens.tolist()
    logits = [families.reference_logits(model, [token])[-1] for token in (5, 6, 7)]
    assert tokens == [int(logits[0].argmax()), -1, max((50, 60, 61), key=logits[2].__getitem__)]
    again = engine.collect(engine.submit(replace(step, admit={}, masks={}))).tokens.tolist()
    assert again[2] == int(logits[2].argmax())


def test_slot_lists_of_any_length_are_replaced(extension, compiled):
    case, model = compiled
    rng = np.random.default_rng(0)
    few = SamplingParams(max_tokens=9, bad_words=[[5]])
    many = replace(few, bad_words=[rng.integers(3, families.VOCAB, 5).tolist()
                                   for _ in range(1000)] + [[5], [6]])
    stepper = Stepper(load(case / "float32", max_batch_size=3))
    prompts = [[5, 6, 7], [7, 8], [9], [10], [11, 3]]
    params = [few, many, few, many, SamplingParams(max_tokens=9)]
    for own, prompt, given in zip(stepper.generate(prompts, params, arrive=1), prompts, params,
                                  strict=True):
        assert own.tokens == continued(model, prompt, given)[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3"])
def test_float8_caches_give_the_schedule_s_logits(extension, family, tmp_path):
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda", kv_dtype="float8_e4m3fn")
    tokens = np.random.default_rng(1).integers(3, families.VOCAB, (2, 30)).tolist()
    ours = Stepper(load(tmp_path / "case")).logits(tokens, [(20, 1), (1, 22), *[(1, 1)] * 7])
    for own, row in zip(ours, tokens, strict=True):
        families.assert_close(own, Interpreter(tmp_path / "case").run(row[:len(own)], 0), 1e-4)


def ready(compiled, **options):
    engine = load(compiled[0] / "float32", **options)
    return engine, Step.of([[5], [6, 7]], [3, 0], [[1], [2]], [1, 0])


@pytest.mark.parametrize(("changes", "match"), [
    (dict(block_tables=np.array([[1], [10**6]], np.int32)), r"block_tables\[0\] is 1000000"),
    (dict(block_tables=np.array([[1], [-1]], np.int32)), r"block_tables\[0\] is -1"),
    (dict(slots=np.array([1, 4], np.int32)), r"slots\[1\] is 4"),
    (dict(slots=np.array([1, 1], np.int32)), "slots has 1 twice"),
    (dict(past_lens=np.array([16, 0], np.int32)), "17 positions of sequence 0 exceed the 1"),
    (dict(past_lens=np.array([3, LENGTH - 1], np.int32)), f"exceed max_seq_len {LENGTH}"),
    (dict(token_ids=np.array([LAST, 6, 7]), slots=np.array([3, 0], np.int32)),
     "last one of slot 3, which has not sampled any"),
    (dict(num_decode=2), "sequence 1 of 2 decoding ones has 2 new tokens"),
    (dict(sample=np.array([1, 0], np.int32)), "sample is not ascending"),
    (dict(sample=np.array([2], np.int32)), r"sample\[0\] is 2"),
    (dict(copies=np.array([[1, 2], [3, 2]], np.int32)), "block 2 is a destination of two copies"),
    (dict(copies=np.array([[1, 2], [2, 3]], np.int32)), "block 2 is both source and destination"),
    (dict(candidates=102), "candidates is 102, expected 0"),
    (dict(masks={1: np.zeros(5, np.uint32)}), "masks of 5 words are not rows of 4"),
])
def test_a_step_with_indices_out_of_range_is_refused(extension, compiled, changes, match):
    """The engine continues unaffected."""
    engine, step = ready(compiled)
    expected = engine.collect(engine.submit(replace(step, logits="sampled"))).logits
    with pytest.raises(llmc.LlmcError, match=match):
        engine.submit(replace(step, **changes))
    assert np.array_equal(engine.collect(engine.submit(replace(step, logits="sampled"))).logits,
                          expected)


def test_too_many_in_flight_steps_are_refused(extension, compiled):
    engine, step = ready(compiled)
    tickets = [engine.submit(step) for _ in range(8)]
    with pytest.raises(llmc.LlmcError, match="step 8 cannot be submitted while step 0 is not"):
        engine.submit(step)
    for ticket in tickets:
        engine.collect(ticket)
    with pytest.raises(llmc.LlmcError, match="step 3 is not in flight"):
        engine.collect(3)


@pytest.mark.parametrize(("options", "match"), [
    (dict(block_size=12), "block_size 12 is not a power of two"),
    (dict(kv_cache_tokens=0), "kv_cache_tokens 0 is below 1"),
    (dict(gpu_memory_utilization=1.5), "gpu_memory_utilization 1.5 is not above 0"),
    (dict(kv_cache_tokens=10**12), r"1000000000000 tokens takes [\d.]+ GiB of GPU 0, which has "
                                   r"room for \d+ tokens"),
    (dict(gpu_memory_utilization=1e-6), "the weights leave GPU 0 no memory"),
    (dict(max_tokens=10**9), r"not enough device memory for .*: \d+ MiB are needed"),
])
def test_insufficient_memory_reports_the_sizes(extension, compiled, options, match):
    with pytest.raises(llmc.LlmcError, match=match):
        load(compiled[0] / "float32", **options)


def test_more_slots_than_tokens_of_a_step_load(extension, compiled):
    assert load(compiled[0] / "float32", max_batch_size=200).limits.max_slots == 200


def test_a_longer_model_takes_no_more_memory(extension, compiled):
    """Except for its block table."""
    short = load(compiled[0] / "float32", kv_cache_tokens=4096)
    assert short.limits.num_blocks == 256
    assert short._engine.bytes_allocated < 2**26


def test_kernel_timings_are_stored_with_the_case_and_reused(extension, compiled, tmp_path):
    """An unwritable directory and an invalid tuning file are not failures."""
    case = tmp_path / "case"
    shutil.copytree(compiled[0] / "float16", case)
    stepper = Stepper(load(case))
    kept = tuning_file(case).read_bytes()
    assert json.loads(kept)[extension.timed_on(0)] == [
        list(entry) for entry in map(list, stepper.engine._engine.algorithms())]
    again = load(case)
    assert tuning_file(case).read_bytes() == kept
    assert again._engine.algorithms() == stepper.engine._engine.algorithms()
    tuning_file(case).write_text(json.dumps({extension.timed_on(0): [[[1], [2]]]}))
    tokens = [own.tokens for own in Stepper(load(case)).generate(PROMPTS[:2], SamplingParams(
        max_tokens=5))]
    assert tokens == [own.tokens for own in stepper.generate(PROMPTS[:2], SamplingParams(
        max_tokens=5))]


# One file per backend; each runs the following test.
ATTENTION_BACKENDS = sorted(path.stem for path in Path(__file__).parents[2].glob(
    "csrc/plugins/common/attention_backends/*.cpp"))


def test_every_attention_backend_file_is_registered(extension):
    assert extension.attention_backends() == ATTENTION_BACKENDS != []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
def test_every_attention_backend_gives_the_same_logits(extension, compiled, backend, dtype):
    """Long prefill chunks mixed with decode."""
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, (3, 400)).tolist()
    reads = [(300, 1, 50), (1, 200, 1), (1, 1, 130)]
    truth = families.logits_on_gpu(compiled[0] / "hf", tokens, torch.float32)
    engine = load(compiled[0] / dtype, max_tokens=384, attention_backend=backend)
    near = {"float16": 6e-3, "bfloat16": 5e-2}[dtype] * np.ptp(truth)
    for ours, exact in zip(Stepper(engine).logits(tokens, reads), truth, strict=True):
        assert np.abs(ours - exact[:len(ours)]).max() <= near


@pytest.mark.parametrize(("backend", "match"), [
    ("flash", "there is no attention_backend 'flash'; there are cudnn, fastest, llmc, vanilla"),
    ("cudnn", "supports float16 and bfloat16 .* the model has dtype float32")])
def test_an_unsupported_attention_backend_is_refused(extension, compiled, backend, match):
    with pytest.raises(llmc.LlmcError, match=match):
        load(compiled[0] / "float32", attention_backend=backend)
