"""Batches of a real server that is killed and restarted, beside interactive requests, and after internal errors."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

import afterglow
from afterglow.database import Database
from afterglow.errors import InvalidModel
from afterglow.paths import get_data_directory
from afterglow.server.app import build_application
from afterglow.server.batches import execution
from afterglow.server.batches.store import BatchStore
from afterglow.server.models import ModelRegistry, ServedModel
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState
from afterglow.testing import models
from support.batch_lines import build_line, read_results, start_batch, wait_for_end
from support.server_process import CYCLE, ServerProcess, run_server, wait_until

pytestmark = pytest.mark.native

LINES = 12


ONE_SEQUENCE = (f"tiny={models.get_path('successor-attention')}", "--context", "1900", "--sequences", "1")


def count_completed(server: ServerProcess, id: str) -> int:
    return server.client().batches.retrieve(id).request_counts.completed


def test_a_killed_server_continues_its_batch_and_each_line_has_one_result(tmp_path: Path):
    lines = [build_line(f"{n}", max_tokens=300, ignore_eos=True) for n in range(LINES)]
    server = ServerProcess(*ONE_SEQUENCE, AFTERGLOW_DATA=str(tmp_path))
    batch = start_batch(server.client(), [*lines, "no JSON"])
    server.stop(signal.SIGKILL)  # while the lines are validated or ordered
    server = ServerProcess(*ONE_SEQUENCE, AFTERGLOW_DATA=str(tmp_path))
    assert wait_until(120, lambda: count_completed(server, batch.id) >= 3)
    done = count_completed(server, batch.id)
    server.stop(signal.SIGKILL)  # while lines run
    with run_server(*ONE_SEQUENCE, AFTERGLOW_DATA=str(tmp_path)) as server:
        assert count_completed(server, batch.id) >= done  # nothing that was done is lost
        assert done < LINES
        client = server.client()
        batch = wait_for_end(client, batch.id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", LINES, 1)
        results = read_results(client, batch.output_file_id)
        assert [result["custom_id"] for result in results] == [f"{n}" for n in range(LINES)]
        for result in results:
            assert result["response"]["body"]["choices"][0]["message"]["content"] == (CYCLE * 20)[:300]
        assert "continuing" in server.stderr_text


def test_interactive_requests_go_before_background_work_which_ends(tmp_path: Path):
    """The only sequence is busy with a line of a batch, then with a request of the tier `flex`."""
    with run_server(*ONE_SEQUENCE, AFTERGLOW_DATA=str(tmp_path)) as server:
        client = server.client()
        batch = start_batch(client, [build_line(f"{n}", max_tokens=1800, ignore_eos=True) for n in range(1)])
        assert wait_until(120, lambda: server.is_busy())
        answer = server.chat("hi")
        assert (answer["status"], answer["choices"][0]["message"]["content"]) == (200, CYCLE[:8])
        assert count_completed(server, batch.id) == 0
        batch = wait_for_end(client, batch.id)
        assert batch.request_counts.completed == 1
        for result in read_results(client, batch.output_file_id):
            assert result["response"]["body"]["choices"][0]["message"]["content"] == (CYCLE * 99)[:1800]
        assert (preempted := server.get_counters()["preempted"]) >= 1

        body = {"model": "tiny", "prompt": "abc", "max_tokens": 1800, "temperature": 0, "ignore_eos": True}
        flex_body = {**body, "stream": True, "service_tier": "flex"}
        with server.http.stream("POST", "/v1/completions", json=flex_body) as flex:
            events = flex.iter_lines()
            next(events)
            assert server.chat("hi")["status"] == 200
            assert server.get_counters()["preempted"] == preempted + 1
            assert '"finish_reason":"length"' in "".join(events).replace(" ", "")


def test_lines_of_a_model_that_is_deleted_fail_and_the_others_run(tmp_path: Path):
    options = (f"vectors={models.get_path('embedding')}", *ONE_SEQUENCE)
    with run_server(*options, AFTERGLOW_DATA=str(tmp_path)) as server:
        assert server.post("/api/create", {"model": "bot", "from": "tiny"}).status_code == 200
        client, names = server.client(), ["tiny"] * 3 + ["bot"] * 3
        lines = [build_line(f"{n}", model=name, max_tokens=900, ignore_eos=True) for n, name in enumerate(names)]
        batch = start_batch(client, lines)
        assert wait_until(120, lambda: server.is_busy())
        assert server.http.request("DELETE", "/api/delete", json={"model": "bot"}).status_code == 200
        batch = wait_for_end(client, batch.id)
        assert batch.status == "completed"
        completed = {result["custom_id"] for result in read_results(client, batch.output_file_id)}
        failed = read_results(client, batch.error_file_id)
        assert completed >= {"0", "1", "2"}
        assert {result["response"]["body"]["error"]["code"] for result in failed} == {"model_not_found"}


def test_a_server_that_names_no_model_runs_batches_with_those_of_its_machine(tmp_path: Path):
    (tmp_path / "models").mkdir()
    shutil.copy(models.get_path("successor-attention"), tmp_path / "models" / "mine.gguf")
    folders = {"AFTERGLOW_MODELS": "models", "AFTERGLOW_DATA": "data", "OLLAMA_MODELS": "ollama", "HOME": "home"}
    environment = {name: str(tmp_path / folder) for name, folder in folders.items()}
    options = ("--ollama", "--ollama-port", "0", "--context", "256")
    with run_server(*options, **environment, XDG_CACHE_HOME=str(tmp_path / "home")) as server:
        client = server.client()
        batch = start_batch(client, [build_line(f"{n}", model="mine.gguf") for n in range(3)])
        assert wait_for_end(client, batch.id).request_counts.completed == 3
        # Names that clients used before are not models that the next server must have.
        batch = start_batch(client, [build_line("later", model="mine.gguf")])
        server.stop(signal.SIGKILL)
    with run_server(*options, **environment, XDG_CACHE_HOME=str(tmp_path / "home")) as server:
        assert wait_for_end(server.client(), batch.id).request_counts.completed == 1


def test_lines_of_a_model_that_cannot_be_loaded_fail_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def load() -> afterglow.Model:
        return afterglow.load(models.get_path("successor-attention"), host="process", context=512)

    def fail() -> afterglow.Model:
        raise InvalidModel("/home/user/bad.gguf", "it is cut off")

    with serve_batches({"tiny": ServedModel(load), "bad": ServedModel(fail)}, tmp_path, monkeypatch) as client:
        batch = start_batch(client, [build_line(name, model=name) for name in ("bad", "tiny")])
        batch = wait_for_end(client, batch.id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1)
        (failed,) = read_results(client, batch.error_file_id)
        message = failed["response"]["body"]["error"]["message"]
        assert (failed["response"]["status_code"], message) == (503, "bad.gguf cannot be loaded: it is cut off")


def test_the_event_loop_does_not_wait_for_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    waits, transaction = [], Database.transaction

    def record(database: Database) -> Any:
        with contextlib.suppress(RuntimeError):  # there is no event loop in this thread
            asyncio.get_running_loop()
            waits.append("".join(traceback.format_stack(limit=6)))
        return transaction(database)

    def load() -> afterglow.Model:
        return afterglow.load(models.get_path("successor-attention"), host="process", context=512, sequences=1)

    monkeypatch.setattr(Database, "transaction", record)
    with serve_batches({"tiny": ServedModel(load)}, tmp_path, monkeypatch) as client:
        lines = [build_line(f"{n}", max_tokens=100, ignore_eos=True) for n in range(8)]
        batch = start_batch(client, lines)
        while client.batches.retrieve(batch.id).status in ("validating", "in_progress"):
            assert [listed.id for listed in client.batches.list()] == [batch.id]
        assert client.batches.retrieve(batch.id).request_counts.completed == 8
        assert client.files.list().data
    assert not waits, waits[0]


def test_a_batch_that_another_process_cancels_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def load() -> afterglow.Model:
        return afterglow.load(models.get_path("successor-attention"), host="process", context=1024, sequences=1)

    with serve_batches({"tiny": ServedModel(load)}, tmp_path, monkeypatch) as client:
        batch = start_batch(client, [build_line(f"{n}", max_tokens=900, ignore_eos=True) for n in range(400)])
        assert wait_until(120, lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        other = BatchStore(get_data_directory("batches"))
        other.set_status(batch.id, "cancelling")
        other.close()
        ended = wait_for_end(client, batch.id)
        assert (ended.status, ended.request_counts.total) == ("cancelled", 400)
        assert 0 < ended.request_counts.completed < 400


@contextlib.contextmanager
def serve_batches(
    served: dict[str, ServedModel], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[openai.OpenAI]:
    """Serve models in this process."""
    monkeypatch.setenv("AFTERGLOW_DATA", str(directory))
    with (
        ServerState(ModelRegistry(served), ServerSettings()) as state,
        TestClient(build_application(state)[0], "http://localhost") as http,
        openai.OpenAI(api_key="any", base_url="http://localhost/v1", http_client=http) as client,
    ):
        yield client


def test_an_internal_error_fails_its_batch_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    order_lines, calls = execution.order_lines, []

    async def fail_first(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise TypeError("a defect")
        return await order_lines(*arguments)

    monkeypatch.setattr(execution, "order_lines", fail_first)
    path = models.get_path("successor-attention")
    served = ServedModel(lambda: afterglow.load(path, host="process", context=512))
    with serve_batches({"tiny": served}, tmp_path, monkeypatch) as client:
        first, second = (start_batch(client, [build_line(name)]).id for name in ("a", "b"))
        failed = wait_for_end(client, first)
        assert (failed.status, failed.errors.data[0].message) == ("failed", "a defect")
        assert wait_for_end(client, second).request_counts.completed == 1
    (record,) = [record for record in caplog.records if "a defect" in record.message]
    assert record.exc_info
