"""Options of `load`, each with a check of what llama.cpp and the system report about a model loaded with it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import afterglow
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.loader import get_library
from afterglow.testing import models


@dataclass(frozen=True)
class Report:
    """Observations of one load."""

    log: str
    is_mapped: bool  # the file is mapped into this process
    gpu_layers: int  # as passed to llama.cpp: without a GPU nothing else shows them
    threads: int

    def find(self, pattern: str) -> bool:
        return re.search(pattern, self.log) is not None


# Option → a value that is not the default, and whether a report shows it.
OPTION_CHECKS: dict[str, tuple[Any, Callable[[Report], bool]]] = {
    "cache_type_k": ("q8_0", lambda report: report.find(r"K \(q8_0\).* V \(f16\)")),
    "cache_type_v": ("q4_0", lambda report: report.find(r"K \(f16\).* V \(q4_0\)")),
    "flash_attention": (False, lambda report: report.find(r"flash_attn += disabled")),
    "kv_unified": (True, lambda report: report.find(r"kv_unified += true")),
    "mmap": (False, lambda report: report.find(r"load_mode = none") and not report.is_mapped),
    "mlock": (True, lambda report: report.find(r"load_mode = .*mlock") and report.is_mapped),
    "gpu_layers": (2, lambda report: report.gpu_layers == 2),
    "threads": (3, lambda report: report.threads == 3),
    "context": (700, lambda report: report.find(r"n_ctx_seq += 768")),
    "sequences": (2, lambda report: report.find(r"n_seq_max += 2")),
}
# Options that the binding passes on: fields of llama.cpp's parameters, with their defaults in afterglow.
CONTEXT_FIELDS = {
    "cache_type_k": {"type_k": 1},
    "cache_type_v": {"type_v": 1},
    "flash_attention": {"flash_attn_type": -1},
    "kv_unified": {"kv_unified": False},
    "threads": {"n_threads": 1, "n_threads_batch": 1},
    "context": {"n_ctx": 512},
    "sequences": {"n_seq_max": 1},
}
FIXED_OPTIONS: dict[str, Any] = {"projector": False, "disk_cache": False}
MODEL_FIELDS = {"mmap": {"load_mode": 1}, "mlock": {"load_mode": 1}, "gpu_layers": {"n_gpu_layers": 0}}


def check_option(name: str) -> None:
    """Load a tiny model, whose heads are wide enough for quantized blocks, with an option; fail if nothing shows it."""
    value, is_shown = OPTION_CHECKS[name]
    defaults = {"context": 256, "sequences": 1, "threads": 1, "gpu_layers": 0}
    plain = load_and_report(defaults)
    assert not is_shown(plain), f"the default shows {name}={value!r} already"
    assert is_shown(load_and_report(defaults | {name: value})), f"nothing shows {name}={value!r}"


def load_and_report(options: dict[str, Any]) -> Report:
    path = models.get_path("hybrid")
    with record_log() as lines, record_calls() as calls, afterglow.load(path, **FIXED_OPTIONS, **options):
        is_mapped = str(path) in Path("/proc/self/maps").read_text()
    return Report("\n".join(lines), is_mapped, calls["gpu_layers"], calls["threads"])


@contextmanager
def record_calls() -> Iterator[dict[str, int]]:
    """Record what reaches two native calls."""
    calls: dict[str, int] = {}
    symbols, create = get_library().symbols, LlamaContext.__init__
    load_native = symbols.llama_model_load_from_file

    def load_model(path: Any, parameters: Any) -> Any:
        calls["gpu_layers"] = parameters.n_gpu_layers
        return load_native(path, parameters)

    def create_context(self: LlamaContext, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options)
        calls["threads"] = symbols.llama_n_threads(self.pointer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symbols, "llama_model_load_from_file", load_model)
        patch.setattr(LlamaContext, "__init__", create_context)
        yield calls


@contextmanager
def record_log() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("afterglow.llama.cpp")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
