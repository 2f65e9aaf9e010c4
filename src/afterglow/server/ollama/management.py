"""Routes about models: lists and descriptions, downloads, created models, deletion."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from afterglow import registry
from afterglow.api.quantization import choose_quantization
from afterglow.chat.messages import Message
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.errors import Cancelled, InvalidTemplate, ModelNotFound
from afterglow.registry import CatalogEntry, OllamaDefinition
from afterglow.server.errors import APIError, invalid_request_error
from afterglow.server.installed import add_tag, list_spellings
from afterglow.server.ollama import conversion
from afterglow.server.ollama.created_models import CreatedModel
from afterglow.server.ollama.details import (
    CHAT_TEMPLATE_KEY,
    FileDetails,
    build_model_info,
    build_tensors,
    format_time,
    read_headers,
)
from afterglow.server.ollama.errors import build_error_body
from afterglow.server.ollama.formatting import LineStreamResponse, format_line
from afterglow.server.ollama.library import LibraryModel, ModelLibrary, is_same_file
from afterglow.server.ollama.routing import OllamaPortRoute
from afterglow.server.ollama.schema import (
    OllamaCopyRequest,
    OllamaCreateRequest,
    OllamaDeleteRequest,
    OllamaOptions,
    OllamaPullRequest,
    OllamaShowRequest,
)
from afterglow.server.schema.base import StrictRoute, list_synonyms
from afterglow.server.settings import FOREVER_SECONDS
from afterglow.server.sse import report_errors, wait_for_first_item
from afterglow.server.state import ServerState
from afterglow.version import __version__

API_VERSION = "0.13.5"  # version of Ollama whose API this one follows; clients compare it
ROOT_TEXT = "Ollama is running"
PARAMETER_WIDTH_CHARACTERS = 30
UNKNOWN_FILE = FileDetails(digest="", size=0, modified=0, details={}, capabilities=())


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)
    library = ModelLibrary(state)
    router.add_api_route(
        "/",
        get_root,
        methods=["GET", "HEAD"],
        include_in_schema=False,
        response_class=PlainTextResponse,
        route_class_override=OllamaPortRoute,
    )
    _add_list_routes(router, state, library)
    _add_pull_route(router, state, library)
    _add_change_routes(router, state, library)
    _add_refused_routes(router)
    return router


async def get_root() -> Response:
    """Respond to clients that check whether Ollama is running."""
    return PlainTextResponse(ROOT_TEXT)


# --- lists and descriptions


def _add_list_routes(router: APIRouter, state: ServerState, library: ModelLibrary) -> None:
    @router.head("/api/version", include_in_schema=False)
    @router.get("/api/version", summary="Ollama: version of the API")
    async def version() -> Response:
        return JSONResponse({"version": API_VERSION, "afterglow_version": __version__})

    @router.head("/api/tags", include_in_schema=False)
    @router.get("/api/tags", summary="Ollama: list the models")
    async def tags() -> Response:
        return JSONResponse({"models": await state.run_text_work(lambda: list(build_tags(library)))})

    @router.get("/api/ps", summary="Ollama: list the loaded models")
    async def ps() -> Response:
        return JSONResponse({"models": await state.run_text_work(lambda: list(build_processes(library)))})

    @router.post("/api/show", summary="Ollama: describe a model")
    async def show(body: OllamaShowRequest) -> Response:
        return JSONResponse(await state.run_text_work(lambda: build_description(library, body)))


def build_tags(library: ModelLibrary) -> Iterator[dict[str, Any]]:
    """Build the list of models. Blocking."""
    for model in library.list_all():
        if (file := model.describe_for_list()) is not None:
            modified = model.created.modified if model.created else file.modified
            yield {
                **build_head(model, file),
                "modified_at": format_time(modified),
                "capabilities": list_capabilities(model, file),
            }


def build_head(model: LibraryModel, file: FileDetails) -> dict[str, Any]:
    """Build the fields of all lists."""
    details = {**file.details, "parent_model": model.created.source if model.created else ""}
    return {"name": model.name, "model": model.name, "size": file.size, "digest": file.digest, "details": details}


def build_processes(library: ModelLibrary) -> Iterator[dict[str, Any]]:
    """Build the list of loaded models. Blocking."""
    for model in library.list_all():
        slot = model.slot
        loaded = None if slot is None or model.created else slot.model
        if slot is None or loaded is None or not loaded.is_active:
            continue
        file = model.describe_for_list() or UNKNOWN_FILE  # it is loaded, even if its file is gone
        expiry = slot.expires_at
        # A model that is not unloaded is shown with the longest duration.
        seconds = FOREVER_SECONDS if expiry is None else expiry - time.monotonic()
        on_devices = sum(nbytes for device, nbytes in slot.nbytes.items() if device != "ram")
        yield {
            **build_head(library.describe_use(model, slot), file),
            "size": sum(slot.nbytes.values()) or file.size,
            "size_vram": on_devices,
            "expires_at": format_time(time.time() + seconds),
            "context_length": loaded.context_length,
        }


def list_capabilities(model: LibraryModel, file: FileDetails) -> list[str]:
    """List what a model can do. A loaded model knows more than its file says."""
    loaded = model.slot.model if model.slot else None
    if loaded is None or not loaded.is_active or not loaded.can_generate:
        return list(file.capabilities)
    found = {
        "insert": {"fim_pre", "fim_suf", "fim_mid"} <= loaded.vocabulary.special_tokens.keys(),
        "vision": "image" in loaded.engine_info.media,
        "audio": "audio" in loaded.engine_info.media,
    }
    return [name for name in file.capabilities if name not in found] + [name for name, has in found.items() if has]


def build_description(library: ModelLibrary, body: OllamaShowRequest) -> dict[str, Any]:
    """Build the description of a model. Blocking."""
    name = library.get_name(body.model or body.name)
    model = library.find(library.split_adapters(name)[0])
    file = model.describe()
    if file is None or model.path is None:
        raise ModelNotFound(name, "its file is not known")
    headers, created = read_headers(model.path), model.created
    metadata = headers[0].metadata
    template = (created.template if created else None) or metadata.get(CHAT_TEMPLATE_KEY)
    definition = model.read_definition() or OllamaDefinition(path=model.path)
    parameters = {**definition.parameters, **(created.parameters if created else {})}
    system = definition.system if created is None or created.system is None else created.system
    messages = (created.messages if created else []) or list(definition.messages)
    description = {
        "modelfile": build_modelfile(model, parameters, system),
        "parameters": "\n".join(
            f"{name:<{PARAMETER_WIDTH_CHARACTERS}} {value}" for name, value in list_parameters(parameters)
        ),
        "template": template if isinstance(template, str) else "",
        "system": system or "",
        "details": build_head(model, file)["details"],
        "model_info": build_model_info(headers, verbose=bool(body.verbose)),
        "capabilities": list_capabilities(model, file),
        "modified_at": format_time(created.modified if created else file.modified),
    }
    license_text = (
        (created.license if created else None) or definition.read_license() or metadata.get("general.license")
    )
    if isinstance(license_text, str):
        description["license"] = license_text
    if messages:
        description["messages"] = messages
    return description | ({"tensors": build_tensors(headers)} if body.verbose else {})


def list_parameters(parameters: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values as JSON. A list, e.g. of stop strings, has a line for each item."""
    for name, value in parameters.items():
        for item in value if isinstance(value, list) else [value]:
            yield name, json.dumps(item, ensure_ascii=False)


def build_modelfile(model: LibraryModel, parameters: dict[str, Any], system: str | None) -> str:
    """Build the text from which Ollama could create the same model."""
    created = model.created
    lines = [f"FROM {created.source if created else model.name}"]
    if created and created.template:
        lines.append(f'TEMPLATE """{created.template}"""')
    if system:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f"PARAMETER {name} {value}" for name, value in list_parameters(parameters)]
    return "\n".join(lines) + "\n"


# --- downloads


def _add_pull_route(router: APIRouter, state: ServerState, library: ModelLibrary) -> None:
    @router.post("/api/pull", summary="Ollama: download a model")
    async def pull(body: OllamaPullRequest, request: Request) -> Response:
        check_management(state)
        reports = pull_model(state, library, body.model_name)
        return await state.run_while_connected(request, respond_with_reports(reports, body.stream), "model")


async def respond_with_reports(reports: AsyncIterator[dict[str, Any]], stream: bool | None) -> Response:
    """Return the reports of a long operation as lines, or the last one if `stream` is false."""
    if stream is False:
        return JSONResponse([report async for report in reports][-1])
    first = await wait_for_first_item(reports)
    lines = report_errors(_format_lines(first), lambda error: format_line(build_error_body(error)))
    return LineStreamResponse(lines, on_close=lambda: None)


async def _format_lines(reports: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async for report in reports:
        yield format_line(report)


async def pull_model(state: ServerState, library: ModelLibrary, name: str) -> AsyncIterator[dict[str, Any]]:
    """Download a model and yield its progress. A model that is on this machine is complete at once."""
    entry = None
    try:
        await state.run_text_work(lambda: library.find(name))
    except ModelNotFound:
        entry = next((entry for entry in map(registry.parse_name, list_spellings(name)) if entry), None)
        if entry is None:
            raise
    yield {"status": "pulling manifest"}
    if entry is not None:
        async for report in download(state, entry):
            yield report
    for status in ("verifying sha256 digest", "writing manifest", "success"):
        yield {"status": status}


async def download(state: ServerState, entry: CatalogEntry) -> AsyncIterator[dict[str, Any]]:
    """Download a model in a thread and yield its progress. If the client leaves, the download ends."""
    loop, cancelled = asyncio.get_running_loop(), False
    reports: asyncio.Queue[tuple[int, int | None] | None] = asyncio.Queue()

    def report(done: int, total: int | None) -> None:
        if cancelled:
            raise Cancelled("the client disconnected")
        loop.call_soon_threadsafe(reports.put_nowait, (done, total))

    work = asyncio.ensure_future(
        state.run_download(lambda: registry.pull(entry.name, report, choose=choose_quantization))
    )

    def finish(work: asyncio.Future[Path]) -> None:
        if not work.cancelled():
            work.exception()  # otherwise asyncio logs the error of a download whose client has left
        reports.put_nowait(None)

    work.add_done_callback(finish)
    digest = {} if entry.source.sha256 is None else {"digest": f"sha256:{entry.source.sha256}"}
    try:
        while (progress := await reports.get()) is not None:
            done, total = progress
            size = {} if total is None else {"total": total}
            label = entry.source.sha256[:12] if entry.source.sha256 else entry.name
            yield {"status": f"pulling {label}", **digest, **size, "completed": done}
        work.result()
    finally:
        cancelled = True


# --- created models, deletion


def check_management(state: ServerState) -> None:
    """Raise status 403 if clients may not change the models of this machine."""
    if not state.settings.manage_models:
        message = "clients may not change the models of this server (server setting `manage_models`)"
        raise APIError(403, message, code="management_not_allowed")


def _add_change_routes(router: APIRouter, state: ServerState, library: ModelLibrary) -> None:
    @router.post("/api/create", summary="Ollama: create a model from another one")
    async def create(body: OllamaCreateRequest) -> Response:
        check_management(state)
        await state.run_text_work(lambda: create_model(library, body))
        statuses = ["using existing layer", "writing manifest", "success"]
        return await respond_with_reports(_yield_statuses(statuses), body.stream)

    @router.post("/api/copy", summary="Ollama: give a model a further name")
    async def copy(body: OllamaCopyRequest) -> Response:
        check_management(state)
        await state.run_text_work(lambda: copy_model(library, body.source, body.destination))
        return Response()

    @router.delete("/api/delete", summary="Ollama: delete a model")
    async def delete(body: OllamaDeleteRequest) -> Response:
        check_management(state)
        await state.run_text_work(lambda: delete_model(state, library, body.model_name))
        return Response()


async def _yield_statuses(statuses: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    for status in statuses:
        yield {"status": status}


def create_model(library: ModelLibrary, body: OllamaCreateRequest) -> None:
    """Create a model from another one, whose settings apply unless the body has its own. Blocking."""
    base = make_copy(library, body.source, body.model_name)
    license_texts = [body.license] if isinstance(body.license, str) else body.license
    options = body.parameters or OllamaOptions.model_validate({})
    parameters = options.model_dump(exclude=list_synonyms(OllamaOptions), exclude_none=True)
    messages = [message.model_dump(exclude_none=True) for message in body.messages or ()]
    template = conversion.check_template(body.template)
    if template is not None:
        check_rendering(template)
    library.created_models.save(
        base.model_copy(
            update={
                "system": body.system if body.system is not None else base.system,
                "template": template or base.template,
                "parameters": {**base.parameters, **parameters},
                "messages": messages or base.messages,
                "license": "\n".join(license_texts) if license_texts else base.license,
            }
        )
    )


def check_rendering(template: str) -> None:
    """Raise status 400 if a chat template cannot render a message. Blocking."""
    try:
        with ChatTemplate(template) as chat_template:
            chat_template.render([Message(role="user", content="Hello")])
    except InvalidTemplate as error:
        raise invalid_request_error("template", f"`template` cannot be used: {error}") from None


def copy_model(library: ModelLibrary, source: str, destination: str) -> None:
    """Give a model a further name. Its file is not copied. Blocking."""
    library.created_models.save(make_copy(library, source, destination))


def make_copy(library: ModelLibrary, source: str, name: str) -> CreatedModel:
    """Return a model with the settings of another one; raise status 400 if the name is that of a model file."""
    found = library.find(source)
    if library.names_file(name):
        raise invalid_request_error("model", f"{name!r} is the name of a model file: choose another name")
    base = found.created or CreatedModel(name=add_tag(name), source=found.slot.name if found.slot else found.name)
    return base.model_copy(update={"name": add_tag(name), "modified": time.time()})


def delete_model(state: ServerState, library: ModelLibrary, name: str) -> None:
    """Delete a created model, or the file of a pulled one. Blocking."""
    model = library.find(name)
    if model.created is not None:
        library.created_models.delete(model.created.name)
        return
    own_paths = [slot.served.path for slot in state.models.list_own_slots()]
    if model.installed is None or any(is_same_file(path, model.path) for path in own_paths):
        message = f"{name!r} is served by the command line of this server: stop the server, then `afterglow rm` it"
        raise APIError(409, message, param="model", code="model_in_use")
    users = [other.name for other in library.list_all() if other.created and is_same_file(other.path, model.path)]
    if users:
        message = f"the file of {name!r} is used by models that were created from it: delete {', '.join(users)} first"
        raise APIError(409, message, param="model", code="model_in_use")
    if model.slot is not None:
        state.models.remove(model.slot)
    registry.remove(model.installed.name)


# --- routes that are refused


def _add_refused_routes(router: APIRouter) -> None:
    async def push() -> Response:
        raise build_unsupported_error("/api/push", "models cannot be uploaded from here")

    async def blobs(digest: str) -> Response:
        raise build_unsupported_error(
            "/api/blobs", "model files cannot be uploaded: put them into the models directory"
        )

    router.post("/api/push", include_in_schema=False)(push)
    router.api_route("/api/blobs/{digest}", methods=["HEAD", "POST"], include_in_schema=False)(blobs)


def build_unsupported_error(path: str, reason: str) -> APIError:
    """Return the error of a route of Ollama's API that is not supported."""
    return APIError(400, f"`{path}` is not supported: {reason}", code="unsupported_route")
