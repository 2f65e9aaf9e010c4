"""JSON schemas as llguidance can enforce them. It rejects many keywords and ignores others. This module rewrites
keywords that have an equivalent, drops annotations, and rejects the rest by name, so that no keyword is ignored.

A rewritten schema is standard JSON Schema (2020-12) without references to other documents. Every instance of it is an
instance of the original; the reverse does not hold (properties have an order, integers have 64 bits).

The keyword lists come from JSON-Schema-Test-Suite and experiments (tests/chat/constraints/test_json_schema.py).
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import DefragResult, unquote, urldefrag, urljoin

import llguidance

from afterglow.chat.constraints.lark_regex import escape_regex
from afterglow.chat.constraints.schema_analysis import (
    ALL_TYPES,
    IN_PLACE_KEYWORDS,
    MAX_NESTED_SCHEMAS,
    JsonSchema,
    are_disjoint,
    get_types,
    iter_in_place,
    list_values,
    resolve_pointer,
)
from afterglow.chat.constraints.string_formats import TEXT_FORMAT_PATTERNS
from afterglow.engine.types.constraints import UNIQUE_ITEM_PLACEHOLDER
from afterglow.errors import InvalidArgument, UnsupportedOption

MAX_SCHEMA_DEPTH = 64
MAX_RESOLVED_REFERENCES = 50_000  # about a second

SCHEMA_KEYWORDS = frozenset(  # one schema
    {
        *("items", "additionalItems", "additionalProperties", "propertyNames", "not"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
SCHEMA_LIST_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})  # a list of schemas
DEFINITION_KEYWORDS = frozenset({"$defs", "definitions"})
SCHEMA_MAP_KEYWORDS = frozenset({"properties", "patternProperties", *DEFINITION_KEYWORDS})  # schemas by name
VALUE_KEYWORDS = frozenset({"enum", "const", "default", "examples"})  # no schemas
COUNT_KEYWORDS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
BOUND_KEYWORDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
APPLICATOR_KEYWORDS = frozenset({*IN_PLACE_KEYWORDS, "$ref"})
ITEM_KEYWORDS = frozenset({"items", "prefixItems", "additionalItems", "unevaluatedItems"})
ENFORCED_KEYWORDS = (SCHEMA_KEYWORDS | SCHEMA_LIST_KEYWORDS | SCHEMA_MAP_KEYWORDS | COUNT_KEYWORDS) | {
    *("type", "enum", "const", "$ref", "required", "format", "pattern", "multipleOf", "uniqueItems", "nullable"),
    *BOUND_KEYWORDS,
}
# Keywords of the drafts, and of other schema languages and validators, that decide which instances are valid. All other
# names are annotations: `then`, `else`, `minContains` and `maxContains` have no effect without `if` and `contains`.
UNENFORCED_KEYWORDS = frozenset(
    {
        *("if", "contains", "dependencies", "dependentRequired", "dependentSchemas", "propertyDependencies"),
        *("$dynamicRef", "$recursiveRef", "disallow", "divisibleBy", "extends"),
    }
)
FOREIGN_KEYWORDS = frozenset(
    {
        *("formatMinimum", "formatMaximum", "formatExclusiveMinimum", "formatExclusiveMaximum"),
        *("instanceof", "typeof", "uniqueItemProperties", "patternRequired", "allRequired", "anyRequired"),
        *("oneRequired", "deepRequired", "deepProperties", "prohibited", "optionalProperties", "elements", "bsonType"),
    }
)
DEPENDENT_KEYWORDS = frozenset({"dependencies", "dependentRequired", "dependentSchemas"})
# Unknown names that are probably misspelled keywords are errors. Short ones must agree except for case and signs:
# `note` is an annotation. So is a name with a prefix (`x-items`, `ui:items`).
MIN_SIMILAR_LETTERS, MIN_SIMILARITY = 6, 0.85
PLAIN_NAME = re.compile(r"(?!x-)\$?[A-Za-z][A-Za-z_-]*")
KEYWORD_LETTERS = {
    keyword: keyword.removeprefix("$").lower()
    for keyword in sorted(
        (ENFORCED_KEYWORDS - DEFINITION_KEYWORDS) | UNENFORCED_KEYWORDS | {"then", "else", "minContains", "maxContains"}
    )
}
# Keywords that decide which property names match. A name is a string: those of other types have no effect.
NAME_KEYWORDS = frozenset({"enum", "const", "pattern", "format", "minLength", "maxLength", "not", *APPLICATOR_KEYWORDS})
NAME_LIST_KEYWORDS = frozenset({"enum", "const", "anyOf", "allOf"})

# Control characters need \u escapes, which are not allowed (see grammar.JSON_GRAMMAR_OPTIONS); llguidance drops them.
CONTROL_CHARACTER = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
CONTROL_CHARACTER_ESCAPE = re.compile(r"\\(x[01]|x7[fF]|u00[01]|u007[fF]|[xu]\{|[cav0])")

YEAR_PATTERN, LEAP_YEAR_PATTERN = "[0-9]{4}", "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DATE_PATTERN = (
    f"({YEAR_PATTERN}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|{YEAR_PATTERN}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|{YEAR_PATTERN}-02-(0[1-9]|1[0-9]|2[0-8])|{LEAP_YEAR_PATTERN}-02-29)"
)
MINUTE_PATTERN = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME_PATTERN = rf"{MINUTE_PATTERN}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{MINUTE_PATTERN})"
UUID_PATTERN = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-%s-[0-9a-fA-F]{12}$"  # without the parts with the version and variant
# Formats that llguidance knows. All others are annotations.
STRING_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# Formats for which this module adds a pattern: llguidance allows 29 February in every year and a leap second in every
# minute, and lower-case letters that many parsers reject. It does not know versions of UUIDs.
FORMAT_PATTERNS = {
    "date": f"^{DATE_PATTERN}$",
    "time": f"^{TIME_PATTERN}$",
    "date-time": f"^{DATE_PATTERN}T{TIME_PATTERN}$",
    **{f"uuid{n}": UUID_PATTERN % f"{n}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}" for n in range(1, 9)},
}
# Formats of property names and of texts without quotes, for which llguidance has no formats.
COMPLETE_FORMAT_PATTERNS = {
    **FORMAT_PATTERNS,
    **TEXT_FORMAT_PATTERNS,
    "uuid": UUID_PATTERN % "[0-9a-fA-F]{4}-[0-9a-fA-F]{4}",
}
COMPLETE_PATTERN = re.compile(r"\^.*(?<!\\)\$", re.DOTALL)
# Pattern of texts of one class of characters: a length can be written into it.
REPEATED_CHARACTER = re.compile(
    r"\^(\[(?:[^\]\\]|\\.)+\]|\\[dwsDWS]|\.)([*+?]|\{(\d{1,9})\}|\{(\d{1,9}),(\d{0,9})\}|)\$"
)
# llguidance computes bounds as 64-bit floats and then as 64-bit integers: the largest float below 2^63, and the range
# in which floats are exact integers.
MAX_BOUND = 2**63 - 1024
MAX_EXACT_INTEGER = 2**53
INTEGER_FORMATS = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
    "int64": (-MAX_BOUND, MAX_BOUND),
    "uint64": (0, MAX_BOUND),
}

SCALAR_TYPES = ["null", "boolean", "number", "string"]
VALUE_TYPES = [*SCALAR_TYPES, "array", "object"]

# llguidance has no look-around. Zod and pydantic write some: leading assertions become patterns of their own.
LOOK_AHEAD = re.compile(r"\^?\(\?([=!])((?:[^()\\\[\]]|\\.|\[(?:[^\]\\]|\\.)*\])*)\)")
_SECONDS = r"\d+([.,]\d+)?S"
_TIME = rf"T(\d+H(\d+M)?({_SECONDS})?|\d+M({_SECONDS})?|{_SECONDS})"
EQUIVALENT_PATTERNS = {
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)({_TIME})?|{_TIME})$"
    ),
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
}
NEGATED_PATTERNS = {
    r"\.": r"^([^.][\s\S]*)?$",
    r".*\.\.": r"^([^.]|\.[^.])*\.?$",
    r".*W": "^[^W]*$",
    r"^[-+.]*$": "[^-+.]",
}


def to_enforceable_schema(schema: JsonSchema, where: str = "json_schema") -> JsonSchema:
    """Return an equivalent schema that can be enforced; `UnsupportedOption` for the first keyword that cannot be.

    >>> to_enforceable_schema({"type": "string", "title": "Name", "nullable": True, "maxLength": 2.0})
    {'type': ['string', 'null'], 'maxLength': 2}
    """
    return SchemaRewriter(schema, where).rewrite_root()


def to_llguidance_schema(schema: JsonSchema) -> JsonSchema:
    """Return an enforceable schema in llguidance's form: it does not know `uniqueItems`, which the engine enforces.

    An array of unique items gets an alternative item that no text matches and the engine can find (see
    `engine.sampling.json_text`). llguidance intersects the schemas that apply to an array: all with items must have it.
    """
    if not isinstance(schema, dict):
        return schema
    result = _map_subschemas(schema, lambda subschema, where: to_llguidance_schema(subschema), "")
    if result.pop("uniqueItems", False):
        result["items"] = {"anyOf": [result.get("items", True), UNIQUE_ITEM_PLACEHOLDER]}
        if "prefixItems" in result:
            result["prefixItems"] = [{"anyOf": [item, UNIQUE_ITEM_PLACEHOLDER]} for item in result["prefixItems"]]
    return result


class SchemaRewriter:
    """Rewrites one schema document. References become references to `$defs`."""

    def __init__(self, root: JsonSchema, where: str) -> None:
        self._root, self._where = root, where
        dialect = root.get("$schema") if isinstance(root, dict) else None
        draft = re.search(r"draft-0(\d)|draft/(\d{4})", dialect) if isinstance(dialect, str) else None
        self._draft = int(draft[1] or draft[2]) if draft else 2020  # number or year of the draft
        self._schemas: dict[str, Any] = {}  # by URI: resources with an `$id`, and anchors
        self._bases: dict[int, str] = {}  # base URI of each subschema, by its identity
        self._locations: dict[int, str] = {}
        # A schema that is referred to from arrays of unique items and from elsewhere has two definitions.
        self._definition_names: dict[tuple[int, bool], str] = {}
        self._definitions: dict[str, JsonSchema] = {}
        self._pending_definitions: list[tuple[str, dict[str, Any], bool]] = []
        self._mentions_unique_items = False
        self._resolved_references = 0
        self._references: list[dict[str, Any]] = []  # schemas with `$ref`
        self._collect(root, where, "", 0)
        for schema in self._references:  # it grows with what is collected
            self._collect_target(schema)

    def rewrite_root(self) -> JsonSchema:
        result = self._rewrite(self._root, self._where)
        while self._pending_definitions:  # a list, because a long chain of references would exceed the recursion limit
            name, target, is_unique = self._pending_definitions.pop(0)
            self._definitions[name] = self._rewrite(target, self._locations[id(target)], is_unique)
        if isinstance(result, dict) and self._definitions:
            result["$defs"] = self._definitions
        return result

    # --- references

    def _collect(self, schema: JsonSchema, where: str, base: str, depth: int) -> None:
        """Check the keywords of every subschema, and record its location, base URI and names."""
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidArgument(where, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise InvalidArgument(where, f"must be a schema, not {type(schema).__name__}")
        _check_keywords(schema, where, self._draft)
        base = self._record_names(schema, where, base if depth else "")
        self._bases[id(schema)], self._locations[id(schema)] = base, where
        self._mentions_unique_items |= "uniqueItems" in schema
        self._references += [schema] if "$ref" in schema else []
        for location, subschema in _list_subschemas(schema, where):
            self._collect(subschema, location, base, depth + 1)

    def _record_names(self, schema: dict[str, Any], where: str, base: str) -> str:
        """Record the `$id` and the anchors of a schema; return the base URI of its references."""
        keyword = "id" if self._draft == 4 else "$id"
        identifier = schema.get(keyword)
        if isinstance(identifier, str) and not ("$ref" in schema and self._draft <= 7):
            uri = _join_uri(base, identifier, f"{where}.{keyword}")
            if identifier.startswith("#") and self._draft <= 7:
                self._schemas[uri.geturl()] = schema
            else:
                base = uri.url
                self._schemas[base] = schema
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._schemas[f"{base}#{schema[keyword]}"] = schema
        return base

    def _collect_target(self, schema: dict[str, Any]) -> None:
        """Collect the schema that `$ref` of a schema refers to if it is below an unknown keyword, e.g. `components`."""
        document, fragment = self._split_reference(schema)
        target = self._find_target(document, fragment)
        names = fragment.split("/")[1:]
        is_unknown = bool(names) and names[0] not in ENFORCED_KEYWORDS | UNENFORCED_KEYWORDS | VALUE_KEYWORDS
        if is_unknown and isinstance(target, dict) and id(target) not in self._locations:
            self._collect(target, ".".join([self._where, *names]), document, 1)

    def _split_reference(self, schema: dict[str, Any]) -> tuple[str, str]:
        """Return the URI of the document that `$ref` of a schema refers to, and the fragment."""
        where, reference = f"{self._locations[id(schema)]}.$ref", schema["$ref"]
        if not isinstance(reference, str):
            raise InvalidArgument(where, f"must be text, not {type(reference).__name__}")
        uri = _join_uri(self._bases[id(schema)], reference, where)
        return uri.url, uri.fragment

    def _find_target(self, document: str, fragment: str) -> Any:
        if fragment and not fragment.startswith("/"):
            return self._schemas.get(f"{document}#{fragment}")
        return resolve_pointer(self._schemas.get(document, None if document else self._root), unquote(fragment))

    def resolve(self, schema: dict[str, Any]) -> JsonSchema:
        """Return the schema that `$ref` of a schema refers to."""
        where = f"{self._locations[id(schema)]}.$ref"
        self._resolved_references += 1
        if self._resolved_references > MAX_RESOLVED_REFERENCES:  # alternatives that refer to each other many times
            raise UnsupportedOption(where, f"comparing alternatives takes over {MAX_RESOLVED_REFERENCES:,} references")
        target = self._find_target(*self._split_reference(schema))
        if isinstance(target, bool) or id(target) in self._locations:
            return target
        raise UnsupportedOption(where, f"{schema['$ref']} does not refer to a schema of this document")

    def _define(self, schema: dict[str, Any], is_unique: bool) -> JsonSchema:
        """Return a reference to the definition of the schema that `$ref` of a schema refers to."""
        target = self.resolve(schema)
        if isinstance(target, bool):
            return target
        key = (id(target), is_unique)
        name = self._definition_names.get(key)
        if name is None:
            name = self._definition_names[key] = f"d{len(self._definition_names)}"
            self._definitions[name] = True  # reserves the position; replaced by `rewrite_root`
            self._pending_definitions.append((name, target, is_unique))
        return {"$ref": f"#/$defs/{name}"}

    # --- keywords

    def _rewrite(self, schema: JsonSchema, where: str, is_unique: bool = False) -> JsonSchema:
        """Return the schema without keywords that cannot be enforced. With `is_unique`, a schema around it that applies
        to the same instance has `uniqueItems`.
        """
        if isinstance(schema, bool):
            return schema
        enforced = ENFORCED_KEYWORDS & set(schema) - DEFINITION_KEYWORDS
        if "$ref" in schema and (self._draft <= 7 or enforced == {"$ref"}):  # siblings have no meaning in these drafts
            return self._define(schema, is_unique)
        is_outermost = not is_unique
        is_unique = is_unique or self._has_unique_items_in_place(schema)
        kept = {key: value for key, value in schema.items() if key in enforced - {"propertyNames", "not"}}
        result: dict[str, Any] = {}
        for key, value in kept.items():  # their order decides on that of properties
            is_part_unique = is_unique and key in IN_PLACE_KEYWORDS
            result |= _map_subschemas({key: value}, partial(self._rewrite, is_unique=is_part_unique), where)
        self._rewrite_reference(schema, result, is_unique)
        _rewrite_counts(result, where)
        _rewrite_items(result)
        _rewrite_bounds(result, where)
        _rewrite_format(result, self._list_patterns(schema) if "format" in result else [], where)
        _rewrite_pattern(result)
        _rewrite_unevaluated(result, where)
        self._rewrite_one_of(schema, result, where)
        self._rewrite_unique_items(schema, result, where, is_unique, is_outermost)
        self._rewrite_property_names(schema, result, where)
        if not _rewrite_not(schema, result, where):
            return False
        return _rewrite_nullable(result, where)

    def _rewrite_reference(self, schema: dict[str, Any], result: dict[str, Any], is_unique: bool) -> None:
        if "$ref" not in schema:
            return
        target = self._define(schema, is_unique)
        if isinstance(target, bool):
            del result["$ref"]
            result["allOf"] = [*result.get("allOf", []), target]
        else:
            result["$ref"] = target["$ref"]

    def _list_patterns(self, schema: dict[str, Any]) -> list[JsonSchema]:
        """Return schemas of the patterns that apply to the texts of a schema."""
        found: list[JsonSchema] = []
        for part in self._list_in_place(schema, ("allOf",)):
            if isinstance(part.get("pattern"), str):
                found.append({"pattern": part["pattern"]})
                _rewrite_pattern(found[-1])
        return found

    def _rewrite_one_of(self, schema: dict[str, Any], result: dict[str, Any], where: str) -> None:
        """Write `oneOf` as `anyOf`, which is the same if no instance matches two alternatives."""
        if "oneOf" not in result:
            return
        self._check_exclusive(schema["oneOf"], where)
        any_of = {"anyOf": result.pop("oneOf")}
        if "anyOf" in result:
            result["allOf"] = [*result.get("allOf", []), any_of]
        else:
            result.update(any_of)

    def _check_exclusive(self, choices: list[JsonSchema], where: str) -> None:
        """Raise `UnsupportedOption` unless certainly no instance matches two alternatives of `oneOf`."""
        for index, choice in enumerate(choices):
            for other in range(index):
                if not are_disjoint(choice, choices[other], self.resolve):
                    raise UnsupportedOption(
                        f"{where}.oneOf",
                        f"an instance may match both alternative {other} and {index}; use anyOf, or give them "
                        "different types or a required property with different constants",
                    )

    def _has_unique_items_in_place(self, schema: dict[str, Any]) -> bool:
        """Whether every array that matches a schema has unique items: by itself, a reference or a member of `allOf`.

        Raise `UnsupportedOption` if that depends on an alternative and the items do not.
        """
        if not self._mentions_unique_items:
            return False
        parts = self._list_in_place(schema, ("allOf",))
        if any(part.get("uniqueItems") for part in parts):
            return True
        alternatives = [
            self._list_in_place({keyword: part[keyword]}, IN_PLACE_KEYWORDS)
            for part in parts
            for keyword in ("anyOf", "oneOf")
            if keyword in part
        ]
        sources = [[part] for part in parts if ITEM_KEYWORDS & set(part)]
        sources += [
            choices for choices in alternatives if any({"uniqueItems", *ITEM_KEYWORDS} & set(c) for c in choices)
        ]
        unique = [choice for choices in alternatives for choice in choices if choice.get("uniqueItems")]
        if not unique or "array" not in get_types(schema, self.resolve):
            return False
        where = f"{self._locations[id(unique[0])]}.uniqueItems"
        if len(sources) > 1:
            raise UnsupportedOption(where, "an alternative must have it together with its `items`")
        if any(self._contains_unique_items(part) for source in sources for part in source):
            raise UnsupportedOption(
                where, "arrays of unique items cannot contain each other, nor an alternative to them"
            )
        return False

    def _list_in_place(self, schema: dict[str, Any], keywords: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return the schemas that apply to the same instance, but those whose keywords a `$ref` replaces."""
        parts = iter_in_place(schema, self.resolve, keywords)
        return [part for part in parts if "$ref" not in part or self._draft > 7]

    def _rewrite_unique_items(
        self, schema: dict[str, Any], result: dict[str, Any], where: str, is_unique: bool, is_outermost: bool
    ) -> None:
        """Set `uniqueItems` if the engine has to enforce it: at the items of each schema that applies to the array.

        The outermost of these schemas gets items if it has none: an alternative may have none either.
        """
        unique = result.pop("uniqueItems", False)
        if not isinstance(unique, bool):
            raise InvalidArgument(f"{where}.uniqueItems", f"must be true or false, not {unique!r}")
        if not is_unique or "array" not in get_types(schema, self.resolve) or result.get("maxItems", 2) < 2:
            return
        has_prefix = bool(result.get("prefixItems"))
        if not has_prefix and result.get("items", True) in (True, {}):
            if not is_outermost:
                return
            others = self._list_in_place(schema, IN_PLACE_KEYWORDS)[1:]
            has_other_items = any(ITEM_KEYWORDS & set(part) for part in others)
            result["items"] = {"type": VALUE_TYPES if has_other_items else SCALAR_TYPES}
        if has_prefix:
            result["prefixItems"] = [_declare_types(item) for item in result["prefixItems"]]
        else:
            result["items"] = _declare_types(result["items"])
        values = None if has_prefix else list_values(schema.get("items"), self.resolve)
        if values is not None:
            if len(values) < result.get("minItems", 0):
                raise InvalidArgument(f"{where}.minItems", f"is more than the {len(values)} different items")
            result["maxItems"] = min(len(values), result.get("maxItems", len(values)))
        elif self._contains_unique_items(schema):
            raise UnsupportedOption(f"{where}.uniqueItems", "arrays of unique items cannot contain each other")
        result["uniqueItems"] = True

    def _contains_unique_items(self, schema: dict[str, Any]) -> bool:
        """Whether the items of a schema are or contain arrays of unique items."""
        items = {key: schema[key] for key in ITEM_KEYWORDS & set(schema)}
        pending, visited = [subschema for _, subschema in _list_subschemas(items, "")], set()
        while pending:
            part = pending.pop()
            if not isinstance(part, dict) or id(part) in visited:
                continue
            visited.add(id(part))
            if part.get("uniqueItems"):
                return True
            pending += [subschema for _, subschema in _list_subschemas(part, "")]
            pending += [self.resolve(part)] if "$ref" in part else []
        return False

    def _rewrite_property_names(self, schema: dict[str, Any], result: dict[str, Any], where: str) -> None:
        """Write `propertyNames` as properties or as patterns."""
        where = f"{where}.propertyNames"
        names = self._simplify_name_schema(schema.get("propertyNames", True), where)
        if names is True:
            return
        values = list_values(names, self.resolve)
        if values is not None:
            # More than `enum` and `const` may decide which names are allowed.
            keywords = {key for part in iter_in_place(names, self.resolve) for key in part}
            if unenforced := sorted(keywords - NAME_LIST_KEYWORDS):
                raise UnsupportedOption(f"{where}.{unenforced[0]}", "cannot be enforced beside a list of names")
            allowed = [value for value in values if isinstance(value, str)]
            if result.get("patternProperties"):
                raise UnsupportedOption(where, "cannot be enforced beside patternProperties")
            others = result.get("additionalProperties", True)
            properties = result.get("properties", {})
            result["properties"] = {
                **{name: value if name in allowed else False for name, value in properties.items()},
                **{name: others for name in allowed if name not in properties},
            }
            result["additionalProperties"] = False
        elif set(names) <= {"minLength", "maxLength"}:
            _limit_name_lengths(result, names, where)
        elif result.get("patternProperties") or "properties" in result:
            raise UnsupportedOption(where, "cannot be enforced beside properties and patternProperties")
        else:
            pattern = _build_name_pattern(names, where)
            result["patternProperties"] = {pattern: result.get("additionalProperties", True)}
            result["additionalProperties"] = False

    def _simplify_name_schema(self, schema: JsonSchema, where: str, depth: int = MAX_NESTED_SCHEMAS) -> JsonSchema:
        """Return a schema that matches the same strings, without references and what applies to other types."""
        if isinstance(schema, bool):
            return schema
        if depth == 0:
            raise UnsupportedOption(where, f"more than {MAX_NESTED_SCHEMAS} schemas inside each other")
        simplify = partial(self._simplify_name_schema, where=where, depth=depth - 1)
        if "$ref" in schema and self._draft <= 7:
            return simplify(self.resolve(schema))
        result = _select_name_keywords(schema, where)
        members = [simplify(member) for member in result.pop("allOf", [])]
        if result.pop("$ref", None) is not None:
            members.append(simplify(self.resolve(schema)))
        if "oneOf" in result:
            self._check_exclusive(result["oneOf"], where)
        for key in ("anyOf", "oneOf"):
            if key in result:
                members.append(_unite([simplify(choice) for choice in result.pop(key)]))
        if "not" in result:
            negated = simplify(result.pop("not"))
            members.append(not negated if isinstance(negated, bool) else {"not": negated})
        return _intersect([_may_be_string(schema), result or True, *members])


def _join_uri(base: str, reference: str, where: str) -> DefragResult:
    """Return the URI of a reference below a base URI, split at its fragment.

    >>> _join_uri("https://example.org/a.json", "b.json#x", "$ref").url
    'https://example.org/b.json'
    """
    try:
        return urldefrag(urljoin(base, reference))
    except ValueError as error:
        raise InvalidArgument(where, f"is not a URI: {error}") from None


def _list_subschemas(schema: dict[str, Any], where: str) -> list[tuple[str, JsonSchema]]:
    """Return the direct subschemas with their locations. Values (`const`, `enum`, `default`) are not schemas."""
    found: list[tuple[str, JsonSchema]] = []
    _map_subschemas(schema, lambda subschema, location: found.append((location, subschema)), where)
    return found


def _map_subschemas(
    schema: dict[str, Any], function: Callable[[JsonSchema, str], JsonSchema], where: str
) -> dict[str, Any]:
    """Return the schema with `function(subschema, location)` in place of each direct subschema."""
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            result[key] = {name: function(subschema, f"{where}.{key}.{name}") for name, subschema in value.items()}
        elif key in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            result[key] = [function(subschema, f"{where}.{key}[{index}]") for index, subschema in enumerate(value)]
        else:
            result[key] = function(value, f"{where}.{key}") if key in SCHEMA_KEYWORDS else value
    return result


# --- property names, as `SchemaRewriter._simplify_name_schema` returns their schemas


def _select_name_keywords(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the keywords of a schema that decide which strings match."""
    result = {key: value for key, value in schema.items() if key in NAME_KEYWORDS}
    _rewrite_counts(result, where)
    if not isinstance(result.get("pattern", ""), str):
        raise InvalidArgument(f"{where}.pattern", f"must be text, not {type(result['pattern']).__name__}")
    if str(result.get("format")) not in COMPLETE_FORMAT_PATTERNS:
        result.pop("format", None)
    return result


def _may_be_string(schema: dict[str, Any]) -> bool:
    """Return whether the types and listed values of a schema include strings."""
    types = schema.get("type", "string")
    values = list_values({key: schema[key] for key in ("enum", "const") if key in schema}, lambda reference: True)
    is_listed = values is None or any(isinstance(value, str) for value in values)
    return is_listed and "string" in ([types] if isinstance(types, str) else types)


def _unite(schemas: list[JsonSchema]) -> JsonSchema:
    """Return the schema that matches what any of the schemas matches."""
    if True in schemas:
        return True
    possible = [schema for schema in schemas if schema is not False]
    return {"anyOf": possible} if len(possible) > 1 else possible[0] if possible else False


def _intersect(schemas: list[JsonSchema]) -> JsonSchema:
    """Return the schema that matches what all of the schemas match."""
    if False in schemas:
        return False
    members = [schema for schema in schemas if schema is not True]
    members = [member for schema in members for member in schema.get("allOf", [schema])]
    return {"allOf": members} if len(members) > 1 else members[0] if members else True


def _limit_name_lengths(result: dict[str, Any], lengths: dict[str, int], where: str) -> None:
    """Forbid names of other lengths. No pattern of other properties may match such a name: llguidance compares them."""
    low, high = lengths.get("minLength", 0), lengths.get("maxLength")
    patterns = {
        _limit_pattern_length(pattern, low, high, where): value
        for pattern, value in result.get("patternProperties", {}).items()
    }
    if low > 0:
        patterns[f"^(?s:.{{0,{low - 1}}})$"] = False
    if high is not None:
        patterns[f"^(?s:.{{{high + 1},}})$"] = False
    result["patternProperties"] = patterns


def _build_name_pattern(schema: dict[str, Any], where: str) -> str:
    """Return the pattern of the names that match a schema. llguidance cannot intersect patterns of names."""
    patterns: set[str] = set()
    low, high = 0, None
    for part in schema.get("allOf", [schema]):
        if unenforced := sorted(set(part) - NAME_KEYWORDS | set(part) & {"not", "allOf"}):
            raise UnsupportedOption(f"{where}.{unenforced[0]}", "cannot be enforced on names")
        patterns.update(_list_name_patterns(part, where))
        low = max(low, part.get("minLength", 0))
        high = min((value for value in (high, part.get("maxLength")) if value is not None), default=None)
    if len(patterns) > 1:
        raise UnsupportedOption(where, "several patterns or formats of names cannot be enforced together")
    if not patterns:
        return f"^(?s:.{{{low},{'' if high is None else high}}})$"
    return _limit_pattern_length(patterns.pop(), low, high, where)


def _list_name_patterns(schema: dict[str, Any], where: str) -> list[str]:
    """Return patterns of which the names that match a schema match all, apart from their lengths."""
    patterns = []
    if "anyOf" in schema:
        patterns.append("|".join(f"(?:{_build_name_pattern(choice, where)})" for choice in schema["anyOf"]))
    values = list_values(schema, lambda reference: True) if {"enum", "const"} & set(schema) else None
    if values is not None:
        patterns.append(f"^(?:{'|'.join(escape_regex(value) for value in values if isinstance(value, str))})$")
    own_pattern = schema.get("pattern", "")
    if own_pattern:
        own_pattern = EQUIVALENT_PATTERNS.get(own_pattern, own_pattern)
        if LOOK_AHEAD.match(own_pattern):
            raise UnsupportedOption(f"{where}.pattern", "look-around cannot be enforced on names")
        patterns.append(own_pattern)
    # A pattern of the complete text says more exactly what the author means by the format.
    if "format" in schema and not COMPLETE_PATTERN.fullmatch(own_pattern):
        patterns.append(COMPLETE_FORMAT_PATTERNS[schema["format"]])
    return patterns


def _limit_pattern_length(pattern: str, low: int, high: int | None, where: str) -> str:
    """Return the pattern of the texts within a length that match a pattern.

    >>> _limit_pattern_length("^[a-z]+$", 0, 3, "names")
    '^[a-z]{1,3}$'
    """
    if high is None and (low == 0 or (low == 1 and not _matches_empty_text(pattern))):
        return pattern
    match = REPEATED_CHARACTER.fullmatch(pattern)
    if match is None:
        raise UnsupportedOption(where, f"the length of names cannot be enforced beside the pattern {pattern}")
    bounds = {"*": (0, None), "+": (1, None), "?": (0, 1), "": (1, 1)}
    count, minimum, maximum = match[3], match[4], match[5]
    lowest, highest = bounds.get(match[2], (int(count or minimum or 0), int(count or maximum or 0) or None))
    lowest = max(low, lowest)
    highest = min((value for value in (high, highest) if value is not None), default=None)
    if highest is not None and highest < lowest:
        raise UnsupportedOption(where, f"no name of this length matches {pattern}")
    return f"^{match[1]}{{{lowest},{'' if highest is None else highest}}}$"


def _matches_empty_text(pattern: str) -> bool:
    """Return whether a pattern may match the empty text."""
    try:
        return re.search(pattern, "") is not None
    except re.error:  # another dialect
        return True


# --- checks


def _check_keywords(schema: dict[str, Any], where: str, draft: int) -> None:
    for key in schema:
        if key == "x-guidance":
            raise UnsupportedOption(f"{where}.{key}", "it would change the interpretation of the whole schema")
        if key in UNENFORCED_KEYWORDS | FOREIGN_KEYWORDS and _has_effect(schema, key, draft):
            raise UnsupportedOption(f"{where}.{key}", "this keyword cannot be enforced")
        if (keyword := _find_misspelled_keyword(key)) is not None:
            raise UnsupportedOption(f"{where}.{key}", f"is not a keyword; did you mean `{keyword}`?")
    _check_shapes(schema, where)
    _check_values(schema, where)
    minimum, enforceable = schema.get("minProperties", 0), max(1, len(schema.get("required", ())))
    if isinstance(minimum, int | float) and minimum > enforceable:
        # The model may repeat a name, which then counts once.
        raise UnsupportedOption(f"{where}.minProperties", f"more than {enforceable} needs as many names in `required`")


def _has_effect(schema: dict[str, Any], key: str, draft: int) -> bool:
    """Return whether a keyword that cannot be enforced may decide which instances are valid."""
    if any(name.startswith("unevaluated") for name in schema):  # what the keyword matches is evaluated
        return True
    if key == "if":
        return any(schema.get(name, True) not in (True, {}) for name in ("then", "else"))
    if key == "contains":
        return draft <= 7 or schema.get("minContains", 1) != 0 or "maxContains" in schema
    if key in DEPENDENT_KEYWORDS and isinstance(schema[key], dict):
        return any(value not in (True, {}, []) for value in schema[key].values())
    return True


def _find_misspelled_keyword(name: str) -> str | None:
    """Return the keyword that an unknown name probably means.

    >>> _find_misspelled_keyword("min_length"), _find_misspelled_keyword("requried"), _find_misspelled_keyword("unit")
    ('minLength', 'required', None)
    """
    if name in KEYWORD_LETTERS or not PLAIN_NAME.fullmatch(name):
        return None
    letters = re.sub("[^a-z]", "", name.lower())
    similar = {
        keyword_letters: keyword
        for keyword, keyword_letters in KEYWORD_LETTERS.items()
        if letters == keyword_letters
        or (
            min(len(letters), len(keyword_letters)) >= MIN_SIMILAR_LETTERS
            and abs(len(letters) - len(keyword_letters)) <= 1
        )
    }
    nearest = difflib.get_close_matches(letters, similar, n=1, cutoff=MIN_SIMILARITY)
    return similar[nearest[0]] if nearest else None


def _check_shapes(schema: dict[str, Any], where: str) -> None:
    """Raise `InvalidArgument` for a keyword whose value has the wrong type."""
    for key in sorted(set(schema) & {*SCHEMA_MAP_KEYWORDS, *SCHEMA_LIST_KEYWORDS, "required", "enum"} - {"items"}):
        expected = dict if key in SCHEMA_MAP_KEYWORDS else list
        if not isinstance(schema[key], expected):
            raise InvalidArgument(f"{where}.{key}", f"must be {expected.__name__}, not {type(schema[key]).__name__}")
    for key in ("type", "required"):
        names = [schema[key]] if isinstance(schema.get(key), str) else schema.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidArgument(f"{where}.{key}", f"must be a list of names, not {schema[key]!r}")


def _check_values(schema: dict[str, Any], where: str) -> None:
    """Raise `UnsupportedOption` for characters and numbers that cannot be generated or compared."""
    patterns = {"pattern": [schema.get("pattern")], "patternProperties": list(schema.get("patternProperties") or ())}
    for key, values in patterns.items():
        texts = [text for text in values if isinstance(text, str)]
        if any(CONTROL_CHARACTER.search(text) or CONTROL_CHARACTER_ESCAPE.search(text) for text in texts):
            raise UnsupportedOption(f"{where}.{key}", "control characters cannot be generated")
    for key in ("const", "enum"):
        for value in _iter_scalars(schema.get(key)):
            if isinstance(value, str) and CONTROL_CHARACTER.search(value):
                raise UnsupportedOption(f"{where}.{key}", "control characters cannot be generated")
            if isinstance(value, int | float) and (abs(value) > MAX_BOUND or float(value) != value):
                raise UnsupportedOption(f"{where}.{key}", f"{value!r} has more digits than can be enforced")


def _iter_scalars(value: Any) -> Iterator[Any]:
    """Yield all texts and numbers in a value."""
    if isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _iter_scalars(item)
    else:
        yield value


# --- rewriting of single keywords; `result` changes in place


def _rewrite_counts(result: dict[str, Any], where: str) -> None:
    """Write counts as integers: 2.0 is an integer in JSON Schema."""
    for key in COUNT_KEYWORDS & set(result):
        value = result[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise InvalidArgument(f"{where}.{key}", f"must be an integer from 0, not {value!r}")
        result[key] = int(value)


def _rewrite_items(result: dict[str, Any]) -> None:
    """Write the list form of `items` of older drafts as `prefixItems`."""
    others = result.pop("additionalItems", None)
    if isinstance(result.get("items"), list):
        result["prefixItems"] = result.pop("items")
        if others is not None:
            result["items"] = others


def _declare_types(item: JsonSchema) -> JsonSchema:
    """Name all types in a schema that matches everything: llguidance would drop the alternatives to it."""
    if item is True:
        return {"type": VALUE_TYPES}
    is_open = get_types(item, lambda reference: False) == frozenset(ALL_TYPES)  # a reference keeps its alternatives
    return {**item, "type": VALUE_TYPES} if is_open and "type" not in item else item


def _rewrite_format(result: dict[str, Any], patterns: list[JsonSchema], where: str) -> None:
    """Keep formats of strings that can be enforced, and write formats of integers as bounds."""
    if "format" not in result:
        return
    name = result["format"]
    if not isinstance(name, str):
        raise InvalidArgument(f"{where}.format", f"must be text, not {type(name).__name__}")
    types = result.get("type", list(ALL_TYPES))
    is_enforced = "string" in types and name in STRING_FORMATS | set(FORMAT_PATTERNS)
    is_enforced = is_enforced and not _contradicts(name, patterns)
    if not is_enforced or name not in STRING_FORMATS:
        del result["format"]
    all_of, pattern = result.get("allOf", []), {"pattern": FORMAT_PATTERNS.get(name)}
    if is_enforced and name in FORMAT_PATTERNS and pattern not in all_of:
        result["allOf"] = [*all_of, pattern]
    if "integer" in types and "type" in result and name in INTEGER_FORMATS:
        low, high = INTEGER_FORMATS[name]
        result["minimum"] = max(low, result.get("minimum", low))
        result["maximum"] = min(high, result.get("maximum", high))


def _contradicts(name: str, patterns: list[JsonSchema]) -> bool:
    """Return whether no text of a format matches these schemas of patterns.

    A format is an annotation of the standard: the author of such a pattern means another notation of it.
    """
    if not patterns:
        return False
    known = {"format": name} if name in STRING_FORMATS else {}
    members = [*patterns, {"pattern": FORMAT_PATTERNS.get(name, "")}]
    grammar = {"json_schema": {"type": "string", **known, "allOf": members}}
    return "Unsatisfiable" in llguidance.LLMatcher.validate_grammar(json.dumps({"grammars": [grammar]}))


def _rewrite_bounds(result: dict[str, Any], where: str) -> None:
    """Write bounds as numbers that llguidance compares exactly."""
    for key in BOUND_KEYWORDS:
        value = result.get(key)
        if isinstance(value, bool):  # draft 4: makes the other bound exclusive
            result.pop(key)
            inclusive = f"m{key.removeprefix('exclusiveM')}"
            if key.startswith("exclusive") and value and inclusive in result:
                result[key] = value = result.pop(inclusive)
        if key not in result:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument(f"{where}.{key}", f"must be a number, not {value!r}")
        if abs(value) >= MAX_EXACT_INTEGER:
            _tighten_bound(result, key, result.pop(key))


def _tighten_bound(result: dict[str, Any], key: str, value: float) -> None:
    """Add a bound beyond the exact integers: the next float inside, at most `MAX_BOUND`."""
    is_lower, is_exclusive = key.lower().endswith("minimum"), key.startswith("exclusive")
    sign = 1 if is_lower else -1
    value *= sign  # as a lower bound
    if value < -MAX_BOUND:
        bound = -float(MAX_BOUND)
    elif value > MAX_BOUND:
        bound = 2.0 * MAX_BOUND  # nothing is above: llguidance reports an empty range
    else:
        bound = float(value)
        if bound < value or (is_exclusive and bound == value):
            bound = math.nextafter(bound, math.inf)
    bound = int(bound) * sign
    inclusive = "minimum" if is_lower else "maximum"
    result[inclusive] = (max if is_lower else min)(bound, result.get(inclusive, bound))


def _rewrite_pattern(result: dict[str, Any]) -> None:
    """Write leading look-aheads as patterns of their own."""
    pattern = result.get("pattern")
    if not isinstance(pattern, str) or not pattern.startswith("^"):
        return
    others: list[str] = []
    rest = result["pattern"] = EQUIVALENT_PATTERNS.get(pattern, pattern)
    while (match := LOOK_AHEAD.match(rest)) is not None:
        is_negative, assertion = match[1] == "!", match[2]
        if is_negative and assertion not in NEGATED_PATTERNS:
            return  # llguidance reports it
        others.append(NEGATED_PATTERNS[assertion] if is_negative else f"^({assertion})")
        rest = "^" + rest[match.end() :]
    if others:
        result["pattern"] = rest
        result["allOf"] = [*result.get("allOf", []), *({"pattern": other} for other in others)]


def _rewrite_unevaluated(result: dict[str, Any], where: str) -> None:
    """Write `unevaluated…` as `additionalProperties` or `items`, which is the same without subschemas in place."""
    for key, others in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        value = result.pop(key, True)
        if value in (True, {}) or others in result:
            continue
        if APPLICATOR_KEYWORDS & set(result):
            raise UnsupportedOption(f"{where}.{key}", "cannot be enforced beside allOf, anyOf, oneOf and $ref")
        result[others] = value


def _rewrite_not(schema: dict[str, Any], result: dict[str, Any], where: str) -> bool:
    """Write `not` as other types; return False if nothing matches the schema."""
    negated = schema.get("not", False)
    if isinstance(negated, dict):
        negated = {key: value for key, value in negated.items() if key in ENFORCED_KEYWORDS} or True
    if isinstance(negated, bool):
        return not negated
    if set(negated) != {"type"}:
        raise UnsupportedOption(f"{where}.not", "only `not` of types can be enforced")
    excluded = {negated["type"]} if isinstance(negated["type"], str) else set(negated["type"])
    excluded |= {"integer"} if "number" in excluded else set()
    types = result.get("type", [name for name in ALL_TYPES if name != "integer"])
    types = [types] if isinstance(types, str) else types
    if "integer" in excluded and "number" in types and "number" not in excluded:
        raise UnsupportedOption(f"{where}.not", "integers cannot be excluded from numbers")
    result["type"] = [name for name in types if name not in excluded]
    return bool(result["type"])


def _rewrite_nullable(result: dict[str, Any], where: str) -> JsonSchema:
    """Allow null beside what `nullable` of OpenAPI 3.0 applies to."""
    nullable = result.pop("nullable", False)
    if not isinstance(nullable, bool):
        raise InvalidArgument(f"{where}.nullable", f"must be true or false, not {nullable!r}")
    if not nullable:
        return result
    types = result.get("type")
    if types is not None and not {"enum", "const", *APPLICATOR_KEYWORDS} & set(result):
        types = [types] if isinstance(types, str) else types
        return {**result, "type": [*types, *(["null"] if "null" not in types else [])]}
    return {"anyOf": [result, {"type": "null"}]}
