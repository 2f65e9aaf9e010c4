"""Every error afterglow raises on purpose. Broken invariants are `assert`s and are not listed here.

    AfterglowError
    ├── LoadError      a model or the native library cannot be used
    │   ├── ModelNotFound · InvalidModel · DownloadFailed · LoadVetoed
    │   └── OutOfMemory · LibraryError
    ├── RequestError   the caller can fix it; HTTP 4xx
    │   ├── InvalidArgument · UnsupportedOption · UnsupportedOperation · WrongState
    │   ├── PromptTooLong · InvalidGrammar · InvalidTemplate · InvalidState
    │   └── UnsupportedMedia · InvalidMedia · MediaRefused
    ├── EngineError    we could not; HTTP 5xx
    │   └── MemoryFull · DecodeFailed · EngineCrashed · Closed
    └── Cancelled      the caller asked for it

Each error keeps its numbers as attributes, and its `args` are its constructor's arguments, so it survives
pickling on its way between processes.
"""

from __future__ import annotations


class AfterglowError(Exception):
    """The root: `except AfterglowError` catches everything this library raises on purpose.

    >>> try:
    ...     afterglow.load("no such model")
    ... except AfterglowError as error:
    ...     print(type(error).__name__)
    ModelNotFound
    """


class LoadError(AfterglowError):
    """A model or the native library cannot be used."""


class RequestError(AfterglowError):
    """The caller can fix it."""


class EngineError(AfterglowError):
    """The engine could not do it, though the request was in order."""


class Cancelled(AfterglowError):
    """The caller asked for the work to stop."""


class ModelNotFound(LoadError):
    """No such name, file or repository."""

    def __init__(self, name: str, advice: str) -> None:
        super().__init__(name, advice)
        self.name, self.advice = name, advice

    def __str__(self) -> str:
        return f"no model called {self.name!r}: {self.advice}"


class InvalidModel(LoadError):
    """The file is not a model that can be loaded; `reason` says why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path} cannot be loaded: {self.reason}"


class DownloadFailed(LoadError):
    """A model could not be fetched; nothing was left behind."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} could not be fetched: {self.reason}"


class LoadVetoed(LoadError):
    """A load hook said no."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"a hook refused to load {self.path}: {self.reason}"


class OutOfMemory(LoadError):
    """It would not fit. Both numbers are bytes."""

    def __init__(self, needed_bytes: int, available_bytes: int, advice: str) -> None:
        super().__init__(needed_bytes, available_bytes, advice)
        self.needed_bytes, self.available_bytes, self.advice = needed_bytes, available_bytes, advice

    def __str__(self) -> str:
        mebibyte = 1024 * 1024
        return f"needs {self.needed_bytes // mebibyte:,} MiB, {self.available_bytes // mebibyte:,} MiB are free: {self.advice}"


class LibraryError(LoadError):
    """The native library is missing or is not the build this release was written for."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found

    def __str__(self) -> str:
        return f"llama.cpp library: expected {self.expected}; found {self.found}"


class InvalidArgument(RequestError):
    """An argument is out of range or of the wrong kind; nothing was attempted."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"`{self.name}` {self.reason}"


class UnsupportedOption(RequestError):
    """An option that this model or build cannot honour."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"`{self.name}` is not supported: {self.reason}"


class UnsupportedMedia(RequestError):
    """A picture or a sound that this model cannot take."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"`{self.name}` cannot be used: {self.reason}"


class InvalidMedia(RequestError):
    """A picture or a sound that cannot be read, or is larger than it may be; `source` is where it came from."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(source, reason)
        self.source, self.reason = source, reason

    def __str__(self) -> str:
        return f"{self.source} cannot be read: {self.reason}"


class MediaRefused(RequestError):
    """An address or a file that nobody allowed to be opened; nothing of it was touched."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(source, reason)
        self.source, self.reason = source, reason

    def __str__(self) -> str:
        return f"{self.source} may not be opened: {self.reason}"


class UnsupportedOperation(RequestError):
    """An operation that this kind of memory or model does not have."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} is not possible here: {self.reason}"


class WrongState(RequestError):
    """The model is not in the state the call needs."""

    def __init__(self, call: str, state: str, needed: str) -> None:
        super().__init__(call, state, needed)
        self.call, self.state, self.needed = call, state, needed

    def __str__(self) -> str:
        return f"{self.call} needs the model to be {self.needed}; it is {self.state}"


class PromptTooLong(RequestError):
    """The prompt can never fit. Both numbers are KV cells."""

    def __init__(self, cells: int, limit: int) -> None:
        super().__init__(cells, limit)
        self.cells, self.limit = cells, limit

    def __str__(self) -> str:
        return f"the prompt needs {self.cells:,} cells, a sequence has {self.limit:,}: shorten it or load with more"


class InvalidGrammar(RequestError):
    """The grammar cannot be parsed; `position` is where parsing stopped, or None where that is not known."""

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason, position)
        self.reason, self.position = reason, position

    def __str__(self) -> str:
        where = "" if self.position is None else f" at position {self.position}"
        return f"invalid grammar{where}: {self.reason}"


class InvalidTemplate(RequestError):
    """The chat template cannot render this conversation; `line` is the template's line, where that is known."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason, line)
        self.reason, self.line = reason, line

    def __str__(self) -> str:
        where = "" if self.line is None else f" (line {self.line})"
        return f"the chat template refuses this conversation{where}: {self.reason}"


class InvalidState(RequestError):
    """A saved state is truncated, damaged, or of another model, build or context; nothing was loaded."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the saved state cannot be used: {self.reason}"


class KVCacheFull(EngineError):
    """No cells were free for the decode; memory is unchanged."""

    def __init__(self, rows: int, cells: int) -> None:
        super().__init__(rows, cells)
        self.rows, self.cells = rows, cells

    def __str__(self) -> str:
        return f"no room for {self.rows} rows in {self.cells:,} cells: remove sequences or load with more cells"


class DecodeFailed(EngineError):
    """llama.cpp returned an error; `code` is its return value."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason

    def __str__(self) -> str:
        return f"decode failed with code {self.code}: {self.reason}"


class EngineCrashed(EngineError):
    """The engine's process died; `reason` is its exit."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the engine died: {self.reason}"


class Closed(EngineError):
    """A handle was used after it, or the thing it belongs to, was closed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"this {self.name} is closed"
