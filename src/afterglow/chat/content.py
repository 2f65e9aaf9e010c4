"""Message content: text with images and audio at their positions. Parses OpenAI and Anthropic content parts."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from afterglow.engine.types.media import EncodedMedia, MediaContent
from afterglow.errors import InvalidArgument, InvalidMedia, UnsupportedOption
from afterglow.media import identity
from afterglow.media.data_uri import to_data_uri
from afterglow.media.load import decode_media, load_media_bytes
from afterglow.media.policy import MediaPolicy, Modality, abbreviate_source
from afterglow.media.types import AudioData, ImageData, MediaData

ImageDetail: TypeAlias = Literal["auto", "low", "high"]
IMAGE_DETAILS: dict[Any, ImageDetail] = {None: "auto", "auto": "auto", "low": "low", "high": "high", "original": "high"}
AUDIO_FORMATS = ("wav", "mp3")
COMMON_PART_FIELDS = {"type", "id", "cache_control"}  # `cache_control` has no effect: every prefix is cached
PART_FIELDS = {
    "text": {"text"},
    "input_text": {"text"},
    "output_text": {"text", "annotations", "logprobs"},
    "image_url": {"image_url"},
    "input_image": {"image_url", "file_id", "detail"},
    "image": {"source", "image"},
    "audio": {"audio"},
    "input_audio": {"input_audio"},
}
AUDIO_DATA_URI = re.compile(r"data:audio/(wav|mp3);base64,(.*)", re.DOTALL)
AttachmentSource: TypeAlias = str | Path | bytes


class DecodeMedia(Protocol):
    """Decodes an image or audio file: here, or in the process of the engine."""

    def __call__(
        self, modality: Modality, data: bytes, policy: MediaPolicy, *, source: str, detail: str
    ) -> MediaContent: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """An image or audio file in a message. `source` is a URL, a data URI or base64 text as given by the client, or the
    decoded media."""

    kind: Modality
    source: str | MediaContent
    offset: int = 0  # position in the text of the message, in characters
    id: str | None = None  # FNV-1a hash of its bytes, if the caller gave one
    detail: ImageDetail = "auto"  # "low": at most 512 by 512 pixels
    where: str | None = field(default=None, compare=False)  # field of the request for errors; None: by its message

    def load(self, policy: MediaPolicy, decode: DecodeMedia = decode_media) -> MediaContent:
        """Load and decode the media. May block on the network and on decoding."""
        if not isinstance(self.source, str):
            return self.source
        data = load_media_bytes(self.kind, self.source, policy, id=self.id)
        return decode(self.kind, data, policy, source=abbreviate_source(self.source), detail=self.detail)


def load_attachments(
    attachments: Iterable[Attachment], policy: MediaPolicy, decode: DecodeMedia = decode_media
) -> list[MediaContent]:
    """Load all attachments of a conversation. The decoded size is limited in total: small files can decode to much."""
    loaded: list[MediaContent] = []
    bytes_left = policy.max_decoded_bytes
    for attachment in attachments:
        media = attachment.load(policy, decode)
        loaded.append(media)
        if isinstance(attachment.source, str):  # media that was already decoded is not counted
            bytes_left -= media.nbytes
        if bytes_left < 0:
            reason = f"all media together take more than {policy.max_decoded_bytes:,} bytes decoded: send fewer"
            raise InvalidMedia(abbreviate_source(str(attachment.source)), reason)
    return loaded


def join_content(parts: Iterable[str | Attachment]) -> tuple[str, tuple[Attachment, ...]]:
    """Join the parts of a message to its text, and to its attachments with their positions in the text.

    >>> join_content(["Look: ", Attachment(kind="image", source="cat.png"), "a cat"])[1][0].offset
    6
    """
    text = ""
    attachments: list[Attachment] = []
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            attachments.append(replace(part, offset=len(text)))
    return text, tuple(attachments)


def parse_content(value: Any, where: str) -> tuple[str, tuple[Attachment, ...]]:
    """Parse text or a list of content parts (OpenAI chat, OpenAI responses or Anthropic) to text and attachments.

    >>> parse_content([{"type": "text", "text": "Hello"}], "content")
    ('Hello', ())
    """
    if value is None:
        return "", ()
    if isinstance(value, str):
        return value, ()
    if not isinstance(value, Sequence):
        raise InvalidArgument(where, f"must be text or a list of parts, not {type(value).__name__}")
    parts: list[str | Attachment] = []
    for index, part in enumerate(value):
        part_path = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in PART_FIELDS:
            raise InvalidArgument(f"{part_path}.type", f"must be one of {', '.join(PART_FIELDS)}, not {kind!r}")
        if unknown := sorted(map(str, set(part) - COMMON_PART_FIELDS - PART_FIELDS[kind])):
            raise InvalidArgument(f"{part_path}.{unknown[0]}", f"is not a field of a part of type {kind}")
        if "text" in PART_FIELDS[kind]:
            parts.append(check_text(part.get("text"), f"{part_path}.text"))
        else:
            parts.append(_parse_attachment(part, part_path))
    return join_content(parts)


def _parse_attachment(part: Mapping[str, Any], where: str) -> Attachment:
    id = None if part.get("id") is None else identity.normalize_id(part["id"], f"{where}.id")
    kind: Modality = "image"
    source: str | MediaContent
    detail: ImageDetail = "auto"
    match part["type"]:
        case "image_url":
            url = part.get("image_url")
            inner: Mapping[str, Any] = url if isinstance(url, Mapping) else {"url": url}
            source = check_text(inner.get("url"), f"{where}.image_url.url")
            detail = _parse_detail(inner.get("detail"), f"{where}.image_url")
        case "input_image":
            if part.get("file_id") is not None:
                raise UnsupportedOption(f"{where}.file_id", "file storage is not supported: use `image_url`")
            source = check_text(part.get("image_url"), f"{where}.image_url")
            detail = _parse_detail(part.get("detail"), where)
        case "image" if "image" in part:
            source = _check_media_type(part["image"], ImageData, where)
        case "image":
            source = _parse_image_source(part.get("source"), f"{where}.source")
        case "audio":
            kind, source = "audio", _check_media_type(part.get("audio"), AudioData, where)
        case _:
            kind, source = "audio", _parse_audio_source(part.get("input_audio"), f"{where}.input_audio")
    return Attachment(kind=kind, source=source, id=id, detail=detail)


def _check_media_type(value: Any, media_type: type[MediaData], where: str) -> MediaContent:
    if not isinstance(value, media_type | EncodedMedia) or value.modality != media_type.modality:
        raise InvalidArgument(where, f"must be {media_type.__name__}, not {type(value).__name__}")
    return value


def _parse_detail(value: Any, where: str) -> ImageDetail:
    if not isinstance(value, str | None) or value not in IMAGE_DETAILS:
        raise InvalidArgument(f"{where}.detail", f"must be auto, low or high, not {value!r}")
    return IMAGE_DETAILS[value]


def _parse_image_source(source: Any, where: str) -> str:
    """Parse the source of an Anthropic image block: base64 data or a URL."""
    if not isinstance(source, Mapping):
        raise InvalidArgument(where, "must be an object with `data` or `url`")
    match source.get("type"):
        case "base64":
            media_type = check_text(source.get("media_type"), f"{where}.media_type")
            if not media_type.startswith("image/"):
                raise InvalidArgument(f"{where}.media_type", f"must be an image type, not {media_type!r}")
            return f"data:{media_type};base64,{check_text(source.get('data'), f'{where}.data')}"
        case "url":
            return check_text(source.get("url"), f"{where}.url")
        case "file":
            raise UnsupportedOption(f"{where}.type", "file storage is not supported: use base64 or url")
    raise InvalidArgument(f"{where}.type", f"must be base64 or url, not {source.get('type')!r}")


def _parse_audio_source(value: Any, where: str) -> str:
    """Parse the source of an audio part: base64 text with a `format`, as in OpenAI's API; without one, also a URL."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, "must be an object with `data` and `format`")
    data, format = check_text(value.get("data"), f"{where}.data"), value.get("format")
    if format is not None and format not in AUDIO_FORMATS:
        raise InvalidArgument(f"{where}.format", f"must be wav or mp3, not {format!r}")
    return data if format is None else build_audio_uri(data, format)


def build_audio_uri(data: str, format: str) -> str:
    """Return base64 text as a data URI, unless it is one already."""
    return data if data[:5].lower() == "data:" else f"data:audio/{format};base64,{data}"


def check_text(value: Any, where: str) -> str:
    """Return `value` if it is text; raise `InvalidArgument` for the field `where` otherwise."""
    if not isinstance(value, str):
        raise InvalidArgument(where, f"must be text, not {type(value).__name__}")
    return value


def to_openai_content(text: str, attachments: Sequence[Attachment]) -> str | list[dict[str, Any]]:
    """Return content in OpenAI's format, the inverse of `parse_content`. Decoded media become data URIs.

    >>> to_openai_content("Hello", ())
    'Hello'
    """
    if not attachments:
        return text
    parts: list[dict[str, Any]] = []
    start = 0
    for attachment in sorted(attachments, key=lambda attachment: attachment.offset):
        if piece := text[start : attachment.offset]:
            parts.append({"type": "text", "text": piece})
        parts.append(_to_openai_part(attachment))
        start = max(start, attachment.offset)
    return [*parts, {"type": "text", "text": text[start:]}] if text[start:] else parts


def _to_openai_part(attachment: Attachment) -> dict[str, Any]:
    id = {} if attachment.id is None else {"id": attachment.id}
    source = attachment.source
    if not isinstance(source, str):
        id = {}  # the file that is written here has other bytes
        source = to_data_uri(source.decode() if isinstance(source, EncodedMedia) else source)
    if attachment.kind == "image":
        detail = {} if attachment.detail == "auto" else {"detail": attachment.detail}
        return {"type": "image_url", "image_url": {"url": source, **detail}, **id}
    match = AUDIO_DATA_URI.fullmatch(source)
    audio = {"data": match[2], "format": match[1]} if match else {"data": source}
    return {"type": "input_audio", "input_audio": audio, **id}


def build_attachments(kind: Modality, sources: Iterable[AttachmentSource]) -> tuple[Attachment, ...]:
    """Build attachments at the start of a message from bytes, local files or message sources. A `Path` is a file of
    the caller and is read immediately."""
    name = "images" if kind == "image" else "audio"
    if isinstance(sources, str | bytes) or not isinstance(sources, Iterable):
        raise InvalidArgument(name, f"must be a list, not {type(sources).__name__}")
    attachments: list[Attachment] = []
    for index, source in enumerate(sources):
        if isinstance(source, Path):
            try:
                path = source.expanduser().absolute()
            except RuntimeError as error:  # no home directory
                raise InvalidMedia(str(source), str(error)) from None
            source = load_media_bytes(kind, str(path), MediaPolicy(allowed_directory=path.anchor))
        if not isinstance(source, str | bytes | bytearray | memoryview):
            raise InvalidArgument(f"{name}[{index}]", f"must be bytes, a path or text, not {type(source).__name__}")
        if not isinstance(source, str):
            source = f"data:{kind}/*;base64,{base64.b64encode(source).decode()}"
        attachments.append(Attachment(kind=kind, source=source))
    return tuple(attachments)
