"""Helpers that run requests on an engine, and the reference run on an engine of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.cost_model import PrefillCosts
from afterglow.engine.speculation.speculator import Drafter
from afterglow.engine.types.request import EngineEvent, Failed, Finished, PrefillProgress, Request, Token
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend

KINDS = ("attention", "window", "recurrent", "hybrid")
LAYOUTS = (False, True)  # values of kv_unified
GREEDY = Sampling(temperature=0)


@dataclass
class Answer:
    """The events of one request, collected."""

    tokens: list[int] = field(default_factory=list)
    end: Finished | Failed | None = None
    progress: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def cached(self) -> int:
        assert self.end is not None
        return self.end.usage.cached_tokens

    @property
    def reason(self) -> str:
        assert isinstance(self.end, Finished), self.end
        return self.end.finish_reason


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens of the fake vocabulary."""
    return [int(token) for token in np.random.default_rng(seed).integers(1, 60, length)]


def request(id: str, entries: Iterable[int], **options: object) -> Request:
    """Return a greedy request of at most 12 tokens; `options` are fields of `Request`."""
    defaults = {"sampling": GREEDY, "max_tokens": 12}
    return Request(id=id, entries=list(entries), **{**defaults, **options})  # type: ignore[arg-type]


def collect(answers: dict[str, Answer], engine: Engine) -> None:
    """Run one step and collect its events by request."""
    record_events(answers, engine.step())


def record_events(answers: dict[str, Answer], events: Iterable[EngineEvent]) -> None:
    """Record events by request. A request ends exactly once and has no event after its end."""
    for event in events:
        answer = answers.setdefault(event.request_id, Answer())
        assert answer.end is None, f"{event} after the end"
        match event:
            case Token(_, token, logprob):
                answer.tokens.append(token)
                if logprob is not None:
                    answer.logprobs.append(logprob)
            case PrefillProgress(_, computed_entries, _):
                answer.progress.append(computed_entries)
            case Finished() | Failed():
                answer.end = event


def play(engine: Engine, *requests: Request, limit: int = 5000) -> dict[str, Answer]:
    """Submit all requests at once and step until all have ended."""
    answers: dict[str, Answer] = {}
    for submitted in requests:
        engine.submit(submitted)
    for _ in range(limit):
        if not engine.is_busy:
            break
        collect(answers, engine)
    assert not engine.is_busy, "the requests do not end"
    assert all(answers[submitted.id].end is not None for submitted in requests)
    check(engine)
    return answers


def ask(engine: Engine, entries: Iterable[int], **options: object) -> Answer:
    """Run one request, with the id "one"."""
    return play(engine, request("one", entries, **options))["one"]


def check(engine: Engine) -> None:
    """Check that the recorded positions equal those of the KV cache and that checkpoints are within their bytes."""
    for slot in engine.prefix_cache.slots:
        positions = engine.backend.get_position_range(slot.seq_id)
        end = positions[1] + 1 if positions else 0
        assert end == slot.position, f"slot {slot.seq_id}: KV cache {positions}, recorded end {slot.position}"
    assert engine.prefix_cache.checkpoints.nbytes <= engine.settings.checkpoints.max_bytes


def fake(
    kind: str = "attention", settings: EngineSettings | None = None, drafters: Sequence[Drafter] = (), **options: object
) -> Engine:
    """Return an engine on a fake backend, whose plans do not depend on speed; `options` are those of `FakeBackend`."""
    engine = Engine(FakeBackend(kind, **options), settings, drafters)  # type: ignore[arg-type]
    set_prefill_cost(engine, 1e-3)
    return engine


def set_prefill_cost(engine: Engine, seconds_per_entry: float) -> None:
    """Let computing an entry of a prompt cost this, whatever is measured later."""
    costs = engine.prefix_cache.cost_model.prefill_costs = PrefillCosts()
    costs.record(1 << 40, seconds_per_entry * (1 << 40))  # longer prompts count


def fake_with_media(kind: str, settings: EngineSettings | None = None, **options: object) -> Engine:
    """Return an engine on a fake backend that accepts media entries."""
    engine = fake(kind, settings, **options)
    engine.backend.interner = engine.interner
    return engine


def reference(make: Callable[[], Engine], entries: Iterable[int], **options: object) -> list[int]:
    """Return the tokens of a request that is the only one of its engine."""
    engine = make()
    tokens = ask(engine, entries, **options).tokens
    engine.close()
    return tokens
