"""Files that may be opened: regular ones inside the allowed directory, however their path is written."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from afterglow.errors import InvalidMedia, MediaRefused
from afterglow.media.policy import MediaPolicy, shown

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe would let us wait for a writer
DIRECTORY = getattr(os, "O_DIRECTORY", 0)
PLAIN = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
ABSENT = "files may be opened only in a directory that is allowed, and none is: send the data itself"


def read_file(source: str, policy: MediaPolicy) -> bytes:
    """The bytes of a file inside the allowed directory. What is outside is refused, whether it exists or not."""
    if policy.allowed_directory is None:
        raise MediaRefused(shown(source), ABSENT)
    root = Path(policy.allowed_directory).expanduser()
    try:
        root = root.resolve(strict=True)
        wanted = Path(os.path.realpath(root / written_path(source)))
        inside = wanted.relative_to(root)
    except (ValueError, OSError):
        raise MediaRefused(shown(source), "it is not in the directory that is allowed") from None
    try:
        descriptor = _descriptor(root, inside.parts)
        try:
            return _contents(descriptor, source, policy.max_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidMedia(shown(source), f"{error.strerror or error}") from None


def written_path(source: str) -> str:
    """The path that a `file:` address or a path says. A relative one begins in the allowed directory."""
    if not re.match(r"file:", source, re.IGNORECASE):
        path = source
    else:
        parts = urlsplit(source)
        if parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment:
            raise MediaRefused(shown(source), "a file: address has no host, no `?` and no `#`")
        path = unquote(parts.path, errors="strict")
        if os.name == "nt" and re.match(r"/[A-Za-z]:", path):
            path = path[1:]
    if "\0" in path or not path:
        raise MediaRefused(shown(source), "that is no path")
    return path


def _descriptor(root: Path, parts: tuple[str, ...]) -> int:
    """Open step by step, following no link: `realpath` found none, and one put there since is not followed."""
    if not parts:
        raise IsADirectoryError(0, "it is a directory")
    if os.open not in os.supports_dir_fd:
        return os.open(root.joinpath(*parts), PLAIN)
    here = os.open(root, PLAIN | DIRECTORY)
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        try:
            there = os.open(part, PLAIN | NO_FOLLOW | (NO_WAIT if last else DIRECTORY), dir_fd=here)
        finally:
            os.close(here)
        here = there
    return here


def _contents(descriptor: int, source: str, limit: int) -> bytes:
    """Everything in a regular file, which may grow while it is read."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidMedia(shown(source), "it is no regular file")
    with open(descriptor, "rb", closefd=False) as file:
        data = file.read(limit + 1) if found.st_size <= limit else b""
    if max(found.st_size, len(data)) > limit:
        raise InvalidMedia(shown(source), f"it has more than {limit:,} bytes, which is the limit here")
    return data
