"""Disk tier as the engine's thread sees it: blocks and checkpoints in files, found by their keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.kvcache.blocks import Block, BlockTree
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.disk.files import CacheFile, FileKind, LoadedFile, build_file_name
from afterglow.engine.kvcache.disk.index import IndexRow
from afterglow.engine.kvcache.disk.prefetch import FileKey, Prefetcher
from afterglow.engine.kvcache.disk.writer import DiskWriter, FileAdded, FileRemoved, logger
from afterglow.engine.types.backend import Backend, BackendState
from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidState

MIN_PREFETCH_SECONDS = 0.005  # shorter reads do not noticeably delay running requests


@dataclass(frozen=True, slots=True, eq=False)
class DiskCheckpoint:
    """Checkpoint in a file: `start` entries in the full blocks up to key `parent`, followed by the entries `rest`.

    It takes the place of the state of a `Checkpoint` that is not loaded.
    """

    key: bytes
    parent: bytes
    start: int
    rest: Entries
    aligned: int
    nbytes: int

    @property
    def position(self) -> int:
        return self.start + len(self.rest)


class DiskTier:
    """Blocks and checkpoints of the engine's model on disk.

    `find_block` and `find_checkpoint` return what is in RAM by key; the writer calls them on its own thread.
    """

    def __init__(
        self,
        settings: EngineSettings,
        model: bytes,
        backend: Backend,
        interner: EntryInterner,
        cost_model: CostModel,
        find_block: Callable[[bytes], Block | None],
        find_checkpoint: Callable[[bytes], Checkpoint | None],
    ) -> None:
        assert settings.disk_cache_directory is not None
        self._model = model
        self._backend = backend
        self._interner = interner
        self._cost_model = cost_model
        self._find_block = find_block
        self._find_checkpoint = find_checkpoint
        self._checkpoints: dict[bytes, list[DiskCheckpoint]] = {}  # by parent key
        self.writer = DiskWriter(
            settings.disk_cache_directory,
            limit=settings.disk_cache_bytes,
            model=model,
            build_file=self._build_file,
            label=settings.disk_cache_label,
        )
        self.prefetcher = Prefetcher(self.writer.load)

    # --- lookup

    def sync(self, tree: BlockTree) -> list[Block]:
        """Apply the writer's file events to the tree; return the blocks that were removed from it."""
        lost: list[Block] = []
        for event in self.writer.drain_events():
            match event:
                case FileAdded(row) if row.kind == "cells":
                    self._add_block(row, tree)
                case FileAdded(row):
                    self._add_checkpoint(
                        DiskCheckpoint(row.key, row.parent, row.start, row.entries, row.aligned, row.nbytes)
                    )
                case FileRemoved("cells", key):
                    lost += self._remove_block(key, tree)
                case FileRemoved("state", key):
                    self._remove_checkpoint(key)
        return lost

    def _add_block(self, row: IndexRow, tree: BlockTree) -> None:
        existing = tree.get(row.key)
        if existing is not None:
            existing.file_bytes = row.nbytes
        elif row.start == 0 or tree.get(row.parent) is not None:
            idle_seconds = max(0.0, time.time() - row.last_used)
            tree.add(
                Block(
                    key=row.key,
                    parent=row.parent,
                    start=row.start,
                    entries=row.entries,
                    aligned=row.aligned,
                    cells=row.cells,
                    nbytes=row.nbytes,
                    file_bytes=row.nbytes,
                    pinned=bool(row.pinned),
                    hits=row.hits,
                    last_used=time.monotonic() - idle_seconds,
                )
            )

    def _remove_block(self, key: bytes, tree: BlockTree) -> list[Block]:
        block = tree.get(key)
        if block is None:
            return []
        block.file_bytes = 0
        return [] if block.rows is not None else tree.remove(block)

    def _add_checkpoint(self, checkpoint: DiskCheckpoint) -> None:
        siblings = self._checkpoints.setdefault(checkpoint.parent, [])
        siblings[:] = [sibling for sibling in siblings if sibling.key != checkpoint.key] + [checkpoint]

    def _remove_checkpoint(self, key: bytes) -> None:
        for parent, siblings in list(self._checkpoints.items()):
            siblings[:] = [sibling for sibling in siblings if sibling.key != key]
            if not siblings:
                del self._checkpoints[parent]

    def list_checkpoints(self) -> list[DiskCheckpoint]:
        return [checkpoint for siblings in self._checkpoints.values() for checkpoint in siblings]

    def find_checkpoints(self, prefix_keys: Sequence[bytes], entries: Entries, block_size: int) -> list[DiskCheckpoint]:
        """Return the checkpoints on the path of a prompt, deepest first. `prefix_keys`: keys of its full blocks."""
        matches = []
        for index, key in enumerate(prefix_keys):
            start = index * block_size
            for checkpoint in self._checkpoints.get(key, ()):
                rest = self._interner.to_portable_entries(entries[start : start + len(checkpoint.rest)])
                shared = common_prefix_length(rest, checkpoint.rest)
                if checkpoint.start == start and shared == len(checkpoint.rest):
                    matches.append(checkpoint)
        return sorted(matches, key=lambda checkpoint: -checkpoint.position)

    def touch(self, blocks: Sequence[Block], checkpoint: DiskCheckpoint | None) -> None:
        """Record the use of blocks and of a checkpoint."""
        names = [build_file_name("cells", block.key) for block in blocks if block.is_on_disk]
        self.writer.touch(names if checkpoint is None else [*names, build_file_name("state", checkpoint.key)])

    def clear(self) -> None:
        """Delete all files of this model."""
        self.writer.clear()
        self._checkpoints = {}

    def close(self, timeout: float) -> None:
        """Write what is queued, for at most `timeout` seconds, and stop the threads."""
        self.prefetcher.close()
        self.writer.close(timeout)

    # --- writing

    def enqueue(self, source: Block | Checkpoint) -> None:
        """Queue a block or a checkpoint for writing, unless it is on disk."""
        if isinstance(source, Block):
            if not source.is_on_disk:
                self.writer.enqueue("cells", source.key)
        elif all(checkpoint.key != source.key for checkpoint in self._checkpoints.get(source.parent, ())):
            self.writer.enqueue("state", source.key)

    def _build_file(self, kind: FileKind, key: bytes) -> CacheFile | None:
        """Return the file to write, if its contents are still in RAM. Runs on the writer's thread."""
        return self._build_block_file(key) if kind == "cells" else self._build_checkpoint_file(key)

    def _build_block_file(self, key: bytes) -> CacheFile | None:
        block = self._find_block(key)
        rows = None if block is None else block.rows
        if block is None or rows is None:
            return None
        return CacheFile(
            kind="cells",
            model=self._model,
            key=key,
            parent=block.parent,
            start=block.start,
            entries=block.entries,
            aligned=block.aligned,
            cells=block.cells,
            seconds=len(block.entries) * self._cost_model.seconds_per_entry,
            value=self._value_per_byte,
            layout=block.layout,
            payload=[rows.reshape(-1).data],
            pinned=block.pinned,
        )

    def _build_checkpoint_file(self, key: bytes) -> CacheFile | None:
        checkpoint = self._find_checkpoint(key)
        if checkpoint is None:
            return None
        seconds = checkpoint.position * self._cost_model.seconds_per_entry
        is_standalone = not self._backend.capabilities.has_attention_cells
        return CacheFile(
            kind="state",
            model=self._model,
            key=key,
            parent=checkpoint.parent,
            start=checkpoint.start,
            entries=self._interner.to_portable_entries(checkpoint.entries),
            aligned=checkpoint.aligned,
            cells=0,
            seconds=seconds,
            value=seconds / checkpoint.nbytes if is_standalone else self._value_per_byte,
            layout=b"",
            payload=self._backend.serialize_state(checkpoint.state),
            pinned=checkpoint.pinned,
            needs_cells=not is_standalone,
        )

    @property
    def _value_per_byte(self) -> float:
        """Seconds saved per byte of cells and of the checkpoints over them: neither is of use without the other."""
        return self._cost_model.seconds_per_entry / max(self._cost_model.bytes_per_entry, 1.0)

    # --- reading

    def prefetch(self, blocks: Sequence[Block], checkpoint: DiskCheckpoint | None) -> bool:
        """Read files on another thread if that takes noticeable time; return whether they are not complete yet."""
        sizes: dict[FileKey, int] = {("cells", block.key): block.nbytes for block in blocks if block.rows is None}
        if checkpoint is not None:
            sizes["state", checkpoint.key] = checkpoint.nbytes
        seconds = sum(sizes.values()) * self._cost_model.seconds_per_disk_byte
        return seconds > MIN_PREFETCH_SECONDS and self.prefetcher.submit(sizes)

    def _load_file(self, kind: FileKind, key: bytes) -> LoadedFile:
        """Return a file, prefetched or read now, and record the time of reading it."""
        started = time.perf_counter()
        prefetched = self.prefetcher.pop(kind, key)
        loaded = self.writer.load(kind, key) if prefetched is None else prefetched[0]
        seconds = time.perf_counter() - started if prefetched is None else prefetched[1]
        self._cost_model.record_disk_read(len(loaded.payload), seconds)
        return loaded

    def load_rows(self, block: Block) -> NDArray[np.uint8]:
        """Return the cells of a block from its file; raise `InvalidState` if the file does not match the block."""
        loaded = self._load_file("cells", block.key)
        file, rows = loaded.file, loaded.to_rows()
        matches = (file.parent, file.start, file.cells) == (block.parent, block.start, block.cells)
        if not matches or not np.array_equal(file.entries, block.entries):
            self.writer.remove("cells", block.key)
            raise InvalidState("a file contains other entries than expected")
        block.layout = file.layout
        return rows

    def load_state(self, checkpoint: DiskCheckpoint, entries: Entries) -> BackendState:
        """Return a partial state from its file; raise `InvalidState` if it is not the state after `entries`."""
        try:
            loaded = self._load_file("state", checkpoint.key)
            if not np.array_equal(loaded.file.entries, self._interner.to_portable_entries(entries)):
                self.writer.remove("state", checkpoint.key)
                raise InvalidState("a file contains other entries than expected")
            state = self._backend.deserialize_state(loaded.payload)
        except InvalidState:
            self._remove_checkpoint(checkpoint.key)
            raise
        return state


def open_disk_tier(
    settings: EngineSettings,
    model: bytes,
    backend: Backend,
    interner: EntryInterner,
    cost_model: CostModel,
    find_block: Callable[[bytes], Block | None],
    find_checkpoint: Callable[[bytes], Checkpoint | None],
) -> DiskTier | None:
    """Return the disk tier; None if it is disabled or the directory cannot be used."""
    if settings.disk_cache_directory is None or not settings.disk_cache_bytes:
        return None
    try:
        return DiskTier(settings, model, backend, interner, cost_model, find_block, find_checkpoint)
    except OSError as error:
        logger.warning("disk cache disabled: %s cannot be used: %s", settings.disk_cache_directory, error)
        return None
