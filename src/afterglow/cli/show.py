"""What `models show` says of the sampling that a model gets by default."""

from __future__ import annotations

from collections.abc import Iterator

from afterglow.api.sampling_defaults import SamplingDefaults

SOURCE_LABELS = {
    "default": "default of afterglow",
    "file": "the model file",
    "ollama params": "the parameters of Ollama",
    "settings": "your settings",
}


def describe_sampling(defaults: SamplingDefaults) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each sampling option, with the source of its value.

    >>> from afterglow.api.sampling_defaults import build_sampling_defaults
    >>> next(describe_sampling(build_sampling_defaults({}, context_length=4096)))
    ('temperature', '0.8 (default of afterglow)')
    """
    for name, (value, source) in defaults.describe().items():
        yield name.replace("_", " "), f"{value:g} ({SOURCE_LABELS[source]})"
