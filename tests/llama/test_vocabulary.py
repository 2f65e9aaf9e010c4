"""Text to tokens and back, in bytes."""

from __future__ import annotations

import pytest

from afterglow.errors import InvalidArgument

TEXTS = ["hello the world", "", " leading", "naïve Zürich 🌍", "a\nb\t c", "<|im_start|>user", "日本語テキスト"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_way_there_and_back(open_model, text):
    vocabulary = open_model("attention").vocabulary
    assert vocabulary.detokenize(vocabulary.tokenize(text), special=True) == text.encode()


def test_control_tokens_in_text_stay_text_unless_asked_for(open_model):
    vocabulary = open_model("attention").vocabulary
    assert len(vocabulary.tokenize("<|im_start|>")) > 1
    (token,) = vocabulary.tokenize("<|im_start|>", parse_special=True)
    assert vocabulary.is_control(token)
    assert vocabulary.detokenize([token]) == b""
    assert vocabulary.detokenize([token], special=True) == b"<|im_start|>"


def test_a_character_may_lie_in_several_tokens(open_model):
    vocabulary = open_model("attention").vocabulary
    ids = vocabulary.tokenize("🌍")
    assert len(ids) > 1
    assert b"".join(vocabulary.token_to_piece(token) for token in ids) == "🌍".encode()


def test_the_table_of_pieces_agrees_with_single_pieces(open_model):
    vocabulary = open_model("attention").vocabulary
    assert len(vocabulary.pieces) == vocabulary.size
    assert vocabulary.pieces[100] == vocabulary.token_to_piece(100)


def test_special_tokens_and_ends_are_known(open_model):
    vocabulary = open_model("attention").vocabulary
    assert vocabulary.special_tokens["eos"] in vocabulary.eog_tokens
    assert "mask" not in vocabulary.special_tokens


def test_bytes_that_are_no_text_are_taken_as_they_are(open_model):
    vocabulary = open_model("attention").vocabulary
    assert vocabulary.tokenize(b"abc") == vocabulary.tokenize("abc")
    assert vocabulary.tokenize(b"\xff\xfe")
    assert vocabulary.tokenize("lone surrogate \ud800")


@pytest.mark.parametrize("bad", [[-1], [10**9], [2**40], [1.5], [[1]], ["a"]])
def test_ids_that_are_no_tokens_are_refused(open_model, bad):
    vocabulary = open_model("attention").vocabulary
    with pytest.raises(InvalidArgument):
        vocabulary.check_tokens(bad)


def test_metadata_and_template_come_from_the_file(open_model):
    model = open_model("attention")
    assert model.metadata["general.architecture"] == "llama"
    assert "im_start" in (model.get_chat_template() or "")
    assert model.get_chat_template("no such template") is None
