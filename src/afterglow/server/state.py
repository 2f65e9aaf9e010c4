"""State shared by all routes: models, admission queues, metrics, and thread pools for blocking work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from starlette.types import Scope

from afterglow.api.model import Model
from afterglow.closeable import Closeable
from afterglow.engine.host.remote_calls import EngineStats
from afterglow.errors import Cancelled, RequestError
from afterglow.media.budget import MediaBudget
from afterglow.paths import get_data_directory
from afterglow.server.admission import AdmissionQueue
from afterglow.server.conversations import ConversationDatabase
from afterglow.server.errors import APIError, invalid_request_error, to_api_error
from afterglow.server.events import EventRing
from afterglow.server.held_models import get_held_model
from afterglow.server.history import RequestHistory
from afterglow.server.installed import ModelVariant
from afterglow.server.metrics import Metrics
from afterglow.server.models import ModelRegistry, ModelSlot
from afterglow.server.settings import ServerSettings
from afterglow.server.sse import EarlyStreamResponse, StreamFormat, wait_for_disconnect

ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")
TEXT_THREADS = 8  # templates and tokenization
MEDIA_THREADS = 4  # media, which may come from slow hosts
DOWNLOAD_THREADS = 16  # of models; further downloads wait
ENGINE_CALL_THREADS = 16  # calls to the engine of one model, which may be starting
LONG_CALL_THREADS = 16  # embeddings, reranking and transcription: many calls for one request
STATS_TIMEOUT_SECONDS = 0.5
CONVERSATIONS_FILE_NAME = "conversations.sqlite3"
MERGE_BUFFER_ITEMS = 64  # further items stay in the streams, which bound them


class Cancellable(Protocol):
    """Work that can be cancelled."""

    def cancel(self) -> None: ...


class ServerState(Closeable):
    """Models of a server and the resources that routes share."""

    def __init__(self, models: ModelRegistry, settings: ServerSettings) -> None:
        self.models = models
        self.settings = settings
        self.metrics = Metrics()
        self.events = EventRing()
        self.history = RequestHistory(self.events)
        self.ollama_port: int | None = None  # second port of the server, if it has one
        self.media_budget = MediaBudget()  # of the media files of all requests
        self.conversations = ConversationDatabase(
            get_data_directory("web") / CONVERSATIONS_FILE_NAME if settings.store_conversations else None, settings
        )
        self._admission_queues: dict[str, AdmissionQueue] = {}
        self._text_pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="afterglow-text")
        self._media_pool = ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="afterglow-media")
        self._download_pool = ThreadPoolExecutor(DOWNLOAD_THREADS, thread_name_prefix="afterglow-download")
        self._engine_call_pools: dict[str, ThreadPoolExecutor] = {}  # by model: an engine may not answer
        self._long_call_pool = ThreadPoolExecutor(LONG_CALL_THREADS, thread_name_prefix="afterglow-long-calls")
        self._pending_stats: dict[str, asyncio.Future[EngineStats]] = {}

    def is_for_ollama_port(self, scope: Scope) -> bool:
        """Whether a request was sent to Ollama's port."""
        _, port = scope.get("server") or (None, None)
        return port is not None and port == self.ollama_port

    async def get_model(self, name: str | None) -> Model:
        """Return a model by name, loaded if necessary. It is not unloaded before the end of the HTTP request."""
        await self.add_named_model(name)
        requested = self.models.get_requested_model(name)
        await self.ensure_variant_context(requested.slot, requested.variant)
        model = await get_held_model(requested.slot)
        model.attach_event_loop(asyncio.get_running_loop())
        return model

    async def ensure_variant_context(self, slot: ModelSlot, variant: ModelVariant | None) -> None:
        """Load a model again if its context is shorter than a variant needs, as `ensure_context`."""
        if variant is not None and variant.context_length is not None:
            await self.ensure_context(slot, variant.context_length, "model", f"`num_ctx` of {variant.name!r}")

    async def ensure_context(self, slot: ModelSlot, context: int, param: str, label: str) -> None:
        """Load a model again if its context is too short; raise status 400 with both numbers if that is not possible.

        `param` is the field that asks for the context, `label` names it in the error.
        """
        if slot.model is not None and context <= slot.model.context_length:
            return  # so it is if the request holds the model, which cannot be loaded again then
        while context > (model := await asyncio.wrap_future(slot.start_load())).context_length:
            length, trained = model.context_length, model.info.trained_context_length
            loaded = f"{label} is {context:,}; {slot.name!r} is loaded with a context of {length:,}"
            if context > trained:
                raise invalid_request_error(param, f"{loaded} and was trained for {trained:,}")
            if not self.settings.allow_reload:
                advice = (
                    f"start the server with `--context {context}`, or allow clients to change it with `--allow-reload`"
                )
                raise invalid_request_error(param, f"{loaded}: {advice}")
            if context <= await asyncio.wrap_future(slot.start_reload(context)):
                return  # another request may have asked for less

    async def add_named_model(self, name: str | None) -> None:
        """Serve a model on this machine that a request names, if the server serves all of them."""
        if self.models.can_add(name):
            await self.run_text_work(lambda: self.models.add_named(name))

    async def get_slot(self, name: str | None) -> ModelSlot:
        """Return the slot of a model by name. A model on this machine gets one if the server serves all of them."""
        await self.add_named_model(name)
        return self.models.get_slot(name)

    async def get_generating_model(self, name: str | None) -> Model:
        """Return a model by name; raise status 400 if it only computes embeddings."""
        model = await self.get_model(name)
        if not model.can_generate:
            message = f"the model {model.name!r} supports embeddings only"
            raise invalid_request_error("model", message, "unsupported_model")
        return model

    def get_admission_queue(self, model: Model) -> AdmissionQueue:
        """Return the admission queue of a model."""
        sequences = model.engine_info.sequences
        if (queue := self._admission_queues.get(model.name)) is None:
            queue = AdmissionQueue(max_running=sequences, max_waiting=self.settings.max_queue)
            self._admission_queues[model.name] = queue
        queue.max_running = sequences
        return queue

    async def run_text_work(self, work: Callable[[], ResultT]) -> ResultT:
        """Run template rendering or tokenization in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, _convert_stop_iteration(work))

    async def run_media_work(self, work: Callable[[], ResultT]) -> ResultT:
        """Load media in a thread of a separate pool, so that slow hosts do not block other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._media_pool, _convert_stop_iteration(work))

    async def run_download(self, work: Callable[[], ResultT]) -> ResultT:
        """Download a model in a thread of a separate pool: it may take hours."""
        return await asyncio.get_running_loop().run_in_executor(self._download_pool, _convert_stop_iteration(work))

    async def run_engine_call(self, model_name: str, work: Callable[[], ResultT]) -> ResultT:
        """Run a blocking call to the engine of a model in a thread."""
        pool = self._get_engine_call_pool(model_name)
        return await asyncio.get_running_loop().run_in_executor(pool, _convert_stop_iteration(work))

    def _get_engine_call_pool(self, model_name: str) -> ThreadPoolExecutor:
        """Return the threads for calls to one engine. Called in the event loop only."""
        if model_name not in self._engine_call_pools:
            self._engine_call_pools[model_name] = ThreadPoolExecutor(
                ENGINE_CALL_THREADS, thread_name_prefix="afterglow-engine-calls"
            )
        return self._engine_call_pools[model_name]

    async def run_long_call(self, work: Callable[[threading.Event], ResultT]) -> ResultT:
        """Run many calls to an engine in a thread of a separate pool. On cancellation, the event of `work` is set."""
        cancel = threading.Event()
        call = _convert_stop_iteration(lambda: work(cancel))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._long_call_pool, call)
        except asyncio.CancelledError:
            cancel.set()
            raise

    async def start_streams(
        self, work: Callable[[], Sequence[Any]], cancel: threading.Event, *, generates_with: str | None = None
    ) -> Sequence[Any]:
        """Submit requests in a thread and return their streams. `generates_with`: model for which the work waits.

        On cancellation, `cancel` is set, work that has not begun is dropped, and started streams are cancelled.
        """
        pool = self._text_pool if generates_with is None else self._get_engine_call_pool(generates_with)
        streams = pool.submit(_convert_stop_iteration(work))
        try:
            return await asyncio.wrap_future(streams)
        except asyncio.CancelledError:
            cancel.set()
            if not streams.cancel():
                streams.add_done_callback(_cancel_all)
            raise

    async def run_while_connected(
        self,
        request: Request,
        work: Coroutine[Any, Any, Response],
        prompt_field: str,
        stream_format: StreamFormat | None = None,
        other_fields: Mapping[str, str] | None = None,
    ) -> Response:
        """Run `work` and cancel it if the client disconnects.

        `prompt_field` is the request field that errors about the prompt name, `other_fields` are further ones by their
        name in /v1/chat/completions. With a `stream_format`, work that takes longer than `ping_seconds` starts its
        stream early, so that the client gets keep-alive pings.
        """
        response = asyncio.ensure_future(
            name_fields(work, {"messages": prompt_field, "prompt": prompt_field, **(other_fields or {})})
        )
        disconnect = asyncio.ensure_future(wait_for_disconnect(request.receive))
        ping_seconds = self.settings.ping_seconds
        starts_early = False
        try:
            timeout = None if stream_format is None else ping_seconds
            await asyncio.wait({response, disconnect}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if response.done():
                return response.result()
            if stream_format is None or disconnect.done():
                raise Cancelled("the client disconnected")
            starts_early = True
            return EarlyStreamResponse(response, ping_seconds=ping_seconds, format=stream_format)
        finally:
            disconnect.cancel()
            if not starts_early:
                response.cancel()

    async def update_metrics(self) -> None:
        """Refresh the gauges of queues and engines. An engine that does not respond in time keeps its old values."""
        pending = []
        for name, slot in self.models.slots.items():
            self.metrics.record_slot(slot)
            if (model := slot.model) is None or not slot.is_usable:
                continue
            queue = self.get_admission_queue(model)
            self.metrics.choices_in_flight.labels(name).set(queue.in_flight)
            self.metrics.choices_waiting.labels(name).set(queue.waiting)
            self.metrics.restarts.labels(name).set(model.restarts)
            if name not in self._pending_stats or self._pending_stats[name].done():
                self._pending_stats[name] = asyncio.ensure_future(self.run_engine_call(name, model.get_stats))
            pending.append((name, self._pending_stats[name]))
        if pending:
            await asyncio.wait([future for _, future in pending], timeout=STATS_TIMEOUT_SECONDS)
        for name, future in pending:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.metrics.record_engine_stats(name, future.result())

    def close(self) -> None:
        """Close all models and thread pools. Running requests end with an error."""
        self.models.close()
        self.conversations.close()
        self._text_pool.shutdown(wait=False, cancel_futures=True)
        self._media_pool.shutdown(wait=False, cancel_futures=True)
        self._download_pool.shutdown(wait=False, cancel_futures=True)
        for pool in self._engine_call_pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self._long_call_pool.shutdown(wait=False, cancel_futures=True)


def _convert_stop_iteration(work: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """Convert StopIteration to RuntimeError: a future cannot hold a StopIteration and would never complete."""

    def run() -> ResultT:
        try:
            return work()
        except StopIteration as error:
            raise RuntimeError("unexpected StopIteration") from error

    return run


def _cancel_all(future: Future[Sequence[Cancellable]]) -> None:
    if not future.cancelled() and future.exception() is None:
        for stream in future.result():
            stream.cancel()


async def name_fields(work: Coroutine[Any, Any, ResultT], fields: Mapping[str, str]) -> ResultT:
    """Run `work`. Errors name the fields of the request instead of those of /v1/chat/completions."""
    try:
        return await work
    except (RequestError, APIError) as error:
        api_error = to_api_error(error)
        param = api_error.param or ""
        first = param.partition(".")[0]
        if first in fields:
            api_error.param = fields[first] + param[len(first) :]
            for written in (param, getattr(error, "name", param)):
                api_error.message = api_error.message.replace(f"`{written}`", f"`{api_error.param}`")
        raise api_error from None


async def merge_streams(streams: Sequence[AsyncIterator[ItemT]]) -> AsyncIterator[tuple[int, ItemT]]:
    """Yield the items of several streams as they arrive, each with the index of its stream.

    The first error ends all streams.
    """
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    arrivals: asyncio.Queue[tuple[int, ItemT | None, BaseException | None]] = asyncio.Queue(MERGE_BUFFER_ITEMS)

    async def read(index: int, stream: AsyncIterator[ItemT]) -> None:
        try:
            async for item in stream:
                await arrivals.put((index, item, None))
            await arrivals.put((index, None, None))
        except Exception as error:  # raised in the task of the request
            await arrivals.put((index, None, error))

    readers = [asyncio.ensure_future(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(streams)
        while running:
            index, arrival, error = await arrivals.get()
            if error is not None:
                raise error
            if arrival is None:
                running -= 1
            else:
                yield index, arrival
    finally:
        for reader in readers:
            reader.cancel()
