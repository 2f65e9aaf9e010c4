"""Tokenization and detokenization, in bytes."""

from __future__ import annotations

import pytest

from afterglow.errors import InvalidArgument

pytestmark = pytest.mark.native

TEXTS = ["hello the world", "", " leading", "naïve Zürich 🌍", "a\nb\t c", "<|im_start|>user", "日本語テキスト"]


@pytest.mark.parametrize("text", TEXTS)
def test_detokenizing_tokenized_text_restores_it(open_model, text):
    vocabulary = open_model("attention").vocabulary
    assert vocabulary.detokenize(vocabulary.tokenize(text), special=True) == text.encode()


def test_control_tokens_in_text_stay_text_unless_parse_special(open_model):
    vocabulary = open_model("attention").vocabulary
    assert len(vocabulary.tokenize("<|im_start|>")) > 1
    (token,) = vocabulary.tokenize("<|im_start|>", parse_special=True)
    assert vocabulary.is_control(token)
    assert vocabulary.detokenize([token]) == b""
    assert vocabulary.detokenize([token], special=True) == b"<|im_start|>"


def test_a_character_may_span_several_tokens(open_model):
    vocabulary = open_model("attention").vocabulary
    tokens = vocabulary.tokenize("🌍")
    assert len(tokens) > 1
    assert b"".join(vocabulary.token_to_piece(token) for token in tokens) == "🌍".encode()


def test_the_table_of_pieces_matches_single_pieces(open_model):
    vocabulary = open_model("attention").vocabulary
    assert len(vocabulary.pieces) == vocabulary.size
    assert vocabulary.pieces[100] == vocabulary.token_to_piece(100)


def test_special_tokens_and_eog_tokens_are_known(open_model):
    vocabulary = open_model("attention").vocabulary
    assert vocabulary.special_tokens["eos"] in vocabulary.eog_tokens
    assert "mask" not in vocabulary.special_tokens


def test_bytes_that_are_not_text_can_be_tokenized(open_model):
    vocabulary = open_model("attention").vocabulary
    assert vocabulary.tokenize(b"abc") == vocabulary.tokenize("abc")
    assert vocabulary.tokenize(b"\xff\xfe")
    assert vocabulary.tokenize("lone surrogate \ud800")


@pytest.mark.parametrize("bad", [[-1], [10**9], [2**40], [1.5], [[1]], ["a"]])
def test_values_that_are_not_tokens_are_rejected(open_model, bad):
    vocabulary = open_model("attention").vocabulary
    with pytest.raises(InvalidArgument):
        vocabulary.check_tokens(bad)


def test_metadata_and_chat_template_come_from_the_file(open_model):
    model = open_model("attention")
    assert model.metadata["general.architecture"] == "llama"
    assert "im_start" in (model.get_chat_template() or "")
    assert model.get_chat_template("no such template") is None
