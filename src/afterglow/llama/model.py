"""A loaded model: weights, metadata, vocabulary and memory kind. Contexts are created from it (context.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from afterglow.errors import Cancelled, InvalidArgument, InvalidModel, ModelNotFound, OutOfMemory
from afterglow.llama.checks import check_float, check_integer
from afterglow.llama.gguf import probe
from afterglow.llama.gguf.footprint import Footprint, estimate_footprint
from afterglow.llama.gguf.header import GGUFHeader, read_header
from afterglow.llama.handle import Handle
from afterglow.llama.library.devices import get_free_memory
from afterglow.llama.library.loader import get_library
from afterglow.llama.settings import ContextSettings
from afterglow.llama.vocabulary import Vocabulary

ProgressCallback = Callable[[float], bool | None]
MemoryKind = Literal["attention", "window", "recurrent", "hybrid", "none"]
SplitMode = Literal["none", "layer", "row"]
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}
MAX_MOE_LAYERS = 512  # more than any model has
LOAD_MODES = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings for loading the weights."""

    gpu_layers: int = 0  # layers on the GPU; -1: all
    cpu_moe_layers: int = 0  # first layers whose experts (MoE) stay in RAM
    main_gpu: int = 0
    split_mode: SplitMode = "layer"
    tensor_split: tuple[float, ...] = ()  # proportions over the GPUs; empty: by free memory
    mmap: bool = True
    mlock: bool = False
    mtp: bool = False  # load the multi-token-prediction (MTP) heads too
    vocab_only: bool = False
    check_tensors: bool = False  # check every weight for NaN and invalid blocks; slow

    def __post_init__(self) -> None:
        check_integer("gpu_layers", self.gpu_layers, -1)
        check_integer("cpu_moe_layers", self.cpu_moe_layers, 0, MAX_MOE_LAYERS)
        check_integer("main_gpu", self.main_gpu, 0, 255)
        for share in self.tensor_split:
            check_float("tensor_split", share, 0)
        if self.split_mode not in SPLIT_MODES:
            raise InvalidArgument("split_mode", f"must be one of {', '.join(SPLIT_MODES)}, not {self.split_mode!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Properties of a model."""

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
    sliding_window: int  # tokens visible to a sliding-window layer; 0: none
    uses_mrope: bool  # positions and cells are counted separately
    is_causal: bool


class LlamaModel(Handle):
    """A model loaded by llama.cpp.

    >>> with LlamaModel.load(Path("model.gguf")) as model:
    ...     model.info.memory_kind
    'attention'
    """

    def __init__(self, pointer: Any, path: Path, settings: ModelSettings) -> None:
        self._library = get_library()
        super().__init__("model", pointer, self._library.symbols.llama_model_free)
        self.path = path
        self.settings = settings
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
        """Load a GGUF file; for a split model, its first part.

        A new file is first inspected and loaded in a child process, because a malformed file aborts inside llama.cpp;
        `trust` skips that. `progress` is called with 0.0 to 1.0; returning False cancels the load.
        """
        path, settings = Path(path), settings or ModelSettings()
        if not path.is_file():
            raise ModelNotFound(str(path), "there is no such file")
        if not trust:
            probe.ensure_safe(path)
        return cls(_load_pointer(path, settings, progress), path, settings)

    @functools.cached_property
    def metadata(self) -> dict[str, str]:
        """The file's metadata as llama.cpp formats it; llama.cpp shortens long arrays."""
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
        """Content fingerprint of the weights, over all files of a split model."""
        return probe.compute_joint_fingerprint(probe.list_split_files(self.path))

    @property
    def embedding_width(self) -> int:
        """Number of floats in one output embedding."""
        return int(self._library.symbols.llama_model_n_embd_out(self.pointer))

    @property
    def class_count(self) -> int:
        """Number of output classes of a ranking model."""
        return int(self._library.symbols.llama_model_n_cls_out(self.pointer))

    def estimate_footprint(self, settings: ContextSettings) -> Footprint:
        """Estimate the memory of this model and a context of `settings`."""
        return estimate_footprint(self.header, settings)

    def check_fits(self, settings: ContextSettings) -> None:
        """Raise `OutOfMemory` if a context of `settings` does not fit into the free memory."""
        needed = self.estimate_footprint(settings).context_bytes
        # Without a GPU, layers meant for it stay on the CPU.
        available = get_free_memory(gpu=True) if self.settings.gpu_layers != 0 else 0
        available = available or get_free_memory(gpu=False)
        if needed > available:
            raise OutOfMemory(needed, available, "use fewer cells or sequences, or smaller cache types")

    def get_chat_template(self, name: str | None = None) -> str | None:
        """Return the model's default chat template, or the template `name`, for example `tool_use`."""
        name_argument = self._library.ffi.NULL if name is None else name.encode()
        template = self._library.symbols.llama_model_chat_template(self.pointer, name_argument)
        return self._library.decode_string(template) or None

    def _read_string(self, function: Any, *arguments: Any) -> str:
        """Call a llama.cpp function that fills a text buffer, with a buffer that is large enough."""
        ffi = self._library.ffi
        size = function(self.pointer, *arguments, ffi.NULL, 0) + 1
        buffer = ffi.new("char[]", max(size, 1))
        function(self.pointer, *arguments, buffer, max(size, 1))
        return str(ffi.string(buffer).decode("utf-8", "replace"))


def _load_pointer(path: Path, settings: ModelSettings, progress: ProgressCallback | None) -> Any:
    library = get_library()
    ffi, symbols = library.ffi, library.symbols
    errors: list[BaseException] = []

    @ffi.callback("bool(float, void *)")  # type: ignore[untyped-decorator]
    def report(fraction: float, _: Any) -> bool:
        try:
            if progress is not None and progress(fraction) is False:
                errors.append(Cancelled(f"loading {path} was cancelled by its progress callback"))
        except BaseException as error:  # must not propagate through C; raised again below
            errors.append(error)
        return not errors

    parameters, referenced = _build_parameters(settings)
    parameters.progress_callback = report
    library.log_bridge.take_error("")
    pointer = symbols.llama_model_load_from_file(str(path).encode(), parameters)
    del referenced  # `parameters` points to it
    if errors:
        if pointer != ffi.NULL:  # cancelled by the last call, after the load was complete
            symbols.llama_model_free(pointer)
        raise errors[0]
    if pointer == ffi.NULL:
        raise InvalidModel(str(path), library.log_bridge.take_error("llama.cpp rejected it and gave no reason"))
    return pointer


def _build_parameters(settings: ModelSettings) -> tuple[Any, list[Any]]:
    """Return `llama_model_params` and the arrays it points to, which must stay alive as long as the parameters."""
    library = get_library()
    parameters = library.symbols.llama_model_default_params()
    parameters.n_gpu_layers = settings.gpu_layers
    parameters.main_gpu = settings.main_gpu
    parameters.split_mode = SPLIT_MODES[settings.split_mode]
    parameters.load_mode = LOAD_MODES[settings.mmap, settings.mlock]
    parameters.load_mtp = settings.mtp
    parameters.vocab_only = settings.vocab_only
    parameters.check_tensors = settings.check_tensors
    split = library.ffi.new("float[]", library.symbols.llama_max_devices())
    if len(settings.tensor_split) > len(split):
        raise InvalidArgument("tensor_split", f"has {len(settings.tensor_split)} shares for {len(split)} devices")
    split[0 : len(settings.tensor_split)] = settings.tensor_split
    if settings.tensor_split:
        parameters.tensor_split = split
    overrides = _build_buffer_overrides(settings.cpu_moe_layers)
    if overrides:
        parameters.tensor_buft_overrides = overrides[0]
    return parameters, [split, *overrides]


def _build_buffer_overrides(moe_layers: int) -> list[Any]:
    """Return the array that keeps the experts of the first layers in RAM, and the text it points to."""
    if not moe_layers:
        return []
    library = get_library()
    layers = "|".join(map(str, range(moe_layers)))
    pattern = library.ffi.new("char[]", rf"blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps".encode())
    overrides = library.ffi.new("struct llama_model_tensor_buft_override[]", 2)  # the second one ends the array
    overrides[0].pattern, overrides[0].buft = pattern, library.symbols.ggml_backend_cpu_buffer_type()
    return [overrides, pattern]
