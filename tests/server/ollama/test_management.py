"""Models of the Ollama API: installed ones on demand, created ones, downloads, unloading, and the second port."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hashlib
import json
import logging
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from PIL import Image
from starlette.testclient import TestClient

from afterglow import registry
from afterglow.errors import Cancelled, DownloadFailed, InvalidArgument, ModelNotFound
from afterglow.server.app import build_application
from afterglow.server.models import ModelRegistry, ServedModel
from afterglow.server.ollama.created_models import CreatedModel, CreatedModelStore
from afterglow.server.ollama.library import ModelLibrary
from afterglow.server.ollama.management import pull_model
from afterglow.server.serve import bind_ollama
from afterglow.server.settings import ServerSettings
from afterglow.server.state import MEDIA_THREADS, ServerState
from afterglow.testing import models
from support.engine_factories import Raise
from support.media_files import encode_data_uri, encode_image
from support.media_prompts import color_image
from support.server_process import CYCLE, ServerProcess, run_server, wait_until

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY = {"num_predict": 8, "temperature": 0}
PARAMETERS = {"num_predict": 4, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/models/load": {},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/embeddings": {"input": "hello"},
    "/tokenize": {"content": "hello"},
}
NAMED_BODIES: dict[str, dict[str, Any]] = {  # of other routes whose responses name the model
    "/completion": {"prompt": "abc", "n_predict": 2},
    "/rerank": {"query": "hello", "documents": ["a", "b"]},
}


# --- a server that serves installed models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine with a file in the models directory, a model of Ollama, and a model with a projector."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "models").mkdir()
    shutil.copy(models.get_path("successor-attention"), folder / "models" / "mine.gguf")
    (folder / "vision").mkdir()
    shutil.copy(models.get_path("colors"), folder / "vision" / "colors.gguf")
    shutil.copy(models.get_path("projector-colors"), folder / "vision" / "mmproj.gguf")
    write_ollama_model(folder / "ollama", "mini", "1b")
    write_ollama_model(folder / "ollama", "llama3.2", "latest", "successor-attention")
    return folder


def write_ollama_model(root: Path, name: str, tag: str, model: str = "successor-window", **others: Any) -> None:
    """Write a model, its parameters and its other layers as Ollama stores them."""
    layers = []
    contents = {"model": models.get_path(model).read_bytes(), "params": PARAMETERS, **others}
    for kind, data in contents.items():
        text = data if isinstance(data, str | bytes) else json.dumps(data)
        content = text if isinstance(text, bytes) else text.encode()
        digest = hashlib.sha256(content).hexdigest()
        (root / "blobs").mkdir(parents=True, exist_ok=True)
        (root / "blobs" / f"sha256-{digest}").write_bytes(content)
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
    manifest = root / "manifests" / "registry.example" / "library" / name / tag
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": layers}))


def build_environment(folder: Path) -> dict[str, str]:
    return {
        "AFTERGLOW_MODELS": str(folder / "models"),
        "AFTERGLOW_DATA": str(folder / "data"),
        "OLLAMA_MODELS": str(folder / "ollama"),
        "HOME": str(folder / "home"),
        "XDG_CACHE_HOME": str(folder / "home"),
    }


@pytest.fixture(scope="module")
def machine(caches_of_our_own: None, folder: Path) -> Iterator[ServerProcess]:
    """A server for all installed models, with its second port."""
    arguments = [f"tiny={models.get_path('successor-attention')}", str(folder / "vision" / "colors.gguf")]
    options = ["--ollama", "--ollama-port", "0", "--allow-reload", "--context", "256", "--sequences", "2"]
    with run_server(*arguments, *options, **build_environment(folder)) as process:
        yield process


@pytest.fixture
def client(machine: ServerProcess) -> Iterator[ollama.Client]:
    client = ollama.Client(host=find_second_url(machine), timeout=240)
    with client._client:
        yield client


def find_second_url(machine: ServerProcess) -> str:
    return machine.wait_for_log(r"Ollama API also at (http://\S+)")[1]


def list_running(client: ollama.Client) -> dict[str, Any]:
    return {str(model.model): model for model in client.ps().models}


@pytest.mark.native
def test_only_the_second_port_says_that_ollama_is_running(machine: ServerProcess) -> None:
    second = httpx.get(find_second_url(machine))
    assert (second.status_code, second.text) == (200, "Ollama is running")
    assert httpx.head(find_second_url(machine)).status_code == 200
    assert "Ollama is running" not in machine.http.get("/").text
    assert httpx.get(f"{find_second_url(machine)}/v1/models").json() == machine.http.get("/v1/models").json()


@pytest.mark.native
def test_the_second_port_accepts_the_pages_and_names_that_ollama_does(machine: ServerProcess) -> None:
    second = find_second_url(machine)
    origins = ("http://localhost:3000", "https://127.0.0.1", "app://obsidian.md", "vscode-webview://abc", "file://")
    for origin in origins:
        headers = {"Origin": origin}
        response = httpx.get(f"{second}/api/tags", headers=headers)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, origin)
        preflight = {**headers, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
        assert httpx.options(f"{second}/api/chat", headers=preflight).headers["access-control-allow-origin"] == origin
        assert machine.http.get("/api/tags", headers=headers).status_code == 403
    hosts = (
        "host.docker.internal:11434",
        "192.168.1.10",
        "0.0.0.0:11434",
        "box.local",
        "a.localhost",
        socket.gethostname(),
    )
    for host in hosts:
        assert httpx.get(f"{second}/api/version", headers={"Host": host}).status_code == 200
        assert machine.http.get("/api/version", headers={"Host": host}).status_code == 403
    for headers in (
        {"Host": "page.example"},
        {"Origin": "http://page.example"},
        {"Origin": "http://localhost.example"},
    ):
        assert httpx.get(f"{second}/api/tags", headers=headers).status_code == 403


@pytest.mark.native
def test_the_version_is_that_of_the_api(client: ollama.Client, machine: ServerProcess) -> None:
    version = machine.http.get("/api/version").json()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version["version"])
    assert machine.http.head("/api/version").status_code == machine.http.head("/api/tags").status_code == 200


@pytest.mark.native
def test_installed_models_are_listed_and_loaded_on_demand(client: ollama.Client) -> None:
    names = {model.model for model in client.list().models}
    assert {"tiny:latest", "colors:latest", "mine.gguf:latest", "mini:1b"} <= names
    assert "mine.gguf:latest" not in list_running(client)
    assert client.chat("mine.gguf", MESSAGES, options=GREEDY).message.content == CYCLE[:8]
    running = list_running(client)["mine.gguf:latest"]
    assert running.context_length == 256
    assert running.size
    assert running.expires_at
    assert running.expires_at.year < 2100  # it is unloaded if nobody uses it
    assert list_running(client)["tiny:latest"].expires_at.year > 2100


@pytest.mark.native
def test_a_model_of_ollama_has_its_name_and_its_parameters(client: ollama.Client) -> None:
    assert "num_predict" in (client.show("mini:1b").parameters or "")
    assert client.generate("mini:1b", "hello", options={"temperature": 0, "num_predict": 3}).response == CYCLE[:3]
    with pytest.raises(ollama.ResponseError, match="no model called 'mini'") as raised:
        client.generate("mini", "hello")
    assert raised.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="belongs to ollama"):
        client.delete("mini:1b")


@pytest.mark.native
def test_every_api_serves_installed_models_by_name(folder: Path, caches_of_our_own: None) -> None:
    options = ["--ollama", "--ollama-port", "0", "--context", "256", "--sequences", "2"]
    with run_server(f"tiny={models.get_path('successor-attention')}", *options, **build_environment(folder)) as server:
        listed = [model["id"] for model in server.http.get("/v1/models").json()["data"]]
        assert {"tiny", "mini:1b", "llama3.2:latest", "mine.gguf"} <= set(listed)
        anthropic = server.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
        assert [model["id"] for model in anthropic] == listed
        for path, body in BODIES.items():
            server.post("/models/unload", {"model": "llama3.2"})
            for name in ("llama3.2", "llama3.2:latest"):
                response = server.post(path, {**body, "model": name})
                assert (response.status_code, "x-afterglow-ignored" in response.headers) == (200, False), response.text
                assert response.json().get("model", "llama3.2:latest") == "llama3.2:latest"
        assert server.http.get("/v1/models/mini:1b").json()["state"] == "not loaded"
        assert server.http.get("/props", params={"model": "llama3.2"}).status_code == 200
        assert server.post("/models/load", {"model": "mini:1b"}).json()["id"] == "mini:1b"
        assert [model["id"] for model in server.http.get("/v1/models").json()["data"]].count("mini:1b") == 1
        # What clients load on demand does not change what a request without a known model means.
        assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": 1}).json()["model"] == "tiny"
        other = server.post("/v1/completions", {"model": "gpt", "prompt": "abc", "max_tokens": 1})
        assert (other.json()["model"], other.headers["x-afterglow-ignored"]) == ("tiny", "model")
        assert server.http.get("/v1/models/gpt").status_code == 404


@pytest.mark.native
def test_without_a_model_only_what_clients_name_is_loaded(folder: Path, caches_of_our_own: None) -> None:
    with run_server("--ollama", "--ollama-port", "0", "--context", "256", **build_environment(folder)) as server:
        assert server.http.get("/api/ps").json()["models"] == []
        assert {"mini:1b", "mine.gguf"} <= {model["id"] for model in server.http.get("/v1/models").json()["data"]}
        unnamed = server.post("/v1/completions", {"prompt": "abc"})
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
        assert server.post("/v1/completions", {"model": "nothing", "prompt": "abc"}).status_code == 404
        named = server.post("/v1/completions", {"model": "mini:1b", "prompt": "abc"}).json()
        assert (named["model"], named["choices"][0]["text"]) == ("mini:1b", CYCLE[3:7])
        assert [model["name"] for model in server.http.get("/api/ps").json()["models"]] == ["mini:1b"]


@pytest.mark.native
def test_bodies_of_clients_in_go_name_their_model_only(machine: ServerProcess) -> None:
    """Go's client sends the zero value of each field that is not set."""
    shown = machine.post(
        "/api/show", {"model": "mini:1b", "system": "", "template": "", "verbose": False, "options": None, "name": ""}
    )
    assert shown.status_code == 200, shown.text
    pulled = machine.post("/api/pull", {"model": "mini:1b", "insecure": False, "username": "", "password": ""})
    assert json.loads(pulled.text.splitlines()[-1]) == {"status": "success"}


@pytest.mark.native
def test_case_and_the_namespace_of_official_models_do_not_matter(client: ollama.Client, folder: Path) -> None:
    for name in ("MINI:1B", "library/mini:1b", "registry.example/library/mini:1b"):
        assert client.generate(name, "hello", options={"temperature": 0}).response == CYCLE[:4]
    client.create("Casual", from_="tiny", parameters={"num_predict": 3})
    assert client.chat("cASUAL:latest", MESSAGES).message.content == CYCLE[:3]
    client.delete("casual")
    assert "Casual:latest" not in {model.model for model in client.list().models}


@pytest.mark.native
def test_each_name_of_a_file_in_ollamas_store_is_a_model(tmp_path: Path, caches_of_our_own: None) -> None:
    shared = {"params": {"num_predict": 2, "temperature": 0}, "license": "Do what you like."}
    for name in ("twin", "triplet", "other"):
        write_ollama_model(tmp_path / "ollama", name, "1", "successor-attention", **shared)
    names = {"twin:1", "triplet:1", "other:1"}
    arguments = [f"tiny={models.get_path('attention')}", "--ollama", "--ollama-port", "0"]
    with run_server(*arguments, **build_environment(tmp_path)) as server:
        for name in sorted(names):
            response = server.post("/api/generate", {"model": name, "prompt": "hello", "stream": False}).json()
            assert (response["model"], response["response"]) == (name, CYCLE[:2])
            listed = {model["name"] for model in server.http.get("/api/tags").json()["models"]}
            assert names <= listed
            assert names <= {model["id"] for model in server.http.get("/v1/models").json()["data"]}
        assert server.post("/api/show", {"model": "twin:1"}).json()["license"] == "Do what you like."


@pytest.mark.native
def test_everything_that_ollama_stores_with_a_model_applies_in_every_api(
    tmp_path: Path, caches_of_our_own: None
) -> None:
    first = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "arr"}]
    parameters = {"temperature": 0, "num_predict": 6, "num_ctx": 512, "stop": ["e"]}
    layers: dict[str, Any] = {"params": parameters, "system": "Talk like a pirate.", "messages": first}
    write_ollama_model(tmp_path / "ollama", "pirate", "1", "successor-attention", **layers)
    adapter = models.get_path("adapter-attention-a").read_bytes()
    write_ollama_model(tmp_path / "ollama", "plain", "1", "attention")
    write_ollama_model(tmp_path / "ollama", "styled", "1", "attention", adapter=adapter)
    write_ollama_model(tmp_path / "ollama", "broken", "1", "attention", adapter="no adapter")
    write_ollama_model(tmp_path / "ollama", "lost", "1", "successor-window", system="lost")
    (tmp_path / "ollama" / "blobs" / f"sha256-{hashlib.sha256(b'lost').hexdigest()}").unlink()
    arguments = [f"tiny={models.get_path('successor-attention')}", "--ollama", "--ollama-port", "0"]
    with run_server(*arguments, **build_environment(tmp_path)) as server:

        def post(path: str, **body: Any) -> dict[str, Any]:
            answered: dict[str, Any] = server.post(path, {"stream": False, **body}).json()
            return answered

        # system, messages, stop, num_ctx
        prompt = server.post("/apply-template", {"model": "pirate:1", "messages": MESSAGES}).json()["prompt"]
        assert re.search(r"pirate.*who\?.*arr.*hello", prompt, re.DOTALL)
        chat = post("/api/chat", model="pirate:1", messages=MESSAGES)
        assert (chat["message"]["content"], chat["done_reason"]) == ("abcd", "stop")
        generated = post("/api/generate", model="pirate:1", prompt="hello")
        completed = post("/v1/chat/completions", model="pirate:1", messages=MESSAGES)
        assert generated["response"] == completed["choices"][0]["message"]["content"] == "abcd"
        assert chat["prompt_eval_count"] == generated["prompt_eval_count"] == completed["usage"]["prompt_tokens"]
        (running,) = [model for model in server.http.get("/api/ps").json()["models"] if model["name"] == "pirate:1"]
        assert running["context_length"] == 512
        # What a request sets applies instead.
        system = [{"role": "system", "content": "no"}]
        prompt = server.post("/apply-template", {"model": "pirate:1", "messages": [*system, *MESSAGES]}).json()[
            "prompt"
        ]
        assert "pirate" not in prompt
        assert prompt.index("no") < prompt.index("who?")
        told = post("/api/chat", model="pirate:1", messages=[*system, *MESSAGES], options={"stop": "zz"})
        assert (told["message"]["content"], told["done_reason"]) == (CYCLE[:6], "length")  # num_predict
        assert told["prompt_eval_count"] < chat["prompt_eval_count"]
        long = post("/api/chat", model="pirate:1", messages=MESSAGES, options={"stop": "m", "num_predict": -1})
        assert long["message"]["content"] == CYCLE[:12]
        completion = post("/v1/completions", model="pirate:1", prompt="abc", stop="zz", max_tokens=8)
        assert completion["choices"][0]["text"] == CYCLE[3:11]
        # The description has all of it, and a model that is made from this one has it, too.
        shown = server.post("/api/show", {"model": "pirate:1"}).json()
        assert (shown["system"], shown["messages"]) == ("Talk like a pirate.", first)
        assert {"num_predict", "num_ctx", "stop"} <= set(shown["parameters"].split())
        post("/api/create", model="polite", **{"from": "pirate:1"}, parameters={"num_predict": 2})
        polite = post("/api/chat", model="polite", messages=MESSAGES)
        assert (polite["message"]["content"], polite["prompt_eval_count"]) == ("ab", chat["prompt_eval_count"])
        # adapter
        raw = {"prompt": "the thing", "raw": True, "options": {"temperature": 0, "num_predict": 16}}
        plain, styled = (post("/api/generate", model=name, **raw)["response"] for name in ("plain:1", "styled:1"))
        assert plain != styled
        completion = post("/v1/completions", model="styled:1", prompt="the thing", max_tokens=16)
        assert completion["choices"][0]["text"] == styled
        # A layer that cannot be used is an error that names it.
        for name, layer in (("broken:1", "`adapter`"), ("lost:1", "`system`")):
            for path in ("/api/chat", "/v1/chat/completions"):
                refused = server.post(path, {"model": name, "messages": MESSAGES})
                assert (refused.status_code, layer in refused.text) == (503, True), refused.text


@pytest.mark.native
def test_a_path_is_not_a_name(client: ollama.Client, folder: Path) -> None:
    for path in (folder / "models" / "mine.gguf", models.get_path("embedding")):
        with pytest.raises(ollama.ResponseError, match="no model called"):
            client.embed(str(path), "hello")


@pytest.mark.native
def test_a_model_is_unloaded_and_loaded_again(client: ollama.Client) -> None:
    answered = client.chat("tiny", MESSAGES, options=GREEDY, keep_alive=0)
    assert answered.message.content == CYCLE[:8]
    assert wait_until(60, lambda: "tiny:latest" not in list_running(client))
    assert client.generate("tiny", "").done_reason == "load"
    assert "tiny:latest" in list_running(client)
    assert client.generate("tiny", "", keep_alive=0).done_reason == "unload"
    assert "tiny:latest" not in list_running(client)
    again = client.chat("tiny", MESSAGES, options=GREEDY)
    assert again.message.content == CYCLE[:8]
    assert (again.load_duration or 0) > 10**6  # it was loaded for this request


@pytest.mark.native
def test_a_model_that_a_created_one_uses_is_listed_under_the_name_of_the_request(client: ollama.Client) -> None:
    client.create("assistant", from_="tiny", parameters=PARAMETERS)
    client.chat("assistant", MESSAGES)
    running = list_running(client)
    assert ("assistant:latest" in running, "tiny:latest" in running) == (True, False)
    assert running["assistant:latest"].details.parent_model == "tiny"
    client.chat("tiny", MESSAGES, options=GREEDY)
    assert "tiny:latest" in list_running(client)
    client.delete("assistant")


@pytest.mark.native
def test_a_model_that_stays_for_ever_does_not_stop_the_others_from_expiring(
    client: ollama.Client, machine: ServerProcess
) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
    for value in (9_999_999_999, 1e300, "99999999999h"):
        assert client.generate("tiny", "", keep_alive=value).done_reason == "load"
        assert machine.post("/v1/chat/completions", {**body, "keep_alive": value}).status_code == 200
        assert machine.post("/models/load", {"model": "tiny", "keep_alive": value}).json()["expires_at"] is None
        assert list_running(client)["tiny:latest"].expires_at.year > 2100
    client.generate("tiny", "", keep_alive="10ms")
    assert wait_until(60, lambda: "tiny:latest" not in list_running(client))


@pytest.mark.native
def test_a_longer_context_reloads_the_model(client: ollama.Client) -> None:
    assert client.chat("tiny", MESSAGES, options={**GREEDY, "num_ctx": 512}).message.content == CYCLE[:8]
    assert list_running(client)["tiny:latest"].context_length == 512
    long = [{"role": "user", "content": "x" * 400}]
    assert client.chat("tiny", long, options=GREEDY).prompt_eval_count > 400
    with pytest.raises(ollama.ResponseError, match=r"100,000.*4,096"):
        client.chat("tiny", MESSAGES, options={"num_ctx": 100_000})


@pytest.mark.native
def test_requests_that_need_a_longer_context_at_the_same_time_share_one_reload(
    client: ollama.Client, machine: ServerProcess
) -> None:
    client.generate("tiny", "")
    longer = list_running(client)["tiny:latest"].context_length or 0

    def ask(context: int | None) -> int | None:
        options = GREEDY if context is None else {**GREEDY, "num_ctx": context}
        return client.chat("tiny", MESSAGES, options=options).eval_count

    contexts = [longer + 256, longer + 512, None, longer + 512]
    with ThreadPoolExecutor(len(contexts)) as pool:
        assert list(pool.map(ask, contexts)) == [8] * len(contexts)
    assert list_running(client)["tiny:latest"].context_length >= longer + 512


@pytest.mark.native
def test_images(client: ollama.Client) -> None:
    assert "vision" in (client.show("colors").capabilities or ())
    for letter in "RB":
        image = color_image(letter)
        data = encode_image(Image.frombytes("RGB", (image.width, image.height), image.pixels))
        asked = [{"role": "user", "content": "What is this?", "images": [data]}]
        assert client.chat("colors", asked, options={"temperature": 0}).message.content == letter
        generated = client.generate("colors", "What is this?", images=[base64.b64encode(data).decode()])
        assert (generated.response, generated.context) == (letter, None)


@pytest.mark.native
@pytest.mark.parametrize("name", ["tiny", "captain"])
def test_errors_about_images_name_the_field_of_the_client(
    client: ollama.Client, machine: ServerProcess, name: str
) -> None:
    """Messages that the server inserts do not count: a system prompt, and the first messages of a created model."""
    first = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    client.create("captain", from_="tiny", system="Talk like a captain.", messages=first)
    uri = "data:image/png;base64,AAAA"
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}]
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    blocks = [*MESSAGES, {"role": "user", "content": [{"type": "image", "source": source}]}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    results = [*MESSAGES, {"role": "user", "content": [{"type": "text", "text": "x"}, result]}]
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": uri}]}]
    for path, field, body in (
        ("/v1/chat/completions", "messages[0].content", {"messages": chat}),
        ("/v1/messages", "messages[1].content", {"messages": blocks, "system": "Be brief.", "max_tokens": 2}),
        ("/v1/messages", "messages[1].content", {"messages": results, "system": "Be brief.", "max_tokens": 2}),
        ("/v1/responses", "input[0].content", {"input": items, "instructions": "Be brief."}),
        ("/apply-template", "messages[0].content", {"messages": chat}),
        ("/api/chat", "messages[0].images", {"messages": [{"role": "user", "images": ["AAAA"]}]}),
        ("/api/generate", "images", {"prompt": "hello", "images": ["AAAA"]}),
        ("/api/generate", "images", {"prompt": "hello", "images": ["AAAA"], "system": "Be brief."}),
    ):
        refused = machine.post(path, {"model": name, **body})
        assert (refused.status_code, f"`{field}` cannot be used" in refused.text) == (400, True), refused.text
        error = refused.json()["error"]
        assert path.startswith(("/api", "/v1/messages")) or error["param"] == field
    image = color_image("R")
    data = encode_image(Image.frombytes("RGB", (image.width, image.height), image.pixels))
    seen = [{"role": "user", "content": [{"type": "input_image", "image_url": encode_data_uri(data)}]}]
    stored = machine.post("/v1/responses", {"model": "colors", "input": seen, "max_output_tokens": 1}).json()
    refused = machine.post("/v1/responses", {"model": name, "input": "hello", "previous_response_id": stored["id"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


@pytest.mark.native
def test_created_models_have_settings_of_their_own(client: ollama.Client, machine: ServerProcess) -> None:
    plain = client.chat("tiny", MESSAGES, options=GREEDY)
    statuses = [
        part.status
        for part in client.create(
            "pirate",
            from_="tiny",
            system="Talk like a pirate.",
            parameters={"num_predict": 3, "stop": ["xyz"]},
            license="CC0",
            stream=True,
        )
    ]
    assert statuses[-1] == "success"
    pirate = client.chat("pirate:latest", MESSAGES, options={"temperature": 0})
    assert (pirate.message.content, pirate.model) == (CYCLE[:3], "pirate:latest")
    assert (pirate.prompt_eval_count or 0) > (plain.prompt_eval_count or 0)
    assert client.chat("pirate", MESSAGES, options=GREEDY).message.content == CYCLE[:8]
    told = client.chat("pirate", [{"role": "system", "content": "no"}, *MESSAGES], options={"num_predict": 1})
    assert told.prompt_eval_count < pirate.prompt_eval_count
    assert (client.generate("pirate", "hello").prompt_eval_count) == pirate.prompt_eval_count
    shown = client.show("pirate")
    assert shown.license == "CC0"
    assert shown.details
    assert shown.details.parent_model == "tiny"
    assert "SYSTEM" in (shown.modelfile or "")
    assert "num_predict" in (shown.parameters or "")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    first = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    client.create("echo", from_="pirate", template=template, messages=first, system="")
    assert client.chat("echo", MESSAGES, options={"temperature": 0}).prompt_eval_count == len("xyhello")
    # A created model does not change the prefix cache: it is that of its source.
    assert machine.post("/api/chat", {"model": "pirate", "messages": MESSAGES, "stream": False}).json()[
        "prompt_eval_cached_count"
    ]


@pytest.mark.native
def test_parameters_replace_those_that_have_another_name(client: ollama.Client) -> None:
    client.create("first", from_="tiny", parameters={"repetition_penalty": 1.5, "num_predict": 2, "temperature": 0})
    client.create("second", from_="first", parameters={"repeat_penalty": 1.0})
    assert client.chat("second", MESSAGES).message.content == CYCLE[:2]
    assert client.chat("first", MESSAGES, options={"repeat_penalty": 1.0}).message.content == CYCLE[:2]
    assert (client.show("second").parameters or "").count("penalty") == 1


@pytest.mark.native
def test_a_model_with_a_template_that_cannot_be_rendered_is_not_created(client: ollama.Client) -> None:
    for template in ("{% for message in messages %}", "{{ messages[0].content | nothing }}"):
        with pytest.raises(ollama.ResponseError, match="`template` cannot be used: ") as raised:
            client.create("broken", from_="tiny", template=template)
        assert raised.value.status_code == 400
    assert "broken:latest" not in {model.model for model in client.list().models}


@pytest.mark.native
def test_created_models_are_served_by_every_api_with_their_settings(
    client: ollama.Client, machine: ServerProcess
) -> None:
    first = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    parameters = {"num_predict": 5, "temperature": 0, "seed": -1, "repeat_last_n": -1, "stop": ["d"]}
    client.create("sailor", from_="tiny", system="Talk like a sailor.", messages=first, parameters=parameters)
    expected = client.chat("sailor", MESSAGES)
    assert expected.message.content == "abc"
    count = expected.prompt_eval_count
    with (
        openai.OpenAI(base_url=f"{machine.url}/v1", api_key="x") as gpt,
        anthropic.Anthropic(base_url=machine.url, api_key="x") as claude,
    ):
        for name in ("sailor", "sailor:latest"):
            chat = gpt.chat.completions.create(model=name, messages=MESSAGES)
            assert (chat.choices[0].message.content, chat.usage and chat.usage.prompt_tokens) == ("abc", count)
            assert chat.model == "sailor"
        response = gpt.responses.create(model="sailor", input="hello")
        assert (response.output_text, response.usage and response.usage.input_tokens) == ("abc", count)
        assert response.model == "sailor"
        completion = gpt.completions.create(model="sailor", prompt="abc", stop=["zz"])
        assert completion.choices[0].text == CYCLE[3:8]  # num_predict
        message = claude.messages.create(model="sailor", messages=MESSAGES, max_tokens=9)
        assert message.content[0].text == "abc"  # type: ignore[union-attr]
        assert message.model == "sailor"
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == count
        assert claude.messages.count_tokens(model="sailor", messages=MESSAGES).input_tokens == count
        # What a request sets applies instead.
        told = gpt.chat.completions.create(model="sailor", messages=MESSAGES, max_tokens=2, stop=["zz"])
        assert told.choices[0].message.content == CYCLE[:2]
        unlimited = gpt.chat.completions.create(model="sailor", messages=MESSAGES, max_tokens=-1, stop=["h"])
        assert unlimited.choices[0].message.content == CYCLE[:7]
        own = [{"role": "system", "content": "no"}, *MESSAGES]
        told = gpt.chat.completions.create(model="sailor", messages=own)
        assert told.usage
        assert told.usage.prompt_tokens < (count or 0)
        for path, body in {**BODIES, **NAMED_BODIES}.items():
            named = machine.post(path, {**body, "model": "sailor"})
            assert (named.status_code, named.json().get("model", "sailor")) == (200, "sailor"), named.text
        # The lists of models have it, with the model that it is made from.
        card = gpt.models.retrieve("sailor")
        assert (card.id, card.parent) == ("sailor", "tiny")  # type: ignore[attr-defined]
        listed = {card["id"]: card["sampling"] for card in machine.http.get("/v1/models").json()["data"]}
        assert listed["sailor"]["temperature"] == {"value": 0, "source": "created model"}
        assert (
            listed["sailor"]
            == {
                **listed["tiny"],
                **{
                    name: {"value": value, "source": "created model"}
                    for name, value in (("temperature", 0), ("repeat_last_n", -1))
                },
            }
            == card.sampling
        )  # type: ignore[attr-defined]
        assert card.id in [model.id for model in gpt.models.list()]
        assert claude.models.retrieve("sailor").id == "sailor"
        assert "sailor" in [model.id for model in claude.models.list()]
        prompt = machine.post("/apply-template", {"model": "sailor", "messages": MESSAGES}).json()["prompt"]
        assert re.search(r"sailor.*x.*y.*hello", prompt, re.DOTALL)
        # Its template, too; and a model on this machine that is not served yet is loaded for it.
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        client.create("parrot", from_="mine.gguf", template=template, parameters={"num_predict": 1})
        parrot = gpt.chat.completions.create(model="parrot", messages=MESSAGES)
        assert (parrot.usage and parrot.usage.prompt_tokens) == len("hello")
        # Its policy for prompts that are too long.
        client.create("shifter", from_="tiny", parameters={"overflow": "shift", "num_predict": 3})
        long_prompt = CYCLE[:20] * 200
        with pytest.raises(openai.BadRequestError, match="context"):
            gpt.completions.create(model="tiny", prompt=long_prompt)
        shifted = gpt.completions.create(model="shifter", prompt=long_prompt)
        assert (shifted.model, shifted.choices[0].text) == ("shifter", CYCLE[20:23])
        client.delete("sailor")
        assert "sailor" not in [model.id for model in gpt.models.list()]


@pytest.mark.native
def test_a_created_model_has_its_context_in_every_api(tmp_path: Path, caches_of_our_own: None) -> None:
    tiny, options = f"tiny={models.get_path('successor-attention')}", ["--context", "256", "--sequences", "2"]
    paths = ["/api/chat", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings", "/completion"]
    bodies = {"/api/chat": {"messages": MESSAGES, "stream": False}, **BODIES, **NAMED_BODIES}
    with run_server(tiny, *options, "--allow-reload", **build_environment(tmp_path)) as server:
        for context, path in zip(range(300, 4000, 300), paths, strict=False):
            parameters = {"num_ctx": context, "num_predict": 2}
            server.post("/api/create", {"model": f"long{context}", "from": "tiny", "parameters": parameters})
            for _ in range(2):  # the second time, the model has it
                response = server.post(path, {**bodies[path], "model": f"long{context}"})
                assert response.status_code == 200, response.text
            assert server.http.get("/v1/models/tiny").json()["context_length"] >= context
        too_long = {"model": "huge", "from": "tiny", "parameters": {"num_ctx": 100_000}}
        assert server.post("/api/create", too_long).status_code == 200
        for path in paths:  # more than the model was trained for
            refused = server.post(path, {**bodies[path], "model": "huge"})
            assert (refused.status_code, "`num_ctx` of 'huge' is 100,000" in refused.text) == (400, True), refused.text
    with run_server(tiny, *options, **build_environment(tmp_path)) as server:
        for path in paths:
            refused = server.post(path, {**bodies[path], "model": "long300"})
            message = "`num_ctx` of 'long300' is 300; 'tiny' is loaded with a context of 256"
            assert (refused.status_code, message in refused.text) == (400, True), refused.text


@pytest.mark.native
def test_a_created_model_whose_source_is_not_served_is_not_answered_by_another(
    client: ollama.Client, folder: Path
) -> None:
    client.create("orphan", from_="mine.gguf", system="Talk like an orphan.")
    with run_server(f"tiny={models.get_path('successor-attention')}", **build_environment(folder)) as server:
        for path in ("/v1/chat/completions", "/api/chat"):
            refused = server.post(path, {"model": "orphan", "messages": MESSAGES})
            assert (refused.status_code, "mine.gguf" in refused.text) == (404, True), refused.text
        assert "orphan" not in [card["id"] for card in server.http.get("/v1/models").json()["data"]]


@pytest.mark.native
def test_the_system_prompt_of_a_request_replaces_that_of_a_created_model_with_messages(client: ollama.Client) -> None:
    first = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    client.create("guided", from_="tiny", system="Talk like a pirate.", messages=first)
    system = {"role": "system", "content": "no"}
    expected = client.chat("tiny", [system, *first, *MESSAGES], options=GREEDY).prompt_eval_count
    assert client.chat("guided", [system, *MESSAGES], options=GREEDY).prompt_eval_count == expected
    assert client.generate("guided", "hello", system="no", options=GREEDY).prompt_eval_count == expected
    assert (client.chat("guided", MESSAGES, options=GREEDY).prompt_eval_count or 0) > (expected or 0)


@pytest.mark.native
def test_copies_and_deletion(client: ollama.Client, folder: Path) -> None:
    client.create("first", from_="tiny", parameters={"num_predict": 2})
    client.copy("first", "second")
    assert client.delete("first").status == "success"
    assert client.chat("second", MESSAGES, options={"temperature": 0}).message.content == CYCLE[:2]
    with pytest.raises(ollama.ResponseError, match="no model called 'first'"):
        client.chat("first", MESSAGES)
    shutil.copy(models.get_path("embedding"), folder / "models" / "waste.gguf")
    assert len(client.embed("waste.gguf", "x").embeddings[0]) == 64
    client.delete("waste.gguf")
    assert not (folder / "models" / "waste.gguf").exists()
    assert "waste.gguf:latest" not in list_running(client)


@pytest.mark.native
def test_a_model_file_that_created_models_use_is_not_deleted(client: ollama.Client, folder: Path) -> None:
    path = Path(shutil.copy(models.get_path("successor-attention"), folder / "models" / "shared.gguf"))
    for name in ("user-a", "user-b"):
        client.create(name, from_="shared.gguf", parameters={"num_predict": 2, "temperature": 0})
    with pytest.raises(ollama.ResponseError, match="delete user-a:latest, user-b:latest first") as refused:
        client.delete("shared.gguf")
    assert (refused.value.status_code, path.exists()) == (409, True)
    assert client.chat("user-a", MESSAGES).message.content == CYCLE[:2]
    for name in ("user-a", "user-b", "shared.gguf"):
        assert client.delete(name).status == "success"
    assert not path.exists()


@pytest.mark.native
def test_what_cannot_be_changed_is_refused(client: ollama.Client, machine: ServerProcess) -> None:
    for change, reason in (
        (lambda: client.delete("tiny"), "command line"),
        (lambda: client.create("tiny", from_="colors"), "choose another name"),
        (lambda: client.copy("tiny", "colors:latest"), "choose another name"),
        (lambda: client.copy("nothing", "x"), "no model called"),
        (lambda: client.create("x", from_="nothing"), "no model called"),
        (lambda: client.create("../x", from_="tiny"), "invalid"),
        (lambda: client.create("x", from_="tiny", template="{{ .Prompt }}"), "Jinja"),
        (lambda: client.create("x", from_="tiny", quantize="q4_0"), "`quantize` is not supported"),
        (lambda: client.create("x", from_="tiny", files={"a": "b"}), "`files` is not supported"),
        (lambda: client.create("x", from_="tiny", adapters={"a": "b"}), "`adapters` is not supported"),
        (lambda: client.create("x", from_="tiny", parameters={"temprature": 1}), "did you mean 'temperature'"),
        (lambda: client.create("x"), "`from` is missing"),
        (lambda: client.pull("no such model"), "no model called"),
    ):
        with pytest.raises(ollama.ResponseError, match=reason):
            change()
    assert "x:latest" not in {model.model for model in client.list().models}
    assert client.chat("tiny", MESSAGES, options=GREEDY).message.content == CYCLE[:8]


@pytest.mark.native
def test_pulling_what_is_there_succeeds_at_once(client: ollama.Client) -> None:
    assert client.pull("mini:1b").status == "success"
    assert [part.status for part in client.pull("tiny", stream=True)][-1] == "success"


@pytest.mark.native
def test_an_error_in_a_stream_is_its_last_line(client: ollama.Client, machine: ServerProcess) -> None:
    options = {"temperature": 0, "num_predict": -1, "num_ctx": 4000}  # several seconds of tokens
    stream = client.generate("mine.gguf", "hello", options=options, stream=True)
    parts = iter(stream)
    assert next(parts).response == "a"
    for engine in machine.list_engines():
        engine.send_signal(signal.SIGKILL)
    with pytest.raises(ollama.ResponseError, match="engine"):
        list(parts)
    assert client.chat("tiny", MESSAGES, options=GREEDY).message.content == CYCLE[:8]


@pytest.mark.native
def test_a_damaged_or_missing_file_does_not_hide_the_other_models(tmp_path: Path, caches_of_our_own: None) -> None:
    (tmp_path / "models").mkdir()
    content = models.get_path("successor-attention").read_bytes()
    for name in ("good", "served"):
        (tmp_path / "models" / f"{name}.gguf").write_bytes(content)
    (tmp_path / "models" / "cut.gguf").write_bytes(content[:1000])
    served = tmp_path / "models" / "served.gguf"
    arguments = [f"gone={served}", "--ollama", "--ollama-port", "0", "--context", "256"]
    with run_server(*arguments, **build_environment(tmp_path)) as server:
        served.unlink()  # the model stays loaded
        names = [model["name"] for model in server.http.get("/api/tags").json()["models"]]
        assert names == ["good.gguf:latest"]
        assert [model["name"] for model in server.http.get("/api/ps").json()["models"]] == ["gone:latest"]
        for name, status in (("gone", 404), ("cut.gguf", 503)):
            shown = server.post("/api/show", {"model": name})
            assert (shown.status_code, list(shown.json())) == (status, ["error"])
            assert name.removesuffix(".gguf") in shown.json()["error"]
            assert str(tmp_path) not in shown.json()["error"]  # clients do not see the directories of this machine
            server.wait_for_log(f"{name}.*is not listed with its details")
        assert server.post("/api/show", {"model": "good.gguf"}).status_code == 200


NAMELESS_BODIES: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": GREEDY},
    "/api/generate": {"prompt": "hello", "stream": False, "options": GREEDY},
    "/api/embed": {"input": "hello"},
    "/api/embeddings": {"prompt": "hello"},
    "/api/show": {},
}


@pytest.mark.native
def test_the_model_is_optional_if_one_model_is_served(
    tmp_path: Path, caches_of_our_own: None, machine: ServerProcess
) -> None:
    arguments = [f"tiny={models.get_path('successor-attention')}", "--context", "256"]
    with run_server(*arguments, **build_environment(tmp_path)) as server:
        for path, body in NAMELESS_BODIES.items():
            response = server.post(path, body)
            assert response.status_code == 200, response.text
            assert response.json().get("model", "tiny") == "tiny"
        assert server.post("/api/chat", {}).json()["model"] == "tiny"
        assert server.post("/api/generate", {"keep_alive": 0}).json()["done_reason"] == "unload"
        for path in ("/api/pull", "/api/create"):
            refused = server.post(path, {"from": "tiny"} if path == "/api/create" else {})
            assert (refused.status_code, refused.json()) == (400, {"error": "`model` is missing"})
        refused = server.http.request("DELETE", "/api/delete", json={})
        assert (refused.status_code, refused.json()) == (400, {"error": "`model` is missing"})
        assert server.post("/api/show", []).json() == {"error": "the body must be a JSON object"}
    for path, body in NAMELESS_BODIES.items():
        refused = machine.post(path, body)
        assert (refused.status_code, refused.json()["error"][:18]) == (400, "`model` is missing")


@pytest.mark.native
def test_created_models_outlive_the_server(client: ollama.Client, folder: Path) -> None:
    client.create("lasting", from_="tiny", parameters={"num_predict": 5})
    arguments = [
        f"tiny={models.get_path('successor-attention')}",
        "--lazy-load",
        "--context",
        "256",
        "--no-manage-models",
    ]
    with run_server(*arguments, **build_environment(folder)) as later:
        body = {"model": "lasting", "messages": MESSAGES, "stream": False}
        assert later.post("/api/chat", body).json()["message"]["content"] == CYCLE[:5]
        # This server serves only what its command line names, and its models cannot be changed.
        refused = later.post("/api/chat", {**body, "model": "mine.gguf"})
        assert (refused.status_code, "afterglow serve mine.gguf" in refused.json()["error"]) == (404, True)
        refused = later.post("/api/copy", {"source": "tiny", "destination": "copied"})
        assert (refused.status_code, "manage_models" in refused.json()["error"]) == (403, True)


# --- without a model


def test_a_port_that_is_taken_is_an_error_with_advice() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidArgument, match=f"127.0.0.1:{port}.*if Ollama is running, stop it"):
            bind_ollama(ServerSettings(ollama=True, ollama_port=port))  # type: ignore[call-arg]


def test_there_is_no_second_socket_by_default() -> None:
    assert bind_ollama(ServerSettings()) is None  # type: ignore[call-arg]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerState]:
    for name, value in build_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with ServerState(ModelRegistry({}), ServerSettings()) as state:  # type: ignore[call-arg]
        yield state


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"parameters": {"option_of_a_newer_version": 1}}, "`parameters` has no option 'option_of_a_newer_version'"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "`messages[0].role`"),
        ({"template": "{{ .Prompt }}"}, "Go's language"),
    ],
)
def test_a_created_model_that_this_version_cannot_use_does_not_hide_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
    reason: str,
) -> None:
    for name, value in build_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    store = CreatedModelStore()
    store.save(CreatedModel(name="fine:latest", source="tiny"))
    store.save(CreatedModel(name="newer:latest", source="tiny", **fields))

    def never() -> Any:
        raise AssertionError

    registry = ModelRegistry({"tiny": ServedModel(never)})
    with (
        ServerState(registry, ServerSettings()) as state,  # type: ignore[call-arg]
        TestClient(build_application(state)[0], "http://localhost") as client,
        caplog.at_level(logging.WARNING, logger="afterglow.server"),
    ):
        for headers in ({}, {"anthropic-version": "2023-06-01"}) * 2:
            names = [model["id"] for model in client.get("/v1/models", headers=headers).json()["data"]]
            assert ("fine" in names, "newer" in names) == (True, False)
        assert caplog.text.count("the created model 'newer:latest' cannot be used") == 1
        for path, others in {"/v1/chat/completions": {}, "/v1/messages": {"max_tokens": 2}, "/api/chat": {}}.items():
            response = client.post(path, json={"model": "newer", "messages": MESSAGES, **others})
            assert (response.status_code, "'newer:latest' cannot be used" in response.text) == (400, True)
            assert reason in response.text
        assert client.get("/v1/models/newer").status_code == 400
        assert client.request("DELETE", "/api/delete", json={"model": "newer"}).status_code == 200


def test_the_file_of_a_model_that_is_served_under_another_name_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in build_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "models").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "models")
    path = Path(shutil.copy(models.get_path("successor-attention"), tmp_path / "models" / "mine.gguf"))

    def never() -> Any:
        raise AssertionError

    registry = ModelRegistry({"chat": ServedModel(never, path=tmp_path / "link" / "mine.gguf")})
    with (
        ServerState(registry, ServerSettings()) as state,  # type: ignore[call-arg]
        TestClient(build_application(state)[0], "http://localhost") as client,
    ):
        for name in ("chat", "mine.gguf"):
            refused = client.request("DELETE", "/api/delete", json={"model": name})
            assert (refused.status_code, "command line" in refused.json()["error"]) == (409, True)
        assert path.exists()


def collect_reports(state: ServerState, name: str, count: int | None = None) -> list[dict[str, Any]]:
    """Return the first reports of a pull."""

    async def collect() -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = []
        async with contextlib.aclosing(pull_model(state, ModelLibrary(state), name)) as pulled:  # type: ignore[type-var]
            async for report in pulled:
                reports.append(report)
                if len(reports) == count:
                    break
        return reports

    return asyncio.run(collect())


def test_a_pull_reports_its_progress(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(name: str, report: Callable[[int, int | None], None], choose: object) -> Path:
        assert name == "smollm2"
        report(10, 100)
        report(100, 100)
        return Path("smollm2")

    monkeypatch.setattr(registry, "pull", pull)
    reports = collect_reports(state, "smollm2:latest")
    digest = f"sha256:{registry.CATALOG['smollm2'].source.sha256}"
    assert reports[0] == {"status": "pulling manifest"}
    assert [(report["digest"], report["completed"], report["total"]) for report in reports[1:3]] == [
        (digest, 10, 100),
        (digest, 100, 100),
    ]
    assert reports[-1] == {"status": "success"}


def test_a_pull_of_what_is_on_this_machine_downloads_nothing(
    state: ServerState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ollama_model(tmp_path / "ollama", "smollm2", "latest")  # a name that the catalog has, too
    monkeypatch.setattr(registry, "pull", Raise(AssertionError("a download")))
    assert (
        collect_reports(state, "smollm2")[-1] == collect_reports(state, "smollm2:latest")[-1] == {"status": "success"}
    )
    assert ModelLibrary(state).find("smollm2").installed


def test_a_client_that_leaves_ends_its_download(
    state: ServerState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[BaseException] = []

    def pull(name: str, report: Callable[[int, int | None], None], choose: object) -> Path:
        try:
            while True:
                report(1, 100)
                time.sleep(0.001)  # an endless loop would take the interpreter from the server
        except Cancelled as error:
            ended.append(error)
            raise

    async def leave() -> None:
        pulled = pull_model(state, ModelLibrary(state), "smollm2")
        for _ in range(3):
            await anext(pulled)
        await pulled.aclose()  # type: ignore[attr-defined]
        while not ended:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        gc.collect()

    monkeypatch.setattr(registry, "pull", pull)
    asyncio.run(leave())
    assert "never retrieved" not in caplog.text


def test_downloads_of_models_do_not_delay_requests_with_media(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended = threading.Semaphore(0), threading.Event()

    def pull(name: str, report: Callable[[int, int | None], None], choose: object) -> Path:
        started.release()
        ended.wait()
        return Path(name)

    monkeypatch.setattr(registry, "pull", pull)

    async def load_media_beside_downloads() -> int:
        downloads = [pull_model(state, ModelLibrary(state), "smollm2") for _ in range(2 * MEDIA_THREADS)]
        for download in downloads:
            await anext(download)
        endings = [asyncio.ensure_future(anext(download)) for download in downloads]  # type: ignore[arg-type]
        try:
            for _ in range(MEDIA_THREADS):
                await asyncio.to_thread(started.acquire)
            return await asyncio.wait_for(state.run_media_work(lambda: 7), 30)
        finally:
            ended.set()
            await asyncio.gather(*endings)

    assert asyncio.run(load_media_beside_downloads()) == 7


def test_a_failed_download_is_the_last_line(monkeypatch: pytest.MonkeyPatch, state: ServerState) -> None:
    def pull(name: str, report: Callable[[int, int | None], None], choose: object) -> Path:
        raise DownloadFailed(name, "the disk is full")

    monkeypatch.setattr(registry, "pull", pull)
    with TestClient(build_application(state)[0], "http://localhost") as client:
        whole = client.post("/api/pull", json={"model": "smollm2", "stream": False})
        assert (whole.status_code, "disk is full" in whole.json()["error"]) == (503, True)
        lines = client.post("/api/pull", json={"name": "smollm2"}).text.splitlines()
        assert "disk is full" in json.loads(lines[-1])["error"]
    with pytest.raises(ModelNotFound):
        collect_reports(state, "unknown")
