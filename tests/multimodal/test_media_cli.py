"""Pictures on the command line: `llmc run --image`, prompt files and `llmc bench --images`."""

import json
import shutil

import pytest
from click.testing import CliRunner
from media_case import BAD_PICTURES, ROWS, UNUSUAL_PICTURES, data_url, picture
from safetensors.numpy import load_file, save_file

from llmc import LLM, SamplingParams
from llmc.cli import main
from llmc.runtime.chat import Chat


@pytest.fixture
def case(tiny_media):
    return tiny_media


@pytest.fixture(scope="module")
def red(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "red.png"
    path.write_bytes(picture("red"))
    return path


def run(*arguments, stdin=""):
    return CliRunner().invoke(main, [str(own) for own in arguments], input=stdin)


def test_run_reads_pictures(case, red):
    result = run("run", case, "--json", "--max_tokens", 2, "--prompt", "a <image><image>",
                 "--image", red, "--image", red)
    assert result.exit_code == 0
    plain, chat = (run("run", case, "--json", "--max_tokens", 2, "--chat", "--prompt", "what?",
                       *images) for images in ((), ("--image", red)))
    counts = [len(json.loads(own.stdout)["completions"][0]["prompt_token_ids"])
              for own in (result, plain, chat)]
    assert counts[0] == 2 + 2 * ROWS and counts[2] == counts[1] + ROWS
    for arguments, reason in (
            (("--prompt", "no placeholder", "--image", red), "0 placeholders '<image>' for 1"),
            (("--prompt", "<image>", "--image", "none.png"), "'none.png' cannot be read"),
            (("--prompt_file", "a", "--image", red), "both --image and --prompt_file are given")):
        result = run("run", case, *arguments)
        assert result.exit_code == 2 and reason in result.stderr


def test_run_says_which_models_take_audio(case):
    result = run("run", case, "--audio", "sound.wav")
    assert result.exit_code == 2 and result.stderr == (
        "error: 'LlavaForConditionalGeneration' takes text and images in prompts, and does not "
        "transcribe speech; give an encoder-decoder model of audio, such as Whisper, or one that "
        "takes audio in prompts, such as Qwen2-Audio\n")


def test_run_refuses_bad_pictures_by_one_sentence(case, red, tmp_path):
    given = [("https://example.com/a.png", "is not read, as only data: URLs are"),
             ("data", "'data' cannot be read (No such file or directory)")]
    for index, (data, reason) in enumerate(BAD_PICTURES.values()):
        (tmp_path / f"{index}.png").write_bytes(data)
        given.append((tmp_path / f"{index}.png", f"image 1: {reason}"))
    for path, reason in given:
        result = run("run", case, "--prompt", "<image><image>", "--image", red, "--image", path)
        assert result.exit_code == 2 and "Traceback" not in result.stderr
        assert reason in result.stderr.splitlines()[-1], result.stderr


def test_run_takes_unusual_pictures(case, tmp_path):
    for index, data in enumerate(UNUSUAL_PICTURES.values()):
        (tmp_path / f"{index}.png").write_bytes(data)
    count = len(UNUSUAL_PICTURES)
    result = run("run", case, "--max_tokens", 2, "--prompt", "<image>" * count, *(
        own for index in range(count) for own in ("--image", tmp_path / f"{index}.png")))
    assert result.exit_code == 0, result.stderr


def test_prompt_files_have_pictures(case, red, tmp_path):
    lines = [{"prompt": "a <image>", "images": [str(red)]},
             {"messages": [{"role": "user", "content": [
                 {"type": "image", "path": str(red)}, {"type": "text", "text": "what?"}]}]},
             {"token_ids": [5, 6], "images": [str(red)]}, {"prompt": "a", "images": "red.png"},
             {"messages": [{"role": "user", "content": "a"}], "images": [str(red)]},
             {"prompt": "<image>", "images": [data_url(BAD_PICTURES["truncated"][0])]},
             {"prompt": "<image>", "images": ["https://example.com/a.png"]}]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    result = run("run", case, "--prompt_file", tmp_path / "in", "--max_tokens", 2)
    answers = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert result.exit_code == 1 and ["error" in own for own in answers] == [False] * 2 + [True] * 5
    for number, (answer, reason) in enumerate(zip(answers[2:], (
            "0 placeholders '<image>' for 1 images", "is not a list of paths",
            "images is given with messages", "image 0: the image cannot be decoded",
            "'https://example.com/a.png' is not read, as only data: URLs are"), strict=True), 3):
        assert answer["error"].startswith(f"line {number}: ") and reason in answer["error"]


def test_a_conversation_keeps_its_pictures(case, red):
    with LLM(case) as llm:
        chat = Chat(llm, SamplingParams(max_tokens=2))
        list(chat.say("what?", [red]))
        list(chat.say("and?"))
        assert chat.messages[0]["content"][0] == {"type": "image", "image": red}
        assert len(chat.messages) == 4


def test_bench_gives_each_prompt_new_images(case, red):
    result = run("bench", case, "--images", "2x40x30", "--batch_size", 2, "--input_output_len",
                 "8,2", "--runs", 1, "--json")
    row, = json.loads(result.stdout)
    assert row["preprocess_ms"] > 0 and row["tokens_per_sec"] > 0
    shown = run("bench", case, "--images", "1x40x30", "--batch_size", 1, "--input_output_len",
                "8,2", "--runs", 1).stdout
    assert "preprocess: " in shown and "…" not in shown
    result = run("bench", case, "--images", "1x40x30", "--requests", "random:2", "--json")
    assert json.loads(result.stdout)["requests"] == 2
    for arguments, reason in (
            (("--images", "40x30"), "expected count x width x height"),
            (("--images", "200x40x30"), "800 of images + 64 + 64 tokens exceed the KV cache"),
            (("--images", "200x40x30", "--requests", "random:2"), "800 tokens of images and")):
        result = run("bench", case, *arguments)
        assert result.exit_code == 2 and reason in result.stderr, result.stderr


def test_bench_of_a_model_without_images_says_so(case_tp1):
    result = run("bench", case_tp1, "--images", "1x40x30")
    assert result.exit_code == 2 and "takes no images" in result.stderr


def test_diff_compares_a_prompt_with_images(case, red, tmp_path):
    result = run("diff", case, "--reference", case.parent / "hf", "--image", red, "--image", red,
                 "--prompt", "one <image> and <image>", "--tokens", 2, "--json", "--html",
                 tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    layers = {own["name"]: own for own in json.loads(result.stdout)["layers"]}
    names = [name for name in layers if name.endswith("(images)")]
    assert names[:2] == ["rows of image 0 (images)", "rows of image 1 (images)"]
    assert names[-1] == "logits (images)" and len(names) == 2 + 3 + 1
    assert all(layers[name]["relative"] < 1e-5 for name in names)


def test_diff_finds_another_encoder(case, red, tmp_path):
    """A reference whose projector differs: rows of the image and all after them."""
    shutil.copytree(case.parent / "hf", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    name = next(own for own in weights if "linear_2.weight" in own)
    save_file({**weights, name: weights[name] * 1.01}, tmp_path / "hf" / "model.safetensors",
              {"format": "pt"})
    result = run("diff", case, "--reference", tmp_path / "hf", "--image", red, "--tokens", 0)
    assert result.exit_code == 1 and "rows of image 0 (images)" in result.output
    result = run("diff", case, "--reference", tmp_path / "hf", "--tokens", 0)
    assert result.exit_code == 0, result.output
