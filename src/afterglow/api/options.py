"""`LoadOptions`: how weights and context of a model are loaded, for `load`, served models and the commands."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from afterglow.errors import InvalidArgument
from afterglow.llama.checks import check_integer
from afterglow.llama.model import ModelSettings, SplitMode
from afterglow.llama.settings import CacheType, ContextSettings, RopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of weights and context. They are described in `afterglow.load`.

    >>> LoadOptions(context=1024, sequences=3).build_context_settings().cells
    3072
    """

    context: int = 4096
    sequences: int = 4
    threads: int | None = None
    gpu_layers: int | None = None
    split_mode: SplitMode = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    mmap: bool = True
    mlock: bool = False
    batch: int | None = None
    ubatch: int | None = None
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    flash_attention: bool | None = None
    kv_unified: bool = False
    swa_full: bool = False
    rope_scaling: RopeScaling = "model"
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None

    def build_model_settings(self) -> ModelSettings:
        """Return the settings of the weights, without GPU layers if their number is not set."""
        return ModelSettings(
            gpu_layers=self.gpu_layers or 0,
            main_gpu=self.main_gpu,
            split_mode=self.split_mode,
            tensor_split=self.tensor_split,
            mmap=self.mmap,
            mlock=self.mlock,
        )

    def build_context_settings(self) -> ContextSettings:
        """Return context settings for `sequences` requests of `context` tokens each."""
        sequences = check_integer("sequences", self.sequences, 1, 255)
        defaults = ContextSettings()
        if self.batch is not None and self.ubatch is not None and self.ubatch > self.batch:
            raise InvalidArgument("ubatch", f"is {self.ubatch}, but must be at most `batch`, {self.batch}")
        batch = max(defaults.batch, self.ubatch or 0) if self.batch is None else self.batch
        return ContextSettings(
            cells=sequences * check_integer("context", self.context, 1, 2**31 // 256),
            sequences=sequences,
            outputs=max(64, sequences),
            threads=count_usable_cores() if self.threads is None else self.threads,
            batch=batch,
            ubatch=defaults.ubatch if self.ubatch is None else self.ubatch,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            flash_attention=self.flash_attention,
            kv_unified=self.kv_unified,
            swa_full=self.swa_full,
            rope_scaling=self.rope_scaling,
            rope_freq_base=self.rope_freq_base,
            rope_freq_scale=self.rope_freq_scale,
            yarn_orig_ctx=self.yarn_orig_ctx,
            yarn_ext_factor=self.yarn_ext_factor,
            yarn_attn_factor=self.yarn_attn_factor,
            yarn_beta_fast=self.yarn_beta_fast,
            yarn_beta_slow=self.yarn_beta_slow,
        )


def count_usable_cores() -> int:
    """Return the number of physical cores this process may use. Hyper-threads would slow matrix products down."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
