"""The CUDA target: a schedule for llmc's own engine, and the same graph as ONNX.

`schedule.json` lists a rank's tensors, each with its place, and its ops in order. Activations lie
in one arena, where values whose lifetimes do not meet share memory; offsets are in bytes per token
(for logits, per wanted logit), so that one plan serves every limit of the engine. An encoder has a
schedule of its own, `encoder.json`: what it makes for the decoder is scattered, as soon as it is
made, to a memory that both schedules name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from llmc import plugins
from llmc.compiler.artifact import (
    WEIGHTS_NAME,
    describe_chip,
    describe_encoder,
    file_entry,
    graph_step,
    to_onnx,
    write_onnx,
    write_weights,
)
from llmc.compiler.graph.rewrite import consumers, is_llmc, replace, tidy, weight
from llmc.compiler.graph.weights import Weight
from llmc.compiler.targets import Options
from llmc.errors import LlmcError
from llmc.runtime.manifest import Chip, FileEntry, Target
from llmc.runtime.schedule import (
    ENCODER_SCHEDULE_NAME,
    SCHEDULE_NAME,
    Schedule,
    ScheduledNode,
    ScheduledTensor,
)

KIND = "cuda"
DTYPES = ("float32", "float16", "bfloat16")
KV_DTYPES = ("float8_e4m3fn",)
# What the engine reads and what ONNX Runtime does; of a model, and of an encoder.
_FILES = ((SCHEDULE_NAME, "graph.onnx"), (ENCODER_SCHEDULE_NAME, "encoder.onnx"))
_ALIGNMENT = 16
_MEMORY_ROWS = ScheduledTensor(name="memory_rows", kind="input", dtype="int64",
                               shape=("num_tokens",))
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Min", "Max", "Tanh", "Exp", "Sigmoid", "Neg"}


def describe(options: Options) -> Target:
    return Target(kind="cuda", compute_capability=options.compute_capability)


def emit(graph: gs.Graph, rank: int, case_dir: Path, options: Options,
         encoder: gs.Graph | None = None) -> tuple[Chip, list[FileEntry]]:
    """Write `chip<rank>/` and describe it.

    Raises:
        LlmcError: the graph has an op that the engine has not.
    """
    name, dtype = f"chip{rank}", options.dtype
    directory = case_dir / name
    directory.mkdir()
    graphs = [graph] if encoder is None else [graph, encoder]
    prepare(graphs, dtype, options.kv_dtype)
    places, weights = write_weights(graphs, directory / WEIGHTS_NAME)
    files, steps = [weights], []
    for program, (path, onnx_path) in zip(graphs, _FILES, strict=False):
        text = schedule(program, dtype).model_dump_json(indent=1, exclude_defaults=True) + "\n"
        (directory / path).write_text(text, encoding="utf-8")
        files.append(file_entry(directory / path))
        if dtype != "float32":
            widen_elementwise(program)
        files.append(write_onnx(to_onnx(program, places, KIND, dtype), directory / onnx_path))
        steps.append(graph_step(f"{name}/{path}", program))
    weight_bytes = sum(place.length for place in places.values())
    chip = describe_chip(graph, rank, tuple(steps[:1]), weight_bytes,
                         None if encoder is None else describe_encoder(encoder, tuple(steps[1:])))
    return chip, files


def prepare(graphs: Sequence[gs.Graph], dtype: str, kv_dtype: str = "") -> None:
    """Make of the fused graphs of one rank, the encoder's last, what is scheduled. The KV caches
    are of `kv_dtype`, or of `dtype` where that is empty.
    """
    cast: dict[tuple[int, str], tuple[Weight, Weight]] = {}
    for graph in graphs:
        _fuse_norms(graph, _numpy(dtype))
        _cast(graph, dtype, cast)
        for node in graph.nodes if kv_dtype else ():
            if is_llmc(node, "CausalAttention"):
                node.attrs["kv_dtype"] = kv_dtype
                for cache in (*node.inputs[1:3], *node.outputs[1:3]):
                    cache.dtype = _numpy(kv_dtype)
    names: dict[str, Weight] = {}
    for graph in graphs:
        for tensor in [t for node in graph.nodes for t in node.inputs]:
            if isinstance(tensor, gs.Constant):
                values = weight(tensor)
                if names.setdefault(tensor.name, values) is not values:
                    tensor.name = f"encoder.{tensor.name}"
                    names[tensor.name] = values


def _fuse_norms(graph: gs.Graph, numpy_dtype: np.dtype) -> None:
    """Let a GEMM that alone reads a norm's result do the norm itself.

    Given:   GemmBiasAct(RMSNorm(x, g), w, b), or with LayerNorm, GatedMLP
    Result:  NormGemm(x, w · g, b, row sums of w · g), with the norm's bias in b
    """
    for node in list(graph.nodes):
        if not is_llmc(node, "RMSNorm", "LayerNorm"):
            continue
        users = consumers(graph, node.outputs[0])
        user = users[0] if len(users) == 1 else None
        if user is None or not is_llmc(user, "GemmBiasAct", "GatedMLP") \
                or user.inputs[0] is not node.outputs[0] \
                or len(user.inputs[1].outputs) > 1:  # a table that is the LM head too stays whole
            continue
        fields = plugins.registry()[user.op].complete(user.attrs)
        centred = node.op == "LayerNorm"
        gain = weight(node.inputs[1]).load().astype(np.float32)
        shift = weight(node.inputs[2]).load().astype(np.float32) if len(node.inputs) > 2 else None
        matrix, name = weight(user.inputs[1]), user.inputs[1].name
        folded = gs.Constant(f"{name}.normed", matrix.scale_columns(gain).cast(numpy_dtype))
        bias = user.inputs[2] if len(user.inputs) > 2 else None
        if shift is not None:
            known = weight(bias).load() if bias is not None else 0.0
            bias = gs.Constant(f"{name}.bias", Weight.of(
                (matrix.dot(shift) + known).astype(np.float32), f"{name}.bias"))
        sums = gs.Constant(f"{name}.row_sums", Weight.of(
            folded._values.dot(np.ones(len(gain), np.float32)))) if centred else None
        replace(graph, "NormGemm", [node.inputs[0], folded, bias, sums], list(user.outputs), {
            "centred": int(centred), "gated": int(user.op == "GatedMLP"),
            "epsilon": plugins.registry()[node.op].complete(node.attrs)["epsilon"],
            "activation": fields["activation"]})
    tidy(graph)


def _cast(graph: gs.Graph, dtype: str, cast: dict[tuple[int, str], tuple[Weight, Weight]]) -> None:
    """Give weights, activations and caches the model's dtype. `cast` is what weights became, by
    identity and dtype, so that graphs that share one go on to.
    """
    made: dict[tuple[int, str], gs.Constant] = {}
    numpy_dtype = _numpy(dtype)
    for node in graph.nodes:
        op = plugins.registry().get(node.op) if is_llmc(node) else None
        for index, tensor in enumerate(node.inputs):
            if not isinstance(tensor, gs.Constant):
                continue
            exact = op is None or op.input_names[index] in op.float32_inputs
            wanted = np.dtype(np.float32) if exact else numpy_dtype
            key = (id(tensor), wanted.name)
            if key not in made:
                values = weight(tensor)
                if not values.shape:
                    values = Weight.of(np.reshape(tensor.values, 1), tensor.name)
                suffix = "" if not any(k[0] == id(tensor) for k in made) else f".{wanted.name}"
                _, values = cast.setdefault((id(values), wanted.name),
                                            (values, values.cast(wanted)))
                made[key] = gs.Constant(tensor.name + suffix, values)
            node.inputs[index] = made[key]
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Variable) and tensor.dtype is not None \
                and np.dtype(tensor.dtype) == np.float32:
            tensor.dtype = numpy_dtype


def widen_elementwise(graph: gs.Graph) -> None:
    """Let ONNX ops on elements compute in float32, as the engine does with its float32 numbers.

    Given:   Mul(x, 2.0) in 16 bits, of which 2.0 is float32
    Result:  Cast(Mul(Cast(x), 2.0))
    """
    nodes: list[gs.Node] = []
    for node in list(graph.nodes):
        if node.op not in _ELEMENTWISE:
            nodes.append(node)
            continue
        for index, tensor in enumerate(node.inputs):
            if isinstance(tensor, gs.Variable):
                wide = gs.Variable(f"{node.outputs[0].name}.input_{index}", np.float32,
                                   tensor.shape)
                nodes.append(_float_cast(tensor, wide))
                node.inputs[index] = wide
        narrow = node.outputs[0]
        node.outputs = [gs.Variable(f"{narrow.name}.float32", np.float32, narrow.shape)]
        nodes += (node, _float_cast(node.outputs[0], narrow))
    graph.nodes.clear()
    graph.nodes.extend(nodes)


def _float_cast(source: gs.Variable, target: gs.Variable) -> gs.Node:
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(target.dtype))
    return gs.Node("Cast", target.name, {"to": int(kind)}, [source], [target])


def _numpy(dtype: str) -> np.dtype:
    import ml_dtypes
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def schedule(graph: gs.Graph, dtype: str) -> Schedule:
    """The graph as tensors with places and ops in order.

    Raises:
        LlmcError: see `emit`.
    """
    caches = {id(tensor) for node in graph.nodes if is_llmc(node, "CausalAttention")
              for tensor in (*node.inputs[1:3], *node.outputs[1:3])}
    outputs = [tensor for tensor in graph.outputs if id(tensor) not in caches]
    memory = outputs if all(t.name != "logits" for t in outputs) else []  # an encoder's
    numbers: dict[int, int] = {}
    tensors: list[ScheduledTensor] = []
    offsets, sizes = _plan(graph, caches, memory, dtype)

    def number(tensor: gs.Tensor) -> int:
        if tensor.is_empty() or (id(tensor) in caches and tensor.inputs):
            return -1
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(tensors)
            tensors.append(_describe(tensor, id(tensor) in caches, offsets, dtype,
                                     any(tensor is t for t in graph.inputs)))
        return numbers[id(tensor)]

    def add(tensor: ScheduledTensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    rows = add(_MEMORY_ROWS) if memory else -1
    nodes = []
    for node in graph.nodes:
        nodes.append(ScheduledNode(op=node.op, fields=_fields(node),
                                   inputs=tuple(number(t) for t in node.inputs),
                                   outputs=tuple(number(t) for t in node.outputs)))
        for made in (t for t in node.outputs if any(t is other for other in memory)):
            target = add(_describe_memory(made, dtype))
            nodes.append(ScheduledNode(op="Scatter", fields={},
                                       inputs=(number(made), rows, target), outputs=()))
    logits = next((number(t) for t in outputs if t.name == "logits"), -1)
    return Schedule(tensors=tuple(tensors), nodes=tuple(nodes), token_bytes=sizes[False],
                    logit_bytes=sizes[True], logits=logits)


def _describe_memory(tensor: gs.Tensor, dtype: str) -> ScheduledTensor:
    return ScheduledTensor(name=tensor.name, kind="memory", dtype=dtype,
                           shape=("num_memory_tokens", int(tensor.shape[-1])))


def _fields(node: gs.Node) -> dict[str, int | float | str]:
    if is_llmc(node):
        return plugins.registry()[node.op].complete(node.attrs)
    constants = [t for t in node.inputs if isinstance(t, gs.Constant)]
    if node.op == "Gather" and node.attrs.get("axis", 0) == 0 and not constants:
        return {}
    if node.op in _ELEMENTWISE and all(t.values.size == 1 for t in constants):
        return {}
    raise LlmcError(f"{node.op} '{node.name}': the cuda target has no kernel for it; compile for "
                    f"--target cpu")


def _describe(tensor: gs.Tensor, is_cache: bool, offsets: dict[int, int], dtype: str,
              is_input: bool) -> ScheduledTensor:
    if isinstance(tensor, gs.Constant):
        values = weight(tensor)
        return ScheduledTensor(name=tensor.name, kind="weight", dtype=_name(values.dtype),
                               shape=values.shape)
    shape = tuple(dim if isinstance(dim, str) else int(dim) for dim in tensor.shape)
    if is_cache:
        return ScheduledTensor(name=tensor.name, kind="cache", dtype=_name(tensor.dtype),
                               shape=shape)
    if is_input and shape[0] == "num_memory_tokens":
        return _describe_memory(tensor, dtype)
    if is_input:
        return ScheduledTensor(name=tensor.name, kind="input", dtype=_name(tensor.dtype),
                               shape=shape)
    return ScheduledTensor(name=tensor.name, kind="value", dtype=dtype, shape=shape,
                           offset=offsets[id(tensor)], per_logit=shape[0] == "num_logits")


def _name(dtype) -> str:
    return np.dtype(dtype).name


def _plan(graph: gs.Graph, caches: set[int], memory: Sequence[gs.Tensor], dtype: str) -> \
        tuple[dict[int, int], dict[bool, int]]:
    """Place each value where no value that lives at the same time is, the largest first. What goes
    to the memory lives until then.

    Returns offsets by tensor, and the arena's size for tokens' values (False) and logits' (True).
    """
    last_use: dict[int, int] = {}
    for step, node in enumerate(graph.nodes):
        for tensor in (*node.inputs, *node.outputs):
            last_use[id(tensor)] = step
    for tensor in () if memory else graph.outputs:
        last_use[id(tensor)] = len(graph.nodes)
    values = [(step, tensor) for step, node in enumerate(graph.nodes) for tensor in node.outputs
              if id(tensor) not in caches and not tensor.is_empty()]

    def size(tensor: gs.Tensor) -> int:
        width = int(tensor.shape[-1]) * _numpy(dtype).itemsize
        return -(-width // _ALIGNMENT) * _ALIGNMENT

    offsets: dict[int, int] = {}
    totals = {False: 0, True: 0}
    placed: list[tuple[bool, int, int, int, int]] = []  # logits?, first step, last step, start, end
    for step, tensor in sorted(values, key=lambda value: -size(value[1])):
        is_logit = tensor.shape[0] == "num_logits"
        end_step = last_use[id(tensor)]
        busy = sorted((start, end) for kind, first, last, start, end in placed
                      if kind == is_logit and first <= end_step and last >= step)
        at = 0
        for start, end in busy:
            if at + size(tensor) <= start:
                break
            at = max(at, end)
        offsets[id(tensor)] = at
        placed.append((is_logit, step, end_step, at, at + size(tensor)))
        totals[is_logit] = max(totals[is_logit], at + size(tensor))
    return offsets, totals
