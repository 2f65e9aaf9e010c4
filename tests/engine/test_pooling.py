"""Many texts per decode give the vectors of one text per decode, on every memory kind, and compute nothing twice."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from afterglow.engine import pooling
from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.pooling import (
    MAX_TEXTS,
    PooledTexts,
    Purpose,
    count_fitting_texts,
    pool_in_slices,
    pool_on_cores,
    pool_texts,
)
from afterglow.engine.types.counters import EngineCounters
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import DecodeFailed, PromptTooLong, UnsupportedOperation
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.engine_factories import Raise
from support.play import fake, set_prefill_cost

pytestmark = pytest.mark.native

Pool = Callable[..., PooledTexts]
PREFIX = [20, 30, 40, 50, 60]
EMBEDDED_KINDS = ["embedding", "attention", "window", "recurrent", "hybrid", "experts"]
TEXTS = [[70, 80, 90], [100], [70, 81, 91, 101, 33, 44], [55, 56]]


def build_engine(name: str, *, cells: int = 512, threads: int = 1, **settings: bool) -> Engine:
    return EngineSpec(
        path=models.get_path(name),
        context_settings=ContextSettings(cells=4 * cells, sequences=4, batch=64, ubatch=64, threads=threads),
        engine_settings=EngineSettings(**settings),
    )()


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """`pool_texts` on an engine with the model of the parameter. Its attribute `engine` is the engine."""
    engine = build_engine(request.param)
    call = functools.partial(pool_texts, engine, purpose="embedding")
    call.engine = engine  # type: ignore[attr-defined]
    yield call
    engine.close()


def compare(left: np.ndarray, right: np.ndarray) -> float:
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


@pytest.mark.parametrize("pool", EMBEDDED_KINDS, indirect=True)
def test_texts_of_one_decode_have_the_vectors_of_single_decodes(pool: Pool) -> None:
    together = pool(prefix=PREFIX, texts=TEXTS).vectors
    assert len(together) == len(TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        alone = pool(prefix=[], texts=[PREFIX + text]).vectors[0]
        assert compare(vector, alone) >= 0.9999
        assert np.allclose(vector, alone, atol=2e-2)  # before the normalization, too


@pytest.mark.parametrize("pool", ["attention"], indirect=True)
def test_a_shared_prefix_is_computed_once_for_all_calls_of_a_salt(pool: Pool) -> None:
    own = sum(map(len, TEXTS))
    assert pool(prefix=PREFIX, texts=TEXTS).rows == len(PREFIX) + own
    assert pool(prefix=PREFIX, texts=TEXTS).rows == own
    assert pool(prefix=PREFIX, texts=TEXTS, salt="other").rows == len(PREFIX) + own
    assert pool(prefix=PREFIX[:3], texts=TEXTS, salt="other").rows == 3 + own
    counters = pool.engine.counters  # type: ignore[attr-defined]
    assert (counters.pooled_texts, counters.pooled_decodes) == (16, 4)
    assert counters.pooled_rows == 4 * own + 2 * len(PREFIX) + 3
    assert counters.rows == counters.decodes == 0  # conversations are not touched


@pytest.mark.parametrize("pool", ["attention"], indirect=True)
def test_adapters_of_the_conversations_do_not_change_a_vector(pool: Pool) -> None:
    context = pool.engine.backend.context  # type: ignore[attr-defined]
    plain = pool(prefix=PREFIX, texts=TEXTS).vectors[0]
    with LoraAdapter.load(context.model, models.get_path("adapter"), trust=True) as adapter:
        context.set_adapters({adapter: 1.0})
        assert compare(pool(prefix=[], texts=[PREFIX + TEXTS[0]]).vectors[0], plain) >= 0.9999
        context.set_adapters({})


@pytest.mark.parametrize("pool", ["attention"], indirect=True)
def test_a_decode_is_bounded_and_a_long_text_gets_a_larger_context(pool: Pool) -> None:
    assert len(pool(prefix=[], texts=[[20 + n] * 20 for n in range(10)]).vectors) == 3  # of 64 rows
    assert len(pool(prefix=[], texts=[[20 + n] for n in range(70)]).vectors) == MAX_TEXTS
    assert len(pool(prefix=[], texts=[[20] * 300, [30]]).vectors) == 1
    with pytest.raises(PromptTooLong):
        pool(prefix=[], texts=[[20] * 513])
    assert len(pool(prefix=PREFIX, texts=TEXTS).vectors) == len(TEXTS)


@pytest.mark.parametrize("pool", ["attention"], indirect=True)
def test_a_busy_engine_gets_smaller_decodes(pool: Pool) -> None:
    engine: Engine = pool.engine  # type: ignore[attr-defined]
    engine.submit(Request(id="1", entries=[20, 30], max_tokens=50))
    engine.step()
    set_prefill_cost(engine, engine.settings.max_token_gap)  # a slow machine
    assert len(pool(prefix=[], texts=[[20 + n] * 20 for n in range(10)]).vectors) == 1
    while engine.is_busy:
        engine.step()
    assert len(pool(prefix=[], texts=[[20 + n] * 20 for n in range(10)]).vectors) == 3


@pytest.mark.parametrize("pool", ["attention"], indirect=True)
def test_an_idle_engine_runs_several_decodes_in_one_call_and_a_busy_one_runs_one(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Engine = pool.engine  # type: ignore[attr-defined]
    texts = [[20 + n] * 20 for n in range(10)]  # three of them fit into a decode
    monkeypatch.setattr(pooling, "CALL_SECONDS", 60.0)
    pooled = pool_in_slices(engine, purpose="embedding", prefix=[], texts=texts)
    assert (len(pooled.vectors), pooled.rows, engine.counters.pooled_decodes) == (10, 200, 4)
    monkeypatch.setattr(pooling, "CALL_SECONDS", 0.0)
    assert len(pool_in_slices(engine, purpose="embedding", prefix=[], texts=texts).vectors) == 3
    monkeypatch.setattr(pooling, "CALL_SECONDS", 60.0)
    engine.submit(Request(id="1", entries=[20, 30], max_tokens=1))
    pool_in_slices(engine, purpose="embedding", prefix=[], texts=texts)
    assert engine.counters.pooled_decodes == 6


@pytest.fixture(autouse=True)
def unlimited_core_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every decode be short enough for one core, however slow this machine is."""
    monkeypatch.setattr(pooling, "MAX_CORE_SECONDS", 1e9)


def build_parallel_engine(name: str, purpose: Purpose = "embedding") -> Engine:
    """Return an engine with three threads that has pooled a text: its first decode is on all cores together."""
    engine = build_engine(name, threads=3)
    pool_texts(engine, purpose=purpose, prefix=[], texts=[[20]])
    engine.counters = EngineCounters()
    return engine


def pool_in_parallel(engine: Engine, texts: list[list[int]], **options: Any) -> PooledTexts | None:
    later = time.monotonic() + 60
    return pool_on_cores(engine, **{"purpose": "embedding", "prefix": PREFIX, "texts": texts, "stop": later, **options})


@pytest.mark.parametrize("name", EMBEDDED_KINDS)
def test_an_idle_engine_pools_texts_on_all_cores_at_the_same_time(name: str) -> None:
    engine = build_parallel_engine(name)
    texts = [[20 + n] * 20 for n in range(10)]
    pooled = pool_in_parallel(engine, texts)
    assert pooled is not None
    assert len(pooled.vectors) == len(texts)
    shares = name in ("attention", "experts")
    assert pooled.rows == (len(PREFIX) + 10 * 20 if shares else 10 * 25), "one core computes the prefix for all"
    assert engine.counters.pooled_decodes == (4 if shares else 5)  # three texts with 20 tokens or two with 25 fit
    assert engine.counters.pooled_texts == len(texts)
    again = pool_in_parallel(engine, texts)
    assert again is not None
    assert again.rows == (10 * 20 if shares else 10 * 25)
    for text, vector, second in zip(texts, pooled.vectors, again.vectors, strict=True):
        alone = pool_texts(engine, purpose="embedding", prefix=[], texts=[PREFIX + text]).vectors[0]
        assert compare(vector, alone) >= 0.9999
        assert np.allclose(vector, second, atol=1e-4)
    engine.close()


def test_no_decode_begins_after_the_time_of_a_call_and_no_text_is_left_out() -> None:
    engine = build_parallel_engine("attention")
    texts = [[20 + n] * 20 for n in range(30)]
    pooled = pool_in_parallel(engine, texts, stop=0.0)
    assert pooled is not None
    assert 3 <= len(pooled.vectors) <= 9  # one decode on each core
    for text, vector in zip(texts, pooled.vectors, strict=False):
        alone = pool_texts(engine, purpose="embedding", prefix=[], texts=[PREFIX + text]).vectors[0]
        assert compare(vector, alone) >= 0.9999
    engine.close()


def test_one_decode_uses_all_threads_if_the_engine_is_busy_or_the_texts_are_few_or_long() -> None:
    engine = build_parallel_engine("attention")
    texts = [[20 + n] * 20 for n in range(7)]
    assert pool_in_parallel(engine, texts) is not None
    assert pool_in_parallel(engine, texts[:3]) is None
    assert pool_in_parallel(engine, [[20] * 300, [30] * 300]) is None
    engine.submit(Request(id="1", entries=[20, 30], max_tokens=1))
    assert pool_in_parallel(engine, texts) is None
    engine.close()


def test_a_large_or_slow_model_has_one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_parallel_engine("attention")
    row_bytes = 4 * engine.backend.context.model.vocabulary.size
    texts = [[20 + n] * 20 for n in range(7)]
    with monkeypatch.context() as patch:
        patch.setattr(pooling, "MAX_CORES_BYTES", 3 * 64 * row_bytes - 1)
        assert pool_in_parallel(engine, texts) is None
    assert pool_in_parallel(engine, texts) is not None
    monkeypatch.setattr(pooling, "MAX_CORE_SECONDS", 0.0)
    assert pool_in_parallel(engine, texts) is None, "a decode of one core would take too long"
    engine.close()


def test_an_error_on_one_core_reaches_the_caller_and_the_next_call_works(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_parallel_engine("attention")
    texts = [[20 + n] * 20 for n in range(7)]
    expected = pool_in_parallel(engine, texts)
    last = pooling.get_pooling_context(engine, "embedding", 25, core=2)
    with monkeypatch.context() as patch:
        patch.setattr(last, "decode", Raise(DecodeFailed(-3, "test")))
        patch.setattr(pooling.PoolingContext, "pool", wait_before(pooling.PoolingContext.pool))
        with pytest.raises(DecodeFailed):
            pool_in_parallel(engine, texts)
    again = pool_in_parallel(engine, texts)
    assert expected is not None
    assert again is not None
    assert all(np.allclose(*pair, atol=1e-4) for pair in zip(again.vectors, expected.vectors, strict=True))
    engine.close()


def wait_before(pool: Any) -> Any:
    """Let each thread begin before another can take its texts."""

    def wait_and_pool(*arguments: Any) -> Any:
        time.sleep(0.2)
        return pool(*arguments)

    return wait_and_pool


def test_in_deterministic_mode_a_vector_does_not_depend_on_other_texts() -> None:
    engine = build_engine("attention", deterministic=True)
    first = pool_texts(engine, purpose="embedding", prefix=PREFIX, texts=TEXTS).vectors
    again = pool_texts(engine, purpose="embedding", prefix=[], texts=[PREFIX + TEXTS[0]]).vectors
    assert len(first) == 1
    assert np.array_equal(first[0], again[0])
    engine.close()


@pytest.mark.parametrize("pool", ["reranker"], indirect=True)
def test_a_reranker_has_scores_and_no_embeddings(pool: Pool) -> None:
    with pytest.raises(UnsupportedOperation, match="reranker"):
        pool(prefix=[], texts=TEXTS)
    engine: Engine = pool.engine  # type: ignore[attr-defined]
    together = pool_texts(engine, purpose="rank", prefix=PREFIX, texts=TEXTS).vectors
    assert {vector.shape for vector in together} == {(1,)}
    for text, vector in zip(TEXTS, together, strict=True):
        alone = pool_texts(engine, purpose="rank", prefix=[], texts=[PREFIX + text]).vectors[0]
        assert vector == pytest.approx(alone, abs=1e-4)


def test_a_causal_reranker_computes_a_prefix_on_one_core_only() -> None:
    engine = build_parallel_engine("reranker-causal", "rank")
    pooled = pool_in_parallel(engine, [[20 + n] * 20 for n in range(6)], purpose="rank")
    assert pooled is not None
    assert pooled.rows == len(PREFIX) + 6 * 20
    assert engine.counters.pooled_decodes == 2
    engine.close()


@pytest.mark.parametrize("pool", ["reranker-causal"], indirect=True)
def test_a_causal_reranker_computes_a_shared_prefix_once(pool: Pool) -> None:
    engine: Engine = pool.engine  # type: ignore[attr-defined]
    ranked = pool_texts(engine, purpose="rank", prefix=PREFIX, texts=TEXTS)
    assert ranked.rows == len(PREFIX) + sum(map(len, TEXTS))
    for text, vector in zip(TEXTS, ranked.vectors, strict=True):
        alone = pool_texts(engine, purpose="rank", prefix=[], texts=[PREFIX + text]).vectors[0]
        assert vector == pytest.approx(alone, abs=2e-3)
        assert vector.sum() == pytest.approx(1, abs=1e-5)


def test_texts_need_llama_cpp() -> None:
    with pytest.raises(UnsupportedOperation, match=r"llama\.cpp"):
        pool_texts(fake(), purpose="embedding", prefix=[], texts=[[1]])


def test_at_least_one_text_is_in_a_decode() -> None:
    assert count_fitting_texts([100], 10) == 1
    assert count_fitting_texts([3, 3, 3, 3], 9) == 3
    assert count_fitting_texts([1] * 200, 1000) == MAX_TEXTS
