"""Requests for a generation, independent of the API: what each asks for, and the engine requests that it becomes.

An API converts its body to a `ConversationRequest` or a `PromptRequest`; `generation` admits it and runs it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from afterglow.api.model import Model, shorten_deadline
from afterglow.api.options import GenerationOptions, PromptOptions
from afterglow.api.prompts import FittedPrompt
from afterglow.chat.chat import ChatPlan
from afterglow.chat.constraints.grammar import build_grammar
from afterglow.chat.constraints.response_format import parse_response_format
from afterglow.chat.messages import Message
from afterglow.chat.output.parts import OutputFormat
from afterglow.chat.prompt import Breakpoint, ChatPrompt, PromptBreakpoint, TruncationPolicy, count_system_messages
from afterglow.chat.tools.tool import Tool
from afterglow.chat.truncation import fit_plan
from afterglow.engine.types.constraints import GrammarConstraint
from afterglow.engine.types.request import Request
from afterglow.server import limits
from afterglow.server.adapters import Lora
from afterglow.server.auth import join_salts
from afterglow.server.errors import invalid_request_error
from afterglow.server.explain import format_entries
from afterglow.server.history import HEAD_ENTRIES
from afterglow.server.installed import RequestDefaults
from afterglow.server.logs import get_record
from afterglow.server.media import load_media
from afterglow.server.priority import get_engine_priority
from afterglow.server.schema.sampling import SamplingFields, build_sampling
from afterglow.server.state import ServerState
from afterglow.server.volatile import StablePrompt, move_volatile_spans


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt ready for the engine, and the format of its output."""

    request: Request
    output_format: OutputFormat
    breakpoints: tuple[PromptBreakpoint, ...] = ()
    unenforced_tools: tuple[Tool, ...] = ()  # tools whose calls must be checked after generation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(ABC):
    """Options of a generation. Subclasses add the prompt."""

    sampling_fields: SamplingFields
    n: int = 1  # choices of each prompt
    max_tokens: int | None = None  # None: the default of the model, or else of the server
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None
    salt: str = ""
    lora: Lora = field(default_factory=list)  # set by `start_generation`, from the body and the name of the model
    service_tier: str | None = None
    keep_alive: float | None = None  # seconds for which the model stays loaded after the request
    defaults: RequestDefaults | None = None  # None: those of the model

    @property
    def choices(self) -> int:
        """Number of choices of all prompts."""
        return self.n

    def check_limits(self, state: ServerState) -> None:
        """Raise `limit_exceeded` if the request exceeds a limit of the server."""
        limits.check_limit(state.settings, "max_choices", "n", self.n)
        limits.check_limit(state.settings, "max_logit_bias", "logit_bias", len(self.sampling_fields.logit_bias or {}))

    def apply_defaults(self, model_defaults: RequestDefaults) -> Self:
        """Return the request with the defaults of the model, unless it has its own."""
        defaults = self.defaults or model_defaults
        max_tokens = defaults.max_tokens if self.max_tokens is None else self.max_tokens
        unset = {
            name: value for name, value in defaults.sampling.items() if getattr(self.sampling_fields, name) is None
        }
        fields = self.sampling_fields.model_copy(update=unset)
        return replace(self, stop=self.stop or list(defaults.stop), max_tokens=max_tokens, sampling_fields=fields)

    def adapt(self, state: ServerState, model: Model) -> GenerationRequest:
        """Return the request as the model can serve it, or raise the error of a field that it cannot honour."""
        fields, context = self.sampling_fields, model.context_length
        if fields.num_ctx is not None and fields.num_ctx > context:
            message = f"`num_ctx` is {fields.num_ctx:,}; the context length is {context:,} (setting `context`)"
            raise invalid_request_error("num_ctx", message)
        for token in fields.stop_token_ids or ():
            if not 0 <= token < model.vocabulary.size:
                message = f"`stop_token_ids` must be tokens from 0 to {model.vocabulary.size - 1}, not {token}"
                raise invalid_request_error("stop_token_ids", message)
        return self

    async def load_media(self, state: ServerState, model: Model, resources: contextlib.ExitStack) -> GenerationRequest:
        """Return the request with its media loaded. They are released with `resources`."""
        return self

    @property
    def generates_summaries(self) -> bool:
        """Whether `plan` may generate text, and take as long as that."""
        return False

    @abstractmethod
    def get_newest_text(self, model: Model) -> str:
        """Return the text of the newest message, or of the prompt."""

    @abstractmethod
    def plan(self, model: Model, options: GenerationOptions, cancel: threading.Event) -> list[PlannedPrompt]:
        """Plan the prompts. `options` are those of `Model.build_request`. Blocking; `cancel` ends it."""

    def build_options(self, state: ServerState, model: Model) -> GenerationOptions:
        """Build the options of `Model.build_request`. The deadline is the smaller of those of request and server."""
        fields, settings = self.sampling_fields, state.settings
        if fields.seed is None and settings.default_seed is not None:
            fields = fields.model_copy(update={"seed": settings.default_seed})
        deadlines = [fields.deadline, settings.deadline]
        return {
            "max_tokens": limits.parse_max_tokens(
                settings.default_max_tokens if self.max_tokens is None else self.max_tokens
            ),
            "min_tokens": fields.min_tokens or 0,
            "ignore_eos": bool(fields.ignore_eos),
            "use_prefix_cache": fields.cache_prompt is not False,
            "sampling": build_sampling(
                fields,
                model.sampling_defaults.sampling,
                context_length=model.context_length,
                vocabulary_size=model.vocabulary.size,
            ),
            "stop": self.stop,
            "logprobs": self.logprobs,
            "deadline": min((value for value in deadlines if value is not None), default=None),
            "salt": self.cache_salt,
            "lora": self.lora,
        }

    @property
    def priority(self) -> int:
        """Priority for the engine. Raises status 400 if two fields contradict each other."""
        return get_engine_priority(self.sampling_fields.priority, self.service_tier)

    @property
    def cache_salt(self) -> str:
        """Salt of the tenant, with that of the request."""
        return join_salts(self.salt, self.sampling_fields.cache_salt)

    def add_stop_tokens(self, request: Request) -> Request:
        """Return the engine request with the stop tokens of the client."""
        tokens = frozenset(self.sampling_fields.stop_token_ids or ())
        return replace(request, stop_tokens=request.stop_tokens | tokens) if tokens else request


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRequest(GenerationRequest):
    """A conversation to continue."""

    messages: list[Message]
    tools: Sequence[Tool] = ()
    breakpoints: Sequence[Breakpoint] = ()  # positions that later prompts share, and how long they are pinned
    prompt_options: PromptOptions
    overflow: TruncationPolicy = "refuse"
    reasoning_field: str = "reasoning_effort"  # of the body, for the header with the fields that had no effect

    def check_limits(self, state: ServerState) -> None:
        """Raise `limit_exceeded` if the request exceeds a limit of the server."""
        settings = state.settings
        limits.check_limit(settings, "max_messages", "messages", len(self.messages))
        GenerationRequest.check_limits(self, state)
        limits.check_limit(settings, "max_tools", "tools", len(self.tools))
        limits.check_grammar_size("tools", [tool.definition for tool in self.tools], settings)
        limits.check_grammar_size("response_format", self.prompt_options.get("response_format"), settings)

    def apply_defaults(self, model_defaults: RequestDefaults) -> Self:
        """Return the request with the defaults of the model, unless it has its own. Its system prompt stays first."""
        request = GenerationRequest.apply_defaults(self, model_defaults)
        own = count_system_messages(self.messages)
        defaults = self.defaults or model_defaults
        first = defaults.list_first_messages(has_system=own > 0)
        template = self.prompt_options.get("chat_template") or defaults.chat_template
        is_given = self.sampling_fields.overflow is not None
        return replace(
            request,
            prompt_options={**self.prompt_options, "chat_template": template},
            overflow=self.overflow if is_given else defaults.sampling.get("overflow", self.overflow),
            messages=[*self.messages[:own], *first, *self.messages[own:]],
            breakpoints=[
                replace(breakpoint, message=breakpoint.message + len(first))
                if breakpoint.message >= own
                else breakpoint
                for breakpoint in self.breakpoints
            ],
        )

    def adapt(self, state: ServerState, model: Model) -> GenerationRequest:
        """Return the request as the model can serve it, or raise the error of a field that it cannot honour."""
        GenerationRequest.adapt(self, state, model)
        return self.adapt_prompt(state, model)

    def adapt_prompt(self, state: ServerState, model: Model) -> ConversationRequest:
        """Return the request without reasoning if the model has none, and with volatile spans moved."""
        stable = move_volatile(state, self.messages, self.breakpoints)
        return replace(
            self,
            messages=stable.messages,
            breakpoints=stable.breakpoints,
            prompt_options=choose_reasoning(state, model, self.prompt_options, self.reasoning_field),
        )

    async def load_media(
        self, state: ServerState, model: Model, resources: contextlib.ExitStack
    ) -> ConversationRequest:
        """Return the request with its media loaded. They are released with `resources`."""
        return replace(self, messages=await load_media(state, model, self.messages, resources))

    def get_newest_text(self, model: Model) -> str:
        """Return the text of the newest message."""
        return next((message.content for message in reversed(self.messages) if message.content), "")

    def plan_messages(self, model: Model, messages: Sequence[Message]) -> ChatPlan:
        """Plan the prompt of all messages, or of those that are left of a conversation that is too long. Blocking."""
        # The positions are those of all messages.
        is_complete = len(messages) == len(self.messages) and all(map(operator.is_, messages, self.messages))
        return model.plan_chat(
            messages,
            tools=self.tools,
            salt=self.cache_salt,
            breakpoints=self.breakpoints if is_complete else (),
            **self.prompt_options,
        )

    @property
    def generates_summaries(self) -> bool:
        """Whether `plan` may generate text, and take as long as that."""
        return self.overflow == "compact"

    def plan(self, model: Model, options: GenerationOptions, cancel: threading.Event) -> list[PlannedPrompt]:
        """Render the conversation to a prompt that fits the context. Blocking; `cancel` ends it."""
        started = time.monotonic()
        build_plan = functools.partial(self.plan_messages, model)
        if self.overflow == "compact":
            plan = model.plan_compacted_chat(
                self.messages, build_plan, self.tools, options, self.prompt_options, cancel
            )
            shorten_deadline(options, time.monotonic() - started)
        else:
            context, max_tokens = model.context_length, limits.parse_max_tokens(self.max_tokens)
            plan = fit_plan(self.messages, build_plan, self.overflow, context=context, max_tokens=max_tokens)
        request = self.add_stop_tokens(plan.apply_to(model.build_request(plan.prompt, **options)))
        return [PlannedPrompt(request, plan.output_format, plan.prompt.breakpoints, plan.unenforced_tools)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest(GenerationRequest):
    """Prompts to complete, without a chat template."""

    prompts: Sequence[FittedPrompt]
    response_format: Mapping[str, Any] | None = None

    @property
    def choices(self) -> int:
        """Number of choices of all prompts."""
        return self.n * len(self.prompts)

    def check_limits(self, state: ServerState) -> None:
        """Raise `limit_exceeded` if the request exceeds a limit of the server."""
        GenerationRequest.check_limits(self, state)
        limits.check_grammar_size("response_format", self.response_format, state.settings)

    def get_newest_text(self, model: Model) -> str:
        """Return the first text of the first prompt."""
        return format_entries(model, list(self.prompts[0].entries[:HEAD_ENTRIES])) if self.prompts else ""

    def plan(self, model: Model, options: GenerationOptions, cancel: threading.Event) -> list[PlannedPrompt]:
        """Build the engine requests. Blocking."""
        spec = parse_response_format(self.response_format).spec
        constraint = None if spec is None else GrammarConstraint(grammar=build_grammar(spec))
        return [
            PlannedPrompt(
                replace(self.add_stop_tokens(model.build_request(prompt, **options)), constraint=constraint),
                model.build_text_format(prompt.truncation),
            )
            for prompt in self.prompts
        ]


def move_volatile(
    state: ServerState, messages: Sequence[Message], breakpoints: Sequence[Breakpoint] = ()
) -> StablePrompt:
    """Move the volatile spans of the system prompt to its end, as the settings say, and count them."""
    if state.settings.volatile == "keep":
        return StablePrompt(list(messages), list(breakpoints), Counter())
    stable = move_volatile_spans(messages, breakpoints)
    for rule, count in stable.hits.items():
        state.metrics.volatile_spans.labels(rule).inc(count)
    return stable


def choose_reasoning(state: ServerState, model: Model, options: PromptOptions, field: str) -> PromptOptions:
    """Return the options with the reasoning of the settings if the request sets none.

    If the model cannot reason, it is left out: the field is a hint then.
    """
    reasoning = options.get("reasoning")
    if reasoning is None and state.settings.default_reasoning != "auto" and model.can_reason:
        return {**options, "reasoning": state.settings.default_reasoning == "on"}
    asks_for_reasoning = reasoning not in (None, "none") and reasoning is not False
    if asks_for_reasoning and not model.can_reason and get_record().accept_hint(field):
        return {**options, "reasoning": None}
    return options


async def build_prompt(
    state: ServerState,
    model_name: str | None,
    model: Model,
    request: ConversationRequest,
    resources: contextlib.ExitStack,
) -> ChatPrompt:
    """Render the prompt that a request would have, without running it. Its media are released with `resources`.

    `model_name` is that of the request: it determines the defaults.
    """
    request = request.apply_defaults(state.models.get_requested_model(model_name).defaults)
    loaded = await request.adapt_prompt(state, model).load_media(state, model, resources)
    return await state.run_text_work(lambda: loaded.plan_messages(model, loaded.messages).prompt)
