"""/v1/responses with OpenAI's client and types."""

from __future__ import annotations

import json

import pytest

from support.openai_schemas import Response, validate, validate_event
from support.server_process import CYCLE, PICK_TOOL, ServerProcess

pytestmark = pytest.mark.native

TOOL = {"type": "function", **PICK_TOOL["function"]}


def test_a_response_matches_the_openai_type(server: ServerProcess) -> None:
    body = server.respond(model="reasoning", reasoning={"effort": "minimal"}, max_output_tokens=200, tools=[TOOL])
    response = validate(Response, {key: value for key, value in body.items() if key != "http_status"})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text.startswith("abc")
    assert response.usage is not None
    assert response.usage.output_tokens == 200


def test_events_match_the_openai_types_and_add_up_to_the_response(server: ServerProcess) -> None:
    body = {"model": "reasoning", "input": "hello", "reasoning": {"effort": "minimal"}, "max_output_tokens": 200}
    events = [validate_event(event) for event in server.collect_events("/v1/responses", {**body, "top_logprobs": 1})]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.incomplete",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in events[-1].response.output]


def test_a_tool_call_streams_as_a_separate_item(server: ServerProcess) -> None:
    body = {"model": "tiny", "input": "hello", "tools": [TOOL], "tool_choice": "required", "seed": 1}
    options = {"parallel_tool_calls": False, "max_output_tokens": 300}
    events = [validate_event(event) for event in server.collect_events("/v1/responses", {**body, **options})]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    arguments = "".join(deltas)
    assert json.loads(arguments)["letter"] in ("a", "b")
    (call,) = events[-1].response.output
    assert (call.type, call.name, call.arguments) == ("function_call", "pick", arguments)
    assert events[-1].type == "response.completed"


def test_the_openai_client_continues_from_a_previous_response(server: ServerProcess) -> None:
    with server.client() as client:
        first = client.responses.create(model="tiny", input="one", max_output_tokens=5, temperature=0)
        second = client.responses.create(
            model="tiny", input="two", previous_response_id=first.id, max_output_tokens=5, temperature=0
        )
        assert second.output_text == CYCLE[:5]
        assert second.previous_response_id == first.id
        with client.responses.stream(model="tiny", input="three", previous_response_id=second.id) as stream:
            assert any(event.type == "response.output_text.delta" for event in stream)
        assert client.responses.retrieve(second.id).id == second.id
        client.responses.delete(second.id)
