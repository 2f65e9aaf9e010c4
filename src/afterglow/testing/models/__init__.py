"""Tiny GGUF models of every memory kind: seeded, byte-identical, written on demand and cached by generator source.

This module maps names to writers and files. It loads no model and needs no native library.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from hashlib import blake2b
from importlib import resources
from pathlib import Path

from afterglow.errors import ModelNotFound
from afterglow.paths import get_cache_directory
from afterglow.testing.models import colors, embedding, notes, projector, ranking_decoder
from afterglow.testing.models.adapter import INVOCATION_TEXT, write_adapter
from afterglow.testing.models.attention import Gemma3, Llama, MixtureOfExperts
from afterglow.testing.models.audio_projector import write_gemma4ua, write_ultravox, write_vision_and_audio
from afterglow.testing.models.constructed import (
    CYCLE,
    MISDRAFTED_TOKENS,
    build_mtp_head,
    get_successor,
    write_successor_model,
)
from afterglow.testing.models.decoder import Decoder, write_random_model
from afterglow.testing.models.hybrid import Qwen35, write_hybrid
from afterglow.testing.models.mtp_heads import HyV3, Step35, write_mtp_model
from afterglow.testing.models.recurrent import Mamba

__all__ = ["CYCLE", "INVOCATION_TEXT", "get_path", "get_successor", "list_names"]

_DRAFT_DECODER = Llama(embedding_length=32, layers=1, heads=2, kv_heads=1, feed_forward_length=64)
_MODEL_WRITERS: dict[str, Callable[[Path], None]] = {
    "attention": partial(write_random_model, decoder=Llama(), seed=1),
    "draft": partial(write_random_model, decoder=_DRAFT_DECODER, seed=2),
    "window": partial(write_random_model, decoder=Gemma3(), seed=3),
    "recurrent": partial(write_random_model, decoder=Mamba(), seed=4),
    "experts": partial(write_random_model, decoder=MixtureOfExperts(), seed=5),
    "hybrid": partial(write_hybrid, mtp=False),
    "hybrid-mtp": partial(write_hybrid, mtp=True),
    "attention-mtp": partial(write_mtp_model, decoder=HyV3(), heads=1),
    "window-chained": partial(write_mtp_model, decoder=Step35(), heads=2),
    "window-chained-short": partial(write_mtp_model, decoder=Step35(mtp_heads_windowed=True), heads=2),
    "successor-attention": partial(write_successor_model, decoder=Llama()),
    "successor-window": partial(write_successor_model, decoder=Gemma3()),
    "successor-recurrent": partial(write_successor_model, decoder=Mamba()),
    "successor-hybrid": partial(write_successor_model, decoder=Qwen35()),
    "successor-mtp": lambda path: write_successor_model(path, Qwen35(mtp_head=build_mtp_head())),
    "successor-mtp-75": lambda path: write_successor_model(path, Qwen35(mtp_head=build_mtp_head(MISDRAFTED_TOKENS))),
    "successor-headed": lambda path: write_successor_model(path, HyV3(mtp_heads=(build_mtp_head(MISDRAFTED_TOKENS),))),
    "successor-chained": lambda path: write_successor_model(
        path, Step35(mtp_heads=(build_mtp_head(), build_mtp_head(MISDRAFTED_TOKENS)))
    ),
    "embedding": embedding.write_embedding_model,
    "reranker": embedding.write_cross_encoder,
    "reranker-causal": ranking_decoder.write_model,
    "projector-llava": projector.write_llava,
    "projector-gemma3": projector.write_gemma3,
    "projector-qwen": projector.write_qwen,
    "colors": colors.write_model,
    "projector-colors": colors.write_projector,
    "projector-wave": partial(write_gemma4ua, seed=12),
    "projector-ultravox": write_ultravox,
    "projector-both": write_vision_and_audio,
    "notes": notes.write_model,
    "projector-notes": notes.write_projector,
    "adapter": partial(write_adapter, decoder=Llama(), seed=11),
}
_ADAPTED_DECODERS: dict[str, Decoder] = {
    "attention": Llama(),
    "window": Gemma3(),
    "recurrent": Mamba(),
    "hybrid": Qwen35(),
}
for _kind, _decoder in _ADAPTED_DECODERS.items():
    for _seed, _suffix in enumerate(("a", "b", "c", "activated"), start=21):
        _MODEL_WRITERS[f"adapter-{_kind}-{_suffix}"] = partial(
            write_adapter, decoder=_decoder, seed=_seed, activated=_suffix == "activated"
        )


def list_names() -> list[str]:
    """Return the names that `get_path` accepts.

    >>> list_names()[:3]
    ['attention', 'draft', 'window']
    """
    return list(_MODEL_WRITERS)


def get_path(name: str, directory: Path | None = None) -> Path:
    """Return the file of a tiny model. If it does not exist yet, write it in a few milliseconds.

    The default directory is `$AFTERGLOW_CACHE/tiny`, or else in the user's cache.

    >>> model = get_path("attention")
    >>> model.read_bytes()[:4]
    b'GGUF'
    >>> get_path("attention") == model
    True
    """
    if name not in _MODEL_WRITERS:
        raise ModelNotFound(name, f"the tiny models are {', '.join(_MODEL_WRITERS)}")
    directory = directory or get_cache_directory("tiny")
    # A hash of the generator's source is part of the name: an edited generator writes a new file.
    file = directory / f"{name}-{blake2b(_read_sources() + name.encode(), digest_size=6).hexdigest()}.gguf"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        # Rename a complete file, so that concurrent readers and writers never see a partial one.
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=directory) as scratch:
            unfinished = Path(scratch) / file.name
            _MODEL_WRITERS[name](unfinished)
            os.replace(unfinished, file)
    return file


@cache
def _read_sources() -> bytes:
    modules = [module for module in resources.files(__name__).iterdir() if module.name.endswith((".py", ".txt"))]
    return b"".join(module.read_bytes() for module in sorted(modules, key=lambda module: module.name))
