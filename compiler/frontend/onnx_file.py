"""A user's own ONNX export of a causal LM, opset 18 or later, without a KV cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_graphsurgeon as gs
from onnx.external_data_helper import ExternalDataInfo

from llmc.compiler.frontend.huggingface import (
    _generation,
    _plain_config,
    copy_tokenizer,
    find_directory,
)
from llmc.compiler.frontend.raw import Check, RawModel, unchecked
from llmc.compiler.graph.rewrite import tidy
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError

_MIN_OPSET = 18
_WEIGHT_ELEMENTS = 1  # floats with more elements than this and rank 1 or 2 may be weights


def load_onnx(path: Path, hf_dir: Path, check: Check = unchecked) -> RawModel:
    """Read the graph; weights stay in the file until they are needed.

    Raises:
        LlmcError: it is not ONNX, has an older opset, a KV cache, or other inputs than token ids,
            positions and an attention mask.
    """
    directory = find_directory(hf_dir)
    check(_plain_config(directory), _generation(directory), False)
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's errors share no base class
        raise LlmcError(f"'{path}' is not an ONNX file ({type(error).__name__})") from error
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if opset < _MIN_OPSET:
        raise LlmcError(f"'{path}' has opset {opset}; export it with opset {_MIN_OPSET} or later")
    _check_inputs(model, path)
    try:
        graph = gs.import_onnx(_with_shapes(onnx.inliner.inline_local_functions(model)))
    except Exception as error:  # onnx and graph-surgeon raise many kinds
        first = str(error).strip().partition("\n")[0][:160] or type(error).__name__
        raise LlmcError(f"'{path}' is no valid ONNX model ({first})") from error
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant):
            _make_lazy(tensor, path.parent)
    _name_dimensions(graph)
    _drop_mask_input(graph)
    graph.outputs = graph.outputs[:1]
    graph.outputs[0].name = "logits"
    tidy(graph)
    return RawModel(graph, _plain_config(directory), "onnx",
                    lambda target: copy_tokenizer(directory, target), _generation(directory))


def _check_inputs(model: onnx.ModelProto, path: Path) -> None:
    initializers = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in initializers]
    cache = next((name for name in names if "past" in name or "cache" in name), None)
    if cache:
        raise LlmcError(f"'{path}' takes a KV cache ('{cache}'); export it without one "
                        f"(use_cache=False): llmc adds its own")
    unknown = set(names) - {"input_ids", "position_ids", "attention_mask"}
    if unknown or "input_ids" not in names:
        raise LlmcError(f"'{path}' takes inputs {names}; llmc knows input_ids, position_ids and "
                        f"attention_mask")


def _with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with shapes inferred where the file has none."""
    known = {value.name for value in model.graph.value_info}
    missing = sum(name not in known for node in model.graph.node for name in node.output if name)
    if missing > len(model.graph.node) // 2:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    return model


def _make_lazy(tensor: gs.Constant, directory: Path) -> None:
    """Turn float constants of rank 1 and 2 into weights that are read when needed."""
    values = tensor._values
    if isinstance(values, np.ndarray) or len(values.shape) not in (1, 2) \
            or int(np.prod(values.shape)) <= _WEIGHT_ELEMENTS \
            or np.dtype(values.dtype) != np.float32:
        return
    proto = values.tensor
    shape = tuple(values.shape)
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        info = ExternalDataInfo(proto)
        array: np.ndarray = np.memmap(directory / info.location, np.float32, "r",
                                      info.offset or 0, shape)
    elif int(np.prod(shape)) <= 256 and len(shape) == 1:
        return  # small tables such as inv_freq stay plain constants
    else:
        array = onnx.numpy_helper.to_array(proto)
    tensor._values = Weight(shape, np.float32, lambda a, b: np.asarray(array[a:b]), tensor.name)


def _name_dimensions(graph: gs.Graph) -> None:
    """Call the dimensions of input_ids batch and seq, wherever they occur."""
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
