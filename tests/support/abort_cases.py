"""Calls that abort the process inside llama.cpp: each through the binding, and a sample of them native.

Run as `python abort_cases.py binding NAME` (prints the class of the error) or `… native NAME` (aborts).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from afterglow.errors import AfterglowError
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.loader import get_library
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.sampler import SamplerChain
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.llama.state import SavedState
from afterglow.llama.vocabulary import Vocabulary
from afterglow.testing import models
from support.pre_tokenizers import build_document, load_vocabulary


def make_context(name: str = "attention", *, mtp: bool = False, **settings: object) -> LlamaContext:
    model = LlamaModel.load(models.get_path(name), ModelSettings(mtp=mtp), trust=True)
    defaults = {"cells": 512, "sequences": 2, "batch": 32, "ubatch": 32, "outputs": 4, "threads": 1}
    return LlamaContext(model, ContextSettings(**{**defaults, **settings}))  # type: ignore[arg-type]


def prefilled_context(name: str = "attention", **settings: object) -> LlamaContext:
    context = make_context(name, **settings)
    context.batch.add(range(30, 40), position=0, sequence=0, outputs=1)
    context.decode()
    return context


def overfill_batch(context: LlamaContext, rows: int, outputs: int = 1) -> None:
    """Fill the batch past its own check, as a bug would."""
    context.batch.tokens[: min(rows, 32)] = 30
    context.batch.positions[: min(rows, 32)] = np.arange(min(rows, 32))
    context.batch.sequences[:] = 0
    context.batch.outputs[:] = 0
    context.batch.outputs[:outputs] = 1
    context.batch.count = rows


def native_decode(context: LlamaContext, rows: int, outputs: int = 1) -> None:
    symbols = get_library().symbols
    batch = symbols.llama_batch_init(rows, 0, 1)
    batch.n_tokens = rows
    for row in range(rows):
        batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.seq_id[row][0] = 30, row, 1, 0
        batch.logits[row] = row < outputs
    symbols.llama_decode(context.pointer, batch)


def native_memory(context: LlamaContext) -> object:
    return get_library().symbols.llama_get_memory(context.pointer)


def too_many_rows() -> None:
    context = make_context()
    overfill_batch(context, 33)
    context.decode()


def too_many_outputs() -> None:
    context = make_context()
    overfill_batch(context, 10, outputs=5)
    context.decode()


def no_rows() -> None:
    make_context().decode()


def token_out_of_range() -> None:
    context = make_context()
    context.batch.add([10**6], position=0, sequence=0, outputs=1)
    context.decode()


def sequence_out_of_range_in_a_batch() -> None:
    context = make_context()
    context.batch.add([30], position=0, sequence=2, outputs=1)
    context.decode()


def position_gap() -> None:
    context = prefilled_context()
    context.batch.clear()
    context.batch.add([30], position=99, sequence=0, outputs=1)
    context.decode()


def non_causal_batch_larger_than_a_ubatch() -> None:
    context = make_context("embedding", embeddings=True, batch=64, ubatch=32)
    context.batch.add([7] * 40, position=0, sequence=0)
    context.decode()


def hidden_state_missing_in_an_mtp_batch() -> None:
    target = make_context("hybrid-mtp", mtp=True)
    heads = LlamaContext(target.model, target.settings, mtp_target=target)
    plain = target.batch
    plain.add([30], position=0, sequence=0, outputs=1)
    heads.decode(plain)


def mtp_without_its_weights() -> None:
    target = make_context("hybrid-mtp", mtp=False)
    LlamaContext(target.model, target.settings, mtp_target=target)


def mtp_without_heads() -> None:
    target = make_context("hybrid", mtp=True)
    LlamaContext(target.model, target.settings, mtp_target=target)


def partial_copy_between_streams() -> None:
    prefilled_context("hybrid").memory.copy(0, 1, start=2, stop=5)


def sequence_out_of_range_in_an_operation() -> None:
    prefilled_context().memory.remove(300)


def copy_to_a_sequence_out_of_range() -> None:
    prefilled_context().memory.copy(0, 256)


def shift_with_mrope() -> None:
    prefilled_context("hybrid").memory.shift(0, 5)


def divide_with_mrope() -> None:
    prefilled_context("hybrid").memory.divide(0, 2)


def shift_of_a_sliding_window() -> None:
    prefilled_context("window", cells=4096).memory.shift(0, 5)


def logits_of_a_row_without_output() -> None:
    prefilled_context().get_logits(3)


def logits_before_any_decode() -> None:
    make_context().get_logits(0)


def hidden_state_out_of_range() -> None:
    prefilled_context().get_hidden_state(1000)


def sample_without_logits() -> None:
    context = prefilled_context()
    SamplerChain(context.model, Sampling()).sample(np.zeros(0, dtype=np.float32))


def piece_of_an_unknown_token() -> None:
    make_context().model.vocabulary.token_to_piece(10**6)


def piece_of_a_negative_token() -> None:
    make_context().model.vocabulary.token_to_piece(-1)


def attribute_of_an_unknown_token() -> None:
    make_context().model.vocabulary.is_control(10**6)


def bias_of_an_unknown_token() -> None:
    SamplerChain(make_context().model, Sampling(logit_bias={-5: 1.0}))


def state_of_another_model() -> None:
    context = prefilled_context()
    other = prefilled_context("successor-attention")
    context.state.load(0, other.state.save(0))


def truncated_state() -> None:
    context = prefilled_context()
    SavedState.from_bytes(context.state.save(0).to_bytes()[:-100])


def context_larger_than_memory() -> None:
    make_context(cells=2**31 - 1000)


def too_many_sequences() -> None:
    make_context(sequences=257)


def use_after_close() -> None:
    context = prefilled_context()
    context.model.close()
    context.get_logits(9)


def memory_after_close() -> None:
    context = prefilled_context()
    context.close()
    context.memory.remove(0)


def adapter_of_another_model() -> None:
    first, second = make_context(), make_context()
    first.set_adapters({LoraAdapter.load(second.model, models.get_path("adapter")): 1.0})


def recursive_vocabulary() -> Vocabulary:
    with tempfile.TemporaryDirectory() as directory:
        return load_vocabulary(build_document("gpt-4o"), Path(directory)).vocabulary


def text_that_overflows_the_stack() -> None:
    recursive_vocabulary().tokenize("a" * 100_000)


def line_that_would_need_too_much_stack() -> None:
    recursive_vocabulary().tokenize("a" * 10**6)


def bytes_beyond_unicode() -> None:
    recursive_vocabulary().tokenize(b"\xf7\xbf\xbf\xbf")


BINDING_CASES: dict[str, tuple[Callable[[], None], str]] = {
    "too_many_rows": (too_many_rows, "InvalidArgument"),
    "too_many_outputs": (too_many_outputs, "InvalidArgument"),
    "no_rows": (no_rows, "InvalidArgument"),
    "token_out_of_range": (token_out_of_range, "InvalidArgument"),
    "sequence_out_of_range_in_a_batch": (sequence_out_of_range_in_a_batch, "InvalidArgument"),
    "position_gap": (position_gap, "InvalidArgument"),
    "non_causal_batch_larger_than_a_ubatch": (non_causal_batch_larger_than_a_ubatch, "InvalidArgument"),
    "hidden_state_missing_in_an_mtp_batch": (hidden_state_missing_in_an_mtp_batch, "InvalidArgument"),
    "mtp_without_its_weights": (mtp_without_its_weights, "UnsupportedOperation"),
    "mtp_without_heads": (mtp_without_heads, "UnsupportedOperation"),
    "partial_copy_between_streams": (partial_copy_between_streams, "UnsupportedOperation"),
    "sequence_out_of_range_in_an_operation": (sequence_out_of_range_in_an_operation, "InvalidArgument"),
    "copy_to_a_sequence_out_of_range": (copy_to_a_sequence_out_of_range, "InvalidArgument"),
    "shift_with_mrope": (shift_with_mrope, "UnsupportedOperation"),
    "divide_with_mrope": (divide_with_mrope, "UnsupportedOperation"),
    "shift_of_a_sliding_window": (shift_of_a_sliding_window, "UnsupportedOperation"),
    "logits_of_a_row_without_output": (logits_of_a_row_without_output, "InvalidArgument"),
    "logits_before_any_decode": (logits_before_any_decode, "InvalidArgument"),
    "hidden_state_out_of_range": (hidden_state_out_of_range, "InvalidArgument"),
    "sample_without_logits": (sample_without_logits, "InvalidArgument"),
    "piece_of_an_unknown_token": (piece_of_an_unknown_token, "InvalidArgument"),
    "piece_of_a_negative_token": (piece_of_a_negative_token, "InvalidArgument"),
    "attribute_of_an_unknown_token": (attribute_of_an_unknown_token, "InvalidArgument"),
    "bias_of_an_unknown_token": (bias_of_an_unknown_token, "InvalidArgument"),
    "state_of_another_model": (state_of_another_model, "InvalidState"),
    "truncated_state": (truncated_state, "InvalidState"),
    "context_larger_than_memory": (context_larger_than_memory, "OutOfMemory"),
    "too_many_sequences": (too_many_sequences, "InvalidArgument"),
    "use_after_close": (use_after_close, "Closed"),
    "memory_after_close": (memory_after_close, "Closed"),
    "adapter_of_another_model": (adapter_of_another_model, "InvalidArgument"),
    "text_that_overflows_the_stack": (text_that_overflows_the_stack, "no error"),
    "line_that_would_need_too_much_stack": (line_that_would_need_too_much_stack, "InvalidArgument"),
    "bytes_beyond_unicode": (bytes_beyond_unicode, "no error"),
}


def native_mtp_context() -> None:
    context = make_context("hybrid-mtp", mtp=False)
    parameters = context.settings.build_parameters()
    parameters.ctx_type, parameters.ctx_other = 1, context.pointer
    get_library().symbols.llama_init_from_model(context.model.pointer, parameters)


def native_empty_chain() -> None:
    context, symbols = prefilled_context(), get_library().symbols
    chain = symbols.llama_sampler_chain_init(symbols.llama_sampler_chain_default_params())
    symbols.llama_sampler_sample(chain, context.pointer, 9)


def native_piece() -> None:
    vocabulary = make_context().model.vocabulary
    get_library().symbols.llama_vocab_get_text(vocabulary.pointer, 10**6)


def native_tokenize(data: bytes) -> None:
    library, vocabulary = get_library(), recursive_vocabulary()
    buffer = library.ffi.new("llama_token[]", len(data) + 8)
    library.symbols.llama_tokenize(vocabulary.pointer, data, len(data), buffer, len(data) + 8, False, False)


NATIVE_CASES: dict[str, Callable[[], object]] = {
    "too_many_rows": lambda: native_decode(make_context(), 33),
    "too_many_outputs": lambda: native_decode(make_context(), 10, outputs=5),
    "mtp_without_its_weights": native_mtp_context,
    "partial_copy_between_streams": lambda: get_library().symbols.llama_memory_seq_cp(
        native_memory(prefilled_context()), 0, 1, 2, 5
    ),
    "sequence_out_of_range_in_an_operation": lambda: get_library().symbols.llama_memory_seq_rm(
        native_memory(prefilled_context()), 300, 0, -1
    ),
    "shift_with_mrope": lambda: get_library().symbols.llama_memory_seq_add(
        native_memory(prefilled_context("hybrid")), 0, 0, -1, 5
    ),
    "sample_without_logits": native_empty_chain,
    "attribute_of_an_unknown_token": native_piece,
    "text_that_overflows_the_stack": lambda: native_tokenize(b"a" * 100_000),
    "bytes_beyond_unicode": lambda: native_tokenize(b"\xf7\xbf\xbf\xbf"),
}


if __name__ == "__main__":
    form, case = sys.argv[1:]
    if form == "native":
        NATIVE_CASES[case]()
        print("survived")
    else:
        try:
            BINDING_CASES[case][0]()
            print("no error")
        except AfterglowError as error:
            print(type(error).__name__)
