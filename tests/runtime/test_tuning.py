"""Tuning files next to case directories; unreadable ones are ignored."""

import os

import pytest

from llmc.runtime.engines.tuning import read_choices, tuning_file, write_choices

CHOICES = [([2, 4096, 16], [1, 2**64 - 1]), ([2, 4096, 32], [3, 0])]


def test_kernel_choices_are_restored_for_the_same_gpu_and_library(tmp_path):
    path = tuning_file(tmp_path / "case")
    assert path == tmp_path / "case.tuning.json" and read_choices(path, "H200, 13.1, a") == []
    write_choices(path, "H200, 13.1, a", CHOICES)
    write_choices(path, "H100, 13.1, a", CHOICES[:1])
    assert read_choices(path, "H200, 13.1, a") == CHOICES
    assert read_choices(path, "H100, 13.1, a") == CHOICES[:1]
    assert read_choices(path, "H200, 13.2, a") == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["case.tuning.json"]


def test_kernel_choices_of_other_kernels_are_replaced(tmp_path):
    path = tuning_file(tmp_path / "case")
    write_choices(path, "H200, 13.1, a", CHOICES)
    write_choices(path, "H100, 13.1, a", CHOICES)
    assert read_choices(path, "H200, 13.1, b") == []
    write_choices(path, "H200, 13.1, b", CHOICES[:1])
    assert read_choices(path, "H200, 13.1, b") == CHOICES[:1]
    assert read_choices(path, "H200, 13.1, a") == []
    assert read_choices(path, "H100, 13.1, a") == CHOICES


@pytest.mark.parametrize("text", [
    "", "{", "[]", "3", '{"a": 3}', '{"a": [3]}', '{"a": [[[1]]]}', '{"a": [[[1], ["2"]]]}',
    '{"a": [[[-1], [2]]]}', '{"a": [[[true], [2]]]}', "[" * 10**5])
def test_an_invalid_tuning_file_is_ignored(tmp_path, text):
    path = tmp_path / "case.tuning.json"
    path.write_text(text)
    assert read_choices(path, "a") == []
    write_choices(path, "a", CHOICES)
    assert read_choices(path, "a") == CHOICES


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_directory_that_cannot_be_written_to_is_left_alone(tmp_path):
    tmp_path.chmod(0o500)
    write_choices(tmp_path / "case.tuning.json", "a", CHOICES)
    assert not list(tmp_path.iterdir())


def test_a_missing_directory_is_not_created(tmp_path):
    write_choices(tmp_path / "nowhere" / "case.tuning.json", "a", CHOICES)
    assert not list(tmp_path.iterdir())
