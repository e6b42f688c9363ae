"""Draft models as programs of the CUDA engine, run in NumPy, and what the engine checks of them."""

import shutil
from dataclasses import replace

import families
import numpy as np
import pytest
from declared_programs import build, schedules_of
from draft_models import (
    PROMPTS,
    assert_drafts,
    assert_drafts_of_prompts,
    assistant_drafts,
    compile_assistant,
    dflash_drafts,
    drafts_of_steps,
    equal,
    greedy,
    mtp_drafts,
    params,
    save_dflash,
    save_recurrent,
    save_with_mtp,
)
from schedule_interpreter import LIMITS, interpreted

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.artifacts.program import Program, read_chip_programs, read_program
from llmc.errors import LlmcError
from llmc.runtime.core.step import LAST, Step, proposal
from llmc.runtime.engines.cuda import step_arrays

DRAFTING = dict(speculate="draft", num_speculative_tokens=4)
# As the CUDA engine's, with few tokens per step.
SMALL = replace(LIMITS, max_tokens=16, max_slots=4, max_drafts=15, proposes=True,
                proposals_take_blocks=True, lookahead=1)


@pytest.fixture(scope="module")
def case(draft_base, eagle3_head, small_drafter, tmp_path_factory):
    """Factory of case directories by kind of draft model, target and tp_size."""
    root = tmp_path_factory.mktemp("drafts")
    eagle3_head.save(root / "head")
    sources = {"eagle3": f"eagle3:{root / 'head'}", "model": f"model:{small_drafter[0]}"}

    def make(kind, target="cuda", tp_size=1):
        path = root / f"{kind}-{target}-{tp_size}"
        if not path.exists():
            llmc.compile(draft_base[0], path, draft=sources[kind], target=target, dtype="float32",
                         tp_size=tp_size)
        return path
    return make


def test_drafts_are_those_of_the_published_model(extension, draft_base, eagle3_head, case,
                                                 proposed):
    with interpreted(case("eagle3"), SMALL, **DRAFTING) as llm:
        assert_drafts_of_prompts(llm, draft_base[1], eagle3_head.drafts, proposed)


def test_ranks_draft_together(extension, draft_base, eagle3_head, case, proposed):
    with interpreted(case("eagle3", tp_size=2), SMALL, **DRAFTING) as llm:
        assert_drafts(llm, draft_base[1], eagle3_head.drafts, PROMPTS[3], proposed)


def test_a_separate_model_drafts(extension, small_drafter, case, proposed):
    with interpreted(case("model"), replace(SMALL, lookahead=0), **DRAFTING) as llm:
        assert_drafts_of_prompts(llm, None, lambda _, *args: greedy(small_drafter[1], *args),
                                 proposed)


def test_mtp_layers_draft_as_in_transformers(extension, tmp_path, proposed):
    base, layers = save_with_mtp("deepseek_v3", tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", draft="mtp", target="cuda", dtype="float32")
    with interpreted(tmp_path / "case", SMALL, **DRAFTING) as llm:
        assert_drafts(llm, base, lambda *args: mtp_drafts(layers, *args), PROMPTS[3], proposed)


@pytest.mark.parametrize("changes", [
    {}, pytest.param(families.GEMMA4_LARGE, marks=pytest.mark.thorough)])
def test_assistants_draft_as_in_transformers(extension, tmp_path, proposed, fully_shared, changes):
    base, assistant = compile_assistant(tmp_path, changes)
    limits = replace(SMALL, proposals_take_blocks=False, lookahead=0, ahead=2, drafts_ahead=True)
    with interpreted(tmp_path / "case", limits, **DRAFTING) as llm:
        assert_drafts(llm, base, lambda *args: assistant_drafts(assistant, *args), PROMPTS[3],
                      proposed)
    build(extension, read_manifest(tmp_path / "case"), schedules_of(tmp_path / "case"))
    assert_is_refused_without_the_cache(tmp_path / "case")


@pytest.mark.parametrize(("layout", "changes"), [
    ("z-lab", dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6)),
    pytest.param("transformers", {}, marks=pytest.mark.thorough)])
def test_dflash_draft_models_draft_as_in_transformers(extension, draft_base, tmp_path, proposed,
                                                      layout, changes):
    drafter = save_dflash(tmp_path / "draft", layout, **changes)
    llmc.compile(draft_base[0], tmp_path / "case", draft=f"dflash:{tmp_path / 'draft'}",
                 target="cuda", dtype="float32")
    limits = replace(SMALL, max_drafts=4, proposed_positions=5, lookahead=0, ahead=2,
                     drafts_ahead=True)
    with interpreted(tmp_path / "case", limits, **DRAFTING) as llm:
        assert_drafts_of_prompts(llm, draft_base[1], lambda *args: dflash_drafts(drafter, *args),
                                 proposed)
        assert any(len({*drafts}) > 1 for drafts in proposed)
    manifest, schedules = read_manifest(tmp_path / "case"), schedules_of(tmp_path / "case")
    program = build(extension, manifest, schedules)
    for count, problem in ((4, None), (5, "a step proposes 5 drafts, expected -1 to 4")):
        arrays = step_arrays(drafting(propose=count))
        if problem is None:
            program.check_step(8, *arrays)
            continue
        with pytest.raises(extension.CudaError, match=problem):
            program.check_step(8, *arrays)
    with pytest.raises(extension.CudaError, match="a draft model of blocks of 1 tokens is invalid"):
        build(extension, with_info(manifest, num_speculative_tokens=0), schedules)


def with_info(manifest, **changes):
    """A manifest with changes to its draft model, unchecked."""
    return manifest.model_copy(update={"draft": manifest.draft.model_copy(update=changes)})


def assert_is_refused_without_the_cache(case):
    """Assert that a draft model which reads caches that the model lacks is refused."""
    manifest, path = read_manifest(case), case / "chip0" / "draft.json"
    program = read_program(path)
    assert program.read
    number = min(program.read)
    other = program.tensors[number].model_copy(update={"name": "key_cache_99"})
    tensors = (*program.tensors[:number], other, *program.tensors[number + 1:])
    path.write_text(program.model_copy(update={"tensors": tensors}).model_dump_json())
    with pytest.raises(LlmcError, match="unknown cache 'key_cache_99'"):
        read_chip_programs(manifest, manifest.chips[0], case)


@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_several_mtp_layers_draft_as_in_transformers(extension, tmp_path, proposed, number):
    base, layers = save_with_mtp("glm4_moe", tmp_path / "hf", number)
    llmc.compile(tmp_path / "hf", tmp_path / "case", draft="mtp", target="cuda", dtype="float32")
    limits = replace(SMALL, lookahead=number, ahead=2, drafts_ahead=True)
    with interpreted(tmp_path / "case", limits, **DRAFTING) as llm:
        for prompt in PROMPTS:
            assert_drafts(llm, base, lambda *args: mtp_drafts(layers, *args), prompt, proposed)
    manifest, schedules = read_manifest(tmp_path / "case"), schedules_of(tmp_path / "case")
    assert len(schedules) == 1 + number
    build(extension, manifest, schedules)
    without_logits = schedules[-1].model_copy(update={"hidden_out": schedules[-1].logits})
    with pytest.raises(extension.CudaError, match="is not a value with the shape of the draft"):
        build(extension, manifest, [*schedules[:-1], without_logits])


@pytest.mark.thorough
def test_mtp_layers_of_a_recurrent_model_draft(extension, tmp_path, proposed):
    base, layers = save_recurrent("qwen3_5_text", tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", draft="mtp", target="cuda", dtype="float32")
    with interpreted(tmp_path / "case", replace(SMALL, keeps_states=True), **DRAFTING) as llm:
        assert_drafts(llm, base, lambda *args: mtp_drafts(layers, *args), PROMPTS[3], proposed)


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_drafts_are_verified_before_the_host_has_read_them(extension, draft_base, eagle3_head,
                                                           small_drafter, case, kind, proposed):
    limits = replace(SMALL, ahead=2, drafts_ahead=True, lookahead=int(kind == "eagle3"))
    references = {"eagle3": eagle3_head.drafts,
                  "model": lambda _, *args: greedy(small_drafter[1], *args)}
    with llmc.LLM(case(kind, "cpu"), max_batch_size=4) as alone, \
            interpreted(case(kind), limits, **DRAFTING) as llm:
        equal(llm.generate(PROMPTS, params("greedy")), alone.generate(PROMPTS, params("greedy")))
        assert_drafts(llm, draft_base[1], references[kind], PROMPTS[3], proposed)
        assert llm._loops[0].run(lambda _, engine: engine.resolved) > 20


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_every_kind_of_step_gives_the_drafts_of_the_cpu_engine(extension, case, kind):
    with llmc.LLM(case(kind, "cpu"), block_size=4, max_batch_size=4, kv_cache_tokens=256,
                  **DRAFTING) as cpu, interpreted(case(kind), replace(SMALL, max_tokens=64),
                                                  **DRAFTING) as cuda:
        plain = cpu.generate(PROMPTS, params("greedy"))
        answers = [own.token_ids for own in plain]
        expected, got = (llm._loops[0].run(lambda _, engine: drafts_of_steps(engine, answers))
                         for llm in (cpu, cuda))
        equal(cuda.generate(PROMPTS, params("greedy")), plain)
    assert got == expected
    counts = [count for _, counts, _ in got for count in counts]
    assert {1, 2, 4} <= {*counts}
    assert any(-1 in own and own[0] >= 0 for _, _, drafts in got for own in drafts)


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_compiled_draft_programs_are_accepted(extension, case, kind):
    manifest = read_manifest(case(kind))
    schedules = schedules_of(case(kind))
    assert len(schedules) == 2
    program = build(extension, manifest, schedules)
    layers = manifest.dims.num_layers + manifest.draft.num_layers
    assert program.block_bytes == sum(
        4 * layer.token_size for chip in manifest.chips
        for layer in (*chip.cache, *chip.draft.cache)) * 4
    assert layers == len(manifest.chips[0].cache) + len(manifest.chips[0].draft.cache)


def test_embedding_and_other_shared_weights_are_loaded_once(case):
    manifest = read_manifest(case("eagle3"))
    programs = read_chip_programs(manifest, manifest.chips[0], case("eagle3"))
    shared = programs.model.named("weight").keys() & programs.draft.named("weight").keys()
    assert shared == {"model.embed_tokens.weight"}


def test_features_are_computed_for_a_loaded_draft_model_only(extension, case):
    manifest = read_manifest(case("eagle3"))
    programs = read_chip_programs(manifest, manifest.chips[0], case("eagle3"))
    parts = programs.parts(draft=False)
    assert parts.keys() == {"model"} and parts["model"].features == -1
    left = [node for node in programs.model.nodes if node not in parts["model"].nodes]
    assert [node.op for node in left] == ["Concat", "GemmBiasAct"]
    build(extension, manifest, [parts["model"]])


def test_a_draft_model_has_its_own_arena(extension, case):
    manifest = read_manifest(case("eagle3"))
    model, draft = schedules_of(case("eagle3"))
    small = draft.model_copy(update={"token_bytes": draft.token_bytes - 16})
    with pytest.raises(extension.CudaError, match="is not at a multiple of 16 in the arena"):
        build(extension, manifest, [model, small])


def with_tensor(draft, name, **changes):
    number = getattr(draft, name)
    tensors = [*draft.tensors]
    tensors[number] = tensors[number].model_copy(update=changes)
    return draft.model_copy(update={"tensors": tuple(tensors)})


@pytest.mark.parametrize(("change", "problem"), [
    (lambda model, draft: (model, draft.model_copy(update={"logits": draft.hidden})),
     "is not a value with num_logits rows"),
    (lambda model, draft: (model.model_copy(update={"features": model.logits}), draft),
     "is not a value with the shape of the draft model's features"),
    (lambda model, draft: (model, draft.model_copy(update={"hidden_out": draft.logits})),
     "is not a value with the shape of the draft model's features"),
    (lambda model, draft: (model, with_tensor(draft, "hidden", shape=("num_tokens", 32))),
     "node 2 .* is invalid"),
])
def test_invalid_draft_programs_are_refused(extension, case, change, problem):
    manifest = read_manifest(case("eagle3"))
    with pytest.raises(extension.CudaError, match=problem):
        build(extension, manifest, change(*schedules_of(case("eagle3"))))


@pytest.mark.parametrize(("part", "changes", "problem"), [
    (0, {"features": 10**6}, "the features are tensor 1000000, the program has"),
    (0, {"hidden": 0, "hidden_out": 0}, "has features and hidden and hidden_out, expected"),
    (1, {"hidden": -1}, "the program has hidden_out, expected features of a model, or hidden and"),
    (1, {"hidden": -1, "hidden_out": -1}, "reads 'hidden' before it is written"),
    (0, {"features": 0}, "the features are input 'input_ids'")])
def test_a_program_file_with_other_features_is_refused(case, part, changes, problem):
    schedule = schedules_of(case("eagle3"))[part].model_copy(update=changes)
    with pytest.raises(ValueError, match=problem):
        Program.model_validate_json(schedule.model_dump_json())


@pytest.mark.parametrize(("name", "absent", "problem"), [
    ("draft.json", "hidden_out", "the draft model has no hidden_out, unlike its chain"),
    ("schedule.json", "features", "the model and its draft model differ in the features")])
def test_programs_that_do_not_fit_together_are_refused(case, tmp_path, name, absent, problem):
    directory = shutil.copytree(case("eagle3"), tmp_path / "case")
    manifest, path = read_manifest(directory), directory / "chip0" / name
    program = read_program(path)
    path.write_text(program.model_copy(update={absent: -1}).model_dump_json())
    with pytest.raises(LlmcError, match=problem):
        read_chip_programs(manifest, manifest.chips[0], directory)


def drafting(**changes):
    """A step of a decoding sequence with a draft, a chunk, and a sampled prompt."""
    made = Step.of([[5, 6], [8, 9], [1, 2, 3]], [6, 0, 4], [[3, 2, 6], [1], [4, 5]], [2, 0, 1],
                   sample=[0, 2], num_drafts=[1, 0, 0], propose=3,
                   next_tokens=np.array([-1, 10, -1], np.int64))
    return replace(made, **changes)


def test_rows_of_a_draft_model(extension):
    ids, sampled, firsts, slots, tables = extension.draft_rows(*step_arrays(drafting()))
    assert ids == [6, 0, 9, 10, 2, 3, 0]
    assert sampled == [0, 0, -1, -1, -1, -1, 1]
    assert (firsts, slots, tables) == ([0, 6], [2, 1], [0, 2])


def test_rows_of_a_draft_model_after_rows_of_drafts(extension):
    step = Step.of([[4], [5, 6, 7], [8, 9]], [6, 7, 3], [[1, 7], [3, 2, 6], [4, 5]], [1, 2, 0],
                   sample=[1, 2], num_drafts=[0, 2, 1], propose=3,
                   next_tokens=np.array([30, -1, -1], np.int64))
    arrays = step_arrays(step, max_rows=8)
    assert arrays[6]  # a row for each draft
    ids, sampled, firsts, slots, tables = extension.draft_rows(*arrays)
    assert ids == [30, 6, 7, 0, 9, 0]
    assert sampled == [-1, 0, 0, 0, 1, 1]
    assert (firsts, slots, tables) == ([1, 4], [2, 0], [3, 5])


@pytest.mark.parametrize("rows", [0, 8])
def test_only_the_device_knows_drafts_of_steps_in_flight(extension, rows):
    step = Step.of([[LAST, proposal(0), proposal(1)], [8, 9]], [7, 3], [[3, 2, 6], [4, 5]], [2, 0],
                   num_drafts=[2, 1], propose=3, unread=[3, 0])
    arrays = step_arrays(step, max_rows=rows)
    ids, sampled, firsts, slots, _ = extension.draft_rows(*arrays)
    assert ids == [-1, -1, 0, 9, 0]
    assert (sampled, firsts, slots) == ([0, 0, 0, 1, 1], [0, 3], [2, 0])
    assert arrays[24].tolist() == ([3, 3, 3, 0, 0] if rows else [3, 0])


@pytest.mark.parametrize(("changes", "problem"), [
    ({}, None), ({"propose": 16}, None), ({"propose": 0}, None),
    ({"propose": 17}, "a step proposes 17 drafts, expected -1 to 16"),
    ({"next_tokens": np.array([1, 2], np.int64)}, "next_tokens has 2 elements, expected 3"),
    ({"next_tokens": np.array([1, 2, -2], np.int64)}, r"next_tokens\[2\] is -2, expected -1 to"),
    ({"block_tables": np.array([[3, 2, 8], [1, -1, -1], [4, 5, -1]], np.int32)},
     r"block_tables of drafts\[0\] is 8, expected -1 to 7"),
    ({"block_tables": np.array([[3, -1, -1], [1, -1, -1], [4, 5, -1]], np.int32)},
     r"block_tables\[1\] is -1, expected 0 to 7"),
    ({"token_ids": np.array([5, proposal(16), 8, 9, 1, 2, 3])}, r"token_ids\[1\] is -18, expected"),
    ({"unread": np.array([7, 0, 0], np.int32)}, "7 unread drafts of sequence 0 exceed its past "),
    ({"unread": np.array([1], np.int32)}, "unread has 1 elements, expected 3"),
    ({"token_ids": np.array([5, proposal(0), 8, 9, 1, 2, 3])},
     "token 1 is the last one of slot 2, which has not sampled any"),
    ({"logits": "all", "num_drafts": np.empty(0, np.int32), "sample": np.empty(0, np.int32)},
     "a step with logits=all cannot propose drafts")])
def test_steps_that_run_a_draft_model(extension, case, changes, problem):
    program = build(extension, read_manifest(case("eagle3")), schedules_of(case("eagle3")))
    arrays = step_arrays(drafting(**changes))
    if problem is None:
        program.check_step(8, *arrays)
        return
    with pytest.raises(extension.CudaError, match=problem):
        program.check_step(8, *arrays)


def test_a_program_without_a_draft_model_proposes_nothing(extension, case):
    manifest = read_manifest(case("eagle3"))
    program = build(extension, manifest, schedules_of(case("eagle3"))[:1])
    with pytest.raises(extension.CudaError, match="but the program has no draft model or prompt"):
        program.check_step(8, *step_arrays(drafting()))
