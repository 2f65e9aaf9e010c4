"""Engines that share a store, for the tests of the object tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.objects.tier import ObjectTier
from afterglow.engine.types.settings import EngineSettings
from support.play import Answer, ask, fake, set_prefill_cost


@contextmanager
def run_sharing_engines(store_url: str) -> Iterator[Callable[..., Engine]]:
    """Yield a function that starts engines on a store. Computing is slow, so that everything is worth loading."""
    engines: list[Engine] = []

    def start(kind: str = "attention", seconds_per_entry: float = 0.05, **settings: object) -> Engine:
        options = {"shared_cache": store_url, "block_size": 16, "ram_cache_bytes": 10**7, "write_through": True}
        engine = fake(kind, EngineSettings(**{**options, **settings}), sequences=2)  # type: ignore[arg-type]
        set_prefill_cost(engine, seconds_per_entry)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


def get_tier(engine: Engine) -> ObjectTier:
    tier = engine.prefix_cache.store.object_tier
    assert tier is not None
    return tier


def ask_and_store(engine: Engine, entries: list[int], **options: object) -> Answer:
    """Run a request and wait until it is in the store."""
    answer = ask(engine, entries, **options)
    engine.write_through()
    assert get_tier(engine).flush(60)
    return answer
