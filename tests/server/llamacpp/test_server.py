"""/props, /slots, /lora-adapters, token counts, chat and metrics of the llama-server API, and its server settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from afterglow.errors import InvalidArgument
from afterglow.server.errors import APIError
from afterglow.server.llamacpp import slots
from afterglow.testing import models
from support.server_process import ServerProcess

pytestmark = pytest.mark.native

MESSAGES: Any = [{"role": "user", "content": "hello"}]
KEYS = {name: {"Authorization": f"Bearer {name}"} for name in ("first", "second")}


@pytest.fixture(scope="module")
def limited(
    caches_of_our_own: None, reasoning_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server with two API keys, a directory for slots, and defaults for requests."""
    process = ServerProcess(
        *(f"tiny={models.get_path('successor-attention')}", f"reasoning={reasoning_model}"),
        *("--context", "256", "--sequences", "2", "--slot-save-path", str(tmp_path_factory.mktemp("slots"))),
        *(
            "--api-key",
            "first",
            "--api-key",
            "second",
            "--default-max-tokens",
            "5",
            "--default-seed",
            "7",
            "--default-reasoning",
            "off",
        ),
        *("--no-metrics", "--no-slots", "--no-disk-cache"),
    )
    yield process
    process.stop()


def change_slot(server: ServerProcess, action: str, slot: int = 0, *, key: str = "first", **body: Any) -> Any:
    response = server.post(f"/slots/{slot}?action={action}", body or None, headers=KEYS[key])
    return {"status": response.status_code, **response.json()}


def test_properties_describe_the_model_and_the_server(server: ServerProcess) -> None:
    properties = server.http.get("/props", params={"model": "tiny"}).json()
    assert properties["model_path"].endswith(".gguf")
    assert (properties["total_slots"], properties["model_alias"]) == (8, "tiny")
    assert properties["default_generation_settings"]["n_ctx"] == 2048
    assert properties["default_generation_settings"]["params"]["temperature"] == 1
    assert properties["is_sleeping"] is False
    assert "im_start" in properties["chat_template"]
    body = {"model": "tiny", "prompt": "abc", "n_predict": 1}
    settings = server.post("/completion", body).json()["generation_settings"]
    only_of_requests = {"stop", "logit_bias", "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens"}
    assert settings.keys() - properties["default_generation_settings"]["params"].keys() == only_of_requests


def test_a_busy_slot_describes_its_request(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "busy", "n_predict": 1500, "top_k": 7, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/completion", json={**body, "id_slot": 3}) as response:
        lines = response.iter_lines()
        for _ in range(8):
            next(lines)
        slots = server.http.get("/slots", params={"model": "tiny"}).json()
    slot, (token,) = slots[3], slots[3]["next_token"]
    assert slot["is_processing"]
    assert slot["id_task"] >= 0
    assert (slot["params"]["top_k"], slot["params"]["n_predict"], slot["params"]["ignore_eos"]) == (7, 1500, True)
    assert slot["n_prompt_tokens_processed"] + slot["n_prompt_tokens_cache"] == 4
    assert token["n_decoded"] >= 3
    assert token["n_remain"] == 1500 - token["n_decoded"]
    assert token["has_next_token"]
    assert "params" not in slots[4], "an idle slot has no request"
    assert server.post("/props", {}).status_code == 501


def test_a_model_that_only_computes_embeddings_has_slots(server: ServerProcess) -> None:
    slots = server.http.get("/slots", params={"model": "vectors"}).json()
    assert [(slot["id"], slot["is_processing"], slot["speculative"]) for slot in slots] == [
        (number, False, False) for number in range(len(slots))
    ]
    assert slots


def test_a_model_without_adapters_lists_none_and_refuses_others(server: ServerProcess) -> None:
    assert server.http.get("/lora-adapters", params={"model": "tiny"}).json() == []
    response = server.post("/lora-adapters?model=tiny", [{"id": 0, "scale": 0.5}])
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "path", ["/health", "/v1/health", "/metrics", "/models", "/v1/models", "/props", "/slots", "/lora-adapters"]
)
def test_head_answers_as_get_without_a_body(server: ServerProcess, path: str) -> None:
    params = {"model": "tiny"} if path in ("/props", "/slots", "/lora-adapters") else {}
    head, get = server.http.head(path, params=params), server.http.get(path, params=params)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_slots_cannot_be_saved_without_a_directory(server: ServerProcess) -> None:
    response = server.post("/slots/0?action=save", {"filename": "a.bin", "model": "tiny"})
    assert (response.status_code, response.json()["error"]["code"]) == (501, 501)


def test_the_client_of_openai_on_the_unversioned_path(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=240) as client:
        response = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
        assert response.usage is not None
        timings: Any = response.model_extra and response.model_extra["timings"]
        assert timings["predicted_n"] == response.usage.completion_tokens == 4
        stream = list(client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, stream=True))
    assert stream[0].choices[0].delta.content is None
    assert stream[-1].model_extra is not None
    assert stream[-1].model_extra["timings"]["predicted_n"] == 4


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_counted_tokens_are_those_of_the_prompt(server: ServerProcess, prefix: str) -> None:
    chat = server.post(f"{prefix}/chat/completions/input_tokens", {"model": "tiny", "messages": MESSAGES}).json()
    assert chat["input_tokens"] == server.chat("hello")["usage"]["prompt_tokens"]
    count = server.post(f"{prefix}/responses/input_tokens", {"model": "tiny", "input": "hello"}).json()
    assert count["input_tokens"] == server.respond("hello")["usage"]["input_tokens"]


def test_a_response_streams_progress_and_timings(server: ServerProcess) -> None:
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 3}
    events = server.collect_events("/responses", {**body, "return_progress": True, "timings_per_token": True})
    assert any("prompt_progress" in event for event in events if event["type"] == "response.in_progress")
    assert all("timings" in event for event in events if event["type"] == "response.output_text.delta")
    assert events[-1]["timings"]["predicted_n"] == 3


def test_a_verbose_chat_returns_its_prompt(server: ServerProcess) -> None:
    assert "hello" in server.chat("hello", verbose=True)["__verbose"]["prompt"]
    assert "__verbose" not in server.chat("hello")


def test_a_template_can_be_applied_without_the_start_of_an_answer(server: ServerProcess) -> None:
    body = {"model": "tiny", "messages": MESSAGES}
    whole = server.post("/apply-template", body).json()["prompt"]
    rendered = server.post("/apply-template", {**body, "add_generation_prompt": False}).json()["prompt"]
    assert whole.startswith(rendered)
    assert whole.removeprefix(rendered) == "<|im_start|>assistant\n"


def test_tokenize_takes_texts_and_tokens(server: ServerProcess) -> None:
    def tokenize(content: Any, **fields: Any) -> list[Any]:
        tokens: list[Any] = server.post("/tokenize", {"model": "tiny", "content": content, **fields}).json()["tokens"]
        return tokens

    assert tokenize(["a", *tokenize("b"), "c"]) == tokenize("abc")
    assert len(tokenize("<|im_start|>")) == 1  # as in llama-server, control tokens are parsed
    assert len(tokenize("<|im_start|>", parse_special=False)) > 1
    assert [piece["piece"] for piece in tokenize("ab", with_pieces=True)] == ["a", "b"]


def test_metrics_have_the_names_of_llama_server(server: ServerProcess) -> None:
    names = ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total", "n_decode_total")
    body = {"model": "tiny", "prompt": "a prompt of the metrics", "n_predict": 3, "ignore_eos": True}
    server.post("/completion", body)
    before = {name: server.get_metric(f"llamacpp:{name} ") for name in names}
    timings = server.post("/completion", body).json()["timings"]
    assert timings["cache_n"] > 0
    after = {name: server.get_metric(f"llamacpp:{name} ") for name in names}
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == timings["prompt_n"]
    assert after["prompt_tokens_cached_total"] - before["prompt_tokens_cached_total"] == timings["cache_n"]
    assert after["tokens_predicted_total"] - before["tokens_predicted_total"] == 3
    assert after["n_decode_total"] > before["n_decode_total"]
    assert server.get_metric("llamacpp:requests_processing ") == 0
    assert server.get_metric("llamacpp:n_busy_slots_per_decode ") >= 1
    response = server.http.get("/metrics")
    assert int(response.headers["Process-Start-Time-Unix"]) > 0
    assert "# TYPE llamacpp:n_tokens_max counter" in response.text


def test_the_list_of_models_has_the_fields_of_llama_server(server: ServerProcess) -> None:
    cards = {card["id"]: card for card in server.http.get("/models").json()["data"]}
    assert cards["tiny"]["status"] == {"value": "loaded"}
    assert cards["tiny"]["meta"]["n_ctx_train"] > 0
    assert server.post("/models/load", {"model": "tiny"}).json()["success"] is True


def test_a_saved_slot_is_restored_into_another_one(limited: ServerProcess) -> None:
    prompt = "a prompt that is saved"
    body = {"model": "tiny", "prompt": prompt, "n_predict": 1, "temperature": 0, "id_slot": 1}
    first = limited.post("/completion", body, headers=KEYS["first"]).json()
    saved = change_slot(limited, "save", 1, filename="slot é.bin", model="tiny")
    assert saved["n_saved"] == first["tokens_cached"]
    limited.post("/cache/clear", {"model": "tiny"}, headers=KEYS["first"])
    restored = change_slot(limited, "restore", 0, filename="slot é.bin", model="tiny")
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    again = limited.post("/completion", {**body, "id_slot": 0}, headers=KEYS["first"]).json()
    assert again["timings"]["prompt_n"] == 1  # the logits after it are not part of the file
    assert again["content"] == first["content"]
    assert change_slot(limited, "restore", key="second", filename="slot é.bin", model="tiny")["status"] == 404
    assert change_slot(limited, "save", 0, key="second", filename="b.bin", model="tiny")["status"] == 400


def test_an_erased_slot_is_empty(limited: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "a prompt that is erased", "n_predict": 1, "id_slot": 1}
    cached = limited.post("/completion", body, headers=KEYS["first"]).json()["tokens_cached"]
    query = "/slots/1?action=erase"
    other = limited.post(query, {"filename": "a", "model": "tiny"}, headers=KEYS["second"]).json()
    assert other["n_erased"] == 0  # it is not theirs
    assert limited.post(query, {"model": "tiny"}, headers=KEYS["first"]).json()["n_erased"] == cached
    assert change_slot(limited, "save", 1, filename="b.bin", model="tiny")["error"]["param"] == "id_slot"


@pytest.mark.parametrize("action", ["save", "erase"])
def test_a_slot_that_a_request_begins_to_use_is_busy(action: str, tmp_path: Path) -> None:
    class BusyModel:
        """A model whose sequence is idle until something is done with it."""

        def get_cache_contents(self, salt: str) -> Any:
            return SimpleNamespace(sequences=[SimpleNamespace(number=0, busy=False, tokens=3, first_entries=(1,))])

        def save_sequence(self, path: Path, sequence: int) -> int:
            raise InvalidArgument("sequence", "0 is in use by a request: wait for its end, or cancel it")

        def clear_cache(self, sequence: int) -> None:
            self.save_sequence(tmp_path, sequence)

    model: Any = BusyModel()
    changes: dict[str, Any] = {
        "save": lambda: slots.save_slot(model, 0, tmp_path / "slot.bin", ""),
        "erase": lambda: slots.erase_slot(model, 0, ""),
    }
    with pytest.raises(APIError, match="slot 0 is processing a request") as busy:
        slots.report_busy(0, changes[action])
    assert (busy.value.status, busy.value.code) == (503, "slot_busy")


@pytest.mark.parametrize("name", ["../a.bin", "a/b.bin", "/etc/passwd", ".hidden", "a\x1fb", "a.", "..", "é" * 101])
def test_slot_files_stay_in_their_directory(limited: ServerProcess, name: str) -> None:
    answer = change_slot(limited, "save", 0, filename=name, model="tiny")
    assert (answer["status"], answer["error"]["param"]) == (400, "filename")


def save_slot_file(server: ServerProcess, name: str) -> Path:
    """Save a slot and return its file."""
    arguments = list(server.process.args)  # type: ignore[arg-type]
    directory = Path(str(arguments[arguments.index("--slot-save-path") + 1]))
    body = {"model": "tiny", "prompt": name, "n_predict": 1, "id_slot": 0}
    server.post("/completion", body, headers=KEYS["first"])
    change_slot(server, "save", 0, filename=name, model="tiny")
    (path,) = directory.rglob(name)
    return path


def test_a_damaged_slot_file_is_refused(limited: ServerProcess) -> None:
    path = save_slot_file(limited, "damaged.bin")
    path.write_bytes(path.read_bytes()[:-1])
    answer = change_slot(limited, "restore", 0, filename="damaged.bin", model="tiny")
    assert (answer["status"], answer["error"]["param"]) == (400, "filename")
    assert str(path.parent) not in answer["error"]["message"]  # clients do not learn where files are


def test_a_slot_is_not_saved_over_a_directory(limited: ServerProcess) -> None:
    (save_slot_file(limited, "one.bin").parent / "folder").mkdir()
    answer = change_slot(limited, "save", 0, filename="folder", model="tiny")
    assert (answer["status"], answer["error"]["message"]) == (400, "'folder' is a directory")


def test_settings_are_defaults_of_requests(limited: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "abc", "temperature": 5.0}
    results = [limited.post("/completion", body, headers=KEYS["first"]).json() for _ in range(2)]
    assert {result["tokens_predicted"] for result in results} == {5}
    assert {result["generation_settings"]["seed"] for result in results} == {7}
    assert results[0]["content"] == results[1]["content"]
    longer = limited.post("/completion", {**body, "n_predict": 8, "ignore_eos": True}, headers=KEYS["first"])
    assert longer.json()["tokens_predicted"] == 8


def test_reasoning_can_be_turned_off_for_all_requests(limited: ServerProcess) -> None:
    def render(**fields: Any) -> str:
        body = {"model": "reasoning", "messages": MESSAGES, **fields}
        prompt: str = limited.post("/apply-template", body, headers=KEYS["first"]).json()["prompt"]
        return prompt

    assert not render().endswith("<think>\n")
    assert render(enable_thinking=True).endswith("<think>\n")


def test_metrics_can_be_turned_off(limited: ServerProcess) -> None:
    assert limited.http.get("/metrics", headers=KEYS["first"]).status_code == 501


def test_slots_can_be_turned_off(limited: ServerProcess) -> None:
    assert limited.http.get("/slots", headers=KEYS["first"]).status_code == 501
