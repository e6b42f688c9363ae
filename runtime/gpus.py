"""The ranks of one model on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from llmc.runtime.devices import Placement
from llmc.runtime.manifest import Manifest
from llmc.runtime.replica import Room

_Result = TypeVar("_Result")


class GpuReplica:
    """See `Engine`. The first rank is in this process, each other has one of its own; all choose
    the same tokens.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, placements: list[Placement],
                 room: Room) -> None:
        raise NotImplementedError
