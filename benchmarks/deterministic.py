"""Cost of deterministic mode, and difference of the answers without it.

Without it, the batch shape changes logits by about 1e-3. Answers to the same prompt computed cold, after a prefix hit
or with concurrent requests may diverge if two tokens are nearly equally likely. With it, every sequence is computed
alone and in chunks of a grid, which loses the gain of batching and up to one chunk of each prefix hit.

    python benchmarks/deterministic.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import afterglow
from afterglow import EngineSettings
from afterglow.engine.types.request import Token

TEXT = Path(__file__).parents[1] / "tests" / "data" / "river.txt"
MODES = {"default": EngineSettings(), "deterministic": EngineSettings(deterministic=True)}


def build_prompts(model: afterglow.Model, count: int) -> list[list[int]]:
    text = model.tokenize(TEXT.read_text())
    return [text[:70] + text[70 + 15 * n : 130 + 18 * n] for n in range(count)]


def generate(model: afterglow.Model, prompts: list[list[int]], tokens: int) -> list[list[Token]]:
    """Submit all prompts at once and return the tokens of each, with logprobs."""
    requests = [model.build_request(prompt, max_tokens=tokens, logprobs=1) for prompt in prompts]
    streams = [model._get_host().submit(request) for request in requests]
    return [[event for event in stream if isinstance(event, Token)] for stream in streams]


def compare(model: afterglow.Model, count: int, tokens: int) -> dict[str, float]:
    """Compare answers computed cold and alone with answers computed warm and four at once."""
    prompts = build_prompts(model, count)
    alone = []
    for prompt in prompts:
        model.clear_cache()
        alone += generate(model, [prompt], tokens)
    started, concurrent = time.perf_counter(), []
    for start in range(0, count, 4):
        concurrent += generate(model, prompts[start : start + 4], tokens)
    seconds = time.perf_counter() - started
    same_answers, differences = 0, []
    for answer, concurrent_answer in zip(alone, concurrent, strict=True):
        same_answers += [token.token for token in answer] == [token.token for token in concurrent_answer]
        for first, second in zip(answer, concurrent_answer, strict=False):
            if first.token != second.token:
                break
            differences.append(abs((first.logprob or 0) - (second.logprob or 0)))
    return {
        "same_answers": same_answers / count,
        "median_logprob_difference": statistics.median(differences),
        "largest_logprob_difference": max(differences),
        "concurrent_tokens_per_second": count * tokens / seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less work, the same checks, under 90 s")
    quick = parser.parse_args().quick
    results = {}
    for name, settings in MODES.items():
        with afterglow.load("smollm2", context=1024, fetch=True, engine=settings) as model:
            results[name] = compare(model, 4 if quick else 16, 8 if quick else 24)
    for name, numbers in results.items():
        print(f"{name:14}", "  ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
    speeds = {name: numbers["concurrent_tokens_per_second"] for name, numbers in results.items()}
    slower = speeds["default"] / speeds["deterministic"]
    print(f"deterministic mode takes {slower:.2f} times as long for four concurrent answers")
    print(json.dumps({"benchmark": "deterministic", "results": results, "slower": slower}))
    return 0 if results["deterministic"]["same_answers"] == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
