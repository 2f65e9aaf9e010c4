"""llama.cpp's log as Python's: logger `afterglow.llama.cpp`, silent until somebody attaches a handler."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("afterglow.llama.cpp")
logging.getLogger("afterglow").addHandler(logging.NullHandler())

CONTINUATION_LEVEL = 5  # this piece belongs to the line before it
LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


class LogBridge:
    """Receives llama.cpp's log pieces, on any thread, and hands whole lines to `logging`.

    The last error line is kept: where a native call only says "no", it is the reason to show a person.
    """

    def __init__(self) -> None:
        self.last_error = ""
        self._level = logging.INFO
        self._pending = ""

    def receive(self, level: int, text: bytes) -> None:
        if level != CONTINUATION_LEVEL:
            self._level = LEVELS.get(level, logging.INFO)
        self._pending += text.decode("utf-8", "replace")
        *lines, self._pending = self._pending.split("\n")
        for line in lines:
            if self._level >= logging.ERROR:
                self.last_error = line
            logger.log(self._level, "%s", line)

    def take_error(self, default: str) -> str:
        """The newest error line, once; `otherwise` where nothing was logged since the last call."""
        line, self.last_error = self.last_error, ""
        return line or default


def attach_log(bridge: LogBridge, ffi: Any, symbols: Any) -> object:
    """Send the library's log through `bridge`. What is returned must live as long as the library."""

    @ffi.callback("void(enum ggml_log_level, const char *, void *)")  # type: ignore[untyped-decorator]
    def receive(level: int, text: Any, _: Any) -> None:
        bridge.receive(level, ffi.string(text))

    symbols.llama_log_set(receive, ffi.NULL)
    symbols.mtmd_log_set(receive, ffi.NULL)
    return receive
