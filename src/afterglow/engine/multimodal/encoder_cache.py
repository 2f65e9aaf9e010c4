"""Encoder cache: encodes images and audio on a thread of its own and caches the embeddings by content.

The engine thread requests encodings and never waits for one; the encoder thread reads files, encodes and writes files.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from afterglow.engine.kvcache.budget import ByteBudget
from afterglow.engine.kvcache.eviction import choose_victims
from afterglow.engine.multimodal.embedding_files import EmbeddingFiles
from afterglow.engine.types.entries import Entry, Media
from afterglow.engine.types.media import MediaContent, MediaEncoder, MediaPart
from afterglow.errors import AfterglowError, Closed, EngineError
from afterglow.llama.projector import MediaChunk, MediaEmbedding, MediaPlaceholder

MAX_BATCH_CONTENTS = 8  # encoded in one projector call
MAX_BATCH_BYTES = 64 * 1024 * 1024  # no content is added to a batch that decodes to more

MediaEntry: TypeAlias = tuple[Entry, MediaPart | None]
"""An entry, and its content if it is a media entry."""


def build_media_entries(content: MediaContent, measured: MediaPlaceholder, projector_key: bytes) -> list[MediaEntry]:
    """Return the prompt entries of a content: its pieces as media entries, and the tokens around them."""
    entries: list[MediaEntry] = []
    pieces = 0
    for chunk in measured:
        if isinstance(chunk, MediaChunk):
            part = MediaPart(content, pieces)
            digest = part.compute_digest(projector_key)
            entries.append((Media(digest, chunk.cells, chunk.positions, chunk.non_causal), part))
            pieces += 1
        else:
            entries.append((chunk, None))
    return entries


@dataclass(slots=True, eq=False)
class EncodeTask:
    """A content that is being encoded. When it is done, it has either embeddings or an error."""

    embeddings: list[MediaEmbedding] | None = None
    error: AfterglowError | None = None
    was_encoded: bool = False  # False if it came from the cache or a file
    request_ids: set[str] = field(default_factory=set)  # requests that wait for it


class EncoderCache:
    """Owns the cached embeddings, at most `max_bytes`, and the encoder thread."""

    def __init__(self, projector: MediaEncoder | None, max_bytes: int, files: EmbeddingFiles | None = None) -> None:
        self.projector = projector
        self.encoded_count = 0
        self.budget = ByteBudget(max_bytes)  # guarded by the condition
        self._files = files
        self._cached: OrderedDict[bytes, list[MediaEmbedding]] = OrderedDict()  # least recently used first
        self._tasks: dict[bytes, EncodeTask] = {}
        self._queue: OrderedDict[bytes, MediaPart] = OrderedDict()
        self._condition = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def request_encoding(self, part: MediaPart, request_id: str, salt: str = "") -> EncodeTask:
        """Return the task for the content of a part. Requests with the same salt and content share one task."""
        assert self.projector is not None
        source_key = part.compute_source_key(self.projector.key, salt)
        with self._condition:
            if source_key in self._cached:
                self._cached.move_to_end(source_key)
                return EncodeTask(self._cached[source_key])
            task = self._tasks.get(source_key)
            if task is None:
                task = self._tasks[source_key] = EncodeTask()
                self._queue[source_key] = part
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run_encoder, name="afterglow-encoder", daemon=True)
                    self._thread.start()
            task.request_ids.add(request_id)
            return task

    def wait(self, seconds: float) -> None:
        """Wait until a task is done, at most `seconds`."""
        with self._condition:
            if self._tasks:
                self._condition.wait(seconds)

    def cancel_request(self, request_id: str) -> None:
        """Remove a request that has ended, and the queued tasks that only it waited for."""
        with self._condition:
            for source_key in list(self._queue):
                request_ids = self._tasks[source_key].request_ids
                request_ids.discard(request_id)
                if not request_ids:
                    del self._queue[source_key], self._tasks[source_key]

    def clear(self) -> None:
        """Remove all embeddings from RAM and from disk."""
        with self._condition:
            self._cached.clear()
            self.budget.remove("embeddings", self.budget.used_bytes)
        if self._files is not None:
            self._files.clear()

    def close(self) -> None:
        """Stop after the encoding that is running."""
        with self._condition:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    # --- the encoder thread. It exits when the queue is empty: OpenMP keeps counting threads that once computed, and if
    # there are more of them than processors, the threads that decode sleep at every barrier.

    def _run_encoder(self) -> None:
        while batch := self._take_batch():
            for source_key in list(batch):
                if self._files is not None and (embeddings := self._files.read(source_key)):
                    self._complete(source_key, embeddings, was_encoded=False)
                    del batch[source_key]
            self._encode(batch)

    def _take_batch(self) -> dict[bytes, MediaPart]:
        """Take the next contents from the queue. If it is empty, this thread exits; the next request starts another."""
        batch: dict[bytes, MediaPart] = {}
        with self._condition:
            nbytes = 0
            while self._queue and not self._closed and len(batch) < MAX_BATCH_CONTENTS and nbytes < MAX_BATCH_BYTES:
                source_key, part = self._queue.popitem(last=False)
                batch[source_key] = part
                nbytes += part.content.nbytes
            if not batch:
                self._thread = None
        return batch

    def _encode(self, batch: dict[bytes, MediaPart]) -> None:
        """Encode a batch in one call. If that fails, encode each content alone, so that a failure affects only one."""
        assert self.projector is not None
        if not batch:
            return
        try:
            results = self.projector.encode([part.decode_content() for part in batch.values()])
        except Exception as error:
            if len(batch) > 1:
                for source_key, part in batch.items():
                    self._encode({source_key: part})
            else:
                self._fail(next(iter(batch)), error)
            return
        for source_key, embeddings in zip(batch, results, strict=True):
            self._complete(source_key, embeddings, was_encoded=True)
            if self._files is not None:
                with contextlib.suppress(OSError):  # a full or missing disk: the content is encoded again next time
                    self._files.write(source_key, embeddings)

    def _complete(self, source_key: bytes, embeddings: list[MediaEmbedding], *, was_encoded: bool) -> None:
        with self._condition:
            task = self._tasks.pop(source_key)
            task.was_encoded = was_encoded
            task.embeddings = embeddings
            self.encoded_count += was_encoded
            self._insert(source_key, embeddings)
            self._condition.notify_all()

    def _fail(self, source_key: bytes, error: Exception) -> None:
        if not isinstance(error, AfterglowError) or isinstance(error, Closed):
            error = EngineError(f"the media was not encoded: {error}")
        with self._condition:
            self._tasks.pop(source_key).error = error
            self._condition.notify_all()

    def _insert(self, source_key: bytes, embeddings: list[MediaEmbedding]) -> None:
        """Cache embeddings and evict the least recently used ones beyond the budget."""
        size = count_bytes(embeddings)
        if size > self.budget.limit:
            return
        sizes = ((key, count_bytes(cached)) for key, cached in self._cached.items())
        for victim in choose_victims(sizes, size - self.budget.free_bytes):
            self.budget.remove("embeddings", count_bytes(self._cached.pop(victim)))
        self._cached[source_key] = embeddings
        self.budget.add("embeddings", size)


def count_bytes(embeddings: Iterable[MediaEmbedding]) -> int:
    """Return the total size of embeddings."""
    return sum(embedding.nbytes for embedding in embeddings)
