"""Guessing ahead: who guesses for which job before a decode, and how far. What comes of it, the sampler decides."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

from afterglow.engine.backend import Capabilities
from afterglow.engine.costs import Costs, Recent
from afterglow.engine.job import Job
from afterglow.engine.replay import Replay
from afterglow.engine.settings import EngineSettings
from afterglow.engine.speculation import LONGEST, Acceptance, Account, Choice, choose_length
from afterglow.errors import UnsupportedOption

Wish: TypeAlias = tuple[Job, int]
"""A job that generates, and how many guesses it could use."""

RETRY = 16  # decodes without guesses after which they are tried again, where they lost; twice as many each time
SELDOM = 1024
TRIAL = 2  # guesses in a trial
FIRST_ESTIMATE = 0.7  # of how many guesses are right where nothing is known: hopeful, so that they are tried
REFRESH = 48  # decodes with guesses after which there are two without, so that what the second takes stays known
RECONSIDER = 16  # decodes after which lengths are chosen anew, even where nothing was learned from guesses
SLEEP = 8  # decodes for which all are left alone after nothing could be won for any of them
USUAL_ANSWER = 256  # tokens within which what a drafter has to compute first must have paid
PAUSE = 16  # decodes without guesses after they did not fit into memory


class Drafter(Protocol):
    """Guesses the next tokens of answers. Wrong guesses cost time and change nothing."""

    name: str

    def ready(self, job: Job) -> bool:
        """Whether it has anything to guess for this job now. Asked before every decode, so it has to be cheap."""

    def kind(self, job: Job) -> str:
        """What its guesses for a job that it is ready for are called now: those of one kind are judged together."""

    def estimate(self, job: Job) -> float:
        """How likely its next guess for such a job is right, as far as it can tell before any was verified."""

    def behind(self, job: Job) -> float:
        """What it has to compute before it can guess for this job at all, in entries of a prompt that take the model
        itself as long; 0 where that is not worth mentioning."""

    def catch_up(self, jobs: Sequence[Job]) -> None:
        """Compute that; `draft` does it, too, but there it would look like the price of a guess."""

    def draft(self, wishes: Sequence[Wish]) -> list[list[int]]:
        """For each job its guesses, as many as it wishes or fewer. `job.prompt` and `job.generated` are what is known,
        of which memory lacks the newest token."""

    def forget(self, job: Job) -> None:
        """The job has ended."""

    def tidy(self) -> bool:
        """Do something that can wait until nobody waits; False: there is nothing of the kind."""

    def close(self) -> None:
        """Give back what it owns."""


def choose_drafters(available: Sequence[Drafter], settings: EngineSettings) -> list[Drafter]:
    """All there are, or those that the settings name, in that order. `UnsupportedOption` where one is not there."""
    if settings.drafters is None:
        return list(available)
    by_name = {drafter.name: drafter for drafter in available}
    for name in settings.drafters:
        if name not in by_name:
            raise UnsupportedOption("drafters", f"there is no {name!r} here, only {', '.join(by_name)}")
    return [by_name[name] for name in settings.drafters]


class Drafting:
    """Asks drafters for guesses, as many as are expected to pay, and learns from what came of them."""

    def __init__(
        self,
        settings: EngineSettings,
        capabilities: Capabilities,
        costs: Costs,
        drafters: Sequence[Drafter],
        replay: Replay | None = None,
    ) -> None:
        """`replay` is for memory that cannot drop wrong guesses by itself."""
        self.replay = replay
        self.account = Account()
        self._fixed = settings.speculation if isinstance(settings.speculation, int) else None
        on = settings.speculation != "off" and not settings.deterministic
        able = capabilities.max_rollback > 0 or replay is not None
        if on and self._fixed is not None and not able:
            raise UnsupportedOption(
                "speculation",
                f"this {capabilities.memory} memory can neither drop wrong guesses nor go back to a saved state",
            )
        self._owned = list(drafters)
        chosen = choose_drafters(drafters, settings)
        self._drafters = chosen if on and able else []
        self._capabilities = capabilities
        self._reach = LONGEST if replay is not None else min(LONGEST, capabilities.max_rollback)
        # Where sequences have their own memory, llama.cpp computes rows of several together as far as all have as many;
        # what some have more comes once more, by itself. On a processor that is most of what guesses cost.
        self._passes = capabilities.interruptible and not capabilities.shared
        self._costs = costs
        self._usual = defaultdict[str, Acceptance](Acceptance)  # by kind
        self._retry = defaultdict[str, int](lambda: RETRY)
        self._per_guess = {drafter.name: Recent() for drafter in drafters}
        self._spent = 0.0  # seconds of guessing for the coming decode
        self._choices_made: dict[tuple[str, float, int, int, int | None], Choice] = {}
        self._measured = 0
        self._decodes = 0
        self._next = 0  # the decode before which nobody is asked
        self._given: list[Job] = []  # who has guesses, or had them in the last decode
        self._guessed = 0  # decodes with guesses since one without was measured
        self._plain = 0, 0  # the last decode without guesses, and how many rows it had
        self._verified: list[Job] = []  # whose guesses were in the decode that is being measured

    @property
    def names(self) -> tuple[str, ...]:
        """Who may guess."""
        return tuple(drafter.name for drafter in self._drafters)

    def offer(self, generating: Sequence[Job], prompts: Sequence[Job]) -> None:
        """Give jobs that generate their guesses for the coming decode, in which others may have prompts."""
        for job in self._given:
            job.draft = []
        self._given = []
        self._spent = 0.0
        self._decodes += 1
        if self._decodes < self._next or not self._drafters:
            return
        rows = len(generating)
        if self._fixed is None and not (generating and not prompts and self._affordable(rows)):
            return
        # Not for jobs that are replayed: what drafters know is that memory lacks one token.
        ready = {
            job: able
            for job in generating
            if not job.replay and (able := [one for one in self._drafters if one.ready(job)])
        }
        if not ready:
            return
        spare = self._spare(rows + len(prompts), rows)
        choices = self._choices(ready, rows, spare)
        if not any(choices.values()):
            self._next = self._decodes + SLEEP
            return
        for rank in range(len(self._drafters)):
            for drafter in self._drafters:
                wishes = self._wishes(drafter, rank, choices, spare)
                spare -= self._ask(drafter, wishes)

    def _affordable(self, rows: int) -> bool:
        """Whether guesses may be tried in a decode of so many rows. One with a prompt in it is never asked about: it
        computes as many rows as it can anyway, and guesses would only make it longer."""
        return self.account.solvent and self._guessed < REFRESH and self._costs.steps.known(rows)

    def _spare(self, running: int, generating: int) -> int:
        """Guesses that one decode has room for: everybody needs a row, and an output at its end. What was never
        measured is approached step by step: twice as far as before, and no further."""
        room = min(self._capabilities.outputs - running, self._capabilities.batch_cells - generating)
        known = self._costs.steps.longest - (1 if self._passes else generating)
        return room if self._fixed is not None else min(room, max(TRIAL * generating, 2 * known))

    def _limit(self, job: Job, spare: int) -> int:
        """Guesses that could be right, could be computed, and could be dropped again."""
        if job.guessing.barred:
            return 0
        assert job.sequence is not None
        left = LONGEST if job.request.max_tokens is None else job.request.max_tokens - len(job.generated) - 1
        room = job.room - job.sequence.cells - 1
        return max(0, min(self._reach, left, room, spare))

    def _choices(self, ready: dict[Job, list[Drafter]], rows: int, spare: int) -> dict[Job, list[tuple[Drafter, int]]]:
        """For each job those that would help it, the most promising first, and how far each should guess.

        Where guesses cost only their rows, each job is a case of its own; else those that can guess do so alike.
        """
        alike = rows > 1 and self._fixed is None and self._passes
        found: dict[Job, list[tuple[float, Drafter, int]]] = {job: [] for job in ready}
        for drafter in self._drafters:
            able = [job for job, drafters in ready.items() if drafter in drafters]
            for group in [able] if alike else [[job] for job in able]:
                for job, choice in self._choose(group, drafter, rows, spare).items():
                    found[job].append((-choice.gain, drafter, choice.length))
        return {
            job: [(drafter, length) for _, drafter, length in sorted(options, key=lambda one: one[0])]
            for job, options in found.items()
        }

    def _choose(self, group: Sequence[Job], drafter: Drafter, rows: int, spare: int) -> dict[Job, Choice]:
        """How far a drafter should guess for jobs that guess alike; where that does not pay, one may try, seldom."""
        limits = {job: limit for job in group if (limit := self._limit(job, spare // len(group)))}
        if self._fixed is not None or not limits:
            return {job: Choice(min(self._fixed or 0, limit), 1.0) for job, limit in limits.items()}
        for job in limits:
            job.guessing.tried = job.guessing.tried or self._decodes
        sharing = len(limits) if self._passes else None
        choice = self._best(drafter.name, self._rate(limits, drafter), max(limits.values()), rows, sharing)
        chosen = list(limits)
        if choice.length:
            self._retry.update((drafter.kind(job), RETRY) for job in chosen)
        else:
            choice = Choice(TRIAL, 0.0)
            chosen = [job for job in chosen if self._decodes - job.guessing.tried >= self._retry[drafter.kind(job)]][:1]
        return {
            job: Choice(min(choice.length, limits[job]), choice.gain)
            for job in chosen
            if self._worth_catching_up(job, drafter, rows, choice.gain)
        }

    def _rate(self, group: Iterable[Job], drafter: Drafter) -> float:
        """How likely guesses for these jobs are right."""
        kinds = [(job, drafter.kind(job)) for job in group]
        rates = [job.guessing.rate(kind, self._usual[kind].rate(drafter.estimate(job))) for job, kind in kinds]
        return round(sum(rates) / len(rates), 2)

    def _worth_catching_up(self, job: Job, drafter: Drafter, rows: int, gain: float) -> bool:
        """Whether a drafter that knows little of a job may be asked: not where it would hardly be done before the
        answer is, and not beyond what may be lost."""
        behind = drafter.behind(job) * self._costs.per_entry
        if not behind:
            return True
        most = USUAL_ANSWER if job.request.max_tokens is None else min(USUAL_ANSWER, job.request.max_tokens)
        step = self._expected(rows, rows)
        saved = max(0, most - len(job.generated)) * step * (1 - 1 / gain) if gain > 1 else behind
        return behind <= saved and self.account.affords(behind, step)

    def _best(self, name: str, rate: float, limit: int, rows: int, sharing: int | None) -> Choice:
        key = name, rate, limit, rows, sharing
        if key not in self._choices_made:
            self._choices_made[key] = choose_length(
                rate,
                limit,
                lambda count: self._expected(count, rows, sharing),
                rows=rows,
                sharing=sharing,
                guessing=self._per_guess[name].seconds,
                saving=None if self.replay is None else self.replay.seconds,
            )
        return self._choices_made[key]

    def _expected(self, rows: int, jobs: int, sharing: int | None = None) -> float:
        """Seconds that a decode of so many rows is expected to take: one for each of the jobs, and guesses for as many
        as are `sharing` them."""
        per_row = min(self._costs.per_entry, self._costs.per_step)
        if self._at_once(rows, jobs, sharing):
            return self._costs.steps.of(rows, per_row)
        return self._costs.steps.of(jobs, per_row) + self._costs.steps.of(rows - jobs, per_row)

    def _at_once(self, rows: int, jobs: int, sharing: int | None) -> bool:
        return not self._passes or jobs in (1, rows, sharing)

    def _wishes(
        self, drafter: Drafter, rank: int, choices: dict[Job, list[tuple[Drafter, int]]], spare: int
    ) -> list[Wish]:
        wishes: list[Wish] = []
        for job, options in choices.items():
            if not job.draft and rank < len(options) and options[rank][0] is drafter:
                length = min(options[rank][1], spare)
                if length > 0:
                    wishes.append((job, length))
                    spare -= length
        return wishes

    def _ask(self, drafter: Drafter, wishes: list[Wish]) -> int:
        """Let a drafter guess; how many guesses there are. Those that cannot come next are cut off."""
        if not wishes:
            return 0
        late = [job for job, _ in wishes if drafter.behind(job)]
        started = time.perf_counter()
        if late:
            drafter.catch_up(late)
            self.account.invested(time.perf_counter() - started)
            started = time.perf_counter()
        drafts = drafter.draft(wishes)
        seconds = time.perf_counter() - started
        total = 0
        for (job, limit), draft in zip(wishes, drafts, strict=True):
            guesses = draft[:limit]
            if guesses and job.guide is not None:
                guesses = guesses[: job.guide.permits(guesses)]
            job.draft = guesses
            self._given.append(job)
            job.guessing.kind = drafter.kind(job)
            total += len(guesses)
        price = self._per_guess[drafter.name]
        if len(price):  # the first time is no loss: it prepares the others
            self._spent += seconds
        if total:
            price.add(seconds / total)
        return total

    def prepare(self, jobs: Sequence[Job]) -> None:
        """The decode is about to run: save what cannot be dropped again."""
        if self.replay is not None and self._drafters:
            self._spent += self.replay.keep(jobs)

    def verified(self, job: Job, drafted: int, accepted: int) -> None:
        """So many of a job's guesses were computed, and so many of them were right."""
        guessing = job.guessing
        kind = guessing.kind
        job.drafted += drafted
        job.drafts += 1
        self._verified.append(job)
        guessing.tried = self._decodes
        guessing.verified(kind, drafted, accepted)
        self._usual[kind].verified(drafted, accepted)
        self._retry[kind] = min(SELDOM, 2 * self._retry[kind])

    def measured(self, rows: int, jobs: int, tokens: int, seconds: float) -> None:
        """A decode of generating rows only took so long, for `jobs` jobs, and brought so many tokens."""
        if not self._drafters:
            return
        returning = 0.0 if self.replay is None else self.replay.settle()
        self._measured += 1
        if self._measured % RECONSIDER == 0 or rows > jobs:
            self._choices_made.clear()
        if rows == jobs:
            self._measured_plain(rows, seconds - returning)
            self.account.plain(seconds)
        else:
            self._settle(rows, jobs, tokens, seconds, returning)
        self._verified = []

    def _measured_plain(self, rows: int, seconds: float) -> None:
        """A decode had no guesses. The first of its kind after another takes up to a tenth longer, which would make
        guesses look that much better than they are: it tells nothing."""
        if self._plain == (self._decodes - 1, rows):
            self._costs.steps.measured(rows, seconds)
            self._guessed = 0
        self._plain = self._decodes, rows

    def _settle(self, rows: int, jobs: int, tokens: int, seconds: float, returning: float) -> None:
        """A decode had guesses in it: learn what such rows take, and whether they won."""
        steps = self._costs.steps
        lengths = {len(job.draft) for job in self._verified}
        sharing = len(self._verified) if len(lengths) == 1 else 0  # who has more than others is computed by itself
        first = False
        if self._at_once(rows, jobs, sharing):
            first = steps.first(rows)
            steps.measured(rows, seconds - returning)
        step = self._expected(jobs, jobs)
        self._guessed += 1
        # What it took to prepare such decodes is not taken again; their rows are.
        spent = min(seconds, self._expected(rows, jobs, sharing)) if first else seconds
        won = self.account.guessed(spent + self._spent, step * tokens / jobs, step)
        for job in self._verified:
            job.seconds_saved += won / len(self._verified)

    def pause(self) -> None:
        """Guesses did not fit into memory: do without them for a while."""
        self._next = self._decodes + PAUSE

    def forget(self, job: Job) -> None:
        """The job has ended."""
        for drafter in self._drafters:
            drafter.forget(job)

    def tidy(self) -> bool:
        """Let drafters do what can wait; False: there is nothing."""
        return any(drafter.tidy() for drafter in self._drafters)

    def close(self) -> None:
        """Give back what drafters own, also those that were never asked."""
        for drafter in self._owned:
            drafter.close()
