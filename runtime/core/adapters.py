"""LoRA adapters at run time: those that are loaded, and those in the engine's slots."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmc.artifacts.adapter import AdapterInfo, Matrices, load_adapter, read_adapter_info
from llmc.artifacts.manifest import MANIFEST_NAME, Manifest, hash_file
from llmc.errors import LlmcError, shortened, shown
from llmc.runtime.sampling.params import is_unicode

MIN_LORA_RANK = 16  # default of max_lora_rank without adapters of higher ranks
_MAX_NAME = 256


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter, in host memory.

    Args:
        name: what requests call it.
        path: its directory.
        info: its description.
        key: identifies its weights in names of cached blocks.
        matrices: of each rank.
    """

    name: str
    path: Path
    info: AdapterInfo
    key: bytes = field(repr=False)
    matrices: Sequence[Matrices] = field(repr=False)


class AdapterSlots:
    """The engine's slots of adapters. Without a user an adapter stays until its slot is needed.

    Args:
        count: number of slots.
    """

    def __init__(self, count: int) -> None:
        self._slots: OrderedDict[Adapter, int] = OrderedDict()  # least recently used first
        self._free = list(reversed(range(count)))
        self._users: Counter[Adapter] = Counter()

    def has_room(self, adapter: Adapter) -> bool:
        """Whether the adapter has a slot, or can get one."""
        return adapter in self._slots or bool(self._free) or self._idle() is not None

    def slot(self, adapter: Adapter) -> int:
        return self._slots[adapter]

    def hold(self, adapter: Adapter) -> bool:
        """Add a user; return whether the adapter is new in its slot. It must have room."""
        is_new = adapter not in self._slots
        if is_new:
            if not self._free:
                idle = self._idle()
                assert idle is not None, "no slot"
                self._free.append(self._slots.pop(idle))
            self._slots[adapter] = self._free.pop()
        self._slots.move_to_end(adapter)
        self._users[adapter] += 1
        return is_new

    def release(self, adapter: Adapter) -> None:
        """Remove a user."""
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]

    def forget(self, adapter: Adapter) -> None:
        """Free the slot of an adapter without users."""
        assert not self._users[adapter]
        if adapter in self._slots:
            self._free.append(self._slots.pop(adapter))

    def _idle(self) -> Adapter | None:
        """The least recently used adapter without users."""
        return next((adapter for adapter in self._slots if not self._users[adapter]), None)


class AdapterRegistry:
    """The loaded adapters of a model, by name; usable from any thread.

    Args:
        manifest: of the model.
        case_dir: its case directory.
        max_rank: highest rank; None: set by `fix_rank`.
        verify: check the digests of files.

    Attributes:
        base_sha256: digest of model_info.json, which adapters name; "": the model takes none.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, max_rank: int | None,
                 verify: bool) -> None:
        self._manifest, self._case_dir, self._verify = manifest, case_dir, verify
        self.max_rank = max_rank
        self.base_sha256 = hash_file(case_dir / MANIFEST_NAME) if manifest.takes_adapters else ""
        self._loaded: dict[str, Adapter] = {}
        self._lock = threading.Lock()

    def load(self, name: object, path: object) -> Adapter:
        """Load an adapter.

        Raises:
            LlmcError: the model takes no adapters, the name is taken or invalid, or the adapter is
                of another base, damaged, or of too high a rank.
        """
        read, directory = _read_name(name), _read_path(path)
        if not self._manifest.takes_adapters:
            raise LlmcError(f"'{self._case_dir}' takes no adapters; compile it again with "
                            f"--enable_lora")
        with self._lock:
            if read in self._loaded:
                raise LlmcError(f"an adapter named '{read}' is loaded already; unload it first, or "
                                f"choose another name")
        info, matrices = load_adapter(directory, self._manifest, self.base_sha256,
                                      verify=self._verify)
        if self.max_rank is not None and info.rank > self.max_rank:
            raise LlmcError(f"the adapter '{read}' has rank {info.rank}, above max_lora_rank "
                            f"{self.max_rank}; load the model with max_lora_rank={info.rank}")
        key = bytes.fromhex(info.base_sha256) + b"".join(
            bytes.fromhex(entry.sha256) for entry in info.files)
        adapter = Adapter(read, directory, info, key, matrices)
        with self._lock:
            if self._loaded.setdefault(read, adapter) is not adapter:
                raise LlmcError(f"an adapter named '{read}' is loaded already; unload it first, or "
                                f"choose another name")
        return adapter

    def fix_rank(self) -> int:
        """Set the highest rank from the loaded adapters, unless it is set, and return it."""
        if self.max_rank is None:
            self.max_rank = max([MIN_LORA_RANK, *(own.info.rank for own in self.all().values())])
        return self.max_rank

    def all(self) -> Mapping[str, Adapter]:
        """The loaded adapters by name."""
        with self._lock:
            return dict(self._loaded)

    def find(self, name: object) -> Adapter | None:
        """Return the adapter of a name; None for None.

        Raises:
            LlmcError: no adapter has this name.
        """
        if name is None:
            return None
        loaded = self.all()
        if not isinstance(name, str) or name not in loaded:
            known = f"loaded are {', '.join(map(repr, sorted(loaded)))}" if loaded \
                else "none is loaded"
            raise LlmcError(f"there is no adapter {shown(name)}; {known}")
        return loaded[name]

    def remove(self, name: object) -> Adapter:
        """Remove an adapter, so that new requests cannot use it.

        Raises:
            LlmcError: no adapter has this name.
        """
        adapter = self.find(_read_name(name))
        assert adapter is not None
        with self._lock:
            self._loaded.pop(adapter.name, None)
        return adapter

    def restore(self, adapter: Adapter) -> None:
        """Undo `remove`."""
        with self._lock:
            self._loaded.setdefault(adapter.name, adapter)


def base_of(name: str, path: object, bases: Mapping[str, str]) -> str:
    """Return the model that an adapter was compiled for.

    Args:
        name: of the adapter, for errors.
        path: its directory.
        bases: digests of model_info.json by models' names, of those that take adapters.

    Raises:
        LlmcError: the directory is no compiled adapter, or that of none of the models or of
            several.
    """
    directory = _read_path(path)
    if not bases:
        raise LlmcError(f"the adapter '{shortened(name)}' is given, but no model takes adapters; "
                        f"compile its base again with --enable_lora")
    digest = read_adapter_info(directory).base_sha256
    found = [model for model, own in bases.items() if own == digest]
    if len(found) == 1:
        return found[0]
    given = f"the adapter '{shortened(name)}' in '{directory}' was compiled for"
    if found:
        raise LlmcError(f"{given} '{found[0]}' and '{found[1]}', which are equal; serve one of "
                        f"them")
    others = " and ".join(f"'{model}'" for model in bases)
    raise LlmcError(f"{given} another case directory than {others}; compile it for one that is "
                    f"served")


def _read_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not is_unicode(name) \
            or not name.isprintable():
        raise LlmcError(f"the name of an adapter is {shown(name)}; give a text of 1 to {_MAX_NAME} "
                        f"printable characters")
    return name


def _read_path(path: object) -> Path:
    if not isinstance(path, str | Path):
        raise LlmcError(f"the directory of an adapter is {shown(path)}; give the output of "
                        f"`llmc adapter`")
    return Path(path)
