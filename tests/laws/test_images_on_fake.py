"""Laws of images on the fake backend, whose state depends on every embedding row, and laws of the encoder thread."""

from __future__ import annotations

import threading
import time

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import DecodeFailed, EngineError, KVCacheFull, UnsupportedMedia
from afterglow.testing import FakeProjector
from support.media_prompts import build_prompt, noise_image
from support.play import KINDS, Answer, collect, fake, play, prompt, request
from support.truth import check_all, compute_completion

pytestmark = pytest.mark.slow
every_kind = pytest.mark.parametrize("kind", KINDS)
CAT, DOG, COW = noise_image(1, 20, 1), noise_image(2, 20, 1), noise_image(3, 7, 1)
SYSTEM, QUESTION, OTHER = prompt(30, 1), prompt(12, 2), prompt(15, 3)


def make_engine(kind: str = "attention", settings: EngineSettings | None = None, **options) -> Engine:
    engine = fake(kind, settings, projector=FakeProjector(), **options)
    engine.backend.interner = engine.interner
    return engine


def ask(engine: Engine, *parts, **options) -> Answer:
    entries, media = build_prompt(engine, *parts)
    return play(engine, request("one", entries, media=media, **options))["one"]


@every_kind
@pytest.mark.parametrize("kv_unified", [False, True])
def test_reuse_concurrency_and_chunking_change_no_token(kind, kv_unified):
    engine = make_engine(kind, kv_unified=kv_unified)
    prompts = {
        "cat": (SYSTEM, CAT, QUESTION),
        "dog": (SYSTEM, DOG, QUESTION),
        "moved": (OTHER, CAT, QUESTION),
        "three": (SYSTEM, CAT, QUESTION, DOG, [1, 2], COW, OTHER),
        "text": (SYSTEM, OTHER),
        "last": (SYSTEM, COW),
    }
    built = {name: build_prompt(engine, *parts) for name, parts in prompts.items()}
    for _ in range(2):
        requests = [request(name, entries, media=media) for name, (entries, media) in built.items()]
        answers = play(engine, *requests)
        check_all(engine)
        for name, (entries, _) in built.items():
            assert answers[name].tokens == compute_completion(kind, entries)[0], name
    assert engine.counters.encoded_media == 3
    assert engine.counters.max_batch_jobs >= 3


@every_kind
def test_the_chunk_size_changes_no_token_even_for_images_larger_than_a_batch(kind):
    answers = set()
    for batch in (8, 16, 64):
        engine = make_engine(kind, batch_cells=batch)
        answers.add(tuple(ask(engine, SYSTEM, CAT, QUESTION, DOG, OTHER).tokens))
    assert len(answers) == 1


@every_kind
def test_c7_checkpoints_are_taken_right_after_images(kind):
    engine = make_engine(kind)
    ask(engine, SYSTEM, CAT, QUESTION, QUESTION)
    answer = ask(engine, SYSTEM, CAT, OTHER)
    assert answer.end.usage.cached_media_tokens == 20
    assert answer.cached == len(SYSTEM) + 20
    check_all(engine)


@every_kind
def test_c7_an_image_right_after_the_reused_prefix_gets_a_checkpoint(kind):
    """For a few tokens, a checkpoint before them would suffice; an image is never computed again."""
    engine = make_engine(kind)
    tokens = ask(engine, SYSTEM, QUESTION, max_tokens=4).tokens
    ask(engine, SYSTEM, QUESTION, tokens, CAT, OTHER)
    answer = ask(engine, SYSTEM, QUESTION, tokens, CAT, QUESTION)
    assert answer.end.usage.cached_media_tokens == 20
    assert answer.cached == len(SYSTEM) + len(QUESTION) + len(tokens) + 20
    check_all(engine)


def test_encoding_an_image_delays_no_other_request():
    engine = make_engine()
    engine.backend.projector.encoding_allowed.clear()
    entries, media = build_prompt(engine, SYSTEM, CAT, QUESTION)
    engine.submit(request("image", entries, media=media))
    engine.submit(request("text", OTHER, max_tokens=20))
    answers: dict[str, Answer] = {}
    deadline = time.monotonic() + 120
    while "text" not in answers or answers["text"].end is None:
        collect(answers, engine)
        assert time.monotonic() < deadline
    assert len(answers["text"].tokens) > 5
    assert answers["image"].progress[-1] == len(SYSTEM)  # everything before the image
    assert not answers["image"].tokens
    engine.backend.projector.encoding_allowed.set()
    while engine.is_busy:
        collect(answers, engine)
    assert answers["image"].tokens == compute_completion("attention", entries)[0]


def test_the_encoder_thread_exits_when_idle_and_starts_again():
    """A thread that once computed makes every later decode slower, as long as it exists."""
    engine = make_engine()
    for number, image in enumerate((CAT, DOG), 1):
        ask(engine, SYSTEM, image, QUESTION)
        deadline = time.monotonic() + 120
        while any(thread.name == "afterglow-encoder" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert engine.counters.encoded_media == number


def test_an_engine_that_only_waits_for_the_encoder_does_not_spin():
    engine = make_engine()
    engine.backend.projector.encoding_allowed.clear()
    entries, media = build_prompt(engine, CAT, QUESTION)
    engine.submit(request("image", entries, media=media))
    steps, until = 0, time.monotonic() + 0.5
    while time.monotonic() < until:
        engine.step()
        steps += 1
    assert steps < 100
    engine.backend.projector.encoding_allowed.set()
    while engine.is_busy:
        engine.step()


def test_image_decodes_alternate_with_other_decodes():
    engine = make_engine(settings=EngineSettings(speculation="off"))
    images = [noise_image(seed, 9, 1) for seed in range(6)]
    ask(engine, *images)  # encodes them
    engine.submit(request("text", SYSTEM, max_tokens=60, ignore_eos=True))
    for _ in range(3):
        engine.step()
    entries, media = build_prompt(engine, OTHER, *images)
    engine.submit(request("image", entries, media=media, max_tokens=1))
    engine.backend.decode_history.clear()
    while engine.is_busy:
        engine.step()
    text_slot = next(span[0] for spans in engine.backend.decode_history for span in spans if len(spans) == 2)
    turns = "".join("t" if spans[0][0] == text_slot else "i" for spans in engine.backend.decode_history)
    assert "tititititi" in turns
    assert "ii" not in turns


@every_kind
def test_a_large_image_is_prefilled_in_parts_between_decodes(kind):
    """Each part is as long as the gap between tokens allows; other requests in between do not affect the image."""
    engine = make_engine(kind, EngineSettings(max_token_gap=0.0, speculation="off"))
    wide = noise_image(8, 60, 1)
    ask(engine, wide)  # encodes it
    entries, media = build_prompt(engine, SYSTEM, wide, QUESTION)
    engine.submit(request("text", OTHER, max_tokens=40, ignore_eos=True))
    engine.step()
    engine.submit(request("image", entries, media=media))
    engine.submit(request("late", [*SYSTEM, *OTHER]))
    partial_rows, answers = set(), {}
    while engine.is_busy:
        collect(answers, engine)
        check_all(engine)
        partial_rows |= {slot.partial_media_rows for slot in engine.prefix_cache.slots}
    assert partial_rows == {0, 16, 32, 48}
    assert answers["image"].tokens == compute_completion(kind, entries)[0]
    assert answers["late"].tokens == compute_completion(kind, [*SYSTEM, *OTHER])[0]


@every_kind
@pytest.mark.parametrize("kv_unified", [False, True])
def test_c9_a_request_that_ends_inside_an_image_leaves_no_part_of_it(kind, kv_unified):
    for ending in ("cancel", "failure", "full"):
        engine = make_engine(kind, EngineSettings(max_token_gap=0.0, speculation="off"), kv_unified=kv_unified)
        ask(engine, noise_image(8, 60, 1))  # encodes it
        entries, media = build_prompt(engine, SYSTEM, noise_image(8, 60, 1), QUESTION)
        engine.submit(request("text", OTHER, max_tokens=40, ignore_eos=True))
        answers: dict[str, Answer] = {}
        collect(answers, engine)
        engine.submit(request("image", entries, media=media))
        while not any(slot.partial_media_rows for slot in engine.prefix_cache.slots):
            assert engine.is_busy
            collect(answers, engine)
        if ending == "cancel":
            engine.cancel("image")
        else:
            engine.backend.injected_errors = [DecodeFailed(-3, "planted") if ending == "failure" else KVCacheFull(9, 9)]
        while engine.is_busy:
            collect(answers, engine)
            check_all(engine)
        if ending != "cancel":
            assert answers["image"].tokens == compute_completion(kind, entries)[0]
        assert answers["text"].tokens == compute_completion(kind, OTHER, max_tokens=40, ignore_eos=True)[0]
        assert ask(engine, SYSTEM, noise_image(8, 60, 1), OTHER).tokens == compute_completion(
            kind, build_prompt(engine, SYSTEM, noise_image(8, 60, 1), OTHER)[0]
        )[0]  # fmt: skip


def test_salts_share_no_encoded_image():
    engine = make_engine()
    ask(engine, SYSTEM, CAT, QUESTION, salt="mine")
    other = ask(engine, SYSTEM, CAT, QUESTION, salt="theirs")
    assert (other.end.usage.encoded_media, other.cached) == (1, 0)
    assert ask(engine, OTHER, CAT, QUESTION, salt="mine").end.usage.encoded_media == 0


def test_concurrent_requests_encode_the_same_image_once():
    engine = make_engine()
    first, second = build_prompt(engine, SYSTEM, CAT, QUESTION), build_prompt(engine, OTHER, CAT, QUESTION)
    answers = play(engine, request("a", first[0], media=first[1]), request("b", second[0], media=second[1]))
    assert sum(engine.backend.projector.encoded_batch_sizes) == 1
    assert sum(answer.end.usage.encoded_media for answer in answers.values()) == 1


def test_prompts_with_the_same_leading_image_prefill_it_once():
    """An image counts by its cells: waiting for its leader pays, however short the text around it is."""
    engine = make_engine()
    requests = []
    for name in "ab":
        entries, media = build_prompt(engine, [1, 2], CAT, [3, ord(name) % 50])
        requests.append(request(name, entries, media=media))
    play(engine, *requests)
    assert engine.counters.coalesced == 1


def test_the_encoder_cache_stays_within_its_bytes():
    engine = make_engine(settings=EngineSettings(encoder_cache_bytes=600))
    encoder_cache = engine.media_scheduler.encoder_cache
    for seed in range(6):
        ask(engine, noise_image(seed, 8, 1), QUESTION)
        assert encoder_cache.budget.used_bytes <= 600
    assert sum(engine.backend.projector.encoded_batch_sizes) == 6
    ask(engine, OTHER, noise_image(5, 8, 1), QUESTION)  # the newest is still cached
    assert sum(engine.backend.projector.encoded_batch_sizes) == 6
    ask(engine, OTHER, noise_image(0, 8, 1), QUESTION)  # the oldest was evicted
    assert sum(engine.backend.projector.encoded_batch_sizes) == 7
    ask(make_engine(settings=EngineSettings(encoder_cache_bytes=0)), CAT, QUESTION)


def test_an_encoding_failure_ends_only_its_own_request():
    engine = make_engine()
    projector = engine.backend.projector
    projector.encoding_allowed.clear()
    projector.injected_errors = [None, DecodeFailed(1, "together"), DecodeFailed(1, "the first alone")]
    prompts = {
        "before": build_prompt(engine, COW, [1]),
        "bad": build_prompt(engine, CAT, [1]),
        "good": build_prompt(engine, DOG, [1]),
    }
    for name, (entries, media) in prompts.items():
        engine.submit(request(name, entries, media=media))
        engine.step()
        assert projector.encoding_started.wait(60)  # the first is being encoded; the others form one batch
    projector.encoding_allowed.set()
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    assert str(answers["bad"].end.error) == str(DecodeFailed(1, "the first alone"))
    for name in ("before", "good"):
        assert answers[name].tokens == compute_completion("attention", prompts[name][0])[0]
    check_all(engine)


def test_an_unexpected_encoder_exception_is_an_engine_error():
    engine = make_engine()
    engine.backend.projector.injected_errors = [RuntimeError("broken")]
    assert isinstance(ask(engine, CAT, QUESTION).end.error, EngineError)
    check_all(engine)


def test_images_of_a_cancelled_request_are_not_encoded():
    engine = make_engine()
    engine.backend.projector.encoding_allowed.clear()
    busy = build_prompt(engine, noise_image(9, 5, 1), [1])
    engine.submit(request("busy", busy[0], media=busy[1]))
    engine.step()
    assert engine.backend.projector.encoding_started.wait(60)
    entries, media = build_prompt(engine, SYSTEM, CAT, DOG, QUESTION)
    engine.submit(request("gone", entries, media=media))
    engine.step()
    engine.cancel("gone")
    engine.step()
    engine.backend.projector.encoding_allowed.set()
    while engine.is_busy:
        engine.step()
    assert sum(engine.backend.projector.encoded_batch_sizes) == 1


@every_kind
def test_a_failed_image_decode_is_retried(kind):
    engine = make_engine(kind)
    entries, media = build_prompt(engine, SYSTEM, CAT, QUESTION)
    engine.submit(request("one", entries, media=media))
    answers: dict[str, Answer] = {}
    while not engine.media_scheduler.encoder_cache.encoded_count:
        collect(answers, engine)
    engine.backend.injected_errors = [DecodeFailed(-3, "planted")]
    while engine.is_busy:
        collect(answers, engine)
    check_all(engine)
    assert answers["one"].tokens == compute_completion(kind, entries)[0]
    assert engine.counters.encoded_media == 1


def test_a_non_causal_image_larger_than_a_batch_is_rejected():
    engine = fake(projector=FakeProjector(non_causal=True), batch_cells=16)
    engine.backend.interner = engine.interner
    entries, media = build_prompt(engine, CAT, QUESTION)
    with pytest.raises(UnsupportedMedia, match="20 tokens"):
        engine.submit(request("one", entries, media=media))


@every_kind
def test_deterministic_mode_reuses_images(kind):
    settings = EngineSettings(deterministic=True, grid=8)
    prompts = [(SYSTEM, CAT, QUESTION), (SYSTEM, CAT, OTHER), (SYSTEM, CAT, QUESTION, DOG, OTHER), (SYSTEM, DOG, OTHER)]
    warm = make_engine(kind, settings, simulate_rounding=True)
    for parts in prompts * 2:
        cold = make_engine(kind, settings, simulate_rounding=True)
        answer = ask(warm, *parts)
        assert answer.tokens == ask(cold, *parts).tokens
    assert answer.cached > 0
    assert ask(warm, SYSTEM, CAT, [5, 6, 7]).end.usage.cached_media_tokens == 20


def test_drafts_contain_no_media():
    engine = make_engine(settings=EngineSettings(speculation=4))
    around = prompt(9, 5)
    parts = (around, CAT, around, CAT, around)
    answer = ask(engine, *parts, max_tokens=30, ignore_eos=True)
    expected = compute_completion("attention", build_prompt(engine, *parts)[0], max_tokens=30, ignore_eos=True)[0]
    assert answer.tokens == expected
