"""Ownership of native objects: each has one handle, and closing a parent closes its children first."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from afterglow.closeable import Closeable
from afterglow.errors import Closed

_open_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


class Handle(Closeable):
    """Owns a native pointer until `close`, which passes it to `free`.

    >>> from afterglow.llama.context import ContextSettings, LlamaContext, LlamaModel
    >>> with LlamaModel.load(path) as model, LlamaContext(model, ContextSettings(cells=512)) as context:
    ...     context.model is model
    True
    """

    def __init__(self, name: str, pointer: Any, free: Callable[[Any], None], parent: Handle | None = None) -> None:
        self._name = name
        self._pointer = pointer
        self._free = free
        self._children: list[Handle] = []
        self._parent = parent
        if parent is not None:
            parent._children.append(self)
        _open_handles.add(self)

    @property
    def pointer(self) -> Any:
        """The native pointer. Raises `Closed` after this handle or one of its parents was closed."""
        if self._pointer is None:
            raise Closed(self._name)
        return self._pointer

    @property
    def closed(self) -> bool:
        return self._pointer is None

    def close(self) -> None:
        """Free the native object and everything created from it. Closing twice is allowed."""
        if self._pointer is None:
            return
        for child in reversed(self._children[:]):
            child.close()
        pointer, self._pointer = self._pointer, None
        if self._parent is not None:
            self._parent._children.remove(self)
            self._parent = None
        _open_handles.discard(self)
        self._free(pointer)


def list_open_handles() -> list[Handle]:
    """Return every handle that is still open; empty if nothing leaks."""
    return list(_open_handles)
