"""One engine for many: in a thread of this process or in a process of its own, it is the same to whoever asks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

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
from support.engine_factories import Blank, Broken, Fake, Raise
from support.hosts import Host, error, finish, first_token, idle, line, long, program, read, tokens
from support.play import prompt, reference, request

HOSTS = (EngineThread, EngineProcess)
pytestmark = pytest.mark.timeout(60)
both = pytest.mark.parametrize("host", HOSTS)


@pytest.fixture(scope="module", params=HOSTS)
def engine(request) -> Iterator[Host]:
    """An engine that serves one test after the other, whatever they do to it."""
    with request.param(Fake(pause=0.002, options={"sequences": 8})) as engine:
        yield engine
        assert getattr(engine, "restarts", 0) == 0


@pytest.fixture(scope="module", params=HOSTS)
def slow(request) -> Iterator[Host]:
    """An engine with one sequence, whose decodes take a minute unless they are interrupted."""
    with request.param(Fake(pause=60, options={"sequences": 1})) as engine:
        yield engine


# --- answers


def test_the_events_of_an_answer_come_in_order(engine):
    events = read(engine.submit(request("one", prompt(150), max_tokens=20)))
    progress = [event.computed_entries for event in events if isinstance(event, PrefillProgress)]
    assert len(progress) > 1
    assert progress == sorted(progress)
    assert tokens(events) == reference(Fake(), prompt(150), max_tokens=20)
    assert events[-1].usage.generated_tokens == len(tokens(events))


@both
def test_a_real_model_answers_as_it_must(host):
    with host(hosts.llama()) as engine:
        events = read(engine.submit(request("one", [60], max_tokens=20)))
    expected = [60]
    for _ in range(20):
        expected.append(models.get_successor(expected[-1]))
    assert tokens(events) == expected[1:]


def test_thirty_two_threads_get_each_their_own_answers(engine):
    expected = {length: reference(Fake(), prompt(length, length)) for length in range(5, 15)}
    wrong = []

    def ask(number: int) -> None:
        for turn in range(3):
            length = 5 + (number + turn) % 10
            answer = tokens(read(engine.submit(request(f"{number}-{turn}", prompt(length, length)))))
            if answer != expected[length]:
                wrong.append((number, turn, answer))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_asyncio_tasks_get_each_their_own_answers(engine):
    async def ask(length: int) -> list[int]:
        stream = engine.submit(request(f"task {length}", prompt(length, length)))
        return tokens([event async for event in stream])

    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*(ask(length) for length in range(5, 25)))

    answers = asyncio.run(ask_all())
    assert answers == [reference(Fake(), prompt(length, length)) for length in range(5, 25)]


def test_asyncio_goes_on_while_it_waits_for_a_token(slow):
    async def ask() -> AfterglowError:
        stream = slow.submit(long("one"))
        asyncio.get_running_loop().call_later(0.05, stream.cancel)
        return [event async for event in stream][-1].error

    assert isinstance(asyncio.run(ask()), Cancelled)


def test_an_answer_nobody_reads_holds_nobody_up(engine):
    unread = [engine.submit(request(f"unread {n}", prompt(5), max_tokens=300, ignore_ends=True)) for n in range(3)]
    for turn in range(5):
        assert tokens(read(engine.submit(request(f"read {turn}", prompt(9))))) == reference(Fake(), prompt(9))
    assert idle(engine)
    for stream in unread:
        assert len(tokens(read(stream))) == 300


@both
def test_a_prompt_of_a_hundred_thousand_entries_is_served(host):
    with host(Fake(Blank, options={"cells": 200_000, "batch_cells": 50_000})) as engine:
        events = read(engine.submit(request("one", [7] * 100_000, max_tokens=2, ignore_ends=True)))
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.prompt_tokens == 100_000


# --- refusals


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"entries": [1] * 2000}, PromptTooLong(2000, 1024)),
        ({"entries": []}, InvalidArgument("entries", "must be at least one")),
        ({"entries": [1], "sequence": 8}, InvalidArgument("sequence", "must be from 0 to 7")),
    ],
)
def test_what_can_never_be_served_says_so_as_its_only_event(engine, wrong, expected):
    (event,) = read(engine.submit(Request(id="wrong", **wrong)))
    assert isinstance(event, Failed)
    assert (type(event.error), event.error.args) == (type(expected), expected.args)


@pytest.mark.parametrize("garbage", [["word"], [None], [-5], 7, [2**70]])
def test_garbage_is_one_request_s_trouble(engine, garbage):
    neighbour = engine.submit(request("neighbour", prompt(9)))
    refusal = error(engine.submit(Request(id="garbage", entries=garbage)))
    assert isinstance(refusal, InvalidArgument)
    assert tokens(read(neighbour)) == reference(Fake(), prompt(9))


def test_a_second_request_of_the_same_id_is_refused_and_the_first_goes_on(engine):
    first = engine.submit(request("twin", prompt(9), max_tokens=30, ignore_ends=True))
    refusal = error(engine.submit(request("twin", prompt(5))))
    assert isinstance(refusal, InvalidArgument)
    assert refusal.name == "id"
    assert tokens(read(first)) == reference(Fake(), prompt(9), max_tokens=30, ignore_ends=True)
    assert tokens(read(engine.submit(request("twin", prompt(9))))) == reference(Fake(), prompt(9))


def test_cancelling_a_refused_request_leaves_its_twin_alone(engine):
    first = engine.submit(request("twin", prompt(9), max_tokens=30, ignore_ends=True))
    engine.submit(request("twin", prompt(5))).cancel()
    assert len(tokens(read(first))) == 30


# --- cancelling


@pytest.mark.parametrize("entries", [10, 500], ids=["generating", "prompt"])
def test_a_cancel_ends_the_work_in_the_middle_of_a_decode(slow, entries):
    stream = slow.submit(request("one", prompt(entries)))
    time.sleep(0.1)
    started = time.monotonic()
    stream.cancel()
    assert isinstance(error(stream), Cancelled)
    assert time.monotonic() - started < 5
    assert idle(slow)


@both
def test_a_cancel_ends_a_native_decode_of_many_seconds(host):
    recipe, question = hosts.long_decode()
    with host(recipe) as engine:
        stream = engine.submit(question)
        time.sleep(0.5)
        started = time.monotonic()
        stream.cancel()
        assert isinstance(error(stream), Cancelled)
        assert time.monotonic() - started < 3


def test_a_cancel_ends_an_answer_between_its_tokens(engine):
    stream = engine.submit(long("one"))
    events = first_token(stream)
    stream.cancel()
    *_, end = events
    assert isinstance(end, Failed)
    assert isinstance(end.error, Cancelled)
    assert 0 < end.usage.generated_tokens < 1000


def test_a_request_is_cancelled_while_it_waits_for_its_turn(slow):
    running, waiting = slow.submit(long("running")), slow.submit(long("waiting"))
    time.sleep(0.1)
    waiting.cancel()
    running.cancel()
    assert isinstance(error(waiting), Cancelled)
    assert isinstance(error(running), Cancelled)


def test_a_cancel_is_never_lost_on_its_way(engine):
    """It may overtake the request it is for."""
    company = engine.submit(long("company"))
    for number in range(100):
        stream = engine.submit(long(f"short-lived {number}"))
        stream.cancel()
        assert isinstance(error(stream), Cancelled)
    company.cancel()
    assert isinstance(error(company), Cancelled)


def test_a_cancel_of_nobody_changes_nothing(engine):
    engine.cancel("nobody")
    engine.cancel("somebody")
    assert tokens(read(engine.submit(request("somebody", prompt(9))))) == reference(Fake(), prompt(9))


def test_a_cancel_that_comes_too_late_does_not_hit_the_next_of_its_id(engine):
    for _ in range(50):
        old = engine.submit(request("same", prompt(5), max_tokens=1))
        assert idle(engine)
        new = engine.submit(request("same", prompt(5), max_tokens=1))
        old.cancel()
        assert isinstance(read(new)[-1], Finished)
        assert isinstance(read(old)[-1], Finished)


def test_a_flag_ends_an_answer(slow):
    flag = threading.Event()
    threading.Timer(0.1, flag.set).start()
    stream = slow.submit(long("one"))
    (end,) = stream.until(flag)
    assert isinstance(end.error, Cancelled)


@pytest.mark.parametrize("flag", [None, threading.Event()], ids=["plain", "with a flag"])
def test_leaving_a_loop_cancels_the_request(engine, flag):
    stream = engine.submit(long("one"))
    for event in stream.until(flag):
        if isinstance(event, Token):
            break
    assert idle(engine)
    assert isinstance(list(stream)[-1].error, Cancelled)


def test_leaving_an_asynchronous_loop_cancels_the_request(engine):
    async def leave(stream: EventStream) -> None:
        async for event in stream:
            if isinstance(event, Token):
                break
        assert await asyncio.to_thread(idle, engine)

    stream = engine.submit(long("one"))
    asyncio.run(leave(stream))
    assert isinstance(error(stream), Cancelled)


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

    stream = slow.submit(long("one"))
    asyncio.run(cancel(stream))
    assert isinstance(error(stream), Cancelled)


def test_a_loop_that_is_closed_too_early_cancels_its_requests(engine):
    """Nothing of the coroutine runs any more: the next event finds nobody."""
    stream, begun = engine.submit(long("one")), []

    async def consume() -> None:
        async for event in stream:
            begun.append(event)

    loop = asyncio.new_event_loop()
    coroutine = consume()
    task = loop.create_task(coroutine)
    while len(begun) < 3:
        loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    assert isinstance(error(stream), Cancelled)
    task._log_destroy_pending = False  # asyncio would rightly complain about us
    coroutine.close()
    del task
    gc.collect()


# --- calls


def test_a_call_returns_what_the_function_returns(engine):
    assert engine.call(engine_factories.busy) is False
    assert engine.call(engine_factories.decodes) > 0


@pytest.mark.parametrize("expected", [ZeroDivisionError("by zero"), PromptTooLong(5, 4), SystemExit(3)])
def test_a_call_raises_what_the_function_raises(engine, expected):
    with pytest.raises(type(expected)) as caught:
        engine.call(Raise(expected))
    assert caught.value.args == expected.args
    assert engine.call(engine_factories.busy) is False


def test_calls_come_between_the_steps_of_running_answers(engine):
    events = first_token(engine.submit(long("one")))
    assert engine.call(engine_factories.busy) is True
    assert isinstance(next(events), Token)


def test_a_call_within_a_call_is_the_same_call():
    with EngineThread(Fake()) as engine:
        assert engine.call(lambda _: engine.call(engine_factories.busy)) is False


# --- beginning and ending


@both
@pytest.mark.parametrize("expected", [PromptTooLong(5, 4), ZeroDivisionError("by zero")])
def test_what_a_factory_raises_reaches_whoever_wanted_an_engine(host, expected):
    with pytest.raises(type(expected)) as caught:
        host(engine_factories.After(Raise(expected)))
    assert caught.value.args == expected.args


@both
def test_a_model_that_is_not_there_is_a_typed_error(host, tmp_path):
    recipe = hosts.llama()
    with pytest.raises(ModelNotFound, match="no such file"):
        host(type(recipe)(path=tmp_path / "missing.gguf"))


@both
def test_close_ends_every_request_with_closed_in_the_middle_of_a_decode(host):
    with host(Fake(pause=60, options={"sequences": 2})) as engine:
        streams = [engine.submit(long(str(number))) for number in range(5)]
        time.sleep(0.1)
        started = time.monotonic()
    assert time.monotonic() - started < 4  # a process that did not end by itself would be killed after five
    assert all(isinstance(error(stream), Closed) for stream in streams)


@both
def test_after_the_end_nothing_is_accepted(host):
    engine = host(Fake())
    stream = engine.submit(request("one", prompt(5)))
    read(stream)
    engine.close()
    engine.close()
    with pytest.raises(Closed):
        engine.submit(request("two", prompt(5)))
    with pytest.raises(Closed):
        engine.call(engine_factories.busy)
    engine.cancel("one")
    stream.cancel()


@both
def test_nobody_waits_for_an_engine_that_is_closed_meanwhile(host):
    engine = host(Fake(pause=0.01, options={"sequences": 8}))
    ends, stop = [], threading.Event()

    def ask(name: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                ends.append(read(engine.submit(request(f"{name}-{number}", prompt(5), max_tokens=2)))[-1])
                engine.call(engine_factories.busy)
            except Closed:
                return

    threads = [threading.Thread(target=ask, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    engine.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    stop.set()
    assert {type(end.error) for end in ends if isinstance(end, Failed)} <= {Closed}
    assert any(isinstance(end, Finished) for end in ends)


@both
def test_a_reader_may_close_the_engine_it_reads_from(host):
    engine = host(Fake(pause=0.01))
    stream = engine.submit(long("one"))
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 3:
            engine.close()
    assert isinstance(events[-1].error, Closed)


def test_a_call_may_close_its_engine():
    engine = EngineThread(Fake())
    stream = engine.submit(long("one"))
    engine.call(lambda _: engine.close())
    assert isinstance(error(stream), Closed)
    engine.close()


@both
def test_a_bug_in_the_engine_is_an_answer_to_everybody(host):
    with host(Fake(Broken, pause=0.05, options={"sequences": 4})) as engine:
        streams = [engine.submit(long(str(number))) for number in range(8)]
        for stream in streams:
            crash = error(stream)
            assert isinstance(crash, EngineCrashed)
            assert crash.reason == "RuntimeError: the bug"
        if host is EngineThread:
            with pytest.raises(EngineCrashed, match="the bug"):
                engine.submit(request("late", prompt(5)))
            with pytest.raises(EngineCrashed, match="the bug"):
                engine.call(engine_factories.busy)
        else:
            assert len(tokens(read(engine.submit(request("late", prompt(5), max_tokens=3))))) == 3
    with pytest.raises(Closed):
        engine.submit(request("later", prompt(5)))


@both
def test_starting_and_closing_leaves_no_descriptor_and_no_thread(host):
    with host(Fake()):
        pass  # what is opened once and for all
    before = len(os.listdir("/dev/fd")), threading.active_count()

    def live() -> None:
        for _ in range(5 if host is EngineThread else 2):  # a process takes longer to start, and leaks no less
            with host(Fake()) as engine:
                assert engine.call(engine_factories.busy) is False

    threads = [threading.Thread(target=live) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(os.listdir("/dev/fd")), threading.active_count()) == before


# --- a program of its own


@both
def test_a_program_that_forgets_to_close_ends_in_order_all_the_same(host):
    body = """
    import atexit
    atexit.register(lambda: print(list(streams[0])[-1].error))
    streams = [type(engine)(engine_factories.Fake(pause=60)).submit(request("one", prompt(5)))]
    threading.Thread(target=list, args=[stream], daemon=True).start()
    """
    with program(host, body) as running:
        code, output, errors = finish(running)
    assert (code, errors) == (0, "")
    assert output.endswith("this engine is closed\n")


@both
def test_a_program_ends_in_the_middle_of_a_native_decode(host):
    body = """
    long = engine.submit(hosts.long_decode()[1])
    time.sleep(0.5)
    """
    with program(host, body, make="hosts.long_decode()[0]") as running:
        code, _, errors = finish(running)
    assert (code, errors) == (0, "")


@both
def test_ctrl_c_ends_a_program_and_its_engine(host):
    with program(host, "print('ready', flush=True)\nfor _ in stream: pass", start_new_session=True) as running:
        assert line(running).isdigit()
        assert line(running) == "ready"
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        code, _, errors = finish(running)
    assert code == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.endswith("KeyboardInterrupt\n")


@both
def test_ctrl_c_while_an_engine_is_being_made_leaves_nothing_running(host):
    body = """
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    try:
        type(engine)(engine_factories.After(engine_factories.Sleep(2)))
    except KeyboardInterrupt:
        print("interrupted")
    engine.close()
    """
    with program(host, body) as running:
        code, output, errors = finish(running)
    assert (code, errors) == (0, "")
    assert output.endswith("interrupted\n")
