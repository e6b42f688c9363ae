"""What was timed is kept beside a case directory, and is worth nothing where it cannot be read."""

import os

import pytest

from llmc.runtime.engines.tuning import read_choices, tuning_file, write_choices

CHOICES = [([2, 4096, 16], [1, 2**64 - 1]), ([2, 4096, 32], [3, 0])]


def test_choices_come_back_for_the_gpu_and_library_that_they_were_made_on(tmp_path):
    path = tuning_file(tmp_path / "case")
    assert path == tmp_path / "case.tuning.json" and read_choices(path, "H200, 13.1, a") == []
    write_choices(path, "H200, 13.1, a", CHOICES)
    write_choices(path, "H100, 13.1, a", CHOICES[:1])
    assert read_choices(path, "H200, 13.1, a") == CHOICES
    assert read_choices(path, "H100, 13.1, a") == CHOICES[:1]
    assert read_choices(path, "H200, 13.2, a") == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["case.tuning.json"]


def test_choices_are_worth_nothing_for_other_kernels_and_make_room_for_theirs(tmp_path):
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
def test_a_file_that_is_none_of_ours_is_as_if_there_were_none(tmp_path, text):
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


def test_a_directory_that_is_not_there_is_left_alone(tmp_path):
    write_choices(tmp_path / "nowhere" / "case.tuning.json", "a", CHOICES)
    assert not list(tmp_path.iterdir())
