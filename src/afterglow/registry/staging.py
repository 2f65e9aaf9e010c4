"""Directories of downloads next to the target: staging directories, and partial downloads that can be continued.

A staging directory is always removed, also after its owner died. A partial download stays after a break, and one
process at a time works on it. Runs the programs that download and detects a full disk. Does not know model sources.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from afterglow.errors import DownloadFailed

DownloadProgress = Callable[[int, int | None], None]

POLL_INTERVAL_SECONDS = 0.1
STALE_AFTER_SECONDS = 24 * 3600
PARTIAL_STALE_AFTER_SECONDS = 7 * 24 * 3600
# Process start times are accurate to about a second. A directory older than its process by more than this has another
# owner: the pid was reused.
CLOCK_SLACK_SECONDS = 10
# Machines or containers may share a models directory; a pid is meaningful only on its own host.
HOST_ID = f"{zlib.crc32(platform.node().encode()):08x}"
STAGING_NAME_PATTERN = re.compile(r"\.pull-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-\w+")
PARTIAL_NAME_PATTERN = re.compile(r"\.pull-[0-9a-f]{64}")
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_FULL_PATTERN = re.compile(rf"\b(?:Errno|os error) (?:{'|'.join(map(str, DISK_FULL_ERRNOS))})\b")


@contextmanager
def open_staging_directory(directory: Path) -> Iterator[Path]:
    """Create a temporary directory on the same disk as `directory`; it is removed afterwards in any case.

    with open_staging_directory(models) as folder:
        os.replace(folder / "model.gguf", models / "model.gguf")
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_abandoned(directory)
    folder = Path(tempfile.mkdtemp(prefix=f".pull-{HOST_ID}-{os.getpid()}-", dir=directory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def lock_download(directory: Path, sha256: str, wait: Callable[[Path], None]) -> Iterator[int]:
    """Let one process at a time download a content; calls `wait(partial)` again and again while another one does.

    Yields a file descriptor. The lock is held until all processes that inherited it have closed it, so that a killed
    process does not leave a child that writes to the same file as the next owner.

    with lock_download(models, source.sha256, lambda partial: None) as lock: …
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f".pull-{sha256}.lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break  # otherwise the last owner removed the file in the meantime
        except BlockingIOError:
            wait(get_partial_directory(directory, sha256))
            time.sleep(POLL_INTERVAL_SECONDS)
        except FileNotFoundError:  # removed between the two calls
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield descriptor
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def get_partial_directory(directory: Path, sha256: str) -> Path:
    """Return the directory of the partial download of a content: `get_partial_directory(models, sha256)`."""
    return directory / f".pull-{sha256}"


@contextmanager
def open_partial_directory(directory: Path, sha256: str) -> Iterator[Path]:
    """Open the directory of a partial download. It is removed on success, and if it holds no bytes worth keeping.

    with open_partial_directory(models, sha256) as folder:
        os.replace(folder / "complete", models / "model.gguf")
    """
    remove_abandoned(directory)
    folder = get_partial_directory(directory, sha256)
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    except BaseException:
        if not get_largest_file_bytes(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(directory: Path) -> None:
    """Remove the staging directories of killed processes and old partial downloads: `remove_abandoned(models)`."""
    for folder in directory.glob(".pull-*"):
        if is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def is_abandoned(folder: Path) -> bool:
    """Return whether the owner of a staging directory is certainly dead, or a partial download is old.

    is_abandoned(models / ".pull-…")
    """
    owner = STAGING_NAME_PATTERN.fullmatch(folder.name)
    try:
        modified_time = folder.stat().st_mtime
        if PARTIAL_NAME_PATTERN.fullmatch(folder.name):
            times = [modified_time, *(file.stat().st_mtime for file in folder.iterdir())]
            return time.time() - max(times) > PARTIAL_STALE_AFTER_SECONDS
        if owner is None:
            return False
        if owner["host"] != HOST_ID:
            return time.time() - modified_time > STALE_AFTER_SECONDS
        return psutil.Process(int(owner["pid"])).create_time() > modified_time + CLOCK_SLACK_SECONDS
    except psutil.NoSuchProcess:
        return True
    except (OSError, psutil.Error):
        return False


def run_with_progress(
    command: Sequence[str],
    folder: Path,
    report: Callable[[int], None],
    environment: Mapping[str, str],
    inherited: Collection[int] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a program that downloads into `folder` and report the size of the largest file there as it grows.

    Any exception, from Ctrl-C or from `report`, kills the program first. The program inherits the file descriptors
    `inherited`.

    run_with_progress([sys.executable, "-m", "pip", …], folder, print, {}).returncode
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
        pass_fds=tuple(inherited),
    ) as process:
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=POLL_INTERVAL_SECONDS)
                    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
                except subprocess.TimeoutExpired:
                    report(get_largest_file_bytes(folder))
        except BaseException:
            process.kill()  # no SIGTERM needed: all files it leaves are in `folder`
            raise


def get_largest_file_bytes(folder: Path) -> int:
    """Return the size of the largest file below `folder`: a download and its finished copy must not count twice."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except OSError:  # moved or removed in the meantime
                continue
    return max(sizes)


def check_free_space(label: str, directory: Path, needed: int) -> None:
    """Raise DownloadFailed if `needed` bytes are not free: `check_free_space("smollm2", models, 2_000_000)`."""
    if get_free_bytes(directory) < needed:
        raise make_disk_full_error(label, directory, needed)


def make_disk_full_error(label: str, directory: Path, needed: int) -> DownloadFailed:
    """Return the error of a full disk, with its numbers: `raise make_disk_full_error("smollm2", models, 2_000_000)`."""
    required = f"{needed:,} bytes are needed" if needed else "the size is unknown"
    free = f"{get_free_bytes(directory):,} free"
    return DownloadFailed(label, f"not enough disk space in {directory}: {required}, {free}")


def get_free_bytes(directory: Path) -> int:
    """Return the free bytes on the disk of `directory`, which need not exist yet: `get_free_bytes(models)`."""
    existing = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free
