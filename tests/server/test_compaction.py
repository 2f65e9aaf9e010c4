"""`overflow: "compact"` over HTTP: every API summarizes, reports it, and reuses the summary of the same history."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from support.server_process import ServerProcess, wait_until

pytestmark = pytest.mark.native
FIELDS: dict[str, Any] = {"temperature": 0, "overflow": "compact"}


def build_history(name: str, turns: int = 8) -> list[dict[str, Any]]:
    """Build a conversation of about 200 tokens per turn that ends with a question. The name makes it unique."""
    roles = ["user", "assistant"] * turns
    messages = [{"role": role, "content": f"{name} {index} " + "x" * 100} for index, role in enumerate(roles)]
    return [*messages, {"role": "user", "content": "the newest question"}]


def build_request(api: str, history: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Build path and body of a request."""
    system = {"role": "system", "content": "be brief"}
    match api:
        case "chat":
            return "/v1/chat/completions", {"messages": [system, *history], "max_tokens": 8, **FIELDS}
        case "responses":
            return "/v1/responses", {"input": history, "instructions": "be brief", "max_output_tokens": 16, **FIELDS}
        case "anthropic":
            return "/v1/messages", {"messages": history, "system": "be brief", "max_tokens": 8, **FIELDS}
        case _:
            options = {"num_predict": 8, **FIELDS}
            return "/api/chat", {"messages": [system, *history], "stream": False, "options": options}


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic", "ollama"])
def test_every_api_summarizes_once_and_reports_it(server: ServerProcess, api: str) -> None:
    reports = []
    for _ in range(2):
        path, body = build_request(api, build_history(api))
        answer = server.post(path, {"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        reports.append(answer.json()["overflow"])
    first, second = reports
    assert (first["policy"], first["summaries_written"], second["summaries_written"]) == ("compact", 1, 0)
    assert first["summary"].startswith("abc")
    assert second["summary"] == first["summary"]
    assert first["summarized_messages"] >= 8
    assert first["tokens_after"] < first["tokens_before"]


def test_the_next_turn_of_a_client_that_sends_the_whole_history_is_a_prefix_hit(server: ServerProcess) -> None:
    history = build_history("growing")
    path, body = build_request("chat", history)
    answer = server.post(path, {"model": "tiny", **body}).json()
    history += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    path, body = build_request("chat", [{"role": item["role"], "content": item["content"]} for item in history])
    usage = server.post(path, {"model": "tiny", **body}).json()["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] <= 60


def test_a_stream_reports_the_summary_in_its_first_event(server: ServerProcess) -> None:
    path, body = build_request("chat", build_history("stream"))
    chunks = server.collect_events(path, {"model": "tiny", **body})
    assert chunks[0]["overflow"]["summaries_written"] == 1


def test_a_prompt_without_messages_is_refused(server: ServerProcess) -> None:
    completion = server.complete("x" * 3000, overflow="compact")
    assert (completion["status"], completion["error"]["param"]) == (400, "overflow")


def test_a_client_that_leaves_during_a_summary_stops_it(server: ServerProcess) -> None:
    before = server.get_counters()["decodes"]
    path, body = build_request("chat", build_history("leaving", turns=60))  # many summaries

    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=httpx.Timeout(60, read=1.0))

    thread = threading.Thread(target=leave)
    thread.start()
    assert wait_until(60, lambda: server.get_counters()["decodes"] > before)
    thread.join()
    assert wait_until(60, lambda: not server.is_busy())
