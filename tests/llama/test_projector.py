"""A projector measures and encodes images, and its positions match mtmd's own helper."""

from __future__ import annotations

from contextlib import ExitStack

import cffi
import numpy as np
import pytest

from afterglow.errors import Closed, InvalidArgument, InvalidModel, ModelNotFound, UnsupportedMedia
from afterglow.llama.batch import EmbeddingBatch
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel
from afterglow.llama.projector import ImageSize, MediaChunk, Projector, ProjectorSettings
from afterglow.llama.settings import ContextSettings
from afterglow.media.types import AudioData
from afterglow.testing import models
from support.media_prompts import COLORS, PAIRS, color_image, noise_image

pytestmark = pytest.mark.native

SMALL = ContextSettings(cells=512, batch=64, ubatch=64, threads=1)


@pytest.fixture
def load_pair():
    with ExitStack() as stack:

        def make(kind: str, projector: str | None = None, **settings) -> tuple[LlamaModel, Projector]:
            model = stack.enter_context(LlamaModel.load(models.get_path(kind)))
            path = models.get_path(projector or PAIRS[kind])
            return model, Projector.load(model, path, ProjectorSettings(**settings))

        yield make


@pytest.mark.parametrize("kind", PAIRS)
def test_the_placeholder_of_an_image_is_known_without_encoding_it(load_pair, kind):
    _, projector = load_pair(kind)
    image = noise_image(1)
    placeholder = projector.measure(ImageSize(64, 48))
    assert placeholder == projector.measure(image)
    assert projector.encoded_count == 0
    (chunk,) = [entry for entry in placeholder if isinstance(entry, MediaChunk)]
    ((embedding,),) = projector.encode([image])
    assert embedding.rows.shape == (chunk.cells, 64)
    assert chunk.non_causal == embedding.non_causal == (kind == "window")
    assert (chunk.positions < chunk.cells) == (kind == "hybrid")
    assert embedding.position_offsets[:, 0].max() == (0 if kind == "hybrid" else chunk.cells - 1)
    assert projector.modalities == {"image"}


def test_the_tokens_around_an_image_come_from_the_projector(load_pair):
    model, projector = load_pair("hybrid")
    texts = [
        model.vocabulary.get_text(entry) for entry in projector.measure(ImageSize(64, 48)) if isinstance(entry, int)
    ]
    assert texts == ["<|vision_start|>", "<|vision_end|>"]


@pytest.mark.parametrize("kind", PAIRS)
def test_images_encoded_together_equal_those_encoded_alone(load_pair, kind):
    _, projector = load_pair(kind)
    images = [noise_image(seed, 64 + 16 * seed, 48) for seed in range(5)]
    together = projector.encode(images)
    for image, (embedding,) in zip(images, together, strict=True):
        ((alone,),) = projector.encode([image])
        assert np.array_equal(alone.rows, embedding.rows)
        assert np.array_equal(alone.position_offsets, embedding.position_offsets)
    assert projector.encoded_count == 10


@pytest.mark.parametrize("kind", PAIRS)
def test_decoding_an_image_gives_the_logits_of_mtmd_helper(load_pair, kind):
    """mtmd_helper_eval_chunks is the reference: text, image, text."""
    model, projector = load_pair(kind)
    vocabulary, image = model.vocabulary, noise_image(3)
    before, after = "Look at this: ", " What is it?"
    with LlamaContext(model, SMALL) as ours, LlamaContext(model, SMALL) as theirs:
        entries = [*vocabulary.tokenize(before), *projector.measure(image), *vocabulary.tokenize(after)]
        logits = decode_prompt(ours, projector, image, entries)
        assert np.array_equal(logits, get_helper_logits(theirs, projector, image, before, after))


def decode_prompt(context: LlamaContext, projector: Projector, image, entries) -> np.ndarray:
    """Decode tokens and images separately; return the last logits."""
    position, run = 0, []
    ((embedding,),) = projector.encode([image])
    for entry in [*entries, None]:
        if isinstance(entry, int):
            run.append(entry)
            continue
        context.batch.clear()
        context.batch.add(run, position=position, sequence=0, outputs=1)
        context.decode()
        position += len(run)
        if entry is None:
            return context.get_logits(len(run) - 1).copy()
        run = []
        positions = position + embedding.position_offsets
        batch = EmbeddingBatch(embedding.rows, positions.T if projector.uses_mrope else positions[:, 0], sequence=0)
        context.decode_embeddings(batch, causal=not embedding.non_causal)
        position += entry.positions
    raise AssertionError


def get_helper_logits(context: LlamaContext, projector: Projector, image, before: str, after: str) -> np.ndarray:
    library = get_library()
    ffi, symbols = library.ffi, library.symbols
    helper = MtmdHelper(library)
    text = before.encode() + ffi.string(symbols.mtmd_default_marker()) + after.encode()
    buffer = ffi.new("char[]", text)
    input_text = ffi.new("mtmd_input_text *", (buffer, len(text), False, True))
    with projector._open_bitmap(image) as bitmap:
        chunks = symbols.mtmd_input_chunks_init()
        try:
            bitmaps = ffi.new("mtmd_bitmap *[]", [bitmap])
            assert symbols.mtmd_tokenize(projector.pointer, chunks, input_text, bitmaps, 1) == 0
            end = helper.ffi.new("int32_t *")
            pointers = (projector.pointer, context.pointer, chunks)
            arguments = [helper.ffi.cast("void *", int(ffi.cast("intptr_t", pointer))) for pointer in pointers]
            assert helper.call(*arguments, 0, 0, 64, True, end) == 0
        finally:
            symbols.mtmd_input_chunks_free(chunks)
    del buffer  # `input_text` points to it
    pointer = symbols.llama_get_logits_ith(context.pointer, -1)
    count = context.model.vocabulary.size
    return np.frombuffer(ffi.buffer(pointer, 4 * count), dtype=np.float32).copy()


class MtmdHelper:
    """mtmd's own loop over text and images. Afterglow does not use it, so the declarations lack it."""

    def __init__(self, library) -> None:
        self.ffi = cffi.FFI()
        self.ffi.cdef(
            "int32_t mtmd_helper_eval_chunks(void *, void *, const void *, int32_t, int32_t, int32_t, bool, int32_t *);"
        )
        self.call = self.ffi.dlopen(str(library.location.path)).mtmd_helper_eval_chunks


def test_the_color_model_names_colors(load_pair):
    model, projector = load_pair("colors", "projector-colors")
    vocabulary = model.vocabulary
    with LlamaContext(model, SMALL) as context:
        for letter in COLORS:
            image = color_image(letter)
            entries = [*vocabulary.tokenize("See "), *projector.measure(image), *vocabulary.tokenize(" it?\n")]
            context.memory.remove(0)
            logits = decode_prompt(context, projector, image, entries)
            assert vocabulary.token_to_piece(int(logits.argmax())) == letter.encode()


def measure_chunk(projector: Projector, width: int, height: int) -> MediaChunk:
    (chunk,) = [entry for entry in projector.measure(ImageSize(width, height)) if isinstance(entry, MediaChunk)]
    return chunk


def test_an_image_takes_no_more_tokens_than_allowed(load_pair):
    _, projector = load_pair("hybrid", image_min_tokens=4, image_max_tokens=6)
    assert measure_chunk(projector, 500, 500).cells <= 6
    _, unlimited = load_pair("hybrid")
    assert unlimited.key != projector.key
    assert measure_chunk(unlimited, 500, 500).cells > 6


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (7, 5), (999, 1001)])
def test_images_of_every_shape_are_measured_and_encoded(load_pair, kind, size):
    _, projector = load_pair(kind)
    image = noise_image(1, *size)
    ((embedding,),) = projector.encode([image])
    assert len(embedding.rows) == measure_chunk(projector, *size).cells
    assert np.isfinite(embedding.rows).all()


def test_c18_unsupported_media_is_a_typed_error(load_pair):
    _, projector = load_pair("attention")
    with pytest.raises(UnsupportedMedia, match="supports image, not audio"):
        projector.measure(AudioData(sample_rate=16_000, samples=bytes(400)))
    with pytest.raises(UnsupportedMedia, match="too large"):
        projector.measure(ImageSize(40_000, 2))
    projector.close()
    with pytest.raises(Closed):
        projector.encode([noise_image(1)])


def test_c18_a_damaged_or_mismatched_projector_is_a_typed_error(tmp_path):
    with LlamaModel.load(models.get_path("attention")) as model:
        with pytest.raises(ModelNotFound):
            Projector.load(model, tmp_path / "none.gguf")
        truncated = tmp_path / "truncated.gguf"
        truncated.write_bytes(models.get_path("projector-llava").read_bytes()[:9000])
        with pytest.raises(InvalidModel):
            Projector.load(model, truncated)
        with pytest.raises(InvalidModel):  # a text model
            Projector.load(model, models.get_path("draft"))
    with (
        LlamaModel.load(models.get_path("draft")) as narrow,
        pytest.raises(InvalidModel),
    ):  # a text model of another width
        Projector.load(narrow, models.get_path("projector-llava"))


def test_closing_the_model_closes_its_projector(load_pair):
    model, projector = load_pair("attention")
    model.close()
    assert projector.closed


def test_embedding_rows_that_would_abort_are_typed_errors(load_pair):
    model, _ = load_pair("window")
    rows = np.zeros((80, 64), np.float32)
    with LlamaContext(model, SMALL) as context:
        with pytest.raises(InvalidArgument, match="1 to 64"):
            context.decode_embeddings(EmbeddingBatch(rows, np.arange(80, dtype=np.int32), sequence=0), causal=False)
        with pytest.raises(InvalidArgument, match="64 numbers"):
            context.decode_embeddings(EmbeddingBatch(rows[:5, :60], np.arange(5, dtype=np.int32), sequence=0))
        with pytest.raises(InvalidArgument, match="positions"):
            context.decode_embeddings(EmbeddingBatch(rows[:5], np.arange(4, dtype=np.int32), sequence=0))
        with pytest.raises(InvalidArgument, match="sequence"):
            context.decode_embeddings(EmbeddingBatch(rows[:5], np.arange(5, dtype=np.int32), sequence=7))
