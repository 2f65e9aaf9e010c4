"""`MtpBackend`: heads whose KV cache is full start again, and fail no request."""

from __future__ import annotations

from contextlib import closing

import pytest

from afterglow.engine.inspect import snapshots
from afterglow.errors import KVCacheFull
from laws.test_engine_on_llama import random_prompt
from support.llama_engines import ColdContext, build_spec
from support.play import LAYOUTS, Answer, collect, play, request

pytestmark = pytest.mark.native


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "drafter"), [("attention", "mtp"), ("window", "mtp"), ("window", "mtp with a window"), ("hybrid", "mtp")]
)
def test_heads_without_free_cells_fail_no_request(kind, drafter, kv_unified, monkeypatch):
    """Requests decode, fork, are swapped out and saved; drafts come again when cells are free."""
    with closing(build_spec(kind, drafter, kv_unified=kv_unified)()) as engine:
        cold, heads = ColdContext(engine.backend.context.model), engine.backend.head_context
        system = random_prompt(60, 1)
        requests = [
            request(str(n), system + random_prompt(9 + n, 2 + n), max_tokens=12, ignore_eos=True, logprobs=0)
            for n in range(3)
        ]
        with monkeypatch.context() as patch:

            def decode_nothing() -> None:
                raise KVCacheFull(1, heads.cells)

            patch.setattr(heads, "decode", decode_nothing)
            answers = play(engine, *requests)
            assert engine.counters.draft_tokens == 0
            engine.submit(request("swapped", random_prompt(40, 8), max_tokens=9, ignore_eos=True, logprobs=0))
            for _ in range(3):
                collect(answers, engine)
            engine._swap_out(engine._running[0])
            while engine.is_busy:
                collect(answers, engine)
            snapshots.fork(engine, snapshots.find_latest(engine))
        cold.check(random_prompt(40, 8), answers["swapped"])
        for req in requests:
            cold.check(req.entries, answers[req.id])
        entries = [*requests[0].entries, *answers["0"].tokens, 40]
        again: Answer = play(engine, request("again", entries, max_tokens=12, ignore_eos=True, logprobs=0))["again"]
        cold.check(entries, again)
        assert engine.counters.draft_tokens > 0
