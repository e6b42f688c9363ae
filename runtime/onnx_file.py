"""What an ONNX file of a case directory may hold, checked before ONNX Runtime reads it.

A graph has standard ops that compute tensors, a few contrib ops, and llmc's ops, whose bodies are
functions in the file. Control flow is for these bodies alone, and a `Loop` runs once for each
distinct element of a tensor. So every graph ends. Tensors outside the file are in the weight file.

The runtime does without the onnx package. This reads protobuf's wire format, by the field numbers
of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llmc import plugins
from llmc.errors import LlmcError
from llmc.runtime.weights import WEIGHTS_NAME

_MAX_BYTES = 2**31  # of protobuf
# The default domain of ONNX 1.23 without control flow, sequences, optionals, strings, images,
# random values and training. ONNX Runtime has SimplifiedLayerNormalization there, too.
_STANDARD = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool
BatchNormalization BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike
Ceil Celu Clip Compress Concat Constant ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh
CumProd CumSum DepthToSpace DequantizeLinear Det Div Dropout DynamicQuantizeLinear Einsum Elu
Equal Erf Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu Gemm
GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GroupNormalization HardSigmoid HardSwish
Hardmax Identity InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu Less LessOrEqual
LinearAttention Log LogSoftmax LpNormalization MatMul MatMulInteger Max MaxPool Mean Min Mish
Mod Mul Neg NonZero Not OneHot Or PRelu Pad Pow QLinearMatMul QuantizeLinear RMSNormalization
Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
ReduceProd ReduceSum ReduceSumSquare Relu Reshape ReverseSequence RotaryEmbedding Round
ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign SimplifiedLayerNormalization Sin Sinh
Size Slice Softmax Softplus Softsign Split Sqrt Squeeze Sub Sum SwiGLU Swish Tan Tanh
TensorScatter ThresholdedRelu Tile TopK Transpose Trilu Unique Unsqueeze Where Xor
"""
_CONTRIB = """
FusedMatMul GroupQueryAttention LinearAttention MatMulNBits MoE QMoE
SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization
"""
_OPS = {"": frozenset(_STANDARD.split()), "com.microsoft": frozenset(_CONTRIB.split())}
_CONTROL_FLOW = ("If", "Loop", "Scan")
_Message = dict[int, list[bytes]]


def check_graph(path: Path) -> None:
    """Refuse an ONNX file that may not end, or that reads other files.

    Raises:
        LlmcError: naming what it has and should not have; or it is no ONNX file.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ValueError(f"it has {size} bytes, at most {_MAX_BYTES} are ONNX")
        weights = path.with_name(WEIGHTS_NAME)
        _Checker(weights.stat().st_size if weights.is_file() else 0).check(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LlmcError(f"'{path}' is not a graph that llmc writes ({error}); compile the model "
                        f"again") from error


class _Checker:
    def __init__(self, weight_bytes: int) -> None:
        self._weight_bytes = weight_bytes
        self._functions: set[str] = set()

    def check(self, model: bytes) -> None:
        message = _fields(model)
        functions = [_fields(own) for own in message.get(25, ())]
        for function in functions:
            name, domain = _text(function, 1), _text(function, 10)
            if domain != "llmc" or name not in plugins.registry():
                raise ValueError(f"it has a function {domain}.{name}, which is no op of llmc")
            self._functions.add(name)
        for function in functions:
            self._check_nodes([_fields(own) for own in function.get(7, ())], in_function=True)
        for graph in message.get(7, ()):
            self._check_graph(_fields(graph), in_function=False)

    def _check_graph(self, graph: _Message, *, in_function: bool, nested: bool = False) -> None:
        for tensor in graph.get(5, ()):
            self._check_tensor(_fields(tensor))
        if 15 in graph:
            raise ValueError("it has sparse weights")
        self._check_nodes([_fields(own) for own in graph.get(1, ())], in_function=in_function,
                          nested=nested)

    def _check_nodes(self, nodes: list[_Message], *, in_function: bool, nested: bool = False) -> \
            None:
        makers = {output.decode(): node for node in nodes for output in node.get(2, ())}
        for node in nodes:
            name, domain = _text(node, 4), _text(node, 7)
            flow = domain == "" and name in _CONTROL_FLOW
            if flow and (not in_function or nested):
                raise ValueError(f"it has the op {name} outside a function of llmc, or in another "
                                 f"such op")
            if name == "Loop" and flow and not _counts_elements(node, makers):
                raise ValueError("it has a Loop that does not count a tensor's elements")
            if not flow and not self._is_known(domain, name, in_function=in_function):
                raise ValueError(f"it has the op {f'{domain}.' if domain else ''}{name}, which "
                                 f"llmc does not write")
            for attribute in map(_fields, node.get(5, ())):
                for tensor in (*attribute.get(5, ()), *attribute.get(10, ())):
                    self._check_tensor(_fields(tensor))
                for graph in (*attribute.get(6, ()), *attribute.get(11, ())):
                    if not flow:
                        raise ValueError(f"the op {name} has a graph")
                    self._check_graph(_fields(graph), in_function=in_function, nested=True)

    def _is_known(self, domain: str, name: str, *, in_function: bool) -> bool:
        if domain == "llmc":  # a function that calls functions might call itself
            return not in_function and name in self._functions
        return name in _OPS.get(domain, ())

    def _check_tensor(self, tensor: _Message) -> None:
        """Hold a tensor's place outside the file against the weight file."""
        entries = [_fields(own) for own in tensor.get(13, ())]
        if not entries:
            return
        place = {_text(own, 1): _text(own, 2) for own in entries}
        start, length = int(place.get("offset", "0")), int(place.get("length", "-1"))
        if place.get("location") != WEIGHTS_NAME:
            raise ValueError(f"it reads {place.get('location')!r}, which is not {WEIGHTS_NAME}")
        if start < 0 or length < 0 or start + length > self._weight_bytes:
            raise ValueError(f"it reads bytes {start} to {start + length} of {WEIGHTS_NAME}, which "
                             f"has {self._weight_bytes}")


def _counts_elements(loop: _Message, makers: dict[str, _Message]) -> bool:
    """Whether a Loop's trip count is `Size(Unique(…))`, which is at most a tensor's size."""
    count = makers.get(_text(loop, 1))
    if count is None or _text(count, 4) != "Size":
        return False
    distinct = makers.get(_text(count, 1))
    return distinct is not None and _text(distinct, 4) == "Unique"


def _text(message: _Message, number: int) -> str:
    """The first string of a field; empty where there is none."""
    return message.get(number, [b""])[0].decode("utf-8")


def _fields(data: bytes) -> _Message:
    """The fields of a protobuf message that hold bytes, by number. Others are skipped.

    Raises:
        ValueError: it is none.
    """
    found: _Message = {}
    for number, value in _walk(data):
        found.setdefault(number, []).append(value)
    return found


def _walk(data: bytes) -> Iterator[tuple[int, bytes]]:
    place, end = 0, len(data)
    while place < end:
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 2:
            size, place = _varint(data, place)
            if place + size > end:
                raise ValueError("it is cut off")
            yield key >> 3, data[place:place + size]
            place += size
        elif kind == 0:
            _, place = _varint(data, place)
        elif kind in (1, 5):
            place += 8 if kind == 1 else 4
        else:
            raise ValueError("it is no protobuf message")


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while shift < 70:
        if place >= len(data):
            raise ValueError("it is cut off")
        byte = data[place]
        value, place = value | (byte & 127) << shift, place + 1
        if byte < 128:
            return value, place
        shift += 7
    raise ValueError("it is no protobuf message")
