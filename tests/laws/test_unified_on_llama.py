"""The unified KV layout with recurrent snapshots: forks and truncations of sequences that share a recurrent state."""

from __future__ import annotations

from contextlib import closing

import pytest

from laws.test_engine_on_llama import random_prompt
from support.drafting import Oracle
from support.llama_engines import ColdContext, build_spec
from support.play import LAYOUTS, Answer, check, collect, play, request

pytestmark = pytest.mark.native

OPTIONS = {"ignore_eos": True, "logprobs": 0}


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", ["window", "hybrid"])
def test_a_fork_of_a_running_request_that_rejected_drafts_changes_no_token(kind, kv_unified):
    """Each fork starts right after the source was rolled back."""
    with closing(build_spec(kind, "ngram", kv_unified=kv_unified, sequences=4)()) as engine:
        cold = ColdContext(engine.backend.context.model)
        wrong = Oracle({"running": [7] * 100})
        engine.speculator._drafters = [wrong]
        engine.speculator._seconds_per_draft_token[wrong.name] = engine.speculator._seconds_per_draft_token["ngram"]
        entries, answers = random_prompt(50, 1), dict[str, Answer]()
        engine.submit(request("running", entries, max_tokens=40, **OPTIONS))
        for number in range(4):
            for _ in range(3):
                collect(answers, engine)
            slot = next(state.sequence for state in engine._running if state.job.request.id == "running")
            prompt = [*map(int, slot.entries), 60 + number]
            engine.submit(request(str(number), prompt, max_tokens=5, **OPTIONS))
            before = len(slot)
            collect(answers, engine)
            while str(number) in engine._jobs:
                collect(answers, engine)
            assert answers[str(number)].cached == before
            cold.check(prompt, answers[str(number)])
        while engine.is_busy:
            collect(answers, engine)
        cold.check(entries, answers["running"])
        assert engine.counters.draft_tokens > engine.counters.accepted_tokens
        check(engine)


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", ["window", "hybrid"])
def test_a_sequence_that_was_forked_is_truncated_or_recomputed_and_changes_no_token(kind, kv_unified):
    """llama.cpp refuses to roll back a recurrent state that two sequences share."""
    with closing(build_spec(kind, "ngram", kv_unified=kv_unified, sequences=3)()) as engine:
        cold, entries = ColdContext(engine.backend.context.model), random_prompt(60, 1)
        play(engine, request("first", entries, max_tokens=1, **OPTIONS))
        for number in range(2):  # the first continues the sequence, the second forks it
            engine.submit(request(str(number), [*entries, 70 + number], max_tokens=4, **OPTIONS))
        engine._admit_waiting()
        engine.cancel("0")
        edited, answers = [*entries[:-2], 80, 81], dict[str, Answer]()
        engine.submit(request("edited", edited, max_tokens=4, **OPTIONS))  # before either was decoded
        while engine.is_busy:
            collect(answers, engine)
        assert answers["1"].cached == 60
        cold.check([*entries, 71], answers["1"])
        cold.check(edited, answers["edited"])
        check(engine)
