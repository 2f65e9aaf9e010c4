"""Engines on tiny models of every memory kind with every drafter, a cold context to check them, and real faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.host.build import DraftSource, EngineSpec
from afterglow.engine.types.backend import DecodeSpan
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import KVCacheFull
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.play import Answer

# So that the batch shape changes log-probabilities by about 1e-5. A wrong state changes them by 0.05 and more.
EXACT: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": False}
MIN_CELLS = 256  # the fewest that llama.cpp gives a sequence
MAX_LOGPROB_DIFFERENCE = 0.01
# Memory kind and drafter to the model. Recurrent models with MTP heads do not exist.
MODELS = {
    ("attention", "ngram"): "attention",
    ("attention", "draft"): "attention",
    ("attention", "mtp"): "attention-mtp",
    ("window", "ngram"): "window",
    ("window", "draft"): "window",
    ("window", "mtp"): "window-chained",
    ("window", "mtp with a window"): "window-chained-short",
    ("recurrent", "ngram"): "recurrent",
    ("recurrent", "draft"): "recurrent",
    ("hybrid", "ngram"): "hybrid",
    ("hybrid", "draft"): "hybrid",
    ("hybrid", "mtp"): "hybrid-mtp",
}


def get_draft(drafter: str, model: Path, *, draft_is_target: bool = False) -> DraftSource | None:
    """Return what `build_engine` needs for a drafter. A draft model that is the target drafts without errors."""
    if drafter == "ngram":
        return None
    if drafter == "draft":
        return model if draft_is_target else models.get_path("draft")
    return "mtp"


def build_spec(
    kind: str, drafter: str, *, kv_unified: bool, settings: dict[str, Any] | None = None, **context: Any
) -> EngineSpec:
    """Return the spec of an engine that always drafts. `settings` are fields of `EngineSettings`."""
    path = models.get_path(MODELS[kind, drafter])
    defaults = {"cells": 2048, "sequences": 4, "batch": 64, "ubatch": 32, "outputs": 32, "threads": 1, **EXACT}
    snapshots = 4 if kind == "hybrid" else 0
    return EngineSpec(
        path=path,
        context_settings=ContextSettings(
            **{**defaults, "kv_unified": kv_unified, "recurrent_snapshots": snapshots, **context}
        ),
        engine_settings=EngineSettings(**{"speculation": 3, **(settings or {})}),
        draft=get_draft(drafter, path, draft_is_target=True),
    )


class ColdContext:
    """Computes the log-probabilities of completions with nothing cached, each in one decode."""

    def __init__(self, model: LlamaModel, cells: int = 512) -> None:
        self.context = LlamaContext(
            model, ContextSettings(cells=cells, batch=cells, ubatch=cells, outputs=cells, threads=1, **EXACT)
        )
        self._known: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def compute_logprobs(self, entries: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float64]:
        """Return the log-probabilities of the vocabulary at each token of a completion."""
        key = (len(entries), *entries, *tokens)
        if key not in self._known:
            context = self.context
            context.memory.clear()
            context.batch.clear()
            context.batch.add([*entries, *tokens[:-1]], position=0, sequence=0, outputs=len(tokens))
            context.decode()
            rows = range(len(entries) - 1, len(entries) + len(tokens) - 1)
            logits = np.stack([context.get_logits(row) for row in rows]).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            self._known[key] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return self._known[key]

    def check(self, entries: Sequence[int], answer: Answer, *, is_greedy: bool = True) -> None:
        """Check the tokens and log-probabilities of a request that was submitted with `logprobs=0`."""
        if not answer.tokens:
            return
        expected = self.compute_logprobs(entries, answer.tokens)
        for index, token in enumerate(answer.tokens):
            difference = abs(answer.logprobs[index] - expected[index, token])
            assert difference < MAX_LOGPROB_DIFFERENCE, f"token {index}: log-probability off by {difference:.3f}"
            margin = expected[index].max() - expected[index, token]
            assert not is_greedy or margin < 2 * MAX_LOGPROB_DIFFERENCE, f"token {index}: margin {margin:.3f}"


@contextmanager
def abort_decodes(context: LlamaContext, nodes: int) -> Iterator[None]:
    """Abort every decode of a context after `nodes` nodes of its graphs."""
    library = get_library()
    done = 0

    @library.ffi.callback("bool(void *)")
    def should_abort(_: object) -> bool:
        nonlocal done
        done += 1
        return done > nodes

    library.symbols.llama_set_abort_callback(context.pointer, should_abort, library.ffi.NULL)
    try:
        yield
    finally:
        callback = library.ffi.cast("ggml_abort_callback", library.strlen)
        library.symbols.llama_set_abort_callback(context.pointer, callback, context._abort_flag)


@contextmanager
def fail_decodes(engine: Engine, error: Exception) -> Iterator[None]:
    """Make decodes raise an error: `KVCacheFull` before anything is computed, others after half of the rows."""
    backend = engine.backend
    assert isinstance(backend, LlamaBackend)

    def decode(spans: Sequence[DecodeSpan]) -> None:
        halves = [replace(span, entries=span.entries[: len(span.entries) // 2], outputs=0) for span in spans]
        halves = [span for span in halves if len(span.entries)]
        if halves and not isinstance(error, KVCacheFull):
            LlamaBackend.decode(backend, halves)  # not that of a subclass: heads do not see a decode that failed
        raise error

    with patch.object(backend, "decode", decode):
        yield
