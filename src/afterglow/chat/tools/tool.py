"""Tools that callers offer to a model, as OpenAI dictionaries or as Python functions."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from afterglow.chat.tools.function_schema import build_schema, convert_value, get_parameter_hints, parse_docstring
from afterglow.errors import InvalidArgument, UnsupportedOperation

TEXT_PARAMETER = "input"  # of tools that take a text
NAME_PATTERN = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
TOOL_FIELDS = frozenset({"type", "function"})
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
UNSUPPORTED_PARAMETER_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)


def _build_empty_schema() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class TextInput:
    """Input of a tool that takes a text instead of arguments, and the grammar that the text must match, if any."""

    syntax: Literal["text", "lark", "regex"] = "text"
    definition: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Tool that a model may call. `parameters` is the JSON schema of its arguments.

    A tool with `text_input` takes a text instead. To templates, parsers and models it is a function with one parameter,
    `input`: `build_text_tool`.

    >>> def add(a: int, b: int = 1) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> (tool,) = parse_tools([add])
    >>> tool.call('{"a": 41}')
    42
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=_build_empty_schema)
    function: Callable[..., Any] | None = None
    strict: bool = False
    text_input: TextInput | None = None

    @property
    def must_conform(self) -> bool:
        """Whether a call that does not conform is never acceptable: of strict tools, and of texts with a grammar."""
        return self.strict or (self.text_input is not None and self.text_input.syntax != "text")

    @property
    def definition(self) -> dict[str, Any]:
        """OpenAI dictionary of the tool, which is also the form that chat templates read."""
        function: dict[str, Any] = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {**function, **({"strict": True} if self.strict else {})}}

    @property
    def defaults(self) -> dict[str, Any]:
        """Arguments that have a default in the schema.

        >>> schema = {"type": "object", "properties": {"all": {"type": "boolean", "default": False}}}
        >>> Tool(name="edit", parameters=schema).defaults
        {'all': False}
        """
        properties = self.parameters.get("properties", {})
        schemas = {name: schema for name, schema in properties.items() if isinstance(schema, dict)}
        return {name: schema["default"] for name, schema in schemas.items() if "default" in schema}

    def call(self, arguments: str) -> Any:
        """Check the JSON arguments that a model wrote, convert them to the hinted types, and call the function."""
        if self.function is None:
            raise UnsupportedOperation(f"calling {self.name}", "the tool has no function")
        where = f"{self.name}.arguments"
        try:
            values = json.loads(arguments or "{}", parse_float=_parse_number)
        except ValueError as error:
            raise InvalidArgument(where, f"must be JSON: {error}") from None
        if not isinstance(values, dict):
            raise InvalidArgument(where, f"must be an object, not {type(values).__name__}")
        known, required = self.parameters.get("properties", {}), self.parameters.get("required", [])
        is_open = self.parameters.get("additionalProperties") not in (None, False)
        if not is_open and (unknown := sorted(set(values) - set(known))):
            raise InvalidArgument(
                f"{where}.{unknown[0]}", f"is not a parameter; there are {', '.join(known) or 'none'}"
            )
        if missing := [key for key in required if key not in values]:
            raise InvalidArgument(f"{where}.{missing[0]}", "is required")
        hints = get_parameter_hints(self.function)
        return self.function(
            **{key: convert_value(value, hints.get(key, Any), key, where) for key, value in values.items()}
        )


ToolLike: TypeAlias = Tool | Mapping[str, Any] | Callable[..., Any]


def parse_tools(values: Sequence[ToolLike]) -> tuple[Tool, ...]:
    """Convert tools, OpenAI dictionaries and functions with type hints to tools with unique names."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise InvalidArgument("tools", "must be a list of tools")
    tools = tuple(_parse_tool(value, f"tools[{index}]") for index, value in enumerate(values))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidArgument(
                f"tools[{index}].function.name", f"{name!r} is also the name of tools[{names.index(name)}]"
            )
    return tools


def _parse_tool(value: ToolLike, where: str) -> Tool:
    if isinstance(value, Tool):
        return value
    if isinstance(value, Mapping):
        return _parse_dictionary(value, where)
    if callable(value):
        return _parse_function(value, where)
    raise InvalidArgument(where, f"must be a dictionary or a function, not {type(value).__name__}")


def _parse_dictionary(value: Mapping[str, Any], where: str) -> Tool:
    _check_fields(value, TOOL_FIELDS, where)
    if value.get("type") != "function":
        raise InvalidArgument(f"{where}.type", f"must be 'function', not {value.get('type')!r}")
    function, where = value.get("function"), f"{where}.function"
    if not isinstance(function, Mapping):
        raise InvalidArgument(where, f"must be a dictionary, not {type(function).__name__}")
    _check_fields(function, FUNCTION_FIELDS, where)
    return build_tool(
        function.get("name"),
        _get_optional(function, "description", str, where),
        _get_optional(function, "parameters", Mapping, where),
        _get_optional(function, "strict", bool, where),
        where=where,
    )


def build_tool(
    name: Any, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None, *, where: str
) -> Tool:
    """Build a tool from the fields of a request. Raises `InvalidArgument` for a field of `where`."""
    name, where = _check_name(name, f"{where}.name"), f"{where}.parameters"
    schema = {**_build_empty_schema(), **(parameters or {})}
    if schema["type"] != "object":
        raise InvalidArgument(f"{where}.type", f"must be 'object', not {schema['type']!r}")
    if not isinstance(schema["properties"], Mapping):
        raise InvalidArgument(f"{where}.properties", "must be a dictionary")
    required = schema.get("required", [])
    if not isinstance(required, Sequence) or not all(isinstance(key, str) for key in required):
        raise InvalidArgument(f"{where}.required", "must be a list of names")
    try:
        json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(where, f"must be JSON: {error}") from None
    return Tool(name=name, description=description or "", parameters=schema, strict=bool(strict))


def build_text_tool(name: Any, description: str | None, text_input: TextInput, *, where: str) -> Tool:
    """Build a tool that takes a text, as a function with the parameter `input`.

    >>> build_text_tool("run", "Run code.", TextInput(), where="tools[0]").parameters["required"]
    ['input']
    """
    about = "The complete input of the tool, as plain text."
    if text_input.syntax != "text":
        about = f"{about} It must match this {text_input.syntax} grammar:\n{text_input.definition}"
    return Tool(
        name=_check_name(name, f"{where}.name"),
        description=description or "",
        parameters={
            "type": "object",
            "properties": {TEXT_PARAMETER: {"type": "string", "description": about}},
            "required": [TEXT_PARAMETER],
            "additionalProperties": False,
        },
        text_input=text_input,
    )


def _parse_function(function: Callable[..., Any], where: str) -> Tool:
    name = _check_name(getattr(function, "__name__", None), f"{where}.name")
    description, parameter_descriptions = parse_docstring(inspect.getdoc(function) or "")
    try:
        hints = get_parameter_hints(function)
    except Exception as error:  # a hint in text is an expression, which may raise anything
        reason = f"has no signature, or an unresolvable type hint: {error}"
        raise InvalidArgument(f"{where}.{name}", reason) from None
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        parameter_where = f"{where}.{name}.{parameter.name}"
        if parameter.kind in UNSUPPORTED_PARAMETER_KINDS:
            raise InvalidArgument(parameter_where, "must be a parameter that accepts a keyword argument")
        schema = build_schema(hints[parameter.name], parameter_where)
        text = parameter_descriptions.get(parameter.name)
        properties[parameter.name] = {**schema, "description": text} if text else schema
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(name=name, description=description, parameters=schema, function=function)


def _parse_number(text: str) -> float | int:
    """Return a JSON number, 3.0 as an integer: JSON has one number type."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _check_name(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(where, f"must be text, not {type(value).__name__}")
    if not NAME_PATTERN.fullmatch(value):
        raise InvalidArgument(where, f"must be 1 to 64 of the characters a-z A-Z 0-9 _ . -, not {value!r}")
    return value


def _get_optional(values: Mapping[str, Any], key: str, expected: type[Any], where: str) -> Any:
    value = values.get(key)
    if value is not None and not isinstance(value, expected):
        raise InvalidArgument(f"{where}.{key}", f"must be a {expected.__name__}, not {type(value).__name__}")
    return value


def _check_fields(value: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    if unknown := sorted(map(str, set(value) - known)):
        raise InvalidArgument(f"{where}.{unknown[0]}", f"is not a field; there are {', '.join(sorted(known))}")
