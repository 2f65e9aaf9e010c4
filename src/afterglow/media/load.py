"""Pictures and sounds from wherever they are: in the message itself, at an address, or in a file."""

from __future__ import annotations

import base64
import binascii
import re
import threading
from urllib.parse import unquote_to_bytes

from afterglow.errors import InvalidMedia, MediaRefused
from afterglow.media import identity
from afterglow.media.audio import decode_audio
from afterglow.media.fetch import fetch_url
from afterglow.media.files import read_file
from afterglow.media.images import decode_image
from afterglow.media.policy import INLINE_ONLY, MediaPolicy, Modality, abbreviate_source
from afterglow.media.types import MediaData

__all__ = ["INLINE_ONLY", "MediaPolicy", "load_media_bytes", "load_media"]

SCHEME_PATTERN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least: one is a drive
BASE64_PATTERN = re.compile(r"[A-Za-z0-9+/\s]*={0,2}\s*")
BASE64_PREFIXES = {  # of files written as base64 text
    "image": ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD", "Qk"),
    "audio": ("UklGR", "SUQz", "//", "ZkxhQ"),
}
DECODE_SEMAPHORE = threading.BoundedSemaphore(2)  # a picture takes a few hundred MiB while it is decoded


def load_media(
    kind: Modality, source: str, policy: MediaPolicy = INLINE_ONLY, *, id: str | None = None, detail: str = "auto"
) -> MediaData:
    """A picture or a sound, decoded.

    `source` is a data URI, base64 text, an http(s) or file address, or a path; the last three only as the policy
    allows. An `id` is the FNV-1a of the bytes, and is checked. Takes its time: not for an event loop.

    >>> open_attachment("image", "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw==").width
    1
    """
    data = load_media_bytes(kind, source, policy)
    if id is not None:
        identity.check_id(id, data)
    with DECODE_SEMAPHORE:
        if kind == "image":
            return decode_image(data, policy, source=abbreviate_source(source), detail=detail)
        return decode_audio(data, policy, source=abbreviate_source(source))


def load_media_bytes(kind: Modality, source: str, policy: MediaPolicy = INLINE_ONLY) -> bytes:
    """The bytes behind a source, from wherever they are allowed to come."""
    scheme = found[1].lower() if (found := SCHEME_PATTERN.match(source)) else ""
    match scheme:
        case "data":
            return _decode_data_uri(source, policy)
        case "http" | "https":
            return fetch_url(source, policy)
        case "" if source.startswith(BASE64_PREFIXES[kind]) and BASE64_PATTERN.fullmatch(source):
            return _decode_base64(source, source, policy)
        case "file" | "":
            return read_file(source, policy)
    raise MediaRefused(abbreviate_source(source), "only data:, http:, https: and file: are opened")


def _decode_data_uri(source: str, policy: MediaPolicy) -> bytes:
    """The bytes in a data URI. What type it says they are is not believed."""
    head, comma, text = source.partition(",")
    if not comma:
        raise InvalidMedia(abbreviate_source(source), "a data: URI has a comma before its data")
    if head.lower().rstrip().endswith(";base64"):
        return _decode_base64(text, source, policy)
    if len(text) > 3 * policy.max_bytes:
        raise _make_too_large_error(source, policy)
    return _check_size(unquote_to_bytes(text), source, policy)


def _decode_base64(text: str, source: str, policy: MediaPolicy) -> bytes:
    if len(text) > policy.max_bytes * 3 // 2 + 4:  # line breaks are forgiven
        raise _make_too_large_error(source, policy)
    if "%" in text[-12:]:  # its end may be written as %3D
        text = unquote_to_bytes(text).decode("ascii", "replace")
    text = "".join(text.split())
    try:
        # Some writers leave out the signs at the end, or use the alphabet for addresses.
        data = base64.b64decode(text.translate(URL_SAFE_TRANSLATION) + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMedia(abbreviate_source(source), f"its base64 is damaged ({error})") from None
    return _check_size(data, source, policy)


URL_SAFE_TRANSLATION = str.maketrans("-_", "+/")


def _check_size(data: bytes, source: str, policy: MediaPolicy) -> bytes:
    if len(data) > policy.max_bytes:
        raise _make_too_large_error(source, policy)
    if not data:
        raise InvalidMedia(abbreviate_source(source), "it is empty")
    return data


def _make_too_large_error(source: str, policy: MediaPolicy) -> InvalidMedia:
    return InvalidMedia(
        abbreviate_source(source), f"it has more than {policy.max_bytes:,} bytes, which is the limit here"
    )
