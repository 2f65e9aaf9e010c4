"""Test archives are fetched once, checked, and shared by concurrent runs."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import fetched

SMALL = {"small-1/data/a.txt": b"a", "small-1/data/b.txt": b"b", "small-1/other/c.txt": b"c", "../evil.txt": b"e"}


def build_archive(path: Path) -> fetched.Archive:
    with tarfile.open(path, "w:gz") as opened:
        for name, content in SMALL.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return fetched.Archive("small", "1", hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def small(tmp_path, monkeypatch) -> fetched.Archive:
    """Archive that the child process copies from a file; the child counts its runs."""
    archive = build_archive(tmp_path / "small.tar.gz")
    child = tmp_path / "child.py"
    child.write_text(
        "import shutil, sys, pathlib\n"
        f"shutil.copy({str(tmp_path / 'small.tar.gz')!r}, sys.argv[3])\n"
        f"with open({str(tmp_path / 'runs')!r}, 'a') as runs: runs.write('x')\n"
    )
    monkeypatch.setattr(fetched, "CHILD_SCRIPT", child)
    monkeypatch.setattr(fetched, "CACHE_DIRECTORY", tmp_path / "cache")
    return archive


def test_only_matching_members_are_extracted_and_the_archive_is_fetched_once(small, tmp_path):
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: fetched.fetch_files(small, "*/data/*.txt"), range(8)))
    assert [path.read_text() for path in results[0]] == ["a", "b"]
    assert all(paths == results[0] for paths in results)
    assert fetched.fetch_files(small, "*/other/*")[0].read_text() == "c"
    assert (tmp_path / "runs").read_text() == "x"


def test_an_archive_with_another_sha256_is_rejected(small, tmp_path):
    wrong = dataclasses.replace(small, sha256="0" * 64)
    with pytest.raises(AssertionError, match="sha256"):
        fetched.fetch_files(wrong, "*/data/*.txt")
    assert not list((tmp_path / "cache").glob("*.tar.gz"))


def test_a_member_outside_the_folder_is_rejected(small, tmp_path):
    with pytest.raises(tarfile.FilterError):
        fetched.fetch_files(small, "*evil*")
    assert not (tmp_path / "evil.txt").exists()


@pytest.mark.slow
def test_a_package_that_pip_does_not_find_is_reported(tmp_path):
    command = [sys.executable, "-P", str(Path(fetched.__file__).with_name("fetch_child.py"))]
    result = subprocess.run(
        [*command, "afterglow-has-no-such-package", "1", str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "no source archive" in result.stderr
