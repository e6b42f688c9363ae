"""EOS tokens from a model's config, generation config and tokenizer."""

import json
import shutil

import pytest

from llmc.compiler.api import _write_tokenizer
from llmc.compiler.frontend.raw import RawModel


def described(tiny_hf, tmp_path, config, generation=None, tokenizer=None, vocab_size=300):
    """Return the manifest's special tokens for these configs."""
    source = shutil.copytree(tiny_hf, tmp_path / "hf")
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer or {}))

    def save(directory):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / name, directory / name)

    (tmp_path / "case").mkdir()
    raw = RawModel(graph=None, config=config, kind="huggingface", save_tokenizer=save,
                   generation=generation or {})
    return _write_tokenizer(raw, tmp_path / "case", vocab_size)


@pytest.mark.parametrize(("config", "generation", "tokenizer", "ends"), [
    ({"eos_token_id": 7}, {}, {"eos_token": "</s>"}, (7,)),
    ({"eos_token_id": 7}, {"eos_token_id": [5, 7]}, {}, (5, 7)),
    ({}, {}, {"eos_token": "</s>"}, (2,)),
    ({}, {}, {"eos_token": {"content": "</s>"}}, (2,)),
    ({}, {}, {"eos_token": "nothing that is a token"}, ()),
    ({}, {}, {}, ()),
    ({"eos_token_id": 50256}, {}, {}, ()),  # a small model with its family's config
    ({"eos_token_id": [2, 300, -1]}, {}, {}, (2,)),
])
def test_eos_tokens_come_from_the_tokenizer_if_no_config_has_them(tiny_hf, tmp_path, config,
                                                                  generation, tokenizer, ends):
    assert described(tiny_hf, tmp_path, config, generation, tokenizer).eos_token_ids == ends


def test_a_bos_token_outside_the_vocabulary_is_ignored(tiny_hf, tmp_path):
    assert described(tiny_hf, tmp_path, {"bos_token_id": 300}).bos_token_id is None
