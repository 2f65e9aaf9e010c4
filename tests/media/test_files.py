"""Media files are read from the allowed directory and from nowhere else."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from afterglow.errors import InvalidMedia, MediaRefused
from afterglow.media import files
from afterglow.media.load import load_media_bytes
from afterglow.media.policy import MediaPolicy


@pytest.fixture
def directory(tmp_path):
    """Directory with an image in it and a secret file next to it."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "images-2").mkdir()
    (tmp_path / "images-2" / "other.png").write_bytes(b"secret")
    directory = tmp_path / "images"
    (directory / "below").mkdir(parents=True)
    (directory / "a b.png").write_bytes(b"image")
    (directory / "below" / "c.png").write_bytes(b"below")
    return directory


@pytest.fixture
def policy(directory):
    return MediaPolicy(allowed_directory=directory, max_bytes=1000)


def test_a_file_in_the_directory_is_read_by_any_notation_of_its_path(directory, policy):
    for name in (
        "a b.png",
        "below/../a b.png",
        f"{directory}/a b.png",
        f"file://{directory}/a%20b.png".replace(" ", "%20"),
    ):
        assert load_media_bytes("image", name, policy) == b"image"
    assert load_media_bytes("image", f"file://localhost{directory}/below/c.png", policy) == b"below"


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "below/../../secret.png",
        "{directory}/../secret.png",
        "../images-2/other.png",
        "file://{directory}/../secret.png",
        "file://{directory}/%2e%2e/secret.png",
        "file://elsewhere{directory}/a%20b.png",
        "file://{directory}/a%20b.png?x",
        "/etc/passwd",
        "/proc/self/environ",
        "file:///etc/passwd",
        "~/secret.png",
        "a\0b.png",
        "",
        "link.png",
        "door/secret.png",
    ],
)
def test_a_path_outside_is_refused_whether_it_exists_or_not(directory, policy, name):
    (directory / "link.png").symlink_to(directory.parent / "secret.png")
    (directory / "door").symlink_to(directory.parent)
    with pytest.raises((MediaRefused, InvalidMedia)) as caught:
        load_media_bytes("image", name.format(directory=directory), policy)
    assert isinstance(caught.value, MediaRefused) or name == "~/secret.png"  # an ordinary file name here
    (directory.parent / "secret.png").unlink()
    if "secret" in name and "~" not in name:
        with pytest.raises(MediaRefused) as second:
            load_media_bytes("image", name.format(directory=directory), policy)
        assert str(second.value) == str(caught.value)


def test_a_link_inside_the_directory_is_followed(directory, policy):
    (directory / "near.png").symlink_to("below/c.png")
    assert load_media_bytes("image", "near.png", policy) == b"below"


def test_a_link_created_after_the_check_is_not_followed(directory, policy, monkeypatch):
    real = os.path.realpath

    def realpath_then_swap(path, *args, **kwargs):
        resolved = real(path, *args, **kwargs)
        if str(path).endswith("c.png"):
            (directory / "below" / "c.png").unlink()
            (directory / "below" / "c.png").symlink_to(directory.parent / "secret.png")
        return resolved

    monkeypatch.setattr(files.os.path, "realpath", realpath_then_swap)
    with pytest.raises(InvalidMedia):
        load_media_bytes("image", "below/c.png", policy)


def test_only_regular_files_are_read_and_a_fifo_does_not_block(directory, policy):
    os.mkfifo(directory / "pipe.png")
    start = time.monotonic()
    for name, message in (("pipe.png", "regular"), ("below", "regular|directory"), (".", "directory")):
        with pytest.raises(InvalidMedia, match=message):
            load_media_bytes("image", name, policy)
    assert time.monotonic() - start < 60


def test_a_missing_or_too_large_file_is_reported(directory, policy):
    with pytest.raises(InvalidMedia, match="No such file"):
        load_media_bytes("image", "missing.png", policy)
    (directory / "large.png").write_bytes(bytes(1001))
    with pytest.raises(InvalidMedia, match="limit of 1,000 bytes"):
        load_media_bytes("image", "large.png", policy)


def test_no_descriptor_is_left_open(directory, policy):
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for name in ("a b.png", "below", "missing.png", "below/c.png/x", "/etc/passwd"):
        for _ in range(5):
            with contextlib.suppress(InvalidMedia, MediaRefused):
                load_media_bytes("image", name, policy)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_without_an_allowed_directory_no_file_is_opened(directory):
    for name in (f"{directory}/a b.png", f"file://{directory}/a%20b.png"):
        with pytest.raises(MediaRefused, match="send the data inline"):
            load_media_bytes("image", name)


@pytest.mark.parametrize("has_dir_fd", [True, False])
def test_a_link_that_replaces_a_part_of_a_resolved_path_is_not_followed(directory, monkeypatch, has_dir_fd):
    if not has_dir_fd:
        monkeypatch.setattr(os, "supports_dir_fd", set())
    root = directory.resolve()
    os.close(files._open_inside(root, ("below", "c.png")))
    (directory / "link.png").symlink_to(directory.parent / "secret.png")
    (directory / "door").symlink_to(directory.parent)
    for parts in (("link.png",), ("door", "secret.png")):
        with pytest.raises(OSError, match=r"symbolic link|replaced by a link|Not a directory"):
            files._open_inside(root, parts)
