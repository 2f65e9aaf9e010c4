"""Models in Hugging Face repositories: lists, searches, fetches metadata, downloads and checks the sha256.

The hub's library runs in a child process (hub_child.py), so that it is optional and can be interrupted.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afterglow.errors import DownloadFailed
from afterglow.installation import format_install_command
from afterglow.registry.catalog import HubFile, HubRepository
from afterglow.registry.quantizations import RepositoryFile
from afterglow.registry.staging import DISK_FULL_PATTERN, DownloadProgress, make_disk_full_error, run_with_progress

CHILD_SCRIPT = Path(__file__).with_name("hub_child.py")
CHILD_ENVIRONMENT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
MAX_MATCHES = 20


@dataclass(frozen=True, slots=True)
class HubFileInfo:
    """Metadata of a file at the time of the download."""

    sha256: str
    size: int | None
    commit: str


@dataclass(frozen=True, slots=True)
class HubMatch:
    """Repository that a search found."""

    name: str
    downloads: int | None
    licence: str | None
    gated: bool


def search_hub(words: str) -> list[HubMatch]:
    """Return the repositories with GGUF files whose names match, most downloaded first: `search_hub("qwen3 8b")`."""
    return [HubMatch(**match) for match in run_hub_query(f"search for {words!r}", "search", words, str(MAX_MATCHES))]


def fetch_listing(source: HubRepository) -> tuple[str, list[RepositoryFile]]:
    """Return the commit of the revision and the GGUF files: `fetch_listing(HubRepository(repository="owner/repo"))`."""
    listing = run_hub_query(source.label, "list", source.repository, source.revision)
    return listing["commit"], [RepositoryFile(**file) for file in listing["files"] if file["size"] is not None]


def fetch_file_info(source: HubFile) -> HubFileInfo:
    """Fetch the size, the sha256 and the commit of the revision from the hub.

    fetch_file_info(HubFile(repository="owner/repo", file="model.gguf")).size
    """
    info = run_hub_query(source.label, "describe", source.repository, source.revision, source.file)
    return HubFileInfo(check_reported_sha256(source, info["sha256"]), info["size"], info["commit"])


def check_reported_sha256(source: HubFile, reported: str | None) -> str:
    """Return the sha256 to check a file against; raise DownloadFailed if there is none, or not the catalog's."""
    reported = reported if SHA256_PATTERN.fullmatch(reported or "") else None
    expected = source.sha256 or reported
    if expected is None:
        raise DownloadFailed(source.label, "the hub reports no sha256 for this file, so it cannot be checked")
    check_sha256(source, expected, reported or expected)
    return expected


def fetch_from_hub(
    source: HubFile, info: HubFileInfo, folder: Path, progress: DownloadProgress, inherited: Collection[int] = ()
) -> Path:
    """Download the file to `folder`, continuing an earlier download there; check it and return its path.

    fetch_from_hub(source, info, folder, print)
    """

    def report(done: int) -> None:
        if info.size is not None and done > info.size:  # it could fill the disk
            shutil.rmtree(folder, ignore_errors=True)
            raise DownloadFailed(source.label, f"the hub sends more than the {info.size:,} bytes that it reported")
        progress(done, info.size)

    # By commit: the branch may have moved since the metadata was fetched.
    size = "" if info.size is None else str(info.size)
    arguments = [source.repository, info.commit, source.file, str(folder), info.sha256, size]
    run_hub_child(source.label, "download", arguments, folder, report, needed=info.size or 0, inherited=inherited)
    complete = folder / "complete"
    try:
        if info.size is not None and complete.stat().st_size != info.size:
            reason = f"the hub reported {info.size:,} bytes and sent {complete.stat().st_size:,}"
            raise DownloadFailed(source.label, reason)
        with complete.open("rb") as stream:
            check_sha256(source, info.sha256, hashlib.file_digest(stream, "sha256").hexdigest())
    except DownloadFailed:
        shutil.rmtree(folder, ignore_errors=True)  # to continue it would fail again
        raise
    return complete


def fetch_head_from_hub(source: HubFile, nbytes: int, folder: Path) -> Path:
    """Download the first bytes of a file to a sparse file of its size: `fetch_head_from_hub(source, 1024, folder)`."""
    arguments = [source.repository, source.revision, source.file, str(folder), str(nbytes)]
    run_hub_child(source.label, "head", arguments, folder, lambda _: None)
    return folder / source.file


def run_hub_query(label: str, action: str, *arguments: str) -> Any:
    """Run an action that downloads no file and return its result: `run_hub_query("qwen3", "search", "qwen3", "20")`."""
    with tempfile.TemporaryDirectory(prefix="afterglow-hub-") as folder:
        return json.loads(run_hub_child(label, action, arguments, Path(folder), lambda _: None))


def run_hub_child(
    label: str,
    action: str,
    arguments: Collection[str],
    folder: Path,
    report: Callable[[int], None],
    needed: int = 0,
    inherited: Collection[int] = (),
) -> str:
    """Run hub_child.py and return its stdout; raise DownloadFailed with its error.

    run_hub_child("owner/repo", "list", ["owner/repo", "main"], folder, print)
    """
    command = [sys.executable, "-P", str(CHILD_SCRIPT), action, *arguments]
    result = run_with_progress(command, folder, report, CHILD_ENVIRONMENT, inherited)
    if result.returncode == 0:
        return result.stdout
    if "No module named 'huggingface_hub'" in result.stderr:
        raise DownloadFailed(label, f"the hub's library is not installed; run: {format_install_command('hub')}")
    if DISK_FULL_PATTERN.search(result.stderr):
        raise make_disk_full_error(label, folder.parent, needed)
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    raise DownloadFailed(label, lines[-1] if lines else f"the hub's library exited with {result.returncode}")


def check_sha256(source: HubFile, expected: str, actual: str) -> None:
    """Raise DownloadFailed with both checksums if they differ: `check_sha256(source, reported, computed)`."""
    if actual != expected:
        raise DownloadFailed(source.label, f"wrong checksum: expected sha256 {expected}, got {actual}")
