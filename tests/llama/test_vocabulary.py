"""Tokenization and detokenization, in bytes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from afterglow.errors import InvalidArgument, InvalidModel
from afterglow.llama import vocabulary as vocabulary_module
from afterglow.llama.deep_call import call_with_stack
from afterglow.llama.gguf.formats import ValueType
from afterglow.llama.library.loader import get_library
from support import pre_tokenizers
from support.gguf_document import Document
from support.pre_tokenizers import (
    PRE_TOKENIZERS,
    RECURSIVE,
    SHAPES,
    build_document,
    build_spm_document,
    build_text,
    load_vocabulary,
)

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


def test_a_continuation_has_no_space_before_it(tmp_path):
    with load_vocabulary(build_spm_document("<tag>"), tmp_path) as model:
        vocabulary = model.vocabulary
        for text in ("word", "<tag>", " word", "\ue000", ""):
            assert vocabulary.detokenize(vocabulary.tokenize_continuation(text)).decode() == text
        assert vocabulary.detokenize(vocabulary.tokenize("word")) == b" word"


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


# --- untrusted texts: llama.cpp recurses once per character, and some of its searches take quadratic time


@pytest.fixture
def open_vocabulary(tmp_path, stack):
    """Return a function that loads a vocabulary by the name of its pre-tokenizer, or from a document."""

    def load(source: str | Document) -> vocabulary_module.Vocabulary:
        document = build_document(source) if isinstance(source, str) else source
        return stack.enter_context(load_vocabulary(document, tmp_path)).vocabulary

    return load


def test_tokens_for_projects_and_files_are_known(open_vocabulary):
    document = build_document("qwen2")
    for number, name in enumerate(("fim_rep", "fim_sep")):
        document.set(f"tokenizer.ggml.{name}_token_id", ValueType.UINT32, number)
    special = open_vocabulary(document).special_tokens
    assert (special["fim_rep"], special["fim_sep"]) == (0, 1)


def tokenize_in_child(characters: int, nbytes: int, names: tuple[str, ...], timeout: float) -> list[list[str]]:
    """Tokenize every shape with every pre-tokenizer in a child process. Return a row for each."""
    command = [sys.executable, pre_tokenizers.__file__, str(characters), str(nbytes), *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    rows = [line.split("\t") for line in child.stdout.splitlines()]
    assert child.returncode == 0, f"crashed after {rows[-1:]}: {child.stderr[-500:]}"
    assert len(rows) == len(names) * len(SHAPES)
    return rows


def test_no_text_overflows_the_stack():
    """24,000 equal letters overflow a stack of 8 MiB, the usual size."""
    rows = tokenize_in_child(24_000, 10**6, RECURSIVE, 120)
    refused = {(name, shape) for name, shape, outcome, _ in rows if not outcome.isdigit()}
    assert refused == {("superbpe", "digits"), ("deepseek-llm", "spaces")}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(6))
def test_no_text_of_a_megabyte_crashes_any_pre_tokenizer(part):
    rows = tokenize_in_child(10**6, 10**6, PRE_TOKENIZERS[part::6], 1700)
    for name, shape, outcome, seconds in rows:
        is_flat = name in vocabulary_module.FLAT_PRE_TOKENIZERS
        assert outcome.isdigit() or not is_flat, (name, shape, outcome)
        assert float(seconds) < 60, (name, shape)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_no_text_with_the_longest_allowed_line_overflows_the_stack():
    rows = tokenize_in_child(vocabulary_module.MAX_LINE_CHARACTERS, 10**7, RECURSIVE, 1700)
    refused = {(name, shape) for name, shape, outcome, _ in rows if not outcome.isdigit()}
    assert refused == {("superbpe", "digits"), ("deepseek-llm", "spaces")}


@pytest.mark.parametrize("name", RECURSIVE)
def test_a_character_takes_less_stack_than_is_provided(open_vocabulary, name):
    vocabulary = open_vocabulary(name)
    assert vocabulary._recursive_pre_tokenizer == name
    texts = {shape: build_text(shape, STACK_CHARACTERS, 10**6) for shape in SHAPES}
    used = {shape: measure_stack(vocabulary, text) / STACK_CHARACTERS for shape, text in texts.items()}
    assert 300 < max(used.values()) < vocabulary_module.STACK_BYTES_PER_CHARACTER / 2, used


FLAT_SAMPLE = ("gemma4", "gpt-2", "kimi-k2", "laguna", "llama3", "qwen2", "qwen35", "smollm")  # one of each group
ALL_FLAT = tuple(sorted(vocabulary_module.FLAT_PRE_TOKENIZERS))
ALL_RECURSIVE = tuple(sorted(set(PRE_TOKENIZERS) - vocabulary_module.FLAT_PRE_TOKENIZERS))


@pytest.mark.parametrize("names", [FLAT_SAMPLE, pytest.param(ALL_FLAT, marks=pytest.mark.full)], ids=["some", "all"])
def test_a_flat_pre_tokenizer_takes_no_stack_per_character(open_vocabulary, names):
    text = "".join(build_text(shape, STACK_CHARACTERS // 6, 10**6) for shape in SHAPES)
    for name in names:
        vocabulary = open_vocabulary(name)
        assert vocabulary._recursive_pre_tokenizer is None
        assert measure_stack(vocabulary, text) < 16 * STACK_CHARACTERS, name


@pytest.mark.parametrize("names", [RECURSIVE, pytest.param(ALL_RECURSIVE, marks=pytest.mark.full)], ids=["some", "all"])
def test_no_match_continues_after_a_line_break(open_vocabulary, names):
    """Except with whitespace and slashes. So the longest line with these bounds the stack."""
    lines = [*(unit * 3 for unit in SHAPES.values() if unit.strip()), "".join(SHAPES.values()) + "<b>it's A/B"]
    for name in names:
        vocabulary = open_vocabulary(name)
        for line_break in ("\n", "\r\n \n"):
            assert measure_stack(vocabulary, line_break.join(lines * 20)) < 32 * 1024, name


STACK_CHARACTERS = 3000


def measure_stack(vocabulary: vocabulary_module.Vocabulary, text: str) -> int:
    """Return the bytes of stack that llama.cpp touches to tokenize a text."""
    data = text.encode()

    def measure() -> int:
        before = read_resident_stack_bytes()
        vocabulary._tokenize_on_this_stack(data, False, False)
        return read_resident_stack_bytes() - before

    return call_with_stack(64 * 1024**2, measure)


def read_resident_stack_bytes() -> int:
    """Return the resident bytes of the mapping with this thread's stack, at whose end glibc puts its descriptor."""
    is_stack = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_stack = int(bounds[1], 16) <= threading.get_ident() < int(bounds[2], 16)
        elif is_stack and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the stack has no mapping")


def test_a_line_that_is_too_long_is_rejected_with_both_numbers(open_vocabulary):
    vocabulary, limit = open_vocabulary("gpt-4o"), vocabulary_module.MAX_LINE_CHARACTERS
    for text in ("a" * 10**6, b"a" * 10**6, "a\n" + " \n" * limit):
        with pytest.raises(InvalidArgument, match=r"has a line of 1,0\d\d,\d\d\d characters, at most 524,288"):
            vocabulary.tokenize(text)


def test_a_long_text_of_short_lines_is_tokenized(open_vocabulary):
    vocabulary = open_vocabulary("gpt-4o")
    line = "the quick brown fox, and 12 hens\n"
    tokens = vocabulary.tokenize(line)
    assert vocabulary.tokenize(line * 3000) == tokens * 3000


def test_a_large_stack_does_not_change_the_tokens(open_vocabulary):
    vocabulary = open_vocabulary("gpt-4o")
    text = " the and" * 3000
    assert vocabulary.tokenize(text) == vocabulary.tokenize(text.encode()) == 3000 * vocabulary.tokenize(" the and")
    with ThreadPoolExecutor(4) as pool:
        assert len({tuple(tokens) for tokens in pool.map(vocabulary.tokenize, [text] * 8)}) == 1


@pytest.mark.parametrize(("name", "text"), [("superbpe", "1" * 9000), ("deepseek-llm", " " * 9000 + "1")])
def test_a_run_that_takes_quadratic_time_is_rejected(open_vocabulary, name, text):
    with pytest.raises(InvalidArgument, match=r"9,000 (digits|spaces) in a row.*8,192 are possible"):
        open_vocabulary(name).tokenize(text)
    assert len(open_vocabulary("qwen2").tokenize(text)) >= 9000  # other pre-tokenizers take linear time


@pytest.mark.parametrize("parse_special", [False, True])
def test_special_tokens_that_take_quadratic_time_are_rejected(open_vocabulary, parse_special):
    document = build_document("qwen2")
    document.find("tokenizer.ggml.tokens").values[5] = b"<b>"
    document.find("tokenizer.ggml.token_type").values[5] = 3 if parse_special else 4  # control or user-defined
    vocabulary = open_vocabulary(document)
    with pytest.raises(InvalidArgument, match="contains 40,000 special tokens, at most 32,768"):
        vocabulary.tokenize("x<b>" * 40_000, parse_special=parse_special)
    text = "<" * 40_000 + "\n" + "<b>" * 1000  # most are not special tokens
    assert vocabulary.tokenize(text, parse_special=parse_special)[-1000:] == [5] * 1000


@pytest.mark.parametrize("data", [b"\xf7\xbf\xbf\xbf", b"a\xf4\x90\x80\x80b", b"\xf5\x80\x80\x80" * 1000])
def test_bytes_beyond_unicode_are_read_as_replacement_characters(open_model, data):
    vocabulary = open_model("attention").vocabulary
    expected = re.sub(rb"[\xf4-\xf7][\x80-\xbf]{3}", "\ufffd".encode(), data)
    assert vocabulary.tokenize(data) == vocabulary.tokenize(expected)


@pytest.mark.full
def test_every_pre_tokenizer_of_the_library_is_known(tmp_path):
    """Try every short text in the library's data as the name of a pre-tokenizer."""
    data = get_library().location.path.read_bytes()
    anchor = data.index(b"\0granite-embed-multi-311m\0")
    near = data[max(0, anchor - 3_000_000) : anchor + 3_000_000]
    names = {name.decode() for name in re.findall(rb"(?<=\0)[A-Za-z][A-Za-z0-9._-]{1,30}(?=\0)", near)}
    names |= {name[match.end() :] for name in names for match in re.finditer(r"[-_.]", name) if name[match.end() :]}
    assert len(names) > 5000
    document = build_document("")
    document.set("tokenizer.ggml.tokens", ValueType.STRING, b"a", b"b")
    document.set("tokenizer.ggml.token_type", ValueType.INT32, 1, 1)
    for key in ("bos", "eos", "eot", "padding"):
        document.set(f"tokenizer.ggml.{key}_token_id", ValueType.UINT32, 0)
    unknown = []
    for name in sorted(names - set(PRE_TOKENIZERS)):
        document.set("tokenizer.ggml.pre", ValueType.STRING, name.encode())
        try:
            load_vocabulary(document, tmp_path).close()
            unknown.append(name)
        except InvalidModel:
            pass
    assert not unknown


def test_every_known_pre_tokenizer_is_in_the_library(open_vocabulary):
    for name in PRE_TOKENIZERS:
        assert len(open_vocabulary(name).tokenize("a" * 20_000)) == 20_000


def test_only_the_vocabulary_tokenizes_texts():
    package = Path(vocabulary_module.__file__).parents[1]
    callers = {path.name for path in package.rglob("*.py") if "symbols.llama_tokenize" in path.read_text()}
    assert callers == {"vocabulary.py"}
