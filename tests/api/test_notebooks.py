"""Models in notebooks and in programs with several processes: not closed, forked, pickled, shown."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import afterglow
from afterglow import Conversation
from afterglow.errors import UnsupportedOperation, WrongProcess
from afterglow.llama.handle import list_open_handles
from afterglow.testing import models
from support.hosts import wait_until

pytestmark = pytest.mark.native
HOSTS = ("thread", "process")


def load(host: str = "thread", **options: Any) -> afterglow.Model:
    defaults: dict[str, Any] = {"context": 256, "threads": 1, "disk_cache": False}
    return afterglow.load(models.get_path("successor-attention"), host=host, **(defaults | options))  # type: ignore[arg-type]


def run_program(body: str, *arguments: str) -> str:
    """Run a Python program to its end and return what it prints."""
    program = [sys.executable, "-c", textwrap.dedent(body), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- a model that is not closed

RELOADS = """
import gc, sys, threading, time
import psutil
import afterglow

def measure():
    gc.collect()
    for _ in range(200):
        if not any(thread.name == "afterglow-release" for thread in threading.enumerate()):
            break
        time.sleep(0.05)
    return psutil.Process().memory_info().rss

sizes = []
for _ in range(7):
    model = afterglow.load(sys.argv[1], context=2048, threads=1, disk_cache=False, host=sys.argv[2])
    chat = afterglow.Conversation(model, system="Be brief.", max_tokens=4)
    chat.ask("What is the capital of France?")
    sizes.append(measure())
del model, chat
measure()
engines = [child for child in psutil.Process().children() if "afterglow.engine" in " ".join(child.cmdline())]
print(*sizes, len(engines), sum(thread.name == "afterglow-engine" for thread in threading.enumerate()))
"""


@pytest.mark.model
@pytest.mark.parametrize("host", HOSTS)
def test_six_reloads_in_one_process_cost_less_than_a_tenth_of_its_memory(host: str, smollm2: Path) -> None:
    """As in a notebook: each run of a cell replaces the model, and nobody closes the old one."""
    *sizes, engines, threads = map(int, run_program(RELOADS, str(smollm2), host).split())
    assert (engines, threads) == (0, 0)
    assert sizes[-1] < 1.1 * sizes[0], sizes


@pytest.mark.parametrize("host", HOSTS)
def test_a_model_without_references_is_released_at_once(host: str) -> None:
    before = len(list_open_handles())
    gc.disable()  # no cycle keeps it
    try:
        model = load(host)
        Conversation(model, max_tokens=3).ask("hello")
        reference = weakref.ref(model)
        lifecycle = model._lifecycle
        del model
        assert reference() is None
    finally:
        gc.enable()
    assert wait_until(lambda: lifecycle.state == "cold")
    assert wait_until(lambda: len(list_open_handles()) == before)


def test_a_response_keeps_its_model_until_it_is_read() -> None:
    before = len(list_open_handles())
    assert "".join(part.text for part in load().chat("hello", stream=True, max_tokens=9)) == models.CYCLE.decode()[:9]
    assert "".join(load().stream("abc", max_tokens=3)) == "def"
    assert wait_until(lambda: len(list_open_handles()) == before)


def test_a_closed_model_is_not_released_twice() -> None:
    model = load()
    finalizer = model._finalizer
    model.close()
    model.close()
    assert not finalizer.alive


# --- fork

FORK = """
import os, sys, threading
import afterglow
from afterglow.errors import WrongProcess

model = afterglow.load(sys.argv[1], context=256, threads=1, disk_cache=False, host=sys.argv[2])
chat = afterglow.Conversation(model, max_tokens=3)
first = chat.ask("hello").text
stream = model.chat("hello", stream=True, max_tokens=200)
next(iter(stream))
pid = os.fork()
if pid == 0:
    errors = 0
    calls = [
        lambda: model.complete("abc", max_tokens=3), lambda: model.chat("hello", max_tokens=3),
        lambda: chat.ask("hello"), lambda: model.embed("abc"), lambda: model.tokenize("abc"),
        lambda: list(stream), model.get_stats, model.unload, model.clear_cache,
    ]
    for call in calls:
        try:
            call()
        except WrongProcess as error:
            errors += str(os.getppid()) in str(error) and "spawn" in str(error)
    model.close()  # has no effect, like the end of this process
    sys.exit(errors != len(calls))
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(status, model.complete("abc", max_tokens=3).text, model.restarts)
model.close()
"""


@pytest.mark.parametrize("host", HOSTS)
def test_a_model_in_a_fork_raises_and_the_parent_goes_on(host: str) -> None:
    assert run_program(FORK, str(models.get_path("successor-attention")), host).split() == ["0", "def", "0"]


SHARED: list[afterglow.Model] = []


def complete_shared(prompt: str) -> str:
    return SHARED[0].complete(prompt, max_tokens=3).text


@pytest.mark.parametrize("host", HOSTS)
def test_a_worker_of_a_forked_pool_gets_the_error(host: str) -> None:
    with load(host) as model:
        SHARED[:] = [model]
        with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(WrongProcess, match=str(os.getpid())):
            pool.apply(complete_shared, ["abc"])
        SHARED.clear()


# --- pickle

COPIES: dict[str, Callable[[object], object]] = {
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_model_or_conversation_cannot_be_pickled_or_copied(make_copy: Callable[[object], object]) -> None:
    with load() as model:
        with pytest.raises(UnsupportedOperation, match=r"pickling or copying a model is not possible here: .* `load`"):
            make_copy(model)
        with pytest.raises(UnsupportedOperation, match=r"pickling or copying a conversation .* `fork\(\)`"):
            make_copy(Conversation(model))


# --- repr


def test_reprs_are_short() -> None:
    with load(name="tiny") as model:
        assert repr(model) == "<Model 'tiny' active>"
        conversation = Conversation(model, max_tokens=200)
        response = conversation.ask("hello")
        assert repr(conversation) == "<Conversation of 2 messages with <Model 'tiny' active>>"
        assert repr(response).startswith("ChatResponse('abcdef")
        assert repr(response).endswith("…', finish_reason='length')")
        completion = model.complete("abc", max_tokens=100, n=2, temperature=0)
        score = model.logprobs("abc " * 20)
        assert all(len(repr(value)) < 250 for value in (response, completion, score))
        assert (
            repr(model.complete("abc", max_tokens=3)) == "Completion(Choice('def', 3 tokens, finish_reason='length'))"
        )
    assert repr(model) == "<Model 'tiny' cold>"
