"""JSON schemas of Python functions, from type hints (by pydantic) and docstrings, and conversion of call arguments."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pydantic
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from afterglow.errors import InvalidArgument

GOOGLE_SECTION = re.compile(r"^(Args|Arguments|Parameters):\s*$")
GOOGLE_PARAMETER = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
NUMPY_SECTION = re.compile(r"^Parameters\s*\n-{3,}\s*$", re.MULTILINE)
NUMPY_PARAMETER = re.compile(r"^\*{0,2}(\w+)\s*(?::.*)?$")
SPHINX_PARAMETER = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")
SECTION_START = re.compile(r"^(?:[A-Z]\w*(?: \w+)?:\s*$|:\w+)")
UNDERLINE = re.compile(r"^-{3,}\s*$")


class SchemaGenerator(GenerateJsonSchema):
    """Writes keywords in their usual order, and no titles: they repeat the names of fields."""

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        """Return the schema with its keywords in the order in which they were written."""
        return value

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return whether a field without a title gets one."""
        return False


def get_parameter_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hint of every parameter, with its annotations; `Any` if it has none."""
    annotated = function.__init__ if inspect.isclass(function) else function
    hints = typing.get_type_hints(annotated, include_extras=True)
    return {name: hints.get(name, Any) for name in inspect.signature(function).parameters}


def build_schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type hint. `where` names the parameter in errors.

    >>> build_schema(list[int], "x")
    {'type': 'array', 'items': {'type': 'integer'}}
    """
    try:
        schema = _build_adapter(hint).json_schema(schema_generator=SchemaGenerator)
    except pydantic.PydanticUserError:
        raise InvalidArgument(where, f"has the hint {hint!r}, which is not a JSON type") from None
    except Exception as error:  # hooks of the type may raise anything
        raise InvalidArgument(where, f"has the hint {hint!r}, which is invalid: {error}") from None
    inlined = inline_references(schema["additionalProperties"], schema.get("$defs", {}), where)
    return {**_find_description(hint), **(inlined if isinstance(inlined, dict) else {})}


def convert_value(value: Any, hint: Any, name: str, where: str) -> Any:
    """Convert a JSON value to the hinted type; raise `InvalidArgument` if it does not match.

    >>> convert_value(["a", "a"], set[str], "x", "call")
    {'a'}
    """
    try:
        return _build_adapter(hint).validate_json(json.dumps({name: value}))[name]
    except pydantic.ValidationError as error:
        problems = [(where + _format_path(problem, {name: value}), problem["msg"]) for problem in error.errors()]
    place = problems[0][0]
    messages = dict.fromkeys(message for other, message in problems if other == place)
    raise InvalidArgument(place, "is invalid: " + " or ".join(messages))


def _build_adapter(hint: Any) -> pydantic.TypeAdapter[dict[str, Any]]:
    """Return the adapter of a dictionary with values of this type. `"1"` is no integer, and no field is unknown.

    The dictionary makes the configuration apply to dataclasses and errors begin with the name of the parameter.
    """
    return pydantic.TypeAdapter(dict[str, hint], config={"strict": True, "extra": "forbid"})


def _find_description(hint: Any) -> dict[str, str]:
    """Return the text or `Doc` among the annotations of a hint, as a schema. pydantic reads only `Field`."""
    for annotation in getattr(hint, "__metadata__", ()):
        text = annotation if isinstance(annotation, str) else getattr(annotation, "documentation", None)
        if isinstance(text, str):
            return {"description": text}
    return {}


def _format_path(problem: Mapping[str, Any], value: Any) -> str:
    """Return the path of a pydantic error in a JSON value, without pydantic's names of union members."""
    path = ""
    for key in problem["loc"]:
        if isinstance(value, list) and isinstance(key, int):
            path, value = f"{path}[{key}]", value[key]
        elif isinstance(value, dict) and (key in value or problem["type"] == "missing"):
            path, value = f"{path}.{key}", value.get(key, {})
    return path


def inline_references(schema: Any, definitions: Mapping[str, Any], where: str, ancestors: tuple[str, ...] = ()) -> Any:
    """Replace references to `$defs` by the definitions, so that the schema can be embedded in another one."""
    if isinstance(schema, list):
        return [inline_references(item, definitions, where, ancestors) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        if name in ancestors or name not in definitions:
            raise InvalidArgument(where, f"has a recursive or unknown definition {name!r} in its schema")
        target = {key: value for key, value in definitions[name].items() if key != "title"}
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {**inline_references(target, definitions, where, (*ancestors, name)), **rest}
    return {key: inline_references(value, definitions, where, ancestors) for key, value in schema.items()}


def parse_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the description and the description of each parameter (Google, NumPy or Sphinx style, best effort).

    >>> parse_docstring("Add.\\n\\nArgs:\\n    a: The first.")
    ('Add.', {'a': 'The first.'})
    """
    lines = docstring.splitlines()
    end = next((index for index in range(len(lines)) if _is_section_start(lines, index)), len(lines))
    sphinx_lines = [line for line in lines if not line.startswith(":") or SPHINX_PARAMETER.match(line)]
    sphinx_descriptions = _collect_descriptions(sphinx_lines, SPHINX_PARAMETER, 0)
    descriptions = _parse_google(lines) | _parse_numpy(lines) | sphinx_descriptions
    return "\n".join(lines[:end]).strip(), {name: " ".join(text.split()) for name, text in descriptions.items()}


def _is_section_start(lines: list[str], index: int) -> bool:
    underlined = index + 1 < len(lines) and UNDERLINE.match(lines[index + 1])
    return bool(SECTION_START.match(lines[index]) or underlined)


def _parse_google(lines: list[str]) -> dict[str, str]:
    start = next((index + 1 for index, line in enumerate(lines) if GOOGLE_SECTION.match(line)), len(lines))
    section = []
    for line in lines[start:]:
        if line.strip() and not line[0].isspace():
            break
        section.append(line)
    indents = [len(line) - len(line.lstrip()) for line in section if line.strip()]
    return _collect_descriptions(section, GOOGLE_PARAMETER, indents[0] if indents else 0)


def _parse_numpy(lines: list[str]) -> dict[str, str]:
    start = next(
        (index + 2 for index in range(len(lines) - 1) if NUMPY_SECTION.match("\n".join(lines[index : index + 2]))),
        len(lines),
    )
    end = next((index for index in range(start, len(lines)) if _is_section_start(lines, index)), len(lines))
    return _collect_descriptions(lines[start:end], NUMPY_PARAMETER, 0)


def _collect_descriptions(lines: list[str], parameter: re.Pattern[str], indent: int) -> dict[str, str]:
    """Return the description of each parameter: its first line and the deeper-indented lines below it."""
    descriptions: dict[str, str] = {}
    name = None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        match = parameter.match(line) if depth == indent else None
        if match:
            name = match[1]
            descriptions[name] = match[2] if parameter.groups > 1 else ""
        elif name is not None and line.strip() and depth > indent:
            descriptions[name] += " " + line
        elif line.strip():
            name = None
    return descriptions
