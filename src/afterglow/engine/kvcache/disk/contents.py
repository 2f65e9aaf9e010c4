"""Contents of the files of blocks, checkpoints and last logits, from what is in RAM."""

from __future__ import annotations

import numpy as np

from afterglow.engine.kvcache.blocks import Block, BlockTree
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.disk.files import CacheFile, FileKind
from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.types.backend import Backend
from afterglow.engine.types.entries import EntryInterner


class FileBuilder:
    """Builds the files of blocks, checkpoints and last logits that are in RAM, on the thread of a writer."""

    def __init__(
        self, backend: Backend, interner: EntryInterner, cost_model: CostModel, tree: BlockTree, ram: RamTier
    ) -> None:
        self._backend = backend
        self._interner = interner
        self._cost_model = cost_model
        self._model = tree.hasher.model
        self._ram = ram

    def build_file(self, kind: FileKind, key: bytes) -> CacheFile | None:
        """Return the file to write; None if its contents have left RAM."""
        match kind:
            case "cells":
                return self._build_block_file(key)
            case "state":
                return self._build_checkpoint_file(key)
            case "logits":
                return self._build_logits_file(key)

    def _build_block_file(self, key: bytes) -> CacheFile | None:
        block = self._ram.get(key)
        if block is None or (rows := block.rows) is None:
            return None
        return CacheFile(
            kind="cells",
            model=self._model,
            key=key,
            parent=block.parent,
            start=block.start,
            entries=block.entries,
            cells=block.cells,
            seconds=len(block.entries) * self._cost_model.seconds_per_entry,
            value=self._value_per_byte,
            layout=block.layout,
            payload=[rows.reshape(-1).data],
            pinned_until=block.pinned_until,
        )

    def _build_checkpoint_file(self, key: bytes) -> CacheFile | None:
        checkpoint = self._ram.checkpoints.find(key)
        if checkpoint is None:
            return None
        seconds = checkpoint.position * self._cost_model.seconds_per_entry
        is_standalone = not self._backend.capabilities.has_attention_cells
        return CacheFile(
            kind="state",
            model=self._model,
            key=key,
            parent=checkpoint.parent,
            start=checkpoint.start,
            entries=self._interner.to_portable_entries(checkpoint.entries),
            cells=0,
            seconds=seconds,
            value=seconds / checkpoint.nbytes if is_standalone else self._value_per_byte,
            layout=b"",
            payload=self._backend.serialize_state(checkpoint.state),
            pinned_until=checkpoint.pinned_until,
            needs_cells=not is_standalone,
        )

    def _build_logits_file(self, key: bytes) -> CacheFile | None:
        last_logits = self._ram.logits.get(key)
        if last_logits is None:
            return None
        seconds = self._cost_model.seconds_per_row
        return CacheFile(
            kind="logits",
            model=self._model,
            key=key,
            parent=last_logits.parent,
            start=last_logits.start,
            entries=self._interner.to_portable_entries(last_logits.entries),
            cells=0,
            seconds=seconds,
            value=seconds / last_logits.nbytes,
            layout=b"",
            payload=[last_logits.logits.view(np.uint8).data],
            needs_cells=self._backend.capabilities.has_attention_cells,
        )

    @property
    def _value_per_byte(self) -> float:
        """Seconds saved per byte of cells and of the checkpoints over them: neither can be loaded without the other."""
        return self._cost_model.seconds_per_entry / max(self._cost_model.bytes_per_entry, 1.0)


def is_file_of(file: CacheFile, block: Block) -> bool:
    """Return whether a file holds the cells of a block. Its key alone does not prove it."""
    matches = (file.parent, file.start, file.cells) == (block.parent, block.start, block.cells)
    return matches and np.array_equal(file.entries, block.entries)
