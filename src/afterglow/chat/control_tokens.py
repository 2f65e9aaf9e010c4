"""Control tokens in rendered text: only the template writes them.

A template joins its own text with text of the client: messages, tools and template variables. Client text is escaped
before rendering with a separator, a character that occurs nowhere in it. Control tokens are then searched in the
rendered text, and the separators are removed from the text between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Words that a template may use to form a control token, as in `'<|' + message.role + '|>'`.
TRUSTED_WORDS = frozenset({"system", "developer", "user", "assistant", "tool", "function", "text"})
NAMED_WORD = re.compile(r"""(?:\.|(?P<quote>['"]))(\w+)(?(quote)(?P=quote))""")  # `message.role`, `'role'`
CASE_FILTER = re.compile(r"\b(upper|lower|title|capitalize|swapcase)\b")


class ControlTokenEscaper:
    """Separates client text from the control tokens of a vocabulary.

    >>> ControlTokenEscaper(["<|end|>"], "{{ '<|' + message.role + '|>' }}").escape("a <|end|>", "_")
    'a <_|end|>'
    """

    def __init__(self, control_texts: Iterable[str], template: str) -> None:
        self._ignores_case = bool(CASE_FILTER.search(template))
        texts = sorted(map(self._fold, control_texts), key=len, reverse=True)
        # Breaking every `<|`, and not only complete tokens, also holds if the template removes text after it.
        heads = {text[:2] for text in texts if text[1:2] and not (text[1].isalnum() or text[1] == "/")}
        # Text of one character cannot be broken.
        patterns = [*sorted(heads), *(text for text in texts if text[:2] not in heads and len(text) > 1)]
        flags = re.IGNORECASE if self._ignores_case else 0
        self._pattern = re.compile("|".join(map(re.escape, patterns)) or r"(?!)", flags)
        self._prefixes = {text[:end] for text in texts for end in range(1, len(text))}
        self._endings = {text[start:] for text in texts for start in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        self._joined = "\0".join(texts)
        self._known_words = TRUSTED_WORDS | {match[2] for match in NAMED_WORD.finditer(template)}

    def escape(self, text: str, separator: str) -> str:
        """Insert separators so that neither `text` nor its ends beside other text form a control token."""
        while self._pattern.search(text):  # again, because matches may overlap
            text = self._pattern.sub(lambda match: match[0][:1] + separator + match[0][1:], text)
        content = text.strip()  # templates strip text
        if not content:
            return text
        lengths = range(1, min(self._longest, len(content) + 1))
        folded = self._fold(content)
        before = any(folded[:length] in self._endings for length in lengths) or self._is_inside_token(content)
        after = any(folded[len(folded) - length :] in self._prefixes for length in lengths)
        if not before and not after:
            return text
        start = text.index(content)
        left, right = text[:start], text[start + len(content) :]
        return f"{left}{separator if before else ''}{content}{separator if after else ''}{right}"

    def _is_inside_token(self, text: str) -> bool:
        """Return whether text before and after `text` can make it a control token. A word of the template cannot:
        the template compares values with it, and an escaped one would not be equal."""
        is_part = len(text) < self._longest and self._fold(text) in self._joined and "\0" not in text
        return is_part and text not in self._known_words

    def _fold(self, text: str) -> str:
        """Return the text in lower case if the template changes the case of text."""
        return text.lower() if self._ignores_case else text
