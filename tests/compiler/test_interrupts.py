"""Ctrl-C during a compile, and two compiles at once in one process."""

import gc
import os
import signal
import threading
from contextlib import suppress
from importlib import import_module

import families
import numpy as np
import pytest
from click.testing import CliRunner

import llmc
from llmc.cli import main
from llmc.compiler.frontend import trace
from llmc.interrupts import check_interrupted, interruptible


@pytest.fixture(autouse=True)
def ctrl_c():
    """Install Python's handler, which is absent if pytest was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def swallow():
    """Like a library that catches everything and continues."""
    with suppress(BaseException):
        interrupt()


def turn():
    """Like a library that raises a different error instead."""
    try:
        interrupt()
    except BaseException as error:
        raise ValueError("something failed") from error


def lose():
    """Like a C callback or a destructor, whose errors Python only prints."""
    class Last:
        def __del__(self):
            interrupt()
    Last()
    gc.collect()


MOMENTS = [
    ("llmc.compiler.api.check_options", turn), ("llmc.compiler.api.load", interrupt),
    ("llmc.compiler.frontend.export.build", turn), ("llmc.compiler.frontend.export.trace", turn),
    ("llmc.compiler.frontend.export.repeat", swallow), ("llmc.compiler.lower.verify", lose),
    ("llmc.compiler.graph.probe._session", turn), ("llmc.compiler.api.write", swallow),
    ("llmc.compiler.targets.cpu.write_weights", turn), ("llmc.compiler.api.write_manifest", lose),
]


def run_compile(model, output):
    """Return the exit code and the output of `llmc compile`."""
    result = CliRunner().invoke(main, ["compile", str(model), "-o", str(output)])
    return result.exit_code, result.output


@pytest.mark.parametrize(("moment", "way"), MOMENTS,
                         ids=[f"{moment}-{way.__name__}" for moment, way in MOMENTS])
def test_an_interrupt_ends_a_compile_even_if_a_library_swallows_it(tiny_hf, tmp_path, monkeypatch,
                                                                   capfd, moment, way):
    module, name = moment.rsplit(".", 1)
    real = getattr(import_module(module), name)

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(import_module(module), name, real)
        way()
        return real(*args, **kwargs)

    monkeypatch.setattr(import_module(module), name, interrupted)
    code, printed = run_compile(tiny_hf, tmp_path / "out" / "case")
    assert code == 130
    assert "Traceback" not in printed + "".join(capfd.readouterr())
    assert not (tmp_path / "out").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.0])
def test_an_interrupt_ends_an_export(tiny_hf, tmp_path, monkeypatch, seconds):
    run = trace._run_exporter
    timers = []

    def begin(*args):  # replaced to bypass the cache of exports
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()
        made = run(*args)
        timers[-1].join()  # an export may finish first; the next test must not be interrupted
        return made

    monkeypatch.setattr(trace, "_run_exporter", begin)
    assert run_compile(tiny_hf, tmp_path / "out" / "case")[0] == 130
    assert len(timers) == 1
    assert not (tmp_path / "out").exists()


def test_other_errors_and_signal_handlers_are_unchanged():
    with pytest.raises(ValueError, match="mine"), interruptible():
        raise ValueError("mine")
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with interruptible():
            interrupt()
            check_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]


def test_two_compiles_in_one_process_do_not_disturb_each_other(tmp_path, monkeypatch):
    run = trace._run_exporter
    monkeypatch.setattr(trace, "_run_exporter", lambda *args: run(*args))  # not cached ones
    models = {name: families.tiny_model(name, num_hidden_layers=2)
              for name in ("mistral", "gpt_bigcode")}
    paths = {name: families.save(model, tmp_path / name) for name, model in models.items()}
    errors = []

    def compile_one(name):
        try:
            llmc.compile(paths[name], tmp_path / f"{name}-case")
        except BaseException as error:
            errors.append((name, error))

    threads = [threading.Thread(target=compile_one, args=(name,)) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 20).tolist()
    for name, model in models.items():
        with llmc.LLM(tmp_path / f"{name}-case") as llm:
            families.assert_close(llm.logits(tokens), families.reference_logits(model, tokens))
