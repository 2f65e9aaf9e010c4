"""Where computed cells live outside of memory: in RAM, and on disk behind it. Ties the two to sequences."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.engine.kvcache.blocks import Block, BlockHasher, BlockTree, StoredPrefix
from afterglow.engine.kvcache.checkpoint_store import CheckpointStore
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.disk.tier import DiskCheckpoint, open_disk_tier
from afterglow.engine.kvcache.pinning import PinManager
from afterglow.engine.kvcache.ram import RamTier, compute_value
from afterglow.engine.kvcache.sequence import Sequence
from afterglow.engine.types.backend import Backend, BackendCells, BackendState
from afterglow.engine.types.counters import TierCounters
from afterglow.engine.types.entries import Entries, EntryInterner
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidState
from afterglow.llama import page_buffers


class TieredStore:
    """Stores what sequences hold when they have to go, each beginning once, and makes states of it again."""

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
        model = blake3(backend.state_key + f" grid {grid} segment {settings.block_size}".encode()).digest()
        self.hasher = BlockHasher(model, interner, settings.block_size)
        self.tree = BlockTree(self.hasher, interner)
        self._backend = backend
        self._state_key = backend.state_key
        self._interner = interner
        self._cost_model = cost_model
        self._deterministic = bool(grid)
        self._checkpoints = checkpoints
        self.disk_tier = open_disk_tier(settings, model, backend, interner, cost_model, self.ram.get, checkpoints.find)
        self._bytes_per_entry = 0.0  # bytes of an entry, once one was stored
        self.pin_manager = PinManager(self.ram, checkpoints, self.tree, self.disk_tier, lambda: self._bytes_per_entry)
        self._protected: set[bytes] = set()

    # --- what there is

    def find_stored_prefix(self, entries: Entries, salt: str) -> StoredPrefix:
        """How far this prompt is stored."""
        self.refresh()
        if self._backend.state_key != self._state_key:  # another adapter: what is stored is of another model
            return StoredPrefix()
        return self.tree.find_stored_prefix(entries, salt, aligned=self._deterministic)

    def refresh(self) -> None:
        """Hear what came to the disk, and what went."""
        if self.disk_tier is not None:
            for lost in self.disk_tier.sync(self.tree):
                if lost in self.ram:
                    self.ram.drop(lost)

    def find_checkpoints(self, entries: Entries, salt: str) -> list[Checkpoint]:
        """The checkpoints that a prompt runs through, in RAM and on disk, deepest first."""
        found = list(self._checkpoints.find_on_path(entries, salt))
        if self.disk_tier is None:
            return found
        self.refresh()
        depths = {checkpoint.position for checkpoint in found}
        for shelved in self.disk_tier.find_checkpoints(
            self.hasher.hash_prefixes(entries, salt), entries, self.hasher.block_size
        ):
            if shelved.position not in depths:
                found.append(self.build_checkpoint(entries[: shelved.position], salt, shelved, shelved.aligned))
        return sorted(found, key=lambda checkpoint: -checkpoint.position)

    def build_checkpoint(self, entries: Entries, salt: str, state: BackendState, aligned: int) -> Checkpoint:
        """A checkpoint after these entries, with its names."""
        before = self.hasher.hash_prefixes(entries, salt)[-1]
        start = len(entries) - len(entries) % self.hasher.block_size
        key = self.hasher.hash_checkpoint(before, entries[start:])
        return Checkpoint(entries=entries, state=state, aligned=aligned, salt=salt, parent=before, start=start, key=key)

    def has_cells_for(self, checkpoint: Checkpoint) -> bool:
        """Whether all cells before a checkpoint are stored."""
        return self.tree.has_path(checkpoint.parent, checkpoint.entries[checkpoint.start :])

    def estimate_load_seconds(self, stored_prefix: StoredPrefix, reuse_length: int) -> float:
        """Expected seconds to bring the first entries of a cover back into memory."""
        moved = reuse_length * (self._bytes_per_entry or self._cost_model.bytes_per_entry)
        read = sum(segment.nbytes for segment in stored_prefix.blocks if segment.rows is None)
        return moved * self._cost_model.seconds_per_byte + read * self._cost_model.seconds_per_disk_byte

    def estimate_checkpoint_seconds(self, checkpoint: Checkpoint) -> float:
        """Expected seconds to load a checkpoint."""
        read = isinstance(checkpoint.state, DiskCheckpoint)
        return checkpoint.nbytes * (self._cost_model.seconds_per_byte + read * self._cost_model.seconds_per_disk_byte)

    # --- into RAM

    def store_sequence(self, sequence: Sequence, partial: BackendState | None) -> bool:
        """Keep the cells of a sequence; `partial` is its partial state. False: there is no room, or no way to."""
        if self._backend.state_key != self._state_key:
            return False
        length = sequence.aligned if self._deterministic else len(sequence)
        ids = sequence.entries[:length].copy()
        cover = self.find_stored_prefix(ids, sequence.salt)
        self.ram.touch(cover.blocks, time.monotonic())
        if cover.length == length:
            return True
        with_partial = cover.length - cover.length % self.hasher.block_size
        width = self._bytes_per_entry or self._backend.get_state_size(sequence.seq_id, "full") / len(sequence)
        needed = (length - with_partial) * width
        with_kept = {segment.key for segment in cover.blocks}
        if not self.evict_until_free(int(needed), with_kept):
            self.ram_counters.rejected_saves += 1
            return False
        cells = self._save_cells(sequence, partial)
        if cells is None or len(cells) != self._interner.count_cells(sequence.entries):
            return False
        return self._store_blocks(cells, ids, sequence, cover)

    def _save_cells(self, sequence: Sequence, partial: BackendState | None) -> BackendCells | None:
        started = time.perf_counter()
        state = self._backend.save(sequence.seq_id, "full")
        cells = self._backend.extract_cells(state, partial)
        self._cost_model.record_transfer(state.nbytes, time.perf_counter() - started, len(sequence))
        return cells

    def _store_blocks(
        self, cells: BackendCells, entries: Entries, sequence: Sequence, stored_prefix: StoredPrefix
    ) -> bool:
        block = self.hasher.block_size
        whole = [
            segment
            for segment in stored_prefix.blocks
            if len(segment.entries) == block and segment.end <= stored_prefix.length
        ]
        start = len(whole) * block
        at = self._interner.count_cells(entries[:start])
        stretches = [entries[first : first + block] for first in range(start, len(entries), block)]
        counts = [self._interner.count_cells(stretch) for stretch in stretches]
        needed = (
            sum(page_buffers.get_allocated_bytes(count * cells.cell_bytes) for count in counts)
            + (len(entries) - start) * entries.itemsize
        )
        self._bytes_per_entry = needed / max(len(entries) - start, 1)
        if not self.evict_until_free(needed, {segment.key for segment in whole}):
            self.ram_counters.rejected_saves += 1
            return False
        parent = whole[-1].key if whole else self.hasher.get_root_key(sequence.salt)
        path = whole
        for first, stretch, count in zip(range(start, len(entries), block), stretches, counts, strict=True):
            rows = cells.copy_rows(at, at + count)
            segment = self._build_block(parent, first, stretch, rows, cells.layout, sequence)
            self._add_block(segment)
            path.append(segment)
            parent, at = segment.key, at + count
        self.ram.touch(path, time.monotonic())
        self.ram_counters.saves += 1
        self.ram_counters.saved_bytes += needed
        self.pin_manager.enforce_limit()
        return True

    def _build_block(
        self, parent: bytes, start: int, entries: Entries, rows: NDArray[np.uint8], layout: bytes, sequence: Sequence
    ) -> Block:
        written = self._interner.to_portable_entries(entries).copy()
        return Block(
            key=self.hasher.hash_block(parent, entries),
            parent=parent,
            start=start,
            entries=written,
            aligned=min(max(sequence.aligned - start, 0), len(entries)),
            cells=len(rows),
            nbytes=page_buffers.get_allocated_bytes(rows.nbytes) + written.nbytes,
            layout=layout,
            rows=rows,
            pinned=self.is_pinned(sequence.entries, sequence.salt, start),
        )

    def _add_block(self, block: Block) -> None:
        for gone in self.tree.add(block):
            if gone in self.ram:
                self.ram.drop(gone)
            if self.disk_tier is not None and gone.is_on_disk and gone.key != block.key:
                self.disk_tier.writer.remove("cells", gone.key)
        self.ram.put(block)
        if self.disk_tier is not None:
            self.disk_tier.enqueue(block)

    def write_checkpoints(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Write these checkpoints to the disk, some time."""
        if self.disk_tier is not None:
            for checkpoint in checkpoints:
                self.disk_tier.enqueue(checkpoint)

    def evict_until_free(self, nbytes: int, protected: set[bytes] | None = None) -> bool:
        """Let go of what is worth least until so many bytes are free. False: they cannot be."""
        if nbytes > self.ram.limit - self.pin_manager.nbytes:
            return False
        while self.ram.free_bytes < nbytes:
            if not self._evict_one((protected or set()) | self._protected):
                return False
        return True

    def _evict_one(self, protected: set[bytes]) -> bool:
        segment, other = self.ram.find_lru_block(protected), self._checkpoints.find_victim()
        if segment is None and other is None:
            return False
        self.ram_counters.evictions += 1
        if other is None or (segment is not None and self._compute_block_value(segment) <= other.value):
            assert segment is not None
            self._evict_block(segment)
        else:
            other.evict()
        return True

    def _compute_block_value(self, block: Block) -> float:
        """What a segment saves. Where cells alone are not enough, that is what the checkpoints over it save."""
        seconds, nbytes = len(block.entries) * self._cost_model.seconds_per_entry, block.nbytes
        if self._backend.capabilities.has_partial_state:
            over = self._find_checkpoints_in(block)
            seconds = sum(self._checkpoints.estimate_seconds_saved(checkpoint) for checkpoint in over)
            nbytes += sum(checkpoint.nbytes for checkpoint in over)
        return compute_value(seconds, nbytes, time.monotonic() - block.last_used)

    def _find_checkpoints_in(self, block: Block) -> list[Checkpoint]:
        """The checkpoints that end in a segment."""
        found = [one for one in self._checkpoints.all_checkpoints if one.parent in (block.key, block.parent)]
        return [one for one in found if one.parent == block.key or one.position > block.start]

    def _evict_block(self, block: Block) -> None:
        """The segment leaves RAM; where it is on disk it can still be found."""
        self.ram.drop(block)
        if block.is_on_disk:
            return
        for gone in self.tree.remove(block):
            if gone in self.ram:
                self.ram.drop(gone)

    # --- back into memory

    def protect(self, stored_prefix: StoredPrefix) -> None:
        """From here to `release` the segments of this cover do not make room for others."""
        self.ram.touch(stored_prefix.blocks, time.monotonic())
        self._protected = {segment.key for segment in stored_prefix.blocks}

    def unprotect(self) -> None:
        self._protected = set()

    def prefetch(self, stored_prefix: StoredPrefix, reuse_length: int, checkpoint: Checkpoint | None) -> bool:
        """Whether what a plan needs from the disk is still being read, on another thread."""
        if self.disk_tier is None:
            return False
        shelved = checkpoint.state if checkpoint is not None and isinstance(checkpoint.state, DiskCheckpoint) else None
        return self.disk_tier.prefetch(
            [segment for segment in stored_prefix.blocks if segment.start < reuse_length], shelved
        )

    def load(
        self, sequence: Sequence, entries: Entries, stored_prefix: StoredPrefix, checkpoint: Checkpoint | None
    ) -> None:
        """Make the sequence hold `ids`, out of a cover that is at least as long. A broken one is `InvalidState`."""
        started = time.perf_counter()
        from_disk = checkpoint is not None and isinstance(checkpoint.state, DiskCheckpoint)
        from_disk = from_disk or any(segment.rows is None for segment in stored_prefix.blocks)
        partial = None if checkpoint is None else self.load_checkpoint_state(checkpoint)
        blocks, at, used = [], 0, []
        for segment in stored_prefix.blocks:
            if at >= len(entries):
                break
            rows = self._load_rows(segment)
            count = min(len(segment.entries), len(entries) - at)
            blocks.append(rows[: self._interner.count_cells(entries[at : at + count])])
            used.append(segment)
            at += count
        if at != len(entries) or len({segment.layout for segment in used}) != 1:
            raise InvalidState(f"only {at} of {len(entries)} entries are stored")
        state = self._backend.assemble_state(used[0].layout, blocks, partial, self._interner.count_positions(entries))
        sequence.load(entries, state, len(entries) if self._deterministic else 0)
        seconds, nbytes = time.perf_counter() - started, sum(block.nbytes for block in blocks)
        self._cost_model.record_transfer(nbytes, seconds, 0)
        self.ram.touch(used, time.monotonic())
        self.count_hit(len(entries), nbytes, seconds, checkpoint, used, from_disk=from_disk)

    def _load_rows(self, block: Block) -> NDArray[np.uint8]:
        if block.rows is not None:
            return block.rows
        if self.disk_tier is None:
            raise InvalidState("a segment is gone")
        try:
            rows = self.disk_tier.load_rows(block)
            self._promote(block, rows)
            return rows
        except InvalidState:
            for gone in self.tree.remove(block):
                if gone in self.ram:
                    self.ram.drop(gone)
            raise

    def _promote(self, block: Block, rows: NDArray[np.uint8]) -> None:
        """Keep what was read in RAM, too, where nothing has to go for it."""
        nbytes = page_buffers.get_allocated_bytes(rows.nbytes) + block.entries.nbytes
        if nbytes <= self.ram.free_bytes:
            block.rows, block.nbytes = page_buffers.copy_to_pages(rows), nbytes
            self.ram.put(block)

    def load_checkpoint_state(self, checkpoint: Checkpoint) -> BackendState:
        """The partial state of a checkpoint, from wherever it is; one that was on disk is in RAM from now on."""
        checkpoint.last_used = time.monotonic()
        shelved = checkpoint.state
        if not isinstance(shelved, DiskCheckpoint):
            return shelved
        assert self.disk_tier is not None
        state = self.disk_tier.load_state(shelved, checkpoint.entries)
        kept = replace(checkpoint, entries=checkpoint.entries.copy(), state=state)
        if not self._checkpoints.has_checkpoint_at(kept.entries, kept.salt) and self._checkpoints.evict_until_fits(
            kept.nbytes
        ):
            self._checkpoints.add(kept)
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
        """A prompt began from here: so much was brought back, and it took so long."""
        shelved = checkpoint.state if checkpoint and isinstance(checkpoint.state, DiskCheckpoint) else None
        counters = self.disk_counters if from_disk or shelved is not None else self.ram_counters
        counters.record_hit(entries, nbytes, entries * self._cost_model.seconds_per_entry - seconds)
        for segment in blocks:
            segment.hits += 1
        if self.disk_tier is not None:
            self.disk_tier.touch(blocks, shelved)

    def count_miss(self) -> None:
        """A prompt found nothing, neither in memory nor here."""
        self.ram_counters.misses += 1
        self.disk_counters.misses += self.disk_tier is not None

    # --- what people want

    def is_pinned(self, entries: Entries, salt: str, index: int) -> bool:
        """Whether the entry with this index belongs to a pinned beginning."""
        return self.pin_manager.pins.is_pinned(entries, salt, index)

    def clear(self) -> None:
        """Forget every segment, pinned ones too."""
        self.refresh()
        if self.disk_tier is not None:
            self.disk_tier.clear()
        for segment in self.ram:
            self.ram.drop(segment)
        for segment in self.tree:
            if self.tree.get(segment.key) is segment:
                self.tree.remove(segment)

    def close(self, timeout: float = 0.0) -> None:
        """Wait so long for what is still to be written."""
        if self.disk_tier is not None:
            self.disk_tier.close(timeout)
