"""Images and audio of a conversation: replaced by placeholders for the template, and expanded in the token sequence.

A template sees only text. A placeholder is a number between two characters that occur nowhere in the messages, so that
no user text can be mistaken for media, whatever media markers the model or mtmd uses.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from afterglow.chat.content import DecodeMedia, load_attachments
from afterglow.chat.messages import Message, list_attachments, to_template_message
from afterglow.engine.multimodal.encoder_cache import MediaEntry
from afterglow.engine.types.entries import Entry, Media
from afterglow.engine.types.media import MediaContent, MediaPart
from afterglow.errors import InvalidArgument, InvalidTemplate, UnsupportedMedia
from afterglow.media.load import decode_media
from afterglow.media.policy import INLINE_ONLY, MediaPolicy, Modality

PRIVATE_USE_CODE_POINTS = (*range(0xE000, 0xF900), *range(0xF0000, 0xF4000))
MEDIA_LABELS: dict[Modality, str] = {"image": "[image]", "audio": "[audio]"}  # in displayed text
MeasureMedia: TypeAlias = Callable[[Sequence[MediaContent]], list[list[MediaEntry]]]
logger = logging.getLogger("afterglow")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSupport:
    """Modalities that a model accepts beside text, and the function that measures media in cells."""

    kinds: frozenset[Modality] = frozenset()
    measure: MeasureMedia = lambda media: []
    decode: DecodeMedia = decode_media
    unsupported_reason: str = ""  # replaces the default error text
    strip_unsupported: bool = False  # drop unsupported media with a warning instead of an error


TEXT_ONLY = MediaSupport()


@dataclass(frozen=True, slots=True)
class MediaPlaceholders:
    """The media behind the placeholders of a conversation, in order."""

    delimiter: str = ""  # character before and after each number
    media: tuple[Sequence[MediaEntry], ...] = ()

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the text between placeholders, and a negative number for each placeholder."""
        if not self.media:
            yield text
            return
        for index, piece in enumerate(re.split(f"{self.delimiter}(\\d+){self.delimiter}", text)):
            yield -1 - int(piece) if index % 2 else piece

    def count_characters(self, number: int) -> int:
        """Return the length of placeholder `number` in a message; 0 if there is none because media are dropped."""
        return 2 * len(self.delimiter) + len(str(number)) if number < len(self.media) else 0

    def describe(self, number: int) -> str:
        """Return a text that identifies the content of placeholder `number`."""
        return "".join(e.digest.hex() if isinstance(e, Media) else f" {e}" for e, _ in self.media[number])

    def replace_with_labels(self, text: str) -> str:
        """Replace placeholders by labels for display."""
        return re.sub(f"{self.delimiter}(\\d+){self.delimiter}", self._get_label, text) if self.media else text

    def _get_label(self, match: re.Match[str]) -> str:
        parts = [part for _, part in self.media[int(match[1])] if part is not None]
        return MEDIA_LABELS["audio" if any(part.content.modality == "audio" for part in parts) else "image"]


NO_MEDIA = MediaPlaceholders()


def get_media_label(kinds: Collection[Modality]) -> str:
    """Return the display label of media whose modality is only known to be one of `kinds`.

    >>> get_media_label({"audio"}), get_media_label({"image", "audio"})
    ('[audio]', '[image or audio]')
    """
    return MEDIA_LABELS[next(iter(kinds))] if len(kinds) == 1 else "[image or audio]"


def extract_media(
    messages: Sequence[Message], media_support: MediaSupport, policy: MediaPolicy = INLINE_ONLY, *other_text: Any
) -> tuple[list[Message], MediaPlaceholders]:
    """Replace attachments by placeholders. Return the messages and the loaded and measured media.

    `other_text` is rendered beside the messages, e.g. tools.

    Raises `UnsupportedMedia` for the first attachment that the model does not support, unless such are stripped.
    """
    filtered = filter_media(messages, media_support)
    attachments = list_attachments(filtered)
    if not attachments:
        return filtered, NO_MEDIA
    delimiter = find_unused_character(messages, *other_text)
    media = media_support.measure(load_attachments(attachments, policy, media_support.decode))
    numbers = itertools.count()
    replaced = [_insert_placeholders(message, delimiter, numbers) for message in filtered]
    return replaced, MediaPlaceholders(delimiter, tuple(media))


def filter_media(messages: Sequence[Message], media_support: MediaSupport) -> list[Message]:
    """Raise `UnsupportedMedia` for attachments that the model does not support, or drop them if that is configured."""
    filtered: list[Message] = []
    for index, message in enumerate(messages):
        unsupported = [attachment for attachment in message.attachments if attachment.kind not in media_support.kinds]
        supported = tuple(attachment for attachment in message.attachments if attachment.kind in media_support.kinds)
        filtered.append(replace(message, attachments=supported))
        if not unsupported:
            continue
        where, kind = unsupported[0].where or f"messages[{index}].content", unsupported[0].kind
        accepted = " and ".join(("text", *sorted(media_support.kinds)))
        reason = media_support.unsupported_reason or f"the model does not support {kind} input, only {accepted}"
        if not media_support.strip_unsupported:
            raise UnsupportedMedia(where, reason)
        logger.warning("%s: dropped %d attachments of kind %s: %s", where, len(unsupported), kind, reason)
    return filtered


def _insert_placeholders(message: Message, delimiter: str, numbers: Iterator[int]) -> Message:
    text, start = "", 0
    for attachment in message.attachments:
        offset, length = attachment.offset, len(message.content)
        if not 0 <= offset <= length:
            raise InvalidArgument("attachments", f"the offset {offset} is outside the text of {length} characters")
        text += f"{message.content[start:offset]}{delimiter}{next(numbers)}{delimiter}"
        start = offset
    return replace(message, content=text + message.content[start:], attachments=())


def expand_placeholders(
    tokens: Sequence[int], placeholders: MediaPlaceholders
) -> tuple[tuple[Entry, ...], Sequence[int], Mapping[bytes, MediaPart]]:
    """Replace placeholders in a token sequence by media entries.

    Returns the entries, the position of each token in them (plus their length), and the media parts by digest.
    """
    if not placeholders.media:
        return tuple(tokens), range(len(tokens) + 1), {}
    numbers = sorted(-1 - token for token in tokens if token < 0)
    if numbers != list(range(len(placeholders.media))):
        raise InvalidTemplate(
            f"it renders {len(numbers)} images and audio files; the messages have {len(placeholders.media)}"
        )
    entries: list[Entry] = []
    positions: list[int] = []
    media_parts: dict[bytes, MediaPart] = {}
    for token in tokens:
        positions.append(len(entries))
        for entry, part in [(token, None)] if token >= 0 else placeholders.media[-1 - token]:
            entries.append(entry)
            if isinstance(entry, Media) and part is not None:
                media_parts[entry.digest] = part
    return tuple(entries), [*positions, len(entries)], media_parts


def find_unused_character(messages: Sequence[Message], *values: Any) -> str:
    """Return a private-use character that occurs nowhere in the messages and the values."""
    texts = list(_iter_texts([*map(to_template_message, messages), *values]))
    used = set[str]().union(*texts)
    for character in map(chr, PRIVATE_USE_CODE_POINTS):
        if character not in used and not any(spelling in text for spelling in spell(character) for text in texts):
            return character
    raise InvalidArgument(
        "messages", f"contain all {len(PRIVATE_USE_CODE_POINTS):,} private-use characters: one must be unused"
    )


def spell(character: str) -> set[str]:
    """Return how Python and JSON spell a character that they do not print.

    >>> spell("\\ue000")
    {'\\\\ue000'}
    """
    return {repr(character)[1:-1], json.dumps(character)[1:-1]}


def _iter_texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _iter_texts(item)
