"""The CUDA target: a program for llmc's CUDA engine, and the same graph as ONNX.

`schedule.json` lists a rank's tensors with their offsets, and its ops in order. Activations share
an arena: tensors with disjoint lifetimes share memory. Offsets are in bytes per token (for logits,
per computed row of logits), so that one memory plan serves all limits of the engine. An encoder
has a separate program, `encoder.json`. Its outputs are scattered, as soon as they are computed, to
the encoder-output buffer (kind `memory`) that both programs name. A draft model has a separate
program, too, `draft.json`, or one for each of its layers, `draft_1.json` and so on, and a separate
arena: it reads the features that the model leaves in its arena. An image encoder is a program,
`image.json`, whose inputs `image.onnx` computes on the host, as `image_rows.onnx`, if any, computes
what follows; or if it cannot be divided so, `image.onnx` alone, as of target cpu.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import (
    DEEP_EMBEDS_PREFIX,
    DRAFT_TOKEN_IDS,
    EMBEDS,
    HIDDEN,
    HIDDEN_OUT,
    INPUT_FEATURES,
    POOLED,
    Chip,
    CollectiveStep,
    FileEntry,
    GraphStep,
    Target,
)
from llmc.artifacts.program import (
    ELEMENTWISE,
    MOST_JOINED,
    Program,
    ProgramDType,
    ProgramNode,
    ProgramTensor,
    draft_part,
)
from llmc.compiler.artifact import (
    WEIGHTS_NAME,
    describe_chip,
    describe_draft,
    describe_encoder,
    file_entry,
    graph_step,
    write_onnx,
    write_weights,
)
from llmc.compiler.graph.dtypes import numpy_dtype
from llmc.compiler.graph.rewrite import (
    caches,
    consumers,
    exact_outputs,
    fields_of,
    is_llmc,
    reads,
    state_of,
    takes_columns,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import Draft, ImageEncoder, cpu
from llmc.compiler.targets.typed_onnx import typed_onnx
from llmc.errors import LlmcError
from llmc.plugins.add_embeds.op import OP as ADD_EMBEDS
from llmc.plugins.input_embeds.op import OP as INPUT_EMBEDS
from llmc.targets import CUDA

# Program of the engine, and graph for ONNX Runtime.
_FILES = {"model": (CUDA.engine_file, "graph.onnx"), "encoder": (CUDA.encoder_file, "encoder.onnx"),
          "draft": (CUDA.draft_file, "draft.onnx")}
_IMAGE_PROGRAM = "image.json"
_ALIGNMENT = 16
_RESULTS = ("logits", POOLED)
_FEW_ROWS = ("num_logits", "batch")  # rows of values in the arena of logits
_MEMORY_ROWS = ProgramTensor(name="memory_rows", kind="input", dtype="int64",
                               shape=("num_tokens",))


def describe(options: CompileOptions) -> Target:
    """Return the target's entry of model_info.json."""
    return Target(kind=CUDA.name, compute_capability=options.compute_capability)


def emit(graph: gs.Graph, rank: int, case_dir: Path, options: CompileOptions,
         encoder: gs.Graph | None = None, *, draft: Draft | None = None,
         image: ImageEncoder | None = None, audio: gs.Graph | None = None) -> \
        tuple[Chip, list[FileEntry]]:
    """Write `chip<rank>/` and describe it.

    Raises:
        LlmcError: the engine has no kernel for an op of the graph.
    """
    name, dtype = f"chip{rank}", options.dtype
    directory = case_dir / name
    directory.mkdir()
    drafts = [] if draft is None else [draft.graph, *draft.later]
    graphs = {"model": graph, **({"encoder": encoder} if encoder is not None else {}),
              **{draft_part(index): each for index, each in enumerate(drafts)}}
    table = {} if draft is None or draft.token_ids is None else \
        {DRAFT_TOKEN_IDS: Weight.of(draft.token_ids)}
    places, weights = write_weights(
        [*graphs.values(), *([] if image is None else image.graphs),
         *([] if audio is None else [audio])], directory / WEIGHTS_NAME, table)
    files = [weights]
    steps: dict[str, tuple[GraphStep, ...]] = {}
    for part, own in graphs.items():
        path, onnx_path = _FILES.get(part, (f"{part}.json", f"{part}.onnx"))
        text = program_of(own, dtype).model_dump_json(indent=1, exclude_defaults=True) + "\n"
        (directory / path).write_text(text, encoding="utf-8")
        files.append(file_entry(directory / path))
        model = typed_onnx(own, places, CUDA.name, dtype)
        files.append(write_onnx(model, directory / onnx_path))
        steps[part] = (graph_step(f"{name}/{path}", own),)
    weight_bytes = sum(place.length for place in places.values())
    chip = describe_chip(
        graph, rank, steps["model"], weight_bytes,
        None if encoder is None else describe_encoder(encoder, steps["encoder"]),
        *(describe_draft(each, steps[draft_part(index)]) for index, each in enumerate(drafts)))
    if image is not None:
        program, more = cpu.write_image(image, places, directory)
        files += more
        if image.device is not None:
            written = directory / _IMAGE_PROGRAM
            text = program_of(image.device, dtype, of_image=True).model_dump_json(
                indent=1, exclude_defaults=True) + "\n"
            written.write_text(text, encoding="utf-8")
            files.append(file_entry(written))
            added: list[GraphStep | CollectiveStep] = [
                graph_step(f"{name}/{written.name}", image.device)]
            if image.rows is not None:
                steps_after, more = cpu.write_image_rows(image.rows, places, directory)
                files += more
                added += steps_after
            program = program.model_copy(update={"steps": (*program.steps, *added)})
        chip = chip.model_copy(update={"image": program})
    if audio is not None:
        encoder_of_audio, more = cpu.write_audio(audio, places, directory)
        files += more
        chip = chip.model_copy(update={"audio": encoder_of_audio})
    return chip, files


def program_of(graph: gs.Graph, dtype: str, of_image: bool = False) -> Program:
    """Convert a graph to a program: tensors with offsets, and ops in order.

    Args:
        graph: the graph.
        dtype: of values.
        of_image: whether it is an image encoder's, whose outputs the host reads.

    Raises:
        LlmcError: see `emit`.
    """
    fields = [_fields(node) for node in graph.nodes]  # first: rejects unsupported ops
    kept: dict[int, Literal["cache", "state"]] = {
        id(tensor): "cache" for node in graph.nodes for pair in caches(node) for tensor in pair}
    kept |= {id(tensor): "state" for node in graph.nodes for tensor in state_of(node) or ()}
    kept |= {id(tensor): "cache" for node in graph.nodes for tensor in reads(graph, node)}
    # Caches are updated in place: a layer's present cache is the past cache.
    in_place = {id(present): past for node in graph.nodes for past, present in caches(node)}
    outputs = [tensor for tensor in graph.outputs if id(tensor) not in kept]
    # Encoder outputs.
    memory = outputs if not of_image and all(t.name not in _RESULTS for t in outputs) else []
    given = [tensor for tensor in graph.inputs if tensor.name == HIDDEN]  # by the engine, a value
    numbers: dict[int, int] = {}
    tensors: list[ProgramTensor] = []
    dtypes = {id(tensor): _name(tensor.dtype) for node in graph.nodes
              for tensor in exact_outputs(node)}
    columns = _columns(graph, dtypes)
    offsets, sizes = _plan(graph, kept, memory, dtype, dtypes, columns, given)

    def number(tensor: gs.Tensor) -> int:
        if tensor.is_empty() or (id(tensor) in kept and tensor.inputs):
            return -1
        if id(tensor) not in numbers and id(tensor) in columns:
            value, first = columns[id(tensor)]
            numbers[id(tensor)] = add(ProgramTensor(
                name=tensor.name, kind="columns", dtype=_name(numpy_dtype(dtype)),
                shape=("num_tokens", int(tensor.shape[-1])), of=number(value), first=first))
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(tensors)
            tensors.append(_describe(tensor, kept.get(id(tensor)), offsets,
                                     dtypes.get(id(tensor), dtype),
                                     tensor.name != HIDDEN
                                     and any(tensor is t for t in graph.inputs)))
        return numbers[id(tensor)]

    def add(tensor: ProgramTensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    rows = add(_MEMORY_ROWS) if memory else -1
    nodes = []
    for node, attributes in zip(graph.nodes, fields, strict=True):
        if id(node.outputs[0]) in columns:
            continue  # a view: consumers read the columns in place
        nodes.append(ProgramNode(op=_op(node), fields=attributes,
                                   inputs=tuple(number(in_place.get(id(t), t))
                                                for t in node.inputs),
                                   outputs=tuple(number(t) for t in node.outputs)))
        for output in (t for t in node.outputs if any(t is other for other in memory)):
            target = add(_describe_memory(output, dtype))
            nodes.append(ProgramNode(op="Scatter", fields={},
                                       inputs=(number(output), rows, target), outputs=()))
    named = {tensor.name: number(tensor) for tensor in (*outputs, *given)}
    of_draft = bool(given)  # reads features
    return Program(tensors=tuple(tensors), nodes=tuple(nodes), token_bytes=sizes[False],
                    logit_bytes=sizes[True],
                    logits=next((named[name] for name in _RESULTS if name in named), -1),
                    features=-1 if of_draft else named.get(HIDDEN, -1),
                    hidden=named.get(HIDDEN, -1) if of_draft else -1,
                    hidden_out=named.get(HIDDEN_OUT, -1),
                    outputs=tuple(map(number, outputs)) if of_image else ())


def _columns(graph: gs.Graph, dtypes: Mapping[int, str]) -> dict[int, tuple[gs.Tensor, int]]:
    """Find column slices with consumers that all support a strided input.

    Returns:
        By id of the slice: the sliced tensor and the first column.
    """
    views: dict[int, tuple[gs.Tensor, int]] = {}
    for node in graph.nodes:
        value, output = node.inputs[0], node.outputs[0]
        if _op(node) != "Columns" or id(value) in dtypes or not value.inputs \
                or any(output is other for other in graph.outputs) \
                or value.shape[0] != "num_tokens" or not all(
                    takes_columns(user, output) for user in consumers(graph, output)):
            continue
        index = values_of(node.inputs[1]).load()
        if np.array_equal(index, np.arange(index[0], index[0] + len(index))):
            views[id(output)] = (value, int(index[0]))
    return views


def _describe_memory(tensor: gs.Tensor, dtype: str) -> ProgramTensor:
    return ProgramTensor(name=tensor.name, kind="memory", dtype=_name(numpy_dtype(dtype)),
                           shape=("num_memory_tokens", int(tensor.shape[-1])))


def _op(node: gs.Node) -> str:
    """Return the engine's name of a node's op."""
    if node.op == "Gather" and isinstance(node.inputs[1], gs.Constant):
        return "Columns"
    return "GeluTanh" if node.op == "Gelu" and node.attrs.get("approximate") == "tanh" else node.op


def _fields(node: gs.Node) -> dict[str, int | float | str]:
    if is_llmc(node):
        return fields_of(node)
    constants = [t for t in node.inputs if isinstance(t, gs.Constant)]
    if node.op == "Gather" and node.attrs.get("axis", 0) == 0 and not constants:
        return {}
    if _op(node) == "Columns" and node.attrs["axis"] == -1 and len(constants) == 1:
        return {}
    if node.op == "Concat" and not constants and len(node.inputs) <= MOST_JOINED and \
            node.attrs["axis"] in (-1, len(node.outputs[0].shape) - 1):
        return {}
    if node.op in ELEMENTWISE and node.attrs.get("alpha", 1.0) == 1 and all(
            t.values.size == 1 or [*t.shape] == [*node.outputs[0].shape[-1:]] for t in constants):
        return {}
    raise LlmcError(f"{node.op} '{node.name}': the cuda target has no kernel for it; compile for "
                    f"--target cpu")


def _describe(tensor: gs.Tensor, kept: Literal["cache", "state"] | None, offsets: dict[int, int],
              dtype: str, is_input: bool) -> ProgramTensor:
    if isinstance(tensor, gs.Constant):
        values = values_of(tensor)
        return ProgramTensor(name=tensor.name, kind="weight", dtype=_name(values.dtype),
                               shape=values.shape)
    shape = tuple(dim if isinstance(dim, str) else int(dim) for dim in tensor.shape)
    if kept is not None:
        return ProgramTensor(name=tensor.name.removesuffix("_out"), kind=kept,
                             dtype=_name(tensor.dtype), shape=shape)
    if is_input and "max_loras" in shape:
        return ProgramTensor(name=tensor.name, kind="adapters", dtype=_name(tensor.dtype),
                               shape=shape)
    if is_input and shape[0] == "num_memory_tokens":
        return _describe_memory(tensor, dtype)
    if is_input:
        is_rows = tensor.name in (EMBEDS, INPUT_FEATURES, "patches", "position_rows") or \
            tensor.name.startswith(DEEP_EMBEDS_PREFIX)
        return ProgramTensor(name=tensor.name, kind="input", shape=shape,
                             dtype=_name(numpy_dtype(dtype) if is_rows else tensor.dtype))
    return ProgramTensor(name=tensor.name, kind="value", dtype=_name(numpy_dtype(dtype)),
                           shape=shape, offset=offsets[id(tensor)],
                           per_logit=shape[0] in _FEW_ROWS)


def _name(dtype: np.dtype | type | str) -> ProgramDType:
    return cast(ProgramDType, np.dtype(dtype).name)  # the program refuses any other


def _plan(graph: gs.Graph, kept: Collection[int], memory: Sequence[gs.Tensor], dtype: str,
          dtypes: Mapping[int, str], columns: Mapping[int, tuple[gs.Tensor, int]],
          given: Sequence[gs.Tensor]) -> tuple[dict[int, int], dict[bool, int]]:
    """Plan the arena: place tensors, the largest first, so that live tensors do not overlap.

    An encoder output lives until it is scattered, a tensor with `columns` until they are read.
    Tensors have `dtype` except those in `dtypes`. Those in `given` live from the start to the end.

    Returns:
        Offsets by tensor, and the arena's size for per-token (False) and per-logit (True) tensors;
        pooled rows are among the latter.
    """
    last_use: dict[int, int] = {}
    for step, node in enumerate(graph.nodes):
        for tensor in (*node.inputs, *node.outputs):
            last_use[id(tensor)] = step
            if id(tensor) in columns:
                last_use[id(columns[id(tensor)][0])] = step
    for tensor in given if memory else (*graph.outputs, *given):
        last_use[id(tensor)] = len(graph.nodes)
    for node in reversed(graph.nodes):
        # The engine may read the first input in place.
        if _op(node) in ("Gather", INPUT_EMBEDS.name, ADD_EMBEDS.name):
            rows, selected = id(node.inputs[0]), id(node.outputs[0])
            last_use[rows] = max(last_use[rows], last_use[selected])
    values = [(step, tensor) for step, node in enumerate(graph.nodes) for tensor in node.outputs
              if id(tensor) not in kept and id(tensor) not in columns and not tensor.is_empty()]
    values += [(-1, tensor) for tensor in given]

    def size(tensor: gs.Tensor) -> int:
        width = int(tensor.shape[-1]) * numpy_dtype(dtypes.get(id(tensor), dtype)).itemsize
        return -(-width // _ALIGNMENT) * _ALIGNMENT

    offsets: dict[int, int] = {}
    totals = {False: 0, True: 0}
    placed: list[tuple[bool, int, int, int, int]] = []  # logits?, first step, last step, start, end
    for step, tensor in sorted(values, key=lambda value: -size(value[1])):
        is_logit = tensor.shape[0] in _FEW_ROWS
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
