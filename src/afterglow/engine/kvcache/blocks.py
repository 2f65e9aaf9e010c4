"""Computed cells outside of memory, in stretches of a few entries, each found by all that comes before it. Pure.

Stretches begin at multiples of a fixed length, so conversations that begin alike have the same ones, in this process
and in any other. Only the last of a conversation may be shorter.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length

MAX_CACHED_HASHES = 1024  # names of stretches, about a megabyte with what they are the names of


@dataclass(eq=False, slots=True, kw_only=True)
class Block:
    """The cells of a few entries. `rows` is None while they are on disk only."""

    key: bytes  # names these entries after all those before them
    parent: bytes  # the key of what comes before; of the first, the seed
    start: int  # entries before it
    entries: Entries  # as every process writes them
    aligned: int  # leading entries that were computed on the deterministic grid
    cells: int
    nbytes: int  # in RAM; of one that never was there, of its file
    layout: bytes = b""
    rows: NDArray[np.uint8] | None = None
    file_bytes: int = 0  # 0: it is not on disk
    pinned: bool = False
    hits: int = 0
    last_used: float = field(default_factory=time.monotonic)

    @property
    def is_on_disk(self) -> bool:
        return self.file_bytes > 0

    @property
    def end(self) -> int:
        return self.start + len(self.entries)


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """What of a prompt is stored, from its beginning on: `length` entries, the last segment perhaps only in part."""

    blocks: tuple[Block, ...] = ()
    length: int = 0
    entries: Entries = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of the prompt, so far

    @property
    def next_entry(self) -> int | None:
        """The stored entry that comes after, where there is one."""
        rest = self.length - self.blocks[-1].start if self.blocks else 0
        return int(self.blocks[-1].entries[rest]) if self.blocks and rest < len(self.blocks[-1].entries) else None


class BlockHasher:
    """Names stretches of entries by everything before them: the model and build, the salt, every entry."""

    def __init__(self, model: bytes, interner: EntryInterner, block_size: int) -> None:
        self.block_size = block_size  # entries in a whole segment
        self.model = model  # names everything that decides what stored bytes mean
        self._interner = interner
        self._cached_hash = functools.lru_cache(MAX_CACHED_HASHES)(
            self._hash_block
        )  # a plan asks for the same names several times

    def get_root_key(self, salt: str) -> bytes:
        """Where the chain of a salt begins."""
        return blake3(self.model + salt.encode(), derive_key_context="afterglow prefix seed").digest()

    def hash_block(self, parent: bytes, entries: Entries) -> bytes:
        """The name of these entries after `parent`."""
        return self._cached_hash(parent, entries.tobytes())

    def _hash_block(self, parent: bytes, entry_bytes: bytes) -> bytes:
        return blake3(parent + self._interner.to_portable_bytes(np.frombuffer(entry_bytes, dtype=np.int64))).digest()

    def hash_prefixes(self, entries: Entries, salt: str) -> list[bytes]:
        """The names of all beginnings of `ids` in whole segments, the empty one first."""
        names = [self.get_root_key(salt)]
        for start in range(0, len(entries) - len(entries) % self.block_size, self.block_size):
            names.append(self.hash_block(names[-1], entries[start : start + self.block_size]))
        return names

    def hash_checkpoint(self, parent: bytes, rest: Entries) -> bytes:
        """The name of a checkpoint `rest` entries after `before`."""
        return blake3(self.hash_block(parent, rest), derive_key_context="afterglow prefix checkpoint").digest()


class BlockTree:
    """Which segments there are. One that is here has everything before it here, too."""

    def __init__(self, hasher: BlockHasher, interner: EntryInterner) -> None:
        self.hasher = hasher
        self._interner = interner
        self._by_key: dict[bytes, Block] = {}
        self._children: dict[bytes, list[Block]] = {}  # by the name of their parent
        self.loss_count = 0  # segments that went

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self._by_key.values()))

    def get(self, key: bytes) -> Block | None:
        return self._by_key.get(key)

    def get_children(self, key: bytes) -> list[Block]:
        return self._children.get(key, [])

    def find_stored_prefix(self, entries: Entries, salt: str, *, aligned: bool) -> StoredPrefix:
        """How far a prompt is stored; with `aligned`, as far as it was computed on the deterministic grid."""
        block, name, found, length = self.hasher.block_size, self.hasher.get_root_key(salt), [], 0
        while length < len(entries):
            stretch = entries[length : length + block]
            segment, shared = self._find_best_child(name, stretch)
            if segment is None or not shared:
                break
            found.append(segment)
            usable = min(shared, segment.aligned) if aligned else shared
            length += usable
            if usable < block:
                break
            name = segment.key
        return StoredPrefix(tuple(found), length, entries[:length])

    def _find_best_child(self, parent: bytes, entries: Entries) -> tuple[Block | None, int]:
        """The segment after `parent` that has most in common with `ids`, and how much."""
        written = self._interner.to_portable_entries(entries)
        if len(entries) == self.hasher.block_size:
            whole = self._by_key.get(self.hasher.hash_block(parent, entries))
            if whole is not None and np.array_equal(whole.entries, written):
                return whole, len(entries)
        best, most = None, 0
        for segment in self.get_children(parent):
            shared = common_prefix_length(segment.entries, written)
            if shared > most:
                best, most = segment, shared
        return best, most

    def has_path(self, parent: bytes, rest: Entries) -> bool:
        """Whether everything up to `rest` entries after `parent` is stored."""
        if parent not in self._by_key and not self._is_root_key(parent):
            return False
        return not len(rest) or self._find_best_child(parent, rest)[1] == len(rest)

    def _is_root_key(self, parent: bytes) -> bool:
        return any(segment.start == 0 for segment in self.get_children(parent))

    def add(self, block: Block) -> list[Block]:
        """Take a segment in; the shorter ones that it makes superfluous, which are gone now."""
        assert block.start == 0 or block.parent in self._by_key, "something before it is missing"
        gone = [
            other
            for other in self.get_children(block.parent)
            if other.key != block.key
            and len(other.entries) < len(block.entries)
            and other.aligned <= block.aligned
            and common_prefix_length(other.entries, block.entries) == len(other.entries)
        ]
        if block.key in self._by_key:
            gone.append(self._by_key[block.key])
        for other in gone:
            self._unlink(other)
        self._by_key[block.key] = block
        self._children.setdefault(block.parent, []).append(block)
        return gone

    def remove(self, block: Block) -> list[Block]:
        """Take a segment out, and everything that builds on it; all of these."""
        gone, waiting = [], [block]
        while waiting:
            one = waiting.pop()
            gone.append(one)
            waiting += self.get_children(one.key)
            self._unlink(one)
        return gone

    def _unlink(self, block: Block) -> None:
        self.loss_count += 1
        del self._by_key[block.key]
        siblings = self._children[block.parent]
        siblings.remove(block)
        if not siblings:
            del self._children[block.parent]
