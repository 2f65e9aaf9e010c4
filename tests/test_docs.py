"""The documentation is true: its code runs, its links lead somewhere, its flags and error texts exist."""

from __future__ import annotations

import configparser
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import afterglow
from afterglow.cli import commands
from afterglow.cli.settings import load_settings
from afterglow.paths import get_cache_directory, get_data_directory
from afterglow.server.errors import CLIENT_CLOSED_REQUEST, ERROR_STATUSES
from support.pages import PAGES, ROOT, Block, PageRunner, get_name, parse_page, read_blocks

BLOCKS = {get_name(page): read_blocks(page) for page in PAGES}
ALL_BLOCKS = [block for blocks in BLOCKS.values() for block in blocks]
EXECUTED = ("bash", "python")
CHECKED = ("toml", "json", "dockerfile", "yaml", "ini")  # parsed, or compared with a file of the repository
OUTPUT = ("text",)

# Blocks that do not run here, by reason. A new one needs a reason of this list, and changes its number.
NOT_RUN = {
    "benchmarks": 1,
    "changes the shell's configuration": 1,
    "creates a virtual environment": 1,
    "downloads gigabytes": 1,
    "installs from PyPI": 4,
    "listens on all addresses": 1,
    "make targets": 1,
    "needs Docker": 1,
    "needs a coding agent": 4,
    "needs Windows": 1,
    "needs macOS": 1,
    "needs systemd": 3,
    "needs the source of llama.cpp": 1,
    "removes files of the user": 1,
    "port 11434 may be in use": 1,
}


# --- code


def test_every_block_has_a_known_language() -> None:
    wrong = [str(block) for block in ALL_BLOCKS if block.language not in (*EXECUTED, *CHECKED, *OUTPUT)]
    assert not wrong, f"fenced blocks with one of {EXECUTED + CHECKED + OUTPUT} are allowed: {wrong}"


def test_every_block_that_does_not_run_has_a_reason_and_is_counted() -> None:
    assert Counter(block.reason for block in ALL_BLOCKS if block.reason) == NOT_RUN


def test_a_server_is_a_block_of_its_own() -> None:
    """The runner starts it in the background; among other commands it would never end."""
    shell = [block for block in ALL_BLOCKS if block.language == "bash" and not block.reason]
    lines = {str(block): block.code.strip().splitlines() for block in shell}
    assert not [block for block, code in lines.items() if len(code) > 1 and any("afterglow serve" in x for x in code)]


def list_runnable_pages() -> Iterator[Any]:
    for name, blocks in BLOCKS.items():
        runnable = [block for block in blocks if block.language in EXECUTED and not block.reason]
        if runnable:
            yield pytest.param(runnable, id=name)


@pytest.fixture(scope="session")
def runner(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> PageRunner:
    return PageRunner(tmp_path_factory.mktemp("home"), smollm2)


@pytest.mark.model
@pytest.mark.parametrize("blocks", list(list_runnable_pages()))
def test_the_code_of_a_page_runs(blocks: list[Block], runner: PageRunner, tmp_path: Path) -> None:
    runner.run_page(blocks, tmp_path)


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.language == "toml"], ids=str)
def test_a_settings_file_of_a_page_is_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.toml").write_text(block.code)
    for name in ("AFTERGLOW_DISK_CACHE", "AFTERGLOW_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AFTERGLOW_SETTINGS", str(tmp_path / "settings.toml"))
    load_settings()


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.language == "json"], ids=str)
def test_json_of_a_page_is_valid(block: Block) -> None:
    assert json.loads(block.code)


DEPLOYMENT = {"dockerfile": "Dockerfile", "yaml": "compose.yaml", "ini": "afterglow.service"}


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.language in DEPLOYMENT], ids=str)
def test_a_deployment_file_of_a_page_is_the_one_in_the_repository(block: Block) -> None:
    assert block.code == (ROOT / "deploy" / DEPLOYMENT[block.language]).read_text()


# --- generated pages


@pytest.mark.parametrize(
    ("script", "arguments", "page"),
    [
        ("write_options_page.py", (), "reference/options.md"),
        ("write_fields_page.py", (), "fields.md"),
        ("write_memory_tables.py", ("models.md",), "models.md"),
        ("write_memory_tables.py", ("memory.md",), "memory.md"),
    ],
)
def test_a_generated_page_is_up_to_date(script: str, arguments: tuple[str, ...], page: str) -> None:
    build = runpy.run_path(str(ROOT / "scripts" / script))["build_page"]
    assert build(*arguments) == (ROOT / "docs" / page).read_text(), "run `make docs`"


# --- links


def make_anchor(heading: str) -> str:
    """Return the anchor of a heading, as mkdocs and code hosts write it."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def read_anchors(page: Path) -> set[str]:
    tokens = parse_page(page)
    headings = [tokens[index + 1].content for index, token in enumerate(tokens) if token.type == "heading_open"]
    return {make_anchor(heading) for heading in headings}


def read_links(page: Path) -> Iterator[str]:
    for token in parse_page(page):
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                yield str(child.attrs.get("href") or child.attrs.get("src"))


@pytest.mark.parametrize("page", PAGES, ids=get_name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in read_links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{get_name(page)}: {link}"
        if anchor:
            assert anchor in read_anchors(target), f"{get_name(page)}: {link}"


def list_nav(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for value in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from list_nav(value)


def test_the_page_on_the_api_lists_every_route_once() -> None:
    table = (ROOT / "docs" / "api.md").read_text().split("| route | purpose |\n")[1].split("\n\n")[0]
    routes = [line.split(" | ")[0] for line in table.splitlines()]
    assert len(routes) > 20
    assert len(routes) == len(set(routes))


def test_the_page_on_python_names_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    public = {name for name in afterglow.__all__ if not name.startswith("_")}
    assert public - set(re.findall(r"(?:::: afterglow\.|`)(\w+)", page)) == set()


def test_the_page_on_the_api_lists_every_error_code() -> None:
    table = (ROOT / "docs" / "api.md").read_text().split("## Errors")[1].split("## Metrics")[0]
    sources = [path.read_text() for path in (ROOT / "src" / "afterglow" / "server").rglob("*.py")]
    codes = {code for source in sources for code in re.findall(r'\bcode="(\w+)"', source)}
    codes |= {code for _, status, _, code in ERROR_STATUSES if status != CLIENT_CLOSED_REQUEST}
    assert len(codes) > 40
    assert {code for code in codes if f"`{code}`" not in table} == set()


def test_the_page_on_the_api_lists_every_metric() -> None:
    table = (ROOT / "docs" / "api.md").read_text().split("## Metrics")[1].split("## Log")[0]
    source = (ROOT / "src" / "afterglow" / "server" / "metrics.py").read_text()
    names = set(re.findall(r'"(afterglow_\w+)"', source))
    assert len(names) > 10
    assert {name for name in names if f"`{name}" not in table} == set()


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    nav = Counter(list_nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    outside = set(runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))["OUTSIDE"].values())
    assert set(nav) - outside == pages
    assert set(nav.values()) == {1}


@pytest.mark.parametrize(
    ("markdown", "uri", "expected"),
    [
        ("[log](../benchmarks/LOG.md#a)", "speed.md", "[log](project/LOG.md#a)"),
        ("[log](../../benchmarks/LOG.md)", "low-level/mtp.md", "[log](../project/LOG.md)"),
        ("[log](benchmarks/LOG.md)", "project/ARCHITECTURE.md", "[log](LOG.md)"),
        ("[contracts](../docs/contracts.md)", "project/tests.md", "[contracts](../contracts.md)"),
        ("[cache](cache.md)", "speed.md", "[cache](cache.md)"),
    ],
)
def test_links_out_of_docs_get_their_path_on_the_site(markdown: str, uri: str, expected: str) -> None:
    rewrite = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))["rewrite_links"]
    assert rewrite(markdown, uri) == expected


# --- flags


def collect_flags() -> dict[str, set[str]]:
    """Return the flags of each command, by its words."""
    flags: dict[str, set[str]] = {}

    def collect(command: Any, words: tuple[str, ...]) -> None:
        options = [flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
        flags[" ".join(words)] = {flag for flag in options if flag.startswith("-")} | {"--help", "-h"}
        for name, child in getattr(command, "commands", {}).items():
            collect(child, (*words, name))

    flags["afterglow"] = {"--version", "--verbose", "--install-completion", "--show-completion", "--help", "-h"}
    for name in commands.COMMANDS:
        collect(commands.load_command(name), ("afterglow", name))
    return flags


FLAGS = collect_flags()
ANY_FLAG = set().union(*FLAGS.values())
COMMAND = re.compile(r"(?:^|[|;&] )(?:[A-Z_]+=\S+ )?(afterglow(?: +[^|;&#\n]+)?)", re.MULTILINE)
FOREIGN_FLAGS = {"--build-arg", "--gpus", "--memory", "--quick", "--ulimit"}  # of Docker and of our benchmarks


@pytest.mark.parametrize("page", PAGES, ids=get_name)
def test_the_commands_of_a_page_exist_with_their_flags(page: Path) -> None:
    """In code blocks, and in code spans that begin with `afterglow`."""
    blocks = [block for block in BLOCKS[get_name(page)] if block.language == "bash"]
    texts = [block.code for block in blocks]
    texts += [span for span in read_code_spans(page) if span.startswith("afterglow ")]
    for text in texts:
        for command in COMMAND.findall(text.replace("\\\n", " ")):
            check_command(shlex.split(command, comments=True), get_name(page))


@pytest.mark.parametrize("page", PAGES, ids=get_name)
def test_a_flag_in_a_code_span_is_one_of_ours(page: Path) -> None:
    """On the pages about other programs, only the last column of tables is ours."""
    for span in read_code_spans(page, last_column="migrate" in page.parts):
        if span.startswith("--"):
            flags = re.findall(r"(?<!\S)--[\w-]+", span)
            unknown = set(flags) - ANY_FLAG - FOREIGN_FLAGS
            assert not unknown, f"{get_name(page)}: {span}"


def check_command(words: list[str], page: str) -> None:
    name = "afterglow"
    for word in words[1:]:
        if f"{name} {word}" in FLAGS:
            name = f"{name} {word}"
        elif word.startswith("-") and word != "-":
            assert word.split("=")[0] in FLAGS[name], f"{page}: {' '.join(words)}"
    assert name != "afterglow" or len(words) == 1 or words[1].startswith("-"), f"{page}: {' '.join(words)}"


def read_code_spans(page: Path, last_column: bool = False) -> Iterator[str]:
    """Yield the code spans of a page; with `last_column`, only those in the last cells of the rows of tables."""
    if last_column:
        yield from (span for row in read_rows(page) for span in row[-1])
        return
    for token in parse_page(page):
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def read_rows(page: Path) -> Iterator[list[list[str]]]:
    """Yield the code spans of each cell of each row of the tables of a page."""
    row: list[list[str]] = []
    tokens = parse_page(page)
    for token, inline in itertools.pairwise(tokens):
        if token.type == "td_open":
            row.append([child.content for child in inline.children or () if child.type == "code_inline"])
        elif token.type == "tr_close" and row:
            yield row
            row = []


# --- deployment files


def test_the_services_start_a_command_that_exists() -> None:
    for name in ("afterglow.service", "afterglow-user.service"):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(ROOT / "deploy" / name)
        words = shlex.split(unit["Service"]["ExecStart"])
        check_command(["afterglow", *words[1:]], name)
        assert float(unit["Service"]["TimeoutStopSec"]) > load_settings().server.shutdown_seconds


def test_the_image_starts_a_command_that_exists() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    instructions = dict(line.split(" ", 1) for line in lines if line.startswith(("CMD", "ENTRYPOINT")))
    check_command(json.loads(instructions["ENTRYPOINT"]) + json.loads(instructions["CMD"]), "Dockerfile")
    service = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["afterglow"]
    check_command(["afterglow", *service["command"]], "compose.yaml")


def test_the_image_keeps_all_data_in_its_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    volume = re.findall(r"^VOLUME (\S+)", text, re.MULTILINE)
    for name in ("AFTERGLOW_CACHE", "AFTERGLOW_DATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in re.findall(r"(AFTERGLOW_\w+)=(\S+)", text):
        monkeypatch.setenv(name, value)
    assert all(str(find("x")).startswith(f"{volume[0]}/") for find in (get_cache_directory, get_data_directory))


def test_the_settings_of_the_compose_file_are_valid_without_variables_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compose leaves a variable without a value out, if the shell does not set it."""
    environment = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["afterglow"]["environment"]
    for name, value in environment.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value))
    assert load_settings().server.host


# --- claims about the source


POSIX_MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}


def find_posix_imports() -> set[tuple[str, str]]:
    """Return the modules of ours that import modules which Windows lacks, outside of functions."""
    found = set()
    for path in (ROOT / "src" / "afterglow").rglob("*.py"):
        names = set(re.findall(r"^import (\w+)", path.read_text(), re.MULTILINE)) & POSIX_MODULES
        found |= {(path.relative_to(ROOT / "src" / "afterglow").as_posix(), name) for name in names}
    return found


def test_the_page_on_windows_names_every_module_that_cannot_be_imported_there() -> None:
    page = (ROOT / "docs" / "windows.md").read_text()
    for path, module in find_posix_imports():
        assert f"| `{path}` | `{module}`" in page, (path, module)


def test_the_page_on_windows_says_what_works_without_modules_of_posix() -> None:
    """`import afterglow` works, and `load` fails with the error that the page shows."""
    page = (ROOT / "docs" / "windows.md").read_text()
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(POSIX_MODULES)})); "
        "import afterglow; print('imported'); afterglow.load"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n"
    message = re.search(r"import of (\w+) halted; None in sys.modules", done.stderr)
    assert message is not None, done.stderr
    assert f"No module named '{message[1]}'" in page.split("```")[1]


# Messages of other programs, and parts of messages that are values.
FOREIGN_MESSAGES = {
    "libgomp.so.1",
    "for xllamacpp.abi3.so",
    "No module named 'fcntl'",
    "No module named 'resource'",
    "afterglow: command not found",
    "pip install afterglow",
}


def test_the_messages_on_the_page_on_troubleshooting_exist() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src" / "afterglow").rglob("*.py"))
    for row in read_rows(ROOT / "docs" / "troubleshooting.md"):
        for message in row[0]:
            words = [part for part in re.split(r"^\d{3} ", message) if part]
            assert message in FOREIGN_MESSAGES or words[-1] in source, message


def test_the_architecture_is_short_and_names_only_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = re.findall(r"(?:\w+/)+\w+\.py\b", text)
    assert len(text.split()) <= 2500
    assert len(paths) > 40
    assert [path for path in paths if not any((root / path).exists() for root in (ROOT, ROOT / "src/afterglow"))] == []
