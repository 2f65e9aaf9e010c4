"""Draft model: a smaller model with the same vocabulary whose sequences mirror those of the target model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from afterglow.engine.kvcache.prefix_cache import PrefixCache
from afterglow.engine.kvcache.sequence import Sequence as Slot
from afterglow.engine.scheduling.job import Job, RunningJob
from afterglow.engine.speculation.speculator import INITIAL_ACCEPTANCE_RATE, DraftRequest
from afterglow.engine.types.backend import Backend, BackendState, DecodeSpan
from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length, strip_labels
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError, InvalidArgument, KVCacheFull, UnsupportedOperation
from afterglow.llama.vocabulary import Vocabulary

MAX_VOCABULARY_SIZE_DIFFERENCE = 128  # some vocabularies are padded
FIRST_COMPARED_TOKEN = 5  # the first tokens (unknown, start, end) may differ
MAX_FREE_CATCH_UP_ENTRIES = 16  # computed along with a draft without being counted as catching up
CLOSE_TIMEOUT_SECONDS = 1.0  # for writing its prefix cache to disk


def check_vocabularies(target: Vocabulary, draft: Vocabulary) -> None:
    """Raise `InvalidArgument` if a token has different meanings in the two models."""
    if abs(target.size - draft.size) > MAX_VOCABULARY_SIZE_DIFFERENCE:
        raise InvalidArgument(
            "draft", f"has {draft.size} tokens and the model {target.size}: the vocabularies do not match"
        )
    for name in ("bos", "eos"):
        if target.special_tokens.get(name) != draft.special_tokens.get(name):
            target_token, draft_token = target.special_tokens.get(name), draft.special_tokens.get(name)
            raise InvalidArgument("draft", f"has {draft_token} as its `{name}` token and the model {target_token}")
    for token in range(FIRST_COMPARED_TOKEN, min(target.size, draft.size)):
        if target.get_text(token) != draft.get_text(token):
            raise InvalidArgument(
                "draft", f"has {draft.get_text(token)!r} as token {token} and the model {target.get_text(token)!r}"
            )


@dataclass(frozen=True, slots=True)
class MirrorSequence:
    """The draft model's sequence of a job, and its checkpoint positions."""

    slot: Slot
    checkpoint_positions: list[int]


class DraftModel:
    """Drafter that runs a model of its own. It owns the backend it is given.

    It has a prefix cache like the engine's, with checkpoints, RAM tier and disk tier, so it reuses what it computed of
    a conversation, also after a restart. Before each draft it compares its sequence with the known entries of the job
    and keeps the common prefix. So it needs no report of which draft tokens were accepted, nor of changes to the
    target's KV cache. It drafts without adapters, also for requests with adapters.
    """

    name = "draft"

    def __init__(self, backend: Backend, settings: EngineSettings | None = None, relative_size: float = 1.0) -> None:
        """`relative_size` is the size of its weights relative to the target model."""
        self._backend = backend
        self._relative_size = relative_size
        self.prefix_cache = PrefixCache(backend, EntryInterner(), settings or EngineSettings(ram_cache_bytes=0))
        self._mirrors: dict[Job, MirrorSequence] = {}
        self._jobs_without_cells: set[Job] = set()  # their sequences did not fit into the KV cache

    def can_draft(self, running: RunningJob) -> bool:
        return not running.job.media_indices and running.job not in self._jobs_without_cells  # text only

    def get_draft_kind(self, running: RunningJob) -> str:
        return self.name

    def estimate_acceptance(self, running: RunningJob) -> float:
        return INITIAL_ACCEPTANCE_RATE

    def estimate_catch_up_entries(self, running: RunningJob) -> float:
        job = running.job
        mirror = self._mirrors.get(job)
        if mirror is None:
            plan = self.prefix_cache.plan(strip_labels(job.known_entries), namespace=job.request.salt)
            computed = 0 if plan is None else plan.reuse_length
        else:
            computed = len(mirror.slot)
        missing = job.known_length - 1 - computed
        return missing * self._relative_size if missing > MAX_FREE_CATCH_UP_ENTRIES else 0.0

    def catch_up(self, jobs: Sequence[RunningJob]) -> None:
        try:
            for running in jobs:
                self._catch_up(running.job, jobs)
        except KVCacheFull:
            self._free_cells(jobs)
        except AfterglowError:
            self._clear_mirrors()

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in draft_requests]
        jobs = [running for running, _ in draft_requests]
        try:
            ready = [index for index, running in enumerate(jobs) if self._catch_up(running.job, jobs)]
            self._draft_tokens(draft_requests, ready, drafts)
            return drafts
        except KVCacheFull:
            self._free_cells(jobs)
        except AfterglowError:  # a failing draft model must not fail requests: start over
            self._clear_mirrors()
        return [[] for _ in draft_requests]

    def _free_cells(self, jobs: Sequence[RunningJob]) -> None:
        """Evict an idle sequence or, if there is none, draft no more for the youngest job."""
        if not self.prefix_cache.evict():
            youngest = max((running.job for running in jobs), key=lambda job: job.submitted_at)
            self.release(youngest)
            self._jobs_without_cells.add(youngest)

    def _clear_mirrors(self) -> None:
        for mirror in self._mirrors.values():
            mirror.slot.clear()

    def release(self, job: Job) -> None:
        """Return the job's sequence, without draft tokens, to the prefix cache."""
        self._jobs_without_cells.discard(job)
        mirror = self._mirrors.pop(job, None)
        if mirror is not None:
            common_length = common_prefix_length(mirror.slot.entries, strip_labels(job.known_entries))
            with contextlib.suppress(UnsupportedOperation):  # its entries remain those that it computed
                if mirror.slot.can_resume_at(common_length):
                    mirror.slot.truncate(common_length)
            self.prefix_cache.release(mirror.slot)

    def run_idle_task(self) -> bool:
        """Write something of the prefix cache to disk. Return False if there is nothing to write."""
        return self.prefix_cache.write_back()

    def close(self) -> None:
        for job in list(self._mirrors):
            self.release(job)
        self.prefix_cache.close(timeout=CLOSE_TIMEOUT_SECONDS)
        self._backend.close()

    def _get_slot(self, running: RunningJob) -> Slot:
        return self._mirrors[running.job].slot

    def _catch_up(self, job: Job, drafting: Sequence[RunningJob]) -> bool:
        """Compute the job's known entries but the newest token. Return False if this model cannot, or has no slot.

        `drafting` are all jobs of this draft; they keep their sequences.
        """
        known = strip_labels(job.known_entries)
        if int(known.min()) < 0 or int(known.max()) >= self._backend.vocabulary_size:
            return False  # media, or a token that only the target has
        if len(known) > self._backend.capabilities.cells_per_sequence:
            return False
        mirror = self._open_mirror(job, known, drafting)
        if mirror is None:
            return False
        slot, max_entries = mirror.slot, self._backend.capabilities.batch_cells
        while len(slot) < len(known) - 1:
            checkpoint_positions = [position for position in mirror.checkpoint_positions if position > len(slot)]
            stop = min([len(known) - 1, len(slot) + max_entries, *checkpoint_positions])
            started = time.perf_counter()
            chunk = known[len(slot) : stop]
            self._backend.decode([DecodeSpan(slot.seq_id, chunk, slot.position, 0)])
            slot.append_decoded(chunk)
            self.prefix_cache.cost_model.record_prefill(len(chunk), time.perf_counter() - started)
            if stop in mirror.checkpoint_positions:
                self.prefix_cache.take_checkpoint(slot)
        return True

    def _open_mirror(self, job: Job, known: Entries, drafting: Sequence[RunningJob]) -> MirrorSequence | None:
        """Return the job's sequence truncated to the common prefix, or a new one from the longest cached prefix."""
        mirror, salt = self._mirrors.get(job), job.request.salt
        if mirror is not None:
            common_length = min(common_prefix_length(mirror.slot.entries, known), len(known) - 1)
            if mirror.slot.can_resume_at(common_length) and (common_length or not len(mirror.slot)):
                mirror.slot.truncate(common_length)
                return mirror
            self.release(job)
        plan = self.prefix_cache.plan(known, namespace=salt)
        if plan is None:  # jobs that were preempted since occupy slots that they do not use
            jobs = [running.job for running in drafting]
            for idle in [mirrored for mirrored in self._mirrors if mirrored not in jobs]:
                self.release(idle)
            plan = self.prefix_cache.plan(known, namespace=salt)
        if plan is None:
            return None
        slot, _ = self.prefix_cache.acquire(plan, salt)
        positions = self.prefix_cache.plan_checkpoints(slot, strip_labels(job.prompt), job.request.boundaries)
        mirror = self._mirrors[job] = MirrorSequence(slot, positions)
        return mirror

    def _draft_tokens(self, draft_requests: Sequence[DraftRequest], ready: list[int], drafts: list[list[int]]) -> None:
        """Fill `drafts`: each decode adds one draft token to every ready job."""
        saved: list[tuple[Slot, int, BackendState]] = []
        if self._backend.capabilities.memory_kind in ("recurrent", "hybrid"):  # it cannot drop draft tokens
            for slot in [self._get_slot(draft_requests[index][0]) for index in ready]:
                saved.append((slot, len(slot), self._backend.save(slot.seq_id, "partial")))
        for step in range(max([draft_requests[index][1] for index in ready], default=0)):
            active = [index for index in ready if self._can_extend_draft(draft_requests[index], step)]
            if not active:
                break
            spans: list[DecodeSpan] = []
            for index in active:
                job, slot = draft_requests[index][0].job, self._get_slot(draft_requests[index][0])
                token = drafts[index][-1] if step else job.generated[-1]
                spans.append(DecodeSpan(slot.seq_id, [token], slot.position, 1))
            self._backend.decode(spans)
            for row, (index, span) in enumerate(zip(active, spans, strict=True)):
                self._get_slot(draft_requests[index][0]).append_decoded(span.entries)
                drafts[index].append(int(self._backend.get_logits(row, 0).argmax()))
        for slot, length, state in saved:
            slot.restore(length, state)

    def _can_extend_draft(self, draft_request: DraftRequest, step: int) -> bool:
        running, limit = draft_request
        return step < limit and self._get_slot(running).cell_count < self._backend.capabilities.cells_per_sequence
