"""Adapters change the weights: nothing that was computed with one set of adapters is reused with another."""

from __future__ import annotations

from contextlib import closing

import pytest

from afterglow.engine.host.build import EngineSpec
from afterglow.engine.inspect import cache, snapshots
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from laws.test_engine_on_llama import random_prompt
from support.play import KINDS, LAYOUTS, ask, collect, fake, prompt, request

pytestmark = pytest.mark.slow

SYSTEM, QUESTION = prompt(40, 1), prompt(20, 2)
BOUNDARIES = frozenset({40})


def compute_tokens(kind: str, adapter_key: str, entries: list[int]) -> list[int]:
    engine = fake(kind)
    engine.backend.adapter_key = adapter_key
    return ask(engine, entries).tokens


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_sequence_and_its_checkpoints_are_reused_only_with_the_same_adapters(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, sequences=6)
    for round_number in range(2):
        for key in ("", "a", "b"):
            engine.backend.adapter_key = key
            answer = ask(engine, SYSTEM + QUESTION, boundaries=BOUNDARIES)
            assert answer.tokens == compute_tokens(kind, key, SYSTEM + QUESTION)
            assert (answer.cached >= 40) == (round_number == 1)
            forked = ask(engine, SYSTEM + prompt(9, 3), boundaries=BOUNDARIES)
            assert forked.tokens == compute_tokens(kind, key, SYSTEM + prompt(9, 3))
            assert forked.cached >= 40


@pytest.mark.parametrize("tier", ["ram", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_stored_state_is_loaded_only_with_the_same_adapters(kind, tier, tmp_path):
    settings = EngineSettings(block_size=8, disk_cache_directory=tmp_path / "prefix" if tier == "disk" else None)
    engine = fake(kind, settings, sequences=1)
    for key in ("", "a"):
        engine.backend.adapter_key = key
        assert ask(engine, SYSTEM + QUESTION, boundaries=BOUNDARIES).cached == 0
        ask(engine, prompt(30, 7))  # evicts the only sequence, which is stored
    if tier == "disk":
        engine.close()
        engine = fake(kind, settings, sequences=1)
    for key in ("b", "a", ""):
        engine.backend.adapter_key = key
        answer = ask(engine, SYSTEM + QUESTION, boundaries=BOUNDARIES)
        assert answer.tokens == compute_tokens(kind, key, SYSTEM + QUESTION)
        assert (answer.cached >= 40) == (key != "b")
        ask(engine, prompt(30, 7))
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_was_computed_with_two_sets_of_adapters_is_not_reused(kind):
    engine = fake(kind)
    engine.submit(request("long", SYSTEM + QUESTION, max_tokens=30, ignore_eos=True, boundaries=BOUNDARIES))
    answers = {}
    for _ in range(5):
        collect(answers, engine)
    engine.backend.adapter_key = "a"
    collect(answers, engine)
    assert ask(engine, SYSTEM + QUESTION).tokens == compute_tokens(kind, "a", SYSTEM + QUESTION)
    while engine.is_busy:
        collect(answers, engine)
    entries = SYSTEM + QUESTION + answers["long"].tokens
    for key in ("a", ""):
        engine.backend.adapter_key = key
        answer = ask(engine, entries)
        assert answer.tokens == compute_tokens(kind, key, entries)
        assert answer.cached <= len(SYSTEM + QUESTION)


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_and_a_pin_belong_to_their_adapters(kind):
    engine = fake(kind)
    ask(engine, SYSTEM)
    slot = snapshots.find_latest(engine)
    cache.pin(engine, SYSTEM)
    engine.backend.adapter_key = "a"
    with pytest.raises(InvalidArgument, match="other adapters"):
        snapshots.save(engine, slot)
    assert not cache.unpin(engine, SYSTEM)
    engine.backend.adapter_key = ""
    assert len(snapshots.save(engine, slot).entries) >= len(SYSTEM)
    assert cache.unpin(engine, SYSTEM)


@pytest.mark.native
@pytest.mark.parametrize("kv_unified", LAYOUTS)
def test_an_engine_on_llama_computes_with_the_adapters_that_are_applied(kv_unified):
    spec = EngineSpec(
        path=models.get_path("attention"),
        context_settings=ContextSettings(cells=2048, sequences=3, batch=128, threads=1, kv_unified=kv_unified),
        engine_settings=EngineSettings(speculation="off"),
    )
    entries = random_prompt(100, 1)
    with closing(spec()) as engine, closing(spec()) as cold:
        adapter, other = (
            LoraAdapter.load(made.backend.context.model, models.get_path("adapter"), trust=True)
            for made in (engine, cold)
        )
        logprobs = {}
        for round_number in range(2):
            for scale in (0.0, 1.0, 0.5):
                engine.backend.context.set_adapters({adapter: scale})
                cold.backend.context.set_adapters({other: scale})
                answer = ask(engine, entries, logprobs=0)
                plain = ask(cold, entries, logprobs=0, use_prefix_cache=False)
                assert answer.logprobs == pytest.approx(plain.logprobs, abs=5e-3)
                assert answer.cached == (99 if round_number else 0)
                logprobs[scale] = plain.logprobs[0]
        assert len({round(value, 2) for value in logprobs.values()}) == 3
