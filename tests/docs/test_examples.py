"""The examples, run as users run them."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments):
    done = subprocess.run([sys.executable, EXAMPLES / name, *map(str, arguments)],
                          capture_output=True, text=True, timeout=300, check=False,
                          env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "arguments", "expected"), [
    ("generate.py", (), "(3, 300)"),
    ("chat.py", ("Name the capital of France.",), "\n"),
    ("stream_async.py", (), "Once upon a time"),
    ("structured_output.py", (), "'certain': "),
    ("prediction.py", (), " drafts accepted, "),
    ("onnxruntime_only.py", (), "(1, "),
])
def test_an_example_runs_on_a_case_directory(name, arguments, expected, case_tp1):
    assert expected in run(name, case_tp1, *arguments)


def test_a_model_is_compiled_and_compared(tiny_hf, tmp_path, monkeypatch, capfd):
    """In this process, which has imported torch."""
    path = EXAMPLES / "compile_and_verify.py"
    monkeypatch.setattr(sys, "argv", [str(path), str(tiny_hf), str(tmp_path / "case")])
    with pytest.raises(SystemExit) as exited:
        runpy.run_path(str(path), run_name="__main__")
    assert exited.value.code == 0
    assert "within tolerance" in capfd.readouterr().out


def test_every_example_is_run():
    tests = Path(__file__).parents[1]
    tested = "".join((tests / name).read_text(encoding="utf-8")
                     for name in ("docs/test_examples.py", "server/test_client_example.py"))
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tested] == []
