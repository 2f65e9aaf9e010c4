"""Created models: names for a model with a system prompt, a template, messages and parameters of their own.

Each is a file in the data directory, so that it outlives the server. A damaged file is skipped.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pydantic

from afterglow.llama.atomic_write import write_atomically
from afterglow.paths import get_data_directory
from afterglow.server.errors import invalid_request_error, validation_to_api_error
from afterglow.server.installed import add_tag, find_name
from afterglow.server.logs import logger
from afterglow.server.ollama.schema import OllamaMessage, OllamaOptions

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}(/[A-Za-z0-9][A-Za-z0-9._-]{0,79})?(:[A-Za-z0-9._-]{1,80})?")
MAX_STEM_CHARACTERS = 200  # of the name of a file; a longer one ends with a digest


class CreatedModel(pydantic.BaseModel):
    """A model that a client created from another one."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str  # with a tag
    source: str  # name of the model whose file it uses
    system: str | None = None
    template: str | None = None
    parameters: dict[str, Any] = pydantic.Field(default_factory=dict)
    messages: list[dict[str, Any]] = pydantic.Field(default_factory=list)
    license: str | None = None
    modified: float = pydantic.Field(default_factory=time.time)

    @property
    def options(self) -> OllamaOptions:
        """The parameters as options of a request."""
        return OllamaOptions.model_validate(self.parameters)

    @property
    def first_messages(self) -> list[OllamaMessage]:
        """Messages with which every conversation begins."""
        return [OllamaMessage.model_validate(message) for message in self.messages]

    def check(self) -> None:
        """Raise status 400 if a field cannot be used, such as one of another version of this program."""
        try:
            UsableFields.model_validate(self.model_dump(include={"parameters", "messages"}))
        except pydantic.ValidationError as error:
            errors = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
            raise validation_to_api_error(errors, self.model_dump()) from None


class UsableFields(pydantic.BaseModel):
    """The fields of a created model that requests have, too."""

    parameters: OllamaOptions
    messages: list[OllamaMessage]


class CreatedModelStore:
    """The created models of this machine. Files are read at every use: several servers may share the directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or get_data_directory("models")
        self._listed: tuple[list[str], list[str]] = [], []  # the files of the last search, and the models in them

    def find(self, name: str) -> CreatedModel | None:
        """Return a created model by its name, in any spelling that clients may use."""
        if (model := self._read(self._get_path(name))) is not None:
            return model
        # Requests for aliases and unknown models come here, too: other files are read only if there are new ones.
        known_files, names = self._listed
        if (files := self._list_files()) != known_files:
            names = [model.name for model in self.list_all()]
            self._listed = files, names
        found = find_name(name, names)
        return None if found is None else self._read(self._get_path(found))

    def list_all(self) -> list[CreatedModel]:
        """List the created models by name."""
        models = (self._read(self._directory / file) for file in sorted(self._list_files()))
        return [model for model in models if model is not None]

    def save(self, model: CreatedModel) -> None:
        """Write a created model, or replace one of the same name in any spelling, which it keeps.

        Raises status 400 if the name is not valid.
        """
        if not NAME_PATTERN.fullmatch(model.name):
            message = f"the name {model.name[:200]!r} is invalid: letters, digits, `.`, `_`, `-`, one `/` and a tag"
            raise invalid_request_error("model", message)
        if (existing := self.find(model.name)) is not None:
            model = model.model_copy(update={"name": existing.name})
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(self._get_path(model.name), [model.model_dump_json(indent=2).encode()])

    def delete(self, name: str) -> bool:
        """Delete a created model; return whether there was one."""
        path = self._get_path(name)
        if self._read(path) is None:
            return False
        path.unlink(missing_ok=True)
        return True

    def _list_files(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._directory) if name.endswith(".json")]
        except OSError:  # nothing was ever created
            return []

    def _get_path(self, name: str) -> Path:
        stem = quote(add_tag(name), safe="")
        if len(stem) > MAX_STEM_CHARACTERS:
            digest = hashlib.sha256(stem.encode()).hexdigest()
            stem = f"{stem[: MAX_STEM_CHARACTERS - len(digest) - 1]}-{digest}"
        return self._directory / f"{stem}.json"

    def _read(self, path: Path) -> CreatedModel | None:
        try:
            return CreatedModel.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("the created model in %s cannot be read: %s", path, error)
            return None
