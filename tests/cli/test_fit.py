"""`afterglow fit`: what is chosen for a model and why, from the header alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from afterglow.cli import fit
from afterglow.engine.host.build import find_projector
from afterglow.errors import DownloadFailed
from afterglow.llama.library.devices import MachineMemory
from afterglow.registry import list_hub_files, store
from afterglow.testing import models
from support.commands import run_command
from support.registry_servers import ServedResponses, publish, run_server

MIB, GIB = 1024**2, 1024**3


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ServedResponses]:
    with run_server() as responses:
        monkeypatch.setenv("HF_ENDPOINT", responses.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.setenv("AFTERGLOW_MODELS", str(tmp_path / "models"))
        yield responses


@pytest.mark.native
def test_fit_prints_what_and_why_and_the_bytes() -> None:
    path = models.get_path("hybrid")
    result = run_command("fit", str(path), "--ram", "8GiB", "--gpu", "4GiB", "--sequences", "2")
    assert result.returncode == 0, result.stderr
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in result.stdout.splitlines()}
    assert rows["context"] == ["4,096 tokens", "", "", "the trained length"]
    assert rows["sequences"][0] == "2 with cells of their own"
    assert rows["layers on the GPU"][0] == "all"
    assert rows["RAM prefix cache"][1] == "2.0 GiB"
    assert rows["total"][-1] == "of 8.0 GiB RAM, 4.0 GiB GPU free"


@pytest.mark.native
def test_fit_prints_json_and_accepts_the_flags_of_serve() -> None:
    path = models.get_path("attention")
    flags = ["--context", "2000", "--kv-unified", "--cache-type-k", "q8_0", "--ram", "8GiB", "--json"]
    plan = json.loads(run_command("fit", str(path), *flags).stdout)
    assert plan["options"]["context"] == 2000
    assert (plan["options"]["kv_unified"], plan["options"]["cache_type_k"]) == (True, "q8_0")
    assert "sequences" in plan["chosen"]
    assert "context" not in plan["chosen"]
    assert sum(line["ram_bytes"] for line in plan["lines"]) == plan["needed"]["ram_bytes"]
    assert plan["free"] == {"ram_bytes": 8 * 1024**3, "gpu_bytes": []}


@pytest.mark.native
def test_what_does_not_fit_is_an_error_with_the_numbers() -> None:
    result = run_command("fit", str(models.get_path("attention")), "--context", "8000000", "--ram", "2GiB")
    assert (result.returncode, result.stdout) == (1, "")
    assert "2,048 MiB are free" in result.stderr
    assert "context=" in result.stderr
    assert run_command("fit", "smollm2", "--ram", "much").returncode == 1


@pytest.mark.native
@pytest.mark.slow
def test_only_the_header_of_a_hub_file_is_downloaded(hub: ServedResponses, monkeypatch, tmp_path, capsys) -> None:
    data = models.get_path("attention").read_bytes()
    publish(hub, "owner/repo", "model.gguf", data)
    monkeypatch.setattr(fit, "FIRST_HEADER_BYTES", 20_000)
    with fit.open_header("owner/repo:model.gguf") as path:
        assert path.stat().st_size == len(data)
        assert path.read_bytes()[:20_000] == data[:20_000]
        assert not any(path.read_bytes()[20_000:])
    assert hub.sent_ranges == [20_000]
    assert len(data) > 100_000
    hub.sent_ranges.clear()
    monkeypatch.setattr(fit, "FIRST_HEADER_BYTES", 1000)  # too few: more are downloaded
    with fit.open_header("owner/repo:model.gguf") as path:
        fit.read_header(path)
    assert hub.sent_ranges == [1000, len(data)]
    assert not (tmp_path / "models").exists()


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ram", "quantization"),
    [
        ("qwen3", 8 * GIB, "Q8_0"),
        ("qwen3", 80 * MIB, "Q4_K_M"),
        ("Qwen/Qwen3-8B-GGUF", 8 * GIB, "Q8_0"),
        ("Qwen/Qwen3-8B-GGUF:Q4_K_M", 8 * GIB, "Q4_K_M"),
    ],
)
def test_only_the_headers_of_a_repository_are_downloaded(
    hub: ServedResponses, monkeypatch, tmp_path, name: str, ram: int, quantization: str
) -> None:
    data, projector = models.get_path("attention").read_bytes(), models.get_path("projector-llava").read_bytes()
    sizes = {"Q8_0": len(data) + 64 * MIB, "Q4_K_M": len(data)}
    for known, size in sizes.items():
        publish(hub, "Qwen/Qwen3-8B-GGUF", f"{known}/model-{known}.gguf", data.ljust(size, b"\0"))
    publish(hub, "Qwen/Qwen3-8B-GGUF", "mmproj-F16.gguf", projector)
    publish(hub, "Qwen/Qwen3-8B-GGUF", "mtp-model.gguf", b"GGUF")
    monkeypatch.setattr(fit, "FIRST_HEADER_BYTES", 20_000)
    monkeypatch.setattr(store, "HEAD_BYTES", 20_000)
    with fit.open_header(name, MachineMemory(ram_bytes=ram)) as path:
        assert path.name.endswith(f"model-{quantization}.gguf")
        assert path.stat().st_size == sizes[quantization]
        found = find_projector(path)
        assert found is not None
        assert found.stat().st_size == len(projector)
    assert max(hub.sent_ranges) <= 20_000
    assert not (tmp_path / "models").exists()


def test_a_model_in_a_wheel_is_refused_with_the_command_that_pulls_it(hub: ServedResponses) -> None:
    with pytest.raises(DownloadFailed, match="run `afterglow pull smollm2` first"), fit.open_header("smollm2"):
        pass


def test_the_parts_of_a_split_model_are_named_by_the_first_one() -> None:
    assert [file.label for file in list_hub_files("owner/repo:a.gguf")] == ["owner/repo:a.gguf"]
    assert list_hub_files("o/r:a-00001-of-00003.gguf")[2].label == "o/r:a-00003-of-00003.gguf"
