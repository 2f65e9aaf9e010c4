"""Asking an engine and watching what comes of it, here and in a program of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from afterglow.engine.host.build import EngineSpec
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.host.stream import EventStream
from afterglow.engine.host.thread import EngineThread
from afterglow.engine.types.request import EngineEvent, Failed, Finished, PrefillProgress, Request, Token
from afterglow.errors import AfterglowError
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support import engine_factories
from support.play import GREEDY, prompt, request

Host = EngineThread | EngineProcess
FOLDERS = [str(Path(__file__).parents[1])]


def llama(name: str = "successor-attention", **context: Any) -> EngineSpec:
    defaults = {"cells": 4096, "sequences": 4, "batch": 256, "ubatch": 64, "outputs": 8, "threads": 1}
    return EngineSpec(path=models.get_path(name), context_settings=ContextSettings(**{**defaults, **context}))


def long_decode() -> tuple[EngineSpec, Request]:
    """A request whose prompt is one native decode of many seconds."""
    recipe = llama("attention", cells=20_000, sequences=1, batch=16_384, ubatch=512)
    entries = np.random.default_rng(1).integers(20, 250, 16_000)
    return recipe, Request(id="long", entries=entries, sampling=GREEDY, max_tokens=4)


def long(id: str, **options) -> Request:
    """A request that does not end by itself within a test."""
    return request(id, prompt(10), max_tokens=1000, ignore_eos=True, **options)


def read(stream: EventStream) -> list[EngineEvent]:
    """All events: an end comes exactly once, and last, and tokens come after the prompt."""
    events = list(stream)
    assert all(event.request_id == stream.id for event in events)
    assert [isinstance(event, Finished | Failed) for event in events] == [False] * (len(events) - 1) + [True]
    kinds = [type(event) for event in events[:-1]]
    assert kinds == sorted(kinds, key=[PrefillProgress, Token].index)
    assert stream.end_event is events[-1]
    assert list(stream) == []
    return events


def tokens(events: list[EngineEvent]) -> list[int]:
    return [event.token for event in events if isinstance(event, Token)]


def error(stream: EventStream) -> AfterglowError:
    end = read(stream)[-1]
    assert isinstance(end, Failed), end
    return end.error


def first_token(stream: EventStream) -> Iterator[EngineEvent]:
    """An iterator that has come to the first token."""
    events = iter(stream)
    assert any(isinstance(event, Token) for event in events)
    return events


def eventually(condition: Callable[[], bool], within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


def idle(engine: Host) -> bool:
    return eventually(lambda: not engine.call(engine_factories.busy))


@contextmanager
def program(
    host: type[Host], body: str, make: str = "engine_factories.Fake(pause=0.02)", **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A Python program with an engine and an answer that does not end; it prints the id of the engine's process."""
    source = f"""
    import os, signal, sys, threading, time
    sys.path[:0] = {FOLDERS}
    from support import engine_factories, hosts
    from support.play import prompt, request
    from afterglow.engine.host.{host.__module__.rpartition(".")[2]} import {host.__name__}
    engine = {host.__name__}({make})
    stream = engine.submit(request("one", prompt(5), max_tokens=1000, ignore_eos=True))
    print(getattr(engine, "pid", 0), flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(source) + textwrap.dedent(body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as running:
        try:
            yield running
        finally:
            running.kill()


def line(running: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert running.stdout is not None
    return running.stdout.readline().strip()


def finish(running: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code and what it printed. The pipes end only when no child of it has them open any more."""
    output, errors = running.communicate(timeout=20)
    return running.returncode, output, errors
