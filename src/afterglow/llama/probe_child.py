"""The child process of `probe`: loads a file, uses it a little, and says what went wrong on its last line."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np

from afterglow.errors import AfterglowError, InvalidModel
from afterglow.llama.adapter import Adapter
from afterglow.llama.context import Context
from afterglow.llama.header import read_header
from afterglow.llama.model import Model, ModelSettings
from afterglow.llama.projector import Projector
from afterglow.llama.settings import ContextSettings
from afterglow.media.contents import Content, Picture, Sound

GIBIBYTE = 1024**3
DECODED = 1 * GIBIBYTE  # a larger model is loaded but not run: reading all its weights takes too long
EVERY_BYTE = bytes(range(1, 256)) + "Zürich 🌍 <|im_start|> the end.\n".encode()


TRIED: dict[str, Content] = {
    "image": Picture(width=64, height=48, pixels=bytes(range(256)) * 36),
    "audio": Sound(rate=16_000, samples=bytes(4 * 16_000)),
}


def main(path: Path, beside: Path | None) -> None:
    size = path.stat().st_size + (beside.stat().st_size if beside else 0)
    limit = 4 * size + 16 * GIBIBYTE  # a lie about sizes must not take the machine's memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if read_header(path).metadata.get("general.type") in ("adapter", "mmproj"):
        return  # these load beside a model; their header was checked
    if beside is not None and is_projector(beside):
        return encode(path, beside, size)
    with Model.load(path, ModelSettings(mmap=True), trust=True) as model:
        vocabulary = model.vocabulary
        tokens = vocabulary.tokenize(EVERY_BYTE, special=True, bos=True)
        for token in range(vocabulary.size):
            vocabulary.piece(token)
        if size <= DECODED:
            decode(model, tokens[:2] or [0], beside)


def is_projector(path: Path) -> bool:
    metadata = read_header(path).metadata
    return metadata.get("general.type") == "mmproj" or metadata.get("general.architecture") == "clip"


def encode(path: Path, beside: Path, size: int) -> None:
    """A small picture, and a second of silence, through a projector."""
    with Model.load(path, ModelSettings(mmap=True), trust=True) as model:
        projector = Projector.load(model, beside, trust=True)
        if not projector.kinds:
            raise InvalidModel(str(beside), "it takes neither pictures nor sound")
        for kind in projector.kinds if size <= DECODED else ():
            for embedding in projector.encode([TRIED[kind]])[0]:
                if not np.isfinite(embedding.rows).all():
                    raise InvalidModel(str(beside), "what it makes of a picture are not finite numbers")


def decode(model: Model, tokens: list[int], adapter: Path | None) -> None:
    settings = ContextSettings(cells=64, batch=32, ubatch=32, outputs=1, threads=1, embeddings=not model.info.causal)
    with Context(model, settings) as context:
        if adapter is not None:
            context.set_adapters({Adapter.load(model, adapter, trust=True): 1.0})
        context.batch.add(tokens, position=0, sequence=0, outputs=1)
        context.decode()
        if model.info.causal and not np.isfinite(context.logits(len(tokens) - 1)).all():
            raise InvalidModel(str(model.path), "its logits are not finite numbers")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    except AfterglowError as error:
        print(getattr(error, "reason", error), file=sys.stderr)
        sys.exit(1)
