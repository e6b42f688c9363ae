"""Which CPU cores run which rank.

The host counts as 8 CPU devices (`LLMC_CPU_DEVICES` says otherwise, and a model of more chips gets as
many). Device d owns a share of the cores that the process may use; with fewer cores than devices,
devices share cores. `LLMC_VISIBLE_DEVICES` restricts and renumbers, as CUDA_VISIBLE_DEVICES does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.errors import LlmcError
from llmc.runtime.manifest import Manifest

_DEFAULT_DEVICES = 8


@dataclass(frozen=True)
class Placement:
    """One rank's cores; `pinned` if the rank's threads must stay on them."""

    device: int
    cores: tuple[int, ...]
    pinned: bool


def physical_devices(tp_size: int) -> list[int]:
    """The devices that may be used, in the order in which they are numbered.

    Raises:
        LlmcError: an environment variable is not what it should be.
    """
    text = os.environ.get("LLMC_CPU_DEVICES", str(_DEFAULT_DEVICES))
    if not text.isdigit() or int(text) < 1:
        raise LlmcError(f"LLMC_CPU_DEVICES is '{text}'; it must be a number of devices above 0")
    count = max(int(text), tp_size)
    visible = os.environ.get("LLMC_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    parts = [part.strip() for part in visible.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) < count for part in parts) \
            or len(set(parts)) != len(parts):
        raise LlmcError(f"LLMC_VISIBLE_DEVICES is '{visible}'; it must list different devices "
                        f"from 0 to {count - 1}, such as 0,1")
    return [int(part) for part in parts]


def _cores(device: int, devices: int) -> tuple[int, ...]:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < devices:
        return (allowed[device % len(allowed)],)
    share = len(allowed) // devices
    return tuple(allowed[device * share:(device + 1) * share])


def place(manifest: Manifest, wish: Sequence[int] | None) -> list[list[Placement]]:
    """For each replica, where each rank runs.

    Args:
        wish: devices as the user lists them; None for one replica, unpinned, on all cores.

    Raises:
        LlmcError: a device is listed twice or does not exist, or the list does not make whole
            allowed groups.
    """
    tp_size = manifest.tp_size
    physical = physical_devices(tp_size)
    if wish is None:
        if len(physical) < tp_size:
            raise LlmcError(f"{len(physical)} devices are visible, the model has {tp_size} chips; "
                            f"widen LLMC_VISIBLE_DEVICES")
        allowed = sorted(os.sched_getaffinity(0))
        share = max(1, len(allowed) // tp_size)
        return [[Placement(physical[rank], tuple(allowed[(rank * share + i) % len(allowed)]
                                                 for i in range(share)), False)
                 for rank in range(tp_size)]]
    listed = list(wish)
    groups = [list(group) for group in manifest.device_groups if max(group) < len(physical)]
    hint = f"allowed groups: {', '.join(str(group) for group in groups)}"
    if len(set(listed)) != len(listed):
        twice = next(device for device in listed if listed.count(device) > 1)
        raise LlmcError(f"device {twice} is listed twice in {listed}; {hint}")
    unknown = [device for device in listed if not 0 <= device < len(physical)]
    if unknown:
        raise LlmcError(f"device {unknown[0]} does not exist; there are 0 to {len(physical) - 1}")
    if not listed or len(listed) % tp_size:
        raise LlmcError(f"{len(listed)} devices cannot run a model of {tp_size} chips; list a "
                        f"multiple of {tp_size}; {hint}")
    replicas = [listed[start:start + tp_size] for start in range(0, len(listed), tp_size)]
    for replica in replicas:
        if replica not in groups:
            raise LlmcError(f"devices {replica} are not a group that this model was compiled for; "
                            f"{hint}")
    total = max(len(physical), *(device + 1 for device in physical))
    return [[Placement(physical[device], _cores(physical[device], total), True)
             for device in replica] for replica in replicas]


def pin(placement: Placement) -> None:
    """Keep the calling thread on its device's cores."""
    if placement.pinned:
        os.sched_setaffinity(0, placement.cores)
