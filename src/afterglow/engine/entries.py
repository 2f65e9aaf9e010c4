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
from afterglow.llama.arguments import integer

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Media:
    """One picture or clip. It is one entry, so no match, cut or checkpoint can fall inside it."""

    digest: bytes  # of the content and of the projector settings that shape it
    cells: int  # KV cells it fills
    positions: int  # steps it takes; with M-RoPE another number
    whole: bool = False  # its rows see one another, so they have to be computed in one go


Entry: TypeAlias = int | Media


class Ledger:
    """Gives every media a negative number, so that entries are arrays and a match is one comparison."""

    def __init__(self) -> None:
        self._media: list[Media] = []
        self._numbers: dict[Media, int] = {}

    def ids(self, entries: Sequence[Entry] | NDArray[np.generic]) -> Ids:
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
        return np.array([self._id(entry) for entry in entries], dtype=np.int64)

    def _id(self, entry: Entry) -> int:
        return self._number(entry) if isinstance(entry, Media) else integer("entries", entry, 0)

    def media(self, number: int) -> Media:
        return self._media[-number - 1]

    def cells(self, ids: Ids) -> int:
        """KV cells that these entries fill."""
        return len(ids) + sum(self.media(int(number)).cells - 1 for number in ids[ids < 0])

    def positions(self, ids: Ids) -> int:
        """Positions that these entries take."""
        return len(ids) + sum(self.media(int(number)).positions - 1 for number in ids[ids < 0])

    def stable(self, ids: Ids) -> Ids:
        """The same entries with numbers for media that are the same in every process."""
        if not len(ids) or ids.min() >= 0:
            return ids
        numbers = ids.copy()
        for index in np.flatnonzero(ids < 0):
            numbers[index] = -1 - (int.from_bytes(self._spelled(int(ids[index]))[:8], "little") >> 1)
        return numbers

    def spelled(self, ids: Ids) -> bytes:
        """The entries as bytes that are the same in every process, and for no other entries."""
        media = b"".join(self._spelled(int(number)) for number in ids[ids < 0])
        return self.stable(ids).astype("<i8", copy=False).tobytes() + media

    def _spelled(self, number: int) -> bytes:
        media = self.media(number)
        return blake3(repr((media.digest, media.cells, media.positions)).encode()).digest()

    def _number(self, media: Media) -> int:
        if media not in self._numbers:
            self._media.append(media)
            self._numbers[media] = -len(self._media)
        return self._numbers[media]


class Record:
    """A growing array of entries. Appending does not copy what is there."""

    def __init__(self, ids: Ids | None = None) -> None:
        self.length = 0 if ids is None else len(ids)
        self._buffer: Ids = np.zeros(max(64, 2 * self.length), dtype=np.int64)
        if ids is not None:
            self._buffer[: self.length] = ids

    def __len__(self) -> int:
        return self.length

    @property
    def ids(self) -> Ids:
        """A view that later changes may overwrite."""
        return self._buffer[: self.length]

    def append(self, number: int) -> None:
        if self.length == len(self._buffer):
            self._grow(1)
        self._buffer[self.length] = number
        self.length += 1

    def extend(self, ids: Ids) -> None:
        if self.length + len(ids) > len(self._buffer):
            self._grow(len(ids))
        self._buffer[self.length : self.length + len(ids)] = ids
        self.length += len(ids)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length

    def _grow(self, room: int) -> None:
        larger = np.zeros(2 * (len(self._buffer) + room), dtype=np.int64)
        larger[: self.length] = self._buffer[: self.length]
        self._buffer = larger


def common_prefix(one: Ids, other: Ids) -> int:
    """How many entries two arrays share from the start."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def last_edge(length: int, ids: Ids, grid: int) -> int:
    """The end of the last whole chunk within the first `length` entries, where chunks end at multiples of `grid` and
    every picture is one by itself.

    >>> last_edge(10, np.array([1, 2, 3, 4, 5, -1, 7, 8, 9, 10]), 4), last_edge(5, np.arange(5), 4)
    (8, 4)
    >>> last_edge(7, np.array([1, 2, 3, 4, 5, -1, 7]), 4)
    6
    """
    start = length - length % grid
    pictures = np.flatnonzero(ids[start:length] < 0)
    return start + int(pictures[-1]) + 1 if len(pictures) else start
