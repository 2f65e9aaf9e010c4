"""Files of the web page: their digest, and what they may refer to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from afterglow.server.settings import ServerSettings
from afterglow.server.web.files import CONTENT_TYPES, WebFiles, explain_disabled_page

FOLDER = Path(__file__).parents[3] / "src" / "afterglow" / "web"
SOURCES = sorted(path for path in FOLDER.iterdir() if path.suffix in CONTENT_TYPES)


def test_a_change_of_any_file_changes_the_path_of_all_files() -> None:
    contents = {path.name: path.read_bytes() for path in SOURCES}
    files = WebFiles(contents)
    changed = WebFiles({**contents, "style.css": b"body {}"})
    assert files.digest != changed.digest
    assert files.digest.encode() in files.page.content
    assert b"DIGEST" not in files.page.content
    assert files.get(changed.digest, "style.css") is None
    assert files.get(files.digest, "app.js") is not None
    assert files.get(files.digest, "README.md") is None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_file_parses_no_markup_and_loads_nothing_from_other_hosts(path: Path) -> None:
    text = path.read_text()
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert forbidden not in text, f"{path.name} has {forbidden}"
    addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}  # the names of SVG elements
    assert not addresses, f"{path.name} names {addresses}"


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix == ".js"], ids=lambda path: path.name)
def test_every_import_of_a_module_exists(path: Path) -> None:
    for name in re.findall(r'(?:from|import) "([^"]+)"', path.read_text()):
        assert name.startswith("./"), f"{path.name} imports {name}"
        assert (FOLDER / name).is_file(), f"{path.name} imports {name}"


def test_the_page_is_off_on_other_addresses_unless_there_are_keys() -> None:
    assert explain_disabled_page(ServerSettings(host="127.0.0.1")) is None
    assert "loopback" in (explain_disabled_page(ServerSettings(host="0.0.0.0")) or "")
    assert explain_disabled_page(ServerSettings(host="0.0.0.0", api_keys=("secret",))) is None
    assert "`web`" in (explain_disabled_page(ServerSettings(web=False)) or "")
