"""The disk tier as the engine's thread sees it: segments and checkpoints that are in files, found by their names."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backend import Backend, State
from afterglow.engine.checkpoint import Checkpoint
from afterglow.engine.costs import Costs
from afterglow.engine.disk import Disk, Found, Gone, logger
from afterglow.engine.disk_files import Item, Kind, Loaded, file_name
from afterglow.engine.disk_index import Row
from afterglow.engine.entries import Ids, Ledger, common_prefix
from afterglow.engine.read_ahead import Name, ReadAhead
from afterglow.engine.segments import Segment, SegmentTree
from afterglow.engine.settings import EngineSettings
from afterglow.errors import InvalidState

FELT = 0.005  # seconds of reading that running answers would notice


@dataclass(frozen=True, slots=True, eq=False)
class Shelved:
    """A partial state that is in a file: after `start` entries in whole segments named `parent`, and the `rest`."""

    key: bytes
    parent: bytes
    start: int
    rest: Ids
    aligned: int
    nbytes: int

    @property
    def depth(self) -> int:
        return self.start + len(self.rest)


class Shelf:
    """What of the engine's model is on disk. `segment` and `checkpoint` find what is in RAM, from any thread."""

    def __init__(
        self,
        settings: EngineSettings,
        model: bytes,
        backend: Backend,
        ledger: Ledger,
        costs: Costs,
        segment: Callable[[bytes], Segment | None],
        checkpoint: Callable[[bytes], Checkpoint | None],
    ) -> None:
        assert settings.disk_directory is not None
        self._model = model
        self._backend = backend
        self._ledger = ledger
        self._costs = costs
        self._segment = segment
        self._checkpoint = checkpoint
        self._states: dict[bytes, list[Shelved]] = {}  # by the name of the whole segments before them
        self.disk = Disk(
            settings.disk_directory,
            limit=settings.disk_bytes,
            model=model,
            find=self._find,
            label=settings.disk_name,
        )
        self.ahead = ReadAhead(self.disk.load)

    # --- what is there

    def sync(self, tree: SegmentTree) -> list[Segment]:
        """Hear what came and went; the segments that are nowhere any more."""
        lost: list[Segment] = []
        for news in self.disk.news():
            match news:
                case Found(row) if row.kind == "cells":
                    self._found(row, tree)
                case Found(row):
                    self._put(Shelved(row.key, row.parent, row.start, row.ids, row.aligned, row.nbytes))
                case Gone("cells", key):
                    lost += self._gone(key, tree)
                case Gone("state", key):
                    self._drop(key)
        return lost

    def _found(self, row: Row, tree: SegmentTree) -> None:
        known = tree.get(row.key)
        if known is not None:
            known.file_bytes = row.nbytes
        elif row.start == 0 or tree.get(row.parent) is not None:
            age = max(0.0, time.time() - row.used)
            tree.add(
                Segment(
                    key=row.key, parent=row.parent, start=row.start, ids=row.ids, aligned=row.aligned, cells=row.cells,
                    nbytes=row.nbytes, file_bytes=row.nbytes, pinned=bool(row.pinned), hits=row.hits,
                    last_used=time.monotonic() - age,
                )
            )  # fmt: skip

    def _gone(self, key: bytes, tree: SegmentTree) -> list[Segment]:
        segment = tree.get(key)
        if segment is None:
            return []
        segment.file_bytes = 0
        return [] if segment.rows is not None else tree.remove(segment)

    def _put(self, shelved: Shelved) -> None:
        beside = self._states.setdefault(shelved.parent, [])
        beside[:] = [other for other in beside if other.key != shelved.key] + [shelved]

    def _drop(self, key: bytes) -> None:
        for parent, beside in list(self._states.items()):
            beside[:] = [other for other in beside if other.key != key]
            if not beside:
                del self._states[parent]

    def states(self) -> list[Shelved]:
        return [shelved for beside in self._states.values() for shelved in beside]

    def along(self, names: Sequence[bytes], ids: Ids, block: int) -> list[Shelved]:
        """The states that a prompt runs through, deepest first; `names` are those of its beginnings, by segment."""
        found = []
        for index, name in enumerate(names):
            for shelved in self._states.get(name, ()):
                following = self._ledger.stable(ids[index * block : index * block + len(shelved.rest)])
                if shelved.start == index * block and common_prefix(following, shelved.rest) == len(shelved.rest):
                    found.append(shelved)
        return sorted(found, key=lambda shelved: -shelved.depth)

    def clear(self) -> None:
        """Forget everything of this model."""
        self.disk.clear()
        self._states = {}

    # --- to the disk

    def offer(self, thing: Segment | Checkpoint) -> None:
        """Write a segment or a checkpoint, some time."""
        if isinstance(thing, Segment):
            if not thing.on_disk:
                self.disk.offer("cells", thing.key)
        elif all(shelved.key != thing.key for shelved in self._states.get(thing.before, ())):
            self.disk.offer("state", thing.key)

    def _find(self, kind: Kind, key: bytes) -> Item | None:
        """On the disk's thread: what is to be written, if it is still in RAM."""
        return self._cells_item(key) if kind == "cells" else self._state_item(key)

    def _cells_item(self, key: bytes) -> Item | None:
        segment = self._segment(key)
        rows = None if segment is None else segment.rows
        if segment is None or rows is None:
            return None
        return Item(
            kind="cells", model=self._model, key=key, parent=segment.parent, start=segment.start, ids=segment.ids,
            aligned=segment.aligned, cells=segment.cells, seconds=len(segment.ids) * self._costs.per_entry,
            worth=self._worth, layout=segment.layout, payload=[rows.reshape(-1).data], pinned=segment.pinned,
        )  # fmt: skip

    @property
    def _worth(self) -> float:
        """Seconds that a byte of cells or of the checkpoints over them saves: neither is of use without the other."""
        return self._costs.per_entry / max(self._costs.bytes_per_entry, 1.0)

    def _state_item(self, key: bytes) -> Item | None:
        checkpoint = self._checkpoint(key)
        if checkpoint is None:
            return None
        seconds = checkpoint.depth * self._costs.per_entry
        alone = not self._backend.capabilities.has_cells
        return Item(
            kind="state", model=self._model, key=key, parent=checkpoint.before, start=checkpoint.start,
            ids=self._ledger.stable(checkpoint.ids), aligned=checkpoint.aligned, cells=0,
            seconds=seconds, worth=seconds / checkpoint.nbytes if alone else self._worth, layout=b"",
            payload=self._backend.pack(checkpoint.state), pinned=checkpoint.pinned,
        )  # fmt: skip

    # --- from the disk

    def reading(self, segments: Sequence[Segment], shelved: Shelved | None) -> bool:
        """Read these on a thread of its own, where that takes long enough to be felt. True: they are not there yet."""
        names: list[Name] = [("cells", segment.key) for segment in segments if segment.rows is None]
        nbytes = sum(segment.nbytes for segment in segments if segment.rows is None)
        if shelved is not None:
            names.append(("state", shelved.key))
            nbytes += shelved.nbytes
        return nbytes * self._costs.per_disk_byte > FELT and self.ahead.begin(names)

    def _load(self, kind: Kind, key: bytes) -> Loaded:
        """A file, from wherever it is by now; what reading it took is measured."""
        started = time.perf_counter()
        ready = self.ahead.take(kind, key)
        loaded = self.disk.load(kind, key) if ready is None else ready[0]
        self._costs.read(len(loaded.payload), time.perf_counter() - started if ready is None else ready[1])
        return loaded

    def rows(self, segment: Segment) -> NDArray[np.uint8]:
        """The cells of a segment, out of its file; `InvalidState` where it does not hold what it should."""
        loaded = self._load("cells", segment.key)
        item, rows = loaded.item, loaded.rows()
        same = (item.parent, item.start, item.cells) == (segment.parent, segment.start, segment.cells)
        if not same or not np.array_equal(item.ids, segment.ids):
            self.disk.remove("cells", segment.key)
            raise InvalidState("a file holds other entries than it should")
        segment.layout = item.layout
        return rows

    def state(self, shelved: Shelved, ids: Ids) -> State:
        """A partial state, out of its file; `InvalidState` where it is not the one after `ids`."""
        try:
            loaded = self._load("state", shelved.key)
            if not np.array_equal(loaded.item.ids, self._ledger.stable(ids)):
                self.disk.remove("state", shelved.key)
                raise InvalidState("a file holds other entries than it should")
            state = self._backend.unpack(loaded.payload)
        except InvalidState:
            self._drop(shelved.key)
            raise
        return state

    def close(self, seconds: float) -> None:
        """Wait so long for what is still to be written."""
        self.ahead.close()
        self.disk.close(seconds)

    def touch(self, segments: Sequence[Segment], shelved: Shelved | None) -> None:
        """Note that these were used."""
        names = [file_name("cells", segment.key) for segment in segments if segment.on_disk]
        self.disk.touch(names if shelved is None else [*names, file_name("state", shelved.key)])


def open_shelf(
    settings: EngineSettings,
    model: bytes,
    backend: Backend,
    ledger: Ledger,
    costs: Costs,
    segment: Callable[[bytes], Segment | None],
    checkpoint: Callable[[bytes], Checkpoint | None],
) -> Shelf | None:
    """The disk tier; None where none is wanted, or the disk does not let us."""
    if settings.disk_directory is None or not settings.disk_bytes:
        return None
    try:
        return Shelf(settings, model, backend, ledger, costs, segment, checkpoint)
    except OSError as error:
        logger.warning("there is no prefix cache in %s: %s", settings.disk_directory, error)
        return None
