"""`llmc eval`: scores equal transformers' and ROUGE's definition."""

import json
import math
import shutil
import sys

import families
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import VOCAB, write_tokenizer
from rouge_score.rouge_scorer import RougeScorer

import llmc
from llmc.cli import main
from llmc.compiler.check import evaluate
from llmc.compiler.check.evaluate import ARTICLES, perplexity, read_articles, summarize
from llmc.compiler.check.reference import load_reference

TEXT = "the quick brown fox jumps over the lazy dog " * 12


def run(*arguments):
    return CliRunner().invoke(main, ["eval", *(str(a) for a in arguments)])


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """A Hugging Face directory with 256 positions, and its case directory."""
    root = tmp_path_factory.mktemp("roomy")
    hf = families.save(families.tiny_model("llama", vocab_size=VOCAB, max_position_embeddings=256),
                       root / "hf")
    write_tokenizer(hf)
    llmc.compile(hf, root / "case", tp_size=2)
    return hf, root / "case"


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def articles_file(tmp_path):
    path = tmp_path / "articles.jsonl"
    path.write_text("".join(json.dumps({"article": article, "summary": summary}) + "\n"
                            for article, summary in [("the quick brown fox", "the lazy dog"),
                                                     ("jumps over the dog", "the fox jumps")]))
    return path


def strided_perplexity(model, ids, max_length, stride):
    """Return transformers' perplexity over strided windows; labels of -100 are not scored."""
    total = count = previous = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + max_length, len(ids))
        labels = torch.tensor([ids[begin:end]])
        labels[:, :max(0, previous - begin)] = -100
        scored = int((labels[:, 1:] != -100).sum())
        if scored:
            with torch.no_grad():
                total += float(model(input_ids=torch.tensor([ids[begin:end]]),
                                     labels=labels).loss) * scored
            count += scored
        previous = end
        if end == len(ids):
            break
    return math.exp(total / count), count


@pytest.mark.parametrize(("max_length", "stride"), [
    (64, 32), (32, 8), (17, 17), (20, 1), (2, 1), (2, 2), (64, 64)])
def test_perplexity_is_transformers_loss_over_the_same_windows(case_tp1, tiny_model, text_file,
                                                               max_length, stride):
    with llmc.LLM(case_tp1) as llm:
        ids = llm.tokenizer.encode(TEXT).ids
    expected, count = strided_perplexity(tiny_model, ids, max_length, stride)
    report = perplexity(case_tp1, data=text_file, max_length=max_length, stride=stride)
    assert report.scores[0].llmc == pytest.approx(expected, rel=1e-5)
    assert report.count == count
    assert stride == max_length or count == len(ids) - 1


@pytest.mark.parametrize("family", [
    "gemma2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gpt2", "mistral"))])
def test_perplexity_of_other_families(family, text_file, tmp_path):
    model = families.tiny_model(family, vocab_size=VOCAB)
    hf = families.save(model, tmp_path / "hf")
    write_tokenizer(hf)
    llmc.compile(hf, tmp_path / "case")
    report = perplexity(tmp_path / "case", data=text_file, hf_dir=hf, stride=16)
    score, = report.scores
    with llmc.LLM(tmp_path / "case") as llm:
        ids = llm.tokenizer.encode(TEXT).ids
    assert score.llmc == pytest.approx(strided_perplexity(model, ids, 64, 16)[0], rel=1e-5)
    assert report.verdict is None and abs(score.difference) < 1e-5


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 15, 16, 17, 40])
def test_windows_score_every_token_but_the_first_once_with_enough_before_it(count):
    for max_length, stride in [(8, 4), (8, 3), (8, 7), (8, 1), (2, 1)]:
        seen = []
        for begin, first, end in evaluate._windows(count, max_length, stride):
            assert begin < first < end <= begin + max_length
            assert all(token - begin >= min(token, max_length - stride)
                       for token in range(first, end))
            seen += range(first, end)
        assert seen == list(range(1, count))


def test_a_damaged_case_directory_is_refused(broken_case, tiny_hf, text_file):
    families.plant(broken_case, 1, "model.layers.2.mlp.gate_up_proj.weight", 3.0)
    result = run("--case_dir", broken_case, "--task", "perplexity", "--data", text_file,
                 "--hf_dir", tiny_hf)
    assert result.exit_code == 2 and "has changed since compilation" in result.stderr


def test_a_difference_over_tolerance_exits_with_1(case_tp2, tiny_hf, text_file):
    arguments = ["--case_dir", case_tp2, "--task", "perplexity", "--data", text_file, "--hf_dir",
                 tiny_hf]
    assert run(*arguments).exit_code == 0
    result = run(*arguments, "--tolerance", 0)
    assert result.exit_code == 1
    assert "error: perplexity is" in result.stderr and "over tolerance 0" in result.stderr


def test_rouge_is_computed_by_its_definition(articles_file, tmp_path):
    scorer = RougeScorer(evaluate._ROUGE, use_stemmer=True)
    # 5 words of 6 shared, in order but for one; the sentences in the other order
    scores = {score.name: score.llmc for score in evaluate._rouge(
        scorer, ["The fox jumps. Dogs sleep now."], ["Dogs sleep. The foxes jumped!"], None)}
    assert scores["rouge1"] == pytest.approx(100 * 2 * (5 / 5) * (5 / 6) / (5 / 5 + 5 / 6))
    assert scores["rouge2"] == pytest.approx(100 * 2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5))
    assert scores["rougeL"] == pytest.approx(100 * 2 * (3 / 5) * (3 / 6) / (3 / 5 + 3 / 6))
    assert scores["rougeLsum"] == scores["rouge1"]


def test_summaries_equal_those_of_transformers(roomy, articles_file):
    hf, case = roomy
    report = summarize(case, data=articles_file, hf_dir=hf, max_tokens=12)
    assert [score.name for score in report.scores] == ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    assert all(score.difference == 0 for score in report.scores) and report.verdict is None
    assert [s.llmc for s in report.summaries] == [s.transformers for s in report.summaries]
    with llmc.LLM(case) as llm:
        prompt = llm.tokenizer.encode("<user>Summarize this article in two sentences.\n\n"
                                      "the quick brown fox<assistant>").ids
        ids = torch.tensor([prompt])
        out = load_reference(hf).generate(input_ids=ids, attention_mask=torch.ones_like(ids),
                                  do_sample=False, max_new_tokens=12, eos_token_id=2)
        assert report.summaries[0].llmc == \
            llm.tokenizer.decode(out[0, len(prompt):].tolist()).strip()


def test_penalties_of_generation_config_do_not_change_the_reference(roomy, articles_file, tmp_path):
    hf = shutil.copytree(roomy[0], tmp_path / "hf")
    (hf / "generation_config.json").write_text('{"repetition_penalty": 9.0, "max_length": 5}')
    report = summarize(roomy[1], data=articles_file, hf_dir=hf, max_tokens=12)
    assert all(score.difference == 0 for score in report.scores)


def test_the_bundled_articles_are_valid():
    articles = read_articles(ARTICLES)
    assert len(articles) == 12
    assert all(120 <= len(article.split()) <= 200 and 20 <= len(summary.split()) <= 60
               for article, summary in articles)


@pytest.mark.parametrize(("content", "message"), [
    (b"", "has no articles"),
    (b"\n \n", "has no articles"),
    (b'{"article": "a", "summary": "b"}\n\n{"article": \n', "line 3, is not JSON"),
    (b'{"article": "a", "summary": "\xff"}\n', "line 1, is not JSON"),
    (b'["article", "summary"]\n', "line 1, has no string 'article'"),
    (b'{"article": "a", "summary": "b"}\n{"article": "a"}\n', "line 2, has no string 'summary'"),
    (b'{"article": 3, "summary": "b"}\n', "line 1, has no string 'article'"),
])
def test_an_invalid_articles_file_is_refused_with_the_line(case_tp1, tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    for task in ("summarize", "perplexity"):
        result = run("--case_dir", case_tp1, "--task", task, "--data", path)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: '{path}'") and message in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(("content", "message"), [
    (b"", "is empty; give a text"), (b" \n", "is empty"), (b"\xff\xfe", "is not UTF-8"),
    (b"t", "expected at least 2"), (None, "cannot be read (No such file or directory)")])
def test_an_invalid_text_file_is_refused(case_tp1, tmp_path, content, message):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    result = run("--case_dir", case_tp1, "--task", "perplexity", "--data", path)
    assert result.exit_code == 2 and message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(("arguments", "message"), [
    (["--task", "perplexity", "--max_length", "65"], "max_length 65 is not in the range from 2 to"),
    (["--task", "perplexity", "--max_length", "1"], "max_length 1 is not in the range"),
    (["--task", "perplexity", "--stride", "0"], "stride 0 is not in the range from 1"),
    (["--task", "perplexity", "--max_length", "8", "--stride", "9"], "stride 9 is not in"),
    (["--task", "perplexity", "--max_tokens", "9"], "--max_tokens does not apply to --task"),
    (["--task", "summarize", "--stride", "9"], "--stride does not apply to --task summarize"),
    (["--task", "summarize", "--max_tokens", "0"], "max_tokens 0"),
    (["--task", "perplexity", "--tolerance", "1"], "is given without hf_dir"),
    (["--task", "perplexity", "--hf_dir", "/nonexistent"], "'/nonexistent' does not exist"),
    (["--task", "summarize"], "exceed max_seq_len 64; shorten it"),
    (["--task", "translate"], "'translate' is not one of"),
])
def test_bad_usage_exits_with_2(case_tp1, arguments, message):
    result = run("--case_dir", case_tp1, *arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert "Traceback" not in result.output


def test_another_model_as_reference_is_refused(case_tp1, text_file, tmp_path):
    hf = families.save(families.tiny_model("llama"), tmp_path / "hf")
    result = run("--case_dir", case_tp1, "--task", "perplexity", "--data", text_file, "--hf_dir",
                 hf)
    assert result.exit_code == 2 and "has vocabulary size 101" in result.stderr


def test_json_and_the_table(case_tp1, tiny_hf, articles_file):
    arguments = ["--case_dir", case_tp1, "--task", "perplexity", "--data", articles_file]
    report = json.loads(run(*arguments, "--json").stdout)
    assert report["scores"][0]["transformers"] is None and report["passed"] is True
    shown = run(*arguments, "--hf_dir", tiny_hf).stdout
    assert "transformers" in shown and "within tolerance 0.0001" in shown
    assert f"{report['scores'][0]['llmc']:.4f}" in shown


def test_a_nan_perplexity_fails_without_a_reference(case_tp1, text_file, monkeypatch):
    monkeypatch.setattr(llmc.LLM, "logits",
                        lambda self, ids: np.full((len(ids), 300), np.nan, np.float32))
    result = run("--case_dir", case_tp1, "--task", "perplexity", "--data", text_file)
    assert result.exit_code == 1 and "perplexity is nan" in result.stderr


def test_a_missing_rouge_package_is_named(case_tp1, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    result = run("--case_dir", case_tp1, "--task", "summarize")
    assert result.exit_code == 2 and "pip install '.[eval]'" in result.stderr
