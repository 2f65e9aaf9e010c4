"""Records of pulled repositories: which files in the models directory belong to one model. One JSON file per model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from afterglow.registry.catalog import HubRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    """A model that was pulled by its repository. File names are those in the models directory."""

    repository: str
    revision: str
    commit: str
    quantization: str
    files: tuple[str, ...]  # the first one is opened; the others are its shards
    projector: str | None = None
    mtp_head: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)  # of all files; older records have none

    @property
    def source(self) -> HubRepository:
        """Its source, with the quantization."""
        return HubRepository(repository=self.repository, quantization=self.quantization, revision=self.revision)

    @property
    def all_files(self) -> tuple[str, ...]:
        """Names of all files, with the projector and the MTP head."""
        return (*self.files, *(name for name in (self.projector, self.mtp_head) if name is not None))

    @property
    def record_name(self) -> str:
        """File name of the record."""
        return f"{self.source.filename_prefix}{self.quantization}.json"


def write_record(directory: Path, model: PulledModel) -> None:
    """Write the record of a model whose files are complete: `write_record(models, model)`."""
    temporary = directory / f".{model.record_name}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(model), indent=2))
    os.replace(temporary, directory / model.record_name)


def list_records(directory: Path) -> list[PulledModel]:
    """Return the models whose files are all present in their sizes, newest first: `list_records(models)`."""
    found: list[tuple[float, PulledModel]] = []
    for path in directory.glob("*--*--*.json"):
        try:
            values = json.loads(path.read_text())
            model = PulledModel(**{**values, "files": tuple(values["files"])})
            is_complete = all(
                os.path.isfile(directory / name)
                and (not model.sizes or model.sizes[name] == os.path.getsize(directory / name))
                for name in model.all_files
            )
            if model.files and is_complete:
                found.append((path.stat().st_mtime, model))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):  # removed, or not a record
            continue
    return [model for _, model in sorted(found, key=lambda item: item[0], reverse=True)]


def find_record(directory: Path, source: HubRepository) -> PulledModel | None:
    """Return the model of a source, the newest one if it names no quantization: `find_record(models, source)`."""
    quantization = source.quantization and source.quantization.lower()
    for model in list_records(directory):
        is_same = (model.repository, model.revision) == (source.repository, source.revision)
        if is_same and quantization in (None, model.quantization.lower()):
            return model
    return None
