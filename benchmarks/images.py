"""Pictures in memory: what does the second question about a picture cost, and what a picture late in a conversation?

The first question encodes the picture and computes its rows; the second must encode nothing and compute its own words
only. A picture after a conversation of 2,000 tokens must cost what the picture costs, not what the conversation does.
On a plain model and on a hybrid one (M-RoPE), with projectors whose numbers mean nothing. llama-server of the same
build is shown beside it.

    python benchmarks/images.py [--quick]
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp
from PIL import Image
from shares import Row, report

import afterglow
from afterglow.api.model import Model
from afterglow.api.outputs import Completion
from afterglow.media.types import ImageData
from afterglow.testing.models.attention import Llama
from afterglow.testing.models.decoder import write_random_model
from afterglow.testing.models.hybrid import Qwen35
from afterglow.testing.models.projector import ProjectorSize, write_llava, write_qwen

PLAIN = Llama(embedding_length=512, layers=8, heads=8, kv_heads=4, feed_forward_length=1536)
HYBRID = Qwen35(
    embedding_length=512, layers=8, full_attention_interval=4, heads=8, kv_heads=2, head_size=64, feed_forward_length=1536, state_size=64, state_key_heads=4,
    state_heads=8,
)  # fmt: skip
SEES = ProjectorSize(
    embedding_length=128, feed_forward_length=512, heads=4, layers=6, image_pixels=64, text_embedding_length=512
)
LATE = 0.10  # of computing everything from the beginning
TURN = 12  # tokens of a question
ASIDE = 3  # tokens that stand around a picture, and the last one of an answer


def words(length: int, seed: int) -> list[int]:
    """Tokens that mean nothing; every model has them."""
    return [int(token) for token in np.random.default_rng(seed).integers(20, 250, length)]


def picture(seed: int, side: int = 64) -> ImageData:
    pixels = np.random.default_rng(seed).integers(0, 256, 3 * side * side, dtype=np.uint8)
    return ImageData(side, side, pixels.tobytes())


def counters(model: Model) -> tuple[int, int]:
    """Rows that were computed, and pictures that were encoded."""
    return model._get_host().call(lambda engine: (engine.counters.rows, engine.counters.encoded_media))


def asked(model: Model, prompt: list[Any], *boundaries: int) -> tuple[float, Completion, int, int]:
    """Seconds until the first token, the answer, and the rows and pictures it took. `boundaries` end messages."""
    before = counters(model)
    started = time.perf_counter()
    answer = model.complete(prompt, max_tokens=1, ignore_ends=True, boundaries=boundaries)
    seconds = time.perf_counter() - started
    rows, encoded = counters(model)
    return seconds, answer, rows - before[0], encoded - before[1]


def turns(name: str, model: Model) -> list[Row]:
    """Two questions about one picture."""
    shown: list[Any] = [*words(40, 1), picture(1), *words(TURN, 2)]
    first, answer, rows, encoded = asked(model, shown)
    second, _, later, again = asked(model, [*shown, *answer.tokens, *words(TURN, 3)])
    new = TURN + len(answer.tokens)
    assert (encoded, again) == (1, 0), "the second question encoded something"
    assert later == new, f"{later} rows where {new} are new"
    note = f"{rows} rows, 1 encoded; then {later} rows, 0 encoded"
    return [
        Row(f"{name}: first question about a picture", first, "s"),
        Row(f"{name}: second question", second, "s", second / first, None, note),
    ]


def late(name: str, model: Model, length: int) -> list[Row]:
    """A picture after a long conversation, and everything from the beginning."""
    said = words(length, 5)
    asked(model, said)
    best = []
    for seed in (11, 12, 13):
        seconds, answer, rows, encoded = asked(model, [*said, picture(seed), *words(TURN, seed)], length)
        assert encoded == 1
        best.append((rows, seconds))
    rows, warm = min(best)  # a hybrid model has its checkpoint there after the second
    new = answer.usage.media_tokens + TURN + ASIDE
    assert rows <= new, f"{rows} rows where {new} are new"
    model.clear_cache()
    cold, _, all_rows, _ = asked(model, [*said, picture(20), *words(TURN, 20)])
    return [
        Row(f"{name}: a picture and all before it", cold, "s", None, None, f"{all_rows:,} rows"),
        Row(f"{name}: a picture after {length:,} tokens", warm, "s", warm / cold, LATE, f"{rows:,} rows"),
    ]


def moved(name: str, model: Model) -> Row:
    """The same picture elsewhere: its rows are computed again, it is not encoded again."""
    shown = picture(30)
    first, *_ = asked(model, [*words(30, 31), shown, *words(TURN, 32)])
    again, _, _, encoded = asked(model, [*words(30, 33), shown, *words(TURN, 34)])
    assert encoded == 0
    return Row(f"{name}: the picture elsewhere", again, "s", again / first, None, "0 encoded")


def llama_server(name: str, path: Path, projector: Path, length: int) -> list[Row]:
    """The same questions to llama-server."""
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.mmproj.path = str(path), str(projector)
    settings.mmproj_use_gpu = False
    settings.warmup, settings.fit_params, settings.verbosity = True, False, 1
    settings.n_ctx, settings.n_parallel = length + 1024, 1
    settings.cpuparams.n_threads = 1
    serving = xllamacpp.Server(settings)
    with urllib.request.urlopen(f"{serving.listening_address}/props") as answer:
        marker = json.load(answer)["media_marker"]

    def ask(prompt: str, *pictures: ImageData) -> float:
        shown = {"prompt_string": prompt, "multimodal_data": [as_png(one) for one in pictures]}
        body = {"prompt": shown, "n_predict": 1, "cache_prompt": True, "ignore_eos": True}
        url = f"{serving.listening_address}/completion"
        asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        started = time.perf_counter()
        with urllib.request.urlopen(asked) as answer:
            answer.read()
        return time.perf_counter() - started

    def text(count: int, seed: int) -> str:
        return "".join(np.random.default_rng(seed).choice(list("bcdfgjklmpqsvxz"), count))

    ask(text(40, 1) + marker + text(5, 8), picture(40))  # a prompt that ends in a picture ends llama-server
    shown = text(40, 2) + marker + text(TURN, 3)
    first, second = ask(shown, picture(1)), ask(shown + text(TURN, 4), picture(1))
    said = text(length, 5)
    ask(said)
    warm = min(ask(said + marker + text(TURN, seed), picture(seed)) for seed in (11, 12, 13))
    cold = ask(text(length, 6) + marker + text(TURN, 7), picture(20))
    return [
        Row(f"{name}: llama-server, second question", second, "s", second / first, None, f"first {first:.3f} s"),
        Row(f"{name}: llama-server, after {length:,} tokens", warm, "s", warm / cold, None, f"all {cold:.3f} s"),
    ]


def as_png(shown: ImageData) -> str:
    file = io.BytesIO()
    Image.frombytes("RGB", (shown.width, shown.height), shown.pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def measured(quick: bool) -> list[Row]:
    length, rows = 2000, []
    with tempfile.TemporaryDirectory(prefix="afterglow-images-") as folder:
        root = Path(folder)
        write_random_model(root / "plain.gguf", PLAIN, seed=1)
        write_llava(root / "plain-sees.gguf", SEES)
        write_random_model(root / "hybrid.gguf", HYBRID, seed=5)
        write_qwen(root / "hybrid-sees.gguf", SEES)
        for name in ("plain", "hybrid"):
            path, projector = root / f"{name}.gguf", root / f"{name}-sees.gguf"
            options = {"context": length + 1024, "sequences": 2, "threads": 1}
            with afterglow.load(path, projector=projector, **options) as model:
                asked(model, [*words(20, 50), picture(50), *words(5, 51)])  # what every process pays once
                rows += [*turns(name, model), *late(name, model, length), moved(name, model)]
            if not quick or name == "plain":
                rows += llama_server(name, path, projector, length)
    return rows


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="llama-server beside one model only, the same bars")
    chosen = arguments.parse_args()
    os.environ["AFTERGLOW_DISK_CACHE"] = "off"
    rows = measured(chosen.quick)
    return report("images", rows)


if __name__ == "__main__":
    sys.exit(main())
