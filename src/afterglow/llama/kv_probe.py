"""Probes what the memory of a context can do, on scratch sequences of five tokens.

llama.cpp has more memory classes than the kinds that afterglow knows, and some operations of some classes succeed and
leave a wrong state. So every operation is tried once and judged by the logits after it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.errors import AfterglowError
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.devices import list_devices
from afterglow.llama.state import SavedState
from afterglow.paths import get_cache_directory

PROBE_VERSION = 1  # changes if a probe finds more than before
PREFIX_TOKENS, PROBE_TOKENS = 3, 5
SHIFT_POSITIONS = 7
MIN_BATCH_ROWS = 2 * (PROBE_TOKENS - PREFIX_TOKENS)
MAX_RELATIVE_DIFFERENCE = 0.2  # of logits: another batch shape changes them by about 0.001, a wrong state by about 1
REQUIRED_ABILITIES = {
    "attention": {"trim", "copy"},
    "window": {"trim", "copy", "partial_state"},
    "recurrent": {"copy", "partial_state"},
    "hybrid": {"copy", "partial_state"},
}
logger = logging.getLogger("afterglow.llama.kv_probe")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAbilities:
    """What a memory can do exactly: the logits afterwards are those of a plain computation."""

    trim: bool = False  # drop the last token of a decode
    copy: bool = False  # copy a sequence; true if there is only one
    partial_state: bool = False  # return to a partial state that was saved earlier
    shift: bool = False  # move a sequence to other positions


def confirm_memory_kind(context: LlamaContext) -> None:
    """Probe the memory of an empty context. If it cannot do what its kind can, treat it as the weakest kind.

    A model that behaves as its kind is recorded with its build and settings, and not probed again. Contexts that
    compute no logits, and those with a batch of fewer than four rows, are not probed.
    """
    memory = context.memory
    if memory.kind == "none" or not context.model.info.is_causal or context.settings.embeddings:
        return
    if context.batch.capacity < MIN_BATCH_ROWS or context.max_outputs < 2:
        return
    confirmed = get_cache_directory("probed") / f"memory-{compute_probe_key(context)}"
    if os.path.exists(confirmed):  # False if it cannot be read
        return
    abilities = probe_memory(context)
    required = REQUIRED_ABILITIES[memory.kind] | ({"trim"} if context.max_rollback else set())
    missing = sorted(name for name in required if not asdict(abilities)[name])
    if not missing and abilities.shift == memory.can_shift:
        with contextlib.suppress(OSError):  # it is probed again next time
            confirmed.parent.mkdir(parents=True, exist_ok=True)
            confirmed.touch()
    memory.rejects_shift = not abilities.shift
    if missing:
        logger.warning(
            "the memory of %s does not behave as the kind %r: no %s; its sequences are kept as whole states",
            context.model.path.name,
            memory.kind,
            ", no ".join(missing),
        )
        memory.is_unknown = True


def compute_probe_key(context: LlamaContext) -> str:
    """Return a name for everything that a probe depends on."""
    settings = context.settings
    copies = context.sequences > 1  # with one sequence, copies are not probed
    facts = (PROBE_VERSION, settings.kv_unified, copies, context.ubatch, context.model.settings.gpu_layers)
    devices = [device.name for device in list_devices()]
    return blake3(context.state.key + repr((facts, devices)).encode()).hexdigest()[:32]


def probe_memory(context: LlamaContext) -> MemoryAbilities:
    """Try every operation on a context without sequences, in at most five decodes. It is empty again afterwards."""
    try:
        return _probe_memory(context)
    except AfterglowError as error:  # e.g. an operation succeeded, and the next decode is rejected
        logger.debug("probing the memory failed: %s", error)
        return MemoryAbilities()
    finally:
        context.memory.clear(data=False)
        context.batch.clear()


def _probe_memory(context: LlamaContext) -> MemoryAbilities:
    memory, size = context.memory, context.model.vocabulary.size
    tokens = [(1 + number * max(1, size // 7)) % size for number in range(PROBE_TOKENS)]
    prefix, suffix = tokens[:PREFIX_TOKENS], tokens[PREFIX_TOKENS:]
    sequences = range(min(context.sequences, 2))
    _decode(context, {0: prefix}, 0)
    partial = None if memory.kind == "attention" else context.state.save(0, "partial")
    if len(sequences) > 1:
        memory.copy(0, 1)
    logits = _decode(context, dict.fromkeys(sequences, suffix), PREFIX_TOKENS)
    expected = logits[0]
    trims = memory.remove(0, start=PROBE_TOKENS - 1)
    trims = trims and _are_equal(_decode(context, {0: suffix[-1:]}, PROBE_TOKENS - 1)[0], expected)
    restores = False
    if partial is not None:
        context.state.load(0, partial)
        restores = _are_equal(_decode(context, {0: suffix}, PREFIX_TOKENS)[0], expected)
    return MemoryAbilities(
        trim=trims,
        copy=all(_are_equal(logits[sequence], expected) for sequence in sequences),
        partial_state=restores,
        shift=memory.can_shift and _shifts_exactly(context, partial, suffix, expected),
    )


def _shifts_exactly(
    context: LlamaContext, partial: SavedState | None, suffix: list[int], expected: NDArray[np.float32]
) -> bool:
    """Return whether a sequence that was moved to other positions continues as before."""
    memory = context.memory
    try:
        memory.keep_only(0)  # a shift moves the cells of every sequence that shares them
        if partial is None:
            memory.remove(0, start=PREFIX_TOKENS)
        else:
            context.state.load(0, partial)
        memory.shift(0, SHIFT_POSITIONS)
        return _are_equal(_decode(context, {0: suffix}, PREFIX_TOKENS + SHIFT_POSITIONS)[0], expected)
    except AfterglowError:
        return False


def _decode(context: LlamaContext, rows: Mapping[int, list[int]], position: int) -> list[NDArray[np.float32]]:
    """Decode these tokens of each sequence in one batch; return the logits after the last one of each."""
    context.batch.clear()
    last_rows = []
    for sequence, tokens in rows.items():
        context.batch.add(tokens, position=position, sequence=sequence, outputs=1)
        last_rows.append(context.batch.count - 1)
    context.decode()
    return [context.get_logits(row).copy() for row in last_rows]


def _are_equal(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    difference = float(np.linalg.norm(logits - expected))
    return difference <= MAX_RELATIVE_DIFFERENCE * float(np.linalg.norm(expected - expected.mean()))
