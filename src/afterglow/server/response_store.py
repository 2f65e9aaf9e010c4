"""Responses that are remembered, so that the next one can go on from them: bounded in number and in bytes."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stored:
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

    def __init__(self, *, count: int, nbytes: int) -> None:
        self._count, self._nbytes = count, nbytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._held = 0

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]], salt: str = "") -> None:
        """Remember one; the oldest are forgotten for it."""
        nbytes = len(json.dumps(response)) + len(json.dumps(messages))
        self._stored[response["id"]] = Stored(response, messages, nbytes, salt)
        self._held += nbytes
        while self._stored and (len(self._stored) > self._count or self._held > self._nbytes):
            self._held -= self._stored.popitem(last=False)[1].nbytes

    def get(self, id: str) -> Stored | None:
        """One that is remembered; it is the newest then."""
        if id in self._stored:
            self._stored.move_to_end(id)
        return self._stored.get(id)

    def remove(self, id: str) -> bool:
        """Forget one; whether it was there."""
        stored = self._stored.pop(id, None)
        self._held -= stored.nbytes if stored else 0
        return stored is not None
