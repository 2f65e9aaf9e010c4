"""Names resolve to the right files; only pulled models can be removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from afterglow.errors import ModelNotFound, UnsupportedOperation
from afterglow.registry import list_installed, models_directory, pull, remove, resolve
from support.registry_servers import build_content, publish


def create_lm_studio_model() -> Path:
    path = Path(os.environ["HOME"], ".lmstudio/models/owner/repo/model.gguf")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF and more")
    return path


def test_the_models_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AFTERGLOW_MODELS", "~/mine")
    assert models_directory() == Path(os.environ["HOME"], "mine")
    monkeypatch.delenv("AFTERGLOW_MODELS")
    assert models_directory() == tmp_path / "cache" / "models"
    monkeypatch.delenv("AFTERGLOW_CACHE")
    assert models_directory().parts[-2:] == ("afterglow", "models")
    assert list_installed() == []
    assert not models_directory().exists()  # listing does not create it


def test_a_path_resolves_to_itself(tmp_path, monkeypatch):
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    assert resolve(tmp_path / "some.gguf") == tmp_path / "some.gguf"
    monkeypatch.chdir(tmp_path)
    assert resolve("some.gguf") == Path("some.gguf")
    with pytest.raises(ModelNotFound, match="no such file"):
        resolve("./other.gguf")


@pytest.mark.slow
def test_a_name_resolves_after_the_pull(tiny, models):
    with pytest.raises(ModelNotFound, match="run `afterglow models pull tiny`"):
        resolve("tiny")
    path = resolve("tiny", fetch=True)
    assert path.read_bytes() == tiny
    assert resolve("tiny") == path
    assert resolve(path.name) == path


def test_a_manually_added_file_is_named_by_its_file_name(models):
    models.mkdir()
    (models / "mine.gguf").write_bytes(b"GGUF")
    assert [model.name for model in list_installed()] == ["mine.gguf"]
    assert resolve("mine.gguf") == models / "mine.gguf"
    remove("mine.gguf")
    assert os.listdir(models) == []


@pytest.mark.slow
def test_a_damaged_model_does_not_resolve_and_can_be_removed(tiny, models):
    path = pull("tiny")
    path.write_bytes(b"GGUF")
    assert [model.name for model in list_installed()] == [path.name]
    with pytest.raises(ModelNotFound):
        resolve("tiny")
    assert remove("tiny").path == path
    assert os.listdir(models) == []


def test_a_model_with_a_record_is_complete_if_its_files_have_the_recorded_sizes(models):
    models.mkdir()
    (models / "owner--repo--a-Q8_0.gguf").write_bytes(b"GGUF")
    values = {"repository": "owner/repo", "revision": "main", "commit": "c", "quantization": "Q8_0"}
    values["files"] = ["owner--repo--a-Q8_0.gguf"]
    record = models / "owner--repo--Q8_0.json"
    record.write_text(json.dumps(values))  # an older version wrote no sizes
    assert resolve("owner/repo") == models / "owner--repo--a-Q8_0.gguf"
    record.write_text(json.dumps({**values, "sizes": {"owner--repo--a-Q8_0.gguf": 4}}))
    assert resolve("owner/repo") == models / "owner--repo--a-Q8_0.gguf"
    for sizes in ({"owner--repo--a-Q8_0.gguf": 5}, {"other.gguf": 4}, [4], "4", 4):
        record.write_text(json.dumps({**values, "sizes": sizes}))
        with pytest.raises(ModelNotFound):
            resolve("owner/repo")


def test_an_unknown_name_is_reported_with_suggestions():
    with pytest.raises(ModelNotFound) as caught:
        resolve("smolm2")
    assert "did you mean smollm2?" in caught.value.advice
    assert "qwen3-0.6b" in caught.value.advice
    assert "afterglow models pull" in caught.value.advice
    with pytest.raises(ModelNotFound):
        pull("smolm2")
    for invalid in ("", "\0", "x" * 5_000, "~nobody-here/x"):
        with pytest.raises(ModelNotFound):
            resolve(invalid)


def test_a_model_of_another_program_resolves_and_is_never_removed():
    path = create_lm_studio_model()
    assert resolve("lmstudio:owner/repo/model.gguf") == path
    with pytest.raises(UnsupportedOperation, match="belongs to lmstudio"):
        remove("lmstudio:owner/repo/model.gguf")
    assert path.exists()
    with pytest.raises(ModelNotFound):
        remove(str(path))
    assert path.exists()


def test_a_file_in_the_hub_cache_needs_no_pull(hub, models, tmp_path):
    snapshot = tmp_path / "hub-home" / "hub" / "models--owner--repo" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.gguf").write_bytes(b"GGUF")
    assert resolve("owner/repo:model.gguf", fetch=True) == snapshot / "model.gguf"
    with pytest.raises(ModelNotFound):  # the revision in the cache is unknown
        resolve("owner/repo@v2:model.gguf")


@pytest.mark.slow
def test_a_hub_file_is_removed_by_its_name(hub, models):
    publish(hub, "owner/repo", "model.gguf", build_content(1_000))
    pull("owner/repo:model.gguf")
    assert remove("hf:owner/repo:model.gguf").size == 1_000
    assert list_installed() == []
    with pytest.raises(ModelNotFound):
        remove("owner/repo:model.gguf")
