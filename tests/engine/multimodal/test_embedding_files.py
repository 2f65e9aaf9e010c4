"""Encoded pictures on disk: whole or not there, checked, bounded, ours alone."""

from __future__ import annotations

import os

import numpy as np
import pytest

from afterglow.engine.multimodal.embedding_files import EmbeddingFiles
from afterglow.errors import InvalidArgument
from afterglow.llama.projector import MediaEmbedding


def embedding(seed: int, cells: int = 4, width: int = 8) -> MediaEmbedding:
    rows = np.random.default_rng(seed).normal(size=(cells, width)).astype(np.float32)
    return MediaEmbedding(rows, np.arange(4 * cells, dtype=np.int32).reshape(cells, 4), bool(seed % 2))


def name(seed: int) -> bytes:
    return bytes([seed]) * 32


def test_what_was_written_is_read_exactly(tmp_path):
    files = EmbeddingFiles(tmp_path / "kept", 10**6)
    written = [embedding(1), embedding(2, cells=3)]
    files.write(name(1), written)
    read = EmbeddingFiles(tmp_path / "kept", 10**6).read(name(1))
    assert read is not None
    for one, other in zip(written, read, strict=True):
        assert np.array_equal(one.rows, other.rows)
        assert np.array_equal(one.position_offsets, other.position_offsets)
        assert one.non_causal == other.non_causal
    assert files.read(name(2)) is None


def test_a_damaged_file_is_a_miss_and_goes(tmp_path):
    files = EmbeddingFiles(tmp_path / "kept", 10**6)
    files.write(name(1), [embedding(1)])
    (path,) = files.folder.iterdir()
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        assert files.read(name(1)) is None
        assert not path.exists()
        path.write_bytes(whole[:at])
        assert files.read(name(1)) is None
    path.write_bytes(whole)
    assert files.read(name(1)) is not None
    path.rename(path.with_name(name(2).hex() + path.suffix))
    assert files.read(name(2)) is None  # a picture under another's name


def test_old_ones_make_room(tmp_path):
    files = EmbeddingFiles(tmp_path / "kept", 1000)
    for seed in range(9):
        files.write(name(seed), [embedding(seed)])
        path = files.folder / f"{name(seed).hex()}.embeddings"
        os.utime(path, (seed, seed))
        assert sum(one.stat().st_size for one in files.folder.iterdir()) <= 1000
    assert files.read(name(8)) is not None
    assert files.read(name(0)) is None
    files.write(name(20), [embedding(1, cells=1000)])
    assert files.read(name(20)) is None  # larger than all together may be
    files.clear()
    assert not list(files.folder.iterdir())


def test_the_folder_and_its_files_are_ours_alone(tmp_path):
    files = EmbeddingFiles(tmp_path / "kept", 10**6)
    files.write(name(1), [embedding(1)])
    (path,) = files.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert files.folder.stat().st_mode & 0o777 == 0o700
    files.folder.chmod(0o755)
    with pytest.raises(InvalidArgument, match="open to others"):
        EmbeddingFiles(tmp_path / "kept", 10**6)
