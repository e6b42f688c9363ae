"""Speculative decoding on a GPU: the same tokens as without, for any drafts."""

from dataclasses import replace

import families
import numpy as np
import pytest
from drafting import PARAMS, PROMPTS, TestDrafter, assert_verified, params

import llmc
from llmc.runtime.core import loop as loop_module
from llmc.runtime.core.step import LAST, SamplingState, Step, proposal
from llmc.runtime.engines.cuda import CudaEngine
from llmc.runtime.gpus import GpuReplica
from llmc.runtime.sampling.sampler import Sampler, probabilities
from llmc.runtime.speculation.ngram import NgramDrafter


@pytest.fixture(scope="module", params=["llmc", "vanilla"])
def plain(extension, request, tiny_hf, tmp_path_factory):
    """A case directory, a backend, and completions without drafts by name of parameters."""
    case = tmp_path_factory.mktemp("drafts") / "case"
    llmc.compile(tiny_hf, case, target="cuda", dtype="float32")
    with llmc.LLM(case, max_batch_size=4, attention_backend=request.param) as llm:
        return case, request.param, {name: llm.generate(PROMPTS, params(name)) for name in PARAMS}


@pytest.mark.parametrize("budget", [2048, 8])
@pytest.mark.parametrize("kind", ["right", "wrong", "random", "ngram"])
def test_tokens_do_not_depend_on_drafts(plain, kind, budget, monkeypatch):
    case, backend, expected = plain
    known = {}
    if kind != "ngram":
        monkeypatch.setattr(CudaEngine, "looks_up", False)  # the host drafts
        monkeypatch.setattr(loop_module, "NgramDrafter", lambda prompt, *_: TestDrafter(
            known[tuple(prompt)], kind, 300))
    with llmc.LLM(case, max_batch_size=4, speculate="ngram", num_speculative_tokens=3,
                  block_size=4, kv_cache_tokens=160, attention_backend=backend,
                  max_num_batched_tokens=budget) as llm:
        for name, alone in expected.items():
            known |= {own.prompt_token_ids: own.token_ids for own in alone if not own.sample}
            made = llm.generate(PROMPTS, params(name))
            assert [own.token_ids for own in made] == [own.token_ids for own in alone], name
            for own, other in zip(made, alone, strict=True):
                assert [each.chosen for each in own.logprobs or ()] == pytest.approx(
                    [each.chosen for each in other.logprobs or ()], abs=1e-4)
        metrics = llm.metrics()
    assert_verified(metrics, kind)


def test_drafts_of_prompt_lookup_are_verified_before_the_host_has_read_them(plain, monkeypatch):
    case, backend, expected = plain
    unread, real = [], GpuReplica.submit
    monkeypatch.setattr(GpuReplica, "submit", lambda self, step: (
        unread.append(int(step.unread.sum())), real(self, step))[1])
    with llmc.LLM(case, max_batch_size=4, speculate="ngram", num_speculative_tokens=3,
                  attention_backend=backend) as llm:
        made = llm.generate(PROMPTS, params("greedy"))
        metrics = llm.metrics()
    assert [own.token_ids for own in made] == [own.token_ids for own in expected["greedy"]]
    assert sum(count > 0 for count in unread) >= 4
    assert metrics["spec_decode_accepted_tokens"] > 0


def test_the_engine_looks_up_the_drafts_of_the_host(plain):
    """Prompts of few distinct tokens, then steps that verify drafts of the step in flight."""
    case, backend, _ = plain
    rng = np.random.default_rng(0)
    prompts = [(5 + rng.integers(0, 3, length)).tolist() for length in (2, 9, 40, 24)]
    drafters = [NgramDrafter(prompt) for prompt in prompts]

    def check(output, looked_up=(True, True, False, True)):
        starts = np.cumsum([0, *(output.counts if output.counts is not None else [1] * 4)])
        for slot, drafter in enumerate(drafters):
            drafter.extend(output.tokens[starts[slot]:starts[slot + 1]].tolist())
            draft = drafter.draft(3) if looked_up[slot] else None
            assert output.drafts[slot].tolist() == (draft.tokens if draft else [-1] * 3)
            assert output.matches[slot] == (draft.match if draft else 0)
        return np.diff(starts)

    def work(scheduler, engine):
        tables = [list(range(4 * slot, 4 * slot + 4)) for slot in range(4)]
        states = {slot: SamplingState(Sampler(llmc.SamplingParams(), prompt=prompt),
                                      prompt_lookup=slot != 2)
                  for slot, prompt in enumerate(prompts)}
        past = np.array([len(prompt) for prompt in prompts])
        first = engine.submit(Step.of(prompts, [0] * 4, tables, range(4), admit=states, propose=3))
        drafting = [True, True, False, True]
        for _ in range(3):  # two in flight
            order = sorted(range(4), key=lambda slot: drafting[slot])
            then = engine.submit(Step.of(
                [[LAST, *map(proposal, range(3 * drafting[slot]))] for slot in order],
                past[order], [tables[slot] for slot in order], order,
                num_drafts=[3 * drafting[slot] for slot in order], propose=3,
                unread=[0] * 4))
            check(engine.collect(first))
            output = engine.collect(then)
            counts = np.empty(4, int)
            counts[order] = output.counts
            starts = np.cumsum([0, *output.counts])
            rows = [order.index(slot) for slot in range(4)]
            output = replace(output, drafts=output.drafts[rows], matches=output.matches[rows],
                             counts=counts, tokens=np.concatenate([
                                 output.tokens[starts[row]:starts[row + 1]] for row in rows]))
            check(output)
            past += counts
            first = engine.submit(Step.of([[LAST]] * 4, past, tables, range(4), propose=3))
            past += 1
        check(engine.collect(first))

    with llmc.LLM(case, max_batch_size=4, speculate="ngram", num_speculative_tokens=3,
                  attention_backend=backend, prefix_reuse=False) as llm:
        llm._loops[0].run(work)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("past", [5, 31, 50])
def test_rows_of_drafts_have_the_logits_of_a_chunk(extension, tiny_hf, tmp_path, dtype, past):
    """Decode kernels with rows of one sequence, and several in a step, next to prefill kernels."""
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda", dtype=dtype)
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 250, past + 6).tolist() for _ in range(3)]
    state = SamplingState(Sampler(llmc.SamplingParams(logprobs=5)))

    def work(scheduler, engine):
        tables = [list(range(4 * i, 4 * i + 4)) for i in range(3)]
        for i, (row, table) in enumerate(zip(rows, tables, strict=True)):
            engine.collect(engine.submit(Step.of([row[:past - i]], [0], [table], [i],
                                                 admit={i: state})))
        made = []
        greedy = rows
        for _ in range(5):  # drafts that are right, from the answers before
            output = engine.collect(engine.submit(Step.of(
                [row[past - i:past + 4 - i] for i, row in enumerate(greedy)],
                [past - i for i in range(3)], tables, range(3), num_drafts=[3] * 3,
                logits="sampled")))
            made.append(output)
            starts = np.cumsum([0, *output.counts])
            greedy = [row[:past - i + 1] + output.tokens[starts[i]:starts[i + 1]].tolist()
                      + row[past - i + 1 + output.counts[i]:] for i, row in enumerate(greedy)]
        return made[-1], greedy

    with llmc.LLM(tmp_path / "case", max_batch_size=4, speculate="ngram",
                  num_speculative_tokens=3, prefix_reuse=False) as llm:
        output, greedy = llm._loops[0].run(work)
        assert output.counts.tolist() == [4] * 3
        for i, row in enumerate(greedy):
            logits = llm.logits(row[:past + 4 - i])[past - i:]
            np.testing.assert_allclose(output.logits[4 * i:4 * i + 4], logits, atol=0.05)
            logits -= np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) \
                + logits.max(1, keepdims=True)
            got = [each.chosen for each in output.logprobs[4 * i:4 * i + 4]]
            tokens = output.tokens[4 * i:4 * i + 4]
            np.testing.assert_allclose(got, logits[range(4), tokens], atol=0.02)


ROWS = {
    "groups_of_4": ("llama", dict(num_attention_heads=8, num_key_value_heads=2, head_dim=64)),
    "groups_of_1": ("llama", dict(num_attention_heads=4, num_key_value_heads=4, head_dim=32)),
    "groups_of_5": ("qwen3", dict(num_attention_heads=10, num_key_value_heads=2, head_dim=128)),
    "groups_of_12": ("qwen3", dict(num_attention_heads=12, num_key_value_heads=1, head_dim=80)),
    "window": ("mistral", dict(sliding_window=40)),
    "softcap": ("gemma2", dict(head_dim=256, num_attention_heads=4, num_key_value_heads=2)),
    "sinks": ("gpt_oss", {}),
    "float8_cache": ("llama", dict(num_attention_heads=8, num_key_value_heads=2, head_dim=64)),
}


@pytest.mark.parametrize("name", ROWS)
def test_any_numbers_of_drafts_at_any_positions(extension, tmp_path, name):
    """Logits of a step with drafts of several sequences, next to those of a prompt."""
    family, sizes = ROWS[name]
    hf = families.save(families.tiny_model(family, max_position_embeddings=2048, **sizes),
                       tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda", dtype="bfloat16",
                 **dict(kv_dtype="float8_e4m3fn") if name == "float8_cache" else {})
    rng = np.random.default_rng(0)
    past, drafts = [3, 17, 700, 1500, 64, 130], [0, 11, 7, 3, 1, 15]
    rows = [rng.integers(3, 100, start + count + 1).tolist()
            for start, count in zip(past, drafts, strict=True)]
    state = SamplingState(Sampler(llmc.SamplingParams()))

    def work(scheduler, engine):
        tables = [list(range(100 * i, 100 * i + 100)) for i in range(6)]
        for i, (row, start, table) in enumerate(zip(rows, past, tables, strict=True)):
            engine.collect(engine.submit(Step.of([row[:start]], [0], [table], [i],
                                                 admit={i: state})))
        return engine.collect(engine.submit(Step.of(
            [row[start:] for row, start in zip(rows, past, strict=True)], past, tables, range(6),
            num_drafts=drafts, logits="sampled"))).logits

    with llmc.LLM(tmp_path / "case", max_batch_size=8, speculate="ngram", prefix_reuse=False,
                  num_speculative_tokens=15) as llm:
        logits = llm._loops[0].run(work)
        for row, start, count in zip(rows, past, drafts, strict=True):
            own, logits = logits[:1 + count], logits[1 + count:]
            families.assert_close(own, llm.logits(row)[start:], 0.02)


def test_drafts_do_not_change_the_distribution(extension, tiny_hf, tmp_path):
    """Draws after one prompt for random drafts, by chi-square, in one step of many sequences."""
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda", dtype="float32")
    rng = np.random.default_rng(0)
    wish = dict(temperature=1.5, top_k=8, top_p=0.95, min_p=0.02)
    with llmc.LLM(tmp_path / "case", max_batch_size=16, speculate="ngram",
                  num_speculative_tokens=3) as llm:
        logits = llm.logits([5, 6, 7])[-1]
        expected = probabilities(logits, llmc.SamplingParams(**wish))
        seen = np.zeros(len(expected))

        def work(scheduler, engine):
            for trial in range(300):
                states = {slot: SamplingState(Sampler(llmc.SamplingParams(
                    seed=16 * trial + slot, **wish))) for slot in range(16)}
                output = engine.collect(engine.submit(Step.of(
                    [[5, 6, 7, *rng.integers(0, 250, 3).tolist()] for _ in range(16)], [0] * 16,
                    [[slot] for slot in range(16)], range(16), num_drafts=[3] * 16,
                    admit=states)))
                starts = np.cumsum([0, *output.counts])[:-1]
                np.add.at(seen, output.tokens[starts], 1)

        llm._loops[0].run(work)
    kept = expected > 0
    assert seen[~kept].sum() == 0
    wanted = seen.sum() * expected[kept]
    assert ((seen[kept] - wanted)**2 / wanted).sum() < 30  # 7 degrees of freedom
