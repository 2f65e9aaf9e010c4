"""Finds the GGUF models that other programs have downloaded. Reads only; what is malformed is passed over."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-\d{5}\.gguf")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
OLLAMA_MODEL = "application/vnd.ollama.image.model"
# The home of the user that Ollama's installer makes for its service on Linux.
OLLAMA_SERVICE = "/usr/share/ollama/.ollama/models"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine; `program` is whose it is. A model in parts is its first part, with the size of all."""

    name: str
    path: Path
    size: int
    program: str


def discover() -> list[LocalModel]:
    """Every model in the caches of llama.cpp, LM Studio, Ollama and the Hugging Face hub, sorted by name.

    >>> [model.name for model in discover()]  # doctest: +SKIP
    ['hub:owner/repo:model.gguf', 'ollama:llama3.2:1b']
    """
    finders: list[Callable[[], Iterator[LocalModel]]] = [llama_cpp, lm_studio, hub, ollama]
    found: dict[str, LocalModel] = {}
    for finder in finders:
        for model in finder():
            found.setdefault(model.name, model)
    return sorted(found.values(), key=lambda model: model.name)


def llama_cpp() -> Iterator[LocalModel]:
    """The files that `llama-server -hf` and its like have downloaded."""
    default = user_cache_path("llama.cpp", appauthor=False, opinion=False)
    root = Path(os.environ.get("LLAMA_CACHE") or default)
    for path, size in models_below(root):
        yield LocalModel(f"llama.cpp:{path.relative_to(root).as_posix()}", path, size, "llama.cpp")


def lm_studio() -> Iterator[LocalModel]:
    """The models of LM Studio, in the folder of today's releases and in that of the older ones."""
    for folder in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        root = Path(os.path.expanduser(folder))
        for path, size in models_below(root):
            yield LocalModel(f"lmstudio:{path.relative_to(root).as_posix()}", path, size, "lmstudio")


def hub_cache() -> Path:
    """Where the Hugging Face hub's library keeps its cache, read as that library reads it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expanduser(os.environ[variable]))
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(home)) / "hub"


def hub() -> Iterator[LocalModel]:
    """The models in the hub's cache: of each repository the snapshot that `main` names comes first, then the newest."""
    for repository in listed(hub_cache()):
        kind, _, name = repository.name.partition("--")
        if kind != "models" or not name:
            continue
        main = first_line(repository / "refs" / "main")
        snapshots = listed(repository / "snapshots")
        snapshots.sort(key=lambda folder: (folder.name == main, modified(folder)), reverse=True)
        for snapshot in snapshots:
            for path, size in models_below(snapshot):
                file = path.relative_to(snapshot).as_posix()
                yield LocalModel(f"hub:{name.replace('--', '/', 1)}:{file}", path, size, "hub")


def ollama() -> Iterator[LocalModel]:
    """The models of Ollama: each manifest names the blob that is the model."""
    homes = [os.environ.get("OLLAMA_MODELS") or "~/.ollama/models", OLLAMA_SERVICE]
    for root in (Path(os.path.expanduser(home)) for home in homes):
        for manifest in files_below(root / "manifests"):
            blob = ollama_blob(root, manifest)
            if blob and (size := model_size(blob)):
                name = ollama_name(manifest.relative_to(root / "manifests").parts)
                yield LocalModel(f"ollama:{name}", blob, size, "ollama")


def ollama_name(parts: tuple[str, ...]) -> str:
    """The name that Ollama's users type: `ollama_name(("registry.x", "library", "qwen3", "4b"))` is `qwen3:4b`."""
    *path, tag = parts
    if path and path[0].startswith("registry."):  # Ollama's own registry, which it does not show
        path = path[1:]
    if path and path[0] == "library":
        path = path[1:]
    return f"{'/'.join(path)}:{tag}"


def ollama_blob(root: Path, manifest: Path) -> Path | None:
    """The file of the model that a manifest describes, or None: `ollama_blob(root, manifest)`."""
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == OLLAMA_MODEL]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if not digests or not isinstance(digests[0], str) or not DIGEST.fullmatch(digests[0]):
        return None
    return root / "blobs" / digests[0].replace(":", "-")


def models_below(root: Path) -> Iterator[tuple[Path, int]]:
    """Each model below `root` with its size; vision projectors are no models: `dict(models_below(folder))`."""
    for path in files_below(root):
        if path.suffix != ".gguf" or "mmproj" in path.name.lower():
            continue
        shard = SHARD.fullmatch(path.name)
        if shard and int(shard["number"]) != 1:
            continue
        if size := model_size(path):
            others = path.parent.glob(f"{glob.escape(shard['stem'])}-*-of-*.gguf") if shard else []
            yield path, size + sum(model_size(other) for other in others if other != path)


def files_below(root: Path) -> Iterator[Path]:
    """Every file below `root`, in order; none where it cannot be read: `list(files_below(folder))`."""
    for parent, folders, names in os.walk(root):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names))


def model_size(path: Path) -> int:
    """Bytes of a GGUF file; 0 where it is something else or cannot be read: `model_size(path)`."""
    try:
        with path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_size if stream.read(4) == b"GGUF" else 0
    except OSError:
        return 0


def listed(folder: Path) -> list[Path]:
    """What is in `folder`, in order; nothing where it cannot be read: `listed(folder)`."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def first_line(path: Path) -> str:
    """The first line of a small text file, or nothing: `first_line(refs / "main")`."""
    try:
        return path.read_text(errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""


def modified(path: Path) -> float:
    """When `path` was last changed, or 0: `modified(folder)`."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
