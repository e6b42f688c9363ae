"""Tokens of a text: how few there can be, and errors of the tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import TEXTS, byte_fallback, byte_level
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from llmc.errors import LlmcError
from llmc.runtime.tokenizer import bytes_to_unicode, encode, min_tokens, tokenize_long

TOKENIZERS = {"bytes": byte_level(), "fallback": byte_fallback()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, times=st.integers(1, 50))
def test_no_text_has_fewer_tokens_than_its_size_says(name, text, times):
    tokenizer = TOKENIZERS[name]
    assert min_tokens(tokenizer)(text * times) <= len(tokenizer.encode(text * times).ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_text_is_known_by_its_size(name):
    assert min_tokens(TOKENIZERS[name])("the quick brown fox " * 1000) > 500


def test_characters_stand_for_bytes_as_in_byte_level_vocabularies():
    assert sorted(bytes_to_unicode().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("changed", [
    lambda own: setattr(own, "normalizer", normalizers.Strip()),
    lambda own: setattr(own, "normalizer", normalizers.Replace(Regex(" +"), " ")),
    lambda own: setattr(own, "normalizer", normalizers.Replace("the", "")),
    lambda own: own.enable_truncation(8)])
def test_a_tokenizer_that_may_drop_text_has_no_bound(changed):
    tokenizer = byte_level()
    changed(tokenizer)
    assert min_tokens(tokenizer)("the " * 10_000) == 0


def test_a_long_text_is_tokenized_or_counted(tmp_path):
    path = tmp_path / "tokenizer.json"
    TOKENIZERS["bytes"].save(str(path))
    text = "the quick brown fox " * 9
    ids = TOKENIZERS["bytes"].encode(text).ids
    assert tokenize_long(path, text, True, len(ids)) == (len(ids), ids)
    assert tokenize_long(path, text, True, len(ids) - 1) == (len(ids), [])
    assert tokenize_long(path, text * 9, True, 1)[1] == []


def test_a_regular_expression_that_gives_up_is_an_error():
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+a+)+b"), "isolated")
    with pytest.raises(LlmcError, match="the tokenizer cannot read the text"):
        encode(tokenizer, ["a" * 40], True)
