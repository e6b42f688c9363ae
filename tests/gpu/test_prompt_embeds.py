"""Prompts with rows in place of token embeddings on a GPU: as transformers' inputs_embeds."""

import families
import numpy as np
import pytest
import torch

import llmc

GREEDY = llmc.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def greedy(model, ids, rows):
    """Greedy tokens by transformers; -1 among the ids is the next row."""
    ids = torch.tensor(ids)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids.clamp(min=0)).clone()
        embeds[ids == -1] = torch.from_numpy(rows)
        made = model.generate(inputs_embeds=embeds[None], max_new_tokens=8, do_sample=False,
                              eos_token_id=None, pad_token_id=0)
    return tuple(made[0].tolist())


@pytest.mark.parametrize(("family", "dtype"), [
    ("llama", "float32"), ("gemma3_text", "float32"), ("gpt2", "float32"), ("mamba2", "float32"),
    ("qwen3_moe", "float32"), ("llama", "bfloat16")])
def test_rows_in_chunks_beside_decoding_and_after_preemption(extension, family, dtype, tmp_path):
    """Chunks of one row too, in steps where all others decode."""
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 dtype=dtype, enable_prompt_embeds=True)
    ids = [[-1] * 12, [5, 9, *[-1] * 9, 7], [11, 3, 8], [4, *[-1] * 12], [-1] * 25, [-1]]
    width = model.get_input_embeddings().weight.shape[1]
    rng = np.random.default_rng(3)
    rows = [0.3 * rng.standard_normal((own.count(-1), width)).astype(np.float32) for own in ids]
    prompts = [{"prompt_token_ids": own, "prompt_embeds": given} if len(given) else own
               for own, given in zip(ids, rows, strict=True)]
    expected = [greedy(model, *own) for own in zip(ids, rows, strict=True)]
    for options in ({}, {"max_num_batched_tokens": 13, "max_batch_size": 4, "block_size": 4,
                         "kv_cache_tokens": 96}):
        with llmc.LLM(tmp_path / "case", **options) as llm:
            made = [own.token_ids for own in llm.generate(prompts, GREEDY)]
        same = sum(own == other for own, other in zip(made, expected, strict=True))
        assert same == len(ids) if dtype == "float32" else same >= len(ids) // 2
