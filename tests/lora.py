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


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]  # stacked parameters


def adapt_experts(model, layers, *, rank=2, alpha=8, use_rslora=False, seed=8, spread=0.2):
    """Tensors as PEFT saves them of stacked parameters, of random factors; and the changed model.

    PEFT's ParamWrapper adds an einsum of both factors. Those of a nested wrapper, of the first
    parameter, are named X.base_layer. Experts may be stored as [experts, in, out].

    Args:
        model: the base.
        layers: numbers of layers.
        rank, alpha, use_rslora: of the adapter's config.
        seed, spread: of the factors.
    """
    rng, tensors, adapted = np.random.default_rng(seed), {}, copy.deepcopy(model)
    scale = alpha / (rank**0.5 if use_rslora else rank)
    for module in (f"model.layers.{layer}.mlp.experts" for layer in layers):
        turned = getattr(adapted.get_submodule(module), "is_transposed", False)
        for name, wrapped in (("gate_up_proj", f"{module}.base_layer"), ("down_proj", module)):
            parameter = adapted.get_parameter(f"{module}.{name}")
            count, out, width = parameter.shape
            out, width = (width, out) if turned else (out, width)
            down, up = ((spread * rng.standard_normal(shape)).astype(np.float32)
                        for shape in ((rank * count, width), (out, rank * count)))
            tensors |= {f"{PREFIX}{wrapped}.lora_A.weight": down,
                        f"{PREFIX}{wrapped}.lora_B.weight": up}
            delta = scale * torch.einsum(
                "ore,eri->eoi", torch.from_numpy(up).reshape(out, rank, count),
                torch.from_numpy(down).reshape(count, rank, width))
            with torch.no_grad():
                parameter += delta.transpose(1, 2) if turned else delta
    return tensors, adapted


def adapt_single_experts(model, modules, *, seed=9, scale=2.0, spread=0.2):
    """The same of linear layers of single experts, as checkpoints had before transformers 5.

    Args:
        model: the base, with stacked experts.
        modules: by a name in the adapter, the layer, the expert, the matrix (gate_proj, up_proj or
            down_proj) and the rank.
        seed, scale, spread: of the factors.
    """
    rng, factors, adapted = np.random.default_rng(seed), {}, copy.deepcopy(model)
    for name, (layer, expert, kind, rank) in modules.items():
        experts = adapted.get_submodule(f"model.layers.{layer}.mlp.experts")
        inner = experts.down_proj.shape[2]
        matrix = {"gate_proj": experts.gate_up_proj[expert, :inner],
                  "up_proj": experts.gate_up_proj[expert, inner:],
                  "down_proj": experts.down_proj[expert]}[kind]
        down, up = ((spread * rng.standard_normal(shape)).astype(np.float32)
                    for shape in ((rank, matrix.shape[1]), (matrix.shape[0], rank)))
        factors[name] = down, up
        with torch.no_grad():
            matrix += scale * torch.from_numpy(up @ down)
    return tensors_of(factors), adapted


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
