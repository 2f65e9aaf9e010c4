"""Published material that tests measure us with: source archives, pinned by their sha256, fetched once by pip.

Nothing of them is part of this repository. They are kept in the folder `tests` of afterglow's cache; any number of
test runs may ask at the same time.
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

# Read on import: later the tests move the caches to a temporary folder.
FOLDER = get_cache_directory("tests")
CHILD = Path(__file__).with_name("fetch_child.py")
PATIENCE = 280  # seconds; a test may take 300


@dataclass(frozen=True, slots=True)
class Archive:
    """A source archive of a package."""

    name: str
    version: str
    sha256: str


LLAMA_CPP = Archive("xllamacpp", "2026.10.11549", "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b")
JSON_SCHEMA = Archive("jsonschema", "4.26.0", "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326")


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """A schema of JSON-Schema-Test-Suite with its instances: (description, instance, whether it is valid)."""

    file: str
    description: str
    schema: Any
    tests: tuple[tuple[str, Any, bool], ...]


def chat_templates() -> dict[str, Path]:
    """The chat templates of real models that llama.cpp's source carries, by their names.

    >>> chat_templates()["google-gemma-2-2b-it"].suffix
    '.jinja'
    """
    return {path.stem: path for path in files(LLAMA_CPP, "*/models/templates/*.jinja")}


def schema_suite(draft: str = "draft2020-12") -> list[SchemaCase]:
    """JSON-Schema-Test-Suite, as the package jsonschema carries it. Its optional parts have names of their own, such as
    `draft2020-12/optional/format`.

    >>> schema_suite()[0].file
    'additionalProperties.json'
    """
    return [
        SchemaCase(
            path.name,
            case["description"],
            case["schema"],
            tuple((test["description"], test["data"], test["valid"]) for test in case["tests"]),
        )
        for path in files(JSON_SCHEMA, f"*/json/tests/{draft}/*.json")
        if path.parent.as_posix().endswith(f"/{draft}")  # a star matches folders too
        for case in json.loads(path.read_text(encoding="utf-8"))
    ]


def files(archive: Archive, wanted: str) -> list[Path]:
    """The files of the archive whose path matches, in order: `files(LLAMA_CPP, "*/models/*.gguf")`."""
    key = hashlib.sha256(f"{archive.sha256} {wanted}".encode()).hexdigest()[:16]
    folder = FOLDER / f"{archive.name}-{archive.version}-{key}"
    with alone(archive):
        if not folder.exists():
            extract(downloaded(archive), wanted, folder)
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    assert found, f"{archive.name} {archive.version} has no {wanted}"
    return found


def downloaded(archive: Archive) -> Path:
    """The archive as a file, checked each time it is opened."""
    path = FOLDER / f"{archive.name}-{archive.version}.tar.gz"
    if not path.exists() or digest(path) != archive.sha256:
        with tempfile.TemporaryDirectory(dir=FOLDER) as staging:
            staged = Path(staging) / path.name
            command = [sys.executable, "-P", str(CHILD), archive.name, archive.version, str(staged)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
            assert done.returncode == 0, f"{archive.name} {archive.version} could not be fetched: {done.stderr}"
            found = digest(staged)
            assert found == archive.sha256, f"{path.name}: sha256 {archive.sha256} was expected, {found} came"
            os.replace(staged, path)
    return path


def extract(archive: Path, wanted: str, folder: Path) -> None:
    """Put the members that match into `folder`, which appears whole or not at all."""
    staging = Path(tempfile.mkdtemp(dir=FOLDER))
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                if member.isfile() and fnmatch.fnmatch(member.name, wanted):
                    opened.extract(member, staging, filter="data")
        os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def digest(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def alone(archive: Archive) -> Iterator[None]:
    """Only one of several test runs fetches; the others wait and find it there."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{archive.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
