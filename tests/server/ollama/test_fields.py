"""Every honoured field of /api/chat, /api/generate, /api/embed and `options` has a check that observes its effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pydantic
import pytest

from afterglow.server.errors import APIError
from afterglow.server.logs import start_record
from afterglow.server.ollama import schema
from afterglow.server.ollama.embeddings import check_options
from afterglow.server.schema.base import get_rule
from afterglow.server.schema.sampling import SamplingFields
from afterglow.testing.models import vocabulary
from support.server_process import CYCLE, PICK_TOOL, ServerProcess

pytestmark = pytest.mark.native

FieldCheck: TypeAlias = Callable[[ServerProcess], None]
CHECKS: dict[str, dict[str, FieldCheck]] = {"chat": {}, "generate": {}, "embed": {}, "options": {}}
BODIES: dict[str, type[pydantic.BaseModel]] = {
    "chat": schema.OllamaChatRequest,
    "generate": schema.OllamaGenerateRequest,
    "embed": schema.OllamaEmbedRequest,
    "options": schema.OllamaOptions,
}
# Sampling fields that Ollama does not have: tests/server/openai/test_fields.py observes them.
OWN_OPTIONS = set(SamplingFields.model_fields) - {
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "presence_penalty"),
    *("frequency_penalty", "seed", "mirostat", "mirostat_tau", "mirostat_eta", "num_ctx"),
}
HOT = {"temperature": 100.0, "seed": 7}  # at this temperature all tokens are about equally likely
TILDE_BIAS = {"logit_bias": {str(vocabulary.get_byte_token(ord("~"))): 22.5}}  # nearly as likely as the next letter
FORMAT = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}


def checks(route: str, *fields: str) -> Callable[[FieldCheck], FieldCheck]:
    """Register the decorated function as the check of some fields."""

    def register(check: FieldCheck) -> FieldCheck:
        for field in fields:
            assert field not in CHECKS[route], f"{field} has two checks"
            CHECKS[route][field] = check
        return check

    return register


def checks_on_both_routes(*fields: str) -> Callable[[Callable[[Callable[..., dict[str, Any]]], None]], None]:
    """Register the decorated function for chat and generate. It receives a function that sends a request."""

    def register(check: Callable[[Callable[..., dict[str, Any]]], None]) -> None:
        checks("chat", *fields)(lambda server: check(lambda **fields: chat(server, **fields)))
        checks("generate", *fields)(lambda server: check(lambda **fields: generate(server, **fields)))

    return register


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, body)
    return {"status": response.status_code, **response.json()}


def build_options(options: dict[str, Any] | None) -> dict[str, Any]:
    return {"num_predict": 8, "temperature": 0, **(options or {})}


def chat(server: ServerProcess, text: str = "hello", options: Any = None, **fields: Any) -> dict[str, Any]:
    """Return the response of /api/chat, greedy by default, with its text as `text`."""
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny", "messages": messages, "stream": False, "options": build_options(options), **fields}
    response = post(server, "/api/chat", body)
    message = response.get("message", {})
    return {**response, "text": message.get("content"), "thinking": message.get("thinking")}


def generate(server: ServerProcess, prompt: str = "hello", options: Any = None, **fields: Any) -> dict[str, Any]:
    """Return the response of /api/generate, greedy by default, with its text as `text`."""
    body = {"model": "tiny", "prompt": prompt, "stream": False, "options": build_options(options), **fields}
    response = post(server, "/api/generate", body)
    return {"thinking": None, **response, "text": response.get("response")}


def list_honoured(route: str) -> list[str]:
    """List the fields that are neither hints nor refused; those have checks in test_schema.py."""
    rules = {name: get_rule(field) for name, field in BODIES[route].model_fields.items()}
    honoured = [name for name, rule in rules.items() if rule is None or "same_as" in rule]
    return [name for name in honoured if route != "options" or name not in OWN_OPTIONS]


def test_there_are_no_checks_of_other_fields() -> None:
    assert {route: set(CHECKS[route]) for route in BODIES} == {route: set(list_honoured(route)) for route in BODIES}


@pytest.mark.parametrize(("route", "field"), [(route, field) for route in BODIES for field in list_honoured(route)])
def test_a_field_has_an_effect(server: ServerProcess, route: str, field: str) -> None:
    CHECKS[route][field](server)


# --- both generation routes


@checks_on_both_routes("model")
def _(send: Callable[..., dict[str, Any]]) -> None:
    assert send(model="tiny:latest")["text"] == send(model="tiny")["text"] == CYCLE[:8]
    assert send(model="tiny:latest")["model"] == "tiny:latest"
    refused = send(model="tiny:other")
    assert (refused["status"], "tiny:other" in refused["error"]) == (404, True)
    assert send(model="vectors")["status"] == 400


@checks_on_both_routes("format")
def _(send: Callable[..., dict[str, Any]]) -> None:
    assert json.loads(send(format=FORMAT, options={"num_predict": 64})["text"]) == {"a": 1}
    assert send(format="json")["text"].lstrip().startswith("{")
    assert send(format="")["text"] == CYCLE[:8]
    refused = send(format={"type": "object", "properties": {"a": {"type": "number", "multipleOf": "x"}}})
    assert refused["status"] == 400


@checks_on_both_routes("options")
def _(send: Callable[..., dict[str, Any]]) -> None:
    refused = send(options={"num_predcit": 5})
    assert refused["status"] == 400
    assert "'num_predcit': did you mean 'num_predict'?" in refused["error"]


@checks_on_both_routes("think")
def _(send: Callable[..., dict[str, Any]]) -> None:
    thought = send(model="reasoning", think=True)
    assert (thought["thinking"], thought["text"]) == (CYCLE[:8], "")
    plain = send(model="reasoning", think=False)
    assert (plain["thinking"], plain["text"]) == (None, CYCLE[:8])
    assert send(model="reasoning", think="low")["thinking"]
    assert send(think=True)["thinking"] is None  # a hint on a model without reasoning
    assert send(think="much")["status"] == 400


@checks_on_both_routes("keep_alive")
def _(send: Callable[..., dict[str, Any]]) -> None:
    for value in (-1, "10m", 3600.5):  # tests/server/ollama/test_management.py observes the effect
        assert send(keep_alive=value)["text"] == CYCLE[:8]
    assert send(keep_alive=-1)["status"] == 200
    refused = send(keep_alive="soon")
    assert (refused["status"], "keep_alive" in refused["error"]) == (400, True)


@checks_on_both_routes("logprobs", "top_logprobs")
def _(send: Callable[..., dict[str, Any]]) -> None:
    response = send(logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert [entry["token"] for entry in response["logprobs"]] == ["a", "b", "c"]
    assert all(entry["logprob"] > -1 and len(entry["top_logprobs"]) == 2 for entry in response["logprobs"])
    assert "top_logprobs" not in send(logprobs=True)["logprobs"][0]
    assert "logprobs" not in send()
    assert send(top_logprobs=2)["status"] == 400
    assert send(logprobs=True, top_logprobs=21)["status"] == 400


@checks("chat", "stream")
def _(server: ServerProcess) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "options": build_options(None)}
    chat(server)
    for fields in ({}, {"stream": True}):
        response = server.post("/api/chat", {**body, **fields})
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert "".join(line["message"]["content"] for line in lines) == CYCLE[:8]
        assert [line["done"] for line in lines] == [False] * 8 + [True]
        end = lines[-1]
        assert (end["done_reason"], end["eval_count"]) == ("length", 8)
        assert end["prompt_eval_cached_count"] == end["prompt_eval_count"]  # the same prompt came before
        assert end["total_duration"] >= end["prompt_eval_duration"] + end["eval_duration"] > 0
        assert end["load_duration"] >= 0


@checks("generate", "stream")
def _(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "hello", "options": build_options(None)}
    lines = [json.loads(line) for line in server.post("/api/generate", body).text.splitlines()]
    assert "".join(line["response"] for line in lines) == CYCLE[:8]
    assert [line["done"] for line in lines] == [False] * 8 + [True]
    assert "context" in lines[-1]
    assert "context" not in lines[0]


@checks("chat", "truncate")
def _(server: ServerProcess) -> None:
    turns = [("user" if number % 2 == 0 else "assistant", f"{number} " * 200) for number in range(8)]
    messages = [{"role": role, "content": text} for role, text in [*turns, ("user", "hello")]]
    for fields in ({}, {"truncate": False}):
        refused = chat(server, messages=messages, **fields)
        assert refused["status"] == 400
        assert "2,048" in refused["error"]
    answered = chat(server, messages=messages, truncate=True)
    assert (answered["text"], answered["overflow"]["policy"]) == (CYCLE[:8], "shift")


@checks("generate", "truncate")
def _(server: ServerProcess) -> None:
    prompt = "word " * 1000
    assert generate(server, prompt, raw=True)["status"] == 400
    answered = generate(server, prompt, raw=True, truncate=True)
    assert (answered["status"], answered["overflow"]["policy"]) == (200, "shift")


# --- chat


@checks("chat", "messages")
def _(server: ServerProcess) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "pick"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "pick", "arguments": {"letter": "a"}}}],
        },
        {"role": "tool", "content": "picked", "tool_name": "pick"},
        {"role": "assistant", "content": "done", "thinking": "hm"},
        {"role": "user", "content": "thanks"},
    ]
    answered = chat(server, messages=messages)
    assert (answered["status"], answered["text"]) == (200, CYCLE[:8])
    shorter = chat(server, messages=messages[-1:])
    assert answered["prompt_eval_count"] > shorter["prompt_eval_count"]
    loaded = chat(server, messages=[])
    assert (loaded["done_reason"], loaded["message"]) == ("load", {"role": "assistant", "content": ""})
    refused = chat(server, messages=[{"role": "robot", "content": "x"}])
    assert (refused["status"], "messages[0].role" in refused["error"]) == (400, True)


@checks("chat", "tool_choice")
def _(server: ServerProcess) -> None:
    called = chat(server, tools=[PICK_TOOL], tool_choice="required", options={"num_predict": 200})
    (call,) = called["message"]["tool_calls"]
    assert (call["function"], called["done_reason"]) == ({"name": "pick", "arguments": {"letter": "a"}}, "stop")
    assert call["id"]
    assert "tool_calls" not in chat(server, tools=[PICK_TOOL], tool_choice="none")["message"]
    assert chat(server, tool_choice="required")["status"] == 400


@checks("chat", "tools")
def _(server: ServerProcess) -> None:
    with_tools, without = chat(server, tools=[PICK_TOOL]), chat(server)
    assert with_tools["prompt_eval_count"] > without["prompt_eval_count"]  # the tools are in the prompt
    refused = chat(server, tools=[{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}])
    assert (refused["status"], "tools[0].function.parameters.type" in refused["error"]) == (400, True)


# --- generate


@checks("generate", "prompt")
def _(server: ServerProcess) -> None:
    assert generate(server, "a longer prompt")["prompt_eval_count"] > generate(server, "x")["prompt_eval_count"]
    loaded = generate(server, "")
    assert (loaded["done_reason"], loaded["response"]) == ("load", "")


@checks("generate", "raw")
def _(server: ServerProcess) -> None:
    raw = generate(server, "abc", raw=True)
    assert (raw["text"], raw["prompt_eval_count"], "context" in raw) == (CYCLE[3:11], 3, False)
    assert generate(server, "<|im_start|>abc", raw=True)["prompt_eval_count"] == 4
    formatted = generate(server, "abc", raw=True, format=FORMAT, options={"num_predict": 64})
    assert json.loads(formatted["text"]) == {"a": 1}


@checks("generate", "system")
def _(server: ServerProcess) -> None:
    assert generate(server, system="be brief")["prompt_eval_count"] > generate(server)["prompt_eval_count"]
    refused = generate(server, system="be brief", raw=True)
    assert (refused["status"], "`system` and `raw`" in refused["error"]) == (400, True)


@checks("generate", "template")
def _(server: ServerProcess) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert generate(server, "xyz", template=template)["text"] == CYCLE[CYCLE.index("z") + 1 :][:2] + CYCLE[:6]
    refused = generate(server, template="{{ .Prompt }}")
    assert (refused["status"], "Jinja" in refused["error"]) == (400, True)


@checks("generate", "suffix")
def _(server: ServerProcess) -> None:
    filled = generate(server, "ab", model="reasoning", suffix="yz")
    assert (filled["status"], filled["prompt_eval_count"], "context" in filled) == (200, 7, False)
    refused = generate(server, "ab", suffix="yz")
    assert (refused["status"], "fill-in-the-middle" in refused["error"]) == (400, True)


@checks("generate", "images")
def _(server: ServerProcess) -> None:
    refused = generate(server, images=["iVBORw0KGgo="])  # tests/server/ollama/test_management.py has a vision model
    assert (refused["status"], "only text" in refused["error"]) == (400, True)


@checks("generate", "context")
def _(server: ServerProcess) -> None:
    first = generate(server, "a question for the context")
    second = generate(server, "and another one", context=first["context"])
    assert second["context"][: len(first["context"])] == first["context"]
    assert second["prompt_eval_cached_count"] >= len(first["context"]) - 1
    assert second["prompt_eval_count"] == len(second["context"]) - 8
    refused = generate(server, context=[10**6])
    assert refused["status"] == 400


# --- options


def registers_option(name: str) -> Callable[[Callable[[Callable[..., str]], None]], None]:
    """Register the check of an option. It receives a function that generates a text with options."""

    def register(check: Callable[[Callable[..., str]], None]) -> None:
        def run(server: ServerProcess) -> None:
            check(lambda **options: str(chat(server, options=options)["text"]))

        checks("options", name)(run)

    return register


@registers_option("temperature")
def _(write: Callable[..., str]) -> None:
    assert write(temperature=0) == CYCLE[:8] != write(**HOT)


@registers_option("seed")
def _(write: Callable[..., str]) -> None:
    assert write(temperature=100.0, seed=1) == write(temperature=100.0, seed=1) != write(temperature=100.0, seed=2)
    assert write(temperature=100.0, seed=-1) != write(temperature=100.0, seed=-1)  # a new seed each time


@registers_option("top_k")
def _(write: Callable[..., str]) -> None:
    assert write(top_k=1, **HOT) == CYCLE[:8]


@registers_option("top_p")
def _(write: Callable[..., str]) -> None:
    assert write(top_p=0.5, **HOT) == CYCLE[:8]


@registers_option("min_p")
def _(write: Callable[..., str]) -> None:
    assert write(min_p=0.9, **HOT) == CYCLE[:8]


@registers_option("typical_p")
def _(write: Callable[..., str]) -> None:
    assert write(typical_p=0.5, **HOT) == CYCLE[:8]


@registers_option("num_predict")
def _(write: Callable[..., str]) -> None:
    assert write(num_predict=3) == CYCLE[:3]
    for unlimited in (-1, -2):
        assert write(num_predict=unlimited, stop="m") == CYCLE[:12]


@registers_option("stop")
def _(write: Callable[..., str]) -> None:
    assert write(stop=["d", "xyz"]) == write(stop="d") == "abc"


@registers_option("repeat_penalty")
def _(write: Callable[..., str]) -> None:
    assert "~" in write(num_predict=56, repeat_penalty=10.0, **TILDE_BIAS)[28:]


@registers_option("presence_penalty")
def _(write: Callable[..., str]) -> None:
    assert "~" in write(num_predict=56, presence_penalty=2.0, **TILDE_BIAS)[28:]


@registers_option("frequency_penalty")
def _(write: Callable[..., str]) -> None:
    assert "~" in write(num_predict=56, frequency_penalty=2.0, **TILDE_BIAS)[28:]


@registers_option("repeat_last_n")
def _(write: Callable[..., str]) -> None:
    penalized = {"num_predict": 56, "repeat_penalty": 10.0, **TILDE_BIAS}
    assert "~" not in write(repeat_last_n=0, **penalized)
    assert "~" not in write(repeat_last_n=8, **penalized)  # a letter comes again after 28 tokens
    assert "~" in write(repeat_last_n=-1, **penalized)[28:]


@registers_option("mirostat")
def _(write: Callable[..., str]) -> None:
    assert write(mirostat=2, mirostat_tau=0.1, **HOT) != write(**HOT)


checks("options", "mirostat_tau", "mirostat_eta")(CHECKS["options"]["mirostat"])


@checks("options", "num_ctx")
def _(server: ServerProcess) -> None:
    assert chat(server, options={"num_ctx": 2048})["text"] == CYCLE[:8]
    refused = chat(server, options={"num_ctx": 4000})
    assert refused["status"] == 400
    assert "4,000" in refused["error"]
    assert "2,048" in refused["error"]
    assert "--allow-reload" in refused["error"]
    beyond = chat(server, options={"num_ctx": 100_000})
    assert "100,000" in beyond["error"]
    assert "4,096" in beyond["error"]


# --- embed


def embed(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    return post(server, "/api/embed", {"model": "vectors", "input": "hello", **fields})


@checks("embed", "model")
def _(server: ServerProcess) -> None:
    assert embed(server, model="vectors:latest")["model"] == "vectors:latest"
    assert embed(server, model="nothing")["status"] == 404


@checks("embed", "input")
def _(server: ServerProcess) -> None:
    one, two = embed(server), embed(server, input=["hello", "there"])
    assert (len(one["embeddings"]), len(two["embeddings"])) == (1, 2)
    assert one["embeddings"][0] == pytest.approx(two["embeddings"][0], abs=1e-5)
    assert two["prompt_eval_count"] > one["prompt_eval_count"] > 0
    assert two["total_duration"] >= two["load_duration"] >= 0
    assert embed(server, input=[])["embeddings"] == embed(server, input="")["embeddings"] == []


@checks("embed", "truncate")
def _(server: ServerProcess) -> None:
    long = "word " * 3000
    for fields in ({}, {"truncate": False}):
        refused = embed(server, input=long, **fields)
        assert (refused["status"], "tokens" in refused["error"]) == (400, True)
    assert len(embed(server, input=long, truncate=True)["embeddings"]) == 1


@checks("embed", "dimensions")
def _(server: ServerProcess) -> None:
    (whole,), (short,) = embed(server)["embeddings"], embed(server, dimensions=4)["embeddings"]
    assert short == pytest.approx(np.array(whole[:4]) / np.linalg.norm(whole[:4]), abs=1e-5)
    assert embed(server, dimensions=0)["embeddings"] == [whole]
    refused = embed(server, dimensions=1000)
    assert (refused["status"], "1,000" in refused["error"], "64" in refused["error"]) == (400, True, True)


@checks("embed", "options")
def _(server: ServerProcess) -> None:
    assert embed(server, options={"num_ctx": 64})["status"] == 200
    assert embed(server, options={"num_ctxx": 64})["status"] == 400
    refused = embed(server, options={"lora": [{"name": "style"}]})
    assert (refused["status"], "the base model" in refused["error"]) == (400, True)
    assert embed(server, options={"lora": [], "cache_salt": "mine"})["status"] == 200
    for path, text in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        body = {"model": "vectors", text: "hello", "options": {"temperature": 0, "priority": 3, "num_thread": 2}}
        ignored = server.post(path, body).headers["x-afterglow-ignored"].split(", ")
        assert sorted(ignored) == ["options.num_thread", "options.priority", "options.temperature"]


@checks("embed", "keep_alive")
def _(server: ServerProcess) -> None:
    assert embed(server, keep_alive=-1)["status"] == 200
    assert embed(server, keep_alive="soon")["status"] == 400


# --- other properties of all routes


def test_a_request_that_is_refused_does_not_change_keep_alive(server: ServerProcess) -> None:
    def get_expiry() -> Any:
        return server.http.get("/v1/models/tiny").json()["expires_at"]

    for send in (chat, generate):
        assert send(server, keep_alive=-1)["status"] == 200
        assert send(server, keep_alive="1h", format={"type": "no type"})["status"] == 400
        assert get_expiry() is None
        assert send(server, keep_alive="1h")["status"] == 200
        assert get_expiry() is not None
    assert chat(server, keep_alive=-1)["status"] == 200


def test_a_strict_server_refuses_options_without_effect_on_an_embedding() -> None:
    start_record("POST", "/api/embed", refuses_hints=True)
    check_options(schema.OllamaOptions.model_validate({"num_ctx": 64, "cache_salt": "mine"}))
    with pytest.raises(APIError, match=r"`options\.top_k` has no effect"):
        check_options(schema.OllamaOptions.model_validate({"top_k": 3}))
    assert start_record("POST", "/api/embed").accept_hint("options.top_k")


def test_a_body_needs_no_content_type(server: ServerProcess) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hello", "stream": False, "options": {"num_predict": 3}})
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        assert server.http.post("/api/generate", content=body, headers=headers).json()["response"] == "abc"
    assert server.http.post("/api/generate", content="{").json()["error"].startswith("the body is not JSON")


def test_options_without_effect_are_named_in_a_header(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "x", "stream": False, "shift": True, "options": {"num_gpu": 1, "num_predict": 1}}
    response = server.post("/api/generate", body)
    assert (response.status_code, response.headers["x-afterglow-ignored"]) == (200, "options.num_gpu, shift")


def test_unknown_fields_are_refused_by_name(server: ServerProcess) -> None:
    response = server.post("/api/chat", {"model": "tiny", "messages": [], "mesages": []})
    assert (response.status_code, response.json()) == (
        400,
        {"error": "`mesages` is not a field of this request; did you mean `messages`?"},
    )
