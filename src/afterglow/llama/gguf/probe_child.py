"""Child process of `probe`: loads a file, runs it briefly, and prints the failure reason as its last line."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from afterglow.errors import AfterglowError, InvalidModel
from afterglow.llama.gguf.header import read_header
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.projector import Projector
from afterglow.llama.trial import MAX_DECODED_BYTES, limit_memory, try_model
from afterglow.media.types import AudioData, ImageData, MediaData

PROBE_MEDIA: dict[str, MediaData] = {
    "image": ImageData(width=64, height=48, pixels=bytes(range(256)) * 36),
    "audio": AudioData(sample_rate=16_000, samples=bytes(4 * 16_000)),
}


def main(path: Path, companion: Path | None) -> None:
    size = path.stat().st_size + (companion.stat().st_size if companion else 0)
    with limit_memory(size):
        probe_file(path, companion, size)


def probe_file(path: Path, companion: Path | None, size: int) -> None:
    """Load a file, with its companion, and use it."""
    if read_header(path).metadata.get("general.type") in ("adapter", "mmproj"):
        return  # needs a model to load; the header was checked already
    if companion is not None and is_projector(companion):
        return probe_projector(path, companion, size)
    with LlamaModel.load(path, ModelSettings(mmap=True), trust=True) as model:
        try_model(model, size, None if companion is None else LoraAdapter.load(model, companion, trust=True))


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


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    except AfterglowError as error:
        print(getattr(error, "reason", error), file=sys.stderr)
        sys.exit(1)
