"""Token counts of texts: lower bounds, and errors of the tokenizer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import TEXTS, byte_fallback, byte_level
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from llmc.errors import LlmcError
from llmc.runtime.tokenizer import (
    bytes_to_unicode,
    encode,
    min_tokens,
    read_tokenizer,
    tokenize_long,
)

TOKENIZERS = {"bytes": byte_level(), "fallback": byte_fallback()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, times=st.integers(1, 50))
def test_the_token_count_bound_is_a_lower_bound(name, text, times):
    tokenizer = TOKENIZERS[name]
    assert min_tokens(tokenizer)(text * times) <= len(tokenizer.encode(text * times).ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_text_is_refused_by_its_size(name):
    assert min_tokens(TOKENIZERS[name])("the quick brown fox " * 1000) > 500


def test_characters_stand_for_bytes_as_in_byte_level_vocabularies():
    assert sorted(bytes_to_unicode().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("changed", [
    lambda own: setattr(own, "normalizer", normalizers.Strip()),
    lambda own: setattr(own, "normalizer", normalizers.Replace(Regex(" +"), " ")),
    lambda own: setattr(own, "normalizer", normalizers.Replace("the", "")),
    lambda own: own.enable_truncation(8)])
def test_a_lossy_tokenizer_has_no_bound(changed):
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


def test_a_failing_regular_expression_is_an_error():
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+a+)+b"), "isolated")
    with pytest.raises(LlmcError, match="the tokenizer cannot encode the text"):
        encode(tokenizer, ["a" * 40], True)


def template(*special_tokens):
    return {"type": "TemplateProcessing", "pair": [], "special_tokens": {
        "<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}, "single": [
            {"SpecialToken": {"id": token, "type_id": 0}} for token in special_tokens]}


def sequence(depth, kind="normalizers"):
    inner = {"type": "NFC"}
    for _ in range(depth):
        inner = {"type": "Sequence", kind: [inner]}
    return inner


def longer(content, count):
    return {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": content}] * count}]}


HOSTILE = {
    "nested deeply": ({"normalizer": sequence(300)}, "recursion limit"),
    "a panic while it is read": ({"normalizer": {
        "type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "precompiled_charsmap"),
    "a panic while it encodes": ({"post_processor": template("<absent>")}, "no entry found"),
    "many tokens for every text": ({"post_processor": template(*["<s>"] * 2000)},
                                   "adds 2000 tokens to every text, the limit is 1024"),
    "replacements that grow": ({"normalizer": longer("a" * 1000, 5)}, "normalizer may make a text "
                               "1000000000000000 times longer, the limit is 4096"),
    "a long prefix": ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
                      "1000000 times longer"),
    "a decoder that grows": ({"decoder": {"type": "Replace", "pattern": {"String": "a"},
                                          "content": "a" * 5000}}, "its decoder may make"),
    "a huge token id": ({"added_tokens": []}, "the token id 4294967295, the limit is", 2**32 - 1),
    "a token id above 32 bits": ({}, "expected u32", 2**40),
    "a negative token id": ({}, "expected u32", -1),
    "no tokens": ({"model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}}, "no tokens"),
    "a bad regular expression": ({"pre_tokenizer": {
        "type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}},
        "Oniguruma error"),
    "parentheses": ({"pre_tokenizer": {
        "type": "Split", "pattern": {"Regex": "(" * 10**5 + ")" * 10**5}, "behavior": "Isolated",
        "invert": False}}, "parse depth limit"),
}


def write_tokenizer(directory, changes, first_id=0):
    tokenizer = json.loads(Tokenizer(models.WordLevel({"a": 0, "b": 1}, "b")).to_str())
    tokenizer["model"]["vocab"]["a"] = first_id
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer | changes))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused(tmp_path, name):
    changes, match, *first_id = HOSTILE[name]
    write_tokenizer(tmp_path, changes, *first_id)
    with pytest.raises(LlmcError, match=f"tokenizer.json' is not a tokenizer .*{match}") as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_truncation_and_padding_of_training_do_not_apply(tmp_path):
    write_tokenizer(tmp_path, {
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst",
                       "stride": 5},
        "padding": {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
        "pre_tokenizer": {"type": "Whitespace"}})
    assert encode(read_tokenizer(tmp_path), ["a b a"], True) == [[0, 1, 0]]


def test_an_oversized_tokenizer_is_not_read(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(10**9)  # sparse
    with pytest.raises(LlmcError, match="has 1000000000 bytes, expected at most 67108864"):
        read_tokenizer(tmp_path)
