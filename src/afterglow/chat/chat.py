"""Chat: messages in; out comes what the model is given, what it may answer, and how its answer is read."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from afterglow.chat.constraints import grammar
from afterglow.chat.constraints.reasoning_options import ReasoningOptions, parse_reasoning_options
from afterglow.chat.constraints.response_format import parse_response_format
from afterglow.chat.constraints.tool_choice import ResolvedToolChoice, parse_tool_choice
from afterglow.chat.content import load_attachments
from afterglow.chat.messages import Message, MessageLike
from afterglow.chat.messages import parse_messages as read_messages
from afterglow.chat.multimodal import TEXT_ONLY, MediaPlaceholders, MediaSupport, extract_media, filter_media
from afterglow.chat.output.parts import OutputParser, PlainTextParser
from afterglow.chat.output.reasoning import HARMONY_REASONING, ReasoningParser, detect_reasoning_format
from afterglow.chat.prompt import ChatPrompt, PromptBuilder
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.chat.tools.detection import detect_family
from afterglow.chat.tools.families.hermes import GENERIC
from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.text_tools import render_tools_as_text
from afterglow.chat.tools.tool import Tool, ToolLike
from afterglow.chat.tools.tool import parse_tools as read_tools
from afterglow.closeable import Closeable
from afterglow.engine.types.constraints import GrammarConstraint, ReasoningBudget
from afterglow.engine.types.request import Request
from afterglow.errors import UnsupportedOption
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.policy import INLINE_ONLY, MediaPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What may be asked of an answer beside its sampling."""

    tools: Sequence[ToolLike] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: Any = None
    reasoning: bool | int | str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the template


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """A conversation ready to be answered."""

    chat: Chat
    prompt: ChatPrompt
    tools: tuple[Tool, ...]
    tool_choice: ResolvedToolChoice
    starts_in_reasoning: bool  # the prompt ends inside a thought
    constraint: GrammarConstraint | None
    reasoning_budget: ReasoningBudget | None
    parse: Callable[[str], Any] | None  # what a finished answer's text is turned into

    def apply_to(self, request: Request) -> Request:
        """The engine's request, with what leads the answer."""
        return replace(
            request,
            constraint=self.constraint,
            reasoning_budget=self.reasoning_budget,
            stop_tokens=self.chat.stop_tokens,
        )

    def create_parser(self) -> OutputParser:
        """What tells text, thoughts and calls apart in one answer."""
        chat = self.chat
        calls = bool(self.tools) and self.tool_choice.mode != "none"
        inner = (
            chat.tool_family.create_parser(self.tools)
            if calls or chat.reasoning_format is HARMONY_REASONING
            else PlainTextParser()
        )
        if chat.reasoning_format is None or chat.reasoning_format is HARMONY_REASONING:
            return inner
        return ReasoningParser(inner, chat.reasoning_format, starts_in_reasoning=self.starts_in_reasoning)


class Chat(Closeable):
    """Knows how one model talks.

    >>> chat = Chat(vocabulary, template)
    >>> plan = chat.plan([("user", "Hello")], ChatOptions(reasoning=100))
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str | None,
        media_policy: MediaPolicy = INLINE_ONLY,
        media_support: Callable[[], MediaSupport] = lambda: TEXT_ONLY,
        *,
        boundaries: bool = True,
    ) -> None:
        """`boundaries`: whether prompts say where their messages end (see `PromptBuilder`)."""
        self.media_policy = media_policy  # where pictures and sounds may come from
        self._media_support = media_support
        self.reasoning_format = detect_reasoning_format(template)
        self._vocabulary = vocabulary
        special = {f"{name}_token": vocabulary.get_text(token) for name, token in vocabulary.special_tokens.items()}
        self._template_source = template
        self._template = ChatTemplate(template, special)
        self._prompt_builder = PromptBuilder(vocabulary, self._template, boundaries=boundaries)

    def plan(self, messages: Sequence[MessageLike], options: ChatOptions) -> ChatPlan:
        """What to ask of the engine. Whatever cannot be honoured is refused here, by name."""
        tools = read_tools(options.tools)
        choice = parse_tool_choice(options.tool_choice, tools)
        thoughts = parse_reasoning_options(options.reasoning, self.reasoning_format, self._template_source)
        format = parse_response_format(options.response_format)
        said, shown = extract_media(read_messages(messages), self._media_support(), self.media_policy)
        prompt = self._build_prompt(
            said, tools, {**thoughts.chat_template_kwargs, **options.chat_template_kwargs}, shown
        )
        opened = self.reasoning_format is not None and self.reasoning_format.is_open(prompt.text)
        return ChatPlan(
            chat=self,
            prompt=prompt,
            tools=tools,
            tool_choice=choice,
            starts_in_reasoning=opened,
            constraint=self._build_constraint(choice, options.parallel_tool_calls, format.spec, thoughts, opened),
            reasoning_budget=self._build_reasoning_budget(thoughts, opened),
            parse=format.parse,
        )

    def load_media(self, messages: Sequence[MessageLike]) -> list[Message]:
        """The messages with their pictures and sounds opened, from wherever those may come."""
        said = filter_media(read_messages(messages), self._media_support())
        contents = iter(load_attachments((one for message in said for one in message.attachments), self.media_policy))
        return [
            replace(message, attachments=tuple(replace(one, source=next(contents)) for one in message.attachments))
            for message in said
        ]

    def close(self) -> None:
        self._template.close()

    @functools.cached_property
    def tool_family(self) -> ToolFamily:
        """How this model calls tools: as its template says, where that really shows them to the model."""
        family = detect_family(self._template_source)
        return family if family is GENERIC or self._template.get_capabilities().supports_tools else GENERIC

    @functools.cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end a turn of this family's models beside the model's own ends."""
        control = self._vocabulary.control_tokens_by_text
        return frozenset(control[text] for text in self.tool_family.stops if text in control)

    @functools.cached_property
    def _visible_control_tokens(self) -> frozenset[int]:
        """The control tokens that readers must see."""
        marks = " ".join(
            (
                *self.tool_family.markers,
                *((self.reasoning_format.start_tag, self.reasoning_format.end_tag) if self.reasoning_format else ()),
            )
        )
        return frozenset(token for text, token in self._vocabulary.control_tokens_by_text.items() if text in marks)

    def piece(self, token: int) -> bytes:
        """The bytes of a token as readers see it: control tokens only where they mark something."""
        return self._vocabulary.token_to_piece(token, special=token in self._visible_control_tokens)

    def _build_prompt(
        self,
        messages: list[Message],
        tools: tuple[Tool, ...],
        chat_template_kwargs: Mapping[str, Any],
        placeholders: MediaPlaceholders,
    ) -> ChatPrompt:
        used = tools or any(message.tool_calls or message.role == "tool" for message in messages)
        if used and self.tool_family is GENERIC:
            return self._prompt_builder.build(
                render_tools_as_text(messages, tools),
                chat_template_kwargs=chat_template_kwargs,
                placeholders=placeholders,
            )
        offered = [tool.definition for tool in tools]
        return self._prompt_builder.build(
            messages, tools=offered, chat_template_kwargs=chat_template_kwargs, placeholders=placeholders
        )

    # --- what the answer may be

    def _build_constraint(
        self,
        tool_choice: ResolvedToolChoice,
        parallel: bool,
        spec: grammar.GrammarSpec | None,
        reasoning: ReasoningOptions,
        starts_in_reasoning: bool,
    ) -> GrammarConstraint | None:
        if tool_choice.mode == "auto" and tool_choice.tools and spec is None and self.tool_family.triggers:
            return self._build_triggered_constraint(tool_choice, parallel)
        allowed = self._build_output_spec(
            tool_choice, parallel, None if spec is None else self._wrap_final_channel(spec)
        )
        if allowed is None:
            return None
        if self.reasoning_format is not None and (reasoning.allowed or starts_in_reasoning):
            return GrammarConstraint(
                grammar=grammar.build_reasoning_grammar(
                    allowed, self.reasoning_format, self._write_literal, starts_in_reasoning=starts_in_reasoning
                )
            )
        return GrammarConstraint(grammar=grammar.build_grammar(allowed))

    def _build_output_spec(
        self, tool_choice: ResolvedToolChoice, parallel: bool, spec: grammar.GrammarSpec | None
    ) -> grammar.GrammarSpec | None:
        """What the whole answer may be, after its thought: calls, text of a certain shape, or either."""
        if not tool_choice.tools:
            return spec
        if tool_choice.mode == "none":
            forbidden = self._exclude_control_tokens(self.tool_family.triggers)
            return (
                self._wrap_final_channel(grammar.build_exclusion_spec(forbidden))
                if spec is None and forbidden
                else spec
            )
        try:
            calls = {
                "lark_grammar": self.tool_family.build_calls_grammar(tool_choice.tools, parallel, self._write_literal)
            }
        except UnsupportedOption:
            if tool_choice.mode == "required" or spec is not None or any(tool.strict for tool in tool_choice.tools):
                raise
            return None
        if tool_choice.mode == "required":
            return calls
        return grammar.build_alternatives_spec(
            calls, self._wrap_final_channel(grammar.build_prose_spec()) if spec is None else spec
        )

    def _build_triggered_constraint(self, tool_choice: ResolvedToolChoice, parallel: bool) -> GrammarConstraint | None:
        """Text is free, and a call, once begun, is a call of one of the tools with arguments that fit.

        As with OpenAI, only tools that are `strict` promise that: where a schema cannot be enforced and none is
        strict, calls are read as the model writes them.
        """
        try:
            after = tuple(
                (
                    trigger.encode(),
                    self.tool_family.build_after_trigger_grammar(tool_choice.tools, self._write_literal, trigger),
                )
                for trigger in self.tool_family.triggers
            )
        except UnsupportedOption:
            if any(tool.strict for tool in tool_choice.tools):
                raise
            return None
        return GrammarConstraint(triggers=after, stop_after_first=not parallel)

    def _wrap_final_channel(self, spec: grammar.GrammarSpec) -> grammar.GrammarSpec:
        """A shape of the text that the user sees: harmony has a channel for it."""
        if self.reasoning_format is not HARMONY_REASONING:
            return spec
        first, *others = grammar.flatten_spec(spec)
        lark = f"start: {self._write_literal('<|channel|>final<|message|>')} @text"
        return {"lark_grammar": lark, "others": [{"name": "text", **first}, *others]}

    def _exclude_control_tokens(self, texts: Sequence[str]) -> list[str]:
        """Those that are written as text; control tokens are no text."""
        return [mark for mark in texts if mark not in self._vocabulary.control_tokens_by_text]

    def _write_literal(self, text: str) -> str:
        """A text as grammars have it: control tokens by their number."""
        control = self._vocabulary.control_tokens_by_text
        if text in control:
            return f"<[{control[text]}]>"
        cut = re.compile("(" + "|".join(re.escape(one) for one in control if one in text) + ")") if control else None
        pieces = [piece for piece in cut.split(text) if piece] if cut is not None and cut.pattern != "()" else [text]
        return " ".join(
            f"<[{control[piece]}]>" if piece in control else grammar.quote_literal(piece) for piece in pieces
        )

    def _build_reasoning_budget(self, reasoning: ReasoningOptions, starts_in_reasoning: bool) -> ReasoningBudget | None:
        if self.reasoning_format is None or reasoning.budget_tokens is None:
            return None
        return ReasoningBudget(
            max_tokens=reasoning.budget_tokens,
            start_marker=self.reasoning_format.start_tag.encode(),
            end_marker=self.reasoning_format.end_tag.encode(),
            closing_tokens=tuple(self._vocabulary.tokenize(self.reasoning_format.forced_ending, parse_special=True)),
            starts_open=starts_in_reasoning,
        )
