"""Adapters in the name of a model: `base+style@0.8`."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from afterglow.server.adapters import parse_lora_suffix
from afterglow.server.errors import APIError
from afterglow.server.models import ModelRegistry, ServedModel


def build_registry(**adapters: tuple[str, ...]) -> ModelRegistry:
    def open_model() -> Any:
        raise AssertionError("it is not loaded")

    served = {name: ServedModel(open_model, adapters=names) for name, names in adapters.items()}
    return ModelRegistry(served, aliases=["claude-*=small"] if "small" in served else [])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("small", ("small", "")),
        ("small+style", ("small", "+style")),
        ("claude-3+style@0.5", ("claude-3", "+style@0.5")),
        ("plus+", ("plus+", "")),
        ("plus++style", ("plus++style", "")),
        ("command-r+", ("command-r+", "")),
        (None, (None, "")),
    ],
)
def test_a_plus_separates_adapters_only_after_the_name_of_a_served_model(name, expected):
    with contextlib.closing(build_registry(**{"small": ("style",), "plus+": ()})) as registry:
        assert registry.split_name(name) == expected


def test_any_name_selects_the_only_model_with_its_adapters():
    with contextlib.closing(build_registry(only=("style",))) as registry:
        assert registry.split_name("gpt-4+style") == ("gpt-4", "+style")
        assert registry.get_requested_slot("gpt-4+style").name == "only"
    with contextlib.closing(build_registry(only=())) as registry:
        assert registry.split_name("command-r+plus") == ("command-r+plus", "")


def test_a_scale_must_be_a_number():
    assert parse_lora_suffix("") == []
    with pytest.raises(APIError, match="must be a number"):
        parse_lora_suffix("+style@x")
