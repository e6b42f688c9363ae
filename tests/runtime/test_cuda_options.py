"""Options of the CUDA engine that need no GPU."""

import pytest

from llmc.errors import LlmcError
from llmc.runtime.engines.cuda import collectives_option


@pytest.mark.parametrize("value", ["nccl", "peer", "auto"])
def test_the_environment_chooses_the_collectives(monkeypatch, value):
    monkeypatch.setenv("LLMC_COLLECTIVES", value)
    assert collectives_option() == value


def test_collectives_are_nccls_by_default(monkeypatch):
    monkeypatch.delenv("LLMC_COLLECTIVES", raising=False)
    assert collectives_option() == "nccl"


def test_unknown_collectives_are_refused(monkeypatch):
    monkeypatch.setenv("LLMC_COLLECTIVES", "mpi")
    with pytest.raises(LlmcError, match="LLMC_COLLECTIVES is 'mpi', expected nccl, peer or auto"):
        collectives_option()
