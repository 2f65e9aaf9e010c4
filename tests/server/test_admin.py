"""Models, tokens, templates, numbers, and what memory holds."""

from __future__ import annotations

import openai
import pytest

from afterglow.testing import models as tiny
from support.openai_schemas import CreateEmbeddingResponse, Model, valid
from support.server_process import CYCLE, ServerProcess, serving, text_of


def test_the_models_are_listed_as_openai_does(server: ServerProcess) -> None:
    listed = server.http.get("/v1/models").json()
    assert [valid(Model, one).id for one in listed["data"]] == ["tiny", "hybrid", "vectors", "thinker"]
    assert listed["data"][0]["context_length"] == 2048
    with server.client() as client:
        assert client.models.retrieve("thinker").id == "thinker"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nobody")


def test_texts_become_tokens_and_back(server: ServerProcess) -> None:
    tokens = server.post("/tokenize", {"model": "tiny", "content": "the naïve"}).json()["tokens"]
    assert server.post("/detokenize", {"model": "tiny", "tokens": tokens}).json()["content"] == "the naïve"
    pieces = server.post("/tokenize", {"model": "tiny", "content": "ï<|im_end|>", "with_pieces": True}).json()["tokens"]
    assert pieces[0]["piece"] == [0xC3]  # half a character is bytes
    marked = {"model": "tiny", "content": "<|im_end|>", "parse_special": True}
    assert server.post("/tokenize", marked).json()["tokens"] == [2]
    assert server.post("/detokenize", {"model": "tiny", "tokens": [10**9]}).status_code == 400
    assert server.post("/tokenize", {"content": "which model?"}).json()["error"]["code"] == "model_not_found"


def test_embeddings_are_what_openai_s_client_expects(server: ServerProcess) -> None:
    with server.client() as client:  # which asks for base64
        answer = client.embeddings.create(model="vectors", input=["the cat", "the dog"])
    assert [len(one.embedding) for one in answer.data] == [64, 64]
    raw = server.post("/v1/embeddings", {"model": "vectors", "input": "the cat"}).json()
    assert valid(CreateEmbeddingResponse, raw).data[0].embedding == pytest.approx(answer.data[0].embedding)


def test_a_model_for_embeddings_does_not_talk(server: ServerProcess) -> None:
    assert server.chat(model="vectors")["error"]["param"] == "model"
    assert server.complete(model="vectors")["error"]["param"] == "model"


def test_the_metrics_count_what_happened(server: ServerProcess) -> None:
    def numbers() -> tuple[float, ...]:
        return (
            server.metric('afterglow_requests_total{route="/v1/chat/completions",status="200"}'),
            server.metric('afterglow_tokens_total{kind="generated",model="hybrid"}'),
            server.metric('afterglow_first_token_seconds_count{model="hybrid"}'),
            server.metric('afterglow_token_gap_seconds_count{model="hybrid"}'),
            server.metric('afterglow_engine{counter="decodes",model="hybrid"}'),
        )

    before = numbers()
    server.chat(model="hybrid", max_tokens=5)
    after = numbers()
    requests, tokens, first, gaps, decodes = (now - then for now, then in zip(after, before, strict=True))
    assert (requests, tokens, first, gaps) == (1, 5, 1, 4)
    assert decodes >= 5


def test_the_cache_shows_what_is_held(server: ServerProcess) -> None:
    server.chat("a text to be found again")
    held = server.http.get("/cache").json()["models"]["tiny"]
    assert any("a text to be found again" in one["begins"] for one in held["sequences"])
    assert held["tiers"]["ram"]["limit"] > 0
    server.chat("something for a checkpoint", model="hybrid")
    assert server.http.get("/cache").json()["models"]["hybrid"]["checkpoints"]


def test_an_explanation_shows_where_two_prompts_part(server: ServerProcess) -> None:
    server.chat("my favourite colour is green")
    question = [{"role": "user", "content": "my favourite colour is blue"}]
    told = server.post("/cache/explain", {"model": "tiny", "messages": question}).json()
    assert told["before"].endswith("colour is ")
    assert told["ours"].startswith("blue")
    assert told["theirs"].startswith("green")
    assert told["reused_tokens"] == told["shared_tokens"] > 20
    plain = server.post("/cache/explain", {"model": "tiny", "prompt": "abc"}).json()
    assert plain["prompt_tokens"] == 3
    assert server.post("/cache/explain", {"model": "tiny"}).status_code == 400


def test_what_is_not_there_is_said_as_openai_says_it(server: ServerProcess) -> None:
    for answer in (server.http.get("/v1/nothing"), server.http.get("/v1/chat/completions")):
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_health_names_the_models(server: ServerProcess) -> None:
    assert server.http.get("/health").json() == {
        "status": "ok",
        "models": dict.fromkeys(("tiny", "hybrid", "vectors", "thinker"), "ready"),
    }
    assert text_of(server.chat()) == CYCLE[:8]


def test_an_explanation_says_in_words_what_changed(server: ServerProcess) -> None:
    def asked(day: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": f"Today is {day}. Be kind."}, {"role": "user", "content": "hello"}]

    server.post("/v1/chat/completions", {"model": "tiny", "messages": asked("Monday"), "max_tokens": 4})
    told = server.post("/cache/explain", {"model": "tiny", "messages": asked("Tuesday")}).json()
    assert told["likely"] == "date"
    assert "a date or time changed in the system prompt" in told["words"]


def test_the_metrics_have_the_tiers(server: ServerProcess) -> None:
    name = 'afterglow_cache{counter="%s",model="tiny",tier="ram"}'
    before = server.metric(name % "misses")
    server.complete("~ nobody ever wrote a text that begins like this", model="tiny")
    assert server.metric(name % "misses") == before + 1
    assert server.metric(name % "limit") > server.metric(name % "bytes") >= 0
    page = server.http.get("/metrics").text
    for counter in ("hits", "evictions", "saved_bytes", "loaded_bytes", "seconds_saved"):
        assert name % counter in page


def test_a_draft_model_and_heads_guess_for_the_models_they_are_named_for() -> None:
    """Usage, metrics and /stats say what was drafted and accepted, how much at a time, and what that saved."""
    draft, same = tiny.get_path("successor-recurrent"), tiny.get_path("successor-attention")
    models = [f"tiny={same}", f"heads={tiny.get_path('successor-mtp')}", f"plain={same}"]
    with serving(*models, "--draft", f"tiny={draft}", "--draft", "heads=mtp", "--context", "1024") as server:
        for name, drafter in (("tiny", "draft"), ("heads", "mtp")):
            answer = server.complete("xyz", model=name, max_tokens=400, ignore_eos=True)
            assert answer["choices"][0]["text"].startswith(" .abcdef")
            usage = answer["usage"]["completion_tokens_details"]
            found = server.http.get("/stats").json()["models"][name]["speculation"]
            assert found["drafters"] == ["lookup", drafter]
            assert found["drafted"] >= found["accepted"] > 0
            assert found["accepted"] == usage["accepted_prediction_tokens"]
            assert found["drafted"] == usage["accepted_prediction_tokens"] + usage["rejected_prediction_tokens"]
            assert 1 <= usage["mean_prediction_length"] == pytest.approx(found["mean_length"], abs=0.01)
            assert usage["prediction_seconds_saved"] == pytest.approx(found["seconds_saved"], abs=0.01)
            for number in ("drafted", "accepted", "mean_length", "seconds_saved"):
                line = f'afterglow_speculation{{model="{name}",number="{number}"}}'
                assert server.metric(line) == pytest.approx(found[number])
        assert server.http.get("/stats").json()["models"]["plain"]["speculation"]["drafters"] == ["lookup"]
