"""Encoder-decoder models on GPUs: the tokens of the cpu target, the logits of transformers."""

import copy
from dataclasses import replace

import families
import numpy as np
import pytest
import torch
from stepping import load

import llmc
from llmc import SamplingParams
from llmc.artifacts.manifest import Target
from llmc.compiler.options import CompileOptions
from llmc.runtime.core.step import EncoderOutputs, Step

NAMES = [*families.ENCODER_DECODERS, *families.UNPLANNED_ENCODER_DECODERS]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LENGTH, READ = 20, (7, 1, 4)
FORCED = {"forced_bos_token_id": 17, "forced_eos_token_id": 2, "bad_words_ids": [[9], [17, 30]]}


def prompts(seed, lengths=(40, 7, 23)):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 100, length).tolist() for length in lengths]


def compile_for(raw, target, case, dtype="float32", tp_size=1):
    families.write_encoder_decoder(raw, case, Target(kind=target), CompileOptions(dtype=dtype),
                                   tp_size)
    return case


@pytest.fixture(scope="module")
def cases(encoder_decoder, tmp_path_factory):
    """Factory by family name: cases for the cpu target and, in float32, for GPUs."""
    made = {}

    def make(name):
        if name not in made:
            _, raw, host = encoder_decoder(name)
            path = tmp_path_factory.mktemp(name)
            made[name] = host["tp1"], compile_for(raw, "cuda", path / "cuda")
        return made[name]
    return make


def assert_same(cases, requests, batch, **options):
    """Assert that both targets generate the same for all parameters."""
    host, device = cases
    with llmc.LLM(host) as llm:
        expected = [llm.generate(batch, request) for request in requests]
    with llmc.LLM(device, **options) as llm:
        for request, wanted in zip(requests, expected, strict=True):
            got = llm.generate(batch, request)
            assert [c.token_ids for c in got] == [c.token_ids for c in wanted], request
            assert [c.text for c in got] == [c.text for c in wanted]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check_step", [1, 8])
def test_tokens_equal_those_of_the_cpu_target(extension, name, check_step, cases):
    requests = [SamplingParams(max_tokens=16), SamplingParams(max_tokens=10, beam_width=3),
                SamplingParams(max_tokens=12, beam_width=4, length_penalty=2.0),
                SamplingParams(max_tokens=16, ignore_eos=True)]
    assert_same(cases(name), requests, prompts(0), check_step=check_step)
    assert_same(cases(name), requests[:2], prompts(1)[:1], check_step=check_step)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_waiting_prompts_reuse_freed_rows(extension, name, cases):
    """More prompts than rows, with different lengths and shared completions."""
    batch = [row for seed in range(3) for row in prompts(seed)]
    requests = [[SamplingParams(max_tokens=10 - i) for i in range(9)],
                SamplingParams(max_tokens=5, temperature=1.2, top_p=0.9, n=3, seed=1),
                SamplingParams(max_tokens=9, repetition_penalty=1.7, min_tokens=4),
                SamplingParams(max_tokens=6, beam_width=2),
                SamplingParams(max_tokens=6, beam_width=2, repetition_penalty=1.3)]
    assert_same(cases(name), requests, batch, max_batch_size=4, check_step=3)


@pytest.mark.parametrize("check_step", [1, 8])
def test_forced_tokens_of_the_generation_config(extension, check_step, encoder_decoder, tmp_path):
    _, raw, _ = encoder_decoder("bart")
    forcing = replace(raw, generation={**raw.generation, **FORCED})
    both = [compile_for(forcing, target, tmp_path / target) for target in ("cpu", "cuda")]
    requests = [SamplingParams(max_tokens=10), SamplingParams(max_tokens=1),
                SamplingParams(max_tokens=10, temperature=1.5, seed=3, n=2),
                SamplingParams(max_tokens=10, ignore_eos=True),
                SamplingParams(max_tokens=10, beam_width=3)]
    assert_same(both, requests, prompts(0), check_step=check_step)
    with llmc.LLM(both[1], check_step=check_step) as llm:
        for completion in llm.generate(prompts(0), SamplingParams(max_tokens=10)):
            assert completion.token_ids[0] == 17 and completion.token_ids[-1] == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_steps_that_encode_and_decode_together_give_transformers_logits(extension, name, dtype,
                                                                        encoder_decoder, tmp_path):
    """Prompts are encoded when their sequences start; two sequences share the last one."""
    model, raw, _ = encoder_decoder(name)
    sources = prompts(3, (60, 7, 23))
    rows = prompts(4, (12,) * 4)
    truth, theirs = (reference(model, [*sources, sources[-1]], rows, kind)
                     for kind in (torch.float32, DTYPES[dtype]))
    compile_for(raw, "cuda", tmp_path / "case", dtype)
    engine = load(tmp_path / "case", max_tokens=64, block_size=4)
    where, lens = [2, 0, 3, 3], [60, 7, 23, 23]
    tables = [[b, 4 + b, 8 + b] for b in range(4)]
    # By step: the sequences and their numbers of tokens.
    plan = [([0], [5]), ([0, 1], [1, 3]), ([0, 2, 1, 3], [1, 1, 2, 4]),
            ([1, 0, 3, 2], [1, 1, 1, 6])]
    past, error = [0] * 4, 0.0
    for order, counts in plan:
        fresh = {where[b]: sources[min(b, 2)] for b in order if not past[b]}
        made = engine.collect(engine.submit(Step.of(
            [rows[b][past[b]:past[b] + n] for b, n in zip(order, counts, strict=True)],
            [past[b] for b in order], [tables[b] for b in order], order, logits="all", encode=fresh,
            memory=EncoderOutputs.of([where[b] for b in order], [lens[b] for b in order]))))
        start = 0
        for b, n in zip(order, counts, strict=True):
            error = max(error, np.abs(made.logits[start:start + n]
                                      - truth[b][past[b]:past[b] + n]).max())
            start, past[b] = start + n, past[b] + n
    allowed = 5e-4 * np.ptp(truth) if dtype == "float32" else 2 * np.abs(theirs - truth).max()
    assert error <= allowed


def test_log_probabilities_of_an_encoder_decoder(extension, cases):
    params = SamplingParams(max_tokens=6, logprobs=3)
    found = []
    for case in cases("marian"):
        with llmc.LLM(case) as llm:
            found.append(llm.generate(prompts(2), params))
    for mine, wanted in zip(*reversed(found), strict=True):
        assert mine.prompt_token_ids == wanted.prompt_token_ids
        np.testing.assert_allclose([p.chosen for p in mine.logprobs],
                                   [p.chosen for p in wanted.logprobs], rtol=1e-3, atol=1e-4)


def reference(model, sources, rows, dtype):
    """transformers' logits, float32 [len(rows), LENGTH, vocab], computed in `dtype`."""
    model = copy.deepcopy(model).to(dtype).cuda()
    with torch.no_grad():
        return np.stack([model(
            input_ids=torch.tensor([source]).cuda(), decoder_input_ids=torch.tensor([row]).cuda(),
            use_cache=False).logits[0].float().cpu().numpy()
            for source, row in zip(sources, rows, strict=True)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_transformers(extension, name, dtype, encoder_decoder, tmp_path):
    """In 16 bits the error against float32 is at most twice that of transformers.

    T5 does not scale its scores, which amplifies float32 rounding.
    """
    model, raw, _ = encoder_decoder(name)
    sources = prompts(3, (60, 7, 23))
    rows = prompts(4, (LENGTH,) * 3)
    truth = reference(model, sources, rows, torch.float32)
    with llmc.LLM(compile_for(raw, "cuda", tmp_path / "case", dtype)) as llm:
        session = llm.session(3, sources)
        steps = [session.extend([row[:n] for row, n in zip(rows, READ, strict=True)])]
        for step in range(LENGTH - max(READ)):
            steps.append(session.extend([[row[n + step]]
                                         for row, n in zip(rows, READ, strict=True)]))
        whole = llm.logits(rows[0], sources[0])
    ends = [np.arange(n - 1, n + LENGTH - max(READ)) for n in READ]
    theirs = reference(model, sources, rows, DTYPES[dtype])
    allowed = 5e-4 * np.ptp(truth) if dtype == "float32" else 2 * np.abs(theirs - truth).max()
    ours = np.stack(steps, 1)
    exact = np.stack([x[end] for x, end in zip(truth, ends, strict=True)])
    assert np.abs(ours - exact).max() <= allowed
    assert np.abs(whole - truth[0]).max() <= allowed


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
@pytest.mark.parametrize("name", ["t5", "marian"])
def test_two_ranks_generate_the_cpu_target_s_tokens(extension, name, encoder_decoder, cases,
                                                    tmp_path):
    _, raw, _ = encoder_decoder(name)
    two = compile_for(raw, "cuda", tmp_path / "tp2", tp_size=2)
    assert_same((cases(name)[0], two), [SamplingParams(max_tokens=12),
                                        SamplingParams(max_tokens=9, beam_width=3)], prompts(0))
