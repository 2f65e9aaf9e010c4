"""Plans chat requests: messages and options to a prompt, output constraints and an output parser."""

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
from afterglow.chat.messages import Message, MessageLike, parse_messages
from afterglow.chat.multimodal import TEXT_ONLY, MediaPlaceholders, MediaSupport, extract_media, filter_media
from afterglow.chat.output.parts import OutputParser, PlainTextParser
from afterglow.chat.output.reasoning import HARMONY_REASONING, ReasoningParser, detect_reasoning_format
from afterglow.chat.prompt import ChatPrompt, PromptBuilder
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.chat.tools.detection import detect_family
from afterglow.chat.tools.families.hermes import GENERIC
from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.text_tools import render_tools_as_text
from afterglow.chat.tools.tool import Tool, ToolLike, parse_tools
from afterglow.closeable import Closeable
from afterglow.engine.types.constraints import GrammarConstraint, ReasoningBudget
from afterglow.engine.types.request import Request
from afterglow.errors import UnsupportedOption
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.policy import INLINE_ONLY, MediaPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of a chat request, except sampling."""

    tools: Sequence[ToolLike] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: Any = None
    reasoning: bool | int | str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """A chat request ready for the engine: prompt, constraints and output parser."""

    chat: Chat
    prompt: ChatPrompt
    tools: tuple[Tool, ...]
    tool_choice: ResolvedToolChoice
    starts_in_reasoning: bool  # the prompt ends inside reasoning
    constraint: GrammarConstraint | None
    reasoning_budget: ReasoningBudget | None
    parse: Callable[[str], Any] | None  # parses the text of a complete answer

    def apply_to(self, request: Request) -> Request:
        """Return the engine request with the token constraints and stop tokens of this plan."""
        return replace(
            request,
            constraint=self.constraint,
            reasoning_budget=self.reasoning_budget,
            stop_tokens=self.chat.stop_tokens,
        )

    def create_parser(self) -> OutputParser:
        """Create the parser that splits one answer into text, reasoning and tool calls."""
        chat = self.chat
        may_call = bool(self.tools) and self.tool_choice.mode != "none"
        parser = (
            chat.tool_family.create_parser(self.tools)
            if may_call or chat.reasoning_format is HARMONY_REASONING
            else PlainTextParser()
        )
        if chat.reasoning_format is None or chat.reasoning_format is HARMONY_REASONING:
            return parser
        return ReasoningParser(parser, chat.reasoning_format, starts_in_reasoning=self.starts_in_reasoning)


class Chat(Closeable):
    """Chat format of one model: template, reasoning format, tool family and media.

    >>> with Chat(vocabulary, template) as chat:
    ...     plan = chat.plan([("user", "Hello")], ChatOptions(reasoning=100))
    >>> plan.reasoning_budget.max_tokens
    100
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
        """`boundaries`: whether prompts get boundaries at the ends of messages (see `PromptBuilder`)."""
        self.media_policy = media_policy
        self._media_support = media_support
        self.reasoning_format = detect_reasoning_format(template)
        self._vocabulary = vocabulary
        special = {f"{name}_token": vocabulary.get_text(token) for name, token in vocabulary.special_tokens.items()}
        self._template_source = template
        self._template = ChatTemplate(template, special)
        self._prompt_builder = PromptBuilder(vocabulary, self._template, boundaries=boundaries)

    def plan(self, messages: Sequence[MessageLike], options: ChatOptions) -> ChatPlan:
        """Plan a chat request. Raises an error that names the option if one cannot be honored."""
        tools = parse_tools(options.tools)
        tool_choice = parse_tool_choice(options.tool_choice, tools)
        reasoning = parse_reasoning_options(options.reasoning, self.reasoning_format, self._template_source)
        response_format = parse_response_format(options.response_format)
        parsed, placeholders = extract_media(parse_messages(messages), self._media_support(), self.media_policy)
        chat_template_kwargs = {**reasoning.chat_template_kwargs, **options.chat_template_kwargs}
        prompt = self._build_prompt(parsed, tools, chat_template_kwargs, placeholders)
        starts_in_reasoning = self.reasoning_format is not None and self.reasoning_format.is_open(prompt.text)
        return ChatPlan(
            chat=self,
            prompt=prompt,
            tools=tools,
            tool_choice=tool_choice,
            starts_in_reasoning=starts_in_reasoning,
            constraint=self._build_constraint(
                tool_choice, options.parallel_tool_calls, response_format.spec, reasoning, starts_in_reasoning
            ),
            reasoning_budget=self._build_reasoning_budget(reasoning, starts_in_reasoning),
            parse=response_format.parse,
        )

    def load_media(self, messages: Sequence[MessageLike]) -> list[Message]:
        """Return the messages with their media loaded, as the media policy allows."""
        filtered = filter_media(parse_messages(messages), self._media_support())
        attachments = [attachment for message in filtered for attachment in message.attachments]
        media = iter(load_attachments(attachments, self.media_policy))
        return [
            replace(
                message,
                attachments=tuple(replace(attachment, source=next(media)) for attachment in message.attachments),
            )
            for message in filtered
        ]

    def close(self) -> None:
        self._template.close()

    @functools.cached_property
    def tool_family(self) -> ToolFamily:
        """Tool call format of the model; the generic one if its template does not render tools."""
        family = detect_family(self._template_source)
        return family if family is GENERIC or self._template.get_capabilities().supports_tools else GENERIC

    @functools.cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer of this tool family, beside the end-of-generation tokens of the model."""
        control = self._vocabulary.control_tokens_by_text
        return frozenset(control[text] for text in self.tool_family.stops if text in control)

    @functools.cached_property
    def _visible_control_tokens(self) -> frozenset[int]:
        """Control tokens whose text the parsers need."""
        reasoning_format = self.reasoning_format
        tags = () if reasoning_format is None else (reasoning_format.start_tag, reasoning_format.end_tag)
        markers = " ".join((*self.tool_family.markers, *tags))
        return frozenset(token for text, token in self._vocabulary.control_tokens_by_text.items() if text in markers)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token for the output parsers. Control tokens that are no markers have none."""
        return self._vocabulary.token_to_piece(token, special=token in self._visible_control_tokens)

    def _build_prompt(
        self,
        messages: list[Message],
        tools: tuple[Tool, ...],
        chat_template_kwargs: Mapping[str, Any],
        placeholders: MediaPlaceholders,
    ) -> ChatPrompt:
        uses_tools = tools or any(message.tool_calls or message.role == "tool" for message in messages)
        definitions = [tool.definition for tool in tools]
        if uses_tools and self.tool_family is GENERIC:
            messages, definitions = render_tools_as_text(messages, tools), []
        return self._prompt_builder.build(
            messages, tools=definitions, chat_template_kwargs=chat_template_kwargs, placeholders=placeholders
        )

    # --- output constraints

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
        final_spec = None if spec is None else self._wrap_final_channel(spec)
        output_spec = self._build_output_spec(tool_choice, parallel, final_spec)
        if output_spec is None:
            return None
        if self.reasoning_format is not None and (reasoning.allowed or starts_in_reasoning):
            text = grammar.build_reasoning_grammar(
                output_spec, self.reasoning_format, self._write_literal, starts_in_reasoning=starts_in_reasoning
            )
        else:
            text = grammar.build_grammar(output_spec)
        # After the first of several calls the model may prefer text: then the calls are complete.
        return GrammarConstraint(grammar=text, stop_at_other_text=tool_choice.mode == "required" and parallel)

    def _build_output_spec(
        self, tool_choice: ResolvedToolChoice, parallel: bool, spec: grammar.GrammarSpec | None
    ) -> grammar.GrammarSpec | None:
        """Build the grammar of the answer after reasoning: tool calls, text that fits `spec`, or either."""
        if not tool_choice.tools:
            return spec
        if tool_choice.mode == "none":
            control = self._vocabulary.control_tokens_by_text  # a grammar cannot exclude control tokens as text
            forbidden = [text for text in self.tool_family.triggers if text not in control]
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
        """Build a constraint that leaves text free and enforces the schema of a tool call once one begins.

        As in OpenAI's API, only `strict` tools guarantee this: if a schema cannot be enforced and no tool is strict,
        tool calls are unconstrained.
        """
        try:
            triggers = tuple(
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
        return GrammarConstraint(triggers=triggers, stop_after_first=not parallel)

    def _wrap_final_channel(self, spec: grammar.GrammarSpec) -> grammar.GrammarSpec:
        """Wrap a spec of visible text in harmony's final channel, if the model uses that format."""
        if self.reasoning_format is not HARMONY_REASONING:
            return spec
        first, *others = grammar.flatten_spec(spec)
        lark = f"start: {self._write_literal('<|channel|>final<|message|>')} @text"
        return {"lark_grammar": lark, "others": [{"name": "text", **first}, *others]}

    def _write_literal(self, text: str) -> str:
        """Format a text as grammar literals, with control tokens by number."""
        control = self._vocabulary.control_tokens_by_text
        if text in control:
            return f"<[{control[text]}]>"
        contained = [re.escape(control_text) for control_text in control if control_text in text]
        pieces = [piece for piece in re.split(f"({'|'.join(contained)})", text) if piece] if contained else [text]
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
