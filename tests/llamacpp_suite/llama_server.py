"""llama-server of the same llama.cpp build, from the wheel whose library afterglow loads, with parsed flags.

The wheel has no program: its class `Server` has the routes of llama-server and takes the values of the flags.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xllamacpp

THREADS = 1  # the models are small, and spinning threads disturb each other
FLASH_ATTENTION = {
    "on": "LLAMA_FLASH_ATTN_TYPE_ENABLED",
    "off": "LLAMA_FLASH_ATTN_TYPE_DISABLED",
    "auto": "LLAMA_FLASH_ATTN_TYPE_AUTO",
}
DIRECT_FLAGS = {  # attributes of `CommonParams` that take the value of a flag as it is
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "ctx_size": "n_ctx",
    "parallel": "n_parallel",
    "n_predict": "n_predict",
    "n_gpu_layers": "n_gpu_layers",
    "kv_unified": "kv_unified",
    "swa_full": "swa_full",
    "context_shift": "ctx_shift",
    "slots": "endpoint_slots",
    "metrics": "endpoint_metrics",
    "embedding": "embedding",
    "ui": "ui",
    "ui_mcp_proxy": "ui_mcp_proxy",
    "cache_ram": "cache_ram_mib",
    "cache_idle_slots": "cache_idle_slots",
    "sleep_idle_seconds": "sleep_idle_seconds",
    "chat_template": "chat_template",
    "cors_origins": "cors_origins",
    "jinja": "use_jinja",
    "cont_batching": "cont_batching",
    "offline": "offline",
    "no_mmproj": "no_mmproj",
}


CONVERTED_FLAGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "alias": ("model_alias", lambda names: set(names.split(","))),
    "tags": ("model_tags", lambda names: set(names.split(","))),
    "api_key": ("api_keys", lambda key: [key]),
    "slot_save_path": ("slot_save_path", lambda path: os.path.join(path, "")),
    "media_path": ("media_path", lambda path: os.path.join(path, "")),
    "chat_template_file": ("chat_template", lambda path: Path(path).read_text(encoding="utf-8")),
    "pooling": ("pooling_type", lambda name: get_enum("llama_pooling_type", f"LLAMA_POOLING_TYPE_{name.upper()}")),
    "flash_attn": ("flash_attn_type", lambda value: get_enum("llama_flash_attn_type", FLASH_ATTENTION[value])),
    "reasoning": ("enable_reasoning", lambda value: {"on": 1, "off": 0, "auto": -1}[value]),
    "reasoning_format": (
        "reasoning_format",
        lambda name: get_enum("common_reasoning_format", f"COMMON_REASONING_FORMAT_{name.upper()}"),
    ),
}
# Flags that the wheel takes no values for here: their files cannot be fetched, or they run programs.
REFUSED = (
    *("lora", "model_draft", "hf_repo_draft", "spec_synth_len", "spec_synth_rates", "models_dir", "models_preset"),
    *("tools", "tools_runtime", "mcp_servers_config", "mcp_servers_json", "cache_type_k", "cache_type_v"),
)


def build_params(flags: argparse.Namespace, model: Path) -> Any:
    """Convert flags to the parameters of the server. Flags that it cannot take end the program."""
    for flag in REFUSED:
        if getattr(flags, flag):
            raise SystemExit(f"launcher: --{flag.replace('_', '-')} is not part of this comparison")
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.warmup, params.fit_params = False, False
    params.port, params.hostnames = flags.port, flags.host.split(",")
    params.sampling.temp = flags.temp
    if flags.seed is not None:
        params.sampling.seed = flags.seed
    params.verbosity = 9 if flags.verbose else 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = flags.threads or THREADS
    for flag, attribute in DIRECT_FLAGS.items():
        if (value := getattr(flags, flag)) is not None:
            setattr(params, attribute, value)
    for flag, (attribute, convert) in CONVERTED_FLAGS.items():
        if (value := getattr(flags, flag)) is not None:
            setattr(params, attribute, convert(value))
    if flags.reranking:
        params.embedding, params.pooling_type = True, get_enum("llama_pooling_type", "LLAMA_POOLING_TYPE_RANK")
    if flags.reasoning in ("on", "off"):
        params.default_template_kwargs = {"enable_thinking": "true" if flags.reasoning == "on" else "false"}
    return params


def get_enum(enum: str, name: str) -> Any:
    """Return a value of an enum of the wheel."""
    return getattr(getattr(xllamacpp, enum), name)


def serve(flags: argparse.Namespace, model: Path) -> None:
    """Run llama-server until a signal ends the process."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = xllamacpp.Server(build_params(flags, model))
    print(f"llama-server at {server.listening_address}", flush=True)
    while True:
        signal.pause()
