"""Sampling parameters of a request, as plain values. `SamplerChain` (sampler.py) applies them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from afterglow.errors import InvalidArgument
from afterglow.llama.checks import INT32_MAX, check_float, check_integer

Mirostat = Literal[0, 1, 2]
DEFAULT_DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
DEFAULT_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
SAMPLER_NAMES = (*DEFAULT_SAMPLERS, "infill")
# The infill sampler compares every two candidates, so top-k must leave few of them.
MAX_INFILL_CANDIDATES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters, named as in llama.cpp and in OpenAI's API.

    Grammar and logit bias come first, then the `samplers` in their order, then the draw. Samplers that are not listed
    have no effect. Mirostat replaces all but penalties and DRY, and the draw. Temperature 0 is the argmax after
    grammar, logit bias, and those of penalties, DRY and infill that stand before it.

    >>> plain = Sampling(samplers=("top_k", "temperature"), top_k=1, seed=1)
    >>> model.complete("One, two, three,", max_tokens=1, sampling=plain).text
    ' four'
    >>> yes_or_no = Sampling(temperature=0, grammar='root ::= "yes" | "no"')
    >>> model.complete("Is the sky blue? Answer:", sampling=yes_or_no).text in ("yes", "no")
    True
    """

    temperature: float = 0.8
    dynatemp_range: float = 0.0  # temperature varies by ± this with the entropy; 0: off
    dynatemp_exponent: float = 1.0
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    typical_p: float = 1.0  # 1: off
    top_n_sigma: float = -1.0  # negative: off
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1
    repeat_last_n: int = 64  # newest tokens that the repeat, frequency and presence penalties cover; 0: off
    repeat_penalty: float = 1.0  # 1: off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 1024
    dry_sequence_breakers: tuple[str, ...] = DEFAULT_DRY_SEQUENCE_BREAKERS
    mirostat: Mirostat = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS  # names of `SAMPLER_NAMES`, in the order of their application
    logit_bias: dict[int, float] = field(default_factory=dict)
    grammar: str = ""  # GBNF with a rule `root`, which the engine enforces; empty: none
    seed: int | None = None  # None or negative: random

    def __post_init__(self) -> None:
        for name, low, high in LIMITS:
            check = check_integer if isinstance(high, int) else check_float
            check(name, getattr(self, name), low, high)  # type: ignore[arg-type]
        if self.mirostat not in (0, 1, 2):
            raise InvalidArgument("mirostat", f"must be 0, 1 or 2, not {self.mirostat!r}")
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        for bias in self.logit_bias.values():
            if bias != float("-inf"):  # allowed: it bans the token
                check_float("logit_bias", bias)
        _check_text("grammar", self.grammar)
        for breaker in self.dry_sequence_breakers:
            _check_text("dry_sequence_breakers", breaker)
        self._check_samplers()

    def _check_samplers(self) -> None:
        for name in self.samplers:
            if name not in SAMPLER_NAMES:
                raise InvalidArgument(
                    "samplers", f"has {name!r}, which is not a sampler; the names are {', '.join(SAMPLER_NAMES)}"
                )
        if "infill" not in self.samplers:
            return
        if "top_k" not in self.samplers[: self.samplers.index("infill")]:
            raise InvalidArgument("samplers", "must have `top_k` before `infill`, which compares every two candidates")
        if not 1 <= self.top_k <= MAX_INFILL_CANDIDATES:
            raise InvalidArgument(
                "top_k", f"must be from 1 to {MAX_INFILL_CANDIDATES} with the sampler `infill`, not {self.top_k}"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken. Without the sampler `temperature`, its value has no effect."""
        return self.temperature == 0 and ("temperature" in self.samplers or self.mirostat != 0)


def _check_text(name: str, text: str) -> None:
    """Raise `InvalidArgument` for `name` if `text` cannot be a C string in UTF-8."""
    if not isinstance(text, str):
        raise InvalidArgument(name, f"must be text, not {text!r}")
    if "\0" in text:
        raise InvalidArgument(name, "must not contain a zero byte")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidArgument(name, "must not contain a lone surrogate")


LIMITS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0), ("dynatemp_range", 0.0, 100.0), ("dynatemp_exponent", 0.0, 100.0),
    ("top_k", 0, INT32_MAX), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("typical_p", 0.0, 1.0),
    ("top_n_sigma", -1e6, 1e6), ("xtc_probability", 0.0, 1.0), ("xtc_threshold", 0.0, 1.0),
    ("repeat_last_n", 0, 1_000_000), ("repeat_penalty", 1e-6, 1e6),
    ("frequency_penalty", -1e6, 1e6), ("presence_penalty", -1e6, 1e6),
    ("dry_multiplier", 0.0, 1e6), ("dry_base", 1.0, 1e6),
    ("dry_allowed_length", 0, 1_000_000), ("dry_penalty_last_n", 0, 1_000_000),
    ("mirostat_tau", 0.0, 1e6), ("mirostat_eta", 0.0, 1e6),
)  # fmt: skip
