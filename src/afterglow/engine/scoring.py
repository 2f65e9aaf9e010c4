"""Log-probabilities of the tokens of given texts, in a context of their own, so that they disturb no conversation.

The context keeps the last text. A text with a common prefix computes only the rest, e.g. the questions of a benchmark
after the same examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.sampling.logprobs import TokenLogprob, find_top_logprobs, log_softmax
from afterglow.engine.types.adapters import ActiveAdapters, build_adapter_key
from afterglow.engine.types.entries import Entries, common_prefix_length
from afterglow.errors import UnsupportedOperation
from afterglow.llama.context import LlamaContext

MIN_CELLS = 512  # of a context
SCORING_SEQUENCE = 0  # the only sequence of the context


@dataclass(frozen=True, slots=True)
class ScoringWindow:
    """One pass: tokens [start, stop) are decoded from position 0, those from `score_start` on are scored."""

    start: int
    score_start: int
    stop: int


def plan_windows(token_count: int, window_size: int) -> list[ScoringWindow]:
    """Return windows that score the tokens from 1 on, each once. They overlap by half, so each token has context."""
    windows = [ScoringWindow(0, 1, min(token_count, window_size))]
    while windows[-1].stop < token_count:
        score_start = windows[-1].stop
        start = score_start - window_size // 2
        windows.append(ScoringWindow(start, score_start, min(token_count, start + window_size)))
    return windows


def score_text(
    engine: Engine,
    *,
    tokens: Sequence[int],
    first: int,
    alternatives: int,
    adapters: ActiveAdapters,
    salt: str,
) -> list[TokenLogprob] | None:
    """Run the next decode of a text. Return the scores of its tokens from index `first` on; None if some are missing.

    The caller repeats the call until it returns the scores, so that the engine serves its requests in between. Only
    texts with the same salt and adapters share a prefix.
    """
    backend = engine.backend
    if not isinstance(backend, LlamaBackend):
        raise UnsupportedOperation("scoring", "the engine does not run on llama.cpp")
    context = get_scoring_context(backend.context, len(tokens))
    keys = [build_adapter_key(part, backend.adapters) for part in (adapters.head, adapters.tail)]
    text = ScoredText(np.asarray(tokens, dtype=np.int64), (salt, *keys, adapters.start), max(1, first), alternatives)
    start = context.begin(text, share_prefix=not engine.settings.deterministic)
    stop = min(start + context.max_rows, text.rows)
    if start < adapters.start:  # a decode has one set of adapters
        stop = min(stop, adapters.start)
    if start < stop:
        context.set_adapters(backend.select_adapters(adapters.find_at(start)))
        context.compute_rows(stop)
        engine.counters.scored_rows += stop - start
    return context.get_scores(text) if stop == text.rows else None


@dataclass(frozen=True, slots=True, eq=False)
class ScoredText:
    """Tokens, of which those from index `first` on are scored. `key` has the salt and the adapters."""

    tokens: Entries
    key: tuple[object, ...] = ()
    first: int = 1
    alternatives: int = 0

    @property
    def rows(self) -> int:
        """Rows to compute: the last token is scored but not decoded."""
        return len(self.tokens) - 1


def get_scoring_context(target: LlamaContext, token_count: int) -> ScoringContext:
    """Return the context beside `target` that scores texts of `token_count` tokens; a longer text replaces it."""
    context = target.get_companion("scoring", lambda: ScoringContext(target, token_count), min_cells=token_count)
    assert isinstance(context, ScoringContext)
    return context


class ScoringContext(LlamaContext):
    """Context with one sequence that scores texts, one after the other. It keeps the last one.

    Logits are not kept, so the row before the first token that differs is computed again.
    """

    def __init__(self, target: LlamaContext, token_count: int) -> None:
        cells = max(MIN_CELLS, 1 << (token_count - 1).bit_length())
        settings = replace(
            target.settings,
            cells=min(cells, target.cells_per_sequence),
            sequences=1,
            kv_unified=False,
            recurrent_snapshots=0,
            batch=min(target.batch.capacity, target.max_outputs),  # every row has an output
        )
        super().__init__(target.model, settings, owner=target)
        self.max_rows = min(self.batch.capacity, self.max_outputs)
        self._text = ScoredText(np.empty(0, np.int64))
        # Of each token of the text, as far as it was read; None if it was not scored. The KV cache has the rows of all
        # these tokens but the last.
        self._scores: list[TokenLogprob | None] = []

    def begin(self, text: ScoredText, *, share_prefix: bool) -> int:
        """Return the first row of a text that must be computed. If there is one, the text replaces the last one.

        Without `share_prefix`, only the same text continues: no score may depend on the text before.
        """
        last, read = self._text, len(self._scores)
        common = min(read, common_prefix_length(last.tokens, text.tokens))
        can_share = text.key == last.key and text.alternatives <= last.alternatives
        if not can_share or not (share_prefix or np.array_equal(last.tokens, text.tokens)):
            common = 0
        common = next((index for index in range(text.first, common) if self._scores[index] is None), common)
        if common == len(text.tokens):
            return text.rows
        start = max(0, common - 1)  # the logits of this row score the token behind it
        if start < read - 1 and not self.memory.remove(SCORING_SEQUENCE, start=start):
            start = 0
            self.memory.remove(SCORING_SEQUENCE)
        self._text, self._scores = text, self._scores[: start + 1] or [None]
        return start

    def compute_rows(self, stop: int) -> None:
        """Decode the rows of the text up to `stop`, and keep the scores of the tokens behind them."""
        text, start = self._text, len(self._scores) - 1
        rows = text.tokens[start:stop].astype(np.int32)
        outputs = max(0, min(len(rows), stop + 1 - text.first))
        self.batch.clear()
        self.batch.add(rows, position=start, sequence=SCORING_SEQUENCE, outputs=outputs)
        try:
            self.decode()
        except BaseException:
            self.memory.remove(SCORING_SEQUENCE)
            self._scores = []
            raise
        scores: list[TokenLogprob | None] = [None] * (len(rows) - outputs)
        for row in range(len(rows) - outputs, len(rows)):
            logits = self.get_logits(row)
            logprobs = log_softmax(logits)
            token = text.tokens[start + row + 1]
            scores.append((float(logprobs[token]), find_top_logprobs(logits, logprobs, text.alternatives)))
        self._scores += scores

    def get_scores(self, text: ScoredText) -> list[TokenLogprob]:
        """Return the scores of a text, all of which are known."""
        scores = self._scores[text.first : len(text.tokens)]
        return [(score[0], score[1][: text.alternatives]) for score in scores if score is not None]
