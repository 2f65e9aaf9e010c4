"""Archives of the disk tier: one tar file for another machine. Every byte is verified on import."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk.index import DiskIndex, IndexRow, open_index
from afterglow.errors import InvalidArgument, InvalidState


def export_archive(
    directory: Path, target: Path, models: Collection[str] | None = None, names: Collection[str] | None = None
) -> int:
    """Write the intact blocks and checkpoints of all or some models to a new private file; return their number.

    `names`: only files with these names.
    """
    with open_index(directory) as index:
        rows = [
            row
            for row in index.list_rows()
            if (models is None or row.model in models) and (names is None or row.name in names)
        ]
    if target.exists():
        raise InvalidArgument("file", f"{target} already exists")
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".afterglow-")  # private
        try:
            with open(descriptor, "wb") as file:
                count = _write_archive(directory, file, rows)
                file.flush()
                os.fsync(file.fileno())
            target.touch(exist_ok=False)  # a hard link would not overwrite either, but some file systems have none
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except FileExistsError:
        raise InvalidArgument("file", f"{target} already exists") from None
    except OSError as error:
        raise InvalidArgument("file", f"{target} cannot be written: {error.strerror}") from None
    return count


def _write_archive(directory: Path, file: IO[bytes], rows: Sequence[IndexRow]) -> int:
    """Write the intact files of rows of the index; return their number."""
    count = 0
    with tarfile.open(fileobj=file, mode="w") as archive:
        for row in rows:
            name = f"{row.model}/{row.name}"
            with contextlib.suppress(FileNotFoundError, InvalidState):
                disk_files.load_file(directory / name)
                archive.add(directory / name, name, recursive=False)
                count += 1
        for model in sorted({row.model for row in rows}):
            name = f"{model}/{disk_files.LABEL_FILE_NAME}"
            with contextlib.suppress(FileNotFoundError):
                archive.add(directory / name, name, recursive=False)
    return count


def import_archive(directory: Path, source: Path) -> int:
    """Import an archive of `export_archive`; return the number of blocks and checkpoints. Other members are errors."""
    disk_files.prepare_directory(directory)
    try:
        with open_index(directory) as index, tarfile.open(source, "r:") as archive:
            return sum(_import_member(archive, member, directory, index) for member in archive)
    except (OSError, tarfile.TarError) as error:
        raise InvalidArgument("file", f"{source} cannot be read: {error}") from None


def _import_member(archive: tarfile.TarFile, member: tarfile.TarInfo, directory: Path, index: DiskIndex) -> int:
    """Import one member. Its content is verified in a temporary file before it is used."""
    model, _, name = member.name.partition("/")
    if not member.isreg() or len(model) != 64 or not set(model) <= set("0123456789abcdef"):
        raise InvalidState(f"{member.name[:100]!r} is not a file of the afterglow disk cache")
    data = archive.extractfile(member)
    assert data is not None  # a regular file has data
    folder = directory / model
    if name == disk_files.LABEL_FILE_NAME:
        if folder.is_dir() and not disk_files.read_label(folder):
            disk_files.write_label(folder, data.read(disk_files.MAX_LABEL_BYTES).decode("utf-8", "replace"))
        return 0
    if disk_files.parse_file_name(name) is None:
        raise InvalidState(f"{member.name[:100]!r} is not a file of the afterglow disk cache")
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        copy = Path(temporary) / name
        with copy.open("wb") as file:
            while chunk := data.read(1 << 20):
                file.write(chunk)
        loaded = disk_files.load_file(copy)
        if loaded.file.model.hex() != model:
            raise InvalidState(f"{name} belongs to another model")
        folder.mkdir(mode=0o700, exist_ok=True)
        item = replace(loaded.file, payload=[loaded.payload])
        index.add(item, disk_files.write_file(folder, item))
    return 1
