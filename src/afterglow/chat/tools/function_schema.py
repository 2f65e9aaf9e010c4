"""JSON schemas of Python functions: hints to schemas, JSON values to hinted types, descriptions from docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

import pydantic

from afterglow.errors import InvalidArgument

SCALAR_TYPES: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
SET_ORIGINS = (set, frozenset)
ARRAY_ORIGINS = (list, tuple, Sequence, *SET_ORIGINS)
OBJECT_ORIGINS = (dict, Mapping)
# Attributes of annotations, with the keyword of a schema.
ANNOTATED_LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
    "pattern": "pattern",
}
ANNOTATED_LENGTH_UNITS = {"array": "Items", "object": "Properties"}

GOOGLE_SECTION = re.compile(r"^(Args|Arguments|Parameters):\s*$")
GOOGLE_PARAMETER = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
NUMPY_SECTION = re.compile(r"^Parameters\s*\n-{3,}\s*$", re.MULTILINE)
NUMPY_PARAMETER = re.compile(r"^\*{0,2}(\w+)\s*(?::.*)?$")
SPHINX_PARAMETER = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")
SECTION_START = re.compile(r"^(?:[A-Z]\w*(?: \w+)?:\s*$|:\w+)")
UNDERLINE = re.compile(r"^-{3,}\s*$")


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
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if hint in (Any, inspect.Parameter.empty):
        return {}
    if hint in SCALAR_TYPES:
        return {"type": SCALAR_TYPES[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [build_schema(choice, where) for choice in arguments]}
    if origin is typing.Annotated:
        return _add_annotations(build_schema(arguments[0], where), arguments[1:])
    if origin in ARRAY_ORIGINS:
        return _build_array_schema(origin, arguments, where)
    if origin in OBJECT_ORIGINS:
        return _build_object_schema(arguments, where)
    return _build_class_schema(hint, where)


def _add_annotations(schema: dict[str, Any], annotations: Sequence[Any]) -> dict[str, Any]:
    """Add the descriptions and limits of `Annotated`: text, and objects of annotated_types or pydantic's `Field`."""
    unit = ANNOTATED_LENGTH_UNITS.get(schema.get("type", ""), "Length")
    for annotation in annotations:
        if isinstance(annotation, str):
            schema = {**schema, "description": annotation}
            continue
        description = getattr(annotation, "description", None) or getattr(annotation, "documentation", None)
        limits = {keyword: getattr(annotation, name, None) for name, keyword in ANNOTATED_LIMITS.items()}
        limits |= {f"{name}{unit}": getattr(annotation, f"{name}_length", None) for name in ("min", "max")}
        found = {"description": description, **limits}
        schema = {**schema, **{key: value for key, value in found.items() if isinstance(value, int | float | str)}}
        schema = _add_annotations(schema, getattr(annotation, "metadata", ()))  # the limits of `Field`
    return schema


def _build_array_schema(origin: Any, arguments: tuple[Any, ...], where: str) -> dict[str, Any]:
    if origin is tuple and arguments and arguments[1:] != (...,):
        raise InvalidArgument(where, "must be a list or a variable-length tuple: tuple[type, ...]")
    items = build_schema(arguments[0], where) if arguments else {}
    unique = {"uniqueItems": True} if origin in SET_ORIGINS else {}
    return {"type": "array", **({"items": items} if items else {}), **unique}


def _build_object_schema(arguments: tuple[Any, ...], where: str) -> dict[str, Any]:
    if arguments and arguments[0] is not str:
        raise InvalidArgument(where, "must be a dictionary with str keys: JSON has no others")
    values = build_schema(arguments[1], where) if arguments else {}
    return {"type": "object", **({"additionalProperties": values} if values else {})}


def _build_class_schema(hint: Any, where: str) -> dict[str, Any]:
    if not isinstance(hint, type):
        raise InvalidArgument(where, f"has the hint {hint!r}, which is not a JSON type")
    if issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        fields = dataclasses.fields(hint)
        return {
            "type": "object",
            "properties": {field.name: build_schema(hints[field.name], f"{where}.{field.name}") for field in fields},
            "required": [field.name for field in fields if _is_required(field)],
            "additionalProperties": False,
        }
    try:
        schema = pydantic.TypeAdapter(hint).json_schema()  # models, paths, dates, UUIDs, …
    except pydantic.PydanticUserError:
        schema = {}
    if not schema:
        raise InvalidArgument(where, f"has the hint {hint.__name__}, which is not a JSON type")
    inlined: dict[str, Any] = inline_references(schema, schema.get("$defs", {}), where)
    return inlined


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
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {**inline_references(definitions[name], definitions, where, (*ancestors, name)), **rest}
    return {
        key: inline_references(value, definitions, where, ancestors) for key, value in schema.items() if key != "$defs"
    }


def convert_value(value: Any, hint: Any, where: str) -> Any:
    """Convert a JSON value to the hinted type; raise `InvalidArgument` if it does not match."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if hint in (Any, inspect.Parameter.empty):
        return value
    if hint in SCALAR_TYPES:
        return _convert_scalar(value, hint, where)
    if origin is Literal:
        return _convert_choice(value, arguments, where)
    if origin in (Union, types.UnionType):
        return _convert_union(value, arguments, where)
    if origin is typing.Annotated:
        return _check_limits(convert_value(value, arguments[0], where), hint, where)
    if origin in ARRAY_ORIGINS:
        return _convert_list(value, origin, arguments, where)
    if origin in OBJECT_ORIGINS:
        _check_type(value, dict, "an object", where)
        item_hint = arguments[1] if arguments else Any
        return {key: convert_value(item, item_hint, f"{where}.{key}") for key, item in value.items()}
    return _convert_instance(value, hint, where)


def _check_limits(value: Any, hint: Any, where: str) -> Any:
    """Raise `InvalidArgument` if a value does not fit the annotations of its hint."""
    try:
        pydantic.TypeAdapter(hint, config={"arbitrary_types_allowed": True}).validate_python(value)
    except pydantic.ValidationError as error:
        raise InvalidArgument(where, error.errors()[0]["msg"]) from None
    except pydantic.PydanticUserError:  # a type with a configuration of its own, which checks itself
        pass
    return value


def _convert_scalar(value: Any, hint: Any, where: str) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if hint is int and type(value) is float and value.is_integer():
        return int(value)  # JSON has one number type: 3.0 is an integer
    if type(value) is not hint:
        raise InvalidArgument(
            where, f"must be {SCALAR_TYPES[hint]}, not {SCALAR_TYPES.get(type(value), type(value).__name__)}"
        )
    return value


def _convert_choice(value: Any, choices: tuple[Any, ...], where: str) -> Any:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    raise InvalidArgument(where, f"must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _convert_union(value: Any, choices: tuple[Any, ...], where: str) -> Any:
    # A value of exactly one member's type needs no conversion: 1 for `float | int` stays an int.
    for choice in choices:
        if type(value) is choice:
            return value
    reasons = []
    for choice in choices:
        try:
            return convert_value(value, choice, where)
        except InvalidArgument as error:
            reasons.append(error.reason)
    raise InvalidArgument(where, " or ".join(dict.fromkeys(reasons)))


def _convert_list(value: Any, origin: Any, arguments: tuple[Any, ...], where: str) -> Any:
    _check_type(value, list, "an array", where)
    item_hint = arguments[0] if arguments else Any
    items = [convert_value(item, item_hint, f"{where}[{index}]") for index, item in enumerate(value)]
    return origin(items) if origin in (tuple, *SET_ORIGINS) else items


def _convert_instance(value: Any, hint: Any, where: str) -> Any:
    if issubclass(hint, Enum):
        return hint(_convert_choice(value, tuple(member.value for member in hint), where))
    is_dataclass: bool = dataclasses.is_dataclass(hint)
    if not is_dataclass:
        try:
            return pydantic.TypeAdapter(hint).validate_python(value)
        except ValueError as error:  # pydantic.ValidationError is a ValueError
            raise InvalidArgument(where, f"is not a {hint.__name__}: {error}") from None
    _check_type(value, dict, "an object", where)
    hints = typing.get_type_hints(hint, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(hint)}
    if unknown := sorted(set(value) - set(fields)):
        raise InvalidArgument(f"{where}.{unknown[0]}", f"is not a field of {hint.__name__}")
    if missing := [name for name, field in fields.items() if _is_required(field) and name not in value]:
        raise InvalidArgument(f"{where}.{missing[0]}", "is required")
    return hint(**{key: convert_value(item, hints[key], f"{where}.{key}") for key, item in value.items()})


def _check_type(value: Any, expected: type[Any], description: str, where: str) -> None:
    if not isinstance(value, expected):
        raise InvalidArgument(where, f"must be {description}, not {type(value).__name__}")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def parse_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the description and the description of each parameter (Google, NumPy or Sphinx style, best effort).

    >>> parse_docstring("Add.\\n\\nArgs:\\n    a: The first.")
    ('Add.', {'a': 'The first.'})
    """
    lines = docstring.splitlines()
    end = next((index for index in range(len(lines)) if _is_section_start(lines, index)), len(lines))
    descriptions = _parse_google(lines) | _parse_numpy(lines) | _parse_sphinx(lines)
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


def _parse_sphinx(lines: list[str]) -> dict[str, str]:
    return _collect_descriptions(
        [line for line in lines if not line.startswith(":") or SPHINX_PARAMETER.match(line)], SPHINX_PARAMETER, 0
    )


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
