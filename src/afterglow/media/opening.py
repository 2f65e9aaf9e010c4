"""Pictures and sounds from wherever they are: in the message itself, at an address, or in a file."""

from __future__ import annotations

import base64
import binascii
import re
import threading
from urllib.parse import unquote_to_bytes

from afterglow.errors import InvalidMedia, MediaRefused
from afterglow.media import identity
from afterglow.media.contents import Content
from afterglow.media.fetching import fetch
from afterglow.media.files import read_file
from afterglow.media.pictures import picture_of
from afterglow.media.policy import CLOSED, Kind, MediaPolicy, shown
from afterglow.media.sounds import sound_of

__all__ = ["CLOSED", "MediaPolicy", "bring", "open_attachment"]

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least: one is a drive
BASE64 = re.compile(r"[A-Za-z0-9+/\s]*={0,2}\s*")
STARTS = {  # of files written as base64 text
    "image": ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD", "Qk"),
    "audio": ("UklGR", "SUQz", "//", "ZkxhQ"),
}
DECODING = threading.BoundedSemaphore(2)  # a picture takes a few hundred MiB while it is decoded


def open_attachment(
    kind: Kind, source: str, policy: MediaPolicy = CLOSED, *, id: str | None = None, detail: str = "auto"
) -> Content:
    """A picture or a sound, decoded.

    `source` is a data URI, base64 text, an http(s) or file address, or a path; the last three only as the policy
    allows. An `id` is the FNV-1a of the bytes, and is checked. Takes its time: not for an event loop.

    >>> open_attachment("image", "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw==").width
    1
    """
    data = bring(kind, source, policy)
    if id is not None:
        identity.check(id, data)
    with DECODING:
        if kind == "image":
            return picture_of(data, policy, source=shown(source), detail=detail)
        return sound_of(data, policy, source=shown(source))


def bring(kind: Kind, source: str, policy: MediaPolicy = CLOSED) -> bytes:
    """The bytes behind a source, from wherever they are allowed to come."""
    scheme = found[1].lower() if (found := SCHEME.match(source)) else ""
    match scheme:
        case "data":
            return _written(source, policy)
        case "http" | "https":
            return fetch(source, policy)
        case "" if source.startswith(STARTS[kind]) and BASE64.fullmatch(source):
            return _base64(source, source, policy)
        case "file" | "":
            return read_file(source, policy)
    raise MediaRefused(shown(source), "only data:, http:, https: and file: are opened")


def _written(source: str, policy: MediaPolicy) -> bytes:
    """The bytes in a data URI. What type it says they are is not believed."""
    head, comma, text = source.partition(",")
    if not comma:
        raise InvalidMedia(shown(source), "a data: URI has a comma before its data")
    if head.lower().rstrip().endswith(";base64"):
        return _base64(text, source, policy)
    if len(text) > 3 * policy.max_bytes:
        raise _too_large(source, policy)
    return _bounded(unquote_to_bytes(text), source, policy)


def _base64(text: str, source: str, policy: MediaPolicy) -> bytes:
    if len(text) > policy.max_bytes * 3 // 2 + 4:  # line breaks are forgiven
        raise _too_large(source, policy)
    if "%" in text[-12:]:  # its end may be written as %3D
        text = unquote_to_bytes(text).decode("ascii", "replace")
    text = "".join(text.split())
    try:
        # Some writers leave out the signs at the end, or use the alphabet for addresses.
        data = base64.b64decode(text.translate(URL_SAFE) + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMedia(shown(source), f"its base64 is damaged ({error})") from None
    return _bounded(data, source, policy)


URL_SAFE = str.maketrans("-_", "+/")


def _bounded(data: bytes, source: str, policy: MediaPolicy) -> bytes:
    if len(data) > policy.max_bytes:
        raise _too_large(source, policy)
    if not data:
        raise InvalidMedia(shown(source), "it is empty")
    return data


def _too_large(source: str, policy: MediaPolicy) -> InvalidMedia:
    return InvalidMedia(shown(source), f"it has more than {policy.max_bytes:,} bytes, which is the limit here")
