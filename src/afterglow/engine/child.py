"""The other end of `EngineProcess`: `python -m afterglow.engine.child FILE_DESCRIPTOR PARENT`."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from afterglow.engine.engine import Engine
from afterglow.engine.request import Event, Failed, Request, Usage
from afterglow.errors import AfterglowError, EngineCrashed

PR_SET_PDEATHSIG = 1


class Service:
    """Reads commands on one thread, steps the engine on another, and writes events back."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.engine: Engine | None = None
        self._sending = threading.Lock()

    def send(self, kind: str, content: object) -> None:
        with self._sending:
            self.connection.send((kind, content))

    def read(self) -> None:
        """Take commands as they come, also while the engine is computing. Without a parent there is no more to do."""
        while True:
            try:
                kind, content = self.connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            if kind == "ping":
                self.send("pong", None)
            elif kind == "cancel" and self.engine is not None:
                self.engine.cancel(content)
            else:
                self.commands.put((kind, content))

    def serve(self) -> None:
        _, make = self.commands.get()
        try:
            engine = self.engine = make()
        except AfterglowError as error:
            return self.send("failed", error)
        except Exception as error:
            return self.send("failed", EngineCrashed(f"{type(error).__name__}: {error}"))
        self.send("ready", None)
        while self.obey(engine):
            if events := engine.step():
                self.send("events", events)
        engine.close()

    def obey(self, engine: Engine) -> bool:
        """Do what was asked since the last step; wait where there is no work. False: the end."""
        while True:
            try:
                kind, content = self.commands.get(block=not engine.busy)
            except queue.Empty:
                return True
            if kind == "close":
                return False
            if kind == "submit":
                self.submit(engine, content)
            elif kind == "call":
                self.call(engine, *content)

    def submit(self, engine: Engine, request: Request) -> None:
        try:
            engine.submit(request)
        except AfterglowError as error:
            refused: list[Event] = [Failed(request.id, error, Usage())]
            self.send("events", refused)

    def call(self, engine: Engine, number: int, function: Any) -> None:
        try:
            self.send("answer", (number, function(engine), None))
        except Exception as error:
            self.send("answer", (number, None, error))


def die_with(parent: int) -> None:
    """Leave no orphan: the kernel ends us with our parent, where it can; else the closed pipe does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(0)


def main() -> None:
    die_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal goes to the parent, which closes us
    service = Service(Connection(int(sys.argv[1])))
    threading.Thread(target=service.read, daemon=True).start()
    service.serve()


if __name__ == "__main__":
    main()
