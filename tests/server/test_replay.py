"""Replay over HTTP: the history of a client costs only its new tokens, whatever the client does to the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.server_process import ServerProcess, run_server

pytestmark = pytest.mark.native

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
                "required": ["place", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("look", "search", "walk", "read", "write", "wait")
]


def reserialize(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call as a client sends it back: parsed, with other white space and another order of keys."""
    arguments = json.loads(call["function"]["arguments"])
    text = json.dumps(dict(reversed(arguments.items())), indent=1)
    return {**call, "function": {"name": call["function"]["name"], "arguments": text}}


def play_chat(server: ServerProcess, turns: int, **fields: Any) -> list[int]:
    """Play an agent's conversation. Return for each turn how many tokens of the earlier turns were computed again."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find out where it rains."}]
    lost, known = [], 0
    for turn in range(turns):
        body = {"messages": messages, "tools": TOOLS, "tool_choice": "required", "temperature": 0.7, "seed": turn}
        completion = server.post("/v1/chat/completions", {**body, "max_tokens": 300, **fields}).json()
        usage, choice = completion["usage"], completion["choices"][0]
        assert choice["finish_reason"] == "tool_calls", choice
        lost.append(max(0, known - usage["prompt_tokens_details"]["cached_tokens"]))
        known = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # the end token is not computed
        calls = [reserialize(call) for call in choice["message"]["tool_calls"]]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "not here"} for call in calls]
    return lost


@pytest.mark.model
def test_five_turns_of_an_agent_compute_no_generated_token_again(smollm2: Path) -> None:
    with run_server(f"smollm2={smollm2}", "--context", "4096", "--sequences", "2") as server:
        assert play_chat(server, 5, model="smollm2") == [0, 0, 0, 0, 0]
        assert sum(play_chat(server, 2, model="smollm2", replay=False)) > 0


@pytest.mark.model
def test_a_restarted_server_replays_from_disk(smollm2: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Find out where it rains."}]
    body = {"messages": messages, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300, "temperature": 0}
    environment = {"AFTERGLOW_CACHE": str(tmp_path), "AFTERGLOW_DISK_CACHE": "on"}
    arguments = [f"smollm2={smollm2}", "--context", "4096", "--sequences", "2"]
    with run_server(*arguments, **environment) as server:
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    calls = [reserialize(call) for call in message["tool_calls"]]
    messages.append({"role": "assistant", "tool_calls": calls})  # type: ignore[dict-item]
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "not here"} for call in calls]
    with run_server(*arguments, **environment) as server:
        details = server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens_details"]
    assert details["replayed_tokens"] > 0
    assert "replay_misses" not in details


def test_usage_counts_replayed_tokens_and_names_why_a_message_was_not_replayed(server: ServerProcess) -> None:
    question = {"role": "user", "content": "replay this"}
    fields = {"model": "tiny", "max_tokens": 6}
    answer = server.post("/v1/chat/completions", {"messages": [question], **fields}).json()["choices"][0]["message"]

    def read_details(content: str, **other: Any) -> dict[str, Any]:
        history = [question, {"role": "assistant", "content": content}, question]
        response = server.post("/v1/chat/completions", {"messages": history, **fields, **other}).json()
        details: dict[str, Any] = response["usage"]["prompt_tokens_details"]
        return details

    assert read_details(answer["content"])["replayed_tokens"] == 6
    assert read_details(answer["content"] + "!")["replay_misses"] == [{"message": 1, "reason": "message edited"}]
    off = read_details(answer["content"], replay=False)
    assert "replayed_tokens" not in off
    assert "replay_misses" not in off


def test_explain_shows_replays(server: ServerProcess) -> None:
    question = {"role": "user", "content": "explain this"}
    answer = server.chat("explain this", model="tiny", max_tokens=5)["choices"][0]["message"]
    history = [question, {"role": "assistant", "content": answer["content"]}, question]
    history += [{"role": "assistant", "content": "written elsewhere"}, question]
    explanation = server.post("/cache/explain", {"model": "tiny", "messages": history}).json()
    assert explanation["replay"] == {
        "replayed_tokens": 5,
        "replayed_messages": [1],
        "misses": [{"message": 3, "reason": "not generated here"}],
    }


def test_items_of_responses_are_replayed(server: ServerProcess) -> None:
    first = server.respond("respond to this", model="tiny", max_output_tokens=7)
    question = {"role": "user", "content": "respond to this"}
    second = server.respond([question, *first["output"], question], model="tiny", max_output_tokens=4)
    assert second["usage"]["input_tokens_details"]["replayed_tokens"] == 7
    third = server.respond("and then", model="tiny", previous_response_id=first["id"], max_output_tokens=4)
    assert third["usage"]["input_tokens_details"]["replayed_tokens"] == 7
