"""Functions to run on an engine through `call` of its host: information, statistics and media.

They are functions of a module, so that they can be pickled, and return plain values.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.host.routing import ReplicaReport, ReplicaSpeeds, shorten_key
from afterglow.engine.inspect.cache import TierUsage, get_tier_usage
from afterglow.engine.scheduling.job import RunningJob
from afterglow.engine.types.adapters import AdapterSet
from afterglow.engine.types.entries import Entries, strip_labels
from afterglow.engine.types.media import EncodedMedia
from afterglow.errors import UnsupportedMedia, UnsupportedOperation
from afterglow.llama.model import ModelInfo
from afterglow.llama.projector import MediaPlaceholder, MediaSize, Projector, get_media_size
from afterglow.llama.sampling import Sampling
from afterglow.media import load
from afterglow.media.data_uri import encode_audio
from afterglow.media.policy import MediaPolicy, Modality
from afterglow.media.resampling import resample
from afterglow.media.types import AudioData
from afterglow.media.windows import split_at_silence

PREVIEW_ENTRIES = 48  # at either end of a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Limits of an engine and facts about its model."""

    model: ModelInfo
    embedding_width: int
    cells: int  # per request
    sequences: int
    memory: str
    batch_cells: int
    media: frozenset[Modality] = frozenset()  # kinds of media allowed in prompts
    media_error: str = ""  # why the given projector cannot be used


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRequest:
    """A request that uses a sequence: fields of `Request`, and its progress."""

    id: str
    sampling: Sampling
    max_tokens: int | None
    ignore_eos: bool
    logprobs: int | None
    adapters: AdapterSet
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int  # of the prompt, beside the cached ones
    generated_tokens: int
    has_new_line: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedSequence:
    """One sequence of the KV cache, with a preview of its first and last entries."""

    number: int
    busy: bool
    tokens: int
    idle_seconds: float
    first_entries: tuple[int, ...]
    last_entries: tuple[int, ...]
    request: RunningRequest | None = None  # that uses it


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCheckpoint:
    """One checkpoint that prompts can start from."""

    tokens: int
    nbytes: int
    idle_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Results of speculative decoding since the start of the engine."""

    draft_tokens: int
    accepted_tokens: int
    mean_draft_length: float  # draft tokens per decode that had any
    seconds_saved: float  # as far as measured; negative if drafts cost time
    drafters: tuple[str, ...]  # names of the active drafters


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of an engine since its start, and usage of its cache tiers."""

    counters: dict[str, int]
    tiers: dict[str, TierUsage]
    speculation: SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheContents:
    """Sequences, checkpoints and tier usage of the prefix cache, and the engine counters."""

    sequences: tuple[CachedSequence, ...]
    checkpoints: tuple[CachedCheckpoint, ...]
    tiers: dict[str, TierUsage]  # by name: "ram", "disk", "shared"
    counters: dict[str, int]
    busy: bool


def get_engine_info(engine: Engine) -> EngineInfo:
    """Return the limits of the engine and facts about its model."""
    capabilities, model = engine.backend.capabilities, _get_llama_backend(engine).context.model
    return EngineInfo(
        model=model.info,
        embedding_width=model.embedding_width,
        cells=capabilities.cells_per_sequence,
        sequences=capabilities.sequences,
        memory=capabilities.memory_kind,
        batch_cells=capabilities.batch_cells,
        media=capabilities.media,
        media_error=engine.media_scheduler.projector_error,
    )


@dataclass(frozen=True, slots=True)
class MediaMeasurement:
    """Placeholders of images and audio in prompts, and the key of the projector that measured them."""

    projector_key: bytes
    measured: tuple[MediaPlaceholder, ...]


def measure_media(engine: Engine, media: Sequence[MediaSize]) -> MediaMeasurement:
    """Measure how many cells images and audio take, without encoding them: their sizes are enough."""
    projector = engine.backend.projector
    if not isinstance(projector, Projector):
        raise UnsupportedMedia("content", engine.media_scheduler.projector_error or "this model accepts only text")
    return MediaMeasurement(projector.key, tuple(projector.measure(size) for size in media))


@dataclass(frozen=True, slots=True)
class DecodedMediaInfo:
    """Properties of decoded media, without its content."""

    size: MediaSize
    digest: bytes
    nbytes: int


_decoder_threads = ThreadPoolExecutor(2, thread_name_prefix="afterglow-decoder")  # starts threads on demand


def decode_media(
    engine: Engine, *, modality: Modality, data: bytes, policy: MediaPolicy, source: str, detail: str
) -> Future[DecodedMediaInfo]:
    """Decode an image or audio file to learn its size and digest, in a thread: the engine continues. Keeps nothing."""

    def decode() -> DecodedMediaInfo:
        media = load.decode_media(modality, data, policy, source=source, detail=detail)
        return DecodedMediaInfo(get_media_size(media), media.digest, media.nbytes)

    return _decoder_threads.submit(decode)


@dataclass(frozen=True, slots=True)
class AudioWindow:
    """Part of a recording, from `start` to `end` seconds."""

    start: float
    end: float
    media: EncodedMedia


def split_audio(
    engine: Engine, *, data: bytes, policy: MediaPolicy, source: str, window_seconds: float
) -> Future[tuple[AudioWindow, ...]]:
    """Decode an audio file, in a thread, and cut it into windows, each a file at the sample rate of the projector."""
    projector = engine.backend.projector
    if not isinstance(projector, Projector) or "audio" not in engine.backend.capabilities.media:
        raise UnsupportedMedia("file", engine.media_scheduler.projector_error or "this model accepts no audio")
    sample_rate = projector.sample_rate

    def build_window(audio: AudioData, file: bytes, start: float) -> AudioWindow:
        media = EncodedMedia(
            modality="audio",
            data=file,
            detail="auto",
            policy=policy,
            size=get_media_size(audio),
            digest=audio.digest,
            nbytes=audio.nbytes,
        )
        return AudioWindow(start, start + audio.seconds, media)

    def split() -> tuple[AudioWindow, ...]:
        from afterglow.media.audio import decode_audio

        audio = decode_audio(data, policy, source=source)
        if audio.seconds <= window_seconds:
            return (build_window(audio, data, 0.0),)
        audio = resample(audio, sample_rate)
        samples = np.frombuffer(audio.samples, np.float32)
        windows = []
        for start, stop in split_at_silence(samples, sample_rate, window_seconds):
            clip = AudioData(sample_rate=sample_rate, samples=samples[start:stop].tobytes())
            file = encode_audio(clip, "FLAC")
            windows.append(build_window(decode_audio(file, policy), file, start / sample_rate))
        return tuple(windows)

    return _decoder_threads.submit(split)


def get_counters(engine: Engine) -> dict[str, int]:
    """Return the engine counters by name."""
    return asdict(engine.counters)


def get_engine_stats(engine: Engine) -> EngineStats:
    """Return the counters of the engine, the usage of its tiers, and the results of speculation."""
    counters = engine.counters
    speculation = SpeculationStats(
        draft_tokens=counters.draft_tokens,
        accepted_tokens=counters.accepted_tokens,
        mean_draft_length=counters.draft_tokens / counters.draft_steps if counters.draft_steps else 0.0,
        seconds_saved=engine.speculator.loss_budget.saved_seconds,
        drafters=engine.speculator.drafter_names,
    )
    return EngineStats(counters=get_counters(engine), tiers=get_tier_usage(engine), speculation=speculation)


def get_replica_report(engine: Engine) -> ReplicaReport:
    """Return the names of the blocks in RAM and the measured speeds, for the routing of requests to replicas."""
    store, cost_model = engine.prefix_cache.store, engine.prefix_cache.cost_model
    shared_tiers = store.tiers[1:]  # without one, replicas cannot load what another one computed
    seconds_per_byte = max((tier.seconds_per_byte for tier in shared_tiers), default=math.inf)
    bytes_per_entry = store.ram.bytes_per_entry or cost_model.bytes_per_entry
    speeds = ReplicaSpeeds(
        seconds_per_entry=cost_model.seconds_per_entry,
        seconds_per_step=cost_model.seconds_per_step,
        load_seconds_per_entry=bytes_per_entry * (cost_model.seconds_per_byte + seconds_per_byte),
    )
    return ReplicaReport(
        model=store.hasher.model,
        block_size=store.hasher.block_size,
        names=frozenset(shorten_key(block.key) for block in store.ram),
        speeds=speeds if cost_model.prefill_costs.is_measured else None,
    )


def get_cache_contents(engine: Engine, salt: str = "") -> CacheContents:
    """Return the contents of the prefix cache. Entries of sequences with another salt are left out."""
    now = time.monotonic()
    requests = {
        running.sequence.seq_id: _describe_running(engine, running)
        for running in engine.running_jobs
        if running.sequence.salt == salt
    }
    return CacheContents(
        sequences=tuple(
            CachedSequence(
                number=slot.number,
                busy=slot.busy,
                tokens=len(slot),
                idle_seconds=0.0 if slot.busy else now - slot.last_used,
                first_entries=_preview(slot.entries[:PREVIEW_ENTRIES]) if slot.salt == salt else (),
                last_entries=_preview(slot.entries[max(PREVIEW_ENTRIES, len(slot) - PREVIEW_ENTRIES) :])
                if slot.salt == salt
                else (),
                request=requests.get(slot.seq_id),
            )
            for slot in engine.prefix_cache.slots
        ),
        checkpoints=tuple(
            CachedCheckpoint(
                tokens=checkpoint.position, nbytes=checkpoint.nbytes, idle_seconds=now - checkpoint.last_used
            )
            for checkpoint in engine.prefix_cache.all_checkpoints
        ),
        tiers=get_tier_usage(engine),
        counters=get_counters(engine),
        busy=engine.is_busy,
    )


def _describe_running(engine: Engine, running: RunningJob) -> RunningRequest:
    job, request = running.job, running.job.request
    return RunningRequest(
        id=request.id,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        logprobs=request.logprobs,
        adapters=request.adapters,
        prompt_tokens=job.prompt_cells,
        cached_tokens=job.cached_cells,
        computed_tokens=max(0, min(running.sequence.cell_count, job.prompt_cells) - job.cached_cells),
        generated_tokens=len(job.generated),
        has_new_line=any(b"\n" in engine.backend.token_to_piece(token) for token in job.generated),
    )


def _preview(entries: Entries) -> tuple[int, ...]:
    return tuple(map(int, strip_labels(entries)))


def _get_llama_backend(engine: Engine) -> LlamaBackend:
    backend = engine.backend
    if not isinstance(backend, LlamaBackend):
        raise UnsupportedOperation("this call", "the engine does not run on llama.cpp")
    return backend
