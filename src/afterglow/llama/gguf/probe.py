"""Trial load of a model file in a child process, because a malformed file aborts inside llama.cpp.

A file that passed is recorded by its fingerprint and the library's build, so the next load skips the trial.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from blake3 import blake3

from afterglow.errors import InvalidModel
from afterglow.llama.gguf.fingerprint import compute_fingerprint
from afterglow.llama.gguf.formats import SPLIT_FILE_NAME
from afterglow.llama.gguf.inspection import inspect_file
from afterglow.llama.library.declarations import BUILD
from afterglow.paths import get_cache_directory

BASE_TIMEOUT_SECONDS = 30.0  # added to the time to read the file; starting Python takes a while on a busy machine
MIN_READ_BYTES_PER_SECOND = 50_000_000


def ensure_safe(path: Path, companion: Path | None = None) -> None:
    """Return if loading `path` cannot harm this process; raise `InvalidModel` with the reason otherwise.

    With `companion`, check that LoRA adapter or projector together with the model at `path`.
    """
    paths = [path, *([companion] if companion else [])]
    files = [*list_split_files(path), *paths[1:]]
    if os.path.exists(_get_marker(files)):  # False if it cannot be read
        return
    for file in files:
        inspect_file(file)
    _try_in_child(paths, sum(file.stat().st_size for file in files))
    _record(files)


def is_proven(path: Path) -> bool:
    """Return whether a model was loaded before, so that its load needs no trial."""
    return os.path.exists(_get_marker(list_split_files(path)))  # False if it cannot be read


def check_headers(path: Path) -> None:
    """Raise `InvalidModel` if a file of a model cannot be read, or has a header that llama.cpp would not accept."""
    for file in list_split_files(path):
        inspect_file(file)


def record_proven(path: Path) -> None:
    """Record that a model was loaded and used, so that its next load needs no trial."""
    _record(list_split_files(path))


def _get_marker(files: list[Path]) -> Path:
    return get_cache_directory("probed") / f"{BUILD}-{compute_joint_fingerprint(files)[:32]}"


def _record(files: list[Path]) -> None:
    marker = _get_marker(files)
    with contextlib.suppress(OSError):  # it is tried again next time
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def list_split_files(path: Path) -> list[Path]:
    """Return the files of a split model, or the single file; raise `InvalidModel` if a part is missing."""
    match = SPLIT_FILE_NAME.search(path.name)
    if match is None:
        return [path]
    number, count = int(match[1]), int(match[2])
    if number != 1:
        raise InvalidModel(str(path), f"it is part {number} of {count}: name the first part")
    stem = path.name[: match.start()]
    files = [path.with_name(f"{stem}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise InvalidModel(str(path), f"its part {file.name} is missing")
    return files


def compute_joint_fingerprint(files: list[Path]) -> str:
    """Return one fingerprint for several files."""
    return str(blake3("".join(compute_fingerprint(file) for file in files).encode()).hexdigest())


def _try_in_child(paths: list[Path], nbytes: int) -> None:
    path = paths[-1]  # the file that errors name
    command = [sys.executable, "-m", "afterglow.llama.gguf.probe_child", *map(str, paths)]
    # The trial uses no GPU: initializing one takes seconds, and its memory may be in use.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "GGML_NO_BACKTRACE": "1"}
    timeout = BASE_TIMEOUT_SECONDS + nbytes / MIN_READ_BYTES_PER_SECOND
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            timeout=timeout,
            env=environment,
            check=False,
            start_new_session=True,  # Ctrl-C must not look like a crash of the trial; `run` kills the child itself
        )
    except subprocess.TimeoutExpired:
        raise InvalidModel(str(path), f"a trial load took longer than {timeout:.0f} s") from None
    if child.returncode == 0:
        return
    last_line = (child.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason was reported"])[-1]
    if child.returncode < 0:
        signal_name = signal.Signals(-child.returncode).name
        raise InvalidModel(str(path), f"a trial load crashed with {signal_name}: {last_line}")
    raise InvalidModel(str(path), last_line)
