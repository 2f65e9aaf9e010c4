"""The largest quantization that fits this machine is chosen from a header."""

from __future__ import annotations

import pytest

from afterglow.api import quantization
from afterglow.api.quantization import choose_quantization, estimate_context_bytes
from afterglow.errors import OutOfMemory
from afterglow.registry import Variant
from afterglow.registry.quantizations import RepositoryFile
from afterglow.testing.models import get_path

GIB = 1024**3


@pytest.fixture(scope="module")
def header():
    return get_path("attention")


def build_variant(name, size):
    return Variant(name, name, (RepositoryFile(f"{name}.gguf", size, None),))


VARIANTS = [build_variant("Q8_0", 8 * GIB), build_variant("Q4_K_M", 4 * GIB), build_variant("Q2_K", 2 * GIB)]


def set_free_memory(monkeypatch, *, gpu, ram):
    monkeypatch.setattr(quantization, "get_free_memory", lambda *, gpu: free[gpu])
    free = {True: gpu, False: ram}


def test_a_gpu_keeps_the_same_reserve_as_in_the_plan_of_a_load(header, monkeypatch):
    """A sixteenth of its memory, where RAM keeps an eighth."""
    needed = 4 * GIB + estimate_context_bytes(header)
    for kind, chosen in (("gpu", "Q4_K_M"), ("ram", "Q2_K")):
        set_free_memory(monkeypatch, **{"gpu": 0, "ram": 0, kind: int(needed / 0.92)})
        assert choose_quantization(header, VARIANTS).quantization == chosen


@pytest.mark.parametrize(
    ("gpu", "ram", "chosen"),
    [(0, 64, "Q8_0"), (0, 8, "Q4_K_M"), (5, 64, "Q4_K_M"), (1, 64, "Q8_0"), (0, 3, "Q2_K")],
)
def test_the_largest_that_fits_is_chosen_and_a_gpu_comes_first(header, monkeypatch, gpu, ram, chosen):
    set_free_memory(monkeypatch, gpu=gpu * GIB, ram=ram * GIB)
    assert choose_quantization(header, VARIANTS).quantization == chosen


def test_the_context_counts(header, monkeypatch):
    needed = 2 * GIB + estimate_context_bytes(header)
    assert estimate_context_bytes(header) > 0
    set_free_memory(monkeypatch, gpu=0, ram=needed * 8 // 7 + 8)
    assert choose_quantization(header, VARIANTS).quantization == "Q2_K"
    set_free_memory(monkeypatch, gpu=0, ram=needed * 8 // 7 - 8)
    with pytest.raises(OutOfMemory, match=r"the smallest is Q2_K. Name it to pull it anyway") as caught:
        choose_quantization(header, VARIANTS)
    assert caught.value.needed_bytes == needed
