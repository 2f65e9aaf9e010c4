"""Budget of several models: which to unload so that another can be loaded. Pure decisions over plain values.

A model is worth the seconds that it takes to restore. As in every other cache, the models with the fewest seconds per
byte are unloaded first, and the value of a model halves with each hour of idle time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from afterglow.engine.kvcache.eviction import compute_log_value, compute_rank
from afterglow.errors import OutOfMemory

RAM = "ram"
ByteMap: TypeAlias = Mapping[str, int]
"""Bytes by device: `ram`, and the names of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentModel:
    """A model that takes memory, as the decisions see it."""

    name: str
    nbytes: ByteMap
    last_used: float = 0.0
    restore_seconds: float = 1.0
    pinned: bool = False
    is_busy: bool = False
    is_leaving: bool = False  # it is being unloaded, or will be when its requests have ended

    @property
    def rank(self) -> tuple[float, str]:
        """Position in the order of unloading; the lowest is unloaded first."""
        log_value = compute_log_value(self.restore_seconds, sum(self.nbytes.values()))
        return compute_rank(log_value, self.last_used), self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPlan:
    """What to do so that a model fits."""

    can_load: bool  # it fits now, beside all models that take memory
    unload: tuple[str, ...] = field(default=())  # idle models to unload now
    drain: tuple[str, ...] = field(default=())  # busy models to unload when their requests have ended


def plan_room(name: str, needed: ByteMap, residents: Sequence[ResidentModel], limits: ByteMap) -> RoomPlan:
    """Plan how the model `name` gets `needed` bytes. A device without a limit has room for everything.

    Idle models are unloaded before busy ones, the least valuable first, and none that need not be. Raises `OutOfMemory`
    if the model does not fit beside the pinned ones.

    >>> old = ResidentModel(name="old", nbytes={"ram": 60}, last_used=10.0)
    >>> new = ResidentModel(name="new", nbytes={"ram": 60}, last_used=20.0)
    >>> plan_room("next", {"ram": 60}, [old, new], {"ram": 130})
    RoomPlan(can_load=False, unload=('old',), drain=())
    """
    check_fits(name, needed, [model for model in residents if model.pinned], limits)
    if fits(needed, residents, limits):
        return RoomPlan(can_load=True)
    remaining = [model for model in residents if not model.is_leaving]
    candidates = [model for model in remaining if not model.pinned]
    candidates.sort(key=lambda model: (model.is_busy, model.rank))
    victims: list[ResidentModel] = []
    while not fits(needed, remaining, limits):
        victims.append(candidates.pop(0))
        remaining.remove(victims[-1])
    for victim in reversed(victims[:-1]):  # a later one may have freed enough alone; the last is needed
        if fits(needed, [*remaining, victim], limits):
            victims.remove(victim)
            remaining.append(victim)
    return RoomPlan(
        can_load=False,
        unload=tuple(model.name for model in victims if not model.is_busy),
        drain=tuple(model.name for model in victims if model.is_busy),
    )


def fits(needed: ByteMap, residents: Iterable[ResidentModel], limits: ByteMap) -> bool:
    """Return whether `needed` bytes fit beside these models on every device."""
    others = list(residents)
    return all(
        nbytes + sum(model.nbytes.get(device, 0) for model in others) <= limits[device]
        for device, nbytes in needed.items()
        if device in limits and nbytes
    )


def check_fits(name: str, needed: ByteMap, pinned: Sequence[ResidentModel], limits: ByteMap) -> None:
    """Raise `OutOfMemory` if a model cannot fit on a device even if only the pinned models stay."""
    for device, nbytes in needed.items():
        taken = sum(model.nbytes.get(device, 0) for model in pinned)
        available = limits.get(device, nbytes + taken) - taken
        if nbytes > available:
            beside = f", beside {', '.join(model.name for model in pinned)}, which are pinned" if taken else ""
            what = "`memory_bytes`" if device == RAM else f"the budget of {device}"
            advice = (
                f"{name!r} does not fit into the budget of the models on {device}{beside}. Raise {what} to at least "
                f"{-(-(nbytes + taken) // 1024**2):,} MiB, or load it with a smaller `context`, fewer `sequences` or "
                "a smaller `ram_cache_bytes`"
            )
            raise OutOfMemory(nbytes, max(available, 0), advice)


def choose_first_models(models: Mapping[str, ByteMap], pinned: Iterable[str], limits: ByteMap) -> list[str]:
    """Return the models to load at startup: the pinned ones, and in their order those that fit beside them.

    >>> choose_first_models({"a": {"ram": 5}, "b": {"ram": 6}, "c": {"ram": 2}}, ["c"], {"ram": 8})
    ['c', 'a']
    """
    chosen: list[ResidentModel] = []
    pins = [name for name in pinned if name in models]
    for name in [*pins, *(name for name in models if name not in pins)]:
        if fits(models[name], chosen, limits):
            chosen.append(ResidentModel(name=name, nbytes=models[name]))
    return [model.name for model in chosen]
