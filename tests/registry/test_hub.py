"""Hub files are pulled complete and checked. Uses the real hub library and a local server."""

from __future__ import annotations

import os
import shutil
import sys
from collections import namedtuple

import pytest

from afterglow.errors import DownloadFailed
from afterglow.registry import CATALOG, CatalogEntry, HubFile, list_installed, pull
from support.registry_servers import COMMIT, build_content, publish, sha256

pytestmark = pytest.mark.slow  # runs the hub's library in a process

NAME = "owner/repo:model.gguf"
DATA = build_content(3_000_000)


def list_names(models):
    return os.listdir(models) if models.exists() else []


def test_a_file_is_pulled_and_checked_against_the_hubs_sha256(hub, models):
    publish(hub, "owner/repo", "Q4/model.gguf", DATA)
    reports = []
    path = pull("hf:owner/repo:Q4/model.gguf", lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == DATA
    assert os.listdir(models) == ["owner--repo--Q4%2Fmodel.gguf"]
    assert reports[-1] == (len(DATA), len(DATA))
    assert [model.name for model in list_installed()] == ["owner/repo:Q4/model.gguf"]


def test_progress_is_reported_while_the_hub_sends(hub, models):
    publish(hub, "owner/repo", "model.gguf", DATA)
    hub.held.add(f"/owner/repo/resolve/{COMMIT}/model.gguf")
    reports = []

    def progress(done, total):
        reports.append(done)
        if hub.halfway.is_set() and done:
            hub.release.set()

    assert pull(NAME, progress).read_bytes() == DATA
    assert any(0 < done < len(DATA) for done in reports)


def test_bytes_that_do_not_match_the_hubs_sha256_are_rejected(hub, models):
    reported = sha256(b"something else")
    publish(hub, "owner/repo", "model.gguf", DATA, reported_sha256=reported)
    with pytest.raises(DownloadFailed, match=f"expected sha256 {reported}, got {sha256(DATA)}"):
        pull(NAME)
    assert list_names(models) == []


def test_a_catalog_sha256_is_compared_with_the_hub_before_the_download(hub, models, monkeypatch):
    publish(hub, "owner/repo", "model.gguf", DATA)
    hub.held.add(f"/owner/repo/resolve/{COMMIT}/model.gguf")
    wrong = HubFile(repository="owner/repo", file="model.gguf", sha256="0" * 64)
    monkeypatch.setitem(CATALOG, "pinned", CatalogEntry("pinned", wrong))
    with pytest.raises(DownloadFailed, match=f"expected sha256 {'0' * 64}, got {sha256(DATA)}"):
        pull("pinned")
    assert not hub.halfway.is_set()
    assert list_names(models) == []


def test_a_file_without_a_sha256_is_rejected(hub, models):
    publish(hub, "owner/repo", "model.gguf", DATA, reported_sha256="d670460b4b4aece5915caf5c68d12f560a9fe3e4")
    with pytest.raises(DownloadFailed, match="no sha256"):
        pull(NAME)
    assert list_names(models) == []


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "RepoNotFound", "no repository owner/repo"),
        (404, "RevisionNotFound", "owner/repo has no revision main"),
        (404, "EntryNotFound", r"owner/repo has no file model\.gguf"),
        (403, "GatedRepo", "owner/repo is gated: .*HF_TOKEN"),
    ],
)
def test_a_hub_error_is_reported_with_its_cause(hub, models, status, code, message):
    hub.failures["/owner/repo/resolve/main/model.gguf"] = (status, {"X-Error-Code": code})
    with pytest.raises(DownloadFailed, match=message):
        pull(NAME)
    assert list_names(models) == []


def test_an_unreachable_hub_is_reported(hub, models, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match=r"offline\? the hub is http://127\.0\.0\.1:9"):
        pull(NAME)
    assert list_names(models) == []


def test_the_hubs_offline_mode_is_respected(hub, models, monkeypatch):
    publish(hub, "owner/repo", "model.gguf", DATA)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadFailed, match="unset HF_HUB_OFFLINE"):
        pull(NAME)
    assert list_names(models) == []


def test_a_missing_hub_library_is_reported_with_advice(hub, models, bare_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", bare_python)
    with pytest.raises(DownloadFailed, match=r"-m pip install .*\[hub\]'?$"):
        pull(NAME)
    assert list_names(models) == []


def test_insufficient_disk_space_is_detected_before_the_download(hub, models, monkeypatch):
    publish(hub, "owner/repo", "model.gguf", DATA)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 2_999_999))
    with pytest.raises(DownloadFailed, match="3,000,000 bytes are needed, 2,999,999 free"):
        pull(NAME)
    assert list_names(models) == []


def test_a_file_that_disappears_before_the_download_leaves_no_files(hub, models):
    publish(hub, "owner/repo", "model.gguf", DATA)
    del hub.files[f"/owner/repo/resolve/{COMMIT}/model.gguf"]
    with pytest.raises(DownloadFailed, match=r"^owner/repo:model\.gguf could not be fetched: the hub reports: .*404"):
        pull(NAME)
    assert list_names(models) == []
