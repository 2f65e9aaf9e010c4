"""What a directory of the disk tier holds, for people: its conversations, what is nearest to a prompt, and their pins.

It needs no engine, and engines may use the directory meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afterglow.engine import disk_files, picture_files
from afterglow.engine.disk_index import Row, open_index
from afterglow.engine.entries import Ids, common_prefix
from afterglow.engine.explanation import Explanation
from afterglow.errors import InvalidArgument, InvalidState

FIRST = 128  # entries that show what a conversation is
AFTER = 4096  # entries that are shown behind a difference
SHORT = 12  # characters of a name that people see


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConversation:
    """One conversation on disk. Bytes and seconds that several share are counted with the first of them."""

    id: str
    model: str  # a digest of everything that decides what its bytes mean
    entries: int
    nbytes: int
    age: float  # seconds since it was used
    hits: int
    seconds_saved: float
    pinned: bool
    first: tuple[int, ...]  # entries that it begins with; negative ones are pictures


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """The files of one conversation from its beginning on, and all its entries."""

    rows: tuple[Row, ...]
    ids: Ids

    @property
    def end(self) -> Row:
        return self.rows[-1]


def conversations(directory: Path) -> list[StoredConversation]:
    """What a directory holds, the last used first."""
    with open_index(directory) as index:
        rows = index.rows()
    counted: set[str] = set()
    found = []
    for line in sorted(lines(directory, rows), key=lambda line: -line.end.used):
        own = [row for row in (*line.rows, *_marks(line, rows)) if row.name not in counted]
        counted.update(row.name for row in own)
        found.append(
            StoredConversation(
                id=line.end.key.hex()[:SHORT],
                model=line.end.model,
                entries=len(line.ids),
                nbytes=sum(row.nbytes for row in own),
                age=max(0.0, time.time() - line.end.used),
                hits=max(row.hits for row in line.rows),
                seconds_saved=sum(row.hits * row.seconds for row in own if row in line.rows),
                pinned=any(row.pinned for row in line.rows),
                first=tuple(map(int, line.ids[:FIRST])),
            )
        )
    return found


def lines(directory: Path, rows: Sequence[Row]) -> list[Line]:
    """The conversations that rows are made of. Of a model without cells, each checkpoint that no other goes on from."""
    cells = {row.key: row for row in rows if row.kind == "cells"}
    parents = {row.parent for row in cells.values()}
    found = []
    for row in cells.values():
        if row.key not in parents:
            path = [row]
            while path[0].start and path[0].parent in cells:
                path.insert(0, cells[path[0].parent])
            if not path[0].start:
                found.append(Line(tuple(path), np.concatenate([one.ids for one in path])))
    with_cells = {row.model for row in cells.values()}
    alone = [row for row in rows if row.model not in with_cells]
    return found + _ends([line for row in alone if (line := _checkpoint(directory, row)) is not None])


def _checkpoint(directory: Path, row: Row) -> Line | None:
    """A checkpoint as a line of its own; the table has only its last entries, the file all."""
    with contextlib.suppress(InvalidState, OSError):
        return Line((row,), disk_files.peek(directory / row.model / row.name)[0].ids)
    return None


def _ends(found: list[Line]) -> list[Line]:
    """Those that are no beginning of another; each with those that are its beginnings."""
    found.sort(key=lambda line: -len(line.ids))
    kept: list[Line] = []
    for line in found:
        after = [one for one in kept if one.end.model == line.end.model and _begins(one.ids, line.ids)]
        if not after:
            kept.append(line)
        for one in after:
            kept[kept.index(one)] = Line((*line.rows, *one.rows), one.ids)
    return kept


def _begins(ids: Ids, beginning: Ids) -> bool:
    return common_prefix(ids, beginning) == len(beginning)


def _marks(line: Line, rows: Iterable[Row]) -> list[Row]:
    """The checkpoints along a line."""
    names = {row.parent for row in line.rows} | {row.key for row in line.rows}
    return [
        row
        for row in rows
        if row.kind == "state"
        and row.parent in names
        and row not in line.rows
        and _begins(line.ids[row.start :], row.ids)
    ]


# --- pins


def pin(directory: Path, id: str, *, pinned: bool = True) -> StoredConversation:
    """Never let go of a conversation on disk, or, with `pinned` False, take that back. What others pin stays pinned."""
    found = chosen(directory, id)
    with open_index(directory) as index:
        rows = index.rows(found.model)
        every = lines(directory, rows)
        line = next(line for line in every if line.end.key.hex().startswith(found.id))
        others = [one for one in every if one is not line and one.end.pinned]
        held = {row.name for one in others for row in (*one.rows, *_marks(one, rows))}
        names = {row.name for row in (*line.rows, *_marks(line, rows))}
        index.pin(names if pinned else names - held, pinned=pinned)
    return found


def chosen(directory: Path, id: str) -> StoredConversation:
    """The one conversation whose id begins so; `InvalidArgument` where there is none, or more than one."""
    found = [one for one in conversations(directory) if id and one.id.startswith(id.lower())]
    if len(found) != 1:
        some = "no conversation" if not found else f"{len(found)} conversations"
        raise InvalidArgument("id", f"{id!r} is the beginning of {some}: see `afterglow cache`")
    return found[0]


def clear(directory: Path, models: Collection[str] | None = None) -> int:
    """Forget everything, or everything of some models, pinned too; the bytes that are free now.

    What is encoded of pictures and sounds does not say of which model it is, and goes in any case.
    """
    freed = picture_files.remove_all(directory)
    with open_index(directory) as index:
        index.collect()
        for row in index.rows():
            if models is None or row.model in models:
                (directory / row.model / row.name).unlink(missing_ok=True)
                index.remove([row.name])
                freed += row.nbytes
    return freed


# --- what is nearest to a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """What on disk has most in common with a prompt, and the entries that come after that."""

    explanation: Explanation
    theirs: tuple[int, ...]


def nearest(directory: Path, models: Collection[str], ids: Ids) -> Nearest:
    """What of the models has most in common with a prompt, as if an engine were started now."""
    with open_index(directory) as index:
        rows = [row for row in index.rows() if row.model in models]
    best, shared = None, 0
    for line in sorted(lines(directory, rows), key=lambda line: -line.end.used):
        if (common := common_prefix(line.ids, ids)) > shared or best is None:
            best, shared = line, common
    if best is None:
        return nothing(ids)
    marks = [row for row in (*best.rows, *_marks(best, rows)) if row.kind == "state"]
    depths = [depth for row in marks if (depth := row.start + len(row.ids)) <= min(shared, len(ids) - 1)]
    reused = max(depths, default=0) if marks else shared
    theirs = tuple(map(int, best.ids[shared : shared + AFTER]))
    return Nearest(explanation=_explanation(ids, reused, shared, next(iter(theirs), None)), theirs=theirs)


def nothing(ids: Ids) -> Nearest:
    """Where nothing is kept."""
    return Nearest(explanation=_explanation(ids, 0, 0, None), theirs=())


def _explanation(ids: Ids, reused: int, shared: int, theirs: int | None) -> Explanation:
    usable = min(shared, len(ids) - 1)
    return Explanation(
        prompt=len(ids),
        reused=min(reused, usable),
        shared=shared,
        ours=int(ids[shared]) if shared < len(ids) else None,
        theirs=theirs,
        cause="nothing in common" if not shared else "all of it" if reused >= usable else "no checkpoint",
    )
