"""What an answer may be, in llguidance's words: schemas, patterns, choices and grammars, and thoughts before them.

Whatever cannot be enforced is refused by name; nothing is ever ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from afterglow.chat.constraints.json_schema import to_enforceable_schema
from afterglow.chat.output.reasoning import ReasoningFormat
from afterglow.errors import InvalidArgument, InvalidGrammar, UnsupportedOption

GrammarSpec: TypeAlias = dict[
    str, Any
]  # one grammar as llguidance lists them: {"lark_grammar": …} or {"json_schema": …}
LiteralFormatter: TypeAlias = Callable[[str], str]  # how a text is written in a grammar; control tokens are no text
JSON_GRAMMAR_OPTIONS = {
    "whitespace_pattern": r"[ \n\t]{0,20}",  # free enough to indent; without a bound, models fill pages
    "json_allowed_escapes": 'nrbtf\\"',  # with \u, a name could be spelled so that its schema does not see it
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
    """A text as a literal of a grammar.

    >>> print(quoted('say "hi"'))
    "say \\"hi\\""
    """
    return json.dumps(text, ensure_ascii=False)


def build_json_schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of all JSON texts that satisfy a schema; `UnsupportedOption` where a keyword cannot be enforced.

    >>> json_schema({"type": "integer"})[:12]
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
    plain = to_enforceable_schema(plain)
    shape: GrammarSpec = {
        "json_schema": {**plain, "x-guidance": JSON_GRAMMAR_OPTIONS} if isinstance(plain, dict) else plain
    }
    validate_spec(shape)
    return shape


def build_regex_spec(pattern: str) -> GrammarSpec:
    """What a regular expression matches as a whole."""
    shape = {
        "lark_grammar": json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    }
    validate_spec(shape)
    return shape


def build_choice_spec(choices: Sequence[str]) -> GrammarSpec:
    """One of some texts."""
    return {"lark_grammar": "start: " + " | ".join(quote_literal(choice) for choice in choices)}


def build_grammar_spec(text: str, syntax: str) -> GrammarSpec:
    """A grammar in llguidance's dialect of Lark, or in llama.cpp's GBNF."""
    if syntax == "gbnf":
        try:
            text = any_to_lark(text)
        except Exception as error:  # its parser raises whatever it stumbles over
            raise InvalidGrammar(f"it is not GBNF: {error}") from None
    elif syntax != "lark":
        raise InvalidArgument("syntax", f"must be 'lark' or 'gbnf', not {syntax!r}")
    shape = {"lark_grammar": text}
    validate_spec(shape)
    return shape


def build_response_format_spec(value: Any, where: str = "response_format") -> GrammarSpec | None:
    """What a response format allows; None where everything.

    >>> response_shape({"type": "choice", "choices": ["yes", "no"]})
    {'lark_grammar': 'start: "yes" | "no"'}
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, f"must be an object with a `type`, not {type(value).__name__}")
    kind = value.get("type")
    if kind not in RESPONSE_FORMAT_FIELDS:
        raise InvalidArgument(f"{where}.type", f"must be one of {', '.join(RESPONSE_FORMAT_FIELDS)}, not {kind!r}")
    if unknown := sorted(set(value) - {"type"} - RESPONSE_FORMAT_FIELDS[kind]):
        raise InvalidArgument(f"{where}.{unknown[0]}", f"is not a field of the format {kind}")
    match kind:
        case "json_object":
            return build_json_schema_spec({"type": "object"})
        case "json_schema":
            return build_json_schema_spec(_unwrap_schema(value.get("json_schema"), f"{where}.json_schema"))
        case "regex":
            return build_regex_spec(_check_text(value.get("pattern"), f"{where}.pattern"))
        case "choice":
            return build_choice_spec(_check_texts(value.get("choices"), f"{where}.choices"))
        case "grammar":
            return build_grammar_spec(
                _check_text(value.get("grammar"), f"{where}.grammar"), value.get("syntax", "lark")
            )
    return None


def build_alternatives_spec(*specs: GrammarSpec) -> GrammarSpec:
    """What any of some shapes allows."""
    others: list[GrammarSpec] = []
    for index, shape in enumerate(specs):
        first, *rest = flatten_spec(shape)
        others += [{"name": f"shape{index}", **first}, *rest]
    return {"lark_grammar": "start: " + " | ".join(f"@shape{index}" for index in range(len(specs))), "others": others}


def build_exclusion_spec(texts: Sequence[str]) -> GrammarSpec:
    """Any text that contains none of some texts."""
    patterns = " | ".join(f"/(.|\\n)*/ {quote_literal(text)} /(.|\\n)*/" for text in texts)
    return {"lark_grammar": f"start: TEXT\nTEXT: /(.|\\n)*/ & ~FORBIDDEN\nFORBIDDEN: {patterns}"}


def build_prose_spec() -> GrammarSpec:
    """Any text that does not begin as the calls do that families write without a mark: with a brace or a bracket."""
    return {"lark_grammar": "start: TEXT?\nTEXT: /[^\\[{\\s](.|\\n)*/"}


def build_grammar(spec: GrammarSpec) -> str:
    """A shape as the grammar of a whole answer."""
    return json.dumps({"grammars": flatten_spec(spec)}, ensure_ascii=False)


def build_reasoning_grammar(
    spec: GrammarSpec, reasoning_format: ReasoningFormat, write_literal: LiteralFormatter, *, starts_in_reasoning: bool
) -> str:
    """The same with a thought before it: one that the prompt opened, or one that the model may open."""
    closes = write_literal(reasoning_format.end_tag)
    if closes.startswith("<["):
        rest = f"rest: THOUGHT? {closes}\nTHOUGHT: /(.|\\n)+/"
    else:
        rest = f"rest[suffix={closes}]: /(.|\\n)*/"
    rest_and_gap = f"rest {write_literal(reasoning_format.answer_prefix) if reasoning_format.answer_prefix else 'gap'}"
    begin = rest_and_gap if starts_in_reasoning else f"({write_literal(reasoning_format.start_tag)} {rest_and_gap})?"
    lark = f"start: {begin} @answer\n{rest}\ngap: /\\s{{0,8}}/"
    first, *others = flatten_spec(spec)
    return json.dumps({"grammars": [{"lark_grammar": lark}, {"name": "answer", **first}, *others]}, ensure_ascii=False)


def validate_spec(spec: GrammarSpec) -> None:
    """`UnsupportedOption` with the keywords that cannot be enforced, `InvalidGrammar` for all else that is wrong."""
    wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(build_grammar(spec))
    if wrong and "Unimplemented keys" in messages[0]:
        raise UnsupportedOption("json_schema", f"cannot enforce {messages[0].partition(':')[2].strip()}")
    if wrong:
        raise InvalidGrammar(messages[0])


def flatten_spec(spec: GrammarSpec) -> list[GrammarSpec]:
    """The grammar and those that it refers to."""
    return [{key: value for key, value in spec.items() if key != "others"}, *spec.get("others", ())]


def _unwrap_schema(value: Any, where: str) -> Any:
    """OpenAI's wrapper around a schema. `strict` is always true here: what cannot be enforced is refused."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, "must be an object with `name` and `schema`")
    if unknown := sorted(set(value) - {"name", "description", "schema", "strict"}):
        raise InvalidArgument(f"{where}.{unknown[0]}", "is not a field of it")
    if "schema" not in value:
        raise InvalidArgument(f"{where}.schema", "is missing")
    return value["schema"]


def _check_text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(where, "must be a text that is not empty")
    return value


def _check_texts(value: Any, where: str) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidArgument(where, "must be a list of texts")
    return [_check_text(text, f"{where}[{index}]") for index, text in enumerate(value)]
