"""Roles of children are Markdown files with front matter."""

from __future__ import annotations

from pathlib import Path

import pytest

from afterglow.agents.roles import load_roles
from afterglow.errors import InvalidArgument

REVIEWER = """---
name: reviewer
description: Finds mistakes.
allow: [read, "git.*"]
temperature: 0.2
max_tokens: 50
---
You review patches.

---
Name every mistake.
"""


def test_a_directory_of_files_gives_roles_by_name(tmp_path: Path) -> None:
    (tmp_path / "reviewer.md").write_text(REVIEWER)
    (tmp_path / "writer.md").write_text("---\n---\nYou write.\r\n")
    (tmp_path / "notes.txt").write_text("no role")
    roles = load_roles(tmp_path)
    assert list(roles) == ["reviewer", "writer"]
    reviewer = roles["reviewer"]
    assert (reviewer.description, reviewer.allow) == ("Finds mistakes.", ("read", "git.*"))
    assert reviewer.instructions == "You review patches.\n\n---\nName every mistake."
    assert reviewer.options == {"temperature": 0.2, "max_tokens": 50}
    assert (roles["writer"].instructions, roles["writer"].allow) == ("You write.", None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("You write.", "must begin with front matter"),
        ("---\nname: a\nYou write.", "must begin with front matter"),
        ("---\nname: [\n---\nYou write.", "is not YAML"),
        ("---\n- a\n---\nYou write.", "must be fields with values"),
        ("---\nallow: read\n---\nYou write.", "must be a list"),
        ("---\ntemprature: 1\n---\nYou write.", "temperature"),
        ("---\ntemperature: hot\n---\nYou write.", "temperature"),
        ("---\nmax_tokens: many\n---\nYou write.", "max_tokens"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "writer.md").write_text(text)
    with pytest.raises(InvalidArgument, match=f"writer.md.*{problem}"):
        load_roles(tmp_path)


def test_two_roles_of_one_name_and_a_missing_directory_are_errors(tmp_path: Path) -> None:
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text("---\nname: same\n---\nYou write.")
    with pytest.raises(InvalidArgument, match="two roles"):
        load_roles(tmp_path)
    with pytest.raises(InvalidArgument, match="not a directory"):
        load_roles(tmp_path / "none")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes("---\nname: a\n---\nGrüße".encode("latin-1"))
    with pytest.raises(InvalidArgument, match=r"a\.md cannot be read: 'utf-8' codec"):
        load_roles(tmp_path)
    (tmp_path / "a.md").unlink()
    (tmp_path / "b.md").mkdir()
    with pytest.raises(InvalidArgument, match=r"b\.md cannot be read: .* Is a directory"):
        load_roles(tmp_path)
