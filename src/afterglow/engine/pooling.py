"""Pooled outputs of texts, many per decode: embeddings, and the scores of classifier heads.

They are computed in a context of their own beside that of the engine, so that they disturb no conversation. Each text
is one sequence of a decode. A prefix that all texts share is computed once and shared by their sequences.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.scheduling.scheduler import compute_prefill_budget
from afterglow.errors import PromptTooLong, UnsupportedOperation
from afterglow.llama.context import LlamaContext
from afterglow.llama.settings import ContextSettings, PoolingType

Purpose: TypeAlias = Literal["embedding", "rank"]
MAX_POOLED_TOKENS = 2048  # of one text: all of them are in one decode, which needs memory
CPU_ROWS = 128  # of one decode: more are slower, because attention computes the masked pairs of texts as well
SEQUENCES = 64  # of a context
MAX_TEXTS = SEQUENCES - 1  # of one decode
CALL_SECONDS = 0.05  # of decodes in one call of an idle engine: how long a request that arrives may wait for them
PREFIX_SEQUENCE = 0  # holds the shared prefix; the texts are the sequences after it
LAST_TOKEN_RANKERS = ("qwen3", "qwen3vl")  # architectures
POOLING_NONE, POOLING_MEAN, POOLING_LAST, POOLING_RANK = 0, 1, 3, 4  # values of llama.cpp


@dataclass(frozen=True, slots=True)
class PooledTexts:
    """Vectors of the first texts of a call: those that were in its decode. `rows` counts what was computed."""

    vectors: tuple[NDArray[np.float32], ...]
    rows: int


def pool_texts(
    engine: Engine, *, purpose: Purpose, prefix: Sequence[int], texts: Sequence[Sequence[int]], salt: str = ""
) -> PooledTexts:
    """Run one decode with the first texts that fit, at least one, each after `prefix`. Return their pooled vectors.

    Only calls with the same salt share a prefix.
    """
    if not isinstance(engine.backend, LlamaBackend):
        raise UnsupportedOperation("pooling", "the engine does not run on llama.cpp")
    target = engine.backend.context
    longest = len(prefix) + max(map(len, texts))
    context = get_pooling_context(target, purpose, longest)
    budget = choose_rows(target.batch.capacity, on_gpu=target.model.settings.gpu_layers != 0)
    if engine.settings.deterministic:  # the result must not depend on other texts
        prefix, texts = (), [[*prefix, *texts[0]]]
    elif engine.is_busy:
        costs, gap = engine.prefix_cache.cost_model, engine.settings.max_token_gap
        budget = compute_prefill_budget(1, [], gap, costs.seconds_per_step, costs.seconds_per_entry, budget)
    if not context.can_share_prefix:
        prefix, texts = (), [[*prefix, *text] for text in texts]
    count = count_fitting_texts([len(text) for text in texts], budget)
    rows_before = context.computed_rows
    vectors = context.pool(prefix, texts[:count], salt)
    rows = context.computed_rows - rows_before
    engine.counters.record_pooling(count, rows)
    return PooledTexts(tuple(vectors), rows)


def pool_in_slices(
    engine: Engine, *, purpose: Purpose, prefix: Sequence[int], texts: Sequence[Sequence[int]], salt: str = ""
) -> PooledTexts:
    """Pool the first texts, in one decode if the engine is busy, otherwise in all decodes of `CALL_SECONDS`.

    The caller repeats the call with the other texts, so that the engine serves its requests in between.
    """
    stop = time.monotonic() + CALL_SECONDS
    vectors: list[NDArray[np.float32]] = []
    rows = 0
    while len(vectors) < len(texts):
        pooled = pool_texts(engine, purpose=purpose, prefix=prefix, texts=texts[len(vectors) :], salt=salt)
        vectors += pooled.vectors
        rows += pooled.rows
        if engine.is_busy or time.monotonic() >= stop:
            break
    return PooledTexts(tuple(vectors), rows)


def choose_rows(max_rows: int, *, on_gpu: bool) -> int:
    """Return the rows of one decode of texts; a single text may have more. `max_rows` are those of the engine.

    >>> choose_rows(512, on_gpu=False), choose_rows(16_384, on_gpu=True)
    (128, 2048)
    """
    return min(max_rows, MAX_POOLED_TOKENS if on_gpu else CPU_ROWS)


def count_fitting_texts(lengths: Sequence[int], max_rows: int) -> int:
    """Return how many of the first texts fit into one decode, at least one.

    >>> count_fitting_texts([5, 4, 3, 2], 10)
    2
    """
    count, rows = 0, 0
    for length in lengths[:MAX_TEXTS]:
        rows += length
        if count and rows > max_rows:
            break
        count += 1
    return count


def get_pooling_context(target: LlamaContext, purpose: Purpose, token_count: int) -> PoolingContext:
    """Return the context beside `target` that pools texts of up to `token_count` tokens."""
    limit = min(target.cells_per_sequence, target.model.info.trained_context_length)
    if token_count > limit:
        raise PromptTooLong(token_count, limit)
    # A text that is longer than a usual decode replaces the context by a larger one.
    usual_rows = choose_rows(target.batch.capacity, on_gpu=target.model.settings.gpu_layers != 0)
    rows = max(usual_rows, 1 << (token_count - 1).bit_length())

    def create() -> LlamaContext:
        return PoolingContext(target, purpose, rows)

    context = target.get_companion(purpose, create, min_cells=2 * token_count)
    assert isinstance(context, PoolingContext)
    return context


class PoolingContext(LlamaContext):
    """Context whose sequences are texts. It keeps the shared prefix of the last call for the next one."""

    def __init__(self, target: LlamaContext, purpose: Purpose, rows: int) -> None:
        """Pool as the model defines it; embeddings of a model that defines nothing are the mean over the tokens."""
        super().__init__(target.model, _build_settings(target, purpose, rows), owner=target)
        self.computed_rows = 0
        self.can_share_prefix = (
            self.memory.kind == "attention"
            and self.model.info.is_causal
            and (self.pooling in (POOLING_MEAN, POOLING_LAST) or self._ranks_last_token)
        )
        self._prefix: tuple[str, tuple[int, ...]] | None = None  # salt and tokens of the prefix sequence
        self._prefix_vector: NDArray[np.float32] | None = None

    @property
    def _ranks_last_token(self) -> bool:
        """Whether a classifier head reads the last token of a text. Others read the first one, or the mean."""
        return self.pooling == POOLING_RANK and self.model.info.architecture in LAST_TOKEN_RANKERS

    def pool(self, prefix: Sequence[int], texts: Sequence[Sequence[int]], salt: str = "") -> list[NDArray[np.float32]]:
        """Return the vector of each text, in one decode after that of the prefix, which may be there already."""
        try:
            self._load_prefix(tuple(prefix), salt)
            self._decode_texts(len(prefix), texts)
        except BaseException:
            self._forget_prefix()
            raise
        vectors = [self.get_embedding(sequence=number) for number in range(1, len(texts) + 1)]
        if self._prefix_vector is None or self.pooling != POOLING_MEAN:
            return vectors
        shares = [np.float32(len(text) / (len(prefix) + len(text))) for text in texts]
        # The mean of a text is also over its prefix.
        return [
            share * vector + (np.float32(1) - share) * self._prefix_vector
            for share, vector in zip(shares, vectors, strict=True)
        ]

    def _load_prefix(self, prefix: tuple[int, ...], salt: str) -> None:
        if self._prefix == (salt, prefix):
            for sequence in range(1, self.sequences):
                self.memory.remove(sequence)
            return
        self._forget_prefix()
        if not prefix:
            return
        self.batch.clear()
        self.batch.add(np.asarray(prefix, dtype=np.int32), position=0, sequence=PREFIX_SEQUENCE, outputs=len(prefix))
        self.decode()
        self.computed_rows += len(prefix)
        self._prefix, self._prefix_vector = (salt, prefix), self.get_embedding(sequence=PREFIX_SEQUENCE)

    def _decode_texts(self, prefix_length: int, texts: Sequence[Sequence[int]]) -> None:
        self.batch.clear()
        for sequence, text in enumerate(texts, start=1):
            if prefix_length:
                self.memory.copy(PREFIX_SEQUENCE, sequence)
            tokens = np.asarray(text, dtype=np.int32)
            self.batch.add(tokens, position=prefix_length, sequence=sequence, outputs=len(tokens))
        self.computed_rows += self.batch.count
        self.decode()

    def _forget_prefix(self) -> None:
        self._prefix = self._prefix_vector = None
        if self.memory.kind != "none":  # an encoder has no memory
            self.memory.clear(data=False)


def _build_settings(target: LlamaContext, purpose: Purpose, rows: int) -> ContextSettings:
    """Return the settings of a context for decodes of up to `rows` tokens.

    A text is pooled over one ubatch, so a ubatch holds a whole decode, and sequences share all cells: with streams,
    llama.cpp would split texts of different lengths. Flash attention is off on the CPU: there, its kernel depends on
    the number of rows, and the cosine between both results is only 0.9998 on SmolLM2.
    """
    rows = -(-rows // SEQUENCES) * SEQUENCES  # llama.cpp aborts if they are no multiple of the sequences
    pooling: PoolingType = "rank"
    if purpose == "embedding":
        defined = _read_pooling(target)
        if defined == POOLING_RANK:
            raise UnsupportedOperation("embedding", "the model is a reranker and returns no vectors")
        pooling = target.settings.pooling
        if pooling == "model" and defined == POOLING_NONE:
            pooling = "mean"
    return replace(
        target.settings,
        cells=2 * rows,  # of the prefix and of the texts after it
        sequences=SEQUENCES,
        batch=rows,
        ubatch=rows,
        kv_unified=True,
        recurrent_snapshots=0,
        embeddings=True,
        flash_attention=None if target.model.settings.gpu_layers != 0 else False,
        cache_type_k="f16",
        cache_type_v="f16",
        pooling=pooling,
    )


def _read_pooling(target: LlamaContext) -> int:
    """Return the pooling type in the metadata of a model; `POOLING_NONE` if there is none."""
    value = target.model.metadata.get(f"{target.model.info.architecture}.pooling_type", "")
    return int(value) if value.isdigit() else POOLING_NONE
