"""Embeddings of many texts: batches, shared prefixes, fewer dimensions, windows of long texts."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import afterglow
from afterglow.api.embeddings import (
    VectorCache,
    VectorKey,
    find_common_prefix,
    split_windows,
    supports_shorter_vectors,
)
from afterglow.engine.pooling import CPU_ROWS
from afterglow.errors import Cancelled, InvalidArgument, PromptTooLong, UnsupportedOption
from afterglow.testing import models

WORDS = ["the", "of", "to", "and", "in", "is", "on", "sat", "ran", "hello", "cat", "dog", "mat", "king", "river", "sun"]


def load(name: str, **options) -> afterglow.Model:
    return afterglow.load(
        models.get_path(name), threads=1, disk_cache=False, **{"context": 256, "sequences": 4, **options}
    )


def build_texts(count: int, prefix: str = "") -> list[str]:
    """Different texts of 2 to 9 words."""
    random = np.random.default_rng(1)
    return [prefix + " ".join([*random.choice(WORDS, random.integers(1, 9)), str(number)]) for number in range(count)]


@pytest.mark.native
@pytest.mark.parametrize("name", ["embedding", "attention"])
def test_a_thousand_texts_take_few_decodes_and_have_the_vectors_of_single_texts(name: str) -> None:
    texts = build_texts(1000)
    with load(name) as model:
        result = model.embed_texts(texts)
        counters = model.get_stats().counters
        assert counters["pooled_texts"] == 1000
        assert counters["pooled_decodes"] <= 1.25 * result.computed_tokens / CPU_ROWS + 2
        model.clear_cache()
        for number in range(0, 1000, 97):
            assert result.vectors[number] @ model.embed(texts[number]) >= 0.9999
        assert np.allclose(np.linalg.norm(result.vectors, axis=1), 1, atol=1e-4)


@pytest.mark.native
def test_equal_texts_and_a_shared_instruction_are_computed_once() -> None:
    with load("attention") as model:
        prefix = "represent this sentence for retrieval: "
        texts = build_texts(50, prefix)
        result = model.embed_texts(texts + texts)
        tokens = [model.tokenize(text) for text in texts]
        shared = find_common_prefix(tokens)
        assert shared >= len(model.tokenize(prefix)) - 1
        assert result.computed_tokens == shared + sum(len(text) - shared for text in tokens)
        assert sum(result.token_counts) == 2 * sum(map(len, tokens))
        assert np.array_equal(result.vectors[:50], result.vectors[50:])
        model.clear_cache()
        assert min(model.embed(text) @ vector for text, vector in zip(texts[:5], result.vectors, strict=False)) > 0.9999


@pytest.mark.native
@pytest.mark.parametrize("name", ["embedding", "attention", "recurrent"])
def test_a_text_that_was_embedded_before_is_not_computed_again(name: str) -> None:
    with load(name) as model:
        first = model.embed_texts(["the cat", "the dog"])
        again = model.embed_texts(["the dog", "the cat"])
        assert np.array_equal(again.vectors, first.vectors[::-1])
        assert again.computed_tokens == 0
        assert model.embed_texts(["the dog", "a river"]).computed_tokens == len(model.tokenize("a river", bos=True))
        assert model.embed_texts(["the dog"], salt="another tenant").computed_tokens > 0
        model.clear_cache()
        assert model.embed_texts(["the dog"]).computed_tokens > 0


def test_cached_vectors_take_no_more_than_their_budget() -> None:
    keys: list[VectorKey] = [("embedding", "", bytes([number])) for number in range(10)]
    cache = VectorCache(max_bytes=4 * 1024)  # three vectors
    for key in keys:
        cache.add(key, np.full(256, key[2][0], np.float32))
        assert cache.find(keys[:1])[0] is not None  # it is used
    assert [vector is not None for vector in cache.find(keys)] == [number in (0, 8, 9) for number in range(10)]


@pytest.mark.native
def test_a_list_of_texts_gives_a_matrix_on_both_hosts() -> None:
    for host in ("thread", "process"):
        with load("embedding", host=host) as model:
            matrix = model.embed(["the cat", "the dog", "a river"])
            assert matrix.shape == (3, 64)
            model.clear_cache()
            assert np.allclose(model.embed([model.tokenize("the cat", bos=True)]), matrix[:1], atol=1e-3)
            assert model.embed("the cat").shape == (64,)
            with pytest.raises(InvalidArgument, match="texts"):
                model.embed_texts([])
            with pytest.raises(InvalidArgument, match="text"):
                model.embed(["the cat", 5])  # type: ignore[list-item]


@pytest.mark.native
def test_dimensions_need_a_model_that_was_trained_for_them() -> None:
    with load("embedding") as model:
        whole = model.embed("the cat")
        assert np.array_equal(model.embed("the cat", dimensions=64), whole)
        with pytest.raises(UnsupportedOption, match=r"`dimensions`.*64.*shorten_embeddings"):
            model.embed("the cat", dimensions=8)
        for wrong in (0, 65):
            with pytest.raises(InvalidArgument, match=f"from 1 to 64, not {wrong}"):
                model.embed("the cat", dimensions=wrong)
    with load("embedding", shorten_embeddings=True) as model:
        short = model.embed(["the cat", "a dog"], dimensions=8)
        assert short.shape == (2, 8)
        assert np.allclose(short[0], whole[:8] / np.linalg.norm(whole[:8]), atol=1e-3)


@pytest.mark.native
def test_a_long_text_is_the_mean_of_its_windows_if_asked() -> None:
    with load("embedding", context=64) as model:
        limit = model.max_embedding_tokens
        text = " ".join(build_texts(40))
        with pytest.raises(PromptTooLong):
            model.embed([text, "the cat"])
        result = model.embed_texts([text, "the cat"], long_text="window")
        tokens = model.tokenize(text, bos=True)
        windows = split_windows(tokens, limit, model.vocabulary.control_tokens)
        assert result.windows == (len(windows), 1)
        assert len(windows) > 2
        model.clear_cache()
        mean = np.array([len(window) for window in windows], np.float32) @ model.embed(windows)
        assert result.vectors[0] @ (mean / np.linalg.norm(mean)) > 0.9999
        with pytest.raises(InvalidArgument, match="long_text"):
            model.embed(text, long_text="cut")  # type: ignore[arg-type]


@pytest.mark.native
def test_a_cancel_event_ends_a_call() -> None:
    cancel = threading.Event()
    cancel.set()
    with load("embedding") as model, pytest.raises(Cancelled):
        model.embed_texts(["the cat"], cancel=cancel)


def test_windows_contain_every_token_once_and_repeat_the_control_tokens() -> None:
    tokens = [1, *range(10, 110), 2]
    for limit in range(3, 120):
        windows = split_windows(tokens, limit, frozenset({1, 2}))
        assert [token for window in windows for token in window if token > 2] == tokens[1:-1]
        assert all(len(window) <= limit and (window[0], window[-1]) == (1, 2) for window in windows)
        assert max(map(len, windows)) - min(map(len, windows)) <= 1
    with pytest.raises(InvalidArgument, match="control tokens"):
        split_windows(tokens, 2, frozenset({1, 2}))


def test_the_common_prefix_leaves_a_token_of_every_text() -> None:
    assert find_common_prefix([[1, 2, 3]]) == 0
    assert find_common_prefix([[1, 2, 3], [1, 2]]) == 1
    assert find_common_prefix([[1, 2, 3], [1, 2, 4], [1, 5, 3]]) == 1
    assert find_common_prefix([[1], [2]]) == 0


def test_models_that_can_shorten_their_vectors_are_known_by_name_or_tag() -> None:
    for name in ("nomic-embed-text-v1.5", "Qwen3 Embedding 0.6B", "embeddinggemma-300M", "Mxbai Embed Large V1"):
        assert supports_shorter_vectors({"general.name": name})
    assert supports_shorter_vectors({"general.tags": "[sentence-similarity, matryoshka]"})
    assert not supports_shorter_vectors({"general.name": "nomic-embed-text-v1", "general.tags": "[bert]"})
