"""Writes docs/fields.md from the types of the request bodies.

    make docs

A test fails if the page is not up to date.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo

from afterglow.server.anthropic.schema import MessageRequest
from afterglow.server.llamacpp.schema import LlamaCompletionRequest, LlamaEmbeddingRequest, LlamaInfillRequest
from afterglow.server.ollama.schema import OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest
from afterglow.server.openai.schema.chat import ChatRequest
from afterglow.server.openai.schema.completions import CompletionRequest
from afterglow.server.openai.schema.embeddings import EmbeddingRequest
from afterglow.server.openai.schema.responses import ResponseRequest
from afterglow.server.openai.schema.transcriptions import TranscriptionRequest
from afterglow.server.retrieval.schema import RerankRequest
from afterglow.server.schema.base import get_rule

TARGET = Path(__file__).parent.parent / "docs" / "fields.md"
BODIES: tuple[tuple[str, type[pydantic.BaseModel]], ...] = (
    ("/v1/chat/completions", ChatRequest),
    ("/v1/completions", CompletionRequest),
    ("/v1/responses", ResponseRequest),
    ("/v1/embeddings", EmbeddingRequest),
    ("/v1/rerank", RerankRequest),
    ("/v1/audio/transcriptions", TranscriptionRequest),
    ("/v1/messages", MessageRequest),
    ("/api/chat", OllamaChatRequest),
    ("/api/generate", OllamaGenerateRequest),
    ("/api/embed", OllamaEmbedRequest),
    ("/completion", LlamaCompletionRequest),
    ("/infill", LlamaInfillRequest),
    ("/embedding", LlamaEmbeddingRequest),
)
PAGE = """\
<!-- Written by scripts/write_fields_page.py (`make docs`). Do not edit. -->

# Request fields

Every field of a request belongs to one of three classes:

- **honoured**: it has the effect that its API documents.
- **hint**: it has no effect here and does not change the response. It is accepted. The response header
  `x-afterglow-ignored` names it, and the log names it once. `afterglow serve --strict` refuses it.
- **refused**: ignoring it would change the response. The request gets status 400 with the name of the field.

An unknown field is refused with the nearest known name. "Except" lists values that describe what is done anyway: they
are accepted, as null is. Nested fields are listed if they are hints or refused. If only one model is served, an unknown
`model` is a hint. So is a field that asks for reasoning if the model does not reason.
"""


def build_page() -> str:
    """Return the text of the page."""
    return "\n".join([PAGE, *(section for path, body in BODIES for section in build_section(path, body))])


def build_section(path: str, body: type[pydantic.BaseModel]) -> Iterator[str]:
    """Yield the heading and the table of one body."""
    yield f"## `{path}`\n"
    yield "| field | class | meaning or reason |\n|---|---|---|"
    for name, field in body.model_fields.items():
        yield build_row(field.alias or name, field)
        yield from build_nested_rows(field.alias or name, field.annotation)
    yield ""


def build_nested_rows(path: str, annotation: Any) -> Iterator[str]:
    """Yield the rows of the hints and refused fields inside a field, each once."""
    rows = []
    for model in find_models(annotation):
        for name, field in model.model_fields.items():
            nested = f"{path}.{field.alias or name}"
            if (rule := get_rule(field)) is not None and "same_as" not in rule:
                rows.append(build_row(nested, field))
            rows += build_nested_rows(nested, field.annotation)
    yield from dict.fromkeys(rows)


def find_models(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    """Yield the classes of bodies that an annotation contains."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    elif get_origin(annotation) in (list, Annotated, Union, types.UnionType):
        for argument in get_args(annotation):
            yield from find_models(argument)


def build_row(name: str, field: FieldInfo) -> str:
    """Return the row of a field: name, class, and meaning or reason."""
    rule = get_rule(field)
    if rule is None or "same_as" in rule:
        return f"| `{name}` | honoured | {field.description or 'As its API documents it.'} |"
    usual = " or ".join(f"`{format_value(value)}`" for value in rule["only"])
    reason = rule["reason"][0].upper() + rule["reason"][1:]
    return f"| `{name}` | {'hint' if 'hint' in rule else 'refused'} | {f'Except {usual}. ' if usual else ''}{reason}. |"


def format_value(value: Any) -> str:
    """Return a value as JSON, text without quotes."""
    return value if isinstance(value, str) else pydantic.TypeAdapter(Any).dump_json(value).decode()


if __name__ == "__main__":
    TARGET.write_text(build_page())
