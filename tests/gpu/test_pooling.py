"""Rows of embedding models and classifiers on the CUDA engine equal transformers', by dtype."""

import numpy as np
import pooling
import pytest

import llmc
from llmc.runtime.core.pooling import Input

# Alone, in company, single tokens, several tiles of the attention kernel.
LENGTHS = (5, 1, 17, 40, 9, 64, 1, 33)
FIELDS = {**pooling.ENCODERS, **pooling.DECODERS}
CASES = [(name, task) for name in FIELDS if name not in pooling.REFUSED
         for task in ("embed", *pooling.CLASSIFIERS.get(name, ()))]
# Of rows' largest element: each of a few layers rounds its results.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
# Random weights of unit scale amplify roundings more than trained ones.
LONG = dict(vocab_size=pooling.VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=2, pad_token_id=0)


def save(name, path, task="embed", fields=None, kind=None):
    kind = kind or ("last" if name in pooling.DECODERS else "mean")
    kind, labels = (kind, {}) if task == "embed" else ("", {"num_labels": 3})
    return pooling.save(name, fields or FIELDS[name], path, task, kind, **labels), kind


def check(case, model, kind, lengths, tolerance, types=(), **options):
    """Rows of all texts together, and of each alone, equal transformers'."""
    inputs = [Input(ids, own) for ids, own in zip(
        pooling.texts(lengths), types or [()] * len(lengths), strict=True)]
    expected = [pooling.reference(model, own.token_ids, kind, own.token_type_ids)
                for own in inputs]
    with llmc.LLM(case, **options) as llm:
        pooling.assert_rows(llm.pool(inputs), expected, tolerance)
        for own, truth in zip(inputs, expected, strict=True):
            pooling.assert_rows(llm.pool([own]), [truth], tolerance)


@pytest.mark.parametrize(("name", "task"), CASES)
def test_rows_are_transformers(extension, name, task, tmp_path):
    model, kind = save(name, tmp_path / "hf", task)
    limit = model.config.max_position_embeddings if name != "gpt2" else 64
    lengths = [min(length, limit - 2) for length in LENGTHS]
    for dtype, tolerance in TOLERANCE.items():
        case = tmp_path / dtype
        llmc.compile(tmp_path / "hf", case, target="cuda", dtype=dtype)
        if dtype == "float32":
            check(case, model, kind, lengths, tolerance, max_batch_size=6)
            continue
        with llmc.LLM(case) as llm:
            rows = llm.pool([Input(ids) for ids in pooling.texts(lengths)])
        truths = [pooling.reference(model, ids, kind) for ids in pooling.texts(lengths)]
        scale = max(np.linalg.norm(truth) for truth in truths)  # some logits of few may be near 0
        for row, truth in zip(rows, truths, strict=True):
            error = np.linalg.norm(row - truth) / scale
            assert error < tolerance, f"{error} with {dtype}"


@pytest.mark.parametrize("heads", [4, 2, 1])  # head_dim 32, 64, 128
@pytest.mark.parametrize("name", ["modernbert", "eurobert"])
def test_long_texts_and_windows_on_tensor_cores(extension, heads, name, tmp_path):
    fields = {**LONG, "num_attention_heads": heads, "max_position_embeddings": 700,
              **({"num_key_value_heads": 1} if name == "eurobert" else
                 {"local_attention": 64, "global_attn_every_n_layers": 2})}
    model, kind = save(name, tmp_path / "hf", fields=fields)
    lengths = [700, 3, 257, 64, 65, 1, 128]
    for dtype, tolerance in TOLERANCE.items():
        llmc.compile(tmp_path / "hf", tmp_path / dtype, target="cuda", dtype=dtype)
        with llmc.LLM(tmp_path / dtype) as llm:
            rows = llm.pool([Input(ids) for ids in pooling.texts(lengths)])
        for ids, row in zip(pooling.texts(lengths), rows, strict=True):
            truth = pooling.reference(model, ids, kind)
            assert np.linalg.norm(row - truth) / np.linalg.norm(truth) < tolerance


@pytest.mark.parametrize("kind", ["cls", "mean", "last"])
def test_every_pooling_and_type_of_token(extension, kind, tmp_path):
    model, _ = save("bert", tmp_path / "hf", kind=kind)
    llmc.compile(tmp_path / "hf", tmp_path / "case", target="cuda", dtype="float32")
    check(tmp_path / "case", model, kind, LENGTHS, 1e-4)


def test_pairs_of_texts_have_token_types(extension, tmp_path):
    model, kind = save("bert", tmp_path / "hf", "classify")
    llmc.compile(tmp_path / "hf", tmp_path / "case", target="cuda", dtype="float32")
    halves = [[0] * (n // 2) + [1] * (n - n // 2) for n in LENGTHS]
    check(tmp_path / "case", model, kind, LENGTHS, 1e-4, types=halves)
    check(tmp_path / "case", model, kind, LENGTHS, 1e-4)  # not those of an earlier step


def test_causal_models_take_long_texts_in_chunks(extension, tmp_path):
    model, kind = save("qwen3", tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", target="cuda", dtype="float32")
    check(tmp_path / "case", model, kind, LENGTHS, 1e-4, max_num_batched_tokens=16,
          max_batch_size=4, block_size=4)
