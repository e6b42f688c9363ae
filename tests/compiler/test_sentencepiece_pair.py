"""The tokenizer of Marian models, from handwritten files."""

import json
import shutil

import pytest
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import import_protobuf

from llmc import LlmcError
from llmc.compiler.frontend.huggingface import copy_tokenizer

READ = {"▁": -3.0, "▁the": -2.0, "▁sea": -2.5, "s": -4.0, "e": -4.0, "a": -4.1, "t": -4.2,
        "h": -4.3, "is": -2.2, "i": -5.0}
WRITTEN = ["▁das", "▁Meer", "sea", "!"]


@pytest.fixture
def directory(tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    proto = import_protobuf().ModelProto()
    proto.trainer_spec.model_type = 1
    for piece, score in {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, **READ}.items():
        proto.pieces.add(piece=piece, score=score)
    (source / "source.spm").write_bytes(proto.SerializeToString())
    tokens = ["</s>", "<unk>", ">>deu<<", *sorted([*READ, *WRITTEN]), "<pad>"]
    (source / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (source / "tokenizer_config.json").write_text("{}")
    return source


def convert(directory):
    target = directory.parent / "target"
    target.mkdir()
    copy_tokenizer(directory, target)
    return Tokenizer.from_file(str(target / "tokenizer.json"))


@pytest.mark.parametrize(("text", "tokens"), [
    ("the sea", ["▁the", "▁sea", "</s>"]),
    ("  the   sea ", ["▁the", "▁sea", "</s>"]),
    ("theseais", ["▁the", "s", "e", "a", "is", "</s>"]),  # not the decode-only `sea`
    (">>deu<< the sea", [">>deu<<", "▁the", "▁sea", "</s>"]),
    ("the sea?", ["▁the", "▁sea", "<unk>", "</s>"]),
])
def test_text_is_encoded_with_the_source_pieces(directory, text, tokens):
    tokenizer = convert(directory)
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode(text).ids] == tokens


def test_ids_follow_the_vocabulary_and_all_pieces_decode(directory):
    tokenizer = convert(directory)
    ids = json.loads((directory / "vocab.json").read_text())
    assert tokenizer.get_vocab() == ids
    written = [ids[token] for token in ("<pad>", "▁das", "▁Meer", "!", "</s>")]
    assert tokenizer.decode(written) == "das Meer!"


@pytest.mark.parametrize(("damage", "match"), [
    (lambda d: (d / "vocab.json").write_text('{"a": 0}'), "has no </s> or no <unk>"),
    (lambda d: (d / "vocab.json").write_text('{"</s>": 0, "<unk>": 5}'), "does not number its pi"),
    (lambda d: shutil.copy(d / "vocab.json", d / "target_vocab.json"), "a separate target vo"),
    (lambda d: (d / "source.spm").write_bytes(b"\xff"), "cannot be read"),
    (lambda d: (d / "vocab.json").unlink(), "cannot be read"),
])
def test_unconvertible_tokenizers_raise_an_llmc_error(directory, damage, match):
    damage(directory)
    with pytest.raises(LlmcError, match=match + ".*; put a tokenizer.json there"):
        convert(directory)
