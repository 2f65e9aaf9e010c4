"""Model registry: the catalog of known models, downloads, and the models on this machine."""

from afterglow.registry.catalog import (
    CATALOG,
    DEFAULT_MODEL,
    CatalogEntry,
    HubFile,
    HubRepository,
    ModelSource,
    WheelFile,
    parse_name,
)
from afterglow.registry.discovery import (
    LocalModel,
    OllamaDefinition,
    discover_models,
    read_ollama_definition,
    read_ollama_parameters,
)
from afterglow.registry.hub import HubMatch, search_hub
from afterglow.registry.quantizations import Variant
from afterglow.registry.staging import DownloadProgress
from afterglow.registry.store import (
    fetch_head,
    find_projector_of,
    find_pulled,
    find_removable,
    list_hub_files,
    list_installed,
    models_directory,
    pull,
    remove,
    resolve,
)

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "CatalogEntry",
    "DownloadProgress",
    "HubFile",
    "HubMatch",
    "HubRepository",
    "LocalModel",
    "ModelSource",
    "OllamaDefinition",
    "Variant",
    "WheelFile",
    "discover_models",
    "fetch_head",
    "find_projector_of",
    "find_pulled",
    "find_removable",
    "list_hub_files",
    "list_installed",
    "models_directory",
    "parse_name",
    "pull",
    "read_ollama_definition",
    "read_ollama_parameters",
    "remove",
    "resolve",
    "search_hub",
]
