"""`llmc eval --task answers`: answers to prompts with images and audio score as transformers'."""

import base64
import json
import math

import audio_models
import image_models
import numpy as np
import pytest
import soundfile
import torch
from click.testing import CliRunner
from media_case import data_url, picture
from transformers import AutoModelForMultimodalLM

import llmc
from llmc.cli import main
from llmc.compiler.check import answers as answers_module
from llmc.compiler.check.answers import answers

RED, BLUE = picture("red"), picture("blue", (61, 47))


@pytest.fixture(scope="module")
def case(tiny_media):
    return tiny_media


@pytest.fixture(scope="module")
def said(case):
    """What the model says to a prompt with a red picture."""
    with llmc.LLM(case) as llm:
        return llm.generate({"prompt": "what is <image>", "images": [data_url(RED)]},
                            llmc.SamplingParams(max_tokens=6, temperature=0))[0].text


@pytest.fixture
def data(said, tmp_path):
    """Four lines and a blank one; the first matches."""
    (tmp_path / "blue.png").write_bytes(BLUE)
    lines = [{"prompt": "what is <image>", "images": [data_url(RED)], "id": 1,
              "answer": ["none", f" {said.upper()}!"]}, None,
             {"prompt": "<image> or <image>", "images": [data_url(RED), str(tmp_path / "blue.png")],
              "answer": "a blue one"},
             {"messages": [{"role": "user", "content": [
                 {"type": "image", "path": str(tmp_path / "blue.png")},
                 {"type": "text", "text": "what?"}]}], "answer": "blue"},
             {"token_ids": [5, 6, 7], "answer": "no picture"}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join("" if line is None else json.dumps(line) for line in lines))
    return path


def run(*arguments):
    return CliRunner().invoke(main, ["eval", *map(str, arguments)])


def test_answers_about_images_score_as_transformers(case, data, said):
    report = answers(case, data=data, hf_dir=case.parent / "hf", max_tokens=6)
    match, perplexity = report.scores
    assert report.verdict is None and report.count == 4 and not report.failures
    assert (match.name, match.llmc, match.difference) == ("exact_match", 25, 0)
    assert abs(perplexity.difference) < 1e-5
    assert [own.line for own in report.answers] == [1, 3, 4, 5]
    assert report.answers[0].llmc == said
    assert all(own.llmc == own.transformers for own in report.answers)


def test_perplexity_is_transformers_loss_of_the_answers(case, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "what is <image>", "images": [data_url(BLUE)],
                                "answer": "a blue one"}))
    score = answers(case, data=path).scores[1]
    with llmc.LLM(case) as llm:
        prompt = llm.media_prompt("what is <image>", images=[BLUE])
        answer = llm.tokenize("a blue one", add_special_tokens=False)
    ids = torch.tensor([[*prompt.token_ids, *answer]])
    labels = torch.where(torch.arange(ids.shape[1]) < len(prompt), -100, ids)
    model = AutoModelForMultimodalLM.from_pretrained(case.parent / "hf").eval()
    with torch.no_grad():
        loss = model(ids, labels=labels, pixel_values=torch.from_numpy(
            prompt.ranges[0].item.arrays["pixel_values"])).loss
    assert score.llmc == pytest.approx(math.exp(loss), rel=1e-5) and score.transformers is None


def test_answers_about_audio_score_as_transformers(tiny_audio, tmp_path):
    clip, other = audio_models.clips(2)
    soundfile.write(tmp_path / "a.wav", clip, 16_000, subtype="FLOAT")
    soundfile.write(tmp_path / "b.flac", other, 16_000)
    in_base64 = base64.b64encode((tmp_path / "a.wav").read_bytes()).decode()
    with llmc.LLM(tiny_audio[1]) as llm:
        own = llm.processor.placeholders["audio"]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, (
        {"prompt": f"hear {own}", "audio": [f"data:audio/wav;base64,{in_base64}"], "answer": "one"},
        {"prompt": "what is said?", "audio": [str(tmp_path / "a.wav"), str(tmp_path / "b.flac")],
         "answer": "two words"}))))
    result = run(tiny_audio[1], "--task", "answers", "--data", path, "--json")
    assert result.exit_code == 1 and "line 2: the prompt has 0 placeholders" in result.stderr
    result = run(tiny_audio[1], "--task", "answers", "--data", path, "--json", "--max_tokens", 5,
                 "--hf_dir", tiny_audio[1].parent / "hf", "--chat")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and report["count"] == 1  # 2 placeholders for 1 clip
    assert abs(report["scores"][1]["difference"]) < 1e-5
    assert report["answers"][0]["llmc"] == report["answers"][0]["transformers"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "paligemma"])
def test_answers_of_other_families(name, tmp_path):
    image_models.write_model(name, tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case")
    for index, image in enumerate(image_models.images(2)):
        image.save(tmp_path / f"{index}.png")
    with llmc.LLM(tmp_path / "case") as llm:
        own = llm.processor.placeholders["image"]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({
        "prompt": f"{own} what?", "images": [str(tmp_path / f"{index}.png")], "answer": "a cat",
        "stop": "cat"}) for index in range(2)))
    report = answers(tmp_path / "case", data=path, hf_dir=tmp_path / "hf", max_tokens=8)
    assert report.verdict is None
    assert len(report.scores) == 1 + (name != "paligemma")
    assert all(own.llmc == own.transformers for own in report.answers)


def test_lines_that_cannot_be_read_are_named_and_leave_the_others(case, data):
    content = data.read_text().splitlines()
    content[1] = json.dumps({"prompt": "<image>", "images": [data_url(b"none")], "answer": "a"})
    data.write_text("\n".join([*content, json.dumps(
        {"prompt": "<image>", "images": ["none.png"], "answer": "a"})]))
    result = run(case, "--task", "answers", "--data", data, "--max_tokens", 2)
    assert result.exit_code == 1 and "4 answers of data.jsonl" in result.stdout
    assert f"error: 2 line(s) of '{data}' cannot be read: line 2: image 0: 4 bytes are no " \
        in result.stderr
    assert "line 6: 'none.png' cannot be read" in result.stdout


def test_lines_that_transformers_cannot_run_are_left_out(case, data, monkeypatch):
    real = answers_module._run_reference

    def run_reference(model, llm, question, *others):
        if question.line.number == 3:
            raise llmc.LlmcError("the images have different sizes")
        return real(model, llm, question, *others)

    monkeypatch.setattr(answers_module, "_run_reference", run_reference)
    report = answers(case, data=data, hf_dir=case.parent / "hf", max_tokens=2)
    assert report.count == 3 and [own.line for own in report.answers] == [1, 4, 5]
    assert report.failures == ("line 3: the images have different sizes",)
    assert report.verdict.startswith("1 line(s) of")


@pytest.mark.parametrize(("content", "message"), [
    ("", "has no lines; write one"), ("\n{", "line 2, is not JSON"), ("[5]", "line 1, is [5]"),
    ('{"prompt": "a"}', "line 1, has no answer"),
    ('{"prompt": "a", "answer": 5}', "line 1, has 5 as answer, expected a text"),
    ('{"prompt": "a", "answer": [" "]}', "as answer, expected a text"),
    ('{"prompt": "a", "answer": "b", "stop": [1]}', "has [1] as stop"),
    ('{"answer": "a"}', "line 1, has none of prompt, token_ids, messages, expected one"),
    ('{"prompt": "a", "token_ids": [1], "answer": "b"}', "has prompt and token_ids of"),
    ('{"prompt": "a", "image": [], "answer": "b"}', "line 1, has the key 'image', supported"),
    ('{"token_ids": [99999], "answer": "b"}', "can be answered: line 1: token id 99999"),
    ('{"prompt": 5, "answer": "b"}', "line 1: prompt is not a text")])
def test_invalid_lines_are_refused_by_number(case, tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    result = run(case, "--task", "answers", "--data", path)
    assert result.exit_code == 2 and message in result.stderr
    assert "Traceback" not in result.output


def test_answers_need_data(case):
    result = run(case, "--task", "answers")
    assert result.exit_code == 2 and "task answers is given without data" in result.stderr
    result = run(case, "--task", "perplexity", "--chat")
    assert result.exit_code == 2 and "--chat does not apply to --task perplexity" in result.stderr


@pytest.mark.parametrize(("text", "answer", "equal"), [
    ("A cat.", "a cat", True), (" a  cat\n", "a cat", True), ("a cat or dog", "a cat", False),
    ("?", "?", True), ("?", "!", False), ("", "!", False), ("Straße", "STRASSE", True)])
def test_answers_match_but_for_case_punctuation_and_spaces(text, answer, equal):
    assert answers_module._matches(text, ["none", answer]) is equal


def test_perplexity_is_of_all_answers_together():
    results = {1: answers_module._Result("", (-1.0, -2.0)), 2: answers_module._Result("", (-6.0,))}
    assert answers_module._perplexity(results, {}).llmc == pytest.approx(np.exp(3))
