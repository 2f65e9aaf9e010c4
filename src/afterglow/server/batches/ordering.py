"""Order in which the lines of a batch run: by the tokens of their prompts, so that each common prefix is computed once.

Sorted prompts are a walk over their radix tree: prompts with a common prefix are neighbours, and while they run, the
prefix is in the KV cache of a sequence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from afterglow.api.model import Model
from afterglow.engine.types.entries import Media
from afterglow.errors import AfterglowError, Closed, EngineError, LoadError, ModelNotFound
from afterglow.server.batches.lines import BatchItem, BatchLine, parse_item
from afterglow.server.errors import APIError
from afterglow.server.generation_requests import ConversationRequest
from afterglow.server.models import ModelSlot
from afterglow.server.openai import chat, completions, responses
from afterglow.server.openai.response_store import ResponseStore
from afterglow.server.openai.response_tools import ResponseToolSet
from afterglow.server.openai.schema.chat import ChatRequest
from afterglow.server.openai.schema.completions import CompletionRequest, list_prompts
from afterglow.server.openai.schema.responses import ResponseRequest
from afterglow.server.state import ServerState

CHUNK_LINES = 16  # that are rendered in one piece of work, so that other requests are not delayed
MAX_KEY_ENTRIES = 16_384  # prompts that differ only later are not ordered
LineKey = tuple[str, str, bytes]


async def order_lines(state: ServerState, path: Path, lines: Sequence[BatchLine], salt: str) -> list[int]:
    """Return the numbers of the lines of a file in the order in which they should run."""
    keys: list[tuple[LineKey, int]] = []
    with open(path, "rb") as source:
        async for line, prompt in _render_prompts(state, source, lines, salt):
            slot = find_slot(state, line)
            keys.append((("" if slot is None else slot.name, line.url, prompt), line.number))
    return [number for _, number in sorted(keys)]


def find_slot(state: ServerState, line: BatchLine) -> ModelSlot | None:
    """Return the slot of the model of a line; None if it is not served: it was deleted, or no request has named it yet.

    Such a line runs nevertheless, so that its route serves the model or responds with the error.
    """
    try:
        return state.models.get_requested_slot(line.model)
    except (APIError, ModelNotFound):
        return None


async def find_model(state: ServerState, line: BatchLine) -> Model | None:
    """Return the model of a line, loaded; None if it is not on this machine any more or cannot be loaded.

    Such a line runs nevertheless and gets the error as its result. Raises `Closed` if the server stops.
    """
    try:
        return await state.get_model(line.model)
    except Closed:
        raise
    except (APIError, LoadError, EngineError):
        return None


async def _render_prompts(
    state: ServerState, source: BinaryIO, lines: Sequence[BatchLine], salt: str
) -> AsyncIterator[tuple[BatchLine, bytes]]:
    for start in range(0, len(lines), CHUNK_LINES):
        chunk = lines[start : start + CHUNK_LINES]
        models = {line.model: await find_model(state, line) for line in chunk}

        def render(chunk: Sequence[BatchLine] = chunk, models: dict[str | None, Model | None] = models) -> list[bytes]:
            items = [parse_item(read_line(source, line)) for line in chunk]
            return [
                b"" if (model := models[line.model]) is None else render_prompt(state, model, line.url, item, salt)
                for line, item in zip(chunk, items, strict=True)
            ]

        for line, prompt in zip(chunk, await state.run_text_work(render), strict=True):
            yield line, prompt


def read_line(source: BinaryIO, line: BatchLine) -> bytes:
    """Read the content of a line."""
    source.seek(line.offset)
    return source.read(line.nbytes)


def render_prompt(state: ServerState, model: Model, url: str, item: BatchItem, salt: str) -> bytes:
    """Return the prompt of a line as a sort key; empty if it has none or is known only when it runs. Blocking."""
    try:
        match url:
            case "/v1/chat/completions":
                body = ChatRequest.model_validate(item.body)
                return render_conversation(state, model, chat.build_generation_request(state, body, salt))
            case "/v1/responses":
                return render_response(state, model, ResponseRequest.model_validate(item.body), salt)
            case "/v1/completions":
                completion = CompletionRequest.model_validate(item.body)
                prompt, defaults = (
                    list_prompts(completion)[0],
                    state.models.get_requested_model(completion.model).defaults,
                )
                return encode_key(completions.fit_prompt(model, completion, prompt, defaults).entries)
    except (APIError, AfterglowError):  # the line fails with it when it runs, or its media are loaded then
        return b""
    return b""


def render_conversation(state: ServerState, model: Model, request: ConversationRequest) -> bytes:
    """Render a conversation with the chat template. Blocking."""
    adapted = request.adapt_prompt(state, model)
    return encode_key(adapted.plan_messages(model, adapted.messages).prompt.entries)


def render_response(state: ServerState, model: Model, body: ResponseRequest, salt: str) -> bytes:
    """Render the conversation of a response that continues none. Blocking."""
    if body.previous_response_id is not None:
        return b""
    tools = ResponseToolSet(body.tools or ())
    store = ResponseStore(max_responses=0, max_bytes=0)
    messages = responses.build_conversation(store, body, tools, salt).messages
    return render_conversation(state, model, responses.build_generation_request(body, messages, tools, {}, salt))


def encode_key(entries: Iterable[object]) -> bytes:
    """Return tokens as bytes with the same order. A media entry ends them.

    >>> encode_key([1, 300]) < encode_key([2]) and encode_key([1]) < encode_key([1, 0])
    True
    """
    tokens: list[int] = []
    for entry in entries:
        if isinstance(entry, Media) or len(tokens) == MAX_KEY_ENTRIES:
            break
        tokens.append(int(entry))  # type: ignore[call-overload]
    return np.asarray(tokens, ">u4").tobytes()
