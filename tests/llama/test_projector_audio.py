"""A projector measures and encodes audio of every length and sample rate as mtmd does."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel
from afterglow.llama.projector import AudioLength, MediaChunk, Projector, get_media_size
from afterglow.media.types import AudioData
from afterglow.testing import models
from afterglow.testing.models.notes import LETTERS, PITCHES_HZ
from llama.test_projector import SMALL, decode_prompt, get_helper_logits
from support.media_prompts import note_audio

pytestmark = pytest.mark.native

PROJECTORS = ("projector-wave", "projector-ultravox", "projector-both", "projector-notes")
each_projector = pytest.mark.parametrize("name", PROJECTORS)


@pytest.fixture
def load_projector():
    with ExitStack() as stack:

        def make(name: str, kind: str = "attention") -> Projector:
            return Projector.load(stack.enter_context(LlamaModel.load(models.get_path(kind))), models.get_path(name))

        yield make


@each_projector
def test_an_audio_projector_reports_its_modalities(load_projector, name):
    projector = load_projector(name)
    assert projector.modalities == ({"image", "audio"} if name == "projector-both" else {"audio"})
    assert projector.sample_rate == 16_000


@pytest.mark.parametrize(("rate", "seconds"), [(8_000, 0.5), (22_050, 1.234), (44_100, 0.01), (96_000, 0.7)])
@each_projector
def test_the_placeholder_of_audio_is_known_without_encoding_it(load_projector, name, rate, seconds):
    projector = load_projector(name)
    audio = note_audio("A", seconds, rate)
    placeholder = projector.measure(get_media_size(audio))
    assert placeholder == projector.measure(audio)
    assert projector.encoded_count == 0
    chunks = [entry for entry in placeholder if isinstance(entry, MediaChunk)]
    (embeddings,) = projector.encode([audio])
    assert [embedding.rows.shape for embedding in embeddings] == [(chunk.cells, 64) for chunk in chunks]
    assert all(chunk.positions == chunk.cells and not chunk.non_causal for chunk in chunks)
    assert all(np.isfinite(embedding.rows).all() for embedding in embeddings)


@each_projector
def test_audio_of_every_length_has_the_measured_number_of_rows(load_projector, name):
    """A different number of rows than in the prompt would read out of bounds."""
    projector = load_projector(name)
    for count in (1, 2, 3, 200, 201, 639, 640, 641, 1599, 1600, 1601, 6400, 6401):
        audio = AudioData(sample_rate=16_000, samples=bytes(4 * count))
        placeholder = projector.measure(AudioLength(16_000, count))
        cells = [entry.cells for entry in placeholder if isinstance(entry, MediaChunk)]
        assert [len(embedding.rows) for embedding in projector.encode([audio])[0]] == cells


@each_projector
def test_audio_of_one_sample_is_padded_with_silence(load_projector, name):
    """llama.cpp would abort the process."""
    projector = load_projector(name)
    silence = projector.encode([AudioData(sample_rate=16_000, samples=bytes(4 * 1600))])[0]
    (single,) = projector.encode([AudioData(sample_rate=16_000, samples=bytes(4))])
    assert [embedding.rows.tolist() for embedding in single] == [embedding.rows.tolist() for embedding in silence]


@each_projector
def test_equal_audio_gives_equal_rows_and_different_audio_different_rows(load_projector, name):
    projector = load_projector(name)
    first, second, other = projector.encode([note_audio("A"), note_audio("A"), note_audio("C")])
    assert np.array_equal(first[0].rows, second[0].rows)
    assert not np.allclose(first[0].rows, other[0].rows, atol=0.01)
    (alone,) = projector.encode([note_audio("C")])
    assert np.array_equal(alone[0].rows, other[0].rows)


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
def test_each_note_has_its_largest_value_on_its_own_axis(load_projector, rate):
    projector = load_projector("projector-notes", "notes")
    for number in range(len(PITCHES_HZ)):
        (embeddings,) = projector.encode([note_audio(chr(LETTERS[number]), rate=rate)])
        loudness = (embeddings[0].rows[2:-2, : 2 * len(PITCHES_HZ)] ** 2).sum(axis=0).reshape(-1, 2).sum(axis=1)
        assert loudness.argmax() == number


def test_audio_rows_advance_one_position_each_with_mrope(load_projector):
    projector = load_projector("projector-wave", "hybrid")
    assert projector.uses_mrope
    (embedding,) = projector.encode([note_audio("A")])[0]
    assert embedding.position_offsets.tolist() == [[row] * 4 for row in range(13)]


@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
@pytest.mark.parametrize("name", ["projector-wave", "projector-ultravox", "projector-both"])
def test_decoding_audio_gives_the_logits_of_mtmd_helper(load_projector, kind, name):
    """mtmd_helper_eval_chunks is the reference: text, audio, text."""
    projector = load_projector(name, kind)
    audio, before, after = note_audio("A"), "Listen to this: ", " What is it?"
    tokenize = projector.model.vocabulary.tokenize
    with LlamaContext(projector.model, SMALL) as ours, LlamaContext(projector.model, SMALL) as theirs:
        entries = [*tokenize(before), *projector.measure(audio), *tokenize(after)]
        logits = decode_prompt(ours, projector, audio, entries)
        expected = get_helper_logits(theirs, projector, audio, before, after)
    assert np.array_equal(logits, expected)
