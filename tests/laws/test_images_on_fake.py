"""The laws with pictures on the fake, whose memory depends on every encoded row; and what encoding costs nobody."""

from __future__ import annotations

import threading
import time

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import DecodeFailed, EngineError, KVCacheFull, UnsupportedMedia
from afterglow.testing import FakeProjector
from support.media_prompts import asked, noisy
from support.play import KINDS, Answer, collect, fake, play, prompt, request
from support.truth import answer as true_answer
from support.truth import check_all

every_kind = pytest.mark.parametrize("kind", KINDS)
CAT, DOG, COW = noisy(1, 20, 1), noisy(2, 20, 1), noisy(3, 7, 1)
SYSTEM, QUESTION, OTHER = prompt(30, 1), prompt(12, 2), prompt(15, 3)


def seeing(kind: str = "attention", settings: EngineSettings | None = None, **options) -> Engine:
    engine = fake(kind, settings, projector=FakeProjector(), **options)
    engine.backend.ledger = engine.interner
    return engine


def ask(engine: Engine, *items, **options) -> Answer:
    entries, contents = asked(engine, *items)
    return play(engine, request("one", entries, contents=contents, **options))["one"]


@every_kind
@pytest.mark.parametrize("shared", [False, True])
def test_reuse_company_and_chunking_change_no_token(kind, shared):
    engine = seeing(kind, shared=shared)
    prompts = {
        "cat": (SYSTEM, CAT, QUESTION),
        "dog": (SYSTEM, DOG, QUESTION),
        "moved": (OTHER, CAT, QUESTION),
        "three": (SYSTEM, CAT, QUESTION, DOG, [1, 2], COW, OTHER),
        "text": (SYSTEM, OTHER),
        "last": (SYSTEM, COW),
    }
    made = {name: asked(engine, *items) for name, items in prompts.items()}
    for _ in range(2):
        requests = [request(name, entries, contents=contents) for name, (entries, contents) in made.items()]
        answers = play(engine, *requests)
        check_all(engine)
        for name, (entries, _) in made.items():
            assert answers[name].tokens == true_answer(kind, entries)[0], name
    assert engine.counters.encoded_media == 3
    assert engine.counters.max_batch_jobs >= 3


@every_kind
def test_any_size_of_chunks_and_pictures_larger_than_a_batch_give_the_same(kind):
    answers = set()
    for batch in (8, 16, 64):
        engine = seeing(kind, batch_cells=batch)
        answers.add(tuple(ask(engine, SYSTEM, CAT, QUESTION, DOG, OTHER).tokens))
    assert len(answers) == 1


@every_kind
def test_c7_checkpoints_lie_right_behind_pictures(kind):
    engine = seeing(kind)
    ask(engine, SYSTEM, CAT, QUESTION, QUESTION)
    answer = ask(engine, SYSTEM, CAT, OTHER)
    assert answer.end.usage.cached_media_tokens == 20
    assert answer.cached == len(SYSTEM) + 20
    check_all(engine)


@every_kind
def test_c7_a_picture_right_behind_where_a_sequence_stands_gets_its_checkpoint_too(kind):
    """Where only a few tokens come before it, a checkpoint before them would do; a picture is never computed again."""
    engine = seeing(kind)
    said = ask(engine, SYSTEM, QUESTION, max_tokens=4).tokens
    ask(engine, SYSTEM, QUESTION, said, CAT, OTHER)
    answer = ask(engine, SYSTEM, QUESTION, said, CAT, QUESTION)
    assert answer.end.usage.cached_media_tokens == 20
    assert answer.cached == len(SYSTEM) + len(QUESTION) + len(said) + 20
    check_all(engine)


def test_a_picture_that_is_being_encoded_keeps_nobody_waiting():
    engine = seeing()
    engine.backend.projector.open.clear()
    entries, contents = asked(engine, SYSTEM, CAT, QUESTION)
    engine.submit(request("seeing", entries, contents=contents))
    engine.submit(request("reading", OTHER, max_tokens=20))
    answers: dict[str, Answer] = {}
    deadline = time.monotonic() + 20
    while "reading" not in answers or answers["reading"].end is None:
        collect(answers, engine)
        assert time.monotonic() < deadline
    assert len(answers["reading"].tokens) > 5
    assert answers["seeing"].progress[-1] == len(SYSTEM)  # as far as it can
    assert not answers["seeing"].tokens
    engine.backend.projector.open.set()
    while engine.is_busy:
        collect(answers, engine)
    assert answers["seeing"].tokens == true_answer("attention", entries)[0]


def test_the_thread_that_encodes_ends_with_its_work_and_another_one_follows():
    """Threads that once computed would make every later decode slower."""
    engine = seeing()
    for number, picture in enumerate((CAT, DOG), 1):
        ask(engine, SYSTEM, picture, QUESTION)
        deadline = time.monotonic() + 5
        while any(thread.name == "afterglow-pictures" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert engine.counters.encoded_media == number


def test_an_engine_that_only_waits_for_a_picture_does_not_spin():
    engine = seeing()
    engine.backend.projector.open.clear()
    entries, contents = asked(engine, CAT, QUESTION)
    engine.submit(request("seeing", entries, contents=contents))
    steps, until = 0, time.monotonic() + 0.5
    while time.monotonic() < until:
        engine.step()
        steps += 1
    assert steps < 100
    engine.backend.projector.open.set()
    while engine.is_busy:
        engine.step()


def test_beside_pictures_the_others_get_every_second_decode():
    engine = seeing(settings=EngineSettings(speculation="off"))
    pictures = [noisy(seed, 9, 1) for seed in range(6)]
    ask(engine, *pictures)  # now they are encoded
    engine.submit(request("writing", SYSTEM, max_tokens=60, ignore_ends=True))
    for _ in range(3):
        engine.step()
    entries, contents = asked(engine, OTHER, *pictures)
    engine.submit(request("seeing", entries, contents=contents, max_tokens=1))
    engine.backend.history.clear()
    while engine.is_busy:
        engine.step()
    writing = next(span[0] for spans in engine.backend.history for span in spans if len(spans) == 2)
    turns = "".join("w" if spans[0][0] == writing else "p" for spans in engine.backend.history)
    assert "wpwpwpwpwp" in turns
    assert "pp" not in turns


@every_kind
def test_a_long_picture_is_computed_in_parts_beside_answers_that_are_written(kind):
    """As long as a gap between tokens may be, and no longer; and whatever happens in between, it stays whole."""
    engine = seeing(kind, EngineSettings(max_token_gap=0.0, speculation="off"))
    wide = noisy(8, 60, 1)
    ask(engine, wide)  # now it is encoded
    entries, contents = asked(engine, SYSTEM, wide, QUESTION)
    engine.submit(request("writing", OTHER, max_tokens=40, ignore_ends=True))
    engine.step()
    engine.submit(request("seeing", entries, contents=contents))
    engine.submit(request("late", [*SYSTEM, *OTHER]))
    ahead, answers = set(), {}
    while engine.is_busy:
        collect(answers, engine)
        check_all(engine)
        ahead |= {slot.partial_media_rows for slot in engine.prefix_cache.slots}
    assert ahead == {0, 16, 32, 48}
    assert answers["seeing"].tokens == true_answer(kind, entries)[0]
    assert answers["late"].tokens == true_answer(kind, [*SYSTEM, *OTHER])[0]


@every_kind
@pytest.mark.parametrize("shared", [False, True])
def test_c9_a_request_that_ends_in_the_middle_of_a_picture_leaves_none_of_it(kind, shared):
    for end in ("cancel", "fault", "full"):
        engine = seeing(kind, EngineSettings(max_token_gap=0.0, speculation="off"), shared=shared)
        ask(engine, noisy(8, 60, 1))  # now it is encoded
        entries, contents = asked(engine, SYSTEM, noisy(8, 60, 1), QUESTION)
        engine.submit(request("writing", OTHER, max_tokens=40, ignore_ends=True))
        answers: dict[str, Answer] = {}
        collect(answers, engine)
        engine.submit(request("seeing", entries, contents=contents))
        while not any(slot.partial_media_rows for slot in engine.prefix_cache.slots):
            assert engine.is_busy
            collect(answers, engine)
        if end == "cancel":
            engine.cancel("seeing")
        else:
            engine.backend.faults = [DecodeFailed(-3, "planted") if end == "fault" else KVCacheFull(9, 9)]
        while engine.is_busy:
            collect(answers, engine)
            check_all(engine)
        if end != "cancel":
            assert answers["seeing"].tokens == true_answer(kind, entries)[0]
        assert answers["writing"].tokens == true_answer(kind, OTHER, max_tokens=40, ignore_ends=True)[0]
        assert ask(engine, SYSTEM, noisy(8, 60, 1), OTHER).tokens == true_answer(
            kind, asked(engine, SYSTEM, noisy(8, 60, 1), OTHER)[0]
        )[0]  # fmt: skip


def test_another_salt_sees_nothing_of_a_picture():
    engine = seeing()
    ask(engine, SYSTEM, CAT, QUESTION, salt="mine")
    theirs = ask(engine, SYSTEM, CAT, QUESTION, salt="theirs")
    assert (theirs.end.usage.encoded_media, theirs.cached) == (1, 0)
    assert ask(engine, OTHER, CAT, QUESTION, salt="mine").end.usage.encoded_media == 0


def test_two_who_want_the_same_picture_have_it_encoded_once():
    engine = seeing()
    one, other = asked(engine, SYSTEM, CAT, QUESTION), asked(engine, OTHER, CAT, QUESTION)
    answers = play(engine, request("a", one[0], contents=one[1]), request("b", other[0], contents=other[1]))
    assert sum(engine.backend.projector.calls) == 1
    assert sum(answer.end.usage.encoded_media for answer in answers.values()) == 1


def test_prompts_that_begin_with_the_same_picture_compute_it_once():
    """A picture counts by its cells: waiting for it is worth it, however short the text around it is."""
    engine = seeing()
    requests = []
    for name in "ab":
        entries, contents = asked(engine, [1, 2], CAT, [3, ord(name) % 50])
        requests.append(request(name, entries, contents=contents))
    play(engine, *requests)
    assert engine.counters.coalesced == 1


def test_encoded_pictures_stay_within_their_bytes():
    engine = seeing(settings=EngineSettings(encoder_cache_bytes=600))
    pictures = engine.media_scheduler.encoder_cache
    for seed in range(6):
        ask(engine, noisy(seed, 8, 1), QUESTION)
        assert pictures.nbytes <= 600
    assert sum(engine.backend.projector.calls) == 6
    ask(engine, OTHER, noisy(5, 8, 1), QUESTION)  # the newest is still there
    assert sum(engine.backend.projector.calls) == 6
    ask(engine, OTHER, noisy(0, 8, 1), QUESTION)  # the oldest is not
    assert sum(engine.backend.projector.calls) == 7
    ask(seeing(settings=EngineSettings(encoder_cache_bytes=0)), CAT, QUESTION)


def test_a_picture_that_cannot_be_encoded_ends_its_request_and_no_other():
    engine = seeing()
    projector = engine.backend.projector
    projector.open.clear()
    projector.faults = [None, DecodeFailed(1, "together"), DecodeFailed(1, "the first alone")]
    prompts = {"before": asked(engine, COW, [1]), "bad": asked(engine, CAT, [1]), "good": asked(engine, DOG, [1])}
    for name, (entries, contents) in prompts.items():
        engine.submit(request(name, entries, contents=contents))
        engine.step()
        time.sleep(0.05)  # the first is being encoded, the others come together
    projector.open.set()
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    assert str(answers["bad"].end.error) == str(DecodeFailed(1, "the first alone"))
    for name in ("before", "good"):
        assert answers[name].tokens == true_answer("attention", prompts[name][0])[0]
    check_all(engine)


def test_an_encoder_that_breaks_is_an_error_of_the_engine():
    engine = seeing()
    engine.backend.projector.faults = [RuntimeError("broken")]
    assert isinstance(ask(engine, CAT, QUESTION).end.error, EngineError)
    check_all(engine)


def test_a_cancelled_request_s_pictures_are_not_encoded():
    engine = seeing()
    engine.backend.projector.open.clear()
    busy = asked(engine, noisy(9, 5, 1), [1])
    engine.submit(request("busy", busy[0], contents=busy[1]))
    engine.step()
    time.sleep(0.05)  # it is being encoded
    entries, contents = asked(engine, SYSTEM, CAT, DOG, QUESTION)
    engine.submit(request("gone", entries, contents=contents))
    engine.step()
    engine.cancel("gone")
    engine.step()
    engine.backend.projector.open.set()
    while engine.is_busy:
        engine.step()
    assert sum(engine.backend.projector.calls) == 1


@every_kind
def test_a_failed_decode_of_a_picture_is_tried_again(kind):
    engine = seeing(kind)
    entries, contents = asked(engine, SYSTEM, CAT, QUESTION)
    engine.submit(request("one", entries, contents=contents))
    answers: dict[str, Answer] = {}
    while not engine.media_scheduler.encoder_cache.encoded_count:
        collect(answers, engine)
    engine.backend.faults = [DecodeFailed(-3, "planted")]
    while engine.is_busy:
        collect(answers, engine)
    check_all(engine)
    assert answers["one"].tokens == true_answer(kind, entries)[0]
    assert engine.counters.encoded_media == 1


def test_a_whole_picture_that_does_not_fit_into_a_batch_is_refused():
    engine = fake(projector=FakeProjector(non_causal=True), batch_cells=16)
    engine.backend.ledger = engine.interner
    entries, contents = asked(engine, CAT, QUESTION)
    with pytest.raises(UnsupportedMedia, match="20 tokens"):
        engine.submit(request("one", entries, contents=contents))


@every_kind
def test_the_deterministic_mode_reuses_pictures_whatever_the_shapes(kind):
    settings = EngineSettings(deterministic=True, grid=8)
    prompts = [(SYSTEM, CAT, QUESTION), (SYSTEM, CAT, OTHER), (SYSTEM, CAT, QUESTION, DOG, OTHER), (SYSTEM, DOG, OTHER)]
    warm = seeing(kind, settings, rounding=True)
    for items in prompts * 2:
        cold = seeing(kind, settings, rounding=True)
        answer = ask(warm, *items)
        assert answer.tokens == ask(cold, *items).tokens
    assert answer.cached > 0
    assert ask(warm, SYSTEM, CAT, [5, 6, 7]).end.usage.cached_media_tokens == 20


def test_guesses_never_hold_pictures():
    engine = seeing(settings=EngineSettings(speculation=4))
    around = prompt(9, 5)
    items = (around, CAT, around, CAT, around)
    answer = ask(engine, *items, max_tokens=30, ignore_ends=True)
    expected = true_answer("attention", asked(engine, *items)[0], max_tokens=30, ignore_ends=True)[0]
    assert answer.tokens == expected
