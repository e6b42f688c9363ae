"""Encoder outputs of decoding sequences side by side, as cross-attention reads them in place.

    rows        of the encoder-output buffer: row r has the keys of an input, one after the other
    columns     [num_keys, batch, width] per tensor: column b has the keys of sequence b

Attention to several rows gathers them into columns, in each layer and each step. These columns are
made once for a batch: a step with the same sequences copies nothing, and a step in which some
sequences were replaced copies the columns of these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from llmc.memory import available_memory

_SHARE = 4  # of the available memory, columns take at most this part
_Source = tuple[int, int, int]  # row, first key, number of keys


class MemoryColumns:
    """Columns of the batch that decodes.

    Args:
        rows: the encoder-output buffers, float32 [max_slots, mem_max_seq_len, width], by name.
    """

    def __init__(self, rows: Mapping[str, np.ndarray]) -> None:
        self._rows = rows
        self._key_bytes = sum(4 * buffer.shape[-1] for buffer in rows.values())
        self._seen: list[_Source] = []  # of the last step without columns
        self._sources: list[_Source | None] = []  # of the columns; None: out of date
        self._columns: dict[str, np.ndarray] = {}

    def take(self, rows: np.ndarray, firsts: np.ndarray, lengths: np.ndarray) -> \
            dict[str, np.ndarray] | None:
        """Return the columns of a batch, float32 [most * batch, width] by name.

        Args:
            rows, firsts, lengths: of each sequence int32 [batch]: its row, its first key in it, and
                its number of keys. `most` is the largest number. Keys of a column beyond that of
                its sequence are arbitrary and finite.

        Returns:
            None if the batch has no columns: it decodes for the first time, or they would take too
            much memory.
        """
        sources = list(zip(rows.tolist(), firsts.tolist(), lengths.tolist(), strict=True))
        most = max(length for *_, length in sources)
        if not most:
            return None
        changed = [index for index, source in enumerate(sources)
                   if len(sources) != len(self._sources) or source != self._sources[index]]
        room = len(next(iter(self._columns.values()), ()))
        if most > room or 2 * len(changed) > len(sources):
            self.clear()
            if sources != self._seen or \
                    self._key_bytes * most * len(sources) > available_memory() // _SHARE:
                self._seen = sources
                return None
            self._columns = {name: np.zeros((most, len(sources), buffer.shape[-1]), np.float32)
                             for name, buffer in self._rows.items()}
            changed = [*range(len(sources))]
        for name, buffer in self._rows.items():
            columns = self._columns[name]
            for index in changed:
                row, first, length = sources[index]
                columns[:length, index] = buffer[row, first:first + length]
        self._sources = [*sources]
        return {name: columns[:most].reshape(-1, columns.shape[-1])
                for name, columns in self._columns.items()}

    def forget(self, rows: Collection[int]) -> None:
        """Note that rows of the buffers have changed."""
        self._sources = [None if source and source[0] in rows else source
                         for source in self._sources]

    def clear(self) -> None:
        """Release the memory of the columns."""
        self._columns, self._sources = {}, []
