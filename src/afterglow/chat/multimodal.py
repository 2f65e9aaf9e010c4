"""Pictures and sounds of a conversation: taken out of its messages, and put where the template left room for them.

A template sees text only. Where a picture stands, the text has a hole: a number between two characters that nobody
wrote. So nothing that a person writes can be taken for a picture, whatever marks a model or mtmd has for them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from afterglow.chat.content import load_attachments
from afterglow.chat.messages import Attachment, Message
from afterglow.engine.multimodal.encoder_cache import MediaEntry
from afterglow.engine.types.entries import Entry, Media
from afterglow.engine.types.media import MediaPart
from afterglow.errors import InvalidArgument, InvalidTemplate, UnsupportedMedia
from afterglow.llama.projector import Modality
from afterglow.media.policy import INLINE_ONLY, MediaPolicy
from afterglow.media.types import AudioData, MediaData

PRIVATE_USE_CODE_POINTS = (*range(0xE000, 0xF900), *range(0xF0000, 0xF4000))
MEDIA_LABELS: dict[Modality, str] = {"image": "[picture]", "audio": "[sound]"}  # what texts for people have in a hole
MeasureMedia: TypeAlias = Callable[[Sequence[MediaData]], list[list[MediaEntry]]]
logger = logging.getLogger("afterglow")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSupport:
    """What a model can take beside text, and who says how much room that needs."""

    kinds: frozenset[Modality] = frozenset()
    measure: MeasureMedia = lambda contents: []
    unsupported_reason: str = ""  # why it takes none, where it should
    strip_unsupported: bool = False  # what it cannot take is left out, with a warning, and not refused


TEXT_ONLY = MediaSupport()


@dataclass(frozen=True, slots=True)
class MediaPlaceholders:
    """What stands in the holes of a conversation, in their order."""

    delimiter: str = ""  # the character around their numbers
    media: tuple[Sequence[MediaEntry], ...] = ()

    def split(self, text: str) -> Iterator[str | int]:
        """The text between the holes, and for each hole a negative number."""
        if not self.media:
            yield text
            return
        for index, piece in enumerate(re.split(f"{self.delimiter}(\\d+){self.delimiter}", text)):
            yield -1 - int(piece) if index % 2 else piece

    def replace_with_labels(self, text: str) -> str:
        """The text for people."""
        return re.sub(f"{self.delimiter}(\\d+){self.delimiter}", self._get_label, text) if self.media else text

    def _get_label(self, match: re.Match[str]) -> str:
        heard = any(part is not None and isinstance(part.content, AudioData) for _, part in self.media[int(match[1])])
        return MEDIA_LABELS["audio" if heard else "image"]


NO_MEDIA = MediaPlaceholders()


def get_media_label(kinds: Collection[Modality]) -> str:
    """What stands for a picture or a sound of which one knows only what the model takes.

    >>> stand_in({"audio"}), stand_in({"image", "audio"})
    ('[sound]', '[picture or sound]')
    """
    return MEDIA_LABELS[next(iter(kinds))] if len(kinds) == 1 else "[picture or sound]"


def extract_media(
    messages: Sequence[Message], media_support: MediaSupport, policy: MediaPolicy = INLINE_ONLY
) -> tuple[list[Message], MediaPlaceholders]:
    """The messages with holes for their pictures and sounds, and what stands in them.

    `UnsupportedMedia` for the first that the model cannot take, unless such are to be left out.
    """
    said = filter_media(messages, media_support)
    attachments = [one for message in said for one in message.attachments]
    if not attachments:
        return said, NO_MEDIA
    hole = find_unused_character(messages)
    contents = media_support.measure(load_attachments(attachments, policy))
    first = 0
    for index, message in enumerate(said):
        said[index] = _insert_placeholders(message, hole, first)
        first += len(message.attachments)
    return said, MediaPlaceholders(hole, tuple(contents))


def filter_media(messages: Sequence[Message], media_support: MediaSupport) -> list[Message]:
    """The messages with those pictures and sounds that the model takes; `UnsupportedMedia` where it takes others."""
    return [
        _filter_message_media(message, f"messages[{index}].content", media_support)
        for index, message in enumerate(messages)
    ]


def _filter_message_media(message: Message, where: str, media_support: MediaSupport) -> Message:
    """The message with what the model can take."""
    strange = [one for one in message.attachments if one.kind not in media_support.kinds]
    if not strange:
        return message
    able = " and ".join(("text", *sorted(media_support.kinds)))
    reason = media_support.unsupported_reason or f"this model takes no {strange[0].kind}, only {able}"
    if not media_support.strip_unsupported:
        raise UnsupportedMedia(where, reason)
    logger.warning("%s: %d of kind %s left out, %s", where, len(strange), strange[0].kind, reason)
    return replace(message, attachments=tuple(one for one in message.attachments if one not in strange))


def _insert_placeholders(message: Message, delimiter: str, first_number: int) -> Message:
    if not message.attachments:
        return message
    text, start = "", 0
    for number, one in enumerate(message.attachments, first_number):
        place = _check_offset(one, message)
        text += f"{message.content[start:place]}{delimiter}{number}{delimiter}"
        start = place
    return replace(message, content=text + message.content[start:], attachments=())


def _check_offset(attachment: Attachment, message: Message) -> int:
    if not 0 <= attachment.offset <= len(message.content):
        raise InvalidArgument("attachments", f"one stands at {attachment.offset}, in a text of {len(message.content)}")
    return attachment.offset


def expand_placeholders(
    tokens: Sequence[int], placeholders: MediaPlaceholders
) -> tuple[tuple[Entry, ...], Sequence[int], Mapping[bytes, MediaPart]]:
    """Tokens with pictures in the holes, the place of each token in that, and what the pictures are."""
    if not placeholders.media:
        return tuple(tokens), range(len(tokens) + 1), {}
    holes = sorted(-1 - token for token in tokens if token < 0)
    if holes != list(range(len(placeholders.media))):
        raise InvalidTemplate(f"it shows {len(holes)} pictures and sounds where there are {len(placeholders.media)}")
    entries: list[Entry] = []
    places: list[int] = []
    contents: dict[bytes, MediaPart] = {}
    for token in tokens:
        places.append(len(entries))
        for entry, part in [(token, None)] if token >= 0 else placeholders.media[-1 - token]:
            entries.append(entry)
            if isinstance(entry, Media) and part is not None:
                contents[entry.digest] = part
    return tuple(entries), [*places, len(entries)], contents


def find_unused_character(messages: Sequence[Message]) -> str:
    """A character of Unicode's private use that nobody wrote."""
    written = set().union(*(message.content + (message.reasoning or "") for message in messages)) if messages else set()
    written |= set().union(*(call.arguments for message in messages for call in message.tool_calls), set())
    for code in PRIVATE_USE_CODE_POINTS:
        if chr(code) not in written:
            return chr(code)
    raise InvalidArgument(
        "messages", f"use all {len(PRIVATE_USE_CODE_POINTS):,} private characters: one has to be free"
    )
