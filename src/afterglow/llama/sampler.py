"""Sampler chain of llama.cpp's samplers in a fixed order. Independent of requests."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument, UnsupportedOption
from afterglow.llama.handle import Handle
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel
from afterglow.llama.parallel import count_threads, run_parallel
from afterglow.llama.sampling import Sampling
from afterglow.llama.top_logits import MIN_SHORTLIST_CANDIDATES, TopLogits

CANDIDATE_DTYPE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
SHORTLIST_COLUMN_DEPTH = 64  # logits per column in `build_shortlists`
# Each of few threads gets the logits of several rows: more threads wait for the GIL longer than they compute.
MIN_LOGITS_PER_THREAD = 1_200_000
MAX_SAMPLING_THREADS = 4

RowMode: TypeAlias = int | None  # of `sample_rows`
Reduced: TypeAlias = int | NDArray[np.void] | None  # a token, candidates, or nothing


class SamplerChain(Handle):
    """Samples tokens with the given parameters. `sample` draws a token, `accept` updates the state.

    The engine applies grammars, with llguidance: it passes the allowed tokens to `sample`.

    >>> chain = SamplerChain(model, Sampling(temperature=0.7, seed=1))
    >>> token = chain.sample(context.get_logits(row))
    >>> chain.accept(token)
    """

    def __init__(self, model: LlamaModel, sampling: Sampling) -> None:
        if sampling.grammar:
            raise UnsupportedOption("grammar", "a sampler chain has none: pass the tokens that it allows to `sample`")
        for token in sampling.logit_bias:
            model.vocabulary.check_token(token)
        self.model = model
        self.sampling = sampling
        self.seed = secrets.randbits(32) if sampling.seed is None or sampling.seed < 0 else sampling.seed % 2**32
        ffi, symbols = get_library().ffi, get_library().symbols
        chain = _build_chain(model, sampling, self.seed)
        super().__init__("sampler", chain, symbols.llama_sampler_free, parent=model)
        # Only an argmax, possibly of biased logits: needs no candidate array and has no state.
        stages = symbols.llama_sampler_chain_n(chain)
        self._is_argmax = sampling.is_greedy and stages == 1 + bool(sampling.logit_bias)
        self._bias_tokens = np.array(list(sampling.logit_bias), dtype=np.intp)
        self._bias_values = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self._biases_only_lower = bool(self._bias_values.size) and float(self._bias_values.max()) <= 0
        self._logits_shape = (model.vocabulary.size,)
        # Top-k comes first, so no sampler sees the candidates that it drops.
        first = symbols.llama_sampler_name(symbols.llama_sampler_chain_get(chain, 0))
        self._uses_shortlist = ffi.string(first) == b"top-k"
        # What `sample_rows` computes of a row of logits: 0 the argmax, a number that many of the largest, or nothing.
        self.row_mode: RowMode = sampling.top_k if self._uses_shortlist else None
        if self._is_argmax and not sampling.logit_bias:
            self.row_mode = 0
        self._candidate_buffer: NDArray[np.void] | None = None  # for all tokens; allocated on first use
        self._candidates: NDArray[np.void] | None = None  # of the last draw
        self._candidate_array = ffi.new("llama_token_data_array *")

    def sample_and_accept(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int:
        """Sample a token and accept it."""
        token = self.sample(logits, allowed)
        if not self._is_argmax:
            self.accept(token)
        return token

    def sample(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int:
        """Draw the next token, from `allowed` if given. Does not change the state: call `accept` for a used token."""
        if logits.shape != self._logits_shape:
            raise InvalidArgument("logits", f"must be {self.model.vocabulary.size} numbers, not {logits.shape}")
        if self._is_argmax:
            assert self.pointer
            return self._find_argmax(logits, allowed)
        values = logits if allowed is None else logits[allowed]
        if self._uses_shortlist and (shortlist := build_shortlists(values[None], self.sampling.top_k)[0]) is not None:
            if allowed is not None:
                shortlist["id"] = allowed[shortlist["id"]]
            return self._draw(shortlist)
        if self._candidate_buffer is None:
            self._candidate_buffer = np.zeros(self._logits_shape, dtype=CANDIDATE_DTYPE)
        # Tokens that are not allowed are left out: with -inf instead, mirostat would compute with infinities.
        candidates = self._candidate_buffer[: len(values)]
        candidates["id"] = np.arange(len(values), dtype=np.int32) if allowed is None else allowed
        candidates["logit"] = values
        return self._draw(candidates)

    def _find_argmax(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None) -> int:
        """Return the first token with the largest logit."""
        if self._biases_only_lower and allowed is None:
            top = int(logits.argmax())
            if top not in self.sampling.logit_bias:  # no other logit can exceed it: saves a copy of all logits
                return top
        if self._bias_values.size:
            logits = logits.copy()
            logits[self._bias_tokens] += self._bias_values
        return int(logits.argmax() if allowed is None else allowed[logits[allowed].argmax()])

    def accept(self, token: int) -> None:
        """Update the state with `token`."""
        self.model.vocabulary.check_token(token)
        if not self._is_argmax:
            get_library().symbols.llama_sampler_accept(self.pointer, token)

    def reset(self) -> None:
        """Reset to the initial state: no accepted tokens, the original seed."""
        get_library().symbols.llama_sampler_reset(self.pointer)

    def clone(self) -> SamplerChain:
        """Return an independent chain in the same state."""
        symbols = get_library().symbols
        clone = SamplerChain(self.model, self.sampling)
        initial, clone._pointer = clone._pointer, symbols.llama_sampler_clone(self.pointer)
        symbols.llama_sampler_free(initial)
        clone.seed = self.seed
        return clone

    def _draw(self, candidates: NDArray[np.void]) -> int:
        """Apply the native chain to these candidates, which it changes."""
        self._candidates = candidates  # the native array points to them
        array = self._candidate_array
        array.data = get_library().ffi.from_buffer("llama_token_data *", candidates)
        array.size, array.selected, array.sorted = len(candidates), -1, False
        get_library().symbols.llama_sampler_apply(self.pointer, array)
        selected = array.selected
        assert 0 <= selected < array.size, "the last sampler of a chain always selects a token"
        return int(array.data[selected].id)


def sample_rows(
    chains: Sequence[SamplerChain | None], logits: NDArray[np.float32], top: TopLogits | None = None
) -> list[int | None]:
    """Sample and accept a token with each chain from its row of `logits`. Rows without a chain are skipped.

    The tokens are those of `sample_and_accept`. The work that grows with the vocabulary was done by the device that
    found the `top` logits, or runs on several threads, for many rows in one call of NumPy each.
    """
    modes = [None if chain is None else chain.row_mode for chain in chains]
    reduced = _reduce_rows(modes, logits) if top is None else _reduce_top_logits(modes, top, logits)
    tokens: list[int | None] = []
    for chain, row, result in zip(chains, logits, reduced, strict=True):
        if chain is None or isinstance(result, int):
            tokens.append(result if isinstance(result, int) else None)
        elif result is None:
            tokens.append(chain.sample_and_accept(row))
        else:
            tokens.append(token := chain._draw(result))
            chain.accept(token)
    return tokens


def _reduce_top_logits(modes: Sequence[RowMode], top: TopLogits, logits: NDArray[np.float32]) -> list[Reduced]:
    """Return what `_reduce_rows` returns, from the largest logits of each row.

    If the device found only the largest logit of each row, it may be any of several equal ones.
    """
    width = top.values.shape[1]
    if width == 1:
        results: list[Reduced] = [
            token if mode == 0 else None for mode, token in zip(modes, top.tokens[:, 0].tolist(), strict=True)
        ]
    else:
        results = _find_candidates(modes, top)
    missing = [row for row, result in enumerate(results) if result is None and modes[row] is not None]
    if len(missing) == len(modes):
        return _reduce_rows(modes, logits)
    for row in missing:
        results[row] = _reduce_part(modes[row : row + 1], logits[row : row + 1])[0]
    return results


def _find_candidates(modes: Sequence[RowMode], top: TopLogits) -> list[Reduced]:
    """Return what `_reduce_rows` returns, or None for a row whose largest logits are not all in `top`."""
    order = top.tokens.argsort(axis=1)
    tokens, values = np.take_along_axis(top.tokens, order, 1), np.take_along_axis(top.values, order, 1)
    ascending, width = np.sort(values, axis=1), values.shape[1]
    results: list[Reduced] = [None] * len(modes)
    for mode in {mode for mode in modes if mode is not None and mode < width}:
        rows = np.array([row for row, other in enumerate(modes) if other == mode])
        limits = ascending[rows, width - max(mode, 1)]
        is_complete = limits > ascending[rows, 0]  # other tokens may have the lowest value, too
        if mode == 0:
            found: Sequence[Reduced] = tokens[rows, values[rows].argmax(axis=1)].tolist()
        else:
            found = _divide_candidates(tokens[rows], values[rows], values[rows] >= limits[:, None])
        for row, reduced, complete in zip(rows.tolist(), found, is_complete.tolist(), strict=True):
            results[row] = reduced if complete else None
    return results


def _divide_candidates(
    tokens: NDArray[np.int32], values: NDArray[np.float32], mask: NDArray[np.bool_]
) -> list[NDArray[np.void]]:
    """Return the candidates of each row that `mask` selects."""
    candidates = np.zeros(np.count_nonzero(mask), dtype=CANDIDATE_DTYPE)
    candidates["id"], candidates["logit"] = tokens[mask], values[mask]
    bounds = [0, *mask.sum(axis=1).cumsum().tolist()]
    return [candidates[start:stop] for start, stop in itertools.pairwise(bounds)]


def _reduce_rows(modes: Sequence[RowMode], logits: NDArray[np.float32]) -> list[Reduced]:
    """Return for each row its argmax (mode 0), a shortlist of `mode` candidates or more, or None (mode None)."""
    parts = max(1, min(MAX_SAMPLING_THREADS, count_threads(), logits.size // MIN_LOGITS_PER_THREAD))
    if parts == 1:
        return _reduce_part(modes, logits)
    bounds = [len(modes) * part // parts for part in range(parts + 1)]
    ranges = [(modes[start:stop], logits[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return list(itertools.chain.from_iterable(run_parallel(_reduce_part, ranges)))


def _reduce_part(modes: Sequence[RowMode], logits: NDArray[np.float32]) -> list[Reduced]:
    """Do what `_reduce_rows` does on one thread."""
    results: list[Reduced] = [None] * len(modes)
    start = 0
    for stop in range(1, len(modes) + 1):
        if stop < len(modes) and modes[stop] == modes[start]:
            continue
        mode = modes[start]
        if mode == 0:
            results[start:stop] = logits[start:stop].argmax(axis=1).tolist()
        elif mode is not None:
            results[start:stop] = build_shortlists(logits[start:stop], mode)
        start = stop
    return results


def build_shortlists(logits: NDArray[np.float32], count: int) -> list[NDArray[np.void] | None]:
    """Return for each row the candidates whose logits are at least its `count`-th largest, ordered by index.

    None for a row if a shortlist would not save time. A row is divided into columns of 64. At least `count` logits are
    as large as the column maximum of rank `count`, so the logits that are as large include the `count` largest.
    For 128,000 logits this takes a fifth of the time of the native chain.

    >>> build_shortlists(np.arange(12_800, dtype=np.float32)[None], 2)[0]["id"]
    array([12798, 12799], dtype=int32)
    """
    rows, size = logits.shape
    depth, width = SHORTLIST_COLUMN_DEPTH, size // SHORTLIST_COLUMN_DEPTH
    if size < MIN_SHORTLIST_CANDIDATES or count > width:
        return [None] * rows
    columns = logits[:, : depth * width].reshape(rows, depth, width)
    maxima = columns.max(axis=1)
    thresholds = np.partition(maxima, width - count, axis=1)[:, width - count, None]
    # Only columns whose maximum reaches the threshold have such logits, and the rest of the row may.
    row_of_column, column = np.nonzero(maxima >= thresholds)
    found, level = np.nonzero(columns[row_of_column, :, column] >= thresholds[row_of_column])
    rest_row, rest_index = np.nonzero(logits[:, depth * width :] >= thresholds)
    row = np.concatenate([row_of_column[found], rest_row])
    tokens = np.concatenate([level * width + column[found], depth * width + rest_index])
    order = np.lexsort((tokens, row))
    row, tokens = row[order], tokens[order]
    values = logits[row, tokens]
    bounds = np.searchsorted(row, np.arange(rows + 1)).tolist()
    shortlists: list[NDArray[np.void] | None] = []
    for start, stop in itertools.pairwise(bounds):
        if stop - start < count:  # some logits are NaN
            shortlists.append(None)
            continue
        of_row = values[start:stop]
        is_candidate = of_row >= np.partition(of_row, stop - start - count)[stop - start - count]
        candidates = np.zeros(np.count_nonzero(is_candidate), dtype=CANDIDATE_DTYPE)
        candidates["id"], candidates["logit"] = tokens[start:stop][is_candidate], of_row[is_candidate]
        shortlists.append(candidates)
    return shortlists


def _build_chain(model: LlamaModel, sampling: Sampling, seed: int) -> Any:
    """Build the native chain in the order that `Sampling` documents. The last sampler always selects a token."""
    library = get_library()
    ffi, symbols, size = library.ffi, library.symbols, model.vocabulary.size
    samplers: list[Any] = []
    if sampling.logit_bias:
        bias = ffi.new("llama_logit_bias[]", [{"token": t, "bias": b} for t, b in sampling.logit_bias.items()])
        samplers.append(symbols.llama_sampler_init_logit_bias(size, len(bias), bias))
    penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    if sampling.repeat_last_n and penalties != (1.0, 0.0, 0.0):
        samplers.append(symbols.llama_sampler_init_penalties(size, sampling.repeat_last_n, *penalties))
    if sampling.dry_multiplier and sampling.dry_penalty_last_n:
        breakers = [ffi.new("char[]", breaker.encode()) for breaker in sampling.dry_sequence_breakers if breaker]
        dry = symbols.llama_sampler_init_dry(
            model.vocabulary.pointer,
            sampling.dry_multiplier,
            sampling.dry_base,
            sampling.dry_allowed_length,
            sampling.dry_penalty_last_n,
            ffi.new("char *[]", breakers),
            len(breakers),
        )
        samplers.append(dry)
    samplers += _build_selectors(sampling, seed, size)
    chain = symbols.llama_sampler_chain_init(symbols.llama_sampler_chain_default_params())
    for sampler in samplers:
        symbols.llama_sampler_chain_add(chain, sampler)
    return chain


def _build_selectors(sampling: Sampling, seed: int, size: int) -> list[Any]:
    symbols = get_library().symbols
    if sampling.is_greedy:
        return [symbols.llama_sampler_init_greedy()]
    if sampling.mirostat:
        temperature = symbols.llama_sampler_init_temp(sampling.temperature)
        tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
        if sampling.mirostat == 1:
            return [temperature, symbols.llama_sampler_init_mirostat(size, seed, tau, eta, 100)]
        return [temperature, symbols.llama_sampler_init_mirostat_v2(seed, tau, eta)]
    samplers = []
    if sampling.top_n_sigma >= 0:
        samplers.append(symbols.llama_sampler_init_top_n_sigma(sampling.top_n_sigma))
    if sampling.top_k:
        samplers.append(symbols.llama_sampler_init_top_k(sampling.top_k))
    if sampling.typical_p < 1:
        samplers.append(symbols.llama_sampler_init_typical(sampling.typical_p, 1))
    if sampling.top_p < 1:
        samplers.append(symbols.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0:
        samplers.append(symbols.llama_sampler_init_min_p(sampling.min_p, 1))
    if sampling.xtc_probability > 0:
        samplers.append(symbols.llama_sampler_init_xtc(sampling.xtc_probability, sampling.xtc_threshold, 1, seed))
    dynatemp = sampling.dynatemp_range, sampling.dynatemp_exponent
    samplers.append(symbols.llama_sampler_init_temp_ext(sampling.temperature, *dynatemp))
    return [*samplers, symbols.llama_sampler_init_dist(seed)]
