"""Registry of the llmc:: ops. Each folder beside this file has one op; its `op.py` defines `OP`.

An op is declared once, as a value: inputs, outputs, attributes, shape rule, sharding, the ONNX body
that defines it, a reference and samples for tests. Registering a name twice raises.
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

if TYPE_CHECKING:  # the runtime reads the registry without onnx
    import onnx

from llmc.plugins.code_types import CODE_TYPES
from llmc.plugins.roles import Attention, Columns, Norm, Quantized, Shard, State
from llmc.targets import TARGETS

DOMAIN = "llmc"
OPSET = 24

Shape = tuple[int | str, ...]
Fields = Mapping[str, Any]  # int, float or str, as declared


@dataclass(frozen=True)
class Sample:
    """Test inputs of an op: arrays by input name, without absent optional inputs.

    A body for a target may differ by `tolerance`, if that is more than the op's.
    """

    fields: Fields
    inputs: Mapping[str, Any]
    tolerance: float = 0.0


@dataclass(frozen=True)
class Op:
    """One operator of the llmc domain.

    Args:
        name: the ONNX op type.
        version: incremented whenever the contract changes.
        inputs: names in order; a trailing `?` marks an optional one.
        outputs: names in order.
        fields: every attribute with its default, whose type is the attribute's type.
        required: attributes that a node must set.
        float32_inputs: inputs that are float32 whatever the dtype of the others: small tables,
            whose rounding would be noticeable.
        integer_inputs: inputs that are integers.
        cache_inputs: inputs of the dtype of attribute `kv_dtype`, if that is set; likewise the
            outputs `<input>_out`.
        shapes: (input shapes by name, attributes) to output shapes, in order. Dimensions may be
            names. The leading dimensions of activations may be [num_tokens] or [batch, seq].
        dims: (attributes, names of present inputs) to each input's shape: numbers and names. A name
            is one size everywhere. `2 * n + 1` and `>= n` (at least n) are allowed. Raises
            ValueError if attributes and inputs are inconsistent.
        choices: allowed values of attributes, if restricted.
        shard: how it is sharded, in order of preference; empty: every rank computes all of it.
        norm: its role as a norm, if it is one.
        attention: its role as attention, if it is one.
        state: its recurrent state, if it has one.
        columns: inputs that its core accepts as columns of wider rows.
        quantized: inputs that may be quantized, according to attribute `weight_dtype`.
        collective: its collective operation, if it is one.
        pools: whether its output has one row per sequence.
        output_dtypes: outputs with a declared dtype. An op with an attribute `out_scale` has
            its first output in float8_e4m3fn where that is above 0: values over that scale,
            saturated at 448. One with an attribute `x_dtype` accepts such an x.
        rounds: (attributes, names of present inputs) to whether `out_scale` may be above 0.
        has_core: whether csrc has a core for it, which GPU engines need.
        coreless: inputs, and attributes with other values than defaults, that its core does not
            support yet.
        core_most: maximum values of attributes for its core.
        core_multiple: divisors of attributes for its core.
        body: (attributes, names of present inputs) to the reference body: lines in ONNX text
            syntax that compute the outputs from the inputs, at `OPSET`, in standard ONNX only.
            None for a collective, which no single graph can compute.
        bodies: per target kind, an equal and faster body; it returns None for attributes that it
            does not support. It may use com.microsoft ops.
        serves: per target kind, the inputs that its body supports, if not all; the target's engine
            must not provide others.
        held_scores: per target kind, how many attention scores of a query and a key its body holds
            at once, over all heads; 0: it computes them in tiles. With the input key_starts, keys
            are rows of encoder outputs.
        reference: the same function in float64 NumPy, of (attributes, inputs): independent truth.
        tolerance: maximum difference from `reference` relative to its range, in float32.
        samples: (random generator) to samples that cover every attribute and optional input.
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
    pools: bool = False
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
        """Return `fields` with defaults for missing ones.

        Raises:
            ValueError: an attribute is unknown, missing, of the wrong type or not allowed.
        """
        for name, value in fields.items():
            if name not in self.fields:
                raise ValueError(f"{self.name} has no attribute {name!r}; expected one of "
                                 f"{list(self.fields)}")
            if type(value) is not type(self.fields[name]):
                raise ValueError(f"{self.name}'s attribute {name!r} is {value!r}, "
                                 f"expected a {type(self.fields[name]).__name__}")
            if value not in self.choices.get(name, (value,)):
                raise ValueError(f"{self.name}'s attribute {name!r} is {value!r}, expected one "
                                 f"of {list(self.choices[name])}")
        for name in self.required:
            if name not in fields:
                raise ValueError(f"{self.name} needs the attribute {name!r}")
        return {**self.fields, **fields}

    def present(self, inputs: Sequence[str]) -> frozenset[str]:
        """Return the inputs that a node with these input names ('' for absent) has.

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
        """Return a node's inputs and attributes, or values of attributes, that its core lacks."""
        given = {**self.fields, **fields}
        odd = (f"{name} {given[name]}" for name in {**self.core_most, **self.core_multiple}
               if given[name] > self.core_most.get(name, given[name])
               or given[name] % self.core_multiple.get(name, 1))
        changed = (name for name, value in fields.items() if value != self.fields[name])
        return self.coreless & {*inputs, *changed} | {*odd}

    def packed(self, fields: Fields) -> frozenset[str]:
        """Return the inputs with dtypes of quantized weights, given `fields`."""
        if not self.quantized or not fields["weight_dtype"]:
            return frozenset()
        return frozenset({name for role in self.quantized
                          for name in (role.weight, role.scale, role.zero, role.minimum,
                                       role.blocks) if name})

    def made_dtypes(self, fields: Fields) -> Mapping[str, str]:
        """Return the outputs with a declared dtype, given `fields`."""
        if not fields.get("out_scale"):
            return self.output_dtypes
        return {**self.output_dtypes, self.outputs[0]: "float8_e4m3fn"}

    def rounded(self, fields: Fields) -> frozenset[str]:
        """Return the inputs that are float8_e4m3fn, given `fields`."""
        return frozenset({"x"} if fields.get("x_dtype") else ())

    def exact(self, fields: Fields) -> frozenset[str]:
        """Return the inputs that are float32 regardless of the others.

        Exponent scales (MXFP4) are excluded.
        """
        own = CODE_TYPES.get(fields["weight_dtype"]) if self.quantized else None
        if own is None or own.scale_dtype == "float32":
            return self.float32_inputs
        return self.float32_inputs - {role.scale for role in self.quantized}

    def fit(self, shapes: Mapping[str, Shape], fields: Fields) -> Sequence[Shape]:
        """Return output shapes for input shapes (by name; absent ones left out).

        Raises:
            ValueError: the shapes are inconsistent, or an attribute is wrong.
        """
        fields, sizes = self.complete(fields), dict[str, int | str]()
        if self.dims is None:
            raise ValueError(f"{self.name} declares no input shapes")
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
        """Return the model-local function for one use: attributes inlined, absent inputs removed.

        Its `overload` is a digest of the body, so equal uses share one function. `target` selects
        that target's body, if there is one. For another `dtype` than float32 the body is the same
        between casts: it computes in float32, as a kernel does. None for a collective.
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
                f'opset_import: ["": {opset(target)}, "com.microsoft": 1]>\n'
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


def _rename(body: onnx.FunctionProto | onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename inputs and outputs of all nodes, those of subgraphs included."""
    for node in body.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, names)


def _round_output(function: onnx.FunctionProto, output: str, scale: float) -> None:
    """Divide an output by a scale and quantize it to FP8."""
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
    """The function with `inputs` and `outputs` in `dtype`, and a float32 body."""
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
    """Whether a dimension matches an entry of `Op.dims`; a new name becomes known."""
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


def opset(target: str) -> int:
    """ONNX opset of a target's graphs; llmc's default for an unknown target."""
    return (TARGETS[target].opset if target in TARGETS else None) or OPSET


def _known(wanted: int | str, sizes: Mapping[str, int | str]) -> int | str:
    return sizes.get(wanted, wanted) if isinstance(wanted, str) else wanted


@cache
def registry() -> Mapping[str, Op]:
    """Return every op by name, from `<folder>/op.py` of each folder on this package's path."""
    ops: dict[str, Op] = {}
    for path in sorted(path for root in __path__ for path in Path(root).glob("*/op.py")):
        op = importlib.import_module(f"{__name__}.{path.parent.name}.op").OP
        if op.name in ops:
            raise ValueError(f"op {op.name!r} is registered twice, the second time in {path}")
        ops[op.name] = op
    return ops
