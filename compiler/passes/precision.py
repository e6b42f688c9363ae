"""Convert a fused graph to the dtypes of its engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.dtypes import numpy_dtype
from llmc.compiler.graph.probe import ELEMENTWISE
from llmc.compiler.graph.rewrite import (
    Report,
    Settings,
    attends_causally,
    caches,
    exact_outputs,
    fields_of,
    op_of,
    producer,
    reads,
    scalar,
    state_of,
    tidy,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError


def cast(graphs: Sequence[gs.Graph], settings: Settings, report: Report) -> None:
    """Cast weights, activations and caches to the model's dtype.

    Inputs that an op requires in float32, recurrent states, and constants of ONNX ops stay float32.
    Weights shared by the graphs stay shared.
    """
    done: dict[tuple[int, str], tuple[Weight, Weight]] = {}
    for graph in graphs:
        report.count("weights", _cast_weights(graph, numpy_dtype(settings.options.dtype), done))
        exact = {id(tensor) for node in graph.nodes
                 for tensor in (*exact_outputs(node), *(state_of(node) or ()))}
        for tensor in graph.tensors().values():
            if isinstance(tensor, gs.Variable) and tensor.dtype is not None \
                    and id(tensor) not in exact and np.dtype(tensor.dtype) == np.float32:
                tensor.dtype = numpy_dtype(settings.options.dtype)
                report.count("activations")


def _cast_weights(graph: gs.Graph, dtype: np.dtype,
                  done: dict[tuple[int, str], tuple[Weight, Weight]]) -> int:
    """Cast a graph's constants and return their number.

    `done` has cast weights by identity and dtype, with the originals, so that no id is reused.
    """
    casts: dict[tuple[int, str], gs.Constant] = {}
    for node in graph.nodes:
        op = op_of(node)
        for index, tensor in enumerate(node.inputs):
            if not isinstance(tensor, gs.Constant):
                continue
            exact = op is None or op.input_names[index] in op.float32_inputs
            if op is not None and op.input_names[index] in op.packed(fields_of(node)):
                continue
            if np.issubdtype(tensor.dtype, np.integer) and (
                    op is None or op.input_names[index] in op.integer_inputs):
                continue  # bounds and indices
            target = np.dtype(np.float32) if exact else dtype
            key = (id(tensor), target.name)
            if key not in casts:
                values = values_of(tensor)
                if not values.shape:
                    values = Weight.of(np.reshape(tensor.values, 1), tensor.name)
                suffix = "" if not any(k[0] == id(tensor) for k in casts) else f".{target.name}"
                _, values = done.setdefault((id(values), target.name),
                                            (values, values.cast(target)))
                casts[key] = gs.Constant(tensor.name + suffix, values)
            node.inputs[index] = casts[key]
    return len(casts)


def cache_dtype(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Set the dtype of KV caches, if an option gives one.

    Raises:
        LlmcError: an op does not support caches of that dtype.
    """
    kv_dtype = settings.options.kv_dtype
    for node in graph.nodes if kv_dtype else ():
        pairs = caches(node)
        op = op_of(node)
        if op is not None and attends_causally(node):
            if kv_dtype not in op.choices["kv_dtype"]:
                raise LlmcError(f"kv_dtype {kv_dtype} of '{node.name}' is unsupported by "
                                f"llmc::{op.name}; leave out --kv_dtype")
            node.attrs["kv_dtype"] = kv_dtype
            report.count("caches", len(pairs))
        for tensor in (*(tensor for pair in pairs for tensor in pair), *reads(graph, node)):
            tensor.dtype = numpy_dtype(kv_dtype)


def elements(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Rewrite elementwise ops for the engine, and set their shapes and dtypes.

    Clip becomes Max and Min. exp(x) - 1 of an x of at most 0 becomes Elu, which is accurate for a
    small x in 16 bits. Exporters leave shapes and dtypes out, or have those before packing.
    """
    for node in [node for node in graph.nodes if node.op == "Clip"]:
        bounds = [(op, limit) for op, limit in zip(("Max", "Min"), node.inputs[1:], strict=False)
                  if not limit.is_empty()]
        if not bounds:
            continue
        x, output = node.inputs[0], node.outputs[0]
        node.outputs.clear()
        graph.nodes.remove(node)
        for op, limit in bounds:
            last = (op, limit) == bounds[-1]
            result = output if last else gs.Variable(f"{output.name}.{op}", x.dtype, x.shape)
            graph.nodes.append(
                gs.Node(op=op, name=result.name, inputs=[x, limit], outputs=[result]))
            x = result
        report.count("clip")
    for node in graph.nodes:
        exponential = producer(node.inputs[0]) if node.op == "Sub" else None
        if exponential is None or exponential.op != "Exp" or scalar(node.inputs[1]) != 1:
            continue
        least = producer(exponential.inputs[0])
        limits = [scalar(tensor) for tensor in least.inputs] if least and least.op == "Min" else []
        if any(limit is not None and limit <= 0 for limit in limits):
            node.op, node.inputs = "Elu", [exponential.inputs[0]]
            report.count("elu")
    tidy(graph)
    for node in graph.nodes:
        given = [tensor for tensor in node.inputs if isinstance(tensor, gs.Variable)
                 and tensor.shape]
        if node.op in ELEMENTWISE and node.outputs and given:
            result = node.outputs[0]
            result.dtype = result.dtype or (
                bool if node.op in ("Greater", "Less") else given[-1].dtype)
            result.shape = max((tensor.shape for tensor in given), key=lambda shape: shape[-1])


def narrow_indices(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Convert token ids, positions and indices to int32, as TensorRT 8 has no int64."""
    for tensor in graph.inputs:
        if np.dtype(tensor.dtype) == np.int64:
            tensor.dtype = np.int32
            report.count("inputs")
