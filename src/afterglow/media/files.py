"""Files that may be opened: regular ones inside the allowed directory, however their path is written."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from afterglow.errors import InvalidMedia, MediaRefused
from afterglow.media.policy import MediaPolicy, abbreviate_source

NOFOLLOW_FLAG = getattr(os, "O_NOFOLLOW", 0)
NONBLOCK_FLAG = getattr(os, "O_NONBLOCK", 0)  # a pipe would let us wait for a writer
DIRECTORY_FLAG = getattr(os, "O_DIRECTORY", 0)
READ_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
NO_DIRECTORY_ALLOWED = "files may be opened only in a directory that is allowed, and none is: send the data itself"


def read_file(source: str, policy: MediaPolicy) -> bytes:
    """The bytes of a file inside the allowed directory. What is outside is refused, whether it exists or not."""
    if policy.allowed_directory is None:
        raise MediaRefused(abbreviate_source(source), NO_DIRECTORY_ALLOWED)
    root = Path(policy.allowed_directory).expanduser()
    try:
        root = root.resolve(strict=True)
        wanted = Path(os.path.realpath(root / parse_path(source)))
        inside = wanted.relative_to(root)
    except (ValueError, OSError):
        raise MediaRefused(abbreviate_source(source), "it is not in the directory that is allowed") from None
    try:
        descriptor = _open_inside(root, inside.parts)
        try:
            return _read_regular_file(descriptor, source, policy.max_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidMedia(abbreviate_source(source), f"{error.strerror or error}") from None


def parse_path(source: str) -> str:
    """The path that a `file:` address or a path says. A relative one begins in the allowed directory."""
    if not re.match(r"file:", source, re.IGNORECASE):
        path = source
    else:
        parts = urlsplit(source)
        if parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment:
            raise MediaRefused(abbreviate_source(source), "a file: address has no host, no `?` and no `#`")
        path = unquote(parts.path, errors="strict")
        if os.name == "nt" and re.match(r"/[A-Za-z]:", path):
            path = path[1:]
    if "\0" in path or not path:
        raise MediaRefused(abbreviate_source(source), "that is no path")
    return path


def _open_inside(root: Path, parts: tuple[str, ...]) -> int:
    """Open step by step, following no link: `realpath` found none, and one put there since is not followed."""
    if not parts:
        raise IsADirectoryError(0, "it is a directory")
    if os.open not in os.supports_dir_fd:
        return os.open(root.joinpath(*parts), READ_FLAGS)
    here = os.open(root, READ_FLAGS | DIRECTORY_FLAG)
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        try:
            there = os.open(part, READ_FLAGS | NOFOLLOW_FLAG | (NONBLOCK_FLAG if last else DIRECTORY_FLAG), dir_fd=here)
        finally:
            os.close(here)
        here = there
    return here


def _read_regular_file(descriptor: int, source: str, max_bytes: int) -> bytes:
    """Everything in a regular file, which may grow while it is read."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidMedia(abbreviate_source(source), "it is no regular file")
    with open(descriptor, "rb", closefd=False) as file:
        data = file.read(max_bytes + 1) if found.st_size <= max_bytes else b""
    if max(found.st_size, len(data)) > max_bytes:
        raise InvalidMedia(abbreviate_source(source), f"it has more than {max_bytes:,} bytes, which is the limit here")
    return data
