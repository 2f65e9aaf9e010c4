"""`afterglow models show`: what is known of a model without loading it, and the sampling that it gets by default."""

from __future__ import annotations

from collections.abc import Iterator

from rich.filesize import decimal

from afterglow import registry
from afterglow.api.sampling_defaults import SamplingDefaults, build_sampling_defaults
from afterglow.cli.settings import Settings
from afterglow.llama.gguf.header import read_header

SOURCE_LABELS = {
    "default": "default of afterglow",
    "file": "the model file",
    "ollama params": "the parameters of Ollama",
    "settings": "your settings",
}


def describe_model(name: str, settings: Settings) -> Iterator[str]:
    """Yield lines that describe a model on this machine. Raises `ModelNotFound`."""
    path = registry.resolve(name)
    header = read_header(path)
    metadata = header.metadata
    architecture = metadata.get("general.architecture", "unknown")
    yield f"model         {name}"
    yield f"file          {path} ({decimal(header.file_size)})"
    yield f"architecture  {architecture}"
    if (context := metadata.get(f"{architecture}.context_length")) is not None:
        yield f"context       trained with {context:,} tokens, loaded with {settings.load_options['context']:,}"
    yield f"chat template {'yes' if 'tokenizer.chat_template' in metadata else 'none: ChatML is used'}"
    yield "sampling"
    defaults = build_sampling_defaults(
        metadata,
        registry.read_ollama_parameters(name),
        settings.sampling_defaults,
        context_length=settings.load_options["context"],
    )
    yield from describe_sampling(defaults)


def describe_sampling(defaults: SamplingDefaults) -> Iterator[str]:
    """Yield a line for each sampling option: name, value and source.

    >>> next(describe_sampling(build_sampling_defaults({}, context_length=4096)))
    '  temperature      0.8   default of afterglow'
    """
    for name, (value, source) in defaults.describe().items():
        yield f"  {name:16} {value:<5g} {SOURCE_LABELS[source]}"
