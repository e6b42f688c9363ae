"""Generation: batches, streaming, stopping, sampling, replicas; against transformers."""

import subprocess
import sys
import threading

import families
import numpy as np
import pytest
import torch

import llmc
from llmc.runtime.decoding.sampling import Sampler, SamplingParams, probabilities
from llmc.runtime.decoding.stopping import TextStream

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [50, 51], [120, 3, 3, 3, 88]]


@pytest.fixture(scope="module", params=["case_tp1", "case_tp2"])
def llm(request):
    with llmc.LLM(request.getfixturevalue(request.param), max_batch_size=4) as loaded:
        yield loaded


def greedy(model, prompt, count):
    with torch.no_grad():
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=count, eos_token_id=None)
    return tuple(out[0, len(prompt):].tolist())


def test_a_batch_of_unequal_prompts_gives_transformers_tokens(llm, tiny_model):
    results = llm.generate(PROMPTS, 20, ignore_eos=True)
    assert [r.token_ids for r in results] == [greedy(tiny_model, p, 20) for p in PROMPTS]
    assert [r.finish_reason for r in results] == ["length"] * 3


def test_more_prompts_than_rows_wait_and_get_the_same_tokens(llm):
    many = PROMPTS * 3 + [[7]]
    alone = [llm.generate([prompt], 6, ignore_eos=True)[0].token_ids for prompt in many]
    assert [r.token_ids for r in llm.generate(many, 6, ignore_eos=True)] == alone


def test_a_finished_sequence_makes_room_and_leaves_the_others_alone(llm, tiny_model):
    """Sequences end at different steps; rows move; nobody's tokens change."""
    ends = {greedy(tiny_model, PROMPTS[0], 8)[3]}
    expected = []
    for prompt in PROMPTS:
        tokens = greedy(tiny_model, prompt, 12)
        cut = next((i + 1 for i, token in enumerate(tokens) if token in ends), 12)
        expected.append(tokens[:cut])
    sequences = llm.manifest.tokenizer.model_copy(update={"eos_token_ids": tuple(ends)})
    original = llm.manifest
    llm.manifest = original.model_copy(update={"tokenizer": sequences})
    try:
        results = llm.generate(PROMPTS, 12)
    finally:
        llm.manifest = original
    assert [r.token_ids for r in results] == expected
    assert results[0].finish_reason == "stop"


def test_logits_of_every_token(llm, tiny_model):
    families.assert_close(llm.logits(PROMPTS[0]), families.reference_logits(tiny_model, PROMPTS[0]))


def test_chunked_prefill_of_one_sequence(llm, tiny_model):
    tokens = list(range(5, 30))
    session = llm.session(1)
    session.extend([tokens[:10]])
    session.extend([tokens[10:17]])
    families.assert_close(session.extend([tokens[17:]])[0],
                          families.reference_logits(tiny_model, tokens)[-1])


def test_text_in_and_text_out(llm):
    result, = llm.generate("the quick", 5, ignore_eos=True)
    assert result.prompt_token_ids == tuple(llm.tokenizer.encode("the quick").ids)
    assert isinstance(result.text, str)


def test_streaming_yields_every_token_once_and_can_be_cancelled(llm):
    expected = llm.generate(PROMPTS, 8, ignore_eos=True)
    seen = {i: [] for i in range(3)}
    for piece in llm.stream(PROMPTS, 8, ignore_eos=True):
        seen[piece.index].append(piece.token_id)
    assert [tuple(seen[i]) for i in range(3)] == [r.token_ids for r in expected]
    stream = llm.stream(PROMPTS, 1000, ignore_eos=True)
    next(stream)
    stream.close()
    assert [r.token_ids for r in llm.generate(PROMPTS, 8, ignore_eos=True)] == \
        [r.token_ids for r in expected]


def test_generation_ends_where_the_kv_cache_ends(llm):
    result, = llm.generate([[5] * 60], 100, ignore_eos=True)
    assert (len(result.token_ids), result.finish_reason) == (64 - 60 + 1, "length")


def test_sampling_is_seeded_and_does_not_depend_on_the_batch(llm):
    options = dict(max_tokens=10, temperature=0.8, top_k=20, top_p=0.9, seed=7, ignore_eos=True)
    first = llm.generate(PROMPTS, **options)
    assert first == llm.generate(PROMPTS, **options)
    assert llm.generate(PROMPTS[:1], **options)[0] == first[0]
    assert llm.generate(PROMPTS, **{**options, "seed": 8}) != first


@pytest.mark.parametrize(("arguments", "match"), [
    (dict(prompts=[[1] * 65]), "65 tokens, the KV cache has room for 64"),
    (dict(prompts=[[]]), "prompt is empty"),
    (dict(prompts=[[99999]]), "token id 99999 is not in the vocabulary"),
    (dict(prompts=[[5]], max_tokens=0), "max_tokens 0"),
    (dict(prompts=[[5]], temperature=-1.0), "temperature -1.0 is negative"),
    (dict(prompts=[[5]], top_p=0.0), "top_p 0.0"),
    (dict(prompts=[[5]], top_k=-2), "top_k -2"),
    (dict(prompts=[[5]], stop=[""]), "stop string is empty"),
])
def test_bad_requests_are_refused(llm, arguments, match):
    with pytest.raises(llmc.LlmcError, match=match):
        llm.generate(**arguments)


def test_replicas_give_the_same_as_one(case_tp2):
    with llmc.LLM(case_tp2) as one, llmc.LLM(case_tp2, device=[0, 1, 2, 3]) as two:
        assert len(two._replicas) == 2
        assert two.generate(PROMPTS, 8, ignore_eos=True) == one.generate(PROMPTS, 8,
                                                                         ignore_eos=True)


def test_threads_end_with_the_model(case_tp2):
    before = threading.active_count()
    with llmc.LLM(case_tp2, device=[0, 1, 2, 3]) as model:
        list(model.stream(PROMPTS, 3))
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_a_failing_rank_stops_the_others_and_is_the_error(case_tp2, monkeypatch):
    with llmc.LLM(case_tp2) as model:
        engine = model._replicas[0]._engines[1]
        real = engine.run

        def fail(batch):
            raise RuntimeError("rank 1 is on fire")

        monkeypatch.setattr(engine, "run", fail)
        with pytest.raises(RuntimeError, match="rank 1 is on fire"):
            model.generate(PROMPTS, 3)
        monkeypatch.setattr(engine, "run", real)
        assert len(model.generate(PROMPTS, 3)) == 3


def test_the_kv_cache_is_extended_in_place(case_tp1):
    with llmc.LLM(case_tp1, max_batch_size=2) as model:
        cache = model._replicas[0]._engines[0]._caches["key_cache_0"]
        session = model.session(2)
        session.extend([[5, 6, 7], [8, 9, 10]])
        written = cache[:, :, :3].copy()
        assert written.any(axis=(1, 3)).all()
        session.extend([[11], [12]])
        np.testing.assert_array_equal(cache[:, :, :3], written)
        assert cache[:, :, 3].any() and not cache[:, :, 4:].any()


def test_a_running_model_imports_neither_torch_nor_transformers_nor_onnx(case_tp1):
    code = ("import sys, llmc\n"
            f"with llmc.LLM({str(case_tp1)!r}) as llm: print(llm.generate('the', 3)[0].text)\n"
            "bad = {'torch', 'transformers', 'onnx', 'onnxscript', 'onnx_graphsurgeon'}\n"
            "sys.exit(str(bad & set(sys.modules)) if bad & set(sys.modules) else 0)")
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_top_k_and_top_p_keep_what_they_should():
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    np.testing.assert_allclose(
        probabilities(logits, SamplingParams(1.0, top_k=2)), [2 / 3, 1 / 3, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(
        probabilities(logits, SamplingParams(1.0, top_p=0.7)), [2 / 3, 1 / 3, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(
        probabilities(logits, SamplingParams(0.5)), np.array([25, 6.25, 2.25, 1]) / 34.5, rtol=1e-5)


def stream_text(tokenizer, text, stop):
    stream = TextStream(tokenizer, [], stop)
    pieces = []
    for token in tokenizer.encode(text).ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return "".join(pieces) + stream.finish(), pieces


def test_a_character_of_several_tokens_comes_whole(llm):
    text, pieces = stream_text(llm.tokenizer, "naïve 東京 🙂", ())
    assert text == "naïve 東京 🙂"
    assert "�" not in "".join(pieces)


def test_a_stop_string_across_tokens_is_never_shown(llm):
    text, pieces = stream_text(llm.tokenizer, "the quick brown fox END and more", ["END"])
    assert text == "the quick brown fox "
    assert not any("E" in piece for piece in pieces)


def test_what_only_looks_like_a_stop_string_is_shown(llm):
    assert stream_text(llm.tokenizer, "an EN then nothing", ["END"])[0] == "an EN then nothing"


def test_draws_follow_the_distribution():
    logits = np.random.default_rng(0).standard_normal(20).astype(np.float32) * 2
    params = SamplingParams(0.8, top_k=12, top_p=0.9, seed=3)
    sampler, count = Sampler(params), 4000
    tokens = [sampler(logits, drawn) for drawn in range(count)]
    chances = probabilities(logits, params)
    counts = np.bincount(tokens, minlength=20)
    assert not counts[chances == 0].any()
    assert np.abs(counts - count * chances).max() < 4.5 * np.sqrt(count / 4)
    assert tokens == [Sampler(params)(logits, drawn) for drawn in range(count)]


@pytest.mark.parametrize(("arguments", "match"), [
    (dict(check_step=0), "check_step 0 is below 1"), (dict(skip_step=-1), "skip_step -1"),
])
def test_bad_steps_are_refused(case_tp1, arguments, match):
    with pytest.raises(llmc.LlmcError, match=match):
        llmc.LLM(case_tp1, **arguments)
