"""Adapters change the weights: nothing that was computed with one set of adapters is reused with another."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afterglow.engine.host.build import EngineSpec
from afterglow.engine.inspect import cache, snapshots
from afterglow.engine.types.adapters import Adapter, AdapterSet, LoadedAdapter
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.model import LlamaModel
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from laws.test_engine_on_llama import random_prompt
from support import llama_engines
from support.play import KINDS, LAYOUTS, Answer, ask, fake, play, prompt, request

pytestmark = pytest.mark.slow

SYSTEM, QUESTION = prompt(40, 1), prompt(20, 2)
BOUNDARIES = frozenset({40})
BASE: AdapterSet = ()
A, A_HALF, B, BOTH = (("a", 1.0),), (("a", 0.5),), (("b", 1.0),), (("a", 1.0), ("b", 1.0))
SETS = (BASE, A, A_HALF, B, BOTH)
INVOCATION = (61, 62)  # `prompt` draws no such tokens
X = (("x", 1.0),)
ADAPTERS = {
    "a": LoadedAdapter(digest="file a"),
    "b": LoadedAdapter(digest="file b"),
    "x": LoadedAdapter(digest="file x", invocation_tokens=INVOCATION),
    "y": LoadedAdapter(digest="file y", invocation_tokens=INVOCATION),
}


def build(kind: str, settings: EngineSettings | None = None, **options: object):
    return fake(kind, settings, adapters=ADAPTERS, **options)


def compute_tokens(kind: str, adapters: AdapterSet, entries: list[int]) -> list[int]:
    """Return the tokens of an engine that has computed nothing else."""
    return ask(build(kind), entries, adapters=adapters).tokens


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_sequence_and_its_checkpoints_are_reused_only_with_the_same_adapters(kind, kv_unified):
    engine = build(kind, kv_unified=kv_unified, sequences=12)
    results = set()
    for round_number in range(2):
        for adapters in SETS:
            answer = ask(engine, SYSTEM + QUESTION, boundaries=BOUNDARIES, adapters=adapters)
            assert answer.tokens == compute_tokens(kind, adapters, SYSTEM + QUESTION)
            assert (answer.cached >= 40) == (round_number == 1)
            forked = ask(engine, SYSTEM + prompt(9, 3), boundaries=BOUNDARIES, adapters=adapters)
            assert forked.tokens == compute_tokens(kind, adapters, SYSTEM + prompt(9, 3))
            assert forked.cached >= 40
            results.add(tuple(answer.tokens))
    assert len(results) == len(SETS)


@pytest.mark.parametrize("kind", KINDS)
def test_concurrent_requests_with_different_adapters_never_share_a_decode(kind):
    engine = build(kind, sequences=8)
    requests = [
        request(f"{number} {adapters}", SYSTEM + prompt(12, number), adapters=adapters, boundaries=BOUNDARIES)
        for number in range(2)
        for adapters in (BASE, A, B)
    ]
    answers = play(engine, *requests)  # the fake backend refuses a decode with two sets
    for made in requests:
        assert answers[made.id].tokens == compute_tokens(kind, made.adapters, list(made.entries)), made.id
    assert set(engine.backend.adapter_history) == {BASE, A, B}
    assert max(len(spans) for spans in engine.backend.decode_history) == 2  # those with the same set do share decodes
    assert engine.counters.coalesced == 3  # the second request of each set waits for the prefix of the first


@pytest.mark.parametrize("tier", ["ram", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_stored_state_is_loaded_only_with_the_same_adapters(kind, tier):
    with tempfile.TemporaryDirectory() as directory:
        settings = EngineSettings(block_size=8, disk_cache_directory=Path(directory) if tier == "disk" else None)
        engine = build(kind, settings, sequences=1)
        for adapters in (BASE, A):
            assert ask(engine, SYSTEM + QUESTION, boundaries=BOUNDARIES, adapters=adapters).cached == 0
            ask(engine, prompt(30, 7))  # evicts the only sequence, which is stored
        names = {"a": "a", "b": "b"}
        if tier == "disk":  # after a restart the adapter is found by its content, under any name
            engine.close()
            names = {"a": "renamed", "b": "a"}
            renamed = {names[name]: ADAPTERS[name] for name in names}
            engine = fake(kind, settings, sequences=1, adapters=renamed)
        for adapters in (B, A, BASE, A_HALF):
            used = tuple((names[name], scale) for name, scale in adapters)
            answer = ask(engine, SYSTEM + QUESTION, boundaries=BOUNDARIES, adapters=used)
            assert answer.tokens == compute_tokens(kind, adapters, SYSTEM + QUESTION)
            assert (answer.cached >= 40) == (adapters in (BASE, A))
            ask(engine, prompt(30, 7))
        engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_and_a_pin_belong_to_their_adapters(kind):
    engine = build(kind)
    ask(engine, SYSTEM, adapters=A, max_tokens=1)
    saved = snapshots.save(engine)
    cache.pin(engine, SYSTEM, adapters=A)
    assert not cache.unpin(engine, SYSTEM)
    assert cache.unpin(engine, SYSTEM, adapters=A)
    other = build(kind)
    snapshots.load(other, saved)
    for adapters in (BASE, A):
        answer = ask(other, SYSTEM + QUESTION, adapters=adapters)
        assert answer.tokens == compute_tokens(kind, adapters, SYSTEM + QUESTION)
        assert answer.cached == (40 if adapters == A else 0)


def test_sets_take_turns_so_that_none_starves():
    engine = build("attention", sequences=8)
    play(
        engine,
        *[request(f"base {number}", prompt(9, number), max_tokens=40, ignore_eos=True) for number in range(6)],
        request("a", prompt(9, 10), max_tokens=40, ignore_eos=True, adapters=A),
        request("b", prompt(9, 11), max_tokens=40, ignore_eos=True, adapters=B),
    )
    history = engine.backend.adapter_history
    for adapters in (BASE, A, B):
        turns = [index for index, used in enumerate(history) if used == adapters]
        assert turns[0] < 3
        assert max(later - earlier for earlier, later in itertools.pairwise(turns)) <= 3


def test_new_requests_of_one_set_do_not_starve_another():
    engine = build("attention", sequences=3)
    engine.submit(request("a", prompt(9, 0), max_tokens=20, ignore_eos=True, adapters=A))
    for step in range(60):
        engine.submit(request(f"base {step}", prompt(9, step + 1), max_tokens=1))
        engine.step()
    assert engine.backend.adapter_history.count(A) >= 20


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_preemption_eviction_and_speculation_change_no_token_of_any_set(kind, kv_unified):
    settings = EngineSettings(speculation=3, block_size=8, ram_cache_bytes=2_000_000)
    cells = {"cells_per_sequence": 120, "total_cells": 150 if kv_unified else None}
    engine = build(kind, settings, kv_unified=kv_unified, sequences=4, **cells)
    random = np.random.default_rng(7)
    requests = []
    for number in range(24):
        entries = SYSTEM[: int(random.integers(1, 41))] + prompt(int(random.integers(1, 20)), int(random.integers(4)))
        if number % 3 == 0:
            entries = [*entries, *INVOCATION, *prompt(12, int(random.integers(3)))]
        adapters = (*SETS, X, (("a", 1.0), ("x", 1.0)))[int(random.integers(7))]
        requests.append(
            request(str(number), entries, adapters=adapters, boundaries=frozenset({int(random.integers(1, 40))}))
        )
    answers: dict[str, Answer] = {}
    requests += [replace(made, id=f"{made.id} again") for made in requests]  # drafts are what followed the first time
    for start in range(0, len(requests), 8):
        answers |= play(engine, *requests[start : start + 8])
    for made in requests:
        assert answers[made.id].tokens == compute_tokens(kind, made.adapters, list(made.entries)), made.id
    assert sum(answer.cached for answer in answers.values()) > 200
    assert engine.counters.draft_tokens > 0
    assert (engine.counters.preempted > 0) == (kv_unified and kind != "recurrent")


def test_an_unknown_adapter_is_refused():
    engine = build("attention")
    with pytest.raises(InvalidArgument, match="'styel' is not an adapter of this model, which has a, b, x, y"):
        engine.submit(request("1", SYSTEM, adapters=(("styel", 1.0),)))
    assert not engine.is_busy


# --- activated adapters


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_activated_adapter_shares_the_prefix_before_its_invocation_with_the_base(kind, kv_unified):
    engine = build(kind, kv_unified=kv_unified, sequences=8)
    invoked = [*SYSTEM, *INVOCATION, *QUESTION, *QUESTION]
    ask(engine, SYSTEM + prompt(5, 9), boundaries=BOUNDARIES)
    cold = compute_tokens(kind, X, invoked)
    for round_number in range(2):
        answer = ask(engine, invoked, adapters=X, boundaries=frozenset({75}))
        assert answer.tokens == cold
        assert answer.cached == 40 if round_number == 0 else answer.cached >= 75
    assert cold != compute_tokens(kind, BASE, invoked)
    base = ask(engine, invoked)  # what the adapter has computed is not used without it
    assert base.tokens == compute_tokens(kind, BASE, invoked)
    assert base.cached == 40


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_reuses_what_an_activated_request_has_computed_before_its_invocation(kind):
    engine = build(kind)
    assert ask(engine, [*SYSTEM, *INVOCATION, *QUESTION], adapters=X).cached == 0
    answer = ask(engine, SYSTEM + QUESTION)
    assert answer.tokens == compute_tokens(kind, BASE, SYSTEM + QUESTION)
    assert answer.cached == 40


@pytest.mark.parametrize("tier", ["ram", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_stored_state_of_an_activated_adapter_is_not_confused_with_that_of_the_base(kind, tier):
    with tempfile.TemporaryDirectory() as directory:
        settings = EngineSettings(block_size=8, disk_cache_directory=Path(directory) if tier == "disk" else None)
        invoked = [*SYSTEM, *INVOCATION, *QUESTION, *INVOCATION, *QUESTION]
        first_only = [*SYSTEM, *INVOCATION, *QUESTION]
        engine = build(kind, settings, sequences=1)
        for entries, adapters in ((invoked, X), (invoked, BASE), (first_only, X)):
            ask(engine, entries, boundaries=BOUNDARIES, adapters=adapters)
            ask(engine, prompt(30, 7))
        if tier == "disk":
            engine.close()
            engine = build(kind, settings, sequences=1)
        for entries, adapters in ((invoked, BASE), (invoked, X), (first_only, X), (first_only, (("y", 1.0),))):
            answer = ask(engine, entries, boundaries=BOUNDARIES, adapters=adapters)
            assert answer.tokens == compute_tokens(kind, adapters, entries)
            assert answer.cached >= 40
            ask(engine, prompt(30, 7))
        engine.close()


def test_without_its_invocation_an_activated_adapter_is_not_active():
    engine = build("attention")
    ask(engine, SYSTEM + QUESTION)
    answer = ask(engine, SYSTEM + QUESTION, adapters=X)
    assert answer.tokens == compute_tokens("attention", BASE, SYSTEM + QUESTION)
    assert answer.cached == 60


@pytest.mark.parametrize("kind", KINDS)
def test_an_activated_adapter_adds_to_plain_ones(kind):
    engine = build(kind)
    invoked = [*SYSTEM, *INVOCATION, *QUESTION]
    both = (("a", 1.0), ("x", 1.0))
    ask(engine, SYSTEM + QUESTION, adapters=A, boundaries=BOUNDARIES)
    answer = ask(engine, invoked, adapters=both)
    assert answer.cached == 40
    assert answer.tokens == compute_tokens(kind, both, invoked)
    assert len({tuple(compute_tokens(kind, adapters, invoked)) for adapters in (BASE, A, X, both)}) == 4


def test_two_activated_adapters_are_refused():
    with pytest.raises(InvalidArgument, match="may have one activated adapter, not 'x' and 'y'"):
        build("attention").submit(request("1", SYSTEM, adapters=(("x", 1.0), ("y", 1.0))))


# --- llama.cpp


def build_spec(kind: str, settings: EngineSettings) -> EngineSpec:
    return EngineSpec(
        path=models.get_path(kind),
        context_settings=ContextSettings(cells=4096, sequences=8, batch=64, threads=1),
        engine_settings=settings,
        adapters=tuple(
            Adapter(name=name, path=models.get_path(f"adapter-{kind}-{name}")) for name in ("a", "b", "c", "activated")
        ),
        trust=True,
    )


LLAMA_SETS: Sequence[AdapterSet] = (
    BASE,
    A,
    B,
    (("c", 1.0),),
    A_HALF,
    (("a", 0.5), ("c", 0.8)),
    (("activated", 1.0),),
)


@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
def test_warm_equals_cold_to_the_last_bit_with_interleaved_adapters(kind):
    settings = EngineSettings(speculation="off", deterministic=True, grid=16)
    first_byte = 9  # of the vocabulary of the tiny models
    invocation = [first_byte + byte for byte in models.INVOCATION_TEXT.encode()]
    system = random_prompt(48, 1)
    turns = [[*system, *random_prompt(10, 2), *invocation, *random_prompt(20, 3)], [*system, *random_prompt(25, 4)]]

    def build_requests(adapters: AdapterSet) -> list[Request]:
        return [
            request(f"{adapters} {number}", entries, adapters=adapters, logprobs=0, boundaries=frozenset({48}))
            for number, entries in enumerate(turns)
        ]

    cold: dict[str, Answer] = {}
    with closing(build_spec(kind, settings)()) as engine:
        for adapters in LLAMA_SETS:
            for made in build_requests(adapters):
                cold |= play(engine, made)
                cache.clear(engine)
    requests = [made for adapters in LLAMA_SETS for made in build_requests(adapters)]
    with closing(build_spec(kind, settings)()) as engine:
        for round_number in range(2):
            warm = play(engine, *requests)
            for made in requests:
                assert warm[made.id].tokens == cold[made.id].tokens, made.id
                assert warm[made.id].logprobs == cold[made.id].logprobs, made.id
            computed = {name: answer.end.usage.prompt_tokens - answer.cached for name, answer in warm.items()}
            if round_number == 0:
                # Every set computes the system prompt once. The activated adapter uses that of the base.
                by_set = [computed[f"{adapters} 0"] + computed[f"{adapters} 1"] for adapters in LLAMA_SETS]
                whole = len(turns[0]) + len(turns[1])
                assert by_set[:-1] == [whole - 48] * (len(LLAMA_SETS) - 1)
                assert by_set[-1] <= whole - 48 - 48
            else:
                assert all(count <= 32 for count in computed.values()), computed
    assert len({tuple(answer.logprobs) for answer in cold.values()}) == 2 * len(LLAMA_SETS) - 1  # one is not invoked


@pytest.mark.native
@pytest.mark.parametrize(("kind", "drafter"), [("attention", "draft"), ("hybrid", "mtp")])
def test_drafts_without_adapters_change_no_token_of_a_request_with_adapters(kind, drafter):
    adapter = Adapter(name="a", path=models.get_path(f"adapter-{kind}-a"))
    spec = replace(llama_engines.build_spec(kind, drafter, kv_unified=False), adapters=(adapter,), trust=True)
    with closing(spec()) as engine, closing(LlamaModel.load(spec.path, trust=True)) as model:
        cold = llama_engines.ColdContext(model)
        cold.context.set_adapters({LoraAdapter.load(model, adapter.path, trust=True): 1.0})
        for _ in range(2):
            requests = [request(str(seed), random_prompt(40, seed), adapters=A, logprobs=0) for seed in range(3)]
            beside = request("base", random_prompt(40, 0), logprobs=0)
            answers = play(engine, *requests, beside)
            for made in requests:
                cold.check(list(made.entries), answers[made.id])
        assert engine.counters.draft_tokens > 0
