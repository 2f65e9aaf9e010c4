"""Files come from the allowed directory and from nowhere else."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from afterglow.errors import InvalidMedia, MediaRefused
from afterglow.media import files
from afterglow.media.load import MediaPolicy, load_media_bytes


@pytest.fixture
def place(tmp_path):
    """A directory with a picture in it, and a secret beside it."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "pictures-2").mkdir()
    (tmp_path / "pictures-2" / "other.png").write_bytes(b"secret")
    inside = tmp_path / "pictures"
    (inside / "below").mkdir(parents=True)
    (inside / "a b.png").write_bytes(b"picture")
    (inside / "below" / "c.png").write_bytes(b"below")
    return inside


@pytest.fixture
def policy(place):
    return MediaPolicy(allowed_directory=place, max_bytes=1000)


def test_files_in_the_directory_are_read_however_they_are_named(place, policy):
    for name in ("a b.png", "below/../a b.png", f"{place}/a b.png", f"file://{place}/a%20b.png".replace(" ", "%20")):
        assert load_media_bytes("image", name, policy) == b"picture"
    assert load_media_bytes("image", f"file://localhost{place}/below/c.png", policy) == b"below"


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "below/../../secret.png",
        "{place}/../secret.png",
        "../pictures-2/other.png",
        "file://{place}/../secret.png",
        "file://{place}/%2e%2e/secret.png",
        "file://elsewhere{place}/a%20b.png",
        "file://{place}/a%20b.png?x",
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
def test_what_is_outside_is_refused_whether_it_is_there_or_not(place, policy, name):
    (place / "link.png").symlink_to(place.parent / "secret.png")
    (place / "door").symlink_to(place.parent)
    with pytest.raises((MediaRefused, InvalidMedia)) as caught:
        load_media_bytes("image", name.format(place=place), policy)
    assert isinstance(caught.value, MediaRefused) or name == "~/secret.png"  # which is a name like others here
    (place.parent / "secret.png").unlink()
    if "secret" in name and "~" not in name:
        with pytest.raises(MediaRefused) as again:
            load_media_bytes("image", name.format(place=place), policy)
        assert str(again.value) == str(caught.value)


def test_a_link_that_stays_inside_is_followed(place, policy):
    (place / "near.png").symlink_to("below/c.png")
    assert load_media_bytes("image", "near.png", policy) == b"below"


def test_a_link_put_there_after_the_check_is_not_followed(place, policy, monkeypatch):
    real = os.path.realpath

    def then_swapped(path, *rest, **more):
        found = real(path, *rest, **more)
        if str(path).endswith("c.png"):
            (place / "below" / "c.png").unlink()
            (place / "below" / "c.png").symlink_to(place.parent / "secret.png")
        return found

    monkeypatch.setattr(files.os.path, "realpath", then_swapped)
    with pytest.raises(InvalidMedia):
        load_media_bytes("image", "below/c.png", policy)


def test_only_regular_files_are_read_and_nothing_waits(place, policy):
    os.mkfifo(place / "pipe.png")
    began = time.monotonic()
    for name, words in (("pipe.png", "regular"), ("below", "regular|directory"), (".", "directory")):
        with pytest.raises(InvalidMedia, match=words):
            load_media_bytes("image", name, policy)
    assert time.monotonic() - began < 1


def test_a_file_that_is_missing_or_too_large_is_said(place, policy):
    with pytest.raises(InvalidMedia, match="No such file"):
        load_media_bytes("image", "missing.png", policy)
    (place / "large.png").write_bytes(bytes(1001))
    with pytest.raises(InvalidMedia, match="more than 1,000 bytes"):
        load_media_bytes("image", "large.png", policy)


def test_no_descriptor_is_left_open(place, policy):
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for name in ("a b.png", "below", "missing.png", "below/c.png/x", "/etc/passwd"):
        for _ in range(5):
            with contextlib.suppress(InvalidMedia, MediaRefused):
                load_media_bytes("image", name, policy)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_directory_no_file_is_opened(place):
    for name in (f"{place}/a b.png", f"file://{place}/a%20b.png"):
        with pytest.raises(MediaRefused, match="send the data itself"):
            load_media_bytes("image", name)
