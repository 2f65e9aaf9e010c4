"""Writes a GGUF file: metadata, then tensors of seeded noise, of a constant, or given. Knows no architecture."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float32]
MetadataInput: TypeAlias = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]


def draw_noise(seed: int, name: str, *shape: int, scale: float) -> FloatArray:
    """Draw uniform noise with standard deviation `scale`.

    Each name has its own random stream, so that adding a tensor does not change the others.
    """
    # NumPy guarantees the raw bits of a bit generator never to change, but not `Generator.normal`.
    bits = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(math.prod(shape))
    unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    return (unit * np.float32(scale * math.sqrt(3.0))).reshape(shape)


class ModelWriter:
    """Collects metadata and tensors inside a `with` block, and writes the file at its end unless it raised.

    Shapes are in NumPy's order, slowest dimension first: a matrix that maps n numbers to m is (m, n).
    """

    def __init__(self, path: Path, architecture: str, *, seed: int, kind: str = "model") -> None:
        self.seed = seed
        self._gguf = gguf.GGUFWriter(path, architecture)
        self.add_metadata("general", {"type": kind, "name": f"afterglow tiny {architecture}"})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._gguf.write_header_to_file()
            self._gguf.write_kv_data_to_file()
            self._gguf.write_tensors_to_file()
        self._gguf.close()

    def add_metadata(self, prefix: str, values: Mapping[str, MetadataInput]) -> None:
        """Add metadata under `prefix.key`. Integers are stored as uint32, as llama.cpp reads them."""
        for suffix, value in values.items():
            key = f"{prefix}.{suffix}"
            match value:
                case bool():
                    self._gguf.add_bool(key, value)
                case int():
                    self._gguf.add_uint32(key, value)
                case float():
                    self._gguf.add_float32(key, value)
                case str():
                    self._gguf.add_string(key, value)
                case _:
                    self._gguf.add_array(key, value)

    def add_uint32_array(self, key: str, values: Sequence[int]) -> None:
        """Add an array of uint32. Arrays of `add_metadata` are of int32."""
        self._gguf.add_key_value(key, list(values), gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT32)

    def add_matrix(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        """Add a random linear map: inputs of unit variance give outputs of variance `gain` squared."""
        self.add_noise(name, rows, columns, scale=gain / math.sqrt(columns))

    def add_linear(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        """Add a random linear map with a bias of zero."""
        self.add_matrix(f"{name}.weight", rows, columns, gain=gain)
        self.add_constant(f"{name}.bias", 0.0, rows)

    def add_norm(self, name: str, width: int) -> None:
        """Add a layer norm with weight one and bias zero."""
        self.add_constant(f"{name}.weight", 1.0, width)
        self.add_constant(f"{name}.bias", 0.0, width)

    def add_noise(self, name: str, *shape: int, scale: float, half: bool = False) -> None:
        """Add a tensor of noise; `half` stores it as F16."""
        self.add_tensor(name, draw_noise(self.seed, name, *shape, scale=scale), half=half)

    def add_constant(self, name: str, value: float, *shape: int) -> None:
        """Add a tensor of one value."""
        self.add_tensor(name, np.full(shape, value, np.float32))

    def add_tensor(self, name: str, array: FloatArray, *, half: bool = False) -> None:
        """Add a tensor unchanged."""
        self._gguf.add_tensor(name, np.ascontiguousarray(array, np.float16 if half else np.float32))
