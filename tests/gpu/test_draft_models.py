"""Draft models on a GPU: the drafts of the CPU engine, and the same tokens as without drafts."""


import families
import pytest
from draft_models import (
    PARAMS,
    PROMPTS,
    TIGHT,
    assert_aborts_leave_others,
    assert_drafts,
    assert_drafts_of_prompts,
    assert_draws_beside_others,
    assert_reaches_the_end,
    assistant_drafts,
    compile_assistant,
    dflash_drafts,
    drafts_of_steps,
    equal,
    greedy,
    mtp_drafts,
    params,
    save_dflash,
    save_with_mtp,
)

import llmc
from llmc.runtime.gpus import GpuReplica

SMALL = dict(block_size=4, max_batch_size=4, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def case(draft_base, eagle3_head, small_drafter, tmp_path_factory):
    """Factory of case directories by kind of draft model, target and dtype."""
    root = tmp_path_factory.mktemp("drafts")
    eagle3_head.save(root / "head")
    sources = {"eagle3": f"eagle3:{root / 'head'}", "model": f"model:{small_drafter[0]}",
               "itself": f"model:{draft_base[0]}"}

    def make(kind, target="cuda", dtype="float32"):
        path = root / f"{kind}-{target}-{dtype}"
        if not path.exists():
            llmc.compile(draft_base[0], path, draft=sources[kind], target=target, dtype=dtype)
        return path
    return make


@pytest.fixture(scope="module", params=["llmc", "vanilla"])
def plain(extension, request, case):
    """An attention backend, and completions without drafts by name of parameters."""
    with llmc.LLM(case("eagle3"), max_batch_size=4, attention_backend=request.param) as llm:
        return request.param, {name: llm.generate(PROMPTS, params(name)) for name in PARAMS}


def test_drafts_are_those_of_the_published_model(extension, draft_base, eagle3_head, case,
                                                 proposed):
    with llmc.LLM(case("eagle3"), speculate="draft", num_speculative_tokens=4, **SMALL) as llm:
        assert_drafts_of_prompts(llm, draft_base[1], eagle3_head.drafts, proposed)


def test_a_separate_model_drafts(extension, small_drafter, case, proposed):
    with llmc.LLM(case("model"), speculate="draft", num_speculative_tokens=4, **SMALL) as llm:
        assert_drafts_of_prompts(llm, None, lambda _, *args: greedy(small_drafter[1], *args),
                                 proposed)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mellum"])
def test_mtp_layers_draft_as_in_transformers(extension, family, tmp_path, proposed):
    base, layers = save_with_mtp(family, tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", draft="mtp", target="cuda", dtype="float32")
    wish = llmc.SamplingParams(max_tokens=12, ignore_eos=True)
    with llmc.LLM(tmp_path / "case") as alone, llmc.LLM(
            tmp_path / "case", speculate="draft", num_speculative_tokens=3, **SMALL) as llm:
        equal(llm.generate(PROMPTS, wish), alone.generate(PROMPTS, wish))
        assert_drafts(llm, base, lambda *args: mtp_drafts(layers, *args), PROMPTS[3], proposed, 3)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_several_mtp_layers_draft_as_in_transformers(extension, family, number, tmp_path, proposed):
    base, layers = save_with_mtp(family, tmp_path / "hf", number)
    llmc.compile(tmp_path / "hf", tmp_path / "case", draft="mtp", target="cuda", dtype="float32")
    wish = llmc.SamplingParams(max_tokens=12, ignore_eos=True)
    with llmc.LLM(tmp_path / "case") as alone, llmc.LLM(
            tmp_path / "case", speculate="draft", num_speculative_tokens=4, **SMALL) as llm:
        equal(llm.generate(PROMPTS, wish), alone.generate(PROMPTS, wish))
        for prompt in PROMPTS:
            assert_drafts(llm, base, lambda *args: mtp_drafts(layers, *args), prompt, proposed, 4)
        assert_reaches_the_end(llm, alone)


@pytest.mark.parametrize("changes", [{}, families.GEMMA4_LARGE], ids=["small", "large"])
def test_assistants_draft_as_in_transformers(extension, tmp_path, proposed, fully_shared, changes):
    base, assistant = compile_assistant(tmp_path, changes)
    with llmc.LLM(tmp_path / "case", max_batch_size=4) as alone, llmc.LLM(
            tmp_path / "case", speculate="draft", num_speculative_tokens=3, **SMALL) as llm:
        for name in ("greedy", "sampled"):
            equal(llm.generate(PROMPTS, params(name)), alone.generate(PROMPTS, params(name)))
        assert_drafts(llm, base, lambda *args: assistant_drafts(assistant, *args), PROMPTS[3],
                      proposed, 3)


@pytest.mark.parametrize(("layout", "changes", "dtype"), [
    ("z-lab", dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6),
     "float32"),
    ("transformers", {}, "float32"), ("transformers", {}, "bfloat16")])
def test_dflash_draft_models_draft_as_in_transformers(extension, draft_base, tmp_path, proposed,
                                                      layout, changes, dtype):
    drafter = save_dflash(tmp_path / "draft", layout, **changes)
    llmc.compile(draft_base[0], tmp_path / "case", draft=f"dflash:{tmp_path / 'draft'}",
                 target="cuda", dtype=dtype)
    room = {**SMALL, "max_num_batched_tokens": 64}  # for the blocks of a padded step
    with llmc.LLM(tmp_path / "case", max_batch_size=4) as alone, llmc.LLM(
            tmp_path / "case", speculate="draft", num_speculative_tokens=4, **room) as llm:
        if dtype != "float32":  # drafts of nearly the same probability may differ
            llm.generate(PROMPTS, params("greedy"))
            assert llm.metrics()["spec_decode_draft_tokens"] > 40
            return
        for name in ("greedy", "several", "structured"):
            equal(llm.generate(PROMPTS, params(name)), alone.generate(PROMPTS, params(name)))
        assert_reaches_the_end(llm, alone)
        assert_drafts_of_prompts(llm, draft_base[1], lambda *args: dflash_drafts(drafter, *args),
                                 proposed)


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_every_kind_of_step_gives_the_drafts_of_the_cpu_engine(extension, case, kind):
    """Chunks beside drafts, rows of drafts, no proposals, and the last positions."""
    with llmc.LLM(case(kind, "cpu"), block_size=4, max_batch_size=4, speculate="draft") as cpu, \
            llmc.LLM(case(kind), block_size=4, max_batch_size=4, speculate="draft") as cuda:
        answers = [own.token_ids for own in cpu.generate(PROMPTS, params("greedy"))]
        expected, got = (llm._loops[0].run(lambda _, engine: drafts_of_steps(engine, answers))
                         for llm in (cpu, cuda))
    for number, (own, other) in enumerate(zip(got, expected, strict=True)):
        assert own == other, number


@pytest.mark.parametrize("kind", ["eagle3", "model"])
@pytest.mark.parametrize("options", [TIGHT, {}], ids=["tight", "roomy"])
def test_tokens_do_not_depend_on_drafts(case, plain, kind, options):
    """Drafts of random draft models are nearly all wrong."""
    backend, expected = plain
    with llmc.LLM(case(kind), max_batch_size=4, speculate="draft", num_speculative_tokens=3,
                  attention_backend=backend, **options) as llm:
        for name, alone in expected.items():
            equal(llm.generate(PROMPTS, params(name)), alone)
        metrics = llm.metrics()
    assert metrics["spec_decode_draft_tokens"] > metrics["spec_decode_accepted_tokens"]
    assert metrics["preemptions"] or not options


def test_all_drafts_of_the_model_itself_are_accepted(case, plain):
    with llmc.LLM(case("itself"), max_batch_size=4) as alone, llmc.LLM(
            case("itself"), max_batch_size=4, speculate="draft",
            num_speculative_tokens=4) as llm:
        assert_reaches_the_end(llm, alone)
        metrics = llm.metrics()
    assert metrics["spec_decode_accepted_tokens"] == metrics["spec_decode_draft_tokens"] > 40


def test_the_number_of_drafts_is_measured(case, plain):
    backend, expected = plain
    with llmc.LLM(case("eagle3"), max_batch_size=4, speculate="draft",
                  attention_backend=backend) as llm:
        equal(llm.generate(PROMPTS, params("greedy")), expected["greedy"])


def test_drafts_go_beside_beams_sessions_and_predictions(case, plain):
    backend, expected = plain
    with llmc.LLM(case("eagle3"), max_batch_size=4, attention_backend=backend) as alone, llmc.LLM(
            case("eagle3"), max_batch_size=4, speculate="draft", num_speculative_tokens=3,
            attention_backend=backend) as llm:
        assert_draws_beside_others(llm, alone, expected["greedy"])


def test_aborted_sequences_leave_others_as_they_are(case, plain):
    backend, expected = plain
    with llmc.LLM(case("eagle3"), max_batch_size=4, speculate="draft", num_speculative_tokens=3,
                  attention_backend=backend, **TIGHT) as llm:
        assert_aborts_leave_others(llm, expected["greedy"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_drafts_of_the_model_itself_are_mostly_accepted(extension, case, dtype):
    with llmc.LLM(case("itself", dtype=dtype), max_batch_size=4, speculate="draft",
                  num_speculative_tokens=4) as llm:
        llm.generate(PROMPTS, params("greedy", max_tokens=40))
        metrics = llm.metrics()
    assert metrics["spec_decode_accepted_tokens"] > 0.8 * metrics["spec_decode_draft_tokens"] > 0


@pytest.mark.parametrize("kind", ["eagle3", "itself"])
def test_drafts_are_verified_before_the_host_has_read_them(case, plain, kind, monkeypatch):
    backend, expected = plain
    unread = []
    real = GpuReplica.submit
    monkeypatch.setattr(GpuReplica, "submit", lambda self, step: (
        unread.append(int(step.unread.sum())), real(self, step))[1])
    with llmc.LLM(case(kind), max_batch_size=4, speculate="draft", num_speculative_tokens=3,
                  attention_backend=backend) as llm:
        equal(llm.generate(PROMPTS, params("greedy")), expected["greedy"])
    assert sum(count > 0 for count in unread) >= 4


def test_the_draft_model_is_loaded_on_demand(extension, case):
    sizes = {}
    for method in ("off", "draft"):
        with llmc.LLM(case("eagle3"), max_batch_size=4, speculate=method) as llm:
            engine = llm._loops[0].run(lambda _, engine: engine)
            sizes[method] = engine._first._engine.block_bytes
    assert sizes["draft"] == sizes["off"] * 7 // 6  # one layer more than the model's six
