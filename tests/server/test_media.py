"""Pictures and sounds over HTTP: what is allowed comes in, what is not is a clear 400, and nobody else waits."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image
from typer.testing import CliRunner

from afterglow.api.served_model import ServedModel, ServedSettings
from afterglow.chat.multimodal import MediaSupport
from afterglow.cli import serve
from afterglow.cli.main import app
from afterglow.cli.serve import build_served_settings
from afterglow.cli.settings import load_settings
from afterglow.errors import InvalidMedia, MediaRefused, UnsupportedMedia
from afterglow.media.load import MediaPolicy
from afterglow.server.errors import APIError, to_api_error
from afterglow.server.media import count_media, load_media
from afterglow.server.models import ModelRegistry
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState
from afterglow.testing import models
from support.media_files import chunk, gradient, moving, png, saved, zeros
from support.media_prompts import coloured
from support.server_process import ServerProcess

URI = "data:image/png;base64," + base64.b64encode(saved(gradient())).decode()


def picture(url: str = URI, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def question(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts]}]


def test_a_picture_for_a_model_that_cannot_see_is_refused_by_its_place(server: ServerProcess) -> None:
    for part in (picture(), picture("http://169.254.169.254/"), {
        "type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"},
    }):  # fmt: skip
        error = server.chat(messages=question(part))["error"]
        assert (error["code"], error["param"]) == ("unsupported_media", "messages[0].content")
        assert "only text" in error["message"]
    for route in ("/apply-template", "/cache/explain"):
        answer = server.post(route, {"model": "tiny", "messages": question(picture())})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_media")


def test_the_openai_client_gets_a_bad_request(server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="only text"):
        server.client().chat.completions.create(model="tiny", messages=question(picture()))  # type: ignore[call-overload]
    part = {"type": "input_image", "image_url": URI, "detail": "auto"}
    with pytest.raises(openai.BadRequestError, match="only text"):
        server.client().responses.create(model="tiny", input=[{"role": "user", "content": [part]}])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": URI}, "image_url"),
        ({"type": "image_url", "image_url": {"url": URI, "detail": "medium"}}, "image_url.detail"),
        ({"type": "image_url", "image_url": {"url": URI, "size": 3}}, "image_url.size"),
        ({"type": "input_audio", "input_audio": {"data": "x", "format": "ogg"}}, "input_audio.format"),
        ({"type": "image", "source": {"type": "url", "url": URI}}, ""),
        ({"type": "file", "file": {"file_id": "x"}}, ""),
        ({**picture(), "id": "xyz"}, "id"),
    ],
)
def test_a_part_that_is_not_openai_s_is_refused_by_its_place(
    server: ServerProcess, part: dict[str, Any], param: str
) -> None:
    error = server.chat(messages=question(part))["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith("messages[0].content[1]")
    assert error["param"].endswith(param)


def test_only_users_have_pictures(server: ServerProcess) -> None:
    for role in ("system", "assistant"):
        assert "error" in server.chat(messages=[{"role": role, "content": [picture()]}])
        part = {"type": "input_image", "image_url": URI}
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
def test_every_error_about_media_is_a_400(error: Exception, code: str) -> None:
    refusal = to_api_error(error)
    assert (refusal.status, refusal.code) == (400, code)
    assert str(refusal.param).startswith("messages")


# --- how they are brought in, with a model that could see


@pytest.fixture
def seeing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_path: Path
) -> Iterator[tuple[ServerState, ServedModel]]:
    monkeypatch.setattr(ServedModel, "_get_media_support", lambda *_: MediaSupport(kinds=frozenset({"image"})))
    policy = MediaPolicy(allowed_directory=tmp_path, allowed_hosts=("slow.example",), allow_private=True)
    (tmp_path / "cat.png").write_bytes(saved(gradient(600, 10)))
    roster = ModelRegistry({"tiny": tiny_path}, ServedSettings(context=256, media_policy=policy))
    with ServerState(roster, ServerSettings(max_media=3)) as service:
        yield service, roster.get_slot("tiny").load()


@pytest.fixture
def tiny_path() -> Path:
    return models.get_path("successor-attention")


def test_what_messages_name_is_inside_them_before_they_are_planned(seeing: tuple[ServerState, ServedModel]) -> None:
    service, model = seeing
    said = asyncio.run(load_media(service, model, question(picture("cat.png", detail="low"), picture())))
    first, second, third = said[0]["content"]
    assert first == {"type": "text", "text": "What is this?"}
    assert (second["type"], second["image"].width) == ("image", 512)
    assert (third["type"], third["image"].width) == ("image", 64)
    text = [{"role": "user", "content": "x"}]
    assert asyncio.run(load_media(service, model, text)) is text


def test_a_request_has_only_so_many(seeing: tuple[ServerState, ServedModel]) -> None:
    service, model = seeing
    assert count_media(question(*[picture()] * 4)) == 4
    with pytest.raises(APIError, match="max_media") as caught:
        asyncio.run(load_media(service, model, question(*[picture()] * 4)))
    assert (caught.value.status, caught.value.code) == (400, "limit_exceeded")


def test_slow_hosts_hold_up_neither_the_loop_nor_texts(
    seeing: tuple[ServerState, ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, model = seeing
    inside, most, lock, go = 0, 0, threading.Lock(), threading.Event()

    def slow(*_: Any) -> bytes:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        go.wait(20)
        with lock:
            inside -= 1
        return saved(gradient())

    monkeypatch.setattr("afterglow.media.load.fetch", slow)

    async def many() -> float:
        asked = [
            asyncio.ensure_future(load_media(service, model, question(picture("http://slow.example/"))))
            for _ in range(20)
        ]
        await asyncio.sleep(0.3)
        began = time.perf_counter()
        for _ in range(20):
            await service.run_text_work(lambda: model.apply_chat_template("hello"))
        took = time.perf_counter() - began
        go.set()
        await asyncio.gather(*asked)
        return took

    assert asyncio.run(many()) < 5
    assert most == 4


# --- settings


def test_the_settings_about_media_reach_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_SERVER_MEDIA_HOSTS", "a.example,b.example")
    monkeypatch.setenv("AFTERGLOW_SERVER_MEDIA_PRIVATE", "true")
    chosen = load_settings(
        server={
            "media_directory": tmp_path,
            "media_seconds": 3,
            "max_media_bytes": 1000,
            "max_pixels": 2000,
            "max_side": 50,
            "max_sound_seconds": 7,
            "max_decoded_bytes": 9,
        }
    )
    assert build_served_settings(chosen).media_policy == MediaPolicy(
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
    monkeypatch.delenv("AFTERGLOW_SERVER_MEDIA_PRIVATE")
    assert build_served_settings(load_settings()).media_policy == MediaPolicy()


def test_the_flags_of_serve_reach_the_models(tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServedSettings] = []

    def stop(paths: Any, chosen: ServedSettings, *others: Any) -> None:
        seen.append(chosen)
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "Roster", stop)
    flags = ["--media-host", "a.example", "--media-host", "*.b.example", "--media-directory", str(tmp_path)]
    limits = ["--max-media-bytes", "1000", "--max-pixels", "2000"]
    CliRunner().invoke(app, ["serve", "--port", "0", *flags, *limits, str(tiny_path)])
    assert seen[0].media_policy == MediaPolicy(
        allowed_hosts=("a.example", "*.b.example"), allowed_directory=tmp_path, max_bytes=1000, max_pixels=2000
    )


# --- a model that sees


@pytest.fixture(scope="module")
def sighted() -> Iterator[ServerProcess]:
    """A server with a model that names the colour of a picture by a letter."""
    projector = str(models.get_path("projector-colours"))
    running = ServerProcess(
        f"colours={models.get_path('colours')}", "--projector", projector, "--context", "512", "--threads", "1"
    )
    yield running
    running.end()


def coloured_part(letter: str) -> dict[str, Any]:
    shown = coloured(letter)
    image = Image.frombytes("RGB", (shown.width, shown.height), shown.pixels)
    return picture("data:image/png;base64," + base64.b64encode(saved(image)).decode())


def test_c7_the_openai_client_sends_a_picture_and_asks_again(sighted: ServerProcess) -> None:
    client = sighted.client()
    talk: list[Any] = question(coloured_part("R"))
    first = client.chat.completions.create(model="colours", messages=talk)
    assert first.choices[0].message.content == "R"
    details = first.usage.prompt_tokens_details.model_dump()
    assert (details["image_tokens"], details["encoded_media"], details["audio_tokens"]) == (16, 1, 0)
    talk += [{"role": "assistant", "content": "R"}, {"role": "user", "content": "Are you sure?"}]
    second = client.chat.completions.create(model="colours", messages=talk)
    assert second.choices[0].message.content == "R"
    details = second.usage.prompt_tokens_details.model_dump()
    assert (details["cached_media_tokens"], details["encoded_media"]) == (16, 0)
    assert details["cached_tokens"] >= first.usage.prompt_tokens - 1


def test_c6_the_server_names_the_colour_of_each_picture(sighted: ServerProcess) -> None:
    for letter in "GBYG":
        assert sighted.chat(model="colours", messages=question(coloured_part(letter)))["choices"][0]["message"][
            "content"
        ] == letter  # fmt: skip


def test_responses_take_pictures_and_count_them(sighted: ServerProcess) -> None:
    part = {"type": "input_image", "image_url": coloured_part("B")["image_url"]["url"], "detail": "auto"}
    text = {"type": "input_text", "text": "What is this?"}
    answer = sighted.client().responses.create(
        model="colours",
        input=[{"role": "user", "content": [part, text]}],  # type: ignore[list-item]
    )
    assert answer.output_text == "B"
    assert answer.usage.input_tokens_details.model_dump()["image_tokens"] == 16


def test_what_a_server_shows_of_its_memory_has_pictures_in_it(sighted: ServerProcess) -> None:
    sighted.chat(model="colours", messages=question(coloured_part("K")))
    held = sighted.http.get("/cache").json()
    assert "[picture]" in str(held)
    explained = sighted.post(
        "/cache/explain", {"model": "colours", "messages": question(coloured_part("K"), coloured_part("R"))}
    ).json()
    assert explained["reused_tokens"] > 16
    (card,) = sighted.http.get("/v1/models").json()["data"]
    assert "image" in card["capabilities"]
    assert 'counter="encoded"' in sighted.http.get("/metrics").text


# --- where the pictures of a model that sees may come from


class Gallery(http.server.BaseHTTPRequestHandler):
    """A host with a picture, one that takes its time, and one that leads elsewhere."""

    def do_GET(self) -> None:
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest/meta-data/")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        data = png_of("G")
        with contextlib.suppress(OSError):
            for start in range(0, len(data), 1 if self.path == "/slow" else len(data)):
                self.wfile.write(data[start : start + (1 if self.path == "/slow" else len(data))])
                time.sleep(0.1 if self.path == "/slow" else 0)

    def log_message(self, *_: object) -> None:
        pass


def png_of(letter: str) -> bytes:
    shown = coloured(letter)
    return saved(Image.frombytes("RGB", (shown.width, shown.height), shown.pixels))


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gallery)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def opened(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A server that may open files in a folder, and ask one host."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "blue.png").write_bytes(png_of("B"))
    running = ServerProcess(
        *(
            f"colours={models.get_path('colours')}",
            "--projector",
            str(models.get_path("projector-colours")),
            "--context",
            "512",
        ),
        *("--media-directory", str(folder), "--media-host", host, "--max-pixels", "2000"),
        AFTERGLOW_SERVER_MEDIA_PRIVATE="true",
        AFTERGLOW_SERVER_MEDIA_SECONDS="1",
    )
    yield running, folder
    running.end()


def answer_to(server: ServerProcess, *urls: str) -> Any:
    """The letter of a colour, or the code of an error."""
    answer = server.chat(model="colours", messages=question(*map(picture, urls)))
    assert answer["status"] == (400 if "error" in answer else 200)
    return answer["error"]["code"] if "error" in answer else answer["choices"][0]["message"]["content"]


def test_pictures_come_from_the_allowed_folder_and_the_allowed_host(
    opened: tuple[ServerProcess, Path], host: str
) -> None:
    server, folder = opened
    assert answer_to(server, "blue.png") == "B"
    assert answer_to(server, f"file://{folder}/blue.png") == "B"
    assert answer_to(server, f"http://{host}/green.png") == "G"


def test_c18_no_request_reaches_the_file_system_or_the_network_unless_allowed(
    sighted: ServerProcess, opened: tuple[ServerProcess, Path], host: str
) -> None:
    server, folder = opened
    urls = ("blue.png", f"file://{folder}/blue.png", f"http://{host}/green.png")
    assert [answer_to(sighted, url) for url in urls] == ["media_refused"] * 3
    outside = ("/etc/passwd", "../blue.png", "file:///etc/passwd", "http://127.0.0.1:1/", "http://169.254.169.254/")
    assert {answer_to(server, url) for url in (*outside, f"http://{host}/elsewhere")} == {"media_refused"}


def test_bad_pictures_are_a_400_in_under_a_second(opened: tuple[ServerProcess, Path], host: str) -> None:
    server, folder = opened
    (folder / "moves.gif").write_bytes(moving("GIF"))
    (folder / "large.png").write_bytes(saved(gradient(64, 48)))
    bomb = "data:image/png;base64," + base64.b64encode(png(60_000, 60_000, chunk(b"IDAT", zeros(8 << 20)))).decode()
    for url in ("moves.gif", "large.png", "missing.png", bomb, "data:image/png;base64,!", f"http://{host[:-1]}/x"):
        began = time.monotonic()
        assert answer_to(server, url) in ("invalid_media", "media_refused")
        assert time.monotonic() - began < 1
    began = time.monotonic()
    assert answer_to(server, f"http://{host}/slow") == "invalid_media"
    assert time.monotonic() - began < 2
    assert answer_to(server, "blue.png") == "B"
