"""Weights in memory: loading, metadata and what kind of memory the model needs. Has no context of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from afterglow.errors import Cancelled, InvalidArgument, InvalidModel, ModelNotFound, OutOfMemory
from afterglow.llama.checks import check_float, check_integer
from afterglow.llama.gguf import probe
from afterglow.llama.gguf.fingerprint import compute_fingerprint
from afterglow.llama.gguf.footprint import Footprint, estimate_footprint
from afterglow.llama.gguf.header import GGUFHeader, read_header
from afterglow.llama.handle import Handle
from afterglow.llama.library.devices import get_free_memory
from afterglow.llama.library.loader import get_library
from afterglow.llama.settings import ContextSettings
from afterglow.llama.vocabulary import Vocabulary

ProgressCallback = Callable[[float], bool | None]
MemoryKind = Literal["attention", "window", "recurrent", "hybrid", "none"]
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}
LOAD_MODES = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How to load the weights."""

    gpu_layers: int = 0  # layers on the GPU; -1: all
    main_gpu: int = 0
    split_mode: Literal["none", "layer", "row"] = "layer"
    tensor_split: tuple[float, ...] = ()  # proportions over the GPUs; empty: by free memory
    mmap: bool = True
    mlock: bool = False
    mtp: bool = False  # load the multi-token-prediction heads too
    vocab_only: bool = False
    check_tensors: bool = False  # look for NaN and broken blocks in every weight; slow

    def __post_init__(self) -> None:
        check_integer("gpu_layers", self.gpu_layers, -1)
        check_integer("main_gpu", self.main_gpu, 0, 255)
        for share in self.tensor_split:
            check_float("tensor_split", share, 0)
        if self.split_mode not in SPLIT_MODES:
            raise InvalidArgument("split_mode", f"must be one of {', '.join(SPLIT_MODES)}, not {self.split_mode!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a model is."""

    path: Path
    description: str
    architecture: str
    quantization: str
    parameter_count: int
    nbytes: int
    layer_count: int
    mtp_layer_count: int
    embedding_length: int
    vocabulary_size: int
    trained_context_length: int
    memory_kind: MemoryKind
    sliding_window: int  # tokens a sliding-window layer sees; 0: none
    uses_mrope: bool  # positions and cells are different numbers
    is_causal: bool


class LlamaModel(Handle):
    """Loaded weights.

    >>> with Model.load(Path("model.gguf")) as model:
    ...     model.info.memory
    'attention'
    """

    def __init__(self, pointer: Any, path: Path, settings: ModelSettings) -> None:
        super().__init__("model", pointer)
        self.path = path
        self.settings = settings
        self._library = get_library()
        self.vocabulary = Vocabulary(self)

    @classmethod
    def load(
        cls,
        path: Path,
        settings: ModelSettings | None = None,
        *,
        progress: ProgressCallback | None = None,
        trust: bool = False,
    ) -> LlamaModel:
        """Load a GGUF file (of a split model: its first part).

        A file never seen before is first checked and probed in a child process, because a malformed one aborts
        inside llama.cpp; `trust` skips that. `progress` gets 0.0 to 1.0; returning False cancels.
        """
        path, settings = Path(path), settings or ModelSettings()
        if not path.is_file():
            raise ModelNotFound(str(path), "there is no such file")
        if not trust:
            probe.ensure_safe(path)
        pointer = _load_pointer(path, settings, progress)
        return cls(pointer, path, settings)

    def _free(self, pointer: Any) -> None:
        self._library.symbols.llama_model_free(pointer)

    @functools.cached_property
    def metadata(self) -> dict[str, str]:
        """The file's metadata as llama.cpp prints it; long arrays are shortened by it."""
        symbols = self._library.symbols
        count = symbols.llama_model_meta_count(self.pointer)
        keys = [self._read_string(symbols.llama_model_meta_key_by_index, index) for index in range(count)]
        values = [self._read_string(symbols.llama_model_meta_val_str_by_index, index) for index in range(count)]
        return dict(zip(keys, values, strict=True))

    @functools.cached_property
    def info(self) -> ModelInfo:
        symbols, pointer = self._library.symbols, self.pointer
        architecture = self.metadata.get("general.architecture", "unknown")
        return ModelInfo(
            path=self.path,
            description=self._read_string(symbols.llama_model_desc),
            architecture=architecture,
            quantization=self._library.decode_string(symbols.llama_ftype_name(symbols.llama_model_ftype(pointer))),
            parameter_count=symbols.llama_model_n_params(pointer),
            nbytes=symbols.llama_model_size(pointer),
            layer_count=symbols.llama_model_n_layer(pointer),
            mtp_layer_count=symbols.llama_model_n_layer_nextn(pointer),
            embedding_length=symbols.llama_model_n_embd(pointer),
            vocabulary_size=self.vocabulary.size,
            trained_context_length=symbols.llama_model_n_ctx_train(pointer),
            memory_kind=self._detect_memory_kind(),
            sliding_window=symbols.llama_model_n_swa(pointer),
            uses_mrope=symbols.llama_model_rope_type(pointer) in (8, 24, 40),  # M-RoPE, vision and interleaved M-RoPE
            is_causal=self.metadata.get(f"{architecture}.attention.causal", "true") != "false",
        )

    def _detect_memory_kind(self) -> MemoryKind:
        symbols, pointer = self._library.symbols, self.pointer
        if symbols.llama_model_is_hybrid(pointer):
            return "hybrid"
        if symbols.llama_model_is_recurrent(pointer):
            return "recurrent"
        if symbols.llama_model_n_swa(pointer) > 0:
            return "window"
        return "attention"

    @functools.cached_property
    def header(self) -> GGUFHeader:
        return read_header(self.path)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The identity of the weights by their content, all parts together."""
        return blake3(
            "".join(compute_fingerprint(part) for part in probe.list_split_files(self.path)).encode()
        ).hexdigest()

    @property
    def embedding_width(self) -> int:
        """Floats in one embedding this model gives out."""
        return int(self._library.symbols.llama_model_n_embd_out(self.pointer))

    @property
    def class_count(self) -> int:
        """Numbers a ranking model gives out."""
        return int(self._library.symbols.llama_model_n_cls_out(self.pointer))

    def estimate_footprint(self, settings: ContextSettings) -> Footprint:
        """What this model and a context of `settings` take, in bytes."""
        return estimate_footprint(self.header, settings)

    def check_fits(self, settings: ContextSettings) -> None:
        """`OutOfMemory`, with both numbers, where a context of `settings` cannot fit beside what is loaded."""
        needed = self.estimate_footprint(settings).context_bytes
        # Layers for a GPU stay on the processor where there is none.
        available = get_free_memory(gpu=True) if self.settings.gpu_layers != 0 else 0
        available = available or get_free_memory(gpu=False)
        if needed > available:
            raise OutOfMemory(needed, available, "ask for fewer cells or sequences, or smaller cache types")

    def get_chat_template(self, name: str | None = None) -> str | None:
        """The model's own chat template, or the one it calls `name` (for example `tool_use`)."""
        wanted = self._library.ffi.NULL if name is None else name.encode()
        return (
            self._library.decode_string(self._library.symbols.llama_model_chat_template(self.pointer, wanted)) or None
        )

    def _read_string(self, function: Any, *arguments: Any) -> str:
        """Call one of llama.cpp's functions that fill a text buffer, with a buffer that is large enough."""
        ffi = self._library.ffi
        size = function(self.pointer, *arguments, ffi.NULL, 0) + 1
        buffer = ffi.new("char[]", max(size, 1))
        function(self.pointer, *arguments, buffer, max(size, 1))
        return str(ffi.string(buffer).decode("utf-8", "replace"))


def _load_pointer(path: Path, settings: ModelSettings, progress: ProgressCallback | None) -> Any:
    opened = get_library()
    ffi, symbols = opened.ffi, opened.symbols
    stopped: list[BaseException] = []

    @ffi.callback("bool(float, void *)")  # type: ignore[untyped-decorator]
    def report(fraction: float, _: Any) -> bool:
        try:
            if progress is not None and progress(fraction) is False:
                stopped.append(Cancelled(f"loading {path} was cancelled by its progress callback"))
        except BaseException as error:  # must not cross C; raised again below
            stopped.append(error)
        return not stopped

    parameters, keep = _build_parameters(settings)
    parameters.progress_callback = report
    opened.log_bridge.take_error("")
    pointer = symbols.llama_model_load_from_file(str(path).encode(), parameters)
    del keep
    if stopped:
        if pointer != ffi.NULL:  # said no at the very end
            symbols.llama_model_free(pointer)
        raise stopped[0]
    if pointer == ffi.NULL:
        raise InvalidModel(str(path), opened.log_bridge.take_error("llama.cpp refused it without a word"))
    return pointer


def _build_parameters(settings: ModelSettings) -> tuple[Any, Any]:
    opened = get_library()
    parameters = opened.symbols.llama_model_default_params()
    parameters.n_gpu_layers = settings.gpu_layers
    parameters.main_gpu = settings.main_gpu
    parameters.split_mode = SPLIT_MODES[settings.split_mode]
    parameters.load_mode = LOAD_MODES[settings.mmap, settings.mlock]
    parameters.load_mtp = settings.mtp
    parameters.vocab_only = settings.vocab_only
    parameters.check_tensors = settings.check_tensors
    split = opened.ffi.new("float[]", opened.symbols.llama_max_devices())
    if len(settings.tensor_split) > len(split):
        raise InvalidArgument("tensor_split", f"has {len(settings.tensor_split)} shares for {len(split)} devices")
    split[0 : len(settings.tensor_split)] = settings.tensor_split
    if settings.tensor_split:
        parameters.tensor_split = split
    return parameters, split
