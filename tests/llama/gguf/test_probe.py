"""Model files are untrusted input: a malformed file never crashes the process and is rejected with a reason."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

import pytest

from afterglow.errors import InvalidModel, OutOfMemory
from afterglow.llama.context import LlamaContext
from afterglow.llama.gguf import probe
from afterglow.llama.gguf.fingerprint import compute_fingerprint
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.gguf_mutations import generate_mutations

pytestmark = pytest.mark.native

ORIGINALS = ("attention", "window", "recurrent", "hybrid-mtp", "embedding")
SAMPLE_COUNT, FULL_COUNT = 40, 400  # mutations of each original


def get_cpu_seconds() -> float:
    """Return the CPU time of this process and its children, which does not depend on the load of the machine."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def load_mutations(original: str, count: int, folder: Path) -> tuple[int, int]:
    """Load `count` damaged copies; return how many were rejected and how many loaded."""
    rejected = loaded = 0
    for number, (description, data) in enumerate(
        itertools.islice(generate_mutations(models.get_path(original).read_bytes(), 7), count)
    ):
        path = folder / f"{number}.gguf"
        path.write_bytes(data)
        started = get_cpu_seconds()
        try:
            with LlamaModel.load(path) as model:
                LlamaContext(model, ContextSettings(cells=256, batch=32, threads=1, outputs=1)).close()
            loaded += 1
        except (InvalidModel, OutOfMemory):  # false sizes may look like a model that is too large
            rejected += 1
        used = get_cpu_seconds() - started
        assert used < 2, f"{description} took {used:.1f} s"
        path.unlink()
    return rejected, loaded


@pytest.mark.parametrize("original", ORIGINALS)
def test_a_sample_of_damaged_files_is_rejected_or_loaded(original: str, tmp_path: Path) -> None:
    rejected, loaded = load_mutations(original, SAMPLE_COUNT, tmp_path)
    assert rejected > SAMPLE_COUNT // 3
    assert rejected + loaded == SAMPLE_COUNT


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("original", ORIGINALS)
def test_every_damaged_file_is_rejected_or_loaded(original: str, tmp_path: Path) -> None:
    rejected, loaded = load_mutations(original, FULL_COUNT, tmp_path)
    assert rejected + loaded == FULL_COUNT


def test_a_file_that_passed_is_not_probed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(models.get_path("attention").read_bytes())
    probed: list[Path] = []
    original = probe._try_in_child
    monkeypatch.setattr(probe, "_try_in_child", lambda *args: (probed.append(args[0][0]), original(*args)))
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    probe.ensure_safe(path)
    probe.ensure_safe(path)
    assert probed == [path]
    moved = path.rename(tmp_path / "elsewhere.gguf")  # identified by its content, not by its name
    probe.ensure_safe(moved)
    assert probed == [path]


def test_a_changed_file_has_a_different_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = bytearray(models.get_path("attention").read_bytes())
    path.write_bytes(data)
    before = compute_fingerprint(path)
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert compute_fingerprint(path) != before


def test_the_fingerprint_of_a_model_is_the_joint_one_of_its_files() -> None:
    path = models.get_path("attention")
    with LlamaModel.load(path, ModelSettings(vocab_only=True), trust=True) as model:
        assert model.fingerprint == probe.compute_joint_fingerprint([path])
        assert len(model.fingerprint) == 64
    assert probe.compute_joint_fingerprint([path, path]) != model.fingerprint


def test_a_trial_load_that_hangs_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(models.get_path("attention").read_bytes())
    monkeypatch.setattr(probe, "BASE_TIMEOUT_SECONDS", 0.01)
    with pytest.raises(InvalidModel, match="took longer"):
        probe._try_in_child([path], 0)


def test_the_error_of_a_crashed_trial_load_names_signal_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "dies"
    script.write_text("#!/bin/sh\necho 'GGML_ASSERT(x) failed' >&2\nkill -ABRT $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(probe.sys, "executable", str(script))
    with pytest.raises(InvalidModel, match=r"SIGABRT: GGML_ASSERT"):
        probe._try_in_child([tmp_path / "x.gguf"], 0)


def test_damaged_adapters_are_rejected_or_loaded(tmp_path: Path) -> None:
    damaged = itertools.islice(generate_mutations(models.get_path("adapter").read_bytes(), 3), 30)
    with LlamaModel.load(models.get_path("attention")) as model:
        for number, (_, data) in enumerate(damaged):
            path = tmp_path / f"{number}.gguf"
            path.write_bytes(data)
            with contextlib.suppress(InvalidModel):
                LoraAdapter.load(model, path).close()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all", b"\x80\x04pickle", b"GGUF" + b"\0" * 100])
def test_a_file_that_is_not_a_model_is_rejected_with_its_path(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidModel) as caught:
        LlamaModel.load(path)
    assert str(path) in str(caught.value)


def test_a_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such file"):
        LlamaModel.load(tmp_path)
