"""Laws of the last logits: a repeat of a prompt computes nothing, and its completion is the same to the last bit."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.types.request import Token
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.llama_engines import build_spec
from support.play import KINDS, LAYOUTS, Answer, ask, collect, fake, prompt, reference, request
from support.truth import check_all, check_last_logits, run_checked

everywhere = pytest.mark.parametrize("kv_unified", LAYOUTS)
every_kind = pytest.mark.parametrize("kind", KINDS)
PROMPT = prompt(90, 1)
SETTINGS = EngineSettings(block_size=8, ram_cache_bytes=10**7, speculation="off")


def ask_counted(engine: Engine, entries: list[int], **options) -> tuple[Answer, int]:
    """Run a request; return its answer and the rows that were decoded for its prompt."""
    rows = engine.counters.rows
    answer = ask(engine, entries, **options)
    decoded = max(len(answer.tokens) - 1, 0)
    return answer, engine.counters.rows - rows - decoded


def check_repeat(engine: Engine, entries: list[int], first: Answer, **options) -> None:
    """Check that a repeat computes nothing and equals the first completion to the last bit."""
    skipped = engine.counters.skipped_prefills
    answer, rows = ask_counted(engine, entries, logprobs=5, **options)
    assert rows == 0
    assert answer.cached == len(entries)
    assert engine.counters.skipped_prefills == skipped + 1
    assert (answer.tokens, answer.logprobs) == (first.tokens, first.logprobs)
    assert answer.end.usage.prefill_seconds < 60


@every_kind
def test_the_first_token_of_a_repeat_is_delivered_before_a_decode(kind):
    engine = fake(kind, SETTINGS)
    first = ask(engine, PROMPT)
    decodes = engine.counters.decodes
    engine.submit(request("again", PROMPT))
    events = engine.step()
    assert [event.token for event in events if isinstance(event, Token)] == [first.tokens[0]]
    assert engine.counters.decodes == decodes


@everywhere
@every_kind
def test_a_request_that_lost_its_sequence_continues_from_stored_logits(kind, kv_unified):
    engine = fake(kind, SETTINGS, kv_unified=kv_unified)
    options = {"max_tokens": 8, "ignore_eos": True}
    answers: dict[str, Answer] = {}
    engine.submit(request("first", PROMPT, **options))
    while not answers.get("first", Answer()).tokens:
        collect(answers, engine)
    (running,) = engine.running_jobs
    running.sequence.clear()
    engine._requeue(running)
    waiting = engine._waiting.popleft()  # it resumes when another prompt has computed all that it needs
    known = [*PROMPT, *answers["first"].tokens]
    engine.submit(request("second", known, **options))
    while answers.get("second", Answer()).end is None:
        collect(answers, engine)
    engine._waiting.append(waiting)
    skipped = engine.counters.skipped_prefills
    for _ in range(20):
        collect(answers, engine)
        check_all(engine)
    assert answers["first"].tokens == reference(lambda: fake(kind), PROMPT, **options)
    assert engine.counters.skipped_prefills == skipped + 1


@everywhere
@every_kind
def test_a_repeat_computes_nothing(kind, kv_unified):
    engine = fake(kind, SETTINGS, kv_unified=kv_unified)
    first, _ = ask_counted(engine, PROMPT, logprobs=5)
    assert first.tokens == reference(lambda: fake(kind), PROMPT)
    for _ in range(2):
        check_repeat(engine, PROMPT, first)
        check_all(engine)


@everywhere
@every_kind
def test_a_regenerated_answer_computes_nothing_after_a_further_turn(kind, kv_unified):
    engine = fake(kind, SETTINGS, kv_unified=kv_unified)
    first = ask(engine, PROMPT, logprobs=5)
    ask(engine, [*PROMPT, *first.tokens, *prompt(30, 2)])
    check_repeat(engine, PROMPT, first)


@everywhere
@every_kind
def test_a_repeat_computes_nothing_after_the_sequence_left_the_device(kind, kv_unified):
    engine = fake(kind, SETTINGS, kv_unified=kv_unified, sequences=1)
    first = ask(engine, PROMPT, logprobs=5)
    for seed in range(3):
        ask(engine, prompt(80, 10 + seed))
    check_repeat(engine, PROMPT, first)
    assert engine.prefix_cache.store.ram.counters.hits > 0
    check_all(engine)


@every_kind
def test_a_repeat_computes_nothing_after_a_restart(kind):
    with tempfile.TemporaryDirectory() as folder:
        settings = replace(SETTINGS, disk_cache_directory=Path(folder, "cache"))
        engine = fake(kind, settings)
        first = ask(engine, PROMPT, logprobs=5)
        engine.close()
        for _ in range(2):
            engine = fake(kind, settings)
            check_repeat(engine, PROMPT, first)
            check_last_logits(engine)
            assert engine.prefix_cache.store.disk_tier.counters.hits == 1
            engine.close()


@pytest.mark.parametrize("damage", ["flipped bit", "other entries", "too short", "missing"])
def test_damaged_logits_on_disk_are_computed_again(damage):
    with tempfile.TemporaryDirectory() as folder:
        settings = replace(SETTINGS, disk_cache_directory=Path(folder, "cache"))
        engine = fake("hybrid", settings)
        first = ask(engine, PROMPT)
        engine.close()
        (path,) = Path(folder).rglob("*.logits")
        damage_file(path, damage)
        engine = fake("hybrid", settings)
        answer, rows = ask_counted(engine, PROMPT)
        assert answer.tokens == first.tokens
        assert 0 < rows < len(PROMPT)
        check_last_logits(engine)
        engine.close()


def damage_file(path: Path, damage: str) -> None:
    loaded = disk_files.load_file(path)
    if damage == "flipped bit":
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    elif damage == "other entries":
        entries = loaded.file.entries.copy()
        entries[0] += 1
        disk_files.write_file(path.parent, replace(loaded.file, entries=entries, payload=[loaded.payload]))
    elif damage == "too short":
        disk_files.write_file(path.parent, replace(loaded.file, payload=[loaded.payload[:-4]]))
    else:
        path.unlink()


@every_kind
def test_without_its_logits_a_repeat_computes_the_last_entry(kind):
    engine = fake(kind, SETTINGS)
    first = ask(engine, PROMPT)
    (last_logits,) = [found for found in engine.prefix_cache.store.ram.logits if len(found.entries) == len(PROMPT)]
    engine.prefix_cache.store.ram.logits.drop(last_logits)
    answer, rows = ask_counted(engine, PROMPT)
    assert answer.tokens == first.tokens
    assert 1 <= rows < len(PROMPT)
    assert engine.counters.skipped_prefills == 0
    check_repeat(engine, PROMPT, ask(engine, PROMPT, logprobs=5))


@every_kind
def test_without_its_cells_a_repeat_is_computed_again(kind):
    engine = fake(kind, replace(SETTINGS, checkpoints=CheckpointSettings(max_checkpoints=0)))
    first = ask(engine, PROMPT)
    for slot in engine.prefix_cache.slots:
        engine.prefix_cache.discard(slot)
    answer, rows = ask_counted(engine, PROMPT)
    assert rows == len(PROMPT)
    assert answer.tokens == first.tokens


def test_logits_stay_within_their_bytes():
    for nbytes in (0, 3_000, 40_000, 100_000):
        engine = fake("hybrid", replace(SETTINGS, ram_cache_bytes=nbytes), sequences=2)
        for seed in range(12):
            ask(engine, prompt(40, seed))
            check_all(engine)
        assert engine.prefix_cache.store.ram.budget.get("logits") <= nbytes / 16


def test_logits_of_a_prompt_that_is_too_long_evict_no_others():
    engine = fake("attention", replace(SETTINGS, ram_cache_bytes=100_000))
    first = ask(engine, PROMPT, logprobs=5)
    ask(engine, prompt(1000, 5), max_tokens=1)  # its entries alone exceed the limit of all logits
    check_repeat(engine, PROMPT, first)


@every_kind
def test_logits_are_not_shared_between_salts(kind):
    engine = fake(kind, SETTINGS)
    ask(engine, PROMPT, salt="one")
    answer, rows = ask_counted(engine, PROMPT, salt="other")
    assert (answer.cached, rows) == (0, len(PROMPT))


@every_kind
def test_prompts_with_a_common_prefix_have_logits_of_their_own(kind):
    engine = fake(kind, SETTINGS)
    prompts = [PROMPT[:60], PROMPT[:61], PROMPT, [*PROMPT[:60], *prompt(30, 5)], PROMPT[:30]]
    first = [ask(engine, entries, logprobs=5) for entries in prompts]
    for entries, answer in zip(prompts, first, strict=True):
        assert answer.tokens == reference(lambda: fake(kind), entries)
        check_repeat(engine, entries, answer)


@every_kind
def test_a_drawn_completion_and_one_without_tokens_can_be_repeated(kind):
    engine = fake(kind, SETTINGS)
    drawn = {"sampling": Sampling(temperature=0.9, seed=7)}
    first = ask(engine, PROMPT, logprobs=5, **drawn)
    check_repeat(engine, PROMPT, first, **drawn)
    warmed, rows = ask_counted(engine, PROMPT, max_tokens=0)
    assert (warmed.tokens, rows, warmed.reason) == ([], 0, "length")


@everywhere
@every_kind
def test_repeats_at_once_beside_other_requests_change_no_token(kind, kv_unified):
    engine = fake(kind, SETTINGS, kv_unified=kv_unified)
    first = ask(engine, PROMPT)
    requests = [request(str(number), PROMPT) for number in range(6)]
    answers = run_checked(engine, *requests, request("other", prompt(70, 9)))
    assert all(answers[submitted.id].tokens == first.tokens for submitted in requests)
    assert all(answers[submitted.id].cached == len(PROMPT) for submitted in requests)


@every_kind
def test_a_transient_prompt_keeps_no_logits(kind):
    engine = fake(kind, SETTINGS)
    ask(engine, PROMPT, is_transient=True)
    assert len(engine.prefix_cache.store.ram.logits) == 0


@every_kind
def test_forgotten_prompts_leave_no_logits(kind):
    with tempfile.TemporaryDirectory() as folder:
        engine = fake(kind, replace(SETTINGS, disk_cache_directory=Path(folder, "cache")))
        ask(engine, PROMPT)
        ask(engine, [*PROMPT[:20], *prompt(40, 3)])
        while engine.run_idle_task():
            pass
        engine.prefix_cache.store.flush(10)
        engine.prefix_cache.store.refresh()
        assert len(list(Path(folder).rglob("*.logits"))) == 2
        engine.prefix_cache.forget(np.array(PROMPT), 20, "")
        engine.prefix_cache.store.flush(10)
        assert [len(found.entries) for found in engine.prefix_cache.store.ram.logits] == [60]
        assert len(list(Path(folder).rglob("*.logits"))) == 1
        check_all(engine)
        engine.close()


@pytest.mark.parametrize("length", [64, 90])
@every_kind
def test_in_deterministic_mode_repeats_are_equal_to_the_last_bit(kind, length):
    def make() -> Engine:
        return fake(
            kind, replace(SETTINGS, deterministic=True, grid=32, block_size=32), batch_cells=64, simulate_rounding=True
        )

    engine = make()
    first = ask(engine, PROMPT[:length], logprobs=5)
    longer = [*PROMPT[:length], *prompt(40, 3)]
    second = ask(engine, longer, logprobs=5)
    cold = ask(make(), longer, logprobs=5)
    assert (second.tokens, second.logprobs) == (cold.tokens, cold.logprobs)
    answer = ask(engine, PROMPT[:length], logprobs=5)
    assert (answer.tokens, answer.logprobs) == (first.tokens, first.logprobs)


# --- llama.cpp


@pytest.mark.native
@every_kind
def test_a_repeat_on_llama_equals_the_first_completion_to_the_last_bit(kind, tmp_path):
    spec = EngineSpec(
        path=models.get_path(kind),
        context_settings=ContextSettings(cells=1024, sequences=2, batch=64, ubatch=32, threads=1),
        engine_settings=EngineSettings(speculation="off", block_size=16, disk_cache_directory=tmp_path / "cache"),
    )
    entries = [int(token) for token in np.random.default_rng(3).integers(20, 250, 150)]
    options = {"max_tokens": 6, "ignore_eos": True}
    engine = spec()
    first = ask(engine, entries, logprobs=5, **options)
    check_repeat(engine, entries, first, **options)
    ask(engine, entries[:70], **options)
    check_repeat(engine, entries, first, **options)
    engine.close()
    engine = spec()
    answer, rows = ask_counted(engine, entries, logprobs=5, **options)
    engine.close()
    assert rows == 0
    assert (answer.tokens, answer.logprobs) == (first.tokens, first.logprobs)


@pytest.mark.native
@pytest.mark.parametrize("drafter", ["ngram", "draft", "mtp"])
def test_a_repeat_with_a_drafter_changes_no_token(drafter):
    engine = build_spec("attention", drafter, kv_unified=False)()
    entries = [int(token) for token in np.random.default_rng(4).integers(20, 250, 100)]
    options = {"max_tokens": 12, "ignore_eos": True}
    first = ask(engine, entries, **options)
    for _ in range(2):
        answer = ask(engine, entries, **options)
        assert answer.tokens == first.tokens
        assert (answer.cached == len(entries)) == (drafter != "mtp")  # MTP heads need hidden states
    assert engine.counters.skipped_prefills == (0 if drafter == "mtp" else 2)
    engine.close()
