"""Model files are hostile input: whatever is in them, this process lives and says what is wrong."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

import pytest

from afterglow.errors import InvalidModel, OutOfMemory
from afterglow.llama.context import LlamaContext
from afterglow.llama.gguf import probe
from afterglow.llama.gguf.fingerprint import compute_fingerprint
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.model import LlamaModel
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.gguf_mutations import mutations

ORIGINALS = ("attention", "window", "recurrent", "hybrid-mtp", "embedding")
SAMPLE, ALL = 40, 400  # of each original


def seconds_used() -> float:
    """Processor time of this process and its children: what a file costs, however busy the machine is."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def attack(original: str, count: int, folder: Path) -> tuple[int, int]:
    """Load `count` damaged copies; how many were refused, and how many loaded and computed."""
    refused = loaded = 0
    for number, (what, data) in enumerate(
        itertools.islice(mutations(models.get_path(original).read_bytes(), 7), count)
    ):
        path = folder / f"{number}.gguf"
        path.write_bytes(data)
        started = seconds_used()
        try:
            with LlamaModel.load(path) as model:
                LlamaContext(model, ContextSettings(cells=256, batch=32, threads=1, outputs=1)).close()
            loaded += 1
        except (InvalidModel, OutOfMemory):  # a lie about sizes may pass as a model too large for here
            refused += 1
        used = seconds_used() - started
        assert used < 2, f"{what} took {used:.1f} s"
        path.unlink()
    return refused, loaded


@pytest.mark.parametrize("original", ORIGINALS)
def test_a_sample_of_damaged_files_is_refused_or_loaded(original: str, tmp_path: Path) -> None:
    refused, loaded = attack(original, SAMPLE, tmp_path)
    assert refused > SAMPLE // 3
    assert refused + loaded == SAMPLE


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("original", ORIGINALS)
def test_every_damaged_file_is_refused_or_loaded(original: str, tmp_path: Path) -> None:
    refused, loaded = attack(original, ALL, tmp_path)
    assert refused + loaded == ALL


def test_a_file_that_passed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(models.get_path("attention").read_bytes())
    tried: list[Path] = []
    original = probe._try_in_child
    monkeypatch.setattr(probe, "_try_in_child", lambda *args: (tried.append(args[0][0]), original(*args)))
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    probe.ensure_safe(path)
    started = time.perf_counter()
    probe.ensure_safe(path)
    assert tried == [path]
    assert time.perf_counter() - started < 0.1
    moved = path.rename(tmp_path / "elsewhere.gguf")  # known by its content, not by its name
    probe.ensure_safe(moved)
    assert tried == [path]


def test_a_changed_file_is_another_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = bytearray(models.get_path("attention").read_bytes())
    path.write_bytes(data)
    before = compute_fingerprint(path)
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert compute_fingerprint(path) != before


def test_an_endless_trial_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(models.get_path("attention").read_bytes())
    monkeypatch.setattr(probe, "BASE_TIMEOUT_SECONDS", 0.01)
    with pytest.raises(InvalidModel, match="took longer"):
        probe._try_in_child([path], 0)


def test_a_trial_that_dies_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "dies"
    script.write_text("#!/bin/sh\necho 'GGML_ASSERT(x) failed' >&2\nkill -ABRT $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(probe.sys, "executable", str(script))
    with pytest.raises(InvalidModel, match=r"SIGABRT: GGML_ASSERT"):
        probe._try_in_child([tmp_path / "x.gguf"], 0)


def test_damaged_adapters_are_refused_or_loaded(tmp_path: Path) -> None:
    damaged = itertools.islice(mutations(models.get_path("adapter").read_bytes(), 3), 30)
    with LlamaModel.load(models.get_path("attention")) as model:
        for number, (_, data) in enumerate(damaged):
            path = tmp_path / f"{number}.gguf"
            path.write_bytes(data)
            with contextlib.suppress(InvalidModel):
                LoraAdapter.load(model, path).close()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all", b"\x80\x04pickle", b"GGUF" + b"\0" * 100])
def test_a_file_that_is_no_model_is_refused_in_words(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidModel) as caught:
        LlamaModel.load(path)
    assert str(path) in str(caught.value)


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such file"):
        LlamaModel.load(tmp_path)
