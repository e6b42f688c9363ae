"""ONNX files: a user's export of a causal LM, opset 18 or later, without a KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_graphsurgeon as gs

from llmc.compiler.frontend.external_data import ExternalArray, embed, find_external_data
from llmc.compiler.frontend.huggingface import (
    _generation,
    _plain_config,
    find_directory,
    save_tokenizer,
)
from llmc.compiler.frontend.origin import Origin, directory_origin
from llmc.compiler.frontend.paths import refuse_pointer
from llmc.compiler.frontend.raw import Check, RawModel, unchecked
from llmc.compiler.frontend.tokenizer_config import read_chat_templates
from llmc.compiler.graph.rewrite import tidy
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError, reason_of

_MIN_OPSET = 18
_INPUTS = frozenset({"input_ids", "position_ids", "attention_mask"})
_TABLE_ELEMENTS = 256  # float vectors up to this size are tables such as inv_freq


def load_onnx(path: Path, hf_dir: Path, check: Check = unchecked) -> RawModel:
    """Read the graph, with lazy weights.

    Raises:
        LlmcError: the file is not ONNX, has an older opset, a KV cache, inputs other than
            input_ids, position_ids and attention_mask, inputs of fixed shape, or external data
            outside its folder.
    """
    directory = find_directory(hf_dir)
    check(_plain_config(directory), _generation(directory), False, "")
    refuse_pointer(path)
    read_chat_templates(directory)  # errors before the slow passes
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's errors share no base class
        raise LlmcError(f"'{path}' is not an ONNX file ({type(error).__name__}); export it again") \
            from error
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if not opset:
        raise LlmcError(f"'{path}' is not an ONNX file (it names no opset); export it again")
    if opset < _MIN_OPSET:
        raise LlmcError(f"'{path}' has opset {opset}; export it with opset {_MIN_OPSET} or later")
    _check_inputs(model, path)
    external = _external_weights(model, path)
    try:
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        graph = gs.import_onnx(_with_shapes(model))
    except Exception as error:  # onnx and graph-surgeon raise errors of many types
        raise LlmcError(f"'{path}' is not a valid ONNX model ({reason_of(error)}); check it with "
                        f"onnx.checker, and export it again") from error
    _broadcast_rotary_caches(graph)
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant):
            _make_lazy(tensor, external)
    _name_dimensions(graph)
    _drop_mask_input(graph)
    logits = _logits(graph, path)
    notes = [f"the output '{tensor.name}' is removed" for tensor in graph.outputs
             if tensor is not logits]
    graph.outputs = [logits]
    logits.name = "logits"
    tidy(graph)
    return RawModel(graph, _plain_config(directory), "onnx",
                    lambda target: save_tokenizer(directory, target), _generation(directory),
                    tuple(notes), origin=_origin(path, external, directory))


def _origin(path: Path, external: Mapping[str, ExternalArray], directory: Path) -> Origin:
    """Return the ONNX file, its external data, and the Hugging Face directory without weights."""
    data = dict.fromkeys(array.path for array in external.values())
    return Origin((path, *data, *(file for file in directory_origin(directory).paths
                                  if file.suffix not in (".safetensors", ".bin"))))


def _broadcast_rotary_caches(graph: gs.Graph) -> None:
    """Expand cos and sin of every RotaryEmbedding to the batch size.

    Given:   RotaryEmbedding(x [batch, ...], cos [1, seq, dim / 2], sin [1, seq, dim / 2])
    Result:  RotaryEmbedding(x, Expand(cos, [batch, 1, 1]), Expand(sin, [batch, 1, 1]))

    torch writes the former if positions are not an input; the ONNX operator requires the latter.
    """
    for node in [node for node in graph.nodes if node.op == "RotaryEmbedding" and not node.domain]:
        if len(node.inputs) > 3 and not node.inputs[3].is_empty():
            continue  # position_ids select rows of the caches
        name = node.outputs[0].name
        batch, ones = gs.Variable(f"{name}.batch", np.int64, (1,)), np.ones(2, np.int64)
        shape = gs.Variable(f"{name}.cache_shape", np.int64, (3,))
        nodes = [gs.Node("Shape", batch.name, {"start": 0, "end": 1}, [node.inputs[0]], [batch]),
                 gs.Node("Concat", shape.name, {"axis": 0}, [
                     batch, gs.Constant(f"{name}.ones", ones)], [shape])]
        for index in (1, 2):
            cache = node.inputs[index]
            wide = gs.Variable(f"{name}.cache_{index}", cache.dtype,
                               None if cache.shape is None else (None, *cache.shape[1:]))
            nodes.append(gs.Node("Expand", wide.name, {}, [cache, shape], [wide]))
            node.inputs[index] = wide
        at = next(index for index, other in enumerate(graph.nodes) if other is node)
        for offset, extra in enumerate(nodes):
            graph.nodes.insert(at + offset, extra)


def _logits(graph: gs.Graph, path: Path) -> gs.Tensor:
    """Return the output named logits, or else the first."""
    if not graph.outputs:
        raise LlmcError(f"'{path}' has no output, expected logits; export it with that output")
    return next((tensor for tensor in graph.outputs if tensor.name == "logits"), graph.outputs[0])


def _check_inputs(model: onnx.ModelProto, path: Path) -> None:
    initializers = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in initializers]
    cache = next((name for name in names if "past" in name or "cache" in name), None)
    if cache:
        raise LlmcError(f"'{path}' has a KV cache as input ('{cache}'), which llmc adds itself; "
                        f"export it without one (use_cache=False)")
    unknown = set(names) - _INPUTS
    if unknown or "input_ids" not in names:
        raise LlmcError(f"'{path}' has inputs {names}; export it with input_ids and, optionally, "
                        f"position_ids and attention_mask")
    for value in model.graph.input:
        _check_shape(value, path)


def _check_shape(value: onnx.ValueInfoProto, path: Path) -> None:
    """Reject an input of fixed shape: its sizes are constants throughout the graph."""
    shape = value.type.tensor_type.shape
    dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
            for dim in shape.dim]
    if value.name in _INPUTS and value.type.tensor_type.HasField("shape") and (
            len(dims) != 2 or any(isinstance(dim, int) for dim in dims)):
        raise LlmcError(f"'{path}' has {value.name} of shape {dims}, expected [batch, seq] with "
                        f"both axes dynamic; export it with dynamic_shapes={{'{value.name}': "
                        f"{{0: 'batch', 1: 'seq'}}}} and example inputs of 2 or more rows")


def _with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Infer shapes if the file has few."""
    known = {value.name for value in model.graph.value_info}
    missing = sum(name not in known for node in model.graph.node for name in node.output if name)
    if missing > len(model.graph.node) // 2:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    return model


def _may_be_weight(dtype: np.dtype, shape: Sequence[int]) -> bool:
    count = int(np.prod(shape, dtype=np.int64))
    return dtype == np.float32 and len(shape) in (1, 2) \
        and count > (_TABLE_ELEMENTS if len(shape) == 1 else 1)


def _external_weights(model: onnx.ModelProto, path: Path) -> dict[str, ExternalArray]:
    """Find external weights; read all other external data into the model."""
    initializers = list(model.graph.initializer)
    weights = {id(tensor) for tensor in initializers
               if _may_be_weight(_dtype(tensor), tensor.dims)}
    external: dict[str, ExternalArray] = {}
    for tensor, array in find_external_data(model, path):
        if id(tensor) in weights:
            external[tensor.name] = array
        else:
            embed(tensor, array)
    return external


def _dtype(tensor: onnx.TensorProto) -> np.dtype:
    try:
        return onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except KeyError:
        return np.dtype(np.void)


def _make_lazy(tensor: gs.Constant, external: Mapping[str, ExternalArray]) -> None:
    """Convert a constant that may be a weight to a lazy `Weight`."""
    values = tensor._values
    if isinstance(values, np.ndarray) or isinstance(values.dtype, int) \
            or not _may_be_weight(np.dtype(values.dtype), values.shape):
        return
    if tensor.name in external:
        tensor._values = external[tensor.name].weight(np.dtype(np.float32), tensor.name)
    else:
        tensor._values = Weight.of(onnx.numpy_helper.to_array(values.tensor), tensor.name)


def _name_dimensions(graph: gs.Graph) -> None:
    """Rename the dimensions of input_ids to batch and seq in all tensors."""
    ids = next(tensor for tensor in graph.inputs if tensor.name == "input_ids")
    names = dict(zip(ids.shape, ("batch", "seq"), strict=True)) if ids.shape else {}
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Variable) and tensor.shape is not None:
            tensor.shape = [names.get(dim, dim) if isinstance(dim, str) else dim
                            for dim in tensor.shape]


def _drop_mask_input(graph: gs.Graph) -> None:
    """Replace an attention_mask input by ones: packed tokens have no padding."""
    mask = next((tensor for tensor in graph.inputs if tensor.name == "attention_mask"), None)
    if mask is None:
        return
    ids = next(tensor for tensor in graph.inputs if tensor.name == "input_ids")
    shape = gs.Variable("attention_mask.shape", np.int64, (2,))
    dtype = np.dtype(mask.dtype or np.int64)
    graph.inputs = [tensor for tensor in graph.inputs if tensor is not mask]
    graph.nodes.insert(0, gs.Node(op="Shape", name=shape.name, inputs=[ids], outputs=[shape]))
    graph.nodes.insert(1, gs.Node(
        op="ConstantOfShape", name=mask.name, inputs=[shape], outputs=[mask],
        attrs={"value": gs.Constant("attention_mask.one", np.ones(1, dtype))}))
