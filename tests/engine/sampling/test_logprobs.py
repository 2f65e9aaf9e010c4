"""C16: log-probabilities of given tokens and perplexity, on every kind of memory, in windows if the text is long."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import afterglow
from afterglow.engine.sampling.logprobs import get_scoring_context, plan_windows
from afterglow.errors import InvalidArgument
from afterglow.testing import models

MEMORIES = ("attention", "window", "recurrent", "hybrid")
TEXT = "the rain in spain and the thin heron on the river "


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
        assert model.logprobs(TEXT).logprobs == expected
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
