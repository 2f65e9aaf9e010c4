"""Responses that are remembered, so that the next one can go on from them: bounded in number and in bytes."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to its end, without its instructions."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    nbytes: int
    salt: str = ""  # whose it is


class ResponseStore:
    """The newest responses.

    >>> store = ResponseStore(count=1, nbytes=1000)
    >>> store.put({"id": "a"}, []), store.put({"id": "b"}, [])
    (None, None)
    >>> store.get("a") is None, store.get("b").response["id"]
    (True, 'b')
    """

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._total_bytes = 0

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]], salt: str = "") -> None:
        """Remember one; the oldest are forgotten for it."""
        nbytes = len(json.dumps(response)) + len(json.dumps(messages))
        self._responses[response["id"]] = StoredResponse(response, messages, nbytes, salt)
        self._total_bytes += nbytes
        while self._responses and (len(self._responses) > self._max_responses or self._total_bytes > self._max_bytes):
            self._total_bytes -= self._responses.popitem(last=False)[1].nbytes

    def get(self, id: str) -> StoredResponse | None:
        """One that is remembered; it is the newest then."""
        if id in self._responses:
            self._responses.move_to_end(id)
        return self._responses.get(id)

    def remove(self, id: str) -> bool:
        """Forget one; whether it was there."""
        stored = self._responses.pop(id, None)
        self._total_bytes -= stored.nbytes if stored else 0
        return stored is not None
