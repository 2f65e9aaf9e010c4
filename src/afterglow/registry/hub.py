"""A model out of a Hugging Face repository: asked about, downloaded into the staging directory, checked.

The hub's library works in a process of its own (hub_child.py), so it is optional here, and can be interrupted.
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
from afterglow.registry.catalog import HubFile
from afterglow.registry.staging import DISK_FULL_PATTERN, DownloadProgress, make_disk_full_error, run_with_progress

CHILD_SCRIPT = Path(__file__).with_name("hub_child.py")
CHILD_ENVIRONMENT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFileInfo:
    """What the hub says of a file at the time of the pull."""

    sha256: str
    size: int | None
    commit: str


def fetch_file_info(source: HubFile, folder: Path) -> HubFileInfo:
    """Ask the hub for the size, the sha256, and the commit that the revision stands for.

    describe(HubFile(repository="owner/repo", file="model.gguf"), folder).size
    """
    answer = json.loads(run_hub_child(source, source.revision, "describe", folder, lambda _: None))
    told = answer["sha256"] if SHA256_PATTERN.fullmatch(answer["sha256"] or "") else None
    expected = source.sha256 or told
    if expected is None:
        raise DownloadFailed(source.label, "the hub gives no sha256 for this file, so it could not be checked")
    check_sha256(source, expected, told or expected)
    return HubFileInfo(expected, answer["size"], answer["commit"])


def fetch_from_hub(source: HubFile, info: HubFileInfo, folder: Path, progress: DownloadProgress) -> Path:
    """Leave the checked file in `folder` and give its path: `fetch_from_hub(source, facts, folder, print)`."""

    def report(done: int) -> None:
        progress(done if info.size is None else min(done, info.size), info.size)

    # By commit: the branch may have moved since the hub was asked.
    run_hub_child(source, info.commit, "download", folder, report, needed=info.size or 0)
    complete = folder / source.file
    with complete.open("rb") as stream:
        check_sha256(source, info.sha256, hashlib.file_digest(stream, "sha256").hexdigest())
        os.fsync(stream.fileno())  # a rename may reach the disk before the bytes do
    return complete


def run_hub_child(
    source: HubFile, revision: str, action: str, folder: Path, report: Callable[[int], None], needed: int = 0
) -> str:
    """Run hub_child.py, give what it prints, raise what it complains about.

    run_child(source, "main", "describe", folder, print)
    """
    command = [sys.executable, "-P", str(CHILD_SCRIPT), action, source.repository, revision, source.file, str(folder)]
    done = run_with_progress(command, folder, report, CHILD_ENVIRONMENT)
    if done.returncode == 0:
        return done.stdout
    if "No module named 'huggingface_hub'" in done.stderr:
        raise DownloadFailed(source.label, "it comes from a hub; run: pip install 'afterglow[hub]'")
    if DISK_FULL_PATTERN.search(done.stderr):
        raise make_disk_full_error(source.label, folder.parent, needed)
    complaints = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    raise DownloadFailed(source.label, complaints[-1] if complaints else f"the hub's library left {done.returncode}")


def check_sha256(source: HubFile, expected: str, found: str) -> None:
    """Raise DownloadFailed naming both sums where they differ: `require_sum(source, told, computed)`."""
    if found != expected:
        raise DownloadFailed(source.label, f"wrong checksum: sha256 {expected} was expected, {found} came")
