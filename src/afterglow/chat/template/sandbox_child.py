"""Child process that renders chat templates: a template from a model file is untrusted input.

Reads one JSON object per line (template, variables, conversations, separator, now) and writes one list per line: the
text, or error and line, of each conversation. A conversation is an object of further variables.
Limits memory and output size here; the parent process limits the time. Separators in names and texts (see
`chat.control_tokens`) change neither the order of sorted values nor which member a name finds.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.filters import make_multi_attrgetter

MEMORY_LIMIT_BYTES = 1024**3
MAX_OUTPUT_CHARACTERS = 16 * 1024**2
ALLOWED_LIST_METHODS = frozenset({"append", "extend", "insert", "pop"})  # on lists created by the template


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` delimits assistant text for training; rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 (declared like this in jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class RequestDict(dict[str, Any]):
    """An object of the request. A name finds its member also if only one of the two has separators."""

    def __init__(self, members: dict[str, Any], separator: str) -> None:
        super().__init__(members)
        self._separator = separator

    def _find(self, key: Any) -> Any:
        """Return the own name that is equal to `key` without separators, or `key`."""
        if super().__contains__(key) or not isinstance(key, str):
            return key
        plain = key.replace(self._separator, "")
        return next((name for name in self if name.replace(self._separator, "") == plain), key)

    def __missing__(self, key: Any) -> Any:
        found = self._find(key)
        if not super().__contains__(found):
            raise KeyError(key)
        return self[found]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._find(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._find(key), default)


class ReadOnlyList(list[Any]):
    """A list of the request. Templates must not modify it."""


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox in which templates may modify lists that they create. Some do, to pair tool calls with results;
    transformers rejects those."""

    separator = ""  # of the request that is rendered

    def get_sort_key(self, value: Any, case_sensitive: bool) -> Any:
        """Return the value by which a value is sorted: text without separators."""
        if not isinstance(value, str):
            return value
        text = value.replace(self.separator, "") if self.separator else value
        return text if case_sensitive else text.lower()

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is list and attr in ALLOWED_LIST_METHODS:
            return True
        return super().is_safe_attribute(obj, attr, value)


def create_environment() -> TemplateEnvironment:
    """Create the environment with the settings of transformers, which template authors test with."""
    environment = TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.filters["sort"] = sort_items
    environment.filters["dictsort"] = sort_members
    environment.globals["raise_exception"] = raise_exception
    return environment


@jinja2.pass_environment
def sort_items(
    environment: TemplateEnvironment,
    value: Iterable[Any],
    reverse: bool = False,
    case_sensitive: bool = False,
    attribute: str | int | None = None,
) -> list[Any]:
    """Jinja's filter `sort`."""
    get_key = functools.partial(environment.get_sort_key, case_sensitive=case_sensitive)
    return sorted(value, key=make_multi_attrgetter(environment, attribute, postprocess=get_key), reverse=reverse)


@jinja2.pass_environment
def sort_members(
    environment: TemplateEnvironment,
    value: Mapping[Any, Any],
    case_sensitive: bool = False,
    by: str = "key",
    reverse: bool = False,
) -> list[tuple[Any, Any]]:
    """Jinja's filter `dictsort`."""
    position = {"key": 0, "value": 1}[by]
    return sorted(
        value.items(), key=lambda item: environment.get_sort_key(item[position], case_sensitive), reverse=reverse
    )


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=generator_to_list, **options)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def generator_to_list(value: Any) -> list[Any]:
    """Convert the generators that `map` and `select` return, for `json.dumps`."""
    if isinstance(value, types.GeneratorType):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def wrap_value(value: Any, separator: str) -> Any:
    """Replace all lists in a value by lists that the template cannot modify, and all objects by `RequestDict`."""
    if isinstance(value, dict):
        members = {key: wrap_value(item, separator) for key, item in value.items()}
        return RequestDict(members, separator) if separator else members
    return ReadOnlyList(wrap_value(item, separator) for item in value) if isinstance(value, list) else value


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    return create_environment().from_string(source)


def render(source: str, variables: dict[str, Any], now: datetime.datetime, separator: str = "") -> dict[str, Any]:
    try:
        size, parts = 0, []
        context = {"strftime_now": lambda pattern: now.strftime(pattern), **wrap_value(variables, separator)}
        template = compile_template(source)
        assert isinstance(template.environment, TemplateEnvironment)
        template.environment.separator = separator
        for part in template.generate(**context):
            size += len(part)
            if size > MAX_OUTPUT_CHARACTERS:
                return {"error": f"it renders more than {MAX_OUTPUT_CHARACTERS:,} characters", "line": None}
            parts.append(part)
        text = "".join(parts)
        text.encode()
        return {"text": text}
    except UnicodeEncodeError:
        return {"error": "the text contains an unpaired surrogate, a half of a character", "line": None}
    except jinja2.TemplateSyntaxError as error:
        return {"error": error.message or "syntax error", "line": error.lineno}
    except jinja2.TemplateError as error:
        return {"error": error.message or type(error).__name__, "line": find_template_line(error)}
    except MemoryError:
        return {"error": "it exceeded the memory limit", "line": None}
    except RecursionError:
        return {"error": "it recurses without end", "line": None}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "line": find_template_line(error)}


def find_template_line(error: BaseException) -> int | None:
    """Return the line of the template at which the error occurred."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    for line in sys.stdin:
        request = json.loads(line)
        now = datetime.datetime.fromisoformat(request["now"])
        replies = [
            render(request["template"], {**request["variables"], **conversation}, now, request["separator"])
            for conversation in request["conversations"]
        ]
        print(json.dumps(replies), flush=True)


if __name__ == "__main__":
    main()
