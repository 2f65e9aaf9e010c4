"""Encoded pictures as files, by the rules of the disk tier: whole or not there, checked, ours alone, bounded."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.errors import InvalidState
from afterglow.llama.projector import MediaEmbedding

EMBEDDINGS_FOLDER = "pictures"
SUFFIX = ".embeddings"
MAGIC = b"afterglow pictures\x01"
CHECKSUM_BYTES = 32
HEADER_STRUCT = struct.Struct("<32sQ")  # what it is of, and pieces
PIECE_STRUCT = struct.Struct("<QQ?")  # rows, numbers in each, whether they are computed in one go
MAX_FILE_BYTES = 2**32  # bytes of one file
STALE_AFTER_SECONDS = 3600.0  # seconds after which a half-written file belongs to nobody


class EmbeddingFiles:
    """A folder of encoded pictures. For one thread; any number of processes may share the folder."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """`directory` is the disk tier's; of its own folder in it, files may take `limit` bytes."""
        disk_files.prepare_directory(directory)
        self.folder = directory / EMBEDDINGS_FOLDER
        disk_files.prepare_directory(self.folder)
        self._max_bytes = max_bytes

    def read(self, source_key: bytes) -> list[MediaEmbedding] | None:
        """What was written of this content. A damaged file is a miss, and goes."""
        path = self._path(source_key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                data = file.read(MAX_FILE_BYTES)
        except OSError:
            return None
        try:
            embeddings = unpack_embeddings(data, source_key)
        except (InvalidState, struct.error, ValueError):
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the oldest go first
        return embeddings

    def write(self, source_key: bytes, embeddings: Sequence[MediaEmbedding]) -> None:
        """Keep it: beside, flushed, moved into place. Older ones make room."""
        data = pack_embeddings(embeddings, source_key)
        if len(data) > self._max_bytes:
            return
        self._evict(len(data))
        path = self._path(source_key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def clear(self) -> None:
        """Remove all of them."""
        remove_embeddings(self.folder.parent)

    def _path(self, source_key: bytes) -> Path:
        return self.folder / f"{source_key.hex()}{SUFFIX}"

    def _evict(self, size: int) -> None:
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        found.sort()
        used = sum(size for _, size, _ in found)
        newest = found[-1][0] if found else 0.0
        for modified, nbytes, path in found:
            if used + size > self._max_bytes or (path.suffix == ".tmp" and newest - modified > STALE_AFTER_SECONDS):
                path.unlink(missing_ok=True)
                used -= nbytes


def remove_embeddings(directory: Path) -> int:
    """Remove what is encoded in a directory of the disk tier; the bytes that are free now."""
    freed = 0
    for path in (directory / EMBEDDINGS_FOLDER).glob("*"):
        with contextlib.suppress(OSError):
            size = path.lstat().st_size
            path.unlink()
            freed += size
    return freed


def pack_embeddings(embeddings: Sequence[MediaEmbedding], source_key: bytes) -> bytes:
    """As a file has it."""
    parts = [HEADER_STRUCT.pack(source_key, len(embeddings))]
    for one in embeddings:
        parts += [PIECE_STRUCT.pack(*one.rows.shape, one.non_causal), one.position_offsets.astype("<i4").tobytes()]
        parts.append(one.rows.astype("<f4").tobytes())
    body = b"".join(parts)
    return MAGIC + blake3(body).digest() + body


def unpack_embeddings(data: bytes, source_key: bytes) -> list[MediaEmbedding]:
    """The reverse; `InvalidState` where it is not what was written of this content."""
    start = len(MAGIC) + CHECKSUM_BYTES
    body = memoryview(data)[start:]
    if data[: len(MAGIC)] != MAGIC or blake3(body).digest() != data[len(MAGIC) : start]:
        raise InvalidState("it is damaged, or something else")
    whose, count = HEADER_STRUCT.unpack_from(body)
    if whose != source_key:
        raise InvalidState("it is of another picture")
    at, found = HEADER_STRUCT.size, []
    for _ in range(count):
        cells, width, whole = PIECE_STRUCT.unpack_from(body, at)
        at += PIECE_STRUCT.size
        offsets = np.frombuffer(body, dtype="<i4", count=4 * cells, offset=at).reshape(cells, 4).astype(np.int32)
        at += offsets.nbytes
        rows = np.frombuffer(body, dtype="<f4", count=cells * width, offset=at).reshape(cells, width)
        at += rows.nbytes
        found.append(MediaEmbedding(rows.astype(np.float32), offsets, whole))
    return found
