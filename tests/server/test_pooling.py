"""Embeddings, reranking, scores and classes over HTTP, by server processes."""

import base64
import json
import shutil

import numpy as np
import openai
import pooling
import pytest
import torch
from click.testing import CliRunner
from server_process import serving, until
from tokenizers import Tokenizer

import llmc
from llmc.cli import main

TEXTS = ["the cat sat on the mat", "a dog runs", "cold water"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of an embedding model and a cross-encoder, and their models."""
    root = tmp_path_factory.mktemp("pooling")
    bert = pooling.ENCODERS["bert"]
    made = {"embed": pooling.save("bert", bert, root / "embed", pooling="mean"),
            "rank": pooling.save("bert", bert, root / "rank", "classify", num_labels=1),
            "classes": pooling.save("bert", bert, root / "classes", "classify", num_labels=3)}
    pooling.write_modules(root / "embed", "mean", 64, "Normalize")
    (root / "embed" / "config_sentence_transformers.json").write_text(json.dumps(
        {"prompts": {"query": "query about "}, "default_prompt_name": None}))
    for name in made:
        llmc.compile(root / name, root / f"{name}.case")
    return root, made


@pytest.fixture(scope="module")
def embedder(models):
    with serving(models[0] / "embed.case") as own:
        yield own


@pytest.fixture(scope="module")
def reranker(models):
    with serving(models[0] / "rank.case") as own:
        yield own


@pytest.fixture(scope="module")
def classifier(models):
    with serving(models[0] / "classes.case") as own:
        yield own


def encoded(models, *texts):
    encoding = Tokenizer.from_file(str(models[0] / "embed" / "tokenizer.json")).encode(*texts)
    return encoding.ids, encoding.type_ids


def vector(models, text):
    row = pooling.reference(models[1]["embed"], encoded(models, text)[0], "mean")
    return row / np.linalg.norm(row)


def logits(models, name, *texts):
    ids, types = encoded(models, *texts)
    return torch.tensor(pooling.reference(models[1][name], ids, types=types))


@pytest.mark.parametrize("encoding_format", ["float", "base64", openai.NOT_GIVEN])
def test_openai_s_client_gets_the_model_s_vectors(models, embedder, encoding_format):
    answer = embedder.client.embeddings.create(model="tiny", input=TEXTS,
                                               encoding_format=encoding_format)
    assert [own.index for own in answer.data] == [0, 1, 2]
    for text, own in zip(TEXTS, answer.data, strict=True):
        given = np.frombuffer(base64.b64decode(own.embedding), "<f4") \
            if encoding_format == "base64" and isinstance(own.embedding, str) else own.embedding
        assert np.abs(np.array(given) - vector(models, text)).max() < 1e-5
    tokens = sum(len(encoded(models, text)[0]) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens


def test_token_ids_alone_and_in_batches_are_embedded(models, embedder):
    ids = [encoded(models, text)[0] for text in TEXTS]
    for given, texts in ((ids[0], TEXTS[:1]), (ids, TEXTS), (TEXTS[0], TEXTS[:1])):
        data = embedder.client.embeddings.create(model="tiny", input=given).data
        for text, own in zip(texts, data, strict=True):
            assert np.abs(np.array(own.embedding) - vector(models, text)).max() < 1e-5


def test_dimensions_shorten_and_normalize_vectors(models, embedder):
    data = embedder.client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8).data
    expected = vector(models, TEXTS[0])[:8]
    assert np.abs(data[0].embedding - expected / np.linalg.norm(expected)).max() < 1e-5


def test_a_prompt_is_prepended_by_its_name(models, embedder):
    data = embedder.client.embeddings.create(
        model="tiny", input="food", extra_body={"prompt_name": "query"}).data
    assert np.abs(data[0].embedding - vector(models, "query about food")).max() < 1e-5


def test_a_long_text_is_refused_or_truncated(models, embedder):
    long = " ".join(["cat"] * 100)
    status, _, answer = embedder.post("/v1/embeddings", {"input": long})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert "has 102 tokens, the model takes at most 66" in answer["error"]["message"]
    data = embedder.client.embeddings.create(
        model="tiny", input=long, extra_body={"truncate_prompt_tokens": 10}).data
    assert np.abs(data[0].embedding - vector(models, " ".join(["cat"] * 8))).max() < 1e-5


@pytest.mark.parametrize(("path", "body", "message"), [
    ("/v1/embeddings", {"input": []}, "the list of texts is empty"),
    ("/v1/embeddings", {"input": ""}, "text 0 is empty"),
    ("/v1/embeddings", {"input": ["a", ""]}, "text 1 is empty"),
    ("/v1/embeddings", {"input": [[]]}, "text 0 is empty"),
    ("/v1/embeddings", {"input": [[1, 999]]}, "token id 999 is not in the vocabulary of 101"),
    ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions 65 is not from 1 to 64"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, "the model has query"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 99}, "is not from 1 to 66"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "2049 texts, expected at most 2048"),
    ("/classify", {"input": "a"}, "compiled for task embed, which has no classify; use embed"),
    ("/v1/completions", {"prompt": "a"}, "compiled for task embed and generates no text"),
    ("/rerank", {"query": "a", "documents": []}, "the list of documents is empty"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query is empty"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "there are 2 of text_1 and 1 of text_2"),
])
def test_bad_input_is_refused_with_a_reason(embedder, path, body, message):
    status, _, answer = embedder.post(path, body)
    assert status == 400 and message in answer["error"]["message"], answer


def test_a_generating_model_refuses_embeddings(server):
    status, _, answer = server.post("/v1/embeddings", {"input": "a"})
    assert status == 400
    assert "generates text and has no embeddings" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_a_cross_encoder(models, reranker, path):
    query = "a query about animals"
    scores = [float(torch.sigmoid(logits(models, "rank", query, text))) for text in TEXTS]
    status, _, answer = reranker.post(path, {
        "query": query, "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], "top_n": 2})
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert status == 200 and [own["index"] for own in answer["results"]] == order
    for own in answer["results"]:
        assert abs(own["relevance_score"] - scores[own["index"]]) < 1e-5
        assert own["document"] == {"text": TEXTS[own["index"]]}
    assert answer["usage"]["total_tokens"] == sum(
        len(encoded(models, query, text)[0]) for text in TEXTS)


def test_scores_of_pairs_are_the_cross_encoder_s_or_cosines(models, reranker, embedder):
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[0], TEXTS[2])]
    bodies = [{"text_1": TEXTS[0], "text_2": TEXTS[1:]},
              {"queries": [TEXTS[0], TEXTS[0]], "documents": TEXTS[1:]}]
    for own, expected in (
            (reranker, [float(torch.sigmoid(logits(models, "rank", *pair))) for pair in pairs]),
            (embedder, [float(vector(models, a) @ vector(models, b)) for a, b in pairs])):
        for body in bodies:
            data = own.post("/score", body)[2]["data"]
            assert [each["index"] for each in data] == [0, 1]
            assert np.abs(np.array([each["score"] for each in data]) - expected).max() < 1e-5


def test_classes_have_the_probabilities_of_transformers(models, classifier):
    data = classifier.post("/classify", {"input": TEXTS})[2]["data"]
    for text, own in zip(TEXTS, data, strict=True):
        expected = torch.softmax(logits(models, "classes", text), -1)
        assert own["label"] == f"LABEL_{int(expected.argmax())}" and own["num_classes"] == 3
        assert np.abs(np.array(own["probs"]) - expected.numpy()).max() < 1e-5


def test_pooling_returns_rows_without_an_activation(models, classifier):
    data = classifier.post("/pooling", {"input": TEXTS[0]})[2]["data"]
    expected = logits(models, "classes", TEXTS[0]).numpy()
    assert np.abs(np.array(data[0]["data"]) - expected).max() < 1e-5 * np.abs(expected).max()
    status, _, answer = classifier.post("/score", {"text_1": "a", "text_2": "b"})
    assert status == 400 and "has 3 labels, and a score needs one" in answer["error"]["message"]


def test_metrics_count_the_texts_and_tokens(models, embedder):
    before = embedder.get("/metrics")
    embedder.client.embeddings.create(model="tiny", input=TEXTS[:2])
    after = embedder.get("/metrics")
    tokens = sum(len(encoded(models, text)[0]) for text in TEXTS[:2])
    for name, more in (('request_success_total{', 2), ('prompt_tokens_total{', tokens)):
        values = [sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                      if line.startswith(f"vllm:{name}")) for text in (before, after)]
        assert values[1] - values[0] == more


@pytest.fixture(scope="module")
def several(case_tp1, models):
    """A server of a model that generates text, and of an embedding model."""
    with serving(case_tp1, models[0] / "embed.case", "--served_model_name", "embed") as own:
        yield own


def test_requests_go_to_the_model_that_they_name(models, several):
    assert [own.id for own in several.client.models.list()] == ["tiny", "embed"]
    assert several.client.models.retrieve("embed").id == "embed"
    text = several.client.completions.create(model="tiny", prompt=[3, 4, 5], max_tokens=2)
    assert text.model == "tiny" and text.usage.completion_tokens == 2
    made = several.client.embeddings.create(model="embed", input=TEXTS)
    for text, own in zip(TEXTS, made.data, strict=True):
        assert np.abs(np.array(own.embedding) - vector(models, text)).max() <= 1e-5
    status, _, found = several.post("/tokenize", {"model": "embed", "prompt": TEXTS[0]})
    assert status == 200 and found["tokens"] == encoded(models, TEXTS[0])[0]
    assert several.get("/health") == ""
    metrics = several.get("/metrics")
    for name in ("tiny", "embed"):
        assert f'vllm:num_requests_running{{engine="0",model_name="{name}"}} 0.0' in metrics
    assert metrics.count("# TYPE vllm:num_requests_running ") == 1
    assert 'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 3.0' in metrics
    assert set(json.loads(several.startup)["models"]) == {"tiny", "embed"}


def test_each_of_several_models_is_replaced_alone(models, case_tp1, tmp_path):
    for name in ("tiny", "embed"):
        shutil.copytree(case_tp1 if name == "tiny" else models[0] / "embed.case", tmp_path / name)
    llmc.compile(models[0] / "embed", tmp_path / "next", pooling="cls")
    with serving(tmp_path / "tiny", tmp_path / "embed", "--watch",
                 "--served_model_name", "embed") as own:

        def embedding():
            return own.client.embeddings.create(model="embed", input=TEXTS[0]).data[0].embedding

        def reloads(text):
            return sum(text in line for line in own.log)

        first = embedding()
        stream = own.client.completions.create(model="tiny", prompt=[5], max_tokens=50, n=4,
                                               stream=True, extra_body={"ignore_eos": True})
        events = iter(stream)
        next(events)
        (tmp_path / "embed").rename(tmp_path / "before")
        (tmp_path / "next").rename(tmp_path / "embed")
        until(lambda: reloads("serving the new case directory"))
        until(lambda: not np.allclose(embedding(), first))
        row = pooling.reference(models[1]["embed"], encoded(models, TEXTS[0])[0], "cls")
        assert np.abs(embedding() - row / np.linalg.norm(row)).max() < 1e-5
        assert [chunk.choices[0].finish_reason for chunk in events].count("length") == 4
        (tmp_path / "embed" / "model_info.json").write_text("{")
        until(lambda: reloads("cannot be loaded"))
        assert len(embedding()) == 64
        shutil.copytree(case_tp1, tmp_path / "again")
        (tmp_path / "tiny").rename(tmp_path / "old")
        (tmp_path / "again").rename(tmp_path / "tiny")
        until(lambda: reloads("serving the new case directory") == 2)
        assert own.client.completions.create(model="tiny", prompt=[5], max_tokens=2).choices
        assert [model.id for model in own.client.models.list()] == ["tiny", "embed"]


@pytest.mark.parametrize(("path", "body", "status", "message"), [
    ("/v1/embeddings", {"model": "other", "input": "a"}, 404,
     "unknown model 'other'; this server has 'tiny', 'embed'"),
    ("/v1/embeddings", {"input": "a"}, 400,
     "the request names no model; this server has 'tiny', 'embed'"),
    ("/v1/embeddings", {"model": "tiny", "input": "a"}, 400, "generates text"),
    ("/v1/completions", {"model": "embed", "prompt": "a"}, 400, "compiled for task embed"),
    ("/v1/chat/completions",
     {"model": "embed", "messages": [{"role": "user", "content": "a"}]}, 400,
     "compiled for task embed"),
    ("/v1/responses", {"model": "embed", "input": "a"}, 400, "compiled for task embed"),
])
def test_errors_say_which_model_serves_a_request(path, body, status, message, several):
    got, _, answer = several.post(path, body)
    assert got == status and message in answer["error"]["message"]


@pytest.mark.parametrize(("options", "message"), [
    ((), "two models have the name"),
    (("--served_model_name", "a"), "1 served_model_name are given for 2 case directories"),
    (("--served_model_name", "a", "--served_model_name", "a"), "two models have the name 'a'"),
])
def test_names_of_several_models_are_checked_before_loading(options, message, case_tp1):
    result = CliRunner().invoke(main, ["serve", str(case_tp1), str(case_tp1), "--port", "0",
                                       *options])
    assert result.exit_code == 2 and message in result.stderr


def test_langchain_s_embeddings_are_the_model_s(models, embedder):
    langchain = pytest.importorskip("langchain_openai", reason="needs the extra test-serve")
    client = langchain.OpenAIEmbeddings(model="tiny", base_url=f"{embedder.url}/v1",
                                        api_key="none", check_embedding_ctx_length=False)
    for text, own in zip(TEXTS, client.embed_documents(TEXTS), strict=True):
        assert np.abs(np.array(own) - vector(models, text)).max() <= 1e-5
    assert np.abs(np.array(client.embed_query(TEXTS[1])) - vector(models, TEXTS[1])).max() <= 1e-5


def test_litellm_embeds_and_reranks(models, embedder, reranker, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download
    litellm = pytest.importorskip("litellm", reason="needs the extra test-serve")
    made = litellm.embedding(model="openai/tiny", input=TEXTS, api_base=f"{embedder.url}/v1",
                             api_key="none")
    for text, own in zip(TEXTS, made.data, strict=True):
        assert np.abs(np.array(own["embedding"]) - vector(models, text)).max() <= 1e-5
    ranked = litellm.rerank(model="hosted_vllm/tiny", query="cat", documents=TEXTS, top_n=2,
                            api_base=reranker.url, api_key="none")
    _, _, truth = reranker.post("/rerank", {"query": "cat", "documents": TEXTS, "top_n": 2})
    assert [(own["index"], own["relevance_score"]) for own in ranked.results] == \
        [(own["index"], own["relevance_score"]) for own in truth["results"]]
