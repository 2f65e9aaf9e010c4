"""Facts about model files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from afterglow.server.ollama.details import build_model_info, describe_file, format_count, read_headers
from afterglow.testing import models


def test_a_model_is_described_from_its_header() -> None:
    described = describe_file(models.get_path("attention"))
    assert described.details["family"] == "llama"
    assert described.details["quantization_level"] == "F32"
    assert described.details["parameter_size"].endswith("K")
    assert described.capabilities == ("completion", "tools")
    assert len(described.digest) == 64


def test_an_embedding_model_can_only_embed() -> None:
    assert describe_file(models.get_path("embedding")).capabilities == ("embedding",)


@pytest.mark.parametrize(("projector", "kinds"), [("projector-llava", {"vision"}), ("projector-wave", {"audio"})])
def test_the_projector_beside_a_model_says_which_media_it_accepts(
    tmp_path: Path, projector: str, kinds: set[str]
) -> None:
    shutil.copy(models.get_path("attention"), tmp_path / "model.gguf")
    shutil.copy(models.get_path(projector), tmp_path / "mmproj-model.gguf")
    assert set(describe_file(tmp_path / "model.gguf").capabilities) == {"completion", "tools"} | kinds


def test_a_changed_file_is_described_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(models.get_path("attention"), path)
    first = describe_file(path)
    shutil.copy(models.get_path("embedding"), path)
    os.utime(path, (1, 1))
    assert describe_file(path).digest != first.digest


def test_long_lists_are_only_listed_on_request() -> None:
    headers = read_headers(models.get_path("attention"))
    short, long = build_model_info(headers, verbose=False), build_model_info(headers, verbose=True)
    assert short["tokenizer.ggml.tokens"] is None
    assert long["tokenizer.ggml.tokens"][1] == "<|im_start|>"
    assert short["general.parameter_count"] == long["general.parameter_count"] > 1000


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7"), (1500, "1.5K"), (134_515_008, "134.5M"), (8_030_261_312, "8.0B")]
)
def test_parameters_are_counted_in_units(count: int, text: str) -> None:
    assert format_count(count) == text
