"""What a prompt is made of: tokens, and pictures or clips as single entries. Knows nothing of text."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument
from afterglow.llama.checks import check_integer

Entries: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Media:
    """One picture or clip. It is one entry, so no match, cut or checkpoint can fall inside it."""

    digest: bytes  # of the content and of the projector settings that shape it
    cells: int  # KV cells it fills
    positions: int  # steps it takes; with M-RoPE another number
    non_causal: bool = False  # its rows see one another, so they have to be computed in one go


Entry: TypeAlias = int | Media


class EntryInterner:
    """Gives every media a negative number, so that entries are arrays and a match is one comparison."""

    def __init__(self) -> None:
        self._media_by_id: list[Media] = []
        self._ids_by_media: dict[Media, int] = {}

    def intern(self, entries: Sequence[Entry] | NDArray[np.generic]) -> Entries:
        """The entries as numbers: tokens as they are, equal media as equal negative numbers."""
        if isinstance(entries, np.ndarray):
            if entries.ndim != 1 or entries.dtype.kind not in "iu" or (entries.size and int(entries.min()) < 0):
                raise InvalidArgument("entries", "must be one row of token ids")
            return entries.astype(np.int64)
        if set(map(type, entries)) <= {int}:  # almost always: one by one they take a quarter of a microsecond each
            with contextlib.suppress(OverflowError):
                numbers = np.array(entries, dtype=np.int64)
                if not numbers.size or numbers.min() >= 0:
                    return numbers
        return np.array([self._intern_entry(entry) for entry in entries], dtype=np.int64)

    def _intern_entry(self, entry: Entry) -> int:
        return self._intern_media(entry) if isinstance(entry, Media) else check_integer("entries", entry, 0)

    def get_media(self, media_id: int) -> Media:
        return self._media_by_id[-media_id - 1]

    def count_cells(self, entries: Entries) -> int:
        """KV cells that these entries fill."""
        return len(entries) + sum(self.get_media(int(number)).cells - 1 for number in entries[entries < 0])

    def count_positions(self, entries: Entries) -> int:
        """Positions that these entries take."""
        return len(entries) + sum(self.get_media(int(number)).positions - 1 for number in entries[entries < 0])

    def to_portable_entries(self, entries: Entries) -> Entries:
        """The same entries with numbers for media that are the same in every process."""
        if not len(entries) or entries.min() >= 0:
            return entries
        numbers = entries.copy()
        for index in np.flatnonzero(entries < 0):
            numbers[index] = -1 - (int.from_bytes(self._hash_media(int(entries[index]))[:8], "little") >> 1)
        return numbers

    def to_portable_bytes(self, entries: Entries) -> bytes:
        """The entries as bytes that are the same in every process, and for no other entries."""
        media = b"".join(self._hash_media(int(number)) for number in entries[entries < 0])
        return self.to_portable_entries(entries).astype("<i8", copy=False).tobytes() + media

    def _hash_media(self, media_id: int) -> bytes:
        media = self.get_media(media_id)
        return blake3(repr((media.digest, media.cells, media.positions)).encode()).digest()

    def _intern_media(self, media: Media) -> int:
        if media not in self._ids_by_media:
            self._media_by_id.append(media)
            self._ids_by_media[media] = -len(self._media_by_id)
        return self._ids_by_media[media]


class EntryBuffer:
    """A growing array of entries. Appending does not copy what is there."""

    def __init__(self, entries: Entries | None = None) -> None:
        self.length = 0 if entries is None else len(entries)
        self._buffer: Entries = np.zeros(max(64, 2 * self.length), dtype=np.int64)
        if entries is not None:
            self._buffer[: self.length] = entries

    def __len__(self) -> int:
        return self.length

    @property
    def entries(self) -> Entries:
        """A view that later changes may overwrite."""
        return self._buffer[: self.length]

    def append(self, entry: int) -> None:
        if self.length == len(self._buffer):
            self._grow(1)
        self._buffer[self.length] = entry
        self.length += 1

    def extend(self, entries: Entries) -> None:
        if self.length + len(entries) > len(self._buffer):
            self._grow(len(entries))
        self._buffer[self.length : self.length + len(entries)] = entries
        self.length += len(entries)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length

    def _grow(self, extra: int) -> None:
        larger = np.zeros(2 * (len(self._buffer) + extra), dtype=np.int64)
        larger[: self.length] = self._buffer[: self.length]
        self._buffer = larger


def common_prefix_length(left: Entries, right: Entries) -> int:
    """How many entries two arrays share from the start."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def round_down_to_grid(length: int, entries: Entries, grid: int) -> int:
    """The end of the last whole chunk within the first `length` entries, where chunks end at multiples of `grid` and
    every picture is one by itself.

    >>> last_edge(10, np.array([1, 2, 3, 4, 5, -1, 7, 8, 9, 10]), 4), last_edge(5, np.arange(5), 4)
    (8, 4)
    >>> last_edge(7, np.array([1, 2, 3, 4, 5, -1, 7]), 4)
    6
    """
    start = length - length % grid
    pictures = np.flatnonzero(entries[start:length] < 0)
    return start + int(pictures[-1]) + 1 if len(pictures) else start
