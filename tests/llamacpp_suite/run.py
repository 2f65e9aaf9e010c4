"""Runs llama.cpp's own server tests against llama-server and against afterglow, both with SmolLM2, and compares.

    make test-llama-server

The tests are in the source archive of the package whose library afterglow loads, at the same build. They are fetched
once and are not part of this repository. What llama-server passes is recorded beside them, so that only the first run
needs it; `--baseline` records it again. Of these tests, afterglow must pass all but those of `exceptions.toml`, which
has a reason for each, and an entry that passes must go.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from afterglow import registry  # noqa: E402
from afterglow.testing import models  # noqa: E402
from llamacpp_suite import afterglow_server, launcher, pool, suite_plugin  # noqa: E402
from support.fetched import CACHE_DIRECTORY, LLAMA_CPP, fetch_files  # noqa: E402

PATTERNS = ("*/llama.cpp/tools/server/tests/*", "*/llama.cpp/models/templates/*")
EXCEPTIONS = FOLDER / "exceptions.toml"
BASELINE = CACHE_DIRECTORY / f"{LLAMA_CPP.name}-{LLAMA_CPP.version}-server-tests.json"
TEST_TIMEOUT_SECONDS = 240
VARIES = "the outcome varies"  # start of the reason of a test that may also pass


@contextmanager
def unpack_suite() -> Iterator[Path]:
    """Yield a copy of the tests with the templates they use, in the folders of the source tree."""
    with tempfile.TemporaryDirectory(prefix="llama-server-tests-") as root:
        for pattern in PATTERNS:
            for path in fetch_files(LLAMA_CPP, pattern):
                parts = path.parts[path.parts.index("llama.cpp") + 1 :]
                target = Path(root, *parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        folder = Path(root, "tools", "server", "tests")
        (folder / "tmp").mkdir()
        yield folder


def sort_tests(suite: Path, tests: Sequence[str]) -> list[str]:
    """Sort tests by the command line of the server that they start, so that those with the same one share it.

    The tests run once with a program that writes its command line and fails.
    """
    with tempfile.TemporaryDirectory(prefix="commands-") as temporary:
        commands = Path(temporary, "commands")
        script = f'echo "$PYTEST_CURRENT_TEST|$*" >> "{commands}"; exit 1'
        run_suite(suite, tests, script, Path(temporary), output=subprocess.DEVNULL)
        lines = [line.partition(" (call)|") for line in commands.read_text(encoding="utf-8").splitlines()]
        first = {test: command for test, _, command in reversed(lines)}
    return sorted(tests, key=lambda test: (first.get(test, ""), test))


def run_tests(peer: str, suite: Path, tests: Sequence[str]) -> dict[str, dict[str, str]]:
    """Run tests of the suite against a peer, and return their outcomes by name."""
    # A child of a stopped server may still write a file.
    with tempfile.TemporaryDirectory(prefix=f"{peer}-", ignore_cleanup_errors=True) as temporary:
        directory = Path(temporary)
        try:
            program = f'exec "{sys.executable}" "{FOLDER / "launcher.py"}" {peer} "$@"'
            return run_suite(suite, tests, program, directory)
        finally:
            pool.stop_server(directory)


def run_suite(
    suite: Path, tests: Sequence[str], script: str, directory: Path, *, output: int | None = None
) -> dict[str, dict[str, str]]:
    """Run tests of the suite with a shell script as their server, and return their outcomes by name."""
    program, outcomes, arguments = directory / "server", directory / "outcomes.jsonl", directory / "arguments"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    outcomes.touch()
    arguments.write_text("".join(f"{test}\n" for test in tests))
    environment = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(program),
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]),
        launcher.MODEL_VARIABLE: str(registry.pull("smollm2")),
        launcher.RERANKER_VARIABLE: str(models.get_path("reranker")),
        afterglow_server.DIRECTORY_VARIABLE: str(directory),
        suite_plugin.OUTCOMES_VARIABLE: str(outcomes),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "llamacpp_suite.suite_plugin",
        "-q",
        "--tb=line",
        "--show-capture=no",
    ]
    options = [
        "-p",
        "no:cacheprovider",
        "-rN",
        "-m",
        "not slow",
        "--timeout",
        str(TEST_TIMEOUT_SECONDS),
        f"@{arguments}",
    ]
    subprocess.run([*command, *options], cwd=suite, env=environment, stdout=output, check=False)
    lines = map(json.loads, outcomes.read_text(encoding="utf-8").splitlines())
    return {line["test"]: line for line in lines}


def get_baseline(suite: Path, *, record: bool) -> list[str]:
    """Return the tests that llama-server passes, recorded or recorded now."""
    if record or not BASELINE.exists():
        outcomes = run_tests("llama-server", suite, ["unit"])
        passed = [test for test, line in outcomes.items() if line["outcome"] == "passed"]
        BASELINE.write_text(json.dumps({"tests": len(outcomes), "passed": passed}, indent=1))
    recorded = json.loads(BASELINE.read_text())
    print(f"llama-server passes {len(recorded['passed'])} of {recorded['tests']} tests with SmolLM2", flush=True)
    return list(recorded["passed"])


def read_exceptions() -> dict[str, str]:
    """Read the tests that afterglow does not pass, with the reasons. A name that ends with `*` stands for several."""
    return {
        test: reason
        for reason, tests in tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8")).items()
        for test in tests
    }


def find_reason(test: str, exceptions: dict[str, str]) -> str | None:
    """Return the reason why a test is an exception; None if it is none."""
    names = (name for name in exceptions if name == test or (name.endswith("*") and test.startswith(name[:-1])))
    return next((exceptions[name] for name in names), None)


def compare(baseline: Sequence[str], outcomes: dict[str, dict[str, str]]) -> bool:
    """Print the figure and the tests that are not passed, each with its reason; return whether all is as recorded."""
    exceptions = read_exceptions()
    passed = [test for test in baseline if outcomes.get(test, {}).get("outcome") == "passed"]
    reasons = {test: find_reason(test, exceptions) for test in passed}
    problems = [
        f"passes, but is an exception: {test}"
        for test, reason in reasons.items()
        if reason is not None and not reason.startswith(VARIES)
    ]
    for test in baseline:
        if test in passed:
            continue
        if (reason := find_reason(test, exceptions)) is None:
            problems.append(f"fails: {test}: {outcomes.get(test, {}).get('reason', 'it did not run')}")
        else:
            print(f"exception: {test}: {reason}")
    print(f"afterglow passes {len(passed)} of the {len(baseline)} tests that llama-server passes with SmolLM2")
    print("\n".join(problems), flush=True)
    return not problems


def main() -> None:
    """Run and compare; exit with 1 if a test fails that is no exception."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", action="store_true", help="record again what llama-server passes")
    parser.add_argument("--only", default="", help="run only tests whose names contain this text")
    options = parser.parse_args()
    with unpack_suite() as suite:
        baseline = [test for test in get_baseline(suite, record=options.baseline) if options.only in test]
        outcomes = run_tests("afterglow", suite, sort_tests(suite, baseline))
    sys.exit(0 if compare(baseline, outcomes) else 1)


if __name__ == "__main__":
    main()
