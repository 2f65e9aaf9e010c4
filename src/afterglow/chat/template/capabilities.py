"""How a template wants a conversation written, found out by rendering small conversations with it.

It knows dictionaries and the answers of the template; what is done with the findings is said in `chat.adapting`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

PROBE_TEXT, PROBE_RESULT, PROBE_REASONING = "needle7", "result7", "thought7"  # what is looked for in the rendered text
PROBE_CALL_ID = "call00001"  # an identifier that the pickiest templates take
# Objects that the template wrote as they are: it took them for something else.
RAW_OBJECT_TEXTS = (f"{{'place': '{PROBE_TEXT}'}}", *(f"{{{quote}type{quote}: {quote}t" for quote in "'\""))
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning", "thought")
DEVELOPER_ROLE = re.compile(r"""["']developer["']""")  # most templates write any role; a few know this one
REASONING_CONTENT_PART = "part"  # reasoning as a part of the content, of the type `thinking`

TemplateDict: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """How messages with tool calls are written."""

    arguments_as_text: bool = False  # the arguments as JSON text, not as an object
    empty_content: str | None = ""  # where the model said nothing beside its calls


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """What a template does with what it is given. The defaults are what most templates do.

    >>> Habits().reasoning
    'reasoning_content'
    """

    empty_as_none: bool = True  # `tools` and `documents` are None where there are none; otherwise they are left out
    requires_typed_content: bool = False  # content is a list of typed parts, not text
    supports_system_role: bool = True  # it shows system messages
    supports_developer_role: bool = False  # it knows the role `developer`
    requires_reasoning: bool = (
        False  # it wants reasoning with every message of the assistant, empty where there was none
    )
    reasoning_field: str = "reasoning_content"  # the field that it reads reasoning from, or PART
    supports_tools: bool = True  # it shows the tools that are offered
    tool_call_format: ToolCallFormat | None = ToolCallFormat()  # None: it does not show them
    supports_tool_responses: bool = True  # it shows messages of the role `tool`


RenderProbe: TypeAlias = Callable[[Sequence[TemplateDict], Sequence[TemplateDict] | None, bool], str | None]


def detect_capabilities(source: str, render: RenderProbe) -> TemplateCapabilities:
    """Try the template. `render` takes messages, tools, and whether None is given where there are none.

    A template that does not even show a single question keeps the defaults: its own complaint about the real
    conversation is worth more than what could be guessed here.
    """
    for nothing, parts in itertools.product((True, False), (False, True)):
        trial = _TemplateProbe(render, nothing, parts)
        if trial.is_shown([trial.build_user_message(PROBE_TEXT)]):
            break
    else:
        return TemplateCapabilities()
    trial.requires_reasoning = not trial.can_render(
        [trial.build_user_message("a"), trial.build_assistant_message("b"), trial.build_user_message("c")]
    )
    calls, results = trial.detect_tool_call_format()
    return TemplateCapabilities(
        empty_as_none=nothing,
        requires_typed_content=parts,
        supports_system_role=trial.is_shown([trial.build_message("system", PROBE_TEXT), trial.build_user_message("a")]),
        supports_developer_role=DEVELOPER_ROLE.search(source) is not None
        and trial.is_shown([trial.build_message("developer", PROBE_TEXT), trial.build_user_message("a")]),
        requires_reasoning=trial.requires_reasoning
        and trial.can_render(
            [trial.build_user_message("a"), trial.build_assistant_message("b"), trial.build_user_message("c")]
        ),
        reasoning_field=trial.detect_reasoning_field(calls),
        supports_tools=trial.is_shown([trial.build_user_message("a")], tools=build_probe_tool(PROBE_TEXT)),
        tool_call_format=calls,
        supports_tool_responses=results,
    )


def build_probe_tool(name: str) -> list[TemplateDict]:
    """A tool as it is offered to a template."""
    place = {"type": "string", "description": "where"}
    parameters = {"type": "object", "properties": {"place": place}, "required": ["place"]}
    return [{"type": "function", "function": {"name": name, "description": "what", "parameters": parameters}}]


class _TemplateProbe:
    """Small conversations for one template, and what becomes of them."""

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
        return {
            **self.build_message("assistant", content),
            **({"reasoning_content": ""} if self.requires_reasoning else {}),
        }

    def can_render(self, messages: Sequence[TemplateDict]) -> bool:
        return self._render(messages, None, self._empty_as_none) is not None

    def is_shown(
        self, messages: Sequence[TemplateDict], tools: Sequence[TemplateDict] | None = None, expected: str = PROBE_TEXT
    ) -> bool:
        text = self._render(messages, tools, self._empty_as_none)
        return text is not None and expected in text and not any(written in text for written in RAW_OBJECT_TEXTS)

    def detect_tool_call_format(self) -> tuple[ToolCallFormat | None, bool]:
        """How calls are written, and whether their results are shown."""
        ways = [
            ToolCallFormat(arguments_as_text=text, empty_content=content)
            for content in ("", None)
            for text in (False, True)
        ]
        for end in ([self.build_tool_result_message()], []):
            for way in ways:
                turns = [self.build_user_message("a"), self.build_tool_call_message(way), *end]
                if self.is_shown(turns, build_probe_tool("weather")):
                    return way, bool(end) and self.is_shown(turns, build_probe_tool("weather"), PROBE_RESULT)
        return None, self.is_shown(
            [self.build_user_message("a"), self.build_assistant_message("b"), self.build_tool_result_message()],
            build_probe_tool("weather"),
            PROBE_RESULT,
        )

    def build_tool_call_message(self, tool_call_format: ToolCallFormat) -> TemplateDict:
        arguments = f'{{"place": "{PROBE_TEXT}"}}' if tool_call_format.arguments_as_text else {"place": PROBE_TEXT}
        called = {"id": PROBE_CALL_ID, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        turn = {**self.build_assistant_message(""), "tool_calls": [called]}
        return turn if tool_call_format.empty_content is not None else {**turn, "content": None}

    def build_tool_result_message(self) -> TemplateDict:
        return {**self.build_message("tool", PROBE_RESULT), "tool_call_id": PROBE_CALL_ID, "name": "weather"}

    def detect_reasoning_field(self, tool_call_format: ToolCallFormat | None) -> str:
        """The field that reasoning is read from: the first with which it shows anywhere."""
        for field in (*REASONING_FIELDS, REASONING_CONTENT_PART):
            said = add_reasoning(self.build_message("assistant", "b"), field, PROBE_REASONING)
            trials = [
                [self.build_user_message("a"), said],
                [self.build_user_message("a"), said, self.build_user_message("c")],
            ]
            if tool_call_format is not None:
                trials.insert(
                    0,
                    [
                        self.build_user_message("a"),
                        add_reasoning(self.build_tool_call_message(tool_call_format), field, PROBE_REASONING),
                        self.build_tool_result_message(),
                    ],
                )
            if any(self.is_shown(turns, build_probe_tool("weather"), PROBE_REASONING) for turns in trials):
                return field
        return REASONING_FIELDS[0]


def add_reasoning(message: TemplateDict, field: str, reasoning: str) -> TemplateDict:
    """The message with what the model thought, in the field that the template reads.

    >>> with_reasoning({"role": "assistant", "content": "Yes"}, "thinking", "Hm")
    {'role': 'assistant', 'content': 'Yes', 'thinking': 'Hm'}
    """
    if field != REASONING_CONTENT_PART:
        return {**message, field: reasoning}
    content = message["content"] or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *parts]}
