"""Loads images and audio from data URIs, base64 text, URLs and files."""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

from afterglow.errors import InvalidMedia, MediaRefused
from afterglow.media import identity
from afterglow.media.fetch import fetch_url
from afterglow.media.files import read_file
from afterglow.media.policy import INLINE_ONLY, MediaPolicy, Modality, abbreviate_source
from afterglow.media.types import MediaData

SCHEME_PATTERN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # at least two letters: one is a drive letter
BASE64_PATTERN = re.compile(r"[A-Za-z0-9+/\s]*={0,2}\s*")
BASE64_PREFIXES = {  # magic bytes of the supported formats in base64
    "image": ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD", "Qk"),
    "audio": ("UklGR", "SUQz", "//", "ZkxhQ"),
}
ALL_BASE64_PREFIXES = (*BASE64_PREFIXES["image"], *BASE64_PREFIXES["audio"])
URL_SAFE_TRANSLATION = str.maketrans("-_", "+/")


def load_media(
    modality: Modality, source: str, policy: MediaPolicy = INLINE_ONLY, *, id: str | None = None, detail: str = "auto"
) -> MediaData:
    """Load and decode an image or audio.

    `source` is a data URI, base64 text, an http(s) or file URL, or a path; the policy must allow URLs and paths. `id`
    is the FNV-1a of the bytes and is checked. Blocks: do not call it in an event loop.

    >>> load_media("image", "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw==").width
    1
    """
    data = load_media_bytes(modality, source, policy, id=id)
    return decode_media(modality, data, policy, source=abbreviate_source(source), detail=detail)


def decode_media(
    modality: Modality,
    data: bytes,
    policy: MediaPolicy = INLINE_ONLY,
    *,
    source: str = "the file",
    detail: str = "auto",
) -> MediaData:
    """Decode an image or audio file. `source` names it in errors. Waits while other decoders use the memory budget."""
    # Pillow and libsndfile are imported for the first image and clip: a start of a text model does not wait for them.
    if modality == "image":
        from afterglow.media.images import decode_image

        return decode_image(data, policy, source=source, detail=detail)
    from afterglow.media.audio import decode_audio

    return decode_audio(data, policy, source=source)


def load_media_bytes(
    modality: Modality, source: str, policy: MediaPolicy = INLINE_ONLY, *, id: str | None = None
) -> bytes:
    """Return the encoded bytes of a source; raise `MediaRefused` if the policy does not allow it. Checks the `id`."""
    scheme = match[1].lower() if (match := SCHEME_PATTERN.match(source)) else ""
    match scheme:
        case "data":
            data = _decode_data_uri(source, policy)
        case "http" | "https":
            data = fetch_url(source, policy)
        case "" if source.startswith(BASE64_PREFIXES[modality]) and BASE64_PATTERN.fullmatch(source):
            data = _decode_base64(source, source, policy)
        case "file" | "":
            data = read_file(source, policy)
        case _:
            raise MediaRefused(abbreviate_source(source), "only data:, http:, https: and file: URLs are supported")
    if id is not None:
        identity.check_id(id, data)
    return data


def estimate_inline_bytes(source: str) -> int:
    """Return the size of a file that a source contains as text, before it is decoded; 0 for URLs and paths.

    >>> estimate_inline_bytes("data:image/png;base64,iVBORw0K"), estimate_inline_bytes("https://example.com/cat.png")
    (6, 0)
    """
    scheme = match[1].lower() if (match := SCHEME_PATTERN.match(source)) else ""
    if scheme == "data":
        return len(source.partition(",")[2]) * 3 // 4
    return len(source) * 3 // 4 if not scheme and source.startswith(ALL_BASE64_PREFIXES) else 0


def _decode_data_uri(source: str, policy: MediaPolicy) -> bytes:
    """Decode a data URI. Ignores its media type."""
    header, comma, text = source.partition(",")
    if not comma:
        raise InvalidMedia(abbreviate_source(source), "a data: URI must have a comma before its data")
    if header.lower().rstrip().endswith(";base64"):
        return _decode_base64(text, source, policy)
    if len(text) > 3 * policy.max_bytes:
        raise _make_too_large_error(source, policy)
    return _check_size(unquote_to_bytes(text), source, policy)


def _decode_base64(text: str, source: str, policy: MediaPolicy) -> bytes:
    if len(text) > policy.max_bytes * 3 // 2 + 4:  # allows for line breaks
        raise _make_too_large_error(source, policy)
    if "%" in text[-12:]:  # the padding may be written as %3D
        text = unquote_to_bytes(text).decode("ascii", "replace")
    text = "".join(text.split())
    try:
        # Some encoders omit the padding or use the URL-safe alphabet.
        data = base64.b64decode(text.translate(URL_SAFE_TRANSLATION) + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMedia(abbreviate_source(source), f"its base64 is invalid ({error})") from None
    return _check_size(data, source, policy)


def _check_size(data: bytes, source: str, policy: MediaPolicy) -> bytes:
    if len(data) > policy.max_bytes:
        raise _make_too_large_error(source, policy)
    if not data:
        raise InvalidMedia(abbreviate_source(source), "it is empty")
    return data


def _make_too_large_error(source: str, policy: MediaPolicy) -> InvalidMedia:
    return InvalidMedia(abbreviate_source(source), f"it exceeds the limit of {policy.max_bytes:,} bytes")
