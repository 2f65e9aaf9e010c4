"""SmolLM2 behind the server, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.openai_schemas import ChatCompletion, validate
from support.server_process import ServerProcess

pytestmark = [pytest.mark.native, pytest.mark.model]


def build_messages(question: str) -> list[Any]:
    return [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": question}]


def test_a_question_is_answered_correctly(smollm2_server: ServerProcess) -> None:
    with smollm2_server.client() as client:
        completion = client.chat.completions.create(
            model="smollm2", messages=build_messages("What is the capital of France?"), max_tokens=24, temperature=0
        )
    assert "Paris" in (completion.choices[0].message.content or "")
    validate(ChatCompletion, json.loads(completion.model_dump_json(exclude_none=True)))


def test_the_next_turn_prefills_only_new_tokens(smollm2_server: ServerProcess) -> None:
    messages = build_messages("Name a colour. Answer in one word.")
    options: dict[str, Any] = {"model": "smollm2", "max_tokens": 12, "temperature": 0}
    with smollm2_server.client() as client:
        first = client.chat.completions.create(messages=messages, **options)
        text = first.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And another?"}]
        second = client.chat.completions.create(messages=messages, **options)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_the_output_conforms_to_the_schema(smollm2_server: ServerProcess) -> None:
    properties = {"city": {"type": "string", "maxLength": 20}, "million_people": {"enum": [1, 2, 3]}}
    schema = {"type": "object", "properties": properties, "required": ["city", "million_people"]}
    named_schema = {"name": "city", "schema": {**schema, "additionalProperties": False}, "strict": True}
    completion = smollm2_server.post(
        "/v1/chat/completions",
        {
            "model": "smollm2",
            "messages": build_messages("Describe Paris as JSON."),
            "response_format": {"type": "json_schema", "json_schema": named_schema},
            "max_tokens": 80,
            "temperature": 0,
        },
    ).json()
    assert set(json.loads(completion["choices"][0]["message"]["content"])) == {"city", "million_people"}


def test_prompts_are_scored_in_the_format_of_lm_eval(smollm2_server: ServerProcess) -> None:
    context, endings = "The capital of France is", (" Paris", " banana")
    scores = []
    for ending in endings:
        request = {"content": context + ending, "add_special": True}
        tokens = smollm2_server.post("/tokenize", request).json()["tokens"]
        body = {"model": "smollm2", "prompt": [tokens], "max_tokens": 1, "echo": True, "logprobs": 1, "seed": 1}
        completion = smollm2_server.post("/v1/completions", {**body, "temperature": 0}).json()
        table = completion["choices"][0]["logprobs"]
        assert len(table["token_logprobs"]) == len(tokens) + 1
        scores.append(table["token_logprobs"][len(tokens) - 1])
    assert scores[0] > scores[1] + 3
