"""Program that fills a disk tier until it is killed. Arguments: the directory, the kind of memory, a seed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from afterglow.engine.kvcache.disk import writer as disk_writer
from afterglow.engine.types.settings import EngineSettings
from support.play import ask, fake, prompt

PROMPTS = 24


def settings(folder: Path) -> EngineSettings:
    return EngineSettings(block_size=8, ram_cache_bytes=10**7, disk_cache_directory=folder, disk_cache_bytes=150_000)


def main(folder: str, kind: str, seed: int) -> None:
    disk_writer.MAX_DELAY_SECONDS = 0.0  # it is never idle
    engine = fake(kind, settings(Path(folder)), sequences=2)
    print("ready", flush=True)
    number = seed
    while True:
        ask(engine, prompt(40 + 3 * (number % PROMPTS), number % PROMPTS), boundaries=frozenset({30}), max_tokens=4)
        engine.run_idle_task()
        number += 5


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
