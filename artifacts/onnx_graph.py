"""Validate an ONNX file before ONNX Runtime reads it, without the onnx package.

ONNX Runtime runs any operator of an ONNX file and reads the files that it refers to. A case
directory is untrusted, so only what `llmc compile` writes is accepted: the operators below, loops
that terminate, tensors as large as their data, and external data in the chip's weight file.

This module parses the protobuf wire format by the field numbers of onnx.proto. It rejects fields
that llmc does not write instead of skipping them, so ONNX Runtime reads nothing unchecked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.case_files import read_bounded
from llmc.artifacts.weight_file import WEIGHTS_NAME
from llmc.errors import LlmcError

_MAX_BYTES = 256 << 20  # weights are in another file
_MAX_FIELDS = 2_000_000  # take 2 s to parse; 32 layers have 20,000
_MAX_NODES = 1_000_000  # with functions inlined
_LLMC = "llmc"
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})

# Operators by domain: those in function bodies of llmc's ops, and those of exporters.
OPERATORS: Mapping[str, frozenset[str]] = {
    "": _CONTROL_FLOW | {
        "Abs", "Add", "And", "Attention", "AveragePool", "BitShift", "BitwiseAnd", "Cast", "Ceil",
        "Clip", "Compress", "Concat", "Constant", "ConstantOfShape", "Conv", "Cos", "CumSum",
        "DequantizeLinear", "Div", "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "Flatten",
        "Floor", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "Greater",
        "GreaterOrEqual", "GridSample", "HardSigmoid", "HardSwish", "Identity", "IsNaN",
        "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "MatMul",
        "Max", "Min", "Mish", "Mod", "Mul", "Neg", "NonZero", "Not", "Or", "Pad", "Pow",
        "QuantizeLinear", "RMSNormalization", "Range", "Reciprocal", "ReduceMax", "ReduceMean",
        "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape",
        "RotaryEmbedding", "Round", "ScatterElements", "ScatterND", "Selu", "Shape", "Sigmoid",
        "Sign", "SimplifiedLayerNormalization", "Sin", "Size", "Slice", "Softmax", "Softplus",
        "Split", "Sqrt", "Squeeze", "Sub", "Swish", "Tanh", "Tile", "TopK", "Transpose", "Trilu",
        "Unique", "Unsqueeze", "Where",
    },
    "com.microsoft": frozenset({
        "FusedMatMul", "GroupQueryAttention", "LinearAttention", "MatMulIntegerToFloat",
        "MatMulNBits", "MoE", "MultiHeadAttention", "QMoE", "QuickGelu", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    }),
}


class _Layout(NamedTuple):
    """Fields of a protobuf message that llmc writes, by number."""

    message: str
    single: Mapping[int, str]
    repeated: Mapping[int, str]


_MODEL = _Layout("model", {1: "ir_version", 2: "producer_name", 3: "producer_version",
                           4: "domain", 5: "model_version", 6: "doc_string", 7: "graph"},
                 {8: "opset_import", 14: "metadata_props", 25: "functions"})
_GRAPH = _Layout("graph", {2: "name", 10: "doc_string"},
                 {1: "node", 5: "initializer", 11: "input", 12: "output", 13: "value_info"})
_FUNCTION = _Layout("function", {1: "name", 8: "doc_string", 10: "domain", 13: "overload"},
                    {4: "input", 5: "output", 7: "node", 9: "opset_import", 12: "value_info"})
_NODE = _Layout("node", {3: "name", 4: "op_type", 6: "doc_string", 7: "domain", 8: "overload"},
                {1: "input", 2: "output", 5: "attribute"})
_ATTRIBUTE = _Layout("attribute", {1: "name", 2: "f", 3: "i", 4: "s", 5: "t", 6: "g",
                                   13: "doc_string", 20: "type"},
                     {7: "floats", 8: "ints", 9: "strings"})
_TENSOR = _Layout("tensor", {2: "data_type", 8: "name", 9: "raw_data", 12: "doc_string",
                             14: "data_location"},
                  {1: "dims", 4: "float_data", 5: "int32_data", 7: "int64_data",
                   10: "double_data", 11: "uint64_data", 13: "external_data"})
_ENTRY = _Layout("external_data entry", {1: "key", 2: "value"}, {})
_DATA = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")
_EXTERNAL = 1  # value of data_location

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_Fields = dict[str, list[int | memoryview]]


def check_graph(path: Path) -> None:
    """Validate an ONNX file of a case directory.

    Raises:
        LlmcError: the file cannot be read, or has content that `llmc compile` does not write.
    """
    again = "; compile the model again"
    try:
        data = read_bounded(path, _MAX_BYTES)
        weights = path.with_name(WEIGHTS_NAME)
        check_model(data, weights.stat().st_size)
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be read ({error}){again}") from error
    except ValueError as error:
        raise LlmcError(f"'{path}' is not an ONNX graph of llmc: {error}{again}") \
            from error


def check_model(data: bytes, weight_bytes: int) -> None:
    """Validate a serialized ModelProto.

    Args:
        data: the serialized model.
        weight_bytes: size of its weight file.

    Raises:
        ValueError: it has content that `llmc compile` does not write.
    """
    _Check(weight_bytes).model(memoryview(data))


@dataclass
class _Check:
    """Validator of one model, with the remaining limits."""

    weight_bytes: int
    fields_left: int = _MAX_FIELDS
    nodes_left: int = _MAX_NODES

    def model(self, data: memoryview) -> None:
        model = self.parse(data, _MODEL)
        sizes: dict[tuple[str, str], int] = {}
        for data in _messages(model, "functions"):
            function = self.parse(data, _FUNCTION)
            name, domain = _text(function, "name"), _text(function, "domain")
            key = name, _text(function, "overload")
            if domain != _LLMC or key in sizes:
                raise ValueError(f"function {_cut(name)} of domain {_cut(domain)} is "
                                 f"{'defined twice' if key in sizes else 'not of domain llmc'}")
            left = self.nodes_left
            self.nodes(function, sizes={}, function=name)
            sizes[key] = left - self.nodes_left
        graphs = _messages(model, "graph")
        for graph in graphs:
            self.graph(graph, sizes)
        if not graphs:
            raise ValueError("the model has no graph")

    def graph(self, data: memoryview, sizes: Mapping[tuple[str, str], int], function: str = "",
              external: bool = True) -> None:
        graph = self.parse(data, _GRAPH)
        for tensor in _messages(graph, "initializer"):
            self.tensor(tensor, external)
        self.nodes(graph, sizes, function, nested=not external)

    def nodes(self, scope: _Fields, sizes: Mapping[tuple[str, str], int], function: str = "",
              nested: bool = False) -> None:
        """Validate the nodes of a graph, of a function, or of a subgraph in a function.

        Args:
            sizes: number of nodes of each callable function, by name and overload.
            function: name of the function; "" for the graph.
            nested: whether this is the subgraph of a control flow operator.
        """
        counts: set[str] = set()  # tensors whose value is a number of elements
        for data in _messages(scope, "node"):
            node = self.parse(data, _NODE)
            op, domain = _text(node, "op_type"), _text(node, "domain")
            inputs = [bytes(name).decode() for name in _messages(node, "input")]
            key = op, _text(node, "overload")
            if domain == _LLMC and key in sizes:
                self.nodes_left -= sizes[key]
            elif op not in OPERATORS.get(domain, ()):
                where = f" in the function {_cut(function)}" if function else ""
                raise ValueError(f"unsupported operator "
                                 f"{_cut(f'{domain}.{op}' if domain else op)}{where}")
            self.nodes_left -= 1
            if self.nodes_left < 0:
                raise ValueError(f"the model has more than {_MAX_NODES} nodes, functions inlined")
            flow = not domain and op in _CONTROL_FLOW
            if flow and (nested or not function):
                raise ValueError(f"{op} outside a function, or inside another control flow "
                                 f"operator")
            if op == "Loop" and (not inputs or inputs[0] not in counts):
                raise ValueError(f"the trip count of a Loop in the function {_cut(function)} is "
                                 f"not the Size of a tensor")
            if op == "Size":
                counts.update(bytes(name).decode() for name in _messages(node, "output"))
            for data in _messages(node, "attribute"):
                self.attribute(data, function if flow else "")

    def attribute(self, data: memoryview, function: str) -> None:
        """Validate an attribute; `function` is that of a control flow operator, else ""."""
        attribute = self.parse(data, _ATTRIBUTE)
        for tensor in _messages(attribute, "t"):
            self.tensor(tensor, external=False)
        for graph in _messages(attribute, "g"):
            if not function:
                raise ValueError(f"attribute {_cut(_text(attribute, 'name'))} has a graph")
            self.graph(graph, {}, function, external=False)

    def tensor(self, data: memoryview, external: bool) -> None:
        """Validate the size and the location of a tensor's data."""
        tensor = self.parse(data, _TENSOR)
        name, dims = _text(tensor, "name"), list(_numbers(tensor, "dims"))
        stored = sum(8 if isinstance(part, int) else len(part)
                     for field in _DATA for part in tensor.get(field, ()))
        entries = _messages(tensor, "external_data")
        if entries or _EXTERNAL in tensor.get("data_location", ()):
            if not external or stored:
                raise ValueError(f"tensor {_cut(name)} has external data")
            stored = self.external(name, [self.parse(entry, _ENTRY) for entry in entries])
        if math.prod(dims) > 2 * stored or max(dims, default=0) > max(2 * stored, 1):
            raise ValueError(f"tensor {_cut(name)} of shape {_cut(dims)} has {stored} bytes of "
                             f"data")

    def external(self, name: str, entries: list[_Fields]) -> int:
        """Validate external data and return its number of bytes."""
        found = {_text(entry, "key"): _text(entry, "value") for entry in entries}
        if found.get("location") != WEIGHTS_NAME:
            raise ValueError(f"tensor {_cut(name)} is in the file "
                             f"{_cut(found.get('location', ''))}, expected '{WEIGHTS_NAME}'")
        if len(entries) != 3 or not all(
                text.isascii() and text.isdigit() and len(text) < 20
                for text in (found.get("offset", ""), found.get("length", ""))):
            raise ValueError(f"tensor {_cut(name)} has external data {_cut(found)}, expected "
                             f"location, offset and length")
        offset, length = int(found["offset"]), int(found["length"])
        if offset + length > self.weight_bytes:
            raise ValueError(f"tensor {_cut(name)} takes bytes {offset} to {offset + length} of "
                             f"'{WEIGHTS_NAME}', which has {self.weight_bytes} bytes")
        return length

    def parse(self, data: memoryview, layout: _Layout) -> _Fields:
        """Parse the fields of a message by name: integers, or bytes of strings and messages."""
        found: _Fields = {}
        at = 0
        while at < len(data):
            self.fields_left -= 1
            if self.fields_left < 0:
                raise ValueError(f"the model has more than {_MAX_FIELDS} fields")
            tag, at = _varint(data, at)
            number, wire = tag >> 3, tag & 7
            value, at = _value(data, at, wire)
            name = layout.single.get(number) or layout.repeated.get(number)
            if name is None:
                raise ValueError(f"{layout.message} has the unknown field {number}")
            if number in layout.single and name in found:
                raise ValueError(f"{layout.message} has {name} twice")
            found.setdefault(name, []).append(value)
        return found


def _value(data: memoryview, at: int, wire: int) -> tuple[int | memoryview, int]:
    """Parse a field's value; return it and the offset of its end."""
    if wire == _VARINT:
        return _varint(data, at)
    if wire == _BYTES:
        length, at = _varint(data, at)
    elif wire in (_FIXED_32, _FIXED_64):
        length = 4 if wire == _FIXED_32 else 8
    else:
        raise ValueError(f"unknown wire type {wire}")
    if at + length > len(data):
        raise ValueError("the data ends inside a field")
    return data[at:at + length], at + length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Parse a varint, 7 bits per byte; return it and the offset of its end."""
    value = 0
    for place, byte in enumerate(data[at:at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("the data ends inside a varint")


def _messages(fields: _Fields, name: str) -> list[memoryview]:
    """Return the values of a field of strings or messages."""
    found = []
    for value in fields.get(name, ()):
        if isinstance(value, int):
            raise ValueError(f"field {name} is an integer, expected bytes")
        found.append(value)
    return found


def _text(fields: _Fields, name: str) -> str:
    """Return a string field; "" if it is absent."""
    return next((bytes(value).decode() for value in _messages(fields, name)), "")


def _cut(value: object) -> str:
    """Format a name or a shape for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _numbers(fields: _Fields, name: str) -> Iterator[int]:
    """Yield integers, packed or not; negative ones appear as values above 2^63."""
    for value in fields.get(name, ()):
        if isinstance(value, int):
            yield value
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            yield number
