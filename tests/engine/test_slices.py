"""Sliced work: when its thread runs, how it ends, and that the state of the engine has one user at a time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from afterglow.engine import slices
from afterglow.engine.inspect import tree
from afterglow.engine.slices import SlicedWork
from afterglow.errors import Closed
from support.play import ask, fake, prompt, request


def count_turns(limit, threads=None):
    for _ in range(limit):
        if threads is not None:
            threads.add(threading.current_thread())
        yield
    return limit


def wait(work, kind, seconds):
    with work.run_meanwhile(kind):
        time.sleep(seconds)


def test_work_runs_on_another_thread_while_the_engine_waits():
    work, threads = SlicedWork(), set()
    future = work.add(count_turns(10, threads))
    with work.run_meanwhile("command"):
        assert future.result(60) == 10
    assert threading.current_thread() not in threads


def test_the_thread_ends_with_the_work():
    work, threads = SlicedWork(), set()
    for _ in range(2):
        future = work.add(count_turns(3, threads))
        with work.run_meanwhile("command"):
            assert future.result(60) == 3
            for thread in threads:
                thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_no_slice_starts_near_the_expected_end_of_a_wait():
    work = SlicedWork()
    ends = []

    def record_turns():
        while True:
            time.sleep(0.001)
            ends.append(time.perf_counter())
            yield

    work.add(record_turns())
    for _ in range(4):
        wait(work, "decode", 0.05)
    ends.clear()
    started = time.perf_counter()
    wait(work, "decode", 2.0)  # much longer than expected
    assert max(ends, default=started) - started < 1.0  # on a busy machine the thread may not run at all
    work.close(Closed("engine"))


def test_waits_that_are_too_short_for_a_slice_do_not_lend_the_state(monkeypatch):
    monkeypatch.setattr(slices, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    work = SlicedWork()
    future = work.add(count_turns(3))
    for _ in range(5):
        wait(work, "logits", 0.0)
    assert work._thread is None
    assert not future.done()


def test_the_engine_thread_runs_a_slice_only_if_none_ran_for_a_while(monkeypatch):
    now = 0.0
    monkeypatch.setattr(slices, "time", SimpleNamespace(perf_counter=lambda: now))
    work, turns = SlicedWork(), []

    def record_turns():
        nonlocal now
        for number in range(4):
            turns.append(number)
            now += 0.001  # longer than a slice
            yield

    work.add(record_turns())
    work.ensure_progress()
    assert turns == []
    now += slices.STALLED_SECONDS
    work.ensure_progress()
    work.ensure_progress()  # a slice ran just now
    assert turns == [0]
    now += slices.STALLED_SECONDS
    work.ensure_progress()
    assert turns == [0, 1]


def test_the_state_is_not_used_by_both_threads():
    work, users = SlicedWork(), []

    def use_state():
        for _ in range(200):
            users.append("work")
            time.sleep(0.0002)
            assert users == ["work"], "the engine uses the state during a turn"
            users.pop()
            yield

    future = work.add(use_state())
    while not future.done():
        wait(work, "decode", 0.003)
        users.append("engine")
        time.sleep(0.0005)
        assert users == ["engine"]
        users.pop()
        work.ensure_progress()
    assert future.exception() is None


def test_closing_fails_the_work_and_ends_the_thread():
    work = SlicedWork()
    future = work.add(count_turns(10**9))
    wait(work, "command", 0.05)
    thread = work._thread
    assert thread is not None
    work.close(Closed("engine"))
    assert not thread.is_alive()
    with pytest.raises(Closed):
        future.result(0)


def test_an_error_in_the_work_is_that_of_its_future():
    work = SlicedWork()

    def fail():
        yield
        raise ValueError("broken")

    first, second = work.add(fail()), work.add(count_turns(2))
    with work.run_meanwhile("command"):
        assert second.result(60) == 2
    with pytest.raises(ValueError, match="broken"):
        first.result(0)


def test_the_tree_is_built_during_a_decode(monkeypatch):
    engine = fake(sequences=4)
    for number in range(3):
        ask(engine, prompt(40, 1) + prompt(20, 10 + number))
    engine.submit(request("busy", prompt(30, 5), max_tokens=100, ignore_eos=True))
    decode = engine.backend.decode

    def decode_natively(spans):
        decode(spans)
        time.sleep(0.05)

    monkeypatch.setattr(engine.backend, "decode", decode_natively)
    monkeypatch.setattr(engine.sliced_work, "ensure_progress", lambda: None)
    future = tree.get_tree(engine)
    while engine.is_busy and not future.done():
        engine.step()
    assert engine.is_busy, "the request ended before the tree"
    assert future.result().unpack().total_nodes >= 4
