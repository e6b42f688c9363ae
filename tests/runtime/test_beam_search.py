"""Beam search: transformers' sequences, parents and scores; a cache that is never copied."""

from dataclasses import replace

import families
import numpy as np
import pytest
import torch
from beams import PROMPTS, assert_equal, search
from families import end_with
from transformers import AutoModelForCausalLM

import llmc
from llmc.compiler.check.diff import diff
from llmc.runtime.sampling.beam_search import (
    BeamSearch,
    Candidates,
    expand,
    gather_tree,
    log_softmax,
)

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ["gpt2", "gemma2", "qwen3", "gpt_neox"]


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    return families.save(families.tiny_model("llama"), tmp_path_factory.mktemp("beams") / "hf")


@pytest.fixture(scope="module")
def model(hf_dir):
    return families.tiny_model("llama")


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def case(request, hf_dir):
    path = hf_dir.parent / f"tp{request.param}"
    llmc.compile(hf_dir, path, tp_size=request.param)
    return path


@pytest.fixture(scope="module")
def llm(case):
    with llmc.LLM(case, max_batch_size=12) as loaded:
        yield loaded


@pytest.mark.parametrize("beam_width", [2, 3, 4, 8])
def test_a_batch_of_unequal_prompts_gives_transformers_beams(llm, model, beam_width):
    """Also if not all prompts fit in the cache at once."""
    beams = assert_equal(llm, model, PROMPTS, search(beam_width, ignore_eos=True))
    assert beams.output_ids.shape == beams.parent_ids.shape == (12, 3, beam_width)
    assert (beams.sequence_length == 12).all()


def check_settings(llm, model, seeds, monkeypatch):
    """Check random prompts, EOS tokens and settings; return the completions that ended by EOS."""
    ended = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(3, 101, rng.integers(1, 10)).tolist() for _ in range(3)]
        params = search(int(rng.choice([2, 4, 8])), int(rng.integers(1, 16)),
                        length_penalty=float(rng.choice([1.0, 0.0, -1.0, 2.0])),
                        early_stopping=[False, True, "never"][rng.integers(3)])
        plain = llm.beam_search(prompts, replace(params, ignore_eos=True)).output_ids
        ends = sorted({int(t) for t in rng.choice(plain.reshape(-1), rng.integers(1, 4))})
        end_with(llm, monkeypatch, ends)
        beams = assert_equal(llm, model, prompts, params, ends)
        ended += int((beams.sequence_length < params.max_tokens).sum())
    return ended


def test_many_prompts_eos_tokens_and_settings(llm, model, monkeypatch):
    """12 seeds on one chip and 12 others on two."""
    first = 12 * (llm.manifest.tp_size - 1)
    assert check_settings(llm, model, range(first, first + 12), monkeypatch) > 30


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.thorough] * (kind not in ("gpt2", "gemma2")))
    for kind in KINDS])
def test_other_families_with_eos_tokens_and_settings(kind, tmp_path, monkeypatch):
    model = families.tiny_model(kind)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case")
    first = 24 + 6 * KINDS.index(kind)
    with llmc.LLM(tmp_path / "case", max_batch_size=24) as llm:
        assert check_settings(llm, model, range(first, first + 6), monkeypatch) > 3


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """transformers' model and llmc's, with rows for three prompts at beam width 8."""
    path, case = families.smollm2(), tmp_path_factory.mktemp("smollm2") / "case"
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name,
                                                 dtype=torch.float32)
    llmc.compile(path, case, max_seq_len=128, quantize="none")
    with llmc.LLM(case, max_batch_size=24) as llm:
        yield model, llm


@pytest.mark.thorough
@pytest.mark.parametrize(("beam_width", "batch"), [(2, 1), (2, 3), (4, 1), (4, 3), (8, 1), (8, 3)])
def test_smollm2_gives_transformers_beams(beam_width, batch, smollm2):
    model, llm = smollm2
    prompts = [llm.tokenizer.encode(text).ids for text in
               ("The sea is", "Once upon a time, in a small village,", "Water boils when")]
    beams = assert_equal(llm, model, prompts[:batch], search(beam_width, 64),
                         llm.manifest.tokenizer.eos_token_ids)
    assert (beams.sequence_length > 1).all()


@pytest.mark.usefixtures("decisive_beams")
def test_a_prompt_that_fills_the_cache_ends_sooner(llm):
    prompts, params = [[3] * 58, [3, 8], [4] * 30], search(3, 20, ignore_eos=True)
    found = llm.beam_search(prompts, params)
    assert found.sequence_length.tolist() == [[7] * 3, [20] * 3, [20] * 3]


def test_processors_are_those_of_transformers(llm, model, monkeypatch):
    ends = sorted({int(t) for t in
                   llm.beam_search(PROMPTS, search(4, ignore_eos=True)).output_ids[2:4, :, 0].flat})
    end_with(llm, monkeypatch, ends)
    params = search(4, min_tokens=5, repetition_penalty=1.3, bad_words=[[7], [41, 36]],
                    logit_bias={9: 1.5})
    assert_equal(llm, model, PROMPTS, params, ends, min_new_tokens=5, repetition_penalty=1.3,
                 bad_words_ids=[[7], [41, 36]], sequence_bias={(9,): 1.5})


def test_the_eos_token_may_be_overridden(llm, model):
    end = int(llm.beam_search(PROMPTS[:1], search(4, ignore_eos=True)).output_ids[3, 0, 0])
    assert_equal(llm, model, PROMPTS, search(4, end_id=end), [end])


def test_generate_gives_the_best_beam_of_each_prompt(llm):
    beams = llm.beam_search(PROMPTS, search(4))
    results = llm.generate(PROMPTS, search(4))
    assert [list(r.token_ids) for r in results] == [
        beams.output_ids[:beams.sequence_length[b, 0], b, 0].tolist() for b in range(3)]
    assert [r.finish_reason for r in results] == ["length"] * 3


@pytest.mark.usefixtures("decisive_beams")
def test_each_request_of_a_batch_has_separate_parameters(llm):
    each = [search(4, 9), llmc.SamplingParams(max_tokens=5), search(3, length_penalty=0.0),
            search(4, early_stopping=True), search(4, 7, min_tokens=3)]
    prompts = [*PROMPTS, PROMPTS[0], PROMPTS[1]]
    alone = [llm.generate([prompt], params)[0].token_ids
             for prompt, params in zip(prompts, each, strict=True)]
    assert [r.token_ids for r in llm.generate(prompts, each)] == alone


def test_beam_search_ends_where_the_kv_cache_ends(llm, model):
    beams = assert_equal(llm, model, [[5] * 60], search(4, 5, ignore_eos=True))
    longer = llm.beam_search([[5] * 60, [7, 8]], search(4, 30, ignore_eos=True))
    assert longer.sequence_length.tolist() == [[5] * 4, [30] * 4]
    assert (longer.output_ids[:5, 0] == beams.output_ids[:, 0]).all()


def test_a_prompt_is_computed_once_and_its_beams_share_its_blocks(case, monkeypatch):
    prompt = list(range(5, 45))
    with llmc.LLM(case, max_batch_size=12, block_size=4) as llm:
        read = families.steps_read(llm, monkeypatch)
        tables = []
        engine = families.engine_of(llm)
        submit = engine.submit
        monkeypatch.setattr(engine, "submit", lambda step: tables.append(step) or submit(step))
        llm.beam_search([prompt, [7, 8]], search(4, 6, ignore_eos=True))
        assert read == [42, 8, 8, 8, 8, 8]
        for step in tables[1:]:
            assert len({tuple(row[:10]) for row in step.block_tables[:4].tolist()}) == 1
            assert len(set(step.block_tables[range(4), step.past_lens[:4] // 4].tolist())) == 4
        assert sum(len(step.copies) for step in tables) < 40


def test_an_engine_generates_normally_after_a_beam_search(llm, model, case, hf_dir):
    families.assert_close(llm.logits(PROMPTS[0]), families.reference_logits(model, PROMPTS[0]))
    results = llm.generate(PROMPTS, llmc.SamplingParams(max_tokens=8, ignore_eos=True))
    for result, prompt in zip(results, PROMPTS, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=8, eos_token_id=None)
        assert list(result.token_ids) == out[0, len(prompt):].tolist()
    assert diff(case, reference=str(hf_dir), tokens=4).verdict is None


def test_diversity_keeps_continuations_of_one_beam_from_taking_all():
    scores = np.log(np.array([[[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]], np.float32))
    candidates = Candidates.of(scores, 2)
    sums = np.log(np.array([[0.9, 0.1]], np.float32))
    tokens, parents, totals = expand(candidates, sums)
    assert (tokens.tolist(), parents.tolist()) == ([[0, 1, 0, 1]], [[0, 0, 1, 1]])
    np.testing.assert_allclose(totals, np.log([[0.45, 0.27, 0.06, 0.03]]), rtol=1e-6)
    tokens, parents, totals = expand(candidates, sums, 2.0)  # 0.27 · e⁻² < 0.06
    assert (tokens.tolist(), parents.tolist()) == ([[0, 0, 1, 1]], [[0, 1, 0, 1]])
    np.testing.assert_allclose(totals, np.log([[0.45, 0.06, 0.27, 0.03]]), rtol=1e-6)


def test_diversity_changes_what_is_found(llm):
    plain, diverse = (llm.beam_search(PROMPTS, search(4, diversity_rate=rate, ignore_eos=True))
                      for rate in (0.0, 5.0))
    assert not np.array_equal(plain.output_ids, diverse.output_ids)
    assert (np.diff(diverse.scores, axis=1) <= 0).all()


def test_gather_tree_follows_parents():
    """One prompt, three beams, four steps; the third result is one token shorter."""
    tokens = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]], np.int32)[:, None]
    parents = np.array([[0, 0, 0], [1, 0, 0], [2, 2, 1], [1, 0, 2]], np.int32)[:, None]
    lengths = np.array([[4, 4, 3]])
    assert gather_tree(tokens, parents, lengths, 99)[:, 0].T.tolist() == [
        [1, 6, 8, 10], [1, 6, 7, 11], [1, 5, 9, 99]]
    ends = gather_tree(tokens, parents, np.array([[1, 2, 0]]), 99, np.array([[2, 0, 0]]))
    assert ends[:, 0].T.tolist() == [[3, 99, 99, 99], [2, 4, 99, 99], [99] * 4]


@pytest.mark.parametrize("levels", [7, 40, 10**6], ids=["many ties", "ties", "no ties"])
def test_a_beam_s_candidates_are_its_top_k_tokens(levels):
    rng = np.random.default_rng(0)
    for vocab, count in ((101, 5), (101, 101), (3, 8), (32000, 12)):
        scores = np.log(rng.integers(1, levels + 1, (2, 3, vocab)) / levels).astype(np.float32)
        found = Candidates.of(scores, count)
        tokens = np.lexsort((np.broadcast_to(np.arange(vocab), scores.shape), -scores), axis=-1)
        assert np.array_equal(found.tokens, tokens[..., :count])
        assert np.array_equal(found.log_probs,
                              np.take_along_axis(scores, tokens[..., :count], axis=-1))


def searched(rng, more):
    """Search over random scores with ties, with `more` candidates than requested."""
    batch, beam, vocab = int(rng.integers(1, 4)), int(rng.integers(2, 7)), int(rng.integers(5, 60))
    limits = rng.integers(1, 12, batch).tolist()
    ends = [rng.choice(vocab, rng.integers(0, 4), replace=False).tolist() for _ in range(batch)]
    search = BeamSearch(beam, 12, limits, ends, length_penalty=float(rng.choice([1, 0, -1, 2])),
                        diversity_rate=float(rng.choice([0, 0, 0.7])),
                        early_stopping=[False, True, "never"][rng.integers(3)])
    chosen = []
    while search.running.any():
        levels = int(rng.choice([4, 10**6]))
        logits = rng.integers(0, levels, (batch, beam, vocab)).astype(np.float32) * (6 / levels)
        chosen.append(search.step(Candidates.of(log_softmax(logits), search.candidates + more)))
    return search.beams(), chosen


def test_the_requested_number_of_candidates_is_sufficient():
    """The whole vocabulary as candidates gives the same result, for any EOS tokens and ties."""
    for seed in range(300):
        few, whole = (searched(np.random.default_rng(seed), more) for more in (0, 10**6))
        for name in ("output_ids", "parent_ids", "cum_log_probs", "scores", "sequence_length"):
            assert np.array_equal(getattr(few[0], name), getattr(whole[0], name)), (seed, name)
        for own, other in zip(few[1], whole[1], strict=True):
            assert all(map(np.array_equal, own, other)), seed


def test_log_softmax_is_that_of_torch():
    logits = np.random.default_rng(0).normal(0, 9, (3, 5000)).astype(np.float32)
    expected = torch.from_numpy(logits).double().log_softmax(-1)
    np.testing.assert_allclose(log_softmax(logits), expected, rtol=1e-6)


@pytest.mark.parametrize(("params", "match"), [
    (dict(beam_width=0), "beam_width 0 is below 1; 1 is no beam search"),
    (dict(n=2), "n 2 does not go with beam_width 2, .* leave n out, or beam_width at 1"),
    (dict(temperature=0.5), "temperature 0.5 does not go with beam_width 2"),
    (dict(stop=["x"]), r"stop \('x',\) does not go with beam_width 2"),
    (dict(logprobs=1), "logprobs 1 does not go with beam_width 2"),
    (dict(length_penalty=float("nan")), "length_penalty nan is not from -10 to 10"),
    (dict(diversity_rate=-1.0), "diversity_rate -1.0 is not from 0 to 1000000"),
    (dict(early_stopping="soon"), "early_stopping is 'soon'; give False, True or 'never'"),
])
def test_unsupported_beam_search_options_are_refused(params, match):
    with pytest.raises(llmc.LlmcError, match=f"^{match}"):
        llmc.SamplingParams(**{"beam_width": 2, **params})


@pytest.mark.parametrize(("prompts", "params", "match"), [
    ([[5]], search(13), "beam_width 13 exceeds max_batch_size 12; load the model with a larger"),
    ([[5]], search(2, end_id=101), "token id 101 is not in the vocabulary of 101"),
    ([], search(2), "there is no prompt"),
    ([[5]], llmc.SamplingParams(), "beam_width 1 is not a beam search; give SamplingParams"),
    ([[5], [6]], [search(2), search(4)], "one beam search has one beam_width for all prompts, not "
                                         "2 and 4; use generate"),
    ([[5]], search(4, logit_bias=dict.fromkeys(range(101), float("-inf"))),
     "no token is allowed after 0 generated ones"),
])
def test_bad_searches_are_refused(llm, prompts, params, match):
    with pytest.raises(llmc.LlmcError, match=f"^{match}"):
        llm.beam_search(prompts, params)


def test_more_beams_than_rows_are_refused(case):
    with llmc.LLM(case, max_batch_size=3) as small, \
            pytest.raises(llmc.LlmcError, match="^beam_width 4 exceeds max_batch_size 3; load"):
        small.generate([[5]], search(4))
