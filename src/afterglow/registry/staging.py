"""The hidden directory a pull works in: made beside the target, always removed, swept when its owner died.

Also runs the programs that download into it, and knows what a full disk looks like. Knows nothing of sources.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from afterglow.errors import DownloadFailed

DownloadProgress = Callable[[int, int | None], None]

POLL_INTERVAL_SECONDS = 0.1
STALE_AFTER_SECONDS = 24 * 3600
# A process's start is known to about a second only; this much earlier than its start, it was not the owner.
CLOCK_SLACK_SECONDS = 10
# A models directory may be shared between machines or containers, where a pid says nothing about the others.
HOST_ID = f"{zlib.crc32(platform.node().encode()):08x}"
STAGING_NAME_PATTERN = re.compile(r"\.pull-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-\w+")
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_FULL_PATTERN = re.compile(rf"\b(?:Errno|os error) (?:{'|'.join(map(str, DISK_FULL_ERRNOS))})\b")


@contextmanager
def open_staging_directory(directory: Path) -> Iterator[Path]:
    """Give a directory to work in on the same disk as `directory`; it is gone afterwards, whatever happened.

    with staging(models) as folder:
        os.replace(folder / "model.gguf", models / "model.gguf")
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_abandoned(directory)
    folder = Path(tempfile.mkdtemp(prefix=f".pull-{HOST_ID}-{os.getpid()}-", dir=directory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(directory: Path) -> None:
    """Remove what pulls that were killed have left: `sweep(models)`."""
    for folder in directory.glob(".pull-*"):
        if is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def is_abandoned(folder: Path) -> bool:
    """Whether the process that made this staging directory is certainly gone: `abandoned(models / ".pull-…")`."""
    owner = STAGING_NAME_PATTERN.fullmatch(folder.name)
    try:
        changed = folder.stat().st_mtime
        if owner is None:
            return False
        if owner["host"] != HOST_ID:
            return time.time() - changed > STALE_AFTER_SECONDS
        return psutil.Process(int(owner["pid"])).create_time() > changed + CLOCK_SLACK_SECONDS
    except psutil.NoSuchProcess:
        return True
    except (OSError, psutil.Error):
        return False


def run_with_progress(
    command: Sequence[str], folder: Path, report: Callable[[int], None], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program that downloads into `folder`, reporting the size of the largest file there as it grows.

    An exception, be it Ctrl-C or one out of `report`, ends the program first.

    run_watched([sys.executable, "-m", "pip", …], folder, print, {}).returncode
    """
    variables = {**os.environ, "TMPDIR": str(folder), "PYTHONIOENCODING": "utf-8", **environment}
    with subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=POLL_INTERVAL_SECONDS)
                    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
                except subprocess.TimeoutExpired:
                    report(get_largest_file_bytes(folder))
        except BaseException:
            process.kill()  # not asked politely: all it could leave behind is in `folder`
            raise


def get_largest_file_bytes(folder: Path) -> int:
    """Bytes of the largest file below `folder`: a download and its finished copy must not count twice."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except OSError:  # moved or removed since it was listed
                continue
    return max(sizes)


def check_free_space(label: str, directory: Path, needed: int) -> None:
    """Raise DownloadFailed where `needed` bytes do not fit: `require_room("smollm2", models, 2_000_000)`."""
    if get_free_bytes(directory) < needed:
        raise make_disk_full_error(label, directory, needed)


def make_disk_full_error(label: str, directory: Path, needed: int) -> DownloadFailed:
    """The error of a full disk, with its numbers: `raise no_room("smollm2", models, 2_000_000)`."""
    asked = f"{needed:,} bytes are needed" if needed else "the size is not known"
    return DownloadFailed(label, f"no room in {directory}: {asked}, {get_free_bytes(directory):,} are free")


def get_free_bytes(directory: Path) -> int:
    """Bytes free where `directory` is, or will be once it is made: `free_bytes(models)`."""
    existing = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free
