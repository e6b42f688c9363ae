"""Draft models compiled with their model: their drafts, and the same tokens as without them."""

import dataclasses
import json
import shutil

import conftest
import eagle3
import families
import numpy as np
import onnx_graphsurgeon as gs
import pytest
import torch
from draft_models import (
    GEMMA,
    PARAMS,
    PROMPTS,
    ROWS,
    TIGHT,
    VOCAB,
    assert_aborts_leave_others,
    assert_drafts,
    assert_drafts_of_prompts,
    assert_draws_beside_others,
    assert_reaches_the_end,
    assistant_drafts,
    dflash_drafts,
    equal,
    greedy,
    mtp_drafts,
    params,
    save_assistant,
    save_dflash,
    save_recurrent,
    save_with_mtp,
)
from safetensors.torch import load_file, save_file

import llmc
import llmc.compiler.api
from llmc.artifacts.manifest import read_manifest
from llmc.compiler.frontend.draft import hidden_states, mark_weights
from llmc.compiler.frontend.raw import RawModel
from llmc.compiler.graph.weights import Weight
from llmc.runtime.engines import draft_chain
from llmc.runtime.engines.host import HostSampling
from llmc.runtime.replica import EngineConfig, cpu_limits, step_bytes, token_bytes
from llmc.runtime.speculation.drafter import Draft
from llmc.runtime.speculation.engine_drafts import EngineDrafter


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.fixture(scope="module")
def case(draft_base, eagle3_head, tmp_path_factory):
    """Factory of case directories by tp_size."""
    root = tmp_path_factory.mktemp("eagle3")
    eagle3_head.save(root / "head")
    made = {}

    def make(tp_size):
        if tp_size not in made:
            made[tp_size] = root / f"tp{tp_size}"
            llmc.compile(draft_base[0], made[tp_size], draft=f"eagle3:{root / 'head'}",
                         tp_size=tp_size)
        return made[tp_size]
    return make


@pytest.fixture(scope="module")
def plain(case):
    """Completions without drafts, by name of parameters."""
    with llmc.LLM(case(1), max_batch_size=4) as llm:
        return {name: llm.generate(PROMPTS, params(name)) for name in PARAMS}


@pytest.mark.parametrize("tp_size", [1, 2, thorough(3)])
def test_drafts_are_those_of_the_published_model(draft_base, eagle3_head, case, proposed, tp_size):
    with llmc.LLM(case(tp_size), speculate="draft", num_speculative_tokens=4, block_size=4,
                  max_num_batched_tokens=16, max_batch_size=4) as llm:
        assert_drafts_of_prompts(llm, draft_base[1], eagle3_head.drafts, proposed)


@pytest.mark.parametrize(("tp_size", "options"), [
    (1, TIGHT), (2, TIGHT), thorough(1, {}), thorough(2, {}), thorough(3, TIGHT)])
def test_tokens_do_not_depend_on_drafts(case, plain, tp_size, options):
    with llmc.LLM(case(tp_size), max_batch_size=4, speculate="draft", num_speculative_tokens=3,
                  **options) as llm:
        for name, alone in plain.items():
            equal(llm.generate(PROMPTS, params(name)), alone)
        metrics = llm.metrics()
        assert metrics["spec_decode_draft_tokens"]
        assert metrics["preemptions"] or not options


def test_a_drafter_that_is_right_saves_steps(case, plain, monkeypatch):
    known = {tuple(own.prompt_token_ids): own.token_ids for own in plain["greedy"]}
    real = HostSampling.submit
    steps = []

    def submit(self, step):
        steps.append(step)
        return real(self, step)

    monkeypatch.setattr(HostSampling, "submit", submit)
    answer = list(known[tuple(PROMPTS[0])])
    monkeypatch.setattr(EngineDrafter, "extend", lambda self, tokens: setattr(
        self, "done", getattr(self, "done", 0) + len(tokens)))
    monkeypatch.setattr(EngineDrafter, "propose", lambda self, tokens, match: setattr(
        self, "count", len(tokens)))
    monkeypatch.setattr(EngineDrafter, "draft", lambda self, count: Draft(
        answer[self.done:self.done + min(count, self.count)], 0))
    with llmc.LLM(case(1), speculate="draft", num_speculative_tokens=4) as llm:
        own, = llm.generate([PROMPTS[0]], params("greedy"))
    assert list(own.token_ids) == answer
    assert len(steps) <= 6


def test_the_number_of_drafts_is_measured(case, plain):
    with llmc.LLM(case(1), max_batch_size=4, speculate="draft") as llm:
        equal(llm.generate(PROMPTS, params("greedy")), plain["greedy"])


def test_drafts_go_beside_beams_sessions_and_predictions(case, plain):
    with llmc.LLM(case(1), max_batch_size=4) as alone, \
            llmc.LLM(case(1), max_batch_size=4, speculate="draft",
                     num_speculative_tokens=3) as llm:
        assert_draws_beside_others(llm, alone, plain["greedy"])


def test_aborted_sequences_leave_others_as_they_are(case, plain):
    with llmc.LLM(case(1), max_batch_size=4, speculate="draft", num_speculative_tokens=3,
                  **TIGHT) as llm:
        assert_aborts_leave_others(llm, plain["greedy"])


@pytest.mark.parametrize("layout", [
    "speculators", "layers", thorough("own embedding"), thorough("layer indices"),
    thorough("whole vocabulary")])
def test_published_layouts(draft_base, proposed, tmp_path, layout):
    directory, base = draft_base
    embedding = base.get_input_embeddings().weight.detach()
    head = eagle3.Eagle3(64, VOCAB, VOCAB if layout == "whole vocabulary" else ROWS, embedding,
                         own_embedding=layout == "own embedding", seed=5,
                         norm_before_residual=layout == "speculators")
    layers, changes = None, {}
    if layout == "layers":
        layers = (1, 4, 5)
        changes = {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}
    elif layout == "layer indices":
        layers = (2, 3, 5)
        changes = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    save = head.save_speculators if layout == "speculators" else head.save
    manifest = llmc.compile(directory, tmp_path / "case",
                            draft=f"eagle3:{save(tmp_path / 'head', **changes)}")
    assert manifest.draft.num_speculative_tokens == (3 if layout == "speculators" else None)
    assert manifest.draft.reduced == (layout != "whole vocabulary")
    with llmc.LLM(tmp_path / "case", speculate="draft", num_speculative_tokens=4) as llm:
        assert_drafts(llm, base, lambda *args: head.drafts(*args, layers), PROMPTS[0], proposed)


def test_quantized_models_draft(draft_base, eagle3_head, tmp_path):
    eagle3_head.save(tmp_path / "head")
    options = dict(quantize="int8")
    llmc.compile(draft_base[0], tmp_path / "plain", **options)
    manifest = llmc.compile(draft_base[0], tmp_path / "case", draft=f"eagle3:{tmp_path / 'head'}",
                            **options)
    assert "draft.lm_head.weight" in manifest.chips[0].quantization
    with llmc.LLM(tmp_path / "plain") as alone, llmc.LLM(
            tmp_path / "case", speculate="draft", num_speculative_tokens=3) as llm:
        equal(llm.generate(PROMPTS, params("greedy")), alone.generate(PROMPTS, params("greedy")))


def test_hidden_states_of_an_onnx_file_are_unknown():
    raw = RawModel(gs.Graph(), {"model_type": "llama"}, "onnx", lambda target: None, {})
    with pytest.raises(llmc.LlmcError, match=r"unknown \(it comes from an onnx file\), which"):
        hidden_states(raw)


def test_a_head_named_like_the_shared_embedding_is_its_own():
    graph = gs.Graph()
    table, head = (gs.Constant("lm_head.weight", Weight.of(np.zeros((rows, 4), np.float32)))
                   for rows in (8, 6))
    graph.nodes += [gs.Node("Gather", inputs=[table]), gs.Node("MatMul", inputs=[head])]
    mark_weights(graph, {id(table._values)})
    assert (table.name, head.name) == ("lm_head.weight", "draft.lm_head.weight")


def test_shared_weights_are_stored_once(draft_base, case, tmp_path):
    llmc.compile(draft_base[0], tmp_path / "plain")
    sizes = [read_manifest(path).chips[0].weight_bytes for path in (case(1), tmp_path / "plain")]
    table = 320 * 64 * 4  # the padded embedding
    own = 4 * (64 * 192 + 64 * 128 * 2 + 64 * 64 + 3 * 96 * 64 + 4 * 64 + 128 * 64) + 8 * ROWS
    assert sizes[0] - sizes[1] < own + table


def test_a_case_without_a_draft_model_is_as_before(draft_base, tmp_path):
    llmc.compile(draft_base[0], tmp_path / "case")
    assert '"draft' not in (tmp_path / "case" / "model_info.json").read_text()


@pytest.mark.parametrize(("changes", "problem"), [
    (dict(vocab_size=32000), "draft model of a model with vocab_size 32000, 'LlamaForCausalLM' has "
                             "300; give one"),
    (dict(target_hidden_size=128), "with hidden_size 128, 'LlamaForCausalLM' has 64"),
    (dict(eagle_aux_hidden_state_layer_ids=[2, 16, 29]), r"layers \[2, 16, 29\], 'LlamaForCausal"),
    (dict(num_hidden_layers=2), "a num_hidden_layers that llmc does not support for EAGLE-3"),
    (dict(architectures=["LlamaForCausalLM"]), "has architecture 'LlamaForCausalLM', expected"),
    (dict(eagle_config=[3]), r"has eagle_config \[3\], expected an object; correct it"),
    (dict(hidden_act="no"), "transformers rejects the config of"),
    (dict(draft_vocab_size=64), "does not give 64 token ids below 300"),
    (dict(intermediate_size=48), "'layers.0.mlp.gate_proj.weight' in .* its config expects")])
def test_another_draft_model_is_refused(draft_base, eagle3_head, tmp_path, changes, problem):
    eagle3_head.save(tmp_path / "head", **changes)
    with pytest.raises(llmc.LlmcError, match=problem) as caught:
        llmc.compile(draft_base[0], tmp_path / "case", draft=f"eagle3:{tmp_path / 'head'}")
    assert "\n" not in str(caught.value)


def test_incomplete_draft_models_are_refused(draft_base, eagle3_head, tmp_path):
    eagle3_head.save(tmp_path / "head")
    for name, problem in (("model.safetensors", "no \\*.safetensors weights"),
                          ("config.json", "has no config.json")):
        (tmp_path / "head" / name).unlink()
        with pytest.raises(llmc.LlmcError, match=problem):
            llmc.compile(draft_base[0], tmp_path / "case", draft=f"eagle3:{tmp_path / 'head'}")


@pytest.mark.parametrize(("options", "problem"), [
    (dict(draft="medusa:x"), "draft is 'medusa:x', expected mtp, eagle3:DIR, dfl"),
    (dict(draft="eagle3"), "draft is 'eagle3', expected"),
    (dict(draft="eagle3:x", target="tensorrt", dtype="float16"), "run on targets cpu and cuda; "),
    (dict(draft="eagle3:nowhere"), "'nowhere' does not exist")])
def test_invalid_draft_options(draft_base, tmp_path, options, problem):
    with pytest.raises(llmc.LlmcError, match=problem):
        llmc.compile(draft_base[0], tmp_path / "case", **options)


def test_a_case_without_a_draft_model_cannot_draft(case_tp1):
    with pytest.raises(llmc.LlmcError, match="has no draft model; compile with --draft"):
        llmc.LLM(case_tp1, speculate="draft")


@pytest.mark.parametrize(("family", "number", "tp_size"), [
    ("deepseek_v3", 1, 2), thorough("deepseek_v3", 1, 1), thorough("glm4_moe", 1, 1),
    thorough("glm4_moe", 1, 3), thorough("mellum", 1, 2), ("glm4_moe", 2, 1),
    thorough("glm4_moe", 3, 2), thorough("deepseek_v3", 3, 2)])
def test_mtp_layers_draft_as_in_transformers(family, number, tp_size, tmp_path, proposed):
    base, layers = save_with_mtp(family, tmp_path / "hf", number)
    case = tmp_path / "case"
    manifest = llmc.compile(tmp_path / "hf", case, draft="mtp", tp_size=tp_size)
    assert (manifest.draft.kind, manifest.draft.num_layers) == ("mtp", number)
    wish = llmc.SamplingParams(max_tokens=12, ignore_eos=True)
    with llmc.LLM(case, max_batch_size=4) as alone, llmc.LLM(
            case, speculate="draft", num_speculative_tokens=number + 2, block_size=4,
            max_num_batched_tokens=16, max_batch_size=4) as llm:
        equal(llm.generate(PROMPTS, wish), alone.generate(PROMPTS, wish))
        for prompt in (PROMPTS[3], [*PROMPTS[3][:9], 62, 63]):
            assert_drafts(llm, base, lambda *args: mtp_drafts(layers, *args), prompt, proposed,
                          number + 2)
        assert llm.metrics()["cache_hits"]


def quantize(tensors, side):
    """FP8 weights in blocks, and the values that they stand for; other tensors as they are."""
    stored, values = {}, {}
    for name, tensor in tensors.items():
        stored[name] = values[name] = tensor
        if tensor.ndim == 2 and name.endswith("_proj.weight") and "kv_b" not in name:
            codes = (tensor * 100).to(torch.float8_e4m3fn)
            scales = torch.rand(*(-(-size // side) for size in tensor.shape)) * 0.01 + 0.005
            spread = scales.repeat_interleave(side, 0).repeat_interleave(side, 1)
            stored |= {name: codes, f"{name}_scale_inv": scales}
            values[name] = codes.float() * spread[:tensor.shape[0], :tensor.shape[1]]
    return stored, values


def test_quantized_mtp_layers_draft_as_dequantized_ones(tmp_path, proposed):
    side = 32
    save_with_mtp("glm4_moe", tmp_path / "fp8")
    stored, values = quantize(load_file(tmp_path / "fp8" / "model.safetensors"), side)
    shutil.copytree(tmp_path / "fp8", tmp_path / "plain")
    save_file(values, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    save_file(stored, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    path = tmp_path / "fp8" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(
        quant_method="fp8", weight_block_size=[side, side], activation_scheme="dynamic")}))
    drafts = []
    for name in ("plain", "fp8"):
        manifest = llmc.compile(tmp_path / name, tmp_path / f"{name}.case", draft="mtp")
        quantized = [weight for weight in manifest.chips[0].quantization if "eh_proj" in weight]
        assert bool(quantized) == (name == "fp8")
        proposed.clear()
        with llmc.LLM(tmp_path / f"{name}.case", speculate="draft",
                      num_speculative_tokens=3) as llm:
            own, = llm.generate([PROMPTS[3]], params("greedy"))
        drafts.append((own.token_ids, [*proposed]))
    assert drafts[0] == drafts[1]


def test_a_checkpoint_without_mtp_layers(draft_base, tmp_path):
    with pytest.raises(llmc.LlmcError, match="has no MTP layers, which --draft mtp needs"):
        llmc.compile(draft_base[0], tmp_path / "case", draft="mtp")


@pytest.mark.parametrize("tp_size", [thorough(1), 2, thorough(3)])
def test_a_separate_model_drafts(draft_base, small_drafter, plain, tmp_path, proposed, tp_size):
    directory, drafter = small_drafter
    manifest = llmc.compile(draft_base[0], tmp_path / "case", draft=f"model:{directory}",
                            tp_size=tp_size)
    assert (manifest.draft.kind, manifest.draft.num_layers) == ("model", 2)
    with llmc.LLM(tmp_path / "case", max_batch_size=4, speculate="draft",
                  num_speculative_tokens=4, **TIGHT) as llm:
        for name, alone in plain.items():
            equal(llm.generate(PROMPTS, params(name)), alone)
        for prompt in (*PROMPTS, PROMPTS[3]):
            assert_drafts(llm, None, lambda _, *args: greedy(drafter, *args), prompt, proposed)


def test_all_drafts_of_the_model_itself_are_accepted(draft_base, case, tmp_path):
    llmc.compile(draft_base[0], tmp_path / "case", draft=f"model:{draft_base[0]}")
    with llmc.LLM(case(1), max_batch_size=4) as alone, llmc.LLM(
            tmp_path / "case", max_batch_size=4, speculate="draft",
            num_speculative_tokens=4) as llm:
        assert_reaches_the_end(llm, alone)
        metrics = llm.metrics()
    assert metrics["spec_decode_accepted_tokens"] == metrics["spec_decode_draft_tokens"] > 40


@pytest.mark.parametrize(("changes", "problem"), [
    (dict(vocab_size=200), "'LlamaForCausalLM' has vocab_size 200, 'LlamaForCausalLM' has 300"),
    (dict(vocab_size=VOCAB, max_position_embeddings=32), "max_seq_len 64 is not supported")])
def test_another_separate_model_is_refused(draft_base, tmp_path, changes, problem):
    families.save(families.tiny_model("llama", num_hidden_layers=1, **changes), tmp_path / "draft")
    with pytest.raises(llmc.LlmcError, match=problem):
        llmc.compile(draft_base[0], tmp_path / "case", draft=f"model:{tmp_path / 'draft'}")


@pytest.mark.parametrize(("family", "tp_size"), [
    ("qwen3_5_text", 2), thorough("qwen3_next", 1), thorough("qwen3_5_moe_text", 1),
    thorough("qwen3_next", 2), thorough("qwen3_5_text", 3)])
def test_mtp_layers_of_a_recurrent_model(family, tp_size, tmp_path, proposed):
    base, layers = save_recurrent(family, tmp_path / "hf")
    case = tmp_path / "case"
    manifest = llmc.compile(tmp_path / "hf", case, draft="mtp", tp_size=tp_size)
    assert (manifest.draft.kind, manifest.draft.num_layers) == ("mtp", 1)
    assert manifest.chips[0].states
    names = PARAMS if tp_size > 1 else ["greedy", "sampled"]
    check_recurrent(case, names, lambda llm, prompt: assert_drafts(
        llm, base, lambda *args: mtp_drafts(layers, *args), prompt, proposed, 3))


@pytest.mark.parametrize("kind", ["eagle3", thorough("model")])
def test_separate_draft_models_of_a_recurrent_model(kind, small_drafter, tmp_path, proposed):
    base, _ = save_recurrent("qwen3_5_text", tmp_path / "hf")
    if kind == "model":
        directory, drafter = small_drafter

        def reference(_, *args):
            return greedy(drafter, *args)
    else:
        head = eagle3.Eagle3(64, VOCAB, ROWS, base.get_input_embeddings().weight.detach())
        directory = head.save(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 3])

        def reference(*args):
            return head.drafts(*args, (1, 2, 3))
    llmc.compile(tmp_path / "hf", tmp_path / "case", draft=f"{kind}:{directory}")
    check_recurrent(tmp_path / "case", ["greedy"], lambda llm, prompt: assert_drafts(
        llm, base, reference, prompt, proposed, 3))


def check_recurrent(case, names, check):
    """Compare drafts with the reference, and tokens with those without drafts."""
    with llmc.LLM(case, max_batch_size=4) as alone, llmc.LLM(
            case, speculate="draft", num_speculative_tokens=3, max_batch_size=4, block_size=4,
            kv_cache_tokens=96, max_num_batched_tokens=16) as llm:
        for name in names:
            equal(llm.generate(PROMPTS, params(name)), alone.generate(PROMPTS, params(name)))
        assert llm.metrics()["preemptions"] and llm.metrics()["spec_decode_draft_tokens"]
        check(llm, PROMPTS[3])
        assert_reaches_the_end(llm, alone)


def test_draft_models_have_no_recurrent_layers(tmp_path, draft_base):
    families.save(families.tiny_model("lfm2", vocab_size=VOCAB), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="with a recurrent state, which a draft model cannot"):
        llmc.compile(draft_base[0], tmp_path / "case", draft=f"model:{tmp_path / 'hf'}")


def test_encoder_decoder_models_have_no_draft_models(tmp_path, encoder_decoder):
    base, *_ = encoder_decoder("bart")
    families.save(base, tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="an encoder-decoder model, which draft models do not"):
        llmc.compile(tmp_path / "hf", tmp_path / "case", draft="model:x")


@pytest.mark.parametrize(("change", "problem"), [
    (lambda data: data.pop("draft"), "chip 0 has a draft model, unlike the manifest"),
    (lambda data: data["draft"].update(kind="model"), "of kind model has an input 'hidden'"),
    (lambda data: data["draft"].update(num_layers=2), "caches for 1 layers of the draft model"),
    (lambda data: data["draft"].update(padded_vocab_size=192), "'logits' is float32"),
    (lambda data: data["chips"][0]["draft"].update(num_heads=[2]), "have num_heads"),
    (lambda data: data["chips"][0]["draft"]["outputs"].pop(), "the outputs of the draft model dif"),
    (lambda data: data["draft"].update(vocab_size=ROWS + 1, reduced=True), "of the draft model's")])
def test_a_damaged_draft_entry_is_one_clear_error(case, tmp_path, change, problem):
    directory = shutil.copytree(case(1), tmp_path / "case")
    path = directory / "model_info.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(llmc.LlmcError, match=problem) as caught:
        llmc.LLM(directory, speculate="draft").close()
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A Gemma 4 model, its sizes, and its directory."""
    sizes = {**families.OWN_ATTENTION["gemma4_text"], **GEMMA}
    base = families.tiny_model("gemma4_text", **sizes)
    directory = families.save(base, tmp_path_factory.mktemp("gemma") / "hf")
    conftest.write_tokenizer(directory)
    return base, sizes, directory


@pytest.mark.parametrize(("changes", "settings", "tp_size"), [
    ({}, dict(use_ordered_embeddings=True, centroid_intermediate_top_k=30), 2),
    thorough({}, {}, 1), thorough(families.GEMMA4_LARGE, {}, 1),
    thorough(families.GEMMA4_LARGE, {}, 2)])
def test_assistants_draft_as_in_transformers(changes, settings, tp_size, tmp_path, proposed,
                                             fully_shared):
    sizes = {**families.OWN_ATTENTION["gemma4_text"], **changes, **GEMMA}
    base = families.tiny_model("gemma4_text", **sizes)
    families.save(base, tmp_path / "hf")
    conftest.write_tokenizer(tmp_path / "hf")
    assistant = save_assistant(base, sizes, tmp_path / "assistant", **settings)
    manifest = llmc.compile(tmp_path / "hf", tmp_path / "case", tp_size=tp_size,
                            draft=f"assistant:{tmp_path / 'assistant'}")
    assert (manifest.draft.kind, manifest.draft.chain) == ("assistant", "position")
    assert not manifest.chips[0].draft_caches
    with llmc.LLM(tmp_path / "case", max_batch_size=4) as alone, llmc.LLM(
            tmp_path / "case", max_batch_size=4, speculate="draft",
            num_speculative_tokens=3, **TIGHT) as llm:
        equal(llm.generate(PROMPTS, params("sampled")), alone.generate(PROMPTS, params("sampled")))
        assert_drafts(llm, base, lambda *args: assistant_drafts(assistant, *args), PROMPTS[3],
                      proposed, 3)


@pytest.mark.parametrize(("layout", "changes", "tp_size"), [
    thorough("transformers", {}, 1),
    ("z-lab", dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6), 2),
    thorough("transformers", dict(layer_types=["sliding_attention"] * 2, sliding_window=9), 1)])
def test_dflash_draft_models_draft_as_in_transformers(draft_base, plain, tmp_path, proposed, layout,
                                                      changes, tp_size, monkeypatch):
    monkeypatch.setattr(draft_chain, "_MERGED", 3)  # of prompts, context and block run separately
    drafter = save_dflash(tmp_path / "draft", layout, **changes)
    manifest = llmc.compile(draft_base[0], tmp_path / "case", draft=f"dflash:{tmp_path / 'draft'}",
                            tp_size=tp_size)
    assert (manifest.draft.kind, manifest.draft.chain) == ("dflash", "block")
    assert manifest.draft.num_speculative_tokens == 4
    with llmc.LLM(tmp_path / "case", max_batch_size=4, speculate="draft",
                  num_speculative_tokens=4, **TIGHT) as llm:
        for name in ("greedy", "several", "structured"):
            equal(llm.generate(PROMPTS, params(name)), plain[name])
        for prompt in (PROMPTS[3], [*PROMPTS[3][:9], 62, 63]):
            assert_drafts(llm, draft_base[1], lambda *args: dflash_drafts(drafter, *args), prompt,
                          proposed)
            assert any(len({*drafts}) > 1 for drafts in proposed)
        assert llm.metrics()["cache_hits"]


@pytest.mark.parametrize(("changes", "problem"), [
    (dict(vocab_size=32000), "a model with vocab_size 32000, 'LlamaForCausalLM' has 300; give one"),
    (dict(hidden_size=32, head_dim=16), "hidden_size 32, 'LlamaForCausalLM' has 64"),
    (dict(num_target_layers=36), "num_hidden_layers 36, 'LlamaForCausalLM' has 6"),
    (dict(dflash_config=dict(mask_token_id=7, target_layer_ids=[1, 40])),
     "layers up to 40, 'LlamaForCausalLM' has 5"),
    (dict(dflash_config=dict(mask_token_id=300, target_layer_ids=[1, 4])),
     "mask_token_id 300, expected less than the vocab_size 300"),
    (dict(dflash_config=dict(mask_token_id=7, target_layer_ids=[1, 3, 4])),
     r"float32 \[64, 128\] as 'fc.weight', expected floating point \[64, 192\]"),
    (dict(dflash_config=3), "has dflash_config 3, expected an object; correct it"),
    (dict(block_size=1), "has block_size 1, expected 2 or more, as of a DFlash"),
    (dict(dflash_config={}), "has mask_token_id None, expected 0 or more"),
    (dict(num_hidden_layers=1, layer_types=["full_attention"]),
     r"a tensor 'layers.1.* \[.*\], which llmc does not use for DFlash")])
def test_another_dflash_draft_model_is_refused(draft_base, tmp_path, changes, problem):
    save_dflash(tmp_path / "draft", "z-lab")
    path = tmp_path / "draft" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(llmc.LlmcError, match=problem) as caught:
        llmc.compile(draft_base[0], tmp_path / "case", draft=f"dflash:{tmp_path / 'draft'}")
    assert "\n" not in str(caught.value)


def test_more_drafts_than_a_block_has_are_refused(draft_base, tmp_path):
    save_dflash(tmp_path / "draft", block_size=3)
    llmc.compile(draft_base[0], tmp_path / "case", draft=f"dflash:{tmp_path / 'draft'}")
    with pytest.raises(llmc.LlmcError, match="is 3, but the draft model of kind dflash drafts 2"):
        llmc.LLM(tmp_path / "case", speculate="draft", num_speculative_tokens=3)
    with llmc.LLM(tmp_path / "case", speculate="draft") as llm:
        llm.generate([PROMPTS[0]], params("greedy"))


@pytest.mark.parametrize(("changes", "problem"), [
    (dict(text=dict(vocab_size=320)), "a model with vocab_size 320, 'Gemma4ForCausalLM' has 300"),
    (dict(backbone_hidden_size=96), "a model with hidden_size 96, 'Gemma4ForCausalLM' has 64"),
    (dict(text=dict(global_head_dim=16)), "head_dim of full_attention 16, .* has 32; give one"),
    (dict(text=dict(num_key_value_heads=1)), "num_key_value_heads of sliding_attention 1, .* has")])
def test_another_assistant_is_refused(tmp_path, fully_shared, gemma, changes, problem):
    base, sizes, directory = gemma
    save_assistant(base, sizes, tmp_path / "assistant", **changes)
    with pytest.raises(llmc.LlmcError, match=problem) as caught:
        llmc.compile(directory, tmp_path / "case", draft=f"assistant:{tmp_path / 'assistant'}")
    assert "\n" not in str(caught.value)


def test_assistants_are_refused_for_other_models(draft_base, tmp_path, fully_shared, gemma):
    base, sizes, directory = gemma
    with pytest.raises(llmc.LlmcError, match="has no backbone_hidden_size, so it is not the conf"):
        llmc.compile(directory, tmp_path / "case", draft=f"assistant:{draft_base[0]}")
    save_assistant(base, sizes, tmp_path / "assistant")
    with pytest.raises(llmc.LlmcError, match="'LlamaForCausalLM' has 6 layers with attention and "
                                             "layer_types of no layers"):
        llmc.compile(draft_base[0], tmp_path / "case", draft=f"assistant:{tmp_path / 'assistant'}")
    path = tmp_path / "assistant" / "model.safetensors"
    stored = load_file(path)
    save_file({name: tensor for name, tensor in stored.items() if "pre_proj" not in name}, path)
    with pytest.raises(llmc.LlmcError, match="has no tensor '.*pre_projection.weight'"):
        llmc.compile(directory, tmp_path / "case", draft=f"assistant:{tmp_path / 'assistant'}")


def test_a_draft_model_of_another_architecture_is_refused(draft_base, eagle3_head, tmp_path):
    directory = eagle3_head.save_speculators(tmp_path / "head")
    path = directory / "config.json"
    plain = json.loads(path.read_text())
    plain["speculators_config"]["verifier"] = {"architectures": ["Qwen3ForCausalLM"]}
    path.write_text(json.dumps(plain))
    with pytest.raises(llmc.LlmcError, match="is a draft model of Qwen3ForCausalLM, the model is "
                                             "'LlamaForCausalLM'; give one"):
        llmc.compile(draft_base[0], tmp_path / "case", draft=f"eagle3:{directory}")


def test_too_little_memory_for_model_and_draft_model(case, monkeypatch):
    manifest = read_manifest(case(1))
    config = EngineConfig(4, 512, 16, 2000, 0.9, None)
    taken = step_bytes(manifest, config)
    free = taken + (2000 + 4 * manifest.dims.max_seq_len) * token_bytes(manifest)
    monkeypatch.setattr("llmc.runtime.replica.memory_of_machine", lambda name: free)
    assert cpu_limits(manifest, config).num_blocks == 125
    with pytest.raises(llmc.LlmcError, match="a KV cache of 2000 tokens takes .*; lower "
                                             "kv_cache_tokens, or leave out the draft model"):
        cpu_limits(manifest, dataclasses.replace(config, draft=True))
