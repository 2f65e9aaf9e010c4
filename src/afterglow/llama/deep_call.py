"""Runs a call on a thread with a stack of a chosen size, for native code whose recursion depth depends on its input."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")

STACK_STEP_BYTES = 64 * 1024  # a stack must be a whole number of pages
MIN_STACK_BYTES = 8 * 1024**2  # that of other threads, which may start while the size is set for the process
LARGE_STACK_BYTES = 32 * 1024**2
_stack_size_lock = threading.Lock()  # `threading.stack_size` is a setting of the whole process
_large_stack_lock = threading.Lock()  # one large stack at a time: pages that a call touched stay until its thread ends


def call_with_stack(stack_bytes: int, function: Callable[[], ResultT]) -> ResultT:
    """Return `function()`, called on a new thread with a stack of at least `stack_bytes`.

    Raises `MemoryError` if the system does not provide the stack.

    >>> call_with_stack(2**20, lambda: 1 + 1)
    2
    """
    stack_bytes = max(MIN_STACK_BYTES, -(-stack_bytes // STACK_STEP_BYTES) * STACK_STEP_BYTES)
    if stack_bytes < LARGE_STACK_BYTES:
        return _call_on_thread(stack_bytes, function)
    with _large_stack_lock:
        return _call_on_thread(stack_bytes, function)


def _call_on_thread(stack_bytes: int, function: Callable[[], ResultT]) -> ResultT:
    # `threading.Thread` would take ten times as long: it also waits until the thread has started.
    done = _thread.allocate_lock()
    done.acquire()
    results: list[ResultT] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)
        finally:
            done.release()

    with _stack_size_lock:
        previous = threading.stack_size(stack_bytes)
        try:
            _thread.start_new_thread(run, ())
        except RuntimeError as error:
            raise MemoryError(f"no stack of {stack_bytes:,} bytes") from error
        finally:
            threading.stack_size(previous)
    _wait(done)
    if errors:
        raise errors[0]
    return results[0]


def _wait(done: _thread.LockType) -> None:
    """Wait for a thread. Interrupts wait too: the thread uses buffers and a model that must not be freed."""
    interrupt: BaseException | None = None
    while True:
        try:
            done.acquire()
            break
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
