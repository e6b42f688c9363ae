"""Targets: one module per target, writing each rank's engine.

`llmc.targets` lists the targets' capabilities; a `TargetSpec` names its module.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import Bidirectional, Chip, FileEntry, PositionGrid, Target
from llmc.artifacts.vision_input import VisionInput
from llmc.compiler.options import CompileOptions
from llmc.targets import target_spec


@dataclass(frozen=True)
class Draft:
    """A draft model of a rank.

    Args:
        graph: its graph.
        token_ids: see `RawDraft`.
        later: graphs of the later layers, of the chain `layers`.
    """

    graph: gs.Graph
    token_ids: np.ndarray | None
    later: tuple[gs.Graph, ...] = ()


@dataclass(frozen=True)
class ImageEncoder:
    """The image encoder of rank 0; see `RawImageEncoder`.

    With `device`, `graph` computes its inputs on the host, and `rows`, if any, what follows; see
    `ImageParts`.
    """

    graph: gs.Graph
    computed: tuple[VisionInput, ...]
    grid: PositionGrid | None
    bidirectional: Bidirectional | None
    token_id: int | None
    padded: bool
    device: gs.Graph | None = None
    rows: gs.Graph | None = None

    @property
    def graphs(self) -> list[gs.Graph]:
        return [own for own in (self.graph, self.device, self.rows) if own is not None]


class Backend(Protocol):
    """The interface of a target's module."""

    def describe(self, options: CompileOptions) -> Target:
        """Return the target's entry of model_info.json.

        Raises:
            LlmcError: the target's builder is not installed, or does not support the options.
        """

    def emit(self, graph: gs.Graph, rank: int, case_dir: Path, options: CompileOptions,
             encoder: gs.Graph | None = None, *, draft: Draft | None = None,
             image: ImageEncoder | None = None, audio: gs.Graph | None = None) -> \
            tuple[Chip, list[FileEntry]]:
        """Write `chip<rank>/`.

        `draft`, `image` and `audio` are given to targets that run draft models and encoders of
        images and of audio.

        Returns:
            The chip's entry of the manifest, and its files by their names in that directory.

        Raises:
            LlmcError: the target cannot run the graph.
        """


def backend(target: str) -> Backend:
    """Import the module of a target.

    Raises:
        LlmcError: the target is unknown.
    """
    return cast(Backend, import_module(target_spec(target).compiler))
