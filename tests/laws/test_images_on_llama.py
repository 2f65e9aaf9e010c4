"""The laws with pictures on real llama.cpp: plain, non-causal over a sliding window, M-RoPE on a hybrid."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, UnsupportedMedia
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.media_prompts import PAIRS, asked, check_positions, coloured, llama_engine, noisy
from support.play import Answer, collect, request

LAYOUTS = (False, True)
every_pair = pytest.mark.parametrize("kind", PAIRS)
every_layout = pytest.mark.parametrize("unified", LAYOUTS)
MARGIN = 0.02  # the shape of a batch moves logits by about 1e-3; a wrong past by far more


@pytest.fixture
def engines():
    with ExitStack() as stack:

        def make(*arguments, **options) -> Engine:
            engine = llama_engine(*arguments, **options)
            stack.callback(engine.close)
            return engine

        yield make


def words(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(20, 250, length)]


SYSTEM, QUESTION, OTHER = words(40, 1), words(20, 2), words(25, 3)
CAT, DOG, WIDE = noisy(1), noisy(2), noisy(3, 120, 40)


def play(engine: Engine, *requests) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for one in requests:
        engine.submit(one)
    while engine.is_busy:
        collect(answers, engine)
    check_positions(engine)
    return answers


def ask(engine: Engine, prompt, **options) -> Answer:
    entries, contents = prompt
    return play(engine, request("one", entries, contents=contents, **options))["one"]


def check_against_cold(engine: Engine, answer: Answer, prompt, **options) -> None:
    """Equal tokens; where they part, the cold run was undecided there."""
    entries, contents = prompt
    engine.submit(request("cold", entries, contents=contents, reuse=False, logprobs=2, **options))
    tokens, margins = [], []
    while engine.is_busy:
        for event in engine.step():
            if type(event).__name__ == "Token":
                tokens.append(event.token)
                margins.append(event.alternatives[0][1] - event.alternatives[1][1])
    for one, other, margin in zip(answer.tokens, tokens, margins, strict=False):
        if one != other:
            assert margin < MARGIN, f"{answer.tokens} instead of {tokens}"
            return
    assert len(answer.tokens) == len(tokens)


@every_layout
@every_pair
def test_c7_a_second_question_about_a_picture_encodes_nothing_and_decodes_only_new_text(engines, kind, unified):
    engine, cold = engines(kind, kv_unified=unified), engines(kind, kv_unified=unified)
    first = asked(engine, SYSTEM, CAT, QUESTION)
    said = ask(engine, first)
    assert (said.end.usage.encoded_media, engine.counters.encoded_media) == (1, 1)
    rows = engine.counters.rows
    second = first[0] + said.tokens + OTHER, first[1]
    answer = ask(engine, second)
    usage = answer.end.usage
    assert (usage.encoded_media, engine.counters.encoded_media) == (0, 1)
    assert usage.media_tokens == usage.cached_media_tokens > 10
    assert engine.counters.rows - rows == 1 + len(OTHER) + len(answer.tokens) - 1
    assert usage.cached_tokens == usage.prompt_tokens - 1 - len(OTHER)
    check_against_cold(cold, answer, second)


@every_layout
@every_pair
def test_c7_another_question_about_the_picture_goes_on_right_behind_it(engines, kind, unified):
    """Also on a hybrid: there is a checkpoint right after each picture."""
    engine, cold = engines(kind, kv_unified=unified), engines(kind, kv_unified=unified)
    ask(engine, asked(engine, SYSTEM, CAT, QUESTION, QUESTION))
    other = asked(engine, SYSTEM, CAT, OTHER)
    answer = ask(engine, other)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    assert answer.end.usage.encoded_media == 0
    check_against_cold(cold, answer, other)


@every_layout
@every_pair
def test_c7_a_new_picture_in_the_suffix_keeps_everything_before_it(engines, kind, unified):
    engine, cold = engines(kind, kv_unified=unified), engines(kind, kv_unified=unified)
    first = asked(engine, SYSTEM, CAT, QUESTION)
    said = ask(engine, first, max_tokens=4)
    rows = engine.counters.rows
    second = asked(engine, first[0] + said.tokens, DOG, OTHER)
    second = second[0], {**first[1], **second[1]}
    answer = ask(engine, second, max_tokens=4)
    usage = answer.end.usage
    assert usage.encoded_media == 1
    before = usage.prompt_tokens - (usage.media_tokens - usage.cached_media_tokens) - len(OTHER)
    assert (
        usage.cached_tokens >= before - 1 - 2
    )  # all but the last token of the answer, and what stands around the picture
    assert engine.counters.rows - rows == usage.prompt_tokens - usage.cached_tokens + len(answer.tokens) - 1
    check_against_cold(cold, answer, second, max_tokens=4)


@every_pair
def test_c7_a_picture_that_moved_encodes_nothing(engines, kind):
    engine, cold = engines(kind), engines(kind)
    ask(engine, asked(engine, SYSTEM, CAT, QUESTION))
    moved = asked(engine, OTHER, CAT, QUESTION)
    answer = ask(engine, moved)
    assert answer.end.usage.cached_media_tokens == 0  # its cells are those of another past
    assert (answer.end.usage.encoded_media, engine.counters.encoded_media) == (0, 1)
    check_against_cold(cold, answer, moved)


@every_pair
def test_c6_two_pictures_of_the_same_size_are_never_confused(engines, kind):
    engine, cold = engines(kind), engines(kind)
    cat = ask(engine, asked(engine, SYSTEM, CAT, QUESTION))
    prompt = asked(engine, SYSTEM, DOG, QUESTION)
    dog = ask(engine, prompt)
    assert dog.end.usage.cached_media_tokens == 0
    assert dog.tokens != cat.tokens
    check_against_cold(cold, dog, prompt)


def test_c6_the_colour_that_is_named_is_that_of_the_picture_in_the_prompt(engines):
    engine = engines("colours", "projector-colours")
    vocabulary = engine.backend.context.model.vocabulary
    question = vocabulary.tokenize(" What colour is this?\n")
    for _ in range(2):  # cold, then warm
        for letter in "RGBYKR":
            answer = ask(engine, asked(engine, vocabulary.tokenize("Look: "), coloured(letter), question))
            assert vocabulary.detokenize(answer.tokens[:1]) == letter.encode()
    assert engine.counters.encoded_media == 5
    assert answer.end.usage.cached_media_tokens == 16


@every_layout
@every_pair
def test_company_and_chunking_change_no_token_with_pictures(engines, kind, unified):
    engine, cold = engines(kind, kv_unified=unified), engines(kind, kv_unified=unified)
    prompts = {
        "cat": asked(engine, SYSTEM, CAT, QUESTION),
        "dog": asked(engine, SYSTEM[:10], DOG, OTHER),
        "both": asked(engine, SYSTEM[:5], CAT, QUESTION[:3], DOG, OTHER),
        "text": (words(150, 7), {}),
        "wide": asked(engine, OTHER, WIDE, SYSTEM),
    }
    answers = play(engine, *(request(name, entries, contents=shown) for name, (entries, shown) in prompts.items()))
    assert engine.counters.max_batch_jobs >= 3
    assert engine.counters.encoded_media == 3
    for name, prompt in prompts.items():
        check_against_cold(cold, answers[name], prompt)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_picture_larger_than_a_batch_is_computed_in_parts(engines, kind):
    small, large = engines(kind, batch=8, ubatch=8), engines(kind)
    prompt = asked(small, SYSTEM, noisy(5, 128, 128), QUESTION)
    answer = ask(small, prompt)
    assert answer.end.usage.media_tokens > 8
    check_against_cold(large, answer, prompt)


def test_a_picture_that_has_to_be_computed_in_one_go_and_does_not_fit_is_refused(engines):
    engine = engines("window", batch=8, ubatch=8)
    entries, contents = asked(engine, SYSTEM, CAT, QUESTION)
    with pytest.raises(UnsupportedMedia, match="16 tokens has to be computed in one go, and 8 fit"):
        engine.submit(request("one", entries, contents=contents))
    assert len(ask(engine, (SYSTEM, {})).tokens) == 12


@every_layout
@every_pair
def test_c8_a_prompt_that_ends_in_a_picture_is_answered_from_its_last_row(engines, kind, unified):
    engine = engines(kind, kv_unified=unified)
    entries, contents = asked(engine, SYSTEM, CAT)
    last = max(index for index, entry in enumerate(entries) if not isinstance(entry, int))
    prompt = entries[: last + 1], contents  # some models want a token behind it: here it is left out
    cold = ask(engine, prompt, ignore_ends=True)
    assert len(cold.tokens) == 12
    again = ask(engine, prompt, ignore_ends=True)  # the picture is computed again, for its logits
    assert again.tokens == cold.tokens
    assert again.end.usage.cached_media_tokens == 0
    assert engine.counters.encoded_media == 1
    check_against_cold(engines(kind, kv_unified=unified), cold, prompt, ignore_ends=True)


def test_c8_the_colour_of_a_picture_at_the_end_is_named(engines):
    engine = engines("colours", "projector-colours")
    vocabulary = engine.backend.context.model.vocabulary
    for letter in "RBR":
        answer = ask(engine, asked(engine, vocabulary.tokenize("Look: "), coloured(letter)), max_tokens=1)
        assert vocabulary.detokenize(answer.tokens) == letter.encode()


@every_pair
def test_pictures_come_back_from_ram(engines, kind):
    engine, cold = engines(kind, sequences=2, cells=1024), engines(kind)
    first = asked(engine, SYSTEM, CAT, QUESTION)
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
def test_pictures_come_back_from_disk_after_a_restart(engines, kind, tmp_path):
    settings = EngineSettings(disk_cache_directory=tmp_path / "kept")
    engine = llama_engine(kind, settings=settings)
    first = asked(engine, SYSTEM, CAT, QUESTION)
    said = ask(engine, first)
    engine.close()
    again, cold = engines(kind, settings=settings), engines(kind)
    second = first[0] + said.tokens + OTHER, first[1]
    answer = ask(again, second)
    assert answer.end.usage.cached_media_tokens == answer.end.usage.media_tokens
    check_against_cold(cold, answer, second)
    moved = asked(again, OTHER, CAT, QUESTION)
    answer = ask(again, moved)
    assert again.counters.encoded == 0  # its rows were on disk, too
    check_against_cold(cold, answer, moved)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "kept" / "pictures").iterdir()} == {0o600}


@every_pair
def test_another_projector_setting_makes_other_pictures(engines, kind, tmp_path):
    """What was computed of a picture is found again only through the same projector."""
    engine = engines(kind)
    _entries, contents = asked(engine, SYSTEM, CAT, QUESTION)
    (digest,) = contents
    part = contents[digest]
    assert part.compute_digest(engine.backend.projector.key) == digest
    assert part.compute_digest(b"another projector") != digest


@every_pair
def test_the_deterministic_mode_is_exact_with_pictures(engines, kind):
    settings = EngineSettings(deterministic=True, grid=8)
    engine, cold = engines(kind, settings=settings), engines(kind, settings=settings)
    first = asked(engine, SYSTEM, CAT, QUESTION)
    said = ask(engine, first)
    prompts = {
        "again": first,
        "second": (first[0] + said.tokens + OTHER, first[1]),
        "other": asked(engine, SYSTEM, CAT, OTHER),
        "dog": asked(engine, SYSTEM, DOG, OTHER),
        "both": asked(engine, SYSTEM, CAT, OTHER[:3], DOG, QUESTION),
    }
    warm = {name: ask(engine, prompt) for name, prompt in prompts.items()}
    for name, (entries, contents) in prompts.items():
        assert warm[name].tokens == ask(cold, (entries, contents), reuse=False).tokens, name
    assert warm["other"].end.usage.cached_media_tokens == warm["other"].end.usage.media_tokens > 0
    together = play(engine, *(request(name, one[0], contents=one[1]) for name, one in prompts.items()))
    assert {name: one.tokens for name, one in together.items()} == {name: one.tokens for name, one in warm.items()}


@every_pair
def test_c9_a_picture_s_decode_that_is_interrupted_leaves_the_record_true(engines, kind):
    engine, cold = engines(kind), engines(kind)
    prompt = asked(engine, SYSTEM, CAT, QUESTION)
    other = words(30, 8), {}
    engine.submit(request("gone", prompt[0], contents=prompt[1]))
    engine.submit(request("stays", other[0], max_tokens=30))
    original = engine.backend.context.decode_embeddings

    def interrupted(batch, *, causal):
        engine.cancel("gone")  # as another thread would, while the decode runs
        engine.backend.interrupt()
        return original(batch, causal=causal)

    engine.backend.context.decode_embeddings = interrupted
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    engine.backend.context.decode_embeddings = original
    assert type(answers["gone"].end.error).__name__ == "Cancelled"
    assert len(answers["stays"].tokens) == 30
    check_positions(engine)
    again = ask(engine, prompt)
    check_against_cold(cold, again, prompt)


def test_c18_a_picture_for_a_model_without_a_projector_is_refused(engines):
    seeing = engines("attention")
    blind = engines("attention")
    prompt = asked(seeing, SYSTEM, CAT)
    blind.backend.capabilities = type(blind.backend.capabilities)(
        **{name: getattr(blind.backend.capabilities, name) for name in blind.backend.capabilities.__slots__}
        | {"media": frozenset()}
    )
    with pytest.raises(UnsupportedMedia, match="only text"):
        blind.submit(request("one", prompt[0], contents=prompt[1]))


def test_c18_entries_and_contents_that_differ_are_typed_errors(engines):
    engine = engines("attention")
    (entries, contents), (_, others) = asked(engine, SYSTEM, CAT), asked(engine, SYSTEM, DOG)
    with pytest.raises(InvalidArgument, match="nothing for one of the pictures"):
        engine.submit(request("one", entries))
    with pytest.raises(InvalidArgument, match="something else"):
        engine.submit(request("one", entries, contents=dict(zip(contents, others.values(), strict=True))))


@pytest.mark.parametrize("draft", ["mtp", "model"])
def test_guesses_change_no_token_with_pictures(draft):
    """The heads read tokens only: behind a picture they begin anew. A second model does not see, and says nothing."""
    settings = EngineSettings(speculation=3)
    context = ContextSettings(
        cells=4096, sequences=4, batch=128, ubatch=64, outputs=32, threads=1, recurrent_snapshots=3
    )
    path, projector = models.get_path("hybrid-mtp"), models.get_path("projector-qwen")
    guess = "mtp" if draft == "mtp" else models.get_path("draft")
    guessing = EngineSpec(
        path=path, projector_path=projector, context_settings=context, engine_settings=settings, draft=guess
    )()
    plain = llama_engine("hybrid")
    try:
        prompts = [(SYSTEM, CAT, QUESTION), (SYSTEM, CAT, QUESTION, DOG, OTHER), (OTHER, CAT), (SYSTEM, OTHER)]
        for items in prompts:
            prompt = asked(guessing, *items)
            answer = ask(guessing, prompt, max_tokens=20, ignore_ends=True)
            check_against_cold(plain, answer, prompt, max_tokens=20, ignore_ends=True)
        assert guessing.counters.draft_tokens > 0
    finally:
        guessing.close()
        plain.close()
