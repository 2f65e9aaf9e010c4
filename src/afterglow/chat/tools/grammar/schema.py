"""Grammar rules for arguments that are not written as JSON. Rejects schema keywords that the rules cannot enforce."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from afterglow.chat.constraints.json_schema import COMPLETE_FORMAT_PATTERNS
from afterglow.chat.constraints.schema_analysis import build_resolver, get_type, get_types, list_conjuncts
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.grammar.patterns import build_choice_expression, complete_pattern
from afterglow.chat.tools.tool import Tool
from afterglow.errors import UnsupportedOption

OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "$defs"})
ARRAY_KEYWORDS = frozenset({"type", "items", "prefixItems", "minItems", "maxItems", "$defs"})
STRING_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength", "$defs"})
CDATA_START, CDATA_END = "<![CDATA[", "]]>"
MAX_REFERENCE_DEPTH = 8  # nested references; a recursive schema cannot be expanded


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """Part of an enforceable schema, with its path in errors (`where`), the document of its references (`root`) and the
    tool family that writes it."""

    schema: Mapping[str, Any]
    where: str
    root: Mapping[str, Any]
    family: str
    references_left: int = MAX_REFERENCE_DEPTH

    def create_child(self, schema: Any, name: str = "") -> SchemaNode:
        """Return the node of a subschema."""
        where = f"{self.where}.{name}" if name else self.where
        return replace(self, schema=schema if isinstance(schema, Mapping) else {}, where=where)

    @property
    def allowed_types(self) -> frozenset[str]:
        """Types that values may have. "number" comes with "integer"."""
        return get_types(self.schema, build_resolver(self.root))

    def build_error(self, keyword: str, reason: str) -> UnsupportedOption:
        """Return the error for a keyword that the call format does not support."""
        return UnsupportedOption(f"{self.where}.{keyword}", f"the {self.family} call format {reason}")

    def has_only(self, keywords: frozenset[str]) -> bool:
        """Return whether the schema has no other keywords."""
        return set(self.schema) <= keywords

    def check_keywords(self, supported: frozenset[str]) -> None:
        """Raise `UnsupportedOption` for a keyword that is not supported."""
        for keyword in self.schema:
            if keyword not in supported:
                raise self.build_error(keyword, "cannot enforce it")

    def expand_choices(self) -> list[SchemaNode]:
        """Return the alternatives of this schema that have values, each of one type; follows references."""
        choices = [choice for choice in self._list_choices() if choice.allowed_types and choice.allowed_values != []]
        if not choices:
            raise UnsupportedOption(self.where, "no value matches its schema")
        return choices

    def _list_choices(self) -> list[SchemaNode]:
        schema = self.schema
        if "anyOf" in schema:
            self.check_keywords(frozenset({"anyOf"}))
            return [node for choice in schema["anyOf"] for node in self.create_child(choice)._list_choices()]
        if "$ref" in schema:
            if self.references_left == 0:
                raise self.build_error("$ref", "cannot enforce recursion")
            self.check_keywords(frozenset({"$ref"}))
            target = build_resolver(self.root)(dict(schema))
            return replace(self, schema=target, references_left=self.references_left - 1)._list_choices()
        types = schema.get("type")
        if isinstance(types, list):
            return [self.create_child({**schema, "type": json_type}) for json_type in types]
        if types is None and "enum" in schema:
            by_type: dict[str, list[Any]] = {}
            for value in schema["enum"]:
                by_type.setdefault(get_type(value), []).append(value)
            return [self.create_child({**schema, "enum": values}) for values in by_type.values()]
        if types is None and "const" not in schema:
            allowed = self.allowed_types - ({"integer"} if "number" in self.allowed_types else set())
            return [self.create_child({**schema, "type": json_type}) for json_type in sorted(allowed)]
        return [self]

    @property
    def standalone_schema(self) -> dict[str, Any]:
        """Schema with the definitions of its document."""
        return {**self.schema, "$defs": self.root.get("$defs", {})}

    @property
    def allowed_values(self) -> list[Any] | None:
        """Values listed by `const` or `enum`, without texts of other lengths; None if the schema lists none."""
        schema = self.schema
        values: list[Any] | None = [schema["const"]] if "const" in schema else schema.get("enum")
        low, high = schema.get("minLength", 0), schema.get("maxLength", math.inf)
        return values and [value for value in values if not isinstance(value, str) or low <= len(value) <= high]


@dataclass(frozen=True, slots=True)
class ToolParameter:
    """Parameter of a tool, or property of an object inside one."""

    name: str
    node: SchemaNode
    required: bool


def create_root(tool: Tool, family: str) -> SchemaNode:
    """Return the node of the parameters of a tool."""
    return SchemaNode(tool.parameters, f"tools.{tool.name}.parameters", tool.parameters, family)


def list_properties(node: SchemaNode) -> list[ToolParameter]:
    """Return the properties of an object in schema order."""
    node.check_keywords(OBJECT_KEYWORDS)
    properties, required = node.schema.get("properties", {}), node.schema.get("required", ())
    if missing := [name for name in required if name not in properties]:
        raise UnsupportedOption(f"{node.where}.required", f"{missing[0]!r} is not in the properties")
    return [
        ToolParameter(name, node.create_child(schema, name), name in required) for name, schema in properties.items()
    ]


def has_named_properties(node: SchemaNode) -> bool:
    """Return whether all properties of an object are in its schema. Those beside them are left out if they may be
    anything."""
    others = node.schema.get("additionalProperties", True)
    return not isinstance(others, Mapping) and ("properties" in node.schema or others is False)


def build_text_until_rule(
    grammar: LarkGrammar, node: SchemaNode, *, ending: str, allow_own_lines: bool = False, first: str = "."
) -> str:
    """Return a rule for the unquoted text of a string schema up to and including `ending`.

    With `allow_own_lines`, a newline may surround the text. `first` is the class of its first character.
    """
    if expressions := list(iter_expressions(node)):
        own_line = grammar.literal("\n") if allow_own_lines else ""
        text = grammar.add_pattern_until_rule(
            expressions,
            "\n" + ending if allow_own_lines else ending,
            excluded=ending,
            excluded_start="" if first == "." else "<",
        )
        return f"{own_line} {text}"
    if node.allowed_values is not None:
        allowed = [value for value in node.allowed_values if isinstance(value, str)]
        texts = join_alternatives(grammar.literal(value) for value in allowed if value)
        texts += "?" if "" in allowed else ""
        newline = grammar.literal("\n")
        own_lines = f"({newline} {texts} {newline} | {texts})" if allow_own_lines else texts
        return f"{own_lines} {grammar.literal(ending)}"
    min_length, max_length = node.schema.get("minLength", 0), node.schema.get("maxLength")
    if allow_own_lines and (min_length or max_length is not None):
        newline = grammar.literal("\n")
        text = grammar.add_text_until_rule("\n" + ending, min_length=min_length, max_length=max_length)
        return f"{newline} {text}"
    return grammar.add_text_until_rule(ending, min_length=min_length, max_length=max_length, first=first)


def iter_expressions(node: SchemaNode) -> Iterator[str]:
    """Yield expressions that all match the whole text of a string schema; none if it has only `STRING_KEYWORDS`."""
    if node.has_only(STRING_KEYWORDS):
        return
    conjuncts = list_conjuncts(node.schema, build_resolver(node.root))
    for conjunct in (conjunct for conjunct in conjuncts if isinstance(conjunct, dict)):
        part = node.create_child(conjunct)
        part.check_keywords(STRING_KEYWORDS | {"pattern", "format", "allOf", "$ref"})
        patterns = {keyword: conjunct.get(keyword) for keyword in ("pattern", "format")}
        patterns["format"] = COMPLETE_FORMAT_PATTERNS.get(str(patterns["format"]))
        for keyword, pattern in patterns.items():
            if pattern is not None:
                expression = complete_pattern(pattern)
                if expression is None:
                    raise part.build_error(keyword, "cannot enforce anchors inside a pattern")
                yield expression
        if part.allowed_values is not None:
            yield build_choice_expression([value for value in part.allowed_values if isinstance(value, str)])
        if {"minLength", "maxLength"} & set(conjunct):
            yield f"(?s:.{{{conjunct.get('minLength', 0)},{conjunct.get('maxLength', '')}}})"


def build_items_rule(
    grammar: LarkGrammar, node: SchemaNode, build_item: Callable[[SchemaNode], str], separator: str = ""
) -> str:
    """Return a rule for the items of an array, which `build_item` builds, with separators between them."""
    schema, between = node.schema, grammar.literals(separator)
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    others = schema.get("items", True)
    items = [
        build_item(node.create_child(item, f"prefixItems[{index}]"))
        for index, item in enumerate(schema.get("prefixItems", ())[:high])
    ]
    rest = ""
    if others is not False and (high is None or high > len(items)):
        item = grammar.add_rule(build_item(node.create_child(others, "items")))
        items = items or [item]
        bounds = f"{max(low - len(items), 0)},{'' if high is None else high - len(items)}"
        rest = f"({between} {item}){{{bounds}}}"
    elif low > len(items):
        raise node.build_error("minItems", f"is {low}, but there are at most {len(items)} items")
    for index, item in reversed(list(enumerate(items))):
        rest = f"{between if index else ''} {item} {rest}"
        rest = rest if index < low else f"({rest})?"
    return rest


def build_bare_or_json_rule(
    grammar: LarkGrammar, node: SchemaNode, *, ending: str, allow_own_lines: bool, has_cdata: bool = False
) -> str:
    """Return a rule for a value up to and including `ending`: strings unquoted, other types as JSON.

    With `has_cdata`, a string that begins like markup is in a CDATA section, and others may be.
    """
    alternatives = []
    first, space = "[^<]" if has_cdata else ".", "SPACE?" if allow_own_lines else ""
    for choice in node.expand_choices():
        values = choice.allowed_values
        if "string" not in choice.allowed_types or (values is not None and get_type(values[0]) != "string"):
            json_rule = grammar.add_json_rule(choice.standalone_schema)
            value = join_alternatives([json_rule, *build_python_constants(grammar, choice)])
            alternatives.append(f"{space} {value} {space} {grammar.literal(ending)}")
            continue
        if has_cdata:
            section = build_text_until_rule(grammar, choice, ending=CDATA_END)
            alternatives.append(f"{grammar.literal(CDATA_START)} {section} {grammar.literal(ending)}")
        alternatives.append(
            build_text_until_rule(grammar, choice, ending=ending, allow_own_lines=allow_own_lines, first=first)
        )
    return join_alternatives(alternatives)


def build_python_constants(grammar: LarkGrammar, node: SchemaNode) -> list[str]:
    """Return literals for True, False and None, the only values of these types in Python. Many templates write them as
    Python does, and so do their models."""
    if node.allowed_types == {"null"}:
        return [grammar.literal("None")]
    if node.allowed_types != {"boolean"}:
        return []
    allowed = [True, False] if node.allowed_values is None else node.allowed_values
    return [grammar.literal(str(value)) for value in allowed if isinstance(value, bool)]


def build_separated_rule(grammar: LarkGrammar, members: list[tuple[str, bool]], separator: str) -> str:
    """Return a rule for (member, required) pairs in order: all required ones, any optional ones, with separators."""
    # Built from the end. `first` and `rest` match the remaining members if none, or some, came before them.
    first = rest = ""
    for member, required in reversed(members):
        as_first, as_rest = f"{member} {rest}", f"{grammar.literal(separator)} {member} {rest}"
        first = as_first if required else f"({as_first} | {first})" if first else f"({as_first})?"
        rest = grammar.add_rule(as_rest if required else f"{as_rest} | {rest}" if rest else f"({as_rest})?")
    return grammar.add_rule(first) if first else ""
