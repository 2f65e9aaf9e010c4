"""Reads regular files inside the allowed directory, and no others, however the path is written."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from afterglow.errors import InvalidMedia, MediaRefused
from afterglow.media.policy import MediaPolicy, abbreviate_source

NOFOLLOW_FLAG = getattr(os, "O_NOFOLLOW", 0)
NONBLOCK_FLAG = getattr(os, "O_NONBLOCK", 0)  # opening a FIFO would block until a writer opens it
DIRECTORY_FLAG = getattr(os, "O_DIRECTORY", 0)
READ_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
NO_DIRECTORY_ALLOWED = "no directory is allowed for media files: send the data inline, as a data: URI"


def read_file(source: str, policy: MediaPolicy) -> bytes:
    """Read a file inside the allowed directory. Refuses paths outside it, whether they exist or not."""
    if policy.allowed_directory is None:
        raise MediaRefused(abbreviate_source(source), NO_DIRECTORY_ALLOWED)
    root = Path(policy.allowed_directory).expanduser()
    try:
        root = root.resolve(strict=True)
        path = Path(os.path.realpath(root / parse_path(source)))
        relative = path.relative_to(root)
    except (ValueError, OSError):
        raise MediaRefused(abbreviate_source(source), "it is not in the allowed directory") from None
    try:
        descriptor = _open_inside(root, relative.parts)
        try:
            return _read_regular_file(descriptor, source, policy.max_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidMedia(abbreviate_source(source), f"{error.strerror or error}") from None


def parse_path(source: str) -> str:
    """Return the path of a `file:` URL or of a plain path. Relative paths start in the allowed directory."""
    if not re.match(r"file:", source, re.IGNORECASE):
        path = source
    else:
        parts = urlsplit(source)
        if parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment:
            raise MediaRefused(abbreviate_source(source), "a file: URL must not have a host, a `?` or a `#`")
        path = unquote(parts.path, errors="strict")
        if os.name == "nt" and re.match(r"/[A-Za-z]:", path):
            path = path[1:]
    if "\0" in path or not path:
        raise MediaRefused(abbreviate_source(source), "it is not a valid path")
    return path


def _open_inside(root: Path, parts: tuple[str, ...]) -> int:
    """Open a path component by component without following links.

    `realpath` resolved all links, so a link on the way was created since then.
    """
    if not parts:
        raise IsADirectoryError(0, "it is a directory")
    if os.open not in os.supports_dir_fd:
        return _open_without_dir_fd(root.joinpath(*parts))
    parent = os.open(root, READ_FLAGS | DIRECTORY_FLAG)
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        flags = READ_FLAGS | NOFOLLOW_FLAG | (NONBLOCK_FLAG if is_last else DIRECTORY_FLAG)
        try:
            child = os.open(part, flags, dir_fd=parent)
        finally:
            os.close(parent)
        parent = child
    return parent


def _open_without_dir_fd(path: Path) -> int:
    """Open a resolved path on systems without `dir_fd`, then check that no link was created on the way to it."""
    descriptor = os.open(path, READ_FLAGS | NOFOLLOW_FLAG | NONBLOCK_FLAG)
    try:
        if Path(os.path.realpath(path)) != path or not os.path.samestat(os.stat(path), os.fstat(descriptor)):
            raise OSError(errno.ELOOP, "it was replaced by a link")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read_regular_file(descriptor: int, source: str, max_bytes: int) -> bytes:
    """Read a whole regular file up to the size limit; the file may grow during the read."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidMedia(abbreviate_source(source), "it is not a regular file")
    with open(descriptor, "rb", closefd=False) as file:
        data = file.read(max_bytes + 1) if status.st_size <= max_bytes else b""
    if max(status.st_size, len(data)) > max_bytes:
        raise InvalidMedia(abbreviate_source(source), f"it exceeds the limit of {max_bytes:,} bytes")
    return data
