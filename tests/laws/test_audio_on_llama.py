"""The laws with sounds on real llama.cpp: the wave itself or whisper's encoder, on every kind of memory."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import UnsupportedMedia
from afterglow.media.types import MediaData
from laws.test_images_on_llama import OTHER, QUESTION, SYSTEM, ask, check_against_cold, play, words
from support.media_prompts import asked, llama_engine, noisy, played
from support.play import request

PAIRS = [
    ("attention", "projector-wave"),
    ("window", "projector-wave"),
    ("hybrid", "projector-wave"),
    ("attention", "projector-ultravox"),
    ("hybrid", "projector-ultravox"),
]
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
BELL, HORN, LONG = played("A"), played("C"), played("E", seconds=1.7, rate=44_100)


@pytest.fixture
def engines():
    with ExitStack() as stack:

        def make(pair: tuple[str, str], **options) -> Engine:
            engine = llama_engine(*pair, **options)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.mark.parametrize("unified", [False, True])
@every_pair
def test_a_second_question_about_a_sound_encodes_nothing_and_decodes_only_new_text(engines, pair, unified):
    engine, cold = engines(pair, kv_unified=unified), engines(pair, kv_unified=unified)
    first = asked(engine, SYSTEM, BELL, QUESTION)
    said = ask(engine, first)
    assert (said.end.usage.encoded_media, engine.counters.encoded_media) == (1, 1)
    rows = engine.counters.rows
    second = first[0] + said.tokens + OTHER, first[1]
    answer = ask(engine, second)
    usage = answer.end.usage
    assert (usage.encoded_media, engine.counters.encoded_media) == (0, 1)
    assert usage.audio_tokens == usage.media_tokens == usage.cached_media_tokens > 10
    assert engine.counters.rows - rows == 1 + len(OTHER) + len(answer.tokens) - 1
    assert usage.cached_tokens == usage.prompt_tokens - 1 - len(OTHER)
    check_against_cold(cold, answer, second)


@every_pair
def test_another_question_about_a_sound_goes_on_right_behind_it(engines, pair):
    """Also on a hybrid: there is a checkpoint right after each sound."""
    engine, cold = engines(pair), engines(pair)
    ask(engine, asked(engine, SYSTEM, BELL, QUESTION, QUESTION))
    other = asked(engine, SYSTEM, BELL, OTHER)
    answer = ask(engine, other)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    assert answer.end.usage.encoded_media == 0
    check_against_cold(cold, answer, other)


@every_pair
def test_a_sound_that_moved_encodes_nothing(engines, pair):
    engine, cold = engines(pair), engines(pair)
    ask(engine, asked(engine, SYSTEM, BELL, QUESTION))
    moved = asked(engine, OTHER, BELL, QUESTION)
    answer = ask(engine, moved)
    assert answer.end.usage.cached_media_tokens == 0  # its cells are those of another past
    assert (answer.end.usage.encoded_media, engine.counters.encoded_media) == (0, 1)
    check_against_cold(cold, answer, moved)


@every_pair
def test_two_sounds_of_the_same_length_are_never_confused(engines, pair):
    engine, cold = engines(pair), engines(pair)
    bell = ask(engine, asked(engine, SYSTEM, BELL, QUESTION))
    prompt = asked(engine, SYSTEM, HORN, QUESTION)
    horn = ask(engine, prompt)
    assert horn.end.usage.cached_media_tokens == 0
    assert horn.tokens != bell.tokens
    check_against_cold(cold, horn, prompt)


def test_the_note_that_is_named_is_that_of_the_sound_in_the_prompt(engines):
    engine = engines(("notes", "projector-notes"))
    vocabulary = engine.backend.context.model.vocabulary
    question = vocabulary.tokenize(" Which note is this?\n")
    for _ in range(2):  # cold, then warm
        for letter in "CDEFGABA":
            answer = ask(engine, asked(engine, vocabulary.tokenize("Listen: "), played(letter), question))
            assert vocabulary.detokenize(answer.tokens[:1]) == letter.encode()
    assert engine.counters.encoded_media == 7
    assert answer.end.usage.cached_media_tokens == 13
    silent = ask(engine, asked(engine, vocabulary.tokenize("Listen: "), played("A", volume=0), question))
    assert vocabulary.detokenize(silent.tokens[:1]) == b"N"


def test_the_note_of_a_sound_at_the_end_of_a_prompt_is_named_behind_it(engines):
    engine = engines(("notes", "projector-notes"))
    vocabulary = engine.backend.context.model.vocabulary
    for letter in "AFA":
        answer = ask(engine, asked(engine, vocabulary.tokenize("Listen: "), played(letter)), max_tokens=1)
        assert vocabulary.detokenize(answer.tokens) == letter.encode()


@pytest.mark.parametrize("unified", [False, True])
@every_pair
def test_company_and_chunking_change_no_token_with_sounds(engines, pair, unified):
    engine, cold = engines(pair, kv_unified=unified), engines(pair, kv_unified=unified)
    prompts = {
        "bell": asked(engine, SYSTEM, BELL, QUESTION),
        "horn": asked(engine, SYSTEM[:10], HORN, OTHER),
        "both": asked(engine, SYSTEM[:5], BELL, QUESTION[:3], HORN, OTHER),
        "text": (words(150, 7), {}),
        "long": asked(engine, OTHER, LONG, SYSTEM),
    }
    answers = play(engine, *(request(name, entries, contents=heard) for name, (entries, heard) in prompts.items()))
    assert engine.counters.max_batch_jobs >= 3
    assert engine.counters.encoded_media == 3
    for name, prompt in prompts.items():
        check_against_cold(cold, answers[name], prompt)


@every_pair
def test_a_sound_larger_than_a_batch_is_computed_in_parts(engines, pair):
    small, large = engines(pair, batch=8, ubatch=8), engines(pair)
    prompt = asked(small, SYSTEM, LONG, QUESTION)
    answer = ask(small, prompt)
    assert answer.end.usage.audio_tokens > 16
    check_against_cold(large, answer, prompt)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_sound_of_a_minute_is_several_pieces_that_are_encoded_together(engines, kind):
    pair = (kind, "projector-ultravox")
    engine, cold = engines(pair), engines(pair)
    minute = played("B", seconds=61)
    first = asked(engine, SYSTEM, minute, QUESTION)
    assert len(first[1]) == 3
    said = ask(engine, first)
    assert (said.end.usage.audio_tokens, said.end.usage.encoded_media) == (90, 1)
    second = first[0] + said.tokens + OTHER, first[1]
    answer = ask(engine, second)
    assert (answer.end.usage.cached_media_tokens, answer.end.usage.encoded_media) == (90, 0)
    check_against_cold(cold, answer, second)


@every_pair
def test_sounds_come_back_from_ram(engines, pair):
    engine, cold = engines(pair, sequences=2, cells=1024), engines(pair)
    first = asked(engine, SYSTEM, BELL, QUESTION)
    said = ask(engine, first)
    while engine.prefix_cache.evict():
        pass
    second = first[0] + said.tokens + OTHER, first[1]
    answer = ask(engine, second)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    assert engine.prefix_cache.store.ram_counters.hits == 1
    assert engine.counters.encoded_media == 1
    check_against_cold(cold, answer, second)


@every_pair
def test_sounds_come_back_from_disk_after_a_restart(engines, pair, tmp_path):
    settings = EngineSettings(disk_cache_directory=tmp_path / "kept")
    engine = llama_engine(*pair, settings=settings)
    first = asked(engine, SYSTEM, BELL, QUESTION)
    said = ask(engine, first)
    engine.close()
    again, cold = engines(pair, settings=settings), engines(pair)
    second = first[0] + said.tokens + OTHER, first[1]
    answer = ask(again, second)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    check_against_cold(cold, answer, second)
    moved = asked(again, OTHER, BELL, QUESTION)
    answer = ask(again, moved)
    assert again.counters.encoded == 0  # its rows were on disk, too
    check_against_cold(cold, answer, moved)


@every_pair
def test_the_deterministic_mode_is_exact_with_sounds(engines, pair):
    settings = EngineSettings(deterministic=True, grid=8)
    engine, cold = engines(pair, settings=settings), engines(pair, settings=settings)
    first = asked(engine, SYSTEM, BELL, QUESTION)
    said = ask(engine, first)
    prompts = {
        "again": first,
        "second": (first[0] + said.tokens + OTHER, first[1]),
        "other": asked(engine, SYSTEM, BELL, OTHER),
        "both": asked(engine, SYSTEM, BELL, OTHER[:3], HORN, QUESTION),
    }
    warm = {name: ask(engine, prompt) for name, prompt in prompts.items()}
    for name, (entries, contents) in prompts.items():
        assert warm[name].tokens == ask(cold, (entries, contents), reuse=False).tokens, name
    assert warm["other"].end.usage.cached_media_tokens == warm["other"].end.usage.media_tokens > 0
    together = play(engine, *(request(name, one[0], contents=one[1]) for name, one in prompts.items()))
    assert {name: one.tokens for name, one in together.items()} == {name: one.tokens for name, one in warm.items()}


@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
def test_pictures_and_sounds_stand_in_one_prompt(engines, kind):
    pair = (kind, "projector-both")
    engine, cold = engines(pair), engines(pair)
    first = asked(engine, SYSTEM, noisy(1), OTHER[:3], BELL, QUESTION)
    said = ask(engine, first)
    usage = said.end.usage
    assert (usage.media_tokens, usage.audio_tokens, usage.encoded_media) == (29, 13, 2)
    second = first[0] + said.tokens + OTHER, first[1]
    answer = ask(engine, second)
    assert (answer.end.usage.cached_media_tokens, answer.end.usage.encoded_media) == (29, 0)
    check_against_cold(cold, answer, second)
    swapped = asked(engine, SYSTEM, BELL, OTHER[:3], noisy(1), QUESTION)
    answer = ask(engine, swapped)
    assert answer.end.usage.encoded_media == 0
    check_against_cold(cold, answer, swapped)


@pytest.mark.parametrize(
    ("pair", "content", "reason"),
    [
        (("attention", "projector-wave"), noisy(1), "takes audio, not image"),
        (("attention", "projector-llava"), BELL, "takes image, not audio"),
    ],
)
def test_what_a_projector_does_not_take_is_refused(engines, pair, content: MediaData, reason: str):
    with pytest.raises(UnsupportedMedia, match=reason):
        asked(engines(pair), SYSTEM, content)
