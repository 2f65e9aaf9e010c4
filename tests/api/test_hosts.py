"""One `Model` over two hosts: every method gives the same result with the engine in a thread and in a child process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import afterglow
from afterglow.engine.host.process import EngineProcess
from afterglow.errors import Cancelled, Closed, EngineCrashed, InvalidArgument, PromptTooLong, WrongState
from afterglow.testing import models
from support.media_prompts import noise_image
from support.server_process import wait_until

pytestmark = pytest.mark.native
CYCLE = models.CYCLE.decode()
HOSTS = ("thread", "process")
PROMPT = CYCLE[:20]


def load(host: str, file: str = "successor-attention", **options: Any) -> afterglow.Model:
    defaults: dict[str, Any] = {"context": 256, "threads": 1, "disk_cache": False}
    return afterglow.load(models.get_path(file), host=host, **(defaults | options))  # type: ignore[arg-type]


def kill_child(model: afterglow.Model) -> None:
    host = model._lifecycle.get_host()
    assert isinstance(host, EngineProcess)
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)


def stream_in_asyncio(model: afterglow.Model) -> list[str]:
    async def collect() -> list[str]:
        return [text async for text in model.stream_async(PROMPT, max_tokens=6)]

    return asyncio.run(collect())


def save_and_restore(model: afterglow.Model, path: Path) -> int:
    model.complete(PROMPT * 3, max_tokens=1)
    model.snapshot("kept")
    model.save_snapshot("kept", path)
    model.clear_cache()
    model.load_snapshot("loaded", path)
    model.restore("loaded")
    return model.complete(PROMPT * 3, max_tokens=1).usage.cached_tokens


METHODS: dict[str, Callable[[afterglow.Model, Path], Any]] = {
    "chat": lambda model, path: model.chat("hello", max_tokens=12).text,
    "chat_async": lambda model, path: asyncio.run(model.chat_async("hello", max_tokens=12)).text,
    "chat_stream": lambda model, path: [part.text for part in model.chat("hello", stream=True, max_tokens=6)],
    "complete": lambda model, path: model.complete(PROMPT, max_tokens=12).text,
    "choices": lambda model, path: [
        choice.text for choice in model.complete(PROMPT, n=3, max_tokens=4, temperature=1.0, seed=1).choices
    ],
    "stream": lambda model, path: list(model.stream(PROMPT, max_tokens=6)),
    "stream_async": lambda model, path: stream_in_asyncio(model),
    "logprobs": lambda model, path: [round(value, 4) for value in model.logprobs(PROMPT).logprobs],
    "long_logprobs": lambda model, path: [round(value, 4) for value in model.logprobs(CYCLE * 20).logprobs[::50]],
    "score": lambda model, path: [
        (round(value, 4), alternatives[0][0]) for value, alternatives in model.score(model.tokenize(PROMPT), 2, first=5)
    ],
    "perplexity": lambda model, path: round(model.perplexity(PROMPT), 4),
    "embed": lambda model, path: np.round(model.embed(PROMPT), 3).tolist(),
    "fork": lambda model, path: (model.complete(PROMPT, max_tokens=1), model.fork())[1] in range(4),
    "snapshots": lambda model, path: save_and_restore(model, path / "snapshot"),
    "explain": lambda model, path: (model.complete(PROMPT, max_tokens=1), model.explain(PROMPT + "x").shared_entries)[
        1
    ],
    "pin": lambda model, path: (model.pin(PROMPT), model.unpin(PROMPT), model.unpin(PROMPT)),
    "clear_cache": lambda model, path: (
        model.complete(PROMPT, max_tokens=1),
        model.clear_cache(),
        model.complete(PROMPT, max_tokens=1).usage.cached_tokens,
    )[2],
    "cache_contents": lambda model, path: (
        model.complete(PROMPT, max_tokens=1),
        max(sequence.tokens for sequence in model.get_cache_contents().sequences),
    )[1],
    "stats": lambda model, path: (
        model.complete(PROMPT, max_tokens=3),
        model.get_stats().counters["prompt_entries"],
    )[1],
    "capabilities": lambda model, path: sorted(model.capabilities),
    "info": lambda model, path: (model.info, model.context_length, model.fingerprint, model.chat_template),
}


@pytest.fixture(scope="module")
def both_hosts() -> Iterator[tuple[afterglow.Model, ...]]:
    with load("thread") as in_thread, load("process") as in_process:
        for model in (in_thread, in_process):  # creates the contexts for scoring and embeddings
            model.logprobs(CYCLE * 20)
            model.embed("abc")
        yield in_thread, in_process


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_same_result_on_both_hosts(
    method: str, both_hosts: tuple[afterglow.Model, ...], tmp_path: Path
) -> None:
    expected, result = (METHODS[method](model, tmp_path) for model in both_hosts)
    assert result == expected


@pytest.mark.parametrize("host", HOSTS)
def test_the_load_states_of_a_model_work_on_every_host(host: str) -> None:
    with load(host, state="cold") as model:
        assert (model.state, model.is_loaded) == ("cold", False)
        with pytest.raises(WrongState):
            model.complete(PROMPT)
        model.warm()
        assert model.tokenize("abc")
        with pytest.raises(WrongState, match="active"):
            model.complete(PROMPT)
        for _ in range(2):
            model.activate()
            assert model.complete(PROMPT, max_tokens=3).text == CYCLE[20:23]
            model.deactivate()
            assert model.state == "warm"
        model.unload()
        assert model.state == "cold"
    with pytest.raises(Closed):
        model.activate()


@pytest.mark.parametrize("host", HOSTS)
def test_errors_have_the_same_types_on_every_host(host: str) -> None:
    with load(host) as model:
        with pytest.raises(PromptTooLong) as too_long:
            model.complete([30] * 300)
        assert (too_long.value.cells, too_long.value.limit) == (300, 256)
        with pytest.raises(InvalidArgument, match="no snapshot"):
            model.restore("missing")
        with pytest.raises(InvalidArgument, match="sequence"):
            model.fork(99)
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(Cancelled):
            model.complete(PROMPT, max_tokens=200, cancel=cancel)
    with load(host, "embedding") as model, pytest.raises(InvalidArgument, match="only computes embeddings"):
        model.complete("hello")


@pytest.mark.parametrize("host", HOSTS)
def test_images_can_be_in_prompts_on_every_host(host: str) -> None:
    with load(host, "colors", projector=models.get_path("projector-colors"), context=512) as model:
        assert model.supports("image")
        completion = model.complete(["look: ", noise_image(1)], max_tokens=2)
        assert completion.usage.media_tokens > 0


def test_a_model_can_have_another_name() -> None:
    with load("thread", name="small") as model:
        assert model.name == "small"


def test_an_embedding_model_has_statistics_and_a_cache() -> None:
    with load("thread", "embedding") as model:
        assert model.get_stats().counters["decodes"] == 0
        assert all(not sequence.tokens for sequence in model.get_cache_contents().sequences)
        model.clear_cache()
        with pytest.raises(InvalidArgument, match="only computes embeddings"):
            model.clear_cache(0)


@pytest.mark.parametrize("host", ["thread", "process"])
@pytest.mark.parametrize(
    "start",
    [
        lambda model: model.chat(PROMPT, stream=True, ignore_eos=True),
        lambda model: model.stream(PROMPT, ignore_eos=True),
        lambda model: model.stream_async(PROMPT, ignore_eos=True),
    ],
    ids=["chat", "stream", "stream_async"],
)
def test_a_stream_that_is_dropped_before_it_is_read_ends_its_request(
    host: str, start: Callable[[afterglow.Model], object]
) -> None:
    with load(host, context=100_000) as model:

        def is_busy() -> bool:
            return any(sequence.busy for sequence in model.get_cache_contents().sequences)

        stream = start(model)
        assert wait_until(30, is_busy)
        del stream
        assert wait_until(30, lambda: not is_busy())
        assert max(sequence.tokens for sequence in model.get_cache_contents().sequences) < 90_000


def test_an_unknown_host_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="thread or process, not 'fiber'"):
        load("fiber")


def test_a_killed_child_fails_the_requests_in_flight_and_the_next_request_works() -> None:
    with load("process", context=4096) as model:
        stream = model.stream(PROMPT, max_tokens=4000)
        next(stream)
        kill_child(model)
        with pytest.raises(EngineCrashed):
            list(stream)
        assert model.complete(PROMPT, max_tokens=3).text == CYCLE[20:23]
        assert (model.state, model.restarts, model.needs_restart) == ("active", 1, False)


def test_a_child_that_cannot_be_restarted_is_reported_and_a_later_request_starts_it_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(models.get_path("successor-attention").read_bytes())
    with afterglow.load(path, host="process", context=256, threads=1, disk_cache=False) as model:
        path.rename(tmp_path / "away")
        kill_child(model)
        assert wait_until(60, lambda: model.needs_restart)
        assert model.state == "crashed"
        with pytest.raises(afterglow.AfterglowError):
            model.complete(PROMPT)
        (tmp_path / "away").rename(path)
        assert model.complete(PROMPT, max_tokens=3).text == CYCLE[20:23]
        assert model.state == "active"


@pytest.mark.parametrize("host", HOSTS)
def test_a_model_whose_engine_cannot_be_built_leaves_nothing_open(host: str, list_own_handles: Any) -> None:
    processes = set(psutil.Process().children(recursive=True))
    with pytest.raises(afterglow.AfterglowError):
        load(host, draft=models.get_path("hybrid"), context=2**25)
    assert set(psutil.Process().children(recursive=True)) <= processes
    assert not list_own_handles()


def test_prefixes_are_pinned_and_the_cache_is_cleared_in_the_engine_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    with load("process", disk_cache=True) as model:
        model.pin("abc" * 20)
        model.complete("abc" * 20, max_tokens=1)
        assert model.complete("abc" * 20, max_tokens=1).usage.cached_tokens > 0
        model.clear_cache()
        assert model.complete("abc" * 20, max_tokens=1).usage.cached_tokens == 0
        model.clear_cache()
        assert model.unpin("abc" * 20)
        assert not model.unpin("abc" * 20)
        with pytest.raises(PromptTooLong):
            model.pin("a" * 1000)
    assert not list(tmp_path.rglob("*.cells"))
