"""What all routes share: the models, the queues before them, threads for what would hold the event loop up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from afterglow.closing import Closing
from afterglow.engine.services import Numbers
from afterglow.errors import AfterglowError, Cancelled, RequestError
from afterglow.server.admission import Gate
from afterglow.server.errors import refusal_of
from afterglow.server.metrics import Metrics
from afterglow.server.roster import Roster
from afterglow.server.settings import ServerSettings
from afterglow.serving import ServedModel

T = TypeVar("T")
TEXT_THREADS = 8  # for templates and tokens
MEDIA_THREADS = 4  # for pictures and sounds, whose hosts may be slow
WAITING_THREADS = 16  # for questions to engines, which may be starting


class Ending(Protocol):
    """Something that is to be ended when nobody wants it any more."""

    def cancel(self) -> None: ...


class Service(Closing):
    """The models of a server and everything around them that routes need."""

    def __init__(self, roster: Roster, settings: ServerSettings) -> None:
        self.roster = roster
        self.settings = settings
        self.metrics = Metrics()
        self._gates: dict[str, Gate] = {}
        self._text = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="afterglow-text")
        self._media = ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="afterglow-media")
        self._waiting = ThreadPoolExecutor(WAITING_THREADS, thread_name_prefix="afterglow-waiting")
        self._counting: dict[str, asyncio.Future[Numbers]] = {}

    async def model(self, name: str | None) -> ServedModel:
        """A model by its name, loaded where it was not."""
        place = self.roster.place(name)
        model = await self.waiting(place.load) if place.model is None else place.model
        model.listen_in(asyncio.get_running_loop())
        return model

    def gate(self, model: ServedModel) -> Gate:
        """The queue before a model."""
        if model.name not in self._gates:
            self._gates[model.name] = Gate(running=model.facts.sequences, waiting=self.settings.queue)
        return self._gates[model.name]

    async def text(self, work: Callable[[], T]) -> T:
        """Do something with text in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._text, _whole(work))

    async def media(self, work: Callable[[], T]) -> T:
        """Bring pictures and sounds in, in a thread of their own few."""
        return await asyncio.get_running_loop().run_in_executor(self._media, _whole(work))

    async def waiting(self, work: Callable[[], T]) -> T:
        """Wait for an engine in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._waiting, _whole(work))

    async def begin(self, work: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Begin answers in a thread. Should nobody want them any more by then, they are cancelled."""
        begun = asyncio.get_running_loop().run_in_executor(self._text, _whole(work))
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            begun.add_done_callback(_cancel_all)
            raise

    async def while_there(self, request: Request, work: Coroutine[Any, Any, Response], prompt: str) -> Response:
        """Do what was asked while the client waits for it; without it, stop. `prompt` is the field with the text."""
        answer = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            return refusal_of(Cancelled("the client went away")).response()
        except RequestError as error:
            refusal = refusal_of(error)
            refusal.param = prompt if refusal.param == "messages" else refusal.param
            raise refusal from None
        finally:
            gone.cancel()
            answer.cancel()

    async def update_metrics(self) -> None:
        """Ask what is known elsewhere. An engine that does not answer soon keeps its old numbers."""
        asked = []
        for name, place in self.roster.places.items():
            if (model := place.model) is None:
                continue
            gate = self.gate(model)
            self.metrics.inside.labels(name).set(gate.inside)
            self.metrics.waiting.labels(name).set(gate.waiting)
            self.metrics.restarts.labels(name).set(model.restarts)
            if name not in self._counting or self._counting[name].done():
                self._counting[name] = asyncio.ensure_future(self.waiting(model.numbers))
            asked.append((name, self._counting[name]))
        if asked:
            await asyncio.wait([future for _, future in asked], timeout=0.5)
        for name, future in asked:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.metrics.note_engine(name, future.result())

    def close(self) -> None:
        """End every answer, every engine and every thread."""
        self.roster.close()
        self._text.shutdown(wait=False, cancel_futures=True)
        self._media.shutdown(wait=False, cancel_futures=True)
        self._waiting.shutdown(wait=False, cancel_futures=True)


def _whole(work: Callable[[], T]) -> Callable[[], T]:
    """The same; a StopIteration, which no future can hold, would leave whoever waits for it waiting forever."""

    def run() -> T:
        try:
            return work()
        except StopIteration as error:
            raise RuntimeError("a StopIteration got out") from error

    return run


def _cancel_all(begun: asyncio.Future[Sequence[Ending]]) -> None:
    if not begun.cancelled() and begun.exception() is None:
        for stream in begun.result():
            stream.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """What several streams give, as it comes, each with the stream's number. The first error ends all."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue()

    async def read(number: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                arrived.put_nowait((number, item, None))
            arrived.put_nowait((number, None, None))
        except AfterglowError as error:
            arrived.put_nowait((number, None, error))

    readers = [asyncio.ensure_future(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(streams)
        while running:
            number, arrival, error = await arrived.get()
            if error is not None:
                raise error
            if arrival is None:
                running -= 1
            else:
                yield number, arrival
    finally:
        for reader in readers:
            reader.cancel()
