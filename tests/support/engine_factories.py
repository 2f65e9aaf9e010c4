"""Engine factories for child processes, working and faulty, and functions to call on their engines."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from afterglow.engine.engine import Engine
from afterglow.engine.types.backend import DecodeSpan
from afterglow.errors import EngineError
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend, FakeSampler


class SlowBackend(FakeBackend):
    """Each decode takes `pause` seconds and can be interrupted."""

    pause = 0.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._wake_event = threading.Event()

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        self._wake_event.wait(self.pause)
        super().decode(spans)

    def interrupt(self) -> None:
        super().interrupt()
        self._wake_event.set()

    def clear_interrupt(self) -> None:
        super().clear_interrupt()
        self._wake_event.clear()


class ManyThreadsBackend(SlowBackend):
    """Its decodes keep all cores busy."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.capabilities = replace(self.capabilities, decode_threads=100_000)


class CrashingBackend(SlowBackend):
    """Raises an unexpected error in the sixth decode."""

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        if len(self.decode_history) == 5:
            raise RuntimeError("the bug")
        super().decode(spans)


class CountingBackend(FakeBackend):
    """Only counts the cells of each sequence, so that long prompts take no time."""

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        self._logit_seeds = [[1] * len(span.entries) for span in spans]
        for span in spans:
            self._kv_caches[span.sequence].position += len(span.entries)


@dataclass(frozen=True)
class FakeEngineFactory:
    """Builds an engine on a fake backend whose decodes take `pause` seconds."""

    backend: Callable[..., FakeBackend] = SlowBackend
    pause: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Engine:
        backend = self.backend(**self.options)
        if isinstance(backend, SlowBackend):
            backend.pause = self.pause
        return Engine(backend)


@dataclass(frozen=True)
class SlowOnce:
    """Builds an engine whose decodes hang, and after that engines that work. A file tells which is built."""

    file: Path

    def __call__(self) -> Engine:
        pause = 0.0 if self.file.exists() else 600.0
        self.file.touch()
        return FakeEngineFactory(pause=pause)()


class ExitingBackend(FakeBackend):
    """Ends its process in the first decode."""

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        os._exit(7)


class PoisonBackend(SlowBackend):
    """Ends its process at the end of a decode that contains `POISON`."""

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        super().decode(spans)
        if any(POISON in list(span.entries) for span in spans):
            os._exit(7)


POISON = 63


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


UNREADABLE = {"sampling": Unreadable()}
LATER: Future[int] = Future()


def compute_later(engine: Engine) -> Future[int]:
    """Return a future that `complete_later` completes."""
    return LATER


def complete_later(engine: Engine) -> None:
    LATER.set_result(42)


@dataclass(frozen=True)
class RestartFactory:
    """Counts its calls in a file. From the second call on, calls `on_restart` before it builds the engine."""

    file: Path
    on_restart: Callable[[], object]
    factory: Callable[[], Engine] = FakeEngineFactory()

    def __call__(self) -> Engine:
        starts = len(self.file.read_bytes()) if self.file.exists() else 0
        self.file.write_bytes(b"." * (starts + 1))
        if starts:
            self.on_restart()
        return self.factory()


@dataclass(frozen=True)
class FactoryAfter:
    """Calls `action` before it builds the engine."""

    action: Callable[[], object]
    factory: Callable[[], Engine] = FakeEngineFactory()

    def __call__(self) -> Engine:
        self.action()
        return self.factory()


@dataclass(frozen=True)
class Sleep:
    seconds: float = 600

    def __call__(self, engine: Engine | None = None) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Exit:
    code: int

    def __call__(self) -> None:
        os._exit(self.code)


@dataclass(frozen=True)
class Raise:
    error: Exception

    def __call__(self, engine: Engine | None = None) -> None:
        raise self.error


@dataclass(frozen=True)
class StartGrandchild:
    """Starts a process that would outlive this one, and writes its pid to a file."""

    file: Path

    def __call__(self) -> None:
        self.file.write_text(str(subprocess.Popen(["sleep", "600"]).pid))


# --- functions to call on an engine


def is_busy(engine: Engine) -> bool:
    return engine.is_busy


def get_decode_count(engine: Engine) -> int:
    return engine.counters.decodes


def return_lock(engine: Engine) -> threading.Lock:
    """Return a value that cannot be pickled."""
    return threading.Lock()


def stop_within_message(engine: Engine) -> None:
    """Send the start of a long message, then stop the process."""
    os.write(int(sys.argv[1]), struct.pack("!i", 1000) + b"the start")
    os.kill(os.getpid(), signal.SIGSTOP)


class UnpicklableError(EngineError):
    """Cannot be unpickled: its `args` are not the arguments of its constructor."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class ProcessLocalError(EngineError):
    """Can be unpickled only in the process that created it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_in_process, (os.getpid(),)


def rebuild_in_process(pid: int) -> ProcessLocalError:
    if os.getpid() != pid:
        raise LookupError("another process")
    return ProcessLocalError()


def raise_unpicklable(engine: Engine) -> None:
    raise UnpicklableError(1, 2)


class UnpicklableErrorBackend(FakeBackend):
    """Rejects every request with an error that cannot be unpickled."""

    def create_sampler(self, sampling: Sampling) -> FakeSampler:
        raise UnpicklableError(1, 2)


class ProcessLocalErrorBackend(FakeBackend):
    """Rejects every request with an error that the parent process cannot unpickle."""

    def create_sampler(self, sampling: Sampling) -> FakeSampler:
        raise ProcessLocalError


def count_stored_blocks(engine: Engine) -> int:
    """Return the number of blocks that the engine knows in any tier."""
    engine.prefix_cache.store.refresh()
    return len(engine.prefix_cache.store.tree)
