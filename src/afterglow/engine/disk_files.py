"""Stored segments and checkpoints as files: written whole or not at all, trusted only after every byte was checked."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.engine.entries import Ids
from afterglow.errors import InvalidArgument, InvalidState

Kind: TypeAlias = Literal["cells", "state"]
Part: TypeAlias = bytes | memoryview
KINDS: tuple[Kind, ...] = ("cells", "state")
MAGIC = b"afterglow segment\x01"
CHECKSUM = 32
# kind, model, key, parent, start, entries, aligned, cells, bytes of layout and payload, seconds, worth
HEADER = struct.Struct("<B32s32s32sQQQQQQdd")
BEGINNING = len(MAGIC) + CHECKSUM
MOST = 2**40  # bytes of one file
LABEL = "name"
LONGEST_LABEL = 4096  # bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Item:
    """What one file holds."""

    kind: Kind
    model: bytes  # whose numbers these are: library build, weights, cache types, …
    key: bytes
    parent: bytes
    start: int  # entries before it; of a checkpoint, those in whole segments
    ids: Ids  # of a checkpoint, all before it
    aligned: int
    cells: int
    seconds: float  # it took to compute
    worth: float  # seconds that a byte saves, all that belongs to it counted
    layout: bytes
    payload: Sequence[Part]
    pinned: bool = False  # not in the file: whoever finds it may let it go

    @property
    def name(self) -> str:
        return file_name(self.kind, self.key)

    def parts(self) -> list[Part]:
        """The bytes of the file."""
        size = sum(len(part) for part in self.payload)
        header = HEADER.pack(
            KINDS.index(self.kind), self.model, self.key, self.parent, self.start, len(self.ids), self.aligned,
            self.cells, len(self.layout), size, self.seconds, self.worth,
        )  # fmt: skip
        body: list[Part] = [header, self.ids.astype("<i8", copy=False).tobytes(), self.layout, *self.payload]
        checksum = blake3()
        for part in body:
            checksum.update(part)
        return [MAGIC, checksum.digest(), *body]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file in memory, checked. The payload is the file itself, mapped."""

    item: Item
    payload: memoryview

    def rows(self) -> NDArray[np.uint8]:
        """The cells, a row each."""
        if not self.item.cells or len(self.payload) % self.item.cells:
            raise InvalidState("its cells are not all there")
        return np.frombuffer(self.payload, dtype=np.uint8).reshape(self.item.cells, -1)


def file_name(kind: Kind, key: bytes) -> str:
    return f"{key.hex()}.{kind}"


def read_name(name: str) -> tuple[Kind, bytes] | None:
    """What a file is by its name; None: it is none of ours."""
    stem, _, suffix = name.partition(".")
    with contextlib.suppress(ValueError):
        if suffix in KINDS and len(stem) == 64:
            return suffix, bytes.fromhex(stem)
    return None


def write(folder: Path, item: Item) -> int:
    """Put an item into its file: beside it, flushed to the disk, moved into place. The bytes that were written."""
    temporary = folder / f"{item.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    size = 0
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in item.parts():
                size += file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / item.name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return size


def load(path: Path) -> Loaded:
    """Map a file and check every byte of it; `InvalidState` where it is not what was written."""
    view = _map(path)
    item, start = _read(view)
    if blake3(view[BEGINNING:]).digest() != bytes(view[len(MAGIC) : BEGINNING]):
        raise InvalidState("its checksum is wrong")
    if path.name != item.name:
        raise InvalidState("it has the name of another")
    return Loaded(item, view[start:])


def peek(path: Path) -> tuple[Item, int]:
    """What a file says it is, unchecked, and its size."""
    view = _map(path)
    item, _ = _read(view)
    if path.name != item.name:
        raise InvalidState("it has the name of another")
    return item, len(view)


def _map(path: Path) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not BEGINNING + HEADER.size <= status.st_size < MOST:
            raise InvalidState("it is too short")
        return memoryview(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def _read(view: memoryview) -> tuple[Item, int]:
    """The item without its payload, and where that begins."""
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise InvalidState("it is not a segment of this version")
    kind, model, key, parent, start, count, aligned, cells, layout, size, seconds, worth = HEADER.unpack_from(
        view, BEGINNING
    )
    at = BEGINNING + HEADER.size
    if kind >= len(KINDS) or at + 8 * count + layout + size != len(view):
        raise InvalidState("it is not as long as it says")
    ids = np.frombuffer(view[at : at + 8 * count], dtype="<i8").astype(np.int64)
    at += 8 * count
    item = Item(
        kind=KINDS[kind], model=model, key=key, parent=parent, start=start, ids=ids, aligned=aligned, cells=cells,
        seconds=seconds, worth=worth, layout=bytes(view[at : at + layout]), payload=(),
    )  # fmt: skip
    return item, at + layout


def prepare(directory: Path) -> None:
    """Make the directory, for us alone. One that others could read or change is refused."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidArgument("disk_directory", f"{directory} is not a directory")
    if status.st_uid != os.geteuid():
        raise InvalidArgument("disk_directory", f"{directory} belongs to user {status.st_uid}: choose one of your own")
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        raise InvalidArgument(
            "disk_directory", f"{directory} is open to others (mode {mode:03o}): run `chmod 700` on it"
        )


def with_payload(loaded: Loaded) -> Item:
    """An item that can be written again."""
    return replace(loaded.item, payload=[loaded.payload])


def write_label(folder: Path, name: str) -> None:
    """Note what people call the model of a folder."""
    if name:
        descriptor = os.open(folder / LABEL, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(name.encode()[:LONGEST_LABEL])


def read_label(folder: Path) -> str:
    """What people call the model of a folder, where somebody said so."""
    with contextlib.suppress(OSError), (folder / LABEL).open("rb") as file:
        return file.read(LONGEST_LABEL).decode("utf-8", "replace")
    return ""
