"""Opens llama.cpp after checking that this CPU can run it and that it has the expected ABI.

llama.cpp promises no stable ABI and wrong structs crash, so the structs are measured before the first real call.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import threading
from pathlib import Path
from typing import Any

from afterglow.errors import LibraryError
from afterglow.llama.library import cpu, logs, providers
from afterglow.llama.library.compiled_declarations import ffi
from afterglow.llama.library.declarations import BUILD
from afterglow.llama.library.mtp_functions import MTP_NAMES
from afterglow.llama.library.openmp import limit_spinning

# Defaults of the pinned build. Read through wrong structs, some of these values differ.
KNOWN_DEFAULTS: dict[str, dict[str, int]] = {
    "llama_context": {
        "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0, "n_outputs_max_per_seq": 1,
        "ctx_type": 0, "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1, "flash_attn_type": -1,
        "yarn_ext_factor": -1, "type_k": 1, "type_v": 1, "moe_cache_size": 0,
        "embeddings": 0, "offload_kqv": 1, "op_offload": 1, "swa_full": 1, "kv_unified": 0,
    },
    "llama_model": {
        "n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "main_gpu": 0,
        "vocab_only": 0, "check_tensors": 0, "use_extra_bufts": 1, "no_alloc": 0, "load_mtp": 0,
    },
}  # fmt: skip

REQUIRED_FUNCTIONS = (
    "llama_decode",
    "llama_memory_seq_rm",
    "llama_state_seq_get_data_ext",
    "mtmd_tokenize",
    "ggml_type_size",
)


class Symbols:
    """Functions of one library that may consist of several files. Each name is resolved once."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def __getattr__(self, name: str) -> Any:
        for handle in self._handles:
            try:
                function = getattr(handle, name)
            except (AttributeError, ffi.error):  # not declared, or not in this file
                continue
            setattr(self, name, function)
            return function
        raise AttributeError(name)


class Library:
    """The opened library: `ffi` creates C values, `symbols` has the functions."""

    def __init__(self, location: providers.LibraryLocation) -> None:
        self.location = location
        self.ffi: Any = ffi
        # If mtmd is a separate file, it needs llama, which needs ggml: opening mtmd loads the others from its folder.
        files = sorted(location.files, key=lambda path: (path != location.path, "mtmd" not in path.name, path.name))
        if location.provider.package == providers.LIBRARY_ENV_VAR:
            _share_cpp_runtime(self.ffi)
        with limit_spinning():
            self.symbols: Any = Symbols([_open_file(self.ffi, path) for path in files])
        self._check_abi()
        self.log_bridge = logs.LogBridge()
        self.version: str = self.decode_string(self.symbols.llama_version())
        self.supports_mtp = all(hasattr(self.symbols, name) for name in MTP_NAMES.values())
        for name, exported in MTP_NAMES.items() if self.supports_mtp else ():
            setattr(self.symbols, name, getattr(self.symbols, exported))
        c: Any = self.ffi.dlopen(None)
        self.strlen: Any = c.strlen

    def initialize(self) -> None:
        """Attach the log and load the compute backends. Called once per process."""
        self._log_callback = logs.attach_log(self.log_bridge, self.ffi, self.symbols)  # must outlive the library
        if self.symbols.ggml_backend_dev_count() == 0:  # the backends of this build are plug-ins beside the library
            self.symbols.ggml_backend_load_all_from_path(str(self.location.path.parent).encode())
        self.symbols.llama_backend_init()

    @property
    def build(self) -> str:
        """Build and reported version of llama.cpp, as used in the keys of saved states."""
        return f"{self.location.provider.build} ({self.version})"

    def decode_string(self, pointer: Any) -> str:
        """Decode a C string; NULL is empty."""
        return "" if pointer == self.ffi.NULL else self.ffi.string(pointer).decode("utf-8", "replace")

    def _check_abi(self) -> None:
        missing = [name for name in REQUIRED_FUNCTIONS if not hasattr(self.symbols, name)]
        if missing:
            raise self._build_abi_error(f"no function {missing[0]}")
        for struct, defaults in KNOWN_DEFAULTS.items():
            get_defaults = getattr(self.symbols, f"{struct}_default_params")
            declared = self.ffi.sizeof(f"struct {struct}_params")
            written = _measure_written_bytes(self.ffi, get_defaults)
            # The last bytes may be padding, which need not be written.
            if written is not None and not declared - 8 < written <= declared:
                raise self._build_abi_error(f"{struct}_params of {written} bytes instead of {declared}")
            actual = get_defaults()
            for name, value in defaults.items():
                if (got := getattr(actual, name)) != value:
                    raise self._build_abi_error(f"{struct}_params.{name} = {got} instead of {value}")

    def _build_abi_error(self, difference: str) -> LibraryError:
        return LibraryError(f"the structs and functions of llama.cpp {BUILD}", f"{difference} in {self.location.path}")


_open_lock = threading.Lock()


@functools.cache
def get_library() -> Library:
    """Return the library of this process; the first call opens and checks it.

    >>> get_library().build
    'b11549 (0.6.0-dev)'
    """
    # Two concurrent first calls would open it twice, and pointers of one instance are invalid in the other.
    with _open_lock:
        return _open_library()


@functools.cache
def _open_library() -> Library:
    location = providers.find_library()
    check_machine(location)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # otherwise an abort starts a debugger on the dying process
    os.environ.setdefault("GGML_CUDA_REGISTER_HOST", "1")  # without it, `memory_registration` has no effect
    library = Library(location)
    library.initialize()
    return library


def check_machine(location: providers.LibraryLocation) -> None:
    """Raise `LibraryError` if opening the library would kill the process: missing CPU features or an old glibc."""
    architecture, features = cpu.get_architecture(), cpu.get_features()
    missing = location.provider.required_cpu_features.get(architecture, frozenset()) - (features or frozenset())
    if features is not None and missing:
        raise LibraryError(
            f"a CPU with {', '.join(sorted(missing))} for {location.path.name}",
            f"a {architecture} CPU without them; set {providers.LIBRARY_ENV_VAR} to a library built for it",
        )
    name, version = platform.libc_ver()
    required = location.provider.min_glibc
    if name == "glibc" and tuple(int(part) for part in version.split(".")[:2]) < required:
        raise LibraryError(f"glibc {required[0]}.{required[1]} for {location.provider.package}", f"glibc {version}")


def _share_cpp_runtime(ffi: Any) -> None:
    """Open the C++ runtime for all libraries, as in a program that is linked with llama.cpp.

    A CUDA backend with static CUDA libraries exports a C++ runtime of its own. Without this, llama.cpp would call
    functions of both, and crash while it loads a model.
    """
    with contextlib.suppress(OSError):  # only Linux has this name
        ffi.dlopen("libstdc++.so.6", ffi.RTLD_NOW | ffi.RTLD_GLOBAL)


def _open_file(ffi: Any, path: Path) -> Any:
    try:
        return ffi.dlopen(str(path))
    except OSError as error:
        raise LibraryError(f"to open {path}", str(error)) from error


def _measure_written_bytes(ffi: Any, function: Any) -> int | None:
    """Return how many bytes a `*_default_params` call writes, or None if the ABI returns large structs differently."""
    if cpu.get_architecture() != "x86_64":
        return None
    size = 1024
    fill = ffi.cast("void (*)(void *)", function)
    first, second = ffi.new("unsigned char[]", b"\xa5" * size), ffi.new("unsigned char[]", b"\x5a" * size)
    fill(first)
    fill(second)
    pairs = zip(ffi.buffer(first, size), ffi.buffer(second, size), strict=True)
    return max((index + 1 for index, (byte, same_byte) in enumerate(pairs) if byte == same_byte), default=0)
