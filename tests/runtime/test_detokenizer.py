"""Streamed text has whole characters, equals decoding at once, and excludes stop strings."""

import families
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_tokenizers import BYTES, TEXTS, byte_fallback, byte_level
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

import llmc
from llmc.runtime.sampling.detokenizer import IncrementalDetokenizer, _StopString
from llmc.runtime.sampling.token_text import token_bytes, token_text


def smollm2():
    path = families.smollm2()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer


@pytest.fixture(scope="module", params=[
    byte_level, byte_fallback, pytest.param(smollm2, marks=pytest.mark.thorough)])
def tokenizer(request):
    return request.param()


def pieces(tokenizer, tokens, stop=(), prompt=()):
    stream = IncrementalDetokenizer(tokenizer, prompt, stop)
    made = []
    for token in tokens:
        made.append(stream.push(token))
        if stream.stopped:
            break
    return [*made, stream.finish()]


@given(text=TEXTS)
def test_pieces_joined_are_the_text_and_break_no_character(tokenizer, text):
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(tokens)
    made = pieces(tokenizer, tokens)
    assert "".join(made) == whole
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in made)


@given(text=TEXTS, data=st.data())
def test_a_completion_is_decoded_after_its_prompt(tokenizer, text, data):
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    cut = data.draw(st.integers(0, len(tokens)))
    before, whole = tokenizer.decode(tokens[:cut]), tokenizer.decode(tokens)
    assume("\ufffd" not in before + whole)  # of a prompt that ends inside a character
    assert before + "".join(pieces(tokenizer, tokens[cut:], prompt=tokens[:cut])) == whole


@pytest.mark.parametrize("tokenizer", [byte_level], indirect=True)
@given(data=st.data())
def test_bytes_decode_incrementally_as_at_once(tokenizer, data):
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60))
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@given(data=st.data())
def test_byte_fallback_runs_decode_incrementally_as_at_once(data):
    """One invalid byte invalidates its whole run, which a stream cannot foresee.

    So runs are valid, or invalid from their first character on.
    """
    tokenizer = byte_fallback()
    valid = st.text(min_size=1, max_size=4).map(str.encode)
    invalid = st.tuples(st.integers(0x80, 0xBF), st.binary(max_size=12)).map(
        lambda parts: bytes([parts[0]]) + parts[1])
    words = st.lists(st.integers(len(BYTES), tokenizer.get_vocab_size() - 1), min_size=1,
                     max_size=3)
    runs = data.draw(st.lists(st.tuples(words, valid | invalid), max_size=6))
    tokens = [token for word, run in runs for token in (*word, *run)]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize(("tokenizer", "run"), [
    (byte_level, b"\xff"), (byte_level, b"\xe4"), (byte_fallback, b"\xff"),
    (byte_fallback, b"\xff\xe4\xbd\xa0"), (byte_fallback, b"\xe4")], indirect=["tokenizer"])
def test_long_runs_of_invalid_bytes_are_decoded_in_short_parts(tokenizer, run):
    byte_tokens = [token for byte in run for token in range(tokenizer.get_vocab_size())
                   if token_bytes(tokenizer, token) == bytes([byte])]
    assert len(byte_tokens) == len(run)
    check_short_parts(tokenizer, byte_tokens * 200)


def test_tokens_that_start_inside_characters_are_decoded_in_short_parts():
    tokenizer = Tokenizer(models.BPE({"ä½": 0, "łä½": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.decode([0, 1, 1]) == "你你\ufffd"
    check_short_parts(tokenizer, [0] + [1] * 200)


def test_a_long_run_of_special_tokens_is_decoded_in_short_parts(tokenizer):
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens(["<pad>"])
    pad = tokenizer.token_to_id("<pad>")
    smile = tokenizer.encode("🙂", add_special_tokens=False).ids
    check_short_parts(tokenizer, [pad] * 200 + smile[:1] + [pad] * 200 + smile[1:] + [pad] * 200)


class Watched:
    """A tokenizer that records its longest decode call in tokens."""

    def __init__(self, tokenizer):
        self._tokenizer, self.longest = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, tokens, *arguments, **options):
        self.longest = max(self.longest, len(tokens))
        return self._tokenizer.decode(tokens, *arguments, **options)


def check_short_parts(tokenizer, tokens):
    watched = Watched(tokenizer)
    assert "".join(pieces(watched, tokens)) == tokenizer.decode(tokens)
    assert watched.longest <= 20


@given(text=TEXTS, data=st.data())
def test_stop_strings_are_not_emitted(tokenizer, text, data):
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(tokens)
    assume(whole)
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start:start + data.draw(st.integers(1, 8))]
    assume(not stop.endswith("\ufffd"))
    expected, shown = whole[:whole.find(stop)], ""
    for piece in pieces(tokenizer, tokens, [stop]):
        shown += piece
        assert expected.startswith(shown)
    assert shown == expected


@given(text=TEXTS, stops=st.lists(st.sampled_from(["END", "EN", "the", "京都", "👩‍👧", "\n\n"]),
                                  min_size=2, unique=True))
def test_none_of_several_stop_strings_is_emitted(tokenizer, text, stops):
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(tokens)
    shown = "".join(pieces(tokenizer, tokens, stops))
    assert whole.startswith(shown) and not any(stop in shown for stop in stops)
    assert shown == whole or any(whole.find(stop, len(shown)) == len(shown) for stop in stops)


def test_an_incomplete_character_is_emitted_only_at_the_end(tokenizer):
    tokens = tokenizer.encode("the 🙂", add_special_tokens=False).ids[:-1]
    made = pieces(tokenizer, tokens)
    assert "".join(made[:-1]).rstrip() == "the" and made[-1].strip("\ufffd ") == ""
    assert "".join(made) == tokenizer.decode(tokens)


def test_a_stop_string_before_an_incomplete_character_is_not_emitted():
    tokenizer = Tokenizer(models.BPE({"E": 0, "Nð": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.decode([0, 1]) == "EN\ufffd"
    assert "".join(pieces(tokenizer, [0, 1], ["EN"])) == ""


@given(stop=st.text("ab", min_size=1, max_size=7), texts=st.lists(st.text("ab", max_size=5)))
def test_matches_of_a_stop_string_are_found_across_pieces(stop, texts):
    found, text = _StopString(stop), ""
    for own in texts:
        ends = [len(text) + end for end in found.push(own)]
        text += own
        assert ends == [end for end in range(len(text) - len(own) + 1, len(text) + 1)
                        if text[:end].endswith(stop)]
        assert found.matched == max(size for size in range(len(stop)) if text.endswith(stop[:size]))


def test_stop_string_matching_is_linear_in_the_generated_text():
    found = _StopString("z" * 10**6)
    assert found.push("yz" * 10 + "z" * 10) == [] and found.matched == 11
    assert len(found._shorter) <= 12
    with pytest.raises(llmc.LlmcError, match="has 4097 characters; give at most 4096"):
        llmc.SamplingParams(stop=["z" * 4097])


def test_every_token_has_its_text_and_bytes(tokenizer):
    text = "the 🙂 the"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    made = b"".join(token_bytes(tokenizer, token) for token in tokens)
    assert made.removeprefix(b" ") == text.encode()  # sentencepiece begins with a space
    for token in tokens:
        assert token_bytes(tokenizer, token).decode(errors="replace") == \
            token_text(tokenizer, token)
    for size in range(1, len(tokens)):
        whole, last = tokenizer.decode(tokens[:size]), token_text(tokenizer, tokens[size - 1])
        assert "\ufffd" in whole + last or whole.endswith(last.lstrip(" "))
