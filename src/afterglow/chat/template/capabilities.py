"""Detection of what a chat template supports, by rendering small probe conversations.

Works on dictionaries and rendered text only. `template.adapter` applies the result.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

PROBE_TEXT, PROBE_RESULT, PROBE_REASONING = "needle7", "result7", "thought7"  # searched for in the rendered text
PROBE_CALL_ID = "call00001"  # accepted also by templates that require nine letters and digits
# Objects rendered as Python or JSON: the template does not support them in this form.
RAW_OBJECT_TEXTS = (f"{{'place': '{PROBE_TEXT}'}}", *(f"{{{quote}type{quote}: {quote}t" for quote in "'\""))
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning", "thought")
DEVELOPER_ROLE = re.compile(r"""["']developer["']""")  # most templates print any role; a few handle this one
REASONING_CONTENT_PART = "part"  # reasoning is a content part of type `thinking`

JINJA_TAG = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
STRING_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
UNDEFINED_THINKING_TEST = re.compile(r"\benable_thinking\s*(?:\||is\s+(?:not\s+)?defined)")

TemplateDict: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """Format of messages with tool calls."""

    arguments_as_text: bool = False  # arguments are JSON text, not an object
    empty_content: str | None = ""  # content of a message that has only tool calls


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """Features of a chat template and the input format it requires. Most templates have the default values.

    >>> TemplateCapabilities().reasoning_field
    'reasoning_content'
    """

    empty_as_none: bool = True  # absent `tools` and `documents` are passed as None; otherwise they are undefined
    requires_typed_content: bool = False  # content is a list of typed parts, not text
    supports_system_role: bool = True
    supports_developer_role: bool = False
    requires_reasoning: bool = False  # every assistant message needs the reasoning field, empty if it has no reasoning
    reasoning_field: str = "reasoning_content"  # field for reasoning, or REASONING_CONTENT_PART
    supports_tools: bool = True  # renders the tool definitions
    tool_call_format: ToolCallFormat | None = ToolCallFormat()  # None: tool calls are not rendered
    supports_tool_responses: bool = True  # renders messages with the role `tool`


RenderProbe: TypeAlias = Callable[[Sequence[TemplateDict], Sequence[TemplateDict] | None, bool], str | None]


def detect_capabilities(source: str, render: RenderProbe) -> TemplateCapabilities:
    """Probe a template. `render` takes messages, tools, and whether absent values are passed as None.

    A template that cannot render a single user message gets the defaults: its own error about the real conversation
    is more useful than anything detected here.
    """
    for empty_as_none, typed_content in itertools.product((True, False), (False, True)):
        probe = _TemplateProbe(render, empty_as_none, typed_content)
        if probe.is_shown([probe.build_user_message(PROBE_TEXT)]):
            break
    else:
        return TemplateCapabilities()
    probe.requires_reasoning = not probe.can_render_two_turns()
    tool_call_format, supports_tool_responses = probe.detect_tool_call_format()
    return TemplateCapabilities(
        empty_as_none=empty_as_none,
        requires_typed_content=typed_content,
        supports_system_role=probe.is_shown([probe.build_message("system", PROBE_TEXT), probe.build_user_message("a")]),
        supports_developer_role=DEVELOPER_ROLE.search(source) is not None
        and probe.is_shown([probe.build_message("developer", PROBE_TEXT), probe.build_user_message("a")]),
        requires_reasoning=probe.requires_reasoning and probe.can_render_two_turns(),
        reasoning_field=probe.detect_reasoning_field(tool_call_format),
        supports_tools=probe.is_shown([probe.build_user_message("a")], tools=build_probe_tool(PROBE_TEXT)),
        tool_call_format=tool_call_format,
        supports_tool_responses=supports_tool_responses,
    )


def build_probe_tool(name: str) -> list[TemplateDict]:
    """Build a tool definition as it is passed to a template."""
    place = {"type": "string", "description": "where"}
    parameters = {"type": "object", "properties": {"place": place}, "required": ["place"]}
    return [{"type": "function", "function": {"name": name, "description": "what", "parameters": parameters}}]


def reads_variable(template: str, name: str) -> bool:
    """Return whether the template reads a variable.

    >>> reads_variable("{% if tools %}", "tools"), reads_variable("{{ 'no tools' }}", "tools")
    (True, False)
    """
    pattern = re.compile(rf"\b{name}\b")
    return any(pattern.search(STRING_LITERAL.sub("", tag)) for tag in JINJA_TAG.findall(template))


def requires_thinking_variable(template: str) -> bool:
    """Return whether the template forbids reasoning if `enable_thinking` is undefined, without testing for that: it
    expects the variable from every caller.

    >>> requires_thinking_variable("{% if not enable_thinking %}</think>{% endif %}")
    True
    >>> requires_thinking_variable("{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}")
    False
    """
    return "not enable_thinking" in template and UNDEFINED_THINKING_TEST.search(template) is None


class _TemplateProbe:
    """Builds and renders probe conversations for one template."""

    def __init__(self, render: RenderProbe, empty_as_none: bool, typed_content: bool) -> None:
        self._render = render
        self._empty_as_none = empty_as_none
        self._typed_content = typed_content
        self.requires_reasoning = False

    def build_message(self, role: str, content: str) -> TemplateDict:
        return {"role": role, "content": [{"type": "text", "text": content}] if self._typed_content else content}

    def build_user_message(self, content: str) -> TemplateDict:
        return self.build_message("user", content)

    def build_assistant_message(self, content: str) -> TemplateDict:
        message = self.build_message("assistant", content)
        return {**message, "reasoning_content": ""} if self.requires_reasoning else message

    def can_render_two_turns(self) -> bool:
        messages = [self.build_user_message("a"), self.build_assistant_message("b"), self.build_user_message("c")]
        return self._render(messages, None, self._empty_as_none) is not None

    def is_shown(
        self, messages: Sequence[TemplateDict], tools: Sequence[TemplateDict] | None = None, expected: str = PROBE_TEXT
    ) -> bool:
        text = self._render(messages, tools, self._empty_as_none)
        return text is not None and expected in text and not any(raw_text in text for raw_text in RAW_OBJECT_TEXTS)

    def detect_tool_call_format(self) -> tuple[ToolCallFormat | None, bool]:
        """Return the format of tool calls, and whether tool results are rendered."""
        formats = [
            ToolCallFormat(arguments_as_text=as_text, empty_content=content)
            for content in ("", None)
            for as_text in (False, True)
        ]
        tools = build_probe_tool("weather")
        for results in ([self.build_tool_result_message()], []):
            for tool_call_format in formats:
                messages = [self.build_user_message("a"), self.build_tool_call_message(tool_call_format), *results]
                if self.is_shown(messages, tools):
                    return tool_call_format, bool(results) and self.is_shown(messages, tools, PROBE_RESULT)
        messages = [self.build_user_message("a"), self.build_assistant_message("b"), self.build_tool_result_message()]
        return None, self.is_shown(messages, tools, PROBE_RESULT)

    def build_tool_call_message(self, tool_call_format: ToolCallFormat) -> TemplateDict:
        arguments = f'{{"place": "{PROBE_TEXT}"}}' if tool_call_format.arguments_as_text else {"place": PROBE_TEXT}
        call = {"id": PROBE_CALL_ID, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        message = {**self.build_assistant_message(""), "tool_calls": [call]}
        return message if tool_call_format.empty_content is not None else {**message, "content": None}

    def build_tool_result_message(self) -> TemplateDict:
        return {**self.build_message("tool", PROBE_RESULT), "tool_call_id": PROBE_CALL_ID, "name": "weather"}

    def detect_reasoning_field(self, tool_call_format: ToolCallFormat | None) -> str:
        """Return the first field whose reasoning appears in the rendered text of any probe conversation."""
        question = self.build_user_message("a")
        for field in (*REASONING_FIELDS, REASONING_CONTENT_PART):
            answer = add_reasoning(self.build_message("assistant", "b"), field, PROBE_REASONING)
            conversations = [[question, answer], [question, answer, self.build_user_message("c")]]
            if tool_call_format is not None:
                call = add_reasoning(self.build_tool_call_message(tool_call_format), field, PROBE_REASONING)
                conversations.insert(0, [question, call, self.build_tool_result_message()])
            if any(self.is_shown(messages, build_probe_tool("weather"), PROBE_REASONING) for messages in conversations):
                return field
        return REASONING_FIELDS[0]


def add_reasoning(message: TemplateDict, field: str, reasoning: str) -> TemplateDict:
    """Return the message with reasoning in the field that the template reads.

    >>> add_reasoning({"role": "assistant", "content": "Yes"}, "thinking", "Hm")
    {'role': 'assistant', 'content': 'Yes', 'thinking': 'Hm'}
    """
    if field != REASONING_CONTENT_PART:
        return {**message, field: reasoning}
    content = message["content"] or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *parts]}
