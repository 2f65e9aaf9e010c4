"""Repositories are pulled by quantization, with everything that belongs to a model, and continue after a break."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from afterglow.errors import DownloadFailed, ModelNotFound
from afterglow.registry import find_projector_of, list_installed, pull, remove, resolve, search_hub
from support.registry_servers import Hold, build_content, get_download_path, publish, sha256

pytestmark = pytest.mark.slow  # runs the hub's library in a process

REPOSITORY = "owner/repo"
MIB = 1024**2  # the unit in which a download is written
FILES = {
    "Q4_K_M/big-Q4_K_M-00001-of-00002.gguf": build_content(4 * MIB + 1),
    "Q4_K_M/big-Q4_K_M-00002-of-00002.gguf": build_content(3 * MIB + 2),
    "mmproj-big-F16.gguf": build_content(2 * MIB + 3),
    "mtp-big-Q4_K_M.gguf": build_content(1 * MIB + 4),
}
OTHER_FILES = {
    "big-Q8_0.gguf": build_content(8 * MIB),
    "big-BF16.gguf": build_content(16 * MIB),
    "mmproj-big-F32.gguf": build_content(4 * MIB),
    "mtp-big-Q8_0.gguf": build_content(2 * MIB),
    "big.imatrix.gguf": build_content(1_000),
}
TOTAL = sum(map(len, FILES.values()))
NAME = f"{REPOSITORY}:Q4_K_M"
RECORD = "owner--repo--Q4_K_M.json"
PULL = "import sys; from afterglow.registry import pull; pull(sys.argv[1], notify=print)"


@pytest.fixture
def repository(hub):
    """Hub with a repository of three quantizations."""
    for file, data in (FILES | OTHER_FILES).items():
        publish(hub, REPOSITORY, file, data)
    return hub


def get_filename(file):
    return f"owner--repo--{file.replace('/', '%2F')}"


def list_names(models):
    return sorted(os.listdir(models)) if models.exists() else []


def check_complete(models):
    """Assert that the models directory has the files of the model, its record and nothing else."""
    assert list_names(models) == sorted([*map(get_filename, FILES), RECORD])
    for file, data in FILES.items():
        assert sha256((models / get_filename(file)).read_bytes()) == sha256(data)


def start_pull(name=NAME):
    """Start a pull in a process group of its own."""
    return subprocess.Popen([sys.executable, "-c", PULL, name], stdout=subprocess.DEVNULL, start_new_session=True)


def count_downloads(hub, file):
    return sum(path == get_download_path(REPOSITORY, file) for path, _ in hub.requests)


# --- what is pulled


def test_a_quantization_is_pulled_with_all_shards_projector_and_mtp_head(repository, models):
    reports, messages = [], []
    path = pull(NAME, lambda done, total: reports.append((done, total)), notify=messages.append)
    check_complete(models)
    assert path == models / get_filename("Q4_K_M/big-Q4_K_M-00001-of-00002.gguf")
    assert find_projector_of(path) == models / get_filename("mmproj-big-F16.gguf")
    assert {total for _, total in reports} == {TOTAL}
    assert reports[-1] == (TOTAL, TOTAL)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert messages == [
        f"Q4_K_M, 2 files, projector mmproj-big-F16.gguf, MTP head mtp-big-Q4_K_M.gguf: {TOTAL:,} bytes"
    ]
    requests = len(repository.requests)
    for name in (NAME, "owner/repo:q4_k_m", REPOSITORY):
        assert resolve(name) == pull(name) == path
    assert len(repository.requests) == requests  # the hub is not asked again
    assert [(model.name, model.path, model.size) for model in list_installed()] == [(NAME, path, TOTAL)]
    remove(NAME)
    assert os.listdir(models) == []
    with pytest.raises(ModelNotFound):
        resolve(NAME)


def test_without_a_quantization_the_header_of_one_decides(repository, models):
    calls = []

    def choose(header, variants):
        data = (FILES | OTHER_FILES)["Q4_K_M/big-Q4_K_M-00001-of-00002.gguf"]
        assert header.read_bytes() == data  # the header of the smallest one
        calls.append([variant.quantization for variant in variants])
        return variants[0]

    pull(REPOSITORY, choose=choose)
    assert calls == [["Q8_0", "Q4_K_M"]]  # BF16 is not a quantization
    assert (models / get_filename("big-Q8_0.gguf")).exists()
    assert (models / get_filename("mtp-big-Q8_0.gguf")).exists()
    remove(REPOSITORY)
    with pytest.raises(DownloadFailed, match="name a quantization: owner/repo:Q8_0, owner/repo:Q4_K_M"):
        pull(REPOSITORY)


def test_files_that_two_quantizations_share_are_downloaded_once_and_removed_last(repository, models):
    pull(NAME)
    pull(f"{REPOSITORY}:Q8_0")
    assert count_downloads(repository, "mmproj-big-F16.gguf") == 1
    remove(NAME)
    assert (models / get_filename("mmproj-big-F16.gguf")).exists()
    remove(f"{REPOSITORY}:Q8_0")
    assert os.listdir(models) == []


def test_the_first_file_of_a_split_model_is_pulled_with_its_shards(repository, models):
    first, second = (file for file in FILES if "-of-" in file)
    path = pull(f"{REPOSITORY}:{first}")
    assert list_names(models) == sorted([get_filename(first), get_filename(second)])
    (models / get_filename(second)).unlink()
    with pytest.raises(ModelNotFound):
        resolve(f"{REPOSITORY}:{first}")
    assert pull(f"{REPOSITORY}:{first}") == path
    assert count_downloads(repository, first) == 1


# --- files that are present


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + b"?"], ids=["size", "content"])
def test_a_damaged_part_is_downloaded_again_and_the_others_are_not(repository, models, damage):
    first, second = (file for file in FILES if "-of-" in file)
    models.mkdir()
    for file, data in FILES.items():
        (models / get_filename(file)).write_bytes(data)
    (models / get_filename(second)).write_bytes(damage(FILES[second]))
    messages = []
    pull(NAME, notify=messages.append)
    assert messages[1:] == ["checking the files that are present"]
    check_complete(models)
    assert [count_downloads(repository, file) for file in FILES] == [0, 1, 0, 0]
    (models / get_filename(first)).unlink()
    (models / RECORD).unlink()
    (models / get_filename(second)).write_bytes(damage(FILES[second]))
    pull(f"{REPOSITORY}:{first}")
    for file in (first, second):
        assert (models / get_filename(file)).read_bytes() == FILES[file]


def test_a_model_with_a_truncated_file_is_repaired_by_a_pull(repository, models):
    path = pull(NAME)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelNotFound, match="run `afterglow models pull owner/repo:Q4_K_M`"):
        resolve(NAME)
    assert pull(NAME) == path
    check_complete(models)
    assert [count_downloads(repository, file) for file in FILES] == [2, 1, 1, 1]


def test_a_pull_that_fails_keeps_the_files_that_it_would_replace(repository, models):
    path = pull(NAME)
    path.write_bytes(path.read_bytes()[:-1])
    repository.broken.add(get_download_path(REPOSITORY, next(iter(FILES))))
    before = {file.name: file.read_bytes() for file in models.iterdir()}
    with pytest.raises(DownloadFailed):
        pull(NAME)
    assert {file.name: file.read_bytes() for file in models.glob("owner*")} == before
    repository.broken.clear()
    pull(NAME)
    check_complete(models)


def test_another_quantization_does_not_replace_the_projector_of_a_complete_model(repository, models):
    pull(NAME)
    repository.files.clear()
    for file, data in {**FILES, **OTHER_FILES, "mmproj-big-F16.gguf": build_content(2 * MIB)}.items():
        publish(repository, REPOSITORY, file, data)
    pull(f"{REPOSITORY}:Q8_0")
    assert resolve(NAME).exists()
    assert resolve(f"{REPOSITORY}:Q8_0").exists()
    assert (models / get_filename("mmproj-big-F16.gguf")).read_bytes() == FILES["mmproj-big-F16.gguf"]


# --- bad input


def test_an_unknown_quantization_is_refused_with_those_that_exist(repository, models):
    with pytest.raises(DownloadFailed) as caught:
        pull(f"{REPOSITORY}:Q5_K_M")
    assert "no quantization Q5_K_M" in caught.value.reason
    for known in (f"BF16 ({16 * MIB:,} bytes)", "Q8_0 (", "Q4_K_M ("):
        assert known in caught.value.reason
    assert list_names(models) == []


def test_a_repository_without_models_is_refused(hub, models):
    publish(hub, REPOSITORY, "README.md", b"text")
    with pytest.raises(DownloadFailed, match="no GGUF model"):
        pull(NAME)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", r"accept its terms on http://127.*/owner/repo, then run `hf auth login` or set HF_TOKEN"),
        (404, "RepoNotFound", "no repository owner/repo"),
    ],
)
def test_a_repository_that_cannot_be_read_is_reported_with_its_cause(hub, models, status, code, message):
    hub.failures["/api/models/owner/repo/revision/main"] = (status, {"X-Error-Code": code})
    with pytest.raises(DownloadFailed, match=message):
        pull(NAME)
    assert list_names(models) == []


@pytest.mark.parametrize("name", [NAME, REPOSITORY, "owner/repo:model.gguf", "qwen3"])
def test_every_name_says_that_the_machine_may_be_offline(hub, monkeypatch, name):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match="is this machine offline"):
        pull(name)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"listed_size": 999}, r"contradicts itself: 999 bytes at first, then 4,?194,?305"),
        ({"reported_size": 5 * MIB}, rf"reported {5 * MIB:,} bytes and sent {4 * MIB + 1:,}"),
        ({"reported_size": 3 * MIB}, rf"reported {3 * MIB:,} bytes and sent {4 * MIB + 1:,}|sends more than"),
        ({"reported_sha256": "0" * 64}, "expected sha256 0{64}, got"),
    ],
)
def test_a_hub_that_lies_leaves_no_files(hub, models, lie, message):
    publish(hub, REPOSITORY, "model-Q4_K_M.gguf", build_content(4 * MIB + 1), **lie)
    for _ in range(2):  # the second attempt does not depend on the first
        with pytest.raises(DownloadFailed, match=message):
            pull(NAME)
        assert list_names(models) == []


@contextmanager
def limited_file_size(nbytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_in_the_middle_of_a_shard_keeps_what_was_downloaded(repository, models):
    first = next(iter(FILES))
    message = r"not enough disk space .*bytes that were downloaded are kept"
    with limited_file_size(2 * MIB + 100), pytest.raises(DownloadFailed, match=message):  # the error of a full disk
        pull(NAME)
    assert not list(models.glob("*.gguf"))
    pull(NAME)
    check_complete(models)
    starts = [start for path, start in repository.requests if path == get_download_path(REPOSITORY, first)]
    assert starts[0] == 0
    assert starts[1] >= 2 * MIB


# --- two processes, and breaks


def test_two_processes_download_once_and_the_second_says_that_it_waits(repository, models):
    first = next(iter(FILES))
    hold = repository.holds[get_download_path(REPOSITORY, first)] = Hold(2 * MIB)
    process = start_pull()
    assert hold.reached.wait(60)
    messages = []

    def notify(message):
        messages.append(message)
        if "waiting" in message:
            hold.release.set()

    pull(NAME, notify=notify)
    assert process.wait(60) == 0
    check_complete(models)
    assert f"waiting for another process that downloads owner/repo:{first}" in messages
    assert [count_downloads(repository, file) for file in FILES] == [1] * len(FILES)


def wait_for_part(models, file, nbytes):
    """Wait until the partial download of a file has this many bytes."""
    part = models / f".pull-{sha256(FILES[file])}" / "part"
    deadline = time.monotonic() + 60
    while not part.exists() or part.stat().st_size < nbytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_pull(repository, models, file, offset, whole_group):
    """Start a pull and kill it after `offset` bytes of a file, with the process of the hub's library or without it."""
    hold = repository.holds[get_download_path(REPOSITORY, file)] = Hold(offset)
    process = start_pull()
    try:
        assert hold.reached.wait(60)
        wait_for_part(models, file, offset // MIB * MIB)
    finally:
        children = psutil.Process(process.pid).children()
        if whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        assert not psutil.wait_procs(children, timeout=60)[1]  # they end without their parent
        hold.release.set()


@pytest.mark.parametrize("points", [8, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.timeout(1200)
def test_a_pull_killed_at_many_points_continues_and_has_the_same_hash(repository, models, points):
    last_file, last_offset = "", 0
    for point in range(points):
        file, offset = locate_byte(TOTAL * (point + 1) // (points + 1))
        requests = len(repository.requests)
        kill_pull(repository, models, file, offset, whole_group=point % 2 == 0)
        for complete in models.glob("*.gguf"):
            (published,) = [name for name in FILES if get_filename(name) == complete.name]
            assert sha256(complete.read_bytes()) == sha256(FILES[published])
        assert not (models / RECORD).exists()
        downloads = [(path, start) for path, start in repository.requests[requests:] if "/resolve/" in path]
        expected = last_offset // MIB * MIB  # whole units are written
        assert downloads[0] == (get_download_path(REPOSITORY, last_file or file), expected)
        last_file, last_offset = file, offset
    pull(NAME)
    check_complete(models)


def locate_byte(place):
    """Return the file and the offset of a byte of the model."""
    for file, data in FILES.items():
        if place < len(data):
            return file, place
        place -= len(data)
    raise AssertionError(place)


def test_a_file_that_was_complete_at_a_break_is_not_downloaded_again(repository, models):
    first = next(iter(FILES))
    partial = models / f".pull-{sha256(FILES[first])}"
    partial.mkdir(parents=True)
    (partial / "complete").write_bytes(FILES[first])
    pull(NAME)
    check_complete(models)
    assert count_downloads(repository, first) == 0


def test_old_partial_downloads_are_removed(repository, models):
    kill_pull(repository, models, next(iter(FILES)), 2 * MIB, whole_group=True)
    (partial,) = (path for path in models.glob(".pull-*") if path.is_dir())
    weeks_ago = time.time() - 14 * 24 * 3600
    for path in (partial / "part", partial):
        os.utime(path, (weeks_ago, weeks_ago))
    publish(repository, "owner/other", "small.gguf", build_content(1_000))
    pull("owner/other:small.gguf")
    assert not partial.exists()


# --- search


def test_a_search_lists_repositories_with_downloads_licence_and_access(hub):
    found = [
        {"id": "owner/repo", "downloads": 7, "tags": ["gguf", "license:mit"], "gated": False},
        {"id": "owner/other", "downloads": 1, "tags": ["gguf"], "gated": "manual"},
    ]
    hub.files["/api/models"] = ({"Content-Type": "application/json"}, json.dumps(found).encode())
    matches = search_hub("some words")
    assert [(match.name, match.downloads, match.licence, match.gated) for match in matches] == [
        ("owner/repo", 7, "mit", False),
        ("owner/other", 1, None, True),
    ]


def test_a_search_says_that_the_machine_may_be_offline(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match="is this machine offline"):
        search_hub("words")
