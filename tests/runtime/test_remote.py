"""A rank in a process of its own, as far as no GPU is needed."""

import numpy as np
import pytest

import llmc
from llmc.runtime.attention.metadata import PackedBatch
from llmc.runtime.engines.remote import RemoteEngine


def test_what_a_rank_cannot_load_is_said_by_the_caller(tmp_path):
    with pytest.raises(llmc.LlmcError, match=r"rank 1: case directory .* does not exist"):
        RemoteEngine(tmp_path / "nothing", 1, 0, 1, 128)


def test_a_rank_s_end_is_an_error_and_no_wait(tmp_path, monkeypatch):
    call = RemoteEngine._call
    monkeypatch.setattr(RemoteEngine, "_call", lambda self, method, *arguments: None)
    engine = RemoteEngine(tmp_path, 1, 0, 1, 128)
    monkeypatch.setattr(RemoteEngine, "_call", call)
    engine.abort()
    with pytest.raises(llmc.LlmcError, match="the process of rank 1 has ended"):
        engine.run(PackedBatch.prepare([[1]], [0]))
    engine.close()


def test_a_mistake_in_a_rank_comes_back(tmp_path, monkeypatch):
    call = RemoteEngine._call
    monkeypatch.setattr(RemoteEngine, "_call", lambda self, method, *arguments: None)
    engine = RemoteEngine(tmp_path, 1, 0, 1, 128)
    monkeypatch.setattr(RemoteEngine, "_call", call)
    with pytest.raises(llmc.LlmcError, match="rank 1: AttributeError"):
        engine.copy_row(0, 1, np.int64(3))
    engine.close()
