"""What pictures and sounds may come in: from where, and how large."""

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
    """By default only what a message itself contains: no address is asked and no file is opened.

    `allowed_hosts` are names such as `example.com` (with `:8443` for a port that is not the usual one),
    `*.example.com` for all names below it, or `*` for every host on the public internet.

    >>> MediaPolicy(allowed_hosts=("example.com",)).allow_private
    False
    """

    allowed_hosts: tuple[str, ...] = ()
    allow_private: bool = False  # also addresses inside a network, and this machine
    allowed_directory: str | os.PathLike[str] | None = None  # the files in it and below may be opened
    max_bytes: int = 20 * 1024 * 1024  # of a file as it comes
    max_pixels: int = 32_000_000
    max_side_pixels: int = 16_384  # pixels
    max_audio_seconds: float = 30 * 60  # of sound
    max_decoded_bytes: int = 384 * 1024 * 1024  # of everything in one conversation
    max_redirects: int = 3
    fetch_timeout_seconds: float = 10.0  # for everything about one address

    def __post_init__(self) -> None:
        if isinstance(self.allowed_hosts, str):
            raise InvalidArgument("allowed_hosts", "must be a list of names, not one text")
        for host in self.allowed_hosts:
            if not host or re.search(r"[/@\s]", host):
                raise InvalidArgument("allowed_hosts", f"{host!r} is no host: write example.com or *.example.com")
        if self.allowed_directory is not None and not Path(self.allowed_directory).expanduser().is_dir():
            raise InvalidArgument("allowed_directory", f"{self.allowed_directory} is no directory")
        for name in (
            "max_bytes",
            "max_pixels",
            "max_side_pixels",
            "max_audio_seconds",
            "max_decoded_bytes",
            "fetch_timeout_seconds",
        ):
            if getattr(self, name) <= 0:
                raise InvalidArgument(name, f"must be more than 0, not {getattr(self, name)}")
        if self.max_redirects < 0:
            raise InvalidArgument("max_redirects", f"must not be negative, not {self.max_redirects}")


INLINE_ONLY = MediaPolicy()


def abbreviate_source(source: str, length: int = 80) -> str:
    """A source as errors name it: without the data, and short.

    >>> shown("data:image/png;base64,iVBORw0KGgo")
    'data:image/png;base64,…'
    """
    clean = "".join(character if character.isprintable() else "�" for character in source[: length + 1])
    if clean[:5].lower() == "data:" and "," in clean:
        return clean.partition(",")[0] + ",…"
    return clean if len(clean) <= length else clean[:length] + "…"
