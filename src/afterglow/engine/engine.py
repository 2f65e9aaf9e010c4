"""The engine: many requests, one memory, one decode at a time. Synchronous; call `step` until nothing is left."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from afterglow.engine.admission import check_servable
from afterglow.engine.backend import Backend, Span
from afterglow.engine.counters import Counters
from afterglow.engine.drafting import Drafter, Drafting
from afterglow.engine.entries import Ledger
from afterglow.engine.explanation import Explanation
from afterglow.engine.guide import Guide, Guides
from afterglow.engine.job import Job
from afterglow.engine.leading import find_leader, is_led
from afterglow.engine.looking import Looking
from afterglow.engine.lookup import Lookup
from afterglow.engine.memory import PrefixMemory
from afterglow.engine.replay import Replay
from afterglow.engine.request import Event, Failed, Finished, Progress, Reason, Request
from afterglow.engine.sampling import Ending, continue_answer, drop_wrong
from afterglow.engine.scheduler import Budget, first_of, grid_step, largest_decode, prompt_budget, schedule, sorted_out
from afterglow.engine.sequence import Sequence as Slot
from afterglow.engine.settings import EngineSettings
from afterglow.engine.stops import StopMatcher
from afterglow.errors import AfterglowError, Cancelled, DecodeFailed, InvalidArgument, MemoryFull

MAX_ATTEMPTS = 3


class Engine:
    """Requests in, events out.

    >>> engine.submit(Request(id="a", entries=[1, 2, 3], max_tokens=8))
    >>> while engine.busy:
    ...     for event in engine.step():
    ...         print(event)
    """

    def __init__(
        self, backend: Backend, settings: EngineSettings | None = None, drafters: Sequence[Drafter] = ()
    ) -> None:
        """`drafters` are those that come with the backend, beside the ones that need nothing."""
        capabilities = backend.capabilities
        if capabilities.outputs < capabilities.sequences:
            raise InvalidArgument("outputs", f"must be at least one for each of {capabilities.sequences} sequences")
        self.backend = backend
        self.settings = settings or EngineSettings()
        self.ledger = Ledger()
        grid = self.settings.grid if self.settings.deterministic else 0
        self.memory = PrefixMemory(backend, self.ledger, self.settings, grid)
        self.counters = Counters()
        replay = Replay(backend) if capabilities.replays and not capabilities.max_rollback else None
        self.drafting = Drafting(self.settings, capabilities, self.memory.costs, [Lookup(), *drafters], replay)
        self.guides = Guides(backend.words)  # for any thread
        self.looking = Looking(backend.projector, self.ledger, self.settings)
        self._rows = capabilities.batch_cells  # that the next decode may hold of a picture
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._events: list[Event] = []
        self._whole = True  # False after a step that crashed: nobody knows what memory holds then
        self._guard = threading.RLock()  # over these two: cancel may come from another thread
        self._decoding, self._cancelling = list[Job](), set[str]()

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    @property
    def underway(self) -> bool:
        """Whether anything of anybody's prompt or answer was computed."""
        return any(job.decoded_at for job in self._running)

    def submit(self, request: Request, guide: Guide | None = None) -> None:
        """Accept a request; its events come from `step`. A request that can never be served raises at once.

        `guide` is what `guides` made of it, where somebody did that beforehand.
        """
        ids = self.ledger.ids(request.entries)
        check_servable(request, ids, self.ledger, self.backend)
        if request.id in self._jobs:
            raise InvalidArgument("id", f"{request.id!r} is being served already")
        guide = guide or self.guides.prepare(request)
        if self.settings.pin_system and request.system:
            self.memory.tiers.pinning.pin(ids[: request.system], request.salt, system=True)
        stops = StopMatcher(request.stop) if request.stop else None
        sampler = self.backend.sampler(request.sampling)
        room = self.backend.capabilities.cells
        job = Job(request=request, prompt=ids, sampler=sampler, stops=stops, guide=guide, room=room)
        self.looking.begin(job)
        self._jobs[request.id] = job
        self._waiting.append(job)

    def cancel(self, id: str) -> None:
        """End a request, from any thread. Inside a decode too, where that hurts nobody else's memory."""
        if id not in self._jobs:
            return
        with self._guard:
            self._cancelling.add(id)
            doomed = [job for job in self._decoding if job.request.id in self._cancelling]
            able = self.backend.capabilities
            if doomed and able.interruptible and (able.survives_abort or len(doomed) == len(self._decoding)):
                self.backend.interrupt()

    def step(self) -> list[Event]:
        """Do one decode's worth of work; what came of it."""
        self._whole = False
        self._end_unwanted()
        self._admit()
        if chosen := self._schedule():
            self._decode(chosen)
        elif self._running and not self._events:
            self.looking.wait()
        self._whole = True
        events, self._events = self._events, []
        return events

    def admit(self) -> None:
        """Give memory to those who wait, as far as there is some. `step` does that, too; here there is more time."""
        self._whole = False
        self._admit()
        self._whole = True

    def explain(self, request: Request) -> Explanation:
        """What of this request's prompt is in memory now, and why not more of it could be used."""
        ids = self.ledger.ids(request.entries)
        reuse = self.memory.plan(ids, reuse=request.reuse, slot=request.sequence, salt=request.salt)
        return self.memory.explain(ids, reuse, request.salt)

    def tidy(self) -> bool:
        """Do something that can wait until nobody waits; False: there is nothing of the kind."""
        return self.memory.tidy() or self.drafting.tidy()

    def close(self) -> None:
        """End every request, keep on disk what is worth it, and give memory back."""
        try:
            for job in list(self._jobs.values()):
                self._fail(job, Cancelled("the engine was closed"))
            self.memory.close(store=self._whole)
        finally:
            self.drafting.close()
            self.looking.close()
            self.backend.close()

    # --- beginning and ending jobs

    def _end_unwanted(self) -> None:
        with self._guard:
            cancelled, self._cancelling = self._cancelling, set()
        for id in cancelled:
            if job := self._jobs.get(id):
                self._fail(job, Cancelled(f"request {id} was cancelled"))
        for job in [job for job in self._jobs.values() if job.deadline_passed]:
            self._finish(job, "deadline")

    def _admit(self) -> None:
        for job in sorted(self._waiting, key=lambda job: -job.request.priority):
            if is_led(job, self._running):
                continue
            job.leader = None
            if job.aside and self._running and self.backend.capabilities.shared:
                break  # it would only push somebody else out
            begun = self._begin(job) if job.parked is None else self._unpark(job)
            if not begun and job.request.sequence is None:
                break  # no slot for this one is no slot for the next

    def _begin(self, job: Job) -> bool:
        """Give the job memory to work in. False: there is no slot for it now."""
        known = np.concatenate([job.prompt, np.array(job.generated, dtype=np.int64)]) if job.generated else job.prompt
        request = job.request
        reuse = self.memory.plan(known, reuse=request.reuse, slot=request.sequence, salt=request.salt)
        if reuse is None:
            return False
        if self._find_leader(job, reuse.keep) or (self._running and self.memory.reading(reuse)):
            return True  # it waits for somebody else, or for the disk, and the others go on
        sequence, kept = self.memory.begin(reuse, request.salt)
        if reuse.keep and not kept and not job.disappointed:  # a stored state did not load, and is gone now: plan again
            job.disappointed = True
            self.memory.release(sequence)
            return self._begin(job)
        if not job.admitted:
            self.looking.reused(job, min(kept, len(job.prompt)))
            self.counters.reused_entries += min(kept, len(job.prompt))
        job.cuts = self.memory.cuts(sequence, job.prompt, request.boundaries)
        self._run(job, sequence)
        return True

    def _find_leader(self, job: Job, keep: int) -> bool:
        """Whether somebody is computing more of this prompt's beginning than is there: then once is enough."""
        found = find_leader(job, self._running, keep, self.ledger, self.memory.round_down)
        if found is None:
            return False
        job.leader, job.leader_depth = found
        job.leader.cuts.append(job.leader_depth)
        self.counters.coalesced += 1
        return True

    def _run(self, job: Job, sequence: Slot) -> None:
        job.sequence, job.aside, job.regular = sequence, False, sequence.aligned
        job.admitted = job.admitted or time.monotonic()
        self._waiting.remove(job)
        self._running.append(job)

    def _finish(self, job: Job, reason: Reason, stop: bytes | int | None = None) -> None:
        self._events.append(Finished(job.request.id, reason, job.usage(), stop))
        self._forget(job)

    def _fail(self, job: Job, error: AfterglowError) -> None:
        self._events.append(Failed(job.request.id, error, job.usage()))
        self._forget(job)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.request.id]
        job.sampler.close()
        self.looking.forget(job)
        self.drafting.forget(job)
        if job.parked is not None:
            self.memory.unparked(job.parked)
        if job in self._waiting:
            self._waiting.remove(job)
        else:
            self._stop_running(job)

    def _stop_running(self, job: Job) -> None:
        self._running.remove(job)
        sequence, job.sequence, job.replay = job.held, None, 0
        sequence.drop_ahead()
        self.memory.release(sequence)

    # --- one decode

    def _schedule(self) -> list[tuple[Job, int]]:
        now, costs = time.monotonic(), self.memory.costs
        ready = [job for job in self._running[:] if not job.media or self._seen(job)]
        if self.settings.deterministic:
            return grid_step(ready, self.settings.grid, now)
        cells = largest_decode(self.backend.capabilities, costs.per_entry_lately)
        generating, prompts, pictures = sorted_out(ready)
        backlogs = [job.backlog for job in prompts]
        entries = prompt_budget(len(generating), backlogs, self.settings.gap, costs.per_step, costs.per_entry, cells)
        if self.looking.is_turn(pictures, others=bool(generating or prompts)):
            self._rows = entries
            return [(first_of(pictures, now), 1)]
        self.drafting.offer(generating, prompts)
        return schedule(generating, prompts, Budget(cells=cells, prompt_entries=entries), now)

    def _seen(self, job: Job) -> bool:
        """Whether the job's next entry can be computed. A picture that cannot be encoded ends it."""
        if self.looking.ready(job):
            return True
        if (error := self.looking.trouble(job)) is not None:
            self._fail(job, error)
        return False

    def _decode(self, chosen: list[tuple[Job, int]]) -> None:
        spans = [job.span(count, self._rows) for job, count in chosen]
        jobs = [job for job, _ in chosen]
        self.drafting.prepare(jobs)
        with self._guard:
            self._decoding = jobs
        started = time.perf_counter()
        try:
            self.backend.decode(spans)
        except MemoryFull as error:
            self._make_room(jobs, error)
            return
        except (Cancelled, DecodeFailed, InvalidArgument) as error:
            self._recover(jobs, error)
            return
        finally:
            with self._guard:
                self._decoding = []
                self.backend.uninterrupt()
        self._apply(jobs, spans, started)

    def _apply(self, jobs: list[Job], spans: list[Span], started: float) -> None:
        tokens = replayed = 0
        for job, span in zip(jobs, spans, strict=True):  # all that needs no logits: a GPU still computes them
            replayed += job.computed(span, started)
            if job.media and span.ends:
                self.looking.decoded(job)
            if self.settings.deterministic and span.ends:
                job.note_chunk(len(span.ids), self.settings.grid)
        rows, guesses = self.counters.decoded(spans, replayed)
        for index, (job, span) in enumerate(zip(jobs, spans, strict=True)):
            if span.outputs:
                tokens += self._sample(job, index, len(span.ids) - span.outputs)
            elif span.ends:
                self._events.append(Progress(job.request.id, len(job.held), len(job.prompt)))
                self._at_cut(job)
        answers = len(spans) if rows - guesses - replayed == len(spans) else 0
        self._measure(rows, answers, tokens, time.perf_counter() - started)

    def _measure(self, rows: int, answers: int, tokens: int, seconds: float) -> None:
        """A decode took so long: of so many `answers` and nothing else, or with prompts in it."""
        self.counters.encoded = self.looking.pictures.encoded
        if answers:
            self.memory.costs.stepped(seconds)
            self.drafting.measured(rows, answers, tokens, seconds)
        else:
            self.counters.prompt_entries += rows
            self.drafting.account.passed += seconds
            self.memory.costs.computed(rows, seconds)

    def _at_cut(self, job: Job) -> None:
        if len(job.held) in job.cuts and self.backend.capabilities.partial_state:
            self.memory.take_checkpoint(job.held)

    def _sample(self, job: Job, span: int, row: int) -> int:
        """Draw the job's next tokens, `row` being its last known entry; how many there are."""
        job.first_token = job.first_token or time.monotonic()
        if job.request.max_tokens == 0:
            self._finish(job, "length")
            return 0
        before, accepted = len(job.generated), job.accepted
        failure: AfterglowError | None = None
        ending: Ending | None = None
        try:
            ending = continue_answer(job, self.backend, span, row, self._events)
        except AfterglowError as error:
            failure = error
        if job.draft:
            self.drafting.verified(job, len(job.draft), job.accepted - accepted)
            self.counters.drafts += 1
            self.counters.drafted += len(job.draft)
            self.counters.accepted += job.accepted - accepted
        whole = not job.draft or drop_wrong(job, self.drafting.replay)
        if failure is not None:
            self._fail(job, failure)
        elif ending is not None:
            self._finish(job, *ending)
        elif not whole:
            self._wait_again(job)
        return len(job.generated) - before

    # --- when memory is full, or a decode failed

    def _make_room(self, jobs: list[Job], error: MemoryFull) -> None:
        """Do without guesses; evict what is idle; else the youngest job steps aside; one that is alone ends."""
        if any(job.draft for job in jobs):
            return self.drafting.pause()
        if self.memory.evict():
            return
        youngest = max(self._running, key=lambda job: job.submitted)
        if len(self._running) > 1:
            self._park(youngest)
        elif youngest.generated:
            self._finish(youngest, "length")
        else:
            self._fail(youngest, error)

    def _park(self, job: Job) -> None:
        sequence = job.held
        sequence.drop_ahead()
        job.parked = self.memory.park(sequence)
        sequence.clear()
        self._stop_running(job)
        self._waiting.appendleft(job)
        job.aside = True
        self.counters.parked += 1

    def _unpark(self, job: Job) -> bool:
        reuse = self.memory.plan(job.prompt, reuse=False, slot=job.request.sequence, salt=job.request.salt)
        if reuse is None:
            return False
        saved, job.parked = job.parked, None
        assert saved is not None
        self.memory.unparked(saved)
        sequence, _ = self.memory.begin(reuse, job.request.salt)
        try:
            sequence.load(saved.ids, saved.state, saved.aligned)
        except AfterglowError:
            sequence.clear()
        self._run(job, sequence)
        return True

    def _recover(self, jobs: list[Job], error: AfterglowError) -> None:
        """Make every record true again after a decode that stopped in the middle."""
        self.counters.interrupted += isinstance(error, Cancelled)
        for job in jobs:
            sequence = job.held
            sequence.mend(whole=self.backend.capabilities.survives_abort)
            if not isinstance(error, Cancelled):
                job.attempts += 1
            if job.attempts >= MAX_ATTEMPTS:
                self._fail(job, error)
            elif len(sequence) == 0:
                self._wait_again(job)

    def _wait_again(self, job: Job) -> None:
        """The job has lost its memory: it begins again, from what there is."""
        self._stop_running(job)
        self._waiting.appendleft(job)
