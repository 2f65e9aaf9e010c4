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
)
FIRST_CONTROL_TOKEN = 0x110000


class TemplateVocabulary:
    """Vocabulary of single characters and the control tokens of a template."""

    adds_bos = False
    special_tokens: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, template: str) -> None:
        texts = sorted({*CONTROL_TEXT.findall(template), *JOINED_CONTROL_TEXTS})
        self.control_tokens_by_text = {text: FIRST_CONTROL_TOKEN + index for index, text in enumerate(texts)}

    def tokenize(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def get_strip_flags(self, token: int) -> tuple[bool, bool]:
        return False, False

    def get_control_tokens(self, tokens: tuple[int, ...]) -> list[str]:
        """Return the texts of the control tokens among `tokens`, in order."""
        texts = {token: text for text, token in self.control_tokens_by_text.items()}
        return [texts[token] for token in tokens if token in texts]
