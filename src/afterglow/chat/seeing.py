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

from afterglow.chat.content import opened_all
from afterglow.chat.messages import Attachment, Message
from afterglow.engine.entries import Entry, Media
from afterglow.engine.pictures import Part, Seen
from afterglow.errors import InvalidArgument, InvalidTemplate, UnsupportedMedia
from afterglow.llama.projector import MediaKind
from afterglow.media.contents import Content, Sound
from afterglow.media.policy import CLOSED, MediaPolicy

PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xF4000))
STAND_INS: dict[MediaKind, str] = {"image": "[picture]", "audio": "[sound]"}  # what texts for people have in a hole
Measure: TypeAlias = Callable[[Sequence[Content]], list[list[Seen]]]
logger = logging.getLogger("afterglow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a model can take beside text, and who says how much room that needs."""

    kinds: frozenset[MediaKind] = frozenset()
    measure: Measure = lambda contents: []
    trouble: str = ""  # why it takes none, where it should
    strip: bool = False  # what it cannot take is left out, with a warning, and not refused


BLIND = Sight()


@dataclass(frozen=True, slots=True)
class Shown:
    """What stands in the holes of a conversation, in their order."""

    hole: str = ""  # the character around their numbers
    contents: tuple[Sequence[Seen], ...] = ()

    def cut(self, text: str) -> Iterator[str | int]:
        """The text between the holes, and for each hole a negative number."""
        if not self.contents:
            yield text
            return
        for index, piece in enumerate(re.split(f"{self.hole}(\\d+){self.hole}", text)):
            yield -1 - int(piece) if index % 2 else piece

    def without_holes(self, text: str) -> str:
        """The text for people."""
        return re.sub(f"{self.hole}(\\d+){self.hole}", self._instead, text) if self.contents else text

    def _instead(self, hole: re.Match[str]) -> str:
        heard = any(part is not None and isinstance(part.content, Sound) for _, part in self.contents[int(hole[1])])
        return STAND_INS["audio" if heard else "image"]


NOTHING = Shown()


def stand_in(kinds: Collection[MediaKind]) -> str:
    """What stands for a picture or a sound of which one knows only what the model takes.

    >>> stand_in({"audio"}), stand_in({"image", "audio"})
    ('[sound]', '[picture or sound]')
    """
    return STAND_INS[next(iter(kinds))] if len(kinds) == 1 else "[picture or sound]"


def look(messages: Sequence[Message], sight: Sight, policy: MediaPolicy = CLOSED) -> tuple[list[Message], Shown]:
    """The messages with holes for their pictures and sounds, and what stands in them.

    `UnsupportedMedia` for the first that the model cannot take, unless such are to be left out.
    """
    said = taken(messages, sight)
    attachments = [one for message in said for one in message.attachments]
    if not attachments:
        return said, NOTHING
    hole = unused_character(messages)
    contents = sight.measure(opened_all(attachments, policy))
    first = 0
    for index, message in enumerate(said):
        said[index] = _with_holes(message, hole, first)
        first += len(message.attachments)
    return said, Shown(hole, tuple(contents))


def taken(messages: Sequence[Message], sight: Sight) -> list[Message]:
    """The messages with those pictures and sounds that the model takes; `UnsupportedMedia` where it takes others."""
    return [_taken(message, f"messages[{index}].content", sight) for index, message in enumerate(messages)]


def _taken(message: Message, where: str, sight: Sight) -> Message:
    """The message with what the model can take."""
    strange = [one for one in message.attachments if one.kind not in sight.kinds]
    if not strange:
        return message
    able = " and ".join(("text", *sorted(sight.kinds)))
    reason = sight.trouble or f"this model takes no {strange[0].kind}, only {able}"
    if not sight.strip:
        raise UnsupportedMedia(where, reason)
    logger.warning("%s: %d of kind %s left out, %s", where, len(strange), strange[0].kind, reason)
    return replace(message, attachments=tuple(one for one in message.attachments if one not in strange))


def _with_holes(message: Message, hole: str, first: int) -> Message:
    if not message.attachments:
        return message
    text, start = "", 0
    for number, one in enumerate(message.attachments, first):
        place = _place(one, message)
        text += f"{message.content[start:place]}{hole}{number}{hole}"
        start = place
    return replace(message, content=text + message.content[start:], attachments=())


def _place(one: Attachment, message: Message) -> int:
    if not 0 <= one.offset <= len(message.content):
        raise InvalidArgument("attachments", f"one stands at {one.offset}, in a text of {len(message.content)}")
    return one.offset


def filled(tokens: Sequence[int], shown: Shown) -> tuple[tuple[Entry, ...], Sequence[int], Mapping[bytes, Part]]:
    """Tokens with pictures in the holes, the place of each token in that, and what the pictures are."""
    if not shown.contents:
        return tuple(tokens), range(len(tokens) + 1), {}
    holes = sorted(-1 - token for token in tokens if token < 0)
    if holes != list(range(len(shown.contents))):
        raise InvalidTemplate(f"it shows {len(holes)} pictures and sounds where there are {len(shown.contents)}")
    entries: list[Entry] = []
    places: list[int] = []
    contents: dict[bytes, Part] = {}
    for token in tokens:
        places.append(len(entries))
        for entry, part in [(token, None)] if token >= 0 else shown.contents[-1 - token]:
            entries.append(entry)
            if isinstance(entry, Media) and part is not None:
                contents[entry.digest] = part
    return tuple(entries), [*places, len(entries)], contents


def unused_character(messages: Sequence[Message]) -> str:
    """A character of Unicode's private use that nobody wrote."""
    written = set().union(*(message.content + (message.reasoning or "") for message in messages)) if messages else set()
    written |= set().union(*(call.arguments for message in messages for call in message.tool_calls), set())
    for code in PRIVATE_USE:
        if chr(code) not in written:
            return chr(code)
    raise InvalidArgument("messages", f"use all {len(PRIVATE_USE):,} private characters: one has to be free")
