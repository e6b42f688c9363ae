"""The result of every frontend: `RawModel`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import onnx_graphsurgeon as gs
from tokenizers import Tokenizer

from llmc.artifacts.manifest import (
    AttendedRows,
    Bidirectional,
    DraftChain,
    DraftKind,
    FeatureRows,
    PositionGrid,
)
from llmc.artifacts.vision_input import VisionInput
from llmc.compiler.frontend.origin import Origin
from llmc.compiler.graph.image_samples import ImageSample
from llmc.compiler.graph.weights import Weight
from llmc.runtime.multimodal.items import Modality
from llmc.runtime.multimodal.processor import ProcessorDescription

if TYPE_CHECKING:
    from llmc.compiler.frontend.pooling import PoolingPlan


class Check(Protocol):
    """A check of a model before its slow export; raises LlmcError if it cannot be compiled."""

    def __call__(self, config: Mapping[str, Any], generation: Mapping[str, Any], has_encoder: bool,
                 quantized: str, task: str = "generate", media: Sequence[Modality] = (),
                 multimodal: bool = False, /) -> None:
        """Check a model.

        Args:
            config: contents of config.json.
            generation: contents of generation_config.json.
            has_encoder: whether it is an encoder-decoder model.
            quantized: quantization method, if the config does not name it.
            task: what it is compiled for.
            media: kinds of items of prompts whose encoders are compiled.
            multimodal: whether it has encoders of images or audio, compiled or not.
        """


def unchecked(config: Mapping[str, Any], generation: Mapping[str, Any], has_encoder: bool,
              quantized: str, task: str = "generate", media: Sequence[Modality] = (),
              multimodal: bool = False) -> None:
    """Accept every model."""


def _no_tokens(tokenizer: Tokenizer) -> Sequence[int]:
    return ()


@dataclass(frozen=True)
class RawDraft:
    """A draft model as an ONNX graph, before any pass.

    Args:
        graphs: like a `RawModel`'s; several for the chain `layers`. Unless the kind is `model`,
            each also has an input `hidden`, float32 [batch, seq, hidden_size], which is an output
            of the model. Except for the chain `block`, it has an output `hidden_out` of the same
            shape, which replaces `hidden` for the next draft.
        kind: see `DraftInfo`.
        config_sha256: digest of its config.
        token_ids: int64 [rows of its logits], token ids; None: the rows are token ids.
        num_speculative_tokens: number of drafts it was trained for, if known.
        notes: remarks for the user.
        chain: see `DraftInfo`.
        mask_token_id: see `DraftInfo`.
    """

    graphs: tuple[gs.Graph, ...]
    kind: DraftKind
    config_sha256: str
    token_ids: np.ndarray | None = None
    num_speculative_tokens: int | None = None
    notes: tuple[str, ...] = ()
    chain: DraftChain = "tokens"
    mask_token_id: int | None = None


@dataclass(frozen=True)
class RawImageEncoder:
    """An image encoder as an ONNX graph, before any pass.

    Args:
        graph: inputs are a processor's arrays for one image, without its grid, and those that
            `computed` computes; outputs are `rows`, float32 [num_rows, hidden_size], and those of
            deep layers. Attention is a node `BidirectionalAttention`.
        computed: how inputs are computed from the image's grid.
        grid: positions of its rows by axis, which the language model then takes as
            `POSITION_IDS`; None: it has one position of each token.
        bidirectional: tokens with bidirectional attention; see `ImageEncoderProgram`.
        token_id: token id that the language model reads at positions of rows; None: the prompt's.
        padded: whether an image has fewer rows than the encoder gives, which are the first ones.
        samples: its inputs for images of several sizes.
        attended: rows that layers of the language model attend to; None: rows of the prompt.
    """

    graph: gs.Graph
    computed: tuple[VisionInput, ...] = ()
    grid: PositionGrid | None = None
    bidirectional: Bidirectional | None = None
    token_id: int | None = None
    padded: bool = False
    samples: tuple[ImageSample, ...] = ()
    attended: AttendedRows | None = None


@dataclass(frozen=True)
class RawAudioEncoder:
    """An encoder of audio clips in prompts as an ONNX graph, before any pass.

    Args:
        graph: inputs are a processor's arrays for one clip; the output is `rows`, float32
            [num_rows, hidden_size]. Attention without a mask is a node `BidirectionalAttention`.
    """

    graph: gs.Graph


@dataclass(frozen=True)
class RawModel:
    """A stateless model as an ONNX graph, before any pass.

    Args:
        graph: inputs `input_ids` and perhaps `position_ids`, int64 [batch, seq], or all of
            `POSITION_IDS`; output `logits` float32 [batch, seq, vocab_size]; parameters are
            constants that hold a `Weight`. Attention is a node `Sdpa` (domain llmc; q, k, v as
            [batch, heads, seq, head_dim], and optionally a bias of the scores; scale, window,
            softcap, causal, layer) if the model uses transformers' attention interface. The hidden
            state after layer i is named `hidden_states.i` if the frontend knows it. For an
            encoder-decoder model this is the decoder, which also has an input `encoder_output`
            float32 [batch, mem_seq, hidden_size]. So has a model whose layers attend to images,
            and `after_image` float32 [batch, seq, 1], 1 for tokens after an image and 0 for others.
        config: the Hugging Face config as plain data.
        kind: huggingface, gguf or onnx.
        save_tokenizer: writes tokenizer files into a directory.
        generation: generation_config.json as plain data.
        notes: remarks for the user, such as why all layers were exported.
        encoder: an encoder-decoder's graph from `input_ids` to `encoder_output`.
        features: rows that the encoder reads as `input_features` in place of `input_ids`.
        processor: preprocessing of what is no text.
        image: its image encoder. The graph then keeps the mark of the token embedding's output.
        audio: its encoder of audio clips in prompts; the same.
        draft: its draft model. If that reads `hidden`, the graph has this second output.
        origin: the files that the model was read from.
        end_tokens: returns further EOS tokens, given the tokenizer.
        pooling: what its outputs are pooled for; None: text generation. The graph then has one
            output `pooled`, float32 [batch, width] or, with one row per token, [batch, seq, width],
            and perhaps an input `token_type_ids` like `input_ids`.
    """

    graph: gs.Graph
    config: dict[str, Any]
    kind: Literal["huggingface", "gguf", "onnx"]
    save_tokenizer: Callable[[Path], None]
    generation: dict[str, Any]
    notes: tuple[str, ...] = ()
    encoder: gs.Graph | None = None
    features: FeatureRows | None = None
    processor: ProcessorDescription | None = None
    image: RawImageEncoder | None = None
    audio: RawAudioEncoder | None = None
    draft: RawDraft | None = None
    origin: Origin = field(default_factory=Origin)
    end_tokens: Callable[[Tokenizer], Sequence[int]] = _no_tokens
    pooling: PoolingPlan | None = None

    @property
    def architecture(self) -> str:
        return architecture_of(self.config)

    @property
    def config_sha256(self) -> str:
        return config_digest(self.config)

    @property
    def graphs(self) -> tuple[gs.Graph, ...]:
        """The model's graph, and that of its encoder or those of its draft model."""
        return (self.graph, *([self.encoder] if self.encoder is not None else []),
                *(self.draft.graphs if self.draft is not None else ()))

    @property
    def all_graphs(self) -> tuple[gs.Graph, ...]:
        """`graphs`, and those of encoders of images and audio."""
        return (*self.graphs, *self.media_graphs.values())

    @property
    def media_graphs(self) -> dict[Modality, gs.Graph]:
        """Graphs of encoders of images and audio in prompts."""
        encoders: dict[Modality, RawImageEncoder | RawAudioEncoder | None] = {
            "image": self.image, "audio": self.audio}
        return {kind: own.graph for kind, own in encoders.items() if own is not None}

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return `eos_token_id` or the like, from the generation config or else the config.

        Ids outside of the vocabulary are dropped: a small model may have its family's config.
        """
        return tuple(token for token in token_ids(key, self.config, self.generation)
                     if 0 <= token < vocab_size)


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a config with sorted keys, without its location and version."""
    kept = {key: value for key, value in config.items()
            if key not in ("_name_or_path", "transformers_version", "param_dir",
                           "tensor_parallel")}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first architecture of a Hugging Face config, or its model type."""
    return str((config.get("architectures") or [config.get("model_type", "unknown")])[0])


def token_ids(key: str, config: Mapping[str, Any], generation: Mapping[str, Any]) -> \
        tuple[int, ...]:
    """Return `eos_token_id` or the like, from the generation config or else the config."""
    value = generation.get(key, config.get(key))
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def dequantize(raw: RawModel) -> int:
    """Replace quantized weights by dequantized ones, in place; return their number.

    Shared weights stay shared.
    """
    dequantized: dict[Weight, Weight] = {}
    for graph in raw.all_graphs:
        for tensor in graph.tensors().values():
            if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight):
                values = tensor._values
                tensor._values = dequantized.setdefault(values, values.as_unquantized())
    return sum(weight.stored is not None or weight.dequantized for weight in dequantized)
