"""Fills a disk tier from a tiny model until it is killed. Arguments: folder, kind, drafter, KV layout, seed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.disk import writer as disk_writer
from support.llama_engines import build_spec
from support.play import ask

PROMPTS = 8


def build(folder: Path, kind: str, drafter: str, kv_unified: bool) -> Engine:
    """Return an engine with a small disk tier in `folder`."""
    settings = {"block_size": 16, "disk_cache_directory": folder, "disk_cache_bytes": 4_000_000}
    return build_spec(kind, drafter, kv_unified=kv_unified, settings=settings, cells=1024, sequences=2)()


def get_prompt(number: int) -> list[int]:
    """Return one of the prompts. All begin with the same entries."""
    draw = np.random.default_rng
    return [*map(int, draw(0).integers(20, 250, 48)), *map(int, draw(number).integers(20, 250, 30 + 5 * number))]


def main(folder: str, kind: str, drafter: str, kv_unified: str, seed: str) -> None:
    disk_writer.MAX_DELAY_SECONDS = 0.0  # it is never idle
    engine = build(Path(folder), kind, drafter, kv_unified == "1")
    print("ready", flush=True)
    number = int(seed)
    while True:
        ask(engine, get_prompt(number % PROMPTS), boundaries=frozenset({48}), max_tokens=4, ignore_eos=True)
        engine.run_idle_task()
        if number == int(seed) + 3:
            assert engine.prefix_cache.store.disk_tier is not None
            engine.prefix_cache.store.disk_tier.writer.flush()  # on a busy machine, nothing may be on disk yet
            print("several prompts were computed", flush=True)
        number += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
