"""LoRA adapters over HTTP: from the name of the model and the field `lora`, on every API, with the clients of each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import ollama
import openai
import pytest

from afterglow.testing import models
from support.server_process import ServerProcess

pytestmark = pytest.mark.native

MESSAGES: list[Any] = [{"role": "user", "content": "the thing and the other thing"}]
STYLE = [{"name": "style", "scale": 0.8}]
SETTINGS = """
[server]
aliases = ["gpt-*=small"]
[models.small]
model = "{model}"
context = 1024
sequences = 4
[models.small.adapters]
style = "{style}"
formal = "{formal}@0.5"
judge = "{judge}"
[models.other]
model = "{other}"
"""


@pytest.fixture(scope="module")
def adapter_server(caches_of_our_own: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a settings file that declares adapters."""
    settings = tmp_path_factory.mktemp("adapters") / "settings.toml"
    settings.write_text(
        SETTINGS.format(
            model=models.get_path("attention"),
            style=models.get_path("adapter-attention-a"),
            formal=models.get_path("adapter-attention-b"),
            judge=models.get_path("adapter-attention-activated"),
            other=models.get_path("draft"),
        )
    )
    process = ServerProcess(AFTERGLOW_SETTINGS=str(settings))
    yield process
    process.stop()


@pytest.fixture
def client(adapter_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{adapter_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(client: openai.OpenAI, model: str, lora: object = None) -> str:
    body = {"ignore_eos": True} | ({} if lora is None else {"lora": lora})
    response = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, temperature=0, extra_body=body
    )
    return response.choices[0].message.content or ""


def test_adapters_of_requests_that_name_none_are_set_for_the_server(client, adapter_server):
    def get_scales() -> list[float]:
        return [item["scale"] for item in adapter_server.http.get("/lora-adapters", params={"model": "small"}).json()]

    base, style = chat(client, "small"), chat(client, "small+style@0.8")
    assert base != style
    assert get_scales() == [0, 0, 0]
    try:
        response = adapter_server.post("/lora-adapters?model=small", [{"id": 0, "scale": 0.8}])
        assert (response.status_code, response.json()) == (200, {"success": True})
        assert get_scales() == [0.8, 0, 0]
        assert chat(client, "small") == style
        assert chat(client, "small", []) == base, "a request can still use none"
        assert chat(client, "small+formal") == chat(client, "small", [{"id": 1}]), (
            "a request that names one uses only it"
        )
        assert adapter_server.post("/lora-adapters?model=small", [{"id": 3, "scale": 1}]).status_code == 400
        assert adapter_server.post("/lora-adapters?model=small", [{"id": 0}, {"id": 0}]).status_code == 400
        assert get_scales() == [0.8, 0, 0], "a wrong request changes nothing"
    finally:
        assert adapter_server.post("/lora-adapters?model=small", []).status_code == 200
    assert chat(client, "small") == base, "state of the adapter is not used without it"


def test_a_model_is_loaded_and_unloaded_by_the_listed_name_of_an_adapter(adapter_server):
    for action, loaded in (("unload", False), ("load", True)):
        response = adapter_server.post(f"/models/{action}", {"model": "small+style"})
        assert (response.status_code, response.json()["id"], response.json()["loaded"]) == (200, "small", loaded)
    assert adapter_server.post("/models/load", {"model": "small+unknown"}).status_code == 404


def test_the_list_of_adapters_can_be_posted_back(adapter_server):
    def list_adapters() -> list[dict[str, Any]]:
        return adapter_server.http.get("/lora-adapters", params={"model": "small"}).json()

    listed = list_adapters()
    listed[1]["scale"] = 0.25
    try:
        assert adapter_server.post("/lora-adapters?model=small", listed).status_code == 200
        assert list_adapters() == listed
        assert adapter_server.post("/lora-adapters?model=small", [{"scale": 1}]).status_code == 400
    finally:
        adapter_server.post("/lora-adapters?model=small", [])


def test_generation_settings_name_the_adapters_that_were_used(adapter_server):
    def get_lora(model: str, **fields: Any) -> list[dict[str, Any]]:
        body = {"model": model, "prompt": "the thing", "n_predict": 1, **fields}
        return adapter_server.post("/completion", body).json()["generation_settings"]["lora"]

    assert get_lora("small") == []
    assert get_lora("small", lora=[{"name": "formal"}]) == [{"id": 1, "scale": 0.5}]
    assert get_lora("small+style@0.75") == [{"id": 0, "scale": 0.75}]
    try:
        adapter_server.post("/lora-adapters?model=small", [{"id": 0, "scale": 0.75}])
        assert get_lora("small") == [{"id": 0, "scale": 0.75}]
    finally:
        adapter_server.post("/lora-adapters?model=small", [])


def test_the_name_and_the_field_choose_the_same_adapters(client):
    expected = chat(client, "small+style@0.8")
    assert chat(client, "small", STYLE) == expected
    assert chat(client, "small", [{"id": 0, "scale": 0.8}]) == expected
    assert chat(client, "small+formal") == chat(client, "small+formal@0.5") == chat(client, "small", [{"id": 1}])
    combined = chat(client, "small+formal", STYLE)
    assert chat(client, "small+style@0.8+formal@0.5") == combined
    assert chat(client, "small", [{"name": "style", "scale": 0}]) == chat(client, "small")
    assert len({chat(client, "small"), expected, chat(client, "small+formal"), combined}) == 4


def test_every_api_applies_the_adapters(adapter_server, client):
    base = {"temperature": 0, "ignore_eos": True}
    anthropic_client = anthropic.Anthropic(base_url=adapter_server.url, api_key="none", max_retries=0)
    ollama_client = ollama.Client(host=adapter_server.url, timeout=240)

    def complete(model: str, **body: object) -> str:
        return (
            client.completions.create(model=model, prompt="the thing", max_tokens=8, extra_body={**base, **body})
            .choices[0]
            .text
        )

    def respond(model: str, **body: object) -> str:
        return client.responses.create(
            model=model, input="the thing", max_output_tokens=8, extra_body={**base, **body}
        ).output_text

    def message(model: str, **body: object) -> str:
        made = anthropic_client.messages.create(
            model=model, messages=MESSAGES, max_tokens=8, extra_body={**base, **body}
        )
        return made.content[0].text  # type: ignore[union-attr]

    def ollama_chat(model: str, **options: object) -> str:
        made = ollama_client.chat(model, MESSAGES, options={"num_predict": 8, **base, **options})
        return made.message.content or ""

    def ollama_generate(model: str, **options: object) -> str:
        return ollama_client.generate(model, "the thing", options={"num_predict": 8, **base, **options}).response

    with anthropic_client, ollama_client._client:
        for ask in (complete, respond, message, ollama_chat, ollama_generate):
            expected = ask("small", lora=STYLE)
            assert ask("small+style@0.8") == expected, ask
            assert ask("small") != expected, ask


def test_aliases_and_created_models_have_the_adapters_of_their_model(adapter_server, client):
    ollama_client = ollama.Client(host=adapter_server.url, timeout=240)

    def ask(model: str) -> tuple[str, str]:
        made = ollama_client.chat(model, MESSAGES, options={"num_predict": 8, "temperature": 0, "ignore_eos": True})
        return chat(client, model), made.message.content or ""

    with ollama_client._client:
        ollama_client.create("made", from_="gpt-9", parameters={"top_k": 7})
        try:
            assert ask("gpt-9") == ask("made") == ask("small")
            expected = ask("small+style@0.8")
            assert expected != ask("small")
            for name in ("gpt-9+style@0.8", "made+style@0.8", "made:latest+style@0.8"):
                assert ask(name) == expected, name
            assert ollama_client.show("gpt-9").modelinfo == ollama_client.show("small").modelinfo
            with pytest.raises(ollama.ResponseError, match="'styel' is not an adapter of 'small'"):
                ollama_client.chat("made+styel", MESSAGES)
        finally:
            ollama_client.delete("made")


def test_cached_state_never_crosses_adapters(adapter_server):
    def count_cached(model: str) -> int:
        body = {"model": model, "prompt": "a prompt of some length that is cached" * 3, "max_tokens": 1}
        usage = adapter_server.post("/v1/completions", body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    for model in ("small+style", "small+formal", "small", "small+style@0.5"):
        assert count_cached(model) == 0, model
        assert count_cached(model) > 50, model


def test_concurrent_requests_with_different_adapters_have_their_own_output(client):
    names = ["small", "small+style", "small+formal", "small+style+formal"]
    expected = {name: chat(client, name) for name in names}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: (name, chat(client, name)), names * 3))
    assert all(text == expected[name] for name, text in answers)


def test_prompt_logprobs_are_those_of_the_adapters(adapter_server):
    def score(model: str) -> list[float]:
        body = {"model": model, "prompt": "the thing and more", "max_tokens": 1, "echo": True, "logprobs": 0}
        return adapter_server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["token_logprobs"][1:-1]

    assert score("small+style") == score("small+style") != score("small")


def test_the_models_route_lists_adapters(client, adapter_server):
    cards = {card.id: card for card in client.models.list()}
    assert list(cards) == ["small", "small+style", "small+formal", "small+judge", "other"]
    assert cards["small+style"].model_dump()["parent"] == "small"
    assert client.models.retrieve("small+style").id == "small+style"
    with anthropic.Anthropic(base_url=adapter_server.url, api_key="none") as other:
        assert [model.id for model in other.models.list()] == list(cards)


@pytest.mark.parametrize(
    ("model", "lora", "param", "message"),
    [
        ("small+styel", None, "model", "'styel' is not an adapter of 'small'; did you mean 'style'?"),
        ("small+style+style", None, "model", "`model` has 'style' twice"),
        ("small+style@1000", None, "model", "`model` must have a scale from -100 to 100 for 'style'"),
        ("small", [{"name": "formall"}], "lora", "'formall' is not an adapter of 'small'; did you mean 'formal'?"),
        ("small", [{"id": 7}], "lora", "'small' has 3 adapters; there is no `id` 7"),
        ("small", [{"scale": 1}], "lora", "must have either `name` or `id`"),
        ("small+style@much", None, "model", "the scale of 'style' must be a number, not 'much'"),
        ("small+style@1e30", None, "model", "must have a scale from -100 to 100 for 'style', not 1e+30"),
        ("small+style@nan", None, "model", "must have a scale from -100 to 100 for 'style', not nan"),
        ("small+style", [{"name": "style"}], "lora", "has 'style' twice"),
        ("other+style", None, "model", "it was loaded without adapters"),
    ],
)
def test_a_wrong_adapter_is_refused_by_name(client, model, lora, param, message):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, model, lora)
    assert message in str(refused.value)
    assert str(refused.value.param).startswith(param)


def test_embeddings_and_rankings_refuse_adapters(client, adapter_server):
    with pytest.raises(openai.BadRequestError, match="an embedding uses the base model"):
        client.embeddings.create(model="small+style", input="text")
    ollama_client = ollama.Client(host=adapter_server.url)
    with ollama_client._client, pytest.raises(ollama.ResponseError, match="an embedding uses the base model"):
        ollama_client.embed("small+style", "text")
    for path, body in (("/embedding", {"content": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        for name in ("small+style", "small+nothing"):
            response = adapter_server.post(path, {"model": name, **body})
            assert response.status_code == 400
            assert "uses the base model" in response.json()["error"]["message"]


def test_a_pin_and_an_explanation_belong_to_the_adapters(adapter_server):
    body = {"prompt": "a prefix that is pinned", "model": "small+style"}
    assert adapter_server.post("/cache/pin", body).status_code == 200
    assert adapter_server.post("/cache/unpin", {**body, "model": "small"}).status_code == 404
    assert adapter_server.post("/cache/unpin", {**body, "model": "small", "lora": [{"id": 0}]}).status_code == 200
    adapter_server.post("/v1/completions", {**body, "max_tokens": 1})
    reused = [
        adapter_server.post("/cache/explain", {**body, "model": model}).json()["reused_tokens"]
        for model in ("small+style", "small+formal")
    ]
    assert reused[0] > 10
    assert reused[1] < 10
