"""Contexts: decode, outputs, interrupts, embeddings, adapters, MTP."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest

from afterglow.errors import (
    AfterglowError,
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
from support.contexts import decode_tokens, max_difference, random_tokens

pytestmark = pytest.mark.native


def test_a_successor_model_predicts_the_known_next_token(open_context):
    context = open_context("successor-hybrid")
    tokens = context.model.vocabulary.tokenize(models.CYCLE.decode() * 2)
    assert int(decode_tokens(context, 0, tokens).argmax()) == models.get_successor(tokens[-1])


def test_several_sequences_share_one_decode(open_context):
    alone, together = open_context("attention"), open_context("attention")
    expected = [decode_tokens(alone, 0, random_tokens(10)), decode_tokens(alone, 1, random_tokens(8, seed=1))]
    together.batch.add(random_tokens(10), position=0, sequence=0, outputs=1)
    together.batch.add(random_tokens(8, seed=1), position=0, sequence=1, outputs=1)
    together.decode()
    assert together.decode_count == 1
    assert max_difference(together.get_logits(9), expected[0]) < 5e-3
    assert max_difference(together.get_logits(17), expected[1]) < 5e-3


def test_logits_are_a_view_and_not_a_copy(open_context):
    context = open_context("attention")
    decode_tokens(context, 0, random_tokens(5))
    assert np.shares_memory(context.get_logits(4), context.get_logits(4))


def test_a_full_kv_cache_is_an_error_that_changes_nothing(open_context):
    context = open_context("attention", cells=256, sequences=1)
    decode_tokens(context, 0, random_tokens(250))
    context.batch.clear()
    context.batch.add(random_tokens(10), position=250, sequence=0, outputs=1)
    with pytest.raises(KVCacheFull) as caught:
        context.decode()
    assert (caught.value.rows, caught.value.cells) == (10, 256)
    assert context.memory.get_position_range(0) == (0, 249)


def test_a_decode_can_be_interrupted_from_another_thread(open_model, open_context):
    model = open_model("attention")
    context = open_context(model, cells=8192, sequences=1, batch=4096, ubatch=4096)
    context.batch.add(random_tokens(4000), position=0, sequence=0, outputs=1)
    started = time.perf_counter()
    context.decode()
    full_seconds = time.perf_counter() - started
    context.memory.clear()
    threading.Timer(full_seconds / 10, context.interrupt).start()
    started = time.perf_counter()
    with pytest.raises(Cancelled):
        context.decode()
    assert time.perf_counter() - started < full_seconds
    assert context.memory.get_position_range(0) is None
    context.decode()  # the next decode runs


def test_closing_a_model_closes_its_contexts(open_model, open_context):
    model = open_model("attention")
    context = open_context(model)
    decode_tokens(context, 0, random_tokens(5))
    model.close()
    assert context.closed
    assert not [handle for handle in list_open_handles() if handle in (model, context)]
    for use in (context.decode, lambda: context.memory.get_position_range(0), lambda: model.vocabulary.tokenize("a")):
        context.batch.clear()
        context.batch.add([30], position=0, sequence=0)
        with pytest.raises(Closed):
            use()
    model.close()  # twice is allowed


def test_pooled_embeddings_of_different_sentences_differ(open_context):
    context = open_context("embedding", embeddings=True, batch=128, ubatch=128, cells=512)
    vocabulary = context.model.vocabulary
    rows = [vocabulary.tokenize(text, add_special=True) for text in ("the cat sat", "a dog is on the mat")]
    for sequence, row in enumerate(rows):
        context.batch.add(row, position=0, sequence=sequence, outputs=len(row))
    context.decode()
    first, second = context.get_embedding(sequence=0), context.get_embedding(sequence=1)
    assert first.shape == (64,)
    assert max_difference(first, second) > 0.01
    assert np.isfinite(first).all()


def test_a_generative_model_gives_embeddings_of_rows(open_context):
    context = open_context("attention", embeddings=True, pooling="none", outputs=64)
    context.batch.add(random_tokens(10), position=0, sequence=0)
    context.decode()
    assert context.get_embedding(row=3).shape == (64,)
    with pytest.raises(UnsupportedOperation, match="does not pool"):
        context.get_embedding(sequence=0)


def test_embeddings_must_be_enabled_in_the_settings(open_context):
    context = open_context("attention")
    decode_tokens(context, 0, random_tokens(3))
    with pytest.raises(UnsupportedOperation, match="without `embeddings`"):
        context.get_embedding(row=2)


def test_an_adapter_changes_the_logits_and_its_removal_restores_them(open_model, open_context):
    model = open_model("attention")
    context = open_context(model)
    plain = decode_tokens(context, 0, random_tokens(10))
    adapter = LoraAdapter.load(model, models.get_path("adapter"))
    effects = []
    for scale in (1.0, 0.5, 0.0):
        context.set_adapters({adapter: scale})
        context.memory.clear()
        effects.append(max_difference(decode_tokens(context, 0, random_tokens(10)), plain))
    assert effects[0] > effects[1] > effects[2] == 0.0
    context.set_adapters({adapter: 1.0})
    adapter.close()  # while applied: the context continues without it
    context.memory.clear()
    assert max_difference(decode_tokens(context, 0, random_tokens(10)), plain) == 0.0


def test_an_adapter_of_another_model_is_rejected(open_model, tmp_path):
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
    tokens = model.vocabulary.tokenize(models.CYCLE.decode())
    for count in (5, 11, 20):
        target.memory.clear()
        heads.memory.clear()
        decode_tokens(target, 0, tokens[:count])
        heads.batch.clear()
        heads.batch.add([tokens[count - 1]], position=count, sequence=0, outputs=1)
        heads.batch.hidden_states[0] = target.get_hidden_state(count - 1)
        heads.decode()
        assert int(heads.get_logits(0).argmax()) == models.get_successor(tokens[count - 1])


@pytest.mark.parametrize("every_row", [None, False, True])
def test_only_hidden_states_that_were_stored_can_be_read(every_row, open_model, open_context):
    context = open_context(open_model("successor-mtp", mtp=True))
    if every_row is not None:
        context.enable_hidden_states(every_row=every_row)
    with pytest.raises(InvalidArgument, match="row"):
        context.get_hidden_state(0)
    decode_tokens(context, 0, [1, 2, 3])
    readable = {None: [], False: [2], True: [0, 1, 2]}[every_row]
    for row in range(3):
        with contextlib.nullcontext() if row in readable else pytest.raises(AfterglowError, match=r"hidden|output"):
            assert len(context.get_hidden_state(row)) == context.model.embedding_width
    with contextlib.nullcontext() if every_row else pytest.raises(UnsupportedOperation, match="hidden"):
        assert context.get_hidden_states().shape == (3, context.model.embedding_width)


def test_the_rollback_depth_depends_on_the_architecture(open_context):
    assert open_context("hybrid", recurrent_snapshots=4).max_rollback == 4
    assert open_context("recurrent", recurrent_snapshots=4).max_rollback == 0  # llama.cpp clamps it silently


def test_a_missing_file_raises_model_not_found(tmp_path):
    with pytest.raises(ModelNotFound, match="no such file"):
        LlamaModel.load(tmp_path / "nothing.gguf")


def test_a_batch_rejects_rows_over_its_capacity(open_context):
    context = open_context("attention", batch=8)
    with pytest.raises(InvalidArgument, match="8 fit"):
        context.batch.add(random_tokens(9), position=0, sequence=0)
    assert context.batch.count == 0
