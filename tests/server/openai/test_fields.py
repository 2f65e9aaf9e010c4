"""Every field of every request has a check that observes its effect or its rejection.

The documented fields are those of the request types of the `openai` package and of `afterglow.server.schema`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, TypeAlias

import httpx
import numpy as np
import pydantic
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from afterglow.chat.messages import Message
from afterglow.chat.prompt import Breakpoint
from afterglow.server.openai.response_tools import ResponseToolSet
from afterglow.server.openai.responses import build_generation_request
from afterglow.server.openai.schema.chat import ChatRequest
from afterglow.server.openai.schema.completions import CompletionRequest
from afterglow.server.openai.schema.embeddings import EmbeddingRequest
from afterglow.server.openai.schema.responses import ResponseRequest
from afterglow.testing import models
from afterglow.testing.models import vocabulary
from support.server_process import CYCLE, PICK_TOOL, ServerProcess, get_text

pytestmark = pytest.mark.native

FieldCheck: TypeAlias = Callable[[ServerProcess], None]
CHECKS: dict[str, dict[str, FieldCheck]] = {"chat": {}, "completions": {}, "responses": {}, "embeddings": {}}
DOCUMENTED: dict[str, tuple[type[pydantic.BaseModel], Any]] = {
    "chat": (ChatRequest, chat_create_params.CompletionCreateParamsBase),
    "completions": (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
    "responses": (ResponseRequest, response_create_params.ResponseCreateParamsBase),
    "embeddings": (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
}
HOT = {"temperature": 100.0, "seed": 7}  # at this temperature all tokens are about equally likely
X_TOKEN = vocabulary.get_byte_token(ord("x"))
TILDE_BIAS = {"logit_bias": {str(vocabulary.get_byte_token(ord("~"))): 22.5}}  # nearly as likely as the next letter


def checks(route: str, *fields: str) -> Callable[[FieldCheck], FieldCheck]:
    """Register the decorated function as the check of some fields."""

    def register(check: FieldCheck) -> FieldCheck:
        for field in fields:
            assert field not in CHECKS[route], f"{field} has two checks"
            CHECKS[route][field] = check
        return check

    return register


@pytest.mark.parametrize("route", CHECKS)
def test_every_field_has_a_check(route: str) -> None:
    schema, openai_type = DOCUMENTED[route]
    documented = set(schema.model_fields) | set(openai_type.__annotations__)
    assert documented - set(CHECKS[route]) == set(), "fields without a check"
    assert set(CHECKS[route]) - documented == set(), "checks without a field"
    assert set(openai_type.__annotations__) <= set(schema.model_fields), "fields missing in the schema"


def register_unsupported(route: str, **values: Any) -> None:
    """Register checks of unsupported fields, each with a value to try."""
    for field, value in values.items():

        def check(server: ServerProcess, field: str = field, value: Any = value) -> None:
            error = send(server, route, **{field: value})["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", field)
            assert error["code"] == "unsupported_parameter"
            assert send(server, route, **{field: None}).get("error") is None  # null is the same as absent

        checks(route, field)(check)


def register_restricted(route: str, **values: tuple[Any, Any]) -> None:
    """Register checks of fields that accept only their default, each with a supported and an unsupported value."""
    for field, (supported, unsupported) in values.items():

        def check(
            server: ServerProcess, field: str = field, supported: Any = supported, unsupported: Any = unsupported
        ) -> None:
            assert send(server, route, **{field: supported}).get("error") is None
            error = send(server, route, **{field: unsupported})["error"]
            assert error["param"].startswith(field)
            assert error["code"] == "unsupported_parameter"

        checks(route, field)(check)


def register_hints(route: str, /, **values: tuple[Any, Any]) -> None:
    """Register checks of fields without effect, each with a value of what is done anyway, and another one."""
    for field, (usual, other) in values.items():

        def check(server: ServerProcess, field: str = field, usual: Any = usual, other: Any = other) -> None:
            for value, ignored in ((usual, ""), (other, field)):
                response = post(server, route, **{field: value})
                assert response.status_code == 200
                assert response.headers.get("x-afterglow-ignored", "") == ignored
                assert get_output(response.json()) == get_output(send(server, route))

        checks(route, field)(check)


def register_labels(route: str, *fields: str) -> None:
    """Register checks of labels, which do not change the output."""

    @checks(route, *fields)
    def _(server: ServerProcess) -> None:
        expected = get_output(send(server, route))
        for field in fields:
            assert get_output(send(server, route, **{field: "label"})) == expected


def send(server: ServerProcess, route: str, /, **fields: Any) -> dict[str, Any]:
    match route:
        case "chat":
            return server.chat(**fields)
        case "completions":
            return server.complete(**fields)
        case "responses":
            return server.respond(**fields)
    return server.post("/v1/embeddings", {"model": "tiny", "input": "hello", **fields}).json()  # type: ignore[no-any-return]


def post(server: ServerProcess, route: str, /, **fields: Any) -> httpx.Response:
    """Return the response to a chat or a completion with its headers."""
    if route == "chat":
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
        return server.post("/v1/chat/completions", body | fields)
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "temperature": 0}
    return server.post("/v1/completions", body | fields)


def get_output(response: dict[str, Any]) -> Any:
    """Return the embeddings or the text of a response."""
    if "data" in response:
        return response["data"]
    if "output" in response:
        return response["output"][0]["content"][0]["text"]
    return get_text(response)


# --- sampling fields: the same on all three generation routes


def checks_on_all_routes(*fields: str) -> Callable[[Callable[[Callable[..., str]], None]], None]:
    """Register the decorated function on all generation routes. It receives a function that generates a text."""

    def register(check_text: Callable[[Callable[..., str]], None]) -> None:
        for route, limit in (("chat", "max_tokens"), ("completions", "max_tokens"), ("responses", "max_output_tokens")):

            def check(server: ServerProcess, route: str = route, limit: str = limit) -> None:
                def generate(tokens: int = 8, **options: Any) -> str:
                    prompt = {"prompt": "!"} if route == "completions" else {}  # so that every text starts with "a"
                    return str(get_output(send(server, route, **{**prompt, limit: tokens, **options})))

                check_text(generate)

            checks(route, *fields)(check)

    return register


@checks_on_all_routes("temperature")
def _(generate: Callable[..., str]) -> None:
    assert generate(temperature=0) == CYCLE[:8]
    assert generate(temperature=100.0, seed=1) != CYCLE[:8]
    assert generate(temperature=None, seed=1) == CYCLE[:8]  # 0.8, at which the output is practically certain


@checks_on_all_routes("seed")
def _(generate: Callable[..., str]) -> None:
    assert (
        generate(temperature=100.0, seed=1)
        == generate(temperature=100.0, seed=1)
        != generate(temperature=100.0, seed=2)
    )


@checks_on_all_routes("top_p")
def _(generate: Callable[..., str]) -> None:
    assert generate(top_p=0.5, **HOT) == CYCLE[:8] != generate(**HOT)


@checks_on_all_routes("top_k")
def _(generate: Callable[..., str]) -> None:
    assert generate(top_k=1, **HOT) == CYCLE[:8]
    assert generate(top_k=-1, **HOT) == generate(top_k=0, **HOT)


@checks_on_all_routes("min_p")
def _(generate: Callable[..., str]) -> None:
    assert generate(min_p=0.9, **HOT) == CYCLE[:8]


@checks_on_all_routes("typical_p")
def _(generate: Callable[..., str]) -> None:
    assert generate(typical_p=0.5, **HOT) == CYCLE[:8]


@checks_on_all_routes("top_n_sigma")
def _(generate: Callable[..., str]) -> None:
    assert generate(top_n_sigma=1.0, **HOT) == CYCLE[:8]


@checks_on_all_routes("samplers")
def _(generate: Callable[..., str]) -> None:
    assert generate(samplers=["top-k", "temp"], top_k=1, **HOT) == CYCLE[:8]
    for name in ("typical", "typical_p", "typ-p"):
        assert generate(samplers=[name, "temp"], typical_p=0.5, **HOT) == CYCLE[:8]
    assert generate(min_p=0.1, **HOT) == CYCLE[:8]
    assert generate(samplers="tm", min_p=0.1, **HOT) != CYCLE[:8]  # min-p after the temperature


@checks_on_all_routes("logit_bias")
def _(generate: Callable[..., str]) -> None:
    assert generate(logit_bias={str(X_TOKEN): 100}) == "x" * 8
    without_a = generate(logit_bias={str(vocabulary.get_byte_token(ord("a"))): -100})
    assert "a" not in without_a


@checks_on_all_routes("presence_penalty")
def _(generate: Callable[..., str]) -> None:
    assert "~" not in generate(56, **TILDE_BIAS)
    text = generate(56, presence_penalty=2.0, **TILDE_BIAS)
    assert "~" not in text[:28]
    assert "~" in text[28:]  # in the second cycle every letter is penalized


@checks_on_all_routes("frequency_penalty")
def _(generate: Callable[..., str]) -> None:
    assert "~" in generate(56, frequency_penalty=2.0, **TILDE_BIAS)[28:]


@checks_on_all_routes("repeat_penalty", "repetition_penalty", "repeat_last_n")
def _(generate: Callable[..., str]) -> None:
    assert generate(29, repeat_penalty=1000.0)[-1] != "a"
    assert generate(29, repetition_penalty=1000.0, repeat_last_n=-1)[-1] != "a"
    assert generate(29, repeat_penalty=1000.0, repeat_last_n=5)[-1] == "a"  # the first "a" is outside the window


@checks_on_all_routes("xtc_probability", "xtc_threshold")
def _(generate: Callable[..., str]) -> None:
    options = {"logit_bias": {str(X_TOKEN): 23.0}, "temperature": 1.0, "seed": 3}
    assert generate(xtc_probability=1.0, **options) == "x" * 8  # removes the more likely of two likely tokens
    assert generate(xtc_probability=1.0, xtc_threshold=0.5, **options) != "x" * 8  # only one exceeds the threshold


@checks_on_all_routes("dry_penalty_last_n", "dry_sequence_breakers")
def _(generate: Callable[..., str]) -> None:
    assert generate(40, dry_multiplier=100.0, dry_penalty_last_n=-1) == generate(40, dry_multiplier=100.0)
    assert generate(40, dry_multiplier=100.0, dry_penalty_last_n=0) == CYCLE + CYCLE[:12]
    assert generate(40, dry_multiplier=100.0, dry_sequence_breakers=list(CYCLE)) == CYCLE + CYCLE[:12]


@checks_on_all_routes("dry_multiplier", "dry_base", "dry_allowed_length")
def _(generate: Callable[..., str]) -> None:
    default = generate(40, dry_multiplier=100.0)
    assert default[:28] == CYCLE
    assert default[28:] != CYCLE[:12]  # the repetition is penalized
    longer = generate(40, dry_multiplier=100.0, dry_allowed_length=6)
    assert longer[:32] == CYCLE + CYCLE[:4]
    assert longer != default
    small_base = generate(44, dry_multiplier=0.01, dry_base=1.01)
    assert small_base == CYCLE + CYCLE[:16]
    assert generate(44, dry_multiplier=0.01, dry_base=1000.0) != small_base


@checks_on_all_routes("dynatemp_range", "dynatemp_exponent")
def _(generate: Callable[..., str]) -> None:
    warm = {"temperature": 20.0, "seed": 5}
    assert generate(**warm) != CYCLE[:8]
    assert generate(dynatemp_range=20.0, **warm) == CYCLE[:8]  # at low entropy the temperature is 0
    two_likely = {"logit_bias": {str(X_TOKEN): 23.9}, "dynatemp_range": 20.0, **warm}
    assert generate(dynatemp_exponent=0.0, **two_likely) != generate(dynatemp_exponent=50.0, **two_likely)


@checks_on_all_routes("mirostat", "mirostat_tau", "mirostat_eta")
def _(generate: Callable[..., str]) -> None:
    greedy = generate(mirostat=2, mirostat_tau=0.0, **HOT)
    assert greedy[1:] in CYCLE * 2  # after the first token the least surprising one is selected
    assert generate(mirostat=2, mirostat_tau=6.0, **HOT) != greedy
    slow, fast = (generate(24, mirostat=2, mirostat_tau=3.0, mirostat_eta=eta, **HOT) for eta in (0.01, 5.0))
    assert slow != fast


@checks_on_all_routes("deadline")
def _(generate: Callable[..., str]) -> None:
    assert len(generate(1900, deadline=0.02)) < 1900


@checks_on_all_routes("min_tokens", "ignore_eos", "stop_token_ids")
def _(generate: Callable[..., str]) -> None:
    end_bias = {"logit_bias": {str(vocabulary.TURN_END_TOKEN): 100}}
    assert generate(8, stop_token_ids=[X_TOKEN + 1]) == CYCLE[:8]
    assert generate(8, stop_token_ids=[vocabulary.get_byte_token(ord("d"))]) == "abcd"
    assert generate(8, min_tokens=6, **end_bias) == CYCLE[:6]
    assert generate(8, min_tokens=6, ignore_eos=True) == CYCLE[:8]


for ROUTE in ("chat", "completions", "responses"):

    @checks(ROUTE, "priority")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        """tests/server/test_priority.py shows the effect."""
        expected = get_output(send(server, route))
        assert get_output(send(server, route, priority=5)) == get_output(send(server, route, priority=-5)) == expected
        assert send(server, route, priority=2**31)["error"]["param"] == "priority"

    @checks(ROUTE, "service_tier")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        served = {"auto": "default", "scale": "default", "flex": "flex", "priority": "priority", "fast": "priority"}
        for tier, expected in served.items():
            response = send(server, route, service_tier=tier)
            assert get_output(response) == get_output(send(server, route))
            assert response["service_tier"] == expected
        assert send(server, route, service_tier="gold")["error"]["param"] == "service_tier"
        error = send(server, route, service_tier="flex", priority=3)["error"]
        assert (error["param"], error["code"]) == ("service_tier", "invalid_value")
        assert send(server, route, service_tier="default", priority=3).get("error") is None

    @checks(ROUTE, "num_ctx")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        assert send(server, route, num_ctx=2048).get("error") is None
        error = send(server, route, num_ctx=4096)["error"]
        assert error["param"] == "num_ctx"
        assert "4,096" in error["message"]
        assert "2,048" in error["message"]

    @checks(ROUTE, "lora")
    def _(server: ServerProcess, route: str = ROUTE) -> None:  # its effect: tests/server/test_adapters.py
        assert get_output(send(server, route, lora=[])) == get_output(send(server, route))
        error = send(server, route, lora=[{"name": "style", "scale": 0.5}])["error"]
        assert (error["param"], error["code"]) == ("lora", "invalid_value")
        assert "'style' is not an adapter of 'tiny'" in error["message"]

    @checks(ROUTE, "cache_prompt", "cache_salt")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        def count_cached(**fields: Any) -> int:
            if route == "chat":
                usage = server.chat(text, **fields)["usage"]
            else:
                usage = send(server, route, **{"input" if route == "responses" else "prompt": text}, **fields)["usage"]
            details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
            return int(details["cached_tokens"])

        text = f"the cache fields of {route}"
        count_cached()
        assert count_cached(cache_prompt=True) > 20
        assert count_cached(cache_prompt=False) == 0
        assert count_cached(cache_salt=f"{route} a") == 0
        assert count_cached(cache_salt=f"{route} a") > 20
        assert count_cached(cache_salt=f"{route} b") == 0


# --- fields of all routes


for ROUTE in CHECKS:

    @checks(ROUTE, "model")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        assert send(server, route, model="unknown")["error"]["code"] == "model_not_found"
        assert send(server, route, model="tiny").get("error") is None


@checks("chat", "stream")
def _(server: ServerProcess) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    assert len(server.collect_events("/v1/chat/completions", body)) == 5  # role, three letters, finish reason


@checks("completions", "stream")
def _(server: ServerProcess) -> None:
    assert len(server.collect_events("/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 3})) == 4


@checks("responses", "stream")
def _(server: ServerProcess) -> None:
    events = server.collect_events("/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 3})
    assert [event["type"] for event in events].count("response.output_text.delta") == 3


for ROUTE, PATH, BODY in (
    ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
    ("completions", "/v1/completions", {"prompt": "abc", "max_tokens": 3}),
):

    @checks(ROUTE, "stream_options")
    def _(server: ServerProcess, path: str = PATH, body: dict[str, Any] = BODY) -> None:
        options = {"include_usage": True, "include_obfuscation": False}
        events = server.collect_events(path, {"model": "tiny", **body, "stream_options": options})
        assert events[-1]["usage"]["completion_tokens"] == 3
        assert "usage" not in server.collect_events(path, {"model": "tiny", **body})[-1]
        obfuscated = {"model": "tiny", **body, "stream": True, "stream_options": {"include_obfuscation": True}}
        assert server.post(path, obfuscated).json()["error"]["code"] == "unsupported_parameter"
        assert server.post(path, {"model": "tiny", **body, "stream_options": options}).status_code == 400


for ROUTE, PATH in (("chat", "/v1/chat/completions"), ("completions", "/v1/completions")):

    @checks(ROUTE, "return_progress")
    def _(server: ServerProcess, route: str = ROUTE, path: str = PATH) -> None:
        def stream(text: str, **options: Any) -> list[dict[str, Any]]:
            prompt = {"prompt": text} if route == "completions" else {"messages": [{"role": "user", "content": text}]}
            return server.collect_events(path, {"model": "tiny", "max_tokens": 1, **prompt, **options})

        assert not any("prompt_progress" in event for event in stream(f"{route} without progress " * 50))
        events = stream(f"with progress of {route} " * 50, return_progress=True)
        plan, *chunks = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert plan["total"] > 900
        assert plan["processed"] == plan["cache"]
        processed = [progress["processed"] for progress in (plan, *chunks)]
        assert processed == sorted(set(processed))
        assert len(processed) > 1
        assert all(progress["seconds_left"] >= 0 for progress in chunks)
        repeated = stream(f"with progress of {route} " * 50, return_progress=True)
        reports = [event["prompt_progress"] for event in repeated if "prompt_progress" in event]
        assert [progress["processed"] for progress in reports] == [plan["total"]]  # nothing is computed


for ROUTE, PATH in (("chat", "/v1/chat/completions"), ("completions", "/v1/completions")):

    @checks(ROUTE, "timings_per_token")
    def _(server: ServerProcess, route: str = ROUTE, path: str = PATH) -> None:
        def stream(**options: Any) -> list[dict[str, Any]]:
            prompt = {"prompt": "a"} if route == "completions" else {"messages": [{"role": "user", "content": "a"}]}
            return server.collect_events(path, {"model": "tiny", "max_tokens": 3, **prompt, **options})

        *chunks, end = stream()
        assert end["timings"]["predicted_n"] == 3
        assert not any("timings" in chunk for chunk in chunks)
        *chunks, end = stream(timings_per_token=True, stream_options={"include_usage": True})
        counts = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
        assert counts == [1, 2, 3]
        assert end["timings"]["predicted_n"] == end["usage"]["completion_tokens"] == 3

    @checks(ROUTE, "verbose")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        assert "__verbose" not in send(server, route)
        assert send(server, route, verbose=True)["__verbose"]["prompt_tokens"]


@checks("responses", "return_progress", "timings_per_token")
def _(server: ServerProcess) -> None:
    body = {"model": "tiny", "input": "with progress", "max_output_tokens": 2}
    plain = server.collect_events("/v1/responses", body)
    assert not any({"prompt_progress", "timings"} & set(event) for event in plain)
    events = server.collect_events("/v1/responses", {**body, "return_progress": True, "timings_per_token": True})
    assert {event["type"] for event in events if "prompt_progress" in event} == {"response.in_progress"}
    assert events[-1]["timings"]["predicted_n"] == 2


@checks("responses", "stream_options")
def _(server: ServerProcess) -> None:
    assert server.respond(stream_options={"include_obfuscation": True})["error"]["param"].startswith("stream_options")
    assert server.respond(stream_options={"include_obfuscation": False})["error"]["param"] == "stream_options"
    body = {"model": "tiny", "input": "a", "max_output_tokens": 2, "stream_options": {"include_obfuscation": False}}
    assert server.collect_events("/v1/responses", body)


for ROUTE in ("chat", "completions"):

    @checks(ROUTE, "stop")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        first = send(server, route, stop="f", max_tokens=20)
        assert get_output(first).endswith("e")
        assert first["choices"][0]["finish_reason"] == "stop"
        assert first["choices"][0]["stop_reason"] == "f"
        assert get_output(send(server, route, stop=["zz", "hij"], max_tokens=20)).endswith("g")
        assert send(server, route, stop=[""])["error"]["param"] == "stop"
        assert send(server, route, stop=["x"] * 17)["error"]["code"] == "limit_exceeded"

    @checks(ROUTE, "n")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        choices = send(server, route, n=3, **HOT)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert len({json.dumps(choice.get("message", choice.get("text"))) for choice in choices}) == 3
        assert send(server, route, n=17)["error"]["code"] == "limit_exceeded"

    @checks(ROUTE, "max_tokens", "n_predict")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        assert len(get_output(send(server, route, max_tokens=3))) == 3
        assert len(get_output(send(server, route, max_tokens=None, n_predict=3))) == 3
        assert send(server, route, max_tokens=3, n_predict=4)["error"]["param"] == "n_predict"
        assert send(server, route, max_tokens=0)["usage"]["completion_tokens"] == 0
        assert send(server, route, max_tokens=-1, stop="z")["usage"]["completion_tokens"] > 20  # no limit
        assert send(server, route, max_tokens=-2)["error"]["param"] == "max_tokens"
        beyond = send(server, route, max_tokens=100_000, stop="z", overflow="shift")
        assert beyond["choices"][0]["finish_reason"] == "stop"  # a maximum, not a reservation

    @checks(ROUTE, "json_schema", "grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    @checks(ROUTE, "structured_outputs")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        def generate(**format: Any) -> str:
            return str(get_output(send(server, route, max_tokens=100, temperature=1, seed=1, **format)))

        schema = {"enum": [12, 13]}
        for format in ({"json_schema": schema}, {"guided_json": schema}, {"structured_outputs": {"json": schema}}):
            assert json.loads(generate(**format)) in (12, 13)
        assert json.loads(generate(guided_json=json.dumps(schema))) in (12, 13)
        assert json.loads(generate(response_format={"type": "json_object", "schema": schema})) in (12, 13)
        record = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
        bias = {str(vocabulary.get_byte_token(ord("}"))): -50}  # the object goes on if it can
        for format in ({"json_schema": record}, {"response_format": {"type": "json_object", "schema": record}}):
            assert json.loads(generate(**format, logit_bias=bias)) == {"a": 1}
        for format in ({"guided_regex": "[0-9]{4}"}, {"structured_outputs": {"regex": "[0-9]{4}"}}):
            assert generate(**format).isdigit()
        assert generate(guided_choice=["yes", "no"]) in ("yes", "no")
        assert generate(structured_outputs={"choice": ["yes"]}) == "yes"
        assert generate(grammar='root ::= "x" "z"') == "xz"
        assert generate(guided_grammar='root ::= "x" "z"') == "xz"
        assert generate(structured_outputs={"grammar": 'start: "x" "y"'}) == "xy"
        assert generate(structured_outputs={"json_object": True}).startswith("{")
        two = send(server, route, guided_json=schema, guided_regex="a")
        assert two["error"]["param"] == "guided_regex"
        assert send(server, route, guided_json="no schema")["error"]["param"] == "guided_json"
        assert (
            send(server, route, structured_outputs={"structural_tag": {}})["error"]["code"] == "unsupported_parameter"
        )

    @checks(ROUTE, "usage")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        path, prompt = (
            ("/v1/completions", {"prompt": "a"})
            if route == "completions"
            else ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
        )
        body = {"model": "tiny", "max_tokens": 3, **prompt, "usage": {"include": True}}
        assert server.collect_events(path, body)[-1]["usage"]["completion_tokens"] == 3

    @checks(ROUTE, "keep_alive", "ttl")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        def get_expiry(**fields: Any) -> Any:
            assert "error" not in send(server, route, **fields)
            return server.http.get("/v1/models/tiny").json()["expires_at"]

        assert get_expiry(keep_alive="1h") is not None
        assert get_expiry(keep_alive=-1) is None
        assert get_expiry(ttl=3600) is not None
        assert get_expiry(ttl=-1) is None
        assert "error" in send(server, route, keep_alive="1h", num_ctx=10_000_000)
        assert get_expiry() is None, "a request that is refused changes nothing"
        assert send(server, route, keep_alive="soon")["error"]["param"] == "keep_alive"

    register_hints(
        ROUTE,
        store=(False, True),
        verbosity=("medium", "low"),
        prompt_cache_retention=("in_memory", "24h"),
        prediction=(None, {"type": "content", "content": "abc"}),
        draft_model=(None, "small"),
        provider=(None, {"order": ["a"]}),
        models=(None, ["a", "b"]),
        route=(None, "fallback"),
        transforms=([], ["middle-out"]),
        id_slot=(-1, 2),
        n_keep=(0, 5),
        n_cache_reuse=(0, 256),
        response_fields=(None, ["content"]),
        request_id=(None, "a"),
        guided_decoding_backend=(None, "xgrammar"),
        spaces_between_special_tokens=(None, True),
        tool_stream=(True, False),
    )
    register_restricted(
        ROUTE,
        mm_processor_kwargs=({}, {"a": 1}),
        use_beam_search=(False, True),
        length_penalty=(1.0, 2.0),
        early_stopping=(False, True),
        skip_special_tokens=(True, False),
        include_stop_str_in_output=(False, True),
        return_tokens=(False, True),
        return_token_ids=(False, True),
        return_tokens_as_token_ids=(False, True),
        n_probs=(0, 5),
        post_sampling_probs=(False, True),
        t_max_predict_ms=(0, 500),
        n_indent=(0, 2),
        bad_words=([], ["x"]),
        plugins=([], [{"id": "web"}]),
    )
    register_unsupported(
        ROUTE,
        prompt_logprobs=3,
        truncate_prompt_tokens=100,
        allowed_token_ids=[1],
        logits_processors=["x"],
        guided_whitespace_pattern=" ",
    )

    @checks(ROUTE, "overflow")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        if route == "completions":
            tokens = [X_TOKEN] * 3000
            assert server.complete(tokens)["error"]["code"] == "context_length_exceeded"
            assert server.complete(tokens, overflow="shift")["overflow"]["dropped_tokens"] == 3000 - (2048 - 8)
            assert server.complete(tokens, overflow="truncate_middle")["usage"]["prompt_tokens"] == 2048 - 8
        else:  # more in test_chat.py
            assert server.chat("x" * 3000, overflow="shift")["error"]["code"] == "context_length_exceeded"


# --- chat


@checks("chat", "messages")
def _(server: ServerProcess) -> None:
    def render(*messages: dict[str, Any]) -> str:
        return str(server.post("/apply-template", {"model": "tiny", "messages": list(messages)}).json()["prompt"])

    assert render({"role": "system", "content": "one"}) == render({"role": "developer", "content": "one"})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render({"role": "user", "content": parts}) == render({"role": "user", "content": "ab"})
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}  # more in test_media.py
    assert server.chat(messages=[image])["error"]["param"].startswith("messages[0].content")
    assert server.chat(messages=[{"role": "narrator", "content": "x"}])["error"]["param"] == "messages[0]"
    assert server.chat(messages=[])["error"]["param"] == "messages"


@checks("chat", "max_completion_tokens")
def _(server: ServerProcess) -> None:
    assert get_output(server.chat(max_completion_tokens=3, max_tokens=None)) == "abc"
    assert get_output(server.chat(max_completion_tokens=3, max_tokens=3)) == "abc"
    assert server.chat(max_completion_tokens=3, max_tokens=4)["error"]["param"] == "max_completion_tokens"


@checks("chat", "logprobs", "top_logprobs")
def _(server: ServerProcess) -> None:
    table = server.chat(logprobs=True, top_logprobs=3, max_tokens=4)["choices"][0]["logprobs"]["content"]
    assert [row["token"] for row in table] == list("abcd")
    assert all(row["logprob"] > -0.01 and len(row["top_logprobs"]) == 3 for row in table)
    assert table[0]["top_logprobs"][0]["token"] == "a"
    assert table[0]["bytes"] == [97]
    assert server.chat()["choices"][0]["logprobs"] is None
    assert server.chat(top_logprobs=3)["error"]["param"] == "top_logprobs"
    assert server.chat(top_logprobs=0, logprobs=False).get("error") is None
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "logprobs": True}
    chunks = server.collect_events("/v1/chat/completions", body)
    streamed = [row for chunk in chunks for row in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [row["token"] for row in streamed] == list("abcd")


@checks("completions", "response_format")
def _(server: ServerProcess) -> None:
    assert server.complete(response_format={"type": "regex", "pattern": "[0-9]{4}"})["choices"][0]["text"].isdigit()
    assert server.complete(response_format={"type": "text"})["choices"][0]["text"] == CYCLE[3:11]


@checks("chat", "response_format")
def _(server: ServerProcess) -> None:
    def generate(**format: Any) -> str:
        return get_text(server.chat(response_format=format, max_tokens=100, temperature=1, seed=1))

    assert json.loads(generate(type="json_schema", json_schema={"name": "a", "schema": {"enum": [12, 13]}})) in (12, 13)
    assert generate(type="regex", pattern="[0-9]{4}").isdigit()
    assert generate(type="choice", choices=["yes", "no"]) in ("yes", "no")
    assert generate(type="grammar", grammar='start: "x" "y"') == "xy"
    assert generate(type="grammar", grammar='root ::= "x" "z"', syntax="gbnf") == "xz"
    assert generate(type="json_object").startswith("{")
    assert server.chat(response_format={"type": "text"})["choices"][0]["message"]["content"] == CYCLE[:8]
    invalid = server.chat(response_format={"type": "regex", "pattern": "["})
    assert (invalid["status"], invalid["error"]["code"]) == (400, "invalid_grammar")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *(
            (path, field, value)
            for path in ("/v1/chat/completions", "/v1/completions")
            for field, value in (
                ("response_format", {"type": "regex", "pattern": "["}),
                ("grammar", "root ::="),
                ("guided_regex", "["),
            )
        ),
        ("/api/chat", "format", {"type": "integer", "multipleOf": 0.3, "not": {"const": 3}}),
        ("/api/generate", "images", ["AAAA"]),
    ],
)
def test_errors_name_the_field_of_the_request(server: ServerProcess, path: str, field: str, value: object) -> None:
    message = {"role": "user", "content": "hello"}
    prompt = {"messages": [message]} if "chat" in path else {"prompt": "hello"}
    response = server.post(path, {"model": "tiny", **prompt, field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert f"`{field}" in (error if isinstance(error, str) else f"`{error['param']}")
    huge = server.chat(response_format={"type": "regex", "pattern": "a" * 1_100_000})
    assert huge["error"]["code"] == "limit_exceeded"


@checks("chat", "tools", "tool_choice", "parallel_tool_calls")
def _(server: ServerProcess) -> None:
    free = {"max_tokens": 300, "temperature": 1, "seed": 1}
    other = {"type": "function", "function": {"name": "other"}}
    assert server.chat(tools=[PICK_TOOL])["choices"][0]["message"]["content"] == CYCLE[:8]
    forced = server.chat(tools=[PICK_TOOL, other], tool_choice="required", parallel_tool_calls=False, **free)
    assert len(forced["choices"][0]["message"]["tool_calls"]) == 1
    named = {"type": "function", "function": {"name": "other"}}
    chosen = server.chat(tools=[PICK_TOOL, other], tool_choice=named, parallel_tool_calls=False, **free)
    assert chosen["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "other"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    only_one = server.chat(tools=[PICK_TOOL, other], tool_choice=allowed, parallel_tool_calls=False, **free)
    assert only_one["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "other"
    assert "tool_calls" not in server.chat(tools=[PICK_TOOL], tool_choice="none")["choices"][0]["message"]
    assert server.chat(tool_choice="required")["error"]["param"] == "tool_choice"
    assert get_output(server.chat(parallel_tool_calls=True, tools=[], tool_choice="auto")) == CYCLE[:8]
    assert server.chat(tools=[{"type": "custom", "custom": {"name": "x"}}])["error"]["param"] == "tools[0]"
    assert server.chat(tools=[other] * 1025)["error"]["code"] == "limit_exceeded"
    search = {"type": "web_search", "web_search": {"enable": True}}
    assert post(server, "chat", tools=[search, other]).headers["x-afterglow-ignored"] == "tools.web_search"
    assert server.chat(tools=[search])["error"]["param"] == "tools[0].type"


@checks("chat", "reasoning_effort", "reasoning_budget")
def _(server: ServerProcess) -> None:
    def reason(**options: Any) -> str | None:
        completion = server.chat(model="reasoning", max_tokens=200, **options)
        return completion["choices"][0]["message"].get("reasoning_content")  # type: ignore[no-any-return]

    assert reason(reasoning_budget=6) == "abcdef"
    assert reason(reasoning_effort="minimal") == (CYCLE * 5)[:128].rstrip()
    assert reason(reasoning_effort="none") is None
    assert len(reason(reasoning_effort="max") or "") > 190
    assert post(server, "chat", reasoning_effort="low").headers["x-afterglow-ignored"] == "reasoning_effort"
    assert "x-afterglow-ignored" not in post(server, "chat", reasoning_effort="none").headers
    both = server.chat(model="reasoning", reasoning_effort="low", reasoning_budget=3)
    assert both["error"]["param"] == "reasoning_budget"
    assert len(reason(reasoning_budget=-1) or "") > 190


@checks("chat", "thinking_budget", "thinking_budget_tokens", "enable_thinking", "think", "thinking", "reasoning")
def _(server: ServerProcess) -> None:
    def reason(**options: Any) -> str | None:
        completion = server.chat(model="reasoning", max_tokens=200, **options)
        return completion["choices"][0]["message"].get("reasoning_content")  # type: ignore[no-any-return]

    budgets: list[dict[str, Any]] = [
        {"thinking_budget": 6},
        {"thinking_budget_tokens": 6},
        {"thinking": {"type": "enabled", "budget_tokens": 6}},
        {"reasoning": {"max_tokens": 6}},
        {"enable_thinking": True, "reasoning_budget": 6},
    ]
    for budget in budgets:
        assert reason(**budget) == "abcdef"
    off: list[dict[str, Any]] = [
        {"enable_thinking": False},
        {"think": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
    ]
    for fields in off:
        assert reason(**fields) is None
    for fields in ({"think": "minimal"}, {"reasoning": {"effort": "minimal"}}):
        assert len(reason(**fields) or "") in (127, 128)
    assert server.chat(reasoning={"exclude": True})["error"]["param"] == "reasoning.exclude"
    assert post(server, "chat", think=True).headers["x-afterglow-ignored"] == "think"
    assert server.chat(think=False, enable_thinking=True, model="reasoning")["error"]["param"] == "think"


@checks("chat", "continue_final_message", "add_generation_prompt")
def _(server: ServerProcess) -> None:
    begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "abc", "prefix": True}]
    for fields in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        assert get_output(server.chat(messages=begun, **fields)) == CYCLE[3:11]
    assert server.chat(messages=begun, continue_final_message=False)["error"]["param"] == "continue_final_message"
    assert get_output(server.chat(continue_final_message=False, add_generation_prompt=True)) == CYCLE[:8]
    assert server.chat(continue_final_message=True)["error"]["param"] == "continue_final_message"
    assert server.chat(add_generation_prompt=False)["error"]["param"] == "add_generation_prompt"


@checks("chat", "replay")
def _(server: ServerProcess) -> None:
    question = {"role": "user", "content": "the field replay"}
    answer = server.chat("the field replay", max_tokens=5)["choices"][0]["message"]["content"]
    messages = [question, {"role": "assistant", "content": answer}, question]
    for replay, tokens in ((True, 5), (False, None)):
        usage = server.chat(messages=messages, replay=replay)["usage"]
        assert usage["prompt_tokens_details"].get("replayed_tokens") == tokens


@checks("responses", "replay")
def _(server: ServerProcess) -> None:
    question = {"role": "user", "content": "the field replay of responses"}
    output = server.respond([question], max_output_tokens=5)["output"]
    for replay, tokens in ((True, 5), (False, None)):
        usage = server.respond([question, *output, question], replay=replay)["usage"]
        assert usage["input_tokens_details"].get("replayed_tokens") == tokens


@checks("chat", "chat_template_kwargs")
def _(server: ServerProcess) -> None:
    body = {"model": "reasoning", "messages": [{"role": "user", "content": "hello"}]}
    assert "<think>" in server.post("/apply-template", body).json()["prompt"]
    without = {**body, "chat_template_kwargs": {"enable_thinking": False}}
    assert "<think>" not in server.post("/apply-template", without).json()["prompt"]


@checks("chat", "metadata")
def _(server: ServerProcess) -> None:
    assert server.chat(metadata={"topic": "letters"})["metadata"] == {"topic": "letters"}
    assert server.chat(metadata={"topic": 3})["error"]["param"] == "metadata.topic"


register_labels("chat", "user", "safety_identifier", "prompt_cache_key")
register_restricted(
    "chat",
    best_of=(1, 2),
    modalities=(["text"], ["text", "audio"]),
    prompt_cache_options=({"mode": "implicit"}, {"mode": "explicit"}),
    parse_tool_calls=(True, False),
    reasoning_format=("auto", "none"),
    include_reasoning=(True, False),
    echo=(False, True),
    documents=([], [{"text": "a"}]),
)
register_unsupported(
    "chat",
    chat_template="{{ messages }}",
    audio={"voice": "alloy", "format": "wav"},
    function_call="auto",
    functions=[{"name": "f"}],
    moderation={"model": "m"},
    web_search_options={},
)


# --- completions


@checks("completions", "prompt")
def _(server: ServerProcess) -> None:
    assert get_output(server.complete("abc")) == CYCLE[3:11]
    tokens = server.post("/tokenize", {"model": "tiny", "content": "klm"}).json()["tokens"]
    assert get_output(server.complete(tokens)) == CYCLE[13:21]
    several = server.complete(["abc", "xyz"], n=2)
    assert [choice["text"][0] for choice in several["choices"]] == ["d", "d", " ", " "]
    assert [choice["text"][0] for choice in server.complete([tokens, tokens])["choices"]] == ["n", "n"]
    for empty in ("", [], [""], [[]]):
        assert server.complete(empty)["error"]["param"] == "prompt"
    assert server.complete([10**6])["error"]["param"] == "prompt"
    assert server.complete(["a"] * 129)["error"]["code"] == "limit_exceeded"


@checks("completions", "suffix")
def _(server: ServerProcess) -> None:
    completion = server.complete("ab", suffix="yz", model="reasoning")
    assert completion["usage"]["prompt_tokens"] == 2 + 2 + 3  # with three infill tokens
    assert get_output(completion) == CYCLE[:8]  # the output after an infill token
    assert server.complete("ab", suffix="yz")["error"]["param"] == "suffix"
    assert server.complete([X_TOKEN], suffix="yz", model="reasoning")["error"]["param"] == "suffix"


@checks("completions", "echo", "logprobs")
def _(server: ServerProcess) -> None:
    choice = server.complete("abx", echo=True, logprobs=2, max_tokens=1)["choices"][0]
    assert choice["text"] == "abxy"
    table = choice["logprobs"]
    assert table["tokens"] == ["a", "b", "x", "y"]
    assert table["text_offset"] == [0, 1, 2, 3]
    assert table["token_logprobs"][0] is None
    assert table["token_logprobs"][1] > -0.01
    assert table["token_logprobs"][2] < -20  # "x" after "b" is very unlikely
    assert max(table["top_logprobs"][2], key=table["top_logprobs"][2].get) == "c"
    scored = server.complete("abx", echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert (scored["text"], len(scored["logprobs"]["tokens"])) == ("abx", 3)
    assert server.complete("abc", echo=True)["choices"][0]["logprobs"] is None
    plain = server.complete("abc", logprobs=1, max_tokens=2)["choices"][0]["logprobs"]
    assert (plain["tokens"], plain["text_offset"]) == (["d", "e"], [0, 1])
    long = server.complete((CYCLE * 10)[:200], echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]
    assert all(value > -0.01 for value in long["token_logprobs"][1:])  # scored in several passes


@checks("completions", "best_of")
def _(server: ServerProcess) -> None:
    warm = {"temperature": 6.0, "seed": 11, "logprobs": 0, "max_tokens": 4}
    choices = server.complete("abc", n=6, **warm)["choices"]
    best = server.complete("abc", n=1, best_of=6, **warm)["choices"]
    assert len(best) == 1
    assert best[0]["text"] == max(choices, key=lambda choice: sum(choice["logprobs"]["token_logprobs"]))["text"]
    assert server.complete("abc", n=3, best_of=2)["error"]["param"] == "best_of"
    assert server.complete("abc", best_of=2, stream=True)["error"]["param"] == "best_of"


register_labels("completions", "user")


# --- embeddings


@checks("embeddings", "input")
def _(server: ServerProcess) -> None:
    several = server.post("/v1/embeddings", {"model": "vectors", "input": ["the cat sat", "the dog sat", "a river"]})
    first, second, third = (np.array(item["embedding"]) for item in several.json()["data"])
    assert first @ second > first @ third
    assert abs(np.linalg.norm(first) - 1) < 1e-5
    tokens = server.post("/tokenize", {"model": "tiny", "content": "hello", "add_special": True}).json()["tokens"]
    assert get_output(send(server, "embeddings", input=tokens)) == get_output(send(server, "embeddings", input="hello"))
    for empty in ("", [], [""]):
        assert send(server, "embeddings", input=empty)["error"]["param"] == "input"
    assert send(server, "embeddings", input="x" * 3000)["error"]["code"] == "context_length_exceeded"
    assert send(server, "embeddings", input=["x"] * 2049)["error"]["code"] == "limit_exceeded"


@checks("embeddings", "encoding_format")
def _(server: ServerProcess) -> None:
    numbers = get_output(send(server, "embeddings", encoding_format="float"))[0]["embedding"]
    packed = get_output(send(server, "embeddings", encoding_format="base64"))[0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(packed), dtype="<f4"), numbers)


@checks("embeddings", "dimensions")
def _(server: ServerProcess) -> None:
    assert len(get_output(send(server, "embeddings", dimensions=64))[0]["embedding"]) == 64
    assert send(server, "embeddings", dimensions=32)["error"]["param"] == "dimensions"


@checks("embeddings", "long_text")
def _(server: ServerProcess) -> None:
    long = "x" * 3000
    for policy in (None, "refuse"):
        assert send(server, "embeddings", input=long, long_text=policy)["error"]["code"] == "context_length_exceeded"
    (item,) = get_output(send(server, "embeddings", input=long, long_text="window"))
    assert (item["windows"], len(item["embedding"])) == (2, 64)
    assert send(server, "embeddings", long_text="cut")["error"]["param"] == "long_text"


register_labels("embeddings", "user")


# --- responses


@checks("responses", "input")
def _(server: ServerProcess) -> None:
    plain = server.respond("hello")["usage"]["input_tokens"]
    parts = [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]
    assert server.respond([{"role": "user", "content": parts}])["usage"]["input_tokens"] == plain
    conversation = [
        {"role": "user", "content": "pick one"},
        {"type": "function_call", "call_id": "c1", "name": "pick", "arguments": '{"letter": "a"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "picked"},
    ]
    assert server.respond(conversation, tools=[{"type": "function", **PICK_TOOL["function"]}])["http_status"] == 200
    assert server.respond([])["error"]["param"] == "input"
    assert server.respond([{"type": "computer_call"}])["error"]["param"] == "input[0]"


@checks("responses", "instructions")
def _(server: ServerProcess) -> None:
    with_instructions = server.respond("hello", instructions="be brief")["usage"]["input_tokens"]
    assert with_instructions > server.respond("hello")["usage"]["input_tokens"]


@checks("responses", "previous_response_id", "store")
def _(server: ServerProcess) -> None:
    first = server.respond("a new question about letters and nothing else")
    assert server.http.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]
    second = server.respond("and then?", previous_response_id=first["id"])
    used = first["usage"]["total_tokens"]
    assert second["usage"]["input_tokens"] > used
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= used - 2  # prefix hit
    unknown = server.respond("x", previous_response_id="resp_unknown")
    assert unknown["error"]["code"] == "previous_response_not_found"
    unstored = server.respond("x", store=False)
    assert server.http.get(f"/v1/responses/{unstored['id']}").status_code == 404
    assert server.http.delete(f"/v1/responses/{first['id']}").json()["deleted"]
    assert server.http.get(f"/v1/responses/{first['id']}").status_code == 404


@checks("responses", "max_output_tokens")
def _(server: ServerProcess) -> None:
    response = server.respond(max_output_tokens=3)
    assert get_output(response) == "abc"
    assert (response["status"], response["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")


@checks("responses", "tools", "tool_choice", "parallel_tool_calls")
def _(server: ServerProcess) -> None:
    tools = [{"type": "function", **PICK_TOOL["function"]}, {"type": "function", "name": "other"}]
    free = {"max_output_tokens": 300, "temperature": 1, "seed": 1, "parallel_tool_calls": False, "tools": tools}
    calls = server.respond(tool_choice="required", **free)["output"]
    assert [item["type"] for item in calls] == ["function_call"]
    (named,) = server.respond(tool_choice={"type": "function", "name": "other"}, **free)["output"]
    assert named["name"] == "other"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    (only_one,) = server.respond(tool_choice=allowed, **free)["output"]
    assert only_one["name"] == "other"
    assert server.respond(tool_choice="required")["error"]["param"] == "tool_choice"
    assert server.respond(tools=[{"type": "web_search"}])["error"]["param"] == "tools[0]"
    assert server.respond(tools=[{"type": "unknown"}])["error"]["param"] == "tools[0]"


@checks("responses", "text")
def _(server: ServerProcess) -> None:
    format = {"type": "json_schema", "name": "n", "schema": {"enum": [12, 13]}}
    response = server.respond(text={"format": format}, temperature=1, seed=1, max_output_tokens=50)
    assert json.loads(get_output(response)) in (12, 13)
    assert response["text"]["format"]["name"] == "n"
    response = server.post("/v1/responses", {"model": "tiny", "input": "x", "text": {"verbosity": "high"}})
    assert response.headers["x-afterglow-ignored"] == "text.verbosity"  # the template does not read it


@checks("responses", "reasoning")
def _(server: ServerProcess) -> None:
    without = server.respond(model="reasoning", reasoning={"effort": "none"})
    with_reasoning = server.respond(model="reasoning", reasoning={"effort": "high"})
    assert [item["type"] for item in without["output"]] == ["message"]
    assert [item["type"] for item in with_reasoning["output"]] == ["reasoning"]
    assert with_reasoning["usage"]["output_tokens_details"]["reasoning_tokens"] == 8
    (item,) = server.respond(model="reasoning", reasoning={"effort": "high", "summary": "auto"})["output"]
    assert [part["text"] for part in item["summary"]] == [part["text"] for part in item["content"]] == [CYCLE[:8]]


@checks("responses", "top_logprobs", "include")
def _(server: ServerProcess) -> None:
    table = server.respond(top_logprobs=2)["output"][0]["content"][0]["logprobs"]
    assert [row["token"] for row in table] == list(CYCLE[:8])
    assert len(table[0]["top_logprobs"]) == 2
    plain = server.respond(include=["message.output_text.logprobs"])["output"][0]["content"][0]["logprobs"]
    assert len(plain) == 8
    assert server.respond()["output"][0]["content"][0]["logprobs"] == []
    (item,) = server.respond(model="reasoning", include=["reasoning.encrypted_content"])["output"]
    assert CYCLE[:8] not in item["encrypted_content"]
    assert server.respond(include=["something"])["error"]["param"] == "include[0]"


@checks("responses", "truncation", "overflow")
def _(server: ServerProcess) -> None:
    items = [{"role": "user", "content": f"{number} " + "x" * 150} for number in range(20)]
    assert server.respond(items)["error"]["code"] == "context_length_exceeded"
    assert server.respond(items, truncation="disabled")["error"]["param"] == "input"
    assert server.respond(items, truncation="auto")["overflow"]["policy"] == "shift"
    assert server.respond(items, overflow="truncate_middle")["overflow"]["dropped_messages"] > 5


@checks("responses", "metadata")
def _(server: ServerProcess) -> None:
    assert server.respond(metadata={"topic": "letters"})["metadata"] == {"topic": "letters"}


register_labels("responses", "user", "safety_identifier", "prompt_cache_key")
register_restricted("responses", prompt_cache_options=({"mode": "implicit"}, {"ttl": "30m"}), background=(False, True))
register_unsupported(
    "responses",
    access_programs={},
    context_management=[{"type": "compaction"}],
    conversation="conv_1",
    image={},
    moderation={"model": "m"},
    prompt={"id": "p"},
)


@checks("responses", "prompt_cache_retention")
def _(server: ServerProcess) -> None:
    tools = ResponseToolSet(())
    for retention, expected in (
        (None, []),
        ("in_memory", []),
        ("24h", [Breakpoint(message=1, retention_seconds=86400)]),
    ):
        body = ResponseRequest(input="hello", instructions="be brief", prompt_cache_retention=retention)  # type: ignore[arg-type]
        request = build_generation_request(body, [Message(role="user", content="hello")], tools, {}, "")
        assert request.breakpoints == expected
        response = server.post(
            "/v1/responses",
            {"model": "tiny", "input": "hello", "max_output_tokens": 1} | {"prompt_cache_retention": retention},
        )
        assert response.status_code == 200
        assert "x-afterglow-ignored" not in response.headers


@checks("responses", "client_metadata", "max_tool_calls")
def _(server: ServerProcess) -> None:
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 3, "temperature": 0}
    hints = {"client_metadata": {"a": 1}, "max_tool_calls": 3}
    response = server.post("/v1/responses", {**body, **hints})
    assert set(response.headers["x-afterglow-ignored"].split(", ")) == set(hints)
    plain = server.post("/v1/responses", body)
    assert "x-afterglow-ignored" not in plain.headers
    assert get_output(response.json()) == get_output(plain.json())


def test_an_unknown_field_gets_400_with_its_name(server: ServerProcess) -> None:
    for route in CHECKS:
        error = send(server, route, modle="tiny")["error"]
        assert (error["param"], error["code"]) == ("modle", "unknown_parameter")
        assert "did you mean `model`?" in error["message"]
    nested = server.chat(messages=[{"role": "user", "content": "a", "nmae": "b"}])["error"]
    assert nested["param"] == "messages[0].nmae"
    assert "did you mean `name`?" in nested["message"]


def test_the_tiny_models_generate_the_expected_cycle() -> None:
    assert models.CYCLE.decode() == CYCLE


FIELDS_BY_CHECK = {
    (route, check): [field for field in CHECKS[route] if CHECKS[route][field] is check]
    for route in CHECKS
    for check in CHECKS[route].values()
}


@pytest.mark.parametrize(
    ("route", "check"),
    [pytest.param(*key, id=f"{key[0]}-{'+'.join(fields)}") for key, fields in FIELDS_BY_CHECK.items()],
)
def test_a_field_has_its_effect_or_is_rejected(route: str, check: FieldCheck, server: ServerProcess) -> None:
    check(server)
