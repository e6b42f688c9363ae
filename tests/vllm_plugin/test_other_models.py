"""vLLM with other models is unchanged; unsupported options are refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import vllm
import vllm.platforms
from vllm.engine.arg_utils import EngineArgs
from vllm_cases import case

import llmc
import llmc_vllm
from llmc.artifacts.manifest import read_manifest
from llmc.runtime.core.step import EngineLimits, StepOutput
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.sampler import Sampler
from llmc_vllm import drafts, options
from llmc_vllm.sequences import Pending, Sequences, grammar_masks, with_masks


@pytest.fixture
def other_model(tmp_path):
    """A Llama config for vLLM, without weights."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_where_vllm_knows_a_device_its_platform_stays(monkeypatch):
    assert llmc_vllm.find_platform() == "llmc_vllm.platform.LlmcPlatform"
    monkeypatch.setitem(vllm.platforms.builtin_platform_plugins, "cuda",
                        lambda: "vllm.platforms.cuda.CudaPlatform")
    assert llmc_vllm.find_platform() is None


def test_the_options_of_another_model_are_not_touched(other_model, monkeypatch):
    options = EngineArgs(other_model, skip_tokenizer_init=True)
    before = dict(vars(options))
    monkeypatch.setattr("llmc_vllm.hooks.options.complete",
                        lambda *_: pytest.fail("this is no case directory"))
    with pytest.raises(llmc.LlmcError, match=rf"no device of this host can run '{other_model}' "
                                             r"in vLLM, and llmc-vllm runs case directories"):
        options.create_engine_config()
    assert {name: value for name, value in vars(options).items() if value is not before[name]
            and value != before[name]}.keys().isdisjoint({"worker_cls", "model", "dtype",
                                                          "enforce_eager", "async_scheduling"})


@pytest.mark.parametrize(("given", "said"), [
    (dict(tensor_parallel_size=4), "tensor_parallel_size is 4, but 'LlamaForCausalLM' was "
                                   "compiled for 2; leave it out, or compile with --tp_size 4"),
    (dict(dtype="bfloat16"), "dtype is bfloat16, but"),
    (dict(block_size=48), "block_size is 48, expected a power of two"),
    (dict(pipeline_parallel_size=2), "pipeline_parallel_size 2 is not supported for"),
    (dict(enable_lora=True), "enable_lora is given, but 'LlamaForCausalLM' was compiled by llmc, "
                             "whose LoRA adapters are not supported inside vLLM; use llmc serve"),
    (dict(kv_cache_dtype="fp8"), "kv_cache_dtype 'fp8' is not supported"),
    (dict(speculative_config={"method": "eagle3", "model": "a/b", "num_speculative_tokens": 2}),
     "llmc verifies drafts of method ngram or draft; 'eagle3' is not supported for a model com"),
    (dict(spec_method="suffix", spec_tokens=2), "ngram or draft; 'suffix' is not supported"),
    (dict(spec_model="a/b", spec_tokens=2), "of method ngram or draft; 'a/b' is not supported"),
    (dict(speculative_config={"method": "ngram", "model": "a/b"}), "; 'a/b' is not supported"),
    (dict(speculative_config={}), "of method ngram or draft; None is not supported"),
    (dict(speculative_config=[3]), r"speculative_config is \[3\], expected an object such as {"),
    (dict(speculative_config={"method": "ngram", "num-speculative-tokens": 17}),
     "num_speculative_tokens is 17, but llmc verifies at most 16 drafts of a sequence in a step"),
    (dict(speculative_config={"method": "ngram", "num_speculative_tokens": 2,
                              "rejection_sample_method": "block"}),
     "rejection_sample_method 'block' of speculative_config is not supported for drafts of"),
    (dict(speculative_config={"method": "draft", "num_speculative_tokens": 2}),
     "method draft of speculative_config needs a draft model, and 'LlamaForCausalLM' was compiled "
     "without one; compile with --draft, or give method ngram"),
    (dict(logprobs_mode="processed_logprobs"), "logprobs_mode 'processed_logprobs' is not"),
])
def test_what_a_case_directory_does_not_have_is_refused_by_name(given, said):
    with pytest.raises(llmc.LlmcError, match=said):
        EngineArgs(str(case(2)), **given).create_engine_config()


def test_options_of_another_method_are_refused_for_a_draft_model():
    manifest = read_manifest(case("draft"))
    for given, said in ((dict(prompt_lookup_max=4), "prompt_lookup_max of speculative_config is"),
                        (dict(num_speculative_tokens=17), "is 17, but llmc verifies at most 16"),
                        (dict(draft_tensor_parallel_size=2), "drafts of method draft; leave it")):
        with pytest.raises(llmc.LlmcError, match=said):
            drafts.check_speculation(EngineArgs(str(case("draft")), speculative_config={
                "method": "draft", "num_speculative_tokens": 2, **given}), manifest)
    target = SimpleNamespace(kind="x", spec=SimpleNamespace(gpu=True))
    with pytest.raises(llmc.LlmcError, match="method draft of speculative_config is not supported "
                                             "on target x; give method ngram"):
        drafts.check_speculation(
            EngineArgs(str(case("draft")), spec_method="draft", spec_tokens=2),
            SimpleNamespace(source=manifest.source, draft=manifest.draft, target=target))


def test_an_engine_that_verifies_no_drafts_or_fewer_is_named(monkeypatch):
    manifest = read_manifest(case(1))
    target = SimpleNamespace(kind="x", spec=SimpleNamespace(
        gpu=True, load_engine_class=lambda: SimpleNamespace(verifies=False)))
    with pytest.raises(llmc.LlmcError, match="'LlamaForCausalLM' verifies no drafts on target x; "
                                             "leave speculative_config out"):
        drafts.check_speculation(EngineArgs(str(case(1)), spec_method="ngram", spec_tokens=2),
                                 SimpleNamespace(source=manifest.source, target=target))
    limits = EngineLimits(num_blocks=1, block_size=16, max_tokens=64, max_slots=8, max_logits=512,
                          ahead=1, max_drafts=3)
    drafts.check_limits(SimpleNamespace(num_speculative_tokens=3), manifest, limits)
    with pytest.raises(llmc.LlmcError, match="num_speculative_tokens is 4, but 'LlamaForCausalLM' "
                                             "verifies at most 3 drafts .* lower it"):
        drafts.check_limits(SimpleNamespace(num_speculative_tokens=4), manifest, limits)


def test_a_model_that_keeps_states_is_refused(monkeypatch):
    manifest = read_manifest(case(1))
    keeps = manifest.chips[0].model_copy(update={"states": (SimpleNamespace(),)})
    monkeypatch.setattr(options, "read_manifest",
                        lambda path: manifest.model_copy(update={"chips": (keeps,)}))
    with pytest.raises(llmc.LlmcError, match="has layers with recurrent state, which are not "
                                             "supported inside vLLM; use llmc serve"):
        EngineArgs(str(case(1))).create_engine_config()


def test_a_broken_case_directory_is_told_as_llmc_tells_it(tmp_path):
    (tmp_path / "model_info.json").write_text("{}")
    with pytest.raises(llmc.LlmcError, match="model_info.json"):
        EngineArgs(str(tmp_path)).create_engine_config()


# Cases not covered by scheduling on a CPU: vLLM's other model runner, and GPU engines.


def sequences(**limits):
    return Sequences(
        EngineLimits(**{"num_blocks": 64, "block_size": 4, "max_tokens": 64, "max_slots": 4,
                  "max_logits": 8, "ahead": 1, **limits}), 40,
        lambda params, prompt, request_id: Sampler(SamplingParams(), prompt=prompt))


PARAMS = vllm.SamplingParams(temperature=0)


def new(request_id, prompt, blocks, computed=0, tokens=None):
    return SimpleNamespace(req_id=request_id, prompt_token_ids=prompt, sampling_params=PARAMS,
                           block_ids=(blocks,), num_computed_tokens=computed,
                           prefill_token_ids=tokens)


def scheduled(counts, *begin, go_on=(), resumed=(), finished=(), preempted=(), drafts=None):
    """Return a scheduler output; `go_on` has request, new blocks and computed tokens."""
    ids, blocks, computed = zip(*go_on, strict=True) if go_on else ((), (), ())
    return SimpleNamespace(
        num_scheduled_tokens=counts, scheduled_new_reqs=list(begin), finished_req_ids=set(finished),
        scheduled_spec_decode_tokens=drafts or {},
        preempted_req_ids=set(preempted), scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(ids), new_block_ids=[own and (own,) for own in blocks],
            num_computed_tokens=list(computed), resumed_req_ids=set(resumed)))


def test_who_shares_a_block_that_is_filled_in_the_same_step_comes_after_it():
    prompt = list(range(10))
    first, second = sequences().plan(scheduled(
        {"a": 10, "b": 2, "c": 1}, new("a", prompt, [1, 2, 3]), new("b", prompt, [1, 2, 4], 8),
        new("c", [5], [6])))
    assert [own.request_id for own in first.sequences] == ["c", "a"]
    assert [own.request_id for own in second.sequences] == ["b"]
    assert second.step.past_lens.tolist() == [8]
    assert second.step.block_tables.tolist() == [[1, 2, 4]]


def test_who_comes_back_enters_a_slot_anew_with_what_it_has_generated():
    known = sequences(max_slots=1)
    known.plan(scheduled({"a": 3}, new("a", [1, 2, 3], [1])))
    known.plan(scheduled({"b": 2}, new("b", [4, 5], [2]), preempted=["a"]))
    (part,) = known.plan(scheduled({"a": 5}, new("a", [1, 2, 3], [3, 4], 0, [1, 2, 3, 8, 9]),
                                   finished=["b"]))
    assert part.step.token_ids.tolist() == [1, 2, 3, 8, 9]
    assert part.step.admit[0].tokens == (8, 9)
    assert part.step.sample.tolist() == [0]


def test_an_unfinished_prompt_chooses_nothing():
    known = sequences()
    (part,) = known.plan(scheduled({"a": 4}, new("a", list(range(9)), [1])))
    assert not len(part.step.sample)
    (part,) = known.plan(scheduled({"a": 5}, go_on=[("a", [2, 3], 4)]))
    assert part.step.sample.tolist() == [0] and not part.step.admit
    assert part.step.block_tables.tolist() == [[1, 2, 3]]


def test_engines_that_want_the_longest_first_get_it_so():
    known = sequences(longest_first=True)
    prompts = {"a": [1, 2], "b": [1, 2, 3, 4, 5], "c": [1, 2, 3]}
    (part,) = known.plan(scheduled({name: len(own) for name, own in prompts.items()},
                                   *(new(name, own, [i * 2 + 1, i * 2 + 2])
                                     for i, (name, own) in enumerate(prompts.items()))))
    for own in part.chosen:
        own.tokens.append(7)
    (part,) = known.plan(scheduled(dict.fromkeys(prompts, 1), go_on=[
        (name, None, len(own)) for name, own in prompts.items()]))
    assert part.step.past_lens.tolist() == [5, 3, 2]
    assert part.step.num_decode == 3
    assert np.array_equal(part.step.token_ids, [7, 7, 7])


def test_drafts_are_verified_as_far_as_the_step_has_room_and_padding_is_not():
    known = sequences(max_draft_tokens=3, longest_first=True)
    prompts = {"a": [1, 2], "b": [1, 2, 3, 4, 5], "c": [6], "d": [7, 8]}
    (part,) = known.plan(scheduled(
        {"a": 2, "b": 5, "c": 4, "d": 2},
        *(new(name, own, [2 * i + 1, 2 * i + 2]) for i, (name, own) in enumerate(prompts.items())),
        drafts={"c": [-1, -1, -1]}))
    assert not len(part.step.num_drafts) and part.step.num_tokens == 10
    Pending(part).settle(StepOutput(np.array([9, 9, 9, 9]), ()))
    planned = {"a": [11, 12], "b": [13, 14], "d": [-1, -1]}
    (part,) = known.plan(scheduled(
        {"a": 3, "b": 3, "c": 1, "d": 3}, drafts=planned, go_on=[
            (name, None, len(own)) for name, own in prompts.items()]))
    assert [own.request_id for own in part.sequences] == ["d", "c", "b", "a"]
    assert part.step.token_ids.tolist() == [9, 9, 9, 13, 9, 11, 12]
    assert part.step.num_drafts.tolist() == [0, 0, 1, 2] and part.step.num_decode == 2
    rows = np.arange(7, dtype=np.int32).reshape(-1, 1)
    masked = with_masks(part, grammar_masks(SimpleNamespace(
        structured_output_request_ids=["b", "c", "d"], grammar_bitmask=rows), planned))
    assert {own.request_id: masked.masks[own.slot].ravel().tolist() for own in part.sequences
            if own.slot in masked.masks} == {"b": [0, 1], "c": [3], "d": [4]}
    assert Pending(part).settle(StepOutput(np.array([1, 2, 13, 4, 5]), (), counts=np.array(
        [1, 1, 2, 1]))) == {"d": [1], "c": [2], "b": [13, 4], "a": [5]}
    assert part.sequences[2].tokens == [1, 2, 3, 4, 5, 9, 13, 4]
