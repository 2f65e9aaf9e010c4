"""Images over HTTP: allowed sources are loaded, everything else gets a specific 400, and other requests do not wait."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient
from typer.testing import CliRunner

import afterglow
from afterglow.api.model import Model
from afterglow.chat.messages import Message, parse_messages
from afterglow.chat.multimodal import MediaSupport
from afterglow.cli import serve
from afterglow.cli.commands import app
from afterglow.cli.settings import Settings, load_settings
from afterglow.errors import InvalidMedia, MediaRefused, UnsupportedMedia
from afterglow.media.budget import MediaBudget
from afterglow.media.policy import MediaPolicy
from afterglow.media.types import ImageData
from afterglow.server.admission import MediaReservation
from afterglow.server.app import build_application
from afterglow.server.errors import APIError, to_api_error
from afterglow.server.media import load_media
from afterglow.server.models import ModelRegistry, ServedModel
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState
from afterglow.testing import models
from support.media_files import animated_image, chunk, compressed_zeros, encode_data_uri, encode_image, gradient, png
from support.media_prompts import color_image
from support.server_process import ServerProcess, get_text

DATA_URI = encode_data_uri(encode_image(gradient()))


def build_image_part(url: str = DATA_URI, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def build_messages(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts]}]


# --- a model without media support


@pytest.mark.native
def test_media_for_a_text_model_get_400_with_their_path(server: ServerProcess) -> None:
    audio_part = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    for part in (build_image_part(), build_image_part("http://169.254.169.254/"), audio_part):
        error = server.chat(messages=build_messages(part))["error"]
        assert (error["code"], error["param"]) == ("unsupported_media", "messages[0].content")
        assert "only text" in error["message"]
    for route in ("/apply-template", "/cache/explain"):
        response = server.post(route, {"model": "tiny", "messages": build_messages(build_image_part())})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_media")


@pytest.mark.native
@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, ".image_url"),
        ({"type": "image_url", "image_url": DATA_URI}, ".image_url"),
        ({"type": "image_url", "image_url": {"url": DATA_URI, "detail": "medium"}}, ".image_url.detail"),
        ({"type": "image_url", "image_url": {"url": DATA_URI, "size": 3}}, ".image_url.size"),
        ({"type": "input_audio", "input_audio": {"data": "x", "format": "ogg"}}, ".input_audio.format"),
        ({"type": "image", "source": {"type": "url", "url": DATA_URI}}, ""),
        ({"type": "file", "file": {"file_id": "x"}}, ""),
        ({**build_image_part(), "id": "xyz"}, ".id"),
    ],
)
def test_an_invalid_part_gets_400_with_its_path(server: ServerProcess, part: dict[str, Any], param: str) -> None:
    error = server.chat(messages=build_messages(part))["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == f"messages[0].content[1]{param}"


@pytest.mark.native
def test_only_user_messages_may_contain_images(server: ServerProcess) -> None:
    for role in ("system", "assistant"):
        assert "error" in server.chat(messages=[{"role": role, "content": [build_image_part()]}])
        part = {"type": "input_image", "image_url": DATA_URI}
        error = server.respond([{"role": role, "content": [part]}])["error"]
        assert error["param"] == "input"
    error = server.respond([{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}])["error"]
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidMedia("x", "why"), "invalid_media"),
        (MediaRefused("x", "why"), "media_refused"),
        (UnsupportedMedia("messages[0].content", "why"), "unsupported_media"),
    ],
)
def test_media_errors_map_to_400(error: Exception, code: str) -> None:
    api_error = to_api_error(error)
    assert (api_error.status, api_error.code) == (400, code)
    assert str(api_error.param).startswith("messages")


# --- loading


@pytest.fixture
def tiny_path() -> Path:
    return models.get_path("successor-attention")


@pytest.fixture
def media_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_path: Path
) -> Iterator[tuple[ServerState, Model]]:
    """A server state with a text model that claims to support images."""
    monkeypatch.setattr(Model, "_get_media_support", lambda *_: MediaSupport(kinds=frozenset({"image"})))
    policy = MediaPolicy(allowed_directory=tmp_path, allowed_hosts=("slow.example",), allow_private=True)
    (tmp_path / "cat.png").write_bytes(encode_image(gradient(600, 10)))
    registry = ModelRegistry(
        {"tiny": ServedModel(lambda: afterglow.load(tiny_path, host="process", context=256, media_policy=policy))}
    )
    with ServerState(registry, ServerSettings(max_media=3)) as state:
        yield state, registry.get_slot("tiny").load()


async def load(state: ServerState, model: Model, messages: list[Any]) -> list[Message]:
    with contextlib.ExitStack() as resources:
        return await load_media(state, model, parse_messages(messages), resources)


@pytest.mark.native
def test_media_are_decoded_before_the_prompt_is_planned(media_state: tuple[ServerState, Model]) -> None:
    state, model = media_state
    messages = build_messages(build_image_part("cat.png", detail="low"), build_image_part())
    (message,) = asyncio.run(load(state, model, messages))
    assert message.content == "What is this?"
    first, second = (attachment.source for attachment in message.attachments)
    assert isinstance(first, ImageData)
    assert isinstance(second, ImageData)
    assert (first.width, second.width) == (512, 64)


@pytest.mark.native
def test_the_number_of_media_in_a_request_is_limited(media_state: tuple[ServerState, Model]) -> None:
    state, model = media_state
    messages = build_messages(*[build_image_part()] * 4)
    with pytest.raises(APIError, match="max_media") as error:
        asyncio.run(load(state, model, messages))
    assert (error.value.status, error.value.code) == (400, "limit_exceeded")


@pytest.mark.native
def test_slow_media_hosts_block_neither_the_event_loop_nor_text_work(
    media_state: tuple[ServerState, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, model = media_state
    running, max_running, lock, release = 0, 0, threading.Lock(), threading.Event()

    def fetch_slowly(*_: Any) -> bytes:
        nonlocal running, max_running
        with lock:
            running += 1
            max_running = max(max_running, running)
        release.wait(120)
        with lock:
            running -= 1
        return encode_image(gradient())

    monkeypatch.setattr("afterglow.media.load.fetch_url", fetch_slowly)

    async def measure_text_work() -> float:
        messages = build_messages(build_image_part("http://slow.example/"))
        loads = [asyncio.ensure_future(load(state, model, messages)) for _ in range(20)]
        await asyncio.sleep(0.3)
        started = time.perf_counter()
        for _ in range(20):
            await state.run_text_work(lambda: model.apply_chat_template("hello"))
        seconds = time.perf_counter() - started
        release.set()
        await asyncio.gather(*loads)
        return seconds

    assert asyncio.run(measure_text_work()) < 5
    assert max_running == 4


def build_client(state: ServerState) -> TestClient:
    return TestClient(build_application(state)[0], "http://localhost")


@pytest.mark.native
@pytest.mark.parametrize(
    "route", ["/v1/chat/completions", "/apply-template", "/cache/explain", "/cache/pin", "/cache/unpin"]
)
def test_inline_media_count_against_the_budget_before_they_are_loaded(
    media_state: tuple[ServerState, Model], route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = media_state
    size = len(encode_image(gradient()))
    used_bytes: list[int] = []

    def load(*_: Any) -> Any:
        used_bytes.append(state.media_budget.used_bytes)
        raise InvalidMedia("x", "a test")

    monkeypatch.setattr(Model, "load_media", load)
    body = {"messages": build_messages(build_image_part(), build_image_part("http://slow.example/"))}
    with build_client(state) as client:
        assert client.post(route, json=body).json()["error"]["code"] == "invalid_media"
        assert size <= used_bytes[0] <= size + 4  # fetched files count once their size is known
        assert state.media_budget.used_bytes == 0
        state.media_budget.try_reserve(state.settings.max_decoded_media_bytes, 0)
        response = client.post(route, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "media_memory_full")
    assert len(used_bytes) == 1  # the second was refused before loading


# --- settings


def capture_media_policy(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> MediaPolicy:
    captured: list[MediaPolicy] = []
    monkeypatch.setattr(serve, "load", lambda *_, media_policy, **__: captured.append(media_policy))
    serve.build_model_registry({"tiny": models.get_path("attention")}, settings).get_slot("tiny").served.open_model()
    return captured[0]


def test_media_settings_reach_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_SERVER_MEDIA_HOSTS", "a.example,b.example")
    monkeypatch.setenv("AFTERGLOW_SERVER_MEDIA_ALLOW_PRIVATE", "true")
    settings = load_settings(
        server={
            "media_directory": tmp_path,
            "media_fetch_seconds": 3,
            "max_media_bytes": 1000,
            "max_image_pixels": 2000,
            "max_image_side": 50,
            "max_audio_seconds": 7,
            "max_decoded_media_bytes": 9,
        }
    )
    assert capture_media_policy(settings, monkeypatch) == MediaPolicy(
        allowed_hosts=("a.example", "b.example"),
        allow_private=True,
        allowed_directory=tmp_path,
        fetch_timeout_seconds=3,
        max_bytes=1000,
        max_pixels=2000,
        max_side_pixels=50,
        max_audio_seconds=7,
        max_decoded_bytes=9,
    )
    monkeypatch.delenv("AFTERGLOW_SERVER_MEDIA_HOSTS")
    monkeypatch.delenv("AFTERGLOW_SERVER_MEDIA_ALLOW_PRIVATE")
    assert capture_media_policy(load_settings(), monkeypatch) == MediaPolicy()


@pytest.mark.native
def test_media_flags_reach_the_models(tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Settings] = []

    def capture(models: Any, settings: Settings, *, opens_page: bool) -> None:
        captured.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "serve_models", capture)
    sources = ["--media-host", "a.example", "--media-host", "*.b.example", "--media-directory", str(tmp_path)]
    limits = ["--max-media-bytes", "1000", "--max-image-pixels", "2000"]
    CliRunner().invoke(app, ["serve", "--port", "0", *sources, *limits, str(tiny_path)])
    assert captured[0].server.media_policy == MediaPolicy(
        allowed_hosts=("a.example", "*.b.example"), allowed_directory=tmp_path, max_bytes=1000, max_pixels=2000
    )


# --- a vision model


@pytest.fixture(scope="module")
def vision_server() -> Iterator[ServerProcess]:
    """A server with a model that names the colour of an image by a letter."""
    projector = str(models.get_path("projector-colors"))
    process = ServerProcess(f"colors={models.get_path('colors')}", "--projector", projector, "--context", "512")
    yield process
    process.stop()


def build_png(letter: str) -> bytes:
    """Return a PNG file in the colour of a letter."""
    image = color_image(letter)
    return encode_image(Image.frombytes("RGB", (image.width, image.height), image.pixels))


def build_colour_part(letter: str) -> dict[str, Any]:
    return build_image_part(encode_data_uri(build_png(letter)))


@pytest.mark.native
def test_c7_an_image_is_encoded_once_and_cached_in_the_next_turn(vision_server: ServerProcess) -> None:
    client = vision_server.client()
    messages = build_messages(build_colour_part("R"))
    first = client.chat.completions.create(model="colors", messages=messages)
    assert first.choices[0].message.content == "R"
    details = first.usage.prompt_tokens_details.model_dump()
    assert (details["image_tokens"], details["encoded_media"], details["audio_tokens"]) == (16, 1, 0)
    messages += [{"role": "assistant", "content": "R"}, {"role": "user", "content": "Are you sure?"}]
    second = client.chat.completions.create(model="colors", messages=messages)
    assert second.choices[0].message.content == "R"
    details = second.usage.prompt_tokens_details.model_dump()
    assert (details["cached_media_tokens"], details["encoded_media"]) == (16, 0)
    assert details["cached_tokens"] >= first.usage.prompt_tokens - 1


@pytest.mark.native
def test_c6_the_model_names_the_colour_of_each_image(vision_server: ServerProcess) -> None:
    for letter in "GBYG":
        messages = build_messages(build_colour_part(letter))
        assert get_text(vision_server.chat(model="colors", messages=messages)) == letter


@pytest.mark.native
def test_responses_accept_images_and_count_their_tokens(vision_server: ServerProcess) -> None:
    part = {"type": "input_image", "image_url": build_colour_part("B")["image_url"]["url"], "detail": "auto"}
    text = {"type": "input_text", "text": "What is this?"}
    response = vision_server.client().responses.create(
        model="colors",
        input=[{"role": "user", "content": [part, text]}],  # type: ignore[list-item]
    )
    assert response.output_text == "B"
    assert response.usage.input_tokens_details.model_dump()["image_tokens"] == 16


@pytest.mark.native
def test_cache_model_and_metrics_routes_show_images(vision_server: ServerProcess) -> None:
    vision_server.chat(model="colors", messages=build_messages(build_colour_part("K")))
    assert "[image]" in str(vision_server.http.get("/cache").json())
    messages = build_messages(build_colour_part("K"), build_colour_part("R"))
    explanation = vision_server.post("/cache/explain", {"model": "colors", "messages": messages}).json()
    assert explanation["reused_tokens"] > 16
    (card,) = vision_server.http.get("/v1/models").json()["data"]
    assert "image" in card["capabilities"]
    assert 'counter="encoded_media"' in vision_server.http.get("/metrics").text


def read_memory(pid: int, field: str) -> int:
    """Return a field of /proc/PID/status in bytes, for example VmRSS or VmHWM (the peak)."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", text)[1])  # type: ignore[index]


@pytest.mark.native
def test_images_are_decoded_in_the_engine_process_and_released(vision_server: ServerProcess) -> None:
    """Six small files decode to 288 MB."""
    (engine,) = vision_server.list_engines()
    parts = [build_image_part(encode_data_uri(encode_image(Image.new("RGB", (4000, 4000), "red")))) for _ in range(6)]
    vision_server.chat(model="colors", messages=build_messages(build_colour_part("R")))
    server_pid, sent = vision_server.process.pid, sum(len(part["image_url"]["url"]) for part in parts)
    Path(f"/proc/{server_pid}/clear_refs").write_text("5")  # resets VmHWM
    before, engine_before = read_memory(server_pid, "VmRSS"), read_memory(engine.pid, "VmRSS")
    with ThreadPoolExecutor(6) as pool:
        answers = pool.map(lambda part: vision_server.chat(model="colors", messages=build_messages(part)), parts)
        assert {get_text(answer) for answer in answers} == {"R"}
    assert read_memory(server_pid, "VmHWM") - before < 20 * sent + 20_000_000
    assert read_memory(engine.pid, "VmRSS") - engine_before < 100_000_000


def test_the_media_files_of_all_requests_share_one_budget() -> None:
    budget = MediaBudget()
    first, second = MediaReservation(budget, max_bytes=100), MediaReservation(budget, max_bytes=100)
    first.resize(60)
    second.resize(40)
    with pytest.raises(APIError, match="`max_decoded_media_bytes`") as error:
        second.resize(41)
    assert (error.value.status, error.value.code) == (429, "media_memory_full")
    first.release()
    first.release()
    assert budget.used_bytes == 0  # a reservation that could not grow has nothing left
    second.resize(500)  # one request is always admitted: its size has limits of its own


# --- sources of images


class ImageHost(http.server.BaseHTTPRequestHandler):
    """Host with an image, a slow image at /slow and a redirect to a private address at /elsewhere."""

    def do_GET(self) -> None:
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest/meta-data/")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        data, is_slow = build_png("G"), self.path == "/slow"
        step = 1 if is_slow else len(data)
        with contextlib.suppress(OSError):
            for start in range(0, len(data), step):
                self.wfile.write(data[start : start + step])
                time.sleep(0.1 if is_slow else 0)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def image_host() -> Iterator[str]:
    host = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ImageHost)
    host.daemon_threads = True
    threading.Thread(target=host.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{host.server_address[1]}"
    host.shutdown()
    host.server_close()


@pytest.fixture(scope="module")
def open_server(image_host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A vision server that may read one directory and fetch from one host, and that directory."""
    directory = tmp_path_factory.mktemp("images")
    (directory / "blue.png").write_bytes(build_png("B"))
    projector = str(models.get_path("projector-colors"))
    process = ServerProcess(
        *(f"colors={models.get_path('colors')}", "--projector", projector, "--context", "512"),
        *("--media-directory", str(directory), "--media-host", image_host, "--max-image-pixels", "2000"),
        AFTERGLOW_SERVER_MEDIA_ALLOW_PRIVATE="true",
        AFTERGLOW_SERVER_MEDIA_FETCH_SECONDS="1",
    )
    yield process, directory
    process.stop()


def get_colour_or_error_code(server: ServerProcess, *urls: str) -> str:
    completion = server.chat(model="colors", messages=build_messages(*map(build_image_part, urls)))
    assert completion["status"] == (400 if "error" in completion else 200)
    return str(completion["error"]["code"]) if "error" in completion else get_text(completion)


@pytest.mark.native
def test_images_are_loaded_from_the_allowed_directory_and_host(
    open_server: tuple[ServerProcess, Path], image_host: str
) -> None:
    server, directory = open_server
    assert get_colour_or_error_code(server, "blue.png") == "B"
    assert get_colour_or_error_code(server, f"file://{directory}/blue.png") == "B"
    assert get_colour_or_error_code(server, f"http://{image_host}/green.png") == "G"


@pytest.mark.native
def test_c18_no_request_reaches_the_file_system_or_the_network_unless_allowed(
    vision_server: ServerProcess, open_server: tuple[ServerProcess, Path], image_host: str
) -> None:
    server, directory = open_server
    urls = ("blue.png", f"file://{directory}/blue.png", f"http://{image_host}/green.png")
    assert [get_colour_or_error_code(vision_server, url) for url in urls] == ["media_refused"] * 3
    outside = ("/etc/passwd", "../blue.png", "file:///etc/passwd", "http://127.0.0.1:1/", "http://169.254.169.254/")
    codes = {get_colour_or_error_code(server, url) for url in (*outside, f"http://{image_host}/elsewhere")}
    assert codes == {"media_refused"}


@pytest.mark.native
def test_invalid_images_get_400_and_block_nothing(open_server: tuple[ServerProcess, Path], image_host: str) -> None:
    server, directory = open_server
    (directory / "moves.gif").write_bytes(animated_image("GIF"))
    (directory / "large.png").write_bytes(encode_image(gradient(64, 48)))
    bomb = encode_data_uri(png(60_000, 60_000, chunk(b"IDAT", compressed_zeros(8 << 20))))
    wrong_port = f"http://{image_host[:-1]}/x"
    for url in ("moves.gif", "large.png", "missing.png", bomb, "data:image/png;base64,!", wrong_port):
        started = time.monotonic()
        assert get_colour_or_error_code(server, url) in ("invalid_media", "media_refused")
        assert time.monotonic() - started < 60
    started = time.monotonic()
    assert get_colour_or_error_code(server, f"http://{image_host}/slow") == "invalid_media"
    assert time.monotonic() - started < 60
    assert get_colour_or_error_code(server, "blue.png") == "B"
