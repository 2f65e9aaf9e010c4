"""Engines that can be made in another process, good ones and bad ones, and things to ask of them there."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from afterglow import tiny
from afterglow.engine.backend import Span
from afterglow.engine.engine import Engine
from afterglow.engine.llama import LlamaEngine
from afterglow.engine.request import Request
from afterglow.errors import Cancelled, EngineError
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.testing import FakeBackend


class Slow(FakeBackend):
    """Each decode takes a while, and can be interrupted."""

    pause = 0.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._interrupted = threading.Event()

    def decode(self, spans: Sequence[Span]) -> None:
        if self.pause and self._interrupted.wait(self.pause):
            raise Cancelled("interrupted")
        super().decode(spans)

    def interrupt(self) -> None:
        self._interrupted.set()

    def uninterrupt(self) -> None:
        self._interrupted.clear()


class Broken(FakeBackend):
    """Has a bug that shows after some decodes."""

    healthy = 0

    def decode(self, spans: Sequence[Span]) -> None:
        if len(self.history) == self.healthy:
            raise RuntimeError("the bug")
        super().decode(spans)


class Blank(FakeBackend):
    """Remembers how much it holds and nothing else: prompts of any length take no time."""

    def decode(self, spans: Sequence[Span]) -> None:
        self._logits = [[1] * len(span.ids) for span in spans]
        for span in spans:
            self._memory[span.sequence].position += len(span.ids)


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


def llama(name: str = "successor-attention", **context: Any) -> LlamaEngine:
    defaults = {"cells": 4096, "sequences": 4, "batch": 256, "ubatch": 64, "outputs": 8, "threads": 1}
    return LlamaEngine(path=tiny.path(name), context=ContextSettings(**{**defaults, **context}))


def long_decode() -> tuple[LlamaEngine, Request]:
    """A request whose prompt is one native decode of many seconds."""
    recipe = llama("attention", cells=20_000, sequences=1, batch=16_384, ubatch=512)
    entries = np.random.default_rng(1).integers(20, 250, 16_000)
    return recipe, Request(id="long", entries=entries, sampling=Sampling(temperature=0), max_tokens=4)


# --- what to call on an engine


def busy(engine: Engine) -> bool:
    return engine.busy


def decoding(engine: Engine) -> int:
    return engine.counters.decodes


def lock(engine: Engine) -> threading.Lock:
    return threading.Lock()


def megabytes_and_stop(engine: Engine) -> bytes:
    """A large answer, in the middle of which the process stops."""
    threading.Timer(0.05, os.kill, [os.getpid(), 19]).start()
    return bytes(400_000_000)


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
