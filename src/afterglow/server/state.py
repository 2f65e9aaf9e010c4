"""What all routes share: the models, the queues before them, threads for what would hold the event loop up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from afterglow.api.served_model import ServedModel
from afterglow.closeable import Closeable
from afterglow.engine.host.remote_calls import EngineStats
from afterglow.errors import AfterglowError, Cancelled, RequestError
from afterglow.server.admission import AdmissionQueue
from afterglow.server.errors import to_api_error
from afterglow.server.metrics import Metrics
from afterglow.server.models import ModelRegistry
from afterglow.server.settings import ServerSettings

T = TypeVar("T")
TEXT_THREADS = 8  # for templates and tokens
MEDIA_THREADS = 4  # for pictures and sounds, whose hosts may be slow
ENGINE_CALL_THREADS = 16  # for questions to engines, which may be starting


class Cancellable(Protocol):
    """Something that is to be ended when nobody wants it any more."""

    def cancel(self) -> None: ...


class ServerState(Closeable):
    """The models of a server and everything around them that routes need."""

    def __init__(self, models: ModelRegistry, settings: ServerSettings) -> None:
        self.models = models
        self.settings = settings
        self.metrics = Metrics()
        self._admission_queues: dict[str, AdmissionQueue] = {}
        self._text_pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="afterglow-text")
        self._media_pool = ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="afterglow-media")
        self._engine_call_pool = ThreadPoolExecutor(ENGINE_CALL_THREADS, thread_name_prefix="afterglow-waiting")
        self._pending_stats: dict[str, asyncio.Future[EngineStats]] = {}

    async def get_model(self, name: str | None) -> ServedModel:
        """A model by its name, loaded where it was not."""
        place = self.models.get_slot(name)
        model = await self.run_engine_call(place.load) if place.model is None else place.model
        model.attach_event_loop(asyncio.get_running_loop())
        return model

    def get_admission_queue(self, model: ServedModel) -> AdmissionQueue:
        """The queue before a model."""
        if model.name not in self._admission_queues:
            self._admission_queues[model.name] = AdmissionQueue(
                max_running=model.engine_info.sequences, max_waiting=self.settings.max_queue
            )
        return self._admission_queues[model.name]

    async def run_text_work(self, work: Callable[[], T]) -> T:
        """Do something with text in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, _convert_stop_iteration(work))

    async def run_media_work(self, work: Callable[[], T]) -> T:
        """Bring pictures and sounds in, in a thread of their own few."""
        return await asyncio.get_running_loop().run_in_executor(self._media_pool, _convert_stop_iteration(work))

    async def run_engine_call(self, work: Callable[[], T]) -> T:
        """Wait for an engine in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._engine_call_pool, _convert_stop_iteration(work))

    async def start_streams(self, work: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Begin answers in a thread. Should nobody want them any more by then, they are cancelled."""
        begun = asyncio.get_running_loop().run_in_executor(self._text_pool, _convert_stop_iteration(work))
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            begun.add_done_callback(_cancel_all)
            raise

    async def run_while_connected(
        self, request: Request, work: Coroutine[Any, Any, Response], prompt_field: str
    ) -> Response:
        """Do what was asked while the client waits for it; without it, stop. `prompt` is the field with the text."""
        answer = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            return to_api_error(Cancelled("the client went away")).to_response()
        except RequestError as error:
            refusal = to_api_error(error)
            refusal.param = prompt_field if refusal.param == "messages" else refusal.param
            raise refusal from None
        finally:
            gone.cancel()
            answer.cancel()

    async def update_metrics(self) -> None:
        """Ask what is known elsewhere. An engine that does not answer soon keeps its old numbers."""
        asked = []
        for name, place in self.models.slots.items():
            if (model := place.model) is None:
                continue
            gate = self.get_admission_queue(model)
            self.metrics.choices_in_flight.labels(name).set(gate.in_flight)
            self.metrics.choices_waiting.labels(name).set(gate.waiting)
            self.metrics.restarts.labels(name).set(model.restarts)
            if name not in self._pending_stats or self._pending_stats[name].done():
                self._pending_stats[name] = asyncio.ensure_future(self.run_engine_call(model.get_stats))
            asked.append((name, self._pending_stats[name]))
        if asked:
            await asyncio.wait([future for _, future in asked], timeout=0.5)
        for name, future in asked:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.metrics.record_engine_stats(name, future.result())

    def close(self) -> None:
        """End every answer, every engine and every thread."""
        self.models.close()
        self._text_pool.shutdown(wait=False, cancel_futures=True)
        self._media_pool.shutdown(wait=False, cancel_futures=True)
        self._engine_call_pool.shutdown(wait=False, cancel_futures=True)


def _convert_stop_iteration(work: Callable[[], T]) -> Callable[[], T]:
    """The same; a StopIteration, which no future can hold, would leave whoever waits for it waiting forever."""

    def run() -> T:
        try:
            return work()
        except StopIteration as error:
            raise RuntimeError("a StopIteration got out") from error

    return run


def _cancel_all(future: asyncio.Future[Sequence[Cancellable]]) -> None:
    if not future.cancelled() and future.exception() is None:
        for stream in future.result():
            stream.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def merge_streams(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
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
