"""Routes for models, tokenization, embeddings, health, metrics and the prefix cache."""

from __future__ import annotations

import openai
import pytest
from starlette.testclient import TestClient

import afterglow
from afterglow.server.app import build_application
from afterglow.server.models import ModelRegistry, ServedModel
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState
from afterglow.testing import models
from support.openai_schemas import CreateEmbeddingResponse, Model, validate
from support.server_process import CYCLE, ServerProcess, get_text, run_server

pytestmark = pytest.mark.native


def test_models_are_listed_in_openai_format(server: ServerProcess) -> None:
    listing = server.http.get("/v1/models").json()
    assert [validate(Model, card).id for card in listing["data"]] == ["tiny", "hybrid", "vectors", "reasoning"]
    assert listing["data"][0]["context_length"] == 2048
    with server.client() as client:
        assert client.models.retrieve("reasoning").id == "reasoning"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("unknown")


def test_tokenize_and_detokenize_are_inverse(server: ServerProcess) -> None:
    tokens = server.post("/tokenize", {"model": "tiny", "content": "the naïve"}).json()["tokens"]
    assert server.post("/detokenize", {"model": "tiny", "tokens": tokens}).json()["content"] == "the naïve"
    pieces = server.post("/tokenize", {"model": "tiny", "content": "ï<|im_end|>", "with_pieces": True}).json()["tokens"]
    assert pieces[0]["piece"] == [0xC3]  # an incomplete character is returned as bytes
    special = {"model": "tiny", "content": "<|im_end|>", "parse_special": True}
    assert server.post("/tokenize", special).json()["tokens"] == [2]
    assert server.post("/detokenize", {"model": "tiny", "tokens": [10**9]}).status_code == 400
    error = server.post("/tokenize", {"content": "which model?"}).json()["error"]
    assert (error["param"], error["code"]) == ("model", "missing_required_parameter")


def test_embeddings_work_with_the_openai_client(server: ServerProcess) -> None:
    with server.client() as client:  # requests base64
        response = client.embeddings.create(model="vectors", input=["the cat", "the dog"])
    assert [len(item.embedding) for item in response.data] == [64, 64]
    raw = server.post("/v1/embeddings", {"model": "vectors", "input": "the cat"}).json()
    assert validate(CreateEmbeddingResponse, raw).data[0].embedding == pytest.approx(response.data[0].embedding)


def test_an_embedding_model_rejects_generation(server: ServerProcess) -> None:
    assert server.chat(model="vectors")["error"]["param"] == "model"
    assert server.complete(model="vectors")["error"]["param"] == "model"


def test_the_metrics_count_requests_tokens_and_decodes(server: ServerProcess) -> None:
    def read_metrics() -> tuple[float, ...]:
        return (
            server.get_metric('afterglow_requests_total{route="/v1/chat/completions",status="200"}'),
            server.get_metric('afterglow_tokens_total{kind="generated",model="hybrid"}'),
            server.get_metric('afterglow_time_to_first_token_seconds_count{model="hybrid"}'),
            server.get_metric('afterglow_inter_token_latency_seconds_count{model="hybrid"}'),
            server.get_metric('afterglow_engine{counter="decodes",model="hybrid"}'),
        )

    before = read_metrics()
    server.chat(model="hybrid", max_tokens=5)
    after = read_metrics()
    requests, tokens, first_tokens, gaps, decodes = (new - old for new, old in zip(after, before, strict=True))
    assert (requests, tokens, first_tokens, gaps) == (1, 5, 1, 4)
    assert decodes >= 1  # one decode can accept several draft tokens


def test_cache_lists_sequences_tiers_and_checkpoints(server: ServerProcess) -> None:
    server.chat("a text to be found again")
    contents = server.http.get("/cache").json()["models"]["tiny"]
    assert any("a text to be found again" in sequence["first_text"] for sequence in contents["sequences"])
    assert contents["tiers"]["ram"]["limit_bytes"] > 0
    server.chat("something for a checkpoint", model="hybrid")
    assert server.http.get("/cache").json()["models"]["hybrid"]["checkpoints"]


def test_explain_shows_the_texts_at_the_first_difference(server: ServerProcess) -> None:
    server.chat("my favourite colour is green")
    messages = [{"role": "user", "content": "my favourite colour is blue"}]
    explanation = server.post("/cache/explain", {"model": "tiny", "messages": messages}).json()
    assert explanation["shared_text"].endswith("colour is ")
    assert explanation["prompt_text"].startswith("blue")
    assert explanation["cached_text"].startswith("green")
    assert explanation["reused_tokens"] == explanation["shared_tokens"] > 20
    explanation = server.post("/cache/explain", {"model": "tiny", "prompt": "abc"}).json()
    assert explanation["prompt_tokens"] == 3
    assert server.post("/cache/explain", {"model": "tiny"}).status_code == 400


def test_a_prefix_is_pinned_and_unpinned(server: ServerProcess) -> None:
    for body in ({"prompt": "a prefix to pin"}, {"messages": [{"role": "user", "content": "pin this"}]}):
        request = {"model": "tiny", **body}
        pinned = server.post("/cache/pin", request).json()
        assert (pinned["model"], pinned["pinned"]) == ("tiny", True)
        assert pinned["tokens"] > 10
        assert server.post("/cache/unpin", request).json() == {**pinned, "pinned": False}
        again = server.post("/cache/unpin", request)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "pin_not_found")


def test_a_pin_that_cannot_be_served_is_rejected(server: ServerProcess) -> None:
    both = {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}
    for route in ("/cache/pin", "/cache/unpin"):
        for body in ({}, both, {"prompt": []}, {"prompt": "a", "unknown": 1}):
            assert server.post(route, {"model": "tiny", **body}).status_code == 400, (route, body)
    too_long = server.post("/cache/pin", {"model": "tiny", "prompt": "a" * 3000})
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert server.post("/cache/pin", {"model": "nothing", "prompt": "a"}).status_code == 404


def test_the_cache_of_one_model_is_cleared(server: ServerProcess) -> None:
    def count_cached_tokens(model: str) -> int:
        completion = server.complete("a text that is cached until it is cleared", model=model)
        return completion["usage"]["prompt_tokens_details"]["cached_tokens"]

    for model in ("tiny", "reasoning"):
        count_cached_tokens(model)
        assert count_cached_tokens(model) > 20
    assert server.post("/cache/clear", {"model": "tiny"}).json() == {"model": "tiny", "cleared": True}
    assert count_cached_tokens("tiny") == 0
    assert count_cached_tokens("reasoning") > 20
    refusal = server.post("/cache/clear", {}).json()["error"]  # there are several models
    assert refusal["code"] == "missing_required_parameter"


def test_unknown_routes_get_openai_errors(server: ServerProcess) -> None:
    for response in (server.http.get("/v1/nothing"), server.http.get("/v1/chat/completions")):
        assert response.status_code in (404, 405)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_health_lists_the_models(server: ServerProcess) -> None:
    assert server.http.get("/health").json() == {
        "status": "ok",
        "models": dict.fromkeys(("tiny", "hybrid", "vectors", "reasoning"), "ready"),
    }
    assert get_text(server.chat()) == CYCLE[:8]


def test_explain_names_the_likely_reason_of_a_miss(server: ServerProcess) -> None:
    def build_messages(day: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": f"Today is {day}. Be kind."}, {"role": "user", "content": "hello"}]

    server.post("/v1/chat/completions", {"model": "tiny", "messages": build_messages("Monday"), "max_tokens": 4})
    explanation = server.post("/cache/explain", {"model": "tiny", "messages": build_messages("Tuesday")}).json()
    assert explanation["reason"] == "date"
    assert "a date or time changed in the system prompt" in explanation["message"]


def test_the_metrics_include_the_cache_tiers(server: ServerProcess) -> None:
    name = 'afterglow_cache{counter="%s",model="tiny",tier="ram"}'
    before = server.get_metric(name % "misses")
    server.complete("~ no other test uses this prefix", model="tiny")
    assert server.get_metric(name % "misses") == before + 1
    assert server.get_metric(name % "limit_bytes") > server.get_metric(name % "bytes") >= 0
    page = server.http.get("/metrics").text
    for counter in ("hits", "evictions", "saved_bytes", "loaded_bytes", "seconds_saved"):
        assert name % counter in page


def test_draft_selects_the_drafter_of_each_model() -> None:
    """Usage, metrics and /stats agree on draft tokens, accepted tokens, mean draft length and seconds saved."""
    draft, target = models.get_path("successor-recurrent"), models.get_path("successor-attention")
    arguments = [f"tiny={target}", f"heads={models.get_path('successor-mtp')}", f"plain={target}"]
    with run_server(*arguments, "--draft", f"tiny={draft}", "--draft", "heads=mtp", "--context", "1024") as server:
        for model, drafter in (("tiny", "draft"), ("heads", "mtp")):
            completion = server.complete("xyz", model=model, max_tokens=400, ignore_eos=True)
            assert completion["choices"][0]["text"].startswith(" .abcdef")
            usage = completion["usage"]["completion_tokens_details"]
            stats = server.http.get("/stats").json()["models"][model]["speculation"]
            assert stats["drafters"] == ["ngram", drafter]
            assert stats["draft_tokens"] >= stats["accepted_tokens"] > 0
            assert stats["accepted_tokens"] == usage["accepted_prediction_tokens"]
            assert stats["draft_tokens"] == usage["accepted_prediction_tokens"] + usage["rejected_prediction_tokens"]
            assert 1 <= usage["mean_draft_length"] == pytest.approx(stats["mean_draft_length"], abs=0.01)
            assert usage["speculation_seconds_saved"] == pytest.approx(stats["seconds_saved"], abs=0.01)
            for statistic in ("draft_tokens", "accepted_tokens", "mean_draft_length", "seconds_saved"):
                metric = f'afterglow_speculation{{model="{model}",statistic="{statistic}"}}'
                assert server.get_metric(metric) == pytest.approx(stats[statistic])
        assert server.http.get("/stats").json()["models"]["plain"]["speculation"]["drafters"] == ["ngram"]


def test_pinning_tokenizes_the_prompt_once(caches_of_our_own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    tokenize = afterglow.Model.tokenize

    def count(model: afterglow.Model, text: str, **options: bool) -> list[int]:
        texts.append(text)
        return tokenize(model, text, **options)

    monkeypatch.setattr(afterglow.Model, "tokenize", count)
    path = models.get_path("successor-attention")
    options: afterglow.LoadOptions = {"context": 256, "sequences": 1, "threads": 1, "disk_cache": False}
    registry = ModelRegistry(
        {"tiny": ServedModel(lambda: afterglow.load(path, host="process", name="tiny", **options))}
    )
    with (
        ServerState(registry, ServerSettings()) as state,
        TestClient(build_application(state)[0], "http://localhost") as client,
    ):
        for route in ("/cache/pin", "/cache/unpin"):
            assert client.post(route, json={"prompt": "a prefix"}).json()["tokens"] == 7
    assert texts == ["a prefix"] * 2
