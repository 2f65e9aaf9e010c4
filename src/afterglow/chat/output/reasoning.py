"""Reasoning formats of model families, and the parser that separates reasoning from the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from afterglow.chat.output.parts import OutputParser, OutputPart, ReasoningDelta, ToolCallDelta

OutputPosition: TypeAlias = Literal["turn", "reasoning", "answer"]  # where the output begins: at the start of a turn, …


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Tags around reasoning and around the visible text.

    `forced_ending` closes reasoning that exceeds its budget, so that the answer follows. `answer_prefix` is generated
    between reasoning and answer. `text_start` and `text_end` surround visible text. With `repeats`, reasoning may also
    follow visible text; its tags are control tokens, so that no text contains them. `start_gap` is what the template
    writes between the start tag and the reasoning.

    >>> detect_reasoning_format("{% if thinking %}<think>{% endif %}").end_tag
    '</think>'
    """

    start_tag: str
    end_tag: str
    forced_ending: str
    answer_prefix: str = ""
    text_start: str = ""
    text_end: str = ""
    dropped_tags: tuple[str, ...] = ()  # further texts around visible text that are not part of it
    repeats: bool = False
    start_gap: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that the parser must see."""
        tags = (self.start_tag, self.end_tag, self.answer_prefix, self.text_start, self.text_end, *self.dropped_tags)
        return tuple(filter(None, tags))

    def is_open(self, prompt: str) -> bool:
        """Return whether the prompt ends inside reasoning, i.e. the template wrote the start tag."""
        return prompt.rstrip().endswith(self.start_tag)

    def split_text(self, text: str, *, starts_open: bool = False) -> tuple[str, str | None] | None:
        """Split a text that begins with its reasoning into reasoning and answer; None for other texts.

        The answer is None if the reasoning has no end. `starts_open`: the start tag may be missing, as in the text that
        follows a prompt with it.

        >>> THINK.split_text("<think>\\nTwo and two.\\n</think>\\n\\nFour"), THINK.split_text("Tags: <think>…</think>")
        (('Two and two.', 'Four'), None)
        >>> THINK.split_text("<think>\\nTwo and "), THINK.split_text("Two.</think>Four", starts_open=True)
        (('Two and ', None), ('Two.', 'Four'))
        """
        before, start, rest = text.partition(self.start_tag)
        if starts_open and self.end_tag in before:
            rest = text
        elif not start or before.strip():
            return None
        reasoning, end, answer = rest.partition(self.end_tag)
        reasoning = reasoning.lstrip("\n")
        return (reasoning.rstrip("\n"), answer.lstrip("\n")) if end else (reasoning, None)

    def write_continuation(self, prompt: str, reasoning: str | None, text: str | None) -> str:
        """Return what follows the prompt of an answer that begins with `reasoning` and `text`. Without text (None), the
        answer is still inside the reasoning.

        >>> THINK.write_continuation("assistant: <think>\\n", None, "Yes")
        '\\n</think>\\n\\nYes'
        """
        written = ""
        is_open = self.is_open(prompt)
        if reasoning == "" and text is not None and prompt.rstrip().endswith(self.end_tag):
            reasoning = None  # the template wrote the empty reasoning
        if reasoning is not None or is_open:
            start = "" if is_open else self.start_tag
            gap = self.start_gap if reasoning is not None and (prompt + start).endswith(self.start_tag) else ""
            written = f"{start}{gap}{reasoning or ''}" + ("" if text is None else self.forced_ending)
        if text is None:
            return written
        starts_text = (prompt + written).rstrip().endswith(self.text_start)
        return f"{written}{'' if starts_text else self.text_start}{text}"


def build_tag_format(
    start_tag: str, end_tag: str, *, dropped_tags: tuple[str, ...] = (), start_gap: str = ""
) -> ReasoningFormat:
    """Build a format in which a blank line follows the reasoning."""
    return ReasoningFormat(
        start_tag, end_tag, forced_ending=f"\n{end_tag}\n\n", dropped_tags=dropped_tags, start_gap=start_gap
    )


HARMONY_REASONING = ReasoningFormat(
    start_tag="<|channel|>analysis<|message|>",
    end_tag="<|end|>",
    forced_ending="<|end|><|start|>assistant<|channel|>final<|message|>",
    answer_prefix="<|start|>assistant",
    text_start="<|channel|>final<|message|>",
)
THINK = build_tag_format("<think>", "</think>")
KIMI_K3_REASONING = ReasoningFormat(
    start_tag="<|open|>think<|sep|>",
    end_tag="<|close|>think<|sep|>",
    forced_ending="<|close|>think<|sep|>",
    text_start="<|open|>response<|sep|>",
    text_end="<|close|>response<|sep|>",
    dropped_tags=("<|close|>message<|sep|>",),
)
# The first format of which a tag, and the start of visible text if it has one, occur in the template.
TAG_FORMATS = (
    ReasoningFormat(  # Gemma 4
        start_tag="<|channel>thought",
        end_tag="<channel|>",
        forced_ending="\n<channel|>",
        dropped_tags=("<|channel>",),
        repeats=True,
        start_gap="\n",
    ),
    ReasoningFormat(  # Solar-Open
        start_tag="<|think|>",
        end_tag="<|end|>",
        forced_ending="<|end|><|begin|>assistant",
        answer_prefix="<|begin|>assistant",
        text_start="<|content|>",
    ),
    KIMI_K3_REASONING,
    *(  # Cohere: Cohere2 and Command R7B
        ReasoningFormat(
            "<|START_THINKING|>", "<|END_THINKING|>", forced_ending="<|END_THINKING|>", text_start=start, text_end=end
        )
        for start, end in (("<|START_TEXT|>", "<|END_TEXT|>"), ("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("", ""))
    ),
    build_tag_format(  # Apriel
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        dropped_tags=("[END FINAL RESPONSE]",),
        start_gap="\n",
    ),
    THINK,
    build_tag_format("<thinking>", "</thinking>"),
    build_tag_format("<seed:think>", "</seed:think>"),
    build_tag_format("<mm:think>", "</mm:think>"),
    build_tag_format("[THINK]", "[/THINK]"),
    build_tag_format("<|inner_prefix|>", "<|inner_suffix|>"),
    build_tag_format("<reasoning>", "</reasoning>"),
    build_tag_format("<thought>", "</thought>"),
)
REASONING_FORMATS = (HARMONY_REASONING, *TAG_FORMATS)


def detect_reasoning_format(template: str | None) -> ReasoningFormat | None:
    """Return the reasoning format that occurs in a chat template; None if there is none."""
    if template is None:
        return None
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY_REASONING
    if "<|open|>" in template and "<|end_of_msg|>" in template:  # its macros join the tags
        template += "".join(KIMI_K3_REASONING.tags)
    for reasoning_format in TAG_FORMATS:
        # `<|end|>` is also the end of turn of models that do not reason.
        tags = {reasoning_format.start_tag, reasoning_format.end_tag} - {"<|end|>"}
        if reasoning_format.text_start in template and any(tag in template for tag in tags):
            has_gap = f"{reasoning_format.start_tag}\\n" in template  # the newline of a literal
            return replace(reasoning_format, start_gap="\n") if has_gap else reasoning_format
    return None


class ReasoningParser:
    """Returns reasoning as `ReasoningDelta`, and passes the rest to another parser. Whitespace around reasoning is
    dropped.

    Models may call a tool without closing the reasoning. From a text of `call_starts` on, reasoning is held back: it is
    a call if the answer parser finds one and the model ends its output after it. A call that more reasoning follows, or
    whose output was truncated, is a draft.

    >>> from afterglow.chat.output.parts import PlainTextParser
    >>> parser = ReasoningParser(PlainTextParser, THINK)
    >>> parser.feed("<think>Hm.</think>Yes")
    [ReasoningDelta(text='Hm.'), TextDelta(text='Yes')]
    """

    def __init__(
        self,
        create_answer_parser: Callable[[], OutputParser],
        reasoning_format: ReasoningFormat,
        *,
        starts_in: OutputPosition = "turn",
        is_continued: bool = False,
        call_starts: Sequence[str] = (),
    ) -> None:
        """`is_continued`: whether the prompt contains a part of the reasoning, so that whitespace belongs to it."""
        self._create_answer_parser = create_answer_parser
        self._answer_parser = create_answer_parser()
        self._format = reasoning_format
        self._position = starts_in
        self._call_starts = tuple(call_starts)
        repeated = (reasoning_format.start_tag, reasoning_format.end_tag) if reasoning_format.repeats else ()
        tags = (reasoning_format.answer_prefix, reasoning_format.text_start, reasoning_format.text_end)
        # Texts that are not part of the answer.
        self._answer_tags = tuple(filter(None, (*repeated, *tags, *reasoning_format.dropped_tags)))
        self._has_emitted_reasoning = is_continued
        self._needs_separator = False  # reasoning that follows an answer is a new paragraph
        self._is_trimming = False  # dropping whitespace between reasoning and answer
        self._pending_text = ""
        self._call: _HeldCall | None = None

    def feed(self, text: str) -> list[OutputPart]:
        self._pending_text += text
        parts: list[OutputPart] = []
        position = None
        while position != self._position:  # reasoning and answer may alternate in one piece of text
            position = self._position
            if position == "turn":
                self._detect_start()
            elif position == "reasoning":
                parts += self._parse_reasoning()
            else:
                parts += self._parse_answer()
        return parts

    def finish(self, *, truncated: bool = False) -> list[OutputPart]:
        rest, self._pending_text = self._pending_text, ""
        if self._position == "reasoning":
            call, self._call = self._call, None
            if call is None or truncated or not call.finish():
                return self._emit_reasoning(rest.rstrip())
            return self._emit_reasoning(rest[: rest.index(call.start)].rstrip()) + call.parts
        is_text = rest and not (self._position == "answer" and rest in self._answer_tags)
        return (self._answer_parser.feed(rest) if is_text else []) + self._answer_parser.finish(truncated=truncated)

    def _detect_start(self) -> None:
        """Decide whether the output begins with reasoning, once enough text is there."""
        text = self._pending_text.lstrip()
        start_tag, end_tag = self._format.start_tag, self._format.end_tag
        if text.startswith(start_tag):
            self._position, self._pending_text = "reasoning", text[len(start_tag) :]
        elif text.startswith(end_tag):  # some models close reasoning that they did not open
            self._position, self._pending_text, self._is_trimming = "answer", text[len(end_tag) :], True
        elif text and not start_tag.startswith(text) and not end_tag.startswith(text):
            self._position = "answer"

    def _parse_reasoning(self) -> list[OutputPart]:
        text, end_tag, rest = self._pending_text.partition(self._format.end_tag)
        if end_tag:
            self._position, self._is_trimming, self._call = "answer", True, None
            self._pending_text = rest
            return self._emit_reasoning(text.rstrip())
        start = self._find_call(text)
        if start is None:  # hold back what may begin the end tag or a call, and the whitespace before it
            tags = (self._format.end_tag, *self._call_starts)
            start = len(text) - max(find_overlap(text, tag) for tag in tags)
        emitted = text[:start].rstrip()
        self._pending_text = text[len(emitted) :]
        return self._emit_reasoning(emitted)

    def _find_call(self, text: str) -> int | None:
        """Return the position of the first text that may be a call."""
        position = 0 if self._call is None else text.index(self._call.start)
        while True:
            if self._call is None:
                found = find_first(text, self._call_starts, position)
                if found is None:
                    return None
                position, start = found
                self._call = _HeldCall(start, self._create_answer_parser())
            self._call.feed(text[position:])
            if not self._call.is_rejected:
                return position
            self._call, position = None, position + 1

    def _emit_reasoning(self, text: str) -> list[OutputPart]:
        text = text if self._has_emitted_reasoning else text.lstrip()
        if not text:
            return []
        if self._needs_separator:
            text = "\n\n" + text
        self._has_emitted_reasoning, self._needs_separator = True, False
        return [ReasoningDelta(text)]

    def _parse_answer(self) -> list[OutputPart]:
        parts: list[OutputPart] = []
        while self._position == "answer":
            if self._is_trimming:
                self._pending_text = self._pending_text.lstrip()
            # Hold back what may begin a tag; also a tag that may become a longer one.
            overlaps = (find_overlap(self._pending_text, tag) for tag in self._answer_tags)
            end = len(self._pending_text) - max(overlaps, default=0)
            found = find_first(self._pending_text, self._answer_tags)
            found = found if found is not None and found[0] < end else None
            text = self._pending_text[: end if found is None else found[0]]
            parts += self._answer_parser.feed(text) if text else []
            self._is_trimming = self._is_trimming and not text
            if found is None:
                self._pending_text = self._pending_text[end:]
                break
            self._pending_text = self._pending_text[found[0] + len(found[1]) :]
            if found[1] == self._format.start_tag and self._format.repeats:
                self._position = "reasoning"
                self._needs_separator, self._has_emitted_reasoning = self._has_emitted_reasoning, False
        return parts


class _HeldCall:
    """Text inside reasoning that may be a call, parsed as an answer."""

    def __init__(self, start: str, parser: OutputParser) -> None:
        self.start = start
        self.parts: list[OutputPart] = []
        self._parser = parser
        self._fed = 0

    def feed(self, text: str) -> None:
        """Parse what follows in the text, which begins with the start of the call."""
        self.parts += self._parser.feed(text[self._fed :])
        self._fed = len(text)

    def finish(self) -> bool:
        """Parse the end of the output; return whether it is a call."""
        self.parts += self._parser.finish()
        return any(isinstance(part, ToolCallDelta) for part in self.parts) and not self.is_rejected

    @property
    def is_rejected(self) -> bool:
        """Whether the parser found text, instead of a call or after it."""
        return any(not isinstance(part, ToolCallDelta) and part.text.strip() for part in self.parts)


def find_first(text: str, tags: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Return the first of the tags in a text after `start`, with its position; the longest of several at one.

    >>> find_first("so <b><a>", ["<a>", "<b>"])
    (3, '<b>')
    """
    found = [(position, -len(tag), tag) for tag in tags if (position := text.find(tag, start)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None


def find_overlap(text: str, ending: str) -> int:
    """Return how many of the last characters of `text` are a proper prefix of `ending`.

    >>> find_overlap("so it is </thi", "</think>")
    5
    """
    longest = min(len(text), len(ending) - 1)
    return next((length for length in range(longest, 0, -1) if ending.startswith(text[-length:])), 0)
