"""A child process as its parent sees it: starting it, writing to it, and making sure that it is gone."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from afterglow.engine.host.listening import MessageListener
from afterglow.engine.host.pipe import MessagePipe, Outbox

ENTRY_CODE = "from afterglow.engine.host.child_main import main; main()"
CLOSE_TIMEOUT_SECONDS = 5.0  # to end in order, when asked to
EXIT_TIMEOUT_SECONDS = 1.0  # to be gone, once it hung up
KILL_TIMEOUT_SECONDS = 10.0  # a process that waits for a device may outlive its own death


class ChildProcess:
    """One child process and the pipe to it. `send`, `kill` and `dismiss` are for any thread and never block."""

    def __init__(self, factory: bytes, on_message: Callable[..., None], *, start_timeout: float) -> None:
        """What it sends is given to `receive`, after the child itself."""
        self.has_responded = self.is_ready = False
        self.start_error: BaseException | None = None  # why it could not make its engine
        self.crash_reason = ""  # why its engine crashed
        self.deadline: float | None = time.monotonic() + start_timeout  # for whatever it has to do now
        self._socket, theirs = socket.socketpair()
        try:
            self.process = start_process(theirs)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        wire = MessagePipe(self._socket)
        self.listener = MessageListener(wire, functools.partial(on_message, self))
        self._outbox = Outbox(wire, on_disconnect=lambda: None)  # whoever listens will notice
        self.send("make", None, factory)

    @property
    def is_overdue(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def send(self, kind: str, key: str | int | None = None, content: bytes | None = None) -> None:
        """Have something written. A child that is gone hears nothing; whoever listens to it will notice."""
        self._outbox.put((kind, key, content))

    def shut_down(self) -> None:
        """Let it end: in order where it is ready, else at once."""
        self.set_exit_deadline()
        if self.is_ready:
            self.send("close")
        else:
            self.kill()

    def set_exit_deadline(self) -> None:
        """It was told to end, or said that it would: from now on it has little time."""
        self.deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS

    def kill(self) -> None:
        """End it now, with everything that it started."""
        with contextlib.suppress(OSError):  # it is gone already
            os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> str:
        """Wait until nothing is left, of the process and of what belongs to it here; how it went."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_TIMEOUT_SECONDS)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_TIMEOUT_SECONDS)
        self._outbox.close()
        with contextlib.suppress(OSError):  # wakes the writer, should it be stuck
            self._socket.shutdown(socket.SHUT_RDWR)
        self._outbox.join()
        self._socket.close()
        return describe_exit(self.process.returncode)


def start_process(child_socket: socket.socket) -> subprocess.Popen[bytes]:
    """A Python like this one that finds the same modules, in a group of its own: Ctrl-C is for us, not for it."""
    descriptor = child_socket.fileno()
    search = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", ENTRY_CODE, str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        process_group=0,
        env={**os.environ, "PYTHONPATH": search},
    )


def describe_exit(code: int | None) -> str:
    """How a process went, in words."""
    if code is None:
        return "it cannot be killed"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
