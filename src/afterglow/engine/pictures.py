"""Pictures and sounds on their way into memory: encoded beside the engine, kept by what they are.

The engine's thread asks and never waits for one; another thread reads files, encodes, and writes files.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from afterglow.engine.entries import Entry, Media
from afterglow.engine.picture_files import PictureFiles
from afterglow.errors import AfterglowError, Closed, EngineError
from afterglow.llama.projector import Embedding, Measured, MediaKind, Piece
from afterglow.media.contents import Content

TOGETHER = 8  # contents that are encoded in one go


class Encodes(Protocol):
    """What makes rows of pictures: a projector, or a fake."""

    key: bytes  # of everything that shapes them beside the content
    kinds: frozenset[MediaKind]

    def encode(self, contents: Sequence[Content]) -> list[list[Embedding]]:
        """The pieces of each, as rows."""


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a content that stands in a prompt."""

    content: Content
    piece: int = 0

    def source(self, key: bytes, salt: str = "") -> bytes:
        """Names the content as a projector with this key sees it, and whose it is."""
        return hashlib.sha256(self.content.digest + key + salt.encode()).digest()

    def digest(self, key: bytes) -> bytes:
        """Names the piece: the identity of its entry."""
        return hashlib.sha256(self.source(key) + b" %d" % self.piece).digest()


Seen: TypeAlias = tuple[Entry, Part | None]
"""An entry, and what it shows where it is no token."""


def entries_of(content: Content, measured: Measured, key: bytes) -> list[Seen]:
    """What stands in a prompt for a content: its pieces as media, and the tokens around them."""
    found: list[Seen] = []
    pieces = 0
    for one in measured:
        if isinstance(one, Piece):
            part = Part(content, pieces)
            found.append((Media(part.digest(key), one.cells, one.positions, one.whole), part))
            pieces += 1
        else:
            found.append((one, None))
    return found


@dataclass(slots=True, eq=False)
class Encoding:
    """A content on its way. One of the two comes, once `done`."""

    embeddings: list[Embedding] | None = None
    error: AfterglowError | None = None
    encoded: bool = False  # it had to be: nobody had kept it
    wanted_by: set[str] = field(default_factory=set)  # requests

    @property
    def done(self) -> bool:
        return self.embeddings is not None or self.error is not None


class Pictures:
    """Owns what was encoded, within a number of bytes, and the thread that encodes."""

    def __init__(self, projector: Encodes | None, limit: int, files: PictureFiles | None = None) -> None:
        self.projector = projector
        self.encoded = 0  # contents so far
        self.nbytes = 0
        self._limit = limit
        self._files = files
        self._kept: OrderedDict[bytes, list[Embedding]] = OrderedDict()  # what was used longest ago first
        self._coming: dict[bytes, Encoding] = {}
        self._queue: OrderedDict[bytes, Part] = OrderedDict()
        self._news = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> bool:
        """Whether something is being encoded."""
        return bool(self._coming)

    def want(self, part: Part, request: str, salt: str = "") -> Encoding:
        """The content of this part, now or soon. Two of one salt who want the same wait for the same."""
        assert self.projector is not None
        source = part.source(self.projector.key, salt)
        with self._news:
            if source in self._kept:
                self._kept.move_to_end(source)
                return Encoding(self._kept[source])
            encoding = self._coming.get(source)
            if encoding is None:
                encoding = self._coming[source] = Encoding()
                self._queue[source] = part
                self._start()
            encoding.wanted_by.add(request)
            return encoding

    def wait(self, seconds: float) -> None:
        """Until something was encoded, or so long."""
        with self._news:
            if self._coming:
                self._news.wait(seconds)

    def forget(self, request: str) -> None:
        """The request has ended: what only it wanted, and was not begun, is not encoded."""
        with self._news:
            for source in list(self._queue):
                wanted = self._coming[source].wanted_by
                wanted.discard(request)
                if not wanted:
                    del self._queue[source], self._coming[source]

    def clear(self) -> None:
        """Keep nothing that was encoded, neither here nor in files."""
        with self._news:
            self._kept.clear()
            self.nbytes = 0
        if self._files is not None:
            self._files.clear()

    def close(self) -> None:
        """Stop, after the encoding that runs."""
        with self._news:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    # --- the thread: it ends when there is nothing to do. OpenMP counts the threads that it once computed with, and
    # where that makes more than processors, those that compute answers sleep whenever they wait for each other.

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="afterglow-pictures", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while taken := self._take():
            for source in list(taken):
                if found := self._read(source):
                    self._arrived(source, found, encoded=False)
                    del taken[source]
            self._encode(taken)

    def _take(self) -> dict[bytes, Part]:
        """What is to be encoded next; nothing: this thread ends, and the next wish starts another."""
        taken: dict[bytes, Part] = {}
        with self._news:
            while self._queue and not self._closed and len(taken) < TOGETHER:
                source, part = self._queue.popitem(last=False)
                taken[source] = part
            if not taken:
                self._thread = None
        return taken

    def _read(self, source: bytes) -> list[Embedding] | None:
        return None if self._files is None else self._files.read(source)

    def _encode(self, taken: dict[bytes, Part]) -> None:
        """All together; where that fails, each alone, so that one takes no other with it."""
        assert self.projector is not None
        if not taken:
            return
        try:
            groups = self.projector.encode([part.content for part in taken.values()])
        except Exception as error:
            if len(taken) > 1:
                for source, part in taken.items():
                    self._encode({source: part})
            else:
                self._failed(next(iter(taken)), error)
            return
        for source, embeddings in zip(taken, groups, strict=True):
            self._arrived(source, embeddings, encoded=True)
            if self._files is not None:
                with contextlib.suppress(OSError):  # a full or missing disk costs an encoding the next time
                    self._files.write(source, embeddings)

    def _arrived(self, source: bytes, embeddings: list[Embedding], *, encoded: bool) -> None:
        with self._news:
            encoding = self._coming.pop(source)
            encoding.encoded = encoded
            encoding.embeddings = embeddings
            self.encoded += encoded
            self._keep(source, embeddings)
            self._news.notify_all()

    def _failed(self, source: bytes, error: Exception) -> None:
        known = isinstance(error, AfterglowError) and not isinstance(error, Closed)
        with self._news:
            self._coming.pop(source).error = error if known else EngineError(f"the picture was not encoded: {error}")  # type: ignore[assignment]
            self._news.notify_all()

    def _keep(self, source: bytes, embeddings: list[Embedding]) -> None:
        size = weight(embeddings)
        if size > self._limit:
            return
        while self._kept and self.nbytes + size > self._limit:
            self.nbytes -= weight(self._kept.popitem(last=False)[1])
        self._kept[source] = embeddings
        self.nbytes += size


def weight(embeddings: Iterable[Embedding]) -> int:
    """The bytes of what was encoded."""
    return sum(embedding.nbytes for embedding in embeddings)
