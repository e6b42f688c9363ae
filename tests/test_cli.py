"""The command line: output, exit codes, and one line for a user's error."""

import dataclasses
import json
import shutil
from importlib.util import find_spec

import pytest
from click.testing import CliRunner

from llmc import LLM, SamplingParams, __version__
from llmc.cli import main


def run(*arguments, stdin=""):
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)


def test_version_says_which_engines_there_are():
    engines = "cpu, cuda" if find_spec("llmc._cuda") else "cpu"
    assert run("--version").stdout == f"llmc {__version__} (engines: {engines})\n"


def test_run_prints_the_inference_info_and_then_the_text(case_tp2):
    result = run("run", "--case_dir", case_tp2, "--prompt", "the quick", "--max_tokens", 5)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:8] == [
        "Inference info:", "| - hf_dir: Not specified", f"| - case_dir: {case_tp2}",
        "| - max_tokens: 5", "| - tp_size: 2", "| - ENV:LLMC_VISIBLE_DEVICES: Not specified",
        "| - device: all cores", "| - log_file: "]
    assert "tokens/s" in result.stderr


def test_dashes_and_underscores_are_alike(case_tp2):
    one = run("run", "--case-dir", case_tp2, "--prompt", "the", "--max-tokens", 4, "--json")
    two = run("run", "--case_dir", case_tp2, "--prompt", "the", "--max_tokens", 4, "--json")
    assert one.exit_code == 0
    assert json.loads(one.stdout)["completions"] == json.loads(two.stdout)["completions"]


def test_json_is_all_that_is_on_stdout(case_tp2):
    result = run("run", "--case_dir", case_tp2, "--prompt", "the", "--prompt", "quick fox",
                 "--max_tokens", 4, "--json")
    completions = json.loads(result.stdout)["completions"]
    assert [len(c["token_ids"]) <= 4 for c in completions] == [True, True]
    assert "Inference info" in result.stderr


def test_prompts_come_from_standard_input_where_none_is_given(case_tp2):
    one = run("run", "--case_dir", case_tp2, "--max_tokens", 4, "--json",
              stdin="the\n\nquick fox\n")
    two = run("run", "--case_dir", case_tp2, "--prompt", "the", "--prompt", "quick fox",
              "--max_tokens", 4, "--json")
    assert json.loads(one.stdout) == json.loads(two.stdout)
    nothing = run("run", "--case_dir", case_tp2)
    assert nothing.exit_code == 2 and "there is no prompt" in nothing.stderr


def test_sampling_options_are_the_fields_of_sampling_params(case_tp2):
    settings = dict(max_tokens=6, min_tokens=2, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01,
                    typical_p=0.95, repetition_penalty=1.1, presence_penalty=0.1,
                    frequency_penalty=0.2, seed=4, n=2, logprobs=1)
    options = [part for name, value in settings.items() for part in (f"--{name}", value)]
    result = run("run", "--case_dir", case_tp2, "--prompt", "the", "--prompt", "fox", *options,
                 "--bad_words", "quick", "--logit_bias", "7=-inf", "--logit_bias", "9=1.5",
                 "--stop", "xyz", "--ignore_eos", "--json")
    assert result.exit_code == 0, result.output
    with LLM(case_tp2) as llm:
        expected = llm.generate(["the", "fox"], SamplingParams(
            **settings, bad_words=["quick"], logit_bias={7: float("-inf"), 9: 1.5}, stop=["xyz"],
            ignore_eos=True))
    completions = json.loads(result.stdout)["completions"]
    assert [c["prompt"] for c in completions] == ["the", "the", "fox", "fox"]
    assert [c["token_ids"] for c in completions] == [list(e.token_ids) for e in expected]
    assert [c["cumulative_logprob"] for c in completions] == \
        [e.cumulative_logprob for e in expected]
    assert {f.name for f in dataclasses.fields(SamplingParams)} == \
        {*settings, "bad_words", "logit_bias", "stop", "ignore_eos"}
    assert "\nSampling:\n" in run("run", "--help").stdout


def test_several_completions_of_a_prompt_are_numbered(case_tp2):
    result = run("run", "--case_dir", case_tp2, "--prompt", "the", "--n", 2, "--temperature", 1,
                 "--max_tokens", 3)
    assert "[0.0] the\n" in result.stdout and "[0.1] the\n" in result.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (["--top_p", "0"], "top_p 0.0 is not above 0"),
    (["--temperature", "-1"], "temperature -1.0 is negative"),
    (["--n", "3"], "n 3 completions would be the same"),
    (["--logit_bias", "5"], "--logit_bias '5' is not a token id and a number such as 42=-1.5"),
    (["--logit_bias", "999=1"], "token id 999 is not in the vocabulary"),
    (["--logprobs", "2"], "--logprobs are printed with --json only"),
    (["--stop", "x"] * 65, "there are 65 stop strings"),
    (["--prompt", ""], "the prompt is empty"),
])
def test_bad_sampling_options_are_one_line_and_exit_code_2(case_tp2, arguments, message):
    result = run("run", "--case_dir", case_tp2, "--prompt", "the", "--max_tokens", 2, *arguments)
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last


def test_chat_uses_the_template(case_tp2):
    result = run("run", "--case_dir", case_tp2, "--prompt", "the", "--chat", "--max_tokens", 2,
                 "--json")
    plain = run("run", "--case_dir", case_tp2, "--prompt", "<user>the<assistant>", "--max_tokens",
                2, "--json")
    assert json.loads(result.stdout)["completions"][0]["token_ids"] == \
        json.loads(plain.stdout)["completions"][0]["token_ids"]


@pytest.fixture
def hf_with_case(tiny_hf, case_tp2, tmp_path):
    directory = shutil.copytree(tiny_hf, tmp_path / "hf")
    config = json.loads((directory / "config.json").read_text())
    config.update(param_dir=str(case_tp2), tensor_parallel={"use_tp": True, "parallel_size": 2})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_hf_dir_names_the_case_directory_and_devices_make_replicas(hf_with_case, tmp_path):
    log = tmp_path / "f.log"
    result = run("run", "--hf_dir", hf_with_case, "--device", "0,1,2,3", "--tp_size", 2,
                 "--log_file", log, "--prompt", "the", "--prompt", "fox", "--max_tokens", 3)
    assert result.exit_code == 0, result.output
    assert "| - device: [0, 1, 2, 3]" in result.stdout
    assert "tokens/s" in log.read_text() and "Inference info" in log.read_text()


@pytest.mark.parametrize(("arguments", "message"), [
    (["--tp_size", "4"], "--tp_size is 4, tensor_parallel"),
    (["--device", "0,0"], "device 0 is listed twice"),
    (["--device", "0,x"], "is not a list of numbers"),
    (["--log_file", "/nonexistent/dir/f.log"], "cannot be written"),
])
def test_bad_options_are_one_line_and_exit_code_2(hf_with_case, arguments, message):
    result = run("run", "--hf_dir", hf_with_case, "--prompt", "the", "--max_tokens", 1, *arguments)
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in result.output


def test_hf_dir_without_param_dir_says_what_to_add(tiny_hf):
    result = run("run", "--hf_dir", tiny_hf, "--prompt", "x")
    assert result.exit_code == 2 and "names no param_dir" in result.stderr


def test_compile_and_inspect(tiny_hf, tmp_path):
    result = run("compile", tiny_hf, "-o", tmp_path / "case", "--tp_size", 3, "--dtype", "float32",
                 "--target", "cpu", "--verbose")
    assert result.exit_code == 0, result.output
    assert "3 chip(s)" in result.stdout and "gated-mlp 4" in result.stdout
    shown = run("inspect", tmp_path / "case")
    assert "LlamaForCausalLM" in shown.stdout and "AllReduce 9" in shown.stdout
    summary = json.loads(run("inspect", tmp_path / "case", "--json").stdout)
    assert [chip["num_heads"] for chip in summary["chips"]] == [1, 1, 2]
    # 4 layers, keys and values, 1 KV head of 16, 64 positions, 4 bytes
    assert summary["chips"][0]["kv_cache_bytes"] == 4 * 2 * 1 * 16 * 64 * 4


def test_compile_errors_are_one_line(tmp_path):
    result = run("compile", tmp_path, "-o", tmp_path / "case")
    assert result.exit_code == 2
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")


def test_bench_prints_the_grid(case_tp1):
    result = run("bench", "--case_dir", case_tp1, "--batch_size", "1;2", "--input_output_len",
                 "4,3;6,2", "--runs", 1, "--json")
    rows = json.loads(result.stdout)
    assert [(r["batch"], r["input_length"], r["output_length"]) for r in rows] == \
        [(1, 4, 3), (2, 4, 3), (1, 6, 2), (2, 6, 2)]
    assert all(r["tokens_per_sec"] > 0 and r["tctx_ms"] > 0 for r in rows)
    assert "Tctx(ms)" in run("bench", "--case_dir", case_tp1, "--batch_size", "1",
                             "--input_output_len", "4,3", "--runs", 1).stdout


@pytest.mark.parametrize("grid", [("x", "4,4"), ("1", "4"), ("0", "4,4"), ("1", "60,60")])
def test_an_impossible_grid_is_refused(case_tp1, grid):
    result = run("bench", "--case_dir", case_tp1, "--batch_size", grid[0], "--input_output_len",
                 grid[1])
    assert result.exit_code == 2 and result.stderr.startswith("error: ")
