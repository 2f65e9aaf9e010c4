"""The memory of a model is probed at load; unknown behaviour is treated as the weakest kind."""

from __future__ import annotations

import logging

import pytest

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.llama import kv_probe
from afterglow.llama.kv_probe import MemoryAbilities, confirm_memory_kind, probe_memory
from afterglow.llama.library.loader import get_library
from laws.test_engine_on_llama import check_tokens, random_prompt, run_cold
from support.contexts import KV_LAYOUTS, MEMORY_KINDS, decode_tokens, max_difference, random_tokens
from support.play import ask, play, request

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path, monkeypatch):
    """No model was probed before."""
    monkeypatch.setattr(kv_probe, "get_cache_directory", lambda name: tmp_path / name)


@pytest.mark.parametrize("snapshots", [0, 4])
@pytest.mark.parametrize("sequences", [1, 2, 4])
@pytest.mark.parametrize("unified", KV_LAYOUTS)
@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_every_known_kind_is_confirmed(open_context, kind, unified, sequences, snapshots):
    context = open_context(kind, kv_unified=unified, sequences=sequences, recurrent_snapshots=snapshots)
    abilities = probe_memory(context)
    assert abilities == MemoryAbilities(
        trim=kind in ("attention", "window") or context.max_rollback > 0,
        copy=True,
        partial_state=kind != "attention",
        shift=context.memory.can_shift,
    )
    confirm_memory_kind(context)
    assert context.memory.kind == kind


@pytest.mark.parametrize("unified", KV_LAYOUTS)
@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_the_probe_is_a_few_small_decodes_and_leaves_nothing(open_context, kind, unified):
    context = open_context(kind, kv_unified=unified, recurrent_snapshots=4)
    untouched = open_context(kind, kv_unified=unified, recurrent_snapshots=4)
    probe_memory(context)
    assert context.decode_count <= 5
    assert [context.memory.get_position_range(sequence) for sequence in (0, 1)] == [None, None]
    assert context.state.size(0) == untouched.state.size(0)
    tokens = random_tokens(60)
    assert max_difference(decode_tokens(context, 1, tokens), decode_tokens(untouched, 1, tokens)) == 0.0


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_a_model_that_was_confirmed_is_not_probed_again(open_context, kind):
    for is_known in (False, True):
        context = open_context(kind)
        confirm_memory_kind(context)
        assert (context.decode_count == 0) == is_known
        assert context.memory.kind == kind
    other = open_context(kind, sequences=3)  # with other settings it is
    confirm_memory_kind(other)
    assert other.decode_count > 0


def refuse_truncation(symbols, monkeypatch) -> None:
    original = symbols.llama_memory_seq_rm
    monkeypatch.setattr(
        symbols,
        "llama_memory_seq_rm",
        lambda memory, sequence, first, last: first <= 0 and original(memory, sequence, first, last),
    )


def ignore_truncation(symbols, monkeypatch) -> None:
    original = symbols.llama_memory_seq_rm
    monkeypatch.setattr(
        symbols,
        "llama_memory_seq_rm",
        lambda memory, sequence, first, last: first > 0 or original(memory, sequence, first, last),
    )


def ignore_copies(symbols, monkeypatch) -> None:
    monkeypatch.setattr(symbols, "llama_memory_seq_cp", lambda *_: None)


def ignore_partial_states(symbols, monkeypatch) -> None:
    original = symbols.llama_state_seq_set_data_ext
    monkeypatch.setattr(
        symbols,
        "llama_state_seq_set_data_ext",
        lambda context, data, size, sequence, flags: size if flags else original(context, data, size, sequence, flags),
    )


def test_a_memory_that_computes_wrong_results_after_a_shift_does_not_offer_it(open_context, monkeypatch):
    context = open_context("attention")
    symbols, original = get_library().symbols, get_library().symbols.llama_memory_seq_add
    monkeypatch.setattr(  # the first two tokens stay where they are
        symbols,
        "llama_memory_seq_add",
        lambda memory, sequence, _, last, delta: original(memory, sequence, 2, last, delta),
    )
    assert context.memory.can_shift
    confirm_memory_kind(context)
    assert not context.memory.can_shift
    assert context.memory.kind == "attention"


UNKNOWN = [
    ("attention", refuse_truncation),
    ("attention", ignore_truncation),
    ("attention", ignore_copies),
    ("window", refuse_truncation),
    ("hybrid", ignore_copies),
    ("hybrid", ignore_partial_states),
]


@pytest.mark.parametrize(("kind", "misbehave"), UNKNOWN)
def test_unknown_behaviour_is_treated_as_the_weakest_kind_and_changes_no_token(
    open_context, monkeypatch, tmp_path, caplog, kind, misbehave
):
    """Prompts are still reused: sequences continue at their end, and checkpoints are whole states."""
    layout = {"kv_unified": True, "sequences": 3, "recurrent_snapshots": 4, "batch": 64}
    cold = Engine(LlamaBackend(open_context(kind, **layout)), EngineSettings(speculation="off"))
    for confirmed in tmp_path.rglob("memory-*"):
        confirmed.unlink()
    context = open_context(kind, **layout)
    misbehave(get_library().symbols, monkeypatch)
    with caplog.at_level(logging.WARNING):
        backend = LlamaBackend(context)
    assert "does not behave as the kind" in caplog.text
    assert context.memory.kind == backend.capabilities.memory_kind == "recurrent"
    assert not list(tmp_path.rglob("memory-*"))
    checkpoints = CheckpointSettings(min_tokens=8, min_gap=8)
    engine = Engine(backend, EngineSettings(checkpoints=checkpoints, speculation=4, drafters=("ngram",)))
    system = random_prompt(100, 1)
    requests = [request(str(n), system + random_prompt(20, 2 + n), boundaries=frozenset({100})) for n in range(3)]
    answers = play(engine, *requests)
    again = ask(engine, requests[0].entries + answers["0"].tokens + [40, 41], boundaries=frozenset({100}))
    monkeypatch.undo()
    for req in requests:
        check_tokens(answers[req.id], *run_cold(cold, req.entries))
    check_tokens(again, *run_cold(cold, requests[0].entries + answers["0"].tokens + [40, 41]))
    assert sorted(answer.cached for answer in answers.values()) == [0, 100, 100]
    assert again.cached >= 120
