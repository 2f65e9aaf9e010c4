"""C10: driving the MTP heads by hand, and every misuse."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from afterglow.engine.speculation.mtp import session as session_module
from afterglow.engine.speculation.mtp.session import MtpSession
from afterglow.errors import InvalidArgument, UnsupportedOperation, WrongState
from afterglow.llama.batch import Batch
from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models

pytestmark = pytest.mark.native

TARGET_SETTINGS = ContextSettings(cells=1024, sequences=2, batch=64, outputs=16, threads=1, recurrent_snapshots=4)
HEAD_SETTINGS = replace(TARGET_SETTINGS, recurrent_snapshots=0)


@pytest.fixture
def contexts() -> Iterator[tuple[LlamaContext, LlamaContext]]:
    with LlamaModel.load(models.get_path("successor-mtp-75"), ModelSettings(mtp=True)) as model:
        target = LlamaContext(model, TARGET_SETTINGS)
        yield target, LlamaContext(model, HEAD_SETTINGS, mtp_target=target)


def decode(target: LlamaContext, tokens: list[int], position: int, sequence: int = 0) -> list[int]:
    """Decode tokens. Return the most likely token after each of the last eight."""
    target.batch.clear()
    target.batch.add(tokens, position=position, sequence=sequence, outputs=min(len(tokens), 8))
    target.decode()
    rows = range(max(0, len(tokens) - 8), len(tokens))
    return [int(target.get_logits(row).argmax()) for row in rows]


def test_c10_the_loop_of_decode_process_draft_verify_accept(contexts):
    target, heads = contexts
    session = MtpSession(target, heads, sequences=2, n_draft_max=4)
    prompt = target.model.vocabulary.tokenize(models.CYCLE.decode())
    generated, position, decodes = [decode(target, prompt, 0)[-1]], len(prompt), 1
    session.begin(0)
    session.process(target.batch)
    while len(generated) < 40:
        draft = session.draft({0: generated[-1]})[0]
        sampled = decode(target, [generated[-1], *draft], position)
        session.process(target.batch)
        accepted = 0
        while accepted < len(draft) and draft[accepted] == sampled[accepted]:
            accepted += 1
        session.accept(0, accepted)
        generated += sampled[: accepted + 1]
        position += accepted + 1
        decodes += 1
        assert target.memory.get_position_range(0)[1] == position - 1
        session.catch_up([0])
        assert heads.memory.get_position_range(0) == (0, position - 1)
    expected = prompt[-1]
    for token in generated:
        expected = models.get_successor(expected)
        assert token == expected
    assert decodes < 14
    assert session.stats.acceptance_rate == pytest.approx(0.75, abs=0.05)
    assert session.stats.draft_steps == decodes - 1
    assert session.stats.draft_tokens >= 30


def test_c10_several_sequences_are_drafted_for_in_one_batch(contexts):
    target, heads = contexts
    session = MtpSession(target, heads, sequences=2, n_draft_max=3)
    vocabulary = target.model.vocabulary
    target.batch.clear()
    target.batch.add(vocabulary.tokenize("abcdefg"), position=0, sequence=0, outputs=1)
    target.batch.add(vocabulary.tokenize("pqr"), position=0, sequence=1, outputs=1)
    target.decode()
    session.process(target.batch)
    before = heads.decode_count
    drafts = session.draft({0: vocabulary.tokenize("h")[0], 1: vocabulary.tokenize("s")[0]}, {1: 2})
    assert heads.decode_count - before == 1 + 3  # the backlog of both, and three draft steps
    assert [bytes(vocabulary.detokenize(draft)) for draft in drafts.values()] == [b"jkl", b"tv"]  # wrong after h and t


def test_c10_the_settings_can_be_read_back(contexts):
    session = MtpSession(*contexts, sequences=1, n_draft_max=2, n_min=1, p_min=0.25)
    settings = session.settings
    assert (settings.sequences, settings.n_draft_max, settings.n_min, settings.p_min) == (1, 2, 1, 0.25)
    assert (settings.need_embd, settings.need_embd_pre_norm) == (False, True)
    defaults = MtpSession(*contexts, sequences=2, n_draft_max=3).settings
    assert (defaults.n_min, defaults.p_min) == (0, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("sequences", 0), ("sequences", 3), ("n_draft_max", 0), ("n_draft_max", 5), ("n_min", 9), ("p_min", 2.0)],
)
def test_c10_an_invalid_setting_is_named(contexts, name, value):
    with pytest.raises(InvalidArgument, match=name):
        MtpSession(*contexts, **{"sequences": 1, "n_draft_max": 2} | {name: value})


def test_c10_a_token_below_the_minimum_probability_ends_the_draft():
    with LlamaModel.load(models.get_path("hybrid-mtp"), ModelSettings(mtp=True)) as model:
        target = LlamaContext(model, TARGET_SETTINGS)
        heads = LlamaContext(model, HEAD_SETTINGS, mtp_target=target)
        session = MtpSession(target, heads, sequences=1, n_draft_max=3, p_min=0.99)
        decode(target, model.vocabulary.tokenize("abc"), 0)
        session.process(target.batch)
        assert session.draft({0: 30}) == {0: []}
        session.accept(0, 0)  # an empty draft is accepted with 0
        assert session.stats.draft_tokens == 0
        assert len(MtpSession(target, heads, sequences=1, n_draft_max=3).draft({0: 30})[0]) == 3


def test_c10_a_draft_shorter_than_the_minimum_is_dropped(contexts):
    target, _ = contexts
    session = MtpSession(*contexts, sequences=1, n_draft_max=3, n_min=2)
    decode(target, target.model.vocabulary.tokenize("abc"), 0)
    session.process(target.batch)
    assert session.draft({0: 30}, {0: 1}) == {0: []}


def test_c10_every_misuse_is_a_typed_error(contexts):
    target, heads = contexts
    session = MtpSession(target, heads, sequences=1, n_draft_max=2)
    with pytest.raises(WrongState, match="process"):
        session.process(target.batch)
    with pytest.raises(WrongState, match="draft"):
        session.draft({0: 30})
    with pytest.raises(WrongState, match="accept"):
        session.accept(0, 0)
    decode(target, [30, 31, 32], 0)
    session.process(target.batch)
    with pytest.raises(WrongState, match="processed already"):
        session.process(target.batch)
    for call in (lambda: session.begin(1), lambda: session.draft({1: 30}), lambda: session.accept(-1, 0)):
        with pytest.raises(InvalidArgument, match="sequence"):
            call()
    with pytest.raises(InvalidArgument, match="token"):
        session.draft({0: 10**6})
    with pytest.raises(InvalidArgument, match="limit"):
        session.draft({0: 30}, {0: 3})
    draft = session.draft({0: 33})[0]
    decode(target, [33, *draft], 3)
    with pytest.raises(WrongState, match="not processed"):
        session.accept(0, 0)
    session.process(target.batch)
    with pytest.raises(InvalidArgument, match="count"):
        session.accept(0, 3)
    session.accept(0, 0)
    assert target.memory.get_position_range(0) == (3, 3)  # a hybrid model's: only the newest recurrent state
    session.catch_up([0])
    assert heads.memory.get_position_range(0) == (0, 3)


def test_c10_contexts_that_do_not_belong_together_are_rejected(contexts):
    target, heads = contexts
    with pytest.raises(InvalidArgument, match="mtp_target"):
        MtpSession(target, target, sequences=1, n_draft_max=2)
    with pytest.raises(UnsupportedOperation, match="heads"):
        MtpSession(heads, heads, sequences=1, n_draft_max=2)
    with LlamaModel.load(models.get_path("successor-hybrid")) as plain, LlamaContext(plain, TARGET_SETTINGS) as context:
        with pytest.raises(UnsupportedOperation, match="no MTP heads"):
            MtpSession(context, heads, sequences=1, n_draft_max=2)
        with pytest.raises(UnsupportedOperation, match="no MTP heads"):
            LlamaContext(plain, TARGET_SETTINGS, mtp_target=context)
    small = LlamaContext(target.model, replace(HEAD_SETTINGS, batch=32), mtp_target=target)
    with pytest.raises(InvalidArgument, match="rows"):
        MtpSession(target, small, sequences=1, n_draft_max=2)


def test_c10_the_heads_read_the_batch_that_was_decoded_and_not_the_one_of_the_context(contexts):
    target, heads = contexts
    vocabulary = target.model.vocabulary
    session = MtpSession(target, heads, sequences=2, n_draft_max=3)
    decode(target, vocabulary.tokenize("pqrstuv"), 0, sequence=1)  # stays in the batch of the context
    session.process(target.batch)
    own = Batch(16)
    own.add(vocabulary.tokenize("abcdefg"), position=0, sequence=0, outputs=1)
    target.decode(own)
    session.process(own)
    assert session.count_backlog(0) == session.count_backlog(1) == 7
    draft = session.draft({0: vocabulary.tokenize("h")[0]})[0]
    assert vocabulary.detokenize(draft) == b"jkl"  # wrong after h
    assert heads.memory.get_position_range(0) == (0, 6)


def test_c10_a_batch_with_other_rows_than_the_last_decode_is_rejected_and_changes_nothing(contexts):
    target, heads = contexts
    session = MtpSession(target, heads, sequences=1, n_draft_max=2)
    decode(target, [30, 31, 32], 0)
    with pytest.raises(InvalidArgument, match="has 0 rows, the target's last decode had 3"):
        session.process(Batch(16))
    assert session.count_backlog(0) == 0
    session.process(target.batch)
    assert session.count_backlog(0) == 3


def test_c10_rows_of_one_sequence_must_be_contiguous(contexts):
    target, heads = contexts
    session = MtpSession(target, heads, sequences=2, n_draft_max=2)
    target.batch.clear()
    target.batch.add([30], position=0, sequence=0, outputs=1)
    target.batch.add([31], position=0, sequence=1, outputs=1)
    target.batch.add([32], position=1, sequence=0, outputs=1)
    target.decode()
    with pytest.raises(InvalidArgument, match="one after the other"):
        session.process(target.batch)


def test_c10_stats_are_logged(contexts, caplog):
    target, _ = contexts
    session = MtpSession(*contexts, sequences=1, n_draft_max=2)
    decode(target, target.model.vocabulary.tokenize("abc"), 0)
    session.process(target.batch)
    draft = session.draft({0: target.model.vocabulary.tokenize("d")[0]})[0]
    decode(target, [target.model.vocabulary.tokenize("d")[0], *draft], 3)
    session.process(target.batch)
    with caplog.at_level(logging.DEBUG, "afterglow.engine.speculation.mtp"):
        session.accept(0, len(draft))
    assert "accepted_tokens=2" in caplog.text


def test_heads_compute_nothing_until_a_draft_is_requested_and_then_the_newest_entries(contexts, monkeypatch):
    monkeypatch.setattr(session_module, "MAX_BACKLOG_ENTRIES", 20)
    target, heads = contexts
    session = MtpSession(target, heads, sequences=1, n_draft_max=2)
    tokens = target.model.vocabulary.tokenize(models.CYCLE.decode())[:20]
    decode(target, tokens, 0)
    session.process(target.batch)
    for position in range(20, 60):
        tokens.append(models.get_successor(tokens[-1]))
        decode(target, tokens[-1:], position)
        session.process(target.batch)
    assert heads.decode_count == 0
    assert session.draft({0: models.get_successor(tokens[-1])})[0]
    assert heads.memory.get_position_range(0) == (40, 59)
    assert heads.decode_count == 3
