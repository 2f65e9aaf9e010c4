"""Every field of every request has a row: the function that sees its effect, or its refusal.

The documented fields are those of the `openai` package's own request types, and all of our wire types.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pydantic
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from afterglow.server.schema.admin import EmbeddingRequest
from afterglow.server.schema.chat import ChatRequest
from afterglow.server.schema.completions import CompletionRequest
from afterglow.server.schema.responses import ResponseRequest
from afterglow.server.settings import ServerSettings
from afterglow.testing import models
from afterglow.testing.models import vocabulary
from support.server_process import CYCLE, PICK, ServerProcess, text_of

See: TypeAlias = Callable[[ServerProcess], None]
ROWS: dict[str, dict[str, See]] = {"chat": {}, "completions": {}, "responses": {}, "embeddings": {}}
DOCUMENTED: dict[str, tuple[type[pydantic.BaseModel], Any]] = {
    "chat": (ChatRequest, chat_create_params.CompletionCreateParamsBase),
    "completions": (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
    "responses": (ResponseRequest, response_create_params.ResponseCreateParamsBase),
    "embeddings": (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
}
HOT = {"temperature": 100.0, "seed": 7}  # at this temperature every token is about as likely as any other
X = vocabulary.get_byte_token(ord("x"))
CLOSE = {"logit_bias": {str(vocabulary.get_byte_token(ord("~"))): 22.5}}  # nearly as likely as the next of the cycle


def sees(route: str, *fields: str) -> Callable[[See], See]:
    """The row of some fields."""

    def add(see: See) -> See:
        for field in fields:
            assert field not in ROWS[route], f"{field} has two rows"
            ROWS[route][field] = see
        return see

    return add


@pytest.mark.parametrize("route", ROWS)
def test_every_field_has_a_row(route: str) -> None:
    ours, theirs = DOCUMENTED[route]
    documented = set(ours.model_fields) | set(theirs.__annotations__)
    assert documented - set(ROWS[route]) == set(), "fields without a row"
    assert set(ROWS[route]) - documented == set(), "rows without a field"
    assert set(theirs.__annotations__) <= set(ours.model_fields), "fields that our type does not know"


def refused(route: str, **values: Any) -> None:
    """Rows of fields that are refused, with the value that is tried."""
    for field, value in values.items():

        def see(server: ServerProcess, field: str = field, value: Any = value) -> None:
            answer = ask(server, route, **{field: value})
            error = answer["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", field)
            assert error["code"] == "unsupported_parameter"
            assert ask(server, route, **{field: None}).get("error") is None  # null says nothing

        sees(route, field)(see)


def only(route: str, **values: tuple[Any, Any]) -> None:
    """Rows of fields of which one value is what happens anyway, and another is refused."""
    for field, (good, bad) in values.items():

        def see(server: ServerProcess, field: str = field, good: Any = good, bad: Any = bad) -> None:
            assert ask(server, route, **{field: good}).get("error") is None
            error = ask(server, route, **{field: bad})["error"]
            assert error["param"].startswith(field)
            assert error["code"] == "unsupported_parameter"

        sees(route, field)(see)


def labels(route: str, *fields: str) -> None:
    """Rows of labels: whatever they say, the answer is the same."""

    @sees(route, *fields)
    def see(server: ServerProcess) -> None:
        plain = said(ask(server, route))
        for field in fields:
            assert said(ask(server, route, **{field: "somebody"})) == plain


def ask(server: ServerProcess, route: str, **fields: Any) -> dict[str, Any]:
    match route:
        case "chat":
            return server.chat(**fields)
        case "completions":
            return server.complete(**fields)
        case "responses":
            return server.respond(**fields)
    return server.post("/v1/embeddings", {"model": "tiny", "input": "hello", **fields}).json()  # type: ignore[no-any-return]


def said(answer: dict[str, Any]) -> Any:
    if "data" in answer:
        return answer["data"]
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    return text_of(answer)


# --- how tokens are chosen: the same on all three routes


def on_all(*fields: str) -> Callable[[Callable[[Callable[..., str]], None]], None]:
    """Rows on all routes that answer with text; the function gets one that asks for a text."""

    def add(look: Callable[[Callable[..., str]], None]) -> None:
        for route, limit in (("chat", "max_tokens"), ("completions", "max_tokens"), ("responses", "max_output_tokens")):

            def see(server: ServerProcess, route: str = route, limit: str = limit) -> None:
                def text(tokens: int = 8, **options: Any) -> str:
                    prompt = {"prompt": "!"} if route == "completions" else {}  # so that all begin with an "a"
                    return str(said(ask(server, route, **{**prompt, limit: tokens, **options})))

                look(text)

            sees(route, *fields)(see)

    return add


@on_all("temperature")
def _(text: Callable[..., str]) -> None:
    assert text(temperature=0) == CYCLE[:8]
    assert text(temperature=100.0, seed=1) != CYCLE[:8]
    assert text(temperature=None, seed=1) == CYCLE[:8]  # 1, where the model is as good as sure


@on_all("seed")
def _(text: Callable[..., str]) -> None:
    assert text(temperature=100.0, seed=1) == text(temperature=100.0, seed=1) != text(temperature=100.0, seed=2)


@on_all("top_p")
def _(text: Callable[..., str]) -> None:
    assert text(top_p=0.5, **HOT) == CYCLE[:8] != text(**HOT)


@on_all("top_k")
def _(text: Callable[..., str]) -> None:
    assert text(top_k=1, **HOT) == CYCLE[:8]


@on_all("min_p")
def _(text: Callable[..., str]) -> None:
    assert text(min_p=0.9, **HOT) == CYCLE[:8]


@on_all("typical_p")
def _(text: Callable[..., str]) -> None:
    assert text(typical_p=0.5, **HOT) == CYCLE[:8]


@on_all("top_n_sigma")
def _(text: Callable[..., str]) -> None:
    assert text(top_n_sigma=1.0, **HOT) == CYCLE[:8]


@on_all("logit_bias")
def _(text: Callable[..., str]) -> None:
    assert text(logit_bias={str(X): 100}) == "x" * 8
    without_a = text(logit_bias={str(vocabulary.get_byte_token(ord("a"))): -100})
    assert "a" not in without_a


@on_all("presence_penalty")
def _(text: Callable[..., str]) -> None:
    assert "~" not in text(56, **CLOSE)
    twice = text(56, presence_penalty=2.0, **CLOSE)
    assert "~" not in twice[:28]
    assert "~" in twice[28:]  # where the cycle begins again, another letter is likelier


@on_all("frequency_penalty")
def _(text: Callable[..., str]) -> None:
    assert "~" in text(56, frequency_penalty=2.0, **CLOSE)[28:]


@on_all("repeat_penalty", "repeat_last_n")
def _(text: Callable[..., str]) -> None:
    assert text(29, repeat_penalty=1000.0)[-1] != "a"
    assert text(29, repeat_penalty=1000.0, repeat_last_n=5)[-1] == "a"  # the first "a" is further back


@on_all("xtc_probability", "xtc_threshold")
def _(text: Callable[..., str]) -> None:
    close = {"logit_bias": {str(X): 23.0}, "temperature": 1.0, "seed": 3}
    assert text(xtc_probability=1.0, **close) == "x" * 8  # the likelier of two likely tokens is out
    assert text(xtc_probability=1.0, xtc_threshold=0.5, **close) != "x" * 8  # and only one is likely enough


@on_all("dry_multiplier", "dry_base", "dry_allowed_length")
def _(text: Callable[..., str]) -> None:
    strict = text(40, dry_multiplier=100.0)
    assert strict[:28] == CYCLE
    assert strict[28:] != CYCLE[:12]  # the repetition is noticed
    later = text(40, dry_multiplier=100.0, dry_allowed_length=6)
    assert later[:32] == CYCLE + CYCLE[:4]
    assert later != strict
    slow, fast = text(44, dry_multiplier=0.01, dry_base=1.01), text(44, dry_multiplier=0.01, dry_base=1000.0)
    assert slow == CYCLE + CYCLE[:16]
    assert fast != slow


@on_all("dynatemp_range", "dynatemp_exponent")
def _(text: Callable[..., str]) -> None:
    warm = {"temperature": 20.0, "seed": 5}
    assert text(**warm) != CYCLE[:8]
    assert text(dynatemp_range=20.0, **warm) == CYCLE[:8]  # where the model is sure, the temperature is 0
    torn = {"logit_bias": {str(X): 23.9}, "dynatemp_range": 20.0, **warm}
    assert text(dynatemp_exponent=0.0, **torn) != text(dynatemp_exponent=50.0, **torn)


@on_all("mirostat", "mirostat_tau", "mirostat_eta")
def _(text: Callable[..., str]) -> None:
    sure = text(mirostat=2, mirostat_tau=0.0, **HOT)
    assert sure[1:] in CYCLE * 2  # after the first token it takes the least surprising
    assert text(mirostat=2, mirostat_tau=6.0, **HOT) != sure
    slow, fast = (text(24, mirostat=2, mirostat_tau=3.0, mirostat_eta=eta, **HOT) for eta in (0.01, 5.0))
    assert slow != fast


@on_all("deadline")
def _(text: Callable[..., str]) -> None:
    assert len(text(1900, deadline=0.02)) < 1900


# --- what all routes have


for ROUTE in ROWS:

    @sees(ROUTE, "model")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        assert ask(server, route, model="nobody")["error"]["code"] == "model_not_found"
        assert ask(server, route, model="tiny").get("error") is None


@sees("chat", "stream")
def _(server: ServerProcess) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    assert len(server.events("/v1/chat/completions", body)) == 5  # the role, three letters, the end


@sees("completions", "stream")
def _(server: ServerProcess) -> None:
    assert len(server.events("/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 3})) == 4


@sees("responses", "stream")
def _(server: ServerProcess) -> None:
    events = server.events("/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 3})
    assert [event["type"] for event in events].count("response.output_text.delta") == 3


for ROUTE, PATH, BODY in (
    ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
    ("completions", "/v1/completions", {"prompt": "abc", "max_tokens": 3}),
):

    @sees(ROUTE, "stream_options")
    def _(server: ServerProcess, path: str = PATH, body: dict[str, Any] = BODY) -> None:
        options = {"include_usage": True, "include_obfuscation": False}
        events = server.events(path, {"model": "tiny", **body, "stream_options": options})
        assert events[-1]["usage"]["completion_tokens"] == 3
        assert "usage" not in server.events(path, {"model": "tiny", **body})[-1]
        hidden = {"model": "tiny", **body, "stream": True, "stream_options": {"include_obfuscation": True}}
        assert server.post(path, hidden).json()["error"]["code"] == "unsupported_parameter"
        assert server.post(path, {"model": "tiny", **body, "stream_options": options}).status_code == 400


@sees("responses", "stream_options")
def _(server: ServerProcess) -> None:
    assert server.respond(stream_options={"include_obfuscation": True})["error"]["param"].startswith("stream_options")
    assert server.respond(stream_options={"include_obfuscation": False})["error"]["param"] == "stream_options"
    body = {"model": "tiny", "input": "a", "max_output_tokens": 2, "stream_options": {"include_obfuscation": False}}
    assert server.events("/v1/responses", body)


for ROUTE in ("chat", "completions"):

    @sees(ROUTE, "stop")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        first = ask(server, route, stop="f", max_tokens=20)
        assert said(first).endswith("e")
        assert first["choices"][0]["finish_reason"] == "stop"
        assert first["choices"][0]["stop_reason"] == "f"
        assert said(ask(server, route, stop=["zz", "hij"], max_tokens=20)).endswith("g")
        assert ask(server, route, stop=[""])["error"]["param"] == "stop"
        assert ask(server, route, stop=["x"] * 17)["error"]["code"] == "limit_exceeded"

    @sees(ROUTE, "n")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        choices = ask(server, route, n=3, **HOT)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert len({json.dumps(choice.get("message", choice.get("text"))) for choice in choices}) == 3
        assert ask(server, route, n=17)["error"]["code"] == "limit_exceeded"

    @sees(ROUTE, "max_tokens")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        assert len(said(ask(server, route, max_tokens=3))) == 3

    @sees(ROUTE, "overflow")
    def _(server: ServerProcess, route: str = ROUTE) -> None:
        if route == "completions":
            tokens = [X] * 3000
            assert server.complete(tokens)["error"]["code"] == "context_length_exceeded"
            assert server.complete(tokens, overflow="shift")["overflow"]["dropped_tokens"] == 3000 - (2048 - 8)
            assert server.complete(tokens, overflow="truncate_middle")["usage"]["prompt_tokens"] == 2048 - 8
        else:  # test_chat.py has the rest
            assert server.chat("x" * 3000, overflow="shift")["error"]["code"] == "context_length_exceeded"


# --- chat


@sees("chat", "messages")
def _(server: ServerProcess) -> None:
    def shown(*messages: dict[str, Any]) -> str:
        return str(server.post("/apply-template", {"model": "tiny", "messages": list(messages)}).json()["prompt"])

    assert shown({"role": "system", "content": "one"}) == shown({"role": "developer", "content": "one"})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert shown({"role": "user", "content": parts}) == shown({"role": "user", "content": "ab"})
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}  # test_media.py has more
    assert server.chat(messages=[picture])["error"]["param"].startswith("messages[0].content")
    assert server.chat(messages=[{"role": "narrator", "content": "x"}])["error"]["param"] == "messages[0]"
    assert server.chat(messages=[])["error"]["param"] == "messages"


@sees("chat", "max_completion_tokens")
def _(server: ServerProcess) -> None:
    assert said(server.chat(max_completion_tokens=3, max_tokens=None)) == "abc"
    assert server.chat(max_completion_tokens=3, max_tokens=3)["error"]["param"] == "max_tokens"


@sees("chat", "logprobs", "top_logprobs")
def _(server: ServerProcess) -> None:
    table = server.chat(logprobs=True, top_logprobs=3, max_tokens=4)["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in table] == list("abcd")
    assert all(one["logprob"] > -0.01 and len(one["top_logprobs"]) == 3 for one in table)
    assert table[0]["top_logprobs"][0]["token"] == "a"
    assert table[0]["bytes"] == [97]
    assert server.chat()["choices"][0]["logprobs"] is None
    assert server.chat(top_logprobs=3)["error"]["param"] == "top_logprobs"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "logprobs": True}
    chunks = server.events("/v1/chat/completions", body)
    streamed = [one for chunk in chunks for one in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [one["token"] for one in streamed] == list("abcd")


@sees("chat", "response_format")
def _(server: ServerProcess) -> None:
    def answer(**format: Any) -> str:
        return text_of(server.chat(response_format=format, max_tokens=100, temperature=1, seed=1))

    assert json.loads(answer(type="json_schema", json_schema={"name": "a", "schema": {"enum": [12, 13]}})) in (12, 13)
    assert answer(type="regex", pattern="[0-9]{4}").isdigit()
    assert answer(type="choice", choices=["yes", "no"]) in ("yes", "no")
    assert answer(type="grammar", grammar='start: "x" "y"') == "xy"
    assert answer(type="grammar", grammar='root ::= "x" "z"', syntax="gbnf") == "xz"
    assert answer(type="json_object").startswith("{")
    assert server.chat(response_format={"type": "text"})["choices"][0]["message"]["content"] == CYCLE[:8]
    wrong = server.chat(response_format={"type": "regex", "pattern": "["})
    assert (wrong["status"], wrong["error"]["code"]) == (400, "invalid_grammar")
    huge = server.chat(response_format={"type": "regex", "pattern": "a" * 70_000})
    assert huge["error"]["code"] == "limit_exceeded"


@sees("chat", "tools", "tool_choice", "parallel_tool_calls")
def _(server: ServerProcess) -> None:
    free = {"max_tokens": 300, "temperature": 1, "seed": 1}
    other = {"type": "function", "function": {"name": "other"}}
    assert server.chat(tools=[PICK])["choices"][0]["message"]["content"] == CYCLE[:8]
    forced = server.chat(tools=[PICK, other], tool_choice="required", parallel_tool_calls=False, **free)
    assert len(forced["choices"][0]["message"]["tool_calls"]) == 1
    named = {"type": "function", "function": {"name": "other"}}
    chosen = server.chat(tools=[PICK, other], tool_choice=named, parallel_tool_calls=False, **free)
    assert chosen["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "other"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    only_one = server.chat(tools=[PICK, other], tool_choice=allowed, parallel_tool_calls=False, **free)
    assert only_one["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "other"
    assert "tool_calls" not in server.chat(tools=[PICK], tool_choice="none")["choices"][0]["message"]
    assert server.chat(tool_choice="required")["error"]["param"] == "tool_choice"
    assert server.chat(parallel_tool_calls=True)["error"]["param"] == "parallel_tool_calls"
    assert server.chat(tools=[{"type": "custom", "custom": {"name": "x"}}])["error"]["param"] == "tools[0].type"
    assert server.chat(tools=[other] * 129)["error"]["code"] == "limit_exceeded"


@sees("chat", "reasoning_effort", "reasoning_budget")
def _(server: ServerProcess) -> None:
    def thought(**options: Any) -> str | None:
        answer = server.chat(model="thinker", max_tokens=200, **options)
        return answer["choices"][0]["message"].get("reasoning_content")  # type: ignore[no-any-return]

    assert thought(reasoning_budget=6) == "abcdef"
    assert thought(reasoning_effort="minimal") == (CYCLE * 5)[:128].rstrip()
    assert thought(reasoning_effort="none") is None
    assert len(thought(reasoning_effort="max") or "") > 190
    assert server.chat(reasoning_effort="low")["error"]["param"] == "reasoning_effort"
    assert server.chat(reasoning_effort="none").get("error") is None
    both = server.chat(model="thinker", reasoning_effort="low", reasoning_budget=3)
    assert both["error"]["param"] == "reasoning_budget"


@sees("chat", "chat_template_kwargs")
def _(server: ServerProcess) -> None:
    body = {"model": "thinker", "messages": [{"role": "user", "content": "hello"}]}
    assert "<think>" in server.post("/apply-template", body).json()["prompt"]
    quiet = {**body, "chat_template_kwargs": {"enable_thinking": False}}
    assert "<think>" not in server.post("/apply-template", quiet).json()["prompt"]


@sees("chat", "metadata")
def _(server: ServerProcess) -> None:
    assert server.chat(metadata={"topic": "letters"})["metadata"] == {"topic": "letters"}
    assert server.chat(metadata={"topic": 3})["error"]["param"] == "metadata.topic"


labels("chat", "user", "safety_identifier", "prompt_cache_key")
only(
    "chat",
    service_tier=("auto", "flex"),
    store=(False, True),
    modalities=(["text"], ["text", "audio"]),
    verbosity=("medium", "low"),
    prompt_cache_options=({"mode": "implicit"}, {"mode": "explicit"}),
    prompt_cache_retention=("in_memory", "24h"),
)
refused(
    "chat",
    audio={"voice": "alloy", "format": "wav"},
    function_call="auto",
    functions=[{"name": "f"}],
    moderation={"model": "m"},
    prediction={"type": "content", "content": "abc"},
    web_search_options={},
)


# --- completions


@sees("completions", "prompt")
def _(server: ServerProcess) -> None:
    assert said(server.complete("abc")) == CYCLE[3:11]
    tokens = server.post("/tokenize", {"model": "tiny", "content": "klm"}).json()["tokens"]
    assert said(server.complete(tokens)) == CYCLE[13:21]
    several = server.complete(["abc", "xyz"], n=2)
    assert [choice["text"][0] for choice in several["choices"]] == ["d", "d", " ", " "]
    assert [choice["text"][0] for choice in server.complete([tokens, tokens])["choices"]] == ["n", "n"]
    for empty in ("", [], [""], [[]]):
        assert server.complete(empty)["error"]["param"] == "prompt"
    assert server.complete([10**6])["error"]["param"] == "prompt"
    assert server.complete(["a"] * 129)["error"]["code"] == "limit_exceeded"


@sees("completions", "suffix")
def _(server: ServerProcess) -> None:
    answer = server.complete("ab", suffix="yz", model="thinker")
    assert answer["usage"]["prompt_tokens"] == 2 + 2 + 3  # and three marks
    assert said(answer) == CYCLE[:8]  # what the model says after a mark
    assert server.complete("ab", suffix="yz")["error"]["param"] == "suffix"
    assert server.complete([X], suffix="yz", model="thinker")["error"]["param"] == "suffix"


@sees("completions", "echo", "logprobs")
def _(server: ServerProcess) -> None:
    answer = server.complete("abx", echo=True, logprobs=2, max_tokens=1)["choices"][0]
    assert answer["text"] == "abxy"
    table = answer["logprobs"]
    assert table["tokens"] == ["a", "b", "x", "y"]
    assert table["text_offset"] == [0, 1, 2, 3]
    assert table["token_logprobs"][0] is None
    assert table["token_logprobs"][1] > -0.01
    assert table["token_logprobs"][2] < -20  # nothing is less likely here than an "x" after a "b"
    assert max(table["top_logprobs"][2], key=table["top_logprobs"][2].get) == "c"
    scored = server.complete("abx", echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert (scored["text"], len(scored["logprobs"]["tokens"])) == ("abx", 3)
    assert server.complete("abc", echo=True)["choices"][0]["logprobs"] is None
    plain = server.complete("abc", logprobs=1, max_tokens=2)["choices"][0]["logprobs"]
    assert (plain["tokens"], plain["text_offset"]) == (["d", "e"], [0, 1])
    long = server.complete((CYCLE * 10)[:200], echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]
    assert all(value > -0.01 for value in long["token_logprobs"][1:])  # over several passes


@sees("completions", "best_of")
def _(server: ServerProcess) -> None:
    warm = {"temperature": 6.0, "seed": 11, "logprobs": 0, "max_tokens": 4}
    every = server.complete("abc", n=6, **warm)["choices"]
    best = server.complete("abc", n=1, best_of=6, **warm)["choices"]
    assert len(best) == 1
    assert best[0]["text"] == max(every, key=lambda one: sum(one["logprobs"]["token_logprobs"]))["text"]
    assert server.complete("abc", n=3, best_of=2)["error"]["param"] == "best_of"
    assert server.complete("abc", best_of=2, stream=True)["error"]["param"] == "best_of"


@sees("completions", "ignore_eos")
def _(server: ServerProcess) -> None:
    end = {"logit_bias": {str(vocabulary.TURN_END_TOKEN): 100}}
    assert server.complete("abc", **end)["usage"]["completion_tokens"] == 1
    assert server.complete("abc", ignore_eos=True, **end)["usage"]["completion_tokens"] == 8


labels("completions", "user")


# --- embeddings


@sees("embeddings", "input")
def _(server: ServerProcess) -> None:
    several = server.post("/v1/embeddings", {"model": "vectors", "input": ["the cat sat", "the dog sat", "a river"]})
    first, second, third = (np.array(one["embedding"]) for one in several.json()["data"])
    assert first @ second > first @ third
    assert abs(np.linalg.norm(first) - 1) < 1e-5
    tokens = server.post("/tokenize", {"model": "tiny", "content": "hello", "add_special": True}).json()["tokens"]
    assert said(ask(server, "embeddings", input=tokens)) == said(ask(server, "embeddings", input="hello"))
    for empty in ("", [], [""]):
        assert ask(server, "embeddings", input=empty)["error"]["param"] == "input"
    assert ask(server, "embeddings", input="x" * 3000)["error"]["code"] == "context_length_exceeded"
    assert ask(server, "embeddings", input=["x"] * 257)["error"]["code"] == "limit_exceeded"


@sees("embeddings", "encoding_format")
def _(server: ServerProcess) -> None:
    numbers = said(ask(server, "embeddings", encoding_format="float"))[0]["embedding"]
    packed = said(ask(server, "embeddings", encoding_format="base64"))[0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(packed), dtype="<f4"), numbers)


@sees("embeddings", "dimensions")
def _(server: ServerProcess) -> None:
    assert len(said(ask(server, "embeddings", dimensions=64))[0]["embedding"]) == 64
    assert ask(server, "embeddings", dimensions=32)["error"]["param"] == "dimensions"


labels("embeddings", "user")


# --- responses


@sees("responses", "input")
def _(server: ServerProcess) -> None:
    plain = server.respond("hello")["usage"]["input_tokens"]
    parts = [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]
    assert server.respond([{"role": "user", "content": parts}])["usage"]["input_tokens"] == plain
    conversation = [
        {"role": "user", "content": "pick one"},
        {"type": "function_call", "call_id": "c1", "name": "pick", "arguments": '{"letter": "a"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "picked"},
    ]
    assert server.respond(conversation, tools=[{"type": "function", **PICK["function"]}])["http_status"] == 200  # type: ignore[dict-item]
    assert server.respond([])["error"]["param"] == "input"
    assert server.respond([{"type": "computer_call"}])["error"]["param"] == "input[0]"


@sees("responses", "instructions")
def _(server: ServerProcess) -> None:
    said_more = server.respond("hello", instructions="be brief")["usage"]["input_tokens"]
    assert said_more > server.respond("hello")["usage"]["input_tokens"]


@sees("responses", "previous_response_id", "store")
def _(server: ServerProcess) -> None:
    first = server.respond("a new question about letters and nothing else")
    assert server.http.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]
    second = server.respond("and then?", previous_response_id=first["id"])
    used = first["usage"]["total_tokens"]
    assert second["usage"]["input_tokens"] > used
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= used - 2  # it went on from memory
    unknown = server.respond("x", previous_response_id="resp_nobody")
    assert unknown["error"]["code"] == "previous_response_not_found"
    unstored = server.respond("x", store=False)
    assert server.http.get(f"/v1/responses/{unstored['id']}").status_code == 404
    assert server.http.delete(f"/v1/responses/{first['id']}").json()["deleted"]
    assert server.http.get(f"/v1/responses/{first['id']}").status_code == 404


@sees("responses", "max_output_tokens")
def _(server: ServerProcess) -> None:
    answer = server.respond(max_output_tokens=3)
    assert said(answer) == "abc"
    assert (answer["status"], answer["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")


@sees("responses", "tools", "tool_choice", "parallel_tool_calls")
def _(server: ServerProcess) -> None:
    tools = [{"type": "function", **PICK["function"]}, {"type": "function", "name": "other"}]  # type: ignore[dict-item]
    free = {"max_output_tokens": 300, "temperature": 1, "seed": 1, "parallel_tool_calls": False, "tools": tools}
    calls = server.respond(tool_choice="required", **free)["output"]
    assert [item["type"] for item in calls] == ["function_call"]
    (named,) = server.respond(tool_choice={"type": "function", "name": "other"}, **free)["output"]
    assert named["name"] == "other"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    (only_one,) = server.respond(tool_choice=allowed, **free)["output"]
    assert only_one["name"] == "other"
    assert server.respond(tool_choice="required")["error"]["param"] == "tool_choice"
    assert server.respond(tools=[{"type": "web_search"}])["error"]["param"].startswith("tools[0]")


@sees("responses", "text")
def _(server: ServerProcess) -> None:
    format = {"type": "json_schema", "name": "n", "schema": {"enum": [12, 13]}}
    answer = server.respond(text={"format": format}, temperature=1, seed=1, max_output_tokens=50)
    assert json.loads(said(answer)) in (12, 13)
    assert answer["text"]["format"]["name"] == "n"
    assert server.respond(text={"verbosity": "high"})["error"]["param"] == "text.verbosity"


@sees("responses", "reasoning")
def _(server: ServerProcess) -> None:
    quiet = server.respond(model="thinker", reasoning={"effort": "none"})
    loud = server.respond(model="thinker", reasoning={"effort": "high"})
    assert [item["type"] for item in quiet["output"]] == ["message"]
    assert [item["type"] for item in loud["output"]] == ["reasoning"]
    assert loud["usage"]["output_tokens_details"]["reasoning_tokens"] == 8
    assert server.respond(reasoning={"summary": "auto"})["error"]["param"] == "reasoning.summary"


@sees("responses", "top_logprobs", "include")
def _(server: ServerProcess) -> None:
    table = server.respond(top_logprobs=2)["output"][0]["content"][0]["logprobs"]
    assert [one["token"] for one in table] == list(CYCLE[:8])
    assert len(table[0]["top_logprobs"]) == 2
    plain = server.respond(include=["message.output_text.logprobs"])["output"][0]["content"][0]["logprobs"]
    assert len(plain) == 8
    assert server.respond()["output"][0]["content"][0]["logprobs"] == []
    assert server.respond(include=["reasoning.encrypted_content"])["error"]["param"] == "include[0]"


@sees("responses", "truncation", "overflow")
def _(server: ServerProcess) -> None:
    items = [{"role": "user", "content": f"{number} " + "x" * 150} for number in range(20)]
    assert server.respond(items)["error"]["code"] == "context_length_exceeded"
    assert server.respond(items, truncation="disabled")["error"]["param"] == "input"
    assert server.respond(items, truncation="auto")["overflow"]["policy"] == "shift"
    assert server.respond(items, overflow="truncate_middle")["overflow"]["dropped_messages"] > 5


@sees("responses", "metadata")
def _(server: ServerProcess) -> None:
    assert server.respond(metadata={"topic": "letters"})["metadata"] == {"topic": "letters"}


labels("responses", "user", "safety_identifier", "prompt_cache_key")
only(
    "responses",
    service_tier=("default", "priority"),
    prompt_cache_options=({"mode": "implicit"}, {"ttl": "30m"}),
    prompt_cache_retention=("in_memory", "24h"),
    background=(False, True),
)
refused(
    "responses",
    access_programs={},
    context_management=[{"type": "compaction"}],
    conversation="conv_1",
    image={},
    max_tool_calls=3,
    moderation={"model": "m"},
    prompt={"id": "p"},
)


def test_a_field_nobody_knows_is_refused_by_name(server: ServerProcess) -> None:
    for route in ROWS:
        error = ask(server, route, tempreature=1)["error"]
        assert (error["param"], error["code"]) == ("tempreature", "unknown_parameter")


def test_the_tiny_models_are_what_these_rows_rely_on() -> None:
    assert models.CYCLE.decode() == CYCLE


BY_FUNCTION = {
    (route, see): [field for field in ROWS[route] if ROWS[route][field] is see]
    for route in ROWS
    for see in ROWS[route].values()
}


@pytest.mark.parametrize(
    ("route", "see"), [pytest.param(*key, id=f"{key[0]}-{'+'.join(fields)}") for key, fields in BY_FUNCTION.items()]
)
def test_a_field_does_what_it_says_or_is_refused(route: str, see: See, server: ServerProcess) -> None:
    see(server)


def test_the_page_about_the_api_lists_every_refusal_every_extension_and_every_setting() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    for route, (ours, theirs) in DOCUMENTED.items():
        for name, field in ours.model_fields.items():
            refusal = isinstance(field.json_schema_extra, dict) and "x-reason" in field.json_schema_extra
            if refusal or name not in theirs.__annotations__:
                assert f"`{name}" in page or name in ("stream", "seed"), f"{route}: {name}"
    for name in ServerSettings.model_fields:
        assert f"`{name}`" in page, name
