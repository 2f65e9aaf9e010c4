"""What else can be asked of an engine, wherever it runs: functions of a module, so that they travel to its process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.inspect.cache import TierUsage, get_tier_usage
from afterglow.engine.sampling.logprobs import TokenLogprob, score_tokens
from afterglow.errors import EngineCrashed, PromptTooLong, UnsupportedMedia, UnsupportedOperation
from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel, ModelInfo
from afterglow.llama.projector import MediaPlaceholder, MediaSize, Modality, Projector
from afterglow.llama.settings import ContextSettings

PREVIEW_ENTRIES = 48  # entries shown of a sequence
POOLING_NONE, POOLING_RANK = 0, 4  # llama.cpp's numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine can hold and compute at once, and what its model is."""

    model: ModelInfo
    embedding_width: int
    cells: int  # of one request
    sequences: int
    memory: str
    batch_cells: int
    max_scoring_tokens: int  # tokens that one pass of `score` may take
    media: frozenset[Modality] = frozenset()  # what prompts may hold beside text
    media_error: str = ""  # why not, where a projector was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedSequence:
    """One slot of memory; `begins` and `ends` are the first and the last of its entries."""

    number: int
    busy: bool
    tokens: int
    idle_seconds: float
    first_entries: tuple[int, ...]
    last_entries: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCheckpoint:
    """A state that prompts can begin from."""

    tokens: int
    nbytes: int
    idle_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """What guessing ahead came to so far."""

    draft_tokens: int  # guesses that were computed
    accepted_tokens: int  # and those of them that were right
    mean_draft_length: float  # guesses at a time
    seconds_saved: float  # as far as measured; less than 0 where they lost
    drafters: tuple[str, ...]  # who may guess


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine did so far, and what its tiers hold and did."""

    counters: dict[str, int]
    tiers: dict[str, TierUsage]
    speculation: SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheContents:
    """What an engine has in memory, and what it did so far."""

    sequences: tuple[CachedSequence, ...]
    checkpoints: tuple[CachedCheckpoint, ...]
    tiers: dict[str, TierUsage]  # what is kept outside of memory, in RAM and on disk
    counters: dict[str, int]
    busy: bool


def get_engine_info(engine: Engine) -> EngineInfo:
    """What the engine can hold and compute at once."""
    capabilities, model = engine.backend.capabilities, _get_llama_context(engine).model
    return EngineInfo(
        model=model.info,
        embedding_width=model.embedding_width,
        cells=capabilities.cells_per_sequence,
        sequences=capabilities.sequences,
        memory=capabilities.memory_kind,
        batch_cells=capabilities.batch_cells,
        max_scoring_tokens=min(capabilities.max_outputs, capabilities.batch_cells),
        media=capabilities.media,
        media_error=engine.media_scheduler.projector_error,
    )


@dataclass(frozen=True, slots=True)
class MediaMeasurement:
    """What stands in prompts for some pictures and sounds, and the key of the projector that says so."""

    projector_key: bytes
    measured: tuple[MediaPlaceholder, ...]


def measure_media(engine: Engine, media: Sequence[MediaSize]) -> MediaMeasurement:
    """How much room pictures and sounds take, without encoding them: their shapes and lengths are enough."""
    projector = engine.backend.projector
    if not isinstance(projector, Projector):
        raise UnsupportedMedia("content", engine.media_scheduler.projector_error or "this model takes only text")
    return MediaMeasurement(projector.key, tuple(projector.measure(content) for content in media))


def get_counters(engine: Engine) -> dict[str, int]:
    """What the engine did so far."""
    return asdict(engine.counters)


def get_engine_stats(engine: Engine) -> EngineStats:
    """What the engine did so far, and what its tiers hold and did."""
    return EngineStats(
        counters=get_counters(engine), tiers=get_tier_usage(engine), speculation=get_speculation_stats(engine)
    )


def get_speculation_stats(engine: Engine) -> SpeculationStats:
    """What guessing ahead came to so far."""
    counters = engine.counters
    return SpeculationStats(
        draft_tokens=counters.draft_tokens,
        accepted_tokens=counters.accepted_tokens,
        mean_draft_length=counters.draft_tokens / counters.draft_steps if counters.draft_steps else 0.0,
        seconds_saved=engine.speculator.loss_budget.saved_seconds,
        drafters=engine.speculator.drafter_names,
    )


def get_cache_contents(engine: Engine, salt: str = "") -> CacheContents:
    """What the engine has in memory; of other salts only how much."""
    now = time.monotonic()
    return CacheContents(
        sequences=tuple(
            CachedSequence(
                number=slot.seq_id,
                busy=slot.busy,
                tokens=len(slot),
                idle_seconds=0.0 if slot.busy else now - slot.last_used,
                first_entries=tuple(map(int, slot.entries[:PREVIEW_ENTRIES])) if slot.salt == salt else (),
                last_entries=tuple(map(int, slot.entries[max(PREVIEW_ENTRIES, len(slot) - PREVIEW_ENTRIES) :]))
                if slot.salt == salt
                else (),
            )
            for slot in engine.prefix_cache.slots
        ),
        checkpoints=tuple(
            CachedCheckpoint(tokens=one.position, nbytes=one.nbytes, idle_seconds=now - one.last_used)
            for one in engine.prefix_cache.all_checkpoints
        ),
        tiers=get_tier_usage(engine),
        counters=get_counters(engine),
        busy=engine.is_busy,
    )


def run_scoring(
    engine: Engine, *, tokens: Sequence[int], position: int, count: int, alternatives: int
) -> list[TokenLogprob]:
    """One pass over a text on the sequence that is kept for it: how likely its last `count` tokens are.

    `position` is where the pass begins; 0 begins another text. The last token is scored and not decoded.
    """
    context = _get_llama_context(engine)
    sequence = context.sequences - 1
    if engine.backend.capabilities.sequences > sequence:
        raise UnsupportedOperation("scoring", "the engine was made without a sequence for it")
    if position == 0:
        context.memory.remove(sequence)
    span = context.memory.get_position_range(sequence)
    if (0 if span is None else span[1] + 1) != position:
        raise EngineCrashed("it was started again in the middle of a text that was being scored")
    return score_tokens(
        context, sequence, np.asarray(tokens, dtype=np.int32), position, count, alternatives=alternatives
    )


def clear_scoring_sequence(engine: Engine) -> None:
    """Empty the sequence that is kept for scoring."""
    context = _get_llama_context(engine)
    context.memory.remove(context.sequences - 1)


# --- embeddings

_embedding_contexts: weakref.WeakKeyDictionary[LlamaModel, LlamaContext] = (
    weakref.WeakKeyDictionary()
)  # of this process; go with models


def embed(engine: Engine, *, tokens: Sequence[int], limit: int) -> NDArray[np.float32]:
    """One text as a vector of length 1, on a context of its own that is made when first asked for.

    The whole text is in one decode: pooling over several would keep only the last.
    """
    context = _get_embedding_context(_get_llama_context(engine).model, limit)
    if len(tokens) > (room := min(context.cells_per_sequence, context.batch.capacity)):
        raise PromptTooLong(len(tokens), room)
    if context.model.info.is_causal:  # the others keep nothing
        context.memory.remove(0)
    context.batch.clear()
    context.batch.add(np.asarray(tokens, dtype=np.int32), position=0, sequence=0, outputs=len(tokens))
    context.decode()
    vector = context.get_embedding(sequence=0)
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector


def _get_embedding_context(model: LlamaModel, limit: int) -> LlamaContext:
    context = _embedding_contexts.get(model)
    if context is None:
        context = _create_embedding_context(model, limit)
        _embedding_contexts[model] = context
    return context


def _create_embedding_context(model: LlamaModel, limit: int) -> LlamaContext:
    """A context that pools as the model says; a model that says nothing is averaged over its tokens."""
    settings = {"cells": limit, "batch": limit, "ubatch": limit, "embeddings": True}
    context = LlamaContext(model, ContextSettings(**settings))  # type: ignore[arg-type]
    if context.pooling == POOLING_NONE:
        context.close()
        context = LlamaContext(model, ContextSettings(**settings, pooling="mean"))  # type: ignore[arg-type]
    if context.pooling == POOLING_RANK:
        context.close()
        raise UnsupportedOperation("embedding", "the model ranks texts; it gives no vectors")
    return context


def _get_llama_context(engine: Engine) -> LlamaContext:
    backend = engine.backend
    if not isinstance(backend, LlamaBackend):
        raise UnsupportedOperation("this", "the engine does not run on llama.cpp")
    return backend.context
