"""Models of other programs are discovered; malformed caches are skipped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from afterglow.registry import discover_models, read_ollama_parameters

MODEL = b"GGUF" + bytes(96)
DIGEST = "sha256:" + "ab" * 32


def write_file(path: Path, data: bytes = MODEL) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def list_names():
    return [model.name for model in discover_models()]


@pytest.fixture
def home():
    return Path(os.environ["HOME"])


def write_manifest(root: Path, *parts: str, layers: object = None) -> None:
    default = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "cd" * 32},
        {"mediaType": "application/vnd.ollama.image.model", "digest": DIGEST},
    ]
    text = json.dumps({"layers": default if layers is None else layers})
    write_file(root.joinpath("manifests", *parts), text.encode())


def test_without_caches_no_model_is_found(home):
    assert discover_models() == []


def test_llama_cpp_models_are_found(home, tmp_path, monkeypatch):
    path = write_file(tmp_path / "llama" / "owner_model.gguf")
    write_file(tmp_path / "llama" / "owner_model.gguf.json", b"{}")
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    (model,) = discover_models()
    assert (model.name, model.path, model.size, model.program) == ("llama.cpp:owner_model.gguf", path, 100, "llama.cpp")


def test_lm_studio_models_are_found_in_both_folders(home):
    write_file(home / ".lmstudio/models/owner/repo/new.gguf")
    write_file(home / ".cache/lm-studio/models/owner/repo/old.gguf")
    assert list_names() == ["lmstudio:owner/repo/new.gguf", "lmstudio:owner/repo/old.gguf"]


def test_the_hub_cache_prefers_the_snapshot_of_main(home, tmp_path, monkeypatch):
    repository = tmp_path / "hf" / "hub" / "models--owner--repo"
    blob = write_file(repository / "blobs" / "one")
    for commit in ("aaa", "bbb", "ccc"):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "model.gguf").symlink_to(blob)
    write_file(repository / "refs" / "main", b"bbb")
    write_file(tmp_path / "hf" / "hub" / "datasets--owner--data" / "snapshots" / "a" / "data.gguf")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (model,) = discover_models()
    assert model.name == "hub:owner/repo:model.gguf"
    assert model.path == repository / "snapshots" / "bbb" / "model.gguf"
    assert model.size == 100
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert discover_models() == []


def test_ollama_models_have_the_names_that_ollama_shows(home, tmp_path, monkeypatch):
    root = tmp_path / "ollama"
    blob = write_file(root / "blobs" / DIGEST.replace(":", "-"))
    write_manifest(root, "registry.example", "library", "llama3.2", "1b")
    write_manifest(root, "registry.example", "someone", "model", "latest")
    write_manifest(root, "other.example", "owner", "repo", "Q4_K_M")
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    assert list_names() == [
        "ollama:llama3.2:1b",
        "ollama:other.example/owner/repo:Q4_K_M",
        "ollama:someone/model:latest",
    ]
    assert {model.path for model in discover_models()} == {blob}


@pytest.mark.parametrize(
    "layers",
    [
        [],
        {},
        "text",
        [1],
        [{"mediaType": "application/vnd.ollama.image.model"}],
        [{"mediaType": "application/vnd.ollama.image.model", "digest": 7}],
        [{"mediaType": "application/vnd.ollama.image.model", "digest": "../outside"}],
        [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:" + "00" * 32}],
    ],
)
def test_a_malformed_manifest_is_skipped(home, layers):
    root = home / ".ollama" / "models"
    write_file(root / "blobs" / DIGEST.replace(":", "-"))
    write_file(root / "outside")  # a model outside the blobs
    write_manifest(root, "registry.example", "library", "odd", "1", layers=layers)
    write_file(root / "manifests" / "registry.example" / "library" / "binary" / "1", b"\xff\x00{")
    write_manifest(root, "registry.example", "library", "good", "1")
    assert list_names() == ["ollama:good:1"]


def test_files_that_are_not_models_are_skipped(home):
    folder = home / ".lmstudio" / "models" / "owner" / "repo"
    write_file(folder / "half.gguf", b"")
    write_file(folder / "page.gguf", b"<html>")
    write_file(folder / "mmproj-model-f16.gguf")
    (folder / "folder.gguf").mkdir()
    (folder / "dangling.gguf").symlink_to(folder / "gone")
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    assert list_names() == []


def test_a_split_model_has_the_path_of_its_first_shard_and_the_total_size(home):
    folder = home / ".lmstudio" / "models" / "owner" / "repo"
    for number in (1, 2, 3):
        write_file(folder / f"big [x]-0000{number}-of-00003.gguf")
    (model,) = discover_models()
    assert (model.path.name, model.size) == ("big [x]-00001-of-00003.gguf", 300)


def test_a_cache_path_that_is_a_file_is_skipped(home, monkeypatch):
    file = str(write_file(home / "file"))
    for variable in ("LLAMA_CACHE", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.setenv(variable, file)
    assert discover_models() == []


def test_the_parameters_of_an_ollama_model_are_read_and_malformed_ones_are_empty(home):
    root = home / ".ollama" / "models"
    parameters = "sha256:" + "ee" * 32
    layers = [{"mediaType": "application/vnd.ollama.image.params", "digest": parameters}]
    write_manifest(root, "registry.example", "library", "tuned", "1", layers=layers)
    write_manifest(root, "registry.example", "library", "plain", "1")
    blob = root / "blobs" / parameters.replace(":", "-")
    assert read_ollama_parameters("ollama:tuned:1") == {}  # the blob is missing
    for content in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        write_file(blob, content)
        assert read_ollama_parameters("ollama:tuned:1") == {}
    write_file(blob, b'{"temperature": 0.6, "stop": ["<|im_end|>"]}')
    assert read_ollama_parameters("ollama:tuned:1") == {"temperature": 0.6, "stop": ["<|im_end|>"]}
    for name in ("ollama:plain:1", "ollama:none:1", "smollm2", str(blob)):
        assert read_ollama_parameters(name) == {}
