"""`model_info.json` as typed, validated, frozen data: all that a loader must know.

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
from llmc.artifacts.weight_file import WEIGHTS_NAME, read_weight_header
from llmc.errors import LlmcError
from llmc.limits import MAX_CHIPS
from llmc.plugins.code_types import CODE_TYPES
from llmc.targets import TARGETS, TargetSpec

FORMAT_VERSION = 2
MANIFEST_NAME = "model_info.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
FACTS = "llmc"  # the key of what an ONNX file says of itself

DTypeName = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1,
                               "int64": 8, "int32": 4}

if TYPE_CHECKING:
    WeightDType = str
else:
    WeightDType = Literal[tuple(CODE_TYPES)]

# Inputs of an engine: dtype and shape. A target with index_dtype int32 has that for int64.
ENGINE_INPUTS: dict[str, tuple[DTypeName, tuple[str, ...]]] = {
    "input_ids": ("int64", ("num_tokens",)),
    "position_ids": ("int64", ("num_tokens",)),
    "cu_seqlens": ("int32", ("batch_plus_1",)),
    "past_lens": ("int32", ("batch",)),
    "logits_indices": ("int64", ("num_logits",)),
    "block_table": ("int32", ("batch", "max_blocks")),
    "state_slots": ("int32", ("batch",)),
    "memory_starts": ("int32", ("batch",)),
    "encoder_sequence_length": ("int32", ("batch",)),
}
ENCODER_INPUTS = ("input_ids", "position_ids", "cu_seqlens")
_MAX_MANIFEST_BYTES = 16 << 20  # 128 layers on 8 chips take 3 MB
_MAX_TEMPLATE_BYTES = 4 << 20
_MAX_LAYERS = 65536
_MAX_FILES = 65536
_MOST = 2**31 - 1  # what a kernel counts with
_MOST_ROW_BYTES = 2**40  # of a cache; more than any device has


def _inside_case_dir(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or ":" in path:
        raise ValueError(f"path {path!r} must be relative and stay inside the case directory")
    if str(PurePosixPath(path)) != path or not path.isprintable():
        raise ValueError(f"path {path!r} is not written as {str(PurePosixPath(path))!r}")
    return path


CasePath = Annotated[str, AfterValidator(_inside_case_dir)]
Count = Annotated[int, Field(ge=1, le=_MOST)]
CountOrNone = Annotated[int, Field(ge=0, le=_MOST)]
LayerCount = Annotated[int, Field(ge=1, le=_MAX_LAYERS)]
SizeName = Annotated[str, Field(
    pattern="^(num_tokens|num_logits|batch|batch_plus_1|num_memory_tokens|num_blocks|block_size"
            "|max_blocks|num_states)$")]
TokenId = Annotated[int, Field(ge=0, le=_MOST)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileEntry(_Frozen):
    """One file of the case directory. `size` in bytes, `sha256` as 64 hex digits."""

    path: CasePath
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TensorInfo(_Frozen):
    """An engine's input or output; a dimension is a number or a step's size."""

    name: str
    dtype: DTypeName
    shape: tuple[Count | SizeName, ...]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return int(self.shape[-1])

    def require(self, dtype: str, shape: Sequence[int | str]) -> None:
        """Raises ValueError where it is something else."""
        if self.dtype != dtype or self.shape != tuple(shape):
            raise ValueError(f"{self.name!r} is {self.dtype} {list(self.shape)}, which should be "
                             f"{dtype} {list(shape)}")


class GraphStep(_Frozen):
    """Run one ONNX file of the chip."""

    kind: Literal["graph"] = "graph"
    path: CasePath
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class CollectiveStep(_Frozen):
    """Combine one tensor over all ranks: `all_reduce` sums, `all_gather` joins the last axis."""

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
    """The KV cache of one attention layer on one chip: `key_cache_<layer>`, `value_cache_<layer>`,
    each `[batch, num_kv_heads, max_seq_len, head_dim]`, where the layout is paged `[num_blocks,
    num_kv_heads, block_size, head_dim]`. Where it is `latent`, `latent_cache_<layer>` alone, of
    which all heads make their keys and values.
    """

    num_kv_heads: Count
    head_dim: Count
    latent: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of what there is a cache."""
        return ("latent",) if self.latent else ("key", "value")

    @property
    def token_size(self) -> int:
        """Elements of a token."""
        return len(self.kinds) * self.num_kv_heads * self.head_dim


class StateCache(_Frozen):
    """What a sequence keeps in one layer whatever its length, on one chip: float32 `[batch,
    *shape]`, where the KV cache is paged `[num_states, *shape]`.
    """

    shape: Annotated[tuple[Count, ...], Field(min_length=1)]

    @property
    def size(self) -> int:
        """Bytes of a sequence."""
        return 4 * math.prod(self.shape)


Steps = Annotated[tuple[Annotated[GraphStep | CollectiveStep, Field(discriminator="kind")], ...],
                  Field(max_length=_MAX_FILES)]


class EncoderProgram(_Frozen):
    """The encoder on one chip: from `input_ids`, `cu_seqlens` and perhaps `position_ids` to what
    the decoder sees of a prompt, `memory_key_<layer>` and `memory_value_<layer>`, each
    `[num_tokens, num_kv_heads * head_dim]`. `steps` are as a chip's.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    steps: Steps


class WeightForm(_Frozen):
    """A weight matrix in fewer bits, as llmc.plugins.quantization has it: its scales are the weight
    `<name>_scale`, its zeros or minima, where the dtype has such, `<name>_zero` or `<name>_min`,
    and where kernels take scales of blocks, these are `<name>_blocks`.
    `activation_dtype`: what it multiplies is rounded to that, by `activation_scale`, or where that
    is 0 each token by a scale of its own, or each of its groups of `activation_group_size`.
    """

    dtype: WeightDType
    group_size: Count
    activation_dtype: Literal["", "float8_e4m3fn"] = ""
    activation_scale: Annotated[float, Field(ge=0)] = 0.0
    activation_group_size: Annotated[int, Field(ge=0)] = 0


class Chip(_Frozen):
    """What one rank loads and runs.

    `steps` are run in order; a graph step reads and writes named tensors. Engine inputs are
    `input_ids`, `cu_seqlens`, `past_lens`, `logits_indices`, perhaps `position_ids`, where caches
    are paged `block_table` for keys and values and `state_slots` for states, and the caches; an
    updated cache is named `<cache>_out`, and the last step makes `logits`. With an `encoder`, they
    are its decoder's, whose inputs also are `memory_starts`, `encoder_sequence_length`, and what
    the encoder made. `num_heads` are the query heads of each layer. `quantization` has the weights
    in fewer bits, by name. `states` are caches too, named `state_<i>`, of layers that keep a state
    instead of keys and values.
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
    quantization: dict[str, WeightForm] = {}

    @property
    def all_steps(self) -> Steps:
        """The encoder's, and then its own."""
        return (*(self.encoder.steps if self.encoder else ()), *self.steps)

    @property
    def caches(self) -> dict[str, LayerCache]:
        """By their names."""
        return {f"{kind}_cache_{layer}": cache for layer, cache in enumerate(self.cache)
                for kind in cache.kinds}

    @property
    def state_caches(self) -> dict[str, StateCache]:
        """By their names."""
        return {f"state_{index}": state for index, state in enumerate(self.states)}

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of all that is kept from step to step."""
        return *self.caches, *self.state_caches

    @model_validator(mode="after")
    def _steps_follow(self) -> Chip:
        memory = {tensor.name for tensor in self.encoder.outputs} if self.encoder else set()
        if self.encoder:
            self._follow(self.encoder.steps, {*ENCODER_INPUTS}, memory)
            self._listed(self.encoder.inputs, self.encoder.outputs, self.encoder.steps)
        self._follow(self.steps, {*self.kept, *ENGINE_INPUTS, *memory},
                     {*(f"{name}_out" for name in self.kept), "logits"})
        self._listed(self.inputs, self.outputs, self.steps)
        for step in self.all_steps:
            if isinstance(step, GraphStep) and not step.path.startswith(f"{self.path}/"):
                raise ValueError(f"chip {self.rank} runs {step.path!r}, which is not in "
                                 f"{self.path!r}")
        return self

    def _listed(self, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo],
                steps: Steps) -> None:
        """Check that what is said to go in and come out is what does."""
        made = {name for step in steps for name in step.outputs}
        given = {name for step in steps for name in step.inputs} - made
        names = Counter(tensor.name for tensor in (*inputs, *outputs))
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"chip {self.rank} lists {twice!r} twice")
        # Of positions only the rank that adds them makes use.
        odd = {tensor.name for tensor in inputs} ^ given
        if odd - {"position_ids"} or given - {tensor.name for tensor in inputs}:
            raise ValueError(f"chip {self.rank}'s steps and its inputs differ in {min(odd)!r}")
        absent = {tensor.name for tensor in outputs} - made
        if absent:
            raise ValueError(f"chip {self.rank} does not make {min(absent)!r}")

    def _follow(self, steps: Steps, known: set[str], wanted: set[str]) -> None:
        """Check that steps make what is wanted from what is known."""
        for step in steps:
            missing = set(step.inputs) - known
            if missing:
                raise ValueError(f"chip {self.rank} needs {min(missing)!r} before it is made")
            for name in step.outputs:
                if name in known:
                    raise ValueError(f"chip {self.rank} makes {name!r} twice")
                known.add(name)
        absent = wanted - known
        if absent:
            raise ValueError(f"chip {self.rank} does not make {min(absent)!r}")


class SourceFile(_Frozen):
    """An input file of a compile. `sha256` is absent of large local files."""

    name: str
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None


class Source(_Frozen):
    """Where the model came from.

    `config_sha256` is the digest of its config, keys sorted. `repo_id` and `commit` are those of
    the Hugging Face hub, for a model that was fetched from it.
    """

    kind: Literal["huggingface", "gguf", "onnx"]
    architecture: str
    config_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    repo_id: str | None = None
    commit: str | None = None
    files: tuple[SourceFile, ...] = ()


class Dims(_Frozen):
    """Sizes of a model. Heads are those of its first layer that attends; 0 where none does."""

    num_layers: LayerCount
    hidden_size: Count
    num_heads: CountOrNone
    num_kv_heads: CountOrNone
    head_dim: CountOrNone
    vocab_size: Count
    padded_vocab_size: Count
    max_seq_len: Count

    @model_validator(mode="after")
    def _padding_only_grows(self) -> Dims:
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}"
            )
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        if any(heads) and (not all(heads) or self.num_heads % self.num_kv_heads):
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads "
                             f"{self.num_kv_heads}")
        return self


class EncoderInfo(_Frozen):
    """The encoder of an encoder-decoder model, and how its decoder begins and ends.

    A prompt is at most `max_seq_len` tokens of the encoder's `vocab_size`. Decoding begins with
    `decoder_start_token_id`. Where there are `forced_bos_token_ids`, one of them is the first new
    token, and of `forced_eos_token_ids` the last that `max_tokens` leaves room for. `bad_words` are
    never generated.
    """

    num_layers: LayerCount
    max_seq_len: Count
    vocab_size: Count
    decoder_start_token_id: TokenId
    forced_bos_token_ids: tuple[TokenId, ...] = ()
    forced_eos_token_ids: tuple[TokenId, ...] = ()
    bad_words: tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...] = ()


def _known_target(kind: str) -> str:
    if kind not in TARGETS:
        raise ValueError(f"target '{kind}' is not known; there are: {', '.join(TARGETS)}")
    return kind


class Target(_Frozen):
    """What the engines were made for; `versions` names the libraries whose version matters, and
    `compute_capability` the only GPUs that may run them, such as 9.0, where it was asked for or
    they were built on one, which `gpu` names. `max_batch_size` is set where they take no more
    sequences.
    """

    kind: Annotated[str, AfterValidator(_known_target),
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
    def _of_its_kind(self) -> Target:
        given = {name for name in ("compute_capability", "gpu", "max_batch_size")
                 if getattr(self, name) is not None}
        odd = given - self.spec.optional_fields
        if odd:
            raise ValueError(f"target {self.kind} has no {min(odd)}, but it is "
                             f"{getattr(self, min(odd))!r}")
        return self

    def require_versions(self) -> None:
        """Raises ValueError where an engine that its builder made does not say for what."""
        absent = [*(f"versions.{name}" for name in self.spec.versions if name not in self.versions),
                  *(name for name in sorted(self.spec.required_fields)
                    if getattr(self, name) is None)]
        if absent:
            raise ValueError(f"target {self.kind} does not say {absent[0]}")



class TokenizerInfo(_Frozen):
    """`path` is the tokenizer directory, absent when the source had none.

    `chat_template` is the file of the default chat template. `additional_chat_templates` are the
    files of others by name, such as `tool_use` for conversations with tools.
    """

    path: CasePath | None
    bos_token_id: TokenId | None
    eos_token_ids: tuple[TokenId, ...]
    chat_template: CasePath | None
    additional_chat_templates: dict[str, CasePath] = {}

    @property
    def chat_templates(self) -> dict[str, str]:
        """The files of all chat templates by name."""
        default = {} if self.chat_template is None else {"default": self.chat_template}
        return {**self.additional_chat_templates, **default}


class SamplingDefaults(_Frozen):
    """Sampling parameters that the model's authors recommend, as generation_config.json has them.

    Absent ones are those of `SamplingParams`. `suppress_tokens` are never generated.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    suppress_tokens: tuple[TokenId, ...] = ()

    def fields(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that these set."""
        fields = self.model_dump(exclude_none=True, exclude={"suppress_tokens"})
        if self.suppress_tokens:
            fields["logit_bias"] = dict.fromkeys(self.suppress_tokens, -math.inf)
        return fields


class PassReport(_Frozen):
    """What one compiler pass did: rewrites per rule, and each refusal with its reason."""

    name: str
    matches: dict[str, int]
    refusals: tuple[str, ...] = ()


class Manifest(_Frozen):
    """The whole of `model_info.json`. `quantization` lists the dtypes of weights in fewer bits, if
    there are any; each chip says which weights those are.
    """

    format_version: Literal[2]
    llmc_version: str
    source: Source
    dims: Dims
    encoder: EncoderInfo | None = None
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
    def kv_dtype(self) -> DTypeName:
        """Of the KV caches."""
        return next((tensor.dtype for tensor in self.chips[0].inputs
                     if tensor.name == "key_cache_0"), self.dtype)

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if len(self.chips) != self.tp_size or \
                any(chip.rank != rank for rank, chip in enumerate(self.chips)):
            raise ValueError(f"tp_size is {self.tp_size}, but the chips are not ranks 0 to "
                             f"{self.tp_size - 1}")
        self._check_files()
        self._check_dtypes()
        if (self.kv_cache_layout == "paged") != self.target.spec.paged:
            raise ValueError(f"kv_cache_layout is {self.kv_cache_layout}, which target "
                             f"{self.target.kind} does not have")
        for chip in self.chips:
            if not {form.dtype for form in chip.quantization.values()} <= \
                    {*(self.quantization or ())}:
                raise ValueError(f"chip {chip.rank} has weights of dtypes that quantization does "
                                 f"not list")
            if _collectives(chip) != _collectives(self.chips[0]):
                raise ValueError(f"chips 0 and {chip.rank} do not have the same collectives")
            if (chip.encoder is None) != (self.encoder is None):
                raise ValueError(f"chip {chip.rank} has {'no' if self.encoder else 'an'} encoder, "
                                 f"unlike the model")
            layers = self.dims.num_layers
            if len(chip.cache) != len(chip.num_heads) or len(chip.cache) > layers or \
                    (len(chip.cache) < layers and not chip.states and not self._shares_caches):
                raise ValueError(f"chip {chip.rank} has caches for {len(chip.cache)} layers and "
                                 f"heads for {len(chip.num_heads)}, the model has "
                                 f"{layers}")
            if [len(state.shape) for state in chip.states] != \
                    [len(state.shape) for state in self.chips[0].states]:
                raise ValueError(f"chips 0 and {chip.rank} do not have the same states")
            if chip.states and not self.target.spec.recurrent_state:
                raise ValueError(f"target {self.target.kind} keeps no states, chip {chip.rank} has "
                                 f"{len(chip.states)}")
            self._check_inputs(chip)
            self._check_outputs(chip)
        self._check_heads()
        self._check_ops()
        for name, token in self._token_ids():
            if token >= self.dims.vocab_size:
                raise ValueError(f"{name} has token {token}, the vocabulary "
                                 f"{self.dims.vocab_size}")
        for group in self.device_groups:
            if len(group) != self.tp_size or len(set(group)) != len(group) or min(group) < 0:
                raise ValueError(f"device group {list(group)} is not {self.tp_size} devices")
        return self

    def _check_files(self) -> None:
        """What the chips and the tokenizer read is listed."""
        listed = {entry.path: entry.size for entry in self.files}
        if len(listed) != len(self.files):
            raise ValueError("a file is listed twice")
        if len({chip.path for chip in self.chips}) != len(self.chips):
            raise ValueError("two chips have one path")
        for chip in self.chips:
            for step in chip.all_steps:
                if isinstance(step, GraphStep) and step.path not in listed:
                    raise ValueError(f"chip {chip.rank} runs {step.path!r}, which is not listed")
            weights = f"{chip.path}/{WEIGHTS_NAME}"
            if weights not in listed:
                raise ValueError(f"chip {chip.rank}'s {weights!r} is not listed")
            if listed[weights] < chip.weight_bytes:
                raise ValueError(f"chip {chip.rank} has {chip.weight_bytes} bytes of weights, "
                                 f"{weights!r} only {listed[weights]}")
        own = self.tokenizer
        for path in (own.path and f"{own.path}/tokenizer.json", *own.chat_templates.values()):
            if path is not None and path not in listed:
                raise ValueError(f"the tokenizer's {path!r} is not listed")

    def _check_dtypes(self) -> None:
        spec = self.target.spec
        if self.dtype not in spec.dtypes:
            raise ValueError(f"target {self.target.kind} has no dtype {self.dtype}")
        if self.kv_dtype not in (self.dtype, *spec.kv_dtypes):
            raise ValueError(f"the KV caches are of {self.kv_dtype}, the model of {self.dtype}")
        length = self.dims.max_seq_len
        for chip in self.chips:
            for cache in chip.cache:
                row = cache.num_kv_heads * cache.head_dim * length * DTYPE_BYTES[self.kv_dtype]
                if row > _MOST_ROW_BYTES:
                    raise ValueError(f"max_seq_len {length} makes a cache row of {row} bytes, more "
                                     f"than any device has")
            for name, state in chip.state_caches.items():
                if state.size > _MOST_ROW_BYTES:
                    raise ValueError(f"{name!r} takes {state.size} bytes for a sequence, more than "
                                     f"any device has")

    @property
    def _shares_caches(self) -> bool:
        """Whether layers read other layers' caches."""
        known = plugins.registry()
        return any(op.attention is not None and op.attention.reads
                   for op in map(known.get, self.ops) if op is not None)

    def _check_inputs(self, chip: Chip) -> None:
        """What a chip is given is what an engine gives it, of its dtype and shape."""
        dims = self.dims
        paged = self.kv_cache_layout == "paged"
        table = {"block_table"} if paged and chip.cache else set()
        slots = {"state_slots"} if paged and chip.states else set()
        memory = {"memory_starts", "encoder_sequence_length"} if self.encoder else set()
        given = {tensor.name: tensor for tensor in chip.inputs}
        made = {tensor.name: tensor for tensor in chip.encoder.outputs} if chip.encoder else {}
        wanted = {"input_ids", "cu_seqlens", "past_lens", "logits_indices", *table, *slots, *memory,
                  *chip.kept, *made}
        odd = (given.keys() ^ wanted) - {"position_ids"}
        if odd:
            raise ValueError(f"chip {chip.rank} has {'an' if min(odd) in given else 'no'} input "
                             f"{min(odd)!r}")
        for name, tensor in given.items():
            if name in chip.caches:
                cache = chip.caches[name]
                tensor.require(self.kv_dtype, cache_shape(cache, dims.max_seq_len, paged=paged))
            elif name in chip.state_caches:
                tensor.require("float32", ("num_states" if paged else "batch",
                                           *chip.state_caches[name].shape))
            elif name in made:
                tensor.require(self.dtype, ("num_memory_tokens", *made[name].shape[1:]))
            else:
                self._require_input(tensor)
        for tensor in chip.encoder.inputs if chip.encoder else ():
            self._require_input(tensor)

    def _require_input(self, tensor: TensorInfo) -> None:
        dtype, shape = ENGINE_INPUTS[tensor.name]
        tensor.require(self.target.spec.index_dtype if dtype == "int64" else dtype, shape)

    def _check_outputs(self, chip: Chip) -> None:
        """What a chip makes is what an engine reads."""
        dims = self.dims
        given = {f"{tensor.name}_out": tensor for tensor in chip.inputs
                 if tensor.name in chip.kept}
        odd = {tensor.name for tensor in chip.outputs} ^ {*given, "logits"}
        if odd:
            raise ValueError(f"chip {chip.rank}'s outputs are not its caches and logits: see "
                             f"{min(odd)!r}")
        for tensor in chip.outputs:
            if tensor.name == "logits":
                tensor.require(self.dtype, ("num_logits", dims.padded_vocab_size))
            else:
                cache = given[tensor.name]
                tensor.require(cache.dtype, cache.shape)
        made = chip.encoder.outputs if chip.encoder else ()
        for tensor in made:
            width = tensor.shape[-1] if len(tensor.shape) == 2 else 0
            if not isinstance(width, int):
                raise ValueError(f"{tensor.name!r} is {width} wide")
            tensor.require(self.dtype, ("num_tokens", width))
        names = {tensor.name for tensor in made}
        layers = len(made) // 2
        if names != {f"memory_{kind}_{i}" for kind in ("key", "value") for i in range(layers)}:
            raise ValueError(f"chip {chip.rank}'s encoder makes {min(names)!r} and others, which "
                             f"are not keys and values of as many layers")

    def _check_heads(self) -> None:
        """Each head is on one chip, beside its KV head; or all chips have all."""
        dims = self.dims
        if len({len(chip.cache) for chip in self.chips}) > 1:
            raise ValueError("the chips do not have caches of as many layers")
        if bool(dims.num_heads) != bool(self.chips[0].cache):
            raise ValueError(f"the model has {dims.num_heads} heads, and caches of "
                             f"{len(self.chips[0].cache)} layers")
        if not dims.num_heads:
            return
        first = [(chip.num_heads[0], chip.cache[0].num_kv_heads) for chip in self.chips]
        whole = dims.num_heads, dims.num_kv_heads
        if {*first} != {whole} and not covers(*whole, first):
            raise ValueError(
                f"the chips have {[heads for heads, _ in first]} heads and "
                f"{[kv_heads for _, kv_heads in first]} KV heads, which are not the model's "
                f"{dims.num_heads} and {dims.num_kv_heads}")
        if self.chips[0].cache[0].head_dim != dims.head_dim:
            raise ValueError(f"chip 0 has heads of {self.chips[0].cache[0].head_dim}, the model of "
                             f"head_dim {dims.head_dim}")
        for chip in self.chips:
            for layer, (heads, cache) in enumerate(zip(chip.num_heads, chip.cache, strict=True)):
                first_chip = self.chips[0].cache[layer]
                if heads % cache.num_kv_heads or (cache.head_dim, cache.latent) != \
                        (first_chip.head_dim, first_chip.latent):
                    raise ValueError(
                        f"layer {layer} of chip {chip.rank} has {heads} heads, "
                        f"{cache.num_kv_heads} KV heads and head_dim {cache.head_dim}, which do "
                        f"not go together")

    def _check_ops(self) -> None:
        """The ops are this llmc's, in its versions, and there are those that every model has."""
        known = plugins.registry()
        for name, version in self.ops.items():
            if name not in known or known[name].version != version:
                here = f"version {known[name].version}" if name in known else "none"
                raise ValueError(f"the model uses version {version} of {name}, this llmc has "
                                 f"{here}")
        wanted = {"Embedding"} | {"LatentAttention" if cache.latent else "CausalAttention"
                                  for cache in self.chips[0].cache}
        if self.chips[0].states and not any(known[name].state for name in self.ops):
            raise ValueError("the model keeps states, which none of its ops does")
        if self.encoder:
            wanted.add("BidirectionalAttention")
        if self.tp_size > 1:
            wanted |= {"AllGather", "AllReduce"}
        absent = wanted - self.ops.keys()
        if absent:
            raise ValueError(f"ops lacks {min(absent)}, which every such model uses")

    def _token_ids(self) -> Iterator[tuple[str, int]]:
        """Every token that is named, and where."""
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
        return ((name, token) for name, tokens in named.items() for token in tokens
                if token is not None)


def cache_shape(cache: LayerCache, max_seq_len: int, *, paged: bool) -> tuple[int | str, ...]:
    """Of a layer's cache of keys, of values or of latents."""
    if paged:
        return "num_blocks", cache.num_kv_heads, "block_size", cache.head_dim
    return "batch", cache.num_kv_heads, max_seq_len, cache.head_dim


def covers(num_heads: int, num_kv_heads: int, ranks: Sequence[tuple[int, int]]) -> bool:
    """Whether ranks with so many heads and KV heads have each head once, and the KV head that it
    reads: ranks that divide a group each have a copy.
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
        LlmcError: the directory or the file is missing, is not JSON, has a newer format version,
            or a field is missing, unknown or of the wrong kind; the message names it.
    """
    directory = Path(case_dir)
    path = directory / MANIFEST_NAME
    if not os.path.isdir(directory):
        raise LlmcError(f"case directory '{directory}' does not exist; make it with: "
                        f"llmc compile MODEL -o {directory}")
    if not os.path.lexists(path):
        raise LlmcError(f"'{directory}' has no {MANIFEST_NAME}, so it is not a case directory; "
                        f"make one with: llmc compile MODEL -o DIR")
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
    """The first thing that is wrong with a file, on one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = "".join(f"{part}: " for part in [".".join(map(str, first["loc"]))] if part)
    text = where + first["msg"].removeprefix("Value error, ")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def refuse_encoder(manifest: Manifest, command: str) -> None:
    """Refuse an encoder-decoder model where a command does not know them.

    Raises:
        LlmcError: it is one.
    """
    if manifest.encoder is not None:
        raise LlmcError(f"llmc {command} is not there yet for encoder-decoder models, such as "
                        f"'{manifest.source.architecture}'; it takes causal LMs")


def json_schema() -> dict[str, Any]:
    """The JSON schema of `model_info.json`; `artifacts/model_info.schema.json` is this."""
    return Manifest.model_json_schema()


def write_manifest(manifest: Manifest, case_dir: str | Path) -> None:
    """Write `model_info.json`, the same bytes for the same manifest.

    Raises:
        LlmcError: it is larger than what `read_manifest` reads.
    """
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    data = text.encode()
    if len(data) > _MAX_MANIFEST_BYTES:
        raise LlmcError(f"{MANIFEST_NAME} would have {len(data)} bytes, the limit is "
                        f"{_MAX_MANIFEST_BYTES}; compile for fewer chips")
    (Path(case_dir) / MANIFEST_NAME).write_bytes(data)


def hash_file(path: str | Path) -> str:
    """SHA-256 of a file as hex digits."""
    with open_regular(Path(path)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_files(manifest: Manifest, case_dir: str | Path, *, hashes: bool = True,
                 ranks: Collection[int] | None = None) -> None:
    """Check that every listed file is there, has its size and, if asked, its SHA-256, that no other
    file is read, and that the weight files hold what the manifest says of them.

    Args:
        ranks: check only the files that these ranks and the tokenizer read; None: all files. A
            host needs the chip directories of its own ranks only.

    Raises:
        LlmcError: naming the first file that is missing, truncated, changed, not a regular file or
            not listed, or what its weights do not fit.
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
            raise LlmcError(f"'{path}' has {size} bytes, {MANIFEST_NAME} says {entry.size}{again}")
        if changed:
            raise LlmcError(f"'{path}' has changed since it was compiled: its SHA-256 is not the "
                            f"one in {MANIFEST_NAME}{again}")
    _check_weights(manifest, root, ranks)


def check_files(manifest: Manifest, case_dir: Path, ranks: Collection[int] | None = None) -> None:
    """Check that every listed file is a regular one inside the case directory, and that the files
    that are read where they are present are listed.

    Args:
        ranks: see `verify_files`.

    Raises:
        LlmcError: naming the first file that is missing, reached through a symbolic link, not a
            regular file, or not listed.
    """
    for entry in _entries(manifest, range(manifest.tp_size) if ranks is None else ranks):
        check_case_file(case_dir, entry.path)
    listed = {entry.path for entry in manifest.files}
    own = manifest.tokenizer
    beside = [own.path and f"{own.path}/tokenizer.json", own.chat_template]
    template = own.chat_template
    if template and (size := (case_dir / template).stat().st_size) > _MAX_TEMPLATE_BYTES:
        raise LlmcError(f"'{case_dir / template}' has {size} bytes, the limit is "
                        f"{_MAX_TEMPLATE_BYTES}; compile the model again")
    for path in (str(PurePosixPath(file).with_name(_TOKENIZER_CONFIG)) for file in beside if file):
        if path not in listed and os.path.lexists(case_dir / path):
            raise LlmcError(f"'{case_dir / path}' is not among the files of {MANIFEST_NAME}, so "
                            f"nothing says what it was when the model was compiled; remove it, or "
                            f"compile the model again")


def _entries(manifest: Manifest, ranks: Collection[int]) -> list[FileEntry]:
    """Files outside the directories of other ranks than these."""
    owners = {chip.path: chip.rank for chip in manifest.chips}

    def is_read(entry: FileEntry) -> bool:
        folders = map(str, PurePosixPath(entry.path).parents)
        owner = next((owners[folder] for folder in folders if folder in owners), None)
        return owner is None or owner in ranks

    return list(filter(is_read, manifest.files))


def _check_weights(manifest: Manifest, root: Path, ranks: Collection[int]) -> None:
    """Check the weight files of these ranks against the dims: an embedding has hidden_size columns,
    and the ranks together their share of a row for each token.
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
                            f"{MANIFEST_NAME} says {chip.weight_bytes}; compile the model again")
    if not headers:
        return

    def rows(vocab_size: int) -> int:
        """Rows that these ranks have at least: shares of a vocabulary differ by one at most."""
        some = len(headers) < manifest.tp_size
        return len(headers) * (vocab_size // manifest.tp_size) if some else vocab_size

    dims, encoder = manifest.dims, manifest.encoder
    if not _has_table(headers, rows(dims.vocab_size), dims.hidden_size):
        raise LlmcError(f"no weight under '{root}' has a row of hidden_size {dims.hidden_size} for "
                        f"each token of vocab_size {dims.vocab_size}, as {MANIFEST_NAME} says; "
                        f"compile the model again")
    if encoder is not None and not _has_table(headers, rows(encoder.vocab_size)):
        raise LlmcError(f"no weight under '{root}' has a row for each token of the encoder's "
                        f"vocab_size {encoder.vocab_size}, as {MANIFEST_NAME} says; compile the "
                        f"model again")


def _per_byte(form: WeightForm) -> int:
    """Numbers in a byte."""
    return CODE_TYPES[form.dtype].per_byte


def _has_table(headers: Sequence[Mapping[str, tuple[int, ...]]], rows: int,
               columns: int | None = None) -> bool:
    """Whether all chips have a matrix of one name and so many columns, if that is said, and so many
    rows together at least.
    """
    for name in headers[0]:
        shapes = [header[name] for header in headers if name in header]
        if len(shapes) == len(headers) and all(
                len(shape) == 2 and columns in (None, shape[1]) for shape in shapes) \
                and sum(shape[0] for shape in shapes) >= rows:
            return True
    return False
