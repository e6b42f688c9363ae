"""Recurrent layers: recognition, sharding, artifacts and refusals.
"""

import json
import re

import families
import numpy as np
import pytest
import torch
from schedule_interpreter import Interpreters
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.artifacts.program import read_program
from llmc.compiler import lower
from llmc.compiler.check.diff import diff
from llmc.compiler.frontend import load, recurrence, trace
from llmc.compiler.frontend.recurrence import keeps_state
from llmc.compiler.options import CompileOptions

TOKENS = np.random.default_rng(0).integers(3, families.VOCAB, 20).tolist()


def fused(family, tmp_path, **changes):
    hf = families.save(families.tiny_model(family, **changes), tmp_path / family)
    return lower.fuse(load(hf), CompileOptions()).graphs[0]


def count(graph, op):
    return sum(node.op == op for node in graph.nodes)


@pytest.mark.parametrize(("family", "rule", "l2norm", "convolutions", "recurrences"), [
    ("qwen3_next", "gated_delta", 1, 3, 3), ("olmo_hybrid", "gated_delta", 1, 3, 3),
    ("falcon_h1", "gated", 0, 3, 3), ("kimi_linear", "gated_delta", 1, 3, 3),
    ("lfm2", None, None, 3, 0)])
def test_recurrent_layers_are_recognized_by_their_computation(family, rule, l2norm, convolutions,
                                                              recurrences, tmp_path):
    """No layout ops of heads and channels are left."""
    graph = fused(family, tmp_path)
    assert count(graph, "CausalConv1d") == convolutions
    found = [node for node in graph.nodes if node.op == "GatedLinearAttention"]
    assert len(found) == recurrences
    assert all((node.attrs["update_rule"], node.attrs.get("l2norm", 0)) == (rule, l2norm)
               for node in found)
    assert not {"Transpose", "Reshape"} & {node.op for node in graph.nodes}


@pytest.mark.parametrize(("family", "exported"), [
    ("qwen3_5_text", 2), ("falcon_h1", 2),
    pytest.param("kimi_linear", 3, marks=pytest.mark.thorough)])  # its first has no experts
def test_a_deeper_hybrid_exports_no_more_layers(family, exported, tmp_path, monkeypatch):
    changes = {"num_hidden_layers": 9}
    if family != "falcon_h1":
        kinds = ["linear_attention", "linear_attention", "full_attention"]
        changes["layer_types"] = kinds * 3
    model = families.tiny_model(family, **changes)
    nodes = families.count_exported(monkeypatch, "Recurrence")
    raw = load(families.save(model, tmp_path / "hf"))
    assert not raw.notes and nodes in ([exported], [])  # [] if the export is cached
    llmc.compile(tmp_path / "hf", tmp_path / "case")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), families.reference_logits(model, TOKENS))


@pytest.mark.parametrize("changes", [
    pytest.param({"num_hidden_layers": 54, "layers_block_type": None, "num_mem_blocks": 2,
                  "use_mem_rope": False}, marks=pytest.mark.thorough),
    {"num_mem_blocks": 2, "layers_block_type": ["mamba"] * 3 + ["hybrid"] * 2},
    pytest.param({"use_shared_attention_adapter": True}, marks=pytest.mark.thorough),
    pytest.param({"use_shared_attention_adapter": True, "num_mem_blocks": 2, "use_mem_rope": False},
                 marks=pytest.mark.thorough)])
def test_shared_blocks_may_have_separate_adapters(changes, tmp_path):
    """As in Zamba 2, whose config cannot describe fewer layers."""
    model = families.tiny_model("zamba2", **changes)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", tp_size=2)
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), families.reference_logits(model, TOKENS))


def test_convolutions_of_a_layer_are_merged(tmp_path, monkeypatch):
    """Those of queries, keys and values, so that ranks shard them with the heads."""
    def in_thirds(channels, weight, **others):
        return torch.cat([recurrence._convolution(channels, weight, **others)[:, part:part + 32]
                          for part in (0, 32, 64)], 1)

    monkeypatch.setitem(recurrence._FUNCTIONS, "causal_conv1d_fn", in_thirds)
    exporter = trace._run_exporter
    monkeypatch.setattr(trace, "_run_exporter", lambda *args: exporter(*args))  # not a cached one
    counts = families.count_exported(monkeypatch, "Convolution")
    model = families.tiny_model("kimi_linear")
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", tp_size=3)
    assert counts == [9]
    shapes = [state.shape for state in read_manifest(tmp_path / "case").chips[0].states]
    assert shapes == [(3, 3 * 16), (2, 8, 8)] * 3
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), families.reference_logits(model, TOKENS))


def test_a_prompt_of_many_chunks_equals_transformers(tmp_path):
    """transformers has chunks of 64 tokens, steps have 48, and ranks are split by heads."""
    for family in ("qwen3_5_text", "kimi_linear", "mamba2"):
        model = families.tiny_model(family, max_position_embeddings=256)
        hf = families.save(model, tmp_path / family)
        llmc.compile(hf, tmp_path / f"{family}-case", tp_size=2, max_seq_len=200)
        tokens = np.random.default_rng(1).integers(3, families.VOCAB, 190).tolist()
        with llmc.LLM(tmp_path / f"{family}-case", max_num_batched_tokens=48) as llm:
            session = llm.session(1)
            got = session.extend([tokens], all_logits=True)
        families.assert_close(got, families.reference_logits(model, tokens))


@pytest.mark.parametrize(("family", "tp_size"), [
    ("lfm2", 1), ("qwen3_next", 2), *(pytest.param(family, tp_size, marks=pytest.mark.thorough)
                                      for family in families.HYBRIDS for tp_size in (1, 2))])
def test_the_schedule_gives_transformers_logits_and_tokens(family, tp_size, tmp_path):
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 tp_size=tp_size)
    ranks = Interpreters(tmp_path / "case")
    for own in ranks._on_all(lambda rank: np.concatenate(
            [rank.run(TOKENS[:12], 0), rank.run(TOKENS[12:13], 12), rank.run(TOKENS[13:], 13)])):
        families.assert_close(own, families.reference_logits(model, TOKENS))
    assert ranks.greedy(TOKENS[:5], 3) == families.greedy(model, TOKENS[:5], 3)


@pytest.mark.parametrize(("family", "others"), [
    ("qwen3_5_text", ["NormGemm", "GemmBiasRes"]), ("bamba", ["NormGemm", "GemmBiasRes"]),
    ("mamba2", [])])
@pytest.mark.parametrize("tp_size", [1, 3])
def test_readers_of_one_norm_are_merged_on_gpus(family, others, tp_size, tmp_path):
    """Also on ranks whose columns are not whole vectors."""
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    manifest = llmc.compile(hf, tmp_path / "case", target="cuda", tp_size=tp_size)
    for chip in manifest.chips:
        schedule = read_program(tmp_path / "case" / chip.steps[0].path)
        nodes = [node for node in schedule.nodes if node.op != "AllReduce"][1:6 + len(others)]
        assert [node.op for node in nodes] == [
            "NormGemm", "CausalConv1d", "GatedLinearAttention", "GroupRMSNorm", "GemmBiasRes",
            *others]
        product, = nodes[0].outputs
        assert schedule.tensors[product].width % 8 == 0
        assert sum(tensor.of == product for tensor in schedule.tensors) == \
            (4 if family == "qwen3_5_text" else 3)


def test_the_language_model_of_a_multimodal_class(tmp_path):
    """From the whole checkpoint, which has it under a prefix."""
    text = AutoConfig.for_model("qwen3_5_text", **families.HYBRIDS["qwen3_5_text"])
    config = AutoConfig.for_model("qwen3_5", text_config=text.to_dict(), vision_config=dict(
        hidden_size=32, intermediate_size=48, depth=1, num_heads=2, out_hidden_size=64))
    model = families.randomized(AutoModelForImageTextToText.from_config(config))
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), families.reference_logits(model, TOKENS))


@pytest.mark.parametrize(("family", "shares"), [
    # two key heads with two value heads each, on three ranks: the last has a whole group
    ("qwen3_5_text", [(1, 16, 8), (1, 16, 8), (2, 16, 8)]),
    # norms of two groups, which three ranks cannot split: each has all
    ("nemotron_h", [(8, 8, 16)] * 3)])
def test_state_heads_are_sharded_in_whole_groups(family, shares, tmp_path):
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", tp_size=3)
    chips = read_manifest(tmp_path / "case").chips
    found = [next(state.shape for state in chip.states if len(state.shape) == 3) for chip in chips]
    assert sorted(found) == shares


def test_an_attention_gate_is_sharded_with_its_heads(tmp_path):
    """With a query projection that also computes gates."""
    case = tmp_path / "case"
    hf = families.save(families.tiny_model("qwen3_5_text"), tmp_path / "hf")
    llmc.compile(hf, case, tp_size=2)
    assert [chip.num_heads for chip in read_manifest(case).chips] == [(2,), (2,)]


@pytest.mark.parametrize("family", [
    "qwen3_next", "falcon_h1", *(pytest.param(name, marks=pytest.mark.thorough)
                                 for name in ("kimi_linear", "lfm2"))])
def test_diff_compares_recurrent_states(family, tmp_path):
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", tp_size=2)
    assert diff(tmp_path / "case", hf, bisect=True, tokens=2).verdict is None


def test_a_planted_error_in_a_state_is_found(tmp_path):
    hf = families.save(families.tiny_model("falcon_h1"), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case")
    families.plant(tmp_path / "case", 0, "model.layers.1.mamba.D", 3.0)
    report = diff(tmp_path / "case", hf, bisect=True, tokens=2)
    assert "GatedLinearAttention" in report.verdict


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt_rtx"])
def test_a_target_without_recurrent_states_is_refused(target, tmp_path):
    hf = families.save(families.tiny_model("lfm2"), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match=rf"^target '{target}' has no kernel for "
                                             r"llmc::CausalConv1d \(.*--target cpu$"):
        lower.fuse(load(hf), CompileOptions(target=target))


def check_refused(family, tmp_path, monkeypatch, match):
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    exporter = trace._run_exporter
    monkeypatch.setattr(trace, "_run_exporter", lambda *args: exporter(*args))  # not a cached one
    with pytest.raises(llmc.LlmcError, match=match) as caught:
        llmc.compile(hf, tmp_path / "case")
    assert "\n" not in str(caught.value)


def test_non_row_wise_ops_around_a_state_are_named(tmp_path, monkeypatch):
    real = modeling_qwen3_5.Qwen3_5RMSNormGated.forward
    monkeypatch.setattr(
        modeling_qwen3_5.Qwen3_5RMSNormGated, "forward",
        lambda self, x, gate=None: real(self, x, gate) * torch.softmax(gate, dim=0))
    check_refused("qwen3_5_text", tmp_path, monkeypatch,
                  r"a layer with recurrent state was not recognized: this op is not row-wise: "
                  r"Softmax .*\(Softmax ")


def test_a_convolution_with_a_computed_weight_is_named(tmp_path, monkeypatch):
    real = modeling_lfm2.Lfm2ShortConv.forward

    def forward(self, hidden_states, **others):
        made = real(self, hidden_states, **others)
        return made + modeling_lfm2.causal_conv1d_fn(
            made.transpose(1, 2), made[0, :3].transpose(0, 1)).transpose(1, 2)

    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", forward)
    check_refused("lfm2", tmp_path, monkeypatch,
                  "a layer with recurrent state was not recognized: ")


@pytest.mark.parametrize(("family", "key"), [
    ("qwen3_5_text", "linear_conv_kernel_dim"), ("lfm2", "conv_L_cache"),
    ("mamba2", "conv_kernel")])
def test_a_convolution_of_one_token_is_refused(family, key, tmp_path):
    hf = families.save(families.tiny_model(family, **{key: 1}), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match=f"'{family}' cannot be exported: a causal convolution "
                                             "has kernel size 1, expected 2 or more"):
        llmc.compile(hf, tmp_path / "case")


def test_unannotated_loops_are_refused(tmp_path):
    """An annotated convolution does not make its layer annotated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
            "mamba", hidden_size=64, num_hidden_layers=1, vocab_size=families.VOCAB))
    assert not any(keeps_state(module) for module in model.modules())


@pytest.mark.parametrize(("change", "match"), [
    (lambda chip: chip["states"].pop(), r"chip 0 reads 'state_5' before it is written"),
    (lambda chip: chip["states"][0]["shape"].__setitem__(0, 4), r"'state_0' is float32 "),
    (lambda chip: chip["states"][1].update(shape=[2**30, 2**30, 4]),
     r"'state_1' takes \d+ bytes per sequence"),
])
def test_a_manifest_with_invalid_states_is_refused(change, match, tmp_path):
    hf = families.save(families.tiny_model("falcon_h1"), tmp_path / "hf")
    case = tmp_path / "case"
    llmc.compile(hf, case)
    path = case / "model_info.json"
    data = json.loads(path.read_text())
    change(data["chips"][0])
    path.write_text(json.dumps(data))
    with pytest.raises(llmc.LlmcError, match=match) as caught:
        llmc.LLM(case)
    assert "\n" not in re.sub(r"\\n", "", str(caught.value))
