"""Row padding: small prefills are padded to a tile, which changes nothing but the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.backends.padding import RowPadding
from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.types.backend import DecodeSpan
from afterglow.engine.types.settings import EngineSettings
from afterglow.engine.types.tile import TILE_ROWS, RowTile
from afterglow.errors import Cancelled
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.play import Answer, ask, check, collect, play, prompt, request

pytestmark = pytest.mark.native
CELLS = 256  # per sequence


def build_engine(name: str = "attention", *, deterministic: bool = False, draft: Any = None, **context: Any) -> Engine:
    defaults: dict[str, Any] = {"cells": 4 * CELLS, "sequences": 4, "batch": 512, "ubatch": 256, "threads": 1}
    settings = EngineSettings(deterministic=deterministic, speculation="off" if draft is None else 2)
    path = models.get_path(name)
    return EngineSpec(
        path=path, context_settings=ContextSettings(**{**defaults, **context}), engine_settings=settings, draft=draft
    )()


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine that pads everything from 20 rows on."""
    engine = build_engine()
    engine.backend.row_padding = RowPadding(RowTile(balanced_cells=0.1))
    yield engine
    engine.close()


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return [20 + token % 80 for token in prompt(length, seed)]


def test_a_small_prefill_is_padded_and_gives_the_same_tokens(engine: Engine) -> None:
    padding = engine.backend.row_padding
    for length in (40, 63, 104):  # after the first turn, the rest of a prompt is padded
        entries = make_prompt(length, length)
        first = ask(engine, entries, max_tokens=8, ignore_eos=True)
        longer = [*entries, *first.tokens, *make_prompt(40, 3)]
        padded = ask(engine, longer, max_tokens=8, ignore_eos=True)
        count = padding.padded_decodes
        engine.backend.row_padding = None
        assert ask(engine, longer, max_tokens=8, ignore_eos=True, use_prefix_cache=False).tokens == padded.tokens
        engine.backend.row_padding = padding
        check(engine)
        assert padding.padded_decodes == count > 0
        padding.padded_decodes = 0


def test_prefills_of_the_same_decode_are_padded_together(engine: Engine) -> None:
    system = make_prompt(64)
    ask(engine, system, max_tokens=1)
    tails = {str(number): [*system, *make_prompt(30 + number, 10 + number)] for number in range(3)}
    answers = play(engine, *[request(id, tail, max_tokens=4, ignore_eos=True) for id, tail in tails.items()])
    assert engine.backend.row_padding.padded_decodes == 1
    engine.backend.row_padding = None
    for id, tail in tails.items():
        assert ask(engine, tail, max_tokens=4, ignore_eos=True, use_prefix_cache=False).tokens == answers[id].tokens


def test_a_prefill_beside_an_answer_is_padded_and_gives_the_same_tokens(engine: Engine) -> None:
    """llama.cpp computes one row of both, then a tile of the prompt."""
    system, padding = make_prompt(64), engine.backend.row_padding
    ask(engine, system, max_tokens=1)
    answers: dict[str, Answer] = {}
    engine.submit(request("answer", make_prompt(10, 1), max_tokens=20, ignore_eos=True))
    collect(answers, engine)
    engine.submit(request("prompt", [*system, *make_prompt(40, 2)], max_tokens=4, ignore_eos=True))
    collect(answers, engine)
    assert len(answers["answer"].tokens) == 2
    assert len(answers["prompt"].tokens) == 1
    assert padding.padded_decodes == 1
    while engine.is_busy:
        collect(answers, engine)
    check(engine)
    engine.backend.row_padding = None
    for id, entries in (("answer", make_prompt(10, 1)), ("prompt", [*system, *make_prompt(40, 2)])):
        alone = ask(engine, entries, max_tokens=len(answers[id].tokens), ignore_eos=True, use_prefix_cache=False)
        assert alone.tokens == answers[id].tokens


def decode(backend: LlamaBackend, *spans: tuple[int, int, int]) -> None:
    """Decode spans, each with sequence, position and rows."""
    backend.decode([DecodeSpan(seq, np.full(rows, 30 + seq), position, 1) for seq, position, rows in spans])


def test_padding_leaves_no_cells_and_logits_are_those_after_the_last_row(engine: Engine) -> None:
    backend = engine.backend
    decode(backend, (0, 0, 64))
    decode(backend, (0, 64, 40))
    assert backend.row_padding.padded_decodes == 1
    assert backend.get_position_range(0) == (0, 103)
    padded = backend.get_logits(0, 39).copy()
    backend.truncate(0, 64)
    backend.row_padding = None
    decode(backend, (0, 64, 40))
    assert np.allclose(padded, backend.get_logits(0, 39), atol=0.01)  # a single row is computed in half precision
    backend.clear(0)


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 64, 8)],  # too few rows
        [(0, 64, TILE_ROWS)],  # a complete tile
        [(0, 64, 40), (1, 64, 100)],  # llama.cpp would compute 40 rows of both together, then 60 of the second one
        [(0, CELLS - 40, 40)],  # the padding does not fit
    ],
)
def test_a_decode_that_would_not_be_faster_is_not_padded(engine: Engine, spans: list[tuple[int, int, int]]) -> None:
    backend = engine.backend
    for sequence, position, _ in spans:
        for start in range(0, position, 8):  # too few rows to be padded
            decode(backend, (sequence, start, min(8, position - start)))
    decode(backend, *spans)
    assert backend.row_padding.padded_decodes == 0
    for sequence, _, _ in spans:
        backend.clear(sequence)


def test_spans_that_do_not_fit_into_one_ubatch_are_not_padded(engine: Engine) -> None:
    backend = engine.backend
    backend.capabilities = replace(backend.capabilities, ubatch_cells=127)
    decode(backend, (0, 0, 40), (1, 0, 40))
    assert backend.row_padding.padded_decodes == 0
    for sequence in (0, 1):
        backend.clear(sequence)


def test_an_interrupted_decode_leaves_no_padding(engine: Engine) -> None:
    backend = engine.backend
    decode(backend, (0, 0, 64))
    backend.interrupt()
    with pytest.raises(Cancelled):
        decode(backend, (0, 64, 40))
    backend.clear_interrupt()
    first, last = backend.get_position_range(0)
    assert first == 0
    assert last < 64 + 40
    backend.clear(0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("attention", {"flash_attention": False}),
        ("attention", {"cache_type_k": "bf16", "cache_type_v": "bf16"}),
        ("attention", {"kv_unified": True}),
        ("attention", {"deterministic": True}),
        ("window", {}),
        ("recurrent", {}),
        ("hybrid", {}),
        ("attention-mtp", {"draft": "mtp"}),
    ],
)
def test_nothing_is_padded_if_attention_has_no_tiles_or_cells_cannot_be_removed(
    name: str, options: dict[str, Any]
) -> None:
    engine = build_engine(name, **options)
    assert engine.backend.row_padding is None
    engine.close()


def test_attention_models_on_a_cpu_are_padded() -> None:
    engine = build_engine()
    assert engine.backend.row_padding is not None
    engine.close()


@pytest.mark.parametrize(
    ("rows", "padding"),
    [
        ([40, 50], {0: 24, 1: 14}),
        ([40, 64], {0: 24}),
        ([1, 40, 50], {1: 25, 2: 15}),  # beyond the row of an answer
        ([3, 1, 40], {2: 27}),  # beyond an answer with two draft tokens
        ([1, 65], {}),  # a complete tile beyond the row of the answer
        ([30, 45], {}),  # 15 rows beyond the shorter prompt are too few
        ([1, 1, 5], {}),
    ],
)
def test_what_prompts_have_beyond_smaller_spans_is_padded_to_a_tile(rows: list[int], padding: dict[int, int]) -> None:
    spans = [DecodeSpan(sequence, np.zeros(count), 2000, 1) for sequence, count in enumerate(rows)]
    assert RowTile(balanced_cells=1000).count_min_rows(2000) == 36
    assert RowPadding(RowTile(balanced_cells=1000)).plan(spans) == padding
