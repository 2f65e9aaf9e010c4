"""Created models are files that outlive the server."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from afterglow.server.errors import APIError
from afterglow.server.installed import add_tag
from afterglow.server.ollama.created_models import CreatedModel, CreatedModelStore


def test_a_created_model_is_found_with_and_without_its_default_tag(tmp_path: Path) -> None:
    model = CreatedModel(name="pirate:latest", source="tiny", system="Arr", parameters={"top_k": 3})
    CreatedModelStore(tmp_path).save(model)
    again = CreatedModelStore(tmp_path)  # as after a restart
    assert again.find("pirate") == again.find("pirate:latest") == model
    assert again.find("pirate:other") is None
    assert again.list_all() == [model]


@pytest.mark.parametrize("name", ["pirate:latest", "PIRATE:Latest", "library/Pirate:latest"])
def test_a_model_is_replaced_by_its_name_in_any_spelling(tmp_path: Path, name: str) -> None:
    store = CreatedModelStore(tmp_path)
    store.save(CreatedModel(name="Pirate:latest", source="tiny", system="old"))
    store.save(CreatedModel(name=name, source="tiny", system="new"))
    assert [(model.name, model.system) for model in store.list_all()] == [("Pirate:latest", "new")]


def test_long_names_are_different_models(tmp_path: Path) -> None:
    store, prefix = CreatedModelStore(tmp_path), f"{'a' * 80}/{'b' * 80}:{'c' * 79}"
    for ending in "xy":
        store.save(CreatedModel(name=prefix + ending, source=ending))
    found = [store.find(prefix + ending) for ending in "xyz"]
    assert [model and model.source for model in found] == ["x", "y", None]
    assert len(store.list_all()) == 2
    assert store.delete(prefix + "x")
    assert store.find(prefix + "y") is not None


def test_a_deleted_model_is_gone(tmp_path: Path) -> None:
    store = CreatedModelStore(tmp_path)
    store.save(CreatedModel(name="pirate:latest", source="tiny"))
    assert store.delete("pirate")
    assert not store.delete("pirate")
    assert store.list_all() == []


def test_names_of_other_models_read_the_created_ones_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = CreatedModelStore(tmp_path), CreatedModelStore(tmp_path)  # several servers may share the directory
    for number in range(20):
        store.save(CreatedModel(name=f"Model{number}:latest", source="tiny"))
    assert other.find("gpt-4o") is None
    read: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or read_bytes(path))
    assert [other.find("gpt-4o") for _ in range(10)] == [None] * 10
    assert not [path for path in read if path.exists()]
    store.save(CreatedModel(name="GPT-4o:latest", source="tiny", system="new"))
    assert (found := other.find("gpt-4o"))
    assert found.system == "new"
    store.save(CreatedModel(name="GPT-4o:latest", source="tiny", system="newer"))
    assert (found := other.find("gpt-4o"))
    assert found.system == "newer"
    assert store.delete("GPT-4o")
    assert other.find("gpt-4o") is None


@pytest.mark.parametrize("name", ["../x:latest", "a b:latest", "/x", "x" * 300, "a/b/c:d", "ünlaut:latest", ":latest"])
def test_other_names_are_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(APIError, match="invalid"):
        CreatedModelStore(tmp_path / "models").save(CreatedModel(name=name, source="tiny"))
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CreatedModelStore(tmp_path)
    store.save(CreatedModel(name="good:latest", source="tiny"))
    (tmp_path / "bad%3Alatest.json").write_text("{")
    with caplog.at_level(logging.WARNING, logger="afterglow.server"):
        assert [model.name for model in store.list_all()] == ["good:latest"]
    assert "bad%3Alatest.json cannot be read" in caplog.text
    assert store.find("bad") is None


@pytest.mark.parametrize(
    ("name", "tagged"),
    [("a", "a:latest"), ("a:8b", "a:8b"), ("owner/a", "owner/a:latest"), ("host:80/a", "host:80/a:latest")],
)
def test_a_name_without_a_tag_has_the_default_tag(name: str, tagged: str) -> None:
    assert add_tag(name) == tagged
