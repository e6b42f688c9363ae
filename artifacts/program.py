"""`schedule.json`: what the CUDA engine runs for one rank; `encoder.json`: what of an encoder.

The engine hands kernels addresses and sizes and asks no more. So all that keeps them inside its
memory is checked here, once: what a schedule alone can tell when it is parsed, and what takes the
manifest and the weight file in `read_chip_programs`.
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
    DTYPE_BYTES,
    ENCODER_INPUTS,
    ENGINE_INPUTS,
    MANIFEST_NAME,
    Chip,
    Count,
    DTypeName,
    EncoderProgram,
    GraphStep,
    Manifest,
    SizeName,
    cache_shape,
    explain,
)
from llmc.artifacts.weight_file import WEIGHTS_NAME, StoredWeight, read_weight_header
from llmc.errors import LlmcError

ALIGNMENT = 16  # bytes; of every value's place
_MAX_BYTES = 32 << 20  # 128 layers take 1 MB
MEMORY_ROWS = "memory_rows"  # the input that says where an encoder's tokens go
# ONNX ops that the engine has for single elements, and how many inputs each takes; true is 1.
ELEMENTWISE = {"Add": 2, "Sub": 2, "Mul": 2, "Div": 2, "Min": 2, "Max": 2, "Tanh": 1, "Exp": 1,
               "Sigmoid": 1, "Neg": 1, "Softplus": 1, "Gelu": 1, "GeluTanh": 1,
               "Elu": 1, "Greater": 2, "Less": 2, "Where": 3}
MOST_JOINED = 4  # values that the engine puts side by side
_FLOATS = ("float32", "float16", "bfloat16")
# What an op's integers may be among the engine's inputs, where that is not the same name alone: an
# Embedding of its own may look up positions.
_INPUTS = {"key_starts": ("memory_starts",), "key_lens": ("encoder_sequence_length",),
           "input_ids": ("input_ids", "position_ids")}
# What tensors are of; bytes are weights in codes, however wide these are.
ProgramDType = DTypeName | Literal["uint8"]
_COLLECTIVES = ("AllReduce", "AllGather")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ProgramTensor(_Frozen):
    """A tensor of the program.

    `shape` has names for a step's sizes: `num_tokens`, `num_logits`, `batch`, `batch_plus_1`,
    and of what an engine has, `num_blocks` of `block_size` positions, `max_blocks` of a sequence,
    `num_states`, and `num_memory_tokens` for the rows of a `memory`, which an encoder's tokens are
    scattered to and its decoder reads. A value lies `offset` bytes per token (`per_logit`: per
    wanted logit) into the arena. `columns` are those of the value `of` from `first` on, where they
    lie.
    """

    name: Annotated[str, Field(min_length=1)]
    kind: Literal["input", "weight", "cache", "state", "memory", "value", "columns"]
    dtype: ProgramDType
    shape: tuple[Count | SizeName, ...]
    offset: Annotated[int, Field(ge=0)] = 0
    per_logit: bool = False
    of: Annotated[int, Field(ge=-1)] = -1
    first: Annotated[int, Field(ge=0)] = 0

    @property
    def width(self) -> int:
        """Elements of a row."""
        return int(self.shape[-1])

    @property
    def row_bytes(self) -> int:
        """What a value takes of the arena, per token or wanted logit."""
        return -(-self.width * DTYPE_BYTES[self.dtype] // ALIGNMENT) * ALIGNMENT

    @model_validator(mode="after")
    def _of_its_kind(self) -> ProgramTensor:
        named = [dim for dim in self.shape if isinstance(dim, str)]
        dims = len(self.shape)
        fits = {"value": dims == 2 and named in (["num_tokens"], ["num_logits"]),
                "weight": dims in (1, 2, 3) and not named,
                "cache": dims == 4 and named == ["num_blocks", "block_size"],
                "state": dims > 1 and named == ["num_states"],
                "memory": dims == 2 and named == ["num_memory_tokens"],
                "columns": dims == 2 and named == ["num_tokens"],
                "input": self._is_input()}[self.kind]
        if not fits or (named and self.shape[0] != named[0]):
            raise ValueError(f"{self.kind} {self.name!r} is {self.dtype} {list(self.shape)}")
        allowed = {"input": (self.dtype,), "cache": (*_FLOATS, "float8_e4m3fn"),
                   "state": ("float32",),
                   "weight": (*_FLOATS, "uint8", "int32"),
                   "value": (*_FLOATS, "float8_e4m3fn", "int64")}
        if self.dtype not in allowed.get(self.kind, _FLOATS):
            raise ValueError(f"{self.kind} {self.name!r} is of dtype {self.dtype}")
        if (self.of >= 0 or self.first > 0) != (self.kind == "columns") or (
                self.kind == "columns" and self.of < 0):
            raise ValueError(f"{self.kind} {self.name!r} are columns of {self.of}")
        if self.kind != "value" and (self.offset or self.per_logit):
            raise ValueError(f"{self.kind} {self.name!r} has a place in the arena")
        if self.kind == "value" and (self.offset % ALIGNMENT
                                     or self.per_logit != (named == ["num_logits"])):
            raise ValueError(f"value {self.name!r} {list(self.shape)} lies at {self.offset}, "
                             f"per_logit {self.per_logit}")
        return self

    def _is_input(self) -> bool:
        known = {**ENGINE_INPUTS, MEMORY_ROWS: ("int64", ("num_tokens",))}
        if self.name not in known:
            return False
        dtype, shape = known[self.name]
        return self.dtype == dtype and len(self.shape) == len(shape) and all(
            dim == wanted for dim, wanted in zip(self.shape, shape, strict=True))


class ProgramNode(_Frozen):
    """An op and its fields; tensors by number, -1 for an absent input or an unused output."""

    op: str
    fields: dict[str, int | float | str]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @model_validator(mode="after")
    def _numbers_are_finite(self) -> ProgramNode:
        for name, value in self.fields.items():
            if isinstance(value, float) and not abs(value) < 1e30:
                raise ValueError(f"{self.op!r} has {name!r} {value}")
            if isinstance(value, int) and not 0 <= value < 2**31:
                raise ValueError(f"{self.op!r} has {name!r} {value}, which is not from 0 to 2^31")
        return self


class Program(_Frozen):
    """Tensors, nodes in order, the arena's size per token and per logit, and the logits' tensor,
    which an encoder has not: -1.
    """

    tensors: tuple[ProgramTensor, ...]
    nodes: tuple[ProgramNode, ...]
    token_bytes: Annotated[int, Field(ge=0)]
    logit_bytes: Annotated[int, Field(ge=0)]
    logits: Annotated[int, Field(ge=-1)] = -1

    @property
    def of_encoder(self) -> bool:
        return self.logits < 0

    @cached_property
    def exact(self) -> dict[int, str]:
        """The values that have a dtype of their own, by number."""
        made = ((number, op.made_dtypes(node.fields).get(name)) for node in self.nodes
                if (op := plugins.registry().get(node.op)) is not None
                for number, name in zip(node.outputs, op.outputs, strict=False))
        return {number: dtype for number, dtype in made if number >= 0 and dtype}

    def named(self, *kinds: str) -> dict[str, ProgramTensor]:
        """The tensors of these kinds by their names."""
        return {tensor.name: tensor for tensor in self.tensors if tensor.kind in kinds}

    @model_validator(mode="after")
    def _runs(self) -> Program:
        for node in self.nodes:
            for number in (*node.inputs, *node.outputs):
                if not -1 <= number < len(self.tensors):
                    raise ValueError(f"{node.op!r} uses tensor {number} of {len(self.tensors)}")
        if self.logits >= len(self.tensors):
            raise ValueError(f"the logits are tensor {self.logits} of {len(self.tensors)}")
        self._check_tensors()
        made = self._check_order()
        self._check_places(made)
        return self

    def _check_tensors(self) -> None:
        names = Counter(tensor.name for tensor in self.tensors
                        if tensor.kind not in ("value", "columns"))
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"two tensors are named {twice!r}")
        for number, dtype in self.exact.items():
            if self.tensors[number].dtype != dtype:
                raise ValueError(f"{self.tensors[number].name!r} is of {self.tensors[number].dtype}"
                                 f", which should be {dtype}")
        dtypes = {tensor.dtype for number, tensor in enumerate(self.tensors)
                  if tensor.kind in ("value", "memory") and number not in self.exact}
        if len(dtypes) > 1:
            raise ValueError(f"values are of {' and '.join(sorted(dtypes))}")
        for number, tensor in enumerate(self.tensors):
            if tensor.kind == "columns" and not (tensor.of < number and self._has(tensor)):
                raise ValueError(f"{tensor.name!r} {list(tensor.shape)} from {tensor.first} on are "
                                 f"no columns of tensor {tensor.of}")
        if not self.of_encoder and self.tensors[self.logits].shape[0] != "num_logits":
            raise ValueError(f"the logits are {self.tensors[self.logits].name!r}, "
                             f"{list(self.tensors[self.logits].shape)}")
        odd = {*self.named("input")} - (
            {*ENCODER_INPUTS, MEMORY_ROWS} if self.of_encoder else {*ENGINE_INPUTS})
        if self.of_encoder:
            odd |= {*self.named("cache", "state")}
        if odd:
            raise ValueError(f"{'an encoder' if self.of_encoder else 'a model'} has no tensor "
                             f"{min(odd)!r}")

    def _has(self, columns: ProgramTensor) -> bool:
        """Whether what they are of is a value of tokens that has them."""
        value = self.tensors[columns.of]
        alike = (value.kind, value.dtype, value.shape[0]) == ("value", columns.dtype, "num_tokens")
        return alike and columns.of not in self.exact \
            and columns.first + columns.width <= value.width

    def _lies_in(self, number: int) -> int:
        """The value that a tensor is columns of, or else the tensor."""
        return self.tensors[number].of if number >= 0 and self.tensors[number].of >= 0 else number

    def _check_order(self) -> dict[int, int]:
        """Check that every node has what it takes, made before it; for each value, who makes it."""
        made: dict[int, int] = {}
        written: set[int] = set()  # caches, states and memory
        for index, node in enumerate(self.nodes):
            try:
                for number in map(self._lies_in, node.inputs):
                    if number >= 0 and self.tensors[number].kind == "value" and number not in made:
                        raise ValueError(f"reads {self.tensors[number].name!r} before it is made")
                given = self._check_node(node)
                for number in node.outputs:
                    if number >= 0 and (self.tensors[number].kind != "value" or number in made):
                        raise ValueError(f"writes {self.tensors[number].name!r}, a "
                                         f"{self.tensors[number].kind} that is not its own")
                    made[number] = index
                for number in self._caches_read(node):
                    if number not in written:
                        raise ValueError(f"reads {self.tensors[number].name!r} before it is "
                                         f"written")
                for number in given:
                    if number in written:
                        raise ValueError(f"writes {self.tensors[number].name!r} again")
                    written.add(number)
            except ValueError as error:
                raise ValueError(f"node {index}, {node.op!r}: {error}") from error
        for number, tensor in enumerate(self.tensors):
            known = {"value": made, "cache": written, "state": written}
            if number not in known.get(tensor.kind, (number,)):
                raise ValueError(f"no node makes {tensor.kind} {tensor.name!r}")
        if not self.of_encoder and self.logits not in made:
            raise ValueError("no node makes the logits")
        return made

    def _check_node(self, node: ProgramNode) -> tuple[int, ...]:
        """Check one node's inputs and the shapes of its outputs; what it writes among its inputs.

        Raises:
            ValueError: it is no op of the engine, or its tensors or fields do not fit it.
        """
        tensors = [self.tensors[number] if number >= 0 else None for number in node.inputs]
        if node.op in ELEMENTWISE:
            shapes: Sequence[plugins.Shape] = [_elementwise(node, tensors)]
        elif node.op == "Gather":
            self._require(node, tensors, ("value", "num_tokens"), ("input", "logits_indices"))
            shapes = [("num_logits", _width(tensors[0]))]
        elif node.op == "Columns":
            shapes = [self._chosen(node, tensors)]
        elif node.op == "Concat":
            shapes = [self._joined(node, tensors)]
        elif node.op == "Scatter":
            self._require(node, tensors, ("value", "num_tokens"), ("input", MEMORY_ROWS),
                          ("memory", "num_memory_tokens"))
            if _width(tensors[0]) != _width(tensors[2]):
                raise ValueError(f"rows are {_width(tensors[0])} wide, the memory's "
                                 f"{_width(tensors[2])}")
            shapes = []
        else:
            shapes = self._check_op(node, tensors)
        if len(node.outputs) != len(shapes):
            raise ValueError(f"it makes {len(shapes)} tensors, not {len(node.outputs)}")
        in_place = _in_place(node)
        for index, (number, shape) in enumerate(zip(node.outputs, shapes, strict=True)):
            if index in in_place:  # an input's memory, which has no other name
                if number != -1:
                    raise ValueError(f"output {index} is tensor {number}, which should be -1")
            elif number < 0 or self.tensors[number].shape != tuple(shape):
                there = list(self.tensors[number].shape) if number >= 0 else "none"
                raise ValueError(f"output {index} is {there}, which should be {list(shape)}")
        return tuple(node.inputs[index] for index in in_place.values()) if in_place else \
            node.inputs[2:3] if node.op == "Scatter" else ()

    def _caches_read(self, node: ProgramNode) -> list[int]:
        """The caches of other layers among its inputs."""
        op = plugins.registry().get(node.op)
        return [number for name, number in zip(op.input_names, node.inputs, strict=False)
                if op.attention is not None and name in op.attention.reads] if op else []

    def _require(self, node: ProgramNode, tensors: Sequence[ProgramTensor | None],
                 *wanted: tuple[str, str]) -> None:
        """Check the inputs of a node that has no fields: of each the kind, and what it is called or
        how its rows are.
        """
        found = [tensor and (tensor.kind, tensor.name if tensor.kind == "input"
                             else tensor.shape[0]) for tensor in tensors]
        if node.fields or found != [*wanted]:
            raise ValueError(f"takes {list(wanted)} and no fields, not {found}")

    def _chosen(self, node: ProgramNode, tensors: Sequence[ProgramTensor | None]) -> \
            plugins.Shape:
        """The shape of some columns of a value."""
        x, index = tensors if len(tensors) == 2 else (None, None)
        if node.fields or x is None or index is None or x.kind != "value" \
                or node.inputs[0] in self.exact or len(index.shape) != 1 \
                or (index.kind, index.dtype) != ("weight", "int32"):
            raise ValueError("takes a value, an int32 weight that lists columns, and no fields")
        return x.shape[0], index.width

    def _joined(self, node: ProgramNode, tensors: Sequence[ProgramTensor | None]) -> \
            plugins.Shape:
        """The shape of values side by side."""
        values = [tensor for number, tensor in zip(node.inputs, tensors, strict=True)
                  if tensor is not None and tensor.kind == "value" and number not in self.exact]
        rows = {tensor.shape[0] for tensor in values}
        if node.fields or not 1 < len(tensors) <= MOST_JOINED or len(values) < len(tensors) \
                or len(rows) > 1:
            raise ValueError(f"takes 2 to {MOST_JOINED} values of as many rows and no fields")
        return rows.pop(), sum(tensor.width for tensor in values)

    def _check_op(self, node: ProgramNode, tensors: Sequence[ProgramTensor | None]) -> \
            Sequence[plugins.Shape]:
        """Check an llmc op; the shapes of its outputs."""
        op = plugins.registry().get(node.op)
        if op is None:
            raise ValueError("there is no such op")
        op.present([tensor.name if tensor else "" for tensor in tensors])
        given = {name: tensor for name, tensor in zip(op.input_names, tensors, strict=False)
                 if tensor is not None}
        dtype = next((tensor.dtype for number, tensor in enumerate(self.tensors)
                      if tensor.kind == "value" and number not in self.exact), "")
        fields = op.complete(node.fields)
        exact = op.exact(fields)
        for name, tensor in given.items():
            if name in op.integer_inputs:
                fits = (tensor.kind == "input" and tensor.name in _INPUTS.get(name, (name,))) \
                    or (tensor.kind, tensor.dtype) == ("value", "int64")
            elif name in op.cache_inputs:
                wanted = node.fields.get("kv_dtype") or dtype
                fits = tensor.kind == "cache" and tensor.dtype == wanted
            elif op.state is not None and name == op.state.state:
                fits = tensor.kind == "state"
            elif name in op.packed(fields) - exact:
                fits = tensor.kind == "weight" and tensor.dtype == "uint8"
            elif name in exact:
                fits = tensor.kind in ("weight", "value") and tensor.dtype == "float32"
            elif name in op.rounded(fields):
                fits = (tensor.kind, tensor.dtype) == ("value", "float8_e4m3fn")
            else:
                fits = tensor.kind in ("value", "weight", "memory", "columns") \
                    and tensor.dtype == dtype
            if tensor.kind == "columns":
                fits = fits and name in {role.input for role in op.columns}
            # Rows that are counted in the memory are the memory's.
            if name in ("key", "value") and "key_starts" in given:
                fits = fits and tensor.kind == "memory"
            if not fits:
                raise ValueError(f"its {name} is {tensor.kind} {tensor.name!r} of {tensor.dtype}")
        caches = [tensor.name for name, tensor in given.items() if name in op.cache_inputs]
        if len({*caches}) < len(caches):
            raise ValueError(f"its caches are all {caches[0]!r}")
        return op.fit({name: tensor.shape for name, tensor in given.items()}, node.fields)

    def _check_places(self, made: Mapping[int, int]) -> None:
        """Check that each value is inside the arena, and no other is there while it is needed."""
        sizes = {False: self.token_bytes, True: self.logit_bytes}
        ends = {False: 0, True: 0}
        for number in made:
            if number < 0:
                continue
            tensor = self.tensors[number]
            end = tensor.offset + tensor.row_bytes
            if end > sizes[tensor.per_logit]:
                raise ValueError(f"value {tensor.name!r} ends at byte {end} of an arena of "
                                 f"{sizes[tensor.per_logit]}")
            ends[tensor.per_logit] = max(ends[tensor.per_logit], end)
        if ends != sizes:
            raise ValueError(f"the arena's {self.token_bytes} and {self.logit_bytes} bytes are not "
                             f"the {ends[False]} and {ends[True]} that values take")
        last = self._last_uses()
        living: list[int] = []
        for number in sorted((n for n in made if n >= 0), key=lambda n: made[n]):
            tensor = self.tensors[number]
            living = [other for other in living if last[other] >= made[number]]
            for other in map(self.tensors.__getitem__, living):
                if other.per_logit == tensor.per_logit \
                        and other.offset < tensor.offset + tensor.row_bytes \
                        and tensor.offset < other.offset + other.row_bytes:
                    raise ValueError(f"node {made[number]} writes {tensor.name!r} over "
                                     f"{other.name!r}, which is still needed")
            living.append(number)

    def _last_uses(self) -> dict[int, int]:
        """For each value, the last node that reads or writes it; the logits are read behind all."""
        last: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            last.update(dict.fromkeys((*map(self._lies_in, node.inputs), *node.outputs), index))
        last[self.logits] = len(self.nodes)
        for node in self.nodes:
            # When every row is wanted the engine does not copy them: whoever reads the copy reads
            # the rows themselves.
            if node.op == "Gather":
                last[node.inputs[0]] = max(last[node.inputs[0]], last[node.outputs[0]])
        return last


def _width(tensor: ProgramTensor | None) -> int:
    assert tensor is not None
    return tensor.width


def _in_place(node: ProgramNode) -> dict[int, int]:
    """For each output that is an input's memory, its index and the input's."""
    op = plugins.registry().get(node.op)
    kept = op.cache_inputs | ({op.state.state} if op.state else set()) if op else set()
    return {index: op.input_names.index(name.removesuffix("_out"))
            for index, name in enumerate(op.outputs)
            if name.removesuffix("_out") in kept} if op else {}


def _elementwise(node: ProgramNode, tensors: Sequence[ProgramTensor | None]) -> plugins.Shape:
    """The shape of values, all alike, among which weights may be a number each, or one for each
    column, and values a column for all of a row.
    """
    shapes = {tensor.shape for tensor in tensors if tensor is not None and tensor.kind == "value"}
    wide = {shape for shape in shapes if shape[-1] != 1} or shapes
    widths = {1, *(shape[-1] for shape in wide)}
    for tensor in tensors:
        if tensor is None or (tensor.kind != "value" and (
                (tensor.kind, tensor.dtype) != ("weight", "float32") or len(tensor.shape) != 1
                or tensor.shape[0] not in widths)):
            raise ValueError(f"takes values and float32 weights of shape [1] or a row's, not "
                             f"{tensor and tensor.name!r}")
    if len(tensors) != ELEMENTWISE[node.op] or len(wide) != 1 or node.fields \
            or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(f"takes {ELEMENTWISE[node.op]} inputs of one shape and no fields")
    return wide.pop()


@dataclass(frozen=True)
class ChipPrograms:
    """The programs of one chip, checked against the manifest, and their weights' places."""

    model: Program
    encoder: Program | None
    weights: Mapping[str, StoredWeight]


def read_program(path: Path) -> Program:
    """Parse and validate a program file.

    Raises:
        LlmcError: it is missing or invalid, or would leave the engine's memory.
    """
    try:
        return Program.model_validate_json(read_bounded(path, _MAX_BYTES))
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be read ({error}); compile the model again") from error
    except ValidationError as error:
        raise LlmcError(f"'{path}' is not a valid schedule: {explain(error)}; compile the model "
                        f"again") from error


def read_chip_programs(manifest: Manifest, chip: Chip, case_dir: Path) -> ChipPrograms:
    """Read a chip's programs and hold them against the manifest and the weight file; those of chip
    0 against the others' too, as ranks meet in their collectives.

    Raises:
        LlmcError: see `read_program`; or one part says otherwise than another, which is named.
    """
    stored = read_weight_header(case_dir / chip.path / WEIGHTS_NAME)
    programs = _read_steps(chip, case_dir)
    try:
        for program in programs:
            _hold(program, manifest, chip, stored)
        _hold_together(programs, chip)
        if chip.rank == 0:
            _hold_ranks([programs, *(_read_steps(other, case_dir)
                                      for other in manifest.chips[1:])], manifest)
    except ValueError as error:
        raise LlmcError(f"the schedules in '{case_dir / chip.path}' do not fit {MANIFEST_NAME}: "
                        f"{error}; compile the model again") from error
    names = {name for program in programs for name in program.named("weight")}
    model, *encoder = programs
    return ChipPrograms(model, encoder[0] if encoder else None,
                        {name: stored[name] for name in names})


def _read_steps(chip: Chip, case_dir: Path) -> list[Program]:
    """The programs of a chip's model and perhaps its encoder, each of which is its one step."""
    programs = []
    for owner in (chip, chip.encoder) if chip.encoder else (chip,):
        step = owner.steps[0]
        if len(owner.steps) != 1 or not isinstance(step, GraphStep):
            raise LlmcError(f"chip {chip.rank} has {len(owner.steps)} steps in {MANIFEST_NAME}, "
                            f"where a schedule is one; compile the model again")
        programs.append(read_program(case_dir / step.path))
    return programs


def _hold(program: Program, manifest: Manifest, chip: Chip,
          stored: Mapping[str, StoredWeight]) -> None:
    """Check each tensor and each op's fields against what the manifest says of them."""
    dims, encoder = manifest.dims, chip.encoder
    owner = encoder if program.of_encoder and encoder else chip
    if program.of_encoder != (owner is encoder):
        raise ValueError(f"a schedule is {'' if program.of_encoder else 'not '}an encoder's")
    memory = {tensor.name: tensor.width for tensor in encoder.outputs} if encoder else {}
    for name, tensor in program.named("weight", "cache", "state", "memory", "input").items():
        wanted: tuple[str, Sequence[int | str]] = (tensor.dtype, tensor.shape)
        if tensor.kind == "weight":
            if name not in stored:
                raise ValueError(f"{WEIGHTS_NAME} has no {name!r}")
            wanted = (stored[name].dtype, stored[name].shape)
        elif tensor.kind == "cache":
            if name not in chip.caches:
                raise ValueError(f"there is no cache {name!r}")
            cache = chip.caches[name]
            wanted = (manifest.kv_dtype, cache_shape(cache, dims.max_seq_len, paged=True))
        elif tensor.kind == "state":
            if name not in chip.state_caches:
                raise ValueError(f"there is no state {name!r}")
            wanted = ("float32", ("num_states", *chip.state_caches[name].shape))
        elif tensor.kind == "memory":
            if name not in memory:
                raise ValueError(f"no encoder makes {name!r}")
            wanted = (manifest.dtype, ("num_memory_tokens", memory[name]))
        if (tensor.dtype, tensor.shape) != (wanted[0], tuple(wanted[1])):
            raise ValueError(f"{name!r} is {tensor.dtype} {list(tensor.shape)}, which should be "
                             f"{wanted[0]} {list(wanted[1])}")
    exact = program.exact
    for number, tensor in enumerate(program.tensors):
        if tensor.kind == "value" and number not in exact and tensor.dtype != manifest.dtype:
            raise ValueError(f"value {tensor.name!r} is of {tensor.dtype}, the model of "
                             f"{manifest.dtype}")
    if not program.of_encoder and \
            program.tensors[program.logits].width != dims.padded_vocab_size:
        raise ValueError(f"the logits are {program.tensors[program.logits].width} wide, "
                         f"padded_vocab_size is {dims.padded_vocab_size}")
    _hold_names(program, owner, memory)
    _hold_fields(program, manifest, chip)


def _hold_names(program: Program, owner: Chip | EncoderProgram,
                memory: Mapping[str, int]) -> None:
    """What goes in and comes out is what the step lists; positions may go unused."""
    listed = {tensor.name for tensor in owner.inputs}
    used = {*program.named("input", "cache", "state", "memory")} - {MEMORY_ROWS}
    if program.of_encoder:
        scattered = {program.tensors[node.inputs[2]].name for node in program.nodes
                     if node.op == "Scatter"}
        if scattered != {*memory}:
            raise ValueError(f"its encoder does not make {min(scattered ^ {*memory})!r}")
        used -= {*memory}
    odd = used ^ listed
    if odd - {"position_ids"} or used - listed:
        raise ValueError(f"the inputs of its schedule differ in {min(odd)!r}")


def _hold_fields(program: Program, manifest: Manifest, chip: Chip) -> None:
    """Heads, ranks, and tables that have a row for each token and position."""
    limits, encoder = manifest.dims, manifest.encoder
    vocab_size, length = (encoder.vocab_size, encoder.max_seq_len) \
        if program.of_encoder and encoder else (limits.vocab_size, limits.max_seq_len)
    for node in program.nodes:
        if node.op in _COLLECTIVES and node.fields.get("tp_size") != manifest.tp_size:
            raise ValueError(f"{node.op} is of {node.fields.get('tp_size')} ranks, tp_size is "
                             f"{manifest.tp_size}")
        op = plugins.registry().get(node.op)
        given = {name: program.tensors[number] for name, number
                 in zip(op.input_names, node.inputs, strict=False) if number >= 0} if op else {}
        if "key_cache" in given and "value_cache" in given:
            key, value = given["key_cache"].name, given["value_cache"].name
            layer = [*chip.caches].index(key) // 2
            if (key, value) != (f"key_cache_{layer}", f"value_cache_{layer}"):
                raise ValueError(f"an attention has the caches {key!r} and {value!r}")
            own = op is not None and op.attention is not None and op.attention.caches
            if own and node.fields["num_heads"] != chip.num_heads[layer]:
                raise ValueError(f"layer {layer} has {node.fields['num_heads']} heads, "
                                 f"{MANIFEST_NAME} says {chip.num_heads[layer]}")
        least = {"table": length if "input_ids" in given and
                 given["input_ids"].name == "position_ids" else vocab_size,
                 "position_table": length, "cos": length, "sin": length,
                 "query_scale": length, "key_bias": length}
        if node.fields.get("vocab_sharded"):
            del least["table"]  # ids that others have give zeros
        for name, rows in least.items():
            has = int(given[name].shape[name == "key_bias"]) if name in given else rows
            if has < rows:
                raise ValueError(f"{given[name].name!r} has {has} rows, fewer than {rows}")


def _hold_together(programs: Sequence[Program], chip: Chip) -> None:
    """A name is the same in both programs, and every cache is used."""
    kinds: dict[str, str] = {}
    for program in programs:
        for tensor in program.named("weight", "cache", "state", "memory", "input").values():
            if kinds.setdefault(tensor.name, tensor.kind) != tensor.kind:
                raise ValueError(f"{tensor.name!r} is {kinds[tensor.name]} and {tensor.kind}")
    unused = {*chip.kept} - kinds.keys()
    if unused:
        raise ValueError(f"no node uses {min(unused)!r}")


def _hold_ranks(ranks: Sequence[Sequence[Program]], manifest: Manifest) -> None:
    """All ranks have the same collectives, and their ops are those that the manifest lists."""
    for rank, programs in enumerate(ranks):
        for first, program in zip(ranks[0], programs, strict=True):
            if _meetings(program) != _meetings(first):
                raise ValueError(f"chips 0 and {rank} do not have the same collectives")
    used = {node.op for programs in ranks for program in programs
            for node in program.nodes} & {*plugins.registry()}
    odd = used ^ manifest.ops.keys()
    if odd:
        raise ValueError(f"{min(odd)!r} is {'not ' if min(odd) not in used else ''}in the "
                         f"schedules and {'not ' if min(odd) in used else ''}among ops")


def _meetings(program: Program) -> list[tuple[str, plugins.Shape]]:
    """Where ranks meet: each collective and the shape of what they bring."""
    return [(node.op, program.tensors[node.inputs[0]].shape) for node in program.nodes
            if node.op in _COLLECTIVES]
