"""Replicas on Ray: round-robin and prefix routing with and without a shared store, measured and simulated.

    python benchmarks/cluster.py                  # three arms and a killed replica on this machine, with SmolLM2
    python benchmarks/cluster.py --simulate       # 2 to 1,000 replicas, with measured costs

Both write their results to benchmarks/results/, from which `--plot` makes the pictures of docs/scale.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

CONVERSATIONS, TURNS, REPLICAS = 8, 5, 2
WORDS = Path(__file__).read_text().split()
RESULTS = Path(__file__).parent / "results" / "cluster.json"
PORT = 8123


@dataclass
class ArmResult:
    """Tokens that one arm computed and needed to compute, and how its requests went."""

    name: str
    computed: int = 0
    needed: int = 0
    failed: int = 0
    computed_by_turn: list[int] = field(default_factory=lambda: [0] * TURNS)
    seconds_to_first_token: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Computed tokens for each token that is new in its conversation: 1 is ideal."""
        return self.computed / self.needed


def build_message(seed: int, words: int) -> str:
    """Return a text that no other message begins with."""
    generator = random.Random(seed)
    return f"{seed} " + " ".join(generator.choice(WORDS) for _ in range(words))


def run_conversations(
    ask: Callable[[list[dict[str, str]]], dict[str, Any]],
    name: str,
    *,
    words: int = 60,
    seed: int = 0,
    before_turn: Callable[[int], None] = lambda turn: None,
) -> ArmResult:
    """Run all conversations turn by turn, in another order in each turn, one request at a time."""
    result, order = ArmResult(name), random.Random(seed)
    conversations: list[list[dict[str, str]]] = [[] for _ in range(CONVERSATIONS)]
    held = [0] * CONVERSATIONS  # tokens of each conversation that were computed once
    for turn in range(TURNS):
        before_turn(turn)
        for number in order.sample(range(CONVERSATIONS), CONVERSATIONS):
            text = build_message(1000 * seed + 10 * number + turn, words)
            conversations[number].append({"role": "user", "content": text})
            answer = ask(conversations[number])
            if "usage" not in answer:
                result.failed += 1
                conversations[number].pop()
                continue
            usage, content = answer["usage"], answer["choices"][0]["message"]["content"]
            computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            result.computed += computed
            result.computed_by_turn[turn] += computed
            result.needed += usage["prompt_tokens"] - held[number]
            held[number] = usage["prompt_tokens"] + usage["completion_tokens"] - 1
            result.seconds_to_first_token.append(answer["seconds"])
            result.texts.append(content)
            conversations[number].append({"role": "assistant", "content": content})
    return result


def build_client(url: str, model: str, max_tokens: int) -> Callable[[list[dict[str, str]]], dict[str, Any]]:
    """Return a function that sends a conversation, once more if the first attempt fails."""
    client = httpx.Client(base_url=url, timeout=240)

    def ask(messages: list[dict[str, str]]) -> dict[str, Any]:
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        for _ in range(2):
            started = time.perf_counter()
            with contextlib.suppress(httpx.HTTPError, ValueError):
                answer: dict[str, Any] = client.post("/v1/chat/completions", json=body).json()
                if "usage" in answer:
                    return {**answer, "seconds": time.perf_counter() - started}
        return {}

    return ask


def list_replica_processes() -> list[psutil.Process]:
    """Return the processes of the engine replicas."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "ServeReplica" in " ".join(process.info["cmdline"] or ()) and ":engine" in " ".join(process.info["cmdline"]):
            found.append(process)
    return found


@contextlib.contextmanager
def serve_application(model: str, **options: Any) -> Iterator[str]:
    """Run the application on a Ray cluster of this machine; yield its URL."""
    from ray import serve

    from afterglow.cluster import deployment

    serve.start(http_options={"port": PORT}, logging_config={"log_level": "WARNING"})
    settings = {"replica_options": {"ray_actor_options": {"num_cpus": 0.5}}, "replicas": REPLICAS}
    serve.run(deployment(model, name="model", **{**settings, **options}))
    try:
        yield f"http://127.0.0.1:{PORT}"
    finally:
        serve.delete("default")


def run_arms(model: str, *, words: int, max_tokens: int, **options: Any) -> dict[str, ArmResult]:
    """Run the three arms, then the last one again with a replica that is killed before its third turn."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, logging_level="warning", log_to_driver=False)
    results: dict[str, ArmResult] = {}
    try:
        for name, policy, has_store in (
            ("round-robin", "round_robin", False),
            ("round-robin with store", "round_robin", True),
            ("prefix router with store", "prefix", True),
        ):
            with tempfile.TemporaryDirectory() as store:
                shared = {"shared_cache": store} if has_store else {}
                with serve_application(model, policy=policy, disk_cache=False, **shared, **options) as url:
                    ask = build_client(url, "model", max_tokens)
                    results[name] = run_conversations(ask, name, words=words)
                    print(f"{name}: {results[name].ratio:.3f}, failed {results[name].failed}", flush=True)
                    if policy == "prefix":
                        results["killed"] = run_conversations(
                            ask,
                            "prefix router with store, killed replica",
                            words=words,
                            seed=1,
                            before_turn=kill_in_third,
                        )
                        print(f"killed: {results['killed'].ratio:.3f}, failed {results['killed'].failed}", flush=True)
    finally:
        from ray import serve

        serve.shutdown()
        ray.shutdown()
    return results


def kill_in_third(turn: int) -> None:
    """Kill a replica before the third turn."""
    if turn == 2:
        os.kill(list_replica_processes()[0].pid, signal.SIGKILL)


def main() -> None:
    """Run the arms or the simulator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--words", type=int, default=120)
    arguments = parser.parse_args()
    if arguments.simulate:
        sys.exit("see simulate()")
    options = {"context": 4096, "sequences": 4, "threads": 1, "ram_cache_bytes": 2**29}
    results = run_arms(arguments.model, words=arguments.words, max_tokens=16, **options)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))


if __name__ == "__main__":
    main()
