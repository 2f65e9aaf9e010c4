"""Runs the batches of a server one after the other, in the background, and continues those that a restart left."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

from fastapi import FastAPI

from afterglow.errors import AfterglowError, Closed
from afterglow.server.batches.execution import BatchExecution, build_description, build_error_result
from afterglow.server.batches.store import BatchStatus, BatchStore, StoredBatch
from afterglow.server.errors import APIError, to_api_error
from afterglow.server.logs import logger
from afterglow.server.state import ServerState

IDLE_SECONDS = 60.0  # interval of the search for batches that another process left, and for expired files
STATUS_POLL_SECONDS = 1.0  # how often the database is asked whether another process cancelled the batch
MESSAGES = {
    "failed": "the batch failed before this line ran",
    "expired": "the batch expired before this line ran",
    "cancelled": "the batch was cancelled before this line ran",
}


def is_over(batch: StoredBatch) -> bool:
    """Whether a batch does not run any more."""
    return batch.status == "cancelling" or time.time() >= batch.expires_at


def describe_error(error: Exception) -> str:
    """Describe the error of a batch to its client, without paths of this machine."""
    if isinstance(error, OSError):
        return f"its input cannot be read: {error.strerror}"
    return to_api_error(error).message if isinstance(error, APIError | AfterglowError) else str(error)


class BatchRunner:
    """Tasks of a server that run batches. Several servers may share a store: each batch is run by one of them."""

    def __init__(self, state: ServerState, store: BatchStore) -> None:
        self._state = state
        self._store = store
        self._wake_event = asyncio.Event()
        self._cancel_event = asyncio.Event()
        self._cancelled_ids: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, app: FastAPI) -> None:
        """Start the tasks in the running event loop: one runs batches, one ends those that wait and will not run."""
        work = ((self._run_batches, self._wake_event), (self._end_waiting_batches, self._cancel_event))
        self._tasks = [asyncio.ensure_future(self._repeat(app, run, event)) for run, event in work]

    async def stop(self) -> None:
        """Stop after the last result that was stored. Running lines run again after a restart."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._store.close)

    def wake(self) -> None:
        """Look for new batches now."""
        self._wake_event.set()

    def cancel(self, id: str) -> None:
        """Stop a batch that runs or waits here, whose status is `cancelling`."""
        self._cancelled_ids.add(id)
        self._cancel_event.set()

    async def _repeat(self, app: FastAPI, run: Callable[[FastAPI], Awaitable[None]], event: asyncio.Event) -> None:
        while True:
            event.clear()
            try:
                if self._store.exists:
                    await run(app)
            except (Closed, asyncio.CancelledError):
                return  # the server stops
            except Exception as error:
                is_expected = isinstance(error, OSError | sqlite3.Error)
                logger.error("batches do not run: %s", error, exc_info=not is_expected)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), IDLE_SECONDS)

    async def _run_batches(self, app: FastAPI) -> None:
        await asyncio.to_thread(self._store.delete_expired, self._state.settings.file_retention)
        for batch in await asyncio.to_thread(self._store.list_unfinished):
            async with self._claim(batch) as current:
                if current is None:
                    continue
                await self._state.add_named_model(current.model)
                if is_over(current) or self._serves(current):
                    await self._run_batch(app, current)

    async def _end_waiting_batches(self, app: FastAPI) -> None:
        """End the cancelled and expired batches that no process runs, while others run."""
        for batch in await asyncio.to_thread(self._store.list_unfinished):
            if is_over(batch):
                async with self._claim(batch) as current:
                    if current is not None:
                        await self._run_batch(app, current)

    @contextlib.asynccontextmanager
    async def _claim(self, batch: StoredBatch) -> AsyncIterator[StoredBatch | None]:
        """Claim a batch and yield it as it is now; None if another task or process runs it or has ended it."""
        with self._store.claim(batch.id) as is_claimed:
            current = await asyncio.to_thread(self._store.get_batch, batch.id) if is_claimed else None
            yield None if current is None or current.is_final else current

    def _serves(self, batch: StoredBatch) -> bool:
        """Whether this server has the models of the one that accepted a batch, or the model that its lines name.

        A batch of a server that names no models runs on one that serves every model of its machine.
        A name that a server with one model accepts for it may mean another model on this server.
        """
        models = self._state.models
        served = set(batch.served or ())
        if served <= models.slots.keys() and (served or models.serves_installed):
            return True
        try:
            return batch.model is not None and models.get_slot(batch.model) is not None
        except (AfterglowError, APIError):
            return False

    async def _run_batch(self, app: FastAPI, batch: StoredBatch) -> None:
        logger.info("%s: %s", batch.id, "starting" if batch.in_progress_at is None else "continuing")
        stop: Literal["cancelled", "expired"] | None = None

        def is_stopped() -> bool:
            nonlocal stop
            if batch.status == "cancelling" or batch.id in self._cancelled_ids:
                stop = stop or "cancelled"
            elif time.time() >= batch.expires_at:
                stop = stop or "expired"
            return stop is not None

        settings, final = self._state.settings, "completed"
        execution = BatchExecution(
            app, self._state, self._store, batch, max_lines=settings.max_batch_lines, is_stopped=is_stopped
        )
        watch = asyncio.ensure_future(self._watch_status(batch.id))
        try:
            if is_stopped():
                await execution.validate()
                is_complete = False
            elif not await execution.prepare():
                final, is_complete = "failed", True
            else:
                is_complete = await execution.run()
        except (Closed, sqlite3.Error):
            raise  # it continues later
        except Exception as error:
            is_expected = isinstance(error, AfterglowError | APIError | OSError)
            logger.error("%s failed: %s", batch.id, error, exc_info=not is_expected)
            description = build_description("batch_failed", describe_error(error))
            await asyncio.to_thread(self._store.set_errors, batch.id, [description])
            final, is_complete = "failed", True
        finally:
            watch.cancel()
        if not is_complete and stop is not None:
            final = stop
        await asyncio.to_thread(self._finish, batch.id, final)
        self._cancelled_ids.discard(batch.id)

    async def _watch_status(self, id: str) -> None:
        """Learn whether another process cancels a batch."""
        while True:
            await asyncio.sleep(STATUS_POLL_SECONDS)
            with contextlib.suppress(OSError, sqlite3.Error):
                current = await asyncio.to_thread(self._store.get_batch, id)
                if current is None or current.status == "cancelling":
                    self._cancelled_ids.add(id)

    def _finish(self, id: str, final: str) -> None:
        """Store results for the lines that did not run, write the output files and end the batch."""
        store = self._store
        if final in MESSAGES:
            for line in store.list_lines(id, pending=True):
                store.add_result(id, build_error_result(line.number, line.custom_id, f"batch_{final}", MESSAGES[final]))
        store.set_status(id, "finalizing", unless=("cancelling",))
        status: BatchStatus = final  # type: ignore[assignment]
        batch = store.finish(id, status, int(self._state.settings.file_retention))
        counts = batch.counts or {}
        logger.info(
            "%s: %s; %d of %d lines completed, %d failed; %d of %d prompt tokens were cached",
            id,
            batch.status,
            *(counts.get(name, 0) for name in ("completed", "total", "failed", "cached_tokens", "input_tokens")),
        )
