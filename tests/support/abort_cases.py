"""The calls that end the process inside llama.cpp, each in our form and, for a sample, raw.

Run as `python abort_cases.py ours NAME` (prints the error's class) or `… raw NAME` (dies, if LLAMACPP is right).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

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
from afterglow.testing import models


def context(name: str = "attention", *, mtp: bool = False, **settings: object) -> LlamaContext:
    model = LlamaModel.load(models.get_path(name), ModelSettings(mtp=mtp), trust=True)
    defaults = {"cells": 512, "sequences": 2, "batch": 32, "ubatch": 32, "outputs": 4, "threads": 1}
    return LlamaContext(model, ContextSettings(**{**defaults, **settings}))  # type: ignore[arg-type]


def fed(name: str = "attention", **settings: object) -> LlamaContext:
    made = context(name, **settings)
    made.batch.add(range(30, 40), position=0, sequence=0, outputs=1)
    made.decode()
    return made


def batch_of(made: LlamaContext, rows: int, outputs: int = 1) -> None:
    """Fill the batch past its own guard, as a bug would."""
    made.batch.tokens[: min(rows, 32)] = 30
    made.batch.positions[: min(rows, 32)] = np.arange(min(rows, 32))
    made.batch.sequences[:] = 0
    made.batch.outputs[:] = 0
    made.batch.outputs[:outputs] = 1
    made.batch.count = rows


def raw_decode(made: LlamaContext, rows: int, outputs: int = 1) -> None:
    symbols = get_library().symbols
    batch = symbols.llama_batch_init(rows, 0, 1)
    batch.n_tokens = rows
    for row in range(rows):
        batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.seq_id[row][0] = 30, row, 1, 0
        batch.logits[row] = row < outputs
    symbols.llama_decode(made.pointer, batch)


def native_memory(made: LlamaContext) -> object:
    return get_library().symbols.llama_get_memory(made.pointer)


def grammar_chain() -> tuple[SamplerChain, list[int]]:
    model = LlamaModel.load(models.get_path("attention"), trust=True)
    return SamplerChain(model, Sampling(grammar='root ::= "a"')), model.vocabulary.tokenize("ab")


def too_many_rows() -> None:
    made = context()
    batch_of(made, 33)
    made.decode()


def too_many_outputs() -> None:
    made = context()
    batch_of(made, 10, outputs=5)
    made.decode()


def no_rows() -> None:
    context().decode()


def token_out_of_range() -> None:
    made = context()
    made.batch.add([10**6], position=0, sequence=0, outputs=1)
    made.decode()


def sequence_out_of_range_in_a_batch() -> None:
    made = context()
    made.batch.add([30], position=0, sequence=2, outputs=1)
    made.decode()


def position_gap() -> None:
    made = fed()
    made.batch.clear()
    made.batch.add([30], position=99, sequence=0, outputs=1)
    made.decode()


def non_causal_batch_larger_than_a_ubatch() -> None:
    made = context("embedding", embeddings=True, batch=64, ubatch=32)
    made.batch.add([7] * 40, position=0, sequence=0)
    made.decode()


def hidden_state_missing_in_an_mtp_batch() -> None:
    target = context("hybrid-mtp", mtp=True)
    heads = LlamaContext(target.model, target.settings, mtp_target=target)
    plain = target.batch
    plain.add([30], position=0, sequence=0, outputs=1)
    heads.decode(plain)


def mtp_without_its_weights() -> None:
    target = context("hybrid-mtp", mtp=False)
    LlamaContext(target.model, target.settings, mtp_target=target)


def mtp_without_heads() -> None:
    target = context("hybrid", mtp=True)
    LlamaContext(target.model, target.settings, mtp_target=target)


def partial_copy_between_streams() -> None:
    fed("hybrid").memory.copy(0, 1, start=2, stop=5)


def sequence_out_of_range_in_an_operation() -> None:
    fed().memory.remove(300)


def copy_to_a_sequence_out_of_range() -> None:
    fed().memory.copy(0, 256)


def shift_with_mrope() -> None:
    fed("hybrid").memory.shift(0, 5)


def divide_with_mrope() -> None:
    fed("hybrid").memory.divide(0, 2)


def shift_where_memory_cannot() -> None:
    fed("window", cells=4096).memory.shift(0, 5)


def logits_of_a_row_without() -> None:
    fed().get_logits(3)


def logits_before_any_decode() -> None:
    context().get_logits(0)


def hidden_state_out_of_range() -> None:
    fed().get_hidden_state(1000)


def sample_from_nothing() -> None:
    made = fed()
    SamplerChain(made.model, Sampling()).sample(np.zeros(0, dtype=np.float32))


def grammar_forbids_the_token() -> None:
    chain, (_, b) = grammar_chain()
    chain.accept(b)


def grammar_s_end_twice() -> None:
    chain, (a, _) = grammar_chain()
    chain.accept(a)
    end = chain.model.vocabulary.special_tokens["eos"]
    chain.accept(end)
    chain.accept(end)


def grammar_nested_without_end() -> None:
    model = LlamaModel.load(models.get_path("attention"), trust=True)
    SamplerChain(model, Sampling(grammar="root ::= " + "(" * 100_000))


def piece_of_an_unknown_token() -> None:
    context().model.vocabulary.token_to_piece(10**6)


def piece_of_a_negative_token() -> None:
    context().model.vocabulary.token_to_piece(-1)


def attribute_of_an_unknown_token() -> None:
    context().model.vocabulary.is_control(10**6)


def bias_of_an_unknown_token() -> None:
    SamplerChain(context().model, Sampling(logit_bias={-5: 1.0}))


def foreign_state() -> None:
    made = fed()
    other = fed("successor-attention")
    made.state.load(0, other.state.save(0))


def truncated_state() -> None:
    made = fed()
    SavedState.from_bytes(made.state.save(0).to_bytes()[:-100])


def absurd_context() -> None:
    context(cells=2**31 - 1000)


def absurd_sequences() -> None:
    context(sequences=257)


def use_after_close() -> None:
    made = fed()
    made.model.close()
    made.get_logits(9)


def memory_after_close() -> None:
    made = fed()
    made.close()
    made.memory.remove(0)


def adapter_of_another_model() -> None:
    one, other = context(), context()
    one.set_adapters({LoraAdapter.load(other.model, models.get_path("adapter")): 1.0})


OURS: dict[str, tuple[Callable[[], None], str]] = {
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
    "shift_where_memory_cannot": (shift_where_memory_cannot, "UnsupportedOperation"),
    "logits_of_a_row_without": (logits_of_a_row_without, "InvalidArgument"),
    "logits_before_any_decode": (logits_before_any_decode, "InvalidArgument"),
    "hidden_state_out_of_range": (hidden_state_out_of_range, "InvalidArgument"),
    "sample_from_nothing": (sample_from_nothing, "InvalidArgument"),
    "grammar_forbids_the_token": (grammar_forbids_the_token, "InvalidArgument"),
    "grammar_s_end_twice": (grammar_s_end_twice, "InvalidArgument"),
    "grammar_nested_without_end": (grammar_nested_without_end, "InvalidGrammar"),
    "piece_of_an_unknown_token": (piece_of_an_unknown_token, "InvalidArgument"),
    "piece_of_a_negative_token": (piece_of_a_negative_token, "InvalidArgument"),
    "attribute_of_an_unknown_token": (attribute_of_an_unknown_token, "InvalidArgument"),
    "bias_of_an_unknown_token": (bias_of_an_unknown_token, "InvalidArgument"),
    "foreign_state": (foreign_state, "InvalidState"),
    "truncated_state": (truncated_state, "InvalidState"),
    "absurd_context": (absurd_context, "OutOfMemory"),
    "absurd_sequences": (absurd_sequences, "InvalidArgument"),
    "use_after_close": (use_after_close, "Closed"),
    "memory_after_close": (memory_after_close, "Closed"),
    "adapter_of_another_model": (adapter_of_another_model, "InvalidArgument"),
}


def raw_mtp_context() -> None:
    made = context("hybrid-mtp", mtp=False)
    parameters = made.settings.build_parameters()
    parameters.ctx_type, parameters.ctx_other = 1, made.pointer
    get_library().symbols.llama_init_from_model(made.model.pointer, parameters)


def raw_empty_chain() -> None:
    made, symbols = fed(), get_library().symbols
    chain = symbols.llama_sampler_chain_init(symbols.llama_sampler_chain_default_params())
    symbols.llama_sampler_sample(chain, made.pointer, 9)


def raw_grammar_accept() -> None:
    chain, (_, b) = grammar_chain()
    get_library().symbols.llama_sampler_accept(chain._grammar, b)


def raw_piece() -> None:
    vocabulary = context().model.vocabulary
    get_library().symbols.llama_vocab_get_text(vocabulary.pointer, 10**6)


RAW: dict[str, Callable[[], object]] = {
    "too_many_rows": lambda: raw_decode(context(), 33),
    "too_many_outputs": lambda: raw_decode(context(), 10, outputs=5),
    "mtp_without_its_weights": raw_mtp_context,
    "partial_copy_between_streams": lambda: get_library().symbols.llama_memory_seq_cp(native_memory(fed()), 0, 1, 2, 5),
    "sequence_out_of_range_in_an_operation": lambda: get_library().symbols.llama_memory_seq_rm(
        native_memory(fed()), 300, 0, -1
    ),
    "shift_with_mrope": lambda: get_library().symbols.llama_memory_seq_add(native_memory(fed("hybrid")), 0, 0, -1, 5),
    "sample_from_nothing": raw_empty_chain,
    "grammar_forbids_the_token": raw_grammar_accept,
    "attribute_of_an_unknown_token": raw_piece,
}


if __name__ == "__main__":
    form, case = sys.argv[1:]
    if form == "raw":
        RAW[case]()
        print("survived")
    else:
        try:
            OURS[case][0]()
            print("no error")
        except AfterglowError as error:
            print(type(error).__name__)
