"""`model_info.json` as typed, validated, frozen data: all that a loader must know.

The JSON schema published in `artifacts/model_info.schema.json` is generated from these classes.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmc.errors import LlmcError

FORMAT_VERSION = 1
MANIFEST_NAME = "model_info.json"
ENCODER_INPUTS = ("input_ids", "position_ids", "cu_seqlens")
ENGINE_INPUTS = (*ENCODER_INPUTS, "past_lens", "logits_indices", "cache_indirection",
                 "memory_starts", "encoder_sequence_length")

DTypeName = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32"]


def _inside_case_dir(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or ":" in path:
        raise ValueError(f"path {path!r} must be relative and stay inside the case directory")
    return path


CasePath = Annotated[str, AfterValidator(_inside_case_dir)]
Count = Annotated[int, Field(ge=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileEntry(_Frozen):
    """One file of the case directory. `size` in bytes, `sha256` as 64 hex digits."""

    path: CasePath
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TensorInfo(_Frozen):
    """An engine's input or output; a named dimension is a string (`num_tokens`, `batch`, …)."""

    name: str
    dtype: DTypeName
    shape: tuple[int | str, ...]


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
    each `[batch, num_kv_heads, max_seq_len, head_dim]`.
    """

    num_kv_heads: Count
    head_dim: Count


Steps = tuple[Annotated[GraphStep | CollectiveStep, Field(discriminator="kind")], ...]


class EncoderProgram(_Frozen):
    """The encoder on one chip: from `input_ids`, `cu_seqlens` and perhaps `position_ids` to what
    the decoder sees of a prompt, `memory_key_<layer>` and `memory_value_<layer>`, each
    `[num_tokens, num_kv_heads * head_dim]`. `steps` are as a chip's.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    steps: Steps


class Chip(_Frozen):
    """What one rank loads and runs.

    `steps` are run in order; a graph step reads and writes named tensors. Engine inputs are
    `input_ids`, `cu_seqlens`, `past_lens`, `logits_indices`, perhaps `position_ids`, where beams
    share the caches `cache_indirection`, and the caches; an updated cache is named `<cache>_out`,
    and the last step makes `logits`. With an `encoder`, they are its decoder's, whose inputs also
    are `memory_starts`, `encoder_sequence_length`, and what the encoder made.
    """

    rank: Annotated[int, Field(ge=0)]
    path: CasePath
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    steps: Steps
    cache: tuple[LayerCache, ...]
    num_heads: tuple[int, ...]
    weight_bytes: Annotated[int, Field(ge=0)]
    encoder: EncoderProgram | None = None

    @property
    def all_steps(self) -> Steps:
        """The encoder's, and then its own."""
        return (*(self.encoder.steps if self.encoder else ()), *self.steps)

    @model_validator(mode="after")
    def _steps_follow(self) -> Chip:
        caches = {f"{kind}_cache_{layer}" for layer in range(len(self.cache))
                  for kind in ("key", "value")}
        updated = {f"{name}_out" for name in caches}
        memory = {tensor.name for tensor in self.encoder.outputs} if self.encoder else set()
        if self.encoder:
            self._follow(self.encoder.steps, set(ENCODER_INPUTS), memory)
        self._follow(self.steps, {*caches, *ENGINE_INPUTS, *memory}, updated | {"logits"})
        return self

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


class Source(_Frozen):
    """Where the model came from. `config_sha256` is the digest of its config, keys sorted."""

    kind: Literal["huggingface", "gguf", "onnx"]
    architecture: str
    config_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Dims(_Frozen):
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    padded_vocab_size: Count
    max_seq_len: Count

    @model_validator(mode="after")
    def _padding_only_grows(self) -> Dims:
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}"
            )
        return self


class EncoderInfo(_Frozen):
    """The encoder of an encoder-decoder model, and how its decoder begins and ends.

    A prompt is at most `max_seq_len` tokens of the encoder's `vocab_size`. Decoding begins with
    `decoder_start_token_id`. Where there are `forced_bos_token_ids`, one of them is the first new
    token, and of `forced_eos_token_ids` the last that `max_tokens` leaves room for. `bad_words` are
    never generated.
    """

    num_layers: Count
    max_seq_len: Count
    vocab_size: Count
    decoder_start_token_id: int
    forced_bos_token_ids: tuple[int, ...] = ()
    forced_eos_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


class Target(_Frozen):
    """What the engines were made for; `versions` names the libraries whose version matters, and
    `compute_capability` the only GPUs that may run them, such as 9.0, where it was asked for or
    they were built on one, which `gpu` names. `max_batch_size` is set where they take no more
    sequences.
    """

    kind: Literal["cpu", "cuda", "tensorrt", "tensorrt_rtx"]
    versions: dict[str, str] = {}
    compute_capability: str | None = None
    gpu: str | None = None
    max_batch_size: Count | None = None


class TokenizerInfo(_Frozen):
    """`path` is the tokenizer directory, absent when the source had none."""

    path: CasePath | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: CasePath | None


class PassReport(_Frozen):
    """What one compiler pass did: rewrites per rule, and each refusal with its reason."""

    name: str
    matches: dict[str, int]
    refusals: tuple[str, ...] = ()


class Manifest(_Frozen):
    """The whole of `model_info.json`."""

    format_version: Literal[1]
    llmc_version: str
    source: Source
    dims: Dims
    encoder: EncoderInfo | None = None
    max_beam_width: Count = 1
    dtype: DTypeName
    quantization: None = None
    tp_size: Count
    pp_size: Literal[1] = 1
    device_groups: tuple[tuple[int, ...], ...]
    kv_cache_layout: Literal["linear"] = "linear"
    target: Target
    ops: dict[str, int]
    tokenizer: TokenizerInfo
    chips: tuple[Chip, ...]
    passes: tuple[PassReport, ...]
    files: tuple[FileEntry, ...]

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
        listed = {entry.path for entry in self.files}
        if len(listed) != len(self.files):
            raise ValueError("a file is listed twice")
        for chip in self.chips:
            for step in chip.all_steps:
                if isinstance(step, GraphStep) and step.path not in listed:
                    raise ValueError(f"chip {chip.rank} runs {step.path!r}, which is not listed")
            if _collectives(chip) != _collectives(self.chips[0]):
                raise ValueError(f"chips 0 and {chip.rank} do not have the same collectives")
            if (chip.encoder is None) != (self.encoder is None):
                raise ValueError(f"chip {chip.rank} has {'no' if self.encoder else 'an'} encoder, "
                                 f"unlike the model")
            if len(chip.cache) != self.dims.num_layers:
                raise ValueError(f"chip {chip.rank} has caches for {len(chip.cache)} layers, "
                                 f"the model has {self.dims.num_layers}")
            if self.max_beam_width > 1 and "cache_indirection" not in (
                    tensor.name for tensor in chip.inputs):
                raise ValueError(f"max_beam_width is {self.max_beam_width}, but chip {chip.rank} "
                                 f"has no input 'cache_indirection'")
        for group in self.device_groups:
            if len(group) != self.tp_size or len(set(group)) != len(group) or min(group) < 0:
                raise ValueError(f"device group {list(group)} is not {self.tp_size} devices")
        return self


def _collectives(chip: Chip) -> list[str]:
    return [step.kind for step in chip.all_steps if isinstance(step, CollectiveStep)]


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
    if not os.path.isfile(path):
        raise LlmcError(f"'{directory}' has no {MANIFEST_NAME}, so it is not a case directory; "
                        f"make one with: llmc compile MODEL -o DIR")
    try:
        text = path.read_bytes().decode("utf-8")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise LlmcError(f"'{path}' cannot be read as JSON ({error}); compile the model again") \
            from error
    if not isinstance(data, dict):
        raise LlmcError(f"'{path}' is not a JSON object; compile the model again")
    version = data.get("format_version")
    if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT_VERSION:
        raise LlmcError(f"'{path}' has format_version {version}, this llmc reads up to "
                        f"{FORMAT_VERSION}; install a newer llmc or compile the model again")
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "top level"
        raise LlmcError(f"'{path}' is not a valid manifest: {where}: {first['msg']}; "
                        f"compile the model again") from error


def refuse_encoder(manifest: Manifest, command: str) -> None:
    """Refuse an encoder-decoder model where a command does not know them.

    Raises:
        LlmcError: it is one.
    """
    if manifest.encoder is not None:
        raise LlmcError(f"llmc {command} is not there yet for encoder-decoder models, such as "
                        f"'{manifest.source.architecture}'; it takes causal LMs")


def json_schema() -> dict:
    """The JSON schema of `model_info.json`; `artifacts/model_info.schema.json` is this."""
    return Manifest.model_json_schema()


def write_manifest(manifest: Manifest, case_dir: str | Path) -> None:
    """Write `model_info.json`, the same bytes for the same manifest."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False)
    (Path(case_dir) / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def hash_file(path: str | Path) -> str:
    """SHA-256 of a file as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_files(manifest: Manifest, case_dir: str | Path, *, hashes: bool = True) -> None:
    """Check that every listed file is there, has its size and, if asked, its SHA-256.

    Raises:
        LlmcError: naming the first file that is missing, truncated or changed.
    """
    root = Path(case_dir)
    for entry in manifest.files:
        path = root / entry.path
        again = "; compile the model again, or copy the case directory again"
        if not os.path.isfile(path):
            raise LlmcError(f"'{path}' is missing{again}")
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
