"""Child process of `probe`: loads a file, runs it briefly, and prints the failure reason as its last line."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np

from afterglow.errors import AfterglowError, InvalidModel
from afterglow.llama.context import LlamaContext
from afterglow.llama.gguf.header import read_header
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.projector import Projector
from afterglow.llama.settings import ContextSettings
from afterglow.media.types import AudioData, ImageData, MediaData

GIBIBYTE = 1024**3
MAX_DECODED_BYTES = 1 * GIBIBYTE  # larger models are loaded but not run: reading all weights takes too long
PROBE_TEXT = bytes(range(1, 256)) + "Zürich 🌍 <|im_start|> the end.\n".encode()
PROBE_MEDIA: dict[str, MediaData] = {
    "image": ImageData(width=64, height=48, pixels=bytes(range(256)) * 36),
    "audio": AudioData(sample_rate=16_000, samples=bytes(4 * 16_000)),
}


def main(path: Path, companion: Path | None) -> None:
    size = path.stat().st_size + (companion.stat().st_size if companion else 0)
    limit = 4 * size + 16 * GIBIBYTE  # false sizes in the file must not exhaust the machine's memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if read_header(path).metadata.get("general.type") in ("adapter", "mmproj"):
        return  # needs a model to load; the header was checked already
    if companion is not None and is_projector(companion):
        return probe_projector(path, companion, size)
    with LlamaModel.load(path, ModelSettings(mmap=True), trust=True) as model:
        vocabulary = model.vocabulary
        tokens = vocabulary.tokenize(PROBE_TEXT, parse_special=True, add_special=True)
        for token in range(vocabulary.size):
            vocabulary.token_to_piece(token)
        if size <= MAX_DECODED_BYTES:
            probe_decode(model, tokens[:2] or [0], companion)


def is_projector(path: Path) -> bool:
    metadata = read_header(path).metadata
    return metadata.get("general.type") == "mmproj" or metadata.get("general.architecture") == "clip"


def probe_projector(path: Path, companion: Path, size: int) -> None:
    """Encode a small image and one second of silence, as far as the projector supports them."""
    with LlamaModel.load(path, ModelSettings(mmap=True), trust=True) as model:
        projector = Projector.load(model, companion, trust=True)
        if not projector.modalities:
            raise InvalidModel(str(companion), "it supports neither images nor audio")
        for modality in projector.modalities if size <= MAX_DECODED_BYTES else ():
            for embedding in projector.encode([PROBE_MEDIA[modality]])[0]:
                if not np.isfinite(embedding.rows).all():
                    raise InvalidModel(str(companion), f"its {modality} embeddings are not finite")


def probe_decode(model: LlamaModel, tokens: list[int], adapter: Path | None) -> None:
    settings = ContextSettings(cells=64, batch=32, ubatch=32, outputs=1, threads=1, embeddings=not model.info.is_causal)
    with LlamaContext(model, settings) as context:
        if adapter is not None:
            context.set_adapters({LoraAdapter.load(model, adapter, trust=True): 1.0})
        context.batch.add(tokens, position=0, sequence=0, outputs=1)
        context.decode()
        if model.info.is_causal and not np.isfinite(context.get_logits(len(tokens) - 1)).all():
            raise InvalidModel(str(model.path), "its logits are not finite")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    except AfterglowError as error:
        print(getattr(error, "reason", error), file=sys.stderr)
        sys.exit(1)
