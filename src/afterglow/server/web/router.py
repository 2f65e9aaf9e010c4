"""Routes of the web page: its files, which need no API key, and the conversations of a tenant, which do."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from afterglow.server.auth import get_tenant_salt
from afterglow.server.conversations import ConversationTree, TreeMessage
from afterglow.server.errors import APIError
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState
from afterglow.server.web.files import SECURITY_HEADERS, WebFile, WebFiles, explain_disabled_page
from afterglow.server.web.schema import (
    EXPORT_FORMAT,
    EXPORT_VERSION,
    ChangeConversation,
    CreateConversation,
    ImportConversations,
    ImportedConversation,
    MessageID,
    PutMessage,
    dump_body,
)

CACHE_FOR_EVER = "public, max-age=31536000, immutable"
REVALIDATE = "no-cache"


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes. If the page is off, `/` says why."""
    router = APIRouter(route_class=StrictRoute)
    if (reason := explain_disabled_page(state.settings)) is not None:
        _add_disabled_route(router, reason)
        return router
    _add_file_routes(router, WebFiles.load())
    for add_routes in (_add_transfer_routes, _add_conversation_routes, _add_message_routes):  # `export` is no id
        add_routes(router, state)
    return router


def _add_disabled_route(router: APIRouter, reason: str) -> None:
    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        raise APIError(404, reason, code="page_disabled")


def _add_file_routes(router: APIRouter, files: WebFiles) -> None:
    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return build_file_response(request, files.page, REVALIDATE)

    @router.get("/web/{digest}/{name}", include_in_schema=False)
    async def file(digest: str, name: str, request: Request) -> Response:
        if (found := files.get(digest, name)) is None:
            raise APIError(404, f"the page has no file {name[:200]!r} in this version: load it again", code="not_found")
        return build_file_response(request, found, CACHE_FOR_EVER)


def build_file_response(request: Request, file: WebFile, cache_control: str) -> Response:
    """Return a file, or status 304 if the browser has it."""
    headers = {**SECURITY_HEADERS, "ETag": file.etag, "Cache-Control": cache_control}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.content_type)


def _add_conversation_routes(router: APIRouter, state: ServerState) -> None:
    conversations = state.conversations

    @router.get("/conversations", summary="List the conversations of the web page")
    async def list_conversations(request: Request) -> dict[str, Any]:
        salt = get_tenant_salt(request)
        return {"conversations": await state.run_text_work(lambda: conversations.list_all(salt))}

    @router.post("/conversations", summary="Create a conversation")
    async def create(body: CreateConversation, request: Request) -> dict[str, Any]:
        salt, settings = get_tenant_salt(request), dump_body(body.settings)
        return await state.run_text_work(lambda: conversations.create(salt, title=body.title, settings=settings))

    @router.get("/conversations/{id}", summary="Retrieve a conversation with all branches")
    async def get(id: str, request: Request) -> dict[str, Any]:
        salt = get_tenant_salt(request)
        return await state.run_text_work(lambda: conversations.get(salt, id))

    @router.patch("/conversations/{id}", summary="Rename a conversation, or change its leaf or settings")
    async def change(id: str, body: ChangeConversation, request: Request) -> dict[str, Any]:
        salt, settings = get_tenant_salt(request), None if body.settings is None else dump_body(body.settings)
        return await state.run_text_work(
            lambda: conversations.update(salt, id, title=body.title, leaf=body.leaf, settings=settings)
        )

    @router.delete("/conversations/{id}", summary="Delete a conversation")
    async def delete(id: str, request: Request) -> dict[str, Any]:
        salt = get_tenant_salt(request)
        await state.run_text_work(lambda: conversations.delete(salt, id))
        return {"id": id, "deleted": True}


def _add_message_routes(router: APIRouter, state: ServerState) -> None:
    conversations = state.conversations

    @router.put("/conversations/{id}/messages/{message_id}", summary="Add a message at its parent, or replace its text")
    async def put_message(id: str, message_id: MessageID, body: PutMessage, request: Request) -> dict[str, Any]:
        salt = get_tenant_salt(request)
        message = build_tree_message(message_id, body)
        return await state.run_text_work(lambda: conversations.put_message(salt, id, message))

    @router.delete("/conversations/{id}/messages/{message_id}", summary="Delete a message and everything below it")
    async def delete_message(id: str, message_id: str, request: Request) -> dict[str, Any]:
        salt = get_tenant_salt(request)
        return await state.run_text_work(lambda: conversations.delete_message(salt, id, message_id))


def _add_transfer_routes(router: APIRouter, state: ServerState) -> None:
    conversations = state.conversations

    @router.get("/conversations/export", summary="Export all conversations with all branches")
    async def export_conversations(request: Request) -> dict[str, Any]:
        salt = get_tenant_salt(request)
        exported = await state.run_text_work(lambda: conversations.export(salt))
        return {"format": EXPORT_FORMAT, "version": EXPORT_VERSION, "conversations": exported}

    @router.post("/conversations/import", summary="Import exported conversations under new ids, all or none")
    async def import_conversations(body: ImportConversations, request: Request) -> dict[str, Any]:
        salt, trees = get_tenant_salt(request), [build_tree(conversation) for conversation in body.conversations]
        return {"conversations": await state.run_text_work(lambda: conversations.import_all(salt, trees))}


def build_tree(body: ImportedConversation) -> ConversationTree:
    """Convert an exported conversation."""
    return ConversationTree(
        title=body.title,
        settings=dump_body(body.settings),
        messages=[build_tree_message(message.id, message, message.created) for message in body.messages],
        leaf=body.leaf,
        created=body.created,
        updated=body.updated,
    )


def build_tree_message(id: str, body: PutMessage, created: float | None = None) -> TreeMessage:
    """Convert a message of a body."""
    return TreeMessage(id, body.parent, dump_body(body.message), dump_body(body.info), created)
