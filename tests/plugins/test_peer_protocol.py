"""The protocol of collectives over peer memory, with threads as ranks, under a race detector."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("peer_ranks.cpp")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    compiler = shutil.which("g++") or pytest.skip("there is no g++")
    program = tmp_path_factory.mktemp("ranks") / "ranks"
    subprocess.run([compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra",
                    "-Werror", "-Wno-unknown-pragmas", "-fsanitize=thread", SOURCE, "-o", program,
                    "-lpthread"], check=True)
    return program


@pytest.mark.parametrize("size, blocks", [
    (2, 3), (4, 1), pytest.param(8, 2, marks=pytest.mark.thorough)])
def test_ranks_get_equal_sums_and_all_parts(ranks, size, blocks):
    """Sixty collectives in a row, of changing kinds, sizes and grids."""
    done = subprocess.run([ranks, str(size), str(blocks)], capture_output=True, text=True,
                          timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ranks_of_a_process_are_two_to_eight(extension):
    for size in (1, 9):
        with pytest.raises(extension.CudaError, match=f"{size} ranks, expected 2 to 8"):
            extension.LocalRanks([0] * size)
