"""Helpers for hosts: build requests, read event streams, and run engines in a separate program."""

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
import psutil

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


def build_spec(name: str = "successor-attention", **context: Any) -> EngineSpec:
    """Return the spec of an engine on a tiny model; `context` are fields of `ContextSettings`."""
    defaults = {"cells": 4096, "sequences": 4, "batch": 256, "ubatch": 64, "outputs": 8, "threads": 1}
    return EngineSpec(path=models.get_path(name), context_settings=ContextSettings(**{**defaults, **context}))


def build_long_decode() -> tuple[EngineSpec, Request]:
    """Return a spec, and a request whose prefill is one native decode of many seconds."""
    spec = build_spec("attention", cells=20_000, sequences=1, batch=16_384, ubatch=512)
    entries = np.random.default_rng(1).integers(20, 250, 16_000)
    return spec, Request(id="long", entries=entries, sampling=GREEDY, max_tokens=4)


def build_long_request(id: str, **options: Any) -> Request:
    """Return a request that does not end by itself within a test."""
    return request(id, prompt(10), max_tokens=1000, ignore_eos=True, **options)


def read_events(stream: EventStream) -> list[EngineEvent]:
    """Read a stream to its end. Checks that the end comes exactly once and last, and tokens after prefill progress."""
    events = list(stream)
    assert all(event.request_id == stream.id for event in events)
    assert [isinstance(event, Finished | Failed) for event in events] == [False] * (len(events) - 1) + [True]
    kinds = [type(event) for event in events[:-1]]
    assert kinds == sorted(kinds, key=[PrefillProgress, Token].index)
    assert stream.end_event is events[-1]
    assert list(stream) == []
    return events


def get_tokens(events: list[EngineEvent]) -> list[int]:
    return [event.token for event in events if isinstance(event, Token)]


def read_error(stream: EventStream) -> AfterglowError:
    """Read a stream to its end and return its error."""
    end = read_events(stream)[-1]
    assert isinstance(end, Failed), end
    return end.error


def skip_to_first_token(stream: EventStream) -> Iterator[EngineEvent]:
    """Return an iterator that has yielded the first token."""
    events = iter(stream)
    assert any(isinstance(event, Token) for event in events)
    return events


def wait_until(condition: Callable[[], bool], within: float = 60.0) -> bool:
    """Poll a condition; return whether it became true in time."""
    deadline = time.monotonic() + within
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; it need not be a child."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_idle(engine: Host) -> bool:
    return wait_until(lambda: not engine.call(engine_factories.is_busy))


@contextmanager
def run_program(
    host: type[Host], body: str, factory: str = "engine_factories.FakeEngineFactory(pause=0.02)", **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program with an engine and a request that does not end. It prints the pid of the engine process."""
    source = f"""
    import os, signal, sys, threading, time
    sys.path[:0] = {FOLDERS}
    from support import engine_factories, hosts
    from support.play import prompt, request
    from afterglow.engine.host.{host.__module__.rpartition(".")[2]} import {host.__name__}
    engine = {host.__name__}({factory})
    stream = engine.submit(request("one", prompt(5), max_tokens=1000, ignore_eos=True))
    print(getattr(engine, "pid", 0), flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(source) + textwrap.dedent(body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as program:
        try:
            yield program
        finally:
            program.kill()


def read_line(program: subprocess.Popen[str]) -> str:
    """Return the next line that a program prints."""
    assert program.stdout is not None
    return program.stdout.readline().strip()


def wait_for_exit(program: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr. The pipes end only when no child of the program has them open."""
    output, errors = program.communicate(timeout=120)
    return program.returncode, output, errors
