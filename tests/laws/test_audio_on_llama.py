"""Laws of audio on llama.cpp: raw samples or the Whisper encoder, on every memory kind."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import UnsupportedMedia
from afterglow.media.types import MediaData
from laws.test_images_on_llama import OTHER, QUESTION, SYSTEM, ask, check_against_cold, play, random_prompt
from support.media_prompts import build_prompt, llama_engine, noise_image, note_audio
from support.play import request

PAIRS = [
    ("attention", "projector-wave"),
    ("window", "projector-wave"),
    ("hybrid", "projector-wave"),
    ("attention", "projector-ultravox"),
    ("hybrid", "projector-ultravox"),
]
pytestmark = pytest.mark.native
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
NOTE_A, NOTE_C, LONG_NOTE = note_audio("A"), note_audio("C"), note_audio("E", seconds=1.7, rate=44_100)


@pytest.fixture
def engines():
    with ExitStack() as stack:

        def make(pair: tuple[str, str], **options) -> Engine:
            engine = llama_engine(*pair, **options)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.mark.parametrize("kv_unified", [False, True])
@every_pair
def test_a_second_question_about_audio_encodes_nothing_and_computes_only_new_text(engines, pair, kv_unified):
    engine, cold = engines(pair, kv_unified=kv_unified), engines(pair, kv_unified=kv_unified)
    first = build_prompt(engine, SYSTEM, NOTE_A, QUESTION)
    first_answer = ask(engine, first)
    assert (first_answer.end.usage.encoded_media, engine.counters.encoded_media) == (1, 1)
    rows = engine.counters.rows
    second = first[0] + first_answer.tokens + OTHER, first[1]
    answer = ask(engine, second)
    usage = answer.end.usage
    assert (usage.encoded_media, engine.counters.encoded_media) == (0, 1)
    assert usage.audio_tokens == usage.media_tokens == usage.cached_media_tokens > 10
    assert engine.counters.rows - rows == 1 + len(OTHER) + len(answer.tokens) - 1
    assert usage.cached_tokens == usage.prompt_tokens - 1 - len(OTHER)
    check_against_cold(cold, answer, second)


@every_pair
def test_another_question_resumes_right_after_the_audio(engines, pair):
    """Also on a hybrid model: a checkpoint is taken right after each audio clip."""
    engine, cold = engines(pair), engines(pair)
    ask(engine, build_prompt(engine, SYSTEM, NOTE_A, QUESTION, QUESTION))
    other = build_prompt(engine, SYSTEM, NOTE_A, OTHER)
    answer = ask(engine, other)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    assert answer.end.usage.encoded_media == 0
    check_against_cold(cold, answer, other)


@every_pair
def test_audio_at_another_position_is_not_encoded_again(engines, pair):
    engine, cold = engines(pair), engines(pair)
    ask(engine, build_prompt(engine, SYSTEM, NOTE_A, QUESTION))
    moved = build_prompt(engine, OTHER, NOTE_A, QUESTION)
    answer = ask(engine, moved)
    assert answer.end.usage.cached_media_tokens == 0  # its cells depend on other entries before it
    assert (answer.end.usage.encoded_media, engine.counters.encoded_media) == (0, 1)
    check_against_cold(cold, answer, moved)


@every_pair
def test_audio_clips_of_the_same_length_are_distinct(engines, pair):
    engine, cold = engines(pair), engines(pair)
    first = ask(engine, build_prompt(engine, SYSTEM, NOTE_A, QUESTION))
    prompt = build_prompt(engine, SYSTEM, NOTE_C, QUESTION)
    second_clip = ask(engine, prompt)
    assert second_clip.end.usage.cached_media_tokens == 0
    assert second_clip.tokens != first.tokens
    check_against_cold(cold, second_clip, prompt)


def test_the_model_names_the_note_of_the_audio_in_the_prompt(engines):
    engine = engines(("notes", "projector-notes"))
    vocabulary = engine.backend.context.model.vocabulary
    question = vocabulary.tokenize(" Which note is this?\n")
    for _ in range(2):  # cold, then warm
        for letter in "CDEFGABA":
            answer = ask(engine, build_prompt(engine, vocabulary.tokenize("Listen: "), note_audio(letter), question))
            assert vocabulary.detokenize(answer.tokens[:1]) == letter.encode()
    assert engine.counters.encoded_media == 7
    assert answer.end.usage.cached_media_tokens == 13
    silence = ask(engine, build_prompt(engine, vocabulary.tokenize("Listen: "), note_audio("A", volume=0), question))
    assert vocabulary.detokenize(silence.tokens[:1]) == b"N"


def test_the_model_names_the_note_of_audio_at_the_end(engines):
    engine = engines(("notes", "projector-notes"))
    vocabulary = engine.backend.context.model.vocabulary
    for letter in "AFA":
        answer = ask(engine, build_prompt(engine, vocabulary.tokenize("Listen: "), note_audio(letter)), max_tokens=1)
        assert vocabulary.detokenize(answer.tokens) == letter.encode()


@pytest.mark.parametrize("kv_unified", [False, True])
@every_pair
def test_concurrency_and_chunking_change_no_token_with_audio(engines, pair, kv_unified):
    engine, cold = engines(pair, kv_unified=kv_unified), engines(pair, kv_unified=kv_unified)
    prompts = {
        "bell": build_prompt(engine, SYSTEM, NOTE_A, QUESTION),
        "horn": build_prompt(engine, SYSTEM[:10], NOTE_C, OTHER),
        "both": build_prompt(engine, SYSTEM[:5], NOTE_A, QUESTION[:3], NOTE_C, OTHER),
        "text": (random_prompt(150, 7), {}),
        "long": build_prompt(engine, OTHER, LONG_NOTE, SYSTEM),
    }
    answers = play(engine, *(request(name, entries, media=media) for name, (entries, media) in prompts.items()))
    assert engine.counters.max_batch_jobs >= 3
    assert engine.counters.encoded_media == 3
    for name, prompt in prompts.items():
        check_against_cold(cold, answers[name], prompt)


@every_pair
def test_audio_larger_than_a_batch_is_prefilled_in_parts(engines, pair):
    small, large = engines(pair, batch=8, ubatch=8), engines(pair)
    prompt = build_prompt(small, SYSTEM, LONG_NOTE, QUESTION)
    answer = ask(small, prompt)
    assert answer.end.usage.audio_tokens > 16
    check_against_cold(large, answer, prompt)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_minute_of_audio_is_several_pieces_that_are_encoded_together(engines, kind):
    pair = (kind, "projector-ultravox")
    engine, cold = engines(pair), engines(pair)
    minute = note_audio("B", seconds=61)
    first = build_prompt(engine, SYSTEM, minute, QUESTION)
    assert len(first[1]) == 3
    first_answer = ask(engine, first)
    assert (first_answer.end.usage.audio_tokens, first_answer.end.usage.encoded_media) == (90, 1)
    second = first[0] + first_answer.tokens + OTHER, first[1]
    answer = ask(engine, second)
    assert (answer.end.usage.cached_media_tokens, answer.end.usage.encoded_media) == (90, 0)
    check_against_cold(cold, answer, second)


@every_pair
def test_audio_is_restored_from_the_ram_tier(engines, pair):
    engine, cold = engines(pair, sequences=2, cells=1024), engines(pair)
    first = build_prompt(engine, SYSTEM, NOTE_A, QUESTION)
    first_answer = ask(engine, first)
    while engine.prefix_cache.evict():
        pass
    second = first[0] + first_answer.tokens + OTHER, first[1]
    answer = ask(engine, second)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    assert engine.prefix_cache.store.ram_counters.hits == 1
    assert engine.counters.encoded_media == 1
    check_against_cold(cold, answer, second)


@every_pair
def test_audio_is_restored_from_the_disk_tier_after_a_restart(engines, pair, tmp_path):
    settings = EngineSettings(disk_cache_directory=tmp_path / "cache")
    engine = llama_engine(*pair, settings=settings)
    first = build_prompt(engine, SYSTEM, NOTE_A, QUESTION)
    first_answer = ask(engine, first)
    engine.close()
    again, cold = engines(pair, settings=settings), engines(pair)
    second = first[0] + first_answer.tokens + OTHER, first[1]
    answer = ask(again, second)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    check_against_cold(cold, answer, second)
    moved = build_prompt(again, OTHER, NOTE_A, QUESTION)
    answer = ask(again, moved)
    assert again.counters.encoded_media == 0  # its embeddings were on disk
    check_against_cold(cold, answer, moved)


@every_pair
def test_deterministic_mode_is_exact_with_audio(engines, pair):
    settings = EngineSettings(deterministic=True, grid=8)
    engine, cold = engines(pair, settings=settings), engines(pair, settings=settings)
    first = build_prompt(engine, SYSTEM, NOTE_A, QUESTION)
    first_answer = ask(engine, first)
    prompts = {
        "again": first,
        "second": (first[0] + first_answer.tokens + OTHER, first[1]),
        "other": build_prompt(engine, SYSTEM, NOTE_A, OTHER),
        "both": build_prompt(engine, SYSTEM, NOTE_A, OTHER[:3], NOTE_C, QUESTION),
    }
    warm = {name: ask(engine, prompt) for name, prompt in prompts.items()}
    for name, (entries, media) in prompts.items():
        assert warm[name].tokens == ask(cold, (entries, media), use_prefix_cache=False).tokens, name
    assert warm["other"].end.usage.cached_media_tokens == warm["other"].end.usage.media_tokens > 0
    together = play(engine, *(request(name, item[0], media=item[1]) for name, item in prompts.items()))
    assert {name: item.tokens for name, item in together.items()} == {name: item.tokens for name, item in warm.items()}


@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
def test_a_prompt_can_contain_images_and_audio(engines, kind):
    pair = (kind, "projector-both")
    engine, cold = engines(pair), engines(pair)
    first = build_prompt(engine, SYSTEM, noise_image(1), OTHER[:3], NOTE_A, QUESTION)
    first_answer = ask(engine, first)
    usage = first_answer.end.usage
    assert (usage.media_tokens, usage.audio_tokens, usage.encoded_media) == (29, 13, 2)
    second = first[0] + first_answer.tokens + OTHER, first[1]
    answer = ask(engine, second)
    assert (answer.end.usage.cached_media_tokens, answer.end.usage.encoded_media) == (29, 0)
    check_against_cold(cold, answer, second)
    swapped = build_prompt(engine, SYSTEM, NOTE_A, OTHER[:3], noise_image(1), QUESTION)
    answer = ask(engine, swapped)
    assert answer.end.usage.encoded_media == 0
    check_against_cold(cold, answer, swapped)


@pytest.mark.parametrize(
    ("pair", "content", "reason"),
    [
        (("attention", "projector-wave"), noise_image(1), "supports audio, not image"),
        (("attention", "projector-llava"), NOTE_A, "supports image, not audio"),
    ],
)
def test_media_that_the_projector_does_not_support_is_rejected(engines, pair, content: MediaData, reason: str):
    with pytest.raises(UnsupportedMedia, match=reason):
        build_prompt(engines(pair), SYSTEM, content)
