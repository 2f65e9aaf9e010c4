"""C16: log-probabilities of given tokens and perplexity, on every kind of memory, in windows if the text is long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import afterglow
from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.sampling.logprobs import TokenLogprob
from afterglow.engine.scoring import get_scoring_context, plan_windows, score_text
from afterglow.engine.types.adapters import ActiveAdapters
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import DecodeFailed, InvalidArgument
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.contexts import random_tokens

MEMORIES = ("attention", "window", "recurrent", "hybrid")
TEXT = "the rain in spain and the thin heron on the river "
TOLERANCE = 2e-2  # of scores whose rows were computed in batches of other sizes


def load(name: str, **options) -> afterglow.Model:
    return afterglow.load(models.get_path(name), threads=1, **options)


@pytest.mark.native
@pytest.mark.parametrize("kind", MEMORIES)
def test_c16_every_token_but_the_first_has_a_log_probability(kind):
    with load(kind, context=512) as model:
        score = model.logprobs(TEXT)
        assert len(score.logprobs) == len(score.tokens) - 1
        assert score.windows == 1
        assert all(value < 0 for value in score.logprobs)


@pytest.mark.native
@pytest.mark.parametrize("kind", MEMORIES)
def test_c16_values_are_the_log_softmax_of_the_raw_logits(kind):
    with load(kind, context=512) as model:
        score = model.logprobs(TEXT)
        context = model._lifecycle.context
        tokens = list(score.tokens)
        context.batch.clear()
        context.batch.add(tokens[:-1], position=0, sequence=0, outputs=len(tokens) - 1)
        context.decode()
        rows = np.stack([context.get_logits(row) for row in range(len(tokens) - 1)]).astype(np.float64)
        context.memory.remove(0)
        log_softmax = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        expected = log_softmax[np.arange(len(tokens) - 1), tokens[1:]]
        assert np.allclose(score.logprobs, expected, atol=1e-2)


@pytest.mark.native
def test_c16_a_model_that_is_certain_has_perplexity_one():
    with load("successor-attention", context=512) as model:
        assert model.perplexity(models.CYCLE.decode() * 3) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.native
@pytest.mark.parametrize("tokens", [[], [30]])
def test_c16_fewer_than_two_tokens_is_an_error(tokens):
    with load("attention", context=256) as model, pytest.raises(InvalidArgument, match="at least 2"):
        model.logprobs(tokens)


@pytest.mark.native
@pytest.mark.parametrize("kind", MEMORIES)
def test_c16_a_text_longer_than_the_context_is_scored_in_windows_and_reports_their_number(kind):
    with load(kind, context=256) as model:
        score = model.logprobs(TEXT * 20)
        assert len(score.logprobs) == len(score.tokens) - 1 > 256
        assert score.windows == len(plan_windows(len(score.tokens), 256)) > 1
        assert all(np.isfinite(score.logprobs))


def test_c16_windows_score_every_token_once_with_half_a_window_before_it():
    for count in (2, 255, 256, 257, 1000, 5000):
        windows = plan_windows(count, 256)
        scored = [token for window in windows for token in range(window.score_start, window.stop)]
        assert scored == list(range(1, count))
        assert all(window.stop - window.start <= 256 for window in windows)
        assert all(window.score_start - window.start >= 128 for window in windows[1:])


@pytest.mark.native
@pytest.mark.parametrize("kind", MEMORIES)
def test_c16_scoring_does_not_affect_running_requests(kind, list_own_handles):
    with load(kind, context=2048) as model:
        expected = model.complete(TEXT, max_tokens=400).tokens
        before = model.logprobs(TEXT * 4).logprobs
        streamed: list[int] = []
        worker = threading.Thread(target=lambda: model.complete(TEXT, max_tokens=400, on_token=streamed.append))
        worker.start()
        concurrent = [model.logprobs(TEXT * 4).logprobs for _ in range(5)]
        streamed_meanwhile = len(streamed)
        worker.join()
        assert tuple(streamed) == expected
        assert all(values == before for values in concurrent)
        assert streamed_meanwhile < 400 or len(concurrent) == 5
    assert not list_own_handles()


@pytest.mark.native
def test_c16_no_cells_are_reserved_for_scoring(list_own_handles):
    with load("attention", context=4096, sequences=1) as model:
        context = model._lifecycle.context
        assert (context.cells, context.sequences) == (4096, 1)
        handles = len(list_own_handles())
        expected = model.logprobs(TEXT).logprobs
        assert len(list_own_handles()) == handles + 1  # the scoring context, created on first use
        scoring = get_scoring_context(context, 2)
        assert (scoring.cells, scoring.sequences) == (512, 1)
        assert model.logprobs(TEXT * 20).windows == 1
        assert model.logprobs(TEXT).logprobs == pytest.approx(expected, abs=TOLERANCE)  # computed in other batches
        assert get_scoring_context(context, 2).cells == 1024  # replaced for the longer text
        model.deactivate()
        assert len(list_own_handles()) == 1  # the weights


@pytest.mark.native
def test_c16_scoring_keeps_the_conversation_of_the_only_sequence():
    with load("attention", context=512, sequences=1) as model:
        first = model.complete(TEXT, max_tokens=4)
        model.logprobs(TEXT * 4)
        again = model.complete([*model.tokenize(TEXT), *first.tokens], max_tokens=1)
        assert again.usage.cached_tokens == again.usage.prompt_tokens - 1


# --- texts that begin alike

PREFIX = random_tokens(70, seed=1)
SCORED_ROWS = 32  # of one decode


class Scorer:
    """Scores texts on an engine, and counts the rows that it computes."""

    def __init__(self, kind: str, **settings: int) -> None:
        self.engine: Engine = EngineSpec(
            path=models.get_path(kind),
            context_settings=ContextSettings(cells=1024, sequences=2, batch=SCORED_ROWS, ubatch=32, threads=1),
            engine_settings=EngineSettings(ram_cache_bytes=0, **settings),
        )()
        self.rows = 0

    def __call__(self, tokens: list[int], alternatives: int = 0, **options: Any) -> list[TokenLogprob]:
        before = self.engine.counters.scored_rows
        defaults = {"first": 1, "adapters": ActiveAdapters(), "salt": ""}
        call: Callable[[], list[TokenLogprob] | None] = lambda: score_text(  # noqa: E731
            self.engine, tokens=tokens, alternatives=alternatives, **{**defaults, **options}
        )
        while (scores := call()) is None:
            pass
        self.rows = self.engine.counters.scored_rows - before
        return scores

    def forget(self) -> None:
        """Score a text with another salt."""
        self([1, 2, 3], salt="forget")


@pytest.fixture(scope="module")
def scorers() -> Iterator[dict[str, Scorer]]:
    built = {kind: Scorer(kind) for kind in MEMORIES}
    for scorer in built.values():
        scorer.forget()  # creates the contexts, which outlive a test
    yield built
    for scorer in built.values():
        scorer.engine.close()


@pytest.fixture(params=MEMORIES)
def scorer(request: pytest.FixtureRequest, scorers: dict[str, Scorer]) -> Scorer:
    scorers[request.param].forget()
    return scorers[request.param]


def get_values(scores: list[TokenLogprob]) -> list[float]:
    return [value for value, _ in scores]


@pytest.mark.native
def test_a_text_that_begins_like_the_last_one_computes_the_rest_and_one_row(scorer: Scorer):
    """The row before the first other token is computed again, for its logits."""
    first, second = [*PREFIX, 5, 6, 7, 8], [*PREFIX, 9, 10, 11]
    expected = scorer(second)
    assert scorer.rows == len(second) - 1
    scorer.forget()
    scorer(first)
    assert get_values(scorer(second)) == pytest.approx(get_values(expected), abs=TOLERANCE)
    can_truncate = scorer.engine.backend.capabilities.memory_kind in ("attention", "window")
    assert scorer.rows == (3 if can_truncate else len(second) - 1)


@pytest.mark.native
def test_a_longer_text_computes_what_is_new(scorer: Scorer):
    longer = [*PREFIX, *random_tokens(40, seed=2)]
    expected = get_values(scorer(longer))
    scorer.forget()
    scorer(PREFIX)
    assert get_values(scorer(longer)) == pytest.approx(expected, abs=TOLERANCE)
    assert scorer.rows == 40


@pytest.mark.native
def test_a_repeated_or_shorter_text_computes_nothing(scorer: Scorer):
    scores = scorer(PREFIX, 3)
    for length, alternatives in ((len(PREFIX), 3), (len(PREFIX), 1), (10, 2), (len(PREFIX), 3)):
        again = scorer(PREFIX[:length], alternatives)
        assert again == [(value, others[:alternatives]) for value, others in scores[: length - 1]]
        assert scorer.rows == 0


@pytest.mark.native
def test_texts_of_another_salt_or_with_more_alternatives_share_nothing(scorer: Scorer):
    scorer(PREFIX, 1)
    for options in ({"salt": "another"}, {"alternatives": 2, "salt": "another"}, {"alternatives": 2}):
        scorer(PREFIX, **options)
        assert scorer.rows == len(PREFIX) - 1


@pytest.mark.native
def test_tokens_that_were_not_scored_are_computed_again(scorer: Scorer):
    expected = get_values(scorer(PREFIX))
    scorer.forget()
    assert get_values(scorer(PREFIX, first=50)) == pytest.approx(expected[49:], abs=TOLERANCE)
    assert get_values(scorer(PREFIX, first=40)) == pytest.approx(expected[39:], abs=TOLERANCE)
    assert scorer.rows >= len(PREFIX) - 40
    assert get_values(scorer(PREFIX)) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.native
def test_a_failed_decode_leaves_no_part_of_its_text(scorer: Scorer, monkeypatch: pytest.MonkeyPatch):
    text = [*PREFIX, *random_tokens(40, seed=3)]
    expected = scorer(text)
    scorer(PREFIX[:20], salt="another")
    context = get_scoring_context(scorer.engine.backend.context, 2)

    def fail() -> None:
        raise DecodeFailed(-3, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(context, "decode", fail)
        with pytest.raises(DecodeFailed):
            scorer(text, salt="another")
    assert scorer(text, salt="another") == expected


@pytest.mark.native
@pytest.mark.parametrize("kind", MEMORIES)
def test_in_deterministic_mode_scores_do_not_depend_on_the_text_before(kind: str):
    scorer = Scorer(kind, deterministic=True, grid=SCORED_ROWS)
    try:
        expected = scorer([*PREFIX, 5, 6])
        scorer([*PREFIX, 7])
        assert scorer([*PREFIX, 5, 6]) == expected
        assert scorer.rows == len(PREFIX) + 1
        assert scorer([*PREFIX, 5, 6]) == expected
        assert scorer.rows == 0
    finally:
        scorer.engine.close()


@pytest.mark.native
@given(data=st.data())
def test_scores_are_those_of_the_text_alone_whatever_was_scored_before(data: st.DataObject, scorers: dict[str, Scorer]):
    scorer = scorers[data.draw(st.sampled_from(MEMORIES))]
    tokens = [*PREFIX, *PREFIX[:30]]
    for _ in range(data.draw(st.integers(1, 4))):
        kept, added = data.draw(st.integers(0, 100)), data.draw(st.integers(0, 40))
        text = [*tokens[:kept], *random_tokens(added + 2, seed=data.draw(st.integers(0, 3)))]
        options = {"first": data.draw(st.integers(1, len(text))), "alternatives": data.draw(st.integers(0, 2))}
        shared = scorer(text, **options)
        scorer.forget()
        alone = scorer(text, **options)
        assert get_values(shared) == pytest.approx(get_values(alone), abs=TOLERANCE)
        assert all(len(others) == options["alternatives"] for _, others in shared)
        scorer(tokens := text)
