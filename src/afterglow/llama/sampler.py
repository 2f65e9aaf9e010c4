"""Sampler chain of llama.cpp's samplers. Independent of requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument, UnsupportedOption
from afterglow.llama.candidates import CANDIDATE_DTYPE, RowMode, build_shortlists, reduce_rows
from afterglow.llama.device_logits import LogitsRows
from afterglow.llama.handle import Handle
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel
from afterglow.llama.sampling import Sampling
from afterglow.llama.top_logits import TopLogits

MAX_INFILL_TOKEN_BYTES = 512  # buffer of llama.cpp's infill sampler


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
        # If top-k comes first, no sampler sees the candidates that it drops.
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
    chains: Sequence[SamplerChain | None], logits: LogitsRows, top: TopLogits | None = None
) -> list[int | None]:
    """Sample and accept a token with each chain from its row of `logits`. Rows without a chain are skipped.

    The tokens are those of `sample_and_accept`. The work that grows with the vocabulary is done for many rows together
    (`reduce_rows`), or was done by the device that found the `top` logits.
    """
    modes = [None if chain is None else chain.row_mode for chain in chains]
    tokens: list[int | None] = []
    for row, (chain, result) in enumerate(zip(chains, reduce_rows(modes, logits, top), strict=True)):
        if chain is None or isinstance(result, int):
            tokens.append(result if isinstance(result, int) else None)
        elif result is None:
            tokens.append(chain.sample_and_accept(logits[row]))
        else:
            tokens.append(token := chain._draw(result))
            chain.accept(token)
    return tokens


def _build_chain(model: LlamaModel, sampling: Sampling, seed: int) -> Any:
    """Build the native chain as `Sampling` documents. The last sampler always selects a token."""
    library = get_library()
    ffi, symbols, size = library.ffi, library.symbols, model.vocabulary.size
    samplers: list[Any] = []
    if sampling.logit_bias:
        bias = ffi.new("llama_logit_bias[]", [{"token": t, "bias": b} for t, b in sampling.logit_bias.items()])
        samplers.append(symbols.llama_sampler_init_logit_bias(size, len(bias), bias))
    builders = (_build_sampler(name, model, sampling, seed) for name in _list_effective_samplers(sampling))
    samplers += [sampler for sampler in builders if sampler is not None]
    samplers += _build_selectors(sampling, seed, size)
    chain = symbols.llama_sampler_chain_init(symbols.llama_sampler_chain_default_params())
    for sampler in samplers:
        symbols.llama_sampler_chain_add(chain, sampler)
    return chain


def _list_effective_samplers(sampling: Sampling) -> Sequence[str]:
    """Return the samplers that a chain needs before it selects a token.

    >>> _list_effective_samplers(Sampling(temperature=0))
    ('penalties', 'dry')
    """
    names = sampling.samplers
    if sampling.is_greedy and "temperature" in names:
        names = names[: names.index("temperature")]
    if sampling.mirostat or (sampling.is_greedy and "infill" not in names):
        names = tuple(name for name in names if name in ("penalties", "dry"))
    return names


def _build_sampler(name: str, model: LlamaModel, sampling: Sampling, seed: int) -> Any:
    """Build the native sampler of a name, or return None if its values turn it off."""
    s, symbols = sampling, get_library().symbols
    penalties = (s.repeat_penalty, s.frequency_penalty, s.presence_penalty)
    has_penalties = s.repeat_last_n > 0 and penalties != (1.0, 0.0, 0.0)
    has_dry = s.dry_multiplier > 0 and s.dry_penalty_last_n > 0
    samplers: dict[str, tuple[bool, Callable[..., Any], tuple[Any, ...]]] = {
        "penalties": (
            has_penalties,
            symbols.llama_sampler_init_penalties,
            (model.vocabulary.size, s.repeat_last_n, *penalties),
        ),
        "dry": (has_dry, _build_dry, (model, s)),
        "top_n_sigma": (s.top_n_sigma >= 0, symbols.llama_sampler_init_top_n_sigma, (s.top_n_sigma,)),
        "top_k": (s.top_k > 0, symbols.llama_sampler_init_top_k, (s.top_k,)),
        "typ_p": (s.typical_p < 1, symbols.llama_sampler_init_typical, (s.typical_p, 1)),
        "top_p": (s.top_p < 1, symbols.llama_sampler_init_top_p, (s.top_p, 1)),
        "min_p": (s.min_p > 0, symbols.llama_sampler_init_min_p, (s.min_p, 1)),
        "xtc": (s.xtc_probability > 0, symbols.llama_sampler_init_xtc, (s.xtc_probability, s.xtc_threshold, 1, seed)),
        "temperature": (
            True,
            symbols.llama_sampler_init_temp_ext,
            (s.temperature, s.dynatemp_range, s.dynatemp_exponent),
        ),
        "infill": (True, _build_infill, (model,)),
    }
    is_on, build, arguments = samplers[name]
    return build(*arguments) if is_on else None


def _build_dry(model: LlamaModel, sampling: Sampling) -> Any:
    ffi, symbols = get_library().ffi, get_library().symbols
    breakers = [ffi.new("char[]", breaker.encode()) for breaker in sampling.dry_sequence_breakers if breaker]
    return symbols.llama_sampler_init_dry(
        model.vocabulary.pointer,
        sampling.dry_multiplier,
        sampling.dry_base,
        sampling.dry_allowed_length,
        sampling.dry_penalty_last_n,
        ffi.new("char *[]", breakers),
        len(breakers),
    )


def _build_infill(model: LlamaModel) -> Any:
    """Build the infill sampler. llama.cpp aborts on a model without an end token, and on longer tokens."""
    vocabulary = model.vocabulary
    if not {"eot", "eos"} & vocabulary.special_tokens.keys():
        raise UnsupportedOption("samplers", "has `infill`, which needs an end token: this model has none")
    longest = max(map(len, vocabulary.pieces))
    if longest > MAX_INFILL_TOKEN_BYTES:
        message = (
            f"has `infill`, which supports tokens of {MAX_INFILL_TOKEN_BYTES} bytes: this model has one of {longest}"
        )
        raise UnsupportedOption("samplers", message)
    return get_library().symbols.llama_sampler_init_infill(vocabulary.pointer)


def _build_selectors(sampling: Sampling, seed: int, size: int) -> list[Any]:
    """Build the samplers that select a token."""
    symbols = get_library().symbols
    if sampling.is_greedy:
        return [symbols.llama_sampler_init_greedy()]
    if not sampling.mirostat:
        return [symbols.llama_sampler_init_dist(seed)]
    temperature = symbols.llama_sampler_init_temp(sampling.temperature)
    tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
    if sampling.mirostat == 1:
        return [temperature, symbols.llama_sampler_init_mirostat(size, seed, tau, eta, 100)]
    return [temperature, symbols.llama_sampler_init_mirostat_v2(seed, tau, eta)]
