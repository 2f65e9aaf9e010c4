"""Stand-in for the vocabulary of a published template: its control tokens are those that the template writes.

The models of the published templates are too large for tests. Text has one token per character.
"""

from __future__ import annotations

import re

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


class TemplateVocabulary:
    """Vocabulary of single characters and the control tokens of a template."""

    adds_bos = False
    special_tokens = {"bos": -1, "eos": -2}  # noqa: RUF012

    def __init__(self, template: str) -> None:
        texts = sorted({*CONTROL_TEXT.findall(template), *JOINED_CONTROL_TEXTS})
        self.control_tokens_by_text = {text: FIRST_CONTROL_TOKEN + index for index, text in enumerate(texts)}
        self.control_tokens = frozenset(self.control_tokens_by_text.values())
        self.end_token = FIRST_CONTROL_TOKEN + len(texts)  # not written by the template
        self.eog_tokens = frozenset({self.end_token})
        self._texts = {token: text for text, token in self.control_tokens_by_text.items()}

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def tokenize_output(self, text: str, visible: frozenset[int]) -> list[int]:
        """Tokenize generated text. The control tokens `visible` are parsed, longest first."""
        texts = sorted((self._texts[token] for token in visible), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, texts))})", text) if texts else [text]
        return [
            token
            for piece in pieces
            for token in ([self.control_tokens_by_text[piece]] if piece in texts else self.tokenize(piece))
        ]

    def get_text(self, token: int) -> str:
        return {-1: "<s>", -2: "</s>"}[token]

    def token_to_piece(self, token: int, *, special: bool = True) -> bytes:
        if token < FIRST_CONTROL_TOKEN:
            return chr(token).encode()
        return self._texts.get(token, "").encode() if special else b""

    def get_strip_flags(self, token: int) -> tuple[bool, bool]:
        return False, False

    def get_control_tokens(self, tokens: tuple[int, ...]) -> list[str]:
        """Return the texts of the control tokens among `tokens`, in order."""
        return [self._texts[token] for token in tokens if token in self._texts]
