"""Batch scheduling and prefix coalescing: chooses the jobs and entries of the next decode. Pure functions over jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from afterglow.engine.scheduling.job import Job, RunningJob, WaitingJob
from afterglow.engine.types.backend import Capabilities
from afterglow.engine.types.entries import EntryInterner, common_prefix_length, round_down_to_grid
from afterglow.engine.types.tile import TILE_ROWS, RowTile

AGING_ENTRIES_PER_SECOND = 64  # each second of waiting offsets this many remaining prompt entries
MIN_CHUNK_ENTRIES = 16  # a prefill always advances by this much, however small the time budget
MAX_TILE_OVERRUN = 1.25  # time of a chunk that completes a tile, of the time that it had without it
MIN_SHARE_SAVED = 0.1  # of the time of a row, for which a chunk loses an incomplete tile
MAX_DECODE_SECONDS = 0.5  # bound on a decode that cannot be interrupted
MIN_DECODE_ROWS = 512  # that such a decode may have, however slow it is
MAX_PAUSE_SECONDS = 2.0  # a paused job takes part in a decode at least this often, so that background work advances
BACKGROUND_DECODE_SECONDS = 0.1  # bound on a background prefill: a request that arrives meanwhile waits for its decode
BACKGROUND_SLOWDOWN = 1.25  # how much longer a decode with tokens of other requests may take for background prefill
MIN_COALESCED_CELLS = 16  # below this, computing a prefix twice is simpler than waiting for the leader


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBudget:
    """Limits of one decode."""

    cells: int  # rows of the batch
    prefill_entries: int  # bounds the delay that prefill adds to decoding jobs
    row_tile: RowTile | None = None  # that chunks should fill


def schedule(
    decoding: Sequence[RunningJob], prefilling: Sequence[RunningJob], budget: BatchBudget, now: float
) -> list[tuple[RunningJob, int]]:
    """Return the jobs of the next decode and the number of entries of each.

    Decoding jobs come first, each with its newest token, generated entries to compute before it and draft tokens after
    it. Prefill chunks fill the rest, highest priority first, then shortest remaining prompt. Waiting time is subtracted
    from the remaining length, so no prompt of a priority starves. Prompts of lower priority share a minimal chunk.
    A chunk may take somewhat longer than its budget to complete a row tile.
    """
    decode_cells = budget.cells - (min(MIN_CHUNK_ENTRIES, budget.cells // 2) if prefilling else 0)
    if len(decoding) > decode_cells:  # more jobs than the batch holds: least recently decoded first
        decoding = sorted(decoding, key=lambda running: running.job.last_decoded_at)
    decoding = decoding[:decode_cells]
    spare = decode_cells - len(decoding)
    batch: list[tuple[RunningJob, int]] = []
    for running in decoding:
        extra = min(running.entries_to_recompute + running.forced_entries + len(running.draft), spare)
        batch.append((running, 1 + extra))
        spare -= extra
    remaining = min(budget.cells - decode_cells + spare, budget.prefill_entries)
    ordered = sorted(prefilling, key=lambda running: compute_sort_key(running, now))
    for running in ordered:
        if running.job.priority < ordered[0].job.priority:
            remaining = min(remaining, MIN_CHUNK_ENTRIES)
        limit = running.get_chunk_limit()
        count = min(remaining, limit)
        if 0 < count < limit and budget.row_tile is not None:
            count = _fill_tile(budget.row_tile, count, running, batch)
            count = min(count, limit, budget.cells - sum([rows for _, rows in batch]))
        if count > 0:
            batch.append((running, count))
            remaining -= count
    return batch


def _fill_tile(tile: RowTile, count: int, running: RunningJob, batch: Sequence[tuple[RunningJob, int]]) -> int:
    """Return the entries of a chunk of about `count` whose last tile is complete."""
    shared_rows = tile.count_shared_rows([(rows, other.sequence.position) for other, rows in batch])
    if count <= shared_rows:
        return count
    return shared_rows + align_rows(tile, count - shared_rows, cells=running.sequence.position)


def align_rows(tile: RowTile, rows: int, cells: int) -> int:
    """Return the rows that a chunk of about `rows` should have after `cells`: whole tiles, if that pays.

    It has more rows if that takes at most a quarter longer, and fewer if that makes each row notably faster.

    >>> tile = RowTile(balanced_cells=2000)
    >>> align_rows(tile, 54, 500), align_rows(tile, 20, 500), align_rows(tile, 80, 500), align_rows(tile, 80, 4000)
    (64, 20, 80, 64)
    """
    fewer = rows // TILE_ROWS * TILE_ROWS
    if fewer == rows:
        return rows
    time, more = tile.estimate_time(rows, cells), fewer + TILE_ROWS
    if tile.estimate_time(more, cells) <= MAX_TILE_OVERRUN * time:
        return more
    if fewer and tile.estimate_time(fewer, cells) / fewer <= (1 - MIN_SHARE_SAVED) * time / rows:
        return fewer
    return rows


def select_adapter_set(jobs: Sequence[RunningJob]) -> Sequence[RunningJob]:
    """Return the jobs of the next decode's adapter set: that of the job that has waited for the most decodes.

    Sets take turns, so that none starves.
    """
    if not jobs:
        return jobs
    oldest = min(jobs, key=lambda running: (running.ready_since, running.job.submitted_at))
    return [running for running in jobs if running.adapter_set == oldest.adapter_set]


def compute_sort_key(running: RunningJob, now: float) -> tuple[int, float]:
    """Return priority, then remaining entries less an allowance for waiting time; the smallest is scheduled first."""
    job = running.job
    return -job.priority, running.backlog - AGING_ENTRIES_PER_SECOND * (now - job.submitted_at)


def drop_paused(jobs: Sequence[RunningJob], now: float) -> Sequence[RunningJob]:
    """Return the jobs that may take part in the next decode: all, unless their priorities differ.

    While a prompt is prefilled, prompts of lower priority and background jobs of lower priority pause, so that its
    first token comes as soon as if it were alone. No job pauses for longer than `MAX_PAUSE_SECONDS`.
    """
    if len({running.job.priority for running in jobs}) < 2:
        return jobs
    highest = max((running.job.priority for running in jobs if not running.is_decoding), default=None)

    def may_run(running: RunningJob) -> bool:
        job = running.job
        if highest is None or job.priority >= highest or (running.is_decoding and not job.is_background):
            return True
        return now - max(job.last_decoded_at, job.admitted_at) > MAX_PAUSE_SECONDS

    return [running for running in jobs if may_run(running)]


def pick_victim(jobs: Sequence[RunningJob]) -> RunningJob:
    """Return the job to preempt: the youngest one of the lowest priority."""
    return max(jobs, key=lambda running: (-running.job.priority, running.job.submitted_at))


def partition_jobs(jobs: Iterable[RunningJob]) -> tuple[list[RunningJob], list[RunningJob], list[RunningJob]]:
    """Split jobs into decoding, prefilling text, and prefilling media next."""
    decoding: list[RunningJob] = []
    prefilling: list[RunningJob] = []
    media: list[RunningJob] = []
    for running in jobs:
        is_media = running.job.media_indices and len(running.sequence) in running.job.media_indices
        (media if is_media else decoding if running.is_decoding else prefilling).append(running)
    return decoding, prefilling, media


def pick_first(jobs: Sequence[RunningJob], now: float) -> RunningJob:
    """Return the job to run next among jobs that cannot share a decode."""
    return min(jobs, key=lambda running: compute_sort_key(running, now))


def compute_max_batch(capabilities: Capabilities, seconds_per_entry: float) -> int:
    """Return the rows of one decode. A GPU cannot be interrupted: `MAX_DECODE_SECONDS` bounds its large batches."""
    if capabilities.interruptible:
        return capabilities.batch_cells
    least = min(capabilities.ubatch_cells, MIN_DECODE_ROWS)
    return min(capabilities.batch_cells, max(least, int(MAX_DECODE_SECONDS / seconds_per_entry)))


def compute_prefill_budget(
    decoding_jobs: int,
    backlogs: Sequence[int],
    max_token_gap: float,
    seconds_per_step: float,
    seconds_per_entry: float,
    max_entries: int,
) -> int:
    """Return the prompt entries that fit into a decode without delaying decoding jobs beyond `max_token_gap` seconds.

    `backlogs` are the remaining entries of the prefilling jobs. If more jobs wait for their first token than for their
    next one, a single longer decode is better overall, provided it completes all these prompts: each decoding job then
    waits one gap per prefilling job of its share.
    """
    if not decoding_jobs:
        return max_entries
    shared_gap = max_token_gap * len(backlogs) / decoding_jobs
    if shared_gap > max_token_gap and seconds_per_step + seconds_per_entry * sum(backlogs) <= shared_gap:
        return max_entries
    entries = int((max_token_gap - seconds_per_step) / max(seconds_per_entry, 1e-9))
    return max(MIN_CHUNK_ENTRIES, min(max_entries, entries))


def limit_background_prefill(
    max_entries: int, *, has_interactive_decoding: bool, seconds_per_step: float, seconds_per_entry: float
) -> int:
    """Return the prompt entries of a decode whose prompts are all background work.

    Beside tokens of other requests, the decode takes at most `BACKGROUND_SLOWDOWN` times as long as without prompts.
    Otherwise it is short enough for a request that arrives meanwhile.
    """
    if has_interactive_decoding:
        seconds = (BACKGROUND_SLOWDOWN - 1) * seconds_per_step
    else:
        seconds = max(BACKGROUND_DECODE_SECONDS, 2 * seconds_per_step)
    return min(max_entries, max(MIN_CHUNK_ENTRIES, int(seconds / max(seconds_per_entry, 1e-9))))


def schedule_on_grid(jobs: Sequence[RunningJob], grid: int) -> list[tuple[RunningJob, int]]:
    """Deterministic schedule: one job per decode, round robin, prefill chunks end at multiples of `grid`."""
    runnable = [running for running in jobs if running.backlog > 0]
    if not runnable:
        return []
    first = min(runnable, key=lambda running: _compute_turn(running.job))
    length = len(first.sequence)
    # Generated tokens are computed one by one, also when they are recomputed.
    return [(first, 1 if length >= len(first.job.prompt) else min(first.get_chunk_limit(), grid - length % grid))]


def _compute_turn(job: Job) -> tuple[int, float, float]:
    return -job.priority, job.last_decoded_at, job.submitted_at


# --- prefix coalescing: concurrent requests with a common prefix prefill it once


def find_leader(
    job: Job, running: Iterable[RunningJob], reuse_length: int, interner: EntryInterner, grid: int
) -> tuple[Job, int] | None:
    """Return a running job that will compute more of this prompt's prefix than `reuse_length`, and its position.

    The position is the end of the common prefix. None if there is no such leader or too little is left to wait for.
    """
    if not job.request.use_prefix_cache:
        return None
    for candidate in running:
        if candidate.job.namespace != job.namespace:
            continue
        common_length = min(common_prefix_length(candidate.job.prompt, job.prompt), len(job.prompt) - 1)
        position = round_down_to_grid(common_length, job.prompt, grid)
        computed = max(reuse_length, len(candidate.sequence))
        if position > computed and interner.count_cells(job.prompt[computed:position]) >= MIN_COALESCED_CELLS:
            return candidate.job, position
    return None


def is_following(waiting: WaitingJob, running: Sequence[RunningJob]) -> bool:
    """Return whether the job's leader is still computing the common prefix."""
    leader, position = waiting.leader, waiting.leader_position
    return leader is not None and any(other.job is leader and len(other.sequence) < position for other in running)
