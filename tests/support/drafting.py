"""A drafter with known draft tokens, and engines that use it."""

from __future__ import annotations

from collections.abc import Sequence

from afterglow.engine.engine import Engine
from afterglow.engine.scheduling.job import Job, RunningJob
from afterglow.engine.speculation.speculator import INITIAL_ACCEPTANCE_RATE, DraftRequest
from afterglow.engine.types.settings import EngineSettings
from afterglow.testing import FakeBackend
from support.play import reference, request

PLAIN = EngineSettings(speculation="off")
ROLLBACK = 6  # recurrent snapshots of the fake backends


class Oracle:
    """Drafts the known completions; every `wrong`-th token is wrong: 0 never, 1 always."""

    name = "oracle"

    def __init__(self, answers: dict[str, list[int]], wrong: int = 0, vocabulary: int = 64) -> None:
        self.answers, self.wrong, self.vocabulary = answers, wrong, vocabulary
        self.released: list[str] = []
        self.calls: list[list[tuple[str, int]]] = []

    def can_draft(self, running: RunningJob) -> bool:
        return True

    def get_draft_kind(self, running: RunningJob) -> str:
        return self.name

    def estimate_acceptance(self, running: RunningJob) -> float:
        return INITIAL_ACCEPTANCE_RATE

    def estimate_catch_up_entries(self, running: RunningJob) -> float:
        return 0.0

    def catch_up(self, jobs: Sequence[RunningJob]) -> None:
        """Do nothing: there is no state to compute."""

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        self.calls.append([(running.job.request.id, limit) for running, limit in draft_requests])
        return [self._draft_tokens(running.job, limit) for running, limit in draft_requests]

    def _draft_tokens(self, job: Job, limit: int) -> list[int]:
        start = len(job.generated)
        tokens = self.answers.get(job.request.id, [])[start : start + limit]
        return [self._corrupt(start + index, token) for index, token in enumerate(tokens)]

    def _corrupt(self, index: int, token: int) -> int:
        return (token + 1) % self.vocabulary if self.wrong and index % self.wrong == 0 else token

    def release(self, job: Job) -> None:
        self.released.append(job.request.id)

    def run_idle_task(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


def plain(kind: str, settings: EngineSettings = PLAIN, **options: object) -> Engine:
    """Return an engine on a fake backend without speculation."""
    return Engine(FakeBackend(kind, **options), settings)  # type: ignore[arg-type]


def speculating(
    kind: str,
    prompts: dict[str, tuple[list[int], dict]],
    *,
    wrong: int = 3,
    length: int | str = 4,
    settings: EngineSettings | None = None,
    **options: object,
) -> tuple[Engine, dict[str, list[int]], Oracle]:
    """Return an engine whose drafter knows the completions of these prompts, the completions, and the drafter."""
    answers = {id: reference(lambda: plain(kind), entries, **more) for id, (entries, more) in prompts.items()}
    known = {  # drafts continue after the end of the completion: tokens beyond it must have no effect
        id: reference(lambda: plain(kind), entries, **more | {"max_tokens": 60, "stop": (), "ignore_eos": True})
        for id, (entries, more) in prompts.items()
    }
    oracle = Oracle(known, wrong)
    settings = settings or EngineSettings(speculation=length, drafters=("oracle",))  # type: ignore[arg-type]
    backend = FakeBackend(kind, **{"recurrent_snapshots": ROLLBACK, **options})  # type: ignore[arg-type]
    return Engine(backend, settings, [oracle]), answers, oracle


def build_requests(prompts: dict[str, tuple[list[int], dict]]) -> list:
    return [request(id, entries, **more) for id, (entries, more) in prompts.items()]
