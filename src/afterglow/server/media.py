"""Media of a request. They are loaded before the prompt is planned, outside the event loop and the text threads."""

from __future__ import annotations

from afterglow.api.served_model import ServedModel
from afterglow.chat.content import to_openai_content
from afterglow.engine.types.media import EncodedMedia
from afterglow.server import limits
from afterglow.server.schema.chat import MessageDict
from afterglow.server.state import ServerState


def count_media(messages: list[MessageDict]) -> int:
    """Count the images and audio files in messages.

    >>> count_media([{"content": "Hello"}, {"content": [{"type": "image_url"}, {"type": "text"}]}])
    1
    """
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return sum(part["type"] != "text" for content in contents for part in content)


def count_media_bytes(messages: list[MessageDict]) -> int:
    """Count the bytes of the media files that loaded messages keep in this process."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    media = [part.get(part["type"]) for content in contents for part in content]
    return sum(len(file.data) for file in media if isinstance(file, EncodedMedia))


async def load_media(state: ServerState, model: ServedModel, messages: list[MessageDict]) -> list[MessageDict]:
    """Return the messages with all media fetched, and decoded once in the process of the engine."""
    count = count_media(messages)
    if not count:
        return messages
    limits.check_limit(state.settings, "max_media", "messages", count)
    return await state.run_media_work(lambda: load_media_blocking(model, messages))


def load_media_blocking(model: ServedModel, messages: list[MessageDict]) -> list[MessageDict]:
    """Load the media of messages in the current thread."""
    return [
        {**message, "content": to_openai_content(loaded.content, loaded.attachments, keep_loaded=True)}
        if message.get("content")
        else message
        for message, loaded in zip(messages, model.load_media(messages), strict=True)
    ]
