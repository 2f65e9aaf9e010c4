"""LoRA adapters: those that `load` declares, read from their files, and those that a request names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from afterglow.api.options import suggest_name
from afterglow.engine.types.adapters import Adapter, AdapterSet, build_adapter_set
from afterglow.errors import InvalidArgument, InvalidModel, ModelNotFound
from afterglow.llama.gguf.header import read_header

LoraInput: TypeAlias = Sequence[str | tuple[str, float]] | Mapping[str, float]
"""Adapters of a request: names, each with its default scale or in a pair with a scale, or scales by name."""
INVOCATION_KEY = "adapter.alora.invocation_tokens"


def read_adapters(model: Path, adapters: Mapping[str, tuple[str, float]]) -> tuple[Adapter, ...]:
    """Read the headers of adapter files. Raises `InvalidModel` if one is not an adapter for the model."""
    architecture = read_header(model).metadata.get("general.architecture") if adapters else None
    return tuple(
        read_adapter(name, Path(path).expanduser(), scale, f"{model.name} ({architecture})", architecture)
        for name, (path, scale) in adapters.items()
    )


def read_adapter(name: str, path: Path, scale: float, model: str, architecture: object) -> Adapter:
    """Read the header of one adapter file. `model` names the model in errors."""
    if not path.is_file():
        raise ModelNotFound(str(path), f"there is no such file for the adapter {name!r}")
    header = read_header(path)
    if header.metadata.get("general.type") != "adapter":
        raise InvalidModel(str(path), f"it is not a LoRA adapter for {model}: its `general.type` is not `adapter`")
    if (own := header.metadata.get("general.architecture")) != architecture:
        raise InvalidModel(str(path), f"it is an adapter for models of the architecture {own}, not for {model}")
    tokens = header.metadata.get(INVOCATION_KEY)
    return Adapter(
        name=name,
        path=path,
        scale=scale,
        invocation_tokens=tuple(map(int, tokens)) if isinstance(tokens, np.ndarray) else (),
        nbytes=sum(tensor.nbytes for tensor in header.tensors),
    )


def resolve_lora(lora: LoraInput, adapters: Sequence[Adapter], model: str) -> AdapterSet:
    """Return the set of the adapters that a request names. Raises `InvalidArgument` for an unknown name.

    >>> resolve_lora(["style"], [Adapter(name="style", path=Path("style.gguf"), scale=0.8)], "small")
    (('style', 0.8),)
    """
    defaults = {adapter.name: adapter.scale for adapter in adapters}
    items = list(lora.items()) if isinstance(lora, Mapping) else lora
    pairs: list[tuple[str, float]] = []
    for item in items:
        name = item if isinstance(item, str) else item[0]
        if name not in defaults:
            hint = suggest_name(name, defaults) if defaults else "it was loaded without adapters"
            raise InvalidArgument("lora", f"{name!r} is not an adapter of {model!r}; {hint}")
        pairs.append((name, defaults[name] if isinstance(item, str) else item[1]))
    return build_adapter_set(pairs)
