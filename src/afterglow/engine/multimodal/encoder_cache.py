"""Pictures and sounds on their way into memory: encoded beside the engine, kept by what they are.

The engine's thread asks and never waits for one; another thread reads files, encodes, and writes files.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from afterglow.engine.multimodal.embedding_files import EmbeddingFiles
from afterglow.engine.types.entries import Entry, Media
from afterglow.engine.types.media import MediaEncoder, MediaPart
from afterglow.errors import AfterglowError, Closed, EngineError
from afterglow.llama.projector import MediaChunk, MediaEmbedding, MediaPlaceholder
from afterglow.media.types import MediaData

MAX_ENCODE_BATCH = 8  # contents that are encoded in one go


MediaEntry: TypeAlias = tuple[Entry, MediaPart | None]
"""An entry, and what it shows where it is no token."""


def build_media_entries(content: MediaData, measured: MediaPlaceholder, projector_key: bytes) -> list[MediaEntry]:
    """What stands in a prompt for a content: its pieces as media, and the tokens around them."""
    found: list[MediaEntry] = []
    pieces = 0
    for one in measured:
        if isinstance(one, MediaChunk):
            part = MediaPart(content, pieces)
            found.append((Media(part.compute_digest(projector_key), one.cells, one.positions, one.non_causal), part))
            pieces += 1
        else:
            found.append((one, None))
    return found


@dataclass(slots=True, eq=False)
class EncodeTask:
    """A content on its way. One of the two comes, once `done`."""

    embeddings: list[MediaEmbedding] | None = None
    error: AfterglowError | None = None
    was_encoded: bool = False  # it had to be: nobody had kept it
    request_ids: set[str] = field(default_factory=set)  # requests

    @property
    def is_done(self) -> bool:
        return self.embeddings is not None or self.error is not None


class EncoderCache:
    """Owns what was encoded, within a number of bytes, and the thread that encodes."""

    def __init__(self, projector: MediaEncoder | None, max_bytes: int, files: EmbeddingFiles | None = None) -> None:
        self.projector = projector
        self.encoded_count = 0  # contents so far
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._files = files
        self._cached: OrderedDict[bytes, list[MediaEmbedding]] = OrderedDict()  # what was used longest ago first
        self._tasks: dict[bytes, EncodeTask] = {}
        self._queue: OrderedDict[bytes, MediaPart] = OrderedDict()
        self._condition = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_encoding(self) -> bool:
        """Whether something is being encoded."""
        return bool(self._tasks)

    def request_encoding(self, part: MediaPart, request_id: str, salt: str = "") -> EncodeTask:
        """The content of this part, now or soon. Two of one salt who want the same wait for the same."""
        assert self.projector is not None
        source = part.compute_source_key(self.projector.key, salt)
        with self._condition:
            if source in self._cached:
                self._cached.move_to_end(source)
                return EncodeTask(self._cached[source])
            encoding = self._tasks.get(source)
            if encoding is None:
                encoding = self._tasks[source] = EncodeTask()
                self._queue[source] = part
                self._start_thread()
            encoding.request_ids.add(request_id)
            return encoding

    def wait(self, seconds: float) -> None:
        """Until something was encoded, or so long."""
        with self._condition:
            if self._tasks:
                self._condition.wait(seconds)

    def cancel_request(self, request_id: str) -> None:
        """The request has ended: what only it wanted, and was not begun, is not encoded."""
        with self._condition:
            for source in list(self._queue):
                wanted = self._tasks[source].request_ids
                wanted.discard(request_id)
                if not wanted:
                    del self._queue[source], self._tasks[source]

    def clear(self) -> None:
        """Keep nothing that was encoded, neither here nor in files."""
        with self._condition:
            self._cached.clear()
            self.nbytes = 0
        if self._files is not None:
            self._files.clear()

    def close(self) -> None:
        """Stop, after the encoding that runs."""
        with self._condition:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    # --- the thread: it ends when there is nothing to do. OpenMP counts the threads that it once computed with, and
    # where that makes more than processors, those that compute answers sleep whenever they wait for each other.

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_encoder, name="afterglow-pictures", daemon=True)
            self._thread.start()

    def _run_encoder(self) -> None:
        while taken := self._take_batch():
            for source in list(taken):
                if found := self._read_file(source):
                    self._complete(source, found, was_encoded=False)
                    del taken[source]
            self._encode(taken)

    def _take_batch(self) -> dict[bytes, MediaPart]:
        """What is to be encoded next; nothing: this thread ends, and the next wish starts another."""
        taken: dict[bytes, MediaPart] = {}
        with self._condition:
            while self._queue and not self._closed and len(taken) < MAX_ENCODE_BATCH:
                source, part = self._queue.popitem(last=False)
                taken[source] = part
            if not taken:
                self._thread = None
        return taken

    def _read_file(self, source_key: bytes) -> list[MediaEmbedding] | None:
        return None if self._files is None else self._files.read(source_key)

    def _encode(self, batch: dict[bytes, MediaPart]) -> None:
        """All together; where that fails, each alone, so that one takes no other with it."""
        assert self.projector is not None
        if not batch:
            return
        try:
            groups = self.projector.encode([part.content for part in batch.values()])
        except Exception as error:
            if len(batch) > 1:
                for source, part in batch.items():
                    self._encode({source: part})
            else:
                self._fail(next(iter(batch)), error)
            return
        for source, embeddings in zip(batch, groups, strict=True):
            self._complete(source, embeddings, was_encoded=True)
            if self._files is not None:
                with contextlib.suppress(OSError):  # a full or missing disk costs an encoding the next time
                    self._files.write(source, embeddings)

    def _complete(self, source_key: bytes, embeddings: list[MediaEmbedding], *, was_encoded: bool) -> None:
        with self._condition:
            encoding = self._tasks.pop(source_key)
            encoding.was_encoded = was_encoded
            encoding.embeddings = embeddings
            self.encoded_count += was_encoded
            self._insert(source_key, embeddings)
            self._condition.notify_all()

    def _fail(self, source_key: bytes, error: Exception) -> None:
        known = isinstance(error, AfterglowError) and not isinstance(error, Closed)
        with self._condition:
            self._tasks.pop(source_key).error = error if known else EngineError(f"the picture was not encoded: {error}")  # type: ignore[assignment]
            self._condition.notify_all()

    def _insert(self, source_key: bytes, embeddings: list[MediaEmbedding]) -> None:
        size = count_bytes(embeddings)
        if size > self._max_bytes:
            return
        while self._cached and self.nbytes + size > self._max_bytes:
            self.nbytes -= count_bytes(self._cached.popitem(last=False)[1])
        self._cached[source_key] = embeddings
        self.nbytes += size


def count_bytes(embeddings: Iterable[MediaEmbedding]) -> int:
    """The bytes of what was encoded."""
    return sum(embedding.nbytes for embedding in embeddings)
