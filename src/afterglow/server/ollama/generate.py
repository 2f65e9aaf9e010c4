"""Route /api/generate: responds to a prompt, with the chat template, without one (`raw`), or between two texts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from fastapi import APIRouter, Request, Response

from afterglow.api.model import Model
from afterglow.api.options import GenerationOptions, PromptOptions
from afterglow.api.prompts import FittedPrompt
from afterglow.chat.messages import Message, locate_attachments
from afterglow.chat.truncation import count_bos
from afterglow.server import limits
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import invalid_request_error
from afterglow.server.generation import start_generation
from afterglow.server.generation_requests import ConversationRequest, GenerationRequest, PlannedPrompt, PromptRequest
from afterglow.server.installed import RequestDefaults
from afterglow.server.ollama import conversion
from afterglow.server.ollama.chat import load_or_unload
from afterglow.server.ollama.formatting import GenerateLineFormatter, LineStreamResponse
from afterglow.server.ollama.library import ModelLibrary, OpenedModel
from afterglow.server.ollama.schema import OllamaGenerateRequest, OllamaMessage, OllamaOptions
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState


def build_router(state: ServerState) -> APIRouter:
    """Return the router of this route."""
    router = APIRouter(route_class=StrictRoute)
    library = ModelLibrary(state)

    @router.post("/api/generate", summary="Ollama: respond to a prompt")
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        work = create_response(state, library, body, get_tenant_salt(request))
        tokens = {"prompt": "context"} if body.context else {}  # the only tokens of a body
        fields = {**conversion.FORMAT_FIELDS, **tokens}
        return await state.run_while_connected(request, work, "prompt", other_fields=fields)

    return router


async def create_response(
    state: ServerState, library: ModelLibrary, body: OllamaGenerateRequest, salt: str
) -> Response:
    """Generate the response to a prompt."""
    check_fields(body)
    if not body.prompt and not body.suffix and not body.images:
        return await load_or_unload(state, library, body, {"response": ""})
    num_ctx = body.options.num_ctx if body.options else None
    opened = await library.open(body.model, num_ctx=num_ctx)
    request = await build_generation_request(state, opened, body, salt)
    generation = await start_generation(state, opened.slot_name, request)
    formatter = GenerateLineFormatter(
        opened,
        generation,
        logprobs=bool(body.logprobs),
        returns_context=isinstance(request, ConversationRequest),
    )
    return await generation.respond(formatter, stream=body.stream is not False, build_stream=LineStreamResponse)


def check_fields(body: OllamaGenerateRequest) -> None:
    """Reject combinations of fields that exclude each other."""
    modes = {"raw": body.raw, "suffix": body.suffix}
    templated = {"system": body.system, "template": body.template, "context": body.context, "images": body.images}
    for mode in (name for name, value in modes.items() if value):
        for name in (name for name, value in templated.items() if value):
            raise invalid_request_error(name, f"`{name}` and `{mode}` exclude each other: it needs the chat template")
        if body.think:
            raise invalid_request_error("think", f"`think` and `{mode}` exclude each other: it needs the chat template")
    if body.raw and body.suffix:
        raise invalid_request_error("suffix", "`suffix` and `raw` exclude each other")
    if body.context and body.images:
        raise invalid_request_error("images", "`images` and `context` exclude each other: use /api/chat")


async def build_generation_request(
    state: ServerState, opened: OpenedModel, body: OllamaGenerateRequest, salt: str
) -> GenerationRequest:
    """Convert the body to a generation request."""
    model, options = opened.model, conversion.merge_options(opened.created, body.options, opened.defaults)
    common = conversion.build_generation_fields(state, body, options, model, salt)
    if body.raw or body.suffix:
        prompt = await state.run_text_work(lambda: fit_plain_prompt(model, body, options))
        response_format = conversion.build_response_format(body)
        return PromptRequest(prompts=[prompt], response_format=response_format, defaults=RequestDefaults(), **common)
    conversation = ConversationRequest(
        messages=build_conversation(body),
        # A context contains the system prompt of the model already.
        defaults=RequestDefaults() if body.context else conversion.build_defaults(opened.created, opened.defaults),
        prompt_options=conversion.build_prompt_options(body, opened.created, body.template),
        reasoning_field="think",
        overflow=conversion.get_overflow(body, options),
        **common,
    )
    if not body.context:
        return conversation
    fields = {name: getattr(conversation, name) for name in conversation.__dataclass_fields__}
    return ContinuedRequest(context=body.context, **fields)


def build_conversation(body: OllamaGenerateRequest) -> list[Message]:
    """Return the messages of a prompt."""
    messages = [OllamaMessage.model_validate({"role": "user", "content": body.prompt, "images": body.images})]
    if body.system:
        messages.insert(0, OllamaMessage.model_validate({"role": "system", "content": body.system}))
    return [locate_attachments(message, "images") for message in conversion.build_messages(messages)]


def fit_plain_prompt(model: Model, body: OllamaGenerateRequest, options: OllamaOptions) -> FittedPrompt:
    """Tokenize a prompt without the chat template. Control tokens in a raw prompt are control tokens."""
    overflow, max_tokens = conversion.get_overflow(body, options), conversion.get_max_tokens(options)
    if not body.suffix:
        tokens = model.tokenize(body.prompt or "", special=True, bos=True)
        start = count_bos(tokens[:1], model.vocabulary)
        if start and count_bos(tokens[1:2], model.vocabulary):  # the prompt has its own
            tokens = tokens[1:]
        return model.fit_prompt(tokens, overflow, max_tokens)
    tokens, special = model.build_infill_prompt(body.prompt or "", body.suffix), model.vocabulary.special_tokens
    keep_start = tokens.index(special["fim_pre"]) + 1  # only the text before the gap may lose its start
    keep_end = len(tokens) - tokens.index(special["fim_suf"])
    return model.fit_prompt(tokens, overflow, max_tokens, keep_start=keep_start, keep_end=keep_end)


def remove_first_bos(tokens: list[int], bos: int | None) -> list[int]:
    """Return the tokens of a prompt without the BOS token at its start, unless it starts every turn of the template.

    >>> [remove_first_bos(tokens, bos=1) for tokens in ([1, 20, 30], [1, 20, 1, 30], [1, 1, 20])]
    [[20, 30], [1, 20, 1, 30], [1, 20]]
    """
    is_added = tokens[:1] == [bos] and (tokens[1:2] == [bos] or bos not in tokens[1:])
    return tokens[1:] if is_added else tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedRequest(ConversationRequest):
    """A prompt after the tokens of earlier ones."""

    context: list[int]

    def plan(self, model: Model, options: GenerationOptions, cancel: threading.Event) -> list[PlannedPrompt]:
        """Render the prompt and append it to the context. Blocking."""
        context = [int(token) for token in model.vocabulary.check_tokens(self.context)]
        prompt_options: PromptOptions = {**self.prompt_options, "replay": False}
        plan = model.plan_chat(self.messages, salt=self.salt, **prompt_options)
        rendered = remove_first_bos(list(map(int, plan.prompt.tokens)), model.vocabulary.special_tokens.get("bos"))
        max_tokens = limits.parse_max_tokens(self.max_tokens)
        fitted = model.fit_prompt([*context, *rendered], self.overflow, max_tokens)
        boundaries = [len(context)] if fitted.truncation is None else []
        options["boundaries"] = boundaries
        request = self.add_stop_tokens(plan.apply_to(model.build_request(fitted, **options)))
        return [PlannedPrompt(request, replace(plan.output_format, truncation=fitted.truncation))]
