"""Law of placement: busy sequences that are made adjacent give the same tokens and lose nothing of the prefix cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.kvcache.placement import count_runs
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.play import KINDS, ask, check, fake, play, prompt, reference, request

SEQUENCES = 8
FIRST, LAST = prompt(40, 1), prompt(30, 2)  # conversations in the first and in the last sequence


def list_runs(engine: Engine) -> list[int]:
    """Return the runs of adjacent sequences of each decode with several sequences."""
    history = engine.backend.decode_history
    return [count_runs([sequence for sequence, _ in spans]) for spans in history if len(spans) > 1]


def make_copies_free(engine: Engine) -> Engine:
    """Let every move pay, whatever this machine measures."""
    engine.prefix_cache.cost_model.estimate_copy_seconds = lambda entries: 0.0  # type: ignore[method-assign]
    return engine


def fill_sequences(engine: Engine, count: int = SEQUENCES) -> list[list[int]]:
    """Hold one conversation in each sequence; return what each holds."""
    prompts = [prompt(20 + 3 * number, 10 + number) for number in range(count)]
    return [[*entries, *ask(engine, entries, sequence=number).tokens] for number, entries in enumerate(prompts)]


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_in_distant_sequences_are_computed_together(kind):
    engine = make_copies_free(fake(kind, sequences=SEQUENCES))
    histories = fill_sequences(engine)
    engine.prefix_cache.discard(engine.prefix_cache.slots[3])  # an empty sequence to exchange others through
    engine.backend.decode_history.clear()
    turns = {number: [*histories[number], *prompt(5, 50 + number)] for number in (0, 4, 7)}
    answers = play(engine, *[request(str(number), turn) for number, turn in turns.items()])
    for number, turn in turns.items():
        assert answers[str(number)].tokens == reference(lambda: fake(kind), turn)
        assert answers[str(number)].cached == len(histories[number]) - 1
    assert engine.counters.moved_sequences >= 2
    assert set(list_runs(engine)) == {1}
    for number in (1, 2, 5, 6):  # those that made room kept what they hold
        assert ask(engine, [*histories[number], 3]).cached == len(histories[number]) - 1
    check(engine)


def test_a_full_cache_evicts_one_idle_sequence_to_exchange_others():
    engine = make_copies_free(fake("attention", sequences=SEQUENCES))
    histories = fill_sequences(engine)
    turns = [[*histories[number], 5, 6, 7] for number in (0, 7)]
    answers = play(engine, *[request(str(number), turn) for number, turn in enumerate(turns)])
    for number, turn in enumerate(turns):
        assert answers[str(number)].tokens == reference(lambda: fake("attention"), turn)
    assert engine.counters.moved_sequences == 1
    misses = [ask(engine, [*history, 3]).cached < len(history) - 1 for history in histories]
    assert sum(misses) <= 1, "only one was evicted"


def test_a_copy_that_costs_more_than_it_gains_is_not_made():
    engine = fake("attention", sequences=SEQUENCES)
    histories = fill_sequences(engine)
    engine.prefix_cache.cost_model.estimate_copy_seconds = lambda entries: 60.0
    play(engine, *[request(str(number), [*histories[number], 5]) for number in (0, 7)])
    assert engine.counters.moved_sequences == 0
    assert 2 in list_runs(engine)


@pytest.mark.parametrize(("on_device", "moves"), [(False, 2), (True, 1)])
def test_the_fewest_copies_are_made_within_a_device_and_the_fewest_entries_copied_elsewhere(on_device, moves):
    engine = make_copies_free(fake("attention", sequences=SEQUENCES))
    engine.backend.capabilities = replace(engine.backend.capabilities, copies_on_device=on_device)
    prompts = [prompt(400 if number == 7 else 20, 10 + number) for number in range(SEQUENCES)]
    histories = [[*entries, *ask(engine, entries, sequence=number).tokens] for number, entries in enumerate(prompts)]
    turns = {number: [*histories[number], 5] for number in (0, 1, 7)}
    answers = play(engine, *[request(str(number), turn) for number, turn in turns.items()])
    for number, turn in turns.items():
        assert answers[str(number)].tokens == reference(lambda: fake("attention"), turn)
    assert engine.counters.moved_sequences == moves


@pytest.mark.parametrize(("length", "moves"), [(1, 0), (20, 1)])
def test_sequences_are_not_moved_within_a_device_for_their_last_token(length, moves):
    engine = fake("attention", sequences=SEQUENCES)
    engine.backend.capabilities = replace(engine.backend.capabilities, copies_on_device=True)
    histories = fill_sequences(engine)
    play(engine, *[request(str(number), [*histories[number], 5], max_tokens=length) for number in (0, 7)])
    assert engine.counters.moved_sequences == moves


def test_sequences_that_share_their_cells_are_not_moved():
    engine = fake("attention", sequences=SEQUENCES, kv_unified=True)
    histories = fill_sequences(engine)
    play(engine, *[request(str(number), [*histories[number], 5]) for number in (0, 7)])
    assert engine.counters.moved_sequences == 0


def test_a_slot_has_the_same_number_after_a_move():
    engine = make_copies_free(fake("attention", sequences=SEQUENCES))
    ask(engine, FIRST, sequence=0)
    ask(engine, LAST, sequence=7)
    play(engine, request("first", [*FIRST, 3], sequence=0), request("last", [*LAST, 3], sequence=7))
    assert engine.counters.moved_sequences == 1
    slot = engine.prefix_cache.slots[7]
    assert slot.number == 7
    assert list(slot.entries[: len(LAST)]) == LAST


@pytest.mark.native
@pytest.mark.parametrize(
    ("kind", "on_device"), [*((kind, False) for kind in KINDS), ("attention", True), ("window", True)]
)
def test_moved_sequences_give_the_same_tokens_on_llama(kind, on_device):
    spec = EngineSpec(
        path=models.get_path(kind),
        context_settings=ContextSettings(cells=8192, sequences=8, batch=128, ubatch=64, outputs=16, threads=1),
        engine_settings=EngineSettings(speculation="off", ram_cache_bytes=0),
    )
    packed, apart = make_copies_free(spec()), spec()
    try:
        apart.prefix_cache.pack = lambda *_: 0  # type: ignore[method-assign]
        packed.backend.capabilities = replace(packed.backend.capabilities, copies_on_device=on_device)
        packed.backend.context.memory.copies_on_device = on_device
        tokens = []
        for engine in (packed, apart):
            histories = fill_sequences(engine, 6)
            turns = [[*histories[number], 7, 8, 9] for number in (0, 3, 5)]
            answers = play(engine, *[request(str(number), turn) for number, turn in enumerate(turns)])
            tokens.append([answer.tokens for answer in answers.values()])
            check(engine)
        assert packed.counters.moved_sequences
        assert tokens[0] == tokens[1]
    finally:
        packed.close()
        apart.close()
