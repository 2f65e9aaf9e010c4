"""Lets a model file be tried by a child process first: a malformed one aborts inside llama.cpp.

A file that passed is remembered by its fingerprint and the library's build, so the next load costs nothing.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from blake3 import blake3

from afterglow.errors import InvalidModel
from afterglow.llama.gguf.fingerprint import compute_fingerprint
from afterglow.llama.gguf.inspection import inspect_file
from afterglow.llama.library.declarations import BUILD
from afterglow.paths import get_cache_directory

SPLIT_FILE_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
BASE_TIMEOUT_SECONDS = (
    30.0  # seconds, beside the time to read the file: on a busy machine Python alone takes some to start
)
MIN_READ_BYTES_PER_SECOND = 50_000_000


def ensure_safe(path: Path, companion: Path | None = None) -> None:
    """Return if loading `path` cannot hurt this process; `InvalidModel` with the reason if it would fail.

    With `beside`, the same for that adapter applied to this model, or that projector used with it.
    """
    tried = [path, *([companion] if companion else [])]
    files = [*list_split_files(path), *tried[1:]]
    remembered = get_cache_directory("probed") / f"{BUILD}-{compute_joint_fingerprint(files)}"
    if remembered.exists():
        return
    for file in files:
        inspect_file(file)
    _try_in_child(tried, sum(file.stat().st_size for file in files))
    remembered.parent.mkdir(parents=True, exist_ok=True)
    remembered.touch()


def list_split_files(path: Path) -> list[Path]:
    """The files of a split model, or the one file; `InvalidModel` where a part is missing."""
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
    """One name for several files together."""
    return str(blake3("".join(compute_fingerprint(file) for file in files).encode()).hexdigest()[:32])


def _try_in_child(paths: list[Path], nbytes: int) -> None:
    path = paths[-1]  # the one in question
    command = [sys.executable, "-m", "afterglow.llama.gguf.probe_child", *map(str, paths)]
    # No GPU for the trial: starting one takes seconds, and its memory may be in use.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "GGML_NO_BACKTRACE": "1"}
    patience = BASE_TIMEOUT_SECONDS + nbytes / MIN_READ_BYTES_PER_SECOND
    try:
        child = subprocess.run(command, capture_output=True, timeout=patience, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise InvalidModel(str(path), f"a trial load took longer than {patience:.0f} s") from None
    if child.returncode == 0:
        return
    last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it gave no reason"]
    if child.returncode < 0:
        how = signal.Signals(-child.returncode).name
        raise InvalidModel(str(path), f"a trial load ended the process with {how}: {last[0]}")
    raise InvalidModel(str(path), last[0])
