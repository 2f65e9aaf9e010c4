"""Runs the batches of a server one after the other, in the background, and continues those that a restart left."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time

from fastapi import FastAPI

from afterglow.errors import AfterglowError, Closed
from afterglow.server.batches.execution import BatchExecution, build_description, build_error_result
from afterglow.server.batches.store import BatchStatus, BatchStore, StoredBatch
from afterglow.server.errors import APIError
from afterglow.server.logs import logger
from afterglow.server.state import ServerState

IDLE_SECONDS = 60.0  # interval of the search for batches that another process left, and for expired files
STATUS_POLL_SECONDS = 1.0  # how often the database is asked whether another process cancelled the batch
MESSAGES = {
    "failed": "the batch failed before this line ran",
    "expired": "the batch expired before this line ran",
    "cancelled": "the batch was cancelled before this line ran",
}


class BatchRunner:
    """Task of a server that runs batches. Several servers may share a store: each batch is run by one of them."""

    def __init__(self, state: ServerState, store: BatchStore) -> None:
        self._state = state
        self._store = store
        self._wake_event = asyncio.Event()
        self._cancelled_ids: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self, app: FastAPI) -> None:
        """Start the task in the running event loop."""
        self._task = asyncio.ensure_future(self._run(app))

    async def stop(self) -> None:
        """Stop after the last result that was stored. Running lines run again after a restart."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._store.close)

    def wake(self) -> None:
        """Look for new batches now."""
        self._wake_event.set()

    def cancel(self, id: str) -> None:
        """Stop a batch that runs here, whose status is `cancelling`."""
        self._cancelled_ids.add(id)
        self.wake()

    async def _run(self, app: FastAPI) -> None:
        while True:
            self._wake_event.clear()
            try:
                if self._store.exists:
                    await self._run_batches(app)
            except (Closed, asyncio.CancelledError):
                return  # the server stops
            except (OSError, sqlite3.Error) as error:
                logger.error("batches do not run: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake_event.wait(), IDLE_SECONDS)

    async def _run_batches(self, app: FastAPI) -> None:
        await asyncio.to_thread(self._store.delete_expired, self._state.settings.file_retention)
        for batch in await asyncio.to_thread(self._store.list_unfinished):
            with self._store.claim(batch.id) as is_claimed:
                if not is_claimed:
                    continue
                # Another process may have finished it meanwhile.
                current = await asyncio.to_thread(self._store.get_batch, batch.id)
                if current is None or current.is_final:
                    continue
                is_over = current.status == "cancelling" or time.time() >= current.expires_at
                await self._state.add_named_model(current.model)
                if is_over or self._serves(current):
                    await self._run_batch(app, current)

    def _serves(self, batch: StoredBatch) -> bool:
        """Whether this server has the models of the one that accepted a batch, or the model that its lines name.

        A name that a server with one model accepts for it may mean another model on this server.
        """
        slots = self._state.models.slots
        if batch.served and set(batch.served) <= slots.keys():
            return True
        try:
            return batch.model is not None and self._state.models.get_slot(batch.model) is not None
        except (AfterglowError, APIError):
            return False

    async def _run_batch(self, app: FastAPI, batch: StoredBatch) -> None:
        logger.info("%s: %s", batch.id, "starting" if batch.in_progress_at is None else "continuing")
        next_poll = 0.0
        status: BatchStatus = batch.status

        def is_stopped() -> bool:
            nonlocal next_poll, status
            if batch.id in self._cancelled_ids:
                status = "cancelling"
            elif time.time() >= batch.expires_at:
                status = "expired"
            elif time.monotonic() >= next_poll:
                next_poll = time.monotonic() + STATUS_POLL_SECONDS
                current = self._store.get_batch(batch.id)
                status = "cancelling" if current is None else current.status
            return status in ("cancelling", "expired")

        settings, final = self._state.settings, "completed"
        execution = BatchExecution(
            app, self._state, self._store, batch, max_lines=settings.max_batch_lines, is_stopped=is_stopped
        )
        try:
            if is_stopped():
                is_complete = False
            elif not await execution.prepare():
                final, is_complete = "failed", True
            else:
                is_complete = await execution.run()
        except (AfterglowError, APIError, OSError) as error:
            if isinstance(error, Closed):
                raise
            logger.error("%s failed: %s", batch.id, error)
            message = error.message if isinstance(error, APIError) else str(error)
            await asyncio.to_thread(self._store.set_errors, batch.id, [build_description("batch_failed", message)])
            final, is_complete = "failed", True
        if not is_complete:
            final = "expired" if status == "expired" else "cancelled"
        await asyncio.to_thread(self._finish, batch.id, final)
        self._cancelled_ids.discard(batch.id)

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
