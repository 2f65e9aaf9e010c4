"""Durations, options and field classes of the Ollama bodies."""

from __future__ import annotations

import math
from typing import Any

import ollama._types as client_types
import pydantic
import pytest

from afterglow.server.logs import start_record
from afterglow.server.ollama import schema

CLIENT_BODIES: list[tuple[type[pydantic.BaseModel], type[pydantic.BaseModel]]] = [
    (schema.OllamaChatRequest, client_types.ChatRequest),
    (schema.OllamaGenerateRequest, client_types.GenerateRequest),
    (schema.OllamaEmbedRequest, client_types.EmbedRequest),
    (schema.OllamaEmbeddingsRequest, client_types.EmbeddingsRequest),
    (schema.OllamaPullRequest, client_types.PullRequest),
    (schema.OllamaCreateRequest, client_types.CreateRequest),
    (schema.OllamaCopyRequest, client_types.CopyRequest),
    (schema.OllamaDeleteRequest, client_types.DeleteRequest),
    (schema.OllamaShowRequest, client_types.ShowRequest),
    (schema.OllamaOptions, client_types.Options),
    (schema.OllamaMessage, client_types.Message),
]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((0, 0), ("0", 0), (10, 10), (1.5, 1.5), ("5m", 300), ("1h30m", 5400), ("1m30", 90), (-1, math.inf)),
        *(("10ms", 0.01), ("1.5h", 5400), ("1m500ms", 60.5), ("5us", 5e-6), ("5µs", 5e-6), ("5μs", 5e-6)),
        *(("5ns", 5e-9), ("30m1h", 5400), ("+5m", 300), ("-5m", math.inf)),
    ],
)
def test_keep_alive_is_seconds_or_a_duration(value: Any, seconds: float) -> None:
    parsed = schema.OllamaChatRequest.model_validate({"model": "m", "keep_alive": value}).keep_alive
    assert parsed == pytest.approx(seconds)


@pytest.mark.parametrize("value", [9_999_999_999, 1e300, 10**400, "99999999999h", "9" * 400])
def test_a_keep_alive_of_more_than_a_century_is_for_ever(value: Any) -> None:
    assert schema.OllamaChatRequest.model_validate({"model": "m", "keep_alive": value}).keep_alive == math.inf


@pytest.mark.parametrize("value", ["", "soon", "5x", "m", True, "1.2.3", "5 m", "-", "+"])
def test_other_durations_are_refused(value: Any) -> None:
    with pytest.raises(pydantic.ValidationError, match="keep_alive"):
        schema.OllamaChatRequest.model_validate({"model": "m", "keep_alive": value})


@pytest.mark.parametrize(("body", "client_type"), CLIENT_BODIES)
def test_every_field_that_the_client_sends_is_declared(
    body: type[pydantic.BaseModel], client_type: type[pydantic.BaseModel]
) -> None:
    assert set(client_type.model_fields) - set(body.model_fields) == set()


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(pydantic.ValidationError, match=r"no option 'tempature': did you mean 'temperature'\?"):
        schema.OllamaOptions.model_validate({"tempature": 1})


@pytest.mark.parametrize(
    "options",
    [{"num_predict": -3}, {"num_ctx": -1}, {"repeat_last_n": -2}, {"temperature": "hot"}, {"stop": 5}, {"top_k": True}],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        schema.OllamaOptions.model_validate(options)


@pytest.mark.parametrize("name", ["num_ctx", "num_predict", "top_k", "seed", "repeat_last_n", "num_gpu", "mirostat"])
def test_an_integer_may_be_written_as_a_float(name: str) -> None:
    value = getattr(schema.OllamaOptions.model_validate({name: 2.0, "temperature": 1.0}), name)
    assert (value, type(value)) == (2, int)
    for other in (2.5, "2"):
        with pytest.raises(pydantic.ValidationError):
            schema.OllamaOptions.model_validate({name: other})


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"temperature": -1}, {"temperature": 0}),
        ({"top_p": 1.5}, {"top_p": 1.0}),
        ({"num_ctx": 0}, {}),
    ],
)
def test_values_that_switch_a_sampler_off_in_ollama_do_so(options: dict[str, Any], same: dict[str, Any]) -> None:
    assert schema.OllamaOptions.model_validate(options) == schema.OllamaOptions.model_validate(same)


# What Go's `encoding/json` writes for a request with only a model, as in Ollama's own client.
GO_BODIES: list[tuple[type[pydantic.BaseModel], dict[str, Any]]] = [
    (
        schema.OllamaShowRequest,
        {"model": "m", "system": "", "template": "", "verbose": False, "options": None, "name": ""},
    ),
    (schema.OllamaPullRequest, {"model": "m", "insecure": False, "username": "", "password": "", "name": ""}),
    (schema.OllamaDeleteRequest, {"model": "m", "name": ""}),
    (schema.OllamaChatRequest, {"model": "m", "messages": None, "options": None}),
    (
        schema.OllamaGenerateRequest,
        {"model": "m", "prompt": "", "suffix": "", "system": "", "template": "", "options": None, "width": 0},
    ),
    (schema.OllamaCreateRequest, {"model": "m", "from": "n", "files": {}, "quantize": "", "name": ""}),
]


@pytest.mark.parametrize(("body_type", "body"), GO_BODIES, ids=lambda value: getattr(value, "__name__", None))
def test_zero_values_of_go_are_fields_that_are_not_set(
    body_type: type[pydantic.BaseModel], body: dict[str, Any]
) -> None:
    parsed = body_type.model_validate(body)
    assert (parsed.model, getattr(parsed, "name", None)) == ("m", None)


def test_an_empty_model_is_the_default_one() -> None:
    assert schema.OllamaChatRequest.model_validate({"model": ""}).model is None


LOAD_OPTIONS = {
    "num_batch": 64,
    "num_gpu": 1,
    "main_gpu": 0,
    "num_thread": 4,
    "use_mmap": True,
    "use_mlock": False,
    "low_vram": True,
    "numa": True,
    "f16_kv": False,
    "draft_num_predict": 4,
    "num_keep": 4,
    "tfs_z": 0.5,
    "penalize_newline": False,
    "logits_all": True,
    "embedding_only": True,
}


@pytest.mark.parametrize("name", LOAD_OPTIONS)
def test_an_option_without_effect_is_named(name: str) -> None:
    record = start_record("POST", "/api/chat")
    schema.OllamaOptions.model_validate({name: LOAD_OPTIONS[name]})
    assert record.ignored_fields == [f"options.{name}"]


def test_an_option_that_describes_what_is_done_anyway_is_not_named() -> None:
    record = start_record("POST", "/api/chat")
    schema.OllamaOptions.model_validate({"tfs_z": 1.0, "low_vram": False, "f16_kv": True, "vocab_only": False})
    assert record.ignored_fields == []


@pytest.mark.parametrize("name", LOAD_OPTIONS)
def test_a_strict_server_refuses_options_without_effect(name: str) -> None:
    start_record("POST", "/api/chat", refuses_hints=True)
    with pytest.raises(pydantic.ValidationError, match=r"not supported|must be"):
        schema.OllamaOptions.model_validate({name: LOAD_OPTIONS[name]})
    start_record("", "")


@pytest.mark.parametrize("name", ["files", "adapters", "quantize", "modelfile", "remote_host"])
def test_what_cannot_be_created_is_refused_by_name(name: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=f"{name}\n.*is not supported"):
        schema.OllamaCreateRequest.model_validate({"model": "m", name: "x"})


def test_a_created_model_needs_a_source() -> None:
    for body in ({"model": "m"}, {"model": "m", "from": ""}):
        with pytest.raises(pydantic.ValidationError, match="is missing"):
            schema.OllamaCreateRequest.model_validate(body)
