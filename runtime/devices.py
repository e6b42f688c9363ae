"""Placement of ranks on CPU cores or GPUs.

The host counts as 8 CPU devices, or as LLMC_CPU_DEVICES, but at least as the model's number of
chips. Each device owns a contiguous share of the cores that the process may use; with fewer cores
than devices, devices share cores. LLMC_VISIBLE_DEVICES restricts and renumbers, as
CUDA_VISIBLE_DEVICES does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.artifacts.manifest import Manifest
from llmc.errors import LlmcError

_DEFAULT_DEVICES = 8


@dataclass(frozen=True)
class Placement:
    """Cores of one rank; `pinned` if its threads must stay on them."""

    device: int
    cores: tuple[int, ...]
    pinned: bool


def place(manifest: Manifest, wish: Sequence[int] | None, gpus: int | None = None,
          num_ranks: int | None = None) -> list[list[Placement]]:
    """Place each rank of each replica.

    Args:
        wish: devices given by the user, a multiple of tp_size. None: one replica on all cores, or
            on those of the visible devices.
        gpus: number of GPUs, if devices are GPUs; their ranks may use all cores.
        num_ranks: ranks of the replica on this host if `wish` is None; None: all.

    Raises:
        LlmcError: a device is listed twice or does not exist, the list is not made of allowed
            groups, or an environment variable is invalid.
    """
    count = _device_count(manifest.tp_size) if gpus is None else gpus
    visible = _visible_devices(count)
    allowed = sorted(os.sched_getaffinity(0))
    owned = {device: _share(allowed, device, count) if gpus is None else tuple(allowed)
             for device in visible}
    if wish is not None:
        return [[Placement(visible[number], owned[visible[number]], gpus is None)
                 for number in group]
                for group in _groups(manifest, list(wish), len(visible))]
    if num_ranks is None:
        num_ranks = manifest.tp_size
    if len(visible) < num_ranks:
        raise LlmcError(f"{len(visible)} devices are visible, the model has {num_ranks} chips; "
                        f"widen LLMC_VISIBLE_DEVICES")
    restricted = len(visible) < count and gpus is None
    cores = sorted({core for share in owned.values() for core in share}) if restricted else allowed
    return [[Placement(visible[index], _share(cores, index, num_ranks), restricted)
             for index in range(num_ranks)]]


def pin(placement: Placement) -> None:
    """Pin the calling thread to its rank's cores."""
    if placement.pinned:
        os.sched_setaffinity(0, placement.cores)


def _device_count(tp_size: int) -> int:
    text = os.environ.get("LLMC_CPU_DEVICES", str(_DEFAULT_DEVICES))
    if not text.isdecimal() or int(text) < 1:
        raise LlmcError(f"LLMC_CPU_DEVICES is '{text}'; set it to a number of devices above 0")
    return max(int(text), tp_size)


def _visible_devices(count: int) -> list[int]:
    """Physical devices by visible number."""
    text = os.environ.get("LLMC_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    parts = [part.strip() for part in text.split(",") if part.strip()]
    visible = [int(part) for part in parts if part.isdecimal() and int(part) < count]
    if len(visible) < len(parts) or len(set(visible)) < len(visible):
        raise LlmcError(f"LLMC_VISIBLE_DEVICES is '{text}'; list different devices from 0 to "
                        f"{count - 1}, such as 0,1")
    return visible


def _share(cores: Sequence[int], index: int, parts: int) -> tuple[int, ...]:
    """Part `index` of the cores divided into `parts`; with too few cores, round-robin."""
    if len(cores) < parts:
        return (cores[index % len(cores)],)
    return tuple(cores[len(cores) * index // parts:len(cores) * (index + 1) // parts])


def _groups(manifest: Manifest, wish: list[int], devices: int) -> list[list[int]]:
    """Split the given devices into groups of replicas."""
    tp_size = manifest.tp_size
    groups = [list(group) for group in manifest.device_groups if max(group) < devices]
    hint = f"allowed groups: {', '.join(str(group) for group in groups) or 'none'}"
    twice = next((device for device in wish if wish.count(device) > 1), None)
    if twice is not None:
        raise LlmcError(f"device {twice} is listed twice in {wish}; {hint}")
    unknown = next((device for device in wish if not 0 <= device < devices), None)
    if unknown is not None:
        raise LlmcError(f"device {unknown} does not exist; there are 0 to {devices - 1}")
    if not wish or len(wish) % tp_size:
        raise LlmcError(f"{len(wish)} devices cannot run a model of {tp_size} chips; list a "
                        f"multiple of {tp_size}; {hint}")
    replicas = [wish[start:start + tp_size] for start in range(0, len(wish), tp_size)]
    for replica in replicas:
        if replica not in groups:
            raise LlmcError(f"devices {replica} are not a group that this model was compiled for; "
                            f"{hint}")
    return replicas
