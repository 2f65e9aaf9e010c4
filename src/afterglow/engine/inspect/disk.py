"""Conversations in a disk tier directory: list, pin, clear, and find the nearest prefix to a prompt.

It needs no engine, and engines may use the directory at the same time.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk.index import IndexRow, open_index
from afterglow.engine.kvcache.explain import Explanation
from afterglow.engine.multimodal import embedding_files
from afterglow.engine.types.entries import Entries, common_prefix_length, strip_labels
from afterglow.errors import InvalidArgument, InvalidState

PREVIEW_ENTRIES = 128
MAX_SHOWN_ENTRIES = 4096  # cached entries returned after a divergence
ID_CHARACTERS = 12  # of the key of a conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConversation:
    """One conversation on disk. Shared bytes and seconds are counted only for the first conversation that has them."""

    id: str
    model: str  # digest of everything that determines the meaning of the stored bytes
    entries: int
    nbytes: int
    idle_seconds: float
    hits: int
    seconds_saved: float
    pinned: bool
    first_entries: tuple[int, ...]  # negative entries are media


@dataclass(frozen=True, slots=True, eq=False)
class StoredPath:
    """Index rows of one conversation from its root to its leaf, and all its entries."""

    rows: tuple[IndexRow, ...]
    entries: Entries

    @property
    def last_row(self) -> IndexRow:
        return self.rows[-1]


def list_conversations(directory: Path) -> list[StoredConversation]:
    """Return the conversations of a directory, most recently used first."""
    with open_index(directory) as index:
        rows = index.list_rows()
    counted: set[str] = set()
    conversations = []
    for path in sorted(build_paths(directory, rows), key=lambda path: -path.last_row.last_used):
        uncounted = [row for row in (*path.rows, *_find_checkpoints(path, rows)) if row.name not in counted]
        counted.update(row.name for row in uncounted)
        conversations.append(
            StoredConversation(
                id=path.last_row.key.hex()[:ID_CHARACTERS],
                model=path.last_row.model,
                entries=len(path.entries),
                nbytes=sum(row.nbytes for row in uncounted),
                idle_seconds=max(0.0, time.time() - path.last_row.last_used),
                hits=max(row.hits for row in path.rows),
                seconds_saved=sum(row.hits * row.seconds for row in uncounted if row in path.rows),
                pinned=any(row.is_pinned for row in path.rows),
                first_entries=tuple(map(int, strip_labels(path.entries[:PREVIEW_ENTRIES]))),
            )
        )
    return conversations


def build_paths(directory: Path, rows: Sequence[IndexRow]) -> list[StoredPath]:
    """Build the conversations of the rows: one per leaf block; of a model without blocks, per last checkpoint."""
    blocks = {row.key: row for row in rows if row.kind == "cells"}
    parents = {row.parent for row in blocks.values()}
    paths = []
    for row in blocks.values():
        if row.key not in parents:
            path = [row]
            while path[0].start and path[0].parent in blocks:
                path.insert(0, blocks[path[0].parent])
            if not path[0].start:
                paths.append(StoredPath(tuple(path), np.concatenate([block.entries for block in path])))
    models_with_blocks = {row.model for row in blocks.values()}
    checkpoint_paths = []
    for row in [row for row in rows if row.kind == "state" and row.model not in models_with_blocks]:
        with contextlib.suppress(InvalidState, OSError):  # the index has only its last entries, the file has all
            file, _ = disk_files.read_header(directory / row.model / row.name)
            checkpoint_paths.append(StoredPath((row,), file.entries))
    return paths + _merge_prefixes(checkpoint_paths)


def _merge_prefixes(paths: list[StoredPath]) -> list[StoredPath]:
    """Merge each path that is a prefix of longer paths into them."""
    paths.sort(key=lambda path: -len(path.entries))
    merged: list[StoredPath] = []
    for path in paths:
        continuations = [
            index
            for index, longer in enumerate(merged)
            if longer.last_row.model == path.last_row.model and _starts_with(longer.entries, path.entries)
        ]
        if not continuations:
            merged.append(path)
        for index in continuations:
            merged[index] = StoredPath((*path.rows, *merged[index].rows), merged[index].entries)
    return merged


def _starts_with(entries: Entries, prefix: Entries) -> bool:
    return common_prefix_length(entries, prefix) == len(prefix)


def _find_checkpoints(path: StoredPath, rows: Iterable[IndexRow]) -> list[IndexRow]:
    """Return the checkpoints and last logits along a path."""
    keys = {row.parent for row in path.rows} | {row.key for row in path.rows}
    return [
        row
        for row in rows
        if row.kind != "cells"
        and row.parent in keys
        and row not in path.rows
        and _starts_with(path.entries[row.start :], row.entries)
    ]


# --- pins


def pin(directory: Path, id: str, *, pinned: bool = True) -> StoredConversation:
    """Pin a conversation on disk, or unpin it. Unpinning keeps files that other pinned conversations share."""
    conversation = find_conversation(directory, id)
    with open_index(directory) as index:
        rows = index.list_rows(conversation.model)
        paths = build_paths(directory, rows)
        target = next(path for path in paths if path.last_row.key.hex().startswith(conversation.id))
        other_pinned = [path for path in paths if path is not target and path.last_row.is_pinned]
        protected = {row.name for path in other_pinned for row in (*path.rows, *_find_checkpoints(path, rows))}
        names = {row.name for row in (*target.rows, *_find_checkpoints(target, rows))}
        index.pin(names if pinned else names - protected, until=math.inf if pinned else 0.0)
    return conversation


def find_conversation(directory: Path, id: str) -> StoredConversation:
    """Return the conversation whose id starts with `id`. Raises `InvalidArgument` unless there is exactly one."""
    matches = [stored for stored in list_conversations(directory) if id and stored.id.startswith(id.lower())]
    if len(matches) != 1:
        count = "no conversation" if not matches else f"{len(matches)} conversations"
        raise InvalidArgument("id", f"{id!r} matches {count}: see `afterglow cache`")
    return matches[0]


def clear(directory: Path, models: Collection[str] | None = None) -> int:
    """Remove the files of all or some models, including pinned ones; return the freed bytes.

    Encoded media are always removed, because their files do not record the model. Running engines notice it within
    a second: a conversation is written again, from its beginning, when it continues.
    """
    freed_bytes = embedding_files.remove_embeddings(directory)
    with open_index(directory) as index:
        return freed_bytes + index.clear(models)


# --- nearest prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestPrefix:
    """Stored prefix with the most entries in common with a prompt, and the stored entries after those."""

    explanation: Explanation
    cached_entries: tuple[int, ...]


def find_nearest(directory: Path, models: Collection[str], entries: Entries) -> NearestPrefix:
    """Find the stored prefix of some models nearest to a prompt, as an engine started now would see it."""
    with open_index(directory) as index:
        rows = [row for row in index.list_rows() if row.model in models]
    nearest, shared = None, 0
    for path in sorted(build_paths(directory, rows), key=lambda path: -path.last_row.last_used):
        if (common := common_prefix_length(path.entries, entries)) > shared or nearest is None:
            nearest, shared = path, common
    if nearest is None:
        return build_miss(entries)
    checkpoints = [row for row in (*nearest.rows, *_find_checkpoints(nearest, rows)) if row.kind == "state"]
    limit = min(shared, len(entries) - 1)
    positions = [position for row in checkpoints if (position := row.start + len(row.entries)) <= limit]
    reused = max(positions, default=0) if checkpoints else shared
    following = tuple(map(int, strip_labels(nearest.entries[shared : shared + MAX_SHOWN_ENTRIES])))
    explanation = _build_explanation(entries, reused, shared, next(iter(following), None))
    return NearestPrefix(explanation=explanation, cached_entries=following)


def build_miss(entries: Entries) -> NearestPrefix:
    """Build the result for an empty cache."""
    return NearestPrefix(explanation=_build_explanation(entries, 0, 0, None), cached_entries=())


def _build_explanation(entries: Entries, reused: int, shared: int, cached_entry: int | None) -> Explanation:
    usable = min(shared, len(entries) - 1)
    return Explanation(
        prompt_entries=len(entries),
        reused_entries=min(reused, usable),
        shared_entries=shared,
        next_prompt_entry=int(entries[shared]) if shared < len(entries) else None,
        next_cached_entry=cached_entry,
        cause="nothing in common" if not shared else "fully reused" if reused >= usable else "no checkpoint",
    )
