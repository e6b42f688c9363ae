"""Quotes in errors: one line, cut at a word."""

import pytest

from llmc import LlmcError, SamplingParams
from llmc.errors import reason_of, shortened
from llmc.runtime.prompts import read_prompts
from llmc.runtime.sampling.structured_output import _unreadable

LONG = "the quick brown fox jumps over the lazy dog, " * 20


@pytest.mark.parametrize(("text", "most", "expected"), [
    ("the quick\n brown", 30, "the quick brown"), ("the quick", 9, "the quick"),
    ("the quick brown", 12, "the quick …"), ("the, quick", 5, "the …"), ("a" * 9, 4, "aaaa…"),
    ("x " + "a" * 100, 20, "x " + "a" * 18 + "…"), ("the quick brown", 9, "the quick …"),
    ("", 4, "")])
def test_a_text_is_cut_at_a_word(text, most, expected):
    assert shortened(text, most) == expected


def test_the_reason_of_an_error_is_its_first_line_or_its_kind():
    assert reason_of(ValueError("one\ntwo")) == "one"
    assert reason_of(ValueError()) == "ValueError()"
    assert reason_of(ValueError(LONG)).endswith((" the …", " quick …", " brown …", " fox …",
                                                 " jumps …", " over …", " lazy …", " dog …"))


def test_errors_cut_no_word_of_what_they_quote():
    with pytest.raises(LlmcError, match=r"^max_tokens is 'the quick [a-z, ]+ …'; give a whole num"):
        SamplingParams(max_tokens=LONG)
    with pytest.raises(LlmcError, match=r"prompt 1 has the keys 'the quick [a-z, ]+ …'; give"):
        read_prompts(["a", {LONG: "a"}])
    words = str(_unreadable(LONG * 3)).partition("(")[2].split()
    assert words[-1] == "…)" and {*words[:-1]} <= {*LONG.replace(", ", " ").split(), "dog,"}
