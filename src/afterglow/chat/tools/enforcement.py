"""Grammars of the calls of a request, cached by their tools, and what they do not enforce.

A schema may have keywords that no grammar can enforce. If its tool is not strict, the properties with such keywords are
left free, and its calls are checked after generation (`find_violation`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from afterglow.chat.constraints.grammar import LiteralFormatter, validate_spec
from afterglow.chat.constraints.schema_analysis import Resolver, build_resolver, get_type, is_equal
from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.tool import Tool
from afterglow.errors import InvalidGrammar, UnsupportedOption

MAX_CACHED_TOOL_SETS = 16  # agents send the same tools again and again
MAX_CACHED_LITERALS = 8192
MAX_CHECKED_DEPTH = 32
RELAXED_KEYWORDS = ("type", "properties", "required", "additionalProperties", "$defs", "definitions")

TriggerGrammars: TypeAlias = tuple[tuple[str, str], ...]  # trigger texts, each with its grammar


@dataclass(frozen=True, slots=True)
class CallGrammars:
    """Grammars by trigger; of whole answers, the trigger is empty. `unenforced` are tools with free properties."""

    grammars: TriggerGrammars
    unenforced: tuple[Tool, ...] = ()


class CallGrammarBuilder:
    """Builds the grammars of one family. Any thread may use it."""

    def __init__(self, family: ToolFamily, write_literal: LiteralFormatter) -> None:
        self._family = family
        # A literal is searched for control tokens, of which some vocabularies have thousands.
        self._write_literal: LiteralFormatter = functools.lru_cache(MAX_CACHED_LITERALS)(write_literal)
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, CallGrammars] = OrderedDict()

    def build_triggered(self, tools: Sequence[Tool]) -> CallGrammars:
        """Build the grammars of what follows each trigger of a call, as far as they can be enforced."""

        def build(offered: Sequence[Tool]) -> TriggerGrammars:
            return tuple(
                (trigger, self._family.build_after_trigger_grammar(offered, self._write_literal, trigger))
                for trigger in self._family.list_triggers(offered)
            )

        return self._get_or_build("triggered", tools, build)

    def build_calls(self, tools: Sequence[Tool], parallel: bool) -> CallGrammars:
        """Build the grammar of answers that are calls, as far as they can be enforced."""

        def build(offered: Sequence[Tool]) -> TriggerGrammars:
            return (("", self._family.build_calls_grammar(offered, parallel, self._write_literal)),)

        return self._get_or_build(f"calls {parallel}", tools, build)

    def _get_or_build(
        self, kind: str, tools: Sequence[Tool], build: Callable[[Sequence[Tool]], TriggerGrammars]
    ) -> CallGrammars:
        inputs = [None if tool.text_input is None else asdict(tool.text_input) for tool in tools]
        schemas = [(tool.name, tool.parameters, tool.strict, text) for tool, text in zip(tools, inputs, strict=True)]
        key = hashlib.blake2b(f"{kind} {json.dumps(schemas)}".encode()).digest()
        with self._lock:
            if (cached := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return cached
        grammars = _build_relaxed(tools, build)
        with self._lock:
            self._cache[key] = grammars
            if len(self._cache) > MAX_CACHED_TOOL_SETS:
                self._cache.popitem(last=False)
        return grammars


def _build_relaxed(tools: Sequence[Tool], build: Callable[[Sequence[Tool]], TriggerGrammars]) -> CallGrammars:
    """Build grammars in which the properties that cannot be enforced are free. Raises the error of a strict tool."""

    def build_valid(offered: Sequence[Tool]) -> TriggerGrammars:
        grammars = build(offered)
        for _, grammar in grammars:
            validate_spec({"lark_grammar": grammar})
        return grammars

    def can_enforce(tool: Tool) -> bool:
        try:
            build_valid([tool])
        except (UnsupportedOption, InvalidGrammar):
            return False
        return True

    try:
        return CallGrammars(build_valid(tools))
    except (UnsupportedOption, InvalidGrammar):
        unenforced = tuple(tool for tool in tools if not can_enforce(tool))
        if not unenforced:
            raise
        for tool in unenforced:
            if tool.must_conform:
                build_valid([tool])  # raises the error of this tool
        relaxed = [_relax(tool, can_enforce) if tool in unenforced else tool for tool in tools]
        return CallGrammars(build_valid(relaxed), unenforced)


def _relax(tool: Tool, can_enforce: Callable[[Tool], bool]) -> Tool:
    """Return the tool with free properties in place of those that cannot be enforced."""
    schema = {key: value for key, value in tool.parameters.items() if key in RELAXED_KEYWORDS}
    properties: Mapping[str, Any] = schema["properties"]

    def with_properties(schemas: Mapping[str, Any]) -> Tool:
        required = [name for name in schema.get("required", ()) if name in schemas]
        return replace(tool, parameters={**schema, "properties": dict(schemas), "required": required})

    def relax_property(name: str, subschema: Any) -> Any:
        json_type = subschema.get("type") if isinstance(subschema, Mapping) else None
        candidates = [subschema, {}]
        if isinstance(json_type, str):
            structure = {key: value for key, value in subschema.items() if key in (*RELAXED_KEYWORDS, "items")}
            candidates[1:1] = [structure, {"type": json_type}]
        return next((choice for choice in candidates if can_enforce(with_properties({name: choice}))), {})

    relaxed = with_properties({name: relax_property(name, subschema) for name, subschema in properties.items()})
    if can_enforce(relaxed):
        return relaxed
    return replace(tool, parameters={"type": "object", "properties": relaxed.parameters["properties"]})


# --- calls after generation


def find_violation(tool: Tool, arguments: str) -> str | None:
    """Return how the arguments of a call violate the schema of its tool; None if they do not.

    Checks types, listed values, required and additional properties, items, bounds and lengths. It does not match
    patterns, which may take exponential time.

    >>> find_violation(Tool(name="f", parameters={"properties": {"a": {"type": "integer"}}}), '{"a": "x"}')
    '`a` must be of the type integer, not string'
    """
    try:
        value = json.loads(arguments or "{}")
    except ValueError as error:
        return f"the arguments are not JSON: {error}"
    schema = {"type": "object", **tool.parameters}
    return next(_list_violations(value, schema, "", build_resolver(schema)), None)


def _list_violations(value: Any, schema: Any, where: str, resolve: Resolver, depth: int = 0) -> Iterator[str]:
    name = f"`{where}`" if where else "the arguments"
    if schema is False:
        yield f"{name} must not be set"
    if not isinstance(schema, Mapping) or depth > MAX_CHECKED_DEPTH:
        return
    if "$ref" in schema:
        yield from _list_violations(value, resolve(dict(schema)), where, resolve, depth + 1)
    yield from _list_type_violations(value, schema, name)
    yield from _list_bound_violations(value, schema, name)
    for choice in schema.get("allOf", ()):
        yield from _list_violations(value, choice, where, resolve, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        choices = schema.get(keyword, ())
        matches = sum(
            next(_list_violations(value, choice, where, resolve, depth + 1), None) is None for choice in choices
        )
        if choices and (matches == 0 or (keyword == "oneOf" and matches > 1)):
            yield f"{name} matches {matches} of the alternatives of {keyword}"
    if isinstance(value, dict):
        yield from _list_property_violations(value, schema, where, resolve, depth)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping | bool):
        for index, item in enumerate(value):
            yield from _list_violations(item, schema["items"], f"{where}[{index}]", resolve, depth + 1)


def _list_type_violations(value: Any, schema: Mapping[str, Any], name: str) -> Iterator[str]:
    types, found = schema.get("type"), get_type(value)
    allowed = [types] if isinstance(types, str) else types
    is_nullable = value is None and schema.get("nullable") is True
    if allowed and found not in allowed and not (found == "integer" and "number" in allowed) and not is_nullable:
        yield f"{name} must be of the type {' or '.join(map(str, allowed))}, not {found}"
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list) and not is_nullable and not any(is_equal(value, item) for item in listed):
        yield f"{name} must be one of {json.dumps(listed, ensure_ascii=False)}"


def _list_bound_violations(value: Any, schema: Mapping[str, Any], name: str) -> Iterator[str]:
    measured = {"integer": "imum", "number": "imum", "string": "Length", "array": "Items", "object": "Properties"}
    suffix = measured.get(get_type(value))
    if suffix is None:
        return
    size, unit = (value, "") if suffix == "imum" else (len(value), f" {suffix.lower()}")
    low, high = schema.get(f"min{suffix}"), schema.get(f"max{suffix}")
    if isinstance(low, int | float) and size < low:
        yield f"{name} must have at least {low}{unit}" if unit else f"{name} must be at least {low}"
    if isinstance(high, int | float) and size > high:
        yield f"{name} must have at most {high}{unit}" if unit else f"{name} must be at most {high}"


def _list_property_violations(
    value: dict[str, Any], schema: Mapping[str, Any], where: str, resolve: Resolver, depth: int
) -> Iterator[str]:
    properties = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            yield f"`{f'{where}.' if where else ''}{key}` is required"
    for key, item in value.items():
        path = f"{where}.{key}" if where else key
        if key in properties:
            yield from _list_violations(item, properties[key], path, resolve, depth + 1)
        elif "patternProperties" not in schema:
            yield from _list_violations(item, schema.get("additionalProperties", True), path, resolve, depth + 1)
