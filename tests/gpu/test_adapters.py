"""LoRA adapters of requests on a GPU: kernels against references, tokens against the cpu target."""

from dataclasses import replace

import families
import lora
import numpy as np
import pytest
import torch
from on_device import DTYPES, check
from schedule_interpreter import LIMITS, interpreted

import llmc
from llmc import plugins
from llmc.artifacts.manifest import read_manifest
from llmc.plugins.code_types import CODE_TYPES
from llmc.plugins.lora import slot_inputs
from llmc.plugins.quantization import pack

PROMPTS = [[5, 9, 33, 7, 20], [11, 3, 8], list(range(40, 90)), [5, 9, 33, 7, 20]]
PARAMS = llmc.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
KINDS = {"all": ".*", "attention": "self_attn", "queries": "[qv]_proj"}
NAMES = {"GemmBiasAct": {}, "GemmBiasAct, gelu": {"activation": "gelu_tanh"}, "GemmBiasRes": {},
         "GatedMLP": {"activation": "silu"}, "NormGemm": {"epsilon": 1e-5},
         "NormGemm, centred": {"centred": 1, "epsilon": 1e-5},
         "NormGemm, gated": {"gated": 1, "activation": "silu", "epsilon": 1e-5}}


def layer(rng, name, rows, width, out):
    """The attributes and inputs of a layer without adapters."""
    gated = name in ("GatedMLP", "NormGemm, gated")
    count = 2 * out if gated else out
    inputs = {"x": rng.standard_normal((rows, width)) * 2 + 0.5,
              "weight": rng.standard_normal((count, width)) / width**0.5,
              "bias": rng.standard_normal(count)}
    if name == "GemmBiasRes":
        inputs["residual"] = rng.standard_normal((rows, out))
    if name.startswith("NormGemm"):
        inputs["lora_gain"] = rng.uniform(0.5, 2, width).astype(np.float32)
    if "centred" in name:
        inputs["row_sums"] = inputs["weight"].sum(1)
        inputs["lora_shift"] = rng.standard_normal(width).astype(np.float32)
    return dict(NAMES[name]), inputs


def adapters(rng, rows, width, count, ranks, parts):
    """Adapters of random tokens in slots. Their product is about as large as the base's."""
    ids = rng.integers(-1, len(ranks), rows)
    made = slot_inputs(rng, ids, width, count, ranks, parts)
    made["lora_down"] /= width**0.5
    made["lora_up"] /= max(*ranks, 8)**0.5
    for slot, rank in enumerate(ranks):  # ranks beyond an adapter's are not read
        made["lora_down"][:, slot, rank:] = made["lora_up"][slot, :, rank:] = np.nan
    return made


def check_adapted(extension, name, fields, inputs, dtype, **more):
    if "row_sums" in inputs and "weight_dtype" not in fields:
        inputs["row_sums"] = torch.from_numpy(inputs["weight"]).to(DTYPES[dtype]).double() \
            .sum(1).numpy()
    check(extension, plugins.registry()[name.partition(",")[0]], fields, inputs, dtype, **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "out", "ranks", "parts"), [
    (1, 4096, 512, [16], 1), (3, 576, 96, [8, 0, 24], 3), (8, 104, 38, [8, 16], 2),
    (32, 1024, 200, [16] * 32, 1), (31, 100, 24, [8, 8], 1), (2, 2048, 6144, [256, 8], 3),
    (1, 14336, 136, [64], 1), (33, 512, 130, [8, 16, 32], 2), (64, 1024, 257, [16] * 40, 1),
    (300, 576, 320, [8, 0, 64, 16], 3), (257, 2048, 96, [256], 1), (1000, 64, 48, [40, 24], 2),
    (70, 100, 33, [8, 16], 1), (90, 1032, 40, [8, 16, 24], 5)])
@pytest.mark.parametrize("name", NAMES)
def test_every_linear_op_adds_the_adapters_of_its_rows(extension, name, rows, width, out, ranks,
                                                       parts, dtype):
    rng = np.random.default_rng(rows)
    fields, inputs = layer(rng, name, rows, width, out)
    inputs |= adapters(rng, rows, width, len(inputs["weight"]), ranks, parts)
    check_adapted(extension, name, fields, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 20, 80])
@pytest.mark.parametrize("ids", ["none", "one", "last"])
def test_rows_without_adapters_stay(extension, ids, rows, dtype):
    rng = np.random.default_rng(rows)
    for name in NAMES:
        fields, inputs = layer(rng, name, rows, 256, 64)
        inputs |= adapters(rng, rows, 256, len(inputs["weight"]), [16, 8], 2)
        inputs["lora_ids"][:] = {"none": -1, "one": 1, "last": -1}[ids]
        if ids == "last":
            inputs["lora_ids"][-1] = 0
        check_adapted(extension, name, fields, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "out", "group"), [
    (1, 2048, 512, 128), (9, 512, 96, 64), (40, 1024, 256, 128), (300, 512, 136, 32)])
@pytest.mark.parametrize("stored", ["int4", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["GemmBiasAct", "GemmBiasRes", "GatedMLP", "NormGemm",
                                  "NormGemm, gated"])
def test_adapters_of_quantized_weights(extension, name, stored, rows, width, out, group, dtype):
    rng = np.random.default_rng(rows)
    fields, inputs = layer(rng, name, rows, width, out)
    count, bits = len(inputs["weight"]), CODE_TYPES[stored].bits
    codes = rng.integers(0, 2 ** bits, (count, width), dtype=np.uint8)
    if stored == "float8_e4m3fn":
        codes &= 0xBF  # excluding NaN
    fields |= {"weight_dtype": stored, "group_size": group, "in_features": width,
               "out_features": count}
    scale = rng.uniform(0.5, 1, (count, width // group)) / (2 ** bits * width**0.5)
    inputs |= {"weight": pack(codes, bits), "weight_scale": scale.astype(np.float32)}
    if "lora_gain" in inputs:  # the gain of a quantized weight is not folded
        inputs["norm_weight"] = inputs.pop("lora_gain")
    inputs |= adapters(rng, rows, width, count, [8, 16, 32], 2)
    check_adapted(extension, name, fields, inputs, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 12, 100])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ["GemmBiasRes", "NormGemm, gated"])
def test_adapters_read_activations_before_their_quantization(extension, name, grouped, rows,
                                                             dtype):
    width, out, group = 512, 128, 128 if grouped else 512
    rng = np.random.default_rng(rows)
    fields, inputs = layer(rng, name, rows, width, out)
    count = len(inputs["weight"])
    inputs.pop("lora_gain", None)
    fields |= {"weight_dtype": "float8_e4m3fn", "group_size": group, "in_features": width,
               "out_features": count, "activation_dtype": "float8_e4m3fn",
               "activation_group_size": group if grouped else 0}
    scale = rng.uniform(0.5, 1, (count, width // group)) / (256 * width**0.5)
    inputs |= {"weight": rng.integers(0, 256, (count, width), dtype=np.uint8) & 0xBF,
               "weight_scale": scale.astype(np.float32)}
    inputs |= adapters(rng, rows, width, count, [16, 8], 2)
    check_adapted(extension, name, fields, inputs, dtype, least=6e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 20, 70])
@pytest.mark.parametrize("name", ["GatedMLP", "NormGemm, gated"])
def test_a_gated_layer_with_adapters_quantizes_its_output(extension, name, rows, dtype):
    rng = np.random.default_rng(rows)
    fields, inputs = layer(rng, name, rows, 256, 64)
    inputs |= adapters(rng, rows, 256, 128, [16, 8], 2)
    check_adapted(extension, name, fields | {"out_scale": 0.0125}, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "vocab", "hidden", "ranks", "fields"), [
    (1, 1000, 512, [16], {}), (9, 301, 104, [8, 0, 256], {"scale": 22.5}),
    (300, 4096, 576, [8, 16, 32], {"vocab_start": 2000, "vocab_sharded": 1}),
    (33, 100, 36, [8, 24], {"scale": 0.5})])
@pytest.mark.parametrize("stored", ["", "int8"])
def test_embeddings_add_the_adapters_of_their_tokens(extension, stored, tokens, vocab, hidden,
                                                     ranks, fields, dtype):
    rng = np.random.default_rng(tokens)
    inputs = {"input_ids": rng.integers(0, vocab + fields.get("vocab_start", 0), tokens),
              "table": rng.standard_normal((vocab, hidden)),
              "position_ids": rng.integers(0, 5, tokens),
              "position_table": rng.standard_normal((5, hidden))}
    inputs |= adapters(rng, tokens, vocab, hidden, ranks, 1)
    inputs["lora_down"] *= vocab**0.5  # a token reads one column
    if stored:
        fields = {**fields, "weight_dtype": stored, "group_size": hidden, "in_features": hidden,
                  "out_features": vocab}
        inputs |= {"table": rng.integers(0, 256, (vocab, hidden), dtype=np.uint8),
                   "weight_scale": rng.uniform(0.005, 0.01, (vocab, 1)).astype(np.float32)}
    check_adapted(extension, "Embedding", fields, inputs, dtype)


def experts(rng, tokens, count, top_k, hidden, inner, ranks, others=0):
    """Attributes and inputs of gated Experts with adapters; `others` are of another rank."""
    inputs = {"x": rng.standard_normal((tokens, hidden)),
              "experts": np.stack([rng.permutation(count + others)[:top_k]
                                   for _ in range(tokens)]),
              "scores": rng.uniform(0.1, 1, (tokens, top_k)).astype(np.float32),
              "gate_up": rng.standard_normal((count, 2 * inner, hidden)) / hidden**0.5,
              "down": rng.standard_normal((count, hidden, inner)) / inner**0.5,
              "gate_up_bias": rng.standard_normal((count, 2 * inner)),
              "residual": rng.standard_normal((tokens, hidden))}
    for stack, rows, width in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        made = adapters(rng, tokens, width, count * rows, ranks, count)
        inputs |= {f"{stack}_{name}": made[name]
                   for name in ("lora_down", "lora_up", "lora_ranks")}
    inputs["lora_ids"] = rng.integers(-1, len(ranks), tokens).astype(np.int32)
    fields = {"top_k": top_k, **({"sharded": 1, "first_expert": others // 2} if others else {})}
    return fields, inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "count", "top_k", "hidden", "inner", "ranks", "others"), [
    (1, 4, 2, 64, 40, [8], 0), (1, 8, 2, 2048, 768, [16, 8], 8), (5, 8, 2, 512, 96, [8, 16], 0),
    (70, 8, 4, 256, 128, [16, 8, 32], 8), (300, 16, 4, 512, 192, [16] * 8, 0),
    (33, 4, 2, 100, 36, [8, 8], 0), (2000, 4, 2, 64, 64, [8, 24], 0),
    (9, 300, 3, 64, 32, [8] * 16, 0)])
def test_experts_add_the_adapters_of_their_tokens(extension, tokens, count, top_k, hidden, inner,
                                                  ranks, others, dtype):
    """Of one token, of few and of many pairs; also of more experts than have a plan."""
    rng = np.random.default_rng(tokens)
    fields, inputs = experts(rng, tokens, count, top_k, hidden, inner, ranks, others)
    check_adapted(extension, "Experts", fields, inputs, dtype)
    fields |= {"scale_input": 1, "activation": "gelu_tanh"}
    check_adapted(extension, "Experts", fields, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "stored", "rounds"), [
    (1, "int4", ""), (40, "int4", ""), (90, "mxfp4", ""), *(
        (tokens, "float8_e4m3fn", rounds) for tokens in (1, 7, 80)
        for rounds in ("", "rows", "groups"))])
def test_adapters_of_quantized_experts(extension, tokens, stored, rounds, dtype):
    """With activations that are quantized per row, per group of columns, or not at all."""
    count, hidden, inner = 4, 256, 128
    group = {"mxfp4": 32}.get(stored, 128)
    rng = np.random.default_rng(tokens)
    fields, inputs = experts(rng, tokens, count, 2, hidden, inner, [8, 16])
    bits = CODE_TYPES[stored].bits
    for name, rows, width in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        codes = rng.integers(0, 2 ** bits, (count * rows, width), dtype=np.uint8)
        codes &= 0xBF if stored == "float8_e4m3fn" else 0xFF
        inputs[name] = pack(codes, bits).reshape(count, rows, -1)
        shape = count, rows, width // group
        inputs[f"{name}_scale"] = rng.integers(120, 124, shape, np.uint8) if stored == "mxfp4" \
            else (rng.uniform(0.5, 1, shape) / (2 ** bits * width**0.5)).astype(np.float32)
    fields |= {"weight_dtype": stored, "group_size": group, "in_features": hidden,
               "inner_features": inner}
    if rounds:
        fields |= {"activation_dtype": "float8_e4m3fn",
                   "activation_group_size": group if rounds == "groups" else 0}
    check_adapted(extension, "Experts", fields, inputs, dtype, least=6e-2 if rounds else 0)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A tiny Llama: its cases for cpu and cuda, and its adapters for each, by name."""
    root = tmp_path_factory.mktemp("adapters")
    model = families.tiny_model("llama", max_position_embeddings=256)
    hf = families.save(model, root / "hf")
    made = {}
    for target in ("cpu", "cuda"):
        llmc.compile(hf, root / target, target=target, enable_lora=True, max_seq_len=200)
        made[target] = root / target, {name: root / f"{target}_{name}" for name in KINDS}
    for seed, (name, pattern) in enumerate(KINDS.items()):
        factors = lora.make(model, lora.linear_layers(model, pattern), seed=seed, rank=4 * seed + 4)
        peft = lora.save(root / name, factors, r=4 * seed + 4, lora_alpha=8 * seed + 8)
        for case, directories in made.values():
            llmc.compile_adapter(peft, case, directories[name])
    return made


def tokens(case, requests, **options):
    """Token ids of (prompt, adapter) pairs."""
    directory, directories = case
    with llmc.LLM(directory, adapters=directories, **options) as llm:
        made = llm.generate([prompt for prompt, _ in requests], PARAMS,
                            adapter=[name for _, name in requests])
    return [completion.token_ids for completion in made]


@pytest.mark.parametrize("options", [
    {}, {"max_loras": 1}, {"max_num_batched_tokens": 24, "max_batch_size": 4},
    {"max_lora_rank": 64, "max_loras": 40}, {"speculate": "ngram", "num_speculative_tokens": 3}])
def test_tokens_are_those_of_the_cpu_target(extension, compiled, options):
    """In decode steps that are captured, and in prefill that is not; also with drafts."""
    requests = [*zip(PROMPTS, [*KINDS, None], strict=True),
                *zip(PROMPTS[::-1], [*KINDS, None], strict=True)]
    assert tokens(compiled["cuda"], requests, **options) == tokens(compiled["cpu"], requests)
    alone = [tokens(compiled["cuda"], [request], **options)[0] for request in requests[:4]]
    assert alone == tokens(compiled["cpu"], requests[:4])


def test_many_rows_of_few_adapters_share_tiles(extension, compiled):
    requests = [([3 + index, 7, 5], [*KINDS, None][index % 4]) for index in range(50)]
    assert tokens(compiled["cuda"], requests, max_batch_size=64) == \
        tokens(compiled["cpu"], requests)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps_of_many_rows_in_16_bits(extension, compiled, dtype, tmp_path):
    """Prefill and captured decode by tiles of rows, against the cpu target's log-probabilities."""
    params = llmc.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=0)
    names = [[*KINDS, None][index % 4] for index in range(50)]
    prompts = [[3 + index, 7, 5] for index in range(50)]
    case, root = tmp_path / "case", compiled["cpu"][0].parent
    llmc.compile(root / "hf", case, target="cuda", dtype=dtype, enable_lora=True, max_seq_len=200)
    for name in KINDS:
        llmc.compile_adapter(root / name, case, tmp_path / name)
    made = []
    for directory, adapters in ((case, {name: tmp_path / name for name in KINDS}),
                                compiled["cpu"]):
        with llmc.LLM(directory, adapters=adapters, max_batch_size=64) as llm:
            made.append(llm.generate(prompts, params, adapter=names))
    compared = 0
    for ours, wanted in zip(*made, strict=True):
        for place, (a, b) in enumerate(zip(ours.logprobs, wanted.logprobs, strict=True)):
            assert abs(a.chosen - b.chosen) < 0.1, (wanted.index, place)
            compared += 1
            if ours.token_ids[place] != wanted.token_ids[place]:
                break  # equal within rounding; what follows differs
    assert compared > 120


def test_adapters_are_loaded_into_slots_while_requests_run(extension, compiled):
    (case, directories), (_, on_cpu) = compiled["cuda"], compiled["cpu"]
    expected = tokens(compiled["cpu"], [(PROMPTS[0], name) for name in KINDS])
    long = llmc.SamplingParams(max_tokens=140, ignore_eos=True, temperature=0)
    with llmc.LLM(case, max_loras=2, max_lora_rank=16) as llm:
        llm.load_adapter("all", directories["all"])
        running = llm.stream([PROMPTS[1]], long, adapter="all")
        next(running)
        for name in ("attention", "queries"):
            llm.load_adapter(name, directories[name])
        for _ in range(2):
            for name, wanted in zip(KINDS, expected, strict=True):
                assert llm.generate([PROMPTS[0]], PARAMS, adapter=name)[0].token_ids == wanted
        assert len(list(running)) == 139
        with pytest.raises(llmc.LlmcError, match="was compiled for another case directory"):
            llm.load_adapter("other", on_cpu["all"])


def assert_tokens_of_the_program(case, adapter):
    """With and without an adapter in one batch, the engine and the NumPy program agree."""
    slots = replace(LIMITS, max_loras=8, max_lora_rank=16)
    made = []
    for run in (llmc.LLM, lambda case, **given: interpreted(case, slots, **given)):
        with run(case, adapters={"own": adapter}) as llm:
            made.append([own.token_ids for own in llm.generate(
                PROMPTS, PARAMS, adapter=["own", None, "own", None])])
    assert made[0] == made[1]


@pytest.mark.parametrize(("family", "options"), [
    ("gpt2", {}), ("phi3", {}), ("llama", {"quantize": "int4", "group_size": 32}),
    ("gemma2", {}), ("olmo2", {})])
def test_tokens_are_those_of_the_program(extension, family, options, tmp_path):
    """Fused projections, norms with a bias, and quantized weights, against the NumPy program."""
    changes = {"intermediate_size": 96} if options else {}
    model = families.tiny_model(family, **changes)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 enable_lora=True, **options)
    layers = {module for layer in read_manifest(tmp_path / "case").chips[0].lora
              for module in layer.modules}
    factors = lora.make(model, [name for name in lora.linear_layers(model) if name in layers])
    llmc.compile_adapter(lora.save(tmp_path / "peft", factors), tmp_path / "case",
                         tmp_path / "adapter")
    assert_tokens_of_the_program(tmp_path / "case", tmp_path / "adapter")


@pytest.mark.parametrize(("family", "options"), [
    ("qwen3_moe", {}), ("gpt_oss", {}), ("qwen3_moe", {"dtype": "bfloat16"})])
def test_experts_take_adapters(extension, family, options, tmp_path):
    """In prefill and in captured decode steps, against the cpu target."""
    model = families.tiny_model(family)
    hf = families.save(model, tmp_path / "hf")
    tensors, _ = lora.adapt_experts(model, (0, 2))
    peft = lora.save(tmp_path / "peft", {}, tensors=tensors, r=2, target_parameters=lora.EXPERTS)
    made = []
    for target, own in (("cuda", options), ("cpu", {})):
        llmc.compile(hf, tmp_path / target, target=target, enable_lora=True, **own)
        llmc.compile_adapter(peft, tmp_path / target, tmp_path / f"{target}_adapter")
        with llmc.LLM(tmp_path / target, adapters={"own": tmp_path / f"{target}_adapter"}) as llm:
            made.append(llm.generate(PROMPTS, replace(PARAMS, logprobs=0),
                                     adapter=["own", None, "own", None]))
    for ours, wanted in zip(*made, strict=True):
        if not options:
            assert ours.token_ids == wanted.token_ids
        assert abs(ours.logprobs[0].chosen - wanted.logprobs[0].chosen) < 0.1


@pytest.mark.parametrize(("family", "changes", "options"), [
    ("llama", {"tie_word_embeddings": True}, {}), ("gemma2", {}, {}), ("gpt2", {}, {}),
    ("llama", {"intermediate_size": 96}, {"quantize": "int4", "group_size": 32})])
def test_embeddings_and_heads_take_adapters(extension, family, changes, options, tmp_path):
    """In prefill and in captured decode steps, against the NumPy program."""
    model = families.tiny_model(family, **changes)
    hf = families.save(model, tmp_path / "hf")
    lora.adapt_ends(model, tmp_path / "peft")
    llmc.compile(hf, tmp_path / "case", target="cuda", enable_lora=True, **options)
    llmc.compile_adapter(tmp_path / "peft", tmp_path / "case", tmp_path / "own")
    assert_tokens_of_the_program(tmp_path / "case", tmp_path / "own")
