"""llmc inside vLLM on a GPU gives llmc's tokens, if vLLM is installed."""

import json
import os
import re
import shutil

import families
import jsonschema
import pytest

import llmc

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ["VLLM_NO_USAGE_STATS"] = "1"
vllm = pytest.importorskip("vllm")
pytest.importorskip("llmc_vllm")

PROMPTS = [[5, 6, 7], [8], list(range(3, 60)), list(range(3, 90)), [11, 12] * 40, [9] * 17]
LENGTH = 40
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9},
                                           "y": {"type": "string", "maxLength": 8}},
          "required": ["x", "y"], "additionalProperties": False}


@pytest.fixture(scope="module")
def case(extension, tiny_hf, tmp_path_factory):
    root = tmp_path_factory.mktemp("vllm")
    vocab_size = json.loads((tiny_hf / "config.json").read_text())["vocab_size"]
    hf = families.save(families.tiny_model("llama", vocab_size=vocab_size,
                                           max_position_embeddings=512), root / "hf")
    for path in tiny_hf.glob("tokenizer*"):
        shutil.copy(path, hf)
    llmc.compile(hf, root / "case", target="cuda", dtype="float32")
    return root / "case"


@pytest.fixture(scope="module")
def wanted(case):
    with llmc.LLM(case) as own:
        return [list(made.token_ids) for made in own.generate(
            PROMPTS, llmc.SamplingParams(max_tokens=LENGTH, ignore_eos=True))]


@pytest.fixture(scope="module", params=[None, False], ids=["ahead", "in turn"])
def llm(request, case):
    own = load(case, max_num_seqs=8, async_scheduling=request.param)
    assert own.llm_engine.vllm_config.scheduler_config.async_scheduling == (request.param is None)
    yield own
    own.llm_engine.engine_core.shutdown()


def load(case, **options):
    return vllm.LLM(str(case), max_model_len=256, disable_log_stats=False, seed=0,
                    kv_cache_memory_bytes=2**24, **options)


def greedy(llm, **wishes):
    wishes = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, **wishes}
    return [list(made.outputs[0].token_ids) for made in llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], vllm.SamplingParams(**wishes),
        use_tqdm=False)]


def test_tokens_equal_those_of_llmc(llm, wanted):
    for _ in range(2):  # then from cached prefixes
        assert greedy(llm) == wanted


@pytest.mark.parametrize("ahead", [None, False])
def test_chunked_prefill_and_preempted_sequences(case, wanted, ahead):
    own = load(case, max_num_seqs=6, num_gpu_blocks_override=20, max_num_batched_tokens=32,
               enable_prefix_caching=False, async_scheduling=ahead)
    try:
        assert greedy(own) == wanted
        assert next(found.value for found in own.get_metrics()
                    if found.name == "vllm:num_preemptions") > 0
    finally:
        own.llm_engine.engine_core.shutdown()


def test_structured_and_free_requests_in_one_batch(llm):
    """Finished objects are valid JSON with any white space."""
    guides = [dict(json=SCHEMA), dict(regex="[ab]{30}"), dict(choice=["yes", "no"]), None] * 2
    made = llm.generate([{"prompt_token_ids": [5, 6]}] * len(guides), [
        vllm.SamplingParams(max_tokens=200, temperature=1.0, seed=i, structured_outputs=guide and
                            vllm.sampling_params.StructuredOutputsParams(**guide))
        for i, guide in enumerate(guides)], use_tqdm=False)
    objects, letters, answers, _ = ([own.outputs[0] for own in made[i::4]] for i in range(4))
    ended = [own.text for own in objects if own.finish_reason == "stop"]
    assert ended and all(jsonschema.validate(json.loads(text, strict=False), SCHEMA) is None
                         for text in ended)
    assert all(re.fullmatch("[ab]{30}", own.text) for own in letters)
    assert all(own.text in ("yes", "no") for own in answers)


def test_log_probabilities_are_llmc_s(llm, case):
    (made,) = llm.generate([{"prompt_token_ids": PROMPTS[2]}], vllm.SamplingParams(
        max_tokens=9, temperature=0, ignore_eos=True, logprobs=3), use_tqdm=False)
    with llmc.LLM(case) as own:
        (alone,) = own.generate(PROMPTS[2:3], llmc.SamplingParams(
            max_tokens=9, ignore_eos=True, logprobs=3))
    for found, known in zip(made.outputs[0].logprobs, alone.logprobs, strict=True):
        for token, value in known.top:
            assert abs(found[token].logprob - value) < 1e-4
