"""What else can be asked of an engine, wherever it runs: functions of a module, so that they travel to its process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.cache import Usage, usage
from afterglow.engine.engine import Engine
from afterglow.engine.llama import LlamaBackend
from afterglow.engine.scoring import Scored, score_rows
from afterglow.errors import EngineCrashed, PromptTooLong, UnsupportedMedia, UnsupportedOperation
from afterglow.llama.context import Context
from afterglow.llama.model import Model, ModelInfo
from afterglow.llama.projector import Measurable, Measured, MediaKind, Projector
from afterglow.llama.settings import ContextSettings

SHOWN = 48  # entries shown of a sequence
NO_POOLING, RANK = 0, 4  # llama.cpp's numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an engine can hold and compute at once, and what its model is."""

    model: ModelInfo
    embedding_width: int
    cells: int  # of one request
    sequences: int
    memory: str
    batch_cells: int
    scoring_rows: int  # tokens that one pass of `score` may take
    media: frozenset[MediaKind] = frozenset()  # what prompts may hold beside text
    media_trouble: str = ""  # why not, where a projector was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSequence:
    """One slot of memory; `begins` and `ends` are the first and the last of its entries."""

    number: int
    busy: bool
    tokens: int
    idle_seconds: float
    begins: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCheckpoint:
    """A state that prompts can begin from."""

    tokens: int
    nbytes: int
    idle_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What guessing ahead came to so far."""

    drafted: int  # guesses that were computed
    accepted: int  # and those of them that were right
    mean_length: float  # guesses at a time
    seconds_saved: float  # as far as measured; less than 0 where they lost
    drafters: tuple[str, ...]  # who may guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What an engine did so far, and what its tiers hold and did."""

    counters: dict[str, int]
    tiers: dict[str, Usage]
    speculation: Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What an engine has in memory, and what it did so far."""

    sequences: tuple[HeldSequence, ...]
    checkpoints: tuple[HeldCheckpoint, ...]
    tiers: dict[str, Usage]  # what is kept outside of memory, in RAM and on disk
    counters: dict[str, int]
    busy: bool


def facts(engine: Engine) -> Facts:
    """What the engine can hold and compute at once."""
    capabilities, model = engine.backend.capabilities, _context(engine).model
    return Facts(
        model=model.info,
        embedding_width=model.embedding_width,
        cells=capabilities.cells,
        sequences=capabilities.sequences,
        memory=capabilities.memory,
        batch_cells=capabilities.batch_cells,
        scoring_rows=min(capabilities.outputs, capabilities.batch_cells),
        media=capabilities.media,
        media_trouble=engine.looking.trouble_at_load,
    )


@dataclass(frozen=True, slots=True)
class Measures:
    """What stands in prompts for some pictures and sounds, and the key of the projector that says so."""

    key: bytes
    measured: tuple[Measured, ...]


def measure(engine: Engine, contents: Sequence[Measurable]) -> Measures:
    """How much room pictures and sounds take, without encoding them: their shapes and lengths are enough."""
    projector = engine.backend.projector
    if not isinstance(projector, Projector):
        raise UnsupportedMedia("content", engine.looking.trouble_at_load or "this model takes only text")
    return Measures(projector.key, tuple(projector.measure(content) for content in contents))


def counters(engine: Engine) -> dict[str, int]:
    """What the engine did so far."""
    return asdict(engine.counters)


def numbers(engine: Engine) -> Numbers:
    """What the engine did so far, and what its tiers hold and did."""
    return Numbers(counters=counters(engine), tiers=usage(engine), speculation=speculation(engine))


def speculation(engine: Engine) -> Speculation:
    """What guessing ahead came to so far."""
    counters = engine.counters
    return Speculation(
        drafted=counters.drafted,
        accepted=counters.accepted,
        mean_length=counters.drafted / counters.drafts if counters.drafts else 0.0,
        seconds_saved=engine.drafting.account.won,
        drafters=engine.drafting.names,
    )


def held(engine: Engine, salt: str = "") -> Held:
    """What the engine has in memory; of other salts only how much."""
    now = time.monotonic()
    return Held(
        sequences=tuple(
            HeldSequence(
                number=slot.number,
                busy=slot.busy,
                tokens=len(slot),
                idle_seconds=0.0 if slot.busy else now - slot.last_used,
                begins=tuple(map(int, slot.ids[:SHOWN])) if slot.salt == salt else (),
                ends=tuple(map(int, slot.ids[max(SHOWN, len(slot) - SHOWN) :])) if slot.salt == salt else (),
            )
            for slot in engine.memory.slots
        ),
        checkpoints=tuple(
            HeldCheckpoint(tokens=one.depth, nbytes=one.nbytes, idle_seconds=now - one.last_used)
            for one in engine.memory.checkpoints
        ),
        tiers=usage(engine),
        counters=counters(engine),
        busy=engine.busy,
    )


def score(engine: Engine, *, tokens: Sequence[int], position: int, count: int, alternatives: int) -> list[Scored]:
    """One pass over a text on the sequence that is kept for it: how likely its last `count` tokens are.

    `position` is where the pass begins; 0 begins another text. The last token is scored and not decoded.
    """
    context = _context(engine)
    sequence = context.sequences - 1
    if engine.backend.capabilities.sequences > sequence:
        raise UnsupportedOperation("scoring", "the engine was made without a sequence for it")
    if position == 0:
        context.memory.remove(sequence)
    span = context.memory.positions(sequence)
    if (0 if span is None else span[1] + 1) != position:
        raise EngineCrashed("it was started again in the middle of a text that was being scored")
    return score_rows(context, sequence, np.asarray(tokens, dtype=np.int32), position, count, alternatives=alternatives)


def forget_scored(engine: Engine) -> None:
    """Empty the sequence that is kept for scoring."""
    context = _context(engine)
    context.memory.remove(context.sequences - 1)


# --- embeddings

_embedders: weakref.WeakKeyDictionary[Model, Context] = weakref.WeakKeyDictionary()  # of this process; go with models


def embed(engine: Engine, *, tokens: Sequence[int], limit: int) -> NDArray[np.float32]:
    """One text as a vector of length 1, on a context of its own that is made when first asked for.

    The whole text is in one decode: pooling over several would keep only the last.
    """
    context = _embedder(_context(engine).model, limit)
    if len(tokens) > (room := min(context.cells_per_sequence, context.batch.capacity)):
        raise PromptTooLong(len(tokens), room)
    if context.model.info.causal:  # the others keep nothing
        context.memory.remove(0)
    context.batch.clear()
    context.batch.add(np.asarray(tokens, dtype=np.int32), position=0, sequence=0, outputs=len(tokens))
    context.decode()
    vector = context.embedding(sequence=0)
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector


def _embedder(model: Model, limit: int) -> Context:
    context = _embedders.get(model)
    if context is None:
        context = _make_embedder(model, limit)
        _embedders[model] = context
    return context


def _make_embedder(model: Model, limit: int) -> Context:
    """A context that pools as the model says; a model that says nothing is averaged over its tokens."""
    settings = {"cells": limit, "batch": limit, "ubatch": limit, "embeddings": True}
    context = Context(model, ContextSettings(**settings))  # type: ignore[arg-type]
    if context.pooling == NO_POOLING:
        context.close()
        context = Context(model, ContextSettings(**settings, pooling="mean"))  # type: ignore[arg-type]
    if context.pooling == RANK:
        context.close()
        raise UnsupportedOperation("embedding", "the model ranks texts; it gives no vectors")
    return context


def _context(engine: Engine) -> Context:
    backend = engine.backend
    if not isinstance(backend, LlamaBackend):
        raise UnsupportedOperation("this", "the engine does not run on llama.cpp")
    return backend.context
