"""Aborted decodes, full memory and killed processes on llama.cpp, for every memory kind, KV layout and drafter."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.types.request import Failed
from afterglow.errors import Cancelled, DecodeFailed
from laws.test_engine_on_llama import random_prompt
from support import killed_on_llama
from support.llama_engines import MIN_CELLS, MODELS, ColdContext, abort_decodes, build_spec, fail_decodes
from support.play import LAYOUTS, Answer, ask, check, collect, request

pytestmark = pytest.mark.native

OpenEngine = Callable[..., tuple[Engine, ColdContext]]
every_kind_and_drafter = pytest.mark.parametrize(("kind", "drafter"), MODELS)
every_layout = pytest.mark.parametrize("kv_unified", LAYOUTS, ids=["streams", "unified"])


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    """Return a function that makes an engine and a cold context of its model; closed at the end of the test."""
    with ExitStack() as stack:

        def make(kind: str, drafter: str, **options) -> tuple[Engine, ColdContext]:
            engine = build_spec(kind, drafter, **options)()
            stack.callback(engine.close)
            return engine, ColdContext(engine.backend.context.model)

        yield make


def finish(engine: Engine, answers: dict[str, Answer]) -> None:
    """Step until the engine is idle, and check the positions of every sequence after each step."""
    for _ in range(3000):
        if not engine.is_busy:
            return
        collect(answers, engine)
        check(engine)
    raise AssertionError("the requests do not end")


def abort_and_check(engine: Engine, cold: ColdContext, node_counts: tuple[int, ...]) -> None:
    """Abort decodes, and let others fail, beside idle sequences; check every token of all of them."""
    idle = [random_prompt(60 + 9 * n, 40 + n) for n in range(3)]
    prompts = {str(n): random_prompt(50 + 20 * n, n) for n in range(3)}
    for attempt, nodes in enumerate(node_counts):
        answers = {}
        for entries in idle:
            ask(engine, entries, max_tokens=2, ignore_eos=True)
        for id, entries in prompts.items():
            engine.submit(request(id, entries, max_tokens=16, ignore_eos=True, logprobs=0, use_prefix_cache=False))
        for _ in range(2 + 2 * attempt):
            collect(answers, engine)
        with abort_decodes(engine.backend.context, nodes):
            collect(answers, engine)
        check(engine)
        with fail_decodes(engine, DecodeFailed(-3, "planted")):
            collect(answers, engine)
        finish(engine, answers)
        for id, entries in prompts.items():
            assert len(answers[id].tokens) == 16
            cold.check(entries, answers[id])
        for entries in idle:
            answer = ask(engine, [*entries, 33], max_tokens=2, ignore_eos=True, logprobs=0)
            cold.check([*entries, 33], answer)
    assert engine.counters.interrupted > 0


@every_layout
@every_kind_and_drafter
def test_an_aborted_or_failed_decode_changes_no_token_of_any_sequence(open_engine, kind, drafter, kv_unified):
    """Neither of the requests in the decode, nor of one that waits, nor of idle sequences."""
    engine, cold = open_engine(kind, drafter, kv_unified=kv_unified, sequences=5)
    abort_and_check(engine, cold, (0, 60))
    assert drafter == "ngram" or engine.counters.draft_tokens > 0


@pytest.mark.full
@every_layout
@every_kind_and_drafter
def test_many_aborted_decodes_change_no_token_of_any_sequence(open_engine, kind, drafter, kv_unified):
    engine, cold = open_engine(kind, drafter, kv_unified=kv_unified, sequences=5)
    abort_and_check(engine, cold, (0, 10, 25, 45, 70, 100, 150, 250, 400, 700))


@every_layout
@every_kind_and_drafter
def test_a_cancelled_request_changes_no_token_of_its_neighbours(open_engine, kind, drafter, kv_unified):
    """A recurrent state does not survive an abort, so a decode is aborted only if no other sequence is in it."""
    engine, cold = open_engine(kind, drafter, kv_unified=kv_unified)
    symbols = engine.backend.context._library.symbols
    original, pointer = symbols.llama_decode, engine.backend.context.pointer
    entries = random_prompt(40, 1)
    for neighbours in (1, 0):
        answers: dict[str, Answer] = {}
        if neighbours:
            engine.submit(request("neighbour", entries, max_tokens=25, ignore_eos=True, logprobs=0))
            for _ in range(3):
                collect(answers, engine)
        engine.submit(request("cancelled", random_prompt(120, 2 + neighbours), max_tokens=5))
        collect(answers, engine)
        calls = itertools.count()

        def cancel_inside(context, batch, calls=calls):
            if context == pointer and next(calls) == 0:
                engine.cancel("cancelled")  # as another thread does while the decode runs
            return original(context, batch)

        before = engine.counters.interrupted
        symbols.llama_decode = cancel_inside
        try:
            collect(answers, engine)
        finally:
            symbols.llama_decode = original
        finish(engine, answers)
        assert isinstance(answers["cancelled"].end, Failed)
        assert isinstance(answers["cancelled"].end.error, Cancelled)
        assert engine.counters.interrupted == before + (kind in ("attention", "window") or not neighbours)
        if neighbours:
            assert len(answers["neighbour"].tokens) == 25
            cold.check(entries, answers["neighbour"])
    after = ask(engine, [*entries, *answers.get("neighbour", Answer()).tokens, 34], logprobs=0)
    cold.check([*entries, *answers.get("neighbour", Answer()).tokens, 34], after)


@every_layout
@every_kind_and_drafter
def test_full_memory_changes_no_token_and_fails_no_request(open_engine, kind, drafter, kv_unified):
    """Unified: requests are evicted, preempted and resumed. Streams: they end when their stream is full."""
    cells = 2 * MIN_CELLS if kv_unified else 3 * MIN_CELLS
    engine, cold = open_engine(kind, drafter, kv_unified=kv_unified, cells=cells, sequences=3)
    idle = random_prompt(200, 9)
    ask(engine, idle, max_tokens=2)
    prompts = {str(n): random_prompt(165 + 9 * n, 20 + n) for n in range(4)}
    for id, entries in prompts.items():
        engine.submit(request(id, entries, max_tokens=90, ignore_eos=True, logprobs=0))
    answers: dict[str, Answer] = {}
    finish(engine, answers)
    for id, entries in prompts.items():
        free = 90 if kv_unified else min(90, MIN_CELLS - len(entries) + 1)
        assert (answers[id].reason, len(answers[id].tokens)) == ("length", free)
        cold.check(entries, answers[id])
    answer = ask(engine, [*idle, 33], max_tokens=3, logprobs=0)
    cold.check([*idle, 33], answer)
    assert drafter == "ngram" or engine.counters.draft_tokens > 0
    assert (engine.counters.preempted > 0) == (kv_unified and kind != "recurrent")


# --- killed processes


def kill_and_check(folder: Path, kind: str, drafter: str, kv_unified: bool, seed: int) -> int:
    """Kill a process that fills a disk tier; return how many entries the next process reuses from it."""
    command = [sys.executable, killed_on_llama.__file__, str(folder), kind, drafter, str(int(kv_unified)), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        writer.stdout.readline()  # the first prompts were computed
        time.sleep(random.Random(seed).uniform(0.0, 0.2))
        writer.kill()
    engine = killed_on_llama.build(folder, kind, drafter, kv_unified)
    try:
        assert engine.prefix_cache.store.disk_tier is not None
        cold, reused = ColdContext(engine.backend.context.model), 0
        for number in range(killed_on_llama.PROMPTS):
            entries = killed_on_llama.get_prompt(number)
            answer = ask(engine, entries, max_tokens=4, ignore_eos=True, logprobs=0)
            cold.check(entries, answer)
            reused += answer.cached
        assert engine.prefix_cache.store.disk_tier.writer.counters.corrupt_files == 0
        assert engine.prefix_cache.store.disk_tier.counters.hits > 0
        return reused
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "drafter", "kv_unified"),
    [("attention", "mtp", True), ("window", "draft", False), ("recurrent", "ngram", True), ("hybrid", "mtp", False)],
)
def test_a_killed_process_leaves_a_disk_tier_that_changes_no_token(tmp_path, kind, drafter, kv_unified):
    assert kill_and_check(tmp_path / "prefix", kind, drafter, kv_unified, 1) > 0


@pytest.mark.full
@every_layout
@every_kind_and_drafter
def test_many_killed_processes_leave_a_disk_tier_that_changes_no_token(tmp_path, kind, drafter, kv_unified):
    assert sum(kill_and_check(tmp_path / "prefix", kind, drafter, kv_unified, seed) for seed in range(6)) > 0
