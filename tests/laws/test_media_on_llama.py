"""Laws of images and audio on llama.cpp, on every memory kind.

Images: plain, non-causal with a sliding window, and M-RoPE on a hybrid model. Audio: raw samples, Whisper encoder.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, UnsupportedMedia
from afterglow.llama.settings import ContextSettings
from afterglow.media.types import MediaData
from afterglow.testing import models
from support.media_prompts import (
    PAIRS,
    build_prompt,
    check_positions,
    color_image,
    llama_engine,
    noise_image,
    note_audio,
)
from support.play import Answer, collect, request

LAYOUTS = (False, True)
every_image_pair = pytest.mark.parametrize("kind", PAIRS)
every_layout = pytest.mark.parametrize("kv_unified", LAYOUTS)
MAX_MARGIN = 0.02  # the batch shape changes logits by about 1e-3, a wrong state by far more
pytestmark = pytest.mark.native


@pytest.fixture
def engines():
    with ExitStack() as stack:

        def make(*arguments, **options) -> Engine:
            engine = llama_engine(*arguments, **options)
            stack.callback(engine.close)
            return engine

        yield make


def random_prompt(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(20, 250, length)]


SYSTEM, QUESTION, OTHER = random_prompt(40, 1), random_prompt(20, 2), random_prompt(25, 3)
CAT, DOG, WIDE = noise_image(1), noise_image(2), noise_image(3, 120, 40)
NOTE_A, NOTE_C, LONG_NOTE = note_audio("A"), note_audio("C"), note_audio("E", seconds=1.7, rate=44_100)


@dataclass(frozen=True, slots=True)
class Medium:
    """A modality on one model and projector: two contents of the same size, and larger ones."""

    modality: str
    kind: str
    projector: str
    one: MediaData
    other: MediaData
    large: MediaData
    larger_than_a_batch: MediaData

    def __str__(self) -> str:
        return f"{self.modality} {self.kind} {self.projector}"

    @property
    def pair(self) -> tuple[str, str]:
        return self.kind, self.projector


IMAGES = [Medium("image", *pair, CAT, DOG, WIDE, noise_image(5, 128, 128)) for pair in PAIRS.items()]
AUDIO = [
    Medium("audio", kind, projector, NOTE_A, NOTE_C, LONG_NOTE, LONG_NOTE)
    for kind, projector in (
        ("attention", "projector-wave"),
        ("window", "projector-wave"),
        ("hybrid", "projector-wave"),
        ("attention", "projector-ultravox"),
        ("hybrid", "projector-ultravox"),
    )
]
every_medium = pytest.mark.parametrize("medium", [*IMAGES, *AUDIO], ids=str)


def play(engine: Engine, *requests) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for req in requests:
        engine.submit(req)
    while engine.is_busy:
        collect(answers, engine)
    check_positions(engine)
    return answers


def ask(engine: Engine, prompt, **options) -> Answer:
    entries, media = prompt
    return play(engine, request("one", entries, media=media, **options))["one"]


def check_against_cold(engine: Engine, answer: Answer, prompt, **options) -> None:
    """Check that tokens are equal up to a position at which the margin of the cold run is small."""
    entries, media = prompt
    engine.submit(request("cold", entries, media=media, use_prefix_cache=False, logprobs=2, **options))
    tokens, margins = [], []
    while engine.is_busy:
        for event in engine.step():
            if type(event).__name__ == "Token":
                tokens.append(event.token)
                margins.append(event.alternatives[0][1] - event.alternatives[1][1])
    for token, expected, margin in zip(answer.tokens, tokens, margins, strict=False):
        if token != expected:
            assert margin < MAX_MARGIN, f"{answer.tokens} instead of {tokens}"
            return
    assert len(answer.tokens) == len(tokens)


@every_layout
@every_medium
def test_c7_a_second_question_about_a_medium_encodes_nothing_and_computes_only_new_text(engines, medium, kv_unified):
    engine, cold = engines(*medium.pair, kv_unified=kv_unified), engines(*medium.pair, kv_unified=kv_unified)
    first = build_prompt(engine, SYSTEM, medium.one, QUESTION)
    first_answer = ask(engine, first)
    assert (first_answer.end.usage.encoded_media, engine.counters.encoded_media) == (1, 1)
    rows = engine.counters.rows
    second = first[0] + first_answer.tokens + OTHER, first[1]
    answer = ask(engine, second)
    usage = answer.end.usage
    assert (usage.encoded_media, engine.counters.encoded_media) == (0, 1)
    assert usage.media_tokens == usage.cached_media_tokens > 10
    assert usage.audio_tokens == (usage.media_tokens if medium.modality == "audio" else 0)
    assert engine.counters.rows - rows == 1 + len(OTHER) + len(answer.tokens) - 1
    assert usage.cached_tokens == usage.prompt_tokens - 1 - len(OTHER)
    check_against_cold(cold, answer, second)


@every_layout
@every_medium
def test_c7_another_question_resumes_right_after_the_medium(engines, medium, kv_unified):
    """Also on a hybrid model: a checkpoint is taken right after each medium."""
    engine, cold = engines(*medium.pair, kv_unified=kv_unified), engines(*medium.pair, kv_unified=kv_unified)
    ask(engine, build_prompt(engine, SYSTEM, medium.one, QUESTION, QUESTION))
    other = build_prompt(engine, SYSTEM, medium.one, OTHER)
    answer = ask(engine, other)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    assert answer.end.usage.encoded_media == 0
    check_against_cold(cold, answer, other)


@every_layout
@every_image_pair
def test_c7_a_new_image_in_the_suffix_reuses_everything_before_it(engines, kind, kv_unified):
    engine, cold = engines(kind, kv_unified=kv_unified), engines(kind, kv_unified=kv_unified)
    first = build_prompt(engine, SYSTEM, CAT, QUESTION)
    first_answer = ask(engine, first, max_tokens=4)
    rows = engine.counters.rows
    second = build_prompt(engine, first[0] + first_answer.tokens, DOG, OTHER)
    second = second[0], {**first[1], **second[1]}
    answer = ask(engine, second, max_tokens=4)
    usage = answer.end.usage
    assert usage.encoded_media == 1
    before = usage.prompt_tokens - (usage.media_tokens - usage.cached_media_tokens) - len(OTHER)
    # Everything except the last generated token and the tokens around the image.
    assert usage.cached_tokens >= before - 1 - 2
    assert engine.counters.rows - rows == usage.prompt_tokens - usage.cached_tokens + len(answer.tokens) - 1
    check_against_cold(cold, answer, second, max_tokens=4)


@every_medium
def test_c7_a_medium_at_another_position_is_not_encoded_again(engines, medium):
    engine, cold = engines(*medium.pair), engines(*medium.pair)
    ask(engine, build_prompt(engine, SYSTEM, medium.one, QUESTION))
    moved = build_prompt(engine, OTHER, medium.one, QUESTION)
    answer = ask(engine, moved)
    assert answer.end.usage.cached_media_tokens == 0  # its cells depend on other entries before it
    assert (answer.end.usage.encoded_media, engine.counters.encoded_media) == (0, 1)
    check_against_cold(cold, answer, moved)


@every_medium
def test_c6_media_of_the_same_size_are_distinct(engines, medium):
    engine, cold = engines(*medium.pair), engines(*medium.pair)
    cat = ask(engine, build_prompt(engine, SYSTEM, medium.one, QUESTION))
    prompt = build_prompt(engine, SYSTEM, medium.other, QUESTION)
    dog = ask(engine, prompt)
    assert dog.end.usage.cached_media_tokens == 0
    assert dog.tokens != cat.tokens
    check_against_cold(cold, dog, prompt)


def test_c6_the_model_names_the_color_of_the_image_in_the_prompt(engines):
    engine = engines("colors", "projector-colors")
    vocabulary = engine.backend.context.model.vocabulary
    question = vocabulary.tokenize(" What colour is this?\n")
    for _ in range(2):  # cold, then warm
        for letter in "RGBYKR":
            answer = ask(engine, build_prompt(engine, vocabulary.tokenize("Look: "), color_image(letter), question))
            assert vocabulary.detokenize(answer.tokens[:1]) == letter.encode()
    assert engine.counters.encoded_media == 5
    assert answer.end.usage.cached_media_tokens == 16


@every_layout
@every_medium
def test_concurrency_and_chunking_change_no_token_with_media(engines, medium, kv_unified):
    engine, cold = engines(*medium.pair, kv_unified=kv_unified), engines(*medium.pair, kv_unified=kv_unified)
    prompts = {
        "cat": build_prompt(engine, SYSTEM, medium.one, QUESTION),
        "dog": build_prompt(engine, SYSTEM[:10], medium.other, OTHER),
        "both": build_prompt(engine, SYSTEM[:5], medium.one, QUESTION[:3], medium.other, OTHER),
        "text": (random_prompt(150, 7), {}),
        "wide": build_prompt(engine, OTHER, medium.large, SYSTEM),
    }
    answers = play(engine, *(request(name, entries, media=shown) for name, (entries, shown) in prompts.items()))
    assert engine.counters.max_batch_jobs >= 3
    assert engine.counters.encoded_media == 3
    for name, prompt in prompts.items():
        check_against_cold(cold, answers[name], prompt)


@pytest.mark.parametrize("medium", [image for image in IMAGES if image.kind != "window"] + AUDIO, ids=str)
def test_a_medium_larger_than_a_batch_is_prefilled_in_parts(engines, medium):
    small, large = engines(*medium.pair, batch=8, ubatch=8), engines(*medium.pair)
    prompt = build_prompt(small, SYSTEM, medium.larger_than_a_batch, QUESTION)
    answer = ask(small, prompt)
    assert answer.end.usage.media_tokens > 8
    assert answer.end.usage.audio_tokens > 16 or medium.modality == "image"
    check_against_cold(large, answer, prompt)


def test_a_non_causal_image_larger_than_a_ubatch_is_rejected(engines):
    engine = engines("window", batch=8, ubatch=8)
    entries, media = build_prompt(engine, SYSTEM, CAT, QUESTION)
    with pytest.raises(UnsupportedMedia, match="16 tokens must be computed in one ubatch of at most 8"):
        engine.submit(request("one", entries, media=media))
    assert len(ask(engine, (SYSTEM, {})).tokens) == 12


@every_layout
@every_image_pair
def test_c8_a_prompt_that_ends_with_an_image_is_sampled_from_its_last_row(engines, kind, kv_unified):
    engine = engines(kind, kv_unified=kv_unified)
    entries, media = build_prompt(engine, SYSTEM, CAT)
    last = max(index for index, entry in enumerate(entries) if not isinstance(entry, int))
    prompt = entries[: last + 1], media  # some models need a token after the image; it is left out here
    cold = ask(engine, prompt, ignore_eos=True)
    assert len(cold.tokens) == 12
    again = ask(engine, prompt, ignore_eos=True)  # from the stored logits after the image
    assert again.tokens == cold.tokens
    assert again.end.usage.cached_media_tokens == again.end.usage.media_tokens
    assert engine.counters.encoded_media == 1
    check_against_cold(engines(kind, kv_unified=kv_unified), cold, prompt, ignore_eos=True)


def test_c8_the_model_names_the_color_of_an_image_at_the_end(engines):
    engine = engines("colors", "projector-colors")
    vocabulary = engine.backend.context.model.vocabulary
    for letter in "RBR":
        answer = ask(engine, build_prompt(engine, vocabulary.tokenize("Look: "), color_image(letter)), max_tokens=1)
        assert vocabulary.detokenize(answer.tokens) == letter.encode()


@every_medium
def test_media_are_restored_from_the_ram_tier(engines, medium):
    engine, cold = engines(*medium.pair, sequences=2, cells=1024), engines(*medium.pair)
    first = build_prompt(engine, SYSTEM, medium.one, QUESTION)
    first_answer = ask(engine, first)
    while engine.prefix_cache.evict():
        pass
    second = first[0] + first_answer.tokens + OTHER, first[1]
    answer = ask(engine, second)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    assert engine.prefix_cache.store.ram.counters.hits == 1
    assert engine.counters.encoded_media == 1
    check_against_cold(cold, answer, second)


@every_medium
def test_media_are_restored_from_the_disk_tier_after_a_restart(engines, medium, tmp_path):
    settings = EngineSettings(disk_cache_directory=tmp_path / "cache")
    engine = llama_engine(*medium.pair, settings=settings)
    first = build_prompt(engine, SYSTEM, medium.one, QUESTION)
    first_answer = ask(engine, first)
    engine.close()
    again, cold = engines(*medium.pair, settings=settings), engines(*medium.pair)
    second = first[0] + first_answer.tokens + OTHER, first[1]
    answer = ask(again, second)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    check_against_cold(cold, answer, second)
    moved = build_prompt(again, OTHER, medium.one, QUESTION)
    answer = ask(again, moved)
    assert again.counters.encoded_media == 0  # its embeddings were on disk
    check_against_cold(cold, answer, moved)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "cache" / "media").iterdir()} == {0o600}


@every_image_pair
def test_media_digests_depend_on_the_projector(engines, kind, tmp_path):
    """Cached state of an image is found only with the same projector."""
    engine = engines(kind)
    _entries, media = build_prompt(engine, SYSTEM, CAT, QUESTION)
    (digest,) = media
    part = media[digest]
    assert part.compute_digest(engine.backend.projector.key) == digest
    assert part.compute_digest(b"another projector") != digest


@every_medium
def test_deterministic_mode_is_exact_with_media(engines, medium):
    settings = EngineSettings(deterministic=True, grid=8)
    engine, cold = engines(*medium.pair, settings=settings), engines(*medium.pair, settings=settings)
    first = build_prompt(engine, SYSTEM, medium.one, QUESTION)
    first_answer = ask(engine, first)
    prompts = {
        "again": first,
        "second": (first[0] + first_answer.tokens + OTHER, first[1]),
        "other": build_prompt(engine, SYSTEM, medium.one, OTHER),
        "dog": build_prompt(engine, SYSTEM, medium.other, OTHER),
        "both": build_prompt(engine, SYSTEM, medium.one, OTHER[:3], medium.other, QUESTION),
    }
    warm = {name: ask(engine, prompt) for name, prompt in prompts.items()}
    for name, (entries, media) in prompts.items():
        assert warm[name].tokens == ask(cold, (entries, media), use_prefix_cache=False).tokens, name
    assert warm["other"].end.usage.cached_media_tokens == warm["other"].end.usage.media_tokens > 0
    together = play(engine, *(request(name, entries, media=media) for name, (entries, media) in prompts.items()))
    expected = {name: answer.tokens for name, answer in warm.items()}
    assert {name: answer.tokens for name, answer in together.items()} == expected


@every_image_pair
def test_c9_an_interrupted_image_decode_leaves_the_entries_correct(engines, kind):
    engine, cold = engines(kind), engines(kind)
    prompt = build_prompt(engine, SYSTEM, CAT, QUESTION)
    other = random_prompt(30, 8), {}
    engine.submit(request("cancelled", prompt[0], media=prompt[1]))
    engine.submit(request("other", other[0], max_tokens=30))
    original = engine.backend.context.decode_embeddings

    def interrupted(batch, *, causal):
        engine.cancel("cancelled")  # as another thread does while the decode runs
        engine.backend.interrupt()
        return original(batch, causal=causal)

    engine.backend.context.decode_embeddings = interrupted
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    engine.backend.context.decode_embeddings = original
    assert type(answers["cancelled"].end.error).__name__ == "Cancelled"
    assert len(answers["other"].tokens) == 30
    check_positions(engine)
    again = ask(engine, prompt)
    check_against_cold(cold, again, prompt)


def test_c18_an_image_without_a_projector_is_rejected(engines):
    with_projector = engines("attention")
    without_projector = engines("attention")
    prompt = build_prompt(with_projector, SYSTEM, CAT)
    capabilities = without_projector.backend.capabilities
    without_projector.backend.capabilities = dataclasses.replace(capabilities, media=frozenset())
    with pytest.raises(UnsupportedMedia, match="only text"):
        without_projector.submit(request("one", prompt[0], media=prompt[1]))


def test_c18_media_that_does_not_match_the_entries_is_rejected(engines):
    engine = engines("attention")
    (entries, media), (_, others) = build_prompt(engine, SYSTEM, CAT), build_prompt(engine, SYSTEM, DOG)
    with pytest.raises(InvalidArgument, match="no content for a media entry"):
        engine.submit(request("one", entries))
    with pytest.raises(InvalidArgument, match="different content"):
        engine.submit(request("one", entries, media=dict(zip(media, others.values(), strict=True))))


@pytest.mark.parametrize("draft", ["mtp", "model"])
def test_speculation_changes_no_token_with_images(draft):
    """MTP heads read tokens only and restart after an image. A draft model has no projector and drafts nothing."""
    settings = EngineSettings(speculation=3)
    context = ContextSettings(
        cells=4096, sequences=4, batch=128, ubatch=64, outputs=32, threads=1, recurrent_snapshots=3
    )
    path, projector = models.get_path("hybrid-mtp"), models.get_path("projector-qwen")
    draft_source = "mtp" if draft == "mtp" else models.get_path("draft")
    speculating = EngineSpec(
        path=path, projector_path=projector, context_settings=context, engine_settings=settings, draft=draft_source
    )()
    plain = llama_engine("hybrid")
    try:
        prompts = [(SYSTEM, CAT, QUESTION), (SYSTEM, CAT, QUESTION, DOG, OTHER), (OTHER, CAT), (SYSTEM, OTHER)]
        for parts in prompts:
            prompt = build_prompt(speculating, *parts)
            answer = ask(speculating, prompt, max_tokens=20, ignore_eos=True)
            check_against_cold(plain, answer, prompt, max_tokens=20, ignore_eos=True)
        assert speculating.counters.draft_tokens > 0
    finally:
        speculating.close()
        plain.close()


def test_the_model_names_the_note_of_the_audio_in_the_prompt(engines):
    engine = engines("notes", "projector-notes")
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
    engine = engines("notes", "projector-notes")
    vocabulary = engine.backend.context.model.vocabulary
    for letter in "AFA":
        answer = ask(engine, build_prompt(engine, vocabulary.tokenize("Listen: "), note_audio(letter)), max_tokens=1)
        assert vocabulary.detokenize(answer.tokens) == letter.encode()


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_minute_of_audio_is_several_pieces_that_are_encoded_together(engines, kind):
    pair = (kind, "projector-ultravox")
    engine, cold = engines(*pair), engines(*pair)
    minute = note_audio("B", seconds=61)
    first = build_prompt(engine, SYSTEM, minute, QUESTION)
    assert len(first[1]) == 3
    first_answer = ask(engine, first)
    assert (first_answer.end.usage.audio_tokens, first_answer.end.usage.encoded_media) == (90, 1)
    second = first[0] + first_answer.tokens + OTHER, first[1]
    answer = ask(engine, second)
    assert (answer.end.usage.cached_media_tokens, answer.end.usage.encoded_media) == (90, 0)
    check_against_cold(cold, answer, second)


@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
def test_a_prompt_can_contain_images_and_audio(engines, kind):
    pair = (kind, "projector-both")
    engine, cold = engines(*pair), engines(*pair)
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
    ("projector", "content", "reason"),
    [
        ("projector-wave", noise_image(1), "supports audio, not image"),
        ("projector-llava", NOTE_A, "supports image, not audio"),
    ],
)
def test_media_that_the_projector_does_not_support_is_rejected(engines, projector, content: MediaData, reason: str):
    with pytest.raises(UnsupportedMedia, match=reason):
        build_prompt(engines("attention", projector), SYSTEM, content)
