"""Finds GGUF models that other programs downloaded. Read-only; skips malformed files."""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from afterglow.errors import InvalidModel

SHARD_PATTERN = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-\d{5}\.gguf")
DIGEST_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")
OLLAMA_MEDIA_TYPE_PREFIX = "application/vnd.ollama.image."  # of the layers of a manifest
MAX_LAYER_BYTES = 1024 * 1024  # of a layer that is text
# Home of the service user that Ollama's installer creates on Linux.
OLLAMA_SERVICE_DIRECTORY = "/usr/share/ollama/.ollama/models"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Model on this machine, owned by `program`. A split model has the path of its first shard and the total size."""

    name: str
    path: Path
    size: int
    program: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaDefinition:
    """What Ollama stores with a model of its own, beside the file. Its template is not used: it is in Go's language."""

    path: Path
    system: str | None = None
    messages: tuple[dict[str, Any], ...] = ()  # with `role` and `content`, before those of a conversation
    parameters: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[Path, ...] = ()
    projector: Path | None = None
    licenses: tuple[Path, ...] = ()

    def read_license(self) -> str:
        """Return the text of all licenses; empty if there are none. Raises `InvalidModel` if one cannot be read."""
        return "\n".join(read_layer(self.path.name, "license", path) for path in self.licenses)

    @property
    def context(self) -> int | None:
        """Context length to load the model with (`num_ctx`)."""
        return self._get_count("num_ctx", 1)

    @property
    def max_tokens(self) -> int | None:
        """Limit of a response (`num_predict`)."""
        return self._get_count("num_predict", 0)

    def _get_count(self, name: str, low: int) -> int | None:
        value = self.parameters.get(name)
        return int(value) if isinstance(value, int | float) and low <= value < math.inf else None


def discover_models() -> list[LocalModel]:
    """Return the models in the caches of llama.cpp, LM Studio, Ollama and the Hugging Face hub, sorted by name.

    >>> [model.name for model in discover_models()]  # doctest: +SKIP
    ['hub:owner/repo:model.gguf', 'ollama:llama3.2:1b']
    """
    models: dict[str, LocalModel] = {}
    for find in (find_llama_cpp_models, find_lm_studio_models, find_hub_models, find_ollama_models):
        for model in find():
            models.setdefault(model.name, model)
    return sorted(models.values(), key=lambda model: model.name)


def find_llama_cpp_models() -> Iterator[LocalModel]:
    """Yield the files that `llama-server -hf` and other llama.cpp programs downloaded."""
    default = user_cache_path("llama.cpp", appauthor=False, opinion=False)
    root = Path(os.environ.get("LLAMA_CACHE") or default)
    for path, size in find_models(root):
        yield LocalModel(f"llama.cpp:{path.relative_to(root).as_posix()}", path, size, "llama.cpp")


def find_lm_studio_models() -> Iterator[LocalModel]:
    """Yield the models of LM Studio, in the folder of current releases and in that of older ones."""
    for folder in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        root = Path(os.path.expanduser(folder))
        for path, size in find_models(root):
            yield LocalModel(f"lmstudio:{path.relative_to(root).as_posix()}", path, size, "lmstudio")


def get_hub_cache_directory() -> Path:
    """Return the cache directory of the Hugging Face hub's library, from the same variables as the library."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expanduser(os.environ[variable]))
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(home)) / "hub"


def find_hub_models() -> Iterator[LocalModel]:
    """Yield the models in the hub's cache. In each repository the snapshot of `main` comes first, then the newest."""
    for repository in list_directory(get_hub_cache_directory()):
        kind, _, name = repository.name.partition("--")
        if kind != "models" or not name:
            continue
        main = read_first_line(repository / "refs" / "main")
        snapshots = list_directory(repository / "snapshots")
        snapshots.sort(key=lambda folder: (folder.name == main, get_modified_time(folder)), reverse=True)
        for snapshot in snapshots:
            for path, size in find_models(snapshot):
                file = path.relative_to(snapshot).as_posix()
                yield LocalModel(f"hub:{name.replace('--', '/', 1)}:{file}", path, size, "hub")


def find_ollama_models() -> Iterator[LocalModel]:
    """Yield the models of Ollama; each manifest names the blob of its model."""
    for root, manifest, name in find_ollama_manifests():
        for blob in read_ollama_layers(root, manifest).get("model", [])[:1]:
            if size := read_model_size(blob):
                yield LocalModel(name, blob, size, "ollama")


def find_ollama_manifests() -> Iterator[tuple[Path, Path, str]]:
    """Yield the folder, the manifest and the name of each model of Ollama."""
    homes = [os.environ.get("OLLAMA_MODELS") or "~/.ollama/models", OLLAMA_SERVICE_DIRECTORY]
    for root in (Path(os.path.expanduser(home)) for home in homes):
        for manifest in walk_files(root / "manifests"):
            yield root, manifest, f"ollama:{parse_ollama_name(manifest.relative_to(root / 'manifests').parts)}"


def read_ollama_parameters(name: str) -> dict[str, Any]:
    """Return the parameters of a model of Ollama, e.g. `temperature`; empty if it has none or is not one of Ollama.

    >>> read_ollama_parameters("smollm2")
    {}
    """
    layers = find_ollama_layers(name)
    return read_parameters_layer(layers["params"][0]) if "params" in layers else {}


def read_ollama_definition(name: str) -> OllamaDefinition | None:
    """Return what Ollama stores with a model; None if the name is not that of one of its models.

    Raises `InvalidModel` if a layer cannot be read: without it, the model would behave differently.

    >>> read_ollama_definition("smollm2")
    """
    layers = find_ollama_layers(name)
    if "model" not in layers:
        return None
    text = {kind: read_layer(name, kind, layers[kind][0]) for kind in ("system", "messages") if kind in layers}
    messages = parse_json(text.get("messages", "[]"))
    if not isinstance(messages, list) or not all(is_message(message) for message in messages):
        raise InvalidModel(name, "its layer `messages` is not a list of messages")
    return OllamaDefinition(
        path=layers["model"][0],
        system=text.get("system") or None,
        messages=tuple(messages),
        parameters=read_parameters_layer(layers["params"][0]) if "params" in layers else {},
        adapters=tuple(layers.get("adapter", ())),
        projector=layers["projector"][0] if "projector" in layers else None,
        licenses=tuple(layers.get("license", ())),
    )


def find_ollama_layers(name: str) -> dict[str, list[Path]]:
    """Return the files of the layers of a model of Ollama by kind, e.g. `params`; none if it is not one of Ollama."""
    if not name.startswith("ollama:"):
        return {}
    manifests = ((root, manifest) for root, manifest, found in find_ollama_manifests() if found == name)
    return next((read_ollama_layers(root, manifest) for root, manifest in manifests), {})


def read_layer(name: str, kind: str, blob: Path) -> str:
    """Return the text of a layer; raise `InvalidModel` if it cannot be read."""
    try:
        with blob.open("rb") as stream:
            content = stream.read(MAX_LAYER_BYTES + 1)
        if len(content) > MAX_LAYER_BYTES:
            raise InvalidModel(name, f"its layer `{kind}` exceeds the limit of {MAX_LAYER_BYTES:,} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        raise InvalidModel(name, f"its layer `{kind}` cannot be read: {error}") from None


def read_parameters_layer(blob: Path) -> dict[str, Any]:
    """Return the parameters of a layer; empty if it is malformed."""
    try:
        with blob.open("rb") as stream:
            values = parse_json(stream.read(MAX_LAYER_BYTES))
    except OSError:
        return {}
    return values if isinstance(values, dict) else {}


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, or None: `parse_json("[]")` → `[]`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def is_message(value: Any) -> bool:
    """Whether a value is a message: `is_message({"role": "user", "content": "hello"})`."""
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def parse_ollama_name(parts: tuple[str, ...]) -> str:
    """Return the name that Ollama shows: `parse_ollama_name(("registry.x", "library", "qwen3", "4b"))` → `qwen3:4b`."""
    *path, tag = parts
    if path and path[0].startswith("registry."):  # Ollama does not show its default registry
        path = path[1:]
    if path and path[0] == "library":
        path = path[1:]
    return f"{'/'.join(path)}:{tag}"


def read_ollama_layers(root: Path, manifest: Path) -> dict[str, list[Path]]:
    """Return the files of the layers that a manifest names, by kind: `read_ollama_layers(root, manifest)["model"]`."""
    layers: dict[str, list[Path]] = {}
    try:
        for layer in json.loads(manifest.read_bytes())["layers"]:
            kind, digest = layer["mediaType"].removeprefix(OLLAMA_MEDIA_TYPE_PREFIX), layer["digest"]
            if DIGEST_PATTERN.fullmatch(digest):
                layers.setdefault(kind, []).append(root / "blobs" / digest.replace(":", "-"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return layers


def find_models(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield each model below `root` with its size, without projectors: `dict(find_models(folder))`."""
    for path in walk_files(root):
        if path.suffix != ".gguf" or "mmproj" in path.name.lower():
            continue
        shard = SHARD_PATTERN.fullmatch(path.name)
        if shard and int(shard["number"]) != 1:
            continue
        if size := read_model_size(path):
            shards = path.parent.glob(f"{glob.escape(shard['stem'])}-*-of-*.gguf") if shard else []
            yield path, size + sum(read_model_size(other) for other in shards if other != path)


def walk_files(root: Path) -> Iterator[Path]:
    """Yield every file below `root` in order; none if it cannot be read: `list(walk_files(folder))`."""
    for parent, folders, names in os.walk(root):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names))


def read_model_size(path: Path) -> int:
    """Return the size of a GGUF file; 0 if it is not one or cannot be read: `read_model_size(path)`."""
    try:
        with path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_size if stream.read(4) == b"GGUF" else 0
    except OSError:
        return 0


def list_directory(folder: Path) -> list[Path]:
    """Return the sorted entries of `folder`; empty if it cannot be read: `list_directory(folder)`."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def read_first_line(path: Path) -> str:
    """Return the first line of a small text file, or "": `read_first_line(refs / "main")`."""
    try:
        return path.read_text(errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""


def get_modified_time(path: Path) -> float:
    """Return the modification time of `path`, or 0: `get_modified_time(folder)`."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
