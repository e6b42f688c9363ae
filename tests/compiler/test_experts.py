"""MoE models: programs, concurrent requests, ranks, checkpoints, and refusals.
"""

import json
import time
from dataclasses import replace

import bench_model
import families
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from schedule_interpreter import LIMITS, Interpreters, interpreted
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama4 import modeling_llama4
from transformers.models.olmoe import modeling_olmoe

import llmc
from llmc import plugins
from llmc.artifacts.manifest import read_manifest
from llmc.compiler import lower
from llmc.compiler.check.diff import diff
from llmc.compiler.frontend import load, trace
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import CompileOptions

TOKENS = np.random.default_rng(0).integers(3, families.VOCAB, 12).tolist()


def fields(graph, op):
    return [dict(node.attrs) for node in graph.nodes if node.op == op]


@pytest.mark.parametrize(("family", "tp_size", "expert_parallel"), [
    *(pytest.param(family, tp_size, False,
                   marks=[pytest.mark.thorough] * (family in families.COMPOSED))
      for family in families.MIXTURES for tp_size in (1, 2)
      if tp_size == 1 or family not in ("olmoe", "minimax_m2")),  # norms over all ranks' heads
    *(("mixtral", tp_size, True) for tp_size in (2, 4)), ("qwen3_moe", 3, True),
    ("gpt_oss", 2, True)])
def test_the_schedule_gives_transformers_logits_and_tokens(family, tp_size, expert_parallel,
                                                           tmp_path):
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 tp_size=tp_size, expert_parallel=expert_parallel)
    ranks = Interpreters(tmp_path / "case")
    expected = families.reference_logits(model, TOKENS)
    logits = ranks._on_all(lambda rank: np.concatenate([rank.run(TOKENS[:8], 0),
                                                        rank.run(TOKENS[8:], 8)]))
    for own in logits:
        families.assert_close(own, expected)
    assert ranks.greedy(TOKENS, 4) == greedy(model, TOKENS, 4)


def test_the_program_of_experts_with_scaled_inputs(tmp_path):
    model = families.tiny_model("llama4_text", attention_chunk_size=64, num_experts_per_tok=2,
                                attn_temperature_tuning=False)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda", tp_size=2)
    expected = families.reference_logits(model, TOKENS)
    for logits in Interpreters(tmp_path / "case")._on_all(lambda rank: rank.run(TOKENS, 0)):
        families.assert_close(logits, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("family", families.UNPLANNED_MIXTURES)
def test_the_program_of_an_unknown_moe_model(family, tmp_path):
    model = families.tiny_model(family, **families.sizes_of(family))
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda")
    rank, = Interpreters(tmp_path / "case").ranks
    families.assert_close(rank.run(TOKENS, 0), families.reference_logits(model, TOKENS))


def greedy(model, tokens, count):
    """Return transformers' greedy tokens."""
    known = list(tokens)
    while len(known) < len(tokens) + count:
        known.append(int(families.reference_logits(model, known)[-1].argmax()))
    return tuple(known[len(tokens):])


@pytest.mark.parametrize(("family", "tp_size"), [("glm4_moe", 1), ("glm4_moe", 2), ("gpt_oss", 2)])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_concurrent_requests_get_transformers_tokens(family, tp_size, target, tmp_path):
    """Ragged prompts in chunks; few fit at once.

    gpt-oss has prompts longer than its window, with attention sinks.
    """
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target=target,
                 tp_size=tp_size)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, families.VOCAB, n).tolist() for n in (3, 17, 1, 9, 24, 5, 12, 2)]
    params = llmc.SamplingParams(max_tokens=10, ignore_eos=True)
    few = replace(LIMITS, num_blocks=32, max_tokens=7, max_slots=3)
    with interpreted(tmp_path / "case", few) if target == "cuda" else llmc.LLM(
            tmp_path / "case", max_batch_size=3, max_num_batched_tokens=7,
            kv_cache_tokens=128) as llm:
        got = families.ask_at_once(llm, prompts, lambda index: params)
    assert [got[n][0].token_ids for n in range(len(prompts))] == \
        [greedy(model, prompt, 10) for prompt in prompts]


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe"])
def test_one_layer_of_each_kind_is_exported(family, tmp_path, monkeypatch):
    """Also with dense layers first or between, unlike a shortened config."""
    changes = {"first_k_dense_replace": 3} if family == "glm4_moe" else {"mlp_only_layers": [0, 5]}
    model = families.tiny_model(family, num_hidden_layers=9, **changes)
    nodes = families.count_exported(monkeypatch, "Sdpa")
    raw = load(families.save(model, tmp_path / "hf"))
    assert not raw.notes and nodes in ([4], [])  # [] if the export is cached
    llmc.compile(tmp_path / "hf", tmp_path / "case")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), families.reference_logits(model, TOKENS))


ROUTES = {
    "qwen3_moe": dict(score="softmax", normalize=0),
    "qwen2_moe": dict(score="softmax", normalize=0),
    "mixtral": dict(score="softmax", normalize=1),
    "granitemoe": dict(score="softmax", normalize=1),
    "glm4_moe": dict(score="sigmoid", normalize=1, groups=4, top_groups=2, group_score="top2",
                     scale=1.75),
    "minimax_m2": dict(score="sigmoid", normalize=1),
    "phimoe": dict(score="sparsemixer", jitter=0.01),
}


@pytest.mark.parametrize("family", ROUTES)
def test_routing_is_recognized_by_its_computation(family, tmp_path):
    raw = load(families.save(families.tiny_model(family), tmp_path / "hf"))
    fused = lower.fuse(raw, CompileOptions())
    complete = plugins.registry()["Route"].complete
    found = [complete(node) for node in fields(fused.graphs[0], "Route")]
    assert found
    for node in found:
        assert 0 <= node["epsilon"] < 1e-10
        assert node == pytest.approx({**complete({"top_k": 2, **ROUTES[family]}),
                                      "epsilon": node["epsilon"]})


@pytest.mark.parametrize(("family", "changes"), [
    ("glm4_moe", {"n_shared_experts": 0}),
    pytest.param("deepseek_v3", {"n_shared_experts": 0}, marks=pytest.mark.thorough),
    pytest.param("deepseek_v2", {"n_shared_experts": 0}, marks=pytest.mark.thorough),
    ("gpt_oss", {"num_local_experts": 1, "num_experts_per_tok": 1})])
def test_moe_layers_may_have_one_or_no_shared_expert(family, changes, tmp_path):
    model = families.tiny_model(family, **changes)
    hf = families.save(model, tmp_path / "hf")
    expected = families.reference_logits(model, TOKENS)
    llmc.compile(hf, tmp_path / "case")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), expected)
    llmc.compile(hf, tmp_path / "gpu", target="cuda", tp_size=2)
    for logits in Interpreters(tmp_path / "gpu")._on_all(lambda rank: rank.run(TOKENS, 0)):
        families.assert_close(logits, expected)


@pytest.mark.parametrize("top_groups", [
    5, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, 7))])
def test_group_limited_routing_is_recognized(top_groups, tmp_path):
    model = families.tiny_model("glm4_moe", num_hidden_layers=2, n_routed_experts=32, n_group=8,
                                topk_group=top_groups)
    graph = lower.fuse(load(families.save(model, tmp_path / "hf")), CompileOptions()).graphs[0]
    assert [(node["groups"], node["top_groups"], node["group_score"])
            for node in fields(graph, "Route")] == [(8, top_groups, "top2")]


@pytest.mark.parametrize("scale", [
    -1.5, *(pytest.param(scale, marks=pytest.mark.thorough) for scale in (1.23456e-4, 1e-7))])
def test_the_scale_of_routing_scores_is_kept(scale, tmp_path):
    model = families.tiny_model("glm4_moe", num_hidden_layers=2, routed_scaling_factor=scale)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.down_proj"):
                parameter.div_(scale)
    hf = families.save(model, tmp_path / "hf")
    graph = lower.fuse(load(hf), CompileOptions()).graphs[0]
    assert [node["scale"] for node in fields(graph, "Route")] == pytest.approx([scale], rel=1e-6)
    llmc.compile(hf, tmp_path / "case")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), families.reference_logits(model, TOKENS))


def test_signed_scores_do_not_use_the_cpu_moe_kernel(tmp_path):
    """gelu experts are correct, as llmc's body computes them."""
    for activation in ("gelu_pytorch_tanh", "silu"):
        model = families.tiny_model("gemma4_text", **families.GEMMA4_MOE,
                                    hidden_activation=activation)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("per_expert_scale"):
                    parameter.copy_(torch.linspace(-1, 1, len(parameter)))
        hf = families.save(model, tmp_path / activation)
        llmc.compile(hf, tmp_path / f"{activation}-cuda", target="cuda")
        if activation == "silu":
            with pytest.raises(llmc.LlmcError, match="expert scales .* of both signs"):
                llmc.compile(hf, tmp_path / activation / "case")
            continue
        llmc.compile(hf, tmp_path / activation / "case")
        with llmc.LLM(tmp_path / activation / "case") as llm:
            families.assert_close(llm.logits(TOKENS), families.reference_logits(model, TOKENS))


@pytest.mark.parametrize(("family", "changes", "found"), [
    *(("gpt_oss", {"swiglu_limit": limit},
       dict(activation="silu", alpha=1.702, limit=limit, up_offset=1.0))
      for limit in (1000.0, 9000.0, 1e6)),
    pytest.param("hy_v4", {"swiglu_limit": 3000.0}, dict(activation="silu", limit=3000.0),
                 marks=pytest.mark.thorough)])
def test_clamped_activations_are_recognized(family, changes, found, tmp_path):
    model = families.tiny_model(family, num_hidden_layers=2, **changes)
    graph = lower.fuse(load(families.save(model, tmp_path / "hf")), CompileOptions()).graphs[0]
    expected = {"gated": 1, "alpha": 1.0, "limit": 0.0, "up_offset": 0.0, **found}
    nodes = fields(graph, "Experts")
    assert nodes
    for node in nodes:
        complete = plugins.registry()["Experts"].complete(node)
        assert {name: complete[name] for name in expected} == pytest.approx(expected)


def test_shared_experts_join_the_sum_of_the_ranks(tmp_path):
    """One AllReduce after attention, one after experts and shared experts, gated or not."""
    for family in ("glm4_moe", "qwen2_moe"):
        model = families.tiny_model(family)
        hf = families.save(model, tmp_path / family)
        manifest = llmc.compile(hf, tmp_path / f"{family}-case", tp_size=2)
        layers = manifest.dims.num_layers
        collectives = [step for step in manifest.chips[0].steps
                       if getattr(step, "kind", "") == "all_reduce"]
        assert len(collectives) == 1 + 2 * layers  # the embedding's too


def test_experts_are_split_unevenly_and_biases_added_once(tmp_path):
    model = families.tiny_model("olmoe", intermediate_size=44)
    hf = families.save(model, tmp_path / "hf")
    for name, options, shapes in (
            ("inner", dict(tp_size=3), [(5, 30, 64), (5, 30, 64), (5, 28, 64)]),
            ("whole", dict(tp_size=3, expert_parallel=True),
             [(2, 88, 64), (2, 88, 64), (1, 88, 64)])):
        llmc.compile(hf, tmp_path / name, **options)
        found = [load_file(tmp_path / name / f"chip{rank}" / "weights.safetensors")[
            "model.layers.0.mlp.experts.gate_up_proj"].shape for rank in range(3)]
        assert found == shapes
        with llmc.LLM(tmp_path / name) as llm:
            families.assert_close(llm.logits(TOKENS), families.reference_logits(model, TOKENS))


def test_a_stack_of_experts_reads_one_at_a_time():
    read = []

    def expert(number):
        def rows(start, stop):
            read.append(number)
            return np.full((stop - start, 4), number, np.float32)

        return Weight((6, 4), np.float32, rows, f"expert {number}")

    stack = Weight.stack([Weight.concat([expert(2 * n), expert(2 * n + 1)]) for n in range(3)])
    order = np.arange(12).reshape(2, 6).T.reshape(-1)
    made = stack.take(order, 1).take([0, 1, 4, 5], 1).take([3, 0], 2)
    assert not read and made.shape == (3, 4, 2)
    assert made.rows(1, 2).tolist() == [[[2.0] * 2, [3.0] * 2, [2.0] * 2, [3.0] * 2]]
    assert read == [2, 3]
    assert stack.transpose().rows(2, 3)[0, 0].tolist() == [4.0] * 6 + [5.0] * 6


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory):
    return families.save(families.tiny_model("olmoe"), tmp_path_factory.mktemp("olmoe"))


def changed(olmoe, tmp_path, config=None, tensors=lambda tensors: tensors):
    """Copy the checkpoint with another config or other tensors."""
    known = json.loads((olmoe / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**known, **(config or {})}))
    save_file(tensors(load_file(olmoe / "model.safetensors")), tmp_path / "model.safetensors")
    return tmp_path


def test_per_expert_checkpoint_tensors_are_stacked(olmoe):
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in load_file(olmoe / "model.safetensors")


def without(*names):
    return lambda tensors: {name: array for name, array in tensors.items() if name not in names}


UP, DOWN = (f"model.layers.1.mlp.experts.2.{name}_proj.weight" for name in ("up", "down"))


@pytest.mark.parametrize(("config", "tensors", "match"), [
    (None, without(UP), r"is merged from 5 and 4 tensors .* expected equal numbers"),
    (None, without(DOWN), r"'model.layers.1.mlp.experts.down_proj' .* has shape \[4, 64, 100\], "
                          r"its config expects \[5, 64, 100\]"),
    (None, lambda tensors: {**tensors, DOWN: tensors[DOWN][:, :50].copy()},
     r"'.*experts.2.down_proj.weight' is float32 \[64, 50\], expected .*'.*experts.0.down_proj"),
    ({"num_experts": 4}, without(), r"has shape \[5, 64\], its config expects \[4, 64\]"),
    ({"num_experts_per_tok": 6}, without(), r"selects num_experts_per_tok 6 of num_experts 5"),
])
def test_missing_experts_are_named(olmoe, tmp_path, config, tensors, match):
    with pytest.raises(llmc.LlmcError, match=match) as caught:
        llmc.compile(changed(olmoe, tmp_path, config, tensors), tmp_path / "case")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "match"), [
    (dict(expert_parallel=True), "expert_parallel is given with tp_size 1"),
])
def test_unsupported_targets_of_experts_are_reported(olmoe, tmp_path, options, match):
    with pytest.raises(llmc.LlmcError, match=match):
        llmc.compile(olmoe, tmp_path / "case", **options)


def test_an_impossible_expert_split_is_refused(tmp_path):
    few = families.tiny_model("olmoe", num_experts=2, num_experts_per_tok=2, intermediate_size=2)
    hf = families.save(few, tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match=r"Experts .* 2 experts, which 3 chips cannot share"):
        llmc.compile(hf, tmp_path / "case", tp_size=3, expert_parallel=True)
    with pytest.raises(llmc.LlmcError, match=r"has 2 columns in each of its experts, which 3"):
        llmc.compile(hf, tmp_path / "case", tp_size=3)


def test_expert_parallel_without_experts_is_refused(tiny_hf, tmp_path):
    with pytest.raises(llmc.LlmcError, match="expert_parallel is given, but 'Llama.* no experts"):
        llmc.compile(tiny_hf, tmp_path / "case", tp_size=2, expert_parallel=True)


def squared(self, hidden_states):
    logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores, chosen = torch.topk(torch.softmax(logits, -1), self.top_k, dim=-1)
    return logits, scores**2, chosen


def bounded(self, hidden_states):
    logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores, chosen = torch.topk(torch.softmax(logits.clamp(max=50.0), -1), self.top_k, dim=-1)
    return logits, scores, chosen


def noisy(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.sin(gate) * up


@pytest.mark.parametrize(("forward", "path"), [
    (squared, "Softmax → TopK → Pow"), (bounded, "Clip → Softmax → TopK")])
def test_an_unknown_router_is_named(forward, path, olmoe, tmp_path, monkeypatch):
    monkeypatch.setattr(modeling_olmoe.OlmoeTopKRouter, "forward", forward)
    check_refused(olmoe, tmp_path, monkeypatch,
                  rf"a router was not recognized: the selection of experts is not supported by "
                  rf"llmc::Route \({path}\): 'linear_4' .*\(Experts ")


def test_a_router_with_too_many_experts_is_refused_before_the_export(tmp_path, monkeypatch):
    monkeypatch.setattr(modeling_olmoe.OlmoeTopKRouter, "forward", squared)
    hf = families.save(families.tiny_model("olmoe", num_experts=384, num_experts_per_tok=8,
                                           num_hidden_layers=1), tmp_path / "hf")
    begun = time.process_time()
    check_refused(hf, tmp_path, monkeypatch, "a router was not recognized")
    assert time.process_time() - begun < 10


def test_an_unknown_expert_activation_is_named(olmoe, tmp_path, monkeypatch):
    monkeypatch.setattr(modeling_olmoe.OlmoeExperts, "_apply_gate", noisy)
    check_refused(olmoe, tmp_path, monkeypatch,
                  r"experts were not recognized: between the experts' GEMMs: .*Sin ")


def all_of_them(self, hidden_states):
    logits = torch.nn.functional.linear(hidden_states, self.weight)
    return torch.sigmoid(logits), logits


def leaky(self, hidden_states):
    logits = torch.nn.functional.linear(hidden_states, self.weight)
    values, chosen = torch.topk(logits, self.top_k, dim=1)
    return torch.full_like(logits, -5.0).scatter_(1, chosen, values).sigmoid(), logits


def forgetting(self, hidden_states):
    x = hidden_states.view(len(self.gate_up_proj), -1, self.hidden_size)
    gate, up = torch.bmm(x, self.gate_up_proj).chunk(2, dim=-1)
    return torch.bmm(self.act_fn(gate + 1) * up, self.down_proj).view(-1, self.hidden_size)


@pytest.mark.parametrize(("module", "forward", "why"), [
    ("Llama4Router", all_of_them, "the scores of experts do not come from one linear layer and "
                                  "one TopK"),
    ("Llama4Router", leaky, "experts outside the TopK have nonzero scores"),
    ("Llama4TextExperts", forgetting, "the subgraph between the experts' GEMMs is not")])
def test_unknown_dense_experts_are_named(module, forward, why, tmp_path, monkeypatch):
    hf = families.save(families.tiny_model("llama4_text", num_hidden_layers=1,
                                           no_rope_layers=[1]), tmp_path / "hf")
    monkeypatch.setattr(getattr(modeling_llama4, module), "forward", forward)
    check_refused(hf, tmp_path, monkeypatch, f"experts were not recognized: {why}")


def check_refused(hf, tmp_path, monkeypatch, match):
    exporter = trace._run_exporter
    monkeypatch.setattr(trace, "_run_exporter", lambda *args: exporter(*args))  # not a cached one
    with pytest.raises(llmc.LlmcError, match=match) as caught:
        llmc.compile(hf, tmp_path / "case")
    assert "\n" not in str(caught.value)


# Number of ranks, and whether they have whole experts.
RANKS = pytest.mark.parametrize(("tp_size", "expert_parallel"),
                                [(1, False), (2, False), (2, True), (3, True)])


@RANKS
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_experts_are_quantized_and_routers_are_not(tp_size, expert_parallel, scheme, tmp_path,
                                                   monkeypatch):
    """ONNX Runtime's kernel equals the body except for 8-bit activations."""
    model = families.tiny_model("qwen3_moe", moe_intermediate_size=64)
    hf, said = families.save(model, tmp_path / "hf"), []
    options = dict(quantize=scheme, tp_size=tp_size, expert_parallel=expert_parallel)
    llmc.compile(hf, tmp_path / "case", progress=said.append, **options)
    assert not any("experts stay" in text for text in said)
    kinds = kinds_of(tmp_path / "case")
    assert kinds["mlp.gate.weight"] == "float32"
    assert kinds["mlp.experts.down_proj"] == kinds["self_attn.o_proj.weight"] == "uint8"
    known = plugins.registry()
    plain = {**known, "Experts": replace(known["Experts"], bodies={})}
    with monkeypatch.context() as patch:
        patch.setattr(plugins, "registry", lambda: plain)
        llmc.compile(hf, tmp_path / "plain", **options)
    logits = []
    for case in ("case", "plain"):
        with llmc.LLM(tmp_path / case) as llm:
            logits.append(llm.logits(TOKENS))
    assert np.array_equal(*logits) == expert_parallel  # without a kernel of ONNX Runtime
    families.assert_close(*logits, 0.01)
    families.assert_close(logits[0], families.reference_logits(model, TOKENS),
                          {"int8": 0.05, "int4": 0.15}[scheme])


@RANKS
@pytest.mark.parametrize(("scheme", "tolerance"), [("int4", 0.15), ("uint4", 0.15), ("int8", 0.05),
                                                   ("float8_e4m3fn", 0.1)])
def test_gpu_programs_have_quantized_experts(tp_size, expert_parallel, scheme, tolerance, tmp_path):
    model = families.tiny_model("qwen3_moe", moe_intermediate_size=64)
    hf, said = families.save(model, tmp_path / "hf"), []
    llmc.compile(hf, tmp_path / "case", target="cuda", quantize=scheme, tp_size=tp_size,
                 expert_parallel=expert_parallel, progress=said.append)
    assert not any("experts stay" in text for text in said)
    kinds = kinds_of(tmp_path / "case")
    assert kinds["mlp.gate.weight"] == "float32"
    assert kinds["mlp.experts.gate_up_proj"] == kinds["mlp.experts.down_proj"] == "uint8"
    expected = families.reference_logits(model, TOKENS)
    for own in Interpreters(tmp_path / "case")._on_all(lambda rank: rank.run(TOKENS, 0)):
        families.assert_close(own, expected, tolerance)


def kinds_of(case):
    """Return the dtypes of layer 0's weights by name."""
    weights = load_file(case / "chip0" / "weights.safetensors")
    return {name.split(".", 3)[-1]: array.dtype.name for name, array in weights.items()
            if ".layers.0." in name and name.endswith(("weight", "_proj"))}


@pytest.mark.parametrize(("target", "family", "tp_size"), [
    ("cuda", "qwen3_moe", 1), ("cuda", "qwen3_moe", 3), ("cpu", "mixtral", 1),
    ("cpu", "mixtral", 3)])
def test_experts_without_a_quantized_kernel_are_reported(target, family, tp_size, tmp_path):
    """Groups must be powers of two from 16 on, on GPUs from 32 on.

    On three chips some experts have an odd number of columns.
    """
    hf, said = families.save(families.tiny_model(family), tmp_path / "hf"), []
    llmc.compile(hf, tmp_path / "case", quantize="int8", target=target, tp_size=tp_size,
                 progress=said.append)
    assert sum(f"experts stay in float32, as target {target} has no kernel" in text
               for text in said) == 1
    kinds = kinds_of(tmp_path / "case")
    assert kinds["mlp.experts.down_proj"] == "float32"
    whole = (target, tp_size) == ("cuda", 3)  # a head of 16 is smaller than a group of 32
    assert kinds["self_attn.o_proj.weight"] == ("float32" if whole else "uint8")
    assert whole == any("3 linear layers stay in float32, as target cuda has no kernel" in text
                        for text in said)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_diff_compares_experts_with_the_exported_ones(family, tmp_path):
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", tp_size=2)
    report = diff(tmp_path / "case", hf, bisect=True, tokens=2)
    assert report.verdict is None


def test_diff_of_quantized_experts_does_not_blame_the_router(tmp_path):
    hf = families.save(families.tiny_model("qwen3_moe", moe_intermediate_size=64), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", quantize="int4")
    assert diff(tmp_path / "case", hf, bisect=True, tokens=2).verdict is None


@RANKS
def test_mxfp4_experts_are_read_exactly(tp_size, expert_parallel, tmp_path):
    model = families.tiny_model("gpt_oss", intermediate_size=96)
    numbers = families.to_mxfp4(families.save(model, tmp_path / "hf"), tmp_path / "mxfp4",
                       np.random.default_rng(6))
    with torch.no_grad():
        for name, array in numbers.items():
            model.get_parameter(name).copy_(torch.from_numpy(array))
    said = []
    ranks = dict(tp_size=tp_size, expert_parallel=expert_parallel)
    llmc.compile(tmp_path / "mxfp4", tmp_path / "case", progress=said.append, **ranks)
    assert any("MXFP4 weights are stored losslessly as int8" in text for text in said)
    assert kinds_of(tmp_path / "case")["mlp.experts.gate_up_proj"] == "uint8"
    expected = families.reference_logits(model, TOKENS)
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), expected, 0.01)
    said.clear()
    llmc.compile(tmp_path / "mxfp4", tmp_path / "cuda", target="cuda", progress=said.append,
                 **ranks)
    assert not any("MXFP4" in text for text in said)
    assert {form.dtype for chip in read_manifest(tmp_path / "cuda").chips
            for form in chip.quantization.values()} == {"mxfp4"}
    for own in Interpreters(tmp_path / "cuda")._on_all(lambda rank: rank.run(TOKENS, 0)):
        families.assert_close(own, expected)


@pytest.mark.parametrize(("op", "changes", "what"), [
    ("CausalAttention", {"coreless": frozenset({"sinks"})}, "CausalAttention with sinks"),
    ("Experts", {"has_core": False}, "Experts")])
def test_unsupported_attributes_of_cores_are_refused_by_name(op, changes, what, tmp_path,
                                                             monkeypatch):
    known = plugins.registry()
    monkeypatch.setattr(plugins, "registry", lambda: {**known, op: replace(known[op], **changes)})
    hf = families.save(families.tiny_model("gpt_oss"), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match=f"target 'cuda' has no kernel for llmc::{what} "):
        llmc.compile(hf, tmp_path / "case", target="cuda")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2, as a Hugging Face directory."""
    return bench_model.smollm2(tmp_path_factory.mktemp("smollm2") / "hf")


PROMPT = "The capital of France is"


def text_of(case, prompt=PROMPT, count=24):
    with llmc.LLM(case) as llm:
        return llm.generate([prompt], llmc.SamplingParams(max_tokens=count))[0]


def transformers_tokens(hf, count=24):
    tokenizer = AutoTokenizer.from_pretrained(hf)
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        made = model.generate(prompt, max_new_tokens=count, do_sample=False)
    return tuple(made[0, prompt.shape[1]:].tolist())


@pytest.mark.thorough
def test_smollm2_as_equal_experts_gives_smollm2_s_text(smollm2, tmp_path):
    hf = bench_model.as_mixtral(smollm2, tmp_path / "mixtral")
    llmc.compile(smollm2, tmp_path / "dense", max_seq_len=256)
    llmc.compile(hf, tmp_path / "case", max_seq_len=256)
    assert text_of(tmp_path / "case").text == text_of(tmp_path / "dense").text
    assert text_of(tmp_path / "case").token_ids == transformers_tokens(smollm2)


@pytest.mark.thorough
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_smollm2_as_unequal_experts_gives_transformers_tokens(smollm2, tmp_path, expert_parallel):
    hf = bench_model.as_mixtral(smollm2, tmp_path / "mixtral", spread=0.3)
    llmc.compile(hf, tmp_path / "case", max_seq_len=256, tp_size=2 if expert_parallel else 1,
                 expert_parallel=expert_parallel)
    tokens = transformers_tokens(hf)
    assert text_of(tmp_path / "case").token_ids == tokens != transformers_tokens(smollm2)
