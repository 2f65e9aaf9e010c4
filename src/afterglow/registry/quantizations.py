"""Groups the files of a hub repository into models by quantization, projectors and MTP heads. Does no I/O."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from afterglow.errors import DownloadFailed
from afterglow.registry.catalog import SHARD_PATTERN

QUANTIZATION_PATTERN = re.compile(
    r"(?:^|(?<=[-._/]))((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))(?=[-._/]|$)",
    re.IGNORECASE,
)
UNQUANTIZED = {"F16", "BF16", "F32"}
PROJECTOR_ORDER = ("F16", "BF16", "Q8_0", "F32")  # the first one that exists is chosen


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """File of a repository as the hub lists it. Files that are not in large-file storage have no sha256."""

    path: str
    size: int
    sha256: str | None

    @property
    def quantization(self) -> str:
        """Quantization in the file's name or folder, otherwise the name without its extension."""
        stem = get_stem(self.path)
        found = QUANTIZATION_PATTERN.findall(os.path.basename(stem)) or QUANTIZATION_PATTERN.findall(stem)
        return re.sub(r"FP(16|32)", r"F\1", found[-1].upper()) if found else os.path.basename(stem)


@dataclass(frozen=True, slots=True)
class Variant:
    """A model of a repository in one quantization, with all of its files in order."""

    stem: str
    quantization: str
    files: tuple[RepositoryFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class RepositoryContents:
    """Models, projectors and MTP heads of a repository."""

    variants: tuple[Variant, ...]
    projectors: tuple[RepositoryFile, ...]
    mtp_heads: tuple[RepositoryFile, ...]


def get_stem(path: str) -> str:
    """Return the path without its extension and the number of its shard.

    >>> get_stem("Q4_K_M/big-Q4_K_M-00001-of-00003.gguf")
    'Q4_K_M/big-Q4_K_M'
    """
    match = SHARD_PATTERN.fullmatch(path)
    return match["stem"] if match else path.removesuffix(".gguf")


def group_files(files: Iterable[RepositoryFile]) -> RepositoryContents:
    """Group the GGUF files of a repository. Split models with missing shards are left out.

    >>> group_files([RepositoryFile("a-Q8_0.gguf", 9, None)]).variants[0].quantization
    'Q8_0'
    """
    projectors, heads, stems = [], [], dict[str, list[RepositoryFile]]()
    for file in sorted(files, key=lambda file: file.path):
        name = os.path.basename(file.path).lower()
        if not name.endswith(".gguf") or "imatrix" in name:
            continue
        if "mmproj" in name:
            projectors.append(file)
        elif name.startswith("mtp-"):  # the name that llama.cpp looks for
            heads.append(file)
        else:
            stems.setdefault(get_stem(file.path), []).append(file)
    variants = [Variant(stem, parts[0].quantization, tuple(parts)) for stem, parts in stems.items() if is_whole(parts)]
    return RepositoryContents(tuple(variants), tuple(projectors), tuple(heads))


def is_whole(parts: Sequence[RepositoryFile]) -> bool:
    """Return whether these files of one stem are all shards of a model, or one file: `is_whole(parts)`."""
    match = SHARD_PATTERN.fullmatch(parts[0].path)
    return len(parts) == (int(match["count"]) if match else 1)


def find_variants(contents: RepositoryContents, label: str, quantization: str | None) -> list[Variant]:
    """Return the model in the named quantization, or those to choose from, largest first.

    Without a name, unquantized files count only if there are no others. Raises DownloadFailed with the existing
    quantizations if there is no such model, and with the files if there are several.
    """
    variants = sorted(contents.variants, key=lambda variant: variant.size, reverse=True)
    if not variants:
        raise DownloadFailed(label, "the repository has no GGUF model")
    if quantization is None:
        found = [variant for variant in variants if variant.quantization not in UNQUANTIZED] or variants
    else:
        found = [variant for variant in variants if variant.quantization.lower() == quantization.lower()]
    if not found:
        known = ", ".join(dict.fromkeys(f"{variant.quantization} ({variant.size:,} bytes)" for variant in variants))
        raise DownloadFailed(label, f"there is no quantization {quantization}; the repository has: {known}")
    duplicates = [variant for variant in found if sum(v.quantization == variant.quantization for v in found) > 1]
    if duplicates:
        names = ", ".join(variant.files[0].path for variant in duplicates)
        raise DownloadFailed(label, f"the repository has several models; name a file as owner/repo:file.gguf: {names}")
    return found


def choose_projector(contents: RepositoryContents, variant: Variant) -> RepositoryFile | None:
    """Return the projector that belongs to a model: the nearest by folder and name, then F16; None if there is none."""

    def rank(file: RepositoryFile) -> tuple[int, int]:
        known = file.quantization in PROJECTOR_ORDER
        order = PROJECTOR_ORDER.index(file.quantization) if known else len(PROJECTOR_ORDER)
        return -count_common_words(file.path, variant.stem), order

    return min(contents.projectors, key=rank, default=None)


def choose_mtp_head(contents: RepositoryContents, variant: Variant) -> RepositoryFile | None:
    """Return the MTP head that belongs to a model: the nearest by name, then by quantization, then the smallest."""

    def rank(file: RepositoryFile) -> tuple[int, bool, int]:
        return -count_common_words(file.path, variant.stem), file.quantization != variant.quantization, file.size

    return min(contents.mtp_heads, key=rank, default=None)


def count_common_words(path: str, stem: str) -> int:
    """Return how many words of a model's name are also in the name of another file, without quantizations.

    >>> count_common_words("mmproj-gemma-3-4b-f16.gguf", "gemma-3-4b-Q4_K_M")
    3
    """
    words = [set(re.split(r"[-._/]", QUANTIZATION_PATTERN.sub("", name).lower())) for name in (get_stem(path), stem)]
    return len((words[0] & words[1]) - {""})
