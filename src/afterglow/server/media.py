"""Pictures and sounds of a request, brought in before it is planned: neither the event loop nor other requests wait."""

from __future__ import annotations

from typing import Any, TypeAlias

from afterglow.chat.content import written_content
from afterglow.server import limits
from afterglow.server.service import Service
from afterglow.serving import ServedModel

Messages: TypeAlias = list[dict[str, Any]]


def count_media(messages: Messages) -> int:
    """How many pictures and sounds there are.

    >>> count_media([{"content": "Hello"}, {"content": [{"type": "image_url"}, {"type": "text"}]}])
    1
    """
    parts = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"]]
    return sum(part["type"] != "text" for part in parts)


async def brought(service: Service, model: ServedModel, messages: Messages) -> Messages:
    """The messages with everything that they name or contain opened."""
    count = count_media(messages)
    if not count:
        return messages
    limits.at_most(service.settings, "max_media", "messages", count)
    return await service.media(lambda: opened(model, messages))


def opened(model: ServedModel, messages: Messages) -> Messages:
    """The same, in this thread."""
    return [
        {**one, "content": written_content(seen.content, seen.attachments, values=True)} if one.get("content") else one
        for one, seen in zip(messages, model.bring(messages), strict=True)
    ]
