"""Pictures and sounds of a request, brought in before it is planned: neither the event loop nor other requests wait."""

from __future__ import annotations

from typing import Any, TypeAlias

from afterglow.api.served_model import ServedModel
from afterglow.chat.content import to_openai_content
from afterglow.server import limits
from afterglow.server.state import ServerState

RequestMessages: TypeAlias = list[dict[str, Any]]


def count_media(messages: RequestMessages) -> int:
    """How many pictures and sounds there are.

    >>> count_media([{"content": "Hello"}, {"content": [{"type": "image_url"}, {"type": "text"}]}])
    1
    """
    parts = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"]]
    return sum(part["type"] != "text" for part in parts)


async def load_media(state: ServerState, model: ServedModel, messages: RequestMessages) -> RequestMessages:
    """The messages with everything that they name or contain opened."""
    count = count_media(messages)
    if not count:
        return messages
    limits.check_limit(state.settings, "max_media", "messages", count)
    return await state.run_media_work(lambda: load_media_blocking(model, messages))


def load_media_blocking(model: ServedModel, messages: RequestMessages) -> RequestMessages:
    """The same, in this thread."""
    return [
        {**one, "content": to_openai_content(seen.content, seen.attachments, keep_loaded=True)}
        if one.get("content")
        else one
        for one, seen in zip(messages, model.load_media(messages), strict=True)
    ]
