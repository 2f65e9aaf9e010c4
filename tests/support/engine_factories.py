"""Engines that can be made in another process, good ones and bad ones, and things to ask of them there."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afterglow.engine.engine import Engine
from afterglow.engine.types.backend import DecodeSpan
from afterglow.errors import EngineError
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend, FakeSampler


class Slow(FakeBackend):
    """Each decode takes a while, and can be interrupted."""

    pause = 0.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._woken = threading.Event()

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        self._woken.wait(self.pause)
        super().decode(spans)

    def interrupt(self) -> None:
        super().interrupt()
        self._woken.set()

    def clear_interrupt(self) -> None:
        super().clear_interrupt()
        self._woken.clear()


class Broken(Slow):
    """Has a bug that shows after some decodes."""

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        if len(self.decode_history) == 5:
            raise RuntimeError("the bug")
        super().decode(spans)


class Blank(FakeBackend):
    """Remembers how much it holds and nothing else: prompts of any length take no time."""

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        self._logit_seeds = [[1] * len(span.entries) for span in spans]
        for span in spans:
            self._kv_caches[span.sequence].position += len(span.entries)


@dataclass(frozen=True)
class Fake:
    """An engine on a fake backend; its decodes take `pause` seconds."""

    backend: Callable[..., FakeBackend] = Slow
    pause: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Engine:
        backend = self.backend(**self.options)
        if isinstance(backend, Slow):
            backend.pause = self.pause
        return Engine(backend)


@dataclass(frozen=True)
class Numbered:
    """Counts its starts in a file. From the second on, something happens first."""

    file: Path
    then: Callable[[], object]
    make: Callable[[], Engine] = Fake()

    def __call__(self) -> Engine:
        starts = len(self.file.read_bytes()) if self.file.exists() else 0
        self.file.write_bytes(b"." * (starts + 1))
        if starts:
            self.then()
        return self.make()


@dataclass(frozen=True)
class After:
    """Does something before it makes an engine."""

    first: Callable[[], object]
    make: Callable[[], Engine] = Fake()

    def __call__(self) -> Engine:
        self.first()
        return self.make()


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
class Grandchild:
    """Starts a process that would outlive us, and writes down which."""

    file: Path

    def __call__(self) -> None:
        self.file.write_text(str(subprocess.Popen(["sleep", "600"]).pid))


# --- what to call on an engine


def busy(engine: Engine) -> bool:
    return engine.is_busy


def decodes(engine: Engine) -> int:
    return engine.counters.decodes


def lock(engine: Engine) -> threading.Lock:
    return threading.Lock()


def stop_in_a_message(engine: Engine) -> None:
    """Send the beginning of a long message, and stop."""
    os.write(int(sys.argv[1]), struct.pack("!i", 1000) + b"the beginning")
    os.kill(os.getpid(), signal.SIGSTOP)


class Stubborn(EngineError):
    """Cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class Homesick(EngineError):
    """Can be unpickled where it was made, and nowhere else."""

    def __reduce__(self) -> tuple[Any, ...]:
        return stay, (os.getpid(),)


def stay(home: int) -> Homesick:
    if os.getpid() != home:
        raise LookupError("not at home")
    return Homesick()


def stubborn(engine: Engine) -> None:
    raise Stubborn(1, 2)


class Choosy(FakeBackend):
    """Refuses every request, with an error that cannot be unpickled."""

    def create_sampler(self, sampling: Sampling) -> FakeSampler:
        raise Stubborn(1, 2)


class Foreign(FakeBackend):
    """Refuses every request, with an error that its parent cannot read."""

    def create_sampler(self, sampling: Sampling) -> FakeSampler:
        raise Homesick
