"""Tools described as text for templates without tool support."""

from __future__ import annotations

from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.output.parts import join_parts
from afterglow.chat.tools.detection import TOOL_FAMILIES
from afterglow.chat.tools.text_tools import render_tools_as_text
from support.tool_records import TOOLS


def test_tools_calls_and_results_become_plain_text_messages() -> None:
    conversation = [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Weather?"),
        Message(role="assistant", content="Let me look.", tool_calls=(ToolCall(id="1", name="now", arguments="{}"),)),
        Message(role="tool", content="12:00", tool_call_id="1"),
        Message(role="tool", content="rain", tool_call_id="2"),
    ]
    system, user, assistant, results = render_tools_as_text(conversation, TOOLS)
    assert system.content.startswith("Be brief.\n\n")
    assert all(f'"name": "{tool.name}"' in system.content for tool in TOOLS)
    assert user == conversation[1]
    assert assistant.content == 'Let me look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert assistant.tool_calls == ()
    assert results == Message(
        role="user", content="<tool_response>\n12:00\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    )


def test_a_rendered_call_parses_back_to_the_same_call() -> None:
    call = ToolCall(id="1", name="search", arguments='{"query": "</tool_call>"}')
    (message,) = render_tools_as_text([Message(role="assistant", tool_calls=(call,))], ())
    parser = TOOL_FAMILIES["generic"].create_parser(TOOLS, new_id=lambda: "1")
    assert join_parts(parser.feed(message.content) + parser.finish()).tool_calls == (call,)


def test_a_system_message_is_added_if_there_is_none() -> None:
    system, user = render_tools_as_text([Message(role="user", content="Hi")], TOOLS)
    assert (system.role, user.content) == ("system", "Hi")


def test_without_tools_the_conversation_is_unchanged() -> None:
    conversation = [Message(role="user", content="Hi")]
    assert render_tools_as_text(conversation, ()) == conversation
