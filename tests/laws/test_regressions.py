"""Laws that were broken once: found by the state machine, kept small."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from afterglow.engine.types.entries import Media
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import InvalidArgument, KVCacheFull, RequestError
from afterglow.llama.settings import ContextSettings
from laws.test_more_laws import CAT, CLIP, OTHER, SYSTEM, expected, live, seeing
from support import truth
from support.play import KINDS, ask, fake, play, prompt, request

GROWING = ["attention", "window", "hybrid"]  # a recurrent state does not grow


@pytest.mark.parametrize("kind", GROWING)
def test_a_job_that_made_room_does_not_come_back_before_there_is_room(kind):
    engine = fake(kind, shared=True, cells=60, total_cells=60)
    a, b = request("a", prompt(40, 1), max_tokens=15, ignore_ends=True), request("b", prompt(30, 2))
    answers = live(engine, a, b, limit=200)
    assert answers["a"].tokens == expected(kind, a)
    assert answers["b"].tokens == expected(kind, b)


@pytest.mark.parametrize("kind", GROWING)
def test_nor_where_nothing_of_it_could_be_kept(kind):
    engine = fake(kind, EngineSettings(swap_bytes=0), shared=True, cells=100, total_cells=100)
    requests = [request(str(n), prompt(20, 10 + n), max_tokens=30, ignore_ends=True) for n in range(3)]
    answers = live(engine, *requests, limit=500)
    for one in requests:
        assert answers[one.id].tokens == expected(kind, one)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_checkpoint_in_the_middle_counts_for_every_path_through_it(kind):
    engine = fake(kind, EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=3)))
    live(engine, request("deep", prompt(100, 1), boundaries=frozenset({20, 30, 40})))
    live(engine, request("shallow", prompt(100, 1), boundaries=frozenset({10}), reuse=False))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_there_is_one_checkpoint_for_the_same_entries(kind):
    engine = fake(kind, EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=3)))
    play(engine, *[request(str(n), prompt(60, 1), boundaries=frozenset({20, 40}), reuse=False) for n in range(3)])
    depths = [checkpoint.position for checkpoint in engine.prefix_cache.all_checkpoints]
    assert len(depths) == len(set(depths)), depths


@pytest.mark.parametrize("kind", KINDS)
def test_parked_bytes_are_what_was_saved_and_not_what_was_expected(kind):
    engine = fake(kind, EngineSettings(swap_bytes=50 if kind == "recurrent" else 3300), shared=True)
    engine.prefix_cache.cost_model.bytes_per_entry = 1.0 if kind == "recurrent" else 100.0
    for number in range(2):
        engine.submit(request(str(number), prompt(30, number), max_tokens=20, ignore_ends=True))
    for _ in range(3):
        engine.step()
    engine.backend.faults.append(KVCacheFull(1, 1))
    engine.step()
    assert engine.counters.preempted == 1
    truth.check_budgets(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_does_not_exist_ends_its_own_request_only(kind):
    engine = fake(kind)
    good = request("good", SYSTEM)
    with contextlib.suppress(RequestError):
        engine.submit(request("bad", [5, 6, 10**6]))
    assert live(engine, good)["good"].tokens == expected(kind, good)


@pytest.mark.parametrize("media", [CAT, CLIP])
def test_an_answer_ends_where_cells_do_and_not_where_positions_do(media):
    engine = seeing("attention", cells=60, sequences=2)
    ask(engine, OTHER)
    one = request("one", [*SYSTEM[:20], media], max_tokens=None, ignore_ends=True)
    answers = live(engine, one)
    assert answers["one"].tokens == expected("attention", one, cells=60)
    assert sum(len(slot) > 0 for slot in engine.prefix_cache.slots) == 2  # and nobody was pushed out


def test_a_cancel_of_what_has_ended_does_not_end_the_next_of_that_name():
    engine = fake()
    ask(engine, SYSTEM)
    engine.cancel("one")
    assert ask(engine, SYSTEM).reason in ("stop", "length")


@pytest.mark.parametrize("settings", [{"outputs": 2}, {"batch": 2}])
def test_fewer_outputs_than_sequences_is_refused_where_llama_cpp_would_abort(settings):
    with pytest.raises(InvalidArgument, match="outputs"):
        ContextSettings(cells=512, sequences=4, **settings)


@pytest.mark.parametrize(
    "entries",
    [np.array([[1, 2], [3, 4]]), [1, 2, -1, 3], np.array([1, 2, -1, 3]), np.array([1.5]), [1, 10**6], [1, "a"]],
    ids=repr,
)
def test_entries_are_one_row_of_tokens_that_exist_or_media(entries):
    engine = fake()
    engine.backend.ledger = engine.interner
    ask(engine, [1, 2, Media(b"somebody's", 4, 4), 3])
    with pytest.raises(RequestError):
        engine.submit(Request(id="bad", entries=entries))
    assert not engine.is_busy


@pytest.mark.parametrize(
    "field",
    [{"stop": ("t",)}, {"deadline": "x"}, {"priority": "x"}, {"logprobs": "x"}, {"stop_tokens": 5}, {"max_tokens": -3}],
    ids=str,
)
def test_a_field_of_another_kind_is_refused_when_it_is_handed_in(field):
    engine = fake()
    with pytest.raises(InvalidArgument) as caught:
        engine.submit(request("bad", SYSTEM, **field))
    assert caught.value.name == next(iter(field))
    assert not engine.is_busy
