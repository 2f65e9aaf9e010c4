"""The untouched part of a KV cache takes no RAM, and dropping it changes no logits."""

from __future__ import annotations

import mmap
import sys

import psutil
import pytest

from afterglow.llama.zero_pages import drop_zero_pages
from support.contexts import decode_tokens, max_difference, random_tokens

pytestmark = [pytest.mark.native, pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops pages")]
MIB = 1024**2
SETTINGS = {"cells": 262_144, "sequences": 1, "batch": 16, "ubatch": 16}  # a KV cache of 96 MiB


def get_resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_an_unused_kv_cache_takes_no_ram_and_the_logits_are_the_same(open_model, open_context, kind) -> None:
    model, tokens = open_model(kind), random_tokens(40)
    before = get_resident_bytes()
    expected = decode_tokens(open_context(model, **SETTINGS), 0, tokens)
    whole = get_resident_bytes() - before
    before = get_resident_bytes()
    with drop_zero_pages():
        context = open_context(model, **SETTINGS)
    assert max_difference(decode_tokens(context, 0, tokens), expected) == 0.0
    assert whole > 40 * MIB
    assert get_resident_bytes() - before < whole / 2


def test_pages_with_content_are_kept() -> None:
    with drop_zero_pages():
        mapping = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping[:] = bytes(64 * MIB)
        mapping[33 * MIB] = 7
        before = get_resident_bytes()
    assert before - get_resident_bytes() > 50 * MIB
    assert mapping[33 * MIB] == 7
    assert not any(mapping[32 * MIB : 33 * MIB])
