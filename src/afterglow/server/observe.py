"""Routes that show the prefix cache at work: the prefix tree and its actions, events, and requests."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.background import BackgroundTask

from afterglow.api.model import Model
from afterglow.chat.miss_reasons import infer_text_reason
from afterglow.engine.inspect.tree import CachedPrefix, PrefixTree, TreeNode
from afterglow.engine.types.cache_events import CacheEventPage
from afterglow.engine.types.entries import strip_labels
from afterglow.errors import AfterglowError, UnsupportedOperation
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import APIError
from afterglow.server.explain import format_entries
from afterglow.server.history import SHOWN_ENTRIES, TrackedRequest, shorten_words
from afterglow.server.models import ModelSlot
from afterglow.server.schema.base import StrictRoute
from afterglow.server.schema.observe import (
    EventsQuery,
    ForgetResponse,
    NodeQuery,
    NodeRequest,
    NodeResponse,
    PromptResponse,
    RequestsQuery,
    TreeQuery,
)
from afterglow.server.sse import EventStreamResponse, format_ping_comment
from afterglow.server.state import ServerState

ResultT = TypeVar("ResultT")
POLL_SECONDS = 0.5  # between two questions to the engines for what they stored, loaded and evicted
MAX_CACHED_TEXTS = 20_000  # first words of nodes


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)
    _add_tree_routes(router, state)
    _add_action_routes(router, state)
    _add_event_routes(router, state)
    _add_request_routes(router, state)
    return router


# --- the prefix tree


class TextCache:
    """First words of the nodes of a model by id: the text of a node never changes unless its start does."""

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[str, str, int], str] = OrderedDict()

    def get_text(self, model: Model, node: TreeNode) -> str:
        """Return the first words of a node."""
        key = model.name, node.id, node.start
        if key not in self._texts:
            self._texts[key] = shorten_words(format_entries(model, node.first_entries))
            if len(self._texts) > MAX_CACHED_TEXTS:
                with contextlib.suppress(KeyError):  # another thread removed the last one
                    self._texts.popitem(last=False)
        return self._texts[key]


@contextlib.contextmanager
def hold_loaded(slot: ModelSlot) -> Iterator[Model | None]:
    """Keep a model from being unloaded if it is loaded. It is not loaded for that, and it does not count as a use."""
    model = slot.try_acquire()
    try:
        yield model
    finally:
        if model is not None:
            slot.release(is_use=False)


def _add_tree_routes(router: APIRouter, state: ServerState) -> None:
    texts = TextCache()

    @router.get("/tree", summary="Cached prefixes of the client as a tree")
    async def get_tree(query: Annotated[TreeQuery, Query()], request: Request) -> Response:
        await state.add_named_model(query.model)
        slot, salt = state.models.get_requested_slot(query.model), get_tenant_salt(request)
        with hold_loaded(slot) as model:
            if model is None or not model.can_generate:
                return JSONResponse({"model": slot.name, "version": 0, "block_size": 0, "nodes": [], "total_nodes": 0})
            request_ids = state.history.map_engine_ids(model.name, salt)

            def build_body() -> dict[str, Any] | None:
                tree = model.get_tree(salt=salt, max_nodes=query.max_nodes, since=query.since)
                return None if tree is None else format_tree(model, tree, request_ids, texts)

            body = await state.run_engine_call(model.name, build_body)
        return Response(status_code=304) if body is None else JSONResponse(body)


async def run_with_prefix(
    state: ServerState, body: NodeRequest | NodeQuery, request: Request, work: Callable[[Model, CachedPrefix], ResultT]
) -> ResultT:
    """Run work on the prefix of a node of the client; raise status 404 if there is no such node."""
    model, salt = await state.get_model(body.model), get_tenant_salt(request)

    def find_and_work() -> ResultT:
        prefix = model.find_prefix(body.id, salt=salt)
        if prefix is None:
            raise APIError(404, f"the tree has no node {body.id[:100]!r}: it may be evicted", code="node_not_found")
        return work(model, prefix)

    return await state.run_engine_call(model.name, find_and_work)


def _add_action_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/tree/pin", summary="Pin the prefix up to the end of a node: it is never evicted")
    async def pin(body: NodeRequest, request: Request) -> NodeResponse:
        return await run_with_prefix(state, body, request, pin_node)

    @router.post("/tree/unpin", summary="Remove the pin that ends at a node")
    async def unpin(body: NodeRequest, request: Request) -> NodeResponse:
        return await run_with_prefix(state, body, request, unpin_node)

    @router.post("/tree/forget", summary="Remove a node and everything below it from all tiers")
    async def forget(body: NodeRequest, request: Request) -> ForgetResponse:
        return await run_with_prefix(
            state,
            body,
            request,
            lambda model, prefix: ForgetResponse(model=model.name, id=prefix.id, **asdict(model.forget_prefix(prefix))),
        )

    @router.get("/tree/prompt", summary="Text of the prefix up to the end of a node")
    async def get_prompt(query: Annotated[NodeQuery, Query()], request: Request) -> PromptResponse:
        return await run_with_prefix(
            state,
            query,
            request,
            lambda model, prefix: PromptResponse(
                model=model.name,
                id=prefix.id,
                tokens=len(prefix.entries),
                text=format_entries(model, strip_labels(prefix.entries).tolist()),
            ),
        )

    @router.get("/tree/export", summary="Archive of the prefix up to the end of a node", response_class=FileResponse)
    async def export(query: Annotated[NodeQuery, Query()], request: Request) -> FileResponse:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="afterglow-export-")))
            path = folder / f"{query.id[:12]}.tar"
            await run_with_prefix(state, query, request, lambda model, prefix: export_node(model, prefix, path))
            remove = BackgroundTask(stack.pop_all().close)  # after the response
            return FileResponse(path, media_type="application/x-tar", filename=path.name, background=remove)


def export_node(model: Model, prefix: CachedPrefix, path: Path) -> None:
    """Write the archive of a prefix; raise status 409 if it cannot be stored on disk."""
    try:
        count = model.export_prefix(prefix, path)
    except UnsupportedOperation as error:
        raise APIError(409, str(error), code="no_disk_cache") from None
    if not count:
        raise APIError(409, "nothing of this prefix is stored: a running request uses it", code="not_stored")


def pin_node(model: Model, prefix: CachedPrefix) -> NodeResponse:
    """Pin a prefix."""
    model.pin_prefix(prefix)
    return NodeResponse(model=model.name, id=prefix.id, tokens=len(prefix.entries), pinned=True)


def unpin_node(model: Model, prefix: CachedPrefix) -> NodeResponse:
    """Unpin a prefix; raise status 404 if no pin ends there."""
    tokens = len(prefix.entries)
    if not model.unpin_prefix(prefix):
        raise APIError(404, f"exactly this prefix of {tokens:,} tokens is not pinned", code="pin_not_found")
    return NodeResponse(model=model.name, id=prefix.id, tokens=tokens, pinned=False)


def format_tree(model: Model, tree: PrefixTree, request_ids: dict[str, str], texts: TextCache) -> dict[str, Any]:
    """Format a tree as JSON values, with the text of its nodes. Blocking."""
    return {
        "model": model.name,
        "version": tree.version,
        "block_size": tree.block_size,
        "nodes": [format_node(node, texts.get_text(model, node), request_ids) for node in tree.nodes],
        "total_nodes": tree.total_nodes,
    }


def format_node(node: TreeNode, text: str, request_ids: dict[str, str]) -> dict[str, Any]:
    """Format a node. `request_ids` are the ids that clients know, by those of the engine."""
    return {
        "id": node.id,
        "parent": node.parent,
        "start": node.start,
        "end": node.end,
        "text": text,
        "tiers": {
            "device": node.device_entries,
            "ram": node.ram_entries,
            "disk": node.disk_entries,
            "checkpoint": node.checkpoint_entries,
        },
        "bytes": {"ram": node.ram_bytes, "disk": node.disk_bytes},
        "checkpoints": list(node.checkpoints),
        "pinned": node.pinned,
        "hits": node.hits,
        "sharers": node.sharers,
        "last_used_seconds_ago": round(node.idle_seconds, 3),
        "seconds_saved": round(node.seconds_saved, 4),
        "requests": list(dict.fromkeys(request_ids[id] for id in node.requests if id in request_ids)),
        "sequence": node.sequence,
        "folded": node.folded,
    }


# --- events


class CacheEventPoller:
    """Asks the engines for their cache events, and notices their load states, while clients read the events."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._task: asyncio.Task[None] | None = None
        self._reader_count = 0
        self._pages: dict[str, CacheEventPage] = {}  # last page by model
        self._slot_states: dict[str, str] = {}

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Poll while at least one client reads the events."""
        self._reader_count += 1
        if self._task is None or self._task.done():
            self._pages, self._slot_states = {}, {}
            self._task = asyncio.ensure_future(self._run())
        try:
            yield
        finally:
            self._reader_count -= 1

    async def _run(self) -> None:
        while True:
            for slot in list(self._state.models.slots.values()):
                if self._slot_states.get(slot.name) != slot.state:
                    self._slot_states[slot.name] = slot.state
                    self._state.events.add("engine", model=slot.name, state=slot.state)
                await self._poll(slot)
            await asyncio.sleep(POLL_SECONDS)
            if not self._reader_count:
                return

    async def _poll(self, slot: ModelSlot) -> None:
        last = self._pages.get(slot.name)
        with hold_loaded(slot) as model:
            if model is None:
                return
            after = 0 if last is None else last.last_number
            try:
                page = await self._state.run_engine_call(model.name, lambda: model.get_cache_events(after))
            except AfterglowError:  # the engine crashed; the next one has another log
                return
        self._pages[slot.name] = page
        if last is None:
            return  # what happened before the first client came
        if page.log_id != last.log_id:
            self._pages[slot.name] = CacheEventPage(page.log_id, 0, ())
            return
        for event in page.events:
            fields: dict[str, Any] = {"entries": event.entries, "bytes": event.nbytes, "tier": event.tier}
            if event.kind == "loaded":
                fields["seconds"] = round(event.seconds, 6)
            self._state.events.add(event.kind, model=slot.name, **fields)


def _add_event_routes(router: APIRouter, state: ServerState) -> None:
    poller = CacheEventPoller(state)

    @router.get("/events", summary="Requests, prefix caches and engines as server-sent events")
    async def get_events(
        query: Annotated[EventsQuery, Query()],
        request: Request,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        after = query.after
        if last_event_id is not None:  # a browser that reconnects
            after = parse_event_id(last_event_id)
        salt = get_tenant_salt(request)

        async def read() -> AsyncIterator[bytes]:
            events = state.events.read(salt, after)
            try:
                with poller.run():
                    yield b": connected\n\n"  # the headers are sent with the first bytes
                    async for event in events:
                        yield event
            finally:
                await events.aclose()  # type: ignore[attr-defined]

        return EventStreamResponse(
            read(),
            ping_seconds=state.settings.ping_seconds,
            build_ping=lambda: format_ping_comment(None),
            on_close=lambda: None,
        )


def parse_event_id(text: str) -> int:
    """Return the number in the header `Last-Event-ID`; raise status 400 if it is none.

    >>> parse_event_id("12")
    12
    """
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise APIError(400, f"`Last-Event-ID` must be the id of an event, not {text[:50]!r}", code="invalid_value")
    return int(text)


# --- requests


def _add_request_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/requests", summary="Running and last requests of the client, newest first")
    async def list_requests(query: Annotated[RequestsQuery, Query()], request: Request) -> dict[str, Any]:
        newest = state.history.list_newest(get_tenant_salt(request), query.limit)
        return {"requests": [tracked.describe() for tracked in newest], "last_event": state.events.last_number}

    @router.get("/requests/{id}", summary="One request, with the texts where its prompt differs from the cache")
    async def get_request(id: str, request: Request) -> dict[str, Any]:
        tracked = state.history.find(id, get_tenant_salt(request))
        if tracked is None:
            raise APIError(404, f"there is no request {id[:100]!r} among the last ones", code="request_not_found")
        difference = None
        if tracked.difference is not None and tracked.difference.is_visible:
            difference = await state.run_text_work(lambda: format_difference(state, tracked))
        return {**tracked.describe(), "difference": difference}


def format_difference(state: ServerState, tracked: TrackedRequest) -> dict[str, Any] | None:
    """Return the texts around the first difference; None if the model is not known any more. Blocking."""
    slot, difference = state.models.slots.get(tracked.model), tracked.difference
    if slot is None or slot.model is None or difference is None:
        return None
    before, prompt, cached = (
        format_entries(slot.model, part.tolist())
        for part in (difference.before[-SHOWN_ENTRIES:], difference.prompt, difference.cached)
    )
    return {
        "position": difference.position,
        "cached_text": before + cached,
        "prompt_text": before + prompt,
        "cause": infer_text_reason(before, prompt, cached),
    }
