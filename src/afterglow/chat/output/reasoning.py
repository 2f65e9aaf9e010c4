"""Reasoning formats of model families, and the parser that separates reasoning from the answer."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.chat.output.parts import OutputParser, OutputPart, ReasoningDelta


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Tags around reasoning. `forced_ending` closes reasoning that exceeds its budget, so that the answer follows.
    `answer_prefix` is generated between reasoning and answer.

    >>> detect_reasoning_format("{% if thinking %}<think>{% endif %}").end_tag
    '</think>'
    """

    start_tag: str
    end_tag: str
    forced_ending: str
    answer_prefix: str = ""

    def is_open(self, prompt: str) -> bool:
        """Return whether the prompt ends inside reasoning, i.e. the template wrote the start tag."""
        return prompt.rstrip().endswith(self.start_tag)


HARMONY_REASONING = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|start|>assistant",
)
REASONING_FORMATS = (
    HARMONY_REASONING,
    *(
        ReasoningFormat(start_tag, end_tag, f"\n{end_tag}\n\n")
        for start_tag, end_tag in (
            ("<think>", "</think>"),
            ("<thinking>", "</thinking>"),
            ("<seed:think>", "</seed:think>"),
            ("[THINK]", "[/THINK]"),
            ("<|START_THINKING|>", "<|END_THINKING|>"),
            ("<|inner_prefix|>", "<|inner_suffix|>"),
            ("<reasoning>", "</reasoning>"),
            ("<thought>", "</thought>"),
        )
    ),
)


def detect_reasoning_format(template: str | None) -> ReasoningFormat | None:
    """Return the reasoning format that occurs in a chat template; None if there is none."""
    if template is None:
        return None
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY_REASONING
    return next(
        (format for format in REASONING_FORMATS if format.start_tag in template or format.end_tag in template), None
    )


class ReasoningParser:
    """Returns reasoning at the start of the output as `ReasoningDelta`, and passes the rest to another parser.

    Whitespace around reasoning is dropped.

    >>> from afterglow.chat.output.parts import PlainTextParser
    >>> parser = ReasoningParser(PlainTextParser(), detect_reasoning_format("<think>"))
    >>> parser.feed("<think>Hm.</think>Yes")
    [ReasoningDelta(text='Hm.'), TextDelta(text='Yes')]
    """

    def __init__(
        self, answer_parser: OutputParser, reasoning_format: ReasoningFormat, *, starts_in_reasoning: bool = False
    ) -> None:
        self._answer_parser = answer_parser
        self._format = reasoning_format
        self._in_reasoning = starts_in_reasoning
        self._has_emitted_reasoning = False
        self._in_answer = False  # reasoning has ended, or there is none
        self._is_trimming = False  # dropping whitespace between reasoning and answer
        self._pending_text = ""

    def feed(self, text: str) -> list[OutputPart]:
        self._pending_text += text
        parts: list[OutputPart] = []
        if not self._in_reasoning and not self._in_answer:
            self._detect_start()
        if self._in_reasoning:
            parts += self._parse_reasoning()
        if self._in_answer:
            parts += self._parse_answer()
        return parts

    def finish(self) -> list[OutputPart]:
        rest, self._pending_text = self._pending_text, ""
        if self._in_reasoning:
            text = rest.rstrip() if self._has_emitted_reasoning else rest.strip()
            return [ReasoningDelta(text)] if text else []
        parts = self._answer_parser.feed(rest) if rest and not self._is_trimming else []
        return parts + self._answer_parser.finish()

    def _detect_start(self) -> None:
        """Decide whether the output begins with reasoning, once enough text is there."""
        tag, text = self._format.start_tag, self._pending_text.lstrip()
        if text.startswith(tag):
            self._in_reasoning, self._pending_text = True, text[len(tag) :]
        elif text and not tag.startswith(text):
            self._in_answer = True

    def _parse_reasoning(self) -> list[OutputPart]:
        text, end_tag, rest = self._pending_text.partition(self._format.end_tag)
        if end_tag:
            self._in_reasoning, self._in_answer, self._is_trimming = False, True, True
            self._pending_text = rest
            text = text.rstrip()
        else:  # hold back what may begin the end tag, and the whitespace before it
            emitted = text[: len(text) - find_overlap(text, self._format.end_tag)].rstrip()
            self._pending_text = text[len(emitted) :]
            text = emitted
        text = text if self._has_emitted_reasoning else text.lstrip()
        self._has_emitted_reasoning = self._has_emitted_reasoning or bool(text)
        return [ReasoningDelta(text)] if text else []

    def _parse_answer(self) -> list[OutputPart]:
        if self._is_trimming:
            self._pending_text = self._pending_text.lstrip()
            self._is_trimming = not self._pending_text
        text, self._pending_text = self._pending_text, ""
        return self._answer_parser.feed(text) if text else []


def find_overlap(text: str, ending: str) -> int:
    """Return how many of the last characters of `text` are a proper prefix of `ending`.

    >>> find_overlap("so it is </thi", "</think>")
    5
    """
    longest = min(len(text), len(ending) - 1)
    return next((length for length in range(longest, 0, -1) if ending.startswith(text[-length:])), 0)
