"""Blocks of stored KV cells, content-addressed by all entries up to their end. Pure data structures, no I/O.

Blocks start at multiples of the block size, so prompts with a common prefix have the same blocks, in every process.
Only the last block of a prompt may be shorter.
"""

from __future__ import annotations

import bisect
import functools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.engine.kvcache.budget import ByteBudget
from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length

BLOCK_TABLE_BYTES = 800  # of the tables for one block, beside its entries; measured with tracemalloc
MAX_CACHED_HASHES = 1024  # about one megabyte with the entries that are hashed


@dataclass(eq=False, slots=True, kw_only=True)
class Block:
    """KV cells of up to `block_size` entries. `rows` is None if they are not in RAM."""

    key: bytes  # hash of these entries and all entries before them
    parent: bytes  # key of the previous block; of the first block, the root key of its namespace
    start: int  # number of entries before it
    entries: Entries  # portable: the same in every process
    cells: int
    nbytes: int  # bytes of `rows`, or of its file if it was never in RAM
    layout: bytes = b""
    rows: NDArray[np.uint8] | None = None
    file_bytes: int = 0  # 0: not on disk
    object_bytes: int = 0  # 0: not in the object store, as far as known
    pinned_until: float = 0.0  # wall-clock time; infinite for a pin without expiry, 0 if it is not pinned
    hits: int = 0
    last_used: float = field(default_factory=time.monotonic)

    @property
    def pinned(self) -> bool:
        return self.pinned_until > 0.0

    @property
    def is_on_disk(self) -> bool:
        return self.file_bytes > 0

    @property
    def end(self) -> int:
        return self.start + len(self.entries)

    @property
    def table_bytes(self) -> int:
        """Bytes in RAM without the rows, also if the block is only on disk."""
        return BLOCK_TABLE_BYTES + self.entries.nbytes


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Prefix of a prompt that is stored: `length` entries. Its last block may extend beyond it."""

    blocks: tuple[Block, ...] = ()
    length: int = 0
    entries: Entries = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # the prompt up to `length`

    def cut(self, blocks: int) -> StoredPrefix:
        """Return the part of the prefix in its first blocks."""
        length = self.blocks[blocks].start if blocks < len(self.blocks) else self.length
        return StoredPrefix(self.blocks[:blocks], length, self.entries[:length])

    @property
    def next_entry(self) -> int | None:
        """Stored entry after the prefix, if there is one."""
        offset = self.length - self.blocks[-1].start if self.blocks else 0
        return int(self.blocks[-1].entries[offset]) if self.blocks and offset < len(self.blocks[-1].entries) else None


class BlockHasher:
    """Computes block keys: chained hashes of model and build, namespace, and all entries up to the end of the block."""

    def __init__(self, model: bytes, interner: EntryInterner, block_size: int) -> None:
        self.block_size = block_size
        self.model = model  # hash of everything that determines the meaning of stored bytes
        self._interner = interner
        # A plan needs the same hashes several times.
        self._cached_hash = functools.lru_cache(MAX_CACHED_HASHES)(self._hash_block)

    def get_root_key(self, namespace: str) -> bytes:
        """Return the parent key of the first block of a namespace."""
        return blake3(self.model + namespace.encode(), derive_key_context="afterglow prefix seed").digest()

    def hash_block(self, parent: bytes, entries: Entries) -> bytes:
        """Return the key of the block with these entries after `parent`."""
        return self._cached_hash(parent, entries.tobytes())

    def _hash_block(self, parent: bytes, entry_bytes: bytes) -> bytes:
        return blake3(parent + self._interner.to_portable_bytes(np.frombuffer(entry_bytes, dtype=np.int64))).digest()

    def hash_prefixes(self, entries: Entries, namespace: str) -> list[bytes]:
        """Return the keys of all prefixes of `entries` that consist of full blocks, the empty prefix first."""
        keys = [self.get_root_key(namespace)]
        for start in range(0, len(entries) - len(entries) % self.block_size, self.block_size):
            keys.append(self.hash_block(keys[-1], entries[start : start + self.block_size]))
        return keys

    def hash_logits(self, parent: bytes, rest: Entries) -> bytes:
        """Return the key of the logits after `parent` and the entries `rest`."""
        return blake3(self.hash_block(parent, rest), derive_key_context="afterglow prefix logits").digest()

    def hash_checkpoint(self, parent: bytes, rest: Entries) -> bytes:
        """Return the key of a checkpoint after `parent` and the entries `rest`."""
        return blake3(self.hash_block(parent, rest), derive_key_context="afterglow prefix checkpoint").digest()


class BlockHolder(Protocol):
    """Tier as the tree sees it."""

    def holds(self, block: Block) -> bool: ...

    def forget(self, block: Block) -> None: ...


class BlockTree:
    """Index of all stored blocks, of all tiers. Invariant: the parent of every block is in the tree."""

    def __init__(self, hasher: BlockHasher, interner: EntryInterner, budget: ByteBudget) -> None:
        """`budget` is that of the RAM."""
        self.hasher = hasher
        self.budget = budget
        self.holders: list[BlockHolder] = []  # the tiers
        self._interner = interner
        self._by_key: dict[bytes, Block] = {}
        self._children: dict[bytes, list[Block]] = {}  # by parent key, in the order of `get_sort_key`
        self.loss_count = 0  # number of blocks removed so far
        self.path_loss_count = 0  # number of them that no longer block has replaced

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self._by_key.values()))

    def get(self, key: bytes) -> Block | None:
        return self._by_key.get(key)

    def get_children(self, key: bytes) -> list[Block]:
        return self._children.get(key, [])

    def find_stored_prefix(self, entries: Entries, namespace: str) -> StoredPrefix:
        """Return the longest stored prefix of a prompt."""
        block_size, parent, blocks, length = self.hasher.block_size, self.hasher.get_root_key(namespace), [], 0
        while length < len(entries):
            block, shared = self._find_best_child(parent, entries[length : length + block_size])
            if block is None or not shared:
                break
            blocks.append(block)
            length += shared
            if shared < block_size:
                break
            parent = block.key
        return StoredPrefix(tuple(blocks), length, entries[:length])

    def _find_best_child(self, parent: bytes, entries: Entries) -> tuple[Block | None, int]:
        """Return the child of `parent` with the longest common prefix with `entries`, and its length."""
        portable = self._interner.to_portable_entries(entries)
        if len(entries) == self.hasher.block_size:
            full_block = self._by_key.get(self.hasher.hash_block(parent, entries))
            if full_block is not None and np.array_equal(full_block.entries, portable):
                return full_block, len(entries)
        siblings = self.get_children(parent)
        place = bisect.bisect_left(siblings, portable.tobytes(), key=get_sort_key)
        best, best_length = None, 0
        for child in siblings[max(0, place - 1) : place + 1]:  # the longest common prefix is that of a neighbor
            shared = common_prefix_length(child.entries, portable)
            if shared > best_length:
                best, best_length = child, shared
        return best, best_length

    def has_path(self, parent: bytes, rest: Entries) -> bool:
        """Return whether everything up to the entries `rest` after `parent` is stored."""
        is_root_key = any(block.start == 0 for block in self.get_children(parent))
        if parent not in self._by_key and not is_root_key:
            return False
        return not len(rest) or self._find_best_child(parent, rest)[1] == len(rest)

    def find_paths(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return the keys of these blocks and of all blocks before them."""
        found: set[bytes] = set()
        for key in keys:
            block = self.get(key)
            while block is not None and block.key not in found:
                found.add(block.key)
                block = self.get(block.parent)
        return found

    def add(self, block: Block) -> list[Block]:
        """Add a block; remove and return the shorter blocks that it makes redundant. It replaces one with its key."""
        assert block.start == 0 or block.parent in self._by_key, "the parent of the block is not in the tree"
        redundant = self._find_shorter(block)
        for sibling in redundant:
            self._unlink(sibling)
        if (replaced := self._by_key.get(block.key)) is not None:
            self._forget(replaced)
        self._by_key[block.key] = block
        self.budget.add("tables", block.table_bytes)
        bisect.insort(self._children.setdefault(block.parent, []), block, key=get_sort_key)
        return redundant

    def _find_shorter(self, block: Block) -> list[Block]:
        """Return the siblings whose entries are a prefix of those of a block, without one of the same length."""
        siblings, found, length = self.get_children(block.parent), [], len(block.entries) - 1
        while length > 0:
            place = bisect.bisect_right(siblings, block.entries[:length].tobytes(), key=get_sort_key)
            if place == 0:
                break
            sibling = siblings[place - 1]
            shared = common_prefix_length(sibling.entries, block.entries[:length])
            if shared == len(sibling.entries):
                found.append(sibling)
            length = shared if shared < len(sibling.entries) else shared - 1
        return found

    def remove(self, block: Block) -> None:
        """Remove a block and all its descendants, unless it has left the tree already."""
        pending = [block] if self.get(block.key) is block else []
        while pending:
            descendant = pending.pop()
            pending += self.get_children(descendant.key)
            self._forget(descendant)
            self.path_loss_count += 1

    def remove_unreferenced(self, block: Block) -> None:
        """Remove a block and all its descendants if no tier holds it."""
        if not any(holder.holds(block) for holder in self.holders):
            self.remove(block)

    def _forget(self, block: Block) -> None:
        self._unlink(block)
        for holder in self.holders:
            holder.forget(block)

    def _unlink(self, block: Block) -> None:
        self.loss_count += 1
        self.budget.remove("tables", block.table_bytes)
        del self._by_key[block.key]
        siblings = self._children[block.parent]
        place = bisect.bisect_left(siblings, get_sort_key(block), key=get_sort_key)
        del siblings[siblings.index(block, place)]
        if not siblings:
            del self._children[block.parent]


def get_sort_key(block: Block) -> bytes:
    """Return the key by which siblings are sorted: of two blocks, the nearer one shares the longer prefix."""
    return block.entries.tobytes()
