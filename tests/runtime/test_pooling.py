"""`LLM.embed`, `score` and `classify`: batches, chunks, prefixes, asyncio and the command line."""

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import families
import numpy as np
import pooling
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

import llmc
from llmc.compiler.check.retrieval import measure, read_search, retrieval
from llmc.compiler.check.similarity import PAIRS, read_pairs, similarity
from llmc.runtime.core.pooling import Input
from llmc.runtime.engines import cpu


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Cases of a BERT embedder, a Qwen 3 embedder and a token classifier, and their models."""
    root = tmp_path_factory.mktemp("pooling")
    found = {"bert": pooling.save("bert", pooling.ENCODERS["bert"], root / "bert", pooling="mean"),
             "qwen3": pooling.save("qwen3", pooling.DECODERS["qwen3"], root / "qwen3",
                                   pooling="last", max_position_embeddings=2048),
             "tokens": pooling.save("distilbert", pooling.ENCODERS["distilbert"], root / "tokens",
                                    "token_classify", num_labels=3)}
    for name in found:
        llmc.compile(root / name, root / f"{name}.case")
    return root, found


@pytest.fixture(scope="module")
def bert(made):
    with llmc.LLM(made[0] / "bert.case") as llm:
        yield llm


def random_texts(count, most, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 100, int(length)).tolist()
            for length in rng.integers(1, most + 1, count)]


def assert_equal_rows(rows, model, texts, kind):
    for row, ids in zip(rows, texts, strict=True):
        truth = pooling.reference(model, ids, kind)
        assert np.abs(row - truth).max() <= 1e-5 * max(1.0, np.abs(truth).max())


def test_many_texts_are_computed_in_steps_of_similar_lengths(made, bert):
    texts = random_texts(70, 66)
    assert_equal_rows(bert.embed(texts), made[1]["bert"], texts, "mean")
    assert bert.metrics()["finished"] >= 70


def record_steps(llm):
    """Return a list to which each step that is submitted from now on is added."""
    steps, engine = [], llm._loops[0]._engine
    submit = engine.submit
    engine.submit = lambda step: (steps.append(step), submit(step))[1]
    return steps


def test_a_step_has_only_whole_texts(made):
    texts = random_texts(15, 66, seed=1)
    with llmc.LLM(made[0] / "bert.case", max_num_batched_tokens=1, max_batch_size=3) as llm:
        steps = record_steps(llm)
        assert_equal_rows(llm.embed(texts), made[1]["bert"], texts, "mean")
    assert all((step.past_lens == 0).all() and len(step.sample) == step.batch_size
               for step in steps)
    assert max(step.num_tokens for step in steps) <= 66


def test_texts_of_a_call_are_computed_by_length(made):
    texts = random_texts(20, 66, seed=9)
    with llmc.LLM(made[0] / "bert.case", max_num_batched_tokens=1, max_batch_size=4) as llm:
        steps = record_steps(llm)
        assert_equal_rows(llm.embed(texts), made[1]["bert"], texts, "mean")
    lengths = [length for step in steps for length in step.seq_lens.tolist()]
    assert sorted(lengths) == lengths == sorted(map(len, texts))


def test_the_cores_share_a_step_of_several_texts(made, bert):
    texts = random_texts(40, 66, seed=10)
    rank, = families.ranks(bert)
    threads = rank._pool_threads
    if len(os.sched_getaffinity(0)) == 1:
        assert threads is None
        return
    given = record_groups(threads, lambda: assert_equal_rows(
        bert.embed(texts), made[1]["bert"], texts, "mean"))
    assert max(map(len, given)) > 1
    for groups in given:
        longest = [np.diff(own["cu_seqlens"]).max() for own in groups]
        assert longest == sorted(longest, reverse=True)
        for most, own in zip(longest, groups, strict=True):
            assert most * (len(own["cu_seqlens"]) - 1) <= cpu.MAX_GROUP
    few = [[7] * 26 for _ in range(threads.cores)]
    assert [*map(len, record_groups(threads, lambda: bert.embed(few)))] == [threads.cores]
    assert not record_groups(threads, lambda: bert.embed(few[:1]))


def test_weights_are_copied_only_where_memory_suffices(made, monkeypatch):
    monkeypatch.setattr(cpu, "available_memory", lambda: 1000)
    texts = random_texts(9, 66, seed=14)
    with llmc.LLM(made[0] / "bert.case") as llm:
        rank, = families.ranks(llm)
        assert rank._pool_threads is None
        assert_equal_rows(llm.embed(texts), made[1]["bert"], texts, "mean")


def record_groups(threads, call):
    """Groups of each step that the threads share during a call."""
    given, run = [], threads.run
    threads.run = lambda groups: (given.append(groups), run(groups))[1]
    try:
        call()
    finally:
        threads.run = run
    return given


def test_a_text_alone_is_computed_in_the_caller_s_thread(made, bert):
    texts, threads = random_texts(3, 20, seed=11), []
    engine = bert._loops[0]._engine
    submit = engine.submit
    engine.submit = lambda step: (threads.append(threading.current_thread()), submit(step))[1]
    try:
        for text in texts:
            assert_equal_rows(bert.embed([text]), made[1]["bert"], [text], "mean")
    finally:
        engine.submit = submit
    assert threads == [threading.current_thread()] * 3


def test_a_text_beside_others_waits_for_its_step(made, bert):
    text, = random_texts(1, 20, seed=12)
    with ThreadPoolExecutor(1) as threads, bert._loops[0]._turn:
        waiting = threads.submit(bert.embed, [text])
        assert not wait([waiting], 0.2).done
        assert bert.stalled_seconds() > 0  # it was added
        bert._loops[0]._turn.release()
        try:
            assert_equal_rows(waiting.result(), made[1]["bert"], [text], "mean")
        finally:
            bert._loops[0]._turn.acquire()


def test_an_interrupted_text_leaves_the_model_to_others(made):
    text, = random_texts(1, 20, seed=13)
    with llmc.LLM(made[0] / "bert.case") as llm:
        def interrupted(step):
            raise KeyboardInterrupt

        engine = llm._loops[0]._engine
        pool, engine._pool = engine._pool, interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.embed([text])
        engine._pool = pool
        assert_equal_rows(llm.embed([text]), made[1]["bert"], [text], "mean")
    with pytest.raises(llmc.LlmcError, match="closed"):
        llm.embed([text])


def test_long_texts_of_a_causal_model_are_computed_in_chunks(made):
    texts = [*random_texts(5, 40, seed=2), random_texts(1, 1, seed=3)[0] * 1500]
    with llmc.LLM(made[0] / "qwen3.case", max_num_batched_tokens=64) as llm:
        assert_equal_rows(llm.embed(texts), made[1]["qwen3"], texts, "last")


@pytest.mark.parametrize("kind", ["mean", "cls"])
def test_all_tokens_of_a_long_text_are_pooled_together(made, kind, tmp_path):
    llmc.compile(made[0] / "qwen3", tmp_path / "case", pooling=kind)
    texts = [*random_texts(3, 9, seed=7), random_texts(1, 1, seed=8)[0] * 300 + [9] * 400]
    with llmc.LLM(tmp_path / "case") as llm:
        assert_equal_rows(llm.embed(texts), made[1]["qwen3"], texts, kind)
        assert_equal_rows(llm.embed(texts), made[1]["qwen3"], texts, kind)  # nothing is reused


def test_texts_of_a_causal_model_share_a_cached_prefix(made):
    prefix = random_texts(1, 1, seed=4)[0] * 64
    texts = [prefix + own for own in random_texts(4, 9, seed=5)]
    with llmc.LLM(made[0] / "qwen3.case") as llm:
        for ids in texts:
            assert_equal_rows(llm.embed([ids]), made[1]["qwen3"], [ids], "last")
        assert llm.metrics()["cache_hits"] > 0


def test_a_text_and_a_list_of_texts_are_embedded(made, bert):
    ids = Tokenizer.from_file(str(made[0] / "bert" / "tokenizer.json")).encode("the cat sat").ids
    truth = pooling.reference(made[1]["bert"], ids, "mean")
    for given in ("the cat sat", ["the cat sat"], np.array(ids), [tuple(ids)]):
        rows = bert.embed(given)
        assert rows.dtype == np.float32 and rows.shape == (1, 64)
        assert np.abs(rows[0] - truth).max() < 1e-5
    assert bert.embed([]).shape == (0, 64)


def test_each_token_is_classified(made):
    with llmc.LLM(made[0] / "tokens.case") as llm:
        found, = llm.classify("the cat sat on the mat")
        ids = llm.tokenize("the cat sat on the mat")
        with pytest.raises(llmc.LlmcError, match="which has no embed; use classify"):
            llm.embed("a")
    expected = torch.softmax(torch.tensor(pooling.reference(made[1]["tokens"], ids)), -1)
    assert len(found) == len(ids)
    for own, truth in zip(found, expected, strict=True):
        assert own.label == f"LABEL_{int(truth.argmax())}"
        assert np.abs(np.array(own.scores) - truth.numpy()).max() < 1e-5


def test_tasks_of_asyncio_share_steps(made, bert):
    texts = random_texts(20, 60, seed=6)

    async def embed_all():
        async with llmc.AsyncLLM(made[0] / "bert.case") as llm:
            rows = await asyncio.gather(*(llm.embed([ids]) for ids in texts))
            scores = await llm.score("the cat", ["a dog", "the cat"])
            return np.concatenate(rows), scores

    rows, scores = asyncio.run(embed_all())
    assert_equal_rows(rows, made[1]["bert"], texts, "mean")
    assert abs(scores[1] - 1) < 1e-5 and scores == pytest.approx(
        bert.score("the cat", ["a dog", "the cat"]))


def test_a_canceled_task_ends_its_texts(made):
    async def cancel():
        async with llmc.AsyncLLM(made[0] / "bert.case", max_batch_size=1) as llm:
            task = asyncio.create_task(llm.embed(random_texts(500, 60)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            row = await asyncio.wait_for(llm.embed([[5, 9]]), 60)
            assert llm.metrics()["waiting"] == 0
            return row

    assert_equal_rows(asyncio.run(cancel()), made[1]["bert"], [[5, 9]], "mean")


def test_infinite_rows_fail_only_their_request(made, bert):
    pooling_row = np.full(64, np.nan, np.float32)
    engine = bert._loops[0]._engine
    compute, engine._pool = engine._pool, lambda step: [pooling_row for _ in step.sample]
    try:
        with pytest.raises(llmc.LlmcError, match="NaN or infinite"):
            bert.embed("a")
    finally:
        engine._pool = compute
    assert bert.embed("a").shape == (1, 64)


@pytest.mark.parametrize(("call", "message"), [
    (lambda llm: llm.embed(3), "texts is 3; give a text"),
    (lambda llm: llm.embed(["a", 3]), "text 1 is 3; give a list of token ids"),
    (lambda llm: llm.embed("a\ud800"), "text 0 is not valid Unicode"),
    (lambda llm: llm.embed("cat " * 90), "text 0 has 92 tokens, the model takes at most 66"),
    (lambda llm: llm.embed(["a", ""]), "text 1 is empty; give at least one character"),
    (lambda llm: llm.embed([[5], []]), "text 1 is empty; give at least one token"),
    (lambda llm: llm.embed([5, 101]), "token id 101 is not in the vocabulary of 101"),
    (lambda llm: llm.embed("a", dimensions=1.5), "dimensions is 1.5"),
    (lambda llm: llm.embed("a", dimensions=65), "dimensions 65 is not from 1 to 64, the model's"),
    (lambda llm: llm.score("a", ["b", ""]), "document 1 is empty"),
    (lambda llm: llm.embed("a", truncate_prompt_tokens=0), "0 is not from 1 to 66, nor -1"),
    (lambda llm: llm.embed("a", prompt_name="q"), "the model has no prompts"),
    (lambda llm: llm.score("a", [3]), "document 0 is 3; give a text"),
    (lambda llm: llm.score(["a"], ["b"]), "query is"),
    (lambda llm: llm.classify("a"), "was compiled for task embed, which has no classify"),
    (lambda llm: llm.generate("a"), "compiled for task embed and generates no text; use embed"),
    (lambda llm: llm.logits([5]), "compiled for task embed and generates no text"),
])
def test_bad_input_is_refused_with_a_reason(bert, call, message):
    with pytest.raises(llmc.LlmcError, match=message):
        call(bert)
    assert bert.embed("a").shape == (1, 64)  # nothing is lost for others


def test_a_generating_model_does_not_embed(case_tp1):
    with llmc.LLM(case_tp1) as llm, pytest.raises(llmc.LlmcError, match="generates text and has"):
        llm.embed("a")


def test_truncated_pairs_keep_both_texts(made, bert):
    pair, = bert.pooling.pairs([("the cat", "dog " * 90)], truncate=-1)
    assert len(pair.token_ids) == 66 and pair.token_ids[:4] == bert.tokenize("the cat")
    assert pair.token_type_ids == [0] * 4 + [1] * 62
    assert isinstance(pair, Input)


def run(*arguments, given=""):
    return subprocess.run([sys.executable, "-m", "llmc.cli", *map(str, arguments)], input=given,
                          capture_output=True, text=True, timeout=120)


def test_run_prints_vectors_of_a_prompt_file(made, bert):
    lines = [{"prompt": "the cat", "id": "x"}, {"token_ids": [5, 6], "dimensions": 4},
             {"query": "the cat", "documents": ["a dog", "the cat"]}, {"prompt": ""}, {"text": 3}]
    result = run("run", made[0] / "bert.case", "--prompt_file", "-",
                 given="\n".join(map(json.dumps, lines)))
    first, second, third, *bad = map(json.loads, result.stdout.splitlines())
    assert result.returncode == 1 and "2 request(s) of standard input failed" in result.stderr
    assert first["id"] == "x" and np.allclose(first["embedding"], bert.embed("the cat")[0])
    assert np.allclose(second["embedding"], bert.embed([[5, 6]])[0][:4])
    assert third["scores"] == pytest.approx(bert.score("the cat", ["a dog", "the cat"]))
    assert ["line 4: text 0 is empty" in bad[0]["error"],
            "line 5: expected an object with one of prompt" in bad[1]["error"]] == [True, True]


def test_run_refuses_options_of_generation(made):
    result = run("run", made[0] / "bert.case", "--prompt", "a", "--temperature", 0.5)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: --temperature is given, but ")


def test_inspect_shows_the_task(made):
    result = run("inspect", made[0] / "tokens.case")
    assert "task token_classify: pooling none, width 3, labels LABEL_0, LABEL_1" in \
        " ".join(result.stdout.split())
    assert json.loads(run("inspect", made[0] / "bert.case", "--json").stdout)["pooling"]["task"] \
        == "embed"


@pytest.mark.parametrize("command", ["diff", "eval"])
def test_commands_for_causal_lms_refuse_other_tasks(made, command):
    options = ("--task", "perplexity") if command == "eval" else \
        ("--reference", made[0] / "bert")
    result = run(command, made[0] / "bert.case", *options)
    assert result.returncode == 2
    assert f"llmc {command} does not support task embed" in result.stderr


def test_eval_gives_transformers_correlation(tmp_path):
    bert = pooling.ENCODERS["bert"]
    pooling.save("bert", bert, tmp_path / "hf", pooling="cls")
    pooling.write_modules(tmp_path / "hf", "cls", 64, "Dense", "Normalize")
    folder = tmp_path / "hf" / "2_Dense"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(
        {"in_features": 64, "out_features": 8, "bias": True,
         "activation_function": "torch.nn.modules.activation.Tanh"}))
    save_file({"linear.weight": torch.randn(8, 64), "linear.bias": torch.randn(8)},
              folder / "model.safetensors")
    llmc.compile(tmp_path / "hf", tmp_path / "case")
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(
        {"text_1": f"{one} cat", "text_2": f"the {two}", "score": score}) + "\n"
        for score, (one, two) in enumerate([("a", "dog"), ("the", "cat"), ("cold", "water")])))
    report = similarity(tmp_path / "case", data=data, hf_dir=tmp_path / "hf")
    score, = report.scores
    assert report.verdict is None and report.count == 3 and score.llmc == score.transformers
    shipped = similarity(tmp_path / "case")
    assert shipped.count == len(read_pairs(PAIRS)) == 30 and shipped.reference is None


def test_gains_and_recall_are_those_of_a_search_by_hand():
    queries = np.array([[1.0, 0.0], [0.0, 2.0]])
    angles = np.radians(np.arange(12) * 5)
    documents = np.stack([np.cos(angles), np.sin(angles)], 1) * 3  # best of query 0: 0, 1, 2, …
    found = measure(queries, documents, [frozenset({1, 3, 11}), frozenset({11})])
    gain = (1 / math.log2(3) + 1 / math.log2(5)) / (1 + 1 / math.log2(3) + 1 / math.log2(4))
    assert found["ndcg@10"] == pytest.approx((gain + 1) / 2)
    assert found["recall@10"] == pytest.approx((2 / 3 + 1) / 2)


def test_eval_ranks_documents_with_the_prompts_of_transformers(tmp_path):
    pooling.save("bert", pooling.ENCODERS["bert"], tmp_path / "hf", pooling="mean")
    (tmp_path / "hf" / "config_sentence_transformers.json").write_text(json.dumps(
        {"prompts": {"query": "query : ", "passage": "the document : ", "other": "a "}}))
    llmc.compile(tmp_path / "hf", tmp_path / "case")
    data = tmp_path / "search.jsonl"
    texts = ["cat", "dog sat", "water is cold", "food"]
    data.write_text("\n".join(map(json.dumps, [
        *({"id": text[:3], "text": text} for text in texts),
        {"query": "a cat", "relevant": ["cat"]},
        {"query": "warm water", "relevant": ["wat", "foo"]}])))
    report = retrieval(tmp_path / "case", data=data, hf_dir=tmp_path / "hf")
    assert report.verdict is None and report.count == 2
    assert [score.llmc for score in report.scores] == [s.transformers for s in report.scores]
    with llmc.LLM(tmp_path / "case") as llm:
        vectors = llm.embed([f"the document : {text}" for text in texts], prompt_name=None)
        queries = llm.embed(["a cat", "warm water"], prompt_name="query")
    assert report.scores[0].llmc == measure(queries, vectors, [{0}, {2, 3}])["ndcg@10"]
    shown = run("eval", tmp_path / "case", "--task", "retrieval", "--data", data)
    assert shown.returncode == 0 and "2 queries of search.jsonl" in shown.stdout


@pytest.mark.parametrize(("lines", "message"), [
    ([], "has 0 documents and no queries"), ([{"id": "a", "text": "b"}], "has 1 documents and no"),
    ([{"id": "a", "text": ""}], "line 1, is"), ([{"id": "a", "text": "b"}] * 2, "the id 'a' twice"),
    ([{"query": "a", "relevant": []}], "line 1, is"), ([[]], "line 1, is"),
    ([{"query": "a", "relevant": ["b"]}], "names the document 'b' in query 'a', and has none"),
    ([{"query": "a", "relevant": ["b"]}] * 2, "the query 'a' twice")])
def test_wrong_search_sets_are_refused(lines, message, tmp_path):
    (tmp_path / "search.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(llmc.LlmcError, match=message):
        read_search(tmp_path / "search.jsonl")


@pytest.mark.parametrize(("line", "message"), [
    ('{"text_1": "a", "text_2": "b", "score": 1}', "has 1 pairs, expected at least 2"),
    ('{"text_1": "a", "score": 1}', "line 1, is"), ("[]", "line 1, is"), ("", "has 0 pairs"),
    ('{"text_1": "a", "text_2": "b", "score": NaN}', "line 1, is"),
    ('{"text_1": 3, "text_2": "b", "score": 1}', "line 1, is")])
def test_wrong_pairs_are_refused(line, message, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(line)
    with pytest.raises(llmc.LlmcError, match=message):
        read_pairs(tmp_path / "pairs.jsonl")
