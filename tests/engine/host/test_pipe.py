"""Where what an engine's process sends is read: on a thread, or in the event loop of whoever waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time

import pytest

from afterglow.engine.host.listening import MessageListener
from afterglow.engine.host.pipe import MessagePipe
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.types.request import Failed, Token
from afterglow.errors import EngineCrashed
from support.engine_factories import Fake
from support.hosts import read, tokens
from support.play import prompt, reference, request

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def wires():
    ends = socket.socketpair()
    yield [MessagePipe(end) for end in ends]
    for end in ends:
        end.close()


async def ask(engine: EngineProcess, id: str) -> list[int]:
    return [event.token async for event in engine.submit(request(id, prompt(9))) if isinstance(event, Token)]


def test_messages_of_any_size_come_whole_and_in_order(wires):
    ours, theirs = wires
    sent = [("small", number) for number in range(3)] + [("large", b"x" * 5_000_000)] + [("last", None)]
    threading.Thread(target=lambda: [ours.send(message) for message in sent]).start()
    received: list[object] = []
    while len(received) < len(sent):
        received += theirs.receive()
    assert received == sent
    assert theirs.receive(wait=False) == []


def test_what_is_sent_waits_for_room_also_where_the_socket_does_not(wires):
    ours, theirs = wires
    ours._socket.setblocking(False)
    large = ("large", b"x" * 5_000_000)
    threading.Thread(target=ours.send, args=(large,)).start()
    received: list[object] = []
    while not received:
        time.sleep(0.001)
        received += theirs.receive()
    assert received == [large]


def test_half_a_message_holds_nobody_up(wires):
    ours, theirs = wires
    heard: list[object] = []
    ear = MessageListener(theirs, heard.append)
    ours._socket.sendall(b"\x80\x00")
    assert not ear.wait(0.05)
    assert heard == []


def test_in_an_event_loop_no_other_thread_touches_a_message(wires):
    ours, theirs = wires
    threads: list[threading.Thread] = []
    ear = MessageListener(theirs, lambda message: threads.append(threading.current_thread()))

    async def main() -> None:
        ear.attach_event_loop(asyncio.get_running_loop())
        await asyncio.sleep(0)
        for number in range(3):
            ours.send([number])
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert threads == [threading.current_thread()] * 3
    assert ear.wait(0.01) is False  # that it had moved
    assert ear.wait(0.01) is True  # something was heard meanwhile


def test_answers_read_in_an_event_loop_wake_nobody_else(monkeypatch):
    woken: list[object] = []

    async def main(engine: EngineProcess) -> list[int]:
        loop = asyncio.get_running_loop()
        engine.attach_event_loop(loop)
        await ask(engine, "first")  # from now on it is read here
        threadsafe = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *all: woken.append(all) or threadsafe(*all))
        return await ask(engine, "second")

    with EngineProcess(Fake()) as engine:
        assert asyncio.run(main(engine)) == reference(Fake(), prompt(9))
        assert len(woken) <= 1  # the thread may have been waiting for one more
        # The loop is closed: the thread reads again.
        assert tokens(read(engine.submit(request("third", prompt(9))))) == reference(Fake(), prompt(9))
        assert engine.restarts == 0


def test_a_loop_that_is_held_up_is_not_taken_for_a_dead_engine():
    async def main(engine: EngineProcess) -> list[int]:
        engine.attach_event_loop(asyncio.get_running_loop())
        await ask(engine, "first")
        time.sleep(2.5)  # nothing of the child is read in the loop
        return await ask(engine, "second")

    with EngineProcess(Fake(), silence_timeout=1.0) as engine:
        assert asyncio.run(main(engine)) == reference(Fake(), prompt(9))
        assert engine.restarts == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_death_is_noticed_in_an_event_loop_and_the_next_child_is_read_there_too(how):
    async def main(engine: EngineProcess) -> None:
        engine.attach_event_loop(asyncio.get_running_loop())
        await ask(engine, "first")
        stream = engine.submit(request("second", prompt(9), max_tokens=100_000))
        async for event in stream:
            if isinstance(event, Token) and engine.restarts == 0 and engine.pid is not None and not killed:
                killed.append(engine.pid)
                os.kill(engine.pid, how)
        assert isinstance(event, Failed)
        assert isinstance(event.error, EngineCrashed)
        assert await ask(engine, "third") == reference(Fake(), prompt(9))
        assert engine.restarts == 1

    killed: list[int] = []
    with EngineProcess(Fake(), silence_timeout=1.0) as engine:
        asyncio.run(main(engine))
        started = time.monotonic()
    assert time.monotonic() - started < 2.0  # closing does not wait for a loop that is gone
