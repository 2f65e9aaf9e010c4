"""Behaviour that the thread host and the process host share."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from afterglow.engine.host.build import EngineSpec
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.host.stream import EventStream
from afterglow.engine.host.thread import EngineThread
from afterglow.engine.types.request import Failed, Finished, PrefillProgress, Request, Token
from afterglow.errors import (
    AfterglowError,
    Cancelled,
    Closed,
    EngineCrashed,
    InvalidArgument,
    ModelNotFound,
    PromptTooLong,
)
from afterglow.testing import models
from support import engine_factories, hosts
from support.engine_factories import CountingBackend, CrashingBackend, FakeEngineFactory, Raise
from support.hosts import (
    Host,
    build_long_request,
    get_tokens,
    read_error,
    read_events,
    read_line,
    run_program,
    skip_to_first_token,
    wait_for_exit,
    wait_until_idle,
)
from support.play import prompt, reference, request

HOSTS = (EngineThread, pytest.param(EngineProcess, marks=pytest.mark.native))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
EXPECTED = reference(FakeEngineFactory(), prompt(9))  # tokens of the request that most tests submit
both_hosts = pytest.mark.parametrize("host", HOSTS)


@pytest.fixture(scope="module", params=HOSTS)
def engine(request) -> Iterator[Host]:
    """An engine shared by the tests of this module; it must not restart."""
    with request.param(FakeEngineFactory(pause=0.002, options={"sequences": 8})) as engine:
        yield engine
        assert getattr(engine, "restarts", 0) == 0


@pytest.fixture(scope="module", params=HOSTS)
def slow(request) -> Iterator[Host]:
    """An engine with one sequence whose decodes take a minute unless interrupted."""
    with request.param(FakeEngineFactory(pause=60, options={"sequences": 1})) as engine:
        yield engine


# --- events


def test_the_end_of_a_request_is_reported_even_if_nobody_reads_its_events(engine):
    ended = threading.Semaphore(0)
    stream = engine.submit(request("unread", prompt(9)))
    stream.call_at_end(ended.release)
    assert ended.acquire(timeout=60)
    stream.call_at_end(ended.release)  # after the end: at once
    assert ended.acquire(timeout=0)
    assert get_tokens(read_events(stream)) == EXPECTED
    assert not ended.acquire(timeout=0)


def test_a_request_is_cancelled_if_too_many_events_wait_for_its_reader(engine):
    stream, ended = engine.submit(build_long_request("slow reader")), threading.Event()
    stream.limit_buffer(50)
    stream.call_at_end(ended.set)
    assert ended.wait(30)
    events = read_events(stream)
    assert 50 < len(events) < 500
    assert isinstance(events[-1].error, Cancelled)
    assert "more than 50 tokens were waiting" in str(events[-1].error)


def test_the_events_of_a_request_arrive_in_order(engine):
    events = read_events(engine.submit(request("one", prompt(150), max_tokens=20)))
    progress = [event.computed_entries for event in events if isinstance(event, PrefillProgress)]
    assert len(progress) > 1
    assert progress == sorted(progress)
    assert get_tokens(events) == reference(FakeEngineFactory(), prompt(150), max_tokens=20)
    assert events[-1].usage.generated_tokens == len(get_tokens(events))


@pytest.mark.native
@both_hosts
def test_a_real_model_generates_the_expected_tokens(host):
    with host(hosts.build_spec()) as engine:
        events = read_events(engine.submit(request("one", [60], max_tokens=20)))
    expected = [60]
    for _ in range(20):
        expected.append(models.get_successor(expected[-1]))
    assert get_tokens(events) == expected[1:]


def test_thirty_two_threads_get_their_own_tokens(engine):
    expected = {length: reference(FakeEngineFactory(), prompt(length, length)) for length in range(5, 15)}
    wrong = []

    def ask(number: int) -> None:
        for turn in range(3):
            length = 5 + (number + turn) % 10
            tokens = get_tokens(read_events(engine.submit(request(f"{number}-{turn}", prompt(length, length)))))
            if tokens != expected[length]:
                wrong.append((number, turn, tokens))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_asyncio_tasks_get_their_own_tokens(engine):
    async def ask(length: int) -> list[int]:
        stream = engine.submit(request(f"task {length}", prompt(length, length)))
        return get_tokens([event async for event in stream])

    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*(ask(length) for length in range(5, 25)))

    tokens = asyncio.run(ask_all())
    assert tokens == [reference(FakeEngineFactory(), prompt(length, length)) for length in range(5, 25)]


def test_waiting_for_a_token_does_not_block_the_event_loop(slow):
    async def ask() -> AfterglowError:
        stream = slow.submit(build_long_request("one"))
        asyncio.get_running_loop().call_later(0.05, stream.cancel)
        return [event async for event in stream][-1].error

    assert isinstance(asyncio.run(ask()), Cancelled)


def test_unread_streams_do_not_block_other_requests(engine):
    unread = [engine.submit(request(f"unread {n}", prompt(5), max_tokens=300, ignore_eos=True)) for n in range(3)]
    for turn in range(5):
        assert get_tokens(read_events(engine.submit(request(f"read {turn}", prompt(9))))) == reference(
            FakeEngineFactory(), prompt(9)
        )
    assert wait_until_idle(engine)
    for stream in unread:
        assert len(get_tokens(read_events(stream))) == 300


@both_hosts
def test_a_prompt_of_a_hundred_thousand_entries_is_served(host):
    with host(
        FakeEngineFactory(CountingBackend, options={"cells_per_sequence": 200_000, "batch_cells": 50_000})
    ) as engine:
        events = read_events(engine.submit(request("one", [7] * 100_000, max_tokens=2, ignore_eos=True)))
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.prompt_tokens == 100_000


# --- rejected requests


@pytest.mark.parametrize(
    ("invalid", "expected"),
    [
        ({"entries": [1] * 2000}, PromptTooLong(2000, 1024)),
        ({"entries": []}, InvalidArgument("entries", "must be at least one")),
        ({"entries": [1], "sequence": 8}, InvalidArgument("sequence", "must be from 0 to 7")),
    ],
)
def test_an_invalid_request_gets_its_error_as_its_only_event(engine, invalid, expected):
    (event,) = read_events(engine.submit(Request(id="invalid", **invalid)))
    assert isinstance(event, Failed)
    assert (type(event.error), event.error.args) == (type(expected), expected.args)


@pytest.mark.parametrize("entries", [["word"], [None], [-5], 7, [2**70]])
def test_invalid_entries_fail_only_their_own_request(engine, entries):
    valid = engine.submit(request("valid", prompt(9)))
    error = read_error(engine.submit(Request(id="invalid", entries=entries)))
    assert isinstance(error, InvalidArgument)
    assert get_tokens(read_events(valid)) == EXPECTED


def test_a_second_request_with_the_same_id_is_rejected_and_the_first_continues(engine):
    first = engine.submit(request("same", prompt(9), max_tokens=30, ignore_eos=True))
    error = read_error(engine.submit(request("same", prompt(5))))
    assert isinstance(error, InvalidArgument)
    assert error.name == "id"
    assert get_tokens(read_events(first)) == reference(FakeEngineFactory(), prompt(9), max_tokens=30, ignore_eos=True)
    assert get_tokens(read_events(engine.submit(request("same", prompt(9))))) == reference(
        FakeEngineFactory(), prompt(9)
    )


def test_cancelling_a_rejected_request_does_not_cancel_the_one_with_the_same_id(engine):
    first = engine.submit(request("same", prompt(9), max_tokens=30, ignore_eos=True))
    engine.submit(request("same", prompt(5))).cancel()
    assert len(get_tokens(read_events(first))) == 30


# --- cancellation


@pytest.mark.parametrize("entries", [10, 500], ids=["decode", "prefill"])
def test_a_cancel_interrupts_a_decode(slow, entries):
    stream = slow.submit(request("one", prompt(entries)))
    time.sleep(0.1)
    started = time.monotonic()
    stream.cancel()
    assert isinstance(read_error(stream), Cancelled)
    assert time.monotonic() - started < 60
    assert wait_until_idle(slow)


@pytest.mark.native
@both_hosts
def test_a_cancel_interrupts_a_long_native_decode(host):
    spec, long_request = hosts.build_long_decode()
    with host(spec) as engine:
        stream = engine.submit(long_request)
        time.sleep(0.5)
        started = time.monotonic()
        stream.cancel()
        assert isinstance(read_error(stream), Cancelled)
        assert time.monotonic() - started < 60


def test_a_cancel_ends_a_request_between_tokens(engine):
    stream = engine.submit(build_long_request("one"))
    events = skip_to_first_token(stream)
    stream.cancel()
    *_, end = events
    assert isinstance(end, Failed)
    assert isinstance(end.error, Cancelled)
    assert 0 < end.usage.generated_tokens < 1000


def test_requests_of_which_one_has_a_duplicate_id_are_rejected_together(engine):
    """None of them is registered, so each id can be used again."""
    with pytest.raises(InvalidArgument, match="already in use"):
        engine.submit_together([request("first", prompt(9)), request("twice", prompt(9)), request("twice", prompt(9))])
    streams = engine.submit_together([request("first", prompt(9)), request("twice", prompt(9))])
    assert [get_tokens(read_events(stream)) for stream in streams] == [EXPECTED, EXPECTED]


def test_a_waiting_request_can_be_cancelled(slow):
    running, waiting = slow.submit(build_long_request("running")), slow.submit(build_long_request("waiting"))
    time.sleep(0.1)
    waiting.cancel()
    running.cancel()
    assert isinstance(read_error(waiting), Cancelled)
    assert isinstance(read_error(running), Cancelled)


def test_an_early_cancel_is_never_lost(engine):
    """It may overtake its request."""
    running = engine.submit(build_long_request("running"))
    for number in range(100):
        stream = engine.submit(build_long_request(f"short-lived {number}"))
        stream.cancel()
        assert isinstance(read_error(stream), Cancelled)
    running.cancel()
    assert isinstance(read_error(running), Cancelled)


def test_cancelling_an_unknown_id_has_no_effect(engine):
    engine.cancel("unknown")
    engine.cancel("later")
    assert get_tokens(read_events(engine.submit(request("later", prompt(9))))) == reference(
        FakeEngineFactory(), prompt(9)
    )


def test_a_late_cancel_does_not_cancel_the_next_request_with_the_same_id(engine):
    for _ in range(50):
        old = engine.submit(request("same", prompt(5), max_tokens=1))
        assert wait_until_idle(engine)
        new = engine.submit(request("same", prompt(5), max_tokens=1))
        old.cancel()
        assert isinstance(read_events(new)[-1], Finished)
        assert isinstance(read_events(old)[-1], Finished)


def test_a_cancel_event_ends_a_request(slow):
    cancel_event = threading.Event()
    threading.Timer(0.1, cancel_event.set).start()
    stream = slow.submit(build_long_request("one"))
    *_, end = stream.iterate_until(cancel_event)
    assert isinstance(end.error, Cancelled)


@pytest.mark.parametrize("cancel_event", [None, threading.Event()], ids=["plain", "with cancel event"])
def test_leaving_the_iteration_cancels_the_request(engine, cancel_event):
    stream = engine.submit(build_long_request("one"))
    for event in stream.iterate_until(cancel_event):
        if isinstance(event, Token):
            break
    assert wait_until_idle(engine)
    assert isinstance(list(stream)[-1].error, Cancelled)


def test_leaving_an_async_iteration_cancels_the_request(engine):
    async def leave(stream: EventStream) -> None:
        async for event in stream:
            if isinstance(event, Token):
                break
        assert await asyncio.to_thread(wait_until_idle, engine)

    stream = engine.submit(build_long_request("one"))
    asyncio.run(leave(stream))
    assert isinstance(read_error(stream), Cancelled)


def test_cancelling_a_task_cancels_its_request(slow):
    async def consume(stream: EventStream) -> None:
        async for _ in stream:
            pass

    async def cancel(stream: EventStream) -> None:
        task = asyncio.create_task(consume(stream))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    stream = slow.submit(build_long_request("one"))
    asyncio.run(cancel(stream))
    assert isinstance(read_error(stream), Cancelled)


def test_closing_the_event_loop_of_a_reader_cancels_its_request(engine):
    """The coroutine never runs again, so the next event has no reader."""
    stream, events = engine.submit(build_long_request("one")), []

    async def consume() -> None:
        async for event in stream:
            events.append(event)

    loop = asyncio.new_event_loop()
    coroutine = consume()
    task = loop.create_task(coroutine)
    while len(events) < 3:
        loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    assert isinstance(read_error(stream), Cancelled)
    task._log_destroy_pending = False  # asyncio would warn about the pending task
    coroutine.close()
    del task
    gc.collect()


# --- calls


def test_a_call_returns_what_the_function_returns(engine):
    assert engine.call(engine_factories.is_busy) is False
    assert engine.call(engine_factories.get_decode_count) > 0


@pytest.mark.parametrize("expected", [ZeroDivisionError("by zero"), PromptTooLong(5, 4), SystemExit(3)])
def test_a_call_raises_what_the_function_raises(engine, expected):
    with pytest.raises(type(expected)) as caught:
        engine.call(Raise(expected))
    assert caught.value.args == expected.args
    assert engine.call(engine_factories.is_busy) is False


def test_calls_run_between_the_steps_of_running_requests(engine):
    events = skip_to_first_token(engine.submit(build_long_request("one")))
    assert engine.call(engine_factories.is_busy) is True
    assert isinstance(next(events), Token)


@both_hosts
def test_the_engine_continues_while_a_call_waits_for_its_future(host, monkeypatch):
    monkeypatch.setattr(engine_factories, "LATER", Future())
    with host(FakeEngineFactory()) as engine, ThreadPoolExecutor(1) as pool:
        result = pool.submit(engine.call, engine_factories.compute_later)
        assert get_tokens(read_events(engine.submit(request("one", prompt(9))))) == EXPECTED
        assert not result.done()
        engine.call(engine_factories.complete_later)
        assert result.result(60) == 42


def test_a_call_within_a_call_runs_directly():
    with EngineThread(FakeEngineFactory()) as engine:
        assert engine.call(lambda _: engine.call(engine_factories.is_busy)) is False


# --- start and shutdown


@both_hosts
@pytest.mark.parametrize("expected", [PromptTooLong(5, 4), ZeroDivisionError("by zero")])
def test_the_error_of_a_factory_is_raised_by_the_constructor(host, expected):
    with pytest.raises(type(expected)) as caught:
        host(engine_factories.FactoryAfter(Raise(expected)))
    assert caught.value.args == expected.args


@pytest.mark.native
@both_hosts
def test_a_missing_model_file_is_a_typed_error(host, tmp_path):
    with pytest.raises(ModelNotFound, match="no such file"):
        host(EngineSpec(path=tmp_path / "missing.gguf"))


@both_hosts
def test_close_ends_every_request_during_a_decode(host):
    with host(FakeEngineFactory(pause=600, options={"sequences": 2})) as engine:
        streams = [engine.submit(build_long_request(str(number))) for number in range(5)]
        time.sleep(0.1)
        started = time.monotonic()
    assert time.monotonic() - started < 60  # a process that does not exit by itself is killed after 5 s
    assert all(isinstance(read_error(stream), Closed) for stream in streams)


@both_hosts
def test_a_closed_engine_accepts_nothing(host):
    engine = host(FakeEngineFactory())
    stream = engine.submit(request("one", prompt(5)))
    read_events(stream)
    engine.close()
    engine.close()
    with pytest.raises(Closed):
        engine.submit(request("two", prompt(5)))
    with pytest.raises(Closed):
        engine.call(engine_factories.is_busy)
    engine.cancel("one")
    stream.cancel()


@both_hosts
def test_closing_ends_all_concurrent_callers(host):
    engine = host(FakeEngineFactory(pause=0.01, options={"sequences": 8}))
    ends, stop = [], threading.Event()

    def ask(name: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                ends.append(read_events(engine.submit(request(f"{name}-{number}", prompt(5), max_tokens=2)))[-1])
                engine.call(engine_factories.is_busy)
            except Closed:
                return

    threads = [threading.Thread(target=ask, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    engine.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    stop.set()
    assert {type(end.error) for end in ends if isinstance(end, Failed)} <= {Closed}
    assert any(isinstance(end, Finished) for end in ends)


@both_hosts
def test_a_reader_can_close_its_engine(host):
    engine = host(FakeEngineFactory(pause=0.01))
    stream = engine.submit(build_long_request("one"))
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 3:
            engine.close()
    assert isinstance(events[-1].error, Closed)


def test_a_call_can_close_its_engine():
    engine = EngineThread(FakeEngineFactory())
    stream = engine.submit(build_long_request("one"))
    engine.call(lambda _: engine.close())
    assert isinstance(read_error(stream), Closed)
    engine.close()


@both_hosts
def test_an_engine_bug_fails_every_request(host):
    with host(FakeEngineFactory(CrashingBackend, pause=0.05, options={"sequences": 4})) as engine:
        streams = [engine.submit(build_long_request(str(number))) for number in range(8)]
        for stream in streams:
            crash = read_error(stream)
            assert isinstance(crash, EngineCrashed)
            assert crash.reason == "RuntimeError: the bug"
        if host is EngineThread:
            with pytest.raises(EngineCrashed, match="the bug"):
                engine.submit(request("late", prompt(5)))
            with pytest.raises(EngineCrashed, match="the bug"):
                engine.call(engine_factories.is_busy)
        else:
            assert len(get_tokens(read_events(engine.submit(request("late", prompt(5), max_tokens=3))))) == 3
    with pytest.raises(Closed):
        engine.submit(request("later", prompt(5)))


@both_hosts
def test_starting_and_closing_leaks_no_descriptor_and_no_thread(host):
    with host(FakeEngineFactory()):
        pass  # opens what stays open for the lifetime of the process
    before = len(os.listdir("/dev/fd")), threading.active_count()

    def start_and_close() -> None:
        for _ in range(5 if host is EngineThread else 2):  # fewer processes, because they start more slowly
            with host(FakeEngineFactory()) as engine:
                assert engine.call(engine_factories.is_busy) is False

    threads = [threading.Thread(target=start_and_close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(os.listdir("/dev/fd")), threading.active_count()) == before


# --- separate programs


@pytest.mark.slow
@both_hosts
def test_a_program_that_does_not_close_its_engine_exits_cleanly(host):
    body = """
    import atexit
    atexit.register(lambda: print(list(streams[0])[-1].error))
    streams = [type(engine)(engine_factories.FakeEngineFactory(pause=60)).submit(request("one", prompt(5)))]
    threading.Thread(target=list, args=[stream], daemon=True).start()
    """
    with run_program(host, body) as program:
        code, output, errors = wait_for_exit(program)
    assert (code, errors) == (0, "")
    assert output.endswith("this engine is closed\n")


@pytest.mark.native
@both_hosts
def test_a_program_exits_cleanly_during_a_native_decode(host):
    body = """
    long = engine.submit(hosts.build_long_decode()[1])
    time.sleep(0.5)
    """
    with run_program(host, body, factory="hosts.build_long_decode()[0]") as program:
        code, _, errors = wait_for_exit(program)
    assert (code, errors) == (0, "")


@pytest.mark.slow
@both_hosts
def test_ctrl_c_ends_a_program_and_its_engine(host):
    with run_program(host, "print('ready', flush=True)\nfor _ in stream: pass", start_new_session=True) as program:
        assert read_line(program).isdigit()
        assert read_line(program) == "ready"
        os.killpg(program.pid, signal.SIGINT)  # like a terminal
        code, _, errors = wait_for_exit(program)
    assert code == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.endswith("KeyboardInterrupt\n")


@pytest.mark.slow
@both_hosts
def test_ctrl_c_while_an_engine_starts_leaves_nothing_running(host):
    body = """
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    try:
        type(engine)(engine_factories.FactoryAfter(engine_factories.Sleep(2)))
    except KeyboardInterrupt:
        print("interrupted")
    engine.close()
    """
    with run_program(host, body) as program:
        code, output, errors = wait_for_exit(program)
    assert (code, errors) == (0, "")
    assert output.endswith("interrupted\n")
