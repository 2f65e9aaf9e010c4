"""`afterglow models show`: the file of a model, and which sampling values apply and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import run_in_process
from support.sampling_models import write_model_with_sampling


@pytest.mark.native
def test_show_names_the_source_of_each_sampling_value(tmp_path: Path) -> None:
    path = write_model_with_sampling(tmp_path / "own.gguf", {"top_p": 0.9, "mirostat_tau": 4.0})
    result = run_in_process("models", "show", str(path), AFTERGLOW_TOP_K="7", AFTERGLOW_CONTEXT="512")
    assert result.returncode == 0, result.stderr
    values = dict(line.split("\t") for line in result.stdout.splitlines())
    assert values["top p"] == "0.9 (the model file)"
    assert values["mirostat tau"] == "4 (the model file)"
    assert values["top k"] == "7 (your settings)"
    assert values["min p"] == "0.05 (default of afterglow)"
    assert values["architecture"] == "llama"


def test_show_of_an_unknown_model_says_how_to_get_one() -> None:
    result = run_in_process("models", "show", "no-such-model")
    assert (result.returncode, result.stdout) == (1, "")
    assert "no model called 'no-such-model'" in result.stderr
