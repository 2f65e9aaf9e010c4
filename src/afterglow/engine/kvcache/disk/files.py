"""Files of the disk tier, one per block or checkpoint: written atomically, checked by a checksum over every byte."""

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
MAGIC = b"afterglow segment\x01"  # the last byte is the version of the format
CHECKSUM_BYTES = 32
# kind, model, key, parent, start, number of entries, aligned, cells, bytes of layout and payload, seconds, value
HEADER = struct.Struct("<B32s32s32sQQQQQQdd")
HEADER_OFFSET_BYTES = len(MAGIC) + CHECKSUM_BYTES
MAX_FILE_BYTES = 2**40
LABEL_FILE_NAME = "name"
MAX_LABEL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheFile:
    """Contents of one file: a block ("cells") or a checkpoint ("state")."""

    kind: FileKind
    model: bytes  # hash of library build, weights, cache types and everything else that determines the meaning
    key: bytes
    parent: bytes
    start: int  # number of entries before it; of a checkpoint, those in full blocks
    entries: Entries  # of a checkpoint, all entries before it
    aligned: int
    cells: int
    seconds: float  # compute time
    value: float  # seconds saved per byte, including everything that it depends on
    layout: bytes
    payload: Sequence[Buffer]
    pinned: bool = False  # in the index only, not in the file: a file found without an index is not pinned

    @property
    def name(self) -> str:
        return build_file_name(self.kind, self.key)

    def to_buffers(self) -> list[Buffer]:
        """Return the contents of the file."""
        payload_bytes = sum(len(part) for part in self.payload)
        header = HEADER.pack(
            FILE_KINDS.index(self.kind), self.model, self.key, self.parent, self.start, len(self.entries), self.aligned,
            self.cells, len(self.layout), payload_bytes, self.seconds, self.value,
        )  # fmt: skip
        body: list[Buffer] = [header, self.entries.astype("<i8", copy=False).tobytes(), self.layout, *self.payload]
        checksum = blake3()
        for part in body:
            checksum.update(part)
        return [MAGIC, checksum.digest(), *body]


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """File that was read and checked. `payload` is a view of the memory-mapped file."""

    file: CacheFile
    payload: memoryview

    def to_rows(self) -> NDArray[np.uint8]:
        """Return the cells, one row of bytes per cell."""
        if not self.file.cells or len(self.payload) % self.file.cells:
            raise InvalidState("its cells are incomplete")
        return np.frombuffer(self.payload, dtype=np.uint8).reshape(self.file.cells, -1)


def build_file_name(kind: FileKind, key: bytes) -> str:
    return f"{key.hex()}.{kind}"


def parse_file_name(name: str) -> tuple[FileKind, bytes] | None:
    """Return the kind and key in a file name; None if it is not a file of the disk tier."""
    stem, _, suffix = name.partition(".")
    with contextlib.suppress(ValueError):
        if suffix in FILE_KINDS and len(stem) == 64:
            return suffix, bytes.fromhex(stem)
    return None


def write_file(folder: Path, cache_file: CacheFile) -> int:
    """Write a temporary file, flush it to disk and rename it; return the number of bytes written."""
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
    """Map a file and verify its checksum; raise `InvalidState` if it is damaged."""
    view = _map_file(path)
    file, payload_start = _parse_header(view)
    if blake3(view[HEADER_OFFSET_BYTES:]).digest() != bytes(view[len(MAGIC) : HEADER_OFFSET_BYTES]):
        raise InvalidState("its checksum is wrong")
    if path.name != file.name:
        raise InvalidState("its name does not match its key")
    return LoadedFile(file, view[payload_start:])


def read_header(path: Path) -> tuple[CacheFile, int]:
    """Return the header of a file, without verifying its checksum, and the file size."""
    view = _map_file(path)
    file, _ = _parse_header(view)
    if path.name != file.name:
        raise InvalidState("its name does not match its key")
    return file, len(view)


def _map_file(path: Path) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not HEADER_OFFSET_BYTES + HEADER.size <= status.st_size < MAX_FILE_BYTES:
            raise InvalidState("it is not a regular file, or too short or too long")
        return memoryview(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def _parse_header(view: memoryview) -> tuple[CacheFile, int]:
    """Return the contents without the payload, and the offset of the payload."""
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise InvalidState("it is not a cache file of this version")
    kind, model, key, parent, start, count, aligned, cells, layout_bytes, payload_bytes, seconds, value = (
        HEADER.unpack_from(view, HEADER_OFFSET_BYTES)
    )
    entries_start = HEADER_OFFSET_BYTES + HEADER.size
    layout_start = entries_start + 8 * count
    payload_start = layout_start + layout_bytes
    if kind >= len(FILE_KINDS) or payload_start + payload_bytes != len(view):
        raise InvalidState("its length does not match its header")
    file = CacheFile(
        kind=FILE_KINDS[kind],
        model=model,
        key=key,
        parent=parent,
        start=start,
        entries=np.frombuffer(view[entries_start:layout_start], dtype="<i8").astype(np.int64),
        aligned=aligned,
        cells=cells,
        seconds=seconds,
        value=value,
        layout=bytes(view[layout_start:payload_start]),
        payload=(),
    )
    return file, payload_start


def prepare_directory(directory: Path) -> None:
    """Create the directory with mode 700; raise `InvalidArgument` if other users could read or change it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidArgument("disk_cache_directory", f"{directory} is not a directory")
    if status.st_uid != os.geteuid():
        raise InvalidArgument(
            "disk_cache_directory", f"{directory} belongs to user {status.st_uid}: choose a directory of your own"
        )
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        raise InvalidArgument(
            "disk_cache_directory", f"{directory} is accessible to other users (mode {mode:03o}): run `chmod 700` on it"
        )


def attach_payload(loaded: LoadedFile) -> CacheFile:
    """Return a file that can be written again, e.g. to another directory."""
    return replace(loaded.file, payload=[loaded.payload])


def write_label(folder: Path, label: str) -> None:
    """Write the label of the model to its folder."""
    if label:
        descriptor = os.open(folder / LABEL_FILE_NAME, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(label.encode()[:MAX_LABEL_BYTES])


def read_label(folder: Path) -> str:
    """Return the label of the model of a folder; empty if it has none."""
    with contextlib.suppress(OSError), (folder / LABEL_FILE_NAME).open("rb") as file:
        return file.read(MAX_LABEL_BYTES).decode("utf-8", "replace")
    return ""
