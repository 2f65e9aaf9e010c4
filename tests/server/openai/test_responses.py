"""/v1/responses with OpenAI's own client and against its own types."""

from __future__ import annotations

import json

from support.openai_schemas import Response, valid, valid_event
from support.server_process import CYCLE, PICK, ServerProcess

TOOL = {"type": "function", **PICK["function"]}  # type: ignore[dict-item]


def test_a_response_is_what_openai_s_type_says(server: ServerProcess) -> None:
    answer = server.respond(model="thinker", reasoning={"effort": "minimal"}, max_output_tokens=200, tools=[TOOL])
    read = valid(Response, {key: value for key, value in answer.items() if key != "http_status"})
    assert [item.type for item in read.output] == ["reasoning", "message"]
    assert read.output_text.startswith("abc")
    assert read.usage is not None
    assert read.usage.output_tokens == 200


def test_every_event_is_what_openai_s_types_say_and_they_add_up(server: ServerProcess) -> None:
    body = {"model": "thinker", "input": "hello", "reasoning": {"effort": "minimal"}, "max_output_tokens": 200}
    events = [valid_event(one) for one in server.events("/v1/responses", {**body, "top_logprobs": 1})]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.incomplete",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text
    done = [event.file.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in events[-1].response.output]


def test_a_call_of_a_tool_streams_as_its_own_item(server: ServerProcess) -> None:
    body = {"model": "tiny", "input": "hello", "tools": [TOOL], "tool_choice": "required", "seed": 1}
    raw = server.events("/v1/responses", {**body, "parallel_tool_calls": False, "max_output_tokens": 300})
    events = [valid_event(one) for one in raw]
    written = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert json.loads(written)["letter"] in ("a", "b")
    (call,) = events[-1].response.output
    assert (call.type, call.name, call.arguments) == ("function_call", "pick", written)
    assert events[-1].type == "response.completed"


def test_openai_s_client_goes_on_from_a_response(server: ServerProcess) -> None:
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
