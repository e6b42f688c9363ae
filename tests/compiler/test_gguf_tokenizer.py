"""Tokenizer settings of GGUF files besides the vocabulary."""

import gguf
import pytest
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaTokenizer

from llmc.compiler.frontend import gguf_file
from llmc.compiler.frontend.gguf_header import read_header
from llmc.compiler.frontend.gguf_tokenizer import end_tokens, sampling

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "a",
          "he", "▁he", "▁a"]
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def write(path, fields):
    """Write a GGUF file of a SentencePiece vocabulary, without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"llama.block_count": 1, "llama.embedding_length": 8,
                       "llama.feed_forward_length": 8, "llama.attention.head_count": 1,
                       "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
                       "tokenizer.ggml.unknown_token_id": 0, **fields}.items():
        {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
         str: writer.add_string}[type(value)](key, value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([float(-index) for index in range(len(TOKENS))])
    writer.add_token_types([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 7])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def saved(tmp_path, **fields):
    """Return the tokenizer folder that the compiler writes for the file."""
    path = write(tmp_path / "m.gguf", {key.replace("__", "."): value
                                       for key, value in fields.items()})
    target = tmp_path / "tokenizer"
    files = gguf_file._tokenizer_files(path, read_header(path), LlamaConfig())
    gguf_file._write_files(files, target)
    return target


@pytest.mark.parametrize("prefix", [None, True, False])
def test_add_space_prefix_follows_the_file(tmp_path, prefix):
    fields = {} if prefix is None else {"tokenizer__ggml__add_space_prefix": prefix}
    target = saved(tmp_path, **fields)
    own = Tokenizer.from_file(str(target / "tokenizer.json"))
    first, text = ("he", " a") if prefix is False else ("▁he", "a")
    assert own.encode("he a", add_special_tokens=False).tokens == [first, "▁a"]
    assert own.decode([TOKENS.index("▁a")]) == text
    again = LlamaTokenizer.from_pretrained(target)
    assert again.tokenize("he a") == [first, "▁a"]


def test_named_chat_templates_are_read(tmp_path):
    target = saved(tmp_path, tokenizer__chat_template="D", tokenizer__chat_template__tool_use="T")
    assert (target / "chat_template.jinja").read_text() == "D"
    assert (target / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"


def vocabulary(*texts):
    return Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}))


@pytest.mark.parametrize(("fields", "texts", "ends"), [
    ({}, ("a", "</s>"), ()),
    ({"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 7}, (), (0, 7)),
    ({}, ("a", "<|im_end|>", "<|eom_id|>", "<end_of_turn>"), (2, 1, 3)),
    ({}, ("<|end|>", "a"), (0,)), ({}, ("<|end|>", "<|return|>", "<|call|>"), (1, 2)),
])
def test_end_of_turn_tokens_are_those_of_llama_cpp(tmp_path, fields, texts, ends):
    header = read_header(write(tmp_path / "m.gguf", fields))
    assert end_tokens(header, vocabulary(*texts)) == ends


def test_sampling_defaults_have_the_names_of_generation_config(tmp_path):
    header = read_header(write(tmp_path / "m.gguf", {
        "general.sampling.temp": 0.6, "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.25, "general.sampling.mirostat": 1}))
    assert sampling(header) == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.25}
