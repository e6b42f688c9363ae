"""LoRA adapters of models for GPUs, which take them in slots, by programs in NumPy."""

import json
from dataclasses import replace

import families
import lora
import numpy as np
import pytest
from schedule_interpreter import LIMITS, interpreted

import llmc
from llmc.artifacts.adapter import slot_matrices
from llmc.artifacts.manifest import LayerRows, LoraLayer, read_manifest
from llmc.artifacts.program import ProgramTensor

PROMPTS = [[5, 9, 33, 7, 20], [11, 3, 8], [5, 9, 33, 7, 20]]
PARAMS = llmc.SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=0)
SLOTS = replace(LIMITS, max_loras=2, max_lora_rank=12)


@pytest.mark.parametrize(("family", "changes", "options"), [
    pytest.param("llama", {}, {}, marks=pytest.mark.thorough), ("llama", {}, {"tp_size": 2}),
    ("gpt2", {}, {"tp_size": 3}),  # LayerNorm, matrices [in, out]
    pytest.param("phi3", {}, {}, marks=pytest.mark.thorough), ("gemma2", {}, {"tp_size": 2}),
    pytest.param("olmo2", {}, {}, marks=pytest.mark.thorough),
    pytest.param("deepseek_v3", {}, {"tp_size": 2}, marks=pytest.mark.thorough)])
def test_requests_with_other_adapters_and_none_share_steps(family, changes, options, tmp_path):
    model = families.tiny_model(family, **changes)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 enable_lora=True, **options)
    manifest = read_manifest(tmp_path / "case")
    layers = {module for layer in manifest.chips[0].lora for module in layer.modules}
    assert {layer.dtype for layer in manifest.chips[0].lora} == {"float32"}
    names = [name for name in lora.linear_layers(model) if name in layers]
    assert len(names) >= 12
    made = {"all": lora.make(model, names, rank=4),
            "some": lora.make(model, names[1::2], rank=12, seed=1)}
    for name, factors in made.items():
        rank = {"all": 4, "some": 12}[name]
        llmc.compile_adapter(lora.save(tmp_path / f"{name}_peft", factors, r=rank,
                                       lora_alpha=2 * rank), tmp_path / "case", tmp_path / name)
    with interpreted(tmp_path / "case", SLOTS, max_lora_rank=12,
                     adapters={name: tmp_path / name for name in made}) as llm:
        for _ in range(2):
            completions = llm.generate(PROMPTS, PARAMS, adapter=["all", "some", None])
            for completion, factors in zip(completions, [*made.values(), {}], strict=True):
                lora.assert_generates(lora.merged(model, factors), completion, 3e-5)


@pytest.mark.parametrize(("family", "changes", "options"), [
    ("llama", {"tie_word_embeddings": True}, {"tp_size": 3}), ("gpt2", {}, {}),
    pytest.param("gemma2", {}, {"tp_size": 2}, marks=pytest.mark.thorough),
    pytest.param("llama", {}, {}, marks=pytest.mark.thorough)])
def test_embeddings_and_heads_take_adapters(family, changes, options, tmp_path):
    model = families.tiny_model(family, **changes)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 enable_lora=True, **options)
    adapted = lora.adapt_ends(model, tmp_path / "peft")
    llmc.compile_adapter(tmp_path / "peft", tmp_path / "case", tmp_path / "adapter")
    with interpreted(tmp_path / "case", SLOTS, max_lora_rank=12,
                     adapters={"own": tmp_path / "adapter"}) as llm:
        with_adapter, without = llm.generate([PROMPTS[0]] * 2, PARAMS, adapter=["own", None])
    lora.assert_generates(adapted, with_adapter, 3e-5)
    lora.assert_generates(model, without, 3e-5)


def test_modules_of_a_layer_are_parts_of_a_slot():
    layer = LoraLayer(name="qkv", group=0, dtype="bfloat16", rows=(
        LayerRows(module="q", start=0, stop=4), LayerRows(module="v", start=0, stop=2),
        LayerRows(module="", start=0, stop=1)), columns=(LayerRows(module="", start=0, stop=3),))
    left, right = np.ones((12, 3), np.float32), np.zeros((12, 7), np.float32)
    right[:3, :4], right[3:, 4:6] = 1.00390625, 3  # the first is between two bfloat16 values
    down, up = slot_matrices(layer, [3, 9], left, right)
    assert down.shape == (2, 16, 3) and up.shape == (7, 16)
    values = [(own.astype(np.uint32) << 16).view(np.float32) for own in (down, up)]
    assert values[0].sum(2).astype(int).tolist() == [[3] * 3 + [0] * 13, [3] * 9 + [0] * 7]
    assert values[1].sum(1).tolist() == [3.0] * 4 + [27.0] * 2 + [0.0]


@pytest.mark.parametrize(("dtype", "shape"), [
    ("float32", ("max_loras", 4)), ("float32", (2, "max_loras", 16, 8)), ("float32", (3, 8, 16)),
    ("int32", ("max_loras", 8, "max_lora_rank")), ("float32", ("max_loras",)),
    ("float8_e4m3fn", ("max_loras", 8, "max_lora_rank"))])
def test_programs_with_other_adapters_are_refused(dtype, shape):
    with pytest.raises(ValueError, match="adapters 'own' has"):
        ProgramTensor(name="own", kind="adapters", dtype=dtype, shape=shape)


def test_an_adapter_has_a_rank_for_each_module(lora_case, tiny_model, tmp_path):
    factors = lora.make(tiny_model, lora.linear_layers(tiny_model, "q_proj|down_proj"))
    llmc.compile_adapter(lora.save(tmp_path / "peft", factors), lora_case(1), tmp_path / "own")
    info = json.loads((tmp_path / "own" / "adapter_info.json").read_text())
    assert info["ranks"] == [4] * len(info["modules"])
    for ranks, match in (([4], "8 modules have 1 ranks"), ([4] * 7 + [3], "expected float32")):
        (tmp_path / "own" / "adapter_info.json").write_text(json.dumps({**info, "ranks": ranks}))
        with pytest.raises(llmc.LlmcError, match=match):
            llmc.LLM(lora_case(1), adapters={"own": tmp_path / "own"})
