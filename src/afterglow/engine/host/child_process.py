"""Child process as seen by its parent: start, send messages, kill, reap."""

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

from afterglow.engine.host.pipe import MessageListener, MessagePipe, Outbox
from afterglow.engine.kvcache.prefix_cache import CLOSE_TIMEOUT_SECONDS

ENTRY_CODE = "from afterglow.engine.host.child_main import main; main()"
RELEASE_TIMEOUT_SECONDS = 2.0  # for an orderly shutdown, after the prefix cache is stored
EXIT_TIMEOUT_SECONDS = 1.0  # from the closed pipe to the exit of the process
KILL_TIMEOUT_SECONDS = 10.0  # a process that waits for a device may survive SIGKILL for a while


class ChildProcess:
    """One child process and the pipe to it. `send`, `kill` and `shut_down` are thread-safe and never block."""

    def __init__(self, factory: bytes, on_message: Callable[..., None], *, start_timeout: float) -> None:
        """Start the process. Each message it sends is passed to `on_message`, preceded by this object."""
        self.has_responded = False
        self.ready_since: float | None = None  # when its engine was built
        self.start_error: BaseException | None = None  # why its engine could not be built
        self.crash_reason = ""  # why its engine crashed
        self.deadline: float | None = time.monotonic() + start_timeout  # of the current start or shutdown
        self._socket, child_socket = socket.socketpair()
        try:
            self.process = start_process(child_socket)
        except BaseException:
            self._socket.close()
            raise
        finally:
            child_socket.close()
        pipe = MessagePipe(self._socket)
        self.listener = MessageListener(pipe, functools.partial(on_message, self))
        self._outbox = Outbox(pipe, on_disconnect=lambda: None)  # the listener detects the disconnect
        self.send("build", None, factory)

    @property
    def is_ready(self) -> bool:
        """Whether its engine is built."""
        return self.ready_since is not None

    def send(self, kind: str, key: str | float | tuple[str, ...] | None = None, content: bytes | None = None) -> None:
        """Queue a message. It is dropped if the child is gone, which the listener detects."""
        self._outbox.put((kind, key, content))

    def shut_down(self, store_timeout: float) -> None:
        """End the process: in order if it is ready, with `store_timeout` for its prefix cache, otherwise at once."""
        self.set_exit_deadline(store_timeout)
        if self.is_ready:
            self.send("close", store_timeout)
        else:
            self.kill()

    def set_exit_deadline(self, store_timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Limit the remaining time of a child that was told to exit or announced its exit."""
        self.deadline = time.monotonic() + store_timeout + RELEASE_TIMEOUT_SECONDS

    def kill(self) -> None:
        """Kill the process and everything it started."""
        with contextlib.suppress(OSError):  # already gone
            os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> str:
        """Wait for the exit of the process, release all its resources, and return a description of the exit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_TIMEOUT_SECONDS)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_TIMEOUT_SECONDS)
        self._outbox.close()
        with contextlib.suppress(OSError):  # unblocks the writer
            self._socket.shutdown(socket.SHUT_RDWR)
        self._outbox.join()
        self._socket.close()
        self.listener.release_closed_loops()
        return describe_exit(self.process.returncode)


def start_process(child_socket: socket.socket) -> subprocess.Popen[bytes]:
    """Start the same Python with the same module search path, in its own process group so that Ctrl-C spares it."""
    descriptor = child_socket.fileno()
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", ENTRY_CODE, str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        process_group=0,
        env={**os.environ, "PYTHONPATH": search_path},
    )


def describe_exit(code: int | None) -> str:
    """Describe the exit of a process by its return code."""
    if code is None:
        return "it cannot be killed"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
