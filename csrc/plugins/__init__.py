"""The registry of llmc:: ops. Each folder beside this file holds one op; its `op.py` defines `OP`.

An op is declared once, as a value: its inputs, outputs and fields (ONNX attributes), its shape
rule, how it is divided among ranks, the ONNX body that defines what it computes, and what tests
need. Registering a name twice raises.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the runtime reads the registry and has no onnx
    import onnx

from llmc.plugins.roles import Attention, Columns, Norm, Quantized, Shard, State

DOMAIN = "llmc"
OPSET = 24
# ONNX Runtime 1.23, the last for TensorRT 8.6's Python, reads no newer one.
OPSETS = {"tensorrt": 23}

Shape = tuple[int | str, ...]
Fields = Mapping[str, Any]  # int, float or str, as the op declares


@dataclass(frozen=True)
class Sample:
    """Inputs to test an op with: arrays by input name (absent optional inputs left out). A body for
    a target may differ by `tolerance` where that is more than the op's.
    """

    fields: Fields
    inputs: Mapping[str, Any]
    tolerance: float = 0.0


@dataclass(frozen=True)
class Op:
    """One operator of the llmc domain.

    Args:
        name: the ONNX op type.
        version: raised whenever the contract changes.
        inputs: names in order; a trailing `?` marks an optional one.
        outputs: names in order.
        fields: every field with its default; the default's type is the field's type.
        required: fields that a node must set.
        float32_inputs: inputs that stay float32 whatever the dtype of the others: small tables,
            whose rounding would show.
        integer_inputs: inputs that are integers.
        cache_inputs: inputs that are of the dtype that the field `kv_dtype` names, if it names one;
            so are the outputs `<input>_out`.
        shapes: (input shapes by name, fields) to output shapes, in order. Dimensions may be names,
            and what comes before the last of activations may be [num_tokens] or [batch, seq].
        dims: (fields, names of the inputs present) to each input's shape: numbers, and names, each
            of which is one size wherever it stands. `2 * n + 1` is of that form, `>= n` at least n.
            It raises ValueError where fields and inputs contradict one another.
        choices: what a field may be, where that is not all that its type allows.
        shard: how it can be divided among ranks, in the order in which to try; in no way: every
            rank computes the whole.
        norm: what it is, if it is a norm.
        attention: what it is, if it is attention.
        state: what it keeps from step to step, if that is no keys and values.
        columns: which inputs its core takes from among the columns of wider rows.
        quantized: which inputs may be in fewer bits, as the field `weight_dtype` then says.
        collective: what the ranks do together, if it is that.
        output_dtypes: outputs that have a dtype of their own, whatever that of the others. An op
            with a field `out_scale` has the first in float8_e4m3fn where that is above 0: numbers
            over that scale, rounded, beyond 448 times it that; one with a field `x_dtype` takes
            such an x.
        rounds: (fields, names of the inputs present) to whether `out_scale` may be above 0.
        has_core: whether csrc has a core for it, which the engines of GPUs need.
        coreless: inputs, and fields but for their defaults, that its core does not take yet.
        core_most: of fields, the most that its core takes.
        core_multiple: of fields, what its core takes multiples of only.
        body: (fields, names of the inputs present) to the reference body: lines in ONNX text
            syntax that compute the outputs from the inputs, at `OPSET`, in standard ONNX only.
            None for a collective, which no single graph can compute.
        bodies: per target kind, a body equal to the reference and faster there; it returns None
            where it does not cover the fields. It may use com.microsoft ops.
        serves: per target kind, which inputs its body serves, where that is not all; the target's
            engine must not give it others.
        held_scores: per target kind, how many attention scores of a query and a key its body holds
            at once, over all heads; 0: it computes them in tiles.
        reference: the same function in float64 NumPy, on (fields, inputs): the independent truth.
        tolerance: largest difference from `reference` relative to its range, in float32.
        samples: (random generator) to samples that cover every field and optional input.
    """

    name: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fields: Fields
    shapes: Callable[[Mapping[str, Shape], Fields], Sequence[Shape]]
    body: Callable[[Fields, frozenset[str]], str] | None
    bodies: Mapping[str, Callable[[Fields, frozenset[str]], str | None]] = field(
        default_factory=dict)
    serves: Mapping[str, Callable[[Mapping[str, Any]], bool]] = field(default_factory=dict)
    held_scores: Mapping[str, Callable[[Fields, frozenset[str]], int]] = field(default_factory=dict)
    dims: Callable[[Fields, frozenset[str]], Mapping[str, Shape]] | None = None
    shard: tuple[Shard, ...] = ()
    norm: Norm | None = None
    attention: Attention | None = None
    state: State | None = None
    columns: tuple[Columns, ...] = ()
    quantized: tuple[Quantized, ...] = ()
    collective: Literal["", "all_reduce", "all_gather"] = ""
    required: tuple[str, ...] = ()
    choices: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    float32_inputs: frozenset[str] = frozenset()
    integer_inputs: frozenset[str] = frozenset()
    cache_inputs: frozenset[str] = frozenset()
    output_dtypes: Mapping[str, str] = field(default_factory=dict)
    rounds: Callable[[Fields, frozenset[str]], bool] = lambda fields, present: False
    has_core: bool = True
    coreless: frozenset[str] = frozenset()
    core_most: Mapping[str, int] = field(default_factory=dict)
    core_multiple: Mapping[str, int] = field(default_factory=dict)
    reference: Callable[[Fields, Mapping[str, Any]], Sequence[Any]] | None = None
    tolerance: float = 1e-5
    samples: Callable[[Any], Sequence[Sample]] | None = None

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(name.removesuffix("?") for name in self.inputs)

    def complete(self, fields: Fields) -> dict[str, int | float | str]:
        """`fields` with defaults filled in.

        Raises:
            ValueError: a field is unknown, missing, of the wrong type or no choice.
        """
        for name, value in fields.items():
            if name not in self.fields:
                raise ValueError(f"{self.name} has no field {name!r}; it has {list(self.fields)}")
            if type(value) is not type(self.fields[name]):
                raise ValueError(f"{self.name}'s field {name!r} is {value!r}, "
                                 f"expected a {type(self.fields[name]).__name__}")
            if value not in self.choices.get(name, (value,)):
                raise ValueError(f"{self.name}'s field {name!r} is {value!r}, expected one of "
                                 f"{list(self.choices[name])}")
        for name in self.required:
            if name not in fields:
                raise ValueError(f"{self.name} needs the field {name!r}")
        return {**self.fields, **fields}

    def present(self, inputs: Sequence[str]) -> frozenset[str]:
        """Which inputs a node with these input names ('' for absent) has.

        Raises:
            ValueError: a required input is absent, or there are too many.
        """
        if len(inputs) > len(self.inputs):
            raise ValueError(f"{self.name} takes {len(self.inputs)} inputs, not {len(inputs)}")
        given = frozenset(name for name, tensor in zip(self.input_names, inputs, strict=False)
                          if tensor)
        for declared in self.inputs:
            if not declared.endswith("?") and declared not in given:
                raise ValueError(f"{self.name} needs the input {declared!r}")
        return given

    def lacking(self, fields: Fields, inputs: Iterable[str]) -> frozenset[str]:
        """Of a node's inputs, and of its fields but for defaults, those that its core does not take
        yet; or which value of a field.
        """
        given = {**self.fields, **fields}
        odd = (f"{name} {given[name]}" for name in {**self.core_most, **self.core_multiple}
               if given[name] > self.core_most.get(name, given[name])
               or given[name] % self.core_multiple.get(name, 1))
        changed = (name for name, value in fields.items() if value != self.fields[name])
        return self.coreless & {*inputs, *changed} | {*odd}

    def packed(self, fields: Fields) -> frozenset[str]:
        """The inputs whose dtypes are those of weights in fewer bits, where `fields` say so."""
        if not self.quantized or not fields["weight_dtype"]:
            return frozenset()
        return frozenset({name for role in self.quantized
                          for name in (role.weight, role.scale, role.zero, role.minimum,
                                       role.blocks) if name})

    def made_dtypes(self, fields: Fields) -> Mapping[str, str]:
        """The outputs that have a dtype of their own, where `fields` are these."""
        if not fields.get("out_scale"):
            return self.output_dtypes
        return {**self.output_dtypes, self.outputs[0]: "float8_e4m3fn"}

    def rounded(self, fields: Fields) -> frozenset[str]:
        """The inputs that come in float8_e4m3fn, where `fields` say so."""
        return frozenset({"x"} if fields.get("x_dtype") else ())

    def exact(self, fields: Fields) -> frozenset[str]:
        """The inputs that are float32 whatever the others are: not the scales of weights that have
        exponents in their place.
        """
        from llmc.plugins.quantization import MXFP4
        if not self.quantized or fields["weight_dtype"] != MXFP4:
            return self.float32_inputs
        return self.float32_inputs - {role.scale for role in self.quantized}

    def fit(self, shapes: Mapping[str, Shape], fields: Fields) -> Sequence[Shape]:
        """Output shapes, where inputs of these shapes (by name; absent ones left out) fit together.

        Raises:
            ValueError: they do not, or a field is wrong.
        """
        fields, sizes = self.complete(fields), dict[str, int | str]()
        if self.dims is None:
            raise ValueError(f"{self.name} does not say which shapes its inputs have")
        dims = self.dims(fields, frozenset(shapes))
        later: list[tuple[str, int | str, str]] = []
        for name, shape in shapes.items():
            if len(shape) != len(dims[name]):
                raise ValueError(f"{self.name}'s {name} is {list(shape)}, expected "
                                 f"{list(dims[name])}")
            for dim, wanted in zip(shape, dims[name], strict=True):
                if isinstance(wanted, str) and wanted.startswith(">= "):
                    later.append((name, dim, wanted.removeprefix(">= ")))
                elif not _is_size(dim, wanted, sizes):
                    raise ValueError(f"{self.name}'s {name} is {list(shape)}, expected "
                                     f"{[_known(w, sizes) for w in dims[name]]}")
        for name, dim, least in later:
            if not isinstance(dim, int) or dim < int(sizes[least]):
                raise ValueError(f"{self.name}'s {name} has size {dim}, expected {least}, "
                                 f"{sizes[least]}, or more")
        return self.shapes(shapes, fields)

    def function(self, fields: Fields, inputs: Sequence[str], target: str = "",
                 dtype: str = "float32") -> onnx.FunctionProto | None:
        """The model-local function for one use of the op: fields baked in, absent inputs gone.

        Its `overload` is a digest of the body, so equal uses share one function. `target` picks
        the body for that target where there is one. For another `dtype` than float32 the body is
        the same between casts: it computes in float32, as a kernel does. None for a collective.
        """
        if self.body is None:
            return None
        import onnx.parser
        fields, given = self.complete(fields), self.present(inputs)
        lines = None
        if target in self.bodies:
            lines = self.bodies[target](fields, given)
        if lines is None:
            lines = self.body(fields, given)
        used = self.input_names[:len(inputs)]
        key = [*used, *sorted(given), lines, *([] if dtype == "float32" else [dtype]),
               *([f"out_scale {fields['out_scale']}"] if fields.get("out_scale") else [])]
        digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:12]
        text = (f'<domain: "{DOMAIN}", overload: "{digest}", '
                f'opset_import: ["": {OPSETS.get(target, OPSET)}, "com.microsoft": 1]>\n'
                f'{self.name} ({", ".join(used)}) => ({", ".join(self.outputs)}) {{\n{lines}\n}}')
        try:
            function = onnx.parser.parse_function(text)
        except onnx.parser.ParseError as error:
            raise ValueError(f"the body of {self.name} does not parse: {error}\n{text}") from error
        if fields.get("out_scale"):
            _round_output(function, self.outputs[0], float(fields["out_scale"]))
        if dtype == "float32":
            return function
        caches = self.cache_inputs if fields.get("kv_dtype") else frozenset()
        return _cast_borders(
            function,
            given - self.float32_inputs - self.integer_inputs - caches - self.packed(fields),
            [name for name in self.outputs
             if name.removesuffix("_out") not in caches
             and name not in self.made_dtypes(fields)], dtype)


def _rename(function: onnx.FunctionProto, names: Mapping[str, str]) -> None:
    """Call what its nodes read and make something else."""
    for node in function.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def _round_output(function: onnx.FunctionProto, output: str, scale: float) -> None:
    """Let an output be its numbers over a scale, in FP8."""
    import onnx
    made = f"{output}_numbers"
    _rename(function, {output: made})
    function.node.extend([
        onnx.helper.make_node("Constant", [], [f"{made}_scale"], value_float=scale),
        onnx.helper.make_node("Div", [made, f"{made}_scale"], [f"{made}_scaled"]),
        onnx.helper.make_node("Cast", [f"{made}_scaled"], [output],
                              to=onnx.TensorProto.FLOAT8E4M3FN)])


def _cast_borders(function: onnx.FunctionProto, inputs: frozenset[str], outputs: Sequence[str],
                  dtype: str) -> onnx.FunctionProto:
    """The function with `inputs` and `outputs` of `dtype`, and a body that stays float32."""
    import onnx
    narrow = onnx.TensorProto.DataType.Value(dtype.upper())
    wide = {name: f"{name}_float32" for name in (*inputs, *outputs)}
    _rename(function, wide)
    nodes = [onnx.helper.make_node("Cast", [name], [wide[name]], to=onnx.TensorProto.FLOAT)
             for name in function.input if name in inputs]
    nodes += function.node
    nodes += (onnx.helper.make_node("Cast", [wide[name]], [name], to=narrow)
              for name in outputs)
    return onnx.helper.make_function(
        function.domain, function.name, function.input, function.output, nodes,
        function.opset_import, overload=function.overload)


_LINEAR = re.compile(r"(?:(\d+) \* )?(\w+)(?: \+ (\d+))?")  # of `Op.dims`


def _is_size(dim: int | str, wanted: int | str, sizes: dict[str, int | str]) -> bool:
    """Whether a dimension is what `Op.dims` says; a name that stands there first becomes known."""
    if isinstance(wanted, int):
        return dim == wanted
    linear = _LINEAR.fullmatch(wanted)
    assert linear, f"{wanted!r} is no dimension"
    times, name, more = int(linear[1] or 1), linear[2], int(linear[3] or 0)
    if (times, more) != (1, 0):
        if not isinstance(dim, int) or dim < more or (dim - more) % times:
            return False
        dim = (dim - more) // times
    return sizes.setdefault(name, dim) == dim


def _known(wanted: int | str, sizes: Mapping[str, int | str]) -> int | str:
    return sizes.get(wanted, wanted) if isinstance(wanted, str) else wanted


@cache
def registry() -> Mapping[str, Op]:
    """Every op by name, found by importing `<folder>/op.py` for each folder on this package's path,
    which is the one of this file.
    """
    ops: dict[str, Op] = {}
    for path in sorted(path for root in __path__ for path in Path(root).glob("*/op.py")):
        op = importlib.import_module(f"{__name__}.{path.parent.name}.op").OP
        if op.name in ops:
            raise ValueError(f"op {op.name!r} is registered twice, the second time in {path}")
        ops[op.name] = op
    return ops
