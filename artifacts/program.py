"""`schedule.json`, `encoder.json` and `draft.json`: programs of the CUDA engine for one rank.

The engine passes addresses and sizes to kernels without checking them. All bounds are checked here:
those of a program alone when it is parsed, those that need the manifest and the weight file in
`read_chip_programs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmc import plugins
from llmc.artifacts.case_files import read_bounded
from llmc.artifacts.manifest import (
    BIDIRECTIONAL_RANGES,
    DEEP_EMBEDS_PREFIX,
    DRAFT_TOKEN_IDS,
    DTYPE_BYTES,
    EMBEDS,
    ENCODER_INPUTS,
    ENGINE_INPUTS,
    HIDDEN,
    INPUT_FEATURES,
    LORA_IDS,
    MANIFEST_NAME,
    POOLED,
    ROTARY_POSITIONS,
    Chip,
    Count,
    DraftProgram,
    DTypeName,
    EncoderProgram,
    GraphStep,
    LayerCache,
    Manifest,
    SizeName,
    cache_shape,
    explain,
)
from llmc.artifacts.weight_file import WEIGHTS_NAME, StoredWeight, read_weight_header
from llmc.errors import LlmcError
from llmc.plugins.add_embeds.op import OP as ADD_EMBEDS
from llmc.plugins.attention.op import AXES
from llmc.plugins.input_embeds.op import OP as INPUT_EMBEDS
from llmc.plugins.lora import SLOT_INPUTS

ALIGNMENT = 16  # bytes, of the offset of every value
_MAX_BYTES = 32 << 20  # 128 layers take 1 MB
MEMORY_ROWS = "memory_rows"  # input: rows of the encoder output that a step's tokens are written to
# Elementwise ONNX ops of the engine, and their numbers of inputs. True is 1.
ELEMENTWISE = {"Add": 2, "Sub": 2, "Mul": 2, "Div": 2, "Min": 2, "Max": 2, "Tanh": 1, "Exp": 1,
               "Sigmoid": 1, "Neg": 1, "Softplus": 1, "Gelu": 1, "GeluTanh": 1,
               "Elu": 1, "Greater": 2, "Less": 2, "Where": 3}
MOST_JOINED = 4  # inputs of the engine's Concat
_FLOATS = ("float32", "float16", "bfloat16")
# Inputs of an image encoder's program, also numbered, such as cu_seqlens.1: dtypes, and
# the name of the rows. cos and sin are of patches. merged_rows are the patches of each row of the
# prompt.
IMAGE_INPUTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "patches": (_FLOATS, "num_tokens"), "position_rows": (_FLOATS, "num_tokens"),
    "cos": (("float32",), "num_tokens"), "sin": (("float32",), "num_tokens"),
    "cu_seqlens": (("int32",), "batch_plus_1"), "merged_rows": (("int64",), "num_logits")}
_IMAGE_ROWS = ("patches", "position_rows")  # of these, of the dtype of values
# Engine inputs that an op's integer inputs may be, if not only the one of the same name. An
# Embedding may look up positions and token types.
_INPUTS = {"key_starts": ("memory_starts",), "key_lens": ("encoder_sequence_length",),
           "input_ids": ("input_ids", "position_ids", "token_type_ids"), "lora_ids": LORA_IDS}
# Dtypes of tensors; quantized weights of any dtype are stored as uint8.
ProgramDType = DTypeName | Literal["uint8"]
_COLLECTIVES = ("AllReduce", "AllGather")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ProgramTensor(_Frozen):
    """A tensor of the program.

    Dimensions of `shape` are integers or names. Sizes of a step: `num_tokens`, `num_logits`,
    `batch`, `batch_plus_1`. Sizes of an engine: `num_blocks`, `block_size` (positions),
    `max_blocks` (of a sequence), `num_states`, `num_memory_tokens` (rows of a `memory`, the
    cross-attention keys or values that the encoder scatters and the decoder reads), `max_loras` and
    `max_lora_rank` (of `adapters`, the matrices and ranks of a layer in all slots).

    A value is at byte `offset` of the arena, multiplied by the number of tokens, or of logits if
    `per_logit`: it then has rows of logits or of pooled sequences. A tensor of kind `columns` is a
    view of the value `of`, from column `first` on.
    """

    name: Annotated[str, Field(min_length=1)]
    kind: Literal["input", "weight", "cache", "state", "memory", "value", "columns", "adapters"]
    dtype: ProgramDType
    shape: tuple[Count | SizeName, ...]
    offset: Annotated[int, Field(ge=0)] = 0
    per_logit: bool = False
    of: Annotated[int, Field(ge=-1)] = -1
    first: Annotated[int, Field(ge=0)] = 0

    @property
    def width(self) -> int:
        """Elements per row."""
        return int(self.shape[-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a value in the arena, per token or logit."""
        return -(-self.width * DTYPE_BYTES[self.dtype] // ALIGNMENT) * ALIGNMENT

    @model_validator(mode="after")
    def _check_kind(self) -> ProgramTensor:
        named = [dim for dim in self.shape if isinstance(dim, str)]
        dims = len(self.shape)
        fits = {"value": dims == 2 and named in (["num_tokens"], ["num_logits"], ["batch"]),
                "weight": dims in (1, 2, 3) and not named,
                "cache": dims == 4 and named == ["num_blocks", "block_size"],
                "state": dims > 1 and named == ["num_states"],
                "memory": dims == 2 and named == ["num_memory_tokens"],
                "columns": dims == 2 and named == ["num_tokens"],
                "adapters": self._is_adapters(),
                "input": self._is_input()}[self.kind]
        if not fits or (named and self.shape[0] != named[0] and self.kind != "adapters"):
            raise ValueError(f"{self.kind} {self.name!r} has an invalid shape or dtype: "
                             f"{self.dtype} {list(self.shape)}")
        allowed = {"input": (self.dtype,), "cache": (*_FLOATS, "float8_e4m3fn"),
                   "state": ("float32",), "adapters": (*_FLOATS, "int32"),
                   "weight": (*_FLOATS, "uint8", "int32"),
                   "value": (*_FLOATS, "float8_e4m3fn", "int64")}
        if self.dtype not in allowed.get(self.kind, _FLOATS):
            raise ValueError(f"{self.kind} {self.name!r} has unsupported dtype {self.dtype}")
        if (self.of >= 0 or self.first > 0) != (self.kind == "columns") or (
                self.kind == "columns" and self.of < 0):
            raise ValueError(f"{self.kind} {self.name!r} has invalid columns: of {self.of}, from "
                             f"{self.first}")
        if self.kind != "value" and (self.offset or self.per_logit):
            raise ValueError(f"{self.kind} {self.name!r} has an offset in the arena, which only "
                             f"values have")
        if self.kind == "value" and (self.offset % ALIGNMENT
                                     or self.per_logit != (named != ["num_tokens"])):
            raise ValueError(f"value {self.name!r} {list(self.shape)} has offset {self.offset} and "
                             f"per_logit {self.per_logit}, expected a multiple of {ALIGNMENT} and "
                             f"per_logit for num_logits or batch rows")
        return self

    def _is_adapters(self) -> bool:
        """Whether the shape is that of lora_ranks, lora_up or lora_down."""
        sizes = tuple(dim if isinstance(dim, str) else "" for dim in self.shape)
        shapes = {1: ("max_loras",), 3: ("max_loras", "", "max_lora_rank"),
                  4: ("", "max_loras", "max_lora_rank", "")}
        return sizes == shapes.get(len(sizes)) and (self.dtype == "int32") == (len(sizes) == 1)

    @property
    def is_embeds(self) -> bool:
        """Whether it is an input with rows in place of embeddings, or of deep layers."""
        return self.kind == "input" and (
            self.name == EMBEDS or self.name.startswith(DEEP_EMBEDS_PREFIX))

    def _is_input(self) -> bool:
        if self.is_embeds or self.name == INPUT_FEATURES:
            rows = "num_embeds" if self.is_embeds else "num_tokens"
            return self.dtype in _FLOATS and len(self.shape) == 2 and \
                self.shape[0] == rows and isinstance(self.shape[1], int)
        known: dict[str, tuple[str, plugins.Shape]] = {
            **ENGINE_INPUTS, MEMORY_ROWS: ("int64", ("num_tokens",)),
            ROTARY_POSITIONS: ("int32", ("num_tokens", AXES)),
            BIDIRECTIONAL_RANGES: ("int32", ("num_tokens", 2))}
        if self.name not in known:
            return self._is_image_input()
        dtype, shape = known[self.name]
        return self.dtype == dtype and len(self.shape) == len(shape) and all(
            dim == expected for dim, expected in zip(self.shape, shape, strict=True))

    @property
    def image_role(self) -> str:
        """Key in `IMAGE_INPUTS`, if it is an input of an image encoder; else empty."""
        role = self.name.partition(".")[0]
        return role if self.kind == "input" and role in IMAGE_INPUTS else ""

    def _is_image_input(self) -> bool:
        dtypes, rows = IMAGE_INPUTS.get(self.image_role, ((), ""))
        return self.dtype in dtypes and self.shape[0] == rows and \
            len(self.shape) == (2 if rows == "num_tokens" else 1)


class ProgramNode(_Frozen):
    """An op with attributes; tensors are indices, -1 for an absent input or unused output."""

    op: str
    fields: dict[str, int | float | str]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @model_validator(mode="after")
    def _check_attributes(self) -> ProgramNode:
        for name, value in self.fields.items():
            if isinstance(value, float) and not abs(value) < 1e30:
                raise ValueError(f"{self.op!r} has {name!r} {value}, expected a finite number")
            if isinstance(value, int) and not 0 <= value < 2**31:
                raise ValueError(f"{self.op!r} has {name!r} {value}, expected 0 to 2^31")
        return self


class Program(_Frozen):
    """Program of the CUDA engine.

    It has tensors, nodes in execution order, the arena's bytes per token and per logit, and the
    index of the logits or of the pooled rows, -1 for an encoder.

    `features` is the value of a model that its draft model reads. In the draft model's program, the
    engine writes that to the value `hidden` before the first node; `hidden_out` replaces it for
    the next draft, unless all are computed in one pass. All are -1 where they are absent.

    `outputs` are the values of an image encoder that the host reads; other programs have none.
    """

    tensors: tuple[ProgramTensor, ...]
    nodes: tuple[ProgramNode, ...]
    token_bytes: Annotated[int, Field(ge=0)]
    logit_bytes: Annotated[int, Field(ge=0)]
    logits: Annotated[int, Field(ge=-1)] = -1
    features: Annotated[int, Field(ge=-1)] = -1
    hidden: Annotated[int, Field(ge=-1)] = -1
    hidden_out: Annotated[int, Field(ge=-1)] = -1
    outputs: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @property
    def of_encoder(self) -> bool:
        return self.logits < 0

    @cached_property
    def exact(self) -> dict[int, str]:
        """Dtypes of values that differ from the model's, by index."""
        dtypes = ((number, op.made_dtypes(node.fields).get(name)) for node in self.nodes
                  if (op := plugins.registry().get(node.op)) is not None
                  for number, name in zip(node.outputs, op.outputs, strict=False))
        return {number: dtype for number, dtype in dtypes if number >= 0 and dtype}

    @cached_property
    def read(self) -> frozenset[int]:
        """Indices of the model's caches that a draft model reads."""
        if self.hidden < 0:
            return frozenset()
        written = {node.inputs[index] for node in self.nodes for index in _in_place(node).values()
                   if index < len(node.inputs)}
        return frozenset(number for node in self.nodes for number in self._caches_read(node)
                         if number >= 0) - written

    def named(self, *kinds: str) -> dict[str, ProgramTensor]:
        """Return the tensors of these kinds by name."""
        return {tensor.name: tensor for tensor in self.tensors if tensor.kind in kinds}

    def without_features(self) -> Program:
        """The program without the nodes that only a draft model needs; tensors keep their index."""
        if self.features < 0:
            return self
        needed, nodes = {self.logits}, []
        for node in reversed(self.nodes):
            if not node.outputs or -1 in node.outputs or not needed.isdisjoint(node.outputs):
                needed.update(map(self._base_value, node.inputs))
                nodes.append(node)
        return self.model_copy(update={"nodes": tuple(reversed(nodes)), "features": -1})

    @model_validator(mode="after")
    def _check_program(self) -> Program:
        for node in self.nodes:
            for number in (*node.inputs, *node.outputs):
                if not -1 <= number < len(self.tensors):
                    raise ValueError(f"{node.op!r} uses tensor {number}, the program has "
                                     f"{len(self.tensors)}")
        for what, number in (("logits", self.logits), *self._features(),
                             *(("outputs", number) for number in self.outputs)):
            if number >= len(self.tensors):
                raise ValueError(f"the {what} are tensor {number}, the program has "
                                 f"{len(self.tensors)}")
        self._check_tensors()
        self._check_features()
        writers = self._check_order()
        self._check_arena(writers)
        return self

    def _check_tensors(self) -> None:
        names = Counter(tensor.name for tensor in self.tensors
                        if tensor.kind not in ("value", "columns"))
        duplicate = next((name for name, count in names.items() if count > 1), None)
        if duplicate is not None:
            raise ValueError(f"two tensors have the name {duplicate!r}")
        for number, dtype in self.exact.items():
            if self.tensors[number].dtype != dtype:
                raise ValueError(f"{self.tensors[number].name!r} is {self.tensors[number].dtype}, "
                                 f"expected {dtype}")
        dtypes = {tensor.dtype for number, tensor in enumerate(self.tensors)
                  if tensor.kind in ("value", "memory") and number not in self.exact}
        if len(dtypes) > 1:
            raise ValueError(f"values have different dtypes: {', '.join(sorted(dtypes))}")
        for number, tensor in enumerate(self.tensors):
            if tensor.kind == "columns" and not (tensor.of < number and self._is_view(tensor)):
                raise ValueError(f"{tensor.name!r} {list(tensor.shape)} from column {tensor.first} "
                                 f"on is not a view of tensor {tensor.of}")
        result = self.tensors[self.logits]
        if not self.of_encoder and result.shape[0] != "num_logits" and result.name != POOLED:
            raise ValueError(f"the logits are {result.name!r} {list(result.shape)}, expected "
                             f"num_logits rows")
        mismatch = {*self.named("input")} - (
            {tensor.name for tensor in self.tensors if tensor.image_role} if self.outputs else
            {*ENCODER_INPUTS, MEMORY_ROWS} if self.of_encoder else
            {*ENGINE_INPUTS, ROTARY_POSITIONS, BIDIRECTIONAL_RANGES,
             *(tensor.name for tensor in self.tensors if tensor.is_embeds)})
        if self.of_encoder:
            mismatch |= {*self.named("cache", "state")}
        if mismatch:
            raise ValueError(f"{'an encoder' if self.of_encoder else 'a model'} cannot have the "
                             f"tensor {min(mismatch)!r}")
        if self.outputs and (self.logits >= 0 or self._features() or self.named("memory")):
            raise ValueError("an image encoder cannot have logits, features or encoder output")

    def _features(self) -> tuple[tuple[str, int], ...]:
        """Names and indices of the values that a draft model reads or returns, if any."""
        return tuple((name, number) for name, number in (
            ("features", self.features), ("hidden", self.hidden), ("hidden_out", self.hidden_out))
            if number >= 0)

    def _check_features(self) -> None:
        """Check that the values for a draft model have a row for each token."""
        found = dict(self._features())
        of_model, of_draft = "features" in found, "hidden" in found
        if (of_model == of_draft and found) or (of_model and len(found) > 1) or (
                found and self.of_encoder):
            raise ValueError(f"the program has {' and '.join(found)}, expected features of a "
                             f"model, or hidden and perhaps hidden_out of a draft model")
        for name, number in found.items():
            tensor = self.tensors[number]
            if (tensor.kind, tensor.shape[0]) != ("value", "num_tokens") or number in self.exact:
                raise ValueError(f"the {name} are {tensor.kind} {tensor.name!r} "
                                 f"{list(tensor.shape)}, expected a value of num_tokens rows")
        if self.hidden_out >= 0:
            shapes = [self.tensors[number].shape for number in (self.hidden, self.hidden_out)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"the hidden_out are {list(shapes[1])}, expected "
                                 f"{list(shapes[0])}")
        if self.hidden >= 0:
            view = next((tensor for tensor in self.tensors if tensor.of == self.hidden), None)
            if view is not None:  # the engine reads the features elsewhere
                raise ValueError(f"{view.name!r} is a view of the draft model's features")

    def _is_view(self, columns: ProgramTensor) -> bool:
        """Whether the viewed tensor is a value of tokens with these columns."""
        value = self.tensors[columns.of]
        is_value = (value.kind, value.dtype, value.shape[0]) == (
            "value", columns.dtype, "num_tokens")
        return is_value and columns.of not in self.exact \
            and columns.first + columns.width <= value.width

    def _base_value(self, number: int) -> int:
        """Return the value that a tensor is a view of, or the tensor itself."""
        return self.tensors[number].of if number >= 0 and self.tensors[number].of >= 0 else number

    def _check_order(self) -> dict[int, int]:
        """Check that values are written before they are read; return the writer of each value."""
        writers: dict[int, int] = {} if self.hidden < 0 else {self.hidden: -1}
        written: set[int] = set()  # caches, recurrent states and encoder outputs
        for index, node in enumerate(self.nodes):
            try:
                for number in map(self._base_value, node.inputs):
                    if number >= 0 and self.tensors[number].kind == "value" \
                            and number not in writers:
                        raise ValueError(f"reads {self.tensors[number].name!r} before it is "
                                         f"written")
                given = self._check_node(node)
                for number in node.outputs:
                    if number >= 0 and (self.tensors[number].kind != "value" or number in writers):
                        raise ValueError(f"writes {self.tensors[number].name!r}, a "
                                         f"{self.tensors[number].kind} that another node writes "
                                         f"or that is read-only")
                    writers[number] = index
                for number in self._caches_read(node):
                    if number not in written | self.read:
                        raise ValueError(f"reads {self.tensors[number].name!r} before it is "
                                         f"written")
                for number in given:
                    if number in written:
                        raise ValueError(f"writes {self.tensors[number].name!r} again")
                    written.add(number)
            except ValueError as error:
                raise ValueError(f"node {index}, {node.op!r}: {error}") from error
        for number, tensor in enumerate(self.tensors):
            known = {"value": writers, "cache": written | self.read, "state": written}
            if number not in known.get(tensor.kind, (number,)):
                raise ValueError(f"no node writes {tensor.kind} {tensor.name!r}")
        if not self.of_encoder and self.logits not in writers:
            raise ValueError("no node writes the logits")
        for number in self.outputs:
            if number not in writers:
                raise ValueError(f"no node writes the output {self.tensors[number].name!r}")
        return writers

    def _check_node(self, node: ProgramNode) -> tuple[int, ...]:
        """Check a node's inputs and the shapes of its outputs; return the inputs that it writes.

        Raises:
            ValueError: the engine has no such op, or tensors or attributes are invalid for it.
        """
        tensors = [self.tensors[number] if number >= 0 else None for number in node.inputs]
        if node.op in ELEMENTWISE:
            shapes: Sequence[plugins.Shape] = [_elementwise_shape(node, tensors)]
        elif node.op == "Gather":
            rows = tensors[1] if len(tensors) > 1 else None
            merges = self.outputs and rows is not None and rows.image_role == "merged_rows"
            self._require(node, tensors, ("value", "num_tokens"), (
                "input", rows.name if merges and rows else "logits_indices"))
            shapes = [("num_logits", _width(tensors[0]))]
        elif node.op == "Columns":
            shapes = [self._columns_shape(node, tensors)]
        elif node.op == "Concat":
            shapes = [self._concat_shape(node, tensors)]
        elif node.op == "Scatter":
            self._require(node, tensors, ("value", "num_tokens"), ("input", MEMORY_ROWS),
                          ("memory", "num_memory_tokens"))
            if _width(tensors[0]) != _width(tensors[2]):
                raise ValueError(f"rows have width {_width(tensors[0])}, the encoder output "
                                 f"{_width(tensors[2])}")
            shapes = []
        else:
            shapes = self._check_op(node, tensors)
        if len(node.outputs) != len(shapes):
            raise ValueError(f"has {len(node.outputs)} outputs, expected {len(shapes)}")
        in_place = _in_place(node)
        for index, (number, shape) in enumerate(zip(node.outputs, shapes, strict=True)):
            if index in in_place:  # written to an input's memory, so it is no tensor
                if number != -1:
                    raise ValueError(f"output {index} is tensor {number}, expected -1")
            elif number < 0 or self.tensors[number].shape != tuple(shape):
                actual = list(self.tensors[number].shape) if number >= 0 else "absent"
                raise ValueError(f"output {index} is {actual}, expected {list(shape)}")
        return tuple(node.inputs[index] for index in in_place.values()) if in_place else \
            node.inputs[2:3] if node.op == "Scatter" else ()

    def _caches_read(self, node: ProgramNode) -> list[int]:
        """Return the caches of other layers among a node's inputs."""
        op = plugins.registry().get(node.op)
        return [number for name, number in zip(op.input_names, node.inputs, strict=False)
                if op.attention is not None and name in op.attention.reads] if op else []

    def _require(self, node: ProgramNode, tensors: Sequence[ProgramTensor | None],
                 *expected: tuple[str, str]) -> None:
        """Check the inputs of a node without attributes: each one's kind, and its name or rows."""
        found = [tensor and (tensor.kind, tensor.name if tensor.kind == "input"
                             else tensor.shape[0]) for tensor in tensors]
        if node.fields or found != [*expected]:
            raise ValueError(f"has inputs {found}, expected {list(expected)} and no attributes")

    def _columns_shape(self, node: ProgramNode, tensors: Sequence[ProgramTensor | None]) -> \
            plugins.Shape:
        """Return the shape of the output of Columns."""
        x, index = tensors if len(tensors) == 2 else (None, None)
        if node.fields or x is None or index is None or not _has_rows(x) \
                or node.inputs[0] in self.exact or len(index.shape) != 1 \
                or (index.kind, index.dtype) != ("weight", "int32"):
            raise ValueError("expected a value or rows of features, an int32 weight of column "
                             "indices, and no attributes")
        return x.shape[0], index.width

    def _concat_shape(self, node: ProgramNode, tensors: Sequence[ProgramTensor | None]) -> \
            plugins.Shape:
        """Return the shape of the output of Concat."""
        values = [tensor for number, tensor in zip(node.inputs, tensors, strict=True)
                  if tensor is not None and tensor.kind == "value" and number not in self.exact]
        rows = {tensor.shape[0] for tensor in values}
        if node.fields or not 1 < len(tensors) <= MOST_JOINED or len(values) < len(tensors) \
                or len(rows) > 1:
            raise ValueError(f"expected 2 to {MOST_JOINED} values with the same rows, and no "
                             f"attributes")
        return rows.pop(), sum(tensor.width for tensor in values)

    def _check_op(self, node: ProgramNode, tensors: Sequence[ProgramTensor | None]) -> \
            Sequence[plugins.Shape]:
        """Check an llmc op; return the shapes of its outputs."""
        op = plugins.registry().get(node.op)
        if op is None:
            raise ValueError("unknown op")
        op.present([tensor.name if tensor else "" for tensor in tensors])
        given = {name: tensor for name, tensor in zip(op.input_names, tensors, strict=False)
                 if tensor is not None}
        dtype = next((tensor.dtype for number, tensor in enumerate(self.tensors)
                      if tensor.kind == "value" and number not in self.exact), "")
        fields = op.complete(node.fields)
        exact = op.exact(fields)
        for name, tensor in given.items():
            if name.endswith(SLOT_INPUTS):
                fits = tensor.kind == "adapters" and tensor.dtype in ("int32", dtype)
            elif name in ("lora_part", "rotary_axes"):
                fits = (tensor.kind, tensor.dtype) == ("weight", "int32")
            elif name in op.integer_inputs:
                fits = (tensor.kind == "input" and tensor.name in _INPUTS.get(name, (name,))) \
                    or (tensor.kind, tensor.dtype) == ("value", "int64") \
                    or (bool(self.outputs) and tensor.image_role == name)
            elif name in op.cache_inputs:
                expected = node.fields.get("kv_dtype") or dtype
                fits = tensor.kind == "cache" and tensor.dtype == expected
            elif op.state is not None and name == op.state.state:
                fits = tensor.kind == "state"
            elif name in op.packed(fields) - exact:
                fits = tensor.kind == "weight" and tensor.dtype == "uint8"
            elif name in exact:
                fits = tensor.dtype == "float32" and (
                    tensor.kind in ("weight", "value")
                    or (bool(self.outputs) and tensor.image_role == name))
            elif name in op.rounded(fields):
                fits = (tensor.kind, tensor.dtype) == ("value", "float8_e4m3fn")
            else:
                fits = tensor.dtype == dtype and (
                    tensor.kind in ("weight", "memory", "columns") or _has_rows(tensor)
                    or (name == EMBEDS and tensor.is_embeds))
            if tensor.kind == "columns":
                fits = fits and name in {role.input for role in op.columns}
            # With key_starts, rows are indices into the encoder output.
            if name in ("key", "value") and "key_starts" in given:
                fits = fits and tensor.kind == "memory"
            if not fits:
                raise ValueError(f"its {name} cannot be {tensor.kind} {tensor.name!r} of "
                                 f"{tensor.dtype}")
        caches = [tensor.name for name, tensor in given.items() if name in op.cache_inputs]
        if len({*caches}) < len(caches):
            raise ValueError(f"two of its caches are {caches[0]!r}")
        return op.fit({name: tensor.shape for name, tensor in given.items()}, node.fields)

    def _check_arena(self, writers: Mapping[int, int]) -> None:
        """Check that values are inside the arena, and that no two live values overlap."""
        sizes = {False: self.token_bytes, True: self.logit_bytes}
        ends = {False: 0, True: 0}
        for number in writers:
            if number < 0:
                continue
            tensor = self.tensors[number]
            end = tensor.offset + tensor.row_bytes
            if end > sizes[tensor.per_logit]:
                raise ValueError(f"value {tensor.name!r} ends at byte {end}, the arena at "
                                 f"{sizes[tensor.per_logit]}")
            ends[tensor.per_logit] = max(ends[tensor.per_logit], end)
        if ends != sizes:
            raise ValueError(f"the arena has {self.token_bytes} and {self.logit_bytes} bytes, "
                             f"expected {ends[False]} and {ends[True]}, the ends of the values")
        last = self._last_uses()
        live: list[int] = []
        for number in sorted((n for n in writers if n >= 0), key=lambda n: writers[n]):
            tensor = self.tensors[number]
            live = [other for other in live if last[other] >= writers[number]]
            for other in map(self.tensors.__getitem__, live):
                if other.per_logit == tensor.per_logit \
                        and other.offset < tensor.offset + tensor.row_bytes \
                        and tensor.offset < other.offset + other.row_bytes:
                    raise ValueError(f"node {writers[number]} writes {tensor.name!r} over "
                                     f"{other.name!r}, which is still live")
            live.append(number)

    def _last_uses(self) -> dict[int, int]:
        """Return the last node that uses each value; outputs are used after all nodes."""
        last: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            last.update(dict.fromkeys((*map(self._base_value, node.inputs), *node.outputs), index))
        last.update(dict.fromkeys(
            (self.logits, *(number for _, number in self._features()), *self.outputs),
            len(self.nodes)))
        for node in reversed(self.nodes):
            # If all rows have logits, or no token has a row of embeds, the engine skips this node,
            # and readers of its output read its first input.
            if node.op in ("Gather", INPUT_EMBEDS.name, ADD_EMBEDS.name):
                last[node.inputs[0]] = max(last[node.inputs[0]], last[node.outputs[0]])
        return last


def _has_rows(tensor: ProgramTensor) -> bool:
    """Whether a tensor is a value, or the rows that an encoder reads in place of tokens."""
    return tensor.kind == "value" or (tensor.kind, tensor.name) == ("input", INPUT_FEATURES) \
        or tensor.image_role in _IMAGE_ROWS


def _width(tensor: ProgramTensor | None) -> int:
    assert tensor is not None
    return tensor.width


def _in_place(node: ProgramNode) -> dict[int, int]:
    """Return the outputs that are written to an input's memory, with the index of the input."""
    op = plugins.registry().get(node.op)
    kept = op.cache_inputs | ({op.state.state} if op.state else set()) if op else set()
    return {index: op.input_names.index(name.removesuffix("_out"))
            for index, name in enumerate(op.outputs)
            if name.removesuffix("_out") in kept} if op else {}


def _elementwise_shape(node: ProgramNode, tensors: Sequence[ProgramTensor | None]) -> plugins.Shape:
    """Return the shape of an elementwise op's output.

    Values have the same shape, or one column. Weights have one element or one per column.
    """
    shapes = {tensor.shape for tensor in tensors if tensor is not None and tensor.kind == "value"}
    wide = {shape for shape in shapes if shape[-1] != 1} or shapes
    widths = {1, *(shape[-1] for shape in wide)}
    for tensor in tensors:
        if tensor is None or (tensor.kind != "value" and (
                (tensor.kind, tensor.dtype) != ("weight", "float32") or len(tensor.shape) != 1
                or tensor.shape[0] not in widths)):
            raise ValueError(f"has input {tensor and tensor.name!r}, expected values, and float32 "
                             f"weights of one element or of a row")
    if len(tensors) != ELEMENTWISE[node.op] or len(wide) != 1 or node.fields \
            or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(f"expected {ELEMENTWISE[node.op]} inputs of the same shape, and no "
                         f"attributes")
    return wide.pop()


Part = str  # model, encoder or a `draft_part`
_Owner = Chip | EncoderProgram | DraftProgram


@dataclass(frozen=True)
class ChipPrograms:
    """The programs of one chip, checked against the manifest, and their weights.

    Args:
        drafts: of the layers of a draft model, or one for all.
    """

    model: Program
    encoder: Program | None
    drafts: Sequence[Program]
    weights: Mapping[str, StoredWeight]

    @property
    def draft(self) -> Program | None:
        """The first program of the draft model."""
        return self.drafts[0] if self.drafts else None

    def parts(self, *, draft: bool) -> dict[Part, Program]:
        """The programs to load, the model's first.

        Args:
            draft: whether to load the draft model.
        """
        found: dict[Part, Program | None] = {
            "model": self.model if draft else self.model.without_features(),
            "encoder": self.encoder,
            **{draft_part(index): each for index, each in enumerate(self.drafts) if draft}}
        return {part: program for part, program in found.items() if program is not None}


def draft_part(layer: int) -> Part:
    """Name of the program of a layer of a draft model with several, or of a draft model."""
    return f"draft_{layer}" if layer else "draft"


def is_of_draft(part: Part) -> bool:
    """Whether a program is a draft model's."""
    return part.partition("_")[0] == "draft"


def read_program(path: Path) -> Program:
    """Parse and validate a program file.

    Raises:
        LlmcError: the file is missing or invalid, or the program would exceed its memory.
    """
    try:
        return Program.model_validate_json(read_bounded(path, _MAX_BYTES))
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be read ({error}); compile the model again") from error
    except ValidationError as error:
        raise LlmcError(f"'{path}' is not a valid program: {explain(error)}; compile the model "
                        f"again") from error


def read_chip_programs(manifest: Manifest, chip: Chip, case_dir: Path) -> ChipPrograms:
    """Read a chip's programs and check them against the manifest and the weight file.

    Those of chip 0 are also checked against other chips', as their collectives must match.

    Raises:
        LlmcError: see `read_program`; or a program differs from the manifest.
    """
    stored = read_weight_header(case_dir / chip.path / WEIGHTS_NAME)
    programs = _read_steps(chip, case_dir)
    try:
        for part, program in programs.items():
            _check_manifest(part, program, manifest, chip, stored)
        _check_features(programs, manifest)
        _check_names([*programs.values()], chip)
        if chip.rank == 0:
            _check_ranks([programs, *(_read_steps(other, case_dir)
                                       for other in manifest.chips[1:])], manifest)
    except ValueError as error:
        raise LlmcError(f"the programs in '{case_dir / chip.path}' differ from {MANIFEST_NAME}: "
                        f"{error}; compile the model again") from error
    names = {name for program in programs.values() for name in program.named("weight")}
    names |= {DRAFT_TOKEN_IDS} & stored.keys()
    return ChipPrograms(programs["model"], programs.get("encoder"),
                        [programs[part] for part in programs if is_of_draft(part)],
                        {name: stored[name] for name in names})


def read_image_program(manifest: Manifest, case_dir: Path) -> \
        tuple[Program, Mapping[str, StoredWeight]]:
    """Read the program of an image encoder's second step, and check it.

    Returns:
        The program, and its weights by name.

    Raises:
        LlmcError: see `read_chip_programs`.
    """
    chip = manifest.chips[0]
    assert manifest.image is not None
    step = manifest.image.steps[1]
    path = case_dir / step.path if isinstance(step, GraphStep) else case_dir
    stored, program = read_weight_header(case_dir / chip.path / WEIGHTS_NAME), read_program(path)
    try:
        for name, tensor in program.named("weight").items():
            if name not in stored or (tensor.dtype, tensor.shape) != (
                    stored[name].dtype, tuple(stored[name].shape)):
                raise ValueError(f"{WEIGHTS_NAME} has no {name!r}, {tensor.dtype} "
                                 f"{list(tensor.shape)}")
        found = {*program.named("input")}, [program.tensors[own].name for own in program.outputs]
        if not isinstance(step, GraphStep) or found != ({*step.inputs}, [*step.outputs]):
            raise ValueError("its inputs or outputs are not those of the step")
        values = {program.tensors[own].dtype for own in program.outputs}
        if values != {manifest.dtype}:
            raise ValueError(f"its values are {min(values)}, the model {manifest.dtype}")
        absent = {node.op for node in program.nodes} & {*plugins.registry()} - manifest.ops.keys()
        if absent:
            raise ValueError(f"{min(absent)!r} is not in `ops`")
    except ValueError as error:
        raise LlmcError(f"'{path}' differs from {MANIFEST_NAME}: {error}; compile the model "
                        f"again") from error
    return program, {name: stored[name] for name in program.named("weight")}


def _owners(chip: Chip) -> dict[Part, _Owner]:
    """The manifest's entries of a chip's programs, the model's first."""
    found: dict[Part, _Owner | None] = {
        "model": chip, "encoder": chip.encoder,
        **{draft_part(index): each for index, each in enumerate(chip.drafts)}}
    return {part: owner for part, owner in found.items() if owner is not None}


def _read_steps(chip: Chip, case_dir: Path) -> dict[Part, Program]:
    """Read the programs of a chip."""
    programs: dict[Part, Program] = {}
    for part, owner in _owners(chip).items():
        step = owner.steps[0]
        if len(owner.steps) != 1 or not isinstance(step, GraphStep):
            raise LlmcError(f"chip {chip.rank} has {len(owner.steps)} steps in {MANIFEST_NAME}, "
                            f"expected one program; compile the model again")
        programs[part] = read_program(case_dir / step.path)
    return programs


def _check_manifest(part: Part, program: Program, manifest: Manifest, chip: Chip,
                    stored: Mapping[str, StoredWeight]) -> None:
    """Check each tensor and each op's attributes against the manifest."""
    dims, encoder = manifest.dims, chip.encoder
    owner = _owners(chip)[part]
    caches = chip.caches
    if is_of_draft(part) and not program.read:
        parts = [*_owners(chip)]
        caches = chip.caches_of_draft(parts.index(part) - parts.index("draft"))
    if program.of_encoder != (part == "encoder"):
        raise ValueError(f"a program is {'' if program.of_encoder else 'not '}an encoder's")
    memory = {tensor.name: tensor.width for tensor in encoder.outputs} if encoder else {}
    adapters = chip.lora_inputs if part == "model" else {}
    for name, tensor in program.named("weight", "cache", "state", "memory", "input",
                                      "adapters").items():
        expected: tuple[str, Sequence[int | str]] = (tensor.dtype, tensor.shape)
        if tensor.kind == "weight":
            if name not in stored:
                raise ValueError(f"{WEIGHTS_NAME} has no {name!r}")
            expected = (stored[name].dtype, stored[name].shape)
        elif tensor.kind == "cache":
            if name not in caches:
                raise ValueError(f"unknown cache {name!r}")
            cache = caches[name]
            expected = (manifest.kv_dtype, cache_shape(cache, dims.max_seq_len, paged=True))
        elif tensor.kind == "state":
            if name not in chip.state_caches:
                raise ValueError(f"unknown recurrent state {name!r}")
            expected = ("float32", ("num_states", *chip.state_caches[name].shape))
        elif tensor.kind == "memory":
            if name not in memory:
                raise ValueError(f"no encoder writes {name!r}")
            expected = (manifest.dtype, ("num_memory_tokens", memory[name]))
        elif tensor.kind == "adapters":
            if name not in adapters:
                raise ValueError(f"unknown adapters {name!r}")
            expected = adapters[name]
        if (tensor.dtype, tensor.shape) != (expected[0], tuple(expected[1])):
            raise ValueError(f"{name!r} is {tensor.dtype} {list(tensor.shape)}, expected "
                             f"{expected[0]} {list(expected[1])}")
    exact = program.exact
    for number, tensor in enumerate(program.tensors):
        if tensor.kind == "value" and number not in exact and tensor.dtype != manifest.dtype:
            raise ValueError(f"value {tensor.name!r} is {tensor.dtype}, the model "
                             f"{manifest.dtype}")
    _check_result(part, program, manifest)
    _check_step_names(program, owner, memory)
    _check_attributes_and_tables(program, manifest, chip, owner, caches)


def _check_result(part: Part, program: Program, manifest: Manifest) -> None:
    """Check the logits or pooled rows."""
    if program.of_encoder:
        return
    result, pooling = program.tensors[program.logits], manifest.pooling
    if pooling is not None:
        expected = ("num_tokens" if pooling.per_token else "batch", pooling.width)
        if result.name != POOLED or result.shape != expected:
            raise ValueError(f"the pooled rows are {result.name!r} {list(result.shape)}, expected "
                             f"{list(expected)}")
        return
    width = manifest.draft.padded_vocab_size if is_of_draft(part) and manifest.draft \
        else manifest.dims.padded_vocab_size
    if result.width != width:
        raise ValueError(f"the logits have width {result.width}, expected padded_vocab_size "
                         f"{width}")
    if result.shape[0] != "num_logits":
        raise ValueError(f"the logits are {list(result.shape)}, expected num_logits rows")


def _check_features(programs: Mapping[Part, Program], manifest: Manifest) -> None:
    """Check that the draft model reads the features that the model writes."""
    model, drafts = programs["model"], [own for part, own in programs.items() if is_of_draft(part)]
    reads = bool(drafts) and drafts[0].hidden >= 0
    others = [*programs.values()][1:]
    if model.hidden >= 0 or any(other.features >= 0 for other in others) or \
            reads != (model.features >= 0) or any((own.hidden >= 0) != reads for own in drafts):
        raise ValueError("the model and its draft model differ in the features")
    for draft in drafts if reads else ():
        chains = manifest.draft is not None and manifest.draft.chain != "block"
        if chains != (draft.hidden_out >= 0):
            raise ValueError(f"the draft model has {'no ' if chains else ''}hidden_out, unlike "
                             f"its chain of passes")
        absent = {draft.tensors[number].name for number in draft.read} - {*model.named("cache")}
        if absent:
            raise ValueError(f"the draft model reads {min(absent)!r}, which the model lacks")
        written, given = model.tensors[model.features].shape, draft.tensors[draft.hidden].shape
        if written != given:
            raise ValueError(f"the model's features are {list(written)}, its draft model reads "
                             f"{list(given)}")


def _check_step_names(program: Program, owner: _Owner,
                      memory: Mapping[str, int]) -> None:
    """Check that inputs and outputs are those of the step; position_ids may be unused."""
    listed = {tensor.name.removesuffix("_out") for tensor in owner.inputs} - {HIDDEN}
    used = {*program.named("input", "cache", "state", "memory", "adapters")} - {MEMORY_ROWS}
    if program.of_encoder:
        scattered = {program.tensors[node.inputs[2]].name for node in program.nodes
                     if node.op == "Scatter"}
        if scattered != {*memory}:
            raise ValueError(f"its encoder does not write {min(scattered ^ {*memory})!r}")
        used -= {*memory}
    mismatch = used ^ listed
    if mismatch - {"position_ids"} or used - listed:
        raise ValueError(f"the inputs of its program and of its step differ in {min(mismatch)!r}")


def _check_attributes_and_tables(program: Program, manifest: Manifest, chip: Chip, owner: _Owner,
                                 caches: Mapping[str, LayerCache]) -> None:
    """Check heads, tp_size, and that tables have a row for each token and position.

    Args:
        caches: those that the program uses.
    """
    limits, encoder = manifest.dims, manifest.encoder
    heads = owner.num_heads if isinstance(owner, DraftProgram) else chip.num_heads
    vocab_size, length = (encoder.vocab_size or 0, encoder.max_seq_len) \
        if program.of_encoder and encoder else (limits.vocab_size, limits.max_seq_len)
    for node in program.nodes:
        if node.op in _COLLECTIVES and node.fields.get("tp_size") != manifest.tp_size:
            raise ValueError(f"{node.op} has tp_size {node.fields.get('tp_size')}, expected "
                             f"{manifest.tp_size}")
        op = plugins.registry().get(node.op)
        given = {name: program.tensors[number] for name, number
                 in zip(op.input_names, node.inputs, strict=False) if number >= 0} if op else {}
        if "key_cache" in given and "value_cache" in given:
            key, value = given["key_cache"].name, given["value_cache"].name
            layer = int(key.rpartition("_")[2])
            if (key, value) != (f"key_cache_{layer}", f"value_cache_{layer}"):
                raise ValueError(f"an attention op has the caches {key!r} and {value!r}")
            has_cache = op is not None and op.attention is not None and op.attention.caches
            expected = heads[[*caches].index(key) // 2] if has_cache else 0
            if has_cache and node.fields["num_heads"] != expected:
                raise ValueError(f"layer {layer} has {node.fields['num_heads']} heads, expected "
                                 f"{expected} as in {MANIFEST_NAME}")
        ids = given["input_ids"].name if "input_ids" in given else ""
        # Types of tokens without a row give zeros.
        rows_of = {"position_ids": length, "token_type_ids": 1}
        least = {"table": rows_of.get(ids, vocab_size),
                 "position_table": length, "cos": length, "sin": length,
                 "query_scale": length, "key_bias": length}
        if node.fields.get("vocab_sharded"):
            del least["table"]  # token ids of other ranks give zeros
        for name, rows in least.items():
            has = int(given[name].shape[name == "key_bias"]) if name in given else rows
            if has < rows:
                raise ValueError(f"{given[name].name!r} has {has} rows, expected at least {rows}")


def _check_names(programs: Sequence[Program], chip: Chip) -> None:
    """Check that names agree between the programs, and that every cache is used."""
    kinds: dict[str, str] = {}
    for program in programs:
        for tensor in program.named("weight", "cache", "state", "memory", "input").values():
            if kinds.setdefault(tensor.name, tensor.kind) != tensor.kind:
                raise ValueError(f"{tensor.name!r} is both {kinds[tensor.name]} and {tensor.kind}")
    unused = {*chip.kept, *chip.draft_caches} - kinds.keys()
    if unused:
        raise ValueError(f"no node uses {min(unused)!r}")


def _check_ranks(ranks: Sequence[Mapping[Part, Program]], manifest: Manifest) -> None:
    """Check that ranks have the same collectives, and that the manifest lists their ops.

    It may list others of encoders of images and audio.
    """
    for rank, programs in enumerate(ranks):
        for first, program in zip(ranks[0].values(), programs.values(), strict=True):
            if _collectives(program) != _collectives(first):
                raise ValueError(f"chips 0 and {rank} have different collectives")
    used = {node.op for programs in ranks for program in programs.values()
            for node in program.nodes} & {*plugins.registry()}
    mismatch = used - manifest.ops.keys() if manifest.media else used ^ manifest.ops.keys()
    if mismatch:
        op = min(mismatch)
        raise ValueError(f"{op!r} is {'not ' if op not in used else ''}in the programs, but "
                         f"{'not ' if op in used else ''}in `ops`")


def _collectives(program: Program) -> list[tuple[str, plugins.Shape]]:
    """Return each collective with the shape of its input."""
    return [(node.op, program.tensors[node.inputs[0]].shape) for node in program.nodes
            if node.op in _COLLECTIVES]
