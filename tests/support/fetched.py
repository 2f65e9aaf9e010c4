"""Published test data in source archives, pinned by sha256 and fetched once with pip.

The data is not part of this repository. It is cached in the folder `tests` of afterglow's cache; concurrent test runs
are safe.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afterglow.paths import get_cache_directory

# Evaluated on import: fixtures move the caches to a temporary folder later.
CACHE_DIRECTORY = get_cache_directory("tests")
CHILD_SCRIPT = Path(__file__).with_name("fetch_child.py")
TIMEOUT_SECONDS = 280  # below the 300 s limit of a test


@dataclass(frozen=True, slots=True)
class Archive:
    """Source archive of a package."""

    name: str
    version: str
    sha256: str


LLAMA_CPP = Archive("xllamacpp", "2026.10.11549", "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b")
JSON_SCHEMA = Archive("jsonschema", "4.26.0", "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326")


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """Schema of JSON-Schema-Test-Suite with its instances: (description, instance, is valid)."""

    file: str
    description: str
    schema: Any
    tests: tuple[tuple[str, Any, bool], ...]


def fetch_chat_templates() -> dict[str, Path]:
    """Return the chat templates of real models in the llama.cpp source, by name.

    >>> fetch_chat_templates()["google-gemma-2-2b-it"].suffix
    '.jinja'
    """
    return {path.stem: path for path in fetch_files(LLAMA_CPP, "*/models/templates/*.jinja")}


def fetch_schema_suite(draft: str = "draft2020-12") -> list[SchemaCase]:
    """Return JSON-Schema-Test-Suite from the package jsonschema. Optional parts have their own names, e.g.
    `draft2020-12/optional/format`.

    >>> fetch_schema_suite()[0].file
    'additionalProperties.json'
    """
    return [
        SchemaCase(
            path.name,
            case["description"],
            case["schema"],
            tuple((test["description"], test["data"], test["valid"]) for test in case["tests"]),
        )
        for path in fetch_files(JSON_SCHEMA, f"*/json/tests/{draft}/*.json")
        if path.parent.as_posix().endswith(f"/{draft}")  # a star also matches folders
        for case in json.loads(path.read_text(encoding="utf-8"))
    ]


def fetch_files(archive: Archive, pattern: str) -> list[Path]:
    """Return the sorted files of the archive that match a pattern: `fetch_files(LLAMA_CPP, "*/models/*.gguf")`."""
    key = hashlib.sha256(f"{archive.sha256} {pattern}".encode()).hexdigest()[:16]
    folder = CACHE_DIRECTORY / f"{archive.name}-{archive.version}-{key}"
    with lock_archive(archive):
        if not folder.exists():
            extract_members(download_archive(archive), pattern, folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    assert paths, f"{archive.name} {archive.version} has no {pattern}"
    return paths


def download_archive(archive: Archive) -> Path:
    """Return the path of the downloaded archive; checks the sha256 on every call."""
    path = CACHE_DIRECTORY / f"{archive.name}-{archive.version}.tar.gz"
    if not path.exists() or compute_sha256(path) != archive.sha256:
        with tempfile.TemporaryDirectory(dir=CACHE_DIRECTORY) as staging:
            staged = Path(staging) / path.name
            command = [sys.executable, "-P", str(CHILD_SCRIPT), archive.name, archive.version, str(staged)]
            result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
            assert result.returncode == 0, f"{archive.name} {archive.version} could not be fetched: {result.stderr}"
            actual = compute_sha256(staged)
            assert actual == archive.sha256, f"{path.name}: expected sha256 {archive.sha256}, got {actual}"
            os.replace(staged, path)
    return path


def extract_members(archive: Path, pattern: str, folder: Path) -> None:
    """Extract the matching members to `folder`, all or none."""
    staging = Path(tempfile.mkdtemp(dir=CACHE_DIRECTORY))
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                if member.isfile() and fnmatch.fnmatch(member.name, pattern):
                    opened.extract(member, staging, filter="data")
        os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def compute_sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def lock_archive(archive: Archive) -> Iterator[None]:
    """Lock an archive, so that only one of several test runs fetches it."""
    CACHE_DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (CACHE_DIRECTORY / f"{archive.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
