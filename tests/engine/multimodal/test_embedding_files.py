"""Embedding files: written atomically, checked, bounded and private."""

from __future__ import annotations

import os

import numpy as np
import pytest

from afterglow.engine.multimodal.embedding_files import EmbeddingFiles
from afterglow.errors import InvalidArgument
from afterglow.llama.projector import MediaEmbedding


def build_embedding(seed: int, cells: int = 4, width: int = 8) -> MediaEmbedding:
    rows = np.random.default_rng(seed).normal(size=(cells, width)).astype(np.float32)
    return MediaEmbedding(rows, np.arange(4 * cells, dtype=np.int32).reshape(cells, 4), bool(seed % 2))


def build_key(seed: int) -> bytes:
    return bytes([seed]) * 32


def test_embeddings_are_read_exactly_as_written(tmp_path):
    files = EmbeddingFiles(tmp_path / "cache", 10**6)
    written = [build_embedding(1), build_embedding(2, cells=3)]
    files.write(build_key(1), written)
    read = EmbeddingFiles(tmp_path / "cache", 10**6).read(build_key(1))
    assert read is not None
    for expected, actual in zip(written, read, strict=True):
        assert np.array_equal(expected.rows, actual.rows)
        assert np.array_equal(expected.position_offsets, actual.position_offsets)
        assert expected.non_causal == actual.non_causal
    assert files.read(build_key(2)) is None


def test_a_damaged_file_is_a_miss_and_is_removed(tmp_path):
    files = EmbeddingFiles(tmp_path / "cache", 10**6)
    files.write(build_key(1), [build_embedding(1)])
    (path,) = files.folder.iterdir()
    content = path.read_bytes()
    for offset in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[offset] ^= 1
        path.write_bytes(damaged)
        assert files.read(build_key(1)) is None
        assert not path.exists()
        path.write_bytes(content[:offset])
        assert files.read(build_key(1)) is None
    path.write_bytes(content)
    assert files.read(build_key(1)) is not None
    path.rename(path.with_name(build_key(2).hex() + path.suffix))
    assert files.read(build_key(2)) is None  # a file under the name of another content


def test_the_oldest_files_are_evicted(tmp_path):
    files = EmbeddingFiles(tmp_path / "cache", 1000)
    for seed in range(9):
        files.write(build_key(seed), [build_embedding(seed)])
        path = files.folder / f"{build_key(seed).hex()}.embeddings"
        os.utime(path, (seed, seed))
        assert sum(file.stat().st_size for file in files.folder.iterdir()) <= 1000
    assert files.read(build_key(8)) is not None
    assert files.read(build_key(0)) is None
    files.write(build_key(20), [build_embedding(1, cells=1000)])
    assert files.read(build_key(20)) is None  # larger than the limit of all files
    files.clear()
    assert not list(files.folder.iterdir())


def test_the_folder_and_its_files_are_private(tmp_path):
    files = EmbeddingFiles(tmp_path / "cache", 10**6)
    files.write(build_key(1), [build_embedding(1)])
    (path,) = files.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert files.folder.stat().st_mode & 0o777 == 0o700
    files.folder.chmod(0o755)
    with pytest.raises(InvalidArgument, match="accessible to other users"):
        EmbeddingFiles(tmp_path / "cache", 10**6)
