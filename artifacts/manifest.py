"""`model_info.json` as typed, validated, frozen data.

The JSON schema published in `artifacts/model_info.schema.json` is generated from these classes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from llmc import plugins
from llmc.artifacts.case_files import check_case_file, open_regular, read_bounded
from llmc.artifacts.vision_input import VisionInput
from llmc.artifacts.weight_file import WEIGHTS_NAME, read_weight_header
from llmc.errors import LlmcError
from llmc.limits import MAX_CHIPS
from llmc.plugins.attention.op import AXES
from llmc.plugins.code_types import CODE_TYPES
from llmc.targets import TARGETS, TargetSpec

FORMAT_VERSION = 2
MANIFEST_NAME = "model_info.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
FACTS = "llmc"  # key of llmc's metadata in an ONNX file

DTypeName = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1,
                               "int64": 8, "int32": 4}

if TYPE_CHECKING:
    WeightDType = str
else:
    WeightDType = Literal[tuple(CODE_TYPES)]

# Inputs of an engine: dtype and shape. A target with index_dtype int32 has int32 instead of int64.
ENGINE_INPUTS: dict[str, tuple[DTypeName, tuple[str, ...]]] = {
    "input_ids": ("int64", ("num_tokens",)),
    "position_ids": ("int64", ("num_tokens",)),
    "cu_seqlens": ("int32", ("batch_plus_1",)),
    "past_lens": ("int32", ("batch",)),
    "logits_indices": ("int64", ("num_logits",)),
    "block_table": ("int32", ("batch", "max_blocks")),
    "state_slots": ("int32", ("batch",)),
    "commit_lens": ("int32", ("batch",)),
    "memory_starts": ("int32", ("batch",)),
    "encoder_sequence_length": ("int32", ("batch",)),
    "token_type_ids": ("int64", ("num_tokens",)),
    "lora_ids": ("int32", ("num_tokens",)),
    "lora_logits_ids": ("int32", ("num_logits",)),
    "embed_ids": ("int32", ("num_tokens",)),
}
MEMORY_STEPS = "memory_steps"  # int32 [batch], optional where there is memory_starts
LORA_IDS = ("lora_ids", "lora_logits_ids")  # slots of adapters, of tokens and of rows of logits
PROCESSOR = "processor.json"  # preprocessing of images and audio
INPUT_FEATURES = "input_features"  # rows of features, input of an encoder without tokens
ENCODER_INPUTS = ("input_ids", INPUT_FEATURES, "position_ids", "cu_seqlens")
EMBEDS, EMBED_IDS = "embeds", "embed_ids"  # rows in place of token embeddings; their tokens
DEEP_EMBEDS_PREFIX = "deep_embeds_"  # rows that are added to hidden states of the same tokens
ROTARY_POSITIONS = "rotary_positions"  # of models whose tokens have positions by axis
BIDIRECTIONAL_RANGES = "bidirectional_ranges"  # of images with bidirectional attention
MEDIA_ROWS = "rows"  # output of an encoder of images or audio
HIDDEN = "hidden"  # features of every token: output of the model, input of its draft model
HIDDEN_OUT = "hidden_out"
POOLED = "pooled"  # output of a model whose task is not generation
DRAFT_TOKEN_IDS = "draft.token_ids"  # weight: token id of each row of the draft model's logits
_MAX_MANIFEST_BYTES = 16 << 20  # 128 layers on 8 chips take 3 MB
_MAX_TEMPLATE_BYTES = 4 << 20
_MAX_LAYERS = 65536
_MAX_FILES = 65536
_MAX_INT32 = 2**31 - 1  # kernels count in int32
_MAX_ROW_BYTES = 2**40  # of a cache; more than the memory of any device


def _check_case_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or ":" in path:
        raise ValueError(f"path {path!r} must be relative and stay inside the case directory")
    if str(PurePosixPath(path)) != path or not path.isprintable():
        raise ValueError(f"path {path!r} is not normalized; write it as "
                         f"{str(PurePosixPath(path))!r}")
    return path


CasePath = Annotated[str, AfterValidator(_check_case_path)]
Count = Annotated[int, Field(ge=1, le=_MAX_INT32)]
CountOrNone = Annotated[int, Field(ge=0, le=_MAX_INT32)]
LayerCount = Annotated[int, Field(ge=1, le=_MAX_LAYERS)]
SizeName = Annotated[str, Field(
    pattern="^(num_tokens|num_logits|batch|batch_plus_1|num_memory_tokens|num_blocks|block_size"
            "|max_blocks|num_states|num_embeds|image_[0-9]+|audio_[0-9]+|lora_rows_[0-9]+"
            "|max_loras|max_lora_rank)$")]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32)]
DraftKind = Literal["eagle3", "mtp", "model", "assistant", "dflash"]
DraftChain = Literal["tokens", "layers", "position", "block"]
Modality = Literal["image", "audio"]  # of items of prompts


def _is_absent(value: object) -> bool:
    """Whether to omit a field, so that manifests without it stay as they were."""
    return value is None


def _is_false(value: object) -> bool:
    return value is False


def _is_empty(value: object) -> bool:
    """Whether to omit a collection, so that manifests without it stay as they were."""
    return not value


def _is_default_chain(value: object) -> bool:
    """The same for `DraftInfo.chain`."""
    return value == "tokens"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileEntry(_Frozen):
    """One file of the case directory: its size in bytes, its SHA-256 as 64 hex digits."""

    path: CasePath
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TensorInfo(_Frozen):
    """Input or output of an engine; a dimension is an integer or the name of a step's size."""

    name: str
    dtype: DTypeName | Literal["bool"]
    shape: tuple[Count | SizeName, ...]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return int(self.shape[-1])

    def require(self, dtype: str, shape: Sequence[int | str]) -> None:
        """Raise ValueError unless the tensor has this dtype and shape."""
        if self.dtype != dtype or self.shape != tuple(shape):
            raise ValueError(f"{self.name!r} is {self.dtype} {list(self.shape)}, expected "
                             f"{dtype} {list(shape)}")


class GraphStep(_Frozen):
    """Run one ONNX file of the chip."""

    kind: Literal["graph"] = "graph"
    path: CasePath
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class CollectiveStep(_Frozen):
    """Combine a tensor over all ranks: `all_reduce` sums, `all_gather` joins the last axis."""

    kind: Literal["all_reduce", "all_gather"]
    input: str
    output: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.output,)


class LayerCache(_Frozen):
    """The KV cache of one attention layer on one chip.

    `key_cache_<layer>` and `value_cache_<layer>` are `[batch, num_kv_heads, max_seq_len,
    head_dim]`, or `[num_blocks, num_kv_heads, block_size, head_dim]` if the layout is paged. A
    `latent` layer (MLA) has only `latent_cache_<layer>`.
    """

    num_kv_heads: Count
    head_dim: Count
    latent: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of caches of the layer."""
        return ("latent",) if self.latent else ("key", "value")

    @property
    def token_size(self) -> int:
        """Elements per token."""
        return len(self.kinds) * self.num_kv_heads * self.head_dim


class StateCache(_Frozen):
    """Recurrent state of one layer on one chip.

    It is float32 `[batch, *shape]`, or `[num_states, *shape]` if the KV cache is paged.
    """

    shape: Annotated[tuple[Count, ...], Field(min_length=1)]

    @property
    def size(self) -> int:
        """Bytes per sequence."""
        return 4 * math.prod(self.shape)


Steps = Annotated[tuple[Annotated[GraphStep | CollectiveStep, Field(discriminator="kind")], ...],
                  Field(max_length=_MAX_FILES)]


class EncoderProgram(_Frozen):
    """The encoder on one chip.

    Its inputs are `input_ids` (or `input_features`, rows of audio as `FeatureRows` describes),
    `cu_seqlens` and, for some models, `position_ids`. Its outputs are
    the cross-attention keys and values `memory_key_<layer>` and `memory_value_<layer>`, each
    `[num_tokens, num_kv_heads * head_dim]`. `steps` are like those of a `Chip`.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    steps: Steps


class PositionGrid(_Frozen):
    """Positions of an image's rows in a model whose tokens have positions by axis.

    A row stands for `merge_size` by `merge_size` patches. If the image follows position p, its row
    at (frame, row, column) of the grid has the positions p + 1 + frame, p + 1 + row and p + 1 +
    column. The next token has p + 1 plus the larger number of rows and columns, on all axes, as
    tokens without an image have one position on all axes.
    """

    merge_size: CountOrNone


class AttendedRows(_Frozen):
    """Rows of an image that layers of a language model attend to (cross-attention).

    Each of `tiles_per_image` tiles has `rows_per_tile` rows. An image has at least one tile; the
    others are padding.
    """

    tiles_per_image: Count
    rows_per_tile: Count

    @property
    def num_rows(self) -> int:
        """Rows of an image, with those of padding."""
        return self.tiles_per_image * self.rows_per_tile


class ImageMemory(AttendedRows):
    """The images of a prompt that layers of its language model attend to.

    The rows have `width` columns. A prompt has at most `max_seq_len` of them. Its tokens before an
    image attend to all rows of all images, a token after an image to the tiles of that image, or of
    the last images if no token is between them.
    """

    width: Count
    max_seq_len: Count


Bidirectional = Literal["images", "prompt"]


class WeightForm(_Frozen):
    """Storage format of a quantized weight matrix; see llmc.plugins.quantization.

    Scales are the weight `<name>_scale`. Zero points or minima, if the dtype has them, are
    `<name>_zero` or `<name>_min`. Scales of blocks, for kernels that read them, are
    `<name>_blocks`.

    `activation_dtype` is the dtype that activations are quantized to: with the static scale
    `activation_scale`, or if that is 0, with a scale per token or per group of
    `activation_group_size` elements of a token.
    """

    dtype: WeightDType
    group_size: Count
    activation_dtype: Literal["", "float8_e4m3fn", "int8"] = ""
    activation_scale: Annotated[float, Field(ge=0)] = 0.0
    activation_group_size: Annotated[int, Field(ge=0)] = 0


class AudioEncoderProgram(_Frozen):
    """The encoder of audio clips in prompts, on chip 0 alone.

    It runs once per clip. Its inputs are the arrays of the processor for this clip. Sizes that
    depend on the clip are named `audio_<i>`. Its output is `rows`, `[num_embeds, hidden_size]`.
    `steps` are like those of a `Chip`. `quantization` has the storage formats of its quantized
    weights.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    steps: Steps
    quantization: Annotated[dict[str, WeightForm], Field(exclude_if=_is_empty)] = {}


class ImageEncoderProgram(_Frozen):
    """The image encoder, on chip 0 alone.

    It runs once per image. Its inputs are the arrays of the processor for this image, and those
    that `computed` computes from its array `image_grid_thw`, which few encoders read themselves.
    Sizes that depend on the image are named `image_<i>`. Its outputs are `rows` and those of deep
    layers, `rows_0`, `rows_1` and so on, each `[num_embeds, hidden_size]`. `steps` are like those
    of a `Chip`. `quantization` has the storage formats of its quantized weights. With `grid`, chips
    read `rotary_positions`.

    With `bidirectional`, chips read `bidirectional_ranges`, which have bidirectional attention: of
    `images`, consecutive positions of rows; of a `prompt` with images, all tokens. Chips read
    `token_id` in `input_ids` at positions of rows, if it is given. If `padded`, the first rows, as
    many as the prompt takes, are the image's and the others are of padding.

    `reshaped` has outputs of the first step that are an input in another shape, with its name. If
    there are any, the other outputs depend on the shapes of these inputs, not on their values.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    steps: Steps
    computed: tuple[VisionInput, ...] = ()
    grid: Annotated[PositionGrid | None, Field(exclude_if=_is_absent)] = None
    bidirectional: Annotated[Bidirectional | None, Field(exclude_if=_is_absent)] = None
    token_id: Annotated[CountOrNone | None, Field(exclude_if=_is_absent)] = None
    padded: Annotated[bool, Field(exclude_if=_is_false)] = False
    reshaped: Annotated[dict[str, str], Field(exclude_if=_is_empty)] = {}
    quantization: Annotated[dict[str, WeightForm], Field(exclude_if=_is_empty)] = {}


class DraftProgram(_Frozen):
    """The draft model, or one of its layers, on one chip.

    Its inputs are those of the model and, unless it is a separate model, `hidden`
    `[num_tokens, hidden_size]`. Its outputs are `logits`, `hidden_out` `[num_tokens, hidden_size]`
    if it has `hidden`, except for the chain `block`, and its caches, whose layers are numbered
    after those of the model. Of the chain `position`, it has no caches, and reads caches
    `<cache>_out` of the model. `steps`, `cache` and `num_heads` are like those of a `Chip`.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    steps: Steps
    cache: Annotated[tuple[LayerCache, ...], Field(max_length=_MAX_LAYERS)]
    num_heads: Annotated[tuple[Count, ...], Field(max_length=_MAX_LAYERS)]

    @property
    def hidden_size(self) -> int | None:
        """Width of `hidden`; None for a separate model."""
        return next((tensor.width for tensor in self.inputs if tensor.name == HIDDEN), None)


def _named(layers: Sequence[LayerCache], first: int) -> dict[str, LayerCache]:
    """Caches of layers by name, given the number of the first layer."""
    return {f"{kind}_cache_{layer}": cache for layer, cache in enumerate(layers, first)
            for kind in cache.kinds}


# Module of an embedding whose table is also the LM head's weight, in `LoraLayer`.
TIED_TABLE = "embed_tokens"


class LayerRows(_Frozen):
    """Consecutive rows of a compiled matrix, and the rows of a module's matrix that they are.

    They are `start`, `start + step` and so on before `stop`. Rows of zeros have no `module`.
    """

    module: str
    start: CountOrNone
    stop: int
    step: int = 1

    @property
    def index(self) -> range:
        return range(self.start, self.stop, self.step)


class LoraLayer(_Frozen):
    """A linear layer of a chip that takes adapters, or its embedding.

    An embedding is a layer of one-hot vectors: its inputs are the vocabulary.

    Its inputs are `<name>.lora_a` `[lora_rows_<group>, in_features]` and `<name>.lora_b`
    `[lora_rows_<group>, out_features]`. Layers of one group have equal modules; the input
    `lora_owner_<group>` has the slot of each of their rows. `rows` has the module of each output,
    `columns` the input of the modules that each input is, as rows without a module.

    With a `dtype`, adapters are in slots: the inputs are `<name>.lora_down` `[modules, max_loras,
    max_lora_rank, in_features]`, `<name>.lora_up` `[max_loras, out_features, max_lora_rank]` and
    `<name>.lora_ranks` `[max_loras]`.

    With `experts`, it is a stack of matrices of these experts of the module, and `rows` and
    `columns` are those of each. The inputs are `<name>.lora_a` `[lora_rows_<group>, experts,
    in_features]` and `<name>.lora_b` `[lora_rows_<group>, experts, out_features]`; or in slots,
    with expert i as part i, `<name>.lora_down` `[experts, max_loras, max_lora_rank, in_features]`
    and `<name>.lora_up` `[max_loras, experts * out_features, max_lora_rank]`. If `paired`, the
    first half of `rows` are those of gates and the second half those of ups, which alternate in
    the compiled matrices.

    If `scaled`, rows and columns of the compiled matrix are those of the modules times scales,
    which the weight file has as `<name>.lora_row_scale` `[out_features]` and
    `<name>.lora_column_scale` `[in_features]`, float32.
    """

    name: str
    group: CountOrNone
    rows: Annotated[tuple[LayerRows, ...], Field(min_length=1)]
    columns: Annotated[tuple[LayerRows, ...], Field(min_length=1)]
    dtype: Annotated[DTypeName | None, Field(exclude_if=_is_absent)] = None
    scaled: Annotated[bool, Field(exclude_if=_is_false)] = False
    experts: Annotated[tuple[LayerRows, ...], Field(exclude_if=_is_empty)] = ()
    paired: Annotated[bool, Field(exclude_if=_is_false)] = False

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules, each once."""
        return tuple(dict.fromkeys(run.module for run in self.rows if run.module))

    @property
    def in_features(self) -> int:
        return sum(len(run.index) for run in self.columns)

    @property
    def out_features(self) -> int:
        return sum(len(run.index) for run in self.rows)

    @property
    def num_experts(self) -> int:
        """Number of matrices; 0: it is no stack."""
        return sum(len(run.index) for run in self.experts)

    @property
    def scales(self) -> tuple[str, str]:
        """Names of the weights that have the scales of rows and of columns."""
        return f"{self.name}.lora_row_scale", f"{self.name}.lora_column_scale"

    @property
    def inputs(self) -> dict[str, tuple[str, tuple[int | str, ...]]]:
        """Dtype and shape of each input, by name."""
        stack = (self.num_experts,) if self.experts else ()
        if self.dtype is not None:
            parts = self.num_experts or max(len(self.modules), 1)
            outputs = self.out_features * (self.num_experts or 1)
            return {f"{self.name}.lora_down": (
                        self.dtype, (parts, "max_loras", "max_lora_rank", self.in_features)),
                    f"{self.name}.lora_up": (self.dtype, ("max_loras", outputs, "max_lora_rank")),
                    f"{self.name}.lora_ranks": ("int32", ("max_loras",))}
        rows = f"lora_rows_{self.group}"
        return {f"{self.name}.lora_a": ("float32", (rows, *stack, self.in_features)),
                f"{self.name}.lora_b": ("float32", (rows, *stack, self.out_features)),
                f"lora_owner_{self.group}": ("int32", (rows,))}


class Chip(_Frozen):
    """Files, tensors and steps of one rank.

    `steps` run in order; a graph step reads and writes named tensors. Engine inputs are
    `input_ids`, `cu_seqlens`, `past_lens`, `logits_indices`, for some models `position_ids`, and
    the caches. Recurrent state adds `commit_lens`, except in llmc 0.1.0. Paged caches add
    `block_table` for KV caches and `state_slots` for recurrent state. An updated cache is named
    `<cache>_out`; the last step writes `logits`.

    With `lora` layers, the steps also read `lora_ids` and `lora_logits_ids`, the slot of each row's
    adapter or -1, and the inputs of these layers.

    A model that takes rows in place of token embeddings also reads these, `embeds` `[num_embeds,
    hidden_size]` with at least one row, and `embed_ids`, the row of each token or -1.

    With an `encoder`, these are the tensors of the decoder, which also reads `memory_starts`,
    `encoder_sequence_length`, the outputs of the encoder and, on target cpu, `memory_steps`, the
    distance of a sequence's rows of these. With `memory` in the manifest, the
    encoder reads the rows of images as `input_features`. `embeds` then is a row of zeros that
    tokens not after an image have in place of the results of MLPs.

    With a `draft` that reads `hidden`, the steps also write `hidden` of every token.
    `later_drafts` are the programs of its later layers, of the chain `layers`.

    If the manifest has `pooling`, the last step writes `pooled` instead of `logits`, `[batch,
    width]` or, with a row per token, `[num_tokens, width]`, and there is no `logits_indices`. Some
    of these models have an input `token_type_ids`, and those without a KV cache no `past_lens`.

    With an `image` encoder, its rows are `embeds` of the tokens of images. Its deep rows are
    `deep_embeds_<i>`, with the same `embed_ids`. Some of these models read `rotary_positions`,
    `[num_tokens, 3]`, see `PositionGrid`, or `bidirectional_ranges`, `[num_tokens, 2]`, the first
    position and the one after the last of the range of each token, `[0, 0]` without one. Rows of
    an `audio` encoder are `embeds` of the tokens of audio clips.

    `num_heads` has the number of query heads of each attention layer. `quantization` has the
    quantized weights by name. `states` are the recurrent states, named `state_<i>`.
    """

    rank: Annotated[int, Field(ge=0)]
    path: CasePath
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    steps: Steps
    cache: Annotated[tuple[LayerCache, ...], Field(max_length=_MAX_LAYERS)]
    num_heads: Annotated[tuple[Count, ...], Field(max_length=_MAX_LAYERS)]
    states: Annotated[tuple[StateCache, ...], Field(max_length=_MAX_LAYERS)] = ()
    weight_bytes: Annotated[int, Field(ge=0)]
    encoder: EncoderProgram | None = None
    draft: Annotated[DraftProgram | None, Field(exclude_if=_is_absent)] = None
    later_drafts: Annotated[tuple[DraftProgram, ...], Field(
        max_length=_MAX_LAYERS, exclude_if=_is_empty)] = ()
    image: Annotated[ImageEncoderProgram | None, Field(exclude_if=_is_absent)] = None
    audio: Annotated[AudioEncoderProgram | None, Field(exclude_if=_is_absent)] = None
    quantization: dict[str, WeightForm] = {}
    lora: Annotated[tuple[LoraLayer, ...], Field(
        max_length=_MAX_FILES, exclude_if=_is_empty)] = ()

    @property
    def lora_inputs(self) -> dict[str, tuple[str, tuple[int | str, ...]]]:
        """Dtype and shape of each input of adapters, without the slots of rows, by name."""
        return {name: given for layer in self.lora for name, given in layer.inputs.items()}

    @property
    def drafts(self) -> tuple[DraftProgram, ...]:
        """Programs of the draft model."""
        return (self.draft, *self.later_drafts) if self.draft else ()

    @property
    def all_steps(self) -> Steps:
        """Steps of the encoder, the model, the draft model and encoders of images and audio."""
        return (*(self.encoder.steps if self.encoder else ()), *self.steps,
                *(step for draft in self.drafts for step in draft.steps),
                *(step for own in self.media_encoders for step in own.steps))

    @property
    def media_encoders(self) -> tuple[ImageEncoderProgram | AudioEncoderProgram, ...]:
        """Encoders of images and of audio in prompts."""
        return tuple(own for own in (self.image, self.audio) if own is not None)

    @property
    def caches(self) -> dict[str, LayerCache]:
        """KV caches of the model by name."""
        return _named(self.cache, 0)

    @property
    def draft_caches(self) -> dict[str, LayerCache]:
        """KV caches of the draft model by name."""
        return _named(self.draft_layers, len(self.cache))

    @property
    def draft_layers(self) -> tuple[LayerCache, ...]:
        """KV caches of the draft model's layers."""
        return tuple(cache for draft in self.drafts for cache in draft.cache)

    def caches_of_draft(self, index: int) -> dict[str, LayerCache]:
        """KV caches of a program of the draft model by name."""
        first = len(self.cache) + sum(len(draft.cache) for draft in self.drafts[:index])
        return _named(self.drafts[index].cache, first)

    @property
    def state_caches(self) -> dict[str, StateCache]:
        """Recurrent states by name."""
        return {f"state_{index}": state for index, state in enumerate(self.states)}

    @property
    def verifies_drafts(self) -> bool:
        """Whether recurrent states, if any, can be stored before drafts."""
        return not self.states or any(tensor.name == "commit_lens" for tensor in self.inputs)

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of all KV caches and recurrent states of the model."""
        return *self.caches, *self.state_caches

    @property
    def result(self) -> str:
        """Name of the model's output: `logits`, or `pooled`."""
        return POOLED if any(tensor.name == POOLED for tensor in self.outputs) else "logits"

    @property
    def features(self) -> tuple[str, ...]:
        """Name of the output for the draft model, if it reads one."""
        return (HIDDEN,) if self.draft and self.draft.hidden_size else ()

    @model_validator(mode="after")
    def _check_steps(self) -> Chip:
        memory = {tensor.name for tensor in self.encoder.outputs} if self.encoder else set()
        if self.encoder:
            self._check_dataflow(self.encoder.steps, {*ENCODER_INPUTS}, memory)
            self._check_listed(self.encoder.inputs, self.encoder.outputs, self.encoder.steps)
        deep = {own.name for own in self.inputs if own.name.startswith(DEEP_EMBEDS_PREFIX)}
        self._check_dataflow(self.steps, {*self.kept, *ENGINE_INPUTS, EMBEDS, *memory, *deep,
                                          *([MEMORY_STEPS] if memory else ()),
                                          ROTARY_POSITIONS, BIDIRECTIONAL_RANGES,
                                          *self.lora_inputs},
                     {*(f"{name}_out" for name in self.kept), self.result, *self.features})
        self._check_listed(self.inputs, self.outputs, self.steps)
        for index, draft in enumerate(self.drafts):
            own = self.caches_of_draft(index)
            read = {f"{name}_out" for name in self.caches} if not self.draft_caches else set()
            self._check_dataflow(draft.steps, {*own, *read, *ENGINE_INPUTS, *self.features},
                                 {*(f"{name}_out" for name in own), "logits"})
            self._check_listed(draft.inputs, draft.outputs, draft.steps)
        for program in self.media_encoders:
            self._check_dataflow(program.steps, {own.name for own in program.inputs},
                                 {own.name for own in program.outputs})
            self._check_listed(program.inputs, program.outputs, program.steps)
        for step in self.all_steps:
            if isinstance(step, GraphStep) and not step.path.startswith(f"{self.path}/"):
                raise ValueError(f"chip {self.rank} runs {step.path!r}, which is not in "
                                 f"{self.path!r}")
        return self

    def _check_listed(self, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo],
                      steps: Steps) -> None:
        """Check that the listed inputs and outputs are those of the steps."""
        produced = {name for step in steps for name in step.outputs}
        given = {name for step in steps for name in step.inputs} - produced
        names = Counter(tensor.name for tensor in (*inputs, *outputs))
        duplicate = next((name for name, count in names.items() if count > 1), None)
        if duplicate is not None:
            raise ValueError(f"chip {self.rank} lists {duplicate!r} twice")
        # Only the rank that adds positions reads position_ids.
        mismatch = {tensor.name for tensor in inputs} ^ given
        if mismatch - {"position_ids"} or given - {tensor.name for tensor in inputs}:
            raise ValueError(f"chip {self.rank}: the steps and the listed inputs differ in "
                             f"{min(mismatch)!r}")
        absent = {tensor.name for tensor in outputs} - produced
        if absent:
            raise ValueError(f"chip {self.rank}: no step writes {min(absent)!r}")

    def _check_dataflow(self, steps: Steps, known: set[str], required: set[str]) -> None:
        """Check that each step's inputs exist, and that the steps write the required outputs."""
        for step in steps:
            missing = set(step.inputs) - known
            if missing:
                raise ValueError(f"chip {self.rank} reads {min(missing)!r} before it is written")
            for name in step.outputs:
                if name in known:
                    raise ValueError(f"chip {self.rank} writes {name!r} twice")
                known.add(name)
        absent = required - known
        if absent:
            raise ValueError(f"chip {self.rank}: no step writes {min(absent)!r}")


class SourceFile(_Frozen):
    """An input file of a compilation; large local files have no `sha256`."""

    name: str
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None


class Source(_Frozen):
    """The source of the model.

    `config_sha256` is the digest of its config with sorted keys. `repo_id` and `commit` are set
    for a model from the Hugging Face hub. `requantized`: the model's quantized weights were
    dequantized, and quantized again. `adapter` has the files of an adapter merged into the weights.
    """

    kind: Literal["huggingface", "gguf", "onnx"]
    architecture: str
    config_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    repo_id: str | None = None
    commit: str | None = None
    files: tuple[SourceFile, ...] = ()
    requantized: bool = False
    adapter: Annotated[tuple[SourceFile, ...], Field(exclude_if=_is_empty)] = ()


class Dims(_Frozen):
    """Sizes of a model; heads are those of its first attention layer, 0 if it has none."""

    num_layers: LayerCount
    hidden_size: Count
    num_heads: CountOrNone
    num_kv_heads: CountOrNone
    head_dim: CountOrNone
    vocab_size: Count
    padded_vocab_size: Count
    max_seq_len: Count

    @model_validator(mode="after")
    def _check_sizes(self) -> Dims:
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}"
            )
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        if any(heads) and (not all(heads) or self.num_heads % self.num_kv_heads):
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads "
                             f"{self.num_kv_heads}")
        return self


class RowMask(_Frozen):
    """A column of `FeatureRows`: 1 in rows whose `row * stride + offset` is in [0, length)."""

    stride: Count
    offset: int
    length: Count


class FeatureRows(_Frozen):
    """The rows that an encoder reads in place of tokens, made from features of audio.

    Features are float32 `[num_frames, num_channels]`. Row i has the frames from `i * stride +
    offset` on, `window` of them, those outside of the features as zeros, and then a column for each
    of `masks`.
    """

    num_channels: Count
    num_frames: Count
    stride: Count
    offset: int
    window: Count
    masks: tuple[RowMask, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of an item."""
        return self.num_frames // self.stride

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.window * self.num_channels + len(self.masks)


class SpeechInfo(_Frozen):
    """Special tokens of a decoder that transcribes speech.

    After the start token, the decoder reads the token of a language and of a task, if the model has
    several, and without timestamps `no_timestamps_token_id`. The tokens after that one are
    timestamps, one for each row of the encoder. The first is at most number
    `max_initial_timestamp_index`. `begin_suppress_tokens` are never the first new token. The model
    reads the text before a window after `prev_sot_token_id`.
    """

    languages: dict[str, TokenId] = {}
    tasks: dict[str, TokenId] = {}
    no_timestamps_token_id: TokenId | None = None
    prev_sot_token_id: TokenId | None = None
    max_initial_timestamp_index: Annotated[int, Field(ge=0)] | None = None
    begin_suppress_tokens: tuple[TokenId, ...] = ()


class EncoderInfo(_Frozen):
    """The encoder of an encoder-decoder model, and special tokens of its decoder.

    A prompt has at most `max_seq_len` tokens of the encoder's `vocab_size`. An encoder with
    `features` reads audio instead: `max_seq_len` rows, and it has no vocabulary. The decoder
    starts with `decoder_start_token_id`. The first new token is one of `forced_bos_token_ids`, and
    the last that `max_tokens` allows is one of `forced_eos_token_ids`, if these are not empty.
    `bad_words` are never generated.
    """

    num_layers: LayerCount
    max_seq_len: Count
    vocab_size: Count | None
    decoder_start_token_id: TokenId
    forced_bos_token_ids: tuple[TokenId, ...] = ()
    forced_eos_token_ids: tuple[TokenId, ...] = ()
    bad_words: tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...] = ()
    features: Annotated[FeatureRows | None, Field(exclude_if=_is_absent)] = None
    speech: Annotated[SpeechInfo | None, Field(exclude_if=_is_absent)] = None

    @model_validator(mode="after")
    def _check_features(self) -> EncoderInfo:
        if (self.features is None) != (self.vocab_size is not None):
            raise ValueError("an encoder has either a vocab_size or features")
        if self.features is not None and self.features.num_rows != self.max_seq_len:
            raise ValueError(f"max_seq_len is {self.max_seq_len}, features have "
                             f"{self.features.num_rows} rows")
        return self


class DraftInfo(_Frozen):
    """The draft model: `model` is a separate model, the others read features of the model.

    Its logits have `vocab_size` tokens and are padded to `padded_vocab_size`. If `reduced`, the
    weight `draft.token_ids` has the token id of each. It was trained for up to
    `num_speculative_tokens` drafts, if that is known. `config_sha256` is the digest of its config.

    `chain` says how drafts are computed after a step, greedily:

    - `tokens`: the program runs on the step's tokens, then on each draft, with `hidden_out` of the
      pass before as `hidden`.
    - `layers`: each of the programs runs on the step's tokens for one draft, shifted by one token
      each and with `hidden_out` of the one before; then the last one runs on each draft.
    - `position`: the program runs on the last token, then on each draft, all at the position before
      that token, whose keys and values in the model's caches are the last that it reads.
    - `block`: the program runs once, on the step's tokens as context (only their features are
      read), and on the next token and `num_speculative_tokens` times `mask_token_id` after it,
      whose features are 0. The logits of each of these are a draft.
    """

    kind: DraftKind
    chain: Annotated[DraftChain, Field(exclude_if=_is_default_chain)] = "tokens"
    mask_token_id: Annotated[TokenId | None, Field(exclude_if=_is_absent)] = None
    num_layers: LayerCount
    vocab_size: Count
    padded_vocab_size: Count
    reduced: bool = False
    num_speculative_tokens: Count | None = None
    config_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @property
    def max_drafts(self) -> int | None:
        """Drafts of a pass, if they are limited: those of a block."""
        return self.num_speculative_tokens if self.chain == "block" else None


class PoolingInfo(_Frozen):
    """The task of a model that does not generate text.

    `embed` gives a vector for each text, `classify` scores of labels for each text or pair of
    texts, `token_classify` for each token; a row has `width` elements. `kind` is the pooling of a
    text's tokens, None without one. Vectors are `normalized` to length 1, or not. `labels` are the
    names of a classifier's columns, and `activation` makes scores of its logits. `prompts` are
    texts to prepend, by name; `default_prompt` is the name of the one to prepend by default. With
    `pair_template`, the chat template makes one text of a pair, with the roles query and document.
    """

    task: Literal["embed", "classify", "token_classify"]
    kind: Literal["cls", "mean", "last"] | None
    width: Count
    normalized: bool = False
    labels: tuple[str, ...] = ()
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    pair_template: bool = False

    @property
    def per_token(self) -> bool:
        """Whether there is a row for each token instead of each text."""
        return self.task == "token_classify"

    @model_validator(mode="after")
    def _check_fields(self) -> PoolingInfo:
        if (self.kind is None) != self.per_token:
            raise ValueError(f"task {self.task} has the pooling {self.kind}")
        if self.labels and len(self.labels) != self.width:
            raise ValueError(f"there are {len(self.labels)} labels for {self.width} columns")
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ValueError(f"default_prompt '{self.default_prompt}' is not one of the prompts")
        return self


def _check_target(kind: str) -> str:
    if kind not in TARGETS:
        raise ValueError(f"unknown target '{kind}'; use one of: {', '.join(TARGETS)}")
    return kind


class Target(_Frozen):
    """Target of the engines, and requirements to run them.

    `versions` has the libraries whose version matters. `compute_capability`, such as 9.0, is that
    of the only GPUs that may run the engines; `gpu` is the name of the GPU that they were built on.
    `max_batch_size` is set if the engines have a maximum.
    """

    kind: Annotated[str, AfterValidator(_check_target),
                    WithJsonSchema({"enum": [*TARGETS], "type": "string"})]
    versions: dict[str, str] = {}
    compute_capability: str | None = None
    gpu: str | None = None
    max_batch_size: Count | None = None

    @property
    def spec(self) -> TargetSpec:
        """Capabilities and limits of the target."""
        return TARGETS[self.kind]

    @model_validator(mode="after")
    def _check_fields(self) -> Target:
        given = {name for name in ("compute_capability", "gpu", "max_batch_size")
                 if getattr(self, name) is not None}
        unsupported = given - self.spec.optional_fields
        if unsupported:
            raise ValueError(f"target {self.kind} does not support {min(unsupported)}, given as "
                             f"{getattr(self, min(unsupported))!r}")
        return self

    def require_versions(self) -> None:
        """Raise ValueError if a required field of a built engine is absent."""
        absent = [*(f"versions.{name}" for name in self.spec.versions if name not in self.versions),
                  *(name for name in sorted(self.spec.required_fields)
                    if getattr(self, name) is None)]
        if absent:
            raise ValueError(f"target {self.kind} requires {absent[0]}, which is absent")



class TokenizerInfo(_Frozen):
    """The tokenizer and its chat templates.

    `path` is the tokenizer directory, None if the source had no tokenizer. `chat_template` is the
    file of the default chat template. `additional_chat_templates` has the files of others by name,
    such as `tool_use`.
    """

    path: CasePath | None
    bos_token_id: TokenId | None
    eos_token_ids: tuple[TokenId, ...]
    chat_template: CasePath | None
    additional_chat_templates: dict[str, CasePath] = {}

    @property
    def chat_templates(self) -> dict[str, str]:
        """Files of all chat templates by name."""
        default = {} if self.chat_template is None else {"default": self.chat_template}
        return {**self.additional_chat_templates, **default}


class SamplingDefaults(_Frozen):
    """Sampling parameters of the model's generation_config.json.

    None: the default of `SamplingParams`. `suppress_tokens` are never generated.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    suppress_tokens: tuple[TokenId, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return the attributes of `SamplingParams` that these set."""
        fields = self.model_dump(exclude_none=True, exclude={"suppress_tokens"})
        if self.suppress_tokens:
            fields["logit_bias"] = dict.fromkeys(self.suppress_tokens, -math.inf)
        return fields


class PassReport(_Frozen):
    """Result of a compiler pass: rewrites per rule, and refusals with reasons."""

    name: str
    matches: dict[str, int]
    refusals: tuple[str, ...] = ()


class Manifest(_Frozen):
    """The contents of `model_info.json`.

    `quantization` has the dtypes of quantized weights, None if no weight is quantized.
    """

    format_version: Literal[2]
    llmc_version: str
    source: Source
    dims: Dims
    encoder: EncoderInfo | None = None
    memory: Annotated[ImageMemory | None, Field(exclude_if=_is_absent)] = None
    draft: Annotated[DraftInfo | None, Field(exclude_if=_is_absent)] = None
    pooling: Annotated[PoolingInfo | None, Field(exclude_if=_is_absent)] = None
    dtype: DTypeName
    quantization: tuple[WeightDType, ...] | None = None
    tp_size: Annotated[int, Field(ge=1)]
    pp_size: Literal[1] = 1
    device_groups: tuple[tuple[int, ...], ...]
    kv_cache_layout: Literal["linear", "paged"] = "linear"
    target: Target
    ops: dict[str, int]
    tokenizer: TokenizerInfo
    sampling: SamplingDefaults | None = None
    chips: Annotated[tuple[Chip, ...], Field(max_length=MAX_CHIPS)]
    passes: tuple[PassReport, ...]
    files: Annotated[tuple[FileEntry, ...], Field(max_length=_MAX_FILES)]

    @property
    def takes_adapters(self) -> bool:
        """Whether the model was compiled to take LoRA adapters."""
        return any(chip.lora for chip in self.chips)

    @property
    def embeds_width(self) -> int | None:
        """Width of rows in place of token embeddings; None if the model does not take them."""
        return next((tensor.width for tensor in self.chips[0].inputs if tensor.name == EMBEDS),
                    None)

    @property
    def prompt_embeds_width(self) -> int | None:
        """Width of prompt embeddings; None if the model takes none."""
        return None if self.memory else self.embeds_width

    @property
    def mem_max_seq_len(self) -> int:
        """Maximum rows that layers of the decoder attend to (cross-attention); 0 without any."""
        reads = self.encoder or self.memory
        return 0 if reads is None else reads.max_seq_len

    @property
    def image(self) -> ImageEncoderProgram | None:
        """The image encoder; None if the model takes no images."""
        return self.chips[0].image

    @property
    def audio(self) -> AudioEncoderProgram | None:
        """The encoder of audio clips in prompts; None if prompts have none."""
        return self.chips[0].audio

    @property
    def features(self) -> FeatureRows | None:
        """Features of audio that the encoder of an encoder-decoder model reads; None: it does not.
        """
        return None if self.encoder is None else self.encoder.features

    @property
    def media(self) -> dict[Modality, ImageEncoderProgram | AudioEncoderProgram]:
        """Encoders of items of prompts by kind."""
        known: dict[Modality, ImageEncoderProgram | AudioEncoderProgram | None] = {
            "image": self.image, "audio": self.audio}
        return {kind: own for kind, own in known.items() if own is not None}

    @property
    def num_deep_embeds(self) -> int:
        """Number of rows of an image that are added to hidden states, beside its embeddings."""
        return len(self.image.outputs) - 1 if self.image else 0

    @property
    def kv_dtype(self) -> str:
        """Dtype of the KV caches."""
        return next((tensor.dtype for tensor in self.chips[0].inputs
                     if tensor.name == "key_cache_0"), self.dtype)

    @property
    def is_whole(self) -> bool:
        """Whether a text is computed in one step: tokens see later ones, or all are pooled."""
        return self.pooling is not None and \
            (self.pooling.kind != "last" or not self.chips[0].kept)

    @model_validator(mode="after")
    def _check_consistency(self) -> Manifest:
        if len(self.chips) != self.tp_size or \
                any(chip.rank != rank for rank, chip in enumerate(self.chips)):
            raise ValueError(f"tp_size is {self.tp_size}, expected chips of ranks 0 to "
                             f"{self.tp_size - 1}")
        self._check_files()
        self._check_dtypes()
        if (self.kv_cache_layout == "paged") != self.target.spec.paged:
            raise ValueError(f"target {self.target.kind} does not support kv_cache_layout "
                             f"{self.kv_cache_layout}")
        for chip in self.chips:
            if not {form.dtype for form in chip.quantization.values()} <= \
                    {*(self.quantization or ())}:
                raise ValueError(f"chip {chip.rank} has quantized weights of dtypes that are not "
                                 f"in `quantization`")
            if _collectives(chip) != _collectives(self.chips[0]):
                raise ValueError(f"chips 0 and {chip.rank} have different collectives")
            if (chip.encoder is None) != (not self.mem_max_seq_len):
                raise ValueError(f"chip {chip.rank} has {'an' if chip.encoder else 'no'} encoder, "
                                 f"unlike the model")
            self._check_media_encoders(chip)
            if (chip.draft is None) != (self.draft is None):
                raise ValueError(f"chip {chip.rank} has {'no' if self.draft else 'a'} draft model, "
                                 f"unlike the manifest")
            layers = self.dims.num_layers
            if len(chip.cache) != len(chip.num_heads) or len(chip.cache) > layers or \
                    (len(chip.cache) < layers and not chip.states and not self._shares_caches
                     and not (self.pooling and not chip.cache)):
                raise ValueError(f"chip {chip.rank} has caches for {len(chip.cache)} layers and "
                                 f"heads for {len(chip.num_heads)}, the model has {layers} layers")
            if [len(state.shape) for state in chip.states] != \
                    [len(state.shape) for state in self.chips[0].states]:
                raise ValueError(f"chips 0 and {chip.rank} have different recurrent states")
            if chip.states and not self.target.spec.recurrent_state:
                raise ValueError(f"target {self.target.kind} does not support recurrent state, but "
                                 f"chip {chip.rank} has {len(chip.states)} states")
            self._check_inputs(chip)
            self._check_outputs(chip)
            self._check_draft(chip)
        self._check_heads()
        self._check_ops()
        for name, token in self._token_ids():
            if token >= self.dims.vocab_size:
                raise ValueError(f"{name} has token id {token}, expected less than vocab_size "
                                 f"{self.dims.vocab_size}")
        for group in self.device_groups:
            if len(group) != self.tp_size or len(set(group)) != len(group) or min(group) < 0:
                raise ValueError(f"device group {list(group)} must be {self.tp_size} distinct "
                                 f"devices")
        return self

    def _check_files(self) -> None:
        """Check that all files of the chips and the tokenizer are listed."""
        listed = {entry.path: entry.size for entry in self.files}
        if len(listed) != len(self.files):
            raise ValueError("a file is listed twice")
        if len({chip.path for chip in self.chips}) != len(self.chips):
            raise ValueError("two chips have the same path")
        for chip in self.chips:
            for step in chip.all_steps:
                if isinstance(step, GraphStep) and step.path not in listed:
                    raise ValueError(f"chip {chip.rank} runs {step.path!r}, which is not listed")
            weights = f"{chip.path}/{WEIGHTS_NAME}"
            if weights not in listed:
                raise ValueError(f"chip {chip.rank}'s {weights!r} is not listed")
            if listed[weights] < chip.weight_bytes:
                raise ValueError(f"chip {chip.rank} has {chip.weight_bytes} bytes of weights, but "
                                 f"{weights!r} has {listed[weights]} bytes")
        tokenizer = self.tokenizer
        for path in (tokenizer.path and f"{tokenizer.path}/tokenizer.json",
                     *tokenizer.chat_templates.values()):
            if path is not None and path not in listed:
                raise ValueError(f"the tokenizer's {path!r} is not listed")

    def _check_dtypes(self) -> None:
        spec = self.target.spec
        if self.dtype not in spec.dtypes:
            raise ValueError(f"target {self.target.kind} does not support dtype {self.dtype}")
        if self.kv_dtype not in (self.dtype, *spec.kv_dtypes):
            raise ValueError(f"the KV caches are {self.kv_dtype}, unsupported for a model of "
                             f"{self.dtype}")
        length = self.dims.max_seq_len
        for chip in self.chips:
            for cache in (*chip.caches.values(), *chip.draft_caches.values()):
                row = cache.num_kv_heads * cache.head_dim * length * DTYPE_BYTES[self.kv_dtype]
                if row > _MAX_ROW_BYTES:
                    raise ValueError(f"max_seq_len {length} gives a cache row of {row} bytes, more "
                                     f"than the memory of any device")
            for name, state in chip.state_caches.items():
                if state.size > _MAX_ROW_BYTES:
                    raise ValueError(f"{name!r} takes {state.size} bytes per sequence, more than "
                                     f"the memory of any device")

    @property
    def _shares_caches(self) -> bool:
        """Whether layers read the caches of other layers."""
        known = plugins.registry()
        return any(op.attention is not None and op.attention.reads
                   for op in map(known.get, self.ops) if op is not None)

    def _check_inputs(self, chip: Chip) -> None:
        """Check names, dtypes and shapes of a chip's inputs."""
        dims = self.dims
        paged = self.kv_cache_layout == "paged"
        table = {"block_table"} if paged and chip.cache else set()
        slots = {"state_slots"} if paged and chip.states else set()
        memory = {"memory_starts", "encoder_sequence_length"} if self.mem_max_seq_len else set()
        memory |= {EMBEDS, EMBED_IDS} if self.memory else set()
        given = {tensor.name: tensor for tensor in chip.inputs}
        produced = {tensor.name: tensor for tensor in chip.encoder.outputs} if chip.encoder else {}
        deep = {f"{DEEP_EMBEDS_PREFIX}{i}" for i in range(self.num_deep_embeds)}
        required = {"input_ids", "cu_seqlens", *table, *slots, *memory, *chip.kept, *produced,
                    *deep}
        if not self.pooling:
            required |= {"past_lens", "logits_indices"}
        elif chip.kept:
            required.add("past_lens")
        adapters = chip.lora_inputs
        mismatch = (given.keys() ^ {*required, *adapters}) - {"position_ids"} - \
            ({"commit_lens"} if chip.states else set()) - \
            ({"token_type_ids"} if self.pooling else set()) - \
            ({*LORA_IDS} if adapters else set()) - \
            ({MEMORY_STEPS} if memory and self.target.spec.key_steps else set()) - \
            ({EMBEDS, EMBED_IDS} if {EMBEDS, EMBED_IDS} <= given.keys() else set()) - \
            ({ROTARY_POSITIONS} if self.image and self.image.grid else set()) - \
            ({BIDIRECTIONAL_RANGES} if self.image and self.image.bidirectional else set())
        if mismatch:
            article = "an unknown" if min(mismatch) in given else "no"
            raise ValueError(f"chip {chip.rank} has {article} input {min(mismatch)!r}")
        for name, tensor in given.items():
            if name in chip.caches:
                cache = chip.caches[name]
                tensor.require(self.kv_dtype, cache_shape(cache, dims.max_seq_len, paged=paged))
            elif name in chip.state_caches:
                tensor.require("float32", ("num_states" if paged else "batch",
                                           *chip.state_caches[name].shape))
            elif name in produced:
                tensor.require(self.dtype, ("num_memory_tokens", *produced[name].shape[1:]))
            elif name in adapters:
                tensor.require(*adapters[name])
            elif name == EMBEDS or name in deep:
                tensor.require(self.dtype, ("num_embeds", self.embeds_width or 0))
            elif name == MEMORY_STEPS:
                tensor.require("int32", ("batch",))
            elif name == ROTARY_POSITIONS:
                tensor.require("int32", ("num_tokens", AXES))
            elif name == BIDIRECTIONAL_RANGES:
                tensor.require("int32", ("num_tokens", 2))
            else:
                self._require_input(tensor)
        for tensor in chip.encoder.inputs if chip.encoder else ():
            self._require_input(tensor)
        if self.encoder and chip.encoder and (self.encoder.features is not None) != any(
                tensor.name == INPUT_FEATURES for tensor in chip.encoder.inputs):
            raise ValueError(f"chip {chip.rank}: features in the manifest do not match the "
                             f"encoder's inputs")

    def _require_input(self, tensor: TensorInfo) -> None:
        if tensor.name == INPUT_FEATURES:
            width = self.memory.width if self.memory else \
                self.encoder.features.width if self.encoder and self.encoder.features else 0
            tensor.require(self.dtype, ("num_tokens", width))
            return
        dtype, shape = ENGINE_INPUTS[tensor.name]
        tensor.require(self.target.spec.index_dtype if dtype == "int64" else dtype, shape)

    def _check_outputs(self, chip: Chip) -> None:
        """Check names, dtypes and shapes of a chip's outputs."""
        dims = self.dims
        given = {f"{tensor.name}_out": tensor for tensor in chip.inputs
                 if tensor.name in chip.kept}
        result = POOLED if self.pooling else "logits"
        mismatch = {tensor.name for tensor in chip.outputs} ^ {*given, result, *chip.features}
        if mismatch:
            raise ValueError(f"chip {chip.rank}: the outputs must be its caches and {result}; they "
                             f"differ in {min(mismatch)!r}")
        for tensor in chip.outputs:
            if self.pooling and tensor.name == POOLED:
                rows = "num_tokens" if self.pooling.per_token else "batch"
                tensor.require(self.dtype, (rows, self.pooling.width))
            elif tensor.name == "logits":
                tensor.require(self.dtype, ("num_logits", dims.padded_vocab_size))
            elif tensor.name == HIDDEN and chip.draft:
                tensor.require(self.dtype, ("num_tokens", chip.draft.hidden_size or 0))
            else:
                cache = given[tensor.name]
                tensor.require(cache.dtype, cache.shape)
        produced = chip.encoder.outputs if chip.encoder else ()
        for tensor in produced:
            width = tensor.shape[-1] if len(tensor.shape) == 2 else 0
            if not isinstance(width, int):
                raise ValueError(f"{tensor.name!r} has width {width}, expected an integer")
            tensor.require(self.dtype, ("num_tokens", width))
        names = {tensor.name for tensor in produced}
        layers = len(produced) // 2
        if names != {f"memory_{kind}_{i}" for kind in ("key", "value") for i in range(layers)}:
            raise ValueError(f"chip {chip.rank}: the encoder's outputs, such as {min(names)!r}, "
                             f"must be a key and a value per layer")

    def _check_media_encoders(self, chip: Chip) -> None:
        """Check the place, outputs and computed inputs of encoders of images and audio."""
        for kind, program in (("image", chip.image), ("audio", chip.audio)):
            if program is None:
                continue
            width = self.memory.width if self.memory else self.embeds_width
            if chip.rank or width is None or self.encoder or self.pooling \
                    or not self.target.spec.media_encoders:
                raise ValueError(f"chip {chip.rank} has an {kind} encoder, which this chip, this "
                                 f"model or target {self.target.kind} does not support")
            if not any(entry.path == PROCESSOR for entry in self.files):
                raise ValueError(f"chip {chip.rank} has an {kind} encoder, but {PROCESSOR} is not "
                                 f"listed")
            count = len(program.outputs) if program is chip.image else 1
            names = [MEDIA_ROWS, *(f"{MEDIA_ROWS}_{i}" for i in range(count - 1))]
            if [tensor.name for tensor in program.outputs] != names:
                raise ValueError(f"chip {chip.rank}: the outputs of the {kind} encoder must be "
                                 f"{', '.join(names)}")
            for tensor in program.outputs:  # of ONNX Runtime on the host
                tensor.require("float32", ("num_embeds", width))
        computed = {name for own in (chip.image.computed if chip.image else ())
                    for name in own.names}
        absent = computed - {tensor.name for tensor in (chip.image.inputs if chip.image else ())}
        if absent:
            raise ValueError(f"chip {chip.rank}: the image encoder has no input {min(absent)!r}, "
                             f"which is computed")

    def _check_draft(self, chip: Chip) -> None:
        """Check names, dtypes and shapes of the draft model's inputs and outputs."""
        info = self.draft
        if info is None:
            return
        caches = sum(len(draft.cache) for draft in chip.drafts)
        heads = sum(len(draft.num_heads) for draft in chip.drafts)
        expected = 0 if info.chain == "position" else info.num_layers
        if (caches, heads) != (expected, expected):
            raise ValueError(f"chip {chip.rank} has caches for {caches} layers of the "
                             f"draft model and heads for {heads}, expected {expected}")
        if (len(chip.drafts) > 1) != (info.chain == "layers") or \
                (info.mask_token_id is not None) != (info.chain == "block"):
            raise ValueError(f"chip {chip.rank} has {len(chip.drafts)} programs of the draft "
                             f"model, and mask_token_id is {info.mask_token_id}, contrary to "
                             f"the chain {info.chain!r}")
        spec = self.target.spec
        if not (spec.drafts and chip.verifies_drafts) or self.encoder:
            raise ValueError(f"chip {chip.rank} has a draft model, which this model or target "
                             f"{self.target.kind} does not support")
        for index, draft in enumerate(chip.drafts):
            self._check_draft_program(chip, index, draft, info)

    def _check_draft_program(self, chip: Chip, index: int, draft: DraftProgram,
                             info: DraftInfo) -> None:
        """Check a program of the draft model; see `_check_draft`."""
        if (info.kind == "model") == bool(draft.hidden_size):
            raise ValueError(f"chip {chip.rank}: a draft model of kind {info.kind} has "
                             f"{'an' if draft.hidden_size else 'no'} input {HIDDEN!r}")
        paged = self.kv_cache_layout == "paged"
        known = chip.caches_of_draft(index) if info.chain != "position" else chip.caches
        caches = {name: cache_shape(cache, self.dims.max_seq_len, paged=paged)
                  for name, cache in known.items()}
        updated = {f"{name}_out" for name in chip.caches_of_draft(index)}
        results = updated | {"logits"} | (
            {HIDDEN_OUT} if draft.hidden_size and info.chain != "block" else set())
        mismatch = {tensor.name for tensor in draft.outputs} ^ results
        if mismatch:
            raise ValueError(f"chip {chip.rank}: the outputs of the draft model differ from "
                             f"{', '.join(sorted(results))} in {min(mismatch)!r}")
        features = ("num_tokens", chip.drafts[0].hidden_size or 0)
        for tensor in (*draft.inputs, *draft.outputs):
            if (name := tensor.name.removesuffix("_out")) in caches:
                tensor.require(self.kv_dtype, caches[name])
            elif tensor.name in (HIDDEN, HIDDEN_OUT):
                tensor.require(self.dtype, features)
            elif tensor.name == "logits":
                tensor.require(self.dtype, ("num_logits", info.padded_vocab_size))
            else:
                self._require_input(tensor)

    def _check_heads(self) -> None:
        """Check that each head is on one chip, with its KV head, or that all chips have all."""
        dims = self.dims
        if len({len(chip.cache) for chip in self.chips}) > 1:
            raise ValueError("the chips have caches for different numbers of layers")
        if bool(dims.num_heads) != bool(self.chips[0].cache) and not self.pooling:
            raise ValueError(f"the model has {dims.num_heads} heads, but caches for "
                             f"{len(self.chips[0].cache)} layers")
        if not dims.num_heads or not self.chips[0].cache:
            return
        first = [(chip.num_heads[0], chip.cache[0].num_kv_heads) for chip in self.chips]
        whole = dims.num_heads, dims.num_kv_heads
        if {*first} != {whole} and not covers(*whole, first):
            raise ValueError(
                f"the chips have {[heads for heads, _ in first]} heads and "
                f"{[kv_heads for _, kv_heads in first]} KV heads, expected a partition of the "
                f"model's {dims.num_heads} and {dims.num_kv_heads}")
        if self.chips[0].cache[0].head_dim != dims.head_dim:
            raise ValueError(f"chip 0 has head_dim {self.chips[0].cache[0].head_dim}, the model "
                             f"{dims.head_dim}")
        for chip in self.chips:
            for layer, (heads, cache) in enumerate(zip(chip.num_heads, chip.cache, strict=True)):
                first_chip = self.chips[0].cache[layer]
                if heads % cache.num_kv_heads or (cache.head_dim, cache.latent) != \
                        (first_chip.head_dim, first_chip.latent):
                    raise ValueError(
                        f"layer {layer} of chip {chip.rank} has {heads} heads, "
                        f"{cache.num_kv_heads} KV heads and head_dim {cache.head_dim}: "
                        f"inconsistent, or unlike chip 0")

    def _check_ops(self) -> None:
        """Check the versions of the ops, and that the required ops are listed."""
        known = plugins.registry()
        for name, version in self.ops.items():
            if name not in known or known[name].version != version:
                here = f"version {known[name].version}" if name in known else "no such op"
                raise ValueError(f"the model uses version {version} of {name}, this llmc has "
                                 f"{here}")
        chip, block = self.chips[0], self.draft is not None and self.draft.chain == "block"
        required = {"Embedding"} | {
            "LatentAttention" if cache.latent else "CausalAttention"
            for cache in (*chip.caches.values(), *(() if block else chip.draft_caches.values()))}
        if block:
            required.add("BlockAttention")
        if self.chips[0].states and not any(known[name].state for name in self.ops):
            raise ValueError("the model has recurrent states, but no op that uses them")
        if self.mem_max_seq_len:
            required.add("BidirectionalAttention")
        if self.pooling and self.pooling.kind:
            required.add("Pool")
        if self.tp_size > 1:
            required |= {"AllReduce"} if self.pooling else {"AllGather", "AllReduce"}
        absent = required - self.ops.keys()
        if absent:
            raise ValueError(f"ops lacks {min(absent)}, which the model needs")

    def _token_ids(self) -> Iterator[tuple[str, int]]:
        """Yield each special token id with the name of its field."""
        named: dict[str, Sequence[int | None]] = {
            "bos_token_id": [self.tokenizer.bos_token_id],
            "eos_token_ids": self.tokenizer.eos_token_ids}
        if self.sampling:
            named["suppress_tokens"] = self.sampling.suppress_tokens
        if self.encoder:
            named |= {"decoder_start_token_id": [self.encoder.decoder_start_token_id],
                      "forced_bos_token_ids": self.encoder.forced_bos_token_ids,
                      "forced_eos_token_ids": self.encoder.forced_eos_token_ids,
                      "bad_words": [token for word in self.encoder.bad_words for token in word]}
        if self.encoder and self.encoder.speech:
            speech = self.encoder.speech
            named |= {"speech": [*speech.languages.values(), *speech.tasks.values(),
                                 *speech.begin_suppress_tokens, speech.no_timestamps_token_id,
                                 speech.prev_sot_token_id]}
        return ((name, token) for name, tokens in named.items() for token in tokens
                if token is not None)


def cache_shape(cache: LayerCache, max_seq_len: int, *, paged: bool) -> tuple[int | str, ...]:
    """Return the shape of a layer's key, value or latent cache."""
    if paged:
        return "num_blocks", cache.num_kv_heads, "block_size", cache.head_dim
    return "batch", cache.num_kv_heads, max_seq_len, cache.head_dim


def covers(num_heads: int, num_kv_heads: int, ranks: Sequence[tuple[int, int]]) -> bool:
    """Whether ranks partition the heads, each with the KV heads that it reads.

    Args:
        num_heads: of the model.
        num_kv_heads: of the model. Ranks that share a group of heads each have a copy of its KV
            head.
        ranks: heads and KV heads of each rank.
    """
    group, stop = num_heads // num_kv_heads, 0
    for heads, kv_heads in ranks:
        start, stop = stop, stop + heads
        if -(-stop // group) - start // group != kv_heads or heads % kv_heads:
            return False
    return stop == num_heads


def _collectives(chip: Chip) -> list[CollectiveStep]:
    return [step for step in chip.all_steps if isinstance(step, CollectiveStep)]


def read_manifest(case_dir: str | Path) -> Manifest:
    """Parse and validate `CASE_DIR/model_info.json`.

    Raises:
        LlmcError: the directory or the file is missing, is not JSON, or has an unsupported format
            version; or a field is missing, unknown or invalid, and the message names it.
    """
    directory = Path(case_dir)
    path = directory / MANIFEST_NAME
    if not os.path.isdir(directory):
        raise LlmcError(f"case directory '{directory}' does not exist; create it with: "
                        f"llmc compile MODEL -o {directory}")
    if not os.path.lexists(path):
        raise LlmcError(f"'{directory}' has no {MANIFEST_NAME}, so it is not a case directory; "
                        f"create one with: llmc compile MODEL -o DIR")
    try:
        text = read_bounded(path, _MAX_MANIFEST_BYTES).decode("utf-8")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise LlmcError(f"'{path}' cannot be read as JSON ({error}); compile the model again") \
            from error
    if not isinstance(data, dict):
        raise LlmcError(f"'{path}' is not a JSON object; compile the model again")
    version = data.get("format_version")
    if version == 1:
        raise LlmcError(f"'{path}' has format_version 1, this llmc reads {FORMAT_VERSION}; compile "
                        f"the model again")
    if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT_VERSION:
        raise LlmcError(f"'{path}' has format_version {version}, this llmc reads up to "
                        f"{FORMAT_VERSION}; install a newer llmc or compile the model again")
    try:
        manifest = Manifest.model_validate_json(text)
        manifest.target.require_versions()
    except ValidationError as error:
        raise LlmcError(f"'{path}' is not a valid manifest: {explain(error)}; compile the model "
                        f"again") from error
    except ValueError as error:
        raise LlmcError(f"'{path}' is not a valid manifest: {error}; compile the model again") \
            from error
    return manifest


def explain(error: ValidationError) -> str:
    """Format the first error of a validation on one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = "".join(f"{part}: " for part in [".".join(map(str, first["loc"]))] if part)
    text = where + first["msg"].removeprefix("Value error, ")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def require_causal_lm(manifest: Manifest, command: str) -> None:
    """Raise LlmcError for any model but a causal LM, in a command that supports only these."""
    if manifest.pooling is not None:
        raise LlmcError(f"llmc {command} does not support task {manifest.pooling.task}, for which "
                        f"'{manifest.source.architecture}' was compiled; give a causal LM")
    if manifest.encoder is not None:
        raise LlmcError(f"llmc {command} does not support encoder-decoder models such as "
                        f"'{manifest.source.architecture}'; give a causal LM")


def require_speech(manifest: Manifest, instead: str = "") -> EncoderInfo:
    """Return the encoder of a model that transcribes speech.

    Args:
        instead: another remedy, after a comma.

    Raises:
        LlmcError: its encoder reads no audio.
    """
    if manifest.encoder is None or manifest.features is None:
        images, audio = (f", {name}" if own else "" for name, own in (
            ("images", manifest.image), ("audio", manifest.audio)))
        taken = " and".join(f"text{images}{audio}".rsplit(",", 1))
        raise LlmcError(f"'{manifest.source.architecture}' takes {taken} in prompts, and does not "
                        f"transcribe speech; give an encoder-decoder model of audio, such as "
                        f"Whisper{instead}")
    return manifest.encoder


def prompt_vocab_size(manifest: Manifest, command: str) -> int:
    """Return the number of tokens that prompts have, those of the encoder if there is one.

    Raises:
        LlmcError: the encoder reads audio.
    """
    size = (manifest.encoder or manifest.dims).vocab_size
    if size is None:
        remedy = "measure it with --audio SECONDS" if command == "bench" else \
            "give a model of text"
        raise LlmcError(f"llmc {command} does not support encoders of audio such as that of "
                        f"'{manifest.source.architecture}'; {remedy}")
    return size


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of `model_info.json`, as in `artifacts/model_info.schema.json`."""
    return Manifest.model_json_schema()


def write_manifest(manifest: Manifest, case_dir: str | Path) -> None:
    """Write `model_info.json` deterministically.

    Raises:
        LlmcError: it is larger than `read_manifest` accepts.
    """
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    data = text.encode()
    if len(data) > _MAX_MANIFEST_BYTES:
        raise LlmcError(f"{MANIFEST_NAME} would have {len(data)} bytes, expected at most "
                        f"{_MAX_MANIFEST_BYTES}; compile for fewer chips")
    (Path(case_dir) / MANIFEST_NAME).write_bytes(data)


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with open_regular(Path(path)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_files(manifest: Manifest, case_dir: str | Path, *, hashes: bool = True,
                 ranks: Collection[int] | None = None) -> None:
    """Check the files of a case directory against the manifest.

    Every listed file must exist with its size and, if `hashes`, its SHA-256; no other file may be
    read; the weight files must match the manifest.

    Args:
        hashes: check SHA-256 digests, too.
        ranks: check only the files of these ranks and of the tokenizer; None: all files. A host
            needs the chip directories of its ranks only.

    Raises:
        LlmcError: a file is missing, truncated, changed, not regular or not listed, or its weights
            do not match; the message names the first such file.
    """
    root = Path(case_dir)
    ranks = range(manifest.tp_size) if ranks is None else sorted(set(ranks))
    check_files(manifest, root, ranks)
    for entry in _entries(manifest, ranks):
        path = root / entry.path
        again = "; compile the model again, or copy the case directory again"
        try:
            size = path.stat().st_size
            changed = hashes and size == entry.size and hash_file(path) != entry.sha256
        except OSError as error:
            raise LlmcError(f"'{path}' cannot be read ({error}){again}") from error
        if size != entry.size:
            raise LlmcError(f"'{path}' has {size} bytes, expected {entry.size} as in "
                            f"{MANIFEST_NAME}{again}")
        if changed:
            raise LlmcError(f"'{path}' has changed since compilation: its SHA-256 differs from "
                            f"{MANIFEST_NAME}{again}")
    _check_weights(manifest, root, ranks)


def check_files(manifest: Manifest, case_dir: Path, ranks: Collection[int] | None = None) -> None:
    """Check that listed files are regular, and that optional files are listed if present.

    Args:
        ranks: see `verify_files`.

    Raises:
        LlmcError: a file is missing, not regular, below a symbolic link, or not listed; the
            message names the first such file.
    """
    for entry in _entries(manifest, range(manifest.tp_size) if ranks is None else ranks):
        check_case_file(case_dir, entry.path)
    listed = {entry.path for entry in manifest.files}
    tokenizer = manifest.tokenizer
    template = tokenizer.chat_template
    read = [tokenizer.path and f"{tokenizer.path}/tokenizer.json", template]
    if template and (size := (case_dir / template).stat().st_size) > _MAX_TEMPLATE_BYTES:
        raise LlmcError(f"'{case_dir / template}' has {size} bytes, expected at most "
                        f"{_MAX_TEMPLATE_BYTES}; compile the model again")
    for path in (str(PurePosixPath(file).with_name(_TOKENIZER_CONFIG)) for file in read if file):
        if path not in listed and os.path.lexists(case_dir / path):
            raise LlmcError(f"'{case_dir / path}' is not listed in {MANIFEST_NAME}, so it cannot "
                            f"be verified; remove it, or compile the model again")


def _entries(manifest: Manifest, ranks: Collection[int]) -> list[FileEntry]:
    """Return the files of these ranks, and those of no rank."""
    owners = {chip.path: chip.rank for chip in manifest.chips}

    def is_read(entry: FileEntry) -> bool:
        folders = map(str, PurePosixPath(entry.path).parents)
        owner = next((owners[folder] for folder in folders if folder in owners), None)
        return owner is None or owner in ranks

    return list(filter(is_read, manifest.files))


def _check_weights(manifest: Manifest, root: Path, ranks: Collection[int]) -> None:
    """Check the weight files of these ranks against the manifest's dims.

    An embedding has hidden_size columns, and the ranks together have a row for each token.
    """
    headers = []
    for chip in (manifest.chips[rank] for rank in ranks):
        header = read_weight_header(root / chip.path / WEIGHTS_NAME)
        headers.append({name: weight.shape if name not in chip.quantization else
                        (weight.shape[0], weight.shape[-1] * _per_byte(chip.quantization[name]))
                        for name, weight in header.items()})
        held = sum(weight.stop - weight.start for weight in header.values())
        if held != chip.weight_bytes:
            raise LlmcError(f"'{root / chip.path / WEIGHTS_NAME}' has {held} bytes of weights, "
                            f"expected {chip.weight_bytes} as in {MANIFEST_NAME}; compile the "
                            f"model again")
    if not headers:
        return

    def rows(vocab_size: int) -> int:
        """Minimum rows of these ranks; the shares of a vocabulary differ by at most one."""
        some = len(headers) < manifest.tp_size
        return len(headers) * (vocab_size // manifest.tp_size) if some else vocab_size

    dims, encoder = manifest.dims, manifest.encoder
    if not _has_table(headers, rows(dims.vocab_size), dims.hidden_size):
        raise LlmcError(f"no weight in '{root}' has hidden_size {dims.hidden_size} columns and "
                        f"vocab_size {dims.vocab_size} rows, as {MANIFEST_NAME} requires; compile "
                        f"the model again")
    if encoder is not None and encoder.vocab_size is not None \
            and not _has_table(headers, rows(encoder.vocab_size)):
        raise LlmcError(f"no weight in '{root}' has a row for each token of the encoder's "
                        f"vocab_size {encoder.vocab_size}, as {MANIFEST_NAME} requires; compile "
                        f"the model again")


def _per_byte(form: WeightForm) -> int:
    """Weights per byte."""
    return CODE_TYPES[form.dtype].per_byte


def _has_table(headers: Sequence[Mapping[str, tuple[int, ...]]], rows: int,
               columns: int | None = None) -> bool:
    """Whether all chips have a matrix of the same name with at least `rows` rows in total."""
    for name in headers[0]:
        shapes = [header[name] for header in headers if name in header]
        if len(shapes) == len(headers) and all(
                len(shape) == 2 and columns in (None, shape[1]) for shape in shapes) \
                and sum(shape[0] for shape in shapes) >= rows:
            return True
    return False
