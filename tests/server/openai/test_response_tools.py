"""Tools of /v1/responses as uniquely named tools of the model."""

from __future__ import annotations

from typing import Any

import pytest

from afterglow.chat.output.parts import ToolCallDelta
from afterglow.server.errors import APIError
from afterglow.server.openai.response_items import OutputItemBuilder, OutputItemOptions
from afterglow.server.openai.response_tools import ClientToolName, ResponseToolSet, dump_tools
from afterglow.server.openai.schema.responses import ResponseRequest

FIND = {"type": "function", "name": "find"}
RUN = {"type": "custom", "name": "run", "description": "Run code."}


def build(*tools: dict[str, Any], **fields: Any) -> ResponseToolSet:
    body = ResponseRequest(input="x", tools=list(tools), **fields)
    return ResponseToolSet(body.tools or ())


def namespace(name: str, *tools: dict[str, Any], description: str = "") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": description, "tools": list(tools)}


def test_tools_of_namespaces_get_unique_names_that_map_back() -> None:
    tools = build(
        FIND,
        namespace("crm", FIND, RUN, description="Customers."),
        {**FIND, "name": "crm__find_2"},
        namespace("crm__", FIND),
    )
    names = [tool.name for tool in tools.tools]
    assert names == ["find", "crm__find", "crm__run", "crm__find_2", "crm__find_3"]
    assert tools.get_client_name("crm__run") == ClientToolName("run", "crm", is_custom=True)
    assert tools.get_client_name("crm__find_3") == ClientToolName("find", "crm__")
    assert [tools.get_name("find", space) for space in (None, "crm", "crm__", "other")] == [
        *("find", "crm__find", "crm__find_3", "other__find"),
    ]
    assert tools.tools[1].description == "crm: Customers.\n\n"
    assert len(build(namespace("n" * 60, FIND, {**FIND, "name": "find_more"})).tools[1].name) <= 64


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(APIError, match="'find' is also the name"):
        build(FIND, FIND)


def test_server_side_tools_are_dropped_if_others_remain() -> None:
    tools = build({"type": "web_search", "filters": {}}, FIND)
    assert [tool.name for tool in tools.tools] == ["find"]
    assert dump_tools(tools.offered) == [{**FIND, "description": None, "parameters": None, "strict": None}]
    with pytest.raises(APIError, match="'mcp'"):
        build({"type": "mcp", "server_label": "x"})


def test_choices_name_the_tools_of_the_model() -> None:
    tools = build(FIND, RUN, namespace("crm", FIND))
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "custom", "name": "run"}, {"type": "web_search"}],
    }
    choices = [
        {"type": "custom", "name": "run"},
        {"type": "function", "name": "find", "namespace": "crm"},
        allowed,
        "auto",
    ]
    bodies = [ResponseRequest(input="x", tool_choice=choice) for choice in choices]
    assert [tools.build_choice(body.tool_choice) for body in bodies] == [
        {"type": "function", "name": "run"},
        {"type": "function", "name": "crm__find"},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "name": "run"}]},
        },
        "auto",
    ]
    with pytest.raises(APIError, match="'web_search'"):
        tools.build_choice(ResponseRequest(input="x", tool_choice={"type": "web_search"}).tool_choice)


def test_calls_become_items_of_the_client() -> None:
    builder = OutputItemBuilder(OutputItemOptions(build(RUN, namespace("crm", FIND))))
    parts = [
        ToolCallDelta(0, '{"input": "a\\', id="c0", name="run"),
        ToolCallDelta(0, 'nb"}'),
        ToolCallDelta(1, "{}", id="c1", name="crm__find"),
    ]
    events = [event for part in parts for event in builder.add_part(part)] + list(builder.finish("completed"))
    custom, function = builder.items
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "run", "a\nb")
    assert (function["type"], function["namespace"], function["name"]) == ("function_call", "crm", "find")
    assert [event["delta"] for event in events if event["type"].endswith(".delta")] == ["a", "\nb", "{}"]
