"""`FakeBackend`: a backend of any memory kind, implemented with hashes, and its sampler."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.types.adapters import AdapterSet, LoadedAdapter, build_adapter_key
from afterglow.engine.types.backend import BackendState, Capabilities, DecodeSpan, Sampler
from afterglow.engine.types.constraints import TokenBytes
from afterglow.engine.types.entries import EntryInterner, strip_label
from afterglow.engine.types.media import MediaEncoder
from afterglow.engine.types.tile import RowTile
from afterglow.errors import AfterglowError, Cancelled, InvalidArgument, InvalidState, KVCacheFull
from afterglow.llama.projector import MediaEmbedding
from afterglow.llama.sampling import Sampling
from afterglow.llama.state import StateScope
from afterglow.testing.memory import (
    WINDOW_ENTRIES,
    WINDOW_MARGIN_ENTRIES,
    FakeCell,
    FakeCells,
    FakeKVCache,
    FakeMemoryKind,
    FakeState,
    copy_kv_cache,
    hash_cells,
    hash_integers,
    hash_media_digest,
)

MAX_DRAFT_TOKENS = 16  # per decode


class FakeSampler:
    """Draws from the softmax with the request's seed; takes the argmax at temperature 0."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.draw_count = 0
        self.accepted_tokens: list[int] = []
        self.closed = False

    def sample(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int:
        if allowed is not None:
            masked = np.full_like(logits, -np.inf)
            masked[allowed] = logits[allowed]
            logits = masked
        if self.sampling.is_greedy:
            return int(logits.argmax())
        noise = np.random.default_rng([self.sampling.seed or 0, self.draw_count]).gumbel(size=len(logits))
        self.draw_count += 1
        return int((logits / self.sampling.temperature + noise).argmax())

    def sample_and_accept(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int:
        token = self.sample(logits, allowed)
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        self.accepted_tokens.append(token)

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True, slots=True)
class FakeTokenBytes:
    """Tokens are letters; token 0 ends the generation."""

    pieces: tuple[bytes, ...]
    eog_tokens: frozenset[int] = frozenset({0})
    control_tokens: frozenset[int] = frozenset({0})

    def tokenize(self, text: bytes) -> list[int]:
        return [self.pieces.index(bytes([byte]), 1) for byte in text]


class FakeBackend:
    """A backend of any memory kind that computes with hashes instead of a model.

    `recurrent_snapshots` is the number of earlier states of a recurrent memory, as llama.cpp's `n_rs_seq`;
    `can_replay` is whether it can return to a saved state. With `simulate_rounding`, the shape of a decode changes its
    results, as floating-point rounding does. Results also depend on the `adapters` of a decode. Prompts may contain
    media if `interner` is the engine's; with a `projector` (`FakeProjector`), media entries depend on what it encoded.

    >>> backend = FakeBackend("hybrid", sequences=2)
    >>> backend.decode([DecodeSpan(0, [1, 2, 3], position=0, outputs=1)])
    >>> backend.get_logits(0, 2).shape
    (64,)
    """

    def __init__(
        self,
        memory_kind: FakeMemoryKind = "attention",
        *,
        sequences: int = 4,
        cells_per_sequence: int = 1024,
        batch_cells: int = 64,
        kv_unified: bool = False,
        vocabulary_size: int = 64,
        total_cells: int | None = None,
        recurrent_snapshots: int = 0,
        can_replay: bool = True,
        simulate_rounding: bool = False,
        model_identity: str = "fake",
        projector: MediaEncoder | None = None,
        adapters: Mapping[str, LoadedAdapter] | None = None,
        row_tile: RowTile | None = None,
    ) -> None:
        self._has_recurrent_state = memory_kind in ("recurrent", "hybrid")
        rollbacks = {"attention": cells_per_sequence, "window": WINDOW_MARGIN_ENTRIES}
        self.capabilities = Capabilities(
            memory_kind=memory_kind,
            sequences=sequences,
            cells_per_sequence=cells_per_sequence,
            batch_cells=batch_cells,
            ubatch_cells=batch_cells,
            max_outputs=sequences + MAX_DRAFT_TOKENS,
            kv_unified=kv_unified,
            interruptible=True,
            media=frozenset({"image", "audio"}),
            max_rollback=rollbacks.get(memory_kind, recurrent_snapshots),
            can_replay=can_replay and self._has_recurrent_state,
            row_tile=row_tile,
        )
        self.model_identity = model_identity  # part of `state_key`: states of another model are rejected
        self.adapters: Mapping[str, LoadedAdapter] = dict(adapters or {})
        self.projector = projector
        self.eog_tokens = frozenset({0})
        pieces = tuple(self.token_to_piece(token) for token in range(vocabulary_size))
        self.token_bytes: TokenBytes = FakeTokenBytes(pieces)
        self.vocabulary_size = vocabulary_size
        self.total_cells = total_cells if total_cells is not None else cells_per_sequence * sequences
        self.recurrent_snapshots = recurrent_snapshots
        self.simulate_rounding = simulate_rounding
        self.interner: EntryInterner | None = None
        self.decode_history: list[list[tuple[int, int]]] = []  # (sequence, rows) of every span of every decode
        self.adapter_history: list[AdapterSet] = []  # of every decode
        self.injected_errors: list[Exception] = []  # raised by the next decodes, one each
        self.closed = False
        self._kv_caches = [FakeKVCache() for _ in range(sequences)]
        self._logit_seeds: list[list[int]] = []
        self._interrupted = False

    # --- decode

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        self._check_spans(spans)
        if self._interrupted:
            self._fail(Cancelled("the decode was interrupted"), spans)
        if self.injected_errors:
            self._fail(self.injected_errors.pop(0), spans)
        self._check_capacity(spans)
        self.decode_history.append([(span.sequence, len(span.entries)) for span in spans])
        self.adapter_history.append(spans[0].adapters)
        for kv_cache in self._kv_caches:
            kv_cache.last_decode_rows = 0  # recurrent states are moved without their snapshots
        shape = hash_integers(*[len(span.entries) for span in spans]) if self.simulate_rounding else 0
        self._logit_seeds = [
            self._compute(span, shape) if span.completes_entry else self._add_partial_media(span) for span in spans
        ]

    def _check_spans(self, spans: Sequence[DecodeSpan]) -> None:
        """Reject what llama.cpp would reject or abort on."""
        assert 0 < sum(span.rows for span in spans) <= self.capabilities.batch_cells
        assert sum(span.outputs for span in spans) <= self.capabilities.max_outputs
        assert len({span.sequence for span in spans}) == len(spans), "a decode has one span per sequence"
        assert len({span.adapters for span in spans}) == 1, "a decode has one adapter set"
        for span in spans:
            assert span.position == self._kv_caches[span.sequence].position, "positions are consecutive"
            largest, smallest = max(map(strip_label, span.entries)), min(span.entries)
            if largest >= self.vocabulary_size or (smallest < 0 and self.interner is None):
                raise InvalidArgument("tokens", f"must be from 0 to {self.vocabulary_size - 1}")
            if self.projector is not None and smallest < 0:
                assert len(span.entries) == len(spans) == 1, "media are decoded alone"
                assert span.embedding is not None, "media must be encoded first"

    def _check_capacity(self, spans: Sequence[DecodeSpan]) -> None:
        needed = {span.sequence: sum(self._get_entry_size(int(entry))[0] for entry in span.entries) for span in spans}
        if self.capabilities.memory_kind == "recurrent":
            return  # a recurrent state has constant size
        if self._count_used_cells() + sum(needed.values()) > self.total_cells:
            raise KVCacheFull(sum(needed.values()), self.total_cells)
        if self.capabilities.kv_unified:
            return
        for sequence, cells in needed.items():
            if len(self._kv_caches[sequence].cells) + cells > self.capabilities.cells_per_sequence:
                raise KVCacheFull(cells, self.capabilities.cells_per_sequence)

    def _get_entry_size(self, entry: int) -> tuple[int, int]:
        """Return the cells and the positions of an entry."""
        if entry >= 0 or self.interner is None:
            return 1, 1
        media = self.interner.get_media(entry)
        return media.cells, media.positions

    def _fail(self, error: Exception, spans: Sequence[DecodeSpan]) -> None:
        """Fail as llama.cpp does.

        `KVCacheFull` changes nothing. An aborted decode leaves half of its rows in memory, and corrupts recurrent
        states: those of its sequences and, if it has several, those of all.
        """
        if not isinstance(error, KVCacheFull):
            if len(spans) > 1 and self._has_recurrent_state:
                for kv_cache in self._kv_caches:
                    kv_cache.recurrent_state ^= 0xF00D * (kv_cache.position > 0)
            for span in spans:
                if span.embedding is not None:
                    self._add_partial_media(replace(span, embedding=span.embedding.slice_rows(0, span.rows // 2)))
                else:
                    self._compute(replace(span, entries=span.entries[: len(span.entries) // 2]))
                if self._has_recurrent_state:
                    self._kv_caches[span.sequence].recurrent_state ^= 0xBAD
        raise error

    def _add_partial_media(self, span: DecodeSpan) -> list[int]:
        """Add media rows that more rows follow."""
        kv_cache = self._kv_caches[span.sequence]
        if not kv_cache.partial_media_rows:
            kv_cache.state_before_media = kv_cache.recurrent_state
        kv_cache.partial_media_rows += span.rows
        if self._has_recurrent_state:
            kv_cache.recurrent_state = hash_integers(kv_cache.recurrent_state, kv_cache.partial_media_rows)
        return []

    def _compute(self, span: DecodeSpan, batch_shape: int = 0) -> list[int]:
        """Add the entries to the KV cache; return the content computed for each."""
        kv_cache = self._kv_caches[span.sequence]
        if kv_cache.partial_media_rows:
            # Restore the state before the first media rows, as if all rows came in one decode.
            assert self.interner is not None
            assert span.entries[0] < 0, "incomplete media must be continued by its remaining rows"
            media = self.interner.get_media(int(span.entries[0]))
            assert kv_cache.partial_media_rows + span.rows == media.cells, "media rows come in order, each once"
            kv_cache.recurrent_state, kv_cache.partial_media_rows = kv_cache.state_before_media, 0
        adapter_key = build_adapter_key(span.adapters, self.adapters).encode()
        states: list[int] = []
        contents: list[int] = []
        for entry in span.entries:
            states = [] if entry < 0 else [kv_cache.recurrent_state, *states]
            embedded = self._embed_entry(int(entry), span.embedding)
            row_shape = batch_shape and hash_integers(batch_shape, len(contents))
            contents.append(self._append_entry(kv_cache, int(entry), embedded, row_shape, adapter_key))
        snapshots = states[:-1][: self.recurrent_snapshots]  # newest first, without the state before the first row
        kv_cache.state_snapshots[: len(snapshots)] = snapshots
        kv_cache.last_decode_rows = len(states)
        return contents

    def _embed_entry(self, entry: int, embedding: MediaEmbedding | None) -> int:
        """Return the embedding of an entry as a number: a token itself, media by what was encoded or by its digest."""
        if entry >= 0 or self.interner is None:
            return strip_label(entry)
        if embedding is not None:
            return int(np.ascontiguousarray(embedding.rows[0]).view(np.int64)[0])
        return hash_media_digest(self.interner.get_media(entry).digest)

    def _append_entry(
        self, kv_cache: FakeKVCache, entry: int, embedded: int, batch_shape: int, adapter_key: bytes
    ) -> int:
        kind = self.capabilities.memory_kind
        inputs = [kv_cache.position, embedded, batch_shape, *adapter_key]
        if kind != "recurrent":
            inputs += [len(kv_cache.cells), hash_cells(kv_cache.cells)]
        if kind == "window":
            visible = [cell for cell in kv_cache.window if cell.position > kv_cache.position - WINDOW_ENTRIES]
            inputs += [len(visible), hash_cells(visible)]
        if self._has_recurrent_state:
            inputs.append(kv_cache.recurrent_state)
        content = hash_integers(*inputs)
        count, positions = self._get_entry_size(entry)
        cells = [FakeCell(kv_cache.position + min(i, positions - 1), content + i) for i in range(count)]
        kv_cache.position += positions
        if kind != "recurrent":
            kv_cache.cells += cells
        if kind == "window":
            kv_cache.window = [
                cell
                for cell in kv_cache.window + cells
                if cell.position >= kv_cache.position - WINDOW_ENTRIES - WINDOW_MARGIN_ENTRIES
            ]
        if self._has_recurrent_state:
            kv_cache.recurrent_state = content
        return content

    def get_logits(self, span: int, row: int) -> NDArray[np.float32]:
        noise = np.random.default_rng(self._logit_seeds[span][row]).normal(size=self.vocabulary_size)
        noise[0] -= 2.5  # completions end, but not immediately
        return noise.astype(np.float32)

    def _count_used_cells(self) -> int:
        return len({id(cell) for kv_cache in self._kv_caches for cell in kv_cache.cells})

    # --- KV cache

    def visible_state(self, sequence: int) -> tuple[object, ...]:
        return self._kv_caches[sequence].visible_state()

    def get_position_range(self, sequence: int) -> tuple[int, int] | None:
        kv_cache = self._kv_caches[sequence]
        if kv_cache.position == 0:
            return None
        first = kv_cache.position - 1 if self._has_recurrent_state else 0
        if self.capabilities.memory_kind == "window":
            first = kv_cache.window[0].position
        return first, kv_cache.position - 1

    def can_resume_at(self, sequence: int, position: int) -> bool:
        kv_cache = self._kv_caches[sequence]
        if position and kv_cache.partial_media_rows and self._has_recurrent_state:
            return False
        if position == 0 or position == kv_cache.position:
            return position <= kv_cache.position
        if position > kv_cache.position:
            return False
        if self._has_recurrent_state:
            return kv_cache.position - position <= min(self.recurrent_snapshots, kv_cache.last_decode_rows - 1)
        if self.capabilities.memory_kind == "window":
            return kv_cache.window[0].position <= max(0, position - WINDOW_ENTRIES)
        return True

    def rewind_for_drafter(self, sequence: int, position: int) -> bool:
        return False

    def can_roll_back_after(self, spans: Sequence[DecodeSpan]) -> bool:
        return True

    def truncate(self, sequence: int, position: int) -> None:
        if position == 0:
            self._kv_caches[sequence] = FakeKVCache()
            return
        kv_cache = self._kv_caches[sequence]
        kv_cache.partial_media_rows = 0
        if back := kv_cache.position - position:
            if back <= len(kv_cache.state_snapshots):
                kv_cache.recurrent_state = kv_cache.state_snapshots[back - 1]
            kv_cache.last_decode_rows = 0  # one rollback per decode
        kv_cache.cells = [cell for cell in kv_cache.cells if cell.position < position]
        kv_cache.window = [cell for cell in kv_cache.window if cell.position < position]
        kv_cache.position = position

    def copy(self, source: int, target: int, stop: int) -> int:
        assert self._kv_caches[target].position == 0, "a copy needs an empty target"
        shared = self.capabilities.kv_unified
        kv_cache = self._kv_caches[target] = copy_kv_cache(self._kv_caches[source], copy_cells=not shared)
        if shared:
            self._kv_caches[source].last_decode_rows = 0  # a shared recurrent state is not rolled back
        else:  # copied bytes do not include the cells before a window
            kv_cache.window = [cell for cell in kv_cache.window if cell.position >= kv_cache.position - WINDOW_ENTRIES]
        if stop < kv_cache.position:
            self.truncate(target, stop)
        return 0 if shared else 100 * stop

    def get_state_size(self, sequence: int, scope: StateScope) -> int:
        return 64 if scope == "partial" else 64 + 100 * len(self._kv_caches[sequence].cells)

    def save(self, sequence: int, scope: StateScope, *, long_lived: bool = False) -> FakeState:
        kv_cache = copy_kv_cache(self._kv_caches[sequence], copy_cells=False)
        return FakeState(scope, kv_cache, self.get_state_size(sequence, scope))

    def load(self, sequence: int, state: BackendState) -> None:
        if not isinstance(state, FakeState):
            raise InvalidState("it is not a fake state")
        saved, kv_cache = copy_kv_cache(state.kv_cache, copy_cells=state.scope == "full"), self._kv_caches[sequence]
        if state.scope == "partial":  # the attention cells in kv_cache stay, whatever they are
            saved.cells = [cell for cell in kv_cache.cells if cell.position < saved.position]
        self._kv_caches[sequence] = FakeKVCache()
        limit = self.capabilities.cells_per_sequence
        if self.capabilities.kv_unified:
            limit = self.total_cells - self._count_used_cells()
        if len(saved.cells) > limit:
            raise KVCacheFull(len(saved.cells), limit)
        self._kv_caches[sequence] = saved

    @property
    def state_key(self) -> bytes:
        capabilities = self.capabilities
        parts = self.model_identity, capabilities.memory_kind, str(capabilities.kv_unified)
        return " ".join(parts).encode()

    def extract_cells(self, state: BackendState, partial: BackendState | None) -> FakeCells | None:
        assert isinstance(state, FakeState)
        assert state.scope == "full"
        return FakeCells(state.kv_cache.cells)

    def assemble_state(
        self, layout: bytes, blocks: Sequence[NDArray[np.uint8]], partial: BackendState | None, position: int
    ) -> FakeState:
        if layout != b"fake" or not all(block.ndim == 2 and block.shape[1] == 16 for block in blocks):
            raise InvalidState("they are not fake cells")
        if partial is not None and not isinstance(partial, FakeState):
            raise InvalidState("it is not a fake state")
        rows = np.concatenate([np.ascontiguousarray(block).view(np.int64) for block in blocks])
        cells = [FakeCell(int(cell_position), int(content)) for cell_position, content in rows]
        kv_cache = FakeKVCache(cells, position=position)
        if partial is not None:
            kv_cache.window, kv_cache.recurrent_state = list(partial.kv_cache.window), partial.kv_cache.recurrent_state
        return FakeState("full", kv_cache, 64 + 100 * len(cells))

    def serialize_state(self, partial: BackendState) -> list[bytes | memoryview]:
        assert isinstance(partial, FakeState)
        kv_cache = partial.kv_cache
        numbers = [kv_cache.position, kv_cache.recurrent_state]
        for cell in kv_cache.window:
            numbers += [cell.position, cell.content]
        return [struct.pack(f"<{len(numbers)}q", *numbers)]

    def deserialize_state(self, data: memoryview) -> FakeState:
        if len(data) % 16 or not data:
            raise InvalidState("it is not a fake state")
        (position, state), *window = struct.iter_unpack("<qq", data)
        kv_cache = FakeKVCache([], [FakeCell(*pair) for pair in window], state, position)
        return FakeState("partial", kv_cache, 64)

    def clear(self, sequence: int) -> None:
        self._kv_caches[sequence] = FakeKVCache()

    # --- sampling, interrupt, close

    def sample_rows(self, draws: Sequence[tuple[int, int, Sampler]]) -> list[int | AfterglowError]:
        tokens: list[int | AfterglowError] = []
        for span, row, sampler in draws:
            try:
                tokens.append(sampler.sample_and_accept(self.get_logits(span, row)))
            except AfterglowError as error:
                tokens.append(error)
        return tokens

    def create_sampler(self, sampling: Sampling) -> FakeSampler:
        return FakeSampler(sampling)

    def token_to_piece(self, token: int) -> bytes:
        return bytes([97 + token % 26])

    def interrupt(self) -> None:
        self._interrupted = True

    def clear_interrupt(self) -> None:
        self._interrupted = False

    def close(self) -> None:
        self.closed = True
