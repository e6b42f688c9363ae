"""The CPU target: ONNX files for ONNX Runtime.

At tp_size 1 the engine runs `graph.onnx`. Above, the graph is also split at its collectives into
`segment_*.onnx`, and the runtime's communicator runs the collectives between them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import (
    DRAFT_TOKEN_IDS,
    AudioEncoderProgram,
    Chip,
    CollectiveStep,
    FileEntry,
    GraphStep,
    ImageEncoderProgram,
    Target,
)
from llmc.artifacts.onnx_graph import check_model
from llmc.compiler.artifact import (
    WEIGHTS_NAME,
    Placed,
    describe_audio,
    describe_chip,
    describe_draft,
    describe_encoder,
    describe_image,
    graph_step,
    split_at_collectives,
    to_onnx,
    write_onnx,
    write_weights,
)
from llmc.compiler.graph.rewrite import fields_of, is_op, op_of, operands, producer, values_of
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import Draft, ImageEncoder
from llmc.errors import LlmcError
from llmc.plugins.experts.op import OP as EXPERTS
from llmc.plugins.route.op import OP as ROUTE
from llmc.targets import CPU

BODIES = CPU.name  # target of the graphs' function bodies
_IMAGE_ROWS = "image_rows.onnx"


def describe(options: CompileOptions) -> Target:
    """Return the target's entry of model_info.json."""
    return Target(kind=CPU.name)


def emit(graph: gs.Graph, rank: int, case_dir: Path, options: CompileOptions,
         encoder: gs.Graph | None = None, *, draft: Draft | None = None,
         image: ImageEncoder | None = None, audio: gs.Graph | None = None) -> \
        tuple[Chip, list[FileEntry]]:
    """Write `chip<rank>/` and describe it.

    Raises:
        LlmcError: the kernel of the experts does not support their scales.
    """
    drafts = [] if draft is None else [draft.graph, *draft.later]
    graphs = [graph, *([encoder] if encoder is not None else []), *drafts,
              *([] if image is None else [image.graph]), *([] if audio is None else [audio])]
    for each in graphs:
        _check_expert_scales(each)
    name = f"chip{rank}"
    directory = case_dir / name
    directory.mkdir()
    table = {} if draft is None or draft.token_ids is None else \
        {DRAFT_TOKEN_IDS: Weight.of(draft.token_ids)}
    places, weights = write_weights(graphs, directory / WEIGHTS_NAME, table)
    steps, files = _write_steps(graph, places, directory, CPU.engine_file, "segment")
    program = None
    if encoder is not None:
        encoder_steps, more = _write_steps(encoder, places, directory, CPU.encoder_file,
                                           "encoder_segment")
        files += more
        program = describe_encoder(encoder, encoder_steps)
    drafting = []
    for index, each in enumerate(drafts):
        number = f"_{index}" if index else ""
        path = Path(CPU.draft_file)
        draft_steps, more = _write_steps(each, places, directory,
                                         f"{path.stem}{number}{path.suffix}",
                                         f"draft{number}_segment")
        files += more
        drafting.append(describe_draft(each, draft_steps))
    chip = describe_chip(graph, rank, steps, sum(place.length for place in places.values()),
                         program, *drafting)
    if image is not None:
        encoder_of_images, more = write_image(image, places, directory)
        files += more
        chip = chip.model_copy(update={"image": encoder_of_images})
    if audio is not None:
        encoder_of_audio, more = write_audio(audio, places, directory)
        files += more
        chip = chip.model_copy(update={"audio": encoder_of_audio})
    return chip, [weights, *files]


def write_image(image: ImageEncoder, places: dict[str, Placed], directory: Path) -> \
        tuple[ImageEncoderProgram, list[FileEntry]]:
    """Write an image encoder into a chip's directory and describe it.

    Args:
        image: the encoder, in float32.
        places: positions in the chip's weight file, by weight.
        directory: of the chip.
    """
    steps, files = _write_steps(image.graph, places, directory, CPU.image_file, "image")
    return describe_image(image.graph, image.graphs[-1].outputs, steps, image.computed, image.grid,
                          image.bidirectional, image.token_id, image.padded), files


def write_image_rows(rows: gs.Graph, places: dict[str, Placed], directory: Path) -> \
        tuple[tuple[GraphStep | CollectiveStep, ...], list[FileEntry]]:
    """Write what follows the program of an image encoder; see `write_image`."""
    return _write_steps(rows, places, directory, _IMAGE_ROWS, "image_rows")


def write_audio(audio: gs.Graph, places: dict[str, Placed], directory: Path) -> \
        tuple[AudioEncoderProgram, list[FileEntry]]:
    """The same for an encoder of audio."""
    steps, files = _write_steps(audio, places, directory, CPU.audio_file, "audio")
    return describe_audio(audio, steps), files


def _check_expert_scales(graph: gs.Graph) -> None:
    """Reject expert scales of both signs, for experts on ONNX Runtime's MoE kernel.

    The kernel needs a token's scores to have one sign.
    """
    for node in graph.nodes:
        body = EXPERTS.bodies[CPU.name](fields_of(node), frozenset(operands(node)) - {"lora_ids"}) \
            if is_op(node, EXPERTS) else None
        route = producer(operands(node)["scores"]) if body is not None else None
        scales = operands(route).get("expert_scale") if is_op(route, ROUTE) else None
        if scales is not None and np.ptp(np.sign(values_of(scales).load())) > 1:
            raise LlmcError(f"'{node.outputs[0].name}' has expert scales ('{scales.name}') of "
                            f"both signs, which ONNX Runtime's MoE kernel does not support; "
                            f"compile with --target cuda")


def _write_steps(graph: gs.Graph, places: dict[str, Placed], directory: Path, whole: str,
                 segment: str) -> tuple[tuple[GraphStep | CollectiveStep, ...], list[FileEntry]]:
    """Write a graph, and its segments if it has collectives; return the steps to run."""
    files = [write_onnx(to_onnx(graph, places, BODIES), directory / whole)]
    pieces = split_at_collectives(graph)
    steps: list[GraphStep | CollectiveStep] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, gs.Node):
            op = op_of(piece)
            assert op is not None and op.collective, piece.op
            steps.append(CollectiveStep(kind=op.collective, input=piece.inputs[0].name,
                                        output=piece.outputs[0].name))
            continue
        file = whole if len(pieces) == 1 else f"{segment}_{index:03}.onnx"
        if len(pieces) > 1:
            files.append(write_onnx(to_onnx(piece, places, BODIES), directory / file))
        _check_loadable(directory / file)
        steps.append(graph_step(f"{directory.name}/{file}", piece))
    return tuple(steps), files


def _check_loadable(path: Path) -> None:
    """Reject a graph that the runtime would not load."""
    try:
        check_model(path.read_bytes(), path.with_name(WEIGHTS_NAME).stat().st_size)
    except ValueError as error:
        raise LlmcError(f"the model's graph cannot be loaded on target {CPU.name}: {error}; "
                        f"compile with --target cuda, or report the operator to llmc, whose "
                        f"list lacks it") from error
