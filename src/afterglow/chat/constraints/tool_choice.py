"""The option `tool_choice`: which tools an answer may or must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from afterglow.chat.tools.tool import Tool
from afterglow.errors import InvalidArgument

ToolChoiceMode: TypeAlias = Literal["none", "auto", "required"]
TOOL_CHOICE_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ResolvedToolChoice:
    """Parsed tool choice. `tools` are those that may be called."""

    mode: ToolChoiceMode
    tools: tuple[Tool, ...]


def parse_tool_choice(value: Any, tools: Sequence[Tool]) -> ResolvedToolChoice:
    """Parse `none`, `auto`, `required`, or OpenAI's dictionary with one tool name or a list of allowed tools.

    >>> parse_tool_choice("none", ()).mode
    'none'
    """
    match value:
        case None:
            return ResolvedToolChoice("auto" if tools else "none", tuple(tools))
        case "required" if not tools:
            raise InvalidArgument("tool_choice", "cannot be required without tools")
        case "none" | "auto" | "required":
            return ResolvedToolChoice(value, tuple(tools))
        case {"type": "function"}:
            return ResolvedToolChoice("required", (_find_tool(value, tools, "tool_choice"),))
        case {"type": "allowed_tools"}:
            allowed, where = value.get("allowed_tools", value), "tool_choice.allowed_tools"
            listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
            if not isinstance(listed, list) or not listed:
                raise InvalidArgument(f"{where}.tools", "must be a list of functions")
            mode = parse_tool_choice(str(allowed.get("mode", "auto")), tools).mode
            return ResolvedToolChoice(
                mode, tuple(_find_tool(item, tools, f"{where}.tools[{index}]") for index, item in enumerate(listed))
            )
    raise InvalidArgument(
        "tool_choice", f"must be one of {', '.join(TOOL_CHOICE_MODES)}, or name a function, not {value!r}"
    )


def _find_tool(value: Any, tools: Sequence[Tool], where: str) -> Tool:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidArgument(f"{where}.function.name", f"{name!r} is not one of the tools of the request")
