"""`afterglow batch`: one result for each line, in the order of the input, also after an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from afterglow.server.batches.store import BatchStore
from afterglow.testing import models
from support.batch_lines import build_line, build_shuffled_lines, encode_lines
from support.commands import AFTERGLOW, GREEDY, run_in_process
from support.server_process import CYCLE, wait_until

pytestmark = pytest.mark.native

MODEL = str(models.get_path("successor-attention"))
OPTIONS = (MODEL, "--context", "1024", "--sequences", "2", "--threads", "1")


def run_batch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_in_process("batch", *map(str, arguments), *OPTIONS)


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_have_the_order_of_the_input_and_common_prefixes_are_cached(tmp_path: Path):
    lines = [
        *build_shuffled_lines(20, 2),
        "no JSON",
        build_line("completion", "/v1/completions", prompt="abc"),
        build_line("response", "/v1/responses", input="hello", max_output_tokens=3),
    ]
    del lines[-1]["body"]["max_tokens"]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(encode_lines(lines))
    result = run_batch(source, target)
    assert (result.returncode, result.stdout) == (1, ""), result.stderr  # a line failed
    assert "22 of 23 lines completed, 1 failed" in result.stderr
    results = read_lines(target)
    assert [r["custom_id"] for r in results] == [None if line == "no JSON" else line["custom_id"] for line in lines]
    assert results[20]["error"]["line"] == 21
    assert results[21]["response"]["body"]["choices"][0]["text"] == "defg"
    usages = [r["response"]["body"]["usage"] for r in results[:20]]
    computed = sum(u["prompt_tokens"] - u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert computed < 0.3 * sum(u["prompt_tokens"] for u in usages)
    assert not (tmp_path / "out.jsonl.partial").exists()
    exists = run_batch(source, target)
    assert (exists.returncode, "out.jsonl exists: remove it" in exists.stderr) == (1, True)


def test_a_killed_batch_continues_and_refuses_another_input(tmp_path: Path):
    source, target, partial = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    source.write_bytes(encode_lines([build_line(f"{n}", max_tokens=300, ignore_eos=True) for n in range(16)]))
    command = [*AFTERGLOW, "batch", str(source), str(target), *OPTIONS]
    store = BatchStore(partial)

    def count_results() -> int:
        batches = store.list_unfinished() if store.exists else []
        return store.count_results(batches[0])["completed"] if batches else 0

    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, **GREEDY}) as process:
        assert wait_until(120, lambda: count_results() >= 2)
        other = run_batch(source, target)
        assert "another process is writing" in other.stderr
        process.send_signal(signal.SIGKILL)
    done = count_results()
    assert 2 <= done < 16
    assert not target.exists()
    before = list(store.list_results(store.list_unfinished()[0].id))
    store.close()

    foreign = tmp_path / "foreign.jsonl"
    foreign.write_bytes(encode_lines([build_line("other")]))
    refused = run_batch(foreign, target)
    assert (refused.returncode, "has the results of another input" in refused.stderr) == (1, True)

    result = run_batch(source, target)
    assert result.returncode == 0, result.stderr
    results = read_lines(target)
    assert [r["custom_id"] for r in results] == [f"{n}" for n in range(16)]
    for r in results:
        assert r["response"]["body"]["choices"][0]["message"]["content"] == (CYCLE * 20)[:300]
    assert set(before) <= set(target.read_text().splitlines())  # they did not run again
    assert not partial.exists()


def test_a_mistyped_model_changes_nothing(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(encode_lines([build_line("a", max_tokens=2)]))
    result = run_in_process("batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "no-such-model")
    assert (result.returncode, "no-such-model" in result.stderr) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl").returncode == 0


def test_a_missing_or_empty_input_changes_nothing(tmp_path: Path):
    result = run_batch(tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    assert (result.returncode, "none.jsonl cannot be read" in result.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "in.jsonl").write_text("\n")
    result = run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (result.returncode, "has no lines" in result.stderr) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_standard_output_is_refused_because_a_batch_could_not_continue(tmp_path: Path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(encode_lines([build_line("only")]))
    result = run_batch(source, "-")
    assert (result.returncode, "`OUT.jsonl` must be a file" in result.stderr) == (1, True), result.stderr
