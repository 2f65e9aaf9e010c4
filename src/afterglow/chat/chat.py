"""Plans chat requests: messages and options to a prompt, output constraints and an output parser."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from afterglow.chat.constraints import grammar
from afterglow.chat.constraints.reasoning_options import ReasoningOptions, parse_reasoning_options
from afterglow.chat.constraints.response_format import parse_response_format
from afterglow.chat.constraints.tool_choice import ResolvedToolChoice, parse_tool_choice
from afterglow.chat.content import load_attachments
from afterglow.chat.messages import Message, MessageLike, list_attachments, parse_messages
from afterglow.chat.multimodal import TEXT_ONLY, MediaPlaceholders, MediaSupport, extract_media, filter_media
from afterglow.chat.output.parts import OutputFormat, OutputParser, OutputPart, PlainTextParser, join_parts
from afterglow.chat.output.reasoning import (
    HARMONY_REASONING,
    OutputPosition,
    ReasoningParser,
    detect_reasoning_format,
    find_overlap,
)
from afterglow.chat.prompt import (
    Breakpoint,
    ChatPrompt,
    PromptBuilder,
    RenderedConversation,
    TemplateInput,
    Truncation,
    cut_messages,
)
from afterglow.chat.replay import (
    GeneratedMessage,
    Place,
    Replayer,
    ReplayPlan,
    ReplayStore,
    compute_meaning,
    compute_outline,
)
from afterglow.chat.summaries import SummaryStore
from afterglow.chat.template.adapter import adapt_messages
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.chat.tools.detection import detect_family
from afterglow.chat.tools.enforcement import CallGrammarBuilder
from afterglow.chat.tools.families.harmony import HARMONY
from afterglow.chat.tools.families.hermes import GENERIC
from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.text_tools import add_tool_instructions, render_tools_as_text
from afterglow.chat.tools.tool import Tool, ToolLike, parse_tools
from afterglow.closeable import Closeable
from afterglow.engine.types.constraints import GrammarConstraint, ReasoningBudget
from afterglow.engine.types.request import Finished, Request
from afterglow.errors import InvalidArgument, InvalidGrammar, InvalidTemplate, UnsupportedOption
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
    replay: bool = True  # use the sampled tokens of generated messages
    salt: str = ""  # of the tenant whose generated messages may be replayed
    breakpoints: Sequence[Breakpoint] = ()


@dataclass(frozen=True, slots=True)
class Prefill:
    """Beginning of an answer. Without text, the answer is still inside the reasoning, or begins."""

    reasoning: str | None
    text: str | None

    @property
    def needs_reasoning(self) -> bool:
        """Whether the prompt must let the model reason: the answer begins with reasoning that is not empty."""
        return bool(self.reasoning) or (self.reasoning is not None and self.text is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """A chat request ready for the engine: prompt, constraints and output parser."""

    chat: Chat
    prompt: ChatPrompt
    tools: tuple[Tool, ...]
    tool_choice: ResolvedToolChoice
    starts_in: OutputPosition  # where the prompt ends
    prefill: Prefill | None  # which the prompt contains
    constraint: GrammarConstraint | None
    unenforced_tools: tuple[Tool, ...] = ()  # tools whose calls the constraint does not enforce completely
    reasoning_budget: ReasoningBudget | None
    parse: Callable[[str], Any] | None  # parses the text of a complete answer
    place: Place | None = None  # of the answer, if it can be replayed later
    truncation: Truncation | None = None  # what was dropped from the conversation

    def apply_to(self, request: Request) -> Request:
        """Return the engine request with the token constraints and stop tokens of this plan."""
        return replace(
            request,
            constraint=self.constraint,
            reasoning_budget=self.reasoning_budget,
            stop_tokens=self.chat.stop_tokens,
        )

    @property
    def output_format(self) -> OutputFormat:
        """How tokens become a response."""
        return OutputFormat(
            self.chat.piece,
            self.create_parser,
            self.parse,
            self.truncation,
            self.prompt.replay,
            None if self.place is None else functools.partial(self.chat.record_answer, self.place),
        )

    def create_parser(self) -> OutputParser:
        """Create the parser that splits one answer into text, reasoning and tool calls."""
        tools = () if self.tool_choice.mode == "none" else self.tools
        return self.chat.create_parser(tools, self.starts_in, is_continued=self.prefill is not None)


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
        replay_store: ReplayStore | None = None,
        summary_store: SummaryStore | None = None,
    ) -> None:
        """`boundaries`: whether prompts get boundaries at the ends of messages (see `PromptBuilder`).

        `replay_store` keeps generated messages, `summary_store` summaries of conversations; both are closed with the
        chat. Without the first, nothing is replayed; without the second, summaries stay in RAM.
        """
        self.summary_store = summary_store or SummaryStore("")
        self._replay_store = replay_store
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
        parsed_messages = self._separate_reasoning(parse_messages(messages), options.breakpoints)
        reasoning = self._parse_reasoning(options, parsed_messages)
        response_format = parse_response_format(options.response_format)
        if "messages" in options.chat_template_kwargs:
            raise InvalidArgument("chat_template_kwargs", "must not contain `messages`, which the chat has")
        try:
            json.dumps(dict(options.chat_template_kwargs))
        except (TypeError, ValueError) as error:
            raise InvalidArgument("chat_template_kwargs", f"must be values of JSON: {error}") from None
        chat_template_kwargs = {**reasoning.chat_template_kwargs, **options.chat_template_kwargs}
        definitions = [tool.definition for tool in tools]
        extracted, placeholders = extract_media(
            parsed_messages, self._media_support(), self.media_policy, definitions, chat_template_kwargs
        )
        breakpoints = [move_breakpoint(breakpoint, parsed_messages, placeholders) for breakpoint in options.breakpoints]
        client_messages, last_message = split_prefill(extracted)
        prefill = None if last_message is None else self._read_prefill(last_message)
        conversation = self._write_tools(client_messages, tools)
        rendered = self._prompt_builder.render(
            conversation.messages,
            tools=conversation.tools or (),
            chat_template_kwargs=chat_template_kwargs,
            placeholders=placeholders,
            prefill=last_message,
            continuation=None if prefill is None else functools.partial(self._write_continuation, prefill),
        )
        replay_plan = self._plan_replay(rendered, client_messages, tools, options)
        prompt = self._prompt_builder.build(
            rendered,
            () if replay_plan is None else replay_plan.spans,
            [
                (self._diverge_at(breakpoint, client_messages, tools, rendered.separator), breakpoint.retention_seconds)
                for breakpoint in breakpoints
            ],
        )
        prompt = prompt if replay_plan is None else replace(prompt, replay=replay_plan.report)
        starts_in = self._find_output_position(prompt.text, prefill)
        constraint, unenforced = self._build_constraint(
            tool_choice, options.parallel_tool_calls, response_format.spec, reasoning, prompt, starts_in, prefill
        )
        return ChatPlan(
            chat=self,
            prompt=prompt,
            tools=tools,
            tool_choice=tool_choice,
            starts_in=starts_in,
            prefill=prefill,
            constraint=constraint,
            unenforced_tools=unenforced,
            reasoning_budget=self._build_reasoning_budget(reasoning, starts_in),
            parse=parse_with_prefix(response_format.parse, (prefill and prefill.text) or ""),
            place=None if replay_plan is None or prefill is not None else replay_plan.place,
        )

    def _separate_reasoning(self, messages: list[Message], breakpoints: Sequence[Breakpoint]) -> list[Message]:
        """Move reasoning that clients keep in the text of the model's messages, with its tags, to its own field.

        The tags are text to the template, which could not tell it from the answer. Texts with a breakpoint stay.
        """
        separated, _ = split_prefill(messages)
        fixed = {breakpoint.message for breakpoint in breakpoints}
        for index, message in enumerate(separated):
            if message.role == "assistant" and index not in fixed and message.reasoning is None:
                reasoning, answer = self._split_reasoning(message.content)
                if reasoning is not None and answer is not None:
                    separated[index] = replace(message, reasoning=reasoning, content=answer)
        return [*separated, *messages[len(separated) :]]

    def _read_prefill(self, message: Message) -> Prefill:
        """Return the beginning of the answer that a last message of the assistant is."""
        if message.reasoning:
            return Prefill(message.reasoning, message.content or None)
        reasoning, text = self._split_reasoning(message.content)
        return Prefill(reasoning, text if reasoning is not None else text or None)

    def _split_reasoning(self, text: str) -> tuple[str | None, str | None]:
        """Split a text of the model into reasoning, if it begins with it, and answer; None: it has not begun."""
        reasoning_format = self.reasoning_format
        if reasoning_format is None or reasoning_format is HARMONY_REASONING:
            return None, text
        starts_open = reasoning_format.end_tag in text and self._template_opens_reasoning
        return reasoning_format.split_text(text, starts_open=starts_open) or (None, text)

    @functools.cached_property
    def _template_opens_reasoning(self) -> bool:
        """Whether prompts end inside reasoning: the model writes no start tag, and some clients keep its text as is."""
        try:
            prompt = self._template.render([Message(role="user", content="a")])
        except InvalidTemplate:  # it renders other conversations only
            return False
        return self.reasoning_format is not None and self.reasoning_format.is_open(prompt)

    def _parse_reasoning(self, options: ChatOptions, messages: list[Message]) -> ReasoningOptions:
        """Parse the reasoning options. Reasoning that the answer continues needs a prompt with reasoning."""
        value = options.reasoning
        _, message = split_prefill(messages)
        if value is None and message is not None and self.reasoning_format is not None:
            value = self._read_prefill(message).needs_reasoning or None
        return parse_reasoning_options(value, self.reasoning_format, self._template_source)

    def _write_tools(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TemplateInput:
        """Return a conversation with its tools as definitions for the template, or as text if it renders none."""
        uses_tools = tools or any(message.tool_calls or message.role == "tool" for message in messages)
        if uses_tools and self.tool_family is GENERIC:
            return TemplateInput(render_tools_as_text(messages, tools), [])
        if tools and not self._renders_tools:
            return TemplateInput(add_tool_instructions(messages, tools, self.tool_family.instructions), [])
        return TemplateInput(messages, [tool.definition for tool in tools])

    def _diverge_at(
        self, breakpoint: Breakpoint, messages: Sequence[Message], tools: Sequence[Tool], separator: str
    ) -> TemplateInput:
        """Return a conversation that is the same up to a breakpoint and differs from there on."""
        if breakpoint.tools is None:
            return self._write_tools(cut_messages(messages, breakpoint, separator), tools)
        others = [] if breakpoint.tools < len(tools) else [Tool(name="another_tool")]
        return self._write_tools(messages, [*tools[: breakpoint.tools], *others])

    def create_parser(
        self, tools: Sequence[Tool], starts_in: OutputPosition, *, is_continued: bool = False
    ) -> OutputParser:
        """Create the parser of one answer. `is_continued`: whether the prompt contains its beginning."""
        reasoning_format, family = self.reasoning_format, self.tool_family
        if reasoning_format is HARMONY_REASONING:
            parser = HARMONY.create_parser(tools)
            if starts_in == "reasoning":
                parser.feed(reasoning_format.start_tag)  # of which the rest follows
            elif starts_in == "answer":
                parser.feed(reasoning_format.text_start)
            return parser
        parses_calls = tools or family.text_start
        create_parser = functools.partial(family.create_parser, tools) if parses_calls else PlainTextParser
        if reasoning_format is None:
            return create_parser()
        return ReasoningParser(
            create_parser,
            reasoning_format,
            starts_in=starts_in,
            is_continued=is_continued,
            call_starts=(*family.triggers, *family.other_starts) if tools else (),
        )

    # --- replay

    def _plan_replay(
        self,
        rendered: RenderedConversation,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: ChatOptions,
    ) -> ReplayPlan | None:
        if self._replay_store is None or not options.replay:
            return None
        names = {tool.name for tool in tools}
        called = {call.name for message in messages for call in message.tool_calls} - names
        known_tools = [*tools, *(Tool(name=name) for name in sorted(called))]

        def parse(before: str, text: str) -> list[OutputPart]:
            parser = self.create_parser(known_tools, self._find_output_position(before, None))
            return parser.feed(text) + parser.finish()

        def write_as_text(message: Message) -> str | None:
            adapted = adapt_messages([message], self._template.get_capabilities())
            return None if len(adapted) > 1 or adapted[0].tool_calls else adapted[0].content.strip()

        defaults = {tool.name: tool.defaults for tool in tools}
        return Replayer(self._replay_store, options.salt, messages, parse, write_as_text, defaults).plan(rendered)

    def forget_answers(self) -> None:
        """Remove all generated messages and summaries, on disk too."""
        self.summary_store.clear()
        if self._replay_store is not None:
            self._replay_store.clear()

    def record_answer(self, place: Place, tokens: Sequence[int], parts: Sequence[OutputPart], finish: Finished) -> None:
        """Keep an answer for replay, if later prompts can contain its tokens as they are."""
        assert self._replay_store is not None
        end_tokens = self._vocabulary.eog_tokens | self.stop_tokens
        sampled = tuple(tokens[:-1] if tokens and tokens[-1] in end_tokens else tokens)
        if isinstance(finish.stop_reason, bytes):
            sampled = self._cut_stop_text(sampled, finish.stop_reason)
        output = join_parts(parts)
        # At a limit or a stop text, an answer may end inside reasoning or a call.
        has_end = finish.finish_reason == "stop" and not isinstance(finish.stop_reason, bytes)
        is_complete = has_end or (bool(output.text) and not output.tool_calls)
        hidden = self._vocabulary.control_tokens - self._visible_control_tokens
        if not sampled or not is_complete or not hidden.isdisjoint(sampled):
            return
        text = b"".join(map(self.piece, sampled)).decode("utf-8", "replace")  # it may end inside a character
        self._replay_store.add(
            GeneratedMessage(
                place,
                compute_meaning(output.text, output.reasoning, output.tool_calls),
                compute_outline(parts),
                tuple(call.id for call in output.tool_calls),
                tuple(call.id for call in output.tool_calls if call.id in text),
                sampled,
            )
        )

    def _cut_stop_text(self, tokens: Sequence[int], stop: bytes) -> tuple[int, ...]:
        """Return the tokens of an answer before its stop text, which may begin inside a token."""
        pieces = list(map(self.piece, tokens))
        end = b"".join(pieces).find(stop)
        lengths = list(itertools.accumulate(map(len, pieces)))
        kept = bisect.bisect_right(lengths, end)
        rest = b"".join(pieces[kept:])[: end - sum(map(len, pieces[:kept]))] if end >= 0 else b""
        return (*tokens[:kept], *self._vocabulary.tokenize_continuation(rest.decode("utf-8", "replace")))

    def load_media(self, messages: Sequence[MessageLike]) -> list[Message]:
        """Return the messages with their media loaded, as the media policy allows."""
        media_support = self._media_support()
        filtered = filter_media(parse_messages(messages), media_support)
        media = iter(load_attachments(list_attachments(filtered), self.media_policy, media_support.decode))
        return [
            replace(
                message,
                attachments=tuple(replace(attachment, source=next(media)) for attachment in message.attachments),
            )
            for message in filtered
        ]

    def close(self) -> None:
        self._template.close()
        self.summary_store.close()
        if self._replay_store is not None:
            self._replay_store.close()

    @functools.cached_property
    def tool_family(self) -> ToolFamily:
        """Tool call format of the model; the generic one if its template does not render tools, unless the family has
        instructions that describe them."""
        family = detect_family(self._template_source)
        return family if family is GENERIC or family.instructions or self._renders_tools else GENERIC

    @functools.cached_property
    def _call_grammars(self) -> CallGrammarBuilder:
        return CallGrammarBuilder(self.tool_family, self._write_literal)

    @property
    def _renders_tools(self) -> bool:
        return self._template.get_capabilities().supports_tools

    @property
    def _text_start(self) -> str:
        """Text before the visible text of every answer."""
        return (self.reasoning_format.text_start if self.reasoning_format else "") or self.tool_family.text_start

    @functools.cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer of this tool family, beside the end-of-generation tokens of the model."""
        control = self._vocabulary.control_tokens_by_text
        return frozenset(control[text] for text in self.tool_family.stops if text in control)

    @functools.cached_property
    def _visible_control_tokens(self) -> frozenset[int]:
        """Control tokens whose text the parsers need."""
        reasoning_format, family = self.reasoning_format, self.tool_family
        tags = () if reasoning_format is None else reasoning_format.tags
        markers = " ".join((*(HARMONY if reasoning_format is HARMONY_REASONING else family).markers, *tags))
        return frozenset(token for text, token in self._vocabulary.control_tokens_by_text.items() if text in markers)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token for the output parsers. Control tokens that are no markers have none."""
        return self._vocabulary.token_to_piece(token, special=token in self._visible_control_tokens)

    def _write_continuation(self, prefill: Prefill, prompt: str, escape: Callable[[str], str]) -> str:
        """Write the beginning of the answer after the rendered prompt. Only the tags may be control tokens."""
        reasoning = None if prefill.reasoning is None else escape(prefill.reasoning)
        text = None if prefill.text is None else escape(prefill.text)
        if self.reasoning_format is None:
            return self.tool_family.text_start + text if text else ""
        return self.reasoning_format.write_continuation(prompt, reasoning, text)

    def _find_output_position(self, prompt_text: str, prefill: Prefill | None) -> OutputPosition:
        if prefill is not None and prefill.text is not None:
            return "answer"
        is_open = self.reasoning_format is not None and self.reasoning_format.is_open(prompt_text)
        return "reasoning" if is_open or (prefill is not None and prefill.reasoning is not None) else "turn"

    # --- output constraints

    def _build_constraint(
        self,
        tool_choice: ResolvedToolChoice,
        parallel: bool,
        spec: grammar.GrammarSpec | None,
        reasoning: ReasoningOptions,
        prompt: ChatPrompt,
        starts_in: OutputPosition,
        prefill: Prefill | None,
    ) -> tuple[GrammarConstraint | None, tuple[Tool, ...]]:
        """Build the constraint of the answer. Return it with the tools whose calls it does not enforce completely."""
        triggers = self.tool_family.list_triggers(tool_choice.tools)
        if tool_choice.mode == "auto" and triggers and tool_choice.tools and spec is None:
            return self._build_triggered_constraint(tool_choice, parallel, prompt)
        # Without a text start, this is always true.
        has_text_start = starts_in == "answer" or prompt.text.rstrip().endswith(self._text_start)
        wrap_text = (lambda text_spec: text_spec) if has_text_start else self._wrap_text
        final_spec = None if spec is None else wrap_text(spec)
        output_spec, unenforced = self._build_output_spec(tool_choice, parallel, final_spec, wrap_text)
        if output_spec is None:
            return None, unenforced
        may_reason = starts_in == "reasoning" or (starts_in == "turn" and reasoning.allowed)
        if self.reasoning_format is not None and may_reason:
            is_open = starts_in == "reasoning"
            text = grammar.build_reasoning_grammar(
                output_spec, self.reasoning_format, self._write_literal, starts_in_reasoning=is_open
            )
        else:
            text = grammar.build_grammar(output_spec)
        prefix = prefill.text.encode() if prefill is not None and prefill.text and spec is not None else b""
        # After the first of several calls the model may prefer text: then the calls are complete.
        stop_at_other_text = tool_choice.mode == "required" and parallel
        return GrammarConstraint(grammar=text, stop_at_other_text=stop_at_other_text, prefix=prefix), unenforced

    def _build_output_spec(
        self,
        tool_choice: ResolvedToolChoice,
        parallel: bool,
        spec: grammar.GrammarSpec | None,
        wrap_text: Callable[[grammar.GrammarSpec], grammar.GrammarSpec],
    ) -> tuple[grammar.GrammarSpec | None, tuple[Tool, ...]]:
        """Build the grammar of the answer after reasoning: tool calls, text that fits `spec`, or either."""
        if not tool_choice.tools:
            return spec, ()
        if tool_choice.mode == "none":
            control = self._vocabulary.control_tokens_by_text  # a grammar cannot exclude control tokens as text
            triggers = self.tool_family.list_triggers(tool_choice.tools)
            forbidden = [text for text in triggers if not any(token in text for token in control)]
            return (wrap_text(grammar.build_exclusion_spec(forbidden)) if spec is None and forbidden else spec), ()
        is_required = tool_choice.mode == "required"
        try:
            built = self._call_grammars.build_calls(tool_choice.tools, parallel)
        except (UnsupportedOption, InvalidGrammar):
            if is_required or spec is not None or any(tool.must_conform for tool in tool_choice.tools):
                raise
            return None, tool_choice.tools
        calls: grammar.GrammarSpec = {"lark_grammar": built.grammars[0][1]}
        if is_required:
            return calls, built.unenforced
        text = wrap_text(grammar.build_prose_spec()) if spec is None else spec
        return grammar.build_alternatives_spec(calls, text), built.unenforced

    def _build_triggered_constraint(
        self, tool_choice: ResolvedToolChoice, parallel: bool, prompt: ChatPrompt
    ) -> tuple[GrammarConstraint | None, tuple[Tool, ...]]:
        """Build a constraint that leaves text free and enforces the schema of a tool call once one begins.

        As in OpenAI's API, only `strict` tools guarantee this: what cannot be enforced of other tools is free.
        """
        try:
            built = self._call_grammars.build_triggered(tool_choice.tools)
        except (UnsupportedOption, InvalidGrammar):
            if any(tool.must_conform for tool in tool_choice.tools):
                raise
            return None, tool_choice.tools
        # Functionary's prompts end with `>>>`.
        begun = max(find_overlap(prompt.text, trigger) for trigger, _ in built.grammars)
        prefix = prompt.text[len(prompt.text) - begun :].encode()
        grammars = tuple((trigger.encode(), text) for trigger, text in built.grammars)
        return GrammarConstraint(triggers=grammars, stop_after_first=not parallel, prefix=prefix), built.unenforced

    def _wrap_text(self, spec: grammar.GrammarSpec) -> grammar.GrammarSpec:
        """Put the text that begins visible text before a spec (e.g. the final channel of harmony)."""
        first, *others = grammar.flatten_spec(spec)
        lark = f"start: {self._write_literal(self._text_start)} @text"
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

    def _build_reasoning_budget(self, reasoning: ReasoningOptions, starts_in: OutputPosition) -> ReasoningBudget | None:
        if self.reasoning_format is None or reasoning.budget_tokens is None or starts_in == "answer":
            return None
        return ReasoningBudget(
            max_tokens=reasoning.budget_tokens,
            start_marker=self.reasoning_format.start_tag.encode(),
            end_marker=self.reasoning_format.end_tag.encode(),
            closing_tokens=tuple(self._vocabulary.tokenize(self.reasoning_format.forced_ending, parse_special=True)),
            starts_open=starts_in == "reasoning",
        )


def split_prefill(messages: list[Message]) -> tuple[list[Message], Message | None]:
    """Split off a last message of the assistant, which the answer continues. Tool calls are complete."""
    if len(messages) > 1 and messages[-1].role == "assistant" and not messages[-1].tool_calls:
        return messages[:-1], messages[-1]
    return messages, None


def move_breakpoint(breakpoint: Breakpoint, messages: Sequence[Message], placeholders: MediaPlaceholders) -> Breakpoint:
    """Return a breakpoint in the messages with placeholders instead of attachments."""
    if breakpoint.offset is None or not breakpoint.attachments or breakpoint.message >= len(messages):
        return breakpoint
    first = sum(len(message.attachments) for message in messages[: breakpoint.message])
    numbers = range(first, first + breakpoint.attachments)
    return replace(breakpoint, offset=breakpoint.offset + sum(map(placeholders.count_characters, numbers)))


def parse_with_prefix(parse: Callable[[str], Any] | None, prefix: str) -> Callable[[str], Any] | None:
    """Return a function that parses an answer without its prefix, which the client has."""
    return parse if parse is None or not prefix else lambda text: parse(prefix + text)
