"""Chat: messages in; out comes what the model is given, what it may answer, and how its answer is read."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from afterglow.chat import grammar
from afterglow.chat.choice import ToolChoice, tool_choice
from afterglow.chat.content import opened_all
from afterglow.chat.formats import response_format
from afterglow.chat.messages import Message, Writable
from afterglow.chat.messages import messages as read_messages
from afterglow.chat.parts import Plain, Reader
from afterglow.chat.prompt import Prompt, PromptBuilder
from afterglow.chat.reasoning import HARMONY, ReasoningReader, style_of
from afterglow.chat.seeing import BLIND, Shown, Sight, look, taken
from afterglow.chat.template import ChatTemplate
from afterglow.chat.thinking import Thinking, thinking
from afterglow.chat.tools.detection import family_of
from afterglow.chat.tools.family import Family
from afterglow.chat.tools.generic import generic_messages
from afterglow.chat.tools.tagged_json import GENERIC
from afterglow.chat.tools.tool import Offered, Tool
from afterglow.chat.tools.tool import tools as read_tools
from afterglow.closing import Closing
from afterglow.engine.constraint import Constraint
from afterglow.engine.request import Request
from afterglow.engine.thought import ThoughtBudget
from afterglow.errors import UnsupportedOption
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.policy import CLOSED, MediaPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What may be asked of an answer beside its sampling."""

    tools: Sequence[Offered] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: Any = None
    reasoning: bool | int | str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)  # for the template


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """A conversation ready to be answered."""

    chat: Chat
    prompt: Prompt
    tools: tuple[Tool, ...]
    choice: ToolChoice
    thinks: bool  # the prompt ends inside a thought
    constraint: Constraint | None
    thought: ThoughtBudget | None
    parse: Callable[[str], Any] | None  # what a finished answer's text is turned into

    def lead(self, request: Request) -> Request:
        """The engine's request, with what leads the answer."""
        return replace(request, constraint=self.constraint, thought=self.thought, stop_tokens=self.chat.stop_tokens)

    def reader(self) -> Reader:
        """What tells text, thoughts and calls apart in one answer."""
        chat = self.chat
        calls = bool(self.tools) and self.choice.mode != "none"
        inner = chat.family.reader(self.tools) if calls or chat.style is HARMONY else Plain()
        if chat.style is None or chat.style is HARMONY:
            return inner
        return ReasoningReader(inner, chat.style, open=self.thinks)


class Chat(Closing):
    """Knows how one model talks.

    >>> chat = Chat(vocabulary, template)
    >>> plan = chat.plan([("user", "Hello")], ChatOptions(reasoning=100))
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str | None,
        media: MediaPolicy = CLOSED,
        sight: Callable[[], Sight] = lambda: BLIND,
        *,
        boundaries: bool = True,
    ) -> None:
        """`boundaries`: whether prompts say where their messages end (see `PromptBuilder`)."""
        self.media = media  # where pictures and sounds may come from
        self._sight = sight
        self.style = style_of(template)
        self._vocabulary = vocabulary
        special = {f"{name}_token": vocabulary.text(token) for name, token in vocabulary.special.items()}
        self._source = template
        self._template = ChatTemplate(template, special)
        self._builder = PromptBuilder(vocabulary, self._template, boundaries=boundaries)

    def plan(self, messages: Sequence[Writable], options: ChatOptions) -> ChatPlan:
        """What to ask of the engine. Whatever cannot be honoured is refused here, by name."""
        tools = read_tools(options.tools)
        choice = tool_choice(options.tool_choice, tools)
        thoughts = thinking(options.reasoning, self.style, self._source)
        format = response_format(options.response_format)
        said, shown = look(read_messages(messages), self._sight(), self.media)
        prompt = self._prompt(said, tools, {**thoughts.arguments, **options.arguments}, shown)
        opened = self.style is not None and self.style.is_open(prompt.text)
        return ChatPlan(
            chat=self,
            prompt=prompt,
            tools=tools,
            choice=choice,
            thinks=opened,
            constraint=self._constraint(choice, options.parallel_tool_calls, format.shape, thoughts, opened),
            thought=self._budget(thoughts, opened),
            parse=format.parse,
        )

    def bring(self, messages: Sequence[Writable]) -> list[Message]:
        """The messages with their pictures and sounds opened, from wherever those may come."""
        said = taken(read_messages(messages), self._sight())
        contents = iter(opened_all((one for message in said for one in message.attachments), self.media))
        return [
            replace(message, attachments=tuple(replace(one, source=next(contents)) for one in message.attachments))
            for message in said
        ]

    def close(self) -> None:
        self._template.close()

    @functools.cached_property
    def family(self) -> Family:
        """How this model calls tools: as its template says, where that really shows them to the model."""
        family = family_of(self._source)
        return family if family is GENERIC or self._template.habits().tools else GENERIC

    @functools.cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end a turn of this family's models beside the model's own ends."""
        control = self._vocabulary.control_texts
        return frozenset(control[text] for text in self.family.stops if text in control)

    @functools.cached_property
    def _visible(self) -> frozenset[int]:
        """The control tokens that readers must see."""
        marks = " ".join((*self.family.markers, *((self.style.opens, self.style.closes) if self.style else ())))
        return frozenset(token for text, token in self._vocabulary.control_texts.items() if text in marks)

    def piece(self, token: int) -> bytes:
        """The bytes of a token as readers see it: control tokens only where they mark something."""
        return self._vocabulary.piece(token, special=token in self._visible)

    def _prompt(
        self, messages: list[Message], tools: tuple[Tool, ...], arguments: Mapping[str, Any], shown: Shown
    ) -> Prompt:
        used = tools or any(message.tool_calls or message.role == "tool" for message in messages)
        if used and self.family is GENERIC:
            return self._builder.build(generic_messages(messages, tools), arguments=arguments, shown=shown)
        offered = [tool.definition for tool in tools]
        return self._builder.build(messages, tools=offered, arguments=arguments, shown=shown)

    # --- what the answer may be

    def _constraint(
        self, choice: ToolChoice, parallel: bool, shape: grammar.Shape | None, thoughts: Thinking, opened: bool
    ) -> Constraint | None:
        if choice.mode == "auto" and choice.tools and shape is None and self.family.triggers:
            return self._when_called(choice, parallel)
        allowed = self._allowed(choice, parallel, None if shape is None else self._as_text(shape))
        if allowed is None:
            return None
        if self.style is not None and (thoughts.allowed or opened):
            return Constraint(grammar=grammar.after_thought(allowed, self.style, self._literal, open=opened))
        return Constraint(grammar=grammar.grammar_of(allowed))

    def _allowed(self, choice: ToolChoice, parallel: bool, shape: grammar.Shape | None) -> grammar.Shape | None:
        """What the whole answer may be, after its thought: calls, text of a certain shape, or either."""
        if not choice.tools:
            return shape
        if choice.mode == "none":
            forbidden = self._texts(self.family.triggers)
            return self._as_text(grammar.without(forbidden)) if shape is None and forbidden else shape
        try:
            calls = {"lark_grammar": self.family.calls_grammar(choice.tools, parallel, self._literal)}
        except UnsupportedOption:
            if choice.mode == "required" or shape is not None or any(tool.strict for tool in choice.tools):
                raise
            return None
        if choice.mode == "required":
            return calls
        return grammar.either(calls, self._as_text(grammar.prose()) if shape is None else shape)

    def _when_called(self, choice: ToolChoice, parallel: bool) -> Constraint | None:
        """Text is free, and a call, once begun, is a call of one of the tools with arguments that fit.

        As with OpenAI, only tools that are `strict` promise that: where a schema cannot be enforced and none is
        strict, calls are read as the model writes them.
        """
        try:
            after = tuple(
                (trigger.encode(), self.family.after_trigger_grammar(choice.tools, self._literal, trigger))
                for trigger in self.family.triggers
            )
        except UnsupportedOption:
            if any(tool.strict for tool in choice.tools):
                raise
            return None
        return Constraint(after=after, once=not parallel)

    def _as_text(self, shape: grammar.Shape) -> grammar.Shape:
        """A shape of the text that the user sees: harmony has a channel for it."""
        if self.style is not HARMONY:
            return shape
        first, *others = grammar.flat(shape)
        lark = f"start: {self._literal('<|channel|>final<|message|>')} @text"
        return {"lark_grammar": lark, "others": [{"name": "text", **first}, *others]}

    def _texts(self, marks: Sequence[str]) -> list[str]:
        """Those that are written as text; control tokens are no text."""
        return [mark for mark in marks if mark not in self._vocabulary.control_texts]

    def _literal(self, text: str) -> str:
        """A text as grammars have it: control tokens by their number."""
        control = self._vocabulary.control_texts
        if text in control:
            return f"<[{control[text]}]>"
        cut = re.compile("(" + "|".join(re.escape(one) for one in control if one in text) + ")") if control else None
        pieces = [piece for piece in cut.split(text) if piece] if cut is not None and cut.pattern != "()" else [text]
        return " ".join(f"<[{control[piece]}]>" if piece in control else grammar.quoted(piece) for piece in pieces)

    def _budget(self, thoughts: Thinking, opened: bool) -> ThoughtBudget | None:
        if self.style is None or thoughts.budget is None:
            return None
        return ThoughtBudget(
            tokens=thoughts.budget,
            opens=self.style.opens.encode(),
            closes=self.style.closes.encode(),
            ending=tuple(self._vocabulary.tokenize(self.style.ending, special=True)),
            open=opened,
        )
