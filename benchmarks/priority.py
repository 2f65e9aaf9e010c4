"""Time to first token of an interactive request, alone and beside eight background prompts.

The background requests have a negative priority, long prompts and answers, and are replaced as soon as they end. Every
prompt is new, so that nothing is a prefix hit. The interactive request arrives at random moments of their decodes.

    python benchmarks/priority.py [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import threading
import time

from report import Row, print_report
from synthetic_inputs import random_text

import afterglow

MAX_SHARE = 1.3
BACKGROUND_REQUESTS = 8
BACKGROUND_WORDS, BACKGROUND_TOKENS = 600, 64
INTERACTIVE_WORDS = 250
CONTEXT, SEQUENCES = 2048, 8  # one less than there are requests: the interactive one takes a sequence


def measure_first_token(model: afterglow.Model, text: str) -> float:
    """Return the seconds until the first token of a new prompt."""
    started = time.perf_counter()
    for _ in model.stream(text, max_tokens=2, ignore_eos=True):
        return time.perf_counter() - started
    raise AssertionError("no token")


class BackgroundLoad:
    """Threads that each keep one background request running."""

    def __init__(self, model: afterglow.Model) -> None:
        self._model = model
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=[n]) for n in range(BACKGROUND_REQUESTS)]

    def __enter__(self) -> BackgroundLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        for turn in itertools.count():
            text = random_text(f"background {number} {turn}", BACKGROUND_WORDS)
            for _ in self._model.stream(text, max_tokens=BACKGROUND_TOKENS, ignore_eos=True, priority=-10):
                if self._stop.is_set():
                    return


def measure(rounds: int, threads: int) -> list[Row]:
    pauses = random.Random(1)
    with afterglow.load(
        "smollm2", fetch=True, host="process", context=CONTEXT, sequences=SEQUENCES, threads=threads, disk_cache=False
    ) as model:
        texts = (random_text(f"interactive {number}", INTERACTIVE_WORDS) for number in itertools.count())
        measure_first_token(model, next(texts))
        alone = statistics.median(measure_first_token(model, next(texts)) for _ in range(rounds))
        seconds = []
        with BackgroundLoad(model):
            for _ in range(rounds):
                time.sleep(1 + pauses.random())
                seconds.append(measure_first_token(model, next(texts)))
    beside = statistics.median(seconds)
    return [
        Row("first token alone", alone, "s"),
        Row(
            f"first token beside {BACKGROUND_REQUESTS} background prompts",
            beside,
            "s",
            share=beside / alone,
            bar=MAX_SHARE,
            note=f"from {min(seconds):.3f} to {max(seconds):.3f} s",
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    return print_report("priority", measure(3 if arguments.quick else 15, arguments.threads))


if __name__ == "__main__":
    sys.exit(main())
