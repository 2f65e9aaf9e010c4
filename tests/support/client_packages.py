"""Coding agents of npm, with the versions of tests/clients/package.json, fetched once into afterglow's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from afterglow.paths import get_cache_directory

# Evaluated on import: fixtures move the caches to a temporary folder later.
CACHE_DIRECTORY = get_cache_directory("tests")
PACKAGE_FILE = Path(__file__).parents[1] / "clients" / "package.json"
TIMEOUT_SECONDS = 900  # about 250 MB


def fetch_clients() -> Path:
    """Return the directory with the executables of the clients. Concurrent test runs share it."""
    digest = hashlib.sha256(PACKAGE_FILE.read_bytes()).hexdigest()[:12]
    directory = CACHE_DIRECTORY / f"clients-{digest}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".clients-{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            staging = directory.with_name(f".fetching-{digest}")
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            shutil.copy(PACKAGE_FILE, staging)
            # The packages choose their native executable in an install script.
            command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"]
            result = subprocess.run(
                command, cwd=staging, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
            assert result.returncode == 0, result.stderr[-2000:]
            os.replace(staging, directory)
    return directory / "node_modules" / ".bin"
