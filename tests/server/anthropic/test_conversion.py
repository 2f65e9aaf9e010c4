"""Content blocks become messages and breakpoints; tools and options become those of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.prompt import Breakpoint
from afterglow.server.anthropic.conversion import (
    ConversationBuilder,
    build_prompt_options,
    choose_reasoning,
    convert_conversation,
    convert_tools,
    omits_thinking,
)
from afterglow.server.anthropic.schema import MessagePromptFields
from afterglow.server.errors import APIError
from afterglow.server.logs import start_record
from afterglow.server.sealing import get_sealer

EPHEMERAL = {"type": "ephemeral"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}


def build_body(content: Any = "hello", **fields: Any) -> MessagePromptFields:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return MessagePromptFields.model_validate(body)


def convert(content: Any = "hello", **fields: Any) -> ConversationBuilder:
    return convert_conversation(build_body(content, **fields), "tenant")


def test_blocks_of_text_are_paragraphs_of_one_message() -> None:
    blocks = [{"type": "text", "text": text} for text in ("one", "two\n", "three")]
    conversation = convert(blocks, system=blocks[:2])
    assert conversation.messages == [
        Message(role="system", content="one\ntwo\n"),
        Message(role="user", content="one\ntwo\nthree"),
    ]


def test_images_are_at_their_place_in_the_text() -> None:
    (message,) = convert([{"type": "text", "text": "before"}, IMAGE, {"type": "text", "text": "after"}]).messages
    assert message.content == "beforeafter"
    assert [(image.source, image.offset) for image in message.attachments] == [("data:image/png;base64,AAAA", 6)]


def test_documents_and_search_results_are_text() -> None:
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "a"},
    }
    found = {"type": "search_result", "title": "Page", "source": "here", "content": [{"type": "text", "text": "b"}]}
    (message,) = convert([document, found]).messages
    assert message.content == "Notes\na\nPage\nhere\nb"


def test_tool_results_are_messages_of_their_own_in_order() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": "call_2",
            "content": [{"type": "text", "text": "gone"}, IMAGE],
            "is_error": True,
        },
        {"type": "tool_result", "tool_use_id": "call_3"},
    ]
    messages = convert([*results, {"type": "text", "text": "and now?"}]).messages
    assert [(message.role, message.content, message.tool_call_id) for message in messages] == [
        ("tool", "sunny", "call_1"),
        ("tool", "Error:\ngone", "call_2"),
        ("tool", "", "call_3"),
        ("user", "and now?", None),
    ]
    assert [image.offset for image in messages[1].attachments] == [len("Error:\ngone")]


def test_an_assistant_message_has_its_thinking_text_and_calls() -> None:
    sealer = get_sealer()
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": sealer.sign("hm", "tenant")},
        {"type": "thinking", "thinking": "", "signature": sealer.encrypt(" well", "tenant")},
        {"type": "redacted_thinking", "data": sealer.encrypt(" so", "tenant")},
        {"type": "text", "text": "I "},
        {"type": "text", "text": "look"},
        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "ä"}},
    ]
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": blocks}]
    assert convert(messages=messages).messages[1] == Message(
        role="assistant",
        content="I look",
        reasoning="hm well so",
        tool_calls=(ToolCall(id="call_1", name="look", arguments='{"at": "ä"}'),),
    )
    with pytest.raises(APIError, match="Invalid `signature`"):
        convert_conversation(build_body(messages=messages), "another tenant")


def test_a_breakpoint_is_after_its_block() -> None:
    def mark(block: dict[str, Any], ttl: str = "5m") -> dict[str, Any]:
        return {**block, "cache_control": {"type": "ephemeral", "ttl": ttl}}

    text = {"type": "text", "text": "one"}
    conversation = convert(
        [text, mark(IMAGE), mark(text), text], tools=[TOOL, mark({**TOOL, "name": "see"})], system=[mark(text, "1h")]
    )
    assert conversation.breakpoints == [
        Breakpoint(tools=2, retention_seconds=300.0),
        Breakpoint(message=0, retention_seconds=3600.0),
        Breakpoint(message=1, offset=3, attachments=1, retention_seconds=300.0),
        Breakpoint(message=1, offset=6, attachments=1, retention_seconds=300.0),
    ]
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [mark(text)]}
    assert convert([result, text]).breakpoints == [Breakpoint(message=0, retention_seconds=300.0)]
    assert convert([text, text], cache_control=EPHEMERAL).breakpoints == [
        Breakpoint(message=0, retention_seconds=300.0)
    ]


def test_a_breakpoint_counts_only_the_tools_of_the_client() -> None:
    marked, dropped = {**TOOL, "cache_control": EPHEMERAL}, {"type": "bash_20250124", "name": "bash"}
    conversation = convert(tools=[dropped, marked, dropped, TOOL, marked])
    assert [breakpoint.tools for breakpoint in conversation.breakpoints] == [1, 3]


def test_the_tools_are_read_once_however_many_there_are() -> None:
    """The time is linear in their number: the limit `max_tools` is checked later."""

    class CountingList(list[Any]):
        reads = 0

        def __iter__(self) -> Iterator[Any]:
            for item in list.__iter__(self):
                self.reads += 1
                yield item

        def __getitem__(self, key: Any) -> Any:
            found = list.__getitem__(self, key)
            self.reads += len(found) if isinstance(key, slice) else 1
            return found

    body = build_body(tools=[TOOL] * 50)
    tools = CountingList(body.tools or [])
    convert_conversation(body.model_copy(update={"tools": tools}), "tenant")
    assert tools.reads == 50


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}, True),
        ({"type": "none"}, "none", True),
        (None, None, True),
    ],
)
def test_a_tool_choice_is_that_of_the_pipeline(choice: Any, expected: Any, parallel: bool) -> None:
    body = build_body(tools=[TOOL], tool_choice=choice)
    options = build_prompt_options(body, convert_tools(body), can_reason=False)
    assert (options["tool_choice"], options["parallel_tool_calls"]) == (expected, parallel)


def test_two_output_formats_must_be_the_same() -> None:
    first, second = ({"type": "json_schema", "schema": {"type": kind}} for kind in ("object", "array"))
    for fields in ({"output_config": {"format": first}}, {"output_format": first}):
        options = build_prompt_options(build_body(**fields), [], can_reason=False)
        assert options["response_format"]["json_schema"]["schema"] == {"type": "object"}
        assert build_prompt_options(build_body(**{"output_format": first, **fields}), [], can_reason=False) == options
    body = build_body(output_config={"format": first}, output_format=second)
    with pytest.raises(APIError, match=r"another name of `output_config.format`") as caught:
        build_prompt_options(body, [], can_reason=False)
    assert caught.value.param == "output_format"


@pytest.mark.parametrize(
    ("thinking", "effort", "reasoning", "ignored"),
    [
        (None, None, None, []),
        (None, "high", "high", []),
        ({"type": "disabled"}, None, False, []),
        ({"type": "disabled"}, "low", False, ["output_config.effort"]),
        ({"type": "adaptive"}, None, True, []),
        ({"type": "adaptive"}, "max", "max", []),
        ({"type": "enabled", "budget_tokens": 2048}, None, 2048, []),
        ({"type": "enabled", "budget_tokens": 2048}, "low", 2048, ["output_config.effort"]),
    ],
)
def test_thinking_and_effort_choose_the_reasoning(thinking: Any, effort: Any, reasoning: Any, ignored: Any) -> None:
    record = start_record("POST", "/v1/messages")
    body = build_body(thinking=thinking, output_config={"effort": effort})
    assert choose_reasoning(body, can_reason=True) == reasoning
    assert record.ignored_fields == ignored
    assert choose_reasoning(body, can_reason=False) is None


def test_only_omitted_thinking_is_hidden_and_a_summary_is_reported() -> None:
    record = start_record("POST", "/v1/messages")
    for display, omitted in ((None, False), ("omitted", True), ("summarized", False)):
        assert omits_thinking(build_body(thinking={"type": "adaptive", "display": display})) is omitted
    assert record.ignored_fields == ["thinking.display"]


def test_a_strict_server_refuses_tools_that_it_would_drop() -> None:
    body = build_body(tools=[TOOL, {"type": "bash_20250124", "name": "bash"}])
    record = start_record("POST", "/v1/messages")
    assert [tool.name for tool in convert_tools(body)] == ["look"]
    assert record.ignored_fields == ["tools.bash_20250124"]
    start_record("POST", "/v1/messages", refuses_hints=True)
    with pytest.raises(APIError, match="no tool of type 'bash_20250124'"):
        convert_tools(body)


@pytest.mark.parametrize(
    ("thinking", "effort", "can_reason", "refused"),
    [
        ({"type": "adaptive"}, None, True, None),
        ({"type": "adaptive"}, "low", True, None),
        ({"type": "disabled"}, None, False, None),
        ({"type": "adaptive"}, None, False, "thinking"),
        (None, "low", False, "output_config.effort"),
        ({"type": "disabled"}, "low", True, "output_config.effort"),
        ({"type": "enabled", "budget_tokens": 2048}, "low", True, "output_config.effort"),
        ({"type": "adaptive", "display": "omitted"}, None, True, None),
        ({"type": "adaptive", "display": "summarized"}, None, True, "thinking.display"),
        ({"type": "adaptive", "display": "updates"}, None, True, "thinking.display"),
    ],
)
def test_a_strict_server_refuses_thinking_that_would_have_no_effect(
    thinking: Any, effort: Any, can_reason: bool, refused: str | None
) -> None:
    start_record("POST", "/v1/messages", refuses_hints=True)
    body = build_body(thinking=thinking, output_config={"effort": effort})
    if refused is None:
        choose_reasoning(body, can_reason=can_reason)
        omits_thinking(body)
        return
    with pytest.raises(APIError, match=f"`{refused}` has no effect") as caught:
        omits_thinking(body) if refused == "thinking.display" else choose_reasoning(body, can_reason=can_reason)
    assert (caught.value.param, caught.value.code) == (refused, "unsupported_parameter")
