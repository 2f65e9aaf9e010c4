"""Tools for models whose templates know none: described in the system message, called in `<tool_call>` tags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.tools.tool import Tool

INSTRUCTIONS = """\
You can call these tools. Each line is one of them, with the JSON schema of its arguments:
{tools}

To call a tool, write its name and its arguments as JSON between these tags:
<tool_call>
{{"name": "the tool's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
Write one such block for each call, and nothing after the last. The results come in <tool_response> tags.
If no tool is needed, answer without a call."""


def generic_messages(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The same conversation in words that every template knows: system, user and assistant with text alone."""
    written: list[Message] = []
    for message in messages:
        if message.role == "tool":
            _answer(written, message)
        else:
            written.append(_said(message))
    return _instructed(written, tools) if tools else written


def _said(message: Message) -> Message:
    calls = "\n".join(_written(call) for call in message.tool_calls)
    content = "\n".join(filter(None, [message.content, calls]))
    return replace(message, content=content, tool_calls=())


def _written(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def _answer(written: list[Message], message: Message) -> None:
    """A tool's result as the user's. Results that follow each other are one message: many templates want turns."""
    content = f"<tool_response>\n{message.content}\n</tool_response>"
    if written and written[-1].role == "user" and written[-1].content.endswith("</tool_response>"):
        written[-1] = replace(written[-1], content=f"{written[-1].content}\n{content}")
    else:
        written.append(Message(role="user", content=content))


def _instructed(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    lines = "\n".join(json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools)
    instructions = INSTRUCTIONS.format(tools=lines)
    if messages and messages[0].role == "system":
        first = replace(messages[0], content=f"{messages[0].content}\n\n{instructions}".strip())
        return [first, *messages[1:]]
    return [Message(role="system", content=instructions), *messages]
