"""Parsing of model names and of file names in the models directory."""

from __future__ import annotations

import pytest

from afterglow.registry import CATALOG, DEFAULT_MODEL, HubFile, HubRepository, WheelFile, parse_name
from afterglow.registry.catalog import parse_filename


def test_the_default_model_is_in_a_wheel_with_a_sha256():
    source = CATALOG[DEFAULT_MODEL].source
    assert isinstance(source, WheelFile)
    assert len(source.sha256) == 64


@pytest.mark.parametrize(
    ("name", "repository", "revision", "file"),
    [
        ("owner/repo:model.gguf", "owner/repo", "main", "model.gguf"),
        ("hf:owner/repo:model.gguf", "owner/repo", "main", "model.gguf"),
        ("owner/my.repo-2@v1.0:Q4/model.gguf", "owner/my.repo-2", "v1.0", "Q4/model.gguf"),
        ("owner/repo@refs/pr/3:a b+c.gguf", "owner/repo", "refs/pr/3", "a b+c.gguf"),
    ],
)
def test_a_hub_name_has_repository_revision_and_file(name, repository, revision, file):
    entry = parse_name(name)
    assert entry is not None
    assert entry.source == HubFile(repository=repository, revision=revision, file=file)
    assert entry.name == name.removeprefix("hf:")
    assert parse_filename(entry.source.filename) == entry
    assert "/" not in entry.source.filename


@pytest.mark.parametrize(
    ("name", "quantization", "label"),
    [
        ("owner/repo", None, "owner/repo"),
        ("owner/repo:latest", None, "owner/repo"),
        ("hf.co/owner/repo:Q4_K_M", "Q4_K_M", "owner/repo:Q4_K_M"),
        ("hf:owner/repo@v2:UD-Q4_K_XL", "UD-Q4_K_XL", "owner/repo@v2:UD-Q4_K_XL"),
    ],
)
def test_a_repository_may_have_a_quantization(name, quantization, label):
    entry = parse_name(name)
    assert entry is not None
    assert isinstance(entry.source, HubRepository)
    assert (entry.source.quantization, entry.name) == (quantization, label)


def test_every_catalog_model_has_a_size_and_a_licence():
    for entry in CATALOG.values():
        assert entry.licence
        assert (entry.estimated_size or 0) > 50_000_000


def test_the_estimated_size_is_that_of_the_quantization_of_the_file() -> None:
    size = CATALOG["qwen3-0.6b"].estimated_size
    assert size == pytest.approx(639e6, rel=0.02)  # of Qwen3-0.6B-Q8_0.gguf


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nothing",
        "owner/repo/more",
        "owner/model.gguf",
        "./model",
        "owner/repo:a b",
        "owner/repo:../../model.gguf",
        "owner/repo:/etc/model.gguf",
        "owner/repo:a//model.gguf",
        "owner/re--po:model.gguf",
        "a/b/c:model.gguf",
        "ollama:llama3.2:1b",
        "./models/model.gguf",
    ],
)
def test_other_strings_are_not_names(name):
    assert parse_name(name) is None


def test_every_catalog_entry_is_found_by_its_file_name():
    for entry in CATALOG.values():
        if not isinstance(entry.source, HubRepository):
            assert parse_filename(entry.source.filename) == entry
    assert parse_filename("put-here-by-hand.gguf") is None
