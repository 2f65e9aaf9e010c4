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

from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk.index import IndexRow, open_index
from afterglow.engine.kvcache.explain import Explanation
from afterglow.engine.multimodal import embedding_files
from afterglow.engine.types.entries import Entries, common_prefix_length
from afterglow.errors import InvalidArgument, InvalidState

PREVIEW_ENTRIES = 128  # entries that show what a conversation is
MAX_SHOWN_ENTRIES = 4096  # entries that are shown behind a difference
ID_CHARACTERS = 12  # characters of a name that people see


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConversation:
    """One conversation on disk. Bytes and seconds that several share are counted with the first of them."""

    id: str
    model: str  # a digest of everything that decides what its bytes mean
    entries: int
    nbytes: int
    idle_seconds: float  # seconds since it was used
    hits: int
    seconds_saved: float
    pinned: bool
    first_entries: tuple[int, ...]  # entries that it begins with; negative ones are pictures


@dataclass(frozen=True, slots=True, eq=False)
class StoredPath:
    """The files of one conversation from its beginning on, and all its entries."""

    rows: tuple[IndexRow, ...]
    entries: Entries

    @property
    def last_row(self) -> IndexRow:
        return self.rows[-1]


def list_conversations(directory: Path) -> list[StoredConversation]:
    """What a directory holds, the last used first."""
    with open_index(directory) as index:
        rows = index.list_rows()
    counted: set[str] = set()
    found = []
    for line in sorted(build_paths(directory, rows), key=lambda line: -line.last_row.last_used):
        own = [row for row in (*line.rows, *_find_checkpoints(line, rows)) if row.name not in counted]
        counted.update(row.name for row in own)
        found.append(
            StoredConversation(
                id=line.last_row.key.hex()[:ID_CHARACTERS],
                model=line.last_row.model,
                entries=len(line.entries),
                nbytes=sum(row.nbytes for row in own),
                idle_seconds=max(0.0, time.time() - line.last_row.last_used),
                hits=max(row.hits for row in line.rows),
                seconds_saved=sum(row.hits * row.seconds for row in own if row in line.rows),
                pinned=any(row.pinned for row in line.rows),
                first_entries=tuple(map(int, line.entries[:PREVIEW_ENTRIES])),
            )
        )
    return found


def build_paths(directory: Path, rows: Sequence[IndexRow]) -> list[StoredPath]:
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
                found.append(StoredPath(tuple(path), np.concatenate([one.entries for one in path])))
    with_cells = {row.model for row in cells.values()}
    alone = [row for row in rows if row.model not in with_cells]
    return found + _merge_prefixes(
        [line for row in alone if (line := _read_checkpoint_path(directory, row)) is not None]
    )


def _read_checkpoint_path(directory: Path, row: IndexRow) -> StoredPath | None:
    """A checkpoint as a line of its own; the table has only its last entries, the file all."""
    with contextlib.suppress(InvalidState, OSError):
        return StoredPath((row,), disk_files.read_header(directory / row.model / row.name)[0].entries)
    return None


def _merge_prefixes(paths: list[StoredPath]) -> list[StoredPath]:
    """Those that are no beginning of another; each with those that are its beginnings."""
    paths.sort(key=lambda line: -len(line.entries))
    kept: list[StoredPath] = []
    for line in paths:
        after = [
            one for one in kept if one.last_row.model == line.last_row.model and _starts_with(one.entries, line.entries)
        ]
        if not after:
            kept.append(line)
        for one in after:
            kept[kept.index(one)] = StoredPath((*line.rows, *one.rows), one.entries)
    return kept


def _starts_with(entries: Entries, prefix: Entries) -> bool:
    return common_prefix_length(entries, prefix) == len(prefix)


def _find_checkpoints(path: StoredPath, rows: Iterable[IndexRow]) -> list[IndexRow]:
    """The checkpoints along a line."""
    names = {row.parent for row in path.rows} | {row.key for row in path.rows}
    return [
        row
        for row in rows
        if row.kind == "state"
        and row.parent in names
        and row not in path.rows
        and _starts_with(path.entries[row.start :], row.entries)
    ]


# --- pins


def pin(directory: Path, id: str, *, pinned: bool = True) -> StoredConversation:
    """Never let go of a conversation on disk, or, with `pinned` False, take that back. What others pin stays pinned."""
    found = find_conversation(directory, id)
    with open_index(directory) as index:
        rows = index.list_rows(found.model)
        every = build_paths(directory, rows)
        line = next(line for line in every if line.last_row.key.hex().startswith(found.id))
        others = [one for one in every if one is not line and one.last_row.pinned]
        held = {row.name for one in others for row in (*one.rows, *_find_checkpoints(one, rows))}
        names = {row.name for row in (*line.rows, *_find_checkpoints(line, rows))}
        index.pin(names if pinned else names - held, pinned=pinned)
    return found


def find_conversation(directory: Path, id: str) -> StoredConversation:
    """The one conversation whose id begins so; `InvalidArgument` where there is none, or more than one."""
    found = [one for one in list_conversations(directory) if id and one.id.startswith(id.lower())]
    if len(found) != 1:
        some = "no conversation" if not found else f"{len(found)} conversations"
        raise InvalidArgument("id", f"{id!r} is the beginning of {some}: see `afterglow cache`")
    return found[0]


def clear(directory: Path, models: Collection[str] | None = None) -> int:
    """Forget everything, or everything of some models, pinned too; the bytes that are free now.

    What is encoded of pictures and sounds does not say of which model it is, and goes in any case.
    """
    freed = embedding_files.remove_embeddings(directory)
    with open_index(directory) as index:
        index.reconcile()
        for row in index.list_rows():
            if models is None or row.model in models:
                (directory / row.model / row.name).unlink(missing_ok=True)
                index.remove([row.name])
                freed += row.nbytes
    return freed


# --- what is nearest to a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestPrefix:
    """What on disk has most in common with a prompt, and the entries that come after that."""

    explanation: Explanation
    cached_entries: tuple[int, ...]


def find_nearest(directory: Path, models: Collection[str], entries: Entries) -> NearestPrefix:
    """What of the models has most in common with a prompt, as if an engine were started now."""
    with open_index(directory) as index:
        rows = [row for row in index.list_rows() if row.model in models]
    best, shared = None, 0
    for line in sorted(build_paths(directory, rows), key=lambda line: -line.last_row.last_used):
        if (common := common_prefix_length(line.entries, entries)) > shared or best is None:
            best, shared = line, common
    if best is None:
        return build_miss(entries)
    marks = [row for row in (*best.rows, *_find_checkpoints(best, rows)) if row.kind == "state"]
    depths = [depth for row in marks if (depth := row.start + len(row.entries)) <= min(shared, len(entries) - 1)]
    reused = max(depths, default=0) if marks else shared
    theirs = tuple(map(int, best.entries[shared : shared + MAX_SHOWN_ENTRIES]))
    return NearestPrefix(
        explanation=_build_explanation(entries, reused, shared, next(iter(theirs), None)), cached_entries=theirs
    )


def build_miss(entries: Entries) -> NearestPrefix:
    """Where nothing is kept."""
    return NearestPrefix(explanation=_build_explanation(entries, 0, 0, None), cached_entries=())


def _build_explanation(entries: Entries, reused: int, shared: int, cached_entry: int | None) -> Explanation:
    usable = min(shared, len(entries) - 1)
    return Explanation(
        prompt_entries=len(entries),
        reused_entries=min(reused, usable),
        shared_entries=shared,
        next_prompt_entry=int(entries[shared]) if shared < len(entries) else None,
        next_cached_entry=cached_entry,
        cause="nothing in common" if not shared else "all of it" if reused >= usable else "no checkpoint",
    )
