"""What every frontend returns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx_graphsurgeon as gs
from tokenizers import Tokenizer

from llmc.compiler.frontend.origin import Origin

# Called with a model's config, its generation config, whether it has an encoder, and how it is
# quantized where the config does not say it, before anything slow is done with it; raises LlmcError
# where that cannot be compiled.
Check = Callable[[Mapping[str, Any], Mapping[str, Any], bool, str], None]


def unchecked(config: Mapping[str, Any], generation: Mapping[str, Any], has_encoder: bool,
              quantized: str) -> None:
    """Accept every model."""


def _no_tokens(tokenizer: Tokenizer) -> Sequence[int]:
    return ()


@dataclass(frozen=True)
class RawModel:
    """A stateless model as an ONNX graph, before any pass.

    Args:
        graph: inputs `input_ids` and perhaps `position_ids`, int64 [batch, seq]; output `logits`
            float32 [batch, seq, vocab_size]; parameters are constants that hold a `Weight`.
            Attention is a node `Sdpa` (domain llmc; q, k, v as [batch, heads, seq, head_dim],
            perhaps a bias of the scores; scale, window, softcap, causal, layer) where the model let
            the exporter say so. The hidden state after layer i is named `hidden_states.i` where the
            frontend knows it. Of an encoder-decoder model, the decoder: it also has an input
            `encoder_output` float32 [batch, mem_seq, hidden_size].
        config: the Hugging Face config as plain data.
        kind: huggingface, gguf or onnx.
        save_tokenizer: writes tokenizer files into a directory.
        generation: generation_config.json as plain data.
        notes: what the user may want to know, such as why all layers were exported.
        encoder: of an encoder-decoder model, the graph from `input_ids` to `encoder_output`.
        origin: the files that it was read from.
        end_tokens: called with the tokenizer, gives further EOS tokens.
    """

    graph: gs.Graph
    config: dict[str, Any]
    kind: Literal["huggingface", "gguf", "onnx"]
    save_tokenizer: Callable[[Path], None]
    generation: dict[str, Any]
    notes: tuple[str, ...] = ()
    encoder: gs.Graph | None = None
    origin: Origin = field(default_factory=Origin)
    end_tokens: Callable[[Tokenizer], Sequence[int]] = _no_tokens

    @property
    def architecture(self) -> str:
        return architecture_of(self.config)

    @property
    def config_sha256(self) -> str:
        """Digest of the config, keys sorted, without where it was loaded from."""
        kept = {key: value for key, value in self.config.items()
                if key not in ("_name_or_path", "transformers_version", "param_dir",
                               "tensor_parallel")}
        text = json.dumps(kept, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """`eos_token_id` or `bos_token_id`, from the generation config or else the config; without
        those that the vocabulary lacks, as where a small model has its family's config.
        """
        return tuple(token for token in token_ids(key, self.config, self.generation)
                     if 0 <= token < vocab_size)


def architecture_of(config: Mapping[str, Any]) -> str:
    """What a Hugging Face config calls its model."""
    return str((config.get("architectures") or [config.get("model_type", "unknown")])[0])


def token_ids(key: str, config: Mapping[str, Any], generation: Mapping[str, Any]) -> \
        tuple[int, ...]:
    """`eos_token_id` or the like, from the generation config or else the config."""
    value = generation.get(key, config.get(key))
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
