"""Regressions: violations that the state machine found, reduced to small cases."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from afterglow.engine.types.entries import Media
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import InvalidArgument, KVCacheFull, RequestError
from afterglow.llama.settings import ContextSettings
from laws.test_media_entries_on_fake import CAT, CLIP, OTHER, SYSTEM
from support.play import KINDS, ask, fake, fake_with_media, play, prompt, request
from support.truth import check_budgets, compute_tokens, run_checked

GROWING = ["attention", "window", "hybrid"]  # a recurrent state does not grow


@pytest.mark.parametrize("kind", GROWING)
def test_a_preempted_request_resumes_only_when_cells_are_free(kind):
    engine = fake(kind, kv_unified=True, cells_per_sequence=60, total_cells=60)
    a, b = request("a", prompt(40, 1), max_tokens=15, ignore_eos=True), request("b", prompt(30, 2))
    answers = run_checked(engine, a, b, limit=200)
    assert answers["a"].tokens == compute_tokens(kind, a)
    assert answers["b"].tokens == compute_tokens(kind, b)


@pytest.mark.parametrize("kind", GROWING)
def test_a_preempted_request_without_swapped_state_resumes_only_when_cells_are_free(kind):
    engine = fake(kind, EngineSettings(swap_bytes=0), kv_unified=True, cells_per_sequence=100, total_cells=100)
    requests = [request(str(n), prompt(20, 10 + n), max_tokens=30, ignore_eos=True) for n in range(3)]
    answers = run_checked(engine, *requests, limit=500)
    for req in requests:
        assert answers[req.id].tokens == compute_tokens(kind, req)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_checkpoint_counts_on_every_path_through_it(kind):
    engine = fake(kind, EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=3)))
    run_checked(engine, request("deep", prompt(100, 1), boundaries=frozenset({20, 30, 40})))
    run_checked(engine, request("shallow", prompt(100, 1), boundaries=frozenset({10}), use_prefix_cache=False))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_equal_entries_have_one_checkpoint(kind):
    engine = fake(kind, EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=3)))
    play(
        engine,
        *[request(str(n), prompt(60, 1), boundaries=frozenset({20, 40}), use_prefix_cache=False) for n in range(3)],
    )
    positions = [checkpoint.position for checkpoint in engine.prefix_cache.all_checkpoints]
    assert len(positions) == len(set(positions)), positions


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_bytes_are_the_saved_size_and_not_the_estimate(kind):
    engine = fake(kind, EngineSettings(swap_bytes=50 if kind == "recurrent" else 3300), kv_unified=True)
    engine.prefix_cache.cost_model._bytes_per_entry.value = 1.0 if kind == "recurrent" else 100.0
    for number in range(2):
        engine.submit(request(str(number), prompt(30, number), max_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.backend.injected_errors.append(KVCacheFull(1, 1))
    engine.step()
    assert engine.counters.preempted == 1
    check_budgets(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_an_invalid_token_fails_only_its_own_request(kind):
    engine = fake(kind)
    good = request("good", SYSTEM)
    with contextlib.suppress(RequestError):
        engine.submit(request("bad", [5, 6, 10**6]))
    assert run_checked(engine, good)["good"].tokens == compute_tokens(kind, good)


@pytest.mark.parametrize("media", [CAT, CLIP])
def test_a_completion_is_limited_by_cells_and_not_by_positions(media):
    engine = fake_with_media("attention", cells_per_sequence=60, sequences=2)
    ask(engine, OTHER)
    req = request("one", [*SYSTEM[:20], media], max_tokens=None, ignore_eos=True)
    answers = run_checked(engine, req)
    assert answers["one"].tokens == compute_tokens("attention", req, cells_per_sequence=60)
    assert sum(len(slot) > 0 for slot in engine.prefix_cache.slots) == 2  # nothing was evicted


def test_a_late_cancel_does_not_affect_the_next_request_with_that_id():
    engine = fake()
    ask(engine, SYSTEM)
    engine.cancel("one")
    assert ask(engine, SYSTEM).reason in ("stop", "length")


@pytest.mark.parametrize("settings", [{"outputs": 2}, {"batch": 2}])
def test_fewer_outputs_than_sequences_is_rejected(settings):
    with pytest.raises(InvalidArgument, match="outputs"):
        ContextSettings(cells=512, sequences=4, **settings)


@pytest.mark.parametrize(
    "entries",
    [np.array([[1, 2], [3, 4]]), [1, 2, -1, 3], np.array([1, 2, -1, 3]), np.array([1.5]), [1, 10**6], [1, "a"]],
    ids=repr,
)
def test_entries_must_be_valid_tokens_or_media(entries):
    engine = fake()
    engine.backend.interner = engine.interner
    ask(engine, [1, 2, Media(b"other", 4, 4), 3])
    with pytest.raises(RequestError):
        engine.submit(Request(id="bad", entries=entries))
    assert not engine.is_busy


@pytest.mark.parametrize(
    "field",
    [{"stop": ("t",)}, {"deadline": "x"}, {"priority": "x"}, {"logprobs": "x"}, {"stop_tokens": 5}, {"max_tokens": -3}],
    ids=str,
)
def test_a_request_field_of_the_wrong_type_is_rejected_on_submit(field):
    engine = fake()
    with pytest.raises(InvalidArgument) as caught:
        engine.submit(request("bad", SYSTEM, **field))
    assert caught.value.name == next(iter(field))
    assert not engine.is_busy
