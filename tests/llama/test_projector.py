"""Does a projector measure, encode and place pictures as llama.cpp's own way of reading them does?"""

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
from support.media_prompts import COLOURS, PAIRS, coloured, noisy

SMALL = ContextSettings(cells=512, batch=64, ubatch=64, threads=1)


@pytest.fixture
def pair():
    with ExitStack() as stack:

        def make(kind: str, projector: str | None = None, **settings) -> tuple[LlamaModel, Projector]:
            model = stack.enter_context(LlamaModel.load(models.get_path(kind)))
            path = models.get_path(projector or PAIRS[kind])
            return model, Projector.load(model, path, ProjectorSettings(**settings))

        yield make


@pytest.mark.parametrize("kind", PAIRS)
def test_what_stands_for_a_picture_is_known_without_encoding_it(pair, kind):
    _, projector = pair(kind)
    picture = noisy(1)
    measured = projector.measure(ImageSize(64, 48))
    assert measured == projector.measure(picture)
    assert projector.encoded_count == 0
    (piece,) = [one for one in measured if isinstance(one, MediaChunk)]
    ((embedding,),) = projector.encode([picture])
    assert embedding.rows.shape == (piece.cells, 64)
    assert piece.non_causal == embedding.non_causal == (kind == "window")
    assert (piece.positions < piece.cells) == (kind == "hybrid")
    assert embedding.position_offsets[:, 0].max() == (0 if kind == "hybrid" else piece.cells - 1)
    assert projector.modalities == {"image"}


def test_the_tokens_around_a_picture_come_from_the_projector(pair):
    model, projector = pair("hybrid")
    texts = [model.vocabulary.get_text(one) for one in projector.measure(ImageSize(64, 48)) if isinstance(one, int)]
    assert texts == ["<|vision_start|>", "<|vision_end|>"]


@pytest.mark.parametrize("kind", PAIRS)
def test_several_pictures_at_once_are_what_each_is_alone(pair, kind):
    _, projector = pair(kind)
    pictures = [noisy(seed, 64 + 16 * seed, 48) for seed in range(5)]
    together = projector.encode(pictures)
    for picture, (embedding,) in zip(pictures, together, strict=True):
        ((alone,),) = projector.encode([picture])
        assert np.array_equal(alone.rows, embedding.rows)
        assert np.array_equal(alone.position_offsets, embedding.position_offsets)
    assert projector.encoded_count == 10


@pytest.mark.parametrize("kind", PAIRS)
def test_our_decode_of_a_picture_gives_the_logits_of_llama_cpp_s_own(pair, kind):
    """mtmd_helper_eval_chunks is the reference: text, picture, text."""
    model, projector = pair(kind)
    vocabulary, picture = model.vocabulary, noisy(3)
    before, after = "Look at this: ", " What is it?"
    with LlamaContext(model, SMALL) as ours, LlamaContext(model, SMALL) as theirs:
        entries = [*vocabulary.tokenize(before), *projector.measure(picture), *vocabulary.tokenize(after)]
        logits = decoded(ours, projector, picture, entries)
        assert np.array_equal(logits, helper_logits(theirs, projector, picture, before, after))


def decoded(context: LlamaContext, projector: Projector, picture, entries) -> np.ndarray:
    """What follows, with tokens and pictures each in decodes of their own."""
    position, run = 0, []
    ((embedding,),) = projector.encode([picture])
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
        places = position + embedding.position_offsets
        batch = EmbeddingBatch(embedding.rows, places.T if projector.uses_mrope else places[:, 0], sequence=0)
        context.decode_embeddings(batch, causal=not embedding.non_causal)
        position += entry.positions
    raise AssertionError


def helper_logits(context: LlamaContext, projector: Projector, picture, before: str, after: str) -> np.ndarray:
    opened = get_library()
    ffi, symbols = opened.ffi, opened.symbols
    helper = Helper(opened)
    text = before.encode() + ffi.string(symbols.mtmd_default_marker()) + after.encode()
    asked = ffi.new("mtmd_input_text *", (kept := ffi.new("char[]", text), len(text), False, True))
    with projector._open_bitmap(picture) as bitmap:
        chunks = symbols.mtmd_input_chunks_init()
        try:
            bitmaps = ffi.new("mtmd_bitmap *[]", [bitmap])
            assert symbols.mtmd_tokenize(projector.pointer, chunks, asked, bitmaps, 1) == 0
            end = helper.ffi.new("int32_t *")
            pointers = (projector.pointer, context.pointer, chunks)
            given = [helper.ffi.cast("void *", int(ffi.cast("intptr_t", one))) for one in pointers]
            assert helper.call(*given, 0, 0, 64, True, end) == 0
        finally:
            symbols.mtmd_input_chunks_free(chunks)
    del kept
    pointer = symbols.llama_get_logits_ith(context.pointer, -1)
    count = context.model.vocabulary.size
    return np.frombuffer(ffi.buffer(pointer, 4 * count), dtype=np.float32).copy()


class Helper:
    """mtmd's own loop over text and pictures. It is no part of the declarations: afterglow does not use it."""

    def __init__(self, opened) -> None:
        self.ffi = cffi.FFI()
        self.ffi.cdef(
            "int32_t mtmd_helper_eval_chunks(void *, void *, const void *, int32_t, int32_t, int32_t, bool, int32_t *);"
        )
        self.call = self.ffi.dlopen(str(opened.found.path)).mtmd_helper_eval_chunks


def test_the_colour_pair_names_colours(pair):
    model, projector = pair("colours", "projector-colours")
    vocabulary = model.vocabulary
    with LlamaContext(model, SMALL) as context:
        for letter in COLOURS:
            picture = coloured(letter)
            entries = [*vocabulary.tokenize("See "), *projector.measure(picture), *vocabulary.tokenize(" it?\n")]
            context.memory.remove(0)
            logits = decoded(context, projector, picture, entries)
            assert vocabulary.token_to_piece(int(logits.argmax())) == letter.encode()


def test_a_picture_may_take_no_more_tokens_than_allowed(pair):
    _, projector = pair("hybrid", min_tokens=4, max_tokens=6)
    pieces = [one for one in projector.measure(ImageSize(500, 500)) if isinstance(one, MediaChunk)]
    assert pieces[0].cells <= 6
    _, other = pair("hybrid")
    assert other.key != projector.key
    assert next(one for one in other.measure(ImageSize(500, 500)) if isinstance(one, MediaChunk)).cells > 6


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (7, 5), (999, 1001)])
def test_pictures_of_every_shape_are_measured_and_encoded(pair, kind, size):
    _, projector = pair(kind)
    picture = noisy(1, *size)
    ((embedding,),) = projector.encode([picture])
    (piece,) = [one for one in projector.measure(ImageSize(*size)) if isinstance(one, MediaChunk)]
    assert len(embedding.rows) == piece.cells
    assert np.isfinite(embedding.rows).all()


def test_c18_what_a_projector_cannot_take_is_a_typed_error(pair):
    _, projector = pair("attention")
    with pytest.raises(UnsupportedMedia, match="takes image, not audio"):
        projector.measure(AudioData(sample_rate=16_000, samples=bytes(400)))
    with pytest.raises(UnsupportedMedia, match="too large"):
        projector.measure(ImageSize(40_000, 2))
    projector.close()
    with pytest.raises(Closed):
        projector.encode([noisy(1)])


def test_c18_a_broken_or_foreign_projector_is_a_typed_error(tmp_path):
    with LlamaModel.load(models.get_path("attention")) as model:
        with pytest.raises(ModelNotFound):
            Projector.load(model, tmp_path / "none.gguf")
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(models.get_path("projector-llava").read_bytes()[:9000])
        with pytest.raises(InvalidModel):
            Projector.load(model, cut)
        with pytest.raises(InvalidModel):  # a text model is none
            Projector.load(model, models.get_path("draft"))
    with LlamaModel.load(models.get_path("draft")) as narrow, pytest.raises(InvalidModel):  # another width
        Projector.load(narrow, models.get_path("projector-llava"))


def test_closing_the_model_closes_its_projector(pair):
    model, projector = pair("attention")
    model.close()
    assert projector.closed


def test_rows_that_would_abort_are_typed_errors(pair):
    model, _ = pair("window")
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
