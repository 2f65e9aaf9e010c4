"""Models on this machine by the names that clients use: those of Ollama's models have no prefix, as in Ollama.

A name without a tag has the tag `latest`; its case does not matter, as in Ollama.
`RequestDefaults` is what Ollama stores with a model for its requests. A `ModelVariant` is another name for a model,
with defaults of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from afterglow import registry
from afterglow.chat.messages import Message
from afterglow.registry import LocalModel, OllamaDefinition

DEFAULT_TAG = ":latest"
OLLAMA_PREFIX = "ollama:"  # of Ollama's models in the registry
OFFICIAL_NAMESPACE = "library"  # of Ollama's own models


def add_tag(name: str) -> str:
    """Return a name with its tag, which is `latest` by default.

    >>> add_tag("smollm2"), add_tag("owner/model:8b")
    ('smollm2:latest', 'owner/model:8b')
    """
    return name if ":" in name.rpartition("/")[2] else name + DEFAULT_TAG


def list_spellings(name: str) -> list[str]:
    """List a name with and without the default tag.

    >>> list_spellings("smollm2"), list_spellings("smollm2:latest"), list_spellings("qwen3:4b")
    (['smollm2', 'smollm2:latest'], ['smollm2:latest', 'smollm2'], ['qwen3:4b'])
    """
    other = name.removesuffix(DEFAULT_TAG) if name.endswith(DEFAULT_TAG) else add_tag(name)
    return list(dict.fromkeys([name, other]))


def get_client_name(name: str) -> str:
    """Return the name that clients see of a model in the registry.

    >>> get_client_name("ollama:qwen3:4b"), get_client_name("hub:owner/repo:file.gguf")
    ('qwen3:4b', 'hub:owner/repo:file.gguf')
    """
    return name.removeprefix(OLLAMA_PREFIX)


def normalize_name(name: str) -> str:
    """Return a name with its tag, without the prefix of Ollama's models and the namespace of Ollama's own ones.

    >>> normalize_name("ollama:qwen3:4b"), normalize_name("library/smollm2"), normalize_name("owner/model:8b")
    ('qwen3:4b', 'smollm2:latest', 'owner/model:8b')
    """
    namespace, _, base = get_client_name(name).rpartition("/")
    is_official = namespace == OFFICIAL_NAMESPACE or namespace.endswith(f"/{OFFICIAL_NAMESPACE}")
    return add_tag(base if is_official else get_client_name(name))


def find_name(name: str, names: Iterable[str]) -> str | None:
    """Return which of `names` a client means: the same name, else the same apart from its tag, else from its case.

    >>> find_name("SMOL", ["big", "smol:latest"]), find_name("smol", ["Smol:latest", "smol:latest"])
    ('smol:latest', 'smol:latest')
    """
    names = list(names)
    if name in names:
        return name
    for fold in (str, str.casefold):
        wanted = fold(normalize_name(name))
        found = next((other for other in names if fold(normalize_name(other)) == wanted), None)
        if found is not None:
            return found
    return None


def list_installed_models() -> list[LocalModel]:
    """List the models on this machine, including those of other programs. Blocking."""
    return [*registry.list_installed(), *registry.discover_models()]


def find_installed_model(name: str) -> LocalModel | None:
    """Return a model on this machine by name. Paths are not names: a client must not choose files. Blocking."""
    installed = list_installed_models()
    found = find_name(name, [model.name for model in installed])
    return next((model for model in installed if model.name == found), None)


# --- requests


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """What requests to a model have unless they set it."""

    system: str | None = None
    messages: tuple[Message, ...] = ()  # before those of the request
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    chat_template: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of a request by name

    def fall_back(self, other: RequestDefaults) -> RequestDefaults:
        """Return these with the values of `other` for what is not set."""
        return replace(
            self,
            system=other.system if self.system is None else self.system,
            messages=self.messages or other.messages,
            stop=self.stop or other.stop,
            max_tokens=other.max_tokens if self.max_tokens is None else self.max_tokens,
            chat_template=self.chat_template or other.chat_template,
            sampling={**other.sampling, **self.sampling},
        )

    def list_first_messages(self, *, has_system: bool) -> list[Message]:
        """List the messages before those of a request. If it has a system prompt of its own, that one applies."""
        first = list(self.messages)
        if self.system and (not first or first[0].role != "system"):
            first.insert(0, Message(role="system", content=self.system))
        return list(itertools.dropwhile(lambda message: message.role == "system", first)) if has_system else first


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVariant:
    """A name for a model with request defaults of its own, such as a model that a client created."""

    name: str  # without the default tag
    source: str  # name of the model that it uses
    created: float  # Unix time
    defaults: RequestDefaults
    context_length: int | None = None  # that it needs


class VariantFinder(Protocol):
    """Finds variants by name."""

    def find(self, name: str) -> ModelVariant | None:
        """Return a variant by its name, with or without the default tag."""

    def list_all(self) -> list[ModelVariant]:
        """List all variants. Blocking."""


def build_request_defaults(definition: OllamaDefinition | None) -> RequestDefaults:
    """Return what Ollama stores with a model of its own for its requests."""
    if definition is None:
        return RequestDefaults()
    stop = definition.parameters.get("stop")
    stops: Iterable[object] = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return RequestDefaults(
        system=definition.system,
        messages=tuple(Message(role=message["role"], content=message["content"]) for message in definition.messages),
        stop=tuple(text for text in stops if isinstance(text, str) and text),
        max_tokens=definition.max_tokens,
    )
