"""The launcher of llama.cpp's server tests translates every flag or refuses it, and the runner compares outcomes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from llamacpp_suite import afterglow_server, launcher, run

MODEL = Path("model.gguf")
VARYING = f"{run.VARIES}: the model may end the text"


def parse(*flags: str) -> argparse.Namespace:
    return launcher.build_parser().parse_args(["afterglow", *flags])


def test_the_context_is_divided_among_the_slots(tmp_path: Path) -> None:
    command = afterglow_server.build_command(parse("--ctx-size", "512", "--parallel", "2"), MODEL, tmp_path)
    assert command[command.index("--context") + 1] == "256"
    unified = parse("--ctx-size", "512", "--parallel", "2", "--kv-unified")
    command = afterglow_server.build_command(unified, MODEL, tmp_path)
    assert command[command.index("--context") + 1] == "512"


def test_a_flag_without_an_equivalent_ends_the_launcher(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--context-shift has no equivalent"):
        afterglow_server.build_command(parse("--context-shift"), MODEL, tmp_path)
    with pytest.raises(SystemExit):
        parse("--no-such-flag")


def test_every_flag_is_translated_implied_or_refused() -> None:
    handled = {*afterglow_server.REFUSED, *afterglow_server.IMPLIED, *afterglow_server.RENAMED}
    source = Path(afterglow_server.__file__).read_text()
    rest = {name for name in vars(parse()) if name not in handled and f"flags.{name}" not in source}
    assert rest == {"peer", "model", "model_url", "hf_repo", "hf_file", "mmproj_url"} | SPECULATION


SPECULATION = {"spec_type", "spec_draft_n_min", "spec_draft_n_max"}  # they come with a draft model, which is refused


def test_every_exception_has_a_reason() -> None:
    exceptions = run.read_exceptions()
    assert all(name.startswith("unit/test_") and len(reason) > 10 for name, reason in exceptions.items())


def test_an_exception_that_passes_and_an_unexpected_failure_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "read_exceptions", lambda: {"unit/a": "no UI", "unit/b*": "no tools", "unit/d": VARYING})
    passed, failed = {"outcome": "passed"}, {"outcome": "failed"}
    outcomes = {"unit/a": passed, "unit/b1": failed, "unit/d": passed}
    assert not run.compare(["unit/a", "unit/b1", "unit/c", "unit/d"], outcomes)
    printed = capsys.readouterr().out
    assert "passes, but is an exception: unit/a" in printed
    assert "exception: unit/b1: no tools" in printed
    assert "fails: unit/c: it did not run" in printed
    assert "unit/d" not in printed
