"""All errors that afterglow raises on purpose. Broken invariants are `assert`s and are not listed here.

    AfterglowError
    ├── LoadError      a model or the native library cannot be used
    │   ├── ModelNotFound · InvalidModel · DownloadFailed · LoadVetoed
    │   └── OutOfMemory · LibraryError · ToolServerFailed
    ├── RequestError   the caller can fix it; HTTP 4xx
    │   ├── InvalidArgument · UnsupportedOption · UnsupportedOperation · WrongState · WrongProcess
    │   ├── PromptTooLong · InvalidGrammar · InvalidTemplate · InvalidState
    │   └── UnsupportedMedia · InvalidMedia · MediaRefused
    ├── EngineError    the engine failed on a valid request; HTTP 5xx
    │   └── KVCacheFull · DecodeFailed · EngineCrashed · Closed
    └── Cancelled      the caller cancelled the request

Each error has its values as attributes. Its `args` are the arguments of its constructor, so it can be pickled and sent
between processes.
"""

from __future__ import annotations


class AfterglowError(Exception):
    """Base class of all errors of this library. The subclasses are in `afterglow.errors`.

    >>> try:
    ...     afterglow.load("no such model")
    ... except AfterglowError as error:
    ...     print(type(error).__name__)
    ModelNotFound
    """


class LoadError(AfterglowError):
    """The model or the native library cannot be used."""


class RequestError(AfterglowError):
    """The request is invalid; the caller can fix it."""


class EngineError(AfterglowError):
    """The engine failed, although the request is valid."""


class Cancelled(AfterglowError):
    """The caller cancelled the request."""


class ModelNotFound(LoadError):
    """There is no model of this name, file or repository; `advice` says how to get it."""

    def __init__(self, name: str, advice: str) -> None:
        super().__init__(name, advice)
        self.name, self.advice = name, advice

    def __str__(self) -> str:
        return f"no model called {self.name!r}: {self.advice}"


class InvalidModel(LoadError):
    """The file is not a model that can be loaded."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path} cannot be loaded: {self.reason}"


class DownloadFailed(LoadError):
    """The model could not be downloaded. No incomplete file has the name of a model; a later pull may continue."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} could not be fetched: {self.reason}"


class LoadVetoed(LoadError):
    """A load hook rejected the load."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"a hook rejected the load of {self.path}: {self.reason}"


class OutOfMemory(LoadError):
    """The model does not fit into memory."""

    def __init__(self, needed_bytes: int, available_bytes: int, advice: str) -> None:
        super().__init__(needed_bytes, available_bytes, advice)
        self.needed_bytes, self.available_bytes, self.advice = needed_bytes, available_bytes, advice

    def __str__(self) -> str:
        needed, available = self.needed_bytes // 1024**2, self.available_bytes // 1024**2
        return f"needs {needed:,} MiB, {available:,} MiB are free: {self.advice}"


class LibraryError(LoadError):
    """The native library is missing, or its build is not the one that this release requires."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found

    def __str__(self) -> str:
        return f"llama.cpp library: expected {self.expected}; found {self.found}"


class ToolServerFailed(LoadError):
    """An MCP server cannot be started, ended, or broke the protocol."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"the MCP server {self.name} failed: {self.reason}"


class InvalidArgument(RequestError):
    """An argument is out of range or has the wrong type. Nothing was changed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"`{self.name}` {self.reason}"


class UnsupportedOption(RequestError):
    """The model or build does not support this option."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"`{self.name}` is not supported: {self.reason}"


class UnsupportedMedia(RequestError):
    """The model does not accept this kind of media."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"`{self.name}` cannot be used: {self.reason}"


class InvalidMedia(RequestError):
    """An image or audio file cannot be decoded or is too large; `source` is its path or URL."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(source, reason)
        self.source, self.reason = source, reason

    def __str__(self) -> str:
        return f"{self.source} cannot be read: {self.reason}"


class MediaRefused(RequestError):
    """The media policy does not allow this URL or file. It was not opened."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(source, reason)
        self.source, self.reason = source, reason

    def __str__(self) -> str:
        return f"{self.source} may not be opened: {self.reason}"


class UnsupportedOperation(RequestError):
    """The model or its kind of memory does not support this operation."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} is not possible here: {self.reason}"


class WrongState(RequestError):
    """The call needs another load state of the model."""

    def __init__(self, call: str, state: str, needed: str) -> None:
        super().__init__(call, state, needed)
        self.call, self.state, self.needed = call, state, needed

    def __str__(self) -> str:
        return f"{self.call} needs the model to be {self.needed}; it is {self.state}"


class WrongProcess(RequestError):
    """An object was used in a fork of the process that created it: its threads do not exist there."""

    def __init__(self, name: str, owner: int, current: int) -> None:
        super().__init__(name, owner, current)
        self.name, self.owner, self.current = name, owner, current

    def __str__(self) -> str:
        return (
            f"this {self.name} belongs to process {self.owner} and cannot be used in process {self.current} after a "
            "fork: load the model in the process that uses it, e.g. with multiprocessing's start method `spawn`"
        )


class PromptTooLong(RequestError):
    """The prompt does not fit into a sequence. Both numbers are KV cells."""

    def __init__(self, cells: int, limit: int) -> None:
        super().__init__(cells, limit)
        self.cells, self.limit = cells, limit

    def __str__(self) -> str:
        return f"the prompt needs {self.cells:,} cells, a sequence has {self.limit:,}: shorten it or load with more"


class InvalidGrammar(RequestError):
    """The grammar cannot be parsed; `position` is the offset of the error, or None if unknown."""

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason, position)
        self.reason, self.position = reason, position

    def __str__(self) -> str:
        location = "" if self.position is None else f" at position {self.position}"
        return f"invalid grammar{location}: {self.reason}"


class InvalidTemplate(RequestError):
    """The chat template cannot render this conversation; `line` is the line in the template, or None if unknown."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason, line)
        self.reason, self.line = reason, line

    def __str__(self) -> str:
        location = "" if self.line is None else f" (line {self.line})"
        return f"the chat template cannot render this conversation{location}: {self.reason}"


class InvalidState(RequestError):
    """A saved state is truncated, damaged, or of another model, build or context. Nothing was loaded."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the saved state cannot be used: {self.reason}"


class KVCacheFull(EngineError):
    """No free cells for the decode. The KV cache is unchanged."""

    def __init__(self, rows: int, cells: int) -> None:
        super().__init__(rows, cells)
        self.rows, self.cells = rows, cells

    def __str__(self) -> str:
        return f"no free cells for {self.rows} rows in {self.cells:,} cells: remove sequences or load with more cells"


class DecodeFailed(EngineError):
    """llama.cpp returned an error; `code` is its return value."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason

    def __str__(self) -> str:
        return f"decode failed with code {self.code}: {self.reason}"


class EngineCrashed(EngineError):
    """The engine raised an unexpected error, or its process died."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the engine crashed: {self.reason}"


class Closed(EngineError):
    """An object was used after it, or its owner, was closed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"this {self.name} is closed"
