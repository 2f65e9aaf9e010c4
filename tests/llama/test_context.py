"""Contexts: decode, outputs, interruption, embeddings, adapters, MTP."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from afterglow.errors import (
    Cancelled,
    Closed,
    InvalidArgument,
    InvalidModel,
    KVCacheFull,
    ModelNotFound,
    UnsupportedOperation,
)
from afterglow.llama.context import LlamaContext
from afterglow.llama.handle import list_open_handles
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.model import LlamaModel
from afterglow.testing import models
from support.contexts import distance, feed, tokens


def test_a_successor_model_says_the_known_next_token(open_context):
    context = open_context("successor-hybrid")
    ids = context.model.vocabulary.tokenize(models.CYCLE.decode() * 2)
    assert int(feed(context, 0, ids).argmax()) == models.get_successor(ids[-1])


def test_several_sequences_share_one_decode(open_context):
    alone, together = open_context("attention"), open_context("attention")
    expected = [feed(alone, 0, tokens(10)), feed(alone, 1, tokens(8, seed=1))]
    together.batch.add(tokens(10), position=0, sequence=0, outputs=1)
    together.batch.add(tokens(8, seed=1), position=0, sequence=1, outputs=1)
    together.decode()
    assert together.decode_count == 1
    assert distance(together.get_logits(9), expected[0]) < 5e-3
    assert distance(together.get_logits(17), expected[1]) < 5e-3


def test_logits_are_a_view_and_not_a_copy(open_context):
    context = open_context("attention")
    feed(context, 0, tokens(5))
    assert np.shares_memory(context.get_logits(4), context.get_logits(4))


def test_full_memory_is_an_error_that_changes_nothing(open_context):
    context = open_context("attention", cells=256, sequences=1)
    feed(context, 0, tokens(250))
    context.batch.clear()
    context.batch.add(tokens(10), position=250, sequence=0, outputs=1)
    with pytest.raises(KVCacheFull) as caught:
        context.decode()
    assert (caught.value.rows, caught.value.cells) == (10, 256)
    assert context.memory.get_position_range(0) == (0, 249)


def test_a_decode_can_be_interrupted_from_another_thread(open_model, open_context):
    model = open_model("attention")
    context = open_context(model, cells=8192, sequences=1, batch=4096, ubatch=4096)
    context.batch.add(tokens(4000), position=0, sequence=0, outputs=1)
    started = time.perf_counter()
    context.decode()
    whole = time.perf_counter() - started
    context.memory.clear()
    threading.Timer(whole / 10, context.interrupt).start()
    started = time.perf_counter()
    with pytest.raises(Cancelled):
        context.decode()
    assert time.perf_counter() - started < whole
    assert context.memory.get_position_range(0) is None
    context.decode()  # and the next one runs


def test_closing_a_model_closes_what_was_made_from_it(open_model, open_context):
    model = open_model("attention")
    context = open_context(model)
    feed(context, 0, tokens(5))
    model.close()
    assert context.closed
    assert not [handle for handle in list_open_handles() if handle in (model, context)]
    for use in (context.decode, lambda: context.memory.get_position_range(0), lambda: model.vocabulary.tokenize("a")):
        context.batch.clear()
        context.batch.add([30], position=0, sequence=0)
        with pytest.raises(Closed):
            use()
    model.close()  # twice is allowed


def test_a_pooled_embedding_tells_sentences_apart(open_context):
    context = open_context("embedding", embeddings=True, batch=128, ubatch=128, cells=512)
    vocabulary = context.model.vocabulary
    rows = [vocabulary.tokenize(text, add_special=True) for text in ("the cat sat", "a dog is on the mat")]
    for sequence, row in enumerate(rows):
        context.batch.add(row, position=0, sequence=sequence, outputs=len(row))
    context.decode()
    one, other = context.get_embedding(sequence=0), context.get_embedding(sequence=1)
    assert one.shape == (64,)
    assert distance(one, other) > 0.01
    assert np.isfinite(one).all()


def test_a_generating_model_gives_embeddings_of_rows_too(open_context):
    context = open_context("attention", embeddings=True, pooling="none", outputs=64)
    context.batch.add(tokens(10), position=0, sequence=0)
    context.decode()
    assert context.get_embedding(row=3).shape == (64,)
    with pytest.raises(UnsupportedOperation, match="does not pool"):
        context.get_embedding(sequence=0)


def test_embeddings_must_be_asked_for_when_the_context_is_made(open_context):
    context = open_context("attention")
    feed(context, 0, tokens(3))
    with pytest.raises(UnsupportedOperation, match="without `embeddings`"):
        context.get_embedding(row=2)


def test_an_adapter_changes_the_logits_and_taking_it_away_changes_them_back(open_model, open_context):
    model = open_model("attention")
    context = open_context(model)
    plain = feed(context, 0, tokens(10))
    adapter = LoraAdapter.load(model, models.get_path("adapter"))
    effects = []
    for scale in (1.0, 0.5, 0.0):
        context.set_adapters({adapter: scale})
        context.memory.clear()
        effects.append(distance(feed(context, 0, tokens(10)), plain))
    assert effects[0] > effects[1] > effects[2] == 0.0
    context.set_adapters({adapter: 1.0})
    adapter.close()  # while applied: the context goes on without it
    context.memory.clear()
    assert distance(feed(context, 0, tokens(10)), plain) == 0.0


def test_an_adapter_that_does_not_fit_is_refused(open_model, tmp_path):
    with pytest.raises(InvalidModel):
        LoraAdapter.load(open_model("recurrent"), models.get_path("adapter"))
    with pytest.raises(ModelNotFound):
        LoraAdapter.load(open_model("attention"), tmp_path / "none.gguf")


def test_an_mtp_head_drafts_the_token_known_by_construction(open_model, open_context, stack):
    model = open_model("successor-mtp", mtp=True)
    target = open_context(model, recurrent_snapshots=3)
    heads = stack.enter_context(LlamaContext(model, target.settings, mtp_target=target))
    target.enable_hidden_states(every_row=True)
    heads.enable_hidden_states(every_row=False)
    ids = model.vocabulary.tokenize(models.CYCLE.decode())
    for count in (5, 11, 20):
        target.memory.clear()
        heads.memory.clear()
        feed(target, 0, ids[:count])
        heads.batch.clear()
        heads.batch.add([ids[count - 1]], position=count, sequence=0, outputs=1)
        heads.batch.hidden_states[0] = target.get_hidden_state(count - 1)
        heads.decode()
        assert int(heads.get_logits(0).argmax()) == models.get_successor(ids[count - 1])


def test_a_rollback_is_what_the_architecture_gives(open_context):
    assert open_context("hybrid", recurrent_snapshots=4).max_rollback == 4
    assert open_context("recurrent", recurrent_snapshots=4).max_rollback == 0  # silently clamped, so it is read back


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(ModelNotFound, match="no such file"):
        LlamaModel.load(tmp_path / "nothing.gguf")


def test_a_batch_refuses_more_than_it_holds(open_context):
    context = open_context("attention", batch=8)
    with pytest.raises(InvalidArgument, match="8 fit"):
        context.batch.add(tokens(9), position=0, sequence=0)
    assert context.batch.count == 0
