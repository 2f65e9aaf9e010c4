"""What does deterministic mode cost, and how far apart are the answers without it?

Without it, the shape of a batch moves logits by about 1e-3, so that the same prompt computed cold, after a reuse, or
in company may part where two tokens are nearly as likely. With it every sequence is computed alone and in chunks of
a grid, which costs the gain of batching and up to a chunk of reuse.

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


def prompts(model: afterglow.Model, count: int) -> list[list[int]]:
    text = model.tokenize(TEXT.read_text())
    return [text[:70] + text[70 + 15 * n : 130 + 18 * n] for n in range(count)]


def together(model: afterglow.Model, batch: list[list[int]], tokens: int) -> list[list[Token]]:
    """All at once; the tokens of each, with their logprobs."""
    streams = [model._get_host().submit(model.build_request(prompt, max_tokens=tokens, logprobs=1)) for prompt in batch]
    return [[event for event in stream if isinstance(event, Token)] for stream in streams]


def compare(model: afterglow.Model, count: int, tokens: int) -> dict[str, float]:
    """Cold and alone against in company and warm."""
    every = prompts(model, count)
    alone = []
    for prompt in every:
        model.clear_cache()
        alone += together(model, [prompt], tokens)
    started, company = time.perf_counter(), []
    for start in range(0, count, 4):
        company += together(model, every[start : start + 4], tokens)
    seconds = time.perf_counter() - started
    same, apart = 0, []
    for one, other in zip(alone, company, strict=True):
        same += [token.token for token in one] == [token.token for token in other]
        for first, second in zip(one, other, strict=False):
            if first.token != second.token:
                break
            apart.append(abs((first.logprob or 0) - (second.logprob or 0)))
    return {
        "same_answers": same / count,
        "median_logprob_difference": statistics.median(apart),
        "largest_logprob_difference": max(apart),
        "tokens_per_second_in_company": count * tokens / seconds,
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="less work, the same checks, under 90 s")
    quick = arguments.parse_args().quick
    results = {}
    for name, settings in MODES.items():
        with afterglow.load("smollm2", context=1024, fetch=True, engine=settings) as model:
            results[name] = compare(model, 4 if quick else 16, 8 if quick else 24)
    for name, numbers in results.items():
        print(f"{name:14}", "  ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
    slower = (
        results["default"]["tokens_per_second_in_company"] / results["deterministic"]["tokens_per_second_in_company"]
    )
    print(f"deterministic mode takes {slower:.2f} times as long for four answers at once")
    print(json.dumps({"benchmark": "deterministic", "results": results, "slower": slower}))
    return 0 if results["deterministic"]["same_answers"] == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
