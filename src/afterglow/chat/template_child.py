"""Renders chat templates in a process of its own: a template from a model file is hostile input.

Reads one JSON object a line (template, variables), writes one a line (text, or error and line). Memory and the size of
the output are bounded here; time is bounded by whoever waits.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY = 1024**3
OUTPUT = 16 * 1024**2


class Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Set up as transformers does, because that is what template authors test with."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def render(source: str, variables: dict[str, Any]) -> dict[str, Any]:
    try:
        size, parts = 0, []
        for part in compiled(source).generate(**variables):
            size += len(part)
            if size > OUTPUT:
                return {"error": f"it writes more than {OUTPUT:,} characters", "line": None}
            parts.append(part)
        return {"text": "".join(parts)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": error.message or "syntax error", "line": error.lineno}
    except jinja2.TemplateError as error:
        return {"error": error.message or type(error).__name__, "line": line_of(error)}
    except MemoryError:
        return {"error": "it needs more memory than a template may have", "line": None}
    except RecursionError:
        return {"error": "it calls itself without end", "line": None}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "line": line_of(error)}


def line_of(error: BaseException) -> int | None:
    """The template's line that was being rendered."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(render(request["template"], request["variables"])), flush=True)


if __name__ == "__main__":
    main()
