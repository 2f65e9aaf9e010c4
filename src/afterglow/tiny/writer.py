"""A GGUF file in the making: settings, then tensors of seeded noise, of one value, or given.

It knows the file format and how noise is drawn; it knows no architecture.
"""

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

Array: TypeAlias = npt.NDArray[np.float32]
Value: TypeAlias = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]


def noise(seed: int, name: str, *shape: int, scale: float) -> Array:
    """Draw uniform noise whose standard deviation is `scale`.

    Each name has its own stream, so adding a tensor to a model leaves the others as they were.
    """
    # The raw bits of a bit generator are what NumPy promises never to change; `Generator.normal` is not.
    bits = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(math.prod(shape))
    unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    return (unit * np.float32(scale * math.sqrt(3.0))).reshape(shape)


class Writer:
    """Collects settings and tensors inside a `with`, and writes the file when the block ends well.

    Shapes are given as NumPy has them, slowest dimension first: a matrix that maps n numbers to m is (m, n).
    """

    def __init__(self, path: Path, architecture: str, *, seed: int, kind: str = "model") -> None:
        self.seed = seed
        self._file = gguf.GGUFWriter(path, architecture)
        self.settings("general", {"type": kind, "name": f"afterglow tiny {architecture}"})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._file.write_header_to_file()
            self._file.write_kv_data_to_file()
            self._file.write_tensors_to_file()
        self._file.close()

    def settings(self, prefix: str, values: Mapping[str, Value]) -> None:
        """Add metadata: each key is `prefix.key`. Every integer is unsigned, as llama.cpp reads them."""
        for suffix, value in values.items():
            key = f"{prefix}.{suffix}"
            match value:
                case bool():
                    self._file.add_bool(key, value)
                case int():
                    self._file.add_uint32(key, value)
                case float():
                    self._file.add_float32(key, value)
                case str():
                    self._file.add_string(key, value)
                case _:
                    self._file.add_array(key, value)

    def matrix(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        """Add a random linear map: numbers of unit variance come out with variance `gain` squared."""
        self.noise(name, rows, columns, scale=gain / math.sqrt(columns))

    def linear(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        """Add a random linear map with a bias of zero."""
        self.matrix(f"{name}.weight", rows, columns, gain=gain)
        self.constant(f"{name}.bias", 0.0, rows)

    def norm(self, name: str, width: int) -> None:
        """Add a layer norm that leaves what it normalizes as it is."""
        self.constant(f"{name}.weight", 1.0, width)
        self.constant(f"{name}.bias", 0.0, width)

    def noise(self, name: str, *shape: int, scale: float, half: bool = False) -> None:
        """Add a tensor of noise; `half` stores it as 16-bit floats."""
        self.given(name, noise(self.seed, name, *shape, scale=scale), half=half)

    def constant(self, name: str, value: float, *shape: int) -> None:
        """Add a tensor that holds one value everywhere."""
        self.given(name, np.full(shape, value, np.float32))

    def given(self, name: str, array: Array, *, half: bool = False) -> None:
        """Add a tensor as it is."""
        self._file.add_tensor(name, np.ascontiguousarray(array, np.float16 if half else np.float32))
