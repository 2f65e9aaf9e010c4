"""Laws of images on llama.cpp: plain, non-causal with a sliding window, and M-RoPE on a hybrid model."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, UnsupportedMedia
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.media_prompts import PAIRS, build_prompt, check_positions, color_image, llama_engine, noise_image
from support.play import Answer, collect, request

LAYOUTS = (False, True)
every_pair = pytest.mark.parametrize("kind", PAIRS)
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
@every_pair
def test_c7_a_second_question_about_an_image_encodes_nothing_and_computes_only_new_text(engines, kind, kv_unified):
    engine, cold = engines(kind, kv_unified=kv_unified), engines(kind, kv_unified=kv_unified)
    first = build_prompt(engine, SYSTEM, CAT, QUESTION)
    first_answer = ask(engine, first)
    assert (first_answer.end.usage.encoded_media, engine.counters.encoded_media) == (1, 1)
    rows = engine.counters.rows
    second = first[0] + first_answer.tokens + OTHER, first[1]
    answer = ask(engine, second)
    usage = answer.end.usage
    assert (usage.encoded_media, engine.counters.encoded_media) == (0, 1)
    assert usage.media_tokens == usage.cached_media_tokens > 10
    assert engine.counters.rows - rows == 1 + len(OTHER) + len(answer.tokens) - 1
    assert usage.cached_tokens == usage.prompt_tokens - 1 - len(OTHER)
    check_against_cold(cold, answer, second)


@every_layout
@every_pair
def test_c7_another_question_resumes_right_after_the_image(engines, kind, kv_unified):
    """Also on a hybrid model: a checkpoint is taken right after each image."""
    engine, cold = engines(kind, kv_unified=kv_unified), engines(kind, kv_unified=kv_unified)
    ask(engine, build_prompt(engine, SYSTEM, CAT, QUESTION, QUESTION))
    other = build_prompt(engine, SYSTEM, CAT, OTHER)
    answer = ask(engine, other)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    assert answer.end.usage.encoded_media == 0
    check_against_cold(cold, answer, other)


@every_layout
@every_pair
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


@every_pair
def test_c7_an_image_at_another_position_is_not_encoded_again(engines, kind):
    engine, cold = engines(kind), engines(kind)
    ask(engine, build_prompt(engine, SYSTEM, CAT, QUESTION))
    moved = build_prompt(engine, OTHER, CAT, QUESTION)
    answer = ask(engine, moved)
    assert answer.end.usage.cached_media_tokens == 0  # its cells depend on other entries before it
    assert (answer.end.usage.encoded_media, engine.counters.encoded_media) == (0, 1)
    check_against_cold(cold, answer, moved)


@every_pair
def test_c6_images_of_the_same_size_are_distinct(engines, kind):
    engine, cold = engines(kind), engines(kind)
    cat = ask(engine, build_prompt(engine, SYSTEM, CAT, QUESTION))
    prompt = build_prompt(engine, SYSTEM, DOG, QUESTION)
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
@every_pair
def test_concurrency_and_chunking_change_no_token_with_images(engines, kind, kv_unified):
    engine, cold = engines(kind, kv_unified=kv_unified), engines(kind, kv_unified=kv_unified)
    prompts = {
        "cat": build_prompt(engine, SYSTEM, CAT, QUESTION),
        "dog": build_prompt(engine, SYSTEM[:10], DOG, OTHER),
        "both": build_prompt(engine, SYSTEM[:5], CAT, QUESTION[:3], DOG, OTHER),
        "text": (random_prompt(150, 7), {}),
        "wide": build_prompt(engine, OTHER, WIDE, SYSTEM),
    }
    answers = play(engine, *(request(name, entries, media=shown) for name, (entries, shown) in prompts.items()))
    assert engine.counters.max_batch_jobs >= 3
    assert engine.counters.encoded_media == 3
    for name, prompt in prompts.items():
        check_against_cold(cold, answers[name], prompt)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_an_image_larger_than_a_batch_is_prefilled_in_parts(engines, kind):
    small, large = engines(kind, batch=8, ubatch=8), engines(kind)
    prompt = build_prompt(small, SYSTEM, noise_image(5, 128, 128), QUESTION)
    answer = ask(small, prompt)
    assert answer.end.usage.media_tokens > 8
    check_against_cold(large, answer, prompt)


def test_a_non_causal_image_larger_than_a_ubatch_is_rejected(engines):
    engine = engines("window", batch=8, ubatch=8)
    entries, media = build_prompt(engine, SYSTEM, CAT, QUESTION)
    with pytest.raises(UnsupportedMedia, match="16 tokens must be computed in one ubatch of at most 8"):
        engine.submit(request("one", entries, media=media))
    assert len(ask(engine, (SYSTEM, {})).tokens) == 12


@every_layout
@every_pair
def test_c8_a_prompt_that_ends_with_an_image_is_sampled_from_its_last_row(engines, kind, kv_unified):
    engine = engines(kind, kv_unified=kv_unified)
    entries, media = build_prompt(engine, SYSTEM, CAT)
    last = max(index for index, entry in enumerate(entries) if not isinstance(entry, int))
    prompt = entries[: last + 1], media  # some models need a token after the image; it is left out here
    cold = ask(engine, prompt, ignore_eos=True)
    assert len(cold.tokens) == 12
    again = ask(engine, prompt, ignore_eos=True)  # the image is computed again for its logits
    assert again.tokens == cold.tokens
    assert again.end.usage.cached_media_tokens == 0
    assert engine.counters.encoded_media == 1
    check_against_cold(engines(kind, kv_unified=kv_unified), cold, prompt, ignore_eos=True)


def test_c8_the_model_names_the_color_of_an_image_at_the_end(engines):
    engine = engines("colors", "projector-colors")
    vocabulary = engine.backend.context.model.vocabulary
    for letter in "RBR":
        answer = ask(engine, build_prompt(engine, vocabulary.tokenize("Look: "), color_image(letter)), max_tokens=1)
        assert vocabulary.detokenize(answer.tokens) == letter.encode()


@every_pair
def test_images_are_restored_from_the_ram_tier(engines, kind):
    engine, cold = engines(kind, sequences=2, cells=1024), engines(kind)
    first = build_prompt(engine, SYSTEM, CAT, QUESTION)
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
def test_images_are_restored_from_the_disk_tier_after_a_restart(engines, kind, tmp_path):
    settings = EngineSettings(disk_cache_directory=tmp_path / "cache")
    engine = llama_engine(kind, settings=settings)
    first = build_prompt(engine, SYSTEM, CAT, QUESTION)
    first_answer = ask(engine, first)
    engine.close()
    again, cold = engines(kind, settings=settings), engines(kind)
    second = first[0] + first_answer.tokens + OTHER, first[1]
    answer = ask(again, second)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    check_against_cold(cold, answer, second)
    moved = build_prompt(again, OTHER, CAT, QUESTION)
    answer = ask(again, moved)
    assert again.counters.encoded_media == 0  # its embeddings were on disk
    check_against_cold(cold, answer, moved)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "cache" / "pictures").iterdir()} == {0o600}


@every_pair
def test_media_digests_depend_on_the_projector(engines, kind, tmp_path):
    """Cached state of an image is found only with the same projector."""
    engine = engines(kind)
    _entries, media = build_prompt(engine, SYSTEM, CAT, QUESTION)
    (digest,) = media
    part = media[digest]
    assert part.compute_digest(engine.backend.projector.key) == digest
    assert part.compute_digest(b"another projector") != digest


@every_pair
def test_deterministic_mode_is_exact_with_images(engines, kind):
    settings = EngineSettings(deterministic=True, grid=8)
    engine, cold = engines(kind, settings=settings), engines(kind, settings=settings)
    first = build_prompt(engine, SYSTEM, CAT, QUESTION)
    first_answer = ask(engine, first)
    prompts = {
        "again": first,
        "second": (first[0] + first_answer.tokens + OTHER, first[1]),
        "other": build_prompt(engine, SYSTEM, CAT, OTHER),
        "dog": build_prompt(engine, SYSTEM, DOG, OTHER),
        "both": build_prompt(engine, SYSTEM, CAT, OTHER[:3], DOG, QUESTION),
    }
    warm = {name: ask(engine, prompt) for name, prompt in prompts.items()}
    for name, (entries, media) in prompts.items():
        assert warm[name].tokens == ask(cold, (entries, media), use_prefix_cache=False).tokens, name
    assert warm["other"].end.usage.cached_media_tokens == warm["other"].end.usage.media_tokens > 0
    together = play(engine, *(request(name, entries, media=media) for name, (entries, media) in prompts.items()))
    expected = {name: answer.tokens for name, answer in warm.items()}
    assert {name: answer.tokens for name, answer in together.items()} == expected


@every_pair
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
