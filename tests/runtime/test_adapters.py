"""LoRA adapters of requests: as a torch model with the adapter merged, in any company."""

import json
import shutil
import threading

import families
import lora
import numpy as np
import pytest
from click.testing import CliRunner

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.cli import main
from llmc.runtime.core.adapters import Adapter, AdapterSlots
from llmc.runtime.core.scheduler import Scheduler, Sequence
from llmc.runtime.core.step import EngineLimits, SamplingState, StepOutput
from llmc.runtime.engines.lora_stacks import LoraSpan, LoraStacks
from llmc.runtime.replica import EngineConfig, adapter_bytes, cpu_limits

PROMPTS = [[5, 9, 33, 7, 20], [11, 3, 8], list(range(40, 60)), [5, 9, 33, 7, 20]]
PARAMS = llmc.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
KINDS = {"all": ".*", "attention": "self_attn", "queries": "[qv]_proj"}
RANKS = {"all": 4, "attention": 16, "queries": 1}


@pytest.fixture(scope="module")
def peft(tiny_model, tmp_path_factory):
    """By name: the PEFT directory, and the torch model with the adapter merged; None: the base."""
    root = tmp_path_factory.mktemp("peft")
    made = {None: (None, tiny_model)}
    for seed, (name, pattern) in enumerate(KINDS.items()):
        factors = lora.make(tiny_model, lora.linear_layers(tiny_model, pattern), seed=seed,
                            rank=RANKS[name])
        made[name] = (lora.save(root / name, factors, r=RANKS[name], lora_alpha=2 * RANKS[name]),
                      lora.merged(tiny_model, factors))
    return made


@pytest.fixture(scope="module")
def compiled(peft, lora_case, tmp_path_factory):
    """Factory by tp_size of the adapters' directories by name."""
    root = tmp_path_factory.mktemp("adapters")

    def make(tp_size):
        folder = root / f"tp{tp_size}"
        if not folder.exists():
            for name in KINDS:
                llmc.compile_adapter(peft[name][0], lora_case(tp_size), folder / name)
        return {name: folder / name for name in KINDS}
    return make


@pytest.fixture(scope="module")
def llm(lora_case, compiled):
    with llmc.LLM(lora_case(1), adapters=compiled(1), max_loras=3) as loaded:
        yield loaded


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_requests_with_other_adapters_and_none_share_steps(tp_size, lora_case, compiled, peft):
    names = [*KINDS, None]
    with llmc.LLM(lora_case(tp_size), adapters=compiled(tp_size),
                  max_num_batched_tokens=24) as own:  # steps of decoding and of chunks of prompts
        assert own.adapters == tuple(sorted(KINDS))
        for completion, name in zip(own.generate(PROMPTS, PARAMS, adapter=names), names,
                                    strict=True):
            lora.assert_generates(peft[name][1], completion)
        for name in names:
            completion, = own.generate([PROMPTS[0]], PARAMS, adapter=name)
            lora.assert_generates(peft[name][1], completion)


def test_tokens_do_not_depend_on_company(llm):
    params = llmc.SamplingParams(max_tokens=12, temperature=0.9, seed=3, logprobs=2)
    alone = [llm.generate([prompt], params, adapter=name)[0]
             for prompt, name in zip(PROMPTS, [*KINDS, None], strict=True)]
    together = llm.generate(PROMPTS, params, adapter=[*KINDS, None])
    assert [own.token_ids for own in alone] == [own.token_ids for own in together]


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.parametrize(("family", "tp_size"), [
    ("gpt2", 3), ("phi3", 3), ("deepseek_v3", 2), thorough("gpt_neox", 2), thorough("bloom", 3),
    thorough("mpt", 1), thorough("olmo2", 2), thorough("gemma2", 3), thorough("opt", 3)])
def test_families_take_adapters_of_their_linear_layers(family, tp_size, tmp_path):
    """Fused projections, matrices [in, out], norms between layers, latent attention."""
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", tp_size=tp_size,
                 enable_lora=True)
    layers = {module for layer in read_manifest(tmp_path / "case").chips[0].lora
              for module in layer.modules}
    names = [name for name in lora.linear_layers(model) if name in layers]
    assert len(names) >= 12
    factors = lora.make(model, names)
    llmc.compile_adapter(lora.save(tmp_path / "peft", factors), tmp_path / "case",
                         tmp_path / "adapter")
    with llmc.LLM(tmp_path / "case", adapters={"own": tmp_path / "adapter"}) as own:
        with_adapter, without = own.generate(PROMPTS[:2], PARAMS, adapter=["own", None])
    lora.assert_generates(lora.merged(model, factors), with_adapter, 2e-5)
    lora.assert_generates(model, without, 2e-5)


@pytest.mark.parametrize(("family", "changes", "options"), [
    ("llama", {}, {}), ("llama", {"tie_word_embeddings": True}, {"tp_size": 3}),
    ("llama", {"tie_word_embeddings": True}, {"quantize": "int8"}),
    ("gemma2", {}, {"tp_size": 2}), ("gpt2", {}, {}), thorough("gpt_neox", {}, {"tp_size": 2})])
def test_embeddings_and_heads_take_adapters(family, changes, options, tmp_path):
    """Of tied ones, each by itself; Gemma's embeddings are scaled, GPT-2's have positions."""
    model = families.tiny_model(family, **changes)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", enable_lora=True,
                 **options)
    adapted = lora.adapt_ends(model, tmp_path / "peft")
    llmc.compile_adapter(tmp_path / "peft", tmp_path / "case", tmp_path / "adapter")
    with llmc.LLM(tmp_path / "case", adapters={"own": tmp_path / "adapter"}) as own:
        with_adapter, without = own.generate([PROMPTS[0]] * 2, PARAMS, adapter=["own", None])
    tolerance = 0.02 if "quantize" in options else 2e-5
    lora.assert_generates(adapted, with_adapter, tolerance)
    lora.assert_generates(model, without, tolerance)


@pytest.mark.parametrize(("family", "options"), [
    ("qwen3_moe", {}), ("gpt_oss", {"tp_size": 2}),
    thorough("qwen3_moe", {"tp_size": 2, "expert_parallel": True}),
    thorough("mixtral", {"tp_size": 3}), thorough("qwen3_moe", {"quantize": "int8"}),
    thorough("gpt_oss", {"expert_parallel": True, "tp_size": 3})])
def test_experts_take_adapters(family, options, tmp_path):
    """In both forms of PEFT, beside another layer's, in one step with a request without any."""
    changes = {"moe_intermediate_size": 64} if "quantize" in options else {}  # whole groups
    model = families.tiny_model(family, **changes)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", enable_lora=True,
                 **options)
    tensors, stacked = lora.adapt_experts(model, (0, 2))
    factors = lora.make(model, lora.linear_layers(model, r"layers\.1.*o_proj"))
    made = {"stacked": (lora.save(tmp_path / "stacked_peft", factors, tensors=tensors, r=2,
                                  target_parameters=lora.EXPERTS), lora.merged(stacked, factors))}
    if family != "gpt_oss":  # which never had separate experts
        experts = "model.layers.1.mlp.experts"
        tensors, single = lora.adapt_single_experts(model, {
            f"{experts}.0.gate_proj": (1, 0, "gate_proj", 4),
            f"{experts}.0.up_proj": (1, 0, "up_proj", 4),
            f"{experts}.2.up_proj": (1, 2, "up_proj", 8),
            f"{experts}.3.down_proj": (1, 3, "down_proj", 4),
            # As a checkpoint of Mixtral has them.
            "model.layers.2.block_sparse_moe.experts.1.w1": (2, 1, "gate_proj", 2),
            "model.layers.2.block_sparse_moe.experts.1.w2": (2, 1, "down_proj", 2)})
        alphas = {r"experts\.2\.up_proj": 16, r"experts\.1\.w.": 4}
        made["single"] = lora.save(tmp_path / "single_peft", {}, tensors=tensors,
                                   alpha_pattern=alphas), single
    for name, (peft, _) in made.items():
        llmc.compile_adapter(peft, tmp_path / "case", tmp_path / name)
    names = [*made, None]
    with llmc.LLM(tmp_path / "case", adapters={name: tmp_path / name for name in made}) as own:
        completions = own.generate([PROMPTS[0]] * len(names), PARAMS, adapter=names)
    for name, completion in zip(names, completions, strict=True):
        adapted = made[name][1] if name else model
        if "quantize" in options:
            given = [logprobs.chosen for logprobs in completion.logprobs]
            np.testing.assert_allclose(given, lora.log_probabilities(adapted, completion),
                                       atol=0.1)
        else:
            lora.assert_generates(adapted, completion, 2e-5)


def test_prefixes_are_shared_within_an_adapter_only(llm):
    prompt = list(range(100, 140))
    cached = [next(iter(llm.stream([prompt], PARAMS, adapter=name))).num_cached_tokens
              for name in (None, "all", "queries", "all", None)]
    assert cached == [0, 0, 0, 32, 32]


def test_adapters_are_loaded_and_unloaded_while_requests_run(lora_case, compiled, peft):
    directories = compiled(1)
    many = llmc.SamplingParams(max_tokens=59, seed=1, ignore_eos=True, n=32)
    with llmc.LLM(lora_case(1), adapters={"all": directories["all"]}, max_batch_size=2) as own:
        running = own.stream([PROMPTS[0]], many, adapter="all")
        next(running)
        own.load_adapter("queries", directories["queries"])
        completion, = own.generate([PROMPTS[1]], PARAMS, adapter="queries")
        with pytest.raises(llmc.LlmcError, match="'all' is used by 1 unfinished request; unload"):
            own.unload_adapter("all")
        assert own.adapters == ("all", "queries")
        lora.assert_generates(peft["queries"][1], completion)
        assert len(list(running)) == 32 * 59 - 1  # nothing lost
        own.unload_adapter("all")
        with pytest.raises(llmc.LlmcError, match="no adapter 'all'; loaded are 'queries'"):
            own.generate([PROMPTS[0]], PARAMS, adapter="all")
        own.load_adapter("all", directories["attention"])  # another under this name
        completion, = own.generate([PROMPTS[0]], PARAMS, adapter="all")
        lora.assert_generates(peft["attention"][1], completion)


def test_more_adapters_than_slots_take_turns(lora_case, compiled, peft):
    with llmc.LLM(lora_case(1), adapters=compiled(1), max_loras=1, max_batch_size=4) as own:
        names = [*KINDS, None, *KINDS, None]
        for completion, name in zip(own.generate(PROMPTS * 2, PARAMS, adapter=names), names,
                                    strict=True):
            lora.assert_generates(peft[name][1], completion)


def test_drafts_of_the_base_do_not_change_an_adapter_s_tokens(lora_case, compiled, llm):
    prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], *PROMPTS[:2]]
    params = llmc.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    names = ["all", None, "queries"]
    with llmc.LLM(lora_case(1), adapters=compiled(1), speculate="ngram",
                  num_speculative_tokens=3) as own:
        drafted = own.generate(prompts, params, adapter=names)
        assert own.metrics()["spec_decode_drafts"]
    plain = llm.generate(prompts, params, adapter=names)
    assert [own.token_ids for own in drafted] == [own.token_ids for own in plain]


def test_a_draft_model_drafts_without_adapters(tiny_hf, peft, llm, tmp_path):
    llmc.compile(tiny_hf, tmp_path / "case", draft=f"model:{tiny_hf}", enable_lora=True)
    llmc.compile_adapter(peft["queries"][0], tmp_path / "case", tmp_path / "adapter")
    params = llmc.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    names = ["queries", None]
    with llmc.LLM(tmp_path / "case", adapters={"queries": tmp_path / "adapter"},
                  speculate="draft", num_speculative_tokens=3) as own:
        drafted = own.generate(PROMPTS[:2], params, adapter=names)
        assert own.metrics()["spec_decode_accepted_tokens"]
    plain = llm.generate(PROMPTS[:2], params, adapter=names)
    assert [own.token_ids for own in drafted] == [own.token_ids for own in plain]


def test_beam_searches_use_adapters(llm, peft):
    params = llmc.SamplingParams(max_tokens=6, beam_width=3, ignore_eos=True)
    found = {name: llm.generate([PROMPTS[0]], params, adapter=name)[0].token_ids
             for name in ("all", None)}
    assert found["all"] != found[None]


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(adapters=[1]), r"adapters is \[1\]; give directories by name"),
    (dict(adapters={"": "x"}), "the name of an adapter is ''"),
    (dict(adapters={"a": 1}), "the directory of an adapter is 1; give the output"),
    (dict(max_loras=0), "max_loras 0 is below 1"),
    (dict(max_lora_rank=257), "max_lora_rank 257 is above 256"),
    (dict(max_lora_rank=4, adapters="attention"),
     "has rank 16, above max_lora_rank 4; load the model with max_lora_rank=16")])
def test_wrong_arguments_are_refused(arguments, message, lora_case, compiled):
    if arguments.get("adapters") == "attention":
        arguments = {**arguments, "adapters": {"attention": compiled(1)["attention"]}}
    with pytest.raises(llmc.LlmcError, match=message):
        llmc.LLM(lora_case(1), **arguments)


def test_requests_with_wrong_adapters_are_refused(llm, compiled):
    for adapter, message in (("other", "no adapter 'other'; loaded are 'all', 'attention'"),
                             ([None], "there are 1 adapters for 4 prompts"),
                             ([1] * 4, "no adapter 1")):
        with pytest.raises(llmc.LlmcError, match=message):
            llm.generate(PROMPTS, PARAMS, adapter=adapter)
    with pytest.raises(llmc.LlmcError, match="named 'all' is loaded already"):
        llm.load_adapter("all", compiled(1)["all"])


def test_models_without_adapters_refuse_them(case_tp1, compiled):
    with pytest.raises(llmc.LlmcError, match="takes no adapters; compile it again with"):
        llmc.LLM(case_tp1, adapters=compiled(1))


def damaged(path, change):
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


@pytest.mark.parametrize(("file", "change", "message"), [
    ("chip0/adapter.safetensors", lambda data: data.__setitem__(-1, data[-1] ^ 1),
     "has changed since compilation: its size or SHA-256 differs"),
    ("chip0/adapter.safetensors", lambda data: data.extend(b"x"), "has changed since compilation"),
    ("adapter_info.json", lambda data: data.clear(), "is not valid"),
    ("adapter_info.json", lambda data: data.__setitem__(slice(None), data.replace(
        b'"rank": 4', b'"rank": 0')), "is not valid: rank")])
def test_damaged_adapters_are_refused(file, change, message, llm, compiled, tmp_path):
    copy = shutil.copytree(compiled(1)["all"], tmp_path / "copy")
    damaged(copy / file, change)
    with pytest.raises(llmc.LlmcError, match=message):
        llm.load_adapter("copy", copy)


def test_adapters_of_other_bases_and_peft_s_own_are_refused(llm, compiled, peft, tmp_path):
    with pytest.raises(llmc.LlmcError, match="was compiled for another case directory"):
        llm.load_adapter("other", compiled(2)["all"])
    with pytest.raises(llmc.LlmcError, match="is a PEFT adapter; compile it first: llmc adapter"):
        llm.load_adapter("other", peft["all"][0])
    with pytest.raises(llmc.LlmcError, match="has no adapter_info.json; give the output"):
        llm.load_adapter("other", tmp_path)


def test_values_that_are_not_finite_are_refused_although_hashes_match(llm, compiled, tmp_path):
    import hashlib
    copy = shutil.copytree(compiled(1)["all"], tmp_path / "copy")
    weights = copy / "chip0" / "adapter.safetensors"
    damaged(weights, lambda data: data.__setitem__(slice(-4, None),
                                                   np.float32("nan").tobytes()))
    info = json.loads((copy / "adapter_info.json").read_text())
    info["files"][0]["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    (copy / "adapter_info.json").write_text(json.dumps(info))
    with pytest.raises(llmc.LlmcError, match="has NaN or infinite values"):
        llm.load_adapter("copy", copy)


def test_slots_of_adapters_take_memory(lora_case, case_tp1):
    config = EngineConfig(4, 64, max_loras=3, max_lora_rank=8)
    manifest = read_manifest(lora_case(1))
    loras = LoraStacks(manifest.chips[0], cpu_limits(manifest, config))
    size = sum(loras.array(name, LoraSpan(0, 3, frozenset(range(9)))).nbytes
               for name in loras.inputs if "owner" not in name)
    assert adapter_bytes(manifest, config) == size
    assert adapter_bytes(read_manifest(case_tp1), config) == 0


def run_cli(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_the_command_line_compiles_and_runs_adapters(lora_case, compiled, peft, llm, tmp_path):
    case, directory = lora_case(1), tmp_path / "adapter"
    made = run_cli("adapter", peft["all"][0], case, "-o", directory)
    assert made.exit_code == 0 and "rank 4, 28 modules" in made.output
    prompt = llm.tokenizer.decode(PROMPTS[1])
    params = llmc.SamplingParams(max_tokens=12, temperature=0, guided_regex="[a-z]{12}")
    texts = {name: llm.generate([prompt], params, adapter=name)[0].text for name in ("all", None)}
    assert texts["all"] != texts[None]
    (tmp_path / "requests").write_text("".join(json.dumps(line) + "\n" for line in (
        {"prompt": prompt, "guided_regex": "[a-z]{12}"},
        {"prompt": prompt, "guided_regex": "[a-z]{12}", "adapter": None},
        {"prompt": prompt, "adapter": "none"})))
    result = run_cli("run", case, "--lora_modules", f"own={directory}", "--adapter", "own",
                     "--max_tokens", 12, "--prompt_file", tmp_path / "requests")
    own, base, wrong = map(json.loads, result.stdout.splitlines())
    assert [line["completions"][0]["text"] for line in (own, base)] == [texts["all"], texts[None]]
    assert "there is no adapter 'none'; loaded are 'own'" in wrong["error"]
    missing = run_cli("run", case, "--prompt", "the", "--adapter", "own")
    assert missing.exit_code == 2 and "no adapter 'own'; none is loaded" in missing.stderr


# The scheduler alone.

LIMITS = EngineLimits(num_blocks=64, block_size=4, max_tokens=64, max_slots=8, max_logits=64,
                      ahead=1, max_loras=2, max_lora_rank=4)


def adapter(name):
    return Adapter(name, None, None, name.encode(), ())


def sequence(number, own, length=1000):
    return Sequence(number, [1, 2, 3], length, lambda tokens: SamplingState(None), adapter=own)


def run(scheduler, count=1):
    """Run steps; each sampled sequence gets a token."""
    steps = []
    for _ in range(count):
        scheduled = scheduler.schedule()
        if scheduled is None:
            break
        steps.append(scheduled.step)
        size = len(scheduled.step.sample)
        for own, output in scheduled.read(StepOutput(np.full(size, 7), [None] * size)):
            scheduler.append(own, output.tokens)
            if len(own.tokens) >= own.limit:
                scheduler.remove(own)
    return steps


def test_the_least_recently_used_adapter_makes_room():
    slots, (one, two, three) = AdapterSlots(2), map(adapter, "abc")
    assert slots.hold(one) and slots.hold(two) and not slots.has_room(three)
    slots.release(one)
    slots.release(two)
    assert not slots.hold(one)  # is still there
    slots.release(one)
    assert slots.has_room(three) and slots.hold(three) and slots.slot(three) == 1  # was b's
    assert not slots.hold(one) and slots.slot(one) == 0
    slots.release(one)
    slots.forget(one)
    assert slots.hold(two) and slots.slot(two) == 0


def test_a_step_loads_each_adapter_once_and_names_its_slot():
    scheduler, (one, two) = Scheduler(LIMITS, 64), map(adapter, "ab")
    scheduler.add([sequence(0, one)])
    scheduler.add([sequence(1, None)])
    scheduler.add([sequence(2, two)])
    scheduler.add([sequence(3, one)])
    first, second = run(scheduler, 2)
    assert {slot: own.name for slot, own in first.load_adapters.items()} == {0: "a", 1: "b"}
    assert first.adapters.tolist() == [0, -1, 1, 0] and first.lora_ids.tolist() == \
        [0] * 3 + [-1] * 3 + [1] * 3 + [0] * 3
    assert not second.load_adapters and second.adapters.tolist() == [0, -1, 1, 0]


def test_no_adapter_starves_while_others_keep_coming():
    """Two adapters fill the slots, and their requests never end being there."""
    scheduler, (one, two, three) = Scheduler(LIMITS, 64), map(adapter, "abc")
    for number, own in enumerate((one, two)):
        scheduler.add([sequence(number, own, 20)])
    run(scheduler)
    waiting = sequence(2, three, 5)
    scheduler.add([waiting])
    for number in range(3, 200):
        scheduler.add([sequence(number, (one, two)[number % 2], 20)])
        run(scheduler, 2)
        if waiting.slots or waiting.tokens:
            break
    assert waiting.slots or waiting.tokens
    assert number > 16  # others passed it at first


def test_requests_without_an_adapter_pass_those_that_wait_for_a_slot():
    scheduler, adapters = Scheduler(LIMITS, 64), list(map(adapter, "abc"))
    for number, own in enumerate(adapters):
        scheduler.add([sequence(number, own)])
    run(scheduler, 100)
    base = sequence(9, None)
    scheduler.add([base])
    run(scheduler)
    assert base.slots and len(scheduler.running) == 3


def test_a_stalled_sequence_gives_its_adapter_s_slot_to_one_that_is_overdue():
    scheduler, (one, two, three) = Scheduler(LIMITS, 64), map(adapter, "abc")
    stalled = threading.Event()
    slow = Sequence(0, [1, 2, 3], 1000, lambda tokens: SamplingState(None), adapter=one,
                    stalled=stalled.is_set)
    scheduler.add([slow])
    scheduler.add([sequence(1, two)])
    run(scheduler, 3)
    stalled.set()
    waiting = sequence(2, three)
    scheduler.add([waiting])
    run(scheduler, 80)
    assert waiting.slots and not slow.slots
    stalled.clear()
    scheduler.remove(waiting)
    run(scheduler, 3)
    assert slow.slots and len(slow.tokens) > 2
