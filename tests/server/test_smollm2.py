"""A model that people run, behind the server, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

from support.openai_schemas import ChatCompletion, valid
from support.server_process import ServerProcess


def ask(text: str) -> list[Any]:
    return [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": text}]


def test_it_answers_a_question(real: ServerProcess) -> None:
    with real.client() as client:
        answer = client.chat.completions.create(
            model="smollm2", messages=ask("What is the capital of France?"), max_tokens=24, temperature=0
        )
    assert "Paris" in (answer.choices[0].message.content or "")
    valid(ChatCompletion, json.loads(answer.model_dump_json(exclude_none=True)))


def test_the_next_turn_computes_only_what_is_new(real: ServerProcess) -> None:
    messages = ask("Name a colour. Answer in one word.")
    options: dict[str, Any] = {"model": "smollm2", "max_tokens": 12, "temperature": 0}
    with real.client() as client:
        first = client.chat.completions.create(messages=messages, **options)
        said = first.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And another?"}]
        second = client.chat.completions.create(messages=messages, **options)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_a_schema_is_obeyed(real: ServerProcess) -> None:
    properties = {"city": {"type": "string", "maxLength": 20}, "million_people": {"enum": [1, 2, 3]}}
    schema = {"type": "object", "properties": properties, "required": ["city", "million_people"]}
    wrapped = {"name": "city", "schema": {**schema, "additionalProperties": False}, "strict": True}
    answer = real.post(
        "/v1/chat/completions",
        {
            "model": "smollm2",
            "messages": ask("Describe Paris as JSON."),
            "response_format": {"type": "json_schema", "json_schema": wrapped},
            "max_tokens": 80,
            "temperature": 0,
        },
    ).json()
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"city", "million_people"}


def test_prompts_are_scored_as_lm_eval_asks_for_it(real: ServerProcess) -> None:
    context, endings = "The capital of France is", (" Paris", " banana")
    scores = []
    for ending in endings:
        tokens = real.post("/tokenize", {"content": context + ending, "add_special": True}).json()["tokens"]
        body = {"model": "smollm2", "prompt": [tokens], "max_tokens": 1, "echo": True, "logprobs": 1, "seed": 1}
        table = real.post("/v1/completions", {**body, "temperature": 0}).json()["choices"][0]["logprobs"]
        assert len(table["token_logprobs"]) == len(tokens) + 1
        scores.append(table["token_logprobs"][len(tokens) - 1])
    assert scores[0] > scores[1] + 3
