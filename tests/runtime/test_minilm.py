"""all-MiniLM-L6-v2 by `LLM.embed`: vectors and rankings of transformers."""

import re
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import llmc
from llmc.compiler.check.retrieval import retrieval

DOCS = Path(__file__).parents[2] / "docs"
QUERIES = ("How are requests batched?", "weights in four bits", "the server refuses a request")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    directory = tmp_path_factory.mktemp("minilm") / "case"
    llmc.compile(families.minilm(), directory)
    return directory


@pytest.fixture(scope="module")
def llm(case):
    with llmc.LLM(case) as own:
        yield own


@pytest.fixture(scope="module")
def sentences():
    """1,000 different sentences of llmc's documentation, of at most 12 words."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md")))
    found = (" ".join(part.split()[:12]) for part in re.split(r"[.|\n]", text))
    made = list(dict.fromkeys(part for part in found if part.count(" ") > 2))[:1000]
    assert len(made) == 1000
    return made


@pytest.fixture(scope="module")
def embed():
    """transformers' vectors: the mean of the hidden states, normalized."""
    directory = families.minilm()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()

    def run(texts):
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = np.empty((len(texts), 384), np.float32)
        for start in range(0, len(order), 50):
            chosen = order[start:start + 50]
            inputs = tokenizer([texts[index] for index in chosen], padding=True,
                               truncation=True, max_length=256, return_tensors="pt")
            with torch.inference_mode():
                states = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"][..., None]
            means = (states * mask).sum(1) / mask.sum(1)
            vectors[chosen] = torch.nn.functional.normalize(means, dim=1).numpy()
        return vectors
    return run


@pytest.mark.thorough
def test_1000_sentences_are_ranked_as_by_transformers(llm, sentences, embed):
    texts = [*QUERIES, *sentences]
    own, reference = llm.embed(texts), embed(texts)
    assert np.abs(own - reference).max() <= 1e-5
    count = len(QUERIES)
    for scores, truth in zip(own[:count] @ own[count:].T, reference[:count] @ reference[count:].T,
                             strict=True):
        ranked = truth[np.argsort(-scores)]
        assert np.diff(ranked).max() <= 1e-6  # equal within rounding
        assert np.argmax(scores) == np.argmax(truth)


def test_texts_have_transformers_vectors_alone_and_in_company(llm, sentences, embed):
    texts = [" ".join(sentences[:count]) for count in (1, 3, 8, 12)]
    reference = embed(texts)
    assert np.abs(llm.embed(texts, truncate_prompt_tokens=-1) - reference).max() <= 1e-5
    for text, row in zip(texts, reference, strict=True):
        assert np.abs(llm.embed(text, truncate_prompt_tokens=-1)[0] - row).max() <= 1e-5


def test_the_shipped_search_is_ranked_as_by_sentence_transformers(case):
    # By InformationRetrievalEvaluator of sentence-transformers 5.7.0.
    assert [round(score.llmc, 6) for score in retrieval(case).scores] == [0.940515, 1.0]
