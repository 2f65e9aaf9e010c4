"""Chats of one model: each renders the conversations of one template."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from afterglow.chat.chat import Chat

MAX_REQUEST_TEMPLATES = 4  # whose renderers stay open


class ChatCache:
    """Chats of a model by template, for the weights that are loaded.

    The chat of the model's own template stays, of those of requests only the last `MAX_REQUEST_TEMPLATES`. Holds no
    reference to the model, which may be garbage collected.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights: object = None
        self._chats: OrderedDict[str | None, Chat] = OrderedDict()  # by template; None: that of the model

    def get(self, weights: object, build: Callable[[], Chat], template: str | None = None) -> Chat:
        """Return the chat of these weights and this template; replace those of other weights."""
        with self._lock:
            if self._weights is not weights:
                self._close_all()
                self._weights = weights
            if template not in self._chats:
                self._chats[template] = build()
            self._chats.move_to_end(template)
            others = [key for key in self._chats if key is not None]
            if len(others) > MAX_REQUEST_TEMPLATES:
                self._chats.pop(others[0]).close()  # a request that still uses it starts its renderer again
            return self._chats[template]

    def close(self) -> None:
        """Close the chats. The next use builds a new one."""
        with self._lock:
            self._close_all()
            self._weights = None

    def _close_all(self) -> None:
        while self._chats:
            self._chats.popitem()[1].close()
