"""Beam search beside transformers."""

from __future__ import annotations

import torch

import llmc

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [50, 51], [100, 3, 3, 3, 88]]


def search(beam_width, max_tokens=12, **params):
    return llmc.SamplingParams(beam_width=beam_width, max_tokens=max_tokens, **params)


def end_with(llm, monkeypatch, ends):
    """Make these the model's end tokens."""
    tokenizer = llm.manifest.tokenizer.model_copy(update={"eos_token_ids": tuple(ends)})
    monkeypatch.setattr(llm, "manifest", llm.manifest.model_copy(update={"tokenizer": tokenizer}))


def transformers_beams(model, prompt, params, ends, **options):
    """Per beam: tokens, the beam that each continued, and the score; None where there is none."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            num_beams=params.beam_width, num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens, length_penalty=params.length_penalty,
            early_stopping=params.early_stopping, eos_token_id=list(ends) or None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, **options)
    found = []
    for tokens, parents, score in zip(out.sequences, out.beam_indices, out.sequences_scores,
                                      strict=True):
        count = int((parents >= 0).sum())
        found.append(None if score < -1e8 else (
            tokens[len(prompt):len(prompt) + count].tolist(), parents[:count].tolist(),
            float(score)))
    return found


def assert_equal(llm, model, prompts, params, ends=(), tolerance=2e-5, **options):
    """All beams of all prompts are those of transformers, their scores within the tolerance."""
    beams = llm.beam_search(prompts, params)
    for b, prompt in enumerate(prompts):
        expected = transformers_beams(model, prompt, params, ends, **options)
        for k, truth in enumerate(expected):
            length = beams.sequence_length[b, k]
            if truth is None:
                assert length == 0
                continue
            tokens, parents, score = truth
            where = f"prompt {b}, beam {k}: score {beams.scores[b, k]}, transformers has {score}"
            assert beams.output_ids[:length, b, k].tolist() == tokens, where
            assert beams.parent_ids[:length, b, k].tolist() == parents, where
            assert abs(beams.scores[b, k] - score) <= tolerance * max(1, abs(score)), where
            total = beams.scores[b, k] * length ** params.length_penalty
            assert abs(beams.cum_log_probs[b, k] - total) <= 1e-5 * abs(total)
            assert (beams.output_ids[length:, b, k] == (min(ends) if ends else -1)).all()
            assert (beams.parent_ids[length:, b, k] == -1).all()
    return beams
