"""Finds a llama.cpp library with the supported ABI among the installed packages. Opens nothing."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from afterglow.errors import LibraryError

LIBRARY_ENV_VAR = "AFTERGLOW_LIBLLAMA"
LLAMA_FILE = re.compile(r"(lib)?llama(-[0-9a-f]{8})?\.(so|dylib|dll)(\.[0-9.]+)?$")
# The compute backends (ggml-cpu, ggml-cuda, …) may be plug-ins in the same folder, which ggml loads itself.
COMPANION_FILE = re.compile(r"(lib)?(mtmd|ggml|ggml-base)(-[0-9a-f]{8})?\.(so|dylib|dll)(\.[0-9.]+)?$")

# Instruction sets of llama.cpp's generic x86-64 build. On a CPU without them, opening the library is an illegal
# instruction, not an error.
X86_64_BASELINE = frozenset({"avx", "avx2", "fma", "f16c", "bmi2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A PyPI package that contains the library."""

    package: str
    build: str
    library_pattern: re.Pattern[str] = LLAMA_FILE
    required_cpu_features: dict[str, frozenset[str]] = field(default_factory=lambda: {"x86_64": X86_64_BASELINE})
    min_glibc: tuple[int, int] = (2, 17)
    gpu: bool = False


# The first installed package is used. b11549, b11669 and b11739 have the same structs and functions.
PROVIDERS = (
    Provider(package="cyllama-cuda12", build="b11669", min_glibc=(2, 35), gpu=True),
    Provider(package="cyllama-rocm", build="b11669", min_glibc=(2, 35), gpu=True),
    Provider(package="cyllama-sycl", build="b11669", min_glibc=(2, 35), gpu=True),
    Provider(package="cyllama-vulkan", build="b11669", min_glibc=(2, 35), gpu=True),
    Provider(package="xllamacpp", build="b11549", library_pattern=re.compile(r"xllamacpp\.abi3\.so$")),
    Provider(package="llama-cpp-py-sync", build="b11739", min_glibc=(2, 38)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryLocation:
    """A library on this machine: its main file first, then its companion files."""

    provider: Provider
    files: tuple[Path, ...]
    reason: str

    @property
    def path(self) -> Path:
        return self.files[0]


def find_library() -> LibraryLocation:
    """Return the library to open: the file or folder in `AFTERGLOW_LIBLLAMA`, else the first installed provider."""
    if override := os.environ.get(LIBRARY_ENV_VAR):
        return _find_override(Path(override))
    for provider in PROVIDERS:
        if location := find_installed(provider):
            return location
    names = ", ".join(provider.package for provider in PROVIDERS)
    raise LibraryError(f"one of the packages {names}, or a file named by {LIBRARY_ENV_VAR}", "none of them installed")


def find_installed(provider: Provider) -> LibraryLocation | None:
    """Return the provider's library, or None if the package is not installed or lacks the file."""
    try:
        package_files = metadata.distribution(provider.package).files or []
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in package_files]
    return _select_files(paths, provider, f"the installed package {provider.package}")


def _find_override(path: Path) -> LibraryLocation:
    provider = Provider(package=LIBRARY_ENV_VAR, build="unknown", required_cpu_features={})
    location = None
    if path.is_dir():
        location = _select_files(sorted(path.iterdir()), provider, f"{LIBRARY_ENV_VAR} names its folder")
    elif path.is_file():
        companions = tuple(file for file in sorted(path.parent.iterdir()) if COMPANION_FILE.match(file.name))
        location = LibraryLocation(provider=provider, files=(path, *companions), reason=f"{LIBRARY_ENV_VAR} names it")
    if location is None:
        raise LibraryError(f"a llama.cpp library at {path} ({LIBRARY_ENV_VAR})", "no such file")
    return location


def _select_files(paths: list[Path], provider: Provider, reason: str) -> LibraryLocation | None:
    main = [path for path in paths if provider.library_pattern.match(path.name)]
    if not main:
        return None
    companions = [path for path in paths if COMPANION_FILE.match(path.name)]
    return LibraryLocation(provider=provider, files=(main[0], *companions), reason=reason)
