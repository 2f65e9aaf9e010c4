"""Media of a request. They are loaded before the prompt is planned, outside the event loop and the text threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from afterglow.api.model import Model
from afterglow.chat.content import Attachment
from afterglow.chat.messages import Message, list_attachments
from afterglow.engine.types.media import EncodedMedia
from afterglow.media.load import estimate_inline_bytes
from afterglow.server import limits
from afterglow.server.admission import MediaReservation
from afterglow.server.state import ServerState


async def load_media(
    state: ServerState, model: Model, messages: list[Message], resources: contextlib.ExitStack
) -> list[Message]:
    """Return the messages with all media fetched, and decoded once in the process of the engine.

    The files count against the media budget until `resources` is closed: inline files before they are decoded, fetched
    files once their size is known.
    """
    attachments = list_attachments(messages)
    if not attachments:
        return messages
    limits.check_limit(state.settings, "max_media", "messages", len(attachments))
    reservation = MediaReservation(state.media_budget, state.settings.max_decoded_media_bytes)
    resources.callback(reservation.release)
    reservation.resize(count_media_bytes(attachments))
    loaded = await state.run_media_work(lambda: model.load_media(messages))
    reservation.resize(count_media_bytes(list_attachments(loaded)))
    return loaded


def count_media_bytes(attachments: Iterable[Attachment]) -> int:
    """Count the bytes of inline and loaded files in this process."""
    total = 0
    for attachment in attachments:
        match attachment.source:
            case str(text):
                total += estimate_inline_bytes(text)
            case EncodedMedia(data=data):
                total += len(data)
    return total
