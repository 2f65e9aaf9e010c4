"""Output constraints as llguidance grammars: JSON schemas, regular expressions, choices, grammars, optional reasoning.

An option that cannot be enforced raises an error that names it; none is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import llguidance

from afterglow.chat.constraints.json_schema import to_enforceable_schema, to_llguidance_schema
from afterglow.chat.output.reasoning import ReasoningFormat
from afterglow.engine.types.constraints import convert_gbnf, describe_grammar_error
from afterglow.errors import InvalidArgument, InvalidGrammar, UnsupportedOption

# One llguidance grammar, {"lark_grammar": …} or {"json_schema": …}; "others" lists the grammars that it refers to.
GrammarSpec: TypeAlias = dict[str, Any]
LiteralFormatter: TypeAlias = Callable[[str], str]  # formats a text as grammar literals; control tokens by number
JSON_GRAMMAR_OPTIONS = {
    # The white space that templates write (`tojson`), and compact JSON. More would only cost tokens.
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',  # with \u, a property name could be spelled so that its schema does not match
}
RESPONSE_FORMAT_FIELDS = {
    "text": set(),
    "json_object": set(),
    "json_schema": {"json_schema"},
    "regex": {"pattern"},
    "choice": {"choices"},
    "grammar": {"grammar", "syntax"},
}


def quote_literal(text: str) -> str:
    """Quote a text as a grammar literal.

    >>> print(quote_literal('say "hi"'))
    "say \\"hi\\""
    """
    return json.dumps(text, ensure_ascii=False)


def build_json_schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """Build the grammar of all JSON texts that satisfy a schema; `UnsupportedOption` if a keyword cannot be enforced.

    >>> build_json_schema_grammar({"type": "integer"})[:12]
    '{"grammars":'
    """
    return build_grammar(build_json_schema_spec(schema))


def build_json_schema_spec(schema: Mapping[str, Any] | bool) -> GrammarSpec:
    if not isinstance(schema, Mapping | bool):
        raise InvalidArgument("json_schema", f"must be an object, not {type(schema).__name__}")
    try:
        plain = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgument("json_schema", f"is not JSON: {error}") from None
    plain = to_llguidance_schema(to_enforceable_schema(plain))
    spec: GrammarSpec = {
        "json_schema": {**plain, "x-guidance": JSON_GRAMMAR_OPTIONS} if isinstance(plain, dict) else plain
    }
    validate_spec(spec)
    return spec


def build_regex_spec(pattern: str) -> GrammarSpec:
    """Build the grammar of all texts that a regular expression matches completely."""
    grammar = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]
    spec = {"lark_grammar": grammar["lark_grammar"]}
    validate_spec(spec)
    return spec


def build_choice_spec(choices: Any, where: str) -> GrammarSpec:
    """Build the grammar that allows exactly these texts."""
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise InvalidArgument(where, "must be a list of texts")
    literals = [quote_literal(_check_text(text, f"{where}[{index}]")) for index, text in enumerate(choices)]
    return {"lark_grammar": "start: " + " | ".join(literals)}


def build_grammar_spec(text: str, syntax: str) -> GrammarSpec:
    """Build a spec from a grammar in llguidance's Lark dialect or in llama.cpp's GBNF."""
    if syntax == "gbnf":
        text = convert_gbnf(text)
    elif syntax != "lark":
        raise InvalidArgument("syntax", f"must be 'lark' or 'gbnf', not {syntax!r}")
    spec = {"lark_grammar": text}
    validate_spec(spec)
    return spec


def build_response_format_spec(value: Any, where: str = "response_format") -> GrammarSpec | None:
    """Build the grammar of a response format; None if it allows any text.

    >>> build_response_format_spec({"type": "choice", "choices": ["yes", "no"]})
    {'lark_grammar': 'start: "yes" | "no"'}
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, f"must be an object with a `type`, not {type(value).__name__}")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in RESPONSE_FORMAT_FIELDS:
        raise InvalidArgument(f"{where}.type", f"must be one of {', '.join(RESPONSE_FORMAT_FIELDS)}, not {kind!r}")
    if unknown := sorted(map(str, set(value) - {"type"} - RESPONSE_FORMAT_FIELDS[kind])):
        raise InvalidArgument(f"{where}.{unknown[0]}", f"is not a field of the format {kind}")
    match kind:
        case "json_object":
            return build_json_schema_spec({"type": "object"})
        case "json_schema":
            return build_json_schema_spec(_unwrap_schema(value.get("json_schema"), f"{where}.json_schema"))
        case "regex":
            return build_regex_spec(_check_text(value.get("pattern"), f"{where}.pattern"))
        case "choice":
            return build_choice_spec(value.get("choices"), f"{where}.choices")
        case "grammar":
            return build_grammar_spec(
                _check_text(value.get("grammar"), f"{where}.grammar"), value.get("syntax", "lark")
            )
    return None


def build_alternatives_spec(*specs: GrammarSpec) -> GrammarSpec:
    """Build the grammar that allows what any of the specs allows."""
    others: list[GrammarSpec] = []
    for index, spec in enumerate(specs):
        first, *rest = flatten_spec(spec)
        others += [{"name": f"shape{index}", **first}, *rest]
    return {"lark_grammar": "start: " + " | ".join(f"@shape{index}" for index in range(len(specs))), "others": others}


def build_exclusion_spec(texts: Sequence[str]) -> GrammarSpec:
    """Build the grammar of all texts that contain none of these texts."""
    patterns = " | ".join(f"/(.|\\n)*/ {quote_literal(text)} /(.|\\n)*/" for text in texts)
    return {"lark_grammar": f"start: TEXT\nTEXT: /(.|\\n)*/ & ~FORBIDDEN\nFORBIDDEN: {patterns}"}


def build_prose_spec() -> GrammarSpec:
    """Build the grammar of texts that do not begin with a brace or bracket, as tool calls without a marker do."""
    return {"lark_grammar": "start: TEXT?\nTEXT: /[^\\[{\\s](.|\\n)*/"}


def build_grammar(spec: GrammarSpec) -> str:
    """Return a spec as the grammar of a complete answer."""
    return json.dumps({"grammars": flatten_spec(spec)}, ensure_ascii=False)


def build_reasoning_grammar(
    spec: GrammarSpec, reasoning_format: ReasoningFormat, write_literal: LiteralFormatter, *, starts_in_reasoning: bool
) -> str:
    """Return the grammar of optional reasoning, or of the rest of it if the prompt opened it, and then `spec`."""
    end_tag = write_literal(reasoning_format.end_tag)
    if end_tag.startswith("<["):
        rest = f"rest: THOUGHT? {end_tag}\nTHOUGHT: /(.|\\n)+/"
    else:
        rest = f"rest[suffix={end_tag}]: /(.|\\n)*/"
    rest_and_gap = f"rest {write_literal(reasoning_format.answer_prefix) if reasoning_format.answer_prefix else 'gap'}"
    begin = rest_and_gap if starts_in_reasoning else f"({write_literal(reasoning_format.start_tag)} {rest_and_gap})?"
    lark = f"start: {begin} @answer\n{rest}\ngap: /\\s{{0,8}}/"
    first, *others = flatten_spec(spec)
    return json.dumps({"grammars": [{"lark_grammar": lark}, {"name": "answer", **first}, *others]}, ensure_ascii=False)


def validate_spec(spec: GrammarSpec) -> None:
    """Raise `UnsupportedOption` with the keywords that cannot be enforced, or `InvalidGrammar` for any other error."""
    is_invalid, messages = llguidance.LLMatcher.validate_grammar_with_warnings(build_grammar(spec))
    if is_invalid and "Unimplemented keys" in messages[0]:
        raise UnsupportedOption("json_schema", f"cannot enforce {messages[0].partition(':')[2].strip()}")
    if is_invalid:
        raise InvalidGrammar(describe_grammar_error(messages[0]))


def flatten_spec(spec: GrammarSpec) -> list[GrammarSpec]:
    """Return the grammar followed by those that it refers to."""
    return [{key: value for key, value in spec.items() if key != "others"}, *spec.get("others", ())]


def _unwrap_schema(value: Any, where: str) -> Any:
    """Unwrap OpenAI's `json_schema` object. `strict` has no effect: schemas are always enforced."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, "must be an object with `name` and `schema`")
    if unknown := sorted(map(str, set(value) - {"name", "description", "schema", "strict"})):
        raise InvalidArgument(f"{where}.{unknown[0]}", "is not a field of `json_schema`")
    if "schema" not in value:
        raise InvalidArgument(f"{where}.schema", "is missing")
    return value["schema"]


def _check_text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(where, "must be non-empty text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(where, "must not contain an unpaired surrogate: no model can generate it") from None
    return value
