"""What only a process can do to you: die, stop, hang, leave orphans. What it shares with a thread is in test_thread."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from afterglow.engine.host import child_process, process
from afterglow.engine.host.process import MAX_FAILED_STARTS, EngineProcess
from afterglow.errors import Cancelled, Closed, EngineCrashed, EngineError, InvalidArgument
from support import engine_factories, hosts
from support.engine_factories import After, Exit, Fake, Grandchild, Numbered, Raise, Sleep
from support.hosts import error, eventually, finish, first_token, line, long, program, read, tokens
from support.play import prompt, reference, request

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def no_pauses(monkeypatch) -> None:
    """Between one child that died young and the next."""
    monkeypatch.setattr(process, "MAX_RESTART_DELAY_SECONDS", 0.05)


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    """Neither running nor as a zombie."""
    yield
    assert psutil.Process().children() == []


def gone(pid: int) -> bool:
    """Whether a process, of anybody's, runs no more."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(engine: EngineProcess, how: signal.Signals = signal.SIGKILL) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, how)


def serves(engine: EngineProcess, within: float = 5.0) -> bool:
    started = time.monotonic()
    answer = tokens(read(engine.submit(request("after all", prompt(9)))))
    assert time.monotonic() - started < within
    return answer == reference(Fake(), prompt(9))


# --- crashes


def test_a_killed_child_is_an_answer_to_everybody_and_another_one_serves_on():
    with EngineProcess(Fake(pause=0.01, options={"sequences": 8})) as engine:
        first, restarts = engine.pid, engine.restarts
        streams = [engine.submit(long(str(number))) for number in range(8)]
        running = [first_token(stream) for stream in streams]
        kill(engine)
        for stream, events in zip(streams, running, strict=True):
            *_, end = events
            assert isinstance(end.error, EngineCrashed)
            assert end.error.reason == "it ended (signal SIGKILL)"
            assert list(stream) == []
        assert serves(engine)
        assert (engine.restarts, restarts) == (1, 0)
        assert engine.pid not in (first, None)
        assert gone(first)


def test_a_call_in_flight_is_answered_by_a_crash():
    with EngineProcess(Fake()) as engine:
        threading.Timer(0.2, kill, [engine]).start()
        with pytest.raises(EngineCrashed, match="SIGKILL"):
            engine.call(Sleep())
        assert engine.call(engine_factories.busy) is False


def test_the_way_it_died_is_told():
    with EngineProcess(Fake(pause=60)) as engine:
        stream = engine.submit(long("one"))
        kill(engine, signal.SIGABRT)
        assert error(stream).reason == "it ended (signal SIGABRT)"


def test_one_crash_after_the_other_is_survived(no_pauses):
    with EngineProcess(Fake()) as engine:
        before = len(os.listdir("/dev/fd")), threading.active_count()
        for crashes in range(1, 4):
            kill(engine)
            assert eventually(lambda crashes=crashes: engine.restarts == crashes)
            assert serves(engine)
        assert (len(os.listdir("/dev/fd")), threading.active_count()) == before


def test_a_child_that_is_killed_while_it_starts_is_no_trouble(tmp_path, no_pauses):
    """Whoever came meanwhile waits for the one after it."""
    with EngineProcess(Numbered(tmp_path / "starts", Sleep(0.5))) as engine:
        kill(engine)
        assert eventually(lambda: engine.restarts == 1 and engine.pid is not None)
        stream = engine.submit(request("patient", prompt(9)))
        kill(engine)
        assert tokens(read(stream)) == reference(Fake(), prompt(9))
        assert engine.restarts == 2


def test_requests_and_calls_wait_for_a_child_that_is_being_started(tmp_path):
    with EngineProcess(Numbered(tmp_path / "starts", Sleep(1.2))) as engine:
        kill(engine)
        assert eventually(lambda: engine.restarts == 1)
        started = time.monotonic()
        streams = [engine.submit(request(str(number), prompt(9))) for number in range(5)]
        unwanted = engine.submit(long("unwanted"))
        assert isinstance(error(engine.submit(request("1", prompt(9)))), InvalidArgument)  # it is served already
        unwanted.cancel()
        assert isinstance(error(unwanted), Cancelled)
        assert time.monotonic() - started < 1  # none of this waited
        assert engine.call(engine_factories.busy) in (True, False)
        assert time.monotonic() - started > 1
        for stream in streams:
            assert tokens(read(stream)) == reference(Fake(), prompt(9))


@pytest.mark.parametrize(
    ("then", "why"),
    [(Exit(3), "it ended (exit code 3)"), (Raise(MemoryError("no more")), "MemoryError: no more")],
    ids=["dies", "raises"],
)
def test_a_child_that_never_starts_again_is_given_up(tmp_path, no_pauses, then, why):
    file = tmp_path / "starts"
    with EngineProcess(Numbered(file, then)) as engine:
        kill(engine)
        assert eventually(lambda: engine.restarts == 1)
        patient = engine.submit(request("patient", prompt(9)))
        reason = error(patient).reason
        assert reason.startswith("it could not be started again: ")
        assert reason.endswith(why)
        with pytest.raises(EngineCrashed, match="could not be started again"):
            engine.submit(request("late", prompt(9)))
        with pytest.raises(EngineCrashed, match="could not be started again"):
            engine.call(engine_factories.busy)
        assert len(file.read_bytes()) == 1 + MAX_FAILED_STARTS
        assert engine.pid is None


def test_a_child_that_dies_at_its_first_start_is_an_error_at_once(tmp_path):
    file = tmp_path / "starts"
    file.write_bytes(b".")
    with pytest.raises(EngineCrashed, match=r"it ended \(exit code 3\)"):
        EngineProcess(Numbered(file, Exit(3)))
    assert len(file.read_bytes()) == 2


def test_no_process_can_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EngineCrashed, match="no process could be started"):
        EngineProcess(Fake())


def test_a_start_takes_only_so_long():
    with pytest.raises(EngineCrashed, match="it took too long"):
        EngineProcess(After(Sleep()), start_timeout=0.8)


# --- silence


def test_a_child_that_stops_is_replaced():
    with EngineProcess(Fake(pause=0.01), silence_timeout=1.0) as engine:
        events = first_token(engine.submit(long("one")))
        kill(engine, signal.SIGSTOP)
        started = time.monotonic()
        *_, end = events
        assert isinstance(end.error, EngineCrashed)
        assert end.error.reason.startswith("it gave no sign of life for 1 s")
        assert 0.5 < time.monotonic() - started < 4
        assert serves(engine)


def test_nothing_waits_for_a_child_that_does_not_read():
    """Its pipe is full long before it is declared dead."""
    with EngineProcess(Fake(), silence_timeout=1.5) as engine:
        kill(engine, signal.SIGSTOP)
        started = time.monotonic()
        streams = [engine.submit(request(str(number), [7] * 100_000)) for number in range(8)]
        for stream in streams:
            stream.cancel()
        assert time.monotonic() - started < 1
        assert all(isinstance(error(stream), EngineCrashed) for stream in streams)
        assert serves(engine)


def test_a_child_that_stops_in_the_middle_of_an_answer_is_replaced():
    with EngineProcess(Fake(), silence_timeout=1.0) as engine:
        with pytest.raises(EngineCrashed, match="no sign of life"):
            engine.call(engine_factories.stop_in_a_message)
        assert serves(engine)


def test_a_long_decode_is_not_silence():
    recipe, question = hosts.long_decode()
    with EngineProcess(recipe, silence_timeout=1.0) as engine:
        stream = engine.submit(question)
        time.sleep(1.8)
        stream.cancel()
        assert isinstance(error(stream), Cancelled)
        assert engine.restarts == 0


# --- what cannot travel


def test_a_factory_that_cannot_be_pickled_is_an_error_before_anything_is_started():
    with pytest.raises(InvalidArgument, match=r"`make` cannot travel between processes"):
        EngineProcess(lambda: Fake()())
    assert psutil.Process().children() == []


def test_a_function_that_cannot_be_pickled_is_an_error():
    with EngineProcess(Fake()) as engine:
        with pytest.raises(InvalidArgument, match=r"`function` cannot travel"):
            engine.call(lambda _: 1)
        with pytest.raises(InvalidArgument, match=r"`function` cannot travel"):
            engine.call(engine_factories.lock)
        with pytest.raises(EngineError, match="Stubborn: 1 and 2"):
            engine.call(engine_factories.stubborn)
        refusal = error(engine.submit(request("one", prompt(5), sampling=threading.Lock())))
        assert isinstance(refusal, InvalidArgument)
        assert engine.restarts == 0
        assert serves(engine)


def test_an_error_that_cannot_be_pickled_arrives_as_what_it_says():
    with EngineProcess(Fake(engine_factories.Choosy)) as engine:
        refusal = error(engine.submit(request("one", prompt(5))))
        assert type(refusal) is EngineError
        assert str(refusal) == "Stubborn: 1 and 2"
        assert engine.restarts == 0


def test_an_event_that_cannot_be_read_here_is_a_crash():
    with EngineProcess(Fake(engine_factories.Foreign)) as engine:
        crash = error(engine.submit(request("one", prompt(5))))
        assert isinstance(crash, EngineCrashed)
        assert "LookupError: not at home" in crash.reason
        assert eventually(lambda: engine.restarts == 1)
        assert engine.call(engine_factories.busy) is False


# --- the end


def test_close_waits_for_nobody_who_hangs(monkeypatch):
    monkeypatch.setattr(child_process, "CLOSE_TIMEOUT_SECONDS", 0.5)
    engine = EngineProcess(Fake())
    stream, caught = engine.submit(long("one")), []

    def call() -> None:
        with pytest.raises(Closed):
            engine.call(Sleep())
        caught.append(True)

    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(0.2)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 3
    assert isinstance(error(stream), Closed)
    caller.join()
    assert caught


def test_close_does_not_wait_for_a_child_that_is_being_started(tmp_path):
    file = tmp_path / "starts"
    with EngineProcess(Numbered(file, Sleep())) as engine:
        kill(engine)
        assert eventually(lambda: len(file.read_bytes()) == 2)
        stream = engine.submit(long("one"))
        started = time.monotonic()
    assert time.monotonic() - started < 2
    assert isinstance(error(stream), Closed)


def test_what_the_child_started_goes_with_it(tmp_path):
    file = tmp_path / "pid"
    with EngineProcess(After(Grandchild(file))) as engine:
        first = int(file.read_text())
        assert not gone(first)
        kill(engine)
        assert eventually(lambda: gone(first))
        assert serves(engine)
        second = int(file.read_text())
        assert not gone(second)
    assert eventually(lambda: gone(second))


def test_a_killed_program_leaves_no_engine_behind():
    with program(EngineProcess, "for _ in stream: pass") as running:
        child = int(line(running))
        assert not gone(child)
        running.kill()
        assert eventually(lambda: gone(child), within=2)


@pytest.mark.parametrize("system", {"linux"} & {sys.platform})
def test_not_even_where_somebody_else_holds_the_pipe_open(system):
    """There the kernel tells the child."""
    body = """
    if fork := os.fork():
        print(fork, flush=True)
    time.sleep(60)
    """
    with program(EngineProcess, body) as running:
        child, fork = int(line(running)), int(line(running))
        running.kill()
        disappeared = eventually(lambda: gone(child), within=2)
        os.kill(fork, signal.SIGKILL)
    assert disappeared


def test_a_child_whose_pipe_is_closed_ends_by_itself():
    """On any system."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = child_process.start_process(theirs)
        assert ours.recv(1)  # its first sign of life
    assert child.wait(10) == -signal.SIGKILL


def test_a_program_killed_during_a_native_decode_leaves_no_engine_behind():
    body = """
    long = engine.submit(hosts.long_decode()[1])
    time.sleep(0.5)
    print("decoding", flush=True)
    for _ in long: pass
    """
    with program(EngineProcess, body, make="hosts.long_decode()[0]") as running:
        child = int(line(running))
        assert line(running) == "decoding"
        running.kill()
        assert eventually(lambda: gone(child), within=2)


def test_a_program_killed_while_its_engine_starts_leaves_nothing_behind():
    with program(EngineProcess, "EngineProcess(engine_factories.After(engine_factories.Sleep()))") as running:
        first, parent = int(line(running)), psutil.Process(running.pid)
        assert eventually(lambda: len(parent.children()) == 2)
        children = [child.pid for child in parent.children()]
        assert first in children
        running.kill()
        assert eventually(lambda: all(map(gone, children)), within=2)


def test_a_program_that_was_stopped_finds_its_engine_alive():
    """Ctrl-Z, a debugger, a closed lid: the silence was ours."""
    body = """
    stream.cancel()
    engine = EngineProcess(engine_factories.Fake(), silence=1.0)
    resumed = []
    signal.signal(signal.SIGCONT, lambda *_: resumed.append(True))
    print("ready", flush=True)
    while not resumed: time.sleep(0.05)
    time.sleep(0.5)
    print(engine.restarts, flush=True)
    """
    with program(EngineProcess, body) as running:
        assert line(running).isdigit()
        assert line(running) == "ready"
        running.send_signal(signal.SIGSTOP)
        time.sleep(2)
        running.send_signal(signal.SIGCONT)
        assert finish(running) == (0, "0\n", "")


def test_a_factory_of_the_program_itself_is_refused_with_a_reason():
    body = """
    def make(): ...
    try:
        EngineProcess(make)
    except Exception as error:
        print(type(error).__name__, error)
    """
    with program(EngineProcess, body) as running:
        code, output, errors = finish(running)
    assert (code, errors) == (0, "")
    assert "InvalidArgument `make` cannot travel between processes" in output


def test_a_child_gives_way_to_whoever_writes_its_tokens_out():
    with EngineProcess(Fake()) as engine:
        assert psutil.Process(engine.pid).nice() > psutil.Process().nice()
