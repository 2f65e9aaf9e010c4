"""Models that an HTTP request holds: a model that it has got is not unloaded before its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from afterglow.api.model import Model
from afterglow.server.models import ModelSlot


class HeldModels:
    """Models that one HTTP request has got. They are not unloaded before its end."""

    def __init__(self) -> None:
        self._models: dict[ModelSlot, Model] = {}
        self._ended = False

    def get(self, slot: ModelSlot) -> Model | None:
        """Return the model of a slot if the request holds it."""
        return self._models.get(slot)

    def add(self, slot: ModelSlot, model: Model) -> None:
        """Hold an acquired model until the end of the request."""
        if self._ended:
            slot.release()
        else:
            self._models[slot] = model

    def release(self) -> None:
        """Release all models at the end of the request."""
        self._ended = True
        for slot in self._models:
            slot.release()
        self._models.clear()


_held_models: ContextVar[HeldModels] = ContextVar("held_models")


@contextlib.contextmanager
def hold_models() -> Iterator[None]:
    """Keep the models that the request in this context gets from being unloaded until its end."""
    held = HeldModels()
    _held_models.set(held)
    try:
        yield
    finally:
        held.release()


async def get_held_model(slot: ModelSlot) -> Model:
    """Return the model of a slot, loaded if necessary, and hold it until the end of the current request.

    Outside a request it is not held.
    """
    held = _held_models.get(None)
    if held is not None and (model := held.get(slot)) is not None:
        return model
    future = slot.acquire()
    try:
        model = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.cancel() and future.exception() is None:  # the request has got the model
            slot.release()
        raise
    if held is None:
        slot.release()
    else:
        held.add(slot, model)
    return model
