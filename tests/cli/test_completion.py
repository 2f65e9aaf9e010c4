"""Shell completion and `--version`: complete, up to date, and without importing the commands."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import afterglow
from afterglow.cli.commands import ALIASES, COMMANDS, REPLACEMENTS, app, load_command
from afterglow.cli.completion import INDEX_PATH, find_completions
from support.commands import run_in_process

HEAVY_MODULES = ("fastapi", "jinja2", "numpy", "prompt_toolkit", "pydantic", "rich", "typer", "uvicorn")
PROGRAM = f"""
import atexit, sys
sys.argv[0] = "afterglow"
atexit.register(lambda: print([name for name in {HEAVY_MODULES} if name in sys.modules], file=sys.stderr))
from afterglow.cli.main import main
main()
"""


def run_main(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point and print the heavy modules that it imported to standard error."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def complete_in_bash(line: str) -> subprocess.CompletedProcess[str]:
    words = line.split(" ")
    return run_main(COMP_WORDS=line, COMP_CWORD=str(len(words) - 1), _AFTERGLOW_COMPLETE="complete_bash")


@pytest.mark.slow
def test_the_version_is_printed_without_heavy_imports() -> None:
    result = run_main("--version")
    assert (result.stdout, result.stderr) == (f"afterglow {afterglow.__version__}\n", "[]\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("afterglow ser", ["serve"]),
        ("afterglow run --temp", ["--temperature"]),
        ("afterglow serve --log-level ", ["debug", "info", "warning", "error"]),
        ("afterglow models pull smol", ["smollm2"]),
        ("afterglow models sh", ["show"]),
    ],
)
def test_bash_completes_without_heavy_imports(line: str, expected: list[str]) -> None:
    result = complete_in_bash(line)
    assert (result.returncode, result.stderr) == (0, "[]\n")
    assert result.stdout.split() == expected


@pytest.mark.slow
def test_bash_completes_with_the_installed_script(tmp_path: Path) -> None:
    """The script comes from typer, the completions from us."""
    program = tmp_path / "afterglow"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m afterglow.cli.main "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = run_main(_AFTERGLOW_COMPLETE="source_bash").stdout
    lines = [
        script,
        "COMP_WORDS=(afterglow cache ve); COMP_CWORD=2",
        "_afterglow_completion afterglow",
        'echo "${COMPREPLY[@]}"',
    ]
    bash = shutil.which("bash")
    assert bash is not None
    result = subprocess.run([bash, "-c", "\n".join(lines)], capture_output=True, text=True, env=environment)
    assert result.stdout == "verify\n", result.stderr


@pytest.mark.slow
def test_zsh_and_fish_get_their_formats() -> None:
    zsh = run_main(_TYPER_COMPLETE_ARGS="afterglow mod", _AFTERGLOW_COMPLETE="complete_zsh")
    assert zsh.stdout.startswith("""_arguments '*: :(("models":"List, pull""")
    none = run_main(_TYPER_COMPLETE_ARGS="afterglow explain ", _AFTERGLOW_COMPLETE="complete_zsh")
    assert none.stdout == "_files\n"
    fish = {"_TYPER_COMPLETE_ARGS": "afterglow mod", "_AFTERGLOW_COMPLETE": "complete_fish"}
    assert run_main(**fish, _TYPER_COMPLETE_FISH_ACTION="get-args").stdout.startswith("models\tList, pull")
    assert run_main(**fish, _TYPER_COMPLETE_FISH_ACTION="is-args").returncode == 0
    fish["_TYPER_COMPLETE_ARGS"] = "afterglow explain "
    assert run_main(**fish, _TYPER_COMPLETE_FISH_ACTION="is-args").returncode == 1


def test_a_flag_with_a_value_takes_the_next_word() -> None:
    assert find_completions(["run", "--model"], "smol") == [("smollm2", "")]
    assert find_completions(["run", "--max-tokens"], "") == []
    assert "--no-mmap" in dict(find_completions(["chat", "--raw"], "--no-"))


def test_the_index_of_the_commands_is_up_to_date() -> None:
    script = Path(__file__).parents[2] / "scripts" / "write_command_index.py"
    assert INDEX_PATH.read_text() == runpy.run_path(str(script))["build_index"](), "run `make docs`"


def test_every_command_of_ollama_works_or_says_the_right_word() -> None:
    words = {"serve", "create", "show", "run", "stop", "pull", "push", "list", "ls", "ps", "cp", "rm"}
    assert words <= {*COMMANDS, *ALIASES, *REPLACEMENTS}
    result = CliRunner().invoke(app, ["stop"])
    assert (result.exit_code, "Ctrl-C or SIGTERM stops" in " ".join(result.output.split())) == (2, True)
    assert "Did you mean 'serve'?" in CliRunner().invoke(app, ["serv"]).output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_text(name: str) -> None:
    assert load_command(name).help
    assert f" {name} " in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.native
def test_show_prints_the_facts_of_a_model(smollm2: Path) -> None:
    result = run_in_process("show", "smollm2", "--json")
    facts = json.loads(result.stdout)
    assert (facts["architecture"], facts["context_length"], facts["chat_template"]) == ("llama", 8192, True)
    assert facts["parameters"] == 134_515_008
    assert facts["size_bytes"] == smollm2.stat().st_size
    table = run_in_process("models", "show", "smollm2").stdout
    assert "134,515,008" in table
    assert f"path\t{smollm2}\n" in table
