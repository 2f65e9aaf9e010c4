"""Thoughts as a channel of their own: the styles in which models mark them, and the reader that tells them apart."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.chat.parts import Part, Reader, Reasoning


@dataclass(frozen=True, slots=True)
class ThoughtStyle:
    """The texts around a thought. `ending` closes one that took too long; what follows is the answer. `follows` is
    what a model writes between a thought and the answer.

    >>> style_of("{% if thinking %}<think>{% endif %}").closes
    '</think>'
    """

    opens: str
    closes: str
    ending: str
    follows: str = ""

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends inside a thought: the template began it."""
        return prompt.rstrip().endswith(self.opens)


HARMONY = ThoughtStyle(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|start|>assistant",
)
STYLES = (
    HARMONY,
    *(
        ThoughtStyle(opens, closes, f"\n{closes}\n\n")
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


def style_of(template: str | None) -> ThoughtStyle | None:
    """How the model of this template marks thoughts; None where it has none."""
    if template is None:
        return None
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    return next((style for style in STYLES if style.opens in template or style.closes in template), None)


class ReasoningReader:
    """Gives thoughts at the beginning of an answer as `Reasoning`; what follows goes to another reader.

    White space around a thought belongs to neither.

    >>> reader = ReasoningReader(Plain(), STYLES[1])
    >>> reader.feed("<think>Hm.</think>Yes")
    [Reasoning(text='Hm.'), Text(text='Yes')]
    """

    def __init__(self, inner: Reader, style: ThoughtStyle, *, open: bool = False) -> None:
        self._inner = inner
        self._style = style
        self._thinking = open
        self._begun = False  # something of the thought was shown
        self._answering = False  # the thought is over, or there was none
        self._trimming = False  # white space between thought and answer
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        if not self._thinking and not self._answering:
            self._decide()
        if self._thinking:
            parts += self._think()
        if self._answering:
            parts += self._answer()
        return parts

    def finish(self) -> list[Part]:
        rest, self._held = self._held, ""
        if self._thinking:
            thought = rest.rstrip() if self._begun else rest.strip()
            return [Reasoning(thought)] if thought else []
        parts = self._inner.feed(rest) if rest and not self._trimming else []
        return parts + self._inner.finish()

    def _decide(self) -> None:
        """Whether the answer begins with a thought, as soon as that is certain."""
        opens, start = self._style.opens, self._held.lstrip()
        if start.startswith(opens):
            self._thinking, self._held = True, start[len(opens) :]
        elif start and not opens.startswith(start):
            self._answering = True

    def _think(self) -> list[Part]:
        thought, closed, rest = self._held.partition(self._style.closes)
        if closed:
            self._thinking, self._answering, self._trimming = False, True, True
            self._held = rest
            thought = thought.rstrip()
        else:  # what may be the beginning of the end is held back, and the white space before it
            certain = len(thought) - overlap(thought, self._style.closes)
            shown = thought[:certain].rstrip()
            self._held = thought[len(shown) :]
            thought = shown
        thought = thought if self._begun else thought.lstrip()
        self._begun = self._begun or bool(thought)
        return [Reasoning(thought)] if thought else []

    def _answer(self) -> list[Part]:
        if self._trimming:
            self._held = self._held.lstrip()
            self._trimming = not self._held
        text, self._held = self._held, ""
        return self._inner.feed(text) if text else []


def overlap(text: str, ending: str) -> int:
    """How many of the last characters of `text` may be the beginning of `ending`.

    >>> overlap("so it is </thi", "</think>")
    5
    """
    longest = min(len(text), len(ending) - 1)
    return next((length for length in range(longest, 0, -1) if ending.startswith(text[-length:])), 0)
