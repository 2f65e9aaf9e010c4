"""The disk tier as the engine's thread sees it: segments and checkpoints that are in files, found by their names."""

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

MIN_PREFETCH_SECONDS = 0.005  # seconds of reading that running answers would notice


@dataclass(frozen=True, slots=True, eq=False)
class DiskCheckpoint:
    """A partial state that is in a file: after `start` entries in whole segments named `parent`, and the `rest`."""

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
    """What of the engine's model is on disk. `segment` and `checkpoint` find what is in RAM, from any thread."""

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
        self._checkpoints: dict[bytes, list[DiskCheckpoint]] = {}  # by the name of the whole segments before them
        self.writer = DiskWriter(
            settings.disk_cache_directory,
            limit=settings.disk_cache_bytes,
            model=model,
            build_file=self._build_file,
            label=settings.disk_cache_label,
        )
        self.prefetcher = Prefetcher(self.writer.load)

    # --- what is there

    def sync(self, tree: BlockTree) -> list[Block]:
        """Hear what came and went; the segments that are nowhere any more."""
        lost: list[Block] = []
        for news in self.writer.drain_events():
            match news:
                case FileAdded(row) if row.kind == "cells":
                    self._add_found(row, tree)
                case FileAdded(row):
                    self._add_checkpoint(
                        DiskCheckpoint(row.key, row.parent, row.start, row.entries, row.aligned, row.nbytes)
                    )
                case FileRemoved("cells", key):
                    lost += self._remove_lost(key, tree)
                case FileRemoved("state", key):
                    self._remove_checkpoint(key)
        return lost

    def _add_found(self, row: IndexRow, tree: BlockTree) -> None:
        known = tree.get(row.key)
        if known is not None:
            known.file_bytes = row.nbytes
        elif row.start == 0 or tree.get(row.parent) is not None:
            age = max(0.0, time.time() - row.last_used)
            tree.add(
                Block(
                    key=row.key, parent=row.parent, start=row.start, entries=row.entries, aligned=row.aligned, cells=row.cells,
                    nbytes=row.nbytes, file_bytes=row.nbytes, pinned=bool(row.pinned), hits=row.hits,
                    last_used=time.monotonic() - age,
                )
            )  # fmt: skip

    def _remove_lost(self, key: bytes, tree: BlockTree) -> list[Block]:
        segment = tree.get(key)
        if segment is None:
            return []
        segment.file_bytes = 0
        return [] if segment.rows is not None else tree.remove(segment)

    def _add_checkpoint(self, checkpoint: DiskCheckpoint) -> None:
        beside = self._checkpoints.setdefault(checkpoint.parent, [])
        beside[:] = [other for other in beside if other.key != checkpoint.key] + [checkpoint]

    def _remove_checkpoint(self, key: bytes) -> None:
        for parent, beside in list(self._checkpoints.items()):
            beside[:] = [other for other in beside if other.key != key]
            if not beside:
                del self._checkpoints[parent]

    def list_checkpoints(self) -> list[DiskCheckpoint]:
        return [shelved for beside in self._checkpoints.values() for shelved in beside]

    def find_checkpoints(self, prefix_keys: Sequence[bytes], entries: Entries, block_size: int) -> list[DiskCheckpoint]:
        """The states that a prompt runs through, deepest first; `names` are those of its beginnings, by segment."""
        found = []
        for index, name in enumerate(prefix_keys):
            for shelved in self._checkpoints.get(name, ()):
                following = self._interner.to_portable_entries(
                    entries[index * block_size : index * block_size + len(shelved.rest)]
                )
                if shelved.start == index * block_size and common_prefix_length(following, shelved.rest) == len(
                    shelved.rest
                ):
                    found.append(shelved)
        return sorted(found, key=lambda shelved: -shelved.position)

    def clear(self) -> None:
        """Forget everything of this model."""
        self.writer.clear()
        self._checkpoints = {}

    # --- to the disk

    def enqueue(self, source: Block | Checkpoint) -> None:
        """Write a segment or a checkpoint, some time."""
        if isinstance(source, Block):
            if not source.is_on_disk:
                self.writer.enqueue("cells", source.key)
        elif all(shelved.key != source.key for shelved in self._checkpoints.get(source.parent, ())):
            self.writer.enqueue("state", source.key)

    def _build_file(self, kind: FileKind, key: bytes) -> CacheFile | None:
        """On the disk's thread: what is to be written, if it is still in RAM."""
        return self._build_block_file(key) if kind == "cells" else self._build_checkpoint_file(key)

    def _build_block_file(self, key: bytes) -> CacheFile | None:
        segment = self._find_block(key)
        rows = None if segment is None else segment.rows
        if segment is None or rows is None:
            return None
        return CacheFile(
            kind="cells", model=self._model, key=key, parent=segment.parent, start=segment.start, entries=segment.entries,
            aligned=segment.aligned, cells=segment.cells, seconds=len(segment.entries) * self._cost_model.seconds_per_entry,
            value=self._value_per_byte, layout=segment.layout, payload=[rows.reshape(-1).data], pinned=segment.pinned,
        )  # fmt: skip

    @property
    def _value_per_byte(self) -> float:
        """Seconds that a byte of cells or of the checkpoints over them saves: neither is of use without the other."""
        return self._cost_model.seconds_per_entry / max(self._cost_model.bytes_per_entry, 1.0)

    def _build_checkpoint_file(self, key: bytes) -> CacheFile | None:
        checkpoint = self._find_checkpoint(key)
        if checkpoint is None:
            return None
        seconds = checkpoint.position * self._cost_model.seconds_per_entry
        alone = not self._backend.capabilities.has_attention_cells
        return CacheFile(
            kind="state", model=self._model, key=key, parent=checkpoint.parent, start=checkpoint.start,
            entries=self._interner.to_portable_entries(checkpoint.entries), aligned=checkpoint.aligned, cells=0,
            seconds=seconds, value=seconds / checkpoint.nbytes if alone else self._value_per_byte, layout=b"",
            payload=self._backend.serialize_state(checkpoint.state), pinned=checkpoint.pinned,
        )  # fmt: skip

    # --- from the disk

    def prefetch(self, blocks: Sequence[Block], checkpoint: DiskCheckpoint | None) -> bool:
        """Read these on a thread of its own, where that takes long enough to be felt. True: they are not there yet."""
        names: list[FileKey] = [("cells", segment.key) for segment in blocks if segment.rows is None]
        nbytes = sum(segment.nbytes for segment in blocks if segment.rows is None)
        if checkpoint is not None:
            names.append(("state", checkpoint.key))
            nbytes += checkpoint.nbytes
        return nbytes * self._cost_model.seconds_per_disk_byte > MIN_PREFETCH_SECONDS and self.prefetcher.submit(names)

    def _load_file(self, kind: FileKind, key: bytes) -> LoadedFile:
        """A file, from wherever it is by now; what reading it took is measured."""
        started = time.perf_counter()
        ready = self.prefetcher.pop(kind, key)
        loaded = self.writer.load(kind, key) if ready is None else ready[0]
        self._cost_model.record_disk_read(
            len(loaded.payload), time.perf_counter() - started if ready is None else ready[1]
        )
        return loaded

    def load_rows(self, block: Block) -> NDArray[np.uint8]:
        """The cells of a segment, out of its file; `InvalidState` where it does not hold what it should."""
        loaded = self._load_file("cells", block.key)
        item, rows = loaded.file, loaded.to_rows()
        same = (item.parent, item.start, item.cells) == (block.parent, block.start, block.cells)
        if not same or not np.array_equal(item.entries, block.entries):
            self.writer.remove("cells", block.key)
            raise InvalidState("a file holds other entries than it should")
        block.layout = item.layout
        return rows

    def load_state(self, checkpoint: DiskCheckpoint, entries: Entries) -> BackendState:
        """A partial state, out of its file; `InvalidState` where it is not the one after `ids`."""
        try:
            loaded = self._load_file("state", checkpoint.key)
            if not np.array_equal(loaded.file.entries, self._interner.to_portable_entries(entries)):
                self.writer.remove("state", checkpoint.key)
                raise InvalidState("a file holds other entries than it should")
            state = self._backend.deserialize_state(loaded.payload)
        except InvalidState:
            self._remove_checkpoint(checkpoint.key)
            raise
        return state

    def close(self, timeout: float) -> None:
        """Wait so long for what is still to be written."""
        self.prefetcher.close()
        self.writer.close(timeout)

    def touch(self, blocks: Sequence[Block], checkpoint: DiskCheckpoint | None) -> None:
        """Note that these were used."""
        names = [build_file_name("cells", segment.key) for segment in blocks if segment.is_on_disk]
        self.writer.touch(names if checkpoint is None else [*names, build_file_name("state", checkpoint.key)])


def open_disk_tier(
    settings: EngineSettings,
    model: bytes,
    backend: Backend,
    interner: EntryInterner,
    cost_model: CostModel,
    find_block: Callable[[bytes], Block | None],
    find_checkpoint: Callable[[bytes], Checkpoint | None],
) -> DiskTier | None:
    """The disk tier; None where none is wanted, or the disk does not let us."""
    if settings.disk_cache_directory is None or not settings.disk_cache_bytes:
        return None
    try:
        return DiskTier(settings, model, backend, interner, cost_model, find_block, find_checkpoint)
    except OSError as error:
        logger.warning("there is no prefix cache in %s: %s", settings.disk_cache_directory, error)
        return None
