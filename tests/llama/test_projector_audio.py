"""Does a projector measure and encode sounds as llama.cpp hears them, however short, long or fast they are?"""

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
from llama.test_projector import SMALL, decoded, helper_logits
from support.media_prompts import played

EVERY = ("projector-wave", "projector-ultravox", "projector-both", "projector-notes")
every_projector = pytest.mark.parametrize("name", EVERY)


@pytest.fixture
def hearing():
    with ExitStack() as stack:

        def make(name: str, kind: str = "attention") -> Projector:
            return Projector.load(stack.enter_context(LlamaModel.load(models.get_path(kind))), models.get_path(name))

        yield make


@every_projector
def test_a_projector_that_hears_says_so(hearing, name):
    projector = hearing(name)
    assert projector.modalities == ({"image", "audio"} if name == "projector-both" else {"audio"})
    assert projector.sample_rate == 16_000


@pytest.mark.parametrize(("rate", "seconds"), [(8_000, 0.5), (22_050, 1.234), (44_100, 0.01), (96_000, 0.7)])
@every_projector
def test_what_stands_for_a_sound_is_known_without_encoding_it(hearing, name, rate, seconds):
    projector = hearing(name)
    sound = played("A", seconds, rate)
    measured = projector.measure(get_media_size(sound))
    assert measured == projector.measure(sound)
    assert projector.encoded_count == 0
    pieces = [one for one in measured if isinstance(one, MediaChunk)]
    (embeddings,) = projector.encode([sound])
    assert [one.rows.shape for one in embeddings] == [(piece.cells, 64) for piece in pieces]
    assert all(piece.positions == piece.cells and not piece.non_causal for piece in pieces)
    assert all(np.isfinite(one.rows).all() for one in embeddings)


@every_projector
def test_every_length_fits_what_was_measured(hearing, name):
    """A row more or less than the prompt has room for would read what is not there."""
    projector = hearing(name)
    for count in (1, 2, 3, 200, 201, 639, 640, 641, 1599, 1600, 1601, 6400, 6401):
        sound = AudioData(sample_rate=16_000, samples=bytes(4 * count))
        cells = [one.cells for one in projector.measure(AudioLength(16_000, count)) if isinstance(one, MediaChunk)]
        assert [len(one.rows) for one in projector.encode([sound])[0]] == cells


@every_projector
def test_a_sound_of_one_sample_is_heard_as_a_short_silence(hearing, name):
    """llama.cpp would end the process."""
    projector = hearing(name)
    silence = projector.encode([AudioData(sample_rate=16_000, samples=bytes(4 * 1600))])[0]
    (one,) = projector.encode([AudioData(sample_rate=16_000, samples=bytes(4))])
    assert [embedding.rows.tolist() for embedding in one] == [embedding.rows.tolist() for embedding in silence]


@every_projector
def test_other_sounds_give_other_rows_and_the_same_sound_the_same(hearing, name):
    projector = hearing(name)
    first, second, other = projector.encode([played("A"), played("A"), played("C")])
    assert np.array_equal(first[0].rows, second[0].rows)
    assert not np.allclose(first[0].rows, other[0].rows, atol=0.01)
    (alone,) = projector.encode([played("C")])
    assert np.array_equal(alone[0].rows, other[0].rows)


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
def test_each_note_is_where_the_pair_that_names_it_looks(hearing, rate):
    projector = hearing("projector-notes", "notes")
    for number in range(len(PITCHES_HZ)):
        (heard,) = projector.encode([played(chr(LETTERS[number]), rate=rate)])
        waves = (heard[0].rows[2:-2, : 2 * len(PITCHES_HZ)] ** 2).sum(axis=0).reshape(-1, 2).sum(axis=1)
        assert waves.argmax() == number


def test_rows_of_sound_go_one_position_each_also_with_mrope(hearing):
    projector = hearing("projector-wave", "hybrid")
    assert projector.uses_mrope
    (embedding,) = projector.encode([played("A")])[0]
    assert embedding.position_offsets.tolist() == [[row] * 4 for row in range(13)]


@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
@pytest.mark.parametrize("name", ["projector-wave", "projector-ultravox", "projector-both"])
def test_our_decode_of_a_sound_gives_the_logits_of_llama_cpp_s_own(hearing, kind, name):
    """mtmd_helper_eval_chunks is the reference: text, sound, text."""
    projector = hearing(name, kind)
    sound, before, after = played("A"), "Listen to this: ", " What is it?"
    tokenize = projector.model.vocabulary.tokenize
    with LlamaContext(projector.model, SMALL) as ours, LlamaContext(projector.model, SMALL) as theirs:
        entries = [*tokenize(before), *projector.measure(sound), *tokenize(after)]
        logits = decoded(ours, projector, sound, entries)
        helped = helper_logits(theirs, projector, sound, before, after)
    assert np.array_equal(logits, helped)
