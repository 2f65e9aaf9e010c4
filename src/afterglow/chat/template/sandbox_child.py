"""Renders chat templates in a process of its own: a template from a model file is hostile input.

Reads one JSON object a line (template, variables, now), writes one a line (text, or error and line). Memory and the
size of the output are bounded here; time is bounded by whoever waits.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import sys
import types
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_LIMIT_BYTES = 1024**3
MAX_OUTPUT_CHARACTERS = 16 * 1024**2
ALLOWED_LIST_METHODS = frozenset({"append", "extend", "insert", "pop"})  # what a template may do to a list that it made


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ReadOnlyList(list[Any]):
    """A list that came with the request: it stays as it is."""


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Templates may build lists of their own, as some do to pair calls with results; transformers refuses them."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is list and attr in ALLOWED_LIST_METHODS:
            return True
        return super().is_safe_attribute(obj, attr, value)


def create_environment() -> TemplateEnvironment:
    """Set up as transformers does, because that is what template authors test with."""
    made = TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    return made


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=generator_to_list, **options)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def generator_to_list(value: Any) -> list[Any]:
    """What `map` and `select` give is not JSON yet."""
    if isinstance(value, types.GeneratorType):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def protect_lists(value: Any) -> Any:
    """What was read, with lists that the template cannot change."""
    if isinstance(value, dict):
        return {key: protect_lists(item) for key, item in value.items()}
    return ReadOnlyList(map(protect_lists, value)) if isinstance(value, list) else value


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    return create_environment().from_string(source)


def render(source: str, variables: dict[str, Any], now: datetime.datetime) -> dict[str, Any]:
    try:
        size, parts = 0, []
        shown = {"strftime_now": lambda pattern: now.strftime(pattern), **protect_lists(variables)}
        for part in compile_template(source).generate(**shown):
            size += len(part)
            if size > MAX_OUTPUT_CHARACTERS:
                return {"error": f"it writes more than {MAX_OUTPUT_CHARACTERS:,} characters", "line": None}
            parts.append(part)
        text = "".join(parts)
        text.encode()  # half a surrogate pair is no text
        return {"text": text}
    except jinja2.TemplateSyntaxError as error:
        return {"error": error.message or "syntax error", "line": error.lineno}
    except jinja2.TemplateError as error:
        return {"error": error.message or type(error).__name__, "line": find_template_line(error)}
    except MemoryError:
        return {"error": "it needs more memory than a template may have", "line": None}
    except RecursionError:
        return {"error": "it calls itself without end", "line": None}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "line": find_template_line(error)}


def find_template_line(error: BaseException) -> int | None:
    """The template's line that was being rendered."""
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
        print(json.dumps(render(request["template"], request["variables"], now)), flush=True)


if __name__ == "__main__":
    main()
