"""Control tokens in rendered text: only the template writes them.

A template joins its own text with text of the client: messages, tools and template variables. Client text is escaped
before rendering with a separator, a character that occurs nowhere in it. Control tokens are then searched in the
rendered text, and the separators are removed from the text between them.

Many files have tags such as `<tool_call>` and `<think>` as user-defined tokens instead of control tokens. llama.cpp
parses these in every text, so client text that contains one is tokenized in pieces.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from afterglow.llama.vocabulary import Vocabulary

# Words that a template may use to form a control token, as in `'<|' + message.role + '|>'`.
TRUSTED_WORDS = frozenset({"system", "developer", "user", "assistant", "tool", "function", "text"})
NAMED_WORD = re.compile(r"""(?:\.|(?P<quote>['"]))(\w+)(?(quote)(?P=quote))""")  # `message.role`, `'role'`
CASE_FILTER = re.compile(r"\b(upper|lower|title|capitalize|swapcase)\b")
TAG = re.compile(r"[<\[\]](?=\S*[^\W\d_]|\S*[|｜])\S+[>\[\]]")  # noqa: RUF001
# Gemma has the tags of HTML as user-defined tokens. They are part of a text, so clients may write them.
HTML_TAG = re.compile(
    r"</?(?:a|b|big|blockquote|body|br|caption|code|dd|del|div|dl|dt|em|h[1-6]|head|hr|html|i|img|ins|kbd|li|mark|ol|p"
    r"|pre|q|samp|small|span|strike|strong|sub|sup|table|tbody|td|tfoot|th|thead|title|tr|tt|u|ul|var)/?>"
)
MAX_CACHED_SPANS = 8192


def find_template_tokens(vocabulary: Vocabulary, template: str) -> dict[str, int]:
    """Return the tokens that only a template may write, by their text: control tokens, and user-defined tags."""
    markup = {
        text: token
        for text, token in vocabulary.user_defined_tokens_by_text.items()
        if TAG.fullmatch(text) and (text in template or not HTML_TAG.fullmatch(text))
    }
    return {**markup, **vocabulary.control_tokens_by_text}


class TemplateTokenizer:
    """Tokenizes rendered text: the texts of template tokens are these tokens, unless a separator is in them.

    The tokens of the text between them are cached, so that the next turn of a long conversation tokenizes only new
    text.
    """

    def __init__(self, vocabulary: Vocabulary, template: str, *, cached_spans: int = MAX_CACHED_SPANS) -> None:
        self.tokens_by_text = find_template_tokens(vocabulary, template)
        self._vocabulary = vocabulary
        self._pattern = compile_alternatives(self.tokens_by_text)
        self._user_defined_pattern = compile_alternatives(
            self.tokens_by_text.keys() - vocabulary.control_tokens_by_text.keys()
        )
        self._get_strip_flags = functools.cache(vocabulary.get_strip_flags)
        self.tokenize_client_text = functools.lru_cache(cached_spans)(self._tokenize_client_text)

    def split(self, text: str) -> list[int | str]:
        """Return the template tokens in a text, and the text between them."""
        spans = re.split(f"({self._pattern.pattern})", text)
        return [self.tokens_by_text.get(span, span) for span in spans if span]

    def tokenize(self, text: str, separator: str = "") -> list[int]:
        """Tokenize rendered text that `separator` escapes."""
        tokens: list[int] = []
        start, strip = 0, False
        for match in self._pattern.finditer(text):
            token = self.tokens_by_text[match[0]]
            strips_left, strips_right = self._get_strip_flags(token)
            span = text[start : match.start()]
            span = span.lstrip() if strip else span
            tokens += self._tokenize_span(span.rstrip() if strips_left else span, separator)
            tokens.append(token)
            start, strip = match.end(), strips_right
        return tokens + self._tokenize_span(text[start:].lstrip() if strip else text[start:], separator)

    def _tokenize_span(self, text: str, separator: str) -> list[int]:
        text = text.replace(separator, "") if separator else text
        return self.tokenize_client_text(text) if text else []

    def _tokenize_client_text(self, text: str) -> list[int]:
        """Tokenize text without any template token. llama.cpp would parse user-defined ones, so they are divided after
        their first character."""
        first = self._user_defined_pattern.search(text)
        if first is None:
            return self._vocabulary.tokenize(text)
        end = first.start() + 1
        tokens = self._vocabulary.tokenize(text[:end])
        while end < len(text):
            start, match = end, self._user_defined_pattern.search(text, end)
            end = len(text) if match is None else match.start() + 1
            tokens += self._vocabulary.tokenize_continuation(text[start:end])
        return tokens


def compile_alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


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
