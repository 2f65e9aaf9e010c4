"""Reranking over HTTP with the `cohere` client (v1 and v2) and Jina's body; embeddings in batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cohere
import numpy as np
import pytest
from cohere.errors import BadRequestError, NotFoundError

from afterglow.server.retrieval.schema import RerankRequest
from afterglow.testing import models
from support.server_process import ServerProcess

pytestmark = pytest.mark.native

DOCUMENTS = ["the cat sat on the mat", "a dog ran", "the king and the queen", "hello world"]
MODELS = ("ranker", "causal", "tiny")
FIELD_CHECKS = {
    "model": "test_a_model_is_found_by_name",
    **dict.fromkeys(("query", "documents"), "test_bad_requests_are_refused_by_name"),
    **dict.fromkeys(("texts", "return_text"), "test_texts_get_the_answer_of_text_embeddings_inference"),
    **dict.fromkeys(("top_n", "return_documents"), "test_both_clients_get_the_same_ranking"),
    "max_tokens_per_doc": "test_long_documents_are_refused_or_cut",
    "instruction": "test_an_instruction_changes_the_scores_of_a_generative_reranker",
    "priority": "test_a_priority_is_a_hint",
    **dict.fromkeys(
        ("rank_fields", "max_chunks_per_doc", "truncation", "return_embeddings", "raw_scores", "truncate"),
        "test_bad_requests_are_refused_by_name",
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server with rerankers of all kinds, and an embedding model whose vectors can be shortened."""
    process = ServerProcess(
        f"ranker={models.get_path('reranker')}",
        f"causal={models.get_path('reranker-causal')}",
        f"tiny={models.get_path('attention')}",
        f"vectors={models.get_path('embedding')}",
        *("--context", "512", "--sequences", "4", "--shorten-embeddings"),
        AFTERGLOW_SERVER_MAX_DOCUMENTS="120",
    )
    yield process
    process.stop()


def rerank(server: ServerProcess, path: str = "/v1/rerank", **fields: Any) -> dict[str, Any]:
    body = {"model": "ranker", "query": "the cat", "documents": DOCUMENTS, **fields}
    response = server.post(path, body)
    return {"status": response.status_code, "headers": response.headers, **response.json()}


def test_every_field_has_a_check() -> None:
    assert set(FIELD_CHECKS) == set(RerankRequest.model_fields)
    assert all(name in globals() for name in FIELD_CHECKS.values())


@pytest.mark.parametrize("model", MODELS)
def test_both_clients_get_the_same_ranking(server: ServerProcess, model: str) -> None:
    with cohere.ClientV2("key", base_url=server.url) as client:
        new = client.rerank(model=model, query="the cat", documents=DOCUMENTS, top_n=3)
    with cohere.Client("key", base_url=server.url) as client:
        old = client.rerank(
            model=model, query="the cat", documents=[{"text": text} for text in DOCUMENTS], return_documents=True
        )
    jina = rerank(server, "/rerank", model=model, documents=DOCUMENTS, top_n=2)
    ranked = [(result.index, result.relevance_score) for result in old.results]
    assert sorted(index for index, _ in ranked) == [0, 1, 2, 3]
    assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)
    assert [result.index for result in new.results] == [index for index, _ in ranked[:3]]
    assert [result["index"] for result in jina["results"]] == [index for index, _ in ranked[:2]]
    assert [result.document.text for result in old.results if result.document] == [DOCUMENTS[i] for i, _ in ranked]
    assert "document" not in jina["results"][0]
    assert jina["usage"]["total_tokens"] >= jina["usage"]["computed_tokens"] >= 0  # the same prompts came before
    assert new.meta is not None
    assert new.meta.tokens is not None
    assert new.meta.tokens.input_tokens == jina["usage"]["prompt_tokens"]
    assert (new.meta.api_version.version, old.meta.api_version.version) == ("2", "1")  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/reranking"])
def test_texts_get_the_answer_of_text_embeddings_inference(server: ServerProcess, path: str) -> None:
    expected = [(result["index"], result["relevance_score"]) for result in rerank(server)["results"]]
    body = {"query": "the cat", "texts": DOCUMENTS, "return_text": True, "raw_scores": False, "truncate": False}
    results = server.post(path, {"model": "ranker", **body}).json()
    assert [(result["index"], result["score"]) for result in results] == expected
    assert [result["text"] for result in results] == [DOCUMENTS[index] for index, _ in expected]
    (best,) = server.post(path, {"model": "ranker", "query": "the cat", "texts": DOCUMENTS, "top_n": 1}).json()
    assert best == {"index": expected[0][0], "score": expected[0][1]}


def test_a_hundred_documents_compute_the_prompt_before_them_once(server: ServerProcess) -> None:
    before = server.get_counters()["rows"]
    usage = rerank(server, model="tiny", documents=[f"{chr(20 + n % 90)}{n} {'x' * 20}" for n in range(100)])["usage"]
    assert server.get_counters()["rows"] - before == usage["computed_tokens"]
    assert usage["computed_tokens"] < 0.25 * usage["prompt_tokens"]


def test_a_model_is_found_by_name(server: ServerProcess) -> None:
    with cohere.ClientV2("key", base_url=server.url) as client:
        with pytest.raises(NotFoundError):
            client.rerank(model="nothing", query="a", documents=["b"])
        with pytest.raises(BadRequestError, match="no classifier head") as error:
            client.rerank(model="vectors", query="a", documents=["b"])
    assert error.value.body["message"] == error.value.body["error"]["message"]
    (card,) = [card for card in server.http.get("/v1/models").json()["data"] if card["id"] == "ranker"]
    assert "rerank" in card["capabilities"]


def test_bad_requests_are_refused_by_name(server: ServerProcess) -> None:
    for field, value in {
        "query": "",
        "documents": [],
        "top_n": 0,
        "max_tokens_per_doc": 0,
        "rank_fields": ["title"],
        "max_chunks_per_doc": 5,
        "truncation": True,
        "return_embeddings": True,
        "raw_scores": True,
        "truncate": True,
        "texts": ["not the documents"],
        "documnts": ["a"],
    }.items():
        refused = rerank(server, **{field: value})
        assert (refused["status"], refused["error"]["param"]) == (400, field)
        assert refused["message"] == refused["detail"] == refused["error"]["message"]
    assert rerank(server, documents=[{"title": "a"}])["status"] == 400
    assert rerank(server, documents=None)["error"]["param"] == "documents"
    assert rerank(server, documents=["a"] * 121)["error"]["code"] == "limit_exceeded"
    assert rerank(server, rank_fields=None, truncation=False, return_embeddings=False)["status"] == 200


def test_long_documents_are_refused_or_cut(server: ServerProcess) -> None:
    long = "the cat " * 600
    refused = rerank(server, documents=["a", long])
    assert (refused["error"]["code"], refused["error"]["param"]) == ("context_length_exceeded", "documents")
    first, second = rerank(server, documents=[long, "the cat the"], max_tokens_per_doc=3)["results"]
    assert first["relevance_score"] == second["relevance_score"]


def test_an_instruction_changes_the_scores_of_a_generative_reranker(server: ServerProcess) -> None:
    plain, instructed = (
        rerank(server, model="tiny", **fields)["results"] for fields in ({}, {"instruction": "Find animals."})
    )
    assert plain != instructed
    assert rerank(server, instruction="Find animals.")["error"]["param"] == "instruction"


def test_a_priority_is_a_hint(server: ServerProcess) -> None:
    assert rerank(server, priority=5)["headers"]["x-afterglow-ignored"] == "priority"


def test_embeddings_of_many_inputs_can_be_shortened_and_windowed(server: ServerProcess) -> None:
    inputs = [f"the cat sat on {number}" for number in range(300)] + ["the river " * 400]
    with server.client() as client:
        response = client.embeddings.create(
            model="vectors", input=inputs, dimensions=8, extra_body={"long_text": "window"}
        )
        alone = client.embeddings.create(model="vectors", input=inputs[7], dimensions=8)
    assert len(response.data) == 301
    assert [len(item.embedding) for item in response.data] == [8] * 301
    assert np.dot(response.data[7].embedding, alone.data[0].embedding) > 0.9999
    assert [item.windows for item in response.data[-2:]] == [1, 2]  # type: ignore[attr-defined]
    counters = server.get_counters("vectors")
    assert counters["pooled_decodes"] < counters["pooled_texts"] / 5
