"""Law of unloading: after an unload and a load, the next turn of each conversation computes only its new tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

import afterglow
from afterglow.engine.types.settings import EngineSettings
from afterglow.testing import models

pytestmark = pytest.mark.native
NEW_TOKENS = 9
LENGTHS = (70, 131, 200)  # of three conversations on two sequences: one of them is only in the tiers


def build_tokens(count: int, seed: int) -> list[int]:
    return [20 + (7 * index + 31 * seed + index * index) % 200 for index in range(count)]


@pytest.mark.parametrize("kv_unified", [False, True])
@pytest.mark.parametrize("kind", ["attention", "window", "recurrent", "hybrid"])
def test_the_next_turn_after_an_unload_computes_only_its_new_tokens(
    kind: str, kv_unified: bool, tmp_path: Path
) -> None:
    settings = EngineSettings(disk_cache_directory=tmp_path, ram_cache_bytes=32 * 1024**2)
    conversations = [build_tokens(length, number) for number, length in enumerate(LENGTHS)]
    with afterglow.load(
        models.get_path(kind), context=512, sequences=2, threads=1, kv_unified=kv_unified, engine=settings
    ) as model:
        for turn in range(3):
            for number, tokens in enumerate(conversations):
                completion = model.complete(tokens, max_tokens=5, temperature=0, ignore_eos=True)
                computed = completion.usage.prompt_tokens - completion.usage.cached_tokens
                assert computed <= (NEW_TOKENS + 1 if turn else len(tokens)), (turn, number)
                tokens += [*completion.tokens, *build_tokens(NEW_TOKENS, 10 * turn + number)]
            report = model.deactivate()
            assert report is not None
            assert (report.is_complete, report.dropped_files) == (True, 0)
            assert report.files > 0
            model.activate()


def test_without_a_disk_cache_an_unload_loses_the_kv_cache() -> None:
    tokens = build_tokens(100, 1)
    with afterglow.load(models.get_path("attention"), context=512, threads=1, disk_cache=False) as model:
        model.complete(tokens, max_tokens=2)
        report = model.deactivate()
        assert report is not None
        assert (report.sequences, report.files, report.is_complete) == (1, 0, False)
        model.activate()
        assert model.complete(tokens, max_tokens=2).usage.cached_tokens == 0
