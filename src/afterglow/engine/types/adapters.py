"""LoRA adapters of a request: which sets are active in which part of its prompt. Plain values and pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from afterglow.engine.types.entries import Entries
from afterglow.errors import InvalidArgument
from afterglow.llama.checks import check_float

MAX_SCALE = 100
AdapterSet: TypeAlias = tuple[tuple[str, float], ...]
"""Names and scales of adapters, sorted by name. Empty: the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA adapter that was declared when its model was loaded."""

    name: str
    path: Path
    scale: float = 1.0  # of requests that name the adapter without a scale
    invocation_tokens: tuple[int, ...] = ()  # of an activated adapter (aLoRA)
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """Adapter that a backend can apply."""

    digest: str  # of the content of its file
    invocation_tokens: tuple[int, ...] = ()  # of an activated adapter: it is active from these tokens on


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveAdapters:
    """Adapter sets of one prompt and its completion: `head` before the entry with index `start`, then `tail`."""

    head: AdapterSet = ()
    tail: AdapterSet = ()
    start: int = 0

    def find_at(self, index: int) -> AdapterSet:
        """Return the set that the entry with this index is computed with."""
        return self.tail if index >= self.start else self.head


def build_adapter_set(adapters: Iterable[tuple[str, float]]) -> AdapterSet:
    """Return the set of these adapters. A scale of 0 is the same as no adapter.

    >>> build_adapter_set([("style", 1), ("formal", 0.5), ("unused", 0)])
    (('formal', 0.5), ('style', 1.0))
    """
    scales: dict[str, float] = {}
    for name, scale in adapters:
        if name in scales:
            raise InvalidArgument("lora", f"has {name!r} twice")
        try:
            scales[name] = check_float("lora", scale, -MAX_SCALE, MAX_SCALE)
        except InvalidArgument:
            reason = f"must have a scale from -{MAX_SCALE} to {MAX_SCALE} for {name!r}, not {scale!r}"
            raise InvalidArgument("lora", reason) from None
    return tuple(sorted((name, scale) for name, scale in scales.items() if scale))


def build_adapter_key(adapters: AdapterSet, loaded: Mapping[str, LoadedAdapter]) -> str:
    """Return a text that is equal for sets with equal effect: files with equal content, equal scales."""
    return repr(sorted((loaded[name].digest, scale) for name, scale in adapters)) if adapters else ""


def resolve_adapters(
    requested: AdapterSet, loaded: Mapping[str, LoadedAdapter | Adapter], tokens: Entries
) -> tuple[ActiveAdapters, AdapterSet]:
    """Return where in a prompt which adapters are active, and the part of the set that becomes active inside of it.

    An activated adapter is active from the last occurrence of its invocation tokens in the prompt; if there is none, it
    is not active. Raises `InvalidArgument` for an unknown adapter or several activated ones.
    """
    for name, _ in requested:
        if name not in loaded:
            names = ", ".join(loaded) or "none"
            raise InvalidArgument("lora", f"{name!r} is not an adapter of this model, which has {names}")
    activated = tuple((name, scale) for name, scale in requested if loaded[name].invocation_tokens)
    if not activated:
        return ActiveAdapters(head=requested, tail=requested), ()
    if len(activated) > 1:
        names = " and ".join(repr(name) for name, _ in activated)
        raise InvalidArgument("lora", f"may have one activated adapter, not {names}")
    plain = tuple(adapter for adapter in requested if adapter not in activated)
    start = find_last(tokens, loaded[activated[0][0]].invocation_tokens)
    if start is None:
        return ActiveAdapters(head=plain, tail=plain), ()
    return ActiveAdapters(head=plain, tail=requested, start=start), activated


def find_last(tokens: Entries, pattern: tuple[int, ...]) -> int | None:
    """Return the start of the last occurrence of a pattern.

    >>> find_last(np.array([1, 1, 2, 1, 1, 2, 3]), (1, 2))
    4
    """
    if len(tokens) < len(pattern):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(pattern))
    starts = np.flatnonzero((windows == np.array(pattern)).all(axis=1))
    return int(starts[-1]) if len(starts) else None
