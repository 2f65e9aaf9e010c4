"""Tiered store of the prefix cache: moves KV cells between sequences, the RAM tier and the disk tier behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.engine.kvcache.blocks import Block, BlockHasher, BlockTree, StoredPrefix
from afterglow.engine.kvcache.checkpoints import Checkpoint, CheckpointStore
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.disk.tier import DiskCheckpoint, open_disk_tier
from afterglow.engine.kvcache.eviction import compute_log_value, compute_rank, find_victim
from afterglow.engine.kvcache.pins import PinManager
from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.kvcache.sequence import Sequence
from afterglow.engine.types.backend import Backend, BackendCells, BackendState
from afterglow.engine.types.counters import TierCounters
from afterglow.engine.types.entries import Entries, EntryInterner
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidState
from afterglow.llama import page_buffers


class TieredStore:
    """Stores the cells of sequences as blocks, each prefix once, and builds states from them again.

    `swapped_bytes` returns the bytes of swapped-out sequences, which count towards the RAM budget.
    """

    def __init__(
        self,
        backend: Backend,
        interner: EntryInterner,
        cost_model: CostModel,
        settings: EngineSettings,
        *,
        grid: int,
        checkpoints: CheckpointStore,
        swapped_bytes: Callable[[], int],
    ) -> None:
        self.ram = RamTier(settings.ram_cache_limit, lambda: checkpoints.nbytes + swapped_bytes())
        self.ram_counters = TierCounters()
        self.disk_counters = TierCounters()
        # This text is an input of the keys of stored files: changing it invalidates them.
        model = blake3(backend.state_key + f" grid {grid} segment {settings.block_size}".encode()).digest()
        self.hasher = BlockHasher(model, interner, settings.block_size)
        self.tree = BlockTree(self.hasher, interner)
        self._backend = backend
        self._interner = interner
        self._cost_model = cost_model
        self._deterministic = bool(grid)
        self._checkpoints = checkpoints
        self.disk_tier = open_disk_tier(settings, model, backend, interner, cost_model, self.ram.get, checkpoints.find)
        self._bytes_per_entry = 0.0  # of the last stored sequence; 0: none was stored yet
        self.pin_manager = PinManager(self.ram, checkpoints, self.tree, self.disk_tier, lambda: self._bytes_per_entry)
        self._protected: set[bytes] = set()  # keys of blocks that must not be evicted now

    # --- lookup

    def find_stored_prefix(self, entries: Entries, salt: str) -> StoredPrefix:
        """Return the longest prefix of a prompt that is stored."""
        self.refresh()
        return self.tree.find_stored_prefix(entries, salt, aligned=self._deterministic)

    def refresh(self) -> None:
        """Apply the file events of the disk tier to the tree."""
        if self.disk_tier is not None:
            for block in self.disk_tier.sync(self.tree):
                if block in self.ram:
                    self.ram.drop(block)

    def find_checkpoints(self, entries: Entries, salt: str) -> list[Checkpoint]:
        """Return the checkpoints on the path of a prompt, in RAM and on disk, deepest first."""
        checkpoints = list(self._checkpoints.find_on_path(entries, salt))
        if self.disk_tier is None:
            return checkpoints
        self.refresh()
        positions = {checkpoint.position for checkpoint in checkpoints}
        prefix_keys = self.hasher.hash_prefixes(entries, salt)
        for on_disk in self.disk_tier.find_checkpoints(prefix_keys, entries, self.hasher.block_size):
            if on_disk.position not in positions:
                checkpoints.append(self.build_checkpoint(entries[: on_disk.position], salt, on_disk, on_disk.aligned))
        return sorted(checkpoints, key=lambda checkpoint: -checkpoint.position)

    def build_checkpoint(self, entries: Entries, salt: str, state: BackendState, aligned: int) -> Checkpoint:
        """Return a checkpoint after these entries, with its keys."""
        parent = self.hasher.hash_prefixes(entries, salt)[-1]
        start = len(entries) - len(entries) % self.hasher.block_size
        key = self.hasher.hash_checkpoint(parent, entries[start:])
        return Checkpoint(entries=entries, state=state, aligned=aligned, salt=salt, parent=parent, start=start, key=key)

    def has_cells_for(self, checkpoint: Checkpoint) -> bool:
        """Return whether all cells before a checkpoint are stored."""
        return self.tree.has_path(checkpoint.parent, checkpoint.entries[checkpoint.start :])

    def estimate_load_seconds(self, stored_prefix: StoredPrefix, reuse_length: int) -> float:
        """Return the expected seconds to load the first entries of a stored prefix into the KV cache."""
        moved = reuse_length * (self._bytes_per_entry or self._cost_model.bytes_per_entry)
        read = sum(block.nbytes for block in stored_prefix.blocks if block.rows is None)
        return moved * self._cost_model.seconds_per_byte + read * self._cost_model.seconds_per_disk_byte

    def estimate_checkpoint_seconds(self, checkpoint: Checkpoint) -> float:
        """Return the expected seconds to load a checkpoint."""
        on_disk = isinstance(checkpoint.state, DiskCheckpoint)
        return checkpoint.nbytes * (
            self._cost_model.seconds_per_byte + on_disk * self._cost_model.seconds_per_disk_byte
        )

    # --- storing

    def store_sequence(self, sequence: Sequence, partial: BackendState | None) -> bool:
        """Store the cells of a sequence; `partial` is its partial state.

        Return False if there is no space or the cells cannot be extracted.
        """
        length = sequence.aligned if self._deterministic else len(sequence)
        entries = sequence.entries[:length].copy()
        stored_prefix = self.find_stored_prefix(entries, sequence.namespace)
        self.ram.touch(stored_prefix.blocks, time.monotonic())
        if stored_prefix.length == length:
            return True
        full_blocks_length = stored_prefix.length - stored_prefix.length % self.hasher.block_size
        bytes_per_entry = self._bytes_per_entry or self._backend.get_state_size(sequence.seq_id, "full") / len(sequence)
        needed = (length - full_blocks_length) * bytes_per_entry
        protected = {block.key for block in stored_prefix.blocks}
        if not self.evict_until_free(int(needed), protected):
            self.ram_counters.rejected_saves += 1
            return False
        cells = self._save_cells(sequence, partial)
        if cells is None or len(cells) != self._interner.count_cells(sequence.entries):
            return False
        return self._store_blocks(cells, entries, sequence, stored_prefix)

    def _save_cells(self, sequence: Sequence, partial: BackendState | None) -> BackendCells | None:
        started = time.perf_counter()
        state = self._backend.save(sequence.seq_id, "full")
        cells = self._backend.extract_cells(state, partial)
        self._cost_model.record_transfer(state.nbytes, time.perf_counter() - started, len(sequence))
        return cells

    def _store_blocks(
        self, cells: BackendCells, entries: Entries, sequence: Sequence, stored_prefix: StoredPrefix
    ) -> bool:
        """Add blocks for the entries after the full blocks that are already stored."""
        block_size = self.hasher.block_size
        path = [
            block
            for block in stored_prefix.blocks
            if len(block.entries) == block_size and block.end <= stored_prefix.length
        ]
        start = len(path) * block_size
        starts = range(start, len(entries), block_size)
        chunks = [entries[chunk_start : chunk_start + block_size] for chunk_start in starts]
        cell_counts = [self._interner.count_cells(chunk) for chunk in chunks]
        needed = (
            sum(page_buffers.get_allocated_bytes(count * cells.cell_bytes) for count in cell_counts)
            + (len(entries) - start) * entries.itemsize
        )
        self._bytes_per_entry = needed / max(len(entries) - start, 1)
        if not self.evict_until_free(needed, {block.key for block in path}):
            self.ram_counters.rejected_saves += 1
            return False
        parent = path[-1].key if path else self.hasher.get_root_key(sequence.namespace)
        first_cell = self._interner.count_cells(entries[:start])
        for chunk_start, chunk, count in zip(starts, chunks, cell_counts, strict=True):
            rows = cells.copy_rows(first_cell, first_cell + count)
            block = self._build_block(parent, chunk_start, chunk, rows, cells.layout, sequence)
            self._add_block(block)
            path.append(block)
            parent, first_cell = block.key, first_cell + count
        self.ram.touch(path, time.monotonic())
        self.ram_counters.saves += 1
        self.ram_counters.saved_bytes += needed
        self.pin_manager.enforce_limit()
        return True

    def _build_block(
        self, parent: bytes, start: int, entries: Entries, rows: NDArray[np.uint8], layout: bytes, sequence: Sequence
    ) -> Block:
        portable = self._interner.to_portable_entries(entries).copy()
        return Block(
            key=self.hasher.hash_block(parent, entries),
            parent=parent,
            start=start,
            entries=portable,
            aligned=min(max(sequence.aligned - start, 0), len(entries)),
            cells=len(rows),
            nbytes=page_buffers.get_allocated_bytes(rows.nbytes) + portable.nbytes,
            layout=layout,
            rows=rows,
            pinned=self.is_pinned(sequence.entries, sequence.namespace, start),
        )

    def _add_block(self, block: Block) -> None:
        redundant_blocks = self.tree.add(block)
        for redundant in redundant_blocks:
            if redundant in self.ram:
                self.ram.drop(redundant)
        self.ram.put(block)
        if self.disk_tier is not None:
            self.disk_tier.enqueue(block)
            for redundant in redundant_blocks:
                if redundant.is_on_disk and redundant.key != block.key:
                    self.disk_tier.writer.remove("cells", redundant.key)

    def write_checkpoints(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Queue checkpoints for writing to disk."""
        if self.disk_tier is not None:
            for checkpoint in checkpoints:
                self.disk_tier.enqueue(checkpoint)

    def write_stored(self, entries: Entries, salt: str) -> None:
        """Queue the blocks and checkpoints of a stored prompt that are not on disk, e.g. after another process removed
        their files."""
        if self.disk_tier is not None:
            for block in self.find_stored_prefix(entries, salt).blocks:
                self.disk_tier.enqueue(block)
            self.write_checkpoints(self._checkpoints.find_on_path(entries, salt))

    # --- eviction from RAM

    def evict_until_free(self, nbytes: int, protected: set[bytes] | None = None) -> bool:
        """Evict by lowest value until `nbytes` of the RAM budget are free; return False if that is not possible.

        Blocks with a key in `protected` are not evicted.
        """
        if nbytes > self.ram.limit - self.pin_manager.nbytes:
            return False
        while self.ram.free_bytes < nbytes:
            if not self._evict_one((protected or set()) | self._protected):
                return False
        return True

    def _evict_one(self, protected: set[bytes]) -> bool:
        """Evict the least recently used block or the least valuable checkpoint, whichever has the lower rank."""
        block, checkpoint = find_victim(self.ram, protected), self._checkpoints.find_victim()
        if block is None and checkpoint is None:
            return False
        self.ram_counters.evictions += 1
        if checkpoint is None or (
            block is not None and self._compute_block_rank(block) <= self._checkpoints.compute_rank(checkpoint)
        ):
            assert block is not None
            self._evict_block(block)
        else:
            self._checkpoints.drop(checkpoint)
        return True

    def _compute_block_rank(self, block: Block) -> float:
        """Return the rank of a block. If cells alone do not suffice, its value is that of its checkpoints."""
        seconds, nbytes = len(block.entries) * self._cost_model.seconds_per_entry, block.nbytes
        if self._backend.capabilities.has_partial_state:
            checkpoints = self._find_checkpoints_in(block)
            seconds = sum(self._checkpoints.estimate_seconds_saved(checkpoint) for checkpoint in checkpoints)
            nbytes += sum(checkpoint.nbytes for checkpoint in checkpoints)
        return compute_rank(compute_log_value(seconds, nbytes), block.last_used)

    def _find_checkpoints_in(self, block: Block) -> list[Checkpoint]:
        """Return the checkpoints with a position in, or right after, a block."""
        return [
            checkpoint
            for checkpoint in self._checkpoints.all_checkpoints
            if checkpoint.parent == block.key
            or (checkpoint.parent == block.parent and checkpoint.position > block.start)
        ]

    def _evict_block(self, block: Block) -> None:
        """Remove a block from RAM. If it is on disk it stays in the tree."""
        self.ram.drop(block)
        if not block.is_on_disk:
            self._remove_from_tree(block)

    def _remove_from_tree(self, block: Block) -> None:
        """Remove a block and its descendants from the tree and from RAM, unless a file event has removed it already."""
        if self.tree.get(block.key) is block:
            for removed in self.tree.remove(block):
                if removed in self.ram:
                    self.ram.drop(removed)

    # --- loading

    def protect(self, stored_prefix: StoredPrefix) -> None:
        """Do not evict the blocks of this prefix until `unprotect`."""
        self.ram.touch(stored_prefix.blocks, time.monotonic())
        self._protected = {block.key for block in stored_prefix.blocks}

    def unprotect(self) -> None:
        self._protected = set()

    def prefetch(self, stored_prefix: StoredPrefix, reuse_length: int, checkpoint: Checkpoint | None) -> bool:
        """Start reading what a plan needs from disk, on another thread; return whether it is not complete yet."""
        if self.disk_tier is None:
            return False
        on_disk = checkpoint.state if checkpoint is not None and isinstance(checkpoint.state, DiskCheckpoint) else None
        return self.disk_tier.prefetch([block for block in stored_prefix.blocks if block.start < reuse_length], on_disk)

    def load(
        self, sequence: Sequence, entries: Entries, stored_prefix: StoredPrefix, checkpoint: Checkpoint | None
    ) -> None:
        """Load `entries` into a sequence from a stored prefix of at least that length.

        Raise `InvalidState` if blocks are missing or damaged.
        """
        started = time.perf_counter()
        from_disk = checkpoint is not None and isinstance(checkpoint.state, DiskCheckpoint)
        from_disk = from_disk or any(block.rows is None for block in stored_prefix.blocks)
        partial = None if checkpoint is None else self.load_checkpoint_state(checkpoint)
        row_arrays, length, used = [], 0, []
        for block in stored_prefix.blocks:
            if length >= len(entries):
                break
            rows = self._load_rows(block)
            count = min(len(block.entries), len(entries) - length)
            row_arrays.append(rows[: self._interner.count_cells(entries[length : length + count])])
            used.append(block)
            length += count
        if length != len(entries) or len({block.layout for block in used}) != 1:
            raise InvalidState(f"only {length} of {len(entries)} entries are stored")
        position = self._interner.count_positions(entries)
        state = self._backend.assemble_state(used[0].layout, row_arrays, partial, position)
        sequence.load(entries, state, len(entries) if self._deterministic else 0)
        seconds, nbytes = time.perf_counter() - started, sum(rows.nbytes for rows in row_arrays)
        self._cost_model.record_transfer(nbytes, seconds, 0)
        self.ram.touch(used, time.monotonic())
        self.count_hit(len(entries), nbytes, seconds, checkpoint, used, from_disk=from_disk)

    def _load_rows(self, block: Block) -> NDArray[np.uint8]:
        if block.rows is not None:
            return block.rows
        if self.disk_tier is None:
            raise InvalidState("a block is missing")
        try:
            rows = self.disk_tier.load_rows(block)
            self._promote(block, rows)
            return rows
        except InvalidState:
            self._remove_from_tree(block)
            raise

    def _promote(self, block: Block, rows: NDArray[np.uint8]) -> None:
        """Copy a block that was read from disk to RAM, if this needs no eviction and it is still in the tree."""
        nbytes = page_buffers.get_allocated_bytes(rows.nbytes) + block.entries.nbytes
        if nbytes <= self.ram.free_bytes and self.tree.get(block.key) is block:
            block.rows, block.nbytes = page_buffers.copy_to_pages(rows), nbytes
            self.ram.put(block)

    def load_checkpoint_state(self, checkpoint: Checkpoint) -> BackendState:
        """Return the partial state of a checkpoint. One that is read from disk is also added to RAM."""
        checkpoint.last_used = time.monotonic()
        if not isinstance(checkpoint.state, DiskCheckpoint):
            return checkpoint.state
        assert self.disk_tier is not None
        state = self.disk_tier.load_state(checkpoint.state, checkpoint.entries)
        in_ram = replace(checkpoint, entries=checkpoint.entries.copy(), state=state)
        if not self._checkpoints.has_checkpoint_at(in_ram.entries, in_ram.salt) and self._checkpoints.evict_until_fits(
            in_ram.nbytes
        ):
            self._checkpoints.add(in_ram)
            self.pin_manager.on_checkpoint_added()
        return state

    def count_hit(
        self,
        entries: int,
        nbytes: int,
        seconds: float,
        checkpoint: Checkpoint | None = None,
        blocks: SequenceOf[Block] = (),
        *,
        from_disk: bool = False,
    ) -> None:
        """Count a prefix hit of `entries` entries that were loaded in `seconds`."""
        on_disk = checkpoint.state if checkpoint and isinstance(checkpoint.state, DiskCheckpoint) else None
        counters = self.disk_counters if from_disk or on_disk is not None else self.ram_counters
        counters.record_hit(entries, nbytes, entries * self._cost_model.seconds_per_entry - seconds)
        for block in blocks:
            block.hits += 1
        if self.disk_tier is not None:
            self.disk_tier.touch(blocks, on_disk)

    def count_miss(self) -> None:
        """Count a prefix miss: nothing was found on the device, in RAM or on disk."""
        self.ram_counters.misses += 1
        self.disk_counters.misses += self.disk_tier is not None

    # --- administration

    def is_pinned(self, entries: Entries, salt: str, index: int) -> bool:
        """Return whether the entry at this index is part of a pinned prefix."""
        return self.pin_manager.pins.is_pinned(entries, salt, index)

    def clear(self) -> None:
        """Remove every block from RAM and disk, including pinned ones."""
        self.refresh()
        if self.disk_tier is not None:
            self.disk_tier.clear()
        for block in list(self.ram):
            self.ram.drop(block)
        for block in self.tree:
            if self.tree.get(block.key) is block:
                self.tree.remove(block)

    def close(self, timeout: float = 0.0) -> None:
        """Close the disk tier, after at most `timeout` seconds for its queued writes."""
        if self.disk_tier is not None:
            self.disk_tier.close(timeout)
