"""Store of responses for `previous_response_id`, bounded in number and size."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from afterglow.chat.messages import Message


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its conversation without the instructions: as messages, and as the items before the response."""

    response: dict[str, Any]
    messages: list[Message]
    nbytes: int
    salt: str = ""
    input_items: list[dict[str, Any]] = field(default_factory=list)

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items of the conversation."""
        return [*self.input_items, *self.response.get("output", ())]


class ResponseStore:
    """The most recently used responses.

    >>> store = ResponseStore(max_responses=1, max_bytes=1000)
    >>> store.put({"id": "a"}, []), store.put({"id": "b"}, [])
    (None, None)
    >>> store.get("a") is None, store.get("b").response["id"]
    (True, 'b')
    """

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._total_bytes = 0

    def put(
        self,
        response: dict[str, Any],
        messages: list[Message],
        salt: str = "",
        input_items: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Store a response and evict the least recently used ones that exceed the limits."""
        nbytes = len(json.dumps([response, list(input_items)])) + len(repr(messages))
        self._responses[response["id"]] = StoredResponse(response, messages, nbytes, salt, list(input_items))
        self._total_bytes += nbytes
        while self._responses and (len(self._responses) > self._max_responses or self._total_bytes > self._max_bytes):
            self._total_bytes -= self._responses.popitem(last=False)[1].nbytes

    def get(self, id: str) -> StoredResponse | None:
        """Return a response and mark it as most recently used."""
        if id in self._responses:
            self._responses.move_to_end(id)
        return self._responses.get(id)

    def find_item(self, id: str, salt: str) -> dict[str, Any] | None:
        """Return an item of the stored conversations of a tenant."""
        conversations = (stored.items for stored in self._responses.values() if stored.salt == salt)
        return next((item for items in conversations for item in items if item["id"] == id), None)

    def remove(self, id: str) -> bool:
        """Remove a response and return whether it existed."""
        stored = self._responses.pop(id, None)
        self._total_bytes -= stored.nbytes if stored else 0
        return stored is not None
