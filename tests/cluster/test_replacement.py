"""Replicas on Ray that join, drain and are upgraded under load, deployed by a config file as in docs/scale.md."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from afterglow.testing import models
from support.server_process import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
PORT = 8124
CONFIG = Path(__file__).parents[2] / "deploy" / "ray-serve.yaml"
LONG_TOKENS = 6000  # ten seconds or more


@dataclass
class Cluster:
    """A Ray cluster of this machine with one application."""

    dashboard: httpx.Client
    http: httpx.Client = field(default_factory=lambda: httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=300))

    def send_config(self, *, replicas: int, shutdown_seconds: float = 120.0) -> None:
        """Deploy the config file of the repository with other values, as `serve deploy` does."""
        config = yaml.safe_load(CONFIG.read_text())
        (application,) = config["applications"]
        config["http_options"] = {"host": "127.0.0.1", "port": PORT}
        application["args"] = {
            "model": str(models.get_path("successor-attention")),
            "name": "model",
            "context": 8192,
            "sequences": 1,
            "threads": 1,
            "disk_cache": False,
            "server": {"shutdown_seconds": shutdown_seconds, "log_level": "warning"},
            "replica_options": {"ray_actor_options": {"num_cpus": 0.1}},
        }
        application["deployments"] = [{"name": "engine", "num_replicas": replicas}]
        self.dashboard.put("/api/serve/applications/", json=config).raise_for_status()

    def deploy(self, *, replicas: int, shutdown_seconds: float = 120.0) -> list[psutil.Process]:
        """Deploy and wait until all replicas run; return their processes."""
        self.send_config(replicas=replicas, shutdown_seconds=shutdown_seconds)
        assert wait_until(300, lambda: self.is_settled(replicas)), self.get_application()
        assert wait_until(60, lambda: self.count_sequences() == replicas), "the limits of the ingress follow"
        return self.list_processes()

    def count_sequences(self) -> int:
        """Return how many sequences the ingress counts. A new ingress knows the model after its first request."""
        if "total_slots" not in (properties := self.http.get("/props").json()):
            assert self.complete("a").status_code == 200
            return self.count_sequences()
        return int(properties["total_slots"])

    def get_application(self) -> dict[str, Any]:
        applications = self.dashboard.get("/api/serve/applications/").json()["applications"]
        application: dict[str, Any] = applications.get("afterglow", {})
        return application

    def is_settled(self, replicas: int) -> bool:
        application = self.get_application()
        if application.get("status") != "RUNNING":
            return False
        states = [one["state"] for one in application["deployments"]["engine"]["replicas"]]
        return states == ["RUNNING"] * replicas

    def list_processes(self) -> list[psutil.Process]:
        replicas = self.get_application()["deployments"]["engine"]["replicas"]
        return [psutil.Process(one["pid"]) for one in replicas]

    def count_busy(self) -> int:
        """Return how many replicas serve a request."""
        sequences = self.http.get("/cache").json()["models"]["model"]["sequences"]
        return sum(sequence["busy"] for sequence in sequences)

    def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return self.http.post("/v1/completions", json=body)

    def stream(self, prompt: str, on_first: Callable[[], None], **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a stream of many tokens. `on_first` is called at the first one."""
        body = {"model": "model", "prompt": prompt, "max_tokens": LONG_TOKENS, "stream": True, "ignore_eos": True}
        events: list[dict[str, Any]] = []
        with self.http.stream("POST", "/v1/completions", json={**body, **fields}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) == 1:
                        on_first()
        return events


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    import ray
    from ray import serve

    os.environ["RAY_AUTH_MODE"] = "disabled"
    context = ray.init(address="local", num_cpus=4, include_dashboard=True, log_to_driver=False)
    with httpx.Client(base_url=f"http://{context.dashboard_url}", timeout=60) as dashboard:
        cluster = Cluster(dashboard)
        yield cluster
        processes = [one for replica in cluster.list_processes() for one in (replica, *replica.children())]
        serve.shutdown()
        ray.shutdown()
        cluster.http.close()
    assert not psutil.wait_procs(processes, timeout=60)[1], "an orphan process is left"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def start_streams(cluster: Cluster, pool: ThreadPoolExecutor, count: int) -> list[Future[list[dict[str, Any]]]]:
    """Start long streams, and wait until all have a token: each replica has one sequence, and serves one of them."""
    started = threading.Semaphore(0)
    streams = [pool.submit(cluster.stream, f"{number} abc", started.release) for number in range(count)]
    assert all(started.acquire(timeout=120) for _ in streams)
    assert cluster.count_busy() == count, "a replica has no stream"
    return streams


def start_waiting(cluster: Cluster, pool: ThreadPoolExecutor, count: int) -> list[Future[httpx.Response]]:
    """Send requests that wait for the streams of their replicas; return when the replicas have them."""
    waiting = [pool.submit(cluster.complete, f"{number} xyz") for number in range(count)]
    choices = lambda: cluster.http.get("/stats").json()["models"]["model"]["choices"]["waiting"]  # noqa: E731
    assert wait_until(60, lambda: choices() == count)
    assert not any(request.done() for request in waiting)
    return waiting


def get_finish_reason(events: list[dict[str, Any]]) -> str | None:
    reasons = [choice["finish_reason"] for event in events for choice in event.get("choices", ())]
    return next((reason for reason in reasons if reason), None)


def test_a_replica_that_joins_takes_load(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    cluster.deploy(replicas=1)
    (stream,) = start_streams(cluster, pool, 1)
    cluster.deploy(replicas=2)
    assert get_finish_reason(stream.result()) == "length", "the replica that was there goes on"
    streams = start_streams(cluster, pool, 2)  # asserts that both replicas serve one
    assert [get_finish_reason(stream.result()) for stream in streams] == ["length"] * 2


def test_a_replica_that_drains_finishes_its_streams_and_the_requests_that_wait(
    cluster: Cluster, pool: ThreadPoolExecutor
) -> None:
    before = cluster.deploy(replicas=2)
    engines = [child for replica in before for child in replica.children()]
    streams = start_streams(cluster, pool, 2)
    waiting = start_waiting(cluster, pool, 6)
    (left,) = cluster.deploy(replicas=1)
    assert left in before
    assert [get_finish_reason(stream.result()) for stream in streams] == ["length"] * 2
    assert [request.result().status_code for request in waiting] == [200] * 6
    gone = [process for process in (*before, *engines) if process not in (left, *left.children())]
    assert len(gone) == 2
    assert not psutil.wait_procs(gone, timeout=60)[1]


def test_a_replica_that_drains_too_long_fails_its_stream_and_another_one_serves_what_waits(
    cluster: Cluster, pool: ThreadPoolExecutor
) -> None:
    cluster.deploy(replicas=2, shutdown_seconds=0.1)
    streams = start_streams(cluster, pool, 2)
    waiting = start_waiting(cluster, pool, 6)
    cluster.send_config(replicas=1, shutdown_seconds=0.1)
    results = [stream.result() for stream in streams]
    assert sorted(get_finish_reason(events) or "none" for events in results) == ["length", "none"]
    (failed,) = [events for events in results if get_finish_reason(events) is None]
    assert "replica was lost" in failed[-1]["error"]["message"]
    assert [request.result().status_code for request in waiting] == [200] * 6


def test_an_upgrade_under_load_loses_no_request(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    before = cluster.deploy(replicas=2, shutdown_seconds=100.0)
    stopped = threading.Event()
    failures: list[str] = []
    finished = [0] * 6

    def send_requests(number: int) -> None:
        while not stopped.is_set():
            prompt = f"{number} {finished[number]} abc"
            try:
                if number % 2:
                    events = cluster.stream(prompt, lambda: None, max_tokens=50)
                    assert get_finish_reason(events) == "length", events[-1]
                else:
                    response = cluster.complete(prompt)
                    assert response.status_code == 200, response.text
            except Exception as error:
                failures.append(repr(error))
            finished[number] += 1

    clients = [pool.submit(send_requests, number) for number in range(len(finished))]
    try:
        assert wait_until(60, lambda: min(finished) >= 2)
        after = cluster.deploy(replicas=2, shutdown_seconds=99.0)
        upgraded = list(finished)
        assert wait_until(60, lambda: all(new > old + 1 for new, old in zip(finished, upgraded, strict=True)))
    finally:
        stopped.set()
        for client in clients:
            client.result()
    assert not failures, failures
    assert not set(before) & set(after), "every replica was replaced"
    with contextlib.suppress(psutil.NoSuchProcess):
        assert not psutil.wait_procs(before, timeout=60)[1]
