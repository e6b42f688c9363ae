"""Prompts with images: compiled encoders and language models generate as transformers does."""

import inspect

import numpy as np
import pytest
import torch
from image_models import MODELS, images, write_model

import llmc

GREEDY = llmc.SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)
COMMON = ("llava",)  # the others are thorough


def expected(model, prompt, token, count=10):
    """Greedy tokens and their log-probabilities by transformers; `token` is that of rows."""
    arrays = [own.item.arrays for own in prompt.ranges]
    given = {name: torch.from_numpy(np.concatenate([own[name] for own in arrays]))
             for name in (arrays[0] if arrays else ())}
    ids = torch.tensor([prompt.token_ids])
    kinds = {name: (ids == token).int() for name in ("mm_token_type_ids", "token_type_ids")
             if given and name in inspect.signature(model.forward).parameters}
    with torch.no_grad():
        made = model.generate(ids, **given, **kinds, max_new_tokens=count, do_sample=False,
                              eos_token_id=None, pad_token_id=0, output_logits=True,
                              return_dict_in_generate=True)
    return made.sequences[0, ids.shape[1]:].tolist(), \
        [float(logits[0].double().log_softmax(-1).max()) for logits in made.logits]


def assert_generates(model, llm, prompt, completion, tolerance=1e-4):
    """As transformers does; `prompt` has `prompt` and `images`."""
    inputs = llm.processor.description.image
    token = inputs.placeholder_id if inputs.row_token_id is None else inputs.row_token_id
    read = llm.media_prompt(prompt["prompt"], images=prompt["images"])
    tokens, logprobs = expected(model, read, token, len(completion.token_ids))
    assert list(completion.token_ids) == tokens
    assert [own.chosen for own in completion.logprobs] == pytest.approx(logprobs, abs=tolerance)


def prompts_of(llm):
    """Prompts with 0, 1 and 3 images of odd sizes."""
    own = llm.processor.placeholders["image"]
    return [{"prompt": "hello there", "images": []},
            {"prompt": f"see {own} now", "images": images(1)},
            {"prompt": f"a {own} b {own} d {own} c", "images": images(3)}]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.thorough] * (name not in COMMON)) for name in MODELS])
def test_families_generate_as_transformers(name, tp_size, tmp_path):
    model = write_model(name, tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", tp_size=tp_size)
    with llmc.LLM(tmp_path / "case") as llm:
        prompts = prompts_of(llm)
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model, llm, prompt, completion)
