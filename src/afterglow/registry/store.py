"""The models on this machine: where they are kept, pulling and removing them, and turning a name into a path."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from afterglow.errors import ModelNotFound, UnsupportedOperation
from afterglow.paths import get_cache_directory
from afterglow.registry.catalog import CATALOG, CatalogEntry, HubFile, parse_filename, parse_name
from afterglow.registry.discovery import LocalModel, discover_models
from afterglow.registry.fetch import fetch_source as fetch_source
from afterglow.registry.staging import DownloadProgress

PROGRAM_NAME = "afterglow"


def models_directory() -> Path:
    """Where pulled models are kept: $AFTERGLOW_MODELS, $AFTERGLOW_CACHE/models, or in the user's cache directory.

    >>> models_directory().name
    'models'
    """
    if chosen := os.environ.get("AFTERGLOW_MODELS"):
        return Path(os.path.expanduser(chosen))
    return get_cache_directory("models")


def list_installed() -> list[LocalModel]:
    """What is in the models directory, sorted by name; a file put there by hand goes by its file name.

    >>> [model.name for model in installed()]  # doctest: +SKIP
    ['owner/repo:model.gguf', 'smollm2']
    """
    models = []
    for path in models_directory().glob("*.gguf"):
        try:
            size = path.stat().st_size
        except OSError:  # removed since it was listed
            continue
        entry = parse_filename(path.name)
        # A catalogue file of another size is damaged; it goes by its file name, so that it can still be removed.
        name = entry.name if entry and is_complete(entry, path) else path.name
        models.append(LocalModel(name, path, size, PROGRAM_NAME))
    return sorted(models, key=lambda model: model.name)


def pull(name: str, progress: DownloadProgress = lambda done, total: None) -> Path:
    """Fetch a model by name unless it is there already, and give its path.

    pull("smollm2", lambda done, total: print(done, total))
    """
    entry = parse_name(name)
    if entry is None:
        raise make_not_found_error(name)
    target = get_model_path(entry)
    if not is_complete(entry, target):
        fetch_source(entry.source, target, progress)
    return target


def remove(name: str) -> LocalModel:
    """Delete a pulled model and give what was deleted; raises like `removable`.

    remove("smollm2").size
    """
    model = find_removable(name)
    model.path.unlink(missing_ok=True)
    return model


def find_removable(name: str) -> LocalModel:
    """What `remove` would delete; raises ModelNotFound, or UnsupportedOperation where another program owns it.

    removable("smollm2").path
    """
    if model := find_installed(name):
        return model
    for foreign in discover_models():
        if foreign.name == name:
            raise UnsupportedOperation(f"removing {name}", f"the file belongs to {foreign.program}, remove it there")
    raise make_not_found_error(name)


def resolve(name: str | Path, fetch: bool = False) -> Path:
    """Turn a path, a name or `owner/repo:file.gguf` into the path of a model; pulls only where `fetch` is set.

    resolve("smollm2", fetch=True)
    """
    path = os.path.expanduser(name)
    if os.path.isfile(path):
        return Path(path)
    name = str(name)
    entry = parse_name(name)
    if entry and is_complete(entry, get_model_path(entry)):
        return get_model_path(entry)
    if entry is None and (model := find_installed(name)):
        return model.path
    wanted = set(list_discovered_names(name, entry))
    for model in discover_models():
        if model.name in wanted:
            return model.path
    if entry and fetch:
        return pull(name)
    raise make_not_found_error(name)


def get_model_path(entry: CatalogEntry) -> Path:
    """Where an entry's file is, or will be once pulled: `location(CATALOGUE["smollm2"])`."""
    return models_directory() / entry.source.filename


def is_complete(entry: CatalogEntry, path: Path) -> bool:
    """Whether `path` holds the entry's file, as far as its size tells: `whole(entry, location(entry))`."""
    return os.path.isfile(path) and entry.source.size in (None, path.stat().st_size)


def find_installed(name: str) -> LocalModel | None:
    """The model in the models directory with this name, source or file name: `find_installed("smollm2")`."""
    entry = parse_name(name)
    paths = {models_directory() / name, get_model_path(entry) if entry else None}
    return next((model for model in list_installed() if model.name == name or model.path in paths), None)


def list_discovered_names(name: str, entry: CatalogEntry | None) -> Iterator[str]:
    """The names under which `discover` may list it: a file of the hub is as good out of the hub's own cache."""
    yield name
    if entry and isinstance(entry.source, HubFile) and entry.source.revision == "main":
        yield f"hub:{entry.source.repository}:{entry.source.file}"


def make_not_found_error(name: str) -> ModelNotFound:
    """The error for a name that leads nowhere, with what to do about it: `raise not_found("smolm")`."""
    if parse_name(name):
        return ModelNotFound(name, f"it is not pulled yet; run `afterglow models pull {name}`")
    if name.endswith(".gguf") and os.path.dirname(name):
        return ModelNotFound(name, "there is no such file")
    names = [*CATALOG, *(model.name for model in (*list_installed(), *discover_models()))]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    known = ", ".join(sorted(CATALOG))
    return ModelNotFound(
        name, f"{meant}known names: {known}; `afterglow models pull NAME`, where NAME may be owner/repo:file.gguf too"
    )
