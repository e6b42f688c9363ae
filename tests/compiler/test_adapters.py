"""LoRA adapters compiled for a case directory, and merged into a model's weights."""

import json
import math
import shutil

import families
import lora
import numpy as np
import pytest
import torch

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.compiler.check.diff import diff
from llmc.compiler.expert_adapter import ExpertStack, stacked_factors
from llmc.compiler.frontend.peft import ExpertFactors, PeftAdapter
from llmc.compiler.graph.origin import Origin
from llmc.compiler.graph.weights import Weight

IDS = [5, 9, 33, 7, 20, 1, 2, 50]


@pytest.fixture(scope="module")
def adapters(tiny_model, tmp_path_factory):
    """An adapter of all layers: its PEFT directory and its factors."""
    factors = lora.make(tiny_model, lora.linear_layers(tiny_model))
    return lora.save(tmp_path_factory.mktemp("peft") / "all", factors), factors


def test_only_models_that_take_adapters_have_their_inputs(case_tp1, lora_case):
    assert not read_manifest(case_tp1).takes_adapters
    assert "lora" not in (case_tp1 / "model_info.json").read_text().replace('"name": "lora"', "")
    manifest = read_manifest(lora_case(1))
    assert manifest.takes_adapters
    table, layer = manifest.chips[0].lora[:2]
    assert (table.modules, table.in_features) == (("model.embed_tokens",), 300)
    assert layer.modules == tuple(f"model.layers.0.self_attn.{kind}_proj" for kind in "qkv")
    assert (layer.in_features, layer.out_features) == (64, 128)
    names = [tensor.name for tensor in manifest.chips[0].inputs if "lora" in tensor.name]
    assert len(names) == 2 * len(manifest.chips[0].lora) + 6 + 2


def test_a_rank_takes_the_rows_and_columns_of_its_weights(lora_case):
    first, second = (chip.lora for chip in read_manifest(lora_case(2)).chips)
    output = next(index for index, layer in enumerate(first) if "o_proj" in layer.name)
    assert [(run.start, run.stop) for run in first[output].columns] == [(0, 32)]
    assert [(run.start, run.stop) for run in second[output].columns] == [(32, 64)]
    assert [(run.module.rpartition(".")[2], run.start, run.stop) for run in second[1].rows] == [
        ("q_proj", 32, 64), ("k_proj", 16, 32), ("v_proj", 16, 32)]


def test_a_model_that_takes_adapters_is_compared_without_any(tiny_hf, lora_case):
    assert diff(lora_case(2), tiny_hf, tokens=0).verdict is None


def test_weights_record_the_origin_of_their_rows_and_columns():
    one, two = (Weight.of(np.arange(24.0).reshape(6, 4) + 100 * index) for index in range(2))
    one.origin, two.origin = Origin.of("one", (6, 4)), Origin.of("two", (6, 4))
    made = Weight.concat([one.take_rows([5, 1]), two]).pad_rows(9).take_columns([3, 0])
    origin = made.origin
    assert origin.names == ("one", "two")
    expected = [[0.0, 0.0] if source < 0 else
                [(one, two)[source].load()[row, column] for column in origin.column]
                for source, row in zip(origin.source, origin.row, strict=True)]
    np.testing.assert_array_equal(made.load(), expected)
    assert one.transpose().origin.column.tolist() == list(range(6))
    assert one.map(np.negative).origin is None  # other values


def test_an_adapter_has_the_same_bytes_each_time(adapters, lora_case, tmp_path):
    infos = [llmc.compile_adapter(adapters[0], lora_case(2), tmp_path / name) for name in "ab"]
    assert infos[0] == infos[1]
    assert infos[0].rank == 4 and len(infos[0].modules) == 28
    assert [entry.path for entry in infos[0].files] == [
        "chip0/adapter.safetensors", "chip1/adapter.safetensors"]
    for entry in infos[0].files:
        assert (tmp_path / "a" / entry.path).read_bytes() == \
            (tmp_path / "b" / entry.path).read_bytes()


def test_an_output_replaces_an_adapter_and_nothing_else(adapters, lora_case, case_tp1, tmp_path):
    for _ in range(2):
        llmc.compile_adapter(adapters[0], lora_case(1), tmp_path / "out")
    copy = shutil.copytree(case_tp1, tmp_path / "case")
    with pytest.raises(llmc.LlmcError, match="is not the directory of an adapter"):
        llmc.compile_adapter(adapters[0], lora_case(1), copy)
    with pytest.raises(llmc.LlmcError, match="is not a case directory"):
        llmc.compile("nowhere", tmp_path / "out")


def write(tmp_path, factors, **changes):
    return lora.save(tmp_path / "peft", factors, **changes)


def tensors(**arrays):
    return {f"{lora.PREFIX}{name}": array.astype(np.float32) for name, array in arrays.items()}


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(("changes", "message"), [
    (dict(peft_type="IA3"), "has peft_type 'IA3', expected 'LORA'"),
    (dict(use_qalora=True), "has use_qalora True, which llmc does not support"),
    (dict(init_lora_weights="pissa"), "has init_lora_weights 'pissa', which changes the base's"),
    (dict(lora_alpha="x"), "has lora_alpha 'x', expected a number"),
    (dict(alpha_pattern=[1]), "has alpha_pattern .*, expected names with numbers"),
    (dict(alpha_pattern={"(": 1}), "has a pattern that is no regular expression"),
    (dict(tensors={f"{lora.PREFIX}{LAYER}.lora_A.weight": np.full((4, 100), np.nan, np.float32)}),
     "has 400 NaN and 0 infinite values"),
    (dict(tensors={f"{lora.PREFIX}{LAYER}.lora_B.weight": np.ones((64, 3), np.float32)}),
     r"has factors \[4, 100\] and \[64, 3\] of 'model.layers.1.mlp.down_proj'"),
    (dict(tensors={f"{lora.PREFIX}{LAYER}.lora_A.weight": np.ones((257, 100), np.float32),
                   f"{lora.PREFIX}{LAYER}.lora_B.weight": np.ones((64, 257), np.float32)}),
     "has rank 257 for 'model.layers.1.mlp.down_proj', expected 1 to 256"),
    (dict(tensors={f"{lora.PREFIX}{LAYER}.lora_A.weight": np.ones((4, 90), np.float32)}),
     r"as a matrix \[64, 90\], in .* it is \[64, 100\]; give the adapter's own base"),
    (dict(tensors={f"{lora.PREFIX}model.layers.9.mlp.up_proj.lora_{part}.weight":
                   np.ones(shape, np.float32)
                   for part, shape in (("A", (4, 64)), ("B", (100, 4)))}),
     "changes 'model.layers.9.mlp.up_proj', which is no layer of"),
    (dict(tensors={f"{lora.PREFIX}{LAYER}.lora_magnitude_vector": np.ones(64, np.float32)}),
     "uses DoRA, which scales the base's weights; merge it instead"),
    (dict(tensors={f"{lora.PREFIX}model.embed_tokens.lora_embedding_{part}":
                   np.ones(shape, np.float32)
                   for part, shape in (("A", (4, 299)), ("B", (64, 4)))}),
     r"changes 'model.embed_tokens' as a matrix \[64, 299\], in .* it is \[64, 300\]; give the"),
    (dict(tensors={f"{lora.PREFIX}lm_head.weight": np.ones((300, 64), np.float32)}),
     r"replaces the parameter 'lm_head.weight' of its base"),
    (dict(tensors={f"{lora.PREFIX}{LAYER}.lora_C.weight": np.ones((4, 4), np.float32)}),
     "is not one of a LoRA adapter that llmc supports"),
], ids=lambda value: None if isinstance(value, dict) else value.split(",")[0])
def test_what_a_request_cannot_bring_is_refused(changes, message, tiny_model, lora_case, tmp_path):
    factors = lora.make(tiny_model, [LAYER])
    with pytest.raises(llmc.LlmcError, match=message):
        llmc.compile_adapter(write(tmp_path, factors, **changes), lora_case(1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_directories_that_are_no_adapters_are_refused(case_tp1, lora_case, adapters, tmp_path):
    with pytest.raises(llmc.LlmcError, match="has no adapter_config.json"):
        llmc.compile_adapter(tmp_path, lora_case(1), tmp_path / "out")
    with pytest.raises(llmc.LlmcError, match="takes no adapters; compile it again with"):
        llmc.compile_adapter(adapters[0], case_tp1, tmp_path / "out")
    (tmp_path / "adapter_config.json").write_text(json.dumps(lora.CONFIG))
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(llmc.LlmcError, match="adapter_model.bin is pickled; save the adapter"):
        llmc.compile_adapter(tmp_path, lora_case(1), tmp_path / "out")


@pytest.mark.parametrize(("changes", "message"), [
    (dict(target="tensorrt"), "adapters run on targets cpu and cuda"),
    (dict(target="tensorrt_rtx"), "adapters run on targets cpu and cuda"),
    (dict(enable_lora=1), "enable_lora is 1, expected True or False")])
def test_targets_without_adapters_are_refused(changes, message, tiny_hf, tmp_path):
    with pytest.raises(llmc.LlmcError, match=message):
        llmc.compile(tiny_hf, tmp_path / "case", **{"enable_lora": True, **changes})


def compiled_logits(hf, peft, tmp_path, **options):
    llmc.compile(hf, tmp_path / "case", adapter=peft, **options)
    assert [file.name for file in read_manifest(tmp_path / "case").source.adapter] == [
        "adapter_config.json", "adapter_model.safetensors"]
    with llmc.LLM(tmp_path / "case") as llm:
        return llm.logits(IDS)


@pytest.mark.parametrize(("changes", "scales"), [
    (dict(), lambda name: 2.0),
    (dict(use_rslora=True, lora_alpha=3,
          alpha_pattern={"down_proj": 6, r"layers\.0\.mlp\.up_proj": 12}),
     lambda name: {"model.layers.0.mlp.up_proj": 12}.get(
         name, 6 if name.endswith("down_proj") else 3) / math.sqrt(4))])
def test_a_merged_adapter_is_added_with_its_scale(changes, scales, tiny_hf, tiny_model, adapters,
                                                  tmp_path):
    model = tiny_model
    for name, pair in adapters[1].items():
        model = lora.merged(model, {name: pair}, scales(name)) if name.startswith(
            "model.layers.0") else model
    factors = {name: pair for name, pair in adapters[1].items()
               if name.startswith("model.layers.0")}
    got = compiled_logits(tiny_hf, write(tmp_path, factors, **changes), tmp_path, tp_size=2)
    np.testing.assert_allclose(got, lora.logits_of(model, IDS), atol=1e-5)


def test_dora_embeddings_and_saved_modules_are_merged(tiny_hf, tiny_model, tmp_path):
    rng = np.random.default_rng(5)
    factors = lora.make(tiny_model, [LAYER])
    norms = rng.uniform(0.5, 1.5, 64).astype(np.float32)
    left, right = (rng.standard_normal(shape).astype(np.float32) * 0.1
                   for shape in ((4, 300), (64, 4)))
    head = rng.standard_normal((300, 64)).astype(np.float32)
    peft = write(tmp_path, factors, use_dora=True, tensors=tensors(**{
        f"{LAYER}.lora_magnitude_vector": norms, "lm_head.weight": head,
        "model.embed_tokens.lora_embedding_A": left, "model.embed_tokens.lora_embedding_B": right}))
    model = lora.merged(tiny_model, factors)
    with torch.no_grad():
        weight = model.get_submodule(LAYER).weight
        weight *= (torch.from_numpy(norms) / weight.norm(dim=1))[:, None]
        model.lm_head.weight.copy_(torch.from_numpy(head))
        model.model.embed_tokens.weight += 2 * torch.from_numpy((right @ left).T)
    np.testing.assert_allclose(compiled_logits(tiny_hf, peft, tmp_path),
                               lora.logits_of(model, IDS), atol=2e-5)


@pytest.mark.parametrize(("changes", "message"), [
    (dict(tensors={f"{lora.PREFIX}{LAYER}.lora_A.weight": np.ones((4, 90), np.float32)}),
     r"as a matrix \[64, 90\], in the model it is \[64, 100\]"),
    (dict(tensors={f"{lora.PREFIX}lm_head.weight": np.ones((7, 64), np.float32)}),
     r"has 'lm_head.weight' as \[7, 64\], 'LlamaForCausalLM' as \[300, 64\]"),
    (dict(tensors={f"{lora.PREFIX}model.head.weight": np.ones((7, 64), np.float32)}),
     "changes 'model.head.weight', which 'LlamaForCausalLM' does not have")])
def test_an_adapter_of_another_model_is_not_merged(changes, message, tiny_hf, tiny_model,
                                                   tmp_path):
    with pytest.raises(llmc.LlmcError, match=message):
        llmc.compile(tiny_hf, tmp_path / "case", adapter=write(
            tmp_path, lora.make(tiny_model, [LAYER]), **changes))


@pytest.mark.parametrize(("family", "use_rslora"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_stacked_experts_are_merged(family, use_rslora, tmp_path):
    """As PEFT's ParamWrapper adds them; the experts of gpt-oss are [experts, in, out]."""
    model = families.tiny_model(family)
    hf = families.save(model, tmp_path / "hf")
    given, model = lora.adapt_experts(model, (0, 2), use_rslora=use_rslora)
    peft = write(tmp_path, {}, tensors=given, r=2, target_parameters=lora.EXPERTS,
                 use_rslora=use_rslora)
    llmc.compile(hf, tmp_path / "case", adapter=peft)
    with llmc.LLM(tmp_path / "case") as llm:
        np.testing.assert_allclose(llm.logits(IDS), lora.logits_of(model, IDS), atol=1e-4)
    given[f"{lora.PREFIX}model.layers.0.mlp.experts.lora_A.weight"] = np.ones((8, 7), np.float32)
    with pytest.raises(llmc.LlmcError, match=r"by matrices \[64, 7\] of 8 ranks in all; in the"):
        llmc.compile(hf, tmp_path / "wrong", adapter=write(
            tmp_path / "w", {}, tensors=given, r=2, target_parameters=lora.EXPERTS))


def test_factors_of_transposed_experts_exchange_in_and_out(tmp_path):
    """As PEFT makes them of Llama 4, whose parameters are [experts, in, out]."""
    rng = np.random.default_rng(2)
    down, up = rng.standard_normal((3 * 2, 12)), rng.standard_normal((8, 2 * 3))  # outputs 12
    factors = ExpertFactors("m.experts", down, up, 4, {}, False)
    adapter = PeftAdapter(tmp_path, {}, [factors], {}, {}, {}, frozenset(), False)
    stacks = {"m.experts.gate_up_proj": ExpertStack(3, 12, 8, tuple(range(6)), tuple(range(6, 12))),
              "m.experts.down_proj": ExpertStack(3, 8, 6, (), ())}
    name, made = stacked_factors(adapter, factors, stacks)
    assert name == "m.experts.gate_up_proj"
    stored = 2 * np.einsum("ire,ero->eio", up.reshape(8, 2, 3), down.reshape(3, 2, 12))
    np.testing.assert_allclose(np.einsum("reo,rei->eio", made.up, made.down), stored, rtol=1e-6)


def test_adapters_of_other_experts_are_refused(tmp_path):
    model = families.tiny_model("qwen3_moe")
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", enable_lora=True)
    experts = "model.layers.0.mlp.experts"
    stacked = [layer for layer in read_manifest(tmp_path / "case").chips[0].lora if layer.experts]
    assert [(layer.modules[0], layer.num_experts, layer.in_features, layer.out_features)
            for layer in stacked[:2]] == [(f"{experts}.gate_up_proj", 4, 64, 80),
                                          (f"{experts}.down_proj", 4, 40, 64)]
    narrow = {f"{lora.PREFIX}{experts}.lora_A.weight": np.ones((8, 41), np.float32),
              f"{lora.PREFIX}{experts}.lora_B.weight": np.ones((64, 8), np.float32)}
    high = {f"{lora.PREFIX}{experts}.lora_A.weight": np.ones((4 * 257, 40), np.float32),
            f"{lora.PREFIX}{experts}.lora_B.weight": np.ones((64, 4 * 257), np.float32)}

    def single(expert, kind, shape):
        return {f"{lora.PREFIX}{experts}.{expert}.{kind}.lora_{part}.weight": np.ones(
            size, np.float32) for part, size in (("A", (4, shape[1])), ("B", (shape[0], 4)))}

    for index, (tensors, message) in enumerate([
            (narrow, r"changes 'model.layers.0.mlp.experts' by matrices \[64, 41\] of 8 ranks in "
                     r"all; the base's stacks are gate_up_proj \[4, 80, 64\], down_proj \[4, 64, "
                     r"40\]; give the adapter's own base"),
            (high, "has rank 257 for 'model.layers.0.mlp.experts', expected 1 to 256"),
            (single(4, "gate_proj", (40, 64)), r"as a matrix \[40, 64\], in the base "
                                               r"'.*gate_up_proj' has 4 of \[40, 64\]"),
            (single(0, "down_proj", (64, 41)), r"as a matrix \[64, 41\], in the base "
                                               r"'.*down_proj' has 4 of \[64, 40\]"),
            (single(0, "mid_proj", (64, 40)), "'.*experts.0.mid_proj', which is no layer of")]):
        with pytest.raises(llmc.LlmcError, match=message):
            llmc.compile_adapter(
                write(tmp_path / str(index), {}, tensors=tensors, target_parameters=lora.EXPERTS),
                tmp_path / "case", tmp_path / "out")
