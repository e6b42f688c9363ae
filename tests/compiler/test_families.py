"""Every family equals transformers in prefill and 16 decode steps, at each tp size."""

import json

import families
import numpy as np
import pytest
from drafting import TestDrafter
from schedule_interpreter import LIMITS, Interpreters, interpreted
from transformers import AutoModelForCausalLM

import llmc
from llmc.compiler.check.diff import diff
from llmc.compiler.frontend import load
from llmc.compiler.lower import fuse
from llmc.compiler.options import CompileOptions
from llmc.runtime.core import loop as loop_module

PREFILL, STEPS = 12, 16


def limits(family):
    """Return the tp sizes to test: up to 4 heads."""
    config = {**families.FAMILIES, **families.LATENT, **families.OWN_ATTENTION,
              **families.UNPLANNED, **families.MIXTURES, **families.HYBRIDS}[family]
    return [size for size in (1, 2, 3, 4)
            if size <= config.get("num_attention_heads", config.get("n_head", 4))]


def check_family(family, sizes, tmp_path, expert_parallel=False, **changes):
    model = families.tiny_model(family, **changes)
    cases = families.compile_sizes(families.save(model, tmp_path / "hf"), tmp_path, sizes,
                                   expert_parallel)
    rows, cuts = unequal()
    expected = [families.reference_logits(model, row) for row in rows]
    for tp_size, case in cases.items():
        verifies = tp_size == max(sizes)
        with llmc.LLM(case, speculate="ngram" if verifies else "off",
                      num_speculative_tokens=3) as llm:
            assert len(llm.manifest.chips) == tp_size
            families.assert_close(llm.logits(rows[0][:PREFILL]), expected[0][:PREFILL])
            check_steps(llm, rows, cuts, expected)
            if verifies:
                check_drafts(llm, rows[0][:PREFILL])


def unequal():
    """A ragged batch: tokens of two sequences and the lengths of their prompts."""
    rng = np.random.default_rng(3)
    rows = [rng.integers(3, families.VOCAB, PREFILL + STEPS).tolist() for _ in range(2)]
    return rows, [PREFILL, PREFILL - 5]


def check_steps(llm, rows, cuts, expected):
    session = llm.session(2)
    got = session.extend([row[:cut] for row, cut in zip(rows, cuts, strict=True)])
    for step in range(STEPS + 1):
        wanted = [truth[cut + step - 1] for truth, cut in zip(expected, cuts, strict=True)]
        families.assert_close(got, np.stack(wanted))
        if step < STEPS:
            got = session.extend([[row[cut + step]] for row, cut in zip(rows, cuts, strict=True)])


def check_drafts(llm, prompt):
    """Drafts, right or wrong, do not change greedy tokens, up to one that rounding decides."""
    loop, wish = llm._loops[0], llmc.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    loop._method = "off"
    alone, = llm.generate([prompt], wish)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "NgramDrafter", lambda *_: TestDrafter(
            alone.token_ids, "random", families.VOCAB))
        loop._method = "ngram"
        made, = llm.generate([prompt], wish)
    near = [own.top[0][1] - own.top[1][1] < 1e-4 for own in alone.logprobs]
    count = near.index(True) if any(near) else len(near)
    assert made.token_ids[:count] == alone.token_ids[:count]


@pytest.mark.parametrize("family", families.once(
    {**families.FAMILIES, **families.LATENT, **families.OWN_ATTENTION}))
def test_family_equals_transformers_at_every_tp_size(family, tmp_path):
    check_family(family, limits(family), tmp_path)


@pytest.mark.parametrize("family", families.once(families.UNPLANNED))
def test_an_unknown_family_compiles(family, tmp_path):
    check_family(family, [1, 2], tmp_path)


@pytest.mark.parametrize("family", families.MIXTURES)
def test_an_moe_model_equals_transformers_at_every_tp_size(family, tmp_path):
    check_family(family, limits(family), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("family", families.UNPLANNED_MIXTURES)
def test_an_unknown_moe_family_compiles(family, tmp_path):
    check_family(family, [1, 2], tmp_path, **families.sizes_of(family))


@pytest.mark.parametrize("family", families.once(families.HYBRIDS))
def test_a_hybrid_equals_transformers_at_every_tp_size(family, tmp_path):
    check_family(family, limits(family), tmp_path)


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[pytest.mark.thorough] * (family not in ("gpt_oss", "qwen3_next")))
    for family in {**families.FAMILIES, **families.LATENT, **families.OWN_ATTENTION,
                   **families.MIXTURES, **families.HYBRIDS}])
def test_the_program_decodes_a_ragged_batch(family, tmp_path):
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda")
    rows, cuts = unequal()
    with interpreted(tmp_path / "case", LIMITS) as llm:
        check_steps(llm, rows, cuts, [families.reference_logits(model, row) for row in rows])


@pytest.mark.parametrize("changes", [
    {}, {**families.rope("yarn", factor=4.0, attention_factor=3.0,
                         original_max_position_embeddings=16), "rms_norm_eps": 5e-3}])
def test_qk_norm_after_rotary_embedding(changes, tmp_path):
    """A scale of the embedding is equivalent to a smaller epsilon."""
    check_family("hunyuan_v1_dense", [1, 2], tmp_path, **{**families.FAMILIES["qwen3"], **changes})


@pytest.mark.parametrize("changes", [families.GEMMA4_LARGE, families.GEMMA4_MOE])
def test_gemma_4_with_shared_keys_and_values_and_experts(changes, tmp_path):
    check_family("gemma4_text", [1, 2, 3, 4], tmp_path, **changes)


def test_gemma_4_with_expert_parallelism(tmp_path):
    check_family("gemma4_text", [2, 3], tmp_path, expert_parallel=True, **families.GEMMA4_MOE)


@pytest.mark.thorough
def test_layers_with_shared_kv_are_repeated(tmp_path, monkeypatch):
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    counts = families.count_exported(monkeypatch, "Sdpa")
    for depth in (5, 6):
        model = families.tiny_model("gemma4_text", num_hidden_layers=3 * depth,
                                    num_kv_shared_layers=6, layer_types=kinds * depth)
        raw = load(families.save(model, tmp_path / f"hf{depth}"))
        assert raw.notes == () and sum(node.op == "Sdpa" for node in raw.graph.nodes) == 3 * depth
    assert len({*counts}) <= 1 and all(count < 15 for count in counts)
    case = families.compile_sizes(tmp_path / "hf6", tmp_path, [2])[2]
    row = np.random.default_rng(3).integers(3, families.VOCAB, 30).tolist()
    with llmc.LLM(case) as llm:
        assert [len(chip.cache) for chip in llm.manifest.chips] == [12, 12]
        assert llm.manifest.dims.num_layers == 18
        assert {layer.head_dim for layer in llm.manifest.chips[0].cache} == {16, 32}
        families.assert_close(llm.logits(row), families.reference_logits(model, row))


@pytest.mark.parametrize("before", [True, False])
def test_an_lm_head_after_a_projection_is_sharded_by_vocabulary(before, tmp_path):
    """OPT-350m's hidden states are wider than its embeddings, which are the tied LM head."""
    check_family("opt", [1, 2, 3], tmp_path, word_embed_proj_dim=32, do_layer_norm_before=before)


@pytest.mark.parametrize(("family", "changes"), [
    ("olmo", {"clip_qkv": 0.3}), ("mpt", {"attn_config": {"clip_qkv": 0.5}}),
    pytest.param("olmoe", {"clip_qkv": 0.5}, marks=pytest.mark.thorough)])
def test_qkv_may_be_clamped(family, changes, tmp_path):
    check_family(family, [1, 2, 3, 4], tmp_path, **changes)


def test_clamped_qkv_is_sharded_by_heads(tmp_path):
    model = families.tiny_model("olmo", clip_qkv=0.3)
    hf_dir = families.save(model, tmp_path / "hf")
    manifest = llmc.compile(hf_dir, tmp_path / "case", target="cuda", tp_size=2)
    assert {layer.num_kv_heads for chip in manifest.chips for layer in chip.cache} == {1}
    row = unequal()[0][0]
    for logits in Interpreters(tmp_path / "case")._on_all(lambda rank: rank.run(row, 0)):
        families.assert_close(logits, families.reference_logits(model, row))


def test_norms_without_weights(tmp_path):
    """As in Galactica, an OPT model."""
    check_family("opt", [1, 2], tmp_path, layer_norm_elementwise_affine=False, enable_bias=False)


def test_per_layer_inputs_of_repeated_layers(tmp_path, monkeypatch):
    """They come from one weight for all layers, which a shortened config does not describe."""
    counts = families.count_exported(monkeypatch, "Sdpa")
    model = families.tiny_model("gemma4_text", num_kv_shared_layers=0)
    raw = load(families.save(model, tmp_path))
    # 4, or 6 as of transformers 5.24, where the last layer of each type keeps its KV for assistants
    assert raw.notes == () and all(count in (4, 6) for count in counts)
    families.assert_exports(raw, model)


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt_rtx"])
def test_shared_kv_is_refused_for_tensorrt(target, tmp_path):
    hf_dir = families.save(families.tiny_model("gemma4_text"), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match=rf"target '{target}' has no kernel for "
                                             r"llmc::CachedAttention "):
        fuse(load(hf_dir), CompileOptions(target=target))


@pytest.fixture(scope="module")
def falcon_rw(tmp_path_factory):
    """As run by transformers by default; its eager attention adds ALiBi twice."""
    model = families.tiny_model("falcon", alibi=True, multi_query=False, parallel_attn=False,
                                bias=True, num_attention_heads=6, hidden_size=96)
    hf_dir = families.save(model, tmp_path_factory.mktemp("falcon") / "hf")
    return AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="sdpa"), hf_dir


def test_bfloat16_alibi_becomes_a_bias_by_key(falcon_rw, tmp_path):
    model, hf_dir = falcon_rw
    row = np.random.default_rng(3).integers(3, families.VOCAB, 400).tolist()
    expected = families.reference_logits(model, row)
    for case in families.compile_sizes(hf_dir, tmp_path, [1, 2, 3, 4]).values():
        with llmc.LLM(case) as llm:
            families.assert_close(llm.logits(row), expected)
            session = llm.session(2)
            got = session.extend([row[:380], row[:5]])
            for step in range(16):
                families.assert_close(got, expected[[379 + step, 4 + step]])
                got = session.extend([[row[380 + step]], [row[5 + step]]])


def test_diff_runs_the_bfloat16_export(falcon_rw, tmp_path):
    llmc.compile(falcon_rw[1], tmp_path / "case", tp_size=2)
    compared = diff(tmp_path / "case", falcon_rw[1], tokens=16)
    assert compared.verdict is None, compared


def test_alibi_with_multi_query_attention(tmp_path):
    hf_dir = families.save(families.tiny_model("falcon", alibi=True), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="sdpa")
    row = np.random.default_rng(3).integers(3, families.VOCAB, 30).tolist()
    for case in families.compile_sizes(hf_dir, tmp_path, [1, 2]).values():
        with llmc.LLM(case) as llm:
            families.assert_close(llm.logits(row), families.reference_logits(model, row))


def test_the_program_has_a_bias_by_key(falcon_rw, tmp_path):
    model, hf_dir = falcon_rw
    llmc.compile(hf_dir, tmp_path / "case", target="cuda", max_seq_len=512, tp_size=2)
    row = np.random.default_rng(3).integers(3, families.VOCAB, 40).tolist()
    for logits in Interpreters(tmp_path / "case")._on_all(lambda rank: np.concatenate(
            [rank.run(row[:30], 0), rank.run(row[30:], 30)])):
        families.assert_close(logits, families.reference_logits(model, row))


@pytest.mark.parametrize(("family", "changes"), [
    ("olmoe", {}), ("glm4_moe", {}),
    pytest.param("llama4_text", {"num_experts_per_tok": 2}, marks=pytest.mark.thorough)])
def test_expert_parallel_ranks_have_whole_experts(family, changes, tmp_path):
    check_family(family, [2, 3, 4], tmp_path, expert_parallel=True, **changes)


@pytest.mark.parametrize("kind", families.ROPES)
def test_rope_scalings_are_read_from_the_graph(kind, tmp_path):
    family, changes = families.ROPES[kind]
    check_family(family, [1], tmp_path, **changes)


def test_length_dependent_rope_within_the_original_context(tmp_path):
    """As in Phi-3.5-MoE, whose scale differs for long sequences."""
    check_family("phimoe", [1, 2], tmp_path, **families.rope(
        "longrope", short_factor=[1.0 + i / 50 for i in range(8)], long_factor=[3.0] * 8,
        short_mscale=1.2, long_mscale=1.3, original_max_position_embeddings=64))


def test_rope_that_depends_on_the_sequence_length_is_refused(tmp_path):
    family, changes = families.ROPES["longrope"]
    changes = {**changes, "max_position_embeddings": 256}
    hf_dir = families.save(families.tiny_model(family, **changes), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="compile with --max_seq_len of at most 64"):
        llmc.compile(hf_dir, tmp_path / "case", max_seq_len=256)
    config = json.loads((hf_dir / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    older = {**config, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling,
             "original_max_position_embeddings": scaling.pop("original_max_position_embeddings")}
    for saved in (json.loads((hf_dir / "config.json").read_text()), older):
        (hf_dir / "config.json").write_text(json.dumps(saved))
        made = llmc.compile(hf_dir, tmp_path / "case")
        assert made.dims.max_seq_len == 64
