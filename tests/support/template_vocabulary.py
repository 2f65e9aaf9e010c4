"""Stand-ins for the vocabulary of a published template: its tokens are those that the template writes.

The models of the published templates are too large for tests. `TemplateVocabulary` needs no file: text has one token
per character. `build_template_document` builds a file for llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gguf import TokenType

from support.gguf_document import Document
from support.pre_tokenizers import build_document

CONTROL_TEXT = re.compile(
    r"<\|[^\s<>|{}']*\|>|<｜[^\s<>{}']*｜>|<\|?[a-z_:]+\|?>|</[a-z_:]+>|\[/?[A-Z_]{3,}\]|\]~?!?b[\[\]]|\[e~\[|\]<\]\w+\[>\["  # noqa: RUF001
)
# Some templates join these: `'<|' + message.role + '|>'`.
JOINED_CONTROL_TEXTS = (
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
    "<tool_call>",
    "<think>",
    "<s>",
    "</s>",  # the end token of `special_tokens`
)
FIRST_CONTROL_TOKEN = 0x110000
# What the converter of llama.cpp makes a control token by its look, and ends of generation, which always are. In many
# files, other tags are user-defined tokens.
CONTROL_LOOK = re.compile(
    r"<\|.*\|>|<｜.*｜>|[\[\]].*|</?s>|<sep>|</assistant>|<seed:eos>|<end_of_\w+>"  # noqa: RUF001
)


def find_token_texts(template: str) -> list[str]:
    """Return the texts of the tokens that a template writes."""
    return sorted({*CONTROL_TEXT.findall(template), *JOINED_CONTROL_TEXTS})


def build_template_document(template: str, kind: TokenType) -> Document:
    """Return a file with the tiny vocabulary, the tokens that a template writes as tokens of `kind`, and no weights."""
    document = build_document("qwen2")
    add_tokens(document, find_token_texts(template), kind)
    return document


def add_tokens(document: Document, texts: Iterable[str], kind: TokenType) -> None:
    """Add the tokens that a file does not have yet."""
    tokens, kinds = document.find("tokenizer.ggml.tokens"), document.find("tokenizer.ggml.token_type")
    assert tokens is not None
    assert kinds is not None
    new = [text.encode() for text in texts if text.encode() not in tokens.values]
    tokens.values += new
    kinds.values += [int(kind)] * len(new)


class TemplateVocabulary:
    """Vocabulary of single characters and the tokens of a template: control tokens, and user-defined ones, which are
    parsed in every text as in llama.cpp."""

    adds_bos = False
    special_tokens = {"bos": -1, "eos": -2}  # noqa: RUF012

    def __init__(self, template: str) -> None:
        texts = find_token_texts(template)
        tokens = {text: FIRST_CONTROL_TOKEN + index for index, text in enumerate(texts)}
        self.control_tokens_by_text = {text: token for text, token in tokens.items() if CONTROL_LOOK.fullmatch(text)}
        self.user_defined_tokens_by_text = dict(tokens.items() - self.control_tokens_by_text.items())
        self.control_tokens = frozenset(self.control_tokens_by_text.values())
        self.end_token = FIRST_CONTROL_TOKEN + len(texts)  # not written by the template
        self.eog_tokens = frozenset({self.end_token})
        self._tokens = tokens
        self._texts = {token: text for text, token in tokens.items()}

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        return self._tokenize(text, self._tokens if parse_special else self.user_defined_tokens_by_text)

    tokenize_continuation = tokenize

    def tokenize_output(self, text: str, visible: frozenset[int]) -> list[int]:
        """Tokenize generated text. The control tokens `visible` are parsed."""
        return self._tokenize(text, [*self.user_defined_tokens_by_text, *(self._texts[token] for token in visible)])

    def _tokenize(self, text: str, texts: Iterable[str]) -> list[int]:
        """Parse a text for the tokens `texts`, longest first."""
        patterns = map(re.escape, sorted(texts, key=len, reverse=True))
        pieces = re.split(f"({'|'.join(patterns) or '(?!)'})", text)
        return [
            token
            for index, piece in enumerate(pieces)
            for token in ([self._tokens[piece]] if index % 2 else map(ord, piece))
        ]

    def get_text(self, token: int) -> str:
        return {-1: "<s>", -2: "</s>"}[token]

    def token_to_piece(self, token: int, *, special: bool = True) -> bytes:
        if token < FIRST_CONTROL_TOKEN:
            return chr(token).encode()
        return b"" if token in self.control_tokens and not special else self._texts.get(token, "").encode()

    def get_strip_flags(self, token: int) -> tuple[bool, bool]:
        return False, False

    def get_control_tokens(self, tokens: tuple[int, ...]) -> list[str]:
        """Return the texts of the template's tokens among `tokens`, in order."""
        return [self._texts[token] for token in tokens if token in self._texts]
