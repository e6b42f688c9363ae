"""The engine's cache of outputs of encoders of images and audio, as the scheduler accounts for it.

An item of a prompt is identified by the digest of what the encoder reads, so equal items of
several requests are encoded once. Items that running sequences still need are not evicted; of the
others, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from llmc.runtime.multimodal.items import MediaItem


@dataclass
class _Entry:
    place: int
    size: int
    users: int = 0


class EncoderCache:
    """Encoder outputs by the digests of their items.

    Args:
        max_bytes: size of all outputs together. A single item may be larger.
        row_bytes: bytes of an item's row, with those of deep layers.

    Attributes:
        encode: items to encode in the next step, by place.
        freed: places to free before.
        queries, hits: items that sequences needed, and those that were in the cache.
    """

    def __init__(self, max_bytes: int, row_bytes: int) -> None:
        self._max_bytes, self._row_bytes = max_bytes, row_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._size = self._places = 0
        self.encode: dict[int, MediaItem] = {}
        self.freed: list[int] = []
        self.queries = self.hits = 0

    @property
    def num_rows(self) -> int:
        """Rows to encode in the next step."""
        return sum(item.num_rows for item in self.encode.values())

    def has(self, item: MediaItem) -> bool:
        """Whether an item is encoded, or will be in the next step."""
        return item.digest in self._entries

    def has_room(self, item: MediaItem) -> bool:
        """Whether an item fits, if all unused ones are evicted."""
        used = sum(entry.size for entry in self._entries.values() if entry.users)
        return not used or used + self._row_bytes * item.num_rows <= self._max_bytes

    def hold(self, item: MediaItem) -> int:
        """Keep an item for a sequence, which is encoded first if it is not in the cache.

        Returns:
            Its place.
        """
        self.queries += 1
        entry = self._entries.get(item.digest)
        if entry is None:
            entry = _Entry(self._places, self._row_bytes * item.num_rows)
            self._places += 1
            self._evict(entry.size)
            self._entries[item.digest] = entry
            self._size += entry.size
            self.encode[entry.place] = item
        else:
            self.hits += 1
            self._entries.move_to_end(item.digest)
        entry.users += 1
        return entry.place

    def place(self, item: MediaItem) -> int:
        """The place of an item that a sequence holds."""
        return self._entries[item.digest].place

    def release(self, item: MediaItem) -> None:
        """Note that a sequence needs an item no more."""
        self._entries[item.digest].users -= 1

    def take(self) -> tuple[Mapping[int, MediaItem], list[int]]:
        """Return what the next step encodes and frees; see `Step`."""
        encode, freed = self.encode, self.freed
        self.encode, self.freed = {}, []
        return encode, freed

    def _evict(self, size: int) -> None:
        """Evict unused items until one of `size` bytes fits."""
        unused = [digest for digest, entry in self._entries.items() if not entry.users]
        for digest in unused:
            if self._size + size <= self._max_bytes:
                return
            entry = self._entries.pop(digest)
            self._size -= entry.size
            if self.encode.pop(entry.place, None) is None:
                self.freed.append(entry.place)
