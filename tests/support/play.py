"""Playing requests through an engine, and the reference that computes everything from scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from afterglow.engine.engine import Engine
from afterglow.engine.speculation.speculator import Drafter
from afterglow.engine.types.request import Failed, Finished, PrefillProgress, Request, Token
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend

KINDS = ("attention", "window", "recurrent", "hybrid")
LAYOUTS = (False, True)
GREEDY = Sampling(temperature=0)


@dataclass
class Answer:
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
    return [int(token) for token in np.random.default_rng(seed).integers(1, 60, length)]


def request(id: str, entries: Iterable[int], **options: object) -> Request:
    defaults = {"sampling": GREEDY, "max_tokens": 12}
    return Request(id=id, entries=list(entries), **{**defaults, **options})  # type: ignore[arg-type]


def collect(answers: dict[str, Answer], engine: Engine) -> None:
    """One step, its events sorted to their requests; a request ends exactly once and says nothing afterwards."""
    for event in engine.step():
        answer = answers.setdefault(event.request_id, Answer())
        assert answer.end is None, f"{event} came after the end"
        match event:
            case Token(_, token, logprob):
                answer.tokens.append(token)
                if logprob is not None:
                    answer.logprobs.append(logprob)
            case PrefillProgress(_, done, _):
                answer.progress.append(done)
            case Finished() | Failed():
                answer.end = event


def play(engine: Engine, *requests: Request, limit: int = 5000) -> dict[str, Answer]:
    """Submit all at once and step until every one has ended."""
    answers: dict[str, Answer] = {}
    for one in requests:
        engine.submit(one)
    for _ in range(limit):
        if not engine.is_busy:
            break
        collect(answers, engine)
    assert not engine.is_busy, "it does not end"
    assert all(answers[one.id].end is not None for one in requests)
    check(engine)
    return answers


def ask(engine: Engine, entries: Iterable[int], **options: object) -> Answer:
    return play(engine, request("one", entries, **options))["one"]


def check(engine: Engine) -> None:
    """The record equals memory, and budgets are kept."""
    for slot in engine.prefix_cache.slots:
        held = engine.backend.get_position_range(slot.seq_id)
        assert (held[1] + 1 if held else 0) == slot.position, f"slot {slot.seq_id}: {held}, record {slot.position}"
    settings = engine.settings.checkpoints
    assert engine.prefix_cache.checkpoints.nbytes <= settings.max_bytes


def fake(
    kind: str = "attention", settings: EngineSettings | None = None, drafters: Sequence[Drafter] = (), **options: object
) -> Engine:
    return Engine(FakeBackend(kind, **options), settings, drafters)  # type: ignore[arg-type]


def reference(make: Callable[[], Engine], entries: Iterable[int], **options: object) -> list[int]:
    """The tokens of a request that had an engine for itself."""
    engine = make()
    tokens = ask(engine, entries, **options).tokens
    engine.close()
    return tokens
