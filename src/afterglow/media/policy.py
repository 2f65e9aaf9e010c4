"""Media policy: allowed sources and size limits of images and audio."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from afterglow.errors import InvalidArgument

Modality: TypeAlias = Literal["image", "audio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """Allowed sources and size limits. The default allows only inline data: no URL is fetched and no file is opened.

    `allowed_hosts` are hostnames, e.g. `example.com` (`example.com:8443` for a non-default port), `*.example.com` for
    all subdomains, or `*` for every host on the public internet.

    >>> MediaPolicy(allowed_hosts=("example.com",)).allow_private
    False
    """

    allowed_hosts: tuple[str, ...] = ()
    allow_private: bool = False  # also private and loopback IP addresses
    allowed_directory: str | os.PathLike[str] | None = None  # files in it and its subdirectories may be opened
    max_bytes: int = 20 * 1024 * 1024  # of an encoded file
    max_pixels: int = 32_000_000
    max_side_pixels: int = 16_384
    max_audio_seconds: float = 30 * 60
    max_decoded_bytes: int = 384 * 1024 * 1024  # of all media in one conversation; also the memory of all decoders
    max_redirects: int = 3
    fetch_timeout_seconds: float = 10.0  # for one URL, including redirects

    def __post_init__(self) -> None:
        if isinstance(self.allowed_hosts, str) or not isinstance(self.allowed_hosts, Collection):
            raise InvalidArgument("allowed_hosts", f"must be a list of hostnames, not {self.allowed_hosts!r}")
        for host in self.allowed_hosts:
            if not isinstance(host, str) or not host or re.search(r"[/@\s]", host):
                reason = f"must be hostnames such as example.com or *.example.com, not {host!r}"
                raise InvalidArgument("allowed_hosts", reason)
        if self.allowed_directory is not None and not _is_directory(self.allowed_directory):
            raise InvalidArgument("allowed_directory", f"must be an existing directory, not '{self.allowed_directory}'")
        sizes = ("max_bytes", "max_pixels", "max_side_pixels", "max_audio_seconds", "max_decoded_bytes")
        for name in (*sizes, "fetch_timeout_seconds"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise InvalidArgument(name, f"must be a number of more than 0, not {value!r}")
        if not isinstance(self.max_redirects, int) or self.max_redirects < 0:
            raise InvalidArgument("max_redirects", f"must be an integer of at least 0, not {self.max_redirects!r}")


def _is_directory(path: str | os.PathLike[str]) -> bool:
    """Return whether a path, perhaps with the home directory of a user, is that of a directory."""
    try:
        return Path(path).expanduser().is_dir()
    except (TypeError, RuntimeError):  # no path, or no such user
        return False


INLINE_ONLY = MediaPolicy()


def abbreviate_source(source: str, length: int = 80) -> str:
    """Shorten a source for error messages, without inline data.

    >>> abbreviate_source("data:image/png;base64,iVBORw0KGgo")
    'data:image/png;base64,…'
    """
    clean = "".join(character if character.isprintable() else "�" for character in source[: length + 1])
    if clean[:5].lower() == "data:" and "," in clean:
        return clean.partition(",")[0] + ",…"
    return clean if len(clean) <= length else clean[:length] + "…"
