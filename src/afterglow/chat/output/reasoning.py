"""Thoughts as a channel of their own: the styles in which models mark them, and the reader that tells them apart."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.chat.output.parts import OutputParser, OutputPart, ReasoningDelta


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts around a thought. `ending` closes one that took too long; what follows is the answer. `follows` is
    what a model writes between a thought and the answer.

    >>> style_of("{% if thinking %}<think>{% endif %}").closes
    '</think>'
    """

    start_tag: str
    end_tag: str
    forced_ending: str
    answer_prefix: str = ""

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends inside a thought: the template began it."""
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
        ReasoningFormat(opens, closes, f"\n{closes}\n\n")
        for opens, closes in (
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
    """How the model of this template marks thoughts; None where it has none."""
    if template is None:
        return None
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY_REASONING
    return next(
        (style for style in REASONING_FORMATS if style.start_tag in template or style.end_tag in template), None
    )


class ReasoningParser:
    """Gives thoughts at the beginning of an answer as `Reasoning`; what follows goes to another reader.

    White space around a thought belongs to neither.

    >>> reader = ReasoningReader(Plain(), STYLES[1])
    >>> reader.feed("<think>Hm.</think>Yes")
    [Reasoning(text='Hm.'), Text(text='Yes')]
    """

    def __init__(
        self, answer_parser: OutputParser, reasoning_format: ReasoningFormat, *, starts_in_reasoning: bool = False
    ) -> None:
        self._answer_parser = answer_parser
        self._format = reasoning_format
        self._in_reasoning = starts_in_reasoning
        self._has_emitted_reasoning = False  # something of the thought was shown
        self._in_answer = False  # the thought is over, or there was none
        self._is_trimming = False  # white space between thought and answer
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
            thought = rest.rstrip() if self._has_emitted_reasoning else rest.strip()
            return [ReasoningDelta(thought)] if thought else []
        parts = self._answer_parser.feed(rest) if rest and not self._is_trimming else []
        return parts + self._answer_parser.finish()

    def _detect_start(self) -> None:
        """Whether the answer begins with a thought, as soon as that is certain."""
        opens, start = self._format.start_tag, self._pending_text.lstrip()
        if start.startswith(opens):
            self._in_reasoning, self._pending_text = True, start[len(opens) :]
        elif start and not opens.startswith(start):
            self._in_answer = True

    def _parse_reasoning(self) -> list[OutputPart]:
        thought, closed, rest = self._pending_text.partition(self._format.end_tag)
        if closed:
            self._in_reasoning, self._in_answer, self._is_trimming = False, True, True
            self._pending_text = rest
            thought = thought.rstrip()
        else:  # what may be the beginning of the end is held back, and the white space before it
            certain = len(thought) - find_overlap(thought, self._format.end_tag)
            shown = thought[:certain].rstrip()
            self._pending_text = thought[len(shown) :]
            thought = shown
        thought = thought if self._has_emitted_reasoning else thought.lstrip()
        self._has_emitted_reasoning = self._has_emitted_reasoning or bool(thought)
        return [ReasoningDelta(thought)] if thought else []

    def _parse_answer(self) -> list[OutputPart]:
        if self._is_trimming:
            self._pending_text = self._pending_text.lstrip()
            self._is_trimming = not self._pending_text
        text, self._pending_text = self._pending_text, ""
        return self._answer_parser.feed(text) if text else []


def find_overlap(text: str, ending: str) -> int:
    """How many of the last characters of `text` may be the beginning of `ending`.

    >>> overlap("so it is </thi", "</think>")
    5
    """
    longest = min(len(text), len(ending) - 1)
    return next((length for length in range(longest, 0, -1) if ending.startswith(text[-length:])), 0)
