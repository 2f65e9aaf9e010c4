"""Tools for models whose template has none: described in the system message, called in `<tool_call>` tags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.tools.tool import Tool

TOOL_INSTRUCTIONS = """\
You can call these tools. Each line is one of them, with the JSON schema of its arguments:
{tools}

{call_format}
If no tool is needed, answer without a call."""
GENERIC_CALL_FORMAT = """\
To call a tool, write its name and its arguments as JSON between these tags:
<tool_call>
{"name": "the tool's name", "arguments": {"an argument's name": "its value"}}
</tool_call>
Write one such block for each call, and nothing after the last. The results come in <tool_response> tags."""


def render_tools_as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Rewrite a conversation for any template: only system, user and assistant messages with plain text."""
    plain_messages: list[Message] = []
    for message in messages:
        last = plain_messages[-1] if plain_messages else None
        if message.role != "tool":
            content = "\n".join(filter(None, [message.content, *map(format_call, message.tool_calls)]))
            plain_messages.append(replace(message, content=content, tool_calls=()))
            continue
        content = f"<tool_response>\n{message.content}\n</tool_response>"
        # Consecutive results are merged: many templates require alternating roles.
        if last is not None and last.role == "user" and last.content.endswith("</tool_response>"):
            plain_messages[-1] = replace(last, content=f"{last.content}\n{content}")
        else:
            plain_messages.append(Message(role="user", content=content))
    return add_tool_instructions(plain_messages, tools, GENERIC_CALL_FORMAT) if tools else plain_messages


def format_call(call: ToolCall) -> str:
    """Return a call in the generic format, as the instructions describe it."""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def add_tool_instructions(messages: Sequence[Message], tools: Sequence[Tool], call_format: str) -> list[Message]:
    """Describe the tools and the call format in the system message."""
    lines = "\n".join(json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools)
    instructions = TOOL_INSTRUCTIONS.format(tools=lines, call_format=call_format)
    if messages and messages[0].role == "system":
        first = replace(messages[0], content=f"{messages[0].content}\n\n{instructions}".strip())
        return [first, *messages[1:]]
    return [Message(role="system", content=instructions), *messages]
