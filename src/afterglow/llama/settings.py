"""Settings of a context: validated, then converted to llama.cpp's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from afterglow.errors import InvalidArgument, UnsupportedOption
from afterglow.llama.checks import INT32_MAX, check_float, check_integer
from afterglow.llama.library.loader import get_library

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
CACHE_TYPES: dict[str, int] = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20,
}  # fmt: skip
UNQUANTIZED_CACHE_TYPES = ("f32", "f16", "bf16")
PoolingType = Literal["model", "none", "mean", "cls", "last", "rank"]
RopeScaling = Literal["model", "none", "linear", "yarn", "longrope"]
ROPE_SCALING_TYPES = {"model": -1, "none": 0, "linear": 1, "yarn": 2, "longrope": 3}
YARN_FACTORS = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
ROPE_OPTIONS = ("rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx", *YARN_FACTORS)
POOLING_TYPES = {"model": -1, "none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
CHOICES = {
    "rope_scaling": ROPE_SCALING_TYPES,
    "cache_type_k": CACHE_TYPES,
    "cache_type_v": CACHE_TYPES,
    "pooling": POOLING_TYPES,
}
MAX_SEQUENCES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """Settings of a context.

    `cells` is the total over all sequences. With `kv_unified=False` each sequence is a stream with cells / sequences
    cells of its own; with `kv_unified=True` all sequences share the cells.
    """

    cells: int = 4096
    sequences: int = 1
    batch: int = 512  # maximum rows of one decode
    ubatch: int = 512  # rows computed at once
    outputs: int = 64  # maximum rows of one decode with logits; each costs one float per token of the vocabulary
    threads: int = 0  # 0: llama.cpp's default
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    flash_attention: bool | None = None  # None: if the model and the device support it
    kv_unified: bool = False
    swa_full: bool = False  # keep all cells of sliding-window layers, not only the window
    recurrent_snapshots: int = 0  # rollback depth of recurrent and hybrid models, if the architecture supports it
    embeddings: bool = False
    pooling: PoolingType = "model"
    rope_scaling: RopeScaling = "model"  # "model": as in the model file
    rope_freq_base: float = 0.0  # 0: from the model
    rope_freq_scale: float = 0.0  # 0: from the model
    yarn_orig_ctx: int = 0  # context length of the training; 0: from the model
    yarn_ext_factor: float | None = None  # None: from the model, as for the three below
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None

    def __post_init__(self) -> None:
        check_integer("cells", self.cells, 1, INT32_MAX - 256)
        check_integer("sequences", self.sequences, 1, MAX_SEQUENCES)
        check_integer("batch", self.batch, 1)
        check_integer("ubatch", self.ubatch, 1)
        check_integer("outputs", self.outputs, 1)
        check_integer("threads", self.threads, 0, 512)
        check_integer("recurrent_snapshots", self.recurrent_snapshots, 0, 64)
        check_float("rope_freq_base", self.rope_freq_base, 0)
        check_float("rope_freq_scale", self.rope_freq_scale, 0)
        check_integer("yarn_orig_ctx", self.yarn_orig_ctx, 0)
        for name in YARN_FACTORS:
            if getattr(self, name) is not None:
                check_float(name, getattr(self, name), 0)
        if self.yarn_attn_factor is not None and self.yarn_ext_factor != 0:
            raise UnsupportedOption("yarn_attn_factor", "llama.cpp uses it only with yarn_ext_factor=0")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise InvalidArgument(name, f"must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if self.max_outputs < self.sequences:  # llama.cpp would abort
            raise InvalidArgument("outputs", f"and `batch` must be at least `sequences`, {self.sequences}")
        if self.cache_type_v not in UNQUANTIZED_CACHE_TYPES and self.flash_attention is False:
            raise UnsupportedOption("cache_type_v", f"{self.cache_type_v} needs flash attention, which is disabled")

    def build_parameters(self) -> Any:
        """Return `llama_context_params` with these settings; other fields have llama.cpp's defaults."""
        parameters = get_library().symbols.llama_context_default_params()
        parameters.n_ctx = self.cells
        parameters.n_seq_max = self.sequences
        parameters.n_batch = self.batch
        parameters.n_ubatch = min(self.ubatch, self.batch)
        parameters.n_outputs_max = self.max_outputs
        parameters.n_outputs_max_per_seq = 1  # of sequences with a sampler, see `top_logits`
        parameters.n_rs_seq = self.recurrent_snapshots
        parameters.type_k = CACHE_TYPES[self.cache_type_k]
        parameters.type_v = CACHE_TYPES[self.cache_type_v]
        parameters.flash_attn_type = -1 if self.flash_attention is None else int(self.flash_attention)
        parameters.kv_unified = self.kv_unified
        parameters.swa_full = self.swa_full
        parameters.embeddings = self.embeddings
        parameters.pooling_type = POOLING_TYPES[self.pooling]
        parameters.rope_scaling_type = ROPE_SCALING_TYPES[self.rope_scaling]
        parameters.rope_freq_base = self.rope_freq_base
        parameters.rope_freq_scale = self.rope_freq_scale
        parameters.yarn_orig_ctx = self.yarn_orig_ctx
        for name in YARN_FACTORS:
            if getattr(self, name) is not None:
                setattr(parameters, name, getattr(self, name))
        if self.threads:
            parameters.n_threads = parameters.n_threads_batch = self.threads
        return parameters

    @property
    def cells_per_sequence(self) -> int:
        """Maximum cells of one sequence, before llama.cpp rounds them up."""
        return self.cells if self.kv_unified else self.cells // self.sequences

    @property
    def max_outputs(self) -> int:
        """Maximum rows of one decode with outputs. With embeddings every row has one."""
        return self.batch if self.embeddings else min(self.outputs, self.batch)
