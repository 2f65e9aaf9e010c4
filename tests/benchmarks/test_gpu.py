"""The GPU benchmark fails if the engine is too slow, sampled decoding included. Nothing is timed."""

from __future__ import annotations

from pathlib import Path

import gpu
import pytest


def compare_with(monkeypatch: pytest.MonkeyPatch, **engine_speeds: float) -> dict[tuple[str, int], bool]:
    """Compare an engine of these speeds with a bench of speed 100. Return what passed."""
    speed = gpu.Speed(**{"prompt": 100.0, "answer": 100.0, "drawn": 100.0} | engine_speeds)
    bench = gpu.Speed(100.0, 100.0, 100.0)
    monkeypatch.setattr(gpu, "get_attention_path", lambda *kind: Path("model.gguf"))
    monkeypatch.setattr(gpu, "measure_engine", lambda file, seed: dict.fromkeys(gpu.SEQUENCE_COUNTS, speed))
    monkeypatch.setattr(gpu, "measure_bench", lambda bench_file, file: dict.fromkeys(gpu.SEQUENCE_COUNTS, bench))
    rows = gpu.compare("1b:f16", Path("bench"), 2)
    return {(str(row["what"]), int(str(row["width"]))): bool(row["passed"]) for row in rows}


def test_an_engine_as_fast_as_the_bench_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(compare_with(monkeypatch).values())


@pytest.mark.parametrize("what", ["prompt", "answer", "drawn"])
def test_an_engine_of_half_the_speed_fails(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    passed = compare_with(monkeypatch, **{what: 50.0})
    assert {row for row, is_passed in passed.items() if not is_passed} == {(what, n) for n in gpu.SEQUENCE_COUNTS}
