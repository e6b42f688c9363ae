"""The command line: output, exit codes, and one line for a user's error."""

import dataclasses
import fcntl
import inspect
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import llmc
from llmc import LLM, LlmcError, SamplingParams, __version__, targets
from llmc.cli import _engines, main
from llmc.cli.conversation import converse, print_answer
from llmc.cli.options import LOADING_OPTIONS
from llmc.cli.progress import Meter, Phases
from llmc.compiler.options import OPTIONS
from llmc.runtime.benchmark import Row, Speculation
from llmc.runtime.core.request import CompletionChunk
from llmc.runtime.sampling.params import FIELDS, STRUCTURED_OUTPUT_FIELDS

pytestmark = pytest.mark.usefixtures("decisive")


def run(*arguments, stdin=""):
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)


def test_version_lists_engines_and_how_to_install_others(monkeypatch, tmp_path):
    assert run("--version").stdout == f"llmc {__version__} (engines: {_engines()})\n"
    monkeypatch.setattr("llmc.cli.find_spec", lambda name: None)
    assert _engines() == "cpu; for NVIDIA GPUs, from a checkout: pip install -v ./csrc"
    installed = SimpleNamespace(origin=str(tmp_path / "llmc_cuda" / "__init__.py"))
    monkeypatch.setattr("llmc.cli.find_spec", {"llmc_cuda": installed}.get)
    assert _engines() == "cpu, cuda"
    (tmp_path / "llmc_cuda").mkdir()
    (tmp_path / "llmc_cuda" / "libllmc_plugins.so").touch()
    assert _engines() == "cpu, cuda, tensorrt"


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


def test_the_case_directory_is_an_argument_too(case_tp2):
    arguments = ["--prompt", "the", "--max_tokens", 4, "--json"]
    expected = run("run", "--case_dir", case_tp2, *arguments).stdout
    assert run("run", case_tp2, *arguments).stdout == expected
    assert run("run", case_tp2, "--case_dir", os.path.relpath(case_tp2), *arguments).stdout \
        == expected
    both = run("run", case_tp2, "--case_dir", case_tp2 / "chip0", *arguments)
    assert both.exit_code == 2 and "DIR is '" in json.loads(both.stderr)["error"]
    none = run("run", *arguments)
    assert none.exit_code == 2 and "expected either a case directory or --hf_dir" in none.stderr


def test_json_is_all_that_is_on_stdout(case_tp2):
    result = run("run", "--case_dir", case_tp2, "--prompt", "the", "--prompt", "quick fox",
                 "--max_tokens", 4, "--json")
    completions = json.loads(result.stdout)["completions"]
    assert [len(c["token_ids"]) <= 4 for c in completions] == [True, True]
    assert "Inference info" in result.stderr


def test_prompts_are_read_from_standard_input_by_default(case_tp2):
    one = run("run", "--case_dir", case_tp2, "--max_tokens", 4, "--json",
              stdin="the\n\nquick fox\n")
    two = run("run", "--case_dir", case_tp2, "--prompt", "the", "--prompt", "quick fox",
              "--max_tokens", 4, "--json")
    assert json.loads(one.stdout) == json.loads(two.stdout)
    nothing = run("run", "--case_dir", case_tp2)
    assert nothing.exit_code == 2 and "no prompt is given" in nothing.stderr


def test_sampling_options_are_the_fields_of_sampling_params(case_tp2):
    settings = dict(max_tokens=6, min_tokens=2, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01,
                    typical_p=0.95, repetition_penalty=1.1, presence_penalty=0.1,
                    frequency_penalty=0.2, seed=4, n=2, logprobs=1, prompt_logprobs=1, end_id=5,
                    beam_width=1, length_penalty=0.5, diversity_rate=0.1, early_stopping="never")
    options = [part for name, value in settings.items() for part in (f"--{name}", value)]
    result = run("run", "--case_dir", case_tp2, "--prompt", "the", "--prompt", "fox", *options,
                 "--bad_words", "quick", "--logit_bias", "7=-inf", "--logit_bias", "9=1.5",
                 "--stop", "xyz", "--stop_token_ids", "3", "--show_special_tokens", "--ignore_eos",
                 "--prediction", "fox", "--json")
    assert result.exit_code == 0, result.output
    with LLM(case_tp2) as llm:
        expected = llm.generate(["the", "fox"], SamplingParams(
            **settings, bad_words=["quick"], logit_bias={7: float("-inf"), 9: 1.5}, stop=["xyz"],
            stop_token_ids=[3], show_special_tokens=True, ignore_eos=True, prediction="fox"))
    completions = json.loads(result.stdout)["completions"]
    assert [c["prompt"] for c in completions] == ["the", "the", "fox", "fox"]
    assert [c["token_ids"] for c in completions] == [list(e.token_ids) for e in expected]
    assert [c["cumulative_logprob"] for c in completions] == \
        [e.cumulative_logprob for e in expected]
    assert {f.name for f in dataclasses.fields(SamplingParams)} == \
        {*settings, *STRUCTURED_OUTPUT_FIELDS, "bad_words", "logit_bias", "stop", "stop_token_ids",
         "show_special_tokens", "ignore_eos", "prediction"}
    help_text = run("run", "--help").stdout
    shown = " ".join(help_text.split("\nSampling:\n")[1].replace("-\n", "-").split())
    for field in FIELDS:  # printed once, shown there too
        assert f"--{field.name}" in shown and " ".join(field.text.split()) in shown


@pytest.mark.parametrize(("options", "message"), [
    (["--speculate", "medusa"], "speculate is 'medusa', expected one of off, ngram"),
    (["--speculate", "ngram", "--num_speculative_tokens", "0"],
     "num_speculative_tokens is 0, expected auto or a number"),
    (["--speculate", "ngram", "--num_speculative_tokens", "few"],
     "num_speculative_tokens is 'few', expected auto or")])
def test_options_of_speculation_are_checked(case_tp1, options, message):
    result = run("run", case_tp1, "--prompt", "the", *options)
    assert result.exit_code == 2 and message in result.stderr


def test_speculation_does_not_change_the_text(case_tp1):
    arguments = ["run", case_tp1, "--prompt", "the", "--max_tokens", 12, "--ignore_eos", "--json"]
    plain, drafted = run(*arguments), run(*arguments, "--speculate", "ngram",
                                          "--num_speculative_tokens", 3, "--prediction", "fox")
    assert drafted.exit_code == 0, drafted.output
    expected, found = (json.loads(result.stdout)["completions"][0] for result in (plain, drafted))
    assert found["token_ids"] == expected["token_ids"]


@pytest.fixture(scope="module")
def compiled(tiny_hf, tmp_path_factory):
    """A case directory for beam search on three chips, and the output of `llmc compile`."""
    case = tmp_path_factory.mktemp("compiled") / "case"
    return case, run("compile", tiny_hf, "-o", case, "--tp_size", 3, "--dtype", "float32",
                     "--target", "cpu", "--verbose")


def test_compile_and_inspect(compiled):
    case, result = compiled
    assert result.exit_code == 0, result.output
    assert "3 chip(s)" in result.stdout and "gated-mlp: 4" in result.stdout
    shown = run("inspect", case)
    assert "LlamaForCausalLM" in shown.stdout and "AllReduce: 9" in shown.stdout
    assert "SHA-256" not in shown.stdout
    verified = run("inspect", case, "--verify").stdout
    assert "files have the size and the SHA-256 of model_info.json" in verified
    summary = json.loads(run("inspect", case, "--json").stdout)
    assert [chip["num_heads"] for chip in summary["chips"]] == [1, 1, 2]
    # 4 layers, keys and values, 1 KV head of 16, 64 positions, 4 bytes
    assert summary["chips"][0]["kv_cache_bytes"] == 4 * 2 * 1 * 16 * 64 * 4


def test_beam_search_from_the_command_line_gives_the_best_completion(compiled):
    case, _ = compiled
    result = run("run", "--case_dir", case, "--prompt", "the", "--beam_width", 3, "--max_tokens", 5,
                 "--early_stopping", "true", "--length_penalty", 0.5, "--json")
    with LLM(case) as llm:
        expected, = llm.generate("the", SamplingParams(
            beam_width=3, max_tokens=5, early_stopping=True, length_penalty=0.5))
    completion, = json.loads(result.stdout)["completions"]
    assert completion["token_ids"] == list(expected.token_ids)
    refused = run("run", "--case_dir", case, "--prompt", "the", "--beam_width", 4,
                  "--max_batch_size", 3)
    assert refused.exit_code == 2
    assert "beam_width 4 exceeds max_batch_size 3; load the model with a larger" in refused.stderr


def test_several_completions_of_a_prompt_are_numbered(case_tp2):
    result = run("run", "--case_dir", case_tp2, "--prompt", "the", "--n", 2, "--temperature", 1,
                 "--seed", 1, "--max_tokens", 3)
    assert "[0.0] the\n" in result.stdout and "[0.1] the\n" in result.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (["--top_p", "0"], "top_p 0.0 is not above 0"),
    (["--temperature", "-1"], "temperature -1.0 is not from 0"),
    (["--logit_bias", "5"], "--logit_bias is '5', expected a token id and a bias"),
    (["--logit_bias", "999=1"], "token id 999 is not in the vocabulary"),
    (["--logprobs", "2"], "--logprobs needs --json"),
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
    (["--tp_size", "4"], "--tp_size is 4, but tensor_parallel"),
    (["--device", "0,0"], "device 0 is listed twice"),
    (["--device", "0,x"], "expected integers"),
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
    assert result.exit_code == 2 and "has no string param_dir" in result.stderr


def test_compile_errors_are_one_line(tmp_path):
    result = run("compile", tmp_path, "-o", tmp_path / "case")
    assert result.exit_code == 2
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")


def test_bench_reports_a_serving_workload(case_tp1, tmp_path):
    crowd = run("bench", "--case_dir", case_tp1, "--requests", "random:12", "--shared_prefix", 16,
                "--request_rate", 50,
                "--json")
    report = json.loads(crowd.stdout)
    assert report["requests"] == 12 and report["output_tokens"] > 12 * 16
    assert report["output_tokens_per_sec"] == report["output_tokens"] / report["seconds"]
    assert 0 < report["time_to_first_token"]["p50"] <= report["time_to_first_token"]["p99"]
    assert 11 * 16 >= report["cache_hits"] >= 16 and report["preemptions"] == 0
    (tmp_path / "file").write_text(
        '{"prompt": "the", "max_tokens": 2, "n": 3, "temperature": 1, "seed": 1}\n'
        '{"token_ids": [5, 6], "max_tokens": 4, "ignore_eos": true}\n')
    result = run("bench", "--case_dir", case_tp1, "--requests", tmp_path / "file",
                 "--request_rate", 100)
    shown = result.stdout
    assert result.exit_code == 0, result.output
    assert "2 requests, " in shown and "TTFT" in shown and "ITL" in shown and "p99" in shown
    assert "plain decoding" not in shown


def test_bench_compares_speculative_with_plain_decoding(case_tp1, tmp_path):
    with LLM(case_tp1) as llm:
        alone = llm.generate([[5, 6]], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    path = tmp_path / "file"
    path.write_text(json.dumps(dict(token_ids=[5, 6], max_tokens=12, ignore_eos=True,
                                    prediction=alone)))
    options = ["--case_dir", case_tp1, "--runs", 2, "--speculate", "ngram",
               "--num_speculative_tokens", 5]
    report = json.loads(run("bench", *options, "--requests", path, "--json").stdout)
    found = report["speculation"]
    assert report["output_tokens"] == 12
    assert found["draft_tokens"] >= found["accepted_tokens"] >= found["drafts"] > 0
    assert found["acceptance_length"] == found["accepted_tokens"] / found["drafts"] + 1
    assert found["plain_tokens_per_sec"] > 0 and found["speedup"] > 0
    shown = run("bench", *options, "--requests", path).stdout
    assert f"acceptance length {found['acceptance_length']:.2f}" in " ".join(shown.split())
    grid = ["--batch_size", 1, "--input_output_len", "4,8"]
    row, = json.loads(run("bench", *options, *grid, "--json").stdout)
    found = row["speculation"]
    assert found["plain_tokens_per_sec"] > 0 and found["acceptance_length"] == (
        found["accepted_tokens"] / found["drafts"] + 1 if found["drafts"] else None)


@pytest.mark.parametrize(("drafts", "length"), [(12345678, 16.0), (0, None)])
def test_the_table_of_drafts_fits_80_columns(case_tp1, monkeypatch, drafts, length):
    found = Speculation(12345678.9, 1.6, drafts, drafts, drafts, length)
    monkeypatch.setattr("llmc.runtime.benchmark.measure", lambda llm, batch, inputs, outputs, **_:
                        Row(4096, 131072, 131072, 1.0, 1.0, 1.0, 1.0, found))
    shown = run("bench", "--case_dir", case_tp1, "--input_output_len", "4,3", "--speculate",
                "ngram", "--num_speculative_tokens", 2).stdout.splitlines()
    assert max(map(len, shown)) <= 80
    row = next(line for line in shown if "1.60" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "4096", "131072", "131072", "12345678.90", "1.60", str(drafts),
        "–" if length is None else "16.00"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--requests", "random:none"], "'random:none' has no number of requests"),
    (["--requests", "nowhere"], "'nowhere' cannot be read"),
    (["--requests", "random:3", "--request_rate", "0"], "--request_rate is 0.0, expected more"),
    (["--requests", "random:3", "--shared_prefix", "64"], "shared_prefix 64 leaves no room in 64"),
    (["--requests", "random:3", "--block_size", "5"], "block_size 5 is not a power of two"),
    (["--requests", "random:3", "--batch_size", "2"], "--batch_size has no effect with --requests"),
    (["--requests", "random:3", "--runs", "2"], "--runs has no effect with --requests and without"),
    (["--requests", __file__, "--shared_prefix", "4"], "--shared_prefix is given with"),
    (["--request_rate", "3"], "--request_rate has no effect without --requests"),
    (["--audio", "3", "--input_output_len", "4,4"], "--input_output_len has no effect with"),
    (["--prefix_reuse"], "--prefix_reuse has no effect without --requests"),
    (["--num_speculative_tokens", "2"], "--num_speculative_tokens is given without --speculate"),
])
def test_an_invalid_serving_workload_is_refused(case_tp1, arguments, message):
    result = run("bench", "--case_dir", case_tp1, *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_sigterm_ends_running_commands(case_tp1):
    for seconds in (4, 8, 16, 32):
        running = subprocess.Popen(
            [sys.executable, "-m", "llmc.cli", "bench", "--case_dir", str(case_tp1), "--requests",
             "random:20", "--request_rate", "0.1"], stderr=subprocess.PIPE, text=True)
        time.sleep(seconds)
        running.terminate()
        _, said = running.communicate(timeout=60)
        if running.returncode != -signal.SIGTERM:  # else Python was still importing
            break
    assert running.returncode == 130 and said.endswith("interrupted\n") and "Traceback" not in said


def test_bench_prints_the_grid(case_tp1):
    result = run("bench", "--case_dir", case_tp1, "--batch_size", "1;2", "--input_output_len",
                 "4,3;6,2", "--runs", 1, "--json")
    rows = json.loads(result.stdout)
    assert [(r["batch"], r["input_length"], r["output_length"]) for r in rows] == \
        [(1, 4, 3), (2, 4, 3), (1, 6, 2), (2, 6, 2)]
    assert all(r["tokens_per_sec"] > 0 and r["tctx_ms"] > 0 for r in rows)


def test_the_table_of_a_grid_fits_80_columns(case_tp1, monkeypatch):
    """With the largest possible numbers."""
    monkeypatch.setattr("llmc.runtime.benchmark.measure", lambda llm, batch, inputs, outputs, **_:
                        Row(4096, 131072, 131072, 12345678.9, 12345678.9, 1234567.8, 123456.78))
    shown = run("bench", "--case_dir", case_tp1, "--input_output_len", "4,3").stdout.splitlines()
    assert max(map(len, shown)) <= 80
    assert [cell.strip() for cell in shown[3].split("│")[1:-1]] == [
        "4096", "131072", "131072", "12345678.90", "12345678.90", "1234567.80", "123456.78"]
    assert "TTFT(ms)" in shown[1] and "…" not in "".join(shown)


@pytest.mark.parametrize("grid", [("x", "4,4"), ("1", "4"), ("0", "4,4"), ("1", "60,60")])
def test_an_impossible_grid_is_refused(case_tp1, grid):
    result = run("bench", "--case_dir", case_tp1, "--batch_size", grid[0], "--input_output_len",
                 grid[1])
    assert result.exit_code == 2 and result.stderr.startswith("error: ")


def test_a_prompt_file_gives_one_result_per_line(case_tp2, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the", "max_tokens": 3, "id": 7}\n{"prompt": "fox"}\n')
    result = run("run", "--case_dir", case_tp2, "--prompt_file", path, "--max_tokens", 2)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["index"], row.get("id")) for row in rows] == [(0, 7), (1, None)]
    assert [len(row["completions"][0]["token_ids"]) for row in rows] == [3, 2]
    piped = run("run", case_tp2, "--prompt_file", "-", "--max_tokens", 2, stdin=path.read_text())
    assert [json.loads(line) for line in piped.stdout.splitlines()] == rows
    chat = run("run", case_tp2, "--prompt_file", "-", "--chat", stdin='{"prompt": "the"}')
    assert json.loads(chat.stdout)["completions"][0]["prompt_token_ids"] != \
        rows[0]["completions"][0]["prompt_token_ids"]
    both = run("run", case_tp2, "--prompt_file", "-", "--prompt", "x", stdin="{}")
    assert both.exit_code == 2 and "both --prompt and --prompt_file are given" in both.stderr
    empty = run("run", case_tp2, "--prompt_file", "-")
    assert empty.exit_code == 2 and "standard input has no request" in empty.stderr
    path.write_text('{"prompt": "the"}\n{"prompt": \n')
    result = run("run", "--case_dir", case_tp2, "--prompt_file", path)
    assert result.exit_code == 1 and len(result.stdout.splitlines()) == 2
    assert "error: 1 request(s) of" in result.stderr
    both = run("run", "--case_dir", case_tp2, "--prompt_file", path, "--prompt", "x")
    assert both.exit_code == 2 and "both --prompt and --prompt_file are given" in both.stderr


def read_all(terminal):
    """Read the terminal's output until the other side closes."""
    shown = b""
    with suppress(OSError):
        while True:
            shown += os.read(terminal, 1000)
    return shown.decode(errors="replace")


def hold_conversation(process, terminal, *lines):
    """Type each line at a prompt; return the terminal's output."""
    shown = ""
    for line in lines:
        while not shown.endswith("> "):
            shown += os.read(terminal, 1000).decode(errors="replace")
        time.sleep(0.2)  # typing delay: Ctrl-C just before input() is handled at the next key
        os.write(terminal, line)
        shown += "|"
    shown += read_all(terminal)
    assert process.wait(20) == 0, shown
    return shown


@pytest.fixture
def talk(case_tp1):
    def at_a_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where tests run in the background

    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "llmc.cli", "run", "--case_dir", str(case_tp1), "--chat",
         "--max_tokens", "4"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=at_a_terminal)
    os.close(theirs)
    patience = threading.Timer(120, process.kill)
    patience.start()
    yield lambda *lines: hold_conversation(process, terminal, *lines)
    patience.cancel()
    process.kill()
    process.wait()
    os.close(terminal)


def test_a_conversation_in_a_terminal(talk):
    shown = talk(b"the\n", b"\x03", b"\n", b"fox " * 99 + b"\n", b"\x04")
    assert "Ctrl-C ends an answer, Ctrl-D the conversation." in shown
    assert "the KV cache has room for 64; shorten the message" in shown and "Traceback" not in shown
    assert shown.count("> |") == 5 and "tokens/s" in shown


def test_ctrl_c_ends_an_answer_after_the_step_that_runs(capsys):
    def pieces():
        for index in range(9):
            if index == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield CompletionChunk(0, 0, index, str(index), None)

    before, meter, answer = signal.getsignal(signal.SIGINT), Meter(), pieces()
    print_answer(answer, meter)
    assert capsys.readouterr().out == "012\n" and meter.tokens == 3
    assert signal.getsignal(signal.SIGINT) is before and not list(answer)


def test_a_chat_without_a_template_is_refused(case_tp1, tmp_path, monkeypatch):
    case = shutil.copytree(case_tp1, tmp_path / "case")
    manifest = json.loads((case / "model_info.json").read_text())
    manifest["tokenizer"]["chat_template"] = None
    (case / "model_info.json").write_text(json.dumps(manifest))
    with LLM(case) as llm:
        monkeypatch.setattr("builtins.input", lambda prompt: "the")
        with pytest.raises(LlmcError, match="has no chat template"):
            converse(llm, SamplingParams(), Meter())


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_batch_has_a_bar_with_the_rate_on_a_terminal_s_stderr_alone(case_tp1, options):
    arguments = ["run", "--case_dir", str(case_tp1), "--prompt", "the", "--prompt", "fox",
                 "--max_tokens", "20", "--ignore_eos", *options]
    terminal, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "llmc.cli", *arguments], stderr=theirs,
                               stdout=subprocess.PIPE, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    shown = read_all(terminal)
    os.close(terminal)
    results = process.communicate()[0].decode()
    assert "tokens/s" in shown.split("40 tokens in")[0] and "100%" in shown
    without = run(*arguments)
    assert results == without.stdout and without.stderr.count("tokens/s") == 1


def test_inspect_reports_the_kv_cache_capacity(tiny_hf, tmp_path):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda", dtype="bfloat16")
    summary = json.loads(run("inspect", tmp_path / "case", "--json").stdout)
    chip, = summary["chips"]
    held = summary["cache_tokens"]["H200 (141 GB)"] * chip["token_bytes"] + chip["weight_bytes"]
    assert 0.85 * 141e9 < held < 0.9 * 141e9
    assert "KV cache capacity in tokens, approximate: L4" in \
        run("inspect", tmp_path / "case").stdout


def test_options_of_loading_are_those_of_the_llm():
    parameters = inspect.signature(LLM.__init__).parameters
    own = {"self", "case_dir", "device", "verify", "adapters"}  # options that others lack
    assert {*LOADING_OPTIONS} == {*parameters} - own
    for name, given in LOADING_OPTIONS.items():
        assert given.get("default") == parameters[name].default, name


@pytest.fixture(scope="module")
def compared(compiled, tiny_hf):
    """Outputs of `llmc diff` and `llmc eval`, called with --case_dir and with DIR."""
    case, _ = compiled
    return (run("diff", "--case_dir", case, "--reference", tiny_hf, "--tokens", 2, "--tolerance",
                0, "--json"),
            run("eval", case, "--task", "perplexity", "--max_length", 32))


def test_phases_are_reported_with_their_durations(compiled, compared):
    """Plain stderr has a line for each finished phase; stdout has none."""
    for result, code, names in ((compiled[1], 0, ["import", "export", "passes", "write"]),
                          (compared[0], 1, ["import", "hash files", "export the reference",
                                         "run the compiled model", "run the reference",
                                         "compare activations", "compare greedy tokens",
                                         "compare weights"]),
                          (compared[1], 0, ["load llmc", "llmc"])):
        assert result.exit_code == code, result.output
        lines = [line for line in result.stderr.splitlines() if line.startswith("[")]
        assert [line.partition("] ")[2] for line in lines] == names
        assert all(0 <= float(line[1:].split(" s]")[0]) < 600 for line in lines)
        assert " s] " not in result.stdout


def test_a_live_line_shows_the_phase_that_runs_on_a_terminal(monkeypatch):
    terminal, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("TERM", "xterm")
        with Phases() as phases:
            phases.begin("export")
            time.sleep(0.3)
            phases.note("a remark")
            phases.show("passes", 1, 2)
    shown = read_all(terminal)
    os.close(terminal)
    assert "0:00:00" in shown and "a remark" in shown
    assert "s] export" in shown and "s] passes" in shown


@pytest.mark.parametrize(("verb", "arguments"), [
    ("bench", ["--runs", "0"]), ("inspect", ["--verify"]), ("diff", ["--reference", "x"]),
    ("eval", ["--task", "perplexity", "--max_length", "1"]), ("adapter peft", ["-o", "x"])])
def test_every_verb_takes_dir_or_case_dir(case_tp1, verb, arguments):
    verb = verb.split()
    one, two = run(*verb, case_tp1, *arguments), run(*verb, "--case_dir", case_tp1, *arguments)
    assert one.exit_code == two.exit_code and one.stdout == two.stdout
    errors = [[line for line in own.stderr.splitlines() if line.startswith("error")]
              for own in (one, two)]
    assert errors[0] == errors[1] and (errors[0] or verb == ["inspect"])
    none = run(*verb, *arguments)
    assert none.exit_code == 2 and "no case directory is given; give DIR" in none.stderr
    assert "error: DIR is '" in run(*verb, case_tp1, "--case_dir", "other", *arguments).stderr


@pytest.mark.parametrize(("verb", "option", "message"), [
    ("run", "check_step", "on target cpu"), ("serve", "skip_step", "on target cpu"),
    ("bench", "gpu_memory_utilization", "on target cpu"),
    ("bench", "max_loras", "on 'LlamaForCausalLM', which was compiled without --enable_lora"),
    ("serve", "allow_runtime_lora_updating", "which was compiled without --enable_lora"),
    ("run", "encoder_cache_gb", "whose prompts have no images or audio"),
    ("bench", "encoder_cache_gb", "whose prompts have no images or audio"),
    ("serve", "encoder_cache_gb", "whose prompts have no images or audio"),
    ("serve", "media_timeout", "whose prompts have no images or audio")])
def test_options_without_effect_on_the_model_are_refused(case_tp1, verb, option, message):
    value = () if option.startswith("allow") else ("1",)
    result = run(verb, case_tp1, *(("--prompt", "the") if verb == "run" else ()), f"--{option}",
                 *value)
    assert result.exit_code == 2 and f"--{option} has no effect on" in result.stderr
    assert f"{message}; leave it out" in result.stderr


def test_options_of_adapters_need_adapters(lora_case):
    for verb in ("run", "serve"):
        result = run(verb, lora_case(1), "--max_loras", 2)
        assert result.exit_code == 2 and "is given without --lora_modules" in result.stderr


def test_the_number_of_drafts_needs_a_source_of_drafts(case_tp1):
    result = run("run", case_tp1, "--prompt", "the", "--num_speculative_tokens", 2)
    assert result.exit_code == 2 and "without --speculate or --prediction" in result.stderr


def test_errors_come_without_the_inference_info(case_tp1):
    for arguments in (["--prompt", ""], ["--prompt", "the", "--logit_bias", "999=1"],
                      ["--prompt", "the " * 99], ["--prompt", "the", "--device", "0,0"],
                      ["--audio", "x.wav"], ["--prompt", "the", "--max_loras", "2"],
                      ["--prompt", "the", "--length_penalty", "0.5"]):
        result = run("run", case_tp1, *arguments)
        assert result.exit_code == 2 and result.stdout == ""
        assert "Inference info" not in result.stderr and "error: " in result.stderr


@pytest.mark.parametrize(("arguments", "message"), [
    (["run", "nowhere", "--prompt", "a", "--json"], "nowhere"),
    (["run", "CASE", "--json", "--prompt", "a", "--top_p", "0"], "top_p 0.0 is not above 0"),
    (["inspect", "--json", "--wrong"], "No such option"),
    (["compile", "--json"], "Missing argument 'MODEL'")])
def test_errors_of_json_output_are_json_on_stderr(arguments, message, case_tp1):
    result = run(*(case_tp1 if own == "CASE" else own for own in arguments))
    error = json.loads(result.stderr)
    assert result.stdout == "" and result.exit_code == error["exit_code"] == 2
    assert message in error["error"]


def test_a_failed_check_is_json_on_stderr_too(compared):
    result, _ = compared
    error = json.loads(result.stderr.splitlines()[-1])
    assert error == {"error": json.loads(result.stdout)["verdict"], "exit_code": 1}


def test_errors_are_red_on_a_terminal_unless_no_color_is_set():
    for variables, red in (({}, True), ({"NO_COLOR": "1"}, False)):
        result = CliRunner().invoke(main, ["inspect", "nowhere"], color=True,
                                    env={"NO_COLOR": None, **variables})
        assert ("\x1b[31m" in result.stderr) == red and "error:" in result.stderr
    assert "\x1b" not in run("inspect", "nowhere").stderr


def test_help_imports_nothing_heavy():
    """Shell completion runs the command line for every key."""
    heavy = {"numpy", "onnx", "onnx_graphsurgeon", "onnxruntime", "pydantic", "rich", "torch"}
    code = f"import sys, llmc.cli; sys.exit(', '.join({heavy!r} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE,
                          text=True).stderr.strip() == ""


def test_no_option_s_help_has_two_defaults():
    for name, command in main.commands.items():
        context = click.Context(command, info_name=name, show_default=True)
        for param in command.params:
            record = param.get_help_record(context)
            assert record is None or record[1].count("[default:") <= 1, (name, record)


@pytest.mark.parametrize(("words", "incomplete", "expected"), [
    (["compile", "--target"], "c", ["cpu", "cuda"]),
    (["compile", "--target"], "", [*targets.TARGETS]),
    (["compile", "--dtype"], "b", ["bfloat16"]),
    (["compile", "--quantize"], "int", ["int8", "int4"]),
    (["run", "--attention_backend"], "c", ["cudnn"]),
    (["serve", "--speculate"], "", ["off", "ngram", "draft"]),
    (["bench", "--num_speculative_tokens"], "", ["auto"]),
    ([], "e", ["eval"])])
def test_a_shell_completes_verbs_and_values(words, incomplete, expected):
    complete = ShellComplete(main, {}, "llmc", "_LLMC_COMPLETE")
    assert [item.value for item in complete.get_completions(words, incomplete)] == expected


def test_a_shell_is_offered_the_compiler_s_targets_and_dtypes():
    choices = {option.name: {*option.declared.choices} for option in OPTIONS}
    assert choices["target"] == {*targets.TARGETS}
    assert choices["dtype"] == {"auto", *(dtype for target in targets.TARGETS.values()
                                          for dtype in target.dtypes)}


def test_the_options_of_compile_are_the_arguments_of_llmc_compile():
    parameters = inspect.signature(llmc.compile).parameters
    flags = {param.name: param for param in main.commands["compile"].params}
    alone = {"verbose", "as_json"}, {"progress"}
    assert {*flags} - alone[0] == {*parameters} - alone[1]
    for option in OPTIONS:
        assert parameters[option.name].default == flags[option.name].default == option.default
        assert f"\n    {option.name}: " in llmc.compile.__doc__
        assert flags[option.name].help.split(".")[0] == option.help().split(".")[0]
    assert llmc.compile.__name__ == "compile" and "progress" in llmc.compile.__doc__


ANSWER = """
import readline, select, sys
from llmc.cli.conversation import print_answer
from llmc.cli.progress import Meter
from llmc.runtime.core.request import CompletionChunk

def pieces():
    yield CompletionChunk(0, 0, 0, "answer", None)
    sys.stdout.flush()
    select.select([sys.stdin], [], [], 60)
    yield CompletionChunk(0, 0, 1, "ed", "stop")

print_answer(pieces(), Meter())
try:
    input("> ")
except EOFError:
    print("the end")
"""


def test_ctrl_d_during_an_answer_ends_the_conversation_after_it():
    terminal, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", ANSWER], stdin=theirs, stdout=theirs,
                               stderr=theirs)
    os.close(theirs)
    patience = threading.Timer(60, process.kill)
    patience.start()
    shown = ""
    while "answer" not in shown:
        shown += os.read(terminal, 1000).decode()
    os.write(terminal, b"\x04")
    shown += read_all(terminal)
    patience.cancel()
    os.close(terminal)
    assert process.wait(20) == 0 and "answered" in shown.replace("^D", "").replace("\b", "")
    assert "the end" in shown
