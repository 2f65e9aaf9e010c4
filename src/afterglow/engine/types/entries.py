"""Entries of a prompt: tokens, and each image or audio clip as one entry. Contains no text."""

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
TOKEN_BITS = 32  # of an entry that is a token; the bits above are its label
TOKEN_MASK = (1 << TOKEN_BITS) - 1


@dataclass(frozen=True, slots=True)
class Media:
    """Image or audio clip. It is a single entry, so that no match, truncation or checkpoint can fall inside it."""

    digest: bytes  # of the content and of the projector settings that determine its embedding
    cells: int  # KV cells it occupies
    positions: int  # positions it advances; with M-RoPE this differs from the number of cells
    non_causal: bool = False  # its rows attend to each other, so they must be in one decode


Entry: TypeAlias = int | Media


class EntryInterner:
    """Assigns a negative id to each distinct media entry, so that prompts are integer arrays and fast to compare.

    A token can have a label: it equals only the same token with the same label. The first token that is computed with
    other weights than those before it is labelled with these weights, so that no match extends beyond it.
    """

    def __init__(self) -> None:
        self._media_by_id: list[Media] = []
        self._ids_by_media: dict[Media, int] = {}
        self._labels: list[str] = []

    def intern(self, entries: Sequence[Entry] | NDArray[np.generic]) -> Entries:
        """Return the entries as integers: tokens unchanged, equal media as equal negative ids."""
        if isinstance(entries, np.ndarray):
            if entries.ndim != 1 or entries.dtype.kind not in "iu" or (entries.size and int(entries.min()) < 0):
                raise InvalidArgument("entries", "must be a one-dimensional array of token ids")
            return entries.astype(np.int64)
        # Fast path for tokens only, the usual case: one at a time, each entry takes a quarter of a microsecond.
        if set(map(type, entries)) <= {int}:
            with contextlib.suppress(OverflowError):
                tokens = np.array(entries, dtype=np.int64)
                if not tokens.size or tokens.min() >= 0:
                    return tokens
        return np.array([self._intern_entry(entry) for entry in entries], dtype=np.int64)

    def label_token(self, token: int, label: str) -> int:
        """Return the entry for a token with a label."""
        if label not in self._labels:
            self._labels.append(label)
        return (self._labels.index(label) + 1) << TOKEN_BITS | token

    def get_media(self, media_id: int) -> Media:
        return self._media_by_id[-media_id - 1]

    def count_cells(self, entries: Entries) -> int:
        """Return the number of KV cells that these entries occupy."""
        return len(entries) + sum(self.get_media(int(media_id)).cells - 1 for media_id in entries[entries < 0])

    def count_positions(self, entries: Entries) -> int:
        """Return the number of positions that these entries advance."""
        return len(entries) + sum(self.get_media(int(media_id)).positions - 1 for media_id in entries[entries < 0])

    def to_portable_entries(self, entries: Entries) -> Entries:
        """Return the entries with media ids and labels that are the same in every process."""
        if not len(entries) or (entries.min() >= 0 and entries.max() <= TOKEN_MASK):
            return entries
        portable = entries.copy()
        for index in np.flatnonzero(entries < 0):
            portable[index] = -1 - (int.from_bytes(self._hash_media(int(entries[index]))[:8], "little") >> 1)
        for index in np.flatnonzero(entries > TOKEN_MASK):
            entry = int(entries[index])
            number = int.from_bytes(self._hash_label(entry)[:4], "little") >> 1 or 1
            portable[index] = number << TOKEN_BITS | entry & TOKEN_MASK
        return portable

    def from_portable_entries(self, entries: Entries) -> Entries:
        """Return the entries with the media ids of this process.

        Raises `InvalidArgument` if it has not seen one of the media.
        """
        if not len(entries) or entries.min() >= 0:
            return entries
        ids = np.arange(-1, -1 - len(self._media_by_id), -1, dtype=np.int64)
        known = dict(zip(self.to_portable_entries(ids).tolist(), ids.tolist(), strict=True))
        media = entries[entries < 0].tolist()
        if not known.keys() >= set(media):
            raise InvalidArgument("id", "contains images or audio that this engine has not seen since its start")
        interned = entries.copy()
        interned[entries < 0] = [known[portable] for portable in media]
        return interned

    def to_portable_bytes(self, entries: Entries) -> bytes:
        """Return bytes that are the same in every process and differ for different entries."""
        media = b"".join(self._hash_media(int(media_id)) for media_id in entries[entries < 0])
        labels = b"".join(self._hash_label(int(entry)) for entry in entries[entries > TOKEN_MASK])
        return self.to_portable_entries(entries).astype("<i8", copy=False).tobytes() + media + labels

    def _intern_entry(self, entry: Entry) -> int:
        return self._intern_media(entry) if isinstance(entry, Media) else check_integer("entries", entry, 0)

    def _intern_media(self, media: Media) -> int:
        if media not in self._ids_by_media:
            self._media_by_id.append(media)
            self._ids_by_media[media] = -len(self._media_by_id)
        return self._ids_by_media[media]

    def _hash_media(self, media_id: int) -> bytes:
        media = self.get_media(media_id)
        return blake3(repr((media.digest, media.cells, media.positions)).encode()).digest()

    def _hash_label(self, entry: int) -> bytes:
        return blake3(self._labels[(entry >> TOKEN_BITS) - 1].encode()).digest()


class EntryBuffer:
    """Growing array of entries with amortized constant-time append."""

    def __init__(self) -> None:
        self.length = 0
        self._buffer: Entries = np.zeros(64, dtype=np.int64)

    def __len__(self) -> int:
        return self.length

    @property
    def entries(self) -> Entries:
        """View of the entries. Later changes may overwrite it."""
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


def strip_label(entry: int) -> int:
    """Return an entry without its label.

    >>> strip_label(EntryInterner().label_token(7, "adapter")), strip_label(-1)
    (7, -1)
    """
    return entry & TOKEN_MASK if entry > TOKEN_MASK else entry


def strip_labels(entries: Entries) -> Entries:
    """Return the entries without the labels of tokens.

    >>> strip_labels(np.array([7, EntryInterner().label_token(7, "adapter"), -1])).tolist()
    [7, 7, -1]
    """
    if not len(entries) or entries.max() <= TOKEN_MASK:
        return entries
    return np.where(entries > TOKEN_MASK, entries & TOKEN_MASK, entries)


def common_prefix_length(left: Entries, right: Entries) -> int:
    """Return the number of leading entries that two arrays have in common."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def round_down_to_grid(length: int, entries: Entries, grid: int) -> int:
    """Return the end of the last complete chunk within the first `length` entries; without a grid (0), `length`.

    Chunks end at multiples of `grid`, and every media entry is a chunk of its own.

    >>> round_down_to_grid(10, np.array([1, 2, 3, 4, 5, -1, 7, 8, 9, 10]), 4), round_down_to_grid(5, np.arange(5), 4)
    (8, 4)
    >>> round_down_to_grid(7, np.array([1, 2, 3, 4, 5, -1, 7]), 4)
    6
    """
    if not grid:
        return length
    start = length - length % grid
    media = np.flatnonzero(entries[start:length] < 0)
    return start + int(media[-1]) + 1 if len(media) else start
