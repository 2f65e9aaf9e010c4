"""Files and batches with OpenAI's client on a real server."""

from __future__ import annotations

import contextlib
import stat
import time
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from afterglow.testing import models
from support.batch_lines import (
    build_line,
    build_shuffled_lines,
    encode_lines,
    read_results,
    start_batch,
    wait_for_end,
)
from support.server_process import CYCLE, ServerProcess, run_server, wait_until

pytestmark = pytest.mark.native


# --- files


def test_a_file_is_uploaded_listed_read_and_deleted(batch_server: ServerProcess):
    client = batch_server.client()
    content = encode_lines([build_line("a")])
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(content), "in.jsonl", "batch")
    assert file.expires_at == file.created_at + 30 * 24 * 3600
    assert client.files.retrieve(file.id) == file
    assert file.id in [listed.id for listed in client.files.list(purpose="batch")]
    assert client.files.content(file.id).read() == content
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    assert batch_server.http.get(f"/v1/files/{file.id}").json()["error"]["code"] == "file_not_found"


def test_a_file_can_expire_earlier(batch_server: ServerProcess):
    expiry = {"anchor": "created_at", "seconds": 3600}
    file = batch_server.client().files.create(file=("in.jsonl", b"{}"), purpose="batch", expires_after=expiry)
    assert file.expires_at == file.created_at + 3600


def test_lists_have_pages(batch_server: ServerProcess):
    client = batch_server.client()
    ids = [client.files.create(file=(f"{n}.jsonl", b"{}"), purpose="batch").id for n in range(3)]
    page = client.files.list(limit=2, order="desc")
    assert [file.id for file in page.data] == [ids[2], ids[1]]
    assert page.has_next_page()
    assert client.files.list(limit=1, order="desc", after=ids[1]).data[0].id == ids[0]
    assert batch_server.http.get("/v1/files?after=nothing").json()["error"]["param"] == "after"


@pytest.mark.parametrize(
    ("data", "param", "code"),
    [
        ({"purpose": "fine-tune"}, "purpose", "unsupported_parameter"),
        ({}, "purpose", "missing_required_parameter"),
        ({"purpose": "batch", "colour": "red"}, "colour", "unknown_parameter"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at"},
            "expires_after.seconds",
            "missing_required_parameter",
        ),
        (
            {"purpose": "batch", "expires_after": "1h", "expires_after[seconds]": "3600"},
            "expires_after",
            "invalid_value",
        ),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "9" * 5000},
            "expires_after.seconds",
            "invalid_value",
        ),
    ],
)
def test_a_form_is_validated(batch_server: ServerProcess, data: dict[str, str], param: str, code: str):
    response = batch_server.http.post("/v1/files", data=data, files={"file": ("in.jsonl", b"{}")})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert response.json()["error"]["code"] == code


def test_a_file_that_is_too_large_is_refused_with_both_numbers(batch_server: ServerProcess):
    for size in (2 * 1024**2 + 1, 3 * 1024**2):  # in the route, and before the body is read
        files = {"file": ("in.jsonl", b"x" * size)}
        response = batch_server.http.post("/v1/files", data={"purpose": "batch"}, files=files)
        assert response.status_code == 413
        assert "max_file_bytes" in response.json()["error"]["message"]


# --- batches


def test_a_batch_completes_and_has_one_result_for_each_line(batch_server: ServerProcess):
    client = batch_server.client()
    lines = [build_line(f"line {n}") for n in range(6)]
    batch = start_batch(client, lines, metadata={"job": "nightly"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"job": "nightly"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = wait_for_end(client, batch.id)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 6, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    results = read_results(client, batch.output_file_id)
    assert [result["custom_id"] for result in results] == [f"line {n}" for n in range(6)]
    for result in results:
        assert result["response"]["status_code"] == 200
        assert result["response"]["body"]["choices"][0]["message"]["content"] == CYCLE[:4]
    assert batch.usage.output_tokens == 24
    assert batch.usage.input_tokens == sum(r["response"]["body"]["usage"]["prompt_tokens"] for r in results)
    assert batch.id in [listed.id for listed in client.batches.list(limit=5)]


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/responses", {"input": "hello", "max_tokens": None, "max_output_tokens": 4}),
        ("/v1/embeddings", {"model": "vectors", "input": "hello", "max_tokens": None, "temperature": None}),
    ],
)
def test_every_endpoint_runs_as_its_route_does(batch_server: ServerProcess, endpoint: str, fields: dict[str, object]):
    client = batch_server.client()
    line = build_line("one", endpoint, **fields)
    line["body"] = {name: value for name, value in line["body"].items() if value is not None}
    batch = wait_for_end(client, start_batch(client, [line], endpoint).id)
    (result,) = read_results(client, batch.output_file_id)
    direct = batch_server.post(endpoint, line["body"]).json()
    name = {"/v1/completions": "choices", "/v1/responses": "object", "/v1/embeddings": "data"}[endpoint]
    assert result["response"]["body"][name] == direct[name]


def test_invalid_lines_go_to_the_error_file_with_their_numbers_and_the_others_run(batch_server: ServerProcess):
    client = batch_server.client()
    lines = [
        build_line("good"),
        "this is no JSON",
        build_line("bad field", max_tokenz=3),
        build_line("good"),
        build_line("other route", "/v1/embeddings"),
        build_line("stream", stream=True),
        {**build_line("method"), "method": "GET"},
        build_line("model", model="unknown"),
        build_line("too long", messages=[{"role": "user", "content": "x " * 3000}]),
        build_line("last"),
    ]
    batch = wait_for_end(client, start_batch(client, lines).id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (10, 2, 8)
    assert [r["custom_id"] for r in read_results(client, batch.output_file_id)] == ["good", "last"]
    described = [(error.line, error.code) for error in batch.errors.data]
    assert described == [
        (2, "invalid_json"),
        (3, "unknown_parameter"),
        (4, "duplicate_custom_id"),
        (5, "mismatched_endpoint"),
        (6, "invalid_value"),
        (7, "invalid_value"),
        (8, "model_not_found"),
    ]
    errors = read_results(client, batch.error_file_id)
    assert [error["error"]["line"] for error in errors[:-1]] == [2, 3, 4, 5, 6, 7, 8]
    assert "did you mean `max_tokens`" in errors[1]["error"]["message"]
    assert errors[-1]["response"]["status_code"] == 400  # it is known only when the line runs
    assert errors[-1]["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_the_error_of_a_line_has_its_custom_id_whatever_else_is_wrong(batch_server: ServerProcess):
    client = batch_server.client()
    lines = [{"custom_id": "no body"}, {**build_line("more"), "timeout": 3}, {**build_line("text"), "body": "x"}]
    batch = wait_for_end(client, start_batch(client, [*lines, build_line("more")]).id)
    results = read_results(client, batch.error_file_id)
    codes = [(result["custom_id"], result["error"]["code"]) for result in results]
    assert codes == [
        ("no body", "missing_required_parameter"),
        ("more", "unknown_parameter"),
        ("text", "invalid_value"),
        ("more", "duplicate_custom_id"),
    ]


@pytest.mark.parametrize(
    ("lines", "code"), [([], "empty_file"), (["{}"] * 601, "too_many_lines"), (["{}"], "missing_required_parameter")]
)
def test_a_batch_without_a_valid_line_fails(batch_server: ServerProcess, lines: list[str], code: str):
    client = batch_server.client()
    batch = wait_for_end(client, start_batch(client, lines).id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", code)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "9999h"}, "completion_window"),
    ],
)
def test_a_batch_is_validated_when_it_is_created(batch_server: ServerProcess, fields: dict[str, str], param: str):
    file = batch_server.client().files.create(file=("in.jsonl", b"{}"), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    response = batch_server.post("/v1/batches", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_cancelled_batch_keeps_the_results_that_it_has(batch_server: ServerProcess):
    client = batch_server.client()
    lines = [build_line(f"{n}", max_tokens=400, ignore_eos=True) for n in range(60)]
    batch = start_batch(client, lines)
    assert wait_until(120, lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2)
    busy = batch_server.http.delete(f"/v1/files/{batch.input_file_id}")
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "file_in_use")
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = wait_for_end(client, batch.id)
    assert batch.status == "cancelled"
    assert 2 <= batch.request_counts.completed < 60
    results, errors = read_results(client, batch.output_file_id), read_results(client, batch.error_file_id)
    assert sorted(int(r["custom_id"]) for r in results + errors) == list(range(60))
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    again = batch_server.post(f"/v1/batches/{batch.id}/cancel", {})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "batch_ended")


def test_a_batch_that_is_too_late_expires(batch_server: ServerProcess):
    client = batch_server.client()
    lines = [build_line(f"{n}", max_tokens=1500, ignore_eos=True) for n in range(300)]
    batch = wait_for_end(client, start_batch(client, lines, completion_window="1s").id)
    assert batch.status == "expired"
    assert batch.request_counts.failed > 0
    assert read_results(client, batch.error_file_id)[-1]["error"]["code"] == "batch_expired"


def test_a_batch_that_is_cancelled_while_another_runs_ends_at_once_and_has_a_result_for_each_line(
    batch_server: ServerProcess,
):
    client = batch_server.client()
    first = start_batch(client, [build_line(f"{n}", max_tokens=1500, ignore_eos=True) for n in range(300)])
    assert wait_until(120, lambda: client.batches.retrieve(first.id).status == "in_progress")
    second = start_batch(client, [build_line("a"), "no JSON"])
    client.batches.cancel(second.id)
    second = wait_for_end(client, second.id)
    assert client.batches.cancel(first.id).status == "cancelling", "it was still running"
    check_unstarted(client, second, "cancelled")
    wait_for_end(client, first.id)


def test_a_batch_that_expires_while_another_runs_has_a_result_for_each_line(batch_server: ServerProcess):
    client = batch_server.client()
    first = start_batch(client, [build_line(f"{n}", max_tokens=1500, ignore_eos=True) for n in range(300)])
    assert wait_until(120, lambda: client.batches.retrieve(first.id).status == "in_progress")
    second = start_batch(client, [build_line("a"), "no JSON"], completion_window="1s")
    wait_until(120, lambda: time.time() >= second.expires_at)
    client.batches.cancel(first.id)
    check_unstarted(client, wait_for_end(client, second.id), "expired")
    wait_for_end(client, first.id)


def check_unstarted(client: openai.OpenAI, batch: Batch, status: str) -> None:
    """Check the results of a batch with one valid and one invalid line, of which none ran."""
    assert batch.status == status
    assert (batch.request_counts.total, batch.request_counts.failed) == (2, 2)
    errors = read_results(client, batch.error_file_id)
    assert [error["custom_id"] for error in errors] == ["a", None]
    assert errors[0]["error"]["code"] == f"batch_{status}"


def test_each_common_prefix_is_computed_once(batch_server: ServerProcess):
    """80 lines over 10 system prompts, shuffled: ideal is every prompt's own part and each system prompt once."""
    check_computed(batch_server, build_shuffled_lines(80, 10))


@pytest.mark.full
def test_500_shuffled_lines_compute_each_of_10_system_prompts_once(batch_server: ServerProcess):
    check_computed(batch_server, build_shuffled_lines(500, 10, system_words=100))


def check_computed(server: ServerProcess, lines: list[dict[str, object]]) -> None:
    client = server.client()
    server.post("/cache/clear", {"model": "tiny"})  # prompts of other tests begin alike
    before = server.get_counters()
    batch = wait_for_end(client, start_batch(client, lines).id)
    assert batch.request_counts.completed == len(lines)
    after = server.get_counters()
    computed = batch.usage.input_tokens - batch.usage.input_tokens_details.cached_tokens
    assert after["prompt_entries"] - before["prompt_entries"] <= 1.01 * computed  # no line was computed twice
    tokens = [tokenize_prompt(server, line["body"]["messages"]) for line in lines]
    ideal = count_radix_tokens(tokens)
    assert sum(map(len, tokens)) > 3 * ideal  # so that sharing matters
    assert ideal <= computed <= 1.02 * ideal, (computed, ideal)


def tokenize_prompt(server: ServerProcess, messages: list[dict[str, str]]) -> tuple[int, ...]:
    prompt = server.post("/apply-template", {"model": "tiny", "messages": messages}).json()["prompt"]
    body = {"model": "tiny", "content": prompt, "add_special": True, "parse_special": True}
    return tuple(server.post("/tokenize", body).json()["tokens"])


def count_radix_tokens(prompts: list[tuple[int, ...]]) -> int:
    """Return the tokens that must be computed if every common prefix is computed once."""
    total, previous = 0, ()
    for prompt in sorted(prompts):
        shared = next((n for n, (a, b) in enumerate(zip(previous, prompt, strict=False)) if a != b), len(previous))
        total += len(prompt) - shared
        previous = prompt
    return total


def test_the_files_are_readable_by_the_user_only(batch_server: ServerProcess, data_directory: Path):
    batch_server.client().files.create(file=("in.jsonl", b"{}"), purpose="batch")
    paths = [data_directory / "batches", *(data_directory / "batches").rglob("*")]
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # a journal of SQLite
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert len(paths) > 2


def test_tenants_do_not_see_each_other(tmp_path: Path):
    model = f"tiny={models.get_path('successor-attention')}"
    with run_server(
        model,
        "--context",
        "512",
        "--sequences",
        "2",
        "--api-key",
        "one",
        "--api-key",
        "two",
        AFTERGLOW_DATA=str(tmp_path),
    ) as server:
        import openai

        one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        batch = wait_for_end(one, start_batch(one, [build_line("secret")]).id)
        assert batch.request_counts.completed == 1
        assert list(two.files.list()) == list(two.batches.list()) == []
        for call in (two.files.retrieve, two.files.content, two.files.delete):
            for id in (batch.input_file_id, batch.output_file_id):
                with pytest.raises(openai.NotFoundError):
                    call(id)
        for call in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        with pytest.raises(openai.BadRequestError):
            two.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )


def test_a_data_directory_that_cannot_be_created_is_an_error_with_its_path_in_the_log_only(tmp_path: Path):
    (tmp_path / "file").touch()
    data = str(tmp_path / "file" / "data")
    with run_server(f"tiny={models.get_path('attention')}", AFTERGLOW_DATA=data) as server:
        upload = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        responses = [
            server.http.get("/v1/files"),
            server.http.get("/v1/batches"),
            server.http.post("/v1/files", **upload),
        ]
        assert [response.status_code for response in responses] == [503] * 3
        for error in (response.json()["error"] for response in responses):
            assert (error["code"], str(tmp_path) in error["message"]) == ("batches_unavailable", False)
            assert "cannot be used: Not a directory" in error["message"]
        assert server.wait_for_log(f"files and batches in {data}/batches cannot be used: .*Not a directory")
        assert server.chat()["status"] == 200
