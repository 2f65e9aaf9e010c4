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

from afterglow.engine.types.entries import Entries
from afterglow.errors import InvalidArgument, InvalidState

FileKind: TypeAlias = Literal["cells", "state"]
Buffer: TypeAlias = bytes | memoryview
FILE_KINDS: tuple[FileKind, ...] = ("cells", "state")
MAGIC = b"afterglow segment\x01"
CHECKSUM_BYTES = 32
# kind, model, key, parent, start, entries, aligned, cells, bytes of layout and payload, seconds, worth
HEADER = struct.Struct("<B32s32s32sQQQQQQdd")
HEADER_OFFSET_BYTES = len(MAGIC) + CHECKSUM_BYTES
MAX_FILE_BYTES = 2**40  # bytes of one file
LABEL_FILE_NAME = "name"
MAX_LABEL_BYTES = 4096  # bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheFile:
    """What one file holds."""

    kind: FileKind
    model: bytes  # whose numbers these are: library build, weights, cache types, …
    key: bytes
    parent: bytes
    start: int  # entries before it; of a checkpoint, those in whole segments
    entries: Entries  # of a checkpoint, all before it
    aligned: int
    cells: int
    seconds: float  # it took to compute
    value: float  # seconds that a byte saves, all that belongs to it counted
    layout: bytes
    payload: Sequence[Buffer]
    pinned: bool = False  # not in the file: whoever finds it may let it go

    @property
    def name(self) -> str:
        return build_file_name(self.kind, self.key)

    def to_buffers(self) -> list[Buffer]:
        """The bytes of the file."""
        size = sum(len(part) for part in self.payload)
        header = HEADER.pack(
            FILE_KINDS.index(self.kind), self.model, self.key, self.parent, self.start, len(self.entries), self.aligned,
            self.cells, len(self.layout), size, self.seconds, self.value,
        )  # fmt: skip
        body: list[Buffer] = [header, self.entries.astype("<i8", copy=False).tobytes(), self.layout, *self.payload]
        checksum = blake3()
        for part in body:
            checksum.update(part)
        return [MAGIC, checksum.digest(), *body]


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A file in memory, checked. The payload is the file itself, mapped."""

    file: CacheFile
    payload: memoryview

    def to_rows(self) -> NDArray[np.uint8]:
        """The cells, a row each."""
        if not self.file.cells or len(self.payload) % self.file.cells:
            raise InvalidState("its cells are not all there")
        return np.frombuffer(self.payload, dtype=np.uint8).reshape(self.file.cells, -1)


def build_file_name(kind: FileKind, key: bytes) -> str:
    return f"{key.hex()}.{kind}"


def parse_file_name(name: str) -> tuple[FileKind, bytes] | None:
    """What a file is by its name; None: it is none of ours."""
    stem, _, suffix = name.partition(".")
    with contextlib.suppress(ValueError):
        if suffix in FILE_KINDS and len(stem) == 64:
            return suffix, bytes.fromhex(stem)
    return None


def write_file(folder: Path, cache_file: CacheFile) -> int:
    """Put an item into its file: beside it, flushed to the disk, moved into place. The bytes that were written."""
    temporary = folder / f"{cache_file.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    size = 0
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in cache_file.to_buffers():
                size += file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / cache_file.name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return size


def load_file(path: Path) -> LoadedFile:
    """Map a file and check every byte of it; `InvalidState` where it is not what was written."""
    view = _map_file(path)
    item, start = _parse_header(view)
    if blake3(view[HEADER_OFFSET_BYTES:]).digest() != bytes(view[len(MAGIC) : HEADER_OFFSET_BYTES]):
        raise InvalidState("its checksum is wrong")
    if path.name != item.name:
        raise InvalidState("it has the name of another")
    return LoadedFile(item, view[start:])


def read_header(path: Path) -> tuple[CacheFile, int]:
    """What a file says it is, unchecked, and its size."""
    view = _map_file(path)
    item, _ = _parse_header(view)
    if path.name != item.name:
        raise InvalidState("it has the name of another")
    return item, len(view)


def _map_file(path: Path) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not HEADER_OFFSET_BYTES + HEADER.size <= status.st_size < MAX_FILE_BYTES:
            raise InvalidState("it is too short")
        return memoryview(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def _parse_header(view: memoryview) -> tuple[CacheFile, int]:
    """The item without its payload, and where that begins."""
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise InvalidState("it is not a segment of this version")
    kind, model, key, parent, start, count, aligned, cells, layout, size, seconds, worth = HEADER.unpack_from(
        view, HEADER_OFFSET_BYTES
    )
    at = HEADER_OFFSET_BYTES + HEADER.size
    if kind >= len(FILE_KINDS) or at + 8 * count + layout + size != len(view):
        raise InvalidState("it is not as long as it says")
    ids = np.frombuffer(view[at : at + 8 * count], dtype="<i8").astype(np.int64)
    at += 8 * count
    item = CacheFile(
        kind=FILE_KINDS[kind], model=model, key=key, parent=parent, start=start, entries=ids, aligned=aligned, cells=cells,
        seconds=seconds, value=worth, layout=bytes(view[at : at + layout]), payload=(),
    )  # fmt: skip
    return item, at + layout


def prepare_directory(directory: Path) -> None:
    """Make the directory, for us alone. One that others could read or change is refused."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidArgument("disk_cache_directory", f"{directory} is not a directory")
    if status.st_uid != os.geteuid():
        raise InvalidArgument(
            "disk_cache_directory", f"{directory} belongs to user {status.st_uid}: choose one of your own"
        )
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        raise InvalidArgument(
            "disk_cache_directory", f"{directory} is open to others (mode {mode:03o}): run `chmod 700` on it"
        )


def attach_payload(loaded: LoadedFile) -> CacheFile:
    """An item that can be written again."""
    return replace(loaded.file, payload=[loaded.payload])


def write_label(folder: Path, label: str) -> None:
    """Note what people call the model of a folder."""
    if label:
        descriptor = os.open(folder / LABEL_FILE_NAME, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(label.encode()[:MAX_LABEL_BYTES])


def read_label(folder: Path) -> str:
    """What people call the model of a folder, where somebody said so."""
    with contextlib.suppress(OSError), (folder / LABEL_FILE_NAME).open("rb") as file:
        return file.read(MAX_LABEL_BYTES).decode("utf-8", "replace")
    return ""
