"""Models in Hugging Face repositories: fetches file metadata, downloads to the staging directory, checks the sha256.

The hub's library runs in a child process (hub_child.py), so that it is optional and can be interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from afterglow.errors import DownloadFailed
from afterglow.installation import format_install_command
from afterglow.registry.catalog import HubFile
from afterglow.registry.staging import DISK_FULL_PATTERN, DownloadProgress, make_disk_full_error, run_with_progress

CHILD_SCRIPT = Path(__file__).with_name("hub_child.py")
CHILD_ENVIRONMENT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFileInfo:
    """Metadata of a file at the time of the download."""

    sha256: str
    size: int | None
    commit: str


def fetch_file_info(source: HubFile, folder: Path) -> HubFileInfo:
    """Fetch the size, the sha256 and the commit of the revision from the hub.

    fetch_file_info(HubFile(repository="owner/repo", file="model.gguf"), folder).size
    """
    info = json.loads(run_hub_child(source, source.revision, "describe", folder, lambda _: None))
    reported = info["sha256"] if SHA256_PATTERN.fullmatch(info["sha256"] or "") else None
    expected = source.sha256 or reported
    if expected is None:
        raise DownloadFailed(source.label, "the hub reports no sha256 for this file, so it cannot be checked")
    check_sha256(source, expected, reported or expected)
    return HubFileInfo(expected, info["size"], info["commit"])


def fetch_from_hub(source: HubFile, info: HubFileInfo, folder: Path, progress: DownloadProgress) -> Path:
    """Download the file to `folder`, check it and return its path: `fetch_from_hub(source, info, folder, print)`."""

    def report(done: int) -> None:
        progress(done if info.size is None else min(done, info.size), info.size)

    # By commit: the branch may have moved since the metadata was fetched.
    run_hub_child(source, info.commit, "download", folder, report, needed=info.size or 0)
    complete = folder / source.file
    with complete.open("rb") as stream:
        check_sha256(source, info.sha256, hashlib.file_digest(stream, "sha256").hexdigest())
        os.fsync(stream.fileno())  # the rename may become durable before the data
    return complete


def fetch_head_from_hub(source: HubFile, nbytes: int, folder: Path) -> Path:
    """Download the first bytes of a file to a sparse file of its size: `fetch_head_from_hub(source, 1024, folder)`."""
    run_hub_child(source, source.revision, "head", folder, lambda _: None, limit=nbytes)
    return folder / source.file


def run_hub_child(
    source: HubFile,
    revision: str,
    action: str,
    folder: Path,
    report: Callable[[int], None],
    needed: int = 0,
    limit: int | None = None,
) -> str:
    """Run hub_child.py and return its stdout; raise DownloadFailed with its error.

    run_hub_child(source, "main", "describe", folder, print)
    """
    command = [sys.executable, "-P", str(CHILD_SCRIPT), action, source.repository, revision, source.file, str(folder)]
    command += [] if limit is None else [str(limit)]
    result = run_with_progress(command, folder, report, CHILD_ENVIRONMENT)
    if result.returncode == 0:
        return result.stdout
    if "No module named 'huggingface_hub'" in result.stderr:
        raise DownloadFailed(source.label, f"the hub's library is not installed; run: {format_install_command('hub')}")
    if DISK_FULL_PATTERN.search(result.stderr):
        raise make_disk_full_error(source.label, folder.parent, needed)
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    raise DownloadFailed(source.label, lines[-1] if lines else f"the hub's library exited with {result.returncode}")


def check_sha256(source: HubFile, expected: str, actual: str) -> None:
    """Raise DownloadFailed with both checksums if they differ: `check_sha256(source, reported, computed)`."""
    if actual != expected:
        raise DownloadFailed(source.label, f"wrong checksum: expected sha256 {expected}, got {actual}")
