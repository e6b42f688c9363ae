"""Write a rank's graph and weights.

The graph is an ONNX file. Its external data is a valid safetensors file. Output is deterministic.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from llmc import __version__, plugins
from llmc.artifacts.manifest import (
    FACTS,
    AudioEncoderProgram,
    Bidirectional,
    Chip,
    CollectiveStep,
    DraftProgram,
    EncoderProgram,
    FileEntry,
    GraphStep,
    ImageEncoderProgram,
    LayerCache,
    PositionGrid,
    StateCache,
    TensorInfo,
    WeightForm,
    hash_file,
)
from llmc.artifacts.vision_input import VisionInput
from llmc.artifacts.weight_file import WEIGHTS_NAME as WEIGHTS_NAME
from llmc.compiler.graph.probe import reshaped_outputs
from llmc.compiler.graph.rewrite import caches, fields_of, is_llmc, op_of, operands, state_of
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.lora import describe_lora, lora_scales

_ALIGNMENT = 4096
_SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
                       "int32": "I32", "uint8": "U8"}


@dataclass(frozen=True)
class Placed:
    """The position of a weight in the weight file, in bytes."""

    offset: int
    length: int


def write_weights(graphs: Sequence[gs.Graph], path: Path, others: Mapping[str, Weight] = {}) -> \
        tuple[dict[str, Placed], FileEntry]:
    """Stream the weights of a chip's graphs into a safetensors file, by blocks of rows.

    The scales of layers that take adapters follow (`LoraLayer.scales`).

    Args:
        graphs: the graphs.
        path: the file.
        others: further weights by name.

    Returns:
        Each weight's position by name, and the file's size and hash under the name `path.name`.
    """
    weights: dict[str, Weight] = {}
    for node in (node for graph in graphs for node in graph.nodes):
        for tensor in node.inputs:
            if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight):
                present = weights.setdefault(tensor.name, tensor._values)
                assert present is tensor._values, f"two weights are named '{tensor.name}'"
    for graph in graphs:
        weights |= lora_scales(graph)
    weights |= others
    header: dict[str, dict[str, object]] = {}
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    for name, weight in weights.items():
        spans[name] = end, end + weight.nbytes
        header[name] = {"dtype": _SAFETENSORS_DTYPES[weight.dtype.name],
                        "shape": list(weight.shape), "data_offsets": list(spans[name])}
        end += weight.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)  # page-aligned data
    start = 8 + len(text)
    digest = hashlib.sha256()
    with open(path, "wb") as file, ThreadPoolExecutor(1) as other:
        for block in _blocks(len(text).to_bytes(8, "little") + text, weights.values()):
            hashed = other.submit(digest.update, block)
            file.write(block)
            hashed.result()
    places = {name: Placed(start + low, high - low) for name, (low, high) in spans.items()}
    return places, FileEntry(path=path.name, size=start + end, sha256=digest.hexdigest())


def _blocks(header: bytes, weights: Iterable[Weight]) -> Iterator[bytes | memoryview]:
    yield header
    for weight in weights:
        for block in weight.blocks():
            yield block.tobytes() if block.nbytes < _ALIGNMENT \
                else block.reshape(-1).view(np.uint8).data


def to_onnx(graph: gs.Graph, places: dict[str, Placed], target: str,
            dtype: str = "float32") -> onnx.ModelProto:
    """Export the graph as ONNX, with external weights and llmc ops as model-local functions.

    Args:
        graph: the graph of a rank.
        places: positions in the weight file, by weight.
        target: the target whose function bodies are used.
        dtype: dtype of activations.
    """
    proto: onnx.ModelProto = gs.export_onnx(graph, do_type_check=False)
    del proto.graph.value_info[:]
    functions: dict[str, onnx.FunctionProto] = {}
    for node, exported in zip(graph.nodes, proto.graph.node, strict=True):
        if is_llmc(node):
            op = op_of(node)
            function = op.function(node.attrs, exported.input, target, dtype) if op else None
            if function is not None:
                exported.overload = function.overload
                functions[f"{function.name}.{function.overload}"] = function
            if function is None or any(inner.domain for inner in function.node):
                proto.graph.value_info.extend(_types(node.outputs, graph.outputs))
    # A constant may have the name of another part's weight.
    weights = {tensor.name for node in graph.nodes for tensor in node.inputs
               if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)}
    for tensor in proto.graph.initializer:
        if tensor.name in places and tensor.name in weights:
            refer(tensor, WEIGHTS_NAME, places[tensor.name])
    del proto.opset_import[:]
    proto.opset_import.extend([onnx.helper.make_opsetid("", plugins.opset(target)),
                               onnx.helper.make_opsetid(plugins.DOMAIN, 1),
                               onnx.helper.make_opsetid("com.microsoft", 1)])
    proto.functions.extend(functions[name] for name in sorted(functions))
    proto.ir_version, proto.producer_name, proto.producer_version = 10, "llmc", __version__
    proto.graph.name = "llmc"
    onnx.helper.set_model_props(proto, {FACTS: _facts(graph, target)})
    return proto


def _types(tensors: Sequence[gs.Tensor], declared: Sequence[gs.Tensor]) -> \
        Iterator[onnx.ValueInfoProto]:
    """Yield the element types of tensors, except graph outputs, which are declared already.

    ONNX cannot infer those of collectives and com.microsoft ops.
    """
    for tensor in tensors:
        if tensor.dtype is not None and all(tensor is not output for output in declared):
            yield onnx.helper.make_tensor_value_info(
                tensor.name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype)), None)


def refer(tensor: onnx.TensorProto, location: str, place: Placed) -> None:
    """Point a tensor's external data to a position in the file `location`."""
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(place.offset)),
                       ("length", str(place.length))):
        tensor.external_data.add(key=key, value=value)


def _facts(graph: gs.Graph, target: str) -> str:
    """Return the facts that a loader compares with the manifest, as JSON.

    They are op versions, num_heads of each attention layer with a cache, and `held_scores` (see
    `Op`): the maximum over attention layers, which limits the prefill chunk. If layers attend to
    encoder outputs, `held_memory_scores` is the same for these.
    """
    ops = {op.name: op.version for node in graph.nodes if (op := op_of(node)) is not None}
    held: dict[bool, list[int]] = {False: [], True: []}  # by whether keys are encoder outputs
    for node in graph.nodes:
        if (op := op_of(node)) is not None and target in op.held_scores:
            present = frozenset(operands(node))
            held["key_starts" in present].append(op.held_scores[target](fields_of(node), present))
    facts: dict[str, object] = {
        "ops": dict(sorted(ops.items())),
        "num_heads": [node.attrs["num_heads"] for node in graph.nodes if caches(node)],
        "held_scores": max(held[False], default=0)}
    if held[True]:
        facts["held_memory_scores"] = max(held[True])
    return json.dumps(facts)


def write_onnx(proto: onnx.ModelProto, path: Path) -> FileEntry:
    """Write the model; return its size and hash under the name `path.name`."""
    data = proto.SerializeToString(deterministic=True)
    path.write_bytes(data)
    return file_entry(path)


def graph_step(path: str, graph: gs.Graph) -> GraphStep:
    """Return the step that runs a graph's file."""
    return GraphStep(path=path, inputs=tuple(tensor.name for tensor in graph.inputs),
                     outputs=tuple(tensor.name for tensor in graph.outputs))


def file_entry(path: Path) -> FileEntry:
    """Return size and hash of a file, under its base name."""
    return FileEntry(path=path.name, size=path.stat().st_size, sha256=hash_file(path))


def split_at_collectives(graph: gs.Graph) -> list[gs.Graph | gs.Node]:
    """Split a graph at its collectives: segments, with collective nodes between them."""
    pieces: list[gs.Graph | gs.Node] = []
    pending: list[gs.Node] = []
    needed_later: list[set[int]] = []
    nodes = list(graph.nodes)
    later = {id(tensor) for tensor in graph.outputs}
    for node in reversed(nodes):
        needed_later.append(set(later))
        later.update(id(tensor) for tensor in node.inputs)
    needed_later.reverse()

    def flush(index: int) -> None:
        if pending:
            pieces.append(_segment(pending, needed_later[index]))
            pending.clear()

    for index, node in enumerate(nodes):
        op = op_of(node)
        if op is not None and op.collective:
            flush(index - 1)
            pieces.append(node)
        else:
            pending.append(node)
    flush(len(nodes) - 1)
    return pieces


def _segment(nodes: Sequence[gs.Node], later: set[int]) -> gs.Graph:
    inner = {id(tensor) for node in nodes for tensor in node.outputs}
    inputs = {id(t): t for node in nodes for t in node.inputs
              if id(t) not in inner and not isinstance(t, gs.Constant) and not t.is_empty()}
    outputs = [t for node in nodes for t in node.outputs if id(t) in later]
    return gs.Graph(nodes=list(nodes), inputs=list(inputs.values()), outputs=outputs,
                    opset=plugins.OPSET)


def describe_chip(graph: gs.Graph, rank: int, steps: tuple[GraphStep | CollectiveStep, ...],
                  weight_bytes: int, encoder: EncoderProgram | None = None,
                  draft: DraftProgram | None = None, *later: DraftProgram) -> Chip:
    """Return a rank's entry of the manifest, for any target."""
    cache, num_heads = _attention(graph)
    return Chip(
        rank=rank, path=f"chip{rank}", steps=steps,
        inputs=_describe(graph.inputs), outputs=_describe(graph.outputs),
        cache=cache, num_heads=num_heads,
        states=tuple(StateCache(shape=tuple(kept[0].shape[1:])) for node in graph.nodes
                     if (kept := state_of(node)) is not None),
        weight_bytes=weight_bytes, encoder=encoder, draft=draft, later_drafts=later,
        lora=describe_lora(graph))


def _attention(graph: gs.Graph) -> tuple[tuple[LayerCache, ...], tuple[int, ...]]:
    """Return cache and number of heads of each attention layer with a cache."""
    attention = [node for node in graph.nodes if caches(node)]
    return tuple(LayerCache(num_kv_heads=node.attrs["num_kv_heads"],
                            head_dim=node.attrs["head_dim"], latent=len(caches(node)) == 1)
                 for node in attention), tuple(node.attrs["num_heads"] for node in attention)


def weight_forms(graphs: Sequence[gs.Graph | None]) -> dict[str, WeightForm]:
    """Return the storage format of each quantized weight of a chip's graphs, by name."""
    forms: dict[str, WeightForm] = {}
    for node in (node for graph in graphs if graph is not None for node in graph.nodes):
        op = op_of(node)
        if op is not None and op.packed(fields := fields_of(node)):
            forms.update((operands(node)[role.weight].name, WeightForm(
                dtype=fields["weight_dtype"], group_size=fields["group_size"],
                activation_dtype=fields.get("activation_dtype", ""),
                activation_scale=fields.get("activation_scale", 0.0),
                activation_group_size=fields.get("activation_group_size", 0)))
                for role in op.quantized)
    return dict(sorted(forms.items()))


def describe_encoder(graph: gs.Graph, steps: tuple[GraphStep | CollectiveStep, ...]) -> \
        EncoderProgram:
    """Return a rank's encoder entry of the manifest."""
    return EncoderProgram(inputs=_describe(graph.inputs), outputs=_describe(graph.outputs),
                          steps=steps)


def describe_image(graph: gs.Graph, outputs: Sequence[gs.Tensor],
                   steps: tuple[GraphStep | CollectiveStep, ...],
                   computed: tuple[VisionInput, ...], grid: PositionGrid | None,
                   bidirectional: Bidirectional | None, token_id: int | None,
                   padded: bool) -> ImageEncoderProgram:
    """Return the manifest's entry of the image encoder.

    Args:
        graph: of the first step.
        outputs: of the last step.
    """
    rows = tuple(TensorInfo(name=own.name, dtype="float32", shape=("num_embeds", own.shape[-1]))
                 for own in outputs)
    return ImageEncoderProgram(inputs=_describe(graph.inputs), outputs=rows, steps=steps,
                               computed=computed, grid=grid, bidirectional=bidirectional,
                               token_id=token_id, padded=padded, reshaped=reshaped_outputs(graph))


def describe_audio(graph: gs.Graph, steps: tuple[GraphStep | CollectiveStep, ...]) -> \
        AudioEncoderProgram:
    """Return the manifest's entry of the encoder of audio clips."""
    return AudioEncoderProgram(inputs=_describe(graph.inputs), outputs=_describe(graph.outputs),
                               steps=steps)


def describe_draft(graph: gs.Graph, steps: tuple[GraphStep | CollectiveStep, ...]) -> DraftProgram:
    """Return the manifest's entry of a rank's draft model."""
    cache, num_heads = _attention(graph)
    return DraftProgram(inputs=_describe(graph.inputs), outputs=_describe(graph.outputs),
                        steps=steps, cache=cache, num_heads=num_heads)


def _describe(tensors: Sequence[gs.Tensor]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name=tensor.name, dtype=np.dtype(tensor.dtype).name,
                            shape=tuple(tensor.shape)) for tensor in tensors)
