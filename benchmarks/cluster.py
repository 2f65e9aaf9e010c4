"""Replicas on Ray: round-robin and prefix routing with and without a shared store, measured and simulated.

    python benchmarks/cluster.py                  # three arms and a killed replica on this machine, with SmolLM2
    python benchmarks/cluster.py --simulate       # 2 to 1,000 replicas, with measured costs
    python benchmarks/cluster.py --one-host       # how soon `serve --replicas` shares what was stored

The first one writes docs/scale/arms.svg, the second one docs/scale/simulation.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from cluster_simulation import POLICIES, REPLICA_COUNTS, Costs, simulate
from peers import Afterglow, ServerSize

from afterglow import registry

CONVERSATIONS, TURNS, REPLICAS = 8, 5, 2
WORDS = Path(__file__).read_text().split()
PICTURES = Path(__file__).parents[1] / "docs" / "scale"
PORT = 8123
LIMITS = (2.0, 1.1, 1.02)  # of computed per needed tokens, of the three arms
PAUSES = (0.1, 0.25, 0.5, 1.0)  # seconds between an answer and the request to the other replica
ROUNDS = 10  # prompts for each pause
COLORS = ("#4269d0", "#efb118", "#3ca951", "#ff725c")


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
    shared = 0  # tokens that all conversations begin with
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
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            computed = usage["prompt_tokens"] - cached
            shared = max(shared, 0 if turn else cached)
            result.computed += computed
            result.computed_by_turn[turn] += computed
            result.needed += usage["prompt_tokens"] - held[number]
            held[number] = usage["prompt_tokens"] + usage["completion_tokens"] - 1
            result.seconds_to_first_token.append(answer["seconds"])
            result.texts.append(content)
            conversations[number].append({"role": "assistant", "content": content})
    result.needed -= shared * (CONVERSATIONS - 1)
    return result


def build_client(url: str, model: str, max_tokens: int) -> Callable[[list[dict[str, str]]], dict[str, Any]]:
    """Return a function that sends a conversation, once more if the first attempt fails."""

    def ask(messages: list[dict[str, str]]) -> dict[str, Any]:
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        for _ in range(2):
            started = time.perf_counter()
            with contextlib.suppress(httpx.HTTPError, ValueError):
                answer: dict[str, Any] = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240).json()
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

    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="warning", log_to_driver=False)
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


class ReplicatedAfterglow(Afterglow):
    """`afterglow serve --replicas 2`."""

    name = "replicas"

    def build_command(self) -> list[str]:
        return [*super().build_command(), "--replicas", "2"]


def measure_sharing(model: str, words: int) -> None:
    """Print how often a replica finds what the other one stored, by the seconds after the answer."""
    size = ServerSize(model=registry.resolve(model), threads=1, slots=1, context=4096)
    seeds = itertools.count()
    with tempfile.TemporaryDirectory() as directory:
        server = ReplicatedAfterglow(size, Path(directory))
        server.start()
        try:
            url = f"http://{server.host}:{server.port}/completion"
            for pause in PAUSES:
                found = prompt_tokens = cached_tokens = 0
                for seed in itertools.islice(seeds, ROUNDS):
                    body = {"prompt": build_message(seed, words), "n_predict": 4, "temperature": 0}
                    httpx.post(url, json={**body, "id_slot": 0}, timeout=240).raise_for_status()
                    time.sleep(pause)
                    answer = httpx.post(url, json={**body, "id_slot": 1}, timeout=240).json()
                    cached = answer["timings"]["cache_n"]
                    found += cached > 0
                    cached_tokens += cached
                    prompt_tokens += answer["tokens_evaluated"]
                print(f"after {pause} s: {found} of {ROUNDS} found, {cached_tokens} of {prompt_tokens} tokens cached")
        finally:
            server.stop()


def run_simulation() -> list[dict[str, float | str]]:
    """Simulate all policies with all numbers of replicas, and print a table."""
    costs, rows = Costs(), []
    print("| replicas | policy | store | hit rate | computed/needed | median s | p95 s | store MB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for count in REPLICA_COUNTS:
        for policy, has_store in itertools.product(POLICIES, (False, True)):
            row = simulate(policy, count, costs, has_store=has_store).summarize(costs)
            rows.append({**row, "store": has_store})
            shown = f"{row['hit_rate']:.3f} | {row['computed_per_needed']:.2f} | {row['median_seconds']:.2f}"
            more = f"{row['p95_seconds']:.1f} | {row['store_mb_per_second']:,.0f}"
            print(f"| {count:,} | {policy} | {'yes' if has_store else 'no'} | {shown} | {more} |", flush=True)
    return rows


def draw_bars(title: str, bars: Sequence[tuple[str, float]], limits: Sequence[float]) -> str:
    """Return a picture of horizontal bars with their limits."""
    scale, height = 420 / max(*(value for _, value in bars), *limits), 30
    lines = [f'<text x="10" y="20" font-size="14">{title}</text>']
    for index, ((name, value), limit) in enumerate(zip(bars, limits, strict=True)):
        y = 35 + index * height
        lines += [
            f'<text x="10" y="{y + 15}">{name}</text>',
            f'<rect x="230" y="{y}" width="{value * scale:.0f}" height="20" fill="{COLORS[index]}"/>',
            f'<text x="{235 + value * scale:.0f}" y="{y + 15}">{value:.2f}</text>',
            f'<rect x="{230 + limit * scale:.0f}" y="{y - 3}" width="1" height="26" fill="#888"/>',
        ]
    return build_svg(lines, 720, 45 + height * len(bars))


def draw_curves(title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a picture of curves over a logarithmic x axis."""
    top = max(y for points in curves.values() for _, y in points)
    place_x = lambda x: 60 + 580 * math.log10(x / 2) / math.log10(500)  # noqa: E731
    place_y = lambda y: 240 - 190 * y / top  # noqa: E731
    lines = [f'<text x="10" y="20" font-size="14">{title}</text>']
    lines += [f'<text x="{place_x(x):.0f}" y="260">{x:,}</text>' for x in REPLICA_COUNTS]
    lines += [f'<text x="10" y="{place_y(y) + 4:.0f}">{y:.1f}</text>' for y in (0, top / 2, top)]
    for index, (name, points) in enumerate(curves.items()):
        path = " ".join(f"{place_x(x):.0f},{place_y(y):.0f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[index]}" stroke-width="2"/>')
        lines.append(f'<text x="{80 + 200 * index}" y="40" fill="{COLORS[index]}">{name}</text>')
    return build_svg(lines, 720, 270)


def build_svg(lines: Sequence[str], width: int, height: int) -> str:
    """Return the file of a picture."""
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    start = f'<svg {style} viewBox="0 0 {width} {height}">'
    return "\n".join([start, f'<rect width="{width}" height="{height}" fill="white"/>', *lines, "</svg>", ""])


def main() -> None:
    """Run the arms or the simulator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--one-host", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--words", type=int, default=120)
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.one_host:
        measure_sharing(arguments.model, arguments.words)
        return
    PICTURES.mkdir(exist_ok=True)
    if arguments.simulate:
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in [row for row in run_simulation() if row["store"]]:
            curves.setdefault(str(row["policy"]), []).append((float(row["replicas"]), float(row["p95_seconds"])))
        picture = draw_curves(
            "simulated, with store: 95th percentile of seconds to the first token, by replicas", curves
        )
        (PICTURES / "simulation.svg").write_text(picture)
        return
    options = {"context": 4096, "sequences": 4, "threads": 1, "ram_cache_bytes": 2**29}
    results = run_arms(arguments.model, words=arguments.words, max_tokens=arguments.max_tokens, **options)
    for result in results.values():
        median = statistics.median(result.seconds_to_first_token)
        print(f"{result.name}: computed/needed {result.computed}/{result.needed} = {result.ratio:.3f}, "
              f"by turn {result.computed_by_turn}, median {median:.2f} s, failed {result.failed}")  # fmt: skip
    bars = [(result.name, result.ratio) for result in results.values()][:3]
    (PICTURES / "arms.svg").write_text(draw_bars("measured: computed tokens per needed token", bars, LIMITS))


if __name__ == "__main__":
    main()
