"""Archives of the disk tier: export and import."""

from __future__ import annotations

import errno
import os
import tarfile

import numpy as np
import pytest

from afterglow.engine.inspect import cache
from afterglow.engine.inspect.archive import export_archive, import_archive
from afterglow.errors import InvalidArgument, InvalidState
from support.hosts import wait_until
from support.play import ask, fake, prompt, reference


@pytest.mark.parametrize("kind", ["attention", "hybrid", "recurrent"])
def test_an_exported_archive_can_be_imported_elsewhere(build_engine, store_conversation, folder, tmp_path, kind):
    model = store_conversation(kind)
    count = export_archive(folder, tmp_path / "copy.tar")
    assert count > 0
    assert (tmp_path / "copy.tar").stat().st_mode & 0o077 == 0
    elsewhere = tmp_path / "elsewhere"
    assert import_archive(elsewhere, tmp_path / "copy.tar") == count
    assert cache.list_stored_models(elsewhere)[0].name == "a fake"
    assert cache.list_stored_models(elsewhere)[0].model == model
    engine = build_engine(kind, elsewhere)
    entries = prompt(45, 1) + prompt(9, 9)
    answer = ask(engine, entries)
    assert answer.cached == (45 if kind == "attention" else 40)
    assert answer.tokens == reference(lambda: fake(kind), entries)


def test_damaged_files_are_neither_exported_nor_imported(store_conversation, folder, tmp_path):
    model = store_conversation()
    copy = tmp_path / "copy.tar"
    count = export_archive(folder, copy)
    with pytest.raises(InvalidArgument, match="already exists"):
        export_archive(folder, copy)
    copy.write_bytes(copy.read_bytes().replace(b"afterglow block", b"afterglow other", 1))
    with pytest.raises(InvalidState):
        import_archive(tmp_path / "elsewhere", copy)
    victim = min((folder / model).glob("*.cells"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert export_archive(folder, tmp_path / "rest.tar") == count - 1
    assert export_archive(folder, tmp_path / "none.tar", ["0" * 64]) == 0


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), InvalidArgument), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_an_export_that_fails_leaves_no_file_and_can_be_repeated(
    store_conversation, folder, tmp_path, monkeypatch, failure, raised
):
    store_conversation()
    names, add = [], tarfile.TarFile.add

    def fail_at_the_second(archive, path, name, **options):
        names.append(name)
        if len(names) == 2:
            raise failure
        add(archive, path, name, **options)

    files = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "add", fail_at_the_second)
        with pytest.raises(raised):
            export_archive(folder, tmp_path / "copy.tar")
    assert sorted(tmp_path.iterdir()) == files
    count = export_archive(folder, tmp_path / "copy.tar")
    assert import_archive(tmp_path / "elsewhere", tmp_path / "copy.tar") == count > 1


def test_an_export_never_replaces_a_file_that_appears_meanwhile(store_conversation, folder, tmp_path, monkeypatch):
    store_conversation()
    copy, add = tmp_path / "copy.tar", tarfile.TarFile.add

    def add_late(archive, path, name, **options):
        copy.write_text("of another program")
        add(archive, path, name, **options)

    monkeypatch.setattr(tarfile.TarFile, "add", add_late)
    with pytest.raises(InvalidArgument, match="already exists"):
        export_archive(folder, copy)
    assert copy.read_text() == "of another program"
    assert sorted(tmp_path.iterdir()) == [copy, folder]


@pytest.mark.parametrize("name", ["../out", "a/b", "/etc/passwd", f"{'0' * 64}/../../out", f"{'0' * 64}/index.sqlite3"])
def test_an_archive_cannot_write_outside_the_directory(tmp_path, name):
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo(name), None)
    with pytest.raises(InvalidState, match="not a file of the afterglow disk cache"):
        import_archive(tmp_path / "prefix", tmp_path / "bad.tar")
    assert not (tmp_path / "out").exists()
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        import_archive(tmp_path / "prefix", tmp_path / "text")


def test_a_running_engine_uses_imported_files(build_engine, store_conversation, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("afterglow.engine.kvcache.disk.writer.POLL_INTERVAL_SECONDS", 0.05)
    store_conversation()
    export_archive(folder, tmp_path / "copy.tar")
    engine = build_engine(directory=tmp_path / "elsewhere")
    import_archive(tmp_path / "elsewhere", tmp_path / "copy.tar")
    store, entries = engine.prefix_cache.store, np.array(prompt(60, 1))
    assert wait_until(lambda: store.find_stored_prefix(entries, "").length == 60 and store.has_logits(entries, ""))
    assert ask(engine, prompt(60, 1)).cached == 60
