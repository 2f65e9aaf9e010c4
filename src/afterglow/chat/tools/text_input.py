"""Text inputs of tools: the schema that enforces their grammar, and conversion between the text and the arguments
`{"input": "…"}` that models write.

Models know functions with arguments, so that a tool with a text input is a function with one string, written as the
family of the model writes strings. Its grammar becomes the `pattern` of that string (`constraints.lark_regex`): each
family adds its own escapes, quotes and tags, and the text inside always matches.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from afterglow.chat.constraints.grammar import validate_spec
from afterglow.chat.constraints.lark_regex import convert_lark
from afterglow.chat.tools.parsing.json_values import repair_surrogates
from afterglow.chat.tools.tool import TEXT_PARAMETER, TextInput, Tool
from afterglow.errors import InvalidArgument, InvalidGrammar, UnsupportedOption

TEXT_START = re.compile(rf'\s*\{{\s*"{TEXT_PARAMETER}"\s*:\s*"')
# Whole characters of a JSON string: an escaped surrogate pair is one character.
WHOLE_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)


def build_enforced_parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema that a call of the tool must satisfy: its parameters, or those of its text input.

    >>> from afterglow.chat.tools.tool import TextInput, build_text_tool
    >>> tool = build_text_tool("pick", "", TextInput("regex", "[ab]"), where="tools[0]")
    >>> build_enforced_parameters(tool)["properties"]
    {'input': {'type': 'string', 'pattern': '^(?:[ab])$'}}
    """
    if tool.text_input is None or tool.text_input.syntax == "text":
        return tool.parameters
    try:
        pattern = build_pattern(tool.text_input)
    except (InvalidGrammar, UnsupportedOption) as error:
        raise InvalidArgument(f"tools.{tool.name}.format.definition", error.reason) from None
    return {**tool.parameters, "properties": {TEXT_PARAMETER: {"type": "string", "pattern": pattern}}}


@functools.lru_cache(maxsize=64)  # agents use the same grammars again and again
def build_pattern(text_input: TextInput) -> str:
    """Return the pattern of a text input that has a grammar. Raises if it cannot be enforced."""
    expression = text_input.definition
    if text_input.syntax == "lark":
        expression = convert_lark(expression)
    else:
        expression = expression.removeprefix("^")
        expression = expression[:-1] if expression.endswith("$") and not expression.endswith("\\$") else expression
    pattern = f"^(?:{expression})$"
    validate_spec({"json_schema": {"type": "string", "pattern": pattern}})
    return pattern


def wrap_text_input(text: str) -> str:
    """Return the arguments of a call with this text.

    >>> wrap_text_input("ls")
    '{"input": "ls"}'
    """
    return json.dumps({TEXT_PARAMETER: text}, ensure_ascii=False)


def unwrap_text_input(arguments: str) -> str:
    """Return the text in the arguments of a call. Arguments of another form, which only unconstrained models write, are
    the text of their only member, or the text as it is.

    >>> unwrap_text_input('{"input": "ls"}'), unwrap_text_input("ls")
    ('ls', 'ls')
    """
    try:
        values: Any = json.loads(arguments, strict=False)
    except ValueError:
        return arguments
    if isinstance(values, dict):
        text = values.get(TEXT_PARAMETER, next(iter(values.values())) if len(values) == 1 else None)
    else:
        text = values
    return repair_surrogates(text) if isinstance(text, str) else arguments


class TextInputReader:
    """Unwraps arguments that arrive in pieces.

    >>> reader = TextInputReader()
    >>> [reader.feed('{"inp'), reader.feed('ut": "a\\\\'), reader.feed('nb"}'), reader.finish()]
    ['', 'a', '\\nb', '']
    """

    def __init__(self) -> None:
        self._pending = ""  # not decoded yet
        self._is_open = False  # inside the string
        self._is_closed = False

    def feed(self, arguments: str) -> str:
        """Add a piece of the arguments and return the text that it completes."""
        if self._is_closed:
            return ""
        self._pending += arguments
        if not self._is_open:
            start = TEXT_START.match(self._pending)
            if start is None:
                return ""
            self._is_open, self._pending = True, self._pending[start.end() :]
        whole = WHOLE_CHARACTERS.match(self._pending)
        assert whole is not None  # it matches the empty text
        self._pending = self._pending[whole.end() :]
        self._is_closed = self._pending.startswith('"')
        return _decode(whole[0])

    def finish(self) -> str:
        """Return the rest of the text: of arguments that end early, or have another form."""
        if self._is_closed or self._is_open:
            return ""
        self._is_closed = True
        return unwrap_text_input(self._pending)


def _decode(escaped: str) -> str:
    try:
        text: str = json.loads(f'"{escaped}"', strict=False)
    except ValueError:  # an escape that JSON does not have
        return escaped
    return repair_surrogates(text)
