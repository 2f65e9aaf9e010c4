"""Tools of /v1/responses: functions, custom tools and namespaces as uniquely named tools, and back in calls.

A tool of a namespace is offered to the model as `namespace__name`. Tools that OpenAI's servers run are dropped and
reported if other tools remain, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from afterglow.chat.tools.tool import TextInput, Tool, build_text_tool, build_tool
from afterglow.server.errors import APIError, invalid_request_error
from afterglow.server.logs import get_record
from afterglow.server.openai.schema.chat import dump_fields
from afterglow.server.openai.schema.responses import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    GrammarText,
    NamedTool,
    NamespaceTool,
    ResponseTool,
    ResponseToolChoice,
    ServerTool,
)

NAMESPACE_SEPARATOR = "__"
MAX_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class ClientToolName:
    """Name of a tool as the client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ResponseToolSet:
    """Tools of one request, by the names that the model knows."""

    def __init__(self, tools: Sequence[ResponseTool]) -> None:
        self.tools: list[Tool] = []
        self.offered = drop_server_tools(tools)  # tools of the body that remain
        self._client_names: dict[str, ClientToolName] = {}
        self._names: dict[tuple[str | None, str], str] = {}
        for index, tool in enumerate(tools):
            if isinstance(tool, NamespaceTool):
                self._add_namespace(tool, f"tools[{index}]")
            elif not isinstance(tool, ServerTool):
                self._add(tool, None, f"tools[{index}]")

    def get_name(self, name: str, namespace: str | None) -> str:
        """Return the name that the model knows, also for a tool that an earlier request had."""
        return self._names.get((namespace, name)) or join_names(namespace, name)

    def get_client_name(self, name: str) -> ClientToolName:
        """Return the name that the client knows. A model may call a tool that does not exist."""
        return self._client_names.get(name) or ClientToolName(name)

    def build_choice(self, choice: ResponseToolChoice | None) -> Any:
        """Convert `tool_choice` to that of chat completions."""
        match choice:
            case ServerTool():
                raise build_server_tool_error("tool_choice", choice.type)
            case NamedTool():
                return self._build_named_choice(choice)
            case AllowedTools():
                allowed = drop_server_tools(choice.tools, "tool_choice.tools")
                named = [self._build_named_choice(tool) for tool in allowed if isinstance(tool, NamedTool)]
                return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}
        return choice

    def _build_named_choice(self, tool: NamedTool) -> dict[str, str]:
        return {"type": "function", "name": self.get_name(tool.name, tool.namespace)}

    def _add_namespace(self, namespace: NamespaceTool, where: str) -> None:
        about = f"{namespace.name}: {namespace.description}\n\n" if namespace.description else ""
        for index, tool in enumerate(namespace.tools):
            self._add(tool, namespace.name, f"{where}.tools[{index}]", about)
            about = ""  # once for the tools of a namespace

    def _add(self, tool: FunctionTool | CustomTool, namespace: str | None, where: str, about: str = "") -> None:
        if (namespace, tool.name) in self._names:
            raise invalid_request_error(f"{where}.name", f"{tool.name!r} is also the name of another tool")
        name = tool.name if namespace is None else self._find_free_name(join_names(namespace, tool.name))
        description = about + (tool.description or "")
        if isinstance(tool, CustomTool):
            built = build_text_tool(name, description, build_text_input(tool), where=where)
        else:
            built = build_tool(name, description, tool.parameters, tool.strict, where=where)
        self.tools.append(built)
        self._names[namespace, tool.name] = name
        self._client_names[name] = ClientToolName(tool.name, namespace, isinstance(tool, CustomTool))

    def _find_free_name(self, name: str) -> str:
        candidate, number = name, 2
        while candidate in self._client_names:
            suffix = f"_{number}"
            candidate, number = name[: MAX_NAME_CHARACTERS - len(suffix)] + suffix, number + 1
        return candidate


def join_names(namespace: str | None, name: str) -> str:
    """Return the name of a tool of a namespace for the model.

    >>> join_names("crm", "find"), join_names("mcp__crm__", "find"), join_names(None, "find")
    ('crm__find', 'mcp__crm__find', 'find')
    """
    if namespace is None:
        return name
    head = namespace if namespace.endswith(NAMESPACE_SEPARATOR) else namespace + NAMESPACE_SEPARATOR
    return (head + name)[-MAX_NAME_CHARACTERS:]


def build_text_input(tool: CustomTool) -> TextInput:
    """Return the input format of a custom tool."""
    if isinstance(tool.format, GrammarText):
        return TextInput(tool.format.syntax, tool.format.definition)
    return TextInput()


def drop_server_tools(tools: Sequence[Any], where: str = "tools") -> list[Any]:
    """Return the tools without those that OpenAI's servers run, which are reported. Raises if none remains."""
    remaining = [tool for tool in tools if not isinstance(tool, ServerTool)]
    for index, tool in enumerate(tools):
        if isinstance(tool, ServerTool):
            record = get_record()
            if not remaining or record.refuses_hints:
                raise build_server_tool_error(f"{where}[{index}]", tool.type)
            record.add_ignored(f"{where}[{index}] ({tool.type})")
    return remaining


def build_server_tool_error(param: str, tool_type: str) -> APIError:
    """Return the error for a tool that is not supported."""
    message = f"`{param}` is {tool_type!r}: the server runs no tools; offer a `function` or a `custom` tool"
    return invalid_request_error(param, message, "unsupported_parameter")


def dump_tools(tools: Iterable[ResponseTool]) -> list[dict[str, Any]]:
    """Convert tools to the dictionaries of a response."""
    return [_dump_tool(tool) for tool in tools]


def _dump_tool(tool: Any) -> dict[str, Any]:
    fields: dict[str, Any] = dump_fields(tool)
    if isinstance(tool, FunctionTool):
        return {"description": None, "parameters": None, "strict": None, **fields}
    if isinstance(tool, NamespaceTool):
        return {"description": "", **fields, "tools": dump_tools(tool.tools)}
    return fields
