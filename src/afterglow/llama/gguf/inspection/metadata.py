"""Typed access to a header's metadata, as llama.cpp reads it: a value of an unexpected stored type is an error."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidModel
from afterglow.llama.gguf.formats import ValueType
from afterglow.llama.gguf.header import GGUFHeader, MetadataValue, StringArray


class MetadataReader:
    """Reads metadata values by type. A missing key gives its default."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.architecture = self.get_string("general.architecture") or ""

    def fail(self, reason: str) -> NoReturn:
        raise InvalidModel(str(self.header.path), reason)

    def build_key(self, name: str) -> str:
        """Return the full key of this architecture's `name`."""
        return f"{self.architecture}.{name}"

    def has_key(self, key: str) -> bool:
        return key in self.header.metadata

    def describe_type(self, key: str) -> str:
        """Describe the stored type of a key."""
        type_name = self.header.value_types[key].name
        is_array = isinstance(self.header.metadata[key], np.ndarray | StringArray)
        return f"an array of {type_name}" if is_array else type_name

    def _get_scalar(self, key: str, kind: ValueType) -> MetadataValue | None:
        if key in self.header.metadata and self.describe_type(key) != kind.name:
            self.fail(f"{key} is stored as {self.describe_type(key)}, it must be {kind.name}")
        return self.header.metadata.get(key)

    def get_uint32(self, key: str, default: int = 0) -> int:
        value = self._get_scalar(key, ValueType.UINT32)
        return value if isinstance(value, int) else default

    def get_uint16(self, key: str) -> int:
        value = self._get_scalar(key, ValueType.UINT16)
        return value if isinstance(value, int) else 0

    def get_float32(self, key: str) -> float | None:
        value = self._get_scalar(key, ValueType.FLOAT32)
        return value if isinstance(value, float) else None

    def get_string(self, key: str) -> str | None:
        value = self._get_scalar(key, ValueType.STRING)
        return value if isinstance(value, str) else None

    def get_bool(self, key: str, default: bool) -> bool:
        value = self._get_scalar(key, ValueType.BOOL)
        return value if isinstance(value, bool) else default

    def get_integers(self, key: str) -> list[int]:
        """Return the integers of a key that has one number, or one per layer."""
        value = self.header.metadata.get(key)
        if isinstance(value, np.ndarray):
            if self.header.value_types[key] not in (ValueType.UINT32, ValueType.INT32, ValueType.BOOL):
                self.fail(f"{key} is stored as {self.describe_type(key)}, it must be an array of UINT32 or INT32")
            return [int(element) for element in value]
        return [self.get_uint32(key)] if key in self.header.metadata else []

    def get_strings(self, key: str) -> StringArray | None:
        value = self.header.metadata.get(key)
        if value is not None and not isinstance(value, StringArray):
            self.fail(f"{key} is stored as {self.describe_type(key)}, it must be an array of STRING")
        return value

    def get_array(self, key: str, *kinds: ValueType) -> NDArray[Any] | None:
        value = self.header.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or self.header.value_types[key] not in kinds:
            allowed = " or ".join(kind.name for kind in kinds)
            self.fail(f"{key} is stored as {self.describe_type(key)}, it must be an array of {allowed}")
        return value
