"""Media policy: allowed sources and size limits of images and audio."""

from __future__ import annotations

import os
import re
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
        if isinstance(self.allowed_hosts, str):
            raise InvalidArgument("allowed_hosts", "must be a list of hostnames, not a string")
        for host in self.allowed_hosts:
            if not host or re.search(r"[/@\s]", host):
                reason = f"{host!r} is not a hostname: write example.com or *.example.com"
                raise InvalidArgument("allowed_hosts", reason)
        if self.allowed_directory is not None and not Path(self.allowed_directory).expanduser().is_dir():
            raise InvalidArgument("allowed_directory", f"{self.allowed_directory} is not a directory")
        sizes = ("max_bytes", "max_pixels", "max_side_pixels", "max_audio_seconds", "max_decoded_bytes")
        for name in (*sizes, "fetch_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(name, f"must be more than 0, not {getattr(self, name)}")
        if self.max_redirects < 0:
            raise InvalidArgument("max_redirects", f"must be at least 0, not {self.max_redirects}")


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
