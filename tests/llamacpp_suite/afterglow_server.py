"""`afterglow serve` with the flags of llama-server."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import NoReturn

from llamacpp_suite import pool

DIRECTORY_VARIABLE = "LLAMA_SUITE_DIRECTORY"  # for the settings, the cache and templates
THREADS = 1  # as llama-server has in this comparison
DEFAULT_SLOTS = 4
DEFAULT_CONTEXT = 4096

# Flags without an equivalent, and why.
REFUSED = {
    "tags": "models have no tags",
    "context_shift": "a full context ends the answer; `overflow` of a request shortens its prompt",
    "lora": "adapters are not part of this comparison: the file cannot be fetched",
    "model_draft": "the draft model cannot be fetched",
    "hf_repo_draft": "the draft model cannot be fetched",
    "cors_origins": "origins are listed one by one (--allow-origin)",
    "ui_mcp_proxy": "the server forwards no requests",
    "tools": "the server runs no tools",
    "tools_runtime": "the server runs no tools",
    "mcp_servers_config": "the server runs no tools",
    "mcp_servers_json": "the server runs no tools",
    "backend_sampling": "samplers run on the CPU",
    "spec_synth_len": "drafts are real",
    "spec_synth_rates": "drafts are real",
    "grp_attn_n": "self-extend was removed from the engine",
    "grp_attn_w": "self-extend was removed from the engine",
    "cache_type_k_draft": "the draft model cannot be fetched",
    "models_dir": "models are named on the command line",
    "models_preset": "models are named on the command line",
    "models_max": "one model is served",
}
# Flags that describe what the server does anyway, or that only matter to llama-server's own programs.
IMPLIED = {
    *("offline", "cont_batching", "embedding", "reranking", "jinja", "ui", "no_mmproj", "models_autoload"),
    "cache_idle_slots",
}
# Flags that take the same value under another name.
RENAMED = {
    "temp": "--temperature",
    "seed": "--default-seed",
    "batch_size": "--batch",
    "ubatch_size": "--ubatch",
    "n_gpu_layers": "--gpu-layers",
    "slot_save_path": "--slot-save-path",
    "media_path": "--media-directory",
    "sleep_idle_seconds": "--keep-alive",
    "api_key": "--api-key",
    "cache_type_k": "--cache-type-k",
    "cache_type_v": "--cache-type-v",
    "reasoning": "--default-reasoning",
    "pooling": "--pooling",
}


def build_command(flags: argparse.Namespace, model: Path, directory: Path) -> list[str]:
    """Translate the flags to those of `afterglow serve`. A flag without an equivalent ends the program."""
    for flag, reason in REFUSED.items():
        if getattr(flags, flag) not in (None, []):
            refuse(flag, reason)
    if os.environ.get("AIP_MODE"):
        refuse("AIP_MODE", "the routes of Vertex AI are not served")
    if "," in flags.host:
        refuse("host", "the server listens on one address")
    if flags.pooling in ("none", "rank"):
        refuse("pooling", "an embedding is one vector per text")
    names = sorted((flags.alias or "model").split(","))
    command = [f"{names[0]}={model}", "--host", flags.host, "--threads", str(flags.threads or THREADS)]
    command += [part for name in names[1:] for part in ("--alias", f"{name}={names[0]}")]
    slots, cells = flags.parallel or DEFAULT_SLOTS, flags.ctx_size or DEFAULT_CONTEXT
    context = cells if flags.kv_unified else cells // slots
    command += ["--sequences", str(slots), "--context", str(context), "--no-disk-cache", "--allow-origin", "*"]
    for flag, option in RENAMED.items():
        if (value := getattr(flags, flag)) is not None:
            command += [option, str(value)]
    return command + build_switches(flags) + build_template_options(flags, directory)


def build_switches(flags: argparse.Namespace) -> list[str]:
    """Translate flags that turn something on or off, and those whose values differ."""
    switches = {
        "--kv-unified": flags.kv_unified,
        "--swa-full": flags.swa_full,
        "--no-slots": flags.slots is False,
        "--no-metrics": not flags.metrics,
    }
    options = [option for option, is_set in switches.items() if is_set]
    if flags.n_predict is not None and flags.n_predict >= 0:
        options += ["--default-max-tokens", str(flags.n_predict)]
    if flags.cache_ram is not None:
        options += ["--ram-cache-bytes", f"{flags.cache_ram}MiB"]
    if flags.flash_attn in ("on", "off"):
        options.append("--flash-attention" if flags.flash_attn == "on" else "--no-flash-attention")
    if flags.verbose:
        options += ["--log-level", "debug"]
    return options


def build_template_options(flags: argparse.Namespace, directory: Path) -> list[str]:
    """Translate the chat template: a file, a text, or the name of one that llama.cpp has built in."""
    if flags.reasoning_format not in (None, "auto", "deepseek"):
        refuse("reasoning_format", "reasoning is always `reasoning_content`")
    if flags.chat_template_file:
        return ["--chat-template", str(Path(flags.chat_template_file).resolve())]
    if not (text := flags.chat_template):
        return []
    if text.replace("-", "").replace(".", "").isalnum():
        refuse("chat_template", f"the template {text!r} is built into llama.cpp only")
    file = directory / f"template-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jinja"
    file.write_text(text, encoding="utf-8")
    return ["--chat-template", str(file)]


def refuse(flag: str, reason: str) -> NoReturn:
    """End the program because a flag has no equivalent."""
    raise SystemExit(f"launcher: --{flag.replace('_', '-')} has no equivalent: {reason}")


def needs_own_process(flags: argparse.Namespace) -> bool:
    """Whether a test is about what a server counts, stores or does since its start."""
    return bool(flags.metrics or flags.slot_save_path or flags.sleep_idle_seconds is not None or flags.kv_unified)


def serve(flags: argparse.Namespace, model: Path) -> None:
    """Start the server, or forward to one with the same flags, until the process is ended."""
    directory = Path(os.environ[DIRECTORY_VARIABLE])
    settings = directory / "settings.toml"
    settings.touch()
    own = {"AFTERGLOW_SETTINGS": str(settings), "AFTERGLOW_CACHE": str(directory / "cache")}
    environment = {**os.environ, **own}
    command = [sys.executable, "-m", "afterglow.cli.main", "serve", *build_command(flags, model, directory)]
    if needs_own_process(flags):
        os.execve(sys.executable, [*command, "--port", str(flags.port)], environment)
    port = pool.get_server(command, environment, directory, flags.api_key)
    pool.forward(flags.host, flags.port, port)
