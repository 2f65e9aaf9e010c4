"""Laws of media entries without an encoder on the fake backend: cells, positions and identity."""

from __future__ import annotations

import pytest

from afterglow.engine.types.entries import Media
from afterglow.errors import PromptTooLong
from support.play import KINDS, LAYOUTS, fake_with_media, prompt, request
from support.truth import compute_tokens, run_checked

everywhere = pytest.mark.parametrize(
    ("kind", "kv_unified"), [(kind, kv_unified) for kind in KINDS for kv_unified in LAYOUTS]
)
SYSTEM, QUESTION, OTHER = prompt(40, 1), prompt(15, 2), prompt(17, 3)
# 20 cells in 4 positions, like an image with M-RoPE; and 3 cells in 7 positions.
CAT, DOG, CLIP = Media(b"cat", 20, 4), Media(b"dog", 20, 4), Media(b"clip", 3, 7)


@everywhere
def test_reuse_and_concurrency_change_no_token_with_media(kind, kv_unified):
    engine = fake_with_media(kind, kv_unified=kv_unified)
    boundaries = frozenset({6, 12})
    about = [*SYSTEM[:5], CAT, *QUESTION[:6], CLIP, *QUESTION[6:]]
    first = run_checked(engine, request("first", about, boundaries=boundaries))["first"]
    requests = [
        request("on", [*about, *first.tokens, *OTHER]),
        request("edited", [*about[:12], *OTHER], boundaries=boundaries),
        request("again", about),
        request("new", [*OTHER, DOG, CAT, *QUESTION]),
    ]
    answers = run_checked(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == compute_tokens(kind, req), req.id
    assert answers["on"].cached == len(about) - 2 + CAT.cells + CLIP.cells + len(first.tokens) - 1
    assert answers["on"].end.usage.cached_media_tokens == CAT.cells + CLIP.cells
    assert answers["edited"].cached == 11 + CAT.cells


@everywhere
def test_media_of_the_same_size_are_distinct(kind, kv_unified):
    engine = fake_with_media(kind, kv_unified=kv_unified)
    cat = run_checked(engine, request("cat", [*SYSTEM, CAT, *QUESTION]))["cat"]
    dog = run_checked(engine, request("dog", [*SYSTEM, DOG, *QUESTION]))["dog"]
    assert dog.cached <= len(SYSTEM)
    assert cat.tokens != dog.tokens == compute_tokens(kind, request("dog", [*SYSTEM, DOG, *QUESTION]))


@everywhere
def test_prompt_length_is_measured_in_cells(kind, kv_unified):
    engine = fake_with_media(kind, kv_unified=kv_unified, cells_per_sequence=60)
    with pytest.raises(PromptTooLong) as caught:
        engine.submit(request("long", [*SYSTEM, CAT, 1]))
    assert (caught.value.cells, caught.value.limit) == (61, 60)
    fits = request("fits", [*SYSTEM[:39], CAT, 1], max_tokens=1)
    assert run_checked(engine, fits)["fits"].tokens == compute_tokens(kind, fits)
