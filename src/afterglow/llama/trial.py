"""Trial of a model that was never loaded: uses its vocabulary and its weights once, under a limit of memory."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import numpy as np

from afterglow.errors import InvalidModel
from afterglow.llama.context import LlamaContext
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.model import LlamaModel
from afterglow.llama.settings import ContextSettings

GIB = 1024**3
MAX_DECODED_BYTES = 1 * GIB  # larger models are loaded but not run: reading all weights takes too long
PROBE_TEXT = bytes(range(1, 256)) + "Zürich 🌍 <|im_start|> the end.\n".encode()


@contextlib.contextmanager
def limit_memory(file_bytes: int) -> Iterator[None]:
    """Limit the address space of this process: false sizes in a file must not exhaust the machine's memory."""
    limit = 4 * file_bytes + 16 * GIB
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def try_model(model: LlamaModel, file_bytes: int, adapter: LoraAdapter | None = None) -> None:
    """Tokenize, read every token and decode two of them. Raises `InvalidModel` if the logits are not finite."""
    vocabulary = model.vocabulary
    tokens = vocabulary.tokenize(PROBE_TEXT, parse_special=True, add_special=True)
    for token in range(vocabulary.size):
        vocabulary.token_to_piece(token)
    if file_bytes <= MAX_DECODED_BYTES:
        _try_decode(model, tokens[:2] or [0], adapter)


def _try_decode(model: LlamaModel, tokens: list[int], adapter: LoraAdapter | None) -> None:
    settings = ContextSettings(cells=64, batch=32, ubatch=32, outputs=1, threads=1, embeddings=not model.info.is_causal)
    with LlamaContext(model, settings) as context:
        if adapter is not None:
            context.set_adapters({adapter: 1.0})
        context.batch.add(tokens, position=0, sequence=0, outputs=1)
        context.decode()
        if model.info.is_causal and not np.isfinite(context.get_logits(len(tokens) - 1)).all():
            raise InvalidModel(str(model.path), "its logits are not finite")
