"""Fixtures of the registry tests: a clean environment, a wheel for pip, a package index and a hub."""

from __future__ import annotations

import os
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afterglow.registry import CATALOG, CatalogEntry, WheelFile, discovery
from support.registry_servers import WHEEL, ServedResponses, build_content, build_source, build_wheel, run_server


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty models directory and home, without this machine's settings of pip and the hub."""
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
    """Adds a source to the catalog as `tiny`."""
    return lambda source: monkeypatch.setitem(CATALOG, "tiny", CatalogEntry("tiny", source))


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Callable[[WheelFile], None]) -> bytes:
    """Bytes of `tiny`, which pip finds in a folder of wheels."""
    data = build_content(5_000)
    build_wheel(tmp_path / "wheels", data)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    register(build_source(data))
    return data


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """Python without pip and without packages."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return str(tmp_path / "bare" / "bin" / "python")


@pytest.fixture
def index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Callable[[WheelFile], None]
) -> Iterator[tuple[ServedResponses, bytes]]:
    """Package index that sends half of the wheel of `tiny` and the rest after `release`."""
    data = build_content(2_000_000)
    wheel = build_wheel(tmp_path / "served", data).read_bytes()
    register(build_source(data))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with run_server() as responses:
        page = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
        responses.files["/simple/tiny-model/"] = ({"Content-Type": "text/html"}, page)
        responses.files[f"/{WHEEL}"] = ({"Content-Type": "application/octet-stream"}, wheel)
        responses.held.add(f"/{WHEEL}")
        monkeypatch.setenv("PIP_INDEX_URL", f"{responses.address}/simple")
        yield responses, data


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedResponses]:
    """Hub that responds like Hugging Face; `publish` adds a file."""
    with run_server() as responses:
        monkeypatch.setenv("HF_ENDPOINT", responses.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
        yield responses
