"""Are the models of other programs found, and is a malformed cache passed over?"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from afterglow.registry import discover_models

MODEL = b"GGUF" + bytes(96)
DIGEST = "sha256:" + "ab" * 32


def write(path: Path, data: bytes = MODEL) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names():
    return [model.name for model in discover_models()]


@pytest.fixture
def home():
    return Path(os.environ["HOME"])


def manifest(root: Path, *parts: str, layers: object = None) -> None:
    default = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "cd" * 32},
        {"mediaType": "application/vnd.ollama.image.model", "digest": DIGEST},
    ]
    text = json.dumps({"layers": default if layers is None else layers})
    write(root.joinpath("manifests", *parts), text.encode())


def test_without_any_cache_nothing_is_found(home):
    assert discover_models() == []


def test_llama_cpp(home, tmp_path, monkeypatch):
    path = write(tmp_path / "llama" / "owner_model.gguf")
    write(tmp_path / "llama" / "owner_model.gguf.json", b"{}")
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    (found,) = discover_models()
    assert (found.name, found.path, found.size, found.program) == ("llama.cpp:owner_model.gguf", path, 100, "llama.cpp")


def test_lm_studio_in_both_its_folders(home):
    write(home / ".lmstudio/models/owner/repo/new.gguf")
    write(home / ".cache/lm-studio/models/owner/repo/old.gguf")
    assert names() == ["lmstudio:owner/repo/new.gguf", "lmstudio:owner/repo/old.gguf"]


def test_the_hub_cache_prefers_the_snapshot_of_main(home, tmp_path, monkeypatch):
    repository = tmp_path / "hf" / "hub" / "models--owner--repo"
    blob = write(repository / "blobs" / "one")
    for commit in ("aaa", "bbb", "ccc"):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "model.gguf").symlink_to(blob)
    write(repository / "refs" / "main", b"bbb")
    write(tmp_path / "hf" / "hub" / "datasets--owner--data" / "snapshots" / "a" / "data.gguf")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (found,) = discover_models()
    assert found.name == "hub:owner/repo:model.gguf"
    assert found.path == repository / "snapshots" / "bbb" / "model.gguf"
    assert found.size == 100
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert discover_models() == []


def test_ollama_names_are_those_its_users_type(home, tmp_path, monkeypatch):
    root = tmp_path / "ollama"
    blob = write(root / "blobs" / DIGEST.replace(":", "-"))
    manifest(root, "registry.example", "library", "llama3.2", "1b")
    manifest(root, "registry.example", "someone", "model", "latest")
    manifest(root, "other.example", "owner", "repo", "Q4_K_M")
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    assert names() == ["ollama:llama3.2:1b", "ollama:other.example/owner/repo:Q4_K_M", "ollama:someone/model:latest"]
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
def test_a_manifest_that_makes_no_sense_is_passed_over(home, layers):
    root = home / ".ollama" / "models"
    write(root / "blobs" / DIGEST.replace(":", "-"))
    write(root / "outside")  # a model, but not one that a manifest may name
    manifest(root, "registry.example", "library", "odd", "1", layers=layers)
    write(root / "manifests" / "registry.example" / "library" / "binary" / "1", b"\xff\x00{")
    manifest(root, "registry.example", "library", "good", "1")
    assert names() == ["ollama:good:1"]


def test_what_is_no_model_is_passed_over(home):
    folder = home / ".lmstudio" / "models" / "owner" / "repo"
    write(folder / "half.gguf", b"")
    write(folder / "page.gguf", b"<html>")
    write(folder / "mmproj-model-f16.gguf")
    (folder / "folder.gguf").mkdir()
    (folder / "dangling.gguf").symlink_to(folder / "gone")
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    assert names() == []


def test_a_model_in_parts_is_its_first_part_with_the_size_of_all(home):
    folder = home / ".lmstudio" / "models" / "owner" / "repo"
    for number in (1, 2, 3):
        write(folder / f"big [x]-0000{number}-of-00003.gguf")
    (found,) = discover_models()
    assert (found.path.name, found.size) == ("big [x]-00001-of-00003.gguf", 300)


def test_a_cache_that_is_a_file_is_passed_over(home, monkeypatch):
    file = str(write(home / "file"))
    for variable in ("LLAMA_CACHE", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.setenv(variable, file)
    assert discover_models() == []
