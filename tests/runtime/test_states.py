"""Models with recurrent states give transformers' tokens.

Requests share prompts, are preempted, use beams, or arrive late.
"""

import families
import numpy as np
import onnx_graphsurgeon as gs
import pytest
from drafting import TestDrafter, assert_verified
from hypothesis import given
from hypothesis import strategies as st
from schedule_interpreter import interpreted

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.compiler.passes import recurrent_state
from llmc.runtime.core import loop as loop_module
from llmc.runtime.core.step import EngineLimits, SamplingState, Step
from llmc.runtime.engines import cpu
from llmc.runtime.engines.state_slots import StateSlots
from llmc.runtime.sampling.sampler import Sampler

# First: each layer has attention and two states; second: each has attention or two states.
FAMILIES = ("falcon_h1", pytest.param("kimi_linear", marks=pytest.mark.thorough))
RNG = np.random.default_rng(8)
SYSTEM = RNG.integers(3, families.VOCAB, 18).tolist()
PROMPTS = [(SYSTEM if n % 2 else []) + RNG.integers(3, families.VOCAB, length).tolist()
           for n, length in enumerate((3, 7, 1, 9, 24, 5, 12, 2))]
COUNT = 10


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return families.tiny_model(request.param)


@pytest.fixture(scope="module")
def hf(model, tmp_path_factory):
    return families.save(model, tmp_path_factory.mktemp("states") / "hf")


@pytest.fixture(scope="module")
def cases(hf, tmp_path_factory):
    return families.compile_sizes(hf, tmp_path_factory.mktemp("cases"), [1, 2])


@pytest.fixture(params=[1, 2])
def case(cases, request):
    return cases[request.param]


@pytest.fixture(scope="module")
def expected(model):
    """Return transformers' greedy tokens."""
    made = [families.greedy(model, prompt, COUNT) for prompt in PROMPTS]
    assert len({*made}) == len(made)
    return made


def tokens(count=COUNT, **params):
    return llmc.SamplingParams(max_tokens=count, ignore_eos=True, **params)


def draft(monkeypatch, expected, kind):
    """Draft for PROMPTS, whose completions are given, with a `TestDrafter`."""
    known = {tuple(prompt): own for prompt, own in zip(PROMPTS, expected, strict=True)}
    monkeypatch.setattr(loop_module, "NgramDrafter", lambda prompt, *_: TestDrafter(
        known[tuple(prompt)], kind, families.VOCAB))


@pytest.mark.parametrize("block_size", [1, 4])
def test_concurrent_requests_with_preemption_get_transformers_tokens(case, expected, block_size):
    with llmc.LLM(case, max_batch_size=3, max_num_batched_tokens=7, kv_cache_tokens=48,
                  block_size=block_size) as llm:
        got = families.ask_at_once(llm, PROMPTS, lambda index: tokens())
        assert [got[n][0].token_ids for n in range(len(PROMPTS))] == expected
        assert block_size > 1 or llm.metrics()["preemptions"] > 0


def test_shared_prefixes_are_not_cached_for_recurrent_models(case, expected):
    """KV blocks do not include the recurrent state."""
    with llmc.LLM(case, block_size=4) as llm:
        for _ in range(2):
            assert [own.token_ids for own in llm.generate(PROMPTS, tokens())] == expected
        assert llm.metrics()["cache_hits"] == 0


@pytest.mark.parametrize("budget", [4, 64])
def test_completions_of_a_prompt_continue_from_its_state(case, expected, budget, monkeypatch):
    with llmc.LLM(case, block_size=4, max_num_batched_tokens=budget, max_batch_size=4) as llm:
        read = families.steps_read(llm, monkeypatch)
        got = llm.generate([PROMPTS[5]], tokens(n=3, temperature=1.0, top_k=1))
    assert [own.token_ids for own in got] == [expected[5]] * 3
    assert sum(read) == len(PROMPTS[5]) + 2 + 3 * (COUNT - 1)


def test_completions_are_sampled_as_alone(case):
    drawn = [tokens(temperature=1.0, seed=seed, n=2) for seed in range(len(PROMPTS))]
    with llmc.LLM(case, max_batch_size=1) as llm:
        alone = [[own.token_ids for own in llm.generate([prompt], params)]
                 for prompt, params in zip(PROMPTS, drawn, strict=True)]
    with llmc.LLM(case, max_batch_size=3, kv_cache_tokens=128, block_size=4) as llm:
        got = families.ask_at_once(llm, PROMPTS, lambda index: drawn[index])
    assert [[own.token_ids for own in got[n]] for n in range(len(PROMPTS))] == alone


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_tokens_do_not_depend_on_drafts(case, expected, kind, monkeypatch):
    """With preemption, and drafts beside chunks of prompts."""
    draft(monkeypatch, expected, kind)
    with llmc.LLM(case, max_batch_size=3, max_num_batched_tokens=9, kv_cache_tokens=48,
                  block_size=1, speculate="ngram", num_speculative_tokens=3) as llm:
        got = families.ask_at_once(llm, PROMPTS, lambda index: tokens())
        assert [got[n][0].token_ids for n in range(len(PROMPTS))] == expected
        made = llm.generate([PROMPTS[5]], tokens(n=3, temperature=1.0, top_k=1))
        assert [own.token_ids for own in made] == [expected[5]] * 3
        metrics = llm.metrics()
    assert metrics["preemptions"]
    assert_verified(metrics, kind)


def test_drafts_are_not_split_into_chunks(case, expected, monkeypatch):
    """A chunk after drafts would need the state after them."""
    draft(monkeypatch, expected, "random")
    monkeypatch.setattr(cpu, "MAX_CHUNK", 3)
    with llmc.LLM(case, speculate="ngram", num_speculative_tokens=7) as llm:
        assert [own.token_ids for own in llm.generate(PROMPTS, tokens())] == expected
        assert llm.metrics()["spec_decode_accepted_tokens"]


def test_a_model_of_an_earlier_release_runs_without_drafts(hf, expected, tmp_path, monkeypatch):
    real = recurrent_state.graph_input
    monkeypatch.setattr(recurrent_state, "graph_input", lambda graph, name, shape:
                        gs.Variable.empty() if name == "commit_lens" else real(graph, name, shape))
    llmc.compile(hf, tmp_path / "case")
    with llmc.LLM(tmp_path / "case") as llm:
        got, = llm.generate([PROMPTS[0]], tokens(prediction=list(expected[0])))
    assert got.token_ids == expected[0]
    with pytest.raises(llmc.LlmcError, match="'ngram' is unsupported for this model.*; compile it "
                                             "again"):
        llmc.LLM(tmp_path / "case", speculate="ngram")


def test_drafts_follow_sampling_parameters(case):
    wish = [tokens(20, temperature=0.9, seed=7, n=2), tokens(20, repetition_penalty=1.3),
            tokens(20, logprobs=2, prompt_logprobs=1)]
    prompts = [PROMPTS[n] for n in (4, 1, 3)]
    with llmc.LLM(case, max_batch_size=4) as alone, llmc.LLM(
            case, max_batch_size=4, speculate="ngram", num_speculative_tokens=4) as llm:
        made, plain = llm.generate(prompts, wish), alone.generate(prompts, wish)
        assert [own.token_ids for own in made] == [own.token_ids for own in plain]
        assert llm.metrics()["spec_decode_accepted_tokens"]
        beams = [tokens(8, beam_width=2), tokens(8)]
        got, best = llm.generate(prompts[:2], beams), alone.generate(prompts[:2], beams)
    assert [own.token_ids for own in got] == [own.token_ids for own in best]


def test_a_prediction_saves_steps(case, expected, monkeypatch):
    index = next(n for n, own in enumerate(expected) if len({*own}) == COUNT)  # one place in it
    with llmc.LLM(case, num_speculative_tokens=4) as llm:
        read = families.steps_read(llm, monkeypatch)
        got, = llm.generate([PROMPTS[index]], tokens(prediction=list(expected[index])))
    assert got.token_ids == expected[index]
    assert read == [len(PROMPTS[index]), 1, 1 + 4, 4 + 1 + 2]  # accepted drafts are computed twice


def test_the_number_of_drafts_is_measured(cases, expected):
    with llmc.LLM(cases[1], max_batch_size=2, speculate="ngram") as llm:
        got = llm.generate(PROMPTS, tokens())
    assert [own.token_ids for own in got] == expected


@pytest.mark.parametrize("beams", [3])
def test_beams_are_transformers(case, model, beams):
    params = tokens(beam_width=beams)
    with llmc.LLM(case, block_size=4) as llm:
        got = llm.generate(PROMPTS[:4], params)
    for prompt, own in zip(PROMPTS, got, strict=False):
        assert own.token_ids == families.best_of_beams(model, prompt, beams, COUNT)


def test_a_cancelled_sequence_frees_its_state(case, expected):
    with llmc.LLM(case, max_batch_size=1) as llm:
        stream = llm.stream(PROMPTS[0], tokens(30))
        next(stream)
        stream.close()
        assert llm.generate([PROMPTS[3]], tokens())[0].token_ids == expected[3]
        assert llm.metrics()["running"] == 0


def test_a_session_continues_beside_others(case, model, expected):
    with llmc.LLM(case, max_batch_size=4) as llm:
        session = llm.session(2)
        session.extend([PROMPTS[4][:10], PROMPTS[6][:3]])
        assert llm.generate([PROMPTS[1]], tokens())[0].token_ids == expected[1]
        got = session.extend([PROMPTS[4][10:], PROMPTS[6][3:]])
    wanted = [families.reference_logits(model, PROMPTS[n])[-1] for n in (4, 6)]
    families.assert_close(got, np.stack(wanted))


def test_a_state_stays_when_the_pages_of_its_row_are_released(case, model):
    """A step of the rows around it passes it over."""
    state = SamplingState(Sampler(tokens()))
    prompt = PROMPTS[3]

    def work(scheduler, engine):
        def run(made):
            return engine.collect(engine.submit(made)).logits

        def prefill(slot, count, first):
            run(Step.of([prompt[:count]], [0], [range(first, first + count)], [slot],
                        admit={slot: state}))

        prefill(1, 4, 0)
        prefill(3, 9, 5)
        prefill(0, 4, 5)  # too many rows: that of slot 1 is released
        prefill(2, 2, 10)
        run(Step.of([[5], [6]], [4, 2], [range(5, 10), range(10, 13)], [0, 2]))
        return run(Step.of([prompt[4:5]], [4], [range(5)], [1], logits="sampled"))

    with llmc.LLM(case, max_batch_size=4, block_size=1, kv_cache_tokens=16) as llm:
        logits = llm._loops[0].run(work)
    families.assert_close(logits[0], families.reference_logits(model, prompt[:5])[-1])


def test_the_manifest_lists_the_states_of_each_chip(cases):
    manifest = read_manifest(cases[2])
    chip = manifest.chips[0]
    falcon = manifest.source.architecture.startswith("FalconH1")
    assert (manifest.dims.num_layers, len(chip.cache)) == ((3, 3) if falcon else (4, 1))
    assert [state.shape for state in chip.states] == \
        ([(3, 80), (4, 8, 16)] if falcon else [(3, 48), (2, 8, 8)]) * 3


@pytest.fixture(scope="module")
def scheduled(hf, tmp_path_factory):
    """Programs for GPUs, in float32."""
    case = tmp_path_factory.mktemp("scheduled") / "case"
    llmc.compile(hf, case, target="cuda")
    return case


@pytest.mark.parametrize(("blocks", "block_size", "slots"), [(48, 1, 3), (64, 4, 4)])
def test_a_program_stores_states_by_slot(scheduled, model, expected, blocks, block_size, slots):
    """NumPy interprets the program on states that are NaN before writing.

    Requests are preempted, have several completions, or use beams.
    """
    limits = EngineLimits(blocks, block_size, 16, slots, 512, 2, keeps_states=True)
    with interpreted(scheduled, limits) as llm:
        got = families.ask_at_once(llm, PROMPTS, lambda index: tokens())
        assert [got[n][0].token_ids for n in range(len(PROMPTS))] == expected
        made = llm.generate([PROMPTS[5]], tokens(n=3, temperature=1.0, top_k=1))
        assert [own.token_ids for own in made] == [expected[5]] * 3
        best, = llm.generate(PROMPTS[:1], tokens(5, beam_width=3))
    assert best.token_ids == families.best_of_beams(model, PROMPTS[0], 3, 5)


def test_a_program_stores_states_before_drafts(scheduled, expected, monkeypatch):
    draft(monkeypatch, expected, "random")
    limits = EngineLimits(48, 1, 16, 3, 512, 2, max_drafts=4, keeps_states=True)
    with interpreted(scheduled, limits, speculate="ngram", num_speculative_tokens=4) as llm:
        got = families.ask_at_once(llm, PROMPTS, lambda index: tokens())
        assert [got[n][0].token_ids for n in range(len(PROMPTS))] == expected
        assert llm.metrics()["spec_decode_accepted_tokens"]


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=6))
def test_a_state_follows_its_sequence(steps):
    """In each step slot i continues from slot `parents[i]`, as beams do."""
    slots = StateSlots(EngineLimits(64, 2, 64, 4, 64, 1, keeps_states=True))
    states = np.full((4, 2), -1)  # of each: the slot and the step that wrote it
    tables = [[4 * slot + place for place in range(4)] for slot in range(4)]

    def run(step, number):
        rows, copies = slots.place(step)
        assert not {*copies[:, 0].tolist()} & {*copies[:, 1].tolist()}
        states[copies[:, 1]] = states[copies[:, 0]]
        before = states[rows].copy()
        states[rows] = [(slot, number) for slot in step.slots.tolist()]
        return before

    run(Step.of([[1]] * 4, [0] * 4, tables, range(4)), 0)
    free = [*range(16, 64)]
    for number, parents in enumerate(steps, 1):
        full = number % 2 == 0  # the parent's last block is full, and shared
        copies, tables_now = [], []
        for parent in parents:
            table = list(tables[parent])
            place = number // 2 if full else (number - 1) // 2
            new = free.pop(0) if free else 0
            if not full:
                copies.append((table[place], new))
            table[place] = new
            tables_now.append(table)
        tables = tables_now
        if not free:
            return
        before = run(Step.of([[1]] * 4, [number] * 4, tables, range(4),
                             copies=np.array(copies, np.int32).reshape(-1, 2)), number)
        assert before.tolist() == [[parent, number - 1] for parent in parents]
