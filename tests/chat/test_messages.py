"""Messages: fields of OpenAI messages that change the prompt or are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from afterglow.chat.messages import parse_messages
from afterglow.errors import InvalidArgument


def test_the_refusal_of_an_assistant_message_is_its_text() -> None:
    refused, answered = parse_messages(
        [
            {"role": "assistant", "content": None, "refusal": "I cannot help with that."},
            {"role": "assistant", "content": "Paris.", "refusal": None},
        ]
    )
    assert (refused.content, answered.content) == ("I cannot help with that.", "Paris.")


@pytest.mark.parametrize(
    "message", [{"role": "assistant", "content": "Yes.", "refusal": "No."}, {"role": "user", "refusal": "No."}]
)
def test_a_refusal_beside_content_or_of_another_role_is_rejected(message: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match=r"messages\[0\].refusal"):
        parse_messages([message])


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tool_calls": 5}, "tool_calls"),
        ({"tool_calls": "f()"}, "tool_calls"),
        ({"tool_calls": call("{}")}, "tool_calls"),
        ({"tool_calls": [call({1, 2})]}, "tool_calls[0].function.arguments"),
        ({"tool_calls": [call("{}"), call({"a": float("nan")})]}, "tool_calls[1].function.arguments"),
        ({"content": "Yes.", "x": 1, 5: 1}, "5"),
        ({"content": "Yes.", "reasoning_content": 5}, "reasoning_content"),
        ({"content": "Yes.", "reasoning": 5}, "reasoning"),
    ],
)
def test_an_invalid_field_is_refused_by_name(fields: dict[Any, Any], name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_messages([{"role": "assistant", **fields}])
    assert caught.value.name == f"messages[0].{name}"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": "So."},
        {"reasoning_content": "So."},
        {"reasoning_content": None, "reasoning": "So."},
        {"reasoning_content": "So.", "reasoning": "Or so."},
    ],
)
def test_the_reasoning_is_the_first_of_both_fields_that_has_one(fields: dict[str, Any]) -> None:
    (message,) = parse_messages([{"role": "assistant", "content": "Yes.", **fields}])
    assert message.reasoning == "So."
