"""Counters of the engine and of the cache tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from afterglow.engine.types.backend import DecodeSpan


@dataclass(slots=True)
class EngineCounters:
    """Totals of an engine since it started."""

    decodes: int = 0
    decodes_ahead: int = 0  # started before the events of the decode before were made
    rows: int = 0
    prompt_entries: int = 0
    reused_entries: int = 0
    skipped_prefills: int = 0  # prompts that were a prefix hit as a whole, with their logits: nothing was computed
    preempted: int = 0
    coalesced: int = 0
    interrupted: int = 0
    moved_sequences: int = 0  # moves that made busy sequences adjacent, so that they are computed together
    max_batch_jobs: int = 0  # most jobs in one decode
    batch_jobs: int = 0  # jobs in all decodes
    draft_steps: int = 0  # times that a draft was verified
    draft_tokens: int = 0  # draft tokens that were decoded
    accepted_tokens: int = 0  # draft tokens that were accepted
    forced_tokens: int = 0  # tokens that a grammar forced, appended without a decode each
    replayed_entries: int = 0  # entries decoded again because the KV cache could not drop only the rejected drafts
    encoded_media: int = 0  # images and audio clips
    pooled_texts: int = 0  # texts that were embedded or scored by a classifier head
    pooled_rows: int = 0  # of the decodes of these texts; not part of `rows`
    pooled_decodes: int = 0  # with texts; not part of `decodes`
    scored_rows: int = 0  # of texts whose tokens were scored; not part of `rows`

    def record_decode(self, spans: Sequence[DecodeSpan], replayed: int) -> tuple[int, int]:
        """Count a decode; return its rows and how many of them were draft tokens."""
        rows = sum([span.rows for span in spans])
        draft_tokens = sum([span.outputs - 1 for span in spans if span.outputs > 1])
        self.decodes += 1
        self.rows += rows
        self.replayed_entries += replayed
        self.max_batch_jobs = max(self.max_batch_jobs, len(spans))
        self.batch_jobs += len(spans)
        return rows, draft_tokens

    def record_pooling(self, texts: int, rows: int, decodes: int) -> None:
        """Count decodes of texts in the contexts for embeddings or for the scores of a classifier head."""
        self.pooled_texts += texts
        self.pooled_rows += rows
        self.pooled_decodes += decodes


@dataclass(slots=True)
class TierCounters:
    """Totals of one cache tier since the engine started."""

    saves: int = 0  # sequences of which blocks were stored
    saved_bytes: int = 0
    hits: int = 0  # prompts loaded from this tier
    misses: int = 0  # prompts with a prefix miss on the device and in this tier
    hit_entries: int = 0  # entries that did not have to be computed
    loaded_bytes: int = 0
    evictions: int = 0  # blocks, checkpoints and last logits
    rejected_saves: int = 0  # sequences not stored because there was no space
    seconds_saved: float = 0.0  # at the present cost of computing; negative if loading took longer

    def record_hit(self, entries: int, nbytes: int, seconds_saved: float) -> None:
        """Count a prompt that was loaded from this tier."""
        self.hits += 1
        self.hit_entries += entries
        self.loaded_bytes += nbytes
        self.seconds_saved += seconds_saved


@dataclass(slots=True)
class StoreReport:
    """What an engine wrote to the disk tier when it was closed."""

    sequences: int = 0  # idle sequences in the KV cache
    files: int = 0
    nbytes: int = 0
    dropped_files: int = 0  # there was no space, or the disk failed
    seconds: float = 0.0
    is_complete: bool = False  # whether everything was written in time
