"""Whole models on the CUDA engine, compared with transformers, itself and the CPU target."""

import dataclasses

import families
import numpy as np
import pytest
import stepping
import torch
import two_models
from stepping import MIXED, SAMPLED

import llmc
from llmc.runtime.core.step import Step

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
def test_decoding_continues_a_prefill(extension, compiled, dtype):
    """Long enough for split-KV attention."""
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


def same_completions(actual, expected):
    """Assert equal tokens, texts and finish reasons, and log-probabilities within rounding."""
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
def test_every_sampling_parameter_matches_the_cpu(extension, compiled, check_step, sampled):
    """One parameter set per prompt, all in one batch, whose rows move as others finish.

    Prompts have one token, and completions different lengths."""
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


@pytest.mark.parametrize("check_step", [1, 8])
def test_a_sequence_without_an_allowed_token_raises_an_llmc_error(extension, compiled, check_step):
    everything = [[token] for token in range(families.VOCAB) if token != 50]
    params = llmc.SamplingParams(max_tokens=20, bad_words=[*everything, [50, 50, 50, 50]],
                                 ignore_eos=True)
    with llmc.LLM(compiled / "float32", check_step=check_step) as llm:
        with pytest.raises(llmc.LlmcError, match="^no token is allowed after 3 generated ones"):
            llm.generate([[5, 6]], params)
        ended = dataclasses.replace(params, max_tokens=3)
        assert llm.generate([[5, 6]], ended)[0].token_ids == (50, 50, 50)


def test_logprobs_beyond_the_device_limit_are_refused(extension, compiled):
    with llmc.LLM(compiled / "float32") as llm, \
            pytest.raises(llmc.LlmcError, match="logprobs 21 exceeds 20, the maximum"):
        llm.generate([[5]], llmc.SamplingParams(logprobs=21))


def test_out_of_memory_reports_the_sizes(extension, compiled):
    with pytest.raises(llmc.LlmcError, match=r"not enough device memory for .*: \d+ MiB"):
        llmc.LLM(compiled / "float32", max_num_batched_tokens=10**8)


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in turn"])
def test_two_models_give_the_same_tokens_as_each_alone(extension, compiled, at_once):
    two_models.check(compiled / "float16", compiled / "bfloat16", at_once=at_once)


@pytest.fixture
def engine(extension, compiled):
    return stepping.load(compiled / "float32")


@pytest.mark.parametrize(("call", "match"), [
    (lambda e: e.load_weight(10**6, np.zeros(4, np.uint8)), "tensor 1000000 does not exist"),
    (lambda e: e.load_weight(0, np.zeros(4, np.uint8)), "tensor 0 is not a weight"),
    (lambda e: e.watch([10**6]), "does not exist"), (lambda e: e.watch([0]), "is not a value"),
    (lambda e: e.read_watched(0, np.empty(1, np.float32)), "was not watched"),
    (lambda e: e.allocate(4), "the KV cache is already allocated"),
    (lambda e: e.warm([10**6], False, False), "exceeds the engine's limits"),
    (lambda e: e.collect(3), "step 3 is not in flight"),
    (lambda e: e.encode(np.zeros(1, np.int64), np.empty(0, np.uint8), np.zeros(1, np.int64),
                        np.array([0, 1], np.int32), np.zeros(1, np.int64)), "has no encoder"),
    (lambda e: e.join(b"short", 0, 1, "nccl"), "id has the wrong size"),
    (lambda e: e.join(bytes(128), 1, 1, "nccl"), "rank 1 is not below"),
])
def test_invalid_engine_calls_are_refused(extension, engine, call, match):
    """The engine continues unaffected."""
    step = Step.of([[5, 6, 7]], [0], [[2]], [0], logits="all")
    expected = engine.collect(engine.submit(step)).logits
    with pytest.raises(extension.CudaError, match=match):
        call(engine._engine)
    assert np.array_equal(engine.collect(engine.submit(step)).logits, expected)
