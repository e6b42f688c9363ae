"""Prompts with rows in place of token embeddings: as transformers' inputs_embeds, in company."""

from dataclasses import replace

import families
import numpy as np
import pytest
import torch
from schedule_interpreter import LIMITS, interpreted

import llmc

GREEDY = llmc.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)


def rows_of(model, count, seed=0):
    """Random rows that are as large as the model's embeddings."""
    generator = torch.Generator().manual_seed(seed)
    width = model.get_input_embeddings().weight.shape[1]
    return (0.3 * torch.randn(count, width, generator=generator)).numpy()


def inputs_embeds(model, ids, rows):
    """What transformers takes for token ids with -1 at the position of each row."""
    ids = torch.tensor(ids)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids.clamp(min=0)).clone()
    embeds[ids == -1] = torch.from_numpy(rows)
    return embeds[None]


def expected(model, ids, rows, count=8):
    """Greedy tokens and their log-probabilities by transformers, without a cache."""
    embeds, tokens, logprobs = inputs_embeds(model, ids, rows), [], []
    with torch.no_grad():
        for _ in range(count):
            logits = model(inputs_embeds=embeds, use_cache=False).logits[0, -1].double()
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1).max()))
            following = model.get_input_embeddings()(torch.tensor([[tokens[-1]]]))
            embeds = torch.cat([embeds, following], 1)
    return tokens, logprobs


def assert_generates(model, completion, ids, rows, tolerance=1e-4):
    tokens, logprobs = expected(model, ids, rows, len(completion.token_ids))
    assert list(completion.token_ids) == tokens
    assert [own.chosen for own in completion.logprobs] == pytest.approx(logprobs, abs=tolerance)


def prompt(ids, rows):
    return {"prompt_token_ids": ids, "prompt_embeds": rows}


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.parametrize(("family", "tp_size"), [
    ("gemma3_text", 2), ("qwen3", 1), ("gpt2", 3), thorough("granite", 1), thorough("opt", 2),
    thorough("gemma2", 1), thorough("bloom", 3), thorough("qwen3_moe", 2), thorough("gemma", 1),
    thorough("mamba2", 1)])
def test_families_generate_as_transformers(family, tp_size, tmp_path):
    """Scaled embeddings, positions added after, norms of embeddings."""
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", tp_size=tp_size,
                 enable_prompt_embeds=True)
    mixed, alone = [5, -1, -1, 9, 33, -1, 7], [-1] * 6
    rows = rows_of(model, 9)
    with llmc.LLM(tmp_path / "case") as llm:
        one, other, plain = llm.generate([prompt(mixed, rows[:3]), {"prompt_embeds": rows[3:]},
                                          [5, 9, 33]], GREEDY)
    assert_generates(model, one, mixed, rows[:3])
    assert_generates(model, other, alone, rows[3:])
    assert_generates(model, plain, [5, 9, 33], rows[:0])


@pytest.mark.extension
@pytest.mark.parametrize(("family", "options"), [
    ("gemma3_text", {"tp_size": 2}), thorough("gpt2", {"tp_size": 3}),
    thorough("qwen3", {"enable_lora": True}), thorough("mamba2", {}), thorough("qwen3_moe", {})])
def test_programs_of_gpus_read_rows(family, options, tmp_path):
    """In steps of few tokens, so that rows of a prompt are in several."""
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 enable_prompt_embeds=True, **options)
    mixed, alone = [5, -1, -1, 9, 33, -1, 7], [-1] * 6
    rows = rows_of(model, 9)
    with interpreted(tmp_path / "case", replace(LIMITS, max_tokens=8, max_slots=4)) as llm:
        made = llm.generate([prompt(mixed, rows[:3]), {"prompt_embeds": rows[3:]}, [5, 9, 33]],
                            GREEDY)
    for completion, ids, own in zip(made, (mixed, alone, [5, 9, 33]),
                                    (rows[:3], rows[3:], rows[:0]), strict=True):
        assert_generates(model, completion, ids, own)


@pytest.fixture(scope="module")
def case(tiny_hf, tmp_path_factory):
    directory = tmp_path_factory.mktemp("embeds") / "case"
    llmc.compile(tiny_hf, directory, enable_prompt_embeds=True)
    return directory


@pytest.fixture(scope="module")
def llm(case):
    with llmc.LLM(case) as loaded:
        yield loaded


def test_rows_are_read_in_chunks_beside_decoding_and_after_preemption(case, tiny_model):
    """Steps of 24 tokens, and a KV cache that is too small for all sequences."""
    ids = [[-1] * 12, [5, 9, *[-1] * 9, 7], [11, 3, 8], [4, *[-1] * 12], [-1] * 30]
    rows = [rows_of(tiny_model, own.count(-1), seed) for seed, own in enumerate(ids)]
    prompts = [prompt(*own) if len(own[1]) else own[0] for own in zip(ids, rows, strict=True)]
    with llmc.LLM(case, max_num_batched_tokens=24, max_batch_size=4, block_size=16,
                  kv_cache_tokens=112) as own:
        completions = own.generate(prompts, llmc.SamplingParams(
            max_tokens=24, temperature=0, ignore_eos=True, logprobs=0))
        assert own.metrics()["preemptions"] > 0
    for completion, *given in zip(completions, ids, rows, strict=True):
        assert_generates(tiny_model, completion, *given)


def test_samples_and_beams_share_the_rows_of_a_prompt(llm, tiny_model):
    ids, rows = [5, *[-1] * 20, 9], rows_of(tiny_model, 20)
    several = llm.generate(prompt(ids, rows), llmc.SamplingParams(
        max_tokens=5, temperature=0, n=3, ignore_eos=True, logprobs=0))
    for completion in several:
        assert_generates(tiny_model, completion, ids, rows)
    beams = llm.generate(prompt(ids, rows), llmc.SamplingParams(max_tokens=5, beam_width=3))
    embeds = inputs_embeds(tiny_model, ids, rows)
    with torch.no_grad():
        expected = tiny_model.generate(inputs_embeds=embeds, max_new_tokens=5, num_beams=3,
                                       do_sample=False, eos_token_id=2, pad_token_id=0)
    assert list(beams[0].token_ids) == expected[0, :len(beams[0].token_ids)].tolist()


def test_other_rows_under_the_same_token_ids_are_no_cached_prefix(llm, tiny_model):
    one, other = rows_of(tiny_model, 40, 1), rows_of(tiny_model, 40, 2)
    late = np.concatenate([one[:32], other[32:]])

    def cached(ids, rows):
        first, *_ = llm.stream(prompt(ids, rows), GREEDY)
        return first.num_cached_tokens

    ids = [*[-1] * 40, 7, 9]
    assert [cached(ids, one), cached(ids, one), cached(ids, other), cached(ids, late)] \
        == [0, 32, 0, 32]
    assert cached([7, *ids], one) == 0  # at other positions
    plain, *_ = llm.stream([*[0] * 40, 7, 9], GREEDY)
    assert plain.num_cached_tokens == 0


def test_penalties_count_tokens_and_not_rows(llm, tiny_model):
    """Rows after which token 0 is the most likely, which is also the placeholder of a row."""
    many = torch.from_numpy(rows_of(tiny_model, 6000)).reshape(3000, 2, -1)
    with torch.no_grad():
        chosen = tiny_model(inputs_embeds=many).logits[:, -1].argmax(-1)
    rows = many[int((chosen == 0).nonzero()[0])].numpy()
    params = llmc.SamplingParams(max_tokens=1, temperature=0, repetition_penalty=1000)
    completion, = llm.generate({"prompt_embeds": rows}, params)
    assert (completion.token_ids, completion.prompt_token_ids) == ((0,), ())
    completion, = llm.generate(prompt([0, -1, -1], rows), params)
    assert completion.prompt_token_ids == (0,)


@pytest.mark.parametrize(("given", "match"), [
    ({"prompt_embeds": np.zeros((0, 64), np.float32)}, r"has shape \[0, 64\]; give \[num_tokens"),
    ({"prompt_embeds": np.zeros(64, np.float32)}, r"has shape \[64\]; give"),
    ({"prompt_embeds": np.zeros((2, 65), np.float32)}, "rows of 65 values, .* hidden_size 64"),
    ({"prompt_embeds": np.full((2, 64), np.nan, np.float32)}, "NaN or infinite"),
    ({"prompt_embeds": [[1, 2]]}, "give an array of float32"),
    ({"prompt_embeds": "text"}, "give an array of float32"),
    ({"prompt_embeds": np.zeros((2, 64)), "prompt_token_ids": [3, -1]},
     "2 rows of prompt_embeds and 1 positions with -1"),
    ({"prompt_embeds": np.zeros((1, 64)), "prompt_token_ids": [300, -1]}, "not in the vocabulary"),
    ({"prompt_embeds": np.zeros((99, 64))}, "has 99 tokens, the KV cache has room for 64"),
    ({"prompt_embeds": np.zeros((1, 64)), "prompt": "text"}, "has the keys 'prompt', 'prompt_emb"),
    ({"prompt": None}, "has the keys none; give"),
    ([-1, 3], "token id -1 is not in the vocabulary")])
def test_bad_rows_are_refused(llm, given, match):
    with pytest.raises(llmc.LlmcError, match=match):
        llm.generate(given, GREEDY)


def test_prompt_logprobs_need_tokens(llm, tiny_model):
    with pytest.raises(llmc.LlmcError, match="prompt_logprobs is given for a prompt with"):
        llm.generate({"prompt_embeds": rows_of(tiny_model, 2)},
                     llmc.SamplingParams(prompt_logprobs=1))


def test_mappings_may_have_a_text_or_token_ids(llm):
    texts = llm.generate([{"prompt": "the fox"}, "the fox"], GREEDY)
    ids = llm.generate([{"prompt_token_ids": [5, 9]}, [5, 9]], GREEDY)
    for one, other in (texts, ids):
        assert (one.token_ids, one.prompt_token_ids) == (other.token_ids, other.prompt_token_ids)


def test_a_model_compiled_without_refuses_rows(case_tp1):
    with llmc.LLM(case_tp1) as own, pytest.raises(
            llmc.LlmcError, match="compile it again with --enable_prompt_embeds"):
        own.generate({"prompt_embeds": np.zeros((2, 64), np.float32)}, GREEDY)


@pytest.mark.parametrize(("options", "match"), [
    (dict(target="tensorrt", max_batch_size=2), "prompt embeddings run on target cpu or cuda"),
    (dict(task="embed", pooling="mean"),
     "compiled for task embed, which prompt embeddings do not support")])
def test_compiling_for_what_takes_no_rows_is_refused(tiny_hf, options, match, tmp_path):
    with pytest.raises(llmc.LlmcError, match=match):
        llmc.compile(tiny_hf, tmp_path / "case", enable_prompt_embeds=True, **options)


def test_a_model_that_reads_token_ids_elsewhere_is_refused(tmp_path):
    """Gemma 4's per-layer inputs."""
    model = families.tiny_model("gemma4_text")
    with pytest.raises(llmc.LlmcError, match="reads token ids in .* and in .*, so rows cannot"):
        llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case",
                     enable_prompt_embeds=True)
