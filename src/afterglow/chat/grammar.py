"""What an answer may be, in llguidance's words: schemas, patterns, choices and grammars, and thoughts before them.

Whatever cannot be enforced is refused by name; nothing is ever ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from afterglow.chat.keywords import enforceable
from afterglow.chat.reasoning import ThoughtStyle
from afterglow.errors import InvalidArgument, InvalidGrammar, UnsupportedOption

Shape: TypeAlias = dict[str, Any]  # one grammar as llguidance lists them: {"lark_grammar": …} or {"json_schema": …}
Literal: TypeAlias = Callable[[str], str]  # how a text is written in a grammar; control tokens are no text
JSON_STYLE = {
    "whitespace_pattern": r"[ \n\t]{0,20}",  # free enough to indent; without a bound, models fill pages
    "json_allowed_escapes": 'nrbtf\\"',  # with \u, a name could be spelled so that its schema does not see it
}
KEYS = {
    "text": set(),
    "json_object": set(),
    "json_schema": {"json_schema"},
    "regex": {"pattern"},
    "choice": {"choices"},
    "grammar": {"grammar", "syntax"},
}


def quoted(text: str) -> str:
    """A text as a literal of a grammar.

    >>> print(quoted('say "hi"'))
    "say \\"hi\\""
    """
    return json.dumps(text, ensure_ascii=False)


def json_schema(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of all JSON texts that satisfy a schema; `UnsupportedOption` where a keyword cannot be enforced.

    >>> json_schema({"type": "integer"})[:12]
    '{"grammars":'
    """
    return grammar_of(schema_shape(schema))


def schema_shape(schema: Mapping[str, Any] | bool) -> Shape:
    if not isinstance(schema, Mapping | bool):
        raise InvalidArgument("json_schema", f"must be an object, not {type(schema).__name__}")
    try:
        plain = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgument("json_schema", f"is not JSON: {error}") from None
    plain = enforceable(plain)
    shape: Shape = {"json_schema": {**plain, "x-guidance": JSON_STYLE} if isinstance(plain, dict) else plain}
    check(shape)
    return shape


def regex_shape(pattern: str) -> Shape:
    """What a regular expression matches as a whole."""
    shape = {
        "lark_grammar": json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    }
    check(shape)
    return shape


def choice_shape(choices: Sequence[str]) -> Shape:
    """One of some texts."""
    return {"lark_grammar": "start: " + " | ".join(quoted(choice) for choice in choices)}


def grammar_shape(text: str, syntax: str) -> Shape:
    """A grammar in llguidance's dialect of Lark, or in llama.cpp's GBNF."""
    if syntax == "gbnf":
        try:
            text = any_to_lark(text)
        except Exception as error:  # its parser raises whatever it stumbles over
            raise InvalidGrammar(f"it is not GBNF: {error}") from None
    elif syntax != "lark":
        raise InvalidArgument("syntax", f"must be 'lark' or 'gbnf', not {syntax!r}")
    shape = {"lark_grammar": text}
    check(shape)
    return shape


def response_shape(value: Any, where: str = "response_format") -> Shape | None:
    """What a response format allows; None where everything.

    >>> response_shape({"type": "choice", "choices": ["yes", "no"]})
    {'lark_grammar': 'start: "yes" | "no"'}
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, f"must be an object with a `type`, not {type(value).__name__}")
    kind = value.get("type")
    if kind not in KEYS:
        raise InvalidArgument(f"{where}.type", f"must be one of {', '.join(KEYS)}, not {kind!r}")
    if unknown := sorted(set(value) - {"type"} - KEYS[kind]):
        raise InvalidArgument(f"{where}.{unknown[0]}", f"is not a field of the format {kind}")
    match kind:
        case "json_object":
            return schema_shape({"type": "object"})
        case "json_schema":
            return schema_shape(_named_schema(value.get("json_schema"), f"{where}.json_schema"))
        case "regex":
            return regex_shape(_text(value.get("pattern"), f"{where}.pattern"))
        case "choice":
            return choice_shape(_texts(value.get("choices"), f"{where}.choices"))
        case "grammar":
            return grammar_shape(_text(value.get("grammar"), f"{where}.grammar"), value.get("syntax", "lark"))
    return None


def either(*shapes: Shape) -> Shape:
    """What any of some shapes allows."""
    others: list[Shape] = []
    for index, shape in enumerate(shapes):
        first, *rest = flat(shape)
        others += [{"name": f"shape{index}", **first}, *rest]
    return {"lark_grammar": "start: " + " | ".join(f"@shape{index}" for index in range(len(shapes))), "others": others}


def without(texts: Sequence[str]) -> Shape:
    """Any text that contains none of some texts."""
    patterns = " | ".join(f"/(.|\\n)*/ {quoted(text)} /(.|\\n)*/" for text in texts)
    return {"lark_grammar": f"start: TEXT\nTEXT: /(.|\\n)*/ & ~FORBIDDEN\nFORBIDDEN: {patterns}"}


def prose() -> Shape:
    """Any text that does not begin as the calls do that families write without a mark: with a brace or a bracket."""
    return {"lark_grammar": "start: TEXT?\nTEXT: /[^\\[{\\s](.|\\n)*/"}


def grammar_of(shape: Shape) -> str:
    """A shape as the grammar of a whole answer."""
    return json.dumps({"grammars": flat(shape)}, ensure_ascii=False)


def after_thought(shape: Shape, style: ThoughtStyle, literal: Literal, *, open: bool) -> str:
    """The same with a thought before it: one that the prompt opened, or one that the model may open."""
    closes = literal(style.closes)
    if closes.startswith("<["):
        rest = f"rest: THOUGHT? {closes}\nTHOUGHT: /(.|\\n)+/"
    else:
        rest = f"rest[suffix={closes}]: /(.|\\n)*/"
    rest_and_gap = f"rest {literal(style.follows) if style.follows else 'gap'}"
    begin = rest_and_gap if open else f"({literal(style.opens)} {rest_and_gap})?"
    lark = f"start: {begin} @answer\n{rest}\ngap: /\\s{{0,8}}/"
    first, *others = flat(shape)
    return json.dumps({"grammars": [{"lark_grammar": lark}, {"name": "answer", **first}, *others]}, ensure_ascii=False)


def check(shape: Shape) -> None:
    """`UnsupportedOption` with the keywords that cannot be enforced, `InvalidGrammar` for all else that is wrong."""
    wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar_of(shape))
    if wrong and "Unimplemented keys" in messages[0]:
        raise UnsupportedOption("json_schema", f"cannot enforce {messages[0].partition(':')[2].strip()}")
    if wrong:
        raise InvalidGrammar(messages[0])


def flat(shape: Shape) -> list[Shape]:
    """The grammar and those that it refers to."""
    return [{key: value for key, value in shape.items() if key != "others"}, *shape.get("others", ())]


def _named_schema(value: Any, where: str) -> Any:
    """OpenAI's wrapper around a schema. `strict` is always true here: what cannot be enforced is refused."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, "must be an object with `name` and `schema`")
    if unknown := sorted(set(value) - {"name", "description", "schema", "strict"}):
        raise InvalidArgument(f"{where}.{unknown[0]}", "is not a field of it")
    if "schema" not in value:
        raise InvalidArgument(f"{where}.schema", "is missing")
    return value["schema"]


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(where, "must be a text that is not empty")
    return value


def _texts(value: Any, where: str) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidArgument(where, "must be a list of texts")
    return [_text(text, f"{where}[{index}]") for index, text in enumerate(value)]
