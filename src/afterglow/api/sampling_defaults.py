"""Default sampling of a model: from the settings, Ollama's parameters, the model file, or `Sampling` itself."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from afterglow.errors import InvalidArgument
from afterglow.llama.sampling import LIMITS, Sampling

SamplingSource: TypeAlias = Literal["default", "file", "ollama params", "settings"]
# Keys that llama.cpp writes into a GGUF file. Its `general.sampling.sequence` is not used.
FILE_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.xtc_probability": "xtc_probability",
    "general.sampling.xtc_threshold": "xtc_threshold",
    "general.sampling.penalty_last_n": "repeat_last_n",
    "general.sampling.penalty_repeat": "repeat_penalty",
    "general.sampling.mirostat": "mirostat",
    "general.sampling.mirostat_tau": "mirostat_tau",
    "general.sampling.mirostat_eta": "mirostat_eta",
}
# Parameters of an Ollama model that are sampling parameters; they have the same names here.
OLLAMA_KEYS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "seed"),
)
INTEGER_NAMES = frozenset({"mirostat", "seed"} | {name for name, _, high in LIMITS if isinstance(high, int)})
MAIN_NAMES = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")  # shown even if they are the defaults
logger = logging.getLogger("afterglow")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling of a request that sets no sampling option, and the source of each value that is not a default.

    >>> model.sampling_defaults.sampling.temperature, model.sampling_defaults.get_source("temperature")
    (0.8, 'default')
    """

    sampling: Sampling
    sources: Mapping[str, SamplingSource]

    def get_source(self, name: str) -> SamplingSource:
        """Return where a value comes from: `settings`, `ollama params`, `file` or `default`."""
        return self.sources.get(name, "default")

    def describe(self) -> dict[str, tuple[float, SamplingSource]]:
        """Return value and source of the main sampling options, and of all others that are not defaults."""
        names = [*MAIN_NAMES, *(name for name in self.sources if name not in MAIN_NAMES)]
        return {name: (getattr(self.sampling, name), self.get_source(name)) for name in names}


def build_sampling_defaults(
    metadata: Mapping[str, object],
    ollama_parameters: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    *,
    context_length: int,
) -> SamplingDefaults:
    """Return the default sampling of a model. Settings override Ollama's parameters, which override the file.

    `metadata` is that of the model file. A value that is not valid is left out, with a warning.

    >>> defaults = build_sampling_defaults({"general.sampling.temp": 0.6}, {"top_k": 20}, context_length=4096)
    >>> defaults.sampling.temperature, defaults.sampling.top_k, defaults.sources
    (0.6, 20, {'temperature': 'file', 'top_k': 'ollama params'})
    """
    ollama, values = ollama_parameters or {}, settings or {}
    layers: list[tuple[SamplingSource, dict[str, object]]] = [
        ("file", {name: metadata[key] for key, name in FILE_KEYS.items() if key in metadata}),
        ("ollama params", {name: ollama[name] for name in OLLAMA_KEYS if name in ollama}),
        ("settings", {name: value for name, value in values.items() if value is not None}),
    ]
    sampling, sources = Sampling(), dict[str, SamplingSource]()
    for source, layer in layers:
        for name, value in layer.items():
            try:
                changed = {name: parse_value(name, value, context_length)}
                sampling = dataclasses.replace(sampling, **changed)  # type: ignore[arg-type]
            except InvalidArgument as error:
                logger.warning("the %s of the model has an invalid sampling value: %s", source, error)
                continue
            sources[name] = source
    return SamplingDefaults(sampling, sources)


def parse_value(name: str, value: object, context_length: int) -> float:
    """Return a sampling value of a file as a number. llama.cpp's -1 is "off", or "the whole context" for a window.

    >>> parse_value("temperature", "0.600000", 4096), parse_value("top_k", -1, 4096)
    (0.6, 0)
    """
    try:
        number = round(float(value), 6)  # type: ignore[arg-type]  # a 32-bit 0.95 is 0.94999998
    except (TypeError, ValueError):
        raise InvalidArgument(name, f"must be a number, not {value!r}") from None
    if name == "repeat_last_n" and number < 0:
        return context_length
    if name == "top_k" and number < 0:
        return 0
    return int(number) if name in INTEGER_NAMES and number.is_integer() else number
