"""What was said before is found again, at the cost of one look for each token."""

from __future__ import annotations

import time

import numpy as np

from afterglow.engine.scheduling.job import Job
from afterglow.engine.speculation import ngram as lookup
from afterglow.engine.speculation.ngram import MAX_IDLE_INDEXES, NgramDrafter, NgramIndex
from support.play import GREEDY, fake, prompt, request


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def job(entries: list[int], **options: object) -> Job:
    backend = fake().backend
    return Job(
        request=request("x", entries, **options), prompt=ids(*entries), sampler=backend.create_sampler(GREEDY), stop_matcher=None,
        max_cells=1000,
    )  # fmt: skip


def test_what_followed_the_last_three_tokens_is_guessed():
    history = NgramIndex()
    history.add_prompt(ids(1, 2, 3, 4, 5, 6, 1, 2, 3))
    assert history.draft(3) == [4, 5, 6]
    history.add_token(4)
    assert history.draft(2) == [5, 6]
    history.add_token(9)
    assert history.draft(2) == []


def test_nothing_is_guessed_where_nothing_stood_before():
    history = NgramIndex()
    assert history.draft(4) == []
    history.add_prompt(ids(1, 2))
    assert history.draft(4) == []
    history.add_prompt(ids(1, 2, 3, 4, 5))
    assert history.draft(4) == []


def test_a_text_that_is_being_copied_is_followed_where_it_is():
    """`5 6 7` stands twice; whoever copies the first goes on with the first."""
    history = NgramIndex()
    history.add_prompt(ids(1, 2, 3, 5, 6, 7, 8, 8, 9, 5, 6, 7, 4, 4, 1, 2, 3))
    for token in (5, 6, 7):
        history.add_token(token)
    assert history.draft(3) == [8, 8, 9]


def said(drafter: NgramDrafter, one: Job, *tokens: int) -> tuple[str, float]:
    """Let a job say something: what guesses about it are called then, and how likely they seem."""
    one.generated += tokens
    assert drafter.can_draft(one)
    return drafter.get_draft_kind(one), drafter.estimate_acceptance(one)


def test_a_guess_is_the_likelier_the_longer_a_text_was_followed():
    drafter, copied = NgramDrafter(), list(range(1, 31))
    one = job([*copied, 99, 1, 2, 3])
    kinds = [said(drafter, one, *([] if length == 0 else [3 + length])) for length in range(20)]
    assert [name for name, _ in kinds] == [
        "lookup",
        *["lookup, again"] * 3,
        *["lookup, following"] * 12,
        *["lookup, copying"] * 4,
    ]
    assert kinds[0][1] < kinds[1][1] < kinds[4][1] < kinds[16][1]


def test_every_token_shows_how_likely_guesses_are_without_one():
    """Three tokens that stood there are always followed by others: nobody has to guess to see that."""
    drafter = NgramDrafter()
    one = job([1, 2, 3, 4, 1, 2, 3])
    _, before = said(drafter, one)
    for other in range(10, 40):
        name, after = said(drafter, one, other, 1, 2, 3)
    assert name == "lookup"
    assert after < 0.6 * before
    assert one.draft_token_count == 0


def test_the_newest_place_is_taken_where_there_are_several():
    history = NgramIndex()
    history.add_prompt(ids(1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3))
    assert history.draft(2) == [5, 9]


def test_what_repeats_itself_is_guessed_as_far_as_asked():
    history = NgramIndex()
    history.add_prompt(ids(7, 7, 7, 7))
    assert history.draft(5) == [7] * 5
    history = NgramIndex()
    history.add_prompt(ids(1, 2, 3, 1, 2, 3))
    assert history.draft(7) == [1, 2, 3, 1, 2, 3, 1]


def test_token_by_token_and_at_once_is_the_same():
    tokens = [token % 5 for token in prompt(400, 3)]
    one, other = NgramIndex(), NgramIndex()
    one.add_prompt(ids(*tokens))
    other.add_prompt(ids(*tokens[:3]))
    for token in tokens[3:]:
        other.add_token(token)
    assert one._positions == other._positions
    assert len(one._entries) == len(other._entries) == 400


def test_the_next_turn_finds_what_the_last_one_said():
    drafter = NgramDrafter()
    first = job(prompt(30, 1))
    drafter.draft([(first, 4)])
    first.generated += [50, 51, 52, 53, 54]
    drafter.release(first)
    second = job([*prompt(30, 1), 50, 51, 52, 53, 54, 10, 11, 50, 51, 52])
    assert drafter.draft([(second, 2)]) == [[53, 54]]


def test_an_edited_prompt_still_finds_what_the_old_one_was_answered():
    drafter = NgramDrafter()
    first = job(prompt(30, 1))
    drafter.draft([(first, 4)])
    first.generated += [50, 51, 52, 53, 54]
    drafter.release(first)
    again = job([*prompt(30, 1)[:28], 40])
    again.generated += [50, 51, 52]
    assert drafter.draft([(again, 2)]) == [[53, 54]]


def test_the_same_prompt_again_finds_its_answer_at_once():
    drafter = NgramDrafter()
    first = job(prompt(30, 1))
    drafter.draft([(first, 4)])
    first.generated += [50, 51, 52, 53, 54]
    drafter.release(first)
    assert drafter.draft([(job(prompt(30, 1)), 4)]) == [[50, 51, 52, 53]]


def test_jobs_on_one_prompt_have_a_history_each():
    drafter = NgramDrafter()
    one, other = job(prompt(30, 1)), job(prompt(30, 1))
    one.generated += [50, 51, 52, 53, 50, 51, 52]
    assert drafter.draft([(one, 1), (other, 1)]) == [[53], []]


def test_a_picture_is_never_guessed():
    history = NgramIndex()
    history.add_prompt(ids(1, 2, 3, 4, -1, 5, 1, 2, 3))
    assert history.draft(3) == [4]


def test_histories_are_few_and_bounded(monkeypatch):
    monkeypatch.setattr(lookup, "MAX_INDEX_ENTRIES", 100)
    drafter = NgramDrafter()
    for seed in range(2 * MAX_IDLE_INDEXES):
        one = job(prompt(30, seed))
        drafter.draft([(one, 1)])
        drafter.release(one)
    assert len(drafter._idle_indexes) == MAX_IDLE_INDEXES
    history = NgramIndex()
    for seed in range(20):
        history.add_prompt(ids(*prompt(40, seed)))
    assert len(history._entries) <= 100


def test_a_token_costs_the_same_however_long_the_history_is():
    def each(length: int) -> float:
        history = NgramIndex()
        history.add_prompt(np.random.default_rng(1).integers(0, 30_000, length))
        best = 1.0
        for _ in range(5):
            started = time.perf_counter()
            for token in range(200):
                history.add_token(token)
                history.draft(4)
            best = min(best, time.perf_counter() - started)
        return best / 200

    assert each(50_000) < 10 * each(500)
