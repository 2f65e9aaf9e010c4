"""Forwards llama.cpp's log to Python's logger `afterglow.llama.cpp`, which is silent until a handler is attached."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("afterglow.llama.cpp")
logging.getLogger("afterglow").addHandler(logging.NullHandler())

CONTINUATION_LEVEL = 5  # the text continues the previous line
LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


class LogBridge:
    """Collects llama.cpp's log fragments, from any thread, and passes whole lines to `logging`.

    Stores the last error line: if a native call returns only a failure code, that line is the reason to report.
    """

    def __init__(self) -> None:
        self.last_error = ""
        self._level = logging.INFO
        self._pending = ""

    def is_read(self, level: int) -> bool:
        """Set the level of the next fragment; return whether a handler, or `last_error`, reads it.

        A load logs thousands of fragments that nothing reads.
        """
        if level != CONTINUATION_LEVEL:
            self._level = LEVELS.get(level, logging.INFO)
        return self._level >= logging.ERROR or logger.isEnabledFor(self._level)

    def receive(self, level: int, text: bytes) -> None:
        """Add a fragment."""
        if not self.is_read(level):
            return
        self._pending += text.decode("utf-8", "replace")
        *lines, self._pending = self._pending.split("\n")
        for line in lines:
            if self._level >= logging.ERROR:
                self.last_error = line
            logger.log(self._level, "%s", line)

    def take_error(self, default: str) -> str:
        """Return and forget the last error line; `default` if no error was logged since the previous call."""
        line, self.last_error = self.last_error, ""
        return line or default


def attach_log(bridge: LogBridge, ffi: Any, symbols: Any) -> object:
    """Send the library's log to `bridge`. The returned callback must live as long as the library."""

    @ffi.callback("void(enum ggml_log_level, const char *, void *)")  # type: ignore[untyped-decorator]
    def receive(level: int, text: Any, _: Any) -> None:
        if bridge.is_read(level):
            bridge.receive(level, ffi.string(text))

    symbols.llama_log_set(receive, ffi.NULL)
    symbols.mtmd_log_set(receive, ffi.NULL)
    return receive
