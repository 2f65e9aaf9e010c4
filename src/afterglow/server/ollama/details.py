"""Facts about model files in the form of Ollama's API, from their headers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from gguf import LlamaFileType

from afterglow.chat.output.reasoning import detect_reasoning_format
from afterglow.engine.host.build import find_projector
from afterglow.llama.gguf.fingerprint import compute_fingerprint
from afterglow.llama.gguf.header import GGUFHeader, MetadataValue, StringArray, read_header
from afterglow.llama.gguf.probe import list_split_files
from afterglow.llama.gguf.summary import count_parameters, find_quantization, list_tensors
from afterglow.registry import find_projector_of

MAX_DESCRIBED_FILES = 256  # whose facts are kept
MAX_LISTED_ELEMENTS = 16  # longer lists of a header are only returned on request
CHAT_TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class FileDetails:
    """What lists of models say of a model file."""

    digest: str
    size: int
    modified: float
    details: dict[str, Any]
    capabilities: tuple[str, ...]


def describe_file(path: Path) -> FileDetails:
    """Describe a model file. The result is kept until the file changes. Blocking."""
    status = path.stat()
    return _describe_file(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(MAX_DESCRIBED_FILES)
def _describe_file(path: Path, modified_ns: int, size: int) -> FileDetails:
    headers = read_headers(path)
    return FileDetails(
        digest=compute_fingerprint(path),
        size=sum(header.file_size for header in headers),
        modified=modified_ns / 1e9,
        details=build_details(headers),
        capabilities=tuple(list_capabilities(path, headers[0])),
    )


def read_headers(path: Path) -> list[GGUFHeader]:
    """Read the headers of all files of a model."""
    return [read_header(part) for part in list_split_files(path)]


def build_details(headers: Sequence[GGUFHeader]) -> dict[str, Any]:
    """Build the object `details`."""
    architecture = str(headers[0].metadata.get("general.architecture", ""))
    return {
        "parent_model": "",
        "format": "gguf",
        "family": architecture,
        "families": [architecture],
        "parameter_size": format_count(count_parameters(headers)),
        "quantization_level": get_file_type(headers),
    }


def format_count(count: int) -> str:
    """Format a number of parameters.

    >>> format_count(134_515_008), format_count(8_030_261_312), format_count(17)
    ('134.5M', '8.0B', '17')
    """
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def get_file_type(headers: Sequence[GGUFHeader]) -> str:
    """Return the quantization that the file names, e.g. `Q4_K_M`, or else that of most of its bytes."""
    try:
        name = LlamaFileType(headers[0].metadata["general.file_type"]).name  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError):
        return find_quantization(headers)
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def list_capabilities(path: Path, header: GGUFHeader) -> list[str]:
    """List Ollama's names of what a model can do, without loading it."""
    metadata = header.metadata
    if metadata.get(f"{metadata.get('general.architecture')}.attention.causal") is False:
        return ["embedding"]
    template = metadata.get(CHAT_TEMPLATE_KEY)
    supported = {
        "completion": True,
        "tools": True,  # as text if the template has none
        "insert": "tokenizer.ggml.fim_pre_token_id" in metadata,
        "thinking": detect_reasoning_format(template if isinstance(template, str) else None) is not None,
    }
    return [name for name, is_supported in supported.items() if is_supported] + list_media(
        find_projector_of(path) or find_projector(path)
    )


def list_media(projector: Path | None) -> list[str]:
    """List the kinds of media that a projector file is for."""
    if projector is None:
        return []
    metadata = read_header(projector).metadata
    return [kind for kind in ("vision", "audio") if metadata.get(f"clip.has_{kind}_encoder")]


def build_model_info(headers: Sequence[GGUFHeader], *, verbose: bool) -> dict[str, Any]:
    """Build the object `model_info`: the metadata of the file. Long lists are null unless `verbose`."""
    metadata = {key: value for key, value in headers[0].metadata.items() if key != CHAT_TEMPLATE_KEY}
    info = {key: convert_value(value, verbose=verbose) for key, value in sorted(metadata.items())}
    return {**info, "general.parameter_count": count_parameters(headers)}


def convert_value(value: MetadataValue, *, verbose: bool) -> Any:
    """Convert a value of a header to JSON."""
    if isinstance(value, StringArray | np.ndarray):
        if len(value) > MAX_LISTED_ELEMENTS and not verbose:
            return None
        return value.tolist() if isinstance(value, np.ndarray) else [value[index] for index in range(len(value))]
    return value if not isinstance(value, float) or np.isfinite(value) else None


def build_tensors(headers: Sequence[GGUFHeader]) -> list[dict[str, Any]]:
    """List the tensors of a model."""
    tensors = list_tensors(headers)
    return [{"name": tensor.name, "type": tensor.type, "shape": list(tensor.shape)} for tensor in tensors]


def format_time(seconds: float | None = None) -> str:
    """Format a time of the system clock, or the current one.

    >>> format_time(0)
    '1970-01-01T00:00:00.000000Z'
    """
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
