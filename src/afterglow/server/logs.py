"""Log of the server: one line per request, and the handlers that write it to standard error and to a file.

Lines contain no text of prompts or responses.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from afterglow.engine.types.request import Usage
from afterglow.errors import InvalidArgument

LINE_FORMAT = "%(asctime)s %(levelname)s %(message)s"
MAX_QUEUED_LINES = 10_000
MAX_PATH_CHARACTERS = 200
QUIET_PATHS = frozenset({"/health", "/v1/health", "/metrics"})  # polled by monitoring; logged at level debug

logger = logging.getLogger("afterglow.server")


@dataclass(slots=True)
class RequestRecord:
    """What the log says about one request. Routes fill it in."""

    method: str
    path: str
    id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex}")  # sent in the header `request-id`
    started: float = field(default_factory=time.monotonic)
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    finish_reason: str | None = None  # or the code of the error
    ignored_fields: list[str] = field(default_factory=list)  # hints of the request that have no effect
    unenforced_tools: list[str] = field(default_factory=list)  # tools whose schema the grammar does not enforce
    refuses_hints: bool = False  # whether the server is strict

    def accept_hint(self, name: str) -> bool:
        """Record a field that has no effect; return False if the server is strict."""
        if not self.refuses_hints:
            self.add_ignored(name)
        return not self.refuses_hints

    def add_ignored(self, name: str) -> None:
        """Record a field that has no effect. The first request with it is logged."""
        if name not in self.ignored_fields:
            self.ignored_fields.append(name)
        if self.path and (self.path, name) not in _logged_hints:
            _logged_hints.add((self.path, name))
            logger.info("%s: `%s` has no effect here", self.path, name)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response that say what differs from the request.

        >>> RequestRecord("POST", "/v1/completions", ignored_fields=["keep_alive", "store"]).headers
        {'x-afterglow-ignored': 'keep_alive, store'}
        """
        lists = {"x-afterglow-ignored": self.ignored_fields, "x-afterglow-unenforced": self.unenforced_tools}
        return {header: ", ".join(names) for header, names in lists.items() if names}

    def record_usage(self, usages: Sequence[Usage], finish_reasons: Sequence[str], choices_per_prompt: int) -> None:
        """Record finished choices. The choices of one prompt share its prefill, so that it counts once."""
        prompts = usages[::choices_per_prompt]
        self.prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
        self.cached_tokens = sum(usage.cached_tokens for usage in prompts)
        self.generated_tokens = sum(usage.generated_tokens for usage in usages)
        self.finish_reason = ",".join(dict.fromkeys(finish_reasons))

    def log(self, status: int) -> None:
        """Log the request after its response has ended."""
        if self.model is not None and self.generated_tokens is not None and self.finish_reason is None:
            self.finish_reason = "cancelled"
        level = logging.INFO if self.path not in QUIET_PATHS else logging.DEBUG
        logger.log(logging.WARNING if status >= 500 else level, "%s", self.format_line(status))

    def format_line(self, status: int) -> str:
        """Format the line: method, path, status, and what is known of model, tokens, seconds and finish reason.

        >>> RequestRecord("GET", "/v1/models").format_line(200).split()[:3]
        ['GET', '/v1/models', '200']
        """
        fields = {
            "model": self.model,
            "prompt": self.prompt_tokens,
            "cached": self.cached_tokens,
            "generated": self.generated_tokens,
            "seconds": f"{time.monotonic() - self.started:.3f}",
            "finish": self.finish_reason,
        }
        path = self.path[:MAX_PATH_CHARACTERS].encode("unicode_escape").decode()  # a path may contain newlines
        known = [f"{name}={value}" for name, value in fields.items() if value is not None]
        return " ".join([self.method, path, str(status), *known])


_logged_hints: set[tuple[str, str]] = set()  # bounded by the declared fields
_current_record: ContextVar[RequestRecord] = ContextVar("request_record")


def start_record(method: str, path: str, *, refuses_hints: bool = False) -> RequestRecord:
    """Start the record of a request, for this task and the tasks that it starts."""
    record = RequestRecord(method, path, refuses_hints=refuses_hints)
    _current_record.set(record)
    return record


def get_record() -> RequestRecord:
    """Return the record of the current request; outside a request, one that is never logged."""
    return _current_record.get(RequestRecord("", ""))


class DroppingHandler(logging.handlers.QueueHandler):
    """Passes lines to the thread that writes them. Drops lines if a terminal or a pipe accepts none for too long."""

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a line without blocking."""
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


@contextlib.contextmanager
def write_logs(level: str, path: Path | None = None) -> Iterator[None]:
    """Write the log of afterglow to standard error, and to a file. llama.cpp logs errors only, except at `debug`."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if path is not None:
        try:
            handlers.append(logging.handlers.WatchedFileHandler(path.expanduser(), encoding="utf-8"))  # for logrotate
        except OSError as error:
            raise InvalidArgument("log_file", f"{path} cannot be written: {error.strerror}") from None
    for handler in handlers:
        handler.setFormatter(logging.Formatter(LINE_FORMAT))
    lines: queue.Queue[logging.LogRecord] = queue.Queue(MAX_QUEUED_LINES)
    root, native, front = (
        logging.getLogger("afterglow"),
        logging.getLogger("afterglow.llama.cpp"),
        DroppingHandler(lines),
    )
    previous = root.level, root.propagate, native.level
    root.addHandler(front)
    root.setLevel(level.upper())
    root.propagate = False
    native.setLevel(logging.NOTSET if level == "debug" else logging.ERROR)
    listener = logging.handlers.QueueListener(lines, *handlers)
    listener.start()
    try:
        yield
    finally:
        listener.stop()
        root.removeHandler(front)
        root.setLevel(previous[0])
        root.propagate = previous[1]
        native.setLevel(previous[2])
        for handler in handlers:
            handler.close()
