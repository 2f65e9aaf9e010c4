"""Models on this machine by the names that clients use: those of Ollama's models have no prefix, as in Ollama.

A name without a tag has the tag `latest`.
"""

from __future__ import annotations

from afterglow import registry
from afterglow.registry import LocalModel

DEFAULT_TAG = ":latest"
OLLAMA_PREFIX = "ollama:"  # of Ollama's models in the registry


def add_tag(name: str) -> str:
    """Return a name with its tag, which is `latest` by default.

    >>> add_tag("smollm2"), add_tag("owner/model:8b")
    ('smollm2:latest', 'owner/model:8b')
    """
    return name if ":" in name.rpartition("/")[2] else name + DEFAULT_TAG


def list_spellings(name: str) -> list[str]:
    """List the names that mean the same model, without the prefix of Ollama's models.

    >>> list_spellings("smollm2"), list_spellings("smollm2:latest"), list_spellings("qwen3:4b")
    (['smollm2', 'smollm2:latest'], ['smollm2:latest', 'smollm2'], ['qwen3:4b'])
    """
    other = name.removesuffix(DEFAULT_TAG) if name.endswith(DEFAULT_TAG) else add_tag(name)
    return list(dict.fromkeys([name, other]))


def list_registry_names(name: str) -> list[str]:
    """List the names in the registry that a client may mean.

    >>> list_registry_names("qwen3:4b")
    ['qwen3:4b', 'ollama:qwen3:4b']
    """
    spellings = list_spellings(get_client_name(name))
    return [*spellings, *(OLLAMA_PREFIX + spelling for spelling in spellings)]


def get_client_name(name: str) -> str:
    """Return the name that clients see of a model in the registry.

    >>> get_client_name("ollama:qwen3:4b"), get_client_name("hub:owner/repo:file.gguf")
    ('qwen3:4b', 'hub:owner/repo:file.gguf')
    """
    return name.removeprefix(OLLAMA_PREFIX)


def list_installed_models() -> list[LocalModel]:
    """List the models on this machine, including those of other programs. Blocking."""
    return [*registry.list_installed(), *registry.discover_models()]


def find_installed_model(name: str) -> LocalModel | None:
    """Return a model on this machine by name. Paths are not names: a client must not choose files. Blocking."""
    names = list_registry_names(name)
    return next((model for model in list_installed_models() if model.name in names), None)
