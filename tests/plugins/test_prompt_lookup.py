"""Prompt lookup by the CUDA engine: its steps in NumPy, and what the engine checks of them."""

from dataclasses import replace

import pytest
from declared_programs import limits_of
from drafting import PARAMS, PROMPTS, params
from schedule_interpreter import LIMITS, interpreted

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.artifacts.program import read_chip_programs
from llmc.runtime.core.step import SamplingState, Step
from llmc.runtime.engines.cuda import build_program, declare_arenas, step_arrays
from llmc.runtime.sampling.sampler import Sampler

# As the CUDA engine's, with few tokens per step.
AHEAD = replace(LIMITS, max_tokens=32, max_slots=4, ahead=2, max_drafts=15, proposes=True,
                prompt_lookup=True, drafts_ahead=True)
LOOKUP = dict(speculate="ngram", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def case(tiny_hf, tmp_path_factory):
    path = tmp_path_factory.mktemp("lookup") / "case"
    llmc.compile(tiny_hf, path, target="cuda", dtype="float32")
    return path


@pytest.fixture(scope="module")
def plain(case):
    """Completions without drafts, by name of parameters."""
    with interpreted(case, replace(AHEAD, proposes=False, prompt_lookup=False)) as llm:
        return {name: llm.generate(PROMPTS, params(name)) for name in PARAMS}


@pytest.fixture
def steps(monkeypatch):
    """Steps of the interpreted engine."""
    seen, real = [], llmc.runtime.engines.host.HostSampling.submit
    monkeypatch.setattr(llmc.runtime.engines.host.HostSampling, "submit",
                        lambda self, step: (seen.append(step), real(self, step))[1])
    return seen


def equal(got, expected):
    assert [(own.token_ids, own.finish_reason) for own in got] == \
        [(own.token_ids, own.finish_reason) for own in expected]


def test_drafts_are_verified_before_the_host_has_read_them(case, plain, steps):
    with interpreted(case, AHEAD, **LOOKUP) as llm:
        for name, alone in plain.items():
            equal(llm.generate(PROMPTS, params(name)), alone)
        metrics = llm.metrics()
        assert llm._loops[0].run(lambda _, engine: engine.resolved) > 20
    assert metrics["spec_decode_accepted_tokens"] > 20
    assert all(step.propose is None or len(step.sample) for step in steps)


def test_drafts_that_were_not_found_are_not_counted(case, plain):
    """A completion of distinct tokens, none of them in the prompt."""
    words = dict.fromkeys(range(200, 290), 100.0)
    wish = llmc.SamplingParams(max_tokens=12, logit_bias=words, presence_penalty=2,
                               ignore_eos=True)
    with interpreted(case, AHEAD, **LOOKUP) as llm:
        own, = llm.generate([PROMPTS[1]], wish)
        metrics = llm.metrics()
        assert llm._loops[0].run(lambda _, engine: engine.resolved) > 4
    assert len({*own.token_ids}) == 12
    assert metrics["spec_decode_draft_tokens"] == metrics["spec_decode_drafts"] == 0


def test_a_prediction_is_looked_up_by_the_host(case, plain, steps):
    answer = list(plain["greedy"][0].token_ids)
    with interpreted(case, AHEAD, **LOOKUP) as llm:
        own, = llm.generate([PROMPTS[0]], replace(params("greedy"), prediction=answer))
    equal([own], plain["greedy"][:1])
    assert own.accepted_prediction_tokens > 10
    assert all(step.propose is None and not len(step.unread) for step in steps)


def test_nothing_is_looked_up_where_no_drafts_pay_off(case, plain, steps, monkeypatch):
    monkeypatch.setattr("llmc.runtime.speculation.costs.measure_costs", lambda *_, **__: {4: [1.0]})
    with interpreted(case, AHEAD, speculate="ngram") as llm:
        equal(llm.generate(PROMPTS, params("greedy")), plain["greedy"])
    assert all(step.propose is None for step in steps)


def declared(extension, case, **changes):
    manifest = read_manifest(case)
    parts = read_chip_programs(manifest, manifest.chips[0], case).parts(draft=False)
    program = declare_arenas(extension, parts, {**limits_of(manifest), **changes})
    build_program(program, parts, manifest)
    return program


@pytest.mark.parametrize(("changes", "problem"), [
    ({"prompt_lookup": True}, None), ({}, "a sequence looks up drafts, but the engine was loaded")])
def test_steps_of_sequences_that_look_up_drafts(extension, case, changes, problem):
    state = SamplingState(Sampler(llmc.SamplingParams(), prompt=[1, 2, 3]), prompt_lookup=True)
    arrays = step_arrays(Step.of([[1, 2, 3]], [0], [[1]], [2], admit={2: state}, propose=3)
                         if changes else Step.of([[1, 2, 3]], [0], [[1]], [2], admit={2: state}))
    program = declared(extension, case, **changes)
    if problem is None:
        program.check_step(8, *arrays)
        return
    with pytest.raises(extension.CudaError, match=problem):
        program.check_step(8, *arrays)
