"""Disk tier as the engine's thread sees it: blocks, checkpoints and last logits in files, found by their keys."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.kvcache.blocks import Block, BlockTree
from afterglow.engine.kvcache.budget import ByteBudget
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.disk.checkpoint_table import CheckpointTable, StoredCheckpoint
from afterglow.engine.kvcache.disk.contents import FileBuilder, is_file_of
from afterglow.engine.kvcache.disk.files import FileKind, LoadedFile, build_file_name
from afterglow.engine.kvcache.disk.index import IndexRow
from afterglow.engine.kvcache.disk.prefetch import FileKey, Prefetcher
from afterglow.engine.kvcache.disk.writer import DiskWriter, FileAdded, FileRemoved
from afterglow.engine.kvcache.last_logits import LastLogits
from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.types.backend import Backend, BackendState
from afterglow.engine.types.counters import TierCounters
from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidState
from afterglow.llama.parallel import run_parallel

# Of the RAM tier, that may wait for an idle engine to be written: what leaves RAM before is lost.
MAX_UNWRITTEN_FRACTION = 1 / 8
MIN_PREFETCH_SECONDS = 0.005  # shorter reads do not noticeably delay running requests


class DiskTier:
    """Blocks and checkpoints of the engine's model on disk. Data that is put here is copied from the RAM tier."""

    name = "disk"
    latency_seconds = 0.0

    def __init__(
        self,
        settings: EngineSettings,
        backend: Backend,
        interner: EntryInterner,
        cost_model: CostModel,
        tree: BlockTree,
        ram: RamTier,
    ) -> None:
        assert settings.disk_cache_directory is not None
        self.budget = ByteBudget(settings.disk_cache_bytes)
        self._backend = backend
        self._interner = interner
        self._cost_model = cost_model
        self._tree = tree
        self._ram = ram
        self._counters = TierCounters()
        self._written_bytes = 0  # by the writer, at the last `sync`
        self._checkpoints = CheckpointTable(self.name, self.budget, ram.budget, tree.hasher, interner)
        self._logits: dict[bytes, StoredCheckpoint] = {}  # by key
        self.writer = DiskWriter(
            settings.disk_cache_directory,
            limit=settings.disk_cache_bytes,
            model=tree.hasher.model,
            source=FileBuilder(backend, interner, cost_model, tree, ram),
            max_waiting_bytes=ram.budget.limit * MAX_UNWRITTEN_FRACTION,
            label=settings.disk_cache_label,
            is_shared=settings.write_through,
        )
        ram.set_unwritten(self.writer.writes)
        self.prefetcher = Prefetcher(self.writer, ram)
        tree.holders.append(self)

    @property
    def counters(self) -> TierCounters:
        counters, written = self._counters, self.writer.counters
        counters.saves, counters.saved_bytes = written.written_files, written.written_bytes
        counters.evictions, counters.rejected_saves = written.evictions, written.dropped_writes
        return counters

    @property
    def seconds_per_byte(self) -> float:
        return self._cost_model.seconds_per_disk_byte

    # --- lookup

    def sync(self) -> None:
        """Apply the writer's file events to the tree."""
        self.prefetcher.drop_stale()
        added_entries = removed_entries = removed_bytes = 0
        for event in self.writer.drain_events():
            match event:
                case FileAdded(row) if row.kind == "cells":
                    added_entries += len(row.entries)
                    self._add_block(row)
                case FileAdded(row) if row.kind == "logits":
                    self._add_logits(row)
                case FileAdded(row):
                    self._checkpoints.add(build_stored_checkpoint(row))
                case FileRemoved("cells", key):
                    if (block := self._tree.get(key)) is not None:
                        removed_entries += len(block.entries) if block.is_on_disk else 0
                        removed_bytes += block.file_bytes
                        self.forget(block)
                        self._tree.remove_unreferenced(block)
                case FileRemoved("state", key):
                    self._checkpoints.remove(key)
                case FileRemoved("logits", key):
                    self._remove_logits(key)
        self._ram.events.record("evicted", self.name, entries=removed_entries, nbytes=removed_bytes)
        new_bytes = self.writer.counters.written_bytes - self._written_bytes
        if new_bytes > 0:  # otherwise other processes wrote the files
            self._written_bytes += new_bytes
            self._ram.events.record("stored", self.name, entries=added_entries, nbytes=new_bytes)

    def _add_block(self, row: IndexRow) -> None:
        block = self._tree.get(row.key)
        if block is None:
            if row.start and self._tree.get(row.parent) is None:
                return
            idle_seconds = max(0.0, time.time() - row.last_used)
            block = Block(
                key=row.key,
                parent=row.parent,
                start=row.start,
                entries=row.entries,
                cells=row.cells,
                nbytes=row.nbytes,
                pinned_until=math.inf if row.is_pinned_forever else 0.0,  # the index protects files with an expiry
                hits=row.hits,
                last_used=time.monotonic() - idle_seconds,
            )
            if block.table_bytes > self._ram.budget.free_bytes:
                return  # it cannot be found, as if it were not on disk
            for redundant in self._tree.add(block):
                for holder in self._tree.holders:
                    holder.forget(redundant)
        self.forget(block)
        block.file_bytes = row.nbytes
        self.budget.add("blocks", row.nbytes)

    def holds(self, block: Block) -> bool:
        return block.is_on_disk

    def forget(self, block: Block) -> None:
        """Notice that a block is not on disk any more, or has left the tree."""
        self.budget.remove("blocks", block.file_bytes)
        block.file_bytes = 0

    def delete(self, block: Block) -> None:
        if block.is_on_disk:
            self.forget(block)
            self.writer.remove("cells", block.key)
        else:
            self.writer.remove_unfinished("cells", block.key)

    def _add_logits(self, row: IndexRow) -> None:
        logits = build_stored_checkpoint(row)
        if logits.key not in self._logits and logits.table_bytes <= self._ram.budget.free_bytes:
            self._logits[logits.key] = logits
            self.budget.add("logits", logits.nbytes)
            self._ram.budget.add("tables", logits.table_bytes)

    def _remove_logits(self, key: bytes) -> None:
        if (logits := self._logits.pop(key, None)) is not None:
            self.budget.remove("logits", logits.nbytes)
            self._ram.budget.remove("tables", logits.table_bytes)

    def list_logits(self) -> list[StoredCheckpoint]:
        return list(self._logits.values())

    def find_logits(self, entries: Entries, namespace: str) -> bytes | None:
        """Return the key of the logits after exactly these entries, if they are on disk."""
        if not self._logits:
            return None
        hasher = self._tree.hasher
        parent, start = hasher.hash_prefixes(entries, namespace)[-1], len(entries) - len(entries) % hasher.block_size
        key = hasher.hash_logits(parent, entries[start:])
        return key if key in self._logits else None

    def delete_logits(
        self, keys: AbstractSet[bytes], parents: AbstractSet[bytes], parent: bytes, rest: Entries, offset: int
    ) -> None:
        """Delete the logits after these blocks, and those after `parent` that share more than `offset` of `rest`.

        `keys` are those of the logits that were in RAM, which may be being written.
        """
        for key in keys:
            self.writer.remove_unfinished("logits", key)
        for on_disk in self.list_logits():
            is_inside = on_disk.parent == parent and common_prefix_length(on_disk.rest, rest) > offset
            if is_inside or on_disk.parent in parents:
                self._remove_logits(on_disk.key)
                self.writer.remove("logits", on_disk.key)

    def delete_checkpoints(self, keys: AbstractSet[bytes], parents: AbstractSet[bytes]) -> set[bytes]:
        """Delete the checkpoints with these keys, and those after these blocks; return the keys of the files."""
        for key in keys:
            self.writer.remove_unfinished("state", key)
        deleted = self._checkpoints.select(keys, parents)
        for checkpoint in deleted:
            self._checkpoints.remove(checkpoint.key)
            self.writer.remove("state", checkpoint.key)
        return {checkpoint.key for checkpoint in deleted}

    def list_checkpoints(self) -> list[StoredCheckpoint]:
        return self._checkpoints.list_all()

    def find_checkpoints(self, entries: Entries, namespace: str) -> list[Checkpoint]:
        """Return the checkpoints on the path of a prompt. Their state is not loaded."""
        return self._checkpoints.find(entries, namespace)

    def touch(self, blocks: Sequence[Block], checkpoint: Checkpoint | None = None) -> None:
        names = [build_file_name("cells", block.key) for block in blocks if block.is_on_disk]
        if checkpoint is not None and checkpoint.tier == self.name:
            names.append(build_file_name("state", checkpoint.key))
        self.writer.touch(names)

    def pin(self, data: Sequence[Block | Checkpoint]) -> None:
        for until in {item.pinned_until for item in data}:
            names = [build_file_name(get_kind(item), item.key) for item in data if item.pinned_until == until]
            self.writer.pin(names, until=until)

    def clear(self) -> None:
        """Delete all files of this model."""
        self.writer.clear()
        for checkpoint in self.list_checkpoints():
            self._checkpoints.remove(checkpoint.key)
        for logits in self.list_logits():
            self._remove_logits(logits.key)

    def flush(self, timeout: float) -> bool:
        return self.writer.flush(timeout)

    def close(self, timeout: float) -> None:
        self.prefetcher.close()
        self.writer.close(timeout)

    # --- writing

    def put(self, data: Block | Checkpoint | LastLogits) -> None:
        """Queue a block, a checkpoint or last logits for writing, unless it is on disk."""
        if isinstance(data, Block):
            is_on_disk = data.is_on_disk
        elif isinstance(data, LastLogits):
            is_on_disk = data.key in self._logits
        else:
            is_on_disk = data.key in self._checkpoints
        if not is_on_disk:
            self.writer.enqueue(get_kind(data), data.key, data.nbytes)

    # --- reading

    def prefetch(self, blocks: Sequence[Block], checkpoint: Checkpoint | None, protected: AbstractSet[bytes]) -> bool:
        """Read files on another thread if that takes noticeable time; return whether they are not complete yet."""
        sizes: dict[FileKey, int] = {
            ("cells", block.key): block.nbytes for block in blocks if block.rows is None and block.is_on_disk
        }
        if checkpoint is not None and checkpoint.tier == self.name:
            sizes["state", checkpoint.key] = checkpoint.state.nbytes
        seconds = sum(sizes.values()) * self._cost_model.seconds_per_disk_byte
        return seconds > MIN_PREFETCH_SECONDS and self.prefetcher.submit(sizes, protected)

    def _load_file(self, kind: FileKind, key: bytes) -> LoadedFile:
        """Return a file, prefetched or read now, and record the time of reading it."""
        started = time.perf_counter()
        prefetched = self.prefetcher.pop(kind, key)
        loaded = self.writer.load(kind, key) if prefetched is None else prefetched[0]
        seconds = time.perf_counter() - started if prefetched is None else prefetched[1]
        self._record_read([loaded], seconds)
        return loaded

    def load_rows(self, blocks: Sequence[Block]) -> list[NDArray[np.uint8] | None]:
        """Return the cells of blocks, prefetched or read now on several threads; None if a file is not as expected."""
        files: dict[bytes, LoadedFile | None] = {}
        for block in blocks:
            if (prefetched := self.prefetcher.pop("cells", block.key)) is not None:
                files[block.key] = prefetched[0]
                self._record_read([prefetched[0]], prefetched[1])
        unread = [block.key for block in blocks if block.key not in files]
        started = time.perf_counter()
        read = run_parallel(self._try_load_block, [(key,) for key in unread])
        self._record_read([loaded for loaded in read if loaded is not None], time.perf_counter() - started)
        files.update(zip(unread, read, strict=True))
        return [self._check_block(block, files[block.key]) for block in blocks]

    def _try_load_block(self, key: bytes) -> LoadedFile | None:
        """Read and check the file of a block. Thread-safe."""
        try:
            return self.writer.load("cells", key)
        except InvalidState:
            return None

    def _record_read(self, files: Sequence[LoadedFile], seconds: float) -> None:
        self._cost_model.record_disk_read(sum(len(loaded.payload) for loaded in files), seconds)

    def _check_block(self, block: Block, loaded: LoadedFile | None) -> NDArray[np.uint8] | None:
        """Return the cells in the file of a block; None if there is no file or it does not match the block."""
        if loaded is None:
            return None
        if not is_file_of(loaded.file, block):
            self.writer.remove("cells", block.key)
            return None
        block.layout = loaded.file.layout
        return loaded.to_rows() if loaded.has_all_cells else None

    def load_state(self, checkpoint: Checkpoint) -> BackendState:
        """Return a partial state from its file; raise `InvalidState` if it is not the state after the same entries."""
        try:
            loaded = self._load_file("state", checkpoint.key)
            if not np.array_equal(loaded.file.entries, self._interner.to_portable_entries(checkpoint.entries)):
                self.writer.remove("state", checkpoint.key)
                raise InvalidState("a file contains other entries than expected")
            return self._backend.deserialize_state(loaded.payload)
        except InvalidState:
            self._checkpoints.remove(checkpoint.key)
            raise

    def load_logits(self, key: bytes, entries: Entries) -> NDArray[np.float32] | None:
        """Return the logits from their file; None if they are missing, damaged or not those after these entries."""
        try:
            loaded = self._load_file("logits", key)
            is_row = len(loaded.payload) == 4 * self._backend.vocabulary_size
            if not is_row or not np.array_equal(loaded.file.entries, self._interner.to_portable_entries(entries)):
                self.writer.remove("logits", key)
                raise InvalidState("a file contains other logits than expected")
            self.writer.touch([build_file_name("logits", key)])
            return np.frombuffer(loaded.payload, dtype=np.float32)
        except InvalidState:
            self._remove_logits(key)
            return None


def get_kind(data: Block | Checkpoint | LastLogits) -> FileKind:
    """Return the kind of the file of a block, a checkpoint or last logits."""
    return "cells" if isinstance(data, Block) else "logits" if isinstance(data, LastLogits) else "state"


def build_stored_checkpoint(row: IndexRow) -> StoredCheckpoint:
    """Describe the file of a checkpoint or of logits."""
    return StoredCheckpoint(row.key, row.parent, row.start, row.entries, row.nbytes)
