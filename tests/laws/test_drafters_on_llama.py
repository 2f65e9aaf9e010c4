"""MTP heads and draft models: they change no token, and what they guess is known by construction."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.speculation.draft_model import DraftModel
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, UnsupportedOperation, UnsupportedOption
from afterglow.llama.handle import list_open_handles
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from afterglow.testing.models.constructed import MISDRAFTED_TOKENS
from laws.test_laws_on_llama import CYCLE, agree, ordinary, plain_run
from support.play import GREEDY, LAYOUTS, ask, check, play, request

ROLLBACK = 6


@pytest.fixture
def engines():
    """Make engines on tiny models; all are closed at the end."""
    with ExitStack() as stack:

        def make(name: str, length: int | str, draft=None, settings=None, **context) -> Engine:
            defaults = {"cells": 4096, "sequences": 4, "batch": 128, "ubatch": 64, "outputs": 40, "threads": 1}
            drafters = None if draft is None else ("mtp",) if draft == "mtp" else ("draft",)
            rollback = ROLLBACK if "hybrid" in name or "successor-mtp" in name else 0
            recipe = EngineSpec(
                path=models.get_path(name),
                context_settings=ContextSettings(**{**defaults, "rollback": rollback, **context}),
                engine_settings=EngineSettings(speculation=length, drafters=drafters, **(settings or {})),
                draft=draft if draft in (None, "mtp") else models.get_path(draft),
            )
            engine = recipe()
            stack.callback(engine.close)
            return engine

        yield make


def cycles(engine: Engine, count: int = 3, **options) -> list:
    words = engine.backend.context.model.vocabulary
    options = {"max_tokens": 56, "sampling": GREEDY} | options
    return [request(str(n), words.tokenize((CYCLE * 3)[n : 40 + 9 * n]), **options) for n in range(count)]


def follow(last: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        tokens.append(last := models.get_successor(last))
    return tokens


@pytest.mark.parametrize("unified", LAYOUTS)
def test_c10_heads_that_are_always_right_save_three_decodes_of_four(engines, unified):
    engine = engines("successor-mtp", 3, "mtp", kv_unified=unified)
    requests = cycles(engine)
    answers = play(engine, *requests)
    for one in requests:
        assert answers[one.id].tokens == follow(one.entries[-1], 56)
        usage = answers[one.id].end.usage
        assert usage.accepted_tokens == usage.draft_tokens > 36
        assert (
            usage.generated_tokens / (usage.generated_tokens - usage.accepted_tokens) > 3.3
        )  # tokens for each decode of the target
    assert engine.counters.max_batch_jobs == 3
    check(engine)


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("name", ["successor-mtp-75", "successor-headed"])
def test_c10_heads_that_are_wrong_after_every_fourth_token_are_right_in_three_quarters(engines, name, unified):
    engine = engines(name, 4, "mtp", kv_unified=unified)
    requests = cycles(engine)
    answers = play(engine, *requests)
    for one in requests:
        assert answers[one.id].tokens == follow(one.entries[-1], 56)
    assert engine.counters.accepted_tokens / engine.counters.draft_tokens == pytest.approx(0.75, abs=0.05)
    assert engine.counters.accepted_tokens > 50


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_c10_heads_in_a_chain_guess_one_each(engines, unified, length):
    """The first head is always right, the second wrong after every fourth token: known to the last guess."""
    engine = engines("successor-chained", length, "mtp", kv_unified=unified)
    requests = cycles(engine)
    answers = play(engine, *requests)
    for one in requests:
        tokens = follow(one.entries[-1], 56)
        assert answers[one.id].tokens == tokens
        done, drafted, accepted = 1, 0, 0
        while done < 56:
            wanted = min(length, 2, 56 - done - 1)
            right = wanted if wanted < 2 or tokens[done] not in MISDRAFTED_TOKENS else 1
            done, drafted, accepted = done + right + 1, drafted + wanted, accepted + right
        usage = answers[one.id].end.usage
        assert (usage.draft_tokens, usage.accepted_tokens) == (drafted, accepted)
    check(engine)


@pytest.mark.parametrize("unified", LAYOUTS)
def test_chained_heads_with_a_window_change_no_token_on_random_weights(engines, unified):
    """Continued, restored behind the window, stored and recalled."""
    layout = {"unified": unified, "sequences": 2, "cells": 2048}
    cold, engine = (
        engines("window-chained", "off", **layout),
        engines("window-chained", 2, "mtp", {"segment": 16}, **layout),
    )
    system = ordinary(150, 1)
    for number in range(6):
        entries = system[: 150 - 50 * (number % 2)] + ordinary(30 + 40 * number, 10 + number)
        answer = ask(engine, entries, boundaries=frozenset({100, 150}), max_tokens=40, ignore_ends=True)
        agree(answer, *plain_run(cold, entries, max_tokens=40, ignore_ends=True))
        assert answer.end.usage.draft_tokens > 0
        assert number == 0 or answer.cached >= 99
        check(engine)
    assert engine.prefix_cache.store.ram_counters.saves > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_c14_a_seed_gives_the_same_tokens_with_heads_and_without(engines, seed):
    sampling = Sampling(temperature=3.0, seed=seed, top_k=0, top_p=1, min_p=0)
    plain, engine = engines("successor-mtp-75", "off"), engines("successor-mtp-75", 4, "mtp")
    requests = cycles(engine, sampling=sampling)
    expected, answers = play(plain, *requests), play(engine, *requests)
    for one in requests:
        assert answers[one.id].tokens == expected[one.id].tokens
    assert 0 < engine.counters.accepted_tokens < engine.counters.draft_tokens


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("name", ["hybrid-mtp", "attention-mtp"])
def test_noisy_heads_change_no_token_on_random_weights(engines, name, unified):
    cold, engine = engines(name, "off", kv_unified=unified), engines(name, 3, "mtp", kv_unified=unified)
    boundaries = frozenset({100, 150})
    system = ordinary(150, 1)
    for number in range(4):  # cold, then with the beginning in memory
        entries = system + ordinary(30 + number, 10 + number)
        answer = ask(engine, entries, boundaries=boundaries, max_tokens=40, ignore_ends=True)
        agree(answer, *plain_run(cold, entries, max_tokens=40, ignore_ends=True))
        assert answer.end.usage.draft_tokens > 0
        assert number == 0 or answer.cached >= (149 if name == "attention-mtp" else 150)
        check(engine)


HEADED = ["hybrid-mtp", "attention-mtp", "window-chained", "window-chained-short"]


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("name", HEADED)
def test_heads_know_after_a_hit_what_they_knew_before_it(engines, name, unified):
    """Restored, forked and continued: the heads' memory and the hidden state come along. (Nothing is stored here.)

    Without checkpoints the hidden state comes from computing one entry more, which the heads know already."""
    layout = {"unified": unified, "batch": 50, "ubatch": 50}
    engine = engines(name, 2, "mtp", **layout)
    backend = engine.backend
    backend.cells = lambda state, partial: None
    entries, boundaries = ordinary(500, 1), frozenset({100})  # long enough for every window to have passed
    ask(engine, entries, boundaries=boundaries, max_tokens=1)
    cold = engines(name, 2, "mtp", **layout)
    for last in (ordinary(20, 2), ordinary(25, 3)):
        prompt = entries[:100] + last
        cached = ask(engine, prompt, boundaries=boundaries, max_tokens=1).cached
        assert cached >= (99 if name == "attention-mtp" else 100)
        ask(cold, prompt, boundaries=boundaries, max_tokens=1, reuse=False)
        slot = next(one for one in engine.prefix_cache.slots if list(one.ids[: len(prompt)]) == prompt)
        other = next(one for one in cold.memory.slots if list(one.ids[: len(prompt)]) == prompt)
        guesses = backend.session.draft({slot.seq_id: 30})[slot.seq_id]
        assert guesses == cold.backend.session.draft({other.number: 30})[other.number]
        first, last = backend.heads.memory.positions(slot.seq_id)
        assert last == len(prompt) - 1
        assert first == 0 or "window" in name
        assert np.allclose(logits_of_heads(engine, slot.seq_id), logits_of_heads(cold, other.number), atol=5e-3)


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("place", ["RAM", "disk"])
@pytest.mark.parametrize("name", HEADED)
def test_heads_know_what_they_knew_after_what_was_stored_comes_back(engines, tmp_path, name, unified, place):
    """Segments hold the heads' cells, checkpoints the hidden state and their window: also in another process."""
    settings = {"disk_directory": tmp_path / "prefix", "segment": 16}
    layout = {"sequences": 1, "cells": 1024, "unified": unified, "batch": 50, "ubatch": 50}
    engine = engines(name, 2, "mtp", settings, **layout)
    entries, boundaries = ordinary(150, 1), frozenset({100})
    ask(engine, entries, boundaries=boundaries, max_tokens=1)
    ask(engine, ordinary(60, 9), max_tokens=1)  # takes the only sequence
    if place == "disk":
        engine.prefix_cache.close()
        engine = engines(name, 2, "mtp", settings, **layout)
    cold = engines(name, 2, "mtp", **layout)
    for last in (ordinary(20, 2), ordinary(25, 3)):
        prompt = entries[:100] + last
        hits = engine.prefix_cache.store.ram_counters.hits + engine.prefix_cache.store.disk_counters.hits
        cached = ask(engine, prompt, boundaries=boundaries, max_tokens=1).cached
        assert cached == (99 if name == "attention-mtp" else 100)
        assert engine.prefix_cache.store.ram_counters.hits + engine.prefix_cache.store.disk_counters.hits == hits + 1
        ask(cold, prompt, boundaries=boundaries, max_tokens=1, reuse=False)
        guesses = engine.backend.session.draft({0: 30})[0]
        assert guesses == cold.backend.session.draft({0: 30})[0]
        first, last = engine.backend.heads.memory.positions(0)
        assert last == len(prompt) - 1
        assert first == 0 or "window" in name
        assert np.allclose(logits_of_heads(engine), logits_of_heads(cold), atol=5e-3)
        if name == "hybrid-mtp":
            assert np.array_equal(logits_of_heads(engine), logits_of_heads(cold))  # computed alike: bit for bit
        check(engine)
        ask(engine, ordinary(60, 9), max_tokens=1)


def logits_of_heads(engine: Engine, sequence: int = 0) -> np.ndarray:
    """What the first of the heads says of one more token after all that a sequence holds."""
    heads, session = engine.backend.heads, engine.backend.session
    end = heads.memory.get_position_range(sequence)[1] + 1
    heads.batch.clear()
    heads.batch.add_row(30, position=end, sequence=sequence, output=True)
    heads.batch.hidden_states[0] = session.row(sequence, end)
    heads.decode()
    found = heads.get_logits(0).copy()
    heads.memory.remove(sequence, start=end)
    return found


def test_heads_that_know_only_the_last_entries_are_stored_and_come_back_so(engines, monkeypatch):
    monkeypatch.setattr("afterglow.engine.speculation.mtp.session.MAX_BACKLOG_ENTRIES", 48)
    engine = engines("hybrid-mtp", 2, "mtp", {"segment": 16}, sequences=1, cells=1024)
    entries = ordinary(150, 1)
    ask(engine, entries, max_tokens=1)
    ask(engine, ordinary(60, 9), max_tokens=1)
    answer = ask(engine, [*entries, 30], max_tokens=1)
    assert answer.cached == 150
    engine.backend.session.compute([0])
    first, last = engine.backend.heads.memory.positions(0)
    assert (first, last) == (102, 150)
    check(engine)


def test_heads_and_their_memory_follow_saved_sequences(engines):
    engine = engines("hybrid-mtp", 2, "mtp")
    ask(engine, ordinary(60, 1), max_tokens=1)
    slot = next(one for one in engine.prefix_cache.slots if len(one))
    before = engine.backend.session.draft({slot.seq_id: 30})[slot.seq_id]
    saved = slot.save()
    slot.clear()
    assert engine.backend.heads.memory.positions(slot.seq_id) is None
    slot.load(saved.ids, saved.state, saved.aligned)
    assert engine.backend.heads.memory.positions(slot.seq_id) == (0, 59)
    assert engine.backend.session.draft({slot.seq_id: 30})[slot.seq_id] == before
    assert saved.state.nbytes > saved.state.data.nbytes
    plain = type(saved.state).__mro__[1].from_bytes(saved.state.to_bytes())
    slot.load(saved.ids, plain, saved.aligned)  # as it comes from a file: the heads begin anew
    assert engine.backend.heads.memory.positions(slot.seq_id) is None
    check(engine)


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("name", ["successor-mtp", "successor-mtp-75"])
def test_heads_of_a_memory_without_snapshots_guess_with_replay(engines, name, unified):
    engine = engines(name, 4, "mtp", kv_unified=unified, recurrent_snapshots=0)
    requests = cycles(engine)
    answers = play(engine, *requests)
    for one in requests:
        assert answers[one.id].tokens == follow(one.entries[-1], 56)
    assert engine.counters.accepted_tokens > 50
    assert (engine.counters.replayed_entries > 0) == (name == "successor-mtp-75")
    check(engine)


def test_noisy_heads_and_replay_change_no_token_on_random_weights(engines):
    cold, engine = engines("hybrid-mtp", "off"), engines("hybrid-mtp", 3, "mtp", recurrent_snapshots=0)
    for number in range(3):
        entries = ordinary(120 + 30 * number, number)
        answer = ask(engine, entries, max_tokens=40, ignore_ends=True)
        agree(answer, *plain_run(cold, entries, max_tokens=40, ignore_ends=True))
        check(engine)
    assert engine.counters.replayed_entries > 0


def test_a_model_without_heads_is_refused(engines):
    with pytest.raises(UnsupportedOperation, match="no MTP heads"):
        engines("successor-hybrid", 3, "mtp")
    assert not [handle for handle in list_open_handles() if handle._name == "model"]


# --- a second model


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
@pytest.mark.parametrize("draft", ["successor-attention", "successor-recurrent", "successor-hybrid"])
def test_a_draft_model_that_says_the_same_is_always_right(engines, kind, draft, unified):
    engine = engines(f"successor-{kind}", 4, draft, kv_unified=unified)
    requests = cycles(engine)
    answers = play(engine, *requests)
    for one in requests:
        assert answers[one.id].tokens == follow(one.entries[-1], 56)
        usage = answers[one.id].end.usage
        assert usage.accepted_tokens == usage.draft_tokens > 36
    check(engine)


def test_a_draft_model_that_says_something_else_changes_no_token(engines):
    cold, engine = engines("attention", "off"), engines("attention", 3, "draft")
    first = ordinary(150, 1)
    for number in range(3):
        entries = first + ordinary(20, number)
        answer = ask(engine, entries, max_tokens=40, ignore_ends=True)
        agree(answer, *plain_run(cold, entries, max_tokens=40, ignore_ends=True))
        assert answer.end.usage.draft_tokens > answer.end.usage.accepted_tokens
    assert max(len(slot) for slot in drafter_of(engine).prefix_cache.slots) > 150


def test_a_draft_model_computes_only_what_is_new_of_the_next_turn(engines):
    engine = engines("successor-attention", 4, "successor-recurrent")
    backend = drafter_of(engine)._backend
    (one,) = cycles(engine, 1)
    first = play(engine, one)["0"].tokens
    decoded = counted(backend)
    turn = [*one.entries, *first, *one.entries[:7]]
    answer = ask(engine, turn, max_tokens=5)
    assert answer.tokens == follow(turn[-1], 5)
    assert answer.end.usage.accepted_tokens == answer.end.usage.draft_tokens > 0
    assert sum(decoded) < 30


@pytest.mark.parametrize("place", ["RAM", "disk"])
@pytest.mark.parametrize(
    "draft", ["successor-attention", "successor-window", "successor-recurrent", "successor-hybrid"]
)
def test_a_draft_model_s_own_state_is_stored_with_the_model_s(engines, tmp_path, draft, place):
    """After others took its sequence, and after a restart, it computes only what is new, for the same tenant."""
    settings = {"disk_directory": tmp_path / "prefix", "segment": 16}
    engine = engines("successor-attention", 4, draft, settings, sequences=1, cells=2048)
    words = engine.backend.context.model.vocabulary
    entries = words.tokenize((CYCLE * 8)[:200])
    ask(engine, entries, boundaries=frozenset({150}), max_tokens=8)
    ask(engine, entries[7:], max_tokens=8)  # takes the only sequence of both
    if place == "disk":
        for memory in (engine.prefix_cache, drafter_of(engine).prefix_cache):
            memory.close()
        engine = engines("successor-attention", 4, draft, settings, sequences=1, cells=2048)
    decoded = counted(drafter_of(engine)._backend)
    turn = entries[:150] + entries[3:9]
    answer = ask(engine, turn, max_tokens=9)
    assert answer.tokens == follow(turn[-1], 9)
    assert answer.cached == 150
    assert answer.end.usage.accepted_tokens == answer.end.usage.draft_tokens > 0
    assert 0 < sum(decoded) < 30
    before = sum(decoded)
    ask(engine, turn, max_tokens=9, salt="another")
    assert sum(decoded) - before > 150
    tiers = drafter_of(engine).prefix_cache.store
    assert tiers.ram_counters.hits + tiers.disk_counters.hits > 0


def test_a_draft_model_keeps_to_its_share_of_the_budget(engines):
    engine = engines("successor-attention", 4, "successor-hybrid", {"ram_bytes": 800_000}, sequences=1, cells=2048)
    ours, theirs = engine.prefix_cache.store.ram, drafter_of(engine).prefix_cache.store.ram
    assert ours.limit + theirs.limit == 800_000
    words = engine.backend.context.model.vocabulary
    for number in range(8):
        ask(engine, words.tokenize((CYCLE * 12)[number : number + 250]), max_tokens=6)
        assert ours.used <= ours.limit
        assert theirs.used_bytes <= theirs.limit
    assert theirs.used_bytes > 0


def drafter_of(engine: Engine) -> DraftModel:
    return next(one for one in engine.speculator._drafters if isinstance(one, DraftModel))


def counted(backend: LlamaBackend) -> list[int]:
    """The rows of each decode from now on."""
    decoded: list[int] = []
    original = backend.decode
    backend.decode = lambda spans: decoded.append(sum(len(span.entries) for span in spans)) or original(spans)
    return decoded


def test_a_draft_model_of_other_tokens_is_refused_with_the_first_that_differs(smollm2):
    with pytest.raises(InvalidArgument, match="tokens and the model"):
        EngineSpec(path=models.get_path("attention"), draft=smollm2)()


def test_both_may_be_named_and_only_what_is_there(engines):
    with pytest.raises(UnsupportedOption, match="mtp"):
        EngineSpec(path=models.get_path("attention"), engine_settings=EngineSettings(drafters=("mtp",)))()
    engine = engines("successor-mtp", "auto", "mtp")
    assert [drafter.name for drafter in engine.speculator._drafters] == ["mtp"]
