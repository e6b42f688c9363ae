"""Tiny random models of each family whose outputs are pooled, and their reference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

VOCAB = 101
_BERT = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=100, num_hidden_layers=3,
             num_attention_heads=4, max_position_embeddings=66, type_vocab_size=2, pad_token_id=0)
_ROBERTA = {**_BERT, "pad_token_id": 1, "type_vocab_size": 1}
_LLAMA = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=100, num_hidden_layers=3,
              num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
              pad_token_id=0, bos_token_id=1, eos_token_id=2)
_HEADS = {**_LLAMA, "head_dim": 16}

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": dict(vocab_size=VOCAB, dim=64, hidden_dim=100, n_layers=3, n_heads=4,
                       max_position_embeddings=64, pad_token_id=0),
    "mpnet": _ROBERTA,
    "albert": {**_BERT, "embedding_size": 32},
    "electra": {**_BERT, "embedding_size": 32},
    "modernbert": {**_BERT, "global_attn_every_n_layers": 2, "local_attention": 8},
    "nomic_bert": _BERT,
    "jina_embeddings_v3": _ROBERTA,
    "eurobert": _LLAMA,
    "deberta-v2": {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "ernie": _BERT,
    "rembert": {**_BERT, "input_embedding_size": 32, "output_embedding_size": 32},
}
DECODERS: dict[str, dict[str, Any]] = {
    "qwen3": _HEADS,
    "mistral": {**_HEADS, "sliding_window": 8},
    "llama": _LLAMA,
    "gemma3_text": {**_HEADS, "sliding_window": 8, "num_hidden_layers": 4,
                    "use_bidirectional_attention": True},
    "gpt2": dict(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64,
                 eos_token_id=2, bos_token_id=1),
}
# Attention that llmc lacks, and code that torch does not export.
REFUSED = ("deberta-v2", "jina_embeddings_v3")
CLASSIFIERS = {
    "bert": ("classify", "token_classify"), "roberta": ("classify", "token_classify"),
    "distilbert": ("classify", "token_classify"), "mpnet": ("classify",), "albert": ("classify",),
    "electra": ("classify",), "modernbert": ("classify", "token_classify"),
    "nomic_bert": ("classify",), "qwen3": ("classify",), "llama": ("token_classify",),
    "mistral": ("classify",), "gemma3_text": ("classify",), "gpt2": ("classify",)}
_AUTO = {"embed": AutoModel, "classify": AutoModelForSequenceClassification,
         "token_classify": AutoModelForTokenClassification}


def save(name: str, fields: Mapping[str, Any], directory: Path, task: str = "embed",
         pooling: str = "", **others: Any) -> torch.nn.Module:
    """Write a random model of a family, and modules.json where a pooling is given."""
    torch.manual_seed(3)
    config = CONFIG_MAPPING[name](**{**fields, **others})
    config._attn_implementation = "eager"
    model = _AUTO[task].from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 if parameter.dim() > 1 else 0.2)
            if parameter.dim() == 1:
                parameter.add_(0.5)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    if pooling:
        write_modules(directory, pooling, model.config.hidden_size)
    return model


def write_modules(directory: Path, pooling: str, width: int, *more: str) -> None:
    """Write modules.json as SentenceTransformers does."""
    names = ["Transformer", "Pooling", *more]
    (directory / "modules.json").write_text(json.dumps([
        {"idx": i, "name": str(i), "path": "" if not i else f"{i}_{name}",
         "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(names)]))
    folder = directory / "1_Pooling"
    folder.mkdir(exist_ok=True)
    modes = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    (folder / "config.json").write_text(json.dumps({
        "word_embedding_dimension": width,
        **{f"pooling_mode_{name}": kind == pooling for kind, name in modes.items()}}))


WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "river", "bank", "runs", "fast", "slow",
         "is", "not", "query", "document", "about", "food", "animals", "water", "cold", "warm"]


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of words, with BERT's special tokens and token types."""
    vocab = {token: index for index, token in enumerate(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *"abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]",
         "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}))


def texts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Random texts without special tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 100, length).tolist() for length in lengths]


def assert_rows(rows: Sequence[np.ndarray], expected: Sequence[np.ndarray],
                tolerance: float) -> None:
    """Assert that rows equal others, relative to their largest element."""
    assert len(rows) == len(expected)
    for row, truth in zip(rows, expected, strict=True):
        assert row.shape == truth.shape
        assert np.abs(row - truth).max() <= tolerance * max(1.0, np.abs(truth).max())


def reference(model: Any, ids: Sequence[int], pooling: str = "",
              types: Sequence[int] = ()) -> np.ndarray:
    """The pooled hidden states of one text, or a classifier's logits, by transformers."""
    more = {"token_type_ids": torch.tensor([list(types)])} if types else {}
    with torch.no_grad():
        output = model(input_ids=torch.tensor([list(ids)]),
                       attention_mask=torch.ones((1, len(ids)), dtype=torch.int64), **more)[0]
    rows = output[0].double().numpy()
    if not pooling:
        return rows
    return {"cls": rows[0], "mean": rows.mean(0), "last": rows[-1]}[pooling]
