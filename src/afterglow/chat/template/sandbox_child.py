"""Child process that renders chat templates: a template from a model file is untrusted input.

Reads one JSON object per line (template, variables, now) and writes one per line (text, or error and line). Limits
memory and output size here; the parent process limits the time.
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
ALLOWED_LIST_METHODS = frozenset({"append", "extend", "insert", "pop"})  # on lists created by the template


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` delimits assistant text for training; rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 (declared like this in jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ReadOnlyList(list[Any]):
    """A list of the request. Templates must not modify it."""


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox in which templates may modify lists that they create. Some do, to pair tool calls with results;
    transformers rejects those."""

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
    environment.globals["raise_exception"] = raise_exception
    return environment


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=generator_to_list, **options)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def generator_to_list(value: Any) -> list[Any]:
    """Convert the generators that `map` and `select` return, for `json.dumps`."""
    if isinstance(value, types.GeneratorType):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def protect_lists(value: Any) -> Any:
    """Replace all lists in a value by lists that the template cannot modify."""
    if isinstance(value, dict):
        return {key: protect_lists(item) for key, item in value.items()}
    return ReadOnlyList(map(protect_lists, value)) if isinstance(value, list) else value


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    return create_environment().from_string(source)


def render(source: str, variables: dict[str, Any], now: datetime.datetime) -> dict[str, Any]:
    try:
        size, parts = 0, []
        context = {"strftime_now": lambda pattern: now.strftime(pattern), **protect_lists(variables)}
        for part in compile_template(source).generate(**context):
            size += len(part)
            if size > MAX_OUTPUT_CHARACTERS:
                return {"error": f"it renders more than {MAX_OUTPUT_CHARACTERS:,} characters", "line": None}
            parts.append(part)
        text = "".join(parts)
        text.encode()  # raises for an unpaired surrogate
        return {"text": text}
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
        print(json.dumps(render(request["template"], request["variables"], now)), flush=True)


if __name__ == "__main__":
    main()
