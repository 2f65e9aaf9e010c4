"""Prefix tree, events and requests over HTTP: what clients see, what they can do, and what other tenants do not see."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from afterglow.testing import models
from support.server_process import ServerProcess

pytestmark = pytest.mark.native

FIRST, SECOND = "key-of-the-first", "key-of-the-second"
SYSTEM = "You answer questions about trains at length, and you never guess. " * 3


@pytest.fixture(scope="module")
def observed(caches_of_our_own: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two API keys and a disk tier."""
    process = ServerProcess(
        f"tiny={models.get_path('successor-attention')}",
        *("--context", "1024", "--sequences", "4", "--api-key", FIRST, "--api-key", SECOND),
        AFTERGLOW_CACHE=str(tmp_path_factory.mktemp("observed")),
        AFTERGLOW_DISK_CACHE="on",
    )
    yield process
    process.stop()


def get(server: ServerProcess, path: str, key: str = FIRST, **query: Any) -> Any:
    response = server.http.get(path, headers={"x-api-key": key}, params=query)
    assert response.status_code == 200, response.text
    return response.json()


def post(server: ServerProcess, path: str, body: dict[str, Any], key: str = FIRST) -> Any:
    return server.post(path, {"model": "tiny", **body}, headers={"x-api-key": key})


def chat(server: ServerProcess, system: str, user: str, key: str = FIRST, **options: Any) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, **options}
    response = post(server, "/v1/chat/completions", body, key)
    assert response.status_code == 200, response.text
    return response


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return value


def find_leaf(server: ServerProcess, words: str, key: str = FIRST) -> dict[str, Any]:
    return next(node for node in get(server, "/tree", key)["nodes"] if words in node["text"])


def read_events(server: ServerProcess, key: str, after: int | None = None, **headers: str) -> list[dict[str, Any]]:
    """Return the events that are in the ring, with their ids."""
    events: list[dict[str, Any]] = []
    query = {} if after is None else {"after": after}
    with server.http.stream("GET", "/events", params=query, headers={"x-api-key": key, **headers}) as response:
        number = None
        for line in response.iter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: "):
                events.append({"id": number, **json.loads(line[6:])})
                if events[-1]["type"] == "finished" and is_newest(server, events[-1], key):
                    return events
    raise AssertionError("the stream ended")


def is_newest(server: ServerProcess, event: dict[str, Any], key: str) -> bool:
    newest = get(server, "/requests", key)["requests"][0]
    return event.get("request") == newest["id"]


def test_two_questions_after_one_system_prompt_are_two_branches(observed):
    chat(observed, SYSTEM, "a first question about stations")
    chat(observed, SYSTEM, "some other question about signals")
    tree = get(observed, "/tree")
    first, second = find_leaf(observed, "first question"), find_leaf(observed, "other question")
    assert first["parent"] == second["parent"] is not None
    trunk = next(node for node in tree["nodes"] if node["id"] == first["parent"])
    assert trunk["text"].startswith("<|im_start|>system You answer questions about trains")
    assert (trunk["start"], trunk["end"]) == (0, first["start"])
    assert trunk["sharers"] == 2
    assert trunk["hits"] == 1
    assert trunk["tiers"]["device"] == trunk["end"]
    assert tree["total_nodes"] == len(tree["nodes"])
    assert len(trunk["text"]) <= 80


def test_an_unchanged_tree_is_not_sent_again(observed):
    chat(observed, SYSTEM, "a question before the tree is read")
    wait_for(lambda: all(node["tiers"]["disk"] for node in get(observed, "/tree")["nodes"]))
    version = get(observed, "/tree")["version"]
    headers = {"x-api-key": FIRST}
    assert observed.http.get("/tree", params={"since": version}, headers=headers).status_code == 304
    chat(observed, SYSTEM, "a question that changes the tree")
    assert get(observed, "/tree", since=version)["version"] != version


def test_branches_beyond_the_limit_are_folded(observed):
    chat(observed, SYSTEM, "one of many questions")
    tree, whole = get(observed, "/tree", max_nodes=1), get(observed, "/tree")
    assert len(tree["nodes"]) == 1
    assert tree["total_nodes"] == whole["total_nodes"] > 2
    assert tree["nodes"][0]["folded"] > 1


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [("/tree", "nodes=3", "nodes"), ("/tree", "max_nodes=0", "max_nodes"), ("/requests", "limit=many", "limit"),
     ("/tree/prompt", "model=tiny", "id"), ("/events", "after=-1", "after")],
)  # fmt: skip
def test_a_wrong_query_is_refused_by_name(observed, path, query, param):
    response = observed.http.get(f"{path}?{query}", headers={"x-api-key": FIRST})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_request_says_why_it_computed_tokens(observed):
    chat(observed, f"{SYSTEM} Today is Monday, 2026-01-05.", "when is the next train?")
    chat(observed, f"{SYSTEM} Today is Tuesday, 2026-01-06.", "when is the next train?")
    newest = wait_for(lambda: (found := get(observed, "/requests")["requests"][0])["reason"] and found)
    computed = newest["computed_tokens"]
    assert newest["reason"] == (
        f"reused {newest['cached_tokens']:,} of {newest['prompt_tokens']:,}; "
        f"computed {computed} because: a date or time changed in the system prompt"
    )
    assert (newest["state"], newest["tier"], newest["api"]) == ("finished", "device", "openai")
    assert newest["first_words"] == "when is the next train?"
    assert newest["prompt_tokens"] == newest["prefill_done"] == newest["cached_tokens"] + computed
    assert newest["has_difference"]
    difference = get(observed, f"/requests/{newest['id']}")["difference"]
    assert difference["position"] == newest["cached_tokens"]
    assert difference["cause"] == "date"
    assert "Monday, 2026-01-05" in difference["cached_text"]
    assert "Tuesday, 2026-01-06" in difference["prompt_text"]


def test_the_id_of_a_request_is_that_of_its_response(observed):
    response = chat(observed, SYSTEM, "which id is it?")
    assert get(observed, "/requests", limit=1)["requests"][0]["id"] == response.headers["x-request-id"]


def test_a_client_that_disconnects_has_cancelled_its_request(observed):
    body = {"model": "tiny", "prompt": "on and on", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with observed.http.stream("POST", "/v1/completions", json=body, headers={"x-api-key": FIRST}) as response:
        next(response.iter_lines())
    newest = wait_for(
        lambda: (found := get(observed, "/requests", limit=1)["requests"][0])["state"] == "cancelled" and found
    )
    assert newest["first_words"] == "on and on"


def test_a_pinned_node_is_pinned_until_it_is_unpinned(observed):
    chat(observed, SYSTEM, "1 question that is pinned")
    node = find_leaf(observed, "that is pinned")
    assert post(observed, "/tree/pin", {"id": node["id"]}).json()["tokens"] == node["end"]
    assert find_leaf(observed, "that is pinned")["pinned"]
    assert not post(observed, "/tree/unpin", {"id": node["id"]}).json()["pinned"]
    assert not find_leaf(observed, "that is pinned")["pinned"]
    assert post(observed, "/tree/unpin", {"id": node["id"]}).status_code == 404


def test_a_forgotten_node_is_gone_from_every_tier_and_its_prefix_stays(observed):
    chat(observed, SYSTEM, "2 question to be forgotten")
    wait_for(lambda: find_leaf(observed, "to be forgotten")["tiers"]["disk"])
    node = find_leaf(observed, "to be forgotten")
    report = post(observed, "/tree/forget", {"id": node["id"]}).json()
    assert report["sequences"] + report["blocks"] >= 2
    assert not any("to be forgotten" in other["text"] for other in get(observed, "/tree")["nodes"])
    usage = chat(observed, SYSTEM, "2 question to be forgotten").json()["usage"]
    assert node["start"] - 8 <= usage["prompt_tokens_details"]["cached_tokens"] <= node["start"] + 8


def test_the_prompt_of_a_node_is_its_whole_text(observed):
    chat(observed, SYSTEM, "3 question to be read")
    node = find_leaf(observed, "to be read")
    prompt = get(observed, "/tree/prompt", id=node["id"])
    assert prompt["tokens"] == node["end"]
    assert prompt["text"].startswith(f"<|im_start|>system\n{SYSTEM.strip()}")
    assert "3 question to be read" in prompt["text"]


def test_the_archive_of_a_node_holds_the_files_of_its_path(observed):
    chat(observed, SYSTEM, "4 question to be exported")
    node = find_leaf(observed, "to be exported")
    query = {"id": node["id"]}
    response = observed.http.get("/tree/export", params=query, headers={"x-api-key": FIRST})
    assert response.status_code == 200, response.text
    with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
        names = [Path(member.name).suffix for member in archive.getmembers()]
    assert names.count(".cells") == -(-node["end"] // get(observed, "/tree")["block_size"])


def test_an_unknown_node_is_not_found(observed):
    assert post(observed, "/tree/pin", {"id": "00" * 32}).status_code == 404


def test_events_tell_the_life_of_a_request_in_order(observed):
    chat(observed, SYSTEM, "a question that is observed")
    newest = wait_for(lambda: (found := get(observed, "/requests")["requests"][0])["reason"] and found)
    events = read_events(observed, FIRST, after=0)
    own = [event for event in events if event.get("request") == newest["id"]]
    assert [event["type"] for event in own if event["type"] != "plan"] == [
        "admitted", "progress", "first_token", "finished",
    ]  # fmt: skip
    finished = own[-1] if own[-1]["type"] == "finished" else own[-2]
    assert finished["prompt_tokens"] == newest["prompt_tokens"]
    numbers = [event["id"] for event in events if event["type"] != "gap"]
    assert numbers == sorted(set(numbers))
    assert all(event["model"] == "tiny" for event in events)


def test_a_reader_that_reconnects_continues_after_its_last_event(observed):
    chat(observed, SYSTEM, "a question before the reader is cut off")
    last = read_events(observed, FIRST, after=0)[-1]["id"]
    chat(observed, SYSTEM, "a question after the reader was cut off")
    events = read_events(observed, FIRST, **{"Last-Event-ID": str(last)})
    assert events[0]["id"] == last + 1
    assert events[0]["type"] != "gap"


def test_a_number_of_an_earlier_server_gets_a_gap_first(observed):
    chat(observed, SYSTEM, "a question after a restart")
    assert read_events(observed, FIRST, after=10**9)[0] == {"id": None, "type": "gap"}


def test_a_reader_sees_what_the_tiers_store(observed):
    seen: list[dict[str, Any]] = []

    def read() -> None:
        with observed.http.stream("GET", "/events", headers={"x-api-key": FIRST}) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:]))
                    if {event.get("tier") for event in seen if event["type"] == "stored"} >= {"ram", "disk"}:
                        return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    numbers = itertools.count()
    wait_for(lambda: chat(observed, SYSTEM, f"{next(numbers)} questions are stored") and not reader.is_alive())
    stored = next(event for event in seen if event["type"] == "stored")
    assert stored["entries"] > 0 < stored["bytes"]
    assert "request" not in stored


def test_another_tenant_sees_neither_text_nor_ids(observed):
    secret = "the secret word of the first tenant is marmalade"
    response = chat(observed, secret, "a secret question")
    id = response.headers["x-request-id"]
    wait_for(lambda: get(observed, f"/requests/{id}")["reason"])
    own = find_leaf(observed, "secret word")
    chat(observed, SYSTEM, "a question of the second tenant", SECOND)

    tree = get(observed, "/tree", SECOND)
    requests = get(observed, "/requests", SECOND)
    events = read_events(observed, SECOND, after=0)
    for seen in (tree, requests, events):
        assert "secret" not in json.dumps(seen)
        assert id not in json.dumps(seen)
    assert own["id"] not in {node["id"] for node in tree["nodes"]}
    assert [request["first_words"] for request in requests["requests"]] == ["a question of the second tenant"]
    assert any(event["type"] == "plan" and "request" not in event for event in events), "sizes are visible"
    headers = {"x-api-key": SECOND}
    assert observed.http.get(f"/requests/{id}", headers=headers).status_code == 404
    for action in ("pin", "unpin", "forget"):
        assert post(observed, f"/tree/{action}", {"id": own["id"]}, SECOND).status_code == 404
    for action in ("prompt", "export"):
        query = {"id": own["id"]}
        assert observed.http.get(f"/tree/{action}", params=query, headers=headers).status_code == 404
    assert observed.http.get("/tree", headers={"x-api-key": "no key"}).status_code == 401
