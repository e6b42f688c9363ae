"""LoRA adapters for tests: written as PEFT saves them, and merged into a torch model by hand."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers.pytorch_utils import Conv1D

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": False,
          "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "bias": "none"}
PREFIX = "base_model.model."


def linear_layers(model, pattern=".*"):
    """Names of the linear layers that a pattern matches, without the LM head."""
    return [name for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | Conv1D) and name != "lm_head"
            and re.search(pattern, name)]


def make(model, names, *, rank=4, seed=0, spread=0.15):
    """Random factors A [rank, in] and B [out, rank] of layers, by name."""
    rng = np.random.default_rng(seed)
    factors = {}
    for name in names:
        shape = tuple(model.get_submodule(name).weight.shape)
        out, width = shape[::-1] if isinstance(model.get_submodule(name), Conv1D) else shape
        factors[name] = tuple((spread * rng.standard_normal(size)).astype(np.float32)
                              for size in ((rank, width), (out, rank)))
    return factors


def tensors_of(factors):
    return {f"{PREFIX}{name}.lora_{part}.weight": matrix for name, pair in factors.items()
            for part, matrix in zip("AB", pair, strict=True)}


def save(directory, factors, *, tensors=(), **config):
    """Write a PEFT directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({**tensors_of(factors), **dict(tensors)}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return directory


def merged(model, factors, scale=2.0):
    """A copy of the model with scale · B · A added to each layer's weight."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, (down, up) in factors.items():
            module = model.get_submodule(name)
            delta = scale * torch.from_numpy(up.astype(np.float64) @ down.astype(np.float64))
            module.weight += (delta.T if isinstance(module, Conv1D) else delta).float()
    return model


def adapt_ends(model, directory):
    """Write a PEFT directory that changes the embedding and the head; return the changed model.

    Of a tied embedding and head, each is changed by itself.
    """
    rng = np.random.default_rng(3)
    modules = {id(module): name for name, module in model.named_modules()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocab, hidden = table.weight.shape
    left, right, head_left, head_right = (
        (0.3 * rng.standard_normal(shape)).astype(np.float32)
        for shape in ((4, vocab), (hidden, 4), (4, hidden), (vocab, 4)))
    names = [f"{PREFIX}{modules[id(own)]}" for own in (table, head)]
    save(directory, {}, tensors={
        f"{names[0]}.lora_embedding_A": left, f"{names[0]}.lora_embedding_B": right,
        f"{names[1]}.lora_A.weight": head_left, f"{names[1]}.lora_B.weight": head_right,
        # PEFT saves the base's own, too.
        **{f"{name}.base_layer.weight": own.weight.detach().numpy().copy()
           for name, own in zip(names, (table, head), strict=True)}})
    adapted = copy.deepcopy(model)
    with torch.no_grad():
        for own, delta in ((adapted.get_input_embeddings(), (right @ left).T),
                           (adapted.get_output_embeddings(), head_right @ head_left)):
            own.weight = torch.nn.Parameter(own.weight + 2 * torch.from_numpy(delta))
    return adapted


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].numpy()


def log_probabilities(model, completion):
    """Of each generated token, by the torch model."""
    ids = [*completion.prompt_token_ids, *completion.token_ids]
    logits = torch.log_softmax(torch.from_numpy(logits_of(model, ids)).double(), -1)
    return [float(logits[index - 1, ids[index]])
            for index in range(len(completion.prompt_token_ids), len(ids))]


def assert_generates(model, completion, tolerance=1e-5):
    """Check that the completion is the torch model's greedy one, with its log-probabilities."""
    ids = [*completion.prompt_token_ids, *completion.token_ids]
    best = logits_of(model, ids)[len(completion.prompt_token_ids) - 1:-1].argmax(-1).tolist()
    assert best == list(completion.token_ids)
    given = [logprobs.chosen for logprobs in completion.logprobs]
    np.testing.assert_allclose(given, log_probabilities(model, completion), atol=tolerance)
