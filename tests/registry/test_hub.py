"""Does a file of a Hugging Face repository come whole and checked? Asked of the real library and a server here."""

from __future__ import annotations

import os
import shutil
import sys
from collections import namedtuple

import pytest

from afterglow.errors import DownloadFailed
from afterglow.registry import CATALOG, CatalogEntry, HubFile, list_installed, pull
from support.registry_servers import COMMIT, content, publish, sha256

NAME = "owner/repo:model.gguf"
DATA = content(3_000_000)


def test_a_file_is_pulled_and_checked_against_what_the_hub_says(hub, models):
    publish(hub, "owner/repo", "Q4/model.gguf", DATA)
    reports = []
    path = pull("hf:owner/repo:Q4/model.gguf", lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == DATA
    assert os.listdir(models) == ["owner--repo--Q4%2Fmodel.gguf"]
    assert reports[-1] == (len(DATA), len(DATA))
    assert [model.name for model in list_installed()] == ["owner/repo:Q4/model.gguf"]


def test_the_progress_moves_while_the_hub_sends(hub, models):
    publish(hub, "owner/repo", "model.gguf", DATA)
    hub.held.add(f"/owner/repo/resolve/{COMMIT}/model.gguf")
    seen = []

    def progress(done, total):
        seen.append(done)
        if hub.halfway.is_set() and done:
            hub.release.set()

    assert pull(NAME, progress).read_bytes() == DATA
    assert any(0 < done < len(DATA) for done in seen)


def test_bytes_that_are_not_what_the_hub_said_are_refused(hub, models):
    told = sha256(b"something else")
    publish(hub, "owner/repo", "model.gguf", DATA, told=told)
    with pytest.raises(DownloadFailed, match=f"{told} was expected, {sha256(DATA)} came"):
        pull(NAME)
    assert os.listdir(models) == []


def test_a_sum_of_the_catalogue_is_held_against_the_hub_before_the_download(hub, models, monkeypatch):
    publish(hub, "owner/repo", "model.gguf", DATA)
    hub.held.add(f"/owner/repo/resolve/{COMMIT}/model.gguf")
    wrong = HubFile(repository="owner/repo", file="model.gguf", sha256="0" * 64)
    monkeypatch.setitem(CATALOG, "pinned", CatalogEntry("pinned", wrong))
    with pytest.raises(DownloadFailed, match=f"{'0' * 64} was expected, {sha256(DATA)} came"):
        pull("pinned")
    assert not hub.halfway.is_set()
    assert os.listdir(models) == []


def test_a_file_without_a_sum_is_refused(hub, models):
    publish(hub, "owner/repo", "model.gguf", DATA, told="d670460b4b4aece5915caf5c68d12f560a9fe3e4")
    with pytest.raises(DownloadFailed, match="no sha256"):
        pull(NAME)
    assert os.listdir(models) == []


@pytest.mark.parametrize(
    ("status", "code", "complaint"),
    [
        (401, "RepoNotFound", "no repository owner/repo"),
        (404, "RevisionNotFound", "owner/repo has no revision main"),
        (404, "EntryNotFound", r"owner/repo has no file model\.gguf"),
        (403, "GatedRepo", "owner/repo is gated: .*HF_TOKEN"),
    ],
)
def test_what_the_hub_does_not_have_is_said_plainly(hub, models, status, code, complaint):
    hub.failures["/owner/repo/resolve/main/model.gguf"] = (status, {"X-Error-Code": code})
    with pytest.raises(DownloadFailed, match=complaint):
        pull(NAME)
    assert os.listdir(models) == []


def test_a_hub_that_does_not_answer_is_said_so(hub, models, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match=r"offline\? the hub is http://127\.0\.0\.1:9"):
        pull(NAME)
    assert os.listdir(models) == []


def test_the_offline_mode_of_the_hub_is_kept(hub, models, monkeypatch):
    publish(hub, "owner/repo", "model.gguf", DATA)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadFailed, match="unset HF_HUB_OFFLINE"):
        pull(NAME)
    assert os.listdir(models) == []


def test_the_library_is_optional_and_its_absence_is_explained(hub, models, bare_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", bare_python)
    with pytest.raises(DownloadFailed, match=r"pip install 'afterglow\[hub\]'"):
        pull(NAME)
    assert os.listdir(models) == []


def test_too_little_room_is_noticed_before_the_download(hub, models, monkeypatch):
    publish(hub, "owner/repo", "model.gguf", DATA)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 2_999_999))
    with pytest.raises(DownloadFailed, match="3,000,000 bytes are needed, 2,999,999 are free"):
        pull(NAME)
    assert os.listdir(models) == []


def test_a_file_that_vanishes_after_it_was_described_leaves_nothing(hub, models):
    publish(hub, "owner/repo", "model.gguf", DATA)
    del hub.files[f"/owner/repo/resolve/{COMMIT}/model.gguf"]
    with pytest.raises(DownloadFailed, match=r"^owner/repo:model\.gguf could not be fetched: the hub says: .*404"):
        pull(NAME)
    assert os.listdir(models) == []
