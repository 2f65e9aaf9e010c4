"""Code blocks of the documentation, and a runner that executes the blocks of a page as a reader would."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pexpect
from markdown_it import MarkdownIt
from markdown_it.token import Token

from afterglow.testing import models
from support.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->")
SERVER_URL = "http://127.0.0.1:8080"
SERVE = "afterglow serve"
CHAT = "afterglow chat"
# Models that pages name. SmolLM2 takes their places, so that the commands run without a download of gigabytes.
CHAT_MODELS = (
    "Qwen--Qwen3-0.6B-GGUF--Qwen3-0.6B-Q8_0.gguf",
    "Qwen--Qwen3-8B-GGUF--Qwen3-8B-Q4_K_M.gguf",
)
EMBEDDING_MODELS = ("nomic-ai--nomic-embed-text-v1.5-GGUF--nomic-embed-text-v1.5.Q8_0.gguf",)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block. `reason` says why it does not run; empty if it does."""

    page: str
    line: int
    language: str
    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def get_name(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


@functools.cache
def parse_page(page: Path) -> list[Token]:
    """Parse a page as CommonMark with tables."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def read_blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page. An indented block has the language `indented`."""
    blocks, reason = [], ""
    for token in MarkdownIt("commonmark").disable("inline").parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            language = token.info.strip() if token.type == "fence" else "indented"
            assert token.map is not None
            blocks.append(Block(get_name(page), token.map[0] + 1, language, token.content, reason))
        if token.nesting == 0 and token.type != "inline":
            match = NOT_RUN.search(token.content) if token.type == "html_block" else None
            reason = match["reason"] if match else ""
    return blocks


class PageRunner:
    """Runs the blocks of pages in a home directory with stand-ins for the models that they name."""

    def __init__(self, home: Path, smollm2: Path) -> None:
        self.home = home
        self._cache = home / ".cache" / "afterglow"
        self._smollm2 = smollm2
        self._write_command()
        self._server: ServerProcess | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the commands: a home of their own, and short responses."""
        prefixes = ("AFTERGLOW_", "XDG_", "HF_", "OLLAMA_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
        return {
            **inherited,
            "HOME": str(self.home),
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            # The default directories, by name: a server would inherit those of the tests.
            "AFTERGLOW_CACHE": str(self._cache),
            "AFTERGLOW_MODELS": str(self._cache / "models"),
            "AFTERGLOW_MAX_TOKENS": "40",  # flags override it
        }

    def run_page(self, blocks: list[Block], directory: Path) -> None:
        """Run the shell blocks in order, then the Python of the page as one program. A server runs until the end."""
        self._link_models()
        try:
            for block in blocks:
                if block.language == "bash":
                    self._run_shell(block, directory)
            if python := "\n".join(block.code for block in blocks if block.language == "python"):
                (directory / "example.py").write_text(self._replace_url(python))
                self._run([sys.executable, "example.py"], directory, blocks[0].page)
        finally:
            self._stop_server()

    def _run_shell(self, block: Block, directory: Path) -> None:
        if block.code.startswith(SERVE):
            self._stop_server()
            command = shlex.split(block.code.removeprefix(SERVE), comments=True)
            assert "\n" not in block.code.strip(), f"{block}: a server is a block of its own"
            environment = {**self.environment, "AFTERGLOW_CONTEXT": "2048"}
            self._server = ServerProcess(*command, **environment)
        elif block.code.strip().splitlines()[-1].startswith(CHAT):
            self._open_chat(block, directory)
        else:
            self._run(["bash", "-euo", "pipefail", "-c", self._replace_url(block.code)], directory, str(block))

    def _open_chat(self, block: Block, directory: Path) -> None:
        """Run a block whose last command is an interactive chat in a terminal, until its prompt; then exit."""
        child = pexpect.spawn(
            "bash", ["-euo", "pipefail", "-c", block.code], cwd=str(directory), env=self.environment, timeout=120
        )
        child.expect(">")
        child.sendeof()
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0, f"{block}: {child.before!r}"

    def _run(self, command: list[str], directory: Path, name: str) -> None:
        done = subprocess.run(
            command,
            cwd=directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"

    def _replace_url(self, code: str) -> str:
        return code if self._server is None else code.replace(SERVER_URL, self._server.url)

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.stop(signal.SIGTERM)
            self._server = None

    def _write_command(self) -> None:
        command = self.home / "bin" / "afterglow"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m afterglow.cli.main "$@"\n')
        command.chmod(0o755)

    def _link_models(self) -> None:
        """Link the models into the places where afterglow and Ollama keep them, unless they are there."""
        for name in (self._smollm2.name, *CHAT_MODELS):
            link(self._cache / "models" / name, self._smollm2)
        for name in EMBEDDING_MODELS:
            link(self._cache / "models" / name, models.get_path("embedding"))
        ollama = self.home / ".ollama" / "models"
        digest = "sha256:" + 64 * "0"
        link(ollama / "blobs" / digest.replace(":", "-"), self._smollm2)
        manifest = ollama / "manifests" / "registry.example" / "library" / "llama3.2" / "1b"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest}
        manifest.write_text(json.dumps({"layers": [layer]}))


def link(path: Path, target: Path) -> None:
    """Create a symbolic link and its folder, unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.symlink_to(target)
