"""Message pipe: framing, and reading on a thread or in an event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time

import pytest
import uvloop

from afterglow.engine.host import child_main, process
from afterglow.engine.host.pipe import MessageListener, MessagePipe, Outbox
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.types.request import Failed, Token
from afterglow.errors import EngineCrashed
from support.engine_factories import FakeEngineFactory, ManyThreadsBackend, SlowBackend
from support.hosts import get_tokens, read_events
from support.play import prompt, reference, request

pytestmark = pytest.mark.timeout(60)
EXPECTED = reference(FakeEngineFactory(), prompt(9))  # tokens of the request that most tests submit


@pytest.fixture
def pipes():
    sockets = socket.socketpair()
    yield [MessagePipe(end) for end in sockets]
    for end in sockets:
        end.close()


async def ask(engine: EngineProcess, id: str) -> list[int]:
    """Return the tokens of a request."""
    return [event.token async for event in engine.submit(request(id, prompt(9))) if isinstance(event, Token)]


def test_messages_of_any_size_arrive_complete_and_in_order(pipes):
    parent, child = pipes
    sent = [("small", number) for number in range(3)] + [("large", b"x" * 5_000_000)] + [("last", None)]
    threading.Thread(target=lambda: [parent.send(message) for message in sent]).start()
    received: list[object] = []
    while len(received) < len(sent):
        received += child.receive()
    assert received == sent
    assert child.receive(blocking=False) == []


def test_sending_waits_for_buffer_space_on_a_non_blocking_socket(pipes):
    parent, child = pipes
    parent._socket.setblocking(False)
    large = ("large", b"x" * 5_000_000)
    threading.Thread(target=parent.send, args=(large,)).start()
    received: list[object] = []
    while not received:
        time.sleep(0.001)
        received += child.receive()
    assert received == [large]


def test_messages_that_do_not_fit_into_the_socket_follow_in_order_without_blocking_the_sender(pipes):
    parent, child = pipes
    outbox = Outbox(parent, on_disconnect=lambda: None)
    sent = [("large", b"x" * 5_000_000), *(("small", number) for number in range(100))]
    for message in sent:  # nobody reads yet
        outbox.send(message)
    received: list[object] = []
    while len(received) < len(sent):
        received += child.receive()
    assert received == sent
    outbox.close()
    outbox.join()


def test_a_message_that_fits_is_sent_on_the_thread_of_the_caller(pipes, monkeypatch):
    parent, child = pipes
    monkeypatch.setattr(MessagePipe, "send_bytes", lambda *_: pytest.fail("the sender thread was used"))
    outbox = Outbox(parent, on_disconnect=lambda: None)
    outbox.send(("small", 1))
    assert child.receive() == [("small", 1)]
    outbox.close()
    outbox.join()


def test_a_message_waits_for_those_queued_before_it(pipes, monkeypatch):
    parent, child = pipes
    release, send_bytes = threading.Event(), MessagePipe.send_bytes

    def send_later(pipe: MessagePipe, unsent: memoryview) -> None:
        release.wait()
        send_bytes(pipe, unsent)

    monkeypatch.setattr(MessagePipe, "send_bytes", send_later)
    outbox = Outbox(parent, on_disconnect=lambda: None)
    outbox.put(("first", 1))
    outbox.send(("second", 2))
    release.set()
    received: list[object] = []
    while len(received) < 2:
        received += child.receive()
    assert received == [("first", 1), ("second", 2)]
    outbox.close()
    outbox.join()


def test_a_sender_notices_that_the_other_end_is_closed(pipes):
    parent, child = pipes
    child._socket.close()
    disconnected = threading.Event()
    Outbox(parent, on_disconnect=disconnected.set).send(("lost", 1))
    assert disconnected.wait(5)


@pytest.mark.native
@pytest.mark.parametrize("backend", [SlowBackend, ManyThreadsBackend])
def test_events_arrive_with_and_without_a_spare_core(backend):
    with EngineProcess(FakeEngineFactory(backend), silence_timeout=240.0) as engine:
        assert get_tokens(read_events(engine.submit(request("a", prompt(9))))) == EXPECTED


def test_an_incomplete_message_does_not_block_the_listener(pipes):
    parent, child = pipes
    messages: list[object] = []
    listener = MessageListener(child, messages.append)
    parent._socket.sendall(b"\x80\x00")
    assert not listener.wait(0.05)
    assert messages == []


def test_an_attached_event_loop_reads_all_messages(pipes):
    parent, child = pipes
    threads: list[threading.Thread] = []
    listener = MessageListener(child, lambda message: threads.append(threading.current_thread()))

    async def main() -> None:
        listener.attach_event_loop(asyncio.get_running_loop())
        await asyncio.sleep(0)
        for number in range(3):
            parent.send([number])
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert threads == [threading.current_thread()] * 3
    assert listener.wait(0.01) is False  # woken by the attach
    assert listener.wait(0.01) is True  # the event loop has read


@pytest.mark.native
def test_tokens_read_in_an_event_loop_wake_no_other_thread(monkeypatch):
    wakes: list[object] = []

    async def main(engine: EngineProcess) -> list[int]:
        loop = asyncio.get_running_loop()
        engine.attach_event_loop(loop)
        await ask(engine, "first")  # from now on messages are read here
        call_soon_threadsafe = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *args: wakes.append(args) or call_soon_threadsafe(*args)
        )
        for request_id in ("second", "third", "fourth"):  # on a busy machine, the thread may read a few times more
            wakes.clear()
            tokens = await ask(engine, request_id)
            if len(wakes) <= 1:
                break
        return tokens

    # A long heartbeat: after one without a message, as on a busy machine, the thread reads once.
    monkeypatch.setattr(process, "HEARTBEAT_SECONDS", 5.0)
    with EngineProcess(FakeEngineFactory(), silence_timeout=240.0) as engine:
        assert asyncio.run(main(engine)) == EXPECTED
        assert len(wakes) <= 1  # the thread may have been waiting for one more message
        # The event loop is closed, so the thread reads again.
        assert get_tokens(read_events(engine.submit(request("third", prompt(9))))) == reference(
            FakeEngineFactory(), prompt(9)
        )
        assert engine.restarts == 0


@pytest.mark.native
def test_a_blocked_event_loop_does_not_count_as_silence():
    async def main(engine: EngineProcess) -> list[int]:
        engine.attach_event_loop(asyncio.get_running_loop())
        await ask(engine, "first")
        time.sleep(2.5)  # the event loop reads nothing meanwhile
        return await ask(engine, "second")

    with EngineProcess(FakeEngineFactory(), silence_timeout=1.0) as engine:
        assert asyncio.run(main(engine)) == EXPECTED
        assert engine.restarts == 0


@pytest.mark.native
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_crash_is_detected_in_an_event_loop_and_the_next_child_is_read_there(signal_number):
    async def main(engine: EngineProcess) -> None:
        engine.attach_event_loop(asyncio.get_running_loop())
        await ask(engine, "first")
        stream = engine.submit(request("second", prompt(9), max_tokens=100_000))
        async for event in stream:
            if isinstance(event, Token) and engine.restarts == 0 and engine.pid is not None and not killed_pids:
                killed_pids.append(engine.pid)
                os.kill(engine.pid, signal_number)
        assert isinstance(event, Failed)
        assert isinstance(event.error, EngineCrashed)
        assert await ask(engine, "third") == EXPECTED
        assert engine.restarts == 1

    killed_pids: list[int] = []
    with EngineProcess(FakeEngineFactory(), silence_timeout=1.0) as engine:
        asyncio.run(main(engine))
        started = time.monotonic()
    assert time.monotonic() - started < 60  # closing does not wait for a closed event loop


@pytest.mark.parametrize(("threads", "expected"), [(1, ["send"]), (100_000, ["put"])])
def test_a_child_sends_events_itself_only_if_its_parent_has_a_core(pipes, monkeypatch, threads, expected):
    calls: list[str] = []
    monkeypatch.setattr(child_main, "list_usable_cores", lambda: {0, 1})
    monkeypatch.setattr(child_main.EngineLoop, "run", lambda loop, engine: loop._deliver([Token("a", 1)]))
    monkeypatch.setattr(Outbox, "send", lambda outbox, message: calls.append("send"))
    monkeypatch.setattr(Outbox, "put", lambda outbox, message: message[0] == "events" and calls.append("put"))
    host = child_main.ChildHost(pipes[0])
    backend = SlowBackend if threads == 1 else ManyThreadsBackend
    host._factory.put(child_main.pack("factory", FakeEngineFactory(backend)))
    assert host.run_engine()
    assert calls == expected


@pytest.mark.parametrize("loop_ends_first", [False, True])
def test_the_number_of_a_closed_pipe_can_be_used_by_another_connection(loop_ends_first: bool) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))  # opens what uvloop never closes
    parent_socket, child_socket = socket.socketpair()
    listener = MessageListener(MessagePipe(parent_socket), lambda *message: None)
    before = len(os.listdir("/dev/fd"))

    async def use_number_again() -> None:
        loop = asyncio.get_running_loop()
        listener.attach_event_loop(loop)
        await asyncio.sleep(0)
        if loop_ends_first:
            return
        number = parent_socket.fileno()
        child_socket.close()  # the other end makes the pipe readable
        parent_socket.close()
        left, right = socket.socketpair()
        assert left.fileno() == number
        reader, writer = await asyncio.open_connection(sock=left)
        right.sendall(b"hello")
        assert await asyncio.wait_for(reader.readexactly(5), 30) == b"hello"
        writer.close()
        right.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in the server
        runner.run(use_number_again())
    parent_socket.close()
    child_socket.close()
    listener.release_closed_loops()
    assert len(os.listdir("/dev/fd")) == before - 2, "no descriptor is left"
