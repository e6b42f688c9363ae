"""The original of a compiled model in transformers, the reference of `diff` and `eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmc.compiler.frontend.huggingface import find_directory
from llmc.compiler.graph.names import HIDDEN_STATE
from llmc.errors import LlmcError, reason_of

Model = Any  # a torch module of transformers


def load_reference(model: str | Path, dtype: str = "float32", takes_media: bool = False) -> Model:
    """Load a Hugging Face directory, hub id or .gguf file as a torch module in `dtype`.

    Args:
        takes_media: load its encoders of images and audio, too.

    Raises:
        LlmcError: the model does not exist, or transformers cannot load it.
    """
    import torch
    from transformers import AutoConfig

    from llmc.compiler.frontend.checkpoint import read_json
    from llmc.compiler.frontend.parts import (
        causal_lm_class,
        encoder_decoder_class,
        multimodal_class,
    )
    from llmc.compiler.frontend.thinker import thinker_config
    from llmc.compiler.quant.checkpoint import method_of

    path = Path(model)
    is_gguf = path.suffix == ".gguf"
    directory = path.parent if is_gguf else find_directory(model)
    source: dict[str, Any] = {"pretrained_model_name_or_path": directory,
                              **({"gguf_file": path.name} if is_gguf else {})}
    try:
        whole = AutoConfig.from_pretrained(**source)
        config = thinker_config(whole)
        if config is not whole:
            source["config"] = config
        # Falcon's eager attention adds ALiBi twice.
        kind = encoder_decoder_class(config) if config.is_encoder_decoder else \
            (takes_media and multimodal_class(config)) or causal_lm_class(config)
        return kind.from_pretrained(
            **source, dtype=getattr(torch, dtype),
            attn_implementation="sdpa" if getattr(config, "alibi", False) else "eager").eval()
    except Exception as error:  # transformers raises errors of many types
        method = None if is_gguf else method_of(read_json(directory / "config.json"))
        raise LlmcError(f"transformers cannot load '{model}' ({reason_of(error)})" + (
            f"; it is quantized by {method}: give the original, unquantized model"
            if method else "")) from error


def reference_logits(model: Model, ids: Sequence[int],
                     media: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
    """Compute logits float32 [num_tokens, vocab_size] in one pass without a KV cache.

    `media` is what the model's processor gives for its images and audio clips.
    """
    import torch

    with torch.no_grad():
        logits = model(**_inputs(model, ids, media or {}), use_cache=False).logits[0]
        return np.asarray(logits.float().numpy())


def reference_values(model: Model, ids: Sequence[int], kv_dtype: str = "",
                     images: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Compute the hidden state after each layer, and the logits.

    Hidden states are float32 [num_tokens, hidden_size], logits [num_tokens, vocab_size]. A layer
    that is not called, such as one that attends to images, leaves the state as it is. With
    `kv_dtype` float8_e4m3fn, keys and values are rounded to it before attention reads them, as in a
    compiled model's KV cache. `images` is what the model's processor gives for its images.
    """
    import torch

    from llmc.compiler.frontend.parts import text_prefix

    depth = model.config.get_text_config().num_hidden_layers
    layers: Sequence[Model] = next((
        module for name, module in model.named_modules() if name.startswith(text_prefix(model))
        and isinstance(module, torch.nn.ModuleList) and len(module) == depth), [])
    seen: dict[str, np.ndarray] = {}

    def keep(name: str) -> Any:
        def hook(module: Model, arguments: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            seen.setdefault(
                name, hidden.detach().reshape(-1, hidden.shape[-1]).float().numpy().copy())
        return hook

    handles = [layer.register_forward_hook(keep(HIDDEN_STATE.format(index)))
               for index, layer in enumerate(layers)]
    cache = {"past_key_values": _float8_cache(), "use_cache": True} if kv_dtype else \
        {"use_cache": False}
    try:
        with torch.no_grad():
            logits = model(**_inputs(model, ids, images or {}), **cache).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    for index in range(1, len(layers)):  # a layer that is not called leaves the state as it is
        if (before := HIDDEN_STATE.format(index - 1)) in seen:
            seen.setdefault(HIDDEN_STATE.format(index), seen[before])
    return {**seen, "logits": np.asarray(logits.float().numpy())}


def reference_rows(model: Model, images: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Compute the rows of the image encoder, and those of deep layers.

    Each is float32 [num_rows, hidden_size].
    """
    import torch

    from llmc.compiler.frontend.image import features_owner, placed_rows

    with torch.no_grad():
        output = features_owner(model).get_image_features(
            **_tensors(model, images), return_dict=True)
        found = getattr(output, "pooler_output", None)
        found = placed_rows(model, output)[None] if found is None else found
        deep = getattr(output, "deepstack_features", None) or ()
        rows = [torch.cat([own.reshape(-1, own.shape[-1]) for own in each])
                for each in (found, *deep)]
    return [np.asarray(own.float().numpy()) for own in rows]


def reference_speech(model: Model, features: np.ndarray, ids: Sequence[int]) -> \
        dict[str, np.ndarray]:
    """Compute the cross-attention KV, the hidden state after each decoder layer, and the logits.

    Args:
        features: float32 [num_channels, num_frames] of one window.
        ids: token ids of the decoder.
    """
    import torch

    seen: dict[str, np.ndarray] = {}

    def keep(name: str) -> Any:
        def hook(module: Model, arguments: Any, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            seen[name] = rows.detach().reshape(-1, rows.shape[-1]).float().numpy().copy()
        return hook

    handles = []
    for index, layer in enumerate(model.get_decoder().layers):
        for name, module in ((f"memory_key_{index}", layer.encoder_attn.k_proj),
                             (f"memory_value_{index}", layer.encoder_attn.v_proj),
                             (HIDDEN_STATE.format(index), layer)):
            handles.append(module.register_forward_hook(keep(name)))
    try:
        with torch.no_grad():
            logits = model(input_features=torch.from_numpy(features)[None],
                           decoder_input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return {**seen, "logits": np.asarray(logits.float().numpy())}


def reference_clip_rows(model: Model, arrays: Mapping[str, np.ndarray], row_token: int,
                        num_rows: int) -> list[np.ndarray]:
    """Compute the rows of the audio encoder for a clip, float32 [num_rows, hidden_size].

    Args:
        arrays: what the model's processor gives for the clip.
        row_token: token id in place of a row.
        num_rows: rows of the clip.
    """
    import torch

    from llmc.compiler.frontend.audio import rows_of_clip

    with torch.no_grad():
        rows = rows_of_clip(model, _tensors(model, arrays), row_token, num_rows)
    return [np.asarray(rows.float().numpy())]


def _inputs(model: Model, ids: Sequence[int], media: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Inputs of a forward pass.

    Prompts with media have an attention mask: without it, Omni models number rows as text.
    """
    import torch

    tokens = {"input_ids": torch.tensor([list(ids)])}
    if media:
        tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])
    return {**tokens, **_tensors(model, media)}


def _tensors(model: Model, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Convert a processor's arrays to tensors, those of floats to the model's dtype."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: own.to(model.dtype) if own.is_floating_point() else own
            for name, own in tensors.items()}


def _float8_cache() -> Any:
    """Create an empty KV cache that rounds keys and values to float8_e4m3fn."""
    import torch
    from transformers import DynamicCache

    class Float8Cache(DynamicCache):
        def update(self, keys: Any, values: Any, *arguments: Any, **options: Any) -> Any:
            kept = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (keys, values))
            return super().update(*kept, *arguments, **options)

    return Float8Cache()


@dataclass(frozen=True)
class Greedy:
    """Greedy tokens, and their logits float32 [num_tokens, vocab_size]."""

    tokens: tuple[int, ...]
    logits: np.ndarray


def reference_greedy(model: Model, prompt: Sequence[int], max_tokens: int,
                     eos_token_ids: Sequence[int] = (),
                     media: Mapping[str, np.ndarray] | None = None) -> Greedy:
    """Generate greedy tokens, ignoring the model's generation_config, such as penalties.

    `media` is what the model's processor gives for its images and audio clips.
    """
    import torch
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=list(eos_token_ids) or None,
        pad_token_id=0)
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids),
                             **_tensors(model, media or {}), output_logits=True,
                             return_dict_in_generate=True)
    return Greedy(tuple(out.sequences[0, len(prompt):].tolist()),
                  np.stack([step[0].float().numpy() for step in out.logits]))
