"""Process host: crashes, silence, pickling and shutdown. Behaviour shared with the thread host is in test_thread.py."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from afterglow.engine.host import child_process, process
from afterglow.engine.host.process import MAX_FAILED_STARTS, EngineProcess, Submission
from afterglow.errors import Cancelled, Closed, EngineCrashed, EngineError, InvalidArgument
from support import engine_factories, hosts
from support.engine_factories import (
    Exit,
    FactoryAfter,
    FakeEngineFactory,
    Raise,
    RestartFactory,
    Sleep,
    SlowOnce,
    StartGrandchild,
)
from support.hosts import (
    build_long_request,
    get_tokens,
    is_gone,
    read_error,
    read_events,
    read_line,
    run_program,
    skip_to_first_token,
    wait_for_exit,
    wait_until,
)
from support.play import prompt, reference, request

pytestmark = [pytest.mark.timeout(60), pytest.mark.native]
EXPECTED = reference(FakeEngineFactory(), prompt(9))  # tokens of the request that most tests submit


@pytest.fixture
def no_restart_delay(monkeypatch) -> None:
    """Shorten the delay after a child that exited early."""
    monkeypatch.setattr(process, "MAX_RESTART_DELAY_SECONDS", 0.05)


@pytest.fixture(autouse=True)
def no_process_remains() -> Iterator[None]:
    """Check that no child remains, running or as a zombie. Servers of other test files may run."""
    before = psutil.Process().children()
    yield
    assert [child for child in psutil.Process().children() if child not in before] == []


def kill(engine: EngineProcess, signal_number: signal.Signals = signal.SIGKILL) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal_number)


def can_serve(engine: EngineProcess, within: float = 60.0) -> bool:
    """Return whether a request gets the expected tokens in time."""
    started = time.monotonic()
    answer = get_tokens(read_events(engine.submit(request("check", prompt(9)))))
    assert time.monotonic() - started < within
    return answer == EXPECTED


# --- crashes


def test_a_killed_child_fails_its_requests_and_a_new_child_serves():
    with EngineProcess(FakeEngineFactory(pause=0.01, options={"sequences": 8})) as engine:
        first, restarts = engine.pid, engine.restarts
        streams = [engine.submit(build_long_request(str(number))) for number in range(8)]
        iterators = [skip_to_first_token(stream) for stream in streams]
        kill(engine)
        for stream, events in zip(streams, iterators, strict=True):
            *_, end = events
            assert isinstance(end.error, EngineCrashed)
            assert end.error.reason == "process exited (signal SIGKILL)"
            assert list(stream) == []
        assert can_serve(engine)
        assert (engine.restarts, restarts) == (1, 0)
        assert engine.pid not in (first, None)
        assert is_gone(first)


def test_a_call_in_flight_is_repeated_once():
    with EngineProcess(FakeEngineFactory()) as engine, ThreadPoolExecutor(2) as pool:
        short, hanging = pool.submit(engine.call, Sleep(0.5)), pool.submit(engine.call, Sleep())
        time.sleep(0.2)
        kill(engine)
        assert short.result(60) is None
        kill(engine)
        with pytest.raises(EngineCrashed, match="SIGKILL"):
            hanging.result(60)
        assert engine.call(engine_factories.is_busy) is False


def test_the_crash_reason_names_the_signal():
    with EngineProcess(FakeEngineFactory(pause=0.01)) as engine:
        events = skip_to_first_token(engine.submit(build_long_request("one")))
        kill(engine, signal.SIGABRT)
        *_, end = events
        assert end.error.reason == "process exited (signal SIGABRT)"


# --- requests without a token


def test_a_request_sent_right_after_the_death_of_the_child_waits_for_the_next_one():
    with EngineProcess(FakeEngineFactory()) as engine:
        for number in range(1, 4):
            kill(engine)
            assert get_tokens(read_events(engine.submit(request(str(number), prompt(9))))) == EXPECTED
            assert engine.restarts == number


def test_requests_without_a_token_are_repeated_on_the_next_child(tmp_path):
    """Choices submitted together stay together; one that was cancelled is not repeated."""
    with EngineProcess(SlowOnce(tmp_path / "slow")) as engine:
        streams = engine.submit_together([request(str(number), prompt(9)) for number in range(3)])
        cancelled = engine.submit(build_long_request("cancelled"))
        cancelled.cancel()
        kill(engine)
        for stream in streams:
            assert get_tokens(read_events(stream)) == EXPECTED
        assert isinstance(read_error(cancelled), Cancelled | EngineCrashed)
        assert engine.restarts == 1


def test_a_request_that_crashes_the_child_is_repeated_once_only():
    with EngineProcess(FakeEngineFactory(engine_factories.ExitingBackend)) as engine:
        assert read_error(engine.submit(request("poison", prompt(9)))).reason == "process exited (exit code 7)"
        assert engine.restarts <= 2
        assert wait_until(lambda: engine.restarts == 2)


def test_a_request_that_crashes_the_child_fails_no_other_request():
    """Requests are repeated one after the other, so only the guilty one runs when the next child dies."""
    factory = FakeEngineFactory(engine_factories.PoisonBackend, pause=0.2, options={"sequences": 4})
    with EngineProcess(factory) as engine:
        poison = engine.submit(request("poison", [*prompt(9), engine_factories.POISON]))
        innocent = [engine.submit(request(str(number), prompt(9), max_tokens=2)) for number in range(2)]
        cancelled = engine.submit(request("cancelled", prompt(9)))
        assert wait_until(lambda: engine.restarts == 1)
        cancelled.cancel()
        assert isinstance(read_error(cancelled), Cancelled)
        assert read_error(poison).reason == "process exited (exit code 7)"
        assert [get_tokens(read_events(stream)) for stream in innocent] == [EXPECTED[:2]] * 2
        assert engine.restarts == 2


def test_a_repeated_request_keeps_its_deadline():
    requests = (request("one", prompt(9), deadline=100.0), request("two", prompt(9)), request("three", prompt(9)))
    submission = Submission(requests, time.monotonic() - 30)
    first, second = submission.build_repeat({"one", "two"})
    assert 69 < first.deadline <= 70
    assert second is requests[1]


def test_a_request_that_waits_for_a_stopped_child_is_repeated():
    with EngineProcess(FakeEngineFactory(), silence_timeout=1.0) as engine:
        kill(engine, signal.SIGSTOP)
        assert get_tokens(read_events(engine.submit(request("patient", prompt(9))))) == EXPECTED
        assert engine.restarts == 1


def test_repeated_crashes_leak_no_descriptors_or_threads(no_restart_delay):
    with EngineProcess(FakeEngineFactory()) as engine:
        before = len(os.listdir("/dev/fd")), threading.active_count()
        for crashes in range(1, 4):
            kill(engine)
            assert wait_until(lambda crashes=crashes: engine.restarts == crashes)
            assert can_serve(engine)
        assert (len(os.listdir("/dev/fd")), threading.active_count()) == before


def test_requests_survive_a_child_that_is_killed_while_it_starts(tmp_path, no_restart_delay):
    """A request submitted during the restart waits for the next child."""
    with EngineProcess(RestartFactory(tmp_path / "starts", Sleep(0.5))) as engine:
        kill(engine)
        assert wait_until(lambda: engine.restarts == 1 and engine.pid is not None)
        stream = engine.submit(request("patient", prompt(9)))
        kill(engine)
        assert get_tokens(read_events(stream)) == EXPECTED
        assert engine.restarts == 2


def test_requests_and_calls_wait_for_a_restarting_child(tmp_path):
    with EngineProcess(RestartFactory(tmp_path / "starts", Sleep(3))) as engine:
        kill(engine)
        assert wait_until(lambda: engine.restarts == 1)
        streams = [engine.submit(request(str(number), prompt(9))) for number in range(5)]
        cancelled = engine.submit(build_long_request("cancelled"))
        assert isinstance(read_error(engine.submit(request("1", prompt(9)))), InvalidArgument)  # the id is in use
        cancelled.cancel()
        assert isinstance(read_error(cancelled), Cancelled)
        assert not engine.is_ready  # none of this waited for the child
        assert engine.call(engine_factories.is_busy) in (True, False)
        assert engine.is_ready
        for stream in streams:
            assert get_tokens(read_events(stream)) == EXPECTED


@pytest.mark.parametrize(
    ("on_restart", "cause"),
    [(Exit(3), "process exited (exit code 3)"), (Raise(MemoryError("no more")), "MemoryError: no more")],
    ids=["exits", "raises"],
)
def test_restarts_stop_after_repeated_failures(tmp_path, no_restart_delay, on_restart, cause):
    file = tmp_path / "starts"
    with EngineProcess(RestartFactory(file, on_restart)) as engine:
        kill(engine)
        assert wait_until(lambda: engine.restarts == 1)
        patient = engine.submit(request("patient", prompt(9)))
        reason = read_error(patient).reason
        assert reason.startswith("process could not be restarted: ")
        assert reason.endswith(cause)
        with pytest.raises(EngineCrashed, match="could not be restarted"):
            engine.submit(request("late", prompt(9)))
        with pytest.raises(EngineCrashed, match="could not be restarted"):
            engine.call(engine_factories.is_busy)
        assert len(file.read_bytes()) == 1 + MAX_FAILED_STARTS
        assert engine.pid is None
        assert wait_until(lambda: engine.has_given_up)
    assert not engine.has_given_up  # closed


def test_a_child_that_exits_during_the_first_start_is_not_restarted(tmp_path):
    file = tmp_path / "starts"
    file.write_bytes(b".")
    with pytest.raises(EngineCrashed, match=r"process exited \(exit code 3\)"):
        EngineProcess(RestartFactory(file, Exit(3)))
    assert len(file.read_bytes()) == 2


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EngineCrashed, match="process could not be started"):
        EngineProcess(FakeEngineFactory())


def test_a_slow_start_times_out():
    with pytest.raises(EngineCrashed, match="process timed out"):
        EngineProcess(FactoryAfter(Sleep()), start_timeout=0.8)


# --- silence


def test_a_stopped_child_is_replaced():
    with EngineProcess(FakeEngineFactory(pause=0.01), silence_timeout=1.0) as engine:
        events = skip_to_first_token(engine.submit(build_long_request("one")))
        kill(engine, signal.SIGSTOP)
        started = time.monotonic()
        *_, end = events
        assert isinstance(end.error, EngineCrashed)
        assert end.error.reason.startswith("process did not respond for 1 s")
        assert 0.5 < time.monotonic() - started < 60
        assert can_serve(engine)


def test_a_child_that_does_not_read_blocks_no_caller():
    """The pipe is full long before the child counts as dead."""
    with EngineProcess(FakeEngineFactory(), silence_timeout=5.0) as engine:
        kill(engine, signal.SIGSTOP)
        streams = [engine.submit(request(str(number), [7] * 100_000)) for number in range(8)]
        for stream in streams:
            stream.cancel()
        assert engine.restarts == 0  # none of this waited until the child was replaced
        assert all(isinstance(read_error(stream), EngineCrashed) for stream in streams)
        assert can_serve(engine)


def test_a_child_that_stops_within_a_message_is_replaced():
    with EngineProcess(FakeEngineFactory(), silence_timeout=1.0) as engine:
        with pytest.raises(EngineCrashed, match="did not respond"):
            engine.call(engine_factories.stop_within_message)
        assert can_serve(engine)


def test_a_long_decode_does_not_count_as_silence():
    spec, long_request = hosts.build_long_decode()
    with EngineProcess(spec, silence_timeout=1.0) as engine:
        stream = engine.submit(long_request)
        time.sleep(1.8)
        stream.cancel()
        assert isinstance(read_error(stream), Cancelled)
        assert engine.restarts == 0


# --- pickling


def test_an_unpicklable_factory_is_rejected_before_a_process_starts():
    before = psutil.Process().children()
    with pytest.raises(InvalidArgument, match=r"`factory` cannot be sent to another process"):
        EngineProcess(lambda: FakeEngineFactory()())
    assert psutil.Process().children() == before


def test_unpicklable_functions_and_requests_are_rejected():
    with EngineProcess(FakeEngineFactory()) as engine:
        with pytest.raises(InvalidArgument, match=r"`function` cannot be sent"):
            engine.call(lambda _: 1)
        with pytest.raises(InvalidArgument, match=r"`function` cannot be sent"):
            engine.call(engine_factories.return_lock)
        with pytest.raises(EngineError, match="UnpicklableError: 1 and 2"):
            engine.call(engine_factories.raise_unpicklable)
        error = read_error(engine.submit(request("one", prompt(5), sampling=threading.Lock())))
        assert isinstance(error, InvalidArgument)
        fields = dict(engine_factories.UNREADABLE)
        for stream in engine.submit_together([request("two", prompt(5), **fields), request("three", prompt(5))]):
            assert isinstance(read_error(stream), InvalidArgument)
        assert engine.restarts == 0
        assert can_serve(engine)


def test_an_unpicklable_error_arrives_as_text():
    with EngineProcess(FakeEngineFactory(engine_factories.UnpicklableErrorBackend)) as engine:
        error = read_error(engine.submit(request("one", prompt(5))))
        assert type(error) is EngineError
        assert str(error) == "UnpicklableError: 1 and 2"
        assert engine.restarts == 0


def test_an_unreadable_event_is_a_crash():
    with EngineProcess(FakeEngineFactory(engine_factories.ProcessLocalErrorBackend)) as engine:
        crash = read_error(engine.submit(request("one", prompt(5))))
        assert isinstance(crash, EngineCrashed)
        assert "LookupError: another process" in crash.reason
        assert wait_until(lambda: engine.restarts == 2)  # the request was repeated once
        assert engine.call(engine_factories.is_busy) is False


# --- shutdown


def test_close_does_not_wait_for_a_hanging_call():
    engine = EngineProcess(FakeEngineFactory())
    stream, caught = engine.submit(build_long_request("one")), []

    def call() -> None:
        with pytest.raises(Closed):
            engine.call(Sleep())
        caught.append(True)

    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(0.2)
    started = time.monotonic()
    engine.close(store_timeout=0.0)
    assert time.monotonic() - started < 60
    assert isinstance(read_error(stream), Closed)
    caller.join()
    assert caught


def test_close_does_not_wait_for_a_restarting_child(tmp_path):
    file = tmp_path / "starts"
    with EngineProcess(RestartFactory(file, Sleep())) as engine:
        kill(engine)
        assert wait_until(lambda: len(file.read_bytes()) == 2)
        stream = engine.submit(build_long_request("one"))
        started = time.monotonic()
    assert time.monotonic() - started < 60
    assert isinstance(read_error(stream), Closed)


def test_processes_started_by_the_child_end_with_it(tmp_path):
    file = tmp_path / "pid"
    with EngineProcess(FactoryAfter(StartGrandchild(file))) as engine:
        first = int(file.read_text())
        assert not is_gone(first)
        kill(engine)
        assert wait_until(lambda: is_gone(first))
        assert can_serve(engine)
        second = int(file.read_text())
        assert not is_gone(second)
    assert wait_until(lambda: is_gone(second))


def test_a_killed_program_leaves_no_engine_process():
    with run_program(EngineProcess, "for _ in stream: pass") as program:
        child = int(read_line(program))
        assert not is_gone(child)
        program.kill()
        assert wait_until(lambda: is_gone(child), within=60)


@pytest.mark.parametrize("system", {"linux"} & {sys.platform})
def test_a_killed_program_leaves_no_engine_process_if_a_fork_holds_the_pipe(system):
    """The kernel ends the child with its parent."""
    body = """
    if fork := os.fork():
        print(fork, flush=True)
    time.sleep(60)
    """
    with run_program(EngineProcess, body) as program:
        child, fork = int(read_line(program)), int(read_line(program))
        program.kill()
        is_child_gone = wait_until(lambda: is_gone(child), within=60)
        os.kill(fork, signal.SIGKILL)
    assert is_child_gone


def test_a_child_exits_if_its_pipe_is_closed():
    """This works on any system."""
    parent_socket, child_socket = socket.socketpair()
    with parent_socket, child_socket:
        child = child_process.start_process(child_socket)
        assert parent_socket.recv(1)  # its first message
    assert child.wait(60) == -signal.SIGKILL


def test_a_program_killed_during_a_native_decode_leaves_no_engine_process():
    body = """
    long = engine.submit(hosts.build_long_decode()[1])
    time.sleep(0.5)
    print("decoding", flush=True)
    for _ in long: pass
    """
    with run_program(EngineProcess, body, factory="hosts.build_long_decode()[0]") as program:
        child = int(read_line(program))
        assert read_line(program) == "decoding"
        program.kill()
        assert wait_until(lambda: is_gone(child), within=60)


def test_a_program_killed_while_its_engine_starts_leaves_no_process():
    with run_program(
        EngineProcess, "EngineProcess(engine_factories.FactoryAfter(engine_factories.Sleep()))"
    ) as program:
        first, parent = int(read_line(program)), psutil.Process(program.pid)
        assert wait_until(lambda: len(parent.children()) == 2)
        children = [child.pid for child in parent.children()]
        assert first in children
        program.kill()
        assert wait_until(lambda: all(map(is_gone, children)), within=60)


def test_a_resumed_program_does_not_restart_its_engine():
    """After Ctrl-Z, a debugger or a suspend, the parent was silent and not the child."""
    body = """
    stream.cancel()
    engine = EngineProcess(engine_factories.FakeEngineFactory(), silence_timeout=1.0)
    resumed = []
    signal.signal(signal.SIGCONT, lambda *_: resumed.append(True))
    print("ready", flush=True)
    while not resumed: time.sleep(0.05)
    time.sleep(0.5)
    print(engine.restarts, flush=True)
    """
    with run_program(EngineProcess, body) as program:
        assert read_line(program).isdigit()
        assert read_line(program) == "ready"
        program.send_signal(signal.SIGSTOP)
        time.sleep(2)
        program.send_signal(signal.SIGCONT)
        assert wait_for_exit(program) == (0, "0\n", "")


def test_a_factory_defined_in_the_main_program_is_rejected():
    body = """
    def factory(): ...
    try:
        EngineProcess(factory)
    except Exception as error:
        print(type(error).__name__, error)
    """
    with run_program(EngineProcess, body) as program:
        code, output, errors = wait_for_exit(program)
    assert (code, errors) == (0, "")
    assert "InvalidArgument `factory` cannot be sent to another process" in output


def test_the_child_runs_at_lower_priority():
    with EngineProcess(FakeEngineFactory()) as engine:
        assert psutil.Process(engine.pid).nice() > psutil.Process().nice()
