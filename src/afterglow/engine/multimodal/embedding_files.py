"""Media embeddings as files, under the rules of the disk tier: atomic writes, checksums, private, bounded in size."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.eviction import choose_victims
from afterglow.errors import InvalidState
from afterglow.llama.projector import MediaEmbedding

EMBEDDINGS_FOLDER = "media"
SUFFIX = ".embeddings"
MAGIC = b"afterglow media\x01"
CHECKSUM_BYTES = 32
HEADER_STRUCT = struct.Struct("<32sQ")  # source key, number of pieces
PIECE_STRUCT = struct.Struct("<QQ?")  # rows, values per row, whether the rows need non-causal attention
MAX_FILE_BYTES = 2**32
STALE_AFTER_SECONDS = 3600.0  # a temporary file of this age belongs to a process that died


class EmbeddingFiles:
    """A folder of embedding files. Used by one thread; any number of processes may share the folder."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """`directory` is that of the disk tier; the files are in a folder of their own there, at most `max_bytes`."""
        disk_files.prepare_directory(directory)
        self.folder = directory / EMBEDDINGS_FOLDER
        disk_files.prepare_directory(self.folder)
        self._max_bytes = max_bytes

    def read(self, source_key: bytes) -> list[MediaEmbedding] | None:
        """Return the embeddings of a content, or None. A damaged file is a miss and is removed."""
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
            os.utime(path)  # eviction is by modification time
        return embeddings

    def write(self, source_key: bytes, embeddings: Sequence[MediaEmbedding]) -> None:
        """Write a file atomically: to a temporary file, flushed, then renamed. Evicts older files if needed."""
        data = pack_embeddings(embeddings, source_key)
        if len(data) > self._max_bytes:
            return
        self._evict(len(data))
        path = self._path(source_key)
        temporary, _ = disk_files.write_beside(path, [data])
        try:
            os.replace(temporary, path)
        finally:
            disk_files.delete_file(temporary)

    def clear(self) -> None:
        """Remove all files."""
        remove_embeddings(self.folder.parent)

    def _path(self, source_key: bytes) -> Path:
        return self.folder / f"{source_key.hex()}{SUFFIX}"

    def _evict(self, size: int) -> None:
        """Remove the oldest files until `size` more bytes fit, and stale temporary files."""
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        files.sort()
        newest = files[-1][0] if files else 0.0
        stale = [
            path for modified, _, path in files if path.suffix == ".tmp" and newest - modified > STALE_AFTER_SECONDS
        ]
        excess = sum(nbytes for _, nbytes, _ in files) + size - self._max_bytes
        for path in stale + choose_victims([(path, nbytes) for _, nbytes, path in files], excess):
            path.unlink(missing_ok=True)


def remove_embeddings(directory: Path) -> int:
    """Remove all embedding files in a directory of the disk tier. Return the bytes that were freed."""
    freed = 0
    for path in (directory / EMBEDDINGS_FOLDER).glob("*"):
        with contextlib.suppress(OSError):
            size = path.lstat().st_size
            path.unlink()
            freed += size
    return freed


def pack_embeddings(embeddings: Sequence[MediaEmbedding], source_key: bytes) -> bytes:
    """Return the content of an embedding file."""
    parts = [HEADER_STRUCT.pack(source_key, len(embeddings))]
    for piece in embeddings:
        parts.append(PIECE_STRUCT.pack(*piece.rows.shape, piece.non_causal))
        parts.append(piece.position_offsets.astype("<i4").tobytes())
        parts.append(piece.rows.astype("<f4").tobytes())
    body = b"".join(parts)
    return MAGIC + blake3(body).digest() + body


def unpack_embeddings(data: bytes, source_key: bytes) -> list[MediaEmbedding]:
    """Parse an embedding file. Raise `InvalidState` if it is damaged or of another content."""
    start = len(MAGIC) + CHECKSUM_BYTES
    body = memoryview(data)[start:]
    if data[: len(MAGIC)] != MAGIC or blake3(body).digest() != data[len(MAGIC) : start]:
        raise InvalidState("the file is damaged, or not an embedding file")
    stored_key, count = HEADER_STRUCT.unpack_from(body)
    if stored_key != source_key:
        raise InvalidState("the file is of another content")
    offset, embeddings = HEADER_STRUCT.size, []
    for _ in range(count):
        cells, width, non_causal = PIECE_STRUCT.unpack_from(body, offset)
        offset += PIECE_STRUCT.size
        offsets = np.frombuffer(body, dtype="<i4", count=4 * cells, offset=offset).reshape(cells, 4).astype(np.int32)
        offset += offsets.nbytes
        rows = np.frombuffer(body, dtype="<f4", count=cells * width, offset=offset).reshape(cells, width)
        offset += rows.nbytes
        embeddings.append(MediaEmbedding(rows.astype(np.float32), offsets, non_causal))
    return embeddings
