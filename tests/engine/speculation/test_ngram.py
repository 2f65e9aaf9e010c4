"""The n-gram drafter finds what the conversation contained before, with one table lookup per token."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np

from afterglow.engine.scheduling.job import Job, RunningJob
from afterglow.engine.speculation import ngram
from afterglow.engine.speculation.ngram import MAX_IDLE_INDEXES, NgramDrafter, NgramIndex
from afterglow.engine.types.settings import EngineSettings
from support.play import GREEDY, fake, prompt, request


def to_entries(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def build_job(entries: list[int], **options: object) -> RunningJob:
    engine = fake()
    job = Job(
        request=request("x", entries, **options),
        prompt=to_entries(*entries),
        sampler=engine.backend.create_sampler(GREEDY),
        stop_matcher=None,
    )
    return RunningJob(job=job, sequence=engine.prefix_cache.slots[0], max_cells=1000)


def test_the_draft_is_what_followed_the_last_three_tokens():
    index = NgramIndex()
    index.add_prompt(to_entries(1, 2, 3, 4, 5, 6, 1, 2, 3))
    assert index.draft(3) == [4, 5, 6]
    index.add_token(4)
    assert index.draft(2) == [5, 6]
    index.add_token(9)
    assert index.draft(2) == []


def test_without_an_earlier_occurrence_there_is_no_draft():
    index = NgramIndex()
    assert index.draft(4) == []
    index.add_prompt(to_entries(1, 2))
    assert index.draft(4) == []
    index.add_prompt(to_entries(1, 2, 3, 4, 5))
    assert index.draft(4) == []


def test_a_text_that_is_being_copied_is_followed_even_if_its_ngrams_occur_elsewhere():
    """`5 6 7` occurs twice; a completion that copies the first occurrence continues with the first."""
    index = NgramIndex()
    index.add_prompt(to_entries(1, 2, 3, 5, 6, 7, 8, 8, 9, 5, 6, 7, 4, 4, 1, 2, 3))
    for token in (5, 6, 7):
        index.add_token(token)
    assert index.draft(3) == [8, 8, 9]


def generate(drafter: NgramDrafter, job: RunningJob, *tokens: int) -> tuple[str, float]:
    """Add generated tokens to a job. Return the draft kind then, and the estimated acceptance."""
    job.job.generated += tokens
    assert drafter.can_draft(job)
    return drafter.get_draft_kind(job), drafter.estimate_acceptance(job)


def test_estimated_acceptance_grows_with_the_number_of_matched_tokens():
    drafter, copied = NgramDrafter(), list(range(1, 31))
    job = build_job([*copied, 99, 1, 2, 3])
    kinds = [generate(drafter, job, *([] if length == 0 else [3 + length])) for length in range(20)]
    assert [name for name, _ in kinds] == [
        "ngram",
        *["ngram, 1 matched"] * 3,
        *["ngram, 4 matched"] * 12,
        *["ngram, 16 matched"] * 4,
    ]
    assert kinds[0][1] < kinds[1][1] < kinds[4][1] < kinds[16][1]


def test_acceptance_is_learned_from_every_token_without_drafting():
    """Three tokens that occurred before are always followed by other tokens: that is seen without a draft."""
    drafter = NgramDrafter()
    job = build_job([1, 2, 3, 4, 1, 2, 3])
    _, before = generate(drafter, job)
    for token in range(10, 40):
        kind, after = generate(drafter, job, token, 1, 2, 3)
    assert kind == "ngram"
    assert after < 0.6 * before
    assert job.job.draft_token_count == 0


def test_the_newest_of_several_occurrences_is_used():
    index = NgramIndex()
    index.add_prompt(to_entries(1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3))
    assert index.draft(2) == [5, 9]


def test_a_repetition_is_drafted_up_to_the_limit():
    index = NgramIndex()
    index.add_prompt(to_entries(7, 7, 7, 7))
    assert index.draft(5) == [7] * 5
    index = NgramIndex()
    index.add_prompt(to_entries(1, 2, 3, 1, 2, 3))
    assert index.draft(7) == [1, 2, 3, 1, 2, 3, 1]


def test_adding_token_by_token_gives_the_same_index_as_adding_a_prompt():
    tokens = [token % 5 for token in prompt(400, 3)]
    whole, stepwise = NgramIndex(), NgramIndex()
    whole.add_prompt(to_entries(*tokens))
    stepwise.add_prompt(to_entries(*tokens[:3]))
    for token in tokens[3:]:
        stepwise.add_token(token)
    assert whole._positions == stepwise._positions
    assert len(whole._entries) == len(stepwise._entries) == 400


def test_the_next_turn_finds_what_the_last_one_generated():
    drafter = NgramDrafter()
    first = build_job(prompt(30, 1))
    drafter.draft([(first, 4)])
    first.job.generated += [50, 51, 52, 53, 54]
    drafter.release(first.job)
    second = build_job([*prompt(30, 1), 50, 51, 52, 53, 54, 10, 11, 50, 51, 52])
    assert drafter.draft([(second, 2)]) == [[53, 54]]


def test_an_edited_prompt_finds_the_completion_of_the_old_one():
    drafter = NgramDrafter()
    first = build_job(prompt(30, 1))
    drafter.draft([(first, 4)])
    first.job.generated += [50, 51, 52, 53, 54]
    drafter.release(first.job)
    edited = build_job([*prompt(30, 1)[:28], 40])
    edited.job.generated += [50, 51, 52]
    assert drafter.draft([(edited, 2)]) == [[53, 54]]


def test_a_repeated_prompt_finds_its_completion_at_once():
    drafter = NgramDrafter()
    first = build_job(prompt(30, 1))
    drafter.draft([(first, 4)])
    first.job.generated += [50, 51, 52, 53, 54]
    drafter.release(first.job)
    assert drafter.draft([(build_job(prompt(30, 1)), 4)]) == [[50, 51, 52, 53]]


def test_concurrent_jobs_on_one_prompt_have_separate_indexes():
    drafter = NgramDrafter()
    first, second = build_job(prompt(30, 1)), build_job(prompt(30, 1))
    first.job.generated += [50, 51, 52, 53, 50, 51, 52]
    assert drafter.draft([(first, 1), (second, 1)]) == [[53], []]


def test_media_entries_are_never_drafted():
    index = NgramIndex()
    index.add_prompt(to_entries(1, 2, 3, 4, -1, 5, 1, 2, 3))
    assert index.draft(3) == [4]


def test_the_number_and_the_length_of_indexes_are_bounded(monkeypatch):
    monkeypatch.setattr(ngram, "MAX_INDEX_ENTRIES", 100)
    drafter = NgramDrafter()
    for seed in range(2 * MAX_IDLE_INDEXES):
        job = build_job(prompt(30, seed))
        drafter.draft([(job, 1)])
        drafter.release(job.job)
    assert len(drafter._idle_indexes) == MAX_IDLE_INDEXES
    index = NgramIndex()
    for seed in range(20):
        index.add_prompt(to_entries(*prompt(40, seed)))
    assert len(index._entries) <= 100


def test_the_cost_of_a_token_does_not_depend_on_the_length_of_the_index():
    def measure(length: int) -> float:
        index = NgramIndex()
        index.add_prompt(np.random.default_rng(1).integers(0, 30_000, length))
        best = 1.0
        for _ in range(5):
            started = time.perf_counter()
            for token in range(200):
                index.add_token(token)
                index.draft(4)
            best = min(best, time.perf_counter() - started)
        return best / 200

    assert measure(50_000) < 10 * measure(500)


def test_the_bytes_of_an_index_are_counted_to_within_a_factor_of_two():
    entries = np.random.default_rng(1).integers(0, 30_000, 20_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = NgramIndex()
    index.add_prompt(entries)
    allocated = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert allocated / 2 < index.nbytes < 2 * allocated


def test_idle_indexes_are_part_of_the_ram_budget():
    ram = fake("attention", EngineSettings(ram_cache_bytes=200_000)).prefix_cache.store.ram
    drafter = NgramDrafter(ram)
    for seed in range(8):
        job = build_job(prompt(30, seed))
        drafter.draft([(job, 1)])
        drafter.release(job.job)
        idle_bytes = sum(index.nbytes for _, index in drafter._idle_indexes)
        assert 0 < idle_bytes == ram.budget.get("ngrams") <= 25_000
    assert 1 < len(drafter._idle_indexes) < 8
    drafter.draft([(build_job(prompt(30, 7)), 1)])
    assert ram.budget.get("ngrams") < idle_bytes, "an index in use is not part of the cache"


def test_without_a_ram_budget_no_index_is_kept():
    ram = fake("attention", EngineSettings(ram_cache_bytes=0)).prefix_cache.store.ram
    drafter, job = NgramDrafter(ram), build_job(prompt(30, 1))
    drafter.draft([(job, 1)])
    drafter.release(job.job)
    assert not drafter._idle_indexes
    assert ram.budget.used_bytes == 0
