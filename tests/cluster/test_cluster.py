"""Replicas on a Ray cluster of this machine: the three arms, a killed replica, identical tokens, no orphans."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import psutil
import pytest

from afterglow.testing import models
from cluster import LIMITS, TURNS, ArmResult, list_replica_processes, run_arms, serve_application
from support.server_process import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
OPTIONS = {"context": 4096, "sequences": 4, "threads": 1, "ram_cache_bytes": 2**29}


@pytest.fixture(scope="module")
def arms(smollm2: object) -> dict[str, ArmResult]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    return run_arms("smollm2", words=25, max_tokens=4, **OPTIONS)


def test_each_arm_computes_at_most_its_share(arms: dict[str, ArmResult]) -> None:
    ratios = [arms[name].ratio for name in ("round-robin", "round-robin with store", "prefix router with store")]
    assert all(ratio <= limit for ratio, limit in zip(ratios, LIMITS, strict=True)), ratios
    assert ratios[0] > ratios[1], "the store saves something"
    assert not any(arm.failed for arm in arms.values())


def test_a_killed_replica_costs_no_request_and_at_most_one_turn(arms: dict[str, ArmResult]) -> None:
    killed, whole = arms["killed"], arms["prefix router with store"]
    assert killed.failed == 0
    assert killed.computed - killed.needed <= whole.needed / TURNS


@pytest.fixture
def url() -> Iterator[str]:
    import ray
    from ray import serve

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    path = str(models.get_path("successor-attention"))
    options = {"context": 2048, "sequences": 2, "threads": 1, "deterministic": True, "disk_cache": False}
    with serve_application(path, policy="round_robin", **options) as url:
        yield url
    serve.shutdown()
    ray.shutdown()


def test_the_api_works_on_a_cluster_and_leaves_no_process(url: str) -> None:
    client = httpx.Client(base_url=url, timeout=120)
    replicas = list_replica_processes()
    engines = [child for replica in replicas for child in replica.children(recursive=True)]
    assert len(replicas) == 2
    body = {"model": "model", "prompt": "abc " * 50, "max_tokens": 8, "temperature": 0}
    texts = {client.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 1, "deterministic mode: whichever replica answers"
    contents = client.get("/cache").json()["models"]["model"]
    assert [sequence["tokens"] > 0 for sequence in contents["sequences"]].count(True) >= 2, "both were asked"
    with client.stream(
        "POST", "/v1/completions", json={**body, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    ) as stream:
        next(stream.iter_lines())
    assert wait_until(60, lambda: not client.get("/cache").json()["models"]["model"]["busy"]), "cancelled on disconnect"
    assert (
        client.post(
            "/v1/messages", json={"model": "model", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
        ).status_code
        == 200
    )
    client.close()
    from ray import serve

    serve.delete("default")
    assert not psutil.wait_procs([*replicas, *engines], timeout=60)[1], "an orphan process is left"
