"""Files of the disk tier, one per block, checkpoint or logits: written atomically, every byte under a checksum."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO, FileIO
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.engine.types.entries import Entries
from afterglow.errors import InvalidArgument, InvalidState
from afterglow.llama import page_buffers

FileKind: TypeAlias = Literal["cells", "state", "logits"]
Buffer: TypeAlias = bytes | memoryview
FILE_KINDS: tuple[FileKind, ...] = ("cells", "state", "logits")
MAGIC = b"afterglow block\x01"  # the last byte is the version of the format
CHECKSUM_BYTES = 32
# kind, model, key, parent, start, number of entries, unused, cells, bytes of layout and payload, seconds, value
HEADER = struct.Struct("<B32s32s32sQQ8xQQQdd")
HEADER_OFFSET_BYTES = len(MAGIC) + CHECKSUM_BYTES
HEAD_BYTES = HEADER_OFFSET_BYTES + HEADER.size
MAX_FILE_BYTES = 2**40
# A pin is in the attributes of the file, so that it outlives the index: the mode if it has no expiry, else the time of
# modification, which is in the future.
UNPINNED_MODE, PINNED_MODE = 0o600, 0o400
LABEL_FILE_NAME = "name"
MAX_LABEL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheFile:
    """Contents of one file: a block ("cells"), a checkpoint ("state") or the logits after a prompt ("logits")."""

    kind: FileKind
    model: bytes  # hash of library build, weights, cache types and everything else that determines the meaning
    key: bytes
    parent: bytes
    start: int  # number of entries before it; of a checkpoint or logits, those in full blocks
    entries: Entries  # of a checkpoint or logits, all entries before it
    cells: int
    seconds: float  # compute time
    value: float  # seconds saved per byte, including everything that it depends on
    layout: bytes
    payload: Sequence[Buffer]
    pinned_until: float = 0.0  # wall-clock time; in the attributes of the file: see `PINNED_MODE`
    needs_cells: bool = True  # not in the file. False: a checkpoint of a model without attention cells

    @property
    def name(self) -> str:
        return build_file_name(self.kind, self.key)

    @property
    def parent_name(self) -> str | None:
        """Name of the file of the block before it, without which it is of no use; None if it needs none."""
        return build_file_name("cells", self.parent) if self.start and self.needs_cells else None

    def to_buffers(self) -> list[Buffer]:
        """Return the contents of the file."""
        payload_bytes = sum(len(part) for part in self.payload)
        header = HEADER.pack(
            FILE_KINDS.index(self.kind), self.model, self.key, self.parent, self.start, len(self.entries), self.cells,
            len(self.layout), payload_bytes, self.seconds, self.value,
        )  # fmt: skip
        body: list[Buffer] = [header, self.entries.astype("<i8", copy=False).tobytes(), self.layout, *self.payload]
        checksum = blake3()
        for part in body:
            checksum.update(part)
        return [MAGIC, checksum.digest(), *body]


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """File that was read and checked. `payload` is in `page_buffers`: it can be kept without a copy."""

    file: CacheFile
    payload: memoryview

    @property
    def has_all_cells(self) -> bool:
        """Whether the payload can be divided into the cells of the file."""
        return self.file.cells > 0 and len(self.payload) % self.file.cells == 0

    def to_rows(self) -> NDArray[np.uint8]:
        """Return the cells, one row of bytes per cell."""
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


def write_temporary(folder: Path, cache_file: CacheFile) -> tuple[Path, int]:
    """Write a temporary file and flush it to disk; return its path and size. The caller renames it."""
    temporary, size = write_beside(folder / cache_file.name, cache_file.to_buffers())
    if cache_file.pinned_until:
        write_pin(temporary, cache_file.pinned_until)
    return temporary, size


def write_beside(path: Path, parts: Iterable[Buffer]) -> tuple[Path, int]:
    """Write a temporary file beside `path` and flush it to disk; return its path and size."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, UNPINNED_MODE)
    size = 0
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                size += file.write(part)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary, size


def write_file(folder: Path, cache_file: CacheFile) -> int:
    """Write a file atomically; return the number of bytes written."""
    temporary, size = write_temporary(folder, cache_file)
    try:
        os.replace(temporary, folder / cache_file.name)
    finally:
        delete_file(temporary)
    return size


def load_file(path: Path) -> LoadedFile:
    """Read a file and verify its checksum; raise `InvalidState` if it is damaged.

    Files are not memory-mapped: reading a mapping of a file that was truncated ends the process (SIGBUS).
    """
    with _open_file(path) as file:
        header, cache_file, payload_bytes = _read_header(file, os.fstat(file.fileno()).st_size)
        payload = page_buffers.allocate_zeros(payload_bytes, populate=False)  # several threads read files
        _read_into(file, payload.data)
    _verify_checksum(header, payload.data)
    if path.name != cache_file.name:
        raise InvalidState("its name does not match its key")
    return LoadedFile(cache_file, payload.data)


def decode_file(data: bytes) -> LoadedFile:
    """Return the file with these contents after verifying its checksum; raise `InvalidState` if it is damaged."""
    file = BytesIO(data)
    header, cache_file, _ = _read_header(file, len(data))
    payload = memoryview(data)[len(header) :]
    _verify_checksum(header, payload)
    return LoadedFile(cache_file, page_buffers.copy_to_pages(np.frombuffer(payload, dtype=np.uint8)).data)


@dataclass(frozen=True, slots=True)
class FileHead:
    """What the first `HEAD_BYTES` of a file tell, unverified."""

    key: bytes
    parent: bytes
    start: int
    count: int  # of entries


def decode_head(head: bytes) -> FileHead | None:
    """Return the contents of the first `HEAD_BYTES` of a file; None if they are not of this version."""
    if len(head) != HEAD_BYTES or head[: len(MAGIC)] != MAGIC:
        return None
    _, _, key, parent, start, count, *_ = HEADER.unpack_from(head, HEADER_OFFSET_BYTES)
    return FileHead(key, parent, start, count)


def read_header(path: Path) -> tuple[CacheFile, int]:
    """Return the contents of a file without the payload, without verifying its checksum, and the file size."""
    with _open_file(path) as file:
        header, cache_file, payload_bytes = _read_header(file, os.fstat(file.fileno()).st_size)
    if path.name != cache_file.name:
        raise InvalidState("its name does not match its key")
    return replace(cache_file, pinned_until=read_pin(path)), len(header) + payload_bytes


def read_pin(path: Path) -> float:
    """Return the wall-clock time until which a file is pinned; 0 if it is not."""
    status = path.lstat()
    if not status.st_mode & stat.S_IWUSR:
        return math.inf
    return status.st_mtime if status.st_mtime > time.time() else 0.0


def write_pin(path: Path, until: float) -> None:
    """Pin a file until a wall-clock time, or unpin it (0)."""
    now = time.time()
    os.chmod(path, PINNED_MODE if until == math.inf else UNPINNED_MODE)
    os.utime(path, (now, until if now < until < math.inf else now))


def delete_file(path: Path) -> None:
    """Delete a file if it exists. A folder in its place is not ours and stays."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()


@contextlib.contextmanager
def _open_file(path: Path) -> Iterator[FileIO]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidState("it is not a regular file")
        with FileIO(descriptor, closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _read_into(file: FileIO | BytesIO, buffer: memoryview) -> None:
    """Fill a buffer; raise `InvalidState` if the file ends before."""
    while len(buffer):
        count = file.readinto(buffer)
        if not count:
            raise InvalidState("it ended while it was read")
        buffer = buffer[count:]


def _verify_checksum(header: bytes, payload: memoryview) -> None:
    if blake3(header[HEADER_OFFSET_BYTES:]).update(payload).digest() != header[len(MAGIC) : HEADER_OFFSET_BYTES]:
        raise InvalidState("its checksum is wrong")


def _read_header(file: FileIO | BytesIO, size: int) -> tuple[bytes, CacheFile, int]:
    """Read everything before the payload: return its bytes, the contents, and the number of bytes of the payload."""
    if not HEAD_BYTES <= size < MAX_FILE_BYTES:
        raise InvalidState("it is too short or too long")
    start = bytearray(HEAD_BYTES)
    _read_into(file, memoryview(start))
    if start[: len(MAGIC)] != MAGIC:
        raise InvalidState("it is not a cache file of this version")
    kind, model, key, parent, first, count, cells, layout_bytes, payload_bytes, seconds, value = HEADER.unpack_from(
        start, HEADER_OFFSET_BYTES
    )
    if kind >= len(FILE_KINDS) or len(start) + 8 * count + layout_bytes + payload_bytes != size:
        raise InvalidState("its length does not match its header")
    if max(first, cells) > MAX_FILE_BYTES or not math.isfinite(seconds):
        raise InvalidState("its header is damaged")
    rest = bytearray(8 * count + layout_bytes)
    _read_into(file, memoryview(rest))
    cache_file = CacheFile(
        kind=FILE_KINDS[kind],
        model=model,
        key=key,
        parent=parent,
        start=first,
        entries=np.frombuffer(rest, dtype="<i8", count=count).astype(np.int64),
        cells=cells,
        seconds=seconds,
        value=value,
        layout=bytes(rest[8 * count :]),
        payload=(),
    )
    return bytes(start + rest), cache_file, payload_bytes


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


def write_label(folder: Path, label: str) -> None:
    """Write the label of the model to its folder, unless it is there."""
    if label and label != read_label(folder):
        descriptor = os.open(folder / LABEL_FILE_NAME, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(label.encode()[:MAX_LABEL_BYTES])


def read_label(folder: Path) -> str:
    """Return the label of the model of a folder; empty if it has none."""
    with contextlib.suppress(OSError), (folder / LABEL_FILE_NAME).open("rb") as file:
        return file.read(MAX_LABEL_BYTES).decode("utf-8", "replace")
    return ""
