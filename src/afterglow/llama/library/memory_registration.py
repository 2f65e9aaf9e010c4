"""Page-locks memory while it is transferred to a GPU, which is several times as fast as a pageable transfer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afterglow.llama.library.loader import get_library

MIN_REGISTERED_BYTES = 16 * 1024**2  # of smaller buffers, registering takes as long as it saves


@contextlib.contextmanager
def register_memory(data: NDArray[np.uint8]) -> Iterator[None]:
    """Register a buffer with the driver of the GPUs, for reading. Small buffers and CPUs need none.

    >>> with register_memory(np.zeros(100, dtype=np.uint8)):
    ...     pass  # transfers from the buffer
    """
    functions = _find_functions() if data.nbytes >= MIN_REGISTERED_BYTES else None
    if functions is None:
        yield
        return
    register, unregister = functions
    address = get_library().ffi.cast("void *", data.ctypes.data)
    is_registered = register(address, data.nbytes)  # false if the limit of locked memory is lower
    try:
        yield
    finally:
        if is_registered:
            unregister(address)


@functools.cache
def _find_functions() -> tuple[Any, Any] | None:
    """Return the functions of the first backend that has them: those of CUDA and HIP."""
    library = get_library()
    ffi, symbols = library.ffi, library.symbols
    for index in range(symbols.ggml_backend_dev_count()):
        backend = symbols.ggml_backend_dev_backend_reg(symbols.ggml_backend_dev_get(index))
        register = symbols.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_register_host_buffer")
        unregister = symbols.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_unregister_host_buffer")
        if register and unregister:
            return ffi.cast("_Bool (*)(void *, size_t)", register), ffi.cast("void (*)(void *)", unregister)
    return None
