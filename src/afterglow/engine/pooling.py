"""Pooled outputs of texts, many per decode: embeddings, and the scores of classifier heads.

They are computed in contexts of their own beside that of the engine, so that they disturb no conversation. Each text
is one sequence of a decode. A prefix that all texts share is computed once and shared by their sequences. On a CPU,
each core has a context and computes other texts: the threads of one context would wait for each other after every
operation, which takes longer than the operations of a small model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
MAX_CORE_ROWS = 256  # of one decode of one core; longer texts are computed by all cores together
MAX_CORE_SECONDS = 1.0  # of one decode of one core: other texts wait for it
MAX_CORES_BYTES = 128 * 1024**2  # of the logits of the contexts of all cores: every row of a context has some
POOLING_SEQUENCES = 64  # of a context
MAX_TEXTS = POOLING_SEQUENCES - 1  # of one decode
CALL_SECONDS = 0.05  # of decodes in one call of an idle engine: how long a request that arrives may wait for them
PREFIX_SEQUENCE = 0  # holds the shared prefix; the texts are the sequences after it
LAST_TOKEN_RANKERS = ("qwen3", "qwen3vl")  # architectures
POOLING_NONE, POOLING_MEAN, POOLING_LAST, POOLING_RANK = 0, 1, 3, 4  # values of llama.cpp


@dataclass(frozen=True, slots=True)
class PooledTexts:
    """Vectors of the first texts of a call: those that were in its decode. `rows` counts what was computed."""

    vectors: tuple[NDArray[np.float32], ...]
    rows: int


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
        remaining = texts[len(vectors) :]
        pooled = pool_on_cores(engine, purpose=purpose, prefix=prefix, texts=remaining, salt=salt, stop=stop)
        pooled = pooled or pool_texts(engine, purpose=purpose, prefix=prefix, texts=remaining, salt=salt)
        vectors += pooled.vectors
        rows += pooled.rows
        if engine.is_busy or time.monotonic() >= stop:
            break
    return PooledTexts(tuple(vectors), rows)


def pool_texts(
    engine: Engine, *, purpose: Purpose, prefix: Sequence[int], texts: Sequence[Sequence[int]], salt: str = ""
) -> PooledTexts:
    """Run one decode with the first texts that fit, at least one, each after `prefix`. Return their pooled vectors.

    Only calls with the same salt share a prefix.
    """
    context = get_pooling_context(engine, purpose, count_longest(prefix, texts))
    if engine.settings.deterministic:  # the result must not depend on other texts
        prefix, texts = (), [[*prefix, *texts[0]]]
    prefix, texts = context.split_prefix(prefix, texts)
    (group,) = group_texts(texts, compute_max_rows(engine), 1)
    rows_before = context.computed_rows
    vectors = context.pool(prefix, group, salt)
    rows = context.computed_rows - rows_before
    engine.counters.record_pooling(len(vectors), rows, decodes=1)
    return PooledTexts(tuple(vectors), rows)


def pool_on_cores(
    engine: Engine,
    *,
    purpose: Purpose,
    prefix: Sequence[int],
    texts: Sequence[Sequence[int]],
    salt: str = "",
    stop: float,
) -> PooledTexts | None:
    """Pool the first texts in decodes on all cores at the same time. No decode begins after `stop`.

    Returns None if one decode after the other, on all cores together, is better: other requests wait, there is only one
    decode, or the model is large.
    """
    longest = count_longest(prefix, texts)
    first = get_pooling_context(engine, purpose, longest)
    cores = 1 if engine.is_busy or engine.settings.deterministic else count_cores(first)
    prefix, texts = first.split_prefix(prefix, texts)
    groups = group_texts(texts, max(compute_max_rows(engine), longest), len(texts)) if cores > 1 else []
    if len(groups) < 2:
        return None
    count = min(cores, len(groups))
    contexts = [first, *(get_pooling_context(engine, purpose, longest, core) for core in range(1, count))]
    rows_before = sum(context.computed_rows for context in contexts)
    first.load_prefix(prefix, salt)
    pooled: list[list[NDArray[np.float32]]] = [[] for _ in groups]
    numbers = iter(range(len(groups)))  # shared: each thread takes the next group

    def pool_groups(context: PoolingContext) -> None:
        for number in numbers:
            pooled[number] = context.pool(prefix, groups[number], salt)
            if time.monotonic() >= stop:
                return

    for context in contexts:
        context.copy_prefix(first)
        context.set_threads(1, 1)
    try:
        with ThreadPoolExecutor(len(contexts)) as executor:
            list(executor.map(pool_groups, contexts))
    finally:
        first.set_threads(first.settings.threads, first.settings.threads)
    vectors = [vector for group in pooled for vector in group]
    computed_rows = sum(context.computed_rows for context in contexts) - rows_before
    engine.counters.record_pooling(len(vectors), computed_rows, decodes=sum(map(bool, pooled)))
    return PooledTexts(tuple(vectors), computed_rows)


def count_longest(prefix: Sequence[int], texts: Sequence[Sequence[int]]) -> int:
    """Return the tokens of the longest text, with its prefix."""
    return len(prefix) + max(map(len, texts))


def get_target(engine: Engine) -> LlamaContext:
    """Return the context of the engine, beside which texts are pooled."""
    if not isinstance(engine.backend, LlamaBackend):
        raise UnsupportedOperation("pooling", "the engine does not run on llama.cpp")
    return engine.backend.context


def compute_max_rows(engine: Engine) -> int:
    """Return the rows of the next decode of texts: fewer if other requests wait for it."""
    target = get_target(engine)
    rows = choose_rows(target.batch.capacity, on_gpu=target.model.settings.gpu_layers != 0)
    if not engine.is_busy or engine.settings.deterministic:
        return rows
    costs, gap = engine.prefix_cache.cost_model, engine.settings.max_token_gap
    return compute_prefill_budget(1, [], gap, costs.seconds_per_step, costs.seconds_per_entry, rows)


def count_cores(context: PoolingContext) -> int:
    """Return how many cores get a context such as this one: all threads of a CPU, or 1 if the model is large.

    Fewer cores than threads would leave the others idle. 1 also before the first decode, which is measured.
    """
    threads, rows, seconds_per_row = context.settings.threads, context.batch.capacity, context.core_seconds_per_row
    if threads < 2 or rows > MAX_CORE_ROWS or context.model.settings.gpu_layers != 0:
        return 1
    is_fast = seconds_per_row * rows <= MAX_CORE_SECONDS
    return threads if is_fast and 4 * threads * rows * context.model.vocabulary.size <= MAX_CORES_BYTES else 1


def group_texts(texts: Sequence[Sequence[int]], max_rows: int, count: int) -> list[Sequence[Sequence[int]]]:
    """Return the first texts as at most `count` decodes of at most `max_rows` tokens. A longer text has its own.

    >>> group_texts([[1, 2, 3], [4], [5, 6], [7]], 4, 2)
    [[[1, 2, 3], [4]], [[5, 6], [7]]]
    """
    groups, start = list[Sequence[Sequence[int]]](), 0
    while start < len(texts) and len(groups) < count:
        stop = start + count_fitting_texts([len(text) for text in texts[start : start + MAX_TEXTS]], max_rows)
        groups.append(texts[start:stop])
        start = stop
    return groups


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


def get_pooling_context(engine: Engine, purpose: Purpose, token_count: int, core: int = 0) -> PoolingContext:
    """Return the context that pools texts of up to `token_count` tokens. That of core 0 is also for all cores together.

    Raises `PromptTooLong` if the model has no space for so many.
    """
    target = get_target(engine)
    limit = min(target.cells_per_sequence, target.model.info.trained_context_length)
    if token_count > limit:
        raise PromptTooLong(token_count, limit)
    # A text that is longer than a usual decode replaces the context by a larger one.
    usual_rows = choose_rows(target.batch.capacity, on_gpu=target.model.settings.gpu_layers != 0)
    rows = max(usual_rows, 1 << (token_count - 1).bit_length())

    def create() -> LlamaContext:
        return PoolingContext(target, purpose, rows)

    context = target.get_companion(f"{purpose} {core}", create, min_cells=2 * token_count)
    assert isinstance(context, PoolingContext)
    return context


class PoolingContext(LlamaContext):
    """Context whose sequences are texts. It keeps the shared prefix of the last call for the next one."""

    def __init__(self, target: LlamaContext, purpose: Purpose, rows: int) -> None:
        """Pool as the model defines it; embeddings of a model that defines nothing are the mean over the tokens."""
        super().__init__(target.model, _build_settings(target, purpose, rows), owner=target)
        self.computed_rows = 0
        self.core_seconds_per_row = math.inf  # of the fastest decode: those of few rows take longer for each
        self._threads = self.settings.threads
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
            self.load_prefix(prefix, salt)
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

    def split_prefix(
        self, prefix: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
        """Return prefix and texts as this context computes them: if it cannot share the prefix, each text has it."""
        return (prefix, texts) if self.can_share_prefix else ((), [[*prefix, *text] for text in texts])

    def load_prefix(self, prefix: Sequence[int], salt: str) -> None:
        """Compute the prefix that the next texts share, unless it is there already."""
        prefix = tuple(prefix)
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

    def copy_prefix(self, source: PoolingContext) -> None:
        """Copy the prefix of another context, so that it is not computed again."""
        if self._prefix == source._prefix:
            return
        self._forget_prefix()
        if source._prefix is not None:
            self.state.load(PREFIX_SEQUENCE, source.state.save(PREFIX_SEQUENCE))
            self._prefix, self._prefix_vector = source._prefix, source._prefix_vector

    def _decode_texts(self, prefix_length: int, texts: Sequence[Sequence[int]]) -> None:
        self.batch.clear()
        for sequence, text in enumerate(texts, start=1):
            if prefix_length:
                self.memory.copy(PREFIX_SEQUENCE, sequence)
            tokens = np.asarray(text, dtype=np.int32)
            self.batch.add(tokens, position=prefix_length, sequence=sequence, outputs=len(tokens))
        self.computed_rows += self.batch.count
        started_at = time.perf_counter()
        self.decode()
        seconds = (time.perf_counter() - started_at) * self._threads
        self.core_seconds_per_row = min(self.core_seconds_per_row, seconds / self.batch.count)

    def set_threads(self, threads: int, batch_threads: int) -> None:
        """Set the threads for decodes of one row, and of several rows."""
        super().set_threads(threads, batch_threads)
        self._threads = batch_threads

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
    rows = round_rows(rows)
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
        sequences=POOLING_SEQUENCES,
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


def round_rows(rows: int) -> int:
    """Return rows for a context: llama.cpp aborts if they are no multiple of its sequences.

    >>> round_rows(65)
    128
    """
    return -(-rows // POOLING_SEQUENCES) * POOLING_SEQUENCES


def _read_pooling(target: LlamaContext) -> int:
    """Return the pooling type in the metadata of a model; `POOLING_NONE` if there is none."""
    value = target.model.metadata.get(f"{target.model.info.architecture}.pooling_type", "")
    return int(value) if value.isdigit() else POOLING_NONE
