"""Saved conversations of the chat: one file each, written after every response, for `--resume` and `/resume`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from afterglow.chat.messages import Message, parse_messages, to_openai_message
from afterglow.errors import InvalidArgument
from afterglow.llama.atomic_write import write_atomically

ID_PATTERN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")


@dataclass(frozen=True, slots=True)
class SavedConversation:
    """A conversation on disk, with the model that answered it last."""

    id: str
    model: str
    messages: list[Message]

    @property
    def title(self) -> str:
        """First line of the first question."""
        questions = (message.content for message in self.messages if message.role == "user")
        return next(questions, "").strip().partition("\n")[0]


class ConversationStore:
    """Directory of saved conversations. Only the user can read its files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, id: str, model: str, messages: Sequence[Message]) -> None:
        """Write a conversation, complete or not at all. Raises `OSError`."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = {"model": model, "messages": [to_openai_message(message) for message in messages]}
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        write_atomically(self._get_path(id), [text.encode("utf-8", "surrogatepass")])

    def load(self, id: str) -> SavedConversation:
        """Read a conversation by its id. Raises `InvalidArgument` if there is none, or if the file is damaged."""
        path = self._get_path(id)
        if ID_PATTERN.fullmatch(id) is None or not path.exists():
            raise InvalidArgument("resume", f"found no saved conversation {id}; /resume in a chat lists them")
        try:
            content: Any = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
            return SavedConversation(id, str(content["model"]), parse_messages(content["messages"]))
        except (OSError, ValueError, TypeError, KeyError, InvalidArgument) as error:
            raise InvalidArgument("resume", f"cannot read {path}: {error}") from None

    def load_last(self) -> SavedConversation:
        """Read the conversation that was saved last. Raises `InvalidArgument` if there is none."""
        ids = self.list_ids()
        if not ids:
            raise InvalidArgument("resume", "found no saved conversation; `afterglow chat` starts one")
        return self.load(ids[0])

    def list_ids(self) -> list[str]:
        """Return the ids of all conversations, the one that was saved last first."""
        paths = [path for path in self.directory.glob("*.json") if ID_PATTERN.fullmatch(path.stem)]
        return [path.stem for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)]

    def load_recent(self, count: int) -> Iterator[SavedConversation]:
        """Yield the last conversations without damaged ones, the newest first."""
        for id in self.list_ids()[:count]:
            try:
                yield self.load(id)
            except InvalidArgument:
                continue

    def _get_path(self, id: str) -> Path:
        return self.directory / f"{id}.json"


def create_id() -> str:
    """Return the id of a new conversation: when it began, and four random digits.

    >>> ID_PATTERN.fullmatch(create_id()) is not None
    True
    """
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
